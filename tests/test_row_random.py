"""Random row programs: their kernels, run on the CPU under random schedules, against the functions in float64.

`JAXNORM_ROW_PROGRAMS=2000` runs so many new ones instead of the few that are the same in every run.
"""

import dataclasses
import functools
import math
import os

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import row_emulator
from hypothesis import strategies as st

from jaxnorm._primitive.programs import closed_of
from jaxnorm._rows import primitive, save, tune
from jaxnorm._rows.call import row_call, simplified
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.plan import DEVICES
from jaxnorm._rows.schedule import schedule

pytestmark = pytest.mark.skipif(not row_emulator.supported(), reason="needs g++ on Linux")

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
FLOATS = [FLOAT32, BFLOAT16, FLOAT16, FLOAT64]
INTEGERS = [
    np.dtype(t) for t in ("int32", "uint32", "int8", "uint8", "int16", "uint16", "int64", "uint64")
]
BOOL = np.dtype(bool)
STORED = [*FLOATS, *INTEGERS, BOOL, E4M3, E5M2]
ROWS = [(3,), (1,), (5,), (2, 3), (3, 2), (2, 1), (1, 4), (2, 3, 2), (7,), (16,), (2, 8)]
COLUMNS = [8, 64, 31, 33, 1, 65, 128, 513, 1023, 1025, 1024, 2]


# ---- programs as data ----


@dataclasses.dataclass(frozen=True)
class Operand:
    """An argument: its dtype, and how it lies along rows and columns."""

    kind: str
    dtype: np.dtype
    choice: int


@dataclasses.dataclass(frozen=True)
class Random:
    """A random program.

    Attributes:
      rows: the row dimensions.
      columns: of a row.
      operands: the arguments behind the first one, which has all rows and columns.
      first: the first one's dtype.
      steps: (operation, value, value, choice), where values are counted from the last one computed.
      results: (value, dtype or -1, form) of each result.
      gradient: "" for the function, "gradient" for its gradient, "saved" for that from what forward saves.
    """

    rows: tuple
    columns: int
    first: np.dtype
    operands: tuple
    steps: tuple
    results: tuple
    gradient: str


KINDS = "whole whole column row part mask scalar transposed merged label key key_of_row".split()


@st.composite
def programs(draw):
    small = st.integers(0, 30)
    operand = st.builds(Operand, st.sampled_from(KINDS), st.sampled_from(STORED), small)
    step = st.tuples(st.sampled_from(sorted(STEPS)), small, small, small)
    result = st.tuples(st.integers(0, 8), st.integers(-1, len(STORED) - 1), st.integers(0, 5))
    return Random(
        draw(st.sampled_from(ROWS)),
        draw(st.sampled_from(COLUMNS)),
        draw(st.sampled_from(FLOATS[:3] * 4 + STORED)),
        tuple(draw(st.lists(operand, max_size=4))),
        tuple(draw(st.lists(step, min_size=1, max_size=40))),
        tuple(draw(st.lists(result, min_size=1, max_size=3))),
        draw(st.sampled_from(["", "gradient", "saved"])),
    )


def arrays_of(program: Random):
    """The arguments."""
    generator = np.random.default_rng(0)
    rows, columns = program.rows, program.columns
    part = tuple(n if i % 2 else 1 for i, n in enumerate(rows))
    shapes = {
        "whole": (*rows, columns),
        "column": (columns,),
        "row": rows,
        "part": (*part, columns),
        "mask": (*part, columns),
        "scalar": (),
        "transposed": (*rows[:-1][::-1], rows[-1], columns),
        "merged": (math.prod(rows), columns),
        "label": rows,
        "key": (2,),
        "key_of_row": (*rows, 2),
    }
    arrays = []
    for operand in (Operand("whole", program.first, 0), *program.operands):
        shape, dtype = shapes[operand.kind], operand.dtype
        if operand.kind.startswith("key"):
            array = generator.integers(0, 2**32, shape, dtype=np.uint32)
        elif operand.kind == "label":
            array = generator.integers(0, columns, shape).astype(np.int32)
        elif operand.kind == "mask":
            array = generator.random(shape) < 0.5
        elif dtype == BOOL:
            array = generator.random(shape) < 0.5
        elif dtype in INTEGERS:
            array = generator.integers(0 if dtype.kind == "u" else -50, 100, shape).astype(dtype)
        else:
            array = np.asarray(generator.normal(size=shape) + operand.choice % 3).astype(dtype)
        arrays.append(array)
    return arrays


