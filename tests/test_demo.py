"""What a user runs first: `python -m jaxnorm` and examples/, as processes."""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest

from jaxnorm import __main__ as report
from jaxnorm._measure import display, errors

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*arguments, cwd, flags=""):
    """Runs Python without what conftest.py sets for the tests' own process, but for XLA's `flags`."""
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"XLA_FLAGS": flags}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# ---- python -m jaxnorm ----


def test_report_in_short(tmp_path):
    done = run(
        *("-m", "jaxnorm", "--op", "softmax", "--shape", "64x33", "--dtype", "f32"),
        *("--json", "out.json", "--plot", "out.png"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    pattern = (
        r"OK: 2 of 2 checks passed; \d+\.\d\dx the speed of XLA \(geometric mean of 2 timings on .*"
    )
    assert re.fullmatch(pattern, last)
    assert "64x33" in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ok"] is True
    assert written["verdict"] == last
    assert [(c["op"], c["direction"]) for c in written["checks"]] == [
        ("softmax", "forward"),
        ("softmax", "gradient"),
    ]
    assert all(c["of_tolerance"] <= 1 for c in written["checks"])
    assert [t["direction"] for t in written["timings"]] == ["forward", "gradient"]


def test_report_as_json_on_stdout(tmp_path):
    arguments = ("-m", "jaxnorm", "--op", "relu", "--shape", "8,3,17", "--json", "-")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert len(written["checks"]) == 2 * 4
    assert "OK: 8 of 8 checks passed" in done.stderr


def test_report_fails_with_a_wrong_operation(tmp_path):
    program = (
        "import dataclasses, sys\n"
        "from jaxnorm.__main__ import OPERATIONS, main\n"
        "def relu(x): return x\n"
        "OPERATIONS['relu'] = dataclasses.replace(OPERATIONS['relu'], function=relu)\n"
        "sys.exit(main(['--op', 'relu', '--shape', '16x16', '--dtype', 'float32']))\n"
    )
    done = run("-c", program, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(
        "FAILED: 2 of 2 checks failed (relu forward float32, relu gradient float32)"
    )


def test_report_names_the_missing_extra(tmp_path):
    program = (
        "import sys\nsys.modules['rich'] = None\nfrom jaxnorm.__main__ import main\nmain([])\n"
    )
    done = run("-c", program, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "rich is not installed. Install it with: pip install 'jaxnorm[bench]'"
    )


@pytest.mark.parametrize("arguments", [("--shape", "4xx"), ("--shape", "0"), ("--dtype", "int8")])
def test_report_refuses_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        report.main(list(arguments))
    assert stop.value.code == 2
    assert "error: argument" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(report.OPERATIONS))
@pytest.mark.parametrize("dtype", report.DTYPES)
def test_checks_fail_on_zeros(name, dtype):
    """The tolerance would notice a kernel that writes nothing."""
    operation = report.OPERATIONS[name]
    rng = np.random.default_rng(0)
    rounded = (3 * rng.standard_normal((operation.arrays + 1, 8, 1000))).astype(jnp.dtype(dtype))
    tiny = 6e-8 if dtype == "float16" else 1e-38
    where = np.ones((1, 1), bool)
    arrays = [*rounded.astype(np.float64), *rng.standard_normal((operation.parameters, 1000))]
    for wanted in operation.reference(*arrays, where=where, scale=1.0, tiny=tiny):
        best = wanted[0].astype(jnp.dtype(dtype)).astype(np.float64)
        assert errors.compare(best, *wanted, dtype, 1000)[1] <= 1
        assert errors.compare(np.zeros_like(best), *wanted, dtype, 1000)[1] > 1


def test_nan_is_an_error():
    wrong = np.array([[np.nan, 1.0]])
    reference = np.array([[0.5, 1.0]])
    assert errors.compare(wrong, reference, reference, 0, "float32", 2)[1] == np.inf


def test_checks_take_the_first_rows_of_a_large_shape():
    options = report._parse(["--shape", "49152x32768"])
    assert report._checked_shapes(options) == [(64, 32768)]


def test_units():
    assert display.duration(0.99996e-3) == "1.00 ms"
    assert display.duration(3e-9) == "3.00 ns"
    assert display.rate(3.76e12) == "3.76 TB/s"
    assert display.ratio_text(1.5, 0.1) == "[green]1.50x ±10%[/green]"
    assert display.ratio_text(1.05, 0.1) == "1.05x ±10%"
    assert display.ratio_text(1.05, 8.02) == "1.05x ±>99%"  # no wider, whatever the noise


# ---- examples ----

needs_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("flax", "optax", "sklearn")),
    reason="the extra [bench] is not installed",
)


