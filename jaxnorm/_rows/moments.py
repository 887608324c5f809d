"""The mean and the variance of layer_norm in one exchange instead of two: reductions that `emit_moments` computes.

Only elements of at most 16 bits that are an operand's are changed. Their mean is then rounded to float32 before it is
subtracted, by at most 2^-13 of the distance between two neighbouring elements of its size.
"""

from jaxnorm._rows.graph import Node, is_literal
from jaxnorm._rows.rules import Program


def in_one_exchange(program: Program) -> Program:
    """The program with reductions "mean" and "squares_about_mean" in place of the sums of layer_norm's formula.

    That formula is exact where a mean is large. With a rough mean p, d = x - p and r = mean(d), the mean is p + r,
    x - mean is d - r, and the variance is mean(d^2) - r^2.
    """
    graph, use = program.graph, _Uses(program)
    replaced: dict[Node, Node] = {}
    for x in [n for n in use.readers if n.op == "input" and n.column]:
        operand = program.inputs[x.attr[0]]
        if operand.dtype.itemsize > 2 or not x.floating or operand.layout.bits:
            continue
        for p, d, r in use.rough_means(x):
            mean = graph.reduction("mean", [x], ("mean", graph.reduction("count", [x])))
            squares = graph.reduction("squares_about_mean", [x], ("squares_about_mean", mean))
            variance = graph.mul(graph.literal(1 / graph.width, x.dtype), squares)
            variances = use.reading_variance(d, r)
            if variances:
                replaced |= dict.fromkeys(variances, variance)
                replaced |= dict.fromkeys(use.reading("add", p, r), mean)
                replaced |= dict.fromkeys(use.reading("sub", d, r), graph.sub(x, mean))
    if not replaced:
        return program
    return program.rewritten(lambda n, args: replaced.get(n) or graph.again(n, args))


class _Uses:
    """What reads each node of a program. A result has itself among its readers."""

    def __init__(self, program: Program):
        self.width = program.width
        stack, seen = [n for output in program.outputs for n in output.nodes], set()
        self.readers: dict[Node, list[Node]] = {n: [n] for n in stack}
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                for a in dict.fromkeys(node.args):
                    self.readers.setdefault(a, []).append(node)
                    stack.append(a)

    def rough_means(self, x) -> list[tuple[Node, Node, Node]]:
        """[(p, x - p, mean(x - p)), ...], where p is a rounded mean of x."""
        rounded = [p for m in self.means(x) for p in self.readers[m] if p.op == "round"]
        shifted = [(p, d) for p in rounded for d in self.reading("sub", x, p)]
        return [(p, d, r) for p, d in shifted for r in self.means(d)]

    def reading_variance(self, d, r) -> list[Node]:
        """The nodes that compute mean(d^2) - r^2."""
        squares, of_mean = self.reading("mul", d, d), self.reading("mul", r, r)
        means = [m for square in squares for m in self.means(square)]
        return [v for m in means for square in of_mean for v in self.reading("sub", m, square)]

    def reading(self, op, a, b) -> list[Node]:
        """The nodes that compute `op` of a and b."""
        orders = ((a, b),) if op == "sub" else ((a, b), (b, a))
        return [n for n in self.readers[a] if n.op == op and n.args in orders]

    def means(self, x) -> list[Node]:
        """The products of the sum of x over a row and 1 / columns."""
        sums = [
            n for n in self.readers[x] if n.op == "reduce" and n.attr == ("sum",) and n.args == (x,)
        ]
        products = [
            (n, n.args[n.args[0] is s]) for s in sums for n in self.readers[s] if n.op == "mul"
        ]
        return [n for n, c in products if is_literal(c) and abs(c.attr * self.width - 1) < 2**-20]
