"""Plans of batch_norm's CUDA calls, what NVRTC makes of their kernels, and what the kernels compute, without a GPU."""

import dataclasses
import math
import pathlib
import struct

import jax
import kernel_emulator
import numpy as np
import oracle
import pytest
import row_emulator
from suite import rand

from bench import cases
from jaxnorm._kernels import batch_norm, layout
from jaxnorm._kernels.plan import Plan
from jaxnorm._ops import batch_norm_primitives as primitives
from jaxnorm._rows import launcher
from jaxnorm._rows.plan import DEVICES

H100 = DEVICES[90]
needs_nvrtc = pytest.mark.skipif(launcher.nvrtc()[0] is None, reason="NVRTC is not installed")
needs_emulator = pytest.mark.skipif(not row_emulator.supported(), reason="needs g++ on Linux")


def names_of(operation, relu, residual, masked=False):
    """(operands, results) of a usual call."""
    bits, rest = ["bits"] * relu, ["residual"] * residual
    back = ["dx", *["dresidual"] * residual]
    return {
        "stats": (["x", *["mask"] * masked], ["mean", "var", *["count"] * masked]),
        "fwd": (["x", "mean", "var", "scale", "bias", *rest], ["y", *bits]),
        "train": (["x", "scale", "bias", *rest], ["y", *bits, "mean", "var"]),
        "sums": (["x", "dy", *bits, "mean", "var"], ["dbias", "dscale"]),
        "dx": (
            [
                "x",
                "dy",
                *bits,
                *["mask", "count"] * masked,
                "mean",
                "var",
                "scale",
                "dbias",
                "dscale",
            ],
            back,
        ),
        "bwd": (["x", "dy", *bits, "mean", "var", "scale"], ["dbias", "dscale", *back]),
    }[operation]


