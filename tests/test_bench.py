"""bench/: cases, byte counts, clock, files. No test looks at how long something took."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from bench import __main__ as bench_main
from bench import cases, compare, peers, roofline, tables, timing
from bench.cases import Case
from jaxnorm._measure import timer

# ---- cases ----


@pytest.mark.parametrize("op", cases.OPS)
def test_case_labels_are_unique(op):
    for tag in ("ci", "full"):
        labels = [c.label for c in cases.select(op, tag)]
        assert labels
        assert len(labels) == len(set(labels))


@pytest.mark.parametrize("case", cases.ALL, ids=lambda c: f"{c.op} {c.label}")
def test_case_is_sane(case):
    assert case.op in cases.OPS
    assert case.dtype in cases.ITEMSIZE
    assert case.tags <= set(cases.TAGS)
    assert set(case.default_directions) <= set(case.directions) <= set(cases.DIRECTIONS)
    if case.op == "program":
        assert case.default_directions == case.directions
    else:
        assert case.default_directions == ("forward", "together")
    for shape in (case.where_shape, case.bias_shape):
        if shape is not None:
            assert np.broadcast_shapes(shape, case.array_shape) == case.array_shape
    assert all(case.min_bytes(d) > 0 for d in case.directions)
    if "ci" in case.tags:
        assert "gpu" not in case.tags
        assert case.nbytes <= 8e6  # a few milliseconds a call on two cores
    else:
        assert case.tags in ({"full", "gpu"}, {"widths", "gpu"})
        assert case.nbytes <= 4e9


def test_table_of_gpus_is_covered():
    shapes = {c.shape for c in cases.select("softmax", "full")}
    rows = {(49152, c) for c in (32, 64, 128, 256, 512, 1023, 1024, 2048, 4095, 4096, 8192)}
    assert rows <= shapes
    assert {(8192, 50257), (8192, 128256), (64, 131072), (8, 1048576)} <= shapes
    assert {c.shape for c in cases.select("log_softmax", "full") if c.axis == 1} == {
        (64, 1024, 1024),
        (256, 64, 56, 56),
    }


@pytest.mark.parametrize("device", [tables.DEVICE, "h200"])
@pytest.mark.parametrize("op", [*tables.REPORTED, "program"])
def test_what_pages_report_is_the_default(op, device):
    """Cases of a result file, with their dtypes, are what `python -m bench OP --cases full` times."""
    dtype = (
        "bfloat16" if op in ("relu", "add_relu") else None
    )  # as --dtype, which their files are of
    records = timing.read_json(tables.RESULTS / f"{device}-{op}.json")["records"]
    assert {r["case"] for r in records} <= {c.label for c in cases.select(op, "full", dtype)}


@pytest.mark.parametrize("op", [*tables.REPORTED, "program"])
def test_result_files_have_both_directions(op):
    """Of every case of README's operations, forward alone and both in one program, for the same peers."""
    records = timing.read_json(tables.RESULTS / f"{tables.DEVICE}-{op}.json")["records"]
    found = {(r["case"], r["direction"], r["implementation"]) for r in records}
    names = ("jaxnorm", "xla") if op == "program" else ("jaxnorm", "xla", "torch")
    dtype = "bfloat16" if op in ("relu", "add_relu") else None
    for case in cases.select(op, "full", dtype):
        assert {(case.label, d, n) for d in case.default_directions for n in names} <= found


def test_select():
    halves = cases.select("relu", "ci", "bfloat16")
    assert {c.dtype for c in halves} == {"bfloat16"}
    # Cases that differed only in their dtype are one case now.
    assert len(halves) == len({c.shape for c in halves})
    assert {c.op for c in cases.select("all")} == set(cases.OPS)
    with pytest.raises(ValueError, match="op must be all or one of softmax"):
        cases.select("norm")
    with pytest.raises(ValueError, match="tag must be one of"):
        cases.select("relu", "huge")


