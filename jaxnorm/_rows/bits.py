"""Booleans of a row as bits, eight to a byte: formulas with a name, which the compiler of row programs knows."""

import functools

import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from jaxnorm import _bits
from jaxnorm._primitive.avals import aval_like
from jaxnorm._primitive.define import define_formula


def pack(keep):
    """Bit i of byte j is element 8 * j + i of the last axis."""
    (bits,) = pack_bits_p.bind(keep)
    return bits


def unpack(bits, n: int):
    """The inverse of `pack`: n booleans along the last axis."""
    (keep,) = unpack_bits_p.bind(bits, n=n)
    return keep


packed_aval = _bits.aval


def _unpack_formula(bits, *, n):
    if bits.size == 0:  # unpackbits raises for an empty array
        return [jnp.zeros((*bits.shape[:-1], n), bool)]
    return [jnp.unpackbits(bits, axis=-1, count=n, bitorder="little").astype(bool)]


def _batch(primitive, args, dims, **params):
    """With the mapped axis in front: the booleans are moved, never the bits."""
    return primitive.bind(jnp.moveaxis(args[0], dims[0], 0), **params), [0]


pack_bits_p = define_formula(
    "pack_bits",
    abstract=lambda keep: [packed_aval(keep)],
    formula=lambda keep: [_bits.pack(keep)],
)
unpack_bits_p = define_formula(
    "unpack_bits",
    abstract=lambda bits, *, n: [aval_like(bits, (*bits.shape[:-1], n), np.bool_)],
    formula=_unpack_formula,
)
for _primitive in (pack_bits_p, unpack_bits_p):
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
