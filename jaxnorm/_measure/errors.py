"""Errors of an operation against its float64 reference."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxnorm._ops.record import Operation, gradient_of, parameter_dtype


@dataclasses.dataclass
class Check:
    """The largest error of one operation, dtype and direction over the shapes tried."""

    op: str
    dtype: str
    direction: str
    shapes: list[str] = dataclasses.field(default_factory=list)
    error: float = 0.0  # relative to the size of the terms that are added up
    of_tolerance: float = 0.0  # above 1 fails
    message: str = ""

    @property
    def ok(self) -> bool:
        return not self.message and self.of_tolerance <= 1


def compare(got, reference, size, floor, dtype: str, columns: int) -> tuple[float, float]:
    """(relative error, error as a part of the tolerance), each the worst over all elements.

    The tolerance is a few units in the last place of `size`, the magnitude of what is added up, and
    `floor`, what the dtype cannot hold. Half precision rounds once, at the store; in single and
    double precision sums add to the error.
    """
    half = dtype in ("float16", "bfloat16")
    eps = float(jax.numpy.finfo(dtype).eps)
    units = 4.0 if half else 16 + math.sqrt(columns)
    got = np.asarray(got, np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(got == reference, 0.0, np.abs(got - reference))
    difference = np.where(np.isnan(difference), np.inf, difference)
    tolerance = np.broadcast_to(units * eps * size + 2 * floor, difference.shape)
    wrong = difference > 0
    if not wrong.any():
        return 0.0, 0.0
    with np.errstate(divide="ignore"):
        worst = float((difference[wrong] / tolerance[wrong]).max())
    return worst * units * eps, worst


def check(op: Operation, dtype: str, shape: Sequence[int], masked: bool) -> dict[str, tuple]:
    """One call against float64: {direction: (error, part of the tolerance)}."""
    rng = np.random.default_rng(0)
    dtype_object = jax.numpy.dtype(dtype)
    *arrays, dy = (3 * rng.standard_normal((op.arrays + 1, *shape))).astype(dtype_object)
    info = jax.numpy.finfo(dtype)
    tiny = float(info.smallest_subnormal if dtype == "float16" else info.tiny)
    wide_dtype = parameter_dtype(dtype)
    result_shape, result_dtype = op.result_kind(shape, dtype)
    dy = dy[..., : result_shape[-1]].astype(jax.numpy.dtype(result_dtype))
    arrays += [rng.standard_normal(shape[-1:]).astype(wide_dtype) for _ in range(op.parameters)]
    where, scale = np.ones((1,) * len(shape), bool), 1.0
    options = {}
    if masked:
        where = rng.random((*(1,) * (len(shape) - 1), shape[-1])) > 0.3
        where[..., 0] = True
        options = {op.mask: jax.numpy.asarray(where)}
        if op.mask == "where" and not op.per_row:
            scale = 0.5
            options["scale"] = np.dtype(dtype_object).type(scale)
    wide = [a.astype(np.float64) for a in (dy, *arrays)]
    expected = op.reference(*wide, where=where, scale=scale, tiny=tiny)
    args = tuple(map(jax.numpy.asarray, arrays))
    got = gradient_of(op.plain_call, op.parameters)(args, jax.numpy.asarray(dy), **options)
    like = (dy, args[0], *args[len(args) - op.parameters :])
    found = {"forward": (0.0, 0.0), "gradient": (0.0, 0.0)}
    for i, (value, wanted, argument) in enumerate(zip(got, expected, like, strict=True)):
        if value.dtype != argument.dtype or value.shape != argument.shape:
            raise AssertionError(
                f"gave {value.dtype}{value.shape}, not {argument.dtype}{argument.shape}"
            )
        # Terms of a sum: along the row, or over all of them.
        terms = shape[-1] if i < 2 else math.prod(shape[:-1])
        exact, size, floor = wanted
        error, of_tolerance = compare(value, exact, size, floor, value.dtype.name, terms)
        name = "gradient" if i else "forward"
        found[name] = max(found[name][0], error), max(found[name][1], of_tolerance)
    return found


def run_checks(op: Operation, dtype: str, shapes: Sequence[tuple[int, ...]]) -> list[Check]:
    """One check for forward and one for the gradient, over all shapes, masked where possible."""
    checks = {name: Check(op.name, dtype, name) for name in ("forward", "gradient")}
    calls = [(shape, False) for shape in shapes]
    if op.reduces:
        calls.append((shapes[-1] if len(shapes) == 1 else (8, 257), True))
    for shape, masked in calls:
        text = "x".join(map(str, shape)) + (" masked" if masked else "")
        try:
            found = check(op, dtype, shape, masked)
        except Exception as error:
            for c in checks.values():
                c.message = c.message or f"{text}: {type(error).__name__}: {error}"[:300]
            continue
        for name, (error, of_tolerance) in found.items():
            c = checks[name]
            c.shapes.append(text)
            c.error, c.of_tolerance = max(c.error, error), max(c.of_tolerance, of_tolerance)
    return list(checks.values())
