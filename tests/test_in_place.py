"""Cotangents of x in the memory of those of y: where lowering asks for it, and that the kernels are right then.

XLA copies an operand that is read again, so a program is right in any case. A kernel is right if it
reads what it needs before it writes there, which only its results show.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm

ON_GPU = jax.default_backend() == "gpu"
MODULE = next(m for m in jaxnorm.status().modules if m.platform == ("cuda" if ON_GPU else "cpu"))
pytestmark = pytest.mark.skipif(not MODULE.targets, reason=f"no kernels: {MODULE.reason}")


def product(t):
    """t, as the result of a matrix product."""
    return jax.lax.dot_general(t[..., None], jnp.ones(1, t.dtype), (((t.ndim,), (0,)), ((), ())))


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def keep(*shape):
    return np.random.default_rng(7).random(shape) < 0.8


def layer_norm(rows, columns, mask=None):
    parameters = [random(columns, seed=1), random(columns, seed=2)]
    return partial(jaxnorm.layer_norm, mask=mask), [random(rows, columns), *parameters]


def rms_norm(rows, columns):
    return jaxnorm.rms_norm, [random(rows, columns), random(columns, seed=1)]


def with_residual(*shape):
    # The sum has a cotangent of its own.
    f = lambda x, z: sum(jaxnorm.layer_norm(x, residual=z))  # noqa: E731
    return f, [random(*shape), random(*shape, seed=1)]


def softmax(*shape, op=jaxnorm.softmax, **options):
    return partial(op, **options), [random(*shape)]


# One of each way through the kernels: short and long rows, with and without whole vectors, in one
# piece, in chunks and spread over threads or blocks; masks.
CASES = {
    "short": layer_norm(300, 37),
    "short vectors": layer_norm(300, 64),
    "of one column": layer_norm(33, 1),
    "longer": layer_norm(70, 513),
    "without mean": rms_norm(64, 1023),
    "without parameters": (jaxnorm.rms_norm, [random(640, 1024)]),
    "in chunks": layer_norm(2, 70001),
    "in chunks of many rows": layer_norm(40, 70001),
    "with a mask": layer_norm(50, 203, mask=keep(50, 203)),
    "short with a residual": with_residual(65, 21),
    "with a residual": with_residual(9, 1000),
}
if ON_GPU:  # where there are more ways, and softmax works in place too
    CASES |= {
        "many short": layer_norm(20011, 128),
        "many": layer_norm(3001, 2048),
        "many odd": layer_norm(3001, 1023),
        "in clusters": layer_norm(700, 20000),
        "odd in clusters": layer_norm(700, 50257),
        "long with a residual": with_residual(300, 16384),
        "odd with a residual": with_residual(300, 5001),
        "few": layer_norm(64, 131072),
        "very few": layer_norm(2, 1 << 20),
        "very long": layer_norm(300, 300000),
        "masked, longer": layer_norm(70, 9001, mask=keep(70, 9001)),
        "softmax, short": softmax(3000, 49),
        "softmax, short vectors": softmax(3000, 64),
        "softmax": softmax(3000, 1024),
        "softmax, odd": softmax(3000, 1023),
        "softmax, long": softmax(300, 50257),
        "softmax, few": softmax(8, 1 << 20),
        "softmax, few odd": softmax(3, 300001),
        "softmax of attention": softmax(8, 16, 128, 256, where=keep(8, 1, 128, 256)),
        "softmax, masked": softmax(300, 1001, where=keep(300, 1001)),
        "softmax, columns": softmax(64, 150, 49, axis=1),
        "softmax, long columns": softmax(3, 70001, 5, axis=1),
        "log_softmax": softmax(3000, 1024, op=jaxnorm.log_softmax),
        "log_softmax, columns": softmax(16, 21, 4096, op=jaxnorm.log_softmax, axis=1),
    }


def pull(f, wrap, args, dy):
    return jax.vjp(f, *args)[1](wrap(dy))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_same_as_elsewhere(case, dtype):
    f, args = CASES[case]
    args = [jnp.asarray(args[0], dtype), *args[1:]]
    if "residual" in case:
        args[-1] = jnp.asarray(args[-1], dtype)
    y = jax.eval_shape(f, *args)
    dy = jnp.asarray(random(*y.shape, seed=5), y.dtype)
    compiled = jax.jit(partial(pull, f, product)).lower(args, dy).compile()
    in_place = "output_to_operand_aliasing" in compiled.as_text()
    assert in_place == (case != "of one column")  # which is elementwise and has no kernel
    wanted = jax.jit(partial(pull, f, lambda t: t))(args, dy)
    for got, want in zip(compiled(args, dy), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def aliases(function, *args):
    return jax.jit(function).lower(*args).as_text().count("output_operand_alias<")


X = np.ones((8, 300), "float32")


@pytest.mark.parametrize(
    "other", [lambda t: t + 1, jnp.sum, lambda t: t @ t.T], ids=["sum", "reduction", "product"]
)
def test_not_what_was_read_before(other):
    def run(x, dy):
        t = product(dy)
        before = other(t)
        return before, jax.vjp(jaxnorm.layer_norm, x)[1](t)

    assert aliases(run, X, X) == 0


def test_not_an_argument():
    assert aliases(lambda x, dy: jax.vjp(jaxnorm.layer_norm, x)[1](dy), X, X) == 0
    assert aliases(lambda x, dy: jax.vjp(jaxnorm.layer_norm, x)[1](dy + x), X, X) == 0


def test_what_is_read_later_survives():
    def run(x, dy):
        t = product(dy)
        return jax.vjp(jaxnorm.layer_norm, x)[1](t), t * 2, t

    dy = random(8, 300)
    assert aliases(run, X, dy) == 1
    _, twice, t = jax.jit(run)(X, dy)
    np.testing.assert_array_equal(t, dy)
    np.testing.assert_array_equal(twice, 2 * dy)


def test_less_memory():
    """Dense -> layer_norm -> dense under grad: at least one array less."""
    rows, hidden = 2048, 512

    def memory(wrap):
        def loss(weights, x):
            return jnp.sum(wrap(jaxnorm.layer_norm(x @ weights[0])) @ weights[1])

        weights = [jnp.ones((64, hidden)), jnp.ones((hidden, 64))]
        program = jax.jit(jax.grad(loss)).lower(weights, jnp.ones((rows, 64))).compile()
        return program.memory_analysis().temp_size_in_bytes

    # XLA drops the two signs, but only after lowering.
    saved = memory(lambda h: jnp.negative(jnp.negative(h))) - memory(lambda h: h)
    assert saved >= 4 * rows * hidden
