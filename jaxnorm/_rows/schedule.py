"""The choice of a schedule: which threads do what. Its rules follow measurements (docs/experiments/row-programs.md)."""

import dataclasses
import functools
import math

from jaxnorm._rows.kept import Kept, with_kept
from jaxnorm._rows.phases import Phases
from jaxnorm._rows.plan import THREADS_MAX, Device, Plan
from jaxnorm._rows.rules import Program
from jaxnorm._rows.schedule_steps import OTHER_SCHEDULES, StepsShape, cluster_shape, grid_shape
from jaxnorm._rows.shared_memory import (
    exchanged_words,
    hoisted_layout,
    in_row_order,
    round_up,
    row_words,
    shared_bytes,
    slots_of,
    slots_of_line,
    stage_bytes,
)

# Where nothing is summed over rows, rows whose arrays have more bytes are fetched ahead: registers hold too few rows.
# The smallest limit is for programs whose phases take time, the largest for other programs with at most one exchange a
# row.
LONG_ROWS = 24 * 1024, 40 * 1024, 64 * 1024
# Rows of odd length with operands of columns are fetched ahead if they have more bytes. Such operands are read one by
# one, because they have no grid in common with the rows. Blocks that stay for many rows read them once.
ODD_ROWS = 4 * 1024
# Bytes of rows that one block reads at once if nothing of a row's length is written.
READ_ROWS = 104 * 1024
# Rows with more columns have 64 elements of 16 bits a thread instead of 32: more loads are under way then, because more
# elements share a thread's registers of addresses and counters. If a row has operands of columns, two blocks of threads
# with so many elements hold rows up to the second number.
MANY_COLUMNS = 8192, 24 * 1024
# Where all arrays stay in the L2 cache, blocks fetch ahead rows of so many bytes, least and most, if each
# multiprocessor has so many bytes of them.
CACHED_ROWS = 256, 16 * 1024
CACHED_PART = 8 * 1024
# Elements of a row, or of a block's part of it, beyond which one block of 1024 threads is not enough.
LONG_PART = 16 * 1024
# The part of a ring's shared memory that rows may fill, where stages have parts of rows. The rest is fetched ahead.
PARTS_FILL = 0.68
# Partial results of an exchange from which on small blocks hold parts of rows. A multiprocessor has several of them:
# one computes while another one exchanges.
MANY_WORDS, SMALL_BLOCK = 4, 128
# Slots of a row that few threads share.
SHORT_ROWS = 128
# Elements of a row that a thread may have where that leaves fewer threads idle.
SLOT_ELEMENTS = 56
# Elements of rows that 512 threads share although more threads could: one block loads while another one writes or
# exchanges.
BLOCK_ELEMENTS = 20 * 1024
# Bytes that the stages of a multiprocessor's blocks have where rows are summed up: more are not faster.
STAGED_BYTES = 64 * 1024
# Where rows are summed up, a warp has rows of so many columns to itself: 40 elements a thread, or 32 with more than two
# sums, which registers hold for each column.
WARP_COLUMNS = 40 * 32
WARP_COLUMNS_OF_MANY_SUMS = 32 * 32
# Rows of a block, at least, that adds up groups of rows with more than 128 threads a multiprocessor: each block writes
# partial sums of its groups.
GROUP_ROWS = 48
# This many instructions for each byte from or to memory cost no time: no value is kept from phase to phase.
FREE_INSTRUCTIONS = 8


def schedule(program: Program, device: Device, **asked) -> Plan:
    """The plan for a program on a device. `asked` forces fields of the plan, for tests and the search."""
    return _Scheduler(program, device, asked).plan()


