"""Examples in README.md, docs/ and docstrings run as printed; links and make targets exist.

Each page is one program in a process of its own, with JAX's default settings but for XLA's flags
that make compiling fast: `python test_docs.py PAGE` runs it, without these. The docstrings of all
modules are one program too, since most of its time goes into starting.
"""

import doctest
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import processes
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]

# Pages about libraries that no extra of the package brings.
LIBRARIES = {"docs/other-libraries.md": ("equinox", "haiku")}

DOCSTRINGS = "docstrings"

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def run(page):
    """Runs a page's ```python blocks, or the docstrings of modules; returns (failed, tried)."""
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    if page.endswith(".md"):
        text = (ROOT / page).read_text()
        # Everything else is blanked, so that failures name the line of the page.
        parts = re.split(r"^(```python\n.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
        parts = [p if p.startswith("```python") else re.sub(r".+", "", p) for p in parts]
        text = re.sub(r"^```.*$", "", "".join(parts), flags=re.MULTILINE)
        runner.run(doctest.DocTestParser().get_doctest(text, {}, page, page, 0))
    else:
        for module in modules():
            before = runner.tries
            for test in doctest.DocTestFinder().find(importlib.import_module(module), module):
                runner.run(test)
            assert runner.tries > before, f"{module} has no example in a docstring"
    return runner.summarize()


def modules():
    """Modules of the package that have examples."""
    paths = sorted((ROOT / "jaxnorm").rglob("*.py"))
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for p in paths
        if ">>> " in p.read_text()
    ]
    return [n.removesuffix(".__init__") for n in names]


def examples(page):
    environment = os.environ | {"XLA_FLAGS": processes.compile_flags()}
    command = [sys.executable, str(pathlib.Path(__file__)), page]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize(
    "page", [*(p for p in PAGES if ">>> " in (ROOT / p).read_text()), DOCSTRINGS]
)
def test_examples(page):
    for library in LIBRARIES.get(page, ()):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    done = examples(page)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* examples$", done.stdout, re.MULTILINE)


def test_wrong_examples_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\n>>> 1 + 1\n3\n```\n\nMore text.\n")
    done = examples(str(page))
    assert done.returncode == 1
    assert "line 4" in done.stdout


def test_what_users_read_has_examples():
    assert ">>> " in (ROOT / "README.md").read_text()
    assert all(">>> " in (ROOT / page).read_text() for page in PAGES if page.startswith("docs/"))
    assert {"jaxnorm._ops.softmax", "jaxnorm._ops.relu"} <= set(modules())


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Files and headings that a page points at exist."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / page).read_text()):
        name, _, heading = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
        assert not heading or heading in anchors, target


@pytest.mark.parametrize("page", PAGES)
def test_make_targets(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


if __name__ == "__main__":
    failed, tried = run(sys.argv[1])
    print(f"{tried} examples")
    sys.exit(bool(failed))