def example(name, *arguments, cwd):
    """As the tests themselves, these compile for longer than they run."""
    path = str(ROOT / "examples" / f"{name}.py")
    return run(path, *arguments, cwd=cwd, flags=processes.compile_flags())


@needs_extra
@pytest.mark.parametrize(
    ("name", "steps", "first", "row", "verdict"),
    [
        ("digits", 100, "jax.nn", "held-out accuracy", "OK: both runs reached 95%"),
        ("resnet", 30, "flax", "held-out accuracy", "OK: every run reached 95%"),
        ("transformer", 25, "flax", "flax wrote:     def ", "OK: every run is below the 2.9"),
        (
            "fused_transformer",
            30,
            "plain",
            "fused wrote:     def ",
            "OK: every run is below the 2.9",
        ),
    ],
)
def test_example_in_short(name, steps, first, row, verdict, tmp_path):
    done = example(name, "--steps", str(steps), "--plot", "out.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[1].split() == [first, "fused" if first == "plain" else "jaxnorm"]
    assert row in done.stdout
    assert lines[-1].startswith(verdict)
    assert "their losses agree to" in lines[-1]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    # Counted, not timed: what jaxnorm is for. On a CPU a fused function is the plain one, and XLA may
    # compute any of its values again for backward.
    on_cpu = first == "plain" and jax.default_backend() == "cpu"
    for label in ("saved for backward", "temporary memory")[: 1 if on_cpu else 2]:
        cells = next(line for line in lines if label in line).split()
        assert 0 < float(cells[-3]) < float(cells[-5])
        assert int(cells[-1].rstrip("%")) < 90


@needs_extra
def test_example_of_one_library_without_training(tmp_path):
    done = example(
        *("transformer", "--norm", "autofuse", "--steps", "1", "--plot", "out.png"), cwd=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: autofuse reached a loss of" in done.stdout
    assert "flax" not in done.stdout
    assert "agree" not in done.stdout
    assert (tmp_path / "out.png").exists()


@needs_extra
@pytest.mark.parametrize(
    ("losses", "accuracies", "verdict"),
    [
        ([0.25], [0.97], "OK: done"),
        ([0.25, 0.25], [0.97, 0.97], "OK: done; their losses agree to 0e+00"),
        ([0.25], [0.94], "FAILED: jaxnorm reached 94.0%, less than 95%"),
        ([0.25, 0.25], [0.94, 0.96], "FAILED: flax reached 94.0%, less than 95%"),
        ([0.25, 0.25], [0.96, np.nan], "FAILED: jaxnorm reached nan%, less than 95%"),
        ([0.25, 0.26], [0.97, 0.97], "FAILED: the losses differ by 4.0e-02, more than 1e-02"),
        ([0.25, np.nan], [0.97, 0.97], "FAILED: the losses differ by nan, more than 1e-02"),
    ],
)
def test_verdict_of_examples(losses, accuracies, verdict, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import _training

    names = ("flax", "jaxnorm")[-len(losses) :]
    runs = {
        name: _training.Run([3.0, *[loss] * _training.LAST], 0.1, 10, 10, None)
        for name, loss in zip(names, losses, strict=True)
    }
    monkeypatch.chdir(tmp_path)
    options = argparse.Namespace(steps=len(runs["jaxnorm"].losses), plot="")
    problems = _training.held_out(runs, accuracies, 0.95)
    status = _training.report("T", runs, options, **problems, reached="done", tolerance=1e-2)
    assert capsys.readouterr().out.strip().splitlines()[-1] == verdict
    assert status == verdict.startswith("FAILED")
    assert not list(tmp_path.iterdir())
