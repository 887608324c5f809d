"""fuse: a function that works row by row as one kernel, forward and backward."""

import dataclasses
import functools
import inspect
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxnorm import _lib
from jaxnorm._primitive.programs import (
    closed_of,
    open_jaxpr,
    run_program,
    source_line,
    trace_context,
)
from jaxnorm._rows import explain, launcher, primitive, save, tune
from jaxnorm._rows.call import device_here, row_call
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.explain import Kernel
from jaxnorm._rows.keys import data_of, is_key, kind_of, with_kind


def fuse(fn: Callable) -> "Fused":
    """Makes one kernel of a function that works row by row, and one of its derivative.

    The reductions of `fn` run along rows, which are the last axis of its largest array or, if all reductions run along
    another axis, that one; all else is elementwise. On a GPU the result reads every input once and writes every output
    once, and its gradient is JAX's own, in one kernel too.
    Elsewhere it is `fn`.

    Arguments and results are pytrees of arrays. Python's numbers and keyword arguments are what they are to `jax.jit`;
    arrays that `fn` closes over are operands, and are differentiated. Calls of `jit`, `custom_jvp`, `custom_vjp` and
    `checkpoint` are followed, and their own derivative rules are the ones that are used. Every transformation of JAX
    applies to the result. What backward needs is not fixed: the fewest bytes are saved, one for eight booleans,
    and the statistics of long rows.

    Kernels compute in float32 (float64 for float64), with one rounding at each output. A plain function is traced once
    for arguments alike, a method or a function with arrays of its own each time that it is called outside `jit`.

    Args:
      fn: function of pytrees of arrays.

    Returns:
      The function, with methods `explain` and `tune`, which take the same arguments (or `jax.ShapeDtypeStruct` for
      arrays). `explain` says what the kernels do, `tune` looks for faster ones on the GPU that is there.

    Raises:
      TypeError: `fn` is not callable; at the call, an argument or a result is no array.
      ValueError: at the call, for what is not a row program; says which line is not, and why.

    >>> import jax, jax.numpy as jnp, jaxnorm
    >>> @jaxnorm.fuse
    ... def gated_rms(x, z, scale):
    ...     h = x * jax.nn.silu(z)
    ...     return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * scale
    >>> gated_rms(jnp.ones((2, 4)), jnp.ones((2, 4)), jnp.ones(4)).round(3)[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    if not callable(fn):
        raise TypeError(
            f"fuse: fn must be a function, got {type(fn).__name__}. Pass model.apply, say, not the model."
        )
    return Fused(fn)


class Fused:
    """A function whose calls are row programs; made by `fuse`."""

    def __init__(self, fn: Callable):
        self._fn = fn
        self._traces: dict[Any, _Trace] = {}
        functools.update_wrapper(self, fn)

    def __call__(self, *args, **kwargs) -> Any:
        arguments = _Arguments(self._fn, args, kwargs)
        return self._trace(arguments)(arguments.arrays)

    def explain(self, *args, **kwargs) -> "Explanation":
        """What the kernels of a call with these arguments (or shapes) do, and what forward keeps for backward.

        It describes the calls that lowering makes here. Without a GPU they are those for an H100.

        Returns:
          An `Explanation`; print it. `.source` and `.backward.source` are the CUDA text.

        >>> import jax, jax.numpy as jnp, jaxnorm
        >>> softmax = jaxnorm.fuse(jax.nn.softmax)
        >>> found = softmax.explain(jax.ShapeDtypeStruct((4096, 1000), jnp.float32))
        >>> found.read, found.written, found.saved_bytes
        (16384000, 16384000, 32768)
        >>> found.forward.phases[-1].rpartition("; ")[2], found.backward.phases[-1].rpartition("; ")[2]
        ('writes result', 'writes gradient of x')
        >>> "row_program(" in found.source
        True
        """
        arguments = _Arguments(self._fn, args, kwargs)
        return _explain(self, self._trace(arguments), arguments)

    def tune(self, *args, **kwargs) -> "Tuning":
        """Measures schedules for the kernels of a call with these arguments (or shapes), and keeps the fastest.

        Forward and backward are compiled under some dozens of schedules near the chosen one and measured on JAX's
        default GPU, on random data. Where another one is faster by more than 2%, it is kept in the cache directory,
        and is used on GPUs of this name from then on, for every number of rows. What was compiled before stays.
        Results differ in the order of rounding at most.

        Returns:
          What was gained; print it. Progress is shown on a terminal if `rich` is installed.

        Raises:
          RuntimeError: there is no GPU, or no NVRTC.
        """
        arguments = _Arguments(self._fn, args, kwargs)
        return _tune(self, self._trace(arguments))

    def _trace(self, arguments) -> "_Trace":
        # What a method reads from its object, and what arrays a function finds, may be others at the next call.
        key = (
            (*arguments.key, trace_context()) if isinstance(self._fn, types.FunctionType) else None
        )
        trace = self._traces.get(key)
        if trace is None:
            trace = _trace(self._fn, arguments)
            if key is not None and not trace.constants:
                self._traces[key] = trace
        return trace

    def __get__(self, instance, owner=None):
        return self if instance is None else Fused(types.MethodType(self._fn, instance))

    def __eq__(self, other):
        return isinstance(other, Fused) and self._fn == other._fn

    def __hash__(self):
        return hash((Fused, self._fn))

    def __reduce__(self):  # traces are not copied
        return Fused, (self._fn,)

    def __repr__(self):
        return f"fuse({getattr(self._fn, '__qualname__', self._fn)})"


# ---- arguments and results ----


class _Arguments:
    """The arguments of a call.

    Attributes:
      arrays: of all leaves, random keys as their data.
      avals: their abstract values.
      names: functions that return what the user calls each of them.
      restore: arrays -> (args, kwargs).
      key: what the trace of a call depends on.
    """

    def __init__(self, fn, args, kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        names = functools.partial(_name_of_leaf, fn, args, kwargs)
        self.arrays: list = []
        self.avals: list = []
        self.names: list = []
        self._kinds: list = []
        for i, leaf in enumerate(leaves):
            if _is_float0(leaf):  # the tangent of an integer; holds nothing
                self._kinds.append(_Nothing(np.shape(leaf)))
                continue
            array = _to_array(leaf, functools.partial(names, i))
            kind = kind_of(array)
            if isinstance(array, jax.ShapeDtypeStruct):
                array = jax.eval_shape(data_of, array)
                self.avals.append(jax.make_jaxpr(lambda x: x)(array).in_avals[0])
            else:
                array = data_of(array)
                self.avals.append(jax.typeof(array))
            self._kinds.append(kind)
            self.names.append(functools.partial(names, i))
            self.arrays.append(array)
        self._structure = structure
        self.key = (structure, tuple(self.avals), tuple(self._kinds))

    def restore(self, arrays):
        arrays = iter(arrays)
        leaves = [_wrapped(kind, arrays) for kind in self._kinds]
        return jax.tree.unflatten(self._structure, leaves)


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """An array of dtype float0."""

    shape: tuple


def _is_float0(leaf) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _to_array(leaf, name):
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    numbers = isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic))
    if (numbers or hasattr(leaf, "__jax_array__")) and np.dtype(
        getattr(leaf, "dtype", np.float32)
    ).kind not in "OSU":
        return jnp.asarray(leaf)
    raise TypeError(
        f"fuse: {name()} must be an array, a number or a pytree of those, got {type(leaf).__name__}. "
        "Bind what is none before: jaxnorm.fuse(functools.partial(fn, name=value))."
    )


def _name_of_leaf(fn, args, kwargs, i) -> str:
    """The argument that leaf number i is or is in, by the name that it has in fn."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    # Numbers take the place of the leaves, because two leaves may be one object.
    args, kwargs = jax.tree.unflatten(structure, range(len(leaves)))
    try:
        arguments = inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        arguments = {"args": args, "kwargs": kwargs}
    for path, number in jax.tree_util.tree_flatten_with_path(dict(arguments))[0]:
        if number == i:
            (name, *rest) = path
            return f"argument '{name.key}'" + (
                f" at {jax.tree_util.keystr(tuple(rest))}" if rest else ""
            )
    return f"argument {i}"


