"""Reductions along the row: what each thread has, and the exchange between the threads that share the row."""

import functools

from jaxnorm._rows.emit_moments import Moments
from jaxnorm._rows.expressions import (
    accumulator,
    c_type,
    combined,
    identity,
)
from jaxnorm._rows.graph import BOOL


class Reductions(Moments):
    """Reductions along the row."""

    def _pair(self, n, u) -> str:
        return self.row(f"pair_{n.number}", u)

    def _pairs(self, n) -> list[str]:
        """The words whose halves a maximum compares at once."""
        return [self._pair(n, u) for u in self.rows]

    def _local(self, n, u) -> str:
        return self.row(f"local_max_{n.number}", u)

    def _old(self, n, u) -> str:
        return self.row(f"old_max_{n.number}", u)

    def _packed(self, n) -> str:
        """The 16-bit dtype of the words whose halves a maximum compares at once, or ""."""
        if n.attr[0] != "max" or self.plan.vector < 2:
            return ""
        names = set()
        for a in n.args:
            if a.op != "input" or not self.program.inputs[a.attr[0]].whole:
                return ""
            names.add(self.program.inputs[a.attr[0]].dtype.name)
        name = names.pop() if len(names) == 1 else ""
        return name if name in ("bfloat16", "float16") else ""

    def _lowest(self, n) -> str:
        """-inf in both halves of a word."""
        return "0xff80ff80u" if self._packed(n) == "bfloat16" else "0xfc00fc00u"

    def _feed_packed(self, n, u):
        name, pair, w = self._packed(n), self._pair(n, u), self.w
        for a in n.args:
            words = f"w{self.raw(a.attr)[1:]}"
            count = self._words(self.program.inputs[a.attr[0]])
            each = f"UNROLL for (int j = 0; j < {count}; ++j)"
            if not self.plan.shifted:
                w(f"{each} {pair} = max_nan_{name}({pair}, {words}[j]);")
                continue
            with w.block():
                w(f"u32 inside[{count}];")
                w(f"{each} inside[j] = {words}[j];")
                ends = f"halves_inside({words}[j], first + 2 * j, {self.program.width}, {self._lowest(n)})"
                w(f"if (edge) {each} inside[j] = {ends};")
                w(f"{each} {pair} = max_nan_{name}({pair}, inside[j]);")

    def _maximum(self, n, u) -> str:
        """The thread's maximum so far."""
        name = self._packed(n)
        if not name:
            return self._acc(n, u)
        return f"max_nan(low_{name}({self._pair(n, u)}), high_{name}({self._pair(n, u)}))"

    def _below(self, maximum, reductions):
        """The sums below a maximum; sums of distances first, as they need the other ones as they were."""
        below = [n for n in reductions if n.attr[0].endswith("below_max") and n.attr[1] is maximum]
        return sorted(below, key=lambda n: n.attr[0])

    def _rescale(self, maximum, u, reductions, old, new):
        """Brings sums below an old maximum to a new one."""
        w = self.w
        w(f"const float factor = {old} == -INFINITE ? 0.f : {self._exp}({old} - {new});")
        for n in self._below(maximum, reductions):
            part = self._acc(n, u)
            if n.attr[0] == "distance_below_max":
                moved = f"{part} + ({old} - {new}) * {self._acc(n.attr[2], u)}"
                w(f"if ({old} != -INFINITE && {old} != {new}) {part} = factor * ({moved});")
            else:
                w(f"{part} *= factor;")

    def _exchange(self, number, reductions, maxima):
        plan, w = self.plan, self.w
        for n in reductions:
            if self._packed(n) and n not in maxima:
                for u in self.rows:
                    w(f"{self._acc(n, u)} = {self._maximum(n, u)};")
        self._exchange_lanes(reductions, maxima)
        partials = plan.warps * plan.cluster
        if partials > 1 or plan.in_steps:
            self._exchange_warps(number, reductions, maxima, partials)
        for n in reductions:
            self.done.add(n)
            for u in self.rows if n.row else (0,):
                value = self._acc(n, u)
                value = f"{value} != 0" if n.dtype == BOOL else f"({c_type(n.dtype)}){value}"
                w(f"const {c_type(n.dtype)} {self.name(n, u)} = {value};")

    def _exchange_lanes(self, reductions, maxima):
        """Butterflies: in the end each lane has the same bits."""
        lanes, w = self._lanes_of_warp, self.w
        sharers = self.plan.cluster * self.plan.lanes
        if lanes == 1:
            self._end_moments(reductions, sharers)
            return
        known = {*maxima, *self._known_counts(reductions, sharers // lanes)}
        others = [n for n in reductions if n not in known]
        for n in maxima:
            for u in self.rows:
                w(f"const float {self.row(f'before_{n.number}', u)} = {self._acc(n, u)};")
        if maxima:
            self._butterfly(maxima, lanes)
            for n in maxima:
                for u in self.rows:
                    with w.block():
                        before = self.row(f"before_{n.number}", u)
                        self._rescale(n, u, reductions, before, self._acc(n, u))
        self._threads_to_origin(reductions)
        if others:
            self._butterfly(others, lanes)
        self._end_moments(reductions, sharers // lanes)

    def _distances(self, lanes) -> str:
        return f"{lanes // 2}; distance"

    def _butterfly(self, reductions, lanes):
        w = self.w
        with w.block(f"UNROLL for (int distance = {self._distances(lanes)}; distance /= 2)"):
            for n in reductions:
                for u in self.rows:
                    part = self._acc(n, u)
                    w(f"{part} = {combined(n, part, f'__shfl_xor_sync(~0u, {part}, distance)')};")

    def _exchange_warps(self, number, reductions, maxima, partials):
        """Each warp writes its part to shared memory, of all blocks of the cluster; each thread reads all parts.

        There are two sets of places. A warp that writes the set of exchange n + 2 has all parts of exchange n + 1, and
        each warp sends its part of exchange n + 1 after it has read the set of exchange n.
        """
        plan, w = self.plan, self.w
        turn = (
            f"(turn * {plan.passes} + pass)"
            if plan.passes > 1
            else "turn"
            if plan.persistent
            else "0"
        )
        w(f"const int exchange_{number} = {turn} * {self.levels} + {number};")
        which = f"exchange_{number} & 1"
        w(
            f"u32* const parts_{number} = (u32*)(shared + {self.memory.reductions})"
            f" + ({which}) * {self.memory.reduction_words};"
        )
        places, place_end = {}, 0
        known = self._known_counts(reductions, partials)
        # The longest come first, so that each lies on a multiple of its size.
        for n in sorted((n for n in reductions if n not in known), key=_words, reverse=True):
            for u in self.rows:
                places[n, u] = place_end
                place_end += partials * max(1, plan.side) * _words(n)
        for (n, u), place in places.items():
            self._write_part(
                n, self._acc(n, u), f"parts_{number} + {place}", f"received + ({which})"
            )
        if plan.cluster == 1:
            w("__syncthreads();")
        else:
            w(f"if (thread == 0) barrier_expect(received + ({which}), {4 * place_end}u);")
            w(f"barrier_wait(received + ({which}), (exchange_{number} >> 1) & 1);")
        read = functools.partial(self._part, number, places)
        most = 4 if maxima or plan.side else 2 if self._moments(reductions) else 16
        if partials <= most:
            self._add_parts_alone(reductions, maxima, partials, read)
        else:
            self._add_parts_together(reductions, maxima, partials, partials, read)

    def _write_part(self, n, value, place, barrier):
        plan = self.plan
        for j, word in enumerate(self._words_of(n, value)):
            at = f"{place} + {_words(n)} * (rank * {plan.warps} + warp) + {j}"
            if plan.cluster == 1:
                self.w(f"if (lane_of_warp == 0) ({at})[0] = {word};")
            else:
                sent = f"cluster_send({at}, lane_of_warp, {word}, {barrier});"
                self.w(f"if (lane_of_warp < {plan.cluster}) {sent}")

    @staticmethod
    def _words_of(n, value) -> list[str]:
        """The 32-bit words of a partial result."""
        if _words(n) == 1:
            return [f"*(u32*)&{value}"]
        return [f"((u32*)&{value})[0]", f"((u32*)&{value})[1]"]

    def _part(self, number, places, n, u, q) -> str:
        return f"(({c_type(accumulator(n))}*)(parts_{number} + {places[n, u]}))[{q}]"

    def _add_parts_alone(self, reductions, maxima, partials, read):
        """Each thread adds up all parts."""
        w = self.w
        each = f"UNROLL for (int q = 0; q < {partials}; ++q)"
        for u in self.rows:
            self._add_parts_of_moments(reductions, u, partials, read, each)
            for n in [*maxima, *self._independent(reductions, maxima)]:
                w(f"{self._acc(n, u)} = {read(n, u, 0)};")
                part = combined(n, self._acc(n, u), read(n, u, "q"))
                w(f"UNROLL for (int q = 1; q < {partials}; ++q) {self._acc(n, u)} = {part};")
            for m in maxima:
                below = self._below(m, reductions)
                for n in below:
                    w(f"{self._acc(n, u)} = 0.f;")
                with w.block(each):
                    self._add_below(m, below, u, read, "q")
        self._end_moments(reductions, 1)

    def _add_below(self, maximum, below, u, read, q):
        """Adds the sums of part q, brought to the common maximum."""
        w = self.w
        w(f"const float old = {read(maximum, u, q)}, top = {self._acc(maximum, u)};")
        w(f"const float factor = old == -INFINITE ? 0.f : {self._exp}(old - top);")
        for n in below:
            value = read(n, u, q)
            if n.attr[0] == "distance_below_max":
                weight = read(n.attr[2], u, q)
                moved = f"factor * ({value} + (old == top ? 0.f : old - top) * {weight})"
                w(f"{self._acc(n, u)} += old == -INFINITE ? {value} : {moved};")
            else:
                w(f"{self._acc(n, u)} += factor * {value};")

    def _add_parts_together(self, reductions, maxima, partials, sharers, read, lanes=None):
        """Lanes add up a part each, or every 32nd part, and exchange. `sharers` parts make a row."""
        lanes = lanes or self._lanes_of_parts(partials)
        w, some = self.w, self._some_parts(partials, lanes)
        first = [*maxima, *self._independent(reductions, maxima)]
        known = self._known_counts(reductions, sharers // partials)
        of_moments = [n for m in self._moments(reductions) for n in m if n not in known]
        for u in self.rows:
            self._add_parts_of_moments(reductions, u, sharers, read, some)
            for n in first:
                w(f"{self._acc(n, u)} = {identity(n)};")
                part = combined(n, self._acc(n, u), read(n, u, "q"))
                w(f"{some} {self._acc(n, u)} = {part};")
        if first or of_moments:
            self._butterfly([*first, *of_moments], lanes)
        self._end_moments(reductions, sharers // partials)
        for u in self.rows:
            for m in maxima:
                below = self._below(m, reductions)
                for n in below:
                    w(f"{self._acc(n, u)} = 0.f;")
                with w.block(some):
                    self._add_below(m, below, u, read, "q")
        below = [n for m in maxima for n in self._below(m, reductions)]
        if below:
            self._butterfly(below, lanes)

    def _independent(self, reductions, maxima):
        """The reductions whose parts are combined by themselves."""
        known = {*maxima, *(n for m in self._moments(reductions) for n in m)}
        return [n for n in reductions if n not in known and not n.attr[0].endswith("below_max")]

    def _lanes_of_parts(self, partials) -> int:
        """Lanes that together read all parts. The other lanes of a warp read the same again.

        There are at least two: in `emit_steps`, the butterfly keeps the lanes of the exchanging warp together.
        """
        return min(32, max(2, 1 << (partials - 1).bit_length()))

    def _some_parts(self, partials, lanes) -> str:
        if partials > lanes:
            return f"for (int q = lane_of_warp; q < {partials}; q += {lanes})"
        return f"if (const int q = lane_of_warp % {lanes}; q < {partials})"

    def _maxima(self, reductions):
        """Maxima below which other reductions of the phase sum."""
        wanted = {n.attr[1] for n in reductions if n.attr[0].endswith("below_max")}
        return [n for n in reductions if n in wanted]


def _words(n) -> int:
    """How many 32-bit words a partial result of a reduction has."""
    return accumulator(n).itemsize // 4
