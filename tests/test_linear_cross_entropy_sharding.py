"""linear_cross_entropy on several devices, and the kernels of a chunk: of all classes, of a device's part of them."""

import collections
import functools
import math

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import row_emulator
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, put
from test_linear_cross_entropy import expected, given, moving, results_of

from jaxnorm._ops import linear_cross_entropy_primitives as primitives
from jaxnorm._ops.linear_cross_entropy_formula import formula
from jaxnorm._sharding import DEVICES, Blocks

BATCH, LENGTH, FEATURES, CLASSES, CHUNK = 4, 24, 4, 64, 5
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "chunk": CHUNK}


def operands_of(batch=BATCH, classes=CLASSES):
    """Some tokens have no label, and weights of 0."""
    rng = np.random.default_rng(5)
    labels = np.asarray(rng.integers(0, classes, (batch, LENGTH)), np.int32)
    labels[:, 2] = -100
    where = rng.random(classes) < 0.8
    where[np.unique(labels[labels >= 0])] = True
    return {
        "x": np.asarray(rng.standard_normal((batch, LENGTH, FEATURES)), "float32"),
        "w": np.asarray(rng.standard_normal((FEATURES, classes)), "float32"),
        "labels": labels,
        "bias": np.asarray(rng.standard_normal(classes), "float32"),
        "weights": np.asarray(rng.random(labels.shape) * (labels >= 0), "float32"),
        "where": where,
    }


def specs_of(tokens, features, classes) -> dict[str, P]:
    of_tokens, of_classes = P(*tokens), P(classes)
    return {
        "x": P(*tokens, None),
        "w": P(features, classes),
        "labels": of_tokens,
        "bias": of_classes,
        "weights": of_tokens,
        "where": of_classes,
    }


def derived(operands, options):
    """(loss, statistics, gradients): every result counts in the gradients."""

    def function(values):
        found = results_of(operands | values, options)
        found = {n: jnp.where(jnp.isnan(a), 0, a) for n, a in found.items()}
        total = sum(
            jnp.sum(a * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape))
            for a in found.values()
        )
        return total, found

    values = {n: operands[n] for n in moving(operands)}
    (_, found), grads = jax.value_and_grad(function, has_aux=True)(values)
    return found, grads


KINDS = {
    "mean": OPTIONS,
    "none": OPTIONS | {"reduction": "none", "return_stats": True},
}


@functools.cache
def alone(kind, **sizes):
    run = jax.jit(functools.partial(derived, options=KINDS[kind]))
    return jax.tree.map(np.asarray, run(operands_of(**sizes)))


def assert_same(got, want):
    for n in (0, 1):
        for name, a in want[n].items():
            np.testing.assert_allclose(got[n][name], a, rtol=2e-5, atol=2e-5, err_msg=name)
            assert np.any(a)


# Entries of specs: tokens, features and classes.
LAYOUTS = {
    "tokens": (("d", "m"), None, None),
    "tokens together": ((("d", "m"), None), None, None),
    "classes": ((None, None), None, "d"),
    "classes together": ((None, None), None, ("d", "m")),
    "tokens and classes": (("d", None), None, "m"),
    "length and classes": ((None, "d"), None, "m"),
    "features": (("d", None), "d", None),
    "features and classes": (("d", None), "d", "m"),
}
# Every layout, and every kind of program on either kind of mesh.
PROGRAMS = [
    *((AUTO, "mean", layout) for layout in LAYOUTS),
    *((AUTO, "none", layout) for layout in ("classes together", "tokens and classes", "features")),
    *((EXPLICIT, "mean", layout) for layout in ("tokens", "tokens and classes")),
    *((EXPLICIT, "none", layout) for layout in ("length and classes", "features and classes")),
]
PROGRAM_NAMES = [f"{'explicit' if mesh is EXPLICIT else 'auto'}-{k}-{n}" for mesh, k, n in PROGRAMS]


def blocks_in(mesh, entries) -> int:
    names = [n for e in entries for n in (e if isinstance(e, tuple) else (e,)) if n]
    return math.prod(mesh.shape[n] for n in names)


