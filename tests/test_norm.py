"""layer_norm and rms_norm against the float64 oracle: shapes, operands, special values, gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import suite
from jax.interpreters import partial_eval as pe
from jax.test_util import check_grads
from oracle import DTYPES, acc_of
from suite import CPU, in_turn, needs_cpu, rand, value_and_vjp, values_and_vjps

import jaxnorm

OPS = ("layer_norm", "rms_norm")
ops = pytest.mark.parametrize("op", OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
inf, nan = np.inf, np.nan


def formula(
    op,
    x,
    scale=None,
    bias=None,
    *,
    axis=-1,
    epsilon=1e-6,
    scale_offset=0.0,
    residual=None,
    mask=None,
):
    """XLA's two-pass formula in the same dtypes: what accuracy is compared with."""
    s = x if residual is None else x + residual
    axes = tuple(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
    rows = [i for i in range(x.ndim) if i not in axes]
    acc = s.astype(acc_of(x.dtype))
    if op == "layer_norm":
        acc = acc - jnp.mean(acc, axes, keepdims=True, where=mask)
    variance = jnp.mean(acc * acc, axes, keepdims=True, where=mask)
    y = acc * jax.lax.rsqrt(variance + np.asarray(epsilon, acc.dtype))
    if scale is not None:
        y = y * (jnp.expand_dims(scale, rows).astype(y.dtype) + np.asarray(scale_offset, y.dtype))
    if bias is not None:
        y = y + jnp.expand_dims(bias, rows).astype(y.dtype)
    y = y.astype(x.dtype)
    return y if residual is None else (y, s)


def check(
    op, x, parameters=None, residual=False, seed=5, floor=16.0, implementation=None, **options
):
    """Results and all gradients against the oracle, errors next to XLA's.

    Args:
      op: name.
      x: array.
      parameters: dtype of scale and bias; None for none of them.
      residual: whether to add one.
      seed: of all else.
      floor: of the gradients; a quarter of it is that of the result.
      implementation: of jaxnorm's call.
      **options: of the call.
    """
    dtype = x.dtype.name
    names, args = ["x"], [x]
    axis = options.get("axis", -1)
    shape = tuple(x.shape[a] for a in sorted(a % x.ndim for a in np.atleast_1d(axis)))
    if residual:
        names, args = [*names, "residual"], [*args, rand(x.shape, dtype, seed + 1)]
    if parameters is not None:
        wanted = ("scale", "bias") if op == "layer_norm" else ("scale",)
        names += wanted
        args += [rand(shape, parameters, seed + 2 + i, 1.0) for i in range(len(wanted))]
    dy, ds = rand(x.shape, dtype, seed + 4, 1.0), rand(x.shape, dtype, seed + 5, 1.0)
    ct = (dy, ds) if residual else dy

    def of(function, **more):
        return lambda *args: function(**dict(zip(names, args, strict=True)), **options, **more)

    run = values_and_vjps(
        of(getattr(jaxnorm, op), implementation=implementation),
        of(functools.partial(formula, op)),
    )
    (got, bars), (xla, xla_bars) = run(args, ct)
    given = dict(zip(names, args, strict=True))
    if residual:
        expected_sum = oracle.rounded_sum(x, given["residual"])
        np.testing.assert_array_equal(oracle.f64(got[1]), expected_sum)
        got, xla = got[0], xla[0]
    expected = getattr(oracle, op)(**given, **options)
    oracle.assert_close(got, expected, dtype, xla, floor / 4)

    bias = given.pop("bias", None)
    given |= dict(options, dy=dy, center=op == "layer_norm", dsum=ds if residual else None)
    exact, sizes = oracle.norm_vjp(**given), oracle.norm_vjp(**given, sizes=True)
    # Many terms, of which each has the error of its row's statistics.
    sizes = [
        np.where(np.isfinite(s), s, 0) + np.nanmean(np.where(np.isfinite(s), s, 0)) for s in sizes
    ]
    index = {"x": 0, "residual": 0, "scale": 1, "bias": 2}
    assert (bias is not None) == ("bias" in names)
    for name, bar, xla_bar in zip(names, bars, xla_bars, strict=True):
        i = index[name]
        bar_dtype = dtype if i == 0 else parameters
        # Added up in the arithmetic's dtype, which may be coarser than the parameter's.
        coarser = max(1.0, oracle.UNIT[acc_of(dtype)] / oracle.UNIT[bar_dtype])
        oracle.assert_close(bar, exact[i], bar_dtype, xla_bar, floor * coarser, sizes[i])


def gradient(function):
    """Of a sum, with respect to x and scale."""
    return jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1))


