"""softmax_cross_entropy against the float64 oracle: values, labels, masks, gradients, what they keep."""

import math

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import row_emulator
import suite
from jax.sharding import PartitionSpec as P
from meshes import assert_only_small_all_reduces, blocks, has_kernels, over, put
from oracle import DTYPES
from suite import in_turn, needs_cpu, rand

import jaxnorm
from jaxnorm._ops import cross_entropy
from jaxnorm._sharding import DEVICES, Blocks

inf, nan = np.inf, np.nan
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def some_labels(shape, classes, seed=0):
    return np.random.default_rng(seed).integers(0, classes, shape).astype(np.int32)


def loss_of(labels, **options):
    options = dict(options)
    if "smoothing" in options:
        options["label_smoothing"] = options.pop("smoothing")
    return lambda x: jaxnorm.softmax_cross_entropy(x, labels, **options)


def value_and_vjp(labels, x, ct, **options):
    def run(x, labels, ct):
        y, pullback = jax.vjp(loss_of(labels, **options), x)
        return y, pullback(ct)[0]

    return jax.jit(run)(x, labels, ct)


def check(x, labels, axis=-1, floor=16.0, **options):
    """Loss and gradient; errors are relative to the size of what is added up, and to that of lse."""
    dtype = x.dtype.name
    acc = oracle.acc_of(dtype)
    ct = rand(labels.shape, acc, 5, 1.0)
    y, x_bar = value_and_vjp(labels, x, ct, axis=axis, **options)
    assert y.dtype == acc
    expected = oracle.softmax_cross_entropy(x, labels, axis, **options)
    parts = oracle.cross_entropy_parts(x, labels, axis, options.get("where"), 0.0)
    z, lse = parts[0], parts[4][..., 0]
    largest = np.max(np.where(np.isfinite(z), np.abs(z), 0.0), -1, initial=1.0)
    lse = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    oracle.assert_close(
        y, expected, acc, floor=floor, size=largest + options.get("z_loss", 0.0) * lse**2
    )
    expected = oracle.softmax_cross_entropy_vjp(x, labels, ct, axis, **options)
    size = oracle.softmax_cross_entropy_vjp(x, labels, ct, axis, **options, size=True)
    size = np.where(np.isfinite(size), size, 0.0)
    lse = np.expand_dims(lse, axis)
    units = oracle.UNIT[acc] / oracle.UNIT[dtype]
    oracle.assert_close(
        x_bar, expected, dtype, floor=floor, size=size * (1 + lse * units) + np.max(size) * units
    )
    return y, x_bar


# ---- values ----


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 15, 16, 17, 33, 127, 1000, 4095, 4096, 4097, 9001])
def test_columns(columns):
    check(rand((5, columns)), some_labels(5, columns))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("columns", [1, 7, 16, 33, 4101])
