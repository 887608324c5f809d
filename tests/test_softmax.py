"""softmax and log_softmax against the float64 oracle: shapes, special values, gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import DTYPES
from suite import CPU, in_turn, rand, value_and_vjp, values_and_vjps

import jaxnorm

OPS = ("softmax", "log_softmax")
ops = pytest.mark.parametrize("op", OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def jn(op):
    return getattr(jaxnorm, op)


def nn(op):
    return getattr(jax.nn, op)


def forward(op, x, axis=-1, **operands):
    return getattr(oracle, op)(x, axis, **operands)


@functools.cache
def both(op, axis):
    """Jitted (x, ct) -> (y, cotangent of x) of jaxnorm and of XLA; compiled once for arrays of one shape and dtype."""
    run = values_and_vjps(lambda x: jn(op)(x, axis), lambda x: nn(op)(x, axis))
    return lambda x, ct: [(y, x_bar) for y, (x_bar,) in run((x,), ct)]


def check(op, x, axis=-1, seed=5):
    """Result and gradient against the oracle, errors next to XLA's."""
    dtype = x.dtype.name
    ct = rand(x.shape, dtype, seed, 1.0)
    (y, x_bar), (y_xla, x_bar_xla) = both(op, axis)(x, ct)
    expected = forward(op, x, axis)
    # Probabilities are judged one by one; logarithms, which are 0 where one is 1, by their mean.
    size = np.abs(expected) if op == "softmax" else None
    oracle.assert_close(y, expected, dtype, y_xla, size=size)
    check_vjp(op, x_bar, x, ct, axis, xla=x_bar_xla)


def check_vjp(op, x_bar, x, ct, axis=-1, xla=None, floor=16.0, **operands):
    operands["log"] = op == "log_softmax"
    expected = oracle.softmax_vjp(x, ct, axis, **operands)[0]
    size = oracle.softmax_vjp_size(x, ct, axis, **operands)
    oracle.assert_close(x_bar, expected, x.dtype.name, xla, floor, size)


# ---- row lengths ----

# Every length at which a kernel changes what it does (vector, warp, block, cluster, streaming), and
# both neighbours.
COLUMNS = (
    *(1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025),
    *(4095, 4096, 4097, 8191, 8192, 8193, 16384, 32767, 32768, 32769, 65537, 131073),
)


@ops
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_float32(op, columns):
    check(op, rand((5 if columns < 10000 else 2, columns)))


@ops
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 33, 129, 1025, 4097, 32769])
def test_columns(op, dtype, columns):
    check(op, rand((3, columns), dtype))


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_million_columns(op, dtype):
    check(op, rand((2, 1 << 20), dtype))


@in_turn(op=OPS, dtype=DTYPES, columns=[2, 3, 4, 5, 8])
def test_short_rows(op, dtype, columns):
    """CPU kernels work across rows so short, in several tiles; a mask that rows share is no dense operand."""
    x = rand((2501, columns), dtype)
    check(op, x)
    where = _operand("where", (1, columns)).at[0, 0].set(True)
    ct = rand(x.shape, dtype, 3)
    y, (x_bar,) = value_and_vjp(lambda x: jn(op)(x, where=where, scale=1.5))((x,), ct)
    oracle.assert_close(y, forward(op, x, where=where, scale=1.5), dtype, floor=32)
    check_vjp(op, x_bar, x, ct, floor=32, where=where, scale=1.5)


@ops
def test_many_rows(op):
    """More rows than any grid or thread pool has workers."""
    check(op, rand((70001, 3)))


@dtypes
@ops
def test_oracle_agrees_with_jax(op, dtype):
    """The oracle itself is right: XLA in float64 gives the same."""
    x = rand((4, 33), "float64")
    oracle.assert_close(jax.jit(nn(op))(x), forward(op, x), "float64", floor=64)
    x = x.astype(dtype)
    assert jax.eval_shape(jn(op), x).dtype == jax.eval_shape(nn(op), x).dtype


# ---- shapes and axes ----


@ops
@pytest.mark.parametrize("axis", [0, 1, 2, -1, (0, 1), (1, 2), (0, 2), (2, 0), (0, 1, 2), None])
def test_axes(op, axis):
    check(op, rand((5, 6, 7)), axis)


