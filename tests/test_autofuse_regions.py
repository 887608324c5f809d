"""autofuse: where row programs are, and what they move. On CPUs they run as what they are made of."""

import time
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autofuse_checks import assert_close, primitives
from autofuse_row_programs import (  # noqa: F401
    LEAST_BYTES,
    PROGRAM,
    A,
    B,
    S,
    W,
    assert_same,
    defaults,
    found,
    grown,
    kernels,
    layer,
    layer_norm,
    nbytes,
    of,
    weighted,
)

import jaxnorm
from bench import models
from jaxnorm import _lib
from jaxnorm._autofuse import regions
from jaxnorm._autofuse.grown import Grown
from jaxnorm._autofuse.statistics import has_batch_statistics
from jaxnorm.autofuse import Autofused

ROWS, WIDTH = 256, 512
BF16 = "bfloat16"


def stopped_by(program) -> set[str]:
    return {stop.split(" ")[0] for stop in program.stops}


def here(program) -> list[str]:
    """Names of the functions of this file that a row program has lines of."""
    return [line.split(" (")[-1][:-1].split(".")[-1] for line in program.lines if __file__ in line]


# ---- formulas ----


def rms_norm(x, scale):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return (h * scale).astype(x.dtype)


def rotary(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


X, SCALE, BIAS = of(ROWS, WIDTH), of(WIDTH), of(WIDTH)
X16, BIAS16 = of(ROWS, WIDTH, dtype=BF16), of(WIDTH, dtype=BF16)
SQUARE, SQUARE16 = of(WIDTH, WIDTH), of(WIDTH, WIDTH, dtype=BF16)
KEY = jax.eval_shape(lambda: jax.random.key(0))
# ---- what a region takes ----


def bias_residual_norm(x, h, w, bias, scale):
    x = x + (h @ w + bias)
    return x, rms_norm(x, scale) @ w


def dropout_residual_norm(x, h, key, w, bias, scale, shift):
    h = h @ w + bias
    keep = jax.random.bernoulli(key, 0.9, h.shape)
    x = x + jnp.where(keep, h / 0.9, 0)
    return x, layer_norm(x, scale, shift) @ w


def modulated(x, w, scale, shift):
    return (layer_norm(x @ w) * (1 + scale) + shift) @ w


def norm_rotary(x, w, scale, cos, sin):
    q = (x @ w).reshape(4, 64, 8, 64)
    return jnp.einsum("btnd,bsnd->bnts", rotary(rms_norm(q, scale), cos, sin), q)


def gated_norm(x, z, w, scale):
    return rms_norm((x @ w) * jax.nn.silu(z @ w), scale) @ w


def attention(q, k, mask):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k).astype(jnp.float32)
    p = jax.nn.softmax(jnp.where(mask, scores * 0.125, -1e30), -1)
    return jnp.einsum("bnts,bsnd->btnd", p.astype(q.dtype), k)


BATCH, ROW, ANGLES = of(4, 64, WIDTH), of(4, 1, WIDTH), of(64, 1, 32)
HEADS, MASK = of(4, 64, 8, 64, dtype=BF16), of(64, 64, dtype="bool")
TAKEN = {
    # function, arguments, rows, columns, all that must move
    bias_residual_norm: (
        (X16, X16, SQUARE16, BIAS16, SCALE),
        (ROWS, WIDTH),
        (X16, X16, X16, X16, BIAS16, SCALE),
    ),
    # The mask is made of the key.
    dropout_residual_norm: (
        (X16, X16, KEY, SQUARE16, BIAS16, SCALE, BIAS),
        (ROWS, WIDTH),
        (X16, X16, X16, X16, BIAS16, SCALE, BIAS),
    ),
    modulated: ((BATCH, SQUARE, ROW, ROW), (ROWS, WIDTH), (BATCH, BATCH, ROW, ROW)),
    norm_rotary: (
        (of(4, 64, WIDTH, dtype=BF16), SQUARE16, of(64), ANGLES, ANGLES),
        (ROWS * 8, 64),
        (HEADS, HEADS, of(64), ANGLES, ANGLES),
    ),
    gated_norm: ((X16, X16, SQUARE16, SCALE), (ROWS, WIDTH), (X16, X16, X16, SCALE)),
    attention: ((HEADS, HEADS, MASK), (ROWS * 8, 64), (HEADS, HEADS, MASK)),
}


