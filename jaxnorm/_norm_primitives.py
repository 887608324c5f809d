"""The primitives of layer_norm and rms_norm: one family, which differs in whether the mean is subtracted (`center`).

Notation: s = x, or x + residual rounded to x's dtype; xhat = (s - mean) * rstd along the normalised axes, with
rstd = (variance + epsilon)^-1/2 over the elements that `mask` keeps; y = xhat * (scale + scale_offset) + bias.
Three primitives:

  norm_fwd   x, [residual], [mask], [scale], [bias] -> y, [s], [mean], rstd         nonlinear
  norm_jvp   s, statistics, tangents -> tangent of y, [tangent of s]                linear in the tangents; a formula
  norm_bwd   s, dy, statistics, [ds] -> those of dx, dscale, dbias that are needed  its transpose, in one pass

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
    vary_alike,
)
from jaxnorm._primitive.calls import broadcast_fits
from jaxnorm._primitive.define import define_dce, define_formula, define_primitive
from jaxnorm._primitive.partition import broadcast_partition, broadcast_sharding_rule
from jaxnorm._primitive.rules import (
    NOT_MAPPED,
    add,
    first_mapped,
    is_present,
    mapped_at,
    sum_to,
    total_tangents,
    zero,
)
from jaxnorm._rows.named import row_plan
from jaxnorm._sharding import Along

# Names the operands that a call has, the tangents and the cotangents (ffi/cpu/norm_call.h holds the same numbers).
X, RESIDUAL, MASK, SCALE, BIAS = 1, 2, 4, 8, 16

# Positions within a row are 32-bit numbers.
_MAX_COLUMNS = 2**30


# ---- operands by name ----


def _present(names, bits):
    return [name for name, bit in names if bits & bit]


def _statistics_names(center):
    return ["mean", "rstd"] if center else ["rstd"]


def _fwd_names(operands):
    optional = (("residual", RESIDUAL), ("mask", MASK), ("scale", SCALE), ("bias", BIAS))
    return ["x", *_present(optional, operands)]


def _jvp_names(center, operands, have):
    optional = _present((("mask", MASK), ("scale", SCALE)), operands)
    tangents = _present((("x_dot", X), ("scale_dot", SCALE), ("bias_dot", BIAS)), have)
    return ["x", *_statistics_names(center), *optional, *tangents]


def _bwd_names(center, operands):
    optional = (("dsum", RESIDUAL), ("mask", MASK), ("scale", SCALE))
    return ["x", "dy", *_statistics_names(center), *_present(optional, operands)]


_PARAMETERS = ("scale", "bias", "scale_dot", "bias_dot")


def _named(names, operands):
    return dict(zip(names, operands, strict=True))


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
    *operands_,
    axes,
    groups,
    center,
    epsilon,
    scale_offset,
    operands,
    implementation=None,
    blocks=None,
):
    del groups, implementation
    given = _named(_fwd_names(operands), operands_)
    x, mask, bias = given["x"], given.get("mask"), given.get("bias")
    s = _rounded(x + given["residual"]) if operands & RESIDUAL else x
    acc = s.astype(acc_dtype(x.dtype))
    deviation, mean, rstd = _statistics(
        acc, mask, along=Along(axes, blocks), center=center, epsilon=epsilon
    )
    y = _scaled(deviation * rstd, given.get("scale"), scale_offset)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    shape = jnp.broadcast_shapes(*(a.shape for a in operands_))
    statistics = [rstd] if mean is None else [mean, rstd]
    stat_shape = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return [
        y.astype(x.dtype),
        *([jnp.broadcast_to(s, shape)] if operands & RESIDUAL else []),
        *(jnp.broadcast_to(v, stat_shape) for v in statistics),
    ]


def _parameter_gradient(v, axes, groups):
    """Sum of v over the rows of each group."""
    rows = tuple(i for i in range(groups, v.ndim) if i not in axes)
    return jnp.sum(v, rows, keepdims=True)


def _bwd_reference(
    *operands_,
    axes,
    groups,
    center,
    scale_offset,
    operands,
    need,
    parameter_dtype,
    epsilon=None,
    implementation=None,
    blocks=None,
):
    """The formula of ffi/cpu/norm_call.h.

    With w = dy * scale, keep = 1 where the mask is on and 0 elsewhere, n = sum(keep), and sums over all elements,

      dx = rstd * (w - keep * (sum(w) / n + xhat * sum(w * xhat) / n))

    since d(mean)/ds_i = keep_i / n and d(rstd)/ds_i = -rstd^2 * keep_i * xhat_i / n. Without centring sum(w) is absent.
    """
    del epsilon, implementation
    given = _named(_bwd_names(center, operands), operands_)
    dtype = acc_dtype(given["x"].dtype)
    mask, rstd = given.get("mask"), given["rstd"]
    dy = given["dy"].astype(dtype)
    xhat = _normalised(given["x"].astype(dtype), given.get("mean"), rstd)
    results = []
    if need & X:
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
        results.append(dx.astype(given["x"].dtype))
    if need & SCALE:
        results.append(_parameter_gradient(dy * xhat, axes, groups).astype(parameter_dtype))
    if need & BIAS:
        full = jnp.broadcast_to(dy, jnp.broadcast_shapes(dy.shape, xhat.shape))
        results.append(_parameter_gradient(full, axes, groups).astype(parameter_dtype))
    return results


def _jvp_reference(
    *operands_,
    axes,
    groups,
    center,
    scale_offset,
    operands,
    have,
    with_sum,
    parameter_dtype,
    epsilon=None,
    implementation=None,
):
    """The tangent of y; `with_sum`, also x_dot, so that the transpose meets both cotangents at once.

    xhat_dot = rstd * (x_dot - sum(keep * x_dot) / n - xhat * sum(keep * x_dot * xhat) / n).
    """
    del groups, parameter_dtype, epsilon, implementation
    given = _named(_jvp_names(center, operands, have), operands_)
    dtype = acc_dtype(given["x"].dtype)
    mask, rstd = given.get("mask"), given["rstd"]
    xhat = _normalised(given["x"].astype(dtype), given.get("mean"), rstd)
    terms = []
    if have & X:
        x_dot = given["x_dot"].astype(dtype)
        kept = _masked(x_dot, mask)
        average = _average(mask, Along(axes))
        if center:
            of_dot, of_product = average(kept, kept * _masked(xhat, mask))
            x_dot = x_dot - of_dot
        else:
            (of_product,) = average(kept * _masked(xhat, mask))
        terms.append(_scaled(rstd * (x_dot - xhat * of_product), given.get("scale"), scale_offset))
    if have & SCALE:
        terms.append(xhat * given["scale_dot"].astype(dtype))
    if have & BIAS:
        terms.append(given["bias_dot"].astype(dtype))
    shape = jnp.broadcast_shapes(*(a.shape for a in operands_))
    y_dot = jnp.broadcast_to(sum(terms[1:], terms[0]), shape).astype(given["x"].dtype)
    return [y_dot, given["x_dot"]] if with_sum else [y_dot]


# ---- shapes and shardings ----


def _fwd_abstract(*avals, axes, center, operands, **_):
    full = broadcast_aval(*avals)
    statistic = collapsed_aval(full, axes, acc_dtype(full.dtype))
    return [full] * (2 if operands & RESIDUAL else 1) + [statistic] * (2 if center else 1)


def _jvp_abstract(*avals, center, operands, have, with_sum, **_):
    full = broadcast_aval(*avals)
    given = _named(_jvp_names(center, operands, have), avals)
    return [full, aval_like(given["x_dot"])] if with_sum else [full]


def _bwd_abstract(*avals, axes, groups, need, parameter_dtype, **_):
    full = broadcast_aval(*avals)
    rows = [i for i in range(groups, full.ndim) if i not in axes]
    parameter = collapsed_aval(full, rows, parameter_dtype)
    return [full] * bool(need & X) + [parameter] * (bool(need & SCALE) + bool(need & BIAS))


def _describe(_, *, center, **__):
    return "layer_norm" if center else "rms_norm"


def _fits(names, *avals, axes, groups, **_):
    """Whether the kernels take the shapes: rows of a usable length, contiguous, and simple broadcasts.

    Rows of one element are elementwise arithmetic, which XLA fuses with its neighbours.
    """
    shape = jnp.broadcast_shapes(*(a.shape for a in avals))
    columns = [shape[i] for i in axes]
    if axes != tuple(range(len(shape) - len(axes), len(shape))):
        return False
    if all(isinstance(n, int) for n in columns) and not 1 < math.prod(columns) < _MAX_COLUMNS:
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


def _batch(primitive, args, dims, *, names, grouped, axes, groups, **params):
    """Maps over a row dimension, or over a new group dimension where parameters or their gradients differ."""
    if grouped:
        at = 0
    else:
        at = min(max(first_mapped(dims), groups), axes[0])
    # Kernels know parameters of all groups, or of one that all share.
    whole = [bool(grouped and groups and name in _PARAMETERS) for name in names]
    results = primitive.bind(
        *mapped_at(at, args, dims, whole),
        axes=tuple(a + 1 for a in axes),
        groups=groups + grouped,
        **params,
    )
    return results, [at] * len(results)


def _parameter_mapped(names, dims):
    return any(
        d is not NOT_MAPPED for name, d in zip(names, dims, strict=True) if name in _PARAMETERS
    )


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


norm_fwd_p = define_primitive(
    "norm_fwd",
    abstract=_fwd_abstract,
    reference=_fwd_reference,
    attributes=lambda *, axes, groups, center, epsilon, scale_offset, operands, implementation: {
        "axis": np.int64(axes[0]),
        "groups": np.int64(groups),
        "center": bool(center),
        "epsilon": np.float64(epsilon),
        "scale_offset": np.float64(scale_offset),
        "operands": np.int64(operands),
    },
    describe=_describe,
    fits=lambda *avals, operands, **params: _fits(_fwd_names(operands), *avals, **params),
    sharding_rule=broadcast_sharding_rule,
    kernel_form=_of_one_axis,
    partition=broadcast_partition(_fwd_local),
    plan=row_plan(_fwd_reference),
)


def _fwd_jvp(primals, tangents, *, operands, epsilon, center, **params):
    """Names what backward keeps: names that the user gives to results name other values.

    The statistics have no tangents here: they are functions of s, and the rules of norm_jvp and norm_bwd, which alone
    read them, differentiate them as such.
    """
    names = _fwd_names(operands)
    given, dots = _named(names, primals), _named(names, tangents)
    params |= {"epsilon": epsilon, "center": center}
    y, *rest = norm_fwd_p.bind(*primals, operands=operands, **params)
    rest = [
        checkpoint_name(r, "jaxnorm_layer_norm" if center else "jaxnorm_rms_norm") for r in rest
    ]
    s, statistics = (rest[0], rest[1:]) if operands & RESIDUAL else (given["x"], rest)
    s_dot = add(dots["x"], dots.get("residual"))
    if (
        s_dot is not None
    ):  # of one term alone, which may lack a dimension that vmap has given the other
        s_dot = jnp.broadcast_to(s_dot, s.shape)
    have = {X: s_dot, SCALE: add(dots.get("scale")), BIAS: add(dots.get("bias"))}
    y_dot, sum_dot = _tangents(
        s,
        statistics,
        given,
        have,
        parameter_dtype=_parameter_dtype(given),
        with_sum=bool(operands & RESIDUAL),
        **params,
    )
    out_dots = [y_dot, sum_dot] if operands & RESIDUAL else [y_dot]
    results = [y, *rest]
    return results, [
        zero(r) if t is None else t
        for r, t in zip(results, out_dots + [None] * len(statistics), strict=True)
    ]


def _parameter_dtype(given):
    """Name of the dtype that gradients of the parameters have."""
    return next((given[name].dtype.name for name in _PARAMETERS if name in given), None)


def _tangents(s, statistics, given, have, *, with_sum, implementation, **params):
    """(tangent of y, tangent of s) by norm_jvp; None for those that are zero.

    Args:
      s: what is normalised.
      statistics: of it.
      given: operands by name, of which mask and scale are used.
      have: tangents of X, SCALE and BIAS, None for zeros.
      with_sum: whether the tangent of s is wanted, if it is not zero.
      implementation: for the transpose.
      **params: the remaining parameters of norm_jvp.
    """
    have = {bit: t for bit, t in have.items() if t is not None}
    if not have:
        return None, None
    with_sum = with_sum and X in have
    # The scale acts on the tangent of s alone. The mask does too, but the statistics' derivatives need it.
    named = ((MASK, given.get("mask")), (SCALE, given.get("scale") if X in have else None))
    optional = {bit: value for bit, value in named if value is not None}
    y_dot, *sum_dot = norm_jvp_p.bind(
        *vary_alike(s, *statistics, *optional.values(), *have.values()),
        operands=sum(optional),
        have=sum(have),
        with_sum=with_sum,
        implementation=implementation,
        **params,
    )
    return y_dot, sum_dot[0] if with_sum else None


def _fwd_batch(args, dims, *, operands, **params):
    names = _fwd_names(operands)
    return _batch(
        norm_fwd_p,
        args,
        dims,
        names=names,
        grouped=_parameter_mapped(names, dims),
        operands=operands,
        **params,
    )


ad.primitive_jvps[norm_fwd_p] = _fwd_jvp
batching.primitive_batchers[norm_fwd_p] = _fwd_batch

# ---- norm_jvp and norm_bwd: transposes of each other ----

norm_jvp_p = define_formula("norm_jvp", abstract=_jvp_abstract, formula=_jvp_reference)


def _bwd_local(blocks, shapes, *, axes, groups, parameter_dtype, **params):
    rows = tuple(i for i in range(groups, len(blocks.shape)) if i not in axes)
    sums_rows = bool(params["need"] & (SCALE | BIAS)) and bool(blocks.cut(rows))
    if not blocks.cut(axes) and not sums_rows:
        return None

    def local(*operands):
        # Sums over the devices' rows are rounded once, so what each of them adds up stays in the arithmetic's dtype.
        exact = dict(
            params, axes=axes, groups=groups, parameter_dtype=acc_dtype(operands[0].dtype).name
        )
        if sums_rows:
            operands = [blocks.filled(a, s, rows) for a, s in zip(operands, shapes, strict=True)]
        if blocks.cut(axes):
            results = _bwd_reference(*operands, **exact, blocks=blocks)
        else:
            results = norm_bwd_p.bind(*operands, **exact)
        first = bool(params["need"] & X)
        sums = results[first:]
        if sums_rows:
            sums = blocks.psum(jnp.stack(sums), rows)
        return [*results[:first], *(s.astype(parameter_dtype) for s in sums)]

    return local


norm_bwd_p = define_primitive(
    "norm_bwd",
    abstract=_bwd_abstract,
    reference=_bwd_reference,
    attributes=lambda *, axes, groups, center, scale_offset, operands, need, **_: {
        "axis": np.int64(axes[0]),
        "groups": np.int64(groups),
        "center": bool(center),
        "scale_offset": np.float64(scale_offset),
        "operands": np.int64(operands),
        "need": np.int64(need),
    },
    describe=_describe,
    fits=lambda *avals, center, operands, **params: _fits(
        _bwd_names(center, operands), *avals, **params
    ),
    sharding_rule=broadcast_sharding_rule,
    kernel_form=_of_one_axis,
    partition=broadcast_partition(_bwd_local),
    plan=row_plan(_bwd_reference),
    in_place=lambda *, need, **_: (1, 0) if need & X else None,  # dx for dy
)


# Operands that only dx takes. So does the mask, but the statistics' derivatives need it.
_ONLY_FOR_DX = (RESIDUAL, SCALE)


def _backward(s, statistics, given, dy, dsum, need, **params):
    """Cotangents of X, SCALE and BIAS, as far as `need` asks, by norm_bwd; None for those that are zero.

    Args:
      s: what is normalised.
      statistics: of it.
      given: operands by name, of which mask and scale are used.
      dy: cotangent of y, None for zero.
      dsum: cotangent of s as a result, ditto.
      need: bits.
      **params: the remaining parameters of norm_bwd.
    """
    if dy is None:
        return {X: dsum}
    named = ((RESIDUAL, dsum), (MASK, given.get("mask")), (SCALE, given.get("scale")))
    optional = {
        bit: value
        for bit, value in named
        if value is not None and (need & X or bit not in _ONLY_FOR_DX)
    }
    results = norm_bwd_p.bind(
        *vary_alike(s, dy, *statistics, *optional.values()),
        operands=sum(optional),
        need=need,
        **params,
    )
    return dict(zip([bit for bit in (X, SCALE, BIAS) if need & bit], results, strict=True))


def _derive(formula, names, primals, tangents, params):
    """Tangents of a formula's results as s and scale move, and the statistics with s; None if they do not."""
    given, dots = _named(names, primals), _named(names, tangents)
    moving = [n for n in ("x", "scale") if is_present(dots.get(n))]
    if not moving:
        return None

    def of(*values):
        now = given | dict(zip(moving, values, strict=True))
        _, mean, rstd = _statistics(
            now["x"].astype(acc_dtype(now["x"].dtype)),
            now.get("mask"),
            along=Along(params["axes"]),
            center=params["center"],
            epsilon=params["epsilon"],
        )
        now |= {"rstd": rstd} if mean is None else {"mean": mean, "rstd": rstd}
        return formula(*(now[n] for n in names), **params)

    return jax.jvp(of, [given[n] for n in moving], [dots[n] for n in moving])[1]


