"""batch_norm and batch_norm_inference. What they bind, and all of its rules, is in batch_norm_primitives.py."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jaxnorm import _check
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.patterns import norm as pattern
from jaxnorm._ops.batch_norm_primitives import (
    bind,
    even_mask,
    forward,
    kept_results,
    merge_statistics,
    named,
    stats_p,
    tangents_of,
)
from jaxnorm._ops.record import EPSILON, Operation, Sizes, parameter_dtype
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.avals import vary_alike
from jaxnorm._primitive.named import only

Axis = int | tuple[int, ...]
AxisName = Hashable | tuple[Hashable, ...]


def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-5,
    residual: ArrayLike | None = None,
    activation: str | None = None,
    mask: ArrayLike | None = None,
    axis_name: AxisName | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Batch normalisation of x by its own statistics, with an optional residual and ReLU in the same pass.

    .. math:: y = \mathrm{act}\left(\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \mathrm{scale} + \mathrm{bias} +
              \mathrm{residual}\right)

    with the mean and the (biased) variance of each feature over all other axes (Ioffe and Szegedy 2015, "Batch
    normalization"). Replaces the training step of `flax.linen.BatchNorm` and `flax.nnx.BatchNorm`; the caller keeps the
    running averages, for example `momentum * old + (1 - momentum) * mean`. Statistics and all arithmetic are float32
    (float64 for float64); the variance is the mean squared deviation from the mean, never negative; y is rounded once.

    Backward saves x, the mean and the variance, and with a ReLU one bit per element. The derivative of the ReLU is 1
    where y > 0 and 0 elsewhere, at NaN too, and is selected. mean and var are differentiable. The statistics of
    devices are combined if x is sharded under `jit`; inside `shard_map`, `pmap` and `vmap` that is what `axis_name`
    asks for.

    NaN or an infinity in a feature makes that feature NaN and no other. A feature of which nothing counts (an empty
    batch, a mask that keeps nothing) has NaN as mean and variance, and gradients of 0 for scale and bias if the batch
    is empty. Empty arrays give empty arrays.

    Args:
      x: array with one dimension at least; float16, bfloat16, float32 or float64.
      scale: array of the shape of x's feature axes, of any of these dtypes; differentiable. None is 1.
      bias: the same; None is 0.
      axis: the feature axis, or a tuple of them. All others are reduced: axis=-1 for NHWC, axis=1 for NCHW,
        axis=(1, 2, 3) for statistics of each activation. Axes that are not neighbours have no kernel.
      epsilon: added to the variance.
      residual: array of x's shape and dtype, added before the activation, and not rounded in between.
      activation: None or "relu".
      mask: boolean array that broadcasts to x; which elements the statistics count. All are normalised.
      axis_name: name or names of the mapped axes over which statistics are combined: those of an enclosing `shard_map`,
        `pmap` or `vmap`. Devices may count different numbers of elements.
      axis_index_groups: lists of indices along `axis_name`, all of one length; statistics are combined within each.
      implementation: None picks the kernel where there is one, and XLA elsewhere; "kernel" insists; "xla" is the plain
        formula.

    Returns:
      (y, mean, var). y has x's shape and dtype (parameters do not promote it: cast x for a float32 result). mean and
      var have the shape of the feature axes, and are float32 (float64 for float64).

    Raises:
      TypeError: a dtype is not supported, residual's is not x's, or `mask` is not boolean.
      ValueError: an axis that x does not have, a shape that does not fit x's, an axis name that is not bound, groups
        that are not of one length or do not hold every index, or "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> y, mean, var = jaxnorm.batch_norm(jnp.array([[1.0, 5.0], [3.0, 9.0]]), epsilon=0.0, activation="relu")
    >>> y, mean, var
    (Array([[0., 0.],
           [1., 1.]], dtype=float32), Array([2., 7.], dtype=float32), Array([1., 4.], dtype=float32))
    """
    op = "batch_norm"
    given, call = _arguments(
        op, x, scale, bias, axis, epsilon, residual, activation, implementation
    )
    if mask is not None:
        mask = _check.bool_array(op, "mask", mask)
        _check.broadcastable(op, "mask", mask.shape, given["x"].shape)
        mask = jnp.expand_dims(mask, range(given["x"].ndim - mask.ndim))
        given["mask"] = even_mask(mask, given["x"].shape, call.axes)
    call = dataclasses.replace(
        call, **_synchronisation(op, axis_name, axis_index_groups, given["x"])
    )
    out: Any = _normalise(call, given)  # to type checkers an object, for custom_jvp of jax 0.11
    reduced = [i for i in range(given["x"].ndim) if i not in call.axes]
    return out["y"], jax.lax.squeeze(out["mean"], reduced), jax.lax.squeeze(out["var"], reduced)


