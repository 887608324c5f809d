"""What each operation of `jax.lax` is in the graph of a row program. What is not here is refused, not guessed."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxnorm._primitive.programs import cached_by_program
from jaxnorm._rows.dimensions import label_dimension, looks_into_one
from jaxnorm._rows.equations import Constant, Equation, NotARowProgram, Value, flatten
from jaxnorm._rows.graph import BOOL, DOUBLE, FLOAT, INT, UINT, Graph, Node, is_literal
from jaxnorm._rows.view import Layout, View

FLOAT8 = {np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)}
STORED = {
    *FLOAT8,
    np.dtype(ml_dtypes.bfloat16),
    *(np.dtype(t) for t in ("float16", "float32", "float64", "bool")),
    *(np.dtype(f"{s}int{n}") for s in ("", "u") for n in (8, 16, 32, 64)),
}


@dataclasses.dataclass(frozen=True)
class Input:
    """An operand of the kernel.

    Attributes:
      number: of the program's input.
      dtype: in which it is stored.
      layout: where its elements lie.
      panels: how many panels its row has.
      whole: whether it has all rows and columns, so that most of what is read is such operands.
    """

    number: int
    dtype: np.dtype
    layout: Layout
    panels: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class Output:
    """A result of the kernel.

    Attributes:
      number: of the program's output.
      dtype: in which it is stored.
      layout: where its elements lie.
      nodes: its panels, or one node if it has no columns.
      shape: of the array.
    """

    number: int
    dtype: np.dtype
    layout: Layout
    nodes: tuple[Node, ...]
    shape: tuple

    @property
    def after(self) -> bool:
        """Whether it is a sum over rows, or computed from one."""
        return any(n.after for n in self.nodes)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A row program.

    Attributes:
      graph: of its nodes.
      inputs: the operands that are used.
      outputs: the results.
      row_sizes: of the row dimensions, outermost first.
      sources: where their sizes can be read: see `View.sources`.
      count: number of inputs, used or not.
      neighbours: rows that lie side by side: see `View.neighbours`.
    """

    graph: Graph
    inputs: dict[int, Input]
    outputs: tuple[Output, ...]
    row_sizes: tuple
    sources: tuple
    count: int
    neighbours: int = 1

    @property
    def width(self) -> int:
        return self.graph.width

    def with_nodes(self, nodes_of) -> "Program":
        """The same program with other nodes for each output: `nodes_of(output)`."""
        outputs = tuple(dataclasses.replace(o, nodes=tuple(nodes_of(o))) for o in self.outputs)
        return dataclasses.replace(self, outputs=outputs)

    def rewritten(self, rule) -> "Program":
        """The same program with all nodes rebuilt.

        `rule(node, args)` returns what takes the place of a node whose arguments became `args`.
        """
        done: dict[int, Node] = {}

        def new(node):
            if node.number not in done:
                done[node.number] = rule(node, [new(a) for a in node.args])
            return done[node.number]

        return self.with_nodes(lambda output: [new(n) for n in output.nodes])


def program_of(closed, row_sums: bool = True) -> Program:
    """The row program of a jaxpr.

    Args:
      closed: a closed jaxpr.
      row_sums: whether it may have sums over rows, which are gradients of what rows share.

    Raises:
      NotARowProgram: if it is none.
    """
    return _Builder(closed, row_sums).program()


