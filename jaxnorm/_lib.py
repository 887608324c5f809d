"""Loads the compiled modules and registers their FFI targets; the only place that knows what is available and why."""

import dataclasses
import functools
import importlib
import pathlib
import re
import warnings
from importlib import metadata

import jax

from jaxnorm._rows import launcher

VERSION = metadata.version("jaxnorm")

TARGET_PREFIX = "jaxnorm_"

# jax.ffi spells the platform of a target one way, lowering rules another.
_FFI_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}
PLATFORMS = tuple(_FFI_PLATFORM)


@dataclasses.dataclass(frozen=True)
class Module:
    """One compiled module: what it offers, or why it offers nothing."""

    platform: str
    targets: frozenset[str] = frozenset()
    reason: str = ""  # empty when the targets are registered
    ffi_version: tuple[int, int] | None = None
    details: str = ""

    @property
    def available(self) -> bool:
        return not self.reason


@dataclasses.dataclass(frozen=True)
class Status:
    """What jaxnorm compiled, loaded and registered. `repr` is meant to be read by people."""

    version: str
    jax_version: str
    runtime_ffi_version: tuple[int, int] | None
    modules: tuple[Module, ...]
    row_programs: Module  # what `fuse` compiles

    def __repr__(self) -> str:
        runtime = _dotted(self.runtime_ffi_version)
        lines = [f"jaxnorm {self.version} (jax {self.jax_version}, XLA FFI {runtime})"]
        lines += [
            _line(m.platform, m, f"{len(m.targets)} kernels registered") for m in self.modules
        ]
        return "\n".join([*lines, _line("fuse", self.row_programs, "kernels compiled when needed")])


def _line(name: str, m: Module, available: str) -> str:
    if not m.available:
        return f"  {name:<5} plain XLA formulas: {m.reason}"
    return f"  {name:<5} {available}, built for XLA FFI {_dotted(m.ffi_version)}{m.details}"


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


@functools.cache
def _runtime_ffi_version() -> tuple[int, int] | None:
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    major = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", text)
    minor = re.search(r"#define XLA_FFI_API_MINOR (\d+)", text)
    return (int(major.group(1)), int(minor.group(1))) if major and minor else None


def _abi_problem(built: tuple[int, int]) -> str:
    """Why handlers built for FFI version `built` must not be registered, or "".

    XLA takes handlers of its own or an older minor version. A newer one does not merely fail: once it is registered,
    every later start of a JAX backend raises. So this is checked before anything is registered.
    """
    runtime = _runtime_ffi_version()
    if runtime is None:
        return (
            f"cannot find the XLA FFI version of the installed jaxlib (built for {_dotted(built)})"
        )
    if built[0] == runtime[0] and built[1] <= runtime[1]:
        return ""
    return (
        f"built for XLA FFI {_dotted(built)}, but the installed jaxlib has {_dotted(runtime)}; "
        "upgrade jaxlib or reinstall jaxnorm"
    )


