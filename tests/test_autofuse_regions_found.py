"""Programs with row programs that a fuzzer found to fail, or to take too long."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm
from jaxnorm._autofuse import grown, plan, region, regions
from jaxnorm._rows.save import Flat

X = jax.random.normal(jax.random.key(0), (4, 3, 16), jnp.float32)


@pytest.fixture(autouse=True)
def small_regions(monkeypatch):
    monkeypatch.setattr(regions, "LEAST_BYTES", 0)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-2) * jnp.tanh(x)


def fused(function):
    return jaxnorm.autofuse(function, platform="gpu")


@pytest.mark.parametrize("least_gain", [0, 1.05, 50])
def test_stopped_results_have_no_tangent(monkeypatch, least_gain):
    """`pure_callback` takes what has no tangent; a tangent of zeros is one."""
    monkeypatch.setattr(region, "LEAST_GAIN", least_gain)

    def loss(x):
        y = norm(x)
        seen = jax.pure_callback(np.asarray, X, jax.lax.stop_gradient(y))
        return jnp.sum(seen * y)

    assert "row_program" in str(jax.make_jaxpr(jax.jvp, static_argnums=0)(fused(loss), (X,), (X,)))
    np.testing.assert_allclose(jax.grad(fused(loss))(X), jax.grad(loss)(X), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_64_bits_inside_of_a_program_of_32(monkeypatch):
    monkeypatch.setattr(region, "LEAST_GAIN", 0)

    def of_variance(x):
        scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-2)
        return (x - x.mean(-1, keepdims=True)) * scale * jnp.tanh(x)

    def loss(x):
        with jax.enable_x64(True):
            y = of_variance(x.astype(jnp.float64)).astype(jnp.float32)
        return jnp.sum(y * of_variance(x))

    with jax.enable_x64(False):
        expected = jax.grad(loss)(X)
        for gradient in jax.grad(fused(loss)), fused(jax.grad(loss)):
            np.testing.assert_allclose(gradient(X), expected, rtol=1e-4, atol=1e-5)
            jax.jit(gradient).trace(X).lower(lowering_platforms=("cuda",))


def _sines(x):
    for _ in range(1500):
        x = jnp.sin(x) * 1.01
    return x / x.sum(-1, keepdims=True)


def _norms(x):
    for _ in range(100):
        x = norm(x)
    return x


@pytest.mark.parametrize("function", [_sines, _norms])
def test_time_of_long_regions(function):
    """Time that grows with the square of a region's equations, or worse, shows here."""
    start = time.perf_counter()
    closed = jax.make_jaxpr(fused(function))(X)
    assert time.perf_counter() - start < 20
    assert len(closed.jaxpr.eqns) == 1


@pytest.mark.parametrize(("rows", "call"), [(64, None), (512, "jaxnorm.relu(x)")])
def test_small_arrays_are_left_to_xla(rows, call):
    """On a GPU, operations that are no row programs are looked for where a kernel runs longer than its launch takes."""

    def function(x, w):
        return jax.nn.relu(x @ w) @ w

    x, w = (jax.ShapeDtypeStruct((n, 256), jnp.float32) for n in (rows, 256))
    report = jaxnorm.autofuse(function, platform="gpu").explain(x, w)
    assert [c.call for c in report.candidates] == ([call] if call else [])


def test_what_regions_leave_is_looked_at_where_a_norm_may_be():
    """Norms along other axes than the last are; the roots of optimizers and the powers of rotary embeddings are not."""

    def norm(x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(0, keepdims=True) + 1e-5)

    def deviation(x):
        """Its root is inside of a jit, which returns it."""
        return (x - x.mean(0)) / jax.jit(jnp.std, static_argnums=1)(x, 0)

    def scanned(x):
        return jax.lax.scan(lambda x, _: (norm(x), None), x, None, length=2)[0]

    def adam(x):
        """The gradient of a bias is a sum over rows."""
        gradient = jnp.tanh(x).sum(0)
        return gradient / (jnp.sqrt(jnp.square(gradient)) + 1e-8) / (1 - 0.9 ** x[0, 0])

    def rotated(x):
        return x * jnp.cos(1e4 ** -jnp.arange(256, dtype=x.dtype))

    x = jnp.ones((1024, 256), jnp.float32)
    norms = ((norm, True), (scanned, True), (deviation, True))
    for function, found in (*norms, (adam, False), (rotated, False)):
        nodes = Flat(jax.make_jaxpr(function)(x), body_of=grown._opened).nodes
        assert plan.may_find(nodes) is found, function


def test_a_softmax_whose_sum_other_code_reads_is_more_than_one_fusion_of_xla():
    """Backward code reads the sum; a fusion of XLA's has one result."""
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)

    def softmax(x):
        unnormalized = jnp.exp(x - x.max(-1, keepdims=True))
        total = unnormalized.sum(-1, keepdims=True)
        return unnormalized / total, total

    def region_of(function):
        (found,) = regions.Finder(Flat(jax.make_jaxpr(function)(x))).regions
        return found

    assert not region_of(lambda x: softmax(x)[0]).gains
    assert region_of(softmax).gains
