"""The tables that bench.tables writes into README.md and docs/, from the files in bench/results/."""

# ruff: noqa: RUF001  (the pages have multiplication signs and dashes)

import dataclasses
import pathlib
import re

import pytest

from bench import cases, kernels, row_programs, tables, timing

README = pathlib.Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"
PAGES = (
    README,
    *(DOCS / f"{name}.md" for name in ("split-figures", "autofuse", "fuse", "sharding")),
)


def test_pages_have_what_was_measured():
    """Written by `python -m bench.tables README.md docs/*.md`."""
    for path in PAGES:
        page = path.read_text()
        assert tables.fill(page).splitlines() == page.splitlines()


def test_pages_have_all_tables():
    for kind, known in (("table", tables.TABLES), ("text", tables.TEXTS)):
        names = [
            name
            for path in PAGES
            for name in re.findall(f"<!-- {kind}: (.*) -->", path.read_text())
        ]
        assert names == list(known)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Result files of made-up figures: of every case for a GPU, direction and peer; of the real steps and heads.

    Row i of a file takes i + 1 microseconds at half of the copy rate, XLA's twice as long and PyTorch's three times.
    """
    heads = (f"{tables.DEVICE}-{name}" for name in ("head", "head-split"))
    for name in (f"{stem}.json" for stem in (f"{tables.MODELS_DEVICE}-models", *heads)):
        timing.write_json(tmp_path / name, timing.read_json(tables.RESULTS / name))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for device in ("h100", "h200", "h200-cached"):
        for op in (*tables.REPORTED, "program"):
            dtype = "bfloat16" if op in ("relu", "add_relu") else None
            records = [
                {
                    **{f.name: getattr(case, f.name) for f in dataclasses.fields(case)},
                    "tags": None,
                    "case": case.label,
                    "direction": direction,
                    "implementation": name,
                    "seconds": (i + 1) * ratio * 1e-6,
                    "ratio": float(ratio),
                    "ratio_spread": 0.02,
                    "copy_fraction": 0.5,
                    "temporary_bytes": 1000 if direction == "grad" else None,
                    "error": None,
                }
                for i, case in enumerate(cases.select(op, "full", dtype))
                for direction in case.directions
                for ratio, name in enumerate(("jaxnorm", "xla", "torch"), start=1)
            ]
            header = {
                "schema": timing.SCHEMA,
                "device": f"NVIDIA {device.upper()}",
                "versions": {"jax": "0.11.2", "torch": "2.11.0+cu130"},
                "copy": {"bytes_per_second": 2.97e12 if op == "softmax" else 2.98e12},
            }
            path = tmp_path / f"{device}-{op}.json"
            timing.write_json(path, {"header": header, "records": records})
    records = [
        {
            "op": "fuse",
            "case": case.name,
            "family": case.family,
            "tag": case.tag,
            "shape": case.sizes,
            "columns": case.sizes[-1],
            "direction": direction,
            "implementation": name,
            "seconds": ratio * 1e-6,
            "ratio": float(ratio),
            "copy_fraction": 0.5 if case.tag == row_programs.MAIN else 0.75,
            "error": None,
        }
        for case in row_programs.ALL
        for direction in case.directions
        for ratio, name in enumerate(("jaxnorm", "xla", "torch.compile"), start=1)
    ]
    path = tmp_path / f"{tables.DEVICE}-fuse.json"
    timing.write_json(path, {"header": header, "records": records})
    return tmp_path


def _change(path, change):
    """Rewrites a result file with `change(record)` for each record."""
    run = timing.read_json(path)
    run["records"] = [record | change(record) for record in run["records"]]
    timing.write_json(path, run)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_can_be_filled(page, results):
    """Every table has rows as long as its headings; a page that is filled stays as it is."""
    filled = tables.fill(page.read_text())
    assert tables.fill(filled) == filled
    found = re.findall(r"^<!-- table: (\S+) -->\n((?:\|.*\n)*)", filled, flags=re.MULTILINE)
    for name, table in found:
        head, line, *rows = table.splitlines()
        assert {row.count("|") for row in (line, *rows)} <= {head.count("|")}, name
        assert len(rows) >= (0 if name == "losses" else 3), name
        others = ("summary", "program", "head", "fuse", "train", "models", "losses")
        if "/" not in name and name not in others:
            assert "forward: time, of copy, XLA, PyTorch | both in one program |" in head
    said = " ".join(filled.split())
    # Norms have no softmax beside them; row programs are one file.
    ranges = {"README.md": 1, "split-figures.md": 1}.get(page.name, 0)
    assert said.count("in the same process, moves 2.97 to 2.98 TB/s.") == ranges


def test_tables_of_row_programs(results):
    """The programs of one table and the row lengths of the other; headings alone before they are measured."""
    head, *rows = tables.TABLES["fuse"]()
    assert head == ["bfloat16", "forward: time, of copy, XLA, torch.compile", "vjp", "both"]
    assert len(rows) == len(row_programs.select(tag=row_programs.MAIN))
    assert rows[0] == ["`rms_norm` 32768 × 4096", *["1.0 µs, 0.50, 2.00×, 3.00×"] * 3]
    fp8 = next(row for row in rows if row[0].startswith("`rms_norm_fp8`"))
    assert fp8[1:] == ["1.0 µs, 0.50, 2.00×, 3.00×", "", ""]
    head, *rows = tables.TABLES["fuse/columns"]()
    assert head[:3] == ["columns", "gated_rms_norm forward: of copy, XLA, torch.compile", "vjp"]
    assert [row[0] for row in rows] == [str(c) for c in row_programs.COLUMNS]
    assert rows[0][1:] == ["0.75, 2.00×, 3.00×"] * 6
    # The programs' own sizes, where the sweep leaves them out.
    assert rows[6][1:] == [*["0.50, 2.00×, 3.00×"] * 4, *["0.75, 2.00×, 3.00×"] * 2]
    (results / f"{tables.DEVICE}-fuse.json").unlink()
    assert tables.TABLES["fuse"]() == [["bfloat16", "forward: time, of copy", "vjp", "both"]]
    assert tables.TABLES["fuse/columns"]() == [["columns"]]
    assert tables.TEXTS["fuse/card"]() == "No figures yet."


def test_tables_of_models(results):
    """What becomes of time, of the rest of it, of memory and of losses, and what a failure looks like."""

    def change(r):
        form = {"autofuse": 1, "jaxnorm": 2}.get(r["implementation"], 0)
        groups = {kernels.group("nvjet"): 1.0, kernels.group("sdpa"): 1.0, "fusion": 8.0 - form}
        failed = (r["case"], r["implementation"]) == ("rl 8192x128256 bfloat16", "autofuse")
        return {
            "seconds": (0.08, 0.1, 0.04)[form],
            "kernel_times": {"groups": groups | {"jaxnorm row_program": float(form) / 2}},
            "temporary_bytes": 1000 * (form + 1),
            "losses": [-2.0, 1.0, 0.5 + (0, 0.01, 0.1)[form]],
            "error": "out of memory" if failed else None,
        }

    _change(results / f"{tables.MODELS_DEVICE}-models.json", change)
    head, *rows = tables.TABLES["models"]()
    assert head[:4] == ["model", "plain", "autofuse: step", "rest"]
    assert rows[2] == [
        "transformer, 12 layers, 16 × 1024 tokens",
        "80.0 ms",
        *("0.80×", "0.94", "2.00", "0.50 %"),
        *("2.00×", "0.88", "3.00", "5.00 %"),
    ]
    assert rows[-1][2:] == ["–", "–", "–", "–", "2.00×", "0.88", "3.00", "5.00 %"]
    speed = tables.TEXTS["models/speed"]()
    assert "below 1 is slower: ResNet-50 0.80× (2.00×), ResNet-50 with remat 0.80× (2.00×)" in speed
    assert "policy-gradient loss – (2.00×)." in speed

    def recomputed(r):
        return {"losses": [-2.0, 1.0, 0.4]} if "recompute" in r["case"] else {}

    _change(results / f"{tables.MODELS_DEVICE}-models.json", recomputed)
    losses = tables.TEXTS["models/losses"]()
    assert "from -2.0 to 0.500" in losses
    assert "up to 5.00 % apart" in losses


def test_models_are_those_of_the_training_steps():
    """The file has every case of `python -m bench.train --cases full` in all forms, and the table a name for it."""
    train = pytest.importorskip("bench.train")
    full = train.CASES["full"]
    assert [case.label for case in full] == list(tables.MODELS)
    records = timing.read_json(tables.RESULTS / f"{tables.MODELS_DEVICE}-models.json")["records"]
    expected = [(case.label, name) for case in full for name in case.implementations]
    assert [(r["case"], r["implementation"]) for r in records] == expected
    assert {len(r["losses"]) for r in records} == {train.LOSSES}


def test_table_of_heads(results):
    """Time and memory against optax's, where linear_cross_entropy loses, and what a failure looks like."""
    path = results / f"{tables.DEVICE}-head.json"
    forms = {
        "optax": (0.04, 8),
        "softmax_cross_entropy": (0.02, 4),
        "linear_cross_entropy": (0.021, 2),
    }

    def change(r):
        seconds, gigabytes = forms[r["implementation"]]
        return {"seconds": seconds, "temporary_bytes": gigabytes * 10**9, "error": None}

    _change(path, change)
    _, *rows = tables.TABLES["head"]()
    assert [row[0] for row in rows] == [
        "16384 × 2048, 128256",
        "",
        "",
        "8192 × 4096, 128256",
        "",
        "",
    ]
    assert [row[2:] for row in rows[:3]] == [
        ["40.0 ms", "8.00 GB"],
        ["20.0 ms, 2.00×", "4.00 GB, 0.50"],
        ["21.0 ms, 1.90×", "2.00 GB, 0.25"],
    ]
    said = tables.TEXTS["head/losses"]()
    assert (
        "labels)`: 1.05 of the time (16384 × 2048, 128256), 1.05 of the time (8192 × 4096" in said
    )
    assert "of the memory (" not in said
    assert "2.1 GB for 8192 × 4096, 128256. That is 0.26 of optax's memory" in said
    forms["linear_cross_entropy"] = (0.02, 5)
    _change(path, change)
    said = tables.TEXTS["head/losses"]()
    assert "labels)`: 1.25 of the memory (16384 × 2048, 128256), 1.25 of the memory (8192" in said
    forms["linear_cross_entropy"] = (0.01, 4)
    _change(path, change)
    assert "takes no more time or memory than" in tables.TEXTS["head/losses"]()
    _change(path, lambda r: {"error": "no memory" if r["implementation"] == "optax" else None})
    assert tables.TABLES["head"]()[1][2:] == ["–", "–"]
    assert tables.TABLES["head"]()[3][2:] == ["10.0 ms", "4.00 GB"]


