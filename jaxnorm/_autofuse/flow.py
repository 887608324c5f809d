"""The equations of a program as regions see them: what each computes of rows, and which run before which.

A `Graph` has the equations that results need, and the order in which they can run.
"""

import collections
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxnorm._autofuse.order import Order
from jaxnorm._autofuse.program import is_left
from jaxnorm._rows import equations
from jaxnorm._rows.dimensions import check_label, cut_dimensions, looks_into_one
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.keys import is_key
from jaxnorm._rows.rules import RULES, STORED
from jaxnorm._rows.save import Flat, Node, literal_key

# The most pieces that a region joins to a row.
PIECES = 4
# Operations that row programs have, and that regions leave where they are: what they say is about the whole array.
_LEFT = {
    "copy_p", "jaxnorm_pack_bits", "jaxnorm_unpack_bits", "mesh_cast", "name", "optimization_barrier", "pcast", "pvary",
    "random_wrap", "reduce_precision", "reshard", "sharding_constraint",
}  # fmt: skip
# Calls that are row programs already, or that keep statistics over rows.
_OPAQUE = ("jaxnorm_row_", "jaxnorm_batch_norm")
# Functions of so many instructions that XLA's code for 16-bit elements takes longer than its bytes.
_LONG = {"erf", "erfc", "tanh"}
# What cuts, joins or reverses rows.
CUTS = {"concatenate", "pad", "rev", "slice", "split"}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction in an equation, or in what it calls.

    Attributes:
      shape: sizes of the dimensions that number the rows, without those of size 1.
      columns: the number of elements of a row.
      along_row: whether it runs along rows; otherwise it is a sum over rows.
      extreme: whether it is the largest or the smallest element.
    """

    shape: tuple[int, ...]
    columns: int
    along_row: bool
    extreme: bool = False

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self.shape)


# ---- equations ----


def _inner(eqn) -> list:
    """The operations of an equation; none where one of them is not an operation of rows."""
    name = eqn.primitive.name
    if eqn.effects or name.startswith(_OPAQUE) or name in ("checkpoint", "remat2") or is_left(eqn):
        return []
    if name in _LEFT or (name not in RULES and equations.body_of(eqn) is None):
        return []
    try:
        found = equations.operations_of(eqn)
    except NotARowProgram:
        return []
    known = all(
        e.primitive in RULES and _takes_a_label(e) and _cuts_rows(e) and _has_widths_of_here(e)
        for e in found
    )
    return found if known else []


def _has_widths_of_here(equation) -> bool:
    """False for 64 bits that `jax.enable_x64` allows inside of the program alone: derivatives are traced outside."""
    dtypes = (v.aval.dtype for v in (*equation.inputs, *equation.outputs))
    wide = (d for d in dtypes if isinstance(d, np.dtype) and d.itemsize >= 8)
    return all(jax.dtypes.canonicalize_dtype(d) == d for d in wide)


def _cuts_rows(equation) -> bool:
    """Whether what an operation cuts, joins or reverses are rows; true of one that does nothing such."""
    if equation.primitive not in CUTS:
        return True
    last = len(equation.outputs[0].aval.shape) - 1
    return all(d == last for d in cut_dimensions(equation))


def _takes_a_label(equation) -> bool:
    """Whether a gather or scatter is of one element of each row."""
    if equation.primitive not in ("gather", "scatter-add") or looks_into_one(equation):
        return True
    try:
        check_label(equation)
    except NotARowProgram:
        return False
    return True


def _reduction(equation) -> Reduction | None:
    if equation.primitive not in equations.REDUCTIONS | equations.ARGS:
        return None
    shape, axes = equation.inputs[0].aval.shape, equation.params["axes"]
    long = [d for d, n in enumerate(shape) if n != 1]
    reduced = [d for d in axes if shape[d] != 1]
    if not reduced:
        return None
    rows = tuple(shape[d] for d in long[:-1])
    if reduced == long[-1:] or long[-1] not in reduced:
        extreme = equation.primitive.endswith(("max", "min"))
        return Reduction(rows, shape[long[-1]], reduced == long[-1:], extreme)
    return Reduction((), 0, False)  # of rows and columns


def _is_plain(aval) -> bool:
    """Whether kernels hold such an array: its sizes are numbers, and so are its elements."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return (
        shape is not None
        and isinstance(dtype, np.dtype)
        and dtype in STORED
        and all(isinstance(n, int) and n > 0 for n in shape)
    )


def _joins(equation) -> bool:
    """Whether an operation joins a few pieces of rows."""
    if equation.primitive != "concatenate":
        return False
    last = len(equation.outputs[0].aval.shape) - 1
    return equation.params["dimension"] == last and len(equation.inputs) <= PIECES