# ---- row lengths ----

# Every length at which a kernel changes what it does, and both neighbours.
COLUMNS = (
    *(1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129, 200, 255, 256, 257, 1023, 1024, 1025),
    *(4095, 4096, 4097, 8191, 8192, 8193, 16384, 32767, 32768, 32769, 65537, 131073),
)


@ops
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_float32(op, columns):
    check(op, rand((5 if columns < 10000 else 2, columns)), "float32")


@ops
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 33, 129, 400, 1025, 4097, 16385, 32769])
def test_columns(op, dtype, columns):
    check(op, rand((3, columns), dtype), acc_of(dtype))


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_million_columns(op, dtype):
    check(op, rand((2, 1 << 20), dtype), "float32", residual=True)


@ops
@pytest.mark.parametrize("shape", [(70001, 3), (5000, 33), (300, 5000), (129, 33000)])
def test_many_rows(op, shape):
    """More rows than any grid or thread pool has workers; gradients of parameters in many parts."""
    check(op, rand(shape), "float32")


@ops
@pytest.mark.parametrize("shape", [(1200, 1023), (300, 4095), (100, 20001)])
def test_many_rows_beside_the_grid(op, shape):
    """Rows begin at any place within a vector. A CUDA block has several of them backward, which have to lie alike."""
    check(op, rand(shape, "bfloat16"), "float32", floor=32)


@in_turn(op=OPS, dtype=DTYPES, columns=[2, 5, 13, 64, 192])
def test_short_rows(op, dtype, columns):
    """CPU kernels work on many rows so short at once; here in several tiles, the last one not whole."""
    x = rand((2503, columns), dtype)
    check(op, x, acc_of(dtype), residual=True, floor=32)
    check(op, x, acc_of(dtype), floor=32)


@in_turn(op=OPS, dtype=DTYPES, columns=[3, 7, 20, 65])
def test_nan_stays_in_its_row(op, dtype, columns):
    """Vectors that reach into the next row take nothing from it."""
    x, dy = rand((700, columns), dtype), rand((700, columns), dtype, 1)
    f = value_and_vjp(getattr(jaxnorm, op))
    expected, (expected_dx,) = f((x,), dy)
    bad = slice(2, None, 3)
    y, (dx,) = f((x.at[bad].set(nan),), dy)
    for got, same in ((y, expected), (dx, expected_dx)):
        np.testing.assert_array_equal(oracle.f64(got), oracle.f64(same.at[bad].set(nan)))


# ---- shapes and axes ----


@ops
@pytest.mark.parametrize("axis", [0, 1, 2, -1, (0, 1), (1, 2), (-1, -2), (0, 2), (0, 1, 2)])
def test_axes(op, axis):
    check(op, rand((5, 6, 7)), "float32", residual=True, axis=axis)


@ops
def test_all_axes(op):
    x = rand((3, 4, 5))
    np.testing.assert_array_equal(
        getattr(jaxnorm, op)(x, axis=None), getattr(jaxnorm, op)(x, axis=(0, 1, 2))
    )


@ops
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4, 5, 2)])
def test_each_axis(op, shape):
    for axis in range(-len(shape), len(shape)):
        check(op, rand(shape), "float32", axis=axis)


