"""batch_norm and batch_norm_inference against the float64 oracle: shapes, operands, special values, gradients."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import suite
from jax.interpreters import partial_eval as pe
from oracle import DTYPES, acc_of
from suite import CPU, in_turn, needs_cpu, rand, value_and_vjp

import jaxnorm

dtypes = pytest.mark.parametrize("dtype", DTYPES)
inf, nan = np.inf, np.nan


def features_of(x, axis):
    return tuple(x.shape[a] for a in sorted(a % x.ndim for a in np.atleast_1d(axis)))


def formula(
    x,
    scale=None,
    bias=None,
    *,
    residual=None,
    axis=-1,
    epsilon=1e-5,
    activation=None,
    mask=None,
    mean=None,
    var=None,
):
    """XLA's two-pass formula in the same dtypes: what accuracy is compared with."""
    features = tuple(a % x.ndim for a in np.atleast_1d(axis))
    reduced = tuple(i for i in range(x.ndim) if i not in features)
    acc = acc_of(x.dtype)
    z = x.astype(acc)
    if mean is None:
        mean = jnp.mean(z, reduced, where=mask)
        var = jnp.mean(jnp.square(z - jnp.expand_dims(mean, reduced)), reduced, where=mask)
    z = z - jnp.expand_dims(mean, reduced).astype(acc)
    z = z * jax.lax.rsqrt(jnp.expand_dims(var, reduced).astype(acc) + np.asarray(epsilon, acc))
    if scale is not None:
        z = z * jnp.expand_dims(scale, reduced).astype(acc)
    if bias is not None:
        z = z + jnp.expand_dims(bias, reduced).astype(acc)
    if residual is not None:
        z = z + residual.astype(acc)
    y = z.astype(x.dtype)
    return jnp.where(y > 0, y, jnp.zeros((), y.dtype)) if activation else y, mean, var


def _first(y, *moments):
    return y, moments


def check(
    x,
    *,
    parameters=None,
    residual=False,
    relu=False,
    statistics=False,
    seed=5,
    floor=16.0,
    implementation=None,
    **options,
):
    """Results and all gradients against the oracle, errors next to XLA's.

    Args:
      x: array.
      parameters: dtype of scale and bias; None for none of them.
      residual: whether to add one.
      relu: whether there is one.
      statistics: whether mean and var have cotangents too.
      seed: of all else.
      floor: of the gradients.
      implementation: of jaxnorm's call.
      **options: of the call.
    """
    dtype, axis = x.dtype.name, options.get("axis", -1)
    acc, features = acc_of(dtype), features_of(x, axis)
    given = {"x": x}
    if residual:
        given["residual"] = rand(x.shape, dtype, seed + 1)
    if parameters is not None:
        given["scale"] = rand(features, parameters, seed + 2, 1.0)
        given["bias"] = rand(features, parameters, seed + 3, 1.0)
    names = list(given)
    activation = "relu" if relu else None
    dy = rand(x.shape, dtype, seed + 4, 1.0)
    dmean, dvar = (rand(features, acc, seed + 5 + i, 1.0 if statistics else 0.0) for i in range(2))

    def run(function, **more):
        def call(*args):
            args = dict(zip(names, args, strict=True))
            return function(**args, **options, activation=activation, **more)

        def both(*args):
            if statistics:
                out, pullback = jax.vjp(call, *args)
                return out, pullback((dy, dmean, dvar))
            y, pullback, moments = jax.vjp(lambda *a: _first(*call(*a)), *args, has_aux=True)
            return (y, *moments), pullback(dy)

        return both

    ours, xlas = run(jaxnorm.batch_norm, implementation=implementation), run(formula)
    results = jax.jit(lambda *args: (ours(*args), xlas(*args)))(*given.values())
    ((y, mean, var), bars), ((xla_y, xla_mean, xla_var), xla_bars) = results
    expected = oracle.batch_norm(**given, relu=relu, **options)
    # The sum with a residual or a bias may cancel: an element is as exact as its terms are large.
    exact = oracle.batch_norm(**given, **options)[0]
    size = np.abs(exact) + np.nanmean(np.where(np.isfinite(exact), np.abs(exact), nan))
    oracle.assert_close(y, expected[0], dtype, xla_y, size=np.where(np.isfinite(size), size, 1))
    spread = np.abs(expected[1]) + np.sqrt(expected[2])
    # Kernels sum distances from one of the feature's elements, which may lie some deviations from the mean.
    size = np.where(spread > 0, spread, 1)
    oracle.assert_close(mean, expected[1], acc, xla_mean, floor=8, size=size)
    oracle.assert_close(var, expected[2], acc, xla_var, floor=8)

    options.pop("implementation", None)
    kw = dict(options, scale=given.get("scale"), positive=oracle.f64(y) > 0 if relu else None)
    kw |= {"dmean": dmean, "dvar": dvar} if statistics else {}
    wanted = oracle.batch_norm_vjp(x, dy, **kw)
    sizes = oracle.batch_norm_vjp(x, dy, **kw, sizes=True)
    # Many terms, of which each has the error of its feature's statistics.
    sizes = [
        np.where(np.isfinite(s), s, 0) + np.nanmean(np.where(np.isfinite(s), s, 0)) for s in sizes
    ]
    index = {"x": 0, "scale": 1, "bias": 2, "residual": 3}
    for name, bar, xla_bar in zip(names, bars, xla_bars, strict=True):
        i = index[name]
        bar_dtype = parameters if i in (1, 2) else dtype
        # Signs of tiny elements may differ from XLA's, and gradients with them.
        xla_bar = None if relu else xla_bar
        # Arithmetic is no finer than `acc`, whatever the gradient's own dtype is.
        units = floor * max(1.0, oracle.UNIT[acc] / oracle.UNIT[bar_dtype])
        oracle.assert_close(bar, wanted[i], bar_dtype, xla_bar, units, sizes[i])


