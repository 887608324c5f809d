"""autofuse: cross-entropy of a product, whose logits are then never in memory."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autofuse_checks import assert_close, assert_same, operations, primitives
from jax import lax
from jax.nn import log_softmax, logsumexp
from jax.sharding import PartitionSpec as P
from suite import rand

import jaxnorm
from jaxnorm._autofuse.patterns import linear_cross_entropy as pattern

optax_loss = optax.softmax_cross_entropy_with_integer_labels

X, W, BIAS = rand((4, 6, 8)), rand((8, 32), seed=1), rand((32,), seed=2)
EMBEDDING = rand((32, 8), seed=3)
LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 6)), jnp.int32)
MASK = jnp.arange(6) < jnp.array([6, 3, 0, 1])[:, None]
OP = "linear_cross_entropy"
TOTAL, GRADIENT = "jaxnorm_linear_cross_entropy_total", "jaxnorm_linear_cross_entropy_grad"
SUM = "jaxnorm.linear_cross_entropy(x, w, labels, reduction='sum')"
MASKED = "jaxnorm.linear_cross_entropy(x, w, labels, weights=weights, reduction='sum')"
BIASED = "jaxnorm.linear_cross_entropy(x, w, labels, bias=bias, reduction='sum')"
TIED = "jaxnorm.linear_cross_entropy(x, w, labels, reduction='sum', w_axis=0)"
PLATFORMS = ("cpu", "gpu")
on_each_platform = pytest.mark.parametrize("target", PLATFORMS, ids="for {}".format)


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    """Flax and optax are written for JAX's own settings; small logits count as large."""
    monkeypatch.setattr(pattern, "MIN_BYTES", 1)
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield


def calls(function, *args, platform="cpu") -> list[str]:
    found = jaxnorm.autofuse(function, platform=platform).explain(*args).replaced
    return [c.call for c in found if c.operation == OP]


def reasons(function, *args, platform="cpu") -> list[str]:
    found = jaxnorm.autofuse(function, platform=platform).explain(*args)
    assert not [c for c in found.replaced if c.operation == OP], found
    return [c.reason for c in found.left if c.operation == OP]


def taken(x, labels, **kwargs):
    return jnp.take_along_axis(x, labels[..., None], -1, **kwargs).squeeze(-1)


def masked_mean(loss, mask):
    return jnp.sum(loss * mask) / jnp.sum(mask)


class Head(nn.Module):
    use_bias: bool

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, use_bias=self.use_bias)(x)


PLAIN, WITH_BIAS = Head(use_bias=False), Head(use_bias=True)
PARAMETERS = {"params": {"Dense_0": {"kernel": W, "bias": BIAS}}}
PLAIN_PARAMETERS = {"params": {"Dense_0": {"kernel": W}}}

