"""Long rows of which several are under way at once: values on the CPU, plans, what NVRTC makes of them.

Blocks of a cluster share such rows, or blocks anywhere in the grid.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_emulator
from suite import in_turn
from test_row_plans import line

import jaxnorm
from jaxnorm._rows import launcher, tune
from jaxnorm._rows.call import SPILLS, row_call, simplified
from jaxnorm._rows.plan import DEVICES, Device
from jaxnorm._rows.schedule import schedule

H100 = DEVICES[90]
# Few multiprocessors, so that the emulator has few blocks.
SMALL = Device(90, 6, 227 * 1024, "small")
EPSILON = 1e-6


def wide(x):
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def layer_norm(x, scale, bias):
    y = wide(x)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON)
    return (y * scale + bias).astype(x.dtype)


def rms_norm(x, scale):
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON)
    return (y * scale).astype(x.dtype)


def softmax(x):
    return jax.nn.softmax(wide(x)).astype(x.dtype)


def log_softmax(x):
    return jax.nn.log_softmax(wide(x)).astype(x.dtype)


def cross_entropy(x, labels):
    taken = jnp.take_along_axis(jax.nn.log_softmax(wide(x)), labels[:, None], -1)
    return -taken[:, 0]


def np_norm(x, dy, scale, bias=None):
    """(result, gradients) of a norm, which is layer_norm where there is a bias."""
    mean = 0 if bias is None else x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean((x - mean) ** 2, -1, keepdims=True) + EPSILON)
    normal, w = (x - mean) * rstd, dy * scale
    dx = w - normal * np.mean(w * normal, -1, keepdims=True)
    if bias is not None:
        dx = dx - w.mean(-1, keepdims=True)
    sums = [(dy * normal).sum(0)] + ([dy.sum(0)] if bias is not None else [])
    return normal * scale + (0 if bias is None else bias), (dx * rstd, *sums)


def np_softmax(x, dy, log=False):
    e = np.exp(x - x.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    if log:
        return np.log(y), (dy - y * dy.sum(-1, keepdims=True),)
    return y, (y * (dy - (dy * y).sum(-1, keepdims=True)),)


def np_cross_entropy(x, dy, labels):
    log_y, _ = np_softmax(x, x, log=True)
    hot = np.zeros_like(x)
    np.put_along_axis(hot, labels[:, None], 1.0, -1)
    return -(log_y * hot).sum(-1), (dy[:, None] * (np.exp(log_y) - hot),)


# The function, how many of its arguments are differentiated, and (result, gradients) in float64.
FUNCTIONS = {
    "layer_norm": (layer_norm, 3, np_norm),
    "rms_norm": (rms_norm, 2, np_norm),
    "softmax": (softmax, 1, np_softmax),
    "log_softmax": (log_softmax, 1, functools.partial(np_softmax, log=True)),
    "cross_entropy": (cross_entropy, 1, np_cross_entropy),
}
DIRECTIONS = ("forward", "backward")


def avals(name, rows, columns, dtype=jnp.bfloat16):
    vector = jax.ShapeDtypeStruct((columns,), jnp.float32)
    rest = {"layer_norm": [vector, vector], "rms_norm": [vector]}.get(name, [])
    if name == "cross_entropy":
        rest = [jax.ShapeDtypeStruct((rows,), jnp.int32)]
    return [jax.ShapeDtypeStruct((rows, columns), dtype), *rest]


def program(name, direction, given):
    """(jaxpr, its arguments): backward takes the cotangent after the function's arguments."""
    function, moving, _ = FUNCTIONS[name]
    if direction == "forward":
        return jax.make_jaxpr(function)(*given)
    cotangent = jax.eval_shape(function, *given)

    def gradients(*args):
        *args, dy = args
        return jax.vjp(lambda *a: function(*a, *args[moving:]), *args[:moving])[1](dy)

    return jax.make_jaxpr(gradients)(*given, cotangent)


@functools.cache
def drawn(name, rows, columns, dtype):
    """Arrays for a function and its cotangent; the mean of x is far from 0, and one row is constant."""
    rng = np.random.default_rng(len(name) + rows + columns)
    given = avals(name, rows, columns, dtype)
    result = jax.eval_shape(FUNCTIONS[name][0], *given)
    arrays = [
        rng.integers(0, columns, a.shape).astype(a.dtype)
        if a.dtype == jnp.int32
        else rng.normal(size=a.shape).astype(a.dtype)
        for a in (*given, result)
    ]
    arrays[0] = (arrays[0].astype(np.float32) * 3 + 5).astype(dtype)
    if rows > 2 and "norm" not in name:
        arrays[0][2] = 1.5
    return arrays