class _Scheduler:
    def __init__(self, program, device, asked):
        self.program, self.device, self.asked = program, device, asked
        self.phases = Phases(program)
        inputs, outputs = program.inputs, self.phases.wholes
        self.wholes = [inputs[n] for n in self.phases.inputs(whole=True)]
        self.columns = [inputs[n] for n in self.phases.inputs(whole=False)]
        self.dtypes = [i.dtype for i in self.wholes if not i.layout.bits] + [
            o.dtype for o in outputs if not o.layout.bits
        ]
        self.row_bytes = sum(
            i.layout.columns * i.dtype.itemsize for i in self.wholes if not i.layout.bits
        )
        self.panels = max(
            [len(n.args) for n in self.phases.order if n.op == "reduce"]
            + [len(o.nodes) for o in outputs]
            + [i.panels for i in self.wholes],
            default=1,
        )
        self.levels = self.phases.count - 1
        self.sums = bool(self.phases.row_sums)
        self.heavy = self.phases.cost > 36
        # Several rows share a load of an operand such as a rotary table, so that rows are advanced together.
        self.shared_rows = any(i.layout.strides for i in self.columns)

    def plan(self) -> Plan:
        if self.program.neighbours != 1:
            from jaxnorm._rows.schedule_strided import strided_plan

            return strided_plan(self)
        vector, shifted = self._vector
        count = slots_of(self.program.width, vector, shifted)
        can_ring = self._can_ring(vector, shifted)
        if shape := self._grid(vector, count, can_ring and not shifted and self._can_cut(vector)):
            return self._plan_in_steps(shape, vector, shifted)
        source = self._source(count, shifted, can_ring)
        if source == "ring" and (shape := self._steps_of_cluster(vector, count)):
            return self._plan_in_steps(shape, vector, shifted)
        persistent = source == "ring" or self.sums
        if shifted and self.columns and not persistent and "vector" not in self.asked:
            # Column operands have no grid in common with the rows: two columns a slot keep their loads close together.
            vector = max(2, math.gcd(self.program.width, vector))
            count = slots_of(self.program.width, vector, shifted)
        long = count > SHORT_ROWS
        if source == "ring" and self._in_parts(vector):
            return self._plan_of_parts(vector, count, shifted)
        cluster = self._cluster(source, vector)
        if source == "ring" and not self._fits_ring(cluster):
            source, cluster = "stream", 1
        part = -(-count // cluster)
        elements = self.panels * vector
        lanes = self.asked.get("lanes") or self._lanes(
            source, part, elements, cluster, vector, shifted
        )
        slots, rounds = -(-part // lanes), 1
        if source == "stream":
            slots = self.asked.get("slots") or (4 if len(self.wholes) == 1 else 2)
            slots = max(1, min(slots, -(-part // lanes), 32 // elements or 1))
            # A block that keeps sums over rows in memory, because registers do not hold them, has one row at a time.
            lanes = max(lanes, 32) if self.sums and lanes * slots < part else lanes
            rounds = -(-part // (lanes * slots))
        threads = (
            lanes
            if lanes > 32 or cluster > 1 or shifted or (rounds > 1 and self.sums)
            else max(lanes, 128 if lanes == 32 else 256)
        )
        threads = self.asked.get("threads") or threads
        if source == "ring" and lanes <= 32:
            while (
                threads > 32
                and 2 * threads // lanes * self.row_bytes > self.device.shared_bytes - 8192
            ):
                threads //= 2
        group_rows = self._group_rows()
        groups = threads // lanes if lanes <= 32 else 1
        while isinstance(group_rows, int) and groups > 1 and group_rows % groups:
            groups //= 2
        if lanes <= 32 and cluster == 1 and groups * lanes >= 32:
            threads = groups * lanes
        at_once = self._rows_at_once(
            source, cluster, long, vector, groups, group_rows, shifted, slots * elements, threads
        )
        passes = 1
        if source == "ring" and cluster == 1 and not (shifted or self._in_cache):
            passes = self._passes(groups, at_once, group_rows)
        plan = Plan(
            source=source,
            vector=vector,
            lanes=lanes,
            slots=slots,
            rounds=rounds,
            threads=threads,
            cluster=cluster,
            rows_at_once=at_once,
            passes=passes,
            stages=0,
            blocks=1,
            persistent=persistent,
            hoist=self._hoist(persistent and rounds == 1, slots * elements),
            hold_shared=source == "ring" and not (cluster > 1 and len(self.wholes) == 1),
            keep=frozenset(),
            shifted=shifted,
        )
        if source == "ring":
            stage = max(stage_bytes(self.program, plan), 1)
            if self.sums:
                wanted = min(3, STAGED_BYTES // (stage * max(1, self._blocks(plan)[0])))
            else:
                wanted = 2 if shifted else min(4, 49152 // stage)
            plan = self._with_stages(plan, max(2, wanted))
        return self._with_registers(plan)

    def _with_stages(self, plan, wanted) -> Plan:
        """The plan with as many stages as are asked for or wanted, and fit."""
        room = self.device.shared_bytes - 4096
        stage = max(stage_bytes(self.program, plan), 1)
        if plan.hoist == "shared" and 2 * stage + hoisted_layout(self.program, plan)[1] > room:
            plan = dataclasses.replace(plan, hoist="")
        most = (room - hoisted_layout(self.program, plan)[1]) // stage
        stages = max(1, min(self.asked.get("stages") or wanted, most))
        return dataclasses.replace(plan, stages=stages)

    def _hoist(self, possible, elements) -> str:
        """Where column operands stay, of which a thread has as many elements as of the row."""
        if not possible or not self.columns:
            return ""
        if "hoist" in self.asked:
            return self.asked["hoist"]
        if elements <= (16 if self.heavy else 32):
            return "registers"
        return "shared"

    @functools.cached_property
    def _vector(self) -> tuple[int, bool]:
        """(columns of a slot, whether slots are shifted)."""
        width = self.program.width
        bits = any(a.layout.bits for a in (*self.wholes, *self.columns, *self.phases.wholes))
        if bits:
            return 8, False  # a slot is a byte
        largest = max((d.itemsize for d in self.dtypes), default=2)
        smallest = min((d.itemsize for d in self.dtypes), default=2)
        vector = 1 << int(math.log2(min(16 // smallest, 8 if largest < 8 else 4)))
        if "vector" in self.asked:
            vector = self.asked["vector"]
        aligned = math.gcd(width, vector)
        if aligned == vector or width < 512 or not self._can_shift():
            return aligned, False
        return vector, True

    def _can_shift(self) -> bool:
        rows = self.program.row_sizes
        arrays = [*self.wholes, *self.phases.wholes]
        # The rows of a block lie alike, so a block has every eighth row. With many groups, blocks are too few for this.
        groups = math.prod(rows[: self.phases.group_dims])
        few = isinstance(groups, int) and groups * 8 <= self.device.multiprocessors
        return (
            few
            and self.panels == 1
            and all(
                a.layout.columns == self.program.width and in_row_order(a.layout, rows)
                for a in arrays
            )
        )

    def _can_ring(self, vector, shifted) -> bool:
        """Whether bulk copies can fetch rows: they begin and end at multiples of 16 bytes, or follow each other."""
        staged = [i for i in self.wholes if not i.layout.bits]
        return (
            self.device.clusters
            and vector > 1
            and bool(staged)
            and (
                self._can_cut(vector)
                if shifted
                else all(self.program.width * i.dtype.itemsize % 16 == 0 for i in staged)
            )
            and all(not _backwards(self.phases, i.number) for i in staged)
        )

    def _source(self, count, shifted, can_ring) -> str:
        if "source" in self.asked:
            return (
                "registers"
                if self.asked["source"] == "ring" and not can_ring
                else self.asked["source"]
            )
        if not self.phases.wholes and not self.sums and self.levels <= 1 and count >= 1024:
            at_once = self.cheap and not shifted and self.row_bytes <= READ_ROWS
            return "registers" if at_once else "stream"
        if can_ring and self.levels and (self._fetched_ahead(shifted) or self._in_cache):
            return "ring"
        # Registers hold the data of a block of 1024 threads beside their work: 32 words for each thread.
        words = self.row_bytes / 4 + self.program.width * len(self.phases.row_sums)
        held = self.levels or self.sums
        return (
            "stream"
            if held and words > THREADS_MAX * 32
            else "registers"
            if held
            else self._one_phase(count)
        )

    def _fetched_ahead(self, shifted) -> bool:
        if self.sums:
            return not self._columns_vary
        if self._reads_columns_once(shifted):
            return True
        if not self.cheap:
            return self.row_bytes > LONG_ROWS[0] * len(self.wholes)
        return self.row_bytes > LONG_ROWS[2 if self.levels == 1 else 1] * len(self.wholes)

    def _reads_columns_once(self, shifted) -> bool:
        """Whether blocks stay for many rows of odd length, and keep the operands of columns."""
        long = self.row_bytes > ODD_ROWS
        return shifted and long and bool(self.columns) and not self._columns_vary

    @functools.cached_property
    def _in_cache(self) -> bool:
        """Whether operands of columns are much of what is read, as the L2 cache has all rows and results.

        Blocks that stay for many rows read these operands once.
        """
        row_bytes = self.row_bytes / max(1, len(self.wholes))
        return (
            bool(self.columns)
            and not (self.sums or self.heavy or self._columns_vary or self._vector[1])
            and CACHED_ROWS[0] <= row_bytes <= CACHED_ROWS[1]
            and self._rows is not None
            and self._rows * row_bytes >= self.device.multiprocessors * CACHED_PART
            and self._rows * (self.row_bytes + self._written_bytes) <= self.device.l2_bytes
        )

    @functools.cached_property
    def _rows(self) -> int | None:
        """How many rows there are; None where that is not known."""
        rows = math.prod(self.program.row_sizes)
        return rows if isinstance(rows, int) else None

    @functools.cached_property
    def _written_bytes(self) -> int:
        """Bytes of a row that are written."""
        return sum((o.layout.columns or 1) * o.dtype.itemsize for o in self.phases.wholes)

    @property
    def _columns_vary(self) -> bool:
        """Whether rows of a block have column operands of their own."""
        return any(k >= self.phases.group_dims for i in self.columns for k in i.layout.rows)

    def _one_phase(self, count) -> str:
        """Without reductions and sums over rows, a row is a number of independent slots."""
        return "stream" if count * self.panels > THREADS_MAX * 4 else "registers"

    def _fits_ring(self, cluster) -> bool:
        """Whether a cluster's blocks hold a row twice, one stage being fetched while another one is used."""
        return 2 * self.row_bytes / cluster <= self.device.shared_bytes - 8192

    def _can_cut(self, vector) -> bool:
        """Whether bulk copies can fetch a part of a row, which is whole units of 16 bytes."""
        staged = [i for i in self.wholes if not i.layout.bits]
        return all(vector * i.dtype.itemsize % 16 == 0 for i in staged)

    def _cluster(self, source, vector) -> int:
        if source != "ring" or not self._can_cut(vector):
            return 1
        if "cluster" in self.asked:
            return self.asked["cluster"]
        # An exchange within a block costs less than one between blocks.
        room = self.device.shared_bytes - 8192
        if self._columns_stay:
            return self._blocks_with_columns
        width, whole = self.program.width * self.panels, room // 2
        most = 2 * LONG_PART if not self.sums else 256 * 32 if self.heavy else 512 * 24
        alone = LONG_PART if self.cheap and not self.sums else most
        if self.row_bytes <= whole and width <= alone:
            return 1
        fits = (c for c in (2, 4, 8) if self.row_bytes <= whole * c and width <= most * c)
        return next(fits, 8)

    def _in_parts(self, vector) -> bool:
        """Whether the stages of a ring have parts of rows."""
        if self.sums or not self._can_cut(vector):
            return False
        if "parts" in self.asked:
            return self.asked["parts"]
        if self._columns_stay:
            return False
        pair = self._fits_ring(2) and self.program.width * self.panels <= 2 * LONG_PART
        fits = self.row_bytes <= 8 * PARTS_FILL * self.device.shared_bytes
        return self.cheap and fits and not pair

    @property
    def cheap(self) -> bool:
        """Whether each phase may compute everything again."""
        return self.work <= FREE_INSTRUCTIONS

    @functools.cached_property
    def work(self) -> float:
        """Instructions for each byte from or to memory, if each phase computes everything again."""
        instructions = sum(n.cost for phase in self.phases.evaluated(()) for n in phase)
        return instructions * self.program.width / max(1, self.row_bytes + self._written_bytes)

    @functools.cached_property
    def column_bytes(self) -> int:
        return sum(i.layout.columns * i.dtype.itemsize for i in self.columns)

    @functools.cached_property
    def _columns_stay(self) -> bool:
        """Whether long rows are held whole because reading column operands for each would cost more than the row."""
        little = 2 * self.work <= FREE_INSTRUCTIONS
        fits = bool(self._blocks_with_columns)
        return not self.sums and little and fits and self.column_bytes > self.row_bytes

    @functools.cached_property
    def _blocks_with_columns(self) -> int:
        """Blocks of the smallest cluster whose memory has a row twice beside the operands of columns; 0 if none has."""
        needed, room = 2 * self.row_bytes + self.column_bytes, self.device.shared_bytes - 8192
        return next((c for c in (1, 2, 4, 8) if needed <= room * c), 0)

    def _plan_of_parts(self, vector, count, shifted) -> Plan:
        def cluster_of(rows):
            room = PARTS_FILL * self.device.shared_bytes
            return next((c for c in (1, 2, 4, 8) if rows * self.row_bytes <= room * c), 8)

        # Operands of columns come from the L2 cache in each round.
        several = self.column_bytes > self.row_bytes and cluster_of(2) <= 2
        rows = 1 if shifted else self.asked.get("rows_at_once") or (2 if several else 1)
        small = max(exchanged_words(self.phases), default=0) >= MANY_WORDS
        cluster = self.asked.get("cluster") or (8 if small else cluster_of(rows))
        part = -(-count // cluster)
        most_lanes = self.asked.get("lanes") or (SMALL_BLOCK if small else THREADS_MAX)
        lanes = min(most_lanes, round_up(part, 32))
        # At least two parts a row, so that one is fetched while another one is read.
        elements = 32 if small else 16
        most_slots = max(1, min(elements // (self.panels * vector), part // (2 * lanes)))
        slots = self.asked.get("slots") or most_slots
        rounds = -(-part // (lanes * slots))
        slots = -(-part // (lanes * rounds))
        plan = Plan(
            source="ring",
            vector=vector,
            lanes=lanes,
            slots=slots,
            rounds=rounds,
            threads=lanes,
            cluster=cluster,
            rows_at_once=rows,
            passes=1,
            stages=0,
            blocks=1,
            persistent=True,
            hoist="",
            hold_shared=True,
            keep=frozenset(),
            shifted=shifted,
        )
        # More parts than two rows have would wait in any case.
        return self._with_registers(
            self._with_stages(plan, max(2, rounds) if small else 2 * rounds)
        )

    def _grid(self, vector, count, can_cut) -> StepsShape | None:
        if not (
            can_cut
            and self.levels
            and self._rows is not None
            # Sums over rows must be the ones of a block's columns.
            and not any(n.attr[1] or n.attr[0] for n in self.phases.row_sums)
            and self._short_parts
        ):
            return None
        return grid_shape(
            rows=self._rows,
            slots=count,
            line=slots_of_line(self.program, vector),
            row_bytes=self.row_bytes,
            written_bytes=self._written_bytes,
            words=exchanged_words(self.phases),
            row_words=row_words(self.program, self.phases),
            elements=self.panels * vector,
            has_columns=bool(self.columns),
            sums=len(self.phases.row_sums),
            heavy=self.heavy,
            device=self.device,
            asked=self.asked,
        )

    def _steps_of_cluster(self, vector, count) -> StepsShape | None:
        """How several rows are under way in a cluster; None where one row is at a time.

        Where operands of columns fill the registers, a block has one row at a time, and waits while the blocks of its
        cluster exchange. With more than two blocks, several rows under way take less time. So do few rows of several
        arrays, of which a multiprocessor has one block.
        """
        long = self._columns_stay and self._blocks_with_columns > 2
        few = self._rows is not None and self._rows <= self.device.multiprocessors
        few = few and self.cheap and len(self.wholes) > 1 and not self.columns
        asked = "lag" in self.asked or (
            (long or few) and not any(a in self.asked for a in OTHER_SCHEDULES)
        )
        can = self._short_parts and self._can_cut(vector) and self.levels and not self.sums
        if not asked or not can:
            return None
        return cluster_shape(
            rows=self._rows,
            slots=count,
            elements=self.panels * vector,
            slot_bytes=[
                i.panels * vector * i.dtype.itemsize for i in self.wholes if not i.layout.bits
            ],
            column_bytes=self.column_bytes // self.program.width,
            words=exchanged_words(self.phases),
            row_words=row_words(self.program, self.phases),
            device=self.device,
            asked=self.asked,
        )

    @property
    def _short_parts(self) -> bool:
        """Whether the partial result of each reduction is one word."""
        return all(n.dtype.itemsize <= 4 for n in self.phases.order if n.op == "reduce")

    def _plan_in_steps(self, shape, vector, shifted) -> Plan:
        elements = self.panels * vector * shape.slots
        return Plan(
            source="ring",
            vector=vector,
            lanes=shape.lanes,
            slots=shape.slots,
            rounds=1,
            threads=shape.threads,
            cluster=shape.cluster,
            rows_at_once=1,
            passes=1,
            stages=shape.stages,
            blocks=1,
            persistent=True,
            hoist="registers" if self.columns and (elements <= 16 or not shape.grid) else "",
            hold_shared=True,
            keep=frozenset(),
            shifted=shifted,
            grid=shape.grid,
            lag=shape.lag,
            exchangers=shape.exchangers,
        )

    def _elements(self, source, slots, cluster, vector, shifted) -> int:
        """Elements of a row that a thread should have."""
        if self.sums:
            return 8 if not self.levels and not self.heavy else 32 if shifted else 16
        if source == "ring" and self._columns_stay:
            return 32
        if cluster > 1:
            return 16 if self.cheap else 64
        if vector == 1 or not self.levels or self.shared_rows:
            return 16
        if self.columns and source == "registers" and slots <= SHORT_ROWS:
            return 16
        if len(self.wholes) > 1 and (self.cheap or self.row_bytes <= LONG_ROWS[0]):
            return 16
        least, most = MANY_COLUMNS
        many = self.program.width > least and not (self.columns and self.program.width > most)
        many = many and self.cheap and self.dtypes[0].itemsize == 2
        return 64 if many and source == "registers" and not shifted else 32

    def _lanes(self, source, part, elements, cluster, vector, shifted) -> int:
        """Threads that share a row; `elements` of each slot."""
        if not self.wholes and not self.phases.wholes and self.program.width == 1:
            return 1
        if source == "stream":
            # Rows that do not fill the GPU with small blocks get the largest ones.
            few_rows = self._rows is not None and self._rows <= self.device.multiprocessors
            most = 512 if not shifted else THREADS_MAX if few_rows else 256
            return min(most, max(32, round_up(part, 32)))
        wanted = self._elements(source, part, cluster, vector, shifted)
        most_elements = 16 if self.sums or self.columns else 32  # of a short row
        in_warp = 32 * most_elements
        if source == "ring" and self.sums and not self.phases.group_dims and not shifted:
            many = len(self.phases.row_sums) > 2
            in_warp = WARP_COLUMNS_OF_MANY_SUMS if many else WARP_COLUMNS
        if part * elements <= in_warp:
            lanes = min(32, _power_of_2(part))
            # A thread has 16 elements of a short row that is normalized.
            fewest = 4 if self.columns and len(self.wholes) == 1 else 8
            while (
                lanes > fewest
                and -(-part // (lanes // 2)) * elements <= most_elements
                and lanes * vector >= 64
            ):
                lanes //= 2
            return lanes
        fewest = -(-part // self._most_threads(source, cluster, part * elements, wanted))
        wanted = max(1, wanted // elements)

        def cost(slots):
            """Threads without a slot cost as much as others; more or less work for each thread costs little."""
            idle = round_up(-(-part // slots), 32) * slots / part
            return idle * (1 + 0.05 * abs(math.log2(slots / wanted))), slots

        slots = min(range(fewest, max(fewest, wanted, SLOT_ELEMENTS // elements) + 1), key=cost)
        return round_up(-(-part // slots), 32)

    def _most_threads(self, source, cluster, columns, wanted) -> int:
        """The most threads that share a row, or a block's part of it, which has so many columns."""
        if self.sums:
            return 256 if self.heavy else 512
        if source == "ring":
            return 512 if cluster == 1 or wanted == 64 else THREADS_MAX
        fit = columns <= max(512 * wanted, BLOCK_ELEMENTS)
        return 512 if fit or not self.phases.wholes else THREADS_MAX

    def _group_rows(self):
        """Rows that one sum over rows adds up; tiles must not have rows of two sums."""
        if not self.phases.group_dims:
            return None
        return math.prod(self.program.row_sizes[self.phases.group_dims :])

    def _rows_at_once(
        self, source, cluster, long, vector, groups, group_rows, shifted, elements, threads
    ) -> int:
        if shifted or source == "stream":
            return 1
        rows = self.asked.get("rows_at_once") or self._wanted_rows(
            source, cluster, long, vector, groups, elements, threads
        )
        while rows > 1 and isinstance(group_rows, int) and group_rows % (groups * rows):
            rows //= 2
        return rows

    def _wanted_rows(self, source, cluster, long, vector, groups, elements, threads) -> int:
        if cluster > 1:
            # With two sums over rows, one row's instructions hide the other one's exchange.
            two = len(self.phases.row_sums) > 1 and not self.heavy and elements <= 16
            fit = 4 * self.row_bytes <= cluster * (self.device.shared_bytes - 8192)
            return 2 if two and fit else 1
        if not long and not self.columns:
            return 1
        if source == "ring" and self._in_cache:
            # Registers hold 64 bytes of each of two rows beside the operands of columns.
            return 2 if elements * sum(i.dtype.itemsize for i in self.wholes) <= 64 else 1
        if self.sums and self.heavy:
            # The latency of instructions is hidden by elements side by side, or by a multiprocessor's other blocks.
            return 2 if elements <= 16 and threads > 64 else 1
        if self.sums and self.phases.group_dims and self.levels == 1:
            # The rows of a group share operands of columns.
            return 4 if elements <= 16 and len(self.phases.row_sums) <= 2 else 2
        if self.sums and self.levels == 1:
            return 2 if self._few_threads(threads, groups, elements) else 1
        if self.sums:
            # Nothing but the operands' latency keeps a thread waiting where there are no reductions.
            return 2 if long and not self.levels else 1
        if source != "registers":
            return 1
        if len(self.wholes) != 1 or vector == 1:
            return 4 if self.levels and long and elements <= 8 else 1
        if elements > 16:
            return 1
        if self.shared_rows:
            return 2 if elements > 8 else 4 if long else 1
        return 1 if self.levels and long else 2

    def _passes(self, groups, at_once, group_rows) -> int:
        """Short rows are fetched in tiles of some kilobytes."""
        passes, room = 1, 16384 + 8192 * (len(self.wholes) > 1)
        while passes < 16 and groups * at_once * passes * 2 * self.row_bytes <= room:
            if isinstance(group_rows, int) and group_rows % (groups * at_once * passes * 2):
                break
            passes *= 2
        return passes

    def _few_threads(self, threads, groups, elements) -> bool:
        """Whether the blocks of a program with sums over rows have so few threads that each works on two rows."""
        lanes = threads // groups
        together = threads * self._blocks_of_sums(threads, lanes, elements, False)
        if len(self.phases.row_sums) > 1:
            return groups == 1 and together <= 320
        return together < 256

    def _blocks_of_sums(self, threads, lanes, elements, shifted) -> int:
        """Blocks of a multiprocessor: a ring hides the latency of memory, what is left is that of instructions."""
        # Shifted rows are worked on one at a time.
        if shifted or (self.heavy and not self.phases.group_dims):
            return -(-256 // threads)
        if self.phases.group_dims:
            many = (self._rows or 0) // (GROUP_ROWS * self.device.multiprocessors)
            return max(1, 128 // threads, min(round(256 / threads), many))
        several = len(self.phases.row_sums) > 1
        if lanes <= 32:
            # One sum leaves registers for warps that work on two rows, and then one block is enough.
            two_rows = not several and 24 <= elements <= 32 and len(self.wholes) <= 2
            return 1 if two_rows else max(1, round(256 / threads))
        if several:
            return max(1, 320 // max(threads, 128))
        return -(-128 * 16 // (threads * min(elements, 16)))

    # ---- how many blocks a multiprocessor's registers hold ----

    def _with_registers(self, plan) -> Plan:
        shared = shared_bytes(self.program, plan)
        most = max(1, min(32, (self.device.shared_bytes + 1024) // (shared + 1024)))
        if "blocks" in self.asked:
            blocks = min(self.asked["blocks"], most)
            return self.kept(dataclasses.replace(plan, blocks=blocks)).plan

        def cost(kept) -> float:
            idle = max(0, THREADS_MAX - kept.plan.blocks * plan.threads)
            return kept.cost * 1.17 ** (idle / 256) * min(1.3, 1 + 0.05 * kept.missing)

        numbers = sorted({max(1, min(n, most)) for n in self._blocks(plan)}, reverse=True)
        options = [self.kept(dataclasses.replace(plan, blocks=n)) for n in numbers]
        return min(options, key=cost).plan

    def kept(self, plan) -> Kept:
        """The plan with what its registers hold from phase to phase."""
        return with_kept(self.program, self.phases, plan)

    def _blocks(self, plan) -> list[int]:
        """How many there may be: more threads hide more latency, fewer have more registers."""
        elements = plan.slots * plan.vector * self.panels
        if self.sums and (self.heavy or self.levels) and not self._columns_vary:
            return [self._blocks_of_sums(plan.threads, plan.lanes, elements, plan.shifted)]
        if plan.source == "ring" and self._in_cache:
            return [-(-(512 if elements <= 24 else 256) // plan.threads)]
        if plan.source == "ring" and self._reads_columns_once(plan.shifted):
            return [round(512 / plan.threads)]
        threads = (1024, 896, 768, 640, 512)
        if self.sums or (self.heavy and self.levels) or plan.lanes < 32:
            threads = (512,)
        return [round(n / plan.threads) for n in threads]


def _backwards(phases, number) -> bool:
    return any(n.op == "input" and n.attr[0] == number and n.attr[2] for n in phases.order)


def _power_of_2(n) -> int:
    return 1 << max(0, (n - 1).bit_length())
