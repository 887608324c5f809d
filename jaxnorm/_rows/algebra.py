"""The same results by fewer reductions and instructions; the graph's constructors do what is local."""

import collections
import functools
import math

from jaxnorm._rows import draws, moments
from jaxnorm._rows.graph import AS_ELEMENT, FLOAT, Graph, Node, is_extreme, is_literal
from jaxnorm._rows.rules import Program

# Rows of so many bytes and more are read once where a maximum and a sum of exponentials can be one pass. In shorter
# rows, which stay on chip, the second exponential costs more than the second reduction.
ONE_PASS_BYTES = 40 * 1024
# The same limit for rows that lie side by side: fewer bytes of a row stay on chip, because many rows are there at once.
ONE_PASS_SIDE_BY_SIDE = 32 * 1024
# In rows of fewer columns, functions that wait for the maximum of their arguments cost more time than they save.
MAXIMA_FIRST_COLUMNS = 2048


def simplify(program: Program) -> Program:
    """The program that schedules are made for."""
    if program.width >= MAXIMA_FIRST_COLUMNS or program.neighbours != 1:
        program = _maxima_of_arguments(program)
    program = _factor_elements(_share_logistic(_draw_by_bits(program)))
    wholes = [i for i in program.inputs.values() if i.whole]
    row_bytes = sum(i.panels * program.width * i.dtype.itemsize for i in wholes)
    if row_bytes > (ONE_PASS_BYTES if program.neighbours == 1 else ONE_PASS_SIDE_BY_SIDE):
        program = _one_pass(program)
    return _collect(moments.in_one_exchange(program))


def _draw_by_bits(program: Program) -> Program:
    graph = program.graph

    def rule(node, args):
        new = graph.again(node, args)
        return draws.compared_as_bits(graph, new) or new

    return program.rewritten(rule)


def _factor_elements(program: Program) -> Program:
    """Literals of a product as one; common factors of a sum taken out, as in derivatives: g s + g u t = g (s + u t).

    What several nodes read stays as it is.
    """
    while True:
        factored = _factored_once(program)
        if _cost(_results(factored), everywhere=True) >= _cost(_results(program), everywhere=True):
            return program
        program = factored


def _factored_once(program: Program) -> Program:
    graph, before = program.graph, _readers(_results(program), everywhere=True)
    readers: collections.Counter = collections.Counter()

    def rule(node, args):
        new = graph.again(node, args)
        if new.column and not new.after:
            new = _collected(graph, new, readers, opens=False)
        readers[new] += before[node]
        return new

    return program.rewritten(rule)


def _results(program: Program) -> list[Node]:
    return [n for output in program.outputs for n in output.nodes]


INCREASING = {"tanh", "logistic", "erf", "exp", "exp2", "expm1"}


def _maxima_of_arguments(program: Program) -> Program:
    """The maximum of f(x) as f(the maximum of x) for increasing f: f is computed once a row. Also minima."""
    graph = program.graph

    def rule(node, args):
        if node.op != "reduce" or node.attr not in (("max",), ("min",)) or not node.floating:
            return graph.again(node, args)
        functions = []  # the outermost first
        while all(_is_increasing(a) for a in args):
            function = {(a.op, *(x.number for x in a.args if not x.column)) for a in args}
            if len(function) > 1:
                break
            functions.append(args[0])
            args = [next(x for x in a.args if x.column) for a in args]
        result = graph.again(node, args)
        for f in reversed(functions):
            args = [result if x.column else x for x in f.args]
            # Computed as the elements are, so that no element lies above the maximum.
            result = graph.node(f.op, args, AS_ELEMENT if len(args) == 1 else None, f.dtype)
        return result

    return program.rewritten(rule)


def _is_increasing(node) -> bool:
    """Whether a node is an increasing function of one element, defined for each number."""
    if not node.column or not node.floating or any(a.dtype != node.dtype for a in node.args):
        return False
    if node.op in INCREASING:
        return True
    if node.op == "mul":
        return any(is_literal(a) and 0 < a.attr < math.inf for a in node.args)
    if node.op == "add" or (node.op == "sub" and node.args[0].column):
        return any(is_literal(a) and abs(a.attr) < math.inf for a in node.args)
    return False


