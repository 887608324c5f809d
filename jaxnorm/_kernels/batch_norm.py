"""Plans of the batch_norm calls: which kernels run, how often, on how many blocks.

`stats` and `sums` are two launches each, `fwd` and `dx` one. `train` is stats and then fwd, `bwd` sums and then dx, for
which there is also one launch alone where the device can hold the arrays (resident.py).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxnorm._kernels import resident
from jaxnorm._kernels.layout import (
    COLUMNS,
    Lines,
    Shape,
    Spans,
    bits_view,
    ceil_div,
    mask_view,
    no_mask,
    spread_bytes,
)
from jaxnorm._kernels.operands import MAX_ROUNDS, NO_BITS, RAGGED_BITS, Call, Round, rounds
from jaxnorm._kernels.plan import Part, Plan, join
from jaxnorm._launch import Launch, Pointer, packed, size_of
from jaxnorm._rows.plan import Device

READ_ALL, READ_MASKED, READ_KEEP_END = range(3)
NEED_BIAS, NEED_BOTH, NEED_STORE = range(3)

# Waves of blocks in passes that write each element by itself. Many short blocks even out differences in the speed of
# multiprocessors, which vary among devices of one kind. Where bits are moved in the block, one H200 took 5 to 12 %
# more with one or two waves, and another H200 did not.
_ELEMENTWISE_WAVES = 10
_REDUCE_BLOCKS = 3  # blocks of a multiprocessor at once
# A tile of a reduction has few channels, so that there are few partial results.
_MAX_TILE_CHANNELS = 256
_FINAL_THREADS, _FINAL_AT_ONCE = 128, 4


def _launch_of(
    kernel: str, blocks: int, threads: int, arguments: dict[str, list], **options
) -> Launch:
    """A launch of `jaxnorm_<kernel>`, whose arguments have these C++ types, with their members."""
    words = tuple(packed(*members) for members in arguments.values())
    return Launch(f"jaxnorm_{kernel}", (blocks, 1, 1), (threads, 1, 1), words, **options)


def _sizes(arguments: dict[str, list]) -> tuple[tuple[str, int], ...]:
    return tuple((name, size_of(*members)) for name, members in arguments.items())


# ---- passes that write each element by itself ----

_FILES = ("bits", "batch_norm")


def _tile_columns(call: Call) -> int:
    """The most columns of a tile where bits are read.

    With rows of one element, each column has a byte of bits, and half as many columns find room.
    """
    return call.threads * COLUMNS // (2 if call.shape.last == 1 else 1)


def _forward_columns(call: Call) -> int:
    """The most columns of a tile of `fwd`.

    With ragged bits there is one thread more. There are so few columns that a thread moves one byte, if this leaves at
    most an eighth of the threads idle: a second round for some threads takes longer.
    """
    threads, shape = call.threads, call.shape
    if call.bits != RAGGED_BITS:
        return threads * COLUMNS
    most = (threads - 1) * COLUMNS
    one_round = threads * shape.last // shape.bits_columns // COLUMNS * COLUMNS
    return most if one_round * 8 < threads * COLUMNS * 7 else min(most, one_round)


def _fwd(call: Call, each: list[Round], device: Device) -> Part:
    residual, ragged = "residual" in call, call.bits == RAGGED_BITS
    batch = call.batch(1 + residual)
    step = 4 if ragged else batch  # lines
    lines = Lines.of(call.shape, _forward_columns(call))
    blocks_at_once = (3 if call.dtype.itemsize == 2 else 2) * device.multiprocessors
    view = bits_view(call.shape, lines)
    launches, arguments = [], {}
    for r in each:
        spans = Spans.of(
            lines, r.groups, blocks_at_once, _ELEMENTWISE_WAVES, step, 2 * batch // step,
            r.aligned("x", "residual", "y"),
        )  # fmt: skip
        arguments = {
            "GroupArrays": r.arrays,
            "Lines": lines.structure,
            "Spans": spans.structure,
            "BitsView": view,
            "A": [(call.acc, call.epsilon)],
            "int": [("i", call.relu)],
        }
        threads = ceil_div(lines.tile // COLUMNS + ragged, 32) * 32
        blocks = spans.blocks * r.groups
        launches.append(
            _launch_of("batch_norm_fwd", blocks, threads, arguments, early=device.clusters)
        )
    constants = (("FWD_RESIDUAL", int(residual)), ("FWD_BITS", call.bits))
    return Part((*_FILES, "batch_norm_fwd"), constants, tuple(launches), _sizes(arguments))


def _dx(call: Call, each: list[Round], device: Device) -> Part | None:
    terms = "dx" in call and ("dbias" in call or "dmean" in call)
    masked = terms and "mask" in call
    crowded = call.bits == RAGGED_BITS and terms and not masked and call.dtype.itemsize < 8
    lines = Lines.of(call.shape, _tile_columns(call))
    count = float(call.shape.reduced) * call.replicas
    view = bits_view(call.shape, lines)
    launches, arguments = [], {}
    for r in each:
        spans = Spans.of(
            lines, r.groups, (3 if crowded else 2) * device.multiprocessors, _ELEMENTWISE_WAVES,
            call.batch(1), 2, r.aligned("dy", "x", "dx", "dresidual"),
        )  # fmt: skip
        mask: list | None = no_mask()
        if "mask" in call:
            dims, buffer = call.shapes["mask"], r.buffers["mask"]
            mask = mask_view(call.shape, lines, call.full, dims, call.split, buffer, r.first)
        if mask is None:
            return None
        arguments = {
            "GroupArrays": r.arrays,
            "Lines": lines.structure,
            "Spans": spans.structure,
            "BitsView": view,
            "MaskView": mask,
            "A": [(call.acc, call.epsilon)],
            "Acc<T>": [(call.acc, count)],
        }
        blocks = spans.blocks * r.groups
        launches.append(
            _launch_of("batch_norm_dx", blocks, lines.threads, arguments, early=device.clusters)
        )
    constants = (("DX_TERMS", int(terms)), ("DX_MASKED", int(masked)), ("DX_BITS", call.bits))
    return Part((*_FILES, "batch_norm_dx"), constants, tuple(launches), _sizes(arguments))


# ---- reductions ----


def _reduce_lines(call: Call, rows: bool) -> Lines:
    """The lines of a reduction. `rows`: a block may work on several at once (not where it moves bits)."""
    if not rows:
        return Lines.of(call.shape, _tile_columns(call))
    most_columns = _MAX_TILE_CHANNELS * min(call.shape.inner, call.threads)
    lines = Lines.of(call.shape, min(call.threads * COLUMNS, most_columns))
    return dataclasses.replace(lines, rows=call.threads // (lines.tile // COLUMNS))


def _walk(lines: Lines, step: int, runs: int, spans: Spans) -> tuple[Spans, int, int]:
    """(spans, lines that are read by vectors, lines between runs).

    Cuts the lines of each block into about `runs` runs of whole steps, or leaves them in one piece if some blocks would
    then have many more lines than others.
    """
    most_waste = 50  # 1 / 50 of the lines of a block
    steps = ceil_div(spans.span, step)
    run = ceil_div(steps, runs)
    waste = ceil_div(steps, run) * run - steps
    if spans.aligned and waste * most_waste <= steps:
        spans = dataclasses.replace(spans, span=run * step)
    return spans, lines.full if spans.aligned else 0, (spans.spans - 1) * spans.span


def _kept_by_l2(device: Device, size: int) -> bool:
    """Whether L2 holds so much of `size` bytes that the order in which they are read matters to the next pass."""
    return size <= 4 * device.l2_bytes


def _final(call: Call, r: Round, lines: Lines, spans: Spans, other, results, device, scratch):
    """The launch that merges partial results."""
    once = lines.period == lines.cols
    one_tile = lines.tiles == 1 or (once and lines.inner == 1 and not lines.wide)
    tiles = 1 if one_tile else (lines.inner - 1) // lines.tile + 2 if once else lines.tiles
    tile_bits = span_bits = 0
    while 1 << (tile_bits + span_bits) < _FINAL_THREADS and 1 << tile_bits < tiles:
        tile_bits += 1
    spans_at_once = _FINAL_AT_ONCE if one_tile else 1
    while (
        1 << (tile_bits + span_bits) < _FINAL_THREADS and spans_at_once << span_bits < spans.spans
    ):
        span_bits += 1
    blocks = (lines.channels - 1) // (_FINAL_THREADS >> (tile_bits + span_bits)) + 1
    structure = [
        Pointer(scratch),
        ("l", lines.channels),
        ("l", lines.inner),
        ("i", tile_bits),
        ("i", span_bits),
        *(("u", n) for n in (blocks, spans.spans, lines.slots, lines.tiles, lines.tile)),
        ("b", one_tile),
        r.array(other),
        [r.array(name) for name in results],
    ]
    all_blocks = blocks * r.groups
    arguments = {
        "FinalPlan": structure,
        "A": [(call.acc, call.epsilon)],
        "Lines": lines.structure,
    }
    launch = _launch_of(
        "batch_norm_final", all_blocks, _FINAL_THREADS, arguments,
        shared_bytes=spread_bytes(device, all_blocks), early=device.clusters,
    )  # fmt: skip
    return launch, arguments


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """The differences between the two reductions.

    Attributes:
      kernel: its name.
      numbers: how many a partial result has.
      batch: lines that a thread reads at once.
      runs: the most runs in which a block reads its lines.
      arrays: of elements.
      other: array that the last step reads.
      results: of the last step.
      partial: C++ type of a partial result.
      kept: (lines) -> the line from which on L2 keeps the lines that are read.
      view: (round, lines) -> the kernel's last argument.
      view_type: C++ type of this argument.
    """

    kernel: str
    numbers: int
    batch: int
    runs: int
    arrays: tuple[str, ...]
    other: str
    results: tuple[str, ...]
    partial: str
    kept: Callable
    view: Callable
    view_type: str


def _reduce(call, each, device, lines, kind: _Reduction, room: int, scratch: int):
    """(launches, structures, float32 elements of scratch) of a reduction. `room`: the most partial results."""
    shift = (math.gcd(lines.inner, COLUMNS)).bit_length() - 1
    run = min(lines.inner >> shift, 1 << 16)  # a tile has fewer than 2^16 entries
    repeat = min(lines.cols >> shift, 1 << 18)
    launches, words, arguments, last_arguments = [], 0, {}, {}
    for r in each:
        most = room // (r.groups * lines.tiles * lines.slots)
        # No more blocks than run at once: each block has partial results to merge and to write.
        blocks_at_once = _REDUCE_BLOCKS * device.multiprocessors
        aligned = r.aligned(*kind.arrays)
        spans = Spans.of(lines, r.groups, blocks_at_once, 1, kind.batch, 1, aligned, most)
        lanes = 1
        while lanes < 32 and lines.slots * lanes * 2 <= lines.threads:
            lanes *= 2
        blocks = spans.blocks * r.groups
        spans, full, gap = _walk(lines, kind.batch * lines.rows, kind.runs, spans)
        walk = [("l", full), ("l", gap), ("l", kind.kept(lines))]
        partials = [Pointer(scratch), *(("i", n) for n in (lines.slots, lanes, shift, run, repeat))]
        view = kind.view(r, lines)
        if view is None:
            return None
        arguments = {
            "GroupArrays": r.arrays,
            "Lines": lines.structure,
            "Spans": spans.structure,
            "Walk": walk,
            f"Partials<{kind.partial}>": partials,
            kind.view_type: view,
        }
        launches.append(_launch_of(kind.kernel, blocks, lines.threads, arguments))
        last, last_arguments = _final(
            call, r, lines, spans, kind.other, kind.results, device, scratch
        )
        launches.append(last)
        words = max(words, blocks * lines.slots * kind.numbers * call.acc_bytes // 4)
    return tuple(launches), _sizes({**arguments, **last_arguments}), words


def _stats(call: Call, each: list[Round], device: Device, room: int, scratch: int) -> Part | None:
    lines = _reduce_lines(call, rows=True)
    size = call.dtype.itemsize
    read = READ_ALL
    if "mask" in call:
        read = READ_MASKED
    elif size < 8 and call.shape.groups == 1 and _kept_by_l2(device, lines.size * size):
        read = READ_KEEP_END
    kept_part = 3  # L2 keeps a third of its size; such loads are 4% slower

    def kept(lines):
        left = lines.size - device.l2_bytes // kept_part // size
        return int(math.copysign(abs(left) // lines.period, left))  # as C++ divides

    def view(r, lines):
        if "mask" not in call:
            return no_mask()
        dims, buffer = call.shapes["mask"], r.buffers["mask"]
        return mask_view(call.shape, lines, call.full, dims, call.split, buffer, r.first)

    kind = _Reduction(
        "batch_norm_stats",
        numbers=3,
        batch=2 * call.batch(1),  # a pass that only reads: more bytes under way were faster
        runs=16 if read == READ_KEEP_END else 1,  # 4 were 1% slower
        arrays=("x",),
        other="x",
        results=("mean", "var", "count"),
        partial="Moments",
        kept=kept,
        view=view,
        view_type="MaskView",
    )
    made = _reduce(call, each, device, lines, kind, room, scratch)
    if made is None:
        return None
    files = (*_FILES, "batch_norm_reduce", "batch_norm_stats", "batch_norm_final")
    return Part(files, (("STATS_READ", read),), *made)


def _sums(call: Call, each: list[Round], device: Device, room: int, scratch: int) -> Part | None:
    ragged = call.bits == RAGGED_BITS
    lines = _reduce_lines(call, rows=not ragged)
    if "dresidual" in call and not ragged:
        need = NEED_STORE
    else:
        need = NEED_BOTH if "dscale" in call else NEED_BIAS
    touched = call.shape.groups * lines.size * call.dtype.itemsize * (need + 1)
    results = ("dbias", "dscale", "")
    kind = _Reduction(
        "batch_norm_sums",
        numbers=2,
        # Fewer bytes under way and more blocks were faster, except with ragged bits, where lines share a barrier.
        batch=call.batch(1 if ragged else 2),
        runs=4 if _kept_by_l2(device, touched) else 1,
        arrays=("dy", "x", "dresidual"),
        other="var" if "dscale" in call else "",
        results=results,
        partial="Totals",
        kept=lambda lines: 0,
        view=lambda r, lines: bits_view(call.shape, lines),
        view_type="BitsView",
    )
    made = _reduce(call, each, device, lines, kind, room, scratch)
    if made is None:
        return None
    files = (*_FILES, "batch_norm_reduce", "batch_norm_sums", "batch_norm_final")
    return Part(files, (("SUMS_BITS", call.bits), ("SUMS_NEED", need)), *made)


# ---- calls ----


def plan(
    operation: str,
    shapes: dict[str, Sequence[int]],
    results: dict[str, Sequence[int]],
    dtype,
    device: Device,
    *,
    axes: tuple[int, ...],
    groups: int = 0,
    epsilon: float = 1e-5,
    replicas: int = 1,
    relu: bool = False,
    partials: int,
) -> Plan | None:
    """The plan of a call, or None where the kernels do not take it.

    Args:
      operation: "stats", "fwd", "sums", "dx", "train" or "bwd".
      shapes: of operands by name, in the order of the call.
      results: shapes of results likewise.
      dtype: of elements.
      device: the device that runs the call.
      axes: the features, neighbouring dimensions.
      groups: leading dimensions that vmap mapped.
      epsilon: is added to the variance.
      replicas: devices that hold as many elements each.
      relu: whether the call has a ReLU.
      partials: the most partial results of a reduction.
    """
    all_shapes = {n: tuple(s) for n, s in (*shapes.items(), *results.items())}
    whole = {n: (*s[:-1], 1) if n == "bits" else s for n, s in all_shapes.items()}
    full = tuple(np.broadcast_shapes(*whole.values()))
    if not all(isinstance(n, int) for n in full) or 0 in full:
        return None
    shape = Shape.of(full, axes, groups)
    split = axes[0] if shape.inner == 1 else axes[-1] + 1
    call = Call(np.dtype(dtype), all_shapes, full, shape, split, groups, epsilon, replicas, relu)
    buffers = {name: i for i, name in enumerate(all_shapes)}
    parts = _parts(operation, call, buffers, device, partials)
    if parts is None:
        return None
    sizes = [math.prod(s) * call.item_bytes(n) for n, s in all_shapes.items()]
    return join(f"batch_norm_{operation}", call.dtype.name, parts, sizes)


def _parts(operation, call: Call, buffers, device: Device, partials: int) -> list[Part] | None:
    """The parts of a call; None where a part has no plan."""
    parts = _all_parts(operation, call, buffers, device, partials)
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def _all_parts(operation, call: Call, buffers, device: Device, partials: int) -> list[Part | None]:
    each = rounds(call, buffers)
    if len(each) > MAX_ROUNDS:
        return [None]
    scratch = len(buffers)
    if operation == "fwd":
        return [_fwd(call, each, device)]
    if operation == "dx":
        return [_dx(call, each, device)]
    if operation == "stats":
        return [_stats(call, each, device, partials, scratch)]
    if operation == "sums":
        return [_sums(call, each, device, partials, scratch)]
    if held := _resident(operation, call, each, device, partials, scratch):
        return [held]
    if operation == "train":
        return [_stats(call, each, device, partials, scratch), _fwd(call, each, device)]
    # The residual's cotangent is g. The first pass writes it, so that the second pass reads g and no bits. With ragged
    # bits, for which the threads of a block wait for each other, the first pass has no time for this.
    first, second, second_buffers = call, call, buffers
    if call.bits == RAGGED_BITS:
        first = call.without("dresidual")
    elif "dresidual" in call:
        second = call.without("bits", "dresidual")
        second.shapes["dy"] = call.shapes["dresidual"]
        second_buffers = {**buffers, "dy": buffers["dresidual"]}
    return [
        _sums(first, rounds(first, buffers), device, partials, scratch),
        _dx(second, rounds(second, second_buffers), device),
    ]


def _resident(operation, call: Call, each, device, partials: int, scratch: int) -> Part | None:
    """One launch, if the device can hold the arrays."""
    if call.bits == RAGGED_BITS or call.dtype.itemsize == 8 or len(each) > 1:
        return None
    held, names = ("dy", "x"), ("dy", "x", "dx", "dresidual")
    if operation == "train":
        held, names = ("x",), ("x", "residual", "y")
    if not each[0].aligned(*names):
        return None
    numbers = 3 if operation == "train" else 2
    layout = resident.layout(
        call.shape, call.dtype.itemsize, len(held), call.bits != NO_BITS, device,
        partials * numbers * call.acc_bytes,
    )  # fmt: skip
    if layout is None:
        return None
    inverse = np.float32(1 / call.shape.reduced)
    if operation == "bwd":
        inverse = inverse / np.float32(call.replicas)
    structure = layout.structure(
        [Pointer(each[0].buffers[n]) for n in held], scratch, float(inverse)
    )
    arguments = {"ResidentPlan": structure, "GroupArrays": each[0].arrays}
    alike = resident.alike(call.shape)
    constants = (("RESIDENT_ARRAYS", len(held)), ("RESIDENT_ALIKE", int(alike)))
    if operation == "train":
        arguments |= {"u32": [("u", call.shape.inner)], "float": [("f", call.epsilon)]}
        arguments |= {"int": [("i", call.relu)]}
        constants += (("TRAIN_RESIDUAL", int("residual" in call)), ("TRAIN_BITS", call.bits))
    else:
        arguments |= {"float": [("f", call.epsilon)]}
        constants += (("BWD_BITS", call.bits),)
    launch = _launch_of(
        f"batch_norm_{operation}", layout.blocks, layout.threads, arguments,
        shared_bytes=layout.shared_bytes, cooperative=True,
    )  # fmt: skip
    files = (*_FILES, "posts", "batch_norm_resident", "batch_norm_merge", "batch_norm_exchange")
    files = (*files, f"batch_norm_{operation}")
    return Part(files, constants, (launch,), _sizes(arguments), layout.posts * 4)
