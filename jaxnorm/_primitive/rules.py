"""What derivative and batching rules share.

A tangent is an array, or `ad.Zero`, or, where it is looked up by name, None. `ad.Zero` and None are structure: calls
have no operand for them.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxnorm._primitive.avals import spec_of

# ---- tangents ----


def is_present(tangent) -> TypeGuard[jax.Array]:
    """Whether a tangent or cotangent is an array of numbers."""
    if tangent is None or type(tangent) is ad.Zero:
        return False
    return jax.typeof(tangent).dtype != jax.dtypes.float0  # of an integer


def zero(value):
    """The tangent of a result that depends on nothing."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def add(*terms) -> Any:
    """The sum of the terms that are present; None if none is."""
    arrays = [t for t in terms if is_present(t)]
    return sum(arrays[1:], arrays[0]) if arrays else None


def total_tangents(results: Sequence, *terms: Sequence | None) -> list:
    """Tangents of all results.

    Args:
      results: of a call.
      *terms: lists that hold a tangent for each result, or None; tangents may be smaller than results.
    """
    columns = zip(*(t or [None] * len(results) for t in terms), strict=True)
    return [
        zero(r) if t is None else jnp.broadcast_to(t, r.shape)
        for r, t in zip(results, (add(*column) for column in columns), strict=True)
    ]


def sum_to(value, aval):
    """The transpose of broadcasting an array of `aval`: the sum over what is broadcast, where that array lives.

    Args:
      value: the cotangent of the broadcast array.
      aval: the abstract value of the array.
    """
    if not is_present(value):
        return ad.Zero(aval)
    broadcast = [i for i, n in enumerate(aval.shape) if n != value.shape[i]]
    value = jnp.sum(value, broadcast, keepdims=True) if broadcast else value
    # On an Explicit mesh, the cotangent of an array that all devices have is made in parts where x is cut.
    alike = spec_of(jax.typeof(value)) == spec_of(aval)
    return value if alike else jax.sharding.reshard(value, aval.sharding)


# ---- mapped axes ----

NOT_MAPPED = None  # what a batching rule gets for an operand without a mapped axis


def first_mapped(dims: Sequence) -> int:
    """Where the first operand with a mapped axis has it."""
    return next(d for d in dims if d is not NOT_MAPPED)


def mapped_size(args: Sequence, dims: Sequence):
    """Size of the mapped axis."""
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not NOT_MAPPED)


def mapped_at(at: int, args: Sequence, dims: Sequence, whole: Sequence[bool] | None = None) -> list:
    """Operands with the mapped axis in one place.

    Args:
      at: where they get it.
      args: the operands.
      dims: where they have it.
      whole: which operands must have all elements along it; the others have size 1 there if they are not mapped.
    """
    size = mapped_size(args, dims)

    def place(a, d, is_whole):
        if d is not NOT_MAPPED:
            return jnp.moveaxis(a, d, at)
        a = jnp.expand_dims(a, at)
        return jnp.broadcast_to(a, (*a.shape[:at], size, *a.shape[at + 1 :])) if is_whole else a

    return [place(*each) for each in zip(args, dims, whole or [False] * len(args), strict=True)]
