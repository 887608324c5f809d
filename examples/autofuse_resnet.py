"""Trains a Flax ResNet on handwritten digits, as it is and with one line more: `apply = jaxnorm.autofuse(apply)`.

The model is plain flax.linen; nothing in it knows about jaxnorm. Same seed, same batches, same Adam. Before training,
the example prints what autofuse found.

    python examples/autofuse_resnet.py [--steps 120] [--seed 0]

Needs `pip install 'jaxnorm[bench,flax]' optax`. Exits with 1 when a run stays under 95% on held-out digits, the losses
differ, or autofuse leaves a normalisation as it is.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

import jaxnorm

try:
    import flax.linen as nn
    import optax
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(
        f"{error.name} is not installed. Install it with: pip install 'jaxnorm[bench,flax]' optax"
    )

CLASSES, BATCH, RATE = 10, 64, 2e-3
MIN_ACCURACY = 0.95

# Rounding differs between the two runs, and training multiplies what differs. The losses are compared by their mean
# over the last steps, relative to that of the first.
LAST, TOLERANCE = 20, 1e-2


# ---- a model that knows nothing of jaxnorm ----


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train: bool):
        def norm():
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)

        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = norm()(y)
        if x.shape[-1] != self.features:
            x = norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for features in (16, 32):
            x = Block(features)(x, train)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


MODEL = ResNet()


def apply_plain(variables, images, train: bool):
    """(logits, updated running averages)."""
    logits, updates = MODEL.apply(variables, images, train=train, mutable=["batch_stats"])
    return logits, updates["batch_stats"]


apply_fused = jaxnorm.autofuse(apply_plain)  # the one line

# ---- training ----


class Digits(NamedTuple):
    """Images [N, 8, 8, 1] and labels [N]."""

    images: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass
class Run:
    """What one training run leaves behind."""

    losses: list[float]
    accuracy: float
    step_seconds: float


def load(seed: int) -> tuple[Digits, Digits]:
    """1437 digits to train on and 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    data = Digits(images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels.astype(np.int32))
    order = np.random.default_rng(seed).permutation(len(labels))
    return tuple(Digits(*(part[chosen] for part in data)) for chosen in (order[360:], order[:360]))


def train(
    apply: Callable, train_set: Digits, test_set: Digits, steps: int, seed: int, advance
) -> Run:
    """Trains from the same start and on the same batches for the same seed."""
    variables = MODEL.init(jax.random.key(seed), train_set.images[:1], train=True)
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, steps))

    def loss_of(parameters, averages, images, labels):
        logits, averages = apply({"params": parameters, "batch_stats": averages}, images, True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), averages

    @jax.jit
    def step(parameters, averages, state, images, labels):
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, averages), gradients = gradient_of(parameters, averages, images, labels)
        updates, state = optimiser.update(gradients, state)
        return optax.apply_updates(parameters, updates), averages, state, loss

    @jax.jit
    def accuracy(parameters, averages):
        variables = {"params": parameters, "batch_stats": averages}
        return (apply(variables, test_set.images, False)[0].argmax(-1) == test_set.labels).mean()

    parameters, averages = variables["params"], variables["batch_stats"]
    state = optimiser.init(parameters)
    rng = np.random.default_rng(seed)
    losses, seconds = [], []
    for _ in range(steps):
        chosen = rng.choice(len(train_set.labels), BATCH, replace=False)
        batch = [part[chosen] for part in train_set]
        start = time.perf_counter()
        parameters, averages, state, loss = step(parameters, averages, state, *batch)
        losses.append(float(loss))  # waits for the step
        seconds.append(time.perf_counter() - start)
        advance()
    return Run(losses, float(accuracy(parameters, averages)), statistics.median(seconds))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="training steps (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    console = Console(highlight=False)
    train_set, test_set = load(options.seed)
    variables = MODEL.init(jax.random.key(options.seed), train_set.images[:1], train=True)
    report = apply_fused.explain(variables, train_set.images[:BATCH], True)
    console.print(str(report), markup=False, soft_wrap=True)

    runs = {}
    with Progress(transient=True) as progress:
        for name, apply in (("flax", apply_plain), ("autofuse", apply_fused)):
            task = progress.add_task(name, total=options.steps)

            def advance(task=task):
                progress.advance(task)

            runs[name] = train(apply, train_set, test_set, options.steps, options.seed, advance)

    table = Table(title="Handwritten digits", title_justify="left", title_style="bold", box=None)
    table.add_column("", justify="left")
    for name in (*runs, "difference"):
        table.add_column(name, justify="right")
    plain, fused = runs.values()
    last = [statistics.fmean(run.losses[-LAST:]) for run in (plain, fused)]
    rows = (
        ("held-out accuracy", "{:.1%}", plain.accuracy, fused.accuracy),
        (f"loss, last {min(LAST, options.steps)} steps", "{:.6f}", *last),
        ("loss, first step", "{:.6f}", plain.losses[0], fused.losses[0]),
    )
    for label, form, a, b in rows:
        table.add_row(label, form.format(a), form.format(b), f"{b - a:+.1e}")
    a, b = plain.step_seconds * 1e3, fused.step_seconds * 1e3
    table.add_row("time per step (median)", f"{a:.2f} ms", f"{b:.2f} ms", f"{a / b:.2f}x")
    console.print(table)

    problems = [
        f"{name} reached {run.accuracy:.1%}, less than {MIN_ACCURACY:.0%}"
        for name, run in runs.items()
        if not run.accuracy >= MIN_ACCURACY
    ]
    gap = abs(last[1] - last[0]) / plain.losses[0]
    if not gap <= TOLERANCE:
        problems.append(f"the losses differ by {gap:.1e}, more than {TOLERANCE:.0e}")
    if report.left:
        problems.append(f"autofuse left {len(report.left)} normalisations as they were")
    if problems:
        console.print("FAILED: " + "; ".join(problems), style="bold red", soft_wrap=True)
        return 1
    console.print(
        f"OK: {len(report.replaced)} normalisations replaced, both runs reached {MIN_ACCURACY:.0%}",
        style="bold green",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