def _share_logistic(program: Program) -> Program:
    """tanh(u) beside logistic(2u), which 1 + tanh(u) has become: 2 logistic(2u) - 1, one function for both."""
    graph = program.graph

    def logistic_beside(u):
        double = graph.mul(graph.literal(2, u.dtype), u)
        return graph.find("logistic", (double,), None, u.dtype)

    def rule(node, args):
        one = graph.literal(1, node.dtype)
        if node.op == "tanh" and (logistic := logistic_beside(args[0])) is not None:
            return graph.sub(graph.mul(graph.literal(2, node.dtype), logistic), one)
        if node.op == "sub" and node.floating and is_literal(node.args[0], 1):
            tanh = node.args[1]
            squared = tanh.op == "mul" and tanh.args[0] is tanh.args[1]
            tanh = tanh.args[0] if squared else tanh
            if tanh.op == "tanh" and (logistic := logistic_beside(tanh.args[0])) is not None:
                # 1 - (2 s - 1) = 2 (1 - s), and 1 - (2 s - 1)^2 = 4 s (1 - s)
                rest = graph.sub(one, logistic)
                if squared:
                    return graph.mul(graph.literal(4, node.dtype), graph.mul(logistic, rest))
                return graph.mul(graph.literal(2, node.dtype), rest)
        return graph.again(node, args)

    return program.rewritten(rule)


# ---- one pass over long rows ----


def _one_pass(program: Program) -> Program:
    """Sums of exp(x - max) * h beside the maximum: each thread sums with its own maximum, the combination rescales.

    Reductions "sum_below_max" and "distance_below_max" belong to a maximum of the same phase, whose node is in their
    attribute. `local_exp(x)` is exp(x - the thread's maximum), `local_distance(x)` is x - the thread's maximum.
    """
    graph = program.graph

    def rule(node, args):
        if (
            node.op == "reduce"
            and node.attr == ("sum",)
            and node.level == 2
            and node.dtype == FLOAT
        ):
            products = [_products(graph, a) for a in node.args]
            if None not in products:
                return _sums_below_max(
                    graph, [p for panel in products for p in _merged(graph, panel)]
                )
        return graph.again(node, args)

    return program.rewritten(rule)


def _is_max(node) -> bool:
    return node.op == "reduce" and node.attr == ("max",) and node.level == 1


def _maximum(node) -> Node | None:
    """The row's maximum, if a node is the maximum, or the maximum with a finite number in place of -inf."""
    if (
        node.op == "select"
        and node.args[0].op == "eq"
        and is_literal(node.args[0].args[1], -math.inf)
    ):
        tested, finite, kept = node.args[0].args[0], *node.args[1:]
        if tested is kept and is_literal(finite) and math.isfinite(finite.attr):
            node = kept
    return node if _is_max(node) else None


def _maximum_below(exponential) -> Node:
    """The maximum that exp(x - maximum) is below."""
    maximum = _maximum(exponential.args[0].args[1])
    assert maximum is not None
    return maximum


def _products(graph: Graph, node: Node):
    """[(factor of the row, exponential or None, element of phase 0 or None), ...] whose sum is the node, or None."""
    one = graph.literal(1, node.dtype) if node.floating else None
    if one is None:
        return None
    if not node.column:
        return [(node, None, None)]
    if node.level == 0:
        return [(one, None, node)]
    if node.op == "exp" and node.args[0].op == "sub":
        x, shift = node.args[0].args
        if x.level == 0 and _maximum(shift):
            return [(one, node, None)]
    if node.op == "neg":
        inner = _products(graph, node.args[0])
        return inner and [(graph.neg(c), e, h) for c, e, h in inner]
    if node.op in ("add", "sub"):
        # x - mean is not opened; a shift by a maximum is.
        if any(not a.column and a.level and not _maximum(a) for a in node.args):
            return None
        first, second = (_products(graph, a) for a in node.args)
        if first is None or second is None:
            return None
        sign = graph.neg if node.op == "sub" else lambda c: c
        return first + [(sign(c), e, h) for c, e, h in second]
    if node.op == "mul":
        return _product_of(graph, *(_products(graph, a) for a in node.args))
    return None


