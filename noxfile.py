"""`make test-matrix`: the tests on the oldest, a middle and the newest supported jax.

Each session builds and installs the package by itself. An interpreter that is not on PATH is
reported as skipped. `nox -- -k softmax` hands arguments to pytest.
"""

import os
import pathlib

import nox

# (Python, jax). The newest jax is whatever PyPI offers that Python.
MATRIX = (("3.11", "==0.10.2"), ("3.12", "==0.11.2"), ("3.13", ""))

nox.options.error_on_missing_interpreters = False
nox.options.stop_on_first_error = False


def _interpreter(version: str) -> str:
    """The interpreter that pyenv has, active or not; else nox looks on PATH."""
    root = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    return str(found[-1]) if found else version


def _session(python: str, jax: str) -> None:
    label = jax.removeprefix("==") or "newest"

    @nox.session(name=f"py{python}-jax{label}", python=_interpreter(python))
    def run(session: nox.Session) -> None:
        session.install(f"jax{jax}", ".[test]")
        session.run(
            "python", "-c", "import jaxnorm; print(jaxnorm.status())", env={"PYTHONSAFEPATH": "1"}
        )
        arguments = session.posargs or ["-n", "auto", "--maxprocesses=8", "--dist=worksteal"]
        session.run("pytest", *arguments, env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


for _python, _jax in MATRIX:
    _session(_python, _jax)
