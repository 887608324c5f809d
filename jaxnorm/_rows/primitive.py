"""Row programs as JAX primitives.

  jaxnorm_row_program   operands -> results of the parameter `jaxpr`. One kernel on a GPU, the jaxpr elsewhere
  jaxnorm_row_tangent   residuals, tangents of operands -> tangents of results        linear in the tangents

Both are made of programs, so every derivative of a row program is a row program again. A program P is differentiated in
two parts (`Split`). Forward is P with the values that `save` chooses to keep as further results. Backward is JAX's vjp
of P, custom rules included, from the kept values and the cotangents to the gradients. `row_tangent` holds backward: its
transpose is backward as a row program. The transpose of backward is its own result, which forward mode asks for.

Zeros are structure: operands without a tangent and results without a cotangent are left out of the programs.

Programs are told apart by identity, and the programs derived from a program are kept with it.
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jax.interpreters import ad, batching

from jaxnorm import _launch, _lib
from jaxnorm._primitive.avals import (
    aval_like,
    cotangent_aval,
    same_place,
    spec_of,
    vary_alike,
    varying_axes,
)
from jaxnorm._primitive.calls import Call
from jaxnorm._primitive.define import define_compiled, define_dce, define_formula
from jaxnorm._primitive.programs import (
    cached_by_program,
    closed_of,
    open_jaxpr,
    pruned,
    run_program,
)
from jaxnorm._primitive.rules import NOT_MAPPED, is_present, mapped_size, zero
from jaxnorm._rows import launcher, local, save, tune
from jaxnorm._rows.bits import pack_bits_p
from jaxnorm._rows.call import Call as RowCall
from jaxnorm._rows.call import compiled_row_call, device_here
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.rules import cached_program_of
from jaxnorm._rows.save import Flat, cheapest_cut

# The name under which a checkpoint policy finds the values that forward keeps.
SAVED = _lib.TARGET_PREFIX + "fuse"


# ---- running programs ----


@dataclasses.dataclass(frozen=True)
class Needed:
    """The part of a program that needs a kernel.

    Attributes:
      program: without results that are operands, constants or another result, and without unused operands; None if
        nothing is left, the program itself if all is.
      operands: which operands it takes.
      results: ("program" | "operand" | "constant", number) for each result of the whole.
      constants: a program without operands.
    """

    program: Any
    operands: tuple[int, ...]
    results: tuple[tuple[str, int], ...]
    constants: Any


_ITSELF = "itself"  # a cached value that held the program would keep it alive


@cached_by_program
def _needed(closed) -> Needed:
    jaxpr, _ = open_jaxpr(closed)
    positions: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    varied = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in varied for v in eqn.invars):
            varied.update(eqn.outvars)
    kinds: list[tuple[str, int]] = []
    taken: dict[str, dict] = {"program": {}, "constant": {}}  # result -> its position in the parts
    for i, v in enumerate(jaxpr.outvars):
        if not isinstance(v, Literal) and v in positions:
            kinds.append(("operand", positions[v]))
            continue
        kind = "program" if not isinstance(v, Literal) and v in varied else "constant"
        key = ("literal", i) if isinstance(v, Literal) else v
        kinds.append((kind, taken[kind].setdefault(key, (len(taken[kind]), i))[0]))

    def part(kind):
        used = [False] * len(jaxpr.outvars)
        for _, i in taken[kind].values():
            used[i] = True
        return pruned(closed, used)

    constants = part("constant")[0] if taken["constant"] else None
    if not taken["program"]:
        return Needed(None, (), tuple(kinds), constants)
    program, used = part("program")
    whole = all(used) and len(taken["program"]) == len(jaxpr.outvars)
    operands = tuple(i for i, u in enumerate(used) if u)
    return Needed(_ITSELF if whole else program, operands, tuple(kinds), constants)


def run(closed, operands: Sequence) -> list:
    """Results of a program as a row program: the part that needs a kernel is one call."""
    operands = _alike(operands)
    needed = _needed(closed)
    results = {"operand": operands, "program": [], "constant": []}
    if needed.program is not None:
        program = closed if needed.program is _ITSELF else needed.program
        given = [operands[i] for i in needed.operands]
        results["program"] = row_program_p.bind(*given, jaxpr=typed(program, _avals(given)))
    if needed.constants is not None:
        results["constant"] = [jnp.asarray(c) for c in run_program(needed.constants)]
    return [results[kind][i] for kind, i in needed.results]


def check(closed, row_sums: bool = False) -> None:
    """Raises a ValueError if the part of a program that needs a kernel cannot be one.

    Args:
      closed: the program.
      row_sums: whether it may have sums over rows.
    """
    needed = _needed(closed)
    program = closed if needed.program is _ITSELF else needed.program
    if program is None or _is_empty(program):
        return
    try:
        cached_program_of(program, row_sums)
    except NotARowProgram as error:
        if error.argument is not None:
            error.argument = needed.operands[error.argument]
        raise


def _is_empty(closed) -> bool:
    return any(
        n == 0 for a in (*closed.in_avals, *closed.out_avals) for n in a.shape if isinstance(n, int)
    )


def _alike(operands) -> list:
    """Operands that vary along the same axes of a shard_map: a cast in a program would be a sum in its derivative."""
    if len({varying_axes(jax.typeof(x)) for x in operands}) < 2:
        return list(operands)
    return vary_alike(*operands)


def typed(closed, avals: Sequence):
    """The program for operands that live elsewhere than the operands that it was traced for."""
    if all(map(same_place, closed.in_avals, avals)):
        return closed
    return _retyped(closed, tuple(avals))


@cached_by_program
def _retyped(closed, avals):
    program, none = closed_of(Flat(closed).run, avals)
    assert not none
    return program


def _avals(operands) -> tuple:
    return tuple(jax.typeof(x) for x in operands)


# ---- the derivative ----


@dataclasses.dataclass(frozen=True)
class Split:
    """A program, differentiated.

    Attributes:
      forward: operands, `constants` -> results, saved.
      constants: arrays that forward takes behind its operands.
      residuals: the source of each residual of backward: ("operand" | "result", number) or ("constant", array). Saved
        values are further results of forward.
      saved: how many further results forward has.
      backward: residuals, cotangents of `active` results -> gradients of `taken` operands.
      active: results that have a tangent if the operands in question have.
      taken: operands that have an influence.
    """

    forward: Any
    constants: tuple
    residuals: tuple[tuple[str, Any], ...]
    saved: int
    backward: Any
    active: tuple[int, ...]
    taken: tuple[int, ...]


@cached_by_program
def split_of(closed, nonzero: tuple[bool, ...]) -> Split:
    """Differentiates a program with respect to some of its operands."""
    n, outs = len(closed.in_avals), closed.out_avals
    varied = [i for i, nz in enumerate(nonzero) if nz]
    flat = Flat(closed)
    reached = flat.depending((flat.operands[i] for i in varied), tangents=True)
    active = tuple(
        i
        for i, (atom, aval) in enumerate(zip(flat.results, outs, strict=True))
        if not isinstance(atom, Literal)
        and atom in reached
        and jnp.issubdtype(aval.dtype, np.inexact)
    )
    if not active:
        return Split(_ITSELF, (), (), 0, None, (), ())

    def joint(*args):
        operands, cotangents = args[:n], args[n:]

        def f(*some):
            given = dict(zip(varied, some, strict=True))
            results = run_program(closed, *(given.get(i, x) for i, x in enumerate(operands)))
            return [results[i] for i in active], results

        _, pullback, results = jax.vjp(f, *(operands[i] for i in varied), has_aux=True)
        return [*results, *pullback(list(cotangents))]

    traced, constants = closed_of(
        joint, [*closed.in_avals, *(cotangent_aval(outs[i]) for i in active)]
    )
    flat = Flat(traced)
    operands, cotangents = flat.operands[:n], flat.operands[n : n + len(active)]
    for value, array in zip(flat.operands[n + len(active) :], constants, strict=True):
        flat.constants[value] = array
    results, gradients = flat.results[: len(outs)], flat.results[len(outs) :]
    influence = [(i, g) for i, g in zip(varied, gradients, strict=True) if not flat.is_zero(g)]
    if not influence:
        return Split(_ITSELF, (), (), 0, None, (), ())
    gradients = [g for _, g in influence]
    cut = cheapest_cut(flat, results, gradients, flat.depending(cotangents))
    forward, forward_constants = _ITSELF, []
    # The rules that JAX applied here have their own forward, which higher derivatives must see.
    if cut.saved or has_rules(closed):
        forward, forward_constants = flat.program(
            operands, [*results, *cut.saved], cut.bits, cut.wide
        )
    backward, none = flat.program([*cut.kept, *cotangents], gradients, cut.bits, cut.wide)
    assert not none

    def origin(value):
        if value in operands:
            return "operand", operands.index(value)
        if value in cut.saved:
            return "result", len(outs) + cut.saved.index(value)
        if value in results:
            return "result", results.index(value)
        return "constant", flat.constants[value]

    return Split(
        forward,
        tuple(forward_constants),
        tuple(map(origin, cut.kept)),
        len(cut.saved),
        backward,
        active,
        tuple(i for i, _ in influence),
    )


def has_rules(closed) -> bool:
    """Whether a program calls functions with derivative rules of their own."""
    jaxpr, _ = open_jaxpr(closed)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("custom_", _lib.TARGET_PREFIX)):
            return True
        if (body := save.body_of(eqn)) is not None and has_rules(body):
            return True
    return False


@cached_by_program
def transposed_of(closed, linear: tuple[bool, ...], present: tuple[bool, ...]):
    """The program of operands that are not linear, and cotangents of `present` results, to gradients of linear ones."""
    others = linear.count(False)

    def run(*args):
        known, cotangents = iter(args[:others]), list(args[others:])
        fixed = [None if is_linear else next(known) for is_linear in linear]

        def of_linear(*operands):
            operands = iter(operands)
            results = run_program(closed, *(next(operands) if f is None else f for f in fixed))
            return [y for y, p in zip(results, present, strict=True) if p]

        return jax.linear_transpose(of_linear, *_where(closed.in_avals, linear))(cotangents)

    known = _where(closed.in_avals, [not is_linear for is_linear in linear])
    program, none = closed_of(
        run, [*known, *map(cotangent_aval, _where(closed.out_avals, present))]
    )
    assert not none
    return program


def _where(items, chosen) -> list:
    return [item for item, c in zip(items, chosen, strict=True) if c]


@cached_by_program
def narrowed_of(
    backward, residuals: int, gradients: tuple[bool, ...], cotangents: tuple[bool, ...]
):
    """Backward with some gradients only, of some cotangents: the others are 0.

    Returns:
      (program of the residuals that are left and the cotangents; which residuals are left; which of all gradients).
    """
    absent = [residuals + i for i, present in enumerate(cotangents) if not present]
    flat = Flat(backward, absent)
    results = [
        None if not wanted or flat.is_zero(g) else g
        for g, wanted in zip(flat.results, gradients, strict=True)
    ]
    left = [g for g in results if g is not None]
    _, live = flat.needed(left, flat.operands)
    kept = [v for v in flat.operands[:residuals] if v in live]
    program, none = flat.program([*kept, *_where(flat.operands[residuals:], cotangents)], left)
    assert not none
    return (
        program,
        tuple(v in live for v in flat.operands[:residuals]),
        tuple(g is not None for g in results),
    )


# ---- mapped axes ----


def _mapped(arrays, dims):
    """(arrays, where each is mapped, where results are), where the mapped axis is not the last one, a row's columns."""
    dims = list(dims)
    for i, (a, d) in enumerate(zip(arrays, dims, strict=True)):
        if d is not NOT_MAPPED and d == a.ndim - 1 and d > 0:
            arrays[i], dims[i] = jnp.moveaxis(a, d, 0), 0
    rank = max(a.ndim for a, d in zip(arrays, dims, strict=True) if d is not NOT_MAPPED)
    at = next(
        d for a, d in zip(arrays, dims, strict=True) if d is not NOT_MAPPED and a.ndim == rank
    )
    return arrays, tuple(dims), at


