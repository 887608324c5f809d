"""jaxnorm.fuse on an NVIDIA GPU: accuracy next to the plain program, every schedule, what XLA does with the calls.

The limit of an error is twice that of the plain program, as it is written, plus some units of the result's dtype.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import threading

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import processes
import pytest
import test_row_random
from jax import export

import jaxnorm
from bench import row_programs
from jaxnorm._rows import launcher, primitive
from jaxnorm._rows.call import row_call, simplified
from jaxnorm._rows.plan import DEVICES, Device
from jaxnorm._rows.schedule import schedule

pytestmark = pytest.mark.gpu

TARGET = "jaxnorm_launch"
# Of processes that these tests start; the other workers have memory of the GPU, too.
GPU = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@functools.cache
def device() -> Device:
    gpu = next(iter(launcher.gpus()), None)
    if gpu is None:
        return DEVICES[90]
    return Device(gpu.architecture, gpu.multiprocessors, gpu.shared_bytes, gpu.name)


# ---- the comparison ----

# Rounding errors that any result may have.
UNITS = {"float8_e4m3fn": 3, "bfloat16": 2, "float16": 2, "float32": 16}
MOST = 0.25  # of an error's limit: results that are 0, or another's, have more


def wide(tree):
    """Floating-point arrays in float64."""

    def one(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def errors(found, exact, smallest):
    """(largest error, root of their mean square), both relative to the numbers' size."""
    found, exact = (np.asarray(x).astype(np.float64) for x in (found, exact))
    size = max(np.sqrt(np.mean(exact**2)), smallest, 1e-30)
    off = np.abs(found - exact)
    return np.max(off / (np.abs(exact) + size)), np.sqrt(np.mean(off**2)) / size


def assert_accurate(found, plain, exact, smallest=0.0):
    """Every result as near to that in float64 as the plain program's is; what is below `smallest` counts as that."""
    assert jax.tree.structure(found) == jax.tree.structure(plain) == jax.tree.structure(exact)
    trees = zip(*map(jax.tree.leaves, (found, plain, exact)), strict=True)
    for number, (a, b, c) in enumerate(trees):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"result {number}"
        if not a.size:
            continue
        assert np.isfinite(np.asarray(a).astype(np.float64)).all(), f"result {number}"
        unit = float(ml_dtypes.finfo(a.dtype).eps) / 2
        kinds = zip(errors(a, c, smallest), errors(b, c, smallest), strict=True)
        for kind, (error, of_plain) in zip(("largest", "mean"), kinds, strict=True):
            limit = min(2 * of_plain + UNITS[str(a.dtype)] * unit, MOST)
            assert error <= limit, (
                f"result {number}, {a.dtype}{list(a.shape)}: {kind} error {error / unit:.1f} units, "
                f"limit {limit / unit:.1f}, of the plain program {of_plain / unit:.1f}"
            )


def plain_jit(function):
    """Compiled as it is written: with every rounding to a smaller dtype."""
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False})


def with_gradients(function, count):
    """(result, gradients of the first `count` arguments) of the arguments and the cotangents."""

    def both(args, cotangents):
        moving, fixed = args[:count], args[count:]
        result, pullback = jax.vjp(lambda *moving: function(*moving, *fixed), *moving)
        return result, pullback(cotangents)

    return both


def in_float64(function):
    """The function of arguments in float64, on the host."""
    compiled, host = jax.jit(function), jax.devices("cpu")[0]
    return lambda *args: jax.device_get(compiled(*jax.device_put(wide(args), host)))


