"""On an NVIDIA GPU: every dispatch boundary, sizes beyond 32 bits, CUDA graphs, streams, two GPUs.

The other files run on the default device, so on a GPU machine they test the CUDA kernels too.
"""

import functools
import math
import threading

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import processes
import pytest
import test_batch_norm
import test_cross_entropy
import test_norm
from meshes import GPUS

import jaxnorm
from bench import cases

pytestmark = pytest.mark.gpu

SOFTMAXES = ("softmax", "log_softmax")
softmaxes = pytest.mark.parametrize("op", SOFTMAXES)
halves = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def test_kernels_are_registered():
    cuda = next(m for m in jaxnorm.status().modules if m.platform == "cuda")
    assert cuda.available, cuda.reason


def rand(shape, dtype, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * 3
    return jnp.asarray(values).astype(dtype)


def brightening(shape, most, seed=0):
    """Images, along the first dimension, of which later ones are larger, the last by `most`."""
    rest = (1,) * (len(shape) - 1)
    ramp = np.linspace(0, most, shape[0], dtype="float32").reshape(-1, *rest)
    return rand(shape, "float32", seed) + ramp


def check(op, x, axis=-1):
    """Result and gradient against the oracle and XLA; the kernels are in the program."""
    dtype, ct = x.dtype.name, rand(x.shape, x.dtype, 1)

    def run(function):
        def both(x, ct):
            y, pullback = jax.vjp(lambda x: function(x, axis), x)
            return y, pullback(ct)[0]

        return jax.jit(both)

    f = run(getattr(jaxnorm, op))
    kernels = {c.kind for c in hlo.custom_calls(f.lower(x, ct).compile().as_text())}
    # Rows of one element are left to XLA.
    one = x.shape[axis] == 1
    assert kernels == (set() if one else {"jaxnorm_softmax_fwd", "jaxnorm_softmax_bwd"})
    (y, bar), (y_xla, bar_xla) = f(x, ct), run(getattr(jax.nn, op))(x, ct)
    expected = getattr(oracle, op)(x, axis)
    size = np.abs(expected) if op == "softmax" else None
    oracle.assert_close(y, expected, dtype, y_xla, size=size)
    expected = oracle.softmax_vjp(x, ct, axis, log=op == "log_softmax")[0]
    size = oracle.softmax_vjp_size(x, ct, axis, log=op == "log_softmax")
    oracle.assert_close(bar, expected, dtype, bar_xla, 16, size)


# Powers of two are where tiers meet; cases of the benchmark are what people use.
BOUNDARIES = sorted({max(1, (1 << k) + d) for k in range(18) for d in (-1, 0, 1)})


@softmaxes
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dispatch_boundaries(op, dtype):
    for columns in BOUNDARIES:
        check(op, rand((3, columns), dtype))


# Of 132 parts that begin with a cache line, the last has a single slot of 16-bit elements.
LITTLE_LEFT = 8 * (131 * 1000 + 1)


@softmaxes
@pytest.mark.parametrize("columns", [131072, 1 << 20, (1 << 20) + 1, LITTLE_LEFT])
@pytest.mark.parametrize("rows", [1, 8])
def test_long_rows(op, columns, rows):
    """Few rows, so that several blocks share one."""
    for dtype in ("bfloat16", "float32"):
        check(op, rand((rows, columns), dtype))


# Operands that broadcast are covered by tests/test_softmax.py, on this device too.
CASES = [
    c
    for c in cases.select(tag="gpu")
    if c.op in SOFTMAXES and c.where_shape is None and c.bias_shape is None
]


@halves
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op} {c.label}")
def test_benchmark_cases(case, dtype):
    """Shapes of the benchmark, fewer rows of them: more than the GPU has processors."""
    shape = list(case.shape)
    axis = case.axis % len(shape)
    shape[0] = min(shape[0], 300 if axis == len(shape) - 1 else 3)
    check(case.op, rand(shape, dtype), axis)


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [4096, 16003, 20000, 20001])
def test_norm_many_long_rows(op, dtype, columns):
    """More rows than there are blocks, or clusters of them, which then stay for several."""
    test_norm.check(op, rand((500, columns), dtype), "float32", residual=True)


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


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 257), (3, 1023), (5, 4095), (2, 9001), (7, 1500), (29, 100001), (37, 128257)]
)
def test_norm_fewer_blocks_than_ways_to_lie(op, dtype, residual, shape):
    """Backward of rows of odd length: each block, or cluster, has rows that begin at several places within a slot."""
    test_norm.check(op, rand(shape, dtype), "float32", residual=residual)


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("residual", [False, True])
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


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("residual", [False, True])
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
    """As above; more rows than there are blocks that add up gradients of parameters."""
    rows, columns = case.shape
    x = rand((min(rows, 1100 if columns < 20000 else 70), columns), case.dtype)
    test_norm.check(case.op, x, "float32")


