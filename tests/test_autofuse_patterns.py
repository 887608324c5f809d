"""autofuse: softmax, norms and ReLU in many spellings, and near misses.

Cross-entropy is in test_autofuse_losses.py, whole models are in test_autofuse_models.py.
"""

import jax
import jax.numpy as jnp
import pytest
from autofuse_checks import assert_same, left, operations, primitives
from autofuse_formulas import (
    WHERE,
    B,
    S,
    X,
    Y,
    batch_norm,
    deviation_of,
    layer_norm,
    mean_of,
    normalised,
    variance_of,
)
from jax import lax

import jaxnorm

# ---- softmax and norms ----

SOFTMAX = {
    "jax.nn": (jax.nn.softmax, "softmax(x, axis=-1)"),
    "axis 0": (lambda x: jax.nn.softmax(x, axis=0), "softmax(x, axis=0)"),
    "axes": (lambda x: jax.nn.softmax(x, axis=(1, 2)), "softmax(x, axis=(-2, -1))"),
    "apart": (lambda x: jax.nn.softmax(x, axis=(0, 2)), "softmax(x, axis=(-3, -1))"),
    "scale": (lambda x: jax.nn.softmax(x * 0.125), "softmax(x, axis=-1, scale=0.125)"),
    "divided": (lambda x: jax.nn.softmax(x / 4), "softmax(x, axis=-1, scale=0.25)"),
    "bias": (lambda x: jax.nn.softmax(x + B), "softmax(x, bias=bias, axis=-1)"),
    "scale and bias": (
        lambda x: jax.nn.softmax(B[None] + x * 2.0),
        "softmax(x, bias=bias, axis=-1, scale=2.0)",
    ),
    "mask as bias": (
        lambda x: jax.nn.softmax(x + jnp.where(WHERE, 0.0, -1e9)),
        "softmax(x, bias=bias, axis=-1)",
    ),
    "where": (
        lambda x: jax.nn.softmax(x, where=WHERE),
        "softmax(x, where=where, axis=-1)",
    ),
    "where not": (
        lambda x: jax.nn.softmax(x, where=~WHERE),
        "softmax(x, where=where, axis=-1)",
    ),
    "where and scale": (
        lambda x: jax.nn.softmax(x * 0.5, where=WHERE[:1]),
        "softmax(x, where=where, axis=-1, scale=0.5)",
    ),
    "transposed": (lambda x: jax.nn.softmax(x.T).T, "softmax(x, axis=0)"),
    "moved": (
        lambda x: jnp.moveaxis(jax.nn.softmax(jnp.moveaxis(x, 1, -1)), -1, 1),
        "softmax(x, axis=1)",
    ),
    "log": (jax.nn.log_softmax, "log_softmax(x, axis=-1)"),
    "log, where": (
        lambda x: jnp.where(WHERE, jax.nn.log_softmax(x, where=WHERE), 0),
        "log_softmax(x, where=where, axis=-1)",
    ),
    "by hand": (
        lambda x: (e := jnp.exp(x - x.max(1, keepdims=True))) / e.sum(1, keepdims=True),
        "softmax(x, axis=1)",
    ),
    "by hand, inverse": (
        lambda x: (e := jnp.exp(x - x.max(1)[:, None])) * (1 / e.sum(1)[:, None]),
        "softmax(x, axis=1)",
    ),
    "without derivative of max": (
        lambda x: jnp.exp(s := x - lax.stop_gradient(x.max(0)))
        / jnp.sum(jnp.exp(s), 0, keepdims=True),
        "softmax(x, axis=0)",
    ),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name):
    function, call = SOFTMAX[name]
    assert_same(function, X)
    assert operations(function, X) == [f"jaxnorm.{call}"]
    assert_fused_derivative(function)


def assert_fused_derivative(function):
    gradient = jax.grad(lambda x: jaxnorm.autofuse(function)(x).sum())
    assert primitives(gradient, X) == {"jaxnorm_softmax_fwd", "jaxnorm_softmax_bwd"}