def batch_norm_inference(
    x: ArrayLike,
    mean: ArrayLike,
    var: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-5,
    residual: ArrayLike | None = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Batch normalisation of x by given statistics, with an optional residual and ReLU, in one pass.

    .. math:: y = \mathrm{act}\left(\frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} \cdot \mathrm{scale} +
              \mathrm{bias} + \mathrm{residual}\right)

    from Ioffe and Szegedy 2015, "Batch normalization". Replaces `flax.linen.BatchNorm` and `flax.nnx.BatchNorm` with
    `use_running_average=True`. All arrays are differentiable; backward keeps x (if scale or mean or var need it), the
    statistics, and with a ReLU one bit per element. Arithmetic, ReLU and empty arrays as in `jaxnorm.batch_norm`; NaN
    and infinities stay where they are in x.

    Args:
      x: array with one dimension at least; float16, bfloat16, float32 or float64.
      mean: array of the shape of x's feature axes, of any of these dtypes.
      var: the same.
      scale: the same; None is 1.
      bias: the same; None is 0.
      axis: the feature axis, or a tuple of them.
      epsilon: added to the variance.
      residual: array of x's shape and dtype, added before the activation, and not rounded in between.
      activation: None or "relu".
      implementation: None picks the kernel where there is one, and XLA elsewhere; "kernel" insists; "xla" is the plain
        formula.

    Returns:
      Array of x's shape and dtype.

    Raises:
      TypeError: a dtype is not supported, or residual's is not x's.
      ValueError: an axis that x does not have, a shape that does not fit x's, or "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> mean, var = jnp.array([1.0, 0.0]), jnp.array([4.0, 1.0])
    >>> jaxnorm.batch_norm_inference(jnp.array([[3.0, -1.0]]), mean, var, epsilon=0.0)
    Array([[ 1., -1.]], dtype=float32)
    """
    op = "batch_norm_inference"
    given, call = _arguments(
        op, x, scale, bias, axis, epsilon, residual, activation, implementation
    )
    for name, value in (("mean", mean), ("var", var)):
        given[name] = _feature_array(op, name, value, given["x"], call.axes)
    return forward(given, ("y",), call.params)["y"]


# ---- arguments ----


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static about a call.

    Attributes:
      op: the public function, for error messages.
      axes: the features' dimensions.
      epsilon: as passed.
      relu: whether there is one.
      implementation: as passed.
      axis_name: mapped axes over which statistics are combined; None for none.
      axis_index_groups: as passed, as tuples.
      replicas: number of devices whose statistics are combined.
    """

    op: str
    axes: tuple[int, ...]
    epsilon: float
    relu: bool
    implementation: str | None
    axis_name: AxisName | None = None
    axis_index_groups: tuple[tuple[int, ...], ...] | None = None
    replicas: int = 1

    @property
    def params(self):
        """Parameters of the primitives."""
        return {
            "axes": self.axes,
            "groups": 0,
            "epsilon": self.epsilon,
            "relu": self.relu,
            "replicas": self.replicas,
            "op": self.op,
            "implementation": self.implementation,
        }

    def psum(self, value):
        return jax.lax.psum(value, self.axis_name, axis_index_groups=self.axis_index_groups)

    def position(self):
        """That of this device among those whose statistics are combined."""
        index = jax.lax.axis_index(self.axis_name)
        if self.axis_index_groups is None:
            return index
        places = np.zeros(sum(map(len, self.axis_index_groups)), np.int32)
        for group in self.axis_index_groups:
            places[list(group)] = np.arange(len(group))
        return jnp.asarray(places)[index]


