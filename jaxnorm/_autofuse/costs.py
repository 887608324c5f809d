"""Where an operation is worth its call.

A call is a boundary for XLA's fusion, so an operation that XLA fuses with its neighbours must win more than that is
worth. autofuse cannot know whether its result will be differentiated. Where only the derivative wins, the rewritten
program keeps the original code, and takes the operation when it is differentiated.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

ALWAYS = "always"
DIFFERENTIATED = "where it is differentiated"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
      operations: names of jaxnorm's functions.
      applies: (shape of x, axes) -> whether this row is the one.
      verdict: ALWAYS or DIFFERENTIATED.
      why: what was measured.
      source: files under bench/results.
    """

    operations: tuple[str, ...]
    applies: Callable[[Sequence, tuple], bool]
    verdict: str
    why: str
    source: tuple[str, ...]


def _size(shape, axes) -> float:
    sizes = [shape[a] for a in axes]
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else math.inf


def _short_rows(shape, axes, columns) -> bool:
    last = tuple(axes) == tuple(range(len(shape) - len(axes), len(shape)))
    return last and _size(shape, axes) <= columns


def _few_long_rows(shape, axes) -> bool:
    return _size(shape, axes) >= 2**20 and _size(shape, range(len(shape) - len(axes))) <= 8


# The first row that applies decides. Ratios are XLA's time divided by jaxnorm's, bfloat16 on an H200, each operation by
# itself. ALWAYS asks for 1.24 forward alone: less may be lost again where XLA would fuse the neighbours.
TABLE = (
    Rule(
        ("softmax", "log_softmax"),
        lambda shape, axes: _short_rows(shape, axes, 16384),
        DIFFERENTIATED,
        "1.7x with backward; forward alone is 0.97x to 1.3x, and XLA fuses it with its neighbours",
        ("h200-softmax.json", "h200-log_softmax.json", "h200-program.json"),
    ),
    Rule(
        ("softmax", "log_softmax"),
        lambda shape, axes: True,
        ALWAYS,
        "1.8x and more forward alone for long rows, and for axes that are not last",
        ("h200-softmax.json", "h200-log_softmax.json"),
    ),
    Rule(
        ("layer_norm", "rms_norm"),
        _few_long_rows,
        DIFFERENTIATED,
        "1.9x with backward; forward alone is 1.08x to 1.11x for a few rows of a million",
        ("h200-layer_norm.json", "h200-rms_norm.json"),
    ),
    Rule(
        ("rms_norm",),
        lambda shape, axes: _short_rows(shape, axes, 8192),
        DIFFERENTIATED,
        "1.4x to 3.2x with backward; forward alone is 0.88x to 1.25x for rows of at most 8192",
        ("h200-rms_norm.json",),
    ),
    Rule(
        ("layer_norm", "rms_norm"),
        lambda shape, axes: True,
        ALWAYS,
        "1.2x to 2.1x forward alone, 1.7x to 4.7x with backward",
        ("h200-layer_norm.json", "h200-rms_norm.json"),
    ),
    Rule(
        ("batch_norm", "batch_norm_inference"),
        lambda shape, axes: True,
        ALWAYS,
        "1.9x to 2.8x with backward (float16); 1.6x on a CPU; keeps x and one bit per element",
        ("h200-batch_norm.json", "cpu-ci-batch_norm.json"),
    ),
    Rule(
        ("relu", "add_relu"),
        lambda shape, axes: True,
        ALWAYS,
        "keeps one bit per element; XLA's own code where it is not differentiated",
        ("h200-relu.json", "h200-add_relu.json", "h200-program.json"),
    ),
)


def rule_for(operation: str, shape, axes) -> Rule:
    """The row that decides about a call."""
    return next(r for r in TABLE if operation in r.operations and r.applies(shape, axes or ()))
