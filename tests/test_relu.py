"""relu and add_relu against the float64 oracle, bit for bit: they only select."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import DTYPES
from suite import CPU, needs_cpu, rand

import jaxnorm

OPS = ("relu", "add_relu")
ops = pytest.mark.parametrize("op", OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)

# Around one byte, one ballot word, one vector, one block of a kernel.
COLUMNS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
LONG = (1023, 1024, 1025, 4095, 4097, 8193, 65537)


# `jaxnorm.relu` is the function; it hides the module of that name.
_module = importlib.import_module("jaxnorm._ops.relu")
RELU_FWD, RELU_BWD = _module.relu_fwd_p, _module.relu_bwd_p


def arguments(op, shape, dtype, seed=0):
    return [rand(shape, dtype, seed + i) for i in range(2 if op == "add_relu" else 1)]


@jax.jit
def kernels(args, ct):
    """(y, mask, cotangent) of the primitives that differentiation uses."""
    y, mask = RELU_FWD.bind(*args, implementation=None)
    return y, mask, RELU_BWD.bind(mask, ct, implementation=None)[0]


def check(args, seed=7):
    x, *rest = args
    dtype, ct = x.dtype.name, rand(x.shape, x.dtype.name, seed)
    z = rest[0] if rest else None
    y, mask, x_bar = kernels(args, ct)
    assert y.dtype == x_bar.dtype == dtype
    np.testing.assert_array_equal(oracle.f64(y), oracle.relu(x, z))
    np.testing.assert_array_equal(mask, oracle.relu_mask(x, z))
    np.testing.assert_array_equal(oracle.f64(x_bar), oracle.relu_vjp(x, ct, z))


@ops
@pytest.mark.parametrize("columns", COLUMNS + LONG)
def test_columns_float32(op, columns):
    check(arguments(op, (5, columns), "float32"))


@ops
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 31, 33, 64, 129, 1025])
def test_columns(op, dtype, columns):
    check(arguments(op, (5, columns), dtype))


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [17, 1 << 20])
def test_large(op, dtype, columns):
    """Enough elements for every thread and block, in narrow rows and in one."""
    check(arguments(op, ((1 << 20) // columns + 1, columns), dtype))


@ops
@pytest.mark.parametrize("shape", [(), (1,), (9,), (2, 3, 9), (2, 1, 1), (3, 2, 1, 2, 5)])
def test_shapes(op, shape):
    """Of any rank, 0 too: value and gradient through the public function."""
    args = arguments(op, shape, "float32")
    y, pullback = jax.vjp(getattr(jaxnorm, op), *args)
    ct = rand(shape, seed=5)
    np.testing.assert_array_equal(y, oracle.relu(*args).astype(np.float32))
    for bar in pullback(ct):
        np.testing.assert_array_equal(bar, oracle.relu_vjp(args[0], ct, *args[1:]))


@ops
@pytest.mark.parametrize("shape", [(0,), (0, 9), (4, 0), (2, 0, 3)])
def test_empty(op, shape):
    args = arguments(op, shape, "float32")
    y, pullback = jax.vjp(getattr(jaxnorm, op), *args)
    assert y.shape == shape
    assert all(bar.shape == shape for bar in pullback(y))
    if shape:
        check(args)


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [9, 33, 129])
def test_misaligned_base(op, dtype, columns):
    """Slices inside jit start in the middle of a vector."""
    base, ct = arguments(op, (7, columns), dtype), rand((6, columns), dtype, 9)

    @jax.jit
    def run(base, ct):
        args = [b[1:] for b in base]
        y, mask = RELU_FWD.bind(*args, implementation=None)
        both = jax.numpy.concatenate([ct, ct])[1:]
        twice = jax.numpy.concatenate([mask, mask])[1:]
        return y, mask, RELU_BWD.bind(twice, both, implementation=None)[0]

    y, mask, x_bar = run(base, ct)
    args = [np.asarray(b)[1:] for b in base]
    np.testing.assert_array_equal(oracle.f64(y), oracle.relu(*args))
    np.testing.assert_array_equal(mask, oracle.relu_mask(*args))
    expected = oracle.relu_vjp(args[0], ct, *args[1:])
    np.testing.assert_array_equal(oracle.f64(x_bar), np.concatenate([expected, expected])[1:])


# ---- special values ----

inf, nan = np.inf, np.nan


@dtypes
def test_special_values(dtype):
    """NaN passes through, the derivative at 0 and NaN is 0, infinite cotangents are selected."""
    tiny = oracle.TINY[dtype]
    x = np.array([nan, -nan, inf, -inf, 0.0, -0.0, tiny, -tiny, 1.0, -1.0, nan])
    x = np.tile(x, (3, 3)).astype(np.dtype(dtype))
    for value in (1.0, inf, -inf, nan, 0.0, -0.0):
        ct = np.full(x.shape, value).astype(np.dtype(dtype))
        y, mask, x_bar = kernels([jnp.asarray(x)], jnp.asarray(ct))
        np.testing.assert_array_equal(oracle.f64(y), oracle.f64(jax.nn.relu(jnp.asarray(x))))
        np.testing.assert_array_equal(mask, oracle.relu_mask(x))
        positive = oracle.f64(x) > 0
        np.testing.assert_array_equal(oracle.f64(x_bar)[positive], oracle.f64(ct)[positive])
        assert (oracle.f64(x_bar)[~positive] == 0).all()
        got = jax.grad(lambda x, ct=ct: jnp.sum(jaxnorm.relu(x) * ct))(jnp.asarray(x))
        assert (oracle.f64(got)[~positive] == 0).all()


@dtypes
def test_sum_that_is_not_finite(dtype):
    x = jnp.asarray(np.array([inf, inf, nan, 1.0, oracle.LARGEST[dtype]]).astype(np.dtype(dtype)))
    y = jnp.asarray(np.array([-inf, 1.0, 1.0, nan, oracle.LARGEST[dtype]]).astype(np.dtype(dtype)))
    out, mask, bar = kernels([x, y], jnp.ones_like(x))
    np.testing.assert_array_equal(oracle.f64(out), [nan, inf, nan, nan, inf])
    np.testing.assert_array_equal(mask, [0b10010])
    np.testing.assert_array_equal(oracle.f64(bar), [0, 1, 0, 0, 1])


@dtypes
def test_cancelling_sum(dtype):
    """Where x + y is exactly 0 the derivative is 0; one bit more or less decides the sign."""
    x = rand((64,), dtype)
    check([x, -x])
    check([x, jnp.asarray(np.nextafter(np.asarray(-x), np.asarray(-x) * 2))])


@dtypes
def test_subnormal(dtype):
    """Numbers that some machines flush to 0 count as positive or as 0, never as anything else."""
    exponent = {"float16": -24, "bfloat16": -133, "float32": -149, "float64": -1074}[dtype]
    x = np.array([3, 2, 1, 0, -1, -2, -3]) * 2.0**exponent
    x = jnp.asarray(x.astype(np.dtype(dtype)))
    y, mask, bar = kernels([x], jnp.ones_like(x))
    assert mask in (0b000, 0b111)
    assert (oracle.f64(bar)[3:] == 0).all()
    assert (oracle.f64(y)[3:] == 0).all()
    assert ((oracle.f64(y) == oracle.f64(x)) | (oracle.f64(y) == 0)).all()


def test_mask_is_packbits():
    """Little-endian bits along the last axis; unused bits are 0."""
    x = rand((3, 5, 13))
    _, mask, _ = kernels([x], x)
    assert mask.dtype == jnp.uint8
    assert mask.shape == (3, 5, 2)
    expected = np.packbits(np.asarray(x) > 0, axis=-1, bitorder="little")
    np.testing.assert_array_equal(mask, expected)
    assert (np.asarray(mask)[..., 1] < 32).all()


# ---- add_relu ----


@pytest.mark.parametrize(
    ("a", "b"), [((3, 5), (5,)), ((3, 5), ()), ((3, 1), (1, 5)), ((5,), (2, 3, 5)), ((1,), (1,))]
)
def test_add_relu_broadcasts(a, b):
    x, y = rand(a), rand(b, seed=1)
    out, pullback = jax.vjp(jaxnorm.add_relu, x, y)
    expected, expected_pullback = jax.vjp(lambda x, y: jnp.where(x + y > 0, x + y, 0), x, y)
    np.testing.assert_array_equal(out, expected)
    ct = rand(out.shape, seed=2)
    for got, want in zip(pullback(ct), expected_pullback(ct), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_add_relu_promotes_as_addition_does():
    x, y = rand((3, 5), "bfloat16"), rand((3, 5), "float32", 1)
    with jax.numpy_dtype_promotion("standard"):
        out = jaxnorm.add_relu(x, y)
        assert out.dtype == (x + y).dtype == jnp.float32
    with pytest.raises(jax.dtypes.TypePromotionError):
        jaxnorm.add_relu(x, y)


@dtypes
def test_both_cotangents_are_one_call(dtype):
    x, y, ct = (rand((4, 9), dtype, i) for i in range(3))
    _, pullback = jax.vjp(jaxnorm.add_relu, x, y)
    x_bar, y_bar = pullback(ct)
    np.testing.assert_array_equal(oracle.f64(x_bar), oracle.f64(y_bar))
    np.testing.assert_array_equal(oracle.f64(x_bar), oracle.relu_vjp(x, ct, y))


# ---- implementations ----


@ops
@dtypes
def test_implementations_agree(op, dtype):
    args = arguments(op, (4, 33), dtype)
    expected = oracle.relu(*args)
    for implementation in (None, "kernel", "xla"):
        if implementation == "kernel" and not CPU.available:
            continue  # tests/test_errors.py: it is refused then

        def f(*args, implementation=implementation):
            return getattr(jaxnorm, op)(*args, implementation=implementation)

        y, pullback = jax.vjp(f, *args)
        np.testing.assert_array_equal(oracle.f64(y), expected)
        np.testing.assert_array_equal(oracle.f64(pullback(y)[0]), expected)


@ops
@needs_cpu
def test_kernel_is_used_when_insisted_on(op):
    """Forward alone is XLA's formula; implementation="kernel" asks for the call."""
    args = arguments(op, (4, 33), "float32")

    def f(*args):
        return getattr(jaxnorm, op)(*args, implementation="kernel")

    assert "jaxnorm_relu_fwd" in jax.jit(f).lower(*args).as_text()


