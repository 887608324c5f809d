"""What a case can be timed with: jaxnorm, XLA and, where installed, other libraries."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import jaxnorm
from bench.cases import BATCH_NORMS, BORDERS, CROSS_ENTROPY, NORMS, Case
from bench.timing import Data, residual_bytes
from jaxnorm._measure import timer
from jaxnorm._ops import OPERATIONS

NAMES = ("jaxnorm", "kernel", "xla", "xla-y", "torch", "torch.compile", "liger", "quack")


class Unsupported(Exception):
    """The implementation does not offer this case."""


@dataclasses.dataclass
class Prepared:
    """A workload and what is worth recording about it."""

    workload: timer.Workload
    residual_bytes: int | None = None
    temporary_bytes: int | None = None


def prepare(name: str, case: Case, direction: str, data: Data) -> Prepared:
    """Compiles `case` for one implementation and makes what the direction starts from.

    Args:
      name: One of `NAMES`; "jaxnorm" chooses by itself, "kernel" insists on the kernels, "xla-y" is
        a ReLU that keeps its result for backward, as frameworks with layers do.
      case: The case.
      direction: One of `bench.cases.DIRECTIONS`.
      data: Inputs that `make_data` made for this case and direction.

    Raises:
      Unsupported: the implementation has no such operation.
      Exception: whatever the library raises, an ImportError first of all.
    """
    if name in ("jaxnorm", "kernel", "xla", "xla-y"):
        return _prepare_jax(name, case, direction, data)
    if name in _TORCH:
        return _prepare_torch(_TORCH[name](case), case, direction, data)
    raise ValueError(f"implementation must be one of {', '.join(NAMES)}, got {name!r}")


# ---- JAX ----


@jax.custom_vjp
def _relu_of_result(x):
    """ReLU with a derivative by y > 0: backward reads y in place of one bit per element."""
    return jax.nn.relu(x)


def _relu_of_result_fwd(x):
    y = jax.nn.relu(x)
    return y, y


def _relu_of_result_bwd(y, dy):
    return (jnp.where(y > 0, dy, jnp.zeros((), dy.dtype)),)


_relu_of_result.defvjp(_relu_of_result_fwd, _relu_of_result_bwd)

_XLA_Y_OPS = {"relu": _relu_of_result, "add_relu": lambda x, y: _relu_of_result(x + y)}


def jax_operation(name: str, op: str) -> Callable:
    """`op` of jaxnorm ("jaxnorm", "kernel") or XLA ("xla", "xla-y"), called with jaxnorm's arguments."""
    if name == "xla":
        return OPERATIONS[op].xla
    if name == "xla-y":
        if op not in _XLA_Y_OPS:
            raise Unsupported("xla-y has relu and add_relu only")
        return _XLA_Y_OPS[op]
    implementation = "kernel" if name == "kernel" else None
    return functools.partial(getattr(jaxnorm, op), implementation=implementation)


def jax_function(name: str, case: Case) -> Callable:
    """`function(*args, *fixed)` for a case, with the arguments of `make_data`."""
    if case.program == "mlp":
        relu = jax_operation(name, "relu")
        return lambda x, w1, w2: relu(x @ w1) @ w2
    if case.program == "norm":
        norm = jax_operation(name, "layer_norm")
        return lambda x, w1, w2, scale, bias: norm(x @ w1, scale, bias) @ w2
    if case.program == "conv":
        norm = jax_operation(name, "batch_norm")

        def program(x, w1, w2, scale, bias):
            y = norm(_convolve(x, w1), scale, bias, activation="relu")[0]
            return _convolve(y, w2)

        return program
    if case.program == "gated":
        norm = jax_operation(name, BORDERS["gated"])
        return lambda x, z, scale: norm(x * jax.nn.silu(z), scale)
    if case.program == "gelu":
        norm = jax_operation(name, BORDERS["gelu"])
        return lambda x, scale, bias: jax.nn.gelu(norm(x, scale, bias))
    op = jax_operation(name, "softmax" if case.program else case.op)
    if case.op in ("relu", "add_relu", *NORMS):
        return op
    if case.op in BATCH_NORMS:
        return functools.partial(_batch_norm, op, case)
    if case.op == CROSS_ENTROPY:
        return functools.partial(op, axis=case.axis)

    def softmax(x, *fixed):
        rest = iter(fixed)
        where = next(rest) if case.where_shape is not None else None
        bias = next(rest) if case.bias_shape is not None else None
        return op(x, case.axis, where, scale=case.scale, bias=bias)

    def attention(q, k, v, *fixed):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        return jnp.einsum("bhqk,bhkd->bhqd", softmax(scores, *fixed), v)

    return attention if case.program == "attention" else softmax