# name: (function of x, w and labels, w, call)
FORMS = {
    "mean": (lambda x, w, n: optax_loss(x @ w, n).mean(), W, SUM),
    "sum": (lambda x, w, n: optax_loss(x @ w, n).sum(), W, SUM),
    "minus the mean": (lambda x, w, n: -taken(log_softmax(x @ w), n).mean(), W, f"-{SUM}"),
    "mean of minus": (lambda x, w, n: (-taken(log_softmax(x @ w), n)).mean(), W, SUM),
    "times a number": (lambda x, w, n: (optax_loss(x @ w, n) * 0.5).sum(), W, f"0.5 * {SUM}"),
    "clipped labels": (
        lambda x, w, n: taken(log_softmax(x @ w), 2 * n, mode="clip").sum(),
        W,
        f"-{SUM}",
    ),
    "logsumexp": (
        lambda x, w, n: (logsumexp(z := x @ w, -1) - taken(z, n)).mean(),
        W,
        SUM,
    ),
    "einsum": (lambda x, w, n: optax_loss(jnp.einsum("btd,dv->btv", x, w), n).sum(), W, SUM),
    "einsum, operands exchanged": (
        lambda x, w, n: optax_loss(jnp.einsum("dv,btd->btv", w, x), n).sum(),
        W,
        SUM,
    ),
    "first operand has the classes": (
        lambda x, w, n: optax_loss(
            lax.dot_general(w, x, (((0,), (2,)), ((), ()))).transpose(1, 2, 0), n
        ).sum(),
        W,
        SUM,
    ),
    "tokens transposed behind the product": (
        lambda x, w, n: optax_loss((x @ w).swapaxes(0, 1), n.T).sum(),
        W,
        SUM,
    ),
    "tied": (lambda x, w, n: optax_loss(x @ w.T, n).mean(), EMBEDDING, TIED),
    "tied einsum": (
        lambda x, w, n: optax_loss(jnp.einsum("btd,vd->btv", x, w), n).mean(),
        EMBEDDING,
        TIED,
    ),
    "flattened logits": (
        lambda x, w, n: optax_loss((x @ w).reshape(-1, 32), n.reshape(-1)).mean(),
        W,
        SUM,
    ),
    "flattened features": (
        lambda x, w, n: optax_loss(x.reshape(-1, 8) @ w, n.reshape(-1)).mean(),
        W,
        SUM,
    ),
    "one sequence": (lambda x, w, n: optax_loss(x[:1] @ w, n[:1]).mean(), W, SUM),
    "bias": (lambda x, w, n: optax_loss(x @ w + BIAS, n).mean(), W, BIASED),
    "Dense": (lambda x, p, n: optax_loss(PLAIN.apply(p, x), n).mean(), PLAIN_PARAMETERS, SUM),
    "Dense with bias": (
        lambda x, p, n: optax_loss(WITH_BIAS.apply(p, x), n).mean(),
        PARAMETERS,
        BIASED,
    ),
    "per example": (
        lambda x, w, n: jax.vmap(jax.vmap(lambda x, n: optax_loss(x @ w, n)))(x, n).mean(),
        W,
        SUM,
    ),
    "masked mean": (lambda x, w, n: masked_mean(optax_loss(x @ w, n), MASK), W, MASKED),
    "mask of labels": (
        lambda x, w, n: masked_mean(optax_loss(x @ w, n), (n % 3 > 0).astype(jnp.float32)),
        W,
        MASKED,
    ),
    "mask of sequences": (
        lambda x, w, n: masked_mean(optax_loss(x @ w, n), MASK[:, 1:2] + 0.5),
        W,
        MASKED,
    ),
    "mean where": (lambda x, w, n: optax_loss(x @ w, n).mean(where=MASK), W, MASKED),
    "where": (lambda x, w, n: jnp.where(MASK, optax_loss(x @ w, n), 0).sum(), W, MASKED),
    "optax, rows": (lambda x, w, n: optax_loss(x @ w, n, where=MASK[..., None]).sum(), W, MASKED),
    "mask and factor": (
        lambda x, w, n: jnp.where(MASK, optax_loss(x @ w, n) * (n + 1.0), 0).sum(),
        W,
        MASKED,
    ),
    "two factors, transposed": (
        lambda x, w, n: (optax_loss(x @ w, n).T * MASK.T * (n.T + 1.0)).sum(),
        W,
        MASKED,
    ),
    "jit": (jax.jit(lambda x, w, n: optax_loss(x @ w, n).mean()), W, SUM),
    "remat": (jax.checkpoint(lambda x, w, n: optax_loss(x @ w, n).mean()), W, SUM),
    "scan": (
        lambda x, w, n: lax.scan(
            lambda total, xn: (total + optax_loss(xn[0] @ w, xn[1]).sum(), None), 0.0, (x, n)
        )[0],
        W,
        SUM,
    ),
}


# JAX counts negative labels from the end.
LABELS_OF_FORMS = (LABELS, LABELS - 32)


@functools.cache
def plain_results(name):
    """(loss, gradients) of a form as it is, for either kind of labels."""
    function, w, _ = FORMS[name]
    run = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))
    return [run(X, w, labels) for labels in LABELS_OF_FORMS]


@on_each_platform
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, target):
    function, w, call = FORMS[name]
    assert calls(function, X, w, LABELS, platform=target) == [call]
    fused = jaxnorm.autofuse(function, platform=target)
    assert TOTAL in primitives(fused, X, w, LABELS)
    gradient = jax.jit(jax.grad(fused, argnums=(0, 1)))
    assert GRADIENT in primitives(gradient, X, w, LABELS)
    run = jax.jit(lambda *args: (fused(*args), gradient(*args)))
    for labels, (loss, expected) in zip(LABELS_OF_FORMS, plain_results(name), strict=True):
        found = run(X, w, labels)
        assert_close(found[0], loss, 2e-5)
        assert_close(found[1], expected, 1e-4)


@pytest.mark.parametrize("name", ["mean", "Dense with bias", "two factors, transposed", "remat"])
def test_under_jit_and_derivatives(name):
    function, w, _ = FORMS[name]
    assert_same(function, X, w, LABELS)