NORMS = {
    "textbook": (layer_norm, "layer_norm(x, scale, bias, axis=-1, epsilon=1e-05)"),
    "jnp.var": (
        lambda x: S * deviation_of(x) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) + B,
        "layer_norm(x, scale, bias, axis=-1, epsilon=1e-05)",
    ),
    "fast": (
        lambda x: deviation_of(x)
        * lax.rsqrt(
            jnp.mean(x**2, -1, keepdims=True) - jnp.square(x.mean(-1, keepdims=True)) + 0.1
        ),
        "layer_norm(x, axis=-1, epsilon=0.1)",
    ),
    "jax.nn.standardize": (
        lambda x: jax.nn.standardize(x, epsilon=0.1) * S,
        "layer_norm(x, scale, axis=-1, epsilon=0.1)",
    ),
    "power": (
        lambda x: deviation_of(x) * (x.var(-1, keepdims=True) + 1e-5) ** -0.5 + B,
        "layer_norm(x, bias=bias, axis=-1, epsilon=1e-05)",
    ),
    "scale first": (
        lambda x: deviation_of(x) * (S / jnp.sqrt(x.var(-1)[..., None] + 1e-5)),
        "layer_norm(x, scale, axis=-1, epsilon=1e-05)",
    ),
    "scale and shift": (
        lambda x: x * (r := S * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5))
        + (B - x.mean(-1, keepdims=True) * r),
        "layer_norm(x, scale, bias, axis=-1, epsilon=1e-05)",
    ),
    "no epsilon": (
        lambda x: deviation_of(x) / x.std(-1, keepdims=True),
        "layer_norm(x, axis=-1, epsilon=0.0)",
    ),
    "two axes": (
        lambda x: deviation_of(x, (1, 2)) * lax.rsqrt(x.var((1, 2), keepdims=True) + 0.1),
        "layer_norm(x, axis=(-2, -1), epsilon=0.1)",
    ),
    "axis 1": (
        lambda x: layer_norm(x.swapaxes(1, 2), S[: x.shape[1]], B[: x.shape[1]]).swapaxes(1, 2),
        "layer_norm(x, scale, bias, axis=1, epsilon=1e-05)",
    ),
    "axis 1, no parameters": (
        lambda x: deviation_of(x, 1) * lax.rsqrt(x.var(1, keepdims=True) + 0.1),
        "layer_norm(x, axis=1, epsilon=0.1)",
    ),
    "rms, axis 0": (
        lambda x: x * lax.rsqrt(jnp.mean(x * x, 0, keepdims=True) + 1e-5),
        "rms_norm(x, axis=0, epsilon=1e-05)",
    ),
    "masked": (
        lambda x: (x - (m := x.mean(-1, keepdims=True, where=WHERE[:5])))
        * lax.rsqrt(jnp.mean((x - m) ** 2, -1, keepdims=True, where=WHERE[:5]) + 0.1)
        * S,
        "layer_norm(x, scale, mask=mask, axis=-1, epsilon=0.1)",
    ),
    "rms": (
        lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * S,
        "rms_norm(x, scale, axis=-1, epsilon=1e-05)",
    ),
    "rms, scale from 1": (
        lambda x: x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * (1 + S),
        "rms_norm(x, scale, axis=-1, epsilon=1e-05)",
    ),
    "rms, sum over number": (
        lambda x: S * (x / jnp.sqrt((x**2).sum(-1, keepdims=True) / 16 + 1e-5)),
        "rms_norm(x, scale, axis=-1, epsilon=1e-05)",
    ),
    "rms of a difference": (
        lambda x: (d := x - S) * lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-5),
        "rms_norm(x, axis=-1, epsilon=1e-05)",
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm(name):
    function, call = NORMS[name]
    x = X[:, :5] if name == "masked" else X
    assert_same(function, x)
    assert operations(function, x) == [f"jaxnorm.{call}"]
    names = primitives(jax.grad(lambda x: jaxnorm.autofuse(function)(x).sum()), x)
    assert names == {"jaxnorm_norm_fwd", "jaxnorm_norm_bwd"}


