"""Schedules that were measured on a GPU: which ones to try, how long each takes, and where the fastest one is kept.

An entry is not a plan but what was asked of `schedule`, such as {"lanes": 256}: `schedule` makes a plan of it for the
program at hand. So an entry can make a program slow, but not wrong.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm import _launch, _lib
from jaxnorm._measure import display, timer
from jaxnorm._primitive.programs import open_jaxpr
from jaxnorm._rows import launcher
from jaxnorm._rows.call import Call, compiled_row_call, row_call, simplified
from jaxnorm._rows.plan import REGISTERS, THREADS_MAX, Device, Plan
from jaxnorm._rows.rules import Program
from jaxnorm._rows.schedule import schedule
from jaxnorm._rows.shared_memory import part_slots, shared_bytes, slot_count

SOURCES = ("registers", "ring", "stream")
# What may be asked of a schedule, and the values that are taken from a file.
FIELDS = {
    "source": SOURCES,
    "lanes": range(1, THREADS_MAX + 1),
    "cluster": (1, 2, 4, 8),
    "parts": (False, True),
    "rows_at_once": (1, 2, 4),
    "blocks": range(1, 33),
    "hoist": ("", "registers", "shared"),
    "stages": (2, 3, 4),
    "slots": range(1, 17),
    "grid": range(257),
    "lag": range(1, 65),
    "exchangers": range(1, 17),
    "side": (1, 2, 4, 8, 16, 32),
}
# Elements that a thread works on side by side: the code is unrolled for each.
ELEMENTS_MAX = 128
# A schedule is kept if it is faster by this part of the time than the schedule that `schedule` chooses.
LEAST_GAIN = 0.02
FINALISTS = 4
ENTRY_BYTES = 1 << 14


class Candidate(NamedTuple):
    """A schedule to try: what is asked of `schedule`, and the plan that this gives."""

    asked: dict
    plan: Plan


def candidates(program: Program, device: Device) -> list[Candidate]:
    """Schedules near the chosen one, which is the first. Each plan is there once."""
    default = schedule(program, device)
    found = {default: Candidate({}, default)}

    def add(**asked) -> Plan:
        plan = schedule(program, device, **asked)
        if plan not in found and can_run(program, device, plan):
            found[plan] = Candidate(asked, plan)
        return plan

    bases: list[dict] = [{}, *({"source": source} for source in SOURCES)]
    if device.clusters:
        ring = [{"source": "ring", "parts": parts} for parts in FIELDS["parts"]]
        bases += [{**base, "cluster": cluster} for base in ring for cluster in FIELDS["cluster"]]
    if default.side:
        _add_strided(default, add)
        return list(found.values())
    for base in bases:
        plan = add(**base)
        if plan not in found or (base and plan == default):
            continue
        if plan.grid:
            _add_grids(add, plan)
            continue
        for lanes in _near(plan.lanes):
            other = add(**base, lanes=lanes)
            for blocks in (other.blocks // 2, other.blocks * 2):
                if blocks in FIELDS["blocks"]:
                    add(**base, lanes=lanes, blocks=blocks)
        for rows in FIELDS["rows_at_once"]:
            add(**base, rows_at_once=rows)
        for blocks in sorted({plan.blocks + n for n in (-2, -1, 1, 2)} | {plan.blocks * 2}):
            if blocks in FIELDS["blocks"]:
                add(**base, blocks=blocks)
        if plan.persistent:
            for hoist in FIELDS["hoist"]:
                add(**base, hoist=hoist)
        if plan.source == "ring":
            for stages in FIELDS["stages"]:
                add(**base, stages=stages)
        if plan.source == "stream":
            for slots in (1, 2, 4, 8):
                add(**base, slots=slots)
    if device.clusters:
        for cluster, lag in itertools.product(FIELDS["cluster"], (1, 2)):
            add(source="ring", cluster=cluster, lag=lag)
    return list(found.values())


def _add_grids(add: Callable[..., Plan], plan: Plan) -> None:
    """Candidates near a schedule whose rows are shared by blocks of the grid, and the schedule without sharing."""
    add(grid=0)
    for groups in sorted({1, 2, 4, 8, plan.grid // 2, plan.grid * 2} & set(FIELDS["grid"]) - {0}):
        for lag in sorted({2, 4, 8, plan.lag}):
            add(grid=groups, lag=lag)
    for exchangers in (1, 2, 4, 8):
        add(grid=plan.grid, exchangers=exchangers)
    for lanes in _near(plan.lanes):
        add(grid=plan.grid, lanes=lanes)


def _add_strided(default: Plan, add: Callable) -> None:
    """Schedules near a schedule of rows that lie side by side."""
    for rows in FIELDS["rows_at_once"]:
        add(rows_at_once=rows)
    for side in FIELDS["side"][2:]:
        for threads in (32, 64, 128, 160, 256, 512, 1024):
            for cluster in FIELDS["cluster"] if threads % side == 0 else ():
                add(side=side, lanes=threads // side, cluster=cluster)
    for blocks in {default.blocks + n for n in (-2, -1, 1, 2)} & set(FIELDS["blocks"]):
        add(blocks=blocks)
    for slots in (2, 4, 8, 16):
        add(source="stream", slots=slots)


def _near(lanes: int) -> tuple[int, ...]:
    """Half and twice as many threads a row, and half as many again; powers of two within a warp."""
    if lanes <= 32:
        return tuple(n for n in (lanes // 2, lanes * 2) if n)
    return tuple(
        n for n in (lanes // 2 // 32 * 32, lanes * 3 // 2 // 32 * 32, lanes * 2) if n <= THREADS_MAX
    )


def can_run(program: Program, device: Device, plan: Plan) -> bool:
    """Whether a device has the threads, registers and shared memory of a plan."""
    return (
        plan.threads % 32 == 0
        and (not plan.parts or plan.stages >= plan.rounds)
        and plan.threads <= THREADS_MAX
        and plan.threads * plan.blocks * 32 <= REGISTERS
        and _lanes_fit(plan)
        and (plan.cluster == 1 or device.clusters)
        and blocks_have_slots(program, plan)
        and (plan.source != "ring" or device.clusters)
        and plan.slots * plan.vector * plan.rows_at_once <= ELEMENTS_MAX
        and plan.blocks * (shared_bytes(program, plan) + 1024) <= device.shared_bytes + 1024
    )


def blocks_have_slots(program: Program, plan: Plan) -> bool:
    """Whether each block of a cluster has a part of the row: a bulk copy of nothing is an error of the GPU."""
    before_last = (plan.cluster - 1) * part_slots(program, plan)
    return plan.source != "ring" or before_last < slot_count(program, plan)


def _lanes_fit(plan: Plan) -> bool:
    """Whether the threads that share a row are whole warps, or a part of one that halves to single threads."""
    if plan.side:
        team = plan.side * plan.lanes
        alone = team == 32 and plan.cluster == 1
        return 32 % plan.side == 0 and team % 32 == 0 and (alone or team == plan.threads)
    return plan.lanes % 32 == 0 or plan.lanes in (1, 2, 4, 8, 16)


# ---- what is kept ----


def folder() -> pathlib.Path | None:
    """Where schedules are kept; None if nothing is."""
    path, _, wrong = launcher.cache_folder()
    return pathlib.Path(path, "schedules") if path and not wrong else None


def _head(source: str, device: Device) -> dict:
    """What an entry is for. The source is the text under the chosen schedule, and has no number of rows in it."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    return {"program": digest, "gpu": device.name, "jaxnorm": _lib.VERSION}


