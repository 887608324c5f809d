"""Random programs around an operation, sharded over CPU devices, against the same program on one device.

    python tests/fuzz_sharding.py --seconds 600    # new programs for so long, as `make fuzz SECONDS=600`
    python tests/fuzz_sharding.py 'Program(...)'   # one, as a failure prints it

A program must return what it returns on one device, or raise what it raises with plain formulas in place of the
operation. Where devices do not divide its sizes, its collectives move no more bytes than those of the plain formulas,
but for a few numbers per row and the mask of a ReLU.
"""

import argparse
import collections
import dataclasses
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import conftest  # noqa: F401  settings that must be made before jax starts a backend
import hlo
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import CPUS, KINDS, put, scope

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx

inf, nan = np.inf, np.nan  # as they are in a reproducer

NORMS = ("layer_norm", "rms_norm")
BATCH_NORMS = ("batch_norm", "batch_norm_inference")
SOFTMAXES = ("softmax", "log_softmax")
OPS = (*SOFTMAXES, *NORMS, *BATCH_NORMS, "softmax_cross_entropy", "relu", "add_relu")
DERIVATIVES = ("value", "jvp", "grad", "second")
MESHES = ((2,), (4,), (2, 2), (3,), (8,), (2, 4), (5,), (3, 2), (6,), (7,), (4, 2))
if jax.__version_info__ >= (0, 12):
    # XLA aborts where it cuts elements away that lie on both axes of such a mesh, with plain formulas too.
    MESHES = tuple(m for m in MESHES if m != (3, 2))
