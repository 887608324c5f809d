"""The operations, with the plain JAX formula and the float64 reference of each."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

import jaxnorm

EPSILON = 1e-6  # of norms, by default


def parameter_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _softmax(x, where, scale):
    z = np.where(where, x * scale, -np.inf)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _softmax_reference(dy, x, *, where, scale, tiny):
    y = _softmax(x, where, scale)
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


def _relu_reference(dy, *addends, tiny, **_):
    total = sum(addends)
    # Only the sum rounds; the rest is selection.
    size = np.abs(total) if len(addends) > 1 else 0 * total
    return (np.maximum(total, 0), size, tiny), (np.where(total > 0, dy, 0), 0 * total, 0)


def _norm_reference(dy, x, gain, bias=None, *, where, tiny, center, **_):
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


def _xla_norm(x, scale, bias=None, *, mask=None, center):
    """As Flax computes it by default."""
    dtype = scale.dtype
    y = x.astype(dtype)
    variance = jax.numpy.mean(y * y, -1, keepdims=True, where=mask)
    if center:
        mean = jax.numpy.mean(y, -1, keepdims=True, where=mask)
        variance = jax.numpy.maximum(0, variance - mean * mean)
        y = y - mean
    y = y * (jax.lax.rsqrt(variance + np.asarray(EPSILON, dtype)) * scale)
    return (y if bias is None else y + bias).astype(x.dtype)


def _batch_norm_reference(dy, x, gain, bias, *, tiny, **_):
    rows = tuple(range(x.ndim - 1))
    n = math.prod(x.shape[:-1])
    mean = x.mean(rows)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(rows) + EPSILON)
    xhat = (x - mean) * rstd
    dbias, dgain = dy.sum(rows), (dy * xhat).sum(rows)
    dx = rstd * gain * (dy - (dbias + xhat * dgain) / n)
    # Features are centred before they are scaled, as rows are above.
    reach = (np.abs(x) + np.abs(mean)) * rstd
    bias_size, gain_size = np.abs(dy).sum(rows), np.abs(dy * reach).sum(rows)
    dx_size = rstd * np.abs(gain) * (np.abs(dy) + (bias_size + reach * gain_size) / n)
    return (
        (xhat * gain + bias, reach * np.abs(gain) + np.abs(bias), tiny),
        (dx, dx_size, tiny),
        (dgain, gain_size, tiny),
        (dbias, bias_size, tiny),
    )


def _batch_norm(x, scale, bias):
    return jaxnorm.batch_norm(x, scale, bias, epsilon=EPSILON)[0]


def _xla_batch_norm(x, scale, bias):
    """As Flax computes it by default."""
    rows = tuple(range(x.ndim - 1))
    wide = x.astype(scale.dtype)
    mean = jax.numpy.mean(wide, rows)
    variance = jax.numpy.maximum(0, jax.numpy.mean(wide * wide, rows) - mean * mean)
    factor = jax.lax.rsqrt(variance + np.asarray(EPSILON, scale.dtype)) * scale
    return ((wide - mean) * factor + bias).astype(x.dtype)


def _labels(shape):
    return (np.arange(math.prod(shape[:-1]), dtype=np.int32) * 7 % shape[-1]).reshape(shape[:-1])


def _cross_entropy(x, where=None):
    return jaxnorm.softmax_cross_entropy(x, _labels(x.shape), where=where)[..., None]


def _xla_cross_entropy(x):
    """As optax computes it, in x's dtype."""
    picked = jax.numpy.take_along_axis(x, _labels(x.shape)[..., None], -1)
    loss = jax.nn.logsumexp(x, -1, keepdims=True) - picked
    return loss.astype(parameter_dtype(x.dtype.name))


def _cross_entropy_reference(dy, x, *, where, tiny, **_):
    z = np.where(where, x, -np.inf)
    hit = np.arange(x.shape[-1]) == _labels(x.shape)[..., None]
    top = z.max(-1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    picked = np.where(hit, z, 0).sum(-1, keepdims=True)
    p = np.exp(z - lse)
    dx = np.where(where, dy * (p - hit), 0)
    # A rounding of lse is a relative error of p.
    dx_size = np.abs(dy) * (p * (1 + np.abs(lse)) + hit)
    return (lse - picked, np.abs(lse) + np.abs(top), tiny), (dx, dx_size, tiny)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, the plain JAX formula, and its float64 reference.

    Attributes:
      name: of the function.
      arrays: how many arguments have the full shape.
      kernel: jaxnorm's.
      xla: the formula, called alike.
      reference: (dy, *arguments in float64, where, scale, tiny) -> (value, size of the terms that
        are added up, what the dtype cannot hold) of the result and of each gradient that differs.
      mask: name of the argument that says which elements of a row take part; "" if there is none.
      parameters: how many arguments of one row follow, in the dtype that sums have.
      per_row: whether the result is one number for each row, in that dtype.
    """

    name: str
    arrays: int
    kernel: Callable
    xla: Callable
    reference: Callable
    mask: str = ""
    parameters: int = 0
    per_row: bool = False

    def argument_kinds(self, shape: Sequence[int], dtype: str) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each argument."""
        parameter = tuple(shape[-1:]), parameter_dtype(dtype)
        return [(tuple(shape), dtype)] * self.arrays + [parameter] * self.parameters

    def result_kind(self, shape: Sequence[int], dtype: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the result for arguments of these."""
        if self.per_row:
            return (*shape[:-1], 1), parameter_dtype(dtype)
        return tuple(shape), dtype

    @property
    def reduces(self) -> bool:
        return bool(self.mask)


OPERATIONS = {
    op.name: op
    for op in (
        Operation("softmax", 1, jaxnorm.softmax, jax.nn.softmax, _softmax_reference, "where"),
        Operation(
            "log_softmax",
            1,
            jaxnorm.log_softmax,
            jax.nn.log_softmax,
            _log_softmax_reference,
            "where",
        ),
        Operation("relu", 1, jaxnorm.relu, jax.nn.relu, _relu_reference),
        Operation(
            "add_relu",
            2,
            jaxnorm.add_relu,
            lambda x, y: jax.nn.relu(x + y),
            _relu_reference,
        ),
        *(
            Operation(
                name,
                1,
                getattr(jaxnorm, name),
                functools.partial(_xla_norm, center=parameters == 2),
                functools.partial(_norm_reference, center=parameters == 2),
                "mask",
                parameters,
            )
            for name, parameters in (("layer_norm", 2), ("rms_norm", 1))
        ),
        Operation(
            "batch_norm", 1, _batch_norm, _xla_batch_norm, _batch_norm_reference, parameters=2
        ),
        Operation(
            "softmax_cross_entropy",
            1,
            _cross_entropy,
            _xla_cross_entropy,
            _cross_entropy_reference,
            "where",
            per_row=True,
        ),
    )
}


def gradient_of(function: Callable, parameters: int = 0) -> jax.stages.Wrapped:
    """`(args, dy, **options) -> (y, dx, gradients of the parameters)` in one jit."""

    @jax.jit
    def run(args, dy, **options):
        y, vjp = jax.vjp(functools.partial(function, **options), *args)
        gradients = vjp(dy)
        return y, gradients[0], *gradients[len(gradients) - parameters :]

    return run
