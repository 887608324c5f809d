"""How operations with a name run as row programs on an H100: a table, and that the kernels compile for other GPUs.

Without a GPU: what is lowered for one, and the schedule of its kernels, do not depend on whether there is one.
"""

import pathlib

import jax
import pytest

from bench import cases, peers
from bench.timing import argument_shapes, result_kind
from jaxnorm import _lib
from jaxnorm._rows import launcher, named
from jaxnorm._rows.call import SPILLS, compiled_row_call, row_call
from jaxnorm._rows.plan import DEVICES

OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "softmax_cross_entropy")
TABLE = pathlib.Path(__file__).with_name("named_plans.txt")


def selected():
    return [c for tag in ("full", "widths") for op in OPS for c in cases.select(op, tag)]


@pytest.fixture
def calls(monkeypatch):
    """A function: the calls, forward and backward, that lowering makes of a case, in order."""
    module = _lib.Module("cuda", frozenset(["launch"]))
    monkeypatch.setattr(_lib, "module", lambda platform: module)
    made: list = []

    def compile_here(closed, device, operation):
        made.append((closed, row_call(closed, device, operation=operation)))
        return made[-1][1]

    monkeypatch.setattr(named.primitive, "compile_here", compile_here)
    monkeypatch.setattr(named, "device_here", lambda: DEVICES[90])

    def of(case):
        named._planned.cache_clear()
        jax.clear_caches()
        made.clear()
        shapes = argument_shapes(case)
        vectors = len(shapes) - case.parameters
        args = [
            jax.ShapeDtypeStruct(s, case.dtype if i < vectors else case.parameter_dtype)
            for i, s in enumerate(shapes)
        ]
        fixed = []
        if case.where_shape is not None:
            fixed.append(jax.ShapeDtypeStruct(case.where_shape, bool))
        if case.bias_shape is not None:
            fixed.append(jax.ShapeDtypeStruct(case.bias_shape, case.dtype))
        if case.op == cases.CROSS_ENTROPY:
            fixed.append(jax.ShapeDtypeStruct(result_kind(case)[0], "int32"))
        function = peers.jax_function("jaxnorm", case)

        def together(dy, args, fixed):
            y, pullback = jax.vjp(lambda *args: function(*args, *fixed), *args)
            return y, pullback(dy)

        dy = jax.ShapeDtypeStruct(*result_kind(case))
        jax.jit(together).trace(dy, args, fixed).lower(lowering_platforms=("cuda",))
        return list(made)

    yield of
    named._planned.cache_clear()
    jax.clear_caches()


def test_table(calls):
    """README's cases: a line for each kernel, forward first."""
    lines = []
    for case in selected():
        found = calls(case)
        assert len(found) == 2, case
        lines += [f"{case.op} {case.label}: {call.plan}" for _, call in found]
    wanted = TABLE.read_text().splitlines() if TABLE.exists() else []
    changed = [text for text in lines if text not in wanted]
    assert not changed, "lines for the table:\n" + "\n".join(changed)
    assert lines == wanted


COMPILED = [
    cases.Case("softmax", (49152, 1023), dtype="bfloat16"),
    cases.Case("log_softmax", (64, 1024, 1024), axis=1, dtype="bfloat16"),
    cases.Case("layer_norm", (32768, 5120), dtype="bfloat16"),
    cases.Case("rms_norm", (8192, 50257), dtype="bfloat16"),
    cases.Case("softmax_cross_entropy", (8192, 128256), dtype="bfloat16"),
]


@pytest.mark.parametrize("architecture", sorted(DEVICES))
@pytest.mark.parametrize("case", COMPILED, ids=lambda c: f"{c.op} {c.label}")
def test_kernels_compile(calls, case, architecture):
    """For each architecture, with spills below the limit or one block of a multiprocessor."""
    if launcher.nvrtc()[0] is None:
        pytest.skip("there is no NVRTC")
    device = DEVICES[architecture]
    for closed, first in calls(case):
        call = compiled_row_call(closed, device, launcher.compile, operation=first.operation)
        compiled = launcher.compile(call.source, architecture)
        spills = max(compiled.spill_bytes.values())
        assert spills <= SPILLS or call.plan.blocks == 1, (call.plan, spills)


@pytest.mark.parametrize(
    ("op", "kernels"),
    [
        ("softmax", {"jaxnorm_softmax_fwd", "jaxnorm_softmax_bwd"}),
        ("layer_norm", {"jaxnorm_norm_fwd", "jaxnorm_norm_bwd", "jaxnorm_norm_bwd_finish"}),
        ("softmax_cross_entropy", {"jaxnorm_cross_entropy_fwd", "jaxnorm_cross_entropy_bwd"}),
    ],
)
def test_profiles_show_the_operation(calls, op, kernels):
    found = [call.source for _, call in calls(cases.Case(op, (4096, 1024), dtype="bfloat16"))]
    assert {name for name in kernels if any(f" {name}(" in text for text in found)} == kernels
