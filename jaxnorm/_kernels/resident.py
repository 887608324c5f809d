"""How blocks of one wave hold whole arrays of a batch_norm call in shared memory (batch_norm_resident.cuh)."""

import dataclasses
import math

from jaxnorm import _launch
from jaxnorm._kernels.layout import (
    COLUMNS,
    INT_MAX,
    LINE_BYTES,
    STATIC_SHARED_BYTES,
    VECTOR_BYTES,
    Shape,
    ceil_div,
    fast_div,
)
from jaxnorm._launch import Pointer
from jaxnorm._rows.plan import Device

_WARP = 32
_THREADS = 512
_HEADER_BYTES = 128  # of shared memory, for barriers
_COPY_GROUPS = 7
_CHANNEL_POSTS = 5  # posts that a lane reads at once
_MOST_BLOCKS = _WARP * _CHANNEL_POSTS
_PLANE_NUMBERS = 4  # of a thread's 2 * COLUMNS sums
_PLANES = 2 * COLUMNS // _PLANE_NUMBERS
_SUMS_BYTES, _POST_BYTES, _FLOAT_BYTES = 8, 16, 4
_LEAST_COLUMNS = 1024  # columns of a tile: each copy takes time
_MOST_RELAYED = 128  # channels: for more of them this takes longer than two passes
_EXCHANGE = 1 << 15  # bytes that a block reads in the time that an exchange takes
_NUMBERS = {
    1: 5,
    2: 4,
}  # of each channel, by the number of arrays: kNumbers of batch_norm_train.cuh and _bwd.cuh


def alike(shape: Shape) -> bool:
    """Whether all columns of a thread are of one channel; otherwise they are of neighbouring channels."""
    return shape.inner % COLUMNS == 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """A cut of an array: see ResidentPlan in batch_norm_resident.cuh for what is not described here.

    Attributes:
      blocks: of the launch, which all run at once.
      threads: of a block.
      shared_bytes: of dynamic shared memory.
      posts: of 16 bytes, that blocks exchange.
      cost: bytes that a block reads in the time that the launch takes.
      numbers: ResidentPlan's members up to the arrays, behind them, and behind `last_elements`.
    """

    blocks: int
    threads: int
    shared_bytes: int
    posts: int
    totals: int
    cost: int
    before_copies: list
    later: list

    def structure(self, arrays: list[Pointer], scratch: int, inverse_count: float) -> list:
        """ResidentPlan."""
        copied = [*arrays, *[Pointer(None)] * (2 - len(arrays))]
        places = (0, self.totals, self.posts - 1)
        posts = [Pointer(scratch, _POST_BYTES * place) for place in places]
        return [
            *self.before_copies,
            *copied,
            *self.later,
            ("f", inverse_count),
            *posts,
            _launch.TAG,
        ]