def test_columns_of_other_dtypes(dtype, columns):
    check(rand((5, columns), dtype), some_labels(5, columns))
    check(rand((5, columns), dtype), some_labels(5, columns), smoothing=0.1, z_loss=1e-2)


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1}])
@pytest.mark.parametrize("columns", [2, 31, 128, 129])
def test_numbers_of_short_rows(columns, options):
    """CPU kernels work on 16 of them at once."""
    for rows, dtype in ((1, "float32"), (15, "bfloat16"), (16, "float64"), (17, "float32")):
        check(rand((rows, columns), dtype), some_labels((rows,), columns), **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("columns", [2, 5, 13, 100, 128])
def test_tiles_of_short_rows(dtype, columns):
    """Vectors reach into the next row, and must leave it as it is: also where that is NaN, or its label no class."""
    x, labels = rand((1203, columns), dtype), some_labels(1203, columns)
    check(x, labels, smoothing=0.1, z_loss=1e-2)
    ct = rand(labels.shape, oracle.acc_of(dtype), 5)
    y, x_bar = value_and_vjp(labels, x, ct)
    labels[::5] = columns
    bad_y, bad_bar = value_and_vjp(labels, x.at[1::5].set(nan), ct)
    for got, same, at_label in ((bad_y, y, nan), (bad_bar, x_bar, 0)):
        np.testing.assert_array_equal(
            oracle.f64(got), oracle.f64(same.at[::5].set(at_label).at[1::5].set(nan))
        )


@pytest.mark.parametrize("axis", [(2, 3), (3, 2), (1, 3), (-3, 0), (1,)])
@pytest.mark.parametrize("masked", [False, True])
def test_classes_of_several_axes(axis, masked):
    """Labels count along the axes in the order in which they are named, as in optax."""
    x = rand((2, 3, 4, 5), "float32")
    rows = tuple(n for i, n in enumerate(x.shape) if i not in {a % 4 for a in axis})
    labels = np.random.default_rng(1).integers(0, math.prod(x.shape[a] for a in axis), rows)
    where = np.random.default_rng(2).random((2, 3, 1, 5)) < 0.8 if masked else None

    def run(loss):
        def total(x):
            y = loss(x, labels, axis=axis, where=where)
            # optax: the logit of a masked label counts.
            return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y), 0)), jnp.isfinite(y)

        return jax.jit(jax.value_and_grad(total, has_aux=True))(x)

    (got, finite), x_bar = run(jaxnorm.softmax_cross_entropy)
    if not masked:
        assert finite.all()
        (want, _), want_bar = run(optax.softmax_cross_entropy_with_integer_labels)
    else:
        order = [i for i in range(4) if i not in {a % 4 for a in axis}] + [a % 4 for a in axis]

        def by_hand(x, labels, axis, where):
            x, where = (
                jnp.transpose(jnp.broadcast_to(a, x.shape), order).reshape(*rows, -1)
                for a in (x, where)
            )
            return jaxnorm.softmax_cross_entropy(x, labels, where=where)

        (want, _), want_bar = run(by_hand)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(x_bar, want_bar, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (), (1, 1, 4)])
def test_where_has_the_rank_of_logits(shape):
    """NumPy would broadcast a smaller one to classes, optax to rows: here it has as many of either."""
    with pytest.raises(
        ValueError, match=r"(?s)where must have as many .*mask classes.*leave out rows"
    ):
        jaxnorm.softmax_cross_entropy(
            jnp.zeros((4, 4)), jnp.zeros(4, int), where=jnp.ones(shape, bool)
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1), (1.0, 0.1)])
@pytest.mark.parametrize("mask", [None, (1, 37), (6, 37), (6, 1)])
def test_options(dtype, smoothing, z_loss, mask):
    where = None if mask is None else np.random.default_rng(3).random(mask) < 0.7
    labels = some_labels(6, 37)
    if mask == (6, 1):
        where[0] = True
    check(rand((6, 37), dtype), labels, where=where, smoothing=smoothing, z_loss=z_loss)