def _wrapped(kind, arrays):
    if isinstance(kind, _Nothing):
        return np.zeros(kind.shape, jax.dtypes.float0)
    return with_kind(next(arrays), kind)


# ---- tracing ----


@dataclasses.dataclass(frozen=True)
class _Trace:
    """A function, traced.

    Attributes:
      program: of the arrays of a call, of constants and of keys.
      constants: arrays that the function closes over, random keys as their data.
      keys: a program of arrays and constants, which makes random keys of others; None if there are none.
      restore: results of the program -> what the function returns.
    """

    program: Any
    constants: tuple
    keys: Any
    restore: Callable

    def __call__(self, arrays):
        operands = [*arrays, *self.constants]
        if self.keys is not None:
            operands += run_program(self.keys, *operands)
        return self.restore(primitive.run(self.program, operands))


def _trace(fn, arguments: _Arguments) -> _Trace:
    results: list = []

    def of_arrays(*arrays):
        args, kwargs = arguments.restore(arrays)
        leaves, structure = jax.tree.flatten(fn(*args, **kwargs))
        kinds, arrays = [], []
        for i, leaf in enumerate(leaves):
            if _is_float0(leaf):
                kinds.append(_Nothing(leaf.shape))
                continue
            array = _to_array(leaf, lambda i=i: f"result {i}")
            kinds.append(kind_of(array))
            arrays.append(data_of(array))
        results[:] = structure, kinds
        return arrays

    closed = jax.make_jaxpr(of_arrays)(*arguments.avals)
    program, constants, keys = _with_operands(closed)
    try:
        _check(program)
    except NotARowProgram as error:
        if error.argument is None or error.argument >= len(arguments.names):
            raise
        name = arguments.names[error.argument]()
        raise NotARowProgram(name, error.reason) from None
    structure, kinds = results

    def restore(arrays):
        arrays = iter(arrays)
        return jax.tree.unflatten(structure, [_wrapped(kind, arrays) for kind in kinds])

    return _Trace(_interned(program), tuple(constants), keys, restore)


