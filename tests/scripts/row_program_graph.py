"""Calls of jaxnorm_launch until they are captured; counts them in the dump's command buffers."""

import json
import pathlib
import sys

import jax
import numpy as np

tests = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(tests))
from launches import numbers, ranks, reverse, scale, sums  # noqa: E402

from jaxnorm._rows import launcher  # noqa: E402

gpu = launcher.gpus()[0]
columns = min(160 * 1024, gpu.shared_bytes) // 4
cluster = 4 if gpu.architecture >= 90 else 1


@jax.jit
def f(x, wide, groups):
    twice = scale(scale(x))
    return (
        twice,
        reverse(wide, 4 * columns),
        ranks(6, cluster) if cluster > 1 else scale(x),
        sums(groups, 1),
        sums(groups, 0),
    )


x, wide, groups = numbers(1000, 64), numbers(70, columns), numbers(3, 5000, 64)
right = []
for i in range(20):
    results = f(x + i, wide + i, groups + i)
    expected = (
        (x + i) * 4,
        (wide + i)[:, ::-1],
        np.tile(cluster * 1000 + np.arange(cluster), (6, 1)) if cluster > 1 else (x + i) * 2,
        (groups + i).sum(1),
        (groups + i).sum((0, 1))[None],
    )
    right.append(all(map(np.array_equal, results, expected)))

# The thunk sequence has a line per thunk. Thunks of a command buffer are indented further than the command buffer.
(dump,) = pathlib.Path(sys.argv[1]).glob("*jit_f.thunk_sequence_after_thunk_passes.txt")
captured, depth = 0, None
for line in dump.read_text().splitlines():
    indent = len(line) - len(line.lstrip())
    if depth is not None and indent <= depth:
        depth = None
    if "kCommandBuffer" in line:
        depth = indent
    elif depth is not None:
        captured += "kCustomCall" in line
print(json.dumps({"right": right, "captured": captured}))