def calls(function, *args) -> int:
    """Calls of kernels in a function's program."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count(f"custom_call @{TARGET}(")


@functools.cache
def reference(name, sizes, dtype):
    """Of a case of the table: (arguments, cotangents, plain results and gradients, those in float64)."""
    case = CASES[name]
    args, cotangents = case.inputs(sizes, dtype), case.cotangents(sizes, dtype)
    function = with_gradients(case.function, case.differentiated)
    if not case.differentiated:

        def function(args, _):
            return case.function(*args)

    plain = jax.device_get(plain_jit(function)(args, cotangents))
    exact = in_float64(function)(args, cotangents)
    return args, cotangents, plain, exact


CASES = {case.name: case for case in row_programs.ALL}


def test_kernels_are_available():
    cuda = jaxnorm.status().modules[1]
    assert cuda.available, cuda.reason


def test_wrong_results_are_seen():
    """The comparison takes neither zeros, nor another result, nor one row too few."""
    for name in ("layer_norm", "dropout_residual_layer_norm", "rms_norm_fp8"):
        _, _, plain, exact = reference(name, CASES[name].small, "bfloat16")
        assert_accurate(plain, plain, exact)
        leaves, tree = jax.tree.flatten(plain)
        for i, leaf in enumerate(leaves):
            last = np.array(leaf)
            last[-1] = 0
            others = [x for x in leaves if x is not leaf and x.shape == leaf.shape]
            wrong = [np.zeros_like(leaf), last, *(np.asarray(x).astype(leaf.dtype) for x in others)]
            for bad in wrong:
                with pytest.raises(AssertionError, match="error"):
                    assert_accurate(
                        jax.tree.unflatten(tree, [*leaves[:i], bad, *leaves[i + 1 :]]), plain, exact
                    )


# ---- the table's cases ----

RUNS = [(case.name, "bfloat16") for case in row_programs.ALL] + [
    (case.name, "float32") for case in row_programs.select(tag=row_programs.MAIN)
]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_cases(name, dtype):
    """Forward alone is one call, with gradients two, which are as near to float64 as the plain program."""
    case = CASES[name]
    args, cotangents, plain, exact = reference(name, case.small, dtype)
    fused = jaxnorm.fuse(case.function)
    assert calls(fused, *args) == 1
    forward = jax.jit(fused)(*args)
    if not case.differentiated:
        assert_accurate(forward, plain, exact)
        return
    assert_accurate(forward, plain[0], exact[0])
    both = case.result_and_gradients(fused)
    assert calls(both, args, cotangents) == 2
    assert_accurate(jax.jit(both)(args, cotangents), plain, exact)


# ---- awkward sizes ----


def layer_norm(x, scale, bias):
    y = row_programs.wide(x)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + np.asarray(0.25, y.dtype))
    return (y * scale + bias).astype(x.dtype)


def gated_rms(x, z, scale):
    y = row_programs.wide(x) * jax.nn.silu(row_programs.wide(z))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + np.asarray(0.25, y.dtype))
    return (y * scale).astype(x.dtype)


def relu_of_sum(x, y):
    """Backward takes bits."""
    return jax.nn.relu(x + y)


def dropout(x, residual, scale, bias, key):
    keep = jax.random.bernoulli(key, 0.75, x.shape)
    s = residual + jnp.where(keep, x * np.asarray(1.5, x.dtype), np.zeros((), x.dtype))
    return layer_norm(s, scale, bias), s


# name: (function, how many arguments have all rows, how many a row's columns, whether it takes a key)
AWKWARD = {
    "layer_norm": (layer_norm, 1, 2, False),
    "softmax": (row_programs.soft_capped_softmax, 1, 0, False),
    "gated_rms": (gated_rms, 2, 1, False),
    "entropy": (row_programs.entropy, 1, 0, False),
    "relu_of_sum": (relu_of_sum, 2, 0, False),
    "dropout": (dropout, 2, 2, True),
}


def draw(shape, dtype, seed):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(dtype)


def arguments(name, rows, columns, dtype):
    """(function, arguments, cotangents, how many are differentiated)."""
    function, wholes, parameters, key = AWKWARD[name]
    args = [draw((rows, columns), dtype, i) for i in range(wholes)]
    args += [1 + draw((columns,), "float32", 10 + i) / 8 for i in range(parameters)]
    args += [jax.random.key(7)] * key
    results = jax.eval_shape(function, *args)
    cotangents = jax.tree.map(lambda r: draw(r.shape, r.dtype, 20 + len(r.shape)), results)
    return function, tuple(args), cotangents, wholes + parameters


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [1, 31, 33, 65, 513, 1023, 4095, 50257, 128257])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_sizes(name, columns, dtype):
    """0, 1, 3 and more rows: of the reference's results, which are those of all rows, the first ones.

    Cotangents of 0 take the other rows out of the gradients of parameters.
    """
    most = 257 if columns < 10_000 else 5
    function, args, cotangents, count = arguments(name, most, columns, dtype)
    plain, exact = (made(with_gradients(function, count)) for made in (plain_jit, in_float64))
    fused = jaxnorm.fuse(function)
    # A row of one element is its own mean and maximum: what must be 0 has rounding errors.
    smallest = 1.0 if columns == 1 else 0.0

    def first(rows, tree):
        return jax.tree.map(lambda x: x[:rows] if x.shape[:1] == (most,) else x, tree)

    def only(rows, x):
        return x * (np.arange(most) < rows).astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1))

    for rows in (0, 1, 3, most):
        some = jax.tree.map(functools.partial(only, rows), cotangents)
        wanted = [first(rows, jax.device_get(f(args, some))) for f in (plain, exact)]
        given = first(rows, args), first(rows, cotangents)
        both = with_gradients(fused, count)
        assert_accurate(jax.device_get(jax.jit(both)(*given)), *wanted, smallest)
        if rows == most:
            assert calls(both, *given) == 2
            forward = jax.device_get(jax.jit(fused)(*args))
            assert_accurate(forward, wanted[0][0], wanted[1][0], smallest)


@pytest.mark.parametrize("offset", [1, 3])
def test_views_at_odd_addresses(offset):
    """A slice of rows that begin anywhere: XLA may give the kernel a part of the buffer."""
    x, rows, columns = draw((40 * 1023 + 8,), "bfloat16", 0), 40, 1023

    def f(function, x):
        view = jax.lax.slice(x, (offset,), (offset + rows * columns,)).reshape(rows, columns)
        return function(view), function(view[3:])

    softmax = row_programs.softmax
    found = jax.jit(functools.partial(f, jaxnorm.fuse(softmax)))(x)
    plain, exact = (
        plain_jit(functools.partial(f, softmax))(x),
        in_float64(functools.partial(f, softmax))(x),
    )
    assert_accurate(found, plain, exact)


# ---- random programs ----


def computed(asked, monkeypatch, closed, arrays):
    """Results of a program on the GPU, the same in two runs. `asked` forces fields of the schedule."""
    program = simplified(closed)
    if asked:
        forced(monkeypatch, asked, reject=True)
        plan = schedule(program, device(), **asked)
        if not feasible(program, closed, plan):
            hypothesis.reject()
    run = jax.jit(lambda *arrays: primitive.run(closed, arrays))
    operands = jax.device_put(list(arrays), jax.devices()[0])
    found, again = (jax.device_get(run(*operands)) for _ in range(2))
    assert_same_bits(found, again)
    return [np.asarray(x) for x in found]


def feasible(program, closed, plan) -> bool:
    """Whether the GPU has the registers and the shared memory, and the compiler is quick."""
    return (
        plan.slots * plan.vector * plan.rows_at_once <= 64
        and plan.threads % 32 == 0
        and plan.threads * plan.blocks <= 1024
        and row_call(closed, device(), plan).shared_bytes <= device().shared_bytes
    )


@pytest.mark.parametrize("part", range(16))
def test_random_programs(part, monkeypatch):
    """Those of tests/test_row_random.py, half of them with any schedule."""
    options = dict(
        max_examples=5, phases=[hypothesis.Phase.generate], derandomize=False, print_blob=False
    )
    schedules = test_row_random.SCHEDULES if part % 2 else hypothesis.strategies.just({})

    @hypothesis.seed(part)
    @hypothesis.settings(test_row_random.SETTINGS, **options)
    @hypothesis.given(test_row_random.programs(), schedules)
    def run(program, asked):
        with monkeypatch.context() as patch:
            patch.setattr(
                test_row_random,
                "emulated",
                lambda asked, order, resident, architecture, closed, arrays: computed(
                    asked, patch, closed, arrays
                ),
            )
            # The host computes what is right, in float64.
            with jax.default_device(jax.devices("cpu")[0]):
                test_row_random.check(program, asked, "forward", 1)

    run()


# ---- forced schedules ----

SCHEDULES = {
    "registers": [{"source": "registers"}, {"source": "registers", "lanes": 64}],
    "ring": [{"source": "ring", "stages": n} for n in (1, 2, 3, 4)],
    "ring of lanes": [{"source": "ring", "lanes": n} for n in (32, 64, 128)],
    "parts": [
        {"source": "ring", "parts": True, "slots": 1, "lanes": 64, "cluster": n} for n in (1, 2)
    ],
    "stream": [{"source": "stream", "slots": 1}, {"source": "stream", "lanes": 64, "slots": 2}],
    "cluster": [{"source": "ring", "cluster": n, "lanes": 64} for n in (2, 4, 8)],
    "steps": [
        {"source": "ring", "cluster": n, "lag": lag, "lanes": 64}
        for n, lag in ((1, 1), (2, 1), (4, 2))
    ],
    "rows_at_once": [
        {"source": s, "rows_at_once": n, "lanes": 64} for s in ("registers", "ring") for n in (2, 4)
    ],
    "hoist": [
        {"source": s, "hoist": h}
        for s in ("registers", "ring")
        for h in ("", "registers", "shared")
    ],
    "blocks": [{"blocks": n, "vector": v} for n, v in ((1, 4), (2, 2), (3, 1))],
}
FORCED = {
    "layer_norm_gelu": (67, 1024),
    "soft_capped_softmax": (2, 3, 8, 1024),
    "gated_rms_norm": (400, 512),
    "log_probability_entropy": (67, 2048),
    "dropout_residual_layer_norm": (67, 512),
    "adaln": (3, 16, 512),
    "qk_norm_rotary": (2, 8, 3, 128),
    "layer_norm": (300, 1023),  # shifted
    "softmax": (300, 1023),
    "channel_softmax": (3, 200, 40),  # rows lie side by side
    "channel_layer_norm": (5, 96, 6, 4),
    "pixel_cross_entropy": (3, 150, 7, 7),
}


def forced(monkeypatch, asked, reject=False):
    """Makes all kernels have the schedule; returns the list of their plans."""
    plans = []

    def call(closed):
        plan = schedule(simplified(closed), device(), **asked)
        made = row_call(closed, device(), plan)
        assert reject or made.shared_bytes <= device().shared_bytes
        plans.append(plan)
        return made

    monkeypatch.setattr(primitive, "compiled_call", call)
    return plans


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", FORCED)
def test_forced_schedules(name, kind, monkeypatch):
    case = CASES[name]
    args, cotangents, plain, exact = reference(name, FORCED[name], "bfloat16")
    seen = set()
    for asked in SCHEDULES[kind]:
        with monkeypatch.context() as patch:
            plans = forced(patch, asked)
            both = case.result_and_gradients(jaxnorm.fuse(case.function))
            program = jax.jit(both).lower(args, cotangents)
            # Where the program cannot have what is asked, its schedule is another one's.
            if tuple(plans) in seen or any(
                p.threads * p.blocks > 2048 or p.threads % 32 for p in plans
            ):
                continue
            assert len(plans) == 2
            seen.add(tuple(plans))
            found = jax.device_get(program.compile()(args, cotangents))
        try:
            assert_accurate(found, plain, exact)
        except AssertionError as error:
            raise AssertionError(f"{asked}: {'; '.join(map(str, plans))}: {error}") from None
    assert seen


# ---- the same bits ----


def assert_same_bits(found, again):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("layer_norm", 5000, 1024),
        ("gated_rms", 3001, 4095),
        ("dropout", 2000, 512),
        ("softmax", 40, 128257),
        ("layer_norm", 70_000, 64),
    ],
)
def test_two_runs_give_the_same_bits(name, rows, columns):
    function, args, cotangents, count = arguments(name, rows, columns, "bfloat16")

    def run():
        both = with_gradients(jaxnorm.fuse(function), count)
        return jax.jit(lambda *a: both(*a))

    f = run()
    found = jax.device_get(f(args, cotangents))
    for g in (f, f, run()):
        assert_same_bits(found, jax.device_get(g(args, cotangents)))


# ---- transformations ----


def loss(f, x, scale, bias):
    return jnp.mean(jnp.sin(f(x, scale, bias).astype(scale.dtype)) ** 2 * 3)


def vmapped(f, x, scale, bias):
    return jax.vmap(f, (1, None, None), 1)(x, scale, bias), jax.vmap(f, (0, 0, None))(
        x, jnp.stack([scale * i for i in range(x.shape[0])]), bias
    )


def gradients_of_examples(f, x, scale, bias):
    return jax.vmap(jax.grad(functools.partial(loss, f), (0, 1, 2)), (0, None, None))(
        x, scale, bias
    )


def scanned(f, x, scale, bias):
    def total(x, scale, bias):
        def layer(x, step):
            return f(x, scale * step, bias), jnp.sum(x, dtype=scale.dtype)

        y, sums = jax.lax.scan(layer, x, jnp.linspace(0.5, 1.5, 4, dtype=scale.dtype))
        return loss(lambda y, *_: y, y, scale, bias) + jnp.mean(sums) * 1e-3

    return jax.value_and_grad(total, (0, 1, 2))(x, scale, bias)


def rematerialised(f, x, scale, bias):
    def twice(x, scale, bias):
        return f(f(x, scale, bias), scale, bias)

    return jax.value_and_grad(functools.partial(loss, jax.checkpoint(twice)), (0, 1, 2))(
        x, scale, bias
    )


def gradient_of_gradient(f, x, scale, bias):
    def first(x, scale, bias):
        return sum(
            jnp.sum(jnp.cos(g * 8))
            for g in jax.grad(functools.partial(loss, f), (0, 1))(x, scale, bias)
        )

    return jax.grad(first, (0, 1))(x, scale, bias)


def forward_mode(f, x, scale, bias):
    given = (x, scale, bias)
    return jax.jvp(f, given, given), jax.jvp(jax.grad(functools.partial(loss, f)), given, given)


@pytest.mark.parametrize(
    "transformed",
    [vmapped, gradients_of_examples, scanned, rematerialised, gradient_of_gradient, forward_mode],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformations(transformed, dtype):
    args = draw((6, 5, 72), dtype, 0), *(1 + draw((72,), "float32", i) / 8 for i in (1, 2))
    if dtype == "bfloat16" and transformed in (gradient_of_gradient, scanned):
        pytest.skip("rounding errors of 2**-9 grow too large")
    run = functools.partial(transformed, jaxnorm.fuse(layer_norm))
    assert calls(run, *args) >= 1
    found = jax.device_get(jax.jit(run)(*args))
    plain = jax.device_get(plain_jit(functools.partial(transformed, layer_norm))(*args))
    exact = in_float64(functools.partial(transformed, layer_norm))(*args)
    assert_accurate(found, plain, exact)


def test_donation():
    """The result may have the operand's buffer: rows are read before they are written."""
    for columns in (64, 1023, 4096, 50257):
        x = draw((33, columns), "float32", 0)
        want, donated = jax.jit(row_programs.softmax)(x), jnp.array(x)
        got = jax.jit(jaxnorm.fuse(row_programs.softmax), donate_argnums=0)(donated)
        assert donated.is_deleted()
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_in_place_inside_a_loop():
    """XLA has one buffer for what a loop carries."""
    x = draw((33, 1000), "float32", 0)

    def steps(f, x):
        return jax.lax.fori_loop(0, 7, lambda i, x: f(x) * 3 + x, x)

    softmax = row_programs.softmax
    found = jax.jit(functools.partial(steps, jaxnorm.fuse(softmax)))(x)
    plain, exact = (made(functools.partial(steps, softmax))(x) for made in (plain_jit, in_float64))
    assert_accurate(found, plain, exact)


