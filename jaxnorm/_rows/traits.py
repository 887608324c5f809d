"""What the choice of a schedule asks of a program on a device."""

import functools
import math

from jaxnorm._rows.phases import Phases
from jaxnorm._rows.plan import Device
from jaxnorm._rows.rules import Program
from jaxnorm._rows.shared_memory import in_row_order, slots_of

# Where nothing is summed over rows, rows whose arrays have more bytes are fetched ahead: registers hold too few rows.
# The smallest limit is for programs whose phases take time, the largest for other programs with at most one exchange a
# row, and with operands of columns that have at most twice the row's bytes.
LONG_ROWS = 24 * 1024, 40 * 1024, 64 * 1024
# The limit for rows whose operands of columns stay in a block's memory.
LONG_ROWS_WITH_COLUMNS = 56 * 1024
# Elements of a row, or of a block's part of it, beyond which one block of 1024 threads is not enough.
LONG_PART = 16 * 1024
# Rows of odd length with operands of columns are fetched ahead if they, or the operands, have more bytes. Such operands
# are read one by one, because they have no grid in common with the rows. Blocks that stay for many rows read them once.
ODD_ROWS, ODD_COLUMNS = 4 * 1024, 6 * 1024
# Where all arrays stay in the L2 cache, blocks fetch ahead rows of so many bytes, least and most, if each
# multiprocessor has so many bytes of them. The second number is for rows of at most FEW_COLUMNS, which share a warp:
# blocks that have one tile begin sooner.
CACHED_ROWS = 256, 16 * 1024
CACHED_PART, FEW_COLUMNS = (8 * 1024, 56 * 1024), 256
# So they do for rows between these numbers of columns, if operands of columns have four times their bytes. Up to the
# last number, a multiple of 256 columns fills whole warps, whose registers hold the row and what is loaded beside it.
NARROW_ROWS, COLUMNS_OF_WARPS, FULL_WARPS = (512, 1280), 256, 1024
# This many instructions for each byte from or to memory cost no time: no value is kept from phase to phase.
FREE_INSTRUCTIONS = 8
# With more instructions for each byte, loads and stores wait for instructions. The second number is for rows of odd
# length, whose ends are tested, and for rows that lie side by side.
BUSY_INSTRUCTIONS = 4, 2
# A program with more instructions for an element is heavy.
HEAVY_INSTRUCTIONS = 36


