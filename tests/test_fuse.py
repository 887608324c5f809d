"""jaxnorm.fuse without a GPU: values, transformations, derivatives, pytrees, errors, and what backward keeps."""

import contextlib
import copy
import functools
import io
import pickle
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import suite
from jax import export
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from meshes import AUTO, EXPLICIT, put, scope
from suite import TRANSFORMATIONS

import jaxnorm
from jaxnorm._rows import primitive, save
from jaxnorm._rows.call import row_call
from jaxnorm._rows.equations import NotARowProgram
from jaxnorm._rows.plan import DEVICES
from jaxnorm._rows.rules import program_of

PROGRAM, TANGENT = "jaxnorm_row_program", "jaxnorm_row_tangent"
# On a GPU: a derivative, or one under vmap, may be no row program, which is said.
derived_may_be_plain = pytest.mark.filterwarnings(
    "ignore:jaxnorm. a row program runs as plain XLA operations. fuse. :RuntimeWarning"
)


def layer_norm(x, scale=None):
    """In float32, as models write it."""
    wide = x.astype(oracle_dtype(x))
    mean = wide.mean(-1, keepdims=True)
    var = ((wide - mean) ** 2).mean(-1, keepdims=True)
    y = (wide - mean) * jax.lax.rsqrt(var + np.asarray(0.25, wide.dtype))
    y = y if scale is None else y * scale.astype(wide.dtype)
    return y.astype(x.dtype)


def oracle_dtype(x):
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def dropout(x, key):
    keep = jax.random.bernoulli(key, 0.75, x.shape)
    return jnp.where(keep, x / np.asarray(0.75, x.dtype), jnp.zeros((), x.dtype))


# ---- functions under every transformation ----


def block(x, residual, scale):
    s = x + residual
    return jax.nn.relu(layer_norm(s, scale)) + s * np.asarray(0.5, s.dtype)


def masked_softmax(x, bias):
    key = jax.random.split(jax.random.fold_in(jax.random.key(3), 2))[1]
    keep = jax.random.bernoulli(key, 0.75, x.shape)
    z = jnp.tanh(x) * np.asarray(2, x.dtype) + bias
    return jnp.where(keep, jax.nn.softmax(z), jnp.zeros((), x.dtype))


def gated(x, gate):
    """Two halves of a row, a function with a rule of its own, and a row's maximum."""
    a, b = jnp.split(x * gate, 2, axis=-1)
    h = jax.nn.silu(a) * b + jnp.max(x + np.arange(8).astype(x.dtype), axis=-1, keepdims=True)
    return jnp.concatenate([h, jnp.log1p(jnp.exp(b))], axis=-1)


SHAPE = (2, 3, 8)
FUNCTIONS = {
    "block": (block, (SHAPE, SHAPE, (8,))),
    "masked_softmax": (masked_softmax, (SHAPE, (3, 1))),
    "gated": (gated, (SHAPE, (2, 1, 8))),
}


def arguments(name, dtype="float64"):
    rng = np.random.default_rng(0)
    _, shapes = FUNCTIONS[name]
    return tuple(jnp.asarray(rng.integers(-24, 24, s) / 16 + 1 / 32, dtype) for s in shapes)


def assert_alike(got, want, rtol=1e-10):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = oracle.f64(a), oracle.f64(b)
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * max(1, np.max(np.abs(b), initial=0))
        )