@pytest.mark.parametrize(("mesh", "kind", "layout"), PROGRAMS, ids=PROGRAM_NAMES)
def test_sharded(mesh, kind, layout):
    """As on one device; only numbers of tokens and gradients travel, and the features of w where they are cut."""
    if layout == "tokens together":
        sizes, tokens = {"batch": 8}, 8 * LENGTH
    else:
        sizes, tokens = {}, BATCH * LENGTH
    of_tokens, of_features, of_classes = LAYOUTS[layout]
    specs = specs_of(*LAYOUTS[layout])
    with jax.set_mesh(mesh):
        placed = {n: put(a, specs[n], mesh) for n, a in operands_of(**sizes).items()}
        program, got = hlo.run(functools.partial(derived, options=KINDS[kind]), placed)
    assert_same(got, alone(kind, **sizes))

    own = tokens // blocks_in(mesh, of_tokens)
    own_classes = CLASSES // blocks_in(mesh, [of_classes])
    found = hlo.collectives(program)
    shapes = collections.defaultdict(list)
    for c in found:
        shapes[c.kind] += [shape for _, shape in c.arrays]
    gathered = [math.prod(s) for s in shapes.pop("all-gather", [])]
    if of_features:
        assert max(gathered) <= FEATURES * own_classes
        shapes.pop("reduce-scatter", None)
    else:
        # Numbers of tokens may be placed anew, neither x nor logits.
        assert max(gathered, default=0) <= tokens
    reduced = [math.prod(s) for s in shapes.pop("all-reduce")]
    parameters = FEATURES * own_classes
    features = FEATURES * own if of_classes else 0  # the gradient of x
    assert max(reduced) <= max(parameters, features, 6 * own)
    assert own * own_classes > max(parameters, features, 6 * own)  # logits would be larger
    for name, others in shapes.items():
        assert name == "collective-permute", shapes
        assert max(math.prod(s) for s in others) <= tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["tokens together", "classes together", "tokens and classes"])
def test_uneven(kind, layout):
    """Padding of tokens and classes counts for nothing, whatever it holds."""
    sizes = {"batch": 5, "classes": 50 if layout == "tokens and classes" else 49}
    specs = specs_of(*LAYOUTS[layout])
    whole = operands_of(**sizes)

    def placed(name, a):
        """Padded with what is no number, to be cut on the devices."""
        widths = [
            (0, -n % 8 if entry else 0) for n, entry in zip(a.shape, specs[name], strict=False)
        ]
        widths += [(0, 0)] * (a.ndim - len(widths))
        fill = {"f": np.nan, "b": True, "i": 3}[a.dtype.kind]
        return put(np.pad(a, widths, constant_values=fill), specs[name], AUTO)

    def cut(padded):
        operands = {n: a[tuple(slice(m) for m in whole[n].shape)] for n, a in padded.items()}
        return derived(operands, KINDS[kind])

    got = jax.jit(cut)({n: placed(n, a) for n, a in whole.items()})
    assert_same(got, alone(kind, **sizes))


def test_fewer_classes_than_devices():
    """Parts without any class."""
    operands = operands_of(classes=5)
    specs = specs_of((None, None), None, ("d", "m"))

    def run(operands):
        spread = {
            n: jax.lax.with_sharding_constraint(a, jax.sharding.NamedSharding(AUTO, specs[n]))
            for n, a in operands.items()
        }
        return derived(spread, KINDS["none"])

    assert_same(jax.jit(run)(operands), alone("none", classes=5))