@pytest.mark.parametrize("function", TAKEN, ids=lambda f: f.__name__)
def test_takes(function):
    args, size, moved = TAKEN[function]
    (program,) = found(function, *args)
    assert program.kernel == PROGRAM
    assert (program.rows, program.columns) == size
    assert program.bytes == nbytes(*moved)
    assert program.bytes_before >= program.bytes
    assert "dot_general" in stopped_by(program)
    assert all(__file__ in stop for stop in program.stops if stop.startswith("dot_general"))
    assert function.__name__ in here(program) or function is norm_rotary
    assert (program.place, program.reason) == ((), "")


def test_what_it_saves():
    """XLA reads a sum twice, and writes pieces before it joins them; a single pass is as good as XLA's."""

    def verdict(function):
        (program,) = found(function, *TAKEN[function][0])
        return program.replaced, program.bytes_before > 1.5 * program.bytes

    assert verdict(dropout_residual_norm) == ("always", True)
    assert verdict(norm_rotary) == ("always", True)
    assert verdict(modulated) == ("always", True)
    (program,) = found(lambda x, w: jax.nn.softmax(x @ w) @ w, X16, SQUARE16)
    assert (program.replaced, program.bytes_before) == ("where it is differentiated", program.bytes)


def test_operations():
    """Code that is an operation becomes a row program; a call of an operation alone has its kernel."""

    def function(x, h, w, scale):
        x = x + h @ w
        return x, rms_norm(x, scale) @ w

    report = grown(function).explain(X16, X16, SQUARE16, SCALE)
    assert report.candidates == ()
    assert [p.kernel for p in report.row_programs] == ["jaxnorm_row_program"]
    called = grown(lambda x, w, scale: jaxnorm.rms_norm(x @ w, scale) @ w)
    assert called.explain(X16, SQUARE16, SCALE).row_programs == ()


@pytest.mark.parametrize("dtype", ["float32", BF16])
def test_cross_entropy(dtype):
    """Logits are read once, their gradient is written once: the loss of each row and its label are all else."""

    def loss(logits, labels):
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    logits, labels = of(ROWS, WIDTH, dtype=dtype), of(ROWS, dtype="int32")
    (program,) = found(jax.value_and_grad(loss), logits, labels)
    least = nbytes(logits, logits, labels, of(ROWS))
    assert least <= program.bytes <= least + 16
    assert program.bytes_before >= program.bytes
    assert "loss" in here(program)


def test_reinforcement_learning_loss():
    """Log-probabilities, entropy and divergence: two arrays are read and one is written."""
    numbers = of(ROWS)
    args = {"logits": X}, X, of(ROWS, dtype="int32"), numbers, numbers
    (program,) = found(jax.value_and_grad(models.rl_loss), *args)
    least = nbytes(X, X, X, *[numbers] * 4)
    assert least <= program.bytes <= least + 16


# ---- functions that contain gradients ----


def squares(y):
    return jnp.sum(jnp.square(y.astype(jnp.float32)))


@pytest.mark.parametrize(
    "dtype",
    [
        BF16,
        pytest.param(
            "float32",
        ),
    ],
)
def test_layer_norm_and_its_gradient(dtype):
    """Forward writes y and numbers of rows; backward reads x and dy and writes all three gradients."""

    def loss(p, x):
        w, v = (p[name].astype(dtype) for name in "wv")
        return squares(layer_norm(x @ w, p["scale"], p["bias"]) @ v)

    x, numbers = of(ROWS, WIDTH, dtype=dtype), nbytes(of(ROWS))
    parameters = {"w": SQUARE, "v": SQUARE, "scale": SCALE, "bias": BIAS}
    forward, backward = found(jax.value_and_grad(loss), parameters, x)
    for program, arrays in ((forward, (x, x)), (backward, (x, x, x, SCALE))):
        least = nbytes(*arrays, SCALE, BIAS)
        assert least < program.bytes <= least + 3 * numbers
        assert "dot_general" in stopped_by(program)
    assert backward.replaced == "always"
    assert backward.bytes_before > 1.5 * backward.bytes


def test_swiglu_backward():
    """Gate and up are one array: so is their gradient."""

    def loss(p, x):
        gate, up = jnp.split(x @ p["w"], 2, -1)
        return squares((jax.nn.silu(gate) * up) @ p["v"])

    packed, half = of(ROWS, 4 * WIDTH), of(ROWS, 2 * WIDTH)
    parameters = {"w": of(WIDTH, 4 * WIDTH), "v": of(2 * WIDTH, WIDTH)}
    (program,) = kernels(jax.value_and_grad(loss), parameters, X)
    assert program.bytes == nbytes(packed, half, packed)
    assert (program.rows, program.columns) == (ROWS, 4 * WIDTH)
    assert program.bytes_before > program.bytes


