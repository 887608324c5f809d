"""What a row program can be timed with: jaxnorm.fuse, plain XLA and, where installed, PyTorch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import jaxnorm
from bench import row_programs
from bench.peers import Prepared
from bench.row_programs import RowProgram
from bench.timing import Data, residual_bytes
from jaxnorm._measure import timer

NAMES = ("jaxnorm", "xla", "torch", "torch.compile")


def make_data(
    case: RowProgram, directions: Sequence[str], sizes: Sequence[int], dtype: str = "bfloat16"
) -> Data:
    """Arguments, of which each set has all, and cotangents where one of the directions reads them."""
    least = min(case.min_bytes(direction, sizes, dtype) for direction in directions)
    sets, cold = timer.rotation(least)
    return Data(
        args=[case.inputs(sizes, dtype, seed) for seed in range(sets)],
        fixed=(),
        cotangents=[
            case.cotangents(sizes, dtype, seed)
            for seed in range(sets if set(directions) - {"forward"} else 0)
        ],
        cold=cold,
    )


# ---- JAX ----


@dataclasses.dataclass(frozen=True)
class Program:
    """One direction of a case, traced: what is compiled, and what it is called with.

    Attributes:
      jitted: of the arguments that `inputs` returns.
      avals: Shapes and dtypes of these.
      inputs: Called with the arguments of the case and the cotangents.
      residual_bytes: What jaxnorm's backward reads, without the cotangents.
    """

    jitted: Callable
    avals: tuple
    inputs: Callable[[tuple, object], tuple]
    residual_bytes: int | None = None


def trace(name: str, case: RowProgram, direction: str, sizes: Sequence[int], dtype="bfloat16"):
    """The `Program` of jaxnorm or of XLA.

    XLA's vjp starts from the arguments. Ours starts from what jaxnorm's forward kept, which are
    the arguments too, unless something smaller is enough.
    """
    function = jaxnorm.fuse(case.function) if name == "jaxnorm" else case.function
    args, cotangents = case.avals(sizes, dtype), case.results(sizes, dtype)
    if direction == "forward":
        return Program(jax.jit(function), args, lambda args, cotangents: args)
    both = (args, cotangents)
    if direction == "both":
        return Program(jax.jit(case.result_and_gradients(function)), both, lambda *given: given)
    if name != "jaxnorm":
        return Program(jax.jit(case.gradients(function)), both, lambda *given: given)

    def halves(args):
        return args[: case.differentiated], args[case.differentiated :]

    forward, residuals_of, backward = timer.split_vjp(function, *halves(args), case.differentiated)
    computed = jax.eval_shape(forward, *halves(args))[1]
    kept = residuals_of(computed, *halves(args))

    def inputs(args, cotangents):
        made = forward(*halves(args))[1] if computed else ()
        return residuals_of(made, *halves(args)), cotangents

    return Program(backward, (kept, cotangents), inputs, residual_bytes(kept))


def compile_program(program: Program):
    """The compiled program, which is called as the jitted function is."""
    return program.jitted.lower(*program.avals).compile()


def prepare_jax(program: Program, compiled, data: Data) -> Prepared:
    """The workload of a program that was compiled before."""
    cotangents = data.cotangents or [None] * data.sets
    inputs = [program.inputs(a, dy) for a, dy in zip(data.args, cotangents, strict=True)]
    jax.block_until_ready(inputs)
    return Prepared(
        timer.Workload(lambda i: compiled(*inputs[i]), data.sets),
        program.residual_bytes,
        compiled.memory_analysis().temp_size_in_bytes,
    )


# ---- PyTorch ----


def _torch_functions() -> dict[str, Callable]:
    """By family. The formulas are those of the table, with PyTorch's own functions where it has them."""
    import torch
    from torch.nn import functional

    def wide(x):
        return x.double() if x.dtype == torch.float64 else x.float()

    def rms(x, scale):
        return functional.rms_norm(wide(x), scale.shape, scale, row_programs.EPSILON).to(x.dtype)

    def layer(x, scale, bias):
        y = functional.layer_norm(wide(x), scale.shape, scale, bias, row_programs.EPSILON)
        return y.to(x.dtype)

    def swiglu(x):
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    def l2_normalize(x):
        y = wide(x)
        return (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-12)).to(x.dtype)

    def gelu(x):
        return functional.gelu(x, approximate="tanh")

    def adaptive(x, scale, shift):
        y = functional.layer_norm(wide(x), x.shape[-1:], eps=row_programs.EPSILON)
        return (y * (1 + wide(scale)[:, None]) + wide(shift)[:, None]).to(x.dtype)

    def rotary(x, scale, cos, sin):
        a, b = wide(rms(x, scale)).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def fp8(x, scale):
        y = wide(rms(x, scale))
        unit = y.abs().amax(-1, keepdim=True) / row_programs.FP8_LARGEST
        return (y / unit).to(torch.float8_e4m3fn), unit

    def capped(x):
        cap = row_programs.SOFT_CAP
        return torch.softmax(cap * torch.tanh(wide(x) / cap), -1).to(x.dtype)

    def log_softmax(x):
        return torch.log_softmax(wide(x), -1)

    def distillation(student, teacher):
        p, q = log_softmax(teacher), log_softmax(student)
        return (p.exp() * (p - q)).sum(-1)

    def entropy(logits):
        p = log_softmax(logits)
        return -(p.exp() * p).sum(-1)

    def log_probability_entropy(logits, tokens):
        p = log_softmax(logits)
        return p.gather(-1, tokens[:, None])[:, 0], -(p.exp() * p).sum(-1)

    def channel_layer_norm(x, scale, bias):
        y = functional.layer_norm(
            wide(x).movedim(1, -1), scale.shape, scale, bias, row_programs.EPSILON
        )
        return y.movedim(-1, 1).to(x.dtype)

    def pixel_cross_entropy(logits, labels):
        return functional.cross_entropy(wide(logits), labels, reduction="none")

    def dropout(x, residual, scale, bias, key):
        # Its random bits are PyTorch's own.
        stream = residual + functional.dropout(x, row_programs.DROPOUT_RATE)
        return layer(stream, scale, bias), stream

    return {
        "rms_norm": rms,
        "layer_norm": layer,
        "softmax": lambda x: torch.softmax(wide(x), -1).to(x.dtype),
        "gated_rms_norm": lambda x, z, scale: rms(x * functional.silu(z), scale),
        "l2_normalize": l2_normalize,
        "swiglu": swiglu,
        "layer_norm_gelu": lambda x, scale, bias: gelu(layer(x, scale, bias)),
        "gelu_bias": lambda x, bias: gelu(x + bias.to(x.dtype)),
        "dyt": lambda x, alpha, scale, bias: (torch.tanh(alpha * wide(x)) * scale + bias).to(
            x.dtype
        ),
        "adaln": adaptive,
        "qk_norm_rotary": rotary,
        "rms_norm_fp8": fp8,
        "soft_capped_softmax": capped,
        "kl_distillation": distillation,
        "soft_label_cross_entropy": lambda x, p: -(wide(p) * log_softmax(x)).sum(-1),
        "entropy": entropy,
        "log_probability_entropy": log_probability_entropy,
        "channel_softmax": lambda x: torch.softmax(wide(x), 1).to(x.dtype),
        "channel_layer_norm": channel_layer_norm,
        "pixel_cross_entropy": pixel_cross_entropy,
        "dropout_residual_layer_norm": dropout,
    }


