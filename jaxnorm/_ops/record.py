"""What an operation is to everything that goes through all operations."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import jax

from jaxnorm._autofuse.costs import Rule
from jaxnorm._autofuse.match import Left, Match
from jaxnorm._autofuse.program import Program, Value

EPSILON = 1e-6  # of norms in plain calls


def parameter_dtype(dtype: str) -> str:
    """Of parameters, of statistics and of results that are one number for each row."""
    return "float64" if dtype == "float64" else "float32"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call, in bytes if not said otherwise.

    Attributes:
      array: one array of the full shape.
      arrays: how many arguments have the full shape.
      operands: masks and biases.
      columns: number of columns, or of features.
      rows: number of rows.
      number: one number of a parameter's dtype.
      bits: one bit for each element, in whole bytes for each row of the last axis.
      relu: whether a ReLU follows in the same call.
    """

    array: int
    arrays: int
    operands: int
    columns: int
    rows: int
    number: int
    bits: int
    relu: bool


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation: what it computes, what that should cost, and how a program spells it.

    Attributes:
      function: jaxnorm's.
      xla: the plain JAX formula, called alike.
      reference: (dy, *arguments in float64, where, scale, tiny) -> (value, size of the terms that
        are added up, what the dtype cannot hold) of the result and of each gradient that differs, for plain calls.
      bytes: (sizes, direction) -> fewest bytes that must cross memory. Directions are those of bench/cases.py.
      find: (program, value) -> ways to read the value as this operation, for autofuse. Operations may share one.
      rules: where autofuse replaces what it found. The first rule that applies decides.
      plain: (function or xla) -> the plain call, a function of `arrays` arguments of the full shape and `parameters`
        arguments of one row, over the last axis.
      arrays: how many arguments of a plain call have the full shape.
      parameters: how many arguments of one row follow, in the dtype of `parameter_dtype`.
      mask: name of the argument that says which elements of a row take part; "" if there is none.
      per_row: whether the result of a plain call is one number for each row, in the dtype of parameters.
    """

    function: Callable
    xla: Callable
    reference: Callable
    bytes: Callable[[Sizes, str], int]
    find: Callable[[Program, Value], Iterator[Match | Left]]
    rules: tuple[Rule, ...]
    plain: Callable[[Callable], Callable] = lambda function: function
    arrays: int = 1
    parameters: int = 0
    mask: str = ""
    per_row: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def plain_call(self) -> Callable:
        return self.plain(self.function)

    @functools.cached_property
    def plain_xla(self) -> Callable:
        return self.plain(self.xla)

    @property
    def reduces(self) -> bool:
        return bool(self.mask)

    def argument_kinds(self, shape: Sequence[int], dtype: str) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each argument of a plain call."""
        parameter = tuple(shape[-1:]), parameter_dtype(dtype)
        return [(tuple(shape), dtype)] * self.arrays + [parameter] * self.parameters

    def result_kind(self, shape: Sequence[int], dtype: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a plain call's result."""
        if self.per_row:
            return (*shape[:-1], 1), parameter_dtype(dtype)
        return tuple(shape), dtype

    def rule(self, shape, axes, operands: Collection[str]) -> Rule:
        """The rule that decides about a call.

        Args:
          shape: of x.
          axes: along which it reduces, or None.
          operands: names of the arrays besides x.
        """
        return next(r for r in self.rules if r.applies(shape, axes or (), operands))


def gradient_of(function: Callable, parameters: int = 0) -> jax.stages.Wrapped:
    """`(args, dy, **options) -> (y, dx, gradients of the parameters)` in one jit."""

    @jax.jit
    def run(args, dy, **options):
        y, vjp = jax.vjp(functools.partial(function, **options), *args)
        gradients = vjp(dy)
        return y, gradients[0], *gradients[len(gradients) - parameters :]

    return run
