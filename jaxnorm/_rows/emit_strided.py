"""The kernel of rows that lie side by side, under a plan of `schedule_strided`.

A slot is one column of a thread's rows: one load and one store for all rows, where the rows are neighbours in an array.
"""

import contextlib
import functools

from jaxnorm._rows.emit_kernel import Emitter
from jaxnorm._rows.expressions import c_type, element, words_of
from jaxnorm._rows.graph import Node
from jaxnorm._rows.rules import Input, Output
from jaxnorm._rows.schedule_strided import apart
from jaxnorm._rows.text import addresses


class StridedEmitter(Emitter):
    """What differs where rows lie side by side: which thread has which rows and columns, their loads and stores."""

    def __init__(self, program, plan, kernel):
        super().__init__(program, plan, kernel)
        self.loaded_rows = self.rows[:1]

    # ---- threads and rows ----

    def _places(self):
        """Threads of a team share rows: `side` groups of neighbours, each with `lanes` threads, `side` apart."""
        plan, w = self.plan, self.w
        team = plan.side * plan.lanes
        side = f"thread % {plan.side}"
        group = f"thread / {team} * {plan.side} + {side}" if plan.threads > team else side
        lane = f"thread % {team} / {plan.side}" if plan.threads > team else f"thread / {plan.side}"
        w(f"const int thread = threadIdx.x, group = {group}, lane = {lane};")

    def _row_numbers(self):
        plan, w = self.plan, self.w
        count = plan.rows_at_once
        w(f"const u32 number = tile * {plan.rows_per_tile}u + group * {count}u;")
        valid = "number < group_rows" if self.ragged else "true"
        w(f"const bool {self.row('valid', 0)} = {valid};")
        number = f"({self.row('valid', 0)} ? number : group_rows - {count}u)"
        w(f"const u32 {self.row('row', 0)} = first_row + {number if self.ragged else 'number'};")
        for u in self.rows[1:]:
            w(f"const bool {self.row('valid', u)} = {self.row('valid', 0)};")
            w(f"const u32 {self.row('row', u)} = {self.row('row', 0)} + {u}u;")

    def _distance(self, layout) -> int | None:
        """Elements between the thread's neighbouring rows in an array: 0, 1, or None if that differs."""
        return apart(layout, self.program.row_sizes, self.plan.rows_at_once)

    # ---- loads ----

    def _row_pointers(self):
        for what, arrays in (("in", [*self.wholes, *self.columns]), ("out", self.phases.wholes)):
            const = "const " if what == "in" else ""
            for a in arrays:
                offset = addresses(self.program, a.layout, self.row("row", 0))
                pointer = self.row(f"row_of_{what}{a.number}", 0)
                self.w(
                    f"{const}char* const {pointer} = {what}{a.number} + ({offset}) * {a.dtype.itemsize};"
                )

    def row_value(self, n, u, row, name):
        """One load has the numbers of all of the thread's rows, where the rows are neighbours."""
        i = self.program.inputs[n.attr[0]] if n.op in ("input", "input_at") else None
        own = row == self.row("row", u)
        if i is None or not own or (distance := self._distance(i.layout)) is None:
            super().row_value(n, u, row, name)
            return
        size = i.dtype.itemsize
        offset = addresses(self.program, i.layout, self.row("row", 0))
        if n.op == "input_at":
            last = self.program.width - 1
            column = f"min_of(max_of((long long){name(n.args[0], u)}, 0ll), {last}ll) + {n.attr[1] * (last + 1)}"
            neighbour = f" + {u}" if distance and u else ""
            self._load_one(
                n, i, name(n, u), f"{offset} + (u64)({column}) * {i.layout.step}{neighbour}"
            )
            return
        words = f"words_of_{n.number}"
        count = len(self.rows) if distance and n.row else 1
        if u == 0:
            self.w(f"u32 {words}[{max(1, count * size // 4)}];")
            self.w(f"load<{count * size}>({words}, in{i.number} + ({offset}) * {size});")
        value = element(i.dtype, words, str(u if count > 1 else 0))
        self.w(f"const {c_type(n.dtype)} {name(n, u)} = {value};")

    def _count(self, i: Input) -> int:
        """How many rows a slot's words hold."""
        return self.plan.rows_at_once if self._distance(i.layout) else 1

    def _words(self, i: Input) -> int:
        return max(1, self._count(i) * i.dtype.itemsize // 4)

    def _place_in_words(self, i: Input, u) -> str:
        return str(u) if self._count(i) > 1 else "0"

    def _load(self, load, u, target):
        number, panel, backwards = load
        i, width = self.program.inputs[number], self.program.width
        size = i.dtype.itemsize
        column = f"{width - 1} - first" if backwards else "first"
        place = f"(long long)({column}) * {i.layout.step * size}"
        row = self.row(f"row_of_in{number}", 0)
        panels = f" + {panel * width * i.layout.step * size}" if panel else ""
        self.w(f"load<{self._count(i) * size}>({target}, {row}{panels} + {place});")

    def _sums_to_zero(self):
        if self.plan.persistent:
            self._cluster_barriers()
        super()._sums_to_zero()

    def _load_rows(self):
        super()._load_rows()
        if not self.plan.persistent:  # loads are on their way while blocks wait for each other
            self._cluster_barriers()

    def _cluster_barriers(self):
        """Barriers for the exchanges of a cluster, which all of its blocks have before one of them sends."""
        w = self.w
        if self.plan.cluster > 1 and self.levels:
            w("// one barrier for each set of partial results")
            w(f"u64* const received = (u64*)(shared + {self.memory.barriers});")
            with w.block("if (thread == 0)"):
                w("barrier_init(received, 1), barrier_init(received + 1, 1);")
                w("barriers_ready();")
            w("cluster_sync();")

    def _slot_words(self, load, u, loaded):
        super()._slot_words(load, 0, loaded)

    @functools.cached_property
    def ahead(self) -> frozenset[Node]:
        return frozenset()  # one load has the numbers of neighbouring rows

    # ---- slots ----

    def _slot(self, inputs, packed, loaded, outputs, element, tested):
        w = self.w
        with self._over_slots():
            w("const int v = 0;  // a slot is one column")
            for n in inputs:
                self._slot_words(n.attr, 0, loaded)
            for n in packed:
                self._feed_packed(n, 0)
            self._declare_results(outputs, len(self.rows))
            for u in self.rows:
                with w.block():
                    element(outputs, u, str(u))
            for o in outputs:
                self._store(o, 0)
            w("(void)v;")

    def _store(self, o: Output, u):
        w, size, step = self.w, o.dtype.itemsize, o.layout.step
        rows = self.rows if self._distance(o.layout) else self.rows[:1]
        condition = self._condition(o, 0)
        with w.block(f"if ({condition})") if condition else contextlib.nullcontext():
            for panel in range(len(o.nodes)):
                words = f"words{o.number}_{panel}"
                held = words_of(o.dtype, [f"result{o.number}_{panel}[{r}]" for r in rows])
                w(f"const u32 {words}[{len(held)}] = {{{', '.join(held)}}};")
                panels = f" + {panel * self.program.width * step * size}" if panel else ""
                to = f"{self.row(f'row_of_out{o.number}', 0)}{panels} + (long long)first * {step * size}"
                w(f"store<{len(rows) * size}>({to}, {words});")

    def _store_row_result(self, o: Output):
        distance = self._distance(o.layout)
        if distance is None:
            super()._store_row_result(o)
        else:
            self._store_numbers(o, self.rows if distance else self.rows[:1])

    # ---- reductions ----

    def _packed(self, n) -> str:
        """The 16-bit dtype of the words whose halves, of two rows, a maximum compares at once, or ""."""
        if n.attr[0] != "max" or self.plan.rows_at_once < 2:
            return ""
        inputs = {self.program.inputs[a.attr[0]] if a.op == "input" else None for a in n.args}
        names = {i.dtype.name if i is not None and self._count(i) > 1 else "" for i in inputs}
        name = names.pop() if len(names) == 1 else ""
        return name if name in ("bfloat16", "float16") else ""

    def _pair(self, n, u) -> str:
        return f"pair_{n.number}_{u // 2}"

    def _pairs(self, n) -> list[str]:
        return [self._pair(n, u) for u in self.rows[::2]]

    def _feed_packed(self, n, u):
        name = self._packed(n)
        for a in n.args:
            for j, pair in enumerate(self._pairs(n)):
                self.w(f"{pair} = max_nan_{name}({pair}, w{self.raw(a.attr)[1:]}[{j}]);")

    def _maximum(self, n, u) -> str:
        name = self._packed(n)
        return (
            f"{'high' if u % 2 else 'low'}_{name}({self._pair(n, u)})" if name else self._acc(n, u)
        )

    def _distances(self, lanes) -> str:
        return f"16; distance >= {self.plan.side}"

    @property
    def _lanes_of_warp(self) -> int:
        return 32 // self.plan.side

    def _of_lane(self, value, lane) -> str:
        side = self.plan.side
        return f"__shfl_sync(~0u, {value}, lane_of_warp % {side} + {side * lane})"

    def _write_part(self, n, value, place, barrier):
        plan, w = self.plan, self.w
        words = self._words_of(n, value)
        for j, word in enumerate(words):
            part = f"(rank * {plan.warps} + warp) * {plan.side} + group"
            at = f"{place} + {len(words)} * ({part}) + {j}"
            if plan.cluster == 1:
                w(f"if (lane_of_warp < {plan.side}) ({at})[0] = {word};")
            else:
                blocks = f"int to = lane_of_warp / {plan.side}; to < {plan.cluster}; to += {32 // plan.side}"
                w(f"for ({blocks}) cluster_send({at}, to, {word}, {barrier});")

    def _part(self, number, places, n, u, q) -> str:
        return super()._part(number, places, n, u, f"({q}) * {self.plan.side} + group")

    def _lanes_of_parts(self, partials) -> int:
        return 32

    def _some_parts(self, partials, lanes) -> str:
        side = self.plan.side
        return f"for (int q = lane_of_warp / {side}; q < {partials}; q += {32 // side})"

    # ---- sums over rows ----

    def _write_sums(self, n):
        """Threads side by side have the same columns; one of them writes."""
        total, count = f"total_{n.number}", self.plan.slots
        with self.w.block(
            f"UNROLL for (int distance = {self.plan.side // 2}; distance; distance /= 2)"
        ):
            loop = f"UNROLL for (int j = 0; j < {count}; ++j)"
            self.w(f"{loop} {total}[j] += __shfl_xor_sync(~0u, {total}[j], distance);")
        with self.w.block("if (group == 0)"):
            place = f"sums{n.number}[(u64)member * {self.program.width} + first + v]"
            self._write_total(n, place)