class Kind:
    """What regions ask of an equation. Equations that differ in nothing but their values are of one kind.

    Attributes:
      operations: its own, or those of what it calls; none where rows do not have them.
      known: whether there are any.
      names: of the operations.
      reductions: those of them that reduce.
      sums_rows: whether one of them is a sum over rows.
      joins: whether it joins a few pieces of rows. XLA writes what costs something to compute before it joins it.
      draws: whether it draws random bits, of which a mask is made that backward needs, too.
      is_long: whether it has a function that takes XLA longer than to read and write 16-bit elements.
      depth: how many reductions along rows follow one another.
    """

    def __init__(self, eqn):
        reads = [v.aval for v in eqn.invars if not isinstance(v, Literal)]
        draws = eqn.primitive.name == "random_bits"
        plain = all(_is_plain(v.aval) for v in eqn.outvars) and all(
            _is_plain(a) or (draws and is_key(a)) for a in reads
        )
        self.operations = _inner(eqn) if plain and eqn.outvars else []
        self.names = {e.primitive for e in self.operations}
        self.reductions = []
        self.joins = len(self.operations) == 1 and _joins(self.operations[0])
        self.draws = "random_bits" in self.names
        self.is_long = not self.names.isdisjoint(_LONG)
        self.depth = 0
        level: dict = {}
        for e in self.operations:
            found = _reduction(e)
            at = max((level.get(v, 0) for v in e.inputs), default=0)
            if found is not None:
                self.reductions.append(found)
                at += found.along_row
            level.update(dict.fromkeys(e.outputs, at))
            self.depth = max(self.depth, at)
        if any(r.columns == 0 for r in self.reductions):
            self.operations = []
        self.known = bool(self.operations)
        self.sums_rows = any(not r.along_row for r in self.reductions)

    @property
    def rows(self) -> Reduction:
        """The rows of its result."""
        shape = self.operations[-1].outputs[0].aval.shape
        return Reduction(tuple(n for n in shape[:-1] if n != 1), shape[-1] if shape else 1, True)


class Equation:
    """An equation of the flat program.

    Attributes:
      node: its place there.
      reads: the values that it takes.
      kind: what it computes.
    """

    __slots__ = "kind", "node", "reads"

    def __init__(self, node: Node, kind: Kind):
        self.node, self.kind = node, kind
        self.reads = list(dict.fromkeys(a for a in node.inputs if not isinstance(a, Literal)))


def _equations(flat: Flat) -> list[Equation]:
    """What results need, or has an effect."""
    kinds: dict[Any, Kind] = {}

    def kind_of(node: Node) -> Kind:
        if node.content is None:
            return Kind(node.eqn)
        atoms = (literal_key(v) if isinstance(v, Literal) else v.aval for v in node.eqn.invars)
        key = (id(node.content), *atoms)
        if key not in kinds:
            kinds[key] = Kind(node.eqn)
        return kinds[key]

    return [Equation(node, kind_of(node)) for node in _live(flat)]


# ---- the graph ----


class Graph:
    """A flat program's equations, and which of them come before which.

    Attributes:
      flat: the program.
      equations: what results need, or has an effect, in order.
      producer: the equation that makes a value.
      users: equations that read a value.
      numbers: equations that compute one number of literals alone, each with all that it needs.
      results: values that the program returns.
      needs: equations that must run before one, directly.
      order: in which they can run.
      programs: those of regions, by what the regions have.
    """

    def __init__(self, flat: Flat):
        self.flat = flat
        self.equations = _equations(flat)
        self.producer = {v: i for i, e in enumerate(self.equations) for v in e.node.outputs}
        self.users: dict[int, list[int]] = collections.defaultdict(list)
        for i in range(len(self.equations)):
            for v in self.equations[i].reads:
                self.users[v].append(i)
        self._summed = self._readers_of_sums()
        self.numbers = self._numbers()
        self.results = {a for a in flat.results if not isinstance(a, Literal)}
        self.needs = [self._needs(i) for i in range(len(self.equations))]
        effects = [i for i, e in enumerate(self.equations) if e.node.eqn.effects]
        for earlier, later in itertools.pairwise(effects):
            self.needs[later].append(earlier)
        barriers = [i for i, e in enumerate(self.equations) if not e.kind.known]
        self.order = Order(self.needs, barriers)
        self.programs: dict[Any, Any] = {}
        self._neighbours: dict[int, list[int]] = {}

    def _needs(self, i) -> list[int]:
        found = (self.producer[v] for v in self.equations[i].reads if v in self.producer)
        return list(dict.fromkeys(found))

    def neighbours(self, i) -> list[int]:
        """Equations that make what one reads or read what it makes, and those of sums over rows of what it reads."""
        found = self._neighbours.get(i)
        if found is None:
            equation, users = self.equations[i], self.users
            found = [*self.needs[i]]
            for v in equation.node.outputs:
                found += users.get(v, ())
            for v in equation.reads:
                found += self._summed.get(v, ())
            self._neighbours[i] = found
        return found

    def _readers_of_sums(self) -> dict[int, list[int]]:
        """Equations that read a value and are sums over rows, or are read by one."""
        sums = [i for i, e in enumerate(self.equations) if e.kind.sums_rows]
        found: dict[int, list[int]] = {}
        for reader in sorted({*sums, *(n for i in sums for n in self._needs(i))}):
            for v in self.equations[reader].reads:
                found.setdefault(v, []).append(reader)
        return found

    def _numbers(self) -> dict[int, frozenset[int]]:
        """For each equation that computes one number of literals alone: itself, and all that it needs."""
        found: dict[int, frozenset[int]] = {}
        for i, e in enumerate(self.equations):
            alone = all(self.producer.get(v) in found for v in e.reads)
            if alone and e.kind.known and all(self.size(v) == 1 for v in e.node.outputs):
                found[i] = frozenset((i,)).union(*(found[m] for m in self._needs(i)))
        return found

    def aval(self, value):
        return self.flat.avals[value]

    def size(self, value: int) -> int:
        """The number of elements of a value."""
        return math.prod(self.aval(value).shape)

    def nbytes(self, value: int) -> int:
        """The bytes of a value; none for random keys."""
        aval = self.aval(value)
        return 0 if is_key(aval) else self.size(value) * np.dtype(aval.dtype).itemsize


def _live(flat: Flat) -> list[Node]:
    """The equations that results need, and those with effects."""
    live = {a for a in flat.results if not isinstance(a, Literal)}
    nodes = []
    for node in reversed(flat.nodes):
        if node.eqn.effects or not live.isdisjoint(node.outputs):
            nodes.append(node)
            live.update(a for a in node.inputs if not isinstance(a, Literal))
    return nodes[::-1]
