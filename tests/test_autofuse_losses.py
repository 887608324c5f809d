"""autofuse: cross-entropy with integer labels, as optax and textbooks write it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autofuse_checks import assert_same, left, operations, primitives
from jax import lax
from jax.nn import log_softmax, logsumexp
from jax.sharding import PartitionSpec as P
from suite import rand

import jaxnorm

optax_loss = optax.softmax_cross_entropy_with_integer_labels

X = rand((4, 6, 16))
LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 6)), jnp.int32)
ROWS = jnp.arange(6) < jnp.array([6, 3, 0, 1])[:, None]
FUSED = {"jaxnorm_cross_entropy_fwd", "jaxnorm_cross_entropy_bwd"}
LAST = "jaxnorm.softmax_cross_entropy(logits, labels, axis=-1)"


@pytest.fixture(autouse=True)
def defaults():
    """Optax is written for JAX's own settings."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield


def taken(x, labels, axis=-1, **kwargs):
    return jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis, **kwargs).squeeze(axis)


def by_hand(x, labels):
    m = x.max(-1, keepdims=True)
    return jnp.log(jnp.exp(x - m).sum(-1)) + m.squeeze(-1) - taken(x, labels)


def finite_maximum(x):
    return jnp.where(jnp.isfinite(x[..., :1]), x.max(-1, keepdims=True), 0.0)


def indexed(x, labels):
    """Labels that are moved by another number than that of the classes, and an index that does not wrap."""
    labels = jnp.where(labels < 0, labels + 3, labels)
    picked = x.at[jnp.arange(6), labels].get(mode="fill", wrap_negative_indices=False)
    return logsumexp(x, -1) - picked


SPELLINGS = {
    "optax": (optax_loss, LAST),
    "optax, axis": (lambda x, n: optax_loss(jnp.swapaxes(x, 1, 2), n, axis=1), LAST),
    "optax, all rows masked alike": (
        lambda x, n: optax_loss(x, n, where=ROWS),
        f"jnp.where(rows, {LAST}, 0)",
    ),
    "optax, mask with a dimension of classes": (
        lambda x, n: optax_loss(x, n, where=ROWS[..., None]),
        f"jnp.where(rows, {LAST}, 0)",
    ),
    "per example": (jax.vmap(jax.vmap(optax_loss)), LAST),
    "log_softmax": (lambda x, n: -taken(log_softmax(x), n), LAST),
    "minus the mean": (lambda x, n: -taken(log_softmax(x), n).mean(), f"-{LAST}"),
    "clipped": (lambda x, n: -taken(log_softmax(x), 2 * n, mode="clip"), LAST),
    "index that does not wrap": (lambda x, n: indexed(x[0], n[0]), LAST),
    "index": (lambda x, n: -log_softmax(x[0])[jnp.arange(6), n[0]], LAST),
    "two indices": (
        lambda x, n: log_softmax(x)[jnp.arange(4)[:, None], jnp.arange(6), n].sum(),
        f"-{LAST}",
    ),
    "index per example": (jax.vmap(jax.vmap(lambda x, n: -log_softmax(x)[n])), LAST),
    "logsumexp": (lambda x, n: logsumexp(x, -1) - taken(x, n), LAST),
    "minus logsumexp": (lambda x, n: taken(x - logsumexp(x, -1, keepdims=True), n), f"-{LAST}"),
    "by hand": (by_hand, LAST),
    "and a number": (lambda x, n: logsumexp(x, -1) - taken(x, n) + 0.5, LAST),
    "of a sum": (lambda x, n: optax_loss(x * 2 + x[0, 0], n), LAST),
    "one row": (lambda x, n: optax_loss(x[:1, :1], n[:1, :1]), LAST),
    "one example": (lambda x, n: optax_loss(x[0, 0], n[0, 0]), LAST),
    "one label for many": (lambda x, n: optax_loss(x, jnp.broadcast_to(n[:, :1], n.shape)), LAST),
    "jit": (jax.jit(lambda x, n: optax_loss(x, n).mean()), LAST),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    function, call = SPELLINGS[name]
    for labels in (LABELS, LABELS - 16):  # JAX counts negative ones from the end
        assert_same(function, X, labels)
    assert operations(function, X, LABELS) == [call]
    gradient = jax.grad(lambda x: jaxnorm.autofuse(function)(x, LABELS).sum())
    assert primitives(gradient, X) == FUSED


def test_axis():
    """The axis of classes stays where it is; several are one after a reshape."""

    def function(x, labels):
        return optax_loss(x, labels, axis=1)

    labels = LABELS[:, :1] % 6 + jnp.zeros((1, 16), jnp.int32)
    assert_same(function, X, labels)
    assert operations(function, X, labels) == [
        "jaxnorm.softmax_cross_entropy(logits, labels, axis=1)"
    ]

    def of_two(x, labels):
        return optax_loss(x, labels, axis=(1, 2))

    assert_same(of_two, X, 5 * LABELS[:, 0])
    assert operations(of_two, X, LABELS[:, 0]) == [LAST]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_dtypes_of_labels(dtype):
    labels = LABELS.astype(dtype)
    assert_same(optax_loss, X, labels)
    assert operations(optax_loss, X, labels) == [LAST]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    """The result has the logits' dtype, as optax's has; in 16 bits it is that of float32 arithmetic, rounded once."""
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(X, np.float64)).astype(dtype)
        tolerance = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}[dtype]
        assert_same(optax_loss, x, LABELS, tolerance=tolerance)
        rounded_once = jaxnorm.softmax_cross_entropy(x, LABELS).astype(dtype)
        got, _ = jax.vjp(lambda x: jaxnorm.autofuse(optax_loss)(x, LABELS), x)
        np.testing.assert_array_equal(got, rounded_once)


