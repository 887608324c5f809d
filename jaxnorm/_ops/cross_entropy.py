"""softmax_cross_entropy with integer labels.

Notation: x are the logits, p = softmax(x) over the classes that `where` keeps, n their number, and the target
distribution is q = (1 - smoothing) * onehot(label) + smoothing / n. Three primitives, none of which forms p in memory:

  cross_entropy_fwd   x, labels, [where] -> nll = logsumexp(x) - sum(q * x), lse = logsumexp(x)     nonlinear
  cross_entropy_jvp   x, lse, labels, x', [where] -> sum(p * x'), sum(q * x')     linear in x'; a formula
  cross_entropy_bwd   x, lse, labels, a, b, [where] -> a * p - b * q              linear in (a, b); its transpose

so that lse' = sum(p * x'), nll' = lse' - sum(q * x'), and z_loss * lse^2 is arithmetic on numbers per row. p is
exp(x - lse): the derivative keeps x and lse, whose tangent is a true one. The CUDA kernel of cross_entropy_bwd has the
row on chip and computes lse again: a gradient whose loss is not used is one call, which reads x once.

Operands have x's rank. labels, a, b and the results that are numbers per row have size 1 along `axis`, and any operand
may have size 1 where vmap did not map it. Labels are int32; rows whose label is not a class have a NaN for nll, and
count as constant for every derivative.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching
from jax.typing import ArrayLike

from jaxnorm import _check
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.patterns import cross_entropy as pattern
from jaxnorm._axes import merge_axes
from jaxnorm._ops import class_rows
from jaxnorm._ops.record import Operation, Sizes, parameter_dtype
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.avals import broadcast_aval, collapsed_aval, vary_alike
from jaxnorm._primitive.calls import broadcast_fits, row_fits
from jaxnorm._primitive.define import define_formula, define_primitive
from jaxnorm._primitive.partition import broadcast_partition, broadcast_sharding_rule
from jaxnorm._primitive.rules import (
    first_mapped,
    is_present,
    mapped_at,
    sum_to,
    total_tangents,
    zero,
)
from jaxnorm._rows.named import row_plan, row_program

# The CPU kernels' vectors go across rows where the axis is not the last; for fewer the plain formula takes less time.
_MIN_ROWS_SIDE_BY_SIDE = 32


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    implementation: str | None = None,
) -> jax.Array:
    r"""Cross-entropy of softmax(logits) along `axis` against integer labels, without the probabilities in memory.

    .. math::
      L = \mathrm{lse} - (1 - \epsilon)\, x_{\mathrm{label}} - \frac{\epsilon}{n} \sum_j x_j + \zeta\, \mathrm{lse}^2,
      \qquad \mathrm{lse} = \log \sum_j \exp(x_j)

    over the n classes that `where` keeps, with :math:`\epsilon` = label_smoothing and :math:`\zeta` = z_loss.

    Replaces `optax.softmax_cross_entropy_with_integer_labels`. Arithmetic is in float32 (float64 for float64). Backward
    keeps the logits, the labels and one number per row, from which it computes the probabilities again: they are
    relatively accurate to a rounding unit times the size of lse.

    A label outside of [0, classes), a negative one too, makes its loss NaN and its row's gradient 0, so that
    `jnp.where(labels < 0, 0, loss)` ignores examples. NaN, or +inf, in a row makes its loss and gradient NaN, and no
    other; so do logits of -inf only. A label whose logit is -inf, or which `where` masks, has the loss +inf. What is in
    masked logits is never looked at, and their gradients are exactly 0; a row without any unmasked class has the loss
    NaN. Without rows the result is empty.

    Args:
      logits: array of any rank >= 1; float16, bfloat16, float32 or float64.
      labels: integers, of the shape of logits without `axis`.
      axis: axis of the classes, or a tuple of axes. Labels then count along all of them, the last one fastest, as
        `jnp.ravel_multi_index` does.
      where: boolean array of logits' rank that broadcasts to logits; which classes take part.
      label_smoothing: Python number from 0 to 1, the part of the target that all classes share.
      z_loss: Python number, the weight of lse squared.
      implementation: None picks the kernel where there is one, else XLA; "kernel" insists; "xla" is the plain formula.

    Returns:
      Loss per example: array of labels' shape, float32 (float64 for float64).

    Raises:
      TypeError: a dtype is not supported, labels are not integers, or `where` is not boolean.
      ValueError: an axis that logits does not have, a shape that does not fit, label_smoothing outside of [0, 1], or
        "kernel" where there is none.

    >>> import jax.numpy as jnp, jaxnorm
    >>> jaxnorm.softmax_cross_entropy(jnp.zeros((2, 4)), jnp.array([3, 0])).round(4)
    Array([1.3863, 1.3863], dtype=float32)
    """
    op = "softmax_cross_entropy"
    _check.implementation(op, implementation)
    x = _check.float_array(op, "logits", logits)
    if x.ndim == 0:
        raise ValueError(
            f"{op}: logits must have at least one dimension, got a scalar. Use logits[None] for one class."
        )
    axes = _class_axes(op, axis, x.ndim)
    rows = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    targets = labels_of(op, labels, rows, "logits without the axis of classes")
    smoothing = smoothing_of(op, label_smoothing)
    weight = _check.number(op, "z_loss", z_loss)
    mask = []
    if where is not None:
        mask = [_class_mask(op, where, x)]
    (x, *mask), axis, _ = merge_axes([x, *mask], axes)
    loss, lse = cross_entropy_fwd_p.bind(
        *vary_alike(x, jnp.expand_dims(targets, axis), *mask),
        axis=axis,
        smoothing=smoothing,
        implementation=implementation,
    )
    if weight:
        # Not lse**2, whose derivative would keep 2 * lse next to lse.
        loss = loss + lse * lse * np.asarray(weight, lse.dtype)
    return jnp.squeeze(loss, axis)


def _class_axes(op, axis, ndim) -> tuple[int, ...]:
    """The axes of the classes, in the order in which the labels count along them."""
    entries = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not entries or not all(hasattr(a, "__index__") for a in entries):
        raise TypeError(
            f"{op}: axis must be an int or a tuple of ints, got {axis!r}. Pass axis=-1 for the last axis."
        )
    _check.axes(op, axis, ndim)
    return tuple(a.__index__() % ndim for a in entries)


def _class_mask(op, where, x) -> jax.Array:
    keep = _check.bool_array(op, "where", where)
    if keep.ndim != x.ndim:
        # NumPy would broadcast it to the classes, optax to the rows.
        raise ValueError(
            f"{op}: where must have as many dimensions as logits of shape {x.shape}, got {keep.shape}. "
            "To mask classes, insert axes for the rows: where[None, :]. To leave out rows, select their losses: "
            "jnp.where(rows, loss, 0)."
        )
    _check.broadcastable(op, "where", keep.shape, x.shape)
    return keep


def smoothing_of(op, label_smoothing) -> float:
    """`label_smoothing` as a number from 0 to 1."""
    smoothing = _check.number(op, "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(
            f"{op}: label_smoothing must lie in [0, 1], got {label_smoothing!r}. Use 0.0 for none."
        )
    return smoothing


def labels_of(op, labels, rows, where) -> jax.Array:
    """`labels` as int32, in which what does not fit is -1; `rows` is the shape that they must have, that of `where`."""
    dtype = getattr(labels, "dtype", None)
    if dtype is None:
        dtype = np.asarray(labels).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{op}: labels must be integers, got {dtype}. Convert class numbers with labels.astype(jnp.int32), one-hot "
            "labels with jnp.argmax(labels, axis)."
        )
    # NumPy's are checked by NumPy: without x64, JAX would cut 64 bits to 32.
    xp = jnp if isinstance(labels, jax.Array) else np
    labels = xp.asarray(labels)
    if labels.shape != rows:
        raise ValueError(
            f"{op}: labels must have the shape {rows} of {where}, got {labels.shape}. "
            "Reshape or broadcast them."
        )
    if jnp.iinfo(labels.dtype).max > jnp.iinfo(jnp.int32).max:
        outside = (labels < 0) | (labels > np.asarray(2**31 - 1, labels.dtype))
        labels = xp.where(outside, np.asarray(-1, np.int32), labels.astype(np.int32))
    return jnp.asarray(labels, np.int32)


# ---- formulas ----


def _part(x, labels, where, axis) -> class_rows.Part:
    return class_rows.Part.make(
        x.astype(acc_dtype(x.dtype)), labels, where[0] if where else None, axis
    )


def _count(part, classes):
    """The number of classes that the mask keeps."""
    return part.count() if part.mask is not None else jnp.asarray(classes, part.logits.dtype)


def _losses(numbers, labels, classes, smoothing):
    """(nll, lse)."""
    n = numbers.get("count", classes)
    nll = class_rows.negative_log_likelihood(numbers, smoothing, n)
    nll = jnp.where(class_rows.is_class(labels, classes), nll, np.asarray(np.nan, nll.dtype))
    return [nll, jnp.broadcast_to(class_rows.log_sum_exp(numbers), nll.shape)]


def _fwd_reference(x, labels, *where, axis, smoothing, implementation=None):
    """(nll, lse). Sums are of differences from the maximum, so that a common offset of a row does no harm to nll."""
    del implementation
    spread = bool(smoothing)
    numbers = _part(x, labels, where, axis).numbers(spread=spread, counted=spread and bool(where))
    return _losses(numbers, labels, x.shape[axis], smoothing)


def _fwd_on_part(x, labels, *where, axis, smoothing, implementation=None, blocks):
    """The same on a device that has a part of the classes."""
    del implementation
    own = class_rows.own_labels(labels, blocks, axis)
    mask = class_rows.own_mask(where[0] if where else None, blocks, axis)
    numbers = class_rows.numbers_on_devices(
        lambda x, labels, *mask: _part(x, labels, mask, axis),
        (x, own, *mask),
        own,
        blocks,
        axis,
        spread=bool(smoothing),
    )
    return _losses(numbers, labels, blocks.shape[axis], smoothing)


def _jvp_reference(x, lse, labels, x_dot, *where, axis, smoothing, implementation=None):
    """(sum(p * x_dot), sum(q * x_dot))."""
    del implementation
    part = _part(x, labels, where, axis)
    t = part.kept(x_dot.astype(part.logits.dtype))
    p = part.kept(jnp.exp(part.logits - lse))
    q = part.target(smoothing, _count(part, x.shape[axis]) if smoothing else None)
    sums = [jnp.sum(terms, axis, keepdims=True) for terms in (p * t, q * t)]
    valid = class_rows.is_class(labels, x.shape[axis])
    return [jnp.where(valid, s, jnp.zeros((), s.dtype)) for s in sums]


def _gradient(part, p, valid, count, a, b, smoothing, dtype):
    out = a * p - b * part.target(smoothing, count)
    return jnp.where(valid, part.kept(out), np.zeros((), out.dtype)).astype(dtype)


def _bwd_reference(x, lse, labels, a, b, *where, axis, smoothing, implementation=None):
    """The formula of ffi/cpu/cross_entropy_call.h."""
    del implementation
    part, classes = _part(x, labels, where, axis), x.shape[axis]
    p = jnp.exp(part.logits - lse)
    count = _count(part, classes) if smoothing else None
    return [
        _gradient(part, p, class_rows.is_class(labels, classes), count, a, b, smoothing, x.dtype)
    ]


def _bwd_on_part(x, lse, labels, a, b, *where, axis, smoothing, implementation=None, blocks):
    """The same on a device that has a part of the classes: elementwise, by one kernel."""
    del implementation
    classes = blocks.shape[axis]
    mask = class_rows.own_mask(where[0] if where else None, blocks, axis)
    valid, count = class_rows.is_class(labels, classes), []
    if smoothing and where:
        part = _part(x, labels, mask, axis)
        count = [blocks.psum(part.count(), (axis,))]

    def formula(x, lse, labels, valid, a, b, *rest):
        part = _part(x, labels, rest[len(count) :], axis)
        n = rest[0] if count else np.asarray(classes, lse.dtype)
        return [_gradient(part, jnp.exp(part.logits - lse), valid, n, a, b, smoothing, x.dtype)]

    own = class_rows.own_labels(labels, blocks, axis)
    return row_program(formula)(x, lse, own, valid, a, b, *count, *mask)


# ---- shapes and shardings ----


def _per_row(*avals, axis, **_):
    """The abstract values of two numbers per row."""
    full = broadcast_aval(*avals)
    row = collapsed_aval(full, (axis,), acc_dtype(full.dtype))
    return [row, row]


def _describe(_, **__):
    return "softmax_cross_entropy"


def _fits(*avals, axis, platform, **_):
    """Whether the kernels take the shapes: rows of a usable length, simple broadcasts."""
    shape = jnp.broadcast_shapes(*(a.shape for a in avals))
    if platform == "cpu" and axis != len(shape) - 1 and not _fits_side_by_side(shape, axis, *avals):
        return False
    simple = all(broadcast_fits(a.shape, shape, (axis,)) for a in avals)
    return simple and row_fits([shape[axis]])


def _fits_side_by_side(shape, axis, x, *rest):
    """Whether the CPU kernels take an axis that is not the last: whole logits without `where`, a vector of rows."""
    inner = shape[axis + 1 :]
    return (
        x.shape == shape
        and not any(a.dtype == bool for a in rest)
        and all(isinstance(n, int) for n in inner)
        and math.prod(inner) >= _MIN_ROWS_SIDE_BY_SIDE
    )


def _local(on_part, blocks, _, *, axis, **params):
    """What a device runs: a sharded axis takes all-reduces of a few numbers per row."""
    return partial(on_part, **params, axis=axis, blocks=blocks) if blocks.cut((axis,)) else None


def _batch(primitive, args, dims, *, axis, **params):
    """Maps over dimension `at` of the results; operands that are not mapped get size 1 there."""
    at = first_mapped(dims)
    results = primitive.bind(*mapped_at(at, args, dims), axis=axis + (at <= axis), **params)
    return results, [at] * len(results)


# ---- the primitives ----


def _attributes(*, axis, smoothing, implementation):
    del implementation
    return {"axis": np.int64(axis), "smoothing": np.float64(smoothing)}


def _define(name, abstract, reference, on_part, plan):
    return define_primitive(
        name,
        abstract=abstract,
        reference=reference,
        attributes=_attributes,
        describe=_describe,
        fits=_fits,
        sharding_rule=broadcast_sharding_rule,
        partition=broadcast_partition(partial(_local, on_part)),
        plan=plan,
    )


def _bwd_alone(x, labels, a, b, *where, axis, smoothing, implementation=None):
    """The gradient from the logits alone: another sum of exponentials costs less than a call that keeps lse.

    Without lse, in which a huge maximum leaves nothing of the logarithm, probabilities are exact for any logits.
    """
    del implementation
    part, classes = _part(x, labels, where, axis), x.shape[axis]
    z = part.logits
    m = jnp.max(z, axis, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(z - jnp.where(m == -jnp.inf, np.zeros((), z.dtype), m))
    p = e / jnp.sum(e, axis, keepdims=True)
    count = _count(part, classes) if smoothing else None
    return [
        _gradient(part, p, class_rows.is_class(labels, classes), count, a, b, smoothing, x.dtype)
    ]


cross_entropy_fwd_p = _define(
    "cross_entropy_fwd", _per_row, _fwd_reference, _fwd_on_part, row_plan(_fwd_reference)
)
cross_entropy_bwd_p = _define(
    "cross_entropy_bwd",
    lambda *avals, **_: [broadcast_aval(*avals)],
    _bwd_reference,
    _bwd_on_part,
    row_plan(_bwd_alone, skipped=(1,)),
)
cross_entropy_jvp_p = define_formula("cross_entropy_jvp", abstract=_per_row, formula=_jvp_reference)


def _fwd_jvp(primals, tangents, **params):
    """Names what backward keeps: names that the user gives to the result name another value."""
    x, labels, *where = primals
    nll, lse = cross_entropy_fwd_p.bind(*primals, **params)
    lse = checkpoint_name(lse, "jaxnorm_softmax_cross_entropy")
    if not is_present(tangents[0]):
        return [nll, lse], [zero(nll), zero(lse)]
    of_p, of_q = cross_entropy_jvp_p.bind(
        *vary_alike(x, lse, labels, tangents[0], *where), **params
    )
    return [nll, lse], [of_p - of_q, of_p]


def _derive(formula, primals, tangents, params):
    """Tangents of a formula's results as its logits and lse move; None if they do not."""
    moving = [i for i in (0, 1) if is_present(tangents[i])]
    if not moving:
        return None

    def with_moving(*values):
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return formula(*operands, **params)

    return jax.jvp(with_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def _jvp_jvp(primals, tangents, **params):
    """Linear in the tangent, so that part is the same again; elsewhere the formula is differentiated."""
    x, lse, labels, _, *where = primals
    results = cross_entropy_jvp_p.bind(*primals, **params)
    terms = [_derive(_jvp_reference, primals, tangents, params)]
    if is_present(tangents[3]):
        operands = vary_alike(x, lse, labels, tangents[3], *where)
        terms.append(cross_entropy_jvp_p.bind(*operands, **params))
    return results, total_tangents(results, *terms)


def _bwd_jvp(primals, tangents, **params):
    x, lse, labels, a, b, *where = primals
    results = cross_entropy_bwd_p.bind(*primals, **params)
    terms = [_derive(_bwd_reference, primals, tangents, params)]
    if is_present(tangents[3]) or is_present(tangents[4]):
        a_dot, b_dot = (
            t if is_present(t) else jnp.zeros_like(v)
            for t, v in zip(tangents[3:5], (a, b), strict=True)
        )
        operands = vary_alike(x, lse, labels, a_dot, b_dot, *where)
        terms.append(cross_entropy_bwd_p.bind(*operands, **params))
    return results, total_tangents(results, *terms)


def _jvp_transpose(cotangents, x, lse, labels, x_dot, *where, **params):
    if not any(map(is_present, cotangents)):
        return [None, None, None, ad.Zero(x_dot.aval), *(None for _ in where)]
    of_p, of_q = (
        ct if is_present(ct) else jnp.zeros(ct.aval.shape, ct.aval.dtype) for ct in cotangents
    )
    operands = vary_alike(x, lse, labels, of_p, -of_q, *where)
    (x_bar,) = cross_entropy_bwd_p.bind(*operands, **params)
    return [None, None, None, sum_to(x_bar, x_dot.aval), *(None for _ in where)]


def _bwd_transpose(cotangents, x, lse, labels, a, b, *where, **params):
    (ct,) = cotangents
    a_bar = b_bar = None
    if is_present(ct):
        a_bar, of_q = cross_entropy_jvp_p.bind(*vary_alike(x, lse, labels, ct, *where), **params)
        b_bar = -of_q
    bars = [
        sum_to(bar, v.aval) if ad.is_undefined_primal(v) else None
        for v, bar in ((a, a_bar), (b, b_bar))
    ]
    return [None, None, None, *bars, *(None for _ in where)]


ad.primitive_jvps[cross_entropy_fwd_p] = _fwd_jvp
ad.primitive_jvps[cross_entropy_jvp_p] = _jvp_jvp
ad.primitive_jvps[cross_entropy_bwd_p] = _bwd_jvp
ad.primitive_transposes[cross_entropy_jvp_p] = _jvp_transpose
ad.primitive_transposes[cross_entropy_bwd_p] = _bwd_transpose
for _primitive in (cross_entropy_fwd_p, cross_entropy_jvp_p, cross_entropy_bwd_p):
    batching.primitive_batchers[_primitive] = partial(_batch, _primitive)


# ---- the record ----


def _xla(x, labels, axis=-1):
    """As `optax.softmax_cross_entropy_with_integer_labels` computes it, in x's dtype."""
    picked = jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis).squeeze(axis)
    loss = jax.nn.logsumexp(x, axis) - picked
    return loss.astype(parameter_dtype(x.dtype.name))


