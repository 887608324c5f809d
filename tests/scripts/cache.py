"""Compiles a program (argument: single, sharded or shard_map) and counts hits of the cache."""

import collections
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))

# Objects at other addresses than in the process before.
ballast = [object() for _ in range(np.random.default_rng().integers(100000))]
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
x = np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(16, 64)


def f(x):
    return jaxnorm.softmax(jaxnorm.relu(x * 3)) + jaxnorm.log_softmax(x)


if sys.argv[1] == "shard_map":
    f = jax.shard_map(f, mesh=mesh, in_specs=P("d", None), out_specs=P("d", None))
if sys.argv[1] != "single":
    x = jax.device_put(x, NamedSharding(mesh, P("d", None)))
counts.clear()
y = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))(x)
result = float(np.abs(np.asarray(y)).sum())
print(
    json.dumps({"hits": counts["cache_hits"], "misses": counts["cache_misses"], "result": result})
)
