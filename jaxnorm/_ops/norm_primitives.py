"""The primitives of layer_norm and rms_norm: one family, which differs in whether the mean is subtracted (`center`).

Notation: s = x, or x + residual rounded to x's dtype; xhat = (s - mean) * rstd along the normalised axes, with
rstd = (variance + epsilon)^-1/2 over the elements that `mask` keeps; y = xhat * (scale + scale_offset) + bias.
Three primitives:

  norm_fwd   x, [residual], [mask], [scale], [bias] -> y, [sum], [mean], rstd       nonlinear; sum is s
  norm_jvp   s, statistics, tangents -> y_dot, [sum_dot]                            linear in the tangents; a formula
  norm_bwd   s, dy, statistics, [dsum] -> those of dx, dscale, dbias that are needed  its transpose, in one pass

In the last two, the operand x is s.

Operands have x's rank. The statistics have size 1 along the normalised axes, scale and bias along all others, and any
operand may have size 1 where vmap did not map it, which is how mapping over a subset of them costs nothing. The first
`groups` dimensions are those of scale and bias that vmap mapped: each group has parameters of its own.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching

from jaxnorm._primitive.arithmetic import acc_dtype, pinned
from jaxnorm._primitive.avals import (
    aval_like,
    broadcast_aval,
    collapsed_aval,
)
from jaxnorm._primitive.calls import broadcast_fits, row_fits
from jaxnorm._primitive.define import define_dce, define_formula, define_primitive
from jaxnorm._primitive.named import bind_named, bits_of, by_name, only
from jaxnorm._primitive.partition import broadcast_partition, broadcast_sharding_rule
from jaxnorm._primitive.rules import (
    NOT_MAPPED,
    add,
    first_mapped,
    is_present,
    mapped_at,
    sum_to,
    total_tangents,
)
from jaxnorm._rows.named import row_plan
from jaxnorm._sharding import Along

# Operands, in the order that calls have them.
_OPERANDS = (
    *("x", "residual", "dy", "mean", "rstd", "dsum", "mask", "scale", "bias"),
    *("x_dot", "scale_dot", "bias_dot"),
)
# Optional operands of a call, and the gradients that it gives, in attributes (ffi/cpu/norm_call.h).
_BITS = {"residual": 2, "dsum": 2, "mask": 4, "scale": 8, "bias": 16}
_GRADIENT_BITS = {"dx": 1, "dscale": 8, "dbias": 16}
_PARAMETERS = ("scale", "bias", "scale_dot", "bias_dot")
_PARAMETER_GRADIENTS = ("dscale", "dbias")
# Operands of norm_jvp are results of its transpose, norm_bwd.
_DUAL = {"x_dot": "dx", "scale_dot": "dscale", "bias_dot": "dbias"}

bind = partial(bind_named, _OPERANDS)


# ---- formulas ----


def _average(mask, along):
    """A function: the sum of all elements of a row over the number of those that count, of one array or several."""
    count = None

    def average(*values):
        nonlocal count
        if mask is None:
            return along.means(*values)
        if count is None:  # it travels with the first sums
            sizes = [values[0].shape[i] if i in along.dims else n for i, n in enumerate(mask.shape)]
            *sums, count = along.sums(
                *values, jnp.broadcast_to(mask, sizes).astype(values[0].dtype)
            )
        else:
            sums = along.sums(*values)
        return [s / count for s in sums]

    return average


def _masked(v, mask):
    # Selected, so that what masked elements hold (NaN, say) does not matter.
    return v if mask is None else jnp.where(mask, v, jnp.zeros((), v.dtype))


def _statistics(s, mask, *, along, center, epsilon):
    """(deviation of s from its mean, mean or None, rstd), of s in the arithmetic's dtype, in two passes.

    The mean of the first pass is rounded, in a sum of large numbers by several units. The second pass has the mean of
    what that leaves, so that deviations are as exact as s is: a row of one value has deviations of 0.
    """
    average = _average(mask, along)
    mean, deviation = None, s
    if center:
        rough = pinned(average(_masked(s, mask))[0])
        deviation = s - rough
        kept = _masked(deviation, mask)
        rest, square = average(kept, jnp.square(kept))
        mean, deviation = rough + rest, deviation - rest
        variance = jnp.maximum(square - jnp.square(rest), np.zeros((), s.dtype))
    else:
        (variance,) = average(jnp.square(_masked(s, mask)))
    return deviation, mean, jax.lax.rsqrt(variance + np.asarray(epsilon, s.dtype))


def _normalised(s, mean, rstd):
    return (s if mean is None else s - mean) * rstd


def _scaled(v, scale, scale_offset):
    """The product of v and the scale, both in the arithmetic's dtype."""
    if scale is None:
        return v
    return v * (scale.astype(v.dtype) + np.asarray(scale_offset, v.dtype))


