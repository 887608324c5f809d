"""jaxnorm.linen and jaxnorm.nnx with Flax's own modules as the oracle: the same call of both, one answer."""

import functools
import inspect
import pathlib
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, linen, nnx, serialization
from jax.sharding import PartitionSpec as P
from suite import in_turn

from jaxnorm import linen as jlinen
from jaxnorm import nnx as jnnx

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = ("LayerNorm", "RMSNorm", "BatchNorm")
LIBRARIES = {"linen": (linen, jlinen), "nnx": (nnx, jnnx)}
nan = np.nan

libraries = pytest.mark.parametrize("library", LIBRARIES)
names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Flax itself mixes dtypes: it computes the statistics of bfloat16 in float32."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def normal(shape, dtype=np.float32, seed=0, offset=0.5):
    rng = np.random.default_rng([seed, *shape])
    value = rng.standard_normal(shape) + offset
    if jnp.dtype(dtype).kind == "c":
        value = value + 1j * rng.standard_normal(shape)
    return jnp.asarray((value * (3 if jnp.dtype(dtype).kind == "i" else 1)).astype(dtype))


def pair(library, name):
    return [getattr(module, name) for module in LIBRARIES[library]]


def make(cls, features, options):
    if issubclass(cls, linen.Module):
        return cls(**options)
    return cls(features, rngs=nnx.Rngs(0), **options)


def variables_of(cls, features, x, options):
    """Random parameters and statistics, in the shapes and dtypes that a module starts with."""
    if issubclass(cls, linen.Module):
        training = {"use_running_average": False} if cls.__name__ == "BatchNorm" else {}
        start = jax.eval_shape(cls(**(options | training)).init, jax.random.key(0), x)
        start = {n: v for group in start.values() for n, v in group.items()}
    else:
        start = nnx.to_pure_dict(nnx.state(make(cls, features, options), nnx.Variable))
    return {
        n: abs(normal(v.shape, v.dtype, seed)) if n == "var" else normal(v.shape, v.dtype, seed)
        for seed, (n, v) in enumerate(sorted(start.items()), 2)
    }


def apply(cls, variables, x, features, options, call):
    """(y, the statistics afterwards)."""
    module = make(cls, features, options)
    if issubclass(cls, linen.Module):
        groups = {"params": ("scale", "bias"), "batch_stats": ("mean", "var")}
        given = {
            group: {n: variables[n] for n in members if n in variables}
            for group, members in groups.items()
        }
        y, changed = module.apply(given, x, **call, mutable=["batch_stats"])
        return y, dict(changed.get("batch_stats", {}))
    kinds = {"scale": nnx.Param, "bias": nnx.Param, "mean": nnx.BatchStat, "var": nnx.BatchStat}
    for name, value in variables.items():
        setattr(module, name, kinds[name](value))
    y = module(x, **call)
    return y, {n: getattr(module, n)[...] for n in ("mean", "var") if n in variables}


def uses_kernels(function, *args):
    """Whether the operations of jaxnorm are in a program."""
    return bool(re.search(r"\bjaxnorm_(batch_)?norm_fwd\b", str(jax.make_jaxpr(function)(*args))))


def close(got, want, steps, scale):
    """Within `steps` times `scale` of the largest number that is finite, and not finite in the same places."""
    got, want = (np.asarray(v) for v in (got, want))
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    largest = np.abs(want[finite]).max(initial=0)
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=steps * scale * largest)


def compare(
    library, name, x, options=None, call=None, *, answered=True, gradients=True, features=None
):
    """Values, statistics and gradients of both; `answered`: by jaxnorm, not by Flax's code."""
    options, call = options or {}, call or {}
    features = x.shape[-1] if features is None else features
    theirs, ours = pair(library, name)
    variables = variables_of(theirs, features, x, options)
    run = [
        functools.partial(apply, cls, features=features, options=options, call=call)
        for cls in (theirs, ours)
    ]
    assert uses_kernels(run[1], variables, x) == answered

    def pull(f, v, x):
        y, pullback = jax.vjp(lambda v, x: f(v, x)[0], v, x)
        return pullback(normal(y.shape, y.dtype, 9))

    @jax.jit
    def both(v, x):
        return [f(v, x) for f in run], [pull(f, v, x) for f in run if answered and gradients]

    ((y, kept), (got, got_kept)), pulls = both(variables, x)

    assert jax.tree.structure(got_kept) == jax.tree.structure(kept)
    if not answered:
        jax.tree.map(np.testing.assert_array_equal, (got, got_kept), (y, kept))
        return
    stats = jnp.promote_types(options.get("dtype") or x.dtype, np.float32)
    steps = float(max(jnp.finfo(d).eps for d in (y.dtype, stats)))
    close(got, y, 16, steps)
    for n in kept:
        close(got_kept[n], kept[n], 16, max(float(jnp.finfo(stats).eps), steps / 16))
    if not gradients:
        return
    for want, have in zip(*(jax.tree.leaves(p) for p in pulls), strict=True):
        if want.dtype == jax.dtypes.float0:
            continue
        close(have, want, 64, max(steps, float(jnp.finfo(want.dtype).eps)))


