"""The one table of shapes, for the benchmark and for the tests.

`ci` cases take under about 30 ms a call on two CPU cores. `full` cases are those that were measured
for other libraries on an H200; they need a GPU. `widths` cases, for a GPU too, are what transformers
have: hidden sizes, most of them no powers of two, two odd ones, and vocabularies. Tests pick from
all lists and replace what they vary, usually the dtype.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxnorm._ops import OPERATIONS
from jaxnorm._ops.record import Sizes, parameter_dtype

NORMS = ("layer_norm", "rms_norm")
BATCH_NORMS = ("batch_norm", "batch_norm_inference")
CROSS_ENTROPY = "softmax_cross_entropy"
OPS = (*OPERATIONS, "program")
DTYPES = ("float16", "bfloat16", "float32", "float64")
TAGS = ("ci", "full", "widths", "gpu")

# What can be timed. "forward" keeps nothing; "together" is forward and backward in one jit, as in a
# training step: the result and the gradients of all arguments. These two are what is timed by default.
# Forward and backward as two programs, which have to pass residuals through memory: "forward_train"
# also writes what backward needs beyond the result, "backward" starts from that. "grad", of programs
# and of the cross-entropy, is the gradients in one jit without the result.
DIRECTIONS = ("forward", "together", "forward_train", "backward", "grad")
DEFAULT_DIRECTIONS = ("forward", "together")

# Programs that are the operation and elementwise neighbours, which XLA would fuse with its own.
BORDERS = {"gated": "rms_norm", "gelu": "layer_norm"}

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one shape.

    For a program, `shape` holds its sizes: (batch, heads, length, width) for attention, (tokens,
    width, hidden) for mlp and norm, (batch, height, width, channels) for conv: 1x1 convolution,
    batch_norm with a ReLU, 1x1 convolution; (tokens, width) for gated, which is rms_norm(x * silu(z)),
    and gelu, gelu(layer_norm(x)). Norms have float32 parameters (float64 for float64). `axis` is
    the axis that softmax and the cross-entropy reduce, or the feature axis of batch_norm, whose `tail`
    is what follows in the same call: "", "relu" or "add_relu".
    """

    op: str
    shape: tuple[int, ...]
    axis: int = -1
    dtype: str = "float32"
    where_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    scale: float | None = None
    program: str = ""
    tail: str = ""
    tags: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """A name that tells this case from every other of its operation."""
        parts = ["x".join(map(str, self.shape)), self.dtype]
        if self.program:
            parts.insert(0, self.program)
        has_axis = self.op in ("softmax", "log_softmax", *BATCH_NORMS, CROSS_ENTROPY)
        if has_axis and self.axis not in (-1, len(self.shape) - 1):
            parts.append(f"axis={self.axis}")
        if self.tail:
            parts.append(self.tail)
        if self.scale is not None:
            parts.append("scale")
        for name, shape in (("where", self.where_shape), ("bias", self.bias_shape)):
            if shape is not None:
                parts.append(f"{name}[{','.join(map(str, shape))}]")
        return " ".join(parts)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array that the operation works on, inside a program too."""
        if self.program == "attention":
            batch, heads, length, _ = self.shape
            return (batch, heads, length, length)
        if self.program in ("mlp", "norm"):
            tokens, _, hidden = self.shape
            return (tokens, hidden)
        return self.shape

    @property
    def parameters(self) -> int:
        """Arrays of one row, or of one number per feature, that the operation takes, as a norm does."""
        return OPERATIONS[self.operation].parameters

    @property
    def arrays(self) -> int:
        """Arguments of the full shape."""
        return 2 if "add_relu" in (self.op, self.tail) or self.program == "gated" else 1

    @property
    def parameter_dtype(self) -> str:
        """Of parameters, and of losses."""
        return parameter_dtype(self.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.array_shape)

    @property
    def columns(self) -> int:
        """Length of the reduced axis, of the feature axis, or of the last one where there is neither."""
        shape = self.array_shape
        return shape[self.axis] if shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes of one array of the operation."""
        return self.size * ITEMSIZE[self.dtype]

    @property
    def directions(self) -> tuple[str, ...]:
        """Directions that mean something for this case."""
        if self.program:
            return ("forward", "grad") if self.program in BORDERS else ("grad",)
        if self.op in ("relu", "add_relu", *NORMS, "batch_norm"):
            return ("forward", "together", "forward_train", "backward")
        if self.op == "batch_norm_inference":
            return ("forward", "together")
        if self.op == CROSS_ENTROPY:
            return ("forward", "together", "backward", "grad")
        return ("forward", "together", "backward")

    @property
    def default_directions(self) -> tuple[str, ...]:
        """What is timed where no direction is named: all of a program, forward and together of the others."""
        if self.program:
            return self.directions
        return tuple(d for d in self.directions if d in DEFAULT_DIRECTIONS)

    @property
    def has_products(self) -> bool:
        """Whether it is a program with matrix products or convolutions."""
        return self.program not in ("", "scores", *BORDERS)

    @property
    def operation(self) -> str:
        """The operation, or the one inside of the program."""
        inside = {"mlp": "relu", "norm": "layer_norm", "conv": "batch_norm"} | BORDERS
        return inside.get(self.program, "softmax") if self.program else self.op

    @property
    def sizes(self) -> Sizes:
        operands = math.prod(self.where_shape) if self.where_shape is not None else 0
        if self.bias_shape is not None:
            operands += math.prod(self.bias_shape) * ITEMSIZE[self.dtype]
        last = self.array_shape[-1] if self.array_shape else 1
        return Sizes(
            array=self.nbytes,
            arrays=self.arrays,
            operands=operands,
            columns=self.columns,
            rows=self.size // max(self.columns, 1),
            number=ITEMSIZE[self.parameter_dtype],
            bits=self.size // max(last, 1) * -(-last // 8),
            relu=bool(self.tail),
        )

    def min_bytes(self, direction: str) -> int:
        """Fewest bytes that must cross memory: each input read once, each output written once.

        `Operation.bytes` in jaxnorm/_ops has what an operation must read and write. Together: what one program that is
        given all arguments and dy cannot do without. x and dy are read, y and dx written, each once, and nothing is
        kept, neither bits nor statistics; so two kernels, of which the second reads x or y again, reach 4/5 of the rate
        at most.

        A program counts the operation inside it alone, forward and backward, not its matrix products; one of `BORDERS`
        counts its arguments and results. "scores" counts x, dy, y and dx.
        """
        if self.program in BORDERS:
            return self._border_bytes(direction)
        if (self.program, direction) == ("scores", "grad"):
            direction = "together"
        try:
            return OPERATIONS[self.operation].bytes(self.sizes, direction)
        except KeyError:
            known = ", ".join(self.directions)
            raise ValueError(f"direction must be one of {known}, got {direction!r}") from None

    def _border_bytes(self, direction: str) -> int:
        parameters = self.parameters * self.columns * ITEMSIZE[self.parameter_dtype]
        match direction:
            case "forward":
                return (self.arrays + 1) * self.nbytes + parameters
            case "grad":
                return (2 * self.arrays + 1) * self.nbytes + 2 * parameters
        raise ValueError(f"direction must be forward or grad, got {direction!r}")


