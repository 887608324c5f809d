"""relu, and what it is the end of: add_relu, batch_norm with an activation.

jax.nn.relu is max(x, 0) with a derivative of its own, 0 at 0. The derivative of max itself is 1/2 there, so that
`jnp.maximum(x, 0)` is another function, and the rule is what is looked at.
"""

import dataclasses
from collections.abc import Iterator

import jax
from jax.extend.core import Literal

from jaxnorm._autofuse.algebra import Ref, whole
from jaxnorm._autofuse.match import Left, Match, Operand
from jaxnorm._autofuse.patterns import norm
from jaxnorm._autofuse.program import Level, Program, Value
from jaxnorm._autofuse.values import Node, identity, is_float, is_one, unconverted
from jaxnorm._primitive.avals import struct_of
from jaxnorm._primitive.programs import run_equation


def candidates(program: Program, output: Value) -> Iterator[Match | Left]:
    """Ways to read a value as a ReLU, or why it is none."""
    equation = output.equation
    if equation is None:
        return
    if equation in program.calls:
        yield from _find(output, program.calls[equation])
    elif not program.has_own_derivative(equation.level):
        yield from _find_maximum(output)


def _find(output: Value, call: Level) -> Iterator[Match | Left]:
    """Ways to read a call with a derivative of its own as a ReLU, the one that takes most of the program first."""
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return
    argument = _argument(whole(call.outputs[0].view.node))
    if argument is None or argument.node is not call.inputs[0].view.node:
        return
    if not is_float(argument.node.dtype) or output.equation is None:
        return
    (x,) = output.equation.inputs
    core = output.view.node
    if x.view.node.constant is not None:
        reason = "its operand is a number of the program: nothing is kept for its derivative"
        yield Left("relu", core, reason, 1)
        return
    if not _has_derivative_of_relu(call):
        yield Left("relu", core, "its derivative is not that of relu: 1 where x > 0, else 0", 1)
        return
    # The result has the dimensions of the variable whose size is not 1. The dimensions of x are among the result's.
    layout = [d for d, n in zip(x.view.dims, x.view.shape, strict=True) if not is_one(n)]
    dims = tuple(map(layout.index, identity(x.view.node)))
    yield from _before(output, Ref(x.view.node, dims), core)


def _find_maximum(output: Value) -> Iterator[Left]:
    """max(x, 0) outside of such a call; not max(0, x), which is how libraries keep variances from being negative."""
    operands = output.equation.inputs if output.equation else []
    if _argument(whole(output.view.node)) is not None and operands[-1].view.node.constant == 0:
        reason = "this is max(x, 0), whose derivative at 0 is 1/2; that of jax.nn.relu is 0"
        yield Left("relu", output.view.node, reason, 1)


def _argument(ref: Ref) -> Ref | None:
    """The x of max(x, 0)."""
    if ref.node.op != "max" or len(ref.node.args) != 2:
        return None
    for i in (0, 1):
        if ref.node.args[i].node.constant == 0 and ref.node.args[1 - i].node.constant is None:
            return ref.arg(1 - i)
    return None


def _has_derivative_of_relu(call: Level) -> bool:
    """Whether its jvp is select(x > 0, t, 0)."""
    x = struct_of(call.inputs[0].aval)

    def function(x):
        operands = [a.val if isinstance(a, Literal) else x for a in call.eqn.invars]
        return run_equation(call.eqn, operands, call.eqn.params)[0]

    rule = Program(jax.make_jaxpr(lambda x, t: jax.jvp(function, (x,), (t,))[1])(x, x))
    x, tangent = (value.view.node for value in rule.root.inputs)
    result = rule.root.outputs[0].view.node
    if result.op != "select_n" or len(result.args) != 3:
        return False
    positive, otherwise, chosen = (arg.node for arg in result.args)
    is_positive = (
        positive.op == "gt" and positive.args[0].node is x and positive.args[1].node.constant == 0
    )
    same_place = result.args[0].dims == result.args[2].dims
    return is_positive and same_place and otherwise.constant == 0 and chosen is tangent


def _before(output: Value, x: Ref, core: Node) -> Iterator[Match]:
    def norms(ref: Ref) -> Iterator[Match]:
        for match in norm.find(output, ref):
            if isinstance(match, Match) and match.operation.startswith("batch_norm"):
                options = {**match.options, "activation": "relu"}
                yield dataclasses.replace(match, options=options, core=core)

    yield from norms(x)
    inner = Ref(unconverted(x.node), x.dims)
    if inner.node.op == "add" and all(len(a.node.shape) == len(x.dims) for a in inner.node.args):
        for i in (0, 1):
            residual = inner.arg(1 - i)
            for match in norms(inner.arg(i)):
                place = {d: j for j, d in enumerate(match.x.dims)}
                dims = tuple(place[d] for d in residual.dims)
                operands = {
                    **match.operands,
                    "residual": Operand.of(Ref(residual.unwidened().node, dims)),
                }
                yield dataclasses.replace(match, operands=operands)
        first, second = inner.arg(0), inner.arg(1)
        if first.node.dtype == second.node.dtype == x.node.dtype:
            place = {d: j for j, d in enumerate(first.dims)}
            dims = tuple(place[d] for d in second.dims)
            others = {"y": Operand.of(Ref(second.node, dims))}
            yield Match("add_relu", output, first, others, None, {}, core)
    yield Match("relu", output, x, {}, None, {}, core)
