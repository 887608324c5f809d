"""Primitives, and what their calls are lowered to.

A primitive has one reference formula and, on some platforms, kernels behind an FFI target: one of its own on the CPU,
the launcher's on GPUs. Its lowering picks:

  ====================================================  =========================================
  platform without kernels, or implementation="xla"     the reference formula
  one device, or all mesh axes manual (shard_map)       the FFI call
  several devices (jit with shardings)                  `custom_partitioning` around the primitive, see `partition`
  some mesh axes manual; `jax.export` for several       the reference formula (XLA partitions it)
  ====================================================  =========================================
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax._src import dispatch  # private: see `_needs_devices`
from jax._src.interpreters.mlir import lower_per_platform  # private: see `lower_by_platform`
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.interpreters import partial_eval as pe

from jaxnorm import _lib
from jaxnorm._primitive.calls import Call, aliases_of, lower_call, results_apart
from jaxnorm._primitive.merge import Merge, merged_call, placeholders
from jaxnorm._primitive.partition import (
    ONE_DEVICE,
    PARTITION,
    Partition,
    partitioned_lowering,
    placement,
)

# What the primitives compute, by name: (*operands, **params) -> results.
FORMULAS: dict[str, Callable] = {}


def define_formula(
    name: str, *, abstract: Callable, formula: Callable, of_kernels: bool = False
) -> Primitive:
    """Builds a primitive that is the formula on every platform: XLA fuses it, rules of our own differentiate it.

    Args:
      name: stem of the primitive's name.
      abstract: (*avals, **params) -> list of result avals.
      formula: (*operands, **params) -> list of results.
      of_kernels: whether the formula binds primitives that devices may share.
    """
    FORMULAS[_lib.TARGET_PREFIX + name] = formula
    primitive = Primitive(_lib.TARGET_PREFIX + name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(formula, multiple_results=True))
    if of_kernels:
        _needs_devices(primitive)
    return primitive


def _needs_devices(primitive: Primitive) -> None:
    """Makes jit tell the devices while calls are lowered, which custom_partitioning needs.

    jit decides by looking for primitives in this set, and does not see through a lowering rule.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


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


def define_primitive(
    name: str,
    *,
    abstract: Callable,
    reference: Callable,
    attributes: Callable[..., dict],
    describe: Callable[..., str],
    sharding_rule: Callable[..., SdyShardingRule],
    partition: Callable[..., Partition],
    plan: Callable[..., Call | None],
    fits: Callable[..., bool] = lambda *avals, **params: True,
    kernel_form: Callable[..., Callable | None] = lambda bind, **params: None,
    in_place: Callable[..., tuple[int, int] | None] | None = None,
    merged: bool = False,
    merge: Merge | None = None,
) -> Primitive:
    """Builds the primitive `jaxnorm_<name>`, which has several results, from its parts.

    Every part takes the primitive's parameters as keywords; all have `implementation` (None, "kernel", "xla").

    Args:
      name: stem of the primitive's name, which is that of the CPU's FFI target.
      abstract: (*avals, **params) -> list of result avals.
      reference: (*operands, **params) -> list of results, in jax.numpy.
      attributes: (**params) -> attributes of the CPU's FFI call.
      describe: (number of operands, **params) -> the public function that binds this, for error messages.
      sharding_rule: (number of devices, operand_shapes, result_shapes, **params) -> which dimensions are the same.
      partition: (operands, results, **params) -> Partition, where both are lists of `_sharding.Tiled`.
      plan: (operation, operands' avals, results' avals, **params) -> the CUDA call, which the launcher compiles; None
        where there is none. `operation` is `name`, or what `merge` says. What computes operands that it skips is dead
        code then, unless something else uses it.
      fits: (*avals, platform, **params) -> whether the platform's kernels take such a call; they must not fail for what
        they cannot do.
      kernel_form: (the primitive's bind, **params) -> a function of the operands with the same results, by a call that
        kernels take; None if they take this one. It runs on a device's blocks.
      in_place: (platform, **params) -> positions of an operand and of the result that may take its memory, if there are
        such. The kernels must be right then; whether a call does so, `calls.aliases_of` decides.
      merged: whether a later call may do this one's work, too (that of another primitive with such a `merge`).
      merge: what an earlier call's work may be merged into this one's by.

    Returns:
      The primitive, without differentiation and batching rules.
    """
    primitive = define_formula(name, abstract=abstract, formula=reference)
    lower_formula = _formula_lowering(reference, describe)

    def refusal(ctx, params, platform):
        if params["implementation"] == "xla":
            return "implementation='xla'"
        module = _lib.module(platform)
        if not module.available:
            _lib.warn_fallback(platform, module.reason)
            return f"platform {platform} ({module.reason})"
        if not fits(*ctx.avals_in, platform=platform, **params):
            return "operands of this shape"
        return ""

    def lower_kernel(ctx, operands, params, platform):
        if form := kernel_form(primitive.bind, **params):
            return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)
        positions = in_place(platform=platform, **params) if in_place else None
        aliases = aliases_of(ctx, operands, positions)
        if platform == "cpu":
            call = Call(primitive.name, attributes(**params))
            return lower_call(ctx, operands, call, aliases)
        if merge and (results := merged_call(ctx, operands, params, merge, plan)):
            return results
        call = plan(name, ctx.avals_in, ctx.avals_out, **params)
        if call is None:
            return lower_formula(ctx, operands, params, "operands of this shape")
        results = lower_call(ctx, operands, call, aliases)
        return placeholders(results) if merged else results_apart(results, ctx.avals_out)

    _register(
        primitive,
        refusal=refusal,
        kernel=lower_kernel,
        partitioned=partitioned_lowering(primitive, sharding_rule, partition),
        formula=lower_formula,
        cacheable=in_place is None and merge is None and not merged,
    )
    return primitive


