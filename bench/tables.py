"""Writes the tables of README and docs from the result files: `python -m bench.tables README.md docs/h100.md`.

A table follows a line `<!-- table: NAME -->` in the page, where NAME is one of `TABLES`.
"""

# ruff: noqa: RUF001  (the pages have multiplication signs and dashes)

import argparse
import functools
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence

from bench.cases import CROSS_ENTROPY, NORMS
from bench.compare import Key, index
from bench.timing import read_json

RESULTS = pathlib.Path(__file__).parent / "results"

Records = dict[Key, dict]
Rows = list[list[str]]


def fill(page: str) -> str:
    """The page with each of its tables as the result files have it."""

    def table(found: re.Match) -> str:
        name = found[1]
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r}")
        head, *rows = TABLES[name]()
        lines = [_line(head), "|" + "---|" * len(head), *map(_line, rows)]
        return "\n".join([f"<!-- table: {name} -->", *lines, ""])

    return re.sub(r"^<!-- table: (\S+) -->\n(?:\|.*\n)*", table, page, flags=re.MULTILINE)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- the tables: a row of headings, then one for each case, in the order of the file ----


def _softmax() -> Rows:
    records = _read("softmax", "log_softmax")
    heads = "bfloat16 rows × columns | softmax forward | backward | log_softmax forward | backward"
    rows = [heads.split(" | ")]
    for r in _cases(records, "softmax"):
        label = _label(r) if len(r["shape"]) == 2 else r["case"].replace(" bfloat16", "")
        cells = [
            # Nothing where an operation lacks the case: log_softmax has none of attention.
            _cell(records, op, r["case"], d) if (op, r["case"], d, "jaxnorm") in records else ""
            for op in ("softmax", "log_softmax")
            for d in ("forward", "backward")
        ]
        rows.append([label, *cells])
    return rows


def _norm(device: str = "h200") -> Rows:
    records = _read(*NORMS, device=device)
    heads = "bfloat16 rows × columns, float32 parameters | layer_norm forward | backward"
    heads += " | rms_norm forward | backward"
    rows = [heads.split(" | ")]
    for r in _cases(records, "layer_norm"):
        cells = [
            _cell(records, op, r["case"], d) for op in NORMS for d in ("forward_train", "backward")
        ]
        rows.append([_label(r), *cells])
    return rows


def _cross_entropy() -> Rows:
    records = _read(CROSS_ENTROPY)
    heads = "bfloat16 rows × classes | forward: time, of copy, XLA, PyTorch | backward | gradient"
    rows = [heads.split(" | ")]
    for r in _cases(records, CROSS_ENTROPY):
        cells = [
            _cell(records, CROSS_ENTROPY, r["case"], d, ("xla", "torch"))
            for d in ("forward", "backward", "grad")
        ]
        rows.append([_label(r), *cells])
    return rows


def _batch_norm(device: str = "h200") -> Rows:
    records = _read("batch_norm", device=device)
    peers, directions = ("xla", "torch"), ("forward_train", "backward")
    heads = "float16 | forward: time, of copy, XLA, PyTorch | backward | both: XLA, PyTorch"
    rows = [heads.split(" | ")]
    tails = {"": "", "relu": ", relu", "add_relu": ", add, relu"}
    for r in _cases(records, "batch_norm"):
        layout = "NCHW" if r["axis"] == 1 else "NHWC"
        cells = [_cell(records, "batch_norm", r["case"], d, peers) for d in directions]
        ours, *theirs = (
            sum(records["batch_norm", r["case"], d, name]["seconds"] for d in directions)
            for name in ("jaxnorm", *peers)
        )
        both = ", ".join(_ratio(t / ours) for t in theirs)
        rows.append([f"{_shape(r)} {layout}{tails[r['tail']]}", *cells, both])
    return rows


def _relu() -> Rows:
    records = _read("relu", "add_relu")
    rows = ["bfloat16, 256 MB | forward, with mask | backward".split(" | ")]
    for op in ("relu", "add_relu"):
        # Rows that are whole bytes of the mask, and rows that are not.
        for r in _cases(records, op):
            if r["case"] in ("32768x4096 bfloat16", "131072x1023 bfloat16"):
                cells = [_cell(records, op, r["case"], d) for d in ("forward_train", "backward")]
                rows.append([f"{op} {_label(r)}", *cells])
    return rows


