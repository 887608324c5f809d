"""Jaxprs: traced, run, pruned, and keyed by identity."""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax._src import (
    config,  # private: see `trace_context`
    source_info_util,  # private: see `run_equation`
)
from jax._src.util import weakref_lru_cache  # private: see `cached_by_program`
from jax.core import eval_jaxpr
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, Literal, Var
from jax.interpreters import partial_eval as pe

_PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep

# Caches a function of a program, which is told from others by identity, under the settings that JAX traces with.
cached_by_program = weakref_lru_cache


def trace_context():
    """The settings that JAX traces with, to be part of a key."""
    return config.trace_context()


# JAX converts a number at once with NumPy, which warns if the result is infinite. XLA converts without a warning.
_no_warnings = functools.partial(np.errstate, over="ignore")


def closed_of(function: Callable, avals: Sequence):
    """(closed jaxpr without constants of a function of arrays, arrays that it takes behind its operands)."""
    closed = jax.make_jaxpr(function)(*avals)
    jaxpr, consts = open_jaxpr(closed)
    if not consts:
        return closed, []
    n = len(avals)

    def with_operands(*args):
        return eval_jaxpr(jaxpr, list(args[n:]), *args[:n])

    return jax.make_jaxpr(with_operands)(*avals, *(v.aval for v in jaxpr.constvars)), consts


class Assembly:
    """A program of equations that were traced already, which takes less time than to trace them again."""

    def __init__(self):
        self._operands: list = []
        self._equations: list = []

    def operand(self, aval):
        """The variable of a further operand."""
        self._operands.append(Var(aval))
        return self._operands[-1]

    def equation(self, eqn, inputs: Sequence) -> list:
        """The variables of an equation's results, for variables and literals of the types that it was traced for."""
        outputs = [Var(v.aval) for v in eqn.outvars]
        self._equations.append(eqn.replace(invars=list(inputs), outvars=outputs))
        return outputs

    def function(self, function: Callable, *inputs):
        """The result of a function of arrays, which is traced."""
        closed, consts = closed_of(function, [v.aval for v in inputs])
        assert not consts
        jaxpr, _ = open_jaxpr(closed)
        values: dict = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom):
            return atom if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            outputs = self.equation(eqn, list(map(read, eqn.invars)))
            values.update(zip(eqn.outvars, outputs, strict=True))
        (result,) = map(read, jaxpr.outvars)
        return result

    def closed(self, results: Sequence):
        """The closed jaxpr."""
        effects = frozenset().union(*(eqn.effects for eqn in self._equations))
        names = DebugInfo("jit", "program", None, None)
        jaxpr = Jaxpr([], self._operands, list(results), self._equations, effects, names)
        return ClosedJaxpr(jaxpr, [])


def run_program(closed, *operands) -> list:
    """Results of a closed jaxpr."""
    jaxpr, consts = open_jaxpr(closed)
    with _no_warnings():
        return eval_jaxpr(jaxpr, consts, *operands)


def pruned(closed, used: Sequence[bool]):
    """(the program of some of the results without dead code, which operands it takes)."""
    jaxpr, consts = open_jaxpr(closed)
    assert not consts
    jaxpr, taken = pe.dce_jaxpr(jaxpr, list(used))
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, []), taken


def open_jaxpr(jaxpr):
    """(jaxpr, values of its constvars) of an open or a closed one; from JAX 0.12 on there is one kind."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def function_name(jaxpr) -> str:
    """The name of the function that a jaxpr was traced from."""
    return open_jaxpr(jaxpr)[0].debug_info.func_name


def run_equation(eqn, operands, params) -> list:
    """Results of an equation under other parameters, with the names and the settings that it was traced with."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context = source_info_util.user_context(eqn.source_info.traceback, name_stack=names)
    with context, eqn.ctx.manager, _no_warnings():
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def with_forward(thunk, change: Callable):
    """The forward rule of a custom_vjp call, with its jaxpr changed once that is known."""

    def forward(*nonzeros):
        jaxpr, consts = thunk.call_wrapped(*nonzeros)
        # From JAX 0.12 on the jaxpr may have its consts, or take them as its first arguments.
        variables = [*jaxpr.constvars, *jaxpr.invars][len(consts) :]
        closed = jax.make_jaxpr(functools.partial(eval_jaxpr, jaxpr, consts))(
            *(v.aval for v in variables)
        )
        return open_jaxpr(change(closed))

    return linear_util.wrap_init(forward, debug_info=thunk.debug_info)


def source_line(eqn) -> str:
    """File and line of the user's code that an equation comes from; "" if nothing but jaxnorm's code is known."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    frame = next((f for f in frames if not f.file_name.startswith(_PACKAGE)), None)
    if frame is None:
        return ""
    column = f":{frame.start_column}" if frame.start_column else ""
    return f"{frame.file_name}:{frame.start_line}{column} ({frame.function_name})"


def without_dead_code(closed):
    """The same program without equations whose results nothing uses, in calls, loops and branches too."""
    jaxpr, consts = open_jaxpr(closed)
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    return ClosedJaxpr(jaxpr, consts) if hasattr(closed, "jaxpr") else jaxpr
