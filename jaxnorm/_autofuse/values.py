"""What variables of a program hold, as expressions in which one function has one spelling.

An expression is a graph of Nodes. A Node has no dimensions of size 1 and none along which it is constant. What a
variable holds is a View of a Node: which of the variable's dimensions are which of the Node's, the others being
broadcast. So keepdims, squeeze, expand_dims, reshape by ones, transpose and broadcast_in_dim change the View only, and
`rsqrt(mean[..., None] + epsilon)` is the same Node wherever its author put the broadcast.

Two Nodes with one `key` are the same function in exact arithmetic: conversions between floating-point types have the
key of what they convert. Where they round is judged afterwards, over all equations that a match replaces.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxnorm._rows.graph import stored

# A mapping says for each dimension of one thing which dimension of another it is; None for a broadcast one.
Mapping = tuple


@dataclasses.dataclass(eq=False)
class Node:
    """One expression; made by `Values`, which makes equal ones once.

    Attributes:
      op: name of a jax.lax primitive, "constant", "pick" for one element per row, or "unknown" for what is not looked
        into.
      args: operands, each with a mapping from this node's dimensions to its own.
      params: what else the value depends on.
      shape: without dimensions of size 1.
      dtype: of the values.
      key: equal for equal functions.
      terms, depends: what algebra.py has found out about it.
    """

    op: str
    args: tuple["Arg", ...]
    params: tuple
    shape: tuple
    dtype: np.dtype
    key: int
    terms: dict = dataclasses.field(default_factory=dict, repr=False)
    depends: dict = dataclasses.field(default_factory=dict, repr=False)

    @property
    def constant(self) -> float | None:
        return self.params[0] if self.op == "constant" else None


class Arg(NamedTuple):
    node: Node
    dims: Mapping


class View(NamedTuple):
    """What a variable of shape `shape` holds: dimension i is dimension dims[i] of the node."""

    node: Node
    dims: Mapping
    shape: tuple


def is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def at_least(a, b) -> bool:
    """Whether floating-point type `a` holds every value of `b`."""
    fa, fb = jnp.finfo(a), jnp.finfo(b)
    return fa.nmant >= fb.nmant and fa.nexp >= fb.nexp


def identity(node: Node) -> Mapping:
    return tuple(range(len(node.shape)))


def compose(outer: Mapping, inner: Mapping) -> Mapping:
    """The mapping from what `inner` is about to what `outer` is about: inner, then outer."""
    return tuple(None if d is None else outer[d] for d in inner)


def unwidened(node: Node) -> Node:
    """The node without conversions that lose nothing."""
    while node.op == "convert" and is_float(node.args[0].node.dtype):
        inner = node.args[0].node
        if not at_least(node.dtype, inner.dtype):
            break
        node = inner
    return node


def unconverted(node: Node) -> Node:
    """The node without conversions between floating-point types; they keep the order of dimensions."""
    while node.op == "convert" and is_float(node.args[0].node.dtype):
        node = node.args[0].node
    return node


def _power(base: float, exponent: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float64(base) ** exponent)


_FOLD = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else math.nan,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
    "sqrt": lambda a: math.sqrt(a) if a >= 0 else math.nan,
    "rsqrt": lambda a: 1 / math.sqrt(a) if a > 0 else math.nan,
    "power": lambda a, *, exponent: _power(a, float(exponent)) if a > 0 else math.nan,
    "gt": lambda a, b: float(a > b),
    "ge": lambda a, b: float(a >= b),
    "lt": lambda a, b: float(a < b),
    "le": lambda a, b: float(a <= b),
    "eq": lambda a, b: float(a == b),
    "ne": lambda a, b: float(a != b),
    "not": lambda a: float(not a),
    "and": lambda a, b: float(a and b),
    "or": lambda a, b: float(a or b),
}
_COMMUTE = {"add", "mul", "max", "min", "and", "or"}

# Elementwise, in all their operands; what no pattern names is here so that masks and the like may be compared.
ELEMENTWISE = frozenset(
    "add sub mul div max min neg abs sign exp log tanh logistic sqrt rsqrt power gt ge lt le eq ne not and or xor rem "
    "is_finite stop_gradient select_n convert floor ceil erf sin cos".split()
)
REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_or"))


class Values:
    """Makes Nodes and Views."""

    def __init__(self):
        self._nodes: dict = {}
        self._keys: dict = {}

    # ---- sources ----

    def constant(self, value, dtype, shape=()) -> View:
        node = self._node("constant", (), (value,), (), np.dtype(dtype), ("constant", value))
        return View(node, (None,) * len(shape), tuple(shape))

    def unknown(self, shape, dtype) -> View:
        """A value of which nothing is known but that it is itself."""
        kept = [i for i, n in enumerate(shape) if not is_one(n)]
        dims: list[int | None] = [None] * len(shape)
        for position, i in enumerate(kept):
            dims[i] = position
        key = self._keys.setdefault(("unknown", len(self._keys)), len(self._keys))
        node = Node("unknown", (), (), tuple(shape[i] for i in kept), dtype, key)
        return View(node, tuple(dims), tuple(shape))

    def iota(self, shape, dimension, dtype) -> View:
        """Numbers from 0 along a dimension."""
        size = shape[dimension]
        if is_one(size):
            return self.constant(0.0, dtype, shape)
        dims = tuple(0 if i == dimension else None for i in range(len(shape)))
        node = self._node("iota", (), (), (size,), np.dtype(dtype), ("iota", size))
        return View(node, dims, tuple(shape))

    def _node(self, op, args, params, shape, dtype, meaning):
        identity_ = (op, tuple((id(a.node), a.dims) for a in args), params, shape, dtype)
        if identity_ not in self._nodes:
            key = (
                meaning
                if isinstance(meaning, int)
                else self._keys.setdefault(meaning, len(self._keys))
            )
            self._nodes[identity_] = Node(op, args, params, shape, dtype, key)
        return self._nodes[identity_]

    # ---- dimensions ----

    def broadcast(self, view: View, shape, dimensions) -> View:
        dims: list[int | None] = [None] * len(shape)
        for i, d in enumerate(dimensions):
            dims[int(d)] = view.dims[i]
        return View(view.node, tuple(dims), tuple(shape))

    def transpose(self, view: View, permutation) -> View:
        return View(
            view.node,
            tuple(view.dims[p] for p in permutation),
            tuple(view.shape[p] for p in permutation),
        )

    def reshape(self, view: View, shape) -> View | None:
        """None where sizes other than 1 change."""
        old = [i for i, n in enumerate(view.shape) if not is_one(n)]
        new = [i for i, n in enumerate(shape) if not is_one(n)]
        if [view.shape[i] for i in old] != [shape[i] for i in new]:
            return None
        dims: list[int | None] = [None] * len(shape)
        for i, j in zip(old, new, strict=True):
            dims[j] = view.dims[i]
        return View(view.node, tuple(dims), tuple(shape))

    # ---- arithmetic ----

    def apply(self, op: str, views: Sequence[View], shape, dtype, params=()) -> View:
        """An elementwise operation; views are scalars or of this shape, up to dimensions of size 1."""
        shape, rank = tuple(shape), len(shape)
        views = [v if len(v.shape) == rank else View(v.node, (None,) * rank, shape) for v in views]
        simpler = self._simplify(op, views, shape, dtype, params)
        if simpler is not None:
            return simpler
        if op in _COMMUTE:
            views = sorted(views, key=lambda v: (v.node.key, str(v.dims)))
        kept = [i for i in range(rank) if any(v.dims[i] is not None for v in views)]
        if len(views) == 1:  # transposing commutes with this
            kept.sort(key=lambda i: views[0].dims[i])
        args = tuple(Arg(v.node, tuple(v.dims[i] for i in kept)) for v in views)
        node_shape = tuple(shape[i] for i in kept)
        if op == "convert" and is_float(dtype) and is_float(views[0].node.dtype):
            meaning = views[0].node.key
        else:
            kind = np.dtype(dtype).kind if op == "convert" else ""
            meaning = (op, kind, tuple((a.node.key, a.dims) for a in args), params)
        node = self._node(op, args, params, node_shape, dtype, meaning)
        dims = tuple(kept.index(i) if i in kept else None for i in range(rank))
        return View(node, dims, shape)

    def _simplify(self, op, views, shape, dtype, params) -> View | None:
        constants = [v.node.constant for v in views]
        if op == "select_n" and len(views) == 3:
            _, *cases = views
            if constants[0] is not None:
                chosen = cases[bool(constants[0])]
                return View(chosen.node, chosen.dims, shape)
        if op == "not" and views[0].node.op == "not":
            inner = views[0].node.args[0]
            return View(inner.node, compose(inner.dims, views[0].dims), shape)
        if op == "lt" and views[0].node.op == "iota" and constants[1] == 0:
            return self.constant(0.0, np.bool_, shape)
        if op == "convert":
            return self._simplify_convert(views[0], constants[0], shape, dtype)
        if (
            all(c is not None for c in constants)
            and op in _FOLD
            and (is_float(dtype) or dtype == np.bool_)
        ):
            value = _FOLD[op](*constants, **dict(params))
            return self.constant(float(stored(value, dtype)), dtype, shape)
        if not is_float(dtype):
            return None
        if op == "power":
            exponent = dict(params)["exponent"]
            if exponent == 1:
                return View(views[0].node, views[0].dims, shape)
            named = {Fraction(1, 2): "sqrt", Fraction(-1, 2): "rsqrt"}.get(exponent)
            return self.apply(named, views, shape, dtype) if named else None
        if op == "mul" and views[0] == views[1]:
            return self.apply("power", views[:1], shape, dtype, (("exponent", Fraction(2)),))
        neutral = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "max": -math.inf}.get(op)
        if neutral is not None:
            if constants[1] == neutral:
                return View(views[0].node, views[0].dims, shape)
            if constants[0] == neutral and op in _COMMUTE:
                return View(views[1].node, views[1].dims, shape)
        if op == "div" and constants[1]:
            reciprocal = self.constant(1 / constants[1], dtype, shape)
            return self.apply("mul", [views[0], reciprocal], shape, dtype)
        return None

    def _simplify_convert(self, view, constant, shape, dtype) -> View | None:
        if view.node.dtype == dtype:
            return view
        if constant is not None and (is_float(dtype) or dtype == np.bool_ or constant.is_integer()):
            return self.constant(float(stored(constant, dtype)), dtype, shape)
        if view.node.op == "convert" and view.node.args[0].node.dtype == bool:
            inner = view.node.args[0]
            return self.apply(
                "convert", [View(inner.node, compose(inner.dims, view.dims), shape)], shape, dtype
            )
        return None

    def reduce(self, op: str, view: View, axes, dtype) -> View:
        axes = [int(a) for a in axes]
        left = [i for i in range(len(view.shape)) if i not in axes]
        shape = tuple(view.shape[i] for i in left)
        reduced = tuple(sorted(view.dims[i] for i in axes if view.dims[i] is not None))
        node = view.node
        if reduced:
            rest = [d for d in identity(node) if d not in reduced]
            args = (Arg(node, identity(node)),)
            params = (("axes", reduced),)
            meaning = (op, node.key, reduced)
            node = self._node(op, args, params, tuple(node.shape[d] for d in rest), dtype, meaning)
            position = {d: i for i, d in enumerate(rest)}
        else:
            position = {d: d for d in identity(node)}
        dims = tuple(None if view.dims[i] is None else position[view.dims[i]] for i in left)
        result = View(node, dims, shape)
        if op == "reduce_sum":
            copies = math.prod(view.shape[i] for i in axes if view.dims[i] is None)
            return self.apply("mul", [result, self.constant(float(copies), dtype)], shape, dtype)
        return result

    def pick(self, view: View, axis: int, out, index: View, index_out, shape, mode) -> View | None:
        """The elements at `index` along `axis`, one per row; None where rows are broadcast.

        Args:
          view: what is picked from.
          axis: dimension of it along which that is.
          out: for each dimension of it, the result's; None for the axis, and for what the result does not have.
          index: which element.
          index_out: as `out`.
          shape: of the result.
          mode: of the gather, for indices that are outside.
        """
        along = view.dims[axis]
        rows = {place: i for i, place in enumerate(out) if place is not None}
        if along is None or any(
            view.dims[i] is None and not is_one(view.shape[i]) for i in rows.values()
        ):
            return None
        left = [d for d in identity(view.node) if d != along]
        places = [out[view.dims.index(d)] for d in left]
        of_index = dict(zip(index_out, index.dims, strict=True))
        args = (
            Arg(view.node, identity(view.node)),
            Arg(index.node, tuple(of_index.get(p) for p in places)),
        )
        params = (("axis", along), ("mode", mode))
        meaning = ("pick", view.node.key, index.node.key, args[1].dims, params)
        node_shape = tuple(view.node.shape[d] for d in left)
        node = self._node("pick", args, params, node_shape, view.node.dtype, meaning)
        dims = tuple(places.index(p) if p in places else None for p in range(len(shape)))
        return View(node, dims, tuple(shape))


def is_one(size) -> bool:
    return isinstance(size, (int, np.integer)) and size == 1
