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


labels = np.random.default_rng(2).integers(0, 1000, 64)


def f(x):
    def loss(x):
        y = jaxnorm.layer_norm(jaxnorm.batch_norm(jaxnorm.relu(x))[0])
        losses = jaxnorm.softmax_cross_entropy(y, labels)
        return jnp.sum(jnp.sin(jaxnorm.softmax(y))) + jnp.sum(jnp.sin(losses))

    return jax.grad(loss)(x)


def reference(x):
    def loss(x):
        y = jax.nn.standardize(jnp.where(x > 0, x, 0), axis=0, epsilon=1e-5)
        y = jax.nn.standardize(y, epsilon=1e-6)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], 1)
        return jnp.sum(jnp.sin(jax.nn.softmax(y))) + jnp.sum(jnp.sin(losses))

    return jax.grad(loss)(x)


captured = jax.jit(f)
for _ in range(10):
    y = captured(x)
error = float(jnp.max(jnp.abs(y - jax.jit(reference)(x))))

# Blocks of few rows or features tell each other of them by way of memory, whose contents a graph finds as it left them.
few = jnp.asarray(np.random.default_rng(1).standard_normal((5, 70000), np.float32))
few_rows_alike = True
for normalize in (jaxnorm.layer_norm, lambda x: jaxnorm.batch_norm(x, axis=0)[0]):
    compiled = jax.jit(normalize)
    results = [np.asarray(compiled(few + i % 2)) for i in range(10)]
    few_rows_alike &= all(np.array_equal(results[i], results[i % 2]) for i in range(10))


# So do they of sums for the gradients of parameters; those of many rows a second launch adds up, which begins early.
def gradients(x, scale, bias):
    def loss(*args):
        return jnp.sum(jnp.sin(jaxnorm.layer_norm(*args)))

    return jax.grad(loss, (0, 1, 2))(x, scale, bias)


gradients_alike = True
for shape in (few.shape, (5000, 128), (3000, 1024), (700, 4096)):
    many = jnp.resize(few, shape)
    scale, bias = many[0] + 1, many[1]
    compiled = jax.jit(gradients)
    results = [jax.device_get(compiled(many * (i % 2 + 1), scale, bias)) for i in range(10)]
    expected = [jax.device_get(gradients(many * (i + 1), scale, bias)) for i in range(2)]
    for i, result in enumerate(results):
        gradients_alike &= all(map(np.array_equal, result, results[i % 2]))
        gradients_alike &= all(
            np.allclose(a, b, rtol=1e-4, atol=1e-3)
            for a, b in zip(result, expected[i % 2], strict=True)
        )

# The thunk sequence has a line per thunk with its number, those of a command buffer further indented than it; the
# metadata names the thunks.
dump = {
    kind: next(iter(pathlib.Path(sys.argv[1]).glob(f"*jit_f.{kind}.txt")), None)
    for kind in ("thunk_sequence_after_thunk_passes", "thunk_metadata")
}
names = {}
if dump["thunk_metadata"]:
    for info in dump["thunk_metadata"].read_text().split("thunk_metadata {"):
        name = re.search(r'profile_annotation: "(jaxnorm_\w+?_(?:fwd|bwd|stats|sums|dx))', info)
        number = re.search(r"thunk_id: (\d+)", info)
        if name and number:
            names[int(number.group(1))] = name.group(1)
captured_names, depth = set(), None
if dump["thunk_sequence_after_thunk_passes"]:
    for line in dump["thunk_sequence_after_thunk_passes"].read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if depth is not None and indent <= depth:
            depth = None
        if "kCommandBuffer" in line:
            depth = indent
        elif depth is not None:
            captured_names.add(names.get(int(line.split(":")[0])))
print(
    json.dumps(
        {
            "error": error,
            "few_rows_alike": few_rows_alike,
            "gradients_alike": gradients_alike,
            "thunks": [p.name for p in dump.values() if p],
            "captured": sorted(captured_names - {None}),
        }
    )
)
