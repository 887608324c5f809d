"""`import jaxnorm` with a launcher that counts how often it is asked for GPUs."""

import importlib.machinery
import json
import pathlib
import sys
import types

import jax

asked = []
fake = types.ModuleType("jaxnorm._launcher")
fake.types = dict
fake.targets = lambda: {"launch": None}
fake.configure = lambda *_: None
fake.compiler = lambda: (13, 0, "libnvrtc.so.13", "", "")
fake.gpus = lambda: (asked.append(1), ([("Old GPU", 70, 80, 96 << 10, 6 << 20)], ""))[1]


class Finder:
    """Answers for the launcher before the real one is looked for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, Finder) if name == fake.__name__ else None

    @staticmethod
    def create_module(spec):
        return fake

    @staticmethod
    def exec_module(module):
        from jaxnorm import _lib

        fake.XLA_FFI_API_VERSION = _lib._runtime_ffi_version()


sys.meta_path.insert(0, Finder)
registered = []
register = jax.ffi.register_ffi_target
jax.ffi.register_ffi_target = lambda name, *args, platform, **kwargs: (
    registered.append(name)
    if platform == "CUDA"
    else register(name, *args, platform=platform, **kwargs)
)

import jaxnorm  # noqa: E402

on_import = len(asked)
opened = [
    lib for lib in ("libcuda", "libnvrtc") if lib in pathlib.Path("/proc/self/maps").read_text()
]
cuda = jaxnorm.status().modules[1]
jaxnorm.status()
print(
    json.dumps(
        {
            "on_import": on_import,
            "opened": opened,
            "registered": registered,
            "asked": len(asked),
            "targets": sorted(cuda.targets),
            "reason": cuda.reason,
        }
    )
)
