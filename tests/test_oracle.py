"""The oracle and its tolerance: derivatives agree with differences, wrong results are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import DTYPES

RNG = np.random.default_rng(0)
X, T = RNG.standard_normal((4, 16)) * 2, RNG.standard_normal((4, 16))
Y = RNG.standard_normal((4, 16))
WHERE = RNG.random((4, 16)) < 0.7

# Each operation's forward, jvp and vjp as a function of nothing.
RESULTS = {
    "softmax": lambda: oracle.softmax(X),
    "softmax masked": lambda: oracle.softmax(X, where=WHERE),
    "softmax jvp": lambda: oracle.softmax_jvp(X, T),
    "softmax vjp": lambda: oracle.softmax_vjp(X, T)[0],
    "log_softmax": lambda: oracle.log_softmax(X),
    "log_softmax jvp": lambda: oracle.softmax_jvp(X, T, log=True),
    "log_softmax vjp": lambda: oracle.softmax_vjp(X, T, log=True)[0],
    "relu": lambda: oracle.relu(X),
    "relu jvp": lambda: oracle.relu_jvp(X, T),
    "relu vjp": lambda: oracle.relu_vjp(X, T),
    "add_relu": lambda: oracle.relu(X, Y),
    "add_relu jvp": lambda: oracle.relu_jvp(X, T, Y, T),
    "add_relu vjp": lambda: oracle.relu_vjp(X, T, Y),
    "layer_norm": lambda: oracle.layer_norm(X, Y[0], Y[1]),
    "layer_norm masked": lambda: oracle.layer_norm(X, mask=WHERE),
    "layer_norm jvp": lambda: oracle.norm_jvp(X, T, Y[0]),
    "layer_norm vjp": lambda: oracle.norm_vjp(X, T, Y[0])[0],
    "rms_norm": lambda: oracle.rms_norm(X),
    "batch_norm": lambda: oracle.batch_norm(X, Y[0], Y[1])[0],
    "batch_norm masked": lambda: oracle.batch_norm(X, mask=WHERE, relu=True)[0],
    "batch_norm vjp": lambda: oracle.batch_norm_vjp(X, T, Y[0], Y[1], Y[2])[0],
    "rms_norm vjp": lambda: oracle.norm_vjp(X, T, center=False)[0],
}


def sizes(name):
    """What tests pass as the size that errors are relative to."""
    if name.startswith("softmax") and "vjp" not in name and "jvp" not in name:
        return [None, np.abs(RESULTS[name]()) + 1e-9]
    if "vjp" in name and "softmax" in name:
        return [None, oracle.softmax_vjp_size(X, T, log=name.startswith("log"))]
    return [None, np.max(np.abs(RESULTS[name]()))]


WRONG = {
    "zeroed": np.zeros_like,
    "one row zeroed": lambda r: np.concatenate([r[:1] * 0, r[1:]]),
    "rows swapped": lambda r: r[::-1],
    "shifted by one column": lambda r: np.roll(r, 1, -1),
    "last column dropped": lambda r: np.concatenate([r[:, :-1], r[:, :1] * 0], -1),
    "sign flipped": lambda r: -r,
    "doubled": lambda r: 2 * r,
    "off by a quarter": lambda r: r * 1.25,
    "NaN somewhere": lambda r: np.where(np.arange(r.shape[1]) == 3, np.nan, r),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RESULTS)
def test_wrong_results_are_refused(name, dtype, wrong):
    expected = RESULTS[name]()
    correct = jnp.asarray(expected).astype(dtype)
    bad = jnp.asarray(WRONG[wrong](expected)).astype(dtype)
    for size in sizes(name):
        oracle.assert_close(correct, expected, dtype, correct, size=size)
        # The largest floor that first derivatives get in the suite.
        floor = 16 if dtype in ("float32", "float64") else 8
        with pytest.raises(AssertionError):
            oracle.assert_close(bad, expected, dtype, correct, floor=floor, size=size)


def test_wrong_dtype_and_shape_are_refused():
    y = RESULTS["softmax"]()
    with pytest.raises(AssertionError, match="dtype"):
        oracle.assert_close(y, y, "float32")
    with pytest.raises(AssertionError, match="shape"):
        oracle.assert_close(y[:, :-1], y, "float64")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("axis", [0, -1, (0, 1), None])
def test_softmax_derivatives(log, axis):
    """Against central differences, with every operand; the two modes are each other's transpose."""
    scale, bias = RNG.standard_normal((16,)), RNG.standard_normal((4, 1))
    kw = {"axis": axis, "where": WHERE}
    function = oracle.log_softmax if log else oracle.softmax

    def f(h):
        y = function(X + h * T, scale=scale + h * T[0], bias=bias + h * T[:, :1], **kw)
        return np.where(WHERE, y, 0.0)

    tangents = {"x_dot": T, "scale_dot": T[0], "bias_dot": T[:, :1]}
    tangent = oracle.softmax_jvp(X, scale=scale, bias=bias, **tangents, **kw, log=log)
    np.testing.assert_allclose(tangent, (f(1e-5) - f(-1e-5)) / 2e-5, atol=1e-8)
    bars = oracle.softmax_vjp(X, Y, scale=scale, bias=bias, **kw, log=log)
    transposed = sum(np.sum(a * b) for a, b in zip(bars, tangents.values(), strict=True))
    np.testing.assert_allclose(np.sum(Y * tangent), transposed)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("axis", [-1, (0, 1)])
