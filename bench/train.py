"""Times whole training steps with Flax's modules and with jaxnorm's: `python -m bench.train`.

The models are those of examples/, in the sizes of `CASES`. A step is one jit: loss, gradients and
optimizer. Its time is wall-clock, that of `STEPS` steps divided by their number: as in a training
loop, each starts from the result of the one before and nothing waits in between. Its temporary
memory is what the compiled program asks for beyond arguments and results. On a GPU the records also
say which kernels the time went to.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from bench import timing
from jaxnorm._measure import display, timer

# The examples are programs and no package: they import each other by name.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import _training
import optax
import resnet
import transformer

IMPLEMENTATIONS = ("jaxnorm", "flax")
STEPS = 8


@dataclasses.dataclass(frozen=True)
class TrainCase:
    """One model and its batch, in bfloat16.

    Attributes:
      name: of the model.
      batch: shape of its input.
      sizes: arguments of the model.
    """

    name: str
    batch: tuple[int, ...]
    sizes: dict

    @property
    def label(self) -> str:
        recompute = " recompute" if self.sizes.get("recompute") else ""
        return f"{self.name}{recompute} {'x'.join(map(str, self.batch))} bfloat16"

    def prepare(self, implementation: str) -> tuple:
        """(model, batch, step, state), the last two as `_training.training_step` makes them."""
        model, batch, optimizer = _PREPARE[self.name](self, implementation)
        return model, batch, *_training.training_step(model, optimizer)


def _resnet(case, implementation):
    network = resnet.make(
        resnet.LIBRARIES[implementation],
        0,
        channels=case.batch[-1],
        dtype=jnp.bfloat16,
        **case.sizes,
    )
    images = jax.random.normal(jax.random.key(1), case.batch, jnp.bfloat16)
    labels = jax.random.randint(jax.random.key(2), case.batch[:1], 0, case.sizes["classes"])
    return resnet.model_of(network), (images, labels), optax.sgd(0.1, momentum=0.9)


def _transformer(case, implementation):
    network = transformer.Transformer(
        transformer.LIBRARIES[implementation],
        length=case.batch[1],
        dtype=jnp.bfloat16,
        **case.sizes,
    )
    shape = (case.batch[0], case.batch[1] + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, case.sizes["tokens"])
    return transformer.model_of(network, 0), (tokens,), optax.adam(1e-4)


_PREPARE = {"resnet": _resnet, "transformer": _transformer}

_RESNET_50 = {"width": 64, "stages": (3, 4, 6, 3), "classes": 1000, "large": True}

CASES = {
    "ci": (
        TrainCase(
            "resnet",
            (4, 32, 32, 3),
            {"width": 8, "stages": (1, 1), "classes": 10, "large": True, "recompute": False},
        ),
        TrainCase("transformer", (2, 32), {"tokens": 64, "width": 64, "layers": 2, "heads": 2}),
    ),
    "full": (
        TrainCase("resnet", (256, 224, 224, 3), _RESNET_50 | {"recompute": False}),
        TrainCase("resnet", (256, 224, 224, 3), _RESNET_50 | {"recompute": True}),
        TrainCase(
            "transformer",
            (16, 1024),
            {"tokens": 32768, "width": 1024, "layers": 12, "heads": 16},
        ),
    ),
}

# What a kernel does, by its name; the first that is found counts.
_COPY, _MATMUL = "copy or transposition", "matrix product or convolution"
_GROUPS = (
    # cuDNN's own transpositions; names of its convolutions have NHWC in them, too.
    (_COPY, r"ToN(hwc|chw)"),
    (_MATMUL, timer.MATMUL.pattern + "|cudnn|fprop|dgrad|wgrad|convolve|winograd"),
    (_COPY, "memcpy|memset|copy|transpose"),
    ("fusion", "fusion|wrapped_|triton"),
)


def group(kernel: str) -> str:
    """What a kernel counts as."""
    if found := re.search(r"jaxnorm_(\w+?)(?:_finish)?\b", kernel):
        return f"jaxnorm {found[1]}"
    for name, pattern in _GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def kernel_times(step: Callable[[], object]) -> dict:
    """Seconds of a step by group and by name of kernel, largest first.

    There are gaps between kernels: their sum is not the wall-clock time of the step.
    """
    calls = 3
    events = timer.trace_events(lambda: jax.block_until_ready([step() for _ in range(calls)]))
    if not events:
        raise RuntimeError("the trace shows no kernel of the step")
    groups, kernels = collections.Counter(), collections.Counter()
    launches = collections.Counter(event.name for event in events)
    for name, seconds, _ in events:
        groups[group(name)] += seconds / calls
        kernels[name] += seconds / calls
    return {
        "seconds": sum(groups.values()),
        "groups": dict(groups.most_common()),
        "top": [
            {
                "name": name[:200],
                "group": group(name),
                "seconds": seconds,
                "launches": launches[name] / calls,
            }
            for name, seconds in kernels.most_common(25)
        ],
    }


def _run_steps(step: Callable, state, batch: tuple):
    for _ in range(STEPS):
        state, loss = step(state, *batch)
    return state, loss


def _per_step(timed: timer.Timing) -> timer.Timing:
    return dataclasses.replace(timed, seconds=tuple(s / STEPS for s in timed.seconds))


def measure(case: TrainCase, budget: float) -> list[dict]:
    """One record for each implementation; a failure is a record too."""
    records, workloads, singles = {}, {}, {}
    for name in IMPLEMENTATIONS:
        records[name] = {
            "op": "train",
            "case": case.label,
            "direction": "step",
            "implementation": name,
            "error": None,
        }
        try:
            model, batch, step, state = case.prepare(name)
            compiled = jax.jit(step).lower(state, *batch).compile()
            records[name] |= {
                "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "residual_bytes": _training.saved_bytes(model, batch),
            }
            singles[name] = functools.partial(compiled, state, *batch)
            run = functools.partial(_run_steps, compiled, state, batch)
            workloads[name] = timer.Workload(lambda _, run=run: run())
        except Exception as error:
            records[name]["error"] = timing.error_text(error)
    timings = {
        name: timed if isinstance(timed, Exception) else _per_step(timed)
        for name, timed in timer.measure(workloads, budget=budget, clock="wall").items()
    }
    for name, timed in timings.items():
        try:
            if isinstance(timed, Exception):
                raise timed
            records[name] |= timing.time_entries(timed, timings.get("jaxnorm"))
            if jax.default_backend() == "gpu":
                records[name]["kernel_times"] = kernel_times(singles[name])
        except Exception as error:
            records[name]["error"] = timing.error_text(error)
    return list(records.values())


def table(rich, records: Sequence[dict], device: str):
    """Time and memory of both, a row for each."""
    result = rich.table(
        title=f"training steps on {device}",
        caption="Wall-clock, medians. Saved: from forward to backward, before XLA compiles.",
    )
    for name in ("case", "", "step", "", "temporary memory", "", "saved", ""):
        result.add_column(name, justify="right" if result.columns[1:] else "left")
    for label in dict.fromkeys(r["case"] for r in records):
        ours, flax = (r for r in records if r["case"] == label)
        for r in (flax, ours):
            cells = []
            for key, form in (
                ("seconds", display.duration),
                ("temporary_bytes", _megabytes),
                ("residual_bytes", _megabytes),
            ):
                compared = r is ours and key in r and key in flax
                cells.append(form(r[key]) if key in r else "failed")
                cells.append(f"{r[key] / flax[key]:.0%}" if compared else "")
            result.add_row(label if r is flax else "", r["implementation"], *cells)
    return result


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def main(argv: Sequence[str] | None = None) -> int:
    """Times the cases.

    Returns:
      0; 1 when jaxnorm itself failed in some case.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        description="Time training steps of a ResNet and a transformer, Flax against jaxnorm.",
    )
    parser.add_argument(
        "--cases", choices=tuple(CASES), default="ci", help="small models, or those for a GPU"
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases with TEXT")
    parser.add_argument(
        "--budget", type=float, default=5.0, help="seconds to time each step for (default: 5)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results")
    options = parser.parse_args(argv)
    rich = display.require_rich()
    head = timing.header("wall", timer.copy_rate("wall"))
    records: list[dict] = []
    cases = [c for c in CASES[options.cases] if options.filter in c.label]
    with rich.progress() as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.label)
            records += measure(case, options.budget)
            progress.advance(task)
            if options.json:
                timing.write_json(options.json, {"header": head, "records": records})
    console = rich.console()
    console.print(table(rich, records, head["device"]))
    failed = [r for r in records if r["error"]]
    for r in failed:
        console.print(f"{r['case']}, {r['implementation']}: {r['error']}", markup=False)
    return int(any(r["implementation"] == "jaxnorm" for r in failed))


if __name__ == "__main__":
    sys.exit(main())
