"""Compiles CUDA text, and says for which GPUs: Python's side of ffi/launcher."""

import importlib
import importlib.util
import os
import pathlib
import re
from typing import NamedTuple

OLDEST = 80  # architecture that machine.cuh is for
CACHE_BYTES = 256 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# Wheels of NVRTC, by the packages that hold them.
_WHEELS = {"nvidia.cu13": "libnvrtc.so.13", "nvidia.cuda_nvrtc": "libnvrtc.so.12"}


class Gpu(NamedTuple):
    name: str
    architecture: int  # XY of sm_XY
    multiprocessors: int
    shared_bytes: int  # that one block can have
    l2_bytes: int


class Compiled(NamedTuple):
    cubin: bytes
    registers: dict[str, int]  # of a thread, for each kernel
    spill_bytes: dict[str, int]  # stored and loaded, for each kernel
    seconds: float
    cached: bool  # NVRTC was not asked


def nvrtc_candidates() -> list[str]:
    """Where NVRTC may be: in a wheel, loaded already or known to the loader, in a toolkit."""
    found = []
    for package, name in _WHEELS.items():
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            path = pathlib.Path(folder, "lib", name)
            if path.exists():
                found.append(str(path))
    found += _WHEELS.values()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            paths = (pathlib.Path(root, "lib64", name) for name in _WHEELS.values())
            found += [str(path) for path in paths if path.exists()]
    return found


def cache_folder() -> tuple[str, int, str]:
    """(folder of compiled programs or "", bytes it may have, what is wrong with the settings or "")."""
    size = os.environ.get("JAXNORM_CACHE_SIZE", str(CACHE_BYTES))
    match = re.fullmatch(r"(\d+)([KMG]?)", size.strip().upper())
    if not match:
        return "", 0, f"JAXNORM_CACHE_SIZE must be bytes, or end in K, M or G, got {size!r}"
    limit = min(int(match[1]) * _UNITS[match[2]], 2**63 - 1)
    folder = os.environ.get("JAXNORM_CACHE_DIR", "")
    if folder.lower() == "off":
        return "", 0, ""
    if not folder:
        # As the XDG Base Directory Specification has it, a path that is not absolute does not count.
        base = os.environ.get("XDG_CACHE_HOME", "")
        base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
        folder = os.path.join(base, "jaxnorm")
        if not os.path.isabs(folder):
            return "", 0, "there is no home directory"
    return os.path.abspath(os.path.expanduser(folder)), limit, ""


def configure(extension) -> None:
    """Tells the compiled module `jaxnorm._launcher` what the environment says; it opens nothing before it must."""
    folder, limit, _ = cache_folder()
    extension.configure(nvrtc_candidates(), folder, limit)


def _extension():
    return importlib.import_module("jaxnorm._launcher")


def nvrtc() -> tuple[tuple[int, int] | None, str]:
    """(version of NVRTC, "") or (None, why there is none)."""
    try:
        major, minor, _, missing, _ = _extension().compiler()
    except ImportError as error:
        return None, str(error)
    return (None, missing) if missing else ((major, minor), "")


def cache_off() -> str:
    """Why compiled programs are not kept on disk, or ""."""
    return cache_folder()[2] or _extension().compiler()[4]


def gpus() -> list[Gpu]:
    """The GPUs that this process sees; none without a driver. Starts the CUDA driver."""
    try:
        return [Gpu(*gpu) for gpu in _extension().gpus()[0]]
    except ImportError:
        return []


def no_gpu() -> str:
    """Why there is no GPU, or ""."""
    return _extension().gpus()[1]


def problem() -> str:
    """Why no kernel runs on this machine's GPUs, or "". Without a GPU they are compiled for other machines."""
    version, reason = nvrtc()
    if version is None:
        return reason
    for name, architecture, *_ in gpus():
        if architecture < OLDEST:
            return f"{name} is sm_{architecture}, kernels need sm_{OLDEST}"
        if not _extension().can_compile_for(architecture):
            return (
                f"NVRTC {version[0]}.{version[1]} has no code for sm_{architecture}, which {name} is; "
                "install a newer one, e.g. pip install --upgrade nvidia-cuda-nvrtc"
            )
    return ""


def compile(source: str, architecture: int) -> Compiled:
    """Compiles CUDA text for sm_<architecture>; neither a driver nor a GPU is needed.

    Raises:
      RuntimeError: with the compiler's whole log, or why there is no compiler.
    """
    cubin, log, seconds, cached = _extension().compile(source, architecture)
    registers, spills = parse_log(log)
    return Compiled(cubin, registers, spills, seconds, cached)


_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def parse_log(log: str) -> tuple[dict[str, int], dict[str, int]]:
    """(registers, bytes of spills) of each kernel in ptxas's report."""
    registers, spills, kernel = {}, {}, ""
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            kernel = match[1]
            spills[kernel] = 0
        elif kernel and (match := _SPILLS.search(line)):
            spills[kernel] += int(match[1]) + int(match[2])
        elif kernel and (match := _REGISTERS.search(line)):
            registers[kernel] = int(match[1])
    return registers, spills