# ---- what a user sees before the first call ----


@libraries
@names
def test_signatures(library, name):
    """Flax's arguments, their order, kinds and defaults; of ours, only what BatchNorm adds."""
    theirs, ours = pair(library, name)
    assert issubclass(ours, theirs)
    assert ours.__name__ == name  # Linen names submodules after it
    for method, added in (("__init__", ["activation"]), ("__call__", ["residual"])):
        want = inspect.signature(getattr(theirs, method)).parameters
        have = inspect.signature(getattr(ours, method)).parameters
        extra = [n for n in have if n not in want]
        assert extra == (added if name == "BatchNorm" else [])
        kept = [p for n, p in have.items() if n not in extra]
        assert [(p.name, p.kind, p.default) for p in kept] == [
            (p.name, p.kind, p.default) for p in want.values()
        ]


def test_positional_arguments():
    """RMSNorm of NNX takes its mask by position, LayerNorm does not; BatchNorm's flag is positional."""
    x, mask = normal((3, 4)), np.array([True, True, False, True])
    layer = jnnx.RMSNorm(4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(x, mask), layer(x, mask=mask))
    with pytest.raises(TypeError):
        jnnx.LayerNorm(4, rngs=nnx.Rngs(0))(x, mask)
    layer = jnnx.BatchNorm(4, use_running_average=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(x, True), x, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_bias": False}, {"param_dtype": jnp.bfloat16}])
@libraries
@names
def test_initial_variables(library, name, options):
    """Bit for bit, from random initialisers too, which tell the keys and their order."""
    if name == "RMSNorm" and "use_bias" in options:
        options = {"use_scale": False}
    x = normal((2, 3, 8))
    theirs, ours = pair(library, name)
    options = options | {"scale_init": jax.nn.initializers.normal()}
    if name != "RMSNorm":
        options["bias_init"] = jax.nn.initializers.normal()

    def initial(cls):
        if library == "nnx":
            return nnx.state(make(cls, 8, options))
        training = {"use_running_average": False} if name == "BatchNorm" else {}
        return make(cls, 8, options | training).init(jax.random.key(7), x)

    want, have = initial(theirs), initial(ours)
    assert jax.tree.structure(have) == jax.tree.structure(want)
    assert [v.dtype for v in jax.tree.leaves(have)] == [v.dtype for v in jax.tree.leaves(want)]
    jax.tree.map(np.testing.assert_array_equal, have, want)


def test_partitioned_parameters():
    """Metadata of Linen's boxed parameters and of NNX's variables."""
    boxed = linen.with_partitioning(jax.nn.initializers.ones, ("model",))
    for module in LIBRARIES["linen"]:
        variables = module.LayerNorm(scale_init=boxed).init(jax.random.key(0), normal((2, 4)))
        assert variables["params"]["scale"].names == ("model",)
        specs = linen.get_partition_spec(variables)
        assert specs["params"]["scale"] == P("model")
        y = module.LayerNorm(scale_init=boxed).apply(variables, normal((2, 4)))
        close(y, linen.LayerNorm().apply(linen.unbox(variables), normal((2, 4))), 16, 1e-7)
    for module in LIBRARIES["nnx"]:
        layer = module.BatchNorm(
            4, scale_metadata={"mine": 3}, bias_metadata={"mine": "x"}, rngs=nnx.Rngs(0)
        )
        assert (layer.scale.mine, layer.bias.mine) == (3, "x")
        layer(normal((2, 4)))
        assert layer.scale.mine == 3


# ---- one call ----

NORMS = ("LayerNorm", "RMSNorm")
norms = pytest.mark.parametrize("name", NORMS)
HALF, SINGLE, DOUBLE = jnp.bfloat16, jnp.float32, jnp.float64


@in_turn(
    library=[*LIBRARIES],
    name=NAMES,
    x_dtype=[HALF, SINGLE],
    param_dtype=[HALF, SINGLE],
    dtype=[None, HALF, SINGLE],
)
def test_dtypes(library, name, x_dtype, param_dtype, dtype):
    options = {"dtype": dtype, "param_dtype": param_dtype}
    if name == "BatchNorm":
        options["use_running_average"] = False
    compare(library, name, normal((6, 5, 32), x_dtype), options)


# Of Flax: running statistics are float32, and JAX warns of what is stored into them.
stored_as_float32 = pytest.mark.filterwarnings(
    "ignore:scatter inputs have incompatible types:FutureWarning"
)


@stored_as_float32
@pytest.mark.parametrize(
    ("x_dtype", "options"),
    [
        (DOUBLE, {}),
        (DOUBLE, {"dtype": SINGLE}),
        (SINGLE, {"dtype": DOUBLE}),
        (SINGLE, {"param_dtype": DOUBLE}),
        (jnp.float16, {"dtype": HALF}),
        (jnp.float16, {"dtype": "float16"}),
    ],
)
@libraries
@names
def test_unusual_dtypes(library, name, x_dtype, options):
    if name == "BatchNorm":
        options = options | {"use_running_average": False}
    compare(library, name, normal((6, 32), x_dtype), options)


@libraries
def test_nnx_rounds_first(library):
    """NNX rounds x and the parameters to `dtype` before it normalises, Linen the result only."""
    x = jnp.full((1, 64), 256.0).at[0, ::2].add(1.0)  # 257 is not a bfloat16
    theirs, ours = (make(cls, 64, {"dtype": HALF}) for cls in pair(library, "LayerNorm"))
    if library == "linen":
        theirs, ours = (
            functools.partial(m.apply, m.init(jax.random.key(0), x)) for m in (theirs, ours)
        )
    np.testing.assert_array_equal(ours(x), theirs(x))
    assert float(abs(ours(x)).max()) == (0.0 if library == "nnx" else 1.0)


@pytest.mark.parametrize(
    ("options", "answered"),
    [
        ({"use_scale": False}, True),
        ({"use_bias": False}, True),
        ({"use_bias": False, "use_scale": False}, True),
        ({"epsilon": 0.3}, True),
        ({"use_fast_variance": False}, True),
        ({"reduction_axes": 1, "feature_axes": 1}, True),
        ({"reduction_axes": (1, 2)}, True),
        ({"reduction_axes": (0, -1, 1), "feature_axes": (2,)}, True),
        ({"reduction_axes": [-1, 1], "feature_axes": [2, 1]}, True),
        ({"reduction_axes": (2, -1), "feature_axes": 2}, True),
        ({"reduction_axes": 1}, False),
        ({"reduction_axes": 1, "use_scale": False, "use_bias": False}, True),
        ({"reduction_axes": -1, "feature_axes": (1, 2)}, False),
        ({"reduction_axes": ()}, False),
        ({"axis_name": None, "axis_index_groups": [[0]]}, True),
        ({"force_float32_reductions": False}, False),
        ({"epsilon": np.float32(1e-3)}, True),
        ({"epsilon": jnp.float32(1e-3)}, False),
    ],
    ids=str,
)
@libraries
@norms
def test_norm_options(library, name, options, answered):
    theirs = pair(library, name)[0]
    known = inspect.signature(theirs.__init__).parameters
    if not set(options) <= set(known):
        pytest.skip(f"{library} has no such argument")
    shape = (4, 6, 8)
    sizes = np.atleast_1d(options.get("feature_axes", -1))
    compare(
        library,
        name,
        normal(shape),
        options,
        answered=answered,
        features=int(np.prod([shape[a] for a in sizes])),
    )


@pytest.mark.parametrize(
    ("options", "answered"),
    [
        ({}, True),
        ({"use_scale": False}, True),
        ({"use_bias": False}, True),
        ({"use_bias": False, "use_scale": False}, True),
        ({"momentum": 0.5, "epsilon": 0.1}, True),
        ({"use_fast_variance": False}, True),
        ({"axis": 1}, True),
        ({"axis": (-1,)}, True),
        ({"axis": (1, -1)}, True),
        ({"axis": (0, 2)}, True),
        ({"force_float32_reductions": False}, False),
    ],
    ids=str,
)
@stored_as_float32
@pytest.mark.parametrize("running", [False, True])
@libraries
def test_batch_norm_options(library, options, answered, running):
    theirs = pair(library, "BatchNorm")[0]
    if not set(options) <= set(inspect.signature(theirs.__init__).parameters):
        pytest.skip(f"{library} has no such argument")
    axes = np.atleast_1d(options.get("axis", -1))
    if library == "nnx" and len(axes) > 1:
        pytest.skip("the running statistics of nnx.BatchNorm have one axis")
    shape = (4, 6, 8)
    compare(
        library,
        "BatchNorm",
        normal(shape),
        options | {"use_running_average": running},
        answered=answered,
        features=shape[axes[0]],
    )


@in_turn(
    library=[*LIBRARIES],
    name=NAMES,
    shape=[(4, 6, 8), (4, 1, 1), (8,), (6, 8), (1, 6, 1)],
)
def test_masks(library, name, shape):
    mask = np.random.default_rng(1).random(shape) > 0.3
    mask[..., -1:] = True
    if shape == (8,):
        mask[0] = False
    x = normal((4, 6, 8))
    options = {"use_running_average": False} if name == "BatchNorm" else {}
    compare(library, name, x, options, {"mask": jnp.asarray(mask)})
    hidden = jnp.where(mask, x, nan)
    compare(library, name, hidden, options, {"mask": jnp.asarray(mask)}, gradients=False)


def test_masks_of_numbers():
    """Linen converts them to booleans."""
    mask = jnp.array([1, 0, 1, 1])
    compare("linen", "LayerNorm", normal((3, 4)), {}, {"mask": mask})
    compare("linen", "LayerNorm", normal((3, 4)), {}, {"mask": [1, 0, 0.5, 1]})


@stored_as_float32
@pytest.mark.filterwarnings("ignore:Casting complex values:numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.complex64, {}),
        (jnp.int32, {}),
        (jnp.float32, {"dtype": jnp.complex64}),
        (jnp.float32, {"param_dtype": jnp.complex64}),
        (jnp.float32, {"param_dtype": jnp.int32}),
    ],
)
@libraries
@names
def test_other_dtypes_are_left_to_flax(library, name, dtype, options):
    if name == "BatchNorm":
        options = options | {"use_running_average": False}
    # NNX converts x and the parameters first: integers are floats by then.
    answered = library == "nnx" and jnp.int32 in (dtype, options.get("param_dtype"))
    compare(library, name, normal((4, 3, 8), dtype), options, answered=answered, gradients=False)


