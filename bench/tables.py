"""Writes tables of README and docs from the result files: `python -m bench.tables README.md docs/*.md`.

A table follows a line `<!-- table: NAME -->` in the page, where NAME is one of `TABLES`, a paragraph a line
`<!-- text: NAME -->` with one of `TEXTS`.
"""

# ruff: noqa: RUF001  (the pages have multiplication signs and dashes)

import argparse
import functools
import pathlib
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence

from bench.cases import BORDERS, CROSS_ENTROPY, DEFAULT_DIRECTIONS, NORMS
from bench.compare import Key, index
from bench.fuse import sweep
from bench.kernels import rest
from bench.row_programs import COLUMNS, MAIN, SWEEP
from bench.row_programs import DIRECTIONS as ROW_DIRECTIONS
from bench.timing import read_json

RESULTS = pathlib.Path(__file__).parent / "results"

# README's tables are of the files of this card. Those of training steps are of another one.
DEVICE = "h100"
MODELS_DEVICE = "h200"

# Operations of README's tables, each with a file of its own.
REPORTED = (
    "softmax",
    "log_softmax",
    *NORMS,
    CROSS_ENTROPY,
    "batch_norm",
    "batch_norm_inference",
    "relu",
    "add_relu",
)
PEERS = {"xla": "XLA", "torch": "PyTorch", "torch.compile": "torch.compile"}
# Name and size of each case of `python -m bench.train --cases full`.
MODELS = {
    "resnet 256x224x224x3 bfloat16": ("ResNet-50", "256 images of 224 × 224"),
    "resnet recompute 256x224x224x3 bfloat16": ("ResNet-50 with remat", "256 images of 224 × 224"),
    "transformer 16x1024 bfloat16": ("transformer", "12 layers, 16 × 1024 tokens"),
    "llama 4x4096 bfloat16": ("Llama", "8 layers, 4 × 4096 tokens"),
    "dit 64x256 bfloat16": ("DiT", "28 layers, 64 × 256 patches"),
    "vit 64x256 bfloat16": ("ViT-L with dropout", "64 × 256 patches"),
    "mamba 4x2048 bfloat16": ("state-space model", "8 layers, 4 × 2048 tokens"),
    "rl 8192x128256 bfloat16": ("policy-gradient loss", "8192 × 128256 logits"),
}
# The forms of `python -m bench.head`, the plain one first.
HEADS = {
    "optax": "optax, float32 logits",
    "softmax_cross_entropy": "`softmax_cross_entropy(x @ w, labels)`",
    "linear_cross_entropy": "`linear_cross_entropy(x, w, labels)`",
}
_DIRECTIONS = {
    "forward": "forward",
    "together": "both in one program",
    "forward_train": "forward",
    "backward": "backward",
    "grad": "gradient",
}

Records = dict[Key, dict]
Rows = list[list[str]]


def fill(page: str) -> str:
    """The page with each of its tables and sentences as the result files have it."""

    def table(found: re.Match) -> str:
        head, *rows = _named(TABLES, "table", found[1])()
        lines = [_line(head), "|" + "---|" * len(head), *map(_line, rows)]
        return "\n".join([f"<!-- table: {found[1]} -->", *lines, ""])

    def text(found: re.Match) -> str:
        return (
            f"<!-- text: {found[1]} -->\n"
            f"{textwrap.fill(_named(TEXTS, 'text', found[1])(), 120, break_on_hyphens=False)}\n"
        )

    page = re.sub(r"^<!-- table: (\S+) -->\n(?:\|.*\n)*", table, page, flags=re.MULTILINE)
    return re.sub(r"^<!-- text: (\S+) -->\n(?:.+\n)*", text, page, flags=re.MULTILINE)


def _named(functions: dict[str, Callable], kind: str, name: str) -> Callable:
    if name not in functions:
        raise ValueError(f"{kind} must be one of {', '.join(functions)}, got {name!r}")
    return functions[name]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- the tables: a row of headings, then one for each case, in the order of the file ----