@ops
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4, 5, 2)])
def test_each_axis(op, shape):
    for axis in range(-len(shape), len(shape)):
        check(op, rand(shape), axis)


@ops
@pytest.mark.parametrize("inner", [1, 2, 7, 8, 15, 17, 31, 33, 65, 129])
def test_strided_axis(op, inner):
    """Along an axis that is not the last one; inner sizes around every vector and tile width."""
    check(op, rand((3, 37, inner)), 1)


@ops
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("inner", [7, 33])
def test_strided_axis_dtypes(op, dtype, inner):
    check(op, rand((3, 37, inner), dtype), 1)


@ops
@pytest.mark.parametrize("columns", [1025, 9000])
def test_long_strided_axis(op, columns):
    check(op, rand((2, columns, 5)), 1)


@ops
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(2, 20, 1025), (1, 300, 1025)])
def test_wide_strided_axis(op, dtype, shape):
    """On the CPU, several blocks of neighbouring rows; the longer axis is cut into parts that threads share."""
    check(op, rand(shape, dtype), 1)


@ops
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 3), (0, 0)])
@pytest.mark.parametrize("axis", [0, -1])
def test_empty(op, shape, axis):
    x = jnp.zeros(shape)
    (y, x_bar), (y_xla, _) = both(op, axis)(x, x)
    assert y.shape == x_bar.shape == y_xla.shape == shape


@ops
@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 1), (1, 5), (1, 5, 1)])
def test_size_one(op, shape):
    for axis in range(len(shape)):
        check(op, rand(shape), axis)


@ops
def test_no_axes(op):
    """The empty tuple reduces nothing: every element is a row of its own, as in jax.nn."""
    x = rand((3, 4))
    (y, x_bar), (y_xla, _) = both(op, ())(x, x)
    np.testing.assert_array_equal(y, y_xla)
    np.testing.assert_array_equal(x_bar, 0)


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [33, 1025])
def test_misaligned_base(op, dtype, columns):
    """A slice inside jit starts in the middle of a vector; so do odd rows."""
    base = rand((7, columns), dtype)
    ct = rand((6, columns), dtype, 3)

    @jax.jit
    def run(base, ct):
        y, pullback = jax.vjp(jn(op), base[1:])
        return y, pullback(ct)[0]

    y, x_bar = run(base, ct)
    x = base[1:]
    oracle.assert_close(y, forward(op, x), dtype, nn(op)(x))
    check_vjp(op, x_bar, x, ct)


@ops
@pytest.mark.parametrize("name", ["where", "scale", "bias"])
def test_operands_are_arguments_of_jit_and_vmap(op, name):
    """Operands are arrays that the program computes, not only constants."""
    x, operand = rand((4, 5)), _operand(name, (4, 1, 5))
    mapped = jax.vmap(lambda x, operand: jn(op)(x, **{name: operand}))(x, operand[:, 0])
    traced = jax.jit(lambda x, operand: jn(op)(x, **{name: operand}))(x, operand[:, 0])
    for y in (mapped, traced):
        oracle.assert_close(y, forward(op, x, **{name: operand[:, 0]}), "float32", floor=16)


@ops
def test_numpy_operands(op):
    """NumPy arrays are arrays too."""
    x, where = np.float32([[1, 2, 3]]), np.array([True, False, True])
    oracle.assert_close(jn(op)(x, where=where), forward(op, x, where=where), "float32")


# ---- broadcast operands ----

FULL = (2, 3, 5)
# Every way in which dimensions can be missing or of size 1.
SMALLER = [
    tuple(n if keep else 1 for n, keep in zip(FULL[start:], kept, strict=True))
    for start in range(4)
    for kept in itertools.product((True, False), repeat=3 - start)
]


def _operand(name, shape):
    rng = np.random.default_rng(len(shape) * 31 + sum(shape))
    if name == "where":
        return jnp.asarray(rng.random(shape) < 0.6)
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


