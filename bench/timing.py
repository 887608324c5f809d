"""What a run needs around the clock of `jaxnorm._measure.timer`: data, a header, JSON files."""

import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata

import jax

from bench.cases import CROSS_ENTROPY, ITEMSIZE, Case
from jaxnorm._measure import timer

SCHEMA = 1

# Device memory that one measurement may hold; implementations are timed one after another when they
# need more.
MAX_BYTES = 36e9

_LIBRARIES = (
    "jaxnorm",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "torch",
    "triton",
    "liger-kernel",
    "quack-kernels",
)


@dataclasses.dataclass(frozen=True)
class Data:
    """Inputs: `args[i]` are the differentiated arguments of set i, `cotangents[i]` their dy."""

    args: Sequence[tuple[jax.Array, ...]]
    fixed: tuple[
        jax.Array, ...
    ]  # where, bias and labels, as far as the case has them, shared by all sets
    cotangents: Sequence[jax.Array]
    cold: bool  # every set has left the L2 cache before it is used again

    @property
    def sets(self) -> int:
        return len(self.args)

    def wait(self) -> None:
        jax.block_until_ready((self.args, self.fixed, self.cotangents))


def argument_shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the differentiated arguments."""
    if case.program == "attention":
        return [case.shape] * 3
    if case.program in ("mlp", "norm"):
        tokens, width, hidden = case.shape
        shapes = [(tokens, width), (width, hidden), (hidden, width)]
    elif case.program == "conv":
        channels = case.shape[-1]
        shapes = [case.shape, *[(1, 1, channels, channels)] * 2]
    else:
        shapes = [case.shape] * case.arrays
    return shapes + [(case.columns,)] * case.parameters


def result_kind(case: Case) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the result."""
    if case.op == CROSS_ENTROPY:
        axis = case.axis % len(case.shape)
        return case.shape[:axis] + case.shape[axis + 1 :], case.parameter_dtype
    return argument_shapes(case)[0], case.dtype


def make_data(case: Case, direction: str, sets: int | None = None) -> Data:
    """Random normal inputs, generated on the device.

    Args:
      case: The case.
      direction: Forward needs no cotangents.
      sets: How many sets; by default as many as it takes to leave the L2 cache.
    """
    wanted, cold = timer.rotation(case.min_bytes(direction))
    sets = wanted if sets is None else sets
    shapes = argument_shapes(case)

    # One array per call, so that the random bits behind it are the only scratch memory.
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))

    def normal(shape, *path, dtype=case.dtype):
        key = jax.random.key(0)
        for number in path:
            key = jax.random.fold_in(key, number)
        return draw(key, shape, dtype)

    fixed = []
    if case.where_shape is not None:
        # About one in five masked; key 0 never, so that no row is empty.
        mask = jax.random.uniform(jax.random.key(1), case.where_shape) > 0.2
        fixed.append(mask.at[..., 0].set(True))
    if case.bias_shape is not None:
        fixed.append(normal(case.bias_shape, 2))
    if case.op == CROSS_ENTROPY:
        draw_labels = jax.jit(jax.random.randint, static_argnums=(1, 2, 3))
        fixed.append(draw_labels(jax.random.key(5), result_kind(case)[0], 0, case.columns))
    needs_cotangents = direction not in ("forward", "forward_train")

    shape, dtype = result_kind(case)

    def argument(i, j):
        if j >= len(shapes) - case.parameters:
            return normal(shapes[j], 3, i, j, dtype=case.parameter_dtype)
        value = normal(shapes[j], 3, i, j)
        is_weight = case.program in ("mlp", "norm", "conv") and j > 0
        # By fan-in, as in a network.
        return value * math.prod(shapes[j][:-1]) ** -0.5 if is_weight else value

    return Data(
        args=[tuple(argument(i, j) for j in range(len(shapes))) for i in range(sets)],
        fixed=tuple(fixed),
        cotangents=[
            normal(shape, 4, i, dtype=dtype) for i in range(sets if needs_cotangents else 0)
        ],
        cold=cold,
    )


def fits_together(case: Case, sets: int, implementations: int) -> bool:
    """Whether the buffers of all implementations fit into `MAX_BYTES` at once.

    Each set holds x and dy, and per implementation about three arrays: residuals, the result, a
    copy some library makes.
    """
    return case.nbytes * sets * (2 + 3 * implementations) <= MAX_BYTES


def residual_bytes(residuals) -> int:
    """Bytes that JAX keeps for backward."""
    return sum(leaf.size * _itemsize(leaf) for leaf in jax.tree.leaves(residuals))


def _itemsize(leaf) -> int:
    return ITEMSIZE.get(str(leaf.dtype), getattr(leaf.dtype, "itemsize", 1))


def header(clock: str, copy: timer.CopyRate) -> dict:
    """Where, when and with what a run was made."""
    device = jax.devices()[0]
    chosen, passed_over = timer.find_clock(clock)
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": timer.device_name(),
        "platform": device.platform,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": _commit(),
        "clock": chosen,
        "clock_note": passed_over,
        "copy": dataclasses.asdict(copy),
        "l2_bytes": timer.l2_bytes(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit that is checked out beside this file, with a + when files differ from it."""
    folder = pathlib.Path(__file__).parent

    def git(*arguments):
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def time_entries(timed: timer.Timing, base: timer.Timing | Exception | None) -> dict:
    """What a record says of a time, and of its ratio to that of jaxnorm, `base`, if there is one."""
    entries = {
        "clock": timed.clock,
        "seconds": timed.median,
        "p10": timed.quantile(0.1),
        "p90": timed.quantile(0.9),
        "spread": timed.spread,
        "calls": len(timed.seconds),
    }
    if isinstance(base, timer.Timing):
        entries["ratio"] = timed.median / base.median  # above 1: slower than jaxnorm
        entries["ratio_spread"] = timer.ratio_spread(timed.spread, base.spread)
    return entries


def error_text(error: Exception) -> str:
    """What a record says of a failure: the first line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def compared(
    value: float | None, base: float | None, text: Callable[[float], str]
) -> tuple[str, str]:
    """The cells of a number: as text, and as a part of `base`, which is None for the base itself."""
    if value is None:
        return "", ""
    return text(value), f"{value / base:.0%}" if base else ""


def print_failures(console, records: Sequence[dict]) -> list[dict]:
    """Prints the records of failures; returns them."""
    failed = [r for r in records if r["error"]]
    for r in failed:
        console.print(f"{r['case']}, {r['implementation']}: {r['error']}", markup=False)
    return failed


def write_json(path: str | os.PathLike, value) -> None:
    """Writes a file that is the old one or the whole new one, whenever the process stops."""
    path = pathlib.Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_json(path: str | os.PathLike) -> dict:
    """Reads a file that `python -m bench --json` wrote."""
    run = json.loads(pathlib.Path(path).read_text())
    if run.get("header", {}).get("schema") != SCHEMA:
        raise ValueError(f"{path} is no result file of schema {SCHEMA}; write it again with --json")
    return run
