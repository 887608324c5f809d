"""Expressions as sums of products, and the statistics among them.

Normalisation is written in many ways: the scale multiplied by rstd first or last, `x * rstd - mean * rstd`, a division
by the root or a product with its inverse. As polynomials in x, mean, rstd, scale and bias they are one.
"""

import dataclasses
import math
from fractions import Fraction
from typing import NamedTuple

from jaxnorm._autofuse.values import (
    Arg,
    Mapping,
    Node,
    identity,
    unconverted,
    unwidened,
)

# Longer sums and deeper nesting, such as a residual stream, are not taken apart.
_MAX_TERMS = 8
_MAX_DEPTH = 12

_HALF = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2)}


class Mismatch(Exception):
    """Looks like an operation and is not one, or not one that can be replaced; the message is the reason.

    Of the reasons that parts of one formula give, the one of the highest rank is reported.
    """

    def __init__(self, reason: str, rank: int = 1):
        super().__init__(reason)
        self.reason, self.rank = reason, rank


class Ref(NamedTuple):
    """A node inside an expression, and the expression's dimensions that its own are."""

    node: Node
    dims: Mapping

    def arg(self, i: int) -> "Ref":
        return _inside(self.node.args[i], self.dims)

    @property
    def meaning(self):
        return self.node.key, self.dims

    def unconverted(self) -> "Ref":
        return Ref(unconverted(self.node), self.dims)

    def unwidened(self) -> "Ref":
        return Ref(unwidened(self.node), self.dims)


def _inside(arg: Arg, dims: Mapping) -> Ref:
    inner: list[int | None] = [None] * len(arg.node.shape)
    for own, d in zip(dims, arg.dims, strict=True):
        if d is not None:
            inner[d] = own
    return Ref(arg.node, tuple(inner))


def whole(node: Node) -> Ref:
    return Ref(node, identity(node))


@dataclasses.dataclass(frozen=True)
class Term:
    """A coefficient times powers of atoms."""

    coefficient: float
    powers: tuple[tuple[Ref, Fraction], ...]

    @property
    def meaning(self):
        return frozenset((ref.meaning, e) for ref, e in self.powers)

    def power_of(self, meaning) -> Fraction:
        return next((e for ref, e in self.powers if ref.meaning == meaning), Fraction(0))

    def without(self, *meanings) -> "Term":
        powers = tuple((ref, e) for ref, e in self.powers if ref.meaning not in meanings)
        return Term(self.coefficient, powers)

    def times(self, other: "Term") -> "Term":
        powers = {ref.meaning: (ref, e) for ref, e in self.powers}
        for ref, e in other.powers:
            known, before = powers.get(ref.meaning, (ref, Fraction(0)))
            powers[ref.meaning] = (known, before + e)
        kept = tuple((ref, e) for ref, e in powers.values() if e)
        return Term(self.coefficient * other.coefficient, kept)

    def to_the(self, e: Fraction) -> "Term":
        return Term(
            self.coefficient ** int(e), tuple((ref, before * e) for ref, before in self.powers)
        )


def depends(node: Node, key: int) -> bool:
    """Whether a node with this key is part of the expression."""
    if key not in node.depends:
        seen, front = {node}, [node]
        while front and all(n.key != key for n in front):
            front = list({arg.node for n in front for arg in n.args} - seen)
            seen.update(front)
        node.depends[key] = bool(front)
    return node.depends[key]


def expand(ref: Ref, x: int | None = None, depth: int = _MAX_DEPTH) -> list[Term]:
    """The terms of an expression; in x, if that is the key of a node.

    The node x itself, sums in products that do not depend on it, and what is `depth` operations away are not taken
    apart.
    """
    known = ref.node.terms.get((ref.dims, x, depth))
    if known is None:
        known = ref.node.terms[ref.dims, x, depth] = _expand(ref, x, depth)
    return known