def test_float64_loss_of_float32_logits():
    with jax.enable_x64(True):

        def function(x, labels):
            return optax_loss(x.astype(jnp.float64), labels)

        assert_same(function, X, LABELS, tolerance=1e-12, gradient_tolerance=1e-6)
        assert operations(function, X, LABELS) == [LAST]


def test_upcast_of_logits_is_not_kept():
    """Code that casts to float32 first: the operation reads the 16 bits."""
    x = X.astype(jnp.bfloat16)

    def function(x, labels):
        return optax_loss(x.astype(jnp.float32), labels).mean()

    assert_same(function, x, LABELS, gradient_tolerance=1e-2)
    (candidate,) = jaxnorm.autofuse(function).explain(x, LABELS).replaced
    assert candidate.operand == "bfloat16[4,6,16]"
    assert candidate.kept < x.nbytes + 3 * LABELS.nbytes


def test_labels_that_are_no_class():
    """NaN, or clipped, as the program's own indexing has it; ignoring them in the program works."""
    labels = LABELS.at[:, 2].set(16).at[0, 0].set(-17)

    def ignoring(x, labels):
        return jnp.where((labels >= 0) & (labels < 16), optax_loss(x, labels), 0).sum()

    for function in (optax_loss, lambda x, n: -taken(log_softmax(x), n), ignoring):
        assert_same(function, X, labels)
        assert operations(function, X, labels) == [LAST]
    assert np.isnan(jaxnorm.autofuse(optax_loss)(X, labels)).sum() == 5
    assert_same(lambda x, n: -taken(log_softmax(x), n, mode="clip"), X, labels)


def test_infinite_logits():
    """A class of -inf has no probability, and its loss is +inf."""
    x = X.at[0, 0, 3].set(-jnp.inf).at[0, 1, 3].set(-jnp.inf)
    labels = LABELS.at[0, 0].set(3).at[0, 1].set(4)
    assert_same(optax_loss, x, labels)
    np.testing.assert_array_equal(jax.jit(jaxnorm.autofuse(optax_loss))(x, labels)[0, 0], jnp.inf)


def test_sharded():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(
        lambda x, n: lax.pmean(optax_loss(x * 2, n).mean(), "a"),
        mesh=mesh,
        in_specs=(P("a"), P("a")),
        out_specs=P(),
    )
    assert_same(function, X, LABELS)
    (candidate,) = jaxnorm.autofuse(function).explain(X, LABELS).candidates
    assert candidate.place == ("shard_map",)


