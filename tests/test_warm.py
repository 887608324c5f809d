"""`python -m jaxnorm warm`: kernels that lie in the cache before a program asks for them."""

import json
import os
import subprocess
import sys

import pytest

from jaxnorm import __main__ as report
from jaxnorm import _lib
from jaxnorm._rows import launcher

needs_launcher = pytest.mark.skipif(
    not _lib.module("cuda").available, reason="there is no NVRTC, or the launcher was not built"
)

# Lowers a training step for CUDA as a user's program does; whether its kernels came from disk.
PROGRAM = """
import json, jax, jax.numpy as jnp, jaxnorm
from jaxnorm import _warm
from jaxnorm._rows import launcher
from jaxnorm._rows.call import device_here

def loss(args):
    return jnp.sum(jaxnorm.OPERATION(*args).astype(jnp.float32))

args = [jnp.ones((64, 256), "bfloat16")] + [jnp.ones(256)] * PARAMETERS
cached = []
compile = launcher.compile

def recorded(*args):
    made = compile(*args)
    cached.append(made.cached)
    return made

launcher.compile = recorded
lowered = jax.jit(jax.value_and_grad(loss)).trace(args).lower(lowering_platforms=("cuda",))
sources = _warm.kernel_sources(lowered)
for source in sources:
    recorded(source, device_here().architecture)
print(json.dumps([len(sources), cached]))
"""


def run(*arguments, cache):
    env = {**os.environ, "JAXNORM_CACHE_DIR": str(cache)}
    # The installed package, and not ./jaxnorm of the working directory, which has no compiled modules.
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_launcher
@pytest.mark.parametrize(
    ("operation", "parameters"), [("softmax", 0), ("layer_norm", 2), ("relu", 0)]
)
def test_another_process_finds_the_kernels(operation, parameters, tmp_path):
    program = PROGRAM.replace("OPERATION", operation).replace("PARAMETERS", str(parameters))
    number, cached = json.loads(run("-c", program, cache=tmp_path / "cold"))
    assert number == 2
    assert not all(cached)
    out = run("-m", "jaxnorm", "warm", f"{operation}:64x256", cache=tmp_path / "warm")
    assert f"\n{operation} 64x256 bfloat16: 2 CUDA programs, " in out
    number, cached = json.loads(run("-c", program, cache=tmp_path / "warm"))
    assert number == 2
    assert all(cached)


@needs_launcher
def test_every_operation(monkeypatch, capsys):
    """Each has a kernel of its own forward and backward; none falls back to the formula."""
    monkeypatch.setattr(launcher, "compile", lambda source, architecture: compiled(source))
    monkeypatch.setattr(launcher, "cache_off", lambda: "")
    seen = []

    def compiled(source):
        seen.append(source)
        return launcher.Compiled(b"", {}, {"jaxnorm_row_program": 0}, 0.0, False)

    assert report.main(["warm", *(f"{name}:24x40:f64" for name in report.OPERATIONS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" CUDA")[0] for line in lines[1:]] == [
        # The gradient of x and the sums for the gradients of the parameters are two calls.
        f"{name} 24x40 float64: {3 if name == 'batch_norm_inference' else 2}"
        for name in report.OPERATIONS
    ]
    assert all('extern "C"' in source for source in seen)


def test_nothing_would_be_kept(monkeypatch, capsys):
    monkeypatch.setattr(_lib, "module", lambda platform: _lib.Module("cuda", reason="not built"))
    assert report.main(["warm", "relu:8x8"]) == 1
    assert capsys.readouterr().err == "no kernel can be compiled ahead: not built\n"
    monkeypatch.setattr(_lib, "module", lambda platform: _lib.Module("cuda", frozenset(["launch"])))
    monkeypatch.setattr(launcher, "cache_off", lambda: "switched off")
    assert report.main(["warm", "relu:8x8"]) == 1
    assert capsys.readouterr().err.endswith("the cache directory: switched off\n")


@pytest.mark.parametrize("case", ["softmin:8x8", "softmax", "softmax:8x", "softmax:8x8:int8"])
def test_bad_cases(case, capsys):
    with pytest.raises(SystemExit) as stop:
        report.main(["warm", case])
    assert stop.value.code == 2
    assert "error: argument OP:SHAPE[:DTYPE]" in capsys.readouterr().err
