"""The program with matches replaced."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

import jaxnorm
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.bodies import Place, bodies_of, retraced, run_with_bodies
from jaxnorm._autofuse.match import Match
from jaxnorm._autofuse.plan import (
    Plan,
    Replacement,
    convert,
    layout_of,
    original_function,
    schedule,
)
from jaxnorm._autofuse.program import CALLS, LEFT_NAME, Equation, Level, Value
from jaxnorm._autofuse.values import View
from jaxnorm._primitive.avals import vary_as
from jaxnorm._primitive.programs import open_jaxpr, run_equation, without_dead_code


class Rewritten:
    """A program with its replacements made, in the bodies of loops and branches too.

    Args:
      closed: the program.
      wanted: whether an operation may replace code, by its name.

    Attributes:
      plan: what is replaced in the program itself.
      bodies: the same for each equation's bodies.
    """

    def __init__(self, closed, wanted: Callable[[str], bool] = lambda _: True):
        self._closed, self._wanted = closed, wanted
        self.plan = Plan(closed, wanted)
        self.bodies: list[tuple[Equation, Rewritten]] = []
        self._inner: dict[int, dict[Place, Rewritten]] = {}
        for equation in self.plan.program.equations:
            for place, body in bodies_of(equation.eqn):
                inner = Rewritten(body, wanted)
                if inner.changes:
                    self._inner.setdefault(id(equation.eqn), {})[place] = inner
                self.bodies.append((equation, inner))
        self._changed = {r.level for r in self.plan.replacements}
        self._changed |= {e.level for e, inner in self.bodies if inner.changes}
        for level in list(self._changed):
            while level.parent is not None:
                level = level.parent
                self._changed.add(level)

    @property
    def changes(self) -> bool:
        return bool(self._changed)

    def traced(self):
        """The closed jaxpr, without dead code."""
        if not self.changes:
            return self._closed
        avals = [v.aval for v in open_jaxpr(self._closed)[0].invars]
        return without_dead_code(jax.make_jaxpr(self)(*avals))

    def __call__(self, *operands) -> list:
        return self._run(self.plan.program.root, operands)

    def _run(self, level: Level, operands) -> list:
        here = [r for r in self.plan.replacements if r.level is level]
        order = schedule(level, here)
        assert order is not None
        env: dict[Any, Any] = dict(zip(level.jaxpr.constvars, level.consts, strict=True))
        env.update(zip(level.jaxpr.invars, operands, strict=True))
        replaced = {v for r in here for v in r.defines}

        def read(atom):
            return atom.val if isinstance(atom, Literal) else env[atom]

        for item in order:
            if isinstance(item, Replacement):
                env.update(_replace(item, read))
                continue
            results = self._equation(level, item, list(map(read, item.invars)))
            env.update(
                (v, r) for v, r in zip(item.outvars, results, strict=True) if v not in replaced
            )
        return list(map(read, level.jaxpr.outvars))

    def _equation(self, level: Level, eqn, operands) -> list:
        child = level.children.get(id(eqn))
        if child is not None and child in self._changed:
            name = CALLS[eqn.primitive.name]

            def run(*inner):
                return self._run(child, inner)

            params = {**eqn.params, name: retraced(run, eqn.params[name])}
            return run_equation(eqn, operands, params)
        return run_with_bodies(eqn, operands, self._inner.get(id(eqn), {}), self._rewritten)

    def _rewritten(self, closed):
        return Rewritten(closed, self._wanted).traced()


def _replace(replacement: Replacement, read: Callable) -> dict:
    """Runs an operation; returns the variables that it defines."""
    operands = [read(variable) for _, variable in replacement.sources.values()]
    results = replaced_function(replacement)(*operands)
    return {
        variable: result
        for (value, _, _), result in zip(replacement.results, results, strict=True)
        for variable in value.defined[replacement.level]
    }


def replaced_function(replacement: Replacement) -> Callable:
    """From what the program holds for the operation's sources to what it holds for its results."""
    function = operation_function(replacement)

    def operation(*arrays):
        # An operand may be the same on all devices where the program's own code has spread it.
        avals = [value.aval for value, _, _ in replacement.results]
        return [vary_as(r, a) for r, a in zip(function(*arrays), avals, strict=True)]

    always = replacement.rule.verdict == costs.ALWAYS
    operands = replacement.match.operands
    nodes = {ref.node for name in replacement.match.fixed for ref in operands[name].refs}
    fixed = {i for i, node in enumerate(replacement.sources) if node in nodes}
    if always and not fixed:
        return operation
    original = original_function(replacement)
    return where_differentiated(operation, original, operation if always else original, fixed)


