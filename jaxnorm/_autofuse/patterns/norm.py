"""Normalisation: (x - mean) * (variance + epsilon)^-1/2 * scale + bias.

Which operation it is follows from the statistics and from the dimensions of scale and bias: those that are normalised
(layer_norm, rms_norm), or the others (batch_norm). Statistics that are not those of x make batch_norm_inference.
"""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction

from jaxnorm._autofuse.algebra import (
    Mean,
    Mismatch,
    Ref,
    Term,
    as_mean,
    as_variance,
    depends,
    expand,
    not_below_zero,
    whole,
)
from jaxnorm._autofuse.match import Left, Match, Operand, outside_of_calls
from jaxnorm._autofuse.program import Value
from jaxnorm._autofuse.values import Node, identity, is_float, unconverted

# What stands between a result and its root: arithmetic, a few levels deep.
_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "neg", "convert", "power"))
_ROOTS = frozenset(("sqrt", "rsqrt"))
_MAX_DEPTH = 8

_RSTD = Fraction(-1, 2)


def find(output: Value, root: Ref | None = None) -> Iterator[Match | Left]:
    """Ways to read an expression (`root`, or all of `output`) as a normalisation."""
    root = root or whole(output.view.node)
    if not is_float(root.node.dtype) or unconverted(root.node).op not in _ARITHMETIC:
        return
    for core in _roots(root):
        variance, epsilon = _variance_and_epsilon(core)
        try:
            found = as_variance(variance)
            if found is None:
                yield from _inference(output, root, core, variance, epsilon)
            else:
                for match in _trained(output, root, core, variance, epsilon, *found):
                    yield from _with_residual(match)
                    yield match
        except Mismatch as mismatch:
            yield Left("normalisation", core, mismatch.reason, mismatch.rank)


candidates = outside_of_calls(find)


def _roots(root: Ref) -> list[Node]:
    """Roots inside an expression, the nearest first."""
    found, seen, front = [], set(), [root.node]
    for _ in range(_MAX_DEPTH):
        further = []
        for node in front:
            for arg in node.args:
                if id(arg.node) in seen:
                    continue
                seen.add(id(arg.node))
                if arg.node.op in _ROOTS:
                    found.append(arg.node)
                elif arg.node.op in _ARITHMETIC:
                    further.append(arg.node)
        front = further
    return found


def _variance_and_epsilon(core: Node) -> tuple[Node, float]:
    inside = unconverted(core.args[0].node)
    if inside.op == "add":
        for i in (0, 1):
            epsilon = inside.args[i].node.constant
            if epsilon is not None:
                return inside.args[1 - i].node, epsilon
    return inside, 0.0


def _trained(output, root, core, variance, epsilon, mean: Mean, center: bool) -> Iterator[Match]:
    """Normalisation by x's own statistics."""
    x, with_root, added = _affine(root, core, mean.of)
    rows = tuple(x.dims[d] for d in identity(mean.of) if d not in mean.axes)
    scales = {}
    for term, rstd in with_root:
        if tuple(_variance_ref(rstd).dims[i] for i in mean.rows) != rows:
            raise Mismatch("the variance that divides is that of other rows")
        if term.power_of(x.meaning) == 1:
            scales["x"] = term.without(x.meaning, rstd.meaning)
        else:
            scales["mean"] = term.without(rstd.meaning)
    if "x" not in scales or len(with_root) != len(scales):
        raise Mismatch("the result is not x times the inverse root", 0)
    if center and "mean" not in scales:
        raise Mismatch("the variance is that around the mean, which is not subtracted from x")
    if center:
        _check_mean(scales["mean"], scales["x"], mean, rows)
    elif "mean" in scales:
        raise Mismatch("something is subtracted from x that its mean square does not have")

    def by_product(node: Node):
        """Mean and variance, which batch_norm returns; with the dimensions of x that the node's are."""
        if unconverted(node).key in (variance.key, not_below_zero(variance).key):
            inner = as_variance(node)
            return ("var", _own_dims(inner[0])) if inner else None
        if unconverted(node).op not in ("mul", "div"):
            return None
        other = as_mean(expand(whole(node)))
        if other is None or (other.of.key, other.axes) != (mean.of.key, mean.axes):
            return None
        return "mean", _own_dims(other)

    for operation, axes in _operations(scales["x"], added, x, mean, center):
        operands = _parameters(x, scales["x"], added, axes)
        if mean.mask is not None:
            operands["mask"] = Operand.of(mean.mask)
        match = Match(operation, output, x, operands, axes, {"epsilon": epsilon}, core)
        if operation == "batch_norm":
            match.by_products = by_product
        yield match


