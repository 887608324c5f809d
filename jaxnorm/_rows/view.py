"""Which dimension of each array is the row's columns, and which ones number the rows.

No shape is guessed: dimensions are the same where an operation says so. A reshape can split a dimension or join
several, so that a dimension is a list of *axes*, and two lists are made equal by splitting axes where they differ.
Slices and concatenations make axes of other lengths that lie along the same row; such axes are one *family*.

Columns are the last axis of the largest array, unless reductions run along another one: columns then have a step in
memory, and neighbouring rows lie next to each other.
"""

import dataclasses
import itertools
import math

from jaxnorm._rows.dimensions import (
    check_label,
    cut_dimensions,
    is_one,
    label_dimension,
    looks_into_one,
)
from jaxnorm._rows.equations import Constant, Equation, Equations, NotARowProgram, Value

# A row's pieces are values by themselves: many of them make a kernel long.
PIECES_MAX = 128
# So many pieces of an axis that nothing runs along, such as gate and up, make it the row's.
FEW_PIECES = 4
_CUTTING = ("concatenate", "split", "slice", "pad", "rev")
_MOVING = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy")


class Axes:
    """The axes of a program, and which of them are the same."""

    def __init__(self):
        self.sizes = []  # of each axis that was ever made; may be a symbol
        self._same = []  # union-find
        self._family = []
        self._parts = {}  # axis -> (outer axis, inner axis)

    def new(self, size) -> int:
        self.sizes.append(size)
        self._same.append(len(self._same))
        self._family.append(len(self._family))
        return len(self._same) - 1

    def _find(self, parents, axis) -> int:
        while parents[axis] != axis:
            parents[axis] = parents[parents[axis]]  # the next search is half as long
            axis = parents[axis]
        return axis

    def family(self, axis) -> int:
        return self._find(self._family, self._find(self._same, axis))

    def relate(self, a: int, b: int) -> None:
        """Two axes lie along the same row, with other lengths or offsets."""
        self._family[self.family(a)] = self.family(b)

    def leaves(self, axes) -> list[int]:
        """The axes that these consist of."""
        found = []
        for axis in axes:
            axis = self._find(self._same, axis)
            found += self.leaves(self._parts[axis]) if axis in self._parts else [axis]
        return found

    def equate(self, first, second) -> bool:
        """Makes two lists of axes the same; False where their sizes do not allow it."""
        a, b = self.leaves(first), self.leaves(second)
        while a and b:
            x, y = a[-1], b[-1]
            if x == y or self.sizes[x] == self.sizes[y]:
                if x != y:
                    self.relate(x, y)
                    self._same[x] = y
                a.pop()
                b.pop()
            elif outer := _quotient(self.sizes[x], self.sizes[y]):
                a[-1:] = self._split(x, outer, self.sizes[y])
            elif outer := _quotient(self.sizes[y], self.sizes[x]):
                b[-1:] = self._split(y, outer, self.sizes[x])
            else:
                return False
            a, b = self.leaves(a), self.leaves(b)
        return not a and not b

    def _split(self, axis, outer, inner) -> tuple[int, int]:
        self._parts[axis] = (self.new(outer), self.new(inner))
        return self._parts[axis]


