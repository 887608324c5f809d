"""The choice of a schedule: which threads do what. Its rules follow measurements (docs/experiments/row-programs.md).

Here is what decides where rows are between phases. The modules `schedule_*` have the rest, one for each form of a
schedule: `schedule_tiles`, `schedule_parts`, `schedule_steps` and `schedule_strided`.
"""

from jaxnorm._rows.plan import THREADS_MAX, Device, Plan
from jaxnorm._rows.rules import Program
from jaxnorm._rows.schedule_parts import are_in_parts, plan_of_parts
from jaxnorm._rows.schedule_steps import OTHER_SCHEDULES, StepsShape, cluster_shape, grid_shape
from jaxnorm._rows.schedule_strided import strided_plan
from jaxnorm._rows.schedule_tiles import plan_of_tiles
from jaxnorm._rows.shared_memory import exchanged_words, row_words, slots_of_line
from jaxnorm._rows.traits import LONG_ROWS, LONG_ROWS_WITH_COLUMNS, Traits

# Bytes of rows that one block reads at once if nothing of a row's length is written.
READ_ROWS = 104 * 1024
# Slots of such a row from which on it does not stay in the registers of any block.
READ_SLOTS = 1024


def schedule(program: Program, device: Device, **asked) -> Plan:
    """The plan for a program on a device. `asked` forces fields of the plan, for tests and the search."""
    traits = Traits(program, device, asked)
    if program.neighbours != 1:
        return strided_plan(traits)
    if shape := _shape_of_grid(traits):
        return _plan_in_steps(traits, shape)
    source = _source(traits)
    if source == "ring":
        if shape := _shape_of_cluster(traits):
            return _plan_in_steps(traits, shape)
        if are_in_parts(traits):
            return plan_of_parts(traits)
    return plan_of_tiles(traits, source)


# ---- where rows are between phases ----


def _source(traits: Traits) -> str:
    asked = traits.asked.get("source")
    if asked:
        return "registers" if asked == "ring" and not traits.can_ring else asked
    writes_rows = traits.phases.wholes or traits.sums
    if not writes_rows and traits.levels <= 1 and traits.slots >= READ_SLOTS:
        at_once = traits.cheap and not traits.shifted and traits.row_bytes <= READ_ROWS
        return "registers" if at_once else "stream"
    if (
        traits.can_ring
        and traits.levels
        and (_are_fetched_ahead(traits) or traits.stays_for_columns)
    ):
        return "ring"
    if traits.levels or traits.sums:
        # Registers hold the data of a block of 1024 threads beside their work: 32 words for each thread.
        words = traits.row_bytes / 4 + traits.program.width * len(traits.phases.row_sums)
        return "stream" if words > THREADS_MAX * 32 else "registers"
    # Without reductions and sums over rows, a row is a number of independent slots.
    return "stream" if traits.slots * traits.panels > THREADS_MAX * 4 else "registers"


def _are_fetched_ahead(traits: Traits) -> bool:
    if traits.sums:
        return not traits.columns_vary
    if traits.reads_columns_once:
        return True
    limit = LONG_ROWS[0 if not traits.cheap else 2 if traits.levels == 1 else 1]
    if traits.columns_stay:
        limit = min(limit, LONG_ROWS_WITH_COLUMNS)
    return traits.row_bytes > limit * len(traits.wholes)


# ---- several rows under way at once ----


def _shape_of_grid(traits: Traits) -> StepsShape | None:
    """How blocks of the grid share rows; None where they do not."""
    if not (
        traits.can_ring
        and traits.can_cut
        and not traits.shifted
        and traits.levels
        and traits.rows is not None
        # Sums over rows must be the ones of a block's columns.
        and not any(n.attr[1] or n.attr[0] for n in traits.phases.row_sums)
        and traits.short_parts
    ):
        return None
    return grid_shape(
        rows=traits.rows,
        slots=traits.slots,
        line=slots_of_line(traits.program, traits.vector),
        row_bytes=traits.row_bytes,
        written_bytes=traits.written_bytes,
        words=exchanged_words(traits.phases),
        row_words=row_words(traits.program, traits.phases),
        elements=traits.slot_elements,
        has_columns=bool(traits.columns),
        sums=len(traits.phases.row_sums),
        heavy=traits.heavy,
        device=traits.device,
        asked=traits.asked,
    )


def _shape_of_cluster(traits: Traits) -> StepsShape | None:
    """How several rows are under way in a cluster; None where one row is at a time.

    Where operands of columns fill the registers, a block has one row at a time, and waits while the blocks of its
    cluster exchange. With more than two blocks, several rows under way take less time. So do few rows of several
    arrays, of which a multiprocessor has one block.
    """
    long = traits.columns_stay and traits.blocks_with_columns > 2
    several = traits.cheap and len(traits.wholes) > 1 and not traits.columns
    asked = "lag" in traits.asked or (
        (long or (traits.few_rows and several))
        and not any(a in traits.asked for a in OTHER_SCHEDULES)
    )
    can = traits.short_parts and traits.can_cut and traits.levels and not traits.sums
    if not asked or not can:
        return None
    return cluster_shape(
        rows=traits.rows,
        slots=traits.slots,
        elements=traits.slot_elements,
        slot_bytes=[i.panels * traits.vector * i.dtype.itemsize for i in traits.staged],
        column_bytes=traits.column_bytes // traits.program.width,
        words=exchanged_words(traits.phases),
        row_words=row_words(traits.program, traits.phases),
        device=traits.device,
        asked=traits.asked,
    )


def _plan_in_steps(traits: Traits, shape: StepsShape) -> Plan:
    elements = traits.slot_elements * shape.slots
    return Plan(
        source="ring",
        vector=traits.vector,
        lanes=shape.lanes,
        slots=shape.slots,
        threads=shape.threads,
        cluster=shape.cluster,
        stages=shape.stages,
        persistent=True,
        hoist="registers" if traits.columns and (elements <= 16 or not shape.grid) else "",
        hold_shared=True,
        shifted=traits.shifted,
        grid=shape.grid,
        lag=shape.lag,
        exchangers=shape.exchangers,
    )
