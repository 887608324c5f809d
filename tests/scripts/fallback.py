"""jaxnorm next to a compiled CPU module that cannot be used; the argument says why."""

import importlib
import json
import pathlib
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np

situation = sys.argv[1]
header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
version = {}
for line in header.read_text().splitlines():
    words = line.split()
    if len(words) == 3 and words[1] in ("XLA_FFI_API_MAJOR", "XLA_FFI_API_MINOR"):
        version[words[1][-5:]] = int(words[2])
major, minor = version["MAJOR"], version["MINOR"]

fake = types.ModuleType("jaxnorm._cpu")
fake.targets = lambda: {"something": None}
fake.XLA_FFI_API_VERSION = {
    "newer minor": (major, minor + 1),
    "older minor": (major, minor - 1),
    "other major": (major + 1, 0),
}.get(situation, (major, minor))


class Finder:
    """Answers for the compiled modules before the real ones are looked for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "jaxnorm._launcher" or (name == "jaxnorm._cpu" and situation == "missing"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "jaxnorm._cpu" and situation == "broken":
            raise ImportError("undefined symbol: nothing")
        if name == "jaxnorm._cpu":
            return importlib.machinery.ModuleSpec(name, Finder)
        return None

    @staticmethod
    def create_module(spec):
        return fake

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.insert(0, Finder)
registered = []
register = jax.ffi.register_ffi_target
jax.ffi.register_ffi_target = lambda name, *_, **__: registered.append(name)
if situation == "no headers":
    jax.ffi.include_dir = lambda: "/nowhere"

import jaxnorm  # noqa: E402

x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 9)), "float32")
calls = {
    "softmax": (jaxnorm.softmax, jax.nn.softmax, (x,)),
    "log_softmax": (jaxnorm.log_softmax, jax.nn.log_softmax, (x,)),
    "relu": (jaxnorm.relu, jax.nn.relu, (x,)),
    "add_relu": (jaxnorm.add_relu, lambda x, y: jax.nn.relu(x + y), (x, x)),
    "layer_norm": (jaxnorm.layer_norm, lambda x: jax.nn.standardize(x, epsilon=1e-6), (x,)),
    "rms_norm": (
        jaxnorm.rms_norm,
        lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6),
        (x,),
    ),
}
errors, kernel = {}, {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for op, (f, g, args) in calls.items() if situation != "older minor" else ():
        both = [(h, jax.grad(lambda *a, h=h: jnp.sum(jnp.sin(h(*a))))) for h in (f, g)]
        results = jax.jit(lambda *a, both=both: [(h(*a), bar(*a)) for h, bar in both])(*args)
        pairs = zip(*results, strict=True)
        errors[op] = max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
        try:
            f(*args, implementation="kernel")
            kernel[op] = "no error"
        except ValueError as error:
            kernel[op] = str(error).splitlines()[0]
print(
    json.dumps(
        {
            "jax": float(jnp.sum(jnp.arange(4.0))),
            "registered": registered,
            "reason": jaxnorm.status().modules[0].reason,
            "cuda": jaxnorm.status().modules[1].reason,
            "repr": repr(jaxnorm.status()),
            "warnings": [(w.category.__name__, str(w.message)) for w in caught],
            "errors": errors,
            "kernel": kernel,
        }
    )
)
