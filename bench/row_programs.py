"""The one table of row programs, for the benchmark and for the tests.

A row program is a JAX function whose reductions run along the rows of its arguments. Each is written
here as users write it, without jaxnorm: data in bfloat16, statistics and parameters in float32. With
float64 arguments the same functions compute in float64. Each has a reference in float64 NumPy too,
which was written apart from it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# "forward": the result. "vjp": gradients from what backward needs and the cotangents, the result is not
# kept. "both": the result and the gradients in one jit, from the arguments and the cotangents.
DIRECTIONS = ("forward", "vjp", "both")

# The lists that a case is in: each program at the size of its users, and three programs over row lengths.
MAIN, SWEEP = "main", "sweep"
TAGS = (MAIN, SWEEP)

# Families whose reduced axis is not the last: rows lie side by side.
SIDE_BY_SIDE = ("channel_softmax", "channel_layer_norm", "pixel_cross_entropy")

# Row lengths of the sweep, and the elements of one array, which are the same for all of them.
COLUMNS = tuple(2**n for n in range(6, 18))
ELEMENTS = 2**27

EPSILON = 1e-6
DROPOUT_RATE = 0.1
SOFT_CAP = 50.0
FP8_LARGEST = 448.0  # of float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a row program.

    Attributes:
      shape: of the array.
      dtype: "data" and "parameter" are chosen with the dtype of the case, "key" is one key of
        `jax.random`; others are names of dtypes.
      values: What it is filled with, one of `_VALUES`.
      below: Labels are smaller than this.
      backward: Whether the gradients depend on it, apart from what the program keeps for backward.
    """

    shape: tuple[int, ...]
    dtype: str = "data"
    values: str = "normal"
    below: int = 0
    backward: bool = True


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """A row program, its arguments at any size, and what is known about it.

    Attributes:
      name: Tells it from all others.
      family: The program without its size: that of a sweep's cases is one.
      function: Called as `function(*differentiated, *fixed)`, returns an array or a tuple of them.
      arguments: Called with the sizes, returns one `Argument` for each of the function's.
      differentiated: How many arguments are differentiated, from the first on; 0 for a program without
        gradients.
      reference: The same in float64 NumPy.
      sizes: Those that users have.
      small: Those of the tests and of a CPU.
      forward: Fraction of the copy rate that is wanted of forward on a large GPU.
      vjp: The same of vjp.
      kept: Bytes that forward keeps for backward beyond arguments, called with the sizes and the
        bytes of one element of the data. They stand for the arguments with `backward=False`.
      tag: One of `TAGS`.
    """

    name: str
    family: str
    function: Callable[..., Any]
    arguments: Callable[..., tuple[Argument, ...]]
    differentiated: int
    reference: Callable[..., Any]
    sizes: tuple[int, ...]
    small: tuple[int, ...]
    forward: float
    vjp: float | None = None
    kept: Callable[[Sequence[int], int], int] = lambda sizes, itemsize: 0
    tag: str = MAIN

    @property
    def directions(self) -> tuple[str, ...]:
        """Those that mean something for this program."""
        return DIRECTIONS if self.differentiated else DIRECTIONS[:1]

    def target(self, direction: str) -> float | None:
        """Fraction of the copy rate that is wanted on a large GPU; None where there is none."""
        return {"forward": self.forward, "vjp": self.vjp}.get(direction)

    def inputs(self, sizes: Sequence[int] | None = None, dtype: str = "bfloat16", seed: int = 0):
        """Arguments for `function`, drawn on JAX's default device."""
        found = []
        for place, argument in enumerate(self.arguments(*(sizes or self.sizes))):
            key = jax.random.fold_in(jax.random.key(seed), place)
            found.append(_VALUES[argument.values](key, argument, dtype_of(argument, dtype)))
        return tuple(found)

    def results(self, sizes: Sequence[int] | None = None, dtype: str = "bfloat16"):
        """Shapes and dtypes of what `function` returns."""
        return jax.eval_shape(self.function, *self.avals(sizes, dtype))

    def avals(self, sizes: Sequence[int] | None = None, dtype: str = "bfloat16"):
        """Shapes and dtypes of the arguments."""
        return tuple(
            jax.eval_shape(jax.random.key, 0)
            if a.dtype == "key"
            else jax.ShapeDtypeStruct(a.shape, dtype_of(a, dtype))
            for a in self.arguments(*(sizes or self.sizes))
        )

    def cotangents(
        self, sizes: Sequence[int] | None = None, dtype: str = "bfloat16", seed: int = 0
    ):
        """Normal cotangents, one for each result."""
        leaves, tree = jax.tree.flatten(self.results(sizes, dtype))
        # The argument's places come first.
        first = jax.random.fold_in(jax.random.key(seed), len(self.avals(sizes, dtype)))
        drawn = [
            _normal(jax.random.fold_in(first, place), leaf.shape, leaf.dtype)
            for place, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, drawn)

    def gradients(self, function: Callable | None = None) -> Callable:
        """`gradients(args, cotangents)` of `function`, by default of the plain one: what "vjp" computes."""
        function = self.function if function is None else function
        return lambda args, cotangents: self._pullback(function, args)[1](cotangents)

    def result_and_gradients(self, function: Callable | None = None) -> Callable:
        """`(result, gradients)` of `(args, cotangents)`: what "both" computes."""
        function = self.function if function is None else function

        def both(args, cotangents):
            result, pullback = self._pullback(function, args)
            return result, pullback(cotangents)

        return both

    def _pullback(self, function, args):
        moving, fixed = args[: self.differentiated], args[self.differentiated :]
        return jax.vjp(lambda *moving: function(*moving, *fixed), *moving)

    def min_bytes(
        self, direction: str, sizes: Sequence[int] | None = None, dtype: str = "bfloat16"
    ) -> int:
        """Fewest bytes that must cross memory: each input read once, each output written once.

        Forward reads the arguments and writes the results. Vjp reads the arguments that the gradients
        depend on, what forward kept for it in their place, and the cotangents, and writes the
        gradients. Both reads all arguments and the cotangents and writes the results and the
        gradients: nothing is kept between the two, so that two kernels, of which the second reads
        something again, do not reach the copy rate.
        """
        sizes = sizes or self.sizes
        arguments, avals = self.arguments(*sizes), self.avals(sizes, dtype)
        results = nbytes(self.results(sizes, dtype))
        gradients = nbytes(avals[: self.differentiated])
        match direction:
            case "forward":
                return nbytes(avals) + results
            case "vjp" if self.differentiated:
                needed = [a for a, said in zip(avals, arguments, strict=True) if said.backward]
                kept = self.kept(sizes, jnp.dtype(dtype).itemsize)
                return nbytes(needed) + kept + results + gradients
            case "both" if self.differentiated:
                return nbytes(avals) + 2 * results + gradients
        known = ", ".join(self.directions)
        raise ValueError(f"direction of {self.name} must be one of {known}, got {direction!r}")


