"""Operations with a name as row programs, which compute their formulas on GPUs: whole calls, and parts of them."""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import AbstractMesh

from jaxnorm import _launch
from jaxnorm._primitive.calls import Call
from jaxnorm._primitive.programs import closed_of, run_program, trace_context
from jaxnorm._rows import primitive
from jaxnorm._rows.call import Call as RowCall
from jaxnorm._rows.call import device_here
from jaxnorm._rows.equations import NotARowProgram


def row_plan(formula: Callable, skipped: tuple[int, ...] = ()) -> Callable[..., Call | None]:
    """The `plan` of a primitive (`define_primitive`) whose calls are row programs.

    Args:
      formula: (*operands, **params) -> results, of the operands that the kernel takes.
      skipped: positions of the operands that it does not take.
    """

    def plan(operation, operands, _, /, **params):
        taken = [a for i, a in enumerate(operands) if i not in skipped]
        kinds = tuple((a.shape, a.dtype) for a in taken)
        key = kinds, tuple(params.items()), device_here(), trace_context()
        call = _planned(operation, formula, *key)
        if call is None:
            return None
        return Call(_launch.TARGET, call.attributes, call.scratch, skipped)

    return plan


def row_program(formula: Callable) -> Callable[..., list]:
    """The same function, formula(*operands) -> results, as one row program where it can be one.

    It is for what a device does of a call that several devices share.
    """

    def run(*operands):
        closed, constants = closed_of(formula, [jax.typeof(x) for x in operands])
        operands = [*operands, *constants]
        try:
            primitive.check(closed)
        except ValueError:
            return run_program(closed, *operands)
        return primitive.run(closed, operands)

    return run


@functools.lru_cache(maxsize=1024)
def _planned(operation, formula, kinds, params, device, _) -> RowCall | None:
    if any(n == 0 for shape, _ in kinds for n in shape if isinstance(n, int)):
        return None
    wide = any(jnp.dtype(dtype).itemsize == 8 for _, dtype in kinds)
    # Each device computes its own block, wherever the call was traced; 64 bits may have been allowed there alone.
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
        jax.enable_x64(True) if wide else contextlib.nullcontext(),
    ):
        closed, constants = closed_of(
            functools.partial(formula, **dict(params)), [ShapedArray(*kind) for kind in kinds]
        )
    assert not constants
    try:
        return primitive.compile_here(closed, device, operation)
    except NotARowProgram:
        return None
