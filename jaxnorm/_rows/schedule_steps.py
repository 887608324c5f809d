"""Long rows that several blocks share: which blocks, and how many rows are under way at once.

Blocks of a cluster share rows, and exchange partial results through their shared memory. Few rows that are very long
are shared by a group of blocks anywhere in the grid, which exchange through global memory. Each block has the same
columns of all of its rows. It fetches its parts of the rows ahead into the stages of a ring. Several rows are under way
at once: while one is in the first phase, an earlier one is in the second phase, because its exchange has ended. So
threads that compute do not wait for exchanges.
"""

import dataclasses
import math

from jaxnorm._rows.plan import THREADS_MAX, Plan
from jaxnorm._rows.shared_memory import (
    StepsMemory,
    exchanged_words,
    part_of_grid,
    round_up,
    row_words,
    slots_of_line,
    stage_bytes,
    steps_memory,
)
from jaxnorm._rows.traits import Traits

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
# A block reads and writes a row of so many bytes in the time of two exchanges: shorter rows are not shared.
LEAST_ROW_BYTES = 128 * 1024
# Without sums over rows, clusters keep up with more rows: each of them works on a row of its own. The second number is
# for rows of one array that all blocks together hold: a group reads all of its rows before it writes one.
ROWS, HELD_ROWS = 48, 96
# The part of the blocks' shared memory that rows may fill if all blocks together hold them.
HELD_PART = 0.9
# The most groups of blocks. A group has one row if there is one exchange and there are no operands of columns, unless
# the row is written too and each block has more bytes of it: such rows are better read while other ones are written.
GROUPS, PART_OF_ONE_ROW = 16, 48 * 1024
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