class Traits:
    """A program on a device, and what is asked of its schedule.

    Attributes:
      program, device, asked: these.
      phases: of the program.
      wholes: inputs that have all rows and columns.
      columns: inputs that have columns, and no rows or few.
      dtypes: of the arrays with all rows and columns, without packed booleans.
      row_bytes: bytes of a row that are read.
      panels: the most rows of one array that a row of the program has.
      levels: reductions along rows that follow one another.
      sums: whether there are sums over rows.
      heavy: whether an element takes many instructions.
      shared_rows: whether several rows share a load of an operand such as a rotary table, so that rows are advanced
        together.
    """

    def __init__(self, program: Program, device: Device, asked: dict):
        self.program, self.device, self.asked = program, device, asked
        self.phases = Phases(program)
        inputs, outputs = program.inputs, self.phases.wholes
        self.wholes = [inputs[n] for n in self.phases.inputs(whole=True)]
        self.columns = [inputs[n] for n in self.phases.inputs(whole=False)]
        arrays = [*self.staged, *(o for o in outputs if not o.layout.bits)]
        self.dtypes = [a.dtype for a in arrays]
        self.row_bytes = sum(i.layout.columns * i.dtype.itemsize for i in self.staged)
        self.panels = max(
            [len(n.args) for n in self.phases.order if n.op == "reduce"]
            + [len(o.nodes) for o in outputs]
            + [i.panels for i in self.wholes],
            default=1,
        )
        self.levels = self.phases.count - 1
        self.sums = bool(self.phases.row_sums)
        self.heavy = self.phases.cost > HEAVY_INSTRUCTIONS
        self.shared_rows = any(i.layout.strides for i in self.columns)

    @property
    def staged(self) -> list:
        """Inputs that the stages of a ring have: all rows and columns, and no packed booleans."""
        return [i for i in self.wholes if not i.layout.bits]

    # ---- slots ----

    @property
    def vector(self) -> int:
        """Columns of a slot."""
        return self._slot[0]

    @property
    def shifted(self) -> bool:
        """Whether slots are shifted, because rows have an odd length."""
        return self._slot[1]

    @functools.cached_property
    def _slot(self) -> tuple[int, bool]:
        width = self.program.width
        if any(a.layout.bits for a in (*self.wholes, *self.columns, *self.phases.wholes)):
            return 8, False  # a slot is a byte
        largest = max((d.itemsize for d in self.dtypes), default=2)
        smallest = min((d.itemsize for d in self.dtypes), default=2)
        vector = 1 << int(math.log2(min(16 // smallest, 8 if largest < 8 else 4)))
        if "vector" in self.asked:
            vector = self.asked["vector"]
        aligned = math.gcd(width, vector)
        if aligned == vector or width < 512 or not self._can_shift:
            return aligned, False
        return vector, True

    @property
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

    @property
    def slots(self) -> int:
        """Slots of a row's panel."""
        return slots_of(self.program.width, self.vector, self.shifted)

    @property
    def slot_elements(self) -> int:
        """Elements of a slot, in all panels."""
        return self.panels * self.vector

    # ---- rows ----

    @functools.cached_property
    def rows(self) -> int | None:
        """How many rows there are; None where that is not known."""
        rows = math.prod(self.program.row_sizes)
        return rows if isinstance(rows, int) else None

    @property
    def few_rows(self) -> bool:
        """Whether there are no more rows than multiprocessors."""
        return self.rows is not None and self.rows <= self.device.multiprocessors

    @functools.cached_property
    def group_rows(self):
        """Rows that one sum over rows adds up, where sums are of groups; None where they are of all rows."""
        if not self.phases.group_dims:
            return None
        return math.prod(self.program.row_sizes[self.phases.group_dims :])

    @functools.cached_property
    def written_bytes(self) -> int:
        """Bytes of a row that are written."""
        return sum((o.layout.columns or 1) * o.dtype.itemsize for o in self.phases.wholes)

    @property
    def in_cache(self) -> bool:
        """Whether the L2 cache holds all rows and results."""
        moved = self.row_bytes + self.written_bytes
        return self.rows is not None and self.rows * moved <= self.device.l2_bytes

    @functools.cached_property
    def stays_for_columns(self) -> bool:
        """Whether blocks stay for many rows because operands of columns, read for each, would take more time than rows.

        The rows and results are in the L2 cache, or the operands have many bytes for each of the row.
        """
        width = self.program.width
        part = CACHED_PART[width <= FEW_COLUMNS]
        if (
            not self.columns
            or (self.sums or self.heavy or self.columns_vary or self.shifted)
            or self.rows is None
            or self.rows * self.row_bytes < self.device.multiprocessors * part
        ):
            return False
        narrow = NARROW_ROWS[0] < width <= NARROW_ROWS[1]
        in_full_warps = width <= FULL_WARPS and width % COLUMNS_OF_WARPS == 0
        if narrow and not in_full_warps and self.column_bytes >= 4 * self.row_bytes:
            return True
        least, most = CACHED_ROWS
        return self.in_cache and least <= self.row_bytes / max(1, len(self.wholes)) <= most

    # ---- operands of columns ----

    @functools.cached_property
    def column_bytes(self) -> int:
        """Bytes of all operands of columns."""
        return sum((i.layout.columns or 1) * i.dtype.itemsize for i in self.columns)

    @property
    def columns_vary(self) -> bool:
        """Whether rows of a block have column operands of their own."""
        return any(k >= self.phases.group_dims for i in self.columns for k in i.layout.rows)

    @property
    def reads_columns_once(self) -> bool:
        """Whether blocks stay for many rows of odd length, and keep the operands of columns."""
        long = self.row_bytes > ODD_ROWS or self.column_bytes > ODD_COLUMNS
        return self.shifted and long and bool(self.columns) and not self.columns_vary

    @functools.cached_property
    def columns_stay(self) -> bool:
        """Whether long rows are held whole because reading column operands for each would cost more than the row."""
        little = 2 * self.work <= FREE_INSTRUCTIONS
        fits = bool(self.blocks_with_columns)
        return not self.sums and little and fits and self.column_bytes > self.row_bytes

    @functools.cached_property
    def blocks_with_columns(self) -> int:
        """Blocks of the smallest cluster whose memory has a row twice beside the operands of columns; 0 if none has."""
        return smallest_cluster(2 * self.row_bytes + self.column_bytes, self.room) or 0

    # ---- instructions ----

    @functools.cached_property
    def work(self) -> float:
        """Instructions for each byte from or to memory, if each phase computes everything again."""
        instructions = sum(n.cost for phase in self.phases.evaluated(()) for n in phase)
        return instructions * self.program.width / max(1, self.row_bytes + self.written_bytes)

    @property
    def cheap(self) -> bool:
        """Whether each phase may compute everything again."""
        return self.work <= FREE_INSTRUCTIONS

    @property
    def busy(self) -> bool:
        """Whether loads and stores wait for instructions."""
        return self.work > BUSY_INSTRUCTIONS[self.shifted or self.program.neighbours != 1]

    @functools.cached_property
    def stays_whole(self) -> bool:
        """Whether few threads hold a long row, many elements each: the same row in parts takes more instructions."""
        return self.busy and self.cheap and len(self.wholes) == 1 and not self.columns

    # ---- memory of blocks, and bulk copies ----

    @property
    def room(self) -> int:
        """Bytes of a block's shared memory that rows may have, beside partial results and barriers."""
        return self.device.shared_bytes - 8192

    @functools.cached_property
    def can_ring(self) -> bool:
        """Whether bulk copies can fetch rows: they begin and end at multiples of 16 bytes, or follow each other."""
        width = self.program.width
        return (
            self.device.clusters
            and self.vector > 1
            and bool(self.staged)
            and (
                self.can_cut
                if self.shifted
                else all(width * i.dtype.itemsize % 16 == 0 for i in self.staged)
            )
            and not any(self._is_read_backwards(i.number) for i in self.staged)
        )

    def _is_read_backwards(self, number: int) -> bool:
        loads = (n for n in self.phases.order if n.op == "input")
        return any(n.attr[0] == number and n.attr[2] for n in loads)

    @property
    def can_cut(self) -> bool:
        """Whether bulk copies can fetch a part of a row, which is whole units of 16 bytes."""
        return all(self.vector * i.dtype.itemsize % 16 == 0 for i in self.staged)

    def fits_ring(self, cluster: int) -> bool:
        """Whether a cluster's blocks hold a row twice, one stage being fetched while another one is used."""
        return 2 * self.row_bytes / cluster <= self.room

    @property
    def short_parts(self) -> bool:
        """Whether the partial result of each reduction is one word."""
        return all(n.dtype.itemsize <= 4 for n in self.phases.order if n.op == "reduce")


def smallest_cluster(needed: float, room: float) -> int | None:
    """Blocks of the smallest cluster that has so many bytes, each block having `room`; None if none has."""
    return next((c for c in (1, 2, 4, 8) if needed <= room * c), None)
