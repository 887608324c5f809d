"""What the tests of autofuse's row programs share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autofuse_checks import assert_close
from suite import rand

import jaxnorm
from jaxnorm._autofuse import regions

PROGRAM = "jaxnorm_row_program"
LEAST_BYTES = regions.LEAST_BYTES


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """Small arrays count, and the libraries are written for JAX's own settings but the products of some GPUs."""
    monkeypatch.setattr(regions, "LEAST_BYTES", 0)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.enable_x64(False),
        jax.default_matmul_precision("highest"),
    ):
        yield


def grown(function):
    return jaxnorm.autofuse(function, platform="gpu")


def found(function, *args):
    """All row programs of a report, those that are left too."""
    return grown(function).explain(*args).row_programs


def kernels(function, *args):
    return [p for p in found(function, *args) if p.kernel is not None]


def of(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def nbytes(*structs) -> int:
    return sum(np.prod(s.shape, dtype=int) * np.dtype(s.dtype).itemsize for s in structs)


def weighted(out):
    """A number that no two results or positions can be exchanged in unnoticed."""
    floats = [o for o in jax.tree.leaves(out) if jnp.issubdtype(o.dtype, jnp.floating)]
    weights = [np.cos(np.arange(o.size) * (1.7 + i)).reshape(o.shape) for i, o in enumerate(floats)]
    return sum(
        jnp.sum(o.astype(jnp.float32) * w.astype(np.float32))
        for o, w in zip(floats, weights, strict=True)
    )


def assert_same(function, *args, tolerance=2e-5, eager=False):
    """Values, and gradients of both orders of autofuse and grad, are those of the plain function."""

    def with_gradient(f):
        numbers = [
            i
            for i, a in enumerate(args)
            if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(a))
        ]

        def loss(*args):
            out = f(*args)
            return weighted(out), out

        return jax.value_and_grad(loss, argnums=numbers, has_aux=True)

    @jax.jit
    def results(*args):
        forms = with_gradient(grown(function)), grown(with_gradient(function))
        return with_gradient(function)(*args), [f(*args) for f in forms], grown(function)(*args)

    expected, differentiated, value = results(*args)
    for got in differentiated:
        assert_close(got, expected, tolerance)
    assert_close(value, expected[0][1], tolerance)
    if eager:
        assert_close(grown(with_gradient(function))(*args), expected, tolerance)
        assert_close(with_gradient(grown(function))(*args), expected, tolerance)


def layer_norm(x, scale=None, bias=None):
    h = x.astype(jnp.float32)
    mean = h.mean(-1, keepdims=True)
    variance = jnp.mean((h - mean) ** 2, -1, keepdims=True)
    h = (h - mean) * jax.lax.rsqrt(variance + 1e-6)
    if scale is not None:
        h = h * scale + bias
    return h.astype(x.dtype)


def layer(x, scale, bias):
    """No operation of jaxnorm's: all of it is one row program."""
    h = jnp.sin(x)
    h = h - h.mean(-1, keepdims=True)
    return h / (jnp.abs(h).mean(-1, keepdims=True) + 0.1) * scale + bias


A, S, B = rand((6, 4, 16)), rand((16,), seed=1), rand((16,), seed=2)
W = rand((16, 16), seed=3, scale=0.3)