class _Builder:
    """Reads the equations one by one; `panels` maps each value to its nodes."""

    def __init__(self, closed, row_sums):
        self.equations = flatten(closed)
        for equation in self.equations.equations:
            if equation.primitive not in RULES:
                raise equation.refuse(_hint(equation))
            for result in equation.outputs:
                dtype = result.aval.dtype
                if isinstance(dtype, np.dtype) and dtype not in STORED:
                    raise equation.refuse(f"has a result of {dtype}, which kernels do not compute")
        self.view = View(self.equations, row_sums)
        self.row_sums = row_sums
        self._order_rows()
        self.graph = Graph(self.view.width)
        self.panels: dict[Value, tuple[Node, ...]] = {}
        self.inputs: dict[int, Input] = {}

    def _order_rows(self):
        """Row dimensions that sums keep come first: the rows of one sum then follow each other."""
        kept = set()
        for equation in self.equations.equations:
            if equation.primitive == "reduce_sum" and self.row_sums:
                rows = self._reduced_rows(equation)
                if rows and not self.view.side_by_side <= rows:
                    raise equation.refuse(
                        "is over some of the rows that lie side by side; gradients of what rows share need all of them"
                    )
                if rows:
                    kept.add(frozenset(range(len(self.view.row_sizes))) - rows)
        order: list[int] = []
        for dims in sorted(kept, key=len):
            if not set(order) <= dims:
                raise NotARowProgram(
                    "sums over rows",
                    "keep different row dimensions, none of which contains the other",
                )
            order += sorted(dims - set(order))
        self.view.move_first(tuple(order))

    def _reduced_rows(self, equation) -> frozenset:
        kinds = self.view.kinds(equation.inputs[0])
        return frozenset(k for i in equation.params["axes"] for k in kinds[i] if k != "column")

    def program(self) -> Program:
        used = {v for e in self.equations.equations for v in e.inputs} | set(self.equations.outputs)
        for number, value in enumerate(self.equations.inputs):
            if value in used:
                self._bind(number, value)
        for equation in self.equations.equations:
            rule = RULES[equation.primitive]
            results = rule(self, equation, *map(self.read, equation.inputs))
            if len(equation.outputs) == 1:
                results = [results]
            for value, panels in zip(equation.outputs, results, strict=True):
                self.panels[value] = tuple(panels)
        outputs = tuple(self._output(n, v) for n, v in enumerate(self.equations.outputs))
        self._check_sums(outputs)
        return Program(
            self.graph,
            self.inputs,
            outputs,
            self.view.row_sizes,
            self.view.sources,
            len(self.equations.inputs),
            self.view.neighbours,
        )

    def _check_sums(self, outputs):
        """Sums over rows come last: they meet nothing but what differs in the row dimensions that they keep."""
        for output in outputs:
            if not output.after:
                continue
            kept, stack, seen = set(output.layout.rows), list(output.nodes), set()
            while stack:
                node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                if node.op == "row_sum":
                    fits = set(node.attr[0]) == kept
                else:
                    stack += node.args
                    fits = node.op not in ("reduce", "random") and self._rows_of(node) <= kept
                if not fits:
                    raise NotARowProgram(
                        f"result {output.number}",
                        "mixes a sum over rows with what each row has by itself",
                    )

    def _rows_of(self, node) -> set:
        """Row dimensions in which a node without arguments differs."""
        if node.op in ("input", "input_at", "key"):
            return set(self.inputs[node.attr[0]].layout.rows)
        return {node.attr} if node.op == "row_index" else set()

    def _bind(self, number, value):
        dtype = np.dtype(value.aval.dtype)
        if dtype not in STORED:
            raise NotARowProgram(
                f"argument {number}",
                f"has dtype {dtype}, which kernels do not load",
                argument=number,
            )
        layout = self.view.stored(value)
        whole = layout.columns is not None and len(layout.strides) == len(self.view.row_sizes)
        panels = layout.columns // self.view.width if layout.columns is not None else 1
        if layout.bits:
            dtype = BOOL
        self.inputs[number] = Input(number, dtype, layout, panels, whole)
        self.panels[value] = tuple(
            self.graph.node(
                "input",
                (),
                (number, panel, False),
                compute_dtype(dtype),
                row=bool(layout.strides),
                column=layout.columns is not None,
            )
            for panel in range(panels)
        )

    def _output(self, number, value) -> Output:
        dtype = np.dtype(value.aval.dtype)
        if dtype not in STORED:
            raise NotARowProgram(
                f"result {number}", f"has dtype {dtype}, which kernels do not store"
            )
        if isinstance(value, Constant):
            layout = Layout((), None)
        else:
            layout = self.view.stored(value)
        nodes = self.lift(self.read(value), self.count(value))
        # Storing rounds anyway.
        nodes = tuple(n.args[0] if n.op == "round" and n.attr == dtype.name else n for n in nodes)
        if layout.columns is None and any(n.column for n in nodes):
            raise NotARowProgram(f"result {number}", "has no columns but depends on them")
        return Output(
            number, BOOL if layout.bits else dtype, layout, nodes, tuple(value.aval.shape)
        )

    # ---- for rules ----

    def read(self, value) -> tuple[Node, ...]:
        if isinstance(value, Constant):
            return (self.graph.literal(np.asarray(value.number), compute_dtype(value.aval.dtype)),)
        return self.panels[value]

    def count(self, value) -> int:
        """How many panels an array has."""
        columns = None if isinstance(value, Constant) else self.view.layout(value).columns
        return 1 if columns is None else columns // self.view.width

    def lift(self, panels, count) -> tuple[Node, ...]:
        """As many panels, if there is one that is constant along the row."""
        return tuple(panels) * count if len(panels) == 1 else tuple(panels)


