"""softmax and log_softmax: exp(z - max(z)) / sum(exp(z - max(z))), and its logarithm."""

import math
from collections.abc import Iterator

from jaxnorm._autofuse.algebra import Mismatch, Ref, expand, unmasked, whole
from jaxnorm._autofuse.match import Left, Match, Operand, outside_of_calls
from jaxnorm._autofuse.patterns import norm
from jaxnorm._autofuse.program import Value
from jaxnorm._autofuse.values import Node, at_least, compose, identity


def find(output: Value) -> Iterator[Match | Left]:
    """Ways to read `output` as a softmax, the one that takes most of the program first."""
    result = whole(output.view.node).unconverted()
    for log in (False, True):
        inner, outer_mask = unmasked(result, -math.inf if log else 0.0)
        parts = (_logarithm if log else _quotient)(inner)
        if parts is None:
            continue
        numerator, denominator = parts
        total = denominator.unconverted()
        if total.node.op != "reduce_sum":
            continue
        summed, sum_mask = unmasked(whole(total.node.args[0].node), 0.0)
        if summed.unconverted().node.op != "exp":
            continue
        masks = outer_mask, sum_mask
        try:
            yield from _softmax(output, numerator, summed.unconverted(), total, masks, log)
        except Mismatch as mismatch:
            name = "log_softmax" if log else "softmax"
            yield Left(name, total.node, mismatch.reason, mismatch.rank)


candidates = outside_of_calls(find)


def _quotient(ref: Ref) -> tuple[Ref, Ref] | None:
    """(numerator, denominator) of a quotient in any spelling."""
    ref = ref.unconverted()
    if ref.node.op not in ("mul", "div"):
        return None
    terms = expand(ref)
    if len(terms) != 1 or terms[0].coefficient != 1 or len(terms[0].powers) != 2:
        return None
    powers = {int(e): ref for ref, e in terms[0].powers if abs(e) == 1}
    return (powers[1], powers[-1]) if len(powers) == 2 else None


def _logarithm(ref: Ref) -> tuple[Ref, Ref] | None:
    """(s, d) of s - log(d)."""
    ref = ref.unconverted()
    if ref.node.op != "sub" or ref.arg(1).unconverted().node.op != "log":
        return None
    return ref.arg(0), ref.arg(1).unconverted().arg(0)


