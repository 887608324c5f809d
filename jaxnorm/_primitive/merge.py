"""Two calls as one FFI call, where nothing comes between them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxnorm import _launch
from jaxnorm._primitive.calls import lower_call, origin
from jaxnorm._primitive.named import by_name


@dataclasses.dataclass(frozen=True)
class Merge:
    """A CUDA call that does the work of two, the second of which takes results of the first.

    The primitives have the parameters `names` and `results`: of their operands and results, in an order that all calls
    have.

    Attributes:
      first: the operation of the first call, whose primitive's `merged` is true.
      both: the operation that does both.
      passed: the first call's results, which must all be operands of the second.
      shared: names that the first call's operands have in the second one. Both must have the same of them.
      order: of all names.
      fits: (*avals, **params) -> whether the call does what such a second call asks for, and is worth it.
    """

    first: str
    both: str
    passed: tuple[str, ...]
    shared: tuple[str, ...]
    order: tuple[str, ...]
    fits: Callable[..., bool]


def placeholders(values):
    """What later code refers to instead of the results of a call, so that another call can take its place."""
    return [stablehlo.ReshapeOp(v.type, v).result for v in values]


def merged_call(ctx, operands, params, merge, plan):
    """Results of a call that does the work of an earlier one too and replaces it; None where there is none such.

    Primitives are lowered one by one, and a collective may come between the two calls. So only the second one
    knows that the first one's results came to it as they were.
    """
    given = by_name(params["names"], operands)
    if not given.keys() >= {*merge.passed} or not merge.fits(*ctx.avals_in, **params):
        return None
    shared = [given[n] for n in merge.shared if n in given]
    first = _call_behind([given[n] for n in merge.passed], merge.first)
    if first is None or [origin(o) for o in first.operands] != [origin(s) for s in shared]:
        return None
    names = tuple(n for n in params["names"] if n not in merge.passed)
    results = tuple(n for n in merge.order if n in (*merge.passed, *params["results"]))
    both = dict(params, names=names, results=results)
    avals = by_name(params["names"], ctx.avals_in) | by_name(params["results"], ctx.avals_out)
    avals_in, avals_out = [avals[n] for n in names], [avals[n] for n in results]
    call = plan(merge.both, avals_in, avals_out, **both)
    if call is None:
        return None
    ctx = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    values = lower_call(ctx, [given[n] for n in names], call)
    found = by_name(results, values)
    for name in merge.passed:
        holder = given[name].owner.operation
        holder.operands[0] = found[name]
        holder.move_after(found[name].owner.operation)
    first.operation.erase()
    return [found[n] for n in params["results"]]


def _call_behind(values, operation):
    """The planned call of which these are all results but for its scratch, if nothing has used them yet."""
    holders = [v.owner for v in values]  # an argument belongs to a block, which has no name
    if any(getattr(h, "name", "") != "stablehlo.reshape" for h in holders):
        return None
    behind = [h.operands[0] for h in holders]
    call = behind[0].owner
    if getattr(call, "name", "") != "stablehlo.custom_call":
        return None
    if ir.StringAttr(call.attributes["call_target_name"]).value != _launch.TARGET:
        return None
    config = ir.DictAttr(call.attributes["mhlo.backend_config"])
    if ir.StringAttr(config["operation"]).value != operation:
        return None
    # The same block: what is moved behind a call within a loop's body could not be used after the loop.
    current: Any = ir.InsertionPoint.current
    here = call.operation.block == current.block
    unused = not any(list(v.uses) for v in values)
    return call if here and unused and behind == list(call.results)[:-1] else None