def error(found, wanted):
    difference = found.astype(np.float64) - wanted
    assert np.isfinite(difference).all()
    return np.sqrt(np.mean(difference**2)) / (np.sqrt(np.mean(wanted**2)) + 1e-30)


def check(name, direction, rows, columns, asked, dtype=jnp.bfloat16, order="mixed", groups=None):
    arrays = drawn(name, rows, columns, np.dtype(dtype))
    *given, dy = arrays
    closed = program(name, direction, given)
    device = SMALL if "grid" in asked else H100
    plan = schedule(simplified(closed), device, **asked)
    assert plan.in_steps
    assert plan.grid == asked.get("grid", 0)
    assert plan.cluster == asked.get("cluster", plan.cluster)
    call = row_call(closed, device, plan)
    operands = given if direction == "forward" else arrays
    results = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    found = row_emulator.run(
        call,
        operands,
        results,
        order=order,
        resident_blocks=groups or plan.grid or 2,
        with_scratch=True,
    )
    exact = [a.astype(np.float64) if a.dtype != np.int32 else a for a in arrays]
    y, gradients = FUNCTIONS[name][2](exact[0], exact[-1], *exact[1:-1])
    for got, want in zip(found, [y] if direction == "forward" else gradients, strict=False):
        assert got.shape == want.shape
        limit = 1e-2 if got.dtype == jnp.bfloat16 else 1e-5
        assert error(got, want) < limit
    if plan.grid:
        # A later launch may find the tags that are left.
        posts = found[-1].view(np.uint64).reshape(-1, 2)
        assert (posts[:, 0] == 0).all()
    return plan, found


GRIDS = {
    "one group": dict(grid=1),
    "two groups, short lag": dict(grid=2, lag=1),
    "few stages": dict(grid=1, cluster=2, stages=4, lag=1, lanes=64),
    "several slots": dict(grid=1, cluster=3, lanes=32, exchangers=3),
}
needs_emulator = pytest.mark.skipif(not row_emulator.supported(), reason="needs Linux and g++")
needs_nvrtc = pytest.mark.skipif(launcher.nvrtc()[0] is None, reason="NVRTC is not installed")


@needs_emulator
@in_turn(name=[*FUNCTIONS], direction=DIRECTIONS, asked=[*GRIDS])
def test_values(name, direction, asked):
    check(name, direction, 7, 2048, GRIDS[asked])


# Programs without sums over rows: a cluster may have several of their rows under way.
WITHOUT_SUMS = [(name, "forward") for name in FUNCTIONS]
WITHOUT_SUMS += [(name, "backward") for name in ("softmax", "log_softmax", "cross_entropy")]
CLUSTERS = {
    "one block": dict(cluster=1, lag=1),
    "two blocks, longer lag": dict(cluster=2, lag=2, lanes=64),
    "four blocks, several slots": dict(cluster=4, lag=1, lanes=32),
    "more stages": dict(cluster=2, lag=1, stages=7, exchangers=2),
}


@needs_emulator
@in_turn(case=WITHOUT_SUMS, asked=[*CLUSTERS], columns=[2048, 2051])
def test_values_of_clusters(case, asked, columns):
    """Each cluster has more rows than stages."""
    check(*case, 61, columns, {"source": "ring", **CLUSTERS[asked]})


@needs_emulator
@pytest.mark.parametrize(
    "asked",
    [
        dict(grid=1, cluster=2),
        dict(source="ring", cluster=2, lag=1, lanes=32),
        # One warp has the whole row, and its partial results go the same way.
        dict(source="ring", cluster=1, lag=1, lanes=32),
    ],
)
def test_an_element_whose_place_is_a_result(asked):
    """A number of a row that is loaded between phases."""

    def function(x):
        place = jnp.max(jnp.abs(x.astype(jnp.int32)) % 8, -1, keepdims=True)
        return x + jnp.take_along_axis(x, place, -1)

    x = (np.random.default_rng(0).normal(size=(9, 512)) * 3).astype(np.float32)
    closed = jax.make_jaxpr(function)(x)
    device = SMALL if "grid" in asked else H100
    plan = schedule(simplified(closed), device, **asked)
    assert plan.in_steps
    avals = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    found = row_emulator.run(row_call(closed, device, plan), [x], avals, resident_blocks=2)
    np.testing.assert_array_equal(found[0], function(x))