@ops
@pytest.mark.parametrize("axis", [0, (0, 2)])
def test_axes_without_a_kernel(op, axis):
    """The formula under every derivative, and mapped; "kernel" is refused."""
    x = rand((3, 4, 5), "float64")
    shape = tuple(x.shape[a] for a in np.atleast_1d(axis))
    scale = rand(shape, "float64", 1)
    call = functools.partial(getattr(jaxnorm, op), axis=axis, epsilon=0.25)
    plain = functools.partial(formula, op, axis=axis, epsilon=0.25)
    check_grads(jax.jit(call), (x, scale), order=2, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
    for mapped in ((0, None), (1, 0), (3, None), (None, 0)):
        args = [
            a if d is None else jnp.stack([a, 2 * a, a + 1], d)
            for a, d in zip((x, scale), mapped, strict=True)
        ]
        for f in (lambda f: f, gradient):
            both = [jax.vmap(f(g), mapped) for g in (call, plain)]
            got, want = jax.jit(lambda *args, both=both: [g(*args) for g in both])(*args)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    if CPU.available:
        with pytest.raises(ValueError, match=f"^{op}: implementation must be None or 'xla'"):
            jax.jit(functools.partial(call, implementation="kernel"))(x, scale)


@ops
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 3), (0, 0)])
@pytest.mark.parametrize("axis", [0, -1])
def test_empty(op, shape, axis):
    """Empty arrays give empty arrays, and parameters whose rows are none get a gradient of 0."""
    x, scale = jnp.zeros(shape), jnp.ones((shape[axis],))

    def both(x, scale):
        y, pullback = jax.vjp(lambda x, scale: getattr(jaxnorm, op)(x, scale, axis=axis), x, scale)
        return y, pullback(y)

    y, (x_bar, scale_bar) = jax.jit(both)(x, scale)
    assert y.shape == x_bar.shape == shape
    np.testing.assert_array_equal(scale_bar, np.zeros(scale.shape))


@ops
@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 1), (1, 5), (1, 5, 1)])
def test_size_one(op, shape):
    for axis in range(len(shape)):
        check(op, rand(shape), "float32", axis=axis)


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [33, 1025])
def test_misaligned_base(op, dtype, columns):
    """A slice inside jit starts in the middle of a vector; so do odd rows."""
    base, ct = rand((7, columns), dtype), rand((6, columns), dtype, 3)
    scale = rand((columns + 1,), "float32", 4)

    @jax.jit
    def run(base, scale, ct):
        y, pullback = jax.vjp(getattr(jaxnorm, op), base[1:], scale[1:])
        return y, pullback(ct)

    y, bars = run(base, scale, ct)
    x, scale = base[1:], scale[1:]
    oracle.assert_close(y, getattr(oracle, op)(x, scale), dtype, formula(op, x, scale))
    options = {"center": op == "layer_norm"}
    expected = oracle.norm_vjp(x, ct, scale, **options)
    sizes = oracle.norm_vjp(x, ct, scale, **options, sizes=True)
    oracle.assert_close(bars[0], expected[0], dtype, size=sizes[0] + np.mean(sizes[0]), floor=16)
    oracle.assert_close(bars[1], expected[1], "float32", size=sizes[1], floor=64)


# ---- operands ----


@in_turn(op=OPS, dtype=DTYPES, parameters=DTYPES)
def test_mixed_dtypes(op, dtype, parameters):
    """The result has x's dtype, each gradient that of its argument."""
    check(op, rand((40, 65), dtype), parameters, residual=True, floor=32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scale_and_bias_of_different_dtypes(dtype):
    x, scale, bias = rand((6, 33), dtype), rand((33,), "float32", 1), rand((33,), "bfloat16", 2)
    for a, b in ((scale, bias), (bias, scale)):
        run = values_and_vjps(jaxnorm.layer_norm, functools.partial(formula, "layer_norm"))
        (y, bars), (xla, _) = run((x, a, b), x)
        oracle.assert_close(y, oracle.layer_norm(x, a, b), dtype, xla)
        assert [t.dtype for t in bars] == [x.dtype, a.dtype, b.dtype]


@pytest.mark.parametrize("operands", list(itertools.product((False, True), repeat=4)))
def test_optional_operands(operands):
    """Every subset of scale, bias, residual and mask."""
    x, given = rand((6, 33)), {}
    for present, name in zip(operands, ("scale", "bias", "residual", "mask"), strict=True):
        if present:
            value = {"residual": rand((6, 33), seed=3), "mask": _mask((6, 33))}
            given[name] = value.get(name, rand((33,), seed=4 + len(name)))
    argument_names = [n for n in given if n != "mask"]
    dy = rand((6, 33), seed=8)

    def call(x, *values):
        out = jaxnorm.layer_norm(x, **dict(given, **dict(zip(argument_names, values, strict=True))))
        return out if "residual" in given else (out, x)

    args = (x, *(given[n] for n in argument_names))
    (y, _), bars = value_and_vjp(call)(args, (dy, jnp.zeros_like(x)))
    oracle.assert_close(y, oracle.layer_norm(x, **given), "float32", floor=16)
    options = {n: given[n] for n in given if n != "bias"}
    expected = oracle.norm_vjp(x, dy, **options)
    sizes = oracle.norm_vjp(x, dy, **options, sizes=True)
    index = {"scale": 1, "bias": 2, "residual": 0}
    for name, bar in zip(("x", *argument_names), bars, strict=True):
        i = index.get(name, 0)
        oracle.assert_close(
            bar, expected[i], "float32", size=sizes[i] + np.mean(sizes[i]), floor=32
        )


@dtypes
@pytest.mark.parametrize("offset", [1.0, -0.5])
def test_scale_offset(dtype, offset):
    check("rms_norm", rand((20, 65), dtype), dtype, scale_offset=offset)
    x = rand((20, 65), dtype)
    np.testing.assert_array_equal(
        oracle.f64(jaxnorm.rms_norm(x, scale_offset=offset)), oracle.f64(jaxnorm.rms_norm(x))
    )


@ops
@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 1e-3, 10])
def test_epsilon(op, epsilon):
    check(op, rand((4, 65)), "float32", epsilon=epsilon)


