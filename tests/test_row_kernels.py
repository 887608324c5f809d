"""The CUDA text of row programs, run on the CPU under many schedules against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_emulator
from suite import schedules_in_turn

from bench import row_programs
from jaxnorm._rows.bits import unpack
from jaxnorm._rows.call import row_call, simplified
from jaxnorm._rows.plan import DEVICES
from jaxnorm._rows.schedule import schedule

H100 = DEVICES[90]
# Few rows are long enough for these by themselves, so that they are asked for.
SCHEDULES = {
    "chosen": {},
    "ring": {"source": "ring", "lanes": 32},
    "several rows at once": {"source": "registers", "rows_at_once": 2},
    "ring of tiles": {"source": "ring", "lanes": 8, "rows_at_once": 2},
    "cluster of long rows": {"source": "ring", "cluster": 4, "lanes": 64, "stages": 3},
    "parts of rows": {"source": "ring", "parts": True, "lanes": 32, "slots": 1},
    "cluster with parts of rows": {
        "source": "ring",
        "parts": True,
        "cluster": 2,
        "lanes": 64,
        "slots": 1,
        "rows_at_once": 2,
    },
    "steps of a cluster": {"source": "ring", "cluster": 2, "lag": 2, "lanes": 64},
    "stream": {"source": "stream", "lanes": 64, "slots": 1},
}
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 3e-6, "float64": 1e-12}


def flat(function, args):
    """(function of arrays, arrays): keys of jax.random become their words."""
    leaves, tree = jax.tree.flatten(args)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    words = [jax.random.key_data(x) if k else x for x, k in zip(leaves, keys, strict=True)]

    def run(*words):
        values = [jax.random.wrap_key_data(w) if k else w for w, k in zip(words, keys, strict=True)]
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, values)))

    return run, words


def wide(x):
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def programs(case, direction, sizes, dtype):
    args = case.inputs(sizes, dtype)
    if direction == "forward":
        return case.function, args
    return case.gradients(), (args, case.cotangents(sizes, dtype))


@functools.cache
def prepared(name, direction, sizes, dtype):
    """(jaxpr, arrays, results in float64)."""
    case = CASES_BY_NAME[name]
    function, args = programs(case, direction, sizes, dtype)
    run, arrays = flat(function, args)
    exact = jax.jit(run)(*map(wide, arrays))
    return jax.make_jaxpr(run)(*arrays), arrays, [np.asarray(wide(x)) for x in exact]


def emulated(closed, arrays, plan=None, device=H100, **options):
    call = row_call(closed, device, plan)
    avals = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    options = {"architecture": device.architecture, **options}
    return row_emulator.run(call, [np.asarray(a) for a in arrays], avals, **options)


def error(found, wanted):
    found, wanted = np.asarray(found).astype(np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    scale = np.sqrt(np.mean(wanted**2)) if wanted.size else 1.0
    return np.sqrt(np.mean((found - wanted) ** 2)) / (scale + 1e-30) if wanted.size else 0.0


CASES_BY_NAME = {case.name: case for case in row_programs.ALL}
CASES = [
    (case.name, direction)
    for case in row_programs.select(tag=row_programs.MAIN)
    for direction in case.directions
    if direction != "both"
]


def turns():
    """A case has each schedule that is asked for in one of its directions, and its family in both of them.

    The chosen schedule it has in all. Cases of one direction have half of the others.
    """
    for name, direction in CASES:
        place = [*CASES_BY_NAME].index(name) + (direction == "vjp")
        yield from ((name, direction, s) for s in schedules_in_turn(place, SCHEDULES))


@pytest.mark.parametrize(("name", "direction", "schedule_name"), [*turns()])
def test_cases(name, direction, schedule_name):
    case = CASES_BY_NAME[name]
    dtype = "bfloat16"
    closed, arrays, exact = prepared(name, direction, case.small, dtype)
    program = simplified(closed)
    plan = schedule(program, H100, **SCHEDULES[schedule_name])
    found = emulated(closed, arrays, plan)
    for got, want in zip(found, exact, strict=True):
        limit = 5e-2 if got.dtype.itemsize == 1 else TOLERANCE[dtype]
        assert error(got, want) < limit


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    ("sizes", "multiprocessors", "source"),
    [((1101, 1024), 132, "ring"), ((5003, 128), 16, "ring"), ((5003, 128), 132, "registers")],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arrays_in_the_cache(name, sizes, multiprocessors, source, dtype):
    """More rows than blocks take at a time, the last ones fewer: the schedule of arrays that the L2 cache keeps."""
    closed, arrays, exact = prepared(name, "forward", sizes, dtype)
    plan = schedule(simplified(closed), dataclasses.replace(H100, multiprocessors=multiprocessors))
    assert (plan.source, plan.hoist) == (source, "registers")
    found = emulated(closed, arrays, plan, resident_blocks=3)
    for got, want in zip(found, exact, strict=True):
        assert error(got, want) < TOLERANCE[dtype]


# Program, rows and columns, and what `schedule` chooses: the source of rows, and elements of a thread.
LONG_ROWS = [
    ("layer_norm", (37, 4095), "ring", 40),
    ("rms_norm", (37, 4097), "ring", 40),
    ("adaln", (2, 3, 32769), "ring", 24),
    ("layer_norm", (5, 9216), "registers", 48),
    ("softmax", (5, 12288), "registers", 64),
    ("entropy", (3, 16384), "registers", 64),
]


@pytest.mark.parametrize(("name", "sizes", "source", "elements"), LONG_ROWS)
def test_long_rows(name, sizes, source, elements):
    """Rows of odd length with operands of columns, more of them than blocks take, and rows that few threads hold."""
    closed, arrays, exact = prepared(name, "forward", sizes, "bfloat16")
    plan = schedule(simplified(closed), H100)
    assert (plan.source, plan.slots * plan.vector) == (source, elements)
    found = emulated(closed, arrays, resident_blocks=3)
    for got, want in zip(found, exact, strict=True):
        assert error(got, want) < TOLERANCE["bfloat16"]


def norm_backward(x, dy, rstd, scale):
    """Gradients of x * rstd * scale, where rstd is saved: one reduction, and one sum over rows or two."""
    x, dy = x.astype(rstd.dtype), dy.astype(rstd.dtype)
    xhat, g = x * rstd, dy * scale
    dx = rstd * (g - xhat * jnp.mean(g * xhat, 1, keepdims=True))
    return dx, jnp.sum(dy * xhat, 0), jnp.sum(dy, 0)


@pytest.mark.parametrize("results", [2, 3])
@pytest.mark.parametrize(
    ("columns", "rows", "one_sum", "two_sums"),
    [
        (2048, 1000, (4, 32), (4, 32)),
        (2048, 10000, (1, 128), (1, 128)),
        (2304, 1000, (1, 96), (1, 96)),
        (3072, 10000, (4, 32), (2, 96)),
        (4096, 1000, (8, 32), (8, 32)),
        (4096, 10000, (4, 32), (4, 32)),
        (7168, 10000, (8, 32), (4, 128)),
        (12288, 10000, (8, 96), (8, 96)),
    ],
)
def test_small_blocks_share_rows_that_are_summed_up(results, columns, rows, one_sum, two_sums):
    """The blocks of a cluster, and their threads. They depend on the number of rows; the kernel takes any number."""

    def function(*operands):
        return norm_backward(*operands)[:results]

    def operands(rows):
        x, dy, rstd = (rng.normal(size=(rows, n)) for n in (columns, columns, 1))
        given = [
            (x, "bfloat16"),
            (dy, "bfloat16"),
            (rstd, "float32"),
            (rng.normal(size=columns), "float32"),
        ]
        return [jnp.asarray(a, dtype) for a, dtype in given]

    rng = np.random.default_rng(0)
    shapes = [
        jax.ShapeDtypeStruct((rows, *a.shape[1:]) if a.ndim > 1 else a.shape, a.dtype)
        for a in operands(1)
    ]
    plan = schedule(simplified(jax.make_jaxpr(function)(*shapes)), H100)
    assert (plan.cluster, plan.lanes) == (one_sum if results == 2 else two_sums)
    arrays = operands(19)
    exact = function(*map(wide, arrays))
    found = emulated(
        jax.make_jaxpr(function)(*arrays), arrays, plan, resident_blocks=3 * plan.cluster
    )
    for got, want in zip(found, exact, strict=True):
        assert error(got, want) < TOLERANCE["bfloat16"]


def sums(x):
    return x.sum(1), (x * x).sum(1)


def repeated(x, c):
    """A sum over rows and columns, in each column."""
    return jnp.broadcast_to(x.sum((1, 2))[:, None], c.shape)


JOINED = {
    "zeros": lambda x, c: [jnp.zeros_like(c), sums(x)[0], jnp.zeros_like(c), sums(x)[1]],
    "an operand": lambda x, c: [c, *sums(x)],
    "what columns share": lambda x, c: [sums(x)[0], repeated(x, c)],
    "a product with it": lambda x, c: [sums(x)[0] * repeated(x, c), sums(x)[1] + c],
}


@pytest.mark.parametrize("parts", JOINED)
@pytest.mark.parametrize("options", [{}, SCHEDULES["cluster of long rows"]], ids=["", "cluster"])
def test_joined_sums(parts, options):
    """Sums over rows beside what is none, in one result."""

    def function(x, c):
        return x * 2, jnp.concatenate(JOINED[parts](x, c), -1)

    random = np.random.default_rng(0)
    width = 1024 if options else 40
    arrays = [random.normal(size=shape).astype("float32") for shape in ((3, 7, width), (3, width))]
    closed = jax.make_jaxpr(function)(*arrays)
    found = emulated(closed, arrays, schedule(simplified(closed), H100, **options))
    for got, want in zip(found, jax.jit(function)(*map(wide, arrays)), strict=True):
        assert error(got, want) < 1e-5


def test_constants_that_a_dtype_does_not_have():
    """They become infinite, as in XLA."""

    def function(x):
        limit = jnp.full(x.shape, 1e200, jnp.float64).astype(jnp.float32)
        return [jnp.where(x.sum(-1, keepdims=True) > 0, x, limit)]

    with jax.enable_x64(True):
        x = np.float32([[1, 2, 3, 4], [-1, -2, -3, -4]])
        (found,) = emulated(jax.make_jaxpr(function)(x), [x])
    np.testing.assert_array_equal(found, [x[0], np.full(4, np.inf)])


# What is computed of a mask and of numbers, both with 16 columns.
REVERSED = {
    "mask": lambda m, x: jnp.where(m[:, ::-1], x, 0),
    "both": lambda m, x: jnp.where(m, x, 0)[:, ::-1],
    "both ways": lambda m, x: jnp.where(m, x, 0) - jnp.where(m[:, ::-1], 0, x),
    "halves": lambda m, x: jnp.concatenate(
        [jnp.where(m[:, 8:], x[:, :8], 0)[:, ::-1], x[:, 8:]], -1
    )[:, ::-1],
    "behind a sum": lambda m, x: jnp.where(m, x - x.sum(-1, keepdims=True), 0)[:, ::-1],
}


@pytest.mark.parametrize("name", REVERSED)
def test_reversed_bits(name):
    """Eight booleans of a byte are read from back to front, as rows are."""
    random = np.random.default_rng(0)
    mask, x = random.random((5, 16)) < 0.5, random.normal(size=(5, 16)).astype("float32")
    bits = np.packbits(mask, -1, bitorder="little")
    closed = jax.make_jaxpr(lambda b, x: [REVERSED[name](unpack(b, 16), x)])(bits, x)
    (found,) = emulated(closed, [bits, x])
    np.testing.assert_allclose(found, REVERSED[name](mask, x), rtol=1e-5, atol=1e-5)


def number(x):
    return x.sum(-1, keepdims=True)


def halves(n):
    return n - n // 2, n // 2


# One column is a piece of a row, and the column and what has one number a row look alike.
ONE_COLUMN = {
    "first": lambda x: x[:, :1] + x,
    "last": lambda x: x[:, -1:] * x,
    "without its dimension": lambda x: x[:, 0][:, None] - x,
    "split off": lambda x: jnp.split(x, [1], -1)[0] + x,
    "split into columns": lambda x: x * sum(jnp.split(x, x.shape[-1], -1)),
    "padded behind": lambda x: jnp.pad(number(x), ((0, 0), (0, x.shape[-1] - 1))) + x,
    "padded on both sides": lambda x: jnp.pad(number(x), ((0, 0), halves(x.shape[-1] - 1))) + x,
    "joined with a piece": lambda x: jnp.concatenate([number(x), x[:, 1:]], -1),
    "joined with others": lambda x: jnp.concatenate([number(x)] * x.shape[-1], -1) + x,
    "two numbers": lambda x: jnp.concatenate([number(x), x.max(-1, keepdims=True)], -1),
}


@pytest.mark.parametrize("name", ONE_COLUMN)
@pytest.mark.parametrize("columns", [2, 8])
def test_pieces_of_one_column(name, columns):
    function = ONE_COLUMN[name]
    x = np.random.default_rng(0).normal(size=(3, columns)).astype(np.float32)
    result = jax.eval_shape(function, x)
    dy = np.cos(np.arange(result.size, dtype=np.float32)).reshape(result.shape)
    both = {
        "value": (lambda x: [function(x)], [x]),
        "gradient": (lambda x, dy: jax.vjp(function, x)[1](dy), [x, dy]),
    }
    for run, arrays in both.values():
        (found,) = emulated(jax.make_jaxpr(run)(*arrays), arrays)
        assert error(found, run(*map(wide, arrays))[0]) < 1e-6


@pytest.mark.parametrize("known", [False, True])
def test_differences_of_large_values(known):
    """The logarithm, small beside x and its maximum, is taken off their difference, wherever the maximum comes from."""

    def top(x):
        return jnp.max(x, -1, keepdims=True)

    def f(x, *maxima):
        shifted = x - (maxima[0] if maxima else top(x))
        return [shifted - jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))]

    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32) + np.float32(1e6)
    arrays = [x, top(x)] if known else [x]
    (got,) = emulated(jax.make_jaxpr(f)(*arrays), arrays)
    assert error(got, f(wide(x))[0]) < 1e-6


@pytest.mark.parametrize(
    "asked",
    [
        {"lanes": 96},
        {"source": "ring", "lanes": 96},
        {"source": "ring", "lanes": 96, "cluster": 2},
        {"source": "stream", "lanes": 96, "slots": 1},
    ],
)
def test_results_of_four_and_of_eight_bytes(asked):
    """Partial results of three warps, in the first and in the second set of places: an odd number of words."""

    def spreads(a, b):
        of_a, of_b = a.mean(1, keepdims=True), b.mean(1, keepdims=True)
        a, b = a - of_a, b - of_b
        return a / (a * a).sum(1, keepdims=True), b / (b * b).sum(1, keepdims=True)

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=(7, 2304)).astype(dtype) for dtype in ("float32", "float64")]
        closed = jax.make_jaxpr(spreads)(*arrays)
        plan = schedule(simplified(closed), H100, **asked)
        found = emulated(closed, arrays, plan, resident_blocks=plan.cluster)
        exact = spreads(*map(wide, map(jnp.asarray, arrays)))
    for got, wanted, dtype in zip(found, exact, ("float32", "float64"), strict=True):
        assert error(got, wanted) < TOLERANCE[dtype]