# The largest array that a random key may be computed from.
_KEY_ELEMENTS = 1024


def _with_operands(closed):
    """(program with what it closes over and keys that it makes as further operands, the former, program of keys)."""
    if not open_jaxpr(closed)[1] and not _needs_flattening(closed):
        return closed, [], None
    flat = save.Flat(closed)
    given, constants = [*flat.operands, *flat.constants], flat.constants.values()
    made = _keys_made(flat, given)
    keys = None
    if made:
        keys_of, none = flat.program(given, made)
        assert not none

        def make(*arrays):
            return list(map(data_of, run_program(keys_of, *arrays)))

        keys, _ = closed_of(make, keys_of.in_avals)
    program, none = flat.program([*given, *made], flat.results)
    assert not none
    if any(is_key(flat.avals[v]) for v in (*given, *made)):
        flat = save.Flat(program)
        program, _ = flat.program(flat.operands, flat.results)
    return program, [data_of(a) for a in constants], keys


def _keys_made(flat, given) -> list[int]:
    """Random keys that a program makes of others (split, fold_in) or of numbers, and takes bits from."""
    nodes, _ = flat.needed(flat.results, ())
    wraps = {
        n.outputs[0]
        for n in nodes
        if n.eqn.primitive.name == "random_wrap" and n.inputs[0] in given
    }
    readers = [n for n in nodes if not is_key(flat.avals[n.outputs[0]])]
    made = {
        a
        for n in readers
        for a in n.inputs
        if not isinstance(a, Literal)
        and is_key(flat.avals[a])
        and a not in wraps
        and a not in given
    }
    _, live = flat.needed(made, ())
    sizes = [flat.avals[v].shape for v in live]
    small = all(all(isinstance(n, int) for n in s) and math.prod(s) <= _KEY_ELEMENTS for s in sizes)
    return sorted(made) if small else []


_FLATTENED = {
    "random_seed",
    "random_split",
    "random_fold_in",
    "random_unwrap",
    primitive.row_tangent_p.name,
}


def _needs_flattening(closed) -> bool:
    """Whether a program makes or returns random keys, has tangents of row programs, or calls what has constants."""
    jaxpr, _ = open_jaxpr(closed)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _FLATTENED:
            return True
        if (body := save.body_of(eqn)) is not None:
            if open_jaxpr(body)[1] or _needs_flattening(body):
                return True
    return False


