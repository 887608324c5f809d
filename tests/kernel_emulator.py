"""Runs the launches of a plan of jaxnorm/_kernels on the CPU (row_emulator.py)."""

import ctypes
import functools
import hashlib
import struct

import numpy as np
import row_emulator
from row_emulator import HERE, EmulatorError, Memory

from jaxnorm import _launch
from jaxnorm._kernels import source

HEADER = HERE / "kernels_on_cpu.h"


@functools.cache
def _library(text: str, kernels: tuple[str, ...], architecture: int) -> ctypes.CDLL:
    for machine in source.machine():
        text = text.replace(machine, "")
    emulate = "".join(f"EMULATE({kernel})\n" for kernel in kernels)
    text = f'#include "cuda_on_cpu.h"\n#include "{HEADER}"\n#line 1 "source.cu"\n{text}\n{emulate}'
    directory = row_emulator._inside(architecture)
    path = directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    flags = [*row_emulator.FLAGS, f"-D__CUDA_ARCH__={architecture}0", "-shared", f"-I{directory}"]
    files = ["-x", "c++", "-", "-x", "none", str(directory / "inside.o"), "-o", str(path)]
    row_emulator._compile([*flags, *files], text)
    return ctypes.CDLL(str(path))


def _bytes(argument: _launch.Argument, arrays, tag: int) -> bytes:
    values = {
        0: lambda w: w.value,
        1: lambda w: arrays[w.value].ctypes.data + w.offset,
        2: lambda w: tag,
    }
    return b"".join(struct.pack("<q", values[word.kind](word)) for word in argument)


def run(plan, operands, results, architecture=90, times=1, seconds=100.0) -> list[np.ndarray]:
    """The results of a plan.

    Args:
      plan: a `jaxnorm._kernels.plan.Plan`.
      operands: arrays.
      results: (shape, dtype) of each.
      architecture: sm_XY as XY.
      times: how often it runs, with one tag, as a CUDA graph does it.
      seconds: each launch is an error after this time.
    """
    memory = Memory()
    contents = [row_emulator._raw(operand) for operand in operands]
    arrays = [memory.add(content) for content in contents]
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in results]
    if plan.scratch is not None:
        sizes.append(4 * plan.scratch)
    arrays += [memory.add(np.full(size, 0xFF, np.uint8)) for size in sizes]
    assert [a.size for a in arrays] == [*plan.buffer_bytes, *sizes[len(results) :]]
    kernels = tuple(dict.fromkeys(launch.kernel for launch in plan.launches))
    library = _library(plan.source, kernels, architecture)
    for _ in range(times):
        for launch in plan.launches:
            _run(library, launch, arrays, memory, seconds)
    for number, (content, array) in enumerate(zip(contents, arrays, strict=False)):
        if not np.array_equal(content, array):
            raise EmulatorError(f"operand {number} was written to")
    made = arrays[len(operands) :]
    return [
        a.copy().view(dtype).reshape(shape)
        for a, (shape, dtype) in zip(made, results, strict=False)
    ]


def _run(library, launch, arrays, memory, seconds):
    packed = [_bytes(argument, arrays, 0x123450000) for argument in launch.arguments]
    words = [np.zeros(len(p) // 8 + 2, np.uint64) for p in packed]
    pointers = []
    for place, content in zip(words, packed, strict=True):
        start = place.ctypes.data % 16 // 8  # structures are aligned to 16 bytes at most
        place[start : start + len(content) // 8] = np.frombuffer(content, np.uint64)
        pointers.append(place.ctypes.data + 8 * start)
    # Blocks that wait for each other are what a cluster is for the emulator; they run in a random order, as they spin.
    cluster = launch.grid[0] if launch.cooperative else 1
    buffers = (row_emulator._Buffer * len(arrays))(*((a.ctypes.data, a.size) for a in arrays))
    order = row_emulator.ORDERS["random" if launch.cooperative else "mixed"]
    data = row_emulator._Launch(
        launch.grid, launch.block, cluster, launch.shared_bytes, buffers, len(arrays), b"*",
        (ctypes.c_void_p * len(pointers))(*pointers), order, seconds,
    )  # fmt: skip
    emulate = library[f"emulate_{launch.kernel}"]
    emulate.restype = ctypes.c_char_p
    emulate.argtypes = (ctypes.POINTER(row_emulator._Launch),)
    message = emulate(ctypes.byref(data))
    if message is not None:
        raise EmulatorError(f"{launch.kernel}: {message.decode()}")
    memory.check()
