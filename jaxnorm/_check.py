"""Argument checks shared by the operations. Messages read `<op>: <argument> must <rule>, got <value>. <fix>`."""

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")
IMPLEMENTATIONS = (None, "kernel", "xla")


def float_array(op: str, name: str, value) -> jax.Array:
    """`value` as an array of one of the four supported floating-point types."""
    try:
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or value is None or isinstance(value, (str, bytes, list, tuple)):
        raise TypeError(
            f"{op}: {name} must be an array, got {type(value).__name__}. Convert it with jnp.asarray({name})."
        )
    if dtype.name not in DTYPES:
        raise TypeError(
            f"{op}: {name} must be of dtype {', '.join(DTYPES)}, got {dtype.name}. "
            f"Convert it with {name}.astype(jnp.float32)."
        )
    # jnp.asarray of a traced array is an operation, whose result jax_debug_nans would check.
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def bool_array(op: str, name: str, value) -> jax.Array:
    """`value` as a boolean array."""
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if dtype != np.bool_:
        raise TypeError(
            f"{op}: {name} must be of dtype bool, got {dtype}. Compare it first, for example {name} != 0."
        )
    return jnp.asarray(value)


def alike(op: str, name: str, value, x: jax.Array) -> jax.Array:
    """`value` as an array of x's shape and dtype."""
    value = float_array(op, name, value)
    if value.dtype != x.dtype:
        raise TypeError(
            f"{op}: {name} must have x's dtype {x.dtype}, got {value.dtype}. Cast one of them, for example "
            f"{name}.astype(x.dtype)."
        )
    shape(op, name, value.shape, x.shape, owner="x")
    return value


def shape(op: str, name: str, got, expected, owner: str = "x's normalised axes") -> None:
    if tuple(got) != tuple(expected):
        raise ValueError(
            f"{op}: {name} must have the shape {tuple(expected)} of {owner}, got {tuple(got)}. "
            f"Reshape or broadcast it; use jax.vmap for a {name} per example."
        )


def number(op: str, name: str, value) -> float:
    """`value` as a Python float; arrays would have to be operands."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        raise TypeError(
            f"{op}: {name} must be a Python number, got {type(value).__name__}. Pass float({name})."
        )
    return float(value)


def implementation(op: str, value: str | None) -> None:
    if value not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation must be None, 'kernel' or 'xla', got {value!r}. "
            "None picks the kernel where there is one and it wins."
        )


def axes(op: str, axis, ndim: int) -> tuple[int, ...]:
    """`axis` (an int, a tuple of ints, or None for all axes) as sorted non-negative axes."""
    if axis is None:
        return tuple(range(ndim))
    entries = axis if isinstance(axis, (tuple, list)) else (axis,)
    result = []
    for entry in entries:
        try:
            index = entry.__index__()
        except AttributeError:
            raise TypeError(
                f"{op}: axis must be an int, a tuple of ints or None, got {axis!r}. Pass axis=-1 for the last axis."
            ) from None
        if not -ndim <= index < ndim:
            raise ValueError(
                f"{op}: axis must lie in [{-ndim}, {ndim}) for x of {ndim} dimensions, got {axis!r}. "
                "Pass an axis that x has."
            )
        result.append(index % ndim)
    if len(set(result)) != len(result):
        raise ValueError(
            f"{op}: axis must name each axis once, got {axis!r}. Remove the repeated axis."
        )
    return tuple(sorted(result))


def broadcastable(op: str, name: str, shape, to) -> None:
    """`shape` must broadcast to `to` without enlarging it."""
    padded = (1,) * (len(to) - len(shape)) + tuple(shape)
    if len(padded) != len(to) or any(a not in (1, b) for a, b in zip(padded, to, strict=True)):
        raise ValueError(
            f"{op}: {name} must have a shape that broadcasts to x's {tuple(to)}, got {tuple(shape)}. "
            "Give every dimension size 1 or x's size (insert axes with x[..., None])."
        )
