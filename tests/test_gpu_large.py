"""On an NVIDIA GPU: arrays of more elements than 32 bits count."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_cross_entropy
from gpu_cases import SOFTMAXES, rand

import jaxnorm
from bench import cases

pytestmark = pytest.mark.gpu


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
    # The array repeats its first 61 rows: they have the same gradient of the scale if weighted by their number.
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
