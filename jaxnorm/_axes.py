"""Several axes as one, which is what the kernels reduce."""

import math

import jax.numpy as jnp


def merge_axes(arrays, axes):
    """Reshapes arrays that broadcast to each other so that `axes` are one axis, in which the last of them is fastest.

    Neighbouring axes in order merge in place; others are moved to the end first, which costs a transpose.

    Args:
      arrays: of one rank.
      axes: one at least.

    Returns:
      The arrays, the axis, and the function that gives a result of their joint shape its dimensions back.
    """
    first, last = axes[0], axes[-1] + 1
    if axes != tuple(range(first, last)):
        ndim = arrays[0].ndim
        end = tuple(range(ndim - len(axes), ndim))
        merged, axis, unmerge = merge_axes([jnp.moveaxis(a, axes, end) for a in arrays], end)
        return merged, axis, lambda y: jnp.moveaxis(unmerge(y), end, axes)
    if len(axes) == 1:
        return arrays, first, lambda y: y
    full = jnp.broadcast_shapes(*(a.shape for a in arrays))[first:last]

    def merge(a):
        sizes = a.shape[first:last]
        if all(s == 1 for s in sizes):
            size = 1
        else:
            size = math.prod(full)
            a = jnp.broadcast_to(a, (*a.shape[:first], *full, *a.shape[last:]))
        return a.reshape(*a.shape[:first], size, *a.shape[last:])

    def unmerge(y):
        return y.reshape(*y.shape[:first], *full, *y.shape[first + 1 :])

    return [merge(a) for a in arrays], first, unmerge