def _jvp_jvp(primals, tangents, **params):
    """Linear in the tangents, so that part is the same again; nonlinear in s, where the formula is differentiated."""
    names = _jvp_names(params["center"], params["operands"], params["have"])
    given, dots = _named(names, primals), _named(names, tangents)
    results = norm_jvp_p.bind(*primals, **params)
    have = {bit: add(dots.get(n)) for bit, n in _TANGENTS}
    linear = _tangents(*_fixed(given, params), have, **_without(params, "operands", "have"))
    nonlinear = _derive(_jvp_reference, names, primals, tangents, params)
    return results, total_tangents(results, linear[: len(results)], nonlinear)


def _jvp_transpose(cotangents, *operands, **params):
    names = _jvp_names(params["center"], params["operands"], params["have"])
    given = _named(names, operands)
    moving = {
        bit: given[n] for bit, n in _TANGENTS if n in given and ad.is_undefined_primal(given[n])
    }
    dy = add(cotangents[0])
    dsum = add(*cotangents[1:]) if X in moving else None
    results = _backward(
        *_fixed(given, params),
        dy,
        dsum,
        sum(moving),
        **_without(params, "operands", "have", "with_sum"),
    )
    out = dict.fromkeys(names)
    for bit, n in _TANGENTS:
        if bit in moving:
            out[n] = sum_to(results.get(bit), moving[bit].aval)
    return list(out.values())