@on_each_platform
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_product_in_16_bits(dtype, target):
    """The logits are rounded by the product, and the loss is that of float32 arithmetic."""

    def function(x, w, labels):
        return masked_mean(optax_loss((x @ w).astype(jnp.float32), labels), MASK)

    def flattened(x, w, labels):
        logits = (x @ w).reshape(-1, 32).astype(jnp.float32) + BIAS
        return optax_loss(logits, labels.reshape(-1)).mean()

    def from_float32(x, w, labels):
        return function(x.astype(dtype), w.astype(dtype), labels)

    x, w = X.astype(dtype), W.astype(dtype)
    assert calls(function, x, w, LABELS, platform=target) == [MASKED]
    assert calls(flattened, x, w, LABELS, platform=target) == [BIASED]
    assert calls(from_float32, X, W, LABELS, platform=target) == [MASKED]
    for f, *args in ((function, x, w), (flattened, x, w), (from_float32, X, W)):
        fused = jaxnorm.autofuse(f, platform=target)
        # Compiled as a whole, either may leave out a rounding.
        assert_close(fused(*args, LABELS), f(*args, LABELS), 2e-3)
        gradients = [jax.grad(g, argnums=(0, 1))(*args, LABELS) for g in (fused, f)]
        assert_close(*gradients, 2e-2)


def test_float32_product_of_16_bits():
    """Operands that are cast first have a product that is not rounded."""

    def function(x, w, labels):
        return optax_loss(x.astype(jnp.float32) @ w.astype(jnp.float32), labels).mean()

    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    assert calls(function, x, w, LABELS) == [SUM]
    assert_same(function, x, w, LABELS, gradient_tolerance=1e-2)
    rounded = optax_loss((x @ w).astype(jnp.float32), LABELS).mean()
    assert abs(rounded - function(x, w, LABELS)) > 1e-5


def test_float64():
    with jax.enable_x64(True):
        x, w = (jnp.asarray(np.asarray(a, np.float64)) for a in (X, W))

        def function(x, w, labels):
            return optax_loss(x @ w, labels).mean()

        assert calls(function, x, w, LABELS) == [SUM]
        assert_same(function, x, w, LABELS, tolerance=1e-12)


def is_class(labels):
    return (labels >= 0) & (labels < 32)


# name: (a loss, whether labels outside of the classes make the loss NaN)
LABELS_OF_NO_CLASS = {
    "all count": (lambda x, w, n: optax_loss(x @ w, n).sum(), True),
    "hidden": (lambda x, w, n: jnp.where(is_class(n), optax_loss(x @ w, n), 0).sum(), False),
    "hidden by a product with booleans": (
        lambda x, w, n: masked_mean(optax_loss(x @ w, n), is_class(n)),
        False,
    ),
    "hidden by a product with booleans of floats": (
        lambda x, w, n: masked_mean(optax_loss(x @ w, n), is_class(n).astype(jnp.float32)),
        False,
    ),
    "times 0": (
        lambda x, w, n: (optax_loss(x @ w, n) * jnp.abs(n - 32) * jnp.abs(n + 33)).sum(),
        True,
    ),
    "clipped": (
        lambda x, w, n: (taken(log_softmax(x @ w), n, mode="clip") * (n + 1.0)).sum(),
        False,
    ),
}


@on_each_platform
@pytest.mark.parametrize("name", LABELS_OF_NO_CLASS)
def test_labels_of_no_class(name, target):
    """They are NaN, clipped or hidden, as the program compiled by XLA has it."""
    function, is_nan = LABELS_OF_NO_CLASS[name]
    labels = LABELS.at[:, 2].set(32).at[0, 0].set(-33)
    assert len(calls(function, X, W, labels, platform=target)) == 1
    fused = jaxnorm.autofuse(function, platform=target)
    expected = jax.jit(function)(X, W, labels)
    assert np.isnan(expected) == is_nan
    for f in (fused, jax.jit(fused)):
        assert_close(f(X, W, labels), expected, 2e-5)


@on_each_platform
def test_derivative_of_factors(target):
    """With respect to a factor, of 0 too, it is the token's loss: the program's own code has that."""

    def function(x, w, factor):
        return (optax_loss(x @ w, LABELS) * factor).sum()

    factor = MASK.astype(jnp.float32)
    fused = jaxnorm.autofuse(function, platform=target)
    assert calls(function, X, W, factor, platform=target) == [MASKED]
    assert GRADIENT in primitives(jax.grad(fused, argnums=(0, 1)), X, W, factor)
    for numbers in (0, 2, (0, 1, 2)):
        gradients = [jax.grad(f, argnums=numbers)(X, W, factor) for f in (fused, function)]
        assert_close(*gradients, 1e-4)
    assert np.all(jax.grad(fused, argnums=2)(X, W, factor) != 0)


