"""layer_norm and rms_norm. What they bind, and all of its rules, is in norm_primitives.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxnorm import _check
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.patterns import norm as pattern
from jaxnorm._ops.norm_primitives import bind, fwd_results, norm_fwd_p
from jaxnorm._ops.record import EPSILON, Operation, Sizes, parameter_dtype
from jaxnorm._primitive.arithmetic import acc_dtype

Axis = int | tuple[int, ...] | None


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    residual: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    implementation: str | None = None,
) -> Any:
    r"""Layer normalisation of x, or of `x + residual`, over `axis`, in one pass over memory.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \mathrm{scale} + \mathrm{bias}

    with the mean and the (biased) variance over `axis` (Ba, Kiros and Hinton 2016, "Layer normalization"). Replaces
    `flax.linen.LayerNorm` and `flax.nnx.LayerNorm` without their parameters. Statistics and all arithmetic are float32
    (float64 for float64), the variance is the mean squared deviation from the mean, never negative; the result is
    rounded once. Backward saves x (or the sum) and two numbers per row, and computes all gradients in one pass.

    NaN or an infinity in a row makes that row NaN and no other; so does a mask that keeps nothing. Empty arrays give
    empty arrays. Axes that are not the last ones are normalised by the plain formula, without a kernel.

    Args:
      x: array; float16, bfloat16, float32 or float64.
      scale: array of the shape of x's normalised axes, of any of these dtypes; differentiable. None is 1.
      bias: the same; None is 0.
      axis: axis, tuple of axes, or None for all of them.
      epsilon: added to the variance.
      residual: array of x's shape and dtype, which is added first. The sum is rounded to that dtype, then normalised.
      mask: boolean array that broadcasts to x; which elements the statistics count. All are normalised.
      implementation: None picks the kernel where there is one, and XLA elsewhere; "kernel" insists; "xla" is the plain
        formula.

    Returns:
      Array of x's shape and dtype (parameters do not promote it: cast x for a float32 result); with `residual`, the
      pair of it and `x + residual`.

    Raises:
      TypeError: a dtype is not supported, residual's is not x's, or `mask` is not boolean.
      ValueError: an axis that x does not have, a shape that does not fit x's, or "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> jaxnorm.layer_norm(jnp.array([1.0, 3.0]), scale=jnp.array([2.0, 4.0]), epsilon=0.0)
    Array([-2.,  4.], dtype=float32)
    """
    return _norm(
        "layer_norm", x, scale, bias, axis, epsilon, 0.0, residual, mask, implementation, True
    )


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    implementation: str | None = None,
) -> Any:
    r"""Root mean square normalisation of x, or of `x + residual`, over `axis`, in one pass over memory.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot (\mathrm{scale} + \mathrm{scale\_offset})

    from Zhang and Sennrich 2019, "Root mean square layer normalization". Replaces `flax.linen.RMSNorm` and
    `flax.nnx.RMSNorm` without their parameters; `scale_offset=1` is the form that stores the scale's distance from 1,
    as Gemma does. Backward saves x (or the sum) and one number per row. Arithmetic, NaN, masks and empty arrays as in
    `jaxnorm.layer_norm`.

    Args:
      x: array; float16, bfloat16, float32 or float64.
      scale: array of the shape of x's normalised axes, of any of these dtypes; differentiable. None is 1, whatever
        `scale_offset` is.
      axis: axis, tuple of axes, or None for all of them.
      epsilon: added to the mean square.
      scale_offset: number that is added to scale, in the precision of the arithmetic.
      residual: array of x's shape and dtype, which is added first. The sum is rounded to that dtype, then normalised.
      mask: boolean array that broadcasts to x; which elements the mean square counts. All are normalised.
      implementation: None picks the kernel where there is one, and XLA elsewhere; "kernel" insists; "xla" is the plain
        formula.

    Returns:
      Array of x's shape and dtype (parameters do not promote it: cast x for a float32 result); with `residual`, the
      pair of it and `x + residual`.

    Raises:
      TypeError: a dtype is not supported, residual's is not x's, or `mask` is not boolean.
      ValueError: an axis that x does not have, a shape that does not fit x's, or "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> jaxnorm.rms_norm(jnp.array([2.0, -2.0]), scale=jnp.array([0.0, 1.0]), scale_offset=1.0, epsilon=0.0)
    Array([ 1., -2.], dtype=float32)
    """
    return _norm(
        "rms_norm",
        x,
        scale,
        None,
        axis,
        epsilon,
        scale_offset,
        residual,
        mask,
        implementation,
        False,
    )


def _norm(op, x, scale, bias, axis, epsilon, scale_offset, residual, mask, implementation, center):
    _check.implementation(op, implementation)
    x = _check.float_array(op, "x", x)
    if x.ndim == 0:
        raise ValueError(
            f"{op}: x must have at least one dimension, got a scalar. Use x[None] for one row of one element."
        )
    axes = _check.axes(op, axis, x.ndim)
    if not axes:
        raise ValueError(
            f"{op}: axis must name at least one axis, got {axis!r}. Pass axis=-1 for the last axis."
        )
    epsilon = _check.number(op, "epsilon", epsilon)
    scale_offset = _check.number(op, "scale_offset", scale_offset)
    given = {"x": x}
    if residual is not None:
        given["residual"] = _check.alike(op, "residual", residual, x)
    if mask is not None:
        mask = _check.bool_array(op, "mask", mask)
        _check.broadcastable(op, "mask", mask.shape, x.shape)
        given["mask"] = jnp.expand_dims(mask, range(x.ndim - mask.ndim))
    parameters = {
        name: _check.float_array(op, name, value)
        for name, value in (("scale", scale), ("bias", bias))
        if value is not None
    }
    for name, p in parameters.items():
        _check.shape(op, name, p.shape, tuple(x.shape[a] for a in axes))
    # Kernels take parameters of one dtype, x's or that of the arithmetic.
    if {p.dtype for p in parameters.values()} != {x.dtype}:
        parameters = {name: p.astype(acc_dtype(x.dtype)) for name, p in parameters.items()}
    rows = [i for i in range(x.ndim) if i not in axes]
    given |= {name: jnp.expand_dims(p, rows) for name, p in parameters.items()}

    params = {
        "axes": axes,
        "groups": 0,
        "center": center,
        "epsilon": epsilon,
        "scale_offset": scale_offset,
        "implementation": implementation,
    }
    out = bind(norm_fwd_p, given, fwd_results(given, center), params)
    return out["y"] if residual is None else (out["y"], out["sum"])


# ---- the record ----


def _xla(x, scale, bias=None, *, center, epsilon=EPSILON):
    """As Flax computes it by default: variance as mean(x^2) - mean(x)^2, in one pass."""
    y = x.astype(parameter_dtype(x.dtype.name))
    variance = jnp.mean(y * y, -1, keepdims=True)
    if center:
        mean = jnp.mean(y, -1, keepdims=True)
        variance = jnp.maximum(0, variance - mean * mean)
        y = y - mean
    y = y * (jax.lax.rsqrt(variance + epsilon) * scale)
    return (y if bias is None else y + bias).astype(x.dtype)


def _reference(dy, x, gain, bias=None, *, where, tiny, center, **_):
    n = np.sum(np.broadcast_to(where, x.shape), -1, keepdims=True)

    def mean(v):
        return np.sum(np.where(where, v, 0), -1, keepdims=True) / n

    shift = mean(x) if center else 0.0
    rstd = 1 / np.sqrt(mean((x - shift) ** 2) + EPSILON)
    xhat = (x - shift) * rstd
    y, w = xhat * gain, dy * gain
    of_w = w.sum(-1, keepdims=True) / n if center else 0.0
    of_product = (w * xhat).sum(-1, keepdims=True) / n
    dx = rstd * (w - np.where(where, of_w + xhat * of_product, 0))
    # Rows are centred before they are scaled, so what cancels there is of x's size.
    reach = (np.abs(x) + np.abs(shift)) * rstd
    size = np.abs(w).sum(-1, keepdims=True) / n
    size = size + reach * np.abs(w * reach).sum(-1, keepdims=True) / n
    dx_size = rstd * (np.abs(w) + size)
    rows = tuple(range(x.ndim - 1))
    gradients = [(dx, dx_size, tiny), ((dy * xhat).sum(rows), np.abs(dy * reach).sum(rows), tiny)]
    y_size = reach * np.abs(gain)
    if bias is not None:
        y, y_size = y + bias, y_size + np.abs(bias)
        gradients.append((dy.sum(rows), np.abs(dy).sum(rows), tiny))
    return (y, y_size, tiny), *gradients


def _bytes(sizes: Sizes, direction: str, parameters: int) -> int:
    """Forward reads x and the parameters and writes y; training also writes the statistics of each row.

    Backward reads the statistics, x, dy and the scale, and writes dx and the parameters' gradients.
    """
    row = sizes.columns * sizes.number
    statistics = sizes.rows * sizes.number * parameters
    forward = 2 * sizes.array + parameters * row
    backward = 3 * sizes.array + statistics + row + parameters * row
    return {
        "forward": forward,
        "forward_train": forward + statistics,
        "backward": backward,
        "together": 4 * sizes.array + 2 * parameters * row,
        "grad": forward + statistics + backward,
    }[direction]


_RMS_NORM = ("h200-rms_norm.json",)
_CPU = ("cpu-ci.json",)
_OTHER_AXES = costs.Rule(
    lambda shape, axes, operands: not costs.last(shape, axes),
    costs.DIFFERENTIATED,
    "the plain formula, as there is no kernel for such axes; keeps x and one or two numbers per row",
)
_SHORT_ROWS_OF_RMS_NORM = costs.Rule(
    lambda shape, axes, operands: costs.short_rows(shape, axes, 8192),
    costs.DIFFERENTIATED,
    "rows of at most 8192",
    (
        costs.Figures("H200", (0.98, 1.49), (2.49, 3.44), _RMS_NORM),
        costs.Figures("CPU", (1.38, 2.38), (1.70, 2.22), _CPU),
    ),
)
_OTHERWISE = costs.Rule(
    costs.always,
    costs.ALWAYS,
    "",
    (
        costs.Figures("H200", (1.38, 2.35), (2.31, 4.78), ("h200-layer_norm.json", *_RMS_NORM)),
        costs.Figures("CPU", (1.18, 2.95), (1.58, 4.50), _CPU),
    ),
)

OPERATIONS = tuple(
    Operation(
        function=function,
        xla=functools.partial(_xla, center=center),
        reference=functools.partial(_reference, center=center),
        bytes=functools.partial(_bytes, parameters=parameters),
        find=pattern.candidates,
        rules=rules,
        parameters=parameters,
        mask="mask",
    )
    for function, center, parameters, rules in (
        (layer_norm, True, 2, (_OTHER_AXES, _OTHERWISE)),
        (rms_norm, False, 1, (_OTHER_AXES, _SHORT_ROWS_OF_RMS_NORM, _OTHERWISE)),
    )
)
