"""How the kernels written by hand see an array: numbers that the host computes, and structures that hold them.

vectors.cuh, bits.cuh and batch_norm.cuh declare the structures.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxnorm._launch import Pointer
from jaxnorm._rows.plan import Device

INT_MAX = 2**31 - 1
COLUMNS = 8  # columns of one thread
VECTOR_BYTES = 16
LINE_BYTES = 128
STATIC_SHARED_BYTES = 4096  # kept for a kernel's own variables; the dynamic part can have the rest


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def fast_div(d: int) -> list:
    """FastDiv: n / d for 0 <= n < 2^31.

    Granlund & Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), theorem 4.2 with N = 31:
    floor(n / d) = floor(m * n / 2^(31 + s)) for all n < 2^31 if 2^(31 + s) <= m * d <= 2^(31 + s) + 2^s.
    With s = ceil(log2 d), m = ceil(2^(31 + s) / d) satisfies it, as m * d exceeds 2^(31 + s) by less than d <= 2^s.
    m fits 32 bits: d >= 2^(s - 1) + 1 and s <= 31 give 2^(31 + s) / d < 2^32 - 3 (for d = 1, m is 2^31).
    """
    shift = (d - 1).bit_length()
    return [("u", d), ("u", shift), ("u", ceil_div(1 << (31 + shift), d))]


_NO_DIVISION = [("u", 1), ("u", 0), ("u", 1 << 31)]


def merged_strides(full: Sequence[int], own: Sequence[int], step: int) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions of `own`, outermost first. Each size is 1 or the size in `full`.

    Broadcast dimensions have stride 0. Neighbours with a common stride are merged. `step`: elements of one place in the
    innermost dimension.
    """
    found: list[tuple[int, int]] = []
    for size, here in zip(reversed(full), reversed(own), strict=True):
        stride = 0 if here == 1 else step
        step *= here
        if size == 1:
            continue
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found[::-1]