def test_heads_are_those_of_the_benchmark():
    """The file has every head of `python -m bench.head --cases full` in all forms."""
    head = pytest.importorskip("bench.head")
    records = timing.read_json(tables.RESULTS / f"{tables.DEVICE}-head.json")["records"]
    expected = [(case.label, name) for case in head.CASES["full"] for name in tables.HEADS]
    assert [(r["case"], r["implementation"]) for r in records] == expected
    assert list(head.forms()) == list(tables.HEADS)
    assert not any(r["error"] for r in records)


def test_summary_and_losses(results):
    """Means over the cases, and what another is faster in, beyond the spread."""
    head, *rows = tables.TABLES["summary"]()
    assert len(head) == 5
    assert rows[0] == ["`softmax`, 23 cases", *["2.00× (2.00 to 2.00)", "3.00× (3.00 to 3.00)"] * 2]
    assert tables.TABLES["losses"]()[1:] == []

    def change(r):
        if (r["case"], r["direction"]) == ("49152x32 bfloat16", "together"):
            return {"ratio": {"jaxnorm": 1.0, "xla": 0.9, "torch": 0.99}[r["implementation"]]}
        return {"error": "out of memory"} if r["case"] == "49152x128 bfloat16" else {}

    _change(results / f"{tables.DEVICE}-rms_norm.json", change)
    everywhere = lambda r: {"ratio": 0.8 if r["case"][0] == "1" else 0.9}  # noqa: E731
    _change(results / f"{tables.DEVICE}-relu.json", everywhere)
    rows = tables.TABLES["losses"]()[1:]
    assert rows[0] == ["XLA", "rms_norm, both in one program: 49152x32", "0.90×"]
    assert rows[1:] == [
        [name, f"relu, {direction}: 7 of 7 cases", "0.80 to 0.90×"]
        for name in ("XLA", "PyTorch")
        for direction in ("forward", "both in one program")
    ]
    row = tables.TABLES["norm"]()[2]
    assert row[0] == "49152 × 128"
    assert row[3].endswith("µs, 0.50, –, –")


