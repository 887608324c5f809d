"""The kernel of a program under a plan.

The kernel goes through tiles of rows. For each row it runs the program's phases: a loop over the thread's slots, then
an exchange between the threads that share the row. Sums over rows stay in each thread and are written as partial
results. A second kernel, whose name ends in `_finish`, adds the partial results up.
"""

import contextlib
import functools

from jaxnorm._rows.emit_steps import Steps
from jaxnorm._rows.emit_sums import Finish
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.expressions import (
    c_type,
    combined,
    element,
    expression,
    identity,
)
from jaxnorm._rows.graph import Node
from jaxnorm._rows.rules import compute_dtype
from jaxnorm._rows.text import product


class Emitter(Steps):
    """The kernel as a whole: its rows, and its phases."""

    def text(self) -> str:
        self._check()
        self.w("")
        self.w(f"// {self.plan}")
        bounds = f"__launch_bounds__({self.plan.threads}, {self.plan.blocks})"
        cluster = f"__cluster_dims__({self.plan.cluster}, 1, 1) " if self.plan.clustered else ""
        with self.w.block(
            f'extern "C" __global__ void {cluster}{bounds} {self.kernel}({self._parameters()})'
        ):
            self._begin()
            if self.plan.in_steps:
                self._rows_in_steps()
            elif self.plan.persistent:
                with self.w.block(
                    "for (int tile = chunk, turn = 0; tile < tiles; tile += chunks, ++turn)"
                ):
                    self._tile()
            else:
                self.w("const int tile = chunk;")
                self._tile()
            if not self.plan.in_steps:
                self._write_partial_sums()
            if self.plan.clustered and not self.plan.in_steps:
                self.w("cluster_sync();  // no block may end while others write to its memory")
        if self.phases.row_sums and not self.direct:
            Finish(self).emit()
        return "\n".join(self.w.lines) + "\n"

    def _check(self):
        for node in self.phases.order:
            if node.after and node.op != "row_sum":
                for a in node.args:
                    if a.op == "reduce" or a.op == "random":
                        raise NotARowProgram(
                            "a sum over rows", "is mixed with what each row has by itself"
                        )
        for output in self.program.outputs:
            if (
                output.after
                and output.layout.columns is None
                and any(n.column for n in output.nodes)
            ):
                raise NotARowProgram(
                    f"result {output.number}", "is a sum over rows that lost its columns"
                )

    def _parameters(self) -> str:
        parameters = [f"const char* __restrict__ in{n}" for n in self.used_inputs()]
        parameters += [
            f"char* __restrict__ out{o.number}"
            for o in self.program.outputs
            if not o.after or self.direct
        ]
        if not self.direct:
            parameters += [
                f"{c_type(n.dtype)}* __restrict__ sums{n.number}" for n in self.phases.row_sums
            ]
        if self.plan.grid:
            parameters.append("char* __restrict__ posts")
        return ", ".join([*parameters, *self.scalars()])

    def _begin(self):
        plan, w = self.plan, self.w
        self._places()
        w("const int warp = thread / 32, lane_of_warp = thread % 32;")
        if plan.cluster > 1:
            w(
                f"const int rank = blockIdx.x % {plan.cluster}, member = blockIdx.x / {plan.cluster};"
            )
        else:
            w("const int rank = 0, member = blockIdx.x;")
        w(
            f"const int start = rank * {self.part}, here = min_of({self.part}, {self.slots} - start);  // of the slots"
        )
        if self.memory.total > 128:
            w("char* const shared = dynamic_shared();")
        w("const u32 rows = (u32)all_rows;")
        w(
            f"const u32 group_rows = {product(self.sizes[self.group_dims :]) if self.group_dims else 'rows'};"
        )
        w(
            f"const int tiles = (int)((group_rows + {plan.rows_per_tile - 1}u) / {plan.rows_per_tile}u);"
        )
        if self.group_dims:
            w("const int chunk = member % chunks;")
            w("const u32 first_row = (u32)(member / chunks) * group_rows;")
        else:
            w("const int chunk = member;")
            w("const u32 first_row = 0;")
        w(
            "(void)group, (void)warp, (void)lane_of_warp, (void)here, (void)lane, (void)tiles, (void)rows;"
        )
        if self.alike:
            # Chunks are a multiple of the vector.
            w(
                f"const int shift = {self._shift_of('(first_row + chunk)')};  // of all of the block's rows"
            )
        if plan.source == "ring":
            self._ring()
        if not plan.in_steps:
            self._prepare()

    def _prepare(self):
        self._row_values(lambda n: not n.row, "values that all rows share", rows=(0,))
        self._sums_to_zero()
        self._hoist()
        self._load_ahead("chunk", "0")

    def _places(self):
        """Declares which of the threads that share a row this one is, and of which group."""
        plan = self.plan
        lanes = plan.lanes if plan.lanes <= 32 and plan.cluster == 1 else plan.threads
        self.w(
            f"const int thread = threadIdx.x, lane = thread % {min(lanes, plan.threads)}, group = thread / {lanes};"
        )

    def _tile(self):
        plan, w = self.plan, self.w
        whole_stages = plan.source == "ring" and not plan.parts
        if plan.passes > 1:
            self._wait_for_stage("turn")
            with w.block(f'_Pragma("unroll 1") for (int pass = 0; pass < {plan.passes}; ++pass)'):
                self._rows_of_a_pass(waits=False)
        else:
            self._rows_of_a_pass(waits=whole_stages)
        if whole_stages:
            self._release_stage("turn")

    def _rows_of_a_pass(self, waits):
        """All phases of a thread's rows; where it `waits`, for their stage."""
        self._row_numbers()
        done = set(self.done)
        self._row_pointers()
        self._row_values(lambda n: n.level == 0, "values of the row")
        self._load_next_ahead()
        if waits:
            self._wait_for_stage("turn")
        self._load_rows()
        for phase in range(self.phases.count):
            self._phase(phase)
        self._store_row_results()
        self.done = done

    def _row_numbers(self):
        """Declares the numbers of this thread's rows, and whether there are such rows."""
        w = self.w
        for u in self.rows:
            number = self._row_number(u, "tile", "pass")
            if self.ragged:
                w(f"const u32 {self.row('number', u)} = {number};")
                w(f"const bool {self.row('valid', u)} = {self.row('number', u)} < group_rows;")
                number = f"({self.row('valid', u)} ? {self.row('number', u)} : group_rows - 1u)"
            w(f"const u32 {self.row('row', u)} = first_row + {number};")
        if self.plan.shifted and not self.alike:
            w(f"const int shift = {self._shift_of('row')};")

    def _phase(self, number):
        plan, w = self.plan, self.w
        self._row_values(lambda n: n.level <= number, "values of the row, from its reductions")
        reductions, last = self.phases.reductions[number], number == self.levels
        if (
            last
            and not self.evaluated[number]
            and not self.phases.wholes
            and not self.phases.row_sums
        ):
            return
        results = [f"out{o.number}" for o in self.phases.wholes] if last else []
        results += [f"sums{n.number}" for n in self.phases.row_sums] if last else []
        what = ", ".join(
            [f"{n.attr[0].replace('_', ' ')} {n.number}" for n in reductions] + results
        )
        w("")
        w(f"// phase {number + 1} of {self.phases.count}: {what}")
        for n in reductions:
            for u in self.rows:
                self._declare_accumulator(n, u, f" = {identity(n)}")
            if self._packed(n):
                for pair in self._pairs(n):
                    w(f"u32 {pair} = {self._lowest(n)};")
        if number == 0:
            for k in sorted(plan.keep):
                node = next(n for n in self.phases.order if n.number == k)
                for u in self.rows:
                    self._declare_kept(node, u)
        elif plan.rounds == 1 and plan.source != "stream":
            self._forget()
        maxima = self._maxima(reductions)
        if plan.rounds > 1 or plan.source == "stream":
            with w.block(
                f'_Pragma("unroll 1") for (int round = 0; round < {plan.rounds}; ++round)'
            ):
                if plan.parts:
                    self._part_of_row(number, reductions, maxima, last)
                else:
                    self._passes_over_slots(number, reductions, maxima, last, hold=True)
        else:
            self._passes_over_slots(number, reductions, maxima, last, hold=False)
        if reductions:
            self._exchange(number, reductions, maxima)

    def _part_of_row(self, number, reductions, maxima, last):
        """What a phase does with one part of a row. The first phase that reads it waits, the last one releases it."""
        reading = [p for p, found in enumerate(self.evaluated) if found]
        self.w(f"const int part = turn * {self.plan.rounds} + round;")
        if number == reading[0]:
            self._wait_for_stage("part")
        else:
            self._use_stage("part")
        self._passes_over_slots(number, reductions, maxima, last, hold=True)
        if number == reading[-1]:
            self._release_stage("part")

    def _passes_over_slots(self, number, reductions, maxima, last, hold):
        """One loop over the slots, or two where sums need the thread's maximum first."""
        plan, w = self.plan, self.w
        held = [x for x in self.loads if self.program.inputs[x[0]].whole] if hold else []
        needed = {n.attr for n in self.evaluated[number] if n.op == "input"}
        held = [x for x in held if x in needed]
        for load in held:
            for u in self.loaded_rows:
                w(
                    f"u32 {self.row(self.raw(load), u)}[{plan.slots}][{self._words(self.program.inputs[load[0]])}];"
                )
        if held:
            with self._over_slots():
                for u in self.loaded_rows:
                    for load in held:
                        self._load(load, u, f"{self.row(self.raw(load), u)}[k]")
        loaded = {*held, *self._held_loads}
        if not maxima:
            self._slots(self.evaluated[number], reductions, last, loaded)
            return
        first = {n: False for n in _closure([a for m in maxima for a in m.args])}
        if hold:
            for n in maxima:
                for u in self.rows:
                    w(f"const float {self._old(n, u)} = {self._maximum(n, u)};")
        self._slots(first, maxima, False, loaded, keep=False)
        for n in maxima:
            for u in self.rows:
                if self._packed(n):
                    w(f"{self._acc(n, u)} = {self._maximum(n, u)};")
                # Below -inf there is nothing: any finite shift is as good.
                w(
                    f"const float {self._local(n, u)} = {self._acc(n, u)} == -INFINITE ? 0.f : {self._acc(n, u)};"
                )
                if hold:
                    with w.block():
                        self._rescale(n, u, reductions, self._old(n, u), self._acc(n, u))
        self._forget_loaded(loaded)
        self._slots(
            self.evaluated[number], [n for n in reductions if n not in maxima], last, loaded
        )

    def _slots(self, nodes, reductions, last, loaded, keep=True):
        """The loop over slots that computes these nodes and feeds these reductions."""
        items = sorted(nodes.items(), key=lambda item: self.order[item[0]])
        packed = [n for n in reductions if self._packed(n)]
        known = self._known_counts(reductions, self.plan.cluster * self.plan.lanes)
        fed = [n for n in reductions if not self._packed(n) and n not in known]
        used_otherwise = {a for n, from_registers in items if not from_registers for a in n.args}
        used_otherwise |= {a for n in fed for a in n.args}
        if last:
            used_otherwise |= set(self.phases.targets[-1])
        only_packed = {a for n in packed for a in n.args} - used_otherwise
        inputs = [n for n, from_registers in items if n.op == "input" and not from_registers]
        element = functools.partial(self._element, items, only_packed, fed, last=last, keep=keep)
        outputs = self.phases.wholes if last else []
        tested = self.plan.shifted and (bool(fed) or (last and bool(self.phases.row_sums)))
        self._slot(inputs, packed, loaded, outputs, element, tested)

    def _slot(self, inputs, packed, loaded, outputs, element, tested):
        """The loop over slots: their words, their elements, and what is stored of them.

        `tested` says whether elements outside of the row, which a slot at an end of the row has, must be left out.
        """
        plan, w = self.plan, self.w
        with self._over_slots():
            shared = [n.attr for n in inputs if n.attr not in loaded and self._shared(n.attr)]
            for load in shared:
                self._slot_words(load, 0, loaded)
            for u in self.rows:
                with w.block() if plan.rows_at_once > 1 else contextlib.nullcontext():
                    for n in inputs:
                        if n.attr not in shared:
                            self._slot_words(n.attr, u, loaded)
                    for n in packed:
                        self._feed_packed(n, u)
                    self._declare_results(outputs, plan.vector)
                    with self._each_element(tested):
                        element(outputs, u, "v")
                    for o in outputs:
                        self._store(o, u)

    @contextlib.contextmanager
    def _each_element(self, tested):
        """A loop over a slot's elements. Its body may read `inside` if elements are `tested`.

        Unrolled slots know which of them can have an end of the row. In a loop over slots any slot can have one, but
        few do: the other slots run a second copy of the loop over elements, without tests.
        """
        w, loop = self.w, f"UNROLL for (int v = 0; v < {self.plan.vector}; ++v)"
        inside = f"(u32)(first + v) < {self.program.width}u"
        if not tested or self.plan.rounds == 1:
            with w.block(loop):
                if tested:
                    w(f"const bool inside = !edge || {inside};")
                yield
            return
        with w.block("const auto elements = [&](auto tested)", end="};"), w.block(loop):
            w(f"const bool inside = !tested.value || {inside};")
            yield
        w("if (edge) elements(Flag<true>()); else elements(Flag<false>());")

    def _declare_results(self, outputs, count):
        for o in outputs:
            for panel in range(len(o.nodes)):
                self.w(f"{c_type(compute_dtype(o.dtype))} result{o.number}_{panel}[{count}];")

    def _element(self, items, only_packed, fed, outputs, u, place, *, last, keep):
        """What is computed of an element, whose place among the results of its slot is given."""
        plan, w = self.plan, self.w
        inside = "inside" if plan.shifted else ""
        for n, from_registers in items:
            if n.op == "literal" or n in only_packed:
                continue
            this = self.name(n, u)
            if from_registers:
                w(f"const {c_type(n.dtype)} {this} = {self._read_kept(n, u)};")
                continue
            w(f"const {c_type(n.dtype)} {this} = {self._element_value(n, u)};")
            if keep and n.number in plan.keep:
                self._keep(n, u)
        for n in fed:
            for a in n.args:
                new = combined(n, self._acc(n, u), self._added(n, self.name(a, u), u))
                w(f"{f'if ({inside}) ' if inside else ''}{self._acc(n, u)} = {new};")
        if last:
            self._add_to_sums(u, inside)
            for o in outputs:
                for panel, n in enumerate(o.nodes):
                    w(f"result{o.number}_{panel}[{place}] = {self.name(n, u)};")

    def _element_value(self, n, u) -> str:
        name = functools.partial(self.name, u=u)
        if n.op == "input":
            i = self.program.inputs[n.attr[0]]
            words = f"w{self.raw(n.attr)[1:]}"
            if i.layout.bits:
                _, _, backwards = n.attr
                return f"(({words}[0] >> {'(7 - v)' if backwards else 'v'}) & 1u) != 0"
            return element(i.dtype, words, self._place_in_words(i, u))
        if n.op == "iota":
            return f"({c_type(n.dtype)})(first + v + {n.attr})"
        if n.op == "random":
            return self._random(n, u, self.row("row", u), "first + v", self.name)
        if n.op == "local_exp":
            x, local = name(n.args[0]), self._local(n.attr, u)
            return f"{self._exp}({x} - {local})"
        if n.op == "local_distance":
            return f"({name(n.args[0])} - {self._local(n.attr, u)})"
        return expression(n, [name(a) for a in n.args], self.fast)


def _closure(nodes) -> set[Node]:
    found, stack = set(), [n for n in nodes if n.column]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [a for a in node.args if a.column]
    return found
