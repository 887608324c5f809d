"""Times the head of language models, loss and gradients in one jit: `python -m bench.head`.

The forms are optax's loss of float32 logits, `jaxnorm.softmax_cross_entropy(x @ w)` and `jaxnorm.linear_cross_entropy`.
Their temporary memory is what the compiled program asks for beyond arguments and results. With several devices,
`--split` has the classes of `softmax_cross_entropy` on all of them, and its records say how long the kernels of one
device took for their part.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxnorm
from bench import timing
from jaxnorm._measure import display, timer


@dataclasses.dataclass(frozen=True)
class HeadCase:
    """Tokens, features of each and classes, in bfloat16."""

    tokens: int
    width: int
    classes: int

    @property
    def label(self) -> str:
        return f"head {self.tokens}x{self.width}x{self.classes} bfloat16"

    def arguments(self) -> tuple:
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (self.tokens, self.width), jnp.bfloat16)
        w = jax.random.normal(keys[1], (self.width, self.classes), jnp.bfloat16)
        labels = jax.random.randint(keys[2], (self.tokens,), 0, self.classes)
        return x, w * self.width**-0.5, labels


def _optax(x, w, labels):
    logits = (x @ w).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _unchunked(x, w, labels):
    return jaxnorm.softmax_cross_entropy(x @ w, labels).mean()


CASES = {
    "ci": (HeadCase(64, 16, 512),),
    "full": (HeadCase(16384, 2048, 128256), HeadCase(8192, 4096, 128256)),
}


def forms(chunks: Sequence[int] = ()) -> dict[str, Callable]:
    """Losses by name, optax's first."""
    linear = jaxnorm.linear_cross_entropy
    found = {"optax": _optax, "softmax_cross_entropy": _unchunked, "linear_cross_entropy": linear}
    found |= {
        f"linear_cross_entropy, {n} tokens": functools.partial(linear, chunk=n) for n in chunks
    }
    return found


def measure(case: HeadCase, chunks: Sequence[int] = ()) -> list[dict]:
    """One record for each form; a failure is a record too."""
    records, workloads = {}, {}
    args = case.arguments()
    losses = forms(chunks)
    for name, loss in losses.items():
        records[name] = {
            "op": "head",
            "case": case.label,
            "direction": "both",
            "implementation": name,
            "error": None,
        }
        try:
            compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
            records[name]["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
            records[name]["loss"] = float(compiled(*args)[0])
            workloads[name] = timer.Workload(lambda _, f=compiled: f(*args))
        except Exception as error:
            records[name]["error"] = timing.error_text(error)
    timings = timer.measure(workloads)
    for name, timed in timings.items():
        if isinstance(timed, Exception):
            records[name]["error"] = timing.error_text(timed)
        else:
            records[name] |= timing.time_entries(timed, timings.get("optax"))
    return list(records.values())


def split_classes(case: HeadCase, copy: timer.CopyRate) -> list[dict]:
    """Forward and backward of softmax_cross_entropy with the classes on all devices: the kernels' time on one."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("d",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
    shape = (case.tokens, case.classes)
    logits = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), out_shardings=sharded
    )()
    labels = jnp.zeros(case.tokens, jnp.int32)

    def loss(x):
        return jaxnorm.softmax_cross_entropy(x, labels).sum()

    records, calls = [], 5
    for direction, function, passes in (
        ("forward", loss, 1),
        ("both", jax.value_and_grad(loss), 3),
    ):
        step = jax.jit(function).lower(logits).compile()
        events = timer.trace_events(
            lambda f=step: jax.block_until_ready([f(logits) for _ in range(calls)])
        )
        ours = [e for e in events if "jaxnorm" in e.name]
        seconds = sum(e.seconds for e in ours) / calls
        moved = passes * np.prod(shape) * 2 / len(devices)
        records.append(
            {
                "op": "head",
                "case": f"classes of {case.tokens}x{case.classes} bfloat16 on {len(devices)} devices",
                "direction": direction,
                "implementation": "softmax_cross_entropy",
                "error": None if ours else "no kernel of jaxnorm's ran",
                "seconds": seconds,
                "kernels": sorted({e.name[:80] for e in events}),
                "share_of_copy": moved / seconds / copy.bytes_per_second if ours else None,
            }
        )
    return records


def table(rich, records: Sequence[dict], device: str):
    """Time and memory of each form, a row for each."""
    result = rich.table(
        title=f"heads of language models on {device}",
        caption="Loss and gradients in one jit, medians. Of a split head: the kernels on one device.",
    )
    for name in ("case", "", "time", "", "temporary memory", "", "of a copy"):
        result.add_column(name, justify="right" if result.columns[1:] else "left")
    bases: dict = {}
    for r in records:
        base = bases.setdefault(r["case"], r)
        cells = []
        for key, text in (("seconds", display.duration), ("temporary_bytes", _gigabytes)):
            cells += timing.compared(r.get(key), None if r is base else base.get(key), text)
        share = r.get("share_of_copy")
        name = r["implementation"] if "share_of_copy" not in r else r["direction"]
        result.add_row(
            r["case"] if r is base else "", name, *cells, "" if share is None else f"{share:.2f}"
        )
    return result


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def main(argv: Sequence[str] | None = None) -> int:
    """Times the cases.

    Returns:
      0; 1 when jaxnorm itself failed in some case.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.head",
        description="Time the head of language models: loss and gradients.",
    )
    parser.add_argument(
        "--cases", choices=tuple(CASES), default="ci", help="a small head, or those for a GPU"
    )
    parser.add_argument(
        "--chunks", default="", metavar="N,N", help="linear_cross_entropy with these chunks, too"
    )
    parser.add_argument(
        "--split", action="store_true", help="softmax_cross_entropy with its classes on all devices"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results")
    options = parser.parse_args(argv)
    rich = display.require_rich()
    copy = timer.copy_rate()
    head = timing.header(timer.find_clock()[0], copy)
    chunks = [int(n) for n in options.chunks.split(",") if n]
    records: list[dict] = []
    for case in CASES[options.cases]:
        records += split_classes(case, copy) if options.split else measure(case, chunks)
        if options.json:
            timing.write_json(options.json, {"header": head, "records": records})
    console = rich.console()
    console.print(table(rich, records, head["device"]))
    failed = timing.print_failures(console, records)
    return int(any(r["implementation"] != "optax" for r in failed))


if __name__ == "__main__":
    sys.exit(main())
