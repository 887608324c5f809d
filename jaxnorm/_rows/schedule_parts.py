"""Long rows that are fetched in parts: a stage of a block's ring has a part of a row."""

from jaxnorm._rows.plan import THREADS_MAX, Plan
from jaxnorm._rows.schedule_blocks import SMALL_BLOCK, with_registers, with_stages
from jaxnorm._rows.shared_memory import exchanged_words, round_up
from jaxnorm._rows.traits import LONG_PART, Traits, smallest_cluster

# The part of a ring's shared memory that rows may fill. The rest is fetched ahead.
PARTS_FILL = 0.68
# Elements that a thread has of a part.
ELEMENTS = 16
# Partial results of an exchange from which on blocks are small. Their rings have the parts of one row, so that a
# multiprocessor has several such blocks: one computes while another one exchanges.
MANY_WORDS = 4
SMALL_CLUSTER, ELEMENTS_OF_SMALL_BLOCK = 8, 32


def are_in_parts(traits: Traits) -> bool:
    """Whether the stages of a ring should have parts of rows."""
    if traits.sums or not traits.can_cut:
        return False
    if "parts" in traits.asked:
        return traits.asked["parts"]
    pair = traits.fits_ring(2) and (
        traits.stays_whole or traits.program.width * traits.panels <= 2 * LONG_PART
    )
    fits = _cluster_of(traits, 1) is not None
    return traits.cheap and fits and not pair and not traits.columns_stay


def plan_of_parts(traits: Traits) -> Plan:
    """The plan for rows in parts."""
    asked = traits.asked
    # Operands of columns come from the L2 cache in each round.
    several = traits.column_bytes > traits.row_bytes and _cluster_of(traits, 2) in (1, 2)
    rows = 1 if traits.shifted else asked.get("rows_at_once") or (2 if several else 1)
    is_small = max(exchanged_words(traits.phases), default=0) >= MANY_WORDS
    if is_small:
        cluster, most_lanes, elements = SMALL_CLUSTER, SMALL_BLOCK, ELEMENTS_OF_SMALL_BLOCK
    else:
        cluster, most_lanes, elements = _cluster_of(traits, rows) or 8, THREADS_MAX, ELEMENTS
    cluster = asked.get("cluster") or cluster
    part = -(-traits.slots // cluster)
    lanes = min(asked.get("lanes", most_lanes), round_up(part, 32))
    # At least two parts a row, so that one is fetched while another one is read.
    most_slots = max(1, min(elements // traits.slot_elements, part // (2 * lanes)))
    slots = asked.get("slots") or most_slots
    rounds = -(-part // (lanes * slots))
    slots = -(-part // (lanes * rounds))
    plan = Plan(
        source="ring",
        vector=traits.vector,
        lanes=lanes,
        slots=slots,
        threads=lanes,
        rounds=rounds,
        cluster=cluster,
        rows_at_once=rows,
        persistent=True,
        hold_shared=True,
        shifted=traits.shifted,
    )
    # More parts than two rows have would wait in any case.
    wanted = max(2, rounds) if is_small else 2 * rounds
    return with_registers(traits, with_stages(traits, plan, wanted))


def _cluster_of(traits: Traits, rows: int) -> int | None:
    """Blocks of the smallest cluster that holds so many rows."""
    return smallest_cluster(rows * traits.row_bytes, PARTS_FILL * traits.device.shared_bytes)