def select(names: Sequence[str] = (), tag: str | None = None) -> list[RowProgram]:
    """Programs by name or family, all of them where none is named, and by tag.

    Raises:
      ValueError: a name is of no program.
    """
    known = {name for case in ALL for name in (case.name, case.family)}
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(dict.fromkeys(case.family for case in ALL))
        raise ValueError(f"{unknown[0]!r} is no row program; known: {listed}")
    return [
        case
        for case in ALL
        if tag in (None, case.tag) and (not names or {case.name, case.family} & set(names))
    ]


# ---- values ----


def dtype_of(argument: Argument, dtype: str) -> str:
    """The dtype of an argument whose data is of `dtype`; parameters have float32 at least."""
    wide = "float64" if dtype == "float64" else "float32"
    return {"data": dtype, "parameter": wide}.get(argument.dtype, argument.dtype)


def nbytes(avals) -> int:
    """Bytes of arrays, or of their shapes and dtypes."""
    return sum(
        8 if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a.size * a.dtype.itemsize
        for a in jax.tree.leaves(avals)
    )


def _normal(key, shape, dtype):
    # One array per call, so that the random bits behind it are the only scratch memory. Flat: arrays of as many
    # elements share one compiled program.
    return _flat_normal(key, math.prod(shape), dtype).reshape(shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _flat_normal(key, size, dtype):
    return jax.random.normal(key, (size,), dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _probabilities(key, shape, dtype):
    return jax.nn.softmax(jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _angles(function):
    """Of rotary embeddings: position p and pair i turn by p / 10000^(i / pairs)."""

    def table(key, argument, dtype):
        positions, _, pairs = argument.shape
        frequencies = 10000.0 ** -(np.arange(pairs) / pairs)
        angles = np.arange(positions)[:, None, None] * frequencies
        return jnp.asarray(function(angles), dtype)

    return table


_VALUES = {
    "normal": lambda key, a, dtype: _normal(key, a.shape, dtype),
    "near one": lambda key, a, dtype: 1 + 0.1 * _normal(key, a.shape, dtype),
    "near zero": lambda key, a, dtype: 0.1 * _normal(key, a.shape, dtype),
    "half": lambda key, a, dtype: jnp.full(a.shape, 0.5, dtype),
    "probabilities": lambda key, a, dtype: _probabilities(key, a.shape, dtype),
    "labels": lambda key, a, dtype: jax.random.randint(key, a.shape, 0, a.below, dtype),
    "cosines": _angles(np.cos),
    "sines": _angles(np.sin),
    "key": lambda key, a, dtype: key,
}


# ---- the programs, as users write them ----


def wide(x):
    """float32, or float64 for float64: what statistics are computed in."""
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def rms_norm(x, scale):
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON) * scale
    return y.astype(x.dtype)


def layer_norm(x, scale, bias):
    y = wide(x)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON)
    return (y * scale + bias).astype(x.dtype)


def softmax(x):
    return jax.nn.softmax(wide(x)).astype(x.dtype)


def gated_rms_norm(x, z, scale):
    """Mamba2's."""
    return rms_norm(x * jax.nn.silu(z), scale)


def l2_normalize(x):
    y = wide(x)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-12)).astype(x.dtype)