def test_numpy_operands():
    """NumPy arrays are arrays too."""
    x, scale, mask = np.float32([[1, 2, 4]]), np.float32([1, 2, 3]), np.array([True, False, True])
    y = jaxnorm.layer_norm(x, scale, mask=mask)
    oracle.assert_close(y, oracle.layer_norm(x, scale, mask=mask), "float32")


@ops
def test_sum_as_rounded(op):
    """Statistics are those of the sum that is returned, so that normalising it again gives the same."""
    x, residual = rand((8, 300), "bfloat16"), rand((8, 300), "bfloat16", 1, 100.0)
    f = getattr(jaxnorm, op)
    y, s = f(x, residual=residual)
    np.testing.assert_array_equal(oracle.f64(s), oracle.f64(x + residual))
    np.testing.assert_array_equal(oracle.f64(y), oracle.f64(f(s)))


# ---- mask ----


def _mask(shape, seed=7):
    """Every row keeps something."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


FULL = (2, 3, 5)
SMALLER = [
    tuple(n if keep else 1 for n, keep in zip(FULL[start:], kept, strict=True))
    for start in range(4)
    for kept in itertools.product((True, False), repeat=3 - start)
]


@pytest.mark.parametrize(
    ("op", "axis"),
    [("layer_norm", -1), ("rms_norm", 1), ("layer_norm", (1, 2)), ("rms_norm", (1, 2))],
)
def test_broadcast_mask(op, axis):
    """All broadcastable shapes."""
    for shape in SMALLER:
        mask = _mask(shape) if shape else jnp.asarray(True)
        check(op, rand(FULL), "float32", residual=True, axis=axis, mask=mask, floor=32)


@ops
@dtypes
@pytest.mark.parametrize("columns", [9, 1025, 33000])
def test_mask(op, dtype, columns):
    check(op, rand((4, columns), dtype), acc_of(dtype), mask=_mask((4, columns)), floor=32)


@ops
def test_masked_elements_do_not_count(op):
    """NaN at a masked element makes that element NaN and no other."""
    mask = np.ones((3, 40), bool)
    mask[1, 5:9] = False
    x = np.array(rand((3, 40)))
    x[1, 6] = nan
    y = np.asarray(getattr(jaxnorm, op)(jnp.asarray(x), mask=jnp.asarray(mask)))
    assert np.isnan(y[1, 6])
    assert np.isnan(y).sum() == 1


@ops
@dtypes
def test_all_masked_rows(op, dtype):
    """The mean of nothing is NaN, as in Flax; other rows do not notice."""
    mask = np.ones((3, 17), bool)
    mask[1] = False
    for m in (mask, mask[:, :1]):
        x = rand((3, 17), dtype)
        f = lambda x, m=m: getattr(jaxnorm, op)(x, mask=jnp.asarray(m))  # noqa: E731
        y, (x_bar,) = value_and_vjp(f)((x,), x)
        for value in (y, x_bar):
            isnan = np.isnan(oracle.f64(value))
            assert isnan[1].all()
            assert not isnan[[0, 2]].any()


# ---- special values ----


@functools.cache
def both_of_x(op):
    """Of jaxnorm and the formula, compiled once for arrays of one shape and dtype."""
    return values_and_vjps(getattr(jaxnorm, op), functools.partial(formula, op))


SPECIAL = {
    "+inf": [[1, inf, 2, 3], [0, 1, 2, 3]],
    "-inf": [[1, -inf, 2, 3], [0, 1, 2, 3]],
    "both infinities": [[inf, -inf, 2, 3], [0, 1, 2, 3]],
    "NaN": [[1, nan, 2, 3], [0, 1, 2, 3]],
    "zeros": [[-0.0, 0.0, -0.0, 0.0], [-0.0] * 4],
}


@ops
@dtypes
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(op, dtype, name):
    """NaN and infinities where the formula has them, and in no other row."""
    for columns in (4, 37, 1029, 33000):
        x = np.zeros((2, columns)) - (0 if name == "zeros" else 1.0)
        x[:, -4:] = SPECIAL[name]
        x = jnp.asarray(x.astype(np.dtype(dtype)))
        (y, (got,)), (plain, (want,)) = both_of_x(op)((x,), rand(x.shape, dtype, 3))
        oracle.assert_same_pattern(y, plain)
        got, want = oracle.f64(got), oracle.f64(want)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        assert np.isfinite(oracle.f64(y)[1]).all()


@in_turn(
    op=OPS,
    dtype=DTYPES,
    value=[0.0, 7.0, -1e4, 3e4, 1000.1],
    columns=[7, 33, 1000, 33000],
    axis=[0, 1],
)
def test_constant_rows(op, dtype, value, columns, axis):
    """Nothing but rounding is left of a constant row: with epsilon, exactly or nearly 0. Axis 0 has no kernel."""
    x = jnp.full((columns, 3) if axis == 0 else (3, columns), value, dtype)
    value = float(x[0, 0])
    y = oracle.f64(getattr(jaxnorm, op)(x, epsilon=1e-6, axis=axis))
    expected = 0.0 if op == "layer_norm" else value / np.sqrt(value**2 + 1e-6)
    np.testing.assert_allclose(y, expected, rtol=4 * oracle.UNIT[dtype], atol=1e-6)


@ops
@pytest.mark.parametrize(
    ("dtype", "offset"),
    [("bfloat16", 1e4), ("float16", 1e4), ("float32", 1e4), ("float32", 1e6), ("float64", 1e12)],
)
@pytest.mark.parametrize("columns", [100, 1000, 40000])
def test_offset(op, dtype, offset, columns):
    """The variance is that of the deviations, however far from 0 they lie."""
    for sign in (1, -1):
        x = rand((4, columns), dtype, offset=sign * offset)
        (y, _), (xla, _) = both_of_x(op)((x,), x)
        oracle.assert_close(y, getattr(oracle, op)(x), dtype, xla, floor=8)


def test_deviations_as_small_as_the_unit_of_the_mean():
    """The plain formula does not round the mean that it subtracts."""
    x = jnp.float32(1e6) + jnp.array([[-0.625], [-0.75], [-0.75]], "float32")
    np.testing.assert_allclose(
        jaxnorm.layer_norm(x, axis=0), oracle.layer_norm(x, axis=0), rtol=1e-5
    )


@pytest.mark.parametrize("columns", [100, 1000, 40000])
def test_huge_offset(columns):
    """The variance is finite where the square of the mean is not."""
    x = rand((4, columns), "float32") * np.float32(1e16) + np.float32(1e20)
    y = oracle.f64(jaxnorm.layer_norm(x))
    np.testing.assert_allclose(y, oracle.layer_norm(x), atol=1e-3)


@ops
@dtypes
@pytest.mark.parametrize("columns", [100, 4096])
def test_no_less_accurate_than_xla(op, dtype, columns):
    """Error against float64 at most twice that of XLA's two-pass formula."""
    for scale, offset in ((1.0, 0.0), (10.0, 0.0), (3.0, 300.0), (0.01, 0.0)):
        x = rand((16, columns), dtype, scale=scale, offset=offset)
        (y, _), (xla, _) = both_of_x(op)((x,), x)
        oracle.assert_close(y, getattr(oracle, op)(x), dtype, xla, floor=1.5)


