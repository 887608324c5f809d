"""softmax_cross_entropy: logsumexp(x) - x[label], however the two are spelled.

With t for the maximum, s for sum(exp(x - t)), and as sums of terms, all spellings are log(s) + t - x[label]:
log_softmax(x)[label] is (x - t - log(s))[label], where t and s have one value per row, so that taking an element leaves
them as they are.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

import jaxnorm
from jaxnorm._autofuse.algebra import Mismatch, Ref, Term, collect, expand, unmasked, whole
from jaxnorm._autofuse.match import Left, Match, Operand, outside_of_calls
from jaxnorm._autofuse.program import Value
from jaxnorm._autofuse.values import Node, at_least, identity, unconverted
from jaxnorm._primitive.arithmetic import acc_dtype

# What stands between a loss and its logarithm.
_SUMS = frozenset(("add", "sub", "neg", "convert", "select_n", "pick"))
_MAX_DEPTH = 8


def find(output: Value) -> Iterator[Match | Left]:
    """Ways to read `output` as the cross-entropy of a softmax, or as minus that."""
    root = whole(output.view.node)
    yield from _one_hot(root)
    loss = loss_of(root.node)
    if isinstance(loss, Left):
        yield loss
    elif loss is not None:
        shown = "{}" if "rows" not in loss.operands else "jnp.where(rows, {}, 0)"
        yield Match(
            "softmax_cross_entropy",
            output,
            loss.logits,
            loss.operands,
            (loss.axis,),
            {},
            loss.pick,
            function=functools.partial(_cross_entropy, loss.how, loss.sign),
            shown=f"-{shown}" if loss.sign > 0 else shown,
        )


candidates = outside_of_calls(find)


class Loss(NamedTuple):
    """The cross-entropy of a softmax, or minus that.

    Attributes:
      logits: in the dimensions of the loss; None for that of the classes.
      axis: the dimension of the logits that the classes are.
      operands: "labels", and "rows" if there is a mask of rows, in the dimensions of the logits.
      how: how labels are read.
      sign: of the label's logit: 1 for minus the cross-entropy.
      pick: what takes that logit.
    """

    logits: Ref
    axis: int
    operands: dict[str, Operand]
    how: "Labels"
    sign: float
    pick: Node


def loss_of(node: Node) -> Loss | Left | None:
    """An expression as a cross-entropy; None for what does not look like one."""
    picks, logarithms = _parts(node)
    if len(picks) != 1 or len(logarithms) != 1:
        return None
    inner, rows = unmasked(whole(node), 0.0)
    try:
        return _loss(inner, rows, picks[0], logarithms[0])
    except Mismatch as mismatch:
        return Left("softmax_cross_entropy", picks[0], mismatch.reason, mismatch.rank)


def _parts(root: Node) -> tuple[list[Node], list[Node]]:
    """What picks elements in an expression, and the logarithms of sums."""
    seen, front = {root}, [root]
    for _ in range(_MAX_DEPTH):
        front = list({a.node for n in front if n.op in _SUMS for a in n.args} - seen)
        seen.update(front)
    picks = {n.key: n for n in seen if n.op == "pick"}
    logarithms = {n.key: n for n in seen if n.op == "log" and _sum_in(whole(n)) is not None}
    return list(picks.values()), list(logarithms.values())


def _sum_in(logarithm: Ref) -> Ref | None:
    """The sum of exponentials that it is the logarithm of; logsumexp takes the absolute value first."""
    total = logarithm.arg(0).unconverted()
    if total.node.op == "abs":
        total = total.arg(0).unconverted()
    if total.node.op != "reduce_sum":
        return None
    exponential, _ = unmasked(whole(total.node.args[0].node), 0.0)
    return total if exponential.unconverted().node.op == "exp" else None


class _LogSumExp(NamedTuple):
    """log(sum(exp(z - maximum))), in the dimensions of the loss; None for that of the classes."""

    z: Ref
    maximum: Ref
    mask: Ref | None


def _log_sum_exp(logarithm: Ref) -> _LogSumExp:
    total = _sum_in(logarithm)
    assert total is not None
    exponential, mask = unmasked(_summed(total), 0.0)
    shifted = exponential.unconverted().arg(0).unconverted()
    if shifted.node.op != "sub":
        raise Mismatch(
            "no maximum is subtracted: this overflows where softmax_cross_entropy does not"
        )
    z, maximum = shifted.arg(0), shifted.arg(1)
    over = maximum.unconverted()
    if over.node.op == "stop_gradient":
        over = over.arg(0).unconverted()
    over = _finite(over)
    if over.node.op != "reduce_max":
        raise Mismatch("what is subtracted from the exponents is not their maximum")
    largest_of, max_mask = _summed(over), None
    if mask is not None:
        largest_of, max_mask = unmasked(largest_of, -math.inf)
    if largest_of.meaning != z.meaning:
        raise Mismatch(
            "the maximum is that of another array than the exponents, or over other axes"
        )
    if mask is not None:
        z, own = unmasked(z, 0.0)
        if any(m is None or m.meaning != mask.meaning for m in (max_mask, own)):
            raise Mismatch("the masks of the exponents and of their sum are not one")
    return _LogSumExp(z.unwidened(), maximum, mask)


def _summed(reduction: Ref) -> Ref:
    """What a sum or maximum is over; None for the dimensions along which that is."""
    (arg,) = reduction.node.args
    axes = dict(reduction.node.params)["axes"]
    rows = iter(reduction.dims)
    return Ref(arg.node, tuple(None if d in axes else next(rows) for d in identity(arg.node)))


def _finite(ref: Ref) -> Ref:
    """The m of where(isfinite(m), m, 0), which logsumexp has."""
    if ref.node.op != "select_n" or ref.node.args[0].node.op != "is_finite":
        return ref
    maximum = ref.arg(2)
    same = ref.arg(0).arg(0).meaning == maximum.meaning and ref.arg(1).node.constant == 0
    return maximum.unconverted() if same else ref


def _loss(inner: Ref, rows: Ref | None, pick: Node, logarithm: Node) -> Loss:
    x_key = _log_sum_exp(whole(logarithm)).z.node.key
    terms = expand(inner, x_key)
    picks = [ref for t in terms for ref, _ in t.powers if ref.node.key == pick.key]
    terms = _spread(terms, x_key)
    logarithms = [ref for t in terms for ref, _ in t.powers if ref.node.key == logarithm.key]
    logits = [(ref, t.coefficient) for t in terms for ref, _ in t.powers if ref.node.key == x_key]
    if len(picks) != 1 or len(logarithms) != 1 or len(logits) != 1:
        raise Mismatch("labels do not take one of the logits of the logarithm")
    ((x, sign),) = logits
    lse = _log_sum_exp(logarithms[0])
    if x.meaning != lse.z.meaning:
        raise Mismatch("labels take a logit along another axis, or of another row, than the sum's")
    parts = ((lse.z, sign), (logarithms[0], -sign), (lse.maximum, -sign))
    expected = {frozenset([(ref.meaning, Fraction(1))]): c for ref, c in parts}
    if {t.meaning: t.coefficient for t in terms} != expected or abs(sign) != 1:
        raise Mismatch("the result is not the logarithm and the maximum less the label's logit", 0)
    (axis,) = (d for d, place in enumerate(x.dims) if place is None)
    if set(x.dims) - {None} != set(identity(inner.node)):
        raise Mismatch("the logits are broadcast")
    others = tuple(d for d in range(len(x.dims)) if d != axis)

    def operand(ref: Ref) -> Operand:
        placed = Ref(ref.node, tuple(x.dims.index(d) for d in ref.dims))
        return dataclasses.replace(Operand.of(placed), axes=others)

    labels, how = _labels(picks[0].arg(1), picks[0], x.node.shape[axis])
    operands = {"labels": operand(labels)}
    if lse.mask is not None:
        if None in lse.mask.dims:
            raise Mismatch(
                "the loss of a label that the mask of classes hides is finite here, and +inf in softmax_cross_entropy"
            )
        if rows is None or rows.meaning != lse.mask.meaning:
            raise Mismatch("rows that are masked are not 0")
        operands["rows"] = operand(rows)
    elif rows is not None:
        raise Mismatch("a mask is behind the loss", 0)
    return Loss(x, axis, operands, how, sign, pick)


def _spread(terms: list[Term], x: int) -> list[Term]:
    """With (a + b)[label] as a[label] + b[label]; what has one value per row stays as it is."""
    out = []
    for term in terms:
        if [(ref.node.op, e) for ref, e in term.powers] != [("pick", Fraction(1))]:
            out.append(term)
            continue
        ((ref, _),) = term.powers
        axis = dict(ref.node.params)["axis"]
        source = ref.node.args[0].node
        rows = iter(ref.dims)
        place = tuple(None if d == axis else next(rows) for d in identity(source))
        out += [t.times(Term(term.coefficient, ())) for t in expand(Ref(source, place), x)]
    return collect(out)


class Labels(NamedTuple):
    """From the program's labels to class numbers that softmax_cross_entropy takes.

    Attributes:
      dtype: of the index that the program makes of them.
      wraps: whether negative ones count from the end.
      clips: whether those that are outside are moved to the first or last class; the loss is NaN otherwise.
    """

    dtype: np.dtype
    wraps: bool
    clips: bool

    def class_numbers(self, labels, classes: int) -> jax.Array:
        labels = labels.astype(self.dtype)
        number, zero = np.asarray(classes, self.dtype), np.zeros((), self.dtype)
        if self.wraps:
            labels = jnp.where(labels < zero, labels + number, labels)
        return jnp.clip(labels, zero, number - 1) if self.clips else labels


def _labels(index: Ref, pick: Ref, classes) -> tuple[Ref, Labels]:
    """The labels of an index, and how that is made of them."""
    mode = dict(pick.node.params)["mode"]
    dtype, wraps = index.node.dtype, False
    if index.node.constant is not None:
        raise Mismatch("labels are a number", 0)
    # JAX's indexing: where(label < 0, label + classes, label).
    if index.node.op == "select_n":
        negative, label, wrapped = (index.arg(i) for i in range(3))
        is_negative = negative.node.op == "lt" and negative.node.args[1].node.constant == 0
        added = [a.node.constant for a in wrapped.node.args] if wrapped.node.op == "add" else []
        if is_negative and classes in added and negative.arg(0).meaning == label.meaning:
            if any(wrapped.arg(i).meaning == label.meaning for i in (0, 1)):
                index, wraps = label, True
    # take_along_axis converts inside of a jit, where what comes out has no name.
    if index.node.op == "convert" and jnp.issubdtype(index.arg(0).node.dtype, jnp.integer):
        index = index.arg(0)
    return index, Labels(dtype, wraps, mode != GatherScatterMode.FILL_OR_DROP)


def _cross_entropy(how: Labels, sign, x, *, labels, axis, dtype, rows=None) -> jax.Array:
    """Jaxnorm's function between the program's labels and result."""
    (axis,) = axis
    if not at_least(acc_dtype(x.dtype), dtype):
        x = x.astype(dtype)
    labels = how.class_numbers(labels, x.shape[axis])
    loss = jaxnorm.softmax_cross_entropy(x, labels, axis=axis)
    if rows is not None:
        loss = jnp.where(rows, loss, np.zeros((), loss.dtype))
    return jnp.expand_dims(-loss if sign > 0 else loss, axis)


def _one_hot(root: Ref) -> Iterator[Left]:
    """Sums of log_softmax times one-hot labels, which are another function."""
    if root.node.op != "reduce_sum" or root.node.args[0].node.op != "mul":
        return
    factors = [unconverted(a.node) for a in root.node.args[0].node.args]
    is_one_hot = [_is_one_hot(f) for f in factors]
    if is_one_hot in ([True, False], [False, True]) and _parts(factors[is_one_hot.index(False)])[1]:
        reason = (
            "one-hot labels times log_softmax: NaN where a logit of another class is -inf, as 0 * inf is; "
            "take_along_axis(log_softmax(x), labels) and optax's function of integer labels are not"
        )
        yield Left("softmax_cross_entropy", root.node, reason, 1)


def _is_one_hot(node: Node) -> bool:
    if node.op != "convert" or node.args[0].node.op != "eq":
        return False
    return any(a.node.op == "iota" for a in node.args[0].node.args)