# The rules of the call are alike for all functions. Derivatives and mapped arguments differ from function to function.
SOME = (
    "jit",
    "grad",
    "jvp_each",
    "hessian",
    "vmap_some",
    "vmap_mixed_axes",
    "grad_of_scan",
    "remat_second_order",
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transformations(name):
    function, shapes = FUNCTIONS[name]
    args, w = arguments(name), suite.weights(shapes[0], "float64")
    names = [n for n in TRANSFORMATIONS if n != "eager"] if name == "block" else SOME
    got = suite._run(jaxnorm.fuse(function), names, args, w)
    want = suite._run(function, names, args, w)
    for n in names:
        assert_alike(got[n], want[n])
    assert_alike(jaxnorm.fuse(function)(*args), want["jit"])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(name, dtype):
    """Results, gradients and tangents have the dtypes of the plain function, and its values in float64."""
    function, _ = FUNCTIONS[name]
    args = arguments(name, dtype)

    def run(f, *args):
        y, pullback = jax.vjp(f, *args)
        return y, pullback(y), jax.jvp(f, args, args), jax.vmap(f)(*(a[None] for a in args))

    got = jax.jit(functools.partial(run, jaxnorm.fuse(function)))(*args)
    plain = jax.eval_shape(functools.partial(run, function), *args)
    want = jax.jit(functools.partial(run, function))(*(a.astype("float64") for a in args))
    leaves = zip(*map(jax.tree.leaves, (got, plain, want)), strict=True)
    for a, like, b in leaves:
        assert (a.dtype, a.weak_type, a.shape) == (like.dtype, like.weak_type, like.shape)
        tolerance = 16 * oracle.UNIT[dtype]
        b = oracle.f64(b)
        # A sum may be 0 of numbers that are not.
        smallest = max(np.max(np.abs(b)), np.max(np.abs(oracle.f64(args[0]))) / 16)
        np.testing.assert_allclose(oracle.f64(a), b, rtol=tolerance, atol=tolerance * smallest)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_differences(name):
    function, _ = FUNCTIONS[name]
    check_grads(jax.jit(jaxnorm.fuse(function)), arguments(name), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_is_two_calls(name):
    function, _ = FUNCTIONS[name]
    args, fused = arguments(name), jaxnorm.fuse(function)
    assert suite.jaxnorm_primitives(fused, *args) == {PROGRAM: 1}
    for argnums in (*range(len(args)), tuple(range(len(args)))):
        gradient = jax.grad(lambda *a: jnp.sum(fused(*a) ** 2), argnums)
        found = suite.jaxnorm_primitives(gradient, *args)
        found.pop("jaxnorm_pack_bits", None)
        found.pop("jaxnorm_unpack_bits", None)
        assert found == {PROGRAM: 2}
    push = jax.linearize(fused, *args)[1]
    assert suite.jaxnorm_primitives(push, *args).pop(TANGENT) == 1


def test_vmap_moves_nothing():
    """An axis that is mapped in front of the row stays where it is, in the result too."""

    def f(x):
        return jax.vmap(jaxnorm.fuse(layer_norm), 1, 1)(x)

    x = suite.rand((4, 5, 16))
    for g in (f, jax.grad(lambda x: jnp.sum(f(x) ** 2))):
        closed = jax.make_jaxpr(g)(x)
        assert not {e.primitive.name for e in closed.eqns} & {"transpose", "moveaxis"}
        for eqn in closed.eqns:
            if eqn.primitive.name == PROGRAM:
                program_of(eqn.params["jaxpr"])


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (2, 1), (-1, -1), (1, 0)])
def test_vmap_axes(axes):
    def f(x, scale):
        return jnp.sin(layer_norm(x, scale)), x * 2.0

    sizes = [(3, 16), (16,)]
    args = [
        suite.rand(s if d is None else np.insert(s, d % (len(s) + 1), 5), "float64", seed=i)
        for i, (s, d) in enumerate(zip(sizes, axes, strict=True))
    ]
    transforms = (
        lambda f: f,
        lambda f: jax.grad(lambda *a: jnp.sum(f(*a)[0] ** 2), (0, 1)),
        lambda f: lambda *a: jax.jvp(f, a, a),
    )
    run = jax.jit(
        lambda *a: [[jax.vmap(g(h), axes)(*a) for g in transforms] for h in (jaxnorm.fuse(f), f)]
    )
    assert_alike(*run(*args))


def test_vmap_over_nothing():
    x = jnp.ones((0, 3, 4))
    f = jaxnorm.fuse(layer_norm)
    assert jax.vmap(f)(x).shape == (0, 3, 4)
    assert jax.vmap(jax.grad(lambda x: f(x).sum()))(x).shape == (0, 3, 4)
    y = jax.vmap(lambda x, y: f(jnp.ones((2, 4))), axis_size=3, in_axes=None)(1.0, 2.0)
    assert y.shape == (3, 2, 4)


# ---- what backward keeps ----


def kept(f, *args):
    """(shape, dtype) of all arrays that the derivative keeps."""
    _, pullback = jax.vjp(jaxnorm.fuse(f), *args)
    return sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(pullback))


X = ((16, 64), "bfloat16")
BITS = ((16, 8), "uint8")


def _pre_norm(x, y):
    s = x + y
    return layer_norm(s), s


def _relu_of(x, y):
    return jax.nn.relu(x + y)


@pytest.mark.parametrize(
    ("f", "count", "expected"),
    [
        (jax.nn.relu, 1, [BITS]),
        (_relu_of, 2, [BITS]),
        (layer_norm, 1, [X]),
        (_pre_norm, 2, [X]),
        (jax.nn.softmax, 1, [X]),
        (jnp.tanh, 1, [X]),
        (lambda x: jax.nn.logsumexp(x, axis=-1), 1, [X]),
        (lambda x: jax.nn.relu(layer_norm(x)), 1, [X]),
        (lambda x: 2.0 * x, 1, []),
        (lambda x, y: x * y, 2, [X, X]),
        (lambda x: jnp.maximum(x, 0), 1, [BITS, BITS]),
        (jax.checkpoint(lambda x: jnp.sin(layer_norm(x))), 1, [X]),
    ],
)
def test_kept(f, count, expected):
    args = [suite.rand(*X, seed=i) for i in range(count)]
    assert kept(f, *args) == expected


