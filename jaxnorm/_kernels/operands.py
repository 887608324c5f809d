"""Operands and results of a batch_norm call, as its kernels see them (batch_norm.cuh)."""

import dataclasses
import math

import numpy as np

from jaxnorm._kernels.layout import (
    NO_ARRAY,
    VECTOR_BYTES,
    Shape,
    array,
    merged_strides,
    offset_of,
)
from jaxnorm._launch import Pointer

# The members of GroupArrays, in their order.
ARRAYS = (
    *(
        "x",
        "dy",
        "y",
        "bits",
        "mean",
        "var",
        "count",
        "scale",
        "bias",
        "residual",
        "dbias",
        "dscale",
    ),
    *("dmean", "dvar", "dx", "dresidual"),
)
_ELEMENTS = ("x", "dy", "y", "residual", "dx", "dresidual")
NO_BITS, FLAT_BITS, RAGGED_BITS = range(3)
MAX_ROUNDS = 16  # groups that lie unevenly in several arrays take a launch each


@dataclasses.dataclass(frozen=True)
class Call:
    """A call's operands and results.

    Attributes:
      dtype: of elements.
      shapes: of operands, then of results, by name.
      full: the shape that operands broadcast to.
      shape: `full` as kernels see it.
      split: the first dimension of the mask's columns.
      groups: leading dimensions that vmap mapped.
      epsilon: is added to the variance.
      replicas: devices that hold as many elements each.
      relu: whether the call has a ReLU.
    """

    dtype: np.dtype
    shapes: dict[str, tuple[int, ...]]
    full: tuple[int, ...]
    shape: Shape
    split: int
    groups: int
    epsilon: float
    replicas: int
    relu: bool

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def without(self, *names: str) -> "Call":
        """The call without these operands and results. Buffers keep their numbers."""
        shapes = {n: s for n, s in self.shapes.items() if n not in names}
        return dataclasses.replace(self, shapes=shapes)

    @property
    def acc(self) -> str:
        """The format of a number in the dtype of the arithmetic."""
        return "d" if self.dtype.itemsize == 8 else "f"

    @property
    def acc_bytes(self) -> int:
        return 8 if self.acc == "d" else 4

    @property
    def threads(self) -> int:
        """The most threads of a block."""
        return 128 if self.dtype.itemsize == 8 else 256

    def batch(self, arrays: int) -> int:
        """Lines that a thread reads of each of `arrays` arrays before it uses the first."""
        return max(2, 8 // self.dtype.itemsize // arrays)

    @property
    def bits(self) -> int:
        """How kernels take the bits. With a mask or float64, flat bits count as ragged, to have fewer instances."""
        if "bits" not in self:
            return NO_BITS
        # Rows of whole bytes, or one row, whose spare bits come after the last element.
        flat = self.shape.last % 8 == 0 or self.shape.group_size == self.shape.last
        return FLAT_BITS if flat and "mask" not in self and self.dtype.itemsize < 8 else RAGGED_BITS

    def item_bytes(self, name: str) -> int:
        if name in ("bits", "mask"):
            return 1
        return self.dtype.itemsize if name in _ELEMENTS else self.acc_bytes


@dataclasses.dataclass(frozen=True)
class Round:
    """Groups that one launch takes: as many as lie evenly in every array.

    Attributes:
      first: the number of the first group.
      groups: how many there are.
      places: name -> (offset of the first group in bytes, elements from one group to the next).
      buffers: name -> number.
      call: the call that has these groups.
    """

    first: int
    groups: int
    places: dict[str, tuple[int, int]]
    buffers: dict[str, int]
    call: Call

    def array(self, name: str) -> list:
        """GroupArray."""
        if name not in self.places:
            return NO_ARRAY
        offset, stride = self.places[name]
        return array(Pointer(self.buffers[name], offset), stride)

    @property
    def arrays(self) -> list:
        """GroupArrays."""
        return [self.array(name) for name in ARRAYS]

    def aligned(self, *names: str) -> bool:
        """Whether these arrays begin on 16 bytes for every group."""
        size = self.call.dtype.itemsize
        places = [self.places[n] for n in names if n in self.places]
        return all(o % VECTOR_BYTES == 0 and s * size % VECTOR_BYTES == 0 for o, s in places)


def rounds(call: Call, buffers: dict[str, int]) -> list[Round]:
    """All groups: in one round, unless several vmaps mapped different operands."""
    outer = call.full[: call.groups]
    views = {}
    for name in ARRAYS:
        if name in call:
            dims = call.shapes[name]
            views[name] = merged_strides(outer, dims[: call.groups], math.prod(dims[call.groups :]))
    # The innermost sizes are products of trailing dimensions, so the smallest divides the others.
    groups = call.shape.groups
    groups_at_once = min([groups, *(view[-1][0] for view in views.values() if view)])
    found = []
    for first in range(0, groups, groups_at_once):
        places = {
            name: (offset_of(first, view) * call.item_bytes(name), view[-1][1] if view else 0)
            for name, view in views.items()
        }
        found.append(Round(first, groups_at_once, places, buffers, call))
        if len(found) > MAX_ROUNDS:
            break
    return found
