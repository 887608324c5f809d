"""What one kernel does, for people: what each phase of it reads, computes and writes, its schedule, and its text."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from jaxnorm import _lib
from jaxnorm._primitive.programs import open_jaxpr
from jaxnorm._rows import launcher
from jaxnorm._rows.call import Call, simplified
from jaxnorm._rows.emit import preamble
from jaxnorm._rows.phases import Phases
from jaxnorm._rows.plan import Device, Plan
from jaxnorm._rows.rules import Program

# Bytes per second of a GPU's memory, by words of the GPU's name. The first entry whose words the name has counts.
MEMORY_RATES = {
    "H100 PCIe": 2.04e12,
    "H100 NVL": 3.94e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
    "GH200": 4.0e12,
    "B200": 8.0e12,
    "GB200": 8.0e12,
    "B300": 8.0e12,
    "H20": 4.0e12,
    "A100-PCIE-40GB": 1.56e12,
    "A100-SXM4-40GB": 1.56e12,
    "A100": 2.04e12,
    "L40S": 0.86e12,
    "L40": 0.86e12,
    "L4": 0.3e12,
    "A40": 0.7e12,
    "A10": 0.6e12,
    "RTX 5090": 1.79e12,
    "RTX 4090": 1.01e12,
    "RTX 3090": 0.94e12,
}
# Bytes per second and multiprocessor of GPUs that are not in the table: the rate of an H100.
RATE_OF_MULTIPROCESSOR = 25e9
# The part of this rate that a copy of a large array reaches.
REACHED = 0.9


def memory_rate(device: Device) -> tuple[float, str]:
    """(bytes per second that kernels are taken to move, what that assumes)."""
    reached = f"{REACHED:.0%} of its memory's rate"
    for name, rate in MEMORY_RATES.items():
        if re.search(rf"\b{name}\b", device.name):
            return REACHED * rate, reached
    rate = RATE_OF_MULTIPROCESSOR * device.multiprocessors
    return REACHED * rate, f"{reached}, guessed from its {device.multiprocessors} multiprocessors"


@dataclasses.dataclass(frozen=True, repr=False)
class Kernel:
    """What one kernel does; print it.

    Attributes:
      device: for which it is compiled.
      read, written: bytes of operands and results.
      moved: bytes that cross memory; more, where rows are too long to stay on the chip.
      phases: for each phase what it reads, takes from registers, computes, computes again, and ends with.
      plan: the schedule.
      threads: of a block.
      blocks: for which a multiprocessor has registers.
      shared_bytes: of a block.
      registers, spill_bytes: of a thread; None without NVRTC.
      seconds: `moved` at the rate of the device's memory.
      full_source: the CUDA text.
    """

    device: str
    read: int
    written: int
    moved: int
    phases: tuple[str, ...]
    plan: Plan
    threads: int
    blocks: int
    shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    seconds: float
    full_source: str

    @property
    def source(self) -> str:
        """The CUDA text, without the functions that all kernels have in front."""
        return self.full_source.removeprefix(preamble()).lstrip("\n")

    def lines(self) -> list[str]:
        found = [f"{f'phase {n}':<10}{text}" for n, text in enumerate(self.phases, 1)]
        found.append(f"{'schedule':<10}{self.plan}")
        if self.registers is None:
            compiled = "not compiled, there is no NVRTC"
        else:
            spills = f"{self.spill_bytes} bytes spilled" if self.spill_bytes else "none spilled"
            compiled = f"{self.registers} registers a thread, {spills}"
        found.append(
            f"{'block':<10}{self.threads} threads, {self.shared_bytes:,} bytes shared, {compiled}"
        )
        again = f" ({self.moved:,} bytes in all)" if self.moved > self.read + self.written else ""
        found.append(f"{'predicted':<10}{duration(self.seconds)}{again}")
        return found

    def __repr__(self):
        return "\n".join(
            [f"kernel for {self.device}: reads {self.read:,} bytes, writes {self.written:,} bytes"]
            + ["  " + line for line in self.lines()]
        )


def kernel(
    closed, device: Device, call: Call, operands: Sequence[str], results: Sequence[str]
) -> Kernel:
    """Describes the kernel of a program.

    Args:
      closed: the program.
      device: for which it is compiled.
      call: what lowering makes of it.
      operands: names.
      results: names.
    """
    assert call.plan is not None
    program, plan = simplified(closed), call.plan
    registers = spills = None
    if _lib.module("cuda").available:
        compiled = launcher.compile(call.source, device.architecture)
        registers = compiled.registers[call.kernel]
        spills = compiled.spill_bytes[call.kernel]
    phases = Phases(program)
    read = nbytes(v.aval for v in open_jaxpr(closed)[0].invars)
    written = nbytes(closed.out_avals)
    moved = read + written + _read_again(closed, program, phases, plan)
    rate, _ = memory_rate(device)
    return Kernel(
        device=device.name,
        read=read,
        written=written,
        moved=moved,
        phases=tuple(_phases(program, phases, plan, operands, results)),
        plan=plan,
        threads=call.threads,
        blocks=plan.blocks,
        shared_bytes=call.shared_bytes,
        registers=registers,
        spill_bytes=spills,
        seconds=moved / rate,
        full_source=call.source,
    )


def nbytes(avals: Iterable) -> int:
    """Bytes of arrays; a dimension without a number counts as 1."""
    sizes = [(a.shape, a.dtype.itemsize) for a in avals]
    return sum(math.prod(d for d in shape if isinstance(d, int)) * size for shape, size in sizes)


def _whole_inputs(program, evaluated) -> set[int]:
    """Numbers of the inputs with all rows and columns that a phase loads."""
    return {
        n.attr[0]
        for n, held in evaluated.items()
        if n.op == "input" and not held and program.inputs[n.attr[0]].whole
    }


def _read_again(closed, program: Program, phases: Phases, plan: Plan) -> int:
    if plan.source != "stream":
        return 0
    avals = [v.aval for v in open_jaxpr(closed)[0].invars]
    loaded = [i for e in phases.evaluated(plan.keep) for i in _whole_inputs(program, e)]
    again = list((collections.Counter(loaded) - collections.Counter(set(loaded))).elements())
    return nbytes(avals[i] for i in again)


def _phases(program: Program, phases: Phases, plan: Plan, operands, results):
    """A line for each phase."""
    seen: set[int] = set()
    loaded: set[int] = set()
    for number, found in enumerate(phases.evaluated(plan.keep)):
        inputs = {n.attr[0] for n, held in found.items() if n.op == "input" and not held}
        computed = [
            n for n, held in found.items() if not held and n.op not in ("input", "literal", "iota")
        ]
        kept = [n for n, held in found.items() if held]
        new = [n for n in computed if n.number not in seen]
        again = [n for n in computed if n.number in seen]
        seen |= {n.number for n in computed}
        held = "reads again" if plan.source == "stream" else "has"
        parts = [
            _part("reads", [operands[i] for i in sorted(inputs - loaded)]),
            _part(held, [operands[i] for i in sorted(inputs & loaded)]),
            _part("from registers", _operations(kept)),
            _part("computes", _operations(new)),
            _part("again", _operations(again)),
            _part("reduces by", _counted(n.attr[0] for n in phases.reductions[number])),
        ]
        loaded |= inputs
        if number == phases.count - 1:
            rows = [o for o in program.outputs if not o.after]
            parts.append(_part("writes", [results[o.number] for o in rows]))
            sums = [o for o in program.outputs if o.after]
            parts.append(_part("sums over rows for", [results[o.number] for o in sums]))
        yield "; ".join(p for p in parts if p)


def _part(verb: str, what: Sequence[str]) -> str:
    return f"{verb} {', '.join(what)}" if what else ""


def _operations(nodes) -> list[str]:
    return _counted(n.op.removeprefix("local_") for n in sorted(nodes, key=lambda n: n.number))


def _counted(names: Iterable[str]) -> list[str]:
    found = collections.Counter(names)
    return [name if count == 1 else f"{count} {name}" for name, count in found.items()]


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
