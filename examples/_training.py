"""What the examples that train twice share: a training step, what it costs, a table and a plot of both runs.

A model is (loss_of, params, rest): `loss_of(params, rest, *batch) -> (loss, rest)`, where `rest` is what is not
differentiated, such as running statistics.
"""

import argparse
import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

for library in ("flax", "matplotlib", "optax", "rich", "sklearn"):
    if importlib.util.find_spec(library) is None:
        sys.exit(f"{library} is not installed. Install it with: pip install 'jaxnorm[bench]'")

import matplotlib  # noqa: E402
import optax  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402

import jaxnorm  # noqa: E402

# Rounding differs between the two runs by about 1e-7 a step, and training multiplies what differs.
# The losses of one batch are compared by their mean over the last steps.
LAST = 20


class Model(NamedTuple):
    """One of the two models that are trained."""

    loss_of: Callable
    params: Any
    rest: Any


class State(NamedTuple):
    """What a step changes."""

    params: Any
    rest: Any
    moments: Any


@dataclasses.dataclass
class Run:
    """What one training run leaves behind."""

    losses: list[float]
    step_seconds: float
    saved_bytes: int
    temporary_bytes: int
    state: State

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


def training_step(model: Model, optimizer) -> tuple[Callable, State]:
    """`step(state, *batch) -> (state, loss)`, and the state to start from."""

    def step(state, *batch):
        gradients_of = jax.value_and_grad(model.loss_of, has_aux=True)
        (loss, rest), grads = gradients_of(state.params, state.rest, *batch)
        updates, moments = optimizer.update(grads, state.moments, state.params)
        return State(optax.apply_updates(state.params, updates), rest, moments), loss

    return step, State(model.params, model.rest, optimizer.init(model.params))


def saved_bytes(model: Model, batch: Sequence) -> int:
    """Bytes that JAX keeps from forward to backward, without parameters and batch.

    Counted before XLA compiles: in one jit it keeps some and computes others again.
    """

    def kept(params, rest, *batch):
        given = {id(leaf) for leaf in jax.tree.leaves((params, rest, batch))}
        _, pull, _ = jax.vjp(lambda p: model.loss_of(p, rest, *batch), params, has_aux=True)
        return {id(r): r for r in jax.tree.leaves(pull) if id(r) not in given}.values()

    shapes = jax.eval_shape(lambda *args: list(kept(*args)), model.params, model.rest, *batch)
    return sum(s.size * s.dtype.itemsize for s in shapes)


def train(models: dict[str, Model], optimizer, batches: Sequence[tuple]) -> dict[str, Run]:
    """Trains all models on the same batches, a step of each in turn."""
    steps, runs = {}, {}
    for name, model in models.items():
        step, state = training_step(model, optimizer)
        steps[name] = jax.jit(step).lower(state, *batches[0]).compile()
        temporary = steps[name].memory_analysis().temp_size_in_bytes
        runs[name] = Run([], 0.0, saved_bytes(model, batches[0]), temporary, state)
    seconds = {name: [] for name in runs}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"training with {' and '.join(runs)}", total=len(batches))
        for batch in batches:
            for name, run in runs.items():
                start = time.perf_counter()
                run.state, loss = steps[name](run.state, *batch)
                run.losses.append(float(loss))  # waits for the step
                seconds[name].append(time.perf_counter() - start)
            progress.advance(task)
    for name, run in runs.items():
        run.step_seconds = statistics.median(seconds[name])
    return runs


# ---- what people read ----


