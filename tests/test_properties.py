"""What holds for all shapes, axes, masks and dtypes: hypothesis looks for counterexamples."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from suite import value_and_vjp

import jaxnorm

# Every new shape compiles a program: few examples, no deadline, the same ones on every machine.
SETTINGS = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

dtypes = st.sampled_from(oracle.DTYPES)
shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=9)
ops = st.sampled_from(["softmax", "log_softmax"])


@st.composite
def arrays(draw, shape, dtype, special=True):
    """Finite numbers of moderate size, with some infinities and NaN among them.

    No subnormal float32: XLA's CPU threads, which the kernels run on, take them for zero in sums. Where they count,
    `test_subnormal` of each operation has them.
    """
    numbers = st.floats(-30, 30, width=32, allow_subnormal=False)
    values = draw(hnp.arrays(np.float32, shape, elements=numbers, fill=st.nothing()))
    if special and values.size:
        for value in draw(st.lists(st.sampled_from([np.inf, -np.inf, np.nan, -0.0]), max_size=2)):
            values.flat[draw(st.integers(0, values.size - 1))] = value
    return jnp.asarray(values.astype(np.dtype(dtype)))


@st.composite
def broadcastable(draw, shape):
    """A shape that broadcasts to `shape`."""
    start = draw(st.integers(0, len(shape)))
    return tuple(n if draw(st.booleans()) else 1 for n in shape[start:])


@st.composite
def axes(draw, ndim):
    chosen = draw(st.lists(st.integers(0, ndim - 1), unique=True, min_size=1))
    if draw(st.booleans()):
        return tuple(a - ndim if draw(st.booleans()) else a for a in chosen)
    return chosen[0] if draw(st.booleans()) else None


@SETTINGS
@given(st.data())
def test_softmax(data):
    """Any shape, axis and mask: the oracle's value, its NaN and inf, its gradient."""
    op, dtype, shape = data.draw(ops), data.draw(dtypes), data.draw(shapes)
    x, axis = data.draw(arrays(shape, dtype)), data.draw(axes(len(shape)))
    kw = {}
    if data.draw(st.booleans()):
        kw["where"] = data.draw(hnp.arrays(np.bool_, data.draw(broadcastable(shape))))
    if data.draw(st.booleans()):
        kw["bias"] = data.draw(arrays(data.draw(broadcastable(shape)), dtype, special=False))
    if data.draw(st.booleans()):
        kw["scale"] = data.draw(st.sampled_from([0.5, -1.0, 2]))
    ct = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    y, (x_bar,) = value_and_vjp(lambda x: getattr(jaxnorm, op)(x, axis, **kw))((x,), ct)
    assert y.dtype == dtype
    assert y.shape == shape
    if not y.size:
        return
    expected = getattr(oracle, op)(x, axis, **kw)
    oracle.assert_close(y, expected, dtype, floor=32)
    log = op == "log_softmax"
    expected = oracle.softmax_vjp(x, ct, axis, log=log, **kw)[0]
    # The logarithm is kept rounded: exp(y) is as exact as y is long.
    size = oracle.softmax_vjp_size(x, ct, axis, log=log, **kw)
    oracle.assert_close(x_bar, expected, dtype, floor=128, size=size + np.max(size))