@ops
@dtypes
def test_subnormal(op, dtype):
    """Inputs below the smallest normal number count as 0 at most; nothing becomes NaN."""
    x = jnp.full((2, 9), oracle.TINY[dtype] / 4, dtype)
    y = oracle.f64(getattr(jaxnorm, op)(x))
    assert (np.abs(y) <= np.abs(oracle.f64(x)) * 1.01e3).all()


# ---- determinism ----


@ops
@pytest.mark.parametrize("shape", [(64, 1025), (3, 40000), (2000, 40)])
def test_same_bits_every_time(op, shape):
    x, scale = rand(shape), rand(shape[-1:], seed=1)
    f = value_and_vjp(getattr(jaxnorm, op))
    first, again = f((x, scale), x), f((x, scale), x)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [5000, 8200, 9001, 20001])
def test_many_long_rows(op, dtype, columns):
    """Rows that blocks and clusters of a GPU hold, several for each of them, with as many arrays as there can be."""
    rows = 140 if jax.default_backend() == "gpu" else 20
    check(op, rand((rows, columns), dtype), "float32", residual=True)


@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("columns", "masked"), [(4104, True), (9001, False), (12288, False)])
def test_few_longer_rows_of_x_alone(op, dtype, columns, masked):
    """Rows that a GPU splits over blocks, of fewer bytes than softmax splits; no gradients of parameters."""
    options = {"mask": _mask((16, columns))} if masked else {}
    check(op, rand((16, columns), dtype), **options)


