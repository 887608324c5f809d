"""The arithmetic of formulas."""

import jax
import jax.numpy as jnp
import numpy as np


def acc_dtype(dtype):
    """What values of `dtype` are summed in (not promote_types, which strict promotion refuses)."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def pinned(value):
    """`value` rounded to a bit less than its dtype has, so that it is the same number wherever it is used.

    Compilers compute what is cheap again for each use, and contract its last product with the use's first sum, which
    leaves out a rounding. They cannot leave out this one.
    """
    info = jnp.finfo(value.dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant - 1)