def _with_residual(match: Match) -> Iterator[Match]:
    """The same where x is a sum, which layer_norm and rms_norm form and return themselves."""
    x = match.x.node
    if match.operation == "batch_norm" or x.op != "add":
        return
    if any(a.node.dtype != x.dtype or len(a.node.shape) != len(x.shape) for a in x.args):
        return
    first, second = (whole(x).arg(i) for i in (0, 1))
    if first.dims == identity(x):
        yield dataclasses.replace(
            match,
            x=Ref(first.node, match.x.dims),
            operands={
                **match.operands,
                "x": Operand.of(first),
                "residual": Operand.of(second),
            },
            by_products=lambda node: ("sum", identity(node)) if node is x else None,
        )


def _own_dims(mean: Mean) -> tuple:
    """For each dimension of the node that a mean is, the dimension of x."""
    left = [d for d in identity(mean.of) if d not in mean.axes]
    place = {row: d for row, d in zip(mean.rows, left, strict=True)}
    return tuple(place[i] for i in range(len(place)))


def _affine(root: Ref, core: Node, x: Node) -> tuple[Ref, list[tuple[Term, Ref]], list[Term]]:
    """X in the dimensions of the result; the terms with the inverse root, and that; the terms without."""
    terms = expand(root, x.key)
    key = core.args[0].node.key
    refs = {r.meaning: r for t in terms for r, e in t.powers if r.node.key == x.key}
    if len(refs) != 1:
        raise Mismatch("x is not what is normalised", 0)
    (ref,) = refs.values()
    with_root, without = [], []
    for term in terms:
        roots = [(r, e) for r, e in term.powers if r.node.key == key]
        if not roots:
            without.append(term)
        elif [e for _, e in roots] == [_RSTD]:
            with_root.append((term, roots[0][0]))
        else:
            raise Mismatch("the root multiplies, and does not divide")
    if not with_root:
        raise Mismatch("the root does not divide x: epsilon is outside of it")
    if sorted(ref.dims, key=str) != list(range(len(root.node.shape))):
        raise Mismatch("x is broadcast", 0)
    return ref, with_root, without


def _check_mean(term: Term, scale: Term, mean: Mean, rows) -> None:
    """A term is minus the mean times the scale."""
    inverse = Term(-1 / scale.coefficient, tuple((ref, -e) for ref, e in scale.powers))
    subtracted = as_mean([term.times(inverse)])
    if subtracted is None or subtracted.of.key != mean.of.key:
        raise Mismatch("what is subtracted is not the mean of x")
    if (subtracted.axes, subtracted.rows) != (mean.axes, rows):
        raise Mismatch("the mean that is subtracted is over other axes than the variance")
    if (subtracted.mask and subtracted.mask.meaning) != (mean.mask and mean.mask.meaning):
        raise Mismatch("mean and variance do not count the same elements")


