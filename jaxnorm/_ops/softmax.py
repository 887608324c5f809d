"""softmax and log_softmax.

Notation: z = factor * scale * x + bias along one axis, y = softmax(z) or log_softmax(z). `factor` is a Python number,
`scale` and `bias` are arrays that broadcast to x, `where` says which elements take part. Two primitives:

  softmax_fwd   x, [where], [scale], [bias] -> y                          nonlinear
  softmax_bwd   y, t, [where] -> Jacobian at y applied to t               linear in t; also its own forward mode

Operands have x's rank; any of them may have size 1 where the result does not, which is how broadcasting, and vmap over
a subset of the operands, cost nothing.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching
from jax.typing import ArrayLike

from jaxnorm import _check
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.patterns import softmax as pattern
from jaxnorm._axes import merge_axes
from jaxnorm._ops.record import Operation, Sizes
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.avals import broadcast_aval, vary_alike
from jaxnorm._primitive.calls import broadcast_fits, row_fits
from jaxnorm._primitive.define import define_primitive
from jaxnorm._primitive.named import bits_of, by_name
from jaxnorm._primitive.partition import broadcast_partition, broadcast_sharding_rule
from jaxnorm._primitive.rules import (
    add,
    first_mapped,
    is_present,
    mapped_at,
    sum_to,
    total_tangents,
    zero,
)
from jaxnorm._rows.named import row_plan, row_program
from jaxnorm._sharding import Along

# Optional operands in the attribute `operands` (ffi/cpu/softmax_call.h).
_BITS = {"where": 1, "scale": 2, "bias": 4}

# Which linear map softmax_bwd applies (ditto). Softmax's Jacobian is symmetric, log_softmax's is not.
SOFTMAX, LOG_JVP, LOG_VJP = 0, 1, 2
_TRANSPOSED = {SOFTMAX: SOFTMAX, LOG_JVP: LOG_VJP, LOG_VJP: LOG_JVP}

Axis = int | tuple[int, ...] | None


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Softmax of `scale * x + bias` along `axis`, in one pass over memory.

    .. math:: y_i = \frac{\exp(z_i)}{\sum_j \exp(z_j)}, \qquad z = \mathrm{scale} \cdot x + \mathrm{bias}

    Replaces `jax.nn.softmax`. Maximum and sum are found together (Milakov and Gimelshein 2018, "Online normalizer
    calculation for softmax"), in float32 (float64 for float64); the result is rounded once. Backward saves y only.

    NaN, or +inf, in a row makes that row NaN and no other. A row of -inf only is NaN, as in `jax.nn.softmax`. Masked
    elements, and rows with no other ones, are 0; what x holds there is never looked at. Gradients at masked elements
    are exactly 0. Empty arrays give empty arrays.

    Args:
      x: array; float16, bfloat16, float32 or float64.
      axis: axis, tuple of axes, or None for all of them, also of a scalar.
      where: boolean array that broadcasts to x; which elements take part.
      scale: number, or array that broadcasts to x; differentiable. A Python number costs nothing and does not promote;
        NumPy's numbers are arrays.
      bias: array that broadcasts to x; differentiable. Broadcast operands are read in place, never materialised.
      implementation: None picks the kernel where there is one, else XLA; "kernel" insists; "xla" is the plain formula.

    Returns:
      Array of x's shape and of the dtype that `scale * x + bias` has.

    Raises:
      TypeError: a dtype is not supported, or `where` is not boolean.
      ValueError: an axis that x does not have, a shape that does not broadcast to x's, or "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> jaxnorm.softmax(jnp.array([0.0, 0.0, 5.0]), where=jnp.array([True, True, False]))
    Array([0.5, 0.5, 0. ], dtype=float32)
    """
    return _softmax("softmax", x, axis, where, scale, bias, implementation, log=False)


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Logarithm of the softmax of `scale * x + bias` along `axis`, in one pass over memory.

    .. math:: y_i = z_i - \max_j z_j - \log \sum_j \exp(z_j - \max_k z_k)

    with :math:`z = \mathrm{scale} \cdot x + \mathrm{bias}`.

    Replaces `jax.nn.log_softmax`. Backward saves y only. Masked elements are -inf, with gradient exactly 0; NaN, -inf,
    +inf and empty arrays behave as in `jaxnorm.softmax`.

    Args:
      x: array; float16, bfloat16, float32 or float64.
      axis: axis, tuple of axes, or None for all of them, also of a scalar.
      where: boolean array that broadcasts to x; which elements take part.
      scale: number, or array that broadcasts to x; differentiable.
      bias: array that broadcasts to x; differentiable.
      implementation: None picks the kernel where there is one, else XLA; "kernel" insists; "xla" is the plain formula.

    Returns:
      Array of x's shape and of the dtype that `scale * x + bias` has.

    Raises:
      TypeError: a dtype is not supported, or `where` is not boolean.
      ValueError: an axis that x does not have, a shape that does not broadcast to x's, or "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> jaxnorm.log_softmax(jnp.zeros(4)).round(4)
    Array([-1.3863, -1.3863, -1.3863, -1.3863], dtype=float32)
    """
    return _softmax("log_softmax", x, axis, where, scale, bias, implementation, log=True)


def _softmax(op, x, axis, where, scale, bias, implementation, log):
    _check.implementation(op, implementation)
    x = _check.float_array(op, "x", x)
    if x.ndim == 0 and axis not in (None, ()):
        raise ValueError(
            f"{op}: x must have at least one dimension, got a scalar. Use axis=None for a row of one element."
        )
    axes = _check.axes(op, axis, x.ndim)
    factor = 1.0
    # NumPy's float64 is a float, but promotes as an array does.
    if isinstance(scale, (int, float)) and not isinstance(scale, (bool, np.generic)):
        factor, scale = float(scale), None
    given = {"x": x}
    if where is not None:
        given["where"] = _check.bool_array(op, "where", where)
    if scale is not None:
        given["scale"] = _check.float_array(op, "scale", scale)
    if bias is not None:
        given["bias"] = _check.float_array(op, "bias", bias)
    for name, a in given.items():
        _check.broadcastable(op, name, a.shape, x.shape)

    # Kernels take one dtype. Under strict promotion a mixture is refused here, as in jax.numpy.
    dtype = jnp.result_type(*(a for name, a in given.items() if name != "where"))

    def operand(name, a):
        if name != "where" and a.dtype != dtype:
            a = a.astype(dtype)
        return jnp.expand_dims(a, range(x.ndim - a.ndim)) if a.ndim < x.ndim else a

    operands = [operand(name, a) for name, a in given.items()]
    if not axes:  # each element is a row of its own
        operands = [a[..., None] for a in operands]
    (y,) = softmax_fwd_p.bind(
        *vary_alike(*operands),
        names=tuple(given),
        axes=axes or (x.ndim,),
        factor=factor,
        log=log,
        implementation=implementation,
    )
    return y if axes else y[..., 0]


# ---- formulas ----


def _scores(given, factor, where):
    """What is largest where z is: z, or x with the sign of the factor if that is all there is; -inf where masked."""
    x = given["x"].astype(acc_dtype(given["x"].dtype))
    if "scale" not in given and "bias" not in given:
        scores = x if factor >= 0 else -x
    else:
        scores = x * factor
        if "scale" in given:
            scores = scores * given["scale"].astype(scores.dtype)
        if "bias" in given:
            scores = scores + given["bias"].astype(scores.dtype)
    return scores if where is None else jnp.where(where, scores, -jnp.inf)


def _shifted(scores, top, names, factor, where=None):
    """The distance of z from the maximum of its row, given the scores and their maximum; -inf where masked.

    Compilers contract a product and the difference behind it into one operation, which does not round the product. Of a
    large one, the distance from the maximum, which is rounded, would be large too. So what is multiplied by a number is
    the difference; of a product with an array, the distance is 0 where it is the maximum, and NaN if that is infinite.
    """
    if "bias" in names:
        return scores - top
    if "scale" in names:
        below = jnp.minimum(scores - top, np.zeros((), scores.dtype))
        return jnp.where(scores == top, top - top, below)
    shifted = (scores - top) * abs(factor)
    return shifted if where is None else jnp.where(where, shifted, -jnp.inf)


def _normalised(shifted, total, log, where, dtype):
    """The result, given the sum of exp(shifted) along the row."""
    y = shifted - jnp.log(total) if log else jnp.exp(shifted) / total
    if where is not None:
        y = jnp.where(where, y, -jnp.inf if log else 0)
    return y.astype(dtype)


def _fwd_reference(*operands, names, axes, factor, log, implementation=None):
    del implementation
    row, given = Along(axes), by_name(names, operands)
    where = given.get("where")
    scores = _scores(given, factor, where)
    shifted = _shifted(scores, row.max(scores), names, factor, where)
    total = row.sum(jnp.exp(shifted))
    return [_normalised(shifted, total, log, where, given["x"].dtype)]


def _fwd_on_part(*operands, names, axes, factor, log, blocks, implementation=None):
    """Forward on a device's part of each row, in two row programs.

    The first makes the maximum of the part and the sum of exponentials from it; the second, which has no reduction, the
    result from those of the whole row. A part with nothing but -inf has the lowest finite number for its maximum, from
    which -inf has a distance: its sum is 0. A row of such parts has the sum 0 and is NaN, as on one device.
    """
    del implementation
    padding = _padding(blocks, axes)

    def numbers(*operands):
        row, given = Along(axes), by_name((*names, *padding), operands)
        masks = [given[n] for n in ("where", "inside") if n in given]
        where = functools.reduce(jnp.logical_and, masks) if masks else None
        scores = _scores(given, factor, where)
        top = jnp.maximum(row.max(scores), jnp.finfo(scores.dtype).min)
        return [top, row.sum(jnp.exp(_shifted(scores, top, names, factor, where)))]

    def result(*operands):
        *operands, top, total = operands
        given = by_name(names, operands)
        where = given.get("where")
        shifted = _shifted(_scores(given, factor, where), top, names, factor, where)
        return [_normalised(shifted, total, log, where, given["x"].dtype)]

    top, total = row_program(numbers)(*operands, *padding.values())
    row_top = blocks.pmax(top, axes)
    # A sum of 0 stays 0 where its distance, from a maximum of nothing, is infinite and the factor 0.
    rescaled = jnp.where(total == 0, total, total * jnp.exp(_shifted(top, row_top, names, factor)))
    return row_program(result)(*operands, row_top, blocks.psum(rescaled, axes))


def _bwd_summand(y, t, form):
    """What backward sums along the row."""
    if form == SOFTMAX:
        return y * t
    return jnp.exp(y) * t if form == LOG_JVP else t


def _bwd_result(y, t, total, *where, factor, form):
    """Backward, given the sum of the summands along the row."""
    if form == SOFTMAX:
        out = y * (t - total)
    elif form == LOG_JVP:
        out = t - total
    else:
        out = t - jnp.exp(y) * total
    out = out * factor
    return jnp.where(where[0], out, 0) if where else out


def _bwd_reference(y, t, *where, axes, factor, form, implementation=None):
    del implementation
    dtype = y.dtype
    y, t = y.astype(acc_dtype(dtype)), t.astype(acc_dtype(dtype))
    if where:
        t = jnp.where(where[0], t, 0)
    total = Along(axes).sum(_bwd_summand(y, t, form))
    return [_bwd_result(y, t, total, *where, factor=factor, form=form).astype(dtype)]


def _bwd_on_part(y, t, *where, axes, factor, form, blocks, implementation=None):
    """Backward on a device's part of each row, in two row programs: the sum of the part, and the result."""
    del implementation
    dtype = y.dtype

    def part_sum(y, t, *masks):
        summand = _bwd_summand(y.astype(acc_dtype(dtype)), t.astype(acc_dtype(dtype)), form)
        for mask in masks:
            summand = jnp.where(mask, summand, 0)
        return [Along(axes).sum(summand)]

    def result(y, t, total, *where):
        y, t = y.astype(total.dtype), t.astype(total.dtype)
        return [_bwd_result(y, t, total, *where, factor=factor, form=form).astype(dtype)]

    padding = _padding(blocks, axes)
    (total,) = row_program(part_sum)(y, t, *where, *padding.values())
    return row_program(result)(y, t, blocks.psum(total, axes), *where)


