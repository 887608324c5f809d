"""What the forward program saves for the backward one: the cheapest cut between what is there and what backward reads.

Forward and backward are traced as one program, `Flat`: calls are followed and equal equations merged. Its values are
either known without the cotangents or not. Backward reads known values. It can compute any of them again, on chip, from
the operands or from other known values. Elementwise code costs nothing then; what costs time is memory, and reductions,
which the row has to wait for. So the values to keep are a minimum cut between the operands and what backward reads:

  an operand, a result            weighs its bits: backward reads it
  any other value                 twice its bits: forward writes it, backward reads it
  a boolean along the row         one bit in each direction
  a reduction in backward         half a bit for each element that it reads
  random bits                     cost too much arithmetic to be computed again: the cut lies behind them

Results of this rule: relu and dropout keep one bit per element. A norm of x keeps x and, for rows of 128 columns and
more, a row's statistics. A norm of x + y that returns the sum keeps the sum. tanh keeps its result. Among cuts of the
same weight, the cut nearest to backward is taken.
"""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxnorm._primitive.avals import aval_like, vary_along
from jaxnorm._primitive.programs import Assembly, open_jaxpr, run_equation
from jaxnorm._rows import equations
from jaxnorm._rows.bits import pack, packed_aval, unpack
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.keys import data_aval, kind_of, with_kind
from jaxnorm._rows.view import View

# Calls that mean what their body means, derivatives included: equation -> body. (Calls with rules of their own do not.)
# `body_of` knows more of them.
FOLLOWED: dict[str, Callable] = {
    name: functools.partial(lambda body, eqn: eqn.params[body], body)
    for name, body in equations.CALLS.items()
    if not name.startswith("custom_")
}


def body_of(eqn):
    """The body of a call that means what its body means, derivatives included; None for other equations."""
    name = eqn.primitive.name
    if name in FOLLOWED:
        return FOLLOWED[name](eqn)
    return None if name.startswith("custom_") else equations.body_of(eqn)


# Sources of random bits. The rest of jax.random is cheap.
_RANDOM_BITS = {"random_bits", "threefry2x32", "rng_bit_generator"}
# The weight of a symbolic dimension: only the ratios of weights matter, and most values have the same ones.
_SYMBOLIC_SIZE = 1 << 12
_INFINITE = 1 << 62
# What a reduction in backward weighs, in bits for each element that it reads.
REDUCTION_BITS = 0.5

Atom = Any  # the number of a value, or a Literal


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """An equation between values.

    Attributes:
      eqn: of the jaxpr.
      inputs, outputs: values, or literals.
      number: its place in the program.
      content: its primitive and parameters, equal for equations that compute the same of equal operands; None if there
        is nothing that can be compared.
    """

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    number: int
    content: tuple | None