def _axis_of(aval, at) -> int:
    """Where a result has the mapped axis: at the given place if that is before its own last axis."""
    return at if at < aval.ndim else 0


def _result_dims(closed, dims, at) -> tuple:
    """Where each result has the mapped axis: bits in front, results that depend on no mapped operand nowhere."""
    jaxpr, _ = open_jaxpr(closed)
    mapped = {v for v, d in zip(jaxpr.invars, dims, strict=True) if d is not NOT_MAPPED}
    packed = set()
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in mapped for v in eqn.invars):
            mapped.update(eqn.outvars)
        if eqn.primitive is pack_bits_p:
            packed.update(eqn.outvars)
    return tuple(
        NOT_MAPPED
        if isinstance(v, Literal) or v not in mapped
        else _axis_of(v.aval, 0 if v in packed else at)
        for v in jaxpr.outvars
    )


@cached_by_program
def _batched(closed, dims, out_dims, avals):
    mapped = jax.vmap(functools.partial(run_program, closed), dims, list(out_dims))
    program, none = closed_of(mapped, avals)
    assert not none
    return program


# ---- row_program ----


def _program_formula(*operands, jaxpr):
    return run_program(typed(jaxpr, _avals(operands)), *operands)


def _program_abstract(*avals, jaxpr):
    return list(typed(jaxpr, avals).out_avals)


