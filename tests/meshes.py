"""What sharding is tested on: eight CPU devices and, on a machine that has them, two GPUs."""

import contextlib
import math
from collections.abc import Iterable, Sequence

import hlo
import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm

CPUS = jax.devices("cpu")
GPUS = [d for d in jax.devices() if d.platform == "gpu"]
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def _meshes(kind: str) -> list[Mesh]:
    """Axes d and m: of four and two CPU devices; of two GPUs there is one of them at a time."""

    def mesh(sizes: dict[str, int], devices):
        types = (KINDS[kind],) * len(sizes)
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)

    gpus = [mesh({axis: 2}, GPUS[:2]) for axis in "dm"] if len(GPUS) >= 2 else []
    return [mesh({"d": 4, "m": 2}, CPUS[:8]), *gpus]


MESHES = {kind: _meshes(kind) for kind in KINDS}
AUTO, EXPLICIT = (MESHES[kind][0] for kind in KINDS)


def _on(mesh: Mesh, specs: Iterable[P]) -> list[P]:
    """Those specs whose axes the mesh has."""
    return [s for s in specs if {n for e in s for n in names_of(e)} <= set(mesh.axis_names)]


def over(specs: Sequence[P], kinds: Sequence[str] = tuple(KINDS)):
    """Parametrises a test with `mesh` and `spec`: every spec on every mesh that has its axes."""
    return pytest.mark.parametrize(
        ("mesh", "spec"),
        [
            pytest.param(mesh, spec, id=f"{platform_of(mesh)} {kind} {spec}")
            for kind in kinds
            for mesh in MESHES[kind]
            for spec in _on(mesh, specs)
        ],
    )


def over_pairs(name: str, values: Iterable, specs: Sequence[P]):
    """Parametrises a test with `mesh`, `spec` and `name`, so that any two of kind of axes, spec and value meet.

    Auto and Explicit axes take turns on the CPU devices, from pair to pair. On GPUs both kinds have all pairs.
    """
    return pytest.mark.parametrize(
        ("mesh", "spec", name),
        [
            pytest.param(mesh, spec, value, id=f"{platform_of(mesh)} {kind} {spec}-{value}")
            for turn, kind in enumerate(KINDS)
            for mesh in MESHES[kind]
            for number, value in enumerate(values)
            for spec in _on(mesh, specs)
            if platform_of(mesh) == "gpu" or (number + specs.index(spec)) % 2 == turn
        ],
    )


def names_of(entry) -> tuple[str, ...]:
    """The mesh axes that an entry of a spec names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def platform_of(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def has_kernels(mesh: Mesh) -> bool:
    """Whether there are kernels for the mesh's devices."""
    platform = {"gpu": "cuda"}.get(platform_of(mesh), platform_of(mesh))
    return next(m.available for m in jaxnorm.status().modules if m.platform == platform)


def put(x, spec: P, mesh: Mesh):
    return jax.device_put(x, NamedSharding(mesh, spec))


def scope(mesh: Mesh):
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def blocks(mesh: Mesh, entry) -> int:
    """In how many blocks an entry of a spec cuts an axis."""
    return math.prod(mesh.shape[name] for name in names_of(entry))


def assert_only_small_all_reduces(program: str, mesh: Mesh, each: int, count: int):
    """Nothing but all-reduces, of `each` bytes at most; where XLA merges them, on GPUs, of `count * each` in all."""
    found = hlo.collectives(program)
    assert found, "a split row needs communication: is this test looking at the right program?"
    assert {c.kind for c in found} == {"all-reduce"}, found
    if platform_of(mesh) == "gpu":
        assert sum(c.bytes for c in found) <= count * each, found
    else:
        assert all(hlo.Instruction(c.kind, (a,)).bytes <= each for c in found for a in c.arrays), (
            found
        )
