"""Comparisons of uniform numbers with literals, as comparisons of the random bits: dropout draws by one instruction.

`jax.random.uniform` shifts random bits to where the digits of a float lie, gives them the exponent of [1, 2), and
subtracts 1. The number grows with the bits, so a comparison of the number with a literal holds up to one pattern of
bits, or from it on.
"""

import operator

import numpy as np

from jaxnorm._rows.graph import BOOL, DOUBLE, FLOAT, Graph, Node, is_literal

COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
# Functions of a number and a literal that grow, or stay, as the number grows.
INCREASING = {"add": operator.add, "sub": operator.sub, "max": max, "min": min}
# By the dtype of the number: the dtype of the bits, their shift, and the exponent of [1, 2).
FORMATS = {FLOAT: (np.uint32, 9, 0x3F800000), DOUBLE: (np.uint64, 12, 0x3FF0000000000000)}


def compared_as_bits(graph: Graph, node: Node) -> Node | None:
    """The same comparison of random bits, where a node compares a uniform number with a literal."""
    if node.op not in COMPARISONS or not any(is_literal(a) for a in node.args):
        return None
    literal_first = is_literal(node.args[0])
    limit, number = node.args if literal_first else node.args[::-1]
    compare = COMPARISONS[MIRRORED[node.op] if literal_first else node.op]
    dtype = number.dtype
    steps = []
    while number.op in INCREASING and dtype in FORMATS:
        literal = next((a for a in number.args if is_literal(a) and np.isfinite(a.attr)), None)
        if literal is None or (number.op == "sub" and literal is number.args[0]):
            return None
        steps.append((INCREASING[number.op], dtype.type(literal.attr)))
        number = next(a for a in number.args if a is not literal)
    bits = _bits(number)
    if bits is None:
        return None
    unsigned, shift, exponent = FORMATS[dtype]

    def holds(pattern) -> bool:
        value = unsigned(exponent | pattern >> shift).view(dtype)
        for function, literal in reversed(steps):
            value = function(value, literal)
        return bool(compare(value, dtype.type(limit.attr)))

    # The first pattern for which the comparison is another one than for 0.
    of_zero, patterns = holds(0), 1 << 8 * dtype.itemsize
    first, end = 0, patterns
    while end - first > 1:
        middle = (first + end) // 2
        first, end = (middle, end) if holds(middle) == of_zero else (first, middle)
    if end == patterns:
        return graph.literal(of_zero, BOOL)
    return graph.node("lt" if of_zero else "ge", (bits, graph.literal(end, unsigned)), None, BOOL)


def _bits(node: Node) -> Node | None:
    """The random bits that a float in [1, 2) is made of."""
    if node.op != "bitcast" or node.dtype not in FORMATS or node.args[0].op != "or":
        return None
    unsigned, shift, exponent = FORMATS[node.dtype]
    digits = next((a for a in node.args[0].args if not is_literal(a)), None)
    if digits is None or not any(is_literal(a, exponent) for a in node.args[0].args):
        return None
    if digits.op != "shift_right_logical" or not is_literal(digits.args[1], shift):
        return None
    bits = digits.args[0]
    return bits if bits.op == "random" and bits.dtype == unsigned else None