def test_threads():
    """Programs of their own, compiled and run at the same time."""
    wrong, x = [], draw((257, 640), "float32", 0)

    def function(i, x):
        return jnp.tanh(x * float(i + 2)) + jnp.max(x, -1, keepdims=True)

    want = [np.asarray(jax.jit(functools.partial(function, i))(x)) for i in range(4)]

    def work(i):
        try:
            f = jax.jit(jaxnorm.fuse(lambda x: function(i % 4, x)))
            for _ in range(10):
                np.testing.assert_allclose(f(x), want[i % 4], rtol=1e-5, atol=1e-6)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_compiled_once(monkeypatch):
    """Whatever calls it and however many rows it has."""
    compiled, original = [], launcher.compile

    def record(*args):
        compiled.append(original(*args))
        return compiled[-1]

    monkeypatch.setattr(launcher, "compile", record)
    # A program that no cache has.
    number = int.from_bytes(os.urandom(3), "big") / 2**24 + 1
    fused = jaxnorm.fuse(lambda x: jnp.tanh(x * number))
    for rows in (3, 5, 64):
        x = draw((rows, 256), "float32", rows)
        for f in (fused, lambda x: fused(x) + 1, lambda x: jnp.sin(fused(x * 2))):
            assert calls(f, x) == 1
            jax.block_until_ready(jax.jit(f)(x))
    assert [c.cached for c in compiled].count(False) == 1