def _softmax(device: str, directions: Sequence[str]) -> Rows:
    def label(r):
        return _label(r) if len(r["shape"]) == 2 else r["case"].replace(" bfloat16", "")

    ops, head = ("softmax", "log_softmax"), "bfloat16 rows × columns"
    return _by_case(head, ops, device, directions, label, _shown(directions))


def _norm(device: str, directions: Sequence[str]) -> Rows:
    head = "bfloat16 rows × columns, float32 parameters"
    return _by_case(head, NORMS, device, directions, _label, _shown(directions))


def _shown(directions: Sequence[str]) -> Callable[[dict], bool]:
    """Not all of the many rows of 49152, where the summary above has them."""
    between = (64, 256, 512, 2048, 4095, 8192) if "together" in directions else ()
    return lambda r: r["shape"][0] != 49152 or r["shape"][-1] not in between


def _cross_entropy(device: str, directions: Sequence[str]) -> Rows:
    return _by_case("bfloat16 rows × classes", (CROSS_ENTROPY,), device, directions, _label)


def _batch_norm(device: str, directions: Sequence[str]) -> Rows:
    head, *rows = _by_case("float16", ("batch_norm",), device, directions, _features)
    if "together" in directions:
        return [head, *rows]
    # Of two programs, what both take.
    records = _read("batch_norm", device=device)
    peers = _peers(records, "batch_norm")
    head.append("sum: " + ", ".join(PEERS[p] for p in peers))
    for row, r in zip(rows, _cases(records, "batch_norm"), strict=True):
        ours, *theirs = (
            sum(records["batch_norm", r["case"], d, name]["seconds"] for d in directions)
            for name in ("jaxnorm", *peers)
        )
        row.append(", ".join(_ratio(t / ours) for t in theirs))
    return [head, *rows]


def _batch_norm_inference(device: str, directions: Sequence[str]) -> Rows:
    def chosen(r):  # one size, in both layouts and with every tail
        return sorted(r["shape"]) == [56, 56, 256, 256]

    ops = ("batch_norm_inference",)
    return _by_case("float16", ops, device, directions, _features, chosen)


def _relu(device: str, directions: Sequence[str]) -> Rows:
    def label(r):
        return f"{r['op']} {_label(r)}"

    def chosen(r):  # rows that are whole bytes of the mask, and rows that are not
        return r["case"] in ("32768x4096 bfloat16", "131072x1023 bfloat16")

    tables = [
        _by_case("bfloat16, 256 MB", (op,), device, directions, label, chosen)
        for op in ("relu", "add_relu")
    ]
    (head, *rows), (other_head, *other_rows) = tables
    if head != other_head:
        raise ValueError(f"files of relu and add_relu must have the same peers, got {other_head}")
    return [head, *rows, *other_rows]


def _by_case(
    first: str,
    ops: Sequence[str],
    device: str,
    directions: Sequence[str],
    label: Callable[[dict], str],
    chosen: Callable[[dict], bool] = lambda r: True,
) -> Rows:
    """A row for each case of the first operation, a cell for each operation and direction."""
    records = _read(*ops, device=device)
    peers = {op: _peers(records, op) for op in ops}
    head = [first]
    for op in ops:
        titles = [_DIRECTIONS[d] for d in directions]
        if op != ops[0] or len(ops) > 1:
            titles[0] = f"{op} {titles[0]}"
        titles[0] += f": time, of copy, {', '.join(PEERS[p] for p in peers[op])}"
        head += titles
    rows = [head]
    for r in filter(chosen, _cases(records, ops[0])):
        cells = [
            # Nothing where an operation lacks the case: log_softmax has none of attention.
            _cell(records, op, r["case"], d, peers[op])
            if op == ops[0] or (op, r["case"], d, "jaxnorm") in records
            else ""
            for op in ops
            for d in directions
        ]
        rows.append([label(r), *cells])
    return rows


