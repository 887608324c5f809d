"""Abstract values: shapes, dtypes, where arrays live, and the manual axes along which they vary."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

Spec = tuple  # one entry per dimension: None, an axis name, or a tuple of axis names


def aval_like(x, shape=None, dtype=None, spec=None):
    """The abstract value of a result that lives where x does.

    Unlike a new ShapedArray, `update` keeps x's mesh, memory space and varying manual axes; without the last,
    shard_map(check_vma=True) would return wrong values silently. `spec` is needed where the rank or a sharded
    dimension changes.
    """
    changes = {"sharding": x.sharding.update(spec=PartitionSpec(*spec))} if spec is not None else {}
    return x.update(
        shape=x.shape if shape is None else shape,
        dtype=x.dtype if dtype is None else np.dtype(dtype),
        weak_type=False,
        **changes,
    )


def spec_of(aval) -> Spec:
    """Sharding of an abstract value, one entry per dimension."""
    entries = tuple(aval.sharding.spec)
    return entries + (None,) * (aval.ndim - len(entries))


def broadcast_aval(*avals):
    """The abstract value of the array that all operands broadcast to, of the first one's dtype."""
    x = avals[0]
    shape = jnp.broadcast_shapes(*(a.shape for a in avals))
    if shape == x.shape:
        return aval_like(x)
    specs = zip(*map(spec_of, avals), strict=True)
    spec = [next((s for s in entries if s is not None), None) for entries in specs]
    return aval_like(x, shape=shape, spec=spec)


def collapsed_aval(aval, dims, dtype):
    """`aval` with size 1 in `dims`, of another dtype."""

    def at(entries, value):
        return tuple(value if i in dims else e for i, e in enumerate(entries))

    return aval_like(aval, at(aval.shape, 1), dtype, at(spec_of(aval), None))


def joint_spec(full, specs, shapes) -> Spec:
    """How the array that all of these broadcast to is cut: as the first of its shape, or else as any of them is."""
    whole = (s for s, shape in zip(specs, shapes, strict=True) if tuple(shape) == tuple(full))
    entries = zip(*specs, strict=True)
    return next(whole, None) or tuple(
        next((e for e in es if e is not None), None) for es in entries
    )


def cotangent_aval(aval):
    """The abstract value of the cotangent of a floating-point array."""
    return aval.to_tangent_aval().to_ct_aval()


def same_place(a, b) -> bool:
    """Whether two abstract values differ in nothing but being weakly typed."""
    return a == b or a.update(weak_type=False) == b.update(weak_type=False)


def struct_of(aval) -> jax.ShapeDtypeStruct:
    """What stands for an array where a part of a program is traced again; on an Explicit mesh it is sharded alike."""
    explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    sharding = aval.sharding if explicit else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


# ---- mesh axes ----


def axis_names(entry) -> tuple:
    """The mesh axes of one entry of a Spec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def mesh_size(mesh: Mesh | AbstractMesh, entry) -> int:
    """Number of blocks that a dimension with this entry of a Spec is cut into."""
    return int(np.prod([mesh.shape[name] for name in axis_names(entry)], dtype=np.int64))


def varying_axes(aval) -> frozenset:
    """The manual axes along which an array differs."""
    return aval.mat.varying


def vary_alike(*args):
    """Casts operands to one set of varying manual axes, as `jax.lax` operations do before they bind."""
    varying = [varying_axes(jax.typeof(a)) for a in args]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(union - v), to="varying") if union - v else a
        for a, v in zip(args, varying, strict=True)
    ]


def vary_as(array, aval):
    """`array`, cast to vary along the manual axes along which `aval` does."""
    return vary_along(array, varying_axes(aval))


def vary_along(array, axes):
    """`array`, cast to vary along these manual axes of a shard_map, too."""
    missing = frozenset(axes) - varying_axes(jax.typeof(array))
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array