def _arguments(op, x, scale, bias, axis, epsilon, residual, activation, implementation):
    """(operands by name, _Call) of what both functions take."""
    _check.implementation(op, implementation)
    x = _check.float_array(op, "x", x)
    if x.ndim == 0:
        raise ValueError(
            f"{op}: x must have at least one dimension, got a scalar. Use x[None] for one feature."
        )
    if axis is None:
        raise TypeError(
            f"{op}: axis must be an int or a tuple of ints, got None. Pass axis=-1 for features in the last axis."
        )
    axes = _check.axes(op, axis, x.ndim)
    if not axes:
        raise ValueError(
            f"{op}: axis must name at least one axis, got {axis!r}. Pass axis=-1 for features in the last axis."
        )
    if activation not in (None, "relu"):
        raise ValueError(
            f"{op}: activation must be None or 'relu', got {activation!r}. Apply any other function to the result."
        )
    epsilon = _check.number(op, "epsilon", epsilon)
    given = {"x": x}
    if residual is not None:
        given["residual"] = _check.alike(op, "residual", residual, x)
    for name, value in (("scale", scale), ("bias", bias)):
        if value is not None:
            given[name] = _feature_array(op, name, value, x, axes)
    return given, _Call(op, axes, epsilon, activation == "relu", implementation)


def _feature_array(op, name, value, x, axes):
    """`value` in the arithmetic's dtype, with size 1 in the reduced dimensions."""
    value = _check.float_array(op, name, value)
    _check.shape(op, name, value.shape, tuple(x.shape[a] for a in axes), owner="x's feature axes")
    value = value.astype(acc_dtype(x.dtype))
    return jnp.expand_dims(value, [i for i in range(x.ndim) if i not in axes])


def _synchronisation(op, axis_name, axis_index_groups, x):
    """Fields of _Call."""
    if axis_name is None:
        if axis_index_groups is not None:
            raise ValueError(
                f"{op}: axis_index_groups must be None without axis_name, got {axis_index_groups!r}. "
                "Pass the name of the axis that the indices belong to."
            )
        return {}
    try:
        size = jax.lax.psum(1, axis_name)
    except NameError:
        raise ValueError(
            f"{op}: axis_name must name axes of an enclosing shard_map, pmap or vmap, got {axis_name!r}. Leave it out "
            "under jit, where the statistics of a sharded x are those of all devices."
        ) from None
    if axis_index_groups is None:
        return {"axis_name": axis_name, "replicas": size}
    groups = tuple(tuple(int(i) for i in group) for group in axis_index_groups)
    if sorted(i for g in groups for i in g) != list(range(size)) or len(set(map(len, groups))) != 1:
        raise ValueError(
            f"{op}: axis_index_groups must be lists of one length that hold each index below {size} once, got "
            f"{axis_index_groups!r}. List every device of the axis."
        )
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if jax.typeof(x).mat.varying & set(names):
        raise ValueError(
            f"{op}: axis_index_groups must be None in a shard_map that checks varying axes, got {axis_index_groups!r}. "
            "JAX's psum does not know groups there: use shard_map(check_vma=False), or a mesh with an axis more."
        )
    return {"axis_name": axis_name, "axis_index_groups": groups, "replicas": len(groups[0])}


# ---- the composition ----