def test_sharded():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(
        lambda x, w, n: lax.pmean(optax_loss(x @ w, n).mean(), "a"),
        mesh=mesh,
        in_specs=(P("a"), P(), P("a")),
        out_specs=P(),
    )
    assert_same(function, X, W, LABELS)
    (candidate,) = jaxnorm.autofuse(function).explain(X, W, LABELS).candidates
    assert (candidate.operation, candidate.place) == (OP, ("shard_map",))


@on_each_platform
def test_report(target, monkeypatch):
    """Of a large head: what the derivative keeps is the gradients of x and w, in at most float32, and no logits."""
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((4, 2048, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024, 32768), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((4, 2048), jnp.int32)

    def function(x, w, labels):
        return optax_loss((x @ w).astype(jnp.float32), labels).mean()

    (candidate,) = jaxnorm.autofuse(function, platform=target).explain(x, w, labels).candidates
    assert candidate.call == SUM
    assert candidate.replaced == "always"
    assert "logits and their gradient are in memory for some tokens at a time" in candidate.reason
    elements = x.size + w.size
    assert 2 * elements <= candidate.kept < 4.1 * elements
    assert candidate.kept_before > 2 * 8192 * 32768


PER_TOKEN = "the losses of tokens are not just summed over all tokens"

# name: (function of x, w and labels, the reason or None for code that looks like something else)
NEAR_MISSES = {
    "losses used": (lambda x, w, n: optax_loss(x @ w, n), PER_TOKEN),
    "one token": (lambda x, w, n: optax_loss(x[0, 0] @ w, n[0, 0]).sum(), PER_TOKEN),
    "gradient in the function": (
        lambda x, w, n: jax.value_and_grad(lambda x: optax_loss(x @ w, n).mean())(x),
        "an intermediate is used elsewhere",
    ),
    "losses summed in parts": (lambda x, w, n: optax_loss(x @ w, n).sum(-1), PER_TOKEN),
    "function of losses": (lambda x, w, n: jnp.square(optax_loss(x @ w, n)).sum(), PER_TOKEN),
    "losses summed and used": (
        lambda x, w, n: ((loss := optax_loss(x @ w, n)).mean(), loss),
        "an intermediate is used elsewhere: sub -> float32[4,6]",
    ),
    "accuracy": (
        lambda x, w, n: (optax_loss(z := x @ w, n).mean(), (z.argmax(-1) == n).mean()),
        "an intermediate is used elsewhere: dot_general -> float32[4,6,32]",
    ),
    "batch dimensions": (
        lambda x, w, n: optax_loss(
            jnp.einsum("btd,bdv->btv", x, w + jnp.arange(4.0)[:, None, None]), n
        ).sum(),
        "the product has batch dimensions",
    ),
    "another dimension": (
        lambda x, w, n: optax_loss(jnp.einsum("bdt,dv->btv", x.swapaxes(1, 2), w), n).sum(),
        "the product contracts another dimension of x than the last",
    ),
    "two dimensions": (
        lambda x, w, n: optax_loss(
            jnp.einsum("btde,dev->btv", x.reshape(4, 6, 2, 4), w.reshape(2, 4, 32)), n
        ).sum(),
        "the product contracts several dimensions",
    ),
    "precision": (
        lambda x, w, n: optax_loss(jnp.matmul(x, w, precision="highest"), n).sum(),
        "the product asks for a precision",
    ),
    "activation": (lambda x, w, n: optax_loss(jnp.tanh(x @ w), n).sum(), None),
    "scaled": (lambda x, w, n: optax_loss((x @ w) * 0.5, n).sum(), None),
    "bias of tokens": (lambda x, w, n: optax_loss(x @ w + x[..., :1], n).sum(), None),
    "factor of x": (
        lambda x, w, n: (optax_loss(x @ w, n) * jnp.exp(x[..., 0])).sum(),
        "a factor of the losses depends on x or w",
    ),
    "factor of logits": (
        lambda x, w, n: ((loss := optax_loss(x @ w, n)) * jnp.exp(-loss)).sum(),
        None,
    ),
    "broadcast losses": (
        lambda x, w, n: (optax_loss(x[0] @ w, n[0]) * (n + 1.0)).sum(),
        "losses are broadcast before they are summed",
    ),
    "few classes": (
        lambda x, w, n: optax_loss(x @ w[:, :8], n % 8).sum(),
        "with 8 classes and 8 features, logits are no larger than x",
    ),
}  # fmt: skip


@on_each_platform
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name, target):
    function, reason = NEAR_MISSES[name]
    found = reasons(function, X, W, LABELS, platform=target)
    # On a GPU a quick look tells backward code from losses.
    if reason and (target == "cpu" or name != "gradient in the function"):
        assert any(reason in r for r in found), found
    if target == "cpu":  # the values are the same on both
        assert_same(function, X, W, LABELS)