def plan_of_grid(traits: Traits) -> Plan | None:
    """The plan in which blocks of the grid share rows; None where they should not, or cannot."""
    device, asked, rows = traits.device, traits.asked, traits.rows
    sums = len(traits.phases.row_sums)
    if (
        not (traits.can_ring and traits.can_cut and traits.short_parts and traits.levels)
        or traits.shifted
        or not rows
        # Sums over rows must be the ones of a block's columns.
        or any(n.attr[1] or n.attr[0] for n in traits.phases.row_sums)
        or asked.get("grid") == 0
    ):
        return None
    columns_of_sums = traits.slots * traits.slot_elements * sums
    crowded = traits.heavy and rows > device.multiprocessors and columns_of_sums > 8 * SUMS_OF_BLOCK
    if "grid" not in asked and not _is_shared_by_grid(traits, rows, crowded):
        return None
    if crowded:
        groups = max(1, device.multiprocessors * LANES_OF_SUMS * SLOTS // traits.slots)
    elif sums:
        # A single group has all rows, so that sums over rows end in its blocks.
        most = device.multiprocessors * LANES // traits.slots
        groups = max(1, min(GROUPS_OF_SUMS, rows // GROUP_ROWS_OF_SUMS, most))
    else:
        groups = _groups(traits, rows)
    groups = asked.get("grid") or groups
    blocks = asked.get("cluster") or device.multiprocessors // groups
    part = _part_of_grid(traits, blocks)
    most_lanes = min(LANES, max(LEAST_LANES_OF_SUMS, part // SLOTS)) if sums else LANES
    lanes = min(asked.get("lanes", most_lanes), round_up(part, 32))
    slots = -(-part // lanes)
    lanes = round_up(-(-part // slots), 32)
    levels, own_rows = traits.levels, -(-rows // groups)
    most_stages = max(own_rows, levels)
    # Threads with many sums over rows need registers, of which more warps would leave too few.
    warps = EXCHANGING_WARPS
    if sums and slots > 1:
        warps //= 4 if crowded else 2
    exchangers = min(EXCHANGERS, warps // levels, own_rows)
    plan = _with_stages_that_fit(
        traits,
        _plan(
            traits,
            grid=groups,
            cluster=-(-traits.slots // part),
            lanes=lanes,
            slots=slots,
            stages=min(asked.get("stages", most_stages), most_stages),
            exchangers=asked.get("exchangers") or max(1, exchangers),
        ),
    )
    # A warp that waits at a stage's barrier knows that the stage's last row is past it.
    exchangers = min(plan.exchangers, plan.stages)
    threads = lanes + 32 * levels * exchangers
    # A stage is needed again only after its row's last phase, however many rows a group has. While rows are in phases,
    # two more are fetched if there are more.
    most_lag = (plan.stages - (2 if plan.stages < own_rows else 0)) // levels
    fits = slots * traits.slot_elements <= ELEMENTS and threads <= THREADS_MAX
    if plan.cluster == 1 or most_lag < 1 or not fits:
        return None
    # The exchanges of the last row end while the rows before it are written.
    part_bytes = part * (traits.written_bytes or traits.row_bytes) // traits.slots
    # Where the stages have all rows of the group, all are read before one is written.
    reads_all = plan.stages == own_rows and not sums
    wanted_lag = most_lag if reads_all else -(-EXCHANGE_BYTES // part_bytes)
    lag = max(1, min(asked.get("lag") or wanted_lag, most_lag))
    return dataclasses.replace(plan, exchangers=exchangers, threads=threads, lag=lag)


def plan_of_cluster(traits: Traits) -> Plan | None:
    """The plan in which several rows are under way in a cluster; None where one row is at a time.

    Where operands of columns fill the registers, a block has one row at a time, and waits while the blocks of its
    cluster exchange. With more than two blocks, several rows under way take less time. So do few rows of several
    arrays, of which a multiprocessor has one block.
    """
    device, asked = traits.device, traits.asked
    if not (traits.short_parts and traits.can_cut and traits.levels) or traits.sums:
        return None
    long = traits.columns_stay and traits.blocks_with_columns > 2 and not traits.shifted
    several = traits.cheap and len(traits.wholes) > 1 and not traits.columns
    wanted = long or (traits.few_rows and several)
    if "lag" not in asked and (not wanted or any(a in asked for a in OTHER_SCHEDULES)):
        return None
    exchangers = asked.get("exchangers", 1)
    column_bytes = traits.column_bytes // traits.program.width
    most = min(ELEMENTS_OF_CLUSTER, REGISTERS_OF_COLUMNS * 4 // max(1, column_bytes))
    least_cluster = min(8, device.multiprocessors // (traits.rows or 1024))
    for lag in (asked["lag"],) if "lag" in asked else (2, 1):
        for cluster in (asked["cluster"],) if "cluster" in asked else (1, 2, 4, 8):
            part = -(-traits.slots // cluster)
            slots = -(-part // asked.get("lanes", LANES))
            if slots * traits.slot_elements > most or (
                cluster < least_cluster and "cluster" not in asked
            ):
                continue
            # While rows are in phases, two more are fetched. A place of partial results is written again when all
            # blocks have read it (`emit_steps`).
            least = max(traits.levels * lag + 2, 2 * lag + 1)
            lanes = round_up(-(-part // slots), 32)
            plan = _plan(
                traits,
                cluster=cluster,
                lanes=lanes,
                slots=slots,
                stages=asked.get("stages", least),
                lag=lag,
                exchangers=exchangers,
                threads=lanes + 32 * traits.levels * exchangers,
            )
            memory = steps_memory(traits.program, plan).total
            if memory <= device.shared_bytes and plan.stages >= max(least, exchangers):
                return plan
    return None


def _plan(traits: Traits, *, slots, grid=0, lag=1, threads=0, **fields) -> Plan:
    stays = traits.columns and (traits.slot_elements * slots <= 16 or not grid)
    return Plan(
        source="ring",
        vector=traits.vector,
        slots=slots,
        grid=grid,
        lag=lag,
        threads=threads,
        persistent=True,
        hoist="registers" if stays else "",
        hold_shared=True,
        shifted=traits.shifted,
        **fields,
    )


def _with_stages_that_fit(traits: Traits, plan: Plan) -> Plan:
    room, words = traits.device.shared_bytes, exchanged_words(traits.phases)
    stage = stage_bytes(traits.program, plan)
    of_rows = row_words(traits.program, traits.phases)
    while plan.stages and StepsMemory.of(plan, words, stage, of_rows).total > room:
        plan = dataclasses.replace(plan, stages=plan.stages - 1)
    return plan


def _is_shared_by_grid(traits: Traits, rows: int, crowded: bool) -> bool:
    """Whether rows are long, and few or too crowded for a cluster's registers."""
    if any(a in traits.asked for a in OTHER_SCHEDULES):
        return False
    if traits.sums:
        most_rows, least_bytes = ROWS_OF_SUMS * traits.device.multiprocessors, LEAST_ROW_BYTES // 2
    else:
        alone = len(traits.wholes) == 1 and not traits.columns and traits.written_bytes
        most_rows = HELD_ROWS if alone and _are_held(traits, rows) else ROWS
        least_bytes = LEAST_ROW_BYTES
    return (crowded or rows <= most_rows) and traits.row_bytes >= least_bytes


def _are_held(traits: Traits, rows: int) -> bool:
    """Whether the shared memory of all blocks has all rows."""
    room = HELD_PART * traits.device.multiprocessors * traits.device.shared_bytes
    return rows * traits.row_bytes <= room


def _part_of_grid(traits: Traits, blocks) -> int:
    """Slots of a block's part of a row that so many blocks share."""
    line = slots_of_line(traits.program, traits.vector)
    return part_of_grid(traits.slots, blocks, line)


def _groups(traits: Traits, rows: int) -> int:
    """Groups of blocks that share rows without sums over them."""
    multiprocessors, has_columns = traits.device.multiprocessors, bool(traits.columns)
    if traits.levels == 1 and rows <= GROUPS and not has_columns:
        # Rows that all blocks together hold.
        elements = traits.slots * traits.slot_elements
        holds = _are_held(traits, rows) and rows <= multiprocessors * LANES * ELEMENTS / elements
        short = rows * traits.row_bytes <= multiprocessors * PART_OF_ONE_ROW
        if holds and (not traits.written_bytes or short):
            return rows  # one exchange in all
    # About as many groups as are wanted, so that the group with the most rows has little to do.
    most = min(rows, GROUPS, multiprocessors)
    wanted = max(1, min(multiprocessors * PART_BYTES[has_columns] // traits.row_bytes, most))

    def cost(groups) -> float:
        longest = -(-rows // groups) * _part_of_grid(traits, multiprocessors // groups)
        return longest * (1 + 0.1 * abs(math.log2(groups / wanted)))

    return min(range(max(1, wanted // 2), min(2 * wanted, most) + 1), key=cost)
