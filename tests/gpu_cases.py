"""What tests of kernels on a GPU share."""

import jax.numpy as jnp
import numpy as np
import pytest

SOFTMAXES = ("softmax", "log_softmax")
halves = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def rand(shape, dtype, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * 3
    return jnp.asarray(values).astype(dtype)


# At powers of two schedules change.
BOUNDARIES = sorted({max(1, (1 << k) + d) for k in range(18) for d in (-1, 0, 1)})
# Of 132 parts that begin with a cache line, the last has a single slot of 16-bit elements.
LITTLE_LEFT = 8 * (131 * 1000 + 1)