def _check(closed) -> None:
    """Raises a ValueError if a program has effects or is not one of rows."""
    jaxpr, _ = open_jaxpr(closed)
    for eqn in jaxpr.eqns:
        if eqn.effects:
            line = source_line(eqn)
            raise NotARowProgram(
                f"`{eqn.primitive.name}`{f' at {line}' if line else ''}",
                "has an effect, which a row program cannot have. Move it out of the function.",
            )
    primitive.check(closed)


_programs: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def _interned(closed):
    """An equal program that was traced before, if there is one: what was derived of it need not be derived again."""
    try:
        return _programs.setdefault((_key(closed), trace_context()), closed)
    except TypeError:  # parameters that have no hash
        return closed


def _key(closed):
    """Equal for programs that do the same; functions in the parameters are compared by identity."""
    jaxpr, consts = open_jaxpr(closed)
    numbers: dict[Any, int] = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def atom(v):
        if isinstance(v, Literal):
            return np.asarray(v.val).tobytes(), v.aval
        return numbers.setdefault(v, len(numbers))

    equations = tuple(
        (
            eqn.primitive,
            tuple(map(atom, eqn.invars)),
            tuple((atom(v), v.aval) for v in eqn.outvars),
            tuple(
                (name, _key(p) if isinstance(p, ClosedJaxpr) else p)
                for name, p in sorted(eqn.params.items())
            ),
        )
        for eqn in jaxpr.eqns
    )
    key = (
        tuple(map(id, consts)),
        tuple(v.aval for v in jaxpr.invars),
        equations,
        tuple(map(atom, jaxpr.outvars)),
    )
    hash(key)
    return key


