"""Slots of a row, and where a block's shared memory is used: stages of a ring, partial results, barriers, operands."""

import dataclasses
import math

from jaxnorm._rows.graph import Node
from jaxnorm._rows.phases import Phases
from jaxnorm._rows.plan import Plan
from jaxnorm._rows.rules import Program

LINE = 128  # bytes of a cache line
ROW_LOADS = 1024  # rows whose labels, statistics and the like fit in shared memory
POST_WORDS = 2  # partial results in a post, which is 16 bytes (`emit_steps`)


def round_up(n, unit) -> int:
    return -(-n // unit) * unit


def in_row_order(layout, row_sizes) -> bool:
    """Whether an array's rows follow each other in memory, in the order in which they are numbered."""
    stride = layout.columns if layout.columns is not None else 1
    if layout.step != 1 or layout.rows != tuple(range(len(row_sizes))):
        return False
    for k, actual in reversed(layout.strides):
        if not (actual == stride):
            return False
        stride = stride * row_sizes[k]
    return True


def staged_inputs(program: Program, phases: Phases) -> list:
    """The inputs that a ring holds."""
    inputs = [program.inputs[n] for n in phases.inputs(whole=True)]
    return [i for i in inputs if not i.layout.bits]


def stage_layout(
    program: Program, plan: Plan, phases: Phases | None = None
) -> tuple[dict[int, int], int]:
    """(offset of each input in a stage, bytes of a stage)."""
    offsets, size = {}, 0
    for i in staged_inputs(program, phases or Phases(program)):
        offsets[i.number] = size
        size += round_up(plan.rows_per_tile * row_pitch(program, plan, i), 128)
    return offsets, size


def row_pitch(program: Program, plan: Plan, i) -> int:
    """Bytes from one row of an input to the next in a stage."""
    if plan.parts:
        return i.panels * plan.slots * plan.lanes * plan.vector * i.dtype.itemsize
    columns = (
        i.panels * part_slots(program, plan) * plan.vector
        if plan.cluster > 1 or plan.shifted
        else i.layout.columns
    )
    return columns * i.dtype.itemsize


def stage_bytes(program: Program, plan: Plan) -> int:
    return stage_layout(program, plan)[1]


def hoisted_inputs(program: Program, plan: Plan, phases: Phases | None = None) -> list:
    """The column operands that blocks keep from row to row: all of a block's rows have the same."""
    phases = phases or Phases(program)
    columns = [program.inputs[n] for n in phases.inputs(whole=False)] if plan.hoist else []
    return [i for i in columns if all(k < phases.group_dims for k in i.layout.rows)]


def hoisted_layout(
    program: Program, plan: Plan, phases: Phases | None = None
) -> tuple[dict[tuple, int], int]:
    """(offset of each load (input, panel, backwards) of column operands in shared memory, bytes of all)."""
    offsets, size = {}, 0
    if plan.hoist == "shared":
        phases = phases or Phases(program)
        hoisted = {i.number: i for i in hoisted_inputs(program, plan, phases)}
        for load in phases.loads:
            if load[0] in hoisted:
                offsets[load] = size
                size += plan.slots * plan.lanes * plan.vector * hoisted[load[0]].dtype.itemsize
    return offsets, size


def keeps_columns(phases: Phases, plan: Plan) -> bool:
    """Whether threads keep something of their columns from row to row, so that a block's rows must lie alike."""
    return plan.persistent and bool(phases.row_sums or plan.hoist)


def slots_of(width: int, vector: int, shifted: bool) -> int:
    """Slots of so many columns; a shifted row can touch one more than its length says."""
    return -(-(width + vector - 1) // vector) if shifted else width // vector


def slot_count(program: Program, plan: Plan) -> int:
    """Slots of a panel."""
    return slots_of(program.width, plan.vector, plan.shifted)


def slots_of_line(program: Program, vector: int) -> int:
    """Slots of the input with the shortest elements in a cache line."""
    sizes = [i.dtype.itemsize for i in staged_inputs(program, Phases(program))]
    return max(1, LINE // (vector * min(sizes)))


def part_of_grid(slots: int, blocks: int, line: int) -> int:
    """Slots of a block that shares a row of `slots`: whole cache lines, of which each has `line` slots."""
    lines = -(-slots // line)
    return -(-lines // blocks) * line


def part_slots(program: Program, plan: Plan) -> int:
    """Slots of a panel in one of the blocks that share a row."""
    if plan.grid:
        line = slots_of_line(program, plan.vector)
        return part_of_grid(slot_count(program, plan), plan.cluster, line)
    return -(-slot_count(program, plan) // plan.cluster)


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Where a block's shared memory is used, in bytes."""

    reductions: int  # offset of the partial results
    reduction_words: int  # words of one set of partial results; there are two sets
    barriers: int  # offset of two barriers a stage, and two for exchanges in a cluster
    operands: int  # offset of column operands
    total: int


def shared_memory(program: Program, plan: Plan) -> SharedMemory:
    """The stages come first; sums over rows, at the end, use the same place."""
    phases = Phases(program)
    if plan.in_steps:
        steps = steps_memory(program, plan)
        return SharedMemory(steps.parts, 0, steps.barriers, steps.total, steps.total)
    partials = plan.warps * plan.cluster * max(1, plan.side)
    partials = partials if plan.warps > 1 or plan.cluster > 1 else 0
    most = (
        max((sum(n.dtype.itemsize // 4 or 1 for n in r) for r in phases.reductions), default=0)
        * plan.rows_at_once
    )
    words = round_up(most * partials, 2)  # of 4 bytes; a result may have 8
    sums = [n for n in phases.row_sums if not n.attr[1]]
    sum_bytes = (
        max((plan.groups * program.width * n.dtype.itemsize for n in sums), default=0)
        if plan.groups > 1 and not plan.side
        else 0
    )
    stages = plan.stages * stage_bytes(program, plan) if plan.source == "ring" else 0
    start = max(round_up(stages, 128), round_up(sum_bytes, 128), 512 if phases.row_sums else 0)
    barriers = start + round_up(2 * words * 4, 128)
    operands = barriers + round_up(16 * plan.stages + 16, 128)
    total = operands + hoisted_layout(program, plan, phases)[1]
    return SharedMemory(start, words, barriers, operands, total)


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
    def of(
        cls, plan: Plan, words: tuple[int, ...], stage_bytes: int, row_words: int
    ) -> "StepsMemory":
        """The memory of a plan.

        Args:
          plan: the schedule.
          words: partial results of each exchange.
          stage_bytes: bytes of a stage.
          row_words: what is loaded for all rows.
        """
        stages, all_words = plan.stages, sum(words)
        parts = round_up(stages * stage_bytes, 128)
        known = parts + stages * all_words * (plan.lanes // 32) * 4
        gathered = known + stages * all_words * 4
        gathered_words = max(words, default=0) * plan.cluster
        gathered_sets = plan.exchangers if plan.grid else stages
        rows = gathered + len(words) * gathered_sets * gathered_words * 4
        barriers = round_up(rows + row_words * 4, 128)
        total = barriers + 8 * stages * (2 + (2 if plan.grid else 3) * len(words))
        return cls(
            parts,
            known,
            gathered,
            gathered_words,
            gathered_sets,
            rows,
            barriers,
            round_up(total, 128),
        )


def steps_memory(program: Program, plan: Plan) -> StepsMemory:
    """Where shared memory is used, if several rows are under way at once."""
    phases = Phases(program)
    stage, words = stage_bytes(program, plan), exchanged_words(phases)
    return StepsMemory.of(plan, words, stage, row_words(program, phases))


def row_words(program: Program, phases: Phases) -> int:
    """Words of `row_loads` for all rows."""
    loads = len(row_loads(program, phases))
    return loads and loads * math.prod(program.row_sizes)


def row_loads(program: Program, phases: Phases) -> list[Node]:
    """What blocks load once for each row before all phases where several are under way, unless rows are many."""
    rows = math.prod(program.row_sizes)
    if not isinstance(rows, int) or rows > ROW_LOADS:
        return []
    loads = [n for n in phases.order if n.op in ("input", "input_at") and n.row and not n.column]
    return [n for n in loads if n.dtype.itemsize <= 4 and not n.after and not n.level]


def exchanged_words(phases: Phases) -> tuple[int, ...]:
    """Partial results of each exchange of a row."""
    return tuple(len(reductions) for reductions in phases.reductions[:-1])


def posts_of_row(words: tuple[int, ...]) -> int:
    """Posts that a block has for a row, given the partial results of its exchanges."""
    return sum(-(-count // POST_WORDS) for count in words)


def shared_bytes(program: Program, plan: Plan) -> int:
    return shared_memory(program, plan).total
