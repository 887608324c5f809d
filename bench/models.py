"""Models of users in plain JAX, for `python -m bench.train`: none of them has a jaxnorm call.

Each is a loss of parameters and a batch, as people write it: parameters in float32, cast where they are used, layers in
a loop, rows in functions of their own. `fused` wraps the functions of rows: with `jaxnorm.fuse` it makes the form with
calls by hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Parameters = Any


def identity(function: Callable) -> Callable:
    return function


# ---- rows ----


def _rms_norm(x, scale, epsilon=1e-6):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + epsilon)
    return (h * scale).astype(x.dtype)


def _add_rms_norm(x, y, scale):
    x = x + y
    return x, _rms_norm(x, scale)


def _gated_rms_norm(x, z, scale):
    return _rms_norm(x * jax.nn.silu(z), scale)


def _layer_norm(x, scale=None, bias=None, epsilon=1e-6):
    h = x.astype(jnp.float32)
    mean = jnp.mean(h, -1, keepdims=True)
    variance = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
    h = (h - mean) * jax.lax.rsqrt(variance + epsilon)
    if scale is not None:
        h = h * scale + bias
    return h.astype(x.dtype)


def _modulated(x, shift, scale):
    return _layer_norm(x) * (1 + scale) + shift


def _add_modulated(x, y, gate, shift, scale):
    x = x + gate * y
    return x, _modulated(x, shift, scale)


def _gelu_bias(x, bias):
    return jax.nn.gelu(x + bias.astype(x.dtype))


def _swiglu(x):
    gate, up = jnp.split(x, 2, -1)
    return jax.nn.silu(gate) * up


def _rotary(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.astype(x.dtype)


def _dropout(key, x, rate):
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def _add_dropout_layer_norm(key, x, y, bias, scale, shift, rate=0.1):
    x = x + _dropout(key, y + bias.astype(y.dtype), rate)
    return x, _layer_norm(x, scale, shift)


def _cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# ---- what they have in common ----


def _dense(key, rows, columns):
    return jax.random.normal(key, (rows, columns), jnp.float32) * rows**-0.5


def _of_patches(key, block: Callable, layers: int, widths: tuple[int, int, int]) -> dict:
    """Parameters of blocks between two products; `widths` are of what comes in, of the blocks, of the result."""
    keys = jax.random.split(key, layers + 2)
    channels, width, results = widths
    return {
        "patch": _dense(keys[0], channels, width),
        "blocks": [block(k) for k in keys[2:]],
        "head": _dense(keys[1], width, results),
    }


def _attention(q, k, v, causal):
    """Of [batch, tokens, heads, width], by cuDNN where that is there."""
    on_gpu = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    implementation = "cudnn" if on_gpu else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)


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


def head_loss(h, w, labels):
    """Mean loss of each token's class; logits in float32."""
    return _cross_entropy(h @ w, labels).mean()


def llama_loss(params, tokens, *, heads, dtype=jnp.bfloat16, fused=identity, head=head_loss):
    """Mean loss of the next token. `head` computes it from features, the last parameters and labels."""
    add_norm, rotary, swiglu = map(fused, (_add_rms_norm, _rotary, _swiglu))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"].astype(dtype)[inputs]
    batch, length, width = x.shape
    depth = width // heads
    angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, depth, 2) / depth)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    update = jnp.zeros_like(x)
    for p in params["blocks"]:
        x, h = add_norm(x, update, p["norm1"])
        q, k, v = jnp.split(h @ p["qkv"].astype(dtype), 3, -1)
        q, k, v = (a.reshape(batch, length, heads, depth) for a in (q, k, v))
        h = _attention(rotary(q, cos, sin), rotary(k, cos, sin), v, causal=True)
        x, h = add_norm(x, h.reshape(batch, length, width) @ p["out"].astype(dtype), p["norm2"])
        update = swiglu(h @ p["gate_up"].astype(dtype)) @ p["down"].astype(dtype)
    _, h = add_norm(x, update, params["norm"])
    return head(h, params["head"].astype(dtype), labels)


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

    return _of_patches(key, block, layers, (channels, width, channels))


