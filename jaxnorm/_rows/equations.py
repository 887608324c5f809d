"""A jaxpr as a flat list of equations: calls are followed, and what no result needs is left out."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxnorm._primitive.define import FORMULAS
from jaxnorm._primitive.programs import open_jaxpr, source_line, trace_context

# Primitives that run a jaxpr once, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "jaxnorm_row_program": "jaxpr",
}
# Reductions of values, and of values to their places.
REDUCTIONS = {f"reduce_{name}" for name in ("sum", "max", "min", "prod", "or", "and")}
ARGS = {"argmax", "argmin"}
# Formulas that are operations of the compiler, or are followed in their own way.
_OWN = {f"jaxnorm_{name}" for name in ("pack_bits", "unpack_bits", "row_program", "row_tangent")}


def body_of(eqn):
    """The closed jaxpr that an equation runs once; None for an operation. Our own operations run their formulas."""
    name = eqn.primitive.name
    if name in CALLS:
        return eqn.params[CALLS[name]]
    if name not in FORMULAS or name in _OWN:
        return None
    params = tuple(sorted(eqn.params.items()))
    return _formula(name, params, tuple(v.aval for v in eqn.invars), trace_context())


@functools.lru_cache(maxsize=1024)
def _formula(name, params, avals, _):
    return jax.make_jaxpr(functools.partial(FORMULAS[name], **dict(params)))(*avals)


class NotARowProgram(ValueError):
    """A function that cannot be one kernel, and which line of it is the reason.

    Attributes:
      argument: the number of the input that is the reason, or None.
    """

    def __init__(
        self,
        what: str,
        reason: str,
        equation: "Equation | None" = None,
        argument: int | None = None,
    ):
        self.argument, self.reason = argument, reason
        where = f" at {equation.line}" if equation is not None and equation.line else ""
        super().__init__(f"fuse: {what}{where} {reason}")


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array of the program; equal only to itself."""

    aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A number that is written in the program."""

    number: Any
    aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One operation of the program."""

    primitive: str
    inputs: tuple[Value | Constant, ...]
    outputs: tuple[Value, ...]
    params: dict
    line: str

    def refuse(self, reason: str) -> NotARowProgram:
        return NotARowProgram(f"`{self.primitive}`", reason, self)


@dataclasses.dataclass(frozen=True, eq=False)
class Equations:
    """The program: what comes in, what is computed in order, what goes out."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value | Constant, ...]


def flatten(closed) -> Equations:
    """The equations of a closed jaxpr without the dead ones."""
    jaxpr, consts = open_jaxpr(closed)
    inputs = tuple(Value(v.aval) for v in jaxpr.invars)
    equations: list[Equation] = []
    outputs = _inline(jaxpr, consts, inputs, equations, "")
    live = {o for o in outputs if isinstance(o, Value)}
    kept = []
    for equation in reversed(equations):
        if any(o in live for o in equation.outputs):
            kept.append(equation)
            live.update(i for i in equation.inputs if isinstance(i, Value))
    return Equations(inputs, tuple(reversed(kept)), tuple(outputs))


def operations_of(eqn) -> list[Equation]:
    """The operations of an equation: itself, or those of the jaxpr that it runs once."""
    inputs = tuple(
        Constant(v.val, v.aval) if isinstance(v, Literal) else Value(v.aval) for v in eqn.invars
    )
    body = body_of(eqn)
    if body is None:
        outputs = tuple(Value(v.aval) for v in eqn.outvars)
        return [Equation(eqn.primitive.name, inputs, outputs, dict(eqn.params), "")]
    found: list[Equation] = []
    _inline(*open_jaxpr(body), inputs, found, "")
    return found


def _inline(jaxpr, consts, inputs, equations, line) -> list:
    """Appends the equations of a jaxpr with these inputs, and returns its outputs."""
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, const in zip(jaxpr.constvars, consts, strict=True):
        if np.size(const) != 1:
            raise NotARowProgram(
                "a constant array", f"of shape {np.shape(const)} must be an argument"
            )
        values[variable] = Constant(np.asarray(const).reshape(()), variable.aval)

    def read(atom):
        return Constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = tuple(map(read, eqn.invars))
        # A call of jax.numpy's has the user's line; the lines within it are jax.numpy's own.
        here = source_line(eqn) or line
        if (body := body_of(eqn)) is not None:
            inner, inner_consts = open_jaxpr(body)
            results = _inline(inner, inner_consts, operands, equations, here)
        else:
            results = tuple(Value(v.aval) for v in eqn.outvars)
            equations.append(Equation(name, operands, results, dict(eqn.params), here))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]
