"""FFI calls: which ones kernels take, results in place of operands."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxnorm import _launch

# Dimensions of unlike broadcasting that an operand may have (ffi/cpu/call.h: kMaxBroadcastDims).
_MAX_BROADCAST_DIMS = 8

_MAX_COLUMNS = 2**30

# ---- what the kernels take ----


def row_fits(sizes: Sequence[int]) -> bool:
    """Whether rows of these dimensions have a length that kernels take, as far as it is known.

    Rows of one element are elementwise arithmetic, which XLA fuses with its neighbours. Positions within a row are
    32-bit numbers.
    """
    return not all(isinstance(n, int) for n in sizes) or 1 < math.prod(sizes) < _MAX_COLUMNS


def broadcast_fits(operand, full, axes) -> bool:
    """Whether an operand's broadcast pattern has few enough runs of alike dimensions (kMaxBroadcastDims in call.h).

    `axes` are those of a row, which do not count.
    """
    dims = [
        n == m
        for i, (n, m) in enumerate(zip(operand, full, strict=True))
        if i not in axes and m != 1
    ]
    return 1 + sum(a != b for a, b in itertools.pairwise(dims)) < _MAX_BROADCAST_DIMS


# ---- one call ----


@dataclasses.dataclass(frozen=True)
class Call:
    """The FFI call that a primitive's call becomes.

    Attributes:
      target: name of the FFI target, with the prefix.
      attributes: of the FFI call.
      scratch: shapes of float32 results behind the primitive's own.
      skipped: positions of operands that the FFI call does not take.
    """

    target: str
    attributes: dict[str, Any]
    scratch: Sequence[tuple[int, ...]] = ()
    skipped: tuple[int, ...] = ()


def lower_call(ctx, operands, call: Call, aliases: dict[int, int] | None = None):
    """Results of an FFI call, without its scratch.

    Args:
      ctx: of the lowering rule.
      operands: of the primitive.
      call: the FFI call.
      aliases: positions of operands whose memory results take, and of these results.
    """
    taken = [i for i in range(len(operands)) if i not in call.skipped]
    results = len(ctx.avals_out)
    scratch = [ShapedArray(shape, np.float32) for shape in call.scratch]
    ctx = ctx.replace(
        avals_in=[ctx.avals_in[i] for i in taken], avals_out=[*ctx.avals_out, *scratch]
    )
    given = [operands[i] for i in taken]
    if call.target == _launch.TARGET:
        given = apart(given)
    lower = jax.ffi.ffi_lowering(call.target, operand_output_aliases=aliases or {})
    return lower(ctx, *given, **call.attributes)[:results]


def apart(values) -> list:
    """The same arrays, which XLA may not let a call read or write as slices of others, where they lie in those.

    Kernels need addresses that are multiples of 16 bytes, which XLA does not promise of slices.
    """
    return list(stablehlo.OptimizationBarrierOp(values).results) if values else []


def results_apart(values, avals) -> list:
    """`apart` of those results that would not lie on multiples of 16 bytes, were they rows of a larger array."""
    unlike = [i for i, aval in enumerate(avals) if not _whole_units(aval)]
    found = dict(zip(unlike, apart([values[i] for i in unlike]), strict=True))
    return [found.get(i, value) for i, value in enumerate(values)]


def _whole_units(aval) -> bool:
    last = aval.shape[-1] if aval.shape else 1
    return isinstance(last, int) and last * aval.dtype.itemsize % 16 == 0


def origin(value):
    """What `apart` was given for a value."""
    owner = value.owner  # an argument belongs to a block, which has no name
    while getattr(owner, "name", "") == "stablehlo.optimization_barrier":
        value = owner.operands[ir.OpResult(value).result_number]
        owner = value.owner
    return value


_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")


def _dies_here(value) -> bool:
    """Whether nothing but this call will read an operand, as far as a lowering rule can know.

    XLA takes an operand's memory for a result only where it is told to, and copies what is read again. What is lowered
    later is not known here. But the cotangent that a product's transpose makes is the product's own: it goes to the
    operation whose result was multiplied, and nowhere else. (That of a sum is one array for all its terms.)
    """
    name = getattr(value.owner, "name", "")  # an argument belongs to a block, which has none
    return name in _PRODUCTS and not list(value.uses)


def aliases_of(ctx, operands, positions: tuple[int, int] | None) -> dict[int, int]:
    """The `aliases` of `lower_call`, where a result may take an operand's memory.

    Args:
      ctx: of the lowering rule.
      operands: of the primitive.
      positions: of the operand and of the result; None where there are none such.
    """
    if positions is None:
        return {}
    operand, result = positions
    before, after = ctx.avals_in[operand], ctx.avals_out[result]
    alike = (before.shape, before.dtype) == (after.shape, after.dtype)
    return {operand: result} if alike and _dies_here(operands[operand]) else {}