@ops
def test_row_does_not_depend_on_its_neighbours(op):
    """A row has the same bits alone, in a batch, and at another place of the batch.

    Except on a GPU, where rows are summed in vectors of 16 bytes, if those do not divide the row.
    """
    x = rand((9, 336 if jax.default_backend() == "gpu" else 333))
    f = getattr(jaxnorm, op)
    whole = np.asarray(f(x))
    np.testing.assert_array_equal(f(x[4:5])[0], whole[4])
    np.testing.assert_array_equal(f(x[::-1])[::-1], whole)


@ops
@pytest.mark.parametrize("axis", [0, (0, 1)])
def test_sum_is_rounded_before_it_is_normalised(op, axis):
    """Between 256 and 512 the bfloat16 numbers are even; XLA likes to keep what lies between in float32."""
    x = jnp.full((4, 1), 256, "bfloat16")
    residual = jnp.asarray([[0], [0.9], [1.1], [2]], "bfloat16")
    y, s = jax.jit(functools.partial(getattr(jaxnorm, op), axis=axis))(x, residual=residual)
    np.testing.assert_array_equal(oracle.f64(s).ravel(), [256, 256, 258, 258])
    oracle.assert_close(y, getattr(oracle, op)(s, axis=axis), "bfloat16")


@ops
def test_implementations_agree(op):
    x, scale = rand((4, 129)), rand((129,), seed=1)
    for implementation in (None, "kernel", "xla"):
        if implementation == "kernel" and not CPU.available:
            continue  # tests/test_errors.py: it is refused then
        y = getattr(jaxnorm, op)(x, scale, implementation=implementation)
        oracle.assert_close(y, getattr(oracle, op)(x, scale), "float32", formula(op, x, scale))


# ---- programs ----


def _primitives(f, *args):
    return suite.jaxnorm_primitives(f, *args)


def test_backward_has_what_is_needed_and_no_more():
    """One call for every subset of the arguments, whose results are exactly their cotangents."""
    x, scale, bias, residual = rand((4, 9)), rand((9,)), rand((9,)), rand((4, 9))

    def total(x, scale, bias, residual):
        y, s = jaxnorm.layer_norm(x, scale, bias, residual=residual)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(s))

    for size in range(1, 5):
        for argnums in itertools.combinations(range(4), size):
            program = jax.make_jaxpr(jax.grad(total, argnums))(x, scale, bias, residual)
            (call,) = [e for e in program.eqns if e.primitive.name == "jaxnorm_norm_bwd"]
            results = (bool({0, 3} & {*argnums})) + (1 in argnums) + (2 in argnums)
            assert len(call.outvars) == results
            assert sum(v.aval.shape == (4, 9) for v in call.outvars) == bool({0, 3} & {*argnums})