def swiglu(x):
    """Gate and up are the two halves of one matrix product's result."""
    gate, up = jnp.split(x, 2, -1)
    return jax.nn.silu(gate) * up


def layer_norm_gelu(x, scale, bias):
    return jax.nn.gelu(layer_norm(x, scale, bias))


def gelu_bias(x, bias):
    return jax.nn.gelu(x + bias.astype(x.dtype))


def dynamic_tanh(x, alpha, scale, bias):
    """DyT, which stands where a norm stood."""
    return (jnp.tanh(alpha * wide(x)) * scale + bias).astype(x.dtype)


def adaptive_layer_norm(x, scale, shift):
    """AdaLN of diffusion transformers: every image of a batch has its own scale and shift."""
    y = wide(x)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON)
    return (y * (1 + wide(scale)[:, None]) + wide(shift)[:, None]).astype(x.dtype)


def qk_norm_rotary(x, scale, cos, sin):
    """The norm of queries and keys, and rotary embedding of their halves."""
    a, b = jnp.split(wide(rms_norm(x, scale)), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rms_norm_fp8(x, scale):
    """Quantised by the largest magnitude of each row."""
    y = wide(rms_norm(x, scale))
    unit = jnp.max(jnp.abs(y), -1, keepdims=True) / FP8_LARGEST
    return (y / unit).astype(jnp.float8_e4m3fn), unit


def soft_capped_softmax(x):
    return jax.nn.softmax(SOFT_CAP * jnp.tanh(wide(x) / SOFT_CAP)).astype(x.dtype)


def kl_distillation(student, teacher):
    p, q = jax.nn.log_softmax(wide(teacher)), jax.nn.log_softmax(wide(student))
    return jnp.sum(jnp.exp(p) * (p - q), -1)


def kl_penalty_step(logits, reference):
    """The divergence of logits from a reference, and its gradient: one region of a training step."""
    divergence, pullback = jax.vjp(lambda x: kl_distillation(reference, x), logits)
    return divergence, *pullback(jnp.ones_like(divergence))


def soft_label_cross_entropy(logits, probabilities):
    return -jnp.sum(wide(probabilities) * jax.nn.log_softmax(wide(logits)), -1)


def entropy(logits):
    p = jax.nn.log_softmax(wide(logits))
    return -jnp.sum(jnp.exp(p) * p, -1)


def log_probability_entropy(logits, tokens):
    """What policy gradients need of a language model: of the token, and of the distribution."""
    p = jax.nn.log_softmax(wide(logits))
    taken = jnp.take_along_axis(p, tokens[:, None], -1)[:, 0]
    return taken, -jnp.sum(jnp.exp(p) * p, -1)


def channel_softmax(x):
    """Along the second axis, in front of others."""
    return jax.nn.softmax(wide(x), axis=1).astype(x.dtype)


def channel_layer_norm(x, scale, bias):
    """Of images whose channels come before their pixels."""
    y = wide(x)
    y = y - jnp.mean(y, 1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, 1, keepdims=True) + EPSILON)
    return (y * scale[:, None, None] + bias[:, None, None]).astype(x.dtype)


def pixel_cross_entropy(logits, labels):
    """Of the classes of each pixel."""
    p = jax.nn.log_softmax(wide(logits), axis=1)
    return -jnp.take_along_axis(p, labels[:, None], axis=1)[:, 0]


