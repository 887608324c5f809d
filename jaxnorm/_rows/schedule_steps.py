"""Long rows that several blocks share: which blocks, and how many rows are under way at once.

Blocks of a cluster share rows, and exchange partial results through their shared memory. Few rows that are very long
are shared by a group of blocks anywhere in the grid, which exchange through global memory. Each block has the same
columns of all of its rows. It fetches its parts of the rows ahead into the stages of a ring. Several rows are under way
at once: while one is in the first phase, an earlier one is in the second phase, because its exchange has ended. So
threads that compute do not wait for exchanges.
"""

import dataclasses
import math

# Threads of a block that compute, at most, and the least where there are sums over rows: fewer threads with two slots
# each have more registers.
LANES, LEAST_LANES_OF_SUMS = 512, 256
# Elements that a thread works on side by side, at most.
ELEMENTS = 128
# The most slots that a thread should have, where there are sums over rows.
SLOTS = 2
# Bytes of a row that a block should read where there are no sums over rows: without and with operands of columns.
PART_BYTES = 32 * 1024, 16 * 1024
# The most warps of a block that exchange, and the most of these warps for each exchange of a row.
EXCHANGING_WARPS = 16
EXCHANGERS = 8
# Bytes that a block writes while an exchange is under way, 2.5 us.
EXCHANGE_BYTES = 56 * 1024
# Partial results in a post, which is 16 bytes (`emit_steps`).
POST_WORDS = 2
# A block reads and writes a row of so many bytes in the time of two exchanges: shorter rows are not shared.
LEAST_ROW_BYTES = 128 * 1024
# Without sums over rows, clusters keep up with more rows: each of them works on a row of its own.
ROWS = 48
# The most groups of blocks, and the most that have one row each, without and with operands of columns. A group has one
# row if there is one exchange, unless the row is written too and each block has more bytes of it: such rows are better
# read while other ones are written.
GROUPS, GROUPS_OF_ONE_ROW, PART_OF_ONE_ROW = 16, (16, 8), 48 * 1024
# The most groups where there are sums over rows, and the least rows of each: each group has partial sums of its own.
# There are no more rows than so many times the multiprocessors.
GROUPS_OF_SUMS, GROUP_ROWS_OF_SUMS, ROWS_OF_SUMS = 16, 8, 2
# The most sums over rows that a block of a cluster has in registers, if an element takes many instructions. Longer rows
# are shared, however many there are.
SUMS_OF_BLOCK = 24 * 1024
# Threads of a block that compute in a group which shares such rows. 128 more threads exchange, so that each thread has
# 128 registers.
LANES_OF_SUMS = 384
# Elements that a thread has in a block of a cluster, at most, and registers for operands of columns.
ELEMENTS_OF_CLUSTER, REGISTERS_OF_COLUMNS = 32, 64
# What is asked of a schedule whose rows are not under way in steps.
OTHER_SCHEDULES = ("source", "cluster", "parts", "rows_at_once", "blocks")


@dataclasses.dataclass(frozen=True)
class StepsShape:
    """The fields of a `Plan` of which several rows are under way at once."""

    grid: int
    cluster: int
    lanes: int
    slots: int
    stages: int
    lag: int
    exchangers: int
    threads: int


