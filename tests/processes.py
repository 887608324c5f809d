"""Runs the programs of tests/scripts, each in a Python of its own."""

import json
import os
import pathlib
import subprocess
import sys

SCRIPTS = pathlib.Path(__file__).resolve().parent / "scripts"


def compile_flags() -> str:
    """Those of conftest.py's XLA flags that make compiling fast."""
    return " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f)


def start(script: str, *args, env=None) -> subprocess.Popen:
    """Starts scripts/<script>.py outside this directory and with CPU devices only.

    Of conftest.py's flags it has those that make compiling fast, besides those of `env`.
    """
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("XLA_FLAGS", "PYTEST_"))
    }
    environment |= {"JAX_PLATFORMS": "cpu", **(env or {})}
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {compile_flags()}".strip()
    return subprocess.Popen(
        [sys.executable, "-P", str(SCRIPTS / f"{script}.py"), *map(str, args)],
        env=environment,
        cwd=SCRIPTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> dict:
    """What the script printed as JSON on its last line, with its stderr; fails if it failed."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args} took more than {timeout} s\n{err[-4000:]}") from None
    assert process.returncode == 0, (
        f"{process.args} exited with {process.returncode}\n{err[-4000:]}"
    )
    return {**json.loads(out.splitlines()[-1]), "stderr": err}


def run(script: str, *args, env=None) -> dict:
    return finish(start(script, *args, env=env))


def eight_devices() -> dict:
    return {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
