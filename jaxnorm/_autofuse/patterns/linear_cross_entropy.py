"""linear_cross_entropy: a cross-entropy that is summed over all tokens, of logits that are a matrix product.

The product's second operand is the head of a language model, and nothing but the loss may use the logits. A bias may be
added to them, and the dimensions of tokens may be reshaped into one another between product and loss. The tokens'
losses may be multiplied by factors, or masked, before they are summed: these are the operation's weights.
"""

import collections
import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.algebra import Mismatch, Ref, Term, unmasked, whole
from jaxnorm._autofuse.match import Apart, Left, Match, Operand
from jaxnorm._autofuse.patterns.cross_entropy import Labels, Loss, loss_of
from jaxnorm._autofuse.program import Equation, Program, Value, every_equation
from jaxnorm._autofuse.values import (
    Mapping,
    Node,
    View,
    at_least,
    compose,
    identity,
    is_float,
    is_one,
    unconverted,
)
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.programs import open_jaxpr

_OP = "linear_cross_entropy"
# Logits of fewer bytes are computed at once, so that not having them in memory is worth little.
MIN_BYTES = 1 << 26
# Factors of the losses that are looked through, and reshapes and sums between a product and its loss.
_MAX_DEPTH = 4
_RULE = costs.Rule(
    costs.always,
    costs.ALWAYS,
    "logits and their gradient are in memory for some tokens at a time; the gradients of x and w come from the pass "
    "that computes the loss, with no product more",
)


def candidates(program: Program, output: Value) -> Iterator[Match | Left]:
    """Ways to read `output` as the sum of cross-entropies of a product."""
    if output.equation in program.calls:
        return
    summed = whole(output.view.node).unconverted().node
    if summed.op != "reduce_sum":
        loss = loss_of(output.view.node)
        if isinstance(loss, Loss):
            yield from _left_per_token(program, loss)
    elif not summed.shape:
        for terms in _factored(whole(summed.args[0].node), _MAX_DEPTH):
            loss = loss_of(terms.loss.node)
            if isinstance(loss, Loss):
                yield from _total(program, output, terms, loss)


def _left_per_token(program: Program, loss: Loss) -> Iterator[Left]:
    logits = _logits(program, loss)
    if logits is None:
        return
    try:
        _check_worth(logits, _head(logits))
        reason = (
            "the losses of tokens are not just summed over all tokens: the derivative of each token's loss by itself "
            "computes the logits again"
        )
        yield Left(_OP, logits.product, reason, 1)
    except Mismatch as mismatch:
        yield Left(_OP, logits.product, mismatch.reason, mismatch.rank)


# ---- the sum ----


class _Summand(NamedTuple):
    """What is summed, as a product.

    Attributes:
      loss: the part that may be a loss, in the dimensions of the sum's operand, as all.
      factors: what else is multiplied.
      mask: outside of which it is 0, or None.
      coefficient: a number.
    """

    loss: Ref
    factors: tuple[Ref, ...] = ()
    mask: Ref | None = None
    coefficient: float = 1.0


def _factored(ref: Ref, depth: int) -> Iterator[_Summand]:
    """Ways to take factors and a mask from an expression."""
    yield _Summand(ref)
    if not depth:
        return
    inner, mask = unmasked(ref, 0.0)
    if mask is not None:
        for found in _factored(inner, depth - 1):
            if found.mask is None:
                yield found._replace(mask=mask)
        return
    node = ref.unconverted()
    if node.node.op == "neg":
        for found in _factored(node.arg(0), depth - 1):
            yield found._replace(coefficient=-found.coefficient)
    if node.node.op != "mul":
        return
    for one, other in ((0, 1), (1, 0)):
        factor = node.arg(other)
        number = factor.node.constant
        for found in _factored(node.arg(one), depth - 1):
            if number is not None:
                yield found._replace(coefficient=found.coefficient * number)
            else:
                yield found._replace(factors=(*found.factors, factor))


def _total(
    program: Program, output: Value, summand: _Summand, loss: Loss
) -> Iterator[Match | Left]:
    logits = _logits(program, loss)
    if logits is None:
        return
    try:
        yield _match(program, output, summand, loss, logits)
    except Mismatch as mismatch:
        yield Left(_OP, logits.product, mismatch.reason, mismatch.rank)


