"""Times calls: kernel time on a GPU, wall-clock on a CPU. Serves `python -m jaxnorm` and bench/.

On a GPU the figure is the time in which kernels of one call run, from a trace of the profiler:
launch gaps and Python are left out, and where a kernel begins while another one still runs, that
time counts once. The trace has every kernel of the process, whichever library launched it, so other
frameworks are timed by the same clock. Each call works on its own set of buffers, so that between
two uses of a set more data has moved than the L2 cache holds.
"""

import ctypes
import dataclasses
import functools
import math
import pathlib
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Event(NamedTuple):
    """A kernel of a trace."""

    name: str
    seconds: float  # in which no earlier kernel ran
    gap: float = 0.0  # seconds before it in which none ran


# A set is cold again once this many times the L2's size has passed through the cache.
ROTATION_FACTOR = 2.5
MAX_SETS = 64

MATMUL = re.compile(
    r"gemm|cutlass|cublas|nvjet|xmma|wgmma|matmul|splitk(?!ernel)|_dot_|\bdot\b", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """`run(i)` starts one call on buffer set i, `wait` blocks until its result is there."""

    run: Callable[[int], object]
    sets: int = 1
    wait: Callable[[object], object] = jax.block_until_ready


@dataclasses.dataclass(frozen=True)
class Timing:
    """Durations of single calls, in seconds, and how they were read."""

    seconds: tuple[float, ...]
    clock: str
    kernels: int | None = None  # per call
    matmul_seconds: float = 0.0  # median part of a call spent in matrix multiplications
    gap_seconds: float | None = None  # median time between a call's kernels, not in `seconds`

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.seconds)
        position = q * (len(ordered) - 1)
        low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
        return low + (high - low) * (position - math.floor(position))

    @property
    def spread(self) -> float:
        """Half the width of the median's 95% confidence interval, relative to the median.

        The interval runs between two order statistics (no distribution is assumed): ranks n/2 - z
        sqrt(n)/2 and 1 + n/2 + z sqrt(n)/2 with z = 1.96, which the largest and the smallest value
        bound for n < 6.
        """
        ordered, n = sorted(self.seconds), len(self.seconds)
        reach = 1.96 * math.sqrt(n) / 2
        low, high = max(round(n / 2 - reach), 1), min(round(1 + n / 2 + reach), n)
        return (ordered[high - 1] - ordered[low - 1]) / 2 / self.median


def ratio_spread(a: float, b: float) -> float:
    """Relative spread of a ratio of two medians with relative spreads `a` and `b`."""
    return math.hypot(a, b)


# What jit does to return an argument is no kernel of the call.
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)

# ---- clocks ----