def test_unused_cotangents_are_dropped():
    """Of a program that computes all of them and uses one, dead code elimination leaves one."""
    x, scale, bias = rand((4, 9)), rand((9,)), rand((9,))

    def gradients(*args):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(jaxnorm.layer_norm(*a))), (0, 1, 2))(*args)

    for used, (i, shape) in itertools.product((False, True), enumerate(((4, 9), (1, 9), (1, 9)))):
        program = jax.make_jaxpr(lambda *a, i=i: jax.jit(gradients)(*a)[i])(x, scale, bias)
        jaxpr, _ = pe.dce_jaxpr(program.jaxpr, [True])
        (inner,) = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
        (call,) = [e for e in inner.params["jaxpr"].eqns if e.primitive.name == "jaxnorm_norm_bwd"]
        assert [v.aval.shape for v in call.outvars] == [shape]
        assert not used or len(call.invars) == (5 if i == 0 else 4)


def test_cotangent_of_the_sum_is_added_in_the_same_pass():
    """No addition of arrays of x's size is left outside the kernel."""
    x, residual, scale = rand((4, 9)), rand((4, 9), seed=1), rand((9,))

    def total(x, residual, scale):
        y, s = jaxnorm.rms_norm(x, scale, residual=residual)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(s))

    program = jax.make_jaxpr(jax.grad(total, (0, 1)))(x, residual, scale)
    names = [e.primitive.name for e in program.eqns if e.outvars[0].aval.shape == (4, 9)]
    assert "add" not in names
    assert "add_any" not in names


@ops
def test_policy_that_keeps_statistics_runs_forward_once(op):
    """Backward then needs x and the statistics alone."""
    x, w = rand((4, 9)), rand((4, 9), seed=1)
    f = getattr(jaxnorm, op)
    for name, runs in ((f"jaxnorm_{op}", 1), ("something_else", 2)):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        checked = jax.checkpoint(lambda x: jnp.sum(w * f(jnp.sin(x))), policy=policy)
        counts = _primitives(jax.grad(checked), x)
        assert counts["jaxnorm_norm_bwd"] == 1
        assert counts["jaxnorm_norm_fwd"] == runs


# ---- vmap ----


SUBSETS = list(itertools.product((None, 0), repeat=5))[1:]


def results_and_gradients(x, scale, bias, residual, mask):
    def total(*a):
        y, s = jaxnorm.layer_norm(*a[:3], residual=a[3], mask=mask, epsilon=0.1)
        return jnp.sum(jnp.sin(y.astype("float32"))) + jnp.sum(s.astype("float32") ** 2)

    y, s = jaxnorm.layer_norm(x, scale, bias, residual=residual, mask=mask, epsilon=0.1)
    return y, s, jax.grad(total, (0, 1, 2, 3))(x, scale, bias, residual)


@functools.cache
def jit_of_one():
    """Compiled once for all that is mapped."""
    return jax.jit(results_and_gradients)


# Rules of vmap do not look at dtypes: in another than that of the parameters, each operand alone and all together.
@pytest.mark.parametrize(
    ("mapped", "dtype"),
    [
        *((mapped, "float32") for mapped in SUBSETS),
        *((mapped, "bfloat16") for mapped in SUBSETS if sum(d == 0 for d in mapped) in (1, 5)),
    ],
)
def test_vmap_over_any_subset(mapped, dtype):
    """Of x, scale, bias, residual and mask, with the gradient: as a loop gives, for all of them."""
    args = [
        rand((4, 7), dtype),
        rand((7,), "float32", 1),
        rand((7,), "float32", 2),
        rand((4, 7), dtype, 3),
        np.asarray(_mask((4, 7))),
    ]
    n = 3
    stacked = [
        a if d is None else np.stack([np.roll(np.asarray(a), i, -1) for i in range(n)])
        for a, d in zip(args, mapped, strict=True)
    ]

    got, one_of = jax.jit(jax.vmap(results_and_gradients, mapped))(*stacked), jit_of_one()
    tolerance = 64 * oracle.UNIT[dtype]
    for i in range(n):
        one = [a if d is None else a[i] for a, d in zip(stacked, mapped, strict=True)]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one_of(*one)), strict=True):
            b = oracle.f64(b)
            size = tolerance * np.max(np.abs(b))
            np.testing.assert_allclose(oracle.f64(a[i]), b, rtol=tolerance, atol=size)