@needs_emulator
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_values_in_any_order(order):
    """Which block or warp comes first changes no bit."""
    grid = dict(grid=2, cluster=3, stages=4, lag=1)
    cluster = dict(source="ring", cluster=4, lanes=64)
    cases = [(grid, 9, "layer_norm", "backward"), (grid, 9, "softmax", "forward")]
    cases += [({**cluster, "lag": n}, 31, "layer_norm", "forward") for n in (1, 2)]
    cases += [({**cluster, "lag": n}, 31, "softmax", "backward") for n in (1, 2)]
    for asked, rows, name, direction in cases:
        _, first = check(name, direction, rows, 1536, asked)
        _, other = check(name, direction, rows, 1536, asked, order=order)
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@needs_emulator
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_float32(name):
    for direction in DIRECTIONS:
        check(name, direction, 3, 1024, dict(grid=1), jnp.float32)


@needs_emulator
@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (2, 1024 + 64), (5, 640)])
def test_values_of_uneven_parts(rows, columns):
    """One row, rows that blocks do not divide, more groups than have rows."""
    cases = itertools.product(("layer_norm", "cross_entropy"), DIRECTIONS)
    for number, (name, direction) in enumerate(cases):
        # Of the three sizes, each case has either grid at one of them or more.
        asked = dict(grid=1) if (number + rows) % 2 else dict(grid=3, cluster=2)
        check(name, direction, rows, columns, asked)


@needs_emulator
def test_values_on_a_smaller_gpu():
    """Fewer groups run at once than the plan has, and so each has more rows."""
    for name in ("layer_norm", "softmax"):
        for direction in DIRECTIONS:
            for asked in (dict(grid=3, cluster=2), dict(grid=3, cluster=2, lag=9)):
                check(name, direction, 9, 1024, asked, groups=1)


def plan_of(name, direction, rows, columns, device=H100, dtype=jnp.bfloat16, **asked):
    closed = program(name, direction, avals(name, rows, columns, dtype))
    return schedule(simplified(closed), device, **asked)