def _summary() -> Rows:
    """Of each operation the range of its cases, and the mean of what it is compared with."""
    rows = []
    for op in REPORTED:
        records = _read(op)
        cells = [f"`{op}`, {len(_cases(records, op))} cases"]
        for direction in DEFAULT_DIRECTIONS:
            for peer in ("xla", "torch"):
                ratios = [
                    r["ratio"]
                    for (_, _, d, name), r in records.items()
                    if (d, name) == (direction, peer) and not r["error"]
                ]
                mean = f"{statistics.geometric_mean(ratios):.2f}×" if ratios else ""
                between = f" ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
                cells.append(mean + between)
        rows.append(cells)
    heads = "bfloat16 (batch_norm: float16) | forward alone: XLA | PyTorch"
    heads += " | forward and backward in one program: XLA | PyTorch"
    return [heads.split(" | "), *rows]


def _losses() -> Rows:
    """Where XLA or PyTorch is faster by more than the spread, in the files of README's tables."""
    rows = ["slower than | where | the other's time / ours".split(" | ")]
    for op in REPORTED:
        records = _read(op)
        for peer, direction in ((p, d) for p in _peers(records, op) for d in DEFAULT_DIRECTIONS):
            timed = {
                case: r
                for (_, case, d, name), r in records.items()
                if (d, name) == (direction, peer) and not r["error"]
            }
            lost = {
                case: r for case, r in timed.items() if r["ratio"] * (1 + r["ratio_spread"]) < 1
            }
            if not lost:
                continue
            which = f"{len(lost)} of {len(timed)} cases"
            if len(lost) <= 3 and len(lost) < len(timed):
                which = "; ".join(case.replace(" bfloat16", "") for case in lost)
            ratios = sorted(round(r["ratio"], 2) for r in lost.values())
            low, high = f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
            rows.append(
                [
                    PEERS[peer],
                    f"{op}, {_DIRECTIONS[direction]}: {which}",
                    f"{low}×" if low == high else f"{low} to {high}×",
                ]
            )
    return rows


def _program() -> Rows:
    records = _read("program")
    heads = "program under grad, one jit | kernel time, against XLA"
    heads += " | temporary memory, XLA → jaxnorm"
    rows = [heads.split(" | ")]
    conv = "1×1 convolution, batch_norm and relu, 1×1 convolution"
    borders = {"gated": "rms_norm(x * silu(z))", "gelu": "gelu(layer_norm(x))"}
    for (_, case, direction, implementation), ours in records.items():
        if implementation != "jaxnorm":
            continue
        label = case.replace(" bfloat16", "")
        if ours["program"] == "conv":
            label = f"{conv} {'x'.join(map(str, ours['shape']))}"
            conv = "the same"
        if ours["program"] in BORDERS:
            label = f"`{borders[ours['program']]}` {_shape(ours)}"
            label += ", forward alone, no grad" if direction == "forward" else ""
        xla = records["program", case, direction, "xla"]
        sizes = [r["temporary_bytes"] for r in (xla, ours)]
        memory = "" if None in sizes else f"{' → '.join(map(_megabytes, sizes))} MB"
        rows.append([label, f"{_time(ours['seconds'])}, {_ratio(xla['ratio'])}", memory])
    return rows