def _padding(blocks, axes) -> dict:
    """The operand that says which elements of a device's part are no padding, if it has any."""
    inside = blocks.inside(axes)
    return {} if inside is None else {"inside": inside}


# ---- shapes and shardings, the same for both primitives ----


def _abstract(*avals, **_):
    return [broadcast_aval(*avals)]


def _describe(_, *, log=None, form=SOFTMAX, **__):
    return "log_softmax" if log or form != SOFTMAX else "softmax"


def _fits(*avals, axes, **_):
    """Whether the kernels take the shapes: rows of a usable length, simple broadcasts."""
    shape = jnp.broadcast_shapes(*(a.shape for a in avals))
    simple = all(broadcast_fits(a.shape, shape, axes) for a in avals)
    return simple and row_fits([shape[i] for i in axes])


def _of_one_axis(bind, *, axes, **params):
    """The same as a call of one axis, which is what kernels take; None if it is that."""
    if len(axes) == 1:
        return None

    def call(*operands):
        operands, axis, unmerge = merge_axes(operands, axes)
        return [unmerge(y) for y in bind(*operands, axes=(axis,), **params)]

    return call


def _local(on_part, blocks, _, *, axes, **params):
    # Rows are independent. Only a sharded axis needs more: all-reduces of numbers per row.
    return partial(on_part, **params, axes=axes, blocks=blocks) if blocks.cut(axes) else None