# The columns of test_row_plans.PLANS. Of rows that blocks share, 33*512 are the blocks of a group and the threads that
# compute, and `lag` is how many rows later a row is in its next phase.
PLANS = """
layer_norm 64x131072 forward           8*512 4x8        1 576x1   ring 6       0 persistent hoist lag 2
layer_norm 64x131072 backward          33*256 2x8        1 512x1   ring 14      0 persistent hoist 4 groups, lag 6
rms_norm 64x131072 forward             8*512 4x8        1 544x1   ring 5       0 persistent hoist lag 2
rms_norm 64x131072 backward            33*256 2x8        1 512x1   ring 14      0 persistent hoist 4 groups, lag 8
softmax 64x131072 forward              8*512 4x8        1 640x1   ring 4       0 persistent 16 groups, lag 4
softmax 64x131072 backward             8*512 4x8        1 544x1   ring 3       0 persistent lag 1
log_softmax 64x131072 forward          8*512 4x8        1 640x1   ring 4       0 persistent 16 groups, lag 4
log_softmax 64x131072 backward         8*512 4x8        1 544x1   ring 3       0 persistent lag 1
cross_entropy 64x131072 forward         1024 4x8*4      1 1024x1  stream       0
cross_entropy 64x131072 backward       8*512 4x8        1 640x1   ring 4       0 persistent 16 groups, lag 4
layer_norm 32x65536 forward            8*512 2x8        1 640x1   ring 2       0 persistent hoist 16 groups, lag 1
layer_norm 32x65536 backward           32*256 1x8        1 768x1   ring 8       0 persistent hoist 4 groups, lag 4
rms_norm 32x65536 forward              8*512 2x8        1 576x1   ring 2       0 persistent hoist 16 groups, lag 2
rms_norm 32x65536 backward             32*256 1x8        1 512x1   ring 8       0 persistent hoist 4 groups, lag 8
softmax 32x65536 forward               8*512 2x8        1 576x1   ring 2       0 persistent 16 groups, lag 2
softmax 32x65536 backward              8*512 2x8        1 576x1   ring 2       0 persistent 16 groups, lag 2
log_softmax 32x65536 forward           8*512 2x8        1 576x1   ring 2       0 persistent 16 groups, lag 2
log_softmax 32x65536 backward          8*512 2x8        1 576x1   ring 2       0 persistent 16 groups, lag 2
cross_entropy 32x65536 forward         8*512 2x8        1 576x1   ring 2       0 persistent 16 groups, lag 2
cross_entropy 32x65536 backward        8*512 2x8        1 576x1   ring 2       0 persistent 16 groups, lag 2
layer_norm 12x131072 forward           22*384 2x8        1 512x1   ring 2       0 persistent hoist 6 groups, lag 1
layer_norm 12x131072 backward          128*128 1x8        1 640x1   ring 12      0 persistent hoist 1 groups, lag 6
rms_norm 12x131072 forward             22*384 2x8        1 448x1   ring 2       0 persistent hoist 6 groups, lag 2
rms_norm 12x131072 backward            128*128 1x8        1 384x1   ring 12      0 persistent hoist 1 groups, lag 12
softmax 12x131072 forward              11*512 3x8        1 544x1   ring 1       0 persistent 12 groups, lag 1
softmax 12x131072 backward             11*512 3x8        1 544x1   ring 1       0 persistent 12 groups, lag 1
log_softmax 12x131072 forward          11*512 3x8        1 544x1   ring 1       0 persistent 12 groups, lag 1
log_softmax 12x131072 backward         11*512 3x8        1 544x1   ring 1       0 persistent 12 groups, lag 1
cross_entropy 12x131072 forward        11*512 3x8        1 544x1   ring 1       0 persistent 12 groups, lag 1
cross_entropy 12x131072 backward       11*512 3x8        1 544x1   ring 1       0 persistent 12 groups, lag 1
layer_norm 16x262144 forward           33*512 2x8        1 768x1   ring 4       0 persistent hoist 4 groups, lag 2
layer_norm 16x262144 backward          66*256 2x8        1 512x1   ring 8       0 persistent hoist 2 groups, lag 4
rms_norm 16x262144 forward             33*512 2x8        1 640x1   ring 4       0 persistent hoist 4 groups, lag 4
rms_norm 16x262144 backward            66*256 2x8        1 512x1   ring 8       0 persistent hoist 2 groups, lag 8
softmax 16x262144 forward              16*512 4x8        1 576x1   ring 2       0 persistent 8 groups, lag 2
softmax 16x262144 backward             33*512 2x8        1 640x1   ring 4       0 persistent 4 groups, lag 4
log_softmax 16x262144 forward          16*512 4x8        1 576x1   ring 2       0 persistent 8 groups, lag 2
log_softmax 16x262144 backward         33*512 2x8        1 640x1   ring 4       0 persistent 4 groups, lag 4
cross_entropy 16x262144 forward        8*512 8x8        1 544x1   ring 1       0 persistent 16 groups, lag 1
cross_entropy 16x262144 backward       16*512 4x8        1 576x1   ring 2       0 persistent 8 groups, lag 2
layer_norm 8x1048576 forward           132*512 2x8        1 1024x1  ring 8       0 persistent hoist 1 groups, lag 4
layer_norm 8x1048576 backward          132*512 2x8        1 768x1   ring 6       0 persistent hoist 1 groups, lag 2
rms_norm 8x1048576 forward             132*512 2x8        1 768x1   ring 8       0 persistent hoist 1 groups, lag 8
rms_norm 8x1048576 backward            132*512 2x8        1 704x1   ring 6       0 persistent hoist 1 groups, lag 4
softmax 8x1048576 forward              66*512 4x8        1 640x1   ring 4       0 persistent 2 groups, lag 4
softmax 8x1048576 backward             132*512 2x8        1 704x1   ring 6       0 persistent 1 groups, lag 4
log_softmax 8x1048576 forward          66*512 4x8        1 640x1   ring 4       0 persistent 2 groups, lag 4
log_softmax 8x1048576 backward         132*512 2x8        1 704x1   ring 6       0 persistent 1 groups, lag 4
cross_entropy 8x1048576 forward        16*512 16x8       1 544x1   ring 1       0 persistent 8 groups, lag 1
cross_entropy 8x1048576 backward       66*512 4x8        1 640x1   ring 4       0 persistent 2 groups, lag 4
layer_norm 1x131072 forward            128*128 1x8        1 192x1   ring 2       0 persistent 1 groups, lag 1
layer_norm 1x131072 backward           128*128 1x8        1 192x1   ring 2       0 persistent 1 groups, lag 1
rms_norm 1x131072 forward              128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
rms_norm 1x131072 backward             128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
softmax 1x131072 forward               128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
softmax 1x131072 backward              128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
log_softmax 1x131072 forward           128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
log_softmax 1x131072 backward          128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
cross_entropy 1x131072 forward         128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
cross_entropy 1x131072 backward        128*128 1x8        1 160x1   ring 1       0 persistent 1 groups, lag 1
"""


