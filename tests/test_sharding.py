"""Sharded programs: results as on one device, no collective where rows are whole.

On eight CPU devices, and on two GPUs where there are two (tests/meshes.py).
"""

import functools
import math
import socket

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import processes
import pytest
import row_emulator
import suite
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    AUTO,
    CPUS,
    assert_only_small_all_reduces,
    blocks,
    has_kernels,
    over,
    over_pairs,
    put,
    scope,
)

import jaxnorm
import jaxnorm.linen
from jaxnorm._ops import softmax
from jaxnorm._rows import primitive
from jaxnorm._rows.call import row_call
from jaxnorm._rows.plan import DEVICES as GPUS
from jaxnorm._sharding import DEVICES, Blocks

BATCH, ROWS, COLUMNS = 8, 16, 64

ROW_SPECS = [P("d", None), P("m", None), P(("d", "m"), None)]
COLUMN_SPECS = [P(None, "m"), P("d", "m"), P(None, ("d", "m")), P("m", "d")]
OPS = ("softmax", "log_softmax", "relu", "add_relu", "layer_norm", "rms_norm")
SOFTMAXES, NORMS = OPS[:2], OPS[4:]
# Operations along rows, with the all-reduces of a split row: forward, and forward with backward.
ROW_OPS = dict.fromkeys(SOFTMAXES, (2, 3)) | {"layer_norm": (2, 3), "rms_norm": (1, 2)}


def rand(shape, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(np.dtype(dtype))


X, W = rand((ROWS, COLUMNS)), rand((ROWS, COLUMNS), 1)
BATCHED = rand((BATCH, ROWS, COLUMNS), 2)
WHERE = np.random.default_rng(3).random((1, COLUMNS)) < 0.7
FULL_WHERE = np.random.default_rng(4).random((ROWS, COLUMNS)) < 0.7
BIAS = rand((ROWS, 1), 5)


def call(op):
    """The operation as a function of one array."""
    function = getattr(jaxnorm, op)
    return (lambda x: function(x, x * 0.5)) if op == "add_relu" else function


def gradient(f):
    return lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)


def both(f):
    """Result, tangent and gradient."""
    return lambda x: (*jax.jvp(f, (x,), (jnp.cos(x),)), gradient(f)(x))


def assert_same(sharded, alone):
    for got, want in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


RESULTS_ALONE = {}


def alone(f, *args, mesh=AUTO, key=None):
    """The result on one device of a mesh.

    It is computed once for all tests with the same key, which names the function and its arguments.
    """
    device = mesh.devices.flat[0]
    if (key, device) not in RESULTS_ALONE:
        result = jax.jit(f)(*(jax.device_put(a, device) for a in args))
        result = jax.tree.map(np.asarray, result)
        if key is None:
            return result
        RESULTS_ALONE[key, device] = result
    return RESULTS_ALONE[key, device]


def both_alone(op, mesh=AUTO):
    return alone(both(call(op)), X, mesh=mesh, key=("both", op))


def assert_only_small_sums(program, mesh, rows, count):
    """At most `count` all-reduces, each of one float32 per row that a device holds, or two."""
    assert_only_small_all_reduces(program, mesh, 2 * 4 * rows, count)
    found = hlo.collectives(program)
    assert sum(len(c.arrays) for c in found) <= count, found


ops = pytest.mark.parametrize("op", OPS)
softmaxes = pytest.mark.parametrize("op", SOFTMAXES)
norms = pytest.mark.parametrize("op", NORMS)
row_ops = pytest.mark.parametrize("op", ROW_OPS)


# ---- jit ----