def _batch(primitive, args, dims, *, axes, **params):
    """Maps over axis `at` of the result; operands that are not mapped get size 1 there."""
    at = first_mapped(dims)
    if axes[0] < at <= axes[-1]:  # neighbours stay neighbours
        at = axes[0]
    axes = tuple(a + (at <= a) for a in axes)
    return primitive.bind(*mapped_at(at, args, dims), axes=axes, **params), [at]


# ---- softmax_fwd ----


softmax_fwd_p = define_primitive(
    "softmax_fwd",
    abstract=_abstract,
    reference=_fwd_reference,
    attributes=lambda *, names, axes, factor, log, implementation: {
        "axis": np.int64(axes[0]),
        "factor": np.float64(factor),
        "log": bool(log),
        "operands": bits_of(names, _BITS),
    },
    describe=_describe,
    fits=_fits,
    kernel_form=_of_one_axis,
    sharding_rule=broadcast_sharding_rule,
    partition=broadcast_partition(partial(_local, _fwd_on_part)),
    plan=row_plan(_fwd_reference),
)


def _fwd_jvp(primals, tangents, *, names, axes, factor, log, implementation):
    """Y' = J(y) z' with z' = factor * (scale * x' + scale' * x) + bias'.

    The residual is named here: a name that the user gives to softmax's result names another value, which a checkpoint
    policy could save without saving this one.
    """
    given, dots = by_name(names, primals), by_name(names, tangents)
    x, where, scale = given["x"], given.get("where"), given.get("scale")
    x_dot, scale_dot, bias_dot = dots["x"], dots.get("scale"), dots.get("bias")
    (y,) = softmax_fwd_p.bind(
        *primals, names=names, axes=axes, factor=factor, log=log, implementation=implementation
    )
    y = checkpoint_name(y, "jaxnorm_log_softmax" if log else "jaxnorm_softmax")

    terms: list = []
    if is_present(x_dot):
        terms.append(x_dot if scale is None else x_dot * scale)
    if is_present(scale_dot):
        # What x holds at masked elements may be NaN, which the cotangent's 0 there would not silence.
        terms.append(
            scale_dot * (x if where is None else jnp.where(where, x, jnp.zeros((), x.dtype)))
        )
    if is_present(bias_dot):
        if factor != 1.0:  # else the kernel multiplies by the factor
            terms = [t * np.asarray(factor, x.dtype) for t in terms]
            factor = 1.0
        terms.append(bias_dot)
    z_dot = add(*terms)
    if z_dot is None:
        return [y], [zero(y)]
    mask = [] if where is None else [where]
    y_dot = softmax_bwd_p.bind(
        *vary_alike(y, z_dot, *mask),
        axes=axes,
        factor=factor,
        form=LOG_JVP if log else SOFTMAX,
        implementation=implementation,
    )
    return [y], y_dot


