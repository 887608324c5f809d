"""The program with its regions as row programs."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxnorm._autofuse.bodies import Place, bodies_of, made_inside, run_with_bodies
from jaxnorm._autofuse.order import in_order
from jaxnorm._autofuse.region import Region
from jaxnorm._autofuse.regions import Finder
from jaxnorm._autofuse.rewrite import where_differentiated
from jaxnorm._primitive.programs import open_jaxpr, run_program
from jaxnorm._rows import primitive
from jaxnorm._rows.keys import data_of
from jaxnorm._rows.save import Flat, Node, run_node


class Grown:
    """A program with its regions as row programs, in the bodies of loops and branches too.

    Attributes:
      finder: the regions of the program itself.
      bodies: the same for each equation's bodies.
    """

    def __init__(self, closed):
        self.closed = closed
        flat = Flat(closed, body_of=_opened)
        self.finder = Finder(flat)
        self.bodies: list[tuple[Any, Grown]] = []
        self._inner: dict[int, dict[Place, Grown]] = {}
        for equation in self.finder.graph.equations:
            for place, body in bodies_of(equation.node.eqn):
                inner = made_inside(equation.node.eqn, functools.partial(Grown, body))
                self.bodies.append((equation.node.eqn, inner))
                if inner.changes:
                    self._inner.setdefault(id(equation.node), {})[place] = inner

    @property
    def plain(self) -> Iterator[Node]:
        """The equations that no region has, in order, but those of numbers of the program."""
        equations = (self.finder.graph.equations[i] for i in sorted(self.finder.plain))
        return (e.node for e in equations if e.reads)

    @property
    def changes(self) -> bool:
        return bool(self.finder.regions or self._inner)

    def traced(self):
        """The closed jaxpr."""
        if not self.changes:
            return self.closed
        return jax.make_jaxpr(self)(*(v.aval for v in open_jaxpr(self.closed)[0].invars))

    def __call__(self, *operands) -> list:
        if not self.changes:
            return run_program(self.closed, *operands)
        flat = self.finder.flat
        values: dict[int, Any] = dict(flat.constants)
        values.update(zip(flat.operands, operands, strict=True))

        def read(atom):
            return atom.val if isinstance(atom, Literal) else values[atom]

        for item in _order(self.finder):
            if isinstance(item, Region):
                operands = list(map(read, item.inputs))
                names, results = item.results, _run_region(self.finder, item, operands)
            else:
                names, inputs = item.outputs, list(map(read, item.inputs))
                bodies = self._inner.get(id(item))
                if bodies:
                    results = run_with_bodies(item.eqn, inputs, bodies, grow)
                else:
                    results = run_node(item.eqn, inputs)
            values.update(zip(names, results, strict=True))
        return list(map(read, flat.results))


def grow(closed):
    """The program with its regions as row programs."""
    return Grown(closed).traced()


def _run_region(finder: Finder, region: Region, operands) -> list:
    operands = list(map(data_of, operands))

    def operation(*arrays):
        return primitive.run(region.program, arrays)

    def original(*arrays):
        return run_program(region.program, *arrays)

    run = operation if region.gains else where_differentiated(operation, original)
    stopped = _stopped(finder, region)
    results = zip(region.results, run(*operands), strict=True)
    # A tangent of zeros is not the same as none, which `pure_callback` asks for.
    return [jax.lax.stop_gradient(r) if v in stopped else r for v, r in results]


def _stopped(finder: Finder, region: Region) -> set[int]:
    """Results of a region that have no tangent, because all they are computed from stands behind a stop_gradient."""
    graph = finder.graph
    equations = [graph.equations[i] for i in sorted({*region.nodes, *region.again})]
    if not any("stop_gradient" in e.kind.names for e in equations):
        return set()

    def is_inexact(v):
        return jnp.issubdtype(graph.aval(v).dtype, jnp.inexact)

    moving = set(filter(is_inexact, region.inputs))
    for e in equations:
        if e.node.eqn.primitive.name != "stop_gradient" and not moving.isdisjoint(e.reads):
            moving.update(filter(is_inexact, e.node.outputs))
    return set(region.results) - moving


def _opened(eqn):
    """The body of a `jit` that says nothing about shardings, layouts or memory; None for other equations."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    p = eqn.params
    unsaid = all(
        type(s).__name__ == "UnspecifiedValue" for s in (*p["in_shardings"], *p["out_shardings"])
    )
    plain = not any(p["in_layouts"]) and not any(p["out_layouts"]) and not any(p["donated_invars"])
    return p["jaxpr"] if unsaid and plain and not p["compiler_options_kvs"] else None


def _order(finder: Finder) -> list:
    """Equations and regions, operands before their users; equations keep their order where they can."""
    graph = finder.graph
    items: list[tuple[int, Any]] = [(r.nodes[0], r) for r in finder.regions]
    items += [(i, graph.equations[i].node) for i in finder.plain]
    items.sort(key=lambda item: item[0])
    made: dict[int, int] = {}
    for number, (_, item) in enumerate(items):
        if not isinstance(item, Region):
            made.update(dict.fromkeys(item.outputs, number))
    for number, (_, item) in enumerate(items):
        if isinstance(item, Region):
            made.update(dict.fromkeys(item.results, number))
    numbers = {i: number for number, (i, item) in enumerate(items) if not isinstance(item, Region)}
    needs: dict[int, set[int]] = {}
    for number, (i, item) in enumerate(items):
        region = isinstance(item, Region)
        reads = item.inputs if region else graph.equations[i].reads
        needs[number] = {made[v] for v in reads if v in made}
        if not region:  # an effect before this one
            effects = (n for n in graph.needs[i] if graph.equations[n].node.eqn.effects)
            needs[number].update(numbers[n] for n in effects)
    order = in_order(needs, lambda number: number)
    assert len(order) == len(items)
    return [items[number][1] for number in order]
