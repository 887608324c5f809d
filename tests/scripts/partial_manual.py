"""shard_map with one of two mesh axes manual; the other is sharded by XLA."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm

mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
checked = []
for op in ("softmax", "log_softmax", "relu", "add_relu", "layer_norm", "rms_norm", "batch_norm"):
    function = getattr(jaxnorm, op)

    def f(x, axis_name=None, function=function, op=op):
        if op == "batch_norm":
            return function(x, activation="relu", axis_name=axis_name)[0]
        return function(x, x * 0.5) if op == "add_relu" else function(x)

    mapped = jax.shard_map(
        functools.partial(f, axis_name="d"),
        mesh=mesh,
        in_specs=P("d", None),
        out_specs=P("d", None),
        axis_names={"d"},
    )
    for spec in (P("d", None), P("d", "m")):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        np.testing.assert_allclose(jax.jit(mapped)(sharded), f(x), rtol=1e-5, atol=1e-6)
        g, h = (jax.grad(lambda x, k=k: jnp.sum(jnp.sin(k(x)))) for k in (mapped, f))
        np.testing.assert_allclose(jax.jit(g)(sharded), h(x), rtol=1e-5, atol=1e-6)
        checked.append(f"{op} {','.join(map(str, spec))}")
print(json.dumps({"checked": checked}))
