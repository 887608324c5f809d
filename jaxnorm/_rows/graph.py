"""The graph of a row program: each node is one number per element, per row, per column or at all.

A node has no shape. It knows whether it differs from row to row (`row`) and from column to column (`column`), so that
broadcasts and reshapes are nothing. Equal nodes are the same object. A node's `level` is how many row reductions must
have ended before it can be computed.
"""

import dataclasses
from typing import Any

import numpy as np

FLOAT: np.dtype = np.dtype(np.float32)
DOUBLE: np.dtype = np.dtype(np.float64)
BOOL: np.dtype = np.dtype(bool)
INT: np.dtype = np.dtype(np.int32)
UINT: np.dtype = np.dtype(np.uint32)

COMMUTATIVE = {"add", "mul", "max", "min", "eq", "ne", "and", "or", "xor"}

# Attribute of a function whose value is one number a row: it is computed as functions of elements are.
AS_ELEMENT = "as element"

# What one element costs, in instructions.
COSTS = {
    "literal": 0,
    "input": 1.2,
    "exp": 4,
    "local_exp": 4,
    "exp2": 2,
    "log": 6,
    "tanh": 12,
    "logistic": 9,
    "erf": 25,
    "rsqrt": 5,
    "sqrt": 6,
    "div": 6,
    "random": 90,
    "log1p": 15,
    "expm1": 15,
    "pow": 20,
    "sin": 20,
    "cos": 20,
    "rem": 20,
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One operation of the graph.

    Attributes:
      number: in the order of construction; arguments come first.
      op: what is computed.
      args: the nodes that it is computed from.
      attr: what else the operation needs to know.
      dtype: in which it is computed; float16, bfloat16 and float8 values are float32 here.
      row: whether it differs from row to row.
      column: whether it differs from column to column.
      level: number of row reductions, one after the other, that it needs.
      after: whether it needs a sum over rows, so that it is computed by the finishing kernel.
    """

    number: int
    op: str
    args: tuple["Node", ...]
    attr: Any
    dtype: np.dtype
    row: bool
    column: bool
    level: int
    after: bool

    def __repr__(self) -> str:
        args = ", ".join(f"n{a.number}" for a in self.args)
        return f"n{self.number} = {self.op}({args}{'' if self.attr is None else f'; {self.attr}'})"

    @property
    def floating(self) -> bool:
        return self.dtype.kind == "f"

    @property
    def cost(self) -> float:
        return COSTS.get(self.op, 1)


def is_literal(node: Node, value=None) -> bool:
    return node.op == "literal" and (value is None or node.attr == value)


def is_extreme(node: Node) -> bool:
    """Whether a node is a literal without which a product may overflow or vanish."""
    return is_literal(node) and not 2**-20 <= abs(node.attr) <= 2**20


def _is_normal(value: float, dtype) -> bool:
    """Whether a dtype has all digits of a number."""
    info = np.finfo(dtype)
    return value == 0 or float(info.tiny) <= abs(value) <= float(info.max)


def stored(number, dtype) -> np.ndarray:
    """A number as arrays of a dtype have it: the -1e9 of a mask is -inf in float16."""
    with np.errstate(over="ignore"):
        return np.asarray(number).astype(dtype)


class Graph:
    """Makes nodes. The constructors below simplify what costs more than it needs to."""

    def __init__(self, width: int):
        self.width = width  # columns of a panel: a value is a list of panels, each a node
        self._nodes: dict[tuple, Node] = {}

    def find(self, op, args=(), attr=None, dtype=FLOAT) -> Node | None:
        """The node, if it was made before."""
        return self._nodes.get(self._key(op, tuple(args), attr, np.dtype(dtype)))

    def _key(self, op, args, attr, dtype):
        return op, tuple(a.number for a in args), repr(attr), dtype

    def node(
        self, op, args=(), attr=None, dtype=FLOAT, *, row=None, column=None, level=None
    ) -> Node:
        args = tuple(args)
        if op in COMMUTATIVE and args[0].number > args[1].number:
            args = args[::-1]
        key = self._key(op, args, attr, np.dtype(dtype))
        if key not in self._nodes:
            self._nodes[key] = Node(
                number=len(self._nodes),
                op=op,
                args=args,
                attr=attr,
                dtype=np.dtype(dtype),
                row=any(a.row for a in args) if row is None else row,
                column=any(a.column for a in args) if column is None else column,
                level=max((a.level for a in args), default=0) if level is None else level,
                after=op == "row_sum" or any(a.after for a in args),
            )
        return self._nodes[key]

    def again(self, node: Node, args) -> Node:
        """The same operation on other arguments."""
        if node.op == "reduce":
            return self.reduction(node.attr[0], args, node.attr)
        if node.op == "row_sum":
            return self.node("row_sum", args, node.attr, node.dtype, row=True, column=node.column)
        return self.node(node.op, args, node.attr, node.dtype) if node.args else node

    def literal(self, value, dtype=FLOAT) -> Node:
        dtype = np.dtype(dtype)
        number = float(value) if dtype.kind == "f" else bool(value) if dtype == BOOL else int(value)
        return self.node("literal", (), number, dtype)

    # ---- arithmetic ----

    def add(self, a: Node, b: Node) -> Node:
        if a.floating:
            for x, y in ((a, b), (b, a)):
                if is_literal(x, 0):
                    return y
                if is_literal(x, 1) and (double := self._one_and_tanh(y)) is not None:
                    return double
            if is_literal(a) and is_literal(b):
                return self.literal(a.attr + b.attr, a.dtype)
            if a is b:
                return self.mul(a, self.literal(2, a.dtype))
            if b.op == "neg":
                return self.sub(a, b.args[0])
            if a.op == "neg":
                return self.sub(b, a.args[0])
        return self.node("add", (a, b), dtype=a.dtype)

    def _one_and_tanh(self, node: Node) -> Node | None:
        """1 + tanh(u) = 2 logistic(2u), where a node is tanh(u): one function fewer, and exact in the tail."""
        two = self.literal(2, node.dtype)
        if node.op == "tanh":
            (u,) = node.args
            return self.mul(two, self.node("logistic", (self.mul(two, u),), dtype=u.dtype))
        if node.op == "sub" and is_literal(node.args[1], 1):
            double = node.args[0]
            if (
                double.op == "mul"
                and two in double.args
                and any(a.op == "logistic" for a in double.args)
            ):
                return double
        return None

    def sub(self, a: Node, b: Node) -> Node:
        if a.floating and is_literal(b, 0):
            return a
        if a.floating and is_literal(a) and is_literal(b):
            return self.literal(a.attr - b.attr, a.dtype)
        return self.node("sub", (a, b), dtype=a.dtype)

    def neg(self, a: Node) -> Node:
        if a.floating:
            if a.op == "neg":
                return a.args[0]
            if is_literal(a):
                return self.literal(-a.attr, a.dtype)
            if a.op == "mul":
                for x, y in (a.args, a.args[::-1]):
                    if is_literal(x):
                        return self.mul(self.literal(-x.attr, a.dtype), y)
        return self.node("neg", (a,), dtype=a.dtype)

    def mul(self, a: Node, b: Node) -> Node:
        if not a.floating:
            return self.node("mul", (a, b), dtype=a.dtype)
        if is_literal(a) and is_literal(b):
            return self.literal(a.attr * b.attr, a.dtype)
        for x, y in ((a, b), (b, a)):
            if is_literal(x, 1):
                return y
            if is_literal(x, -1):
                return self.neg(y)
            if is_literal(x) and y.op == "mul":
                for u, v in (y.args, y.args[::-1]):
                    if is_literal(u) and _is_normal(u.attr * x.attr, a.dtype):
                        return self.mul(self.literal(u.attr * x.attr, a.dtype), v)
        for x, y in ((a, b), (b, a)):
            # Factors of a row stay together: r * (s * element) = (r * s) * element, one product per element.
            if not x.column and y.op == "mul" and y.column and not y.after:
                for u, v in (y.args, y.args[::-1]):
                    if not u.column and not (is_literal(x) and is_literal(u)):
                        return self.mul(self.mul(x, u), v)
        return self.node("mul", (a, b), dtype=a.dtype)

    def div(self, a: Node, b: Node) -> Node:
        if a.floating:
            if is_literal(b) and b.attr and np.isfinite(1 / b.attr):
                return self.mul(a, self.literal(1 / b.attr, a.dtype))
            if a.column and not b.column:
                return self.mul(a, self.node("div", (self.literal(1, b.dtype), b), dtype=b.dtype))
        return self.node("div", (a, b), dtype=a.dtype)

    def exp(self, a: Node) -> Node:
        # exp(x - log(sum exp x)) = exp(x) / sum exp x: softmax behind log_softmax needs no second exponential.
        if a.op == "sub" and a.args[1].op == "log":
            total = a.args[1].args[0]
            if total.op == "reduce" and total.attr[0] == "sum":
                e = self.node("exp", (a.args[0],), dtype=a.dtype)
                if e in total.args:
                    return self.div(e, total)
        return self.node("exp", (a,), dtype=a.dtype)

    def select(self, condition: Node, yes: Node, no: Node) -> Node:
        if yes is no or is_literal(condition, True):
            return yes
        if is_literal(condition, False):
            return no
        return self.node("select", (condition, yes, no), dtype=yes.dtype)

    def convert(self, a: Node, dtype) -> Node:
        dtype = np.dtype(dtype)
        if a.dtype == dtype:
            return a
        if is_literal(a) and (dtype.kind == "f" or a.dtype.kind in "iub"):
            return self.literal(stored(np.asarray(a.attr, a.dtype), dtype).item(), dtype)
        return self.node("convert", (a,), dtype=dtype)

    def is_at(self, label: Node, offset: int) -> Node:
        """Whether an element's column, counted from `offset`, is the row's label."""
        return self.node("eq", (self.iota(offset, label.dtype), label), dtype=BOOL)

    def iota(self, offset: int, dtype) -> Node:
        return self.node("iota", (), offset, dtype, column=True)

    # ---- reductions along the row ----

    def reduction(self, kind: str, nodes, attr=None) -> Node:
        nodes = tuple(nodes)
        level = max(n.level for n in nodes) + 1
        return self.node(
            "reduce",
            nodes,
            attr or (kind,),
            INT if kind == "count" else nodes[0].dtype,
            row=any(n.row for n in nodes),
            column=False,
            level=level,
        )

    def reduce(self, kind: str, panels) -> Node:
        """The reduction of a row that consists of these panels."""
        if kind == "sum" and panels[0].floating:
            return self._sum(panels)
        if not any(n.column for n in panels):
            return self._reduce_constants(kind, panels)
        return self.reduction(kind, panels)

    def _reduce_constants(self, kind, panels) -> Node:
        result: Any = None
        for panel in panels:
            if kind == "sum":
                panel = self.mul(panel, self.literal(self.width, panel.dtype))
            elif kind == "product":
                panel = self.node("integer_pow", (panel,), self.width, panel.dtype)
            if result is None:
                result = panel
            else:
                op = {"sum": "add", "product": "mul"}.get(kind, kind)
                result = (
                    self.add(result, panel)
                    if op == "add"
                    else self.node(op, (result, panel), dtype=panel.dtype)
                )
        return result

    def _sum(self, panels) -> Node:
        """A sum is linear: factors of the row come out, and terms are summed by themselves where that ends earlier."""
        groups: dict[tuple, tuple[Node, list[Node]]] = {}
        for panel in panels:
            seen: dict[int, int] = {}
            for factor, core in self._terms(panel):
                # At most one core of each panel per reduction: two of one panel are not one sum.
                nth = seen[factor.number] = seen.get(factor.number, -1) + 1
                groups.setdefault((factor.number, nth), (factor, []))[1].append(core)
        result: Any = None
        for factor, cores in groups.values():
            total = self.literal(0, factor.dtype)
            for core in cores:
                if not core.column:
                    total = self.add(total, self.mul(core, self.literal(self.width, core.dtype)))
            varying = [c for c in cores if c.column]
            if varying:
                total = self.add(total, self.reduction("sum", varying))
            total = self.mul(factor, total)
            result = total if result is None else self.add(result, total)
        return result

    def _factors(self, node) -> tuple[Node, Node]:
        """(factor that is constant along the row, the rest)."""
        one = self.literal(1, node.dtype)
        if not node.column:
            return node, one
        if node.op == "mul" and not any(map(is_extreme, node.args)):
            (c, a), (d, b) = map(self._factors, node.args)
            return self.mul(c, d), self.mul(a, b)
        if node.op == "neg":
            c, a = self._factors(node.args[0])
            return self.neg(c), a
        return one, node

    def _terms(self, node) -> list[tuple[Node, Node]]:
        """(factor of the row, core) whose products' sum is this node's sum over a panel."""
        factor, core = self._factors(node)
        value = self._at_label(core)
        if value is not None:
            return [(self.mul(factor, value), self.literal(1 / self.width, core.dtype))]
        opened = None
        if core.level > 0 and core.op in ("add", "sub") and not _is_shift(core):
            opened = core, self.literal(1, core.dtype)
        elif core.level > 0 and core.op == "mul":
            for x, rest in (core.args, core.args[::-1]):
                if (
                    x.op in ("add", "sub")
                    and x.level == core.level > rest.level
                    and not _is_shift(x)
                ):
                    opened = x, rest
                    break
        if opened is not None:
            total, rest = opened
            first = self._terms(self.mul(total.args[0], rest))
            second = self._terms(self.mul(total.args[1], rest))
            if total.op == "sub":
                second = [(self.neg(c), x) for c, x in second]
            # Worth it only where every part can be summed earlier than the whole.
            if max((x.level for _, x in first + second if x.column), default=0) < core.level:
                return [(self.mul(factor, c), x) for c, x in first + second]
        return [(factor, core)]

    def _at_label(self, core) -> Node | None:
        """The one element of a row that is not 0, where a label selects it; None for other nodes."""
        if core.op != "select" or not is_literal(core.args[2], 0):
            return None
        condition = core.args[0]
        if condition.op != "eq":
            return None
        iota, label = condition.args if condition.args[0].op == "iota" else condition.args[::-1]
        if iota.op != "iota" or label.column:
            return None
        value = core.args[1]
        if value.column:
            value = self.at(value, label) if iota.attr == 0 else None
        if value is None:
            return None
        first = self.literal(iota.attr, label.dtype)
        last = self.literal(iota.attr + self.width - 1, label.dtype)
        inside = self.node(
            "and",
            (
                self.node("ge", (label, first), dtype=BOOL),
                self.node("le", (label, last), dtype=BOOL),
            ),
            dtype=BOOL,
        )
        return self.select(inside, value, self.literal(0, core.dtype))

    def at(self, node: Node, label: Node) -> Node | None:
        """`node` at the row's column number `label`: one element is loaded, no row is scanned. None if that fails."""
        if not node.column:
            return node
        if node.op == "input":
            number, panel, backwards = node.attr
            if backwards:
                label = self.convert(label, np.promote_types(label.dtype, np.int32))
                label = self.sub(self.literal(self.width - 1, label.dtype), label)
            return self.node(
                "input_at", (label,), (number, panel), node.dtype, row=True, column=False
            )
        if node.op == "iota":
            return label if node.attr == 0 and node.dtype == label.dtype else None
        if not node.args or node.op in ("reduce", "row_sum", "random"):
            return None
        args = [self.at(a, label) for a in node.args]
        return None if None in args else self.node(node.op, args, node.attr, node.dtype)

    def reversed(self, node: Node) -> Node | None:
        """`node` with the panel's columns in reverse order. None if that fails."""
        if not node.column:
            return node
        if node.op == "input":
            number, panel, backwards = node.attr
            return self.node(
                "input", (), (number, panel, not backwards), node.dtype, row=node.row, column=True
            )
        if node.op == "iota":
            top = self.literal(2 * node.attr + self.width - 1, node.dtype)
            return self.node("sub", (top, node), dtype=node.dtype)
        if not node.args or node.op in ("reduce", "row_sum", "random"):
            return None
        args = [self.reversed(a) for a in node.args]
        return None if None in args else self.node(node.op, args, node.attr, node.dtype)


def _is_shift(node) -> bool:
    """Whether this is x - mean: opened inside a sum, it would cancel badly where the mean is large."""
    return any(not a.column and a.level for a in node.args) and all(
        a.level == 0 for a in node.args if a.column
    )
