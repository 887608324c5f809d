"""Trains a small causal transformer on Python source with Flax and with jaxnorm, and compares.

One token is one character of `argparse.py`, which every Python has. Flax Linen; LayerNorm in front of
attention (softmax) and of two dense layers, cross-entropy of a dense layer's logits. Same seed, same batches,
same Adam: only `LIBRARIES` differs. Ends in a line that each model wrote.

    python examples/transformer.py [--norm flax|autofuse|jaxnorm|both] [--steps 300] [--plot transformer.png] [--seed 0]

Needs `pip install 'jaxnorm[bench]'`. Exits with 1 when a run learns nothing beyond how frequent each
character is, or the losses differ.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxnorm
from jaxnorm import linen as jnn

WIDTH, LAYERS, HEADS, LENGTH = 96, 2, 8, 96
BATCH, RATE = 16, 3e-3
TOLERANCE = 0.02


class Library(NamedTuple):
    """Where the two runs differ."""

    layer_norm: type[nn.Module]
    softmax: Callable
    head_loss: Callable


def head_loss(head: nn.Dense, x, labels):
    """Mean loss of the logits that the head makes of features x."""
    log_p = jax.nn.log_softmax(head(x).astype(jnp.float32))
    return -jnp.take_along_axis(log_p, labels[..., None], axis=-1).mean()


def linear_head_loss(head: nn.Dense, x, labels):
    """The same, with the logits of some tokens at a time in memory."""
    params = head.variables["params"]
    kernel, bias = params["kernel"].astype(x.dtype), params["bias"]
    return jaxnorm.linear_cross_entropy(x, kernel, labels, bias=bias)


LIBRARIES = {
    "flax": Library(
        nn.LayerNorm,
        lambda x, where, scale: jax.nn.softmax(x * scale, where=where),
        head_loss,
    ),
    "jaxnorm": Library(
        jnn.LayerNorm,
        lambda x, where, scale: jaxnorm.softmax(x, where=where, scale=scale),
        linear_head_loss,
    ),
}


class Block(nn.Module):
    """Attention to the tokens before, then two dense layers; each is added to its input."""

    library: Library
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = self.library.layer_norm(dtype=self.dtype)(x)
        qkv = nn.DenseGeneral((3, self.heads, width // self.heads), dtype=self.dtype)(h)
        q, k, v = jnp.moveaxis(qkv, -3, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        causal = jnp.tri(x.shape[1], dtype=bool)
        weights = self.library.softmax(scores, where=causal, scale=q.shape[-1] ** -0.5)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + nn.Dense(width, dtype=self.dtype)(mixed)
        h = self.library.layer_norm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(h))
        return x + nn.Dense(width, dtype=self.dtype)(h)


class Text(NamedTuple):
    """What is learnt: characters as numbers, and the entropy of their frequencies."""

    tokens: np.ndarray
    alphabet: str
    entropy: float


def source() -> Text:
    """The source of argparse."""
    text = pathlib.Path(argparse.__file__).read_text(encoding="utf-8")
    alphabet = "".join(sorted(set(text)))
    tokens = np.array([alphabet.index(c) for c in text], np.int32)
    frequencies = np.bincount(tokens) / len(tokens)
    return Text(tokens, alphabet, float(-(frequencies * np.log(frequencies)).sum()))


def batches(text: Text, options) -> list[tuple[np.ndarray]]:
    """Rows of LENGTH + 1 characters, for each step."""
    rng = np.random.default_rng(options.seed)
    starts = rng.integers(0, len(text.tokens) - LENGTH, (options.steps, BATCH, 1))
    return [(text.tokens[rows + np.arange(LENGTH + 1)],) for rows in starts]


class Transformer(nn.Module):
    """[batch, length] tokens -> [batch, length, tokens] logits of the token after each.

    With labels, the tokens after each: the mean loss of these.

    Attributes:
      library: one of `LIBRARIES`.
      tokens: how many there are.
      width: of the embedding.
      layers: number of blocks.
      heads: of attention.
      length: of the longest sequence.
      dtype: of the arithmetic; parameters are float32.
    """

    library: Library
    tokens: int
    width: int
    layers: int
    heads: int
    length: int
    dtype: Any

    @nn.compact
    def __call__(self, x, labels=None):
        place = self.param("place", nn.initializers.normal(0.02), (self.length, self.width))
        x = nn.Embed(self.tokens, self.width, dtype=self.dtype)(x)
        x = x + place[: x.shape[1]].astype(self.dtype)
        for _ in range(self.layers):
            x = Block(self.library, self.heads, self.dtype)(x)
        x = self.library.layer_norm(dtype=self.dtype)(x)
        head = nn.Dense(self.tokens, dtype=self.dtype)
        return head(x) if labels is None else self.library.head_loss(head, x, labels)


def model_of(network: Transformer, seed: int) -> _training.Model:
    """The loss is a function of parameters and of tokens, each the target of those before it."""

    def loss_of(params, rest, tokens):
        return network.apply({"params": params}, tokens[:, :-1], tokens[:, 1:]), rest

    start = jax.jit(network.init)(jax.random.key(seed), jnp.zeros((1, network.length), jnp.int32))
    return _training.Model(loss_of, start["params"], None)


def sample(network: Transformer, params, alphabet: str, start: str, seed: int) -> str:
    """`start` and what follows in its line, drawn from the model."""

    @jax.jit
    def following(tokens, count, key):
        logits = network.apply({"params": params}, tokens[None])[0, count - 1]
        return jax.random.categorical(key, logits.astype(jnp.float32) / 0.6)

    text = start
    for key in jax.random.split(jax.random.key(seed), network.length - len(start)):
        tokens = np.zeros(network.length, np.int32)
        tokens[: len(text)] = [alphabet.index(c) for c in text]
        text += alphabet[int(following(tokens, len(text), key))]
        if text[-1] == "\n":
            break
    return text.strip("\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _training.norm_parser(__doc__)
    options = _training.finish_parsing(parser, argv, steps=300, plot="transformer.png")
    text = source()
    sizes = len(text.alphabet), WIDTH, LAYERS, HEADS, LENGTH, jnp.float32
    networks = _training.made(options.norm, lambda name: Transformer(LIBRARIES[name], *sizes))
    models = {name: model_of(network, options.seed) for name, network in networks.items()}
    runs = _training.train(
        _training.autofused(models),
        optax.adam(optax.linear_schedule(RATE, 0.0, options.steps)),
        batches(text, options),
    )
    lines = [
        f"{name} wrote: {sample(n, runs[name].state.params, text.alphabet, '    def ', options.seed)}"
        for name, n in networks.items()
    ]
    return report("Transformer, Python source", runs, options, text, lines)


def report(
    title: str, runs: dict[str, _training.Run], options, text: Text, lines: list[str]
) -> int:
    """The verdict: every run must be below the entropy of frequencies."""
    return _training.report(
        title,
        runs,
        options,
        notes=lines,
        problems=[
            f"{name} reached a loss of {run.loss:.2f}, not less than the {text.entropy:.2f} of frequencies"
            for name, run in runs.items()
            if not run.loss < text.entropy
        ],
        reached=f"every run is below the {text.entropy:.2f} of frequencies",
        tolerance=TOLERANCE,
    )


if __name__ == "__main__":
    sys.exit(main())
