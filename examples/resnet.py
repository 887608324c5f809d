"""Trains a small ResNet on handwritten digits with Flax's BatchNorm and with jaxnorm's, and compares.

NHWC, Flax NNX, bottleneck blocks. A block normalises three times: twice with a ReLU behind it, and at
its end with the shortcut added and then a ReLU. jaxnorm does each of these in the pass of the
normalisation. Same seed, same batches, same Adam: only `LIBRARIES` differs.

    python examples/resnet.py [--norm flax|autofuse|jaxnorm|both] [--steps 150] [--plot resnet.png] [--seed 0]
        [--recompute]

With --recompute, backward computes the normalised arrays again: a GPU then needs a third less memory.
Needs `pip install 'jaxnorm[bench]'`. Exits with 1 when a run stays under 95% on held-out digits or
the losses differ.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import _training
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from jaxnorm import nnx as jnnx

BATCH, RATE = 64, 3e-3
MIN_ACCURACY = 0.95
TOLERANCE = 0.1


class Library(NamedTuple):
    """Where the two runs differ: a BatchNorm alone, one with a ReLU, and how to call the latter."""

    norm: Callable
    norm_relu: Callable
    apply: Callable


def _flax_apply(norm, x, shortcut=None):
    y = norm(x)
    return nnx.relu(y if shortcut is None else y + shortcut)


LIBRARIES = {
    "flax": Library(nnx.BatchNorm, nnx.BatchNorm, _flax_apply),
    "jaxnorm": Library(
        jnnx.BatchNorm,
        functools.partial(jnnx.BatchNorm, activation="relu"),
        lambda norm, x, shortcut=None: norm(x, residual=shortcut),
    ),
}


class Block(nnx.Module):
    """Three convolutions, the middle one 3x3, and a shortcut around them."""

    def __init__(self, library, features, width, stride, *, dtype, rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
        options = {"momentum": 0.9, "dtype": dtype, "rngs": rngs}
        self.apply = library.apply
        self.conv1 = conv(features, width, (1, 1))
        self.norm1 = library.norm_relu(width, **options)
        self.conv2 = conv(width, width, (3, 3), strides=stride)
        self.norm2 = library.norm_relu(width, **options)
        self.conv3 = conv(width, 4 * width, (1, 1))
        self.norm3 = library.norm_relu(4 * width, **options)
        self.project = features != 4 * width or stride > 1
        if self.project:
            self.shortcut = conv(features, 4 * width, (1, 1), strides=stride)
            self.shortcut_norm = library.norm(4 * width, **options)

    def __call__(self, x):
        y = self.apply(self.norm1, self.conv1(x))
        y = self.apply(self.norm2, self.conv2(y))
        shortcut = self.shortcut_norm(self.shortcut(x)) if self.project else x
        return self.apply(self.norm3, self.conv3(y), shortcut)


class Stem(nnx.Module):
    """From the image to the first features.

    With `large`, a 7x7 convolution and a pooling start with a quarter of the height and width.
    """

    def __init__(self, library, channels, width, large, *, dtype, rngs):
        kernel, stride = ((7, 7), 2) if large else ((3, 3), 1)
        self.large, self.dtype, self.apply = large, dtype, library.apply
        self.conv = nnx.Conv(
            channels, width, kernel, strides=stride, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm = library.norm_relu(width, momentum=0.9, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.apply(self.norm, self.conv(x.astype(self.dtype)))
        return nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME") if self.large else x


class Stage(nnx.Module):
    """Blocks of one width, the first with a stride."""

    def __init__(self, library, features, width, stride, count, *, dtype, rngs):
        self.blocks = nnx.List()
        for number in range(count):
            stride_here = 1 if number else stride
            self.blocks.append(Block(library, features, width, stride_here, dtype=dtype, rngs=rngs))
            features = 4 * width

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def keep(primitive, *_, **parameters):
    """Checkpoint policy: results of convolutions, and what jaxnorm's BatchNorm names."""
    named = parameters.get("name") == "jaxnorm_batch_norm"
    return primitive.name == "conv_general_dilated" or named


class ResNet(nnx.Module):
    """[batch, height, width, channels] -> [batch, classes].

    Args:
      library: one of `LIBRARIES`.
      channels: of the images.
      width: of the first blocks; it doubles from stage to stage.
      stages: number of blocks of each.
      classes: number of logits.
      large: see `Stem`.
      recompute: whether backward computes what follows a convolution again, instead of keeping it.
      dtype: of the arithmetic; parameters are float32.
      rngs: where parameters come from.
    """

    def __init__(self, library, *, channels, width, stages, classes, large, recompute, dtype, rngs):
        options = {"dtype": dtype, "rngs": rngs}
        self.recompute = recompute
        parts, features = [Stem(library, channels, width, large, **options)], width
        for index, count in enumerate(stages):
            stride = 2 if index else 1
            parts.append(Stage(library, features, width << index, stride, count, **options))
            features = 4 * width << index
        self.parts = nnx.List(parts)
        self.classify = nnx.Linear(features, classes, **options)

    def __call__(self, x):
        # In one piece, what a stage computes again is there at once; in pieces, what lies between is kept.
        run = nnx.remat(_call, policy=keep) if self.recompute else _call
        for part in self.parts:
            x = run(part, x)
        return self.classify(x.mean((1, 2)))


def _call(part, x):
    return part(x)


def make(library: Library, seed: int, **sizes) -> ResNet:
    """Initialises in one program instead of hundreds."""
    return nnx.jit(lambda: ResNet(library, rngs=nnx.Rngs(seed), **sizes))()


def model_of(network: ResNet) -> _training.Model:
    """The loss is a function of parameters, running statistics, images and labels."""
    graph, params, rest = nnx.split(network, nnx.Param, ...)

    def loss_of(params, rest, images, labels):
        network = nnx.merge(graph, params, rest, copy=True)
        logits = network(images).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, nnx.state(network, nnx.BatchStat)

    return _training.Model(loss_of, params, rest)


def accuracy_of(network: ResNet, state: _training.State, images, labels) -> float:
    nnx.update(network, state.params, state.rest)
    network.eval()
    return float((network(images).argmax(-1) == labels).mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = _training.norm_parser(__doc__)
    parser.add_argument("--recompute", action="store_true", help="trade time for memory")
    options = _training.finish_parsing(parser, argv, steps=150, plot="resnet.png")
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    rng = np.random.default_rng(options.seed)
    order = rng.permutation(len(labels))
    held_out, rest = order[:360], order[360:]
    chosen = [rng.choice(rest, BATCH, replace=False) for _ in range(options.steps)]

    sizes = {"channels": 1, "width": 16, "stages": (1, 1, 1), "classes": 10, "large": False}
    sizes |= {"recompute": options.recompute, "dtype": jnp.float32}
    networks = _training.made(
        options.norm, lambda name: make(LIBRARIES[name], options.seed, **sizes)
    )
    runs = _training.train(
        _training.autofused({name: model_of(network) for name, network in networks.items()}),
        optax.adam(optax.linear_schedule(RATE, 0.0, options.steps)),
        [(images[rows], labels[rows]) for rows in chosen],
    )
    accuracies = [
        accuracy_of(network, runs[name].state, images[held_out], labels[held_out])
        for name, network in networks.items()
    ]
    return _training.report(
        "ResNet, handwritten digits",
        runs,
        options,
        **_training.held_out(runs, accuracies, MIN_ACCURACY),
        reached=f"every run reached {MIN_ACCURACY:.0%}",
        tolerance=TOLERANCE,
    )


if __name__ == "__main__":
    sys.exit(main())
