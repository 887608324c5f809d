"""Runs a program until it is captured; reads from its dump what the command buffers hold."""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

x = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)


def f(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(jaxnorm.softmax(jaxnorm.relu(x)))))(x)


def reference(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(jax.nn.softmax(jnp.where(x > 0, x, 0)))))(x)


captured = jax.jit(f)
for _ in range(10):
    y = captured(x)
error = float(jnp.max(jnp.abs(y - jax.jit(reference)(x))))

# A command buffer is a line kCommandBuffer; the thunks it replays follow, further indented.
dumps = [p for p in pathlib.Path(sys.argv[1]).iterdir() if "thunk" in p.name and "jit_f" in p.name]
inside = set()
for path in dumps:
    depth = None
    for line in path.read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if "kCommandBuffer" in line:
            depth = indent
        elif depth is not None and indent <= depth:
            depth = None
        if depth is not None:
            inside.update(re.findall(r"jaxnorm_\w+?_(?:fwd|bwd)", line))
print(json.dumps({"error": error, "thunks": [p.name for p in dumps], "captured": sorted(inside)}))