def test_dropout_keeps_one_bit():
    x, residual = suite.rand(*X), suite.rand(*X, seed=1)
    for key in (jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        if "rbg" not in str(key.dtype):
            assert kept(lambda x, key=key: dropout(x, key), x) == [BITS]

    def step(x, residual, key):
        s = residual + dropout(x, key)
        return layer_norm(s), s

    key = jax.random.key(1)
    got = kept(lambda x, r: step(x, r, key), x, residual)
    assert got == sorted([X, BITS])
    fused = jaxnorm.fuse(step)
    want = step(x, residual, key)
    assert_alike(fused(x, residual, key), want, 1e-2)


def test_bits_are_kept_along_rows_only():
    """A boolean for each row, or one that all rows share, is not packed; nor is one of another axis."""
    x, z = suite.rand((16, 64)), suite.rand((64,))

    def by_row(x):
        return jnp.where(jnp.any(x > 2, axis=-1, keepdims=True), x, jnp.sin(x))

    def shared(x, z):
        return jnp.where(z > 0, x, 0.0)

    for f, args in ((by_row, (x,)), (shared, (x, z))):
        assert "uint8" not in str(kept(f, *args))


@derived_may_be_plain
def test_labels_are_kept_as_they_are():
    """Rather than what is made of them, which takes as many bytes to write and read."""

    def loss(x, labels):
        chosen = jnp.take_along_axis(x, labels[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(x, axis=-1) - chosen

    x, labels = suite.rand((16, 64)), jnp.arange(16)
    assert kept(lambda x: loss(x, labels), x) == [((16,), "int64"), ((16, 64), "float32")]
    for g in (jax.grad, jax.hessian):
        got, want = (
            g(lambda x, f=f: jnp.sum(f(x, labels[:4])))(x[:4]) for f in (jaxnorm.fuse(loss), loss)
        )
        assert_alike(got, want, 1e-5)


def test_less_is_kept_for_less():
    """Nothing for operands that are not differentiated, and for results without a cotangent."""
    x, z = suite.rand((16, 64)), suite.rand((16, 64), seed=1)
    fused = jaxnorm.fuse(lambda x, z: (x * jnp.sin(z), jax.nn.relu(x)))
    _, pullback = jax.vjp(lambda x: fused(x, z)[0], x)
    (cotangent,) = pullback(x)
    np.testing.assert_allclose(cotangent, x * jnp.sin(z), rtol=1e-5)
    gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(fused(x, z)[0])))(x)
    (*_, backward) = [e for e in gradient.eqns if e.primitive.name == PROGRAM]
    assert [v.aval.shape for v in backward.invars] == [(16, 64), (16, 64)]


def test_cut_is_fast_and_the_same_every_time():
    """200 equations in 10 ms; on a busy machine, the best of several."""

    def f(x, w):
        for i in range(24):
            x = layer_norm(x * w + float(i)) + jnp.tanh(x)
        return x

    closed = jax.make_jaxpr(lambda *a: jax.vjp(f, *a[:2])[1](a[2]))(
        suite.rand((16, 64)), suite.rand((64,)), suite.rand((16, 64))
    )
    flat = save.Flat(closed)
    assert len(flat.nodes) > 400
    unknown = flat.depending([flat.operands[2]])
    times, cuts = [], []
    for _ in range(5):
        start = time.perf_counter()
        cuts.append(save.cheapest_cut(flat, [], flat.results, unknown))
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
    assert len({c.kept for c in cuts}) == 1


# ---- structure: dead code, constants, results that need no kernel ----


def test_unused_results_are_dropped():
    x, z = suite.rand((4, 8)), suite.rand((4, 8), seed=1)
    fused = jaxnorm.fuse(lambda x, z: (jnp.sin(x) * z, jnp.cos(z) * x))
    closed = jax.make_jaxpr(jax.jit(lambda x, z: fused(x, z)[0]))(x, z)
    text = jax.jit(lambda x, z: fused(x, z)[0]).lower(x, z).as_text()
    assert "cosine" not in text
    push = jax.make_jaxpr(lambda x, z: jax.jvp(fused, (x, z), (x, z))[1][0])(x, z)
    pruned = primitive.pruned(push, [True])[0]
    (call,) = [e for e in pruned.eqns if e.primitive.name == TANGENT]
    assert len(call.outvars) == 1
    assert len(call.invars) == 4
    assert closed.out_avals[0].shape == (4, 8)


def test_results_that_need_no_kernel():
    x, n = suite.rand((4, 8)), jnp.arange(3)

    def f(x, n):
        return {"same": x, "twice": [x, x], "none": None, "one": 1, "zeros": jnp.zeros(3), "n": n}

    fused = jaxnorm.fuse(f)
    assert suite.jaxnorm_primitives(fused, x, n) == {}
    got, want = fused(x, n), jax.jit(f)(x, n)
    assert_alike(got, want)
    assert got["one"].weak_type
    assert [a.dtype for a in jax.tree.leaves(got)] == [a.dtype for a in jax.tree.leaves(want)]
    assert fused(jnp.ones((0, 8)), n)["same"].shape == (0, 8)
    assert jaxnorm.fuse(lambda: ())() == ()
    assert jaxnorm.fuse(lambda x: None)(x) is None
    gradient = jax.grad(lambda x: jnp.sum(fused(x, n)["twice"][0] ** 2))(x)
    np.testing.assert_allclose(gradient, 2 * x)
    y = jaxnorm.fuse(lambda x: (jnp.sin(x), x, jnp.sin(x) * 1, jnp.sin(x)))(x)
    assert_alike(y, (jnp.sin(x), x, jnp.sin(x), jnp.sin(x)), 1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (1,), (1, 1), ()])
def test_odd_shapes(shape):
    x = jnp.full(shape, 0.5)

    def f(x):
        return jax.nn.relu(jnp.sin(x)) * 2.0

    for g in (lambda f: f, lambda f: jax.grad(lambda x: jnp.sum(f(x)))):
        assert_alike(jax.jit(g(jaxnorm.fuse(f)))(x), g(f)(x), 1e-6)


# ---- arguments ----


def test_pytrees_and_keywords():
    def f(tree, *rest, scale=None, **others):
        y = layer_norm(tree["x"], scale)
        return {"y": y, "sum": (y + rest[0], None), "others": [o * y for o in others.values()]}

    x, z, scale = suite.rand((3, 8)), suite.rand((3, 8), seed=1), suite.rand((8,), seed=2)
    fused = jaxnorm.fuse(f)
    for call in (
        lambda f: f({"x": x}, z, scale=scale),
        lambda f: f({"x": x}, z, scale=scale, a=z, b=2.0),
        lambda f: f({"x": x, "unused": (z, None)}, 1.0),
        lambda f: jax.grad(lambda t: jnp.sum(f(t, z, scale=scale)["sum"][0] ** 2))({"x": x}),
    ):
        assert_alike(call(fused), call(f), 1e-5)


