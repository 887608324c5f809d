"""Trains a small causal transformer on Python source with plain functions and with the same under `jaxnorm.fuse`.

Between the matrix products stand six functions of rows, in plain JAX: RMS norm, with a residual or without, the norm
of queries and keys with rotary embedding, the masked softmax of attention, SwiGLU, and the log-probability of the next
character. Same seed, same batches, same Adam: only `FUNCTIONS` differs.

    python examples/fused_transformer.py [--norm plain|fused|both] [--steps 300] [--plot FILE] [--seed 0]

Needs `pip install 'jaxnorm[bench]'`. Exits with 1 when a run learns nothing beyond how frequent each
character is, or the losses differ.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import _training
import jax
import jax.numpy as jnp
import optax
import transformer
from flax import linen as nn
from transformer import HEADS, LAYERS, LENGTH, RATE, WIDTH

import jaxnorm

EPSILON = 1e-6


# ---- functions of rows ----


def rms_norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON)
    return (y * scale).astype(x.dtype)


def add_norm(stream, branch, scale):
    """The residual stream with a branch added, and its norm."""
    stream = stream + branch
    return rms_norm(stream, scale), stream


def norm_rotary(x, scale, cos, sin):
    """Queries or keys [batch, length, heads, width]; cos and sin [length, 1, width / 2]."""
    a, b = jnp.split(rms_norm(x, scale).astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def masked_softmax(scores, where):
    y = jnp.where(where, scores.astype(jnp.float32), -jnp.inf)
    return jax.nn.softmax(y).astype(scores.dtype)


def swiglu(x):
    """Gate and up are the halves of one product."""
    gate, up = jnp.split(x, 2, -1)
    return jax.nn.silu(gate) * up


def log_probability(logits, tokens):
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0]


class Functions(NamedTuple):
    """Where the two runs differ."""

    rms_norm: Callable
    add_norm: Callable
    norm_rotary: Callable
    masked_softmax: Callable
    swiglu: Callable
    log_probability: Callable


PLAIN = Functions(rms_norm, add_norm, norm_rotary, masked_softmax, swiglu, log_probability)
FUNCTIONS = {"plain": PLAIN, "fused": Functions(*map(jaxnorm.fuse, PLAIN))}


# ---- the model ----


class Block(nn.Module):
    """Attention to the tokens before, then SwiGLU; takes and returns the stream and what is to be added."""

    functions: Functions

    @nn.compact
    def __call__(self, stream, branch):
        rows, width = self.functions, stream.shape[-1]
        length, each = stream.shape[1], width // HEADS

        def scale(name, size):
            return self.param(name, nn.initializers.ones, (size,))

        h, stream = rows.add_norm(stream, branch, scale("norm_attention", width))
        q, k, v = jnp.moveaxis(nn.DenseGeneral((3, HEADS, each), use_bias=False)(h), -3, 0)
        angles = jnp.arange(length)[:, None, None] * 100.0 ** -(jnp.arange(each // 2) / (each // 2))
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        q = rows.norm_rotary(q, scale("norm_q", each), cos, sin)
        k = rows.norm_rotary(k, scale("norm_k", each), cos, sin)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * each**-0.5
        weights = rows.masked_softmax(scores, jnp.tri(length, dtype=bool))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(stream.shape)
        branch = nn.Dense(width, use_bias=False)(mixed)

        h, stream = rows.add_norm(stream, branch, scale("norm_dense", width))
        h = rows.swiglu(nn.Dense(6 * width, use_bias=False)(h))
        return stream, nn.Dense(width, use_bias=False)(h)


class Transformer(nn.Module):
    """[batch, length] tokens -> [batch, length, tokens] logits of the token after each."""

    functions: Functions
    tokens: int
    length: int

    @nn.compact
    def __call__(self, x):
        stream = nn.Embed(self.tokens, WIDTH)(x)
        branch = jnp.zeros_like(stream)
        for _ in range(LAYERS):
            stream, branch = Block(self.functions)(stream, branch)
        scale = self.param("norm", nn.initializers.ones, (WIDTH,))
        return nn.Dense(self.tokens)(self.functions.rms_norm(stream + branch, scale))


def model_of(network: Transformer, seed: int) -> _training.Model:
    """The loss is a function of parameters and of tokens, each the target of those before it."""

    def loss_of(params, rest, tokens):
        logits = network.apply({"params": params}, tokens[:, :-1])
        return -network.functions.log_probability(logits, tokens[:, 1:]).mean(), rest

    start = jax.jit(network.init)(jax.random.key(seed), jnp.zeros((1, network.length), jnp.int32))
    return _training.Model(loss_of, start["params"], None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _training.norm_parser(__doc__, tuple(FUNCTIONS))
    options = _training.finish_parsing(parser, argv, steps=300, plot="fused_transformer.png")
    text = transformer.source()
    networks = {
        name: Transformer(functions, len(text.alphabet), LENGTH)
        for name, functions in FUNCTIONS.items()
        if options.norm in (name, "both")
    }
    runs = _training.train(
        {name: model_of(network, options.seed) for name, network in networks.items()},
        optax.adam(optax.linear_schedule(RATE, 0.0, options.steps)),
        transformer.batches(text, options),
    )
    lines = [
        f"{name} wrote: {transformer.sample(network, runs[name].state.params, text.alphabet, '    def ', options.seed)}"
        for name, network in networks.items()
    ]
    title = "Transformer of row programs, Python source"
    return transformer.report(title, runs, options, text, lines)


if __name__ == "__main__":
    sys.exit(main())