def _filled(shape):
    row = jnp.arange(shape[0], dtype="int32")[:, None] % 61
    column = jnp.arange(shape[1], dtype="int32")[None] % 53
    return ((row * column) % 17 - 8).astype("bfloat16")


def test_more_than_two_to_the_31_elements():
    """Rows before, at and after each power of two where an index or an offset overflows."""
    rows, columns = (1 << 20) + 3, (1 << 11) + 8
    x = jax.jit(lambda: _filled((rows, columns)))()
    softmax = row_programs.soft_capped_softmax
    f = jaxnorm.fuse(softmax)
    half = (1 << 30) // columns
    some = np.array(
        [0, 1, half - 1, half, half + 1, 2 * half - 1, 2 * half, 2 * half + 1, rows - 2, rows - 1]
    )

    def both(f, x, g):
        y, pullback = jax.vjp(f, x)
        return y, pullback(g)[0]

    few = x[some]
    plain = plain_jit(functools.partial(both, softmax))(few, few)
    exact = in_float64(functools.partial(both, softmax))(few, few)
    y = jax.jit(f)(x)
    assert_accurate(y[some], plain[0], exact[0])
    del y
    bar = jax.jit(lambda x: both(f, x, x)[1])(x)
    assert_accurate(bar[some], plain[1], exact[1])


