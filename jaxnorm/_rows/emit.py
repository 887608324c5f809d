"""The CUDA text of a program under a plan."""

import functools
import pathlib

from jaxnorm._rows.emit_kernel import Emitter
from jaxnorm._rows.emit_strided import StridedEmitter
from jaxnorm._rows.plan import Plan
from jaxnorm._rows.rules import Program


@functools.cache
def preamble() -> str:
    """The text in front of the kernels."""
    here = pathlib.Path(__file__).parent
    return "".join(
        (here / name).read_text() for name in ("machine.cuh", "exchange.cuh", "functions.cuh")
    )


def emit(program: Program, plan: Plan, kernel: str = "jaxnorm_row_program") -> str:
    """The CUDA text of the kernel and, where there are sums over rows, of `<kernel>_finish`."""
    emitter = StridedEmitter if plan.side else Emitter
    return preamble() + emitter(program, plan, kernel).text()
