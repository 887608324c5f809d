"""Which matches are replaced.

A match is replaced in one level of the program, the innermost one that has names for all operands. It must be the same
function (dtypes, derivative rules, order), and what it computed on the way must be used by nothing else, unless the
operation returns that too.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.extend.core.primitives import convert_element_type_p

from jaxnorm import _check
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.algebra import Mismatch
from jaxnorm._autofuse.match import Left, Match
from jaxnorm._autofuse.order import in_order
from jaxnorm._autofuse.patterns import linear_cross_entropy, relu
from jaxnorm._autofuse.program import Equation, Level, Program, Value, every_equation
from jaxnorm._autofuse.values import Node, at_least, identity, is_float, unconverted, unwidened
from jaxnorm._ops import OPERATIONS
from jaxnorm._primitive.avals import varying_axes
from jaxnorm._primitive.programs import run_equation, source_line
from jaxnorm._rows.save import Node as FlatNode

# What was checked and failed says more than what did not look right.
_CHECKED = 2


def _finders() -> dict[Callable, list[str]]:
    """What finds operations, and their names.

    The last operation comes first: a cross-entropy contains a softmax, and a linear cross-entropy contains a
    cross-entropy.
    """
    found: dict[Callable, list[str]] = {linear_cross_entropy.candidates: ["linear_cross_entropy"]}
    for name, operation in reversed(OPERATIONS.items()):
        found.setdefault(operation.find, []).append(name)
    found[relu.candidates] += ["batch_norm", "batch_norm_inference"]  # with their activation
    return found


_FINDERS = _finders()
# Each pattern has an exponential, a logarithm, a maximum, a call with a derivative of its own, or a root.
_MARKS = {"custom_jvp_call", "exp", "log", "max"}
_ROOTS = {"pow", "rsqrt", "sqrt"}


def may_find(nodes: Iterable[FlatNode]) -> bool:
    """A quick look whether equations, or the bodies of some, may have anything that is worth a kernel."""
    nodes = [*nodes]
    eqns = [node.eqn for node in nodes]
    here = set(map(id, eqns))
    for eqn in every_equation(eqns):
        if id(eqn) not in here and _is_root(eqn):
            return True
        marked, arrays = eqn.primitive.name in _MARKS, (*eqn.invars, *eqn.outvars)
        if marked and _bytes(arrays) >= costs.LEAST_BYTES:
            return True
    return _spread_a_root(nodes)


def _is_root(eqn) -> bool:
    """Whether an equation has roots of an array; powers of a constant, as of rotary embeddings, are none."""
    if eqn.primitive.name not in _ROOTS:
        return False
    return not isinstance(eqn.invars[0], Literal) and _elements(eqn.invars[:1]) != 1


def _spread_a_root(nodes: Iterable[FlatNode]) -> bool:
    """Whether roots, or what is computed of them, are spread along other dimensions, as in a norm, not an optimizer."""
    roots: set[int] = set()
    for node in nodes:
        atoms = zip(node.inputs, node.eqn.invars, strict=True) if roots else ()
        reads = [v for a, v in atoms if not isinstance(a, Literal) and a in roots]
        if reads:
            read, made = _elements(reads), _elements(node.eqn.outvars)
            if made > read or read == math.inf:
                return True
        if reads or _is_root(node.eqn):
            roots.update(node.outputs)
    return False


def _elements(variables: Iterable) -> float:
    """How many elements the largest array has; infinitely many where that is not known."""
    return max((costs.elements(getattr(v.aval, "shape", ())) for v in variables), default=0)


def _bytes(variables: Iterable) -> float:
    """How many bytes the largest array has; infinitely many where that is not known."""
    dtypes = ((v, getattr(v.aval, "dtype", None)) for v in variables)
    return max((_elements([v]) * getattr(d, "itemsize", 0) for v, d in dtypes), default=0)


@dataclasses.dataclass(eq=False)
class Replacement:
    """A match that is replaced.

    Attributes:
      match: the match.
      level: where.
      region: equations that it stands for.
      results: (value, name of the result, the dimensions of x that its node's are) that it defines, the output first.
        None is for a dimension along which x is broadcast.
      sources: for each node that the operation reads, the value that holds it and its variable.
      rule: whether it is worth it.
    """

    match: Match
    level: Level
    region: list[Equation]
    sources: dict[Node, tuple[Value, Any]]
    results: list[tuple[Value, str, tuple]]
    rule: costs.Rule

    @property
    def defines(self) -> list:
        """Variables of the level."""
        return [v for value, _, _ in self.results for v in value.defined[self.level]]


# ---- deciding ----


class Plan:
    """What is replaced in a program by operations with wanted names, and what is left.

    Attributes:
      program: the program.
      replacements: in no particular order.
      left: what is not replaced, with the equation that has the reason's core.
    """

    def __init__(self, closed, wanted: Callable[[str], bool]):
        self.program = Program(closed)
        self._wanted = wanted
        self._finders = [find for find, names in _FINDERS.items() if any(map(wanted, names))]
        self._find(checked=False)
        if not self._has_order():  # rare: each replacement is checked by itself then
            self._find(checked=True)

    def _find(self, checked: bool) -> None:
        """Finds replacements; `checked` is whether each must leave an order in which the program can run."""
        self._checked = checked
        self.replacements: list[Replacement] = []
        failures: dict[Node, Left] = {}
        taken: set[Equation] = set()
        done: set[Node] = set()
        for equation, candidates in self._sites():
            if equation in taken:
                continue
            for found in candidates:
                if not self._wanted(found.operation):
                    continue
                if isinstance(found, Match):
                    try:
                        replacement = self._check(found)
                    except Mismatch as mismatch:
                        found = Left(found.operation, found.core, mismatch.reason, mismatch.rank)
                    else:
                        self.replacements.append(replacement)
                        taken.update(replacement.region)
                        done |= {e.outputs[0].view.node for e in replacement.region} | {found.core}
                        break
                before = failures.get(found.core)
                if found.rank and (before is None or found.rank > before.rank):
                    failures[found.core] = found
        self.left = [
            (left, self._equation_of(core)) for core, left in failures.items() if core not in done
        ]

    def _has_order(self) -> bool:
        levels = {id(r.level): r.level for r in self.replacements if len(r.results) > 1}
        return all(
            schedule(level, [r for r in self.replacements if r.level is level]) is not None
            for level in levels.values()
        )

    def _equation_of(self, core: Node) -> Equation | None:
        return next((v.equation for v in self.program.holding(core) if v.equation), None)

    def _sites(self) -> Iterator[tuple[Equation, Iterator[Match | Left]]]:
        """Every value that could be a result, the last one first, so that a pattern is seen before its parts."""
        for equation in reversed(self.program.equations):
            output = equation.outputs[0] if len(equation.outputs) == 1 else None
            if output is None or not is_float(output.view.node.dtype):
                continue
            for find in self._finders:
                yield equation, find(self.program, output)

    def _check(self, match: Match) -> Replacement:
        """Raises Mismatch, or says how to replace."""
        region, inputs = _region(match)
        _check_dtypes(match, region, inputs)
        level, sources = self._level(match)
        x, _ = sources[match.x.node]
        match = match.transposed(layout_of(x))
        shape = [n for n, d in zip(x.view.shape, x.view.dims, strict=True) if d is not None]
        _check_axes(match, len(shape))
        results = self._results(match, region, level)
        rule = match.rule or OPERATIONS[match.operation].rule(shape, match.axes, match.operands)
        replacement = Replacement(match, level, region, sources, results, rule)
        original_function(replacement)  # the program's own code can be told from the rest
        # Without by-products, what it defines depends on what it did before.
        if self._checked and len(results) > 1:
            here = [r for r in (*self.replacements, replacement) if r.level is level]
            if schedule(level, here) is None:
                raise Mismatch("an operand depends on what the operation would define", _CHECKED)
        return replacement

    def _level(self, match: Match) -> tuple[Level, dict]:
        levels = sorted(match.output.defined, key=_depth, reverse=True)
        refs = [ref for operand in match.operands.values() for ref in operand.refs]
        x, output = match.x, match.output.view.dims
        dims = [d for d in output if d is not None and d in x.dims]
        best = tuple(map(x.dims.index, dims))  # the order of the output's
        for level in levels:
            sources = {ref.node: _named(self.program, ref.node, level, best) for ref in refs}
            if None not in sources.values():
                break
        else:
            raise Mismatch("an operand is inside of a jit that does not return it", _CHECKED)
        return level, sources

    def _results(self, match: Match, region, level: Level):
        """What the operation defines: its output, and by-products that others use."""
        dims = match.x.dims
        inverse = tuple(
            dims.index(d) if d in dims else None for d in identity(match.output.view.node)
        )
        results = [(match.output, "output", inverse)]
        inside = set(region)
        call = _call_in(level, match.output.equation)
        if call is not None and any(_call_in(level, u) is call for u in match.output.uses):
            users = [u for u in match.output.uses if u not in inside]
            if any(_call_in(level, u) is call for u in users):
                raise Mismatch("the result is used inside of the jit that computes it", _CHECKED)
        for equation in region:
            for value in equation.outputs:
                used = value.is_output or any(u not in inside for u in value.uses)
                node = value.view.node
                if value is match.output or not used or node.constant is not None:
                    continue
                if node.op == "iota":  # made of nothing: stays where it has other uses
                    continue
                product = match.by_products(node)
                if product is None or level not in value.defined:
                    raise Mismatch(
                        f"an intermediate is used elsewhere: {_describe(equation)}", _CHECKED
                    )
                results.append((value, *product))
        return results


def _depth(level: Level) -> int:
    return 0 if level.parent is None else 1 + _depth(level.parent)


def _describe(equation: Equation) -> str:
    aval = equation.outputs[0].aval
    shape = ",".join(map(str, aval.shape))
    return f"{equation.eqn.primitive.name} -> {aval.dtype}[{shape}] at {line_of(equation.eqn, equation.level)}"


def line_of(eqn, level: Level | None) -> str:
    """The user's line: of the call, where the equation is inside of a jit that JAX itself wrote."""
    while eqn is not None and level is not None:
        line = source_line(eqn)
        if line:
            return line
        eqn, level = level.eqn, level.parent
    return "?"


def _call_in(level: Level, equation: Equation | None) -> Level | None:
    """The call of `level` that an equation is inside of."""
    inner = equation.level if equation is not None else level
    while inner is not level and inner is not None and inner.parent is not level:
        inner = inner.parent
    return None if inner is level else inner


def _region(match: Match) -> tuple[list[Equation], list[Value]]:
    """The equations between the operands and the output, and the values that come in."""
    keys = {unconverted(r.node).key for operand in match.operands.values() for r in operand.refs}
    found: dict[Equation, None] = {}
    inputs: dict[Value, None] = {}
    front = [match.output]
    while front:
        value = front.pop()
        if value.equation is None:
            raise Mismatch("it depends on a value that is no operand of the operation", _CHECKED)
        found[value.equation] = None
        for operand in value.equation.inputs:
            node = unconverted(operand.view.node)
            if node.key in keys:
                inputs[operand] = None
            elif node.constant is None and operand.equation not in found:
                front.append(operand)
    return sorted(found, key=lambda e: e.index), list(inputs)


def _check_dtypes(match: Match, region: list[Equation], inputs: list[Value]) -> None:
    result = match.output.aval.dtype
    if not at_least(result, match.x.node.dtype):
        reason = f"the result is {result}, less precise than its operand's {match.x.node.dtype}"
        raise Mismatch(reason, _CHECKED)
    if result.name not in _check.DTYPES:
        raise Mismatch(f"no operation has {result} results", _CHECKED)
    for equation in region:
        for value in equation.outputs:
            dtype = value.aval.dtype
            if value.view.node in match.rounded:
                continue
            if is_float(dtype) and not at_least(dtype, result):
                reason = f"an intermediate is rounded to {dtype}, the result is {result}: {_describe(equation)}"
                raise Mismatch(reason, _CHECKED)
    # What comes in may come in twice, as it is and rounded; the latter is used where the result is as coarse.
    versions: dict[int, set[Node]] = {}
    for value in inputs:
        node = unwidened(value.view.node)
        versions.setdefault(node.key, set()).add(node)
    for nodes in versions.values():
        if len(nodes) > 1 and not all(at_least(n.dtype, result) for n in nodes):
            raise Mismatch("an operand comes in at two precisions", _CHECKED)


def layout_of(value: Value) -> tuple[int, ...]:
    """The node's dimensions in the order of the variable's."""
    return tuple(d for d in value.view.dims if d is not None)


def _check_axes(match: Match, rank: int) -> None:
    """Of the operations that are one function of x, the one with a kernel for such axes is taken."""
    axes: tuple[int, ...] = match.axes or ()
    last = axes == tuple(range(rank - len(axes), rank))
    has_parameters = bool({"scale", "bias"} & match.operands.keys())
    if match.operation == "layer_norm" and not last and not has_parameters:
        if _neighbours([d for d in range(rank) if d not in axes]):
            raise Mismatch("batch_norm would take it, if nothing else used its intermediates", 0)
    if not match.operation.startswith("batch_norm"):
        return
    if not _neighbours(axes):
        raise Mismatch(
            f"features are dimensions {axes}: only neighbouring ones have a kernel", _CHECKED
        )
    first = axes == tuple(range(len(axes)))
    if match.operation == "batch_norm" and first and not has_parameters:
        raise Mismatch("layer_norm would take it, if nothing else used its statistics", _CHECKED)


def _neighbours(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))