def _program_jvp(primals, tangents, *, jaxpr):
    closed = typed(jaxpr, _avals(primals))
    split = split_of(closed, tuple(map(is_present, tangents)))
    forward = closed if split.forward is _ITSELF else split.forward
    results = run(forward, [*primals, *split.constants])
    # Saved values are named here: a name that the user gives to a result names another value.
    for i in {i for kind, i in split.residuals if kind == "result"}:
        results[i] = checkpoint_name(results[i], SAVED)
    count = len(closed.out_avals)
    dots: list = [zero(y) for y in results[:count]]
    if split.active:
        sources = {"operand": primals, "result": results}
        residuals = [sources[k][i] if k in sources else i for k, i in split.residuals]
        operands = [*residuals, *(tangents[i] for i in split.taken)]
        found = row_tangent_p.bind(
            *_alike(operands), jaxpr=split.backward, residuals=len(residuals)
        )
        for i, dot in zip(split.active, found, strict=True):
            dots[i] = dot
    return results[:count], dots


def _program_transpose(cotangents, *operands, jaxpr):
    linear = tuple(map(ad.is_undefined_primal, operands))
    present = tuple(map(is_present, cotangents))
    gradients: Any = iter([])
    if any(present):
        program = transposed_of(jaxpr, linear, present)
        known = _where(operands, [not is_linear for is_linear in linear])
        gradients = iter(run(program, [*known, *_where(cotangents, present)]))
    return [
        next(gradients, ad.Zero(o.aval)) if is_linear else None
        for o, is_linear in zip(operands, linear, strict=True)
    ]


