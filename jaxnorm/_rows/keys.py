"""Random keys, which row programs take as their data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def is_key(aval) -> bool:
    """Whether an array, or what describes one, is of random keys."""
    dtype = aval.dtype
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def kind_of(array):
    """The generator of random keys; None of other arrays."""
    if not is_key(array):
        return None
    return _kind_of_dtype(array.dtype)


@functools.lru_cache(maxsize=32)
def _kind_of_dtype(dtype):
    kinds: list = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), key)
    return kinds[0]


@functools.lru_cache(maxsize=256)
def data_aval(shape, dtype):
    """What describes the data of random keys of a shape."""
    keys = jax.ShapeDtypeStruct(shape, dtype)
    return jax.make_jaxpr(jax.random.key_data)(keys).out_avals[0]


def data_of(array):
    """The data of random keys; another array as it is."""
    return jax.random.key_data(array) if is_key(array) else array


def with_kind(data, kind):
    """Random keys of a generator; the data itself where `kind` is None."""
    return data if kind is None else jax.random.wrap_key_data(data, impl=kind)