@over_pairs("op", OPS, ROW_SPECS)
def test_rows(mesh, op, spec):
    """No collective, forward, tangents and gradient; each device calls the kernel on its rows."""
    with scope(mesh):
        x = put(X, spec, mesh)
        program, results = hlo.run(both(call(op)), x)
    assert hlo.collectives(program) == []
    assert_same(results, both_alone(op, mesh))
    for r in results:
        assert r.sharding.is_equivalent_to(x.sharding, 2)
    stem = op.split("_")[-1]
    # The tangent of a norm is a formula.
    kernels = {f"jaxnorm_{stem}_{part}" for part in ("fwd", "bwd")}
    if has_kernels(mesh):
        calls = hlo.custom_calls(program)
        assert {c.kind for c in calls} == kernels
        local = (ROWS // blocks(mesh, spec[0]), COLUMNS)
        assert all(c.arrays[0] == ("f32", local) for c in calls), calls


@over_pairs("op", ROW_OPS, COLUMN_SPECS)
def test_split_rows(mesh, op, spec):
    """Only all-reduces of per-row numbers: a maximum and a sum, or a mean and a variance; sums backward."""
    with scope(mesh):
        x = put(X, spec, mesh)
        forward = hlo.text(call(op), x)
        backward = hlo.text(gradient(call(op)), x)
        results = jax.jit(both(call(op)))(x)
    rows = ROWS // blocks(mesh, spec[0])
    assert_only_small_sums(forward, mesh, rows, ROW_OPS[op][0])
    assert_only_small_sums(backward, mesh, rows, ROW_OPS[op][1])
    assert_same(results, both_alone(op, mesh))
    for r in results:
        assert r.sharding.is_equivalent_to(x.sharding, 2)


@over_pairs("columns", [64, 40, 24], COLUMN_SPECS)
@pytest.mark.parametrize("op", ["relu", "add_relu"])
def test_relu_with_split_last_axis(mesh, op, columns, spec):
    """No collective where blocks hold whole bytes of the mask; right everywhere else too."""
    x = rand((ROWS, columns), 6)
    with scope(mesh):
        sharded = put(x, spec, mesh)
        program, results = hlo.run(both(call(op)), sharded)
    assert_same(results, alone(both(call(op)), x, mesh=mesh, key=("both", op, columns)))
    if columns % (8 * blocks(mesh, spec[1])) == 0:
        assert hlo.collectives(program) == []


@softmaxes
@pytest.mark.parametrize("spec", [P("d", None, "m"), P("d", "m", None), P(None, "m", "d")], ids=str)
def test_strided_axis(op, spec):
    """Softmax along an axis in the middle."""
    f = lambda x: getattr(jaxnorm, op)(x, axis=1)  # noqa: E731
    x = put(BATCHED, spec, AUTO)
    program, results = hlo.run(both(f), x)
    found = hlo.collectives(program)
    if spec[1] is None:
        assert found == []
    else:
        assert {c.kind for c in found} == {"all-reduce"}
        per_row = 4 * BATCH * COLUMNS // blocks(AUTO, spec[0]) // blocks(AUTO, spec[2])
        assert all(hlo.BYTES[t] * math.prod(s) <= per_row for c in found for t, s in c.arrays)
    assert_same(results, alone(both(f), BATCHED, key=("strided", op)))


# ---- vmap ----


@over_pairs("op", OPS, [P("d", None, None), P(None, "d", None), P("m", "d", None)])
def test_vmap_rows(mesh, op, spec):
    """Of the operation and of its gradient, and the gradient of the vmapped operation."""

    def f(x):
        mapped = jax.vmap(call(op))
        return mapped(x), jax.vmap(gradient(call(op)))(x), gradient(mapped)(x)

    with scope(mesh):
        x = put(BATCHED, spec, mesh)
        program, results = hlo.run(f, x)
    assert hlo.collectives(program) == []
    assert_same(results, alone(f, BATCHED, mesh=mesh, key=("vmap", op)))


@over([P("d", None, "m"), P(None, None, "m")])
@row_ops
def test_vmap_split_rows(mesh, op, spec):
    def f(x):
        return gradient(jax.vmap(call(op)))(x)

    with scope(mesh):
        x = put(BATCHED, spec, mesh)
        program, result = hlo.run(f, x)
    assert_only_small_sums(program, mesh, BATCH // blocks(mesh, spec[0]) * ROWS, 3)
    assert_same(result, alone(f, BATCHED, mesh=mesh, key=("gradient of vmap", op)))


@pytest.mark.parametrize("op", [op for op in OPS if op not in NORMS])
def test_vmap_over_the_last_axis(op):
    """The mapped axis is the minor one, so that softmax runs along a middle axis."""
    f = jax.vmap(call(op), in_axes=2, out_axes=2)
    x = put(BATCHED, P("d", None, "m"), AUTO)
    assert hlo.collectives(hlo.text(f, x)) == []
    assert_same(jax.jit(gradient(f))(x), alone(gradient(f), BATCHED))


# ---- operands that broadcast ----


@over_pairs(
    "operands_sharded",
    [True, False],
    [P("d", None), P(("d", "m"), None), P("d", "m"), P(None, "m")],
)
@softmaxes
def test_where_and_bias(mesh, op, spec, operands_sharded):
    """Masks of one row and of all rows, a bias of one column; sharded like x or on every device."""

    def place(a):
        entries = [e if n > 1 else None for e, n in zip(spec, a.shape, strict=True)]
        return put(a, P(*entries) if operands_sharded else P(None, None), mesh)

    def f(x, where, full, bias):
        function = getattr(jaxnorm, op)

        def total(x):
            y = function(x, where=where, bias=bias, scale=0.5)
            z = function(x, where=full)
            return jnp.where(where, y, 0) + jnp.where(full, z, 0)

        y, pullback = jax.vjp(total, x)
        return y, pullback(jnp.cos(x))

    operands = (WHERE, FULL_WHERE, BIAS)
    with scope(mesh):
        x, placed = put(X, spec, mesh), [place(a) for a in operands]
        program, results = hlo.run(f, x, *placed)
    assert_same(results, alone(f, X, *operands, mesh=mesh, key=("where and bias", op)))
    if spec[1] is None:
        assert hlo.collectives(program) == []
    else:
        assert_only_small_sums(program, mesh, ROWS // blocks(mesh, spec[0]), 6)


@softmaxes
def test_gradient_of_shared_bias(op):
    """The cotangent of a bias that all rows share is one all-reduce of its own size."""

    def f(x, bias):
        return jax.grad(lambda b: jnp.sum(jnp.sin(getattr(jaxnorm, op)(x, bias=b))))(bias)

    x, bias = put(X, P("d", None), AUTO), put(W[:1], P(None, None), AUTO)
    found = hlo.collectives(hlo.text(f, x, bias))
    assert {c.kind for c in found} == {"all-reduce"}
    assert sum(c.bytes for c in found) == 4 * COLUMNS
    assert_same(jax.jit(f)(x, bias), alone(f, X, W[:1]))


# ---- parameters of norms ----

SCALE, SHIFT = rand((COLUMNS,), 10), rand((COLUMNS,), 11)


def norm_with_everything(op, mask=None):
    """(x, residual, scale, bias) -> results and all gradients."""

    def f(x, residual, scale, bias):
        parameters = (scale, bias) if op == "layer_norm" else (scale,)

        def call(x, residual, *parameters):
            return getattr(jaxnorm, op)(x, *parameters, residual=residual, mask=mask)

        (y, s), pullback = jax.vjp(call, x, residual, *parameters)
        return y, s, pullback((jnp.cos(y), jnp.sin(s)))

    return f


@over_pairs("op", NORMS, ROW_SPECS)
@pytest.mark.parametrize("masked", [False, True])
def test_norm_parameters_with_whole_rows(mesh, op, spec, masked):
    """The kernels on each device's rows, and one all-reduce: of the parameters' gradients, together."""
    f = norm_with_everything(op, WHERE if masked else None)
    with scope(mesh):
        x, residual = put(X, spec, mesh), put(W, spec, mesh)
        scale, bias = put(SCALE, P(None), mesh), put(SHIFT, P(None), mesh)
        forward = hlo.text(lambda *a: f(*a)[:2], x, residual, scale, bias)
        program, results = hlo.run(f, x, residual, scale, bias)
    assert hlo.collectives(forward) == []
    (found,) = hlo.collectives(program)
    assert found.kind == "all-reduce"
    assert found.bytes == 4 * COLUMNS * (2 if op == "layer_norm" else 1)
    kernels = ["jaxnorm_norm_fwd", "jaxnorm_norm_bwd"]
    if has_kernels(mesh):
        assert [c.kind for c in hlo.custom_calls(program)] == kernels
    assert_same(
        results, alone(f, X, W, SCALE, SHIFT, mesh=mesh, key=("mask of one row", op, masked))
    )


@over_pairs("op", NORMS, COLUMN_SPECS)
@pytest.mark.parametrize("masked", [False, True])
def test_norm_parameters_with_split_rows(mesh, op, spec, masked):
    """Numbers per row, and parameters' gradients of the columns that a device holds."""
    f = norm_with_everything(op, FULL_WHERE if masked else None)
    with scope(mesh):
        x, residual = put(X, spec, mesh), put(W, spec, mesh)
        scale, bias = put(SCALE, P(spec[1]), mesh), put(SHIFT, P(spec[1]), mesh)
        program, results = hlo.run(f, x, residual, scale, bias)
    found = hlo.collectives(program)
    assert {c.kind for c in found} == {"all-reduce"}
    rows, columns = ROWS // blocks(mesh, spec[0]), COLUMNS // blocks(mesh, spec[1])
    assert sum(c.bytes for c in found) <= 4 * (7 * rows + 2 * columns)
    assert_same(
        results, alone(f, X, W, SCALE, SHIFT, mesh=mesh, key=("mask of all rows", op, masked))
    )


@over([P("d")])
@norms
def test_norm_parameters_per_example(mesh, op, spec):
    """Mapped parameters belong to their examples: where those are sharded, nothing is summed."""
    f = jax.vmap(norm_with_everything(op))
    scale, bias = rand((BATCH, COLUMNS), 12), rand((BATCH, COLUMNS), 13)
    residual = rand(BATCHED.shape, 14)
    with scope(mesh):
        args = [
            put(a, P(*spec, *(None,) * (a.ndim - 1)), mesh)
            for a in (BATCHED, residual, scale, bias)
        ]
        program, results = hlo.run(f, *args)
    assert hlo.collectives(program) == []
    assert_same(
        results, alone(f, BATCHED, residual, scale, bias, mesh=mesh, key=("per example", op))
    )


@norms
def test_norm_of_several_axes(op):
    """Both normalised axes may be cut."""
    scale = rand((ROWS, COLUMNS), 15)

    def f(x, scale):
        y, pullback = jax.vjp(lambda *a: getattr(jaxnorm, op)(*a, axis=(1, 2)), x, scale)
        return y, pullback(jnp.cos(x))

    expected = alone(f, BATCHED, scale)
    for spec in (P("d", None, None), P(None, "d", "m"), P("m", "d", None)):
        found = hlo.collectives(hlo.text(f, put(BATCHED, spec, AUTO), scale))
        assert {c.kind for c in found} <= {"all-reduce"}
        got = jax.jit(f)(put(BATCHED, spec, AUTO), put(scale, P(*spec[1:]), AUTO))
        assert_same(got, expected)


@norms
def test_parameters_of_bfloat16_are_summed_in_float32(op):
    """The sum over devices is rounded once: it is that of one device."""
    x, scale = rand((64, COLUMNS), 16, "bfloat16"), rand((COLUMNS,), 17, "bfloat16")

    def f(x, scale):
        return jax.grad(lambda s: jnp.sum(getattr(jaxnorm, op)(x, s).astype("float32") ** 2))(scale)

    found = hlo.collectives(hlo.text(f, put(x, P(("d", "m"), None), AUTO), put(scale, P(), AUTO)))
    assert [(c.kind, c.bytes) for c in found] == [("all-reduce", 4 * COLUMNS)]
    got = jax.jit(f)(put(x, P(("d", "m"), None), AUTO), put(scale, P(), AUTO))
    np.testing.assert_allclose(oracle.f64(got), oracle.f64(alone(f, x, scale)), rtol=2**-7)


@over([P("d", None)], ["auto"])
@norms
@pytest.mark.parametrize("check_vma", [True, False])
def test_norm_parameters_in_shard_map(mesh, op, spec, check_vma):
    """A scale that all devices share, next to an x that differs: its gradient is summed over them."""

    def loss(local):
        return lambda x, scale: jnp.sum(jnp.sin(local(x, scale)))

    f = lambda x, scale: getattr(jaxnorm, op)(x, scale)  # noqa: E731
    specs = {"in_specs": (spec, P()), "out_specs": spec}
    mapped = jax.shard_map(f, mesh=mesh, **specs, check_vma=check_vma)
    for g in (lambda h: h, lambda h: jax.grad(loss(h), (0, 1))):
        assert_same(jax.jit(g(mapped))(X, SCALE), alone(g(f), X, SCALE, mesh=mesh))


# ---- batch_norm ----

# Heights and widths of one image are 6 pixels; means are far from 0, so that sums of squares would not do.
IMAGES = rand((16, 6, 64), 20) + np.float32(50)
# Devices count different numbers of pixels, some of them none.
COUNTED = np.random.default_rng(21).random((16, 6, 1)) < np.linspace(-0.3, 1, 16).reshape(16, 1, 1)
IMAGE_SPECS = [
    P("d", None, None),
    P(("d", "m"), None, None),
    P("d", None, "m"),
    P(None, "m", None),
    P(None, None, "m"),
]


def batch_norm_with_everything(mask, axis=-1, **more):
    """(x, scale, bias, residual) -> results and all gradients."""

    def f(x, scale, bias, residual):
        def call(x, scale, bias, residual):
            kw = {"residual": residual, "activation": "relu", "mask": mask, "axis": axis}
            return jaxnorm.batch_norm(x, scale, bias, **kw, **more)

        (y, mean, var), pullback = jax.vjp(call, x, scale, bias, residual)
        return y, mean, var, pullback((jnp.cos(y), jnp.zeros_like(mean), jnp.zeros_like(var)))

    return f


def image_arguments(mesh, spec, columns=64):
    x = IMAGES[..., :columns]
    scale, bias = SCALE[:columns], SHIFT[:columns]
    whole = (x, scale, bias, rand(x.shape, 22))
    return whole, [put(a, spec if a.ndim == 3 else P(spec[2]), mesh) for a in whole]


def assert_same_images(sharded, alone):
    for got, want in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        # The mean is rounded, which 50 times its unit shows in everything else.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)


@over_pairs("masked", [False, True], IMAGE_SPECS)
def test_batch_norm(mesh, spec, masked):
    """One all-reduce forward, of two or three numbers per feature and device; one more backward, of two."""
    f = batch_norm_with_everything(COUNTED if masked else None)
    with scope(mesh):
        whole, args = image_arguments(mesh, spec)
        forward = hlo.text(lambda *a: f(*a)[:3], *args)
        program, results = hlo.run(f, *args)
    features = 64 // blocks(mesh, spec[2])
    devices = blocks(mesh, spec[0]) * blocks(mesh, spec[1])  # that share a feature
    numbers = 3 if masked else 2
    of_forward = [("all-reduce", 4 * devices * numbers * features)] * (devices > 1)
    of_backward = [("all-reduce", 4 * 2 * features)] * (devices > 1)
    assert [(c.kind, c.bytes) for c in hlo.collectives(forward)] == of_forward
    assert [(c.kind, c.bytes) for c in hlo.collectives(program)] == of_forward + of_backward
    kernels = [f"jaxnorm_batch_norm_{part}" for part in ("stats", "fwd", "sums", "dx")]
    if has_kernels(mesh):
        assert [c.kind for c in hlo.custom_calls(program)] == kernels
    assert_same_images(results, alone(f, *whole, mesh=mesh, key=("batch_norm", masked)))
    assert results[0].sharding.is_equivalent_to(args[0].sharding, 3)


@over([P("d", None, None), P("d", "m", None), P(None, "m", None)])
def test_batch_norm_channels_first(mesh, spec):
    """Features in the middle; the last axis, whose bits are packed, is cut."""
    f = batch_norm_with_everything(None, axis=1)
    x = np.ascontiguousarray(np.moveaxis(IMAGES, 1, 2))
    whole = (x, SCALE, SHIFT, rand(x.shape, 22))
    with scope(mesh):
        args = [put(a, spec if a.ndim == 3 else P(spec[1]), mesh) for a in whole]
        program, results = hlo.run(f, *args)
    count = 0 if spec[0] is None else 2
    assert [c.kind for c in hlo.collectives(program)] == ["all-reduce"] * count
    assert_same_images(results, alone(f, *whole, mesh=mesh, key="batch_norm, channels first"))


@over([P("d", None, "m"), P(None, None, "m")])
def test_batch_norm_with_torn_bytes(mesh, spec):
    """Where a device's features are not whole bytes of bits: the bits are summed, x is never gathered."""
    f = batch_norm_with_everything(None)
    with scope(mesh):
        whole, args = image_arguments(mesh, spec, 20)
        program, results = hlo.run(f, *args)
    assert {c.kind for c in hlo.collectives(program)} == {"all-reduce"}
    assert max(c.bytes for c in hlo.collectives(program)) < IMAGES[..., :20].nbytes // 8
    assert_same_images(results, alone(f, *whole, mesh=mesh, key="batch_norm, torn bytes"))


@over(IMAGE_SPECS)
def test_batch_norm_inference(mesh, spec):
    """No collective forward, nor in the gradient of x."""

    def f(x, scale, bias, residual):
        def call(x):
            mean, var = 50 + 0.1 * bias, scale**2 + 0.5
            return jaxnorm.batch_norm_inference(
                x, mean, var, scale, bias, residual=residual, activation="relu"
            )

        y, pullback = jax.vjp(call, x)
        return y, pullback(jnp.cos(y))

    with scope(mesh):
        whole, args = image_arguments(mesh, spec)
        program, results = hlo.run(f, *args)
    assert hlo.collectives(program) == []
    assert_same_images(results, alone(f, *whole, mesh=mesh, key="batch_norm_inference"))


@over(IMAGE_SPECS, ["auto"])
def test_batch_norm_of_statistics_and_second_derivative(mesh, spec):
    """Mean and variance have gradients on a mesh too; so does the gradient."""

    def loss(x, scale):
        y, mean, var = jaxnorm.batch_norm(x, scale)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(mean) * var)

    def f(x, scale):
        first = jax.grad(loss, (0, 1))
        return first(x, scale), jax.jvp(first, (x, scale), (jnp.cos(x), jnp.sin(scale)))[1]

    x = IMAGES - 50
    got = jax.jit(f)(put(x, spec, mesh), put(SCALE, P(spec[2]), mesh))
    assert_same_images(got, alone(f, x, SCALE, mesh=mesh, key="statistics"))


@over([P("d", None, None), P(("d", "m"), None, None)], ["auto"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_batch_norm_in_shard_map(mesh, spec, check_vma, masked):
    """With axis_name: statistics of all devices by one all-reduce; backward has one more."""

    def local(x, scale, bias, residual, mask):
        kw = {"mask": mask if masked else None, "axis_name": spec[0], "residual": residual}
        return jaxnorm.batch_norm(x, scale, bias, activation="relu", **kw)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, P(), P(), spec, spec),
        out_specs=(spec, P(), P()),
        check_vma=check_vma,
    )
    mask = np.broadcast_to(COUNTED, (16, 6, 1))

    def forward(*args):
        return mapped(*args, put(mask, spec, mesh))

    def everything(*args):
        (y, mean, var), pullback = jax.vjp(forward, *args)
        zeros = jnp.zeros_like(mean), jnp.zeros_like(var)
        return y, mean, var, pullback((jnp.cos(y), *zeros))

    whole, args = image_arguments(mesh, spec)
    found = [(c.kind, c.bytes) for c in hlo.collectives(hlo.text(forward, *args))]
    devices = blocks(mesh, spec[0])
    assert found == [("all-reduce", 4 * devices * 64 * (3 if masked else 2))]
    if check_vma or devices == mesh.size:  # without, shard_map sums cotangents over the other axis
        found = [(c.kind, c.bytes) for c in hlo.collectives(hlo.text(everything, *args))][1:]
        # Without varying axes shard_map itself sums the parameters' gradients.
        assert sum(size for _, size in found) == 4 * 2 * 64 * (1 if check_vma else 2)
        assert {kind for kind, _ in found} == {"all-reduce"}
        assert len(found) == 1 or not check_vma
    f = batch_norm_with_everything(COUNTED if masked else None)
    expected = alone(f, *whole, mesh=mesh, key=("batch_norm", masked))
    assert_same_images(jax.jit(everything)(*args), expected)


@over([P("d", None, None)], ["auto"])
def test_batch_norm_without_axis_name_in_shard_map(mesh, spec):
    """Each device has statistics of its own."""
    f = lambda x: jaxnorm.batch_norm(x)  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=(spec, P("d"), P("d")))
    program = hlo.text(mapped, put(IMAGES, spec, mesh))
    assert hlo.collectives(program) == []
    y, mean, _ = jax.jit(mapped)(IMAGES)
    devices = mesh.shape["d"]
    for i, own in enumerate(np.split(IMAGES, devices)):
        own_y, own_mean, _ = f(own)
        np.testing.assert_allclose(np.split(y, devices)[i], own_y, atol=1e-3)
        np.testing.assert_allclose(mean[64 * i : 64 * i + 64], own_mean, rtol=1e-6)


@pytest.mark.parametrize("grouped", [False, True])
def test_batch_norm_in_pmap(grouped):
    """Over all devices, or within groups of them; forward and gradient."""
    x = (IMAGES - 48).reshape(8, 2, 6, 64)
    groups = [[0, 3], [1, 2], [7, 4], [5, 6]] if grouped else None

    def local(x):
        def loss(x):
            y, mean, var = jaxnorm.batch_norm(x, axis_name="i", axis_index_groups=groups)
            # Devices of a group have one mean: each adds half of what depends on it.
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var) / (2 if grouped else 8)

        return *jaxnorm.batch_norm(x, axis_name="i", axis_index_groups=groups), jax.grad(loss)(x)

    y, mean, var, bar = jax.pmap(local, "i", devices=CPUS[:8])(x)
    for group in groups or [list(range(8))]:
        whole = jnp.concatenate([x[i] for i in group])

        def loss(x):
            y, mean, var = jaxnorm.batch_norm(x)
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var)

        wanted = *jaxnorm.batch_norm(whole), jax.grad(loss)(whole)
        for place, i in enumerate(group):
            rows = slice(2 * place, 2 * place + 2)
            got = y[i], mean[i], var[i], bar[i]
            want = wanted[0][rows], wanted[1], wanted[2], wanted[3][rows]
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@over([P(("d", "m"), None, None), P("d", None, None)], ["auto"])
def test_batch_norm_is_the_same_on_every_device(mesh, spec):
    """Statistics are equal to the bit, whatever the order in which an all-reduce adds."""

    def local(x):
        _, mean, var = jaxnorm.batch_norm(x, axis_name=spec[0])
        return mean[None], var[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P(spec[0]), check_vma=False)
    for value in jax.jit(mapped)(put(IMAGES, spec, mesh)):
        np.testing.assert_array_equal(value, np.broadcast_to(value[:1], value.shape))


