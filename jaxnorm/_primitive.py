"""How an operation becomes a JAX primitive; the only home of `jax.interpreters` and `jax._src`.

A primitive has one reference formula and, on platforms whose module is loaded, one FFI target. Its lowering picks:

  ====================================================  =========================================
  platform without kernels, or implementation="xla"     the reference formula
  one device, or all mesh axes manual (shard_map)       the FFI call
  several devices (jit with shardings)                  `custom_partitioning` around the primitive, see `_sharding`
  some mesh axes manual; `jax.export` for several       the reference formula (XLA partitions it)
  ====================================================  =========================================

`custom_partitioning` has no differentiation or batching rules, so it appears only here, below both.
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import (
    config,  # private: see `trace_context`
    dispatch,  # private: see the last line of `define_primitive`
    source_info_util,  # private: see `run_equation`
)
from jax._src.interpreters.mlir import lower_per_platform  # private: see `lower_by_platform`
from jax._src.sharding_impls import GSPMDSharding  # private: see `_sharding_of`
from jax._src.util import weakref_lru_cache  # private: see `cached_by_program`
from jax.core import ShapedArray, eval_jaxpr
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir, xla
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxlib import xla_client  # see `_sharding_of`

from jaxnorm import _launch, _lib
from jaxnorm._sharding import DEVICES, Blocks, Tiled

NOT_MAPPED = None  # what a batching rule gets for an operand without a mapped axis

# Dimensions of unlike broadcasting that an operand may have (ffi/call.h: kMaxBroadcastDims).
_MAX_BROADCAST_DIMS = 8

Spec = tuple  # one entry per dimension: None, an axis name, or a tuple of axis names


# ---- abstract values ----


def aval_like(x, shape=None, dtype=None, spec=None):
    """The abstract value of a result that lives where x does.

    Unlike a new ShapedArray, `update` keeps x's mesh, memory space and varying manual axes; without the last,
    shard_map(check_vma=True) would return wrong values silently. `spec` is needed where the rank or a sharded
    dimension changes.
    """
    changes = {"sharding": x.sharding.update(spec=PartitionSpec(*spec))} if spec is not None else {}
    return x.update(
        shape=x.shape if shape is None else shape,
        dtype=x.dtype if dtype is None else np.dtype(dtype),
        weak_type=False,
        **changes,
    )


def spec_of(aval) -> Spec:
    """Sharding of an abstract value, one entry per dimension."""
    entries = tuple(aval.sharding.spec)
    return entries + (None,) * (aval.ndim - len(entries))


def broadcast_aval(*avals):
    """The abstract value of the array that all operands broadcast to, of the first one's dtype."""
    x = avals[0]
    shape = jnp.broadcast_shapes(*(a.shape for a in avals))
    if shape == x.shape:
        return aval_like(x)
    specs = zip(*map(spec_of, avals), strict=True)
    spec = [next((s for s in entries if s is not None), None) for entries in specs]
    return aval_like(x, shape=shape, spec=spec)


def collapsed_aval(aval, dims, dtype):
    """`aval` with size 1 in `dims`, of another dtype."""

    def at(entries, value):
        return tuple(value if i in dims else e for i, e in enumerate(entries))

    return aval_like(aval, at(aval.shape, 1), dtype, at(spec_of(aval), None))


