"""What the CUDA compiler made of the kernels: no spills, no stack frames, not too many of them."""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile

import jax
import pytest

SOURCES = sorted((pathlib.Path(__file__).resolve().parent.parent / "ffi" / "cuda").glob("*.cu"))
NVCC, CUOBJDUMP = shutil.which("nvcc"), shutil.which("cuobjdump")
MODULE = importlib.util.find_spec("jaxnorm._cuda")
MAX_KERNELS = 64  # per source and architecture: compile time, and size of the wheel


def parse_ptxas(text):
    """{kernel: bytes of stack frame and spills} from `nvcc --resource-usage`."""
    found = re.findall(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        text,
    )
    entries = set(re.findall(r"Compiling entry function '(\S+)'", text))
    return {name: sum(map(int, sizes)) for name, *sizes in found if name in entries}


def parse_cuobjdump(text):
    """{kernel: bytes of stack frame and local memory} from `cuobjdump --dump-resource-usage`."""
    found = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+).* LOCAL:(\d+)", text)
    return {name: int(stack) + int(local) for name, stack, local in found}


@pytest.mark.skipif(not NVCC, reason="no CUDA compiler on PATH")
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_no_spills(source):
    """The device part of each source, compiled as CMakeLists.txt does."""
    with tempfile.TemporaryDirectory() as folder:
        command = [NVCC, "-cubin", "-arch=sm_90", "-O3", "-std=c++20", "--expt-relaxed-constexpr"]
        command += ["--resource-usage", "-diag-suppress=20012,20013,20014,20015"]
        command += ["-I", str(source.parent.parent), "-isystem", jax.ffi.include_dir()]
        command += ["-o", f"{folder}/kernels.cubin", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = parse_ptxas(done.stdout + done.stderr)
    assert kernels, done.stderr[-2000:]
    spilling = {name: size for name, size in kernels.items() if size}
    assert not spilling
    assert len(kernels) <= MAX_KERNELS


@pytest.mark.skipif(not (CUOBJDUMP and MODULE), reason="needs cuobjdump and a built CUDA module")
def test_installed_module():
    """The same for the module that is installed, on all its architectures."""
    command = [CUOBJDUMP, "--dump-resource-usage", MODULE.origin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = parse_cuobjdump(text)
    assert kernels, text[:2000]
    spilling = {name: size for name, size in kernels.items() if size}
    assert not spilling


def test_parsers_see_spills():
    ptxas = """ptxas info    : Compiling entry function 'good' for 'sm_90'
ptxas info    : Function properties for good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'bad' for 'sm_90'
ptxas info    : Function properties for bad
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
    assert parse_ptxas(ptxas) == {"good": 0, "bad": 32}
    dump = """ Function good:
  REG:24 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function bad:
  REG:255 STACK:64 SHARED:0 LOCAL:32 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert parse_cuobjdump(dump) == {"good": 0, "bad": 96}