def compute_dtype(dtype) -> np.dtype:
    """The dtype in which values of a stored dtype are computed."""
    dtype = np.dtype(dtype)
    if dtype in STORED:
        is_short = dtype in FLOAT8 or (dtype.itemsize == 2 and dtype.kind not in "iu")
        return FLOAT if is_short else dtype
    raise NotARowProgram(f"a value of dtype {dtype}", "is not something that kernels compute")


def _hint(equation: Equation) -> str:
    along = (
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "sort",
        "top_k",
        "reduce_precision",
    )
    if equation.primitive in ("dot_general", "conv_general_dilated"):
        return (
            "is a matrix product, which rows do not share. Compute it outside of the fused function"
        )
    if equation.primitive in along:
        return "runs along the row step by step. Compute it outside of the fused function"
    if equation.primitive in ("scan", "while", "cond"):
        return "is control flow. Fuse the function that it runs instead"
    return "is not an operation that row programs have. Compute it outside of the fused function"


# ---- rules: (builder, equation, panels of each operand) -> panels of the result ----

RULES = {}


def _rule(*names):
    def add(function):
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def _elementwise(make):
    """A rule for operations that compute each element from the operands' elements at the same place."""

    def rule(builder, equation, *operands):
        count = max(map(len, operands))
        dtype = compute_dtype(equation.outputs[0].aval.dtype)
        lifted = [builder.lift(o, count) for o in operands]
        return [make(builder.graph, dtype, equation, *nodes) for nodes in zip(*lifted, strict=True)]

    return rule


def _same_op(name):
    return _elementwise(lambda graph, dtype, equation, *nodes: graph.node(name, nodes, None, dtype))


_FUNCTIONS = """abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clz cos cosh erf erf_inv erfc exp2 expm1
    floor is_finite lgamma log log1p logistic min nextafter not or population_count pow rem rsqrt sign sin sinh sqrt
    tan tanh xor eq ne lt le gt ge""".split()
RULES |= {name: _same_op(name) for name in _FUNCTIONS}
RULES |= {
    "shift_left": _same_op("shift_left"),
    "shift_right_logical": _same_op("shift_right_logical"),
    "shift_right_arithmetic": _same_op("shift_right_arithmetic"),
    "add": _elementwise(lambda graph, dtype, equation, a, b: graph.add(a, b)),
    "add_any": _elementwise(lambda graph, dtype, equation, a, b: graph.add(a, b)),
    "sub": _elementwise(lambda graph, dtype, equation, a, b: graph.sub(a, b)),
    "mul": _elementwise(lambda graph, dtype, equation, a, b: graph.mul(a, b)),
    "div": _elementwise(lambda graph, dtype, equation, a, b: graph.div(a, b)),
    "neg": _elementwise(lambda graph, dtype, equation, a: graph.neg(a)),
    "exp": _elementwise(lambda graph, dtype, equation, a: graph.exp(a)),
    "square": _elementwise(lambda graph, dtype, equation, a: graph.mul(a, a)),
}


@_rule("max")
@_elementwise
def _max(graph, dtype, equation, a, b):
    for x, y in ((a, b), (b, a)):
        if is_literal(x, -math.inf):
            return y
    return graph.node("max", (a, b), None, dtype)


