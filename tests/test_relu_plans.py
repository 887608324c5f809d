"""Plans of relu's CUDA calls, what NVRTC makes of their kernels, and what the kernels compute, without a GPU."""

import itertools

import jax
import jax.numpy as jnp
import kernel_emulator
import numpy as np
import oracle
import pytest
import row_emulator
from jax import export
from suite import rand

import jaxnorm
from jaxnorm._kernels import relu
from jaxnorm._rows import launcher
from jaxnorm._rows.plan import DEVICES

needs_nvrtc = pytest.mark.skipif(launcher.nvrtc()[0] is None, reason="NVRTC is not installed")
needs_emulator = pytest.mark.skipif(not row_emulator.supported(), reason="needs g++ on Linux")
dtypes = pytest.mark.parametrize("dtype", oracle.DTYPES)

# Operation, addends, shape, dtype: the instance, blocks x threads.
TABLE = """
fwd 1 32768x4096 float16: add 0, flat 1, 16384 x 256
fwd 2 32768x4096 float16: add 1, flat 1, 16384 x 256
bwd 1 32768x4096 float16: flat 1, 16384 x 256
fwd 1 256x56x56x64 bfloat16: add 0, flat 1, 6272 x 256
fwd 2 49152x1024 float32: add 1, flat 1, 12288 x 256
bwd 1 49152x1024 float32: flat 1, 12288 x 256
fwd 1 4096x50257 float16: add 0, flat 0, 25129 x 256
bwd 1 4096x50257 float16: flat 0, 25129 x 256
fwd 1 1025 float64: add 0, flat 1, 1 x 256
bwd 1 9x2049 float64: flat 0, 10 x 256
fwd 1 3x1500000001 float16: add 0, flat 0, 549317 x 256
"""


def line(case: str) -> str:
    operation, addends, shape, dtype = case.split()
    sizes = [int(n) for n in shape.split("x")]
    made = relu.plan(operation, sizes, dtype, int(addends))
    (launch,) = made.launches
    constants = (f"{name.removeprefix('RELU_').lower()} {n}" for name, n in made.constants)
    return f"{case}: {', '.join(constants)}, {launch.grid[0]} x {launch.block[0]}"


def test_table():
    expected = TABLE.strip().splitlines()
    assert [line(row.partition(":")[0]) for row in expected] == expected


def test_what_has_no_plan():
    """Empty arrays, and sizes that are not known."""
    assert relu.plan("fwd", (0, 4), "float32") is None
    (rows,) = export.symbolic_shape("n")
    assert relu.plan("bwd", (rows, 4), "float32") is None


def test_exported_for_sizes_that_are_not_known():
    """There it is the formula."""
    x = jax.ShapeDtypeStruct(export.symbolic_shape("n, 9"), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: jaxnorm.relu(x).sum()))
    exported = export.export(gradient, platforms=("cuda",))(x)
    assert "custom_call @jaxnorm" not in exported.mlir_module()


@needs_nvrtc
@dtypes
@pytest.mark.parametrize("architecture", DEVICES)
def test_instances_do_not_spill(architecture, dtype):
    kinds = (("fwd", 1), ("fwd", 2), ("bwd", 1))
    for (operation, addends), columns in itertools.product(kinds, (64, 65)):
        made = relu.plan(operation, (4, columns), dtype, addends)
        compiled = launcher.compile(made.source, architecture)
        assert set(compiled.spill_bytes) == {f"jaxnorm_relu_{operation}"}
        assert max(compiled.spill_bytes.values()) == 0
        assert max(compiled.registers.values()) <= 64  # 4 blocks of 256 threads run at once


# ---- on the CPU ----

# Rows of whole bytes and others, of one column too; one row; several tiles, whole ones among them.
SHAPES = [
    (3, 8),
    (2, 3, 9),
    (1, 77),
    (4099, 1),
    (3, 8192),
    (2, 8195),
    (5, 4097),
    (1, 16389),
    (1371, 17),
]


def values(shape, dtype, seed):
    """Of both signs, zeros, and NaN and infinities."""
    x = np.array(rand(shape, dtype, seed))
    special = np.random.default_rng(seed).integers(0, 9, shape)
    for at, value in enumerate((0.0, -0.0, np.nan, np.inf, -np.inf)):
        x[special == at] = value
    return x


@needs_emulator
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_only_select(shape, dtype):
    packed = (*shape[:-1], -(-shape[-1] // 8))
    x, z, t = (values(shape, dtype, seed) for seed in range(3))
    x[np.isinf(x) & np.isinf(z)] = 1  # inf - inf
    for addends in ((x,), (x, z)):
        made = relu.plan("fwd", shape, dtype, len(addends))
        results = [(shape, x.dtype), (packed, np.uint8)]
        y, mask = kernel_emulator.run(made, list(addends), results)
        np.testing.assert_array_equal(oracle.f64(y), oracle.relu(*addends))
        np.testing.assert_array_equal(mask, oracle.relu_mask(*addends))
        made = relu.plan("bwd", shape, dtype)
        (bar,) = kernel_emulator.run(made, [mask, t], [(shape, x.dtype)])
        np.testing.assert_array_equal(oracle.f64(bar), oracle.relu_vjp(addends[0], t, *addends[1:]))