def test_bias_gradient():
    """The sum over rows is of the gradient that is written."""

    def loss(p, x):
        return squares(jax.nn.gelu(x @ p["w"] + p["b"]) @ p["v"])

    hidden, bias = of(ROWS, 2 * WIDTH), of(2 * WIDTH)
    parameters = {"w": of(WIDTH, 2 * WIDTH), "b": bias, "v": of(2 * WIDTH, WIDTH)}
    (program,) = kernels(jax.value_and_grad(loss), parameters, X)
    least = nbytes(hidden, hidden, hidden, bias)
    assert least <= program.bytes <= least + nbytes(bias)
    assert program.bytes_before > program.bytes


def test_gelu_forward():
    """XLA takes longer for GELU of 16-bit elements than for its bytes, but may fuse it with the product before it."""

    def loss(p, x):
        return squares(jax.nn.gelu(x @ p["w"] + p["b"]) @ p["v"])

    def programs(function, dtype):
        shapes = {"w": (WIDTH, 2 * WIDTH), "b": (2 * WIDTH,), "v": (2 * WIDTH, WIDTH)}
        parameters = {name: of(*shape, dtype=dtype) for name, shape in shapes.items()}
        return kernels(function, parameters, of(ROWS, WIDTH, dtype=dtype))

    forward, backward = programs(jax.value_and_grad(loss), BF16)
    hidden, bias = (of(*shape, dtype=BF16) for shape in ((ROWS, 2 * WIDTH), (2 * WIDTH,)))
    assert forward.bytes == forward.bytes_before == nbytes(hidden, hidden, bias)
    assert forward.replaced == "always"
    assert forward.reason == "XLA's code takes longer than its bytes"
    assert backward.bytes_before > backward.bytes
    assert backward.reason == ""
    assert len(programs(jax.value_and_grad(loss), jnp.float32)) == 1
    assert programs(loss, BF16) == []


# ---- near misses and limits ----


symbolic = jax.export.symbolic_shape
COLUMNS = symbolic("c")


