"""Automatic fusion: existing code gets jaxnorm's operations without being rewritten."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxnorm import _lib
from jaxnorm._autofuse.grown import Grown
from jaxnorm._autofuse.patterns.linear_cross_entropy import has_large_logits
from jaxnorm._autofuse.plan import may_find
from jaxnorm._autofuse.report import Report, report
from jaxnorm._autofuse.rewrite import Rewritten
from jaxnorm._autofuse.statistics import has_batch_statistics
from jaxnorm._primitive.programs import without_dead_code

PLATFORMS = ("cpu", "gpu", "tpu")
# Operations that are no row programs, and a quick look whether a program may have them. A region that took a part of
# their code would leave none to be found.
_BEFORE_REGIONS = {
    "batch_norm": has_batch_statistics,
    "linear_cross_entropy": has_large_logits,
}


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's garbage collector does not run meanwhile.

    It would walk over all that JAX has traced, several times while thousands of equations are traced and looked
    at. That takes long, and finds nothing.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class Autofused:
    """A function with its softmax, norm, ReLU and loss code replaced; made by `autofuse`."""

    def __init__(self, fn: Callable, platform: str | None = None):
        self._fn = fn
        self._platform = platform
        functools.update_wrapper(self, fn)

    def __call__(self, *args, **kwargs) -> Any:
        with contextlib.ExitStack() as pause:
            pause.enter_context(_collector_paused())
            closed, arrays, restore = _trace(self._fn, args, kwargs)
            program = self._steps(closed)[-1]
            if not any(isinstance(x, Tracer) for x in arrays):
                pause.close()  # the program runs here and now, which may take long
            results = program(*arrays)
            del closed, program  # before the collector walks over them
        # A number of the program, or an array of NumPy's that is handed through, comes out as it is.
        return restore([v if isinstance(v, jax.Array) else jnp.array(v) for v in results])

    def explain(self, *args, **kwargs) -> Report:
        """What is replaced in a call with these arguments (or shapes), what that saves, and what is left and why."""
        with _collector_paused():
            closed, _, _ = _trace(self._fn, args, kwargs)
            return report(self._steps(closed))

    def _steps(self, closed) -> list[Rewritten | Grown]:
        """What changes a program, step by step; the last one is the program that runs."""
        if not self._grows():
            return [Rewritten(closed)]
        steps: list[Rewritten | Grown] = []
        wanted = {name for name, may_have in _BEFORE_REGIONS.items() if may_have(closed)}
        if wanted:
            steps.append(Rewritten(closed, wanted.__contains__))
            closed = steps[-1].traced()
        grown = Grown(closed)
        steps.append(grown)
        if may_find(grown.plain):
            steps.append(Rewritten(grown.traced(), lambda name: name not in _BEFORE_REGIONS))
        return steps

    def _grows(self) -> bool:
        """Whether row programs are looked for: only GPUs have kernels for them."""
        if self._platform is not None:
            return self._platform == "gpu"
        return jax.default_backend() == "gpu" and _lib.module("cuda").available


def autofuse(fn: Callable, *, platform: str | None = None) -> Autofused:
    """Replaces softmax, normalisation, ReLU and cross-entropy code in a function by jaxnorm's operations.

    Each call traces `fn`, looks in its jaxpr for code that is one of the operations, and runs the program with that
    code replaced. It looks at what is computed, not at names: Flax's, Haiku's and Equinox's layers, `jax.nn`, optax's
    loss and formulas written out are the same to it. It replaces only what is the same function, derivatives and dtypes
    included, and leaves alone where something else uses an intermediate result, and where XLA is as fast on its own.

    Looks into `jit`, `scan`, `while_loop`, `cond`, `checkpoint`, custom derivatives and `shard_map`. The result may be
    transformed as `fn` may: `jax.jit(autofuse(fn))`, `jax.grad(autofuse(loss))`. Under `jit` tracing happens once;
    without it, at every call.

    For a GPU, put it around a whole training step. It looks for row programs first: each reduction along rows, with the
    elementwise code around it (biases, activations, dropout, residual sums, rotary embeddings, casts), in forward and
    in backward code, becomes one kernel where that moves fewer bytes than XLA's fusions do (`fuse`).

    For a CPU, put it inside of `grad`: in a function that takes gradients itself, forward code shares its intermediate
    results with backward code, which leaves little to replace.

    Args:
      fn: function of any pytrees. Leaves that are arrays are traced; all others are handed to it as they are.
      platform: "cpu", "gpu" or "tpu", for which the function will be compiled; by default JAX's default backend.

    Returns:
      The function, with a method `explain`, which takes the same arguments (or `jax.ShapeDtypeStruct` for arrays) and
      returns a Report: print it, or read its `candidates`.

    >>> import jax, jax.numpy as jnp, jaxnorm
    >>> def norm(x, scale):
    ...     mean = x.mean(-1, keepdims=True)
    ...     return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale
    >>> fused = jaxnorm.autofuse(norm)
    >>> fused(jnp.array([1.0, 3.0]), jnp.array([2.0, 4.0])).round(3)
    Array([-2.,  4.], dtype=float32)
    >>> [c.call for c in fused.explain(jnp.ones((8, 64)), jnp.ones(64)).candidates]
    ['jaxnorm.layer_norm(x, scale, axis=-1, epsilon=1e-06)']
    """
    if not callable(fn):
        raise TypeError(
            f"autofuse: fn must be a function, got {type(fn).__name__}. Pass model.apply, say, not the model."
        )
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(
            f"autofuse: platform must be one of {', '.join(PLATFORMS)} or None, got {platform!r}"
        )
    return Autofused(fn, platform)


def _trace(fn: Callable, args, kwargs):
    """(jaxpr of fn in its array arguments, those, results of the jaxpr -> results of fn)."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    traced = [_is_array(leaf) for leaf in leaves]
    results: list = []

    def of_arrays(*arrays):
        arrays = iter(arrays)
        given = [
            next(arrays) if is_array else leaf
            for leaf, is_array in zip(leaves, traced, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(structure, given)
        out, out_structure = jax.tree.flatten(fn(*args, **kwargs))
        results[:] = [out_structure, [None if _is_array(leaf) else leaf for leaf in out]]
        return [leaf for leaf in out if _is_array(leaf)]

    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
    # What nothing uses must not be taken for another use.
    closed = without_dead_code(jax.make_jaxpr(of_arrays)(*arrays))

    def restore(values):
        structure, others = results
        values = iter(values)
        return jax.tree.unflatten(
            structure, [next(values) if leaf is None else leaf for leaf in others]
        )

    return closed, arrays, restore


def _is_array(leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