def _rounded(s):
    """The same in its own precision: XLA would skip the rounding of a 16-bit sum that is converted at once."""
    info = jnp.finfo(s.dtype)
    return jax.lax.reduce_precision(s, info.nexp, info.nmant)


def _fwd_reference(
    *operands, names, results, axes, center, epsilon, scale_offset, blocks=None, **_
):
    given = by_name(names, operands)
    x, mask, bias = given["x"], given.get("mask"), given.get("bias")
    s = _rounded(x + given["residual"]) if "residual" in given else x
    acc = s.astype(acc_dtype(x.dtype))
    deviation, mean, rstd = _statistics(
        acc, mask, along=Along(axes, blocks), center=center, epsilon=epsilon
    )
    y = _scaled(deviation * rstd, given.get("scale"), scale_offset)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    shape = jnp.broadcast_shapes(*(a.shape for a in operands))
    of_row = tuple(1 if i in axes else n for i, n in enumerate(shape))
    out = {
        "y": (y.astype(x.dtype), y.shape),
        "sum": (s, shape),
        "mean": (mean, of_row),
        "rstd": (rstd, of_row),
    }
    return [jnp.broadcast_to(*out[r]) for r in results]


def _parameter_gradient(v, axes, groups):
    """Sum of v over the rows of each group."""
    rows = tuple(i for i in range(groups, v.ndim) if i not in axes)
    return jnp.sum(v, rows, keepdims=True)


def _bwd_reference(
    *operands, names, results, axes, groups, center, scale_offset, parameter_dtype, blocks=None, **_
):
    """The formula of ffi/cpu/norm_call.h.

    With w = dy * scale, keep = 1 where the mask is on and 0 elsewhere, n = sum(keep), and sums over all elements,

      dx = rstd * (w - keep * (sum(w) / n + xhat * sum(w * xhat) / n))

    since d(mean)/ds_i = keep_i / n and d(rstd)/ds_i = -rstd^2 * keep_i * xhat_i / n. Without centring sum(w) is absent.
    """
    given = by_name(names, operands)
    dtype = acc_dtype(given["x"].dtype)
    mask, rstd = given.get("mask"), given["rstd"]
    dy = given["dy"].astype(dtype)
    xhat = _normalised(given["x"].astype(dtype), given.get("mean"), rstd)
    out = {}
    if "dx" in results:
        w = _scaled(dy, given.get("scale"), scale_offset)
        average = _average(mask, Along(axes, blocks))
        if center:
            of_w, of_product = average(w, w * xhat)
            drift = of_w + xhat * of_product
        else:
            drift = xhat * average(w * xhat)[0]
        dx = rstd * (w - _masked(drift, mask))
        if "dsum" in given:
            dx = dx + given["dsum"].astype(dtype)
        out["dx"] = dx.astype(given["x"].dtype)
    if "dscale" in results:
        out["dscale"] = _parameter_gradient(dy * xhat, axes, groups).astype(parameter_dtype)
    if "dbias" in results:
        full = jnp.broadcast_to(dy, jnp.broadcast_shapes(dy.shape, xhat.shape))
        out["dbias"] = _parameter_gradient(full, axes, groups).astype(parameter_dtype)
    return [out[r] for r in results]