def _inference(output, root, core, variance: Node, epsilon) -> Iterator[Match]:
    """Normalisation by statistics that come from elsewhere: one number per feature."""
    if not variance.shape:
        return
    for x in _centered(root):
        if depends(variance, x.key):
            continue
        ref, with_root, added = _affine(root, core, x)
        scales = {}
        for term, rstd in with_root:
            is_x = term.power_of(ref.meaning) == 1
            scales["x" if is_x else "mean"] = (
                term.without(ref.meaning, rstd.meaning) if is_x else term.without(rstd.meaning),
                rstd,
            )
        if len(with_root) != 2 or len(scales) != 2:
            raise Mismatch("the result is not (x - mean) times the inverse root", 0)
        (scale, rstd), (subtracted, _) = scales["x"], scales["mean"]
        inverse = Term(-1 / scale.coefficient, tuple((r, -e) for r, e in scale.powers))
        mean = subtracted.times(inverse)
        if any(depends(r.node, x.key) for r, _ in mean.powers):
            raise Mismatch("what is subtracted depends on x, what divides does not")
        place = {d: i for i, d in enumerate(ref.dims)}
        axes = tuple(sorted(place[d] for d in _variance_ref(rstd).dims))
        operands = _parameters(ref, scale, added, axes)
        operands["mean"] = _operand(ref, [mean], axes)
        operands["var"] = _operand(ref, [Term(1.0, ((_variance_ref(rstd), Fraction(1)),))], axes)
        for name, operand in operands.items():
            if not all(set(r.dims) <= set(axes) for r in operand.refs):
                raise Mismatch(f"{name} has dimensions that the variance does not have")
        if len(axes) == len(ref.dims):
            raise Mismatch("the variance has every dimension of x")
        yield Match("batch_norm_inference", output, ref, operands, axes, {"epsilon": epsilon}, core)
        return


def _variance_ref(rstd: Ref) -> Ref:
    """The variance inside of variance + epsilon."""
    inner = rstd.unconverted()
    if inner.node.op == "add":
        (index,) = [i for i in (0, 1) if inner.node.args[i].node.constant is None]
        inner = inner.arg(index)
    return inner.unwidened()


def _centered(root: Ref) -> list[Node]:
    """What something smaller is subtracted from, the nearest first."""
    found, front = [], [root]
    for _ in range(_MAX_DEPTH):
        further = []
        for ref in map(Ref.unconverted, front):
            if ref.node.op == "sub" and len(ref.arg(0).node.shape) > len(ref.arg(1).node.shape):
                found.append(unconverted(ref.arg(0).node))
            if ref.node.op in _ARITHMETIC:
                further += [ref.arg(i) for i in range(len(ref.node.args))]
        front = further
    return found


# ---- operands ----


def _operations(scale: Term, bias: list[Term], x: Ref, mean: Mean, center: bool) -> list:
    """(name, dimensions of x that are its `axis`) of the operations that take such a scale and bias."""
    place = {d: i for i, d in enumerate(x.dims)}
    dims = {place[d] for term in (scale, *bias) for ref, _ in term.powers for d in ref.dims}
    rows = tuple(d for d in identity(mean.of) if d not in mean.axes)
    if not center:
        if not dims <= set(mean.axes):
            raise Mismatch("scale has dimensions that are not normalised")
        if bias:
            raise Mismatch("rms_norm takes no bias")
        return [("rms_norm", mean.axes)]
    fitting = [("layer_norm", mean.axes), ("batch_norm", rows)]
    found = [(name, axes) for name, axes in fitting if dims <= set(axes) and axes]
    if not found:
        raise Mismatch("scale or bias has normalised dimensions and others")
    return found


def _parameters(x: Ref, scale: Term, bias: list[Term], axes) -> dict[str, Operand]:
    operands = {}
    if scale.powers:
        operands["scale"] = _operand(x, [scale], axes)
    elif scale.coefficient != 1:
        raise Mismatch("the result is multiplied by a number")
    if bias:
        operands["bias"] = _operand(x, bias, axes)
        if not all(term.powers for term in bias):
            raise Mismatch("a number is added to the result")
    return operands


def _operand(x: Ref, terms: list[Term], axes) -> Operand:
    """A sum of terms, from the dimensions of the result to those of x."""
    place = {d: i for i, d in enumerate(x.dims)}

    def moved(ref: Ref) -> Ref:
        return Ref(ref.node, tuple(place[d] for d in ref.dims))

    return Operand(
        tuple(Term(t.coefficient, tuple((moved(r), e) for r, e in t.powers)) for t in terms), axes
    )