class Run:
    """Evaluates a program.

    Attributes:
      floats: "as stored" for the dtypes of the program, otherwise the dtype that takes the place of smaller ones.
      noise: (amplitude, seed) of the relative noise that each step adds; None for none.
    """

    def __init__(self, program: Random, floats="as stored", noise=None):
        self.program, self.floats, self.noise = program, floats, noise
        self.rank = len(program.rows) + 1
        self.count = 0

    # ---- values: arrays with the columns and all row dimensions; a row dimension may have size 1 ----

    def dtype(self, dtype):
        if self.floats == "as stored" or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return np.promote_types(self.floats, np.dtype(dtype)) if dtype == FLOAT64 else self.floats

    def cast(self, x, dtype):
        dtype = np.dtype(dtype)
        if dtype in (E4M3, E5M2):
            if self.floats == "as stored":
                return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)
            return x.astype(jnp.float32).astype(dtype).astype(self.floats)
        if x.dtype in (E4M3, E5M2):
            x = x.astype(jnp.float32)
        if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(x.dtype, jnp.floating):
            # What is out of range is left open.
            info = jnp.iinfo(dtype)
            x = jnp.clip(x, max(info.min, -(2**20)), min(info.max, 2**20))
        return x.astype(self.dtype(dtype))

    def float(self, x):
        if x.dtype in FLOATS:
            return x
        return self.cast(x, FLOAT32)

    def number(self, x):
        return (
            self.cast(x, np.int32)
            if x.dtype == BOOL
            else self.float(x)
            if x.dtype not in INTEGERS
            else x
        )

    def integer(self, x, c=0):
        if x.dtype in INTEGERS:
            return x
        return self.cast(x if x.dtype == BOOL else self.float(x) * 4, INTEGERS[c % len(INTEGERS)])

    def bool(self, x):
        return x if x.dtype == BOOL else self.number(x) > 0

    def alike(self, a, b):
        """Both in one dtype, with columns that fit."""
        a, b = self.fit(a, b)
        if a.dtype == b.dtype:
            return a, b
        if a.dtype in FLOATS and b.dtype in FLOATS:
            dtype = max(a.dtype, b.dtype, key=lambda d: (d.itemsize, d == FLOAT32))
            return a.astype(dtype), b.astype(dtype)
        return a, self.cast(b, a.dtype)

    def fit(self, *values):
        shortest = min((v.shape[-1] for v in values if v.shape[-1] != 1), default=1)
        return [v if v.shape[-1] == 1 else v[..., :shortest] for v in values]

    def noisy(self, x):
        self.count += 1
        if self.noise is None or x.dtype != FLOAT64:
            return x
        amplitude, seed = self.noise
        place = sum(
            jax.lax.broadcasted_iota(jnp.float64, x.shape, i) * (1.7 + i) for i in range(x.ndim)
        )
        return x * (1 + amplitude * jnp.cos(place * 12.9898 + 78.233 * self.count + seed))

    # ---- the program ----

    def operand(self, operand: Operand, x):
        rows, kind = self.program.rows, operand.kind
        if kind.startswith("key"):
            return jax.random.wrap_key_data(x)
        if kind == "label":
            return x[..., None]
        if x.dtype in (E4M3, E5M2):
            x = self.cast(x, FLOAT32)
        x = self.cast(x, x.dtype)
        if kind == "transposed":
            x = jnp.transpose(x, (*range(self.rank - 2)[::-1], self.rank - 2, self.rank - 1))
        if kind == "merged":
            x = x.reshape((*rows, self.program.columns))
        if kind == "row":
            x = x[..., None]
        return (
            x.reshape((1,) * (self.rank - x.ndim) + x.shape) if kind in ("column", "scalar") else x
        )

    def __call__(self, *arrays):
        operands = (Operand("whole", self.program.first, 0), *self.program.operands)
        values = [self.operand(o, x) for o, x in zip(operands, arrays, strict=True)]
        self.keys = [x for x, o in zip(values, operands, strict=True) if o.kind.startswith("key")]
        self.labels = [x for x, o in zip(values, operands, strict=True) if o.kind == "label"]
        self.values = [
            x for x, o in zip(values, operands, strict=True) if not o.kind.startswith("key")
        ]
        for name, a, b, c in self.program.steps:
            x, y = (self.values[-1 - i % len(self.values)] for i in (a, b))
            new = STEPS[name](self, x, y, c)
            if new is not None:
                self.values.append(self.noisy(new))
        results = [self.result(*r) for r in self.program.results]
        return [r for r in results if r is not None]

    def result(self, value, number, form):
        x = self.values[-1 - value % len(self.values)]
        if form == 0 and x.dtype in FLOATS:
            x = jnp.add(*self.alike(x, self.float(self.values[0])))
        x = self.float(x) if self.program.gradient and x.dtype not in FLOATS else x
        if number >= 0 and not (self.program.gradient and STORED[number] not in FLOATS):
            dtype = STORED[number]
            x = (
                self.integer(x).astype(dtype)
                if dtype in INTEGERS and x.dtype == BOOL
                else self.cast(x, dtype)
            )
        if form == 1 and x.shape[-1] == 1:
            x = x[..., 0]
        if form == 2 and self.rank > 2 and x.ndim == self.rank:
            x = jnp.swapaxes(x, 0, 1)
        if form == 3 and x.shape[:-1] == self.program.rows:
            x = x.reshape((math.prod(self.program.rows), x.shape[-1]))
        return x


