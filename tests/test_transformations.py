"""Every operation under every transformation of JAX; what its gradient consists of and keeps."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import suite
from jax.ad_checkpoint import print_saved_residuals
from suite import OPS, TRANSFORMATIONS

import jaxnorm

each_op = pytest.mark.parametrize("op", OPS)
# Rules are alike for all dtypes but for the sums of 16 bits, which have a dtype of their own (`suite.transformations`).
each_op_and_width = pytest.mark.parametrize(
    ("op", "dtype"),
    [(op.name, d) for op in OPS.values() for d in op.dtypes if d in ("bfloat16", "float32")],
)

# Rounding units, relative to the largest element, by order of the derivative: forward results are
# rounded before they meet backward, and each derivative adds up more of them.
FLOOR = {0: 8, 1: 16, 2: 64, 3: 256}


@each_op
def test_transformations(op):
    wrong = []
    for dtype, name, actual, expected in suite.results(op):
        # 16 bits have none to spare: there, what is rounded once too often shows.
        floor = FLOOR[TRANSFORMATIONS[name].order] * (1 if dtype in ("float32", "float64") else 0.5)
        for got, want in zip(actual, expected, strict=True):
            try:
                oracle.assert_close(got, want, dtype, floor=floor, size=np.max(np.abs(want)))
            except AssertionError as error:
                wrong.append(f"{name} in {dtype}: {error}")
    assert not wrong, "\n".join(wrong)


def _product(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.sum(x * y) for x, y in pairs)


def _slope(f, args, along, step=1e-4):
    ahead, behind = (
        f(*(a + h * t for a, t in zip(args, along, strict=True))) for h in (step, -step)
    )
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)


@each_op
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_differences(op, mode):
    """Derivatives up to the third against central differences of what they are derivatives of.

    Their tangents and cotangents depend on the arguments, so that each is differentiated in all that it takes.
    """

    @jax.jit
    def pairs(*args):
        f, results = OPS[op].function, []
        for order in (1, 2, 3):
            along = suite.like(args, 11 * order)
            slope = _slope(f, args, along)
            if mode == "fwd":
                results.append((jax.jvp(f, args, along)[1], slope))
                f = lambda *args, f=f: jax.jvp(f, args, args)[1]  # noqa: E731
            else:
                ct = jax.tree.map(lambda y: suite.weights(y.shape, y.dtype, 5), slope)
                got = jax.vjp(f, *args)[1](ct)
                results.append((_product(got, along), _product(slope, ct)))

                def f(*args, f=f):
                    y, pullback = jax.vjp(f, *args)
                    return pullback(y)

        return results

    for got, want in pairs(*OPS[op].arguments("float64")):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# ---- structure ----


@each_op_and_width
def test_gradient_is_one_forward_and_one_backward_call(op, dtype):
    spec = OPS[op]
    args = spec.arguments(dtype)

    def total(*args):
        return jnp.sum(suite.weights(spec.shapes[0], dtype) * spec.function(*args))

    each = [(i, spec.backward_of(i)) for i in range(len(args))]
    for argnums, backward in [*each, (tuple(range(len(args))), spec.backward)]:
        every = dict.fromkeys((*spec.forward, *backward), 1)
        assert suite.jaxnorm_primitives(jax.grad(total, argnums), *args) == every
    _, pullback = jax.vjp(spec.function, *args)
    backward = suite.jaxnorm_primitives(pullback, spec.function(*args))
    assert backward == dict.fromkeys(spec.backward, 1)
    tangents = suite.like(args)
    forward = suite.jaxnorm_primitives(lambda *a: jax.jvp(spec.function, a, tangents), *args)
    assert forward == dict.fromkeys((*spec.forward, *spec.tangent), 1)


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.residuals is not None])
def test_residuals(op):
    """Softmax keeps its result, relu one bit per element, norms x and the statistics (and that), and nothing else."""
    spec = OPS[op]
    for dtype in spec.dtypes:
        _, pullback = jax.vjp(spec.function, *spec.arguments(dtype))
        kept = [(a.shape, a.dtype.name) for a in jax.tree.leaves(pullback)]
        expected = [(shape, spec.dtype_of(d, dtype)) for shape, d in spec.residuals]
        assert sorted(kept) == sorted(expected)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_residuals_with_mask(op):
    """The result and the mask, at the mask's own size; bias adds nothing."""
    x, where, bias = jnp.ones((4, 6)), jnp.ones((1, 6), bool), jnp.ones((4, 1))
    f = getattr(jaxnorm, op)
    _, pullback = jax.vjp(lambda x, where, bias: f(x, where=where, bias=bias), x, where, bias)
    kept = sorted((a.dtype.name, a.shape) for a in jax.tree.leaves(pullback))
    assert kept == [("bool", (1, 6)), ("float64", (4, 6))]


