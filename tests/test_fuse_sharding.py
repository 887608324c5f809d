"""Fused functions over several devices: values and gradients of one device, and no collective but what a sum needs.

CPUs have no kernel for row programs, so XLA partitions the jaxpr there. These tests ask for what happens on GPUs, where
each device calls a kernel on its rows; they do so on eight CPU devices and, on a machine that has them, on two GPUs.
"""

import functools
import itertools
import math

import hlo
import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
import row_emulator
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import AUTO, CPUS, EXPLICIT, blocks, names_of, over, platform_of, put, scope

import jaxnorm
from bench import row_programs
from jaxnorm._primitive import define
from jaxnorm._primitive.programs import run_program
from jaxnorm._rows import local, primitive
from jaxnorm._rows.call import row_call
from jaxnorm._rows.equations import flatten
from jaxnorm._rows.plan import DEVICES
from jaxnorm._sharding import DEVICES as AXIS
from jaxnorm._sharding import Blocks, Tiled

# Those whose columns are the last axis; the others are in test_row_strided.py.
MAIN = [
    case
    for case in row_programs.select(tag=row_programs.MAIN)
    if case.family not in row_programs.SIDE_BY_SIDE
]
CASES = {case.name: case for case in MAIN}
# Operations that move columns want whole rows.
MOVING = {"swiglu", "qk_norm_rotary"}
KEY = jax.random.key(7)


@pytest.fixture(autouse=True)
def _partitioned(monkeypatch):
    monkeypatch.setattr(define, "partition_everywhere", True)


def rand(shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.dtype(dtype))


def run(f, *args):
    """(text, results) of a program that nothing traced before: whether it is partitioned is no part of JAX's keys."""
    return hlo.run(lambda *args: f(*args), *args)


def alone(f, *args):
    """The result on one device."""
    args = jax.tree.map(lambda a: jax.device_put(a, CPUS[0]), args)
    return jax.jit(lambda *args: f(*args))(*args)


def assert_close(got, want, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, _size(b)))


def _size(array):
    finite = np.abs(array[np.isfinite(array)])
    return finite.max() if finite.size else 0


def assert_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def kinds(program) -> list[str]:
    return [c.kind for c in hlo.collectives(program)]


def both(f, differentiated=1):
    """Results and gradients of the first arguments."""

    def results(*args):
        moving, fixed = args[:differentiated], args[differentiated:]

        def loss(*moving):
            found = f(*moving, *fixed)
            floats = [r for r in jax.tree.leaves(found) if jnp.issubdtype(r.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.sin(r)) for r in floats), found

        gradients, found = jax.grad(loss, range(differentiated), has_aux=True)(*moving)
        return found, gradients

    return results


# ---- the benchmark's cases ----


