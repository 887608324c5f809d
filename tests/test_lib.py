"""Loading: a missing or incompatible module leaves JAX working; the plugin entry point."""

import importlib.metadata
import warnings

import jax.numpy as jnp
import processes
import pytest
from suite import needs_cpu

import jaxnorm


def test_status():
    status = jaxnorm.status()
    assert status.version == importlib.metadata.version("jaxnorm") == jaxnorm.__version__
    assert [m.platform for m in status.modules] == ["cpu", "cuda"]
    text = repr(status)
    assert text.splitlines()[0].startswith(f"jaxnorm {status.version} (jax ")
    assert len(text.splitlines()) == 3
    assert all(len(line) < 200 for line in text.splitlines())
    for m in status.modules:
        assert m.available == bool(m.targets)
        assert m.available or m.reason


def test_targets():
    """The CPU's module has one for each primitive with kernels, the launcher one for all."""
    ops = ("softmax", "relu", "norm", "cross_entropy")
    names = {f"{op}_{part}" for op in ops for part in ("fwd", "bwd")}
    names |= {f"batch_norm_{part}" for part in ("stats", "fwd", "sums", "dx")}
    for m, expected in zip(jaxnorm.status().modules, (names, {"launch"}), strict=True):
        assert not m.available or m.targets == expected


@needs_cpu
def test_no_warning_where_kernels_are_loaded():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxnorm.softmax(jnp.ones(3))


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        ("missing", "not built"),
        ("broken", "cannot be imported (undefined symbol: nothing)"),
        ("newer minor", "built for XLA FFI"),
        ("other major", "built for XLA FFI"),
        ("no headers", "cannot find the XLA FFI version"),
    ],
)
def test_without_module(situation, reason):
    """JAX works, jaxnorm uses the formulas, warns once and says why."""
    result = processes.run("fallback", situation)
    assert result["jax"] == 6.0
    assert result["registered"] == []
    assert reason in result["reason"]
    assert result["reason"] in result["repr"]
    assert len(result["warnings"]) == 1
    category, message = result["warnings"][0]
    assert category == "RuntimeWarning"
    assert message.startswith("jaxnorm: no cpu kernels")
    assert result["reason"] in message
    assert max(result["errors"].values()) < 1e-6
    assert len(result["errors"]) == 6
    assert result["cuda"] == "not built"
    assert "  cuda  plain XLA formulas: not built" in result["repr"]
    for op, message in result["kernel"].items():
        assert "implementation must be None or 'xla' for platform cpu" in message, op
        assert result["reason"] in message
    if situation == "newer minor":
        assert "upgrade jaxlib or reinstall jaxnorm" in result["reason"]


def test_older_minor_is_accepted():
    result = processes.run("fallback", "older minor")
    assert result["warnings"] == []
    assert result["reason"] == ""
    assert result["registered"] == ["jaxnorm_something"]


def test_import_asks_no_device():
    """That would start the CUDA driver, which fixes CUDA_VISIBLE_DEVICES and does not survive fork."""
    result = processes.run("import_asks_no_device")
    assert result["on_import"] == 0
    assert result["opened"] == []
    assert result["registered"] == ["jaxnorm_launch"]
    assert result["asked"] >= 1
    assert result["targets"] == []
    assert result["reason"] == "Old GPU is sm_70, kernels need sm_80"


def _has_entry_point():
    return any(e.name == "jaxnorm" for e in importlib.metadata.entry_points(group="jax_plugins"))


def test_entry_point_is_installed():
    assert _has_entry_point(), "install jaxnorm: the entry point makes exported programs run alone"


@needs_cpu
def test_export_runs_without_importing_jaxnorm(tmp_path):
    """A process that only deserialises finds the targets through the entry point."""
    path = tmp_path / "program.bin"
    written = processes.run("plugin", "write", path)
    assert written["custom_calls"] > 0
    read = processes.run("plugin", "read", path)
    assert read["result"] == written["result"]