def where_differentiated(
    operation: Callable,
    original: Callable,
    otherwise: Callable | None = None,
    fixed: Collection[int] = (),
) -> Callable:
    """`operation` where JAX differentiates it, and `otherwise`, by default `original`, where not.

    Where JAX differentiates with respect to one of the operands `fixed`, it is `original`.
    """
    otherwise = otherwise or original

    def primal(*arrays):
        return otherwise(*arrays)

    primal.__name__ = LEFT_NAME
    function = jax.custom_jvp(primal)

    def rule(primals, tangents):
        present = [i for i, t in enumerate(tangents) if type(t) is not SymbolicZero]
        chosen = operation if set(fixed).isdisjoint(present) else original

        def of_present(*arrays):
            given = dict(zip(present, arrays, strict=True))
            return chosen(*(given.get(i, p) for i, p in enumerate(primals)))

        return jax.jvp(of_present, [primals[i] for i in present], [tangents[i] for i in present])

    function.defjvp(rule, symbolic_zeros=True)
    return function


def operation_function(replacement: Replacement) -> Callable:
    """Jaxnorm's function, as `replaced_function`."""
    match = replacement.match

    values = [value for value, _ in replacement.sources.values()]
    # All others make strong types, of results and so of cotangents.
    keeps_weak = match.operation in ("relu", "add_relu")

    def function(*arrays):
        if not keeps_weak:
            arrays = [convert(a, v.aval.dtype) for a, v in zip(arrays, values, strict=True)]
        placed = [
            (_without_broadcast(a, v.view), layout_of(v))
            for a, v in zip(arrays, values, strict=True)
        ]
        nodes = dict(zip(replacement.sources, placed, strict=True))
        shape = nodes[match.x.node][0].shape
        operands = {
            name: operand.array(shape, nodes.__getitem__)
            for name, operand in match.operands.items()
        }
        results = _call(match, operands, match.output.aval.dtype)
        return [_to_view(results[name], dims, value) for value, name, dims in replacement.results]

    return function


def _call(match: Match, arrays: dict, dtype) -> dict:
    """Results of the operation by name, in the dimensions of x."""
    axis = {} if match.axes is None else {"axis": match.axes}
    if match.function is not None:
        x = arrays.pop("x")
        return {"output": match.function(x, **arrays, **axis, **match.options, dtype=dtype)}
    for name in ("x", "y", "residual", *(("bias",) if "softmax" in match.operation else ())):
        if name in arrays:
            arrays[name] = convert(arrays[name], dtype, jax.typeof(arrays[name]).weak_type)
    function = getattr(jaxnorm, match.operation)
    results = function(arrays.pop("x"), **arrays, **axis, **match.options)
    if match.operation == "batch_norm":
        others = [d for d in range(len(match.x.dims)) if d not in (match.axes or ())]
        results = (results[0], *(jnp.expand_dims(r, others) for r in results[1:]))
        return dict(zip(("output", "mean", "var"), results, strict=True))
    if isinstance(results, tuple):
        return dict(zip(("output", "sum"), results, strict=True))
    return {"output": results}


def _without_broadcast(array, view: View):
    if None not in view.dims:
        return array
    return array[tuple(slice(None) if d is not None else 0 for d in view.dims)]


def _to_view(array, dims, value: Value):
    """An array in the dimensions of x, as the variable holds it.

    `dims` are those of x that the node's are, None for one along which the array is spread.
    """
    view = value.view
    present = [i for i, d in enumerate(view.dims) if d is not None and dims[d] is not None]
    taken = [dims[view.dims[i]] for i in present]
    array = jnp.squeeze(array, [i for i in range(array.ndim) if i not in taken])
    array = jnp.transpose(array, [sorted(taken).index(d) for d in taken])
    if array.shape != view.shape:
        array = jax.lax.broadcast_in_dim(array, view.shape, present)
    return convert(array, value.aval.dtype, value.aval.weak_type)