# ---- shapes ----

# Channels last, first and between, of each activation; where the number of columns or the length of a run changes what
# a kernel does, and both neighbours.
ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 130, 1000)
COLUMNS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2049)
RUNS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 49, 63, 64, 65, 300, 4095, 4096, 4097, 9000)


@pytest.mark.parametrize("columns", COLUMNS)
def test_columns(columns):
    check(rand((37, columns)), parameters="float32", residual=True, relu=True)


@pytest.mark.parametrize("rows", ROWS)
def test_rows(rows):
    check(rand((rows, 40)), parameters="float32", relu=True, statistics=True, floor=32)


@pytest.mark.parametrize("run", RUNS)
def test_runs(run):
    """Channels first: neighbouring elements belong to one feature."""
    check(rand((3, 5, run)), axis=1, parameters="float32", residual=True, relu=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((33, 7), -1), ((20, 520), -1), ((3, 5, 7, 9), 1), ((4, 6, 5, 5), 1), ((2, 3, 70, 70), 1)],
)
def test_dtypes(dtype, shape, axis):
    check(rand(shape, dtype), axis=axis, parameters=acc_of(dtype), residual=True, relu=True)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((70001, 3), 1),
        ((5000, 33), 1),
        ((8, 3, 130, 130), 1),
        ((300, 40, 20), 1),
        ((1, 2, 500, 500), 1),
        ((150, 2100), 1),
        ((2, 100001), 1),
        ((70, 3, 4, 1031), 2),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_many_pieces(shape, axis, masked):
    """Reductions in more parts than one, in every way that they are cut."""
    mask = _mask(shape) if masked else None
    check(rand(shape), axis=axis, parameters="float32", relu=True, mask=mask, epsilon=0.5, floor=64)


@pytest.mark.parametrize("shape", [(3,), (5, 4), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 4, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_each_axis(shape, masked):
    mask = _mask(shape) if masked and len(shape) > 1 else None
    for axis in range(-len(shape), len(shape)):
        check(rand(shape), axis=axis, parameters="float32", residual=True, mask=mask, floor=64)


@pytest.mark.parametrize("axis", [(1, 2), (-1, -2), (0, 1), (1, 2, 3), (0, 2), (1, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_several_axes(axis, masked):
    """Statistics of each activation; features that are not neighbours have the formula."""
    x = rand((6, 4, 3, 5))
    mask = _mask(x.shape, keep=0.8) if masked else None
    check(x, axis=axis, parameters="float32", relu=True, mask=mask, floor=64)
    if CPU.available and axis in ((0, 2), (1, 3)):
        with pytest.raises(ValueError, match=r"^batch_norm: implementation must be"):
            jax.jit(lambda x: jaxnorm.batch_norm(x, axis=axis, implementation="kernel"))(x)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 3), (0, 0), (3, 0, 20)])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_empty(shape, axis, activation):
    """Empty arrays give empty arrays, features without elements NaN, and their parameters gradients of 0."""
    x, p = jnp.zeros(shape, "float32"), jnp.ones((shape[axis],), "float32")

    @jax.jit
    def both(x, p):
        call = functools.partial(jaxnorm.batch_norm, axis=axis, activation=activation)
        out, pullback = jax.vjp(call, x, p, p)
        return out, pullback(out), jax.jvp(call, (x, p, p), (x, p, p))[1][0]

    (y, mean, var), (x_bar, scale_bar, bias_bar), y_dot = both(x, p)
    assert y.shape == x_bar.shape == y_dot.shape == shape
    for value in (mean, var):
        assert value.shape == p.shape
        assert np.isnan(value).all() or np.size(x)
    np.testing.assert_array_equal(bias_bar, np.zeros(p.shape))
    np.testing.assert_array_equal(scale_bar, np.zeros(p.shape))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 1), (1, 5), (1, 5, 1), (1, 1, 30)])
def test_size_one(shape):
    for axis in range(len(shape)):
        check(rand(shape), axis=axis, parameters="float32", epsilon=0.5, relu=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(7, 33), (7, 5, 41)])
def test_misaligned_base(dtype, shape):
    """A slice inside jit starts in the middle of a vector."""
    base, ct = rand(shape, dtype), rand((shape[0] - 1, *shape[1:]), dtype, 3)

    @jax.jit
    def run(base, ct):
        call = functools.partial(jaxnorm.batch_norm, axis=1, activation="relu")
        y, pullback, _ = jax.vjp(lambda x: (call(x)[0], 0), base[1:], has_aux=True)
        return y, pullback(ct)[0]

    y, bar = run(base, ct)
    x = base[1:]
    expected = oracle.batch_norm(x, axis=1, relu=True)[0]
    oracle.assert_close(y, expected, dtype, size=np.abs(expected) + 1)
    kw = {"axis": 1, "positive": oracle.f64(y) > 0}
    sizes = oracle.batch_norm_vjp(x, ct, **kw, sizes=True)[0]
    oracle.assert_close(bar, oracle.batch_norm_vjp(x, ct, **kw)[0], dtype, size=sizes, floor=16)


# ---- operands ----


@pytest.mark.parametrize("parameters", DTYPES)
@dtypes
def test_mixed_dtypes(dtype, parameters):
    """The result has x's dtype, each gradient that of its argument, statistics that of the arithmetic."""
    check(rand((40, 65), dtype), parameters=parameters, residual=True, floor=32)


