"""Bad input: an exception at the call whose message says what to do; never an abort."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite import needs_cpu

import jaxnorm

X = jnp.ones((2, 3, 4), "float32")
# JAX adds lines of its own below the message when it leaves jit.
MESSAGE = r"(?m)^{op}: {argument} must .+, got .+\. [A-Z].+\.?$"


# Argument that the message names, exception, arguments of the call.
SOFTMAX_CASES = {
    "integer x": ("x", TypeError, {"x": jnp.ones((2, 3), int)}),
    "boolean x": ("x", TypeError, {"x": jnp.ones((2, 3), bool)}),
    "complex x": ("x", TypeError, {"x": jnp.ones((2, 3), complex)}),
    "8-bit x": ("x", TypeError, {"x": jnp.ones((2, 3), jnp.float8_e4m3fn)}),
    "list": ("x", TypeError, {"x": [1.0, 2.0]}),
    "string": ("x", TypeError, {"x": "abc"}),
    "None": ("x", TypeError, {"x": None}),
    "scalar": ("x", ValueError, {"x": jnp.float32(1)}),
    "axis too large": ("axis", ValueError, {"axis": 3}),
    "axis too small": ("axis", ValueError, {"axis": -4}),
    "axis in tuple": ("axis", ValueError, {"axis": (0, 5)}),
    "repeated axis": ("axis", ValueError, {"axis": (1, -2)}),
    "float axis": ("axis", TypeError, {"axis": 1.5}),
    "string axis": ("axis", TypeError, {"axis": "rows"}),
    "integer where": ("where", TypeError, {"where": jnp.ones((4,), int)}),
    "float where": ("where", TypeError, {"where": jnp.ones((4,), "float32")}),
    "where of other size": ("where", ValueError, {"where": jnp.ones((5,), bool)}),
    "where of higher rank": ("where", ValueError, {"where": jnp.ones((1, 2, 3, 4), bool)}),
    "where that enlarges": ("where", ValueError, {"x": X[:1], "where": jnp.ones((2, 3, 4), bool)}),
    "bias of other size": ("bias", ValueError, {"bias": jnp.ones((3,), "float32")}),
    "bias of higher rank": ("bias", ValueError, {"bias": jnp.ones((1, 2, 3, 4), "float32")}),
    "integer bias": ("bias", TypeError, {"bias": jnp.ones((4,), int)}),
    "scale of other size": ("scale", ValueError, {"scale": jnp.ones((2, 1), "float32")}),
    "integer scale": ("scale", TypeError, {"scale": jnp.ones((4,), int)}),
    "implementation": ("implementation", ValueError, {"implementation": "cuda"}),
    "boolean implementation": ("implementation", ValueError, {"implementation": True}),
}

RELU_CASES = {
    name: (argument, error, {"x": kw["x"]})
    for name, (argument, error, kw) in SOFTMAX_CASES.items()
    if argument == "x" and name != "scalar"
} | {
    "implementation": ("implementation", ValueError, {"x": X, "implementation": "cuda"}),
}
ADD_RELU_CASES = {
    "integer y": ("y", TypeError, {"y": jnp.ones((2, 3, 4), int)}),
    "list y": ("y", TypeError, {"y": [1.0]}),
    "y of other shape": ("y", ValueError, {"y": jnp.ones((3, 3), "float32")}),
}
NORM_CASES = {
    name: case for name, case in SOFTMAX_CASES.items() if case[0] in ("x", "axis", "implementation")
} | {
    "no axes": ("axis", ValueError, {"axis": ()}),
    "array epsilon": ("epsilon", TypeError, {"epsilon": jnp.float32(1)}),
    "string epsilon": ("epsilon", TypeError, {"epsilon": "small"}),
    "integer scale": ("scale", TypeError, {"scale": jnp.ones((4,), int)}),
    "scale of other size": ("scale", ValueError, {"scale": jnp.ones((3,), "float32")}),
    "scale of x's shape": ("scale", ValueError, {"scale": X}),
    "scalar scale": ("scale", ValueError, {"scale": 1.0}),
    "scale of one axis": ("scale", ValueError, {"scale": X[0, 0], "axis": (1, 2)}),
    "integer residual": ("residual", TypeError, {"residual": jnp.ones((2, 3, 4), int)}),
    "residual of other dtype": ("residual", TypeError, {"residual": X.astype("bfloat16")}),
    "residual that broadcasts": ("residual", ValueError, {"residual": X[:1]}),
    "integer mask": ("mask", TypeError, {"mask": jnp.ones((4,), int)}),
    "mask of other size": ("mask", ValueError, {"mask": jnp.ones((5,), bool)}),
    "mask that enlarges": ("mask", ValueError, {"x": X[:1], "mask": jnp.ones((2, 3, 4), bool)}),
}
LAYER_NORM_CASES = NORM_CASES | {
    "integer bias": ("bias", TypeError, {"bias": jnp.ones((4,), int)}),
    "bias of other size": ("bias", ValueError, {"bias": jnp.ones((3,), "float32")}),
}
RMS_NORM_CASES = NORM_CASES | {
    "array scale_offset": ("scale_offset", TypeError, {"scale_offset": jnp.float32(1)}),
}
BATCH_NORM_CASES = {
    name: case
    for name, case in LAYER_NORM_CASES.items()
    if case[0] not in ("scale", "bias") or "integer" in name
} | {
    "axis None": ("axis", TypeError, {"axis": None}),
    "scale of other size": ("scale", ValueError, {"scale": jnp.ones((3,), "float32")}),
    "scale of one axis": ("scale", ValueError, {"scale": X[0, 0], "axis": (1, 2)}),
    "bias of other size": ("bias", ValueError, {"bias": jnp.ones((3,), "float32")}),
    "activation": ("activation", ValueError, {"activation": "gelu"}),
    "function as activation": ("activation", ValueError, {"activation": jax.nn.relu}),
    "unbound axis_name": ("axis_name", ValueError, {"axis_name": "devices"}),
    "groups without axis_name": ("axis_index_groups", ValueError, {"axis_index_groups": [[0]]}),
}
INFERENCE_CASES = {
    name: case
    for name, case in BATCH_NORM_CASES.items()
    if case[0] not in ("mask", "axis_name", "axis_index_groups")
} | {
    "integer mean": ("mean", TypeError, {"mean": jnp.ones((4,), int)}),
    "mean of other size": ("mean", ValueError, {"mean": jnp.ones((3,), "float32")}),
    "no var": ("var", TypeError, {"var": None}),
    "var of other size": ("var", ValueError, {"var": jnp.ones((1, 4), "float32")}),
}
CROSS_ENTROPY_CASES = {
    name: ("logits" if case[0] == "x" else case[0], *case[1:])
    for name, case in SOFTMAX_CASES.items()
    if case[0] in ("x", "where", "implementation") or name in ("axis too large", "string axis")
} | {
    "axis None": ("axis", TypeError, {"axis": None}),
    "no axes": ("axis", TypeError, {"axis": ()}),
    "float labels": ("labels", TypeError, {"labels": jnp.ones((2, 3), "float32")}),
    "boolean labels": ("labels", TypeError, {"labels": jnp.ones((2, 3), bool)}),
    "no labels": ("labels", TypeError, {"labels": None}),
    "labels of logits' shape": ("labels", ValueError, {"labels": jnp.ones((2, 3, 4), int)}),
    "labels that broadcast": ("labels", ValueError, {"labels": jnp.ones((2, 1), int)}),
    "labels along another axis": ("labels", ValueError, {"axis": 0}),
    "array label_smoothing": ("label_smoothing", TypeError, {"label_smoothing": jnp.float32(0)}),
    "label_smoothing too large": ("label_smoothing", ValueError, {"label_smoothing": 1.5}),
    "negative label_smoothing": ("label_smoothing", ValueError, {"label_smoothing": -0.1}),
    "string z_loss": ("z_loss", TypeError, {"z_loss": "small"}),
}
CASES = [
    *(
        (op, name, case)
        for op in ("softmax", "log_softmax")
        for name, case in SOFTMAX_CASES.items()
    ),
    *(("relu", name, case) for name, case in RELU_CASES.items()),
    *(("add_relu", name, case) for name, case in ADD_RELU_CASES.items()),
    *(("layer_norm", name, case) for name, case in LAYER_NORM_CASES.items()),
    *(("rms_norm", name, case) for name, case in RMS_NORM_CASES.items()),
    *(("batch_norm", name, case) for name, case in BATCH_NORM_CASES.items()),
    *(("batch_norm_inference", name, case) for name, case in INFERENCE_CASES.items()),
    *(("softmax_cross_entropy", name, case) for name, case in CROSS_ENTROPY_CASES.items()),
]
cases = pytest.mark.parametrize(
    ("op", "case"), [pytest.param(op, case, id=f"{op}-{name}") for op, name, case in CASES]
)


def call(op, kw, x=None):
    kw = dict(kw)
    given = kw.pop("x", X)
    if x is not None:
        given = x
    args = (kw.pop("y"),) if "y" in kw else ()
    if op == "batch_norm_inference":
        kw = {"mean": X[0, 0], "var": X[0, 0]} | kw
    if op == "softmax_cross_entropy":
        labels = np.zeros(np.shape(given)[:-1] if isinstance(given, jax.Array) else (), int)
        kw = {"labels": labels} | kw
    return getattr(jaxnorm, op)(given, *args, **kw)


def expect(op, argument, error):
    return pytest.raises(error, match=MESSAGE.format(op=op, argument=argument))


@cases
def test_message(op, case):
    argument, error, kw = case
    with expect(op, argument, error) as info:
        call(op, kw)
    assert type(info.value) is error
    assert "\n" not in str(info.value)


@cases
def test_message_under_jit_and_vmap(op, case):
    """At the call too, when it is traced."""
    argument, error, kw = case
    x = kw.get("x", X)
    if not isinstance(x, jax.Array):
        with expect(op, argument, error):
            jax.jit(lambda z: call(op, kw) * z)(1.0)
        return
    with expect(op, argument, error):
        jax.jit(lambda x: call(op, kw, x))(x)
    with expect(op, argument, error):
        jax.vmap(lambda x: call(op, kw, x))(x[None])


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_traced_operands(op):
    """The mask and the bias are arguments of the jitted function."""
    f = getattr(jaxnorm, op)
    with expect(op, "where", TypeError):
        jax.jit(lambda x, w: f(x, where=w))(X, jnp.ones((4,), int))
    with expect(op, "where", ValueError):
        jax.vmap(lambda x, w: f(x, where=w))(X, jnp.ones((2, 5), bool))
    with expect(op, "bias", ValueError):
        jax.jit(lambda x, b: f(x, bias=b))(X, jnp.ones((5,), "float32"))


@pytest.mark.parametrize(
    ("groups", "error"),
    [([[0, 1], [2]], "one length"), ([[0, 1]], "index"), ([[0, 1], [1, 2]], "index")],
)
def test_axis_index_groups(groups, error):
    """Uneven, incomplete and overlapping groups."""
    f = lambda x: jaxnorm.batch_norm(x, axis_name="i", axis_index_groups=groups)  # noqa: E731
    with expect("batch_norm", "axis_index_groups", ValueError) as info:
        jax.vmap(f, axis_name="i")(jnp.ones((4, 2, 3)))
    assert error in str(info.value)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm", "rms_norm", "batch_norm"])
def test_vmap_to_a_scalar(op):
    """What is left under vmap is a scalar: the message speaks of what the mapped function sees."""
    with expect(op, "x", ValueError):
        jax.vmap(getattr(jaxnorm, op))(jnp.ones(3, "float32"))


every_op = pytest.mark.parametrize(
    "op",
    [
        *("softmax", "log_softmax", "relu", "add_relu", "layer_norm", "rms_norm"),
        *("batch_norm", "batch_norm_inference", "softmax_cross_entropy"),
    ],
)


def kernel_call(op):
    """(function of arrays that returns one, arguments)."""
    function = getattr(jaxnorm, op)
    if op == "batch_norm":
        return (lambda x, **kw: function(x, activation="relu", **kw)[0]), (X,)
    if op == "batch_norm_inference":
        return (lambda x, **kw: function(x, X[0, 0], X[0, 0], **kw)), (X,)
    if op == "softmax_cross_entropy":
        return (lambda x, **kw: function(x, np.zeros(x.shape[:-1], int), **kw)), (X,)
    return function, (X, X) if op == "add_relu" else (X,)


@every_op
def test_kernel_where_there_is_none(op):
    """Lowered for a platform without kernels, implementation="kernel" is refused by name."""
    function, args = kernel_call(op)

    def f(*args):
        return function(*args, implementation="kernel")

    with pytest.raises(
        ValueError, match=r"\w+: implementation must be .*tpu.*, got 'kernel'\. Use .+"
    ):
        jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",))
    with pytest.raises(ValueError, match=r"\w+: implementation must be .*tpu"):
        jax.jit(jax.grad(lambda *a: jnp.sum(f(*a)))).trace(*args).lower(lowering_platforms=("tpu",))


@every_op
def test_kernel_message_names_the_operation(op):
    function, args = kernel_call(op)
    with pytest.raises(ValueError, match=rf"^{op}: implementation must"):
        jax.jit(lambda *a: function(*a, implementation="kernel")).trace(*args).lower(
            lowering_platforms=("tpu",)
        )


def test_keyword_only():
    with pytest.raises(TypeError):
        jaxnorm.softmax(X, -1, None, 2.0)
    with pytest.raises(TypeError):
        jaxnorm.relu(X, "xla")


# ---- direct calls of the targets: a malformed one is an error, not a crash ----

F32, U8 = np.float32, np.uint8
S = jax.ShapeDtypeStruct
FWD = {"axis": np.int64(1), "factor": np.float64(1), "log": False, "operands": np.int64(0)}
BWD = {"axis": np.int64(1), "factor": np.float64(1), "form": np.int64(0)}


def ones(*shape, dtype=F32):
    return jnp.ones(shape, dtype)


# (2, 3) normalised over its last axis; results are y, mean and rstd.
NORM_RESULTS = (S((2, 3), F32), S((2, 1), F32), S((2, 1), F32))
NORM_FWD = {
    "axis": np.int64(1),
    "groups": np.int64(0),
    "center": True,
    "epsilon": np.float64(1e-6),
    "scale_offset": np.float64(0),
    "operands": np.int64(0),
}
# Operands s, dy, mean, rstd; results dx, dscale and dbias.
NORM_BWD = {name: value for name, value in NORM_FWD.items() if name != "epsilon"} | {
    "need": np.int64(25)
}
NORM_BWD_RESULTS = (S((2, 3), F32), S((1, 3), F32), S((1, 3), F32))


def norm_bwd_operands():
    return [ones(2, 3), ones(2, 3), ones(2, 1), ones(2, 1)]


def norm_fwd(*operands, results=NORM_RESULTS, **changes):
    return ("norm_fwd", results, [ones(2, 3), *operands], NORM_FWD | changes)


def norm_bwd(*operands, results=NORM_BWD_RESULTS, **changes):
    return ("norm_bwd", results, [*norm_bwd_operands(), *operands], NORM_BWD | changes)


# (6, 4, 5), features in the middle; bits as in ffi/cpu/batch_norm_call.h.
BN = dict(zip(("groups", "axis", "end"), map(np.int64, (0, 1, 2)), strict=True))
BN_NAMES = (
    *("x", "dy", "y", "bits", "mask", "mean", "var", "count", "scale", "bias", "residual"),
    *("dbias", "dscale", "dmean", "dvar", "dx", "dresidual"),
)
BN_STRUCTS = (
    dict.fromkeys(BN_NAMES, S((1, 4, 1), F32))
    | dict.fromkeys(("x", "dy", "y", "residual", "dx", "dresidual"), S((6, 4, 5), F32))
    | {"bits": S((6, 4, 1), U8), "mask": S((6, 4, 5), bool)}
)
BN_EXTRA = {
    "stats": {},
    "fwd": {"epsilon": np.float64(1e-5), "relu": True},
    "sums": {"epsilon": np.float64(1e-5)},
    "dx": {"epsilon": np.float64(1e-5), "replicas": np.int64(1)},
}


def bn(part, operands, results, changes=None, **shapes):
    """A call of batch_norm_<part> with operands and results by name; shapes replaces those of some."""
    operands, results = (sorted(n.split(), key=BN_NAMES.index) for n in (operands, results))
    structs = BN_STRUCTS | shapes
    bits = [np.int64(sum(1 << BN_NAMES.index(n) for n in names)) for names in (operands, results)]
    attributes = BN | BN_EXTRA[part] | {"operands": bits[0], "results": bits[1]} | (changes or {})
    args = [jnp.ones(structs[n].shape, structs[n].dtype) for n in operands]
    return f"batch_norm_{part}", tuple(structs[n] for n in results), args, attributes


BN_DX = "x dy bits mean var dbias dscale"
GOOD_BATCH_NORM_CALLS = {
    "stats": bn("stats", "x mask", "mean var count"),
    "fwd": bn("fwd", "x mean var scale bias residual", "y bits"),
    "sums": bn("sums", "x dy bits mean var", "dbias dscale"),
    "dx": bn("dx", BN_DX, "dx dresidual"),
}


# Three rows of four classes.
CE = {"x": S((3, 4), F32), "where": S((3, 4), bool), "dx": S((3, 4), F32)} | {
    name: S((3, 1), F32) for name in ("lse", "a", "b", "nll")
}
CE["labels"] = S((3, 1), np.int32)


def cross_entropy(part, operands="", axis=1, **shapes):
    """A CPU's call of cross_entropy_<part> with further operands by name; shapes replaces those of some."""
    structs = CE | shapes
    names = {"fwd": "x labels", "bwd": "x lse labels a b"}[part].split() + operands.split()
    results = {"fwd": "nll lse", "bwd": "dx"}[part].split()
    args = [jnp.ones(structs[n].shape, structs[n].dtype) for n in names]
    attributes = {"axis": np.int64(axis), "smoothing": np.float64(0.1)}
    return f"cross_entropy_{part}", tuple(structs[n] for n in results), args, attributes