def _named(program: Program, node: Node, level: Level, layout) -> tuple[Value, Any] | None:
    """(value, variable) that hold a node in a level: the least broadcast one, in the order `layout` if there is one."""
    found = [v for v in program.holding(node) if level in v.names]
    found.sort(key=lambda v: (len(v.view.dims), layout_of(v) != layout))
    return (found[0], found[0].names[level][0]) if found else None


# ---- order ----


def schedule(level: Level, replacements: list[Replacement]) -> list | None:
    """Live equations and replacements of a level, operands before their users; None if there is no such order.

    Equations keep their order where they can, those with effects always.
    """
    equations = level.jaxpr.eqns
    position: dict[int, float] = {id(e): i for i, e in enumerate(equations)}
    definer: dict[Any, Any] = {v: e for e in equations for v in e.outvars}
    for replacement in replacements:
        position[id(replacement)] = position[id(definer[replacement.defines[0]])] - 0.5
    for replacement in replacements:
        definer.update(dict.fromkeys(replacement.defines, replacement))
    effects = [e for e in equations if e.effects]
    previous = {id(later): earlier for earlier, later in itertools.pairwise(effects)}

    def needs(item) -> list:
        found = [definer[v] for v in _reads(item) if not isinstance(v, Literal) and v in definer]
        return [*found, previous[id(item)]] if id(item) in previous else found

    roots = [definer[v] for v in level.jaxpr.outvars if not isinstance(v, Literal) and v in definer]
    live: dict[int, Any] = {}
    front = [*roots, *effects]
    while front:
        item = front.pop()
        if id(item) not in live:
            live[id(item)] = item
            front += needs(item)
    order = in_order(
        {key: {id(n) for n in needs(item)} for key, item in live.items()}, position.__getitem__
    )
    return [live[key] for key in order] if len(order) == len(live) else None


