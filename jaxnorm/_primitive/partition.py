"""Which devices share a call, how XLA learns that, and what each of them runs.

`custom_partitioning` has no differentiation or batching rules, so it appears only here, below both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.sharding_impls import GSPMDSharding  # private: see `_sharding_of`
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh
from jaxlib import xla_client  # see `_sharding_of`

from jaxnorm import _lib
from jaxnorm._sharding import DEVICES, Blocks, Tiled

# ---- what an operation says of its calls ----


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


# ---- lowering ----


# Where a call will run.
ONE_DEVICE = "one device"
PARTITION = "several devices"


def placement(ctx) -> str:
    """ONE_DEVICE, PARTITION, or the reason why only the formula can be lowered."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        if set(context.manual_axes) == set(context.mesh.axis_names):
            return ONE_DEVICE  # each device runs its own block
        # custom_partitioning below a partially manual shard_map aborts the process inside XLA.
        return "a shard_map with some axes manual"
    if not isinstance(context, mlir.ShardingContext) or context.num_devices == 1:
        return ONE_DEVICE
    if ctx.module_context.lowering_parameters.for_export:
        return "jax.export for several devices"  # the partitioner is a Python callback: it cannot be serialised
    if context.device_assignment is None:
        return "several devices that are not known yet"
    return PARTITION


def partitioned_lowering(
    primitive: Primitive,
    sharding_rule: Callable,
    partition: Callable,
    identity: Callable[[dict], str | None] = lambda params: str(sorted(params.items())),
) -> Callable:
    """The lowering, (ctx, operands, params) -> results, of calls that several devices share.

    Args:
      primitive: which they bind, on blocks too.
      sharding_rule: as in `define_primitive`.
      partition: as in `define_primitive`.
      identity: parameters -> text that tells them from others in every process. Where it is None, so are the results:
        XLA must partition the formula.
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
        known = identity(params) if operands else None
        if known is None:
            return None
        devices = ctx.module_context.axis_context.num_devices

        def call(*operands):
            # The partitioned call says nothing of itself but its shapes. Without this, two calls that differ in their
            # parameters alone would be one entry of the persistent compilation cache.
            with set_xla_metadata(jaxnorm=f"{primitive.name} {_lib.VERSION} {known}"):
                return partitioned((devices, tuple(sorted(params.items()))), *operands)

        return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)

    return lower


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
