"""One bit per element: numpy.packbits(keep, axis=-1, bitorder="little"), which the operations with a ReLU save.

The last axis is packed, so bits are sharded as the array is, but for that axis: cutting it changes what a byte holds.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import CompoundFactor

from jaxnorm._primitive.avals import aval_like, mesh_size, spec_of
from jaxnorm._sharding import Blocks


def pack(keep):
    return jnp.packbits(keep, axis=-1, bitorder="little")


def select(bits, t):
    """The elements of t whose bit is set, else 0."""
    if t.size == 0:  # of which unpackbits raises
        return t
    keep = jnp.unpackbits(bits, axis=-1, bitorder="little", count=t.shape[-1])
    return jnp.where(keep.astype(bool), t, jnp.zeros((), t.dtype))


def shape(full) -> tuple:
    """The shape of the bits of an array of the shape `full`."""
    return (*full[:-1], -(-full[-1] // 8))


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


def factors(devices, full):
    """(dimensions of x, dimensions of its bits, factor sizes) for a sharding rule: a byte of them is eight columns.

    The two are tied where every way to cut the columns leaves whole bytes; else cutting x says nothing about the bits.
    """
    lead, columns = tuple(f"d{i}" for i in range(len(full) - 1)), full[-1]
    if columns % (8 * devices):
        return (*lead, "c"), (*lead, "m"), {}
    return (*lead, CompoundFactor("m", "b")), (*lead, "m"), {"b": 8}


# ---- devices ----


def cuts_bytes(blocks: Blocks) -> bool:
    """Whether the blocks of an array do not hold whole bytes of its bits, so that each device has all of its rows'."""
    last = len(blocks.shape) - 1
    return blocks.count(last) > 1 and blocks.size(last) % 8 != 0


def tiles(blocks: Blocks, full):
    """How the bits of an array of the shape `full`, which broadcasts to the whole, are cut."""
    *lead, last = range(len(blocks.shape))
    alike = [i for i in lead if full[i] == blocks.shape[i]]
    return blocks.tiles_along(alike if cuts_bytes(blocks) else [*alike, last])


def pack_block(blocks: Blocks, keep):
    """The bits of all columns, of which each device sets its own."""
    last = len(blocks.shape) - 1
    columns = blocks.size(last)
    whole = jnp.zeros((*keep.shape[:-1], columns * blocks.count(last)), bool)
    whole = jax.lax.dynamic_update_slice_in_dim(whole, keep, blocks.start(last), axis=-1)
    return blocks.psum(pack(whole[..., : blocks.shape[-1]]), (last,))


def select_block(blocks: Blocks, bits, t):
    if t.size == 0:
        return t
    last = len(blocks.shape) - 1
    columns = blocks.size(last)
    keep = jnp.unpackbits(bits, axis=-1, bitorder="little", count=blocks.shape[-1])
    padding = columns * blocks.count(last) - blocks.shape[-1]
    keep = jnp.pad(keep, [*((0, 0) for _ in range(last)), (0, padding)])
    keep = jax.lax.dynamic_slice_in_dim(keep, blocks.start(last), columns, axis=-1)
    return jnp.where(keep.astype(bool), t, jnp.zeros((), t.dtype))