def axis_names(entry) -> tuple:
    """The mesh axes of one entry of a Spec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def varying_axes(aval) -> frozenset:
    """The manual axes along which an array differs."""
    return aval.mat.varying


def vary_alike(*args):
    """Casts operands to one set of varying manual axes, as `jax.lax` operations do before they bind."""
    varying = [varying_axes(jax.typeof(a)) for a in args]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(union - v), to="varying") if union - v else a
        for a, v in zip(args, varying, strict=True)
    ]


def vary_as(array, aval):
    """`array`, cast to vary along the manual axes along which `aval` does."""
    return vary_along(array, varying_axes(aval))


def vary_along(array, axes):
    """`array`, cast to vary along these manual axes of a shard_map, too."""
    missing = frozenset(axes) - varying_axes(jax.typeof(array))
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array


def sum_to(value, aval):
    """The transpose of broadcasting an array of `aval`: the sum over what is broadcast, where that array lives."""
    broadcast = [i for i, n in enumerate(aval.shape) if n != value.shape[i]]
    value = jnp.sum(value, broadcast, keepdims=True) if broadcast else value
    # On an Explicit mesh, the cotangent of an array that all devices have is made in parts where x is cut.
    alike = spec_of(jax.typeof(value)) == spec_of(aval)
    return value if alike else jax.sharding.reshard(value, aval.sharding)


def sharding_factors(operands, results, sizes=None) -> SdyShardingRule:
    """The Shardy rule for calls whose dimensions are named: equal names are cut alike.

    Args:
      operands: the names of each operand's dimensions.
      results: the names of each result's dimensions.
      sizes: sizes of the factors that occur in compound names only.
    """
    mappings = [tuple(ArrayMapping(*names) for names in group) for group in (operands, results)]
    return SdyShardingRule(mappings[0], mappings[1], **(sizes or {}))  # pyright: ignore[reportArgumentType]


def broadcast_sharding_rule(_, operand_shapes, result_shapes, **__) -> SdyShardingRule:
    """The `sharding_rule` of calls whose operands and results broadcast against each other."""
    full = jnp.broadcast_shapes(*operand_shapes, *result_shapes)

    def factors(k, shape):
        # A broadcast or reduced dimension gets a factor of its own: nothing follows from how it is sharded.
        return tuple(f"d{i}" if n == full[i] else f"{k}_{i}" for i, n in enumerate(shape))

    return sharding_factors(
        [factors(f"o{k}", shape) for k, shape in enumerate(operand_shapes)],
        [factors(f"r{k}", shape) for k, shape in enumerate(result_shapes)],
    )


def joint_spec(full, specs, shapes) -> Spec:
    """How the array that all of these broadcast to is cut: as the first of its shape, or else as any of them is."""
    whole = (s for s, shape in zip(specs, shapes, strict=True) if tuple(shape) == tuple(full))
    entries = zip(*specs, strict=True)
    return next(whole, None) or tuple(
        next((e for e in es if e is not None), None) for es in entries
    )


def cotangent_aval(aval):
    """The abstract value of the cotangent of a floating-point array."""
    return aval.to_tangent_aval().to_ct_aval()


def same_place(a, b) -> bool:
    """Whether two abstract values differ in nothing but being weakly typed."""
    return a.update(weak_type=False) == b.update(weak_type=False)


def acc_dtype(dtype):
    """What values of `dtype` are summed in (not promote_types, which strict promotion refuses)."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def pinned(value):
    """`value` rounded to a bit less than its dtype has, so that it is the same number wherever it is used.

    Compilers compute what is cheap again for each use, and contract its last product with the use's first sum, which
    leaves out a rounding. They cannot leave out this one.
    """
    info = jnp.finfo(value.dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant - 1)


# ---- what the kernels take ----


def broadcast_fits(operand, full, axes) -> bool:
    """Whether an operand's broadcast pattern has few enough runs of alike dimensions (kMaxBroadcastDims in call.h).

    `axes` are those of a row, which do not count.
    """
    dims = [
        n == m
        for i, (n, m) in enumerate(zip(operand, full, strict=True))
        if i not in axes and m != 1
    ]
    return 1 + sum(a != b for a, b in itertools.pairwise(dims)) < _MAX_BROADCAST_DIMS


