"""What a build says of itself while pip shows nothing."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The backend with a build that prints as Ninja does, in place of scikit-build-core.
PROGRAM = """
import subprocess, sys, types
build = types.ModuleType("scikit_build_core.build")
def run(*args):
    lines = "echo '[1/7] Building CXX'; sleep 1; echo '[6/7] Linking'; sleep 1; exit 3"
    print("configuring")
    return args, subprocess.run(lines, shell=True).returncode
build.build_wheel = build.build_editable = run
package = types.ModuleType("scikit_build_core")
package.build = build
sys.modules |= {"scikit_build_core": package, "scikit_build_core.build": build}
sys.path.insert(0, sys.argv[1])
import backend
backend._EVERY = 0.4
assert backend.build_wheel("wheels", {}) == (("wheels", {}), 3)
print("after")
"""


def build(**kwargs) -> str:
    """What it prints, which pip keeps to itself."""
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "_build_backend")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "configuring",
        "[1/7] Building CXX",
        "[6/7] Linking",
        "after",
    ]


def test_progress_in_a_file(tmp_path):
    """Every so often, also while one step takes long."""
    path = tmp_path / "progress"
    path.touch()
    build(env={**os.environ, "JAXNORM_PROGRESS": str(path)})
    lines = path.read_text().splitlines()
    assert 3 <= len(lines) <= 5
    assert lines[0] == "jaxnorm: 1 of 7 build steps done, 0 s"
    assert lines[-1] == "jaxnorm: 6 of 7 build steps done, 2 s"


def test_no_terminal():
    build(
        env={k: v for k, v in os.environ.items() if k != "JAXNORM_PROGRESS"}, start_new_session=True
    )


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_without_a_terminal(tmp_path):
    """What the backend writes comes out of a target that compiles, and nothing keeps the output open."""
    (tmp_path / "pyvenv.cfg").touch()
    pip = 'f() { echo "progress of $$*" >> "$$JAXNORM_PROGRESS"; sleep 1.5; }; f'
    target = f"{tmp_path}/done/package"
    # `make test`, which runs this, hands its own settings on.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", f"VENV={tmp_path}", f"PIP={pip}", "GPU=no", target],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["progress of -e ."]
    assert pathlib.Path(target).exists()
