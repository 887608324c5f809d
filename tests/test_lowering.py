"""What is lowered for each platform, without a device of that kind."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
from suite import OPS, needs_cpu, needs_cuda

import jaxnorm

ops = pytest.mark.parametrize("op", OPS)
# Calls that take the place of two, on GPUs (test_merge.py).
MERGED = {
    "jaxnorm_batch_norm_train": ("jaxnorm_batch_norm_stats", "jaxnorm_batch_norm_fwd"),
    "jaxnorm_batch_norm_bwd": ("jaxnorm_batch_norm_sums", "jaxnorm_batch_norm_dx"),
}


def lowered(function, *args, platform):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def calls(text):
    """(target, backend_config, the rest of the line) of each custom call."""
    found = []
    for line in text.splitlines():
        match = re.search(r"custom_call @(\w+)\(", line)
        if match:
            config = re.search(r"mhlo.backend_config = \{(.*?)\}", line)
            attributes = dict(re.findall(r"(\w+) = ([^,}]+)", config.group(1))) if config else {}
            target = match.group(1)
            if target == "jaxnorm_launch":
                target = "jaxnorm_" + attributes["operation"].strip('"')
            found.append((target, attributes, line))
    return found


def value_and_grad(op):
    f = OPS[op].function
    return lambda *args: (f(*args), jax.grad(lambda *a: jnp.sum(f(*a) ** 2))(*args))


@ops
@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=needs_cpu), pytest.param("cuda", marks=needs_cuda)]
)
def test_gradient_calls_the_kernels(op, platform):
    spec = OPS[op]
    text = lowered(value_and_grad(op), *spec.arguments("float32"), platform=platform)
    targets = {part for target, _, _ in calls(text) for part in MERGED.get(target, (target,))}
    expected = {*spec.forward, *spec.backward_of(0)}
    if op == "softmax_cross_entropyaxis" and platform == "cpu":
        expected = set()  # there are CPU kernels along the last axis only
    assert targets == expected


@ops
@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_no_custom_call_elsewhere(op, platform):
    text = lowered(value_and_grad(op), *OPS[op].arguments("float32"), platform=platform)
    assert calls(text) == []


@needs_cpu
def test_attributes():
    """Names, types and values of the attributes are the ABI that exported programs rely on."""
    x, where, bias = (
        jnp.ones((2, 3, 4), "float32"),
        jnp.ones((3, 1), bool),
        jnp.ones((4,), "float32"),
    )

    def f(x):
        return jaxnorm.softmax(x, axis=1, where=where, bias=bias, scale=0.5)

    ((target, attributes, _),) = calls(lowered(f, x, platform="cpu"))
    assert target == "jaxnorm_softmax_fwd"
    assert attributes == {
        "axis": "1 : i64",
        "factor": "5.000000e-01 : f64",
        "log": "false",
        "operands": "5 : i64",
    }
    for function, form in ((jaxnorm.softmax, 0), (jaxnorm.log_softmax, 2)):

        def g(x, function=function):
            return jax.grad(lambda x: jnp.sum(function(x)))(x)

        found = calls(lowered(g, x, platform="cpu"))
        assert [t for t, _, _ in found] == ["jaxnorm_softmax_fwd", "jaxnorm_softmax_bwd"]
        assert found[0][1]["operands"] == "0 : i64"
        assert found[1][1] == {
            "axis": "2 : i64",
            "factor": "1.000000e+00 : f64",
            "form": f"{form} : i64",
        }


@needs_cpu
def test_norm_attributes():
    x, scale, mask = jnp.ones((2, 3, 4), "float32"), jnp.ones((3, 4)), jnp.ones((3, 4), bool)

    def f(x, scale):
        call = partial(jaxnorm.rms_norm, axis=(1, 2), scale_offset=0.5, mask=mask, epsilon=0.25)
        return jax.grad(lambda *a: jnp.sum(call(*a)), (0, 1))(x, scale)

    forward, backward = calls(lowered(f, x, scale.astype("float32"), platform="cpu"))
    shared = {
        "axis": "1 : i64",
        "groups": "0 : i64",
        "center": "false",
        "scale_offset": "5.000000e-01 : f64",
        "operands": "12 : i64",
    }
    assert forward[:2] == ("jaxnorm_norm_fwd", {**shared, "epsilon": "2.500000e-01 : f64"})
    assert backward[:2] == ("jaxnorm_norm_bwd", {**shared, "need": "9 : i64"})


@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=needs_cpu), pytest.param("cuda", marks=needs_cuda)]
)
def test_cross_entropy_attributes(platform):
    """On CUDA, backward does without lse, which its kernel computes."""
    x, labels, where = (
        jnp.ones((2, 3, 4), "bfloat16"),
        jnp.ones((2, 3), int),
        jnp.ones((1, 1, 4), bool),
    )

    def f(x):
        options = {"where": where, "label_smoothing": 0.25, "z_loss": 0.5}
        return jax.grad(lambda x: jnp.sum(jaxnorm.softmax_cross_entropy(x, labels, **options)))(x)

    forward, backward = calls(lowered(f, x, platform=platform))
    assert forward[0] == "jaxnorm_cross_entropy_fwd"
    assert backward[0] == "jaxnorm_cross_entropy_bwd"
    row, rows = "2x3x1xf32", ["2x3x4xbf16", "2x3x1xi32", "1x1x4xi1"]
    numbers = [] if platform == "cuda" else [row]
    expected = [
        (rows, [row, row]),
        ([rows[0], *numbers, rows[1], row, row, rows[2]], [rows[0]]),
    ]
    for (_, attributes, line), (operands, results) in zip(
        (forward, backward), expected, strict=True
    ):
        if platform == "cpu":
            assert attributes == {"axis": "2 : i64", "smoothing": "2.500000e-01 : f64"}
        types = line.rpartition(" : (")[2].split("->")
        assert [re.findall(r"tensor<([^>]*)>", t) for t in types] == [operands, results]


@needs_cpu
def test_batch_norm_attributes():
    x, p = jnp.ones((2, 3, 4, 5), "bfloat16"), jnp.ones((4,), "float32")
    mask = jnp.ones((2, 3, 1, 1), bool)

    def f(x, scale, bias, residual):
        def total(*a):
            kw = {"axis": 2, "mask": mask, "epsilon": 0.25, "activation": "relu"}
            return jnp.sum(jaxnorm.batch_norm(*a[:3], residual=a[3], **kw)[0].astype("float32"))

        return jax.grad(total, (0, 1, 2, 3))(x, scale, bias, residual)

    found = calls(lowered(f, x, p, p, x, platform="cpu"))
    names = ("x", "dy", "y", "bits", "mask", "mean", "var", "count", "scale", "bias", "residual")
    names += ("dbias", "dscale", "dmean", "dvar", "dx", "dresidual")

    def bits(text):
        return f"{sum(1 << names.index(n) for n in text.split())} : i64"

    shared = {"groups": "0 : i64", "axis": "2 : i64", "end": "3 : i64"}
    epsilon = {"epsilon": "2.500000e-01 : f64"}
    expected = {
        "stats": ("x mask", "mean var count", {}),
        "fwd": ("x mean var scale bias residual", "y bits", epsilon | {"relu": "true"}),
        "sums": ("x dy bits mean var", "dbias dscale", epsilon),
        "dx": (
            "x dy bits mask mean var count scale dbias dscale",
            "dx dresidual",
            epsilon | {"replicas": "1 : i64"},
        ),
    }
    assert [target for target, _, _ in found] == [f"jaxnorm_batch_norm_{n}" for n in expected]
    for (_, attributes, _), (operands, results, extra) in zip(
        found, expected.values(), strict=True
    ):
        own = {"operands": bits(operands), "results": bits(results)}
        assert attributes == shared | own | extra


@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=needs_cpu), pytest.param("cuda", marks=needs_cuda)]
)
def test_operands_are_not_materialised(platform):
    """Broadcast operands reach the kernel at their own size, also under vmap."""
    x = jnp.ones((8, 2, 3, 5), "float32")
    where = jnp.ones((8, 1, 1, 5), bool)

    def f(x, where):
        return jax.vmap(lambda x, where: jaxnorm.softmax(x, axis=-2, where=where))(x, where)

    text = lowered(f, x, where, platform=platform)
    ((_, _, line),) = calls(text)
    assert "(tensor<8x2x3x5xf32>, tensor<8x1x1x5xi1>)" in line
    assert "transpose" not in text
    assert "broadcast_in_dim" not in text
    shared = lowered(
        lambda x, where: jax.vmap(lambda x: jaxnorm.softmax(x, where=where))(x),
        x,
        where[0],
        platform=platform,
    )
    ((_, _, line),) = calls(shared)
    assert "tensor<1x1x1x5xi1>" in line


@needs_cuda
def test_scratch_of_each_block_that_adds_up_gradients():
    """The additional float32 results are partial sums of each column, one of each gradient."""
    x = jax.ShapeDtypeStruct((49152, 512), "bfloat16")
    p = jax.ShapeDtypeStruct((512,), np.float32)

    def backward(x, scale, bias, dy):
        return jax.vjp(jaxnorm.layer_norm, x, scale, bias)[1](dy)

    forward, backward = calls(lowered(backward, x, p, p, x, platform="cuda"))
    of_forward, of_backward = (
        re.findall(r"tensor<([^>]*)>", line.split("->")[1]) for _, _, line in (forward, backward)
    )
    assert of_forward == ["49152x512xbf16", "49152x1xf32", "49152x1xf32"]
    first, second = of_backward[3:]
    assert first == second
    assert re.fullmatch(r"\d+x512xf32", first)


@ops
@needs_cpu
def test_no_widening_of_16_bit_arrays(op):
    """Kernels take 16-bit arrays as they are: no float32 copy of x in the lowered module."""
    args = OPS[op].arguments("bfloat16")
    text = lowered(lambda *a: jax.vjp(OPS[op].function, *a)[1](a[0]), *args, platform="cpu")
    big = r"tensor<2x3x9xf32>"
    assert not re.search(big, text)


def test_registry_lists_what_is_tested():
    tested = set().union(
        *(op.forward for op in OPS.values()), *(op.backward for op in OPS.values())
    )
    assert tested == {
        f"jaxnorm_{op}_{part}"
        for op in ("softmax", "relu", "norm", "cross_entropy")
        for part in ("fwd", "bwd")
    } | {f"jaxnorm_batch_norm_{part}" for part in ("stats", "fwd", "sums", "dx")}
    assert suite.DTYPES == ("float16", "bfloat16", "float32", "float64")