def offset_of(row: int, strides: Sequence[tuple[int, int]]) -> int:
    """The element at which `row` of such dimensions begins."""
    offset = 0
    for size, stride in reversed(strides):
        row, digit = divmod(row, size)
        offset += digit * stride
    return offset


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array as [groups][outer][channels][inner]; `last`: length of the last dimension, whose bits are packed."""

    groups: int
    outer: int
    channels: int
    inner: int
    last: int

    @classmethod
    def of(cls, full: Sequence[int], axes: Sequence[int], groups: int) -> "Shape":
        first, end = axes[0], axes[-1] + 1
        before, reduced = math.prod(full[:groups]), math.prod(full[groups:first])
        return cls(before, reduced, math.prod(full[first:end]), math.prod(full[end:]), full[-1])

    @property
    def reduced(self) -> int:
        return self.outer * self.inner

    @property
    def group_size(self) -> int:
        return self.outer * self.channels * self.inner

    @property
    def bits_columns(self) -> int:
        """Bytes of bits for one run along the last dimension."""
        return ceil_div(self.last, 8)


@dataclasses.dataclass(frozen=True)
class Lines:
    """How an array is cut: see batch_norm.cuh."""

    size: int
    cols: int
    inner: int
    channels: int
    period: int
    lines: int
    full: int
    tile: int
    tiles: int
    rows: int = 1

    @classmethod
    def of(cls, shape: Shape, most: int) -> "Lines":
        """With tiles of at most `most` columns, a multiple of 8."""
        size, cols = shape.group_size, shape.channels * shape.inner
        whole = cols * COLUMNS // math.gcd(cols, COLUMNS)
        period = whole * max(1, most // whole)
        tile = ceil_div(ceil_div(period, ceil_div(period, most)), COLUMNS) * COLUMNS
        return cls(
            size, cols, shape.inner, shape.channels, period, ceil_div(size, period), size // period, tile,
            ceil_div(period, tile),
        )  # fmt: skip

    @property
    def wide(self) -> bool:
        return self.period > INT_MAX

    @property
    def threads(self) -> int:
        return ceil_div(self.tile // COLUMNS * self.rows, 32) * 32

    @property
    def slots(self) -> int:
        """The most channels of a tile. The first channel may be there in part, and once more behind the last."""
        return min(self.channels, (self.tile - 1) // self.inner + 2)

    @property
    def structure(self) -> list:
        sizes = (
            self.size,
            self.cols,
            self.inner,
            self.channels,
            self.period,
            self.lines,
            self.full,
        )
        divisors = (self.cols, self.inner, self.tile)
        return [
            *(("l", n) for n in sizes),
            *(("i", n) for n in (self.tile, self.tiles, self.rows)),
            *(_NO_DIVISION if self.wide else fast_div(n) for n in divisors),
            ("b", self.wide),
        ]


@dataclasses.dataclass(frozen=True)
class Spans:
    """A launch: each block has a tile and `span` lines of a group, of which `spans` blocks share a tile."""

    span: int
    spans: int
    tiles: int
    aligned: bool

    @classmethod
    def of(
        cls, lines: Lines, groups: int, blocks_at_once: int, waves: int, batch: int, least: int, aligned: bool,
        most: int = INT_MAX,
    ) -> "Spans":  # fmt: skip
        """Cuts lines for blocks of a launch.

        Enough blocks share a tile for `waves` times the `blocks_at_once` blocks that run at the same time, at most
        `most`, and so many that the last of them do not leave much of the device idle. Each block has a multiple of the
        `batch` lines that each of its rows reads at once, and at least `least` times as many.
        """
        overhead = 3  # other work of a block, in batches of lines
        step = batch * lines.rows
        steps, tiles = max(1, ceil_div(lines.lines, step)), groups * lines.tiles
        first = min(max(waves * blocks_at_once // tiles, 1), max(1, min(most, steps // least)))
        best, best_time = 0, math.inf
        for share in range(first, min(most, steps, 2 * first + 2) + 1):
            span = ceil_div(steps, share)
            time = ceil_div(tiles * ceil_div(steps, span), blocks_at_once) * (span + overhead)
            if time < best_time:
                best, best_time = span, time
        span = min(best, INT_MAX // step) * step
        return cls(span, ceil_div(lines.lines, span), lines.tiles, aligned)

    @property
    def blocks(self) -> int:
        """Blocks of a group."""
        return self.spans * self.tiles

    @property
    def structure(self) -> list:
        divisions = fast_div(self.blocks), fast_div(self.tiles)
        return [("i", self.span), ("u", self.spans), *divisions, ("b", self.aligned)]


def array(pointer: Pointer, stride: int) -> list:
    """GroupArray."""
    return [pointer, ("l", stride)]


NO_ARRAY = array(Pointer(None), 0)


def bit_rows(columns: int) -> list:
    """Rows of bits.cuh."""
    most_near = 1 << 30
    near = columns if columns <= most_near else most_near + columns % 8
    return [fast_div(near), fast_div(ceil_div(near, 8)), ("l", columns), ("l", columns - near)]


def bits_view(shape: Shape, lines: Lines) -> list:
    """BitsView."""
    bytes_of = [("l", n // shape.last * shape.bits_columns) for n in (lines.period, lines.size)]
    return [bit_rows(shape.last), *bytes_of]


_MASK_DIMS = 8


def mask_view(
    shape: Shape, lines: Lines, full: Sequence[int], mask: Sequence[int], split: int, buffer: int, first_group: int
) -> list | None:  # fmt: skip
    """MaskView of a mask of this shape, whose rows are the dimensions before `split`; None where they are too many."""
    own = math.prod(mask[split:])
    strides = merged_strides(full[:split], mask[:split], own)
    if len(strides) > _MASK_DIMS:
        return None
    cols = shape.channels if shape.inner == 1 else shape.inner
    rows, line_rows = lines.size // cols, lines.period // cols
    wide = rows * shape.groups > INT_MAX
    missing = _MASK_DIMS - len(strides)
    sizes = [n for n, _ in strides] + [1] * missing
    return [
        Pointer(buffer),
        ("i", len(strides)),
        ("b", wide),
        *(_NO_DIVISION if wide else fast_div(n) for n in sizes),
        *(("l", n) for n in sizes),
        *(("l", n) for n in [s for _, s in strides] + [0] * missing),
        ("l", 0 if own == 1 else 1),
        *(("l", n) for n in (cols, rows, line_rows, first_group * rows)),
    ]


def no_mask() -> list:
    numbers = [("l", 0)] * (2 * _MASK_DIMS + 1)
    return [
        Pointer(None),
        ("i", 0),
        ("b", False),
        *[_NO_DIVISION] * _MASK_DIMS,
        *numbers,
        ("l", 1),
        *[("l", 0)] * 3,
    ]


def spread_bytes(device: Device, blocks: int) -> int:
    """Bytes of shared memory that are not used, for an early launch of `blocks` blocks.

    Blocks of an early launch find room where blocks of the launch before have ended. All of them would go to the
    multiprocessors that are done first, where their loads wait for each other. The unused bytes spread the blocks over
    all multiprocessors.
    """
    least, most = 2, 6  # blocks of a multiprocessor: with more there is little to spread
    reserved = 1024  # of each block, by the system
    blocks_at_once = max(ceil_div(blocks, device.multiprocessors), least)
    if not device.clusters or blocks_at_once > most:
        return 0
    return (device.shared_bytes + reserved) // blocks_at_once - reserved - STATIC_SHARED_BYTES