def _jvp_reference(*operands, names, results, axes, center, scale_offset, **_):
    """The tangent of y; as `sum_dot` also x_dot, so that the transpose meets both cotangents at once.

    xhat_dot = rstd * (x_dot - sum(keep * x_dot) / n - xhat * sum(keep * x_dot * xhat) / n).
    """
    given = by_name(names, operands)
    dtype = acc_dtype(given["x"].dtype)
    mask, rstd = given.get("mask"), given["rstd"]
    xhat = _normalised(given["x"].astype(dtype), given.get("mean"), rstd)
    terms = []
    if "x_dot" in given:
        x_dot = given["x_dot"].astype(dtype)
        kept = _masked(x_dot, mask)
        average = _average(mask, Along(axes))
        if center:
            of_dot, of_product = average(kept, kept * _masked(xhat, mask))
            x_dot = x_dot - of_dot
        else:
            (of_product,) = average(kept * _masked(xhat, mask))
        terms.append(_scaled(rstd * (x_dot - xhat * of_product), given.get("scale"), scale_offset))
    if "scale_dot" in given:
        terms.append(xhat * given["scale_dot"].astype(dtype))
    if "bias_dot" in given:
        terms.append(given["bias_dot"].astype(dtype))
    shape = jnp.broadcast_shapes(*(a.shape for a in operands))
    y_dot = jnp.broadcast_to(add(*terms), shape).astype(given["x"].dtype)
    return [y_dot if r == "y_dot" else given["x_dot"] for r in results]


# ---- shapes and shardings ----


def _abstract(*avals, names, results, axes, groups, parameter_dtype=None, **_):
    full = broadcast_aval(*avals)
    rows = [i for i in range(groups, full.ndim) if i not in axes]

    def result(name):
        if name in ("mean", "rstd"):
            return collapsed_aval(full, axes, acc_dtype(full.dtype))
        if name in _PARAMETER_GRADIENTS:
            return collapsed_aval(full, rows, parameter_dtype)
        return aval_like(by_name(names, avals)["x_dot"]) if name == "sum_dot" else full

    return [result(name) for name in results]


def _describe(_, *, center, **__):
    return "layer_norm" if center else "rms_norm"


def _fits(*avals, names, axes, groups, **_):
    """Whether the kernels take the shapes: rows of a usable length, contiguous, and simple broadcasts."""
    shape = jnp.broadcast_shapes(*(a.shape for a in avals))
    contiguous = axes == tuple(range(len(shape) - len(axes), len(shape)))
    if not contiguous or not row_fits([shape[i] for i in axes]):
        return False

    def parameter_fits(a):
        # All groups have their own, or all share one.
        own = [
            n == full for n, full in zip(a.shape[:groups], shape[:groups], strict=True) if full != 1
        ]
        return all(own) or not any(own)

    def along_axes(a):
        return [n == full for n, full in zip(a.shape, shape, strict=True)][axes[0] :]

    for name, a in zip(names, avals, strict=True):
        if name in _PARAMETERS:
            if not parameter_fits(a):
                return False
        elif not broadcast_fits(a.shape, shape, axes) or len(set(along_axes(a))) > 1:
            return False
    return True