DTYPES = ("bfloat16", "float16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_dtypes(name, dtype):
    """In one dtype throughout, and in float32 between two conversions."""
    x, s = X.astype(dtype), S.astype(dtype)
    functions = {
        "softmax": lambda x, s: jax.nn.softmax(x * 2 + s),
        "layer_norm": lambda x, s: layer_norm(x, s, s),
        "rms_norm": lambda x, s: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * s,
    }
    function = functions[name]

    def in_float32(x, s):
        return function(x.astype(jnp.float32), s.astype(jnp.float32)).astype(dtype)

    tolerance = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5, "float64": 1e-12}[dtype]
    assert_same(function, x, s, tolerance=tolerance, gradient_tolerance=5 * tolerance)
    (call,) = operations(function, x, s)
    assert call.startswith(f"jaxnorm.{name}(x,")
    assert_same(
        in_float32, x, s, tolerance=max(tolerance, 2e-5), gradient_tolerance=8 * tolerance + 1e-4
    )
    (call,) = operations(in_float32, x, s)
    assert call.startswith(f"jaxnorm.{name}(x,")


def test_result_wider_than_x():
    """As Flax without dtype: bfloat16 in, float32 out."""
    x = X.astype(jnp.bfloat16)

    def function(x, scale):
        return layer_norm(x.astype(jnp.float32), scale)

    assert_same(function, x, S, gradient_tolerance=1e-2)
    assert operations(function, x, S) == [
        "jaxnorm.layer_norm(x, scale, bias, axis=-1, epsilon=1e-05)"
    ]


def test_rounding_on_the_way_is_kept():
    def llama(x, scale):
        wide = x.astype(jnp.float32)
        normalised = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        return normalised.astype(x.dtype).astype(scale.dtype) * scale

    x, scale = X.astype(jnp.bfloat16), S.astype(jnp.bfloat16)
    assert_same(llama, x, scale, tolerance=2e-2, gradient_tolerance=4e-2)
    assert operations(llama, x, scale) == ["jaxnorm.rms_norm(x, scale, axis=-1, epsilon=1e-05)"]
    # With a float32 scale the result is float32, of something that was rounded to bfloat16.
    assert_same(llama, x, S, tolerance=1e-2, gradient_tolerance=4e-2)
    assert operations(llama, x, S) == ["jaxnorm.rms_norm(x, axis=-1, epsilon=1e-05)"]


# ---- ReLU and batch norm ----


def running(x):
    y, mean, variance = batch_norm(x)
    return jax.nn.relu(y), 0.9 * B + 0.1 * mean[0, 0], jnp.squeeze(variance) * 0.1