def is_key(array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def entries(spec, full, shape):
    """How an argument is cut that broadcasts to rows of this shape."""
    spec = tuple(spec)
    if shape and shape[-1] == full[-1] and len(shape) < len(full):  # parameters, of images too
        return [*spec[: len(shape) - 1], spec[-1]]
    if len(shape) == 1:  # labels
        return list(spec[:1])
    spec, full = spec[len(spec) - len(shape) :], full[len(full) - len(shape) :]
    return [e if n == m else None for e, n, m in zip(spec, shape, full, strict=True)]


class Placed:
    """Arguments and cotangents of a case on a mesh, with padding in front of which devices divide no size.

    Attributes:
      arrays: of the case, on one device.
      placed: the same, padded, over the mesh.
      shared: whether an argument that is differentiated is one for several blocks of rows.
    """

    def __init__(self, case, sizes, spec, mesh, dtype="float32"):
        args = case.inputs(sizes, dtype)
        self.arrays = (args, case.cotangents(sizes, dtype))
        full = max((a.shape for a in args), key=len)
        self.shared = False
        for a in args[: case.differentiated]:
            names = [n for e in entries(spec, full, a.shape) for n in names_of(e)]
            rows = [n for e in tuple(spec)[:-1] for n in names_of(e)]
            self.shared = self.shared or not set(rows) <= set(names)
        self.placed = jax.tree.map(functools.partial(self._place, spec, full, mesh), self.arrays)

    @staticmethod
    def _place(spec, full, mesh, array):
        if is_key(array):
            return put(array, P(), mesh)
        cut = entries(spec, full, array.shape)
        padding = [(0, -n % blocks(mesh, e)) for n, e in zip(array.shape, cut, strict=True)]
        if any(p for _, p in padding):
            garbage = np.nan if jnp.issubdtype(array.dtype, jnp.floating) else 1 << 20
            array = np.pad(np.asarray(array), padding, constant_values=garbage)
        return put(array, P(*cut), mesh)

    def of_placed(self, f):
        """The function of arrays without the padding."""

        def cut(array, like):
            if is_key(array) or array.shape == like.shape:
                return array
            return array[tuple(slice(n) for n in like.shape)]

        likes = jax.tree.map(
            lambda a: a if is_key(a) else jax.ShapeDtypeStruct(a.shape, a.dtype), self.arrays
        )
        return lambda *args: f(*jax.tree.map(cut, args, likes))


def everything(case):
    fused = jaxnorm.fuse(case.function)
    if case.differentiated:
        return case.result_and_gradients(fused)
    return lambda args, cotangents: fused(*args)


@functools.cache
def case_alone(name, sizes, dtype="float32"):
    case = CASES[name]
    return alone(everything(case), case.inputs(sizes, dtype), case.cotangents(sizes, dtype))


def specs_of(case):
    rank = len(case.small)
    if rank == 2:
        return [P("m", None), P(("d", "m"), None), P(None, "m"), P("m", "d"), P(None, ("d", "m"))]
    if rank == 3:
        return [
            P(None, "d", None),
            P(None, ("d", "m"), None),
            P(None, "m", "d"),
            P(None, None, "d"),
        ]
    return [P("m", "d", None, None), P(None, ("d", "m"), None, None), P("m", None, None, "d")]


def sizes_of(case):
    """Those of `test_case`, which a mesh divides where it can."""
    lead = {3: (8, 8)}.get(len(case.small), case.small[:-1])
    return ((8,) if lead == (6,) else lead) + case.small[-1:]


def is_uneven(case, spec) -> bool:
    return any(n % blocks(AUTO, e) for n, e in zip(sizes_of(case), spec, strict=True))


def placements():
    """Each case with each of its specs. Auto and Explicit axes take turns where both can be."""
    for number, case in enumerate(MAIN):
        for turn, spec in enumerate(specs_of(case)):
            # JAX refuses these for Explicit axes, and places no arrays that devices do not divide.
            refused = spec[-1] and case.name in (*MOVING, "log_probability_entropy")
            auto = is_uneven(case, spec) or refused or (number + turn) % 2
            kind = "auto" if auto else "explicit"
            yield pytest.param(case.name, spec, kind, id=f"{case.name} {spec}-{kind}")


@pytest.mark.parametrize(("name", "spec", "kind"), [*placements()])
def test_case(name, spec, kind):
    """Rows: no collective but one all-reduce of all gradients that rows share. Columns: numbers per row only."""
    case, mesh = CASES[name], EXPLICIT if kind == "explicit" else AUTO
    sizes, uneven = sizes_of(case), is_uneven(case, spec)
    with scope(mesh):
        given = Placed(case, sizes, spec, mesh)
        program, got = run(given.of_placed(everything(case)), *given.placed)
    assert_close(got, case_alone(name, sizes))
    found = hlo.collectives(program)
    if uneven:
        return
    if spec[-1] is None:
        assert [c.kind for c in found] == ["all-reduce"] * given.shared
    elif name not in MOVING:
        rows = math.prod(n // blocks(mesh, e) for n, e in zip(sizes[:-1], spec[:-1], strict=True))
        columns = sizes[-1] // blocks(mesh, spec[-1])
        columns *= sizes[0] if name == "adaln" else 1
        assert set(kinds(program)) <= {"all-reduce"}
        # A maximum is two numbers, that and whether there is a NaN; parameters have three gradients at most.
        assert sum(c.bytes for c in found) <= 4 * (12 * rows + 3 * columns)


def meshes_of(devices):
    """Axes d and m, with so many devices in all."""
    for m in (1, 2, 3):
        if devices % m == 0:
            yield jax.make_mesh(
                (devices // m, m),
                ("d", "m"),
                axis_types=(AxisType.Auto,) * 2,
                devices=CPUS[:devices],
            )


@pytest.mark.parametrize("seed", range(len(MAIN)))
def test_sizes_that_devices_do_not_divide(seed):
    """Random cases, sizes, numbers of devices and ways to cut: the padding of blocks, here NaN, never counts."""
    rng = np.random.default_rng(seed)
    case = MAIN[seed % len(MAIN)]
    sizes = [int(rng.integers(2, 9)) for _ in case.small[:-1]]
    columns = int(rng.integers(3, 40))
    sizes = (*sizes, columns * (2 if case.name in MOVING else 1))
    mesh = rng.choice(np.array([*itertools.chain(*map(meshes_of, range(2, 9)))], object))
    axes = [None] * len(sizes)
    for name in ("d", "m"):
        at = int(rng.integers(len(sizes)))
        axes[at] = name if axes[at] is None else (axes[at], name)
    given = Placed(case, sizes, P(*axes), mesh)
    f = everything(case)
    _, got = run(given.of_placed(f), *given.placed)
    assert_close(got, alone(f, *given.arrays), 1e-4)


@pytest.mark.parametrize(
    "name", ["layer_norm", "adaln", "kl_distillation", "dropout_residual_layer_norm"]
)
def test_what_xla_makes_of_the_jaxpr(name, monkeypatch):
    """What users of CPUs get: XLA partitions the operations themselves."""
    monkeypatch.setattr(define, "partition_everywhere", False)
    case = CASES[name]
    for spec in specs_of(case):
        given = Placed(case, case.small, spec, AUTO)
        program, got = run(given.of_placed(everything(case)), *given.placed)
        assert_close(got, case_alone(name, case.small))


# ---- rows ----


def scaled_norm(x, scale):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.asarray(1e-6, x.dtype))
    return y * scale


@over([P("d", None), P("m", None), P(("d", "m"), None)])
def test_kernels_on_each_devices_rows(mesh, spec):
    """One call forward and one backward, of the device's rows, where the devices have kernels."""
    x, scale = rand((16, 64)), rand((64,), 1)
    f = both(jaxnorm.fuse(scaled_norm), 2)
    with scope(mesh):
        program, got = run(f, put(x, spec, mesh), put(scale, P(None), mesh))
    (found,) = hlo.collectives(program)
    assert (found.kind, found.bytes) == ("all-reduce", 4 * 64)
    assert_close(got, alone(f, x, scale))
    if platform_of(mesh) == "gpu" and jaxnorm.status().modules[1].available:
        calls = [c for c in hlo.custom_calls(program) if c.kind == "jaxnorm_row_program"]
        local_shape = (16 // blocks(mesh, spec[0]), 64)
        assert [c.arrays[0] for c in calls] == [("f32", local_shape)] * 2


def tiles(shape, dim, count, devices=8):
    counts = [count if i == dim else 1 for i in range(len(shape))]
    return np.arange(devices).reshape(*counts, -1)


def programs_of(f, *avals):
    """The row programs that a function calls."""
    found = []

    def follow(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is primitive.row_program_p:
                found.append(eqn.params["jaxpr"])
            for inner in eqn.params.values() if eqn.primitive.name in ("jit", "pjit") else ():
                if hasattr(inner, "jaxpr"):
                    follow(inner.jaxpr)

    follow(jax.make_jaxpr(f)(*avals).jaxpr)
    return found


def local_programs(closed, rows, count):
    """The row programs that one of eight devices calls where these rows are cut in `count` blocks."""
    found = []

    def record(program, operands):
        needed = primitive._needed(program)
        if needed.program is not None:
            found.append(program if needed.program is primitive._ITSELF else needed.program)
        return primitive.run(program, operands)

    def placed(avals):
        return [
            Tiled(a.shape, tiles(a.shape, 0, count if a.shape[:1] == (rows,) else 1)) for a in avals
        ]

    plan = local.partition(
        placed(closed.in_avals), placed(closed.out_avals), jaxpr=closed, run=record
    )
    avals = [
        jax.ShapeDtypeStruct(
            tuple(-(-n // k) for n, k in zip(a.shape, t.shape[:-1], strict=True)), a.dtype
        )
        for a, t in zip(closed.in_avals, plan.operands, strict=True)
    ]
    jax.make_jaxpr(lambda *xs: plan.local(*xs), axis_env=[(AXIS, 8)])(*avals)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 8])
def test_each_device_calls_one_kernel(name, count):
    """What a device computes of its rows is a row program again: sums, masks of padding and random bits included."""
    case = CASES[name]
    args, cotangents = case.avals(case.small), case.results(case.small)
    for closed in programs_of(everything(case), args, cotangents):
        (program,) = local_programs(closed, case.small[0], count)
        row_call(program, DEVICES[90])


def test_kernel_of_rows_with_padding():
    """The kernel's text, run on a CPU: contributions of rows beyond the end do not count."""
    f = lambda x, scale, ct: jax.vjp(jaxnorm.fuse(scaled_norm), x, scale)[1](ct)  # noqa: E731
    avals = [jax.ShapeDtypeStruct(s, np.float32) for s in ((10, 32), (32,), (10, 32))]
    closed = programs_of(f, *avals)[-1]
    (program,) = local_programs(closed, 10, 4)
    operands = [
        rand(a.shape, i) if a.shape else np.int32(1) for i, a in enumerate(program.in_avals)
    ]
    for array in operands:
        if array.shape[:1] == (3,):
            array[1:] = np.nan
    got = row_emulator.run(
        row_call(program, DEVICES[90]), operands, [(a.shape, a.dtype) for a in program.out_avals]
    )
    want = run_program(program, *operands)
    assert any(a.shape == (32,) and np.isfinite(a).all() for a in got)
    assert_close(got, want)


@pytest.mark.parametrize("heads", [4, 3, 2])
def test_heads_that_are_split_from_the_last_axis(heads):
    """A projection's columns are cut: four devices have whole heads, or else the columns are gathered."""

    def f(x, scale):
        y = x.reshape(*x.shape[:2], heads, -1)
        return scaled_norm(y, scale).reshape(x.shape)

    x, scale = rand((2, 6, heads * 16)), rand((16,), 1)
    g = both(jaxnorm.fuse(f), 2)
    program, got = run(g, put(x, P("m", None, "d"), AUTO), put(scale, P(), AUTO))
    assert_close(got, alone(g, x, scale))
    if heads == 4:
        assert kinds(program) == ["all-reduce"]


@pytest.mark.parametrize(
    ("spec", "count"),
    [(P("d", None, None), 0), (P(None, "d", None), 1), (P("m", "d", None), 1)],
    ids=str,
)
def test_parameters_of_groups_of_rows(spec, count):
    """AdaLN: scales that the rows of one image share; where images are cut nothing is summed."""
    case = CASES["adaln"]
    sizes = (8, 8, 32)
    given = Placed(case, sizes, spec, AUTO)
    program, got = run(everything(case), *given.placed)
    assert_close(got, case_alone("adaln", sizes))
    found = hlo.collectives(program)
    assert [c.kind for c in found] == ["all-reduce"] * count
    assert sum(c.bytes for c in found) == count * 2 * 4 * (8 // blocks(AUTO, spec[0])) * 32


def test_gradients_are_summed_in_float32():
    """bfloat16 parameters: the sum over devices is rounded once."""
    x, scale = rand((64, 32), 0, "bfloat16"), rand((32,), 1, "bfloat16")
    f = lambda x, scale: scaled_norm(x.astype(jnp.float32), scale.astype(jnp.float32))  # noqa: E731
    g = jax.grad(lambda s, x: jnp.sum(jaxnorm.fuse(f)(x, s) ** 2))
    program, got = run(g, put(scale, P(), AUTO), put(x, P(("d", "m"), None), AUTO))
    assert [(c.kind, c.bytes) for c in hlo.collectives(program)] == [("all-reduce", 4 * 32)]
    assert_close(got, alone(g, scale, x), 2**-8)


def test_what_follows_a_sum_over_rows_need_not_be_linear():
    """It is computed behind the all-reduce."""

    def f(x, scale):
        gradient = jax.vjp(lambda s: scaled_norm(x, s), scale)[1](x)[0]
        return jnp.tanh(gradient) * scale

    # As a row program: sums over rows belong to derivatives, so that `fuse` itself does not take them.
    x, scale = rand((10, 32)), rand((32,), 1)
    closed = jax.make_jaxpr(f)(x, scale)
    g = lambda x, scale: primitive.row_program_p.bind(x[:10], scale, jaxpr=closed)  # noqa: E731
    padded = np.concatenate([x, np.full((6, 32), np.nan, x.dtype)])
    program, got = run(g, put(padded, P(("d", "m"), None), AUTO), put(scale, P(), AUTO))
    assert kinds(program) == ["all-reduce"]
    assert_close(got, f(x, scale))


@over([P("d", None, None), P(None, "d", None)])
def test_mapped_parameters(mesh, spec):
    """Parameters of each example: where examples are cut nothing is summed."""
    x, scale = rand((8, 8, 32)), rand((8, 32), 1)
    f = jax.vmap(both(jaxnorm.fuse(scaled_norm), 2))
    with scope(mesh):
        program, got = run(f, put(x, spec, mesh), put(scale, P(spec[0], None), mesh))
    assert_close(got, alone(f, x, scale))
    assert kinds(program) == ["all-reduce"] * (spec[0] is None)


@pytest.mark.parametrize("spec", [P("d", None), P(None, "d"), P("m", "d")], ids=str)
def test_second_derivative(spec):
    g = lambda x: jax.grad(lambda x: jnp.sum(jnp.cos(jax.grad(h)(x))))(x)  # noqa: E731
    h = lambda x: jnp.sum(jnp.sin(jaxnorm.fuse(scaled_norm)(x, np.float32(2))))  # noqa: E731
    x = rand((8, 32))
    program, got = run(g, put(x, spec, AUTO))
    assert_close(got, alone(g, x), 1e-4)
    assert set(kinds(program)) <= ({"all-reduce"} if spec[1] else set())


def test_reshape_that_splits_a_sharded_axis():
    """No dimension has as many elements as there are devices: XLA cuts several."""
    x, scale = rand((8, 32)), rand((32,), 1)
    norm = jaxnorm.fuse(scaled_norm)

    def f(x, scale):  # XLA gathers where the gradient of x is joined again
        return jax.grad(lambda s: jnp.sum(jnp.sin(norm(x.reshape(2, 2, 2, 32), s))))(scale)

    program, got = run(f, put(x, P(("d", "m"), None), AUTO), put(scale, P(), AUTO))
    assert kinds(program) == ["all-reduce"]
    assert_close(got, alone(f, x, scale))


# ---- positions ----

CUTS = [P("d", None), P(None, "d"), P(("d", "m"), None), P("m", "d"), P("d", "m")]
SIZES = [(16, 64), (13, 21), (5, 50)]


def cut_to(f, sizes):
    return lambda x, *rest: f(x[: sizes[0], : sizes[1]], *rest)


def padded(x, fill=np.nan):
    padding = [(0, -n % 8) for n in x.shape]
    return np.pad(x, padding, constant_values=fill)


@pytest.mark.parametrize("spec", CUTS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_dropout(spec, sizes):
    """The same elements are dropped as on one device, and the same gradients."""

    def f(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, np.float32(0))

    g = both(jaxnorm.fuse(f))
    x = rand(sizes)
    program, got = run(cut_to(g, sizes), put(padded(x), spec, AUTO), put(KEY, P(), AUTO))
    (kept,), (want,) = (
        [np.asarray(r != 0) for r in (found[0],)] for found in (got, alone(g, x, KEY))
    )
    assert_equal(kept, want)
    assert_close(got, alone(g, x, KEY))
    if sizes == SIZES[0]:
        assert kinds(program) == []


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("spec", [P(("d", "m"), None), P("m", "d")], ids=str)
def test_random_bits(spec, dtype):
    def f(x, key):
        return jax.random.bits(key, x.shape, dtype) + x

    x = np.arange(13 * 21).reshape(13, 21).astype(dtype)
    _, got = run(
        cut_to(jaxnorm.fuse(f), x.shape), put(padded(x, 0), spec, AUTO), put(KEY, P(), AUTO)
    )
    assert_equal(got, f(x, KEY))


def test_random_bits_of_many_keys():
    """One key for each example; the bits of an example count from 0."""
    keys, x = jax.random.split(KEY, 8), rand((8, 6, 16))
    f = jax.vmap(lambda x, key: x + jax.random.uniform(key, x.shape, np.float32))
    for spec in (P("d", None, None), P(None, None, "d"), P("m", None, "d")):
        _, got = run(jaxnorm.fuse(f), put(x, spec, AUTO), put(keys, P(spec[0]), AUTO))
        assert_equal(got, f(x, keys))


def test_more_than_four_billion_bits():
    """Positions have two words."""
    rows, columns, row = 1 << 20, 1 << 13, 700_000
    x = jax.ShapeDtypeStruct((rows, columns), np.uint32)
    (closed,) = programs_of(
        lambda x, key: jaxnorm.fuse(lambda x, key: x + jax.random.bits(key, x.shape, np.uint32))(
            x, key
        ),
        x,
        KEY,
    )
    program = local.shared(closed)
    (bits,) = (e for e in program.equations if e.primitive == "random_bits")
    one_row_each = Blocks((rows, columns), np.arange(rows).reshape(rows, 1, 1))
    device = local._Device(program, one_row_each, primitive.run)
    words = jax.random.key_data(KEY)
    env = {("word", bits.inputs[0], i): words[i] for i in (0, 1)} | {("start", 0): jnp.int32(row)}
    (got,) = device._evaluate(env | {bits.inputs[0]: KEY}, bits)
    place = row * columns + np.arange(columns, dtype=np.uint64)
    counts = np.concatenate([place >> np.uint64(32), place & np.uint64(0xFFFFFFFF)])
    pair = jax.extend.random.threefry_2x32(words, counts.astype(np.uint32)).reshape(2, columns)
    assert_equal(got, (pair[0] ^ pair[1])[None])


@pytest.mark.parametrize("spec", CUTS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_iota(spec, sizes):
    """Of columns, of rows and of all elements."""

    def f(x):
        rows, columns = (jax.lax.broadcasted_iota(np.int32, x.shape, i) for i in (0, 1))
        number = rows * np.int32(x.shape[1]) + columns
        return jnp.where(columns <= rows, x, np.float32(0)) + number.astype(np.float32)

    x = rand(sizes)
    _, got = run(cut_to(jaxnorm.fuse(f), sizes), put(padded(x), spec, AUTO))
    assert_equal(got, f(x))


def test_iota_of_joined_rows():
    def f(x):
        position = jnp.arange(8 * 6, dtype=np.int32).reshape(8, 6, 1)
        return x * position.astype(np.float32)

    x = rand((8, 6, 16))
    for spec in (P("d", None, None), P("m", None, "d"), P(("d", "m"), None, None)):
        program, got = run(jaxnorm.fuse(f), put(x, spec, AUTO))
        assert kinds(program) == []
        assert_equal(got, f(x))


# ---- columns ----


def losses(logits, labels):
    p = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(p, labels[:, None], -1)[:, 0]
    return -taken, -jnp.sum(jnp.exp(p) * p, -1), jnp.argmax(logits, -1), jnp.max(p, -1)


@pytest.mark.parametrize("spec", [P(None, "d"), P(None, ("d", "m")), P("m", "d")], ids=str)
@pytest.mark.parametrize("columns", [64, 50257])
def test_vocabulary(spec, columns):
    """Labels in other devices' blocks, beyond the end and negative; a vocabulary that devices do not divide."""
    logits = rand((8, columns))
    labels = np.array(
        [0, 1, columns - 1, columns // 2, -1, columns, -columns, columns // 3], np.int32
    )
    f = both(jaxnorm.fuse(losses))

    def padded_away(logits, labels):
        return f(logits[:, :columns], labels)

    program, got = run(padded_away, put(padded(logits), spec, AUTO), put(labels, P(spec[0]), AUTO))
    assert_close(got, alone(f, logits, labels))
    if columns == 64:
        found = hlo.collectives(program)
        assert {c.kind for c in found} == {"all-reduce"}
        assert sum(c.bytes for c in found) <= 4 * 20 * 8 // blocks(AUTO, spec[0])


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_labels_out_of_range(mode):
    f = lambda x, labels: jnp.take_along_axis(x, labels[:, None], -1, mode=mode)  # noqa: E731
    x, labels = rand((4, 21)), np.array([-100, 20, 21, 1000], np.int32)
    _, got = run(
        cut_to(jaxnorm.fuse(f), x.shape),
        put(padded(x)[:4], P(None, "d"), AUTO),
        put(labels, P(), AUTO),
    )
    assert_equal(got, f(x, labels))


REDUCTIONS = {
    "max": lambda x: jnp.max(x, -1),
    "min": lambda x: jnp.min(x, -1),
    "argmax": lambda x: jnp.argmax(x, -1),
    "argmin": lambda x: jnp.argmin(x, -1),
    "sum": lambda x: jnp.sum(x, -1),
    "any": lambda x: jnp.any(x > 1, -1),
    "all": lambda x: jnp.all(x < 1, -1),
    "prod": lambda x: jnp.prod(x, -1),
}


def reductions():
    """All dtypes where padding must have the value that a reduction starts from, one in turn where there is none."""
    dtypes = ["float32", "bfloat16", "int32", "uint8", "float64"]
    for number, reduction in enumerate(REDUCTIONS):
        yield from ((reduction, dtype, 13) for dtype in dtypes)
        yield reduction, dtypes[number % len(dtypes)], 16


@pytest.mark.parametrize(("reduction", "dtype", "columns"), [*reductions()])
def test_reductions(reduction, dtype, columns):
    """Rows of -inf and with NaN are those of one device."""
    x = (rand((8, columns)) * 3).astype(np.dtype(dtype))
    if jnp.issubdtype(x.dtype, jnp.floating):
        x[1], x[2, 11], x[3, :8], x[4, 2], x[5, 4] = -np.inf, np.nan, -np.inf, np.inf, -0.0
    f = jaxnorm.fuse(lambda x: (x, REDUCTIONS[reduction](x)))
    fill = np.nan if dtype.startswith(("float", "bfloat")) else 77
    big = np.pad(x, [(0, 0), (0, 16 - columns)], constant_values=np.asarray(fill).astype(x.dtype))
    _, got = run(cut_to(f, x.shape), put(big, P("m", "d"), AUTO))
    assert_close(got, alone(f, x), 1e-2 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize(
    "spec", [P("d", None), P(None, "d"), P("m", "d"), P(None, ("d", "m"))], ids=str
)
@pytest.mark.parametrize("columns", [64, 40, 24])
def test_bits_that_are_saved(spec, columns):
    """A relu keeps a bit for each element: in whole bytes where blocks have such, otherwise all devices have all."""
    f = both(jaxnorm.fuse(lambda x, s: jax.nn.relu(scaled_norm(x, s)) + x), 2)
    x, scale = rand((8, columns)), rand((columns,), 1)
    program, got = run(f, put(x, spec, AUTO), put(scale, P(spec[1]), AUTO))
    assert_close(got, alone(f, x, scale))
    assert set(kinds(program)) <= {"all-reduce"}


def test_columns_that_move_are_gathered():
    """A slice of a row: whole rows on every device."""
    f = both(
        jaxnorm.fuse(
            lambda x: jnp.concatenate([x[:, 8:], scaled_norm(x[:, :8], np.float32(2))], -1)
        )
    )
    x = rand((8, 32))
    for spec in (P(None, "d"), P("m", "d")):
        program, got = run(f, put(x, spec, AUTO))
        assert_close(got, alone(f, x))
        assert "all-gather" in kinds(program)


@pytest.mark.parametrize("spec", [P(None, "d"), P("m", "d")], ids=str)
def test_columns_that_do_not_meet(spec, monkeypatch):
    """An activation of a layer whose features are cut: one program on each device's block."""
    found = []
    stage = local._Device._stage

    def record(self, env, now, later, one_program):
        found.append(self._one_program)
        return stage(self, env, now, later, one_program)

    monkeypatch.setattr(local._Device, "_stage", record)

    def f(x, gate, bias):
        return jax.nn.relu(x + bias) * jax.nn.silu(gate)

    g = both(jaxnorm.fuse(f), 3)
    args = rand((8, 64)), rand((8, 64), 1), rand((64,), 2)
    program, got = run(g, *(put(a, P(*tuple(spec)[2 - a.ndim :]), AUTO) for a in args))
    assert_close(got, alone(g, *args))
    assert kinds(program) == ["all-reduce"] * (spec[0] is not None)
    assert set(found) == {True}


# ---- around ----


def test_between_matrix_products():
    """Sharding propagates through the call: activations are not gathered."""
    w, scale = rand((32, 32), 1), rand((32,), 2)
    f = lambda x, w, scale: jnp.sum(jnp.sin(jaxnorm.fuse(scaled_norm)(x @ w, scale)) @ w)  # noqa: E731
    g = jax.grad(f, (0, 1, 2))
    x = rand((16, 32))
    program, got = run(g, put(x, P("d", None), AUTO), put(w, P(), AUTO), put(scale, P(), AUTO))
    assert set(kinds(program)) == {"all-reduce"}
    assert_close(got, alone(g, x, w, scale))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """All axes manual: each device's block is the program's."""
    f = jaxnorm.fuse(scaled_norm)
    specs = {"in_specs": (P("d", None), P()), "out_specs": P("d", None)}
    mapped = jax.shard_map(lambda x, s: f(x, s), mesh=AUTO, **specs, check_vma=check_vma)
    x, scale = rand((8, 32)), rand((32,), 1)
    program, got = run(mapped, put(x, P("d", None), AUTO), put(scale, P(), AUTO))
    assert kinds(program) == []
    assert_close(got, alone(scaled_norm, x, scale))


def test_export_for_several_devices():
    """The jaxpr, which XLA partitions."""
    f = jax.jit(lambda x, s: jaxnorm.fuse(scaled_norm)(x, s))
    x, scale = rand((8, 32)), rand((32,), 1)
    args = put(x, P("d", None), AUTO), put(scale, P(), AUTO)
    exported = jax.export.deserialize(jax.export.export(f, platforms=["cpu"])(*args).serialize())
    assert_close(jax.jit(exported.call)(*args), alone(scaled_norm, x, scale))


def test_identity_of_programs():
    """A function is one entry of the persistent compilation cache in all processes; another function is another."""
    found = set()
    for case in MAIN:
        for closed in programs_of(
            everything(case), case.avals(case.small), case.results(case.small)
        ):
            assert "0x" not in local.text_of(flatten(closed))
            found.add((local.identity({"jaxpr": closed}), local.text_of(flatten(closed))))
    assert len({digest for digest, _ in found}) == len({text for _, text in found}) > len(MAIN)