@pytest.mark.parametrize("mask", [None, WHERE])
def test_norm_derivatives(center, axis, mask):
    """Against central differences; the two modes are each other's transpose."""
    shape = (16,) if axis == -1 else (4, 16)
    scale, scale_dot, bias_dot = (RNG.standard_normal(shape) for _ in range(3))
    kw = {"axis": axis, "mask": mask, "center": center, "scale_offset": 0.5, "epsilon": 0.1}

    def f(h):
        return oracle.layer_norm(X + h * T, scale + h * scale_dot, h * bias_dot, **kw)

    tangent = oracle.norm_jvp(X, T, scale, scale_dot, bias_dot, **kw)
    np.testing.assert_allclose(tangent, (f(1e-5) - f(-1e-5)) / 2e-5, atol=1e-8)
    bars = oracle.norm_vjp(X, Y, scale, **kw)
    dots = (T, scale_dot, bias_dot)
    transposed = sum(np.sum(a * b) for a, b in zip(bars, dots, strict=True))
    np.testing.assert_allclose(np.sum(Y * tangent), transposed)
    sizes = oracle.norm_vjp(X, Y, scale, **kw, sizes=True)
    assert all((size >= np.abs(bar) - 1e-12).all() for size, bar in zip(sizes, bars, strict=True))


@pytest.mark.parametrize("axis", [-1, 0, (0, 1)])
@pytest.mark.parametrize("mask", [None, WHERE])
def test_batch_norm_derivatives(axis, mask):
    """Against central differences of a sum of all three results."""
    shape = {-1: (16,), 0: (4,)}.get(axis, (4, 16))
    scale, scale_dot, dmean, dvar = (RNG.standard_normal(shape) for _ in range(4))
    kw = {"axis": axis, "mask": mask if axis != (0, 1) else None, "epsilon": 0.1}

    def f(h):
        y, mean, var = oracle.batch_norm(X + h * T, scale + h * scale_dot, h * scale, h * Y, **kw)
        return np.sum(y * Y) + np.sum(dmean * mean) + np.sum(dvar * var)

    bars = oracle.batch_norm_vjp(X, Y, scale, dmean, dvar, **kw)
    dots = (T, scale_dot, scale, Y)
    transposed = sum(np.sum(a * b) for a, b in zip(bars, dots, strict=True))
    np.testing.assert_allclose((f(1e-5) - f(-1e-5)) / 2e-5, transposed, rtol=1e-7)
    sizes = oracle.batch_norm_vjp(X, Y, scale, dmean, dvar, **kw, sizes=True)
    assert all((size >= np.abs(bar) - 1e-12).all() for size, bar in zip(sizes, bars, strict=True))


def test_agrees_with_jax():
    """Also where values are special."""
    x = X.copy()
    x[0], x[1, 0], x[2, :8], x[3, 5] = -np.inf, np.inf, -np.inf, np.nan
    for where in (None, WHERE, np.zeros_like(WHERE)):
        for op in ("softmax", "log_softmax"):
            expected = getattr(jax.nn, op)(x, where=where)
            np.testing.assert_allclose(getattr(oracle, op)(x, where=where), expected, rtol=1e-12)
    np.testing.assert_array_equal(oracle.relu(x), jax.nn.relu(x))
    np.testing.assert_array_equal(
        oracle.relu_mask(x), jnp.packbits(jnp.asarray(x) > 0, axis=-1, bitorder="little")
    )