RELU = {
    "relu": (lambda x, y: jax.nn.relu(x), ["relu(x)"]),
    "add": (lambda x, y: jax.nn.relu(x + y), ["add_relu(x, y)"]),
    "broadcast add": (lambda x, y: jax.nn.relu(x + y[:1]), ["relu(x)"]),
    "sum used": (lambda x, y: (jax.nn.relu(s := x + y), s), ["relu(x)"]),
    "broadcast": (lambda x, y: jax.nn.relu(jnp.broadcast_to(x[:1], y.shape)) * y, ["relu(x)"]),
    "broadcast, transposed": (
        lambda x, y: jax.nn.relu(jnp.broadcast_to(x[:, 0].T[:, None], (16, 6, 4))).T * y,
        ["relu(x)"],
    ),
    "broadcast scalar": (lambda x, y: jax.nn.relu(jnp.full(y.shape, x.sum())) * y, ["relu(x)"]),
    "broadcast sum": (
        lambda x, y: jax.nn.relu(jnp.broadcast_to(x[0] + y[1], y.shape)) * y,
        ["add_relu(x, y)"],
    ),
    "broadcast norm": (
        lambda x, y: jax.nn.relu(jnp.broadcast_to(layer_norm(x[0]), y.shape)) * y,
        ["layer_norm(x, scale, bias, axis=-1, epsilon=1e-05)", "relu(x)"],
    ),
    "of a broadcast in a jit": (
        lambda x, y: jax.jit(jax.nn.relu)(jnp.broadcast_to(x[:, :, :1], y.shape)) * y,
        ["relu(x)"],
    ),
    "batch norm": (
        lambda x, y: batch_norm(x)[0],
        ["batch_norm(x, scale, bias, axis=-1, epsilon=1e-05)"],
    ),
    "batch norm, NCHW": (
        lambda x, y: batch_norm(x, S[:6, None], B[:6, None], (0, 2)),
        ["batch_norm(x, scale, bias, axis=1, epsilon=1e-05)"],
    ),
    "batch norm, NCHW, no parameters": (  # layer_norm over (0, 2) is the same, and has no kernel
        lambda x, y: deviation_of(x, (0, 2)) * lax.rsqrt(x.var((0, 2), keepdims=True) + 0.1),
        ["batch_norm(x, axis=1, epsilon=0.1)"],
    ),
    "running averages": (
        lambda x, y: running(x),
        ["batch_norm(x, scale, bias, axis=-1, epsilon=1e-05, activation='relu')"],
    ),
    "add and relu": (
        lambda x, y: jax.nn.relu(y + batch_norm(x)[0]),
        [
            "batch_norm(x, scale, bias, residual=residual, axis=-1, epsilon=1e-05, activation='relu')"
        ],
    ),
    "two of them": (
        lambda x, y: jax.nn.relu(batch_norm(x)[0] + batch_norm(y)[0]),
        [
            "batch_norm(x, scale, bias, axis=-1, epsilon=1e-05)",
            "batch_norm(x, scale, bias, residual=residual, axis=-1, epsilon=1e-05, activation='relu')",
        ],
    ),
    "inference": (
        lambda x, y: jax.nn.relu(normalised(x, B, S * S)),
        [
            "batch_norm_inference(x, mean, var, scale, bias, axis=-1, epsilon=1e-05, activation='relu')"
        ],
    ),
    "inference, add": (
        lambda x, y: jax.nn.relu(normalised(x, B, jnp.exp(S)) + y),
        [
            "batch_norm_inference(x, mean, var, scale, bias, residual=residual, axis=-1, "
            "epsilon=1e-05, activation='relu')"
        ],
    ),
}


@pytest.mark.parametrize("name", RELU)
def test_relu_and_batch_norm(name):
    function, calls = RELU[name]
    assert_same(function, X, Y, gradient_tolerance=2e-3)
    assert operations(function, X, Y) == [f"jaxnorm.{c}" for c in calls]


@pytest.mark.parametrize("used", [False, True])
def test_residual(used):
    """The sum is an output of the operation; what makes it and uses it stays in order."""

    def function(x, y):
        total = jnp.sin(x) + y
        normalised = layer_norm(total)
        return jnp.tanh(normalised) + total * 2 if used else normalised

    assert_same(function, X, Y)
    assert operations(function, X, Y) == [
        "jaxnorm.layer_norm(x, scale, bias, residual=residual, axis=-1, epsilon=1e-05)"
    ]
    assert primitives(jaxnorm.autofuse(function), X, Y) == {"jaxnorm_norm_fwd"}


def test_residual_that_scale_depends_on():
    """The sum cannot come from a call that needs it."""

    def function(x, y):
        total = x + y
        return layer_norm(total, scale=jnp.sin(total.sum((0, 1)))), total

    assert_same(function, X, Y)
    assert operations(function, X, Y) == [
        "jaxnorm.layer_norm(x, scale, bias, axis=-1, epsilon=1e-05)"
    ]


# ---- near misses ----


def quotient(e, axis=-1):
    return e / e.sum(axis, keepdims=True)


@jax.custom_jvp
def leaky(x):
    return jnp.maximum(x, 0)