def _cuda_problem(cuda) -> tuple[str, str]:
    """(reason why no kernel can run on this machine's GPUs or "", detail for the status line)."""
    devices, error = cuda.devices()
    toolkit = f"{cuda.CUDART_VERSION // 1000}.{cuda.CUDART_VERSION % 1000 // 10}"
    built = f", CUDA {toolkit} for sm_{cuda.ARCHITECTURES.replace(',', ', sm_')}"
    if not devices:
        return "", f"{built}; no device ({error or 'none found'})"
    for name, major, minor in devices:
        if not any(_runs_on(arch, major, minor) for arch in cuda.ARCHITECTURES.split(",")):
            fix = f"rebuild with JAXNORM_CUDA_ARCHITECTURES={major}{minor}"
            return f"{name} is sm_{major}{minor}, built for sm_{cuda.ARCHITECTURES}; {fix}", built
    names = ", ".join(sorted({name for name, _, _ in devices}))
    return "", f"{built}; {len(devices)} x {names}"


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Whether code for CMake architecture `arch` ("90", "90-real", "80-virtual") runs on sm_<major><minor>."""
    number, _, kind = arch.partition("-")
    built = (int(number[:-1]), int(number[-1]))
    machine_code = built[0] == major and built[1] <= minor
    ptx = built <= (major, minor)
    return {"real": machine_code, "virtual": ptx}.get(kind, machine_code or ptx)


def _import(platform: str, name: str):
    """(the compiled module or None, a Module that says why it cannot be used)."""
    try:
        extension = importlib.import_module(f"jaxnorm.{name}")
    except ModuleNotFoundError:
        return None, Module(platform, reason="not built")
    except ImportError as error:
        return None, Module(platform, reason=f"cannot be imported ({error})")
    built = tuple(extension.XLA_FFI_API_VERSION)
    reason = _abi_problem(built)
    return None if reason else extension, Module(platform, reason=reason, ffi_version=built)


def _register(extension, found: Module) -> Module:
    targets = extension.targets()
    for name, handler in targets.items():
        jax.ffi.register_ffi_target(
            TARGET_PREFIX + name, handler, platform=_FFI_PLATFORM[found.platform], api_version=1
        )
    return dataclasses.replace(found, targets=frozenset(targets))


@functools.cache
def _load(platform: str) -> Module:
    """Imports the module for `platform` and registers its targets, as an importing process may: no device is asked."""
    extension, found = _import(platform, f"_{platform}")
    return _register(extension, found) if extension else found


@functools.cache
def _load_launcher() -> Module:
    """The same for the module that compiles and launches row programs; it opens neither the driver nor NVRTC."""
    extension, found = _import("cuda", "_launcher")
    if not extension:
        return found
    launcher.configure(extension)
    # The target keeps a state of this type. XLA must know of it first: otherwise no CUDA backend starts.
    try:
        for name, registration in extension.types().items():
            jax.ffi.register_ffi_type(
                TARGET_PREFIX + name, registration, platform=_FFI_PLATFORM["cuda"]
            )
    except Exception as error:
        return dataclasses.replace(found, reason=f"jaxlib refuses the type of its state ({error})")
    return _register(extension, found)


@functools.cache
def row_programs() -> Module:
    """What compiles and launches row programs, and whether it can here; waits like `module` before it asks a device."""
    loaded = _load_launcher()
    if not loaded.available:
        return loaded
    if reason := launcher.problem():
        return dataclasses.replace(loaded, targets=frozenset(), reason=reason)
    version, _ = launcher.nvrtc()
    gpus = launcher.gpus()
    details = f", NVRTC {_dotted(version)}"
    if gpus:
        details += f"; {len(gpus)} x {', '.join(sorted({gpu.name for gpu in gpus}))}"
    else:
        details += f"; no device ({launcher.no_gpu()})"
    if off := launcher.cache_off():
        details += f"; not kept on disk ({off})"
    return dataclasses.replace(loaded, details=details)


@functools.cache
def module(platform: str) -> Module:
    """The module for `platform` ("cpu" or "cuda"), and whether its kernels run on this machine's devices.

    Looking at the GPUs starts the CUDA driver, after which neither CUDA_VISIBLE_DEVICES nor fork works as before. So
    it waits for the first lowering or `status()`.
    """
    loaded = _load(platform)
    if platform != "cuda" or not loaded.available:
        return loaded
    reason, details = _cuda_problem(importlib.import_module("jaxnorm._cuda"))
    if reason:
        return dataclasses.replace(loaded, targets=frozenset(), reason=reason)
    return dataclasses.replace(loaded, details=details)


@functools.cache
def warn_fallback(platform: str, reason: str) -> None:
    """Says once that a platform which should have kernels runs the plain formulas."""
    warnings.warn(
        f"jaxnorm: no {platform} kernels, using plain XLA formulas: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def status() -> Status:
    """What was compiled, loaded and registered, and why something was not.

    Returns:
      An object with `version`, `jax_version`, `runtime_ffi_version`, `modules`, one entry per platform with
      `available`, `targets` and `reason`, and `row_programs`, such an entry for what `fuse` compiles. Its repr is a
      few readable lines.

    >>> import jaxnorm
    >>> jaxnorm.status().modules[0].platform
    'cpu'
    """
    modules = tuple(module(platform) for platform in PLATFORMS)
    return Status(VERSION, jax.__version__, _runtime_ffi_version(), modules, row_programs())


for _platform in PLATFORMS:
    _load(_platform)
_load_launcher()