LEFT = {
    "rows and columns": (lambda x: jnp.sin(x) / jnp.abs(x).max((0, 1)), (X,)),
    "some rows and columns": (lambda x: x / jnp.abs(x).max((1, 2), keepdims=True), (BATCH,)),
    "rows": (lambda x: jnp.sin(x) / jnp.abs(x).max(0), (X,)),
    "middle": (lambda x: jnp.sin(x) / jnp.abs(x).max(1, keepdims=True), (BATCH,)),
    "symbolic rows": (layer, (of(*symbolic("r, 512")), SCALE, BIAS)),
    "symbolic columns": (layer, (of(ROWS, *COLUMNS), of(*COLUMNS), of(*COLUMNS))),
    "no rows": (layer, (of(0, WIDTH), SCALE, BIAS)),
    "no columns": (layer, (of(ROWS, 0), of(0), of(0))),
    "one row": (layer, (of(1, WIDTH), SCALE, BIAS)),
    "short rows": (layer, (of(ROWS, 4), of(4), of(4))),
    "complex": (lambda x: x / x.sum(-1, keepdims=True), (of(64, 64, dtype="complex64"),)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    function, args = LEFT[name]
    assert kernels(function, *args) == []
    assert all(p.replaced == "no" and p.reason for p in found(function, *args))
    assert PROGRAM not in primitives(grown(function), *args)


def test_tiny_arrays(monkeypatch):
    monkeypatch.setattr(regions, "LEAST_BYTES", LEAST_BYTES)
    (program,) = found(layer, of(16, 32), of(32), of(32))
    assert (program.kernel, program.replaced) == (None, "no")
    assert program.reason == "it moves 4,352 bytes; its kernel would take longer to launch"
    assert program.reason in str(grown(layer).explain(of(16, 32), of(32), of(32)))
    assert len(kernels(layer, X, SCALE, BIAS)) == 1


def test_export_of_symbolic_rows():
    (rows,) = symbolic("r")
    function = jax.jit(lambda x: grown(layer)(x, S, B))
    exported = jax.export.export(function)(of(rows, 16))
    np.testing.assert_allclose(exported.call(A[0]), layer(A[0], S, B), rtol=1e-5, atol=1e-5)


def test_effects_keep_their_order():
    seen = []

    def function(x, scale, bias):
        def see(name, value):
            jax.debug.callback(lambda v: seen.append((name, float(v))), value, ordered=True)

        see("first", x[0, 0, 0])
        y = layer(x, scale, bias)
        see("second", y[0, 0, 0])
        z = layer(y + x, bias, scale)
        see("third", z[0, 0, 0])
        see("fourth", x[0, 0, 1])
        return y, z

    runs = []
    for f in (jax.jit(function), jax.jit(grown(function)), grown(function)):
        seen.clear()
        jax.block_until_ready(f(A, S, B))
        jax.effects_barrier()
        runs.append(list(seen))
    assert [name for name, _ in runs[0]] == ["first", "second", "third", "fourth"]
    for run in runs[1:]:
        assert [name for name, _ in run] == [name for name, _ in runs[0]]
        np.testing.assert_allclose([v for _, v in run], [v for _, v in runs[0]], rtol=1e-4)
    assert len(kernels(function, A, S, B)) >= 1


def floats(results):
    return [r for r in results if jnp.issubdtype(r.dtype, jnp.floating)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 1e-2), (BF16, 5e-2), ("float32", 2e-5)]
)
def test_types_of_results(dtype, tolerance):
    """Dtypes and weak types, of values inside and at the end of a region. Kernels round results alone."""
    weak = jnp.asarray(2.0)

    def function(x, w):
        y = layer(x, w, 1)
        counts = jnp.sum(y > 0, -1)
        return y, y * w, w + 1, jnp.argmax(y, -1), counts, y.astype("float32"), y > 0, weak * 1

    def results(f):
        return [(a.dtype, a.shape, a.weak_type) for a in jax.make_jaxpr(f)(x, weak).out_avals]

    x = A.astype(dtype)
    assert weak.weak_type
    assert PROGRAM in primitives(grown(jax.vmap(function, (0, None))), x, weak)
    for f in (function, jax.vmap(function, (0, None)), lambda x, w: function(x.sum(0) * w, w)):
        assert results(grown(f)) == results(f)
        got, expected = jax.jit(lambda *a, f=f: (grown(f)(*a), f(*a)))(x, weak)
        if (
            dtype != "float32"
        ):  # what counts or compares rounded values differs where they are close
            got, expected = floats(got), floats(expected)
        assert_close(got, expected, tolerance)


def test_used_inside_and_outside():
    """What a matrix product and the region need of one value, and results that are intermediate values."""

    def function(x, scale, bias):
        h = jnp.tanh(x)
        mean = h.mean(-1, keepdims=True)
        d = h - mean
        y = d / (jnp.abs(d).mean(-1, keepdims=True) + 0.1) * scale
        w = jnp.ones((x.shape[-1], 16)) * jnp.arange(16.0)
        return y + bias, d, mean, h @ w, y @ w, x

    assert len(kernels(function, A, S, B)) == 1
    assert_same(function, A, S, B, eager=True)
    y, n, s = nbytes(X), nbytes(of(ROWS)), nbytes(SCALE)
    (program,) = kernels(lambda *a: function(*a)[:3], X, SCALE, BIAS)
    assert program.bytes == 3 * y + n + 2 * s


def test_result_twice_and_operand_as_result():
    def function(x, scale, bias):
        y = layer(x, scale, bias)
        return {"a": y, "b": (y, x, y.sum(-1)), "none": None, "number": 3}

    got, expected = grown(function)(A, S, B), function(A, S, B)
    assert got["number"] == 3
    assert got["none"] is None
    for name in "ab":
        assert_close(got[name], expected[name], 2e-5)


