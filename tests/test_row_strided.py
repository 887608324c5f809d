"""Row programs whose columns are not the last axis: which axis that is, their kernels on the CPU, their schedules."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_emulator
from suite import schedules_in_turn
from test_row_kernels import TOLERANCE, emulated, error, wide

import jaxnorm
from jaxnorm._rows import launcher, tune
from jaxnorm._rows.call import SPILLS, compiled_row_call, row_call, simplified
from jaxnorm._rows.equations import NotARowProgram, flatten
from jaxnorm._rows.plan import DEVICES
from jaxnorm._rows.rules import program_of
from jaxnorm._rows.schedule import schedule
from jaxnorm._rows.schedule_strided import apart, rows_of_a_vector
from jaxnorm._rows.view import Layout, View

H100 = DEVICES[90]
emulator = pytest.mark.skipif(not row_emulator.supported(), reason="needs Linux and g++")


def layer_norm(x, scale, bias):
    """Over channels, which are the second axis."""
    wide = x.astype(scale.dtype)
    y = wide - jnp.mean(wide, 1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, 1, keepdims=True) + 1e-6)
    shape = (-1,) + (1,) * (x.ndim - 2)
    return (y * scale.reshape(shape) + bias.reshape(shape)).astype(x.dtype)


def layer_norm_gradient(x, scale, bias, g):
    return jax.vjp(layer_norm, x, scale, bias)[1](g)


def adaptive_gradient(x, scale, temperature, g):
    """Sums over the rows of each image, and over all elements."""

    def f(x, scale, temperature):
        y = jax.nn.softmax(x * temperature, axis=1)
        return y * scale.reshape(*scale.shape, *(1 for _ in x.shape[2:]))

    return jax.vjp(f, x, scale, temperature)[1](g)


def soft_capped(x):
    return jax.nn.softmax(30 * jnp.tanh(x / 30), axis=1)


def cross_entropy(x, labels):
    p = jax.nn.log_softmax(x, axis=1)
    return -jnp.take_along_axis(p, labels[:, None], axis=1)[:, 0]


def cross_entropy_gradient(x, labels, g):
    return jax.vjp(lambda x: cross_entropy(x, labels), x)[1](g)[0]


def one_hot_gradient(x, lse, labels, g):
    """Nothing runs along an axis, but classes are compared with labels."""
    hit = jax.lax.broadcasted_iota(labels.dtype, x.shape, 1) == labels[:, None]
    return g[:, None] * (jnp.exp(x - lse[:, None]) - hit.astype(x.dtype))


def halves(x):
    """Cuts, joins and reverses columns."""
    a, b = jnp.split(x - jnp.max(x, 1, keepdims=True), 2, 1)
    return jnp.concatenate([a * jnp.exp(b), jnp.flip(b, 1)], 1)


def dropout_softmax(x, key):
    y = jax.nn.softmax(x, axis=1)
    return jnp.where(
        jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape), y, jnp.zeros((), x.dtype)
    )


def masked(x, where, bias):
    return jaxnorm.softmax(x, axis=1, where=where, bias=bias)


def positions(x):
    """What depends on places: of the column, and of rows in front of it and behind."""
    n = [jax.lax.broadcasted_iota(np.int32, x.shape, i).astype(x.dtype) for i in range(x.ndim)]
    return jnp.argmax(x + n[0] - n[-1] / 7, 1), x - jnp.max(x * n[1], 1, keepdims=True) + n[-1]


#: name -> (function, arguments of a shape with the reduced axis second)
PROGRAMS = {
    "softmax": (lambda x: jax.nn.softmax(x, axis=1), "x"),
    "log_softmax": (lambda x: jaxnorm.log_softmax(x, axis=1), "x"),
    "softmax gradient": (lambda x, g: jax.vjp(lambda x: jaxnorm.softmax(x, axis=1), x)[1](g)[0], "xx"),
    "layer_norm": (layer_norm, "xcc"),
    "layer_norm gradient": (layer_norm_gradient, "xccx"),
    "adaptive gradient": (adaptive_gradient, "xitx"),
    "soft_capped": (soft_capped, "x"),
    "cross_entropy": (cross_entropy, "xl"),
    "cross_entropy gradient": (cross_entropy_gradient, "xlr"),
    "one_hot gradient": (one_hot_gradient, "xrlr"),
    "jaxnorm's": (lambda x, i: jaxnorm.softmax_cross_entropy(x, i, axis=1), "xl"),
    "masked": (masked, "xmb"),
    "halves": (halves, "x"),
    "dropout": (dropout_softmax, "xk"),
    "positions": (positions, "x"),
    "statistics": (lambda x: (x.max(1), x.min(1, keepdims=True), jnp.any(x > 2, 1), x.argmin(1)), "x"),
    "per row": (lambda x, r: jax.nn.softmax(x * r[:, None], axis=1) + jnp.square(r)[:, None], "xr"),
}  # fmt: skip

SCHEDULES = {
    "chosen": {},
    "alone": {"side": 32, "lanes": 1},
    "within a warp": {"side": 8, "lanes": 4},
    "one warp": {"side": 32, "lanes": 2, "rows_at_once": 2},
    "several warps": {"side": 4, "lanes": 24},
    "cluster": {"side": 8, "lanes": 8, "cluster": 4},
    "cluster of warps": {"side": 16, "lanes": 2, "cluster": 2},
    "stream": {"source": "stream", "lanes": 16, "slots": 2},
    "a row a thread": {"side": 16, "lanes": 4, "rows_at_once": 1},
}


def aval(kind, shape, dtype):
    """Of an argument: "x" is whole, "c" has columns, "r" and "l" have rows, the others lack some dimensions."""
    rows, ones = (shape[0], *shape[2:]), tuple(1 for _ in shape[2:])
    shapes = {
        "x": shape, "c": shape[1:2], "r": rows, "l": rows, "b": (1, *shape[1:]), "m": (*shape[:2], *ones), "k": (2,),
        "i": shape[:2], "t": (),
    }  # fmt: skip
    dtypes = {
        "l": np.int32,
        "m": np.bool_,
        "k": np.uint32,
        "c": dtype if dtype.itemsize > 4 else np.float32,
    }
    return jax.ShapeDtypeStruct(shapes[kind], dtypes.get(kind, dtype))


def arguments(kinds, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)

    def draw(kind):
        of = aval(kind, shape, jnp.dtype(dtype))
        if kind in "lk":
            return rng.integers(0, shape[1], of.shape).astype(of.dtype)
        return (
            rng.random(of.shape) < 0.7
            if kind == "m"
            else rng.normal(0.5, 1.5, of.shape).astype(of.dtype)
        )

    return [jnp.asarray(draw(kind)) for kind in kinds]


def compare(function, args, device=H100, **asked):
    """The kernel's results against those in float64; returns the plan."""
    closed = jax.make_jaxpr(function)(*args)
    plan = schedule(simplified(closed), device, **asked)
    found = emulated(closed, args, plan, device)
    dtype = next(a.dtype for a in args if jnp.issubdtype(a.dtype, jnp.floating))
    for got, want in zip(found, jax.tree.leaves(function(*map(wide, args))), strict=True):
        if got.dtype.kind in "iub":
            assert np.array_equal(got, want)
        else:
            assert error(got, want) < TOLERANCE[dtype.name], plan
    return plan