# ---- other processes ----


def run_text(folder, name, text, *args, env=None):
    """Runs a program that prints a line of JSON."""
    (folder / f"{name}.py").write_text(COMMON + text)
    return processes.run(str(folder / name), *args, env={**GPU, **(env or {})})


COMMON = """
import collections, json, pathlib, sys, warnings
import jax, jax.numpy as jnp, numpy as np
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
import jaxnorm

def layer_norm(x, scale):
    y = x - jnp.mean(x, -1, keepdims=True)
    return jax.nn.relu(y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 0.25) * scale)

def gradients(f):
    return lambda x, scale: (f(x, scale), jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1))(x, scale))

def error(f, *args):
    pairs = zip(jax.tree.leaves(f(*args)), jax.tree.leaves(jax.jit(gradients(layer_norm))(*args)))
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)

fused = jaxnorm.fuse(layer_norm)
x = np.random.default_rng(0).standard_normal((300, 640), np.float32)
scale = np.linspace(0.5, 1.5, 640, dtype=np.float32)
"""

GRAPH = """
compiled = jax.jit(gradients(fused))
first = [jax.device_get(compiled(x + i, scale)) for i in range(2)]
alike = True
for i in range(2, 20):
    again = jax.device_get(compiled(x + i % 2, scale))
    alike &= all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(first[i % 2])))
captured, depth = 0, None
for dump in pathlib.Path(sys.argv[1]).glob("*thunk_sequence_after_thunk_passes.txt"):
    for line in dump.read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if depth is not None and indent <= depth:
            depth = None
        if "kCommandBuffer" in line:
            depth = indent
        elif depth is not None:
            captured += "kCustomCall" in line
print(json.dumps({"error": error(compiled, x, scale), "alike": alike, "captured": captured}))
"""