def _match(
    program: Program, output: Value, summand: _Summand, loss: Loss, logits: "_Logits"
) -> Match:
    head, dtype = _head(logits), logits.product.dtype
    _check_worth(logits, head)
    if not at_least(acc_dtype(dtype), output.aval.dtype):
        raise Mismatch(f"the loss is {output.aval.dtype}, and the product {dtype}")
    rank = len(unconverted(output.view.node).args[0].node.shape)
    if sorted(d for d in summand.loss.dims if d is not None) != list(range(rank)):
        raise Mismatch("losses are broadcast before they are summed")
    if any(_depends(program, f.node, (head.x_node, head.w_node)) for f in summand.factors):
        raise Mismatch("a factor of the losses depends on x or w")
    tokens = tuple(d for d in identity(loss.logits.node) if d != loss.axis)
    # Dimensions of the summed array -> dimensions of the logits.
    place = tuple(loss.logits.dims.index(summand.loss.dims.index(d)) for d in range(rank))

    def per_token(operand: Operand) -> Apart:
        return Apart(operand.terms, tokens, loss.logits.node.shape)

    def product_of(refs) -> Operand:
        powers = tuple((Ref(r.node, compose(place, r.dims)), Fraction(1)) for r in refs)
        return Operand((Term(1.0, powers),))

    operands: dict[str, Operand] = {
        "x": head.x,
        "w": head.w,
        "labels": per_token(loss.operands["labels"]),
    }
    if logits.bias is not None:
        operands["bias"] = Apart.whole(whole(logits.bias), logits.bias.shape)
    rows = loss.operands.get("rows")
    if summand.mask is not None:
        if rows is not None:
            raise Mismatch("losses are masked twice")
        rows = product_of([summand.mask])
    kinds = [_converted_from(f) for f in summand.factors]
    fixed = ("weights",) if any(is_float(k) for k in kinds) else ()
    if summand.factors:
        operands["weights"] = per_token(product_of(summand.factors))
    if rows is not None:
        operands["rows" if summand.factors else "weights"] = per_token(rows)
    scale = -summand.coefficient * loss.sign
    shown = {1.0: "{}", -1.0: "-{}"}.get(scale, f"{scale:.7g} * {{}}")
    # XLA reads a product with a boolean as a mask. A factor of 0 from elsewhere does not hide a loss of NaN.
    shows = bool(kinds) and bool not in kinds and not loss.how.clips
    function = functools.partial(_linear_cross_entropy, loss.how, scale, dtype, shows)
    options = {"reduction": "sum"} | ({} if head.class_axis else {"w_axis": 0})
    return Match(
        _OP,
        output,
        Ref(head.x_node, (None,) * len(head.x_node.shape)),
        operands,
        None,
        options,
        logits.product,
        function=function,
        shown=shown,
        rounded=logits.rounded,
        fixed=fixed,
        rule=_RULE,
    )


def _converted_from(factor: Ref) -> np.dtype:
    """The dtype of the booleans or integers that a factor is made of, or its own."""
    node = unconverted(factor.node)
    return node.args[0].node.dtype if node.op == "convert" else node.dtype


def _depends(program: Program, node: Node, on: tuple[Node, ...]) -> bool:
    """Whether equations compute a node from one of others."""
    keys = {n.key for n in on}
    front = seen = set(program.holding(node))
    while front:
        if any(value.view.node.key in keys for value in front):
            return True
        made = {v for value in front if value.equation for v in value.equation.inputs}
        front = made - seen
        seen = seen | front
    return False


# ---- the product ----


class _Logits(NamedTuple):
    """Logits that are a product, with a bias or without.

    Attributes:
      equation: the product.
      dims: from its node's dimensions to numbers that ascend as the labels' dimensions do.
      classes: the number of the dimension of the classes.
      bias: one number for each class, or None.
      rounded: the product, and what is reshaped of it.
    """

    equation: Equation
    dims: Mapping
    classes: int
    bias: Node | None
    rounded: tuple[Node, ...]

    @property
    def product(self) -> Node:
        return self.equation.outputs[0].view.node


def _logits(program: Program, loss: Loss) -> _Logits | None:
    return _product(program, whole(loss.logits.node), loss.axis, _MAX_DEPTH)