def test_losses_that_are_used_are_those_of_softmax_cross_entropy():
    function, _ = NEAR_MISSES["losses used"]
    expected = ["jaxnorm.softmax_cross_entropy(logits, labels, axis=-1)"]
    assert operations(function, X, W, LABELS) == expected


@on_each_platform
def test_unrounded_product_of_16_bits(target):
    """linear_cross_entropy would round the logits."""

    def function(x, w, labels):
        return optax_loss(jnp.matmul(x, w, preferred_element_type=jnp.float32), labels).mean()

    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    (reason,) = reasons(function, x, w, LABELS, platform=target)
    assert reason.startswith("the product of bfloat16 and bfloat16 is float32")


@on_each_platform
def test_bias_added_in_16_bits(target):
    """The program rounds its logits again, linear_cross_entropy does not."""

    def function(x, w, labels):
        return optax_loss((x @ w + BIAS.astype(x.dtype)).astype(jnp.float32), labels).mean()

    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    (reason,) = reasons(function, x, w, LABELS, platform=target)
    assert reason.startswith("an intermediate is rounded to bfloat16, the result is float32: add")


@on_each_platform
def test_float64_loss_of_float32_product(target):
    with jax.enable_x64(True):

        def function(x, w, labels):
            return optax_loss((x @ w).astype(jnp.float64), labels).sum()

        x, w = X.astype(jnp.float32), W.astype(jnp.float32)
        (reason,) = reasons(function, x, w, LABELS, platform=target)
        assert reason == "the loss is float64, and the product float32"


def test_small_logits(monkeypatch):
    """They are left; on a GPU nothing is looked for then."""
    function, w, call = FORMS["mean"]
    monkeypatch.setattr(pattern, "MIN_BYTES", 4 * 4 * 6 * 32)
    for target in PLATFORMS:
        assert calls(function, X, w, LABELS, platform=target) == [call]
    monkeypatch.setattr(pattern, "MIN_BYTES", 4 * 4 * 6 * 32 + 1)
    (reason,) = reasons(function, X, w, LABELS)
    assert reason.startswith("the logits have 0.00293 MiB")
    assert not reasons(function, X, w, LABELS, platform="gpu")


def test_large_logits_are_seen_in_any_body():
    def without_maximum(x, w, n):
        return jnp.square(x @ w).sum()

    for name in ("mean", "jit", "remat", "scan", "flattened logits"):
        function, w, _ = FORMS[name]
        assert pattern.has_large_logits(jax.make_jaxpr(function)(X, w, LABELS))
    assert not pattern.has_large_logits(jax.make_jaxpr(without_maximum)(X, W, LABELS))


def test_no_logits_are_seen_in_backward_code_and_attention():
    def attention(x):
        return jax.nn.softmax(x @ x.swapaxes(-1, -2)) @ x

    function, w, _ = FORMS["mean"]
    gradient = jax.make_jaxpr(jax.value_and_grad(function))(X, w, LABELS)
    assert not pattern.has_large_logits(gradient)
    assert not pattern.has_large_logits(jax.make_jaxpr(attention)(X))
    two = jax.make_jaxpr(lambda x, w, n: (function(x, w, n), attention(x)))(X, w, LABELS)
    assert pattern.has_large_logits(two)

    def with_hidden_layer(x):
        """The hidden layer has as many elements as the scores of both heads."""
        q = x.reshape(4, 6, 2, 4)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, q)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q)
        hidden = x @ jnp.ones((8, 12))
        assert hidden.size == scores.size
        return jnp.tanh(hidden), mixed

    assert not pattern.has_large_logits(jax.make_jaxpr(with_hidden_layer)(X))
