"""What derivative and batching rules share."""

import jax
import jax.numpy as jnp

from jaxnorm._primitive.avals import spec_of

NOT_MAPPED = None  # what a batching rule gets for an operand without a mapped axis


def sum_to(value, aval):
    """The transpose of broadcasting an array of `aval`: the sum over what is broadcast, where that array lives."""
    broadcast = [i for i, n in enumerate(aval.shape) if n != value.shape[i]]
    value = jnp.sum(value, broadcast, keepdims=True) if broadcast else value
    # On an Explicit mesh, the cotangent of an array that all devices have is made in parts where x is cut.
    alike = spec_of(jax.typeof(value)) == spec_of(aval)
    return value if alike else jax.sharding.reshard(value, aval.sharding)
