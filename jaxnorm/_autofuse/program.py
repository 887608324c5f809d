"""A jaxpr with its calls opened: which equation defines each value, which ones use it, and what it holds.

`jit` calls are opened, any depth, because libraries put parts of one formula into them (jnp.where, jnp.var). Each
instance of a call is a Level of its own. A value has a name, a variable, in every level that it is passed into or
returned to. Calls with a derivative rule of their own are opened too, but nothing is followed through them: what they
return has another derivative than what they compute inside. Loops, branches and the like are equations as any other
here; their bodies are programs of their own (rewrite.py).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.lax import GatherScatterMode

from jaxnorm._autofuse.bodies import bodies_of
from jaxnorm._autofuse.values import (
    ELEMENTWISE,
    REDUCTIONS,
    Node,
    Values,
    View,
    is_float,
    is_one,
    unwidened,
)
from jaxnorm._primitive.programs import function_name, open_jaxpr

_CUSTOM_JVP = "custom_jvp_call"
# Functions with this name are jaxnorm's where they are differentiated, and not opened (`rewrite.where_differentiated`).
LEFT_NAME = "jaxnorm_where_differentiated"
# The parameter with the jaxpr.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", _CUSTOM_JVP: "call_jaxpr"}


def every_equation(eqns: Iterable) -> Iterator:
    """Equations, and those of the programs that they call or have as bodies."""
    for eqn in eqns:
        yield eqn
        if body := CALLS.get(eqn.primitive.name):
            yield from every_equation(open_jaxpr(eqn.params[body])[0].eqns)
        for _, inner in bodies_of(eqn):
            yield from every_equation(open_jaxpr(inner)[0].eqns)


def is_left(eqn) -> bool:
    """Whether an equation calls a function that is jaxnorm's where it is differentiated."""
    body = CALLS.get(eqn.primitive.name)
    return body is not None and function_name(eqn.params[body]) == LEFT_NAME


@dataclasses.dataclass(eq=False)
class Value:
    """Something that is computed, or comes in from outside.

    Attributes:
      view: what it holds.
      aval: as JAX describes it.
      equation: that defines it; None for what comes from outside.
      uses: equations that read it.
      names: its variables in each level.
      defined: those of them that equations and calls of the level define, and that are not passed in.
      is_output: whether the program, or a call with a derivative rule of its own, returns it.
      literal: the number itself, if the program's text has it.
    """

    view: View
    aval: Any
    equation: "Equation | None" = None
    uses: list["Equation"] = dataclasses.field(default_factory=list)
    names: dict["Level", list] = dataclasses.field(default_factory=dict)
    defined: dict["Level", list] = dataclasses.field(default_factory=dict)
    is_output: bool = False
    literal: Any = None