def test_cuda_graphs(tmp_path):
    """The calls are captured, and each run of the graph gives the same."""
    flags = (
        f"--xla_dump_to={tmp_path} --xla_gpu_enable_command_buffer=+CUSTOM_CALL "
        "--xla_gpu_graph_min_graph_size=1"
    )
    result = run_text(tmp_path, "graph", GRAPH, tmp_path, env={"XLA_FLAGS": flags})
    assert result["error"] < 1e-5
    assert result["alike"]
    assert result["captured"] >= 2


CACHE = """
counts.clear()
y = jax.device_get(jax.jit(gradients(fused))(x, scale))
hits, misses = counts["cache_hits"], counts["cache_misses"]
total = [float(np.abs(a).sum()) for a in jax.tree.leaves(y)]
print(json.dumps({"hits": hits, "misses": misses, "total": total, "error": error(jax.jit(gradients(fused)), x, scale)}))
"""


def test_persistent_compilation_cache(tmp_path):
    """The second process finds XLA's program and the kernels."""
    kernels = tmp_path / "kernels"
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAXNORM_CACHE_DIR": str(kernels),
    }
    first = run_text(tmp_path, "cache", CACHE, env=env)
    files = {path: path.stat().st_size for path in kernels.rglob("*") if path.is_file()}
    assert files
    second = run_text(tmp_path, "cache", CACHE, env=env)
    assert first["misses"] >= 1
    assert second["hits"] >= 1
    assert second["misses"] == 0
    assert first["total"] == second["total"]
    assert first["error"] < 1e-5
    assert second["error"] < 1e-5
    assert {p: p.stat().st_size for p in kernels.rglob("*") if p.is_file()} == files