def _program() -> Rows:
    records = _read("program")
    heads = "program under grad, one jit | kernel time, against XLA"
    heads += " | temporary memory, XLA → jaxnorm"
    rows = [heads.split(" | ")]
    conv = "1×1 convolution, batch_norm and relu, 1×1 convolution"
    for ours in _cases(records, "program"):
        label = ours["case"].replace(" bfloat16", "")
        if ours["program"] == "conv":
            label = f"{conv} {'x'.join(map(str, ours['shape']))}"
            conv = "the same"
        xla = records["program", ours["case"], "grad", "xla"]
        memory = [_megabytes(r["temporary_bytes"]) for r in (xla, ours)]
        time = f"{_time(ours['seconds'])}, {_ratio(xla['ratio'])}"
        rows.append([label, time, f"{' → '.join(memory)} MB"])
    return rows


def _train() -> Rows:
    records = _read("train")
    heads = "whole training step, one jit, bfloat16, Flax → jaxnorm | step | temporary memory"
    heads += " | saved from forward to backward"
    rows = [heads.split(" | ")]
    labels = {
        "resnet 256x224x224x3 bfloat16": "ResNet-50, 256 images of 224×224, NNX",
        "resnet recompute 256x224x224x3 bfloat16": (
            "the same, `nnx.remat` by stages: [docs/flax.md](docs/flax.md)"
        ),
        "transformer 16x1024 bfloat16": "transformer, 12 layers, d = 1024, 16 × 1024 tokens, Linen",
    }
    for ours in _cases(records, "train"):
        flax = records["train", ours["case"], "step", "flax"]
        step, *memory = (
            f"{flax[key] / size:.1f} → {ours[key] / size:.1f} {unit}"
            for key, size, unit in (
                ("seconds", 1e-3, "ms"),
                ("temporary_bytes", 1e9, "GB"),
                ("residual_bytes", 1e9, "GB"),
            )
        )
        rows.append([labels[ours["case"]], f"{step} ({_ratio(flax['ratio'])})", *memory])
    return rows


TABLES = {
    "softmax": _softmax,
    "norm": _norm,
    "cross_entropy": _cross_entropy,
    "batch_norm": _batch_norm,
    "relu": _relu,
    "program": _program,
    "train": _train,
    "h100/norm": functools.partial(_norm, "h100"),
    "h100/batch_norm": functools.partial(_batch_norm, "h100"),
}


# ---- what they share ----


def _read(*names: str, device: str = "h200") -> Records:
    """Records of all these files of a device."""
    records: Records = {}
    for name in names:
        records |= index(read_json(RESULTS / f"{device}-{name}.json"))
    return records


def _cases(records: Records, op: str) -> list[dict]:
    """The first record of jaxnorm for each case of an operation."""
    cases: dict[str, dict] = {}
    for (of, case, _, implementation), record in records.items():
        if (of, implementation) == (op, "jaxnorm"):
            cases.setdefault(case, record)
    return list(cases.values())


def _cell(
    records: Records, op: str, case: str, direction: str, peers: Sequence[str] = ("xla",)
) -> str:
    """Time, fraction of a copy's rate, and the time of each peer divided by ours; – where the peer failed."""
    ours = records[op, case, direction, "jaxnorm"]
    theirs = [records[op, case, direction, peer] for peer in peers]
    ratios = ["–" if peer["error"] else _ratio(peer["ratio"]) for peer in theirs]
    return ", ".join([_time(ours["seconds"]), f"{ours['copy_fraction']:.2f}", *ratios])


def _shape(record: dict) -> str:
    return " × ".join(map(str, record["shape"]))


def _label(record: dict) -> str:
    """The case's name without bfloat16, which the headings say."""
    _, *rest = record["case"].replace(" bfloat16", "").split()
    return " ".join([_shape(record), *rest])


def _time(seconds: float) -> str:
    """Microseconds, so that the times of a table compare at a glance."""
    value = seconds * 1e6
    return f"{value:.1f} µs" if value < 99.95 else f"{value:.0f} µs"


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _megabytes(size: int) -> str:
    value = size / 1e6
    return f"{value:.1f}" if 0.05 <= value < 9.95 else f"{value:.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tables",
        description="Write the tables of pages from bench/results/, in place.",
    )
    parser.add_argument(
        "pages", metavar="PAGE", nargs="+", type=pathlib.Path, help="README.md docs/h100.md"
    )
    for path in parser.parse_args(argv).pages:
        path.write_text(fill(path.read_text()))
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