def _plain_labels(shape) -> np.ndarray:
    """Of plain calls."""
    return (np.arange(math.prod(shape[:-1]), dtype=np.int32) * 7 % shape[-1]).reshape(shape[:-1])


def _plain(function):
    return lambda x, **options: function(x, _plain_labels(x.shape), **options)[..., None]


def _reference(dy, x, *, where, tiny, **_):
    z = np.where(where, x, -np.inf)
    hit = np.arange(x.shape[-1]) == _plain_labels(x.shape)[..., None]
    top = z.max(-1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    picked = np.where(hit, z, 0).sum(-1, keepdims=True)
    p = np.exp(z - lse)
    dx = np.where(where, dy * (p - hit), 0)
    # A rounding of lse is a relative error of p.
    dx_size = np.abs(dy) * (p * (1 + np.abs(lse)) + hit)
    return (lse - picked, np.abs(lse) + np.abs(top), tiny), (dx, dx_size, tiny)


def _bytes(sizes: Sizes, direction: str) -> int:
    """Forward reads logits and labels and writes a loss for each label; backward reads them and dy and writes dx."""
    labels, losses = 4 * sizes.rows, sizes.number * sizes.rows
    backward = 2 * sizes.array + labels + losses
    return {
        "forward": sizes.array + labels + losses,
        "backward": backward,
        "grad": backward,
        "together": backward + losses,
    }[direction]


OPERATIONS = (
    Operation(
        function=softmax_cross_entropy,
        xla=_xla,
        reference=_reference,
        bytes=_bytes,
        find=pattern.candidates,
        # A loss that nothing differentiates costs a fraction of its logits. What its derivative costs is in
        # h200-softmax_cross_entropy.json, which a test compares with this verdict.
        rules=(
            costs.Rule(
                costs.always,
                costs.DIFFERENTIATED,
                "writes no probabilities; keeps the logits, the labels and one number per row",
            ),
        ),
        plain=_plain,
        mask="where",
        per_row=True,
    ),
)
