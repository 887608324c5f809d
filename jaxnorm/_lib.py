"""Loads the compiled modules and registers their FFI targets; the only place that knows what is available and why.

`_cpu` has a target for each primitive. `_launcher` has one for all calls on GPUs: it compiles and launches kernels.
"""

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

    def __repr__(self) -> str:
        runtime = _dotted(self.runtime_ffi_version)
        lines = [f"jaxnorm {self.version} (jax {self.jax_version}, XLA FFI {runtime})"]
        return "\n".join([*lines, *map(_line, self.modules)])


def _line(m: Module) -> str:
    if not m.available:
        return f"  {m.platform:<5} plain XLA formulas: {m.reason}"
    kernels = f"{len(m.targets)} kernels" if m.platform == "cpu" else "kernels compiled when needed"
    return f"  {m.platform:<5} {kernels}, built for XLA FFI {_dotted(m.ffi_version)}{m.details}"


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
def _load_cpu() -> Module:
    """Imports the CPU's kernels and registers their targets."""
    extension, found = _import("cpu", "_cpu")
    return _register(extension, found) if extension else found


@functools.cache
def _load_launcher() -> Module:
    """Imports what compiles and launches kernels on GPUs; it opens neither the driver nor NVRTC."""
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


def _launcher_here() -> Module:
    """The launcher, and whether it can compile for this machine's GPUs."""
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
    return _load_cpu() if platform == "cpu" else _launcher_here()


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
      An object with `version`, `jax_version`, `runtime_ffi_version` and `modules`, one entry per platform with
      `available`, `targets` and `reason`. Its repr is a few readable lines.

    >>> import jaxnorm
    >>> jaxnorm.status().modules[0].platform
    'cpu'
    """
    modules = tuple(module(platform) for platform in PLATFORMS)
    return Status(VERSION, jax.__version__, _runtime_ffi_version(), modules)


_load_cpu()
_load_launcher()
