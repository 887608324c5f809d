"""Calls whose operands and results have names.

Their primitives have the parameters `names` and `results`: of the operands and of the results, in an order that all
calls of a family have. Operands that are absent have no name there.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.extend.core import Primitive

from jaxnorm._primitive.avals import vary_alike
from jaxnorm._primitive.rules import is_present


def by_name(names: Sequence[str], values: Sequence) -> dict:
    """Operands or results of a call by name."""
    return dict(zip(names, values, strict=True))


def only(given: Mapping, names: Iterable[str]) -> dict:
    """The given operands of these names."""
    return {n: given[n] for n in names if n in given}


def bind_named(
    order: Sequence[str],
    primitive: Primitive,
    given: Mapping,
    results: Sequence[str],
    params: Mapping,
) -> dict:
    """Results of a call by name.

    Args:
      order: of the operands.
      primitive: is called.
      given: operands by name; those that are zero or None are absent.
      results: wanted, in their order.
      params: the remaining parameters.
    """
    names = tuple(n for n in order if is_present(given.get(n)))
    operands = vary_alike(*(given[n] for n in names))
    return by_name(
        results, primitive.bind(*operands, names=names, results=tuple(results), **params)
    )


def bits_of(names: Iterable[str], bits: Mapping[str, int]) -> np.int64:
    """An attribute that says which of the names a call has: the sum of their bits."""
    return np.int64(sum(bits.get(n, 0) for n in names))