@libraries
@names
def test_edges(library, name):
    options = {"use_running_average": False} if name == "BatchNorm" else {}
    compare(library, name, normal((3, 4)).at[1, 2].set(nan), options, gradients=False)
    compare(library, name, normal((1, 4)), options, gradients=False)
    # Of one element the gradient is 0 up to rounding; without a batch Flax's parameters get NaN, jaxnorm's 0.
    compare(library, name, normal((4,)), options, gradients=name != "BatchNorm")
    compare(library, name, normal((0, 4)), options, gradients=name != "BatchNorm")
    compare(library, name, np.asarray(normal((3, 4))), options, gradients=False)


@libraries
@names
def test_variance_is_accurate(library, name):
    """Flax needs use_fast_variance=False for this; here it is so in any case."""
    x = normal((64, 32)) + 1e4
    theirs, ours = pair(library, name)
    options = {"use_running_average": False} if name == "BatchNorm" else {}
    variables = variables_of(theirs, 32, x, options)
    slow = options | {"use_fast_variance": False}
    want = apply(theirs, variables, x, 32, slow, {})[0]
    have = apply(ours, variables, x, 32, options, {})[0]
    close(have, want, 1, 1e-3)  # of numbers near 1e4, float32 keeps 1e-3
    if name != "RMSNorm":
        fast = apply(theirs, variables, x, 32, options, {})[0]
        assert np.abs(fast - want).max() > 1e-2 * np.abs(want).max()