# ---- inside programs ----


@ops
def test_between_matrix_products(op):
    """Sharding propagates through the operation: no gather of activations."""
    w = rand((COLUMNS, COLUMNS), 8)

    def f(x, w):
        return jnp.sum(jnp.sin(call(op)(x @ w)) @ w)

    g = jax.grad(f, (0, 1))
    x, wd = put(X, P("d", None), AUTO), put(w, P(None, None), AUTO)
    program, results = hlo.run(g, x, wd)
    found = hlo.collectives(program)
    assert {c.kind for c in found} <= {"all-reduce"}
    assert sum(c.bytes for c in found) <= 2 * 4 * w.size  # the two weight gradients
    assert_same(results, alone(g, X, w))


@ops
def test_scan_and_remat(op):
    def f(x):
        body = jax.checkpoint(lambda c, _: (jnp.sin(call(op)(c)), None))
        return jax.grad(lambda x: jnp.sum(jax.lax.scan(body, x, None, length=3)[0]))(x)

    x = put(X, P("d", None), AUTO)
    program, result = hlo.run(f, x)
    assert hlo.collectives(program) == []
    assert_same(result, alone(f, X))


@ops
def test_second_derivative(op):
    g = gradient(lambda x: gradient(call(op))(x))
    expected = alone(g, X)
    for spec in (P("d", None), P("d", "m")):
        assert_same(jax.jit(g)(put(X, spec, AUTO)), expected)