def steps_line(name, direction, shape, plan):
    """A line of the table."""
    text = line(f"{name} {'x'.join(map(str, shape))}", direction, plan)
    groups = f" {plan.grid} groups," if plan.grid else ""
    return f"{text}{groups} lag {plan.lag}" if plan.in_steps else text


SHAPES = ((64, 131072), (32, 65536), (12, 131072), (16, 262144), (8, 1048576), (1, 131072))


def test_table_of_plans():
    """What `schedule` decides for few, very long rows."""
    found = [
        steps_line(name, direction, shape, plan_of(name, direction, *shape))
        for shape in SHAPES
        for name in FUNCTIONS
        for direction in DIRECTIONS
    ]
    wanted = PLANS.strip().splitlines()
    changed = [text for text in found if text not in wanted]
    assert not changed, "lines for PLANS:\n" + "\n".join(changed)
    assert wanted == found


@needs_nvrtc
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", DEVICES)
def test_resources(shape, architecture):
    """No spills, and what a multiprocessor has."""
    device = DEVICES[architecture]
    for name in FUNCTIONS:
        for direction in DIRECTIONS:
            closed = program(name, direction, avals(name, *shape))
            plan = schedule(simplified(closed), device)
            if not plan.in_steps:
                continue
            assert device.clusters
            call = row_call(closed, device, plan)
            compiled = launcher.compile(call.source, architecture)
            assert max(compiled.spill_bytes.values()) <= SPILLS
            assert call.shared_bytes <= device.shared_bytes
            assert call.threads <= 1024
            assert plan.grid * plan.cluster <= device.multiprocessors
            assert call.together == (plan.grid > 0)
            assert tune.can_run(simplified(closed), device, plan)


def test_where_rows_are_shared():
    """Few rows that are long, whose number is known, on a GPU with bulk copies."""
    assert plan_of("softmax", "forward", 32, 131072).grid
    # More rows of one array are shared if all blocks together hold them, and the array is written too.
    for rows, columns in ((64, 131072), (96, 131072), (80, 65536)):
        assert plan_of("softmax", "forward", rows, columns).grid == 16
    for rows, columns in ((100, 131072), (96, 151936), (32, 32768), (32, 131072 + 1)):
        assert not plan_of("softmax", "forward", rows, columns).grid
    assert not plan_of("cross_entropy", "forward", 64, 131072).grid
    assert not plan_of("softmax", "forward", 32, 131072, DEVICES[80]).grid
    assert not plan_of("softmax", "forward", 32, 131072, source="stream").grid
    assert not plan_of("softmax", "forward", 32, 131072, grid=0).grid
    # Sums over rows end in the blocks of one group where rows are few. Each of several groups has eight rows or more.
    for rows, columns, groups in (
        (8, 1048576, 1),
        (16, 131072, 2),
        (64, 32000, 8),
        (256, 16384, 16),
        (64, 131072, 4),
    ):
        assert plan_of("layer_norm", "backward", rows, columns).grid == groups
    for rows, columns in ((300, 131072), (128, 12288)):
        assert not plan_of("layer_norm", "backward", rows, columns).grid
    # One exchange: each group has one row. Longer rows that are written are read while other ones are written.
    for rows, columns, groups in ((12, 131072, 12), (8, 1048576, 2)):
        assert plan_of("softmax", "forward", rows, columns).grid == groups
    (rows,) = jax.export.symbolic_shape("rows")
    closed = program("softmax", "forward", avals("softmax", rows, 131072))
    assert not schedule(simplified(closed), H100).grid
    # Sums are not added up by the blocks of several groups for each of them.
    x = jax.ShapeDtypeStruct((4, 16, 131072), jnp.bfloat16)
    kept = jax.make_jaxpr(lambda x: (softmax(x), jnp.sum(wide(softmax(x)), 1)))(x)
    assert not schedule(simplified(kept), H100).grid