BATCH_NORM_CASES = [c for c in cases.select(tag="gpu") if c.op == "batch_norm"]


@pytest.mark.parametrize("case", BATCH_NORM_CASES, ids=lambda c: f"{c.op} {c.label}")
def test_batch_norm_benchmark_cases(case):
    """Two images of each batch, and their float32 twins."""
    options = {"axis": case.axis, "parameters": "float32", "relu": "relu" in case.tail}
    for dtype in (case.dtype, "float32"):
        x = rand((2, *case.shape[1:]), dtype)
        test_batch_norm.check(x, residual=case.tail == "add_relu", floor=64, **options)


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((90, 56, 56, 64), 3, "bfloat16"),
        ((60, 35, 56, 100), 3, "float16"),
        ((50, 33, 57, 77), 3, "float32"),
        ((240, 256, 14, 14), 1, "float16"),
        ((700, 70, 14, 14), 1, "bfloat16"),
        ((200, 100, 28, 28), 1, "float16"),
        ((290, 130, 14, 14), 1, "float32"),
    ],
)
def test_batch_norm_in_several_runs(shape, axis, dtype):
    """Each block has its lines in several runs. Later images are larger: a line left out shows."""
    x = brightening(shape, 4)
    test_batch_norm.check(x.astype(dtype), axis=axis, parameters="float32", relu=True, floor=64)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((16, 112, 112, 32), 3),  # every block has some of every channel
        ((32, 56, 56, 64), 3),  # so many of them that their posts are relayed
        ((40, 9, 128), 2),  # blocks with fewer lines than threads
        ((100, 8), 1),  # a row is one thread
        ((1, 16), 1),  # one block
        ((16, 32, 112, 112), 1),  # parts of a channel
        ((37, 24, 40, 8), 1),  # whole channels, several rows of threads
        ((19, 512, 8, 8), 1),  # several channels to a block
        ((5, 66, 24, 24), 1),  # fewer tiles than blocks
        ((99, 8), 1),  # bytes of bits that are no whole words
        ((7, 130, 8, 5), 1),  # in each line
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_batch_norm_on_chip(shape, axis, dtype):
    """Calls that are one launch. Later images are larger: one that is left out shows."""
    x = brightening(shape, 9)
    for relu, residual in ((False, False), (True, False), (True, True)):
        options = {"axis": axis, "parameters": "float32", "relu": relu, "residual": residual}
        test_batch_norm.check(x.astype(dtype), floor=64, **options)
    # Far from 0, and the first of each feature, which distances are taken from, far from all others.
    far = (x + 1e4).at[0].set(0) if shape[0] > 1 else x + 1e4
    f = jax.jit(lambda x: jaxnorm.batch_norm(x, axis=axis))
    reduced = tuple(i for i in range(x.ndim) if i != axis)
    first, second = f(far), f(far)
    np.testing.assert_allclose(first[1], np.mean(oracle.f64(far), reduced), rtol=1e-6)
    np.testing.assert_allclose(first[2], np.var(oracle.f64(far), reduced), rtol=1e-5, atol=1e-6)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("images", [100, 104, 105, 106, 107, 108, 109, 112])
def test_batch_norm_bits_of_arrays_that_hardly_fit_on_chip(images):
    """They are written in several parts. The residual's cotangent says exactly what they are."""
    x, residual, ct = (rand((images, 64, 32, 64), "float16", seed) for seed in range(3))

    @jax.jit
    def f(x, residual, ct):
        y, pullback = jax.vjp(
            lambda r: jaxnorm.batch_norm(x, axis=1, residual=r, activation="relu")[0], residual
        )
        return y, pullback(ct)[0]

    y, bar = f(x, residual, ct)
    np.testing.assert_array_equal(bar, jnp.where(y > 0, ct, 0))
    assert 0.3 < float(jnp.mean(y > 0, dtype="float32")) < 0.7


