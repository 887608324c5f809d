"""Formulas that the tests of autofuse are about, and arrays for them."""

import jax.numpy as jnp
from jax import lax
from suite import rand

X, Y = rand((4, 6, 16)), rand((4, 6, 16), seed=3)
S, B = rand((16,), seed=1), rand((16,), seed=2)
WHERE = jnp.arange(16) < jnp.array([16, 9, 3, 1, 12, 0])[:, None]


def mean_of(x, axis=-1, **kwargs):
    return jnp.mean(x, axis, keepdims=True, **kwargs)


def variance_of(x, axis=-1, **kwargs):
    return jnp.var(x, axis, keepdims=True, **kwargs)


def deviation_of(x, axis=-1):
    return x - mean_of(x, axis)


def layer_norm(x, scale=S, bias=B, epsilon=1e-5):
    mean = x.mean(-1, keepdims=True)
    deviation = x - mean
    variance = jnp.mean(deviation * deviation, -1, keepdims=True)
    return deviation / jnp.sqrt(variance + epsilon) * scale + bias


def batch_norm(x, scale=S, bias=B, axes=(0, 1)):
    mean = x.mean(axes, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias, mean, variance


def normalised(x, mean, variance, scale=S, bias=B):
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias
