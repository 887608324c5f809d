"""A call of kernels written by hand, as data: its text, its launches and its scratch memory."""

import dataclasses
import functools
from collections.abc import Sequence

from jaxnorm import _launch
from jaxnorm._kernels import source


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call.

    Attributes:
      operation: what it computes.
      dtype: of elements.
      files: of the text, each behind the files that it uses.
      constants: (macro, value) that choose the instance.
      launches: in order.
      structures: (C++ type, bytes) of the arguments.
      scratch: number of float32 elements of the buffer behind the results, or None.
      buffer_bytes: of operands and results, without the scratch memory.
    """

    operation: str
    dtype: str
    files: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    launches: tuple[_launch.Launch, ...]
    structures: tuple[tuple[str, int], ...]
    scratch: int | None
    buffer_bytes: tuple[int, ...]

    @functools.cached_property
    def source(self) -> str:
        return source.assemble(self.files, self.dtype, dict(self.constants), dict(self.structures))

    @property
    def attributes(self) -> dict:
        """The attributes of the FFI call."""
        scratch = () if self.scratch is None else (4 * self.scratch,)
        return _launch.attributes(
            self.operation, self.source, self.launches, (*self.buffer_bytes, *scratch)
        )

    def __str__(self) -> str:
        """A line for each launch."""
        constants = ", ".join(f"{name} {value}" for name, value in self.constants)
        lines = [f"{self.operation} {self.dtype} ({constants})"]
        for launch in self.launches:
            flags = [f for f in ("cooperative", "early") if getattr(launch, f)]
            lines.append(
                f"  {launch.kernel} {launch.grid[0]} x {launch.block[0]}, {launch.shared_bytes} bytes"
                + "".join(f", {f}" for f in flags)
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Part:
    """One or more launches, and what they need. The parts of a call become a Plan."""

    files: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    launches: tuple[_launch.Launch, ...]
    structures: tuple[tuple[str, int], ...]
    scratch: int | None = None


def join(operation: str, dtype: str, parts: Sequence[Part], buffer_bytes: Sequence[int]) -> Plan:
    """A call of all parts, one after the other. The parts share the scratch memory."""

    def all_of(name):
        return tuple(dict.fromkeys(x for part in parts for x in getattr(part, name)))

    scratch = [part.scratch for part in parts if part.scratch is not None]
    launches = tuple(launch for part in parts for launch in part.launches)
    return Plan(
        operation, dtype, all_of("files"), all_of("constants"), launches, all_of("structures"),
        max(scratch, default=None), tuple(buffer_bytes),
    )  # fmt: skip