def _statistics(call, given):
    """Mean, var and with a mask count, of x on all devices."""
    results = ("mean", "var", "count") if "mask" in given else ("mean", "var")
    out = bind(stats_p, only(given, ("x", "mask")), results, call.params)
    if call.axis_name is not None:
        out = merge_statistics(out, call.psum, call.position(), call.replicas)
    return out


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalise(call, given):
    """Result and statistics of x by these statistics, by name."""
    own = _statistics(call, given)
    y = forward(given | own, ("y",), call.params)["y"]
    return {"y": y, "mean": own["mean"], "var": own["var"]}


@partial(_normalise.defjvp, symbolic_zeros=True)
def _normalise_jvp(call, primals, tangents):
    (given,), (dots,) = primals, tangents
    dots = {n: t for n, t in dots.items() if type(t) is not SymbolicZero}
    own = named(_statistics(call, given))
    known = given | own
    known |= named(forward(known, kept_results(call.params), call.params))

    def synchronise(sums):
        if call.axis_name is not None:
            for pair in (("bias_dot", "scale_dot"), ("mean_dot", "var_dot")):
                if pair[0] in sums:
                    total = call.psum(jnp.stack([sums[n] for n in pair]))
                    sums |= zip(pair, total, strict=True)
        return sums

    def join(sums):
        if call.axis_name is not None and {"bias_dot", "scale_dot"} <= sums.keys():
            # Made varying together, so that the transpose is one all-reduce.
            pair = jnp.stack([sums["bias_dot"], sums["scale_dot"]])
            sums["bias_dot"], sums["scale_dot"] = vary_alike(pair, given["x"])[0]
        return sums

    results = ("y_dot", "bias_dot", "scale_dot", "mean_dot", "var_dot")
    out = tangents_of(known, dots, {}, results, call.params, synchronise, join)
    kept = {n: known[n] for n in ("y", "mean", "var")}
    return kept, {
        n: SymbolicZero(jax.typeof(v).to_tangent_aval()) if t is None else vary_alike(t, v)[0]
        for (n, v), t in zip(kept.items(), (out.get(f"{n}_dot") for n in kept), strict=True)
    }


# ---- the record ----


def _xla(x, *statistics_and_parameters, axis=-1, epsilon=1e-5, residual=None, activation=None):
    """As Flax computes it by default: variance as mean(x^2) - mean(x)^2, in one pass."""
    *statistics, scale, bias = statistics_and_parameters
    reduced = [i for i in range(x.ndim) if i != axis % x.ndim]
    y = x.astype(parameter_dtype(x.dtype.name))
    mean, variance = statistics or (jnp.mean(y, reduced), jnp.mean(y * y, reduced))
    if not statistics:
        variance = jnp.maximum(0, variance - mean * mean)
    factor = jax.lax.rsqrt(variance + epsilon) * scale
    y = (y - jnp.expand_dims(mean, reduced)) * jnp.expand_dims(factor, reduced)
    y = y + jnp.expand_dims(bias, reduced)
    y = (y if residual is None else y + residual).astype(x.dtype)
    y = y if activation is None else jax.nn.relu(y)
    return y if statistics else (y, mean, variance)


def _plain_training(function):
    return lambda x, scale, bias: function(x, scale, bias, epsilon=EPSILON)[0]