@pytest.mark.parametrize("operands", list(itertools.product((False, True), repeat=5)))
@pytest.mark.parametrize("axis", [-1, 1])
def test_optional_operands(operands, axis):
    """Every subset of scale, bias, residual, mask and ReLU."""
    x, given = rand((6, 5, 33)), {}
    names = ("scale", "bias", "residual", "mask")
    for present, name in zip(operands, names, strict=False):
        if present:
            value = {"residual": rand(x.shape, seed=3), "mask": _mask(x.shape)}
            given[name] = value.get(name, rand(features_of(x, axis), seed=4 + len(name)))
    arguments = [n for n in given if n != "mask"]
    dy, activation = rand(x.shape, seed=8), "relu" if operands[-1] else None

    def call(x, *values):
        kw = dict(given, **dict(zip(arguments, values, strict=True)))
        return jaxnorm.batch_norm(x, axis=axis, activation=activation, **kw)[0]

    y, bars = value_and_vjp(call)((x, *(given[n] for n in arguments)), dy)
    expected = oracle.batch_norm(x, axis=axis, relu=operands[-1], **given)[0]
    oracle.assert_close(y, expected, "float32", floor=16, size=np.abs(expected) + 1)
    kw = {n: given[n] for n in ("scale", "mask") if n in given} | {"axis": axis}
    kw["positive"] = np.asarray(y) > 0 if operands[-1] else None
    wanted = oracle.batch_norm_vjp(x, dy, **kw)
    sizes = oracle.batch_norm_vjp(x, dy, **kw, sizes=True)
    index = {"scale": 1, "bias": 2, "residual": 3}
    for name, bar in zip(("x", *arguments), bars, strict=True):
        i = index.get(name, 0)
        size = sizes[i] + np.mean(sizes[i])
        oracle.assert_close(bar, wanted[i], "float32", size=size, floor=32)


@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 1e-3, 10])
def test_epsilon(epsilon):
    check(rand((40, 9)), epsilon=epsilon, parameters="float32")


def test_numpy_operands():
    """NumPy arrays are arrays too."""
    x, scale = np.float32([[1, 2], [3, 5], [4, 4]]), np.float32([1, 2])
    mask = np.array([[True], [False], [True]])
    y, mean, _ = jaxnorm.batch_norm(x, scale, mask=mask)
    expected = oracle.batch_norm(x, scale, mask=mask)
    oracle.assert_close(y, expected[0], "float32")
    oracle.assert_close(mean, expected[1], "float32")


@dtypes
def test_residual_is_not_rounded_before_the_relu(dtype):
    """The sum is rounded once: a residual that cancels leaves what is exact of the normalised value."""
    x = rand((64, 16), dtype)
    first = jaxnorm.batch_norm(x)[0]
    y = jaxnorm.batch_norm(x, residual=-first)[0]
    expected = oracle.batch_norm(x, residual=-first)[0]
    assert np.abs(expected).max() > 0
    unit = 1e-6 if dtype != "float64" else 1e-14
    np.testing.assert_allclose(oracle.f64(y), expected, atol=unit, rtol=2 * oracle.UNIT[dtype])


# ---- ReLU ----