def trace_events(body: Callable[[], None]) -> list[Event]:
    """What the device's streams did while `body` ran (copies too), from a `jax.profiler` trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            body()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        return stream_events(jax.profiler.ProfileData.from_file(str(files[0])))


def stream_events(profile) -> list[Event]:
    """Events on the streams of a profile's GPU planes, in order of their start.

    Each has the time in which none of those before it ran, so the sum is the time in which any did.
    """
    events = [
        (event.start_ns, event.name, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:")
        for line in plane.lines
        if line.name.startswith("Stream")  # other lines repeat the same time by operation or module
        for event in line.events
    ]
    found, busy_until = [], min((start for start, _, _ in events), default=0)
    for start, name, end in sorted(events):
        begin = max(start, busy_until)
        found.append(Event(name, max(0, end - begin) * 1e-9, (begin - busy_until) * 1e-9))
        busy_until = max(begin, end)
    return found


@functools.cache
def find_clock(wanted: str = "auto") -> tuple[str, str]:
    """The clock to use on JAX's default device, and why a better one was passed over (or "").

    The trace is taken when three calls of a one-kernel function give three kernels of plausible
    length in it.
    """
    if wanted == "wall" or jax.default_backend() != "gpu":
        return "wall", ""
    x = jnp.arange(1 << 22, dtype=jnp.uint32)
    flip = jax.jit(lambda x: x ^ 1)
    jax.block_until_ready(flip(x))
    try:
        events = trace_events(lambda: jax.block_until_ready([flip(x) for _ in range(3)]))
    except Exception as error:
        return "wall", f"trace: {type(error).__name__}: {error}"
    if len(events) == 3 and all(1e-7 < event.seconds < 1e-2 for event in events):
        return "trace", ""
    return "wall", f"trace: three calls gave {events}"


class Calls(NamedTuple):
    """What the kernels of some calls took."""

    seconds: list[float]  # of each call, without gaps; or one mean
    kernels: int | None  # of a call, if all have as many
    matmul: float  # of a call, in matrix products
    gap: float | None  # of a call, between its kernels


def split_events(events: Sequence[Event], calls: int) -> Calls:
    """Durations of `calls` calls; matrix products and gaps are medians.

    When the kernels cannot be shared out evenly and alike, one figure is returned: the mean, with
    None for the number of kernels and the gap.

    >>> split_events([Event("a", 1, 9), Event("b", 2, 0.5), Event("a", 1.5, 9), Event("b", 2.5, 0.5)], 2)
    Calls(seconds=[3, 4.0], kernels=2, matmul=0.0, gap=0.5)
    """
    if not events:
        raise RuntimeError("the calls launched no kernel that the clock can see")
    per_call, rest = divmod(len(events), calls)
    groups = [events[i * per_call : (i + 1) * per_call] for i in range(calls)]
    names = {tuple(event.name for event in group) for group in groups}

    def matmul(events):
        return sum(event.seconds for event in events if MATMUL.search(event.name))

    if rest or len(names) > 1:
        return Calls([sum(e.seconds for e in events) / calls], None, matmul(events) / calls, None)
    return Calls(
        [sum(event.seconds for event in group) for group in groups],
        per_call,
        statistics.median(map(matmul, groups)),
        statistics.median(sum(event.gap for event in group[1:]) for group in groups),
    )


# ---- measuring ----


class _Runner:
    """Runs a workload on its sets in turn, keeping the latest output of each set.

    Kept outputs make the next call write somewhere else: a result that lands where the last one did
    stays in the L2.
    """

    def __init__(self, workload: Workload):
        self.workload = workload
        self.outputs: list[object] = [None] * workload.sets
        self.count = 0

    def call(self):
        index = self.count % self.workload.sets
        self.count += 1
        self.outputs[index] = None
        self.outputs[index] = output = self.workload.run(index)
        return output

    def warm_up(self) -> float:
        """Runs every set once and then times one call, for the choice of the number of calls."""
        for _ in range(self.workload.sets + 1):
            self.workload.wait(self.call())
        start = time.perf_counter()
        self.workload.wait(self.call())
        return time.perf_counter() - start


def measure(
    workloads: Mapping[str, Workload],
    *,
    calls: int = 30,
    rounds: int = 3,
    budget: float = 1.0,
    clock: str = "auto",
) -> dict[str, Timing | Exception]:
    """Times workloads alternately; one that fails leaves its exception and the others go on.

    Args:
      workloads: What to time, by name.
      calls: On a GPU, calls per workload, spread over `rounds`.
      rounds: On a GPU, how often to alternate between the workloads.
      budget: With wall-clock, seconds to spend on each workload, between 5 and 60 calls.
      clock: "trace", "wall", or "auto" for the better one.

    Returns:
      A Timing, or the exception that was raised, for each workload.
    """
    name, _ = find_clock(clock)
    results: dict[str, Timing | Exception] = {}
    runners, slowest = {}, 0.0
    for key, workload in workloads.items():
        try:
            runner = _Runner(workload)
            slowest = max(slowest, runner.warm_up())
            runners[key] = runner
        except Exception as error:
            results[key] = error
    if name == "wall":
        calls = max(5, min(60, int(budget / max(slowest, 1e-6))))
        results |= _measure_wall(runners, calls)
    else:
        results |= _measure_kernels(runners, -(-calls // rounds), rounds)
    return {key: results[key] for key in workloads}


def _measure_wall(runners, calls) -> dict[str, Timing | Exception]:
    seconds: dict[str, list[float]] = {key: [] for key in runners}
    failed: dict[str, Timing | Exception] = {}
    for turn in range(calls):
        # Every other turn backwards: no workload always follows the same neighbour.
        for key in list(runners)[:: 1 if turn % 2 == 0 else -1]:
            if key in failed:
                continue
            runner = runners[key]
            try:
                start = time.perf_counter()
                runner.workload.wait(runner.call())
                seconds[key].append(time.perf_counter() - start)
            except Exception as error:
                failed[key] = error
    done = {key: Timing(tuple(s), "wall") for key, s in seconds.items() if key not in failed}
    return done | failed


def _measure_kernels(runners, calls, rounds) -> dict[str, Timing | Exception]:
    parts: dict[str, list[Calls]] = {key: [] for key in runners}
    failed: dict[str, Timing | Exception] = {}

    def run(runner):
        output = None
        for _ in range(calls):
            output = runner.call()
        runner.workload.wait(output)

    for _ in range(rounds):
        for key, runner in runners.items():
            if key in failed:
                continue
            try:
                events = trace_events(functools.partial(run, runner))
                kernels = [event for event in events if not _COPY.match(event.name)]
                parts[key].append(split_events(kernels, calls))
            except Exception as error:
                failed[key] = error
    done = {}
    for key, found in parts.items():
        if key in failed:
            continue
        kernels = {part.kernels for part in found}
        exact = len(kernels) == 1 and None not in kernels
        gaps = [part.gap for part in found if part.gap is not None]
        done[key] = Timing(
            tuple(s for part in found for s in part.seconds),
            "trace" if exact else "trace mean",
            kernels.pop() if exact else None,
            statistics.median(part.matmul for part in found),
            statistics.median(gaps) if exact else None,
        )
    return done | failed


# ---- the device ----


@functools.cache
def device_name() -> str:
    """What JAX's default device is called; for a CPU the processor's name."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def l2_bytes() -> int:
    """Size of the GPU's L2 cache; 0 on a CPU or when the driver does not say."""
    if jax.default_backend() != "gpu":
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        value, device = ctypes.c_int(), ctypes.c_int()
        l2_cache_size = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return 0
        if driver.cuDeviceGetAttribute(ctypes.byref(value), l2_cache_size, device):
            return 0
        return value.value
    except (OSError, AttributeError):
        return 0


