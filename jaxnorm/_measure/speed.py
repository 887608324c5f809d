"""Times of an operation next to XLA's."""

import dataclasses
import math
from collections.abc import Sequence

import jax

from jaxnorm._measure import timer
from jaxnorm._ops.record import Operation, gradient_of


@dataclasses.dataclass
class Compared:
    """jaxnorm and XLA on the same call, in turn."""

    op: str
    dtype: str
    shape: str
    direction: str
    bytes: int = 0
    seconds: float = math.nan
    xla_seconds: float = math.nan
    copy_bytes_per_second: float = math.nan
    spread: float = math.nan
    clock: str = ""
    message: str = ""

    @property
    def ratio(self) -> float:
        return self.xla_seconds / self.seconds


def compare_times(op: Operation, dtype: str, shape: Sequence[int], direction: str) -> Compared:
    """Times one direction: "forward", or "gradient", which is forward and backward in one jit."""
    result = Compared(op.name, dtype, "x".join(map(str, shape)), direction)
    result_shape, result_dtype = op.result_kind(shape, dtype)
    # Least that must move: the arguments and y; for the gradient dy and dx too.
    results = 1 if direction == "forward" else 2
    arrays = op.arrays + results - 1
    result.bytes = arrays * math.prod(shape) * jax.numpy.dtype(dtype).itemsize
    result.bytes += results * math.prod(result_shape) * jax.numpy.dtype(result_dtype).itemsize
    try:
        sets, _ = timer.rotation(result.bytes)
        kinds = [*op.argument_kinds(shape, dtype), (result_shape, result_dtype)]
        keys = jax.random.split(jax.random.key(0), (sets, len(kinds)))
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        data = [[draw(k, *kind) for k, kind in zip(row, kinds, strict=True)] for row in keys]

        def workload(function):
            if direction == "forward":
                jitted = jax.jit(function)
                return timer.Workload(lambda i: jitted(*data[i][:-1]), sets)
            jitted = gradient_of(function, op.parameters)
            return timer.Workload(lambda i: jitted(data[i][:-1], data[i][-1]), sets)

        found = timer.measure(
            {
                "jaxnorm": workload(op.plain_call),
                "xla": workload(op.plain_xla),
                "copy": timer.copy_workload(result.bytes),
            },
            budget=0.25,
        )
        timings = []
        for value in found.values():
            if isinstance(value, Exception):
                raise value
            timings.append(value)
        ours, xla, copy = timings
        result.seconds, result.xla_seconds, result.clock = ours.median, xla.median, ours.clock
        result.spread = timer.ratio_spread(ours.spread, xla.spread)
        result.copy_bytes_per_second = result.bytes / copy.median
    except Exception as error:
        result.message = f"{type(error).__name__}: {error}"[:300]
    return result