# Whether compiled calls are partitioned where they have no kernel, too. Tests without a GPU set it.
partition_everywhere = False


def define_compiled(
    name: str,
    *,
    abstract: Callable,
    formula: Callable,
    call: Callable[..., Call | None],
    sharding_rule: Callable[..., SdyShardingRule],
    partition: Callable[..., Partition],
    identity: Callable[[dict], str | None],
) -> Primitive:
    """Builds a primitive whose calls are compiled for GPUs, where they can be.

    Args:
      name: as in `define_formula`.
      abstract: as in `define_formula`.
      formula: as in `define_formula`.
      call: (*avals, **params) -> the FFI call; None where there is none.
      sharding_rule: as in `define_primitive`.
      partition: as in `define_primitive`.
      identity: parameters -> text that tells them from others in every process; None where XLA must partition the
        formula.

    Returns:
      The primitive, without differentiation and batching rules.
    """
    primitive = define_formula(name, abstract=abstract, formula=formula)
    lower_formula = mlir.lower_fun(formula, multiple_results=True)

    def lower_kernel(ctx, operands, params, platform):
        compiled = call(*ctx.avals_in, **params) if platform == "cuda" else None
        return compiled and results_apart(lower_call(ctx, operands, compiled), ctx.avals_out)

    _register(
        primitive,
        platforms=lambda: _lib.PLATFORMS if partition_everywhere else ("cuda",),
        refusal=lambda ctx, params, platform: "",
        kernel=lower_kernel,
        partitioned=partitioned_lowering(primitive, sharding_rule, partition, identity),
        formula=lambda ctx, operands, params, _: lower_formula(ctx, *operands, **params),
    )
    return primitive


