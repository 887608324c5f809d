"""Models of users in plain JAX, for `python -m bench.train`: none of them has a jaxnorm call.

Each is a loss of parameters and a batch. Parameters are float32; they are cast to the compute dtype where they are used,
as mixed-precision training does. Layers are a loop, as in most code.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Parameters = Any


def _rms_norm(x, scale, epsilon=1e-6):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + epsilon)
    return (h * scale).astype(x.dtype)


def _layer_norm(x, scale=None, bias=None, epsilon=1e-6):
    h = x.astype(jnp.float32)
    mean = jnp.mean(h, -1, keepdims=True)
    variance = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
    h = (h - mean) * jax.lax.rsqrt(variance + epsilon)
    if scale is not None:
        h = h * scale + bias
    return h.astype(x.dtype)


def _dense(key, rows, columns):
    return jax.random.normal(key, (rows, columns), jnp.float32) * rows**-0.5


def _attention(q, k, v, causal):
    """Of [batch, tokens, heads, width], by cuDNN where that is there."""
    on_gpu = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    implementation = "cudnn" if on_gpu else None
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation=implementation
    )


def _dropout(key, x, rate):
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


# ---- a language model: RMSNorm, rotary embedding, SwiGLU ----


def llama_parameters(key, *, layers, width, heads, hidden, tokens) -> Parameters:
    def block(key):
        k = jax.random.split(key, 4)
        return {
            "norm1": jnp.ones(width),
            "qkv": _dense(k[0], width, 3 * width),
            "out": _dense(k[1], width, width),
            "norm2": jnp.ones(width),
            "gate_up": _dense(k[2], width, 2 * hidden),
            "down": _dense(k[3], hidden, width),
        }

    keys = jax.random.split(key, layers + 2)
    return {
        "embedding": jax.random.normal(keys[0], (tokens, width)) * 0.02,
        "blocks": [block(k) for k in keys[2:]],
        "norm": jnp.ones(width),
        "head": _dense(keys[1], width, tokens),
    }


def _rotary(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x.dtype)


def llama_loss(params, tokens, *, heads, dtype=jnp.bfloat16):
    """Mean loss of the next token; logits in float32."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"].astype(dtype)[inputs]
    batch, length, width = x.shape
    depth = width // heads
    angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, depth, 2) / depth)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    for p in params["blocks"]:
        h = _rms_norm(x, p["norm1"]) @ p["qkv"].astype(dtype)
        q, k, v = (a.reshape(batch, length, heads, depth) for a in jnp.split(h, 3, -1))
        h = _attention(_rotary(q, cos, sin), _rotary(k, cos, sin), v, causal=True)
        x = x + h.reshape(batch, length, width) @ p["out"].astype(dtype)
        h = _rms_norm(x, p["norm2"]) @ p["gate_up"].astype(dtype)
        gate, up = jnp.split(h, 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ p["down"].astype(dtype)
    logits = _rms_norm(x, params["norm"]) @ params["head"].astype(dtype)
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# ---- a diffusion transformer: adaptive LayerNorm ----


def dit_parameters(key, *, layers, width, heads, channels) -> Parameters:
    def block(key):
        k = jax.random.split(key, 5)
        return {
            "modulation": 0.02 * _dense(k[0], width, 6 * width),
            "qkv": _dense(k[1], width, 3 * width),
            "out": _dense(k[2], width, width),
            "up": _dense(k[3], width, 4 * width),
            "up_bias": jnp.zeros(4 * width),
            "down": _dense(k[4], 4 * width, width),
            "down_bias": jnp.zeros(width),
        }

    keys = jax.random.split(key, layers + 2)
    return {
        "patch": _dense(keys[0], channels, width),
        "blocks": [block(k) for k in keys[2:]],
        "head": _dense(keys[1], width, channels),
    }


def dit_loss(params, patches, condition, noise, *, heads, dtype=jnp.bfloat16):
    """Squared error of the noise that is predicted for patches [batch, tokens, channels]."""
    x = patches.astype(dtype) @ params["patch"].astype(dtype)
    batch, length, width = x.shape
    for p in params["blocks"]:
        modulation = jax.nn.silu(condition).astype(dtype) @ p["modulation"].astype(dtype)
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            m[:, None] for m in jnp.split(modulation, 6, -1)
        )
        h = _layer_norm(x) * (1 + scale1) + shift1
        q, k, v = jnp.split(h @ p["qkv"].astype(dtype), 3, -1)
        q, k, v = (a.reshape(batch, length, heads, width // heads) for a in (q, k, v))
        h = _attention(q, k, v, causal=False).reshape(batch, length, width)
        x = x + gate1 * (h @ p["out"].astype(dtype))
        h = _layer_norm(x) * (1 + scale2) + shift2
        h = jax.nn.gelu(h @ p["up"].astype(dtype) + p["up_bias"].astype(dtype))
        x = x + gate2 * (h @ p["down"].astype(dtype) + p["down_bias"].astype(dtype))
    predicted = _layer_norm(x) @ params["head"].astype(dtype)
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - noise))


