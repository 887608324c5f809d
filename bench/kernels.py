"""What kernels of a training step do, as their names tell."""

import re

from jaxnorm._measure import timer

# What a kernel does, by its name; the first that is found counts.
_COPY, _MATMUL = "copy or transposition", "matrix product or convolution"
_ATTENTION = "attention"
# What jaxnorm has no part in.
PRODUCTS = (_MATMUL, _ATTENTION)
_GROUPS = (
    (_ATTENTION, "sdpa|flash|fmha"),
    # cuDNN's own transpositions; names of its convolutions have NHWC in them, too.
    (_COPY, r"ToN(hwc|chw)"),
    (_MATMUL, timer.MATMUL.pattern + "|cudnn|fprop|dgrad|wgrad|convolve|winograd"),
    (_COPY, "memcpy|memset|copy|transpose"),
    ("fusion", "fusion|wrapped_|triton"),
)


def group(kernel: str) -> str:
    """What a kernel counts as."""
    if found := re.search(r"jaxnorm_(\w+?)(?:_finish)?\b", kernel):
        return f"jaxnorm {found[1]}"
    for name, pattern in _GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def rest(record: dict) -> float | None:
    """Seconds of kernels that are no matrix product, convolution or attention; None where they were not measured."""
    groups = record.get("kernel_times", {}).get("groups")
    return None if groups is None else sum(s for g, s in groups.items() if g not in PRODUCTS)