GROWS = Autofused._grows  # conftest puts another one in its place


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("available", [True, False])
def test_platform_by_default(backend, available, monkeypatch):
    """JAX's default backend, if it is a GPU that kernels can be compiled for."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(_lib, "module", lambda name: types.SimpleNamespace(available=available))
    assert GROWS(jaxnorm.autofuse(layer)) == (backend == "gpu" and available)
    assert GROWS(jaxnorm.autofuse(layer, platform="gpu"))
    assert not GROWS(jaxnorm.autofuse(layer, platform="cpu"))


def test_platform():
    with pytest.raises(
        ValueError, match="platform must be one of cpu, gpu, tpu or None, got 'cuda'"
    ):
        jaxnorm.autofuse(layer, platform="cuda")
    assert PROGRAM in primitives(jax.grad(lambda x: grown(layer)(x, S, B).sum()), A)
    elsewhere = ["cpu", "tpu", *([None] if jax.default_backend() == "cpu" else [])]
    for platform in elsewhere:
        fused = jaxnorm.autofuse(layer, platform=platform)
        assert fused.explain(A, S, B).row_programs == ()
        assert PROGRAM not in primitives(fused, A, S, B)
        assert PROGRAM not in primitives(jax.grad(lambda x, f=fused: f(x, S, B).sum()), A)


# ---- time ----


@pytest.mark.parametrize(("gradient", "limit"), [(False, 3), (True, 8)], ids=["loss", "gradient"])
def test_time(gradient, limit):
    """Regions of a deep model are found in the time that tracing takes, or a few times that with its gradient."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
            return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))

    network = nn.Sequential([Block() for _ in range(24)])
    variables = jax.eval_shape(network.init, jax.random.key(0), A)
    start = time.process_time()
    function = lambda v, x: weighted(network.apply(v, x))  # noqa: E731
    closed = jax.make_jaxpr(jax.value_and_grad(function) if gradient else function)(variables, A)
    traced = time.process_time()
    programs = Grown(closed).finder.regions
    assert time.process_time() - traced < limit * (traced - start)
    assert len(programs) >= 47


def test_masks_between_kernels_are_bits():
    """Forward hands dropout's mask to backward as eight booleans to a byte; values and gradients are the plain ones."""

    def step(w, x, key):
        def loss(w):
            keep = jax.random.bernoulli(key, 0.8, x.shape)
            y = x + jnp.where(keep, (x @ w) / 0.8, 0)
            return jnp.sum(jnp.square(layer_norm(y, S, B) @ w))

        return jax.value_and_grad(loss)(w)

    args = W, jnp.tile(A, (1, 2, 1)), jax.random.key(1)
    closed = jax.make_jaxpr(grown(step))(*args)
    kernels = [e for e in closed.jaxpr.eqns if e.primitive.name == PROGRAM]
    handed = [v.aval for e in kernels[:1] for v in e.outvars if v.aval.dtype == jnp.uint8]
    assert [a.shape for a in handed] == [(6, 8, 2)]
    assert not any(v.aval.dtype == bool for e in kernels for v in (*e.invars, *e.outvars))
    assert_close(grown(step)(*args), step(*args), 2e-5)


def test_dropout_without_a_reduction():
    """A kernel draws the bits once, and backward, which sums over rows, reads one bit of each element."""

    def function(x, w, bias, key):
        h = jax.nn.gelu(x @ w + bias)
        return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0) @ w

    def loss(f):
        return lambda *args: jnp.sum(jnp.square(f(*args)))

    x, bias, key = of(512, 512), of(512), jax.eval_shape(lambda: jax.random.key(0))
    step = jax.value_and_grad(loss(function), (0, 1, 2))
    forward, backward = kernels(step, x, x, bias, key)
    assert forward.bytes == 2 * nbytes(x) + nbytes(bias) + x.size // 8
    assert backward.bytes == 3 * nbytes(x) + 2 * nbytes(bias) + x.size // 8
    (alone,) = found(function, x, x, bias, key)
    assert (alone.replaced, alone.bytes) == (
        "where it is differentiated",
        2 * nbytes(x) + nbytes(bias),
    )
    args = jnp.tile(A, (1, 2, 1)), W, B, jax.random.key(1)
    expected = step(*args)
    assert_close(grown(step)(*args), expected, 2e-5)
    assert_close(jax.value_and_grad(loss(grown(function)), (0, 1, 2))(*args), expected, 2e-5)


def test_numbers_that_several_regions_read():
    """Kernels have what literals alone make as literals, so that dropout compares its random bits with one."""

    def function(x, w, *keys):
        for key in keys:
            h = jax.nn.gelu(x @ w)
            x = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
        return weighted(x)

    args = jnp.tile(A, (1, 2, 1)), W, jax.random.key(1), jax.random.key(2)
    step = jax.value_and_grad(function)
    closed = jax.make_jaxpr(grown(step))(*args)
    drawing = [
        e for e in closed.jaxpr.eqns if e.primitive.name == PROGRAM and "random_bits" in str(e)
    ]
    assert len(drawing) == 2
    assert all(v.aval.size > 1 for e in drawing for v in e.invars)
    assert_close(grown(step)(*args), step(*args), 2e-5)