def _jvp_batch(args, dims, **params):
    names = _jvp_names(params["center"], params["operands"], params["have"])
    grouped = _parameter_mapped(names, dims)
    if params["with_sum"] and dims[names.index("x_dot")] is NOT_MAPPED:
        # The second result is the first tangent, and results are mapped together.
        (y_dot,), at = _batch(
            norm_jvp_p, args, dims, names=names, grouped=grouped, **params | {"with_sum": False}
        )
        return [y_dot, args[names.index("x_dot")]], [*at, NOT_MAPPED]
    return _batch(norm_jvp_p, args, dims, names=names, grouped=grouped, **params)


# Tangents of norm_jvp by what they are the tangent of.
_TANGENTS = ((X, "x_dot"), (SCALE, "scale_dot"), (BIAS, "bias_dot"))


def _fixed(given, params):
    """(s, its statistics, mask and scale by name): what both maps are nonlinear in."""
    statistics = [given[name] for name in _statistics_names(params["center"])]
    return given["x"], statistics, {n: given[n] for n in ("mask", "scale") if n in given}


def _without(params, *names):
    return {name: value for name, value in params.items() if name not in names}


def _bwd_jvp(primals, tangents, **params):
    names = _bwd_names(params["center"], params["operands"])
    given, dots = _named(names, primals), _named(names, tangents)
    results = norm_bwd_p.bind(*primals, **params)
    linear = _backward(
        *_fixed(given, params),
        add(dots["dy"]),
        add(dots.get("dsum")),
        params["need"],
        **_without(params, "operands", "need"),
    )
    linear = [linear.get(bit) for bit in (X, SCALE, BIAS) if params["need"] & bit]
    nonlinear = _derive(_bwd_reference, names, primals, tangents, params)
    return results, total_tangents(results, linear, nonlinear)


