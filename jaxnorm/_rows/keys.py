"""Random keys, which row programs take as their data."""

import jax
import jax.numpy as jnp


def is_key(aval) -> bool:
    """Whether an array, or what describes one, is of random keys."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def kind_of(array):
    """The generator of random keys; None of other arrays."""
    if not is_key(array):
        return None
    if isinstance(array, jax.Array):
        return jax.random.key_impl(array)
    kinds: list = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), array)
    return kinds[0]


def data_of(array):
    """The data of random keys; another array as it is."""
    return jax.random.key_data(array) if is_key(array) else array


def with_kind(data, kind):
    """Random keys of a generator; the data itself where `kind` is None."""
    return data if kind is None else jax.random.wrap_key_data(data, impl=kind)
