"""bench.train, bench.head and bench.tracing: whole models. No test looks at how long something took."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from bench import compare, kernels, timing
from jaxnorm._measure import timer

# ---- training steps ----


def test_training_steps(tmp_path, capsys, monkeypatch):
    """The small cases, from the command line to the file, which `bench.compare` reads."""
    train = pytest.importorskip("bench.train")
    path = tmp_path / "train.json"
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(train, "LOSSES", 12)
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # Flax mixes dtypes
        assert train.main(["--json", str(path), "--budget", "0.05"]) == 0
    run = timing.read_json(path)
    assert run["header"]["clock"] == "wall"
    records = compare.index(run)
    assert len(records) == 3 * len(train.CASES["ci"])
    for case in train.CASES["ci"]:
        plain, automatic, ours = (
            records["train", case.label, "step", name] for name in case.implementations
        )
        assert plain["error"] is automatic["error"] is ours["error"] is None
        assert ours["ratio"] == ours["seconds"] / plain["seconds"]
        assert ours["residual_bytes"] < plain["residual_bytes"]
        if case.name in ("resnet", "transformer"):
            assert 0 < ours["temporary_bytes"] < plain["temporary_bytes"]
        assert len(plain["losses"]) == train.LOSSES
        assert plain["losses"][-1] != plain["losses"][0]
        for record in (automatic, ours):
            np.testing.assert_allclose(record["losses"], plain["losses"], rtol=0.02, atol=0.03)
    assert {row["verdict"] for row in compare.compare(run, run)} == {"same"}
    assert "transformer 2x32 bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("jaxnorm_softmax_fwd", "jaxnorm softmax_fwd"),
        ("jaxnorm_norm_bwd_finish", "jaxnorm norm_bwd"),
        ("jaxnorm_batch_norm_dx", "jaxnorm batch_norm_dx"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product or convolution"),
        (
            "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64",
            "matrix product or convolution",
        ),
        ("gemm_fusion_dot_12", "matrix product or convolution"),
        (
            "void cudnn::ops::nchwToNhwcKernel<__half, float>(cudnn::ops::nchw2nhwc_params_t)",
            "copy or transposition",
        ),
        ("MemcpyD2D", "copy or transposition"),
        ("input_transpose_fusion_3", "copy or transposition"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("loop_convert_fusion_7", "fusion"),
        ("wrapped_add", "fusion"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "other"),
    ],
)
def test_groups_of_kernels(kernel, group):
    assert kernels.group(kernel) == group


def test_kernel_times(monkeypatch):
    """Totals by group and by name, a step's share of them."""
    train = pytest.importorskip("bench.train")
    steps = []

    def trace(body):
        body()
        step = [("nvjet", 0.5), ("loop_add_fusion", 0.25), ("loop_add_fusion", 0.5)]
        return [timer.Event(*kernel) for kernel in step] * len(steps)

    monkeypatch.setattr(timer, "trace_events", trace)
    found = train.kernel_times(lambda: steps.append(jnp.zeros(())))
    assert steps
    assert found["seconds"] == pytest.approx(1.25)
    assert list(found["groups"]) == ["fusion", "matrix product or convolution"]
    assert found["top"][0] == {
        "name": "loop_add_fusion",
        "group": "fusion",
        "seconds": pytest.approx(0.75),
        "launches": 2,
    }
    monkeypatch.setattr(timer, "trace_events", lambda body: [])
    with pytest.raises(RuntimeError, match="no kernel"):
        train.kernel_times(lambda: None)