@pytest.mark.parametrize("shape", [(40, 9, 128), (360, 64), (3000, 8)])
def test_batch_norm_variance_of_one_block(shape):
    """The mean of the first images is far from that of all."""
    last = len(shape) - 1
    # All results: without y it would be a call for statistics.
    f = jax.jit(lambda x: jaxnorm.batch_norm(x, axis=last))
    for seed in range(6):
        x = brightening(shape, 9, seed).astype("bfloat16")
        expected = np.var(oracle.f64(x), tuple(range(last)))
        oracle.assert_close(f(x)[2], expected, "float32", floor=4)


@pytest.mark.parametrize(
    "last", [5, 6, 7, 9, 11, 12, 13, 14, 15, 18, 20, 25, 27, 28, 30, 36, 44, 60, 100]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_norm_bits_of_short_rows(last, dtype):
    """Rows of bits that end within a byte, in lines that fill a tile and in lines that do not."""
    for shape in ((5, 3, 7, last), (130, 37, 4, last)):
        for residual in (False, True):
            options = {"axis": 1, "parameters": "float32", "relu": True, "residual": residual}
            test_batch_norm.check(rand(shape, dtype), floor=64, **options)


@softmaxes
@halves
def test_strided(op, dtype):
    for inner in (1, 2, 3, 7, 8, 31, 33, 56, 127, 129, 1024):
        for columns in (1, 5, 64, 257, 4100):
            check(op, rand((2, columns, inner), dtype), 1)


@softmaxes
@halves
def test_misaligned_base(op, dtype):
    """Pointers that are multiples of the element only: slices of a donated or padded buffer."""
    for columns in (33, 257, 1025, 8193, 40001):
        base = rand((4 * columns + 3,), dtype)
        for offset in (1, 2, 3):
            f = jax.jit(
                lambda b, o=offset, c=columns: getattr(jaxnorm, op)(b[o : o + 4 * c].reshape(4, c))
            )
            x = base[offset : offset + 4 * columns].reshape(4, columns)
            oracle.assert_close(f(base), getattr(oracle, op)(x), dtype)


@pytest.mark.parametrize("op", cases.NORMS)
@halves
def test_norm_misaligned_base(op, dtype):
    """The same; of x, of the scale and of the cotangent."""
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


@halves
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((70, 33), 1), ((70, 256), 1), ((3, 5, 49), 1), ((3, 5, 4096), 1), ((2, 3, 20001), 1)],
)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_batch_norm_misaligned_base(dtype, shape, axis, offset):
    """The same; of x, the residual and the cotangent, in training and in inference."""
    size, features = math.prod(shape), shape[axis]
    flat = [rand((size + offset,), dtype, seed) for seed in range(3)]
    vectors = [rand((features + 1,), "float32", seed) for seed in range(3, 7)]

    def parts(flat, vectors):
        return [a[offset:].reshape(shape) for a in flat], [v[1:] for v in vectors]

    @jax.jit
    def f(flat, vectors):
        (x, residual, ct), (scale, bias, mean, std) = parts(flat, vectors)
        options = {"axis": axis, "activation": "relu"}

        def train(x, scale, bias, residual):
            return jaxnorm.batch_norm(x, scale, bias, residual=residual, **options)[0]

        def infer(x):
            return jaxnorm.batch_norm_inference(
                x, mean, std * std + 1, scale, bias, residual=residual, **options
            )

        y, pullback = jax.vjp(train, x, scale, bias, residual)
        z, pullback_z = jax.vjp(infer, x)
        return y, pullback(ct), z, pullback_z(ct)[0]

    y, bars, z, z_bar = f(flat, vectors)
    (x, residual, ct), (scale, bias, mean, std) = parts(flat, vectors)
    fixed = {"mean": mean, "var": std * std + 1}
    for got, got_bars, options in ((y, bars, {}), (z, (z_bar,), fixed)):
        options = {"axis": axis, **options}
        # A sum that cancels is as exact as its terms are large.
        size = np.abs(oracle.batch_norm(x, scale, bias, residual, **options)[0])
        expected = oracle.batch_norm(x, scale, bias, residual, relu=True, **options)[0]
        oracle.assert_close(got, expected, dtype, size=size + np.mean(size))
        kw = {"scale": scale, "positive": oracle.f64(got) > 0, **options}
        expected = oracle.batch_norm_vjp(x, ct, **kw)
        sizes = oracle.batch_norm_vjp(x, ct, **kw, sizes=True)
        for i, bar in enumerate(got_bars):
            oracle.assert_close(
                bar, expected[i], bar.dtype.name, size=sizes[i] + np.mean(sizes[i]), floor=32
            )