def test_no_such_case(capsys):
    assert bench_main.main(["softmax", "--cases", "widths"]) == 2
    assert "no case of softmax in --cases widths" in capsys.readouterr().err
    assert bench_main.main(["softmax", "--filter", "9x9"]) == 2
    assert "--cases ci with 9x9 in its name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "direction", "expected"),
    [
        # 6 floats in, 6 out.
        (Case("softmax", (2, 3)), "forward", 48),
        (Case("softmax", (2, 3)), "backward", 72),
        (Case("softmax", (2, 3), dtype="float16"), "together", 48),
        # 24 floats twice, 6 bytes of mask, 12 floats of bias; backward needs neither.
        (
            Case("softmax", (2, 3, 4), where_shape=(2, 3, 1), bias_shape=(3, 4)),
            "forward",
            192 + 6 + 48,
        ),
        (Case("softmax", (2, 3, 4), where_shape=(2, 3, 1)), "backward", 288),
        # 5 rows of 9 columns: two bytes of mask a row.
        (Case("relu", (5, 9)), "forward", 360),
        (Case("relu", (5, 9)), "forward_train", 370),
        (Case("relu", (5, 9)), "backward", 370),
        (Case("layer_norm", (5, 9), dtype="bfloat16"), "forward", 180 + 72),
        (Case("layer_norm", (5, 9), dtype="bfloat16"), "forward_train", 180 + 72 + 40),
        (Case("layer_norm", (5, 9), dtype="bfloat16"), "backward", 270 + 40 + 36 + 72),
        (Case("rms_norm", (5, 9)), "backward", 540 + 20 + 36 + 36),
        (Case("rms_norm", (5, 9), dtype="float64"), "together", 4 * 360 + 2 * 72),
        (Case("add_relu", (5, 9), dtype="bfloat16"), "forward", 270),
        (Case("add_relu", (5, 9), dtype="bfloat16"), "forward_train", 280),
        (Case("add_relu", (5, 9), dtype="bfloat16"), "backward", 190),
        # x is read twice; four features of 4 bytes, mean, var, scale and bias.
        (Case("batch_norm", (5, 4), dtype="bfloat16"), "forward", 120 + 64),
        # 10 rows of one byte of bits, and a residual.
        (Case("batch_norm", (2, 4, 5), axis=1, tail="add_relu"), "forward_train", 640 + 64 + 8),
        (Case("batch_norm", (2, 4, 5), axis=1, tail="add_relu"), "backward", 960 + 16 + 80),
        # In one program with the cotangent: x and dy read twice, y and dx written; four features.
        (Case("batch_norm", (5, 4), dtype="bfloat16"), "together", 240 + 64),
        # A ReLU needs x once more; a residual is read, and its gradient written, read in place of dy.
        (Case("batch_norm", (5, 4), tail="relu"), "together", 560 + 64),
        (Case("batch_norm", (2, 4, 5), axis=1, tail="add_relu"), "together", 9 * 160 + 64),
        (Case("batch_norm_inference", (5, 4), tail="relu"), "forward", 160 + 64),
        (Case("batch_norm_inference", (5, 4), tail="relu"), "together", 320 + 96),
        (Case("batch_norm_inference", (5, 4), tail="add_relu"), "together", 480 + 96),
        # No bits: x and dy are read, y and dx written; add_relu reads y too.
        (Case("relu", (5, 9)), "together", 4 * 180),
        (Case("add_relu", (5, 9)), "together", 5 * 180),
        # 30 logits, 6 labels, 6 losses or their cotangents; both in "together".
        (Case("softmax_cross_entropy", (6, 5), dtype="bfloat16"), "forward", 60 + 24 + 24),
        (Case("softmax_cross_entropy", (6, 5), dtype="bfloat16"), "backward", 120 + 24 + 24),
        (Case("softmax_cross_entropy", (6, 5)), "grad", 240 + 24 + 24),
        (Case("softmax_cross_entropy", (2, 5, 3), axis=1), "together", 240 + 24 + 48),
        # Scores 1 x 2 x 3 x 3 = 18 floats, five passes and a mask of 3 bytes.
        (
            Case("program", (1, 2, 3, 4), program="attention", where_shape=(1, 1, 1, 3)),
            "grad",
            360 + 3,
        ),
        (
            Case("program", (1, 2, 3, 3), program="scores", where_shape=(1, 1, 1, 3)),
            "grad",
            288 + 3,
        ),
        # x and z of 20 floats, scale of 5; their gradients.
        (Case("program", (4, 5), program="gated"), "forward", 240 + 20),
        (Case("program", (4, 5), program="gated"), "grad", 400 + 40),
        (Case("program", (4, 5), program="gelu"), "forward", 160 + 40),
        (Case("program", (4, 5), program="gelu"), "grad", 240 + 80),
        # Hidden 4 x 8 floats: two passes and a mask of 4 bytes, each way.
        (Case("program", (4, 2, 8), program="mlp"), "grad", 2 * (256 + 4)),
    ],
)
def test_min_bytes(case, direction, expected):
    assert case.min_bytes(direction) == expected


