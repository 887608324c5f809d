"""The target jaxnorm_launch, registered for the CPU: XLA decodes its attributes there too."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
from launches import call, run

from jaxnorm import _launcher

x = jnp.ones(
    (10, 64)
)  # which starts the backend: the CPU's takes handlers before types that wait for it
for name, registration in _launcher.types().items():
    jax.ffi.register_ffi_type(f"cpu_{name}", registration, platform="cpu")
for name, stages in _launcher.targets().items():
    jax.ffi.register_ffi_target(f"jaxnorm_{name}", stages, platform="cpu")

launches = call().attributes["launches"].copy()
launches[5] = 4096
changes = {
    "good": {},
    "version": dict(version=np.int64(7)),
    "threads": dict(launches=launches),
    "source": dict(source=np.int64(1)),
    "sizes": dict(sizes=np.array([0, 0, 1], np.int32)),
    "missing": dict(row_tiles=None),
}
results = {}
for case, change in changes.items():
    try:
        compiled = jax.jit(lambda x, c=change: run(call(), x, x, **c)).lower(x).compile()
    except Exception as error:
        results[case] = f"refused: {error}"
        continue
    try:
        jax.block_until_ready(compiled(x))
        results[case] = "executed"
    except Exception as error:
        results[case] = f"executed: {'no stream' if 'stream' in str(error) else error}"
print(json.dumps(results))
