"""What a multiprocessor holds of a schedule: the stages of a ring, and blocks with their registers."""

import dataclasses

from jaxnorm._rows.kept import Kept, with_kept
from jaxnorm._rows.plan import THREADS_MAX, Plan
from jaxnorm._rows.shared_memory import hoisted_layout, shared_bytes, stage_bytes
from jaxnorm._rows.traits import Traits

# Threads of a block that leave room for several of them, which take turns.
SMALL_BLOCK = 128
# Such blocks of a multiprocessor where clusters sum rows up: each cluster writes partial sums.
CLUSTERED_BLOCKS = 2
# Rows of a block, at least, that adds up groups of rows with more than 128 threads a multiprocessor: each block writes
# partial sums of its groups.
GROUP_ROWS = 48


def with_stages(traits: Traits, plan: Plan, wanted: int) -> Plan:
    """The plan with as many stages as are asked for or wanted, and fit."""
    room = traits.device.shared_bytes - 4096
    stage = max(stage_bytes(traits.program, plan), 1)
    if plan.hoist == "shared" and 2 * stage + hoisted_layout(traits.program, plan)[1] > room:
        plan = dataclasses.replace(plan, hoist="")
    most = (room - hoisted_layout(traits.program, plan)[1]) // stage
    stages = max(1, min(traits.asked.get("stages") or wanted, most))
    return dataclasses.replace(plan, stages=stages)


def with_registers(traits: Traits, plan: Plan) -> Plan:
    """The plan with blocks of a multiprocessor, and with what stays in registers from phase to phase."""
    shared = shared_bytes(traits.program, plan)
    most = max(1, min(32, (traits.device.shared_bytes + 1024) // (shared + 1024)))

    def with_blocks(blocks) -> Kept:
        return with_kept(traits.program, traits.phases, dataclasses.replace(plan, blocks=blocks))

    if "blocks" in traits.asked:
        return with_blocks(min(traits.asked["blocks"], most)).plan

    def cost(kept) -> float:
        idle = max(0, THREADS_MAX - kept.plan.blocks * plan.threads)
        return kept.cost * 1.17 ** (idle / 256) * min(1.3, 1 + 0.05 * kept.missing)

    numbers = sorted({max(1, min(n, most)) for n in block_numbers(traits, plan)}, reverse=True)
    return min(map(with_blocks, numbers), key=cost).plan


def block_numbers(traits: Traits, plan: Plan) -> list[int]:
    """How many blocks a multiprocessor may have: more threads hide more latency, fewer have more registers."""
    elements = plan.slots * plan.vector * traits.panels
    if traits.sums and (traits.heavy or traits.levels) and not traits.columns_vary:
        if plan.cluster > 1 and plan.threads <= SMALL_BLOCK:
            return [CLUSTERED_BLOCKS]
        return [blocks_of_sums(traits, plan.threads, plan.lanes, elements)]
    if plan.source == "ring" and traits.stays_for_columns:
        return [-(-(512 if elements <= 24 else 256) // plan.threads)]
    if plan.source == "ring" and traits.reads_columns_once:
        return [round((384 if plan.threads <= SMALL_BLOCK else 512) / plan.threads)]
    threads = (1024, 896, 768, 640, 512)
    if traits.sums or (traits.heavy and traits.levels) or plan.lanes < 32:
        threads = (512,)
    return [round(n / plan.threads) for n in threads]


def blocks_of_sums(traits: Traits, threads, lanes, elements) -> int:
    """Blocks of a multiprocessor where rows are summed up, each thread having so many elements of a row.

    A ring hides the latency of memory. What is left is that of instructions.
    """
    # Shifted rows are worked on one at a time.
    if traits.shifted or (traits.heavy and not traits.phases.group_dims):
        return -(-256 // threads)
    if traits.phases.group_dims:
        many = (traits.rows or 0) // (GROUP_ROWS * traits.device.multiprocessors)
        return max(1, 128 // threads, min(round(256 / threads), many))
    several = len(traits.phases.row_sums) > 1
    if lanes <= 32:
        # One sum leaves registers for warps that work on two rows, and then one block is enough.
        two_rows = not several and 24 <= elements <= 32 and len(traits.wholes) <= 2
        return 1 if two_rows else max(1, round(256 / threads))
    if several:
        return max(1, 320 // max(threads, 128))
    return -(-128 * 16 // (threads * min(elements, 16)))