def _expand(ref: Ref, x: int | None, depth: int) -> list[Term]:
    node = unconverted(ref.node)
    atom = [Term(1.0, ((ref.unwidened(), Fraction(1)),))]
    if node.constant is not None:
        return [Term(node.constant, ())]
    if node.key == x or not depth:
        return atom
    inner, depth = Ref(node, ref.dims), depth - 1
    terms: list[Term] | None = None
    match node.op:
        case "add" | "sub":
            sign = Term(1.0 if node.op == "add" else -1.0, ())
            first, second = (expand(inner.arg(i), x, depth) for i in (0, 1))
            terms = collect(first + [t.times(sign) for t in second])
        case "neg":
            terms = [t.times(Term(-1.0, ())) for t in expand(inner.arg(0), x, depth)]
        case "mul":
            first, second = (_factor(inner.arg(i), x, depth) for i in (0, 1))
            if len(first) * len(second) <= _MAX_TERMS:
                terms = collect([a.times(b) for a in first for b in second])
        case "div":
            inverse = _power(inner.arg(1), Fraction(-1), x, depth)
            terms = [t.times(inverse) for t in _factor(inner.arg(0), x, depth)]
        case "power":
            terms = [_power(inner.arg(0), dict(node.params)["exponent"], x, depth)]
        case "sqrt" | "rsqrt":
            terms = [_power(inner.arg(0), _HALF[node.op], x, depth)]
    return atom if terms is None or len(terms) > _MAX_TERMS else terms


def _factor(ref: Ref, x: int | None, depth: int) -> list[Term]:
    terms = expand(ref, x, depth)
    if x is None or len(terms) == 1 or depends(ref.node, x):
        return terms
    return [Term(1.0, ((ref.unwidened(), Fraction(1)),))]


def _power(base: Ref, exponent: Fraction, x: int | None, depth: int) -> Term:
    # The root of a product is not the product of the roots: those of negative numbers do not exist.
    if exponent.denominator == 1:
        terms = expand(base, x, depth)
        if len(terms) == 1 and terms[0].coefficient:
            return terms[0].to_the(exponent)
    return Term(1.0, ((base.unwidened(), exponent),))


def collect(terms: list[Term]) -> list[Term]:
    sums: dict = {}
    for t in terms:
        before = sums.get(t.meaning)
        sums[t.meaning] = (
            t if before is None else Term(before.coefficient + t.coefficient, t.powers)
        )
    return [t for t in sums.values() if t.coefficient]


# ---- masks ----


def unmasked(ref: Ref, fill: float) -> tuple[Ref, Ref | None]:
    """(v, mask) of where(mask, v, fill), or (the same, None)."""
    inner = ref.unconverted()
    if inner.node.op == "select_n" and inner.node.args[0].node.dtype == bool:
        if inner.arg(1).node.constant == fill:
            return inner.arg(2), inner.arg(0)
    return ref, None


# ---- means ----


class Mean(NamedTuple):
    """The mean of a node.

    Attributes:
      of: the node.
      axes: its dimensions along which that is.
      mask: which elements count, in the dimensions of `of`.
      rows: the other dimensions of `of`, as those of the expression that is the mean.
    """

    of: Node
    axes: tuple[int, ...]
    mask: Ref | None
    rows: Mapping

    def about(self, ref: Ref) -> "Mean | None":
        """The same in terms of `ref`, an expression in the dimensions of `of`, if it has all of these."""
        if sorted(d for d in ref.dims if d is not None) != list(identity(self.of)):
            return None
        place = {d: i for i, d in enumerate(ref.dims)}
        left = [d for d in identity(self.of) if d not in self.axes]
        axes = tuple(sorted(place[d] for d in self.axes))
        rows = tuple(self.rows[left.index(d)] for d in ref.dims if d in left)
        mask = self.mask and Ref(self.mask.node, tuple(place[d] for d in self.mask.dims))
        return Mean(unwidened(ref.node), axes, mask, rows)


def as_mean(terms: list[Term]) -> Mean | None:
    """What an expanded expression is the mean of."""
    if len(terms) != 1:
        return None
    (term,) = terms
    sums = [ref.unconverted() for ref, e in term.powers if e == 1]
    counts = [ref.unconverted() for ref, e in term.powers if e == -1]
    if len(sums) != 1 or len(counts) > 1 or len(term.powers) != 1 + len(counts):
        return None
    (total,) = sums
    if total.node.op != "reduce_sum":
        return None
    axes = dict(total.node.params)["axes"]
    summed = total.node.args[0].node
    mean = Mean(summed, axes, None, total.dims)
    if not counts:
        divisor = 1 / term.coefficient
        count = _size(summed, axes)
        if count is None:
            return None
        if abs(divisor - count) > 0.25:
            raise Mismatch(f"a mean over {count} elements divides by {divisor:.7g}")
        return mean
    of, mask = unmasked(whole(summed), 0.0)
    if mask is None or not _counts(counts[0], term.coefficient, mask, mean):
        return None
    return mean._replace(mask=mask).about(of)


