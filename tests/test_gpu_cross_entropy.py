"""On an NVIDIA GPU: softmax_cross_entropy at each dispatch boundary, of long, masked, strided and misaligned rows."""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_cross_entropy
from gpu_cases import BOUNDARIES, halves, rand

from bench import cases

pytestmark = pytest.mark.gpu

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
