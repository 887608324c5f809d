"""autofuse: models of Flax (linen and nnx), Haiku and Equinox, and optax's losses, as they are."""

import os
import pathlib
import subprocess
import sys
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autofuse_checks import assert_close, assert_same, operations, primitives
from flax import nnx
from suite import rand

import jaxnorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import haiku as hk


@pytest.fixture(autouse=True)
def defaults():
    """The libraries are written for JAX's own settings."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield


def names(function, *args) -> list[str]:
    """Operations that autofuse makes, without their arguments."""
    return [call.removeprefix("jaxnorm.").split("(")[0] for call in operations(function, *args)]


def of_gradient(function, *args) -> set[str]:
    def loss(*args):
        out = jaxnorm.autofuse(function)(*args)
        return sum(o.astype(jnp.float32).sum() for o in jax.tree.leaves(out))

    return primitives(jax.grad(loss), *args)


def shaken(tree, seed=0):
    """Parameters that are not 0 or 1."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    leaves = [
        leaf + 0.3 * jax.random.uniform(key, leaf.shape) if jnp.ndim(leaf) else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


X = rand((3, 8, 16))
IMAGES = rand((4, 6, 6, 8), scale=1.0)
NORM = {"jaxnorm_norm_fwd", "jaxnorm_norm_bwd"}
RELU = {"jaxnorm_relu_fwd", "jaxnorm_relu_bwd"}
SOFTMAX = {"jaxnorm_softmax_fwd", "jaxnorm_softmax_bwd"}
BATCH_NORM = {
    *("jaxnorm_batch_norm_stats", "jaxnorm_batch_norm_fwd"),
    *("jaxnorm_batch_norm_sums", "jaxnorm_batch_norm_dx"),
}

# ---- Flax linen ----


class Mlp(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.relu(nn.Dense(self.width)(x)))