def _product(program: Program, ref: Ref, classes: int, depth: int) -> _Logits | None:
    """The product in an expression of logits, if that is nothing but a product and a bias."""
    ref = ref.unwidened()
    if not depth:
        return None
    if ref.node.op == "add":
        for i in (0, 1):
            rest, bias = ref.arg(i), ref.arg(1 - i).unwidened()
            if bias.dims != (classes,) or set(rest.dims) != set(ref.dims):
                continue
            found = _product(program, rest, classes, depth - 1)
            if found is not None and found.bias is None:
                return found._replace(bias=bias.node)
        return None
    equation = next((v.equation for v in program.holding(ref.node) if v.equation), None)
    if ref.node.op != "unknown" or equation is None or None in ref.dims:
        return None
    if equation.eqn.primitive.name == "dot_general":
        return _Logits(equation, ref.dims, classes, None, (ref.node,))
    if equation.eqn.primitive.name != "reshape":
        return None
    source, shape = equation.inputs[0], equation.outputs[0].aval.shape
    kept = source.aval.shape[-1:] == shape[-1:] and not is_one(shape[-1])
    if not kept or list(ref.dims) != sorted(ref.dims) or ref.dims[-1] != classes:
        return None
    if equation.eqn.params["dimensions"] is not None or _is_broadcast(source.view):
        return None
    last = len(source.view.dims) - 1
    found = _product(program, Ref(source.view.node, _positions(source.view)), last, depth - 1)
    return found and found._replace(rounded=(*found.rounded, ref.node))


def _is_broadcast(view: View) -> bool:
    return any(d is None and not is_one(n) for d, n in zip(view.dims, view.shape, strict=True))


def _positions(view: View) -> Mapping:
    """From dimensions of the view's node to those of the variable."""
    return tuple(view.dims.index(d) for d in identity(view.node))


class _Head(NamedTuple):
    """The operands of a product, as linear_cross_entropy takes them: x with the dimension of features last.

    Attributes:
      x, w: the operands.
      x_node, w_node: what they are made of.
      class_axis: the dimension of w that the classes are.
    """

    x: Apart
    w: Apart
    x_node: Node
    w_node: Node
    class_axis: int


def _head(logits: _Logits) -> _Head:
    """Raises Mismatch for a product that is another than linear_cross_entropy's."""
    params = logits.equation.eqn.params
    contracted, batch = params["dimension_numbers"]
    if batch[0]:
        raise Mismatch("the product has batch dimensions: tokens have different heads")
    if len(contracted[0]) != 1:
        raise Mismatch("the product contracts several dimensions")
    operands = [(v, c[0]) for v, c in zip(logits.equation.inputs, contracted, strict=True)]
    free = [[i for i in range(v.aval.ndim) if i != c] for v, c in operands]
    # The result has the first operand's uncontracted dimensions, then the second operand's.
    result = [
        logits.dims[d] if d is not None else None for d in logits.equation.outputs[0].view.dims
    ]
    numbers = [result[: len(free[0])], result[len(free[0]) :]]
    side = 0 if logits.classes in numbers[0] else 1
    (w, _), (x, features) = operands[side], operands[1 - side]
    if w.aval.ndim != 2:
        raise Mismatch("the product's operand that has the classes is no matrix")
    if features != x.aval.ndim - 1:
        raise Mismatch("the product contracts another dimension of x than the last")
    if _is_broadcast(x.view) or len(w.view.node.shape) != 2 or x.view.dims[-1] is None:
        raise Mismatch("an operand of the product is broadcast", 0)
    dtype = logits.product.dtype
    if {x.aval.dtype, w.aval.dtype} != {dtype}:
        raise Mismatch(
            f"the product of {x.aval.dtype} and {w.aval.dtype} is {dtype}; linear_cross_entropy rounds it to theirs"
        )
    if params["precision"] is not None or params["out_sharding"] is not None:
        raise Mismatch("the product asks for a precision or a sharding")
    order = {
        number: i for i, number in enumerate(sorted(n for n in numbers[1 - side] if n is not None))
    }
    places = {x.view.dims[-1]: len(order)}
    for i, number in zip(free[1 - side], numbers[1 - side], strict=True):
        if number is not None:
            places[x.view.dims[i]] = order[number]
    x_node, w_node = x.view.node, w.view.node
    x_dims = tuple(places[d] for d in identity(x_node))
    sizes = tuple(n for _, n in sorted(zip(x_dims, x_node.shape, strict=True)))
    class_axis = w.view.dims[free[side][0]]
    assert class_axis is not None
    return _Head(
        Apart.whole(Ref(x_node, x_dims), sizes),
        Apart.whole(whole(w_node), w_node.shape),
        x_node,
        w_node,
        class_axis,
    )


