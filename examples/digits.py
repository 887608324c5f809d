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
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

try:
    import matplotlib
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed. Install it with: pip install 'jaxnorm[bench]'")

TOKENS, PIXELS, WIDTH, HEADS, HIDDEN, CLASSES = 8, 8, 64, 4, 256, 10
BATCH, RATE = 128, 2e-3
MIN_ACCURACY = 0.95

# Rounding differs between the two runs by about 1e-7 a step, and training multiplies what differs.
# The losses of one batch are compared by their mean over the last steps.
LAST, TOLERANCE = 20, 1e-2


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


@dataclasses.dataclass
class Run:
    """What one training run leaves behind."""

    losses: list[float]
    accuracy: float
    step_seconds: float

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


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


@functools.partial(jax.jit, static_argnums=0)
def train_step(f: Functions, params, moments, count, rate, tokens, ink, labels):
    """One step of Adam."""
    loss, grads = jax.value_and_grad(loss_of, argnums=1)(f, params, tokens, ink, labels)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments[1], grads)
    size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(
        lambda p, m, v: p - size * m / (jnp.sqrt(v) + 1e-6), params, first, second
    )
    return params, (first, second), loss


@functools.partial(jax.jit, static_argnums=0)
def accuracy_of(f: Functions, params, data: Digits):
    return (logits(f, params, data.tokens, data.ink).argmax(-1) == data.labels).mean()


def train(f: Functions, train_set: Digits, test_set: Digits, steps: int, seed: int, advance) -> Run:
    """Trains from the same start and on the same batches for the same seed."""
    params = init(seed)
    moments = (jax.tree.map(jnp.zeros_like, params),) * 2
    rng = np.random.default_rng(seed)
    losses, seconds = [], []
    for step in range(steps):
        chosen = rng.choice(len(train_set.labels), BATCH, replace=False)
        batch = [part[chosen] for part in train_set]
        start = time.perf_counter()
        count, rate = np.float32(step + 1), np.float32(RATE * (1 - step / steps))
        params, moments, loss = train_step(f, params, moments, count, rate, *batch)
        losses.append(float(loss))  # waits for the step
        seconds.append(time.perf_counter() - start)
        advance()
    return Run(losses, float(accuracy_of(f, params, test_set)), statistics.median(seconds))


def plot(runs: dict[str, Run], path: str) -> None:
    """Both loss curves above, their difference below."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, second = (np.array(run.losses) for run in runs.values())
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(7.5, 5.2), sharex=True, height_ratios=(3, 1.3), layout="constrained"
    )
    steps = np.arange(1, len(first) + 1)
    # The two curves coincide: a wide light line under a thin dark one shows both.
    styles = ({"color": "#E69F00", "lw": 5, "alpha": 0.55}, {"color": "#0072B2", "lw": 1.4})
    for (name, run), style in zip(runs.items(), styles, strict=True):
        label = f"{name}: {run.accuracy:.1%} on held-out digits"
        upper.plot(steps, run.losses, label=label, solid_capstyle="round", **style)
    upper.set_yscale("log")
    upper.set_ylabel("cross-entropy")
    upper.set_title(
        "Handwritten digits: the same training with jax.nn and with jaxnorm",
        loc="left",
        fontsize=11,
    )
    upper.legend(frameon=False)
    difference = np.abs(first - second)
    lower.plot(steps, np.maximum(difference, 1e-9), color="#333333", lw=1)
    lower.set_yscale("log")
    lower.set_ylabel("|difference|")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#e4e4e4", lw=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(1, len(first))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", default="digits.png", metavar="FILE", help="'' for none")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")

    train_set, test_set = load(options.seed)
    runs: dict[str, Run] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, functions in FUNCTIONS.items():
            task = progress.add_task(f"training with {name}", total=options.steps)
            advance = functools.partial(progress.advance, task)
            runs[name] = train(functions, train_set, test_set, options.steps, options.seed, advance)

    console = Console(highlight=False)
    table = Table(title="Handwritten digits", title_justify="left", title_style="bold", box=None)
    table.add_column("", justify="left")
    for name in runs:
        table.add_column(name, justify="right")
    table.add_column("difference", justify="right")
    plain, ours = runs.values()
    rows = (
        ("held-out accuracy", "{:.1%}", plain.accuracy, ours.accuracy),
        (f"loss, last {min(LAST, options.steps)} steps", "{:.6f}", plain.loss, ours.loss),
        ("loss, first step", "{:.6f}", plain.losses[0], ours.losses[0]),
    )
    for label, form, a, b in rows:
        table.add_row(label, form.format(a), form.format(b), f"{b - a:+.1e}")
    a, b = plain.step_seconds * 1e3, ours.step_seconds * 1e3
    table.add_row("time per step (median)", f"{a:.2f} ms", f"{b:.2f} ms", f"{a / b:.2f}x")
    console.print(table)
    if options.plot:
        plot(runs, options.plot)
        console.print(f"wrote {options.plot}", markup=False, soft_wrap=True)

    problems = [
        f"{name} reached {run.accuracy:.1%}, less than {MIN_ACCURACY:.0%}"
        for name, run in runs.items()
        if not run.accuracy >= MIN_ACCURACY
    ]
    gap = abs(ours.loss - plain.loss) / abs(plain.loss)
    if not gap <= TOLERANCE:
        problems.append(f"the losses differ by {gap:.1e}, more than {TOLERANCE:.0e}")
    if problems:
        console.print("FAILED: " + "; ".join(problems), style="bold red", soft_wrap=True)
        return 1
    console.print(
        f"OK: both runs reached {MIN_ACCURACY:.0%}; their losses agree to {gap:.0e}",
        style="bold green",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