@pytest.mark.parametrize("op", ["relu", "add_relu"])
def test_no_mask_without_derivative(op):
    """Forward alone is the plain formula, without a mask, which XLA fuses with its neighbours."""
    args = OPS[op].arguments("float32")
    assert suite.jaxnorm_primitives(OPS[op].function, *args) == {"jaxnorm_relu": 1}
    assert "u8[" not in str(jax.make_jaxpr(OPS[op].function)(*args))
    text = jax.jit(OPS[op].function).lower(*args).as_text()
    assert "custom_call" not in text


@each_op
def test_undifferentiated_softmax_has_no_backward(op):
    args = OPS[op].arguments("float32")
    names = suite.jaxnorm_primitives(OPS[op].function, *args)
    assert not names.keys() & {*OPS[op].backward, *OPS[op].tangent}
    assert list(names.values()) == [1] * len(OPS[op].forward)


def test_unused_gradient_costs_nothing():
    """No second backward call for arguments that share a cotangent, and none for constants."""
    x, bias = jnp.ones((3, 4)), jnp.ones((3, 4))

    def f(x, bias):
        return jnp.sum(jaxnorm.softmax(x, bias=bias) ** 2)

    both = suite.jaxnorm_primitives(jax.grad(f, (0, 1)), x, bias)
    assert both == {"jaxnorm_softmax_fwd": 1, "jaxnorm_softmax_bwd": 1}
    none = suite.jaxnorm_primitives(jax.grad(lambda z: f(x, bias) * z), 2.0)
    assert none == {"jaxnorm_softmax_fwd": 1}


# ---- checkpoint policies ----


