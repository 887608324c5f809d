"""Private parts of JAX have one home: the package `jaxnorm/_primitive`."""

import ast
import pathlib

import jaxnorm

PACKAGE = pathlib.Path(jaxnorm.__file__).parent
RULES = {"jax.interpreters.ad", "jax.interpreters.batching"}


def imported(path):
    """Full names of what a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private(name):
    return name.startswith(("jax._src", "jax.interpreters", "jaxlib")) and name not in RULES


def test_home_of_private_parts():
    homes = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(map(private, imported(path)))
    }
    assert homes == {"_primitive"}