def test_stored_dtypes():
    """What a checkpoint holds decides, not what the module would have made."""
    x = normal((3, 4))
    for dtype, answered in ((jnp.bfloat16, True), (jnp.complex64, False), (jnp.int8, False)):
        variables = {"params": {"scale": normal((4,), dtype), "bias": normal((4,), dtype, 1)}}
        want = linen.LayerNorm().apply(variables, x)
        run = functools.partial(jlinen.LayerNorm().apply, variables)
        assert uses_kernels(run, x) == answered
        close(run(x), want, 16, 1e-7)


def test_promote_dtype_of_the_caller():
    """NNX hands x, the statistics and the parameters to it; an identity gives Linen's rounding."""
    seen = []

    def keep(arrays, *, dtype=None):
        seen.append((len(arrays), dtype))
        return arrays

    x = normal((6, 8))
    compare("nnx", "LayerNorm", x, {"dtype": HALF, "promote_dtype": keep})
    compare("nnx", "RMSNorm", x, {"dtype": HALF, "promote_dtype": keep})
    compare("nnx", "BatchNorm", x, {"dtype": HALF, "promote_dtype": keep})
    assert set(seen) == {(3, HALF), (2, HALF), (5, HALF)}


# ---- running statistics ----


@libraries
def test_running_statistics_over_steps(library):
    """Ten updates, from initial values, of both."""
    theirs, ours = pair(library, "BatchNorm")
    options = {"momentum": 0.8, "use_running_average": False}
    results = []
    for cls in (theirs, ours):
        variables = {"mean": jnp.zeros(4, SINGLE), "var": jnp.ones(4, SINGLE)}
        variables |= {"scale": normal((4,), seed=1), "bias": normal((4,), seed=2)}
        for seed in range(10):
            x = normal((5, 3, 4), seed=seed)
            variables |= apply(cls, variables, x, 4, options, {})[1]
        results.append(variables)
    for n in ("mean", "var"):
        close(results[1][n], results[0][n], 16, 1e-7)
    biased = np.mean([np.var(normal((5, 3, 4), seed=s), (0, 1)) for s in range(10)], 0)
    np.testing.assert_allclose(results[1]["var"], biased, rtol=0.4)


def test_linen_initialisation_updates_nothing():
    x = normal((5, 4)) + 3
    layer = jlinen.BatchNorm(use_running_average=False, axis_name="not bound")
    y, variables = layer.init_with_output(jax.random.key(0), x)
    want = linen.BatchNorm(use_running_average=False).init_with_output(jax.random.key(0), x)
    close(y, want[0], 16, 1e-7)
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], np.zeros(4))
    np.testing.assert_array_equal(variables["batch_stats"]["var"], np.ones(4))