def _saved(function, *args):
    """Lines of print_saved_residuals that are not arguments."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(function, *args)
    lines = out.getvalue().splitlines()
    return [line for line in lines if "from the argument" not in line and "constant" not in line]


@each_op
@pytest.mark.parametrize("save", [True, False])
def test_checkpoint_policy(op, save):
    """A policy that names the residual keeps exactly it, and forward is not run again."""
    spec = OPS[op]
    args = spec.arguments("float32")
    names = [spec.checkpoint_name] if save else ["something_else"]
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def total(*args):
        return jnp.sum(jnp.sin(spec.function(*(jnp.sin(a) for a in args))))

    checked = jax.checkpoint(total, policy=policy)
    saved = _saved(checked, *args)
    assert all(spec.checkpoint_name in line for line in saved)
    if not save:
        assert not saved
    elif spec.named is not None:
        short = {"float32": "f32", "uint8": "u8"}
        named = [
            f"{short[spec.dtype_of(dtype, 'float32')]}[{','.join(map(str, shape))}]"
            for shape, dtype in spec.named
        ]
        assert sorted(line.split(" ")[0] for line in saved) == sorted(named)
    runs = suite.jaxnorm_primitives(jax.grad(checked), *args)
    # sin(relu(..)) needs relu's result too, which only another forward run gives back.
    again = () if save and spec.keeps_result else spec.forward
    if save and spec.again is not None:
        again = spec.again
    assert all(runs[name] == 1 for name in spec.backward_of(0))
    runs["jaxnorm_relu_fwd"] = runs.get("jaxnorm_relu_fwd", 0) + runs.get("jaxnorm_relu", 0)
    assert all(runs[name] == 1 + (name in again) for name in spec.forward)
    got, want = jax.jit(lambda *a: (jax.grad(checked)(*a), jax.grad(total)(*a)))(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# ---- buffers, dtypes and settings ----


@each_op_and_width
def test_donated_buffers(op, dtype):
    """The result may be written over the input."""
    spec = OPS[op]
    args = spec.arguments(dtype)
    gradient = jax.grad(lambda *a: jnp.sum(spec.function(*a) ** 2))
    expected, expected_bar = jax.jit(lambda *a: (spec.function(*a), gradient(*a)))(*args)
    donated = [jnp.array(a) for a in args]
    y = jax.jit(spec.function, donate_argnums=0)(*donated)
    assert donated[0].is_deleted()
    np.testing.assert_array_equal(y, expected)
    donated = [jnp.array(a) for a in args]
    got = oracle.f64(jax.jit(gradient, donate_argnums=0)(*donated))
    wanted = oracle.f64(expected_bar)
    np.testing.assert_allclose(
        got, wanted, rtol=16 * oracle.UNIT[dtype], atol=16 * oracle.UNIT[dtype]
    )


@each_op
def test_aliased_arguments(op):
    """The same array for every argument, and as its own cotangent."""
    if len(set(OPS[op].shapes)) > 1:
        args = [jnp.full(s, 0.5) for s in OPS[op].shapes]
    else:
        (x, *_) = OPS[op].arguments("float64")
        args = [x] * len(OPS[op].shapes)

    def both(f):
        def run(*args):
            y, pullback = jax.vjp(f, *args)
            return y, pullback(args[0]), args[0]

        return jax.jit(run)(*args)

    for got, want in zip(
        jax.tree.leaves(both(OPS[op].function)),
        jax.tree.leaves(both(OPS[op].reference)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


@each_op
def test_input_survives(op):
    """Without donation no input is written to."""
    args = OPS[op].arguments("float32")
    before = [np.array(a) for a in args]
    jax.block_until_ready(jax.jit(jax.grad(lambda *a: jnp.sum(OPS[op].function(*a))))(*args))
    for a, b in zip(args, before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("op", "dtype", "x64"),
    [
        (op.name, dtype, x64)
        for op in OPS.values()
        for dtype in op.dtypes
        for x64 in (True, False)
        if x64 or dtype != "float64"
    ],
)
def test_dtypes_are_kept(op, dtype, x64):
    """Results, gradients and tangents have the dtype of the input, with x64 on and off."""
    spec = OPS[op]
    with jax.enable_x64(x64):
        args = spec.arguments(dtype)
        argnums = tuple(range(len(args)))

        def run(*args):
            gradient = jax.grad(lambda *a: jnp.sum(spec.function(*a) ** 2), argnums)
            return jax.jvp(spec.function, args, args), gradient(*args), jax.jacfwd(gradient)(*args)

        for a in jax.tree.leaves(jax.eval_shape(run, *args)):
            assert a.dtype == dtype
            assert not a.weak_type
        assert jax.jit(spec.function)(*args).dtype == dtype


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "relu", "add_relu"])
def test_float0(op):
    """Integer and boolean arguments next to floating-point ones have float0 tangents."""
    spec = OPS[op]
    args = spec.arguments("float32")

    def f(x, n, mask):
        x = jnp.where(mask, x, 0) * n.astype(x.dtype)
        if "softmax" in op:
            return spec.function(x)
        return spec.function(x, *args[1:])

    n, mask = jnp.int32(3), jnp.ones(args[0].shape, bool)
    zero, zeros = np.zeros((), jax.dtypes.float0), np.zeros(mask.shape, jax.dtypes.float0)
    _, tangent = jax.jvp(f, (args[0], n, mask), (args[0], zero, zeros))
    x_bar, n_bar, mask_bar = jax.vjp(f, args[0], n, mask)[1](tangent)
    assert n_bar.dtype == mask_bar.dtype == jax.dtypes.float0
    assert x_bar.shape == args[0].shape
    if "softmax" in op:
        g = getattr(jaxnorm, op)
        _, t = jax.jvp(lambda x, where: g(x, where=where), (args[0], mask), (args[0], zeros))
        bars = jax.vjp(lambda x, where: g(x, where=where), args[0], mask)[1](t)
        assert bars[1].dtype == jax.dtypes.float0


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "relu", "add_relu"])
def test_python_scalars_do_not_promote(op):
    """Numbers from Python have weak types, and leave x its dtype, also under strict promotion."""
    x = jnp.ones((2, 3), "bfloat16")
    function = getattr(jaxnorm, op)
    for y in (function(x, 1.0),) if op == "add_relu" else (function(x * 2.0),):
        assert y.dtype == jnp.bfloat16
    if "softmax" in op:
        assert function(x, scale=2.0).dtype == jnp.bfloat16
        assert function(x, bias=1.0).dtype == jnp.bfloat16