def test_tables_of_some_peers(results):
    """Only columns of those that an operation was compared with."""
    path = results / f"{tables.DEVICE}-rms_norm.json"
    run = timing.read_json(path)
    run["records"] = [r for r in run["records"] if r["implementation"] != "torch"]
    timing.write_json(path, run)
    head, row, *_ = tables.TABLES["norm"]()
    assert head[3] == "rms_norm forward: time, of copy, XLA"
    assert row[1:] == [*["1.0 µs, 0.50, 2.00×, 3.00×"] * 2, *["1.0 µs, 0.50, 2.00×"] * 2]
    summary = {row[0]: row for row in tables.TABLES["summary"]()}
    assert summary["`rms_norm`, 17 cases"][2] == ""


def test_cards_are_not_mixed(results):
    path = results / f"{tables.DEVICE}-relu.json"
    run = timing.read_json(path)
    run["header"]["device"] = "another"
    timing.write_json(path, run)
    with pytest.raises(ValueError, match="must be of one device, got NVIDIA H100, another"):
        tables.TEXTS["card"]()


def test_tables(tmp_path, results):
    """A table or a paragraph is replaced, with more lines or fewer, and nothing else is."""
    before, after = "A | B\n\n", "\n| another | table |\n|---|---|\n"
    path = tmp_path / "page.md"
    for old in ("", "| old |\n|---|\n| 1.0 |\n"):
        path.write_text(f"{before}<!-- table: relu -->\n{old}{after}")
        assert tables.main([str(path)]) == 0
        page = path.read_text()
        assert page.startswith(before)
        assert page.endswith(f" |\n{after}")
        assert "old" not in page
        assert len(page.splitlines()) == 2 + 1 + 6 + 3
    for old in ("", "Some old\nsentence.\n"):
        page = tables.fill(f"{before}<!-- text: card -->\n{old}{after}")
        assert page.startswith(f"{before}<!-- text: card -->\nOne NVIDIA H100, jax 0.11.2, PyTorch")
        assert page.endswith(f"TB/s.\n{after}")
        assert "old" not in page
    with pytest.raises(ValueError, match="table must be one of summary, .*, got 'max'"):
        tables.fill("<!-- table: max -->\n")
    with pytest.raises(ValueError, match="text must be one of models/speed, .*, got 'max'"):
        tables.fill("<!-- text: max -->\n")
