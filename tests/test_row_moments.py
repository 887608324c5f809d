"""The mean and variance of layer_norm in one exchange: the programs that change, and their kernels, run on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_emulator
from test_row_kernels import H100, emulated

from jaxnorm._ops.norm_primitives import _fwd_reference
from jaxnorm._rows.call import simplified
from jaxnorm._rows.phases import Phases
from jaxnorm._rows.schedule import schedule


def layer_norm(x, scale, bias, axis=1):
    """The formula of jaxnorm.layer_norm: y, mean and 1 / standard deviation."""
    names, results = ("x", "scale", "bias"), ("y", "mean", "rstd")
    options = {"axes": (axis,), "center": True, "epsilon": 1e-6, "scale_offset": 0.0}
    return _fwd_reference(x, scale, bias, names=names, results=results, **options)


def of_a_sum(x, scale, bias):
    """The elements are no operand's."""
    return layer_norm(x + x, scale, bias)


def with_var(x, scale, bias):
    """As people write it."""
    x = x.astype(jnp.float32)
    mean, variance = x.mean(1, keepdims=True), jnp.var(x, 1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + bias


def rough_mean(x, *_):
    """The rough mean of the formula is a result too."""
    x = x.astype(jnp.float32)
    rough = jax.lax.reduce_precision(x.mean(1, keepdims=True), 8, 22)
    d = x - rough
    rest = d.mean(1, keepdims=True)
    return (d - rest) * (jnp.mean(d * d, 1, keepdims=True) - rest * rest) + rough


@pytest.mark.parametrize(
    ("function", "dtype", "kinds"),
    [
        (layer_norm, "bfloat16", [{"count", "mean", "squares_about_mean"}]),
        (layer_norm, "float16", [{"count", "mean", "squares_about_mean"}]),
        (layer_norm, "float32", [{"sum"}, {"sum"}]),
        (of_a_sum, "bfloat16", [{"sum"}, {"sum"}]),
        (with_var, "bfloat16", [{"sum"}, {"sum"}]),
        (rough_mean, "bfloat16", [{"count", "mean", "squares_about_mean", "sum"}]),
    ],
)
def test_exchanges(function, dtype, kinds):
    x, vector = (jax.ShapeDtypeStruct(s, t) for s, t in (((40, 1000), dtype), ((1000,), "float32")))
    phases = Phases(simplified(jax.make_jaxpr(function)(x, vector, vector)))
    assert [{n.attr[0] for n in phase} for phase in phases.reductions[:-1]] == kinds


def rows_of(columns, dtype):
    """Rows that are constant, far from 0, and with elements that differ from the others."""
    rng = np.random.default_rng(columns)
    x = rng.normal(size=(19, columns))
    x[0], x[1], x[4], x[5] = 7.1, 1000 + np.arange(columns) % 2, x[4] + 50, x[5] * 1e-3
    x[2, [0, columns // 3]], x[3, 0], x[6, -1], x[7, :8] = 300, 3000, 500, 300
    return jnp.asarray(x, dtype)


def check(x, axis=1, **asked):
    """Compares y, whose rounding is half a unit of its dtype, and the mean and 1 / deviation, which are float32."""
    shape = [1, 1]
    shape[axis] = x.shape[axis]
    vectors = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    closed = jax.make_jaxpr(lambda *a: layer_norm(*a, axis=axis))(x, *vectors)
    plan = schedule(simplified(closed), H100, **asked)
    y, mean, rstd = emulated(closed, [x, *vectors], plan, resident_blocks=plan.cluster)
    exact = np.asarray(x, np.float64)
    center = exact.mean(axis, keepdims=True)
    deviation = np.sqrt(((exact - center) ** 2).mean(axis, keepdims=True) + 1e-6)
    expected = (exact - center) / deviation
    unit = float(jnp.finfo(x.dtype).eps) * np.maximum(np.abs(expected), 1e-2)
    assert (np.abs(np.asarray(y, np.float64) - expected) / unit).max() < 1
    assert (np.asarray(y)[expected == 0] == 0).all()
    mean, rstd = (np.asarray(r, np.float64).reshape(center.shape) for r in (mean, rstd))
    assert (np.abs(mean - center) / (np.abs(center) + deviation)).max() < 2**-21
    assert np.abs(rstd * deviation - 1).max() < 2**-17


on_cpu = pytest.mark.skipif(
    not row_emulator.supported(), reason="kernels run on the CPU with g++ on Linux"
)


@on_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("columns", [1, 8, 48, 1023, 1280, 4095, 9216, 20480, 50257])
def test_values(dtype, columns):
    check(rows_of(columns, dtype))


@on_cpu
@pytest.mark.parametrize(
    "asked",
    [
        {"source": "stream", "lanes": 64, "slots": 1},
        {"source": "stream", "lanes": 96, "slots": 2},
        {"source": "ring", "lanes": 64},
        {"source": "ring", "lanes": 64, "cluster": 2},
        {"source": "ring", "lanes": 32, "cluster": 1, "lag": 1},
        {"source": "ring", "lanes": 64, "cluster": 4, "lag": 1},
        {"source": "ring", "lanes": 96, "cluster": 4, "lag": 2},
        {"source": "ring", "parts": True, "cluster": 2, "lanes": 64, "slots": 1},
        {"source": "registers", "lanes": 512},
        {"grid": 2, "cluster": 4, "lag": 1},
        {"grid": 1, "cluster": 5},
    ],
)
@pytest.mark.parametrize("columns", [4096, 4095, 4104])
def test_schedules(asked, columns):
    """Rows that blocks have as much of, shifted rows, and rows that leave threads without a slot."""
    check(rows_of(columns, "bfloat16"), **asked)


@on_cpu
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize(
    "asked",
    [
        {"grid": 2, "cluster": 3, "stages": 4, "lag": 1},
        {"source": "ring", "cluster": 4, "lanes": 64, "lag": 1},
        {"source": "ring", "cluster": 4, "lanes": 64},
        {"source": "registers", "lanes": 192},
    ],
)
def test_any_order(asked, order):
    """All lanes read the first part. Which lane, warp or block comes first changes no bit."""
    x = rows_of(1536, "bfloat16")
    arrays = [x, np.ones(1536, np.float32), np.zeros(1536, np.float32)]
    closed = jax.make_jaxpr(layer_norm)(*arrays)
    plan = schedule(simplified(closed), H100, **asked)
    wanted = emulated(closed, arrays, plan)
    for a, b in zip(emulated(closed, arrays, plan, order=order), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@on_cpu
@pytest.mark.parametrize("columns", [5, 200, 1024, 5000])
def test_rows_side_by_side(columns):
    check(rows_of(columns, "bfloat16").T, axis=0)


@on_cpu
@pytest.mark.parametrize("columns", [64, 1023, 4096])
def test_numbers_that_are_not_finite(columns):
    """The mean of a row with an infinity is this infinity, wherever it is; y and the deviation are NaN."""
    x = np.array(rows_of(columns, "bfloat16"), np.float32)
    x[8, 0], x[9, columns // 3], x[10, -1], x[11, 5], x[12] = (
        np.inf,
        -np.inf,
        np.inf,
        np.nan,
        np.inf,
    )
    x = jnp.asarray(x, "bfloat16")
    vectors = np.ones(columns, np.float32), np.zeros(columns, np.float32)
    y, mean, rstd = emulated(jax.make_jaxpr(layer_norm)(x, *vectors), [x, *vectors])
    np.testing.assert_array_equal(np.ravel(mean)[8:13], [np.inf, -np.inf, np.inf, np.nan, np.inf])
    y = np.asarray(y, np.float32)
    assert np.isnan(y[8:13]).all()
    assert np.isnan(np.ravel(rstd)[8:13]).all()
    assert np.isfinite(y[[*range(8), *range(13, 19)]]).all()
