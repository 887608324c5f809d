"""The parts of a kernel that move data: what a kernel is made from, loads, stores, and what stays in registers."""

import contextlib
import functools
import math

from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.expressions import (
    c_type,
    element,
    expression,
    literal,
    words_of,
)
from jaxnorm._rows.graph import BOOL, Node
from jaxnorm._rows.phases import Phases
from jaxnorm._rows.plan import Plan
from jaxnorm._rows.rules import Input, Output, Program
from jaxnorm._rows.shared_memory import (
    hoisted_inputs,
    hoisted_layout,
    in_row_order,
    keeps_columns,
    part_slots,
    row_pitch,
    shared_memory,
    slot_count,
    stage_layout,
    staged_inputs,
)
from jaxnorm._rows.text import Strides, Writer, addresses, row_index


class Base:
    """A program, its plan, its kernel's name, and the names of values in the text."""

    def __init__(self, program: Program, plan: Plan, kernel: str):
        self.program, self.plan, self.kernel = program, plan, kernel
        self.phases = Phases(program)
        self.w = Writer()
        self.order = {n: i for i, n in enumerate(self.phases.order)}
        self.sizes = [n if isinstance(n, int) else f"d{k}" for k, n in enumerate(program.row_sizes)]
        self.evaluated = self.phases.evaluated(plan.keep)
        self.rows = range(plan.rows_at_once)
        #: rows for which a slot is loaded: each, or the first one with its neighbours
        self.loaded_rows = self.rows
        self.wholes = [program.inputs[n] for n in self.phases.inputs(whole=True)]
        self.columns = [program.inputs[n] for n in self.phases.inputs(whole=False)]
        self.staged = staged_inputs(program, self.phases) if plan.source == "ring" else []
        self.stage_offsets, self.stage_bytes = stage_layout(program, plan, self.phases)
        self.memory = shared_memory(program, plan)
        self.slots, self.part = slot_count(program, plan), part_slots(program, plan)
        stored = [i.dtype for i in self.wholes] + [o.dtype for o in self.phases.wholes]
        self.fast = bool(stored) and all(d.itemsize <= 2 for d in stored)
        self.group_dims = self.phases.group_dims
        self.hoisted = hoisted_inputs(program, plan, self.phases)
        self.hoisted_offsets, _ = hoisted_layout(program, plan, self.phases)
        #: whether all rows of a block lie alike on the grid of vectors
        self.alike = plan.shifted and keeps_columns(self.phases, plan)
        self.levels = self.phases.count - 1
        self.done: set[Node] = set()
        self.loads = self.phases.loads

    def name(self, node: Node, u: int = 0) -> str:
        if node.op == "literal":
            return literal(node.attr, node.dtype)
        several = self.plan.rows_at_once > 1 and node.row and not node.column
        return f"{node.op}_{node.number}{f'_{u}' if several else ''}"

    def row(self, name: str, u: int) -> str:
        return f"{name}_{u}" if self.plan.rows_at_once > 1 else name

    def _acc(self, n, u) -> str:
        """What a thread has of a reduction."""
        return self.row(f"{n.attr[0]}_{n.number}_part", u)

    @property
    def _lanes_of_warp(self) -> int:
        """Lanes of a warp that share a row."""
        return min(self.plan.lanes, 32)

    def _of_lane(self, value, lane) -> str:
        """What another lane that shares the row has."""
        return f"__shfl_sync(~0u, {value}, {lane}, {self._lanes_of_warp})"

    def in_order(self, nodes) -> list[Node]:
        """Nodes in the order in which they are computed."""
        return sorted(nodes, key=lambda n: self.order[n])

    @staticmethod
    def raw(load) -> str:
        number, panel, backwards = load
        return f"x{number}_{panel}{'r' if backwards else ''}"

    def used_inputs(self) -> list[int]:
        """Numbers of the inputs that the kernels read."""
        return sorted(
            {n.attr[0] for n in self.phases.order if n.op in ("input", "input_at", "key")}
        )

    def scalars(self) -> list[str]:
        return ["long long all_rows", "int chunks", *(f"int d{k}" for k in range(len(self.sizes)))]

    @property
    def ragged(self) -> bool:
        """Whether a tile may have fewer rows than the others."""
        inner = self.sizes[max(1, self.group_dims) :]
        known = (
            math.prod(n for n in inner if isinstance(n, int))
            if all(isinstance(n, int) for n in inner)
            else 1
        )
        return known % self.plan.rows_per_tile != 0

    @property
    def _exp(self) -> str:
        return "fast_exp" if self.fast else "expf"

    def _place(self) -> str:
        return f"(k * {self.plan.vector} + v)"


