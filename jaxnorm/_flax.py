"""What jaxnorm.linen and jaxnorm.nnx share: which calls of a Flax module an operation of jaxnorm can answer, and how.

Both are subclasses of Flax's modules that replace `__call__`. Whatever an operation here does not say in the same words
(complex numbers, statistics in half precision, parameters of axes that are not normalised, ...) is left to Flax's own
`__call__`, with its results and its errors. Nothing here imports Flax; `module` is one of either library, whose
attributes have the same names.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from jaxnorm import _check

MISSING = "Flax is not installed, which {} needs. Install it with: pip install 'jaxnorm[flax]'"


def axes_of(ndim, axes):
    """`axes` as Flax reads them, a tuple without duplicates; None if there is none, or one that x does not have."""
    try:
        entries = {ndim + a if a < 0 else a for a in (axes if np.iterable(axes) else (axes,))}
    except TypeError:
        return None
    found = tuple(entries)
    # Flax takes a set's order for that of the features, which from 9 dimensions on need not be x's.
    return found if found == tuple(sorted(entries & set(range(ndim)))) and found else None


def sizes_match(x, features, parameters):
    """Whether every parameter has one element per feature."""
    count = math.prod(x.shape[a] for a in features)
    return all(p.size == count for p in parameters)


def answers(module, x, mask, dtypes):
    """Whether jaxnorm computes with these arrays, of which `dtypes` are those of parameters and statistics."""
    return (
        isinstance(x, (jax.Array, np.ndarray))
        and x.ndim > 0
        and isinstance(module.epsilon, (int, float, np.floating))
        # What Flax then does is less precise: half-precision statistics and arithmetic.
        and getattr(module, "force_float32_reductions", True)
        and all(_is_float(d) for d in (x.dtype, *dtypes))
        and (module.dtype is None or _is_float(module.dtype))
        and (mask is None or _is_mask(mask, x.shape))
    )


def _is_float(dtype):
    return jnp.dtype(dtype).name in _check.DTYPES


def _is_mask(mask, shape):
    if getattr(mask, "dtype", None) != np.bool_ or mask.ndim > len(shape):
        return False
    return all(a in (1, b) for a, b in zip(mask.shape[::-1], shape[::-1], strict=False))


# ---- LayerNorm and RMSNorm ----


def norm_axes(module, x, has_parameters):
    """(reduction axes, feature axes) where an operation with `axis` can answer, else None.

    Parameters belong to normalised axes there. Statistics over devices (`axis_name`) are only for batch_norm.
    """
    reduction = axes_of(x.ndim, module.reduction_axes)
    features = axes_of(x.ndim, module.feature_axes)
    if module.axis_name is not None or reduction is None or features is None:
        return None
    return (reduction, features) if set(features) <= set(reduction) or not has_parameters else None


def norm(operation, module, x, parameters, axes, mask):
    """`operation` with Flax's dtypes; `parameters` have the feature axes' sizes."""
    reduction, features = axes
    dtype = result_dtype(module, x, parameters)
    shape = [x.shape[a] for a in reduction]
    spread = [x.shape[a] if a in features else 1 for a in reduction]
    y = operation(
        _widened(x, dtype),
        **{n: jnp.broadcast_to(p.reshape(spread), shape) for n, p in parameters.items()},
        axis=reduction,
        epsilon=float(module.epsilon),
        mask=mask,
    )
    return y.astype(dtype)


def result_dtype(module, x, parameters):
    if module.dtype is None:
        return jnp.result_type(x, *parameters.values())
    return jax.dtypes.canonicalize_dtype(module.dtype)


def _widened(x, dtype):
    """An array in the wider of its own dtype and the result's: operations round to x's, once."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), dtype))


# ---- BatchNorm ----


def batch_norm_axes(module, x, mask):
    """The feature axes where batch_norm can answer, else None.

    With both a mask and an axis name Flax gives each device the same weight, however few elements it counts, which
    batch_norm does not. Groups of several lengths are beyond it too.
    """
    groups = module.axis_index_groups
    if module.axis_name is not None:
        if mask is not None or (groups is not None and len(set(map(len, groups))) != 1):
            return None
    return axes_of(x.ndim, module.axis)


def batch_norm(module, x, statistics, parameters, *, axes, axis_name, mask, residual):
    """(y, mean, var): x normalised by `statistics`, or by its own if those are None."""
    dtype = result_dtype(module, x, parameters)
    wide = _widened(x, dtype)
    if residual is not None:
        _check_residual(residual, x.shape, dtype)
        residual = jnp.asarray(residual, wide.dtype)
    shape = [x.shape[a] for a in axes]
    call = {n: p.reshape(shape) for n, p in parameters.items()} | {
        "axis": axes,
        "epsilon": float(module.epsilon),
        "residual": residual,
        "activation": module.activation,
    }
    if statistics is not None:
        mean, var = statistics
        y = jaxnorm.batch_norm_inference(wide, mean.reshape(shape), var.reshape(shape), **call)
        return y.astype(dtype), mean, var
    groups = None if axis_name is None else module.axis_index_groups
    y, mean, var = jaxnorm.batch_norm(
        wide, mask=mask, axis_name=axis_name, axis_index_groups=groups, **call
    )
    kept = jnp.promote_types(
        jnp.result_type(x) if module.dtype is None else module.dtype, np.float32
    )
    return y.astype(dtype), mean.astype(kept), var.astype(kept)


def check_activation(activation):
    if activation not in (None, "relu"):
        raise ValueError(
            f"BatchNorm: activation must be None or 'relu', got {activation!r}. Apply any other function to the result."
        )


def after_flax(y, residual, activation):
    """The residual and the ReLU that Flax's own BatchNorm does not have."""
    if residual is not None:
        _check_residual(residual, y.shape, y.dtype)
        return y + residual if activation is None else jaxnorm.add_relu(y, residual)
    return y if activation is None else jaxnorm.relu(y)


def _check_residual(residual, shape, dtype):
    if jnp.result_type(residual) != dtype:
        raise TypeError(
            f"BatchNorm: residual must have the result's dtype {dtype}, got {jnp.result_type(residual)}. "
            f"Cast it with residual.astype('{dtype}')."
        )
    if jnp.shape(residual) != shape:
        raise ValueError(
            f"BatchNorm: residual must have x's shape {shape}, got {jnp.shape(residual)}. "
            "Project or broadcast it first."
        )