def _batch(primitive, args, dims, *, names, results, axes, groups, **params):
    """Maps over a row dimension, or over a new group dimension where parameters or their gradients differ."""
    mapped = [name for name, d in zip(names, dims, strict=True) if d is not NOT_MAPPED]
    if "sum_dot" in results and "x_dot" not in mapped:  # sum_dot is x_dot
        params |= {"names": names, "results": ("y_dot",), "axes": axes, "groups": groups}
        (y_dot,), at = _batch(primitive, args, dims, **params)
        return [y_dot, args[names.index("x_dot")]], [*at, NOT_MAPPED]
    grouped = bool({*_PARAMETERS} & {*mapped} or {*_PARAMETER_GRADIENTS} & {*results})
    at = 0 if grouped else min(max(first_mapped(dims), groups), axes[0])
    # Kernels know parameters of all groups, or of one that all share.
    whole = [bool(grouped and groups and name in _PARAMETERS) for name in names]
    values = primitive.bind(
        *mapped_at(at, args, dims, whole),
        names=names,
        results=results,
        axes=tuple(a + 1 for a in axes),
        groups=groups + grouped,
        **params,
    )
    return values, [at] * len(results)


# ---- norm_fwd ----


def _fwd_local(blocks, _, *, axes, **params):
    # Only a sharded row needs more: all-reduces of its count and mean, then of its mean squared deviation.
    return partial(_fwd_reference, **params, axes=axes, blocks=blocks) if blocks.cut(axes) else None


def _of_one_axis(bind, *, axes, **params):
    """The same as a call whose rows are one axis; None if it is that."""
    if len(axes) == 1:
        return None

    def call(*operands):
        first, sizes = axes[0], jnp.broadcast_shapes(*(a.shape for a in operands))[axes[0] :]

        def merged(a):
            return a.reshape(*a.shape[:first], math.prod(a.shape[first:]))

        results = bind(*map(merged, operands), axes=(first,), **params)
        return [
            y.reshape(*y.shape[:first], *(sizes if y.shape[first] > 1 else (1 for _ in sizes)))
            for y in results
        ]

    return call


def _attributes(*, names, axes, groups, center, scale_offset, **_):
    return {
        "axis": np.int64(axes[0]),
        "groups": np.int64(groups),
        "center": bool(center),
        "scale_offset": np.float64(scale_offset),
        "operands": bits_of(names, _BITS),
    }


norm_fwd_p = define_primitive(
    "norm_fwd",
    abstract=_abstract,
    reference=_fwd_reference,
    attributes=lambda *, epsilon, **params: {
        **_attributes(**params),
        "epsilon": np.float64(epsilon),
    },
    describe=_describe,
    fits=_fits,
    sharding_rule=broadcast_sharding_rule,
    kernel_form=_of_one_axis,
    partition=broadcast_partition(_fwd_local),
    plan=row_plan(_fwd_reference),
)


def fwd_results(names, center):
    """Results of norm_fwd for these operands."""
    of_sum = ("sum",) if "residual" in names else ()
    statistics = ("mean", "rstd") if center else ("rstd",)
    return ("y", *of_sum, *statistics)


def _fwd_jvp(primals, tangents, *, names, results, **params):
    """Names what backward keeps: names that the user gives to results name other values.

    The statistics have no tangents here: they are functions of s, and the rules of norm_jvp and norm_bwd, which alone
    read them, differentiate them as such.
    """
    given, dots = by_name(names, primals), by_name(names, tangents)
    out = bind(norm_fwd_p, given, results, params)
    kept = "jaxnorm_layer_norm" if params["center"] else "jaxnorm_rms_norm"
    out = {n: v if n == "y" else checkpoint_name(v, kept) for n, v in out.items()}
    s = out.get("sum", given["x"])
    x_dot = add(dots["x"], dots.get("residual"))
    if x_dot is not None:  # of one term alone, it may lack a dimension that vmap gave the other
        x_dot = jnp.broadcast_to(x_dot, s.shape)
    found = _tangents(
        given | out | {"x": s},
        {"x_dot": x_dot, "scale_dot": dots.get("scale"), "bias_dot": dots.get("bias")},
        ("y_dot", "sum_dot") if "sum" in results else ("y_dot",),
        params | {"parameter_dtype": _parameter_dtype(given)},
    )
    values = [out[r] for r in results]
    return values, total_tangents(values, [found.get(f"{r}_dot") for r in results])