@SETTINGS
@given(st.data())
def test_softmax_invariants(data):
    """Rows sum to 1 and to 0 in the gradient; a constant added to a row changes nothing."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=40))
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = data.draw(arrays(shape, "float64", special=False))

    @jax.jit
    def run(x, ct):
        y, pullback = jax.vjp(lambda x: jaxnorm.softmax(x, axis), x)
        return y, pullback(ct)[0], jaxnorm.softmax(x + 64, axis), jaxnorm.log_softmax(x, axis)

    y, x_bar, moved, log = run(x, np.random.default_rng(1).standard_normal(shape))
    np.testing.assert_allclose(np.sum(y, axis), 1, rtol=1e-13)
    np.testing.assert_allclose(np.sum(x_bar, axis), 0, atol=1e-13)
    np.testing.assert_allclose(moved, y, rtol=1e-12)
    np.testing.assert_allclose(log, np.log(y), rtol=1e-10, atol=1e-12)


@settings(SETTINGS, max_examples=15)
@given(st.data())
def test_permutation(data):
    """Softmax commutes with reordering a row and with moving axes."""
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=20))
    x = data.draw(arrays(shape, "float32"))
    order = np.array(data.draw(st.permutations(range(shape[-1]))), int)

    @jax.jit
    def run(x):
        moved = jaxnorm.softmax(jnp.moveaxis(x, -1, 0), axis=0)
        return jaxnorm.softmax(x), jaxnorm.softmax(x[..., order]), moved

    y, reordered, moved = map(np.asarray, run(x))
    np.testing.assert_allclose(reordered, y[..., order], rtol=2e-6)
    np.testing.assert_allclose(np.moveaxis(np.asarray(moved), 0, -1), y, rtol=2e-6)


@settings(SETTINGS, max_examples=15)
@given(st.data())
def test_masking_is_removing(data):
    """A masked element has no effect: the rest is the softmax of the rest."""
    n = data.draw(st.integers(2, 40))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    keep[0] = True
    x = data.draw(arrays((3, n), "float64", special=False))
    garbage = jnp.where(keep, x, jnp.nan)
    for op in ("softmax", "log_softmax"):
        f = getattr(jaxnorm, op)
        np.testing.assert_allclose(
            np.asarray(f(garbage, where=keep))[:, keep], f(x[:, keep]), rtol=1e-12, atol=1e-14
        )


@SETTINGS
@given(st.data())
def test_relu(data):
    """Value, mask bits (through the gradient) and both cotangents, to the bit."""
    dtype, shape = data.draw(dtypes), data.draw(shapes)
    x, y = data.draw(arrays(shape, dtype)), data.draw(arrays(shape, dtype))
    ct = data.draw(arrays(shape, dtype))
    out, bars = value_and_vjp(jaxnorm.add_relu)((x, y), ct)
    np.testing.assert_array_equal(oracle.f64(out), oracle.relu(x, y))
    for bar in bars:
        np.testing.assert_array_equal(oracle.f64(bar), oracle.relu_vjp(x, ct, y))
    out, (bar,) = value_and_vjp(jaxnorm.relu)((x,), ct)
    np.testing.assert_array_equal(oracle.f64(out), oracle.relu(x))
    np.testing.assert_array_equal(oracle.f64(bar), oracle.relu_vjp(x, ct))


@SETTINGS
@given(st.data())
def test_norm(data):
    """Any shape, axes and operands: the oracle's value, its NaN and inf, its gradients."""
    op = data.draw(st.sampled_from(["layer_norm", "rms_norm"]))
    dtype, shape = data.draw(dtypes), data.draw(shapes)
    x, axis = data.draw(arrays(shape, dtype)), data.draw(axes(len(shape)))
    axis = tuple(range(len(shape))) if axis is None else axis
    kw = {"axis": axis, "epsilon": 0.5}
    if data.draw(st.booleans()):
        kw["mask"] = data.draw(hnp.arrays(np.bool_, data.draw(broadcastable(shape))))
    if data.draw(st.booleans()):
        kw["residual"] = data.draw(arrays(shape, dtype, special=False))
    normalised = tuple(shape[a] for a in sorted(a % len(shape) for a in np.atleast_1d(axis)))
    scale = data.draw(arrays(normalised, data.draw(st.sampled_from([dtype, "float32"])), False))

    def call(x, scale):
        out = getattr(jaxnorm, op)(x, scale, **kw)
        return out[0] if "residual" in kw else out

    ct = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    y, bars = value_and_vjp(call)((x, scale), ct)
    assert y.dtype == dtype
    assert y.shape == shape
    if not y.size:
        return
    oracle.assert_close(y, getattr(oracle, op)(x, scale, **kw), dtype, floor=64)
    kw |= {"dy": ct, "scale": scale, "center": op == "layer_norm"}
    expected, sizes = oracle.norm_vjp(x, **kw), oracle.norm_vjp(x, **kw, sizes=True)
    for bar, want, size in zip(bars, expected, sizes, strict=False):
        if np.isfinite(want).all():
            name = bar.dtype.name
            oracle.assert_close(bar, want, name, floor=256, size=size + np.max(size))


