"""Where an operation is worth its call.

A call is a boundary for XLA's fusion, so an operation that XLA fuses with its neighbours must win more than that is
worth. autofuse cannot know whether its result will be differentiated. Where only the derivative wins, the rewritten
program keeps the original code, and takes the operation when it is differentiated.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

ALWAYS = "always"
DIFFERENTIATED = "where it is differentiated"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured on one device: XLA's time divided by jaxnorm's, each operation by itself.

    Attributes:
      device: its name.
      forward: smallest and largest ratio where nothing is differentiated.
      differentiated: the same of forward and backward together; None if backward was not measured.
      source: files under bench/results. A test compares.
    """

    device: str
    forward: tuple[float, float]
    differentiated: tuple[float, float] | None
    source: tuple[str, ...]

    def __str__(self):
        def ratios(low, high):
            return f"{low:.2g}x" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g}x to {high:.2g}x"

        both = self.differentiated
        with_backward = f", {ratios(*both)} with backward" if both else ""
        return f"{self.device}: {ratios(*self.forward)} XLA's speed forward alone{with_backward}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
      operations: names of jaxnorm's functions.
      applies: (shape of x, axes, names of operands) -> whether this row is the one.
      verdict: ALWAYS or DIFFERENTIATED.
      note: what the figures do not say.
      figures: of each device that was measured.
    """

    operations: tuple[str, ...]
    applies: Callable[[Sequence, tuple, Collection[str]], bool]
    verdict: str
    note: str
    figures: tuple[Figures, ...] = ()

    @property
    def why(self) -> str:
        return "; ".join(part for part in (self.note, *map(str, self.figures)) if part)


def _size(shape, axes) -> float:
    sizes = [shape[a] for a in axes]
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else math.inf


def _last(shape, axes) -> bool:
    return tuple(axes) == tuple(range(len(shape) - len(axes), len(shape)))


def _short_rows(shape, axes, columns) -> bool:
    return _last(shape, axes) and _size(shape, axes) <= columns


def _any(shape, axes, operands) -> bool:
    return True


# The first row that applies decides, for all platforms: which one a program is compiled for is not known when it is
# traced. Figures are of bfloat16 on an H200 (batch_norm: float16), of all dtypes on a CPU. ALWAYS asks for 1.2 forward
# alone on the H200: less may be lost again where XLA would fuse the neighbours.
_CPU = ("cpu-ci.json",)
_BATCH_NORM_CPU = ("cpu-ci-batch_norm.json",)
_SOFTMAX = ("h200-softmax.json", "h200-log_softmax.json")
_RMS_NORM = ("h200-rms_norm.json",)
_NORM = ("h200-layer_norm.json", *_RMS_NORM)
_BATCH_NORM = ("h200-batch_norm-first-card.json",)  # has forward alone, too

TABLE = (
    Rule(
        ("softmax", "log_softmax"),
        lambda shape, axes, operands: _last(shape, axes)
        and not {"where", "bias"}.isdisjoint(operands),
        ALWAYS,
        "with a mask or bias",
        (
            Figures("H200", (1.61, 3.39), (1.66, 2.69), _SOFTMAX),
            Figures("CPU", (1.94, 2.97), (2.07, 2.66), _CPU),
        ),
    ),
    Rule(
        ("softmax", "log_softmax"),
        lambda shape, axes, operands: _short_rows(shape, axes, 16384),
        DIFFERENTIATED,
        "XLA fuses it with its neighbours",  # h200-program.json has it within attention
        (
            Figures("H200", (1.00, 1.33), (1.22, 1.57), _SOFTMAX),
            Figures("CPU", (1.19, 6.95), (1.40, 4.37), _CPU),
        ),
    ),
    Rule(
        ("softmax", "log_softmax"),
        _any,
        ALWAYS,
        "long rows, or an axis that is not the last",
        (
            Figures("H200", (1.83, 2.55), (1.45, 2.16), _SOFTMAX),
            Figures("CPU", (1.38, 2.62), (1.53, 2.57), _CPU),
        ),
    ),
    Rule(
        ("layer_norm", "rms_norm"),
        lambda shape, axes, operands: not _last(shape, axes),
        DIFFERENTIATED,
        "the plain formula, as there is no kernel for such axes; keeps x and one or two numbers per row",
    ),
    Rule(
        ("rms_norm",),
        lambda shape, axes, operands: _short_rows(shape, axes, 8192),
        DIFFERENTIATED,
        "rows of at most 8192",
        (
            Figures("H200", (0.98, 1.49), (2.49, 3.44), _RMS_NORM),
            Figures("CPU", (1.38, 2.38), (1.70, 2.22), _CPU),
        ),
    ),
    Rule(
        ("layer_norm", "rms_norm"),
        _any,
        ALWAYS,
        "",
        (
            Figures("H200", (1.38, 2.35), (2.31, 4.78), _NORM),
            Figures("CPU", (1.18, 2.95), (1.58, 4.50), _CPU),
        ),
    ),
    Rule(
        ("batch_norm",),
        _any,
        DIFFERENTIATED,
        "keeps x and one bit per element",
        (
            Figures("H200", (0.99, 2.90), (2.08, 3.97), _BATCH_NORM),
            Figures("CPU", (1.12, 2.21), (1.39, 2.59), _BATCH_NORM_CPU),
        ),
    ),
    Rule(
        ("batch_norm_inference",),
        _any,
        DIFFERENTIATED,
        "XLA fuses it with its neighbours",
        (
            Figures("H200", (0.96, 1.24), None, ("h200-batch_norm_inference.json",)),
            Figures("CPU", (1.11, 2.25), None, _BATCH_NORM_CPU),
        ),
    ),
    Rule(
        ("relu", "add_relu"),
        _any,
        ALWAYS,
        "keeps one bit per element; XLA's own code where it is not differentiated",
        (
            Figures("H200", (1.00, 1.00), (1.39, 1.95), ("h200-relu.json", "h200-add_relu.json")),
            Figures("CPU", (0.96, 1.15), (1.37, 2.75), _CPU),
        ),
    ),
    # A loss that nothing differentiates costs a fraction of its logits. What its derivative costs is in
    # h200-softmax_cross_entropy.json, which a test compares with this verdict.
    Rule(
        ("softmax_cross_entropy",),
        _any,
        DIFFERENTIATED,
        "writes no probabilities; keeps the logits, the labels and one number per row",
    ),
)


def rule_for(operation: str, shape, axes, operands: Collection[str]) -> Rule:
    """The row that decides about a call."""
    return next(
        r for r in TABLE if operation in r.operations and r.applies(shape, axes or (), operands)
    )