def test_where_clusters_have_several_rows():
    """Long rows with operands of columns that fill registers, and few rows with two operands."""

    def steps(*args, **asked):
        plan = plan_of(*args, **asked)
        return plan.in_steps and not plan.grid

    assert steps("layer_norm", "forward", 2048, 65536)
    assert steps("layer_norm", "forward", 2048, 32768, dtype=jnp.float32)
    assert steps("rms_norm", "forward", 2048, 131072)
    assert steps("softmax", "backward", 64, 131072)
    for rows, columns in ((2048, 32768), (2048, 50257), (2048, 300_000)):
        assert not steps("layer_norm", "forward", rows, columns)
    assert not steps("layer_norm", "backward", 2048, 65536)
    assert not steps("softmax", "backward", 256, 131072)
    assert not steps("softmax", "forward", 64, 131072)
    # Arrays in the L2 cache have schedules of their own.
    x, scale = jax.ShapeDtypeStruct((132, 8192), jnp.bfloat16), avals("layer_norm", 1, 8192)[1]
    residual = jax.make_jaxpr(lambda x, y, scale: layer_norm(x + y, scale, scale))(x, x, scale)
    assert schedule(simplified(residual), H100).source == "ring"
    assert not schedule(simplified(residual), H100).in_steps
    assert not steps("layer_norm", "forward", 2048, 65536, DEVICES[80])
    for asked in (dict(source="ring"), dict(cluster=4), dict(blocks=2)):
        assert not steps("layer_norm", "forward", 2048, 65536, **asked)
    (rows,) = jax.export.symbolic_shape("rows")
    assert steps("layer_norm", "forward", rows, 65536)
    assert steps("cross_entropy", "backward", rows, 65536, source="ring", cluster=8, lag=1)
    # The partial result of a float64 is two words.
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(softmax)(jax.ShapeDtypeStruct((64, 16384), jnp.float64))
        assert not schedule(simplified(closed), H100, source="ring", cluster=8, lag=1).in_steps


def test_candidates():
    """What `tune` measures."""
    closed = program("softmax", "forward", avals("softmax", 32, 131072))
    found = tune.candidates(simplified(closed), H100)
    plans = [plan for _, plan in found]
    assert plans[0].grid
    assert len({(plan.grid, plan.lag) for plan in plans}) > 6
    assert any(not plan.in_steps for plan in plans)
    assert any(plan.in_steps and not plan.grid for plan in plans)
    for asked, plan in found:
        assert schedule(simplified(closed), H100, **asked) == plan
        assert all(value in tune.FIELDS[field] for field, value in asked.items())


def test_phases_have_stages():
    """A row's stage is not needed before the row's last phase, whatever is asked for."""
    for lag in range(1, 9):
        for stages in range(1, 9):
            plan = plan_of("layer_norm", "backward", 64, 131072, lag=lag, stages=stages, grid=1)
            if plan.grid:
                assert plan.stages >= 2 * plan.lag + (2 if plan.stages < 64 else 0)
                assert plan.stages >= plan.exchangers
            else:
                assert stages < 4


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_gpu(name, shape):
    """Values, and the same bits in each run: XLA captures several calls in a graph and replays it."""
    function, moving, reference = FUNCTIONS[name]
    *given, dy = drawn(name, *shape, np.dtype(jnp.bfloat16))
    fused = jaxnorm.fuse(function)

    @jax.jit
    def both(dy, *given):
        y, pullback = jax.vjp(lambda *a: fused(*a, *given[moving:]), *given[:moving])
        return y, pullback(dy)

    @jax.jit
    def several(dy, *given):
        return [both(dy * sign, *given) for sign in (1, -1, 1, -1)]

    device_arrays = jax.device_put((dy, *given))
    found = jax.device_get(both(*device_arrays))
    exact = [a.astype(np.float64) if a.dtype != np.int32 else a for a in (dy, *given)]
    y, gradients = reference(exact[1], exact[0], *exact[2:])
    for got, want in zip(jax.tree.leaves(found), (y, *gradients), strict=True):
        assert error(got, want) < (1e-2 if got.dtype == jnp.bfloat16 else 1e-5)
    for _ in range(5):
        for again in several(*device_arrays)[::2]:
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
                np.testing.assert_array_equal(a, np.asarray(b))


@needs_emulator
def test_a_post_that_never_comes_shows():
    closed = program("softmax", "forward", avals("softmax", 2, 1024))
    plan = schedule(simplified(closed), SMALL, grid=1)
    call = row_call(closed, SMALL, plan)
    silent = call.source.replace("post_write(own_posts", "if (rank) post_write(own_posts")
    assert silent != call.source
    x = np.ones((2, 1024), jnp.bfloat16)
    with pytest.raises(row_emulator.EmulatorError, match="wait at post_read"):
        row_emulator.run(
            dataclasses.replace(call, source=silent), [x], [(x.shape, x.dtype)], resident_blocks=1
        )