@_rule("clamp")
@_elementwise
def _clamp(graph, dtype, equation, low, x, high):
    return graph.node("min", (graph.node("max", (x, low), None, dtype), high), None, dtype)


@_rule("round")
@_elementwise
def _round(graph, dtype, equation, x):
    to_even = equation.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return graph.node("round_to_even" if to_even else "round_from_zero", (x,), None, dtype)


@_rule("integer_pow")
@_elementwise
def _integer_pow(graph, dtype, equation, x):
    exponent = abs(equation.params["y"])
    if exponent <= 8:
        result = graph.literal(1, dtype)
        for _ in range(exponent):
            result = graph.mul(result, x) if result.op != "literal" else x
    else:
        result = graph.node("integer_pow", (x,), exponent, dtype)
    return graph.div(graph.literal(1, dtype), result) if equation.params["y"] < 0 else result


@_rule("one_minus_square")
@_elementwise
def _one_minus_square(graph, dtype, equation, x):
    return graph.sub(graph.literal(1, dtype), graph.mul(x, x))


@_rule("select_n")
@_elementwise
def _select_n(graph, dtype, equation, which, *cases):
    if which.dtype == BOOL:
        return graph.select(which, cases[-1], cases[0])
    result = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        this = graph.node("le", (which, graph.literal(number, which.dtype)), None, BOOL)
        result = graph.select(this, cases[number], result)
    return result


@_rule("convert_element_type")
@_elementwise
def _convert(graph, dtype, equation, x):
    new = np.dtype(equation.params["new_dtype"])
    if new in FLOAT8:
        return graph.node("round", (graph.convert(x, FLOAT),), new.name, FLOAT)
    return graph.convert(x, dtype)


@_rule("bitcast_convert_type")
@_elementwise
def _bitcast(graph, dtype, equation, x):
    source, new = equation.inputs[0].aval.dtype, np.dtype(equation.params["new_dtype"])
    if source.itemsize != new.itemsize or {source, new} & (FLOAT8 | STORED_AS_FLOAT32):
        raise equation.refuse(
            f"from {source} to {new}: row programs reinterpret numbers of 32 or 64 bits only"
        )
    return graph.node("bitcast", (x,), None, dtype) if x.dtype != dtype else x


STORED_AS_FLOAT32 = {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)}


@_rule("reduce_precision")
@_elementwise
def _reduce_precision(graph, dtype, equation, x):
    bits = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    names = {(8, 7): "bfloat16", (5, 10): "float16", (4, 3): "float8_e4m3fn", (5, 2): "float8_e5m2"}
    own = (11, 52) if x.dtype == DOUBLE else (8, 23)
    if bits == own:
        return x
    if bits[0] == own[0] and bits[1] < own[1] and bits not in names:
        return graph.node("round", (x,), f"mantissa<{bits[1]}>", dtype)
    if x.dtype != FLOAT or bits not in names:
        raise equation.refuse(f"to {bits[0]} and {bits[1]} bits is not a format that kernels have")
    return graph.node("round", (x,), names[bits], FLOAT)


@_rule(
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "sharding_constraint",
    "pvary", "pcast", "name", "reshard", "mesh_cast", "stop_gradient", "jaxnorm_pack_bits", "jaxnorm_unpack_bits",
)  # fmt: skip
def _moved(builder, equation, source, *_):
    return builder.lift(source, builder.count(equation.outputs[0])) if len(source) == 1 else source


@_rule("optimization_barrier")
def _barrier(builder, equation, *operands):
    if len(operands) == 1:
        return operands[0]
    return operands


# ---- along the row ----


def _column_dim(builder, equation, value, dims, what):
    """Checks that a change of these dimensions is along the row."""
    for dim in dims:
        if builder.view.kinds(value)[dim] != ["column"]:
            raise equation.refuse(
                f"{what} rows; only the last axis of the row can be cut or joined"
            )