def _bwd_transpose(cotangents, *operands, **params):
    names = _bwd_names(params["center"], params["operands"])
    given = _named(names, operands)
    bits = [bit for bit in (X, SCALE, BIAS) if params["need"] & bit]
    have = {bit: add(ct) for bit, ct in zip(bits, cotangents, strict=True)}
    out = dict.fromkeys(names)
    if ad.is_undefined_primal(given["dy"]):
        ct, _ = _tangents(
            *_fixed(given, params), have, with_sum=False, **_without(params, "operands", "need")
        )
        out["dy"] = sum_to(ct, given["dy"].aval)
    if "dsum" in given and ad.is_undefined_primal(given["dsum"]):
        out["dsum"] = sum_to(have.get(X), given["dsum"].aval)
    return list(out.values())


def _bwd_batch(args, dims, *, need, **params):
    names = _bwd_names(params["center"], params["operands"])
    grouped = bool(need & (SCALE | BIAS)) or _parameter_mapped(names, dims)
    return _batch(norm_bwd_p, args, dims, names=names, grouped=grouped, need=need, **params)


def _bwd_prune(used, params):
    bits = [bit for bit in (X, SCALE, BIAS) if params["need"] & bit]
    need = sum(bit for bit, u in zip(bits, used, strict=True) if u)
    names = _bwd_names(params["center"], params["operands"])
    dropped = () if need & X else ("dsum", "scale")
    operands = params["operands"] & (-1 if need & X else ~(RESIDUAL | SCALE))
    return dict(params, need=need, operands=operands), [n not in dropped for n in names]


ad.primitive_jvps[norm_jvp_p] = _jvp_jvp
ad.primitive_transposes[norm_jvp_p] = _jvp_transpose
batching.primitive_batchers[norm_jvp_p] = _jvp_batch
ad.primitive_jvps[norm_bwd_p] = _bwd_jvp
ad.primitive_transposes[norm_bwd_p] = _bwd_transpose
batching.primitive_batchers[norm_bwd_p] = _bwd_batch
define_dce(norm_bwd_p, _bwd_prune)
