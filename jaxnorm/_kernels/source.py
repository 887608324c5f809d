"""CUDA text for NVRTC: of one instance, from the files beside this one."""

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence

_HERE = pathlib.Path(__file__).parent
_ROWS = _HERE.parent / "_rows"
ELEMENTS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


@functools.cache
def _text(path: pathlib.Path) -> str:
    return path.read_text().strip()


@functools.cache
def _bare(file: str) -> str:
    return without_comments(_text(_HERE / f"{file}.cuh"))


def without_comments(text: str) -> str:
    """C++ text without comments: the text is part of each program that calls it."""
    lines = (re.sub(r"\s*//.*", "", line) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def machine() -> list[str]:
    """The parts of each text that use instructions of the machine."""
    return [_text(_ROWS / "machine.cuh"), _text(_ROWS / "exchange.cuh"), _bare("memory")]


def assemble(
    files: Sequence[str],
    dtype: str,
    constants: Mapping[str, int],
    sizes: Mapping[str, int],
) -> str:
    """The text of an instance.

    Args:
      files: names without .cuh, each behind the files that it uses.
      dtype: of elements, which the files call T.
      constants: macros that the files read.
      sizes: bytes that each structure has, which the compiler checks.
    """
    parts = [*machine(), _bare("vectors"), f"using T = {ELEMENTS[dtype]};"]
    parts += [f"#define {name} {int(value)}" for name, value in constants.items()]
    parts += map(_bare, files)
    parts += [f"static_assert(sizeof({name}) == {size});" for name, size in sizes.items()]
    return "\n".join(parts) + "\n"
