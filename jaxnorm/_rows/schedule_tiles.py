"""A tile of rows at a time: which threads share a row, and how many rows a block and its threads have at once."""

import math

from jaxnorm._rows.plan import THREADS_MAX, Plan
from jaxnorm._rows.schedule_blocks import (
    CLUSTERED_BLOCKS,
    SMALL_BLOCK,
    block_numbers,
    blocks_of_sums,
    with_registers,
    with_stages,
)
from jaxnorm._rows.shared_memory import round_up, slots_of, stage_bytes
from jaxnorm._rows.traits import LONG_PART, LONG_ROWS, Traits, smallest_cluster

# Slots of a row that few threads share.
SHORT_ROWS = 128
# Rows with more columns have 64 elements of 16 bits a thread instead of 32: more loads are under way then, because more
# elements share a thread's registers of addresses and counters. If a row has operands of columns, two blocks of threads
# with so many elements hold rows up to the second number.
MANY_COLUMNS = 8192, 28 * 1024
# Elements of a row that a thread may have where that leaves fewer threads idle.
SLOT_ELEMENTS = 56
# The same of a long row that a pair of blocks holds whole.
WHOLE_ELEMENTS = 72
# The most elements that a thread of a small block has of a row of odd length, whose operands of columns stay in
# registers.
ODD_ELEMENTS = 40
# Elements of rows that 512 threads share although more threads could: one block loads while another one writes or
# exchanges.
BLOCK_ELEMENTS = 20 * 1024
# Bytes that the stages of a multiprocessor's blocks have where rows are summed up: more are not faster.
STAGED_BYTES = 64 * 1024
# Bytes of a block's stages where nothing is summed up.
RING_BYTES = 48 * 1024
# Where rows are summed up, a warp has rows of so many columns to itself: 40 elements a thread, or 32 with more than two
# sums, which registers hold for each column.
WARP_COLUMNS = 40 * 32
WARP_COLUMNS_OF_MANY_SUMS = 32 * 32
# Longer rows that are summed up are shared by blocks of one warp, up to the most columns that a block alone would have.
# If a cluster has at most so many rows, twice as many blocks share a row, unless that leaves each of them fewer columns
# than the last number: fewer clusters write fewer partial sums.
COLUMNS_OF_BLOCK = 512 * 24
ROWS_OF_CLUSTER, LEAST_COLUMNS = 64, 512
# With two sums or more over many rows, a block of one warp has at least so many columns. Where it would have fewer,
# half as many blocks of several warps share a row.
WARP_COLUMNS_OF_TWO_SUMS = 1024


def plan_of_tiles(traits: Traits, source: str) -> Plan:
    """The plan for rows from a source: "registers", "ring" or "stream"."""
    return _Tiles(traits, source).plan()