def _tags(*names: str) -> frozenset[str]:
    return frozenset(names)


_CI, _GPU, _WIDTHS = _tags("ci"), _tags("full", "gpu"), _tags("widths", "gpu")


def _tagged(ci: list[Case], full: list[Case], widths: Sequence[Case] = ()) -> list[Case]:
    tagged = ((_CI, ci), (_GPU, full), (_WIDTHS, widths))
    return [dataclasses.replace(c, tags=tags) for tags, found in tagged for c in found]


def _row_cases(op: str) -> tuple[list[Case], list[Case]]:
    """Rows of all lengths, for CI and in full: what every operation along the last axis is timed on."""
    ci = [
        Case(op, (8192, 32)),
        Case(op, (4096, 128)),
        Case(op, (2048, 513)),
        Case(op, (1024, 1023)),
        Case(op, (1024, 1024)),
        Case(op, (1024, 1024), dtype="bfloat16"),
        Case(op, (1024, 1024), dtype="float16"),
        Case(op, (256, 4096)),
        Case(op, (32, 50257)),
        Case(op, (4, 262144)),
    ]
    rows = 49152
    columns = (32, 64, 128, 256, 512, 1023, 1024, 2048, 4095, 4096, 8192, 16384, 32768)
    shapes = [(rows, c) for c in columns]
    shapes += [(8192, 50257), (8192, 128256), (64, 131072), (8, 1048576)]
    return ci, [Case(op, shape, dtype="bfloat16") for shape in shapes]