def _train() -> Rows:
    records = _read("models", device=MODELS_DEVICE)
    name = _header("models", MODELS_DEVICE)["device"]
    heads = (
        f"whole training step, one jit, bfloat16, {name}, Flax → jaxnorm | step | temporary memory"
    )
    heads += " | saved from forward to backward"
    rows = [heads.split(" | ")]
    labels = {
        "resnet 256x224x224x3 bfloat16": "ResNet-50, 256 images of 224×224, NNX",
        "resnet recompute 256x224x224x3 bfloat16": (
            "the same, `nnx.remat` by stages: [docs/flax.md](docs/flax.md)"
        ),
        "transformer 16x1024 bfloat16": "transformer, 12 layers, d = 1024, 16 × 1024 tokens, Linen",
    }
    for case, label in labels.items():
        flax, ours = (records["train", case, "step", form] for form in ("flax", "jaxnorm"))
        step, *memory = (
            f"{flax[key] / size:.1f} → {ours[key] / size:.1f} {unit}"
            for key, size, unit in (
                ("seconds", 1e-3, "ms"),
                ("temporary_bytes", 1e9, "GB"),
                ("residual_bytes", 1e9, "GB"),
            )
        )
        rows.append([label, f"{step} ({_ratio(flax['seconds'] / ours['seconds'])})", *memory])
    return rows


def _models() -> Rows:
    """Whole training steps: what autofuse and calls by hand change, against the plain step."""
    columns = ("step", "rest", "memory", "losses")
    heads = [f"{form}: {columns[0]}" for form in ("autofuse", "by hand")]
    rows = [["model", "plain", heads[0], *columns[1:], heads[1], *columns[1:]]]
    for case, (plain, *others) in _steps().items():
        cells = [f"{plain['seconds'] * 1e3:.1f} ms"]
        for r in others:
            cells += ["–"] * len(columns) if r["error"] else _against(plain, r)
        rows.append([", ".join(MODELS[case]), *cells])
    return rows


def _against(plain: dict, record: dict) -> list[str]:
    """Speed, and time of the rest and temporary memory as fractions of the plain step's, and how far losses are."""
    return [
        _ratio(plain["seconds"] / record["seconds"]),
        f"{rest(record) / rest(plain):.2f}",
        f"{record['temporary_bytes'] / plain['temporary_bytes']:.2f}",
        _percent(_difference(plain, record)),
    ]


def _difference(plain: dict, record: dict) -> float:
    """Largest difference of the losses, as a part of the first one."""
    losses = zip(plain["losses"], record["losses"], strict=True)
    return max(abs(theirs - ours) for theirs, ours in losses) / abs(plain["losses"][0])


def _steps() -> dict[str, list[dict]]:
    """Records of each model's step: plain, under autofuse, with calls by hand."""
    steps: dict[str, list[dict]] = {}
    for record in _run("models", MODELS_DEVICE)["records"]:
        steps.setdefault(record["case"], []).append(record)
    return steps


def _head() -> Rows:
    """Heads of language models: time and temporary memory of each form, and both against optax's."""
    heads = (
        "tokens × features, classes, bfloat16 | form | loss and both gradients | temporary memory"
    )
    rows = [heads.split(" | ")]
    for case, forms in _heads().items():
        plain = forms["optax"]
        for name, label in HEADS.items():
            cells = [_tokens(case) if name == "optax" else "", label]
            rows.append([*cells, *_of_head(plain, forms[name])])
    return rows


def _of_head(plain: dict, record: dict) -> list[str]:
    if record["error"]:
        return ["–", "–"]
    time = f"{record['seconds'] * 1e3:.1f} ms"
    memory = f"{record['temporary_bytes'] / 1e9:.2f} GB"
    if record is plain or plain["error"]:
        return [time, memory]
    speed = _ratio(plain["seconds"] / record["seconds"])
    return [
        f"{time}, {speed}",
        f"{memory}, {record['temporary_bytes'] / plain['temporary_bytes']:.2f}",
    ]


def _heads() -> dict[str, dict[str, dict]]:
    """Records of each head by form."""
    heads: dict[str, dict[str, dict]] = {}
    for record in _run("head")["records"]:
        heads.setdefault(record["case"], {})[record["implementation"]] = record
    return heads


def _sizes(case: str) -> list[int]:
    """Tokens, features and classes of a head by its label."""
    return [int(n) for n in case.split()[1].split("x")]


