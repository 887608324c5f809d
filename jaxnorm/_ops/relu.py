"""relu and add_relu, which save one bit per element for their derivative.

Four primitives. The first two are what runs when nothing is differentiated: plain formulas, which XLA fuses with
their neighbours. Differentiation replaces them by the next one, whose mask is all that the derivative needs.

  relu, (add_relu is relu of a sum)     x -> y
  relu_fwd                              x, [z] -> y = max(x + z, 0), mask = packbits(x + z > 0)
  relu_bwd                              mask, t -> t where the bit is set, else 0    linear in t, its own transpose
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching
from jax.typing import ArrayLike

from jaxnorm import _bits, _check, _launch
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.patterns import relu as pattern
from jaxnorm._kernels import relu as kernels
from jaxnorm._ops.record import Operation, Sizes
from jaxnorm._primitive.avals import aval_like, vary_alike
from jaxnorm._primitive.calls import Call
from jaxnorm._primitive.define import define_formula, define_primitive
from jaxnorm._primitive.partition import Partition, sharding_factors
from jaxnorm._primitive.rules import NOT_MAPPED, add, is_present, mapped_at, zero
from jaxnorm._sharding import Blocks


def relu(x: ArrayLike, *, implementation: str | None = None) -> jax.Array:
    r"""Rectified linear unit, :math:`y = \max(x, 0)`; backward keeps one bit per element instead of x or y.

    Replaces `jax.nn.relu`. The derivative is 1 where x > 0 and 0 elsewhere, at 0 and at NaN too; it is selected, never
    multiplied, so an infinite cotangent at a negative x gives 0. NaN passes through forward. Without differentiation
    this is the plain formula, which XLA fuses with its neighbours. Empty arrays give empty arrays.

    Args:
      x: array of any shape; float16, bfloat16, float32 or float64.
      implementation: None picks the kernels where there are any, else XLA; "kernel" insists; "xla" is the formula.

    Returns:
      Array of x's shape and dtype, weakly typed if x is.

    Raises:
      TypeError: the dtype is not supported.
      ValueError: "kernel" where there is none.

    >>> import jax, jax.numpy as jnp, jaxnorm
    >>> x = jnp.array([-1.0, 0.0, 2.0])
    >>> jax.grad(lambda x: jaxnorm.relu(x).sum())(x)
    Array([0., 0., 1.], dtype=float32)
    """
    _check.implementation("relu", implementation)
    x = _check.float_array("relu", "x", x)
    return _relu(x, implementation=implementation)


def add_relu(x: ArrayLike, y: ArrayLike, *, implementation: str | None = None) -> jax.Array:
    r"""Rectified sum, :math:`\max(x + y, 0)`, one pass; backward keeps one bit per element and reads nothing else.

    The end of a residual block. x and y broadcast against each other and promote as in `x + y`; both cotangents are
    the same masked array. Derivative, NaN and empty arrays as in `jaxnorm.relu`.

    Args:
      x: array; float16, bfloat16, float32 or float64.
      y: array that x + y accepts. One pass needs x's shape and dtype; otherwise XLA forms the sum first.
      implementation: None picks the kernels where there are any, else XLA; "kernel" insists; "xla" is the formula.

    Returns:
      Array of the shape and type of x + y.

    Raises:
      TypeError: a dtype is not supported.
      ValueError: shapes that do not broadcast, or "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> jaxnorm.add_relu(jnp.array([1.0, -3.0]), jnp.array([1.0, 1.0]))
    Array([2., 0.], dtype=float32)
    """
    _check.implementation("add_relu", implementation)
    x = _check.float_array("add_relu", "x", x)
    y = _check.float_array("add_relu", "y", y)
    try:
        jnp.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise ValueError(
            f"add_relu: y must have a shape that broadcasts with x's {x.shape}, got {y.shape}. "
            "Insert axes with y[..., None] or reshape one of them."
        ) from None
    if x.shape != y.shape or x.dtype != y.dtype:
        return _relu(x + y, implementation=implementation)
    if jax.typeof(x).weak_type != jax.typeof(y).weak_type:
        # x + y converts the weakly typed one, whose cotangent is weakly typed again.
        x, y = (jax.lax.convert_element_type(a, a.dtype) for a in (x, y))
    return _relu(x, y, implementation=implementation)


def _relu(*addends, implementation):
    if addends[0].ndim == 0:  # the mask packs the last axis
        return _relu(*(a[None] for a in addends), implementation=implementation)[0]
    primitive = relu_fwd_p if implementation == "kernel" else relu_p
    return primitive.bind(*vary_alike(*addends), implementation=implementation)[0]


# ---- formulas ----


def _formula(x, z=None, *, implementation=None):
    del implementation
    return [jnp.maximum(x if z is None else x + z, jnp.zeros((), x.dtype))]


def _fwd_reference(x, z=None, *, implementation=None):
    del implementation
    (y,) = _formula(x, z)
    return [y, _bits.pack(y > 0)]


def _bwd_reference(mask, t, *, implementation=None):
    del implementation
    return [_bits.select(mask, t)]


# ---- shardings: every axis may be cut; the last one changes what a byte of the mask holds ----


def _local_fwd(blocks, x, z=None):
    (y,) = _formula(x, z)
    return [y, _bits.pack_block(blocks, y > 0)]


def _local_bwd(blocks, mask, t):
    return [_bits.select_block(blocks, mask, t)]


def _partition(local, x):
    """(tiles of x, tiles of the mask, what a device runs if it is not the primitive itself)."""
    blocks = Blocks(x.shape, x.tiles)
    return (
        x.tiles,
        _bits.tiles(blocks, x.shape),
        partial(local, blocks) if _bits.cuts_bytes(blocks) else None,
    )


# ---- GPUs ----


def _plan(operation, avals_in, _, /, *, implementation):
    """The CUDA call; None where the kernels do not take it. The last operand is x, its second addend, or t."""
    x = avals_in[-1]
    made = kernels.plan(operation.removeprefix("relu_"), x.shape, x.dtype, len(avals_in))
    return None if made is None else Call(_launch.TARGET, made.attributes)


# ---- weak types: a result is weakly typed where all operands are, as in jnp.add and jnp.where ----


def _result_aval(*operands):
    return aval_like(operands[0]).update(weak_type=all(a.weak_type for a in operands))


# ---- relu: nothing is differentiated ----

relu_p = define_formula(
    "relu",
    abstract=lambda *operands, implementation: [_result_aval(*operands)],
    formula=_formula,
)


def _relu_jvp(primals, tangents, **params):
    (y, _), (y_dot, _) = _fwd_jvp(primals, tangents, **params)
    return [y], [y_dot]


def _batch(primitive, args, dims, **params):
    """Maps over one dimension of all operands, never the last one."""
    at = dims[-1]
    if at is NOT_MAPPED or at == args[-1].ndim - 1:
        at = 0
    results = primitive.bind(*mapped_at(at, args, dims, [True] * len(args)), **params)
    return results, [at] * len(results)


ad.primitive_jvps[relu_p] = _relu_jvp
batching.primitive_batchers[relu_p] = partial(_batch, relu_p)

# ---- relu_fwd ----


def _fwd_abstract(*operands, implementation):
    return [_result_aval(*operands), _bits.aval(operands[0])]


def _fwd_rule(devices, operand_shapes, _, *, implementation):
    x, mask, sizes = _bits.factors(devices, operand_shapes[0])
    return sharding_factors([x for _ in operand_shapes], [x, mask], sizes)


def _fwd_partition(operands, _, *, implementation):
    x, mask, local = _partition(_local_fwd, operands[0])
    return Partition([x for _ in operands], [x, mask], local)


relu_fwd_p = define_primitive(
    "relu_fwd",
    abstract=_fwd_abstract,
    reference=_fwd_reference,
    attributes=lambda *, implementation: {},
    describe=lambda operands, *, implementation: "relu" if operands == 1 else "add_relu",
    sharding_rule=_fwd_rule,
    partition=_fwd_partition,
    plan=_plan,
)


def _fwd_jvp(primals, tangents, **params):
    y, mask = relu_fwd_p.bind(*primals, **params)
    mask = checkpoint_name(mask, "jaxnorm_relu_mask")
    t = add(*tangents)
    if t is None:
        return [y, mask], [zero(y), zero(mask)]
    (y_dot,) = relu_bwd_p.bind(*vary_alike(mask, t), **params)
    return [y, mask], [y_dot, zero(mask)]


ad.primitive_jvps[relu_fwd_p] = _fwd_jvp
batching.primitive_batchers[relu_fwd_p] = partial(_batch, relu_fwd_p)

# ---- relu_bwd ----


def _bwd_rule(devices, operand_shapes, _, *, implementation):
    x, mask, sizes = _bits.factors(devices, operand_shapes[1])
    return sharding_factors([mask, x], [x], sizes)


def _bwd_partition(operands, _, *, implementation):
    x, mask, local = _partition(_local_bwd, operands[1])
    return Partition([mask, x], [x], local)


relu_bwd_p = define_primitive(
    "relu_bwd",
    abstract=lambda mask, t, *, implementation: [_result_aval(t)],
    reference=_bwd_reference,
    attributes=lambda *, implementation: {},
    describe=lambda operands, *, implementation: "relu",
    sharding_rule=_bwd_rule,
    partition=_bwd_partition,
    plan=_plan,
)


def _bwd_jvp(primals, tangents, *, implementation):
    mask, t = primals
    out = relu_bwd_p.bind(mask, t, implementation=implementation)
    if not is_present(tangents[1]):
        return out, [zero(out[0])]
    return out, relu_bwd_p.bind(*vary_alike(mask, tangents[1]), implementation=implementation)


def _bwd_transpose(cotangents, mask, t, *, implementation):
    (ct,) = cotangents
    if not is_present(ct):
        return [None, ad.Zero(t.aval)]
    return [None, *relu_bwd_p.bind(*vary_alike(mask, ct), implementation=implementation)]


ad.primitive_jvps[relu_bwd_p] = _bwd_jvp
ad.primitive_transposes[relu_bwd_p] = _bwd_transpose
batching.primitive_batchers[relu_bwd_p] = partial(_batch, relu_bwd_p)


# ---- the record ----


def _reference(dy, *addends, tiny, **_):
    total = sum(addends)
    # Only the sum rounds; the rest is selection.
    size = np.abs(total) if len(addends) > 1 else 0 * total
    return (np.maximum(total, 0), size, tiny), (np.where(total > 0, dy, 0), 0 * total, 0)


def _bytes(sizes: Sizes, direction: str) -> int:
    """Forward reads the operands and writes y; training also writes one bit for each element.

    Backward reads the bits and dy, and writes dx. Both gradients of add_relu are one array.
    """
    forward = (sizes.arrays + 1) * sizes.array
    backward = 2 * sizes.array + sizes.bits
    return {
        "forward": forward,
        "forward_train": forward + sizes.bits,
        "backward": backward,
        "together": (sizes.arrays + 3) * sizes.array,
        "grad": forward + sizes.bits + backward,
    }[direction]


_RULES = (
    costs.Rule(
        costs.always,
        costs.ALWAYS,
        "keeps one bit per element; XLA's own code where it is not differentiated",
        (
            costs.Figures(
                "H200", (1.00, 1.00), (1.39, 1.95), ("h200-relu.json", "h200-add_relu.json")
            ),
            costs.Figures("CPU", (0.96, 1.15), (1.37, 2.75), ("cpu-ci.json",)),
        ),
    ),
)


def _xla_add_relu(x, y):
    return jax.nn.relu(x + y)


OPERATIONS = tuple(
    Operation(
        function=function,
        xla=xla,
        reference=_reference,
        bytes=_bytes,
        find=pattern.candidates,
        rules=_RULES,
        arrays=arrays,
    )
    for function, xla, arrays in ((relu, jax.nn.relu, 1), (add_relu, _xla_add_relu, 2))
)
