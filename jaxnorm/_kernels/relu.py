"""Plans of the relu calls: one launch each, with a block for each tile of the arrays (relu.cuh)."""

import math
from collections.abc import Sequence

import numpy as np

from jaxnorm._kernels.layout import INT_MAX, VECTOR_BYTES, bit_rows, ceil_div
from jaxnorm._kernels.plan import Plan
from jaxnorm._launch import Launch, Pointer, packed, size_of

_THREADS, _VECTORS = 256, 4  # of a block, and of a thread


def plan(operation: str, shape: Sequence[int], dtype, addends: int = 1) -> Plan | None:
    """The plan of a call, or None where the kernels do not take it: sizes that are not known, empty arrays.

    Args:
      operation: "fwd" (x, z if there are two addends -> y, mask) or "bwd" (mask, t -> the cotangent).
      shape: of elements. The mask has a bit for each, and rows of whole bytes.
      dtype: of elements.
      addends: of "fwd".
    """
    if not all(isinstance(n, int) for n in shape) or 0 in shape:
        return None
    dtype, size, columns = np.dtype(dtype), math.prod(shape), shape[-1]
    tile = _THREADS * _VECTORS * VECTOR_BYTES // dtype.itemsize
    blocks = ceil_div(size, tile)
    if blocks > INT_MAX:
        return None
    array_bytes, mask_bytes = size * dtype.itemsize, size // columns * ceil_div(columns, 8)
    if operation == "fwd":
        second = 1 if addends == 2 else None
        pointers = (0, second, addends, addends + 1)  # x, z, y, mask
        buffer_bytes = (*[array_bytes] * (addends + 1), mask_bytes)
        constants = (("RELU_ADD", int(addends == 2)),)
    else:
        pointers = (0, 1, 2)  # mask, t, the cotangent
        buffer_bytes = (mask_bytes, array_bytes, array_bytes)
        constants = ()
    # One row is flat too: its spare bits come after the last element.
    flat = columns % 8 == 0 or size == columns
    rows = bit_rows(columns)
    arguments = (*(packed(Pointer(p)) for p in pointers), packed(("l", size)), packed(*rows))
    name = f"relu_{operation}"
    return Plan(
        name,
        dtype.name,
        ("bits", "relu", name),
        (*constants, ("RELU_FLAT", int(flat))),
        (Launch(f"jaxnorm_{name}", (blocks, 1, 1), (_THREADS, 1, 1), arguments),),
        (("Rows", size_of(*rows)),),
        None,
        buffer_bytes,
    )
