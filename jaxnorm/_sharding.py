"""How the devices of a program cut arrays into blocks, and reductions over what they cut.

XLA cuts a dimension of n elements for k devices into blocks of ceil(n / k). Where k does not divide n, the blocks at
the end hold padding: elements that the array does not have, of any value. Results may hold anything in their padding,
and a sum over a dimension must not count it. `Along` is how formulas reduce, and `Blocks.filled` prepares operands of
kernels that reduce, so that padding never counts.

A device is known by its position in the program. All devices are one mapped axis, `DEVICES`, and collectives name
groups of it: XLA may cut an array in ways for which the user's mesh has no axis.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

DEVICES = "devices"


@dataclasses.dataclass(frozen=True, eq=False)
class Tiled:
    """An array of a program and how it is cut.

    Attributes:
      shape: of the whole array.
      tiles: the devices' positions, with a dimension for each of the array's and a last one. Its size in dimension i is
        the number of blocks there; devices along the last dimension hold the same block.
    """

    shape: tuple[int, ...]
    tiles: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks(Tiled):
    """The blocks of the array that all operands of a call broadcast to."""

    @classmethod
    def joint(cls, shape: tuple[int, ...], arrays: Sequence[Tiled]) -> "Blocks":
        """Cuts `shape` as the first of `arrays` that has it, or else each dimension as the first array that cuts it."""
        whole = [a for a in arrays if a.shape == shape]
        # One row for each device: the number of its block in each dimension.
        places = np.zeros((arrays[0].tiles.size, len(shape)), int)
        for array in whole[:1] or arrays:
            for i, n in enumerate(shape):
                if array.shape[i] == n and not places[:, i].any():
                    candidate = places.copy()
                    candidate[array.tiles.ravel(), i] = np.indices(array.tiles.shape)[i].ravel()
                    places = candidate if _is_grid(candidate) else places
        by_block = np.lexsort(places.T[::-1]) if len(shape) else np.arange(len(places))
        return cls(shape, by_block.reshape(*(places.max(0) + 1), -1))

    def count(self, dim: int) -> int:
        """Number of blocks along a dimension."""
        return self.tiles.shape[dim]

    def size(self, dim: int) -> int:
        """Number of elements of a block along a dimension, padding included."""
        return -(-self.shape[dim] // self.count(dim))

    def cut(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Those of the dimensions that have several blocks."""
        return tuple(i for i in dims if self.count(i) > 1)

    def uneven(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Those of the dimensions whose blocks have padding."""
        return tuple(i for i in dims if self.size(i) * self.count(i) != self.shape[i])

    def tiles_of(self, shape: Sequence[int]) -> np.ndarray:
        """The tiles of an array that broadcasts to the whole: cut where it has all elements."""
        return self.tiles_along([i for i, n in enumerate(shape) if n == self.shape[i]])

    def tiles_along(self, dims: Sequence[int]) -> np.ndarray:
        """The tiles of an array of which `dims` alone are cut."""
        rank = len(self.shape)
        others = [i for i in range(rank) if i not in dims]
        moved = np.moveaxis(self.tiles, others, range(rank - len(others), rank))
        counts = [self.count(i) if i in dims else 1 for i in range(rank)]
        return moved.reshape(*counts, -1)

    # ---- collectives, of the devices whose blocks differ along `dims` alone ----

    def _groups(self, dims: Sequence[int]) -> np.ndarray:
        """A row for each group of devices, in the order of their blocks."""
        rank = len(self.shape)
        moved = np.moveaxis(self.tiles, dims, range(rank + 1 - len(dims), rank + 1))
        return moved.reshape(-1, math.prod(self.count(i) for i in dims))

    def _reduce(self, collective, value, dims):
        groups = self._groups(dims)
        if groups.shape[1] == 1:
            return value
        everyone = len(groups) == 1
        return collective(value, DEVICES, axis_index_groups=None if everyone else groups.tolist())

    def psum(self, value, dims: Sequence[int]):
        return self._reduce(jax.lax.psum, value, dims)

    def pmax(self, value, dims: Sequence[int]):
        return self._reduce(jax.lax.pmax, value, dims)

    def position(self, dims: Sequence[int]) -> jax.Array:
        """Of this device in its group."""
        places = np.zeros(self.tiles.size, np.int32)
        for group in self._groups(dims):
            places[group] = np.arange(len(group))
        return jnp.asarray(places)[jax.lax.axis_index(DEVICES)]

    # ---- padding ----

    def start(self, dim: int) -> jax.Array:
        """Index in the whole array of the first element of this device's block."""
        return self.position((dim,)) * np.int32(self.size(dim))

    def inside(self, dims: Sequence[int]):
        """Which elements of this device's block are no padding along `dims`; None if all are.

        The array has size 1 in dimensions without padding.
        """
        mask = None
        for i in self.uneven(dims):
            sizes = [self.size(i) if j == i else 1 for j in range(len(self.shape))]
            index = self.start(i) + jax.lax.broadcasted_iota(jnp.int32, sizes, i)
            here = index < np.int32(self.shape[i])
            mask = here if mask is None else mask & here
        return mask

    def filled(self, block, shape: Sequence[int], dims: Sequence[int]):
        """The block of an array of this shape, which broadcasts to the whole, with 0 for padding along `dims`."""
        inside = self.inside([i for i in dims if shape[i] == self.shape[i]])
        return block if inside is None else jnp.where(inside, block, jnp.zeros((), block.dtype))


def _is_grid(places) -> bool:
    """Whether the devices hold all combinations of blocks, each equally often."""
    found, times = np.unique(places, axis=0, return_counts=True)
    return len(found) == math.prod(places.max(0) + 1) and len(set(times)) == 1


@dataclasses.dataclass(frozen=True, eq=False)
class Along:
    """Reductions of arrays along dimensions, which become 1, over the devices that cut them.

    Attributes:
      dims: the dimensions.
      blocks: how devices cut the array; None where one has it whole.
    """

    dims: tuple[int, ...]
    blocks: Blocks | None = None

    def max(self, value):
        """The maximum, -inf of nothing."""
        kept = self._kept(value, -np.inf)
        top = jnp.max(kept, self.dims, keepdims=True, initial=-np.inf)
        return self.blocks.pmax(top, self.dims) if self.blocks else top

    def sums(self, *values) -> list:
        """Sums of several arrays of one dtype, which broadcast to each other, by one all-reduce."""
        shape = jnp.broadcast_shapes(*(v.shape for v in values))
        sums = [
            jnp.sum(self._kept(jnp.broadcast_to(v, shape)), self.dims, keepdims=True)
            for v in values
        ]
        if self.blocks is None or not self.blocks.cut(self.dims):
            return sums
        return list(self.blocks.psum(jnp.stack(sums), self.dims))

    def sum(self, value):
        return self.sums(value)[0]

    def means(self, *values) -> list:
        """Means of several arrays that have all elements along the dimensions, by one all-reduce."""
        if self.blocks is None:
            return [jnp.mean(v, self.dims, keepdims=True) for v in values]
        return [s / np.asarray(self.size(s), s.dtype) for s in self.sums(*values)]

    def size(self, value):
        """Number of elements along the dimensions, of an array that has all of them; it may be a symbol."""
        shape = value.shape if self.blocks is None else self.blocks.shape
        return math.prod(shape[i] for i in self.dims)

    def _kept(self, value, padding=0.0):
        inside = self.blocks.inside(self.dims) if self.blocks else None
        return (
            value if inside is None else jnp.where(inside, value, np.asarray(padding, value.dtype))
        )