def _check_worth(logits: _Logits, head: _Head) -> None:
    shape, classes = logits.product.shape, head.w.shape[head.class_axis]
    if not all(isinstance(n, int) for n in shape):
        raise Mismatch("sizes are not known")
    size = math.prod(shape) * logits.product.dtype.itemsize
    if size < MIN_BYTES:
        raise Mismatch(
            f"the logits have {size / 2**20:.3g} MiB; to do without them pays from {MIN_BYTES / 2**20:.3g} MiB on"
        )
    features = head.w.shape[1 - head.class_axis]
    if classes <= features:
        raise Mismatch(
            f"with {classes} classes and {features} features, logits are no larger than x"
        )


# ---- the call ----


def _linear_cross_entropy(
    how: Labels, scale, product_dtype, shows, x, w, labels, *, dtype, weights=None, rows=None, **kwargs
) -> jax.Array:  # fmt: skip
    """Jaxnorm's function between the program's operands and result.

    Args:
      how: from the program's labels to class numbers.
      scale: a factor of the result.
      product_dtype: of the program's product.
      shows: whether a label that is no class makes the result NaN where its weight is 0, too.
      x: operand.
      w: operand.
      labels: the program's.
      dtype: of the program's result; this one is as precise as the sum.
      weights: factors of the losses; None for 1.
      rows: which of the factors count; None for all.
      **kwargs: the other arguments of linear_cross_entropy.
    """
    classes = w.shape[kwargs.get("w_axis", 1)]
    labels = how.class_numbers(labels, classes)
    if shows and weights is not None:
        valid = (labels >= 0) & (labels < classes)
        weights = jnp.where(valid, weights, jnp.ones_like(weights))
    if rows is not None and weights is not None:
        weights = jnp.where(rows, weights, jnp.zeros_like(weights))
    total = jaxnorm.linear_cross_entropy(
        x.reshape(*labels.shape, x.shape[-1]).astype(product_dtype),
        w.astype(product_dtype),
        labels,
        weights=weights,
        **kwargs,
    )
    assert isinstance(total, jax.Array)
    return total if scale == 1 else total * np.asarray(scale, total.dtype)


# ---- a quick look ----


def has_large_logits(closed) -> bool:
    """Whether a program takes maxima, as each softmax does, along what may be the classes of a large product.

    What another product reads, in any order of dimensions, is no operand of a loss alone, but of backward code or of
    attention.
    """
    eqns = [*every_equation(open_jaxpr(closed)[0].eqns)]
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    maxima = set()
    for eqn in eqns:
        if eqn.primitive.name == "reduce_max":
            shape = eqn.invars[0].aval.shape
            maxima.add((_size(shape), _size([shape[d] for d in eqn.params["axes"]])))
    read = collections.Counter(_long_dimensions(v) for eqn in products for v in eqn.invars)
    for eqn in products:
        aval, dimensions = eqn.outvars[0].aval, _long_dimensions(eqn.outvars[0])
        size = _size(aval.shape)
        alone = read[dimensions] == [*map(_long_dimensions, eqn.invars)].count(dimensions)
        has_maxima = any((size, classes) in maxima for classes in _may_be_classes(eqn))
        if alone and has_maxima and size * aval.dtype.itemsize >= MIN_BYTES:
            return True
    return False


def _may_be_classes(product) -> Iterator[int]:
    """For each operand of a product, the size of the dimensions that it alone has."""
    for v, *shared in zip(product.invars, *product.params["dimension_numbers"], strict=True):
        dims = {d for some in shared for d in some}
        yield _size([n for d, n in enumerate(v.aval.shape) if d not in dims])


def _long_dimensions(variable) -> tuple:
    """Sizes of dimensions, equal for arrays that differ in their order and in dimensions of size 1 alone."""
    return tuple(sorted((n for n in variable.aval.shape if n != 1), key=str))


def _size(shape) -> int:
    """How many elements an array has; 0 where that is not known."""
    return math.prod(shape) if all(isinstance(n, int) for n in shape) else 0
