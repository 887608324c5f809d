"""The primitives of batch_norm, with a residual and a ReLU in the same pass.

Notation: features are the dimensions `axes`; all others (beyond the first `groups`, see below) are reduced, n elements
for each feature. xhat = (x - mean) * rstd with rstd = (var + epsilon)^-1/2; y = xhat * scale + bias + residual, then
max(y, 0) if `relu`, with one bit per element that says where y > 0.

Forward is two passes over x, and so is backward. Each pass is a primitive of its own, because a reduction over devices
may have to happen between them: as separate operations XLA sees it, sharding rules stay those of one reduction or of
elementwise work, and inside shard_map, pmap and vmap the collective is an ordinary `psum`.

  batch_norm_stats    x, [mask] -> mean, var, [count]                                nonlinear
  batch_norm_fwd      x, mean, var, [scale], [bias], [residual] -> y, [bits]         nonlinear
  batch_norm_sums     dy, [bits], x, mean, var -> dbias, dscale                      linear in dy
  batch_norm_dx       dy, [bits], x, [mask, count], mean, var, [scale], dbias, dscale, [dmean, dvar]
                        -> dx, dresidual                                             linear in all that start with d
  batch_norm_jvp_in   the transpose of dx; a formula                                 linear in x_dot, residual_dot
  batch_norm_jvp_out  the transpose of sums, and an addition; a formula              linear in all that end in _dot

The tangent of y falls apart like backward, in reverse. With t = keep * x_dot, where the mask is on and 0 elsewhere,

  jvp_in     y_dot = bits ? rstd * scale * x_dot + residual_dot : 0
             bias_dot = -rstd * scale * sum(t) / n, scale_dot = -rstd * scale * sum(t * xhat) / n
             mean_dot = sum(t) / n, var_dot = 2 * sum(t * (x - mean)) / n
  (sums over devices, and the tangents of scale and bias are added)
  jvp_out    y_dot + (bits ? bias_dot + xhat * scale_dot : 0)

so that x_dot enters one primitive only, and transposition makes dx in one pass. That is also why the rule belongs to
the composition (`_normalise` in batch_norm.py, a custom_jvp function). The rules of its two parts serve given
statistics, and derivatives of derivatives. Primitives take the variance, not rstd: it is what forward returns, and
nothing is left to do for XLA between the passes.

The bits are always kept, not computed again from x in backward: reading them is 1/40 of what a 16-bit backward moves,
and computing them again would take scale and bias as operands, and arithmetic that is the same to the bit in forward
and backward, in the kernels of every platform and in the formula.

Operands have x's rank; those that belong to features have size 1 in the reduced dimensions. The first `groups`
dimensions are those that vmap mapped, where an operand that was not mapped has size 1.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching

from jaxnorm import _bits, _launch
from jaxnorm._kernels import batch_norm as kernels
from jaxnorm._primitive.arithmetic import acc_dtype, pinned
from jaxnorm._primitive.avals import (
    aval_like,
    joint_spec,
    spec_of,
    vary_alike,
)
from jaxnorm._primitive.calls import Call, broadcast_fits
from jaxnorm._primitive.define import define_dce, define_formula, define_primitive
from jaxnorm._primitive.merge import Merge
from jaxnorm._primitive.named import bind_named, bits_of, by_name, only
from jaxnorm._primitive.partition import Partition, sharding_factors
from jaxnorm._primitive.rules import (
    NOT_MAPPED,
    add,
    is_present,
    mapped_at,
    sum_to,
    total_tangents,
    zero,
)
from jaxnorm._rows.call import device_here
from jaxnorm._sharding import Blocks

# Operands and results, in the order that calls have them, and the bits of their names (ffi/cpu/batch_norm_call.h).
_KERNEL_NAMES = (
    *("x", "dy", "y", "bits", "mask", "mean", "var", "count", "scale", "bias", "residual"),
    *("dbias", "dscale", "dmean", "dvar", "dx", "dresidual"),
)
_BITS = {n: 1 << i for i, n in enumerate(_KERNEL_NAMES)}
_TANGENTS = ("x_dot", "residual_dot", "y_dot", "bias_dot", "scale_dot", "mean_dot", "var_dot")
_NAMES = (*_KERNEL_NAMES, *_TANGENTS)
# Of x's shape and dtype. Masks and bits aside, all others have one number per feature, in the arithmetic's dtype.
_ARRAYS = frozenset(
    ("x", "dy", "y", "residual", "dx", "dresidual", "x_dot", "residual_dot", "y_dot")
)

bind = partial(bind_named, _NAMES)


def forward(given, results, params):
    names = ("x", "mean", "var", "scale", "bias", "residual")
    return bind(fwd_p, only(given, names), results, params)


# ---- formulas: operands by name -> results by name ----


def _full(shapes):
    """The shape that operands (name -> shape) broadcast to."""
    return jnp.broadcast_shapes(*((*s[:-1], 1) if n == "bits" else s for n, s in shapes.items()))


def _reduced(ndim, axes, groups):
    return tuple(i for i in range(groups, ndim) if i not in axes)


def _result_shape(name, full, axes, groups):
    if name in _ARRAYS:
        return full
    reduced = _reduced(len(full), axes, groups)
    return tuple(1 if i in reduced else n for i, n in enumerate(full))


def _reference(formula):
    def reference(*operands, names, results, axes, groups, **params):
        given = by_name(names, operands)
        out = formula(given, results, axes=axes, groups=groups, **params)
        full = _full({n: a.shape for n, a in given.items()})
        # Bits are those of y, which has the full shape; symbols of their last dimension may be written otherwise.
        return [
            out[r]
            if r == "bits"
            else jnp.broadcast_to(out[r], _result_shape(r, full, axes, groups))
            for r in results
        ]

    return reference


def _masked(v, given):
    # Selected, so that what masked elements hold (NaN, say) does not matter.
    return jnp.where(given["mask"], v, jnp.zeros((), v.dtype)) if "mask" in given else v


def _selected(v, given):
    return _bits.select(given["bits"], v) if "bits" in given else v


def _widened(v):
    return v.astype(acc_dtype(v.dtype))


def _factor(given, epsilon):
    """The product of rstd and scale."""
    rstd = jax.lax.rsqrt(given["var"] + np.asarray(epsilon, given["var"].dtype))
    return rstd * given["scale"] if "scale" in given else rstd


def _xhat(given, epsilon):
    rstd = jax.lax.rsqrt(given["var"] + np.asarray(epsilon, given["var"].dtype))
    return (_widened(given["x"]) - given["mean"]) * rstd


def _mean_of(v, given, axes, groups, replicas):
    """Sums of what counts here, over the number of elements that count everywhere."""
    reduced = _reduced(v.ndim, axes, groups)
    if "count" in given:
        return jnp.sum(_masked(v, given), reduced, keepdims=True) / given["count"]
    return jnp.mean(v, reduced, keepdims=True) / replicas


def _stats_formula(given, results, *, axes, groups, **_):
    """Two passes, the second over distances from the mean of the first, which is rounded by several units.

    The first pass adds up x / n, as a sum of large numbers may be infinite.
    """
    del results
    x = _widened(given["x"])
    reduced = _reduced(x.ndim, axes, groups)
    counted = {n: given[n] for n in ("mask",) if n in given}
    if counted:
        kept = jnp.broadcast_to(given["mask"], _full({n: a.shape for n, a in given.items()}))
        n = counted["count"] = jnp.sum(kept, reduced, keepdims=True, dtype=x.dtype)
    else:
        n = _number(math.prod(x.shape[i] for i in reduced), x.dtype)
    share = 1 / jnp.maximum(n, np.ones((), x.dtype))
    rough = pinned(jnp.sum(_masked(x * share, counted), reduced, keepdims=True))
    rest = _mean_of(x - rough, counted, axes, groups, 1)
    square = _mean_of(jnp.square(x - rough), counted, axes, groups, 1)
    var = jnp.maximum(square - jnp.square(rest), np.zeros((), x.dtype))
    return {"mean": rough + rest, "var": var, "count": counted.get("count")}


def _fwd_formula(given, results, *, epsilon, relu, **_):
    x = given["x"]
    y = (_widened(x) - given["mean"]) * _factor(given, epsilon)
    if "bias" in given:
        y = y + given["bias"]
    if "residual" in given:
        y = y + _widened(given["residual"])
    y = y.astype(x.dtype)
    if relu:
        y = jnp.maximum(y, jnp.zeros((), y.dtype))
    return {"y": y, "bits": _bits.pack(y > 0) if "bits" in results else None}


def _jvp_in_formula(given, results, *, axes, groups, epsilon, replicas, **_):
    average = partial(_mean_of, given=given, axes=axes, groups=groups, replicas=replicas)
    out = {}
    if "y_dot" in results:
        terms = []
        if "x_dot" in given:
            terms.append(_factor(given, epsilon) * _widened(given["x_dot"]))
        if "residual_dot" in given:
            terms.append(_widened(given["residual_dot"]))
        dtype = next(given[n].dtype for n in ("x_dot", "residual_dot") if n in given)
        out["y_dot"] = _selected(add(*terms).astype(dtype), given)
    if "bias_dot" in results:
        out["bias_dot"] = -_factor(given, epsilon) * average(_widened(given["x_dot"]))
    if "scale_dot" in results:
        product = _widened(given["x_dot"]) * _xhat(given, epsilon)
        out["scale_dot"] = -_factor(given, epsilon) * average(product)
    if "mean_dot" in results:
        out["mean_dot"] = average(_widened(given["x_dot"]))
    if "var_dot" in results:
        deviation = _widened(given["x"]) - given["mean"]
        out["var_dot"] = 2 * average(_widened(given["x_dot"]) * deviation)
    return out


def _jvp_out_formula(given, results, *, epsilon, **_):
    del results
    terms = [given["bias_dot"]] if "bias_dot" in given else []
    if "scale_dot" in given:
        terms.append(_xhat(given, epsilon) * given["scale_dot"])
    y_dot = add(*terms)
    dtype = given["x" if "x" in given else "y_dot"].dtype  # a tangent of y alone needs no x
    if y_dot is not None:
        # Broadcast first: bits are those of elements.
        shapes = {n: a.shape for n, a in given.items() if n != "y_dot"}
        y_dot = _selected(jnp.broadcast_to(y_dot, _full(shapes)), given)
    if "y_dot" in given:
        y_dot = add(y_dot, _widened(given["y_dot"]))
    return {"y_dot": y_dot.astype(dtype)}


def _sums_formula(given, results, *, axes, groups, epsilon, **_):
    g = _widened(_selected(given["dy"], given))
    reduced = _reduced(g.ndim, axes, groups)
    out = {"dbias": jnp.sum(g, reduced, keepdims=True)}
    if "dscale" in results:
        out["dscale"] = jnp.sum(g * _xhat(given, epsilon), reduced, keepdims=True)
    return out


def _dx_formula(given, results, *, axes, groups, epsilon, replicas, **_):
    """The transpose of `_jvp_in_formula`; ffi/cpu/batch_norm_call.h has it as one equation."""
    out, terms = {}, []
    if "dy" in given:
        out["dresidual"] = g = _selected(given["dy"], given)
        if "dx" in results:
            terms.append(_factor(given, epsilon) * _widened(g))
    if "dx" not in results:
        return out
    drift = None
    if "dbias" in given:
        drift = given["dbias"] + _xhat(given, epsilon) * given["dscale"]
        drift = -_factor(given, epsilon) * drift
    if "dmean" in given:
        deviation = _widened(given["x"]) - given["mean"]
        drift = add(drift, given["dmean"] + 2 * deviation * given["dvar"])
    if drift is not None:
        if "count" in given:
            n = given["count"]
        else:
            reduced = _reduced(drift.ndim, axes, groups)
            n = _number(math.prod(given["x"].shape[i] for i in reduced), drift.dtype) * replicas
        terms.append(_masked(drift / n, given))
    dtype = next(given[n].dtype for n in ("dy", "x") if n in given)
    return out | {"dx": add(*terms).astype(dtype)}


def _number(n, dtype):
    """A size, which may be a symbol, as a number of `dtype`."""
    return np.asarray(n, dtype) if isinstance(n, int) else jnp.asarray(n).astype(dtype)


# ---- shapes, shardings ----


def _abstract(*avals, names, results, axes, groups, **_):
    given = by_name(names, avals)
    full_shape = _full({n: a.shape for n, a in given.items()})
    arrays = [a for n, a in given.items() if n in _ARRAYS]
    spec = joint_spec(full_shape, [spec_of(a) for a in arrays], [a.shape for a in arrays])
    full = aval_like(arrays[0], full_shape, spec=spec)
    reduced = _reduced(full.ndim, axes, groups)

    def result(name):
        if name in _ARRAYS:
            return full
        if name == "bits":
            return _bits.aval(full)
        shape = _result_shape(name, full_shape, axes, groups)
        entries = tuple(None if i in reduced else e for i, e in enumerate(spec))
        return aval_like(full, shape, acc_dtype(full.dtype), entries)

    return [result(name) for name in results]


# Dimensions that vmap made, which kernels know in runs of alike ones (ffi/cpu/call.h: kMaxBroadcastDims).
_MAX_GROUPS = 6


def _fits(array, *avals, names, axes, groups, **_):
    """Whether the kernels take the call: neighbouring features, simple broadcasts, and the operand `array`."""
    if axes != tuple(range(axes[0], axes[-1] + 1)) or groups > _MAX_GROUPS or array not in names:
        return False
    given = by_name(names, avals)
    if "mask" in given:
        full = _full({n: a.shape for n, a in given.items()})
        trailing = range(axes[-1] + 1, len(full))
        inner = any(full[i] != 1 for i in trailing)
        columns = trailing if inner else range(axes[0], len(full))
        if not broadcast_fits(given["mask"].shape, full, columns):
            return False
    return True


def _sharding_rule(devices, operand_shapes, result_shapes, *, names, results, **_):
    full = _full(by_name(names, operand_shapes))
    x, bits, sizes = _bits.factors(devices, full)
    if "bits" not in (*names, *results):  # nothing has the factors that a byte is made of
        x, sizes = (*x[:-1], "c"), {}

    def factors(k, name, shape):
        # A broadcast or reduced dimension gets a factor of its own: nothing follows from how it is sharded.
        own, whole = (bits, _bits.shape(full)) if name == "bits" else (x, full)
        return tuple(own[i] if n == whole[i] else f"{k}_{i}" for i, n in enumerate(shape))

    return sharding_factors(
        [
            factors(f"o{k}", n, s)
            for k, (n, s) in enumerate(zip(names, operand_shapes, strict=True))
        ],
        [
            factors(f"r{k}", n, s)
            for k, (n, s) in enumerate(zip(results, result_shapes, strict=True))
        ],
        sizes,
    )


def _partition(primitive, operands, results, /, **params):
    """Arrays stay where they are; each device reduces its part, and reductions are summed over the devices."""
    given = by_name(params["names"], operands)
    full = _full({n: a.shape for n, a in given.items()})
    blocks = Blocks.joint(full, [a for n, a in given.items() if n in _ARRAYS])

    def tiles(names, arrays):
        return [
            (_bits.tiles(blocks, a.shape) if n == "bits" else blocks.tiles_of(a.shape))
            for n, a in zip(names, arrays, strict=True)
        ]

    return Partition(
        tiles(params["names"], operands),
        tiles(params["results"], results),
        _local(primitive, blocks, {n: a.shape for n, a in given.items()}, **params),
    )


def merge_statistics(local, psum, position, size):
    """Statistics of all devices from those of each, by one psum.

    Each device writes its own into an array of zeros that has a place for every one, so that the sum is a copy: exact,
    the same whatever the order, and the same everywhere. Sums of powers of the means instead would lose the variance
    where the mean is large.
    """
    values = jnp.stack([local[n] for n in local])
    slots = jnp.zeros((size, *values.shape), values.dtype)
    slots = psum(jax.lax.dynamic_update_index_in_dim(slots, values, position, 0))
    of_devices = {n: slots[:, i] for i, n in enumerate(local)}
    counts = of_devices.get("count")
    if counts is None:
        counts = jnp.ones((size, *(1,) * (slots.ndim - 2)), slots.dtype)
    counted = counts > 0
    total = jnp.sum(counts, 0)
    # Distances from one of the means, so that equal means stay what they are.
    centre = jnp.max(jnp.where(counted, of_devices["mean"], -np.inf), 0)
    distance = jnp.where(counted, of_devices["mean"] - centre, 0)
    weight = counts / total
    shift = jnp.sum(weight * distance, 0)
    spread = jnp.where(counted, of_devices["var"] + jnp.square(distance - shift), 0)
    merged = {"mean": centre + shift, "var": jnp.sum(weight * spread, 0), "count": total}
    return {n: merged[n] for n in local}


def _local(primitive, blocks, shapes, *, names, results, **params):
    """What a device runs, if it is not the primitive itself.

    Args:
      primitive: that of the call.
      blocks: those of the arrays.
      shapes: of the whole operands, by name.
      names: of the operands.
      results: wanted.
      **params: the remaining parameters.
    """
    reduced = _reduced(len(blocks.shape), params["axes"], params["groups"])
    split, uneven = blocks.cut(reduced), blocks.uneven(reduced)
    cuts_bytes = "bits" in (*names, *results) and _bits.cuts_bytes(blocks)
    if not split and not cuts_bytes:
        return None
    shards = math.prod(blocks.count(i) for i in split)
    params["replicas"] *= shards

    def local(*operands):
        given = by_name(names, operands)
        if cuts_bytes and "bits" in given:
            given["dy"] = _bits.select_block(blocks, given.pop("bits"), given["dy"])
        wanted = tuple(r for r in results if not (cuts_bytes and r == "bits"))
        if split and primitive is stats_p:
            return _local_statistics(blocks, given, wanted, reduced, params)
        if uneven and primitive is sums_p:
            given |= {
                n: blocks.filled(given[n], shapes[n], uneven) for n in ("dy", "x") if n in given
            }
        if uneven and primitive is dx_p and "x" in given and "count" not in given:
            given |= _counted(blocks, given["x"], reduced)
        out = bind(primitive, given, wanted, params)
        if split and primitive is sums_p:
            out = dict(zip(out, blocks.psum(jnp.stack(list(out.values())), split), strict=True))
        if cuts_bytes and "bits" in results:
            out["bits"] = _bits.pack_block(blocks, out["y"] > 0)
        return [out[r] for r in results]

    return local


def _local_statistics(blocks, given, results, reduced, params):
    """Statistics of all devices."""
    inside = blocks.inside(reduced)
    if inside is not None:
        return _uneven_statistics(blocks, given, inside, results, reduced, params)
    own = ("mean", "var", "count") if "mask" in given else ("mean", "var")
    split = blocks.cut(reduced)
    shards = math.prod(blocks.count(i) for i in split)
    local, position = bind(stats_p, given, own, params), blocks.position(split)
    out = merge_statistics(local, lambda v: blocks.psum(v, split), position, shards)
    return [out[r] for r in results]


def _uneven_statistics(blocks, given, inside, results, reduced, params):
    """Statistics of devices that hold different numbers of elements, as padding is masked.

    A place for every device, as `merge_statistics` has, would be more bytes than the formula takes. The mean is found
    in two steps instead, as in the formula.
    """
    mask = given["mask"] & inside if "mask" in given else inside
    given = given | {"mask": even_mask(mask, given["x"].shape, params["axes"])}
    own = bind(stats_p, given, ("mean", "var", "count"), params)
    total = _number(math.prod(blocks.shape[i] for i in reduced), own["count"].dtype)
    if "count" in results:
        total = blocks.psum(own["count"], reduced)
    weight = own["count"] / total

    def average(*values):
        # A device without elements has NaN for statistics, and the weight 0; without elements anywhere it is NaN.
        shares = [weight * jnp.where(own["count"] > 0, v, jnp.zeros_like(v)) for v in values]
        return blocks.psum(jnp.stack(shares), reduced)

    (rough,) = average(own["mean"])
    rough = pinned(rough)
    distance = own["mean"] - rough
    rest, square = average(distance, own["var"] + jnp.square(distance))
    var = jnp.maximum(square - jnp.square(rest), np.zeros((), square.dtype))
    out = {"mean": rough + rest, "var": var, "count": total}
    return [out[r] for r in results]


def _counted(blocks, x, reduced):
    """Operands of dx that say the number of elements, where it is not the same for all devices."""
    shape = [1 if i in reduced else n for i, n in enumerate(x.shape)]
    number = math.prod(blocks.shape[i] for i in reduced)
    return {
        "mask": jnp.ones((1,) * x.ndim, bool),
        "count": jnp.full(shape, number, acc_dtype(x.dtype)),
    }


def even_mask(mask, shape, axes):
    """The mask with all or none of the features' and of the trailing dimensions, as kernels want; it has x's rank."""
    sizes = list(mask.shape)
    for dims in (axes, range(axes[-1] + 1, len(shape))):
        if any(mask.shape[i] != 1 for i in dims):
            sizes = [shape[i] if i in dims else n for i, n in enumerate(sizes)]
    return jnp.broadcast_to(mask, sizes)


# ---- what depends on what, in the linear primitives ----

# (operand that it is linear in, result) -> the fixed operands that this path takes, here or in the transpose, where
# some come in pairs, and x may be the only one that says the shape.
_JVP_IN = {
    ("x_dot", "y_dot"): ("bits", "var", "scale"),
    ("residual_dot", "y_dot"): ("bits",),
    ("x_dot", "bias_dot"): ("x", "mask", "count", "mean", "var", "scale"),
    ("x_dot", "scale_dot"): ("x", "mask", "count", "mean", "var", "scale"),
    ("x_dot", "mean_dot"): ("x", "mask", "count", "mean"),
    ("x_dot", "var_dot"): ("x", "mask", "count", "mean"),
}
_JVP_OUT = {
    ("y_dot", "y_dot"): (),
    ("bias_dot", "y_dot"): ("x", "bits"),
    ("scale_dot", "y_dot"): ("x", "bits", "mean", "var"),
}
_SUMS = {
    ("dy", "dbias"): ("x", "bits"),
    ("dy", "dscale"): ("x", "bits", "mean", "var"),
}
_DX = {
    ("dy", "dx"): ("bits", "var", "scale"),
    ("dy", "dresidual"): ("bits",),
    ("dbias", "dx"): ("x", "mask", "count", "mean", "var", "scale"),
    ("dscale", "dx"): ("x", "mask", "count", "mean", "var", "scale"),
    ("dmean", "dx"): ("x", "mask", "count", "mean"),
    ("dvar", "dx"): ("x", "mask", "count", "mean"),
}
_FIXED = ("x", "bits", "mask", "count", "mean", "var", "scale")
# Operands and results of a primitive are results and operands of its transpose.
_DUAL = {"x_dot": "dx", "residual_dot": "dresidual", "y_dot": "dy", "bias_dot": "dbias"}
_DUAL |= {"scale_dot": "dscale", "mean_dot": "dmean", "var_dot": "dvar"}
_DUAL |= {v: k for k, v in _DUAL.items()}
# Kernels take both of these or none.
_PAIRS = (("dbias", "dscale"), ("dmean", "dvar"))


def _reach(paths, linear, results):
    """(results that are not structurally zero, operands that they take) given the linear operands that are there."""
    taken = {
        path: fixed for path, fixed in paths.items() if path[0] in linear and path[1] in results
    }
    reached = tuple(r for r in results if any(path[1] == r for path in taken))
    operands = {path[0] for path in taken}.union(*taken.values())
    return reached, operands


def _linear(primitive, given, results, params):
    """Binds a linear primitive; results by name, without those that are structurally zero."""
    given = {n: v for n, v in given.items() if v is not None}
    reached, operands = _reach(_PATHS[primitive], given, results)
    if not reached:
        return {}
    given = {n: v for n, v in given.items() if n in operands}
    for pair in _PAIRS:
        present = [n for n in pair if n in given]
        if primitive is dx_p and len(present) == 1:
            given |= {n: jnp.zeros_like(given[present[0]]) for n in pair if n not in given}
    return bind(primitive, given, reached, params)


# ---- rules ----


def _stats_jvp(primals, tangents, *, names, results, **params):
    """Of the statistics on one device, in the derivative of backward."""
    given = by_name(names, primals)
    out = bind(stats_p, given, results, params)
    sums = {}
    if is_present(tangents[names.index("x")]):
        operands = only(given | out, _FIXED) | {"x_dot": tangents[names.index("x")]}
        sums = _linear(jvp_in_p, operands, ("mean_dot", "var_dot"), dict(params, replicas=1))
    return [out[r] for r in results], [_tangent(sums.get(f"{r}_dot"), out[r]) for r in results]


def _fwd_jvp(primals, tangents, *, names, results, **params):
    """By given statistics."""
    given = by_name(names, primals)
    dots = {n: t for n, t in zip(names, tangents, strict=True) if is_present(t)}
    known = given | named(forward(given, kept_results(params), params))
    terms = {}
    factor = jax.lax.rsqrt(known["var"] + np.asarray(params["epsilon"], known["var"].dtype))
    square = jnp.square(factor)
    if "scale" in known:
        factor = factor * known["scale"]
    if "mean" in dots:
        terms["bias_dot"] = -factor * dots["mean"]
    if "var" in dots:
        scale = known.get("scale", np.ones((), square.dtype))
        half = np.asarray(-0.5, square.dtype)
        terms["scale_dot"] = half * scale * square * dots["var"]
    y_dot = tangents_of(known, dots, terms, ("y_dot",), params).get("y_dot")
    out = [known[r] for r in results]
    return out, [_tangent(y_dot if r == "y" else None, known[r]) for r in results]


def kept_results(params):
    return ("y", "bits") if params["relu"] else ("y",)


def tangents_of(known, dots, terms, results, params, synchronise=lambda t: t, join=lambda t: t):
    """Those of y, and with statistics of x's own those of mean and var, by name.

    Args:
      known: operands and results of forward.
      dots: the operands' tangents.
      terms: what is part of bias_dot and scale_dot besides the tangents of bias and scale.
      results: of jvp_in.
      params: of the primitives.
      synchronise: combines the sums of devices.
      join: brings the two sums that jvp_out takes into a form whose transpose is one collective.
    """
    # Without a ReLU the residual's tangent is added as it is.
    selected = ("x", "residual") if params["relu"] else ("x",)
    operands = only(known, _FIXED) | {f"{n}_dot": dots.get(n) for n in selected}
    first = synchronise(_linear(jvp_in_p, operands, results, params))
    out = {n: first.pop(n) for n in ("mean_dot", "var_dot") if n in first}
    for more in ({f"{n}_dot": dots[n] for n in ("bias", "scale") if n in dots}, terms):
        first |= {n: add(first.get(n), t) for n, t in more.items()}
    first = join(first)
    if first.keys() - {"y_dot"}:
        first = _linear(jvp_out_p, only(known, _FIXED) | first, ("y_dot",), params)
    y_dot = first.get("y_dot")
    if not params["relu"] and "residual" in dots:
        y_dot = add(y_dot, dots["residual"])
    return out if y_dot is None else out | {"y_dot": y_dot}


def _tangent(tangent, value):
    return zero(value) if tangent is None else vary_alike(tangent, value)[0]


def named(kept):
    """For checkpoint policies: names that the user gives to results name other values."""
    return {n: v if n == "y" else checkpoint_name(v, "jaxnorm_batch_norm") for n, v in kept.items()}


def _batch(primitive, args, dims, *, names, results, axes, groups, **params):
    """Maps over one more feature dimension where the arrays are mapped beside one, else over a new group."""
    arrays = {d for n, d in zip(names, dims, strict=True) if n in _ARRAYS or n == "bits"}
    last = args[0].ndim - (dims[0] is not NOT_MAPPED)
    if params["relu"]:
        last -= 1  # bits are packed along the last dimension, which must stay
    candidates = range(axes[0], min(axes[-1] + 1, last) + 1)
    beside = len(arrays) == 1 and arrays <= {*candidates} and "mask" not in names
    at = arrays.pop() if beside else 0

    # One number per feature, of which there are more now.
    whole = [beside and name not in _ARRAYS for name in names]
    shifted = [a + (a >= at) for a in axes]
    values = primitive.bind(
        *mapped_at(at, args, dims, whole),
        names=names,
        results=results,
        axes=tuple(sorted([*shifted, at] if beside else shifted)),
        groups=groups + (not beside),
        **params,
    )
    return values, [at] * len(results)


def _linear_jvp(primitive, reference, primals, tangents, *, names, results, **params):
    """Linear in some operands, so that part is the same again; in the others the formula is differentiated."""
    given = by_name(names, primals)
    dots = {n: t for n, t in zip(names, tangents, strict=True) if is_present(t)}
    out = primitive.bind(*primals, names=names, results=results, **params)
    fixed = only(given, _FIXED)
    linear = {n: t for n, t in dots.items() if n not in _FIXED}
    linear = _linear(primitive, fixed | linear, results, params)
    nonlinear = None
    moving = [n for n in dots if n in _FIXED]
    if moving:

        def with_moving(*values):
            now = given | by_name(moving, values)
            return reference(*(now[n] for n in names), names=names, results=results, **params)

        primals, tangents = [given[n] for n in moving], [dots[n] for n in moving]
        nonlinear = jax.jvp(with_moving, primals, tangents)[1]
    return out, total_tangents(out, [linear.get(r) for r in results], nonlinear)


def _transpose(dual, cotangents, *operands, names, results, **params):
    """Binds the transpose, by the names that operands and results have there."""
    given = by_name(names, operands)
    cts = {_DUAL[r]: ct for r, ct in zip(results, cotangents, strict=True) if is_present(ct)}
    moving = [n for n in names if ad.is_undefined_primal(given[n])]
    fixed = {n: v for n, v in given.items() if n not in moving}
    # jvp_out adds this operand, which sums therefore does not return.
    passed = {"dy": cts["dy"]} if "y_dot" in moving and "dy" in cts else {}
    wanted = tuple(_DUAL[n] for n in moving if _DUAL[n] not in passed)
    bars = passed | _linear(dual, fixed | cts, wanted, params)
    out = dict.fromkeys(names)
    for name in moving:
        out[name] = sum_to(bars.get(_DUAL[name]), given[name].aval)
    return list(out.values())


def _prune(paths, used, params):
    results = tuple(r for r, u in zip(params["results"], used, strict=True) if u)
    names = params["names"]
    # Operands without a use may be those that were mapped: results would lose that dimension with them.
    operands = names if params["groups"] else _reach(paths, names, results)[1]
    taken = [n in operands for n in names]
    return dict(params, names=tuple(n for n in names if n in operands), results=results), taken


def _prune_bits(used, params):
    if not used[params["results"].index("y")]:
        return None
    return dict(params, results=("y",)), [True] * len(params["names"])


# ---- primitives ----


# Partial results of the CUDA reductions, at most: what lets 1000 blocks work on 256 channels each. A partial result is
# also never of fewer elements than this.
_MOST_PARTIALS = 2**18
_LEAST_ELEMENTS = 64


def _plan(
    operation, avals_in, avals_out, /, *, names, results, axes, groups, epsilon, replicas, relu, **_
):
    """The CUDA call of an operation; None where the kernels do not take it, as with sizes that are not known."""
    avals = dict(zip((*names, *results), (*avals_in, *avals_out), strict=True))
    shapes = {n: a.shape for n, a in avals.items()}
    full = _full(shapes)
    if not all(isinstance(n, int) for n in full):
        return None
    channels, columns = math.prod(full[a] for a in axes), math.prod(full[axes[0] :])
    # One for each channel and tile, in lines that are a multiple of 8 elements.
    partials = 8 // math.gcd(columns, 8) * (2 * channels + columns // 256) + 4096
    partials *= math.prod(full[:groups])
    partials += min(_MOST_PARTIALS, math.prod(full) // _LEAST_ELEMENTS)
    made = kernels.plan(
        operation.removeprefix("batch_norm_"),
        {n: shapes[n] for n in names},
        {n: shapes[n] for n in results},
        next(a.dtype for n, a in avals.items() if n in _ARRAYS),
        device_here(),
        axes=axes,
        groups=groups,
        epsilon=epsilon,
        replicas=replicas,
        relu=relu,
        partials=partials,
    )
    if made is None:
        return None
    scratch = [] if made.scratch is None else [(made.scratch,)]
    return Call(_launch.TARGET, made.attributes, scratch)


def _attributes(*extra):
    def attributes(*, names, results, axes, groups, epsilon, replicas, relu, **_):
        optional = {
            "epsilon": np.float64(epsilon),
            "relu": bool(relu),
            "replicas": np.int64(replicas),
        }
        return {
            "groups": np.int64(groups),
            "axis": np.int64(axes[0]),
            "end": np.int64(axes[-1] + 1),
            "operands": bits_of(names, _BITS),
            "results": bits_of(results, _BITS),
            **{n: optional[n] for n in extra},
        }

    return attributes


def _define(stem, formula, array, extra, **options):
    """A primitive with kernels, of which `array` says the shape."""

    def partition(operands, results, /, **params):
        return _partition(primitive, operands, results, **params)

    primitive = define_primitive(
        f"batch_norm_{stem}",
        abstract=_abstract,
        reference=_reference(formula),
        attributes=_attributes(*extra),
        describe=lambda _, *, op, **__: op,
        fits=partial(_fits, array),
        sharding_rule=_sharding_rule,
        partition=partition,
        plan=_plan,
        **options,
    )
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    return primitive


# On a GPU both passes are one call where nothing comes between them: one launch, if the device can hold the arrays. Of
# larger ones than any can (an H100 30 MB) they stay apart, so that XLA may put between them what frees memory: of a
# convolution's program with arrays of 411 MB it then needs one array less.
_MOST_HELD_BYTES = 2**26


def _may_be_held(*avals, **_):
    sizes = [n for a in avals for n in a.shape]
    known = all(isinstance(n, int) for n in sizes)
    return not known or sum(a.size * a.dtype.itemsize for a in avals) <= _MOST_HELD_BYTES


def _bwd_fits(*avals, names, results, **_):
    return "dx" in results and not {"mask", "dmean"} & {*names} and _may_be_held(*avals)


_TRAIN = Merge(
    first="batch_norm_stats",
    both="batch_norm_train",
    passed=("mean", "var"),
    shared=("x",),
    order=_KERNEL_NAMES,
    fits=_may_be_held,
)
_BWD = Merge(
    first="batch_norm_sums",
    both="batch_norm_bwd",
    passed=("dbias", "dscale"),
    shared=("x", "dy", "bits", "mean", "var"),
    order=_KERNEL_NAMES,
    fits=_bwd_fits,
)

stats_p = _define("stats", _stats_formula, "x", (), merged=True)
fwd_p = _define("fwd", _fwd_formula, "x", ("epsilon", "relu"), merge=_TRAIN)
sums_p = _define("sums", _sums_formula, "dy", ("epsilon",), merged=True)
dx_p = _define("dx", _dx_formula, "dy", ("epsilon", "replicas"), merge=_BWD)
jvp_in_p = define_formula(
    "batch_norm_jvp_in", abstract=_abstract, formula=_reference(_jvp_in_formula)
)
jvp_out_p = define_formula(
    "batch_norm_jvp_out", abstract=_abstract, formula=_reference(_jvp_out_formula)
)
define_dce(fwd_p, _prune_bits)

ad.primitive_jvps[stats_p] = _stats_jvp
ad.primitive_jvps[fwd_p] = _fwd_jvp

_PATHS = {jvp_in_p: _JVP_IN, jvp_out_p: _JVP_OUT, sums_p: _SUMS, dx_p: _DX}
for _primitive, _formula, _transposed in (
    (jvp_in_p, _jvp_in_formula, dx_p),
    (jvp_out_p, _jvp_out_formula, sums_p),
    (sums_p, _sums_formula, jvp_out_p),
    (dx_p, _dx_formula, jvp_in_p),
):
    ad.primitive_jvps[_primitive] = partial(_linear_jvp, _primitive, _reference(_formula))
    ad.primitive_transposes[_primitive] = partial(_transpose, _transposed)
    batching.primitive_batchers[_primitive] = partial(_batch, _primitive)
    define_dce(_primitive, partial(_prune, _PATHS[_primitive]))
