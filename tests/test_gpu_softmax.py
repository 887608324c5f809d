"""On an NVIDIA GPU: softmax and log_softmax at each dispatch boundary, of long, strided and misaligned rows."""

import hlo
import jax
import numpy as np
import oracle
import pytest
from gpu_cases import BOUNDARIES, LITTLE_LEFT, SOFTMAXES, halves, rand

import jaxnorm
from bench import cases

pytestmark = pytest.mark.gpu

softmaxes = pytest.mark.parametrize("op", SOFTMAXES)


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


@softmaxes
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dispatch_boundaries(op, dtype):
    for columns in BOUNDARIES:
        check(op, rand((3, columns), dtype))


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