BAD_CALLS = {
    "cross_entropy: integer logits": cross_entropy("fwd", x=S((3, 4), np.int32)),
    "cross_entropy: scalars": cross_entropy("fwd", **dict.fromkeys(CE, S((), F32))),
    "cross_entropy: axis of the rows": cross_entropy("fwd", axis=0),
    "cross_entropy: axis beyond the end": cross_entropy("fwd", axis=2),
    "cross_entropy: negative axis": cross_entropy("bwd", axis=-1),
    "cross_entropy: 64-bit labels": cross_entropy("fwd", labels=S((3, 1), np.int64)),
    "cross_entropy: labels of other rank": cross_entropy("fwd", labels=S((3,), np.int32)),
    "cross_entropy: labels of all classes": cross_entropy("fwd", labels=S((3, 4), np.int32)),
    "cross_entropy: labels too short": cross_entropy("fwd", labels=S((2, 1), np.int32)),
    "cross_entropy: nll of all classes": cross_entropy("fwd", nll=S((3, 4), F32), lse=CE["x"]),
    "cross_entropy: nll too short": cross_entropy("fwd", nll=S((2, 1), F32), lse=S((2, 1), F32)),
    "cross_entropy: nll of other dtype": cross_entropy("fwd", nll=S((3, 1), np.float16)),
    "cross_entropy: lse of other shape": cross_entropy("fwd", lse=S((2, 1), F32)),
    "cross_entropy: where is float": cross_entropy("fwd", "where", where=S((3, 4), F32)),
    "cross_entropy: where too large": cross_entropy("fwd", "where", where=S((3, 5), bool)),
    "cross_entropy: operand too many": cross_entropy("fwd", "where where"),
    "cross_entropy: dx of other shape": cross_entropy("bwd", dx=S((3, 5), F32)),
    "cross_entropy: dx of other dtype": cross_entropy("bwd", dx=S((3, 4), np.float16)),
    "cross_entropy: a of all classes": cross_entropy("bwd", a=S((3, 4), F32)),
    "cross_entropy: b too short": cross_entropy("bwd", b=S((2, 1), F32)),
    "cross_entropy: lse of another dtype": cross_entropy("bwd", lse=S((3, 1), np.float64)),
    "cross_entropy: bwd where of other rank": cross_entropy("bwd", "where", where=S((4,), bool)),
    "batch_norm: axis beyond the end": bn("stats", "x", "mean var", {"axis": np.int64(2)}),
    "batch_norm: end beyond the rank": bn("stats", "x", "mean var", {"end": np.int64(4)}),
    "batch_norm: negative groups": bn("stats", "x", "mean var", {"groups": np.int64(-1)}),
    "batch_norm: groups beyond the axis": bn("stats", "x", "mean var", {"groups": np.int64(2)}),
    "batch_norm: unknown operand": bn("stats", "x", "mean var", {"operands": np.int64(1 << 20)}),
    "batch_norm: negative operands": bn("stats", "x", "mean var", {"operands": np.int64(-1)}),
    "batch_norm: operand missing": bn("stats", "x", "mean var", {"operands": np.int64(1 + 16)}),
    "batch_norm: operand too many": bn("stats", "x mask", "mean var", {"operands": np.int64(1)}),
    "batch_norm: result missing": bn("stats", "x", "mean", {"results": np.int64(32 + 64)}),
    "batch_norm: count without a mask": bn("stats", "x", "mean var count"),
    "batch_norm: statistics too short": bn("stats", "x", "mean var", mean=S((1, 3, 1), F32)),
    "batch_norm: statistics of rows": bn("stats", "x", "mean var", mean=S((6, 4, 1), F32)),
    "batch_norm: statistics of other dtype": bn("stats", "x", "mean var", var=S((1, 4, 1), U8)),
    "batch_norm: integers": bn("stats", "x", "mean var", x=S((6, 4, 5), np.int32)),
    "batch_norm: mask is float": bn("stats", "x mask", "mean var", mask=S((6, 4, 5), F32)),
    "batch_norm: mask too large": bn("stats", "x mask", "mean var", mask=S((7, 4, 5), bool)),
    "batch_norm: mask of other rank": bn("stats", "x mask", "mean var", mask=S((4, 5), bool)),
    "batch_norm: y of other shape": bn("fwd", "x mean var", "y", y=S((6, 4, 6), F32)),
    "batch_norm: y of other dtype": bn("fwd", "x mean var", "y", y=S((6, 4, 5), np.float16)),
    "batch_norm: no variance": bn("fwd", "x mean", "y"),
    "batch_norm: bits without a ReLU": bn("fwd", "x mean var", "y bits", {"relu": False}),
    "batch_norm: bits too short": bn("fwd", "x mean var", "y bits", bits=S((6, 4, 0), U8)),
    "batch_norm: scale too long": bn("fwd", "x mean var scale", "y", scale=S((1, 5, 1), F32)),
    "batch_norm: residual that broadcasts": bn(
        "fwd", "x mean var residual", "y", residual=S((1, 4, 5), F32)
    ),
    "batch_norm: sums without x": bn("sums", "dy", "dscale"),
    "batch_norm: sums of other results": bn("sums", "x dy mean var", "dx"),
    "batch_norm: dx without a variance": bn("dx", "dy", "dx"),
    "batch_norm: one sum": bn("dx", "x dy mean var dbias", "dx"),
    "batch_norm: mask without a count": bn("dx", f"{BN_DX} mask", "dx"),
    "batch_norm: sums without x in dx": bn("dx", "dy var dbias dscale", "dx"),
    "batch_norm: no replicas": bn("dx", BN_DX, "dx", {"replicas": np.int64(0)}),
    "batch_norm: dy of other shape": bn("dx", BN_DX, "dx", dy=S((6, 4, 4), F32)),
    "norm fwd: negative axis": norm_fwd(axis=np.int64(-1)),
    "norm fwd: axis too large": norm_fwd(axis=np.int64(2)),
    "norm fwd: groups beyond the axis": norm_fwd(groups=np.int64(2)),
    "norm fwd: negative groups": norm_fwd(groups=np.int64(-1)),
    "norm fwd: integers": (
        "norm_fwd",
        (S((2, 3), np.int32), *NORM_RESULTS[1:]),
        [ones(2, 3, dtype=np.int32)],
        NORM_FWD,
    ),
    "norm fwd: result missing": norm_fwd(results=NORM_RESULTS[:2]),
    "norm fwd: no statistics": norm_fwd(results=NORM_RESULTS[:1]),
    "norm fwd: statistics too short": norm_fwd(results=(*NORM_RESULTS[:2], S((1, 1), F32))),
    "norm fwd: statistics of other dtype": norm_fwd(
        results=(*NORM_RESULTS[:2], S((2, 1), np.float16))
    ),
    "norm fwd: operand missing": norm_fwd(operands=np.int64(8)),
    "norm fwd: operand too many": norm_fwd(ones(1, 3)),
    "norm fwd: scale of rows": norm_fwd(ones(2, 3), operands=np.int64(8)),
    "norm fwd: scale of other size": norm_fwd(ones(1, 4), operands=np.int64(8)),
    "norm fwd: scale of other rank": norm_fwd(ones(3), operands=np.int64(8)),
    "norm fwd: scale of other dtype": norm_fwd(ones(1, 3, dtype=np.float16), operands=np.int64(8)),
    "norm fwd: scale and bias differ": (
        "norm_fwd",
        (S((2, 3), np.float16), *NORM_RESULTS[1:]),
        [ones(2, 3, dtype=np.float16), ones(1, 3, dtype=np.float16), ones(1, 3)],
        NORM_FWD | {"operands": np.int64(24)},
    ),
    "norm fwd: mask is float": norm_fwd(ones(2, 3), operands=np.int64(4)),
    "norm fwd: mask too large": norm_fwd(ones(4, 3, dtype=bool), operands=np.int64(4)),
    "norm fwd: residual without a result": norm_fwd(ones(2, 3), operands=np.int64(2)),
    "norm fwd: residual of other dtype": norm_fwd(
        ones(2, 3, dtype=np.float16),
        operands=np.int64(2),
        results=(NORM_RESULTS[0], *NORM_RESULTS),
    ),
    "norm bwd: nothing needed": norm_bwd(need=np.int64(0)),
    "norm bwd: result missing": norm_bwd(results=NORM_BWD_RESULTS[:2]),
    "norm bwd: gradient too short": norm_bwd(results=(*NORM_BWD_RESULTS[:2], S((1, 2), F32))),
    "norm bwd: dx of other shape": norm_bwd(results=(S((2, 4), F32), *NORM_BWD_RESULTS[1:])),
    "norm bwd: operand missing": norm_bwd(operands=np.int64(2)),
    "norm bwd: operand too many": norm_bwd(ones(2, 3)),
    "norm bwd: gradients of two dtypes": (
        "norm_bwd",
        (S((2, 3), np.float16), S((1, 3), np.float16), S((1, 3), F32)),
        [*(ones(2, 3, dtype=np.float16) for _ in range(2)), ones(2, 1), ones(2, 1)],
        NORM_BWD,
    ),
    "norm bwd: statistics missing": (
        "norm_bwd",
        NORM_BWD_RESULTS,
        norm_bwd_operands()[:3],
        NORM_BWD,
    ),
    "norm bwd: shapes differ": (
        "norm_bwd",
        NORM_BWD_RESULTS,
        [ones(2, 3), ones(2, 4), ones(2, 1), ones(2, 1)],
        NORM_BWD,
    ),
    "fwd: negative axis": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3)],
        FWD | {"axis": np.int64(-1)},
    ),
    "fwd: axis too large": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3)],
        FWD | {"axis": np.int64(2)},
    ),
    "fwd: rank 0": ("softmax_fwd", S((), F32), [ones()], FWD | {"axis": np.int64(0)}),
    "fwd: result of other shape": ("softmax_fwd", S((2, 4), F32), [ones(2, 3)], FWD),
    "fwd: result of other rank": ("softmax_fwd", S((6,), F32), [ones(2, 3)], FWD),
    "fwd: result of other dtype": ("softmax_fwd", S((2, 3), np.float64), [ones(2, 3)], FWD),
    "fwd: integers": ("softmax_fwd", S((2, 3), np.int32), [ones(2, 3, dtype=np.int32)], FWD),
    "fwd: operand missing": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3)],
        FWD | {"operands": np.int64(1)},
    ),
    "fwd: operand too many": ("softmax_fwd", S((2, 3), F32), [ones(2, 3)] * 2, FWD),
    "fwd: unknown operand bit": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3)] * 2,
        FWD | {"operands": np.int64(8)},
    ),
    "fwd: where is float": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3)] * 2,
        FWD | {"operands": np.int64(1)},
    ),
    "fwd: bias too large": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3), ones(4, 3)],
        FWD | {"operands": np.int64(4)},
    ),
    "fwd: bias of other dtype": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3), ones(2, 3, dtype=np.float16)],
        FWD | {"operands": np.int64(4)},
    ),
    "fwd: attribute missing": ("softmax_fwd", S((2, 3), F32), [ones(2, 3)], {"axis": np.int64(1)}),
    "fwd: attribute of other type": (
        "softmax_fwd",
        S((2, 3), F32),
        [ones(2, 3)],
        FWD | {"axis": np.int32(1)},
    ),
    "fwd: no operands": ("softmax_fwd", S((2, 3), F32), [], FWD),
    "bwd: form": ("softmax_bwd", S((2, 3), F32), [ones(2, 3)] * 2, BWD | {"form": np.int64(3)}),
    "bwd: negative form": (
        "softmax_bwd",
        S((2, 3), F32),
        [ones(2, 3)] * 2,
        BWD | {"form": np.int64(-1)},
    ),
    "bwd: shapes differ": ("softmax_bwd", S((2, 3), F32), [ones(2, 3), ones(2, 4)], BWD),
    "bwd: dtypes differ": (
        "softmax_bwd",
        S((2, 3), F32),
        [ones(2, 3), ones(2, 3, dtype=np.float16)],
        BWD,
    ),
    "bwd: where is float": ("softmax_bwd", S((2, 3), F32), [ones(2, 3)] * 3, BWD),
    "bwd: operand too many": ("softmax_bwd", S((2, 3), F32), [ones(2, 3)] * 4, BWD),
    "relu fwd: mask too short": ("relu_fwd", (S((2, 9), F32), S((2, 1), U8)), [ones(2, 9)], {}),
    "relu fwd: mask of other dtype": (
        "relu_fwd",
        (S((2, 9), F32), S((2, 2), np.int8)),
        [ones(2, 9)],
        {},
    ),
    "relu fwd: mask with fewer rows": (
        "relu_fwd",
        (S((2, 9), F32), S((1, 2), U8)),
        [ones(2, 9)],
        {},
    ),
    "relu fwd: shapes differ": ("relu_fwd", (S((2, 8), F32), S((2, 2), U8)), [ones(2, 9)], {}),
    "relu fwd: addends differ": (
        "relu_fwd",
        (S((2, 9), F32), S((2, 2), U8)),
        [ones(2, 9), ones(9)],
        {},
    ),
    "relu fwd: rank 0": ("relu_fwd", (S((), F32), S((), U8)), [ones()], {}),
    "relu fwd: integers": (
        "relu_fwd",
        (S((2, 9), np.int32), S((2, 2), U8)),
        [ones(2, 9, dtype=np.int32)],
        {},
    ),
    "relu fwd: no mask": ("relu_fwd", (S((2, 9), F32),), [ones(2, 9)], {}),
    "relu bwd: mask too short": (
        "relu_bwd",
        S((2, 9), F32),
        [ones(2, 1, dtype=U8), ones(2, 9)],
        {},
    ),
    "relu bwd: mask of other dtype": ("relu_bwd", S((2, 9), F32), [ones(2, 2), ones(2, 9)], {}),
    "relu bwd: shapes differ": ("relu_bwd", S((3, 9), F32), [ones(2, 2, dtype=U8), ones(2, 9)], {}),
    "relu bwd: dtypes differ": (
        "relu_bwd",
        S((2, 9), np.float16),
        [ones(2, 2, dtype=U8), ones(2, 9)],
        {},
    ),
}