@ops
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("name", ["where", "scale", "bias"])
def test_broadcast_operand(op, name, axis):
    """All 15 broadcastable shapes: value, and cotangents of x and of the operand."""
    x, ct = rand(FULL), rand(FULL, seed=1)
    operands = [_operand(name, shape) for shape in SMALLER]

    def one(x, operand, ct):
        if name == "where":
            y, pullback = jax.vjp(lambda x: jn(op)(x, axis, where=operand), x)
        else:
            y, pullback = jax.vjp(lambda x, o: jn(op)(x, axis, **{name: o}), x, operand)
        return y, pullback(ct)

    results = jax.jit(lambda x, os, ct: [one(x, o, ct) for o in os])(x, operands, ct)
    for shape, operand, (y, (x_bar, *bars)) in zip(SMALLER, operands, results, strict=True):
        oracle.assert_close(y, forward(op, x, axis, **{name: operand}), "float32", floor=16)
        check_vjp(op, x_bar, x, ct, axis, **{name: operand})
        if name == "where":
            continue
        (o_bar,) = bars
        assert o_bar.shape == shape
        # bias shared by whole rows has no effect: its cotangent is a sum that cancels.
        size = float(np.abs(oracle.f64(ct)).sum()) / max(o_bar.size, 1)
        expected = oracle.softmax_vjp(x, ct, axis, log=op == "log_softmax", **{name: operand})
        wanted = expected[1] if name == "scale" else expected[2]
        np.testing.assert_allclose(o_bar, wanted, rtol=1e-4, atol=2e-6 * size)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("axis", [1, -1])
@ops
def test_all_operands_together(op, axis, dtype):
    """where, scale and bias of different broadcast shapes in one call, as attention uses them."""
    shape = (2, 3, 5, 17)
    x, ct = rand(shape, dtype), rand(shape, dtype, 9)
    where = _operand("where", (2, 1, 1, 17))
    scale, bias = rand((3, 1, 1), dtype, 1), rand((1, 3, 5, 1), dtype, 2)
    kw = {"where": where, "scale": scale, "bias": bias}
    y, (x_bar,) = value_and_vjp(lambda x: jn(op)(x, axis, **kw))((x,), ct)
    oracle.assert_close(y, forward(op, x, axis, **kw), dtype)
    check_vjp(op, x_bar, x, ct, axis, floor=32, **kw)


@ops
@pytest.mark.parametrize("scale", [0.125, 2, -1.5, 0.0])
def test_python_scale(op, scale):
    x, ct = rand((4, 33)), rand((4, 33), seed=1)
    run = values_and_vjps(lambda x: jn(op)(x, scale=scale), lambda x: nn(op)(x * scale))
    (y, (x_bar,)), (y_xla, _) = run((x,), ct)
    oracle.assert_close(y, forward(op, x, scale=scale), "float32", y_xla)
    check_vjp(op, x_bar, x, ct, scale=scale)


@ops
def test_many_broadcast_dimensions(op):
    """An operand that is broadcast in every other one of many dimensions."""
    shape = (2, 2, 2, 2, 2, 2, 2, 2, 3)
    x, where = rand(shape), _operand("where", (2, 1, 2, 1, 2, 1, 2, 1, 3))
    y = jax.jit(lambda x: jn(op)(x, where=where))(x)
    oracle.assert_close(y, forward(op, x, where=where), "float32")