EXPORT = """
from jax import export
rows = export.symbolic_shape("b")[0]
structs = jax.ShapeDtypeStruct((rows, 640), np.float32), jax.ShapeDtypeStruct((640,), np.float32)
exported = export.export(
    jax.jit(gradients(fused)), platforms=["cuda"], disabled_checks=jaxnorm.export_checks()
)(*structs)
pathlib.Path(sys.argv[1]).write_bytes(exported.serialize())
module = exported.mlir_module()
devices = [d.platform for d in jax.devices()]
print(json.dumps({"calls": module.count("@jaxnorm_launch"), "devices": devices}))
"""


@pytest.mark.skipif(device().architecture < 90, reason="it is exported for sm_90 and later")
def test_exported_without_a_gpu(tmp_path):
    """By a process that sees none, for any number of rows."""
    file = tmp_path / "exported"
    hidden = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    result = run_text(tmp_path, "export", EXPORT, file, env=hidden)
    assert set(result["devices"]) == {"cpu"}
    assert result["calls"] >= 2
    loaded = export.deserialize(bytearray(file.read_bytes()))

    def function(x, scale):
        y = x - jnp.mean(x, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + np.asarray(0.25, x.dtype))
        return jax.nn.relu(y * scale)

    def both(x, scale):
        gradient = jax.grad(lambda *a: jnp.sum(function(*a) ** 2), (0, 1))
        return function(x, scale), gradient(x, scale)

    for rows in (1, 3, 300, 5000):
        args = draw((rows, 640), "float32", rows), 1 + draw((640,), "float32", 1) / 8
        found = jax.device_get(jax.jit(loaded.call)(*args))
        assert_accurate(found, plain_jit(both)(*args), in_float64(both)(*args))


