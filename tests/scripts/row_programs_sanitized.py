"""Row programs of each schedule and kind, one run of each, for compute-sanitizer; see tests/test_fuse_gpu.py.

Operands are copied from the host, so that a tool that follows the kernels named jaxnorm_* alone knows of all of them.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent.parent))
import jaxnorm
from bench import row_programs as table
from jaxnorm._rows import launcher, primitive
from jaxnorm._rows.call import row_call, simplified
from jaxnorm._rows.plan import DEVICES, Device
from jaxnorm._rows.schedule import schedule


def relu_of_sum(x, y):
    return jax.nn.relu(x + y)


def dropout(x, scale, key):
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape)
    return table.layer_norm(jnp.where(keep, x, 0), scale, scale)


def head(logits, labels, weights):
    """The gradient of a weighted cross-entropy beside its loss, as linear_cross_entropy computes both."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    hit = jnp.arange(logits.shape[-1]) == labels
    loss = -jnp.sum(jnp.where(hit, log_p, 0), -1, keepdims=True)
    return (weights * (jnp.exp(log_p) - hit) + loss).astype(logits.dtype)


NORM, SUM = ("whole", "column", "column"), ("whole", "whole")
KEY = ("whole", "column", "key")
# name: (function, its arguments, shape of the whole ones, fields of the schedule)
PROGRAMS = {
    "registers": (table.layer_norm, NORM, (33, 512), {"source": "registers", "lanes": 64}),
    "short rows": (table.softmax, ("whole",), (300, 8), {}),
    "ring": (table.layer_norm, NORM, (70, 512), {"source": "ring", "lanes": 32}),
    "ring of two rows": (
        table.soft_capped_softmax, ("whole",), (70, 256), {"source": "ring", "lanes": 8, "rows_at_once": 2},
    ),
    "ring of wide rows": (
        table.layer_norm_gelu, NORM, (300, 1024), {"source": "ring", "lanes": 64, "stages": 3},
    ),
    "cluster": (table.softmax, ("whole",), (20, 2048), {"source": "ring", "cluster": 2, "lanes": 64}),
    "cluster with sums": (table.layer_norm, NORM, (20, 2048), {"source": "ring", "cluster": 4, "lanes": 64}),
    "parts of rows": (
        table.soft_capped_softmax, ("whole",), (300, 4096),
        {"source": "ring", "parts": True, "lanes": 64, "slots": 1},
    ),
    "cluster with parts of rows": (
        table.softmax, ("whole",), (300, 4096),
        {"source": "ring", "parts": True, "cluster": 2, "lanes": 64, "slots": 1, "rows_at_once": 2},
    ),
    "head of a language model": (
        head, ("whole", "label", "row"), (300, 4096),
        {"source": "ring", "parts": True, "cluster": 2, "lanes": 64, "slots": 1},
    ),
    "stream": (table.layer_norm, NORM, (9, 4096), {"source": "stream", "lanes": 64, "slots": 1}),
    "shifted": (table.layer_norm, NORM, (37, 1023), {}),
    "shifted ring": (table.softmax, ("whole",), (37, 1023), {"source": "ring"}),
    "results of rows": (table.entropy, ("whole",), (9, 5003), {}),
    "bits": (relu_of_sum, SUM, (33, 523), {}),
    "random": (dropout, KEY, (33, 256), {}),
    "shared rows": (table.softmax, ("whole",), (9, 16384), {"grid": 2, "cluster": 4, "lag": 1}),
    "shared rows with sums": (table.layer_norm, NORM, (9, 16384), {"grid": 1, "cluster": 5}),
    "shared rows with moments": (jaxnorm.layer_norm, NORM, (9, 16384), {"grid": 1, "cluster": 5}),
    "shared rows in few stages": (
        table.layer_norm, NORM, (9, 16384), {"grid": 1, "cluster": 5, "stages": 4},
    ),
    "steps of a cluster": (
        table.layer_norm, NORM, (200, 4096), {"source": "ring", "cluster": 4, "lag": 1, "lanes": 64, "stages": 8},
    ),
    "steps of a cluster in few stages": (
        table.layer_norm, NORM, (600, 4096), {"source": "ring", "cluster": 4, "lag": 1, "lanes": 64},
    ),
    "groups": (table.adaptive_layer_norm, ("whole", "group", "group"), (3, 40, 256), {}),
}  # fmt: skip

gpu = next(iter(launcher.gpus()), None)
device = (
    Device(gpu.architecture, gpu.multiprocessors, gpu.shared_bytes, gpu.name)
    if gpu
    else DEVICES[90]
)
plans = {}


def run(name) -> bool:
    """Result and gradients of a program; whether they are finite."""
    function, kinds, shape, asked = PROGRAMS[name]
    generator = np.random.default_rng(0)
    integers = {
        "key": np.array([1, 2], np.uint32),
        "label": np.arange(shape[0], dtype=np.int32)[:, None] * 7 % shape[-1],
    }
    shapes = {
        "whole": shape,
        "column": shape[-1:],
        "group": (shape[0], shape[-1]),
        "row": (shape[0], 1),
    }

    def floats(kind):
        dtype = np.float32 if kind in ("column", "row") else jnp.bfloat16
        return generator.standard_normal(shapes[kind]).astype(dtype)

    args = [integers[kind] if kind in integers else floats(kind) for kind in kinds]
    moving = tuple(i for i, kind in enumerate(kinds) if kind not in integers)

    def call(closed):
        plan = schedule(simplified(closed), device, **asked)
        plans.setdefault(name, []).append(str(plan))
        return row_call(closed, device, plan)

    primitive.compiled_call = call
    fused = jaxnorm.fuse(function)
    result = jax.eval_shape(fused, *args)
    cotangent = generator.standard_normal(result.shape).astype(result.dtype)

    @jax.jit
    def both(args, cotangent):
        given = list(args)

        def of(*some):
            for i, x in zip(moving, some, strict=True):
                given[i] = x
            return fused(*given)

        y, pullback = jax.vjp(of, *(args[i] for i in moving))
        return y, pullback(cotangent)

    results = jax.tree.leaves(jax.device_get(both(jax.device_put(args), jax.device_put(cotangent))))
    return all(bool(np.isfinite(r.astype(np.float32)).all()) for r in results)


# What is not checked is named with a minus sign in front.
without = {name[1:] for name in sys.argv[1:] if name.startswith("-")}
names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(PROGRAMS)
names = [name for name in names if name not in without]
print(json.dumps({"finite": {name: run(name) for name in names}, "plans": plans}))