@ops
def test_rank_beyond_the_kernels_limit(op):
    """No kernel indexes alternating broadcasts in 19 dimensions; the result is right anyway.

    On CPU: XLA takes minutes to compile this for a GPU.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        x = rand((2,) * 18 + (3,), scale=1.0)
        where = _operand("where", (2, 1) * 9 + (3,))
        y = jax.jit(lambda x: jn(op)(x, where=where))(x)
        oracle.assert_close(y, forward(op, x, where=where), "float32")


def test_operand_dtypes_promote_as_in_jax_numpy():
    x, bias = rand((3, 5), "bfloat16"), rand((5,), "float32", 1)
    with jax.numpy_dtype_promotion("standard"):
        y = jaxnorm.softmax(x, bias=bias)
        assert y.dtype == (x + bias).dtype == jnp.float32
    oracle.assert_close(y, oracle.softmax(x, bias=bias), "float32")


# ---- special values ----

inf, nan = np.inf, np.nan
SPECIAL = {
    "some -inf": [[1, -inf, 3, -inf], [0, 0, 0, 0]],
    "all -inf": [[-inf] * 4, [0, 1, 2, 3]],
    "+inf": [[1, inf, 2, 3], [0, 1, 2, 3]],
    "two +inf": [[inf, inf, 2, 3], [0, 1, 2, 3]],
    "+inf and -inf": [[inf, -inf, 2, 3], [0, 1, 2, 3]],
    "NaN": [[1, nan, 2, 3], [0, 1, 2, 3]],
    "NaN and inf": [[inf, nan, -inf, 3], [-inf, 1, 2, 3]],
    "one finite": [[-inf, -inf, 2, -inf], [0, 1, 2, 3]],
    "zeros": [[-0.0, 0.0, -0.0, 0.0], [-0.0] * 4],
    "equal": [[7.0] * 4, [-7.0] * 4],
    "far apart": [[-60000.0, 60000.0, 0, 1], [60000.0] * 4],
}


def special(name, dtype, columns):
    """The rows of SPECIAL at the end of rows that are otherwise ordinary, where tails see them."""
    x = np.zeros((2, columns)) - 1.0
    if name in ("all -inf", "equal", "zeros"):
        x[:] = np.array(SPECIAL[name])[:, :1]
    x[:, -4:] = SPECIAL[name]
    return jnp.asarray(x.astype(np.dtype(dtype)))


@ops
@dtypes
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(op, dtype, name):
    """The oracle's numbers and the NaN and inf of jax.nn, in both directions."""
    for columns, axis in ((4, -1), (37, -1), (37, 0), (1029, -1)):
        x = special(name, dtype, columns)
        if axis == 0:
            x = x.T
        ct = rand(x.shape, dtype, 3)
        (y, x_bar), (y_xla, _) = both(op, axis)(x, ct)
        oracle.assert_close(y, forward(op, x, axis), dtype, y_xla, floor=32)
        oracle.assert_same_pattern(y, y_xla)
        check_vjp(op, x_bar, x, ct, axis, floor=64)


@ops
@dtypes
def test_nan_stays_in_its_row(op, dtype):
    x = np.ones((6, 40))
    x[2, 7] = nan
    y = np.asarray(jn(op)(jnp.asarray(x.astype(np.dtype(dtype))))).astype(float)
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, 0)).all()


@ops
@pytest.mark.parametrize(
    ("dtype", "offset"),
    [("bfloat16", 1e4), ("float16", 1e4), ("float32", 1e4), ("float32", 1e6), ("float64", 1e12)],
)
def test_offset(op, dtype, offset):
    """A common offset changes nothing but the rounding of x."""
    check(op, rand((4, 1000), dtype, offset=offset))
    check(op, rand((4, 1000), dtype, offset=-offset))


@ops
@dtypes
def test_wide_range(op, dtype):
    """Logits so far apart that most results underflow."""
    check(op, rand((4, 257), dtype, scale=40.0))


def huge(dtype, columns):
    """Logits as masks of large finite numbers leave them: all the same, or next to ordinary ones and -inf."""
    largest = oracle.LARGEST[dtype]
    some = min(1e10, largest / 4)
    even = np.arange(columns) % 2 == 0
    ordinary = np.random.default_rng(columns).standard_normal(columns)
    rows = [
        *(np.full(columns, value) for value in (-largest, largest, -some, some)),
        np.where(even, some, some / 2),
        np.where(even, -some, -2 * some),
        *(np.where(even, value, -largest / 2) for value in (ordinary, -inf)),
        np.where(np.arange(columns) < columns - 1, -inf, some),
    ]
    return np.stack(rows).astype(np.dtype(dtype))