FALLBACK = """
if sys.argv[1] == "no NVRTC":
    from jaxnorm import _launcher
    _launcher.configure([], "", 0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = error(jax.jit(gradients(fused)), x, scale)
    jax.block_until_ready(jax.jit(jaxnorm.fuse(jnp.sin))(x))
    text = jax.jit(fused).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
cuda = jaxnorm.status().modules[1]
print(json.dumps({
    "error": found,
    "warnings": [(w.category.__name__, str(w.message)) for w in caught if "jaxnorm" in str(w.message)],
    "calls": text.count("@jaxnorm_launch"),
    "available": cuda.available,
    "reason": cuda.reason,
}))
"""


def test_without_a_disk_cache(tmp_path):
    result = run_text(tmp_path, "off", FALLBACK, "off", env={"JAXNORM_CACHE_DIR": "off"})
    assert result["error"] < 1e-5
    assert result["warnings"] == []
    assert result["available"]
    assert result["calls"] >= 1


def test_without_nvrtc(tmp_path):
    """The plain program, one warning, and status() says why."""
    result = run_text(tmp_path, "missing", FALLBACK, "no NVRTC")
    assert result["error"] < 1e-5
    assert result["calls"] == 0
    assert not result["available"]
    assert "NVRTC" in result["reason"]
    ((category, message),) = result["warnings"]
    assert category == "RuntimeWarning"
    assert message.startswith("jaxnorm: a row program runs as plain XLA operations: ")
    assert result["reason"] in message


# ---- compute-sanitizer ----

SANITIZER = shutil.which("compute-sanitizer")
TOOLS = {
    "memcheck": ["--report-api-errors", "no", "--kernel-regex", "kns=jaxnorm_"],
    # Without the number, the tool counts the instructions that initialise barriers. An instruction in a loop
    # initialises several.
    "racecheck": ["--num-cuda-barriers", "4096", "--kernel-regex", "kns=jaxnorm_"],
    # What a kernel that is left out writes would count as not written.
    "initcheck": [],
    "synccheck": ["--num-cuda-barriers", "4096", "--kernel-regex", "kns=jaxnorm_"],
}


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer(tool):
    """Each buffer is an allocation, so that a read behind it is seen; nothing is captured in graphs."""
    shared_in_few = "shared rows in few stages"
    shared = ["shared rows", "shared rows with sums", "shared rows with moments", shared_in_few]
    few_stages = [shared_in_few, "steps of a cluster in few stages"]
    without = {
        # Blocks that share rows look for tags in whatever the memory holds.
        "initcheck": shared,
        # A warp reads a stage's results, and its first lane arrives for the warp at the barrier before the stage is
        # used again. The tool orders the reads of the lane that arrives, and not the reads of the warp's other lanes.
        "racecheck": few_stages,
    }.get(tool, [])
    leave_out = [f"-{name}" for name in without]
    script = processes.SCRIPTS / "row_programs_sanitized.py"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {
        **GPU,
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
    }
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", *TOOLS[tool], sys.executable, "-P", script, *leave_out],
        env=environment,
        cwd=processes.SCRIPTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"SUMMARY: 0 (errors|hazards)", done.stdout), done.stdout[-2000:]
    assert '"finite": {' in done.stdout
    assert "false" not in done.stdout.split('"finite": ')[1].split("}")[0]