@dtypes
@pytest.mark.parametrize(("shape", "axis"), [((5, 6, 13), -1), ((5, 6, 13), 1), ((4, 3, 7, 7), 1)])
def test_bits_are_packbits(dtype, shape, axis):
    """What backward keeps: little-endian bits along the last axis of where y > 0; unused bits are 0."""
    x = rand(shape, dtype)
    call = functools.partial(jaxnorm.batch_norm, axis=axis, activation="relu")

    @jax.jit
    def run(x):
        (y, _, _), pullback = jax.vjp(call, x)
        (bits,) = [a for a in jax.tree.leaves(pullback) if a.dtype == jnp.uint8]
        return y, bits, jaxnorm.batch_norm(x, axis=axis)[0]

    y, bits, plain = run(x)
    expected = np.packbits(oracle.f64(y) > 0, axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(oracle.f64(y), np.maximum(oracle.f64(plain), 0))


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_derivative_of_relu_is_selected(implementation, axis):
    """1 where y > 0, and 0 at 0 and at NaN, whatever the cotangent is there."""
    x = rand((8, 4, 24))
    args = (jnp.zeros(x.shape[axis]), jnp.ones(x.shape[axis]))
    residual = jnp.asarray(np.resize([1.0, -1.0, 0.0, nan, inf, -inf], x.shape), "float32")

    def f(residual):
        return jaxnorm.batch_norm_inference(
            x * 0,
            *args,
            axis=axis,
            residual=residual,
            activation="relu",
            implementation=implementation,
        )

    run = value_and_vjp(f)
    for value in (inf, -inf, nan, 2.0):
        y, (bar,) = run((residual,), jnp.full_like(x, value))
        np.testing.assert_array_equal(y, np.resize([1.0, 0, 0, nan, inf, 0], x.shape))
        positive = np.resize([True, False, False, False, True, False], x.shape)
        np.testing.assert_array_equal(bar, np.where(positive, value, 0))


# ---- mask ----


def _mask(shape, seed=7, keep=0.6):
    """Random; the first two elements of the first axis are kept, so that every feature has some."""
    mask = np.random.default_rng(seed).random(shape) < keep
    mask[:2] = True
    return jnp.asarray(mask)


FULL = (4, 3, 5)
SMALLER = [
    tuple(n if keep else 1 for n, keep in zip(FULL[start:], kept, strict=True))
    for start in range(4)
    for kept in itertools.product((True, False), repeat=3 - start)
]


@pytest.mark.parametrize("axis", [-1, 1, 0, (1, 2), (0, 1)])
def test_broadcast_mask(axis):
    """All broadcastable shapes."""
    x, masks = rand(FULL, offset=2.0), []
    for shape in SMALLER:
        masks.append(np.asarray(np.random.default_rng(3).random(shape) < 0.7))
        masks[-1][(0,) * len(shape)] = True
    call = functools.partial(jaxnorm.batch_norm, axis=axis, epsilon=0.5)
    results = jax.jit(lambda x, masks: [call(x, mask=mask) for mask in masks])(x, masks)
    for mask, got in zip(masks, results, strict=True):
        want = oracle.batch_norm(x, axis=axis, mask=mask, epsilon=0.5)
        for a, b in zip(got, want, strict=True):
            oracle.assert_close(a, b, "float32", floor=32)


@dtypes
@pytest.mark.parametrize(("shape", "axis"), [((80, 9), -1), ((6, 5, 70), 1)])
def test_mask(dtype, shape, axis):
    check(rand(shape, dtype), axis=axis, mask=_mask(shape), statistics=True, floor=32)


@pytest.mark.parametrize(("shape", "axis"), [((40, 3), -1), ((5, 3, 40), 1)])
def test_masked_elements_do_not_count(shape, axis):
    """NaN at a masked element makes that element NaN and no other, in the gradient too."""
    mask = np.ones(shape, bool)
    mask[2, 1] = False
    x = np.array(rand(shape))
    at = (2, 1) if axis == -1 else (2, 1, 5)
    x[at] = nan

    @jax.jit
    def both(x):
        (y, mean, var), pullback = jax.vjp(
            lambda x: jaxnorm.batch_norm(x, axis=axis, mask=jnp.asarray(mask)), x
        )
        return y, mean, var, pullback((jnp.ones_like(y).at[at].set(0), mean * 0, var * 0))[0]

    y, mean, var, bar = map(np.asarray, both(jnp.asarray(x)))
    assert np.isfinite(mean).all()
    assert np.isfinite(var).all()
    assert np.isnan(y[at])
    assert np.isnan(y).sum() == 1
    # The sum of dy * xhat meets the NaN with a cotangent of 0: that feature's scale would have no gradient.
    assert np.isfinite(np.delete(bar, 1, 1)).all()


@dtypes
@pytest.mark.parametrize("axis", [-1, 1])
def test_feature_of_which_nothing_counts(dtype, axis):
    """Its statistics are NaN, as in Flax; other features do not notice."""
    x, mask = rand((6, 3, 20), dtype), np.ones((6, 3, 20), bool)
    index = (slice(None),) * (axis % 3) + (1,)
    mask[index] = False
    y, mean, var = map(oracle.f64, jaxnorm.batch_norm(x, axis=axis, mask=jnp.asarray(mask)))
    assert np.isnan(mean[1])
    assert np.isnan(var[1])
    assert np.isnan(y[index]).all()
    assert np.isfinite(np.delete(y, 1, axis)).all()


# ---- special values ----


@functools.cache
def _with_gradient(axis):
    """Jitted x -> (y, mean, var, cotangent of x), compiled once for arrays of one shape and dtype."""

    @jax.jit
    def run(x):
        (y, mean, var), pullback = jax.vjp(lambda x: jaxnorm.batch_norm(x, axis=axis), x)
        return y, mean, var, pullback((y, mean * 0, var * 0))[0]

    return run


@dtypes
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize(
    ("shape", "axis"), [((70, 20), 1), ((3, 20, 7), 1), ((3, 20, 40), 1), ((1, 3, 5000), 1)]
)
def test_value_that_is_not_finite(dtype, value, shape, axis):
    """NaN or an infinity makes its feature NaN, and no other, forward and backward."""
    x = np.array(rand(shape, dtype))
    x[0, 2, ...] = value
    y, mean, var, bar = _with_gradient(axis)(jnp.asarray(x))
    for array in (y, bar):
        isnan = np.isnan(oracle.f64(array))
        assert isnan[:, 2].all()
        assert not np.delete(isnan, 2, 1).any()
    assert np.isnan(var[2])
    assert not np.isfinite(mean[2])
    assert np.isfinite(np.delete(mean, 2)).all()


@in_turn(
    dtype=DTYPES,
    value=[0.0, 7.0, -1e4, 3e4, 1 / 3, 3333.3333],
    shape=[(1000, 3), (7, 3, 50), (2, 3, 9000), (100000, 20)],
    implementation=[None, "xla"],
)
def test_constant_feature(dtype, value, shape, implementation):
    """One value, n times: result 0, whatever the value and n are, and variance 0; the formula has rounding errors."""
    x = jnp.full(shape, value, dtype)
    y, mean, var = jaxnorm.batch_norm(x, axis=1, implementation=implementation)
    unit = 0 if implementation is None and CPU.available else 2 * oracle.UNIT[acc_of(dtype)]
    var = np.asarray(var)
    assert (var >= 0).all()
    assert (var <= np.square(unit * value)).all()
    np.testing.assert_array_equal(oracle.f64(y), 0)
    np.testing.assert_array_equal(mean, oracle.f64(x).flat[0])


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [("bfloat16", 1e4), ("float16", 1e4), ("float32", 1e4), ("float32", 1e6), ("float64", 1e12)],
)
@pytest.mark.parametrize(
    ("shape", "axis"), [((1000, 5), 1), ((20, 5, 49), 1), ((40000, 5), 1), ((3, 5, 9000), 1)]
)
def test_offset(dtype, offset, shape, axis):
    """The variance is that of the deviations, however far from 0 they lie."""
    run = jax.jit(functools.partial(jaxnorm.batch_norm, axis=axis))
    for sign in (1, -1):
        x = rand(shape, dtype, offset=sign * offset, scale=20.0)
        got = run(x)
        want = oracle.batch_norm(x, axis=axis)
        oracle.assert_close(got[2], want[2], acc_of(dtype), floor=64)
        # The mean is rounded, so a normalised value has the error of x's size.
        unit = oracle.UNIT[acc_of(dtype)] * offset / np.sqrt(want[2].min())
        error = 4 * unit + 4 * oracle.UNIT[dtype] * np.abs(want[0]).max()
        np.testing.assert_allclose(oracle.f64(got[0]), want[0], atol=error)