def _size(node: Node, axes) -> int | None:
    sizes = [node.shape[a] for a in axes]
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else None


def _counts(count: Ref, coefficient: float, mask: Ref, mean: Mean) -> bool:
    """Whether `count` over the coefficient is how many elements along the axes the mask keeps."""
    node = count.node
    if node.op != "reduce_sum" or node.args[0].node.op != "convert":
        return False
    kept = node.args[0].node.args[0]
    own_axes = tuple(i for i, d in enumerate(mask.dims) if d in mean.axes)
    copies = _size(mean.of, [a for a in mean.axes if a not in mask.dims])
    if kept.node.key != mask.node.key or dict(node.params)["axes"] != own_axes or not copies:
        return False
    left = [d for d in identity(mean.of) if d not in mean.axes]
    rows = tuple(mean.rows[left.index(d)] for d in mask.dims if d in left)
    return coefficient == 1 / copies and count.dims == rows


def as_variance(node: Node) -> tuple[Mean, bool] | None:
    """(what `node` is the variance of, True), or (what it is the mean square of, False)."""
    terms = expand(whole(not_below_zero(node)))
    mean = _as_mean_square(as_mean(terms))
    if mean is not None:
        deviation = whole(unconverted(mean.of))
        if deviation.node.op == "sub":
            about_x = mean.about(deviation.arg(0))
            subtracted = as_mean(expand(deviation.arg(1)))
            if about_x and subtracted and subtracted.of.key == about_x.of.key:
                rows = tuple(i for i in deviation.arg(0).dims if i not in mean.axes)
                if (subtracted.axes, subtracted.rows) != (about_x.axes, rows):
                    raise Mismatch("deviations are from a mean over other axes than the variance's")
                if _meaning(subtracted.mask) != _meaning(about_x.mask):
                    raise Mismatch("mean and variance do not count the same elements")
                return about_x, True
        return mean, False
    if len(terms) != 2:
        return None
    # The fast one: mean(x^2) - mean(x)^2.
    terms.sort(key=lambda t: -t.coefficient)
    squares, root = as_mean(terms[:1]), _root(terms[1])
    squares, mean = _as_mean_square(squares), root and as_mean([root])
    if squares is None or mean is None or squares.of.key != mean.of.key:
        return None
    if (squares.axes, squares.rows) != (mean.axes, mean.rows):
        raise Mismatch("mean(x^2) and mean(x)^2 are over different axes")
    if _meaning(squares.mask) != _meaning(mean.mask):
        raise Mismatch("mean(x^2) and mean(x)^2 do not count the same elements")
    return squares, True


def _meaning(mask: Ref | None):
    return mask and mask.meaning


def _root(term: Term) -> Term | None:
    """The root of minus a term."""
    if term.coefficient >= 0:
        return None
    return Term(math.sqrt(-term.coefficient), tuple((ref, e / 2) for ref, e in term.powers))


def _as_mean_square(mean: Mean | None) -> Mean | None:
    """What v is, if it is the mean of v^2."""
    if mean is None:
        return None
    squared = unconverted(mean.of)
    if squared.op != "power" or dict(squared.params)["exponent"] != 2:
        return None
    base, mask = unmasked(whole(squared).arg(0), 0.0)
    if mask is not None and mean.mask is None:
        return None  # the count would be that of all elements
    return mean.about(base)


def not_below_zero(node: Node) -> Node:
    """Without max(0, variance), which changes rounding errors only."""
    node = unconverted(node)
    while node.op == "max" and any(a.node.constant == 0 for a in node.args):
        (node,) = [unconverted(a.node) for a in node.args if a.node.constant is None]
    return node