def _convolve(x, weights):
    return jax.lax.conv_general_dilated(
        x, weights, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _batch_norm(op, case, x, *rest):
    """The result of `op` for a case: of training without the statistics."""
    residual, scale, bias = rest if len(rest) == 3 else (None, *rest)
    kw = {"axis": case.axis, "residual": residual, "activation": "relu" if case.tail else None}
    if case.op == "batch_norm":
        return op(x, scale, bias, **kw)[0]
    return op(x, bias, scale * scale, scale, bias, **kw)


def _prepare_jax(name, case, direction, data) -> Prepared:
    function, fixed, sets = jax_function(name, case), data.fixed, data.sets
    if direction == "forward":
        forward = jax.jit(function)
        return Prepared(timer.Workload(lambda i: forward(*data.args[i], *fixed), sets))
    if direction in ("forward_train", "backward"):
        forward, residuals_of, backward = timer.split_vjp(
            function, data.args[0], fixed, cotangents=_cotangents(case)
        )
        if direction == "forward_train":
            computed = jax.eval_shape(forward, data.args[0], fixed)[1]
            kept = residual_bytes(residuals_of(computed, data.args[0], fixed))
            return Prepared(timer.Workload(lambda i: forward(data.args[i], fixed), sets), kept)
        residuals = [residuals_of(forward(args, fixed)[1], args, fixed) for args in data.args]
        jax.block_until_ready(residuals)
        run = lambda i: backward(residuals[i], data.cotangents[i])  # noqa: E731
        return Prepared(timer.Workload(run, sets), residual_bytes(residuals[0]))

    # What a training step has of an operation: the result, which the next one reads, and the gradients
    # of all arguments; of every implementation the same arrays.
    with_result = direction == "together" or case.program == "scores"

    @jax.jit
    def gradients(args, fixed, dy):
        y, vjp = jax.vjp(lambda *args: function(*args, *fixed), *args)
        dx = vjp(dy)
        return (y, *dx[: _cotangents(case)]) if with_result else dx

    # The calls below find this compiled program: nothing is compiled twice.
    compiled = gradients.lower(data.args[0], fixed, data.cotangents[0]).compile()
    return Prepared(
        timer.Workload(lambda i: gradients(data.args[i], fixed, data.cotangents[i]), sets),
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )


def _cotangents(case) -> int:
    """How many cotangents backward returns: those of add_relu are one array, which is returned once."""
    return (case.arrays if case.tail else 1) + case.parameters


# ---- PyTorch and libraries on top of it ----


def _torch_function(case: Case) -> Callable:
    import torch

    def masked(x, *fixed):
        rest = iter(fixed)
        where = next(rest) if case.where_shape is not None else None
        bias = next(rest) if case.bias_shape is not None else None
        if case.scale is not None:
            x = x * case.scale
        if bias is not None:
            x = x + bias
        return x if where is None else x.masked_fill(~where, -math.inf)

    def attention(q, k, v, *fixed):
        return torch.softmax(masked(q @ k.transpose(-1, -2), *fixed), -1) @ v

    if case.program == "attention":
        return attention

    def norm(x, scale, bias=None):
        # PyTorch's own mixed form: parameters in x's dtype.
        scale = scale.to(x.dtype)
        if bias is None:
            return torch.nn.functional.rms_norm(x, scale.shape, scale, 1e-6)
        return torch.nn.functional.layer_norm(x, scale.shape, scale, bias.to(x.dtype), 1e-6)

    def batch_norm(x, *rest):
        residual, scale, bias = rest if len(rest) == 3 else (None, *rest)
        statistics = (None, None) if case.op == "batch_norm" else (bias, scale * scale)
        y = torch.nn.functional.batch_norm(  # NHWC is channels_last, seen from here
            x.movedim(case.axis, 1), *statistics, scale, bias, statistics[0] is None, 0.0, 1e-5
        ).movedim(1, case.axis)
        y = y if residual is None else y + residual
        return torch.relu(y) if case.tail else y

    if case.op in BATCH_NORMS:
        return batch_norm
    if case.program == "conv":
        # A 1x1 convolution of channels last is a product with a matrix.
        def program(x, w1, w2, scale, bias):
            y = (x @ w1[0, 0]).movedim(-1, 1)
            y = torch.nn.functional.batch_norm(y, None, None, scale, bias, True, 0.0, 1e-5)
            return torch.relu(y).movedim(1, -1) @ w2[0, 0]

        return program
    if case.op == CROSS_ENTROPY:
        return lambda x, labels: torch.nn.functional.cross_entropy(
            x.movedim(case.axis, 1), labels, reduction="none"
        ).to(getattr(torch, case.parameter_dtype))
    if case.program == "mlp":
        return lambda x, w1, w2: torch.relu(x @ w1) @ w2
    if case.program == "norm":
        return lambda x, w1, w2, scale, bias: norm(x @ w1, scale, bias) @ w2
    if case.program == "gated":
        return lambda x, z, scale: norm(x * torch.nn.functional.silu(z), scale)
    if case.program == "gelu":
        return lambda *args: torch.nn.functional.gelu(norm(*args), approximate="tanh")
    if case.op in NORMS:
        return norm
    match case.op:
        case "log_softmax":
            return lambda x, *fixed: torch.log_softmax(masked(x, *fixed), case.axis)
        case "relu":
            return torch.relu
        case "add_relu":
            return lambda x, y: torch.relu(x + y)
    return lambda x, *fixed: torch.softmax(masked(x, *fixed), case.axis)


def _torch_compiled(case: Case) -> Callable:
    import torch
    from torch._functorch import config

    # Backward is run many times from one forward, so it must not reuse the buffers that forward
    # saved.
    config.donated_buffer = False
    torch._dynamo.reset()
    return torch.compile(_torch_function(case), dynamic=False)


def _last_axis_of_x_alone(library: str, case: Case, ops: Sequence[str]) -> None:
    """Raises Unsupported for what none of these libraries has, and for other operations than `ops`."""
    if case.op not in ops:
        raise Unsupported(f"{library} is compared in {', '.join(ops)}, not in {case.op}")
    if case.where_shape or case.bias_shape or case.scale is not None or case.program:
        raise Unsupported(f"{library} has {case.op} of x alone")
    if case.axis not in (-1, len(case.shape) - 1):
        raise Unsupported(f"{library} has {case.op} over the last axis only")


def _liger(case: Case) -> Callable:
    if case.op == CROSS_ENTROPY:
        raise Unsupported("liger's cross-entropy writes the gradient over the logits")
    _last_axis_of_x_alone("liger", case, ("softmax", *NORMS))
    if case.op == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, scale, bias: LigerLayerNormFunction.apply(x, scale, bias, 1e-6)
    if case.op == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # Not in place: dx over dy would be another operation, and backward runs many times.
        return lambda x, scale: LigerRMSNormFunction.apply(x, scale, 1e-6, 0.0, "llama", False)
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def _quack(case: Case) -> Callable:
    # Its layer_norm has no autograd function.
    _last_axis_of_x_alone("quack", case, ("softmax", "rms_norm", CROSS_ENTROPY))
    if case.op == CROSS_ENTROPY:
        from quack.cross_entropy import cross_entropy

        return lambda x, labels: cross_entropy(
            x.reshape(-1, x.shape[-1]), labels.reshape(-1), reduction="none"
        ).reshape(labels.shape)
    if case.op == "rms_norm":
        from quack.rmsnorm import rmsnorm

        return lambda x, scale: rmsnorm(x, scale, eps=1e-6)
    from quack.softmax import softmax

    return lambda x: softmax(x.reshape(-1, x.shape[-1])).reshape(x.shape)


_TORCH = {
    "torch": _torch_function,
    "torch.compile": _torch_compiled,
    "liger": _liger,
    "quack": _quack,
}


def _prepare_torch(function, case, direction, data) -> Prepared:
    """The same data through DLPack. Autograd gives backward, with the graph of each set kept."""
    import torch

    data.wait()  # JAX's stream must be done before another stream reads
    args = [tuple(torch.from_dlpack(a) for a in set_args) for set_args in data.args]
    fixed = tuple(_to_torch(a) for a in data.fixed)
    cotangents = [torch.from_dlpack(dy) for dy in data.cotangents]

    def wait(_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def workload(run):
        return timer.Workload(run, data.sets, wait)

    if direction == "forward":

        def run(i):
            with torch.no_grad():
                return function(*args[i], *fixed)

        return Prepared(workload(run))

    leaves = [tuple(a.detach().requires_grad_() for a in set_args) for set_args in args]
    if direction == "forward_train":
        return Prepared(workload(lambda i: function(*leaves[i], *fixed)))
    if direction == "backward":
        results = [function(*set_leaves, *fixed) for set_leaves in leaves]
        wait(None)

        def run(i):
            wanted = leaves[i][: 1 + case.parameters]
            return torch.autograd.grad(results[i], wanted, cotangents[i], retain_graph=True)

        return Prepared(workload(run))

    def run(i):
        y = function(*leaves[i], *fixed)
        dx = torch.autograd.grad(y, leaves[i], cotangents[i])
        return y.detach(), dx

    return Prepared(workload(run))


def _to_torch(array):
    """A boolean array crosses DLPack as bytes, in every version of both libraries; labels have 64 bits there."""
    import torch

    if array.dtype == jnp.int32:
        return torch.from_dlpack(array).long()
    if array.dtype == bool:
        return torch.from_dlpack(array.astype(jnp.uint8)).bool()
    return torch.from_dlpack(array)


def release() -> None:
    """Gives memory that PyTorch caches back to the device."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