def define_partitioned(
    name: str,
    *,
    abstract: Callable,
    formula: Callable,
    describe: Callable[..., str],
    sharding_rule: Callable[..., SdyShardingRule],
    partition: Callable[..., Partition],
) -> Primitive:
    """Builds a primitive that is a formula on each device, on its blocks of the operands.

    Args:
      name: as in `define_formula`.
      abstract: as in `define_formula`.
      formula: as in `define_formula`. Its kernels are those of the primitives that it binds.
      describe: as in `define_primitive`.
      sharding_rule: as in `define_primitive`.
      partition: as in `define_primitive`.

    Returns:
      The primitive, without differentiation and batching rules.
    """
    primitive = define_formula(name, abstract=abstract, formula=formula)
    lower = mlir.lower_fun(formula, multiple_results=True)

    def refusal(ctx, params, platform):
        if params["implementation"] == "kernel" and platform != "cuda":
            return f"platform {platform}"
        return ""

    _register(
        primitive,
        refusal=refusal,
        kernel=lambda ctx, operands, params, _: lower(ctx, *operands, **params),
        partitioned=partitioned_lowering(primitive, sharding_rule, partition),
        formula=_formula_lowering(formula, describe),
    )
    return primitive


def _formula_lowering(formula: Callable, describe: Callable[..., str]) -> Callable:
    """The lowering, (ctx, operands, params, why no kernel runs) -> results; an error where a kernel is asked for."""
    lower = mlir.lower_fun(formula, multiple_results=True)

    def lower_formula(ctx, operands, params, reason):
        if params["implementation"] == "kernel":
            raise ValueError(
                f"{describe(len(operands), **params)}: implementation must be None or 'xla' for {reason}, which has no "
                "kernel, got 'kernel'. Use implementation=None to fall back by itself."
            )
        return lower(ctx, *operands, **params)

    return lower_formula


def _register(
    primitive: Primitive,
    *,
    refusal: Callable,
    kernel: Callable,
    platforms: Callable[[], Sequence[str]] = lambda: _lib.PLATFORMS,
    partitioned: Callable,
    formula: Callable,
    cacheable: bool = True,
) -> None:
    """Registers how the calls of a primitive with kernels are lowered.

    Args:
      primitive: whose calls are lowered.
      refusal: (ctx, params, platform) -> why the platform has no kernel for a call; "" where it may have one.
      kernel: (ctx, operands, params, platform) -> results of a call on one device; None where it has no kernel.
      platforms: () -> where calls may have kernels.
      partitioned: (ctx, operands, params) -> results of a call that devices share; None where XLA must partition it.
      formula: (ctx, operands, params, why no kernel runs) -> results.
      cacheable: whether equal calls of a program may share one lowering.
    """

    def lower_on(platform, ctx, *operands, **params):
        reason = refusal(ctx, params, platform) or placement(ctx)
        results = None
        if reason == ONE_DEVICE:
            results = kernel(ctx, operands, params, platform)
        elif reason == PARTITION:
            results = partitioned(ctx, operands, params)
        return formula(ctx, operands, params, reason) if results is None else results

    def lower_elsewhere(ctx, *operands, **params):
        reason = f"platform {'/'.join(ctx.module_context.platforms)}"
        return formula(ctx, operands, params, reason)

    # A rule that JAX caches sees nothing of the program around the call. One that it does not cache, it cannot lower
    # for several platforms by itself (until 0.12 at least): it adds these avals, a tuple then, to a list.
    def lower_by_platform(ctx, *operands, **params):
        ctx = ctx.replace(avals_out=list(ctx.avals_out))
        lowerings = {p: functools.partial(lower_on, p) for p in platforms()}
        return lower_per_platform(
            ctx, primitive.name, lowerings, lower_elsewhere, set(), *operands, **params
        )

    mlir.register_lowering(primitive, lower_by_platform, cacheable=cacheable)
    _needs_devices(primitive)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to serialise jaxnorm's custom calls.

    JAX refuses to export custom calls it does not know. jaxnorm's target names and attributes are a versioned ABI,
    so a program exported today runs under later releases of the same major version.

    >>> import jax, jaxnorm, jax.numpy as jnp
    >>> exported = jax.export.export(jax.jit(jaxnorm.softmax), disabled_checks=jaxnorm.export_checks())(jnp.ones(4))
    >>> jax.export.deserialize(exported.serialize()).call(jnp.ones(4)).shape
    (4,)
    """
    names = sorted(set().union(*(_lib.module(p).targets for p in _lib.PLATFORMS)))
    return [jax.export.DisabledSafetyCheck.custom_call(_lib.TARGET_PREFIX + n) for n in names]