def dropout_residual_layer_norm(x, residual, scale, bias, key):
    keep = jax.random.bernoulli(key, 1 - DROPOUT_RATE, x.shape)
    stream = residual + jnp.where(keep, x / (1 - DROPOUT_RATE), 0).astype(x.dtype)
    return layer_norm(stream, scale, bias), stream


# ---- the same in float64 NumPy ----


def _f64(*arrays):
    return [np.asarray(a).astype(np.float64) for a in arrays]


def _np_rms(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON) * scale


def _np_layer(x, scale, bias):
    deviation = np.sqrt(np.var(x, -1, keepdims=True) + EPSILON)
    return (x - np.mean(x, -1, keepdims=True)) / deviation * scale + bias


def _np_silu(x):
    return x / (1 + np.exp(-x))


def _np_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _np_log_softmax(x):
    shifted = x - np.max(x, -1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), -1, keepdims=True))


def _np_softmax(x):
    return np.exp(_np_log_softmax(x))


def _reference(function):
    """Of a function of float64 arrays."""
    return lambda *args: function(*_f64(*args))


def _np_qk(x, scale, cos, sin):
    half = x.shape[-1] // 2
    y = _np_rms(x, scale)
    turned = np.concatenate([-y[..., half:], y[..., :half]], -1)
    return y * np.concatenate([cos, cos], -1) + turned * np.concatenate([sin, sin], -1)


def _np_fp8(x, scale):
    y = _np_rms(x, scale)
    unit = np.max(np.abs(y), -1, keepdims=True) / FP8_LARGEST
    return (y / unit).astype(ml_dtypes.float8_e4m3fn), unit


def _np_kl(student, teacher):
    p = _np_softmax(teacher)
    return np.sum(p * _np_log_softmax(teacher), -1) - np.sum(p * _np_log_softmax(student), -1)


def _np_kl_step(logits, reference):
    divergence = _np_kl(reference, logits)
    log_ratio = _np_log_softmax(logits) - _np_log_softmax(reference)
    return divergence, _np_softmax(logits) * (log_ratio - divergence[:, None])


def _np_entropy(logits):
    return -np.sum(_np_softmax(logits) * _np_log_softmax(logits), -1)


def _np_log_probability_entropy(logits, tokens):
    (x,) = _f64(logits)
    rows = np.arange(x.shape[0])
    return _np_log_softmax(x)[rows, np.asarray(tokens)], _np_entropy(x)


def _np_pixel_cross_entropy(logits, labels):
    (x,) = _f64(logits)
    p = _np_log_softmax(np.moveaxis(x, 1, -1))
    return -np.take_along_axis(p, np.asarray(labels)[..., None], -1)[..., 0]


def _np_dropout(x, residual, scale, bias, key):
    keep = np.asarray(jax.random.bernoulli(key, 1 - DROPOUT_RATE, x.shape))
    x, residual, scale, bias = _f64(x, residual, scale, bias)
    stream = residual + np.where(keep, x / (1 - DROPOUT_RATE), 0.0)
    return _np_layer(stream, scale, bias), stream


# ---- their arguments ----


def _parameter(columns: int, values: str, backward: bool = True) -> Argument:
    return Argument((columns,), "parameter", values, backward=backward)


def _rows(*shape, parameters: str = "", arrays: int = 1):
    """Arrays of one shape, and parameters of a row: "s" is a scale, "b" a bias, "e" a bias added at the end."""
    made = {
        "s": _parameter(shape[-1], "near one"),
        "b": _parameter(shape[-1], "near zero"),
        "e": _parameter(shape[-1], "near zero", backward=False),
    }
    return (*[Argument(shape)] * arrays, *(made[p] for p in parameters))


def _of(arrays: int = 1, parameters: str = ""):
    return lambda *sizes: _rows(*sizes, parameters=parameters, arrays=arrays)


def _adaptive(images, tokens, columns):
    shift = Argument((images, columns), backward=False)
    return Argument((images, tokens, columns)), Argument((images, columns)), shift


