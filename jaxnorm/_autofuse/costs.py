"""Where an operation is worth its call.

A call is a boundary for XLA's fusion, so an operation that XLA fuses with its neighbours must win more than that is
worth. autofuse cannot know whether its result will be differentiated. Where only the derivative wins, the rewritten
program keeps the original code, and takes the operation when it is differentiated.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

# A kernel that moves fewer bytes takes longer to launch than to run.
LEAST_BYTES = 1 << 18

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
    """Whether calls of an operation are worth it, of those calls that the rule applies to.

    The rule decides for all platforms: which platform a program is compiled for is not known when it is traced. Figures
    are of bfloat16 on an H200 (batch_norm: float16), and of all dtypes on a CPU. ALWAYS asks for 1.2 forward alone on
    the H200: less may be lost again where XLA would fuse the neighbours.

    Attributes:
      applies: (shape of x, axes, names of operands) -> whether the rule is about a call.
      verdict: ALWAYS or DIFFERENTIATED.
      note: what the figures do not say.
      figures: of each device that was measured.
    """

    applies: Callable[[Sequence, tuple, Collection[str]], bool]
    verdict: str
    note: str
    figures: tuple[Figures, ...] = ()

    @property
    def why(self) -> str:
        return "; ".join(part for part in (self.note, *map(str, self.figures)) if part)


def elements(shape) -> float:
    """How many elements an array has; infinitely many where that is not known."""
    return math.prod(shape) if all(isinstance(n, int) for n in shape) else math.inf


def last(shape, axes) -> bool:
    """Whether the axes are the last ones, all in order."""
    return tuple(axes) == tuple(range(len(shape) - len(axes), len(shape)))


def short_rows(shape, axes, columns) -> bool:
    """Whether the axes are the last ones and have at most so many columns."""
    return last(shape, axes) and elements([shape[a] for a in axes]) <= columns


def always(shape, axes, operands) -> bool:
    """Applies to every call."""
    return True