# ---- softmax_cross_entropy ----

SMOOTH = {"smoothing": 0.1, "z_loss": 1e-3}


def check_cross_entropy(x, axis=-1, **options):
    """Loss and gradient against the oracle; some labels in the first and the last place, one is no class."""
    classes = x.shape[axis]
    labels = test_cross_entropy.some_labels(np.delete(x.shape, axis), classes)
    chosen = [classes - 1, 0, -1]
    labels.flat[:3] = chosen[: labels.size]
    y, x_bar = test_cross_entropy.check(x, labels, axis, **options)
    assert np.isnan(y).sum() == (labels == -1).sum()
    return y, x_bar


def calls_of(function, *args):
    return [c.kind for c in hlo.custom_calls(hlo.text(function, *args))]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", [{}, SMOOTH], ids=["plain", "smooth"])
def test_a_gradient_is_one_call(axis, options):
    """Backward does not take lse, so that forward is dead code where the loss is not used."""
    x, labels = rand((300, 256), "bfloat16"), test_cross_entropy.some_labels(300, 256)
    if axis == 0:
        x = x.T
    options = {k: v for k, v in options.items() if k != "z_loss"}

    def mean(x):
        return jnp.mean(test_cross_entropy.loss_of(labels, axis=axis, **options)(x))

    forward, backward = "jaxnorm_cross_entropy_fwd", "jaxnorm_cross_entropy_bwd"
    assert calls_of(mean, x) == [forward]
    assert calls_of(jax.grad(mean), x) == [backward]
    assert sorted(calls_of(jax.value_and_grad(mean), x)) == [backward, forward]


