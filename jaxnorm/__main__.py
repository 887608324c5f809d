"""`python -m jaxnorm`: what runs on this machine, is it right, how fast is it next to XLA.

`python -m jaxnorm tune FILE.py:function` measures schedules for a function of `jaxnorm.fuse`.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
import operator
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

import jaxnorm
from jaxnorm import _report, _timing
from jaxnorm.fuse import Fused

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHORT_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}

EPSILON = 1e-6  # of norms, by default

# Largest array whose float64 reference is computed on the host; a user's shape is checked on its
# first rows.
MAX_CHECKED = 1 << 21


# ---- the operations, in float64 ----


def _softmax(x, where, scale):
    z = np.where(where, x * scale, -np.inf)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _softmax_reference(dy, x, *, where, scale, tiny):
    y = _softmax(x, where, scale)
    products = np.abs(y * dy).sum(-1, keepdims=True)
    dx = scale * y * (dy - (y * dy).sum(-1, keepdims=True))
    # Backward starts from the y that was stored. It is off by half a unit in the last place, or by
    # what is below the smallest number that the dtype holds, and that error reaches every column
    # through the sum.
    size = scale * (y * (np.abs(dy) + products))
    floor = scale * tiny * (np.abs(dy) + products + y * np.abs(dy).sum(-1, keepdims=True))
    return (y, y, tiny), (dx, size, floor)


def _log_softmax_reference(dy, x, *, where, scale, tiny):
    z = np.where(where, x * scale, -np.inf)
    top = z.max(-1, keepdims=True)
    total = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    y, p = z - total, np.exp(z - total)
    dy = np.where(where, dy, 0)
    dx = scale * (dy - p * dy.sum(-1, keepdims=True))
    finite = np.where(where, y, 0)
    size = np.abs(np.where(where, z, 0)) + np.abs(total) + np.abs(finite)
    # exp(y) turns y's absolute error into a relative one.
    reach = p * (1 + np.abs(finite)) * np.abs(dy).sum(-1, keepdims=True)
    return (y, size, tiny), (dx, scale * (np.abs(dy) + reach), scale * tiny)


def _relu_reference(dy, *addends, tiny, **_):
    total = sum(addends)
    # Only the sum rounds; the rest is selection.
    size = np.abs(total) if len(addends) > 1 else 0 * total
    return (np.maximum(total, 0), size, tiny), (np.where(total > 0, dy, 0), 0 * total, 0)


def _norm_reference(dy, x, gain, bias=None, *, where, tiny, center, **_):
    n = np.sum(np.broadcast_to(where, x.shape), -1, keepdims=True)

    def mean(v):
        return np.sum(np.where(where, v, 0), -1, keepdims=True) / n

    shift = mean(x) if center else 0.0
    rstd = 1 / np.sqrt(mean((x - shift) ** 2) + EPSILON)
    xhat = (x - shift) * rstd
    y, w = xhat * gain, dy * gain
    of_w = w.sum(-1, keepdims=True) / n if center else 0.0
    of_product = (w * xhat).sum(-1, keepdims=True) / n
    dx = rstd * (w - np.where(where, of_w + xhat * of_product, 0))
    # Rows are centred before they are scaled, so what cancels there is of x's size.
    reach = (np.abs(x) + np.abs(shift)) * rstd
    size = np.abs(w).sum(-1, keepdims=True) / n
    size = size + reach * np.abs(w * reach).sum(-1, keepdims=True) / n
    dx_size = rstd * (np.abs(w) + size)
    rows = tuple(range(x.ndim - 1))
    gradients = [(dx, dx_size, tiny), ((dy * xhat).sum(rows), np.abs(dy * reach).sum(rows), tiny)]
    y_size = reach * np.abs(gain)
    if bias is not None:
        y, y_size = y + bias, y_size + np.abs(bias)
        gradients.append((dy.sum(rows), np.abs(dy).sum(rows), tiny))
    return (y, y_size, tiny), *gradients


def _xla_norm(x, scale, bias=None, *, mask=None, center):
    """As Flax computes it by default."""
    dtype = scale.dtype
    y = x.astype(dtype)
    variance = jax.numpy.mean(y * y, -1, keepdims=True, where=mask)
    if center:
        mean = jax.numpy.mean(y, -1, keepdims=True, where=mask)
        variance = jax.numpy.maximum(0, variance - mean * mean)
        y = y - mean
    y = y * (jax.lax.rsqrt(variance + np.asarray(EPSILON, dtype)) * scale)
    return (y if bias is None else y + bias).astype(x.dtype)


def _batch_norm_reference(dy, x, gain, bias, *, tiny, **_):
    rows = tuple(range(x.ndim - 1))
    n = math.prod(x.shape[:-1])
    mean = x.mean(rows)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(rows) + EPSILON)
    xhat = (x - mean) * rstd
    dbias, dgain = dy.sum(rows), (dy * xhat).sum(rows)
    dx = rstd * gain * (dy - (dbias + xhat * dgain) / n)
    # Features are centred before they are scaled, as rows are above.
    reach = (np.abs(x) + np.abs(mean)) * rstd
    bias_size, gain_size = np.abs(dy).sum(rows), np.abs(dy * reach).sum(rows)
    dx_size = rstd * np.abs(gain) * (np.abs(dy) + (bias_size + reach * gain_size) / n)
    return (
        (xhat * gain + bias, reach * np.abs(gain) + np.abs(bias), tiny),
        (dx, dx_size, tiny),
        (dgain, gain_size, tiny),
        (dbias, bias_size, tiny),
    )


def _batch_norm(x, scale, bias):
    return jaxnorm.batch_norm(x, scale, bias, epsilon=EPSILON)[0]


def _xla_batch_norm(x, scale, bias):
    """As Flax computes it by default."""
    rows = tuple(range(x.ndim - 1))
    wide = x.astype(scale.dtype)
    mean = jax.numpy.mean(wide, rows)
    variance = jax.numpy.maximum(0, jax.numpy.mean(wide * wide, rows) - mean * mean)
    factor = jax.lax.rsqrt(variance + np.asarray(EPSILON, scale.dtype)) * scale
    return ((wide - mean) * factor + bias).astype(x.dtype)


def _labels(shape):
    return (np.arange(math.prod(shape[:-1]), dtype=np.int32) * 7 % shape[-1]).reshape(shape[:-1])


def _cross_entropy(x, where=None):
    return jaxnorm.softmax_cross_entropy(x, _labels(x.shape), where=where)[..., None]


def _xla_cross_entropy(x):
    """As optax computes it, in x's dtype."""
    picked = jax.numpy.take_along_axis(x, _labels(x.shape)[..., None], -1)
    loss = jax.nn.logsumexp(x, -1, keepdims=True) - picked
    return loss.astype(parameter_dtype(x.dtype.name))