@over([P("d", None)])
@ops
def test_set_mesh(mesh, op, spec):
    """Only jax.set_mesh says where the program runs; the constraint is inside."""

    def f(x):
        if AxisType.Auto in mesh.axis_types:
            x = jax.lax.with_sharding_constraint(x, spec)
        else:
            x = jax.sharding.reshard(x, spec)
        return both(call(op))(x)

    with jax.set_mesh(mesh):
        program, results = hlo.run(f, X)
        if AxisType.Explicit in mesh.axis_types:
            assert all(jax.typeof(r).sharding.spec == spec for r in results)
    assert hlo.collectives(program) == []
    assert_same(results, both_alone(op, mesh))


@over(ROW_SPECS, ["auto"])
@ops
def test_eager(mesh, op, spec):
    """Without jit, and with the result's sharding."""
    x = put(X, spec, mesh)
    y = call(op)(x)
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    assert_same(y, alone(call(op), X, mesh=mesh, key=op))


@ops
def test_replicated_and_unsharded(op):
    for sharding in (NamedSharding(AUTO, P(None, None)), CPUS[3]):
        x = jax.device_put(X, sharding)
        program, results = hlo.run(both(call(op)), x)
        assert hlo.collectives(program) == []
        assert_same(results, both_alone(op))


@over([P("d", None), P("d", "m"), P(None, "m")], ["auto"])
@ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(mesh, op, spec, dtype):
    x = rand((ROWS, COLUMNS), 9, dtype)
    results = jax.jit(both(call(op)))(put(x, spec, mesh))
    expected = alone(both(call(op)), x, mesh=mesh, key=("both", op, dtype))
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == dtype
        tolerance = 64 * oracle.UNIT[dtype]
        np.testing.assert_allclose(
            oracle.f64(got), oracle.f64(want), rtol=tolerance, atol=tolerance
        )