@in_turn(op=OPS, dtype=DTYPES, columns=[8, 37, 128, 1024, 1029, 9000, 200000])
def test_huge_logits(op, dtype, columns):
    """The largest logits share the probability, however large they are and whatever they are multiplied by."""
    x = huge(dtype, columns)
    zeros, three_quarters = np.zeros(1, x.dtype), np.full(1, 0.75, x.dtype)
    for axis in (-1,) if columns > 2000 else (-1, 0):
        a = jnp.asarray(x if axis == -1 else np.ascontiguousarray(x.T))
        given = (
            ({}, {}),
            ({"scale": 0.7}, {"scale": 0.7}),
            ({"scale": three_quarters}, {"scale": three_quarters}),
            ({"bias": zeros}, {}),
            ({"where": np.ones(a.shape, bool)}, {}),
        )

        @jax.jit
        def run(a, axis=axis, given=given):
            results = [jn(op)(a, axis, **kw) for kw, _ in given]
            return *results, jn(op)(jnp.zeros_like(a), axis, bias=a)

        *results, biased = run(a)
        for y, (_, operands) in zip(results, given, strict=True):
            expected = forward(op, a, axis, **operands)
            size = np.abs(expected) + (1 if op == "log_softmax" else 0)
            oracle.assert_close(y, expected, dtype, floor=16, size=size)
        oracle.assert_close(
            biased, forward(op, a, axis), dtype, floor=16, size=np.abs(expected) + 1
        )


@ops
@dtypes
def test_subnormal(op, dtype):
    """Inputs below the smallest normal number count as 0 at most; nothing becomes NaN."""
    x = jnp.full((2, 9), oracle.TINY[dtype] / 4, dtype)
    oracle.assert_close(jn(op)(x), forward(op, x), dtype)


# ---- where ----


def garbage(shape, where, dtype, seed=0):
    """Numbers where the mask is true, NaN and infinities elsewhere."""
    rng = np.random.default_rng(seed)
    bad = rng.choice([nan, inf, -inf, 1e30], shape)
    good = rng.standard_normal(shape)
    with np.errstate(over="ignore"):
        return jnp.asarray(np.where(where, good, bad).astype(np.dtype(dtype)))


@ops
@dtypes
@pytest.mark.parametrize(
    ("columns", "axis"), [(9, -1), (9, 0), (8, -1), (64, -1), (1024, -1), (1025, -1)]
)
def test_garbage_at_masked_places(op, dtype, columns, axis):
    """What x, bias and the cotangent hold there never matters; gradients there are exactly 0."""
    shape = (4, columns)
    where = np.random.default_rng(4).random(shape) < 0.5
    where[:2, :2] = True
    where[3] = False
    x, bias, ct = (garbage(shape, where, dtype, seed) for seed in range(3))
    clean_x, clean_bias, clean_ct = (jnp.where(where, a, 0) for a in (x, bias, ct))

    def f(x, bias):
        return jn(op)(x, axis, where=where, bias=bias)

    @jax.jit
    def run(x, bias, ct, clean_x, clean_bias):
        y, pullback = jax.vjp(f, x, bias)
        _, y_dot = jax.jvp(f, (x, bias), (ct, jnp.zeros_like(bias)))
        return y, pullback(ct), y_dot, f(clean_x, clean_bias)

    y, bars, y_dot, y_clean = run(x, bias, ct, clean_x, clean_bias)
    np.testing.assert_array_equal(oracle.f64(y), oracle.f64(y_clean))
    masked_value = 0.0 if op == "softmax" else -inf
    assert (oracle.f64(y)[~where] == masked_value).all()
    for got in bars:  # x and bias are added: their cotangents are the same
        check_vjp(op, got, clean_x, clean_ct, axis, where=where, bias=clean_bias)
        assert (oracle.f64(got)[~where] == 0).all()
    assert (oracle.f64(y_dot)[~where] == 0).all()
    assert np.isfinite(oracle.f64(y_dot)[where]).all()