class _Tiles:
    """The choice of a plan.

    Attributes:
      traits: of the program.
      source: where rows are between phases.
      persistent: whether blocks stay for many tiles.
      vector, count: columns of a slot, and slots of a row's panel.
      elements: of a slot, in all panels.
      cluster: blocks that share a row.
      part: slots of a panel that a block has.
    """

    def __init__(self, traits: Traits, source: str):
        self.traits, self.asked = traits, traits.asked
        self.persistent = source == "ring" or traits.sums
        self.vector = traits.vector
        if traits.shifted and traits.columns and not self.persistent and "vector" not in self.asked:
            # Column operands have no grid in common with the rows: two columns a slot keep their loads close together.
            self.vector = max(2, math.gcd(traits.program.width, self.vector))
        self.count = slots_of(traits.program.width, self.vector, traits.shifted)
        self.elements = traits.panels * self.vector
        self.source = source
        self.cluster = self._cluster()
        if source == "ring" and not traits.fits_ring(self.cluster):
            self.source, self.cluster = "stream", 1
        self.part = -(-self.count // self.cluster)

    def plan(self) -> Plan:
        traits, in_ring = self.traits, self.source == "ring"
        lanes, slots, rounds = self._shares()
        threads = self._threads(lanes, rounds)
        group_rows = traits.group_rows
        groups = threads // lanes if lanes <= 32 else 1
        while isinstance(group_rows, int) and groups > 1 and group_rows % groups:
            groups //= 2
        if lanes <= 32 and self.cluster == 1 and groups * lanes >= 32:
            threads = groups * lanes
        at_once = self._rows_at_once(groups, slots * self.elements, threads)
        passes = 1
        if in_ring and self.cluster == 1 and not (traits.shifted or traits.stays_for_columns):
            passes = self._passes(groups * at_once)
        plan = Plan(
            source=self.source,
            vector=self.vector,
            lanes=lanes,
            slots=slots,
            threads=threads,
            rounds=rounds,
            cluster=self.cluster,
            rows_at_once=at_once,
            passes=passes,
            persistent=self.persistent,
            hoist=self._hoist(lanes, slots * self.elements) if rounds == 1 else "",
            hold_shared=in_ring and not (self.cluster > 1 and len(traits.wholes) == 1),
            shifted=traits.shifted,
        )
        if in_ring:
            plan = with_stages(traits, plan, max(2, self._stages(plan)))
        return with_registers(traits, plan)

    # ---- threads that share a row ----

    def _cluster(self) -> int:
        """How many blocks share a row."""
        traits = self.traits
        if self.source != "ring" or not traits.can_cut:
            return 1
        if "cluster" in self.asked:
            return self.asked["cluster"]
        # An exchange within a block costs less than one between blocks.
        if traits.columns_stay:
            # Rows of odd length take more instructions: small blocks of a multiprocessor take turns.
            small = traits.shifted and traits.program.width > 2 * LONG_PART
            return 8 if small else traits.blocks_with_columns
        if (cluster := self._small_blocks()) > 1:
            return cluster
        width = traits.program.width * traits.panels
        whole = traits.room // 2
        most = 4 * LONG_PART if traits.stays_whole else 2 * LONG_PART
        if traits.sums:
            most = 256 * 32 if traits.heavy else COLUMNS_OF_BLOCK
        alone = LONG_PART if traits.cheap and not traits.sums else most
        if traits.row_bytes <= whole and width <= alone:
            return 1
        fits = (c for c in (2, 4, 8) if traits.row_bytes <= whole * c and width <= most * c)
        return next(fits, 8)

    def _small_blocks(self) -> int:
        """How many small blocks share a row where there are sums over rows; 1 where a block has the row.

        Two blocks of one warp take more time than one block.
        """
        traits, width = self.traits, self.traits.program.width
        if (
            not traits.sums
            or traits.levels != 1
            or traits.heavy
            or traits.shifted
            or traits.panels > 1
            or traits.phases.group_dims
            or not self._warp_columns() < width <= COLUMNS_OF_BLOCK
        ):
            return 1
        cluster = smallest_cluster(width, self._warp_columns()) or 8
        clusters = CLUSTERED_BLOCKS * traits.device.multiprocessors // cluster
        has_two_sums = len(traits.phases.row_sums) > 1
        if traits.rows is not None and traits.rows <= ROWS_OF_CLUSTER * clusters:
            fills_warps = self.count % (2 * cluster * 32) == 0
            if fills_warps and width >= 2 * cluster * LEAST_COLUMNS:
                cluster *= 2
        elif cluster > 2 and has_two_sums and width < cluster * WARP_COLUMNS_OF_TWO_SUMS:
            return cluster // 2
        return min(cluster, 8) if cluster > 2 else 1

    def _shares(self) -> tuple[int, int, int]:
        """(threads that share a block's part of a row, slots of a thread at once, how often it has so many)."""
        lanes, sums = self.asked.get("lanes") or self._lanes(), self.traits.sums
        if self.source != "stream":
            return lanes, -(-self.part // lanes), 1
        slots = self.asked.get("slots") or (4 if len(self.traits.wholes) == 1 else 2)
        slots = max(1, min(slots, -(-self.part // lanes), 32 // self.elements or 1))
        # A block that keeps sums over rows in memory, because registers do not hold them, has one row at a time.
        lanes = max(lanes, 32) if sums and lanes * slots < self.part else lanes
        return lanes, slots, -(-self.part // (lanes * slots))

    def _lanes(self) -> int:
        """Threads that share a block's part of a row."""
        traits, part, elements = self.traits, self.part, self.elements
        if not traits.wholes and not traits.phases.wholes and traits.program.width == 1:
            return 1
        if self.source == "stream":
            # Rows that do not fill the GPU with small blocks get the largest ones.
            most = THREADS_MAX if traits.few_rows else 256 if traits.shifted else 512
            return min(most, max(32, round_up(part, 32)))
        if self.source == "ring" and traits.reads_columns_once and not traits.sums:
            threads = round_up(-(-part * elements // ODD_ELEMENTS), 32)
            if threads <= SMALL_BLOCK:
                return threads
        if part * elements <= self._warp_columns():
            return self._lanes_of_short_row()
        return self._lanes_of_long_row()

    def _lanes_of_long_row(self) -> int:
        traits, part, elements = self.traits, self.part, self.elements
        wanted = self._wanted_elements()
        fewest = -(-part // self._most_threads(wanted))
        wanted_slots = max(1, wanted // elements)
        unit, weight = 32, 0.05
        if traits.sums and self.cluster > 1:
            fewest, weight = max(fewest, wanted_slots), 0.1
        most_slots = max(fewest, wanted_slots, SLOT_ELEMENTS // elements)
        if self.source == "ring" and traits.stays_whole:
            # One block of a multiprocessor computes: each of its four schedulers has as many warps.
            unit, weight, most_slots = 128, 0.2, max(fewest, WHOLE_ELEMENTS // elements)

        def lanes(slots):
            return round_up(-(-part // slots), unit)

        def cost(slots):
            """Threads without a slot cost as much as others; more or less work for each thread costs less."""
            idle = lanes(slots) * slots / part
            return idle * (1 + weight * abs(math.log2(slots / wanted_slots))), slots

        return lanes(min(range(fewest, most_slots + 1), key=cost))

    def _warp_columns(self) -> int:
        """Columns of rows that a warp has to itself."""
        traits = self.traits
        if (
            self.source == "ring"
            and traits.sums
            and not traits.phases.group_dims
            and not traits.shifted
        ):
            many = len(traits.phases.row_sums) > 2
            return WARP_COLUMNS_OF_MANY_SUMS if many else WARP_COLUMNS
        return 32 * self._most_elements_of_short_row

    @property
    def _most_elements_of_short_row(self) -> int:
        return 16 if self.traits.sums or self.traits.columns else 32

    def _lanes_of_short_row(self) -> int:
        lanes, most = min(32, _power_of_2(self.part)), self._most_elements_of_short_row
        # A thread has 16 elements of a short row that is normalized.
        fewest = 4 if self.traits.columns and len(self.traits.wholes) == 1 else 8
        while (
            lanes > fewest
            and -(-self.part // (lanes // 2)) * self.elements <= most
            and lanes * self.vector >= 64
        ):
            lanes //= 2
        return lanes

    def _wanted_elements(self) -> int:
        """Elements of a row that a thread should have."""
        traits, source, vector = self.traits, self.source, self.vector
        if traits.sums:
            return 8 if not traits.levels and not traits.heavy else 32 if traits.shifted else 16
        if source == "ring" and traits.columns_stay:
            return 32
        if self.cluster > 1:
            return 16 if traits.cheap and not traits.stays_whole else 64
        if vector == 1 or not traits.levels or traits.shared_rows:
            return 16
        if traits.columns and source == "registers" and self.part <= SHORT_ROWS:
            return 16
        if len(traits.wholes) > 1 and (traits.cheap or traits.row_bytes <= LONG_ROWS[0]):
            return 16
        least, most = MANY_COLUMNS
        width = traits.program.width
        many = width > least and not (traits.columns and width > most)
        many = many and traits.cheap and traits.dtypes[0].itemsize == 2
        one_by_one = traits.shifted and traits.columns
        return 64 if many and source == "registers" and not one_by_one else 32

    def _most_threads(self, wanted) -> int:
        """The most threads that share a block's part of a row, where a thread should have so many elements."""
        traits = self.traits
        if traits.sums:
            return 256 if traits.heavy else 512
        if self.source == "ring":
            small = self.cluster == 1 or (wanted == 64 and not traits.stays_whole)
            return 512 if small else THREADS_MAX
        fit = self.part * self.elements <= max(512 * wanted, BLOCK_ELEMENTS)
        return 512 if fit or not traits.phases.wholes else THREADS_MAX

    # ---- threads and rows of a block ----

    def _threads(self, lanes, rounds) -> int:
        traits = self.traits
        if lanes > 32 or self.cluster > 1 or traits.shifted or (rounds > 1 and traits.sums):
            threads = lanes
        else:
            threads = max(lanes, SMALL_BLOCK if lanes == 32 or self._one_row_suffices else 256)
        threads = self.asked.get("threads") or threads
        while (
            self.source == "ring"
            and lanes <= 32 < threads
            and 2 * threads // lanes * traits.row_bytes > traits.room
        ):
            threads //= 2
        return threads

    def _rows_at_once(self, groups, elements, threads) -> int:
        """Rows that a thread works on at once, where it has so many elements of each."""
        if self.traits.shifted or self.source == "stream":
            return 1
        rows = self.asked.get("rows_at_once") or self._wanted_rows(groups, elements, threads)
        group_rows = self.traits.group_rows
        while rows > 1 and isinstance(group_rows, int) and group_rows % (groups * rows):
            rows //= 2
        return rows

    def _wanted_rows(self, groups, elements, threads) -> int:
        traits, sums = self.traits, self.traits.phases.row_sums
        is_long, shares_warp = self.count > SHORT_ROWS, groups * 32 > threads
        if self.cluster > 1:
            # With two sums over rows, one row's instructions hide the other one's exchange, unless small blocks of
            # several warps take turns. Eight blocks exchange longer.
            two = len(sums) > 1 and not traits.heavy and elements <= 16
            takes_turns = self.cluster < 8 and 32 < threads <= SMALL_BLOCK
            fit = 4 * traits.row_bytes <= self.cluster * traits.room
            return 2 if two and fit and not takes_turns else 1
        if not is_long and not traits.columns:
            return 1
        if self.source == "ring" and traits.stays_for_columns:
            # Registers hold 64 bytes of each of two rows beside the operands of columns.
            return 2 if elements * sum(i.dtype.itemsize for i in traits.wholes) <= 64 else 1
        if sums and traits.heavy:
            # The latency of instructions is hidden by elements side by side, or by a multiprocessor's other blocks.
            return 2 if elements <= 16 and threads > 64 else 1
        if sums and traits.phases.group_dims and traits.levels == 1:
            # The rows of a group share operands of columns.
            return 4 if elements <= 16 and len(sums) <= 2 else 2
        if sums and traits.levels == 1:
            ring_shares_warp = self.source == "ring" and shares_warp
            return 2 if ring_shares_warp or self._few_threads(threads, groups, elements) else 1
        if sums:
            # Nothing but the operands' latency keeps a thread waiting where there are no reductions.
            return 2 if is_long and not traits.levels else 1
        if self.source != "registers":
            return 1
        if len(traits.wholes) != 1 or self.vector == 1:
            return 4 if traits.levels and is_long and elements <= 8 else 1
        if elements > 16:
            return 1
        if traits.shared_rows:
            return 2 if elements > 8 else 4 if is_long else 1
        one_row = is_long or (shares_warp and self._one_row_suffices)
        return 1 if traits.levels and one_row else 2

    @property
    def _one_row_suffices(self) -> bool:
        """Whether one row that shares a warp keeps a thread busy: a phase has several reductions, which overlap."""
        several = any(len(reductions) > 1 for reductions in self.traits.phases.reductions)
        return several and bool(self.traits.columns) and not self.persistent

    def _few_threads(self, threads, groups, elements) -> bool:
        """Whether the blocks of a program with sums over rows have so few threads that each works on two rows."""
        together = threads * blocks_of_sums(self.traits, threads, threads // groups, elements)
        if len(self.traits.phases.row_sums) > 1:
            return groups == 1 and together <= 320
        return together < 256

    def _passes(self, rows) -> int:
        """How often a block has so many rows at once of a tile: short rows are fetched in tiles of some kilobytes."""
        passes, room = 1, 16384 + 8192 * (len(self.traits.wholes) > 1)
        group_rows = self.traits.group_rows
        while passes < 16 and rows * passes * 2 * self.traits.row_bytes <= room:
            if isinstance(group_rows, int) and group_rows % (rows * passes * 2):
                break
            passes *= 2
        return passes

    # ---- memory of a block ----

    def _stages(self, plan) -> int:
        """How many stages its ring should have."""
        stage = max(stage_bytes(self.traits.program, plan), 1)
        if self.traits.sums:
            return min(3, STAGED_BYTES // (stage * max(1, block_numbers(self.traits, plan)[0])))
        if self.traits.stays_whole:
            return 4
        return 2 if self.traits.shifted else min(4, RING_BYTES // stage)

    def _hoist(self, lanes, elements) -> str:
        """Where column operands stay, of which a thread has as many elements as of the row.

        Where rows share a warp, registers hold them beside the rows even if a block has one tile: the loads do not wait
        for the rows' reductions then. Arrays that exceed the L2 cache gain nothing by that.
        """
        traits = self.traits
        beside_row = traits.levels and lanes < 32 and traits.in_cache
        if not traits.columns or not (self.persistent or beside_row):
            return ""
        if "hoist" in self.asked:
            return self.asked["hoist"]
        most = 16 if traits.heavy else SLOT_ELEMENTS if traits.shifted and not traits.sums else 32
        if elements <= most:
            return "registers"
        return "shared" if self.persistent else ""


def _power_of_2(n) -> int:
    return 1 << max(0, (n - 1).bit_length())
