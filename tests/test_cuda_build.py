"""What the CUDA compiler made of the kernels: no spills, no stack frames, not too many of them."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess

import pytest

MODULE = importlib.util.find_spec("jaxnorm._cuda")
MAX_KERNELS = 64  # per source and architecture: compile time, and size of the wheel


def cuobjdump():
    """The program of a CUDA toolkit, or that of the wheel which is installed with the tests."""
    wheel = "nvidia-cuda-cuobjdump"
    found = shutil.which("cuobjdump")
    return found or importlib.metadata.distribution(wheel).locate_file("nvidia/cu13/bin/cuobjdump")


def parse(text):
    """For each source and architecture {kernel: bytes of stack frame, which has the spills, and of local memory}."""
    kernel = re.compile(r"Function (\S+):\s+REG:\d+ STACK:(\d+).* LOCAL:(\d+)")
    return [
        {name: int(stack) + int(local) for name, stack, local in kernel.findall(section)}
        for section in text.split("Fatbin elf code:")[1:]
    ]


@pytest.mark.skipif(not MODULE, reason="the CUDA module was not built")
def test_no_spills():
    """In the module that is installed, which is what users run."""
    command = [cuobjdump(), "--dump-resource-usage", MODULE.origin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sources = parse(text)
    assert sum(map(len, sources)) == text.count(" Function ") > 0, text[:2000]
    spilling = {name: size for kernels in sources for name, size in kernels.items() if size}
    assert not spilling
    assert max(map(len, sources)) <= MAX_KERNELS


def test_parser_sees_spills():
    text = """
Fatbin elf code:
================
arch = sm_90

Resource usage:
 Common:
  GLOBAL:0
 Function good:
  REG:24 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
 Function bad:
  REG:255 STACK:64 SHARED:0 LOCAL:32 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert parse(text) == [{"good": 0}, {"bad": 96}]