@ops
@pytest.mark.parametrize("mapped", [(0, None), (None, 0)])
def test_vjp_of_vmap_that_maps_the_other_term_of_the_sum(op, mapped):
    """What is differentiated has no batch dimension, and both results have: the sum's cotangent is added up over it."""
    own, other, scale = (rand(shape, "float32") for shape in ((7,), (3, 7), (7,)))
    cotangents = rand((3, 7), "float32"), rand((3, 7), "float32") + 1

    def gradient_of_own(f):
        def both(own):
            x, residual = (other, own) if mapped[0] == 0 else (own, other)
            return jax.vmap(lambda x, r: f(x, scale, residual=r), mapped)(x, residual)

        return value_and_vjp(both)((own,), cotangents)

    got, want = map(gradient_of_own, (getattr(jaxnorm, op), functools.partial(formula, op)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@needs_cpu
def test_vmap_calls_the_kernel_without_materialising_x():
    """x, mapped or not, reaches the kernel at its own size."""
    x, scale = jnp.ones((4, 7), "float32"), jnp.ones((3, 7), "float32")

    def lowered(mapped, *args):
        f = jax.vmap(lambda x, s: jax.vjp(jaxnorm.layer_norm, x, s)[1](x), mapped)
        return jax.jit(f).lower(*args).as_text()

    text = lowered((None, 0), x, scale)
    assert text.count("custom_call @jaxnorm_norm") == 2
    assert "tensor<1x4x7xf32>" in text
    text = lowered((0, 0), jnp.ones((3, 4, 7), "float32"), scale)
    assert text.count("custom_call @jaxnorm_norm") == 2
    widened = [line for line in text.splitlines() if "broadcast_in_dim" in line]
    assert not any("-> tensor<3x4x7xf32>" in line for line in widened)


def test_nested_vmap_of_parameters():
    """Scale mapped twice, bias once, x between: all groups get their own gradients."""
    x, scale, bias = rand((5, 4, 7)), rand((2, 3, 7), seed=1), rand((3, 7), seed=2)

    def f(x, scale, bias):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(jaxnorm.layer_norm(*a))), (0, 1, 2))(
            x, scale, bias
        )

    g = jax.vmap(jax.vmap(jax.vmap(f, (0, None, None)), (None, 0, 0)), (None, 0, None))
    got, f = jax.jit(g)(x, scale, bias), jax.jit(f)
    for i, j, k in itertools.product(range(2), range(3), range(5)):
        for a, b in zip(got, f(x[k], scale[i, j], bias[j]), strict=True):
            np.testing.assert_allclose(a[i, j, k], b, rtol=1e-5, atol=1e-5)


# ---- Flax ----


@dtypes
@pytest.mark.parametrize("masked", [False, True])
def test_same_as_flax(dtype, masked):
    """The modules that these functions replace."""
    linen = pytest.importorskip("flax.linen")
    x, scale, bias = rand((4, 65), dtype), rand((65,), "float32", 1), rand((65,), "float32", 2)
    mask = _mask((4, 65)) if masked else None
    kw = {"dtype": dtype, "use_fast_variance": False}
    with jax.numpy_dtype_promotion("standard"):
        layer = linen.LayerNorm(**kw).apply(
            {"params": {"scale": scale, "bias": bias}}, x, mask=mask
        )
        rms = linen.RMSNorm(**kw).apply({"params": {"scale": scale}}, x, mask=mask)
    floor = 8 if dtype in ("float32", "float64") else 2
    ours = jaxnorm.layer_norm(x, scale, bias, mask=mask)
    oracle.assert_close(ours, oracle.f64(layer), dtype, floor=floor)
    oracle.assert_close(jaxnorm.rms_norm(x, scale, mask=mask), oracle.f64(rms), dtype, floor=floor)