# Sums over rows, places and several results are what schedules treat each in its own way.
EVERY_SCHEDULE = ("layer_norm gradient", "adaptive gradient", "positions", "statistics")


def turns():
    """A program has the chosen schedule and half of those that are asked for, its neighbours have the other half."""
    for number, name in enumerate(PROGRAMS):
        every = name in EVERY_SCHEDULE
        yield from (
            (name, s) for s in (SCHEDULES if every else schedules_in_turn(number, SCHEDULES))
        )


@emulator
@pytest.mark.parametrize(("name", "schedule_name"), [*turns()])
def test_kernels(name, schedule_name):
    function, kinds = PROGRAMS[name]
    dtype = "float32" if name in ("positions", "statistics") else "bfloat16"
    args = arguments(kinds, (3, 44, 8, 12), dtype)
    plan = compare(function, args, **SCHEDULES[schedule_name])
    assert plan.side


@emulator
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [(2, 21, 7, 7), (1, 150, 14, 14), (5, 3), (2, 1100, 24), (130, 6, 2), (2, 9, 1, 5, 4)]
)
def test_shapes(shape, dtype):
    """Neighbouring rows that are an odd number, and few; an outer dimension, and none."""
    if len(shape) == 2:
        plan = compare(lambda x: jax.nn.softmax(x, axis=0), arguments("x", shape, dtype))
    else:
        plan = compare(PROGRAMS["softmax"][0], arguments("x", shape, dtype))
        if dtype != "float16":  # numbers as wide as a bfloat16
            compare(cross_entropy, arguments("xl", shape, dtype))
    assert plan.side