def test_numbers_do_not_promote():
    x = jnp.ones((2, 4), "bfloat16")
    fused = jaxnorm.fuse(lambda x, a, b=1: x * a + b)
    for args in ((x, 2.0), (x, 2), (x, 2.0, 3.0)):
        assert fused(*args).dtype == jnp.bfloat16
    y = jaxnorm.fuse(lambda a: a * 2)(1.5)
    assert y.weak_type
    assert y.dtype == jnp.result_type(1.5)
    assert jaxnorm.fuse(jnp.sin)(np.ones((2, 3), np.float32)).dtype == jnp.float32
    gradient = jax.grad(lambda a: jnp.sum(fused(x, a).astype(jnp.float32)))(2.0)
    assert gradient == 8.0
    with jax.enable_x64(False):
        assert jaxnorm.fuse(jnp.sin)(np.ones((2, 3))).dtype == jnp.float32


def test_random_keys():
    x = suite.rand((4, 8))
    fused = jaxnorm.fuse(dropout)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        np.testing.assert_array_equal(fused(x, key), dropout(x, key))
        keys = jax.random.split(key, 3)
        xs = jnp.stack([x, x + 1, x - 1])
        np.testing.assert_array_equal(jax.vmap(fused)(xs, keys), jax.vmap(dropout)(xs, keys))
        bound = jaxnorm.fuse(lambda x, key=key: dropout(x, key))
        np.testing.assert_array_equal(bound(x), dropout(x, key))

    def steps(x, key, step):
        first, second = jax.random.split(jax.random.fold_in(key, step))
        return dropout(dropout(x, first), second), second

    got, want = (f(x, jax.random.key(0), 3) for f in (jaxnorm.fuse(steps), steps))
    np.testing.assert_array_equal(got[0], want[0])
    assert got[1] == want[1]
    primitives = suite.jaxnorm_primitives(jaxnorm.fuse(steps), x, jax.random.key(0), 3)
    assert primitives == {PROGRAM: 1}
    gradient = jax.grad(lambda x: jnp.sum(jaxnorm.fuse(steps)(x, jax.random.key(0), 3)[0] ** 2))(x)
    want = jax.grad(lambda x: jnp.sum(steps(x, jax.random.key(0), 3)[0] ** 2))(x)
    np.testing.assert_allclose(gradient, want, rtol=1e-6)


@derived_may_be_plain
def test_closures():
    """Arrays and tracers that a function closes over are operands: nothing of them is stale."""
    x, w = suite.rand((4, 8)), suite.rand((8,), seed=1)
    ws = jnp.stack([w, 2 * w])

    def through(make):
        def loss(w):
            return jnp.sum(
                make(lambda x: layer_norm(x, w) ** 2 + np.arange(8.0, dtype=np.float32))(x)
            )

        return loss(w), jax.grad(loss)(w), jax.jit(loss)(w), jax.vmap(jax.grad(loss))(ws)

    assert_alike(through(jaxnorm.fuse), through(lambda f: f), 1e-5)

    held = {"w": w}
    fused = jaxnorm.fuse(lambda x: x * held["w"])

    def loss(w):
        held["w"] = w
        return jnp.sum(fused(x))

    np.testing.assert_allclose(jax.grad(loss)(w), x.sum(0), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), x.sum(0), rtol=1e-6)
    held["w"] = 2 * w
    np.testing.assert_allclose(fused(x), x * 2 * w, rtol=1e-6)


def test_methods():
    class Layer:
        def __init__(self, scale):
            self.scale = scale

        @jaxnorm.fuse
        def __call__(self, x):
            return layer_norm(x, self.scale)

        @jaxnorm.fuse
        def twice(self, x):
            """Twice."""
            return x * self.scale * 2.0

    x, scale = suite.rand((4, 8)), suite.rand((8,), seed=1)
    layer = Layer(scale)
    assert_alike(layer(x), layer_norm(x, scale), 1e-5)
    layer.scale = scale + 1
    assert_alike(layer(x), layer_norm(x, scale + 1), 1e-5)
    assert layer.twice == layer.twice
    assert hash(layer.twice) == hash(layer.twice)
    assert Layer.twice.__doc__ == "Twice."
    gradient = jax.grad(lambda s: jnp.sum(Layer(s)(x) ** 2))(scale)
    assert_alike(gradient, jax.grad(lambda s: jnp.sum(layer_norm(x, s) ** 2))(scale), 1e-4)
    assert_alike(jax.jit(layer.twice)(x), x * layer.scale * 2, 1e-5)


def test_traced_once():
    count = 0

    def f(x):
        nonlocal count
        count += 1
        return jnp.sin(x)

    x, fused = suite.rand((4, 8)), jaxnorm.fuse(f)
    for _ in range(3):
        fused(x)
    assert count == 1
    fused(x[:2])
    fused(x.astype("bfloat16"))
    assert count == 3
    with jax.enable_x64(False):
        fused(x)
    assert count == 4


def test_equal_programs_are_one():
    """A function with arrays is traced at every call, but what is derived of it is found again."""
    w = suite.rand((8,))
    fused = jaxnorm.fuse(lambda x: jnp.tanh(x * w))
    x = suite.rand((4, 8))

    def program():
        closed = jax.make_jaxpr(fused)(x)
        return next(e for e in closed.eqns if e.primitive.name == PROGRAM).params["jaxpr"]

    assert program() is program()