@pytest.mark.gpu
def test_training_steps_say_where_the_time_goes():
    """On a GPU every record has the kernels of a step."""
    train = pytest.importorskip("bench.train")
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # Flax mixes dtypes
        plain, _, ours = records = train.measure(train.CASES["ci"][1], budget=0.01)
    for record in records:
        assert record["error"] is None
        assert 0 < kernels.rest(record) < record["kernel_times"]["seconds"]
        assert "matrix product or convolution" in record["kernel_times"]["groups"]
        seconds = [kernel["seconds"] for kernel in record["kernel_times"]["top"]]
        assert 0 < sum(seconds) <= record["kernel_times"]["seconds"] * 1.001
    assert any(group.startswith("jaxnorm ") for group in ours["kernel_times"]["groups"])
    assert not any(group.startswith("jaxnorm ") for group in plain["kernel_times"]["groups"])


def test_training_steps_that_fail(tmp_path, monkeypatch, capsys):
    """Flax's failure is a record, jaxnorm's is the exit status too."""
    train = pytest.importorskip("bench.train")

    def refuse(case, implementation):
        raise ValueError(f"no {implementation}")

    monkeypatch.setitem(train._PREPARE, "resnet", refuse)
    path = tmp_path / "train.json"
    assert train.main(["--json", str(path), "--filter", "resnet"]) == 1
    errors = {r["implementation"]: r["error"] for r in timing.read_json(path)["records"]}
    assert errors == {
        "flax": "ValueError: no flax",
        "autofuse": "ValueError: no flax",
        "jaxnorm": "ValueError: no jaxnorm",
    }
    assert "flax: ValueError: no flax" in capsys.readouterr().out


def test_training_steps_for_a_gpu():
    """The shapes that the figures are for."""
    train = pytest.importorskip("bench.train")
    resnet, recomputing, transformer, llama, *_ = train.CASES["full"]
    assert (llama.batch, llama.sizes["tokens"]) == ((4, 4096), 128256)
    assert resnet.batch == recomputing.batch == (256, 224, 224, 3)
    assert resnet.sizes["stages"] == recomputing.sizes["stages"] == (3, 4, 6, 3)
    assert (resnet.label, recomputing.label) == (
        "resnet 256x224x224x3 bfloat16",
        "resnet recompute 256x224x224x3 bfloat16",
    )
    assert transformer.batch == (16, 1024)
    assert (transformer.sizes["width"], transformer.sizes["layers"]) == (1024, 12)


def test_recomputing_step():
    """The same training step with less that is kept for backward."""
    train = pytest.importorskip("bench.train")
    case = train.CASES["ci"][0]
    kept, computed = [], []
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # Flax mixes dtypes
        for recompute, found in ((False, kept), (True, computed)):
            changed = dataclasses.replace(case, sizes=case.sizes | {"recompute": recompute})
            model, batch, step, state = changed.prepare("jaxnorm")
            found += [train._training.saved_bytes(model, batch), *jax.jit(step)(state, *batch)]
    assert computed[0] < 0.75 * kept[0]
    for got, want in zip(*map(jax.tree.leaves, (computed[1:], kept[1:])), strict=True):
        np.testing.assert_allclose(oracle.f64(got), oracle.f64(want), rtol=0.02, atol=0.02)


# ---- heads of language models ----


def test_heads(tmp_path, capsys, monkeypatch):
    """The small head, from the command line to the file, which `bench.compare` reads."""
    head = pytest.importorskip("bench.head")
    path = tmp_path / "head.json"
    monkeypatch.setenv("COLUMNS", "150")
    assert head.main(["--json", str(path), "--chunks", "16"]) == 0
    run = timing.read_json(path)
    records = compare.index(run)
    names = [*head.forms(), "linear_cross_entropy, 16 tokens"]
    (case,) = head.CASES["ci"]
    assert list(records) == [("head", case.label, "both", name) for name in names]
    plain, *others = records.values()
    for record in records.values():
        assert record["error"] is None
        assert record["seconds"] > 0
        assert record["ratio"] == record["seconds"] / plain["seconds"]
    for record in others:
        np.testing.assert_allclose(record["loss"], plain["loss"], rtol=1e-3)
    # Logits of a quarter of the tokens at a time.
    assert 0 < others[-1]["temporary_bytes"] < plain["temporary_bytes"]
    assert {row["verdict"] for row in compare.compare(run, run)} == {"same"}
    out = capsys.readouterr().out
    assert f"{case.label}  " in out
    assert "linear_cross_entropy, 16 tokens" in out