def _softmax_cases(op: str) -> list[Case]:
    ci, full = _row_cases(op)
    ci += [
        Case(op, (8, 256, 256), axis=1),
        Case(op, (4, 64, 28, 28), axis=1),
        Case(op, (2, 4, 256, 256), where_shape=(2, 1, 1, 256), scale=0.125),
    ]
    full += [
        Case(op, (64, 1024, 1024), axis=1, dtype="bfloat16"),
        Case(op, (256, 64, 56, 56), axis=1, dtype="bfloat16"),
    ]
    if op == "softmax":
        ci += [
            Case(op, (2, 4, 256, 256), where_shape=(1, 1, 256, 256), scale=0.125),
            Case(op, (2, 4, 256, 256), bias_shape=(1, 4, 256, 256), scale=0.125),
        ]
        # Attention scores [batch, head, query, key]: padded keys, a causal mask, a relative
        # position bias.
        attention = {"dtype": "bfloat16", "scale": 0.125}
        full += [
            Case(op, (16, 16, 1024, 1024), where_shape=(16, 1, 1, 1024), **attention),
            Case(op, (4, 16, 2048, 2048), where_shape=(4, 1, 1, 2048), **attention),
            Case(op, (4, 16, 2048, 2048), where_shape=(1, 1, 2048, 2048), **attention),
            Case(op, (16, 16, 1024, 1024), bias_shape=(1, 16, 1024, 1024), **attention),
        ]
    return _tagged(ci, full)


def _relu_cases(op: str) -> list[Case]:
    ci = [
        Case(op, (1024, 1024)),
        Case(op, (1024, 1023)),
        Case(op, (1024, 1024), dtype="bfloat16"),
        Case(op, (1024, 1024), dtype="float16"),
        Case(op, (16, 64, 32, 32)),
        Case(op, (65536, 17)),
    ]
    # 256 MB an array, in widths that 16-byte loads and whole mask bytes divide, and in widths that
    # they do not.
    full = [
        Case(op, (32768, 4096), dtype="float16"),
        Case(op, (32768, 4095), dtype="float16"),
        Case(op, (131072, 1023), dtype="float16"),
        Case(op, (1048576, 127), dtype="float16"),
        Case(op, (256, 56, 56, 167), dtype="float16"),
        Case(op, (16384, 4096), dtype="float32"),
        Case(op, (16, 32, 112, 112), dtype="float32"),  # of a ResNet: 51 MB
    ]
    return _tagged(ci, full)


def _norm_cases(op: str) -> list[Case]:
    columns = (768, 1280, 1536, 2560, 3072, 3584, 4608, 5001, 5120, 6144, 7168)
    columns += (9001, 9216, 12288, 14336, 18432, 20480)
    shapes = [(32768, c) for c in columns]
    # 8 to 17 MB an array, which the L2 cache keeps from one operation to the next.
    shapes += [(8192, 768), (8192, 1024), (2048, 2048), (4096, 2048), (2048, 4096)]
    return _tagged(*_row_cases(op), [Case(op, shape, dtype="bfloat16") for shape in shapes])


def _batch_norm_cases(op: str) -> list[Case]:
    tails = ("", "relu", "add_relu")
    ci = [
        Case(op, shape, axis=axis, tail=tail)
        for shape, axis in (((16, 28, 28, 64), -1), ((16, 64, 28, 28), 1), ((16, 512, 7, 7), 1))
        for tail in tails
    ]
    ci += [
        Case(op, (16, 28, 28, 64), dtype="bfloat16", tail="relu"),
        Case(op, (16, 28, 28, 64), dtype="float16", tail="relu"),
        Case(op, (16, 64, 28, 28), axis=1, dtype="bfloat16", tail="add_relu"),
        Case(op, (16, 7, 7, 512), tail="add_relu"),
        Case(op, (32, 56, 56, 8), tail="relu"),
        Case(op, (4096, 256)),
        Case(op, (65536, 17), tail="relu"),
        Case(op, (8, 3, 224, 224), axis=1),
        Case(op, (4, 8, 14, 14, 64), tail="relu"),
    ]
    half = {"dtype": "float16"}
    full = [
        Case(op, (16, 32, 112, 112), axis=1, tail="relu", **half),
        Case(op, (16, 112, 112, 32), tail="relu", **half),
        Case(op, (256, 112, 112, 64), tail="relu", **half),
        Case(op, (256, 56, 56, 64), tail="relu", **half),
        Case(op, (256, 56, 56, 256), tail="relu", **half),
        Case(op, (256, 28, 28, 512), tail="relu", **half),
        Case(op, (256, 14, 14, 1024), tail="relu", **half),
        Case(op, (256, 7, 7, 2048), tail="relu", **half),
        Case(op, (256, 256, 56, 56), axis=1, tail="relu", **half),
        Case(op, (256, 512, 28, 28), axis=1, tail="relu", **half),
        Case(op, (256, 1024, 14, 14), axis=1, tail="relu", **half),
        Case(op, (256, 64, 56, 56), axis=1, tail="relu", **half),
        Case(op, (256, 2048, 7, 7), axis=1, tail="relu", **half),
        Case(op, (256, 56, 56, 256), tail="add_relu", **half),
        Case(op, (256, 28, 28, 512), tail="add_relu", **half),
        Case(op, (256, 14, 14, 1024), tail="add_relu", **half),
        Case(op, (256, 256, 56, 56), axis=1, tail="add_relu", **half),
        Case(op, (256, 512, 28, 28), axis=1, tail="add_relu", **half),
        Case(op, (256, 1024, 14, 14), axis=1, tail="add_relu", **half),
        Case(op, (256, 56, 56, 256), **half),
    ]
    return _tagged(ci, full)