def shape_of(name, full, axis, groups=0):
    if name == "bits":
        return (*full[:-1], -(-full[-1] // 8))
    if name == "mask":
        return tuple(n if i <= groups else 1 for i, n in enumerate(full))
    if name in ("x", "dy", "y", "residual", "dx", "dresidual"):
        return full
    return tuple(n if i == axis or i < groups else 1 for i, n in enumerate(full))


def plan(
    operation, full, axis, dtype, relu=False, residual=False, masked=False, device=H100, **options
) -> Plan:
    groups = options.get("groups", 0)
    operands, results = (
        {n: shape_of(n, full, axis, groups) for n in names}
        for names in names_of(operation, relu, residual, masked)
    )
    options = {"epsilon": 0.5, "relu": relu, "partials": 1 << 20, **options}
    return batch_norm.plan(operation, operands, results, dtype, device, axes=(axis,), **options)


def plans(case, device=H100) -> list[Plan]:
    """Of what is lowered for training."""
    axis = case.axis % len(case.shape)
    merged = math.prod(case.shape) * cases.ITEMSIZE[case.dtype] <= primitives._MOST_HELD_BYTES
    operations = ("train", "bwd") if merged else ("stats", "fwd", "sums", "dx")
    options = {"relu": bool(case.tail), "residual": "add" in case.tail, "device": device}
    return [plan(op, case.shape, axis, case.dtype, **options) for op in operations]


def line(case, device) -> str:
    """The launches of a case: blocks x threads of each kernel, with its KiB of dynamic shared memory."""
    launches = [x for made in plans(case, device) for x in made.launches]
    parts = [
        f"{x.kernel.removeprefix('jaxnorm_batch_norm_')} {x.grid[0]} x {x.block[0]}"
        + (f" {x.shared_bytes / 1024:.4g}K" if x.cooperative else "")
        for x in launches
    ]
    sizes = "x".join(map(str, case.shape))
    return f"{sizes} axis {case.axis} {case.dtype} {case.tail or '-'}: {', '.join(parts)}"


TABLE = pathlib.Path(__file__).with_name("batch_norm_plans.txt")


def test_table():
    """README's cases on an H100."""
    lines = [line(case, H100) for case in cases.select("batch_norm", "full")]
    assert lines == TABLE.read_text().splitlines()


def test_resident_kernels_need_what_the_gpu_has():
    """Neither launches that others wait for nor early ones before sm_90; as many blocks as run at once after it."""
    for case in cases.select("batch_norm"):
        for device in DEVICES.values():
            for made in plans(case, device):
                for launch in made.launches:
                    assert not (launch.cooperative or launch.early) or device.clusters
                    assert not launch.cooperative or launch.grid[0] <= device.multiprocessors
                    most = device.shared_bytes - layout.STATIC_SHARED_BYTES + 128
                    assert launch.shared_bytes <= most


def test_what_has_no_plan():
    """More groups that lie unevenly than launches are worth; empty arrays."""
    x, half = (32, 1, 32, 5, 8), (1, 32, 32, 5, 8)
    shapes = {"x": x, "dy": half, "mean": (32, 1, 32, 1, 8), "var": (1, 1, 32, 1, 8)}
    results = {"dbias": (32, 32, 32, 1, 8)}
    options = {"axes": (4,), "groups": 3, "partials": 1 << 20}
    assert batch_norm.plan("sums", shapes, results, "float32", H100, **options) is None
    params = {"axes": (4,), "groups": 3, "epsilon": 1e-5, "replicas": 1, "relu": False}
    avals = [[jax.ShapeDtypeStruct(s, "float32") for s in x.values()] for x in (shapes, results)]
    names = {"names": tuple(shapes), "results": tuple(results)}
    assert primitives._plan("batch_norm_sums", *avals, **names, **params) is None
    assert plan("stats", (0, 4), 1, "float32") is None


def test_groups_that_lie_unevenly():
    """A launch for each run of groups that is even in all arrays."""
    shapes = {"x": (3, 1, 7, 8), "mean": (1, 2, 1, 8), "var": (3, 2, 1, 8)}
    options = {"axes": (3,), "groups": 2, "partials": 1 << 20}
    made = batch_norm.plan("fwd", shapes, {"y": (3, 2, 7, 8)}, "float32", H100, **options)
    assert len(made.launches) == 3
    x_of = [launch.arguments[0][0] for launch in made.launches]
    assert [(w.value, w.offset) for w in x_of] == [(0, 224 * i) for i in range(3)]
    assert [launch.arguments[0][1].value for launch in made.launches] == [0] * 3


@pytest.mark.parametrize("d", [1, 2, 3, 5, 7, 8, 13, 641, 2**16 + 1, 2**30 + 1, 2**31 - 1])
def test_division_is_exact(d):
    divisor, shift, multiplier = (n for _, n in layout.fast_div(d))
    assert divisor == d
    assert multiplier < 2**32
    near = {k * d + i for k in (1, 2, 3, (2**31 - 1) // d) for i in (-1, 0, 1)}
    for n in near | {0, 1, 2**31 - 1, 2**30}:
        if 0 <= n < 2**31:
            assert (2 * n * multiplier >> 32) >> shift == n // d


# ---- NVRTC ----


def static_shared_bytes(cubin: bytes) -> dict[str, int]:
    """Bytes of the sections .nv.shared.<kernel> of an ELF file."""
    start, size, count, names = (
        *struct.unpack_from("<Q", cubin, 40),
        *struct.unpack_from("<3H", cubin, 58),
    )
    headers = [struct.unpack_from("<2I4Q", cubin, start + i * size) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for name, _, _, _, _, length in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        if text.startswith(".nv.shared.") and "reserved" not in text:
            found[text.removeprefix(".nv.shared.")] = length
    return found


@needs_nvrtc
@pytest.mark.parametrize("architecture", DEVICES)
def test_instances_fit(architecture):
    """Every instance that a case needs: few spills; shared memory; registers.

    For sm_90, NVRTC 13.0 spills nothing, and 13.5 spills up to 68 bytes of `batch_norm_fwd`.
    """
    device = DEVICES[architecture]
    made = {p.source: p for case in cases.select("batch_norm") for p in plans(case, device)}
    for source, one in made.items():
        compiled = launcher.compile(source, architecture)
        static = static_shared_bytes(compiled.cubin)
        assert set(compiled.registers) == {launch.kernel for launch in one.launches}
        spills = max(compiled.spill_bytes.values())
        assert spills <= 80, (one, compiled.spill_bytes)
        for launch in one.launches:
            own = static.get(launch.kernel, 0)
            assert own <= 48 * 1024
            if launch.shared_bytes:
                assert own <= layout.STATIC_SHARED_BYTES
            assert own + launch.shared_bytes <= device.shared_bytes
            assert compiled.registers[launch.kernel] * launch.block[0] <= 65536


# ---- on the CPU ----


def small(multiprocessors=4, kilobytes=227):
    return dataclasses.replace(H100, multiprocessors=multiprocessors, shared_bytes=kilobytes << 10)


RUNS = {
    "channels last": ("train", (60, 7, 16), 2, "float32", {}),
    "flat bits": ("train", (60, 7, 16), 2, "float16", {"relu": True, "residual": True}),
    "ragged bits": ("train", (70, 5, 7), 1, "bfloat16", {"relu": True, "residual": True}),
    "ragged bits in both": ("bwd", (70, 5, 7), 1, "bfloat16", {"relu": True, "residual": True}),
    "backward": ("bwd", (300, 17), 1, "float32", {}),
    "backward in two passes": ("bwd", (300, 24), 1, "float16", {"relu": True, "residual": True, "device": DEVICES[80]}),
    "float64": ("train", (5, 33, 12), 1, "float64", {"relu": True}),
    "float64 backward": ("bwd", (5, 33, 12), 1, "float64", {"relu": True, "residual": True}),
    "mask": ("stats", (40, 12, 9), 1, "float32", {"masked": True}),
    "mask backward": ("dx", (40, 12, 9), 1, "float16", {"masked": True, "relu": True}),
    "groups": ("stats", (3, 50, 24), 2, "float16", {"groups": 1}),
    "groups backward": ("dx", (3, 50, 24), 2, "float16", {"groups": 1, "relu": True}),
    "8 blocks, channels last": (
        "train", (512, 64), 1, "float16", {"relu": True, "residual": True, "device": small(8, 36)}
    ),
    "8 blocks, channels first": ("train", (6, 24, 8, 8), 1, "bfloat16", {"relu": True, "device": small(8, 14)}),
    "parts of channels": ("train", (4, 2, 1024), 1, "float32", {"residual": True, "device": small(8, 20)}),
    "8 blocks backward": ("bwd", (256, 64), 1, "float16", {"relu": True, "residual": True, "device": small(8, 28)}),
    "8 blocks backward, channels first": ("bwd", (6, 24, 8, 8), 1, "float32", {"device": small(8, 28)}),
}  # fmt: skip


def values_of(name, shape, dtype, acc):
    seed = sum(map(ord, name))
    if name in ("bits", "mask"):
        random = np.random.default_rng(seed)
        return random.integers(0, 256 if name == "bits" else 2, shape).astype("u1")
    if name in ("x", "dy", "residual"):
        return np.asarray(rand(shape, dtype, seed))
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(acc)


def expected(given, groups, axis, relu, dtype):
    """All results in float64, of the operands in float64."""
    x, dy = given["x"], given.get("dy", given["x"])
    reduced = tuple(i for i in range(groups, x.ndim) if i != axis)
    keep = np.broadcast_to(given.get("mask", np.ones(1)) > 0, x.shape)
    count = keep.sum(reduced, keepdims=True)
    mean = given.get("mean", np.sum(x * keep, reduced, keepdims=True) / count)
    var = given.get("var", np.sum((x - mean) ** 2 * keep, reduced, keepdims=True) / count)
    rstd, scale = 1 / np.sqrt(var + 0.5), given.get("scale", 1)
    xhat = (x - mean) * rstd
    y = xhat * scale + given.get("bias", 0) + given.get("residual", 0)
    g = dy
    if "bits" in given:
        bits = given["bits"].astype("u1")
        g = dy * np.unpackbits(bits, axis=-1, bitorder="little", count=x.shape[-1])
    dbias = given.get("dbias", np.sum(g, reduced, keepdims=True))
    dscale = given.get("dscale", np.sum(g * xhat, reduced, keepdims=True))
    drift = np.where(keep, (dbias + xhat * dscale) / given.get("count", count), 0)
    return {
        "mean": mean,
        "var": var,
        "count": count,
        "y": np.maximum(y, 0) if relu else y,
        "dbias": dbias,
        "dscale": dscale,
        "dresidual": g,
        "dx": rstd * scale * (g - drift),
    }


@needs_emulator
@pytest.mark.parametrize("name", RUNS)
def test_kernels_compute_the_formulas(name):
    """Twice with the same tag, as a CUDA graph repeats a launch; forward and backward on few multiprocessors."""
    operation, full, axis, dtype, options = RUNS[name]
    device = options.get("device", small())
    made = plan(operation, full, axis, dtype, **{**options, "device": device})
    groups, relu = options.get("groups", 0), options.get("relu", False)
    operands, results = names_of(
        operation, relu, options.get("residual", False), options.get("masked", False)
    )
    acc = "float64" if dtype == "float64" else "float32"
    arrays = {n: values_of(n, shape_of(n, full, axis, groups), dtype, acc) for n in operands}
    element = arrays["x"].dtype
    types = {n: element if n in ("y", "dx", "dresidual") else acc for n in results} | {"bits": "u1"}
    outs = [(shape_of(n, full, axis, groups), types[n]) for n in results]
    found = dict(
        zip(
            results,
            kernel_emulator.run(made, list(arrays.values()), outs, device.architecture, times=2),
            strict=True,
        )
    )
    exact = expected({n: oracle.f64(a) for n, a in arrays.items()}, groups, axis, relu, dtype)
    limits = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 2e-6, "float64": 1e-13}
    for n, value in found.items():
        if n == "bits":
            want = np.packbits(oracle.f64(found["y"]) > 0, axis=-1, bitorder="little")
            np.testing.assert_array_equal(value, want)
            continue
        limit = (
            limits[dtype]
            if n in ("y", "dx", "dresidual")
            else limits["float64" if acc == "float64" else "float32"]
        )
        scale = max(1, np.abs(exact[n]).max())
        assert np.abs(oracle.f64(value) - exact[n]).max() <= limit * scale, n
