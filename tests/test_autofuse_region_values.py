"""autofuse: values and gradients of functions with row programs: models, transformations, libraries, random code."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from autofuse_checks import assert_close, primitives
from autofuse_row_programs import (  # noqa: F401
    PROGRAM,
    A,
    B,
    S,
    W,
    assert_same,
    defaults,
    grown,
    kernels,
    layer,
    layer_norm,
    of,
    weighted,
)
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from suite import rand

from bench import models
from jaxnorm._autofuse import region

# ---- models ----


def shaken(tree):
    """Parameters that are not 0 or 1."""
    leaves, structure = jax.tree.flatten(tree)
    added = [0.3 * jnp.cos(jnp.arange(a.size) * 1.3 + i) for i, a in enumerate(leaves)]
    return jax.tree.unflatten(
        structure, [a + b.reshape(a.shape) for a, b in zip(leaves, added, strict=True)]
    )


def model(name):
    """(loss, its arguments, the first of them parameters)."""
    key, sizes = jax.random.key(0), dict(layers=1, width=16, heads=2)
    patches, f32 = rand((2, 8, 8), seed=1, scale=1.0), {"heads": 2, "dtype": jnp.float32}
    if name == "llama":
        parameters = models.llama_parameters(key, **sizes, hidden=24, tokens=40)
        return (
            functools.partial(models.llama_loss, **f32),
            parameters,
            jnp.arange(18).reshape(2, 9) * 7 % 40,
        )
    if name == "dit":
        parameters = models.dit_parameters(key, **sizes, channels=8)
        condition, noise = rand((2, 16), scale=1.0), rand((2, 8, 8), seed=2)
        return functools.partial(models.dit_loss, **f32), parameters, patches, condition, noise
    if name == "vit":
        parameters = models.vit_parameters(key, **sizes, channels=8, classes=10)
        return (
            functools.partial(models.vit_loss, **f32),
            parameters,
            patches,
            jnp.array([1, 4]),
            key,
        )
    if name == "mamba":
        parameters = models.mamba_parameters(key, layers=1, width=16, channels=8)
        loss = functools.partial(models.mamba_loss, dtype=jnp.float32)
        return loss, parameters, patches, rand((2, 8, 8), seed=2)
    logits, reference = (rand((16, 40), seed=s) for s in (1, 2))
    old, advantages = rand((16,), seed=3, scale=0.2, offset=-4), rand((16,), seed=4)
    return models.rl_loss, {"logits": logits}, reference, jnp.arange(16) * 2, advantages, old


def sgd_step(loss, rate=0.1):
    def step(parameters, *batch):
        value, gradient = jax.value_and_grad(loss)(parameters, *batch)
        return value, jax.tree.map(lambda p, g: p - rate * g, parameters, gradient)

    return step


@pytest.mark.parametrize("name", ["llama", "dit", "vit", "mamba", "rl"])
def test_model(name, monkeypatch):
    monkeypatch.setattr(region, "LEAST_GAIN", 0)
    loss, parameters, *batch = model(name)
    args = shaken(parameters), *batch
    forms = {
        "inside": (jax.value_and_grad(loss), jax.value_and_grad(grown(loss))),
        "outside": (jax.value_and_grad(loss), grown(jax.value_and_grad(loss))),
        "step": (sgd_step(loss), grown(sgd_step(loss))),
    }
    for _, fused in forms.values():
        assert PROGRAM in primitives(fused, *args)
    results = jax.jit(lambda *args: {k: [f(*args) for f in fs] for k, fs in forms.items()})(*args)
    for expected, got in results.values():
        assert_close(got, expected, 2e-5)
    assert np.isfinite(results["step"][0][0])


def test_training():
    """Twenty steps: rounding errors may add up, nothing else does."""
    loss, parameters, *batch = model("llama")

    def losses(step):
        p, values = parameters, []
        for _ in range(20):
            value, p = step(p, *batch)
            values.append(float(value))
        return values

    plain, fused = (losses(jax.jit(f)) for f in (sgd_step(loss, 0.5), grown(sgd_step(loss, 0.5))))
    assert plain[-1] < 0.9 * plain[0]
    np.testing.assert_allclose(fused, plain, rtol=1e-4)


# ---- transformations and libraries ----


def block(x, scale, bias):
    return layer(checkpoint_name(jnp.tanh(x @ W), "hidden"), scale, bias)


def scanned(x, scale, bias, body=block):
    stacked = jnp.stack([scale, scale / 2]), jnp.stack([bias, bias * 2])
    return jax.lax.scan(lambda h, p: (body(h, *p), h.sum(-1)), x, stacked)


@jax.custom_vjp
def doubled_gradient(x, scale, bias):
    return layer(x, scale, bias)


doubled_gradient.defvjp(
    lambda *args: (layer(*args), args),
    lambda args, ct: jax.vjp(layer, *args)[1](2 * layer(ct, 2, 1)),
)


def on_devices(function, **options):
    spec = P(None, "d")
    return jax.shard_map(
        function, mesh=meshes.AUTO, in_specs=(spec, P(), P()), out_specs=spec, **options
    )


def with_psum(x, scale, bias):
    return layer(x, scale, bias) + jax.lax.psum(layer(x, bias, scale).sum(), "d")


saveable = jax.checkpoint_policies
TRANSFORMED = {
    "scan": (scanned, "scan"),
    "scan of checkpoint": (functools.partial(scanned, body=jax.checkpoint(block)), "scan remat2"),
    "checkpoint": (jax.checkpoint(block), "remat2"),
    "dots": (jax.checkpoint(block, policy=saveable.dots_saveable), "remat2"),
    "names": (
        jax.checkpoint(block, policy=saveable.save_only_these_names("hidden")),
        "remat2",
    ),
    "vmap": (jax.vmap(layer, (0, None, None)), ""),
    "vmap of columns": (lambda x, s, b: jax.vmap(layer, (1, 0, None), 1)(x, s[:4, None], b), ""),
    "custom_vjp": (doubled_gradient, "custom_vjp_call"),
    "cond": (
        lambda x, s, b: jax.lax.cond(
            x.sum() > 0, layer, lambda x, s, b: x * layer(x, s, 1), x, s, b
        ),
        "cond",
    ),
    "while": (
        lambda x, s, b: jax.lax.fori_loop(0, 3, lambda i, h: layer(h, s, b) + i, x),
        "scan",
    ),
    "jit": (lambda x, s, b: jax.jit(layer)(x + 1, s, b).sum(0), ""),
    "shard_map": (on_devices(with_psum, check_vma=False), "shard_map"),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name):
    function, place = TRANSFORMED[name]
    assert kernels(function, A, S, B)[0].place == tuple(place.split())
    assert_same(function, A, S, B)


@pytest.mark.parametrize(
    "function",
    [
        layer,
        pytest.param(
            with_psum,
        ),
    ],
)
def test_shard_map(function):
    function = on_devices(function)
    assert kernels(function, A, S, B)[0].place == ("shard_map",)
    got, expected = jax.jit(lambda *a: (grown(function)(*a), function(*a)))(A, S, B)
    assert_close(got, expected, 2e-5)


def test_gradient_of_shard_map():
    assert_same(on_devices(layer), A, S, B)


def test_checkpoint_is_kept():
    """What a policy saves is saved, and what it does not save is computed again, in row programs too."""
    policies = {"nothing": None, "names": saveable.save_only_these_names("hidden")}
    for name, policy in policies.items():
        function = jax.checkpoint(block, policy=policy)
        programs = kernels(jax.value_and_grad(lambda *a, f=function: weighted(f(*a))), A, S, B)
        assert [p.place for p in programs] == [(), ("remat2",)], name


def linen():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(nn.gelu(nn.Dense(16)(x)) + x)
            y = y + nn.MultiHeadDotProductAttention(num_heads=2)(y)
            return nn.Dense(5)(nn.RMSNorm()(y))

    network = Network()
    return network.apply, network.init(jax.random.key(0), A)


def flax_nnx():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.linear = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.norm(x + nnx.silu(self.linear(x)))

    graph, parameters = nnx.split(Network(nnx.Rngs(0)))
    return lambda p, x: nnx.merge(graph, p)(x), parameters


def haiku():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        hk = pytest.importorskip("haiku")
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.LayerNorm(-1, True, True)(x + jax.nn.elu(hk.Linear(16)(x))))
    )
    return network.apply, network.init(jax.random.key(0), A)


def equinox():
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):
        norm: eqx.nn.LayerNorm
        linear: eqx.nn.Linear

        def __call__(self, x):
            return self.norm(x + jax.nn.softplus(self.linear(x)))

    key = jax.random.key(0)
    network = Network(norm=eqx.nn.LayerNorm(16), linear=eqx.nn.Linear(16, 16, key=key))
    arrays, static = eqx.partition(network, eqx.is_array)
    return lambda p, x: jax.vmap(jax.vmap(eqx.combine(p, static)))(x), arrays


@pytest.mark.parametrize("library", [linen, flax_nnx, haiku, equinox])
def test_library(library):
    """A step of Adam inside of the function, too."""
    apply, parameters = library()
    # The gradient of attention's key bias is rounding noise around 0. Adam would scale the noise up without this eps.
    parameters, optimiser = shaken(parameters), optax.adam(1e-2, eps=1e-2)
    assert len(kernels(apply, parameters, A)) >= 1
    assert_same(apply, parameters, A, tolerance=2e-4)

    def step(parameters, state, x):
        value, gradient = jax.value_and_grad(lambda p: weighted(apply(p, x)))(parameters)
        updates, state = optimiser.update(gradient, state)
        return value, optax.apply_updates(parameters, updates), state

    args = parameters, optimiser.init(parameters), A
    assert PROGRAM in primitives(grown(step), *args)
    assert_close(jax.jit(grown(step))(*args), jax.jit(step)(*args), 1e-4)


# ---- random programs ----


def _norm(x):
    """Its derivative is small where a row is constant, so that rounding stays small."""
    d = x - x.mean(-1, keepdims=True)
    return d * jax.lax.rsqrt((d * d).mean(-1, keepdims=True) + 0.1) * S + B


UNARY = {
    "sin": jnp.sin,
    "square": lambda x: x * x * 0.3,
    "cast": lambda x: x.astype("bfloat16").astype(x.dtype),
    "silu": jax.nn.silu,
    "relu": lambda x: jnp.maximum(x, 0.1),
    "mean": lambda x: x - x.mean(-1, keepdims=True),
    # XLA on CPUs computes x anew to look for its maximum, rounds otherwise, and divides 0 by 0: without autofuse too.
    "max": lambda x: x / (1 + jax.lax.stop_gradient(jnp.abs(x).max(-1, keepdims=True))),
    "norm": _norm,
    "softmax": lambda x: jax.nn.softmax(x, -1) * 4,
    "product": lambda x: x @ W,
    "half": lambda x: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1),
    "columns": lambda x: x * S + B,
    "where": lambda x: jnp.where(jnp.arange(16) % 3 == 0, x, -x),
    "over rows": lambda x: x - x.mean(0),
    "transposed": lambda x: jnp.swapaxes(jnp.swapaxes(x, 0, 1) * 2, 0, 1),
}
BINARY = {
    "add": jnp.add,
    "mul": lambda a, b: a * b * 0.2,
    "sub": jnp.subtract,
    "where": lambda a, b: jnp.where(a > b, a, b * 0.5),
}
SETTINGS = settings(max_examples=20, deadline=None, derandomize=True)


@SETTINGS
@given(st.data())
def test_random(data):
    """Chains with branches around a norm or a softmax, of which anything may be a result."""
    middle = data.draw(st.sampled_from(["norm", "softmax"]))
    count = data.draw(st.integers(2, 8))
    steps = []
    for i in range(count):
        if data.draw(st.booleans()):
            operands = data.draw(st.tuples(*[st.integers(0, i)] * 2))
            steps.append((BINARY[data.draw(st.sampled_from(sorted(BINARY)))], operands))
        else:
            steps.append((UNARY[data.draw(st.sampled_from(sorted(UNARY)))], (i,)))
    steps.insert(data.draw(st.integers(0, count)), (UNARY[middle], (-1,)))
    extra = data.draw(st.lists(st.integers(0, count), max_size=3))

    def function(x):
        values = [x]
        for f, operands in steps:
            values.append(f(*(values[o] for o in operands)))
        return values[-1], [values[i] for i in extra], values[-1].sum(-1)

    # Of bfloat16's roundings, one may go either way.
    rounds = any(f is UNARY["cast"] for f, _ in steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region, "LEAST_GAIN", data.draw(st.sampled_from([0, 1.05])))
        assert_same(function, A / 2, tolerance=2e-2 if rounds else 1e-4)


# ---- sharded arrays ----


@meshes.over([P("d"), P(None, "m")])
def test_sharded(mesh, spec):
    """Values, and where results live, on meshes whose axes are part of types too."""

    def step(x, s, b):
        def loss(s, b):
            y = layer(x, s, b)
            return jnp.sum(y * jnp.cos(y)), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(s, b)

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.tile(A, (4, 1, 1)), NamedSharding(mesh, spec))
        s, b = (jax.device_put(a, NamedSharding(mesh, P())) for a in (S, B))
        expected, got = (jax.jit(f)(x, s, b) for f in (step, grown(step)))
        assert PROGRAM in primitives(grown(step), x, s, b)
    assert_close(got, expected, 2e-5)
    for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(e.sharding, a.ndim)