def _reads(item) -> list:
    return [v for _, v in item.sources.values()] if isinstance(item, Replacement) else item.invars


# ---- the program's own code ----


def original_function(replacement: Replacement) -> Callable:
    """From what the program holds for the operation's sources to its results, as the program computes them."""
    sources = [_content(value) for value, _ in replacement.sources.values()]
    equations: dict[Equation, None] = {}
    front = [value for value, _, _ in replacement.results]
    while front:
        value = front.pop()
        if _content(value) in sources or value.equation in equations:
            continue
        if value.equation is None:
            raise Mismatch("an operand is spread out before it comes in", _CHECKED)
        equations[value.equation] = None
        front += [operand for operand in value.equation.inputs if operand.literal is None]
    order = sorted(equations, key=lambda e: e.index)

    def function(*arrays):
        env: dict[Value, Any] = {}
        given = dict(zip(sources, arrays, strict=True))

        def read(value):
            if value.literal is not None:
                return value.literal
            if value in env:
                return env[value]
            return convert(given[_content(value)], value.aval.dtype, value.aval.weak_type)

        for equation in order:
            operands = [read(value) for value in equation.inputs]
            results = run_equation(equation.eqn, operands, equation.eqn.params)
            env.update(zip(equation.outputs, results, strict=True))
        return [read(value) for value, _, _ in replacement.results]

    return function


def _content(value: Value):
    """Equal for values that can stand for each other, but for their weak types."""
    return value.view, varying_axes(value.aval)


def convert(array, dtype, weak_type=False):
    """As `jax.lax.convert_element_type`, which makes no weakly typed arrays."""
    if (array.dtype, jax.typeof(array).weak_type) == (dtype, weak_type):
        return array
    return convert_element_type_p.bind(array, new_dtype=dtype, weak_type=weak_type, sharding=None)