def dit_loss(params, patches, condition, noise, *, heads, dtype=jnp.bfloat16, fused=identity):
    """Squared error of the noise that is predicted for patches [batch, tokens, channels]."""
    modulated, add_modulated, gelu_bias = map(fused, (_modulated, _add_modulated, _gelu_bias))
    x = patches.astype(dtype) @ params["patch"].astype(dtype)
    batch, length, width = x.shape
    update = gate = None
    for p in params["blocks"]:
        modulation = jax.nn.silu(condition).astype(dtype) @ p["modulation"].astype(dtype)
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            m[:, None] for m in jnp.split(modulation, 6, -1)
        )
        if update is None:
            h = modulated(x, shift1, scale1)
        else:
            x, h = add_modulated(x, update, gate, shift1, scale1)
        q, k, v = jnp.split(h @ p["qkv"].astype(dtype), 3, -1)
        q, k, v = (a.reshape(batch, length, heads, width // heads) for a in (q, k, v))
        h = _attention(q, k, v, causal=False).reshape(batch, length, width)
        x, h = add_modulated(x, h @ p["out"].astype(dtype), gate1, shift2, scale2)
        h = gelu_bias(h @ p["up"].astype(dtype), p["up_bias"])
        update = h @ p["down"].astype(dtype) + p["down_bias"].astype(dtype)
        gate = gate2
    h = _layer_norm(x + gate * update)
    predicted = h @ params["head"].astype(dtype)
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

    norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
    return _of_patches(key, block, layers, (channels, width, classes)) | {"norm1": norm}


def vit_loss(params, patches, labels, key, *, heads, dtype=jnp.bfloat16, fused=identity):
    """Mean cross-entropy of patches [batch, tokens, channels], with dropout of a tenth."""
    norm, add_norm = fused(_layer_norm), fused(_add_dropout_layer_norm)
    x = patches.astype(dtype) @ params["patch"].astype(dtype)
    batch, length, width = x.shape
    blocks = params["blocks"]
    h = norm(x, blocks[0]["norm1"]["scale"], blocks[0]["norm1"]["bias"])
    for i, p in enumerate(blocks):
        keys = jax.random.split(jax.random.fold_in(key, i), 3)
        h = h @ p["qkv"].astype(dtype) + p["qkv_bias"].astype(dtype)
        q, k, v = (a.reshape(batch, length, heads, -1) for a in jnp.split(h, 3, -1))
        h = _attention(q, k, v, causal=False).reshape(batch, length, width)
        h = h @ p["out"].astype(dtype)
        after = p["norm2"]
        x, h = add_norm(keys[0], x, h, p["out_bias"], after["scale"], after["bias"])
        h = _dropout(keys[1], _gelu_bias(h @ p["up"].astype(dtype), p["up_bias"]), 0.1)
        h = h @ p["down"].astype(dtype)
        after = (blocks[i + 1] if i + 1 < len(blocks) else params)["norm1"]
        x, h = add_norm(keys[2], x, h, p["down_bias"], after["scale"], after["bias"])
    logits = h.mean(1) @ params["head"].astype(dtype)
    return _cross_entropy(logits, labels).mean()


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

    return _of_patches(key, block, layers, (channels, width, channels))


def mamba_loss(params, sequence, target, *, dtype=jnp.bfloat16, fused=identity):
    """Squared error of a sequence [batch, tokens, channels] that is predicted."""
    norm, gated_norm = fused(_rms_norm), fused(_gated_rms_norm)
    x = sequence.astype(dtype) @ params["patch"].astype(dtype)

    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    for p in params["blocks"]:
        h = norm(x, p["norm"]) @ p["in"].astype(dtype)
        z, u = jnp.split(h, 2, -1)
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["decay"]).astype(dtype), u.shape)
        _, h = jax.lax.associative_scan(combine, (decay, u), axis=1)
        x = x + gated_norm(h, z, p["gated_norm"]) @ p["out"].astype(dtype)
    return jnp.mean(jnp.square((x @ params["head"].astype(dtype)).astype(jnp.float32) - target))


# ---- the loss of reinforcement learning with a language model ----


def _rl_rows(logits, reference, tokens, advantages, old, clip=0.2, kl=0.1, entropy=0.01):
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(log_p, tokens[:, None], -1)[:, 0]
    ratio = jnp.exp(chosen - old)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    p = jnp.exp(log_p)
    log_q = jax.nn.log_softmax(reference.astype(jnp.float32))
    divergence = jnp.sum(p * (log_p - log_q), -1)
    uncertainty = -jnp.sum(p * log_p, -1)
    return -gain + kl * divergence - entropy * uncertainty


def rl_loss(params, reference, tokens, advantages, old, *, fused=identity):
    """Clipped policy gradient with a KL penalty and an entropy bonus, of logits [rows, tokens]."""
    return jnp.mean(fused(_rl_rows)(params["logits"], reference, tokens, advantages, old))