@_rule("slice")
def _slice(builder, equation, source):
    value, width = equation.inputs[0], builder.graph.width
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    changed = [i for i, n in enumerate(value.aval.shape) if not (starts[i] == 0 and limits[i] == n)]
    _column_dim(builder, equation, value, changed, "cuts")
    if not changed:
        return source
    panels = builder.lift(source, builder.count(value))
    return panels[starts[changed[0]] // width : limits[changed[0]] // width]


@_rule("split")
def _split(builder, equation, source):
    value = equation.inputs[0]
    _column_dim(builder, equation, value, [equation.params["axis"]], "cuts")
    panels, results, first = builder.lift(source, builder.count(value)), [], 0
    for size in equation.params["sizes"]:
        last = first + size // builder.graph.width
        results.append(panels[first:last])
        first = last
    return results if len(results) > 1 else results[0]


@_rule("concatenate")
def _concatenate(builder, equation, *operands):
    _column_dim(builder, equation, equation.outputs[0], [equation.params["dimension"]], "joins")
    parts = zip(equation.inputs, operands, strict=True)
    dim = equation.params["dimension"]
    return [
        node
        for value, panels in parts
        for node in builder.lift(panels, value.aval.shape[dim] // builder.graph.width)
    ]


@_rule("pad")
def _pad(builder, equation, source, padding):
    config = equation.params["padding_config"]
    changed = [i for i, c in enumerate(config) if any(c)]
    if not changed:
        return source
    source_value, result = equation.inputs[0], equation.outputs[0]
    # One column has no axis of its own.
    whole = source_value if result.aval.shape[changed[0]] == 1 else result
    _column_dim(builder, equation, whole, changed, "pads")
    low, high, _ = config[changed[0]]
    width = builder.graph.width
    # One column is a panel where panels are one column wide.
    inner = builder.lift(source, source_value.aval.shape[changed[0]] // width)
    inner = inner[max(0, -low) // width : len(inner) - max(0, -high) // width]
    return [*padding * (max(0, low) // width), *inner, *padding * (max(0, high) // width)]


@_rule("rev")
def _rev(builder, equation, source):
    value = equation.inputs[0]
    dims = [i for i in equation.params["dimensions"] if value.aval.shape[i] != 1]
    _column_dim(builder, equation, value, dims, "reverses")
    if not dims:
        return source
    panels = [
        builder.graph.reversed(n) for n in reversed(builder.lift(source, builder.count(value)))
    ]
    if None in panels:
        raise equation.refuse("reverses what is not computed element by element from the arguments")
    return panels


@_rule("iota")
def _iota(builder, equation):
    graph, value = builder.graph, equation.outputs[0]
    dtype, dim = compute_dtype(equation.params["dtype"]), equation.params["dimension"]
    kinds, layout = builder.view.kinds(value)[dim], builder.view.layout(value)
    strides = dict(layout.strides)
    inner = math.prod(n for n in value.aval.shape[dim + 1 :])
    integer = INT if dtype.kind == "f" else dtype
    rows = graph.literal(0, integer)
    for kind in kinds:
        if kind != "column":
            index = graph.node("row_index", (), kind, integer, row=True, column=False)
            step = graph.literal(strides[kind] // (inner or 1), integer)
            term = index if is_literal(step, 1) else graph.node("mul", (index, step), None, integer)
            rows = term if is_literal(rows, 0) else graph.node("add", (rows, term), None, integer)
    if "column" not in kinds:
        return [graph.convert(rows, dtype)]
    columns = [graph.iota(q * graph.width, integer) for q in range(builder.count(value))]
    step = graph.literal(layout.step // (inner or 1), integer)
    if not is_literal(step, 1):
        columns = [graph.node("mul", (c, step), None, integer) for c in columns]
    if not is_literal(rows, 0):
        columns = [graph.node("add", (c, rows), None, integer) for c in columns]
    return [graph.convert(c, dtype) for c in columns]


# ---- reductions ----


def _reduce_rule(kind):
    def rule(builder, equation, source):
        graph, value = builder.graph, equation.inputs[0]
        kinds = builder.view.kinds(value)
        axes = [k for i in equation.params["axes"] for k in kinds[i]]
        rows = [k for k in axes if k != "column"]
        if not axes:
            return source
        if not rows:
            return [graph.reduce(kind, builder.lift(source, builder.count(value)))]
        if kind != "sum" or not builder.row_sums:
            raise equation.refuse(
                "is over rows; rows share nothing but their parameters' gradients"
            )
        return _sum_over_rows(builder, equation, source, rows, "column" in axes)

    return rule


def _sum_over_rows(builder, equation, source, rows, columns_too):
    graph, value = builder.graph, equation.inputs[0]
    if not any(n.row for n in source) and not columns_too:
        sizes = math.prod(builder.view.row_sizes[k] for k in rows)
        return [graph.mul(n, graph.literal(sizes, n.dtype)) for n in source]
    if any(n.after for n in source):
        raise equation.refuse("is a sum over rows of a sum over rows")
    layout = builder.view.layout(value)
    kept = tuple(sorted(k for k in layout.rows if k not in rows))
    missing = [k for k in range(len(builder.view.row_sizes)) if k not in layout.rows]
    if missing:
        # The kernel sums over all rows, which repeat this value.
        raise equation.refuse("sums what does not differ in all row dimensions")
    if not source[0].floating:
        raise equation.refuse(f"sums {source[0].dtype} over rows; gradients are floats")
    if columns_too:
        panels = builder.lift(source, builder.count(value))
        return [
            graph.node("row_sum", panels, (kept, True), panels[0].dtype, row=True, column=False)
        ]
    return [
        graph.node("row_sum", (n,), (kept, False), n.dtype, row=True, column=n.column)
        for n in source
    ]


RULES |= {
    "reduce_sum": _reduce_rule("sum"),
    "reduce_max": _reduce_rule("max"),
    "reduce_min": _reduce_rule("min"),
    "reduce_prod": _reduce_rule("product"),
    "reduce_or": _reduce_rule("or"),
    "reduce_and": _reduce_rule("and"),
}


@_rule("argmax", "argmin")
def _arg(builder, equation, source):
    """The first column that holds the extreme value; a NaN is the extreme, as in XLA."""
    graph, value = builder.graph, equation.inputs[0]
    dtype = np.dtype(equation.params["index_dtype"])
    kinds = [k for i in equation.params["axes"] for k in builder.view.kinds(value)[i]]
    if kinds and kinds != ["column"]:
        raise equation.refuse("is over rows; rows share nothing but their parameters' gradients")
    if not kinds:
        return [graph.literal(0, dtype)]
    panels = builder.lift(source, builder.count(value))
    top = graph.reduce("max" if equation.primitive == "argmax" else "min", panels)
    none = graph.literal(np.iinfo(dtype).max, dtype)

    def candidate(panel, number):
        hit = graph.node("eq", (panel, top), None, BOOL)
        if panel.floating:
            hit = graph.node("or", (hit, graph.node("ne", (panel, panel), None, BOOL)), None, BOOL)
        return graph.select(hit, graph.iota(number * graph.width, dtype), none)

    return [graph.reduction("min", [candidate(p, i) for i, p in enumerate(panels)])]


# ---- one label per row ----


def _label(builder, equation, indices):
    """The label of a gather or scatter, whose dimension numbers the view has checked."""
    if builder.view.kinds(equation.inputs[0])[label_dimension(equation)] != ["column"]:
        raise equation.refuse(
            "must take one element of each row: jnp.take_along_axis(x, labels[..., None], axis=-1)"
        )
    return indices[0]


def _fill(equation):
    """What a gather returns for a label that is no class."""
    fill, aval = equation.params["fill_value"], equation.outputs[0].aval
    if fill is not None:
        return fill
    if jnp.issubdtype(aval.dtype, np.inexact):
        return np.nan
    return np.iinfo(aval.dtype).min if aval.dtype.kind == "i" else 0


@_rule("gather")
def _gather(builder, equation, source, indices):
    graph, value = builder.graph, equation.inputs[0]
    if looks_into_one(equation):
        if "FILL" not in str(equation.params["mode"]):
            return source
        index = indices[0]
        first = graph.node("eq", (index, graph.literal(0, index.dtype)), None, BOOL)
        fill = graph.literal(_fill(equation), source[0].dtype)
        return [graph.select(first, p, fill) for p in source]
    label = _label(builder, equation, indices)
    panels = builder.lift(source, builder.count(value))
    columns, mode = len(panels) * graph.width, str(equation.params["mode"])
    first, last = graph.literal(0, label.dtype), graph.literal(columns - 1, label.dtype)
    place = label
    if "FILL" not in mode:
        place = graph.node(
            "min", (graph.node("max", (label, first), None, label.dtype), last), None, label.dtype
        )
    found = graph.at(panels[0], place) if len(panels) == 1 else None
    if found is None:
        zero = graph.literal(0, panels[0].dtype)
        hits = [
            graph.select(graph.is_at(place, q * graph.width), p, zero) for q, p in enumerate(panels)
        ]
        found = graph.reduction("or" if zero.dtype == BOOL else "sum", hits)
    if "FILL" not in mode:
        return [found]
    inside = graph.node(
        "and",
        (graph.node("ge", (label, first), None, BOOL), graph.node("le", (label, last), None, BOOL)),
        None,
        BOOL,
    )
    fill = _fill(equation)
    return [graph.select(inside, found, graph.literal(fill, found.dtype))]


@_rule("scatter-add")
def _scatter_add(builder, equation, source, indices, updates):
    graph = builder.graph
    if "CLIP" in str(equation.params["mode"]):
        raise equation.refuse("must not clip its labels")
    if looks_into_one(equation):
        panels = builder.lift(source, builder.count(equation.outputs[0]))
        updates = builder.lift(updates, len(panels))
        index = indices[0]
        first = graph.node("eq", (index, graph.literal(0, index.dtype)), None, BOOL)
        zero = graph.literal(0, updates[0].dtype)
        return [
            graph.add(p, graph.select(first, u, zero)) for p, u in zip(panels, updates, strict=True)
        ]
    label = _label(builder, equation, indices)
    panels = builder.lift(source, builder.count(equation.outputs[0]))
    zero = graph.literal(0, updates[0].dtype)
    return [
        graph.add(p, graph.select(graph.is_at(label, q * graph.width), updates[0], zero))
        for q, p in enumerate(panels)
    ]


# ---- random bits ----


@_rule("random_wrap")
def _random_wrap(builder, equation, words):
    if "fry" not in str(getattr(equation.params["impl"], "name", equation.params["impl"])):
        raise equation.refuse("is of another generator than JAX's default, threefry2x32")
    number = next(
        (n for n, v in enumerate(builder.equations.inputs) if v is equation.inputs[0]), None
    )
    if number is None:
        raise equation.refuse("is made in the program; pass keys as arguments")
    row = bool(builder.inputs[number].layout.strides)
    return [
        builder.graph.node("key", (), (number, word), UINT, row=row, column=False)
        for word in (0, 1)
    ]


@_rule("random_bits")
def _random_bits(builder, equation, key):
    graph, value, width = builder.graph, equation.outputs[0], equation.params["bit_width"]
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise equation.refuse("needs jax_threefry_partitionable, which is JAX's default")
    if isinstance(equation.inputs[0], Constant) or len(key) != 2:
        raise equation.refuse("needs a key that is an argument of the fused function")
    # The generator counts the elements that one key makes.
    keys = {k for dim in builder.view.kinds(equation.inputs[0]) for k in dim}
    layout = builder.view.layout(value)
    strides = tuple((k, stride) for k, stride in layout.strides if k not in keys)
    step = layout.step
    dtype, words = np.dtype(f"uint{width}"), np.dtype(np.uint64 if width == 64 else np.uint32)
    row, column = bool(layout.strides), layout.columns is not None
    return [
        graph.convert(
            graph.node(
                "random",
                key,
                (strides, q * graph.width * step, step),
                words,
                row=row,
                column=column,
            ),
            dtype,
        )
        for q in range(builder.count(value))
    ]


cached_program_of = cached_by_program(program_of)