def norm_parser(
    doc: str, names: Sequence[str] = ("flax", "autofuse", "jaxnorm")
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--norm", choices=(*names, "both"), default="both")
    return parser


def made(norm: str, make: Callable) -> dict:
    """What `make` makes of "flax" and "jaxnorm", or of one of them, by name; "autofuse" is made as "flax" is."""
    names = ("flax", "jaxnorm") if norm == "both" else (norm,)
    return {name: make("flax" if name == "autofuse" else name) for name in names}


def autofused(models: dict[str, Model]) -> dict[str, Model]:
    """The models, of which "autofuse" has that one line more."""
    return {
        name: model._replace(loss_of=jaxnorm.autofuse(model.loss_of))
        if name == "autofuse"
        else model
        for name, model in models.items()
    }


def finish_parsing(parser, argv, *, steps: int, plot: str) -> argparse.Namespace:
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--plot", default=plot, metavar="FILE", help="'' for none")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def held_out(runs: dict[str, Run], accuracies: Sequence[float], minimum: float) -> dict:
    """The `rows` and `problems` of a report on runs that should reach `minimum`."""
    problems = [
        f"{name} reached {accuracy:.1%}, less than {minimum:.0%}"
        for name, accuracy in zip(runs, accuracies, strict=True)
        if not accuracy >= minimum
    ]
    return {"rows": [("held-out accuracy", "{:.1%}", accuracies)], "problems": problems}


def report(
    title: str,
    runs: dict[str, Run],
    options,
    *,
    rows: Sequence[tuple[str, str, Sequence[float]]] = (),
    notes: Sequence[str] = (),
    problems: Sequence[str] = (),
    reached: str,
    tolerance: float,
) -> int:
    """Prints the runs side by side, draws their losses, and judges.

    Args:
      title: of the table and the plot.
      runs: one, or two to compare.
      options: of the command line.
      rows: what else to print: label, format and one value for each run.
      notes: printed below the table.
      problems: what else makes this a failure.
      reached: what to say of the runs where there is none.
      tolerance: how much the losses of the last steps may differ, relative to them.

    Returns:
      The exit status: 0, or 1 if there is a problem.
    """
    console = Console(highlight=False)
    every = list(runs.values())
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for name in ("", *runs, *([""] if len(runs) == 2 else [])):
        table.add_column(name, justify="right" if table.columns else "left")

    def add(form, label, values, compare):
        last = [compare(*values)] if len(values) == 2 else []
        table.add_row(label, *(form.format(v) for v in values), *last)

    def difference(a, b):
        return f"{b - a:+.1e}"

    def fraction(a, b):
        return f"{b / a:.0%}"

    for label, form, values in rows:
        add(form, label, values, difference)
    last = f"loss, last {min(LAST, options.steps)} steps"
    add("{:.6f}", last, [r.loss for r in every], difference)
    add("{:.6f}", "loss, first step", [r.losses[0] for r in every], difference)
    add("{:.2f} ms", "time per step (median)", [r.step_seconds * 1e3 for r in every], fraction)
    add("{:.2f} MB", "saved for backward", [r.saved_bytes / 1e6 for r in every], fraction)
    add("{:.2f} MB", "temporary memory", [r.temporary_bytes / 1e6 for r in every], fraction)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    if options.plot:
        plot(title, runs, options.plot)
        console.print(f"wrote {options.plot}", markup=False, soft_wrap=True)

    problems = list(problems)
    agree = ""
    if len(runs) == 2:
        gap = abs(every[1].loss - every[0].loss) / abs(every[0].loss)
        agree = f"; their losses agree to {gap:.0e}"
        if not gap <= tolerance:
            problems.append(f"the losses differ by {gap:.1e}, more than {tolerance:.0e}")
    if problems:
        console.print("FAILED: " + "; ".join(problems), style="bold red", soft_wrap=True)
        return 1
    console.print(f"OK: {reached}{agree}", style="bold green", soft_wrap=True)
    return 0


def plot(title: str, runs: dict[str, Run], path: str) -> None:
    """Loss curves, and of two the difference below them."""
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pair = len(runs) == 2
    figure, panels = pyplot.subplots(
        1 + pair,
        1,
        figsize=(7.5, 5.2),
        sharex=True,
        squeeze=False,
        height_ratios=(3, 1.3) if pair else (1,),
        layout="constrained",
    )
    upper = panels[0, 0]
    steps = np.arange(1, len(next(iter(runs.values())).losses) + 1)
    # The two curves coincide: a wide light line under a thin dark one shows both.
    styles = ({"color": "#E69F00", "lw": 5, "alpha": 0.55}, {"color": "#0072B2", "lw": 1.4})
    for (name, run), style in zip(runs.items(), styles[-len(runs) :], strict=True):
        cost = f"{run.step_seconds * 1e3:.1f} ms a step, {run.saved_bytes / 1e6:.1f} MB saved"
        label = f"{name}: {cost} for backward"
        upper.plot(steps, run.losses, label=label, solid_capstyle="round", **style)
    upper.set_yscale("log")
    upper.set_ylabel("cross-entropy")
    upper.yaxis.set_minor_formatter(ticker.LogFormatter())  # labels less than a decade only
    upper.set_title(title, loc="left", fontsize=11)
    upper.legend(frameon=False)
    if pair:
        first, second = (np.array(run.losses) for run in runs.values())
        lower = panels[1, 0]
        lower.plot(steps, np.maximum(np.abs(first - second), 1e-9), color="#333333", lw=1)
        lower.set_yscale("log")
        lower.set_ylabel("|difference|")
    panels[-1, 0].set_xlabel("step")
    for axes in panels[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#e4e4e4", lw=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(1, max(len(steps), 2))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