@in_turn(
    op=OPS,
    dtype=["bfloat16", "float32"],
    columns=[8, 40, 512, 520, 4096, 8192, 65536, 200000],
    operands=["keys", "causal", "bias", "keys and bias"],
)
def test_masks_and_biases_of_attention(op, dtype, columns, operands):
    """Rows of every tier, whole vectors of which meet those of a mask or bias that others share."""
    queries = 3 if columns < 10000 else 1
    x = rand((2, 2, queries, columns), dtype)
    rng = np.random.default_rng(columns)
    where = bias = None
    if "keys" in operands:
        where = np.arange(columns) < rng.integers(1, columns, (2, 1, 1, 1))
    elif operands == "causal":
        where = np.arange(columns) <= rng.integers(0, columns, (1, 1, queries, 1))
    if "bias" in operands:
        bias = rand((1, 2, queries, columns), dtype, 2)
    given = {"where": where, "bias": bias}

    def xla(x):
        z = x.astype("float32") * 0.5 + (0 if bias is None else bias.astype("float32"))
        return nn(op)(z, where=where).astype(dtype)

    ct = rand(x.shape, dtype, 1)
    run = jax.jit(
        lambda x, ct: (value_and_vjp(lambda x: jn(op)(x, scale=0.5, **given))((x,), ct), xla(x))
    )
    (y, (x_bar,)), y_xla = run(x, ct)
    visible = np.broadcast_to(True if where is None else where, x.shape)
    expected = forward(op, x, scale=0.5, **given)
    size = np.abs(expected) if op == "softmax" else None
    masked_value = 0.0 if op == "softmax" else -inf
    assert (oracle.f64(y)[~visible] == masked_value).all()
    oracle.assert_close(y, expected, dtype, y_xla, floor=16, size=size)
    check_vjp(op, x_bar, x, ct, floor=64, scale=0.5, **given)


@ops
@dtypes
def test_all_masked_rows(op, dtype):
    """As in jax.nn: 0 (or -inf for the logarithm), and a gradient of 0."""
    x, where = rand((3, 17), dtype), np.ones((3, 17), bool)
    where[1] = False
    ct = rand(x.shape, dtype, 1)
    y, (x_bar,) = value_and_vjp(lambda x: jn(op)(x, where=where))((x,), ct)
    expected = jax.jit(lambda x: nn(op)(x, where=where))(x.astype(jnp.float64))
    oracle.assert_close(y, expected, dtype)
    x_bar = oracle.f64(x_bar)
    assert (x_bar[1] == 0).all()
    assert np.isfinite(x_bar).all()


@ops
def test_second_derivative_with_mask_is_finite(op):
    """Also when the masked places hold garbage."""
    where = np.array([[True, True, False], [False, False, False]])
    x = garbage((2, 3), where, "float64")

    def total(x):
        y = jn(op)(x, where=where)
        return jnp.sum(jnp.where(where, y, 0) ** 2)

    h = np.asarray(jax.jit(jax.hessian(total))(x))
    clean = np.where(where, x, 0.0)

    def reference(x):
        y = nn(op)(x, where=where)
        return jnp.sum(jnp.where(where, y, 0) ** 2)

    expected = np.asarray(jax.jit(jax.hessian(reference))(clean))[0, :2, 0, :2]
    np.testing.assert_allclose(h[0, :2, 0, :2], expected, rtol=1e-12)
    assert (h[1] == 0).all()
    assert (h[0, 2] == 0).all()


@ops
@pytest.mark.parametrize("where", [True, False])
def test_scalar_where(op, where):
    x = rand((2, 5))
    np.testing.assert_allclose(
        jn(op)(x, where=jnp.asarray(where)), nn(op)(x, where=jnp.asarray(where)), rtol=1e-6
    )


@ops
@pytest.mark.parametrize("axis", [None, ()])
def test_scalar(op, axis):
    """One element is a row of its own, as in jax.nn."""
    functions = [functools.partial(f(op), axis=axis) for f in (jn, nn)]
    for value in (1.0, np.nan, np.inf):
        x = jnp.float32(value)
        ours, theirs = (jax.jvp(f, (x,), (x,)) for f in functions)
        for got, want in zip(ours, theirs, strict=True):
            assert got.shape == ()
            np.testing.assert_array_equal(got, want)
    assert jn(op)(x, axis=axis, where=False, scale=2.0, bias=x) == (-np.inf if "log" in op else 0)