def _cross_entropy_cases() -> list[Case]:
    op = CROSS_ENTROPY
    ci = [
        Case(op, (8192, 32)),
        Case(op, (1024, 1000)),
        Case(op, (1024, 1024), dtype="bfloat16"),
        Case(op, (1024, 1024), dtype="float16"),
        Case(op, (256, 4096)),
        Case(op, (32, 50257)),
        Case(op, (4, 262144)),
        Case(op, (4, 21, 96, 96), axis=1),
    ]
    # Vocabularies, classes of images, few rows, and classes of pixels.
    bf16 = {"dtype": "bfloat16"}
    full = [
        Case(op, (8192, 32768), **bf16),
        Case(op, (8192, 50257), **bf16),
        Case(op, (8192, 128256), **bf16),
        Case(op, (32768, 4096), **bf16),
        Case(op, (131072, 1000), **bf16),
        Case(op, (1048576, 32), **bf16),
        Case(op, (64, 131072), **bf16),
        Case(op, (8, 1048576), **bf16),
        Case(op, (16, 21, 512, 512), axis=1, **bf16),
        Case(op, (64, 150, 128, 128), axis=1, **bf16),
        Case(op, (8192, 32768), dtype="float32"),
    ]
    shapes = [(8192, c) for c in (32000, 50304, 65536, 100352, 151936)] + [(4096, 256000)]
    return _tagged(ci, full, [Case(op, shape, **bf16) for shape in shapes])


def _program_cases() -> list[Case]:
    def attention(batch, heads, length, width, **changes):
        shape, where = (batch, heads, length, width), (batch, 1, 1, length)
        return Case(
            "program",
            shape,
            program="attention",
            where_shape=where,
            scale=width**-0.5,
            **changes,
        )

    def scores(batch, heads, length, **changes):
        shape, where = (batch, heads, length, length), (batch, 1, 1, length)
        return Case("program", shape, program="scores", where_shape=where, scale=0.125, **changes)

    bf16 = {"dtype": "bfloat16", "tags": _GPU}
    return [
        scores(2, 4, 256, tags=_CI),
        attention(2, 4, 256, 32, tags=_CI),
        Case("program", (512, 128, 512), program="mlp", tags=_CI),
        Case("program", (512, 128, 512), program="norm", tags=_CI),
        Case("program", (4, 14, 14, 32), program="conv", tail="relu", tags=_CI),
        *(Case("program", (1024, 1024), program=name, tags=_CI) for name in BORDERS),
        scores(16, 16, 1024, **bf16),
        attention(16, 16, 1024, 64, **bf16),
        attention(4, 16, 2048, 128, **bf16),
        Case("program", (16384, 1024, 4096), program="mlp", **bf16),
        Case("program", (16384, 4096, 4096), program="norm", **bf16),
        Case("program", (49152, 1024, 1024), program="norm", **bf16),
        Case("program", (16384, 1024, 1024), program="norm", **bf16),
        *(
            Case("program", (256, n, n, c), program="conv", tail="relu", **bf16)
            for n, c in ((56, 256), (28, 512), (14, 1024))
        ),
        *(Case("program", (32768, 4096), program=name, **bf16) for name in BORDERS),
    ]


ALL = (
    *_softmax_cases("softmax"),
    *_softmax_cases("log_softmax"),
    *_relu_cases("relu"),
    *_relu_cases("add_relu"),
    *_norm_cases("layer_norm"),
    *_norm_cases("rms_norm"),
    *_batch_norm_cases("batch_norm"),
    *_batch_norm_cases("batch_norm_inference"),
    *_cross_entropy_cases(),
    *_program_cases(),
)


def select(op: str | None = None, tag: str | None = None, dtype: str | None = None) -> list[Case]:
    """Cases of one operation (None or "all": of every one) and tag, each once.

    Args:
      op: One of `OPS`, "all" or None.
      tag: One of `TAGS`, or None for all.
      dtype: Replaces the dtype of every case.
    """
    if op not in (None, "all", *OPS):
        raise ValueError(f"op must be all or one of {', '.join(OPS)}, got {op!r}")
    if tag not in (None, *TAGS):
        raise ValueError(f"tag must be one of {', '.join(TAGS)}, got {tag!r}")
    found = [c for c in ALL if op in (None, "all", c.op) and (tag is None or tag in c.tags)]
    if dtype is not None:
        found = [dataclasses.replace(c, dtype=dtype) for c in found]
    return list(dict.fromkeys(found))
