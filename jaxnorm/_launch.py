"""Calls of the FFI target `jaxnorm_launch`, which compiles CUDA text and launches kernels of it (ffi/launcher).

A call is data: the text, and for each launch the kernel, the grid, the block and the arguments. An argument is a
number of 64-bit words, as they lie in memory; a word is a number or stands for what only the execution knows.
"""

import dataclasses
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxnorm import _lib

TARGET = _lib.TARGET_PREFIX + "launch"
VERSION = 2  # of the attributes' layout, which exported programs hold


class Word(NamedTuple):
    """A word of an argument. `kind` is numbered as in ffi/launcher/plan.h."""

    kind: int
    value: int = 0
    offset: int = 0


def number(value: int) -> Word:
    return Word(0, value)


def pointer(buffer: int, offset: int = 0) -> Word:
    """The address of a buffer, `offset` bytes from its start. Buffers are the operands, then the results."""
    return Word(1, buffer, offset)


# A number that no other launch has, a multiple of 2^16. A launch that a CUDA graph repeats has the same each time.
TAG = Word(2)
# By the rule of RowTiles: all rows; how many blocks or clusters share the tiles of a group; groups of rows.
ROWS, CHUNKS, GROUPS = Word(3), Word(4), Word(5)


def row_dimension(i: int) -> Word:
    return Word(6, i)


Argument = tuple[Word, ...]
# Grids that depend on the number of rows: a block or cluster for each chunk of each group, or (blocks along x and z)
# with a block along y for each group, whose block has 32 threads along x and as many along y as there are chunks.
TILES = "tiles"
GROUPS_ALONG_Y = "groups along y"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
      kernel: its name in the text.
      grid: blocks along x, y and z.
      block: threads along x, y and z.
      arguments: of the kernel, in order.
      shared_bytes: of a block's dynamic shared memory.
      cluster: blocks of a cluster along x; 1 where there are no clusters.
      cooperative: all blocks run at once, or the launch fails. The blocks of a cluster may then be anywhere in the
        grid, and the GPU has no part in it.
      early: blocks may begin while the launch before still runs, for which they wait themselves.
      rule: TILES or GROUPS_ALONG_Y, where the rows decide what the grid is; else "".
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    cluster: int = 1
    cooperative: bool = False
    early: bool = False
    rule: str = ""


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How rows are dealt to the blocks of a launch with a rule. Their number is known when the call runs.

    Attributes:
      rows_per_tile: rows that a block (or cluster) takes at a time.
      blocks: 0 where each tile has a block (or cluster), otherwise how many there are at most.
      chunk_multiple: in how many classes the tiles of persistent blocks must stay apart.
      group_dims: how many leading row dimensions make groups whose tiles stay apart.
      sizes: for each row dimension (buffer, dimension, divisor), or (-1, size, 1).
    """

    rows_per_tile: int
    blocks: int
    chunk_multiple: int
    group_dims: int
    sizes: tuple[tuple[int, int, int], ...]


_RULES = ("", TILES, GROUPS_ALONG_Y)


def attributes(
    operation: str,
    source: str,
    launches: Sequence[Launch],
    buffer_bytes: Sequence[int] = (),
    row_tiles: RowTiles | None = None,
) -> dict:
    """The attributes of the FFI call.

    Args:
      operation: what error messages begin with.
      source: CUDA text, without includes.
      launches: in their order.
      buffer_bytes: the number of bytes of each buffer, which must begin on a multiple of 16; none where the kernels do
        not rely on that.
      row_tiles: where a launch has a rule.
    """
    kernels = list(dict.fromkeys(launch.kernel for launch in launches))
    encoded: list[int] = []
    for launch in launches:
        flags = launch.cooperative + 2 * launch.early
        encoded += [kernels.index(launch.kernel), _RULES.index(launch.rule)]
        encoded += [*launch.grid, *launch.block, launch.shared_bytes, launch.cluster, flags]
        encoded.append(len(launch.arguments))
        for argument in launch.arguments:
            encoded += [len(argument), *(x for word in argument for x in word)]
    tiles, sizes = (), ()
    if row_tiles:
        tiles = (
            row_tiles.rows_per_tile,
            row_tiles.blocks,
            row_tiles.chunk_multiple,
            row_tiles.group_dims,
        )
        sizes = tuple(x for size in row_tiles.sizes for x in size)
    return {
        "version": np.int64(VERSION),
        "operation": operation,
        "source": source,
        "kernels": " ".join(kernels),
        "launches": _integers(encoded),
        "buffer_bytes": _integers(buffer_bytes),
        "row_tiles": _integers(tiles),
        "sizes": _integers(sizes),
    }


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int64)


# ---- structures, as C++ lays them out ----

_FORMATS = {"i": "i", "u": "I", "h": "H", "l": "q", "f": "f", "d": "d", "b": "B"}


class Pointer(NamedTuple):
    """A member of a structure: the address of a buffer; None for a null pointer."""

    buffer: int | None
    offset: int = 0


def packed(*members) -> Argument:
    """The words of a structure.

    Args:
      *members: each ("i", number) for an int, "u" unsigned, "h" unsigned short, "l" long long, "f" float, "d" double,
        "b" bool; a Pointer; TAG; or a list of members, which is a structure of its own.
    """
    content, words = bytearray(), {}
    _append(content, words, list(members))
    content += bytes(-len(content) % 8)
    numbers = struct.unpack(f"<{len(content) // 8}q", bytes(content))
    return tuple(words.get(8 * i, Word(0, n)) for i, n in enumerate(numbers))


def size_of(*members) -> int:
    """The bytes of a structure."""
    content = bytearray()
    _append(content, {}, list(members))
    return len(content)


def _alignment(member) -> int:
    if isinstance(member, list):
        return max(map(_alignment, member))
    return 8 if isinstance(member, Pointer | Word) else struct.calcsize(_FORMATS[member[0]])


def _append(content: bytearray, words: dict[int, Word], members: list) -> None:
    alignment = _alignment(members)
    content += bytes(-len(content) % alignment)
    for member in members:
        content += bytes(-len(content) % _alignment(member))
        if isinstance(member, list):
            _append(content, words, member)
        elif isinstance(member, Pointer):
            if member.buffer is not None:
                words[len(content)] = pointer(member.buffer, member.offset)
            content += bytes(8)
        elif isinstance(member, Word):
            words[len(content)] = member
            content += bytes(8)
        else:
            kind, value = member
            content += struct.pack("<" + _FORMATS[kind], value)
    content += bytes(-len(content) % alignment)
