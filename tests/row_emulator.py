"""Runs the kernels of a row program's call on the CPU, with cuda_on_cpu.h in place of machine.cuh and exchange.cuh."""

import ctypes
import functools
import hashlib
import math
import pathlib
import platform
import shutil
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm._rows import named, primitive
from jaxnorm._rows.call import row_call
from jaxnorm._rows.plan import DEVICES

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE / "cuda_on_cpu.h"
ROWS = HERE.parent / "jaxnorm" / "_rows"
# The header stands in for the text of these files, in this order.
REPLACED = (ROWS / "machine.cuh", ROWS / "exchange.cuh")
# Sanitizers that need no library: cuda_on_cpu.h defines the functions that GCC calls.
FLAGS = (
    "-std=c++17 -O1 -fPIC -fvisibility=hidden -fno-gnu-unique -fno-strict-aliasing -fwrapv"
    " -ffp-contract=off -fno-exceptions -Wno-unknown-pragmas -U_FORTIFY_SOURCE"
    " -fsanitize=alignment,bounds,shift-exponent"
).split()
GUARD = 16384  # bytes before and behind each buffer
ALIGNMENT = 256  # of XLA's buffers on GPUs; an address here is a multiple of this, never of more
PATTERN = 0xA5
ORDERS = {"mixed": 0, "forward": 1, "reverse": 2, "random": 3}


class EmulatorError(RuntimeError):
    """What a kernel does wrong."""


class _Buffer(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("kinds", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("order", ctypes.c_uint32),
        ("seconds", ctypes.c_double),
    )


@functools.cache
def _directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="row_emulator_")


def _compile(arguments, text=None):
    done = subprocess.run(["g++", *arguments], input=text, text=True, capture_output=True)
    if done.returncode:
        raise EmulatorError(f"g++ does not compile the kernels:\n{done.stderr[:8000]}")