# ---- derivative rules of users ----


@jax.custom_vjp
def _clipped(x):
    return x * 2.0


# A rule that is no derivative at all, and not linear.
_clipped.defvjp(lambda x: (x * 2.0, jnp.sign(x)), lambda s, ct: (jnp.clip(ct, -1, 1) * s * 3.0,))


@jax.custom_vjp
def _round_through(x):
    return jnp.round(x)


_round_through.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def _odd(x):
    return jnp.sin(x)


_odd.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * primals[0] ** 3))


@derived_may_be_plain
@pytest.mark.parametrize("rule", [_clipped, _round_through, _odd, jax.checkpoint(_odd)])
def test_rules(rule):
    """The gradients are those of the rules, of higher order too."""

    def f(x, w):
        return jnp.sin(rule(layer_norm(x) * w)) + rule(w)

    x, w = suite.rand((3, 8), "float64"), suite.rand((8,), "float64", 1)

    def all_of(f):
        def loss(x, w):
            return jnp.sum(f(x, w) ** 2)

        first = jax.grad(loss, (0, 1))
        second = jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(g)) for g in first(x, w)), (0, 1))
        pushed = jax.jvp(first, (x, w), (x, w))
        return loss(x, w), first(x, w), second(x, w), pushed, jax.vmap(first, (0, None))(x, w)

    assert_alike(jax.jit(lambda: all_of(jaxnorm.fuse(f)))(), jax.jit(lambda: all_of(f))())


def test_forward_mode_of_rules():
    """Of a custom_vjp function, too, if its rule is linear; else a TypeError says so."""
    x = suite.rand((3, 8))
    y, t = jax.jvp(jaxnorm.fuse(_round_through), (x,), (x,))
    assert_alike((y, t), (jnp.round(x), x), 1e-6)
    with pytest.raises(TypeError, match="fuse: forward-mode .* linear"):
        jax.jvp(jaxnorm.fuse(_clipped), (x,), (x,))
    assert_alike(jax.jvp(jaxnorm.fuse(_odd), (x,), (x,)), jax.jvp(_odd, (x,), (x,)), 1e-5)


def test_rule_with_arrays():
    """Rules may close over arrays."""
    table = jnp.arange(8.0, dtype="float32")

    @jax.custom_vjp
    def scaled(x):
        return x * table

    scaled.defvjp(lambda x: (x * table, x), lambda x, ct: (ct * table + x,))
    x = suite.rand((3, 8))
    for f in (lambda f: f(x), lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)):
        assert_alike(f(jaxnorm.fuse(scaled)), f(scaled), 1e-6)


# ---- nesting ----


def test_nested():
    """A fused function inside a fused one is a part of it, its derivatives too."""
    norm = jaxnorm.fuse(layer_norm)

    def f(x, w, norm=norm):
        y = jax.jit(norm)(x, w)
        return jax.nn.relu(norm(y) + x), jax.jvp(norm, (x,), (y,))[1]

    x, w = suite.rand((4, 8), "float64"), suite.rand((8,), "float64", 1)
    fused, plain = jaxnorm.fuse(f), functools.partial(f, norm=layer_norm)

    def all_of(f):
        def loss(x, w):
            return sum(jnp.sum(y**2) for y in f(x, w))

        return f(x, w), jax.grad(loss, (0, 1))(x, w), jax.hessian(loss)(x, w)

    assert_alike(jax.jit(lambda: all_of(fused))(), jax.jit(lambda: all_of(plain))())
    gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(fused(x, w)[0])))(x)
    assert [e.primitive.name for e in gradient.eqns].count(PROGRAM) == 2


@pytest.mark.skipif(
    jax.default_backend() == "gpu" and not suite.CUDA.available,
    reason=f"no CUDA module: {suite.CUDA.reason}",
)
def test_inside_autofuse():
    """Autofuse leaves it as it is."""
    x, fused = suite.rand((64, 128)), jaxnorm.fuse(jax.nn.softmax)
    both = jaxnorm.autofuse(lambda x: fused(x) + jax.nn.softmax(x))
    names = suite.jaxnorm_primitives(both, x)
    assert names[PROGRAM] == 1
    assert_alike(both(x), 2 * jax.nn.softmax(x), 1e-5)
    assert_alike(
        jax.grad(lambda x: jnp.sum(both(x) ** 2))(x),
        jax.grad(lambda x: jnp.sum(4 * jax.nn.softmax(x) ** 2))(x),
        1e-4,
    )


def test_scan_over_layers():
    x, scales = suite.rand((4, 8), "float64"), suite.rand((5, 8), "float64", 1)
    key = jax.random.key(0)

    def loss(f, remat, x, scales):
        def layer(x, given):
            scale, step = given
            return f(x, scale, jax.random.fold_in(key, step)), None

        layer = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jax.lax.scan(layer, x, (scales, jnp.arange(5)))[0] ** 2)

    def layer(x, scale, key):
        return x + dropout(jax.nn.relu(layer_norm(x, scale)), key)

    for remat in (False, True):
        got, want = (
            jax.jit(jax.value_and_grad(functools.partial(loss, f, remat), (0, 1)))(x, scales)
            for f in (jaxnorm.fuse(layer), layer)
        )
        assert_alike(got, want)


