"""What a pattern found: an operation, its operands, and which expression it stands for."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxnorm._autofuse.algebra import Ref, Term, whole
from jaxnorm._autofuse.costs import Rule
from jaxnorm._autofuse.program import Program, Value
from jaxnorm._autofuse.values import Mapping, Node, compose
from jaxnorm._primitive.arithmetic import acc_dtype


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that the operation takes: terms in values of the program, with dimensions of x.

    Attributes:
      terms: their sum is the array. Most are one value, once.
      axes: dimensions of x that the array has, all in full. None: any of them, and size 1 for the others.
    """

    terms: tuple[Term, ...]
    axes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, ref: Ref) -> "Operand":
        return cls((Term(1.0, ((ref, Fraction(1)),)),))

    def moved(self, place: Mapping) -> "Operand":
        """The same where dimension i of x is called place[i]."""
        terms = tuple(
            Term(
                t.coefficient, tuple((Ref(r.node, compose(place, r.dims)), e) for r, e in t.powers)
            )
            for t in self.terms
        )
        # Parameters have the axes in ascending order.
        return Operand(terms, self.axes and tuple(sorted(place[a] for a in self.axes)))

    @property
    def refs(self) -> list[Ref]:
        return [ref for term in self.terms for ref, _ in term.powers]

    def array(self, shape, read: Callable[[Node], tuple[Any, Mapping]]):
        """Its value.

        Args:
          shape: that of x.
          read: from a node to an array, and the node's dimensions that those of the array are.
        """

        def placed(ref):
            array, layout = read(ref.node)
            of_x = [ref.dims[d] for d in layout]
            array = jnp.transpose(array, sorted(range(array.ndim), key=of_x.__getitem__))
            if self.axes is None:
                return jnp.expand_dims(array, [d for d in range(len(shape)) if d not in of_x])
            missing = [i for i, d in enumerate(self.axes) if d not in of_x]
            sizes = [shape[d] for d in self.axes]
            return jnp.broadcast_to(jnp.expand_dims(array, missing), sizes)

        def power(ref, e):
            array = placed(ref)
            array = array.astype(acc_dtype(array.dtype))
            return array if e == 1 else array ** (int(e) if e.denominator == 1 else float(e))

        def value(term):
            factors = [power(ref, e) for ref, e in term.powers]
            return functools.reduce(operator.mul, factors, jnp.float32(term.coefficient))

        (first, *rest) = self.terms
        if not rest and first.coefficient == 1 and [e for _, e in first.powers] == [1]:
            return placed(self.refs[0])
        return functools.reduce(operator.add, map(value, self.terms))


@dataclasses.dataclass(frozen=True)
class Apart(Operand):
    """An array that the operation takes in dimensions of its own, as a matrix product takes its second operand.

    `terms` and `axes` are in these dimensions.

    Attributes:
      shape: their sizes.
    """

    shape: tuple[int, ...] = ()

    @classmethod
    def whole(cls, ref: Ref, shape) -> "Apart":
        return cls(Operand.of(ref).terms, tuple(range(len(shape))), shape)

    def moved(self, place: Mapping) -> "Apart":
        """The same: it has none of the dimensions of x."""
        return self

    def array(self, shape, read: Callable[[Node], tuple[Any, Mapping]]):
        """Its value, as that of an Operand; the shape of x makes no difference."""
        return super().array(self.shape, read)


@dataclasses.dataclass
class Match:
    """An operation that a value of the program is the result of.

    Attributes:
      operation: name of jaxnorm's function.
      output: the value.
      x: its first operand, in the dimensions of the output's node; None for those that this does not have.
      operands: all of them by argument name, in the dimensions of x or apart from them.
      axes: dimensions of x that `axis` names; None for elementwise operations.
      options: arguments that are not arrays.
      core: the node that every spelling of the operation has; candidates with one core are alternatives.
      by_products: node -> (name, the dimensions of x that the node's are) of another result of the operation.
      function: makes the call: of operands, axis and options, and of the result's dtype; its result has the dimensions
        of x. None for jaxnorm's function itself.
      shown: what that does around the call, for the report.
      rounded: nodes that the operation rounds to their dtype, too, however precise its result is.
      fixed: names of operands for which the operation has another derivative than the program. Where JAX
        differentiates these, the program's own code is taken.
      rule: whether it is worth it; None for what the operation's record says.
    """

    operation: str
    output: Value
    x: Ref
    operands: dict[str, Operand]
    axes: tuple[int, ...] | None
    options: dict[str, Any]
    core: Node
    by_products: Callable[[Node], tuple[str, tuple] | None] = lambda node: None
    function: Callable | None = None
    shown: str = "{}"
    rounded: tuple[Node, ...] = ()
    fixed: tuple[str, ...] = ()
    rule: Rule | None = None

    def __post_init__(self):
        self.options = {name: _short(value) for name, value in self.options.items()}
        self.operands.setdefault("x", Operand.of(whole(self.x.node)))

    def transposed(self, layout: tuple[int, ...]) -> "Match":
        """The same with dimensions of x in another order: the i-th is what is now layout[i]."""
        place = tuple(sorted(range(len(layout)), key=layout.__getitem__))
        by_products = self.by_products

        def moved(node):
            product = by_products(node)
            return product and (product[0], compose(place, product[1]))

        return dataclasses.replace(
            self,
            x=Ref(self.x.node, compose(self.x.dims, layout)),
            operands={name: operand.moved(place) for name, operand in self.operands.items()},
            axes=None if self.axes is None else tuple(sorted(place[a] for a in self.axes)),
            by_products=moved,
        )


@dataclasses.dataclass(frozen=True)
class Left:
    """What looks like an operation and is left alone.

    Attributes:
      operation: what it looks like.
      core: as in Match.
      reason: why it is left.
      rank: of the reasons that parts of one formula give, one of the highest rank is reported; 0 are not.
    """

    operation: str
    core: Node
    reason: str
    rank: int


def _short(value):
    """A number as it was written: 1e-06, not what float32 made of it."""
    if not isinstance(value, float) or np.float32(value) != value:
        return value
    return float(str(np.float32(value)))


def outside_of_calls(find: Callable) -> Callable:
    """From `find(output)` to what `Operation.find` is: nothing for calls with a derivative of their own."""

    def candidates(program: Program, output: Value):
        return iter(()) if output.equation in program.calls else find(output)

    return candidates