def _parameter_dtype(given):
    """Name of the dtype that gradients of the parameters have."""
    return next((given[name].dtype.name for name in _PARAMETERS if name in given), None)


# What both linear maps are nonlinear in: s, as x, and its statistics; the mask too, as their derivatives need it.
_FIXED = ("x", "mean", "rstd", "mask")


def _tangents(known, moving, results, params):
    """Results of norm_jvp by name, without those that are zero.

    Args:
      known: operands by name, of which s, as x, its statistics, mask and scale are used.
      moving: tangents by name, which may be zeros.
      results: wanted, if they are not zero.
      params: the remaining parameters.
    """
    moving = {n: t for n, t in moving.items() if is_present(t)}
    if not moving:
        return {}
    fixed = _FIXED
    if "x_dot" in moving:  # the scale acts on that tangent alone
        fixed = (*fixed, "scale")
    else:
        results = tuple(r for r in results if r != "sum_dot")
    return bind(norm_jvp_p, only(known, fixed) | moving, results, params)


ad.primitive_jvps[norm_fwd_p] = _fwd_jvp
batching.primitive_batchers[norm_fwd_p] = partial(_batch, norm_fwd_p)

# ---- norm_jvp and norm_bwd: transposes of each other ----

norm_jvp_p = define_formula("norm_jvp", abstract=_abstract, formula=_jvp_reference)


def _bwd_local(blocks, shapes, *, results, axes, groups, parameter_dtype, **params):
    rows = tuple(i for i in range(groups, len(blocks.shape)) if i not in axes)
    sums_rows = bool({*_PARAMETER_GRADIENTS} & {*results}) and bool(blocks.cut(rows))
    if not blocks.cut(axes) and not sums_rows:
        return None

    def local(*operands):
        # Sums over the devices' rows are rounded once, so what each of them adds up stays in the arithmetic's dtype.
        exact = params | {
            "results": results,
            "axes": axes,
            "groups": groups,
            "parameter_dtype": acc_dtype(operands[0].dtype).name,
        }
        if sums_rows:
            operands = [blocks.filled(a, s, rows) for a, s in zip(operands, shapes, strict=True)]
        if blocks.cut(axes):
            values = _bwd_reference(*operands, **exact, blocks=blocks)
        else:
            values = norm_bwd_p.bind(*operands, **exact)
        first = "dx" in results
        sums = values[first:]
        if sums_rows:
            sums = blocks.psum(jnp.stack(sums), rows)
        return [*values[:first], *(s.astype(parameter_dtype) for s in sums)]

    return local


norm_bwd_p = define_primitive(
    "norm_bwd",
    abstract=_abstract,
    reference=_bwd_reference,
    attributes=lambda *, results, **params: {
        **_attributes(**params),
        "need": bits_of(results, _GRADIENT_BITS),
    },
    describe=_describe,
    fits=_fits,
    sharding_rule=broadcast_sharding_rule,
    kernel_form=_of_one_axis,
    partition=broadcast_partition(_bwd_local),
    plan=row_plan(_bwd_reference),
    in_place=lambda *, results, **_: (1, 0) if "dx" in results else None,  # dx for dy
)


# Operands that only dx takes.
_ONLY_FOR_DX = ("dsum", "scale")


def _backward(known, dy, dsum, results, params):
    """Results of norm_bwd by name, without those that are zero.

    Args:
      known: operands by name, of which s, as x, its statistics, mask and scale are used.
      dy: cotangent of y, which may be zero.
      dsum: cotangent of s as a result, ditto.
      results: wanted, if they are not zero.
      params: the remaining parameters.
    """
    if not is_present(dy):
        return {"dx": dsum}
    operands = only(known, (*_FIXED, "scale")) | {"dy": dy, "dsum": dsum}
    if "dx" not in results:
        operands = {n: v for n, v in operands.items() if n not in _ONLY_FOR_DX}
    return bind(norm_bwd_p, operands, results, params)