@pytest.mark.parametrize(
    "case",
    [
        Case("relu", (2, 2)),
        Case("layer_norm", (2, 2)),
        Case("batch_norm", (2, 2)),
        Case("batch_norm_inference", (2, 2)),
        Case("softmax_cross_entropy", (2, 2)),
        Case("program", (2, 2), program="gated"),
    ],
    ids=lambda c: c.op,
)
def test_min_bytes_of_an_unknown_direction(case):
    with pytest.raises(ValueError, match="direction must be .*forward.*, got 'sideways'"):
        case.min_bytes("sideways")


# ---- the clock ----


def test_split_events():
    a, b = timer.Event("a", 1.0, 7.0), timer.Event("gemm_b", 2.0, 0.5)
    assert timer.split_events([a, b] * 3, calls=3) == ([3.0, 3.0, 3.0], 2, 2.0, 0.5)
    # Kernels that cannot be shared out: one mean.
    assert timer.split_events([a, b, a], calls=2) == ([2.0], None, 1.0, None)
    assert timer.split_events([a, b], calls=2) == ([1.5], None, 1.0, None)
    with pytest.raises(RuntimeError, match="no kernel"):
        timer.split_events([], calls=2)


def test_timing_statistics():
    timed = timer.Timing(tuple(float(v) for v in range(1, 102)), "wall")
    assert timed.median == 51
    assert timed.quantile(0.1) == pytest.approx(11)
    # Ranks 41 and 61 or 62 of 101 bound the median with 95% confidence.
    assert timed.spread == pytest.approx((61 - 41) / 2 / 51, abs=0.02)
    assert timer.Timing((2.0,), "wall").spread == 0


def test_measure_rotates_and_survives_a_failure():
    seen = []

    def run(i):
        seen.append(i)
        return jnp.zeros(())

    def fail(_):
        raise OSError("no luck")

    workloads = {"bad": timer.Workload(fail), "good": timer.Workload(run, sets=3)}
    found = timer.measure(workloads, budget=0.001)
    assert list(found) == ["bad", "good"]
    assert isinstance(found["bad"], OSError)
    assert len(found["good"].seconds) >= 5
    assert found["good"].clock == "wall"
    assert seen == [i % 3 for i in range(len(seen))]


def test_measure_kernels(monkeypatch):
    """Every call of `launch` counts as two kernels; its copy is none."""
    seen = []

    def launch(_):
        seen.append(timer.Event("jaxnorm_softmax_fwd", 0.5e-3, 1))
        seen.append(timer.Event("nvjet_gemm", 0.25e-3, 1e-6))
        seen.append(timer.Event("MemcpyD2D", 1))
        return jnp.zeros(())

    def trace(body):
        seen.clear()
        body()
        return list(seen)

    monkeypatch.setattr(timer, "trace_events", trace)
    monkeypatch.setattr(timer, "find_clock", lambda wanted: ("trace", ""))
    found = timer.measure({"x": timer.Workload(launch, sets=2)}, calls=6, rounds=3)["x"]
    assert found.clock == "trace"
    assert found.kernels == 2
    assert found.seconds == pytest.approx((0.75e-3,) * 6)
    assert found.matmul_seconds == pytest.approx(0.25e-3)
    assert found.gap_seconds == pytest.approx(1e-6)