ad.primitive_jvps[softmax_fwd_p] = _fwd_jvp
batching.primitive_batchers[softmax_fwd_p] = partial(_batch, softmax_fwd_p)

# ---- softmax_bwd ----

softmax_bwd_p = define_primitive(
    "softmax_bwd",
    abstract=_abstract,
    reference=_bwd_reference,
    attributes=lambda *, axes, factor, form, implementation: {
        "axis": np.int64(axes[0]),
        "factor": np.float64(factor),
        "form": np.int64(form),
    },
    describe=_describe,
    fits=_fits,
    kernel_form=_of_one_axis,
    sharding_rule=broadcast_sharding_rule,
    partition=broadcast_partition(partial(_local, _bwd_on_part)),
    plan=row_plan(_bwd_reference),
    # The result for t. On CPUs that saves neither time nor memory.
    in_place=lambda *, platform, **_: (1, 0) if platform == "cuda" else None,
)


def _bwd_jvp(primals, tangents, **params):
    """Linear in t, so that part is the kernel again; nonlinear in y, where the formula is differentiated."""
    y, t, *where = primals
    y_dot, t_dot, *_ = tangents
    out = softmax_bwd_p.bind(y, t, *where, **params)
    linear = nonlinear = None
    if is_present(t_dot):
        linear = softmax_bwd_p.bind(*vary_alike(y, t_dot, *where), **params)
    if is_present(y_dot):
        nonlinear = jax.jvp(lambda y: _bwd_reference(y, t, *where, **params), (y,), (y_dot,))[1]
    return out, total_tangents(out, linear, nonlinear)