def _derive(formula, names, primals, tangents, params):
    """Tangents of a formula's results as s and scale move, and the statistics with s; None if they do not."""
    given, dots = by_name(names, primals), by_name(names, tangents)
    moving = [n for n in ("x", "scale") if is_present(dots.get(n))]
    if not moving:
        return None

    def with_moving(*values):
        now = given | dict(zip(moving, values, strict=True))
        _, mean, rstd = _statistics(
            now["x"].astype(acc_dtype(now["x"].dtype)),
            now.get("mask"),
            along=Along(params["axes"]),
            center=params["center"],
            epsilon=params["epsilon"],
        )
        now |= {"rstd": rstd} if mean is None else {"mean": mean, "rstd": rstd}
        return formula(*(now[n] for n in names), names=names, **params)

    return jax.jvp(with_moving, [given[n] for n in moving], [dots[n] for n in moving])[1]


def _jvp_jvp(primals, tangents, *, names, results, **params):
    """Linear in the tangents, so that part is the same again; nonlinear in s, where the formula is differentiated."""
    given, dots = by_name(names, primals), by_name(names, tangents)
    out = norm_jvp_p.bind(*primals, names=names, results=results, **params)
    linear = _tangents(given, only(dots, _DUAL), results, params)
    nonlinear = _derive(_jvp_reference, names, primals, tangents, params | {"results": results})
    return out, total_tangents(out, [linear.get(r) for r in results], nonlinear)


def _jvp_transpose(cotangents, *operands, names, results, **params):
    given, cts = by_name(names, operands), by_name(results, cotangents)
    moving = [n for n in names if ad.is_undefined_primal(given[n])]
    dsum = cts.get("sum_dot") if "x_dot" in moving else None
    wanted = tuple(_DUAL[n] for n in moving)
    found = _backward(given, cts["y_dot"], dsum, wanted, params)
    return [sum_to(found.get(_DUAL[n]), given[n].aval) if n in moving else None for n in names]


def _bwd_jvp(primals, tangents, *, names, results, **params):
    given, dots = by_name(names, primals), by_name(names, tangents)
    out = norm_bwd_p.bind(*primals, names=names, results=results, **params)
    linear = _backward(given, dots["dy"], dots.get("dsum"), results, params)
    nonlinear = _derive(_bwd_reference, names, primals, tangents, params | {"results": results})
    return out, total_tangents(out, [linear.get(r) for r in results], nonlinear)


def _bwd_transpose(cotangents, *operands, names, results, **params):
    given, cts = by_name(names, operands), by_name(results, cotangents)
    moving = [n for n in names if ad.is_undefined_primal(given[n])]
    found = {"dsum": cts.get("dx")}
    if "dy" in moving:
        dots = {n: cts.get(dual) for n, dual in _DUAL.items()}
        found["dy"] = _tangents(given, dots, ("y_dot",), params).get("y_dot")
    return [sum_to(found[n], given[n].aval) if n in moving else None for n in names]


def _bwd_prune(used, params):
    results = tuple(r for r, u in zip(params["results"], used, strict=True) if u)
    dropped = () if "dx" in results else _ONLY_FOR_DX
    names = tuple(n for n in params["names"] if n not in dropped)
    return params | {"names": names, "results": results}, [n in names for n in params["names"]]


ad.primitive_jvps[norm_jvp_p] = _jvp_jvp
ad.primitive_transposes[norm_jvp_p] = _jvp_transpose
batching.primitive_batchers[norm_jvp_p] = partial(_batch, norm_jvp_p)
ad.primitive_jvps[norm_bwd_p] = _bwd_jvp
ad.primitive_transposes[norm_bwd_p] = _bwd_transpose
batching.primitive_batchers[norm_bwd_p] = partial(_batch, norm_bwd_p)
define_dce(norm_bwd_p, _bwd_prune)