def split_scratch(aval, axes, whole=2**15) -> int:
    """Float32 elements for the partial results of rows that the CUDA kernels split (ffi/cuda/rows.cuh).

    Rows of `whole` bytes are never split. Chunks are 16 KiB of each input at least and a partial takes 16 bytes, in few
    cases 64. Room for 4096 lets several rows be worked on together, and is all that a row of unknown length gets.
    """
    sizes = [aval.shape[i] for i in axes]
    known = all(isinstance(n, int) for n in sizes)
    row_bytes = math.prod(n for n in sizes if isinstance(n, int)) * aval.dtype.itemsize
    if known and row_bytes <= whole:
        return 0
    return 4 * max(4096, row_bytes // 2**14 + 2)


# ---- definition ----

_PACKAGE = str(pathlib.Path(__file__).parent) + os.sep
# What the primitives compute, by name: (*operands, **params) -> results.
FORMULAS: dict[str, Callable] = {}


def define_formula(name: str, *, abstract: Callable, formula: Callable) -> Primitive:
    """Builds a primitive that is the formula on every platform: XLA fuses it, rules of our own differentiate it."""
    FORMULAS[_lib.TARGET_PREFIX + name] = formula
    primitive = Primitive(_lib.TARGET_PREFIX + name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(formula, multiple_results=True))
    return primitive


def define_dce(primitive: Primitive, prune: Callable) -> None:
    """Drops work for results that nobody uses.

    Args:
      primitive: whose calls are pruned.
      prune: (which results are used, parameters) -> (parameters, which operands the smaller call takes), or None where
        no call is smaller.
    """

    def rule(used, *rest):  # (used, eqn) before JAX 0.12, (used, live_ins, eqn) from then on
        eqn = rest[-1]
        if not any(used):
            return [False] * len(eqn.invars), None
        smaller = None if all(used) else prune(used, eqn.params)
        if smaller is None:
            return [True] * len(eqn.invars), eqn
        params, taken = smaller
        invars = [v for v, t in zip(eqn.invars, taken, strict=True) if t]
        outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
        return taken, eqn.replace(invars=invars, outvars=outvars, params=params)

    pe.dce_rules[primitive] = rule


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a call is split over devices.

    Attributes:
      operands: the tiles (`_sharding.Tiled`) of each operand.
      results: those of each result.
      local: the function that each device runs on its blocks; None when it is the primitive itself.
    """

    operands: Sequence[np.ndarray]
    results: Sequence[np.ndarray]
    local: Callable | None = None


def broadcast_partition(local: Callable) -> Callable:
    """The `partition` of calls whose operands and results broadcast against each other: rows stay where they are.

    Args:
      local: (Blocks, operand shapes, **params) -> what a device runs; None when it is the primitive itself.
    """

    def partition(operands: Sequence[Tiled], results: Sequence[Tiled], /, **params) -> Partition:
        full = jnp.broadcast_shapes(*(a.shape for a in operands))
        blocks = Blocks.joint(full, operands)
        return Partition(
            [blocks.tiles_of(a.shape) for a in operands],
            [blocks.tiles_of(a.shape) for a in results],
            local(blocks, [a.shape for a in operands], **params),
        )

    return partition


@dataclasses.dataclass(frozen=True)
class Merge:
    """A planned CUDA call that does the work of two, the second of which takes results of the first.

    The primitives have the parameters `names` and `results`: of their operands and results, in an order that all calls
    have.

    Attributes:
      first: the operation of the first call, whose primitive's `merged` is true.
      both: the operation that does both.
      passed: the first call's results, which must all be operands of the second.
      shared: names that the first call's operands have in the second one. Both must have the same of them.
      order: of all names.
      fits: (*avals, **params) -> whether the call does what such a second call asks for, and is worth it.
    """

    first: str
    both: str
    passed: tuple[str, ...]
    shared: tuple[str, ...]
    order: tuple[str, ...]
    fits: Callable[..., bool]


def define_primitive(
    name: str,
    *,
    abstract: Callable,
    reference: Callable,
    attributes: Callable[..., dict],
    describe: Callable[..., str],
    sharding_rule: Callable[..., SdyShardingRule],
    partition: Callable[..., Partition],
    fits: Callable[..., bool] = lambda *avals, **params: True,
    kernel_form: Callable[..., Callable | None] = lambda bind, **params: None,
    scratch: Callable[..., int] | None = None,
    plan: Callable[..., Any] | None = None,
    not_on_cuda: tuple[int, ...] = (),
    in_place: Callable[..., tuple[int, int] | None] | None = None,
    merged: bool = False,
    merge: Merge | None = None,
) -> Primitive:
    """Builds the primitive `jaxnorm_<name>`, which has several results, from its parts.

    Every part takes the primitive's parameters as keywords; all have `implementation` (None, "kernel", "xla").

    Args:
      name: stem of the primitive's and of the FFI target's name.
      abstract: (*avals, **params) -> list of result avals.
      reference: (*operands, **params) -> list of results, in jax.numpy.
      attributes: (**params) -> attributes of the FFI call.
      describe: (number of operands, **params) -> the public function that binds this, for error messages.
      sharding_rule: (number of devices, operand_shapes, result_shapes, **params) -> which dimensions are the same.
      partition: (operands, results, **params) -> Partition, where both are lists of `_sharding.Tiled`.
      fits: (*avals, platform, **params) -> whether the platform's kernels take such a call; they must not fail for what
        they cannot do.
      kernel_form: (the primitive's bind, **params) -> a function of the operands with the same results, by a call that
        kernels take; None if they take this one. It runs on a device's blocks.
      scratch: (*avals, **params) -> number of float32 elements of device scratch that the CUDA call takes as an
        additional result.
      plan: (operation, operands' avals, results' avals, **params) -> the plan of the CUDA call (`_kernels.plan.Plan`),
        None where there is none. `operation` is `name`, or what `merge` says. Without `plan` the CUDA call is an FFI
        target of its own.
      not_on_cuda: positions of operands that the CUDA call does not take, because its kernel computes them again.
        What computes them otherwise is dead code then, unless something else uses it.
      in_place: (platform, **params) -> positions of an operand and of the result that may take its memory, if there are
        such. The kernels must be right then; whether a call does so, `_dies_here` decides.
      merged: whether a later call may do this one's work, too (that of another primitive with such a `merge`).
      merge: what an earlier call's work may be merged into this one's by.

    Returns:
      The primitive, without differentiation and batching rules.
    """
    primitive = define_formula(name, abstract=abstract, formula=reference)
    target = primitive.name
    lower_reference = mlir.lower_fun(reference, multiple_results=True)

    lower_partitioned = _partitioned(primitive, sharding_rule, partition)

    def lower_default(ctx, *operands, **params):
        return _formula(ctx, operands, params, f"platform {'/'.join(ctx.module_context.platforms)}")

    def _formula(ctx, operands, params, where):
        if params["implementation"] == "kernel":
            raise ValueError(
                f"{describe(len(operands), **params)}: implementation must be None or 'xla' for {where}, which has no "
                "kernel, got 'kernel'. Use implementation=None to fall back by itself."
            )
        return lower_reference(ctx, *operands, **params)

    def lower_kernel(platform, ctx, *operands, **params):
        if params["implementation"] == "xla":
            return lower_reference(ctx, *operands, **params)
        planned = plan is not None and platform == "cuda"
        module = _lib.row_programs() if planned else _lib.module(platform)
        if not module.targets & {name, "launch"}:
            _lib.warn_fallback(platform, module.reason)
            reason = module.reason or f"built without {name}"
            return _formula(ctx, operands, params, f"platform {platform} ({reason})")
        if not fits(*ctx.avals_in, platform=platform, **params):
            return _formula(ctx, operands, params, "operands of this shape")
        match _placement(ctx):
            case "one device":
                if form := kernel_form(primitive.bind, **params):
                    return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)
                if plan is not None and platform == "cuda":
                    results = _planned_call(name, plan, merge, ctx, operands, params)
                    results = _placeholders(results) if results and merged else results
                else:
                    results = _ffi_call(ctx, operands, params, platform)
                return results or _formula(ctx, operands, params, "operands of this shape")
            case "partition":
                return lower_partitioned(ctx, operands, params)
            case reason:
                return _formula(ctx, operands, params, reason)

    def _ffi_call(ctx, operands, params, platform):
        extra = scratch(*ctx.avals_in, **params) if scratch and platform == "cuda" else None
        aliases = {}
        if in_place and (positions := in_place(platform=platform, **params)):
            operand, result = positions
            alike = _layout(ctx.avals_in[operand]) == _layout(ctx.avals_out[result])
            aliases = {operand: result} if alike and _dies_here(operands[operand]) else {}
        if platform == "cuda" and not_on_cuda:
            taken = [i for i in range(len(operands)) if i not in not_on_cuda]
            ctx = ctx.replace(avals_in=[ctx.avals_in[i] for i in taken])
            operands = [operands[i] for i in taken]
        return _call(target, ctx, operands, attributes(**params), extra, aliases)

    lowerings = {p: functools.partial(lower_kernel, p) for p in _lib.PLATFORMS}

    # A rule that JAX caches sees nothing of the program around the call. One that it does not cache, it cannot lower
    # for several platforms by itself (until 0.12 at least): it adds these avals, a tuple then, to a list.
    def lower_by_platform(ctx, *operands, **params):
        ctx = ctx.replace(avals_out=list(ctx.avals_out))
        return lower_per_platform(ctx, target, lowerings, lower_default, set(), *operands, **params)

    alone = in_place is None and merge is None and not merged
    mlir.register_lowering(primitive, lower_by_platform, cacheable=alone)
    # custom_partitioning needs the devices while its call is lowered. jit decides by looking for primitives in this
    # set, and does not see through a lowering rule.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def _partitioned(
    primitive: Primitive,
    sharding_rule: Callable,
    partition: Callable,
    identity: Callable[[dict], str] = lambda params: str(sorted(params.items())),
) -> Callable:
    """The lowering, (ctx, operands, params) -> results, of calls that several devices share.

    Args:
      primitive: which they bind, on blocks too.
      sharding_rule: as in `define_primitive`.
      partition: as in `define_primitive`.
      identity: parameters -> text that tells them from others in every process.
    """

    # The number of devices and the parameters are the first, static argument: the number of operands varies.
    def bind(static, *operands):
        return primitive.bind(*operands, **dict(static[1]))

    def partition_call(static, _, operand_infos, result_infos):
        _, params = static
        operands, results = (
            [Tiled(info.shape, _tiles(info)) for info in infos]
            for infos in (operand_infos, result_infos)
        )
        plan = partition(operands, results, **dict(params))
        local = plan.local or functools.partial(primitive.bind, **dict(params))

        def per_device(*blocks):
            # Traced while XLA compiles, under whatever jax.set_mesh is then active; with Explicit axes, jax.numpy
            # would emit sharding annotations into a module that is partitioned already.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return list(local(*blocks))

        devices = operand_infos[0].sharding._device_assignment
        return (
            Mesh(np.array(devices), (DEVICES,)),
            per_device,
            [_sharding_of(tiles, devices) for tiles in plan.results],
            tuple(_sharding_of(tiles, devices) for tiles in plan.operands),
        )

    def rule(static, _, operand_types, result_types):
        devices, params = static
        shapes = [[tuple(t.shape) for t in types] for types in (operand_types, result_types)]
        return sharding_rule(devices, *shapes, **dict(params))

    partitioned = custom_partitioning(bind, static_argnums=(0,))
    # Shardings come as XLA has them: it may cut an axis of the mesh in parts, which no axis of the mesh names.
    partitioned.def_partition(partition=partition_call, sharding_rule=rule, decode_shardings=False)

    def lower(ctx, operands, params):
        devices = ctx.module_context.axis_context.num_devices

        def call(*operands):
            # The partitioned call says nothing of itself but its shapes. Without this, two calls that differ in their
            # parameters alone would be one entry of the persistent compilation cache.
            with set_xla_metadata(jaxnorm=f"{primitive.name} {_lib.VERSION} {identity(params)}"):
                return partitioned((devices, tuple(sorted(params.items()))), *operands)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    return lower


# Whether compiled calls are partitioned where they have no kernel, too. Tests without a GPU set it.
partition_everywhere = False


def define_compiled(
    primitive: Primitive,
    *,
    formula: Callable,
    target: str,
    call: Callable,
    sharding_rule: Callable[..., SdyShardingRule],
    partition: Callable[..., Partition],
    identity: Callable[[dict], str | None],
) -> None:
    """Makes the calls of a formula's primitive FFI calls on GPUs, where they can be.

    Args:
      primitive: made by `define_formula`.
      formula: what it was made of.
      target: the FFI target, with its prefix.
      call: (*avals, **params) -> (attributes of the FFI call, shapes of float32 scratch behind the results), or None
        where there is none.
      sharding_rule: as in `define_primitive`.
      partition: as in `define_primitive`.
      identity: parameters -> text that tells them from others in every process; None where XLA must partition the
        formula.
    """
    lower_formula = mlir.lower_fun(formula, multiple_results=True)
    lower_known = _partitioned(primitive, sharding_rule, partition, lambda p: str(identity(p)))

    def lower_partitioned(ctx, operands, params):
        if operands and identity(params) is not None:
            return lower_known(ctx, operands, params)
        return lower_formula(ctx, *operands, **params)

    def lower_on_one_device(ctx, operands, params):
        compiled = call(*ctx.avals_in, **params)
        if compiled is None:
            return lower_formula(ctx, *operands, **params)
        attributes, scratch = compiled
        memory = [ShapedArray(shape, np.float32) for shape in scratch]
        results = len(ctx.avals_out)
        ctx = ctx.replace(avals_out=[*ctx.avals_out, *memory])
        return jax.ffi.ffi_lowering(target)(ctx, *operands, **attributes)[:results]

    def lower_cuda(ctx, *operands, **params):
        match _placement(ctx):
            case "one device":
                return lower_on_one_device(ctx, operands, params)
            case "partition":
                return lower_partitioned(ctx, operands, params)
            case _:
                return lower_formula(ctx, *operands, **params)

    def lower_elsewhere(ctx, *operands, **params):
        if partition_everywhere and _placement(ctx) == "partition":
            return lower_partitioned(ctx, operands, params)
        return lower_formula(ctx, *operands, **params)

    mlir.register_lowering(primitive, lower_elsewhere)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    dispatch.prim_requires_devices_during_lowering.add(primitive)


_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")


def _dies_here(value) -> bool:
    """Whether nothing but this call will read an operand, as far as a lowering rule can know.

    XLA takes an operand's memory for a result only where it is told to, and copies what is read again. What is lowered
    later is not known here. But the cotangent that a product's transpose makes is the product's own: it goes to the
    operation whose result was multiplied, and nowhere else. (That of a sum is one array for all its terms.)
    """
    name = getattr(value.owner, "name", "")  # an argument belongs to a block, which has none
    return name in _PRODUCTS and not list(value.uses)


def _call(target, ctx, operands, attributes, scratch, aliases=None):
    """Results of an FFI call, which may have so many float32 elements of scratch memory as one more result."""
    if scratch is not None:
        memory = ShapedArray((scratch,), np.float32)
        ctx = ctx.replace(avals_out=[*ctx.avals_out, memory])
    lower = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases or {})
    results = lower(ctx, *operands, **attributes)
    return results if scratch is None else results[:-1]


def _planned_call(operation, plan, merge, ctx, operands, params):
    """Results of a planned call, or of one that does an earlier one's work too; None where there is no plan."""
    if merge and (results := _merged_call(ctx, operands, params, merge, plan)):
        return results
    made = plan(operation, ctx.avals_in, ctx.avals_out, **params)
    return made and _call(_launch.TARGET, ctx, operands, made.attributes, made.scratch)


def _placeholders(values):
    """What later code refers to instead of the results of a call, so that another call can take its place."""
    return [stablehlo.ReshapeOp(v.type, v).result for v in values]


def _merged_call(ctx, operands, params, merge, plan):
    """Results of a call that does the work of an earlier one too and replaces it; None where there is none such.

    Primitives are lowered one by one, and a collective may come between the two calls. So only the second one
    knows that the first one's results came to it as they were.
    """
    given = dict(zip(params["names"], operands, strict=True))
    if not given.keys() >= {*merge.passed} or not merge.fits(*ctx.avals_in, **params):
        return None
    shared = [given[n] for n in merge.shared if n in given]
    first = _call_behind([given[n] for n in merge.passed], merge.first)
    if first is None or list(first.operands) != shared:
        return None
    names = tuple(n for n in params["names"] if n not in merge.passed)
    results = tuple(n for n in merge.order if n in (*merge.passed, *params["results"]))
    both = dict(params, names=names, results=results)
    avals = dict(zip(params["names"], ctx.avals_in, strict=True))
    avals |= zip(params["results"], ctx.avals_out, strict=True)
    avals_in = [avals[n] for n in names]
    avals_out = [avals[n] for n in results]
    made = plan(merge.both, avals_in, avals_out, **both)
    if made is None:
        return None
    ctx = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    given_both = [given[n] for n in names]
    values = _call(_launch.TARGET, ctx, given_both, made.attributes, made.scratch)
    of: dict[str, Any] = dict(zip(results, values, strict=True))
    for name in merge.passed:
        holder = given[name].owner.operation
        holder.operands[0] = of[name]
        holder.move_after(of[name].owner.operation)
    first.operation.erase()
    return [of[n] for n in params["results"]]


def _call_behind(values, operation):
    """The planned call of which these are all results but for its scratch, if nothing has used them yet."""
    holders = [v.owner for v in values]  # an argument belongs to a block, which has no name
    if any(getattr(h, "name", "") != "stablehlo.reshape" for h in holders):
        return None
    behind = [h.operands[0] for h in holders]
    call = behind[0].owner
    if getattr(call, "name", "") != "stablehlo.custom_call":
        return None
    if ir.StringAttr(call.attributes["call_target_name"]).value != _launch.TARGET:
        return None
    if (
        ir.StringAttr(ir.DictAttr(call.attributes["mhlo.backend_config"])["operation"]).value
        != operation
    ):
        return None
    # The same block: what is moved behind a call within a loop's body could not be used after the loop.
    current: Any = ir.InsertionPoint.current
    here = call.operation.block == current.block
    unused = not any(list(v.uses) for v in values)
    return call if here and unused and behind == list(call.results)[:-1] else None


def _layout(aval):
    return aval.shape, aval.dtype


def _placement(ctx) -> str:
    """Where this call will run: "one device", "partition", or the reason why only the formula can be lowered."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        if set(context.manual_axes) == set(context.mesh.axis_names):
            return "one device"  # each device runs its own block
        # custom_partitioning below a partially manual shard_map aborts the process inside XLA.
        return "a shard_map with some axes manual"
    if not isinstance(context, mlir.ShardingContext) or context.num_devices == 1:
        return "one device"
    if ctx.module_context.lowering_parameters.for_export:
        return "jax.export for several devices"  # the partitioner is a Python callback: it cannot be serialised
    if context.device_assignment is None:
        return "several devices that are not known yet"
    return "partition"


def _tiles(info) -> np.ndarray:
    """The devices of a sharding as `_sharding.Tiled` has them; an array that is not tiled is whole everywhere."""
    sharding = info.sharding._to_xla_hlo_sharding(len(info.shape))
    devices = len(info.sharding.device_set)
    if not sharding.is_tiled():
        return np.arange(devices).reshape(*(1 for _ in info.shape), devices)
    counts = sharding.tile_assignment_dimensions()[: len(info.shape)]
    return np.array(sharding.tile_assignment_devices()).reshape(*counts, -1)


def _sharding_of(tiles: np.ndarray, devices) -> GSPMDSharding:
    """The inverse of `_tiles`: the sharding of an array with these tiles, over the devices of the program."""
    if tiles.shape[-1] == tiles.size:
        return GSPMDSharding(devices, xla_client.HloSharding.replicate())
    copies = xla_client.OpSharding.Type.REPLICATED
    tiled = xla_client.HloSharding.subgroup_with_device_ordering(tiles, subgroup_types=[copies])
    return GSPMDSharding(devices, tiled)


def mesh_size(mesh: Mesh | AbstractMesh, entry) -> int:
    """Number of blocks that a dimension with this entry of a Spec is cut into."""
    return int(np.prod([mesh.shape[name] for name in axis_names(entry)], dtype=np.int64))


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to serialise jaxnorm's custom calls.

    JAX refuses to export custom calls it does not know. jaxnorm's target names and attributes are a versioned ABI,
    so a program exported today runs under later releases of the same major version.

    >>> import jax, jaxnorm, jax.numpy as jnp
    >>> exported = jax.export.export(jax.jit(jaxnorm.softmax), disabled_checks=jaxnorm.export_checks())(jnp.ones(4))
    >>> jax.export.deserialize(exported.serialize()).call(jnp.ones(4)).shape
    (4,)
    """
    targets = (*(_lib.module(p) for p in _lib.PLATFORMS), _lib.row_programs())
    names = sorted(set().union(*(m.targets for m in targets)))
    return [jax.export.DisabledSafetyCheck.custom_call(_lib.TARGET_PREFIX + n) for n in names]


# ---- programs ----

# Caches a function of a program, which is told from others by identity, under the settings that JAX traces with.
cached_by_program = weakref_lru_cache


def trace_context():
    """The settings that JAX traces with, to be part of a key."""
    return config.trace_context()


def closed_of(function: Callable, avals: Sequence):
    """(closed jaxpr without constants of a function of arrays, arrays that it takes behind its operands)."""
    closed = jax.make_jaxpr(function)(*avals)
    jaxpr, consts = open_jaxpr(closed)
    if not consts:
        return closed, []
    n = len(avals)

    def with_operands(*args):
        return eval_jaxpr(jaxpr, list(args[n:]), *args[:n])

    return jax.make_jaxpr(with_operands)(*avals, *(v.aval for v in jaxpr.constvars)), consts


def run_program(closed, *operands) -> list:
    """Results of a closed jaxpr."""
    jaxpr, consts = open_jaxpr(closed)
    return eval_jaxpr(jaxpr, consts, *operands)


def pruned(closed, used: Sequence[bool]):
    """(the program of some of the results without dead code, which operands it takes)."""
    jaxpr, consts = open_jaxpr(closed)
    assert not consts
    jaxpr, taken = pe.dce_jaxpr(jaxpr, list(used))
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, []), taken


def struct_of(aval) -> jax.ShapeDtypeStruct:
    """What stands for an array where a part of a program is traced again; on an Explicit mesh it is sharded alike."""
    explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    sharding = aval.sharding if explicit else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def open_jaxpr(jaxpr):
    """(jaxpr, values of its constvars) of an open or a closed one; from JAX 0.12 on there is one kind."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def run_equation(eqn, operands, params) -> list:
    """Results of an equation under other parameters, with the names and the settings that it was traced with."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context = source_info_util.user_context(eqn.source_info.traceback, name_stack=names)
    with context, eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(results) if eqn.primitive.multiple_results else [results]


def with_forward(thunk, change: Callable):
    """The forward rule of a custom_vjp call, with its jaxpr changed once that is known."""

    def forward(*nonzeros):
        jaxpr, consts = thunk.call_wrapped(*nonzeros)
        # From JAX 0.12 on the jaxpr may have its consts, or take them as its first arguments.
        variables = [*jaxpr.constvars, *jaxpr.invars][len(consts) :]
        closed = jax.make_jaxpr(functools.partial(eval_jaxpr, jaxpr, consts))(
            *(v.aval for v in variables)
        )
        return open_jaxpr(change(closed))

    return linear_util.wrap_init(forward, debug_info=thunk.debug_info)


def source_line(eqn) -> str:
    """File and line of the user's code that an equation comes from; "" if nothing but jaxnorm's code is known."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    frame = next((f for f in frames if not f.file_name.startswith(_PACKAGE)), None)
    if frame is None:
        return ""
    column = f":{frame.start_column}" if frame.start_column else ""
    return f"{frame.file_name}:{frame.start_line}{column} ({frame.function_name})"


def without_dead_code(closed):
    """The same program without equations whose results nothing uses, in calls, loops and branches too."""
    jaxpr, consts = open_jaxpr(closed)
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    return ClosedJaxpr(jaxpr, consts) if hasattr(closed, "jaxpr") else jaxpr