def _product_of(graph, first, second):
    if (
        first is None
        or second is None
        or min(len(first), len(second)) > 1
        or len(first) * len(second) > 6
    ):
        return None
    result = []
    for c, e, h in first:
        for d, f, k in second:
            if e is not None and f is not None:
                return None
            element = k if h is None else h if k is None else graph.mul(h, k)
            result.append((graph.mul(c, d), e if f is None else f, element))
    return result


def _merged(graph, products):
    """exp(x - m) * x - m * exp(x - m) as one product exp(x - m) * (x - m), which loses no digits where m is large."""
    merged, taken = [], []
    for product in products:
        c, e, h = product
        if e is not None and h is not None and is_literal(c, 1):
            x, shift = e.args[0].args
            minus = (graph.neg(shift), e, None)
            if h is x and minus in products:
                merged.append((c, e, DISTANCE))
                taken.append(minus)
                continue
        merged.append(product)
    return [p for p in merged if p not in taken]


DISTANCE = "distance"  # in place of an element: x - max, where the exponential is exp(x - max)


def _sums_below_max(graph, products) -> Node:
    """One reduction for each factor and maximum."""
    groups: dict[tuple, list] = {}
    for c, e, h in products:
        maximum = None if e is None else _maximum_below(e).number
        groups.setdefault((c.number, maximum, h == DISTANCE), []).append((c, e, h))
    totals = []
    for (_, maximum, distance), products in groups.items():
        factor = products[0][0]
        if maximum is None:
            total = graph.reduce(
                "sum", [graph.literal(1, factor.dtype) if h is None else h for _, _, h in products]
            )
        else:
            total = _sum_below_max(graph, [(e, h) for _, e, h in products], distance)
        totals.append(graph.mul(factor, total))
    return functools.reduce(graph.add, totals)


def _sum_below_max(graph, products, distance) -> Node:
    maximum = _maximum_below(products[0][0])

    def reduction(cores, *attr):
        dtype = cores[0].dtype
        return graph.node("reduce", cores, attr, dtype, row=True, column=False, level=1)

    elements = [e.args[0].args[0] for e, _ in products]
    exponentials = [graph.node("local_exp", (x,), maximum, x.dtype) for x in elements]
    if distance:
        cores = [
            graph.node(
                "mul", (e, graph.node("local_distance", (x,), maximum, x.dtype)), None, x.dtype
            )
            for e, x in zip(exponentials, elements, strict=True)
        ]
        # A change of the maximum moves a multiple of this sum into the sum of distances.
        weight = reduction(exponentials, "sum_below_max", maximum)
        return reduction(cores, "distance_below_max", maximum, weight)
    cores = [
        e if h is None else graph.node("mul", (e, h), None, e.dtype)
        for e, (_, h) in zip(exponentials, products, strict=True)
    ]
    return reduction(cores, "sum_below_max", maximum)


# ---- results as sums of products ----


def _collect(program: Program) -> Program:
    """Results as sums of (value of the row) * (product of elements), with equal products merged.

    The factors of merged products are added once a row, and a factor of several products is taken out.
    (x - r) * y is opened only where x is already shifted: x - mean stays whole. So does x - r in a sum: where both are
    large, r + s would lose the digits of a small s.
    """
    graph, readers = program.graph, _readers(_results(program))

    def nodes_of(output):
        return [
            _collected(graph, n, readers, opens=True) if n.column and not n.after else n
            for n in output.nodes
        ]

    return program.with_nodes(nodes_of)


def _collected(graph, node, readers, opens):
    """The node as a sum of products, if that costs less. What others read, too, stays whole."""
    if not node.floating or node.op not in ("add", "sub", "mul"):
        return node
    shared = {n.number for n, count in _readers([node]).items() if readers[n] > count}
    products: dict[tuple, tuple[Node, list[Node]]] = {}
    for factor, elements in _terms(graph, node, shared, opens):
        key = tuple(sorted(e.number for e in elements))
        known = products.get(key)
        products[key] = (graph.add(known[0], factor) if known else factor, elements)
    if len(products) > 8:
        return node
    rebuilt = _factored(graph, list(products.values()))
    return rebuilt if _cost([rebuilt]) < _cost([node]) else node