# ---- weak types, which decide what a later operation promotes to ----


def types(tree):
    return jax.tree.map(lambda a: (a.dtype.name, a.weak_type), tree)


def under_transformations(f, *args):
    """Results, tangents and cotangents of one function of arrays."""
    rows = [jnp.stack([a, a]) for a in args]
    numbers = tuple(range(len(args)))

    def gradient(*args):
        return jax.grad(lambda *args: f(*args).sum(), numbers)(*args)

    def cotangents(*args):
        y, pullback = jax.vjp(f, *args)
        return pullback(y), pullback(jax.lax.convert_element_type(y, y.dtype))

    def one_tangent(*args):
        return jax.jvp(lambda x: f(x, *args[1:]), args[:1], args[:1])

    for function in (f, gradient, cotangents, one_tangent, lambda *a: jax.jvp(f, a, a)):
        yield function(*args)
        yield jax.jit(function)(*args)
        yield jax.vmap(function)(*rows)
        yield jax.vmap(function, in_axes=-1, out_axes=-1)(*rows)
    yield jax.jvp(gradient, args, args)
    yield jax.linearize(f, *args)[1](*args)
    yield jax.checkpoint(gradient)(*args)


@pytest.mark.parametrize("weak", [(True,), (False,), *itertools.product([True, False], repeat=2)])
def test_weak_types(weak):
    """Of everything that comes out, as those of jax.nn.relu of the sum."""
    args = [jnp.full(9, 0.5) if w else jnp.full(9, 0.5, jnp.result_type(float)) for w in weak]
    assert [a.weak_type for a in args] == list(weak)
    function = jaxnorm.add_relu if len(args) == 2 else jaxnorm.relu

    expected = [*under_transformations(lambda *a: jax.nn.relu(sum(a[1:], a[0])), *args)]
    for implementation in (None, "xla"):
        f = functools.partial(function, implementation=implementation)
        for a, b in zip(under_transformations(f, *args), expected, strict=True):
            assert types(a) == types(b), implementation
            jax.tree.map(np.testing.assert_array_equal, a, b)


def test_weak_types_promote_as_numbers_do():
    with jax.numpy_dtype_promotion("standard"):
        half, other = jnp.full(3, 0.5), jnp.ones(3, jnp.bfloat16)
        for y in (jaxnorm.relu(half), jaxnorm.relu(0.5), jaxnorm.add_relu(half, half)):
            assert (y * other).dtype == jnp.bfloat16
        assert jaxnorm.add_relu(half, other).dtype == jnp.bfloat16
