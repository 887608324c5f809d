"""One function per JAX transformation, applied to every operation.

A transformation takes a function of arrays and its arguments, and returns a pytree of results. The
tests run all of them on jaxnorm's function in the dtypes under test and on `jax.nn`'s formula in
float64, and compare.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import jaxnorm

DTYPES = ("float16", "bfloat16", "float32", "float64")

CPU, CUDA = jaxnorm.status().modules
needs_cpu = pytest.mark.skipif(not CPU.available, reason=f"no CPU module: {CPU.reason}")
needs_cuda = pytest.mark.skipif(not CUDA.available, reason=f"no CUDA module: {CUDA.reason}")

# ---- arguments ----


def rand(shape, dtype="float32", seed=0, scale=3.0, offset=0.0):
    values = np.random.default_rng(seed).standard_normal(shape) * scale + offset
    return jnp.asarray(values.astype(np.dtype(dtype)))


def in_turn(**values):
    """Parametrises a test with half of all combinations, in which any two values of different parameters meet.

    On a GPU, where more decides about the kernel, with all of them. There are three parameters or more.
    """
    places = itertools.product(*(range(len(v)) for v in values.values()))
    chosen = [p for p in places if sum(p) % 2 == 0 or jax.default_backend() == "gpu"]
    combinations = [
        tuple(v[n] for v, n in zip(values.values(), place, strict=True)) for place in chosen
    ]
    return pytest.mark.parametrize(tuple(values), combinations)


def schedules_in_turn(place: int, schedules) -> list[str]:
    """The chosen schedule, and every second one of the others. A case at the next place has the rest."""
    return [s for turn, s in enumerate(schedules) if s == "chosen" or (place + turn) % 2]


def values_and_vjps(*functions):
    """Jitted (args, ct) -> [(result, cotangents of args) of each function]: one program, which compiles faster."""

    def one(function, args, ct):
        y, pullback = jax.vjp(function, *args)
        return y, pullback(ct)

    return jax.jit(lambda args, ct: [one(f, args, ct) for f in functions])


def value_and_vjp(function):
    """Jitted (args, ct) -> (result, cotangents of args)."""
    run = values_and_vjps(function)
    return lambda args, ct: run(args, ct)[0]


# ---- operations ----


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation with its arguments, as a function of those arguments that are differentiable.

    Attributes:
      function: jaxnorm's, of arrays.
      reference: the same in jax.nn and jax.numpy.
      shapes: of the arguments; the first is the shape of the result.
      forward, backward: names of the primitives that the gradient must consist of.
      tangent: names of those that apply the derivative in forward mode.
      residuals: (shape, dtype) of all that the derivative keeps; dtype "=" is the input's, "acc" that of sums.
      checkpoint_name: under which a checkpoint policy finds what forward computes of them.
      named: (shape, dtype) of those; None if that is not to be tested.
      keeps_result: whether the result is among them.
      again: names of the primitives that must run again for the result where it is not.
      backward_each: what backward consists of for each argument alone, if not of the same.
      dtypes: under test. Variants of one operation are not repeated for every dtype.
    """

    name: str
    function: Callable
    reference: Callable
    shapes: tuple[tuple[int, ...], ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    tangent: tuple[str, ...]
    residuals: tuple
    checkpoint_name: str
    named: tuple | None
    keeps_result: bool = False
    dtypes: tuple[str, ...] = DTYPES
    again: tuple[str, ...] | None = None
    backward_each: tuple[tuple[str, ...], ...] | None = None

    def backward_of(self, argument: int) -> tuple[str, ...]:
        """What the gradient of one argument alone has besides forward."""
        return self.backward if self.backward_each is None else self.backward_each[argument]

    def dtype_of(self, residual: str, dtype: str) -> str:
        """Name of the dtype that a residual has when the arguments have `dtype`."""
        acc = "float64" if dtype == "float64" else "float32"
        return {"=": dtype, "acc": acc}.get(residual, residual)

    def arguments(self, dtype: str, seed: int = 0):
        """Values that every dtype represents, so that one float64 reference serves all of them.

        No sum of two arguments is 0: relu has no derivative there.
        """
        rng = np.random.default_rng(seed)
        arrays = []
        for i, shape in enumerate(self.shapes):
            values = rng.integers(-24, 24, shape) / (8, 16, 16)[i] + (1 / 32 if i == 0 else 0.0)
            arrays.append(jnp.asarray(values, dtype))
        return tuple(arrays)


def _mask(shape):
    """Every row keeps elements, one of them only one; broadcast along the first axis."""
    where = np.random.default_rng(7).random(shape) < 0.7
    where[..., 0] = True
    where[:, 0, 1:] = False
    return jnp.asarray(where)


_SHAPE = (2, 3, 9)
# Large enough that derivatives of the third order stay moderate where a mask keeps one element of a row.
_EPSILON = 0.25
_WHERE = _mask((1, 3, 9))


def _softmax_op(log, variant, dtypes):
    name = "log_softmax" if log else "softmax"
    function, formula = getattr(jaxnorm, name), getattr(jax.nn, name)
    shapes, residuals = (_SHAPE,), ((_SHAPE, "="),)
    if variant == "":
        f, g = function, formula
    elif variant == "axis0":
        f, g = functools.partial(function, axis=0), functools.partial(formula, axis=0)
    elif variant == "axes":
        f, g = functools.partial(function, axis=(0, 2)), functools.partial(formula, axis=(0, 2))
    else:
        shapes = (_SHAPE, (3, 1), (2, 1, 9))
        residuals = None

        def f(x, scale, bias):
            y = function(x, where=_WHERE, scale=scale, bias=bias)
            return jnp.where(_WHERE, y, 0) if log else y

        def g(x, scale, bias):
            y = formula(scale * x + bias, where=_WHERE)
            return jnp.where(_WHERE, y, 0) if log else y

    return Op(
        name + variant,
        f,
        g,
        shapes,
        ("jaxnorm_softmax_fwd",),
        ("jaxnorm_softmax_bwd",),
        ("jaxnorm_softmax_bwd",),
        residuals,
        f"jaxnorm_{name}",
        residuals,
        True,
        dtypes,
    )


def _formula_of_norm(
    x, scale=None, bias=None, *, axis=-1, mask=None, center=True, epsilon=_EPSILON
):
    """As Flax writes it, without use_fast_variance."""
    mean = jnp.mean(x, axis, keepdims=True, where=mask) if center else jnp.zeros((), x.dtype)
    variance = jnp.mean((x - mean) ** 2, axis, keepdims=True, where=mask)
    y = (x - mean) * jax.lax.rsqrt(variance + np.asarray(epsilon, x.dtype))
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def _norm_op(name, variant, dtypes):
    center = name == "layer_norm"
    function = functools.partial(getattr(jaxnorm, name), epsilon=_EPSILON)
    formula = functools.partial(_formula_of_norm, center=center)
    parameters, stats = ((9,), (9,)) if center else ((9,),), (2, 3, 1)
    shapes, residuals = (_SHAPE, *parameters), None
    if variant == "":
        f, g = function, formula
        residuals = ((_SHAPE, "="), ((1, 1, 9), "="))
    elif variant == "axes":
        shapes, stats = (_SHAPE, (3, 9), (3, 9)), (2, 1, 1)
        f = functools.partial(function, axis=(1, 2))
        g = functools.partial(formula, axis=(1, 2))
    elif variant == "masked":
        f, g = functools.partial(function, mask=_WHERE), functools.partial(formula, mask=_WHERE)
    else:  # both results count, so that backward meets both cotangents
        shapes = (_SHAPE, _SHAPE, (9,))

        def f(x, residual, scale):
            y, s = function(x, scale, residual=residual)
            return y - s * np.asarray(0.5, s.dtype)

        def g(x, residual, scale):
            s = x + residual
            return formula(s, scale) - 0.5 * s

    named = ((stats, "acc"),) * (2 if center else 1)
    if variant == "residual":
        named = (*named, (_SHAPE, "="))
    return Op(
        name + variant,
        f,
        g,
        shapes,
        ("jaxnorm_norm_fwd",),
        ("jaxnorm_norm_bwd",),
        ("jaxnorm_norm_jvp",),
        residuals and residuals + named,
        f"jaxnorm_{name}",
        named,
        False,
        dtypes,
    )


def _formula_of_batch_norm(
    x, scale=None, bias=None, *, residual=None, relu=False, axis=-1, mask=None, epsilon=_EPSILON
):
    """(y, mean, var) as Flax writes it, without use_fast_variance."""
    reduced = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean = jnp.mean(x, reduced, where=mask)
    var = jnp.mean((x - jnp.expand_dims(mean, reduced)) ** 2, reduced, where=mask)
    y = _formula_of_inference(
        x, mean, var, scale, bias, residual=residual, relu=relu, axis=axis, epsilon=epsilon
    )
    return y, mean, var


def _formula_of_inference(
    x, mean, var, scale=None, bias=None, *, residual=None, relu=False, axis=-1, epsilon=_EPSILON
):
    reduced = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean, var = jnp.expand_dims(mean, reduced), jnp.expand_dims(var, reduced)
    y = (x - mean) * jax.lax.rsqrt(var + np.asarray(epsilon, x.dtype))
    y = y if scale is None else y * jnp.expand_dims(scale, reduced)
    y = y if bias is None else y + jnp.expand_dims(bias, reduced)
    y = y if residual is None else y + residual
    return jnp.where(y > 0, y, 0) if relu else y


_SUMS, _DX = "jaxnorm_batch_norm_sums", "jaxnorm_batch_norm_dx"
_COUNTED = np.array([[[True], [True], [False]], [[False], [True], [True]]])


def _batch_norm_op(variant, dtypes):
    """Batch normalisation of 6 elements (masked: 4) per feature; of 18 channels first."""
    function = functools.partial(jaxnorm.batch_norm, epsilon=_EPSILON)
    shapes, stats, each = (_SHAPE, (9,), (9,)), (1, 1, 9), ((_SUMS, _DX), (_SUMS,), (_SUMS,))
    residuals, named = None, ()
    f, g = (lambda *args: function(*args)[0]), (lambda *args: _formula_of_batch_norm(*args)[0])
    if variant == "":
        residuals = ((_SHAPE, "="), (stats, "acc"))
    elif variant == "channels_first":
        shapes, stats = (_SHAPE, (3,), (3,)), (1, 3, 1)
        f = lambda *args: function(*args, axis=1)[0]  # noqa: E731
        g = lambda *args: _formula_of_batch_norm(*args, axis=1)[0]  # noqa: E731
    elif variant == "masked":
        named = ((stats, "acc"),)  # the count
        f = lambda *args: function(*args, mask=jnp.asarray(_COUNTED))[0]  # noqa: E731
        g = lambda *args: _formula_of_batch_norm(*args, mask=_COUNTED)[0]  # noqa: E731
    elif variant == "relu":
        shapes, each = (_SHAPE, _SHAPE, (9,)), ((_SUMS, _DX), (_DX,), (_SUMS,))
        named = (((2, 3, 2), "uint8"),)
        residuals = ((_SHAPE, "="), (stats, "acc"))

        def f(x, residual, scale):
            return function(x, scale, residual=residual, activation="relu")[0]

        def g(x, residual, scale):
            return _formula_of_batch_norm(x, scale, residual=residual, relu=True)[0]

    else:  # all three results count

        def use(y, mean, var):
            return y + mean.astype(y.dtype) - var.astype(y.dtype) * np.asarray(0.25, y.dtype)

        def f(*args):
            return use(*function(*args))

        def g(*args):
            return use(*_formula_of_batch_norm(*args))

    named = ((stats, "acc"),) * 2 + named
    return Op(
        "batch_norm" + variant,
        f,
        g,
        shapes,
        ("jaxnorm_batch_norm_stats", "jaxnorm_batch_norm_fwd"),
        (_SUMS, _DX),
        ("jaxnorm_batch_norm_jvp_in", "jaxnorm_batch_norm_jvp_out"),
        residuals and residuals + named,
        "jaxnorm_batch_norm",
        named,
        False,
        dtypes,
        ("jaxnorm_batch_norm_fwd",),
        each,
    )


def _inference_op(variant, dtypes):
    def variance(v):
        return jnp.square(v) + np.asarray(0.5, v.dtype)

    def f(x, a, b):
        if variant == "":
            return jaxnorm.batch_norm_inference(x, a, variance(b), epsilon=_EPSILON)
        mean, var = jnp.ones_like(a), jnp.full_like(a, 0.5)
        return jaxnorm.batch_norm_inference(x, mean, var, a, b, epsilon=_EPSILON, activation="relu")

    def g(x, a, b):
        if variant == "":
            return _formula_of_inference(x, a, variance(b))
        return _formula_of_inference(x, jnp.ones_like(a), jnp.full_like(a, 0.5), a, b, relu=True)

    return Op(
        "batch_norm_inference" + variant,
        f,
        g,
        (_SHAPE, (9,), (9,)),
        ("jaxnorm_batch_norm_fwd",),
        (_SUMS, _DX),
        ("jaxnorm_batch_norm_jvp_in", "jaxnorm_batch_norm_jvp_out"),
        None,
        "jaxnorm_batch_norm",
        None,
        False,
        dtypes,
        ("jaxnorm_batch_norm_fwd",),
        ((_DX,), (_SUMS,), (_SUMS,)),
    )


_LABELS = np.array([[0, 8, 3], [5, 1, 0]])


def _formula_of_cross_entropy(x, *, axis=-1, where=None, smoothing=0.0, z_loss=0.0):
    """With one-hot targets."""
    lse = jax.scipy.special.logsumexp(x, axis, keepdims=True, where=where)
    n = jnp.sum(jnp.ones_like(x), axis, keepdims=True, where=where)
    target = jax.nn.one_hot(_LABELS, x.shape[axis], dtype=x.dtype, axis=axis)
    target = (1 - smoothing) * target + smoothing / n
    target = target if where is None else jnp.where(where, target, 0)
    return lse - jnp.sum(target * x, axis, keepdims=True) + z_loss * lse**2


def _cross_entropy_op(variant, dtypes):
    axis, labels, where, smoothing, z_loss = -1, _LABELS, None, 0.0, 0.0
    shape, row = _SHAPE, (2, 3, 1)
    if variant == "axis":
        axis, shape, row = 1, (2, 9, 3), (2, 1, 3)
    elif variant == "everything":
        where, smoothing, z_loss = (
            _WHERE.at[0, :, jnp.asarray([0, 1, 3, 5, 8])].set(True),
            0.25,
            0.5,
        )

    def spread(loss):
        # To the shape of the argument. Equal numbers would be an offset, which a second call does not see.
        return jnp.pad(loss, [(0, 8 if i == axis % 3 else 0) for i in range(3)])

    def f(x):
        loss = jaxnorm.softmax_cross_entropy(
            x, labels, axis=axis, where=where, label_smoothing=smoothing, z_loss=z_loss
        )
        return spread(jnp.expand_dims(loss.astype(x.dtype), axis))

    def g(x):
        loss = _formula_of_cross_entropy(
            x, axis=axis, where=where, smoothing=smoothing, z_loss=z_loss
        )
        return spread(loss)

    return Op(
        "softmax_cross_entropy" + variant,
        f,
        g,
        (shape,),
        ("jaxnorm_cross_entropy_fwd",),
        ("jaxnorm_cross_entropy_bwd",),
        ("jaxnorm_cross_entropy_jvp",),
        None,
        "jaxnorm_softmax_cross_entropy",
        ((row, "acc"),),
        False,
        dtypes,
    )


OPS = {
    op.name: op
    for op in (
        _softmax_op(False, "", DTYPES),
        _softmax_op(False, "axis0", ("float32",)),
        _softmax_op(False, "axes", ("float32",)),
        _softmax_op(False, "masked", ("bfloat16", "float32")),
        _softmax_op(True, "", DTYPES),
        _softmax_op(True, "masked", ("float32",)),
        _norm_op("layer_norm", "", DTYPES),
        _norm_op("layer_norm", "axes", ("float32",)),
        _norm_op("layer_norm", "masked", ("float32",)),
        _norm_op("layer_norm", "residual", ("float16", "float32")),
        _norm_op("rms_norm", "", DTYPES),
        _norm_op("rms_norm", "masked", ("float32",)),
        _norm_op("rms_norm", "residual", ("bfloat16", "float32")),
        _batch_norm_op("", DTYPES),
        _batch_norm_op("channels_first", ("float32",)),
        _batch_norm_op("masked", ("float32",)),
        _batch_norm_op("relu", ("float32", "float64")),
        _batch_norm_op("statistics", ("float32",)),
        _inference_op("", ("bfloat16", "float32")),
        _inference_op("relu", ("float32",)),
        _cross_entropy_op("", DTYPES),
        _cross_entropy_op("axis", ("float32",)),
        _cross_entropy_op("everything", ("bfloat16", "float32")),
        Op(
            "relu",
            jaxnorm.relu,
            lambda x: jnp.where(x > 0, x, 0),
            (_SHAPE,),
            ("jaxnorm_relu_fwd",),
            ("jaxnorm_relu_bwd",),
            ("jaxnorm_relu_bwd",),
            (((2, 3, 2), "uint8"),),
            "jaxnorm_relu_mask",
            (((2, 3, 2), "uint8"),),
        ),
        Op(
            "add_relu",
            jaxnorm.add_relu,
            lambda x, y: jnp.where(x + y > 0, x + y, 0),
            (_SHAPE, _SHAPE),
            ("jaxnorm_relu_fwd",),
            ("jaxnorm_relu_bwd",),
            ("jaxnorm_relu_bwd",),
            (((2, 3, 2), "uint8"),),
            "jaxnorm_relu_mask",
            (((2, 3, 2), "uint8"),),
        ),
    )
}

# ---- transformations ----


@dataclasses.dataclass(frozen=True)
class Transformation:
    name: str
    function: Callable  # (f, args, weights) -> pytree
    order: int  # of the derivatives in it, or calls that follow another; errors grow with it


TRANSFORMATIONS: dict[str, Transformation] = {}


def transformation(order):
    def register(function):
        TRANSFORMATIONS[function.__name__] = Transformation(function.__name__, function, order)
        return function

    return register


def weights(shape, dtype, seed=1):
    """Numbers that every dtype represents, without a 0."""
    values = np.random.default_rng(seed).integers(1, 8, shape) / 4
    return jnp.asarray(values * np.random.default_rng(seed + 1).choice([-1, 1], shape), dtype)


def like(args, seed=11):
    return tuple(weights(a.shape, a.dtype, seed + 2 * i) for i, a in enumerate(args))


def stack(args, n=2, axis=0):
    """Stacks n versions of each argument along a new axis; none moves a relu across 0."""
    return [jnp.stack([a * np.asarray(2.0**-i, a.dtype) for i in range(n)], axis) for a in args]


def loss(f, w):
    """A scalar whose second derivative does not vanish where that of f does."""
    return lambda *args: jnp.sum(w * f(*args) ** 2)


def _all(args):
    return tuple(range(len(args)))


@transformation(0)
def eager(f, args, w):
    return f(*args)


@transformation(0)
def jit(f, args, w):
    return jax.jit(lambda *args: f(*args))(*args)


@transformation(1)
def grad(f, args, w):
    return jax.grad(loss(f, w), _all(args))(*args)


@transformation(1)
def grad_each(f, args, w):
    """One argument at a time: the others are constants."""
    return [jax.grad(loss(f, w), i)(*args) for i in range(len(args))]


@transformation(1)
def jvp(f, args, w):
    return jax.jvp(f, args, like(args))


@transformation(1)
def jvp_each(f, args, w):
    def along(i):
        return jax.jvp(lambda a: f(*args[:i], a, *args[i + 1 :]), (args[i],), (like(args)[i],))

    return [along(i) for i in range(len(args))]


@transformation(1)
def vjp(f, args, w):
    y, pullback = jax.vjp(f, *args)
    return y, pullback(w)


@transformation(1)
def jacfwd(f, args, w):
    return jax.jacfwd(f, _all(args))(*args)


@transformation(1)
def jacrev(f, args, w):
    return jax.jacrev(f, _all(args))(*args)


@transformation(2)
def hessian(f, args, w):
    return jax.hessian(loss(f, w), _all(args))(*args)


@transformation(2)
def grad_of_grad(f, args, w):
    def inner(*args):
        return sum(
            jnp.sum(t * g)
            for t, g in zip(like(args), jax.grad(loss(f, w), _all(args))(*args), strict=True)
        )

    return jax.grad(inner, _all(args))(*args)


@transformation(2)
def jvp_of_grad(f, args, w):
    return jax.jvp(jax.grad(loss(f, w), _all(args)), args, like(args))[1]


@transformation(2)
def jvp_of_jvp(f, args, w):
    return jax.jvp(lambda *args: jax.jvp(f, args, like(args))[1], args, like(args))


@transformation(2)
def grad_of_jvp(f, args, w):
    return jax.grad(lambda *args: jax.jvp(loss(f, w), args, like(args))[1], _all(args))(*args)


@transformation(3)
def grad_of_grad_of_grad(f, args, w):
    first = jax.grad(loss(f, w))
    second = jax.grad(lambda *args: jnp.sum(like(args)[0] * first(*args)))
    return jax.grad(lambda *args: jnp.sum(like(args, 31)[0] * second(*args)))(*args)


@transformation(1)
def linearize(f, args, w):
    y, push = jax.linearize(f, *args)
    return y, push(*like(args))


@transformation(1)
def linear_transpose(f, args, w):
    """Of the part that is linear: the derivative."""
    _, push = jax.linearize(f, *args)
    return jax.linear_transpose(push, *args)(w)


@transformation(1)
def linear_transpose_twice(f, args, w):
    """Transposing a transposed derivative gives the derivative."""
    _, push = jax.linearize(f, *args)
    transposed = jax.linear_transpose(push, *args)
    return jax.linear_transpose(transposed, w)(like(args))


@transformation(0)
def vmap(f, args, w):
    last = min(a.ndim for a in args)
    return [jax.vmap(f, axis)(*stack(args, axis=axis)) for axis in (0, 1, last)]


@transformation(0)
def vmap_mixed_axes(f, args, w):
    axes = [(-1, 0, 1)[i] for i in range(len(args))]
    stacked = [stack((a,), axis=axis)[0] for a, axis in zip(args, axes, strict=True)]
    return jax.vmap(f, axes, out_axes=2)(*stacked)


@transformation(0)
def vmap_nested(f, args, w):
    return jax.vmap(jax.vmap(f, 0), -1, 1)(*stack(stack(args), 3, -1))


@transformation(1)
def vmap_some(f, args, w):
    """Each argument alone is mapped; through the gradient too."""
    results = []
    for i in range(len(args)):
        axes = [0 if j == i else None for j in range(len(args))]
        mapped = [stack([a])[0] if j == i else a for j, a in enumerate(args)]
        results.append(jax.vmap(f, axes)(*mapped))
        results.append(jax.vmap(jax.grad(loss(f, w), _all(args)), axes)(*mapped))
    return results


@transformation(1)
def vmap_of_grad(f, args, w):
    return jax.vmap(jax.grad(loss(f, w), _all(args)), 1)(*stack(args, axis=1))


@transformation(1)
def grad_of_vmap(f, args, w):
    stacked = stack(args)

    def total(*stacked):
        return jnp.sum(w * jax.vmap(f)(*stacked) ** 2)

    return jax.grad(total, _all(args))(*stacked)


@transformation(1)
def vmap_of_jvp(f, args, w):
    return jax.vmap(lambda *args: jax.jvp(f, args, like(args)))(*stack(args))


@transformation(1)
def vmap_of_tangents(f, args, w):
    """Only the tangents, or only the cotangents, are mapped."""
    tangents = stack(like(args))
    push = jax.vmap(lambda *t: jax.jvp(f, args, t)[1])(*tangents)
    return push, jax.vmap(jax.vjp(f, *args)[1])(stack([w])[0])


@transformation(2)
def vmap_of_hessian(f, args, w):
    return jax.vmap(jax.hessian(loss(f, w)))(*stack(args))


def _scan(f, args, w):
    def body(carry, x):
        y = f(carry, *args[1:]) + x
        return y, jnp.sum(y)

    return jax.lax.scan(body, args[0], jnp.stack([w, w / np.asarray(4, w.dtype)]))


@transformation(1)
def scan(f, args, w):
    return _scan(f, args, w)


@transformation(2)
def grad_of_scan(f, args, w):
    return jax.grad(lambda *args: jnp.sum(w * _scan(f, args, w)[0]), _all(args))(*args)


@transformation(1)
def remat(f, args, w):
    return jax.grad(jax.checkpoint(loss(f, w)), _all(args))(*args)


@transformation(2)
def remat_second_order(f, args, w):
    first = jax.grad(jax.checkpoint(loss(f, w)))
    return jax.grad(lambda *args: jnp.sum(like(args)[0] * first(*args)))(*args)


@transformation(1)
def cond(f, args, w):
    def chosen(*args):
        return jnp.sum(w * jax.lax.cond(jnp.sum(args[0]) > 1e4, lambda *a: a[0], f, *args))

    return jax.grad(chosen, _all(args))(*args)


# What does not look at the options of an operation: loops, branches and what is computed again. Of derivatives in all
# arguments, hessian has both kinds, and tests/test_transformations.py has third ones as differences.
WITHOUT_OPTIONS = {
    "cond",
    "remat",
    "remat_second_order",
    "linear_transpose_twice",
    "vmap_of_hessian",
    "jacfwd",
    "jacrev",
    "grad_of_grad_of_grad",
}


def transformations(op: Op, dtype: str) -> tuple[str, ...]:
    """Names of those that are applied to an operation in a dtype.

    Rules do not look at the dtype, except that sums of 16 bits have one of their own: bfloat16 and float32 are all that
    they tell apart. In the others, the kernels of either direction are what is left to see. An operation with options
    has the rules of the one without options, which has all transformations in both: here one of the two is enough.
    """
    told_apart = [d for d in ("bfloat16", "float32") if d in op.dtypes]
    if op.name in jaxnorm.__all__ and dtype in told_apart:
        return tuple(TRANSFORMATIONS)
    if dtype in told_apart[:1]:
        return tuple(n for n in TRANSFORMATIONS if n not in WITHOUT_OPTIONS)
    return ("eager", "grad", "jvp", "vmap", "vmap_of_grad", "grad_of_grad")


def _run(f, names, args, w):
    """Results by name, of one program: many small ones take several times as long to trace and to compile."""
    jitted = jax.jit(
        lambda args, w: {n: TRANSFORMATIONS[n].function(f, args, w) for n in names if n != "eager"}
    )
    return jitted(args, w)


def results(op: str):
    """Yields (dtype, name, jaxnorm's results in dtype, the reference's in float64), the results as flat lists."""
    spec = OPS[op]
    shape = spec.shapes[0]
    names = {name: None for dtype in spec.dtypes for name in transformations(spec, dtype)}
    expected = _run(spec.reference, names, spec.arguments("float64"), weights(shape, "float64"))
    expected["eager"] = expected["jit"]
    for dtype in spec.dtypes:
        args, w = spec.arguments(dtype), weights(shape, dtype)
        actual = _run(spec.function, transformations(spec, dtype), args, w)
        actual["eager"] = TRANSFORMATIONS["eager"].function(spec.function, args, w)
        for name in transformations(spec, dtype):
            assert jax.tree.structure(actual[name]) == jax.tree.structure(expected[name]), name
            yield dtype, name, jax.tree.leaves(actual[name]), jax.tree.leaves(expected[name])


# ---- what a program consists of ----


def count_primitives(jaxpr, counts=None) -> dict[str, int]:
    """Primitives of a jaxpr and of all jaxprs inside it, by name."""
    counts = {} if counts is None else counts
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        counts[eqn.primitive.name] = counts.get(eqn.primitive.name, 0) + 1
        for parameter in jax.tree.leaves(
            list(eqn.params.values()),
            is_leaf=lambda p: isinstance(p, (jex_core.Jaxpr, jex_core.ClosedJaxpr)),
        ):
            if isinstance(parameter, (jex_core.Jaxpr, jex_core.ClosedJaxpr)):
                count_primitives(parameter, counts)
    return counts


def jaxnorm_primitives(function, *args) -> dict[str, int]:
    counts = count_primitives(jax.make_jaxpr(function)(*args))
    return {name: n for name, n in counts.items() if name.startswith("jaxnorm_")}
