"""What row programs can say: each operation of the language against jax.lax, run on the CPU, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import row_emulator
from jax import lax

import jaxnorm
from jaxnorm._rows.bits import unpack
from jaxnorm._rows.call import row_call, simplified
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.plan import DEVICES
from jaxnorm._rows.rules import RULES, STORED, program_of
from jaxnorm._rows.schedule import schedule

emulated = pytest.mark.skipif(not row_emulator.supported(), reason="needs g++ on Linux")


def kernel(function, *arrays, **asked):
    """Results of a function's kernel under a schedule."""
    arrays = [np.asarray(a) for a in arrays]
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*arrays)
    plan = schedule(simplified(closed), DEVICES[90], **asked)
    avals = [(a.shape, a.dtype) for a in closed.out_avals]
    return row_emulator.run(row_call(closed, DEVICES[90], plan), arrays, avals)


def same(got, want):
    """Equal numbers, NaN for NaN."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def ulps(a, b):
    """How many floats lie between two of them; NaN is next to NaN alone."""

    def order(x):
        bits = x.view(np.int32 if x.itemsize == 4 else np.int64)
        return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits).astype(np.float64)

    apart = np.abs(order(a) - order(b))
    return np.where(
        np.isnan(a) | np.isnan(b), np.where(np.isnan(a) & np.isnan(b), 0, np.inf), apart
    )


# ---- elementwise operations ----

FLOATS = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.0, 1e-40, -1e-42, 1.2e-38, 3.3e38, -3.3e38, np.inf,
    -np.inf, np.nan, 3.14159, 100.25, -100.75, 1e10, -1e-10, 88.0, -87.0, -103.0, 0.99999994, 1e-4, 7e-4, -0.3, 0.7,
]  # fmt: skip
UNARY = """abs acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erf_inv erfc exp exp2 expm1 floor is_finite
    lgamma log log1p logistic neg round round_to_even rsqrt sign sin sinh sqrt square tan tanh cube
    power_of_minus_2 power_of_11 clamp reduce_precision""".split()
BINARY = "add atan2 div max min mul nextafter pow rem sub eq ne lt le gt ge".split()
INTEGERS = """and or xor shift_left shift_right_logical shift_right_arithmetic add sub mul div rem max min eq ne lt le
    gt ge""".split()
INTEGERS_UNARY = "not population_count clz abs neg sign square".split()

OTHER = {
    "round_to_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "cube": lambda x: lax.integer_pow(x, 3),
    "power_of_minus_2": lambda x: lax.integer_pow(x, -2),
    "power_of_11": lambda x: lax.integer_pow(x, 11),
    "clamp": lambda x: lax.clamp(np.asarray(-1, x.dtype), x, np.asarray(2, x.dtype)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8 if x.dtype == np.float32 else 11, 12),
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
}


def operation(name):
    return OTHER.get(name) or getattr(lax, name)


def check_floats(names, *arrays):
    functions = [operation(n) for n in names]

    def run(*args):
        return [f(*args) for f in functions]

    found = kernel(run, *arrays)
    as_xla = jax.jit(run)(*arrays)
    exact = jax.jit(run)(*(np.asarray(a, np.float64) for a in arrays))
    for name, got, own, wide in zip(names, found, as_xla, exact, strict=True):
        own, wide = np.asarray(own), np.asarray(wide)
        if got.dtype.kind == "b":
            assert ((got == own) | (got == wide)).all(), name  # XLA takes subnormals for 0
            continue
        with np.errstate(all="ignore"):
            apart = np.minimum(ulps(got, own), ulps(got, wide.astype(got.dtype)))
        limit = 2 if got.dtype == np.float32 else 10**7 if name == "erf_inv" else 16
        tiny = np.abs(got) < 1.2e-38  # which XLA may have flushed to 0
        if got.dtype == np.float64:  # where a function has a zero, a library of C has fewer digits
            with np.errstate(invalid="ignore"):
                apart = np.where(np.abs(got - wide) < 1e-14, 0, apart)
        wrong = (apart > limit) & ~(tiny & (np.abs(own) < 1.2e-38))
        where = [a[wrong][:4] for a in np.broadcast_arrays(*arrays)]
        assert not wrong.any(), f"{name} of {where}: {got[wrong][:4]}, by XLA {own[wrong][:4]}"


@emulated
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_one_float(dtype):
    check_floats(UNARY, np.asarray([FLOATS], dtype))


@emulated
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_two_floats(dtype):
    a, b = np.meshgrid(np.asarray(FLOATS, dtype), np.asarray(FLOATS, dtype))
    names = [n for n in BINARY if n != "nextafter" or dtype == "float32"]
    check_floats(names, a, b)


@emulated
@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_functions_of_integers(dtype):
    info = np.iinfo(dtype)
    values = np.asarray(
        [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7, 8, 31, 100], dtype
    )
    signed = np.asarray([-1, -2, -7, -100] if info.min else [5, 6, 9, 200]).astype(dtype)
    values = np.concatenate([values, signed])
    a, b = np.meshgrid(values, values)

    def run(a, b):
        results = [operation(n)(a, b) for n in INTEGERS]
        return results + [operation(n)(a) for n in INTEGERS_UNARY if info.min or n != "abs"]

    same(kernel(run, a, b), jax.jit(run)(a, b))


@emulated
def test_functions_of_booleans():
    a, b = np.meshgrid([True, False] * 4, [True, False] * 4)
    names = "and or xor eq ne lt le gt ge max min".split()

    def run(a, b):
        return [operation(n)(a, b) for n in names] + [
            ~a,
            jnp.where(a, b, ~b),
            lax.select_n(a, b, a),
        ]

    same(kernel(run, a, b), run(a, b))


@emulated
def test_select_of_three():
    which = np.asarray([[0, 1, 2, 0, 1, 2, 1, 0]], np.int32)
    cases = [np.full((1, 8), float(i), np.float32) for i in range(3)]
    same(kernel(lax.select_n, which, *cases), [lax.select_n(which, *cases)])


def test_each_elementwise_operation_is_tested():
    tested = {*UNARY, *BINARY, *INTEGERS, *INTEGERS_UNARY, "integer_pow", "select_n"}
    elsewhere = {
        "add_any", "convert_element_type", "bitcast_convert_type", "broadcast_in_dim", "reshape", "squeeze",
        "expand_dims", "transpose", "copy", "copy_p", "sharding_constraint", "pvary", "pcast", "name", "reshard",
        "mesh_cast", "stop_gradient", "jaxnorm_pack_bits", "jaxnorm_unpack_bits", "optimization_barrier", "slice",
        "split", "concatenate", "pad", "rev", "iota", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod",
        "reduce_or", "reduce_and", "argmax", "argmin", "gather", "scatter-add", "random_wrap", "random_bits",
        "one_minus_square",
    }  # fmt: skip
    assert RULES.keys() - elsewhere <= tested


# ---- conversions ----


@emulated
@pytest.mark.parametrize("source", sorted(STORED, key=str), ids=str)
def test_conversions(source):
    if source.kind in "iu":
        info = np.iinfo(source)
        values = np.asarray([info.min, info.max, 0, 1, 2, 3, 77, 100], source)
    elif source.kind == "b":
        values = np.asarray([True, False] * 4)
    else:
        values = np.asarray([0.0, -0.0, 1.5, -2.5, 100.0, np.nan, -0.4, 440.0]).astype(source)
        if source.itemsize > 1:
            more = [
                np.inf,
                -np.inf,
                464.0,
                465.0,
                1e-3,
                57344.0,
                61440.0,
                61439.0,
                3e9,
                -3e9,
                1e20,
                -1e20,
                2.0**-9,
                2.0**-10,
                65519.0,
                2.0**-17,
            ]
            with np.errstate(over="ignore"):
                values = np.concatenate([values, np.asarray(more).astype(source)])
    values = values[None]
    targets = sorted(STORED, key=str)

    def run(x):
        return [x.astype(t) for t in targets]

    found, wanted = kernel(run, values), jax.jit(run)(values)
    for target, got, want in zip(targets, found, wanted, strict=True):
        if source.kind == "f" or (source.itemsize < 4 and source.kind == "V"):
            x = values.astype(np.float64)
            if target.kind in "iu":  # out of range, platforms differ
                info = np.iinfo(target)
                inside = (x > float(info.min) - 1) & (x < float(info.max))
                got, want = got[inside], np.asarray(want)[inside]
        np.testing.assert_array_equal(
            got.astype(np.float64), np.asarray(want).astype(np.float64), err_msg=str(target)
        )


@emulated
def test_reinterpreted_bits():
    x = np.asarray([FLOATS], np.float32)

    def run(x):
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        signed = lax.bitcast_convert_type(x, jnp.int32)
        return bits, signed, lax.bitcast_convert_type(bits ^ np.uint32(1 << 31), jnp.float32)

    for got, want in zip(kernel(run, x), run(x), strict=True):
        assert got.tobytes() == np.asarray(want).tobytes()
    x = x.astype(np.float64)
    (bits,) = kernel(lambda x: lax.bitcast_convert_type(x, jnp.uint64), x)
    assert bits.tobytes() == x.tobytes()


# ---- random bits ----


@emulated
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_random_bits(dtype):
    def run(words, x):
        key = jax.random.wrap_key_data(words)
        return jax.random.bits(key, (3, 5, 32), dtype), x

    words = np.asarray([123456789, 987654321], np.uint32)
    x = np.ones((3, 5, 32), np.float32)
    for asked in ({}, {"source": "registers", "vector": 2, "lanes": 4}):
        same(kernel(run, words, x, **asked), run(words, x))


@emulated
def test_random_bits_of_a_key_for_each_row():
    def run(words, x):
        keys = jax.random.wrap_key_data(words)
        draw = jax.vmap(lambda k: jax.random.uniform(k, (5, 32), jnp.float32))
        return draw(keys), jax.vmap(lambda k: jax.random.bernoulli(k, 0.3, (5, 32)))(keys), x

    words = np.arange(6, dtype=np.uint32).reshape(3, 2) * 77777
    x = np.ones((3, 5, 32), np.float32)
    same(kernel(run, words, x), run(words, x))


@emulated
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "limit", [0.0, 2**-23, 3e-9, 0.3, 0.9, 1 - 2**-23, 1.0, 2.0, np.nan, np.inf]
)
def test_comparisons_of_uniform_numbers(limit, dtype):
    """A number is compared as the bits that it is made of."""

    def run(words, x):
        numbers = jax.random.uniform(jax.random.wrap_key_data(words), x.shape, dtype)
        shifted = jnp.minimum(numbers + 1e-3, 0.8)
        return [
            *(numbers < limit, numbers <= limit, numbers > limit, numbers >= limit),
            *(limit < numbers, limit >= numbers, shifted < limit, limit - numbers > 0.1),
            x,
        ]

    words, x = np.asarray([5, 6], np.uint32), np.ones((4, 2048), np.float32)
    same(kernel(run, words, x), run(words, x))


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 7549747 << 9), ("float64", 4053239664633447 << 12)]
)
def test_dropout_draws_by_one_comparison(dtype, limit):
    """A limit is the first number of all digits that is not below 0.9: 7549747 / 2^23, and 4053239664633447 / 2^52."""

    def dropout(key, x):
        return jnp.where(jax.random.bernoulli(key, np.dtype(dtype).type(0.9), x.shape), x / 0.9, 0)

    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    source = jaxnorm.fuse(dropout).explain(jax.eval_shape(lambda: jax.random.key(0)), x).source
    assert f" < {limit}u" in source
    assert "bitcast" not in source


@emulated
def test_random_normal_and_dropout_in_parts():
    def run(words, x):
        key = jax.random.wrap_key_data(words)
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        a, b = jnp.split(jnp.where(keep, x / 0.9, 0), 2, -1)
        return jnp.concatenate([b, a], -1)

    words, x = np.asarray([1, 2], np.uint32), np.ones((4, 64), np.float32)
    same(kernel(run, words, x), [run(words, x)])


# ---- labels ----


@emulated
@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_labels(mode):
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    labels = np.asarray(
        [0, 7, 3, 5, 2, 1] if mode == "promise_in_bounds" else [0, 7, 8, -1, -8, -9], np.int32
    )

    def run(x, labels):
        both = jnp.concatenate([x, x + 100], -1)
        index = labels[:, None]
        return [
            jnp.take_along_axis(v, index, -1, mode=mode)[:, 0]
            for v in (
                x,
                jnp.exp(x / 50) - x,
                both,
                jax.nn.log_softmax(x),
                x[:, ::-1],
                x - 2 * x[:, ::-1],
            )
        ]

    found, wanted = kernel(run, x, labels), run(x, labels)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6)


@emulated
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_labels_of_reversed_rows(dtype):
    x = np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32)
    labels = np.asarray([0, 255, 31, 2, 99]).astype(dtype)

    def run(x, labels):
        return jnp.take_along_axis(jnp.flip(x, -1), labels[:, None], -1)[:, 0], jnp.sum(x, -1)

    same(kernel(run, x, labels)[:1], run(x, labels)[:1])


@emulated
@pytest.mark.parametrize("step", [1, -1])
def test_gradients_of_labels(step):
    x = np.random.default_rng(0).normal(size=(5, 33)).astype(np.float32)
    labels = np.asarray([0, 32, 33, -1, 5], np.int32)
    g = np.arange(5, dtype=np.float32)

    def run(x, labels, g):
        f = lambda x: jnp.take_along_axis(x[:, ::step] * 2, labels[:, None], -1)[:, 0]  # noqa: E731
        return jax.vjp(f, x)[1](g)

    same(kernel(run, x, labels, g), run(x, labels, g))


@pytest.mark.parametrize("shape", [(1, 4, 8), (2, 1, 8), (1, 8), (1, 1, 8), (8,)])
def test_labels_of_one_row(shape):
    def f(x, labels):
        return jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)[..., 0]

    x, labels = jnp.ones(shape), jnp.zeros(shape[:-1], jnp.int32)
    assert jaxnorm.fuse(f)(x, labels).shape == shape[:-1]


# ---- semantics ----


@emulated
@pytest.mark.parametrize(
    "asked", [{}, {"source": "stream", "lanes": 64}, {"lanes": 32, "source": "ring"}]
)
def test_rows_of_minus_infinity_and_masked_nan(asked):
    x = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    x[0] = -np.inf
    x[1, 5] = np.nan
    x[2, 7] = np.inf
    mask = np.isfinite(x)

    def run(x, mask):
        finite = jnp.where(mask, x, 0)
        return [
            jax.nn.softmax(x), jax.nn.logsumexp(x, -1), jnp.max(x, -1), jnp.sum(finite, -1),
            jnp.where(mask, jnp.exp(finite), 0), jnp.argmax(x, -1), jnp.argmin(x, -1), jnp.any(x > 3, -1),
        ]  # fmt: skip

    for got, want in zip(kernel(run, x, mask, **asked), jax.jit(run)(x, mask), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@emulated
@pytest.mark.parametrize("columns", [1024, 513])
def test_large_offsets(columns):
    x = (1e4 + np.random.default_rng(0).normal(size=(4, columns))).astype(np.float32)
    g = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    def norm(x):
        y = x - jnp.mean(x, -1, keepdims=True)
        return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)

    for run in (lambda x, g: norm(x), lambda x, g: jax.vjp(norm, x)[1](g)[0]):
        exact = np.asarray(run(x.astype(np.float64), g.astype(np.float64)))
        plain = np.abs(np.asarray(jax.jit(run)(x, g)) - exact).max()
        assert np.abs(kernel(run, x, g)[0] - exact).max() <= 2 * plain + 1e-6


@emulated
def test_factors_are_taken_out_where_that_is_exact():
    """Not the literal that rounds, nor the one that keeps a product finite."""
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    large, small = x * np.float32(1e25), x * np.float32(1e-30)

    def run(x, large, small):
        rounded = (x * 100 + 12582912.0) - 12582912.0
        finite = (1e-30 * large) * (1e-20 * large)
        return (
            rounded,
            finite,
            x * 3.0 + x * x * 3.0,
            (x - 1.0) + 1.0,
            jnp.sum(rounded * finite, -1),
            1e30 * (1e20 * small),
        )

    for got, want in zip(kernel(run, x, large, small), run(x, large, small), strict=True):
        np.testing.assert_allclose(got, want, 3e-7 * 64**0.5, 3e-7)


@emulated
def test_argmax_takes_the_first_of_ties():
    x = np.asarray([[1, 3, 3, 2], [np.nan, 1, np.nan, 2], [5, 5, 5, 5], [-np.inf] * 4], np.float32)
    x = np.tile(x, (1, 16))

    def run(x):
        halves = jnp.concatenate([x[:, 32:], x[:, :32]], -1)
        return (
            jnp.argmax(x, -1),
            jnp.argmin(x, -1),
            jnp.argmax(halves, -1),
            lax.argmax(x, 1, jnp.uint8),
        )

    for asked in ({}, {"lanes": 32, "source": "registers"}):
        same(kernel(run, x, **asked), run(x))


@emulated
def test_reversed_rows():
    x = np.arange(99, dtype=np.float32).reshape(3, 33)

    def run(x):
        return jnp.flip(x, -1), jnp.flip(jnp.sin(x), -1) + x, jnp.flip(x[:, :11], -1)

    found = kernel(run, x)
    for got, want in zip(found, run(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@emulated
def test_double_precision():
    x = np.random.default_rng(0).normal(size=(3, 65))
    for f in (jax.nn.softmax, jax.nn.gelu, lambda x: jnp.mean(x * x, -1), lambda x: x * np.pi):
        np.testing.assert_allclose(kernel(f, x)[0], f(x), rtol=1e-13)


# ---- views ----


def views():
    def rotary(x, cos, sin):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = (2, 3, 4, 16)
    return {
        "transposed rows": (lambda x, y: jnp.transpose(x, (0, 2, 1, 3)) * y, [x, (2, 4, 3, 16)]),
        "a row of each group": (lambda x, s: x * s[:, None, None], [x, (2, 16)]),
        "a mask of each group": (lambda x, m: jax.nn.softmax(jnp.where(m > 0, x, -1e9)), [x, (2, 1, 1, 16)]),
        "rotary tables": (rotary, [x, (3, 1, 8), (3, 1, 8)]),
        "packed columns": (lambda x, y: jax.nn.silu(x[..., :16]) * x[..., 16:] + y, [(6, 32), (6, 16)]),
        "merged rows": (lambda x, y: x.reshape(24, 16) + y, [x, (24, 16)]),
        "split rows": (lambda x, s: x.reshape(2, 3, 4, 16) * s, [(6, 64), (4, 1)]),
        "split columns": (lambda x, s: jax.nn.softmax(x.reshape(6, 4, 16)) * s, [(6, 64), (16,)]),
        "numbers of rows": (lambda x, s: x * s[..., None], [x, (2, 3, 4)]),
        "a number": (lambda x, s: x * s, [x, ()]),
        "padded columns": (lambda x, y: jnp.pad(x, [(0, 0), (8, 16)]) * y, [(6, 8), (6, 32)]),
        "two widths": (lambda x, y: (jax.nn.softmax(x), y - jnp.mean(y, -1, keepdims=True)), [(6, 64), (6, 16)]),
    }  # fmt: skip


@emulated
@pytest.mark.parametrize("name", views())
def test_views_and_their_gradients(name):
    function, shapes = views()[name]
    generator = np.random.default_rng(0)
    args = [generator.normal(size=s).astype(np.float32) for s in shapes]
    results = jax.eval_shape(function, *args)
    gs = jax.tree.map(lambda r: generator.normal(size=r.shape).astype(np.float32), results)
    n = len(args)

    def gradients(*args):
        return jax.vjp(function, *args[:n])[1](jax.tree.unflatten(jax.tree.structure(gs), args[n:]))

    for run, given in ((function, args), (gradients, [*args, *jax.tree.leaves(gs)])):
        wide = [np.asarray(a, np.float64) for a in given]
        found, again = kernel(run, *given), kernel(run, *given)
        for got, twice, want in zip(found, again, jax.tree.leaves(run(*wide)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            assert got.tobytes() == twice.tobytes()


# ---- jaxnorm's own operations ----

OWN = {
    "softmax": lambda x, s: jaxnorm.softmax(x) * s,
    "log_softmax": lambda x, s: jaxnorm.log_softmax(x) * s,
    "layer_norm": lambda x, s: jaxnorm.layer_norm(x, s, s),
    "rms_norm": lambda x, s: jaxnorm.rms_norm(x, s),
    "relu": lambda x, s: jaxnorm.relu(x) * s,
}


@pytest.mark.parametrize("name", OWN)
def test_jaxnorm_in_a_fused_function(name):
    x = jax.random.normal(jax.random.key(0), (4, 32), jnp.float32)
    s = jnp.linspace(0.5, 1, 32, dtype=jnp.float32)
    fused = jaxnorm.fuse(OWN[name])
    np.testing.assert_allclose(fused(x, s), OWN[name](x, s), rtol=1e-5, atol=1e-6)
    loss = lambda f: lambda x, s: jnp.sum(jnp.sin(f(x, s)))  # noqa: E731
    for got, want in zip(
        *(jax.grad(loss(f), (0, 1))(x, s) for f in (fused, OWN[name])), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@emulated
@pytest.mark.parametrize("name", OWN)
def test_kernels_of_jaxnorm_in_a_fused_function(name):
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    s = np.linspace(0.5, 1, 64, dtype=np.float32)
    gradient = lambda x, s, g: jax.vjp(OWN[name], x, s)[1](g)  # noqa: E731
    for run, args in ((OWN[name], (x, s)), (gradient, (x, s, x))):
        for got, want in zip(kernel(run, *args), jax.tree.leaves(run(*args)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# ---- what is refused, and in which words ----

X = np.ones((8, 16), np.float32)
OVER_ROWS = "is over rows; rows share nothing but their parameters' gradients"
REFUSED = {
    "sum over rows": (lambda x: (x.sum(0), x.sum(1)), [X], "`reduce_sum` at .*" + OVER_ROWS),
    "mean over rows": (lambda x: jax.nn.softmax(x) - x.mean(0), [X], "`reduce_sum` at .*" + OVER_ROWS),
    "quotient by a sum over rows": (lambda x: (x - x.mean(1, keepdims=True)) / x.sum(0), [X], OVER_ROWS),
    "sum of all": (lambda x: x * x.sum(), [X], OVER_ROWS),
    "maximum over rows": (lambda x: (x.max(0), x.max(1)), [X], "`reduce_max` at .*" + OVER_ROWS),
    "argmax over rows": (lambda x: (x.argmax(0), x.argmax(1)), [X], OVER_ROWS),
    "two axes": (lambda x: jax.nn.softmax(x, (0, 1)), [X], "`reduce_max` at .*" + OVER_ROWS),
    "matrix product": (lambda x, w: x @ w, [X, X.T.copy()], "`dot_general` at .* is a matrix product"),
    "loop": (lambda x: lax.fori_loop(0, 3, lambda _, x: x * 2, x), [X], "`scan` at .* is control flow"),
    "sort": (jnp.sort, [X], "runs along the row step by step"),
    "lookup": (lambda x, i: x[i], [X, np.asarray([1, 2])], "looks up rows by their numbers"),
    "several labels": (lambda x, i: jnp.take_along_axis(x, i, -1), [X, np.zeros((8, 3), int)], "one element of each"),
    "rows cut": (lambda x: x[1:] * 2, [X], "cuts or joins rows"),
    "rows joined": (lambda x: jax.nn.softmax(jnp.concatenate([x, x])), [X], "rows; only the last axis"),
    "steps": (lambda x: x[:, ::2], [X], "every second element"),
    "transposed": (lambda x: x.T * 2, [X], "`mul` at .* must have the row's columns as its last axis"),
    "another shape": (lambda x, y: (x * 2, jnp.sin(y)), [X, np.ones((3, 5))], "argument 'y' of shape \\(3, 5\\)"),
    "complex numbers": (lambda x: lax.complex(x, x).real, [X], "`complex` at"),
    "many pieces": (lambda x: x[:, 1:] - x[:, :-1], [np.ones((2, 4096))], "cuts a row into 4096 pieces"),
    "a lone transposed sum": (lambda x, s: s.sum(-1) + x, [X, X.T.copy()], "argument 's' of shape \\(16, 8\\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    function, args, text = REFUSED[name]
    with pytest.raises(NotARowProgram, match=text) as error:
        jaxnorm.fuse(function)(*args)
    assert str(error.value).startswith("fuse: ")
    if " at " in str(error.value):
        assert "test_row_language.py:" in str(error.value)


@emulated
@pytest.mark.parametrize("lanes", [1, 16, 32, 64])
def test_sums_over_rows_that_are_not_held(lanes):
    """A block has one row at a time, whatever is asked of the schedule."""
    x, g = np.random.default_rng(0).normal(size=(2, 5, 256)).astype(np.float32)

    def run(x, bias, g):
        return jax.vjp(lambda x, bias: jnp.tanh(x + bias), x, bias)[1](g)

    for got, want in zip(
        kernel(run, x, x[0], g, source="stream", lanes=lanes, slots=1), run(x, x[0], g), strict=True
    ):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_gradients_may_be_sums_over_rows():
    gradient = jax.make_jaxpr(jax.grad(lambda s, x: jnp.sum(x * s)))(X[0], X)
    assert program_of(gradient).outputs[0].after
    assert program_of(gradient, row_sums=False).neighbours == 16


def test_a_sum_over_rows_is_not_read_by_rows():
    mixed = jax.make_jaxpr(lambda x: x / x.sum(0) - x.max(1, keepdims=True))(X)
    with pytest.raises(NotARowProgram, match="mixes a sum over rows"):
        program_of(mixed)


@pytest.mark.parametrize("shape", [(0, 16), (8, 0), (0, 0), (0,)])
def test_empty_arrays(shape):
    x = np.ones(shape, np.float32)
    f = jaxnorm.fuse(lambda x: jnp.exp(x) / jnp.sum(x, -1, keepdims=True))
    assert f(x).shape == shape
    closed = jax.make_jaxpr(lambda x: x * 2 + jnp.sum(x, -1, keepdims=True))(x)
    if shape[-1]:
        program_of(closed)
    else:
        with pytest.raises(NotARowProgram, match="has no columns"):
            program_of(closed)


def test_unrelated_arrays_of_equal_shapes():
    for shape in ((8, 16), (8, 1), (8,), (16,)):
        results = jaxnorm.fuse(lambda a, b: (jnp.sin(a), jnp.sin(b)))(X, np.ones(shape, np.float32))
        assert [r.shape for r in results] == [(8, 16), shape]


def test_programs_are_not_kept_alive():
    import gc
    import weakref

    closed = jax.make_jaxpr(lambda x: x * 2)(X)
    simplified(closed)
    reference = weakref.ref(closed)
    del closed
    gc.collect()
    assert reference() is None


@emulated
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_bits_that_rows_share(dtype):
    """Bits without one of the row dimensions, which are no operand of all rows, are a byte a slot too."""
    keep = np.random.default_rng(0).random((3, 16)) < 0.5
    x = np.ones((5, 3, 16), dtype)
    (found,) = kernel(
        lambda x, packed: jnp.where(unpack(packed, 16), x, jnp.zeros((), x.dtype)),
        x,
        np.packbits(keep, -1, bitorder="little"),
    )
    np.testing.assert_array_equal(found.astype(np.float64), np.broadcast_to(keep, x.shape))