@pytest.mark.parametrize("saved", [True, False])
def test_checkpoint_policy(saved):
    """What forward keeps has a name. If a policy keeps it, forward is not run again."""
    fused = jaxnorm.fuse(lambda x: jax.nn.relu(x * 2.0))
    x = suite.rand((4, 8))

    def loss(x):
        return jnp.sum(fused(jnp.sin(x)) * 2.0)

    names = ["jaxnorm_fuse"] if saved else ["something_else"]
    checked = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(*names))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(checked, x)
    lines = [line for line in out.getvalue().splitlines() if "from the argument" not in line]
    assert [line.split(" ")[0] for line in lines] == ["u8[4,1]"] * saved
    runs = suite.jaxnorm_primitives(jax.grad(checked), x)
    assert runs[PROGRAM] == (2 if saved else 3)
    assert_alike(jax.grad(checked)(x), jax.grad(loss)(x), 1e-6)


@pytest.mark.parametrize("columns", [128, 136])
def test_statistics_of_long_rows_are_saved(columns):
    """A number costs 64 bits to write and to read, a reduction half a bit for each element."""
    x, w = suite.rand((4, columns), "bfloat16"), suite.rand((columns,))
    explained = jaxnorm.fuse(layer_norm).explain(x, w)
    numbers = 2 if columns > 128 else 0
    assert explained.saved == ("float32[4,1]",) * numbers
    assert explained.backward_read == 2 * x.nbytes + w.nbytes + numbers * 4 * 4
    assert len(explained.backward.phases) == (2 if columns > 128 else 3)


def test_statistics_are_saved_in_float32():
    """Those of 16-bit code too: the kernels of forward and of backward compute with the same number."""

    def norm(x):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))

    x = suite.rand((4, 256), "bfloat16")
    explained = jaxnorm.fuse(norm).explain(x)
    assert explained.saved == ("float32[4,1]",)
    got, want = (jax.grad(lambda x, f=f: jnp.sum(f(x) ** 3))(x) for f in (jaxnorm.fuse(norm), norm))
    assert got.dtype == jnp.bfloat16
    assert_alike(got, want, 2e-2)


def test_derivative_functions_are_used_again():
    x, w = suite.rand((4, 8), "float64"), suite.rand((8,), "float64", 1)
    fused = jaxnorm.fuse(layer_norm)
    y, push = jax.linearize(fused, x, w)
    _, pull = jax.vjp(fused, x, w)
    want = jax.vjp(layer_norm, x, w)[1]
    for s in (1.0, 2.0):
        assert_alike(push(s * x, w), jax.jvp(layer_norm, (x, w), (s * x, w))[1])
        assert_alike(pull(s * y), want(s * y))
    assert_alike(jax.vmap(pull)(jnp.stack([y, 2 * y])), jax.vmap(want)(jnp.stack([y, 2 * y])))


def test_linear_functions_are_transposed():
    """Without a derivative before, too."""
    w = suite.rand((8,))
    fused = jaxnorm.fuse(lambda x: (x * w, jnp.sum(x, axis=-1)))
    x = suite.rand((4, 8))
    transpose = jax.linear_transpose(fused, x)
    assert_alike(transpose((x, x[:, 0])), (x * w + x[:, :1],), 1e-6)


def test_integers():
    """Integer and boolean operands and results have no derivative."""

    def f(x, n, mask):
        y = jnp.where(mask, x * n.astype(x.dtype), jnp.zeros((), x.dtype))
        return y, n * 2, y > 0, jnp.argmax(y, axis=-1)

    args = suite.rand((4, 8)), jnp.full((4, 1), 3), suite.rand((4, 8), seed=1) > 0
    fused = jaxnorm.fuse(f)

    def zero(a):
        return np.zeros(a.shape, jax.dtypes.float0)

    tangents = (args[0], zero(args[1]), zero(args[2]))
    got, want = jax.jvp(fused, args, tangents), jax.jvp(f, args, tangents)
    assert [t.dtype for t in got[1]] == [t.dtype for t in want[1]]
    assert_alike((got[0], got[1][0]), (want[0], want[1][0]), 1e-6)
    cotangents = (args[0], *(zero(y) for y in got[0][1:]))
    bars = jax.vjp(fused, *args)[1](cotangents)
    assert bars[1].dtype == bars[2].dtype == jax.dtypes.float0
    assert_alike(bars[0], jax.vjp(f, *args)[1](cotangents)[0], 1e-6)
    value = jax.value_and_grad(lambda x: (jnp.sum(fused(x, *args[1:])[0]), 1), has_aux=True)(
        args[0]
    )
    assert value[0][1] == 1


def test_constants_that_a_dtype_does_not_have():
    """A number given to an inner function becomes infinite without a warning, as in XLA."""

    @jax.jit
    def scaled(x, by):
        return x * by.astype(x.dtype)

    def function(x):
        e = jnp.exp(x)
        return scaled(e, jnp.int32(-1048576)) / e.sum(-1, keepdims=True)

    x = jnp.ones((4, 32), jnp.float16)
    for f in (jaxnorm.fuse(function), jaxnorm.autofuse(function)):
        y, transpose = jax.vjp(f, x)
        assert jnp.isneginf(y).all()
        transpose(y)


# ---- settings, buffers, threads ----


