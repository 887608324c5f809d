"""Several axes as one, which is what the kernels reduce."""

import math

import jax.numpy as jnp


def merge_axes(arrays, axes):
    """Reshapes arrays of one rank so that `axes` become one axis, along which they follow each other in their order.

    Returns the arrays, the axis, and the function that puts a result's dimensions back in order (still merged).
    Neighbouring axes in order merge in place; others are moved to the end first, which costs a transpose.
    """
    x = arrays[0]
    if not axes:
        return [a[..., None] for a in arrays], x.ndim, lambda y: y
    first, last = axes[0], axes[-1] + 1
    if axes != tuple(range(first, last)):
        end = range(x.ndim - len(axes), x.ndim)
        arrays = [jnp.moveaxis(a, axes, end) for a in arrays]
        shape = arrays[0].shape
        merged, axis, _ = merge_axes(arrays, tuple(end))
        return merged, axis, lambda y: jnp.moveaxis(y.reshape(shape), end, axes)
    if len(axes) == 1:
        return arrays, first, lambda y: y
    full = x.shape[first:last]

    def merge(a):
        sizes = a.shape[first:last]
        if all(s == 1 for s in sizes):
            size = 1
        else:
            size = math.prod(full)
            a = jnp.broadcast_to(a, (*a.shape[:first], *full, *a.shape[last:]))
        return a.reshape(*a.shape[:first], size, *a.shape[last:])

    return [merge(a) for a in arrays], first, lambda y: y