# ---- parts of a softmax's rows ----


OPERANDS = [(), ("where",), ("scale",), ("where", "scale"), ("where", "scale", "bias")]
operands_of_softmax = pytest.mark.parametrize("names", OPERANDS, ids="-".join)


def special_rows(names, columns, dtype="float32"):
    """These operands and x, by name. Rows are masked or infinite in one device's part, in several, or altogether."""
    x, where = rand((ROWS, columns), 40), np.ones((ROWS, columns), bool)
    half, last = columns // 2, columns - 1
    x[0, :half] = x[1] = x[2, half:] = x[3, 1:] = x[4, :last] = -np.inf
    x[5, 1], x[6, last] = np.nan, np.inf
    if not {"scale", "bias"}.intersection(names):
        x[7] = jnp.finfo(dtype).min
    where[8, :half] = where[9, half:] = where[10] = where[11, 1:] = where[12, :last] = False
    x[8:11, :3] = np.nan, np.inf, -np.inf  # those of one row are not masked
    x[13, :half] -= 200  # a part that adds nothing
    scale, bias = rand((1, columns), 41) + 3, rand((ROWS, 1), 42)
    given = {"x": x, "where": where, "scale": scale, "bias": bias}
    return {
        name: given[name] if name == "where" else given[name].astype(np.dtype(dtype))
        for name in ("x", *names)
    }