def test_donation():
    f = jaxnorm.fuse(lambda x: jnp.tanh(x) * 2.0)
    x = suite.rand((64, 64))
    want, donated = f(x), jnp.array(x)
    got = jax.jit(f, donate_argnums=0)(donated)
    assert donated.is_deleted()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_settings():
    x, w = suite.rand((4, 8)), suite.rand((8,), seed=1)
    fused = jaxnorm.fuse(layer_norm)

    def both(f):
        return f(x, w), jax.grad(lambda x: jnp.sum(f(x, w) ** 2))(x)

    want = both(layer_norm)
    with jax.disable_jit():
        assert_alike(both(fused), want, 1e-4)
    with jax.debug_nans(True):
        assert_alike(both(fused), want, 1e-4)
        with pytest.raises(FloatingPointError):
            jaxnorm.fuse(jnp.log)(-(x**2))
    with jax.checking_leaks():
        assert_alike(jax.jit(lambda: both(jaxnorm.fuse(layer_norm)))(), want, 1e-4)

    @jax.jit
    def constant(y):
        with jax.ensure_compile_time_eval():
            total = float(jnp.sum(fused(x, w)))
        return y * total

    np.testing.assert_allclose(constant(1.0), np.sum(want[0]), rtol=1e-4, atol=1e-5)
    with jax.enable_checks(True):
        jax.jit(lambda: both(fused))()


def test_threads():
    x, wrong = suite.rand((4, 8)), []
    fused = jaxnorm.fuse(layer_norm)
    want = jax.grad(lambda x: jnp.sum(layer_norm(x) ** 3))(x)

    def run():
        try:
            got = jax.grad(lambda x: jnp.sum(fused(x) ** 3))(x)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_copies():
    fused, x = jaxnorm.fuse(layer_norm), suite.rand((4, 8))
    fused(x)
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert again == fused
        np.testing.assert_array_equal(again(x), fused(x))


# ---- lowering for GPUs ----


@pytest.fixture
def for_h100(monkeypatch):
    """Calls are compiled as on a machine with a GPU and NVRTC."""
    monkeypatch.setattr(primitive, "compiled_call", lambda closed: row_call(closed, DEVICES[90]))


def _calls(function, *args):
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @jaxnorm_launch\((.*?)\) .*? -> (.*)", lowered.as_text())


def test_one_call_in_each_direction(for_h100):
    x, scale = suite.rand((32, 64), "bfloat16"), suite.rand((64,))
    fused = jaxnorm.fuse(lambda x, scale, key: layer_norm(dropout(x, key), scale))

    def both(x, scale, key):
        y, pullback = jax.vjp(lambda *a: fused(*a, key), x, scale)
        return y, pullback(y)

    forward, backward = _calls(both, x, scale, jax.random.key(0))
    assert "tensor<32x8xui8>" in forward[1]
    assert "tensor<64xf32>" in backward[1]
    assert len(_calls(jax.vmap(fused, (0, None, None)), x[None], scale, jax.random.key(0))) == 1


def test_several_devices_run_the_plain_program(for_h100):
    x, scale = suite.rand((32, 64)), suite.rand((64,))
    fused = jaxnorm.fuse(layer_norm)
    assert not _calls(fused, put(x, P("d"), AUTO), scale)
    rows = P(("d", "m"))
    mapped = jax.shard_map(fused, mesh=AUTO, in_specs=(rows, P()), out_specs=rows)
    assert len(_calls(mapped, x, scale)) == 1


def test_export_for_gpus(for_h100):
    rows, columns = export.symbolic_shape("b, 3")[0], 64
    structs = (
        jax.ShapeDtypeStruct((rows, columns), "bfloat16"),
        jax.ShapeDtypeStruct((64,), "float32"),
    )
    fused = jaxnorm.fuse(layer_norm)

    def gradient(x, scale):
        return jax.grad(lambda *a: jnp.sum(fused(*a).astype("float32") ** 2), (0, 1))(x, scale)

    checks = [export.DisabledSafetyCheck.custom_call("jaxnorm_launch")]
    exported = export.export(jax.jit(gradient), platforms=("cpu", "cuda"), disabled_checks=checks)(
        *structs
    )
    assert exported.mlir_module().count("@jaxnorm_launch") >= 2
    args = suite.rand((5, 64), "bfloat16"), suite.rand((64,))
    loaded = export.deserialize(exported.serialize())
    assert_alike(loaded.call(*args), jax.jit(gradient)(*args), 1e-2)


# ---- export ----


@pytest.mark.parametrize("symbolic", [False, True])
def test_export(symbolic):
    def both(x, residual, scale):
        f = jaxnorm.fuse(block)
        return f(x, residual, scale), jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1, 2))(
            x, residual, scale
        )

    args = arguments("block", "float32")
    structs = args
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    platforms = tuple({here: None, "cpu": None, "tpu": None})
    if symbolic:
        shapes = [export.symbolic_shape("b, 3, 8", scope=s) for s in [export.SymbolicScope()] * 2]
        structs = [jax.ShapeDtypeStruct(s, "float32") for s in (*shapes, (8,))]
    exported = export.export(
        jax.jit(both), platforms=platforms, disabled_checks=jaxnorm.export_checks()
    )(*structs)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    assert_alike(loaded.call(*args), jax.jit(both)(*args), 1e-5)


