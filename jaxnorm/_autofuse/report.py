"""What `autofuse(fn).explain(...)` returns."""

import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import Literal

import jaxnorm
from jaxnorm._autofuse import costs
from jaxnorm._autofuse.grown import Grown
from jaxnorm._autofuse.match import Match
from jaxnorm._autofuse.plan import Replacement, line_of, original_function
from jaxnorm._autofuse.rewrite import Rewritten, operation_function
from jaxnorm._lib import TARGET_PREFIX
from jaxnorm._primitive.avals import struct_of, varying_axes
from jaxnorm._primitive.programs import open_jaxpr, source_line
from jaxnorm._rows import primitive
from jaxnorm._rows.call import kernel_name


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A subgraph that is an operation, or looks like one.

    Attributes:
      operation: name of jaxnorm's function, or of what it looks like.
      operand: dtype and shape of x; None where it is left.
      replaced: "always", "where it is differentiated", or "no".
      call: the call that replaces it; None where it is left.
      reason: why it is left, or why the cost model takes it.
      kept, kept_before: bytes that JAX keeps for the derivative with the operation, and without.
      place: the loops, branches and the like that it is in, the outer one first.
      line: of the user's code.
    """

    operation: str
    operand: str | None
    replaced: str
    call: str | None
    reason: str
    kept: int
    kept_before: int
    place: tuple[str, ...]
    line: str

    @property
    def saved(self) -> int:
        """Bytes that the derivative keeps less."""
        return self.kept_before - self.kept

    def __str__(self):
        place = "".join(f", in {p}" for p in self.place)
        if self.call is None:
            return f"{self.operation}{place} ({self.line})\n  left: {self.reason}"
        if self.saved >= 0:
            saves = f"saves {_bytes(self.saved)} of the {_bytes(self.kept_before)}"
        else:
            saves = f"adds {_bytes(-self.saved)} to the {_bytes(self.kept_before)}"
        return (
            f"{self.operation} of {self.operand}{place} ({self.line})\n"
            f"  becomes {self.call}\n"
            f"  {saves} that its derivative keeps\n"
            f"  used {self.replaced}; {self.reason}"
        )


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """Code around reductions along rows.

    Attributes:
      kernel: the name that profiles show; None where the code is left.
      rows, columns: of the arrays.
      lines: of the user's code that it took, in order.
      bytes: that the kernel reads and writes.
      bytes_before: that XLA's fusions move for the same, at least.
      replaced: "always", "where it is differentiated", or "no".
      reason: why it is left, or what it gains if XLA moves as few bytes; "" otherwise.
      stops: equations that ended it, with their lines.
      place: the loops, branches and the like that it is in, the outer one first.
    """

    kernel: str | None
    rows: int
    columns: int
    lines: tuple[str, ...]
    bytes: int
    bytes_before: int
    replaced: str
    reason: str
    stops: tuple[str, ...]
    place: tuple[str, ...]

    def __str__(self):
        place = "".join(f", in {p}" for p in self.place)
        head = f"row program of {self.rows} x {self.columns}{place}"
        lines = [f"  line {line}" for line in self.lines]
        if self.kernel is None:
            return "\n".join((head, *lines, f"  left: {self.reason}"))
        moves = f"  becomes {self.kernel}, which moves {_bytes(self.bytes)} instead of {_bytes(self.bytes_before)}"
        ends = [f"  ends at {stop}" for stop in self.stops]
        used = f"  used {self.replaced}{f'; {self.reason}' if self.reason else ''}"
        return "\n".join((head, *lines, moves, used, *ends))


@dataclasses.dataclass(frozen=True)
class Report:
    """What autofuse found in a function, in the order of the program.

    Attributes:
      candidates: operations, and what looks like one.
      row_programs: regions around reductions; looked for on GPUs alone.
    """

    candidates: tuple[Candidate, ...]
    row_programs: tuple[RowProgram, ...] = ()

    @property
    def replaced(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.call is not None)

    @property
    def left(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.call is None)

    def __str__(self):
        head = f"autofuse: {len(self.replaced)} replaced, {len(self.left)} left"
        kernels = sum(p.kernel is not None for p in self.row_programs)
        if self.row_programs:
            programs = "row program" if kernels == 1 else "row programs"
            head += f"; {kernels} {programs}, {len(self.row_programs) - kernels} left"
        return "\n".join((head, *map(str, self.candidates), *map(str, self.row_programs)))

    __repr__ = __str__


def report(steps: Iterable[Rewritten | Grown]) -> Report:
    """What was found in the steps that change a program."""
    candidates: list[Candidate] = []
    programs: list[RowProgram] = []
    for step in steps:
        if isinstance(step, Rewritten):
            candidates += _candidates(step, ())
        else:
            programs += _row_programs(step, ())
    return Report(tuple(candidates), tuple(programs))


def _row_programs(grown: Grown, place: tuple[str, ...]) -> Iterator[RowProgram]:
    finder = grown.finder
    equations = finder.graph.equations
    found: list[tuple[int, Any, str]] = [(r.nodes[0], r, "") for r in finder.regions]
    found += [(r.nodes[0], r, reason) for r, reason in finder.left]
    place_of = {id(e.node.eqn): i for i, e in enumerate(equations)}
    found += [(place_of[id(eqn)], body, eqn.primitive.name) for eqn, body in grown.bodies]
    for _, item, text in sorted(found, key=lambda f: f[0]):
        if isinstance(item, Grown):
            yield from _row_programs(item, (*place, text))
            continue
        lines = (_without_column(source_line(equations[i].node.eqn)) for i in item.nodes)
        verdict = costs.ALWAYS if item.gains else costs.DIFFERENTIATED
        longer = "XLA's code takes longer than its bytes" if item.is_long else ""
        yield RowProgram(
            None if text else kernel_name(primitive.row_program_p.name.removeprefix(TARGET_PREFIX)),
            item.rows,
            item.columns,
            tuple(dict.fromkeys(line for line in lines if line)),
            item.bytes,
            item.before,
            "no" if text else verdict,
            text or longer,
            finder.stops(item),
            place,
        )


def _candidates(rewritten: Rewritten, place: tuple[str, ...]) -> Iterator[Candidate]:
    plan = rewritten.plan
    found: list[tuple[float, Candidate | Rewritten, str]] = []
    for replacement in plan.replacements:
        index = replacement.region[-1].index
        found.append((index, _replaced(replacement, place), ""))
    for left, equation in plan.left:
        line = line_of(equation.eqn, equation.level) if equation else "?"
        candidate = Candidate(left.operation, None, "no", None, left.reason, 0, 0, place, line)
        found.append((equation.index if equation else 0, candidate, ""))
    for equation, body in rewritten.bodies:
        found.append((equation.index, body, equation.eqn.primitive.name))
    for _, item, name in sorted(found, key=lambda f: f[0]):
        if isinstance(item, Candidate):
            yield item
        else:
            yield from _candidates(item, (*place, name))


def _replaced(replacement: Replacement, place) -> Candidate:
    match, rule = replacement.match, replacement.rule
    before, after = (
        _kept(f(replacement), replacement) for f in (original_function, operation_function)
    )
    x, _ = replacement.sources[match.x.node]
    arguments = _arguments(match)
    if match.axes is not None:
        # As dimensions of the program's array, counted from the end where that says more.
        dims = [i for i, d in enumerate(x.view.dims) if d is not None]
        axes = [dims[a] for a in match.axes]
        shown = tuple(a - x.aval.ndim for a in axes) if axes[-1] == x.aval.ndim - 1 else tuple(axes)
        arguments.append(f"axis={shown[0] if len(shown) == 1 else shown}")
    arguments += [f"{name}={value!r}" for name, value in match.options.items()]
    (defined,) = (e for e in replacement.level.jaxpr.eqns if replacement.defines[0] in e.outvars)
    return Candidate(
        match.operation,
        f"{x.aval.dtype}[{','.join(map(str, x.aval.shape))}]",
        rule.verdict,
        match.shown.format(f"jaxnorm.{match.operation}({', '.join(arguments)})"),
        rule.why,
        after,
        before,
        place,
        line_of(defined, replacement.level),
    )


def _arguments(match: Match) -> list[str]:
    """Operands as they are written in a call: by position as far as none is left out."""
    parameters = inspect.signature(getattr(jaxnorm, match.operation)).parameters
    first, *others = parameters
    names, positional = [first], True
    for name in others:
        positional &= (
            name in match.operands and parameters[name].kind != inspect.Parameter.KEYWORD_ONLY
        )
        if name in match.operands:
            names.append(name if positional else f"{name}={name}")
    return names


def _kept(function, replacement: Replacement) -> int:
    """Bytes of what JAX keeps for the derivative of a function of a replacement's sources."""
    avals = [value.aval for value, _ in replacement.sources.values()]
    arrays = [struct_of(a) for a in avals]
    # Of a shard_map; their sizes make no difference.
    axes = {name for a in (*avals, replacement.match.output.aval) for name in varying_axes(a)}
    trace = jax.make_jaxpr(
        lambda *a: jax.vjp(function, *a)[1], axis_env=[(name, 1) for name in axes]
    )
    jaxpr, _ = open_jaxpr(trace(*arrays))
    numbers = {
        v for e in jaxpr.eqns for v in e.outvars if all(isinstance(a, Literal) for a in e.invars)
    }  # XLA makes them anew
    kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - numbers
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in kept)


def _without_column(line: str) -> str:
    return re.sub(r":(\d+):\d+ ", r":\1 ", line)


def _bytes(n: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} bytes"