def test_nnx_train_eval_and_view():
    x = normal((5, 4)) + 3
    layers = [cls(4, rngs=nnx.Rngs(0)) for cls in pair("nnx", "BatchNorm")]
    for layer in layers:
        layer.eval()
    np.testing.assert_array_equal(layers[1].mean[...], np.zeros(4))
    close(layers[1](x), layers[0](x), 16, 1e-7)
    np.testing.assert_array_equal(layers[1].mean[...], np.zeros(4))
    for layer in layers:
        layer.train()
    close(layers[1](x), layers[0](x), 16, 1e-7)
    close(layers[1].mean[...], layers[0].mean[...], 16, 1e-7)
    before = layers[1].mean[...]
    view = nnx.view(layers[1], use_running_average=True)
    view(x)
    np.testing.assert_array_equal(layers[1].mean[...], before)
    assert view.use_running_average
    assert not layers[1].use_running_average


@libraries
def test_gradient_of_running_statistics(library):
    """Linen's are functions of x; NNX stops the gradient."""
    theirs, ours = pair(library, "BatchNorm")
    x = normal((6, 4))
    options = {"use_running_average": False}
    variables = variables_of(theirs, 4, x, options)
    grads = [
        jax.grad(lambda x, c=c: (apply(c, variables, x, 4, options, {})[1]["var"] ** 2).sum())(x)
        for c in (theirs, ours)
    ]
    close(grads[1], grads[0], 64, 1e-7)
    assert (np.abs(grads[1]).max() > 0) == (library == "linen")


# ---- activation and residual ----


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@libraries
def test_activation_and_residual(library, dtype, running):
    """Flax's module, an addition and a ReLU say the same, with one rounding more each."""
    theirs, ours = pair(library, "BatchNorm")
    x, other = normal((6, 5, 8), dtype), normal((6, 5, 8), dtype, 4)
    options = {"dtype": dtype, "use_running_average": running}
    variables = variables_of(theirs, 8, x, options)

    def flax_form(variables, x, other):
        y, kept = apply(theirs, variables, x, 8, options, {})
        return jax.nn.relu(y + other), kept

    def fused(variables, x, other):
        return apply(ours, variables, x, 8, options | {"activation": "relu"}, {"residual": other})

    (want, kept), (have, have_kept) = (jax.jit(f)(variables, x, other) for f in (flax_form, fused))
    eps = float(jnp.finfo(dtype).eps)
    close(have, want, 16, eps)
    jax.tree.map(lambda a, b: close(a, b, 16, max(eps / 16, 1e-7)), have_kept, kept)
    assert 0.1 < float((have == 0).mean()) < 0.9
    dy = normal(want.shape, dtype, 9)
    pulls = [
        jax.vjp(lambda *a, f=f: f(*a)[0], variables, x, other)[1](dy) for f in (flax_form, fused)
    ]
    # Where rounding decides whether y is positive, derivatives differ wholly.
    for want, have in zip(*(jax.tree.leaves(p) for p in pulls), strict=True):
        error = np.abs(np.asarray(have, np.float64) - np.asarray(want, np.float64))
        assert np.median(error) <= 8 * eps * np.abs(np.asarray(want, np.float64)).max()
        assert (error > 0.2 * np.abs(np.asarray(want, np.float64)).max()).mean() < 0.02


def test_activation_and_residual_where_flax_answers():
    x, other = normal((6, 8)), normal((6, 8), seed=4)
    options = {"force_float32_reductions": False, "use_running_average": False}
    variables = variables_of(linen.BatchNorm, 8, x, options)
    y = apply(linen.BatchNorm, variables, x, 8, options, {})[0]
    for activation, act in (("relu", jax.nn.relu), (None, lambda v: v)):
        for call, wanted in (({"residual": other}, act(y + other)), ({}, act(y))):
            chosen = options | {"activation": activation}
            have = apply(jlinen.BatchNorm, variables, x, 8, chosen, call)[0]
            np.testing.assert_array_equal(have, wanted)


@libraries
def test_backward_keeps_x_and_bits(library):
    ours = pair(library, "BatchNorm")[1]
    x = normal((64, 64), HALF)
    options = {"activation": "relu", "use_running_average": False, "dtype": HALF}
    variables = variables_of(ours, 64, x, options)
    _, pull = jax.vjp(lambda x: apply(ours, variables, x, 64, options, {})[0], x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if leaf.ndim > 1 and leaf.size >= 512)
    assert kept <= x.nbytes + x.size // 8


@libraries
def test_errors_of_what_is_added(library):
    ours = pair(library, "BatchNorm")[1]
    x = normal((6, 8))
    run = functools.partial(apply, ours, variables_of(ours, 8, x, {}), x, 8)
    training = {"use_running_average": False}
    with pytest.raises(ValueError, match=r"^BatchNorm: activation must be None or 'relu', got 'x'"):
        run(training | {"activation": "x"}, {})
    with pytest.raises(
        TypeError, match="^BatchNorm: residual must have the result's dtype float32"
    ):
        run(training, {"residual": x.astype(HALF)})
    with pytest.raises(ValueError, match=r"^BatchNorm: residual must have x's shape \(6, 8\)"):
        run(training, {"residual": x[:1]})


# ---- errors ----