def _tokens(case: str) -> str:
    tokens, width, classes = _sizes(case)
    return f"{tokens} × {width}, {classes}"


def _fuse() -> Rows:
    """Each row program at the size that users have; headings alone where no file has figures."""
    records = _row_programs()
    peers = _peers(records, "fuse")
    named = ", ".join(["time", "of copy", *(PEERS[p] for p in peers)])
    rows = [["bfloat16", f"forward: {named}", *ROW_DIRECTIONS[1:]]]
    for ours in _cases(records, "fuse"):
        if ours["tag"] != MAIN:
            continue
        cells = [
            _cell(records, "fuse", ours["case"], direction, peers)
            if ("fuse", ours["case"], direction, "jaxnorm") in records
            else ""
            for direction in ROW_DIRECTIONS
        ]
        rows.append([f"`{ours['family']}` {_shape(ours)}", *cells])
    return rows


def _fuse_columns() -> Rows:
    """Three row programs over row lengths: fraction of a copy's rate, and the time of others divided by ours."""
    records = _row_programs()
    swept = {r["case"] for r in records.values() if r["tag"] == SWEEP}
    # What every row length was compared with.
    peers = [
        p
        for p in _peers(records, "fuse")
        if all(("fuse", case, "forward", p) in records for case in swept)
    ]
    families = list(dict.fromkeys(r["family"] for r in records.values() if r["tag"] == SWEEP))
    named = ", ".join(["of copy", *(PEERS[p] for p in peers)])
    head = ["columns"]
    found = {}
    for family in families:
        head += [f"{family} forward: {named}", "vjp"]
        for r in sweep(list(records.values()), family):
            found[family, r["columns"], r["direction"]] = r["case"]
    rows = [head]
    for columns in COLUMNS if families else ():
        cells = []
        for family, direction in ((f, d) for f in families for d in ROW_DIRECTIONS[:2]):
            case = found[family, columns, direction]
            _, *figures = _cell(records, "fuse", case, direction, peers).split(", ")
            cells.append(", ".join(figures))
        rows.append([str(columns), *cells])
    return rows


def _row_programs() -> Records:
    """Nothing before they are measured."""
    return _read("fuse") if _path("fuse").exists() else {}


_TWO_PROGRAMS = ("forward_train", "backward")

TABLES: dict[str, Callable[[], Rows]] = {
    "summary": _summary,
    **{
        name: functools.partial(function, DEVICE, DEFAULT_DIRECTIONS)
        for name, function in (
            ("softmax", _softmax),
            ("norm", _norm),
            ("cross_entropy", _cross_entropy),
            ("batch_norm", _batch_norm),
            ("batch_norm_inference", _batch_norm_inference),
            ("relu", _relu),
        )
    },
    "program": _program,
    "head": _head,
    "fuse": _fuse,
    "train": _train,
    "losses": _losses,
    "h100/norm": functools.partial(_norm, "h100", _TWO_PROGRAMS),
    "h100/batch_norm": functools.partial(_batch_norm, "h100", _TWO_PROGRAMS),
    "h200/softmax": functools.partial(_softmax, "h200", ("forward", "backward")),
    "h200/norm": functools.partial(_norm, "h200", _TWO_PROGRAMS),
    # Arrays that the L2 cache keeps.
    "h200-cached/norm": functools.partial(_norm, "h200-cached", DEFAULT_DIRECTIONS),
    "h200/cross_entropy": functools.partial(
        _cross_entropy, "h200", ("forward", "backward", "grad")
    ),
    "h200/batch_norm": functools.partial(_batch_norm, "h200", _TWO_PROGRAMS),
    "h200/relu": functools.partial(_relu, "h200", _TWO_PROGRAMS),
    "models": _models,
    "fuse/columns": _fuse_columns,
}


# ---- sentences ----


