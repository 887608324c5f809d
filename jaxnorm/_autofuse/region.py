"""A region, and the program that its kernel runs."""

import dataclasses
import functools
import math
import weakref
from typing import Any

from jax.extend.core import Literal

from jaxnorm._autofuse.flow import Graph
from jaxnorm._primitive.programs import trace_context
from jaxnorm._rows.save import literal_key

# XLA's bytes divided by a region's, from which on the region is a kernel also where nothing is differentiated.
LEAST_GAIN = 1.05


@dataclasses.dataclass(eq=False)
class Region:
    """Equations that are one row program. Equations are numbered as in `Graph`, values as in `Flat`.

    Attributes:
      shape: sizes of the dimensions that number the rows, without those of size 1.
      columns: the number of elements of a row.
      nodes: its equations, in order.
      again: earlier equations that it computes once more.
      inputs, results: values.
      packed: those of them that are booleans, eight to a byte.
      program: the closed jaxpr from inputs to results.
      bytes: that it reads and writes.
      before: bytes that XLA moves for the same.
      is_long: whether XLA's code takes longer than its bytes.
      ends: equations that ended it.
    """

    shape: tuple[int, ...]
    columns: int
    nodes: list[int]
    again: list[int] = dataclasses.field(default_factory=list)
    inputs: list[int] = dataclasses.field(default_factory=list)
    results: list[int] = dataclasses.field(default_factory=list)
    packed: frozenset[int] = frozenset()
    program: Any = None
    bytes: int = 0
    before: int = 0
    is_long: bool = False
    ends: tuple[int, ...] = ()

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(self.shape)

    @property
    def gains(self) -> bool:
        """Whether it is worth its kernel where nothing is differentiated."""
        return self.is_long or self.before >= LEAST_GAIN * self.bytes


# ---- programs ----

_programs: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def program_of(graph: Graph, region: Region):
    """The region's closed jaxpr; that of an equal region, such as another layer's, where there is one."""
    content = (
        tuple(map(tuple, (region.nodes, region.again, region.inputs, region.results))),
        region.packed,
    )
    if content not in graph.programs:
        graph.programs[content] = _program(graph, region)
    return graph.programs[content]


def _program(graph: Graph, region: Region):
    key = _key(graph, region)
    found = key and _programs.get(key)
    if found is None:
        found, none = graph.flat.program(region.inputs, region.results, region.packed)
        assert not none
        if key is not None:
            _programs[key] = found
    return found


def _key(graph: Graph, region: Region) -> tuple | None:
    """Equal for regions that do the same, functions in the parameters compared by identity; None if there is no key."""
    numbers = {v: n for n, v in enumerate(region.inputs)}
    lines = []
    for i in sorted({*region.nodes, *region.again}):
        node = graph.equations[i].node
        if node.content is None:
            return None
        atoms = tuple(literal_key(a) if isinstance(a, Literal) else numbers[a] for a in node.inputs)
        for v in node.outputs:
            numbers[v] = len(numbers)
        avals = tuple(map(graph.aval, node.outputs))
        lines.append((node.content, atoms, avals))
    return (
        tuple(map(graph.aval, region.inputs)),
        tuple(lines),
        tuple(numbers[v] for v in region.results),
        tuple(v in region.packed for v in (*region.inputs, *region.results)),
        trace_context(),
    )
