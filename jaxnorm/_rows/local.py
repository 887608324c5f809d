"""What each device computes of a row program that several devices share.

A program has *axes*: its row dimensions and, last, its columns. Devices cut axes into blocks (`_sharding.Blocks`), and
a dimension of an array is one axis or several. Each device replays the equations on its blocks:

  rows are cut       as one row program. Sums over rows are partial results of it, which one all-reduce adds up. What
                     follows them, such as a conversion, is not in the program.
  columns are cut    the same where nothing is computed along the row. Otherwise operation by operation: where a
                     reduction runs along the row, an all-reduce combines numbers per row.

Positions count in the whole array: `iota` starts where the block does, and random bits are those of one device. Padding
of uneven blocks never counts in a reduction.

Operations that move columns, as a slice does, want whole rows: columns are then no axis that can be cut.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import CompoundFactor

from jaxnorm import _bits
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.partition import Partition, sharding_factors
from jaxnorm._primitive.programs import cached_by_program, closed_of, open_jaxpr
from jaxnorm._rows.dimensions import cut_dimensions
from jaxnorm._rows.equations import (
    ARGS,
    REDUCTIONS,
    Constant,
    Equation,
    Equations,
    NotARowProgram,
    Value,
    body_of,
    flatten,
)
from jaxnorm._rows.rules import RULES
from jaxnorm._rows.view import View
from jaxnorm._sharding import Blocks, Tiled

# Operations that change where columns are.
_MOVING = {"slice", "split", "concatenate", "pad", "rev"}
_LABELS = {"gather", "scatter-add"}
_RESHAPING = {"iota", "reshape", "squeeze", "expand_dims"}
_IDENTITIES = {"sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast", "copy", "copy_p"}

Dims = tuple[tuple[int, ...], ...]  # the axes of each dimension of an array


# ---- programs ----


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """A program that several devices can share.

    Attributes:
      inputs, equations, outputs: of the program.
      dims: of its arrays.
      sizes: of the axes. Columns, the last axis, have size 1 where rows must be whole.
      packed: arrays of bits, eight columns to a byte.
      primitives: by name.
      digest: tells the program from others.
    """

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value | Constant, ...]
    dims: dict[Value, Dims]
    sizes: tuple[int, ...]
    packed: frozenset[Value]
    primitives: dict[str, Any]
    digest: str

    @property
    def column(self) -> int:
        return len(self.sizes) - 1

    def axes(self, value) -> Dims:
        return (
            tuple(() for _ in value.aval.shape) if isinstance(value, Constant) else self.dims[value]
        )

    @property
    def ends(self) -> tuple:
        return (*self.inputs, *self.outputs)


@cached_by_program
def shared(closed) -> Shared | None:
    """The program, taken apart; None where XLA must partition the jaxpr."""
    try:
        return _shared(closed)
    except NotARowProgram:
        return None


def _shared(closed) -> Shared:
    program = flatten(closed)
    view = View(program)
    column = len(view.row_sizes)
    # Arrays whose last dimension is no axis, and arrays that have their other dimensions.
    alike = {}
    packed = set()
    for e in program.equations:
        pairs = {
            "random_wrap": (e.inputs, e.outputs),
            "jaxnorm_pack_bits": (e.outputs, e.inputs),
            "jaxnorm_unpack_bits": (e.inputs, e.outputs),
        }
        if e.primitive in pairs:
            (value,), (other,) = pairs[e.primitive]
            alike[value] = other
            packed.update([value] if e.primitive != "random_wrap" else [])
    used = {v for e in program.equations for v in e.inputs} | set(program.outputs)
    dims: dict[Value, Dims] = {}
    lengths = set()
    for value in (*program.inputs, *(v for e in program.equations for v in e.outputs)):
        shape = value.aval.shape
        if 0 in shape or not all(isinstance(n, int) for n in shape):
            raise NotARowProgram(f"an array of shape {shape}", "has nothing that can be shared")
        if value not in used and value in program.inputs:
            dims[value] = tuple(() for _ in shape)
            continue
        kinds = view.kinds(alike.get(value, value))
        if value in alike:
            rank = len(shape) - 1
            kinds = (*kinds[:rank], [])
        dims[value] = tuple(tuple(column if k == "column" else k for k in dim) for dim in kinds)
        for n, axes in zip(shape, dims[value], strict=True):
            if column in axes:
                lengths.add(n // math.prod(view.row_sizes[k] for k in axes if k != column))
        flat = [a for axes in dims[value] for a in axes]
        if len(set(flat)) != len(flat):
            raise NotARowProgram(f"an array of shape {shape}", "has an axis twice")
    whole_rows = [_wants_whole_rows(e, dims, column) for e in program.equations]
    if view.neighbours != 1:
        # Operations that look columns up by their numbers do so along the last dimension.
        whole_rows += [e.primitive in ARGS | _LABELS for e in program.equations]
    if len(lengths) != 1 or any(whole_rows):
        lengths = {1}
        dims = {
            v: tuple(tuple(a for a in axes if a != column) for axes in places)
            for v, places in dims.items()
        }
    return Shared(
        program.inputs,
        program.equations,
        program.outputs,
        dims,
        (*view.row_sizes, *lengths),
        frozenset(packed),
        dict(_primitives(closed)),
        hashlib.sha256(text_of(program).encode()).hexdigest(),
    )


def identity(params) -> str | None:
    """What tells a call's program from others; None where XLA must partition it."""
    program = shared(params["jaxpr"])
    return program and program.digest