@pytest.mark.parametrize(("shape", "axis"), [((10_000_000, 2), 1), ((10, 2, 1000, 1000), 1)])
def test_ten_million_elements(shape, axis):
    """Rounding errors do not grow with the number of elements; a drift along the batch is part of the variance."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, np.float32) + np.float32(100)
    x += np.linspace(0, 10, shape[0], dtype=np.float32).reshape(-1, *(1,) * (len(shape) - 1))
    reduced = tuple(i for i in range(len(shape)) if i != axis)
    _, mean, var = jax.jit(functools.partial(jaxnorm.batch_norm, axis=axis))(x)
    exact = x.mean(reduced, dtype=np.float64)
    np.testing.assert_allclose(mean, exact, rtol=1e-6)
    spread = np.square(x - exact.reshape(-1, *(1,) * (len(shape) - 1 - axis))).mean(reduced)
    np.testing.assert_allclose(var, spread, rtol=2e-5)


@dtypes
def test_no_less_accurate_than_xla(dtype):
    """Error against float64 at most twice that of XLA's two-pass formula."""
    for shape, axis in (((256, 33), 1), ((8, 5, 400), 1)):
        both = [functools.partial(f, axis=axis) for f in (jaxnorm.batch_norm, formula)]
        run = jax.jit(lambda x, both=both: [f(x)[0] for f in both])
        for scale, offset in ((1.0, 0.0), (10.0, 0.0), (3.0, 300.0), (0.01, 0.0)):
            x = rand(shape, dtype, scale=scale, offset=offset)
            y, xla = run(x)
            oracle.assert_close(y, oracle.batch_norm(x, axis=axis)[0], dtype, xla, floor=1.5)


@dtypes
def test_subnormal(dtype):
    """Inputs below the smallest normal number count as 0 at most; nothing becomes NaN."""
    x = jnp.full((9, 4), oracle.TINY[dtype] / 4, dtype)
    y = oracle.f64(jaxnorm.batch_norm(x)[0])
    assert (np.abs(y) <= np.abs(oracle.f64(x)) * 1.01e3).all()


# ---- statistics as results ----