def _softmax(output, numerator: Ref, exponential: Ref, total: Ref, masks, log) -> Iterator[Match]:
    core = total.node
    outer_mask, sum_mask = masks
    numerator, numerator_mask = unmasked(numerator, 0.0)
    shifted = numerator.unconverted()
    if not log:
        if shifted.node.op != "exp":
            return
        if shifted.node.key != exponential.node.key:
            raise Mismatch("the numerator is not what the denominator sums")
        shifted = shifted.arg(0).unconverted()
    elif shifted.node.key != exponential.arg(0).node.key:
        raise Mismatch(
            "the logarithm is not that of the sum of the exponentials of what it is taken from"
        )
    if shifted.node.op != "sub":
        raise Mismatch("no maximum is subtracted: this overflows where softmax does not")

    # Dimensions: `exponential` has those of the sum's argument, `shifted` those of the result.
    to_result = _alignment(exponential, shifted)
    axes = dict(total.node.params)["axes"]
    left = [d for d in identity(total.node.args[0].node) if d not in axes]
    if to_result is None or total.dims != tuple(to_result[d] for d in left):
        raise Mismatch("numerator and denominator do not have the same rows")
    summed_over = {to_result[a] for a in axes}

    z, subtracted = shifted.arg(0), shifted.arg(1)
    maximum = subtracted.unconverted()
    if maximum.node.op == "stop_gradient":
        maximum = maximum.arg(0).unconverted()
    if maximum.node.op != "reduce_max":
        raise Mismatch("what is subtracted from the exponents is not their maximum")
    over = maximum.node.args[0].node
    if over.key != z.node.key:
        raise Mismatch(
            "the maximum is not that of the exponents: another array, or behind a stop_gradient"
        )
    max_axes = dict(maximum.node.params)["axes"]
    if {z.dims[a] for a in max_axes} != summed_over:
        raise Mismatch("the maximum is over other axes than the sum")
    if maximum.dims != tuple(d for i, d in enumerate(z.dims) if i not in max_axes):
        raise Mismatch("the maximum is that of other rows than the sum")
    if set(z.dims) != set(range(len(output.view.node.shape))):
        raise Mismatch("the exponents are broadcast")

    def in_result(mask):
        return mask and mask.meaning

    # Masks of the sum, the other way round: in the dimensions of the result.
    if sum_mask is not None:
        sum_mask = Ref(sum_mask.node, compose(to_result, sum_mask.dims))
    inner, z_mask = unmasked(z, -math.inf)
    given = {in_result(m) for m in (outer_mask, sum_mask, numerator_mask, z_mask)} - {None}
    where = None
    if outer_mask is not None:
        if z_mask is None or len(given) > 1:
            raise Mismatch("the mask of the result is not that of the exponents")
        z, where = inner, z_mask
    elif sum_mask is not None or numerator_mask is not None:
        raise Mismatch("a mask is on the sum, or on the exponentials, and not on the result")
    is_norm = any(isinstance(found, Match) for found in norm.find(output, z))
    fronts = _front(z, output.aval.dtype) if not is_norm else [(z.unwidened(), {}, {})]
    for x, options, others in fronts:
        place = {d: i for i, d in enumerate(x.dims)}

        def as_operand(ref: Ref, place=place):
            return Operand.of(Ref(ref.node, compose(_mapping(place), ref.dims)))

        operands = {name: as_operand(ref) for name, ref in others.items()}
        if where is not None:
            operands["where"] = as_operand(where)
        axes_of_x = tuple(sorted(place[d] for d in summed_over))
        operation = "log_softmax" if log else "softmax"
        yield Match(operation, output, x, operands, axes_of_x, options, core)


def _mapping(place: dict) -> tuple:
    return tuple(place[d] for d in range(len(place)))


def _alignment(exponential: Ref, shifted: Ref) -> tuple | None:
    """The dimensions of `exponential` as those that `shifted` is in."""
    inner = exponential.arg(0).unconverted()
    if inner.node.key != shifted.node.key or sorted(inner.dims) != list(range(len(inner.dims))):
        return None
    place = {d: i for i, d in enumerate(inner.dims)}
    return tuple(shifted.dims[place[d]] for d in range(len(inner.dims)))


def _front(z: Ref, dtype) -> Iterator[tuple[Ref, dict, dict[str, Ref]]]:
    """(x, options, operands) with z = x * scale + bias; in the end (z, nothing)."""

    def scaled(ref):
        """(x, factor) of a product with a number."""
        inner = ref.unconverted()
        if inner.node.op == "mul":
            for i in (0, 1):
                factor = inner.arg(i).node.constant
                if factor is not None:
                    return inner.arg(1 - i).unwidened(), factor
        return ref.unwidened(), None

    def is_bias(ref: Ref, x: Ref):
        return (
            _is_array(ref.node) and at_least(dtype, ref.node.dtype) and set(ref.dims) <= set(x.dims)
        )

    inner = z.unconverted()
    if inner.node.op == "add":
        pairs = [(inner.arg(i), inner.arg(1 - i).unwidened()) for i in (0, 1)]
        # The array that bias broadcasts to is x; of two whole ones, the one that is scaled.
        pairs.sort(key=lambda p: (-len(p[0].dims), scaled(p[0])[1] is None))
        for summand, bias in pairs[:1]:
            x, factor = scaled(summand)
            if is_bias(bias, x) and len(x.dims) == len(z.dims):
                yield x, {} if factor is None else {"scale": factor}, {"bias": bias}
    x, factor = scaled(z)
    if factor is not None:
        yield x, {"scale": factor}, {}
    yield z.unwidened(), {}, {}


def _is_array(node: Node) -> bool:
    return node.constant is None
