"""Trains a small transformer on handwritten digits with jax.nn and with jaxnorm, and compares.

The images have 8 x 8 pixels; each column of pixels is a token. One block of attention (softmax over
the columns that have ink, by `where`, with the usual `scale`) and one of two dense layers (relu),
each joined to its input by add_relu, feed a linear classifier. Same seed, same batches, same Adam:
only the four functions differ.

    python examples/digits.py [--steps 300] [--plot digits.png] [--seed 0]

Needs `pip install 'jaxnorm[bench]'`. Exits with 1 when a run stays under 95% on held-out digits or
the losses differ.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import _training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxnorm

TOKENS, PIXELS, WIDTH, HEADS, HIDDEN, CLASSES = 8, 8, 64, 4, 256, 10
BATCH, RATE = 128, 2e-3
MIN_ACCURACY = 0.95

TOLERANCE = 1e-2


class Functions(NamedTuple):
    """The four functions in which the two runs differ."""

    softmax: Callable
    log_softmax: Callable
    relu: Callable
    add_relu: Callable


FUNCTIONS = {
    "jax.nn": Functions(
        lambda x, where, scale: jax.nn.softmax(x * scale, where=where),
        jax.nn.log_softmax,
        jax.nn.relu,
        lambda x, y: jax.nn.relu(x + y),
    ),
    "jaxnorm": Functions(
        lambda x, where, scale: jaxnorm.softmax(x, where=where, scale=scale),
        jaxnorm.log_softmax,
        jaxnorm.relu,
        jaxnorm.add_relu,
    ),
}


class Digits(NamedTuple):
    """Tokens [N, 8, 8] and which of them have ink [N, 8], with labels [N]."""

    tokens: np.ndarray
    ink: np.ndarray
    labels: np.ndarray


def load(seed: int) -> tuple[Digits, Digits]:
    """1437 digits to train on and 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    tokens = images.reshape(-1, PIXELS, TOKENS).swapaxes(1, 2).astype(np.float32) / 16
    data = Digits(tokens, tokens.max(-1) > 0, labels.astype(np.int32))
    order = np.random.default_rng(seed).permutation(len(labels))
    return tuple(Digits(*(part[chosen] for part in data)) for chosen in (order[360:], order[:360]))


def init(seed: int) -> dict[str, jax.Array]:
    shapes = {
        "embed": (PIXELS, WIDTH),
        "place": (TOKENS, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "classify": (WIDTH, CLASSES),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def logits(f: Functions, params, tokens, ink):
    """[batch, 8, 8] -> [batch, 10]."""
    x = tokens @ params["embed"] + params["place"]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(*part.shape[:2], HEADS, -1) for part in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    weights = f.softmax(scores, where=ink[:, None, None, :], scale=q.shape[-1] ** -0.5)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    x = f.add_relu(x, mixed @ params["out"])
    x = f.add_relu(x, f.relu(x @ params["up"]) @ params["down"])
    return x.mean(1) @ params["classify"]


def loss_of(f: Functions, params, tokens, ink, labels):
    log_p = f.log_softmax(logits(f, params, tokens, ink))
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


def model_of(f: Functions, seed: int) -> _training.Model:
    def loss_and_rest(params, rest, *batch):
        return loss_of(f, params, *batch), rest

    return _training.Model(loss_and_rest, init(seed), None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = _training.finish_parsing(parser, argv, steps=300, plot="digits.png")

    train_set, test_set = load(options.seed)
    rng = np.random.default_rng(options.seed)
    chosen = [rng.choice(len(train_set.labels), BATCH, False) for _ in range(options.steps)]
    models = {name: model_of(f, options.seed) for name, f in FUNCTIONS.items()}
    runs = _training.train(
        models,
        optax.adam(optax.linear_schedule(RATE, 0.0, options.steps)),
        [tuple(part[rows] for part in train_set) for rows in chosen],
    )
    accuracies = []
    for f, run in zip(FUNCTIONS.values(), runs.values(), strict=True):
        guessed = logits(f, run.state.params, test_set.tokens, test_set.ink).argmax(-1)
        accuracies.append(float((guessed == test_set.labels).mean()))
    return _training.report(
        "Transformer, handwritten digits",
        runs,
        options,
        **_training.held_out(runs, accuracies, MIN_ACCURACY),
        reached=f"both runs reached {MIN_ACCURACY:.0%}",
        tolerance=TOLERANCE,
    )


if __name__ == "__main__":
    sys.exit(main())