@pytest.mark.parametrize("options", [{}, SMOOTH], ids=["plain", "smooth"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_cross_entropy_dispatch_boundaries(dtype, options):
    for columns in BOUNDARIES:
        check_cross_entropy(rand((3, columns), dtype), **options)


@pytest.mark.parametrize("options", [{}, SMOOTH], ids=["plain", "smooth"])
@pytest.mark.parametrize("columns", [131072, 1 << 20, (1 << 20) + 1])
def test_cross_entropy_of_long_rows(columns, options):
    for rows, dtype in ((1, "bfloat16"), (8, "bfloat16"), (8, "float32"), (3, "float64")):
        check_cross_entropy(rand((rows, columns), dtype), **options)


@pytest.mark.parametrize("columns", [5000, 70001, 600001])
@pytest.mark.parametrize("mask", [(1, 1), (5, 1), (5, 0)], ids=["classes", "all", "rows"])
def test_cross_entropy_of_long_masked_rows(columns, mask):
    """In the general mode, on one block, a cluster and all multiprocessors."""
    shape = (mask[0], columns if mask[1] else 1)
    where = np.random.default_rng(2).random(shape) < 0.8
    where[0] = True
    for dtype in ("bfloat16", "float32", "float64"):
        labels = test_cross_entropy.some_labels(5, columns)
        x = rand((5, columns), dtype)
        test_cross_entropy.check(x, labels, where=where, **SMOOTH)


CROSS_ENTROPY_CASES = [c for c in cases.select(tag="gpu") if c.op == "softmax_cross_entropy"]


@pytest.mark.parametrize("case", CROSS_ENTROPY_CASES, ids=lambda c: c.label)
def test_cross_entropy_benchmark_cases(case):
    """Shapes of the benchmark, fewer rows of them."""
    shape = list(case.shape)
    axis = case.axis % len(shape)
    shape[0] = min(shape[0], 300 if axis == len(shape) - 1 else 3)
    x = rand(shape, case.dtype)
    check_cross_entropy(x, axis)
    labels = test_cross_entropy.some_labels(np.delete(x.shape, axis), x.shape[axis])

    def total(x):
        return jnp.sum(test_cross_entropy.loss_of(labels, axis=axis)(x))

    assert calls_of(jax.grad(total), x) == ["jaxnorm_cross_entropy_bwd"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("options", [{}, SMOOTH], ids=["plain", "smooth"])
def test_cross_entropy_strided(dtype, options):
    for inner in (2, 3, 7, 8, 31, 56, 128, 1024):
        for classes in (2, 5, 64, 257, 4100):
            check_cross_entropy(rand((2, classes, inner), dtype), 1, **options)
    where = np.random.default_rng(2).random((2, 257, 1)) < 0.8
    labels = test_cross_entropy.some_labels((2, 33), 257)
    test_cross_entropy.check(rand((2, 257, 33), dtype), labels, 1, where=where, **options)


@halves
def test_cross_entropy_misaligned_base(dtype):
    for columns in (33, 257, 1025, 8193, 40001):
        base = rand((4 * columns + 3,), dtype)
        labels = test_cross_entropy.some_labels(4, columns)

        def f(base, offset, columns=columns, labels=labels):
            x = base[offset : offset + 4 * columns].reshape(4, columns)
            y, pullback = jax.vjp(test_cross_entropy.loss_of(labels, **SMOOTH), x)
            return x, y, pullback(y)[0]

        for offset in (1, 2, 3):
            x, y, x_bar = jax.jit(f, static_argnums=1)(base, offset)
            expected = oracle.softmax_cross_entropy(x, labels, **SMOOTH)
            oracle.assert_close(y, expected, "float32", floor=64)
            options = {"ct": y, **SMOOTH}
            expected = oracle.softmax_cross_entropy_vjp(x, labels, **options)
            size = oracle.softmax_cross_entropy_vjp(x, labels, **options, size=True)
            oracle.assert_close(x_bar, expected, dtype, floor=16, size=size)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("columns", [8, 37, 128, 4096, 4099, 200000])
def test_cross_entropy_gradient_of_huge_logits(dtype, axis, columns):
    """The kernel has the row, and so loses nothing in lse."""
    x, labels, p = test_cross_entropy.huge(dtype, columns)
    expected = p - (np.arange(columns) == labels[:, None])
    if axis == 0:
        x, expected = np.ascontiguousarray(x.T), expected.T
    ct = jnp.ones(4, oracle.acc_of(dtype))
    _, x_bar = test_cross_entropy.value_and_vjp(labels, jnp.asarray(x), ct, axis=axis)
    oracle.assert_close(x_bar, expected, dtype, floor=16)


def test_cross_entropy_same_bits():
    for shape in ((513, 4095), (8, 1 << 20), (9, 200001)):
        x = rand(shape, "bfloat16")
        labels = test_cross_entropy.some_labels(shape[0], shape[1])
        ct = jnp.ones(shape[0], "float32")
        first = test_cross_entropy.value_and_vjp(labels, x, ct, **SMOOTH)
        for _ in range(3):
            again = test_cross_entropy.value_and_vjp(labels, x, ct, **SMOOTH)
            for a, b in zip(again, first, strict=True):
                assert bool(jnp.all(a == b))


# ---- beyond 32 bits ----


def _filled(shape, dtype):
    """Numbers that differ by row, made on the device."""
    row = jnp.arange(shape[0], dtype="int32")[:, None] % 61
    column = jnp.arange(shape[1], dtype="int32")[None] % 53
    return ((row * column) % 17 - 8).astype(dtype)


@pytest.mark.parametrize("op", SOFTMAXES)
def test_more_than_two_to_the_31_elements(op):
    """Rows before, at and after each power of two where an index or an offset overflows."""
    columns = 4096
    rows = (1 << 31) // columns + 5
    x = jax.jit(lambda: _filled((rows, columns), "bfloat16"))()
    y = jax.jit(getattr(jaxnorm, op))(x)
    half = (1 << 30) // columns
    for r in (0, half - 1, half, 2 * half - 1, 2 * half, rows - 1):
        expected = getattr(oracle, op)(np.asarray(x[r]))
        oracle.assert_close(y[r], expected, "bfloat16")
    del y
    bar = jax.jit(lambda x: jax.vjp(getattr(jaxnorm, op), x)[1](x)[0])(x)
    for r in (0, 2 * half - 1, 2 * half, rows - 1):
        row = np.asarray(x[r])
        expected = oracle.softmax_vjp(row, row, log=op == "log_softmax")[0]
        size = oracle.softmax_vjp_size(row, row, log=op == "log_softmax")
        oracle.assert_close(bar[r], expected, "bfloat16", floor=32, size=size)


def test_cross_entropy_of_more_than_two_to_the_31_elements():
    columns = 4096
    rows = (1 << 31) // columns + 5
    x = jax.jit(lambda: _filled((rows, columns), "bfloat16"))()
    labels = jnp.arange(rows, dtype="int32") * 7 % columns
    loss = test_cross_entropy.loss_of(labels)
    y = jax.jit(loss)(x)
    bar = jax.jit(lambda x: jax.vjp(loss, x)[1](jnp.ones(rows, "float32"))[0])(x)
    half = (1 << 30) // columns
    for r in (0, half - 1, half, 2 * half - 1, 2 * half, rows - 1):
        row, label = np.asarray(x[r]), np.asarray(labels[r])
        oracle.assert_close(y[r], oracle.softmax_cross_entropy(row, label), "float32", floor=64)
        one = np.ones((), "float32")
        expected = oracle.softmax_cross_entropy_vjp(row, label, one)
        size = oracle.softmax_cross_entropy_vjp(row, label, one, size=True)
        oracle.assert_close(bar[r], expected, "bfloat16", floor=8, size=size)


def test_relu_of_more_than_two_to_the_31_elements():
    columns = 4100  # no multiple of 8
    rows = (1 << 31) // columns + 5
    x = jax.jit(lambda: _filled((rows, columns), "bfloat16"))()
    y, bar = jax.jit(lambda x: (jaxnorm.relu(x), jax.vjp(jaxnorm.relu, x)[1](x)[0]))(x)
    assert bool(jnp.all(y == jnp.maximum(x, 0)))
    assert bool(jnp.all(bar == y))


@pytest.mark.parametrize("op", cases.NORMS)
@pytest.mark.parametrize("columns", [128, 1023, 1024, 4096])
def test_norm_of_more_than_two_to_the_31_elements(op, columns):
    rows = (1 << 31) // columns + 5
    x = jax.jit(lambda: _filled((rows, columns), "bfloat16"))()
    scale = rand((columns,), "float32")
    y = jax.jit(getattr(jaxnorm, op))(x, scale)
    checked = (0, (1 << 30) // columns, (1 << 31) // columns - 1, (1 << 31) // columns, rows - 1)
    for r in checked:
        oracle.assert_close(y[r], getattr(oracle, op)(np.asarray(x[r]), scale), "bfloat16")
    del y
    bar = jax.jit(lambda x, s: jax.vjp(lambda x: getattr(jaxnorm, op)(x, s), x)[1](x)[0])(x, scale)
    for r in checked:
        row = np.asarray(x[r : r + 1])
        options = dict(center=op == "layer_norm")
        expected = oracle.norm_vjp(row, row, scale, **options)[0][0]
        size = oracle.norm_vjp(row, row, scale, sizes=True, **options)[0][0]
        oracle.assert_close(bar[r], expected, "bfloat16", floor=32, size=size)
    del bar
    # Rows come again after 61, so that the gradient of the scale is that of 61 rows with weights.
    bar = jax.jit(lambda x, s: jax.vjp(getattr(jaxnorm, op), x, s)[1](x)[1])(x, scale)
    distinct, times = np.asarray(x[:61]), np.bincount(np.arange(rows) % 61)[:, None]
    weighted = oracle.f64(distinct) * times
    expected = oracle.norm_vjp(distinct, weighted, scale, **options)[1]
    size = oracle.norm_vjp(distinct, weighted, scale, sizes=True, **options)[1]
    # A block adds up 16,000 rows one after the other.
    oracle.assert_close(bar, expected, "float32", floor=512, size=size)


@pytest.mark.parametrize(
    "shape", [((1 << 19) + 5, 4096), (513, 4096, 1024)], ids=["channels last", "channels between"]
)
def test_batch_norm_of_more_than_two_to_the_31_elements(shape):
    """Every element of some features, before and beyond each power of two where an offset overflows."""
    x = jax.jit(lambda: _filled((shape[0], math.prod(shape[1:])), "bfloat16").reshape(shape))()
    scale, bias = rand((4096,), "float32"), rand((4096,), "float32", 1)
    options = {"axis": 1, "activation": "relu"}

    @jax.jit
    def both(x, scale, bias):
        y, pullback = jax.vjp(lambda *args: jaxnorm.batch_norm(*args, **options)[0], x, scale, bias)
        return y, pullback(x)

    y, bars = both(x, scale, bias)
    features = [1, 2047, 4095]

    def some(a):
        return np.stack([np.asarray(a[:, c]) for c in features], 1)

    x_some, y_some = some(x), some(y)
    of_features = {"scale": np.asarray(scale)[features], "axis": 1}
    exact = oracle.batch_norm(x_some, bias=np.asarray(bias)[features], **of_features)
    expected = np.maximum(exact[0], 0)
    oracle.assert_close(y_some, expected, "bfloat16", size=np.abs(exact[0]) + 1)
    kw = {"positive": oracle.f64(y_some) > 0, **of_features}
    wanted = oracle.batch_norm_vjp(x_some, x_some, **kw)
    sizes = oracle.batch_norm_vjp(x_some, x_some, **kw, sizes=True)
    oracle.assert_close(some(bars[0]), wanted[0], "bfloat16", floor=16, size=sizes[0] + 1)
    for i in (1, 2):
        bar = np.asarray(bars[i])[features]
        oracle.assert_close(bar, wanted[i], "float32", floor=256, size=sizes[i])
    del y, bars

    kept = np.zeros((2, 4096), np.float32)
    kept[:, features] = exact[1], exact[2]
    infer = jax.jit(lambda x, *args: jaxnorm.batch_norm_inference(x, *args, **options))
    y = infer(x, *kept, scale, bias)
    oracle.assert_close(some(y), expected, "bfloat16", size=np.abs(exact[0]) + 1)


@pytest.mark.parametrize("shape", [(-1, 1), (2, 1, -1)], ids=["channels last", "channels between"])
def test_batch_norm_of_one_feature_of_more_than_two_to_the_31_elements(shape):
    """Counts beyond 32 bits. x and its cotangent have few values, and so have results and gradients."""
    rows, columns = (1 << 19) + 6, 4096
    x = jax.jit(lambda: _filled((rows, columns), "bfloat16").reshape(shape))()
    values = np.arange(-8.0, 9.0)
    places = np.outer(np.arange(61), np.arange(53)) % 17
    times = np.outer(np.bincount(np.arange(rows) % 61), np.bincount(np.arange(columns) % 53))
    part = np.bincount(places.ravel(), times.ravel()) / (rows * columns)

    def run(x):
        y, pullback, (mean, var) = jax.vjp(with_statistics, x, has_aux=True)
        return y, pullback(x * x)[0], mean, var

    def with_statistics(x):
        y, mean, var = jaxnorm.batch_norm(x, axis=1)
        return y, (mean, var)

    y, bar, mean, var = jax.jit(run)(x)
    exact_mean = np.sum(part * values)
    exact_var = np.sum(part * (values - exact_mean) ** 2)
    np.testing.assert_allclose(mean, [exact_mean], atol=1e-4)
    np.testing.assert_allclose(var, [exact_var], rtol=1e-4)
    xhat, ct = (values - exact_mean) / np.sqrt(exact_var + 1e-5), values**2
    centred = ct - np.sum(part * ct) - xhat * np.sum(part * ct * xhat)

    @jax.jit
    def largest_error(x, y, table):
        wanted = sum(jnp.where(x == int(v), table[i], 0) for i, v in enumerate(values))
        return jnp.max(jnp.abs(y.astype("float32") - wanted))

    for got, table in ((y, xhat), (bar, centred / np.sqrt(exact_var + 1e-5))):
        error = largest_error(x, got, jnp.asarray(table, "float32"))
        assert float(error) < 2 * oracle.UNIT["bfloat16"] * np.abs(table).max()


# ---- execution ----


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "relu", "add_relu", *cases.NORMS])
def test_same_bits_every_time(op):
    x = rand((513, 4095), "bfloat16")
    function = getattr(jaxnorm, op)

    @jax.jit
    def f(x):
        second = {"add_relu": x}.get(op, x[0] if op in cases.NORMS else None)
        args = (x,) if second is None else (x, second)
        y, pullback = jax.vjp(function, *args)
        return y, *pullback(x)

    first = f(x)
    for _ in range(3):
        for a, b in zip(f(x), first, strict=True):
            assert bool(jnp.all(a == b))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((64, 28, 28, 96), -1), ((64, 96, 28, 28), 1), ((70001, 3), -1), ((2, 3, 100001), 1)],
)
def test_batch_norm_same_bits_every_time(shape, axis):
    """Statistics, result, bits and gradients, also where several blocks share a feature."""
    x, residual = rand(shape, "bfloat16"), rand(shape, "bfloat16", 1)
    scale, bias = rand((shape[axis],), "float32", 2), rand((shape[axis],), "float32", 3)

    @jax.jit
    def f(*args):
        def call(x, scale, bias, residual):
            options = {"axis": axis, "activation": "relu", "residual": residual}
            return jaxnorm.batch_norm(x, scale, bias, **options)

        out, pullback = jax.vjp(call, *args)
        return *out, *pullback(out)

    first = f(x, scale, bias, residual)
    for _ in range(3):
        for a, b in zip(f(x, scale, bias, residual), first, strict=True):
            assert bool(jnp.all(a == b))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((200, 28, 28, 96), 3), ((90, 96, 28, 28), 1), ((256, 512, 7, 7), 1), ((3001, 300), 1)],
)
def test_batch_norm_passes_that_begin_early(shape, axis):
    """They wait for the launch before, be it another program's kernel or their own first pass."""
    x = jnp.round(rand(shape, "float32"))
    zero, one = jnp.zeros(shape[axis]), jnp.ones(shape[axis])
    options = {"axis": axis, "epsilon": 0.0}

    @jax.jit
    def count(x):
        for _ in range(20):
            x = jaxnorm.batch_norm_inference(x + 1, zero, one, **options)
        return x

    @jax.jit
    def pull(dy):
        for _ in range(20):
            _, pullback = jax.vjp(
                lambda x: jaxnorm.batch_norm_inference(x, zero, one, **options), dy
            )
            dy = pullback(dy + 1)[0]
        return dy

    def step(x, residual):
        call = lambda *a: jaxnorm.batch_norm(a[0], axis=axis, residual=a[1], activation="relu")[0]  # noqa: E731
        y, pullback = jax.vjp(call, x, residual)
        dx, dresidual = pullback(jnp.flip(x, 0))
        return jnp.flip(y, 0), jax.lax.optimization_barrier(dx) + dresidual

    @jax.jit
    def steps(x, residual):
        for _ in range(8):
            x, residual = step(x, residual)
        return x, residual

    one_step = jax.jit(step)
    for turn in range(3):
        np.testing.assert_array_equal(count(x + turn), x + turn + 20)
        np.testing.assert_array_equal(pull(x + turn), x + turn + 20)
        expected = x + turn, x
        for _ in range(8):
            expected = jax.block_until_ready(one_step(*expected))
        for a, b in zip(steps(x + turn, x), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_concurrent_streams():
    """Many programs in flight from several threads: no kernel has state of its own."""
    xs = [rand((64, 1000 + 7 * i), "float32", i) for i in range(8)]
    f = jax.jit(lambda x: jaxnorm.softmax(jaxnorm.relu(x)))
    expected = [np.asarray(f(x)) for x in xs]
    wrong = []

    def work(i):
        for _ in range(50):
            if not np.array_equal(np.asarray(f(xs[i])), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_calls_are_captured_in_a_cuda_graph(tmp_path):
    """The compiled program holds a command buffer with the calls in it; its results are right."""
    flags = (
        f"--xla_dump_to={tmp_path} --xla_gpu_enable_command_buffer=+CUSTOM_CALL "
        "--xla_gpu_graph_min_graph_size=1"
    )
    result = processes.run("graph", tmp_path, env={"JAX_PLATFORMS": "cuda", "XLA_FLAGS": flags})
    assert result["error"] < 1e-5
    assert result["few_rows_alike"]
    assert result["gradients_alike"]
    assert result["thunks"], "no thunk dump: look for the name of the file in this XLA version"
    assert set(result["captured"]) == {
        "jaxnorm_softmax_fwd",
        "jaxnorm_softmax_bwd",
        "jaxnorm_relu_fwd",
        "jaxnorm_relu_bwd",
        "jaxnorm_norm_fwd",
        "jaxnorm_norm_bwd",
        "jaxnorm_batch_norm_fwd",  # the merged calls are named after their second primitive
        "jaxnorm_batch_norm_dx",
        "jaxnorm_cross_entropy_fwd",
        "jaxnorm_cross_entropy_bwd",
    }


# ---- two GPUs ----


# Programs for both are tested by test_sharding.py and test_cross_entropy.py.
@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_kernels_on_the_second_gpu():
    """Launch settings are per device, not per process."""
    for columns in (100, 5000, 40000, 200000):
        for gpu in GPUS[:2]:
            x = jax.device_put(rand((4, columns), "float32"), gpu)
            oracle.assert_close(jaxnorm.softmax(x), oracle.softmax(x), "float32", jax.nn.softmax(x))
            for op in cases.NORMS:
                test_norm.check(op, x, "float32")
            test_batch_norm.check(x.reshape(2, 2, columns), axis=1, parameters="float32", relu=True)