def _plain_statistics(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each feature in plain calls of batch_norm_inference."""
    return np.linspace(-1, 1, columns), np.linspace(0.5, 2, columns)


def _plain_inference(function):
    def call(x, scale, bias):
        statistics = (s.astype(scale.dtype) for s in _plain_statistics(x.shape[-1]))
        return function(x, *statistics, scale, bias, epsilon=EPSILON)

    return call


def _reference(dy, x, gain, bias, *, tiny, **_):
    rows = tuple(range(x.ndim - 1))
    n = math.prod(x.shape[:-1])
    mean = x.mean(rows)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(rows) + EPSILON)
    xhat = (x - mean) * rstd
    dbias, dgain = dy.sum(rows), (dy * xhat).sum(rows)
    dx = rstd * gain * (dy - (dbias + xhat * dgain) / n)
    # Features are centred before they are scaled: what cancels there is of x's size.
    reach = (np.abs(x) + np.abs(mean)) * rstd
    bias_size, gain_size = np.abs(dy).sum(rows), np.abs(dy * reach).sum(rows)
    dx_size = rstd * np.abs(gain) * (np.abs(dy) + (bias_size + reach * gain_size) / n)
    return (
        (xhat * gain + bias, reach * np.abs(gain) + np.abs(bias), tiny),
        (dx, dx_size, tiny),
        (dgain, gain_size, tiny),
        (dbias, bias_size, tiny),
    )


def _inference_reference(dy, x, gain, bias, *, tiny, **_):
    rows = tuple(range(x.ndim - 1))
    mean, variance = _plain_statistics(x.shape[-1])
    rstd = 1 / np.sqrt(variance + EPSILON)
    xhat = (x - mean) * rstd
    reach = (np.abs(x) + np.abs(mean)) * rstd
    dx = rstd * gain * dy
    return (
        (xhat * gain + bias, reach * np.abs(gain) + np.abs(bias), tiny),
        (dx, np.abs(dx), tiny),
        ((dy * xhat).sum(rows), np.abs(dy * reach).sum(rows), tiny),
        (dy.sum(rows), np.abs(dy).sum(rows), tiny),
    )


def _bytes(sizes: Sizes, direction: str) -> int:
    """Forward reads x twice, and backward x, dy and the bits of a ReLU: what a feature needs comes from all of it.

    Together: statistics need x. Its sums for backward, unless a ReLU asks for the statistics first, come with them: x
    is read twice, or three times with a ReLU. dy is read twice, or with a residual once, as the residual's gradient has
    all that the last pass needs.
    """
    feature, bits = sizes.columns * sizes.number, sizes.bits if sizes.relu else 0
    residual = sizes.array * (sizes.arrays - 1)
    forward = 3 * sizes.array + residual + 4 * feature
    backward = 5 * sizes.array + 2 * bits + residual + 5 * feature
    return {
        "forward": forward,
        "forward_train": forward + bits,
        "backward": backward,
        "together": (7 if sizes.relu else 6) * sizes.array + 2 * residual + 4 * feature,
        "grad": forward + bits + backward,
    }[direction]


def _inference_bytes(sizes: Sizes, direction: str) -> int:
    """Forward reads x and writes y. Together also reads dy and writes dx; no array is read twice."""
    feature, residual = sizes.columns * sizes.number, sizes.array * (sizes.arrays - 1)
    return {
        "forward": 2 * sizes.array + residual + 4 * feature,
        "together": 4 * sizes.array + 2 * residual + 6 * feature,
    }[direction]


_CPU = ("cpu-ci-batch_norm.json",)

OPERATIONS = (
    Operation(
        function=batch_norm,
        xla=_xla,
        reference=_reference,
        bytes=_bytes,
        find=pattern.candidates,
        rules=(
            costs.Rule(
                costs.always,
                costs.DIFFERENTIATED,
                "keeps x and one bit per element",
                (
                    # This file has forward alone, too.
                    costs.Figures(
                        "H200", (0.99, 2.90), (2.08, 3.97), ("h200-batch_norm-first-card.json",)
                    ),
                    costs.Figures("CPU", (1.12, 2.21), (1.39, 2.59), _CPU),
                ),
            ),
        ),
        plain=_plain_training,
        parameters=2,
    ),
    Operation(
        function=batch_norm_inference,
        xla=_xla,
        reference=_inference_reference,
        bytes=_inference_bytes,
        find=pattern.candidates,
        rules=(
            costs.Rule(
                costs.always,
                costs.DIFFERENTIATED,
                "XLA fuses it with its neighbours",
                (
                    costs.Figures("H200", (0.96, 1.24), None, ("h200-batch_norm_inference.json",)),
                    costs.Figures("CPU", (1.11, 2.25), None, _CPU),
                ),
            ),
        ),
        plain=_plain_inference,
        parameters=2,
    ),
)