class Flat:
    """A program as one list of equations: calls are followed, equal equations are one.

    Attributes:
      avals: of the values, which are numbered.
      nodes: the equations, in order.
      operands, results: the values, or the literals, that go in and out.
      constants: arrays that the program holds, by value.
      zeros: values that are 0 because they are linear in operands that are 0.
    """

    def __init__(
        self, closed, zero_operands: Iterable[int] = (), body_of: Callable[[Any], Any] = body_of
    ):
        """`body_of` gives the body of a call that is followed, and None for other equations."""
        self._body_of = body_of
        self.avals: list = []
        self.nodes: list[Node] = []
        self.constants: dict[int, Any] = {}
        self._contents: dict[tuple, tuple] = {}
        self._seen: dict[Any, tuple[Atom, ...]] = {}
        self._producer: dict[int, Node] = {}
        jaxpr, consts = open_jaxpr(closed)
        self.operands = [self._value(v.aval) for v in jaxpr.invars]
        self.zeros = {self.operands[i] for i in zero_operands}
        self.results: list[Atom] = self._follow(jaxpr, consts, self.operands)

    def _value(self, aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, array, aval) -> int:
        value = next((v for v, known in self.constants.items() if known is array), None)
        if value is None:
            value = self._value(aval)
            self.constants[value] = array
        return value

    def _follow(self, jaxpr, consts, operands) -> list[Atom]:
        atoms: dict[Any, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            atoms[variable] = self._constant(const, variable.aval)

        def read(atom):
            return atom if isinstance(atom, Literal) else atoms[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            body = self._body_of(eqn)
            if body is None:
                outputs = self._equation(eqn, inputs)
            else:
                outputs = self._follow(*open_jaxpr(body), inputs)
            atoms.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn, inputs) -> Sequence[Atom]:
        outputs = self._of_zeros(eqn, inputs)
        if outputs is not None:
            return outputs
        original = self._undone(eqn, inputs)
        if original is not None:
            return [original]
        content, key = self._content(eqn), None
        if content and not eqn.effects and eqn.primitive.name not in equations.CALLS:
            key = (id(content), *(literal_key(a) if isinstance(a, Literal) else a for a in inputs))
            if key in self._seen:
                return self._seen[key]
        outputs = tuple(self._value(v.aval) for v in eqn.outvars)
        self.nodes.append(Node(eqn, tuple(inputs), outputs, len(self.nodes), content))
        self._producer.update(dict.fromkeys(outputs, self.nodes[-1]))
        if key is not None:
            self._seen[key] = outputs
        return outputs

    def _content(self, eqn) -> tuple | None:
        """An equation's `Node.content`: one object for all that are equal."""
        try:
            content = eqn.primitive, frozenset(eqn.params.items())
            return self._contents.setdefault(content, content)
        except TypeError:  # parameters that have no hash
            return None

    def _undone(self, eqn, inputs) -> Atom | None:
        """The value that an equation restores, if its operand was made of that value."""
        undoes = _INVERSES.get(eqn.primitive.name)
        node = undoes and self._producer.get(inputs[0])
        return node.inputs[0] if node and node.eqn.primitive.name == undoes else None

    def _of_zeros(self, eqn, inputs) -> list[Atom] | None:
        """The results if zeros among the operands decide them."""
        if not self.zeros:
            return None
        zero = [not isinstance(a, Literal) and a in self.zeros for a in inputs]
        if not any(zero):
            return None
        name = eqn.primitive.name
        if (name in _LINEAR and all(zero)) or (name == "mul") or (name == "div" and zero[0]):
            return self._zero(eqn)
        if name == "select_n" and all(map(self.is_zero, inputs[1:])):
            return self._zero(eqn)
        if name in ("add", "add_any", "sub"):
            if all(zero):
                return self._zero(eqn)
            other = inputs[zero.index(False)]
            if isinstance(other, Literal) or (name == "sub" and zero[0]):
                return None
            if self.avals[other] == eqn.outvars[0].aval:
                return [other]
        return None

    def _zero(self, eqn) -> list[int]:
        outputs = [self._value(v.aval) for v in eqn.outvars]
        self.zeros.update(outputs)
        return outputs

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is 0 by construction: the gradient of an operand that has no influence."""
        if isinstance(atom, Literal):
            return np.ndim(atom.val) == 0 and atom.val == 0
        if atom in self.zeros:
            return True
        node = self._producer.get(atom)
        return (
            node is not None
            and node.eqn.primitive.name in ("broadcast_in_dim", "convert_element_type", "pvary")
            and self.is_zero(node.inputs[0])
        )

    def depending(self, values: Iterable[Atom], tangents: bool = False) -> set[int]:
        """These values and all that are computed from them; with `tangents` not behind a stop_gradient."""
        found = {v for v in values if not isinstance(v, Literal)}
        for node in self.nodes:
            if tangents and node.eqn.primitive.name == "stop_gradient":
                continue
            if any(not isinstance(a, Literal) and a in found for a in node.inputs):
                found.update(node.outputs)
        return found

    def needed(self, wanted: Iterable[Atom], given: Iterable[int]) -> tuple[list[Node], set[int]]:
        """The equations that compute values from given ones, and all values that those read or are wanted."""
        given = set(given)
        live = {a for a in wanted if not isinstance(a, Literal)}
        nodes: set[Node] = set()
        stack = list(live)
        while stack:
            value = stack.pop()
            node = None if value in given else self._producer.get(value)
            if node is not None and node not in nodes:
                nodes.add(node)
                new = {a for a in node.inputs if not isinstance(a, Literal)} - live
                live |= new
                stack += new
        return sorted(nodes, key=lambda node: node.number), live

    def program(
        self,
        operands: Sequence[int],
        results: Sequence[Atom],
        bits: Iterable[int] = (),
        wide: Iterable[int] = (),
    ):
        """A program of some values from others.

        Args:
          operands: values that are given, including values that the program does not need; random keys as their data.
          results: what it returns.
          bits: booleans that are packed where they are operands or results.
          wide: 16-bit numbers that are float32 where they are operands or results.

        Returns:
          (closed jaxpr without constants, arrays that it takes behind its operands).
        """
        bits, wide = set(bits), set(wide)
        nodes, live = self.needed(results, operands)
        constants = [v for v in self.constants if v in live and v not in operands]
        made, values = Assembly(), {}
        for value in (*operands, *constants):
            aval = self.avals[value]
            kind = kind_of(aval) if value in operands else None
            if value in bits:
                n = aval.shape[-1]
                values[value] = made.function(
                    lambda packed, n=n: unpack(packed, n), made.operand(packed_aval(aval))
                )
            elif value in wide:
                values[value] = made.function(
                    lambda x, dtype=aval.dtype: x.astype(dtype),
                    made.operand(aval_like(aval, aval.shape, np.float32)),
                )
            elif kind is not None:
                values[value] = made.function(
                    lambda data, kind=kind: with_kind(data, kind),
                    made.operand(data_aval(aval.shape, aval.dtype)),
                )
            else:
                values[value] = made.operand(aval)

        def read(atom):
            if isinstance(atom, Literal):
                return atom
            if atom not in values and atom in self.zeros:
                aval = self.avals[atom]
                values[atom] = made.function(lambda: jnp.zeros(aval.shape, aval.dtype))
            return values[atom]

        for node in nodes:
            outputs = made.equation(node.eqn, list(map(read, node.inputs)))
            for value, output in zip(node.outputs, outputs, strict=True):
                values.setdefault(value, output)

        def stored(result):
            if isinstance(result, Literal):
                return made.function(lambda: _number(result))
            if result in bits:
                return made.function(pack, read(result))
            if result in wide:
                return made.function(lambda x: x.astype(jnp.float32), read(result))
            return read(result)

        closed = made.closed(list(map(stored, results)))
        return closed, [self.constants[v] for v in constants]

    def run(self, *operands) -> list:
        """The results for operands of any types."""
        values = dict(zip(self.operands, operands, strict=True))
        for node in self.nodes:
            inputs = [a.val if isinstance(a, Literal) else values[a] for a in node.inputs]
            values.update(zip(node.outputs, run_node(node.eqn, inputs), strict=True))
        return [_number(a) if isinstance(a, Literal) else values[a] for a in self.results]

    def equations_of(self, values: Iterable[int], results: Sequence[Atom]):
        """(the equations that compute values, as the compiler has them; a compiler's value for each of them)."""
        nodes, _ = self.needed(values, ())
        made = {v: equations.Value(self.avals[v]) for v in range(len(self.avals))}

        def read(atom):
            return (
                equations.Constant(atom.val, atom.aval) if isinstance(atom, Literal) else made[atom]
            )

        found: list = []
        for node in nodes:
            name, inputs = node.eqn.primitive.name, tuple(map(read, node.inputs))
            if name in equations.CALLS:
                inner = open_jaxpr(node.eqn.params[equations.CALLS[name]])
                outputs = equations._inline(*inner, inputs, found, "")
                made.update(zip(node.outputs, outputs, strict=True))
            else:
                outputs = tuple(made[v] for v in node.outputs)
                found.append(equations.Equation(name, inputs, outputs, dict(node.eqn.params), ""))
        inputs = tuple(made[v] for v in (*self.operands, *self.constants))
        return equations.Equations(inputs, tuple(found), tuple(map(read, results))), made


_SHORT_FLOATS = {np.dtype(np.float16), np.dtype(jnp.bfloat16)}

_INVERSES = {"jaxnorm_unpack_bits": "jaxnorm_pack_bits", "random_unwrap": "random_wrap"}

# Results are 0 where all operands are.
_LINEAR = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "cumsum",
    "expand_dims",
    "gather",
    "neg",
    "pad",
    "pvary",
    "reduce_precision",
    "reduce_sum",
    "reshape",
    "reshard",
    "rev",
    "scatter-add",
    "slice",
    "split",
    "squeeze",
    "transpose",
}


def literal_key(literal: Literal) -> tuple:
    """Equal for literals of the same bits."""
    return np.asarray(literal.val).tobytes(), literal.aval


def run_node(eqn, operands) -> list:
    """Results of an equation; operands may vary along more axes of a shard_map than they did where it was traced."""
    if eqn.primitive.name == "pvary":
        return [vary_along(x, eqn.params["axes"]) for x in operands]
    return run_equation(eqn, operands, eqn.params)


def _number(literal: Literal):
    aval: Any = literal.aval
    return jnp.asarray(literal.val, aval.dtype)


# ---- the cut ----


@dataclasses.dataclass(frozen=True)
class Cut:
    """What backward starts from.

    Attributes:
      kept: known values, in order: operands, results and what is saved besides.
      saved: those that are neither operands nor results.
      bits: booleans among the saved that are packed.
      wide: numbers of rows among the saved that are float32, as they are in the kernel, whatever their own dtype is.
    """

    kept: tuple[int, ...]
    saved: tuple[int, ...]
    bits: frozenset[int]
    wide: frozenset[int]


def cheapest_cut(
    flat: Flat, results: Sequence[Atom], gradients: Sequence[Atom], unknown: set[int]
) -> Cut:
    """The values that forward keeps for backward.

    Args:
      flat: forward and backward as one program.
      results: forward's results.
      gradients: backward's.
      unknown: the cotangents and all that depends on them.
    """
    nodes, _ = flat.needed(gradients, ())
    sinks = {
        a
        for node in nodes
        if node.outputs[0] in unknown
        for a in node.inputs
        if not isinstance(a, Literal) and a not in unknown and a not in flat.zeros
    }
    sinks |= {
        a
        for a in gradients
        if not isinstance(a, Literal) and a not in unknown and not flat.is_zero(a)
    }
    known, _ = flat.needed(sinks, ())
    given = {*flat.operands, *flat.constants} - unknown
    random = {v for n in known if n.eqn.primitive.name in _RANDOM_BITS for v in n.outputs}
    sourced = flat.depending(given | random)
    ends = given | {r for r in results if not isinstance(r, Literal)}
    bits = _packable(flat, results, sinks)

    def size(value):
        return math.prod(
            n if isinstance(n, int) else _SYMBOLIC_SIZE for n in flat.avals[value].shape
        )

    reduced = {
        v: size(n.inputs[0])
        for n in known
        if n.eqn.primitive.name in equations.REDUCTIONS | equations.ARGS
        for v in n.outputs
    }
    most = max(reduced.values(), default=0)
    # Statistics of 16-bit rows: a kernel has their 32 bits, which forward and backward should both use.
    wide = {
        v
        for n in known
        for v in n.outputs
        if flat.avals[v].dtype in _SHORT_FLOATS and 8 * size(v) <= most
    }

    def weight(value):
        aval = flat.avals[value]
        if not isinstance(aval.dtype, np.dtype):  # a random key, which no kernel stores
            return _INFINITE
        if value in ends:
            return size(value) * aval.dtype.itemsize * 8
        width = 1 if value in bits else 32 if value in wide else aval.dtype.itemsize * 8
        # One bit for the array itself: where two cuts cost the same, the cut with fewer arrays wins.
        return 2 * size(value) * width + 1

    network = Network(2 * len(flat.avals) + 2)
    source, sink = 2 * len(flat.avals), 2 * len(flat.avals) + 1
    values = sinks.union(*(n.outputs for n in known))
    values = (values | {a for n in known for a in n.inputs if not isinstance(a, Literal)}) & sourced
    for value in sorted(values):
        network.edge(2 * value, 2 * value + 1, weight(value))
        if value in given or value in random:
            network.edge(source, 2 * value, _INFINITE)
        if value in reduced:
            network.edge(source, 2 * value, int(REDUCTION_BITS * reduced[value]))
        if value in sinks:
            network.edge(2 * value + 1, sink, _INFINITE)
    for node in known:
        for a in values.intersection(i for i in node.inputs if not isinstance(i, Literal)):
            for v in node.outputs:
                network.edge(2 * a + 1, 2 * v, _INFINITE)
    behind = network.minimum_cut(source, sink)
    kept = tuple(v for v in sorted(values) if 2 * v + 1 in behind and 2 * v not in behind)
    saved = tuple(v for v in kept if v not in ends)
    return Cut(kept, saved, frozenset(bits & set(saved)), frozenset(wide & set(saved)))


def _packable(flat: Flat, results, sinks) -> set[int]:
    """Booleans that have all rows, and the row's columns as their last dimension."""
    nodes, _ = flat.needed(sinks, ())
    booleans = {
        v
        for v in (*sinks, *(v for n in nodes for v in n.outputs))
        if flat.avals[v].dtype == np.bool_ and flat.avals[v].ndim
    }
    booleans = {v for v in booleans if isinstance(n := flat.avals[v].shape[-1], int) and n > 1}
    if not booleans:
        return set()
    ends = [r for r in results if not isinstance(r, Literal)]
    try:
        program, numbers = flat.equations_of([*booleans, *ends], results)
        view = View(program)
    except NotARowProgram:
        return set()
    if view.width % 8:
        return set()  # a byte would have bits of two parts of the row
    found = set()
    for value in booleans:
        try:
            dims, layout = view.kinds(numbers[value]), view.stored(numbers[value])
        except NotARowProgram:
            continue
        if dims[-1] == ["column"] and set(layout.rows) == set(range(len(view.row_sizes))):
            found.add(value)
    return found


class Network:
    """Maximum flow by Dinic's algorithm: augmenting paths along the levels of a breadth-first search."""

    def __init__(self, size: int):
        self._edges: list[list[int]] = [[] for _ in range(size)]
        self._to: list[int] = []
        self._capacity: list[
            int
        ] = []  # what is left; an edge's number and the reverse one's differ in the last bit

    def edge(self, a: int, b: int, capacity: int) -> None:
        for start, end, c in ((a, b, capacity), (b, a, 0)):
            self._edges[start].append(len(self._to))
            self._to.append(end)
            self._capacity.append(c)

    def minimum_cut(self, source: int, sink: int) -> set[int]:
        """The vertices on the sink's side of the minimum cut that is nearest to it."""
        while (levels := self._levels(source, sink))[sink] >= 0:
            position = [0] * len(self._edges)
            while self._augment(source, sink, levels, position):
                pass
        behind, queue = {sink}, deque([sink])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                if self._capacity[edge ^ 1] > 0 and self._to[edge] not in behind:
                    behind.add(self._to[edge])
                    queue.append(self._to[edge])
        return behind

    def _levels(self, source, sink) -> list[int]:
        levels = [-1] * len(self._edges)
        levels[source] = 0
        queue = deque([source])
        while queue and levels[sink] < 0:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                if self._capacity[edge] > 0 and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[vertex] + 1
                    queue.append(self._to[edge])
        return levels

    def _augment(self, source, sink, levels, position) -> bool:
        """Sends flow along one path; `position` is where each vertex goes on looking."""
        path, vertex = [], source
        while vertex != sink:
            edges = self._edges[vertex]
            while position[vertex] < len(edges):
                edge = edges[position[vertex]]
                if self._capacity[edge] > 0 and levels[self._to[edge]] == levels[vertex] + 1:
                    path.append(edge)
                    vertex = self._to[edge]
                    break
                position[vertex] += 1
            else:
                if not path:
                    return False
                vertex = self._to[path.pop() ^ 1]
                position[vertex] += 1
        flow = min(self._capacity[e] for e in path)
        for edge in path:
            self._capacity[edge] -= flow
            self._capacity[edge ^ 1] += flow
        return True
