"""`python -m jaxnorm`: what runs on this machine, is it right, how fast is it next to XLA.

`python -m jaxnorm tune FILE.py:function` measures schedules for a function of `jaxnorm.fuse`.
`python -m jaxnorm warm OP:SHAPE` compiles the kernels of operations before a program calls them.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import operator
import pathlib
import sys
import time
from collections.abc import Sequence

import jax

import jaxnorm
from jaxnorm import _lib, _warm
from jaxnorm._measure import display, timer
from jaxnorm._measure.errors import Check, run_checks
from jaxnorm._measure.speed import Compared, compare_times
from jaxnorm._measure.summary import check_table, plot, time_table, verdict_of
from jaxnorm._ops import OPERATIONS, Operation
from jaxnorm._rows import launcher
from jaxnorm._rows.call import device_here
from jaxnorm._rows.plan import DEVICES
from jaxnorm.fuse import Fused

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHORT_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}

# Largest array whose float64 reference is computed on the host; a user's shape is checked on its
# first rows.
MAX_CHECKED = 1 << 21


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
        "function on this GPU. python -m jaxnorm warm OP:SHAPE ... compiles kernels ahead.",
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
    if argv[:1] == ["warm"]:
        return warm(argv[1:])
    options = _parse(argv)
    rich = display.require_rich()
    if options.plot:
        display.require_pyplot()  # a missing library should not be found out at the end
    jax.config.update("jax_enable_x64", True)  # for float64; every array here names its dtype
    backend = jax.default_backend()
    console = rich.console(stderr=options.json == "-")
    status = jaxnorm.status()
    console.print(str(status), markup=False)
    device = timer.device_name()
    console.print(f"  JAX's default device: {device} ({backend})", markup=False)

    start = time.perf_counter()
    checks, timings = _measured(rich, options, backend == "gpu")
    console.print(check_table(rich, checks))
    console.print(time_table(rich, timings))
    for item in (*checks, *timings):
        if item.message:
            name = f"{item.op} {item.dtype} {item.direction}"
            console.print(f"{name}: {item.message}", style="red", markup=False)
    ok, verdict = verdict_of(checks, timings, backend, status)
    if options.plot:
        plot(timings, options.plot)
        console.print(f"wrote {options.plot}", markup=False)
    if options.json:
        record = {
            "ok": ok,
            "verdict": verdict,
            "status": str(status),
            "device": device,
            "platform": backend,
            "jax": jax.__version__,
            "seconds": time.perf_counter() - start,
            "checks": [dataclasses.asdict(c) | {"ok": c.ok} for c in checks],
            "timings": [_finite(dataclasses.asdict(t) | {"ratio": t.ratio}) for t in timings],
        }
        text = json.dumps(record, indent=1)
        if options.json == "-":
            print(text)
        else:
            pathlib.Path(options.json).write_text(text + "\n")
    console.print(verdict, style="bold green" if ok else "bold red", markup=False, soft_wrap=True)
    return 0 if ok else 1


def _measured(rich, options, on_gpu: bool) -> tuple[list[Check], list[Compared]]:
    """All checks and timings that the options ask for, behind a progress bar."""
    operations = [OPERATIONS[name] for name in options.op or OPERATIONS]
    check_jobs = list(itertools.product(operations, [options.dtype] if options.dtype else DTYPES))
    time_jobs = [
        (op, shape, direction)
        for op in operations
        for shape in _timed_shapes(op, options, on_gpu)
        for direction in ("forward", "gradient")
    ]
    time_dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    checks: list[Check] = []
    timings: list[Compared] = []
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
    return checks, timings


def _finite(record: dict) -> dict:
    """JSON has no NaN."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }


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


# ---- warm ----


def _case(text: str) -> _warm.Case:
    name, _, rest = text.partition(":")
    shape, _, dtype = rest.partition(":")
    if name not in OPERATIONS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return _warm.Case(OPERATIONS[name], _shape(shape), _dtype(dtype or "bfloat16"))


def warm(argv: Sequence[str]) -> int:
    """Compiles the kernels of the cases that the arguments name into the cache on disk.

    Returns:
      0; 1 if kernels cannot be compiled or kept here.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxnorm warm",
        description="Compile the kernels of operations, forward and backward, into the cache directory. Without a GPU, "
        f"they are compiled for an {DEVICES[90].name}.",
    )
    parser.add_argument(
        "cases",
        type=_case,
        nargs="+",
        metavar="OP:SHAPE[:DTYPE]",
        help="for example layer_norm:4096x1024:f32; bfloat16 without a dtype",
    )
    cases = parser.parse_args(argv).cases
    module = _lib.module("cuda")
    problem = module.reason
    if module.available and (off := launcher.cache_off()):
        problem = f"the cache directory: {off}"
    if problem:
        print(f"no kernel can be compiled ahead: {problem}", file=sys.stderr)
        return 1
    device = device_here()
    folder, _, _ = launcher.cache_folder()
    print(f"kernels for {device.name} (sm_{device.architecture}), kept in {folder}")
    jax.config.update("jax_enable_x64", True)  # for float64
    for case in cases:
        start = time.perf_counter()
        try:
            programs = _warm.warm(case, device.architecture)
        except RuntimeError as error:
            print(f"{case}: {error}", file=sys.stderr)
            return 1
        print(f"{case}: {programs} CUDA programs, {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
