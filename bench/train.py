"""Times whole training steps as they are, under autofuse, and with jaxnorm's calls: `python -m bench.train`.

The models are those of examples/ and of bench/models.py, in the sizes of `CASES`. A step is one jit: loss, gradients
and optimizer. Under autofuse it is the plain step with one line around it. Its time is wall-clock, that of `STEPS`
steps divided by their number: as in a training loop, each starts from the result of the one before and nothing waits in
between. Its temporary memory is what the compiled program asks for beyond arguments and results. The losses of `LOSSES`
steps are kept. On a GPU the records also say which kernels the time went to.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import jaxnorm
from bench import models, timing
from bench.kernels import group, rest
from jaxnorm._measure import display, timer

# The examples are programs and no package: they import each other by name.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import _training
import optax
import resnet
import transformer

STEPS = 8
# Steps from one state whose losses are compared.
LOSSES = 50


@dataclasses.dataclass(frozen=True)
class TrainCase:
    """One model and its batch, in bfloat16.

    Attributes:
      name: of the model.
      batch: shape of its input.
      sizes: arguments of the model; "kept" is the dtype of its parameters where that is not float32.
    """

    name: str
    batch: tuple[int, ...]
    sizes: dict

    @property
    def implementations(self) -> tuple[str, str, str]:
        """The plain form first."""
        return "flax" if self.name in _FLAX else "plain", "autofuse", "jaxnorm"

    @property
    def label(self) -> str:
        recompute = " recompute" if self.sizes.get("recompute") else ""
        return f"{self.name}{recompute} {'x'.join(map(str, self.batch))} bfloat16"

    def prepare(self, implementation: str, platform: str | None = None) -> tuple:
        """(model, batch, step, state), the last two as `_training.training_step` makes them.

        autofuse is for `platform`, by default JAX's own.
        """
        automatic = implementation == "autofuse"
        form = self.implementations[0] if automatic else implementation
        model, batch, optimizer = _PREPARE[self.name](self, form)
        if automatic and self.name == "resnet":  # batch norm is found in forward code
            model = model._replace(loss_of=jaxnorm.autofuse(model.loss_of, platform=platform))
            automatic = False
        step, state = _training.training_step(model, optimizer)
        if automatic:
            step = jaxnorm.autofuse(step, platform=platform)
        return model, batch, step, state


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


def _plain(name: str, arrays: Callable, rate: float = 1e-3):
    """How to prepare a model of bench/models.py; `arrays` makes (parameters, batch) of a case and a key."""

    def prepare(case, implementation):
        params, batch = jax.jit(functools.partial(arrays, case))(jax.random.key(0))
        if kept := case.sizes.get("kept"):
            params = jax.tree.map(lambda p: p.astype(kept), params)
        options = {k: v for k, v in case.sizes.items() if k == "heads"}
        by_hand = implementation == "jaxnorm"
        fused = jaxnorm.fuse if by_hand else models.identity
        if by_hand and name == "llama":
            options["head"] = jaxnorm.linear_cross_entropy
        loss = functools.partial(getattr(models, f"{name}_loss"), fused=fused, **options)
        model = _training.Model(lambda p, rest, *batch: (loss(p, *batch), rest), params, None)
        return model, batch, optax.sgd(rate)

    return prepare


def _made(function: Callable, case, key):
    return function(key, **{k: v for k, v in case.sizes.items() if k != "kept"})


def _llama_arrays(case, key):
    shape = (case.batch[0], case.batch[1] + 1)
    tokens = jax.random.randint(key, shape, 0, case.sizes["tokens"])
    return _made(models.llama_parameters, case, key), (tokens,)


def _dit_arrays(case, key):
    patches = jax.random.normal(key, (*case.batch, case.sizes["channels"]))
    condition = jax.random.normal(key, (case.batch[0], case.sizes["width"]))
    return _made(models.dit_parameters, case, key), (patches, condition, patches)


def _vit_arrays(case, key):
    patches = jax.random.normal(key, (*case.batch, case.sizes["channels"]))
    labels = jax.random.randint(key, case.batch[:1], 0, case.sizes["classes"])
    return _made(models.vit_parameters, case, key), (patches, labels, key)


def _mamba_arrays(case, key):
    sequence = jax.random.normal(key, (*case.batch, case.sizes["channels"]))
    return _made(models.mamba_parameters, case, key), (sequence, sequence)


def _rl_arrays(case, key):
    rows, tokens = case.batch
    logits, reference = jax.random.normal(key, (2, rows, tokens), jnp.bfloat16)
    labels = jax.random.randint(key, (rows,), 0, tokens)
    advantages = jax.random.normal(key, (rows,))
    return {"logits": logits}, (reference, labels, advantages, jnp.full(rows, -jnp.log(tokens)))


_FLAX = {"resnet": _resnet, "transformer": _transformer}
_PREPARE = _FLAX | {
    "llama": _plain("llama", _llama_arrays),
    "dit": _plain("dit", _dit_arrays),
    "vit": _plain("vit", _vit_arrays),
    "mamba": _plain("mamba", _mamba_arrays),
    "rl": _plain("rl", _rl_arrays, rate=10.0),
}

_RESNET_50 = {"width": 64, "stages": (3, 4, 6, 3), "classes": 1000, "large": True}

CASES = {
    "ci": (
        TrainCase(
            "resnet",
            (4, 32, 32, 3),
            {"width": 8, "stages": (1, 1), "classes": 10, "large": True, "recompute": False},
        ),
        TrainCase("transformer", (2, 32), {"tokens": 64, "width": 64, "layers": 2, "heads": 2}),
        TrainCase(
            "llama",
            (2, 16),
            {"layers": 1, "width": 64, "heads": 2, "hidden": 128, "tokens": 256},
        ),
        TrainCase("dit", (2, 16), {"layers": 1, "width": 64, "heads": 2, "channels": 16}),
        TrainCase(
            "vit", (2, 16), {"layers": 1, "width": 64, "heads": 2, "channels": 16, "classes": 10}
        ),
        TrainCase("mamba", (2, 16), {"layers": 1, "width": 64, "channels": 16}),
        TrainCase("rl", (16, 256), {}),
    ),
    "full": (
        TrainCase("resnet", (256, 224, 224, 3), _RESNET_50 | {"recompute": False}),
        TrainCase("resnet", (256, 224, 224, 3), _RESNET_50 | {"recompute": True}),
        TrainCase(
            "transformer",
            (16, 1024),
            {"tokens": 32768, "width": 1024, "layers": 12, "heads": 16},
        ),
        TrainCase(
            "llama",
            (4, 4096),
            {
                "layers": 8,
                "width": 2048,
                "heads": 16,
                "hidden": 5632,
                "tokens": 128256,
                "kept": "bfloat16",
            },
        ),
        TrainCase("dit", (64, 256), {"layers": 28, "width": 1152, "heads": 16, "channels": 16}),
        TrainCase(
            "vit",
            (64, 256),
            {"layers": 24, "width": 1024, "heads": 16, "channels": 768, "classes": 1000},
        ),
        TrainCase("mamba", (4, 2048), {"layers": 8, "width": 2048, "channels": 64}),
        TrainCase("rl", (8192, 128256), {}),
    ),
}


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


def _losses(step: Callable, state, batch: tuple) -> list[float]:
    losses = []
    for _ in range(LOSSES):
        state, loss = step(state, *batch)
        losses.append(loss)
    return [float(loss) for loss in losses]


def _per_step(timed: timer.Timing) -> timer.Timing:
    return dataclasses.replace(timed, seconds=tuple(s / STEPS for s in timed.seconds))


def measure(case: TrainCase, budget: float) -> list[dict]:
    """One record for each implementation; a failure is a record too."""
    records, workloads, singles = {}, {}, {}
    for name in case.implementations:
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
            records[name]["losses"] = _losses(compiled, state, batch)
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
            records[name] |= timing.time_entries(timed, timings.get(case.implementations[0]))
            if jax.default_backend() == "gpu":
                records[name]["kernel_times"] = kernel_times(singles[name])
        except Exception as error:
            records[name]["error"] = timing.error_text(error)
    return list(records.values())


def table(rich, records: Sequence[dict], device: str):
    """Time and memory of each form, a row for each."""
    result = rich.table(
        title=f"training steps on {device}",
        caption="Wall-clock, medians. Rest: kernels but matrix products, convolutions and attention. Saved: from "
        "forward to backward, before XLA compiles.",
    )
    for name in ("case", "", "step", "", "rest", "", "temporary memory", "", "saved", ""):
        result.add_column(name, justify="right" if result.columns[1:] else "left")
    for label in dict.fromkeys(r["case"] for r in records):
        plain, *others = (r for r in records if r["case"] == label)
        for r in (plain, *others):
            cells = []
            for number, text in (
                (lambda r: r.get("seconds"), display.duration),
                (rest, display.duration),
                (lambda r: r.get("temporary_bytes"), _megabytes),
                (lambda r: r.get("residual_bytes"), _megabytes),
            ):
                cells += timing.compared(number(r), None if r is plain else number(plain), text)
            result.add_row(label if r is plain else "", r["implementation"], *cells)
    return result


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which cases."""
    parser.add_argument(
        "--cases", choices=tuple(CASES), default="ci", help="small models, or those for a GPU"
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases with TEXT")


def selected(options: argparse.Namespace) -> list[TrainCase]:
    """The cases that the options of `add_cases` name."""
    return [c for c in CASES[options.cases] if options.filter in c.label]


def main(argv: Sequence[str] | None = None) -> int:
    """Times the cases.

    Returns:
      0; 1 when jaxnorm itself failed in some case.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        description="Time training steps as they are, under autofuse, and with jaxnorm's calls.",
    )
    add_cases(parser)
    parser.add_argument(
        "--budget", type=float, default=5.0, help="seconds to time each step for (default: 5)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results")
    options = parser.parse_args(argv)
    rich = display.require_rich()
    head = timing.header("wall", timer.copy_rate("wall"))
    records: list[dict] = []
    cases = selected(options)
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
    failed = timing.print_failures(console, records)
    return int(any(r["implementation"] in ("autofuse", "jaxnorm") for r in failed))


if __name__ == "__main__":
    sys.exit(main())
