"""bench/row_programs.py: functions, references and byte counts of the row programs, and `python -m bench fuse`."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from bench import __main__ as bench_main
from bench import compare, fuse, row_peers, row_programs, timing
from bench.row_programs import ALL, MAIN, SWEEP
from jaxnorm._rows import launcher

PROGRAMS = row_programs.select(tag=MAIN)
DIFFERENTIATED = [case for case in PROGRAMS if case.differentiated]
NAME = lambda case: case.name  # noqa: E731


def relative(got, want) -> float:
    """Norm of the difference, relative to the larger of the norm and what rounds to 0."""
    got, want = oracle.f64(got), oracle.f64(want)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


# ---- the table ----


@pytest.mark.parametrize("case", ALL, ids=NAME)
def test_function_is_its_reference(case):
    """In float64 both are the same numbers; what is rounded on the way is near them."""
    for dtype in ("float64", "bfloat16") if case.tag == MAIN else ("float64",):
        args = case.inputs(case.small, dtype)
        got = jax.tree.leaves(jax.jit(case.function)(*args))
        want = jax.tree.leaves(case.reference(*args))
        for a, b in zip(got, want, strict=True):
            # fp8 has 3 bits behind the point: where its input is rounded first, some results differ by one.
            coarse = a.dtype == jnp.float8_e4m3fn and dtype == "bfloat16"
            assert relative(a, b) < {"float64": 2e-15, "bfloat16": 4e-2 if coarse else 6e-3}[dtype]


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=NAME)
def test_gradients_are_those_of_the_reference(case):
    """Along a random direction, the cotangent of the reference's difference is the gradients' product."""
    args = case.inputs(case.small, "float64")
    cotangents = case.cotangents(case.small, "float64")
    gradients = jax.jit(case.gradients())(args, cotangents)
    rng = np.random.default_rng(0)
    moving = [np.asarray(a) for a in args[: case.differentiated]]
    direction = [rng.standard_normal(a.shape) for a in moving]
    step = 1e-5

    def along(sign):
        moved = [a + sign * step * d for a, d in zip(moving, direction, strict=True)]
        results = jax.tree.leaves(case.reference(*moved, *args[case.differentiated :]))
        given = jax.tree.leaves(cotangents)
        return sum(np.vdot(r, np.asarray(dy)) for r, dy in zip(results, given, strict=True))

    expected = (along(1) - along(-1)) / (2 * step)
    got = sum(np.vdot(np.asarray(g), d) for g, d in zip(gradients, direction, strict=True))
    size = sum(np.linalg.norm(np.asarray(g)) for g in gradients)
    assert abs(got - expected) < 1e-6 * size


@pytest.mark.parametrize("case", ALL, ids=NAME)
def test_case_is_sane(case):
    assert case.tag in row_programs.TAGS
    assert len(case.sizes) == len(case.small)
    arguments, avals = case.arguments(*case.sizes), case.avals()
    assert len(arguments) == len(avals) >= case.differentiated
    # The differentiated ones come first and are floating.
    assert all(jnp.issubdtype(a.dtype, jnp.floating) for a in avals[: case.differentiated])
    assert case.directions == (row_programs.DIRECTIONS if case.differentiated else ("forward",))
    assert 0.5 < case.forward <= 1
    assert (case.vjp is None) == (not case.differentiated)
    assert [a.shape for a in case.inputs(case.small)] == [a.shape for a in case.avals(case.small)]
    assert [a.dtype for a in case.inputs(case.small)] == [a.dtype for a in case.avals(case.small)]
    # Large enough for a GPU, small enough for a test.
    assert case.min_bytes("forward") > 2.5e8
    assert case.min_bytes("forward", case.small) < 4e6


def test_names():
    names = [case.name for case in ALL]
    assert len(names) == len(set(names))
    assert [case.name for case in row_programs.select(["dyt", "entropy"])] == ["dyt", "entropy"]
    family = row_programs.select(["soft_capped_softmax"])
    assert [case.tag for case in family] == [MAIN, *[SWEEP] * len(row_programs.COLUMNS)]
    assert row_programs.select(["soft_capped_softmax_64"], MAIN) == []
    with pytest.raises(ValueError, match="'norm' is no row program; known: rms_norm, layer_norm"):
        row_programs.select(["norm"])


def test_sweep_has_every_length_once():
    """Together with the programs' own cases, of the same number of elements."""
    for family in ("gated_rms_norm", "layer_norm_gelu", "soft_capped_softmax"):
        found = [
            c.sizes for c in row_programs.select([family]) if c.sizes[-1] in row_programs.COLUMNS
        ]
        flat = {(rows, columns) for *lengths, columns in found if (rows := int(np.prod(lengths)))}
        expected = {(row_programs.ELEMENTS // c, c) for c in row_programs.COLUMNS}
        assert expected <= flat


@pytest.mark.parametrize(
    ("name", "sizes", "direction", "expected"),
    [
        # 6 elements of two bytes in and out, 3 floats of scale.
        ("rms_norm", (2, 3), "forward", 12 + 12 + 12),
        ("rms_norm", (2, 3), "vjp", 12 + 12 + 12 + 12 + 12),
        ("rms_norm", (2, 3), "both", 12 + 12 + 12 + 12 + 12 + 12),
        # Backward needs no bias: two gradients of 12 bytes, one parameter.
        ("layer_norm", (2, 3), "vjp", 36 + 12 + 24),
        ("layer_norm", (2, 3), "both", 48 + 24 + 24),
        # The bias in front of gelu is needed.
        ("layer_norm_gelu", (2, 3), "vjp", 36 + 24 + 24),
        ("softmax", (2, 3), "both", 48),
        ("swiglu", (2, 6), "forward", 24 + 12),
        ("swiglu", (2, 6), "vjp", 24 + 12 + 24),
        # Scale and shift of each image are data; backward needs the scale.
        ("adaln", (2, 4, 3), "forward", 48 + 12 + 12 + 48),
        ("adaln", (2, 4, 3), "vjp", 48 + 12 + 48 + 48 + 12 + 12),
        # Tables of 2 positions with one float each.
        ("qk_norm_rotary", (3, 2, 5, 2), "forward", 120 + 8 + 16 + 120),
        # fp8 has one byte, and each row a float.
        ("rms_norm_fp8", (2, 3), "forward", 12 + 12 + 6 + 8),
        ("kl_distillation", (2, 3), "forward", 24 + 8),
        ("kl_distillation", (2, 3), "vjp", 24 + 8 + 12),
        ("log_probability_entropy", (2, 3), "forward", 12 + 8 + 16),
        ("log_probability_entropy", (2, 3), "both", 12 + 8 + 16 + 16 + 12),
        # Arguments of 12 bytes, a key of 8; result and stream.
        ("dropout_residual_layer_norm", (2, 3), "forward", 24 + 24 + 8 + 24),
        # The stream, a byte of bits a row and scale; two cotangents; gradients of two arrays and two parameters.
        ("dropout_residual_layer_norm", (2, 3), "vjp", 12 + 2 + 12 + 24 + 24 + 24),
    ],
)
def test_min_bytes(name, sizes, direction, expected):
    case = next(case for case in ALL if case.name == name)
    assert case.min_bytes(direction, sizes) == expected


def test_min_bytes_of_an_unknown_direction():
    (case,) = row_programs.select(["rms_norm_fp8"])
    with pytest.raises(ValueError, match="rms_norm_fp8 must be one of forward, got 'vjp'"):
        case.min_bytes("vjp")


# ---- implementations ----


@pytest.mark.parametrize("case", PROGRAMS, ids=NAME)
def test_implementations_compute_the_same(case):
    """Of every direction, whatever each keeps for backward."""
    for direction in case.directions:
        data = row_peers.make_data(case, [direction], case.small)
        results = []
        for name in ("jaxnorm", "xla"):
            program = row_peers.trace(name, case, direction, case.small)
            prepared = row_peers.prepare_jax(program, row_peers.compile_program(program), data)
            results.append(jax.tree.leaves(prepared.workload.run(0)))
            assert (prepared.residual_bytes is None) == (direction != "vjp" or name != "jaxnorm")
        for ours, theirs in zip(*results, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert relative(ours, theirs) < 4e-2


@pytest.mark.parametrize("case", PROGRAMS, ids=NAME)
def test_torch_computes_the_same(case):
    """The formulas of bench/row_peers.py against the references; dropout has bits of its own."""
    pytest.importorskip("torch")
    for direction in case.directions:
        data = row_peers.make_data(case, [direction], case.small, "float32")
        program = row_peers.trace("xla", case, direction, case.small, "float32")
        compiled = row_peers.compile_program(program)
        want = jax.tree.leaves(row_peers.prepare_jax(program, compiled, data).workload.run(0))
        prepared = row_peers.prepare_torch("torch", case, direction, data)
        got = jax.tree.leaves(prepared.workload.run(0))
        prepared.workload.wait(None)
        assert [tuple(a.shape) for a in got] == [b.shape for b in want]
        if "dropout" in case.name:
            continue
        for a, b in zip(got, want, strict=True):
            assert relative(a.detach().float().cpu().numpy(), b) < 1e-2


@pytest.mark.parametrize("case", PROGRAMS, ids=NAME)
def test_one_call_each_way(case):
    """And backward of users' sizes reads what the table says, and a row's statistics."""
    calls = {"forward": 1, "vjp": 1, "both": 2}
    for direction in case.directions:
        program = row_peers.trace("jaxnorm", case, direction, case.sizes)
        jaxpr = program.jitted.trace(*program.avals).jaxpr.jaxpr
        assert len(list(fuse.row_jaxprs(jaxpr))) == calls[direction]
        if direction == "vjp":
            arguments = case.avals()
            moved = program.residual_bytes + row_programs.nbytes(case.results())
            moved += row_programs.nbytes(arguments[: case.differentiated])
            # Statistics of rows, which the table does not count, save reductions.
            assert moved <= 1.02 * case.min_bytes("vjp")


def test_row_jaxprs():
    """Those of calls within calls too, in their order."""
    inner = jax.make_jaxpr(lambda x: x + 1)(1.0)

    @dataclasses.dataclass
    class Equation:
        primitive: object
        params: dict

    @dataclasses.dataclass
    class Jaxpr:
        eqns: list

    def equation(name, **params):
        return Equation(type("P", (), {"name": name}), params)

    row = equation("jaxnorm_row_program", jaxpr=inner)
    nested = Jaxpr([equation("cond", branches=(Jaxpr([row]), Jaxpr([])))])
    found = list(fuse.row_jaxprs(Jaxpr([row, equation("jit", jaxpr=nested)])))
    assert len(found) == 2
    assert all(jaxpr is inner for jaxpr in found)


def test_compile_figures(monkeypatch):
    """As on an H100: NVRTC needs no GPU."""
    if launcher.nvrtc()[0] is None:
        pytest.skip("there is no NVRTC")
    monkeypatch.setattr(
        launcher, "gpus", lambda: [launcher.Gpu("H100", 90, 132, 227 << 10, 50 << 20)]
    )
    monkeypatch.setattr(launcher, "problem", lambda: "")
    case = next(case for case in ALL if case.name == "rms_norm")
    program = row_peers.trace("jaxnorm", case, "both", case.sizes)
    found = fuse.compile_figures(program)
    assert len(found) == 2
    for figures, source in found:
        assert figures["plan_seconds"] > 0
        assert figures["registers"]["jaxnorm_row_program"] > 0
        assert figures["architecture"] == 90
        assert "row_program" in source
    # The second time that a process asks, it has the binary itself.
    source = found[0][1]
    assert [s is None for s in fuse._from_disk([(source, 90)] * 2)] == [False, True]
    monkeypatch.setattr(launcher, "problem", lambda: "too old")
    assert fuse.compile_figures(program) == []


# ---- the command ----


@pytest.fixture
def environment(monkeypatch):
    """The command sets variables of its process."""
    for name in ("JAXNORM_CACHE_DIR", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.usefixtures("environment")
def test_main_writes_json_and_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # where lines are narrower, headings break
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["fuse", "--small", "--only", "dyt,rms_norm_fp8,soft_capped_softmax_256"]
    arguments += ["--budget", "0.01", "--json", str(out), "--plot", str(picture)]
    assert bench_main.main(arguments) == 0
    printed = capsys.readouterr()
    for text in ("dyt", "rms_norm_fp8", "vs xla", "of copy"):
        assert text in printed.out
    if jax.default_backend() == "cpu":
        assert "no GPU: small sizes, and fuse runs the plain program" in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    run = timing.read_json(out)
    found = compare.index(run)
    wanted = {("dyt", d) for d in row_programs.DIRECTIONS}
    wanted |= {("soft_capped_softmax_256", d) for d in row_programs.DIRECTIONS}
    wanted |= {("rms_norm_fp8", "forward")}
    assert set(found) == {("fuse", *w, name) for w in wanted for name in ("jaxnorm", "xla")}
    for record in run["records"]:
        assert record["error"] is None
        assert record["bytes_per_second"] == pytest.approx(record["min_bytes"] / record["seconds"])
        assert record["copy_fraction"] > 0
        assert record["target"] is None  # of full sizes
    assert {row["verdict"] for row in compare.compare(run, run)} == {"same"}


@pytest.mark.usefixtures("environment")
def test_main_reports_a_failure_of_jaxnorm(monkeypatch, capsys):
    def refuse(name, *rest):
        raise ValueError(f"no {name}")

    monkeypatch.setattr(row_peers, "trace", refuse)
    arguments = ["fuse", "--small", "--only", "rms_norm_fp8", "--budget", "0.01"]
    assert bench_main.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "rms_norm_fp8 forward, jaxnorm: ValueError: no jaxnorm" in printed
    assert "failed" in printed


def test_main_lists_cases(capsys):
    assert bench_main.main(["fuse", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ALL)
    assert bench_main.main(["fuse", "--cases", "main", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PROGRAMS)


def test_main_refuses_unknown_names(capsys):
    assert bench_main.main(["fuse", "--only", "norm"]) == 2
    assert "'norm' is no row program" in capsys.readouterr().err
    assert bench_main.main(["fuse", "--only", "dyt", "--cases", "sweep"]) == 2
    assert "none of dyt is in --cases sweep" in capsys.readouterr().err
    for arguments in (["--peers", "liger"], ["--directions", "up"]):
        with pytest.raises(SystemExit) as stop:
            bench_main.main(["fuse", *arguments])
        assert stop.value.code == 2
    assert "--directions must name some of forward, vjp, both" in capsys.readouterr().err


def record(case, direction, implementation, fraction, **more):
    return {
        "op": "fuse",
        "case": case.name,
        "family": case.family,
        "tag": case.tag,
        "columns": case.sizes[-1],
        "direction": direction,
        "implementation": implementation,
        "copy_fraction": fraction,
        "error": None,
        **more,
    }


def test_sweep_takes_what_it_lacks_from_the_table():
    """Of a length that both have, the sweep's record counts."""
    records = [
        record(case, "forward", "jaxnorm", {MAIN: 0.5, SWEEP: 0.9}[case.tag])
        for case in row_programs.select(["soft_capped_softmax", "gated_rms_norm"])
    ]
    for family, main in (("soft_capped_softmax", 0), ("gated_rms_norm", 1)):
        found = fuse.sweep(records, family)
        assert sorted(r["columns"] for r in found) == list(row_programs.COLUMNS)
        assert [r["copy_fraction"] for r in found].count(0.5) == main


def test_plot(tmp_path):
    header = {"device": "a device", "versions": {"jax": "0"}}
    records = [
        record(case, direction, name, 0.9)
        for case in ALL
        for direction in case.directions
        for name in ("jaxnorm", "xla", "torch.compile")
    ]
    path = tmp_path / "plot.png"
    fuse.plot({"header": header, "records": records}, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rate to draw"):
        fuse.plot({"header": header, "records": [records[0] | {"copy_fraction": None}]}, str(path))


def test_compile_lines():
    entries = [
        {"plan_seconds": 0.002, "nvrtc_seconds": 0.25, "cache_seconds": 0.001},
        {"plan_seconds": 0.004, "nvrtc_seconds": None, "cache_seconds": None},
    ]
    assert fuse.compile_lines([{"compile": entries}, {}]) == [
        "from the jaxpr to the source: median 3.00 ms, largest 4.00 ms, of 2",
        "NVRTC: median 0.25 s, largest 0.25 s, of 1",
        "from the disk cache: median 1.00 ms, largest 1.00 ms, of 1",
    ]
    assert fuse.compile_lines([{}]) == []