def _bwd_transpose(cotangents, y, t, *where, form, **params):
    (ct,) = cotangents
    t_bar = None
    if is_present(ct):
        (t_bar,) = softmax_bwd_p.bind(*vary_alike(y, ct, *where), form=_TRANSPOSED[form], **params)
    return [None, sum_to(t_bar, t.aval), *(None for _ in where)]


ad.primitive_jvps[softmax_bwd_p] = _bwd_jvp
ad.primitive_transposes[softmax_bwd_p] = _bwd_transpose
batching.primitive_batchers[softmax_bwd_p] = partial(_batch, softmax_bwd_p)


# ---- the record ----


def _xla(function, x, axis=-1, where=None, *, scale=None, bias=None):
    if scale is not None:
        x = x * scale
    if bias is not None:
        x = x + bias
    return function(x, axis, where=where)


def _softmax_reference(dy, x, *, where, scale, tiny):
    z = np.where(where, x * scale, -np.inf)
    e = np.exp(z - z.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    products = np.abs(y * dy).sum(-1, keepdims=True)
    dx = scale * y * (dy - (y * dy).sum(-1, keepdims=True))
    # Backward starts from the y that was stored. It is off by half a unit in the last place, or by
    # what is below the smallest number that the dtype holds, and that error reaches every column
    # through the sum.
    size = scale * (y * (np.abs(dy) + products))
    floor = scale * tiny * (np.abs(dy) + products + y * np.abs(dy).sum(-1, keepdims=True))
    return (y, y, tiny), (dx, size, floor)


def _log_softmax_reference(dy, x, *, where, scale, tiny):
    z = np.where(where, x * scale, -np.inf)
    top = z.max(-1, keepdims=True)
    total = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    y, p = z - total, np.exp(z - total)
    dy = np.where(where, dy, 0)
    dx = scale * (dy - p * dy.sum(-1, keepdims=True))
    finite = np.where(where, y, 0)
    size = np.abs(np.where(where, z, 0)) + np.abs(total) + np.abs(finite)
    # exp(y) turns y's absolute error into a relative one.
    reach = p * (1 + np.abs(finite)) * np.abs(dy).sum(-1, keepdims=True)
    return (y, size, tiny), (dx, scale * (np.abs(dy) + reach), scale * tiny)


def _bytes(sizes: Sizes, direction: str) -> int:
    """Forward reads x and writes y; backward reads y and dy and writes dx.

    Forward reads `where` (one byte an element) and `bias` once at their own size. Backward does not need them, as y is
    0 where `where` is false.
    """
    arrays = {"forward": 2, "forward_train": 2, "backward": 3, "together": 4, "grad": 5}[direction]
    return arrays * sizes.array + (0 if direction == "backward" else sizes.operands)


_FILES = ("h200-softmax.json", "h200-log_softmax.json")
_CPU = ("cpu-ci.json",)
_RULES = (
    costs.Rule(
        lambda shape, axes, operands: costs.last(shape, axes)
        and not {"where", "bias"}.isdisjoint(operands),
        costs.ALWAYS,
        "with a mask or bias",
        (
            costs.Figures("H200", (1.61, 3.39), (1.66, 2.69), _FILES),
            costs.Figures("CPU", (1.94, 2.97), (2.07, 2.66), _CPU),
        ),
    ),
    costs.Rule(
        lambda shape, axes, operands: costs.short_rows(shape, axes, 16384),
        costs.DIFFERENTIATED,
        "XLA fuses it with its neighbours",  # h200-program.json has it within attention
        (
            costs.Figures("H200", (1.00, 1.33), (1.22, 1.57), _FILES),
            costs.Figures("CPU", (1.19, 6.95), (1.40, 4.37), _CPU),
        ),
    ),
    costs.Rule(
        costs.always,
        costs.ALWAYS,
        "long rows, or an axis that is not the last",
        (
            costs.Figures("H200", (1.83, 2.55), (1.45, 2.16), _FILES),
            costs.Figures("CPU", (1.38, 2.62), (1.53, 2.57), _CPU),
        ),
    ),
)

OPERATIONS = tuple(
    Operation(
        function=function,
        xla=functools.partial(_xla, xla),
        reference=reference,
        bytes=_bytes,
        find=pattern.candidates,
        rules=_RULES,
        mask="where",
    )
    for function, xla, reference in (
        (softmax, jax.nn.softmax, _softmax_reference),
        (log_softmax, jax.nn.log_softmax, _log_softmax_reference),
    )
)
