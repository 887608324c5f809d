"""One of two processes (arguments: rank, port): forward and gradient on a mesh over both."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm

rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
full = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
OPS = ("softmax", "log_softmax", "relu", "add_relu", "layer_norm", "rms_norm")


def call(op, x):
    function = getattr(jaxnorm, op)
    return function(x, x * 0.5) if op == "add_relu" else function(x)


@jax.jit
def forward_and_gradient(x):
    def gradient(op):
        return jax.grad(lambda x: jnp.sum(jnp.sin(call(op, x))))(x)

    return {op: (call(op, x), gradient(op)) for op in OPS}


errors = dict.fromkeys(OPS, 0.0)
alone = forward_and_gradient(jax.device_put(full, jax.local_devices()[0]))
for spec in (P("d", None), P(("d", "m"), None), P("d", "m"), P(None, ("d", "m"))):
    x = jax.make_array_from_callback(full.shape, NamedSharding(mesh, spec), lambda i: full[i])
    results = forward_and_gradient(x)
    for op in OPS:
        for got, want in zip(results[op], alone[op], strict=True):
            for shard in got.addressable_shards:
                error = np.abs(np.asarray(shard.data) - np.asarray(want)[shard.index]).max()
                errors[op] = max(errors[op], float(error))

# batch_norm combines statistics, of unequal counts, over both processes: under jit and inside shard_map.
mask = np.random.default_rng(1).random((16, 1)) < np.linspace(-0.3, 1, 16).reshape(16, 1)


def norm(x, mask, axis_name=None):
    return jaxnorm.batch_norm(x + 4, activation="relu", mask=mask, axis_name=axis_name)


def norm_and_gradient(x, mask, function=norm):
    y, mean, var = function(x, mask)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(function(x, mask)[0])))(x)
    return y, gradient, mean, var


rows = P(("d", "m"), None)
mapped = jax.shard_map(
    functools.partial(norm, axis_name=("d", "m")),
    mesh=mesh,
    in_specs=(rows, rows),
    out_specs=(rows, P(), P()),
)
alone = jax.jit(norm_and_gradient)(
    *(jax.device_put(a, jax.local_devices()[0]) for a in (full, mask))
)
x, keep = (
    jax.make_array_from_callback(a.shape, NamedSharding(mesh, rows), lambda i, a=a: a[i])
    for a in (full, mask)
)
for name, function in (("batch_norm", norm), ("batch_norm in shard_map", mapped)):
    errors[name] = 0.0
    program = jax.jit(functools.partial(norm_and_gradient, function=function))
    for got, want in zip(program(x, keep), alone, strict=True):
        for shard in got.addressable_shards:
            error = np.abs(np.asarray(shard.data) - np.asarray(want)[shard.index])
            errors[name] = max(errors[name], float((error / (1 + np.abs(shard.data))).max()))
print(
    json.dumps({"processes": jax.process_count(), "devices": jax.device_count(), "errors": errors})
)