@dtypes
def test_statistics(dtype):
    """Biased, in the arithmetic's dtype, and right next to a ReLU and a residual, which have no part in them."""
    x = rand((50, 7), dtype)
    _, mean, var = jaxnorm.batch_norm(x, residual=x, activation="relu")
    np.testing.assert_allclose(mean, oracle.f64(x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(var, oracle.f64(x).var(0), rtol=1e-5)
    assert mean.dtype == var.dtype == acc_of(dtype)


def test_gradient_of_statistics_alone():
    """A loss of mean and var: no kernel but statistics, and the gradient is that of the formula."""
    x, w = rand((20, 3, 5)), rand((3,), seed=1)

    def loss(function):
        def of(x):
            _, mean, var = function(x, axis=1)
            return jnp.sum(w * mean + var**2)

        return of

    both = [jax.grad(loss(f)) for f in (jaxnorm.batch_norm, formula)]
    got, want = jax.jit(lambda x: [f(x) for f in both])(x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    for which in (1, 2):
        f = lambda x, which=which: jnp.sum(jaxnorm.batch_norm(x, axis=1)[which] ** 2)  # noqa: E731
        g = lambda x, which=which: jnp.sum(formula(x, axis=1)[which] ** 2)  # noqa: E731
        got, want = jax.jit(lambda x, f=f, g=g: (jax.grad(f)(x), jax.grad(g)(x)))(x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


# ---- determinism ----


@pytest.mark.parametrize(
    ("shape", "axis"), [((9000, 33), 1), ((64, 5, 31, 31), 1), ((2, 3, 40000), 1)]
)
def test_same_bits_every_time(shape, axis):
    x, scale = rand(shape), rand((shape[axis],), seed=1)

    @jax.jit
    def f(x, scale):
        out, pullback = jax.vjp(
            functools.partial(jaxnorm.batch_norm, axis=axis, activation="relu"), x, scale
        )
        return out, pullback(out)

    first = f(x, scale)
    for _ in range(5):
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(f(x, scale)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_implementations_agree():
    x, scale, bias = rand((40, 129)), rand((129,), seed=1), rand((129,), seed=2)
    for implementation in (None, "kernel", "xla"):
        if implementation == "kernel" and not CPU.available:
            continue  # tests/test_errors.py: it is refused then
        check(x, parameters="float32", residual=True, relu=True, implementation=implementation)
        y = jaxnorm.batch_norm_inference(
            x, scale, scale**2, scale, bias, implementation=implementation
        )
        expected = oracle.batch_norm(x, scale, bias, mean=scale, var=scale**2)[0]
        oracle.assert_close(y, expected, "float32", floor=16, size=np.abs(expected) + 1)


# ---- inference ----


@dtypes
@pytest.mark.parametrize(("shape", "axis"), [((30, 17), -1), ((4, 5, 6, 7), 1), ((3, 5, 70), 1)])
@pytest.mark.parametrize("relu", [False, True])
def test_inference(dtype, shape, axis, relu):
    """Value and all six gradients."""
    x, acc = rand(shape, dtype), acc_of(dtype)
    c = (shape[axis],)
    mean, scale, bias = (rand(c, acc, i, 1.0) for i in (1, 2, 3))
    var, residual = jnp.square(rand(c, acc, 4, 1.0)) + np.asarray(0.1, acc), rand(shape, dtype, 5)
    args = (x, mean, var, scale, bias, residual)
    dy, activation = rand(shape, dtype, 6, 1.0), "relu" if relu else None

    def ours(x, mean, var, scale, bias, residual):
        return jaxnorm.batch_norm_inference(
            x, mean, var, scale, bias, residual=residual, axis=axis, activation=activation
        )

    def exact(x, mean, var, scale, bias, residual):
        kw = {"axis": axis, "activation": activation, "residual": residual}
        return formula(x, scale, bias, mean=mean, var=var, **kw)[0]

    value = jax.jit(ours)(*args)
    kw = {"residual": residual, "axis": axis, "mean": mean, "var": var}
    expected = oracle.batch_norm(x, scale, bias, relu=relu, **kw)[0]
    same_sign = (oracle.f64(value) > 0) == (expected > 0) if relu else np.full(shape, True)
    dy = jnp.where(same_sign, dy, jnp.zeros((), dtype))

    @jax.jit
    def both(args, dy):
        y, pullback = jax.vjp(ours, *args)
        wide = (a.astype("float64") for a in args)
        return y, pullback(dy), jax.vjp(exact, *wide)[1](dy.astype("float64"))

    y, bars, wide_bars = both(args, dy)
    for got in (value, y):
        oracle.assert_close(got, expected, dtype, floor=16, size=np.abs(expected) + 1)
    for got, want in zip(bars, wide_bars, strict=True):
        want = oracle.f64(want)
        name = got.dtype.name
        oracle.assert_close(got, want, name, floor=64, size=np.max(np.abs(want)))


def test_inference_keeps_what_is_needed():
    """Of a frozen layer whose x alone is differentiated: the variance, the scale and one bit per element."""
    x, c = rand((4, 9)), jnp.ones((9,), "float32")
    f = lambda x: jaxnorm.batch_norm_inference(x, c, c, c, c, activation="relu")  # noqa: E731
    assert suite.jaxnorm_primitives(jax.grad(lambda x: jnp.sum(f(x))), x) == {
        "jaxnorm_batch_norm_fwd": 1,
        "jaxnorm_batch_norm_dx": 1,
    }
    _, pullback = jax.vjp(f, x)
    kept = sorted((a.dtype.name, a.shape) for a in jax.tree.leaves(pullback))
    assert kept == [("float32", (1, 9)), ("float32", (1, 9)), ("uint8", (4, 2))]


def test_inference_of_own_statistics_is_training():
    x, scale = rand((40, 6, 5), "bfloat16"), rand((6,), seed=1)
    y, mean, var = jaxnorm.batch_norm(x, scale, axis=1)
    again = jaxnorm.batch_norm_inference(x, mean, var, scale, axis=1)
    np.testing.assert_array_equal(oracle.f64(y), oracle.f64(again))


# ---- programs ----


def _eqns(program, name):
    """Calls of a primitive, those inside other equations too."""
    found = [e for e in program.eqns if e.primitive.name == f"jaxnorm_batch_norm_{name}"]
    for eqn in program.eqns:
        for parameter in eqn.params.values():
            found += _eqns(parameter, name) if hasattr(parameter, "eqns") else []
    return found


def test_backward_has_what_is_needed_and_no_more():
    """One call of each kind for every subset of the arguments, whose results are exactly their cotangents."""
    x, scale, bias, residual = rand((4, 9)), rand((9,)), rand((9,)), rand((4, 9))

    def total(x, scale, bias, residual):
        y = jaxnorm.batch_norm(x, scale, bias, residual=residual, activation="relu")[0]
        return jnp.sum(jnp.sin(y))

    for size in range(1, 5):
        for argnums in itertools.combinations(range(4), size):
            program = jax.make_jaxpr(jax.grad(total, argnums))(x, scale, bias, residual)
            sums, dx = _eqns(program, "sums"), _eqns(program, "dx")
            assert len(sums) == bool({0, 1, 2} & {*argnums})
            assert len(dx) == bool({0, 3} & {*argnums})
            if sums and 0 not in argnums:
                assert len(sums[0].outvars) == len({1, 2} & {*argnums})
            if dx:
                assert len(dx[0].outvars) == len({0, 3} & {*argnums})
            if dx and 0 not in argnums:
                assert dx[0].params["names"] == ("dy", "bits")


def test_unused_results_are_dropped():
    """Of a program that computes all gradients and uses one, dead code elimination leaves what it takes."""
    x, scale, bias = rand((4, 9)), rand((9,)), rand((9,))

    def everything(x, scale, bias, residual):
        def total(*a):
            y, mean, var = jaxnorm.batch_norm(*a[:3], residual=a[3], activation="relu")
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean) + jnp.sum(var)

        return jax.grad(total, (0, 1, 2, 3))(x, scale, bias, residual)

    wanted = {0: (2, 1), 1: (1, 0), 2: (1, 0), 3: (0, 1)}  # results of sums and of dx
    for i, (sums, dx) in wanted.items():
        program = jax.make_jaxpr(lambda *a, i=i: jax.jit(everything)(*a)[i])(x, scale, bias, x)
        jaxpr, _ = pe.dce_jaxpr(program.jaxpr, [True])
        (inner,) = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
        found = inner.params["jaxpr"]
        assert [len(e.outvars) for e in _eqns(found, "sums")] == [sums] * bool(sums)
        assert [len(e.outvars) for e in _eqns(found, "dx")] == [dx] * bool(dx)
        (forward,) = _eqns(found, "fwd")
        assert len(forward.outvars) == 2


def test_tangents_of_statistics_cost_nothing_when_unused():
    """Forward mode computes them with the rest, and drops them; reverse mode has no operand for them."""
    x = rand((4, 9))

    def y_dot(x):
        return jax.jit(lambda x: jax.jvp(jaxnorm.batch_norm, (x,), (x,))[1][0])(x)

    jaxpr, _ = pe.dce_jaxpr(jax.make_jaxpr(y_dot)(x).jaxpr, [True])
    (inner,) = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    (first,) = _eqns(inner.params["jaxpr"], "jvp_in")
    assert first.params["results"] == ("y_dot", "bias_dot", "scale_dot")
    program = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jaxnorm.batch_norm(x)[0] ** 2)))(x)
    (dx,) = _eqns(program, "dx")
    assert not {"dmean", "dvar"} & {*dx.params["names"]}


def test_no_bits_without_a_derivative():
    x = rand((4, 9))
    program = jax.make_jaxpr(lambda x: jaxnorm.batch_norm(x, activation="relu"))(x)
    assert "u8[" not in str(program)
    (forward,) = _eqns(jax.make_jaxpr(jax.grad(_total))(x), "fwd")
    assert forward.params["results"] == ("y", "bits")

    # The tangent of the mean alone leaves forward without them.
    def mean_dot(x):
        call = functools.partial(jaxnorm.batch_norm, activation="relu")
        return jax.jit(lambda x: jax.jvp(call, (x,), (x,))[0][0])(x)

    jaxpr, _ = pe.dce_jaxpr(jax.make_jaxpr(mean_dot)(x).jaxpr, [True])
    (inner,) = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    (forward,) = _eqns(inner.params["jaxpr"], "fwd")
    assert forward.params["results"] == ("y",)


def _total(x):
    return jnp.sum(jaxnorm.batch_norm(x, activation="relu")[0])


@dtypes
def test_residuals(dtype):
    """x, one bit per element, two numbers per feature, and the scale: neither y nor a wider copy of x."""
    x, scale = rand((32, 8, 8, 24), dtype), rand((24,), acc_of(dtype))

    def f(x, scale, bias, residual):
        return jaxnorm.batch_norm(x, scale, bias, residual=residual, activation="relu")

    _, pullback = jax.vjp(f, x, scale, scale, rand(x.shape, dtype, 1))
    kept = sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(pullback))
    per_feature = ((1, 1, 1, 24), acc_of(dtype))
    assert kept == sorted([(x.shape, dtype), ((32, 8, 8, 3), "uint8"), *[per_feature] * 3])