def _terms(graph, node, shared, opens, depth=0):
    """[(factor of the row, elements), ...]: the node is the sum of their products."""
    # A sum with a literal stays whole, too: (x + 2^23) - 2^23 rounds x.
    whole = node.number in shared or _is_shift(node) or any(map(is_literal, node.args))
    if node.op in ("add", "sub") and node.column and not whole:
        first, second = (_terms(graph, a, shared, opens, depth) for a in node.args)
        if node.op == "sub":
            second = [(graph.neg(c), e) for c, e in second]
        return first + second
    factor, elements = _factors(graph, node, shared)
    for i, x in enumerate(elements):
        if (
            opens
            and len(elements) > 1
            and depth < 3
            and x.op in ("add", "sub")
            and any(not a.column for a in x.args)
            and max(a.level for a in x.args if a.column) > 0
        ):
            rest = elements[:i] + elements[i + 1 :]
            return [
                (graph.mul(factor, c), e + rest)
                for c, e in _terms(graph, x, shared, opens, depth + 1)
            ]
    return [(factor, elements)]


def _is_shift(node) -> bool:
    """Whether this is x - r or x + r: an element of no reduction, and a value of the row."""
    return any(not a.column and not is_literal(a) for a in node.args) and all(
        a.level == 0 for a in node.args if a.column
    )


def _factors(graph, node, shared):
    if not node.column:
        return node, []
    if node.op == "mul" and node.number not in shared and not any(map(is_extreme, node.args)):
        (c, a), (d, b) = (_factors(graph, x, shared) for x in node.args)
        return graph.mul(c, d), a + b
    if node.op == "neg":
        c, a = _factors(graph, node.args[0], shared)
        return graph.neg(c), a
    return graph.literal(1, node.dtype), [node]


def _factored(graph, terms):
    """The sum of these products, with the factor that most of them have taken out."""
    sizes = {abs(c.attr) if is_literal(c) else None for c, _ in terms}
    if len(terms) > 1 and len(sizes) == 1 and sizes.isdisjoint({None, 0.0, 1.0}):
        (scale,) = sizes
        signs = [(graph.literal(math.copysign(1, c.attr), c.dtype), e) for c, e in terms]
        total = _factored(graph, signs)
        return graph.mul(graph.literal(scale, total.dtype), total)
    counts: dict[int, list] = {}
    for _, elements in terms:
        for e in {e.number: e for e in elements}.values():
            counts.setdefault(e.number, [e, 0])[1] += 1
    common, count = max(counts.values(), key=lambda c: c[1], default=(None, 0))
    if common is not None and count >= 2:
        inner, outer = [], []
        for c, elements in terms:
            if common in elements:
                place = elements.index(common)
                inner.append((c, elements[:place] + elements[place + 1 :]))
            else:
                outer.append((c, elements))
        scale, rest = _scale(graph, _factored(graph, inner))
        product = graph.mul(scale, graph.node("mul", (common, rest), None, common.dtype))
        return graph.add(product, _factored(graph, outer)) if outer else product
    result = None
    for c, elements in sorted(terms, key=lambda t: bool(t[1])):
        term = c
        if elements:
            product = None
            for e in sorted(elements, key=lambda e: e.number):
                product = e if product is None else graph.mul(product, e)
            # Not graph.mul: it would move the factor into the product.
            term = product if is_literal(c, 1) else graph.node("mul", (c, product), None, c.dtype)
            if is_literal(c, -1):
                term = graph.neg(product)
        result = term if result is None else graph.add(result, term)
    return result


def _scale(graph, node):
    """(a literal, the rest) whose product a node is."""
    if node.op == "mul":
        for x, rest in (node.args, node.args[::-1]):
            if is_literal(x):
                return x, rest
    return graph.literal(1, node.dtype), node


def _cost(nodes, everywhere=False) -> float:
    """Instructions for an element."""
    return sum(n.cost for n in _readers(nodes, everywhere) if n.column)


def _readers(nodes, everywhere=False) -> collections.Counter:
    """How often nodes are read to compute the given ones, without what a row has by itself, or everywhere."""
    counts: collections.Counter = collections.Counter()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        counts[node] += 1
        if counts[node] == 1 and (node.column or everywhere):
            stack += node.args
    return counts