# ---- steps: (run, value, value, choice) -> value, or None where there is nothing to do ----

STEPS = {}


def step(function):
    STEPS[function.__name__] = function
    return function


def gelu(x, approximate=True):
    """In float32 at least: 16 bits would round the formula's constants, which the reference has exactly."""
    wide = FLOAT64 if x.dtype == FLOAT64 else FLOAT32
    return jax.nn.gelu(x.astype(wide), approximate=approximate).astype(x.dtype)


UNARY = [
    jnp.tanh, jax.nn.sigmoid, jnp.sin, jnp.square, jnp.negative, jnp.abs, jax.nn.relu, jax.nn.silu, gelu,
    lambda x: jnp.exp(jnp.minimum(x, 4)), lambda x: jnp.log(jnp.abs(x) + 1), lambda x: jax.lax.rsqrt(x * x + 1),
    lambda x: jnp.sqrt(jnp.abs(x) + 0.5), jax.scipy.special.erf, lambda x: x**3, jnp.log1p, jax.nn.softplus,
    lambda x: jnp.expm1(jnp.minimum(x, 3)), lambda x: jnp.exp2(jnp.clip(x, -3, 3)), jnp.arctan, jnp.cbrt,
    lambda x: 1 / (1 + x * x), lambda x: jnp.round(x), jnp.floor, jnp.sign, lambda x: jnp.clip(x, -1, 1),
    lambda x: gelu(x, approximate=False), lambda x: 1 - jnp.tanh(x), lambda x: 1 + jnp.tanh(x),
    lambda x: x**-2, lambda x: jax.lax.stop_gradient(x) * x, lambda x: 2 * x + 3, jax.nn.log_sigmoid,
]  # fmt: skip


@step
def unary(run, x, y, c):
    return UNARY[c % len(UNARY)](run.float(x))


@step
def unary_again(run, x, y, c):
    return UNARY[(c + 16) % len(UNARY)](run.float(x))