leaky.defjvp(lambda primals, tangents: (leaky(*primals), tangents[0] * (primals[0] + 1)))


@jax.custom_jvp
def reversed_gradient(x):
    return x


reversed_gradient.defjvp(lambda primals, tangents: (primals[0], -tangents[0]))

NEAR_MISSES = {
    "gradient of the numerator reversed": (
        lambda x: jnp.exp(reversed_gradient(x) - x.max(-1, keepdims=True))
        / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True),
        "the numerator is not what the denominator sums",
    ),
    "gradient of x reversed": (
        lambda x: normalised(reversed_gradient(x), mean_of(x), variance_of(x)),
        None,
    ),
    "maximum over another axis": (
        lambda x: quotient(jnp.exp(x - x.max(0, keepdims=True))),
        "the maximum is over other axes than the sum",
    ),
    "maximum over all axes": (
        lambda x: quotient(jnp.exp(x - x.max())),
        "the maximum is over other axes than the sum",
    ),
    "maximum of another array": (
        lambda x: quotient(jnp.exp(x - jnp.sin(x).max(-1, keepdims=True))),
        "the maximum is not that of the exponents",
    ),
    "no maximum": (lambda x: quotient(jnp.exp(x)), "no maximum is subtracted"),
    "minimum": (
        lambda x: quotient(jnp.exp(x - x.min(-1, keepdims=True))),
        "what is subtracted from the exponents is not their maximum",
    ),
    "numerator behind stop_gradient": (
        lambda x: jnp.exp(lax.stop_gradient(x) - x.max(-1, keepdims=True))
        / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True),
        "the numerator is not what the denominator sums",
    ),
    "exponents behind stop_gradient": (
        lambda x: quotient(jnp.exp(lax.stop_gradient(x) - x.max(-1, keepdims=True))),
        "behind a stop_gradient",
    ),
    "denominator behind stop_gradient": (
        lambda x: (e := jnp.exp(x - x.max(-1, keepdims=True)))
        / lax.stop_gradient(e.sum(-1, keepdims=True)),
        None,
    ),
    "mask on the sum only": (
        lambda x: (e := jnp.exp(x - x.max(-1, keepdims=True)))
        / jnp.sum(e, -1, keepdims=True, where=WHERE),
        "a mask is on the sum",
    ),
    "two masks": (
        lambda x: jnp.where(WHERE[::-1], jax.nn.softmax(jnp.where(WHERE, x, -jnp.inf)), 0),
        None,  # a softmax of its own, behind which there is another mask
    ),
    "sum over two axes": (
        lambda x: (e := jnp.exp(x - x.max(-1, keepdims=True))) / e.sum((1, 2), keepdims=True),
        "the maximum is over other axes than the sum",
    ),
    "sum of rows in another place": (
        lambda x: (e := jnp.exp(x[:, 0] - x[:, 0].max(-1, keepdims=True)))[:, :4] / e.sum(-1)[None],
        None,
    ),
    "epsilon in the denominator": (
        lambda x: (e := jnp.exp(x - x.max(-1, keepdims=True))) / (e.sum(-1, keepdims=True) + 1e-5),
        None,
    ),
    "exponentials used": (
        lambda x: ((e := jnp.exp(x - x.max(-1, keepdims=True))) / e.sum(-1, keepdims=True), e),
        "an intermediate is used elsewhere: exp -> float32[4,6,16] at ",
    ),
    "epsilon outside of the root": (
        lambda x: (x - mean_of(x)) / (jnp.sqrt(variance_of(x)) + 1e-5),
        "epsilon is outside of it",
    ),
    "multiplied by the root": (
        lambda x: (x - mean_of(x)) * jnp.sqrt(variance_of(x) + 1e-5),
        "the root multiplies",
    ),
    "ddof": (
        lambda x: normalised(x, mean_of(x), variance_of(x, ddof=1)),
        "a mean over 16 elements divides by 15",
    ),
    "mean over another axis": (
        lambda x: normalised(x, mean_of(x, 1), variance_of(x)),
        "the mean that is subtracted is over other axes than the variance",
    ),
    "mean of another array": (
        lambda x: normalised(x, mean_of(jnp.sin(x)), variance_of(x)),
        "what is subtracted is not the mean of x",
    ),
    "half of the mean": (lambda x: normalised(x, mean_of(x) / 2, variance_of(x)), "divides by 32"),
    "no mean": (
        lambda x: x * lax.rsqrt(variance_of(x) + 1e-5),
        "the variance is that around the mean, which is not subtracted",
    ),
    "mean, and a mean square": (
        lambda x: normalised(x, mean_of(x), mean_of(x * x)),
        "something is subtracted from x that its mean square does not have",
    ),
    "variance behind stop_gradient": (
        lambda x: normalised(x, mean_of(x), lax.stop_gradient(variance_of(x))),
        None,
    ),
    "mean behind stop_gradient": (
        lambda x: normalised(x, lax.stop_gradient(mean_of(x)), variance_of(x)),
        "what is subtracted is not the mean of x",
    ),
    "scale behind another mean": (
        lambda x: x * (r := lax.rsqrt(variance_of(x) + 1e-5)) * S - mean_of(x) * r * B,
        "what is subtracted is not the mean of x",
    ),
    "variance used": (
        lambda x: (normalised(x, mean_of(x), v := variance_of(x)), v),
        "an intermediate is used elsewhere: ",
    ),
    "mask on one of the means": (
        lambda x: normalised(x, mean_of(x, where=WHERE), variance_of(x)),
        "mean and variance do not count the same elements",
    ),
    "other masks": (
        lambda x: normalised(x, m := mean_of(x, where=WHERE), mean_of((x - m) ** 2, where=~WHERE)),
        "do not count the same elements",
    ),
    "statistics of groups": (
        lambda x: normalised(x, jnp.repeat(x[:, :1, ::4], 4, 2), jnp.exp(X[:, :1])),
        "features are dimensions (0, 2): only neighbouring ones have a kernel",
    ),
    "maximum(0, x)": (lambda x: jnp.maximum(0, x), None),
    "maximum(x, 0)": (lambda x: jnp.maximum(x, 0), "whose derivative at 0 is 1/2"),
    "other derivative": (leaky, "its derivative is not that of relu"),
    "relu of a number": (lambda x: x * jax.nn.relu(2.0), "its operand is a number of the program"),
    "relu of a number in a jit": (
        lambda x: x * jax.jit(jax.nn.relu)(2.0),
        "its operand is a number of the program",
    ),
    "relu of equal numbers": (
        lambda x: x * jax.nn.relu(jnp.full(16, 0.5)),
        "its operand is a number of the program",
    ),
    "rms norm, scale of other dimensions": (
        lambda x: x * S * lax.rsqrt(mean_of(x * x, 1) + 1e-5),
        "scale has dimensions that are not normalised",
    ),
    "layer norm, scale of rows and columns": (
        lambda x: deviation_of(x)
        * x[:1].sum(1, keepdims=True) ** 0
        * Y[0]
        * lax.rsqrt(variance_of(x) + 1e-5),
        "scale or bias has normalised dimensions and others",
    ),
    "rms norm of twice x": (
        lambda x: 2 * x * lax.rsqrt(mean_of(x * x) + 1e-5),
        "the result is multiplied by a number",
    ),
    "relu6": (jax.nn.relu6, None),
    "leaky relu": (jax.nn.leaky_relu, None),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    """Left alone, for the reason given; None is for what does not look like an operation at all."""
    function, reason = NEAR_MISSES[name]
    x = X + 3.0  # where WHERE keeps nothing, means are not a number
    if name == "two masks":
        assert operations(function, x) == ["jaxnorm.softmax(x, axis=-1)"]
        return
    reasons = left(function, x)
    assert primitives(jaxnorm.autofuse(function), x) == set()
    assert any(reason in r for r in reasons) if reason else not reasons
    if "mask" not in name:
        assert_same(function, x)
