"""Equations with programs inside, run with other programs in their place."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxnorm._primitive.avals import struct_of
from jaxnorm._primitive.programs import open_jaxpr, run_equation, run_program, with_forward

# The parameters that hold an equation's programs.
_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "shard_map": ("jaxpr",),
}

# Of a program: the parameter, and its number where the parameter holds several.
Place = tuple[str, int]


def bodies_of(eqn) -> Iterator[tuple[Place, Any]]:
    """The programs of an equation, and where each stands."""
    for name in _BODIES.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        for i, body in enumerate(value if isinstance(value, tuple) else (value,)):
            yield (name, i), body


def made_inside(eqn, make: Callable[[], Any]):
    """What `make` returns, called where an equation's programs are traced: there, axes of a shard_map have names."""
    if eqn.primitive.name != "shard_map":
        return make()
    made: list = []

    def body(*blocks):
        made.append(make())
        return run_program(eqn.params["jaxpr"], *blocks)

    avals = [struct_of(v.aval) for v in eqn.invars]
    jax.eval_shape(lambda *operands: _shard_map(eqn, operands, body), *avals)
    return made[0]


def run_with_bodies(eqn, operands, bodies: Mapping[Place, Callable], change: Callable) -> list:
    """Results of an equation with other programs.

    Args:
      eqn: the equation.
      operands: its operands.
      bodies: functions that take the place of its programs. Programs that are not there stay.
      change: closed jaxpr -> another one, for a program that is not known yet: the forward rule of a custom_vjp
        function, which runs instead of the body where it is differentiated.
    """
    if not bodies:
        return run_equation(eqn, operands, eqn.params)
    if eqn.primitive.name == "shard_map":
        return _shard_map(eqn, operands, bodies["jaxpr", 0])
    params = dict(eqn.params)
    for (name, i), function in bodies.items():
        value = params[name]
        if isinstance(value, tuple):
            params[name] = (*value[:i], retraced(function, value[i]), *value[i + 1 :])
        else:
            params[name] = retraced(function, value)
    if eqn.primitive.name == "custom_vjp_call":
        params["fwd_jaxpr_thunk"] = with_forward(params["fwd_jaxpr_thunk"], change)
    return run_equation(eqn, operands, params)


def retraced(function: Callable, like):
    """A jaxpr of `function`, open or closed as `like` is, for operands as those of `like`."""
    closed = jax.make_jaxpr(function)(*(v.aval for v in open_jaxpr(like)[0].invars))
    return closed if hasattr(like, "consts") else open_jaxpr(closed)[0]


def _shard_map(eqn, operands, function) -> list:
    """A shard_map with another body, which is traced anew: inside it, axes have names and arrays vary along them."""
    p = eqn.params
    mapped = jax.shard_map(
        lambda *blocks: tuple(function(*blocks)),
        mesh=p["mesh"],
        in_specs=tuple(p["in_specs"]),
        out_specs=tuple(p["out_specs"]),
        check_vma=p["check_vma"],
        axis_names=set(p["newly_manual_axes"]),
    )
    return list(mapped(*operands))