@pytest.mark.parametrize("shape", [(11,), (4, 11), (2, 3, 5, 4)])
def test_each_axis(shape):
    for axis in range(-len(shape), len(shape)):
        rest = list(shape)
        classes = rest.pop(axis)
        check(rand(shape), some_labels(rest, classes), axis)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 21, 2501), 1), ((33, 37), 0), ((70, 1041), 0), ((2, 100, 3, 13), 1), ((200, 3, 1), 0)],
)
def test_rows_side_by_side(dtype, shape, axis):
    """CPU kernels work on blocks of up to 1024 of them, and on 32 classes at a time, of which all may be -inf."""
    rest = list(shape)
    classes = rest.pop(axis)
    labels = some_labels(rest, classes)
    x = np.array(rand(shape, dtype))
    of_row = np.moveaxis(x, axis, -1).reshape(-1, classes)
    of_row[0, : 2 * classes // 3] = -np.inf
    of_row[1, -1] = np.nan
    of_row[2] = np.inf
    x = jnp.asarray(np.moveaxis(of_row.reshape(*rest, classes), -1, axis))
    check(x, labels, axis)
    check(x, labels, axis, smoothing=0.1, z_loss=1e-2)
    check(rand(shape, dtype) + 1000, labels, axis, smoothing=0.1)


def test_many_rows():
    check(rand((70001, 3)), some_labels(70001, 3))


@pytest.mark.parametrize(("shape", "axis"), [((0, 4), -1), ((4, 0), 0), ((2, 0, 3), 2)])
def test_no_rows(shape, axis):
    x = jnp.zeros(shape)
    labels = jnp.zeros(np.delete(shape, axis), int)
    y, x_bar = value_and_vjp(labels, x, jnp.zeros(labels.shape), axis=axis)
    assert y.shape == labels.shape
    assert x_bar.shape == shape


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z_loss": 0.1}])
def test_no_classes(options):
    """No label is a class then."""
    y, x_bar = value_and_vjp(jnp.zeros(3, int), jnp.zeros((3, 0)), jnp.ones(3), **options)
    assert np.isnan(y).all()
    assert x_bar.shape == (3, 0)


@dtypes
def test_against_optax(dtype):
    optax = pytest.importorskip("optax")
    f = optax.softmax_cross_entropy_with_integer_labels
    x, labels = rand((6, 33), dtype), some_labels(6, 33)
    expected = f(x.astype("float64"), labels)
    np.testing.assert_allclose(loss_of(labels)(x), expected, rtol=1e-5)
    if dtype in ("float32", "float64"):
        grad = jax.grad(lambda g, x: jnp.sum(g(x)), 1)
        np.testing.assert_allclose(
            grad(loss_of(labels), x), grad(lambda x: f(x, labels), x), rtol=1e-5, atol=1e-6
        )
    with_one_hot = optax.smooth_labels(jax.nn.one_hot(labels, 33), 0.1)
    np.testing.assert_allclose(
        loss_of(labels, smoothing=0.1)(x),
        optax.softmax_cross_entropy(x.astype("float64"), with_one_hot),
        rtol=1e-5,
    )


# ---- labels ----


@pytest.mark.parametrize(
    "kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_label_dtypes(kind):
    x, labels = rand((5, 33)), some_labels(5, 33)
    y = loss_of(jnp.asarray(labels, kind))(x)
    np.testing.assert_array_equal(y, loss_of(labels)(x))


@in_turn(
    label=[-1, -33, -(2**31), 33, 34, 2**31 - 1, 2**32, 2**32 + 5, 2**63 - 1],
    options=[{}, {"smoothing": 0.1, "z_loss": 0.5}],
    axis=[0, 1],
)
def test_labels_out_of_range(label, options, axis):
    """The loss is NaN, the gradient 0, and no other row is touched."""
    x = rand((4, 33)) if axis == 1 else rand((33, 4))
    labels = jnp.asarray([0, label, 32, 5])
    y, x_bar = value_and_vjp(labels, x, jnp.ones(4, "float32"), axis=axis, **options)
    assert list(np.isnan(y)) == [False, True, False, False]
    zero = (np.moveaxis(np.asarray(x_bar), axis, 1) == 0).all(1)
    assert list(zero) == [False, True, False, False]
    check(x, np.asarray([0, -1, 32, 5]), axis, **options)


def test_ignored_examples():
    """Selecting by the label gives finite second derivatives too."""
    x, labels = rand((4, 7), "float64"), jnp.array([1, -1, 2, -1])

    def total(x):
        return jnp.sum(jnp.where(labels < 0, 0, loss_of(labels, z_loss=0.1)(x)))

    kept = np.array([0, 2])
    expected = jnp.sum(loss_of(labels[kept], z_loss=0.1)(x[kept]))
    run = jax.jit(lambda x: (total(x), jax.grad(total)(x), jax.hessian(total)(x)))
    value, gradient, hessian = run(x)
    np.testing.assert_allclose(value, expected)
    assert np.isfinite(hessian).all()
    assert (np.asarray(gradient)[1::2] == 0).all()


# ---- special values ----

SPECIAL = {
    "some -inf": [1, -inf, 3, -inf],
    "all -inf": [-inf] * 4,
    "+inf": [1, inf, 2, 3],
    "NaN": [1, nan, 2, 3],
    "NaN and inf": [inf, nan, -inf, 3],
    "one finite": [-inf, -inf, 2, -inf],
    "far apart": [-60000.0, 60000.0, 0, 1],
}


@in_turn(dtype=DTYPES, name=[*SPECIAL], columns=[4, 37, 4099])
def test_special_values(dtype, name, columns):
    x = np.full((3, columns), SPECIAL[name][0] if name == "all -inf" else -1.0)
    x[:, -4:] = SPECIAL[name]
    x[1] = np.linspace(-1, 1, columns)
    x, labels = jnp.asarray(x, dtype), np.array([columns - 1, 1, columns - 2], np.int32)
    y, x_bar = check(x, labels, floor=64)
    assert np.isfinite(y[1])
    assert np.isfinite(oracle.f64(x_bar[1])).all()
    check(x, labels, floor=64, smoothing=0.1)


@pytest.mark.parametrize(
    ("dtype", "offset"), [("float32", 1e4), ("float32", -1e6), ("float64", 1e9)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_offset(dtype, offset, smoothing):
    """The loss does not lose digits to a common offset."""
    x, labels = rand((4, 5000), dtype), some_labels(4, 5000)
    moved = x + np.asarray(offset, dtype)
    x = moved - np.asarray(offset, dtype)
    y = loss_of(labels, smoothing=smoothing)(moved)
    expected = oracle.softmax_cross_entropy(x, labels, smoothing=smoothing)
    np.testing.assert_allclose(y, expected, rtol=64 * oracle.UNIT[dtype])


def huge(dtype, columns):
    """Logits, labels and p of rows of one large number, as masks leave them; of the last one, half are half of it."""
    largest = oracle.LARGEST[dtype]
    values = (-largest, largest, -min(1e10, largest), min(1e10, largest))
    x = np.stack([np.full(columns, value) for value in values]).astype(np.dtype(dtype))
    x[3, ::2] /= 2
    p = (x == x.max(1, keepdims=True)).astype(np.float64)
    return x, np.array([0, columns - 1, 3, 1], np.int32), p / p.sum(1, keepdims=True)


@dtypes
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("columns", [8, 37, 128, 4096, 4099])
def test_huge_logits(dtype, axis, columns):
    """Logits that are all the same large number are as good as zeros. In the oracle's lse - x, nothing is left."""
    x, labels, p = huge(dtype, columns)
    expected = -np.log(p[np.arange(4), labels])
    x = jnp.asarray(x if axis == 1 else np.ascontiguousarray(x.T))
    np.testing.assert_allclose(jax.jit(loss_of(labels, axis=axis))(x), expected, rtol=1e-5)


@in_turn(dtype=DTYPES, options=[{}, {"smoothing": 0.1, "z_loss": 0.1}], axis=[0, 1])
def test_garbage_at_masked_places(dtype, options, axis):
    """What logits and tangents hold there never matters; gradients there are exactly 0."""
    rng = np.random.default_rng(4)
    where = rng.random((5, 37)) < 0.5
    labels = np.argmax(where, 1).astype(np.int32)
    labels[2] = np.argmin(where[2])  # masked
    where[3] = False
    bad = rng.choice([nan, inf, -inf, 1e30], where.shape)
    good = rng.standard_normal(where.shape)
    with np.errstate(over="ignore"):
        x, x_dot = (
            np.where(where, good * factor, bad).astype(np.dtype(dtype)) for factor in (1, 0.5)
        )
    clean = np.where(where, x, 0).astype(x.dtype)
    if axis == 0:
        x, x_dot, clean, where = x.T, x_dot.T, clean.T, where.T
    y, x_bar = check(jnp.asarray(x), labels, axis, where=where, **options)
    y_clean, bar_clean = check(jnp.asarray(clean), labels, axis, where=where, **options)
    np.testing.assert_array_equal(y, y_clean)
    np.testing.assert_array_equal(oracle.f64(x_bar), oracle.f64(bar_clean))
    assert (oracle.f64(x_bar)[~where] == 0).all()
    assert np.isposinf(y[2])
    assert np.isnan(y[3])
    _, y_dot = jax.jvp(loss_of(labels, axis=axis, where=where, **options), (x,), (x_dot,))
    assert np.isfinite(np.asarray(y_dot)[[0, 1, 2, 4]]).all()


def test_same_bits_every_time():
    x, labels = rand((64, 1025)), some_labels(64, 1025)
    first, again = (value_and_vjp(labels, x, jnp.ones(64, "float32")) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z_loss": 0.1}])
def test_implementations_agree(options):
    x, labels, ct = rand((6, 4999)), some_labels(6, 4999), rand(6, seed=2)
    where = np.random.default_rng(1).random((1, 4999)) < 0.9
    where[:, labels] = True
    results = [
        value_and_vjp(labels, x, ct, where=where, implementation=implementation, **options)
        for implementation in (None, "xla")
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


# ---- what a program consists of ----


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_residuals(z_loss):
    """The logits themselves, the labels and one number per row."""
    x, labels = rand((4, 33), "bfloat16"), jnp.asarray(some_labels(4, 33))
    _, pullback = jax.vjp(lambda x: loss_of(labels, z_loss=z_loss)(x), x)
    kept = sorted((a.dtype.name, a.shape) for a in jax.tree.leaves(pullback))
    assert kept == [("bfloat16", (4, 33)), ("float32", (4, 1)), ("int32", (4, 1))]


@needs_cpu
@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z_loss": 0.1}])
def test_probabilities_are_not_materialised(options):
    """Nothing of the size of the logits in the program but them and their gradient."""
    x, labels = rand((256, 4096)), some_labels(256, 4096)

    def total(x):
        return jnp.mean(loss_of(labels, **options)(x))

    compiled = jax.jit(jax.value_and_grad(total)).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes // 16
    calls = [c.kind for c in hlo.custom_calls(compiled.as_text())]
    assert calls == ["jaxnorm_cross_entropy_fwd", "jaxnorm_cross_entropy_bwd"]


@pytest.mark.parametrize("mapped", ["logits", "labels", "where", "both"])
def test_vmap_of_some(mapped):
    """Of the gradient too; what is not mapped is not repeated."""
    x, labels = rand((3, 4, 33)), some_labels((3, 4), 33)
    where = np.random.default_rng(1).random((3, 4, 33)) < 0.8
    np.put_along_axis(where, labels[..., None], True, -1)
    axes = {"logits": (0, None, None), "labels": (None, 0, None), "where": (None, None, 0)}
    axes = axes.get(mapped, (0, 0, None))
    args = [a if axis == 0 else a[1] for a, axis in zip((x, labels, where), axes, strict=True)]

    def f(x, labels, where):
        g = loss_of(labels, where=where, smoothing=0.1, z_loss=0.1)
        return g(x), jax.grad(lambda x: jnp.sum(jnp.sin(g(x))))(x)

    got = jax.vmap(f, axes)(*args)
    for i in range(3):
        one = f(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)))
        for a, b in zip(got, one, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=1e-6)


def test_float0():
    """Labels and masks that are arguments have float0 tangents and cotangents."""
    x, labels, where = rand((2, 5)), jnp.array([0, 4]), jnp.ones((2, 5), bool)
    f = lambda x, labels, where: loss_of(labels, where=where)(x)  # noqa: E731
    bars = jax.vjp(f, x, labels, where)[1](jnp.ones(2, "float32"))
    assert bars[1].dtype == bars[2].dtype == jax.dtypes.float0
    zeros = [np.zeros(a.shape, jax.dtypes.float0) for a in (labels, where)]
    _, y_dot = jax.jvp(f, (x, labels, where), (x, *zeros))
    np.testing.assert_allclose(y_dot, jnp.sum(bars[0] * x, -1), rtol=1e-5)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_export_of_symbolic_shapes(kind):
    """Batch and classes of unknown size."""
    rows, classes = jax.export.symbolic_shape("b, c")
    f = jax.jit(lambda x, labels: loss_of(labels, smoothing=0.1)(x))
    arguments = (
        jax.ShapeDtypeStruct((rows, classes), "float32"),
        jax.ShapeDtypeStruct((rows,), kind),
    )
    exported = jax.export.export(f, disabled_checks=jaxnorm.export_checks())(*arguments)
    x, labels = rand((5, 33)), jnp.asarray(some_labels(5, 33), kind)
    labels = labels.at[2].set(33)
    y = jax.export.deserialize(exported.serialize()).call(x, labels)
    np.testing.assert_allclose(y, f(x, labels), rtol=1e-6)


# ---- sharding ----

ROWS, CLASSES = 16, 64
every_options = pytest.mark.parametrize(
    "options", [{}, {"smoothing": 0.1, "z_loss": 0.1, "where": True}], ids=["plain", "everything"]
)


def sharded_call(options):
    """(function of logits, labels and a mask that returns loss, tangent and gradient; arguments)."""
    x, labels = rand((ROWS, CLASSES)), some_labels(ROWS, CLASSES)
    labels[3] = -1
    where = np.random.default_rng(1).random((ROWS, CLASSES)) < 0.8
    where[np.arange(ROWS), labels] = True
    options = dict(options)
    masked = options.pop("where", False)

    def both(x, labels, where):
        f = loss_of(labels, **options, where=where if masked else None)
        y, y_dot = jax.jvp(f, (x,), (jnp.cos(x),))
        return y, y_dot, jax.vjp(f, x)[1](jnp.sin(jnp.where(labels < 0, 0, y)))[0]

    return both, (x, labels, where)


def on_one_device(function, args, mesh):
    return jax.jit(function)(*jax.device_put(args, mesh.devices.flat[0]))


def run_sharded(options, mesh, spec):
    both, args = sharded_call(options)
    expected = on_one_device(both, args, mesh)
    specs = (spec, P(spec[0]), spec)
    with jax.set_mesh(mesh):
        placed = [put(a, s, mesh) for a, s in zip(args, specs, strict=True)]
        program, results = hlo.text(both, *placed), jax.jit(both)(*placed)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    assert results[2].sharding.is_equivalent_to(placed[0].sharding, 2)
    return program


@over([P("d", None), P(("d", "m"), None)])
@every_options
def test_sharded_rows(mesh, options, spec):
    program = run_sharded(options, mesh, spec)
    assert hlo.collectives(program) == []
    kernels = {"jaxnorm_cross_entropy_fwd", "jaxnorm_cross_entropy_bwd"}
    if has_kernels(mesh):
        assert {c.kind for c in hlo.custom_calls(program)} == kernels


@over([P(None, "m"), P("d", "m"), P(None, ("d", "m"))])
@every_options
def test_sharded_classes(mesh, options, spec):
    """All-reduces of numbers per row, and nothing else."""
    program = run_sharded(options, mesh, spec)
    rows = ROWS // blocks(mesh, spec[0])
    # Five of up to four numbers: maximum, sums, with a mask the number of classes backward, and z_loss's terms.
    assert_only_small_all_reduces(program, mesh, 4 * 4 * rows, 5)
    x, labels, _ = sharded_call(options)[1]
    with jax.set_mesh(mesh):
        x, labels = put(x, spec, mesh), put(labels, P(spec[0]), mesh)
        forward = hlo.collectives(hlo.text(lambda x, labels: loss_of(labels)(x), x, labels))
    assert sum(len(c.arrays) for c in forward) <= 3, forward


@over([P("d", None)], ["auto"])
@every_options
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh, options, spec, check_vma):
    both, args = sharded_call(options)
    mapped = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(spec, P("d"), spec),
        out_specs=(P("d"), P("d"), spec),
        check_vma=check_vma,
    )
    assert hlo.collectives(hlo.text(mapped, *args)) == []
    expected = on_one_device(both, args, mesh)
    for got, want in zip(jax.jit(mapped)(*args), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_gradient_of_a_training_step():
    """One forward and one backward call, also when the loss is averaged, jitted and rematerialised."""
    labels = some_labels(8, 33)

    def step(w, x):
        return jnp.mean(loss_of(labels, z_loss=1e-4)(x @ w))

    w, x = rand((5, 33)), rand((8, 5))
    for f in (step, jax.checkpoint(step)):
        counts = suite.jaxnorm_primitives(jax.grad(f), w, x)
        assert counts["jaxnorm_cross_entropy_bwd"] == 1
        assert "jaxnorm_cross_entropy_jvp" not in counts


# ---- parts of rows ----


def special_parts(columns):
    """Logits, labels and a mask. Rows are masked or infinite in one of eight parts, in several, or altogether."""
    x, where = np.array(rand((ROWS, columns), seed=40)), np.ones((ROWS, columns), bool)
    labels = some_labels(ROWS, columns, 41)
    half, last = columns // 2, columns - 1
    x[0, :half] = x[1] = x[2, half:] = x[3, 1:] = x[4, :last] = -inf
    labels[[0, 2, 3, 4]] = last, 1, 0, last
    x[5, 1], x[6, last] = nan, inf
    x[7], x[8], labels[9] = x[7] + 1e4, x[8] - 1e4, -1
    where[10, :half] = where[11, half:] = where[12] = where[13, 1:] = where[14, :last] = False
    labels[[10, 11, 13, 14]] = last, 1, 0, last
    x[10, :3], x[11, last] = (nan, inf, -inf), nan  # masked
    x[15, :half] -= 200  # a part that adds nothing
    return x.astype("float32"), labels, where


def check_special(y, x_bar, x, labels, ct, where, smoothing):
    """Errors of a loss and its gradient are relative to the size of the row's logits."""
    keep = True if where is None else where
    size = np.where(np.isfinite(x) & keep, np.abs(x), 0).max(1) + 8
    want = oracle.softmax_cross_entropy(x, labels, where=where, smoothing=smoothing)
    assert np.isfinite(want).sum() >= 6
    oracle.assert_close(y, want, "float32", floor=16, size=size)
    want = oracle.softmax_cross_entropy_vjp(x, labels, ct, where=where, smoothing=smoothing)
    oracle.assert_close(x_bar, want, "float32", floor=32, size=size[:, None])
    finite = np.where(np.isfinite(want), 0, want).astype("float32")
    with pytest.raises(AssertionError, match="error"):
        oracle.assert_close(finite, want, "float32", floor=32, size=size[:, None])


parts_options = pytest.mark.parametrize(
    ("masked", "smoothing"), [(False, 0.0), (False, 0.1), (True, 0.0), (True, 0.1)]
)


@over([P("d", "m"), P(None, ("d", "m"))], ["auto"])
@pytest.mark.parametrize("columns", [CLASSES, CLASSES - 15])
@parts_options
def test_special_rows_in_parts(mesh, spec, columns, masked, smoothing):
    """As the oracle's, where one of eight devices has none of 49 classes, too."""
    x, labels, where = special_parts(columns)
    ct = np.array(rand(ROWS, seed=42))

    def placed(a, fill, spec):
        """Padded with what is cut away again."""
        widths = [(0, 0), (0, CLASSES - columns)][: a.ndim]
        return put(np.pad(a, widths, constant_values=fill), spec, mesh)

    def run(x, labels, where, ct):
        x, where = x[:, :columns], where[:, :columns] if masked else None
        y, pullback = jax.vjp(loss_of(labels, where=where, smoothing=smoothing), x)
        return y, pullback(ct)[0]

    rows = P(spec[0])
    y, x_bar = jax.jit(run)(
        placed(x, nan, spec),
        placed(labels, 0, rows),
        placed(where, True, spec),
        placed(ct, 0, rows),
    )
    check_special(y, x_bar, x, labels, ct, where if masked else None, smoothing)


@pytest.mark.skipif(not row_emulator.supported(), reason="kernels run on the CPU with g++ on Linux")
@parts_options
def test_kernels_of_parts(masked, smoothing, monkeypatch):
    """The kernels' text, run on a CPU: eight devices share 49 classes; one kernel forward and one backward."""
    ran = row_emulator.launch_row_programs(monkeypatch, fallback=False)
    devices, columns = 8, 49
    x, labels, where = special_parts(columns)
    ct = np.array(rand(ROWS, seed=42))
    parts = Blocks((ROWS, columns), np.arange(devices).reshape(1, devices, 1))
    size = parts.size(1)

    def cut(a, fill):
        padded = np.pad(a, [(0, 0), (0, size * devices - columns)], constant_values=fill)
        return jnp.asarray(padded.reshape(ROWS, devices, size).swapaxes(0, 1))

    params = {"axis": 1, "smoothing": smoothing, "blocks": parts}
    mask = [cut(where, True)] if masked else []
    labels_column, ct_column = jnp.asarray(labels[:, None]), jnp.asarray(ct[:, None])

    def both(x, *mask):
        nll, lse = cross_entropy._fwd_on_part(x, labels_column, *mask, **params)
        (x_bar,) = cross_entropy._bwd_on_part(
            x, lse, labels_column, ct_column, ct_column, *mask, **params
        )
        return nll, x_bar

    with jax.disable_jit():
        nll, x_bar = jax.vmap(both, axis_name=DEVICES)(cut(x, nan), *mask)
    assert len(ran) == 2
    np.testing.assert_array_equal(nll, np.broadcast_to(nll[:1], nll.shape))
    x_bar = np.asarray(x_bar).swapaxes(0, 1).reshape(ROWS, -1)[:, :columns]
    check_special(nll[0, :, 0], x_bar, x, labels, ct, where if masked else None, smoothing)
