"""Writes an exported program (arguments: write, path), or only runs one (read, path)."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp

mode, path = sys.argv[1], pathlib.Path(sys.argv[2])
x = jnp.linspace(-2, 2, 24).reshape(4, 6)
if mode == "write":
    import jaxnorm

    def f(x):
        return jax.grad(lambda x: jnp.sum(jaxnorm.softmax(jaxnorm.relu(x)) ** 2))(x)

    exported = jax.export.export(jax.jit(f), disabled_checks=jaxnorm.export_checks())(x)
    path.write_bytes(exported.serialize())
    print(
        json.dumps(
            {
                "result": jax.jit(f)(x).tolist(),
                "custom_calls": exported.mlir_module().count("@jaxnorm_"),
            }
        )
    )
else:
    exported = jax.export.deserialize(path.read_bytes())
    result = exported.call(x).tolist()
    print(json.dumps({"result": result}))