def test_stream_events():
    """In order of their start; where two run at once, that time is the first one's, and no gap is before the other."""

    def event(name, start, duration):
        return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration)

    def line(name, *events):
        return types.SimpleNamespace(name=name, events=events)

    def plane(name, *lines):
        return types.SimpleNamespace(name=name, lines=lines)

    gpu = plane(
        "/device:GPU:0",
        line(
            "Stream #14(Compute)",
            event("last", 5000, 500),
            event("late", 2500, 2000),
            event("early", 1000, 1000),
        ),
        line("Stream #15(Compute)", event("over", 1900, 700), event("within", 1100, 300)),
        line("XLA Ops", event("fusion", 1, 3000)),
    )
    host = plane("/host:CPU", line("python", event("call", 0, 9000)))
    profile = types.SimpleNamespace(planes=[host, gpu])
    names, seconds, gaps = zip(*timer.stream_events(profile), strict=True)
    assert names == ("early", "within", "over", "late", "last")
    assert seconds == pytest.approx((1e-6, 0, 0.6e-6, 1.9e-6, 0.5e-6))
    assert gaps == pytest.approx((0, 0, 0, 0, 0.5e-6))


def test_rotation(monkeypatch):
    monkeypatch.setattr(timer, "l2_bytes", lambda: 0)
    assert timer.rotation(100) == (1, False)
    monkeypatch.setattr(timer, "l2_bytes", lambda: 1000)
    assert timer.rotation(100_000) == (1, True)
    assert timer.rotation(100) == (25, True)
    assert timer.rotation(1) == (timer.MAX_SETS, False)


@pytest.mark.gpu
def test_gpu_has_a_kernel_clock():
    name, reasons = timer.find_clock()
    assert name == "trace", reasons
    assert timer.l2_bytes() > 0
    assert timer.copy_rate().bytes_per_second > 0


# ---- implementations ----


@pytest.mark.parametrize("implementation", ["jaxnorm", "xla"])
def test_split_vjp(implementation):
    softmax = peers.jax_operation(implementation, "softmax")
    x = jax.random.normal(jax.random.key(0), (3, 5), jnp.float32)
    dy = jax.random.normal(jax.random.key(1), (3, 5), jnp.float32)
    where = jnp.arange(5) < 3
    function = lambda x, where: softmax(x, where=where)  # noqa: E731
    forward, residuals_of, backward = timer.split_vjp(function, [x], [where])
    y, computed = forward((x,), (where,))
    residuals = residuals_of(computed, (x,), (where,))
    np.testing.assert_allclose(y, function(x, where), rtol=1e-6)
    expected = jax.grad(lambda x: (function(x, where) * dy).sum())(x)
    np.testing.assert_allclose(backward(residuals, dy), expected, rtol=1e-5, atol=1e-7)
    assert timing.residual_bytes(residuals) > 0


def test_split_vjp_returns_no_argument():
    """To return an argument is to copy it, which is no part of forward."""
    x, scale = jax.random.normal(jax.random.key(0), (3, 5)), jnp.ones(5)
    norm = peers.jax_operation("jaxnorm", "layer_norm")
    forward, residuals_of, _ = timer.split_vjp(norm, [x, scale])
    _, computed = forward((x, scale), ())
    assert x.shape not in [a.shape for a in computed]
    assert any(kept is x for kept in residuals_of(computed, (x, scale), ()))


SMALL = [
    Case("softmax", (4, 6), axis=0),
    Case("softmax", (2, 2, 3, 5), where_shape=(2, 1, 1, 5), bias_shape=(1, 2, 3, 5), scale=0.5),
    Case("log_softmax", (4, 6), dtype="float16"),
    Case("relu", (4, 6)),
    Case("add_relu", (4, 6), dtype="bfloat16"),
    Case("program", (2, 2, 5, 4), program="attention", where_shape=(2, 1, 1, 5), scale=0.5),
    Case("program", (2, 2, 5, 5), program="scores", where_shape=(2, 1, 1, 5), scale=0.5),
    Case("program", (6, 4, 8), program="mlp"),
    Case("layer_norm", (4, 6)),
    Case("layer_norm", (4, 6), dtype="bfloat16"),
    Case("rms_norm", (4, 6), dtype="float16"),
    Case("program", (6, 4, 8), program="norm"),
    Case("program", (2, 3, 3, 8), program="conv", tail="relu"),
    Case("program", (6, 8), program="gated"),
    Case("program", (6, 8), program="gelu", dtype="bfloat16"),
    Case("batch_norm", (6, 5)),
    Case("batch_norm", (6, 5, 9), axis=1, tail="add_relu"),
    Case("batch_norm", (6, 7), dtype="bfloat16", tail="relu"),
    Case("batch_norm_inference", (6, 5, 9), axis=1, tail="add_relu"),
    Case("softmax_cross_entropy", (6, 5)),
    Case("softmax_cross_entropy", (2, 5, 3), axis=1),
    Case("softmax_cross_entropy", (6, 5), dtype="bfloat16"),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.op} {c.label}")