# ---- explain ----


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call of a fused function does; print it.

    Attributes:
      name: of the function.
      read, written: bytes of its operands and of its results.
      saved: what forward writes for backward, besides operands and results: dtype and shape of each.
      kept: what backward reads: names of operands, results, and what is saved.
      saved_bytes, backward_read, backward_written: bytes.
      forward: the kernel of a call without derivatives; None if there is none, as of empty arrays.
      backward: the kernel of the gradient of all floating operands; None if there is nothing to differentiate, or it
        runs as plain XLA operations.
      assumes: what the predicted times assume.
      problem: why there is no such kernel on this machine, or "".
    """

    name: str
    read: int
    written: int
    saved: tuple[str, ...]
    kept: tuple[str, ...]
    saved_bytes: int
    backward_read: int
    backward_written: int
    forward: Kernel | None
    backward: Kernel | None
    assumes: str
    problem: str

    @property
    def source(self) -> str:
        """The CUDA text of forward."""
        return self.forward.source if self.forward else ""

    @property
    def full_source(self) -> str:
        """The same with the functions that all kernels have in front."""
        return self.forward.full_source if self.forward else ""

    def __repr__(self):
        lines = [f"{self.name}: reads {self.read:,} bytes, writes {self.written:,} bytes"]
        lines += ["    " + line for line in self.forward.lines()] if self.forward else []
        if self.backward_written:
            lines += [
                f"  saved for backward: {', '.join(self.saved) or 'nothing'} ({self.saved_bytes:,} bytes)",
                f"  backward of {', '.join(self.kept) or 'cotangents'}: "
                f"reads {self.backward_read:,} bytes, writes {self.backward_written:,} bytes",
            ]
        lines += ["    " + line for line in self.backward.lines()] if self.backward else []
        lines.append(f"  {self.assumes}")
        lines += [f"  {self.problem}"] if self.problem else []
        return "\n".join(lines)


def _explain(fused, trace: _Trace, arguments: _Arguments) -> Explanation:
    closed = trace.program
    split = primitive.split_of(closed, _floats(closed))
    count, operands = len(closed.out_avals), open_jaxpr(closed)[0].invars
    saved = split.forward.out_avals[count:] if split.saved else []
    names = [name().removeprefix("argument ").replace("'", "") for name in arguments.names]
    names += [f"constant {i}" for i in range(len(operands) - len(names))]
    results = ["result"] if count == 1 else [f"result {i}" for i in range(count)]

    def name(kind, i):
        if kind == "operand":
            return names[i]
        if kind == "constant":
            return "a constant"
        return results[i] if i < count else str(saved[i - count])

    kept = tuple(name(*origin) for origin in split.residuals)
    backward, device = split.backward, device_here()
    problems: list[str] = []

    def kernel(program, operands, results):
        program, taken, made = primitive.kernel_program(program)
        if program is None:
            return None
        operands, results = [operands[i] for i in taken], [results[i] for i in made]
        try:
            call = row_call(program, device)
        except NotARowProgram as error:
            problems.append(str(error))
            return None
        if _lib.module("cuda").available:
            call = primitive.compiled_call(program) or call
        return explain.kernel(program, device, call, operands, results)

    forward_kernel = kernel(closed, names, results)
    backward_kernel = None
    if backward is not None:
        cotangents = [f"cotangent of {results[i]}" for i in split.active]
        gradients = [f"gradient of {names[i]}" for i in split.taken]
        backward_kernel = kernel(backward, [*kept, *cotangents], gradients)
    rate, assumption = explain.memory_rate(device)
    compiler = _lib.module("cuda")
    if not compiler.available:
        problems.append(f"here it runs as plain XLA operations: {compiler.reason}")
    elif not launcher.gpus():
        problems.append(f"there is no GPU here; these are the kernels for {device.name}")
    return Explanation(
        name=getattr(fused, "__name__", "function"),
        read=explain.nbytes(v.aval for v in operands),
        written=explain.nbytes(closed.out_avals),
        saved=tuple(map(str, saved)),
        kept=kept,
        saved_bytes=explain.nbytes(saved),
        backward_read=explain.nbytes(backward.in_avals) if backward is not None else 0,
        backward_written=explain.nbytes(backward.out_avals) if backward is not None else 0,
        forward=forward_kernel,
        backward=backward_kernel,
        assumes=f"times: bytes at {rate / 1e12:.2f} TB/s, {assumption} ({device.name})",
        problem="; ".join(problems),
    )


def _floats(closed) -> tuple[bool, ...]:
    return tuple(jnp.issubdtype(a.dtype, np.floating) for a in closed.in_avals)


# ---- tune ----


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `tune` gained; print it.

    Attributes:
      name: of the function.
      kernels: "forward", "forward that saves" if that is another one, "backward" -> what was measured.
    """

    name: str
    kernels: dict[str, tune.Tuned]

    def __repr__(self):
        width = max(map(len, self.kernels), default=0)
        lines = [f"{self.name}:"]
        for name, found in self.kernels.items():
            before, after = explain.duration(found.chosen_seconds), explain.duration(found.seconds)
            if found.best == found.chosen:
                gained = f"{after}, the chosen schedule is the fastest of {found.tried}"
            else:
                gained = f"{before} -> {after}, {found.gain:.2f}x, the fastest of {found.tried}"
                gained += f"\n  {'':<{width}}  {found.best}"
                gained += "" if found.file else f"\n  {'':<{width}}  not kept: there is no cache"
            lines.append(f"  {name:<{width}}  {gained}")
        return "\n".join(lines)


def _tune(fused, trace: _Trace) -> Tuning:
    compiler = _lib.module("cuda")
    if not compiler.available:
        raise RuntimeError(f"fuse: tune must compile kernels, but cannot: {compiler.reason}")
    if not launcher.gpus() or jax.default_backend() != "gpu":
        reason = launcher.no_gpu() or f"JAX's default backend is {jax.default_backend()}"
        raise RuntimeError(f"fuse: tune must have a GPU to measure on ({reason})")
    closed = trace.program
    split = primitive.split_of(closed, _floats(closed))
    programs = {"forward": closed}
    if split.saved:
        programs["forward that saves"] = split.forward
    if split.backward is not None:
        programs["backward"] = split.backward
    found = {}
    for name, program in programs.items():
        program, _, _ = primitive.kernel_program(program)
        if program is not None:
            with tune.shown(name) as progress:
                found[name] = tune.tune(program, device_here(), progress)
    primitive.compiled_call.cache_clear()
    return Tuning(getattr(fused, "__name__", "function"), found)
