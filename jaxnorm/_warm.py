"""Compiles the kernels of calls into the cache on disk, before a program makes the calls."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.extend.mlir import ir

from jaxnorm import _launch
from jaxnorm._ops.record import Operation, gradient_of
from jaxnorm._rows import launcher


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an operation without a mask, over the last axis."""

    op: Operation
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.op.name} {'x'.join(map(str, self.shape))} {self.dtype}"

    def lowered(self) -> list[jax.stages.Lowered]:
        """Forward alone, and forward and backward in one jit, for CUDA."""
        kinds = self.op.argument_kinds(self.shape, self.dtype)
        args = tuple(jax.ShapeDtypeStruct(*kind) for kind in kinds)
        dy = jax.ShapeDtypeStruct(*self.op.result_kind(self.shape, self.dtype))
        gradient = gradient_of(self.op.plain_call, self.op.parameters)
        traced = jax.jit(self.op.plain_call).trace(*args), gradient.trace(args, dy)
        return [t.lower(lowering_platforms=("cuda",)) for t in traced]


def kernel_sources(lowered: jax.stages.Lowered) -> list[str]:
    """The CUDA text of each call of `jaxnorm_launch`, in the program's order."""
    found = []

    def visit(op):
        op = op.operation
        if (
            op.name == "stablehlo.custom_call"
            and op.attributes["call_target_name"].value == _launch.TARGET
        ):
            found.append(op.attributes["mhlo.backend_config"]["source"].value)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    module.operation.walk(visit)
    return found


def warm(case: Case, architecture: int) -> int:
    """Compiles every kernel of a case for sm_<architecture>; returns the number of CUDA texts.

    Raises:
      RuntimeError: if a kernel does not compile.
    """
    # A set, because forward alone and forward before backward may be the same text.
    sources = {text for low in case.lowered() for text in kernel_sources(low)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda text: launcher.compile(text, architecture), sources))
    return len(sources)