@emulator
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    rng = np.random.default_rng(seed)
    names = [
        n for n in PROGRAMS if n not in ("positions", "statistics", "halves", "adaptive gradient")
    ]
    function, kinds = PROGRAMS[names[rng.integers(len(names))]]
    dims = rng.integers(1, 3)
    shape = (
        int(rng.integers(1, 5)),
        int(rng.integers(2, 90)),
        *(int(n) for n in rng.integers(2, 12, dims)),
    )
    asked = {} if seed % 2 else {
        "side": int(rng.choice([2, 4, 8, 16])), "rows_at_once": int(rng.choice([1, 2, 4])),
        "cluster": int(rng.choice([1, 2, 8])), "lanes": 32,
    }  # fmt: skip
    compare(
        function, arguments(kinds, shape, str(rng.choice(["bfloat16", "float32"])), seed), **asked
    )


@emulator
@pytest.mark.parametrize("architecture", [80, 120])
def test_other_devices(architecture):
    device = DEVICES[architecture]
    for shape in ((2, 1100, 8), (1, 9000, 4)):
        plan = compare(PROGRAMS["softmax"][0], arguments("x", shape, "bfloat16"), device)
        assert plan.cluster == 1 or device.clusters
    assert architecture != 80 or plan.source == "stream"


@emulator
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_special_values(value):
    x = np.asarray(arguments("x", (2, 20, 8), "float32")[0]).copy()
    x[0, 3, 1] = value
    x[1, :, 2] = value
    for asked in ({}, {"source": "stream", "lanes": 8, "slots": 1}, {"side": 8, "lanes": 8}):
        closed = jax.make_jaxpr(lambda x: jax.nn.softmax(x, axis=1))(x)
        (found,) = emulated(closed, [x], schedule(simplified(closed), H100, **asked))
        np.testing.assert_allclose(found, jax.nn.softmax(x, axis=1), rtol=1e-5, atol=1e-7)


# ---- which axis ----

X = np.ones((4, 8, 6, 16), np.float32)
AXES = {
    "last": (lambda x: jax.nn.softmax(x), 16, 1),
    "second": (lambda x: jax.nn.softmax(x, axis=1), 8, 96),
    "third": (lambda x: x - x.mean(2, keepdims=True), 6, 16),
    "first": (lambda x: x / x.max(0), 4, 768),
    "reshaped": (lambda x: jax.nn.softmax(x.reshape(4, 2, 4, 96), axis=2), 4, 96),
    "transposed": (lambda x: jax.nn.softmax(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), 8, 96),
    "behind it nothing": (
        lambda x: jnp.exp(x)[..., None, None] - x.max(3)[..., None, None, None],
        16,
        1,
    ),
    "labels": (lambda x: jnp.take_along_axis(x, jnp.zeros((4, 1, 6, 16), int), 1) * x, 8, 96),
    "one-hot labels": (
        lambda x: jnp.where(jax.lax.broadcasted_iota(np.int32, x.shape, 1) == 3, x, 2 * x),
        8,
        96,
    ),
    "cut": (lambda x: jnp.multiply(*jnp.split(x, 2, 1)), 4, 96),
    "a sum": (lambda x: x.sum(1), 8, 96),
}