def rotation(bytes_per_set: int) -> tuple[int, bool]:
    """How many buffer sets to rotate through, and whether each is then cold in the L2 cache.

    On a CPU one set is used and nothing is promised.
    """
    l2 = l2_bytes()
    if not l2:
        return 1, False
    needed = math.ceil(ROTATION_FACTOR * l2 / max(bytes_per_set, 1))
    return min(max(needed, 1), MAX_SETS), needed <= MAX_SETS


@dataclasses.dataclass(frozen=True)
class CopyRate:
    """Bytes read plus written per second by a large copy, the ceiling of all fractions."""

    bytes_per_second: float
    method: str
    copy: float  # of `jnp.copy`
    elementwise: float  # of one kernel that reads and writes each element once
    size: int  # bytes of the array copied


def copy_rate(clock: str = "auto") -> CopyRate:
    """Measures the copy rate of JAX's default device, on an array far larger than a GPU's L2."""
    on_gpu = jax.default_backend() == "gpu"
    size = (1 << 29) if on_gpu else (1 << 25)
    # Random bits: memory can look faster than it is on constant data.
    x = jax.jit(lambda key: jax.random.bits(key, (size // 4,), jnp.uint32))(jax.random.key(0))
    copy, flip = jax.jit(jnp.copy), jax.jit(lambda x: x ^ 1)
    kernel = measure(
        {"flip": Workload(lambda _: flip(x))}, calls=12, rounds=2, budget=0.2, clock=clock
    )["flip"]
    elementwise = 0.0 if isinstance(kernel, Exception) else 2 * size / kernel.median
    if on_gpu:
        copied = 2 * size / _seconds_per_copy(copy, x)
        method = "jnp.copy, back-to-back wall-clock"
    else:
        timing = measure({"copy": Workload(lambda _: copy(x))}, budget=0.2)["copy"]
        copied = 0.0 if isinstance(timing, Exception) else 2 * size / timing.median
        method = "jnp.copy, wall-clock"
    if not copied:
        method = f"x ^ 1, {find_clock(clock)[0]}"
    return CopyRate(copied or elementwise, method, copied, elementwise, size)


def copy_workload(nbytes: int) -> Workload:
    """Reads and writes `nbytes` in all: a copy of this size, allocation included."""
    sets, _ = rotation(nbytes)
    xs = [jnp.arange(i, max(nbytes // 8, 1) + i, dtype=jnp.uint32) for i in range(sets)]
    flip = jax.jit(lambda x: x ^ 1)
    return Workload(lambda i: flip(xs[i]), sets)


def _seconds_per_copy(copy, x) -> float:
    """Time of one copy in a queue: a copy is no kernel, and the queue hides the launches.

    Queues of 10 and 30 copies gave 4.11 to 4.33 TB/s on one kind of GPU: a host's delays are too large a part of them.
    """

    def queue(n):
        start = time.perf_counter()
        y = None
        for _ in range(n):
            y = copy(x)
        jax.block_until_ready(y)
        return time.perf_counter() - start

    queue(3)
    return statistics.median((queue(220) - queue(20)) / 200 for _ in range(5))


# ---- forward and backward apart ----


def split_vjp(
    function: Callable, example: Sequence, fixed: Sequence = (), cotangents: int = 1
) -> tuple[Callable, Callable, Callable]:
    """Forward and backward as two jits, and what goes from one to the other.

    `forward(args, fixed)` is (y, what it computes for backward), `residuals(that, args, fixed)` all
    that JAX keeps between the two, and `backward(residuals, dy)` is dx. What is kept of the arguments
    is no result of forward: to return an argument is to copy it, and what a copy leaves in the cache
    takes time of the next kernel.

    Args:
      function: A function of arrays, called as `function(*args, *fixed)`.
      example: The arguments that are differentiated (or ShapeDtypeStructs), with the shapes that
        will be used.
      fixed: Further arguments.
      cotangents: Of how many arguments, from the first on; `dx` is a tuple where it is not 1.
        Functions such as relu(x + y) give each argument the same one, and returning it twice costs
        a copy.
    """
    traced = []  # the structure of the residuals, and which are arguments

    @jax.jit
    def forward(args, fixed):
        y, vjp = jax.vjp(lambda *args: function(*args, *fixed), *args)
        leaves, tree = jax.tree.flatten(vjp)
        places = {id(argument): i for i, argument in enumerate((*args, *fixed))}
        passed = [places.get(id(leaf)) for leaf in leaves]
        traced.append((tree, passed))
        return y, [leaf for leaf, i in zip(leaves, passed, strict=True) if i is None]

    def residuals(computed, args, fixed):
        given, rest = (*args, *fixed), iter(computed)
        return [next(rest) if i is None else given[i] for i in traced[0][1]]

    @jax.jit
    def backward(residuals, dy):
        dx = jax.tree.unflatten(traced[0][0], residuals)(dy)
        return dx[0] if cotangents == 1 else tuple(dx[:cotangents])

    forward.trace(tuple(example), tuple(fixed))
    return forward, residuals, backward