def test_implementations_compute_the_same(case):
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[case.dtype]
    for direction in case.directions:
        data = timing.make_data(case, direction, sets=2)
        assert data.sets == 2
        results = []
        is_relu = case.op in ("relu", "add_relu")
        for name in ("jaxnorm", "xla", *["xla-y"] * is_relu):
            prepared = peers.prepare(name, case, direction, data)
            workload = prepared.workload
            result = workload.wait(workload.run(1))
            assert (prepared.temporary_bytes is not None) == (direction in ("grad", "together"))
            # Residuals are each implementation's own.
            results.append(result[0] if direction == "forward_train" else result)
        ours, *others = map(jax.tree.leaves, results)
        for theirs in others:
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == b.shape
                a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "case", [c for c in SMALL if not c.program], ids=lambda c: f"{c.op} {c.label}"
)
def test_together_returns_what_a_training_step_gets(case):
    """The result and the gradient of each argument, of every JAX implementation alike."""
    data = timing.make_data(case, "together", sets=1)
    for name in ("jaxnorm", "xla"):
        result, *gradients = peers.prepare(name, case, "together", data).workload.run(0)

        @jax.jit
        def step(args, ct, name=name):
            function = peers.jax_function(name, case)
            y, pullback = jax.vjp(lambda *args: function(*args, *data.fixed), *args)
            return y, pullback(ct)

        expected, wanted = step(data.args[0], data.cotangents[0])
        if case.op == "add_relu":  # of both arguments one array
            wanted = wanted[:1]
        tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[case.dtype]
        for a, b in zip((result, *gradients), (expected, *wanted), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            a, b = oracle.f64(a), oracle.f64(b)
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", ["relu", "add_relu"])
def test_what_backward_of_a_relu_reads(op):
    """One bit per element, or the result."""
    case = Case(op, (16, 8, 12, 12))
    data = timing.make_data(case, "backward", sets=1)
    kept = [peers.prepare(n, case, "backward", data).residual_bytes for n in ("jaxnorm", "xla-y")]
    assert kept == [16 * 8 * 12 * 2, case.nbytes]


def test_fits_together():
    case = Case("softmax", (49152, 32768), dtype="float16")  # 3.2 GB
    assert timing.fits_together(case, sets=1, implementations=2)
    assert not timing.fits_together(dataclasses.replace(case, dtype="float32"), 1, 2)


def test_unsupported_cases_say_so():
    with pytest.raises(peers.Unsupported, match="last axis"):
        peers.prepare("quack", Case("softmax", (4, 4), axis=0), "forward", None)
    with pytest.raises(peers.Unsupported, match="x alone"):
        peers.prepare("liger", Case("softmax", (4, 4), scale=0.5), "forward", None)
    with pytest.raises(peers.Unsupported, match="compared in softmax, layer_norm, rms_norm"):
        peers.prepare("liger", Case("relu", (4, 4)), "forward", None)
    with pytest.raises(peers.Unsupported, match="relu and add_relu only"):
        peers.jax_operation("xla-y", "softmax")
    with pytest.raises(peers.Unsupported, match="over the logits"):
        peers.prepare("liger", Case("softmax_cross_entropy", (4, 4)), "forward", None)
    with pytest.raises(ValueError, match="implementation must be one of"):
        peers.prepare("numpy", Case("relu", (4, 4)), "forward", None)


# ---- the command ----


def test_main_writes_json_and_plot(tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["relu", "--filter", "65536x17", "--peers", "xla,liger", "--budget", "0.02"]
    arguments += ["--directions", "forward,backward", "--json", str(out), "--plot", str(picture)]
    assert bench_main.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "65536x17" in printed
    assert "vs xla" in printed
    said = "liger is compared in softmax, layer_norm, rms_norm, not in relu (2 of 2 rows)"
    assert said in " ".join(printed.split())
    assert picture.read_bytes().startswith(b"\x89PNG")

    run = json.loads(out.read_text())
    header = run["header"]
    assert header["schema"] == timing.SCHEMA
    assert header["copy"]["bytes_per_second"] > 0
    assert header["versions"]["jax"] == jax.__version__
    assert {"date", "device", "platform", "commit", "clock"} <= header.keys()
    assert len(run["records"]) == 2 * 3
    for record in run["records"]:
        assert record["op"] == "relu"
        assert record["shape"] == [65536, 17]
        if record["implementation"] == "liger":
            assert record["error"].startswith("skipped")
            continue
        assert record["error"] is None
        assert 0 < record["p10"] <= record["seconds"] <= record["p90"]
        assert record["bytes_per_second"] == pytest.approx(record["min_bytes"] / record["seconds"])
        assert record["copy_fraction"] > 0
        assert record["calls"] >= 5
    ours = [r for r in run["records"] if r["implementation"] == "jaxnorm"]
    assert [r["ratio"] for r in ours] == [1.0, 1.0]
    # One bit an element.
    assert ours[1]["residual_bytes"] == 65536 * 3


def test_main_times_one_program_by_default(tmp_path):
    """Forward alone, and forward and backward in one jit; a program whatever it has."""
    path = tmp_path / "out.json"
    for arguments, wanted in (
        (["relu", "--filter", "65536x17"], ["forward", "together"]),
        (["program", "--filter", "gelu"], ["forward", "grad"]),
    ):
        arguments += ["--peers", "none", "--budget", "0.01", "--json", str(path)]
        assert bench_main.main(arguments) == 0
        records = timing.read_json(path)["records"]
        assert [r["direction"] for r in records] == wanted
        # No matrix product: there is a rate.
        assert all(r["bytes_per_second"] > 0 for r in records)


def test_main_records_temporary_memory(tmp_path):
    """Of the compiled program, which keeps the probabilities at least."""
    path = tmp_path / "out.json"
    arguments = ["program", "--filter", "attention", "--budget", "0.02", "--json", str(path)]
    assert bench_main.main(arguments) == 0
    case = cases.select("program", "ci")[1]
    records = timing.read_json(path)["records"]
    assert [r["implementation"] for r in records] == ["jaxnorm", "xla"]
    for record in records:
        assert record["temporary_bytes"] >= case.nbytes


def test_only_programs_have_matrix_products():
    """Whatever a library calls the kernels of an operation, its rate counts all of them."""
    timed = timer.Timing((2e-6,), "trace", 1, matmul_seconds=1.5e-6)
    common = {"error": None, "copy": 4e12, "cold": True, "sizes": {}}
    case = Case("softmax", (1024, 1024), dtype="bfloat16")
    record = bench_main._record(case, "forward", "quack", timed, None, **common)
    assert record["matmul_seconds"] == 0
    assert record["bytes_per_second"] == pytest.approx(case.min_bytes("forward") / 2e-6)
    case = dataclasses.replace(case, shape=(2, 2, 64, 64), program="attention")
    record = bench_main._record(case, "grad", "xla", timed, None, **common)
    assert record["bytes_per_second"] == pytest.approx(case.min_bytes("grad") / 0.5e-6)


def test_main_reports_a_failure_of_jaxnorm(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("kernel on strike")

    monkeypatch.setattr(peers, "prepare", fail)
    arguments = ["relu", "--filter", "65536x17", "--directions", "forward", "--budget", "0.01"]
    assert bench_main.main(arguments) == 1
    assert "kernel on strike (1 of 1 rows)" in capsys.readouterr().out


def test_main_lists_cases(capsys):
    assert bench_main.main(["all", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(cases.select("all", "ci"))
    assert bench_main.main(["relu", "--filter", "nowhere"]) == 2


def test_main_refuses_unknown_names(capsys):
    for arguments in (["relu", "--peers", "numpy"], ["relu", "--directions", "up"], ["norms"]):
        with pytest.raises(SystemExit) as stop:
            bench_main.main(arguments)
        assert stop.value.code == 2
    assert "--peers must name some of" in capsys.readouterr().err


# ---- files ----


def test_write_json_keeps_the_old_file_when_it_fails(tmp_path):
    path = tmp_path / "file.json"
    timing.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        timing.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_read_json_refuses_other_files(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="no result file of schema 1"):
        timing.read_json(path)


def _run(**seconds):
    """A result file with one record per keyword: its seconds, or None for an error."""
    records = []
    for position, (case, value) in enumerate(seconds.items()):
        record = {
            "op": "softmax",
            "case": case,
            "direction": "forward",
            "implementation": "jaxnorm",
            "shape": [4, 2**position],
            "columns": 2**position,
            "axis": -1,
            "dtype": "float32",
            "where_shape": None,
            "bias_shape": None,
            "program": "",
            "min_bytes": 1000 * 2**position,
            "copy_bytes_per_second": 4e12,
            "error": "out of luck" if value is None else None,
        }
        if value is not None:
            record |= {"seconds": value, "spread": 0.03, "bytes_per_second": 1e12}
        records.append(record)
    header = {
        "schema": timing.SCHEMA,
        "device": "a device",
        "date": "2026-01-01",
        "commit": None,
        "copy": {"bytes_per_second": 4e12},
        "versions": {"jax": "0"},
    }
    return {"header": header, "records": records}


def test_compare(tmp_path, capsys):
    old = _run(faster=2e-3, slower=1e-3, same=1e-3, broken=1e-3, gone=1e-3)
    new = _run(faster=1e-3, slower=2e-3, same=1.02e-3, broken=None, added=1e-3)
    rows = {row["key"][1]: row for row in compare.compare(old, new)}
    assert {case: row["verdict"] for case, row in rows.items()} == {
        "faster": "faster",
        "slower": "slower",
        "same": "same",
        "broken": "error",
    }
    assert rows["faster"]["ratio"] == pytest.approx(2)
    assert rows["faster"]["spread"] == pytest.approx(0.03 * 2**0.5)
    assert [key[1] for key in compare.only_in(old, new)] == ["gone"]

    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    for path, run in zip(paths, (old, new), strict=True):
        timing.write_json(path, run)
    assert compare.main(paths) == 0
    printed = capsys.readouterr().out
    assert "1 faster, 1 slower, 1 same, 1 error" in printed
    assert "1 only in the old file" in printed
    assert compare.main([*paths, "--max-slowdown", "1.5"]) == 1
    assert compare.main([*paths, "--max-slowdown", "2.5", "--changed"]) == 0


@pytest.mark.parametrize("x", ["columns", "bytes"])
def test_roofline(tmp_path, x):
    source, picture = tmp_path / "run.json", tmp_path / "plot.png"
    timing.write_json(source, _run(a=1e-3, b=2e-3, c=None))
    assert roofline.main([str(source), "-o", str(picture), "--x", x]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rate to draw"):
        roofline.plot(_run(c=None), str(picture))


@pytest.mark.parametrize(
    ("found", "asked", "drawn"),
    [
        (("forward", "together", "forward_train", "backward"), None, {"forward", "together"}),
        (("forward", "backward"), None, {"forward", "backward"}),
        (("forward", "together", "backward"), "backward", {"backward"}),
    ],
)
def test_roofline_draws_one_program(tmp_path, monkeypatch, found, asked, drawn):
    """Those of two programs where a file has nothing else, or where asked for."""
    run, seen = _run(a=1e-3), []
    run["records"] = [run["records"][0] | {"direction": direction} for direction in found]
    source = tmp_path / "run.json"
    timing.write_json(source, run)

    def plot(run, *_):
        """In place of the drawing."""
        seen.extend(run["records"])

    monkeypatch.setattr(roofline, "plot", plot)
    assert roofline.main([str(source), *(["--directions", asked] if asked else [])]) == 0
    assert {r["direction"] for r in seen} == drawn
    with pytest.raises(SystemExit):
        roofline.main([str(source), "--directions", "up"])
