"""On an NVIDIA GPU: batch_norm where arrays stay on chip, hardly fit there, or are read in several runs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_batch_norm
from gpu_cases import halves, rand

import jaxnorm
from bench import cases

pytestmark = pytest.mark.gpu


def brightening(shape, most, seed=0):
    """Images, along the first dimension, of which later ones are larger, the last by `most`."""
    rest = (1,) * (len(shape) - 1)
    ramp = np.linspace(0, most, shape[0], dtype="float32").reshape(-1, *rest)
    return rand(shape, "float32", seed) + ramp


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


@halves
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((70, 33), 1), ((70, 256), 1), ((3, 5, 49), 1), ((3, 5, 4096), 1), ((2, 3, 20001), 1)],
)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_batch_norm_misaligned_base(dtype, shape, axis, offset):
    """Pointers that are multiples of the element only: of x, residual and cotangent, in training and inference."""
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
