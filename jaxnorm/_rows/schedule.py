"""The choice of a schedule: which threads do what. Its rules follow measurements (docs/experiments/row-programs.md).

Here is what decides where rows are between phases. The modules `schedule_*` have the rest, one for each form of a
schedule: `schedule_tiles`, `schedule_parts`, `schedule_steps` and `schedule_strided`.
"""

from jaxnorm._rows.plan import THREADS_MAX, Device, Plan
from jaxnorm._rows.rules import Program
from jaxnorm._rows.schedule_parts import are_in_parts, plan_of_parts
from jaxnorm._rows.schedule_steps import plan_of_cluster, plan_of_grid
from jaxnorm._rows.schedule_strided import strided_plan
from jaxnorm._rows.schedule_tiles import plan_of_tiles
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
    if plan := plan_of_grid(traits):
        return plan
    source = _source(traits)
    if source == "ring":
        if plan := plan_of_cluster(traits):
            return plan
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
    light = traits.levels == 1 and traits.column_bytes <= 2 * traits.row_bytes
    limit = LONG_ROWS[0 if not traits.cheap else 2 if light else 1]
    if traits.columns_stay:
        limit = min(limit, LONG_ROWS_WITH_COLUMNS)
    return traits.row_bytes > limit * len(traits.wholes)