def one_hot(x, labels):
    return optax.softmax_cross_entropy(x, jax.nn.one_hot(labels, 16)).mean()


NEAR_MISSES = {
    "classes masked": (
        lambda x, n: optax_loss(x, n, where=x > 0),
        "the loss of a label that the mask of classes hides is finite here",
    ),
    "rows masked, not set to 0": (
        lambda x, n: logsumexp(x, -1, where=ROWS[..., None]) - taken(x, n),
        "rows that are masked are not 0",
    ),
    "no maximum": (
        lambda x, n: jnp.log(jnp.exp(x).sum(-1)) - taken(x, n),
        "no maximum is subtracted",
    ),
    "minimum": (
        lambda x, n: jnp.log(jnp.exp(x - (m := x.min(-1, keepdims=True))).sum(-1))
        + m.squeeze(-1)
        - taken(x, n),
        "what is subtracted from the exponents is not their maximum",
    ),
    "maximum of all": (
        lambda x, n: jnp.log(jnp.exp(x - (m := x.max())).sum(-1)) + m - taken(x, n),
        "the maximum is that of another array than the exponents, or over other axes",
    ),
    "another array": (
        lambda x, n: logsumexp(x, -1) - taken(jnp.sin(x), n),
        "labels do not take one of the logits",
    ),
    "stop_gradient": (
        lambda x, n: logsumexp(lax.stop_gradient(x), -1) - taken(x, n),
        "labels do not take one of the logits",
    ),
    "another row": (
        lambda x, n: logsumexp(x, -1) - taken(x[::-1], n),
        "labels do not take one of the logits",
    ),
    "another axis": (
        lambda x, n: logsumexp(x[:, :, :6], 1) - taken(x[:, :, :6], n, 2),
        "labels take a logit along another axis, or of another row, than the sum's",
    ),
    "plus the logit": (lambda x, n: logsumexp(x, -1) + taken(x, n), None),
    "maximum where something else is finite": (
        lambda x, n: jnp.log(jnp.exp(x - (m := finite_maximum(x))).sum(-1))
        + m.squeeze(-1)
        - taken(x, n),
        "what is subtracted from the exponents is not their maximum",
    ),
    "twice the logit": (lambda x, n: logsumexp(x, -1) - 2 * taken(x, n), None),
    "another fill value": (
        lambda x, n: logsumexp(x, -1) - taken(x, n, mode="fill", fill_value=0.0),
        None,
    ),
    "logarithm used": (
        lambda x, n: ((lse := logsumexp(x, -1)) - taken(x, n), lse),
        "an intermediate is used elsewhere: add -> float32[4,6]",
    ),
    "a number": (lambda x, n: logsumexp(x, -1) - x[..., 3], None),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    function, reason = NEAR_MISSES[name]
    reasons = left(function, X, LABELS)
    assert any(reason in r for r in reasons) if reason else not reasons
    assert_same(function, X, LABELS)


def test_one_hot_is_another_function():
    """0 * -inf is NaN; log_softmax by itself is replaced."""
    x = X.at[0, 0, 3].set(-jnp.inf)
    labels = LABELS.at[0, 0].set(5)
    assert np.isnan(one_hot(x, labels)) & np.isnan(jaxnorm.autofuse(one_hot)(x, labels))
    assert np.isfinite(optax_loss(x, labels)).all()
    report = jaxnorm.autofuse(one_hot).explain(X, LABELS)
    assert [c.call for c in report.replaced] == ["jaxnorm.log_softmax(x, axis=-1)"]
    assert [c.operation for c in report.left] == ["softmax_cross_entropy"]
    assert "0 * inf" in report.left[0].reason


def test_other_gathers():
    """Rows of a table, an element of each row, and slices are not looked at further."""

    def function(x, labels):
        table = x[0]
        return table[labels % 6] + taken(x, labels)[..., None] + x[:, labels[0] % 6]

    assert_same(function, X, LABELS)
    assert left(function, X, LABELS) == []