def _errors_of(library, name, x, options, call, features, variables):
    """(type, message) of both."""
    found = []
    for cls in pair(library, name):
        try:
            given = variables_of(cls, 8, normal((6, 8)), {}) if variables is None else variables
            apply(cls, given, x, features, options, call)
        except Exception as error:
            found.append((type(error), str(error)))
        else:
            found.append(None)
    return found


@pytest.mark.parametrize(
    ("name", "x", "options", "call"),
    [
        ("LayerNorm", normal((6, 9)), {}, {}),  # parameters for 8 features
        ("BatchNorm", normal((6, 9)), {"use_running_average": False}, {}),
        ("LayerNorm", normal((6, 8)), {"reduction_axes": 2}, {}),
        ("LayerNorm", normal((6, 8)), {"feature_axes": 4}, {}),
        ("BatchNorm", normal((6, 8)), {"axis": 5, "use_running_average": False}, {}),
        ("LayerNorm", normal((6, 8)), {"reduction_axes": None}, {}),
        ("LayerNorm", [1.0, 2.0], {}, {}),
        ("LayerNorm", jnp.float32(1), {}, {}),
        ("LayerNorm", normal((6, 8)), {"dtype": jnp.int32}, {}),
        ("LayerNorm", normal((6, 8)), {}, {"mask": np.ones((5, 8), bool)}),
        ("RMSNorm", normal((6, 8)), {}, {"mask": np.ones((2, 6, 8), bool)}),
        ("BatchNorm", normal((6, 8)), {}, {"mask": np.ones(3, bool), "use_running_average": False}),
        ("BatchNorm", normal((6, 8)), {"use_running_average": None}, {}),
        ("LayerNorm", normal((6, 8)), {"axis_name": "nowhere"}, {}),
    ],
)
@libraries
def test_errors_are_those_of_flax(library, name, x, options, call):
    want, have = _errors_of(library, name, x, options, call, 8, None)
    assert want is not None
    assert have == want


def test_linen_errors():
    x = normal((6, 8))
    variables = jlinen.BatchNorm(use_running_average=True).init(jax.random.key(0), x)
    with pytest.raises(errors.ModifyScopeVariableError):
        jlinen.BatchNorm(use_running_average=False).apply(variables, x)
    with pytest.raises(ValueError, match="use_running_average"):
        jlinen.BatchNorm(use_running_average=True).apply(variables, x, use_running_average=True)
    with pytest.raises(errors.ScopeCollectionNotFound):
        jlinen.LayerNorm().apply({}, x)
    with pytest.raises(errors.CallCompactUnboundModuleError):
        jlinen.LayerNorm()(x)


def test_axis_names_that_are_not_there():
    """These errors are jaxnorm's, which say what JAX's do not."""
    for library in LIBRARIES:
        ours = pair(library, "BatchNorm")[1]
        x = normal((6, 8))
        options = {"axis_name": "nowhere", "use_running_average": False}
        run = functools.partial(apply, ours, variables_of(ours, 8, x, {}), features=8, call={})
        with pytest.raises(ValueError, match="axis_name must name axes of an enclosing shard_map"):
            run(x=x, options=options)
        grouped = options | {"axis_name": "d", "axis_index_groups": GROUPS["halves"]}
        with pytest.raises(ValueError, match="axis_index_groups must be None in a shard_map that"):
            jax.shard_map(
                lambda x, run=run, grouped=grouped: run(x=x, options=grouped)[0],
                mesh=_mesh(),
                in_specs=P("d"),
                out_specs=P("d"),
            )(normal((8, 8)))


# ---- statistics over devices ----

GROUPS = {
    "all": None,
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "uneven": [[0, 1, 2], [3, 4, 5, 6, 7]],
}


def _mesh():
    devices = jax.devices("cpu")[:8]
    return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def _over_devices(kind, function, variables, x):
    """`function(variables, part of x)` on eight parts."""
    if kind == "vmap":
        parts = x.reshape(8, -1, *x.shape[1:])
        y, kept = jax.vmap(function, (None, 0), axis_name="d")(variables, parts)
        return y.reshape(x.shape), kept
    whole = jax.shard_map(
        lambda v, x: jax.tree.map(lambda a: a[None], function(v, x)),
        mesh=_mesh(),
        in_specs=(P(), P("d")),
        out_specs=P("d"),
        check_vma=False,
    )
    y, kept = whole(variables, x)
    return y.reshape(x.shape), kept


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", ["shard_map", "vmap"])
@libraries
def test_axis_name(library, kind, groups, masked):
    if kind == "vmap" and groups != "all":
        pytest.skip("JAX's vmap has no groups")
    x = normal((32, 3, 8))
    mask = jnp.arange(x.shape[1])[:, None] < 2 if masked else None
    options = {"axis_name": "d", "axis_index_groups": GROUPS[groups], "use_running_average": False}
    theirs, ours = pair(library, "BatchNorm")
    variables = variables_of(theirs, 8, x, options)

    def run(cls):
        def function(variables, x):
            return apply(cls, variables, x, 8, options, {"mask": mask})

        return lambda v, x: _over_devices(kind, function, v, x)

    answered = not masked and groups != "uneven"
    assert uses_kernels(run(ours), variables, x) == answered
    dy = normal(x.shape, seed=3)

    def gradients(v, x, cls):
        return jax.grad(lambda v, x: (run(cls)(v, x)[0] * dy).sum(), (0, 1))(v, x)

    @jax.jit
    def everything(v, x):
        return [(run(c)(v, x), gradients(v, x, c)) for c in (theirs, ours)]

    ((want, kept), pulls), ((have, have_kept), have_pulls) = everything(variables, x)
    close(have, want, 16, 1e-7)
    jax.tree.map(lambda a, b: close(a, b, 16, 1e-7), have_kept, kept)
    jax.tree.map(lambda a, b: close(a, b, 128, 1e-7), have_pulls, pulls)