@over([P("d", "m"), P(None, ("d", "m"))], ["auto"])
@softmaxes
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS - 15])
@operands_of_softmax
def test_special_rows_in_parts(mesh, op, spec, columns, names):
    """Values and gradients are the oracle's, where one of eight devices has none of 49 columns, too."""
    given = special_rows(names, columns)

    def placed(a):
        if a.shape[1] > 1:  # what is cut away again
            fill = True if a.dtype == bool else np.nan
            a = np.pad(a, ((0, 0), (0, COLUMNS - columns)), constant_values=fill)
        return put(a, P(*(e if n > 1 else None for e, n in zip(spec, a.shape, strict=True))), mesh)

    def f(t, operands):
        t, (x, *operands) = jax.tree.map(lambda a: a[:, :columns], (t, operands))
        options = dict(zip(names, operands, strict=True))
        y, pullback = jax.vjp(lambda x: getattr(jaxnorm, op)(x, **options), x)
        return y, pullback(t)[0]

    t = W[:, :columns]
    y, x_bar = jax.jit(f)(placed(t), list(map(placed, given.values())))
    oracle.assert_close(y, getattr(oracle, op)(**given), "float32", floor=16)
    wanted = oracle.softmax_vjp(ct=t, log=op == "log_softmax", **given)[0]
    np.testing.assert_allclose(x_bar, wanted, rtol=2e-5, atol=1e-5)


@softmaxes
def test_masked_part_beside_large_values_times_zero(op):
    """The factor 0 makes every distance 0, also that from the maximum of a part where there is nothing."""
    x, where = np.full((ROWS, COLUMNS), 3e38, np.float32), np.arange(COLUMNS)[None] < COLUMNS // 2
    f = lambda x, where: getattr(jaxnorm, op)(x, where=where, scale=0.0)  # noqa: E731
    y = jax.jit(f)(*(put(a, P(None, "m"), AUTO) for a in (x, where)))
    oracle.assert_close(y, getattr(oracle, op)(x, where=where, scale=0.0), "float32")


class Parts:
    """What each of eight devices has where these cut the last axis of an array."""

    def __init__(self, shape):
        tiles = np.arange(8).reshape(*[1] * (len(shape) - 1), 8, 1)
        self.blocks, self.axes = Blocks(shape, tiles), (len(shape) - 1,)
        self.columns = self.blocks.size(self.axes[0])

    def forward(self, *operands, **params):
        return softmax._fwd_on_part(*operands, axes=self.axes, blocks=self.blocks, **params)

    def backward(self, *operands, **params):
        return softmax._bwd_on_part(*operands, axes=self.axes, blocks=self.blocks, **params)

    def cut(self, a):
        """Parts of a matrix with all columns, one behind the other, with NaN or True for padding."""
        padding = self.columns * 8 - a.shape[1]
        fill = True if a.dtype == bool else np.nan
        padded = np.pad(a, ((0, 0), (0, padding)), constant_values=fill)
        return jnp.asarray(padded.reshape(len(a), 8, -1).swapaxes(0, 1))

    def joined(self, parts):
        whole = np.asarray(parts).swapaxes(0, 1).reshape(parts.shape[1], -1)
        return whole[:, : self.blocks.shape[1]]

    def on_each(self, function, *parts):
        """One result of a function of parts, or of matrices of one column, which all devices have."""
        mapped = [0 if a.ndim == 3 else None for a in parts]
        return jax.vmap(function, mapped, axis_name=DEVICES)(*parts)[0]