def test_gradients_of_heads():
    """Each form has the gradients of x and w, of the same loss."""
    head = pytest.importorskip("bench.head")
    (case,) = head.CASES["ci"]
    args = case.arguments()
    plain, *others = (
        jax.jit(jax.grad(loss, (0, 1)))(*args) for loss in head.forms(chunks=[48]).values()
    )
    for found in others:
        for got, want in zip(found, plain, strict=True):
            assert got.dtype == want.dtype == jnp.bfloat16
            scale = float(np.abs(oracle.f64(want)).max())
            np.testing.assert_allclose(oracle.f64(got), oracle.f64(want), atol=0.02 * scale)


def test_heads_that_fail(tmp_path, monkeypatch, capsys):
    """Optax's failure is a record, jaxnorm's is the exit status too."""
    head = pytest.importorskip("bench.head")

    def refuse(*args):
        raise ValueError("no memory")

    path = tmp_path / "head.json"
    for name, status in (("_optax", 0), ("_unchunked", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(head, name, refuse)
            assert head.main(["--json", str(path)]) == status
        errors = [r["error"] for r in timing.read_json(path)["records"]]
        expected = [None, None, None]
        expected[status] = "ValueError: no memory"
        assert errors == expected
        assert f"{list(head.forms())[status]}: ValueError: no memory" in capsys.readouterr().out


def test_split_heads(tmp_path, monkeypatch, capsys):
    """Kernels of one device against a copy: its part of the logits read forward; read twice and written in both."""
    head = pytest.importorskip("bench.head")

    def trace(body):
        body()
        step = [timer.Event("jaxnorm_cross_entropy", 2e-6), timer.Event("loop_fusion", 1.0)]
        return step * 5

    monkeypatch.setattr(timer, "trace_events", trace)
    path = tmp_path / "head.json"
    assert head.main(["--split", "--json", str(path)]) == 0
    run = timing.read_json(path)
    (case,) = head.CASES["ci"]
    moved = case.tokens * case.classes * 2 / len(jax.devices())
    rate = run["header"]["copy"]["bytes_per_second"]
    for record, passes in zip(run["records"], (1, 3), strict=True):
        assert record["seconds"] == pytest.approx(2e-6)
        assert record["share_of_copy"] == pytest.approx(passes * moved / 2e-6 / rate)
    assert "forward" in capsys.readouterr().out
    monkeypatch.setattr(timer, "trace_events", lambda body: [timer.Event("loop_fusion", 1.0)])
    assert head.main(["--split", "--json", str(path)]) == 1
    errors = {r["error"] for r in timing.read_json(path)["records"]}
    assert errors == {"no kernel of jaxnorm's ran"}


# ---- tracing ----


def test_tracing(capsys, monkeypatch):
    """Each case has a line."""
    tracing = pytest.importorskip("bench.tracing")
    monkeypatch.setenv("COLUMNS", "150")
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        assert tracing.main(["--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    names = ("resnet", "transformer", "llama", "dit", "vit", "mamba", "rl")
    assert all(f" {name} " in printed for name in names)
    assert printed.count("%") == len(names)


def test_tracing_is_for_a_gpu():
    """The program under autofuse has kernels that a CPU would not get."""
    train, tracing = (pytest.importorskip(f"bench.{name}") for name in ("train", "tracing"))
    (case,) = (c for c in train.CASES["full"] if c.name == "rl")
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        functions, shapes = tracing.steps(case)
        programs = {name: str(jax.make_jaxpr(f)(*shapes)) for name, f in functions.items()}
    assert "jaxnorm_row_program" in programs["autofuse"]
    assert "jaxnorm" not in programs["plain"]
