"""Reads compiled HLO text: which collectives and custom calls a program holds, and their sizes."""

import dataclasses
import math
import re

import jax

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)
BYTES = {"pred": 1, "u8": 1, "s8": 1, "f16": 2, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
BYTES |= {"f64": 8, "s64": 8, "u64": 8}


@dataclasses.dataclass(frozen=True)
class Instruction:
    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # results: (element type, shape)

    @property
    def bytes(self) -> int:
        return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in self.arrays)


def _arrays(text):
    found = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return tuple(
        (dtype, tuple(int(n) for n in shape.split(",") if n))
        for dtype, shape in found
        if dtype in BYTES
    )


def text(function, *args) -> str:
    return jax.jit(function).lower(*args).compile().as_text()


def run(function, *args):
    """(text, results) of a program that is compiled once for both."""
    compiled = jax.jit(function).lower(*args).compile()
    return compiled.as_text(), compiled(*args)


def collectives(program: str) -> list[Instruction]:
    """All collectives of a compiled program; the asynchronous pair of one counts once."""
    kinds = "|".join(COLLECTIVES)
    found = re.findall(rf"= (\(?[^=]*?) ({kinds})(?:-start)?\(", program)
    return [Instruction(kind, _arrays(result)) for result, kind in found]


def custom_calls(program: str) -> list[Instruction]:
    """Jaxnorm's calls with the arrays they return. The launcher's are named after their operation."""
    pattern = r'= (\(?[^=]*?) custom-call\(.*custom_call_target="(jaxnorm_\w+)"(.*)'
    found = []
    for result, target, rest in re.findall(pattern, program):
        if target == "jaxnorm_launch" and (operation := re.search(r'operation = "(\w+)"', rest)):
            target = f"jaxnorm_{operation[1]}"
        found.append(Instruction(target, _arrays(result)))
    return found