def test_features_are_summed_in_float32():
    """The gradient of x is rounded once, not in each of eight parts of the classes."""
    operands = operands_of()
    operands |= {n: operands[n].astype(jnp.bfloat16) for n in ("x", "w", "bias")}
    run = jax.jit(lambda operands: derived(operands, {"chunk": CHUNK})[1]["x"])
    want = oracle.f64(run(operands))
    specs = specs_of((None, None), None, ("d", "m"))
    got = oracle.f64(run({n: put(a, specs[n], AUTO) for n, a in operands.items()}))
    differ = got[want != 0] != want[want != 0]
    assert differ.size > 200
    assert np.mean(differ) < 0.1
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05 * np.abs(want).max())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("special", ["masked", "-inf", "offset", "NaN in hidden tokens"])
def test_special_parts(special, reduction):
    """As on one device: parts without any class that counts, and what tokens of weight 0 hold."""
    operands = operands_of()
    labels = operands["labels"]
    hidden = labels < 0
    if special == "masked":
        operands["where"] = np.arange(CLASSES) >= CLASSES // 2
        operands["labels"] = np.where(hidden, labels, labels // 2 + CLASSES // 2)
    elif special == "-inf":
        operands["bias"][CLASSES // 8 :] = -np.inf
        operands["labels"] = np.where(hidden, labels, labels % (CLASSES // 8))
        operands["where"][:] = True
    elif special == "offset":
        operands["bias"] += np.where(np.arange(CLASSES) < CLASSES // 2, -1e4, 1e4).astype("float32")
    else:
        operands["x"][hidden] = np.nan
    options = {"reduction": reduction, "return_stats": special != "NaN in hidden tokens"}
    options |= {"chunk": CHUNK, "softcap": 4.0 if "NaN" in special else None}
    if special == "masked":
        options["label_smoothing"] = 0.1
    run = jax.jit(functools.partial(derived, options=options))
    want = jax.tree.map(np.asarray, run(operands))
    assert all(np.isfinite(a).all() for a in want[1].values())
    assert want[1]["w"].any()
    specs = specs_of(("d", None), None, "m")
    if special == "-inf":
        specs = specs_of((None, None), None, ("d", "m"))
    got = run({n: put(a, specs[n], AUTO) for n, a in operands.items()})
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = 1 if special != "offset" else 200  # the loss of a label is 20000
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_shard_map(kind, check_vma):
    """Each device has its own tokens and all of w, whose gradient JAX sums."""
    operands = operands_of()
    options = OPTIONS | {"reduction": "sum" if kind == "mean" else "none"}
    specs = specs_of(("d", None), None, None)

    def total(operands):
        y = results_of(operands, options)["loss"]
        return jnp.sum(jnp.where(jnp.isnan(y), 0, y))

    def grads(operands):
        values = {n: operands[n] for n in moving(operands)}
        found = jax.grad(lambda v: total(operands | v))(values)
        if check_vma:  # JAX has summed what is the same on all devices
            return found
        return found | {n: jax.lax.psum(found[n], "d") for n in ("w", "bias")}

    out = {n: specs[n] for n in moving(operands)}
    mapped = jax.shard_map(grads, mesh=AUTO, in_specs=(specs,), out_specs=out, check_vma=check_vma)
    program, got = hlo.run(mapped, operands)
    want = jax.jit(
        lambda operands: jax.grad(lambda v: total(operands | v))(
            {n: operands[n] for n in moving(operands)}
        )
    )(operands)
    assert_same(({}, got), ({}, want))
    assert {c.kind for c in hlo.collectives(program)} == {"all-reduce"}


# ---- the kernels of a chunk ----


@pytest.fixture
def kernels(monkeypatch):
    """The row programs that ran, as the emulator runs their kernels; one that cannot be a kernel is an error."""
    ran = row_emulator.launch_row_programs(monkeypatch, fallback=False)
    with jax.disable_jit():
        yield ran


FULL = {"smoothing": 0.2, "z_loss": 0.125, "softcap": 2.0}
NONE = {"smoothing": 0.0, "z_loss": 0.0, "softcap": None}
# What operands there are, options, the results of a call.
CALLS = {
    "forward": ({}, NONE, ("loss",)),
    "statistics": ({"where": "classes"}, NONE, ("loss", "log_prob", "entropy")),
    "gradients": ({}, NONE, ("loss", "dx", "dw")),
    "hidden tokens": ({"weights": "float"}, NONE, ("loss", "dx", "dw")),
    "everything": (
        {"weights": "float", "bias": "float32", "where": "full"},
        FULL,
        ("loss", "log_prob", "entropy", "dx", "dw", "dbias"),
    ),
}


def call_of(name, dtype, cts):
    """(operands by name, parameters, expected results by name)."""
    kinds, options, results = CALLS[name]
    operands = given((6,), dtype, **kinds)
    public = {n: v for n, v in options.items() if n != "smoothing"}
    public |= {"label_smoothing": options["smoothing"], "reduction": "sum"}
    values, grads, _ = expected(operands, cts, public)
    token, _, _ = expected(
        {n: v for n, v in operands.items() if n != "weights"}, {}, public | {"reduction": "none"}
    )
    wanted = values | {"loss": token["loss"]}
    wanted |= {f"d{n}": a for n, a in grads.items()}
    weights = operands.pop("weights", np.ones(6, "float32"))
    if any(r.startswith("d") for r in results):
        operands["c"] = weights * np.float32(cts["loss"])
        if name == "everything":
            operands |= {"g": cts["log_prob"], "h": cts["entropy"]}
    if "where" in operands:
        operands["where"] = operands["where"].reshape(-1, operands["where"].shape[-1])
    if "weights" in kinds:
        operands["seen"] = weights != 0
    names = tuple(n for n in primitives._ORDER if n in operands)
    params = options | {
        "class_axis": 1, "chunk": 4, "implementation": None,
    }  # fmt: skip
    params |= {"names": names, "results": results}
    return {n: operands[n] for n in names}, params, wanted


def check_results(found, params, wanted, dtype, seen):
    for name, a in zip(params["results"], found, strict=True):
        a, b = oracle.f64(a), wanted[name]
        if name == "loss":  # that of a hidden token may be anything
            a, b = a[seen], b[seen]
        assert np.any(b)
        unit = oracle.UNIT[dtype if name.startswith("d") else "float32"]
        np.testing.assert_allclose(a, b, rtol=64 * unit, atol=32 * unit, err_msg=name)


emulated = pytest.mark.skipif(
    not row_emulator.supported(), reason="kernels run on the CPU with g++ on Linux"
)
CTS = {
    "loss": np.float32(0.75),
    "log_prob": np.linspace(0.5, 1.5, 6, dtype=np.float32),
    "entropy": np.linspace(-1, 1, 6, dtype=np.float32),
}


def cotangents(name):
    return CTS if name == "everything" else {"loss": CTS["loss"]}


@emulated
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels(name, dtype, kernels):
    """One kernel for each chunk, from logits to results and the gradient."""
    operands, params, wanted = call_of(name, dtype, cotangents(name))
    found = formula(*map(jnp.asarray, operands.values()), **params)
    seen = operands.get("c", np.ones(6)) != 0
    check_results(found, params, wanted, dtype, seen)
    assert len(kernels) == 2


@emulated
@pytest.mark.parametrize("name", CALLS)
def test_kernels_of_parts(name, kernels):
    """Seven devices share 9 classes: the last two have none."""
    devices, dtype = 7, "float32"  # eager products of bfloat16 are not all implemented on CPUs
    operands, params, wanted = call_of(name, dtype, cotangents(name))
    shapes = {n: a.shape for n, a in operands.items()}
    tokens, classes = shapes["x"][0], shapes["w"][1]
    blocks = Blocks((tokens, classes), np.arange(devices).reshape(1, devices, 1))
    size = blocks.size(1)

    def cut(name, a):
        """Parts of the classes, with what is no number for padding."""
        if name not in ("w", "bias", "where"):
            return jnp.asarray(a), None
        fill = True if a.dtype == bool else np.nan
        padded = np.pad(
            a, [(0, 0)] * (a.ndim - 1) + [(0, size * devices - classes)], constant_values=fill
        )
        parts = padded.reshape(*a.shape[:-1], devices, size)
        return jnp.asarray(np.moveaxis(parts, -2, 0)), 0

    cuts = [cut(n, a) for n, a in operands.items()]

    def local(*operands):
        return primitives._local(*operands, blocks=blocks, shapes=shapes, **params)

    mapped = jax.vmap(local, [axis for _, axis in cuts], axis_name=DEVICES, axis_size=devices)
    found = []
    for result, a in zip(params["results"], mapped(*(a for a, _ in cuts)), strict=True):
        if result in ("dw", "dbias"):
            whole = np.moveaxis(np.asarray(a), 0, -2)
            found.append(whole.reshape(*whole.shape[:-2], -1)[..., :classes])
        else:  # all devices have it
            np.testing.assert_array_equal(a, np.broadcast_to(a[:1], a.shape))
            found.append(a[0])
    seen = operands.get("c", np.ones(6)) != 0
    check_results(found, params, wanted, dtype, seen)
    gradients = any(r.startswith("d") for r in params["results"])
    assert len(kernels) == 2 * (1 + gradients)