def _quotient(a, b):
    """The quotient where that is an integer above 1, otherwise 0."""
    try:
        return a // b if a % b == 0 and a // b != 1 else 0
    except Exception:  # symbols that cannot be compared
        return 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array lies along rows and columns.

    Attributes:
      strides: elements from one index of a row dimension to the next, for each row dimension that the array has, in the
        order of its own dimensions; the number of the dimension comes first.
      columns: the length of its row; None if the array is constant along it. Of bits, eight to a byte, it is the number
        of bits.
      bits: whether it has eight booleans to a byte.
      step: elements from one column to the next.
    """

    strides: tuple[tuple[int, int], ...]
    columns: int | None
    bits: bool = False
    step: int = 1

    @property
    def rows(self) -> tuple[int, ...]:
        """The row dimensions that the array has."""
        return tuple(k for k, _ in self.strides)


class View:
    """The rows and columns of a program.

    Attributes:
      row_sizes: sizes of the row dimensions, outermost first; symbols where the program was traced with them.
      sources: where each of them can be read: (number of an input, its dimension, divisor), or None.
      width: the greatest common divisor of all row lengths and of all places where rows are cut.
      neighbours: rows that lie side by side in the largest array, whose columns are not its last axis; otherwise 1.
    """

    def __init__(self, program: Equations, row_sums: bool = True):
        """`row_sums` is whether the program may have sums over rows; without, each sum runs along the row."""
        self._axes = Axes()
        self._dims: dict[Value, tuple[list[int], ...]] = {}
        self._packed: dict[Value, int] = {}  # arrays of bits -> the axis that they pack
        self._key_data: set[Value] = set()  # words of random keys, along the last dimension
        self._cuts: list[tuple[int, int, Equation]] = []  # (axis, place, what cuts there)
        self._program, self._row_sums = program, row_sums
        for value in program.inputs:
            self.dims(value)
        for equation in program.equations:
            self._relate(equation)
        for value in program.outputs:
            self.dims(value)
        self._choose(program)

    def dims(self, value) -> tuple[list[int], ...]:
        """The axes of each dimension; a dimension of size 1 has none, and so has a number."""
        if isinstance(value, Constant):
            return tuple([] for _ in value.aval.shape)
        if value not in self._dims:
            self._dims[value] = tuple(
                [] if is_one(n) else [self._axes.new(n)] for n in value.aval.shape
            )
        return self._dims[value]

    # ---- what equations say ----

    def _relate(self, equation: Equation) -> None:
        relation = getattr(self, f"_relate_{equation.primitive.replace('-', '_')}", None)
        if relation is not None:
            relation(equation)
        elif equation.primitive.startswith(("reduce_", "arg")) and "axes" in equation.params:
            source, result = equation.inputs[0], equation.outputs[0]
            kept = [d for i, d in enumerate(self.dims(source)) if i not in equation.params["axes"]]
            self._equate(equation, kept, self.dims(result))
        else:
            for result in equation.outputs:
                for operand in equation.inputs:
                    if len(operand.aval.shape) == len(result.aval.shape):
                        self._equate(equation, self.dims(operand), self.dims(result))

    def _equate(self, equation, first, second) -> None:
        for a, b in zip(first, second, strict=True):
            if a and b and not self._axes.equate(a, b):
                raise equation.refuse("joins dimensions of unlike sizes")

    def _relate_broadcast_in_dim(self, equation):
        source, result = self.dims(equation.inputs[0]), self.dims(equation.outputs[0])
        places = equation.params["broadcast_dimensions"]
        self._equate(equation, source, [result[i] for i in places])

    def _relate_reshape(self, equation):
        source, result = (
            [axis for dim in self.dims(v) for axis in dim]
            for v in (equation.inputs[0], equation.outputs[0])
        )
        if not self._axes.equate(source, result):
            shapes = f"{equation.inputs[0].aval.shape} to {equation.outputs[0].aval.shape}"
            raise equation.refuse(f"from {shapes} mixes dimensions; split or join whole ones")

    _relate_squeeze = _relate_expand_dims = _relate_reshape

    def _relate_transpose(self, equation):
        source, result = self.dims(equation.inputs[0]), self.dims(equation.outputs[0])
        self._equate(equation, [source[i] for i in equation.params["permutation"]], result)

    def _relate_along(self, equation, operands):
        """Operands whose dimensions are those of the results, or pieces of them."""
        for operand in operands:
            for result in equation.outputs:
                pairs = zip(self.dims(operand), self.dims(result), strict=True)
                sizes = zip(operand.aval.shape, result.aval.shape, strict=True)
                for (a, b), (n, m) in zip(pairs, sizes, strict=True):
                    if not a or not b:
                        continue
                    if n == m:
                        self._equate(equation, [a], [b])
                    elif len(a) == len(b) == 1:
                        self._axes.relate(a[0], b[0])
                    else:
                        raise equation.refuse("cuts a dimension that was reshaped")

    def _relate_slice(self, equation):
        self._relate_along(equation, equation.inputs)
        limits = zip(
            equation.params["start_indices"], equation.params["limit_indices"], strict=True
        )
        if any(s != 1 for s in equation.params["strides"] or ()):
            raise equation.refuse(
                "takes every second element or fewer; only whole pieces of a row can be cut out"
            )
        for dim, places in zip(self.dims(equation.inputs[0]), limits, strict=True):
            self._cuts += [(dim[0], place, equation) for place in places if dim]

    def _cut_between(self, equation, whole, dim, sizes):
        """Cuts a dimension of an array between its pieces, of which those of size 1 have no axis."""
        axes = self.dims(whole)[dim]
        self._cuts += [(axes[0], place, equation) for place in itertools.accumulate(sizes) if axes]

    def _relate_split(self, equation):
        self._relate_along(equation, equation.inputs)
        sizes, axis = equation.params["sizes"], equation.params["axis"]
        self._cut_between(equation, equation.inputs[0], axis, sizes)

    def _relate_concatenate(self, equation):
        self._relate_along(equation, equation.inputs)
        dim = equation.params["dimension"]
        sizes = [v.aval.shape[dim] for v in equation.inputs]
        self._cut_between(equation, equation.outputs[0], dim, sizes)

    def _relate_rev(self, equation):
        self._relate_along(equation, equation.inputs)

    def _relate_pad(self, equation):
        source, result = equation.inputs[0], equation.outputs[0]
        self._relate_along(equation, [source])
        dims = zip(self.dims(source), self.dims(result), source.aval.shape, strict=True)
        for (a, b, n), (low, high, inner) in zip(
            dims, equation.params["padding_config"], strict=True
        ):
            if inner:
                raise equation.refuse("has interior padding")
            # Negative padding, which the gradient of padding has, cuts.
            places = [(b, low)] if low > 0 else [(a, -low)] if low < 0 else []
            places += [(b, low + n)] if high > 0 else [(a, n + high)] if high < 0 else []
            self._cuts += [(dim[0], place, equation) for dim, place in places if dim]

    def _relate_long(self, equation, first, second):
        """Two arrays whose dimensions are the same but for those of size 1."""
        self._equate(equation, *([d for d in self.dims(v) if d] for v in (first, second)))

    def _relate_gather(self, equation):
        if looks_into_one(equation):
            self._relate_long(equation, equation.inputs[0], equation.outputs[0])
            return
        numbers = check_label(equation)
        operand, indices = equation.inputs
        result = equation.outputs[0]
        self._relate_labels(
            equation,
            operand,
            (indices, numbers.start_indices_batching_dims, numbers.operand_batching_dims),
            (result, numbers.offset_dims),
        )

    def _relate_scatter_add(self, equation):
        if looks_into_one(equation):
            for value in (equation.inputs[0], equation.inputs[2]):
                self._relate_long(equation, value, equation.outputs[0])
            return
        numbers = check_label(equation)
        operand, indices, updates = equation.inputs
        self._equate(equation, self.dims(operand), self.dims(equation.outputs[0]))
        self._relate_labels(
            equation,
            operand,
            (indices, numbers.scatter_indices_batching_dims, numbers.operand_batching_dims),
            (updates, numbers.update_window_dims),
        )

    def _relate_labels(self, equation, operand, labels, elements):
        """Rows of an array, of their labels and of the elements there."""
        indices, places, batching = labels
        taken, ones = elements
        rows, kept = self.dims(operand), self.dims(indices)
        self._equate(equation, [rows[i] for i in batching], [kept[i] for i in places])
        others = [d for i, d in enumerate(self.dims(taken)) if i not in ones]
        self._equate(equation, kept[:-1], others)

    def _relate_iota(self, equation):
        pass

    def _relate_random_wrap(self, equation):
        self._key_data.add(equation.inputs[0])
        self._equate(equation, self.dims(equation.inputs[0])[:-1], self.dims(equation.outputs[0]))

    def _relate_random_bits(self, equation):
        rank = len(equation.inputs[0].aval.shape)
        self._equate(equation, self.dims(equation.inputs[0]), self.dims(equation.outputs[0])[:rank])

    def _relate_jaxnorm_pack_bits(self, equation):
        self._relate_bits(equation, equation.inputs[0], equation.outputs[0])

    def _relate_jaxnorm_unpack_bits(self, equation):
        self._relate_bits(equation, equation.outputs[0], equation.inputs[0])

    def _relate_bits(self, equation, booleans, packed):
        self._equate(equation, self.dims(booleans)[:-1], self.dims(packed)[:-1])
        (self._packed[packed],) = self.dims(booleans)[-1]

    # ---- the choice of rows and columns ----

    def _choose(self, program: Equations) -> None:
        used = {v for e in program.equations for v in (*e.inputs, *e.outputs)} | set(
            program.outputs
        )
        ends = [v for v in (*program.inputs, *program.outputs) if isinstance(v, Value)]
        special = self._key_data | self._packed.keys()
        bits = [v for v in ends if v in self._packed]
        ends = [v for v in ends if v in used and v not in special]
        order: list[int] = []
        self._column, self._whole, self.neighbours = None, "none", 1
        self._side_by_side: list[int] = []
        if ends:
            # The largest array has all rows, in the order in which they lie in memory.
            largest = max(ends, key=lambda v: (_known_size(v.aval.shape), len(v.aval.shape)))
            self._whole = f"the largest array, of shape {largest.aval.shape}"
            for value in ends:
                self._join(value, largest)
            order = self._axes.leaves([axis for dim in self.dims(largest) for axis in dim])
            place = self._place_of_columns(program, order, largest)
            if place is not None:
                self._column = self._axes.family(order.pop(place))
                self.neighbours = self._size_behind(order[place:])
                self._side_by_side = order[place:]
        elif bits:
            # All that comes in or goes out is bits, and random keys.
            rows = [axis for dim in self.dims(bits[0])[:-1] for axis in dim]
            order = self._axes.leaves(rows)
            self._column = self._axes.family(self._packed[bits[0]])
        self._rows = order
        self.row_sizes = tuple(self._axes.sizes[a] for a in order)
        self._set_width(used)
        self.sources = tuple(self._source(program, axis) for axis in order)

    def _place_of_columns(self, program: Equations, order, largest) -> int | None:
        """Which of the largest array's axes is the columns: the last, or the only one along which something runs."""
        default = len(order) - 1 if order and not is_one(largest.aval.shape[-1]) else None
        families = [self._axes.family(axis) for axis in order]
        along = {family for e in program.equations for family in self._runs_along(program, e)}
        along = along or self._numbered_or_cut(program)
        if len(along) != 1 or (default is not None and families[default] in along):
            return default
        places = [place for place, family in enumerate(families) if family in along]
        return places[0] if len(places) == 1 else default

    def _runs_along(self, program: Equations, equation: Equation) -> set[int]:
        """The family of axes along which an equation runs; none if it can be a sum over rows."""
        name = equation.primitive
        if name in ("gather", "scatter-add"):
            dims = [label_dimension(equation)]
        elif name.startswith(("reduce_", "arg")) and "axes" in equation.params:
            dims = equation.params["axes"]
        else:
            return set()
        source = self.dims(equation.inputs[0])
        axes = self._axes.leaves([axis for i in dims for axis in source[i]])
        families = {self._axes.family(axis) for axis in axes}
        if len(axes) != 1:
            return set()
        over_rows = name == "reduce_sum" and self._row_sums
        return families if not over_rows or self._meets(program, equation, *families) else set()

    def _numbered_or_cut(self, program: Equations) -> set[int]:
        """The families of axes that are cut in few pieces, or whose indices are compared, where nothing is reduced.

        Of classes that are compared with labels, what belongs to a row is then read once.
        """
        if any(e.primitive.startswith("reduce_") for e in program.equations):
            return set()
        index: dict = {}  # values that are the index along axes
        found = []
        for e in program.equations:
            source = next((index[i] for i in e.inputs if i in index), None)
            if e.primitive == "iota":
                index[e.outputs[0]] = self.dims(e.outputs[0])[e.params["dimension"]]
            elif source is not None and e.primitive == "eq":
                found += source
            elif source is not None and e.primitive in _MOVING:
                index[e.outputs[0]] = source
            elif e.primitive in _CUTTING:
                dims = [i for i in cut_dimensions(e) if _pieces(e, i) <= FEW_PIECES]
                found += [axis for i in dims for axis in self.dims(e.outputs[0])[i]]
        return {self._axes.family(axis) for axis in self._axes.leaves(found)}

    def _meets(self, program: Equations, equation: Equation, family: int) -> bool:
        """Whether what an equation computes is used beside elements along a family of axes again."""
        reached = set(equation.outputs)
        for e in program.equations:
            if any(i in reached for i in e.inputs):
                reached.update(e.outputs)
        return any(
            self._axes.family(axis) == family
            for v in reached
            for axis in self._axes.leaves([axis for dim in self.dims(v) for axis in dim])
        )

    def _size_behind(self, axes) -> int:
        sizes = [self._axes.sizes[axis] for axis in axes]
        if not all(isinstance(n, int) for n in sizes):
            reason = f"that lie side by side must be of a known number, which they are not in {self._whole}"
            raise NotARowProgram("rows", reason)
        return math.prod(sizes)

    def _join(self, value, largest) -> None:
        """An array that no operation relates to the largest one has rows and columns of its sizes, if they fit.

        Equal sizes can always be one dimension: nothing says that they are two.
        """
        mine, wanted = self.dims(value), self.dims(largest)
        rank, whole = len(mine), len(wanted)
        if rank > whole:
            return
        # The last dimensions, or the first ones. Last, columns of another length.
        for first, length in ((whole - rank, False), (0, False), (whole - rank, True)):
            sizes = largest.aval.shape[first : first + rank]
            pairs = [
                (i, a, b)
                for i, (a, b) in enumerate(zip(mine, wanted[first:], strict=False))
                if a and self._axes.leaves(a) != self._axes.leaves(b)
            ]
            unlike = [
                i
                for i, (n, m) in enumerate(zip(value.aval.shape, sizes, strict=True))
                if not (is_one(n) or n == m)
            ]
            columns = length and unlike == [rank - 1] and mine[-1] and wanted[-1]
            fits = not unlike or columns
            if fits and all(self._unrelated(a, largest) for _, a, _ in pairs):
                for i, a, b in pairs:
                    if i in unlike:
                        self._axes.relate(a[-1], b[-1])
                    else:
                        self._axes.equate(a, b)
                return

    def _unrelated(self, dim, largest) -> bool:
        """Whether no axis of this dimension is one of the largest array's, or lies along one."""
        known = {self._axes.family(a) for d in self.dims(largest) for a in self._axes.leaves(d)}
        return not known & {self._axes.family(a) for a in self._axes.leaves(dim)}

    def _set_width(self, used) -> None:
        lengths = set()
        for value in [v for v in self._dims if v in used]:
            length = self.layout(value).columns
            if length is not None:
                lengths.add(length)
        if 0 in lengths:
            raise NotARowProgram("a row", "has no columns")
        cuts = [(place, e) for axis, place, e in self._cuts if self._is_column(axis)]
        if not all(isinstance(n, int) for n in lengths):
            raise NotARowProgram("a row", "must have a known length, got a symbolic one")
        self.width = math.gcd(*lengths, *(int(place) for place, _ in cuts)) or 1
        pieces = max(lengths, default=1) // self.width
        if pieces > PIECES_MAX:
            reason = (
                f"cuts a row into {pieces} pieces of {self.width} columns, more than {PIECES_MAX}. "
                "Cut it where the lengths have a larger common divisor, or outside of the fused function"
            )
            rest = [e for place, e in cuts if place % max(lengths)]
            rest += [e for e in self._program.equations if e.primitive in _CUTTING]
            raise rest[0].refuse(reason) if rest else NotARowProgram("the function", reason)

    def _is_column(self, axis) -> bool:
        return self._column is not None and self._axes.family(axis) == self._column

    def move_first(self, rows: tuple[int, ...]) -> None:
        """Numbers the rows so that these row dimensions are the outermost ones."""
        order = [*rows, *(k for k in range(len(self._rows)) if k not in rows)]
        self._rows = [self._rows[k] for k in order]
        self.row_sizes = tuple(self.row_sizes[k] for k in order)
        self.sources = tuple(self.sources[k] for k in order)

    @property
    def side_by_side(self) -> set[int]:
        """The row dimensions behind the columns in the largest array."""
        return {self._rows.index(axis) for axis in self._side_by_side}

    def kinds(self, value) -> tuple[list, ...]:
        """For each dimension, its axes: "column", or the number of a row dimension."""
        return tuple(
            [self._kind(axis, value) for axis in self._axes.leaves(d)] for d in self.dims(value)
        )

    def _kind(self, axis, value):
        if self._is_column(axis):
            return "column"
        if axis in self._rows:
            return self._rows.index(axis)
        families = [self._axes.family(a) for a in self._rows]
        if self._axes.family(axis) in families:
            raise self._refuse(value, "cuts or joins rows; only the last axis can be cut or joined")
        raise self._refuse(
            value,
            "has a dimension that is neither the row's last axis nor one that numbers rows; those are of "
            f"{self._whole}",
        )

    def _refuse(self, value, reason) -> NotARowProgram:
        """What to raise for an array: it names the operation that makes it, or the argument."""
        for equation in self._program.equations:
            if value in equation.outputs:
                return equation.refuse(f"of shape {value.aval.shape} {reason}")
        number = next((n for n, v in enumerate(self._program.inputs) if v is value), None)
        return NotARowProgram(
            f"argument {number}", f"of shape {value.aval.shape} {reason}", argument=number
        )

    def stored(self, value) -> Layout:
        """How an argument or result lies: with its columns last, or with its rows last if they lie side by side."""
        layout = self.layout(value)
        last = len(self._rows) - 1
        if self.neighbours == 1:
            wrong = "the row's columns" if not is_one(layout.step) else ""
        elif layout.bits:
            raise self._refuse(
                value, "has bits along its last axis, which is not the row's columns"
            )
        else:
            wrong = "the rows that are neighbours" if dict(layout.strides).get(last, 1) != 1 else ""
        if wrong:
            which = f"must have {wrong} as its last axis, which they are in {self._whole}"
            raise self._refuse(value, which)
        return layout

    def layout(self, value) -> Layout:
        """How an array lies, if it is row-major."""
        strides, columns, stride, step = [], None, 1, 1
        packed = self._packed.get(value)
        dims = self.dims(value)
        if packed is not None:
            columns, stride = self._axes.sizes[packed], value.aval.shape[-1]
            dims = dims[:-1]
        if value in self._key_data:
            stride, dims = value.aval.shape[-1], dims[:-1]
        for dim in reversed(dims):
            for axis in reversed(self._axes.leaves(dim)):
                kind = self._kind(axis, value)
                size = self._axes.sizes[axis]
                if kind != "column":
                    strides.append((kind, stride))
                elif columns is None:
                    columns, step = size, stride
                else:
                    raise self._refuse(value, "has the row's columns twice")
                stride = stride * size
        return Layout(tuple(reversed(strides)), columns, packed is not None, step)

    def _source(self, program, axis):
        """The input and dimension whose outermost part this axis is, and the divisor of the dimension's size."""
        for number, value in enumerate(program.inputs):
            for dim, axes in enumerate(self._dims.get(value, ())):
                leaves = self._axes.leaves(axes)
                if leaves and leaves[0] == axis:
                    rest = [self._axes.sizes[a] for a in leaves[1:]]
                    if all(isinstance(n, int) for n in rest):
                        return number, dim, math.prod(rest)
        return None


def _pieces(equation: Equation, dim: int) -> int:
    """In how many pieces of one length an operation cuts or joins a dimension."""
    rank = len(equation.outputs[0].aval.shape)
    arrays = [v.aval.shape for v in (*equation.inputs, *equation.outputs)]
    sizes = [shape[dim] for shape in arrays if len(shape) == rank]
    if not all(isinstance(n, int) and n for n in sizes):
        return PIECES_MAX
    return max(sizes) // math.gcd(*sizes)


def _known_size(shape) -> int:
    """The number of elements, with a symbol counted as a large number."""
    return math.prod(n if isinstance(n, int) else 1 << 20 for n in shape)