def _wants_whole_rows(equation, dims, column) -> bool:
    """Whether devices cannot cut the columns.

    Raises:
      NotARowProgram: if they cannot share the equation at all.
    """
    name, params = equation.primitive, equation.params
    if name not in RULES:
        raise equation.refuse("is not known")
    if name == "random_wrap":
        if "fry" not in str(getattr(params["impl"], "name", params["impl"])):
            raise equation.refuse("is of another generator than JAX's default")
    elif name == "random_bits":
        if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
            raise equation.refuse("needs jax_threefry_partitionable")
    elif name in REDUCTIONS | ARGS:
        source = equation.inputs[0]
        reduced = {a for i in params["axes"] for a in _of(dims, source)[i]}
        if name != "reduce_sum" and reduced - {column}:
            raise equation.refuse("is over rows")
        logical = name in ("reduce_or", "reduce_and") and source.aval.dtype != np.bool_
        return name == "reduce_prod" or logical
    elif name in _MOVING:
        moved = False
        for value in (*equation.inputs, *equation.outputs):
            if len(value.aval.shape) != len(equation.outputs[0].aval.shape):
                continue  # what a pad fills with
            for i in cut_dimensions(equation):
                axes = _of(dims, value)[i]
                if set(axes) - {column}:
                    raise equation.refuse("moves rows")
                moved = moved or bool(axes)
        return moved
    elif name not in _RESHAPING:
        # Any other operation along an axis.
        return bool(params.keys() & {"axis", "axes", "dimension", "dimensions"})
    return False


def _of(dims, value):
    return dims[value] if isinstance(value, Value) else tuple(() for _ in value.aval.shape)


def _primitives(closed) -> Iterator:
    jaxpr, _ = open_jaxpr(closed)
    for eqn in jaxpr.eqns:
        body = body_of(eqn)
        if body is None:
            yield eqn.primitive.name, eqn.primitive
        else:
            yield from _primitives(body)


def text_of(program: Equations) -> str:
    """The equations as text, the same in every process."""
    numbers: dict = {}

    def text(value):
        if isinstance(value, Constant):
            return repr(np.asarray(value.number))
        return f"{numbers.setdefault(value, len(numbers))}:{value.aval}"

    lines = [" ".join(map(text, program.inputs))]
    for e in program.equations:
        # Functions have addresses, and so do generators of random bits, whose keys' dtypes name them.
        params = {k: v for k, v in e.params.items() if k != "impl" and not callable(v)}
        inputs, outputs = (" ".join(map(text, values)) for values in (e.inputs, e.outputs))
        lines.append(f"{outputs} = {e.primitive} {sorted(params.items())} {inputs}")
    lines.append(" ".join(map(text, program.outputs)))
    return "\n".join(lines)