BINARY = [
    jnp.add, jnp.subtract, jnp.multiply, lambda x, y: x / (1 + jnp.abs(y)), jnp.maximum, jnp.minimum, jnp.arctan2,
    lambda x, y: jnp.where(x > y, x, y * 2), lambda x, y: (jnp.abs(x) + 0.5) ** jnp.clip(y, -2, 2),
    lambda x, y: x * jax.nn.sigmoid(y), lambda x, y: x - 0.5 * y, jnp.hypot,
]  # fmt: skip


@step
def binary(run, x, y, c):
    return BINARY[c % len(BINARY)](*run.alike(run.float(x), run.float(y)))


@step
def multiply(run, x, y, c):
    return jnp.multiply(*run.alike(run.float(x), run.float(y)))


@step
def add(run, x, y, c):
    return jnp.add(*run.alike(run.float(x), run.float(y)))


INTEGER = [
    jnp.add, jnp.subtract, jnp.multiply, jax.lax.bitwise_and, jax.lax.bitwise_or, jax.lax.bitwise_xor, jnp.maximum,
    jnp.minimum, lambda x, y: jax.lax.shift_left(*jnp.broadcast_arrays(x, y & 7)),
    lambda x, y: jax.lax.shift_right_logical(*jnp.broadcast_arrays(x, y)),
    lambda x, y: jax.lax.shift_right_arithmetic(*jnp.broadcast_arrays(x, y & 3)),
    lambda x, y: jax.lax.div(*jnp.broadcast_arrays(x, y)), lambda x, y: jax.lax.rem(*jnp.broadcast_arrays(x, y)),
    lambda x, y: jnp.abs(x), lambda x, y: -x, lambda x, y: ~x, lambda x, y: jnp.sign(x),
    lambda x, y: jax.lax.population_count(x), lambda x, y: jax.lax.clz(x), lambda x, y: x // y, lambda x, y: x % y,
    lambda x, y: x**2, lambda x, y: jnp.clip(x, -5, 5) if x.dtype.kind == "i" else x, lambda x, y: x * x + 7,
]  # fmt: skip


@step
def integers(run, x, y, c):
    return INTEGER[c % len(INTEGER)](*run.alike(run.integer(x, c), run.integer(y, c)))


COMPARE = [jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal, jnp.equal, jnp.not_equal]


@step
def compare(run, x, y, c):
    return COMPARE[c % 6](*run.alike(run.number(x), run.number(y)))


@step
def booleans(run, x, y, c):
    x, y = run.fit(run.bool(x), run.bool(y))
    return [x & y, x | y, x ^ y, ~x][c % 4]


@step
def select(run, x, y, c):
    which = run.bool(run.values[-1 - c % len(run.values)])
    x, y = run.alike(run.number(x), run.number(y))
    which, x, y = run.fit(which, x, y)
    return jnp.where(which, x, y)


@step
def convert(run, x, y, c):
    dtype = STORED[c % len(STORED)]
    if dtype in (E4M3, E5M2):
        return run.cast(run.cast(run.float(x), dtype), FLOAT32)
    return run.cast(run.number(x), dtype)


@step
def reduce(run, x, y, c):
    x = run.number(x)
    operation = [jnp.sum, jnp.max, jnp.min, jnp.mean, jnp.argmax, jnp.argmin, jnp.any, jnp.all][
        c % 8
    ]
    if c % 8 == 3:
        x = run.float(x)
    if c % 8 >= 6:
        x = run.bool(x)
    result = operation(x, -1, keepdims=True)
    return result.astype(x.dtype) if c % 8 == 0 else result


@step
def reduce_float(run, x, y, c):
    x = run.float(x)
    functions = [
        jnp.sum, jnp.max, jnp.mean, jnp.var, jax.nn.logsumexp,
        lambda x, *a, **k: jax.nn.softmax(x), lambda x, *a, **k: jax.nn.log_softmax(x),
        lambda x, *a, **k: x - jnp.mean(x, -1, keepdims=True),
        lambda x, *a, **k: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 2**-10),
        lambda x, *a, **k: x / (1 + jnp.sum(jnp.abs(x), -1, keepdims=True)),
    ]  # fmt: skip
    return functions[c % len(functions)](x, -1, keepdims=True)