# ---- a vision transformer with dropout ----


def vit_parameters(key, *, layers, width, heads, channels, classes) -> Parameters:
    def block(key):
        k = jax.random.split(key, 4)
        norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        return {
            "norm1": norm,
            "qkv": _dense(k[0], width, 3 * width),
            "qkv_bias": jnp.zeros(3 * width),
            "out": _dense(k[1], width, width),
            "out_bias": jnp.zeros(width),
            "norm2": dict(norm),
            "up": _dense(k[2], width, 4 * width),
            "up_bias": jnp.zeros(4 * width),
            "down": _dense(k[3], 4 * width, width),
            "down_bias": jnp.zeros(width),
        }

    keys = jax.random.split(key, layers + 2)
    return {
        "patch": _dense(keys[0], channels, width),
        "blocks": [block(k) for k in keys[2:]],
        "norm": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "head": _dense(keys[1], width, classes),
    }


def vit_loss(params, patches, labels, key, *, heads, rate=0.1, dtype=jnp.bfloat16):
    """Mean cross-entropy of patches [batch, tokens, channels]."""
    x = patches.astype(dtype) @ params["patch"].astype(dtype)
    batch, length, width = x.shape
    for i, p in enumerate(params["blocks"]):
        keys = jax.random.split(jax.random.fold_in(key, i), 3)
        h = _layer_norm(x, **p["norm1"]) @ p["qkv"].astype(dtype) + p["qkv_bias"].astype(dtype)
        q, k, v = (a.reshape(batch, length, heads, -1) for a in jnp.split(h, 3, -1))
        h = _attention(q, k, v, causal=False).reshape(batch, length, width)
        h = h @ p["out"].astype(dtype) + p["out_bias"].astype(dtype)
        x = x + _dropout(keys[0], h, rate)
        h = _layer_norm(x, **p["norm2"]) @ p["up"].astype(dtype) + p["up_bias"].astype(dtype)
        h = _dropout(keys[1], jax.nn.gelu(h), rate)
        h = h @ p["down"].astype(dtype) + p["down_bias"].astype(dtype)
        x = x + _dropout(keys[2], h, rate)
    pooled = _layer_norm(x, **params["norm"]).mean(1)
    logits = (pooled @ params["head"].astype(dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# ---- a state-space block: gated RMSNorm behind a linear recurrence ----


def mamba_parameters(key, *, layers, width, channels) -> Parameters:
    def block(key):
        k = jax.random.split(key, 3)
        return {
            "norm": jnp.ones(width),
            "in": _dense(k[0], width, 4 * width),
            "decay": jnp.zeros(2 * width),
            "gated_norm": jnp.ones(2 * width),
            "out": _dense(k[1], 2 * width, width),
        }

    keys = jax.random.split(key, layers + 2)
    return {
        "patch": _dense(keys[0], channels, width),
        "blocks": [block(k) for k in keys[2:]],
        "head": _dense(keys[1], width, channels),
    }


def mamba_loss(params, sequence, target, *, dtype=jnp.bfloat16):
    """Squared error of a sequence [batch, tokens, channels] that is predicted."""
    x = sequence.astype(dtype) @ params["patch"].astype(dtype)

    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    for p in params["blocks"]:
        h = _rms_norm(x, p["norm"]) @ p["in"].astype(dtype)
        z, u = jnp.split(h, 2, -1)
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["decay"]).astype(dtype), u.shape)
        _, h = jax.lax.associative_scan(combine, (decay, u), axis=1)
        h = _rms_norm(h * jax.nn.silu(z), p["gated_norm"])
        x = x + h @ p["out"].astype(dtype)
    return jnp.mean(jnp.square((x @ params["head"].astype(dtype)).astype(jnp.float32) - target))


# ---- the loss of reinforcement learning with a language model ----


def rl_loss(params, reference, tokens, advantages, old, *, clip=0.2, kl=0.1, entropy=0.01):
    """Clipped policy gradient with a KL penalty, of logits [rows, tokens]."""
    logits = params["logits"].astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, tokens[:, None], -1)[:, 0]
    ratio = jnp.exp(chosen - old)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    p = jnp.exp(log_p)
    log_q = jax.nn.log_softmax(reference.astype(jnp.float32))
    divergence = jnp.sum(p * (log_p - log_q), -1)
    uncertainty = -jnp.sum(p * log_p, -1)
    return jnp.mean(-gain + kl * divergence - entropy * uncertainty)


def with_sizes(loss: Callable, **sizes) -> Callable:
    return functools.partial(loss, **sizes)