def _rotary(batch, positions, heads, columns):
    table = (positions, 1, columns // 2)
    return (
        Argument((batch, positions, heads, columns)),
        _parameter(columns, "near one"),
        Argument(table, "parameter", "cosines"),
        Argument(table, "parameter", "sines"),
    )


def _dropout(rows, columns):
    # Backward reads the residual stream, which is a result of forward, and a bit for each element.
    return (
        *[Argument((rows, columns), backward=False)] * 2,
        *_rows(rows, columns, arrays=0, parameters="se"),
        Argument((), "key", "key", backward=False),
    )


def _dropout_kept(sizes, itemsize):
    rows, columns = sizes
    return rows * columns * itemsize + rows * -(-columns // 8)


# ---- the table ----


def _case(family, function, reference, arguments, differentiated, sizes, small, *targets, **more):
    name = more.pop("name", family)
    return RowProgram(
        name, family, function, arguments, differentiated, reference, sizes, small, *targets, **more
    )


_BIG, _SMALL = (32768, 4096), (24, 256)
_VOCABULARY, _SMALL_VOCABULARY = (8192, 128256), (6, 1536)
_SCORES = (16, 16, 1024, 1024)

_np_swiglu = _reference(lambda x: _np_silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :])
_np_layer_gelu = _reference(lambda x, s, b: _np_gelu(_np_layer(x, s, b)))
_np_gated = _reference(lambda x, z, s: _np_rms(x * _np_silu(z), s))
_np_capped = _reference(lambda x: _np_softmax(SOFT_CAP * np.tanh(x / SOFT_CAP)))
_np_l2 = _reference(lambda x: x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-12))
_np_adaptive = _reference(lambda x, s, b: _np_layer(x, 1 + s[:, None], b[:, None]))
_np_dyt = _reference(lambda x, alpha, s, b: np.tanh(alpha * x) * s + b)


def _dynamic_tanh_arguments(rows, columns):
    x, scale, bias = _rows(rows, columns, parameters="se")
    return x, Argument((), "parameter", "half"), scale, bias


def _gelu_bias_arguments(rows, columns):
    return Argument((rows, columns)), _parameter(columns, "normal")


def _distillation_arguments(values):
    return lambda *sizes: (Argument(sizes), Argument(sizes, values=values))


def _token_arguments(rows, columns):
    return Argument((rows, columns)), Argument((rows,), "int32", "labels", below=columns)


def _pixel_arguments(images, classes, *pixels):
    labels = Argument((images, *pixels), "int32", "labels", below=classes)
    return Argument((images, classes, *pixels)), labels


def _channel_arguments(images, channels, *pixels):
    scale, bias = _rows(channels, parameters="se")[1:]
    return Argument((images, channels, *pixels)), scale, bias


def _of_channels(function):
    """A function of rows, of an array that has its columns second."""
    return _reference(lambda x, *p: np.moveaxis(function(np.moveaxis(x, 1, -1), *p), -1, 1))


def _side_by_side():
    """The programs of `SIDE_BY_SIDE`."""
    softmaxes = (
        ("channel_softmax", (64, 1024, 1024), (3, 24, 40)),
        ("channel_softmax_64", (512, 64, 56, 56), (3, 12, 4, 6)),
        ("channel_softmax_8192", (16, 8192, 1024), (2, 1024, 8)),
    )
    for name, sizes, small in softmaxes:
        reference = _of_channels(_np_softmax)
        yield _case(
            "channel_softmax",
            channel_softmax,
            reference,
            _of(),
            1,
            sizes,
            small,
            0.9,
            0.9,
            name=name,
        )
    yield _case(
        "channel_layer_norm",
        channel_layer_norm,
        _of_channels(_np_layer),
        _channel_arguments,
        3,
        (128, 192, 56, 56),
        (2, 24, 4, 6),
        0.9,
        0.9,
    )
    for name, sizes, small in (
        ("pixel_cross_entropy", (24, 21, 512, 512), (2, 21, 4, 6)),
        ("pixel_cross_entropy_150", (64, 150, 128, 128), (2, 150, 4, 4)),
    ):
        yield _case(
            "pixel_cross_entropy",
            pixel_cross_entropy,
            _np_pixel_cross_entropy,
            _pixel_arguments,
            1,
            sizes,
            small,
            0.9,
            0.9,
            name=name,
        )