@needs_cpu
@pytest.mark.parametrize("case", BAD_CALLS)
def test_malformed_target_call(case):
    target, results, args, attributes = BAD_CALLS[case]
    with pytest.raises(
        Exception, match=r"(?i)jaxnorm|argument|operand|attribute|buffer|decod|dtype"
    ) as info:
        jax.block_until_ready(jax.ffi.ffi_call(f"jaxnorm_{target}", results)(*args, **attributes))
    assert isinstance(info.value, (jax.errors.JaxRuntimeError, ValueError, TypeError))


@pytest.fixture
def on_cpu():
    """The CUDA targets of the same names take scratch memory, too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@needs_cpu
@pytest.mark.usefixtures("on_cpu")
def test_check_names_the_expression():
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=re.escape("jaxnorm: ") + r".*check failed: .+"
    ):
        jax.ffi.ffi_call("jaxnorm_softmax_fwd", S((2, 3), F32))(
            ones(2, 3), **FWD | {"axis": np.int64(7)}
        )


@needs_cpu
@pytest.mark.usefixtures("on_cpu")
def test_good_direct_call():
    """The calls above fail for the reason that they are meant to."""
    y = jax.ffi.ffi_call("jaxnorm_softmax_fwd", S((2, 4), F32))(ones(2, 4), **FWD)
    np.testing.assert_array_equal(y, 0.25)
    t = jax.ffi.ffi_call("jaxnorm_softmax_bwd", S((2, 4), F32))(y, y, **BWD)
    np.testing.assert_array_equal(t, 0)
    y, mask = jax.ffi.ffi_call("jaxnorm_relu_fwd", (S((2, 9), F32), S((2, 2), U8)))(ones(2, 9))
    np.testing.assert_array_equal(mask, [[255, 1]] * 2)
    bar = jax.ffi.ffi_call("jaxnorm_relu_bwd", S((2, 9), F32))(mask, y)
    np.testing.assert_array_equal(bar, 1)
    y, mean, _ = jax.ffi.ffi_call("jaxnorm_norm_fwd", NORM_RESULTS)(ones(2, 3), **NORM_FWD)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(mean, 1)
    _, _, dbias = jax.ffi.ffi_call("jaxnorm_norm_bwd", NORM_BWD_RESULTS)(
        *norm_bwd_operands(), **NORM_BWD
    )
    np.testing.assert_array_equal(dbias, 2)
    cross_entropies = [cross_entropy(part, "where") for part in ("fwd", "bwd")]
    for target, results, args, attributes in [*GOOD_BATCH_NORM_CALLS.values(), *cross_entropies]:
        for value in jax.ffi.ffi_call(f"jaxnorm_{target}", results)(*args, **attributes):
            assert np.isfinite(value).all()


@needs_cpu
@pytest.mark.usefixtures("on_cpu")
def test_sizes_that_overflow():
    """In an empty array, the groups times the columns are 1 in 64 bits: the size of the gradient."""
    x = ones(274177, 0, 67280421310721)
    attributes = NORM_BWD | {"axis": np.int64(2), "groups": np.int64(1), "need": np.int64(8)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="check failed: .*size"):
        jax.ffi.ffi_call("jaxnorm_norm_bwd", (S((1,), F32),))(
            x, x, ones(1, 1, 1), ones(1, 1, 1), **attributes
        )


EMPTY_CALLS = {
    "cross_entropy: no classes": cross_entropy("bwd", x=S((3, 0), F32), dx=S((3, 0), F32)),
    "norm: no groups": (
        "norm_bwd",
        (S((0, 1, 1 << 22), F32),) * 2,
        [*(ones(0, 2, 1 << 22) for _ in range(2)), ones(0, 2, 1), ones(0, 2, 1)],
        NORM_BWD | {"axis": np.int64(2), "groups": np.int64(1), "need": np.int64(24)},
    ),
}


@needs_cpu
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", EMPTY_CALLS)
def test_empty_direct_call(case):
    """XLA drops a call whose results are empty, unless it has side effects."""
    target, results, args, attributes = EMPTY_CALLS[case]
    call = jax.ffi.ffi_call(f"jaxnorm_{target}", results, has_side_effect=True)
    for result in jax.tree.leaves(call(*args, **attributes)):
        assert result.size == 0
