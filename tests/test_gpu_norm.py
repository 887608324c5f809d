"""On an NVIDIA GPU: layer_norm and rms_norm of many, few, long, short and misaligned rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_norm
from gpu_cases import LITTLE_LEFT, halves, rand

import jaxnorm
from bench import cases

pytestmark = pytest.mark.gpu


def each_norm(test):
    """Runs a test for both norms, with a residual and without, in 16 bits and in 32."""
    test = pytest.mark.parametrize("residual", [False, True])(test)
    test = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])(test)
    return pytest.mark.parametrize("op", cases.NORMS)(test)


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [4096, 16003, 20000, 20001])
def test_norm_many_long_rows(op, dtype, columns):
    """More rows than there are blocks, or clusters of them, which then stay for several."""
    test_norm.check(op, rand((500, columns), dtype), "float32", residual=True)


@pytest.mark.parametrize("op", cases.NORMS)
@halves
@pytest.mark.parametrize(
    "shape", [(1030, 2048), (4300, 3072), (4300, 5120), (300, 8200), (300, 12288)]
)
def test_norm_blocks_of_a_warp_share_rows(op, dtype, shape):
    """Four and eight blocks, with a few rows for each multiprocessor and with more."""
    test_norm.check(op, rand(shape, dtype), "float32", residual=shape[1] == 3072)


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("shape", [(2048, 4096), (300, 12288), (20000, 64), (128, 32000)])
def test_norm_gradients_one_after_the_other(op, shape):
    """Sums over rows are finished by blocks that begin before the rows have been summed up, and wait for that."""
    xs = [rand(shape, "bfloat16", seed) for seed in range(12)]
    dy, scale = rand(shape, "bfloat16", 12), rand(shape[1:], "float32", 13)

    def gradients(x):
        return jax.vjp(getattr(jaxnorm, op), x, scale)[1](dy)

    together = jax.jit(lambda xs: [gradients(x) for x in xs])
    alone = [jax.tree.map(np.asarray, jax.jit(gradients)(x)) for x in xs]
    for _ in range(5):
        for got, expected in zip(together(xs), alone, strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, expected)


@halves
@pytest.mark.parametrize("shape", [(2203, 19711), (2200, 20002), (1001, 50257), (500, 100001)])
def test_layer_norm_of_many_long_rows_beside_the_grid(dtype, shape):
    """Clusters of 2 to 8 blocks stay, some for one row more. Blocks and warps have unequal parts."""
    test_norm.check("layer_norm", rand(shape, dtype), "float32")


def test_layer_norm_of_many_long_rows_is_each_row_alone():
    """Constant rows, huge ones, and what is not finite leave the rows that share their turns as they are."""
    x = np.array(rand((2203, 19711), "bfloat16"))
    f = jax.jit(lambda x: jaxnorm.layer_norm(x, implementation="kernel"))
    before = np.array(f(x), np.float32)
    x[5], x[20], x[31, 7], x[46, -1], x[2202, 0] = 7, x[20] * 1e15, np.nan, np.inf, -np.inf
    y = np.array(f(x), np.float32)
    special = [5, 20, 31, 46, 2202]
    np.testing.assert_array_equal(np.delete(y, special, 0), np.delete(before, special, 0))
    assert (y[5] == 0).all()
    np.testing.assert_allclose(y[20], before[20], atol=0.03, rtol=0.01)
    assert np.isnan(y[[31, 46, 2202]]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape", [(12, 131072), (5, 2097152), (403, 9216), (403, 9001), (203, 20480), (2203, 19711)]
)
def test_layer_norm_of_rows_that_begin_far_from_their_mean(dtype, shape):
    """The mean of such a row is exact; and a row without deviations has none, wherever it is cut."""
    x = np.array(rand(shape, dtype))
    x[:, :8] = 300
    test_norm.check("layer_norm", jnp.asarray(x), "float32")
    x[1] = 7.1
    y = np.array(jaxnorm.layer_norm(jnp.asarray(x), implementation="kernel"), np.float32)
    # A mean that is one rounding off, as XLA's may be, would give 5e-4.
    assert np.abs(y[1]).max() < 1e-9


@each_norm
@pytest.mark.parametrize(
    "shape", [(1, 257), (3, 1023), (5, 4095), (2, 9001), (7, 1500), (29, 100001), (37, 128257)]
)
def test_norm_fewer_blocks_than_ways_to_lie(op, dtype, residual, shape):
    """Backward of rows of odd length: each block, or cluster, has rows that begin at several places within a slot."""
    test_norm.check(op, rand(shape, dtype), "float32", residual=residual)


@each_norm
@pytest.mark.parametrize(
    "shape",
    [
        (4001, 768),
        (3301, 1500),
        (3302, 1536),
        (1603, 2048),
        (1203, 2501),
        (1603, 2560),
        (801, 5001),
        (803, 5120),
        (801, 6144),
        (401, 9001),
        (403, 9216),
        (203, 20480),
    ],
)
def test_norm_rows_that_share_multiprocessors(op, dtype, residual, shape):
    """Backward: an odd number of rows in a block, or several blocks of different clusters on a multiprocessor."""
    test_norm.check(op, rand(shape, dtype), "float32", residual=residual)


def test_norm_masked_rows_that_share_multiprocessors():
    where = rand((1, 5120), "float32", 9) > 0
    test_norm.check("layer_norm", rand((403, 5120), "bfloat16"), "float32", mask=where)


@each_norm
@pytest.mark.parametrize(
    "shape",
    [
        (20, 8200),
        (70, 65544),
        (9, 131080),
        (38, 131080),
        (75, 131080),
        (8, LITTLE_LEFT),
        (3, 2097152),
    ],
)
def test_norm_few_long_rows(op, dtype, shape, residual):
    """All processors together: more rows and fewer than shared memory holds, one group of them and several."""
    test_norm.check(op, rand(shape, dtype), "float32", residual=residual)


@pytest.mark.parametrize(
    "shape",
    [
        (20, 65544),
        (9, 131080),
        (3, 512),
        (5001, 128),
        (90001, 128),
        (3, 1024),
        (5001, 1024),
        (30001, 1024),
    ],
)
@pytest.mark.parametrize("argnums", [(0,), (0, 1), (0, 2), (0, 1, 2)])
def test_norm_one_gradient(shape, argnums):
    """Each gradient is right whichever others are wanted, and two calls that add up sums in one order agree."""
    args = [rand(shape, "bfloat16"), *(rand(shape[1:], "float32", seed) for seed in (1, 2))]
    dy = rand(shape, "float32", 3)

    def loss(*args):
        return jnp.vdot(jaxnorm.layer_norm(*args).astype("float32"), dy)

    everything = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    some = jax.jit(jax.grad(loss, argnums))(*args)
    for i, got in zip(argnums, some, strict=True):
        if i == 0:
            # Alone it comes from another schedule, which adds up a row's sums in another order.
            expected, sizes = (
                oracle.norm_vjp(args[0], dy, args[1], sizes=s)[0] for s in (False, True)
            )
            oracle.assert_close(got, expected, "bfloat16", size=sizes + np.mean(sizes), floor=16)
        elif shape[1] > 2048:
            np.testing.assert_array_equal(got, everything[i])
        else:
            # Hundreds of blocks' sums, each of the size of the root of the rows, are rounded as they are added up.
            tolerance = 32 * float(jnp.finfo("float32").eps)
            atol = tolerance * shape[0] ** 0.5
            np.testing.assert_allclose(got, everything[i], rtol=tolerance, atol=atol)


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        (45003, 35),
        (45001, 66),
        (14003, 513),
        (14001, 1002),
        (3003, 1802),
        (2501, 3001),
        (1003, 1024),
    ],
)
def test_norm_rows_in_chunks(op, dtype, shape):
    """Several chunks of rows for each block, the last one not full, and arrays that end within a slot."""
    residual = shape[0] % 4 == 3
    test_norm.check(op, rand(shape, dtype), "float32", residual=residual)


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        (45003, 32),
        (30001, 40),
        (3, 128),
        (5001, 128),
        (30001, 128),
        (33793, 128),
        (50004, 128),
        (60001, 128),
        (76033, 128),
        (20011, 200),
        (20011, 256),
        (9001, 400),
        (9001, 512),
    ],
)
def test_norm_many_short_rows(op, dtype, shape):
    """Lanes that rows fill or not, of blocks that stay for several turns, the last one not full.

    Of 128 columns more rows and fewer than the device has at once.
    """
    test_norm.check(op, rand(shape, dtype), "float32")


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((50001, 1024), "bfloat16"),
        ((30002, 2048), "float16"),
        ((40003, 1535), "bfloat16"),
        ((50003, 1023), "float16"),
        ((25001, 1024), "float32"),
        ((25001, 1023), "float32"),
    ],
)
def test_norm_of_arrays_much_larger_than_l2(op, shape, dtype):
    """Backward of 16 bits then has as many rows at once as memory feeds. The oracle would take a minute."""
    x, dy = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2))
    scale = rand(shape[1:], "float32")

    def backward(implementation):
        function = functools.partial(getattr(jaxnorm, op), implementation=implementation)
        return jax.jit(lambda x, scale, dy: jax.vjp(function, x, scale)[1](dy))(x, scale, dy)

    got, wanted = backward("kernel"), backward("xla")
    error = jnp.abs(got[0].astype("float32") - wanted[0].astype("float32"))
    step = max(float(jnp.finfo(dtype).eps), 1e-5)
    assert float(jnp.max(error - step * jnp.abs(wanted[0].astype("float32")))) < 1e-4
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-5, atol=1e-5 * shape[0] ** 0.5)


@pytest.mark.parametrize("op", cases.NORMS)
@halves
def test_norm_all_rows_at_once(op, dtype):
    """Variances are right however far the mean lies, and each row is computed by itself."""
    x = np.random.default_rng(0).standard_normal((40003, 128), np.float32)
    x[0::4] += 3
    x[1::4] += 100
    x[2::4] = 1000 + x[2::4] * 4
    x[7], x[9], x[11, 3:] = 0, 129, 0  # also 129 * 128 is no power of two
    x[12] *= 1e-3
    before = np.array(x)
    x[21, 5], x[22, 100], x[35, 0], x[37] = np.nan, np.inf, -np.inf, 3e4
    special = [21, 22, 35, 37]

    def run(x):
        function = jax.jit(getattr(jaxnorm, op))
        return np.asarray(function(jnp.asarray(x).astype(dtype)), np.float64)

    y, y_before = run(x), run(before)
    np.testing.assert_array_equal(np.delete(y, special, 0), np.delete(y_before, special, 0))
    assert np.isnan(y[21]).all()
    exact = np.asarray(jnp.asarray(before).astype(dtype), np.float64)
    centred = exact - exact.mean(1, keepdims=True) if op == "layer_norm" else exact
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6)
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y_before, expected, rtol=step, atol=2e-3 * step + 3e-4)
    if op == "layer_norm":
        assert (y[[7, 9, 37]] == 0).all()
        assert np.isnan(y[[22, 35]]).all()
    else:
        np.testing.assert_allclose(y[37], 1, rtol=step)


NORM_CASES = [c for c in cases.select(tag="gpu") if c.op in cases.NORMS]


@pytest.mark.parametrize("case", NORM_CASES, ids=lambda c: f"{c.op} {c.label}")
def test_norm_benchmark_cases(case):
    """Shapes of the benchmark, fewer rows of them: more than there are blocks that add up gradients of parameters."""
    rows, columns = case.shape
    x = rand((min(rows, 1100 if columns < 20000 else 70), columns), case.dtype)
    test_norm.check(case.op, x, "float32")


@pytest.mark.parametrize("op", cases.NORMS)
@halves
def test_norm_misaligned_base(op, dtype):
    """Pointers that are multiples of the element only: of x, of the scale and of the cotangent."""
    options = {"center": op == "layer_norm"}
    for columns in (33, 1024, 8193, 40001):
        base, scale = rand((4 * columns + 3,), dtype), rand((columns + 1,), "float32")
        ct = rand((4 * columns + 1,), dtype, 1)

        def f(base, scale, ct, columns=columns):
            x = base[3 : 3 + 4 * columns].reshape(4, columns)
            y, pullback = jax.vjp(getattr(jaxnorm, op), x, scale[1:])
            return x, y, pullback(ct[1:].reshape(4, columns))

        x, y, bars = jax.jit(f)(base, scale, ct)
        scale, ct = scale[1:], ct[1:].reshape(4, columns)
        oracle.assert_close(y, getattr(oracle, op)(x, scale), dtype)
        expected = oracle.norm_vjp(x, ct, scale, **options)
        sizes = oracle.norm_vjp(x, ct, scale, **options, sizes=True)
        size = sizes[0] + np.mean(sizes[0])
        oracle.assert_close(bars[0], expected[0], dtype, size=size, floor=16)
        oracle.assert_close(bars[1], expected[1], "float32", size=sizes[1], floor=64)