# ---- vmap ----

MAPPED = [m for m in itertools.product((None, 0), repeat=5) if any(d == 0 for d in m)]


@functools.cache
def results_and_gradients(axis):
    """(function of x, scale, bias, residual and mask, the same jitted): compiled once for all that is mapped."""

    def f(x, scale, bias, residual, mask):
        call = functools.partial(jaxnorm.batch_norm, epsilon=0.5, axis=axis, activation="relu")

        def total(*a):
            y, mean, var = call(*a[:3], residual=a[3], mask=mask)
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var)

        results = call(x, scale, bias, residual=residual, mask=mask)
        return *results, jax.grad(total, (0, 1, 2, 3))(x, scale, bias, residual)

    return f, jax.jit(f)


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("axis", [-1, 0])
def test_vmap_over_any_subset(mapped, axis):
    """Of x, scale, bias, residual and mask, with the gradient: as a loop gives, for all of them."""
    args = [
        rand((6, 7), offset=1.0),
        rand((6, 7)[axis:][:1], seed=1),
        rand((6, 7)[axis:][:1], seed=2),
        rand((6, 7), seed=3),
        np.asarray(_mask((6, 7)).at[:, :2].set(True)),
    ]
    n = 3
    stacked = [
        a if d is None else np.stack([np.roll(np.asarray(a), i, -1) for i in range(n)])
        for a, d in zip(args, mapped, strict=True)
    ]
    f, one_of = results_and_gradients(axis)
    got = jax.jit(jax.vmap(f, mapped))(*stacked)
    for i in range(n):
        one = [a if d is None else a[i] for a, d in zip(stacked, mapped, strict=True)]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one_of(*one)), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mapped", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_vmap_over_any_axis(mapped, axis, activation):
    """Of x alone, its gradient too; no copy of x where kernels see the mapped axis as a group or a feature."""
    x, scale = rand((2, 3, 4, 5), "float32"), rand(((2, 3, 4, 5)[axis],), seed=1)
    stacked = jnp.stack([x, 2 * x, x + 1], mapped)

    def f(x):
        call = functools.partial(jaxnorm.batch_norm, axis=axis, activation=activation)
        (y, mean, var), pullback = jax.vjp(call, x, scale)
        return y, mean, pullback((jnp.cos(y), mean, var))

    results, f = jax.jit(jax.vmap(f, mapped))(stacked), jax.jit(f)
    for i in range(3):
        got = jax.tree.map(lambda a, i=i: a[i], results)
        want = f(np.asarray(stacked).take(i, mapped))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    if not CPU.available:
        return
    mapped_last = jax.vmap(lambda x: jaxnorm.batch_norm(x, scale, axis=axis)[0], mapped, mapped)
    text = jax.jit(mapped_last).lower(stacked).as_text()
    # The two passes, or on a GPU one call for both.
    calls = re.findall("custom_call @jaxnorm_(?:batch_norm|launch)", text)
    assert len(calls) == (1 if "batch_norm_train" in text else 2)
    beside = (1, 2) if axis == 1 else (3, 4)
    assert ("stablehlo.transpose" in text) == (mapped not in (0, *beside))