@dataclasses.dataclass(frozen=True)
class StepsMemory:
    """Where a block's shared memory is used, in bytes. The stages come first.

    Attributes:
      parts: offset of the partial results of warps, for each stage.
      known: offset of the results of reductions, for each stage.
      gathered: offset of the places for the partial results of all blocks.
      gathered_words: words of such a place.
      gathered_sets: how many places each exchange has: one for each stage in a cluster, one for each of the exchange's
        warps in a grid.
      rows: offset of what is loaded for each row.
      barriers: offset of the barriers.
      total: bytes.
    """

    parts: int
    known: int
    gathered: int
    gathered_words: int
    gathered_sets: int
    rows: int
    barriers: int
    total: int

    @classmethod
    def of(cls, plan, words: tuple[int, ...], stage_bytes: int, row_words: int) -> "StepsMemory":
        """The memory of a `Plan` or `StepsShape`.

        Args:
          plan: the schedule.
          words: partial results of each exchange.
          stage_bytes: bytes of a stage.
          row_words: what is loaded for all rows.
        """
        stages, all_words = plan.stages, sum(words)
        parts = _round_up(stages * stage_bytes, 128)
        known = parts + stages * all_words * (plan.lanes // 32) * 4
        gathered = known + stages * all_words * 4
        gathered_words = max(words, default=0) * plan.cluster
        gathered_sets = plan.exchangers if plan.grid else stages
        rows = gathered + len(words) * gathered_sets * gathered_words * 4
        barriers = _round_up(rows + row_words * 4, 128)
        total = barriers + 8 * stages * (2 + (2 if plan.grid else 3) * len(words))
        return cls(
            parts,
            known,
            gathered,
            gathered_words,
            gathered_sets,
            rows,
            barriers,
            _round_up(total, 128),
        )


def posts_of_row(words: tuple[int, ...]) -> int:
    """Posts that a block has for a row, given the partial results of its exchanges."""
    return sum(-(-count // POST_WORDS) for count in words)


def part_of_grid(slots: int, blocks: int, line: int) -> int:
    """Slots of a block that shares a row of `slots`: whole cache lines, of which each has `line` slots."""
    lines = -(-slots // line)
    return -(-lines // blocks) * line


def grid_shape(
    *,
    rows,
    slots,
    line,
    row_bytes,
    written_bytes,
    words,
    row_words,
    elements,
    has_columns,
    sums,
    heavy,
    device,
    asked,
) -> StepsShape | None:
    """How blocks of a grid share rows; None where they should not, or cannot.

    Args:
      rows: how many there are.
      slots: of a row's panel.
      line: slots of a panel in a cache line.
      row_bytes: bytes of a row that are read.
      written_bytes: bytes of a row that are written.
      words: partial results of each exchange.
      row_words: what is loaded for all rows.
      elements: of a slot, in all panels.
      has_columns: whether there are operands of columns.
      sums: how many sums over rows a column has.
      heavy: whether an element takes many instructions.
      device: for which the schedule is made.
      asked: what is asked of the schedule.
    """
    if not rows or asked.get("grid") == 0:
        return None
    crowded = (
        heavy and rows > device.multiprocessors and slots * elements * sums > 8 * SUMS_OF_BLOCK
    )
    if "grid" not in asked:
        most_rows = ROWS_OF_SUMS * device.multiprocessors if sums else ROWS
        least_bytes = LEAST_ROW_BYTES // 2 if sums else LEAST_ROW_BYTES
        few = crowded or rows <= most_rows
        if any(a in asked for a in OTHER_SCHEDULES) or not few or row_bytes < least_bytes:
            return None
    # Rows that all blocks together hold.
    held = device.multiprocessors * min(
        0.9 * device.shared_bytes / row_bytes, LANES * ELEMENTS / (slots * elements)
    )
    if crowded:
        groups = max(1, device.multiprocessors * LANES_OF_SUMS * SLOTS // slots)
    elif sums:
        # A single group has all rows, so that sums over rows end in its blocks.
        most = device.multiprocessors * LANES // slots
        groups = max(1, min(GROUPS_OF_SUMS, rows // GROUP_ROWS_OF_SUMS, most))
    elif (
        len(words) == 1
        and rows <= min(GROUPS_OF_ONE_ROW[has_columns], held)
        and (
            has_columns
            or not written_bytes
            or rows * row_bytes <= device.multiprocessors * PART_OF_ONE_ROW
        )
    ):
        groups = rows  # one exchange in all
    else:
        groups = _groups(rows, slots, line, row_bytes, has_columns, device.multiprocessors)
    groups = asked.get("grid") or groups
    blocks = asked.get("cluster") or device.multiprocessors // groups
    part = part_of_grid(slots, blocks, line)
    most_lanes = min(LANES, max(LEAST_LANES_OF_SUMS, part // SLOTS)) if sums else LANES
    lanes = min(asked.get("lanes", most_lanes), _round_up(part, 32))
    slots_of_thread = -(-part // lanes)
    lanes = _round_up(-(-part // slots_of_thread), 32)
    levels, own_rows = len(words), -(-rows // groups)
    most_stages = max(own_rows, levels)
    stage_bytes = part * (row_bytes // slots)
    # Threads with many sums over rows need registers, of which more warps would leave too few.
    warps = EXCHANGING_WARPS
    if sums and slots_of_thread > 1:
        warps //= 4 if crowded else 2
    exchangers = min(EXCHANGERS, warps // levels, own_rows)
    exchangers = asked.get("exchangers") or max(1, exchangers)
    shape = StepsShape(
        grid=groups,
        cluster=-(-slots // part),
        lanes=lanes,
        slots=slots_of_thread,
        stages=min(asked.get("stages", most_stages), most_stages),
        lag=1,
        exchangers=exchangers,
        threads=0,
    )
    room = device.shared_bytes
    while shape.stages and StepsMemory.of(shape, words, stage_bytes, row_words).total > room:
        shape = dataclasses.replace(shape, stages=shape.stages - 1)
    # A warp that waits at a stage's barrier knows that the stage's last row is past it.
    exchangers = min(exchangers, shape.stages)
    threads = lanes + 32 * levels * exchangers
    shape = dataclasses.replace(shape, exchangers=exchangers, threads=threads)
    # A stage is needed again only after its row's last phase, however many rows a group has. While rows are in phases,
    # two more are fetched if there are more.
    most_lag = (shape.stages - (2 if shape.stages < own_rows else 0)) // levels
    fits = slots_of_thread * elements <= ELEMENTS and shape.threads <= 1024
    if shape.cluster == 1 or most_lag < 1 or not fits:
        return None
    # The exchanges of the last row end while the rows before it are written.
    wanted = asked.get("lag") or -(
        -EXCHANGE_BYTES // (part * (written_bytes or row_bytes) // slots)
    )
    return dataclasses.replace(shape, lag=max(1, min(wanted, most_lag)))


def cluster_shape(
    *, rows, slots, elements, slot_bytes, column_bytes, words, row_words, device, asked
) -> StepsShape | None:
    """How the blocks of a cluster share rows; None where they cannot.

    Args:
      rows: how many there are; None where that is not known.
      slots: of a row's panel.
      elements: of a slot, in all panels.
      slot_bytes: of a slot in all panels, for each operand that stages have.
      column_bytes: of one column in all operands that rows share.
      words: partial results of each exchange.
      row_words: what is loaded for all rows.
      device: for which the schedule is made.
      asked: what is asked of the schedule.
    """
    levels, exchangers = len(words), asked.get("exchangers", 1)
    most = min(ELEMENTS_OF_CLUSTER, REGISTERS_OF_COLUMNS * 4 // max(1, column_bytes))
    clusters = [c for c in (1, 2, 4, 8) if c >= min(8, device.multiprocessors // (rows or 1024))]
    for lag in (asked["lag"],) if "lag" in asked else (2, 1):
        for cluster in (asked["cluster"],) if "cluster" in asked else clusters:
            part = -(-slots // cluster)
            slots_of_thread = -(-part // asked.get("lanes", LANES))
            lanes = _round_up(-(-part // slots_of_thread), 32)
            # While rows are in phases, two more are fetched. A place of partial results is written again when all
            # blocks have read it (`emit_steps`).
            least = max(levels * lag + 2, 2 * lag + 1)
            shape = StepsShape(
                grid=0,
                cluster=cluster,
                lanes=lanes,
                slots=slots_of_thread,
                stages=asked.get("stages", least),
                lag=lag,
                exchangers=exchangers,
                threads=lanes + 32 * levels * exchangers,
            )
            stage_bytes = sum(_round_up(part * size, 128) for size in slot_bytes)
            memory = StepsMemory.of(shape, words, stage_bytes, row_words).total
            if (
                slots_of_thread * elements <= most
                and memory <= device.shared_bytes
                and shape.stages >= max(least, exchangers)
            ):
                return shape
    return None


def _groups(rows, slots, line, row_bytes, has_columns, multiprocessors) -> int:
    """Groups of blocks that share rows without sums over them: many, of which the last one ends early."""
    most = min(rows, GROUPS, multiprocessors)
    wanted = max(1, min(multiprocessors * PART_BYTES[has_columns] // row_bytes, most))

    def cost(groups) -> float:
        longest = -(-rows // groups) * part_of_grid(slots, multiprocessors // groups, line)
        return longest * (1 + 0.04 * abs(math.log2(groups / wanted)))

    return min(range(max(1, wanted // 2), min(2 * wanted, most) + 1), key=cost)


def sums_end_here(program, plan) -> bool:
    """Whether a block has all rows of its columns, and so computes the results of sums over rows by itself."""
    results = [o for o in program.outputs if o.after]
    if plan.grid != 1 or any(o.layout.columns is None for o in results):
        return False
    seen, stack = set(), [n for o in results for n in o.nodes]
    while stack:
        node = stack.pop()
        if node.op == "row_sum" and node.attr[1]:
            return False
        if node.number in seen or node.op == "row_sum":
            continue
        seen.add(node.number)
        if not node.after and (node.column or node.row):
            return False
        if node.after:
            stack += node.args
    return True


def _round_up(n, unit) -> int:
    return -(-n // unit) * unit
