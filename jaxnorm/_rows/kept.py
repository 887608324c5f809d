"""Which values of a row stay in registers from phase to phase, and what a schedule costs with them."""

import dataclasses

from jaxnorm._rows.graph import BOOL
from jaxnorm._rows.phases import Phases
from jaxnorm._rows.plan import Plan
from jaxnorm._rows.rules import Program

# Registers of addresses, loop counters and intermediate results, besides what is held.
REGISTERS_OTHER = 34


@dataclasses.dataclass(frozen=True)
class Kept:
    """A schedule with what stays in registers.

    Attributes:
      plan: the schedule.
      cost: instructions for an element.
      missing: registers that a thread needs beside the ones that it has.
    """

    plan: Plan
    cost: float
    missing: float


def with_kept(program: Program, phases: Phases, plan: Plan) -> Kept:
    """The plan with the values kept that save most instructions, as long as registers hold them."""
    budget = max(0, plan.registers - REGISTERS_OTHER - plan.vector - 6 * (plan.rows_at_once - 1))
    candidates = [
        n
        for n in phases.order
        if n.column and n.row and n.op not in ("literal", "iota") and not n.after
        and (n.floating or n.dtype == BOOL) and not n.op.startswith("local_")
    ]  # fmt: skip
    keep: frozenset = frozenset()
    cost, pressure = _weigh(program, phases, plan, keep)
    while plan.rounds == 1 and phases.count > 1 and not plan.in_steps:
        trials = []
        for node in candidates:
            if node.number not in keep:
                with_node = keep | {node.number}
                trial = _weigh(program, phases, plan, with_node)
                if trial[1] <= max(budget, pressure) and trial[0] < cost - 2:
                    trials.append((*trial, node.number))
        if not trials:
            break
        cost, pressure, number = min(trials)
        keep |= {number}
    return Kept(dataclasses.replace(plan, keep=keep), cost, max(0, pressure - budget))


def with_fewer_blocks(program: Program, plan: Plan) -> Plan:
    """The same plan with more registers for each thread, for a kernel that spilled."""
    fewer = dataclasses.replace(plan, blocks=max(1, plan.blocks * 3 // 4))
    return with_kept(program, Phases(program), fewer).plan


def _weigh(program, phases, plan, keep) -> tuple[float, float]:
    """(instructions for an element, registers for what is held)."""
    evaluated = phases.evaluated(keep)
    cost = sum(0.3 if loaded else n.cost for phase in evaluated for n, loaded in phase.items())
    elements = plan.slots * plan.vector
    sums = [n for n in phases.row_sums if not n.attr[1]]
    accumulators = sum(elements * n.dtype.itemsize // 4 for n in sums) if plan.rounds == 1 else 0
    uses: dict[int, list[int]] = {}
    by_number = {}
    for number, phase in enumerate(evaluated):
        for node in phase:
            if node.number in keep:
                by_number[node.number] = node
                uses.setdefault(node.number, []).append(number)
    most = accumulators
    for number in range(len(evaluated) - 1):
        held = sum(
            _registers_of(by_number[k], elements)
            for k, phases_of in uses.items()
            if phases_of[0] <= number < phases_of[-1]
        )
        raw = 0
        if not plan.hold_shared and plan.rounds == 1:
            later = {
                n.attr[:2]
                for phase in evaluated[number + 1 :]
                for n, loaded in phase.items()
                if n.op == "input" and not loaded and program.inputs[n.attr[0]].whole
            }
            raw = sum(elements * program.inputs[i].dtype.itemsize // 4 for i, _ in later)
        most = max(most, plan.rows_at_once * (held + raw) + accumulators)
    return cost, most


def _registers_of(node, elements) -> int:
    if node.dtype == BOOL:
        return -(-elements // 32)
    return elements * node.dtype.itemsize // 4