def _card(device: str, names: Sequence[str]) -> str:
    """With what and on what the files of these operations were measured."""
    heads = [_header(name, device=device) for name in names]
    found = {}
    for key in ("jax", "torch"):
        # "2.11.0+cu130" is PyTorch's 2.11.0.
        versions = {h["versions"][key].partition("+")[0] for h in heads if key in h["versions"]}
        found[key] = " and ".join(sorted(versions))
    devices = sorted({h["device"] for h in heads})
    if len(devices) > 1:
        raise ValueError(f"files of {device} must be of one device, got {', '.join(devices)}")
    rates = [h["copy"]["bytes_per_second"] / 1e12 for h in heads]
    low, high = f"{min(rates):.2f}", f"{max(rates):.2f}"
    copy = low if low == high else f"{low} to {high}"
    peers = f", PyTorch {found['torch']}" if found["torch"] else ""
    return (
        f"One {devices[0]}, jax {found['jax']}{peers}. A device-to-device copy, timed in the same process, moves "
        f"{copy} TB/s."
    )


def _fuse_card() -> str:
    return _card(DEVICE, ["fuse"]) if _path("fuse").exists() else "No figures yet."


def _models_speed() -> str:
    """Speed of each model's step, under autofuse and with calls by hand."""
    speeds = []
    for case, (plain, *others) in _steps().items():
        ours, hand = (
            "–" if r["error"] else _ratio(plain["seconds"] / r["seconds"]) for r in others
        )
        speeds.append(f"{MODELS[case][0]} {ours} ({hand})")
    device = _header("models", MODELS_DEVICE)["device"]
    return (
        f"Speed of whole training steps on one {device} against the same step without that line, and in "
        f"brackets with calls by hand; below 1 is slower: {', '.join(speeds)}. "
        "[docs/autofuse.md](docs/autofuse.md#whole-models) has the models, and what becomes of memory."
    )


def _models_card() -> str:
    header = _header("models", MODELS_DEVICE)
    versions = header["versions"]
    return f"Each step on one {header['device']}, jax {versions['jax']}, Flax {versions['flax']}."


def _models_losses() -> str:
    """How far losses of one function are from each other."""
    kept, recomputed = (
        plain for case, (plain, *_) in _steps().items() if case.startswith("resnet ")
    )
    return (
        f"The losses of ResNet-50 fall from {kept['losses'][0]:.1f} to {kept['losses'][-1]:.3f} on its one batch, and "
        "small differences grow on the way: those of its plain steps without and with remat, which are one function, "
        f"are up to {_percent(_difference(kept, recomputed))} apart."
    )


def _head_card() -> str:
    header = _header("head")
    jax = header["versions"]["jax"]
    return (
        f"The loss and the gradients of x and w in one jit, on one {header['device']}, jax {jax}: "
        "time and temporary memory, and against optax's in the same run its time divided by this one's (above 1 is "
        "faster) and the part of its memory."
    )


def _head_split() -> str:
    """How fast the kernels of a loss are whose classes several devices share."""
    header = _header("head-split")
    shares: dict[str, list[str]] = {}
    for record in _run("head-split")["records"]:
        shares.setdefault(record["case"], []).append(f"{record['share_of_copy']:.2f}")
    found = "; ".join(
        f"{case.removeprefix('classes of ').replace('x', ' × ', 1)}: {' and '.join(rates)}"
        for case, rates in shares.items()
    )
    return (
        "The kernels of `softmax_cross_entropy` on each device, forward and with backward, against the rate of a copy "
        f"({header['device']}, jax {header['versions']['jax']}; `python -m bench.head --cases full --split`): {found}. "
        "Reading alone is faster than a copy."
    )