@libraries
def test_axis_name_in_a_checked_shard_map(library):
    """Statistics of all devices do not vary over them, so that they may leave as one copy."""
    x = normal((32, 8))
    theirs, ours = pair(library, "BatchNorm")
    options = {"axis_name": "d", "use_running_average": False}
    variables = variables_of(theirs, 8, x, options)
    results = [
        jax.jit(
            jax.shard_map(
                lambda v, x, c=c: apply(c, v, x, 8, options, {}),
                mesh=_mesh(),
                in_specs=(P(), P("d")),
                out_specs=(P("d"), P()),
            )
        )(variables, x)
        for c in (theirs, ours)
    ]
    jax.tree.map(lambda a, b: close(a, b, 16, 1e-7), results[1], results[0])


@libraries
@norms
def test_axis_name_of_a_norm(library, name):
    """Of rows that devices share; Flax's code answers."""
    x = normal((6, 32))
    theirs, ours = pair(library, name)
    options = {"axis_name": "d"}
    variables = variables_of(theirs, 4, x[:, :4], {})

    def run(cls):
        return jax.vmap(lambda x: apply(cls, variables, x, 4, options, {})[0], 1, 1, axis_name="d")(
            x.reshape(6, 8, 4)
        )

    np.testing.assert_array_equal(run(ours), run(theirs))


@libraries
def test_batch_sharded_under_jit(library):
    """No axis name is needed there."""
    x = normal((32, 8))
    theirs, ours = pair(library, "BatchNorm")
    options = {"use_running_average": False}
    variables = variables_of(theirs, 8, x, options)
    want = apply(theirs, variables, x, 8, options, {})
    sharded = jax.device_put(x, jax.NamedSharding(_mesh(), P("d")))
    have = jax.jit(lambda v, x: apply(ours, v, x, 8, options, {}))(variables, sharded)
    jax.tree.map(lambda a, b: close(a, b, 16, 1e-7), have, want)
    assert have[0].sharding.spec == P("d")


# ---- whole models ----


class LinenModel(linen.Module):
    library: str
    ours: bool

    @linen.compact
    def __call__(self, x, train=True):
        norms = LIBRARIES[self.library][self.ours]
        for features in (8, 8):
            x = linen.Dense(features)(x)
            x = norms.LayerNorm()(x) + norms.RMSNorm()(x)
            x = norms.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return linen.Dense(1)(norms.LayerNorm(name="last")(x))


class NnxModel(nnx.Module):
    def __init__(self, ours, rngs):
        norms = LIBRARIES["nnx"][ours]
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.layer = norms.LayerNorm(8, rngs=rngs)
        self.rms = norms.RMSNorm(8, rngs=rngs)
        self.batch = norms.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return self.last(self.batch(self.layer(x) + self.rms(x)))


def _train(library, ours, state, steps=3):
    """The state of a model (its variables, of NNX without the graph) after some steps; None starts it."""
    x = normal((16, 4))
    target = x.sum(-1, keepdims=True)
    if library == "linen":
        model = LinenModel("linen", ours)
        state = model.init(jax.random.key(1), x) if state is None else state

        @jax.jit
        def step(state):
            def loss(params):
                y, changed = model.apply({**state, "params": params}, x, mutable=["batch_stats"])
                return ((y - target) ** 2).mean(), changed

            grads, changed = jax.grad(loss, has_aux=True)(state["params"])
            params = jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], grads)
            return {"params": params, **changed}
    else:
        graph, fresh = nnx.split(NnxModel(ours, nnx.Rngs(1)))
        state = fresh if state is None else state

        @jax.jit
        def step(state):
            model = nnx.merge(graph, state)
            grads = nnx.grad(lambda m: ((m(x) - target) ** 2).mean())(model)
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.05 * g, params, grads))
            return nnx.state(model)

    for _ in range(steps):
        state = step(state)
    return state


