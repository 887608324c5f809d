"""Times tracing of the training steps of bench.train, as they are and under autofuse: `python -m bench.tracing`.

It needs no GPU: arrays are shapes, and autofuse is asked for what it does for one. JAX's caches are empty each time, as
when a program is traced first.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence

import jax

from bench import timing, train
from jaxnorm._measure import display


def steps(case: train.TrainCase) -> tuple[dict[str, Callable], tuple]:
    """The plain step and the one under autofuse, and the shapes of what they take."""
    found: dict[str, Callable] = {}

    def arrays(name, implementation):
        _, batch, found[name], state = case.prepare(implementation, platform="gpu")
        return state, *batch

    shapes = jax.eval_shape(functools.partial(arrays, "plain", case.implementations[0]))
    jax.eval_shape(functools.partial(arrays, "autofuse", "autofuse"))
    return found, shapes


def seconds(function: Callable, shapes: tuple, repeats: int) -> float:
    """What `jax.make_jaxpr` takes, at least."""

    def once() -> float:
        jax.clear_caches()
        start = time.perf_counter()
        jax.make_jaxpr(function)(*shapes)
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))


def main(argv: Sequence[str] | None = None) -> int:
    """Times the cases, and returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tracing",
        description="Time how long JAX takes to trace training steps, without and with autofuse for a GPU.",
    )
    train.add_cases(parser)
    parser.add_argument("--repeats", type=int, default=4, help="of each, of which the least counts")
    options = parser.parse_args(argv)
    rich = display.require_rich()
    table = rich.table(title="tracing of training steps", caption="jax.make_jaxpr, wall-clock.")
    for name in ("case", "plain", "autofuse", ""):
        table.add_column(name, justify="right" if table.columns else "left")
    cases = train.selected(options)
    with rich.progress() as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.label)
            functions, shapes = steps(case)
            plain, fused = (seconds(f, shapes, options.repeats) for f in functions.values())
            cells = timing.compared(fused, plain, display.duration)
            table.add_row(case.label, display.duration(plain), *cells)
            progress.advance(task)
    rich.console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