@ops
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_scale_promotes(op, dtype):
    """NumPy's float64 is a Python float, but promotes as in scale * x."""
    x = rand((2, 5), "bfloat16")
    scale = np.dtype(dtype).type(0.5)
    with jax.numpy_dtype_promotion("standard"):
        assert jn(op)(x, scale=scale).dtype == (scale * x).dtype == dtype
    assert jn(op)(x, scale=0.5).dtype == "bfloat16"


@ops
@pytest.mark.parametrize("bias", [None, -3.0])
@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_large_logits(op, array, bias, implementation):
    """A compiler that does not round scale * x before it subtracts the maximum makes NaN of this."""
    x = jnp.array([[1.1e12, 1.0, 1.1e12], [-2.3e15, 7.7e14, 1.0]], "float32")
    scale = jnp.float32(0.7) if array else 0.7
    bias = None if bias is None else jnp.float32(bias)
    got = jax.jit(lambda x: jn(op)(x, scale=scale, bias=bias, implementation=implementation))(x)
    expected = [[0.5, 0, 0.5], [0, 1, 0]]
    np.testing.assert_allclose(jnp.exp(got) if "log" in op else got, expected, rtol=1e-6)


@ops
def test_masked_nan_under_debug_nans(op):
    """What a mask leaves out is in no intermediate result, eagerly too."""
    x, where = jnp.array([1.0, 2.0, np.nan]), jnp.array([True, True, False])

    def f(x):
        return jnp.where(where, jn(op)(x, where=where), 0)

    with jax.debug_nans(True):
        y, y_dot = jax.jvp(f, (x,), (jnp.ones(3),))
        x_bar = jax.grad(lambda x: f(x)[0])(x)
        loss_bar = jax.grad(lambda x: jaxnorm.softmax_cross_entropy(x, jnp.array(0), where=where))(
            x
        )
    for value in (y, y_dot, x_bar, loss_bar):
        assert np.isfinite(value).all()


# ---- accuracy and determinism ----


@ops
@dtypes
@pytest.mark.parametrize("columns", [100, 4096])
def test_no_less_accurate_than_xla(op, dtype, columns):
    """Error against float64 at most twice XLA's, each element relative to its own row."""
    for scale, offset in ((1.0, 0.0), (10.0, 0.0), (3.0, 300.0)):
        x = rand((16, columns), dtype, scale=scale, offset=offset)
        (y, _), (y_xla, _) = both(op, -1)(x, x)
        oracle.assert_close(y, forward(op, x), dtype, y_xla, floor=1.5)


@ops
def test_same_bits_every_time(op):
    x = rand((64, 1025))
    f = value_and_vjp(jn(op))
    first, again = f((x,), x), f((x,), x)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


@ops
def test_row_does_not_depend_on_its_neighbours(op):
    """A row has the same bits alone, in a batch, and at another place of the batch.

    Except on a GPU, where rows are summed in vectors of 16 bytes, if those do not divide the row.
    """
    x = rand((9, 336 if jax.default_backend() == "gpu" else 333))
    whole = np.asarray(jn(op)(x))
    np.testing.assert_array_equal(jn(op)(x[4:5])[0], whole[4])
    np.testing.assert_array_equal(jn(op)(x[::-1])[::-1], whole)


@ops
def test_implementations_agree(op):
    x = rand((4, 129))
    for implementation in (None, "kernel", "xla"):
        if implementation == "kernel" and not CPU.available:
            continue  # tests/test_errors.py: it is refused then
        y = jn(op)(x, implementation=implementation)
        oracle.assert_close(y, forward(op, x), "float32", nn(op)(x))


@ops
def test_gradient_of_scale_ignores_masked_elements(op):
    """A NaN at a masked element of x stays out of scale's gradient, which sums over x."""
    x, where = jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([True, True, False])
    weights = jnp.array([1.0, 0.0, 0.0])

    def total(scale):
        y = getattr(jaxnorm, op)(x, where=where, scale=scale)
        return jnp.sum(jnp.where(where, weights * y, 0.0))

    def without(scale):
        return jnp.sum(weights[:2] * getattr(jaxnorm, op)(x[:, :2], scale=scale))

    scale = jnp.array([0.5])
    np.testing.assert_allclose(jax.grad(total)(scale), jax.grad(without)(scale), rtol=1e-6)