def layout(
    shape: Shape, item_bytes: int, arrays: int, bits: bool, device: Device, scratch_bytes: int
) -> Layout | None:
    """The best cut whose blocks can hold `arrays` such arrays; None if there is none.

    Columns must be `alike`, or channels must be last. Bits take a byte for each 8 elements. Backward keeps all of these
    bytes beside the elements; forward keeps as many as fit where the entries of sums were.
    """
    cols, size = shape.channels * shape.inner, shape.group_size
    one = alike(shape)
    if not device.clusters or shape.groups != 1 or size == 0 or cols % COLUMNS:
        return None
    if not one and shape.inner != 1:
        return None
    shared_bytes = device.shared_bytes - STATIC_SHARED_BYTES
    blocks = min(device.multiprocessors, _MOST_BLOCKS)
    if size // COLUMNS * _cell_bytes(item_bytes, arrays, bits) > shared_bytes * blocks:
        return None
    best = None
    # Tiles: parts of a channel, or whole channels.
    for tiles in range(1, min(blocks, cols // COLUMNS) + 1):
        tile = cols // tiles
        if cols % tiles or tile % COLUMNS or (tiles > 1 and tile < _LEAST_COLUMNS):
            continue
        if tile % shape.inner and shape.inner % tile:
            continue
        for spans in (1, min(blocks // tiles, shape.outer)):
            found = _cut(shape, item_bytes, arrays, bits, shared_bytes, tile, spans)
            if (
                found
                and found.posts * _POST_BYTES <= scratch_bytes
                and (best is None or found.cost < best.cost)
            ):
                best = found
    return best


def _cell_bytes(item_bytes: int, arrays: int, bits: bool) -> int:
    """Bytes of 8 neighbouring elements of each array, and backward of their bits."""
    return arrays * COLUMNS * item_bytes + (bits and arrays == 2)


def _cut(
    shape: Shape, item_bytes: int, arrays: int, bits: bool, shared_bytes: int, tile: int, spans: int
) -> Layout | None:
    """Tiles of `tile` columns, and about `spans` spans of lines."""
    one, cols = alike(shape), shape.channels * shape.inner
    forward = arrays == 1
    forward_last = forward and not one  # forward, channels last
    row_threads = tile // COLUMNS
    # There, half as many threads have half as many sums to merge before the exchange: 1 % less time.
    most_threads = _THREADS // 2 if forward_last and spans > 1 else _THREADS
    if row_threads > most_threads or spans < 1 or (not one and tile & (tile - 1)):
        return None
    # Where lines are whole, the lines of each block begin with a cache line.
    whole_lines = tile == cols
    step = LINE_BYTES // math.gcd(cols * item_bytes, LINE_BYTES) if whole_lines and spans > 1 else 1
    span = ceil_div(ceil_div(shape.outer, step), spans) * step
    spans = ceil_div(shape.outer, span)
    parts = max(1, shape.inner // tile)
    sharers, slots = spans * parts, max(1, tile // shape.inner)
    rows = min(most_threads // row_threads, span)
    turns = ceil_div(span, rows)
    threads = ceil_div(rows * row_threads, _WARP) * _WARP
    if one:
        own_entries = min(tile, shape.inner) // COLUMNS
    else:
        own_entries = threads // _WARP if row_threads < _WARP else rows
    plane_line = _PLANE_NUMBERS * row_threads  # whole lines are added up
    fold = ceil_div(ceil_div(threads, _PLANES), plane_line) * plane_line

    entries = max(slots, threads if one else (slots + 1) * own_entries)
    if forward_last:
        entry_bytes = _PLANES * (_PLANE_NUMBERS * threads + fold) * _FLOAT_BYTES
    else:
        entry_bytes = ceil_div(entries * _SUMS_BYTES, VECTOR_BYTES) * VECTOR_BYTES
    number_bytes = ceil_div(slots, 4) * 4 * _NUMBERS[arrays] * _FLOAT_BYTES
    cell_bytes = span * tile * arrays * item_bytes + (
        turns * threads if bits and not forward else 0
    )
    room = shared_bytes // VECTOR_BYTES * VECTOR_BYTES - number_bytes - cell_bytes
    bit_bytes = ceil_div(turns * threads, VECTOR_BYTES) * VECTOR_BYTES if bits and forward else 0
    first_bytes = max(entry_bytes, min(bit_bytes, room))
    all_bytes = first_bytes + number_bytes + cell_bytes
    bit_word = (
        1 if (shape.group_size if whole_lines else math.gcd(tile, cols)) % (4 * COLUMNS) else 4
    )
    # The first group has one turn of 16. Forward with channels last, if a block has all lines, the group has all turns:
    # there is little to wait for, and sums of distances from the mean of all elements lose no bit.
    first_turns = turns if forward_last and sharers == 1 else ceil_div(turns, 16)
    group_turns = ceil_div(turns - first_turns, _COPY_GROUPS - 1)
    lane_bits = post_bits = 0
    lane_entries = (
        fold // plane_line // 4 if forward_last else own_entries
    )  # a lane takes four of the first
    while 1 << lane_bits < min(_WARP, lane_entries) and slots << (lane_bits + 1) <= threads:
        lane_bits += 1
    while _CHANNEL_POSTS << post_bits < sharers:
        post_bits += 1
    post_bytes = slots * sharers * _POST_BYTES
    relayed = post_bytes > _EXCHANGE
    if all_bytes > shared_bytes or 1 << post_bits > _WARP or (relayed and slots > _MOST_RELAYED):
        return None
    exchange = 0 if sharers == 1 else _EXCHANGE + (_EXCHANGE if relayed else post_bytes)
    columns = min(tile, shape.inner)  # of a channel

    def unsigned(*values):
        return [("u", n) for n in values]

    def groups(first, each):
        return [("h", first), ("h", each)]

    return Layout(
        blocks=cols // tile * spans,
        threads=threads,
        shared_bytes=_HEADER_BYTES + all_bytes,
        posts=shape.channels * (sharers + 1) + 1,
        totals=shape.channels * sharers,
        cost=turns * threads * _cell_bytes(item_bytes, arrays, bits) + exchange,
        before_copies=[
            *unsigned(cols, shape.outer, span, tile),
            _block_div(sharers),
            _block_div(parts),
            groups(first_turns * rows, group_turns * rows),
            *unsigned(_HEADER_BYTES + first_bytes + number_bytes),
        ],
        later=[
            *unsigned(_HEADER_BYTES + first_bytes, slots, rows),
            groups(first_turns, group_turns),
            *map(fast_div, (row_threads, rows, own_entries, fold)),
            *unsigned(first_bytes // (rows * row_threads) // 4 * 4, bit_word),  # whole words
            fast_div(INT_MAX if whole_lines else max(1, tile // COLUMNS // bit_word)),
            *unsigned(own_entries, lane_bits, post_bits),
            ("b", relayed),
            *unsigned(ceil_div(slots, sharers) if relayed else slots, (spans - 1) * parts),
            ("f", span * columns),
            ("f", (shape.outer - (spans - 1) * span) * columns),
        ],
    )


def _block_div(d: int) -> list:
    """BlockDiv."""
    return [("u", d), ("u", (1 << 18) // d + 1)]