@settings(SETTINGS, max_examples=15)
@given(st.data())
def test_norm_invariants(data):
    """Mean 0 and variance 1; neither a shift nor a factor of x changes anything."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=2, max_side=40))
    x = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(shape)
    y = np.asarray(jaxnorm.layer_norm(x, epsilon=0.0))
    np.testing.assert_allclose(np.mean(y, -1), 0, atol=1e-12)
    np.testing.assert_allclose(np.var(y, -1), 1, rtol=1e-12)
    np.testing.assert_allclose(jaxnorm.layer_norm(3 * x + 64, epsilon=0.0), y, atol=1e-9)
    z = np.asarray(jaxnorm.rms_norm(x, epsilon=0.0))
    np.testing.assert_allclose(np.mean(z**2, -1), 1, rtol=1e-12)
    np.testing.assert_allclose(jaxnorm.rms_norm(-3 * x, epsilon=0.0), -z, rtol=1e-12)


@SETTINGS
@given(st.data())
def test_batch_norm(data):
    """Any shape, feature axes, mask and residual: the oracle's value, its NaN, the gradients where they are finite."""
    dtype, shape = data.draw(dtypes), data.draw(shapes)
    x, axis = data.draw(arrays(shape, dtype, data.draw(st.booleans()))), data.draw(axes(len(shape)))
    axis = tuple(range(len(shape))) if axis is None else axis
    kw, relu = {"axis": axis, "epsilon": 0.5}, data.draw(st.booleans())
    if data.draw(st.booleans()):
        kw["mask"] = data.draw(hnp.arrays(np.bool_, data.draw(broadcastable(shape))))
    residual = data.draw(arrays(shape, dtype, special=False)) if data.draw(st.booleans()) else None

    def call(x):
        activation = "relu" if relu else None
        return jaxnorm.batch_norm(x, residual=residual, activation=activation, **kw)

    ct = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)

    @jax.jit
    def run(x, ct):
        (y, mean, var), pullback = jax.vjp(call, x)
        return y, mean, var, pullback((ct, jnp.zeros_like(mean), jnp.zeros_like(var)))[0]

    y, mean, var, bar = run(x, ct)
    features = tuple(shape[a] for a in sorted(a % len(shape) for a in np.atleast_1d(axis)))
    assert y.dtype == dtype
    assert y.shape == shape
    assert mean.shape == var.shape == features
    if not y.size:
        return
    expected, wanted_mean, wanted_var = oracle.batch_norm(x, residual=residual, relu=relu, **kw)
    for got, want in ((mean, wanted_mean), (var, wanted_var)):
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        np.testing.assert_allclose(np.asarray(got)[finite], want[finite], rtol=1e-5, atol=1e-5)
    size = np.nanmax(np.where(np.isfinite(expected), np.abs(expected), 0)) + 1
    oracle.assert_close(y, expected, dtype, floor=64, size=size)
    kw["positive"] = oracle.f64(y) > 0 if relu else None
    want, size = (oracle.batch_norm_vjp(x, ct, **kw, sizes=s)[0] for s in (False, True))
    finite = np.isfinite(want)  # features do not see each other's NaN
    if finite.any():
        size = size[finite] + np.max(size[finite])
        floor = 256 if dtype in ("float32", "float64") else 8
        oracle.assert_close(np.asarray(bar)[finite], want[finite], dtype, floor=floor, size=size)


@settings(SETTINGS, max_examples=8)
@given(st.data())
def test_vmap_is_a_loop(data):
    """Over any axis, of the gradient too, with any of the operands mapped."""
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5))
    x = data.draw(arrays(shape, "float32", special=False))
    axis = data.draw(st.integers(0, len(shape) - 1))
    row = np.delete(shape, axis)
    bias = data.draw(arrays(data.draw(broadcastable(tuple(int(n) for n in row))), "float32", False))
    along = data.draw(st.integers(0, len(row) - 1))

    def f(x):
        def total(x):
            return jnp.sum(jnp.sin(jaxnorm.softmax(x, along, bias=bias)))

        return jaxnorm.log_softmax(x, along, bias=bias), jax.grad(total)(x)

    mapped, f = jax.jit(jax.vmap(f, axis))(x), jax.jit(f)
    for i in range(shape[axis]):
        for got, want in zip(mapped, f(np.asarray(x).take(i, axis)), strict=True):
            np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-6)