def test_residuals_of_plain_backward_code():
    """Backward that sums over no rows is elementwise code: XLA computes for it again what forward could keep."""

    def function(x, w, key):
        h = jax.nn.gelu(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0) @ w

    x, key = of(512, 512), jax.eval_shape(lambda: jax.random.key(0))
    (program,) = found(jax.grad(lambda *args: jnp.sum(jnp.square(function(*args)))), x, x, key)
    assert program.bytes == 2 * nbytes(x) + x.size  # the mask


def test_pieces_that_products_read():
    """XLA joins pieces once for each product."""

    def loss(x, w):
        q, k, v = jnp.split(x @ w, 3, -1)
        return jnp.sum(jnp.cos(q @ w) + jnp.sin(k @ w) + jnp.exp(v @ w))

    x, w = of(512, 512), of(512, 1536)
    (program,) = kernels(jax.grad(loss, (0, 1)), x, w)
    assert program.bytes == 2 * nbytes(of(512, 1536))
    assert program.bytes_before == 2 * program.bytes
    (program,) = found(jax.grad(loss), x, w)
    assert program.kernel is None  # the product for x reads it alone


# ---- statistics of batches ----


def batch_norm(x, scale, bias):
    h = x.astype(jnp.float32)
    mean = h.mean((0, 1))
    variance = jnp.maximum((h * h).mean((0, 1)) - mean * mean, 0)
    return ((h - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias).astype(x.dtype)


def network(x, scale, bias):
    y = jax.nn.relu(batch_norm(x, scale, bias))
    return jnp.sum(jnp.square(jax.nn.softmax(y @ W)))


def test_batch_norm_comes_before_regions():
    calls = [
        [c.call for c in jaxnorm.autofuse(network, platform=platform).explain(A, S, B).replaced]
        for platform in ("gpu", "cpu")
    ]
    assert calls[0] == calls[1][:1]
    assert "batch_norm" in calls[0][0]
    assert "activation='relu'" in calls[0][0]
    assert len(kernels(network, A, S, B)) == 1  # the softmax
    assert_same(network, A, S, B)


@pytest.mark.parametrize(
    ("rest", "operation"),
    [
        (jax.nn.relu, "relu"),
        (lambda y: jax.nn.relu(y + 1), "relu"),
        (lambda y: jax.lax.scan(lambda c, _: (jax.nn.relu(c), None), y, length=2)[0], "relu"),
        (lambda y: y * 2, None),
    ],
)
def test_operations_beside_regions_run(rest, operation):
    """What explain says is replaced is in the program."""

    def function(x, w, scale, bias):
        return rest(layer_norm(x @ w, scale, bias) @ w)

    fused = jaxnorm.autofuse(function, platform="gpu")
    args = X, SQUARE, SCALE, BIAS
    report = fused.explain(*args)
    assert [p.kernel for p in report.row_programs if p.kernel] == [PROGRAM]
    found = {n for n in primitives(fused, *args) if "row_program" not in n}
    assert [c.operation for c in report.replaced] == [operation] * (operation is not None)
    assert bool(found) == bool(report.replaced)


def test_statistics_of_batches_are_seen_quickly():
    def adam(x, scale, bias):
        gradient = jax.grad(lambda b: layer_norm(x, scale, b).sum())(bias)
        return optax.adam(1e-3).update(gradient, optax.adam(1e-3).init(bias))

    for function, expected in [
        (network, True),
        (jax.jit(network), True),
        (jax.grad(network), True),
        (lambda *args: jax.lax.scan(lambda c, _: (network(*args), c), 0.0, length=2), True),
        (lambda x, *_: (x - x.mean((0, 1))) * jax.lax.rsqrt(x.var((0, 1)) + 1e-5), True),
        (layer_norm, False),
        (jax.grad(lambda *args: layer_norm(*args).sum(), 1), False),
        (adam, False),
    ]:
        assert has_batch_statistics(jax.make_jaxpr(function)(A, S, B)) == expected


def test_converted_operands_are_read_as_they_are():
    """Backward needs a float32 copy of x: it reads x and converts it, and nobody writes the copy."""
    x, of_columns = of(256, 32, 512, dtype=BF16), of(512)
    gradient = jax.grad(lambda *args: jnp.sum(jnp.square(batch_norm(*args))), (0, 1, 2))
    forward, backward = found(gradient, x, of_columns, of_columns)
    assert forward.bytes == nbytes(x, of_columns, of_columns)
    assert backward.bytes < 3.1 * nbytes(x)
