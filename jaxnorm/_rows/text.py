"""Lines of CUDA text, and expressions that say where an array's rows lie."""

import contextlib
import math

from jaxnorm._rows.rules import Program
from jaxnorm._rows.shared_memory import in_row_order


class Writer:
    """Collects lines, indented by the braces around them."""

    def __init__(self):
        self.lines: list[str] = []
        self._depth = 0

    def __call__(self, text: str) -> None:
        self.lines.append("  " * self._depth + text if text else "")

    @contextlib.contextmanager
    def block(self, head: str = "", end: str = "}"):
        self(f"{head} {{" if head else "{")
        self._depth += 1
        yield
        self._depth -= 1
        self(end)


def addresses(program: Program, layout, row: str) -> str:
    """How many elements an array has before column 0 of this row."""
    sizes = [n if isinstance(n, int) else f"d{k}" for k, n in enumerate(program.row_sizes)]
    if in_row_order(layout, program.row_sizes) and layout.strides:
        step = layout.strides[-1][1]
        return f"(u64){row}" + (f" * {step}" if step != 1 else "")
    terms, index = [], 0
    strides = sorted(layout.strides)
    while index < len(strides):
        # Neighbouring dimensions that lie like one dimension are merged.
        last = index
        while (
            last + 1 < len(strides)
            and strides[last + 1][0] == strides[last][0] + 1
            and strides[last][1] == strides[last + 1][1] * program.row_sizes[strides[last + 1][0]]
        ):
            last += 1
        stride = strides[last][1]
        number = row_index(sizes, row, strides[index][0], strides[last][0])
        terms.append(f"(u64){number} * {stride}" if stride != 1 else f"(u64){number}")
        index = last + 1
    return " + ".join(terms) or "0"


def row_index(sizes, row: str, first: int, last: int) -> str:
    """The index in the row dimensions first..last, taken as one, of a row's number."""
    inner, outer = product(sizes[last + 1 :]), product(sizes[first : last + 1])
    text = row if inner == "1" else f"({row} / {inner})"
    return text if first == 0 else f"({text} % {outer})"


def product(sizes) -> str:
    constant = math.prod(n for n in sizes if isinstance(n, int))
    names = [f"(u32){n}" for n in sizes if not isinstance(n, int)]
    parts = ([f"{constant}u"] if constant != 1 or not names else []) + names
    text = " * ".join(parts)
    return "1" if text == "1u" else text if len(parts) == 1 else f"({text})"


class Strides:
    """As much of a layout as addresses need."""

    def __init__(self, strides):
        self.strides, self.columns, self.step = strides, None, 1

    @property
    def rows(self):
        return tuple(k for k, _ in self.strides)
