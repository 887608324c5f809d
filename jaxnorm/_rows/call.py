"""What the launcher is told: the source, and how many blocks of how many threads run it on which buffers."""

import dataclasses
import math
from collections.abc import Callable

from jaxnorm import _launch
from jaxnorm._primitive.programs import cached_by_program
from jaxnorm._rows import launcher
from jaxnorm._rows.algebra import simplify
from jaxnorm._rows.emit import emit
from jaxnorm._rows.emit_sums import finish_columns, sums_end_here
from jaxnorm._rows.kept import with_fewer_blocks
from jaxnorm._rows.phases import Phases
from jaxnorm._rows.plan import DEVICES, Device, Plan
from jaxnorm._rows.rules import Program, cached_program_of
from jaxnorm._rows.schedule import schedule
from jaxnorm._rows.shared_memory import (
    exchanged_words,
    keeps_columns,
    posts_of_row,
    shared_bytes,
)

# Bytes of registers that a thread may spill, stores and loads together: a few cost less than fewer threads.
SPILLS = 128


def kernel_name(operation: str) -> str:
    """The name that profiles show."""
    return f"jaxnorm_{operation}"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that runs a row program.

    Buffers are numbered: operands, then results, then scratch.

    Attributes:
      source: CUDA text with the kernel and, where there is something to finish, a kernel whose name ends in `_finish`.
      threads: of a block.
      shared_bytes: of a block's dynamic shared memory.
      cluster: blocks of a cluster, or that share rows anywhere in the grid; 1 where no blocks do.
      rows_per_tile: rows that a block (or cluster) takes at a time.
      blocks: 0 where each tile has a block (or cluster), otherwise how many there are at most.
      chunk_multiple: in how many classes the tiles of persistent blocks must stay apart.
      group_dims: how many leading row dimensions make groups whose sums over rows stay apart.
      sizes: for each row dimension (buffer, dimension, divisor), or (-1, size, 1).
      arguments: buffers that the kernel takes.
      scratch: shapes of the float32 results that follow the program's own.
      finish: (blocks along x, blocks along z) of the finishing kernel, or ().
      finish_arguments: buffers that the finishing kernel takes.
      together: whether blocks share rows without being a cluster, so that all blocks of the grid run at once.
      plan: the schedule, for people. The launcher needs nothing of it.
      operation: what error messages begin with, and what the kernels are named after.
    """

    source: str
    threads: int
    shared_bytes: int
    cluster: int
    rows_per_tile: int
    blocks: int
    chunk_multiple: int
    group_dims: int
    sizes: tuple[tuple[int, int, int], ...]
    arguments: tuple[int, ...]
    scratch: tuple[tuple, ...]
    finish: tuple[int, ...]
    finish_arguments: tuple[int, ...]
    together: bool = False
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False)
    operation: str = "row_program"

    @property
    def kernel(self) -> str:
        return kernel_name(self.operation)

    @property
    def launches(self) -> list[_launch.Launch]:
        """The launch of the kernel and, where there is something to finish, of the kernel that finishes."""
        scalars = [_launch.ROWS, _launch.CHUNKS]
        dimensions = [_launch.row_dimension(i) for i in range(len(self.sizes))]

        def arguments(buffers, numbers):
            return tuple((w,) for w in (*map(_launch.pointer, buffers), *numbers, *dimensions))

        launches = [
            _launch.Launch(
                self.kernel,
                (1, 1, 1),
                (self.threads, 1, 1),
                arguments(self.arguments, scalars),
                self.shared_bytes,
                self.cluster,
                cooperative=self.together,
                rule=_launch.TILES,
            )
        ]
        if self.finish:
            x, z = self.finish
            own = arguments(self.finish_arguments, [*scalars, _launch.GROUPS])
            name, rule = f"{self.kernel}_finish", _launch.GROUPS_ALONG_Y
            launches += [_launch.Launch(name, (x, 1, z), (32, 1, 1), own, early=True, rule=rule)]
        return launches

    @property
    def attributes(self) -> dict:
        """The attributes of the FFI call."""
        tiles = _launch.RowTiles(
            self.rows_per_tile, self.blocks, self.chunk_multiple, self.group_dims, self.sizes
        )
        return _launch.attributes(self.operation, self.source, self.launches, row_tiles=tiles)


def device_here() -> Device:
    """The GPU that row programs are compiled for. Without a GPU here, they are lowered for a GPU elsewhere."""
    for gpu in launcher.gpus():
        return Device(
            gpu.architecture, gpu.multiprocessors, gpu.shared_bytes, gpu.name, gpu.l2_bytes
        )
    return DEVICES[90]


@cached_by_program
def simplified(closed) -> Program:
    """The program of a jaxpr, ready for a schedule."""
    return simplify(cached_program_of(closed))


def row_call(
    closed, device: Device, plan: Plan | None = None, operation: str = Call.operation
) -> Call:
    """The call that computes a jaxpr.

    Args:
      closed: a closed jaxpr without constants.
      device: for which the schedule is made.
      plan: the schedule, instead of the one that `schedule` chooses.
      operation: its name.

    Raises:
      NotARowProgram: if the jaxpr is none.
    """
    program = simplified(closed)
    plan = plan or schedule(program, device)
    phases = Phases(program)
    inputs = sorted({n.attr[0] for n in phases.order if n.op in ("input", "input_at", "key")})
    outputs = [program.count + o.number for o in program.outputs]
    direct = sums_end_here(program, plan)
    own = [b for b, o in zip(outputs, program.outputs, strict=True) if direct or not o.after]
    after = [b for b in outputs if b not in own]
    first_scratch = program.count + len(outputs)
    sums = [] if direct else phases.row_sums
    group_dims = phases.group_dims
    blocks = plan.grid or (plan.blocks * device.multiprocessors if plan.persistent else 0)
    shapes = [_scratch_shape(n, program, plan, blocks, group_dims) for n in sums]
    if plan.grid:
        posts = math.prod(program.row_sizes) * posts_of_row(exchanged_words(phases))
        shapes.append((posts * plan.cluster, 4))
    scratch = [first_scratch + i for i in range(len(shapes))]
    finish_blocks = -(-program.width // finish_columns(program, group_dims))
    return Call(
        source=emit(program, plan, kernel_name(operation)),
        threads=plan.threads,
        shared_bytes=shared_bytes(program, plan),
        cluster=plan.cluster,
        rows_per_tile=plan.rows_per_tile,
        blocks=blocks,
        chunk_multiple=plan.vector if plan.shifted and keeps_columns(phases, plan) else 1,
        group_dims=group_dims,
        sizes=_sizes(program),
        arguments=(*inputs, *own, *scratch),
        scratch=tuple(shapes),
        finish=(finish_blocks, len(after)) if after else (),
        finish_arguments=(*scratch[: len(sums)], *after, *inputs) if after else (),
        together=plan.grid > 0,
        plan=plan,
        operation=operation,
    )


def compiled_row_call(
    closed,
    device: Device,
    compiled: Callable,
    tuned: Callable = lambda program, source: None,
    operation: str = Call.operation,
) -> Call:
    """`row_call` with a schedule that was measured, or whose kernel does not spill registers, where there is one.

    Args:
      closed: a closed jaxpr without constants.
      device: for which the schedule is made.
      compiled: (source, architecture) -> `launcher.Compiled`.
      tuned: (program, source under the schedule that `schedule` chooses) -> the plan that was measured, or None.
      operation: its name.
    """
    program = simplified(closed)
    plan, best = schedule(program, device), None
    call = row_call(closed, device, plan, operation)
    if measured := tuned(program, call.source):
        return row_call(closed, device, measured, operation)
    while True:
        spills = max(compiled(call.source, device.architecture).spill_bytes.values())
        if best is None or spills < best[0]:
            best = spills, call
        if spills <= SPILLS or plan.blocks == 1:
            return best[1]
        plan = with_fewer_blocks(program, plan)
        call = row_call(closed, device, plan, operation)


def _scratch_shape(row_sum, program, plan, blocks, group_dims) -> tuple:
    """One partial result for each block and group; groups may be more than blocks."""
    groups = math.prod(program.row_sizes[:group_dims])
    known = isinstance(groups, int)
    count = max(blocks, groups) if known else blocks + groups
    words = row_sum.dtype.itemsize // 4
    return (count * plan.cluster, words) if row_sum.attr[1] else (count, program.width * words)


def _sizes(program) -> tuple[tuple[int, int, int], ...]:
    sizes = []
    for size, source in zip(program.row_sizes, program.sources, strict=True):
        if source is not None:
            sizes.append(source)
        elif isinstance(size, int):
            sizes.append((-1, size, 1))
        else:
            sizes.append(_from_results(program, size))
    return tuple(sizes)


def _from_results(program, size):
    """Where a row dimension that no input has alone can be read: a result whose dimension it is."""
    for o in program.outputs:
        for dim, n in enumerate(o.shape):
            if not isinstance(n, int) and n == size:
                return program.count + o.number, dim, 1
    raise ValueError(
        f"fuse: the number of rows {size} must be a dimension of an argument or result"
    )