class Memory(Base):
    """Loads of rows and columns, the ring of stages, stores, and values that stay in registers."""

    def _row_values(self, wanted, comment, rows=None):
        """Declares what is one number for a row and can be computed now."""
        pending = [
            n
            for n in self.phases.order
            if not n.column and n.op not in ("literal", "reduce", "row_sum") and n not in self.done
            and not n.after and wanted(n)
        ]  # fmt: skip
        ready = []
        for n in pending:
            if all(a in self.done or a.op == "literal" for a in n.args):
                self.done.add(n)
                ready.append(n)
        if ready:
            self.w(f"// {comment}")
        for n in ready:
            for u in self.rows if n.row and rows is None else (0,):
                self.row_value(n, u, self.row("row", u), self.name)

    def row_value(self, n: Node, u: int, row: str, name):
        """Declares a node that is one number for a row."""
        w, this = self.w, name(n, u)
        if n in self.ahead and name == self.name:
            dtype = self.program.inputs[n.attr[0]].dtype
            w(f"const {c_type(n.dtype)} {this} = {element(dtype, f'next_{this}', '0')};")
        elif n.op == "input":
            i = self.program.inputs[n.attr[0]]
            self._load_one(n, i, this, addresses(self.program, i.layout, row))
        elif n.op == "input_at":
            i = self.program.inputs[n.attr[0]]
            column = (
                f"min_of(max_of((long long){name(n.args[0], u)}, 0ll), {self.program.width - 1}ll)"
            )
            offset = n.attr[1] * self.program.width
            self._load_one(
                n, i, this, f"{addresses(self.program, i.layout, row)} + {offset} + (u64){column}"
            )
        elif n.op == "key":
            number, word = n.attr
            at = addresses(self.program, self.program.inputs[number].layout, row)
            w(f"const u32 {this} = __ldg((const u32*)in{number} + {at} + {word});")
        elif n.op == "row_index":
            w(
                f"const {c_type(n.dtype)} {this} = ({c_type(n.dtype)}){row_index(self.sizes, row, n.attr, n.attr)};"
            )
        elif n.op == "random":
            w(f"const {c_type(n.dtype)} {this} = {self._random(n, u, row, '0', name)};")
        else:
            args = [name(a, u) for a in n.args]
            w(f"const {c_type(n.dtype)} {this} = {expression(n, args, self.fast)};")

    # ---- one number for a row, loaded one turn before it is needed, as a ring fetches rows ----

    @functools.cached_property
    def ahead(self) -> frozenset[Node]:
        """Operands with one number for a row that persistent blocks load a turn before."""
        if not self.plan.persistent or self.plan.in_steps:
            return frozenset()
        found = (n for n in self.phases.order if n.op == "input" and n.row and not n.column)
        return frozenset(n for n in found if not self.program.inputs[n.attr[0]].layout.bits)

    def _row_number(self, u, tile, pass_) -> str:
        """The number, within its group, of row u that a thread works on in a pass of a tile."""
        plan = self.plan
        number = f"{tile} * {plan.rows_per_tile}u"
        if plan.groups > 1:
            number += f" + group * {plan.rows_at_once * plan.passes}u"
        if plan.passes > 1:
            number += f" + {pass_} * {plan.rows_at_once}u"
        return number + (f" + {u}u" if u else "")

    def _load_ahead(self, tile, pass_):
        """Declares and loads `next_...`, the words of the first rows' numbers."""
        for n in self.in_order(self.ahead):
            words = max(1, self.program.inputs[n.attr[0]].dtype.itemsize // 4)
            for u in self.rows:
                self.w(f"u32 next_{self.name(n, u)}[{words}];")
        self._load_rows_ahead(tile, pass_)

    def _load_next_ahead(self):
        if not self.ahead:
            return
        tile, pass_ = "tile + chunks", "0"
        if self.plan.passes > 1:
            last = f"pass == {self.plan.passes - 1}"
            self.w(f"const int next_tile = {last} ? tile + chunks : tile;")
            self.w(f"const int next_pass = {last} ? 0 : pass + 1;")
            tile, pass_ = "next_tile", "next_pass"
        self._load_rows_ahead(f"({tile})", pass_)

    def _load_rows_ahead(self, tile, pass_):
        for u in self.rows if self.ahead else ():
            with self.w.block():
                number = self._row_number(u, tile, pass_)
                self.w(f"const u32 row_ahead = first_row + min_of({number}, group_rows - 1u);")
                for n in self.in_order(self.ahead):
                    i = self.program.inputs[n.attr[0]]
                    at = addresses(self.program, i.layout, "row_ahead")
                    size = i.dtype.itemsize
                    self.w(f"load<{size}>(next_{self.name(n, u)}, in{i.number} + ({at}) * {size});")

    def _random(self, n, u, row, column, name) -> str:
        strides, offset, step = n.attr
        bits = 64 if n.dtype.itemsize == 8 else 32
        keys = ", ".join(name(a, u) for a in n.args)
        base = addresses(self.program, Strides(strides), row)
        place = column if step == 1 else f"(u64)({column}) * {step}"
        return f"random_bits{bits}({keys}, {base} + (u64)({place} + {offset}))"

    def _ring(self):
        plan, w = self.plan, self.w
        w(f"u64* const filled = (u64*)(shared + {self.memory.barriers});  // one barrier a stage")
        if plan.clustered:
            w(
                f"u64* const received = filled + {plan.stages};  // one barrier for each set of partial results"
            )
        if plan.parts:
            w(
                f"u64* const readers = filled + {plan.stages + 2};  // of a stage: warps arrive that have read it"
            )
        self._define_fetch()
        with w.block("if (thread == 0)"):
            with w.block(f"for (int stage = 0; stage < {plan.stages}; ++stage)"):
                w("barrier_init(filled + stage, 1);")
                if plan.parts:
                    w(f"barrier_init(readers + stage, {plan.threads // 32});")
            if plan.clustered:
                w("barrier_init(received, 1), barrier_init(received + 1, 1);")
            w("barriers_ready();")
        w("cluster_sync();" if plan.clustered else "__syncthreads();")
        self._fetch_first_stages()

    def _fetch_first_stages(self):
        with self.w.block("if (thread == 0)"):
            tile, fetch = self._fetch_of("stage")
            stages = self.plan.stages
            self.w(f"for (int stage = 0; stage < {stages} && {tile} < tiles; ++stage) {fetch};")

    def _define_fetch(self):
        plan, w = self.plan, self.w
        with w.block(f"auto fetch = [&](int tile, {'int round, ' if plan.parts else ''}int stage)"):
            w(f"const u32 first = (u32)tile * {plan.rows_per_tile}u;")
            w(f"const u32 count = min_of({plan.rows_per_tile}u, group_rows - first);")
            if self.by_slots:
                self._slots_to_fetch()
            row_bytes = sum(i.panels * self.program.width * i.dtype.itemsize for i in self.staged)
            slot_bytes = sum(i.panels * plan.vector * i.dtype.itemsize for i in self.staged)
            part = f"slots * {slot_bytes}u" if self.by_slots else f"{row_bytes}u"
            w(f"barrier_expect(filled + stage, count * {part});")
            for i in self.staged:
                self._fetch(i)
        w.lines[-1] += ";"

    @property
    def by_slots(self) -> bool:
        """Whether a stage has slots, some of a row's or shifted ones, instead of whole rows as they are in memory."""
        return self.plan.cluster > 1 or self.plan.parts or self.plan.shifted

    def _shift_of(self, row) -> str:
        """How many columns before a row's first column the slot begins that holds this column."""
        return f"(int)((u64){row} * {self.program.width}u % {self.plan.vector}u)"

    def _slots_to_fetch(self):
        """Declares `slot`, the first of a stage, and `slots`, how many there are."""
        plan, w = self.plan, self.w
        slot, slots = "0", "here"
        if plan.parts:
            of_round = plan.lanes * plan.slots
            slot, slots = f"round * {of_round}", f"max_of(min_of(here - slot, {of_round}), 0)"
        w(f"const int slot = {slot};")
        if not plan.shifted:
            w(f"const int slots = {slots};")
            return
        w(f"const int shift = {self._shift_of('(first_row + first)')};")
        # Of the array's last row, the slot that goes beyond its end is not copied.
        inside = f"first_row + first == rows - 1 ? ({self.program.width} + shift) / {plan.vector} : {self.slots}"
        w(f"const int slots = max_of(min_of({slots}, ({inside}) - start - slot), 0);")

    def _fetch_of(self, number) -> tuple[str, str]:
        """(the tile of a stage, the call that fetches it); stages have numbers from a block's first one on."""
        plan = self.plan
        stage = f"{number} % {plan.stages}"
        if not plan.parts:
            tile = f"chunk + {number} * chunks"
            return tile, f"fetch({tile}, {stage})"
        tile = f"chunk + {number} / {plan.rounds} * chunks"
        return tile, f"fetch({tile}, {number} % {plan.rounds}, {stage})"

    def _wait_for_stage(self, number):
        """Declares `staged`, the stage of this number, when it has been filled."""
        self._use_stage(number)
        self.w(
            f"barrier_wait(filled + {number} % {self.plan.stages}, ({number} / {self.plan.stages}) & 1);"
        )

    def _use_stage(self, number):
        self.w(
            f"const char* const staged = shared + {number} % {self.plan.stages} * {self.stage_bytes};"
        )

    def _release_stage(self, number):
        """Fetches what comes into the stage of this number next, when all threads have read it.

        Threads need not wait for each other after each part of a row: the last warp that has read it fetches.
        """
        w, plan, next_one = self.w, self.plan, f"({number} + {self.plan.stages})"
        tile, fetch = self._fetch_of(next_one)
        if plan.parts or plan.in_steps:
            w("__syncwarp();")
            last = f"lane_of_warp == 0 && arrives_last(readers + {number} % {plan.stages})"
        else:
            w("__syncthreads();")
            last = "thread == 0"
        w(f"if ({last} && {tile} < tiles) {fetch};")

    def _fetch(self, i: Input):
        plan, w, size = self.plan, self.w, i.dtype.itemsize
        pitch = row_pitch(self.program, self.plan, i)
        to = f"shared + stage * {self.stage_bytes} + {self.stage_offsets[i.number]}"
        if not self.by_slots and in_row_order(i.layout, self.program.row_sizes):
            start = addresses(self.program, i.layout, "(first_row + first)")
            w(
                f"bulk_load({to}, in{i.number} + ({start}) * {size}, count * {pitch}u, filled + stage);"
            )
            return
        with w.block("for (u32 k = 0; k < count; ++k)"):
            start = addresses(self.program, i.layout, "(first_row + first + k)")
            start += " - shift" if plan.shifted else ""
            w(f"const char* const from = in{i.number} + ({start}) * {size};")
            if not self.by_slots:
                w(f"bulk_load({to} + k * {pitch}u, from, {pitch}u, filled + stage);")
                return
            bytes_of_slot = plan.vector * size
            for panel in range(i.panels):
                at = (
                    f"from + {panel * self.program.width * size} + (start + slot) * {bytes_of_slot}"
                )
                place = f"{to} + k * {pitch}u + {panel * pitch // i.panels}"
                w(f"if (slots) bulk_load({place}, {at}, slots * {bytes_of_slot}u, filled + stage);")

    def _row_pointers(self):
        w = self.w
        staged = {i.number for i in self.staged}
        for i in [*self.wholes, *self.columns]:
            if (i.number in staged and not self.plan.shifted) or i in self.hoisted:
                continue
            for u in self.rows if i.whole or not self._alike(i) else (0,):
                offset = addresses(self.program, i.layout, self.row("row", u))
                # The strides of bits count bytes.
                one_byte = i.layout.bits or i.dtype.itemsize == 1
                scale = "" if one_byte else f" * {i.dtype.itemsize}"
                w(
                    f"const char* const {self.row(f'row_of_in{i.number}', u)} = in{i.number} + ({offset}){scale};"
                )
        for o in self.phases.wholes:
            for u in self.rows:
                offset = addresses(self.program, o.layout, self.row("row", u))
                scale = "" if o.layout.bits else f" * {o.dtype.itemsize}"
                w(
                    f"char* const {self.row(f'row_of_out{o.number}', u)} = out{o.number} + ({offset}){scale};"
                )

    def _alike(self, i: Input) -> bool:
        """Whether a column operand is the same for all rows that are worked on at once."""
        together = self.plan.rows_at_once
        for k in i.layout.rows:
            inner = self.sizes[k + 1 :]
            if together > 1 and (
                not all(isinstance(n, int) for n in inner)
                or math.prod(inner) % together
                or math.prod(inner) == 1
            ):
                return False
        return True

    @property
    def whole_rounds(self) -> bool:
        """Whether all slots that threads count exist."""
        plan = self.plan
        return plan.rounds * plan.slots * plan.lanes * plan.cluster == self.slots

    @contextlib.contextmanager
    def _over_slots(self, edges=True, rows=True):
        """A loop over the thread's slots: `first` is the slot's first column.

        Of shifted slots, `edge` says whether part of a slot is outside of the row, and `missing` whether part of it is
        behind the end of the array. What is outside of the row otherwise belongs to its neighbours, and may be read.
        """
        plan, w, width = self.plan, self.w, self.program.width
        with w.block(f"UNROLL for (int k = 0; k < {plan.slots}; ++k)"):
            turn = f"(round * {plan.slots} + k)" if plan.rounds > 1 else "k"
            w(f"const int slot = {turn} * {plan.lanes} + lane;")
            guard = contextlib.nullcontext() if self.whole_rounds else w.block("if (slot < here)")
            with guard:
                shift = " - shift" if plan.shifted else ""
                w(f"const int first = (start + slot) * {plan.vector}{shift};")
                if plan.shifted and edges:
                    if plan.rounds > 1:
                        # One comparison finds both ends: places before the row are large numbers without a sign.
                        w(f"const bool edge = (u32)first > {width - plan.vector}u;")
                        w("const bool behind = edge && first > 0;")
                    else:
                        # Of the unrolled slots, the first and the last ones alone are compiled with a test. A
                        # cluster's last block has the row's end.
                        last = width // plan.vector - (plan.cluster - 1) * self.part
                        at_end = f"k >= {max(0, last) // plan.lanes}"
                        w(f"const bool behind = {at_end} && first + {plan.vector} > {width};")
                        w("const bool edge = behind || (k == 0 && first < 0);")
                    w("(void)edge;")
                    if rows:
                        w("const bool missing = behind && row == rows - 1;")
                w("(void)first;")
                yield

    def _load(self, load, u, target):
        """Fills `target` with the words of a slot."""
        number, panel, backwards = load
        i, plan, w = self.program.inputs[number], self.plan, self.w
        size, width = i.dtype.itemsize, self.program.width
        alike = not i.whole and self._alike(i)
        row = self.row(f"row_of_in{number}", 0 if alike else u)
        if i in self.hoisted:
            row = f"(in{number} + ({addresses(self.program, i.layout, 'first_row')}) * {size})"
        if i.layout.bits:
            byte = f"{width // 8 - 1} - first / 8" if backwards else "first / 8"
            w(f"load<1>({target}, {row} + {panel * width // 8} + {byte});")
            return
        if i in self.staged:
            group = f"(group * {plan.rows_at_once * plan.passes} + " if plan.groups > 1 else "("
            which = f"{group}{f'pass * {plan.rows_at_once} + ' if plan.passes > 1 else ''}{u})"
            pitch = row_pitch(self.program, self.plan, i)
            slot = f"(k * {plan.lanes} + lane)" if plan.parts else "slot"
            at = (
                f"staged + {self.stage_offsets[number] + panel * pitch // i.panels} + {which} * {pitch}"
                f" + {slot} * {plan.vector * size}"
            )
            whole = f"load_shared<{plan.vector * size}>({target}, {at});"
            end = f"load_elements<{size}, {plan.vector}>({target}, {row}, first, 1, {width})"
            w(f"if (missing) {end}; else {whole}" if plan.shifted else whole)
            return
        row = f"{row} + {panel * width * size}" if panel else row
        one_by_one = f"load_elements<{size}, {plan.vector}>({target}, {row}, "
        if backwards:
            w(f"{one_by_one}{width - 1} - first, -1, {width});")
        elif plan.shifted and not i.whole:
            inside = f"load_inside<{size}, {plan.vector}>({target}, {row}, first);"
            w(f"if (edge) {one_by_one}first, 1, {width}); else {inside}")
        else:
            load = f"load<{plan.vector * size}>({target}, {row} + (long long)first * {size});"
            end = f"{one_by_one}first, 1, {width})"
            w(f"if (missing) {end}; else {load}" if plan.shifted else load)

    def _place_in_words(self, i: Input, u) -> str:
        """Where a slot's words have the element of the loop."""
        return "v"

    def _words(self, i: Input) -> int:
        return 1 if i.layout.bits else max(1, self.plan.vector * i.dtype.itemsize // 4)

    @property
    def _held_loads(self):
        """What is loaded into registers before the phases."""
        if self.plan.rounds > 1 or self.plan.source == "stream":
            return []
        held = [x for x in self.loads if self.program.inputs[x[0]].whole]
        if self.plan.hold_shared:
            held = [x for x in held if self.program.inputs[x[0]].layout.bits]
        return held

    def _load_rows(self):
        plan, w = self.plan, self.w
        if not self._held_loads:
            return
        for load in self._held_loads:
            for u in self.loaded_rows:
                w(
                    f"u32 {self.row(self.raw(load), u)}[{plan.slots}][{self._words(self.program.inputs[load[0]])}];"
                )
        with self._over_slots():
            for u in self.loaded_rows:
                for load in self._held_loads:
                    self._load(load, u, f"{self.row(self.raw(load), u)}[k]")

    def _hoist(self):
        plan, w = self.plan, self.w
        loads = [x for x in self.loads if self.program.inputs[x[0]] in self.hoisted]
        if not loads:
            return
        w("// operands that all rows of this block share")
        if plan.hoist == "registers":
            for load in loads:
                words = self._words(self.program.inputs[load[0]])
                w(f"u32 {self.raw(load)}[{plan.slots}][{words}];")
        with self._over_slots(rows=False):
            for load in loads:
                if plan.hoist == "registers":
                    self._load(load, 0, f"{self.raw(load)}[k]")
                else:
                    words = f"words_{self.raw(load)}"
                    w(f"u32 {words}[{self._words(self.program.inputs[load[0]])}];")
                    self._load(load, 0, words)
                    self._hoisted_words(load, "store<{bytes}>({at}, {words});", words)

    def _hoisted_words(self, load, text, words):
        """Moves a slot's words to or from the place in shared memory where this thread alone reads them.

        Units of 16 bytes that neighbouring threads have lie side by side.
        """
        plan = self.plan
        offset = self.memory.operands + self.hoisted_offsets[load]
        size = plan.vector * self.program.inputs[load[0]].dtype.itemsize
        unit = min(size, 16)
        for j in range(size // unit):
            place = f"(k * {plan.lanes} + lane) * {unit}"
            at = f"shared + {offset + j * unit * plan.slots * plan.lanes} + {place}"
            self.w(text.format(bytes=unit, at=at, words=f"{words} + {4 * j}" if j else words))

    def _shared(self, load) -> bool:
        i = self.program.inputs[load[0]]
        return not i.whole and self._alike(i) and i not in self.hoisted

    def _slot_words(self, load, u, loaded):
        """Declares `w<input>_<panel>`, the words of this slot."""
        i = self.program.inputs[load[0]]
        name = f"w{self.raw(load)[1:]}"
        if load in loaded:
            self.w(f"const u32* const {name} = {self.row(self.raw(load), u)}[k];")
        elif i in self.hoisted and self.plan.hoist == "registers":
            self.w(f"const u32* const {name} = {self.raw(load)}[k];")
        elif i in self.hoisted:
            self.w(f"u32 {name}[{self._words(i)}];")
            self._hoisted_words(load, "load_shared<{bytes}>({words}, {at});", name)
        else:
            self.w(f"u32 {name}[{self._words(i)}];")
            self._load(load, u, name)

    def _load_one(self, n, i, this, offset):
        if i.layout.bits:
            raise NotARowProgram("an array of bits", "has no single element that could be loaded")
        size = i.dtype.itemsize
        self.w(f"u32 words_{this}[{max(1, size // 4)}];")
        self.w(f"load<{size}>(words_{this}, in{i.number} + ({offset}) * {size});")
        self.w(f"const {c_type(n.dtype)} {this} = {element(i.dtype, f'words_{this}', '0')};")

    def _declare_kept(self, n, u):
        count = self.plan.slots * self.plan.vector
        if n.dtype == BOOL:
            self.w(f"u32 {self._kept(n, u)}[{-(-count // 32)}] = {{}};")
        else:
            self.w(f"{c_type(n.dtype)} {self._kept(n, u)}[{count}];")

    def _kept(self, n, u) -> str:
        return self.row(f"kept_{n.number}", u)

    def _keep(self, n, u):
        if n.dtype == BOOL:
            self.w(
                f"{self._kept(n, u)}[{self._place()} / 32] |= (u32){self.name(n, u)} << ({self._place()} % 32);"
            )
        else:
            self.w(f"{self._kept(n, u)}[{self._place()}] = {self.name(n, u)};")

    def _read_kept(self, n, u) -> str:
        if n.dtype == BOOL:
            return f"({self._kept(n, u)}[{self._place()} / 32] >> ({self._place()} % 32)) & 1u"
        return f"{self._kept(n, u)}[{self._place()}]"

    def _forget(self):
        """Makes the compiler compute values again in each phase, for which there are no registers."""
        self._forget_loaded(self._held_loads)
        if self.plan.hold_shared and self.plan.lanes <= 32 and self.plan.cluster == 1:
            self.w("forget_memory();")

    def _forget_loaded(self, loaded):
        for load in sorted(loaded):
            for u in self.loaded_rows:
                name, words = self.row(self.raw(load), u), self._words(self.program.inputs[load[0]])
                loops = f"UNROLL for (int k = 0; k < {self.plan.slots}; ++k) UNROLL for (int j = 0; j < {words}; ++j)"
                self.w(f"{loops} forget({name}[k][j]);")

    def _condition(self, o: Output, u, extra=()) -> str:
        """Which rows write a result: the valid ones; of rows that share an element, the first."""
        missing = [k for k in range(len(self.sizes)) if k not in o.layout.rows]
        parts = [*extra, *([self.row("valid", u)] if self.ragged else [])]
        if len(missing) == len(self.sizes) and missing:
            parts.append(f"{self.row('row', u)} == 0")
        else:
            parts += [f"{row_index(self.sizes, self.row('row', u), k, k)} == 0" for k in missing]
        return " && ".join(parts)

    def _store(self, o: Output, u):
        plan, w, size = self.plan, self.w, o.dtype.itemsize
        condition = self._condition(o, u)
        row = self.row(f"row_of_out{o.number}", u)
        with w.block(f"if ({condition})") if condition else contextlib.nullcontext():
            for panel in range(len(o.nodes)):
                values = [f"result{o.number}_{panel}[{v}]" for v in range(plan.vector)]
                words = f"words{o.number}_{panel}"
                if o.layout.bits:
                    byte = " | ".join(f"((u32){x} << {v})" for v, x in enumerate(values))
                    w(f"const u32 {words}[1] = {{{byte}}};")
                    w(f"store<1>({row} + {panel * self.program.width // 8} + first / 8, {words});")
                    continue
                held = ", ".join(words_of(o.dtype, values))
                w(f"const u32 {words}[{max(1, plan.vector * size // 4)}] = {{{held}}};")
                to = f"{row} + {panel * self.program.width * size} + (long long)first * {size}"
                store = f"store<{plan.vector * size}>({to}, {words});"
                if plan.shifted:
                    edge = f"store_edge<{size}, {plan.vector}>({to}, {words}, first, {self.program.width});"
                    store = f"if (edge) {edge} else {store}"
                w(store)

    def _store_row_results(self):
        self._row_values(lambda n: True, "values of the row, from its reductions")
        for o in self.program.outputs:
            if o.after or o.layout.columns is not None:
                continue
            self._store_row_result(o)

    def _store_row_result(self, o: Output):
        for u in self.rows:
            self._store_numbers(o, [u])

    def _store_numbers(self, o: Output, rows):
        """Stores the numbers of rows that follow each other in memory."""
        w, size = self.w, len(rows) * o.dtype.itemsize
        extra = ["lane == 0", *(["rank == 0"] if self.plan.cluster > 1 else [])]
        with w.block(f"if ({self._condition(o, rows[0], extra)})"):
            words = ", ".join(words_of(o.dtype, [self.name(o.nodes[0], u) for u in rows]))
            w(f"const u32 words[{max(1, size // 4)}] = {{{words}}};")
            offset = addresses(self.program, o.layout, self.row("row", rows[0]))
            w(f"store<{size}>(out{o.number} + ({offset}) * {o.dtype.itemsize}, words);")