@needs_cpu
def test_vmap_reads_operands_at_their_own_size():
    """Neither x, if it is not mapped, nor parameters are copied for each example."""
    x, scale = jnp.ones((4, 7), "float32"), jnp.ones((3, 7), "float32")
    f = jax.vmap(lambda x, s: jax.vjp(jaxnorm.batch_norm, x, s)[1], (None, 0))
    text = jax.jit(lambda x, s: f(x, s)).lower(x, scale).as_text()
    calls = [line for line in text.splitlines() if "custom_call @jaxnorm" in line]
    # Statistics do not depend on the scale: they are not mapped at all.
    assert [line.count("3x4x7") for line in calls if "batch_norm_stats" in line] == [0]
    forward = [line.partition("->") for line in calls if "batch_norm_fwd" in line]
    assert all("1x4x7xf32" in operands for operands, _, _ in forward)


def test_nested_vmap_of_parameters():
    """Scale mapped twice, bias once, x between: all groups get their own gradients."""
    x, scale, bias = rand((5, 4, 7)), rand((2, 3, 7), seed=1), rand((3, 7), seed=2)

    def f(x, scale, bias):
        def total(*a):
            return jnp.sum(jnp.sin(jaxnorm.batch_norm(*a, activation="relu")[0]))

        return jax.grad(total, (0, 1, 2))(x, scale, bias)

    g = jax.vmap(jax.vmap(jax.vmap(f, (0, None, None)), (None, 0, 0)), (None, 0, None))
    got, f = jax.jit(g)(x, scale, bias), jax.jit(f)
    for i, j, k in itertools.product(range(2), range(3), range(5)):
        for a, b in zip(got, f(x[k], scale[i, j], bias[j]), strict=True):
            np.testing.assert_allclose(a[i, j, k], b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_vmap_with_an_axis_name(masked):
    """Statistics of all examples together; the gradient of their sum is that of one batch."""
    x = rand((3, 8, 5), offset=2.0)
    mask = np.arange(24).reshape(3, 8, 1) % 5 < np.array([[[1]], [[3]], [[5]]]) if masked else None

    def synchronised(x):
        def one(x, mask):
            return jaxnorm.batch_norm(x, axis_name="i", mask=mask)

        return jax.vmap(one, (0, 0 if masked else None), axis_name="i")(x, mask)

    def whole(x):
        flat = None if mask is None else mask.reshape(24, 1)
        y, mean, var = jaxnorm.batch_norm(x.reshape(24, 5), mask=flat)
        return y.reshape(x.shape), jnp.stack([mean] * 3), jnp.stack([var] * 3)

    def gradient(f):
        return jax.grad(lambda x: jnp.sum(jnp.sin(f(x)[0])) + jnp.sum(f(x)[2]))

    results = jax.jit(lambda x: [(f(x), gradient(f)(x)) for f in (synchronised, whole)])(x)
    (values, got), (wanted, want) = results
    for a, b in zip(values, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# ---- Flax ----


def _flax_case(dtype, axis, masked):
    x = rand((6, 5, 8), dtype, offset=1.0)
    features = (x.shape[axis],)
    scale, bias = rand(features, "float32", 1), rand(features, "float32", 2)
    return x, scale, bias, _mask(x.shape) if masked else None


@in_turn(dtype=DTYPES, axis=[-1, 1], masked=[False, True], fast=[False, True])
def test_same_as_linen(dtype, axis, masked, fast):
    """The module's result, running averages and evaluation."""
    linen = pytest.importorskip("flax.linen")
    x, scale, bias, mask = _flax_case(dtype, axis, masked)
    kw = {"axis": axis, "dtype": dtype, "momentum": 0.75, "use_fast_variance": fast}
    state = {"mean": jnp.full(scale.shape, 0.5), "var": jnp.full(scale.shape, 2.0)}
    state = jax.tree.map(lambda a: a.astype("float32"), state)
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": state}
    with jax.numpy_dtype_promotion("standard"):
        module = linen.BatchNorm(use_running_average=False, **kw)
        y, new = module.apply(variables, x, mask=mask, mutable=["batch_stats"])
        module = linen.BatchNorm(use_running_average=True, **kw)
        evaluated = module.apply(variables, x)
    got, mean, var = jaxnorm.batch_norm(x, scale, bias, axis=axis, mask=mask)
    floor = 64 if dtype in ("float32", "float64") else 2
    reference_dtype = dtype if dtype != "float64" else "float32"  # parameters are float32
    unit = floor * oracle.UNIT[reference_dtype]
    np.testing.assert_allclose(oracle.f64(got), oracle.f64(y), rtol=unit, atol=4 * unit)
    for name, value in (("mean", mean), ("var", var)):
        kept = 0.75 * oracle.f64(state[name]) + 0.25 * oracle.f64(value)
        np.testing.assert_allclose(kept, new["batch_stats"][name], rtol=1e-5)
    got = jaxnorm.batch_norm_inference(x, state["mean"], state["var"], scale, bias, axis=axis)
    np.testing.assert_allclose(oracle.f64(got), oracle.f64(evaluated), rtol=unit, atol=4 * unit)


@pytest.mark.parametrize("axis", [-1, 1])
def test_same_as_nnx(axis):
    nnx = pytest.importorskip("flax.nnx")
    x, scale, bias, _ = _flax_case("float32", axis, False)
    with jax.numpy_dtype_promotion("standard"):
        module = nnx.BatchNorm(x.shape[axis], axis=axis, momentum=0.75, rngs=nnx.Rngs(0))
        module.scale[...], module.bias[...] = scale, bias
        y = module(x, use_running_average=False)
        evaluated = module(x, use_running_average=True)
    got, mean, var = jaxnorm.batch_norm(x, scale, bias, axis=axis)
    np.testing.assert_allclose(got, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(module.mean[...], 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(module.var[...], 0.75 + 0.25 * var, rtol=1e-5)
    kept = 0.25 * mean, np.float32(0.75) + np.float32(0.25) * var
    got = jaxnorm.batch_norm_inference(x, *kept, scale, bias, axis=axis)
    np.testing.assert_allclose(got, evaluated, rtol=1e-5, atol=1e-5)