def _head_losses() -> str:
    """Where linear_cross_entropy takes more than the loss of whole logits, and what bounds its memory."""
    lost, bounds = [], []
    for case, forms in _heads().items():
        _, width, classes = _sizes(case)
        sums = 4 * width * classes
        bounds.append((sums / forms["optax"]["temporary_bytes"], sums, _tokens(case)))
        whole, ours = forms["softmax_cross_entropy"], forms["linear_cross_entropy"]
        if whole["error"] or ours["error"]:
            continue
        for key, what in (("seconds", "time"), ("temporary_bytes", "memory")):
            ratio = f"{ours[key] / whole[key]:.2f}"
            if float(ratio) > 1:
                lost.append(f"{ratio} of the {what} ({_tokens(case)})")
    than = "than `softmax_cross_entropy(x @ w, labels)`"
    found = f"more {than}: {', '.join(lost)}" if lost else f"no more time or memory {than}"
    part, sums, case = max(bounds)
    return (
        f"`linear_cross_entropy` takes {found}. The float32 sums of w's gradient alone are {sums / 1e9:.1f} GB for "
        f"{case}. That is {part:.2f} of optax's memory, and `linear_cross_entropy` cannot take less there."
    )


TEXTS: dict[str, Callable[[], str]] = {
    "models/speed": _models_speed,
    "card": functools.partial(_card, DEVICE, (*REPORTED, "program")),
    "head/card": _head_card,
    "head/losses": _head_losses,
    "h100/card": functools.partial(_card, "h100", (*NORMS, "batch_norm")),
    "h200/card": functools.partial(
        _card, "h200", [name for name in REPORTED if name != "batch_norm_inference"]
    ),
    "h200-cached/card": functools.partial(_card, "h200-cached", NORMS),
    "models/card": _models_card,
    "models/losses": _models_losses,
    "fuse/card": _fuse_card,
    "head/split": _head_split,
}


# ---- what they share ----


def _path(name: str, device: str | None = None) -> pathlib.Path:
    return RESULTS / f"{device or DEVICE}-{name}.json"


def _run(name: str, device: str | None = None) -> dict:
    return read_json(_path(name, device))


def _header(name: str, device: str | None = None) -> dict:
    return _run(name, device)["header"]


def _read(*names: str, device: str | None = None) -> Records:
    """Records of all these files of a device."""
    records: Records = {}
    for name in names:
        records |= index(_run(name, device))
    return records


def _cases(records: Records, op: str) -> list[dict]:
    """The first record of jaxnorm for each case of an operation."""
    cases: dict[str, dict] = {}
    for (of, case, _, implementation), record in records.items():
        if (of, implementation) == (op, "jaxnorm"):
            cases.setdefault(case, record)
    return list(cases.values())


def _peers(records: Records, op: str) -> list[str]:
    """Which of `PEERS` an operation was compared with."""
    found = {implementation for of, _, _, implementation in records if of == op}
    return [peer for peer in PEERS if peer in found]


def _cell(records: Records, op: str, case: str, direction: str, peers: Sequence[str]) -> str:
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


def _features(record: dict) -> str:
    """Shape, layout and what follows in the same call, of batch_norm."""
    tail = {"": "", "relu": ", relu", "add_relu": ", add, relu"}[record["tail"]]
    return f"{_shape(record)} {'NCHW' if record['axis'] == 1 else 'NHWC'}{tail}"


def _time(seconds: float) -> str:
    """Microseconds, so that the times of a table compare at a glance."""
    value = seconds * 1e6
    return f"{value:.1f} µs" if value < 99.95 else f"{value:.0f} µs"


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _percent(fraction: float) -> str:
    value = fraction * 100
    return f"{value:.2f} %" if value < 9.95 else f"{value:.0f} %"


def _megabytes(size: int) -> str:
    value = size / 1e6
    return f"{value:.1f}" if 0.05 <= value < 9.95 else f"{value:.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tables",
        description="Write the tables of pages from bench/results/, in place.",
    )
    parser.add_argument(
        "pages",
        metavar="PAGE",
        nargs="+",
        type=pathlib.Path,
        help="README.md docs/*.md",
    )
    for path in parser.parse_args(argv).pages:
        path.write_text(fill(path.read_text()))
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