def _cross_entropy_reference(dy, x, *, where, tiny, **_):
    z = np.where(where, x, -np.inf)
    hit = np.arange(x.shape[-1]) == _labels(x.shape)[..., None]
    top = z.max(-1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    picked = np.where(hit, z, 0).sum(-1, keepdims=True)
    p = np.exp(z - lse)
    dx = np.where(where, dy * (p - hit), 0)
    # A rounding of lse is a relative error of p.
    dx_size = np.abs(dy) * (p * (1 + np.abs(lse)) + hit)
    return (lse - picked, np.abs(lse) + np.abs(top), tiny), (dx, dx_size, tiny)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, the plain JAX formula, and its float64 reference.

    Attributes:
      name: of the function.
      arrays: how many arguments have the full shape.
      kernel: jaxnorm's.
      xla: the formula, called alike.
      reference: (dy, *arguments in float64, where, scale, tiny) -> (value, size of the terms that
        are added up, what the dtype cannot hold) of the result and of each gradient that differs.
      mask: name of the argument that says which elements of a row take part; "" if there is none.
      parameters: how many arguments of one row follow, in the dtype that sums have.
      per_row: whether the result is one number for each row, in that dtype.
    """

    name: str
    arrays: int
    kernel: Callable
    xla: Callable
    reference: Callable
    mask: str = ""
    parameters: int = 0
    per_row: bool = False

    def result_kind(self, shape: Sequence[int], dtype: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the result for arguments of these."""
        if self.per_row:
            return (*shape[:-1], 1), parameter_dtype(dtype)
        return tuple(shape), dtype

    @property
    def reduces(self) -> bool:
        return bool(self.mask)


OPERATIONS = {
    op.name: op
    for op in (
        Operation("softmax", 1, jaxnorm.softmax, jax.nn.softmax, _softmax_reference, "where"),
        Operation(
            "log_softmax",
            1,
            jaxnorm.log_softmax,
            jax.nn.log_softmax,
            _log_softmax_reference,
            "where",
        ),
        Operation("relu", 1, jaxnorm.relu, jax.nn.relu, _relu_reference),
        Operation(
            "add_relu",
            2,
            jaxnorm.add_relu,
            lambda x, y: jax.nn.relu(x + y),
            _relu_reference,
        ),
        *(
            Operation(
                name,
                1,
                getattr(jaxnorm, name),
                functools.partial(_xla_norm, center=parameters == 2),
                functools.partial(_norm_reference, center=parameters == 2),
                "mask",
                parameters,
            )
            for name, parameters in (("layer_norm", 2), ("rms_norm", 1))
        ),
        Operation(
            "batch_norm", 1, _batch_norm, _xla_batch_norm, _batch_norm_reference, parameters=2
        ),
        Operation(
            "softmax_cross_entropy",
            1,
            _cross_entropy,
            _xla_cross_entropy,
            _cross_entropy_reference,
            "where",
            per_row=True,
        ),
    )
}


# ---- checks ----


@dataclasses.dataclass
class Check:
    """The largest error of one operation, dtype and direction over the shapes tried."""

    op: str
    dtype: str
    direction: str
    shapes: list[str] = dataclasses.field(default_factory=list)
    error: float = 0.0  # relative to the size of the terms that are added up
    of_tolerance: float = 0.0  # above 1 fails
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.message and self.of_tolerance <= 1


def gradient_of(function: Callable, parameters: int = 0) -> Callable:
    """`(args, dy, **options) -> (y, dx, gradients of the parameters)` in one jit."""

    @jax.jit
    def run(args, dy, **options):
        y, vjp = jax.vjp(functools.partial(function, **options), *args)
        gradients = vjp(dy)
        return y, gradients[0], *gradients[len(gradients) - parameters :]

    return run


def parameter_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def compare(got, reference, size, floor, dtype: str, columns: int) -> tuple[float, float]:
    """(relative error, error as a part of the tolerance), each the worst over all elements.

    The tolerance is a few units in the last place of `size`, the magnitude of what is added up, and
    `floor`, what the dtype cannot hold. Half precision rounds once, at the store; in single and
    double precision sums add to the error.
    """
    half = dtype in ("float16", "bfloat16")
    eps = float(jax.numpy.finfo(dtype).eps)
    units = 4.0 if half else 16 + math.sqrt(columns)
    got = np.asarray(got, np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(got == reference, 0.0, np.abs(got - reference))
    difference = np.where(np.isnan(difference), np.inf, difference)
    tolerance = np.broadcast_to(units * eps * size + 2 * floor, difference.shape)
    wrong = difference > 0
    if not wrong.any():
        return 0.0, 0.0
    with np.errstate(divide="ignore"):
        worst = float((difference[wrong] / tolerance[wrong]).max())
    return worst * units * eps, worst


def check(op: Operation, dtype: str, shape: Sequence[int], masked: bool) -> dict[str, tuple]:
    """One call against float64: {direction: (error, part of the tolerance)}."""
    rng = np.random.default_rng(0)
    dtype_object = jax.numpy.dtype(dtype)
    *arrays, dy = (3 * rng.standard_normal((op.arrays + 1, *shape))).astype(dtype_object)
    info = jax.numpy.finfo(dtype)
    tiny = float(info.smallest_subnormal if dtype == "float16" else info.tiny)
    wide_dtype = parameter_dtype(dtype)
    result_shape, result_dtype = op.result_kind(shape, dtype)
    dy = dy[..., : result_shape[-1]].astype(jax.numpy.dtype(result_dtype))
    arrays += [rng.standard_normal(shape[-1:]).astype(wide_dtype) for _ in range(op.parameters)]
    where, scale = np.ones((1,) * len(shape), bool), 1.0
    options = {}
    if masked:
        where = rng.random((*(1,) * (len(shape) - 1), shape[-1])) > 0.3
        where[..., 0] = True
        options = {op.mask: jax.numpy.asarray(where)}
        if op.mask == "where" and not op.per_row:
            scale = 0.5
            options["scale"] = np.dtype(dtype_object).type(scale)
    wide = [a.astype(np.float64) for a in (dy, *arrays)]
    expected = op.reference(*wide, where=where, scale=scale, tiny=tiny)
    args = tuple(map(jax.numpy.asarray, arrays))
    got = gradient_of(op.kernel, op.parameters)(args, jax.numpy.asarray(dy), **options)
    like = (dy, args[0], *args[len(args) - op.parameters :])
    found = {"forward": (0.0, 0.0), "gradient": (0.0, 0.0)}
    for i, (value, wanted, argument) in enumerate(zip(got, expected, like, strict=True)):
        if value.dtype != argument.dtype or value.shape != argument.shape:
            raise AssertionError(
                f"gave {value.dtype}{value.shape}, not {argument.dtype}{argument.shape}"
            )
        # Terms of a sum: along the row, or over all of them.
        terms = shape[-1] if i < 2 else math.prod(shape[:-1])
        exact, size, floor = wanted
        error, of_tolerance = compare(value, exact, size, floor, value.dtype.name, terms)
        name = "gradient" if i else "forward"
        found[name] = max(found[name][0], error), max(found[name][1], of_tolerance)
    return found


def run_checks(op: Operation, dtype: str, shapes: Sequence[tuple[int, ...]]) -> list[Check]:
    """One check for forward and one for the gradient, over all shapes, masked where possible."""
    checks = {name: Check(op.name, dtype, name) for name in ("forward", "gradient")}
    calls = [(shape, False) for shape in shapes]
    if op.reduces:
        calls.append((shapes[-1] if len(shapes) == 1 else (8, 257), True))
    for shape, masked in calls:
        text = "x".join(map(str, shape)) + (" masked" if masked else "")
        try:
            found = check(op, dtype, shape, masked)
        except Exception as error:
            for c in checks.values():
                c.message = c.message or f"{text}: {type(error).__name__}: {error}"[:300]
            continue
        for name, (error, of_tolerance) in found.items():
            c = checks[name]
            c.shapes.append(text)
            c.error, c.of_tolerance = max(c.error, error), max(c.of_tolerance, of_tolerance)
    return list(checks.values())


# ---- timings ----


@dataclasses.dataclass
class Compared:
    """jaxnorm and XLA on the same call, in turn."""

    op: str
    dtype: str
    shape: str
    direction: str
    bytes: int = 0
    seconds: float = math.nan
    xla_seconds: float = math.nan
    copy_bytes_per_second: float = math.nan
    spread: float = math.nan
    clock: str = ""
    message: str = ""

    @property
    def ratio(self) -> float:
        return self.xla_seconds / self.seconds


def compare_times(op: Operation, dtype: str, shape: Sequence[int], direction: str) -> Compared:
    """Times one direction: "forward", or "gradient", which is forward and backward in one jit."""
    result = Compared(op.name, dtype, "x".join(map(str, shape)), direction)
    result_shape, result_dtype = op.result_kind(shape, dtype)
    # Least that must move: the arguments and y; for the gradient dy and dx too.
    results = 1 if direction == "forward" else 2
    arrays = op.arrays + results - 1
    result.bytes = arrays * math.prod(shape) * jax.numpy.dtype(dtype).itemsize
    result.bytes += results * math.prod(result_shape) * jax.numpy.dtype(result_dtype).itemsize
    try:
        sets, _ = _timing.rotation(result.bytes)
        wide = parameter_dtype(dtype)
        kinds = [(tuple(shape), dtype)] * op.arrays
        kinds += [(tuple(shape[-1:]), wide)] * op.parameters + [(result_shape, result_dtype)]
        keys = jax.random.split(jax.random.key(0), (sets, len(kinds)))
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        data = [[draw(k, *kind) for k, kind in zip(row, kinds, strict=True)] for row in keys]

        def workload(function):
            if direction == "forward":
                jitted = jax.jit(function)
                return _timing.Workload(lambda i: jitted(*data[i][:-1]), sets)
            jitted = gradient_of(function, op.parameters)
            return _timing.Workload(lambda i: jitted(data[i][:-1], data[i][-1]), sets)

        found = _timing.measure(
            {
                "jaxnorm": workload(op.kernel),
                "xla": workload(op.xla),
                "copy": _timing.copy_workload(result.bytes),
            },
            budget=0.25,
        )
        timings = []
        for value in found.values():
            if isinstance(value, Exception):
                raise value
            timings.append(value)
        ours, xla, copy = timings
        result.seconds, result.xla_seconds, result.clock = ours.median, xla.median, ours.clock
        result.spread = _timing.ratio_spread(ours.spread, xla.spread)
        result.copy_bytes_per_second = result.bytes / copy.median
    except Exception as error:
        result.message = f"{type(error).__name__}: {error}"[:300]
    return result


# ---- command line ----


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write it like 4096x1024")
    return shape


def _dtype(text: str) -> str:
    name = SHORT_DTYPES.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return name


def _parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxnorm",
        description="Show what jaxnorm runs here, check it against float64, time it against XLA.",
        epilog="python -m jaxnorm tune FILE.py:function --shape ... looks for faster schedules of a fused "
        "function on this GPU.",
    )
    parser.add_argument("--op", choices=tuple(OPERATIONS), action="append", help="default: all")
    parser.add_argument("--shape", type=_shape, metavar="4096x1024", help="your own shape")
    parser.add_argument("--dtype", type=_dtype, metavar="DTYPE", help="one of " + ", ".join(DTYPES))
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON ('-': to stdout)")
    parser.add_argument("--plot", metavar="FILE", help="draw the timings")
    return parser.parse_args(argv)


def _timed_shapes(op: Operation, options, on_gpu: bool) -> list[tuple[int, ...]]:
    if options.shape:
        return [options.shape]
    if op.reduces:
        return [(16384, 1024), (4096, 16384)] if on_gpu else [(2048, 256), (256, 4096)]
    return [(16384, 4096)] if on_gpu else [(1024, 1024)]


def _checked_shapes(options) -> list[tuple[int, ...]]:
    """Rows of one element, odd and even, short and long; or the first rows of the user's shape."""
    if not options.shape:
        return [(5, 1), (16, 33), (8, 1000), (3, 4099)]
    shape = options.shape
    rows = max(1, min(MAX_CHECKED // shape[-1], math.prod(shape[:-1])))
    return [shape] if math.prod(shape) <= MAX_CHECKED else [(rows, shape[-1])]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the report.

    Returns:
      0 when every check passed, 1 otherwise.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["tune"]:
        return tune(argv[1:])
    options = _parse(argv)
    rich = _report.require_rich()
    if options.plot:
        _report.require_pyplot()  # a missing library should not be found out at the end
    jax.config.update("jax_enable_x64", True)  # for float64; every array here names its dtype
    backend = jax.default_backend()
    console = rich.console(stderr=options.json == "-")
    operations = [OPERATIONS[name] for name in options.op or OPERATIONS]
    check_dtypes = [options.dtype] if options.dtype else DTYPES
    time_dtype = options.dtype or ("bfloat16" if backend == "gpu" else "float32")
    status = jaxnorm.status()
    console.print(str(status), markup=False)
    device = _timing.device_name()
    console.print(f"  JAX's default device: {device} ({backend})", markup=False)

    check_jobs = [(op, dtype) for op in operations for dtype in check_dtypes]
    time_jobs = [
        (op, shape, direction)
        for op in operations
        for shape in _timed_shapes(op, options, backend == "gpu")
        for direction in ("forward", "gradient")
    ]
    checks: list[Check] = []
    timings: list[Compared] = []
    start = time.perf_counter()
    with rich.progress() as progress:
        task = progress.add_task("", total=len(check_jobs) + len(time_jobs))
        for op, dtype in check_jobs:
            progress.update(task, description=f"checking {op.name} {dtype}")
            checks += run_checks(op, dtype, _checked_shapes(options))
            progress.advance(task)
        for op, shape, direction in time_jobs:
            progress.update(task, description=f"timing {op.name} {direction}")
            timings.append(compare_times(op, time_dtype, shape, direction))
            progress.advance(task)

    console.print(_check_table(rich, checks, check_dtypes))
    console.print(_time_table(rich, timings))
    for item in (*checks, *timings):
        if item.message:
            name = f"{item.op} {item.dtype} {item.direction}"
            console.print(f"{name}: {item.message}", style="red", markup=False)
    ok, verdict = _verdict(checks, timings, backend, status)
    if options.plot:
        plot(timings, options.plot)
        console.print(f"wrote {options.plot}", markup=False)
    if options.json:
        text = json.dumps(
            {
                "ok": ok,
                "verdict": verdict,
                "status": str(status),
                "device": device,
                "platform": backend,
                "jax": jax.__version__,
                "seconds": time.perf_counter() - start,
                "checks": [dataclasses.asdict(c) | {"ok": c.ok} for c in checks],
                "timings": [_finite(dataclasses.asdict(t) | {"ratio": t.ratio}) for t in timings],
            },
            indent=1,
        )
        if options.json == "-":
            print(text)
        else:
            pathlib.Path(options.json).write_text(text + "\n")
    console.print(verdict, style="bold green" if ok else "bold red", markup=False, soft_wrap=True)
    return 0 if ok else 1


def _finite(record: dict) -> dict:
    """JSON has no NaN."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }


def _verdict(checks, timings, backend: str, status) -> tuple[bool, str]:
    failed = [f"{c.op} {c.direction} {c.dtype}" for c in checks if not c.ok]
    broken = [f"{t.op} {t.direction} {t.shape}" for t in timings if t.message]
    timed = [t for t in timings if not t.message]
    speed = ""
    if timed:
        mean = math.exp(sum(math.log(t.ratio) for t in timed) / len(timed))
        count = f"{len(timed)} timing{'s' * (len(timed) > 1)}"
        speed = f"; {mean:.2f}x the speed of XLA (geometric mean of {count} on {backend})"
    platform = "cuda" if backend == "gpu" else backend
    module = next((m for m in status.modules if m.platform == platform), None)
    if module is None or not module.available:
        speed += f"; plain XLA formulas, no {platform} kernels"
    if failed or broken:
        parts = (
            [f"{len(failed)} of {len(checks)} checks failed ({', '.join(failed)})"]
            if failed
            else []
        )
        parts += [f"{len(broken)} timings failed ({', '.join(broken)})"] if broken else []
        return False, f"FAILED: {'; '.join(parts)}{speed}"
    return True, f"OK: {len(checks)} of {len(checks)} checks passed{speed}"


def _check_table(rich, checks: Sequence[Check], dtypes: Sequence[str]):
    table = rich.table(title="Largest error against float64", caption_justify="left")
    table.caption = f"Relative to the terms added up. Shapes: {', '.join(checks[0].shapes)}"
    table.add_column("operation")
    table.add_column("direction")
    for dtype in dtypes:
        table.add_column(dtype, justify="right")
    rows: dict[tuple[str, str], dict[str, Check]] = {}
    for c in checks:
        rows.setdefault((c.op, c.direction), {})[c.dtype] = c
    previous = None
    for (op, direction), found in rows.items():
        cells = []
        for dtype in dtypes:
            c = found[dtype]
            shown = "exact" if c.error == 0 else f"{c.error:.1e}"
            cells.append(f"[green]ok[/green] {shown}" if c.ok else f"[red]FAIL[/red] {shown}")
        table.add_row("" if op == previous else op, direction, *cells)
        previous = op
    return table


def _time_table(rich, timings: Sequence[Compared]):
    clocks = {"wall": "Wall-clock", "trace": "Kernel time", "": "Time"}
    first = next((t for t in timings if not t.message), timings[0])
    dtype = timings[0].dtype
    table = rich.table(title=f"Time against jitted XLA, {dtype}", caption_justify="left")
    table.caption = (
        f"{clocks[first.clock.partition(' ')[0]]}, medians of alternating calls. "
        "Gradient: forward and backward in one jit. "
        "Of copy: against a plain read and write of as many bytes."
    )
    table.add_column("operation")
    table.add_column("shape")
    table.add_column("direction")
    for name in ("jaxnorm", "XLA", "XLA / jaxnorm", "bytes/s", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for t in timings:
        row = ["" if t.op == previous else t.op, t.shape, t.direction]
        previous = t.op
        if t.message:
            table.add_row(*row, "[red]failed[/red]", "", "", "", "")
            continue
        table.add_row(
            *row,
            _report.duration(t.seconds),
            _report.duration(t.xla_seconds),
            _report.ratio_text(t.ratio, t.spread),
            _report.rate(t.bytes / t.seconds),
            f"{t.bytes / t.seconds / t.copy_bytes_per_second:.2f}",
        )
    return table


def plot(timings: Sequence[Compared], path: str) -> None:
    """Achieved bytes per second, a pair of bars for each timing, and a copy of the same size."""
    pyplot = _report.require_pyplot()
    timed = [t for t in timings if not t.message]
    unit = 1e12 if max((t.bytes / t.seconds for t in timed), default=0) > 1e12 else 1e9
    figure, axes = pyplot.subplots(
        figsize=(8, 1.3 + 0.55 * max(len(timed), 1)), layout="constrained"
    )
    height = 0.36
    for row, t in enumerate(timed):
        y = len(timed) - 1 - row
        pairs = (("jaxnorm", t.seconds, height / 2), ("xla", t.xla_seconds, -height / 2))
        for name, seconds, offset in pairs:
            value = t.bytes / seconds / unit
            label = _report.name_of(name) if row == 0 else None
            colour = _report.colour_of(name)
            axes.barh(y + offset, value, height, color=colour, label=label, zorder=2)
        axes.annotate(
            f"{t.ratio:.2f}x XLA",
            (t.bytes / t.seconds / unit, y + height / 2),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=_report.INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            zorder=4,
        )
        copy = t.copy_bytes_per_second / unit
        label = "copy of the same size" if row == 0 else None
        axes.plot(
            [copy, copy],
            [y - 0.44, y + 0.44],
            color=_report.INK,
            lw=1.6,
            ls=(0, (3, 1.5)),
            label=label,
            zorder=3,
        )
    names = [f"{t.op} {t.direction}\n{t.shape}" for t in timed]
    axes.set_yticks(range(len(timed) - 1, -1, -1), names)
    _report.style(axes, f"Achieved rate, {timings[0].dtype}, {_timing.device_name()}")
    axes.grid(False, axis="y")
    axes.margins(x=0.14, y=0.3 / max(len(timed), 1))
    axes.set_xlim(left=0)
    axes.set_xlabel("TB/s" if unit == 1e12 else "GB/s", color=_report.INK)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith("copy"))
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    _report.save(figure, path)
    pyplot.close(figure)


# ---- tune ----


def _argument(text: str) -> tuple[tuple[int, ...], str]:
    shape, _, dtype = text.partition(":")
    dtype = {"i32": "int32", **SHORT_DTYPES}.get(dtype, dtype)
    try:
        if dtype:
            jax.numpy.dtype(dtype)
    except TypeError:
        raise argparse.ArgumentTypeError(f"{text!r} names no dtype") from None
    return _shape(shape), dtype


def _parse_tune(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxnorm tune",
        description="Measure schedules for the kernels of a fused function on this GPU, and keep the fastest.",
    )
    parser.add_argument("function", metavar="FILE.py:function", help="fused or plain")
    parser.add_argument(
        "--shape",
        type=_argument,
        nargs="+",
        required=True,
        metavar="4096x1024[:DTYPE]",
        help="of each argument, in order",
    )
    parser.add_argument(
        "--dtype",
        type=_dtype,
        default="bfloat16",
        help="of shapes without one, bfloat16 by default",
    )
    options = parser.parse_args(argv)
    file, _, name = options.function.rpartition(":")
    if not name or not pathlib.Path(file).is_file():
        parser.error(f"{options.function!r} is no FILE.py:function, or there is no such file")
    options.file, options.name = file, name
    return options


def tune(argv: Sequence[str]) -> int:
    """Tunes a function of a file.

    Returns:
      0; 1 if it cannot be tuned here.
    """
    options = _parse_tune(argv)
    path = pathlib.Path(options.file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    try:
        function = operator.attrgetter(options.name)(module)
        fused = function if isinstance(function, Fused) else jaxnorm.fuse(function)
        found = fused.tune(
            *(jax.ShapeDtypeStruct(s, dtype or options.dtype) for s, dtype in options.shape)
        )
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