def _program_batch(args, dims, *, jaxpr):
    args, dims, at = _mapped(list(args), dims)
    out_dims = _result_dims(jaxpr, dims, at)
    return run(_batched(jaxpr, dims, out_dims, _avals(args)), args), list(out_dims)


@cached_by_program
def _pruned(closed, used):
    return pruned(closed, used)


def _program_prune(used, params):
    program, taken = _pruned(params["jaxpr"], tuple(used))
    return dict(params, jaxpr=program), taken


def _program_call(*avals, jaxpr):
    compiled = compiled_call(typed(jaxpr, avals))
    return compiled and Call(_launch.TARGET, compiled.attributes, compiled.scratch)


def kernel_program(closed):
    """The program that `run` makes a kernel of; None if there is none.

    Returns:
      (program, for each of its operands and for each of its results, the number that it has in the whole).
    """
    needed = _needed(closed)
    program = closed if needed.program is _ITSELF else needed.program
    if program is None or _is_empty(program):
        return None, (), ()
    places = {r: i for i, (kind, r) in reversed([*enumerate(needed.results)]) if kind == "program"}
    results = tuple(places[r] for r in range(len(places)))
    avals = [closed.in_avals[i] for i in needed.operands]
    return typed(program, avals), needed.operands, results


def compile_here(closed, device, operation=RowCall.operation):
    """What the launcher is told of a program on a device, under the schedule that was measured if there is one."""
    return compiled_row_call(
        closed, device, launcher.compile, functools.partial(tune.measured, device), operation
    )


@cached_by_program
def compiled_call(closed):
    """What the launcher is told of a program (`call.Call`); None where there is none, after a warning."""
    if _is_empty(closed):
        return None
    compiler = _lib.module("cuda")
    if not compiler.available:
        _warn_fallback(compiler.reason)
        return None
    try:
        return compile_here(closed, device_here())
    except (
        NotARowProgram
    ) as error:  # the user's function was looked at when it was called, derivatives were not
        _warn_fallback(str(error))
        return None