@step
def cut(run, x, y, c):
    n = x.shape[-1]
    if (n % 2 and not (2 < n <= 33)) or n == 1:
        return None
    half = n // 2
    first, second = x[..., :half], x[..., half:]
    if c % 4 == 0:
        return first
    if c % 4 == 1:
        return second
    if c % 4 == 2:
        return jnp.concatenate([second, first], -1)
    return jnp.multiply(*run.fit(run.number(first), run.number(second)))


@step
def join(run, x, y, c):
    if x.shape[-1] != y.shape[-1] or x.shape[-1] == 1 or x.shape[-1] >= 2 * run.program.columns:
        return None
    x, y = run.alike(run.number(x), run.number(y))
    return jnp.concatenate(jnp.broadcast_arrays(x, y), -1)


@step
def pad(run, x, y, c):
    n = x.shape[-1]
    if n == 1 or n >= 2 * run.program.columns or (n % 2 and n > 33):
        return None
    x = run.number(x)
    low, high = [(n, 0), (0, n), (n // 2, 0), (0, n // 2)][c % 4]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(low, high)], constant_values=c % 2)


@step
def reverse(run, x, y, c):
    whole = [v for v in run.values[:4] if v.shape[-1] == x.shape[-1]] or [x]
    return jnp.flip(whole[c % len(whole)], -1)


@step
def take(run, x, y, c):
    if x.shape[-1] == 1:
        return None
    if run.labels:
        labels = run.labels[c % len(run.labels)]
    else:
        labels = jax.lax.rem(jnp.abs(run.cast(run.number(y), np.int32)), np.int32(x.shape[-1]))
    labels = labels if labels.shape[-1] == 1 else jnp.max(labels, -1, keepdims=True)
    x, labels = run.number(x), jnp.minimum(labels, x.shape[-1] - 1)
    shape = jnp.broadcast_shapes(x.shape[:-1], labels.shape[:-1])
    x = jnp.broadcast_to(x, (*shape, x.shape[-1]))
    return jnp.take_along_axis(x, jnp.broadcast_to(labels, (*shape, 1)), -1)


@step
def one_hot(run, x, y, c):
    if not run.labels or x.shape[-1] == 1:
        return None
    label = run.labels[c % len(run.labels)]
    hot = jnp.arange(x.shape[-1], dtype=label.dtype) == label
    x = run.float(x)
    taken = jnp.where(hot, x, 0)
    return [x - hot.astype(x.dtype), taken, jnp.sum(taken, -1, keepdims=True)][c % 3]


@step
def iota(run, x, y, c):
    dtype = [np.int32, np.float32, np.uint8, np.int64][c % 4]
    dim = c // 4 % x.ndim
    return jax.lax.broadcasted_iota(run.dtype(np.dtype(dtype)), x.shape, dim)


@step
def move(run, x, y, c):
    if x.shape[:-1] != run.program.rows or run.rank < 3:
        return None
    if c % 2:
        merged = x.reshape((-1, x.shape[-1])) if 0 not in x.shape else x
        return run.number(merged).reshape(x.shape) * 2
    return jnp.swapaxes(run.number(jnp.swapaxes(x, 0, 1)) + 1, 0, 1)


@step
def random_numbers(run, x, y, c):
    if not run.keys:
        return None
    key = run.keys[c % len(run.keys)]
    columns = run.program.columns

    def draw(key, shape):
        if c % 5 == 0:
            return jax.random.bernoulli(key, 0.5, shape)
        if c % 5 == 1:
            return run.cast(jax.random.uniform(key, shape, jnp.float32), FLOAT32)
        dtype = [jnp.uint8, jnp.uint16, jnp.uint32][c % 3]
        return jax.random.bits(key, shape, dtype)

    if key.ndim == 0:
        return draw(key, (*run.program.rows, columns))
    for _ in run.program.rows:
        draw = jax.vmap(draw, (0, None))
    return draw(key, (columns,))


@jax.custom_jvp
def clipped(x):
    return jnp.maximum(x, 0)


clipped.defjvp(
    lambda primals, tangents: (clipped(*primals), tangents[0] * jax.nn.sigmoid(primals[0]))
)


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (g * jnp.tanh(x),))


@step
def call(run, x, y, c):
    x = run.float(x)
    functions = [jax.jit(clipped), doubled, jax.checkpoint(jax.nn.silu), jax.jit(jax.nn.softmax)]
    return functions[c % 4](x)


# ---- the comparison ----

SCHEDULES = st.fixed_dictionaries(
    {},
    optional={
        "source": st.sampled_from(["registers", "ring", "stream"]),
        "lanes": st.sampled_from([1, 2, 4, 8, 16, 32, 64, 96, 128, 256]),
        "cluster": st.sampled_from([1, 2, 4]),
        "lag": st.sampled_from([1, 2]),
        "rows_at_once": st.sampled_from([1, 2, 4]),
        "vector": st.sampled_from([1, 2, 4, 8]),
        "hoist": st.sampled_from(("", "registers", "shared")),
        "slots": st.sampled_from([1, 2]),
        "stages": st.sampled_from([1, 2, 3]),
        "blocks": st.sampled_from([1, 2, 4]),
    },
)


def functions_of(program: Random, arrays):
    """(function of the arguments, the same in float32, the same in float64 with noise; all arguments)."""
    if not program.gradient:
        return (
            Run(program),
            Run(program, FLOAT32),
            lambda noise, *args: Run(program, FLOAT64, noise)(*args),
            arrays,
        )
    wanted = [i for i, x in enumerate(arrays) if x.dtype in FLOATS]
    hypothesis.assume(wanted)
    shapes = jax.eval_shape(Run(program), *arrays)
    generator = np.random.default_rng(1)
    active = [i for i, s in enumerate(shapes) if s.dtype in FLOATS]
    hypothesis.assume(active)
    cotangents = [
        np.asarray(generator.normal(size=shapes[i].shape)).astype(shapes[i].dtype) for i in active
    ]

    def gradient(run, floats, *args):
        inputs, given = list(args[: len(arrays)]), args[len(arrays) :]

        def f(*some):
            for i, x in zip(wanted, some, strict=True):
                inputs[i] = x
            results = run(*inputs)
            return [results[i] for i in active]

        def wide(x):
            return x if floats is None or x.dtype == FLOAT64 else x.astype(floats)

        primals = [wide(inputs[i]) for i in wanted]
        results, pullback = jax.vjp(f, *primals)
        return list(
            pullback([wide(g).astype(r.dtype) for g, r in zip(given, results, strict=True)])
        )

    return (
        lambda *args: gradient(Run(program), None, *args),
        lambda *args: gradient(Run(program, FLOAT32), FLOAT32, *args),
        lambda noise, *args: gradient(Run(program, FLOAT64, noise), FLOAT64, *args),
        [*arrays, *cotangents],
    )


# Of rows that lie side by side.
STRIDED_SCHEDULES = st.fixed_dictionaries(
    {},
    optional={
        "source": st.sampled_from(["registers", "stream"]),
        "side": st.sampled_from([2, 8, 16, 32]),
        "lanes": st.sampled_from([1, 4, 16, 32]),
        "cluster": st.sampled_from([1, 2, 4]),
        "rows_at_once": st.sampled_from([1, 2, 4]),
        "slots": st.sampled_from([1, 3]),
    },
)


def with_columns_at(place, program: Random, function, in_float32, in_float64, arrays):
    """The same functions of arrays whose columns are not the last axis."""
    rank = len(program.rows) + 1
    kinds = ["whole", *(o.kind for o in program.operands)]
    kinds += ["whole"] * (len(arrays) - len(kinds))
    moving = [k != "key_of_row" and a.ndim == rank for k, a in zip(kinds, arrays, strict=True)]

    def moved(values, chosen, move, *where):
        return [move(a, *where) if m else a for a, m in zip(values, chosen, strict=True)]

    def of(f, *args):
        results = f(*moved(args, moving, jnp.moveaxis, place, -1))
        return moved(results, [r.ndim == rank for r in results], jnp.moveaxis, -1, place)

    return (
        functools.partial(of, function),
        functools.partial(of, in_float32),
        lambda noise, *args: of(functools.partial(in_float64, noise), *args),
        [np.ascontiguousarray(a) for a in moved(arrays, moving, np.moveaxis, -1, place)],
    )


def emulated(asked, order, resident, architecture, closed, arrays):
    """Results of a program's kernel, which are the same in every run."""
    hypothesis.note(str(closed))
    device = DEVICES[architecture]
    plan = schedule(simplified(closed), device, **asked)
    hypothesis.note(str(plan))
    if plan.slots * plan.vector * plan.rows_at_once > 256 or plan.threads < 32 < 32 * plan.lanes:
        hypothesis.reject()  # more than a thread's registers, less than a warp
    if plan.cluster > 1 and plan.threads % 32:
        hypothesis.reject()  # the lanes of a warp send to the blocks of a cluster
    if not tune.blocks_have_slots(simplified(closed), plan):
        hypothesis.reject()
    call = row_call(closed, device, plan)
    if call.shared_bytes > device.shared_bytes:
        hypothesis.reject()
    if plan.shifted:  # rows of a block lie alike on any GPU
        resident *= 8 * math.prod(n for n in simplified(closed).row_sizes[: call.group_dims])
    avals = [(v.shape, v.dtype) for v in closed.out_avals]
    options = {"resident_blocks": max(resident, 1), "architecture": architecture}
    found = row_emulator.run(call, arrays, avals, order=order, **options)
    again = row_emulator.run(call, arrays, avals, order="forward", **options)
    if not any(0 in a.shape for a in arrays):
        for a, b in zip(found, again, strict=True):
            assert a.tobytes() == b.tobytes(), "two runs differ"
    return found


def saved(program: Random, arrays, run):
    """(numbers of gradients, the gradients) by the kernels of forward and backward."""
    count = 1 + len(program.operands)
    operands = arrays[:count]
    closed, _ = closed_of(
        lambda *args: Run(program)(*args), [jax.typeof(jnp.asarray(a)) for a in operands]
    )
    wanted = [i for i, x in enumerate(operands) if x.dtype in FLOATS]
    # Rows are short here; statistics are saved as of long ones.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "REDUCTION_BITS", 64)
        split = primitive.split_of(closed, tuple(i in wanted for i in range(count)))
    if split.backward is None:
        hypothesis.reject()
    forward = closed if split.forward == "itself" else split.forward
    results = run(forward, [*operands, *map(np.asarray, split.constants)])
    sources = {"operand": operands, "result": results}
    residuals = [np.asarray(sources[k][i] if k in sources else i) for k, i in split.residuals]
    active = [i for i, a in enumerate(closed.out_avals) if a.dtype in FLOATS]
    cotangents = [arrays[count + active.index(i)] for i in split.active]
    return [wanted.index(i) for i in split.taken], run(split.backward, [*residuals, *cotangents])


def check(program: Random, asked: dict, order: str, resident: int, architecture=90, place=None):
    """Raises if the kernel's results are further from those in float64 than rounding takes them."""
    functions = functions_of(program, arrays_of(program))
    if place is not None:
        functions = with_columns_at(place, program, *functions)
    function, in_float32, in_float64, arrays = functions
    try:
        closed = jax.make_jaxpr(function)(*arrays)
    except (TypeError, ValueError) as error:
        if isinstance(error, NotARowProgram):
            raise
        hypothesis.note(str(error))
        hypothesis.reject()
    wanted = list(range(len(closed.out_avals)))
    run = functools.partial(emulated, asked, order, resident, architecture)
    try:
        if program.gradient == "saved":
            wanted, found = saved(program, arrays, run)
        else:
            found = run(closed, arrays)
    except NotARowProgram as error:
        refusals[str(error)] = program
        hypothesis.reject()
    double = all(x.dtype not in FLOATS or x.dtype == FLOAT64 for x in arrays) and not any(
        s.aval.dtype == FLOAT32 for e in closed.jaxpr.eqns for s in e.outvars
    )
    amplitude = 1e-15 if double else 3e-7
    exact_function = jax.jit(in_float64)
    exact = exact_function((0.0, 0.0), *arrays)
    samples = [exact_function((amplitude, seed), *arrays) for seed in (1.0, 2.0, 3.0)]
    if not double:
        samples.append(jax.jit(in_float32)(*arrays))
    for number, got in zip(wanted, found, strict=True):
        others = [np.asarray(s[number]) for s in samples]
        if math.prod(program.rows):
            compare_arrays(
                number, got, np.asarray(exact[number]), others, 1e-12 if double else 2e-6
            )


def compare_arrays(number, got, want, others, tolerance):
    assert got.shape == want.shape
    if not got.size:
        return
    if got.dtype.kind in "iub":
        want = want.astype(got.dtype)
        sure = np.all([o.astype(got.dtype) == want for o in others], 0)
        wrong = sure & (got != want)
        few = got[wrong][:5], want[wrong][:5]
        assert not wrong.any(), (
            f"result {number}: {few[0]} for {few[1]}, {wrong.sum()} of {wrong.size}"
        )
        return
    info = ml_dtypes.finfo(got.dtype)
    got, want = got.astype(np.float64), want.astype(np.float64)
    others = [o.astype(np.float64) for o in others]
    finite = np.all([np.isfinite(x) & (abs(x) < float(info.max) * 0.9) for x in (want, *others)], 0)
    unlike = np.isnan(want) & np.all([np.isnan(o) for o in others], 0) & ~np.isnan(got)
    assert not unlike.any(), f"result {number}: {got[unlike][:5]} for NaN"
    if not finite.any():
        return
    with np.errstate(invalid="ignore"):
        noise = np.max([np.where(finite, abs(o - want), 0) for o in others], 0)
    size = np.sqrt(np.mean(want[finite] ** 2))
    eps = float(info.eps) * (1.01 if info.bits < 32 else 4)
    limit = 8 * noise + eps * abs(want) + tolerance * size + float(info.smallest_subnormal)
    with np.errstate(invalid="ignore"):
        wrong = finite & ~(abs(got - want) <= limit)
    assert not wrong.any(), (
        f"result {number}: {got[wrong][:5]} for {want[wrong][:5]}, limit {limit[wrong][:5]}, "
        f"{wrong.sum()} of {wrong.size}"
    )


refusals: dict[str, Random] = {}
COUNT = int(os.environ.get("JAXNORM_ROW_PROGRAMS", 0))
SETTINGS = hypothesis.settings(
    max_examples=COUNT or 12,
    deadline=None,
    derandomize=not COUNT,
    database=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@SETTINGS
@hypothesis.given(
    programs(),
    SCHEDULES,
    st.sampled_from(sorted(row_emulator.ORDERS)),
    st.sampled_from([7, 1, 3]),
)
def test_random_programs(program, asked, order, resident):
    check(program, asked, order, resident)


@SETTINGS
@hypothesis.given(
    programs(),
    st.integers(0, 2),
    STRIDED_SCHEDULES,
    st.sampled_from(sorted(row_emulator.ORDERS)),
    st.sampled_from([7, 1, 3]),
)
def test_random_programs_side_by_side(program, place, asked, order, resident):
    """Columns come before some of the axes that number rows."""
    hypothesis.assume(program.gradient != "saved")  # what is saved is drawn with the columns last
    check(program, asked, order, resident, place=place % len(program.rows))
