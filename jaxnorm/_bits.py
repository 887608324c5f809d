"""One bit per element: numpy.packbits(keep, axis=-1, bitorder="little"), which the operations with a ReLU save.

The last axis is packed, so bits are sharded as the array is, but for that axis: cutting it changes what a byte holds.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import CompoundFactor

from jaxnorm._primitive import aval_like, mesh_size, spec_of


def pack(keep):
    return jnp.packbits(keep, axis=-1, bitorder="little")


def select(bits, t):
    """The elements of t whose bit is set, else 0."""
    if t.size == 0:  # of which unpackbits raises
        return t
    keep = jnp.unpackbits(bits, axis=-1, bitorder="little", count=t.shape[-1])
    return jnp.where(keep.astype(bool), t, jnp.zeros((), t.dtype))


def shape(of) -> tuple:
    return (*of[:-1], -(-of[-1] // 8))


def aval(x):
    """The abstract value of the bits of x."""
    spec, columns = spec_of(x), x.shape[-1]
    last = spec[-1]
    if last is not None:
        last = entry(last, columns, mesh_size(x.sharding.mesh, last))
    return aval_like(x, shape(x.shape), np.uint8, (*spec[:-1], last))


def entry(spec_entry, columns, shards):
    """How the last axis of the bits is cut when x's is: alike if each block holds whole bytes, else not at all."""
    return spec_entry if columns % (8 * shards) == 0 else None


def factors(mesh, of):
    """(dimensions of x, dimensions of its bits, factor sizes) for a sharding rule: a byte of them is eight columns.

    The two are tied where every way to cut the columns leaves whole bytes; else cutting x says nothing about the bits.
    """
    lead, columns = tuple(f"d{i}" for i in range(len(of) - 1)), of[-1]
    if columns % (8 * mesh.size):
        return (*lead, "c"), (*lead, "m"), {}
    return (*lead, CompoundFactor("m", "b")), (*lead, "m"), {"b": 8}


# ---- blocks that hold no whole bytes: each device has all bits of its rows ----


def pack_block(names, blocks, keep):
    """Each device sets its own bits of the whole."""
    columns = keep.shape[-1]
    whole = jnp.zeros((*keep.shape[:-1], columns * blocks), bool)
    start = jax.lax.axis_index(names) * columns
    whole = jax.lax.dynamic_update_slice_in_dim(whole, keep, start, axis=-1)
    return jax.lax.psum(pack(whole), names)


def select_block(names, blocks, bits, t):
    columns = t.shape[-1]
    keep = jnp.unpackbits(bits, axis=-1, bitorder="little", count=columns * blocks)
    start = jax.lax.axis_index(names) * columns
    keep = jax.lax.dynamic_slice_in_dim(keep, start, columns, axis=-1)
    return jnp.where(keep.astype(bool), t, jnp.zeros((), t.dtype))
