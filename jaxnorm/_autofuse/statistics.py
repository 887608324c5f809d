"""A quick look for statistics of batches, before a program is searched for operations that need them."""

from jax.extend.core import Literal

from jaxnorm._autofuse.bodies import bodies_of
from jaxnorm._autofuse.program import CALLS
from jaxnorm._primitive.programs import open_jaxpr

_ROOTS = {"rsqrt", "sqrt", "pow"}


def has_batch_statistics(closed) -> bool:
    """Whether a program takes a root of what it has from sums over rows, and from numbers, alone.

    Each batch norm in training does. An optimizer takes roots of gradients, but has old averages in them.
    """
    return _look(open_jaxpr(closed)[0], ())[0]


def _look(jaxpr, from_sums) -> tuple[bool, list[bool]]:
    """(whether there is such a root, which results are from sums alone), for operands that are or are not."""
    sums = {v for v, is_sum in zip(jaxpr.invars, from_sums, strict=False) if is_sum}
    # Arrays of numbers of the program, such as the NaN that `jnp.var` has for no elements.
    numbers = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = (v for v in eqn.invars if not isinstance(v, Literal) and v.aval.shape)
        arrays = [v for v in operands if v not in numbers]
        if body := CALLS.get(name):
            inner = open_jaxpr(eqn.params[body])[0]
            found, results = _look(inner, [v in arrays and v in sums for v in eqn.invars])
            if found:
                return True, []
            sums.update(v for v, is_sum in zip(eqn.outvars, results, strict=True) if is_sum)
            continue
        if any(_look(open_jaxpr(b)[0], ())[0] for _, b in bodies_of(eqn)):
            return True, []
        if not arrays:
            numbers.update(eqn.outvars)
            continue
        alone = sums.issuperset(arrays)
        if alone and name in _ROOTS:
            return True, []
        if alone or _sums_over_rows(eqn):
            sums.update(eqn.outvars)
    return False, [not isinstance(v, Literal) and v in sums for v in jaxpr.outvars]


def _sums_over_rows(eqn) -> bool:
    if eqn.primitive.name != "reduce_sum":
        return False
    shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
    last = max((d for d, n in enumerate(shape) if n != 1), default=0)
    return last not in axes and any(shape[d] != 1 for d in axes)