@pytest.mark.parametrize("name", AXES)
def test_the_axis_of_columns(name):
    function, columns, neighbours = AXES[name]
    program = program_of(jax.make_jaxpr(function)(X), row_sums=False)
    assert (program.width, program.neighbours) == (columns, neighbours)
    jaxnorm.fuse(function)(X)


def test_gradients_of_what_rows_share_stay_sums_over_rows():
    g = jax.make_jaxpr(lambda x, s, g: jax.vjp(lambda x, s: jnp.tanh(x * s), x, s)[1](g))(
        X, X[0, 0, 0], X
    )
    assert program_of(g).neighbours == 1


REFUSED = {
    "two axes": (lambda x: jax.nn.softmax(x, axis=1) + jax.nn.softmax(x, axis=2), "is over rows"),
    "also the last": (lambda x: jax.nn.softmax(x, axis=1) + x.max(-1, keepdims=True), "is over rows"),
    "rows cut": (lambda x: jax.nn.softmax(x, axis=1)[..., 1:], "cuts or joins rows"),
    "mixed with its transpose": (
        lambda x: jax.nn.softmax(x, axis=1) + x.reshape(4, 96, 8).transpose(0, 2, 1).reshape(X.shape),
        "mixes dimensions|neighbours",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    function, text = REFUSED[name]
    with pytest.raises(NotARowProgram, match=text):
        jaxnorm.fuse(function)(X)


def test_a_transposed_operand_is_refused():
    with pytest.raises(
        NotARowProgram, match="must have the rows that are neighbours as its last axis"
    ):
        jaxnorm.fuse(lambda x, y: jax.nn.softmax(x, axis=0) + y.T)(X[0, 0], X[0, 0].T.copy())


def test_sums_over_some_of_the_rows_that_lie_side_by_side_are_refused():
    def gradient(x, bias, g):
        return jax.vjp(lambda x, bias: jax.nn.softmax(x + bias, axis=1), x, bias)[1](g)

    for bias in (X[0, 0], X[0]):
        with pytest.raises(NotARowProgram, match="over some of the rows that lie side by side"):
            program_of(jax.make_jaxpr(gradient)(X, bias, X))


def test_layouts():
    x = jax.ShapeDtypeStruct((2, 5, 4, 8), np.float32)
    view = View(
        flatten(
            jax.make_jaxpr(lambda x, b: jax.nn.softmax(x + b, axis=1))(x, x.update(shape=(5, 1, 1)))
        )
    )
    layouts = [view.layout(value) for value in view._program.inputs]
    assert layouts[0] == Layout(((0, 160), (1, 8), (2, 1)), 5, step=32)
    assert layouts[1] == Layout((), 5, step=1)


@pytest.mark.parametrize(
    ("strides", "step", "expected", "vector"),
    [
        (((0, 96), (1, 8), (2, 1)), 32, 1, 4),
        (((0, 96), (2, 1)), 8, 1, 4),  # alike along the dimension before the last
        (((0, 12), (1, 1)), 4, 0, 4),  # alike along the last dimension
        ((), 1, 0, 4),
        (((0, 99), (1, 8), (2, 1)), 33, 1, 1),
        (((2, 2),), 16, None, 1),
    ],
)
def test_neighbours_of_a_layout(strides, step, expected, vector):
    layout = Layout(strides, 3, step=step)
    assert apart(layout, (2, 4, 8), 4) == expected
    assert rows_of_a_vector(layout, (2, 4, 8), 4) == vector


def test_neighbours_over_several_dimensions():
    assert apart(Layout(((0, 12), (1, 2), (2, 1)), None), (2, 6, 2), 4) == 1
    assert apart(Layout(((0, 12), (2, 1)), None), (2, 6, 2), 4) is None
    assert apart(Layout(((0, 3), (1, 1)), None), (2, 3), 2) is None


# ---- schedules and compilers ----

SIZES = [
    (64, 1024, 1024),
    (256, 64, 56, 56),
    (16, 21, 512, 512),
    (64, 150, 128, 128),
    (16, 8192, 1024),
    (64, 512, 7, 7),
]


@functools.cache
def closed_of(name, shape, dtype="bfloat16"):
    function, kinds = PROGRAMS[name]
    return jax.make_jaxpr(function)(*(aval(kind, shape, jnp.dtype(dtype)) for kind in kinds))


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize(
    "name",
    ["softmax", "softmax gradient", "layer_norm", "layer_norm gradient", "cross_entropy gradient"],
)
def test_compiled(name, architecture):
    """Registers are about as many as the schedule expects."""
    if not jaxnorm.status().modules[1].available:
        pytest.skip("needs NVRTC")
    for shape in SIZES:
        if name == "layer_norm gradient" and shape[1] > 1024:
            continue  # too long for sums over rows
        call = compiled_row_call(closed_of(name, shape), DEVICES[architecture], launcher.compile)
        plan = call.plan
        assert plan.side
        assert plan.source == "registers" or (architecture == 80 and shape[1] == 8192)
        compiled = launcher.compile(call.source, architecture)
        assert compiled.spill_bytes["jaxnorm_row_program"] <= (SPILLS if plan.blocks > 1 else 512)
        chosen = schedule(simplified(closed_of(name, shape)), DEVICES[architecture])
        assert plan.blocks >= chosen.blocks // 2


def test_candidates():
    for shape in SIZES[:4]:
        program = simplified(closed_of("softmax", shape))
        found = tune.candidates(program, H100)
        assert len(found) > 10
        assert all(tune.can_run(program, H100, c.plan) for c in found)
        assert all(
            k in tune.FIELDS and v in tune.FIELDS[k] for c in found for k, v in c.asked.items()
        )


def test_explanation():
    text = str(jaxnorm.fuse(PROGRAMS["softmax"][0]).explain(X))
    assert re.search(r"\d+ threads side by side", text)


# ---- under transformations, on a CPU ----


@pytest.mark.parametrize(("in_axis", "out_axis"), [*itertools.product(range(4), range(4))])
def test_mapped(in_axis, out_axis):
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype(np.float32)
    plain, fused = PROGRAMS["softmax"][0], jaxnorm.fuse(PROGRAMS["softmax"][0])

    def run(f, x):
        mapped = jax.vmap(f, in_axis, out_axis)
        return mapped(x), jax.grad(lambda x: jnp.sum(jnp.sin(mapped(x))))(x)

    (got, got_bar), (want, want_bar) = jax.jit(lambda x: (run(fused, x), run(plain, x)))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(got_bar, want_bar, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["softmax", "layer_norm", "cross_entropy", "masked", "per row", "soft_capped"]
)
def test_derivatives(name):
    function, kinds = PROGRAMS[name]
    args = arguments(kinds, (2, 6, 4, 3), "float64")
    floats = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]
    fused = jaxnorm.fuse(function)
    np.testing.assert_allclose(fused(*args), function(*args), rtol=1e-12)

    def loss(f):
        return lambda *a: jnp.sum(jnp.sin(f(*a)))

    gradients = [jax.grad(loss(f), floats) for f in (fused, function)]
    got, want = jax.jit(lambda *a: [g(*a) for g in gradients])(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "spec",
    [("a",), (None, "a"), (None, None, "a"), (None, None, None, "a"), ("a", None, "b"), ("a", "b")],
)
@pytest.mark.parametrize(
    "name", ["softmax", "layer_norm", "cross_entropy", "positions", "cross_entropy gradient"]
)
def test_sharded(name, spec):
    """Rows may be cut anywhere; of a cut row, devices exchange numbers, or XLA gathers it."""
    function, kinds = PROGRAMS[name]
    args = arguments(kinds, (4, 8, 4, 8), "float32")
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    want = function(*args)
    got = jax.jit(jaxnorm.fuse(function))(jax.device_put(args[0], sharding), *args[1:])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_source_has_no_size_in_front_of_the_columns():
    """A batch of another size runs the same kernel."""
    few, many = (row_call(closed_of("softmax", (n, 64, 56, 56)), H100).source for n in (16, 256))
    assert few.split("row_program(")[1:] == many.split("row_program(")[1:] or "d0" in few
