"""Settings that must be made before jax starts a backend."""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import sys

# Sharding is tested on eight CPU devices in this process; everything else uses the first one.
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
# Most of the time goes into compiling small programs, which takes 40% less without LLVM's optimisations. Where there is
# JAX for a GPU it compiles as always: some arrays there are large.
if importlib.util.find_spec("jax_plugins") is None:
    flags.append("--xla_backend_optimization_level=0")
    # The oldest jaxlib can compile fusions in the way before: another third less. Later ones refuse the flag.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join(flags).strip()
# Tracing makes many small objects and few cycles: looking for those as often as Python does takes 6% of the time.
gc.set_threshold(100_000)
# The tests share bench.cases, which is not part of the installed package. Last on the path, so that ./jaxnorm, which
# has no compiled modules, does not hide the installed package.
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != ROOT] + [str(ROOT)]

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
# Where in a test each equation comes from nobody reads: 5% of the time.
jax.config.update("jax_traceback_in_locations_limit", 0)
# A strong type that slips into a rule would change the dtype of users' results: make it an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items):
    if any(d.platform == "gpu" for d in jax.devices()):
        return
    skip = pytest.mark.skip(reason="JAX has no GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def row_programs_where_asked(request, monkeypatch):
    """What autofuse finds by default is that of a CPU on machines with a GPU too, where tests and pages say what."""
    from jaxnorm.autofuse import Autofused

    if request.module.__name__.startswith(("test_autofuse", "test_docs")):
        monkeypatch.setattr(Autofused, "_grows", lambda self: self._platform == "gpu")