def _file(head: dict) -> str:
    return hashlib.sha256("\n".join(head.values()).encode()).hexdigest()[:32] + ".json"


def keep(source: str, device: Device, asked: dict, **notes) -> str:
    """Keeps what to ask of `schedule` for a program, and returns where; "" if it cannot be kept."""
    path, head = folder(), _head(source, device)
    if path is None:
        return ""
    text = json.dumps({**head, "asked": asked, **notes}, indent=1)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path, suffix=".unfinished")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(unfinished, path / _file(head))
        except OSError:
            os.unlink(unfinished)
            raise
    except OSError:
        return ""
    return str(path / _file(head))


def forget(source: str, device: Device) -> None:
    """Removes the entry of a program, if there is one."""
    if path := folder():
        with contextlib.suppress(OSError):
            (path / _file(_head(source, device))).unlink()


def kept(source: str, device: Device) -> dict | None:
    """What to ask of `schedule` for a program; None if there is no entry, or no trustworthy one."""
    path, head = folder(), _head(source, device)
    if path is None:
        return None
    try:
        with open(path / _file(head), encoding="utf-8") as file:
            entry = json.loads(file.read(ENTRY_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or any(entry.get(name) != value for name, value in head.items()):
        return None
    asked = entry.get("asked")
    if not isinstance(asked, dict) or not all(
        name in FIELDS and type(value) is type(FIELDS[name][0]) and value in FIELDS[name]
        for name, value in asked.items()
    ):
        return None
    return asked


def measured(device: Device, program: Program, source: str) -> Plan | None:
    """The schedule that was kept for a program whose chosen schedule gives `source`; None without a GPU."""
    if not launcher.gpus():
        return None
    asked = kept(source, device)
    if not asked:
        return None
    plan = schedule(program, device, **asked)
    return plan if can_run(program, device, plan) else None


# ---- measuring ----


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was measured of one kernel.

    Attributes:
      chosen, best: the schedule that jaxnorm chooses, and the fastest one.
      chosen_seconds, seconds: what a call takes under each.
      tried: how many schedules were measured.
      file: where the best one is kept; "" if it is the chosen one, or there is no cache.
    """

    chosen: Plan
    best: Plan
    chosen_seconds: float
    seconds: float
    tried: int
    file: str

    @property
    def gain(self) -> float:
        return self.chosen_seconds / self.seconds


def tune(closed, device: Device, progress: Callable[[int, int, str], None]) -> Tuned:
    """Measures the candidates for a program on JAX's default GPU, and keeps the fastest.

    Args:
      closed: the program, a closed jaxpr without constants.
      device: that GPU.
      progress: called with (steps done, of how many, what is done).

    Raises:
      RuntimeError: if the chosen schedule itself cannot be measured.
    """
    program = simplified(closed)
    source = row_call(closed, device).source
    chosen = compiled_row_call(closed, device, launcher.compile)
    assert chosen.plan is not None
    calls: list[tuple[dict, Call]] = [({}, chosen)]
    for asked, plan in candidates(program, device):
        if asked and plan != chosen.plan:
            calls.append((asked, row_call(closed, device, plan)))
    total = 2 * len(calls) + 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for step, _ in enumerate(pool.map(lambda c: _compiles(c[1], device), calls)):
            progress(step, total, "compiling")
    operands = _Operands(closed)
    found: list[tuple[float, int]] = []
    for number, (_, call) in enumerate(calls):
        progress(len(calls) + number, total, f"measuring {call.plan}")
        if _compiles(call, device):
            timing = timer.measure({"": operands.workload(call)}, calls=10, rounds=1, budget=0.1)[
                ""
            ]
            if isinstance(timing, timer.Timing):
                found.append((timing.median, number))
            elif number == 0:
                raise RuntimeError("fuse: the kernel cannot be measured") from timing
    progress(total - 1, total, "measuring the fastest again")
    finalists = sorted({0, *(number for _, number in sorted(found)[:FINALISTS])})
    again = timer.measure({str(n): operands.workload(calls[n][1]) for n in finalists})
    medians = {
        int(n): timing.median for n, timing in again.items() if isinstance(timing, timer.Timing)
    }
    best = min(medians, key=lambda n: medians[n])
    if medians[0] <= medians[best] * (1 + LEAST_GAIN):
        best = 0
    asked, call = calls[best]
    assert call.plan is not None
    file = ""
    if best:
        notes = {"schedule": str(call.plan), "seconds": medians[best], "chosen": medians[0]}
        file = keep(source, device, asked, **notes)
    else:
        forget(source, device)
    progress(total, total, "")
    return Tuned(chosen.plan, call.plan, medians[0], medians[best], len(found), file)


@contextlib.contextmanager
def shown(name: str):
    """A `progress` for `tune` that shows a bar on a terminal, if rich is installed."""
    try:
        rich = display.require_rich()
    except display.MissingExtra:
        yield lambda done, total, text: None
        return
    with rich.progress() as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total, text: bar.update(
            task, completed=done, total=total, description=f"{name}: {text}"
        )


def _compiles(call: Call, device: Device) -> bool:
    try:
        launcher.compile(call.source, device.architecture)
    except RuntimeError:
        return False
    return True


class _Operands:
    """Arrays for a program. Integers are 0, which is a label of every row."""

    def __init__(self, closed):
        self._closed = closed
        jaxpr, _ = open_jaxpr(closed)
        avals = [v.aval for v in jaxpr.invars]
        moved = [*avals, *closed.out_avals]
        for aval in moved:
            if not all(isinstance(n, int) for n in aval.shape):
                raise ValueError(f"fuse: tune needs sizes that are numbers, got {aval.str_short()}")
        self._sets, _ = timer.rotation(sum(math.prod(a.shape) * a.dtype.itemsize for a in moved))
        keys = jax.random.split(jax.random.key(0), (self._sets, len(avals)))
        self._arrays = [
            [_draw(key, aval.shape, aval.dtype) for key, aval in zip(row, avals, strict=True)]
            for row in keys
        ]

    def workload(self, call: Call) -> timer.Workload:
        run = jax.jit(kernel(self._closed, call))
        return timer.Workload(lambda i: run(*self._arrays[i]), self._sets)


def kernel(closed, call: Call) -> Callable:
    """The function of a program's operands that a call computes, on a GPU."""
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.out_avals]
    scratch = [jax.ShapeDtypeStruct(shape, np.float32) for shape in call.scratch]
    ffi_call = jax.ffi.ffi_call(_launch.TARGET, [*results, *scratch])
    return lambda *operands: ffi_call(*operands, **call.attributes)[: len(results)]


def _draw(key, shape, dtype):
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jax.random.normal(key, shape, wide).astype(dtype)