@pytest.mark.parametrize("shape", [(ROWS, 64), (ROWS, 49), (2, 2, 4, 64), (2, 2, 4, 49)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@operands_of_softmax
def test_programs_of_parts(shape, dtype, names):
    """Two row programs forward, two backward, and between them reductions of a number per row: XLA reads no part."""
    parts, rows = Parts(shape), math.prod(shape[:-1])
    local = (*shape[:-1], parts.columns)
    kinds = {
        "x": (local, dtype),
        "where": (local, bool),
        "scale": ((*[1] * len(shape[1:]), local[-1]), dtype),
        "bias": ((*shape[:-1], 1), dtype),
    }
    forward = [jax.ShapeDtypeStruct(*kinds[name]) for name in ("x", *names)]
    mask = [jax.ShapeDtypeStruct(*kinds["where"])] if "where" in names else []
    results = forward[0]

    def steps(function, *operands):
        """Row programs and collectives, in their order."""
        found = []
        for eqn in jax.make_jaxpr(function, axis_env=[(DEVICES, 8)])(*operands).eqns:
            if eqn.primitive is primitive.row_program_p:
                found.append("kernel")
                row_call(eqn.params["jaxpr"], GPUS[90])
                continue
            if eqn.primitive.name in ("pmax", "psum"):
                found.append(eqn.primitive.name)
            sizes = [v.aval.size for v in (*eqn.invars, *eqn.outvars)]
            assert max(sizes) <= max(rows, parts.columns), eqn
        return found

    for log in (False, True):
        f = functools.partial(parts.forward, names=("x", *names), factor=0.5, log=log)
        assert steps(f, *forward) == ["kernel", "pmax", "psum", "kernel"]
    for form in (softmax.SOFTMAX, softmax.LOG_JVP, softmax.LOG_VJP):
        f = functools.partial(parts.backward, factor=0.5, form=form)
        assert steps(f, results, results, *mask) == ["kernel", "psum", "kernel"]


@pytest.mark.skipif(not row_emulator.supported(), reason="kernels run on the CPU with g++ on Linux")
@pytest.mark.parametrize("log", [False, True])
@operands_of_softmax
def test_kernels_of_parts(log, names, monkeypatch):
    """The kernels' text, run on a CPU: values, tangents and gradients of rows that eight devices cut unevenly."""
    row_emulator.launch_row_programs(monkeypatch, fallback=True)
    # Every set of operands and either function have both dtypes, in turn.
    dtype = ("bfloat16", "float32")[(OPERANDS.index(names) + log) % 2]
    columns, floor = 49, 16 if dtype == "float32" else 2  # a bfloat16 is rounded once
    given, t = special_rows(names, columns, dtype), rand((ROWS, columns), 43, dtype)
    parts = Parts((ROWS, columns))
    cut = [parts.cut(a) if a.shape[1] > 1 else a for a in given.values()]
    forward = functools.partial(parts.forward, names=tuple(given), factor=1.0, log=log)
    with jax.disable_jit():
        y = parts.on_each(forward, *cut)
    wanted = (oracle.log_softmax if log else oracle.softmax)(**given)
    oracle.assert_close(parts.joined(y), wanted, dtype, floor=floor)

    mask = [parts.cut(given["where"])] if "where" in names else []
    keep = given.get("where", True)
    y64, t64 = oracle.f64(parts.joined(y)), np.where(keep, oracle.f64(t), 0)
    p = np.exp(y64) if log else y64
    for form in (softmax.LOG_JVP, softmax.LOG_VJP) if log else (softmax.SOFTMAX,):
        backward = functools.partial(parts.backward, factor=0.5, form=form)
        with jax.disable_jit():
            got = parts.on_each(backward, y, parts.cut(t), *mask)
        outer, inner = (1, p) if form == softmax.LOG_JVP else (p, 1) if log else (p, p)
        first = t64 if log else p * t64
        second = outer * np.sum(inner * t64, 1, keepdims=True)
        wanted = np.where(keep, 0.5 * (first - second), 0)
        size = np.abs(first) + outer * np.sum(inner * np.abs(t64), 1, keepdims=True)
        size = np.where(np.isfinite(size), size, 0)
        oracle.assert_close(parts.joined(got), wanted, dtype, floor=floor, size=size)


# ---- sizes that devices do not divide ----


def _linen_averages(x):
    module = jaxnorm.linen.BatchNorm(use_running_average=False, momentum=0.5)
    _, variables = module.init_with_output(jax.random.key(0), x[:5].astype("float32"))
    return jax.tree.leaves(variables["batch_stats"])


def _strided_convolution(x):
    kernel = jnp.ones((2, 2), x.dtype)[:, :, None, None]
    y = jax.lax.conv_general_dilated(
        x[None, ..., None], kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jaxnorm.batch_norm(y)


def _max_pooling(x):
    y = jax.lax.reduce_window(x, -np.inf, jax.lax.max, (2, 1), (2, 1), "VALID")
    return jaxnorm.layer_norm(y, axis=0), jaxnorm.batch_norm(y)


def _padded_vocabulary(x):
    """As optax has it, which autofuse replaces."""
    logits = x.T[:, :5]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.full((2, 1), 3), 1)


def _keys_in_use(x):
    return jax.nn.softmax(x.T[:, :5], where=jnp.arange(5) < jnp.array([[4], [5]]))


UNEVEN = {
    "softmax": lambda x: jaxnorm.softmax(x[:5], axis=0),
    "cross-entropy": lambda x: jaxnorm.softmax_cross_entropy(x[:5], jnp.array([0, 4]), axis=0),
    "batch_norm": lambda x: jaxnorm.batch_norm(x[:5]),
    "batch_norm, masked": lambda x: jaxnorm.batch_norm(x[:5], mask=jnp.arange(5)[:, None] % 2 == 0),
    "batch_norm, relu": lambda x: jaxnorm.batch_norm(x[:5].T, activation="relu", axis=0),
    "layer_norm": lambda x: jaxnorm.layer_norm(x[:5], axis=0),
    "parameters": lambda x: jax.grad(lambda s: jnp.sum(jaxnorm.layer_norm(x[:5], s, s) ** 2))(
        jnp.ones(2)
    ),
    "relu": lambda x: jaxnorm.relu(x[:5].T),
    "constraint": lambda x: jaxnorm.batch_norm(x[:1]),
    "running averages": _linen_averages,
    "strided convolution": _strided_convolution,
    "max pooling": _max_pooling,
    "autofuse, padded vocabulary": jaxnorm.autofuse(_padded_vocabulary),
    "autofuse, keys in use": jaxnorm.autofuse(_keys_in_use),
}


@over([P("d"), P("m"), P(("d", "m"))], ["auto"])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven(mesh, spec, name):
    """What is cut away does not count, nor does the padding of blocks: values and gradients are those of one device."""
    x = rand((8, 2), 30).astype("float64") + 3
    x[5:] = 1e3
    f = UNEVEN[name]

    def everything(x):
        leaves = [a for a in jax.tree.leaves(f(x)) if jnp.issubdtype(a.dtype, jnp.floating)]
        return leaves, jax.grad(lambda x: sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(f(x))))(
            x
        )

    got = jax.jit(everything)(put(x, spec, mesh))
    want = alone(everything, x, mesh=mesh, key=("uneven", name))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@over([P("d"), P(("d", "m"))], ["auto"])
@ops
def test_reshape_that_splits_a_sharded_axis(mesh, spec, op):
    """No dimension has as many elements as there are devices: XLA cuts several."""
    f = both(lambda x: call(op)(x.reshape(2, 2, 2, 5)))
    x = rand((8, 5), 31)
    program = lambda x: f(x)  # noqa: E731
    assert_same(
        jax.jit(program)(put(x, spec, mesh)), alone(program, x, mesh=mesh, key=("split", op))
    )


@over([P(None, "d"), P("d", "m")], ["explicit"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "batch_norm", "batch_norm_inference"])
def test_gradient_of_whole_parameters_of_cut_features(mesh, spec, op):
    """On an Explicit mesh a cotangent lies where its argument does."""

    def f(x, scale):
        if op == "batch_norm_inference":
            return jaxnorm.batch_norm_inference(x, scale * 0.5, scale * scale + 1, scale)
        y = getattr(jaxnorm, op)(x, scale)
        return y[0] if op == "batch_norm" else y

    g = jax.grad(lambda x, scale: jnp.sum(jnp.sin(f(x, scale))), 1)
    with scope(mesh):
        got = g(put(X, spec, mesh), put(SCALE, P(None), mesh))
        assert jax.typeof(got).sharding.spec == P(None)
    assert_same(got, alone(g, X, SCALE, mesh=mesh, key=("whole parameters", op)))


# ---- shard_map ----


@over([P("d", None)], ["auto"])
@ops
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh, op, spec, check_vma):
    """All axes manual: every device calls the kernel on its block."""

    def mapped(x):
        kw = {"mesh": mesh, "in_specs": spec, "out_specs": spec}
        return jax.shard_map(call(op), **kw, check_vma=check_vma)(x)

    x = put(X, spec, mesh)
    program, result = hlo.run(mapped, x)
    assert hlo.collectives(program) == []
    if "softmax" in op and has_kernels(mesh):
        (only,) = hlo.custom_calls(program)
        assert only.arrays == (("f32", (ROWS // mesh.shape["d"], COLUMNS)),)
    assert_same(result, alone(call(op), X, mesh=mesh, key=op))

    def derivatives(f):
        return lambda x: (both(f)(x), gradient(gradient(f))(x))

    assert_same(
        jax.jit(derivatives(mapped))(x),
        alone(derivatives(call(op)), X, mesh=mesh, key=("derivatives", op)),
    )


@over([P("d", None)], ["auto"])
@ops
def test_gradient_inside_shard_map(mesh, op, spec):
    """The gradient of an operand that all devices share is summed over them."""

    def local(x, b):
        return jax.grad(lambda b: jnp.sum(jnp.sin(call(op)(x + b))))(b)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=P())
    b = W[:1]
    assert_same(jax.jit(mapped)(X, b), alone(local, X, b, mesh=mesh))


@softmaxes
def test_operands_of_different_variance(op):
    """`where` and `bias` that every device has, next to an x that differs."""

    def local(x, where, bias):
        y = getattr(jaxnorm, op)(x, where=where, bias=bias)
        return jnp.where(where, y, 0)

    specs = (P("d", None), P(), P())
    mapped = jax.shard_map(local, mesh=AUTO, in_specs=specs, out_specs=P("d", None))
    args = (X, WHERE, W[:1])
    assert_same(jax.jit(mapped)(*args), alone(local, *args))
    f, g = (
        lambda x, bias, h=h: jax.grad(lambda x, b: jnp.sum(jnp.sin(h(x, WHERE, b))), (0, 1))(
            x, bias
        )
        for h in (mapped, local)
    )
    assert_same(jax.jit(f)(X, W[:1]), alone(g, X, W[:1]))


def test_shard_map_with_some_axes_manual():
    """Runs in a process of its own: XLA aborts when a partitioned call appears here."""
    results = processes.run("partial_manual", env=processes.eight_devices())
    tested = (*OPS, "batch_norm")
    assert results["checked"] == [f"{op} {spec}" for op in tested for spec in ("d,None", "d,m")]


# ---- processes ----


@pytest.mark.parametrize("program", ["single", "sharded", "shard_map"])
def test_persistent_cache(program, tmp_path):
    """A second process compiles nothing."""
    env = {
        **processes.eight_devices(),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if program == "sharded":  # documented: the partitioner is identified by its address otherwise
        env["JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"] = "1"
    first = processes.run("cache", program, env=env)
    second = processes.run("cache", program, env=env)
    assert first["hits"] == 0
    assert first["misses"] > 0
    assert second["misses"] == 0
    assert second["hits"] == first["misses"]
    assert second["result"] == first["result"]


def test_two_processes():
    """jax.distributed over CPU: results equal to those of one process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    running = [processes.start("distributed", rank, port, env=env) for rank in range(2)]
    try:
        results = [processes.finish(p) for p in running]
    finally:
        for p in running:
            p.kill()
    for r in results:
        assert r["processes"] == 2
        assert r["devices"] == 4
        assert sorted(r["errors"]) == sorted((*OPS, "batch_norm", "batch_norm in shard_map"))
        assert all(error < 1e-5 for error in r["errors"].values()), r["errors"]


def test_collectives_are_found():
    """The parser sees what it must: a gather, and a reduction with its size."""
    x = put(X, P("d", None), AUTO)
    gathered = hlo.text(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(AUTO, P())), x)
    assert {c.kind for c in hlo.collectives(gathered)} == {"all-gather"}
    (total,) = hlo.collectives(hlo.text(lambda x: jnp.sum(x, 0), x))
    assert (total.kind, total.bytes) == ("all-reduce", 4 * COLUMNS)
    assert suite.jaxnorm_primitives(call("softmax"), X) == {"jaxnorm_softmax_fwd": 1}
