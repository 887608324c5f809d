"""jax.export: round trips, symbolic shapes, other platforms, several devices."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from suite import CUDA, OPS, in_turn

import jaxnorm

ops = pytest.mark.parametrize("op", OPS)


def value_and_grad(op):
    function = OPS[op].function
    return lambda *args: (function(*args), jax.grad(lambda *a: jnp.sum(function(*a) ** 2))(*args))


def round_trip(function, *args, **kw):
    exported = export.export(jax.jit(function), disabled_checks=jaxnorm.export_checks(), **kw)(
        *args
    )
    return exported, export.deserialize(exported.serialize())


def structs(args, shapes=None):
    shapes = shapes or [a.shape for a in args]
    return [jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, args, strict=True)]


def assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("op", "dtype"), [(op.name, dtype) for op in OPS.values() for dtype in op.dtypes]
)
def test_round_trip(op, dtype):
    """Forward and gradient; the result is the same to the bit."""
    args = OPS[op].arguments(dtype)
    _, loaded = round_trip(value_and_grad(op), *args)
    assert_same(loaded.call(*args), jax.jit(value_and_grad(op))(*args))


@ops
def test_differentiated_after_loading(op):
    """The exported artifact carries its own first and second derivative."""
    args = OPS[op].arguments("float32")
    exported = export.export(jax.jit(OPS[op].function), disabled_checks=jaxnorm.export_checks())(
        *args
    )
    loaded = export.deserialize(exported.serialize(vjp_order=2))
    for f in (
        lambda f: jax.grad(lambda *a: jnp.sum(f(*a) ** 2)),
        lambda f: jax.grad(lambda *a: jnp.sum(jax.grad(lambda *a: jnp.sum(f(*a) ** 2))(*a) ** 2)),
    ):
        both = [f(g) for g in (loaded.call, OPS[op].function)]
        actual, expected = jax.jit(lambda *a, both=both: [g(*a) for g in both])(*args)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "op", ["softmax", "log_softmax", "relu", "add_relu", "layer_norm", "rms_norm"]
)
@pytest.mark.parametrize("shape", ["b, 7", "b, 3, 8*c", "2, 3, b"])
def test_symbolic_shapes(op, shape):
    """One artifact for every batch and every length."""
    function = getattr(jaxnorm, op)
    if "norm" in op:  # so that rows of one element have moderate derivatives
        function = functools.partial(function, epsilon=0.25)
    count = len(OPS[op].shapes)
    dims = export.symbolic_shape(shape)
    symbolic = [
        jax.ShapeDtypeStruct(dims[-1:] if i and "norm" in op else dims, np.float32)
        for i in range(count)
    ]

    def both(*args):
        argnums = tuple(range(count))
        return function(*args), *jax.grad(lambda *a: jnp.sum(function(*a) ** 2), argnums)(*args)

    _, loaded = round_trip(both, *symbolic)
    for size in (1, 5, 8):
        concrete = tuple(
            d if isinstance(d, int) else {"b": size, "8*c": 8 * size}[str(d)] for d in dims
        )
        shapes = [concrete[-len(s.shape) :] for s in symbolic]
        args = [
            np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate(shapes)
        ]
        for got, want in zip(loaded.call(*args), jax.jit(both)(*args), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6)


def test_symbolic_where():
    b = export.symbolic_shape("b")[0]
    x = jax.ShapeDtypeStruct((b, 5), np.float32)
    where = jax.ShapeDtypeStruct((b, 1), np.bool_)

    def f(x, where):
        return jax.grad(lambda x: jnp.sum(jaxnorm.softmax(x, where=where) ** 2))(x)

    _, loaded = round_trip(f, x, where)
    args = np.ones((3, 5), np.float32), np.array([[True], [False], [True]])
    assert_same(loaded.call(*args), f(*map(jnp.asarray, args)))


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_symbolic_sizes_that_turn_out_to_be_0(op):
    """No rows: gradients of parameters are 0. No columns: nothing is left."""
    dims = export.symbolic_shape("b - 1, c - 1")
    symbolic = [jax.ShapeDtypeStruct(d, np.float32) for d in (dims, dims[1:])]

    def f(x, scale):
        y, pullback = jax.vjp(getattr(jaxnorm, op), x, scale)
        return y, *pullback(y)

    _, loaded = round_trip(f, *symbolic)
    for shape in ((0, 5), (3, 0), (0, 0)):
        x, scale = np.ones(shape, np.float32), np.ones(shape[1:], np.float32)
        y, x_bar, scale_bar = loaded.call(x, scale)
        assert y.shape == x_bar.shape == shape
        np.testing.assert_array_equal(scale_bar, np.zeros(shape[1:]))


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_symbolic_batch_norm(axis, masked):
    """Any batch and any number of features; of an empty batch, statistics are NaN and gradients 0."""
    dims = export.symbolic_shape("b - 1, c, 5" if axis == 1 else "b - 1, 3, c")
    symbolic = [jax.ShapeDtypeStruct(d, np.float32) for d in (dims, (dims[axis],))]
    mask = jax.ShapeDtypeStruct((dims[0], 1, 1), np.bool_)

    def f(x, scale, mask):
        kw = {"axis": axis, "activation": "relu", "mask": mask if masked else None}
        out, pullback = jax.vjp(lambda *a: jaxnorm.batch_norm(*a, **kw), x, scale)
        return out, pullback((jnp.cos(out[0]), jnp.zeros_like(out[1]), jnp.zeros_like(out[2])))

    _, loaded = round_trip(f, *symbolic, mask)
    # The formula, which the module for another platform holds.
    assert round_trip(f, *symbolic, mask, platforms=("tpu",))[1].platforms == ("tpu",)
    for b, c in ((1, 9), (6, 9), (4, 1)):
        shape = tuple(d if isinstance(d, int) else {"c": c}.get(str(d), b - 1) for d in dims)
        rng = np.random.default_rng(b)
        x, scale = rng.standard_normal(shape, np.float32), np.ones(c, np.float32)
        args = (x, scale, np.arange(b - 1).reshape(-1, 1, 1) != 1)
        (y, mean, _), bars = got = loaded.call(*args)
        if b == 1:
            assert y.shape == bars[0].shape == shape
            assert np.isnan(mean).all()
            np.testing.assert_array_equal(bars[1], np.zeros(c))
            continue
        for a, w in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(f)(*args)), strict=True):
            np.testing.assert_allclose(a, w, rtol=1e-5, atol=1e-5)


# Operations with options have no rule of their own for a platform: of those without kernels one is enough.
@pytest.mark.parametrize(
    ("op", "platforms"),
    [
        (op, platforms)
        for op in OPS
        for platforms in (("tpu",), ("rocm",), ("cuda",), ("cpu", "cuda", "tpu"))
        if op in jaxnorm.__all__ or platforms != ("rocm",)
    ],
)
def test_other_platforms(op, platforms):
    """Exports without a device of that kind; what has no kernels gets the formula."""
    args = OPS[op].arguments("float32")
    with warnings.catch_warnings():
        if not CUDA.available and "cuda" in platforms:  # tests/test_lib.py tests the warning
            warnings.filterwarnings("ignore", "jaxnorm: no cuda kernels", RuntimeWarning)
        exported, loaded = round_trip(value_and_grad(op), *args, platforms=platforms)
    assert loaded.platforms == platforms
    module = exported.mlir_module()
    if platforms in (("tpu",), ("rocm",)):
        assert "jaxnorm_" not in "".join(
            line for line in module.splitlines() if "custom_call" in line
        )
    if "cpu" in platforms:
        assert_same(loaded.call(*args), jax.jit(value_and_grad(op))(*args))


@ops
def test_needs_no_checks_where_no_kernel_is_called(op):
    args = OPS[op].arguments("float32")
    export.export(jax.jit(value_and_grad(op)), platforms=("tpu",))(*args).serialize()


def test_export_checks_name_every_target():
    names = {check.is_custom_call() for check in jaxnorm.export_checks()}
    targets = set().union(*(m.targets for m in jaxnorm.status().modules))
    assert names == {f"jaxnorm_{t}" for t in targets}


@in_turn(
    op=["softmax", "log_softmax", "relu", "add_relu", "layer_norm", "rms_norm", "batch_norm"],
    spec=[P("d", None), P("d", "m"), P(None, "m")],
    kind=[AxisType.Auto, AxisType.Explicit],
)
def test_eight_devices(op, spec, kind):
    """A sharded program is exported with the formula, which XLA partitions."""
    mesh = jax.make_mesh(
        (4, 2), ("d", "m"), axis_types=(kind, kind), devices=jax.devices("cpu")[:8]
    )
    function = getattr(jaxnorm, op)

    def f(x):
        args = (x, x * 0.5) if op == "add_relu" else (x,)
        first = lambda y: y[0] if op == "batch_norm" else y  # noqa: E731
        return jax.grad(lambda *a: jnp.sum(jnp.sin(first(function(*a)))))(*args)

    x = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    exported, loaded = round_trip(f, sharded, platforms=("cpu",))
    assert exported.nr_devices == loaded.nr_devices == 8
    result = jax.jit(loaded.call)(sharded)
    np.testing.assert_allclose(result, f(x), rtol=1e-5, atol=1e-6)


def test_suite_covers_every_operation():
    others = {"autofuse", "export_checks", "fuse", "status"}
    # linear_cross_entropy is no operation along rows; its tests have transformations of their own.
    others |= {"linear_cross_entropy"}
    assert set(jaxnorm.__all__) - others <= set(OPS)
    assert suite.TRANSFORMATIONS