# ---- devices ----


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("d"), P(None, "m"), P("d", None, "m"), P()])
def test_sharded(mesh, spec):
    args = [suite.rand(s, "float64", i) for i, s in enumerate([(4, 2, 8), (4, 2, 8), (8,)])]

    def both(f, *args):
        y, pullback = jax.vjp(f, *args)
        return y, pullback(y), jax.jvp(f, args, args)[1]

    want = jax.jit(functools.partial(both, block))(*args)
    with scope(mesh):
        placed = [put(a, s, mesh) for a, s in zip(args, (spec, spec, P()), strict=True)]
        plain = jax.jit(functools.partial(both, block))(*placed)
        got = jax.jit(functools.partial(both, jaxnorm.fuse(block)))(*placed)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
            if mesh is EXPLICIT:
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        stacked = [jnp.stack([a, a]) for a in placed]
        assert_alike(jax.jit(jax.vmap(jaxnorm.fuse(block)))(*stacked)[0], want[0])
    assert_alike(got, want)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh, check_vma):
    x, scale = suite.rand((8, 16), "float64"), suite.rand((16,), "float64", 1)

    def both(f, x, scale):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(("d", "m")), P()),
            out_specs=P(("d", "m")),
            check_vma=check_vma,
        )
        def run(x, scale):
            return f(x, scale)

        def loss(x, scale):
            return jnp.sum(run(x, scale) ** 2)

        first = jax.grad(loss, (0, 1))
        return run(x, scale), first(x, scale), jax.jvp(first, (x, scale), (x, scale))[1]

    with scope(mesh):
        placed = put(x, P(("d", "m")), mesh), put(scale, P(), mesh)
        got = jax.jit(functools.partial(both, jaxnorm.fuse(layer_norm)))(*placed)

    def plain(x, scale):
        first = jax.grad(lambda *a: jnp.sum(layer_norm(*a) ** 2), (0, 1))
        return layer_norm(x, scale), first(x, scale), jax.jvp(first, (x, scale), (x, scale))[1]

    assert_alike(got, plain(x, scale))


def test_gradient_inside_shard_map():
    """Of an operand that all devices share: its gradient is a sum over devices, outside of the row program."""
    x, scale = suite.rand((8, 16), "float64"), suite.rand((16,), "float64", 1)

    @functools.partial(
        jax.shard_map, mesh=AUTO, in_specs=(P(("d", "m")), P()), out_specs=(P(), P())
    )
    def gradient(x, scale):
        held = jaxnorm.fuse(lambda x: layer_norm(x, scale))

        def loss(scale):
            fused = jaxnorm.fuse(layer_norm)
            y = fused(x, scale) + jaxnorm.fuse(lambda x: layer_norm(x, scale))(x)
            return jax.lax.psum(jnp.sum(y**2), ("d", "m"))

        return jax.grad(loss)(scale), jax.lax.psum(jnp.sum(held(x)), ("d", "m"))

    got, _ = jax.jit(gradient)(x, scale)
    want = jax.grad(lambda s: jnp.sum((2 * layer_norm(x, s)) ** 2))(scale)
    assert_alike(got, want)


# ---- errors ----


def test_errors():
    x = jnp.ones((4, 8))
    with pytest.raises(TypeError, match="fuse: fn must be a function, got int"):
        jaxnorm.fuse(3)
    fused = jaxnorm.fuse(lambda x, mode: x)
    with pytest.raises(
        TypeError, match=r"fuse: argument 'mode' must be an array.*got str.*partial"
    ):
        fused(x, mode="fast")
    with pytest.raises(TypeError, match=r"fuse: argument 'x' at \['a'\]\[1\] must be"):
        fused({"a": [x, object()]}, 1)
    with pytest.raises(TypeError, match="fuse: result 1 must be an array"):
        jaxnorm.fuse(lambda x: (x, "text"))(x)


def test_effects_are_refused():
    def chatty(x):
        y = jnp.sin(x)
        jax.debug.print("{}", y)
        return y

    with pytest.raises(ValueError, match=r"fuse: `debug_\w+`.* has an effect"):
        jaxnorm.fuse(chatty)(jnp.ones((4, 8)))


def test_refused():
    """What is no row program is refused at the call, on every platform."""
    x = jnp.ones((8, 8))
    for f in (lambda x: x @ x, lambda x: jnp.sort(x), lambda x: jax.lax.psum(x, "i")):
        with pytest.raises(NotARowProgram, match="fuse: "):
            jax.vmap(jaxnorm.fuse(f), axis_name="i")(x[None])


# ---- explain ----


def test_explain():
    x = suite.rand((16, 64), "bfloat16")
    explained = jaxnorm.fuse(dropout).explain(x, jax.random.key(0))
    assert explained.read == 16 * 64 * 2 + 8
    assert explained.written == 16 * 64 * 2
    assert explained.saved_bytes == 16 * 64 // 8
    assert explained.backward_read == 16 * 64 // 8 + 16 * 64 * 2
    assert explained.backward_written == 16 * 64 * 2
    assert "saved for backward: uint8[16,8]" in str(explained)
    structs = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(jax.random.key, 0)
    assert jaxnorm.fuse(dropout).explain(*structs) == explained


def test_results_behind_stop_gradient():
    """They have no tangent, as `pure_callback` asks for; a tangent of zeros is one."""

    @jaxnorm.fuse
    def norm(x):
        y = x - x.mean(-1, keepdims=True)
        return y, jax.lax.stop_gradient(y * 2)

    def loss(x):
        y, stopped = norm(x)
        seen = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), stopped)
        return jnp.sum(seen * y)

    x = jnp.arange(12.0).reshape(3, 4) ** 2
    y = x - x.mean(-1, keepdims=True)
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * y, rtol=1e-5, atol=1e-4)