@functools.lru_cache(maxsize=1)
def _compiled(case_name: str, family: str) -> Callable:
    """Compiled once for all directions of a case."""
    import torch
    from torch._functorch import config

    # Backward is run many times from one forward, so it must not reuse the buffers that forward
    # saved.
    config.donated_buffer = False
    torch._dynamo.reset()
    return torch.compile(_torch_functions()[family], dynamic=False)


def torch_function(name: str, case: RowProgram) -> Callable:
    """The program of `case` in PyTorch, compiled ("torch.compile") or not ("torch")."""
    if name == "torch":
        return _torch_functions()[case.family]
    return _compiled(case.name, case.family)


def prepare_torch(name: str, case: RowProgram, direction: str, data: Data) -> Prepared:
    """The same data through DLPack. Autograd's backward starts from what its forward kept."""
    import torch

    data.wait()  # JAX's stream must be done before another stream reads
    function, moving = torch_function(name, case), case.differentiated
    args = [
        [
            _to_torch(a).requires_grad_(i < moving and direction != "forward")
            for i, a in enumerate(set_args)
        ]
        for set_args in data.args
    ]
    cotangents = [[_to_torch(dy) for dy in jax.tree.leaves(set_dy)] for set_dy in data.cotangents]

    def wait(_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def results_of(i):
        results = function(*args[i])
        return results if isinstance(results, tuple) else (results,)

    def gradients(results, i, **options):
        return torch.autograd.grad(results, args[i][:moving], cotangents[i], **options)

    if direction == "forward":

        def run(i):
            with torch.no_grad():
                return results_of(i)
    elif direction == "vjp":
        results = [results_of(i) for i in range(data.sets)]
        wait(None)

        def run(i):
            return gradients(results[i], i, retain_graph=True)
    else:

        def run(i):
            results = results_of(i)
            return [r.detach() for r in results], gradients(results, i)

    return Prepared(timer.Workload(run, data.sets, wait))


def _to_torch(array):
    """Labels have 64 bits there; a key of JAX is nothing to it."""
    import torch

    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return torch.zeros(())
    tensor = torch.from_dlpack(array)
    return tensor.long() if array.dtype == jnp.int32 else tensor.detach()