class MixerBlock(nn.Module):
    """Tolstikhin et al. 2021."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + Mlp(12)(y.swapaxes(1, 2)).swapaxes(1, 2)
        return x + Mlp(32)(nn.LayerNorm(dtype=self.dtype)(x))


class TransformerBlock(nn.Module):
    norm: type = nn.LayerNorm

    @nn.compact
    def __call__(self, x, mask=None):
        y = self.norm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=mask)
        return x + Mlp(32)(self.norm()(x))


class ResNetBlock(nn.Module):
    """He et al. 2015, with a projection if the number of features changes."""

    features: int
    train: bool = True

    @nn.compact
    def __call__(self, x):
        def norm():
            return nn.BatchNorm(use_running_average=not self.train)

        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape[-1] != self.features:
            x = norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x))
        return nn.relu(x + y)


def linen(model, *inputs, **options):
    """(function, its arguments)."""
    variables = shaken(model.init(jax.random.key(1), *inputs))
    return lambda variables, *inputs: model.apply(variables, *inputs, **options), variables, *inputs


def test_linen_mixer():
    function, *args = linen(MixerBlock(), X)
    assert_same(function, *args)
    assert names(function, *args) == ["layer_norm", "relu", "layer_norm", "relu"]
    assert "residual=residual" in operations(function, *args)[2]
    assert of_gradient(function, *args) == NORM | RELU


def test_linen_mixer_bfloat16():
    function, *args = linen(MixerBlock(jnp.bfloat16), X.astype(jnp.bfloat16))
    assert_same(function, *args, tolerance=3e-2, gradient_tolerance=6e-2)
    assert names(function, *args) == ["layer_norm", "relu", "layer_norm", "relu"]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_linen_transformer(norm):
    mask = nn.make_causal_mask(X[..., 0])
    function, *args = linen(TransformerBlock(norm), X, mask)
    assert_same(function, *args)
    name = "layer_norm" if norm is nn.LayerNorm else "rms_norm"
    assert names(function, *args) == [name, "softmax", name, "relu"]
    assert of_gradient(function, *args) == NORM | RELU | SOFTMAX


@pytest.mark.parametrize("features", [8, 16])
@pytest.mark.parametrize("train", [True, False])
def test_linen_resnet(features, train):
    model = ResNetBlock(features, train)
    function, *args = linen(model, IMAGES, **({"mutable": ["batch_stats"]} if train else {}))
    assert_same(function, *args, tolerance=1e-4, gradient_tolerance=5e-3)
    calls = operations(function, *args)
    name = "batch_norm" if train else "batch_norm_inference"
    assert [c.split("(")[0] for c in calls] == [f"jaxnorm.{name}"] * (2 + (features == 16))
    assert "residual=residual" in calls[-1]
    assert sum("activation='relu'" in c for c in calls) == 2
    if train:
        assert of_gradient(function, *args) == BATCH_NORM
    gradient = jax.grad(lambda v: sum(o.sum() for o in jax.tree.leaves(function(v, *args[1:]))))
    assert primitives(gradient, args[0]) == set()


def test_linen_mask_and_two_pass():
    for fast in (True, False):
        model = nn.LayerNorm(use_fast_variance=fast)
        variables = shaken(model.init(jax.random.key(0), X))
        mask = jnp.arange(16) < jnp.array([[16], [5], [9]])[:, None]

        def function(variables, x, model=model, mask=mask):
            return model.apply(variables, x, mask=mask)

        assert_same(function, variables, X, tolerance=1e-4, gradient_tolerance=5e-3)
        assert "mask=mask" in operations(function, variables, X)[0]


# ---- Flax nnx ----


class NnxMixer(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)])
        self.tokens = nnx.Linear(8, 8, rngs=rngs)
        self.channels = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        x = x + nnx.relu(self.tokens(self.norms[0](x).swapaxes(1, 2))).swapaxes(1, 2)
        return x + nnx.relu(self.channels(self.norms[1](x)))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + nnx.relu(self.linear(self.norm2(x)))


class NnxResNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.norm1, self.norm2 = nnx.BatchNorm(8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(x + self.norm2(self.conv2(y)))


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (NnxMixer, X, ["layer_norm", "relu", "layer_norm", "relu"]),
        (NnxTransformer, X, ["rms_norm", "softmax", "rms_norm", "relu"]),
        (NnxResNet, IMAGES, ["batch_norm", "batch_norm"]),
    ],
)
def test_nnx(model, x, expected):
    graph, parameters, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)

    def function(parameters, rest, x):
        model = nnx.merge(graph, parameters, rest, copy=True)
        return model(x), nnx.state(model, nnx.BatchStat)

    args = (shaken(parameters), rest, x)
    assert_same(function, *args, tolerance=1e-4, gradient_tolerance=5e-3)
    assert names(function, *args) == expected
    primitives_of = {"b": BATCH_NORM, "l": NORM | RELU, "r": NORM | RELU | SOFTMAX}
    assert of_gradient(function, *args) == primitives_of[expected[0][0]]


# ---- Haiku and Equinox ----


def test_haiku():
    def network(x):
        y = hk.LayerNorm(-1, True, True)(x)
        y = y + jax.nn.softmax(hk.Linear(16)(y), axis=1)
        y = hk.BatchNorm(True, True, 0.9)(hk.RMSNorm(-1)(y), is_training=True)
        return jax.nn.relu(y)

    model = hk.without_apply_rng(hk.transform_with_state(network))
    parameters, state = model.init(jax.random.key(0), X)

    def function(parameters, x):
        return model.apply(parameters, state, x)

    args = shaken(parameters), X
    assert_same(function, *args, tolerance=1e-4, gradient_tolerance=5e-3)
    assert names(function, *args) == ["layer_norm", "softmax", "rms_norm", "batch_norm"]


def test_haiku_rms_norm_over_other_axes():
    """Its scale is of the last axis, whatever is normalised: each is replaced, or left with the reason."""
    for shape, axis in ((X.shape, 0), (IMAGES.shape, (1, 2)), (X.shape, 1), (X.shape, (1, 2))):
        x = rand(shape)
        model = hk.without_apply_rng(hk.transform(lambda x, axis=axis: hk.RMSNorm(axis)(x)))
        args = shaken(model.init(jax.random.key(0), x)), x
        assert_same(model.apply, *args)
        report = jaxnorm.autofuse(model.apply).explain(*args)
        if len(shape) - 1 in np.atleast_1d(axis):
            assert [c.operation for c in report.candidates if c.call] == ["rms_norm"]
        else:
            (candidate,) = report.candidates
            assert candidate.call is None
            assert candidate.reason == "scale has dimensions that are not normalised"


def test_equinox():
    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        rms: eqx.nn.RMSNorm
        mlp: eqx.nn.MLP

        def __call__(self, x):
            y = jax.vmap(self.norm)(x)
            return x + jax.vmap(self.mlp)(jax.vmap(self.rms)(x + y))

    mlp = eqx.nn.MLP(16, 16, 32, 1, activation=jax.nn.relu, key=jax.random.key(0))
    block = Block(eqx.nn.LayerNorm(16), eqx.nn.RMSNorm(16), mlp)
    arrays, static = eqx.partition(block, eqx.is_array)

    def function(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x)

    args = shaken(arrays), X
    assert_same(function, *args)
    assert names(function, *args) == ["layer_norm", "rms_norm", "relu"]
    # Its activation is a leaf of the module, which is handed over as it is.
    assert names(lambda block, x: block(x), block, X[0]) == ["layer_norm", "rms_norm", "relu"]


# ---- optax ----


def test_optax_losses():
    """Losses over classes that are written with log_softmax."""
    labels = jax.nn.softmax(rand((3, 8, 16), seed=4))

    def function(logits):
        return optax.softmax_cross_entropy(logits, labels).mean()

    assert_same(function, X)
    assert names(function, X) == ["log_softmax"]


def test_optax_loss_of_a_model():
    """All of a loss function at once, as it is differentiated."""
    model, x = MixerBlock(), X.astype(jnp.bfloat16)
    variables = shaken(model.init(jax.random.key(1), x))
    labels = jnp.argmax(rand((3, 8, 16), seed=6), -1)

    def loss(variables):
        logits = model.apply(variables, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    assert_same(loss, variables)
    assert names(loss, variables) == [*["layer_norm", "relu"] * 2, "softmax_cross_entropy"]
    cross_entropy = {"jaxnorm_cross_entropy_fwd", "jaxnorm_cross_entropy_bwd"}
    assert of_gradient(loss, variables) == NORM | RELU | cross_entropy


def test_training_step():
    """One line: the model is autofused, everything around it is as before."""
    model = ResNetBlock(8)
    variables = model.init(jax.random.key(0), IMAGES)
    optimiser = optax.adam(1e-2)

    def steps(apply):
        def loss(parameters, statistics):
            out, updates = apply(
                {"params": parameters, "batch_stats": statistics}, IMAGES, mutable=["batch_stats"]
            )
            return jnp.mean((out - 1) ** 2), updates["batch_stats"]

        @jax.jit
        def step(parameters, statistics, state):
            (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
                parameters, statistics
            )
            updates, state = optimiser.update(gradient, state)
            return optax.apply_updates(parameters, updates), statistics, state, value

        parameters, statistics = variables["params"], variables["batch_stats"]
        state = optimiser.init(parameters)
        values = []
        for _ in range(4):
            parameters, statistics, state, value = step(parameters, statistics, state)
            values.append(float(value))
        return values

    plain, fused = steps(model.apply), steps(jaxnorm.autofuse(model.apply))
    assert plain[-1] < 0.95 * plain[0]
    assert fused == pytest.approx(plain, rel=1e-3)


def test_statistics_of_several_devices():
    """Flax forms them; what they are applied to is an operation."""
    model = nn.BatchNorm(use_running_average=False, axis_name="devices")
    variables = shaken(nn.BatchNorm(use_running_average=False).init(jax.random.key(0), X))

    def function(variables, x):
        y, _ = model.apply(variables, x, mutable=["batch_stats"])
        return nn.relu(y)

    def mapped(f):
        return jax.vmap(f, in_axes=(None, 0), axis_name="devices")

    def loss(f):
        return jax.value_and_grad(lambda v, x: jnp.sum(jnp.sin(f(v, x))), argnums=(0, 1))

    got = loss(mapped(jaxnorm.autofuse(function)))(variables, X)
    assert_close(got, loss(mapped(function))(variables, X), 1e-4)
    names_of = primitives(loss(mapped(jaxnorm.autofuse(function))), variables, X)
    assert names_of == {f"jaxnorm_batch_norm_{name}" for name in ("fwd", "sums", "dx")}


def test_example():
    """examples/autofuse_resnet.py as a process; a short run is not accurate enough for it."""
    path = pathlib.Path(__file__).parent.parent / "examples" / "autofuse_resnet.py"
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    # One device; it compiles for longer than it runs, as the tests do.
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    environment["XLA_FLAGS"] = " ".join(flags)
    done = subprocess.run(
        [sys.executable, str(path), "--steps", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "autofuse: 6 replaced, 0 left" in done.stdout
    (failure,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert "reached" in failure
    assert "differ" not in failure