@functools.cache
def _inside(architecture: int) -> pathlib.Path:
    """A directory with the precompiled header and the emulator's own object file."""
    directory = pathlib.Path(_directory().name) / str(architecture)
    directory.mkdir()
    header = directory / HEADER.name
    header.write_text(HEADER.read_text())
    flags = [*FLAGS, f"-D__CUDA_ARCH__={architecture}0"]
    _compile([*flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    inside = ["-DEMULATOR_INSIDE", "-fno-sanitize=all", "-c", "-o", str(directory / "inside.o")]
    _compile([*flags, *inside, "-x", "c++", str(header)])
    return directory


@functools.cache
def _library(source: str, kernels: tuple[str, ...], architecture: int) -> ctypes.CDLL:
    machine = "".join(path.read_text() for path in REPLACED).strip()
    before, found, after = source.partition(machine)
    if not found:
        raise ValueError("the source does not hold the text of machine.cuh and exchange.cuh")
    line = 1 + before.count("\n") + machine.count("\n")
    emulate = "".join(f"EMULATE({kernel})\n" for kernel in kernels)
    text = f'#include "{HEADER.name}"\n#line 1 "source.cu"\n{before}\n#line {line} "source.cu"\n{after}\n{emulate}'
    directory = _inside(architecture)
    path = directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    files = ["-x", "c++", "-", "-x", "none", str(directory / "inside.o"), "-o", str(path)]
    flags = [*FLAGS, f"-D__CUDA_ARCH__={architecture}0", "-shared", f"-I{directory}"]
    _compile([*flags, *files], text)
    return ctypes.CDLL(str(path))


class Memory:
    """Buffers with guard zones around them."""

    def __init__(self):
        self.arrays = []

    def add(self, content: np.ndarray):
        """Takes bytes; returns the array that holds them."""
        raw = np.full(content.size + 2 * GUARD + 2 * ALIGNMENT, PATTERN, np.uint8)
        start = -(-(raw.ctypes.data + GUARD) // ALIGNMENT) * ALIGNMENT
        if start % (2 * ALIGNMENT) == 0:
            start += ALIGNMENT
        start -= raw.ctypes.data
        array = raw[start : start + content.size]
        array[:] = content
        self.arrays.append((raw, start, array))
        return array

    def check(self):
        for number, (raw, start, array) in enumerate(self.arrays):
            for zone, what, zero in (
                (raw[:start], "in front of", start),
                (raw[start + array.size :], "behind", -array.size),
            ):
                wrong = np.flatnonzero(zone != PATTERN)
                if wrong.size:
                    first = wrong[0] - zero if zero > 0 else wrong[0]
                    raise EmulatorError(
                        f"{wrong.size} bytes were written {what} buffer {number} of {array.size} bytes,"
                        f" the first at {first:+d} from its {'start' if zero > 0 else 'end'}"
                    )


def launch(library, kernel, grid, block, arguments, memory, cluster=1, shared=0, **options):
    """Runs one kernel. An argument is an array of `memory`, or (kind, integer) with kind l or i."""
    kinds, values = "", []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            kinds, values = kinds + "p", [*values, ctypes.c_void_p(argument.ctypes.data)]
        else:
            kind, value = argument
            integer = {"l": ctypes.c_longlong, "i": ctypes.c_int}[kind]
            kinds, values = kinds + kind, [*values, integer(value)]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    arrays = [array for _, _, array in memory.arrays]
    buffers = (_Buffer * len(arrays))(*((a.ctypes.data, a.size) for a in arrays))
    run = library[f"emulate_{kernel}"]
    run.restype = ctypes.c_char_p
    run.argtypes = (ctypes.POINTER(_Launch),)
    data = _Launch(
        grid, block, cluster, shared, buffers, len(arrays), kinds.encode(), pointers,
        ORDERS[options.get("order", "mixed")], options.get("seconds", 60.0),
    )  # fmt: skip
    message = run(ctypes.byref(data))
    if message is not None:
        raise EmulatorError(f"{kernel}: {message.decode()}")
    memory.check()


def _plain(operand) -> np.ndarray:
    if isinstance(operand, jax.Array) and jax.dtypes.issubdtype(operand.dtype, jax.dtypes.prng_key):
        operand = jax.random.key_data(operand)
    return np.asarray(operand)


def _raw(array) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def grid(call, shapes, resident_blocks) -> tuple[int, int, int, list[int]]:
    """(rows, chunks, groups, row dimensions) by the launcher's rules."""
    dims = []
    for buffer, dimension, divisor in call.sizes:
        size = dimension if buffer < 0 else shapes[buffer][dimension]
        if size % divisor:
            raise EmulatorError(
                f"dimension {dimension} of buffer {buffer}, {size}, is no multiple of {divisor}"
            )
        dims.append(size // divisor)
    rows, groups = math.prod(dims), math.prod(dims[: call.group_dims])
    if not rows:
        return 0, 0, groups, dims
    tiles = -(-(rows // groups) // call.rows_per_tile)
    if not call.blocks:
        return rows, tiles, groups, dims
    multiple = call.chunk_multiple
    if multiple == 1:
        chunks = min(max(min(call.blocks, resident_blocks) // groups, 1), tiles)
    else:

        def time(chunks):
            """In tiles. Beginning and end of a block take as long as 16 of them."""
            return -(-groups * chunks // resident_blocks) * (-(-tiles // chunks) + 16)

        possible = range(multiple, min(call.blocks // groups, tiles) + 1, multiple)
        chunks = min(possible, key=time, default=min(multiple, tiles))
    if groups * chunks > max(call.blocks, groups):
        raise EmulatorError(f"{groups} groups of rows need {groups * chunks} blocks")
    return rows, chunks, groups, dims


def run(
    call,
    operands,
    out_avals,
    *,
    resident_blocks: int = 7,
    order: str = "mixed",
    architecture: int = 90,
    seconds: float = 60.0,
    with_scratch: bool = False,
) -> list[np.ndarray]:
    """The results of `call` for these operands.

    Args:
      call: A `jaxnorm._rows.call.Call`.
      operands: Arrays; keys of jax.random too.
      out_avals: The (shape, dtype) of each of the program's results, those in `call.scratch` excluded.
      resident_blocks: How many blocks (clusters) the device holds at once. Few make persistent kernels loop.
      order: Which threads go first: "forward", "reverse", "random", or "mixed", which varies it from block to block.
      architecture: sm_XY as XY.
      seconds: Each launch is an error after this time.
      with_scratch: Returns the scratch results behind the others.

    Raises:
      EmulatorError: A kernel does what it must not do, or g++ does not compile it.
    """
    operands = [_plain(operand) for operand in operands]
    scratch = [(tuple(map(int, shape)), np.dtype(np.float32)) for shape in call.scratch]
    results = [(tuple(shape), np.dtype(dtype)) for shape, dtype in out_avals] + scratch
    shapes = [operand.shape for operand in operands] + [shape for shape, _ in results]
    finish = f"{call.kernel}_finish"
    kernels = (call.kernel, finish) if call.finish else (call.kernel,)
    most = 64 if call.together else 16
    if call.threads > 1024 or call.cluster > most or call.shared_bytes > 227 * 1024:
        raise EmulatorError(
            f"{call.threads} threads, clusters of {call.cluster}, {call.shared_bytes} bytes: too many"
        )
    library = _library(call.source, kernels, architecture)
    memory = Memory()
    contents = [_raw(operand) for operand in operands]
    arrays = [memory.add(content) for content in contents]
    for shape, dtype in results:
        arrays.append(memory.add(np.full(math.prod(shape) * dtype.itemsize, 0xFF, np.uint8)))
    rows, chunks, groups, dims = grid(call, shapes, resident_blocks)
    options = {"order": order, "seconds": seconds}
    if rows:
        integers = [("l", rows), ("i", chunks), *(("i", size) for size in dims)]
        blocks = (groups * chunks * call.cluster, 1, 1)
        arguments = [*(arrays[buffer] for buffer in call.arguments), *integers]
        launch(
            library, call.kernel, blocks, (call.threads, 1, 1), arguments, memory,
            blocks[0] if call.together else call.cluster, call.shared_bytes, **options,
        )  # fmt: skip
    if call.finish:
        x, z = call.finish
        arguments = [arrays[buffer] for buffer in call.finish_arguments]
        arguments += [("l", rows), ("i", chunks), ("i", groups), *(("i", size) for size in dims)]
        blocks = (x, min(max(groups, 1), 3), z)  # few, so that they loop over groups
        parts = 32 if call.group_dims == 0 else min(32, 1 << max(chunks - 1, 0).bit_length())
        launch(library, finish, blocks, (32, parts, 1), arguments, memory, **options)
    for number, (content, array) in enumerate(zip(contents, arrays, strict=False)):
        if not np.array_equal(content, array):
            raise EmulatorError(f"operand {number} was written to")
    found = []
    kept = results if with_scratch else results[: len(out_avals)]
    for number, (shape, dtype) in enumerate(kept):
        array = arrays[len(operands) + number]
        if dtype.kind == "b" and (array > 1).any():
            raise EmulatorError(
                f"result {number} holds bytes that are neither 0 nor 1, or nobody wrote them"
            )
        found.append(array.copy().view(dtype).reshape(shape))
    return found


def launch_row_programs(monkeypatch, *, fallback: bool) -> list:
    """Makes row programs that run outside of jit run their kernels here.

    Args:
      monkeypatch: pytest's.
      fallback: whether a formula that cannot be a row program may run as plain code; otherwise it is an error.

    Returns:
      The programs that ran, which grows as they do.
    """
    ran = []

    def launched(*operands, jaxpr):
        closed = primitive.typed(jaxpr, [jax.typeof(x) for x in operands])
        avals = [(a.shape, a.dtype) for a in closed.out_avals]
        ran.append(closed)
        return [jnp.asarray(a) for a in run(row_call(closed, DEVICES[90]), operands, avals)]

    def refuse(*_):
        raise AssertionError("this is no row program")

    monkeypatch.setattr(primitive.row_program_p, "impl", launched)
    if not fallback:
        monkeypatch.setattr(named, "run_program", refuse)
    return ran


def supported() -> bool:
    """Whether this machine can run the emulator."""
    return platform.system() == "Linux" and shutil.which("g++") is not None