_MAIN = (
    _case("rms_norm", rms_norm, _reference(_np_rms), _of(1, "s"), 2, _BIG, _SMALL, 0.97, 0.93),
    _case(
        "layer_norm", layer_norm, _reference(_np_layer), _of(1, "se"), 3, _BIG, _SMALL, 0.97, 0.91
    ),
    _case("softmax", softmax, _reference(_np_softmax), _of(), 1, _BIG, _SMALL, 0.97, 0.98),
    _case("gated_rms_norm", gated_rms_norm, _np_gated, _of(2, "s"), 3, _BIG, _SMALL, 0.97, 0.95),
    _case("l2_normalize", l2_normalize, _np_l2, _of(), 1, _BIG, _SMALL, 0.97, 0.95),
    _case("swiglu", swiglu, _np_swiglu, _of(), 1, (32768, 8192), (24, 512), 0.97, 0.95),
    _case(
        "layer_norm_gelu",
        layer_norm_gelu,
        _np_layer_gelu,
        _of(1, "sb"),
        3,
        _BIG,
        _SMALL,
        0.95,
        0.87,
    ),
    _case(
        "gelu_bias",
        gelu_bias,
        _reference(lambda x, b: _np_gelu(x + b)),
        _gelu_bias_arguments,
        2,
        _BIG,
        _SMALL,
        0.95,
        0.93,
    ),
    _case("dyt", dynamic_tanh, _np_dyt, _dynamic_tanh_arguments, 4, _BIG, _SMALL, 0.95, 0.92),
    _case(
        "adaln",
        adaptive_layer_norm,
        _np_adaptive,
        _adaptive,
        3,
        (32, 1024, 4096),
        (3, 8, 256),
        0.95,
        0.88,
    ),
    _case(
        "qk_norm_rotary",
        qk_norm_rotary,
        _reference(_np_qk),
        _rotary,
        2,
        (4, 4096, 32, 128),
        (2, 8, 3, 64),
        0.92,
        0.90,
    ),
    _case("rms_norm_fp8", rms_norm_fp8, _reference(_np_fp8), _of(1, "s"), 0, _BIG, _SMALL, 0.95),
    _case(
        "soft_capped_softmax",
        soft_capped_softmax,
        _np_capped,
        _of(),
        1,
        _SCORES,
        (2, 3, 8, 128),
        0.95,
        0.95,
    ),
    _case(
        "kl_distillation",
        kl_distillation,
        _reference(_np_kl),
        _distillation_arguments("normal"),
        1,
        (8192, 32768),
        _SMALL_VOCABULARY,
        0.97,
        0.93,
    ),
    _case(
        "kl_penalty_step",
        kl_penalty_step,
        _reference(_np_kl_step),
        _distillation_arguments("normal"),
        0,
        _VOCABULARY,
        _SMALL_VOCABULARY,
        0.80,
    ),
    _case(
        "soft_label_cross_entropy",
        soft_label_cross_entropy,
        _reference(lambda x, p: -np.sum(p * _np_log_softmax(x), -1)),
        _distillation_arguments("probabilities"),
        1,
        (8192, 32768),
        _SMALL_VOCABULARY,
        0.97,
        0.93,
    ),
    _case(
        "entropy",
        entropy,
        _reference(_np_entropy),
        _of(),
        1,
        _VOCABULARY,
        _SMALL_VOCABULARY,
        0.97,
        0.90,
    ),
    _case(
        "log_probability_entropy",
        log_probability_entropy,
        _np_log_probability_entropy,
        _token_arguments,
        1,
        _VOCABULARY,
        _SMALL_VOCABULARY,
        0.97,
        0.90,
    ),
    _case(
        "dropout_residual_layer_norm",
        dropout_residual_layer_norm,
        _np_dropout,
        _dropout,
        4,
        _BIG,
        _SMALL,
        0.62,
        0.88,
        kept=_dropout_kept,
    ),
    _case(
        "layer_norm_gelu",
        layer_norm_gelu,
        _np_layer_gelu,
        _of(1, "sb"),
        3,
        (32768, 4095),
        (24, 255),
        0.85,
        0.75,
        name="layer_norm_gelu_4095",
    ),
    *_side_by_side(),
)


def _sweep():
    """Three programs over row lengths, without what the list above has."""
    programs = {case.name: case for case in _MAIN}
    short = {64: (0.6, 0.5), 128: (0.75, 0.65), 256: (0.85, 0.75)}
    for family in ("gated_rms_norm", "layer_norm_gelu", "soft_capped_softmax"):
        for columns in COLUMNS:
            sizes = (ELEMENTS // columns, columns)
            if sizes == programs[family].sizes:
                continue
            forward, vjp = short.get(columns, (0.9, 0.85))
            yield dataclasses.replace(
                programs[family],
                name=f"{family}_{columns}",
                sizes=sizes,
                small=(min(max(8192 // columns, 2), 64), columns),
                forward=forward,
                vjp=vjp,
                tag=SWEEP,
            )


ALL = (*_MAIN, *_sweep())