# ---- how arrays are cut ----


def sharding_rule(devices, operand_shapes, result_shapes, *, jaxpr):
    """Shardy's rule: dimensions with the same axes are cut alike."""
    program = shared(jaxpr)
    assert program is not None
    # A byte of bits is eight columns, where every way to cut the columns leaves whole bytes.
    bytes_too = bool(program.packed) and program.sizes[-1] % (8 * devices) == 0
    sizes: dict[str, int] = {}

    def factors(place, value, shape):
        found = []
        for i, (axes, n) in enumerate(zip(program.axes(value), shape, strict=True)):
            names = []
            for a in axes:
                split = bytes_too and a == program.column
                of_axis = (
                    {"m": program.sizes[a] // 8, "b": 8} if split else {f"a{a}": program.sizes[a]}
                )
                sizes.update(of_axis)
                names += of_axis
            rest = n // math.prod(program.sizes[a] for a in axes)
            if bytes_too and value in program.packed and i == len(shape) - 1:
                names, rest = ["m"], 1
            if rest > 1 or not names:  # columns that are no axis, words of a key, size 1
                own = f"{place}_{i}"
                sizes[own] = rest
                names.append(own)
            found.append(names[0] if len(names) == 1 else CompoundFactor(*names))
        return tuple(found)

    count = len(program.inputs)
    shapes = [*operand_shapes, *result_shapes]
    named = [
        factors(f"o{k}", v, shape)
        for k, (v, shape) in enumerate(zip(program.ends, shapes, strict=True))
    ]
    alone = {f for dims in named for f in dims if isinstance(f, str)}
    used = {f for dims in named for c in dims if not isinstance(c, str) for f in c}
    in_compounds = {f: n for f, n in sizes.items() if f in used - alone}
    return sharding_factors(named[:count], named[count:], in_compounds)


def partition(
    operands: Sequence[Tiled], results: Sequence[Tiled], /, *, jaxpr, run: Callable
) -> Partition:
    """How a row program is split over devices; `run(closed, operands)` runs a row program as a call."""
    program = shared(jaxpr)
    assert program is not None
    blocks = _blocks(program, [*operands, *results])
    tiles = [_tiles(program, v, blocks) for v in program.ends]
    count = len(program.inputs)
    return Partition(tiles[:count], tiles[count:], _Device(program, blocks, run))


def _blocks(program: Shared, arrays: Sequence[Tiled]) -> Blocks:
    """How the axes are cut: so that every operand and result is cut into blocks as XLA has them."""
    along = [_along_axes(program, v, a) for v, a in zip(program.ends, arrays, strict=True)]
    blocks = Blocks.joint(program.sizes, along)
    while (axis := _torn(program, blocks)) is not None:
        kept = [a for a in range(len(program.sizes)) if a != axis]
        blocks = Blocks(program.sizes, blocks.tiles_along(kept))
    return blocks


def _along_axes(program: Shared, value, array: Tiled) -> Tiled:
    """The array with a dimension for each axis of the program; it is whole where it is cut through an axis."""
    axes_of = program.axes(value)
    parts: list[tuple[int | None, int]] = []
    for i, axes in enumerate(axes_of):
        count = array.tiles.shape[i]
        if value in program.packed and i == len(axes_of) - 1:
            columns = program.sizes[program.column]
            whole_bytes = -(-columns // count) % 8 == 0
            parts.append((program.column if whole_bytes and columns > 1 else None, count))
        elif len(axes) == 1:
            n = program.sizes[axes[0]]
            parts.append((axes[0] if n == array.shape[i] else None, count))
        else:
            parts += _split_count(program, axes, count)
    places = {a: i for i, (a, _) in enumerate(parts) if a is not None}
    others = [i for i, (a, _) in enumerate(parts) if a is None]
    rank = len(program.sizes)
    tiles = array.tiles.reshape(*(count for _, count in parts), -1)
    order = [places[a] for a in range(rank) if a in places]
    tiles = tiles.transpose([*order, *others, len(parts)])
    counts = [parts[places[a]][1] if a in places else 1 for a in range(rank)]
    return Tiled(
        tuple(n if a in places else 1 for a, n in enumerate(program.sizes)),
        tiles.reshape(*counts, -1),
    )


def _split_count(program, axes, count) -> list[tuple[int | None, int]]:
    """(axis, number of blocks) of the axes of a dimension; the axis is None for blocks that are not of one axis."""
    parts: list[tuple[int | None, int]] = []
    for a in axes:
        n = program.sizes[a]
        here = count if n % count == 0 else n if count % n == 0 else 1
        parts.append((a, here))
        count //= here
        if here != n:
            break
    return [*parts, (None, count)]


def _torn(program: Shared, blocks: Blocks) -> int | None:
    """An axis whose blocks are not next to each other in some operand or result."""
    for value in program.ends:
        for axes in program.axes(value):
            whole = False  # an outer axis that has several elements in a block
            for a in axes if len(axes) > 1 else ():
                if blocks.count(a) > 1 and (whole or blocks.uneven((a,))):
                    return a
                whole = whole or blocks.size(a) > 1
    return None


def _tiles(program: Shared, value, blocks: Blocks) -> np.ndarray:
    """The tiles of an operand or result."""
    dims = list(program.axes(value))
    if value in program.packed and not _bits.cuts_bytes(blocks):
        dims[-1] = (program.column,)
    axes = [a for dim in dims for a in dim]
    rank = len(program.sizes)
    tiles = blocks.tiles_along(axes)
    tiles = tiles.transpose([*axes, *(a for a in range(rank + 1) if a not in axes)])
    return tiles.reshape(*(math.prod(blocks.count(a) for a in dim) for dim in dims), -1)


# ---- what a device computes ----


@dataclasses.dataclass(frozen=True, eq=False)
class _Partial:
    """This device's part of a reduction.

    Attributes:
      value: the value that it becomes.
      combine: collective that combines the parts: "sum" or "max".
      axes: the axes that are cut.
      finish: (the combined parts) -> the value.
    """

    value: Value
    combine: str
    axes: tuple[int, ...]
    finish: Callable


class _Device:
    """A program on the blocks of one device; called with these.

    The environment holds arrays by value, and what only this device has: the index of its first element and the number
    of its elements along an axis, the words of keys.
    """

    def __init__(self, program: Shared, blocks: Blocks, run: Callable):
        self._program = program
        self._blocks = blocks
        self._run = run
        self._column = program.column
        self._column_cut = blocks.count(program.column) > 1
        self._one_program = not any(map(self._needs_rows, program.equations))

    def __call__(self, *operands):
        env: dict = dict(zip(self._program.inputs, operands, strict=True))
        self._add_places(env)
        equations = list(self._program.equations)
        waiting: list[_Partial] = []
        parts: dict[Value, Any] = {}
        first = True
        while equations or waiting:
            now, later = self._ready(equations, {p.value for p in waiting})
            found = self._stage(env, now, later, one_program=first and self._one_program)
            waiting += found[0]
            parts |= found[1]
            first, equations = False, later
            # Numbers per row go first: what waits for them may be a sum over rows, which the last all-reduce takes.
            chosen = [p for p in waiting if p.axes == (self._column,)] or waiting
            env |= self._combined(chosen, parts)
            waiting = [p for p in waiting if p not in chosen]
        return [self._read(env, v) for v in self._program.outputs]

    def _add_places(self, env) -> None:
        blocks = self._blocks
        for a in blocks.cut(range(len(blocks.shape))):
            env["start", a] = blocks.start(a)
            left = np.int32(blocks.shape[a]) - env["start", a]
            env["count", a] = jnp.clip(left, np.int32(0), np.int32(blocks.size(a)))
        for e in self._program.equations:
            if e.primitive == "random_wrap":
                for word in (0, 1):
                    env["word", e.outputs[0], word] = env[e.inputs[0]][..., word]

    def _ready(self, equations, waiting):
        """(equations that can be computed, equations that wait for a collective)."""
        waiting = set(waiting)
        now, later = [], []
        for e in equations:
            waits = any(i in waiting for i in e.inputs)
            (later if waits else now).append(e)
            if waits or self._reduced(e):
                waiting.update(e.outputs)
        return now, later

    def _reduced(self, equation) -> tuple[int, ...]:
        """The cut axes over which an equation reduces, by a collective that others may share."""
        source = equation.inputs[0] if equation.inputs else None
        if equation.primitive in REDUCTIONS:
            dims = self._program.axes(source)
            axes = [a for i in equation.params["axes"] for a in dims[i]]
        elif equation.primitive == "gather":
            axes = self._program.axes(source)[-1] if self._is_part(source) else ()
        else:
            axes = ()
        return self._blocks.cut(sorted(axes))

    def _needs_rows(self, equation) -> bool:
        """Whether this device has a part of each row, and an equation needs the whole row."""
        values = (*equation.inputs, *equation.outputs)
        axes = [a for v in values for of_dim in self._program.axes(v) for a in of_dim]
        if not self._column_cut or self._column not in axes:
            return False
        match equation.primitive:
            case name if name in REDUCTIONS:
                dims = self._program.axes(equation.inputs[0])
                return {a for i in equation.params["axes"] for a in dims[i]} == {self._column}
            case "jaxnorm_pack_bits" | "jaxnorm_unpack_bits":
                return _bits.cuts_bytes(self._blocks)
            case name:
                return name in (*ARGS, "gather", "scatter-add")

    def _stage(self, env, now, later, one_program):
        """Computes what is ready into the environment; returns (partials, their arrays by value)."""
        made = {v for e in now if not self._reduced(e) for v in e.outputs}
        asked = [v for e in later for v in e.inputs] + list(self._program.outputs)
        wanted = list(dict.fromkeys(v for v in asked if v in made))
        partials: list[_Partial] = []
        names = list(env)

        def compute(*arrays):
            inner = dict(zip(names, arrays, strict=False))
            partials.clear()
            sums = []
            for e in now:
                if self._reduced(e):
                    array, partial = self._partial(inner, e)
                    sums.append(array)
                    partials.append(partial)
                else:
                    inner.update(zip(e.outputs, self._evaluate(inner, e), strict=True))
            return [*(inner[v] for v in wanted), *sums]

        arrays = [env[name] for name in names]
        if one_program and now:
            closed, constants = closed_of(compute, [jax.typeof(a) for a in arrays])
            results = self._run(closed, [*arrays, *constants])
        else:
            results = compute(*arrays)
        env.update(zip(wanted, results, strict=False))
        sums = results[len(wanted) :]
        return partials, {p.value: s for p, s in zip(partials, sums, strict=True)}

    def _combined(self, partials, parts) -> dict:
        """Partial reductions, combined over all devices by one collective for partial reductions that are alike."""
        groups: dict = {}
        for p in partials:
            groups.setdefault((p.combine, p.axes, parts[p.value].dtype), []).append(p)
        found = {}
        for (combine, axes, _), group in groups.items():
            arrays = [parts[p.value] for p in group]
            flat = arrays if len(arrays) == 1 else [jnp.concatenate([a.ravel() for a in arrays])]
            collective = self._blocks.psum if combine == "sum" else self._blocks.pmax
            total = collective(flat[0], axes)
            if len(arrays) > 1:
                ends = list(itertools.accumulate(a.size for a in arrays))
                totals = [
                    t.reshape(a.shape)
                    for t, a in zip(jnp.split(total, ends[:-1]), arrays, strict=True)
                ]
            else:
                totals = [total]
            found |= {p.value: p.finish(t) for p, t in zip(group, totals, strict=True)}
        return found

    # ---- reductions ----

    def _partial(self, env, equation):
        """(this device's part, what becomes of it)."""
        value, axes = equation.outputs[0], self._reduced(equation)
        dtype = value.aval.dtype
        if equation.primitive == "gather":
            array, finish = self._part_of_labels(env, equation)
            return array, _Partial(value, "sum", axes, finish)
        x = self._read(env, equation.inputs[0])
        if equation.primitive == "reduce_sum":
            if jnp.issubdtype(dtype, np.floating):
                x = x.astype(acc_dtype(dtype))
            x = self._filled(env, equation.inputs[0], x, axes, 0)
            (part,) = self._bind(equation, x)
            return part, _Partial(value, "sum", axes, lambda total: total.astype(dtype))
        least = equation.primitive in ("reduce_min", "reduce_and")
        if dtype == np.bool_:
            x = x.astype(np.int32)
            turn: Callable = lambda x: np.int32(1) - x  # noqa: E731
        elif jnp.issubdtype(dtype, np.floating):
            x = x.astype(acc_dtype(dtype))
            turn = lambda x: -x  # noqa: E731
        else:
            turn = lambda x: ~x  # noqa: E731
        x = turn(x) if least else x
        x = self._filled(env, equation.inputs[0], x, axes, _lowest(x.dtype))
        top = jnp.max(x, equation.params["axes"])
        if jnp.issubdtype(dtype, np.floating):
            # Not every all-reduce keeps NaN.
            is_nan = jnp.isnan(top)
            parts = jnp.where(is_nan, np.asarray(-np.inf, x.dtype), top), is_nan.astype(x.dtype)

            def finish(total):
                top = jnp.where(total[1] > 0, np.asarray(np.nan, total.dtype), total[0])
                return (turn(top) if least else top).astype(dtype)

            return jnp.stack(parts), _Partial(value, "max", axes, finish)
        return top, _Partial(
            value, "max", axes, lambda top: (turn(top) if least else top).astype(dtype)
        )

    def _part_of_labels(self, env, equation):
        source, label = (self._read(env, v) for v in equation.inputs)
        dtype, columns = equation.outputs[0].aval.dtype, self._program.sizes[-1]
        label = _clipped(label[..., 0], -1, columns)
        known = _clipped(label, 0, columns - 1)
        fill = None
        if "FILL" in str(equation.params["mode"]):
            fill = equation.params["fill_value"]
            if fill is None:
                floats = jnp.issubdtype(dtype, np.inexact)
                fill = np.nan if floats else np.iinfo(dtype).min if dtype.kind == "i" else 0
        place = known - env["start", self._column]
        size = source.shape[-1]
        here = (place >= 0) & (place < size)
        found = jnp.take_along_axis(source, _clipped(place, 0, size - 1), -1, mode="clip")
        wide = np.int32 if dtype == np.bool_ else dtype
        part = jnp.where(here, found.astype(wide), np.zeros((), wide))

        def finish(total):
            total = total.astype(dtype)
            return (
                total if fill is None else jnp.where(label == known, total, np.asarray(fill, dtype))
            )

        return part, finish

    # ---- equations ----

    def _read(self, env, value):
        if isinstance(value, Value):
            return env[value]
        number = np.asarray(value.number, value.aval.dtype)[()]
        return jnp.full(value.aval.shape, number) if value.aval.shape else number

    def _shape(self, value) -> tuple[int, ...]:
        """The shape of this device's block."""
        shape = []
        for n, axes in zip(value.aval.shape, self._program.axes(value), strict=True):
            for a in self._blocks.cut(axes):
                n = n // self._program.sizes[a] * self._blocks.size(a)
            shape.append(n)
        return tuple(shape)

    def _bind(self, equation, *operands, **params) -> Sequence:
        """Results of the equation's own operation."""
        params = {**equation.params, **params}
        params |= dict.fromkeys(params.keys() & {"sharding", "out_sharding"})
        primitive = self._program.primitives[equation.primitive]
        results = primitive.bind(*operands, **params)
        return results if primitive.multiple_results else [results]

    def _evaluate(self, env, equation) -> Sequence:
        operands = [self._read(env, v) for v in equation.inputs]
        if equation.primitive in _IDENTITIES:
            return operands[:1]
        rule = getattr(self, f"_evaluate_{equation.primitive.replace('-', '_')}", self._bind_own)
        return rule(env, equation, *operands)

    def _bind_own(self, env, equation, *operands):
        return self._bind(equation, *operands)

    def _evaluate_broadcast_in_dim(self, env, equation, x, *_):
        return self._bind(equation, x, shape=self._shape(equation.outputs[0]))

    def _evaluate_reshape(self, env, equation, x, *_):
        return [jnp.reshape(x, self._shape(equation.outputs[0]))]

    _evaluate_squeeze = _evaluate_expand_dims = _evaluate_reshape

    def _evaluate_slice(self, env, equation, x):
        limits = [
            n if i not in cut_dimensions(equation) else equation.params["limit_indices"][i]
            for i, n in enumerate(x.shape)
        ]
        return self._bind(equation, x, limit_indices=tuple(limits))

    def _evaluate_iota(self, env, equation):
        value = equation.outputs[0]
        dtype, dim = np.dtype(equation.params["dtype"]), equation.params["dimension"]
        axes = self._program.axes(value)[dim]
        shape = self._shape(value)
        if not self._blocks.cut(axes):
            return self._bind(equation, shape=shape)
        integer = dtype if dtype.kind in "iu" else np.dtype(np.int32)
        index = self._positions(env, value, [dim], integer)
        return [jnp.broadcast_to(index, shape).astype(dtype)]

    def _evaluate_random_bits(self, env, equation, key):
        value, keys = equation.outputs[0], equation.inputs[0]
        first = len(keys.aval.shape)
        dims = range(first, len(value.aval.shape))
        shape = self._shape(value)
        if not self._blocks.cut([a for dim in dims for a in self._program.axes(value)[dim]]):
            return self._bind(equation, key, shape=shape[first:])
        words = [
            jnp.reshape(env["word", keys, word], (*shape[:first], *(1 for _ in dims)))
            for word in (0, 1)
        ]
        if math.prod(value.aval.shape[first:]) <= 1 << 32:
            low = self._positions(env, value, dims, np.dtype(np.uint32))
            high = jnp.zeros((), np.uint32)
        else:
            with jax.enable_x64(True):
                place = self._positions(env, value, dims, np.dtype(np.uint64))
                high = (place >> np.uint64(32)).astype(np.uint32)
                low = place.astype(np.uint32)
        high, low = _threefry(words, high, low)
        high, low = jnp.broadcast_to(high, shape), jnp.broadcast_to(low, shape)
        width = equation.params["bit_width"]
        if width == 64:
            with jax.enable_x64(True):
                return [(high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)]
        return [(high ^ low).astype(f"uint{width}")]

    # ---- indices ----

    def _parts(self, value, dim) -> list[tuple[int | None, int, int]]:
        """(axis, elements of a block, elements) of the axes of a dimension; columns that are no axis come last."""
        axes = self._program.axes(value)[dim]
        parts: list = [(a, self._blocks.size(a), self._program.sizes[a]) for a in axes]
        rest = value.aval.shape[dim] // math.prod(whole for *_, whole in parts)
        return [*parts, (None, rest, rest)] if rest > 1 else parts

    def _index(self, value, dim, part, dtype=np.int32):
        """The index of each element of a block along a part of a dimension; other dimensions have size 1."""
        sizes = [size for _, size, _ in self._parts(value, dim)]
        index = jax.lax.broadcasted_iota(dtype, sizes, part)
        shape = [1] * len(value.aval.shape)
        shape[dim] = math.prod(sizes)
        return index.reshape(shape)

    def _positions(self, env, value, dims, dtype):
        """The place of each element of a block among all elements of some dimensions of the whole array."""
        total, stride = jnp.zeros((1,) * len(value.aval.shape), dtype), 1
        for dim in reversed(dims):
            for part, (axis, _, whole) in reversed([*enumerate(self._parts(value, dim))]):
                index = self._index(value, dim, part, dtype)
                if self._blocks.cut([axis] if axis is not None else []):
                    index = index + env["start", axis].astype(dtype)
                total = total + index * np.asarray(stride, dtype)
                stride *= whole
        return total

    def _filled(self, env, value, array, axes, fill):
        """The array with another value in the padding of its blocks along axes."""
        for dim, cut in enumerate(self._program.axes(value)):
            for a in self._blocks.uneven([a for a in axes if a in cut]):
                inside = self._index(value, dim, cut.index(a)) < env["count", a]
                array = jnp.where(inside, array, np.asarray(fill, array.dtype))
        return array

    # ---- a device has a part of each row ----

    def _is_part(self, value) -> bool:
        """Whether a device has a part of the columns of an array."""
        return self._column_cut and (self._column,) in self._program.axes(value)[-1:]

    def _evaluate_argmax(self, env, equation, x):
        source = equation.inputs[0]
        if not (self._is_part(source) and len(x.shape) - 1 in equation.params["axes"]):
            return self._bind(equation, x)
        blocks, axes = self._blocks, (self._column,)
        dtype = np.dtype(equation.params["index_dtype"])
        if x.dtype == np.bool_:
            x = x.astype(np.int32)
        if equation.primitive == "argmin":
            x = -x if jnp.issubdtype(x.dtype, np.floating) else ~x
        x = self._filled(env, source, x, axes, _lowest(x.dtype))
        place = jnp.argmax(x, -1, keepdims=True).astype(np.int32)
        top = jnp.take_along_axis(x, place, -1)[..., 0]
        place = place[..., 0] + env["start", self._column]
        # The first of the largest; NaN is the largest.
        if jnp.issubdtype(x.dtype, np.floating):
            top = top.astype(acc_dtype(x.dtype))
            is_nan = jnp.isnan(top)
            rank = jnp.where(is_nan, np.asarray(np.inf, top.dtype), top)
            pair = jnp.stack([rank, is_nan.astype(top.dtype)])
            hit = jnp.all(pair == blocks.pmax(pair, axes), 0)
        else:
            hit = top == blocks.pmax(top, axes)
        first = -blocks.pmax(jnp.where(hit, -place, np.iinfo(np.int32).min + 1), axes)
        return [first.astype(dtype)]

    _evaluate_argmin = _evaluate_argmax

    def _evaluate_scatter_add(self, env, equation, x, label, update):
        source, params = equation.outputs[0], equation.params
        if not self._is_part(source):
            # The operation's own parameters hold a program that was traced for the whole mesh.
            kept = ("indices_are_sorted", "unique_indices", "mode")
            numbers = params["dimension_numbers"]
            return [
                jax.lax.scatter_add(
                    x, label, update, numbers, **{name: params[name] for name in kept}
                )
            ]
        columns = self._program.sizes[-1]
        low, high = (0, columns - 1) if "CLIP" in str(params["mode"]) else (-1, columns)
        index = self._index(source, len(x.shape) - 1, 0) + env["start", self._column]
        here = index == _clipped(label[..., 0], low, high)
        return [x + jnp.where(here, update, np.zeros((), update.dtype))]

    def _evaluate_jaxnorm_pack_bits(self, env, equation, keep):
        if not self._is_part(equation.inputs[0]) or not _bits.cuts_bytes(self._blocks):
            return self._bind(equation, keep)
        return [_bits.pack_block(self._blocks, keep)]

    def _evaluate_jaxnorm_unpack_bits(self, env, equation, bits):
        value = equation.outputs[0]
        columns = self._shape(value)[-1]
        if not self._is_part(value) or not _bits.cuts_bytes(self._blocks):
            return self._bind(equation, bits, n=columns)
        (keep,) = self._bind(equation, bits)
        padding = columns * self._blocks.count(self._column) - keep.shape[-1]
        keep = jnp.pad(keep, [*((0, 0) for _ in keep.shape[:-1]), (0, padding)])
        return [jax.lax.dynamic_slice_in_dim(keep, env["start", self._column], columns, -1)]


def _lowest(dtype):
    return -np.inf if jnp.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


def _clipped(label, low, high):
    """Integers between two numbers, as int32."""
    info = np.iinfo(label.dtype)
    if high < info.max:
        label = jnp.minimum(label, np.asarray(high, label.dtype))
    if low > info.min:
        label = jnp.maximum(label, np.asarray(low, label.dtype))
    return label.astype(np.int32)


def _threefry(key, high, low):
    """The two words of JAX's default generator at a place, which is given by two words."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    high, low = high + keys[0], low + keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            high = high + low
            low = (low << np.uint32(turn)) | (low >> np.uint32(32 - turn))
            low = high ^ low
        high = high + keys[(i + 1) % 3]
        low = low + keys[(i + 2) % 3] + np.uint32(i + 1)
    return high, low