MAX_SIZE = 1500  # elements of an array


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps, an operation, and steps again; and how its arguments lie on devices.

    Attributes:
      op: name of the operation.
      shape: of the argument x.
      spec: for each dimension of x the mesh axes, of "d" and "m", that cut it.
      mesh: sizes of the mesh axes.
      before: steps from x to the operation's operand; `run_step` says what there is.
      options: arguments of the operation that are not arrays.
      arrays: those that are, as (where it lies, the operand's dimensions that it has); see `_array`.
      after: steps from the operation's (first) result.
      wrapper: how the operation is called, with details; see `_wrapped`.
      derivative: what of all that is computed.
      explicit: whether the mesh axes are Explicit, or else Auto.
      dtype: of x and of the arrays.
      cut: what is in elements that the steps before the operation cut away.
      seed: of the values, and whether some labels are no class (if it is odd).
    """

    op: str
    shape: tuple[int, ...]
    spec: tuple[str, ...]
    mesh: tuple[int, ...] = (2,)
    before: tuple[tuple, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: dict[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    after: tuple[tuple, ...] = ()
    wrapper: tuple = ("call",)
    derivative: str = "value"
    explicit: bool = False
    dtype: str = "float32"
    cut: float = nan
    seed: int = 0

    def __repr__(self):
        shown = [f for f in dataclasses.fields(self) if f.name in _REQUIRED or self._changed(f)]
        return f"Program({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def _changed(self, field):
        default = {} if field.default is dataclasses.MISSING else field.default
        return repr(getattr(self, field.name)) != repr(default)


_REQUIRED = ("op", "shape", "spec")


# ---- steps ----


def run_step(step, x, mesh=None, linear=False):
    """One step, on a mesh or on one device; `linear` sums where the step takes a maximum."""
    middle = range(1, x.ndim - 1)
    match step:
        case ("slice", axis, start, stop, stride):
            return lax.slice_in_dim(x, start, stop, stride, axis)
        case ("pad", axis, low, high, interior):
            widths = [(low, high, interior) if i == axis else (0, 0, 0) for i in range(x.ndim)]
            return lax.pad(x, jnp.asarray(0.5, x.dtype), widths)
        case ("concatenate", axis):
            return jnp.concatenate([x, x], axis)
        case ("flip", axis):
            return jnp.flip(x, axis)
        case ("merge", axis):
            return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        case ("split", axis, size):
            return x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :])
        case ("transpose", order):
            return x.transpose(order)
        case ("constrain", spec):
            if mesh is None:
                return x
            explicit = mesh.axis_types[0] == KINDS["explicit"]
            constrain = jax.sharding.reshard if explicit else lax.with_sharding_constraint
            return constrain(x, jax.NamedSharding(mesh, _partition(spec)))
        case ("convolve", window, stride):  # over all but the first and the last dimension
            shape = (*(window for _ in middle), x.shape[-1], x.shape[-1])
            # Powers of two, positive: exact, and no output is without its inputs.
            powers = np.random.default_rng(0).integers(0, 2, shape)
            kernel = 2.0 ** (powers - math.ceil(math.log2(math.prod(shape[:-1]))))
            letters = "HW"[: len(middle)]
            names = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
            strides = [stride for _ in middle]
            kernel = jnp.asarray(kernel, x.dtype)
            return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=names)
        case ("pool", kind, axis, window, stride):
            window, stride = (
                [n if i == axis else 1 for i in range(x.ndim)] for n in (window, stride)
            )
            maximum = kind == "max" and not linear
            start, function = (-inf, lax.max) if maximum else (0.0, lax.add)
            start = np.asarray(start, x.dtype)
            return lax.reduce_window(x, start, function, window, stride, "SAME")
    raise ValueError(step)


def spec_after(step, spec):
    """Where a step leaves the mesh axes, as a rule: XLA may choose otherwise."""
    match step:
        case ("transpose", order):
            return tuple(spec[i] for i in order)
        case ("constrain", chosen):
            return chosen
        case ("merge", axis):
            return (*spec[: axis + 1], *spec[axis + 2 :])
        case ("split", axis, _):
            return (*spec[: axis + 1], "", *spec[axis + 1 :])
    return spec


def _trace(steps, shape, spec):
    """Shapes and specs before and after each of the steps."""
    found = [(shape, spec)]
    for step in steps:
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        shape = jax.eval_shape(lambda x, step=step: run_step(step, x), x).shape
        spec = spec_after(step, spec)
        found.append((shape, spec))
    return found


# ---- plain formulas, as people write them and autofuse finds them ----


def _affine(y, scale, bias, axes, offset=0.0):
    others = [i for i in range(y.ndim) if i not in axes]
    y = y if scale is None else y * jnp.expand_dims(scale + offset, others)
    return y if bias is None else y + jnp.expand_dims(bias, others)


def _tuple(axis):
    return axis if isinstance(axis, tuple) else (axis,)


def _softmax(function):
    def formula(x, axis, where=None, scale=None, bias=None):
        x = x if scale is None else x * scale
        x = x if bias is None else x + bias
        return function(x, axis, where=where)

    return formula


def _layer_norm(x, scale=None, bias=None, *, axis, epsilon, residual=None, mask=None):
    x = x if residual is None else x + residual
    mean = jnp.mean(x, axis, keepdims=True, where=mask)
    variance = jnp.mean(jnp.square(x - mean), axis, keepdims=True, where=mask)
    y = _affine((x - mean) * lax.rsqrt(variance + epsilon), scale, bias, _tuple(axis))
    return y if residual is None else (y, x)


def _rms_norm(x, scale=None, *, axis, epsilon, scale_offset=0.0, residual=None, mask=None):
    x = x if residual is None else x + residual
    square = jnp.mean(jnp.square(x), axis, keepdims=True, where=mask)
    y = _affine(x * lax.rsqrt(square + epsilon), scale, None, _tuple(axis), scale_offset)
    return y if residual is None else (y, x)


def _batch_norm(x, scale=None, bias=None, *, axis, epsilon, mask=None, **after):
    features = _tuple(axis)
    axes = tuple(i for i in range(x.ndim) if i not in features)
    mean = jnp.mean(x, axes, where=mask)
    variance = jnp.mean(jnp.square(x - jnp.expand_dims(mean, axes)), axes, where=mask)
    y = _batch_norm_inference(x, mean, variance, scale, bias, axis=axis, epsilon=epsilon, **after)
    return y, mean, variance


def _batch_norm_inference(
    x, mean, var, scale=None, bias=None, *, axis, epsilon, residual=None, activation=None
):
    features = _tuple(axis)
    mean, var = (
        jnp.expand_dims(a, [i for i in range(x.ndim) if i not in features]) for a in (mean, var)
    )
    y = _affine((x - mean) * lax.rsqrt(var + epsilon), scale, bias, features)
    y = y if residual is None else y + residual
    return y if activation is None else jax.nn.relu(y)


def _cross_entropy(x, labels, *, axis, where=None, label_smoothing=0.0, z_loss=0.0):
    lse = jax.nn.logsumexp(x, axis, where=where)
    picked = jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis).squeeze(axis)
    if not label_smoothing and not z_loss:
        return lse - picked
    mean = jnp.mean(x, axis, where=where)
    return lse - (1 - label_smoothing) * picked - label_smoothing * mean + z_loss * lse**2


FORMULAS = {
    "softmax": _softmax(jax.nn.softmax),
    "log_softmax": _softmax(jax.nn.log_softmax),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "batch_norm_inference": _batch_norm_inference,
    "softmax_cross_entropy": _cross_entropy,
    "relu": jax.nn.relu,
    "add_relu": lambda x, y: jax.nn.relu(x + y),
}


# ---- the operation, and how it is called ----


def _call(program, plain):
    """(operand, arrays) -> tuple of results, without what is around the operation."""
    function = (FORMULAS if plain else vars(jaxnorm))[program.op]

    def call(x, arrays):
        out = function(x, **arrays, **program.options)
        return out if isinstance(out, tuple) else (out,)

    return call


def _by_flax(program):
    """The same by a module of jaxnorm.linen or jaxnorm.nnx."""
    (library,) = program.wrapper
    training, norm = program.op == "batch_norm", program.op in NORMS
    name = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}.get(program.op, "BatchNorm")
    options = dict(program.options)
    axis = options.pop("axis")
    options |= {"reduction_axes": axis, "feature_axes": axis} if norm else {"axis": axis}
    options |= {} if norm else {"momentum": 0.0, "use_running_average": not training}

    def call(x, arrays):
        arrays = dict(arrays)
        names = ("scale",) if program.op == "rms_norm" else ("scale", "bias")
        parameters = {n: arrays.pop(n) for n in names if n in arrays}
        used = {f"use_{n}": n in parameters for n in names}
        zeros = None if norm else jnp.zeros([x.shape[a] for a in _tuple(axis)], x.dtype)
        stats = {} if norm else {n: arrays.pop(n, zeros) for n in ("mean", "var")}
        if library == "linen":
            layer = getattr(jaxnorm.linen, name)(**options, **used)
            variables = {"params": parameters, "batch_stats": stats}
            y, changed = layer.apply(variables, x, **arrays, mutable=["batch_stats"])
            stats = changed.get("batch_stats")
        else:
            kw = {**options, **used, "rngs": nnx.Rngs(0)}
            layer = getattr(jaxnorm.nnx, name)(x.shape[axis], **kw)
            for n, value in parameters.items():
                setattr(layer, n, nnx.Param(value))
            for n, value in stats.items():
                setattr(layer, n, nnx.BatchStat(value))
            y = layer(x, **arrays)
            stats = {n: getattr(layer, n)[...] for n in stats}
        return (y, stats["mean"], stats["var"]) if training else (y,)

    return call


def _wrapped(program, plain):
    """(operand, arrays) -> tuple of results, as the program calls it."""
    call = _call(program, plain)
    match program.wrapper:
        case (
            "vmap",
            at,
            mapped,
        ):  # the operand's axis, and whether the arrays have it too, in front
            return jax.vmap(call, (at, 0 if mapped else None))
        case ("map",):  # lax.map over the operand's first axis
            return lambda x, arrays: lax.map(lambda row: call(row, arrays), x)
        case ("scan",):  # twice in a row

            def body(x, arrays):
                y, *rest = call(x, arrays)
                return y, rest

            return lambda x, arrays: lax.scan(lambda c, _: body(c, arrays), x, None, 2)
        case ("checkpoint",):
            return jax.checkpoint(call)
        case ("autofuse",):
            return call if plain else jaxnorm.autofuse(_call(program, plain=True))
        case ("linen",) | ("nnx",):
            return call if plain else _by_flax(program)
    return call


def _mapped_axis(program):
    """The operand's axis that the operation itself does not see."""
    return {"vmap": program.wrapper[1:2], "map": (0,)}.get(program.wrapper[0], ())


def _own_axes(program, rank):
    """Those that it does see."""
    return [i for i in range(rank) if i not in _mapped_axis(program)]


def _after_operation(program, entries):
    """Sizes, or spec entries, of the (first) result, given those of the operand."""
    own = _own_axes(program, len(entries))
    if program.op == "softmax_cross_entropy":
        del own[program.options["axis"]]
    return tuple(entries[i] for i in (*_mapped_axis(program), *own))


# ---- arguments ----


def _partition(spec):
    return P(*(tuple(names) or None for names in spec))


def _blocks(program, names):
    return math.prod(program.mesh["dm".index(n)] for n in names)


def _array(program, name, shape, spec):
    """Shape and spec of an array, given the operand's: like it, or over all devices along its first axis, or whole."""
    place, dims = program.arrays[name]
    own = _own_axes(program, len(shape))
    axes = [own[i] for i in dims]
    if name in ("where", "mask") or program.op in SOFTMAXES:
        axes = [i if i in axes else None for i in own]  # the others have size 1
    if program.wrapper[0] == "vmap" and program.wrapper[2]:
        axes = [program.wrapper[1], *axes]
    size = tuple(1 if i is None else shape[i] for i in axes)
    like = ["" if i is None or place != "like" else spec[i] for i in axes]
    if place == "first" and axes and axes[0] is not None:
        like[0] = "dm"[: len(program.mesh)]
    return size, tuple(like)


def _values(rng, program, name, shape, classes):
    """Eighths, so that what steps make of them is exact, but for biases: no ReLU of almost 0."""
    eighths = rng.integers(-16, 17, shape) / 8
    match name:
        case "labels":
            return rng.integers(*((-1, classes + 1) if program.seed % 2 else (0, classes)), shape)
        case "where" | "mask":
            keep = rng.random(shape) < 0.7
            for axis in range(len(shape)):  # no row is without one
                np.moveaxis(keep, axis, 0)[0] = True
            return keep
        case "scale":
            eighths = 1 + eighths / 4
        case "bias":
            eighths = eighths / 2 + 0.037
        case "var":
            eighths = 1.0 + abs(eighths)
        case "x" | "mean":
            eighths = eighths + (0, 3, 20)[program.seed % 3]
    return eighths.astype(program.dtype)


def arguments(program):
    """(x, arrays), their specs, and the sizes to which the program cuts its arrays."""
    rng = np.random.default_rng(program.seed)
    x = _values(rng, program, "x", program.shape, None)
    if any(step[0] == "slice" for step in program.before):

        def reached(x):
            for step in program.before:
                x = run_step(step, x, linear=True)
            return jnp.sum(x)

        ones = jax.device_put(np.ones_like(x), CPUS[0])
        x = np.where(np.asarray(jax.jit(jax.grad(reached))(ones)) > 0, x, x.dtype.type(program.cut))
    shape, spec = _trace(program.before, program.shape, program.spec)[-1]
    own = [shape[i] for i in _own_axes(program, len(shape))]
    classes = own[program.options["axis"]] if program.op == "softmax_cross_entropy" else None
    arrays, specs, sizes = {}, {}, {}
    for name in sorted(program.arrays):
        sizes[name], specs[name] = _array(program, name, shape, spec)
        blocks = [_blocks(program, names) for names in specs[name]]
        padded = [-n // b * -b for n, b in zip(sizes[name], blocks, strict=True)]
        rest = {"b": True, "i": 0}.get(
            (a := _values(rng, program, name, padded, classes)).dtype.kind
        )
        kept = tuple(slice(n) for n in sizes[name])
        arrays[name] = np.full_like(a, program.cut if rest is None else rest)
        arrays[name][kept] = a[kept]
    return (x, arrays), (program.spec, specs), sizes


def divides(program):
    """Whether devices divide what is cut of x, and of what becomes of it up to the operation."""
    places = _trace(program.before, program.shape, program.spec)
    return all(
        n % _blocks(program, names) == 0 for p in places for n, names in zip(*p, strict=True)
    )


# ---- running ----


def function_of(program, sizes, mesh=None, plain=False):
    """The program, as a function of x and the arrays."""

    def forward(x, arrays):
        for step in program.before:
            x = run_step(step, x, mesh)
        for name, size in sizes.items():
            if arrays[name].shape != size:
                arrays = arrays | {name: lax.slice(arrays[name], (0,) * len(size), size)}
        y, *rest = _wrapped(program, plain)(x, arrays)
        for step in program.after:
            y = run_step(step, y, mesh)
        return y, *rest

    def differentiable(x, arrays):
        floats = {n: a for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        return lambda x, floats: forward(x, arrays | floats), (x, floats)

    def tangent(f, args):
        return jax.jvp(f, args, jax.tree.map(jnp.cos, args))

    def gradient(f):
        return jax.grad(
            lambda *args: sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(f(*args))), (0, 1)
        )

    def derivative(x, arrays):
        f, args = differentiable(x, arrays)
        match program.derivative:
            case "jvp":
                return tangent(f, args)
            case "grad":
                return gradient(f)(*args)
            case "second":
                return tangent(gradient(f), args)
        return f(*args)

    return derivative


def run(program, sharded, plain=False):
    """(compiled program, results) on the mesh, or on one device of it."""
    args, specs, sizes = arguments(program)
    if not sharded:
        return hlo.run(function_of(program, sizes, plain=plain), *jax.device_put(args, CPUS[0]))
    axes = "dm"[: len(program.mesh)]
    types = (KINDS["explicit" if program.explicit else "auto"],) * len(axes)
    devices = CPUS[: math.prod(program.mesh)]
    mesh = jax.make_mesh(program.mesh, tuple(axes), axis_types=types, devices=devices)
    with scope(mesh):
        args = jax.tree.map(lambda a, spec: put(a, _partition(spec), mesh), args, specs)
        return hlo.run(function_of(program, sizes, mesh, plain), *args)


def assert_close(got, want, dtype):
    """Relative to an array's largest element; or to that of all, or to 1: a gradient may be 0 but for rounding."""

    def size(a):
        return np.abs(a[np.isfinite(a)]).max(initial=0)

    got, want = ([np.asarray(a) for a in jax.tree.leaves(tree)] for tree in (got, want))
    floor = max(1e-2 * max(map(size, want)), 0.1)
    for a, b in zip(got, want, strict=True):
        tolerance = {"float32": 1e-3, "float64": 1e-9}[dtype] * max(size(b), floor)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def traffic(text):
    """Bytes of a compiled program's collectives."""
    return sum(c.bytes for c in hlo.collectives(text))


def mask_bytes(program):
    """Bytes of a ReLU's mask, which an all-reduce may sum where devices share bytes of it; 0 where it has none."""
    relu = "relu" in program.op or "activation" in program.options
    if program.derivative == "value" or not relu:
        return 0
    shape, _ = _trace(program.before, program.shape, program.spec)[-1]
    return math.prod(shape[:-1]) * -(-shape[-1] // 8)


# Numbers per row (or feature), at most, that a program sends beyond the plain formula's: for means that are as exact as
# on one device, and where XLA merges reductions of its own formulas that are of two of ours. Programs of tangents are
# formulas on both sides, and not counted.
EXTRA_NUMBERS = {"value": 4, "grad": 8}


def number_bytes(program):
    """Bytes of one number for each row or feature."""
    shape, _ = _trace(program.before, program.shape, program.spec)[-1]
    own = [shape[i] for i in _own_axes(program, len(shape))]
    axis = program.options.get("axis", ())
    axes = range(len(own)) if axis is None else np.atleast_1d(axis).astype(int) % len(own)
    features = program.op in BATCH_NORMS
    kept = [n for i, n in enumerate(own) if (i in axes) == features]
    mapped = [shape[i] for i in _mapped_axis(program)]
    return math.prod(kept + mapped) * np.dtype(program.dtype).itemsize


def check_traffic(program, text, plain_text):
    """No more bytes than with plain formulas, but for a few numbers per row and the mask of a ReLU."""
    ours, plain = traffic(text), traffic(plain_text)
    extra = EXTRA_NUMBERS[program.derivative] * number_bytes(program)
    allowed = plain + mask_bytes(program) + extra
    assert ours <= allowed, (
        f"{ours} bytes in collectives, {plain} with plain formulas, {allowed} allowed: {program}"
    )


def check(program, with_traffic=True) -> str:
    """What the program is: "even", "uneven", "error", or "xla" if plain formulas too are wrong; fails if jaxnorm is."""
    _, want = run(program, sharded=False)
    try:
        text, got = run(program, sharded=True)
    except Exception:
        try:
            run(program, sharded=True, plain=True)
        except Exception:  # at the same place, or at one before
            return "error"
        raise
    try:
        assert_close(got, want, program.dtype)
    except AssertionError:
        # Whether it is the plain program that XLA partitions wrongly.
        try:
            _, plain = run(program, sharded=True, plain=True)
            assert_close(plain, run(program, sharded=False, plain=True)[1], program.dtype)
        except Exception:
            return "xla"
        raise
    if divides(program):
        return "even"
    # Where parameters are cut unlike x, or a loop goes over what is cut, XLA chooses what to gather.
    counted = program.derivative in EXTRA_NUMBERS and program.wrapper[0] != "map"
    counted = counted and all(place != "first" for place, _ in program.arrays.values())
    if with_traffic and counted and traffic(text):
        check_traffic(program, text, run(program, sharded=True, plain=True)[0])
    return "uneven"


# ---- drawing programs ----


def _some(draw, items, minimum=0):
    """Some of the items, in order."""
    chosen = draw(st.sets(st.sampled_from(items), min_size=minimum)) if items else ()
    return tuple(i for i in items if i in chosen)


def _draw_spec(draw, mesh, rank):
    spec = [""] * rank
    for name in "dm"[: len(mesh)]:
        spec[draw(st.integers(0, rank - 1))] += name
    return tuple(spec)


def _axes_to_draw(spec):
    """The axes; those that are cut more often."""
    cut = [i for i, names in enumerate(spec) if names]
    return st.sampled_from([*range(len(spec)), *cut, *cut])


def _draw_step(draw, shape, spec, mesh, smooth):
    """A step for an array of this shape; a `smooth` one does not compare values, which need not be exact."""
    rank = len(shape)
    kinds = ["slice"] * 4 + ["pad", "concatenate", "flip", "transpose", "constrain", "pool"]
    kinds += (
        ["merge"] * (rank > 1) + ["split"] * (rank < 5) + ["convolve", "pool"] * (rank in (3, 4))
    )
    kind, axis = draw(st.sampled_from(kinds)), draw(_axes_to_draw(spec))
    n = shape[axis]
    match kind:
        case "slice":
            start = draw(st.integers(0, min(n - 1, 2)))
            stop = draw(st.integers(max(start + 1, n - 3), n))
            return kind, axis, start, stop, draw(st.sampled_from((1, 1, 2)))
        case "pad":
            interior = draw(st.sampled_from((0, 0, 1)))
            # XLA's partitioner aborts where a pad both removes elements and pads between them.
            widths = st.integers(-1 if n > 2 and not interior else 0, 2)
            return kind, axis, draw(widths), draw(widths), interior
        case "transpose":
            return kind, tuple(draw(st.permutations(range(rank))))
        case "constrain":
            return kind, _draw_spec(draw, mesh, rank)
        case "merge":
            return kind, min(axis, rank - 2)
        case "split":
            return kind, axis, draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
        case "convolve":
            return kind, draw(st.integers(2, 3)), draw(st.integers(1, 2))
        case "pool":
            of = draw(st.sampled_from(("sum",) if smooth else ("max", "sum")))
            # Of a maximum with stride 1 along a cut axis, the gradient of XLA's partitioner is another one.
            strides = st.integers(2 if of == "max" else 1, 3)
            return kind, of, axis, draw(st.integers(2, 3)), draw(strides)
    return kind, axis


def _draw_steps(draw, shape, spec, mesh, most, smooth=False):
    """Steps, with the shape and the spec behind them."""
    steps = []
    for _ in range(draw(st.integers(0, most)) if shape else 0):
        step = _draw_step(draw, shape, spec, mesh, smooth)
        # XLA's partitioner is wrong about the gradient of a convolution behind pooling with strides.
        pooled = any(kind == "pool" and stride > 1 for kind, *_, stride in steps)
        if step[0] == "convolve" and pooled:
            continue
        after = _trace([step], shape, spec)[-1]
        if math.prod(after[0]) <= MAX_SIZE:
            steps.append(step)
            shape, spec = after
    return tuple(steps), shape, spec


def _draw_operation(draw, op, spec):
    """Options, and arrays with their dimensions, of an operand that lies so."""
    rank, axes = len(spec), _axes_to_draw(spec)
    options, arrays, every = {}, {}, tuple(range(rank))
    optional: dict[str, Any] = {}
    if op in SOFTMAXES:
        options["axis"] = draw(axes) if draw(st.booleans()) else _some(draw, every, 1)
        optional = {n: _some(draw, every) for n in ("where", "scale", "bias")}
    elif op in NORMS:
        several = draw(st.booleans())
        options |= {"axis": _some(draw, every, 1) if several else (draw(axes),), "epsilon": 0.25}
        optional = {"scale": options["axis"], "mask": _some(draw, every), "residual": every}
        optional |= {"bias": options["axis"]} if op == "layer_norm" else {}
    elif op in BATCH_NORMS:
        options |= {"axis": (draw(st.sampled_from(every)),), "epsilon": 0.25}
        if rank > 2 and draw(st.booleans()):
            options["axis"] = _some(draw, every, 1)[: rank - 1]
        optional = {"scale": options["axis"], "residual": every}
        if op == "batch_norm":
            optional["mask"] = _some(draw, every)
        else:
            arrays |= dict.fromkeys(("mean", "var"), options["axis"])
        if draw(st.booleans()):
            options["activation"] = "relu"
            arrays["bias"] = options["axis"]
        else:
            optional["bias"] = options["axis"]
    elif op == "softmax_cross_entropy":
        options["axis"] = draw(axes)
        arrays["labels"] = tuple(i for i in every if i != options["axis"])
        optional["where"] = _some(draw, every)
        options |= {"label_smoothing": 0.25} if draw(st.booleans()) else {}
        options |= {"z_loss": 0.125} if draw(st.booleans()) else {}
    elif op == "add_relu":
        arrays["y"] = every
    arrays |= {n: dims for n, dims in optional.items() if draw(st.booleans())}
    return options, arrays


@st.composite
def programs(draw, ops=OPS, derivatives=DERIVATIVES):
    """Any program."""
    op, mesh = draw(st.sampled_from(ops)), draw(st.sampled_from(MESHES))
    explicit = draw(st.sampled_from((False,) * 5 + (True,)))
    derivative = draw(st.sampled_from(derivatives))
    rank = draw(st.sampled_from((2, 2, 3, 3, 4, 1)))
    spec = _draw_spec(draw, mesh, rank)
    shape = []
    for names in spec:
        blocks = math.prod(mesh["dm".index(n)] for n in names)
        most = MAX_SIZE // math.prod(shape) // math.prod(mesh) // blocks
        shape.append(blocks * draw(st.integers(1, max(1, min(most, 4 if names else 9)))))
    shape = tuple(shape)
    before, operand, operand_spec = _draw_steps(draw, shape, spec, mesh, 3)
    rank = len(operand)
    smallest = 2 if op in BATCH_NORMS else 1
    hypothesis.assume(rank >= smallest and math.prod(shape) <= 2 * MAX_SIZE)
    wrappers = [("call",), ("call",), ("checkpoint",), ("autofuse",)]
    if rank > smallest:
        wrappers += [("map",), ("vmap", draw(st.integers(0, rank - 1)), draw(st.booleans()))]
    if op != "softmax_cross_entropy":
        wrappers.append(("scan",))
    if op in NORMS + BATCH_NORMS:
        wrappers += [("linen",), ("nnx",)]
    wrapper = draw(st.sampled_from(wrappers))
    mapped = {"vmap": wrapper[1:2], "map": (0,)}.get(wrapper[0], ())
    own = [names for i, names in enumerate(operand_spec) if i not in mapped]
    options, arrays = _draw_operation(draw, op, own)
    if wrapper[0] in ("linen", "nnx"):
        options, arrays = _for_flax(op, options, arrays, wrapper[0])
    places = ("like", "whole") if explicit else ("like", "whole", "first")
    arrays = {n: (draw(st.sampled_from(places)), dims) for n, dims in arrays.items()}
    # Flax's statistics of float64 need a dtype promotion that the tests' settings forbid.
    kept = op == "batch_norm" and wrapper[0] in ("linen", "nnx")
    dtypes = ("float32",) if kept else ("float32", "float64")
    program = Program(
        op,
        shape,
        spec,
        mesh,
        before,
        options,
        arrays,
        (),
        wrapper,
        derivative,
        explicit,
        dtype=draw(st.sampled_from(dtypes)),
        cut=draw(st.sampled_from((nan, 300.0, inf))),
        seed=draw(st.integers(0, 5)),
    )
    result = (_after_operation(program, entries) for entries in (operand, operand_spec))
    after = _draw_steps(draw, *result, mesh, 2, derivative != "value")[0]
    return dataclasses.replace(program, after=after)


def _for_flax(op, options, arrays, library):
    """Arguments that the modules have: no residual of a norm, one feature axis in nnx and of BatchNorm."""
    axis = options["axis"]
    if op in BATCH_NORMS or library == "nnx":
        axis = axis[:1]
        options = options | {"axis": axis[0]}
    own = ("scale", "bias", "mean", "var")
    arrays = {n: axis if n in own else dims for n, dims in arrays.items()}
    return options, {n: dims for n, dims in arrays.items() if n != "residual" or op in BATCH_NORMS}


SETTINGS = hypothesis.settings(
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    report_multiple_bugs=False,
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
)


def bounded(run, seconds=30):
    """`run` for hypothesis, which may look for a smaller program for so long; it fails with a note of the program."""
    failures, since = {}, []

    def once(program):
        text = repr(program)
        if text in failures:
            raise failures[text]
        if since and time.monotonic() - since[0] > seconds:
            return
        try:
            run(program)
        except Exception as error:
            error.add_note(f'python tests/fuzz_sharding.py "{text}"')
            failures[text] = error
            since.append(time.monotonic())
            raise

    return once


# ---- for longer ----


def fuzz(seconds, seed, ops, with_traffic, log) -> bool:
    """Draws programs for so long; whether one failed. The last line of `log` is the one that runs."""
    start, found, failures = time.monotonic(), collections.Counter(), 0

    def counted(program):
        if time.monotonic() - start < seconds:
            log.write(f"{program!r}\n")
            log.flush()
            found[check(program, with_traffic)] += 1

    while time.monotonic() - start < seconds:
        seed += 1
        search = hypothesis.seed(seed)(hypothesis.given(programs(ops))(bounded(counted)))
        try:
            hypothesis.settings(SETTINGS, max_examples=50)(search)()
        except Exception as error:
            failures += 1
            note = getattr(error, "__notes__", [""])[0]
            print(f"FAILED: {type(error).__name__}: {error}\n{note}\n", flush=True)
        past = time.monotonic() - start
        rate = f"{past:.0f} s, {60 * found.total() / past:.0f} per minute"
        print(f"{rate}: {dict(found)}, {failures} failed", flush=True)
    return failures > 0


def replay(program, plain):
    """Says what the program does, or only runs it with plain formulas."""
    if plain:
        run(program, sharded=True, plain=True)
    elif (outcome := check(program, with_traffic=False)) == "error":
        print("error, with plain formulas too")
    else:
        bytes_of = [traffic(run(program, sharded=True, plain=p)[0]) for p in (False, True)]
        print(f"{outcome}; bytes in collectives: {bytes_of[0]}, with plain formulas {bytes_of[1]}")


def supervise(seconds, seed, ops, with_traffic) -> bool:
    """`fuzz`, in processes of some minutes: XLA may abort one, and each keeps all that it compiled."""
    end, failed, command = time.monotonic() + seconds, False, [sys.executable, __file__]
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA warns of what it has to gather
    with tempfile.NamedTemporaryFile("r") as log:
        while (left := end - time.monotonic()) > 0:
            options = ["--child", log.name, "--seed", str(seed), *(f"--op={op}" for op in ops)]
            options += [] if with_traffic else ["--no-traffic"]
            status = subprocess.run([*command, *options, f"--seconds={min(left, 300)}"]).returncode
            failed |= status == 1
            if status not in (0, 1):
                text = pathlib.Path(log.name).read_text().splitlines()[-1]
                plain = subprocess.run([*command, text, "--plain"], capture_output=True).returncode
                failed |= plain in (0, 1)
                print(
                    f"ABORTED{'' if plain in (0, 1) else ', with plain formulas too'}: {text}",
                    flush=True,
                )
            seed += 1000
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="?", help="a program to run instead of new ones")
    parser.add_argument("--plain", action="store_true", help="run it with plain formulas only")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6 * 1000)
    parser.add_argument("--op", choices=OPS, action="append")
    parser.add_argument("--no-traffic", action="store_true", help="do not count bytes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ops = args.op or OPS
    if args.program:
        return replay(eval(args.program), args.plain)
    if not args.child:
        return supervise(args.seconds, args.seed, ops, not args.no_traffic)
    with open(args.child, "w") as log:
        return fuzz(args.seconds, args.seed, ops, not args.no_traffic, log)


if __name__ == "__main__":
    sys.exit(main())