@dataclasses.dataclass(eq=False)
class Equation:
    """An equation of one level; an opened call is one only if it has a derivative rule of its own."""

    eqn: Any
    level: "Level"
    index: int
    inputs: list[Value]
    outputs: list[Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Level:
    """One instance of a call; the root is the program itself.

    Attributes:
      jaxpr: its equations.
      consts: values of the jaxpr's constvars.
      parent, eqn: the level that has the call, and the call; None for the root.
      children: levels of the calls in this one, by id of the equation.
      inputs, outputs: values passed in and returned.
    """

    jaxpr: Any
    consts: list
    parent: "Level | None" = None
    eqn: Any = None
    children: dict[int, "Level"] = dataclasses.field(default_factory=dict)
    inputs: list[Value] = dataclasses.field(default_factory=list)
    outputs: list[Value] = dataclasses.field(default_factory=list)


class Program:
    """Equations and values of a closed jaxpr.

    Attributes:
      root: the jaxpr's own level.
      equations: of all levels, in the order they run.
      values: what they define, and what comes in.
      calls: levels with a derivative rule of their own, by the equation that stands for the call.
    """

    def __init__(self, closed):
        self.equations: list[Equation] = []
        self.values: list[Value] = []
        self.calls: dict[Equation, Level] = {}
        self._make = Values()
        self._opaque: dict[tuple, View] = {}
        self._stacked: dict[Node, list[View]] = {}
        self._by_node: dict[Node, list[Value]] | None = None
        jaxpr, consts = open_jaxpr(closed)
        inputs = [self._from_outside(v.aval) for v in jaxpr.invars]
        self.root = self._open(Level(jaxpr, consts), inputs)
        for value in self.root.outputs:
            value.is_output = True

    def holding(self, node: Node) -> list[Value]:
        """Values whose view is of this node, or of what it converts without loss, in this order."""
        if self._by_node is None:
            self._by_node = {}
            for value in self.values:
                self._by_node.setdefault(value.view.node, []).append(value)
        found = list(self._by_node.get(node, ()))
        inner = unwidened(node)
        return found if inner is node else self._by_node.get(inner, []) + found

    def has_own_derivative(self, level: Level | None) -> bool:
        """Whether it is inside of a call with a derivative rule of its own."""
        while level is not None and level not in self.calls.values():
            level = level.parent
        return level is not None

    # ---- opening ----

    def _add(self, value: Value) -> Value:
        self.values.append(value)
        return value

    def _from_outside(self, aval) -> Value:
        shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype(object))
        return self._add(Value(self._make.unknown(shape, dtype), aval))

    def _open(self, level: Level, inputs: list[Value]) -> Level:
        env: dict[Any, Value] = {}

        def read(atom) -> Value:
            if isinstance(atom, Literal):
                return self._literal(atom)
            return env[atom]

        def write(variable, value):
            env[variable] = value
            value.names.setdefault(level, []).append(variable)

        level.inputs = inputs
        for variable, value in zip(level.jaxpr.invars, inputs, strict=True):
            write(variable, value)
        for variable in level.jaxpr.constvars:
            write(variable, self._from_outside(variable.aval))
        for eqn in level.jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            body = CALLS.get(eqn.primitive.name)
            if body is None or is_left(eqn):
                results = self._equation(eqn, level, operands)
            else:
                jaxpr, consts = open_jaxpr(eqn.params[body])
                child = Level(jaxpr, consts, level, eqn)
                level.children[id(eqn)] = child
                if eqn.primitive.name == _CUSTOM_JVP:
                    self._open(child, [self._from_outside(v.aval) for v in jaxpr.invars])
                    for value in child.outputs:
                        value.is_output = True
                    results = self._equation(eqn, level, operands)
                    self.calls[self.equations[-1]] = child
                else:
                    results = self._open(child, operands).outputs
            for variable, value in zip(eqn.outvars, results, strict=True):
                write(variable, value)
                value.defined.setdefault(level, []).append(variable)
        level.outputs = [read(a) for a in level.jaxpr.outvars]
        return level

    def _literal(self, atom) -> Value:
        aval = atom.aval
        real = (np.floating, np.integer, np.bool_)
        if aval.shape == () and any(jnp.issubdtype(aval.dtype, kind) for kind in real):
            view = self._make.constant(float(atom.val), aval.dtype)
        else:
            view = self._make.unknown(aval.shape, aval.dtype)
        return Value(view, aval, literal=atom.val)

    def _equation(self, eqn, level, operands) -> list[Value]:
        equation = Equation(eqn, level, len(self.equations), operands)
        self.equations.append(equation)
        for value in dict.fromkeys(operands):
            value.uses.append(equation)
        one = len(eqn.outvars) == 1
        views = [v.view for v in operands]
        view = (self._view(eqn, views) or self._same_as_before(eqn, views)) if one else None
        if view is None:
            equation.outputs = [self._from_outside(v.aval) for v in eqn.outvars]
        else:
            equation.outputs = [self._add(Value(view, eqn.outvars[0].aval))]
        for value in equation.outputs:
            value.equation = equation
        return equation.outputs

    def _same_as_before(self, eqn, views) -> View | None:
        """One view for all equations that compute the same, such as a mask that is sliced twice."""
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        if eqn.effects or name.startswith("rng_") or name in CALLS or not hasattr(aval, "dtype"):
            return None
        try:
            key = (name, tuple(views), tuple(sorted(eqn.params.items())), aval.shape, aval.dtype)
            return self._opaque.setdefault(key, self._make.unknown(aval.shape, aval.dtype))
        except TypeError:  # parameters that cannot be compared
            return None

    def _view(self, eqn, views) -> View | None:
        """What an equation's only result holds; None if that is not known."""
        make, name, params = self._make, eqn.primitive.name, eqn.params
        aval = eqn.outvars[0].aval
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        if shape is None or dtype is None or not jnp.issubdtype(dtype, np.generic):
            return None
        match name:
            case "broadcast_in_dim" if len(views) == 1:
                return make.broadcast(views[0], shape, params["broadcast_dimensions"])
            case "reshape" if len(views) == 1 and params["dimensions"] is None:
                return make.reshape(views[0], shape)
            case "squeeze" | "expand_dims":
                return make.reshape(views[0], shape)
            case "transpose":
                return make.transpose(views[0], params["permutation"])
            case "convert_element_type":
                return make.apply("convert", views, shape, dtype)
            case "copy" | "copy_p" | "pvary":
                return views[0]
            case "iota":
                return make.iota(shape, params["dimension"], dtype)
            case "concatenate" if not is_float(dtype):
                return self._stack(views, params["dimension"], shape, dtype)
            case "gather":
                return self._gather(views, params, shape)
            case "square" | "integer_pow":
                exponent = Fraction(params.get("y", 2))
                return make.apply("power", views, shape, dtype, (("exponent", exponent),))
            case "pow" if views[1].node.constant in (-1, -0.5, 0.5, 1, 2) and is_float(dtype):
                exponent = Fraction(views[1].node.constant)
                return make.apply("power", views[:1], shape, dtype, (("exponent", exponent),))
            case "add_any":
                return make.apply("add", views, shape, dtype)
        if name in REDUCTIONS and len(views) == 1:
            return make.reduce(name, views[0], params["axes"], dtype)
        if name in ELEMENTWISE:
            return make.apply(name, views, shape, dtype)
        return None

    def _stack(self, views, dimension, shape, dtype) -> View | None:
        """Indices into several dimensions, which a gather takes as one array."""
        last = len(shape) - 1
        if dimension != last or any(not is_one(v.shape[last]) for v in views):
            return None
        view = self._make.unknown(shape, dtype)
        self._stacked[view.node] = [View(v.node, v.dims[:-1], v.shape[:-1]) for v in views]
        return view

    def _gather(self, views, params, shape) -> View | None:
        """One element per row, such as take_along_axis takes; None for every other gather."""
        operand, index = views
        numbers, mode, fill = params["dimension_numbers"], params["mode"], params["fill_value"]
        if mode == GatherScatterMode.FILL_OR_DROP and not (fill is None or np.isnan(fill)):
            return None
        whole = [View(index.node, index.dims[:-1], index.shape[:-1])]
        axes = [int(d) for d in numbers.start_index_map]
        indices = whole if len(axes) == 1 else self._stacked.get(index.node, [])
        if len(indices) != len(axes):
            return None
        windows = [int(d) for d in numbers.offset_dims]
        index_out = [i for i in range(len(shape)) if i not in windows]
        out: list[int | None] = [None] * len(operand.shape)
        paired = zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        )
        for d, i in paired:
            out[d] = index_out[i]
        rest = [
            d
            for d in range(len(out))
            if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        ]
        for d, place in zip(rest, windows, strict=True):
            out[d] = place
        picked = []
        for d, i in zip(axes, indices, strict=True):
            counts = i.node.op == "iota" and i.node.shape == (operand.shape[d],)
            if counts and d not in rest:  # each row its own element
                out[d] = index_out[i.dims.index(0)]
                continue
            out[d] = None
            if not (is_one(operand.shape[d]) and i.node.constant == 0):
                picked.append((d, i))
        sizes = params["slice_sizes"]
        if any(sizes[d] != (1 if d in axes else operand.shape[d]) for d in rest):
            return None
        if any(p not in out and not is_one(shape[p]) for p in index_out):
            return None
        if not picked:
            dims = [None if p not in out else operand.dims[out.index(p)] for p in range(len(shape))]
            return View(operand.node, tuple(dims), tuple(shape))
        if len(picked) != 1:
            return None
        ((axis, index),) = picked
        return self._make.pick(operand, axis, out, index, index_out, shape, mode)
