"""Two passes of batch_norm become one call in a program for CUDA, where nothing comes between them.

Without a GPU: what is lowered for one does not depend on whether there is one.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxnorm
from jaxnorm import _lib

X, C = jax.ShapeDtypeStruct((8, 4, 4, 32), "float16"), jax.ShapeDtypeStruct((32,), "float32")


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """As if the launcher could compile, here as anywhere."""
    module = _lib.Module("cuda", frozenset(["launch"]))
    monkeypatch.setattr(_lib, "module", lambda platform: module)
    jax.clear_caches()
    yield
    jax.clear_caches()


def lowered(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(function, *args):
    return re.findall(r'operation = "batch_norm_(\w+)"', lowered(function, *args))


def total(x, *args, use=lambda y, mean, var: y, **options):
    return jnp.sum(use(*jaxnorm.batch_norm(x, *args, **options)).astype("float32"))


relu = partial(total, activation="relu")


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (jaxnorm.batch_norm, (X, C, C), ["train"]),
        (partial(jaxnorm.batch_norm, axis=1), (X,), ["train"]),
        (partial(total, use=lambda *results: sum(r.astype("float32") for r in results)), (X,), ["train"]),
        # y is not needed here, but the statistics and what backward does with them are.
        (jax.grad(total), (X,), ["stats", "bwd"]),
        (jax.value_and_grad(relu, (0, 1, 2)), (X, C, C), ["train", "bwd"]),
        (jax.grad(lambda x, r: relu(x, residual=r), (0, 1)), (X, X), ["train", "bwd"]),
        # Nothing but the parameters' gradients; nothing but the residual's.
        (jax.value_and_grad(relu, 1), (X, C), ["train", "sums"]),
        (jax.value_and_grad(lambda r, x: relu(x, residual=r)), (X, X), ["train", "dx"]),
        # Cotangents of mean and var have no part in the kernel.
        (jax.grad(partial(total, use=lambda y, mean, var: y + mean.astype(y.dtype))), (X,), ["stats", "sums", "dx"]),
        # Nor have masks and given statistics.
        (lambda x: jaxnorm.batch_norm(x, mask=x[..., :1] > 0), (X,), ["stats", "fwd"]),
        (lambda x, c: jaxnorm.batch_norm_inference(x, c, c), (X, C), ["fwd"]),
        (jax.vmap(jaxnorm.batch_norm), (X,), ["train"]),
        # Statistics of one x, which are those of all examples.
        (jax.vmap(jaxnorm.batch_norm, (None, 0)), (X, jax.ShapeDtypeStruct((3, 32), "float32")), ["stats", "fwd"]),
    ],
)  # fmt: skip
def test_calls(function, args, expected):
    assert calls(function, *args) == expected


def test_only_arrays_that_a_device_may_hold():
    """Two calls, between which XLA can do what frees memory. There is no plan for a size that is not known."""
    large = jax.ShapeDtypeStruct((1024, 32, 32, 64), "float16")
    step = jax.value_and_grad(relu)
    assert calls(step, large) == ["stats", "fwd", "sums", "dx"]
    (rows,) = jax.export.symbolic_shape("rows")
    assert calls(step, jax.ShapeDtypeStruct((rows, 32, 32, 64), "float16")) == []


def block(x, c):
    return jaxnorm.batch_norm(x, c, activation="relu", residual=x)[0]


def test_in_loops_and_branches():
    """Each call replaces one of its own block."""
    layers = jax.ShapeDtypeStruct((3, 32), "float32")
    scan = lambda x, cs: jax.lax.scan(lambda x, c: (block(x, c), None), x, cs)[0]  # noqa: E731
    assert calls(scan, X, layers) == ["train"]
    gradient = jax.grad(lambda x, cs: jnp.sum(scan(x, cs).astype("float32")))
    assert calls(gradient, X, layers) == ["train", "bwd"]
    branch = lambda x, c: jax.lax.cond(c[0] > 0, block, lambda x, _: x, x, c)  # noqa: E731
    assert calls(branch, X, C) == ["train"]


def test_computed_again():
    """All of it, or with the statistics at hand one pass (JAX puts an operation behind what is kept)."""

    def of(policy):
        f = jax.checkpoint(lambda x, c: jnp.square(block(x, c)), policy=policy)
        return jax.value_and_grad(lambda x, c: jnp.sum(f(x, c).astype("float32")))

    keep = jax.checkpoint_policies.save_only_these_names("jaxnorm_batch_norm")
    assert calls(of(None), X, C) == ["train", "train", "bwd"]
    assert calls(of(keep), X, C) == ["stats", "fwd", "fwd", "bwd"]


def test_a_collective_between():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    over = partial(jax.shard_map, mesh=mesh, in_specs=P("i"))
    f = over(partial(jaxnorm.batch_norm, axis_name="i"), out_specs=(P("i"), P(), P()))
    assert calls(f, X) == ["stats", "fwd"]
    assert calls(over(lambda x: jaxnorm.batch_norm(x)[0], out_specs=P("i")), X) == ["train"]


def test_operands_and_results():
    """The call has what both had, in the order of names, and its own scratch; every use is of its results."""

    def step(x, c, running):
        def loss(x, c):
            y, mean, _ = jaxnorm.batch_norm(x, c, activation="relu")
            return jnp.sum(y.astype("float32")), mean

        gradients, mean = jax.grad(loss, (0, 1), has_aux=True)(x, c)
        return gradients, 0.9 * running + 0.1 * mean

    text = lowered(step, X, C, C)
    (train, bwd) = (
        line for line in text.splitlines() if re.search(r"batch_norm_(train|bwd)", line)
    )
    x, c = "tensor<8x4x4x32xf16>", "tensor<1x1x1x32xf32>"
    bits = "tensor<8x4x4x4xui8>"
    assert f": ({x}, {c}) -> ({x}, {bits}, {c}, {c}, tensor<" in train  # y, bits, mean, var
    results = f"({c}, {c}, {x}, tensor<"  # dbias, dscale, dx
    assert f": ({x}, {x}, {bits}, {c}, {c}, {c}) -> {results}" in bwd
    assert not re.search(r"batch_norm_(stats|fwd|sums|dx)", text)