@functools.cache
def _warn_fallback(reason: str) -> None:
    warnings.warn(
        f"jaxnorm: a row program runs as plain XLA operations: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


row_program_p = define_compiled(
    "row_program",
    abstract=_program_abstract,
    formula=_program_formula,
    call=_program_call,
    sharding_rule=local.sharding_rule,
    partition=functools.partial(local.partition, run=run),
    identity=local.identity,
)
define_dce(row_program_p, _program_prune)
ad.primitive_jvps[row_program_p] = _program_jvp
ad.primitive_transposes[row_program_p] = _program_transpose
batching.primitive_batchers[row_program_p] = _program_batch

# ---- row_tangent ----


def _tangent_program(jaxpr, residuals):
    """What a tangent call computes: the transpose of backward."""
    linear = tuple(i >= residuals for i in range(len(jaxpr.in_avals)))
    try:
        return transposed_of(jaxpr, linear, (True,) * len(jaxpr.out_avals))
    except NotImplementedError as error:
        raise TypeError(
            "fuse: forward-mode derivatives need a backward rule that is linear in its cotangents, but one in this "
            f"function is not ({error}). Use jax.grad or jax.vjp, or write the rule with jax.custom_jvp."
        ) from None


def _tangent_formula(*operands, jaxpr, residuals):
    return run(_tangent_program(jaxpr, residuals), operands)


def _tangent_abstract(*avals, jaxpr, residuals):
    if all(map(same_place, jaxpr.in_avals[:residuals], avals)):
        return [a.to_tangent_aval() for a in jaxpr.in_avals[residuals:]]
    return list(typed(_tangent_program(jaxpr, residuals), avals).out_avals)


def _tangent_jvp(primals, tangents, *, jaxpr, residuals):
    varied = tuple(map(is_present, tangents))
    if any(varied[:residuals]):
        return _program_jvp(primals, tangents, jaxpr=_tangent_program(jaxpr, residuals))
    results = row_tangent_p.bind(*primals, jaxpr=jaxpr, residuals=residuals)
    cotangents = (True,) * len(results)
    program, kept, taken = narrowed_of(jaxpr, residuals, varied[residuals:], cotangents)
    if not any(taken):
        return results, list(map(zero, results))
    operands = [*_where(primals[:residuals], kept), *_where(tangents[residuals:], taken)]
    return results, row_tangent_p.bind(*_alike(operands), jaxpr=program, residuals=sum(kept))


def _tangent_transpose(cotangents, *operands, jaxpr, residuals):
    present = tuple(map(is_present, cotangents))
    known, linear = operands[:residuals], operands[residuals:]
    taken = (True,) * len(linear)
    if not all(present):
        jaxpr, kept, taken = narrowed_of(jaxpr, residuals, taken, present)
        known = _where(known, kept)
    gradients = iter(run(jaxpr, [*known, *_where(cotangents, present)]) if any(taken) else [])
    return [None] * residuals + [
        next(gradients) if t else ad.Zero(o.aval) for o, t in zip(linear, taken, strict=True)
    ]


def _tangent_batch(args, dims, *, jaxpr, residuals):
    size = mapped_size(args, dims)
    args, dims, at = _mapped(list(args), dims)
    dims = list(dims)
    for i in range(residuals, len(args)):
        if dims[i] is NOT_MAPPED:  # backward's gradients are all mapped
            args[i], dims[i] = jnp.broadcast_to(args[i], (size, *args[i].shape)), 0
    out_dims = [_axis_of(a, at) for a in jaxpr.in_avals[residuals:]]
    cotangents = []
    for aval, d in zip(jaxpr.in_avals[residuals:], out_dims, strict=True):
        shape, spec = (
            (*entries[:d], new, *entries[d:])
            for entries, new in ((aval.shape, size), (spec_of(aval), None))
        )
        cotangents.append(aval_like(aval, shape, spec=spec))
    backward = _batched(
        jaxpr,
        (*dims[:residuals], *out_dims),
        tuple(dims[residuals:]),
        (*_avals(args[:residuals]), *cotangents),
    )
    return row_tangent_p.bind(*_alike(args), jaxpr=backward, residuals=residuals), out_dims


def _tangent_prune(used, params):
    backward, residuals = params["jaxpr"], params["residuals"]
    program, kept, taken = narrowed_of(
        backward, residuals, (True,) * len(backward.out_avals), tuple(used)
    )
    return dict(jaxpr=program, residuals=sum(kept)), [*kept, *taken]


row_tangent_p = define_formula("row_tangent", abstract=_tangent_abstract, formula=_tangent_formula)
define_dce(row_tangent_p, _tangent_prune)
ad.primitive_jvps[row_tangent_p] = _tangent_jvp
ad.primitive_transposes[row_tangent_p] = _tangent_transpose
batching.primitive_batchers[row_tangent_p] = _tangent_batch
save.FOLLOWED[row_tangent_p.name] = lambda eqn: _tangent_program(**eqn.params)