def same_training(have, want):
    """Compares absolute errors: biases in front of a norm have rounding errors for a gradient."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), have, want)


@libraries
def test_training(library):
    """Three steps of a model from one seed: names, structure and, up to rounding, numbers."""
    want, have = (_train(library, ours, None) for ours in (False, True))
    assert jax.tree.structure(have) == jax.tree.structure(want)
    same_training(have, want)


def _through_bytes(library, state, template):
    if library == "linen":
        return serialization.from_bytes(template, serialization.to_bytes(state))
    plain = pickle.loads(pickle.dumps(nnx.to_pure_dict(state)))
    nnx.replace_by_pure_dict(template, plain)
    return template


def _through_orbax(state, template, folder):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", jax.eval_shape(lambda: template))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside orbax
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("means", ["bytes", "orbax"])
@pytest.mark.parametrize("ours", [False, True], ids=["into Flax", "into jaxnorm"])
@libraries
def test_checkpoints(library, ours, means, tmp_path):
    """What one library trained and wrote, the other reads bit for bit, and goes on with."""
    state = _train(library, not ours, None, steps=2)
    template = _train(library, ours, None, steps=0)
    if means == "bytes":
        read = _through_bytes(library, state, template)
    else:
        read = _through_orbax(state, template, tmp_path)
    assert jax.tree.structure(read) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    want = _train(library, not ours, state, steps=1)
    have = _train(library, ours, jax.tree.map(jnp.asarray, read), steps=1)
    same_training(have, want)


def test_linen_lifted_transformations():
    """A scan and remat over layers with parameters of their own."""

    def build(norms):
        class Layer(linen.Module):
            @linen.compact
            def __call__(self, x, _):
                return x + norms.LayerNorm()(linen.Dense(8)(x)), None

        layers = linen.scan(
            linen.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=3
        )
        return layers()

    x = normal((5, 8))
    theirs, ours = (build(module) for module in LIBRARIES["linen"])
    variables = theirs.init(jax.random.key(0), x, None)
    losses = [lambda v, m=m: (m.apply(v, x, None)[0] ** 2).sum() for m in (theirs, ours)]
    want, have = (jax.jit(jax.value_and_grad(f))(variables) for f in losses)
    jax.tree.map(lambda a, b: close(a, b, 128, 1e-7), have, want)


def test_nnx_lifted_transformations():
    """Layers made by vmap and called by scan, with running statistics of their own."""
    x = normal((5, 8))

    def run(norms):
        layers = nnx.vmap(lambda rngs: norms.BatchNorm(8, rngs=rngs))(nnx.Rngs(0).split(3))
        forward = nnx.jit(
            nnx.scan(lambda x, layer: 2 * layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        )
        return forward(x, layers), nnx.to_pure_dict(nnx.state(layers))

    want, have = (run(module) for module in LIBRARIES["nnx"])
    jax.tree.map(lambda a, b: close(a, b, 32, 1e-7), have, want)
    assert have[1]["mean"].shape == (3, 8)


@pytest.mark.parametrize("options", [{}, {"axis_name": None, "force_float32_reductions": False}])
@names
def test_one_call_is_one_call(name, options):
    """Interceptors and captured intermediates see it once, whoever answers."""
    x = normal((3, 8))
    if name == "BatchNorm":
        options = options | {"use_running_average": False}
    layer = getattr(jlinen, name)(**options)
    calls = []

    def interceptor(following, args, kwargs, context):
        calls.append(context.method_name)
        return following(*args, **kwargs)

    with linen.intercept_methods(interceptor):
        variables = layer.init(jax.random.key(0), x)
    assert calls == ["__call__"]
    _, changed = layer.apply(
        variables, x, capture_intermediates=True, mutable=["intermediates", "batch_stats"]
    )
    assert len(changed["intermediates"]["__call__"]) == 1


def test_replacing_flax_at_run_time(monkeypatch):
    """Assigning over Flax's names swaps a whole program, and Flax's code is still found."""
    for library, (theirs, ours) in LIBRARIES.items():
        for name in NAMES:
            monkeypatch.setattr(theirs, name, getattr(ours, name))
        x = normal((3, 8), jnp.complex64)
        layer = make(theirs.LayerNorm, 8, {"dtype": jnp.complex64})
        y = layer.init_with_output(jax.random.key(0), x)[0] if library == "linen" else layer(x)
        assert y.dtype == jnp.complex64


# ---- the package ----


def test_the_table_of_arguments():
    """docs/flax.md names every argument of the installed release, and none that it lacks."""
    table = (ROOT / "docs" / "flax.md").read_text().partition("## Every argument of Flax")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    wanted = {"mask", "use_running_average"}
    for library in LIBRARIES:
        for name in NAMES:
            theirs = pair(library, name)[0]
            wanted |= set(inspect.signature(theirs.__init__).parameters) - {"self"}
    assert documented == wanted


def _python(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def test_flax_is_not_imported_unasked():
    done = _python("import sys, jaxnorm; assert 'flax' not in sys.modules")
    assert done.returncode == 0, done.stderr


@libraries
def test_flax_is_missing(library):
    done = _python(f"import sys; sys.modules['flax'] = None\nimport jaxnorm.{library}")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        f"ImportError: Flax is not installed, which jaxnorm.{library} needs. "
        "Install it with: pip install 'jaxnorm[flax]'"
    )
