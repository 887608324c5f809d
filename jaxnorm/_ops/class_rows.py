"""Rows of logits with one label each: a few numbers of a row, and what losses and gradients are in them.

Devices may share a row. Each takes the numbers of its part of the row, `joined` makes those of the whole row of them,
and the gradient is elementwise in these numbers. `Part` has the part's elements; its formulas are row programs.

The numbers, each with size 1 along the classes; e = exp(z - top):

  top       the largest logit, 0 where there is none but -inf
  total     sum(e)
  picked    z - top of the label's class, 0 in a part that has not got it
  sum       sum(z - top)
  count     the number of classes
  weighted  sum(e * (z - top))
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm._rows.named import row_program
from jaxnorm._sharding import Blocks

Numbers = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of rows.

    Attributes:
      logits: in the dtype of arithmetic, -inf where masked.
      labels: counted from the part's first class, of size 1 along the classes.
      mask: which elements count; None if all do.
      axis: of the classes.
    """

    logits: jax.Array
    labels: jax.Array
    mask: jax.Array | None
    axis: int

    @classmethod
    def make(cls, logits, labels, mask, axis) -> "Part":
        """Of logits in which masked elements may be anything."""
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        return cls(logits, labels, mask, axis)

    @property
    def hit(self):
        """Which elements are the label's."""
        return jax.lax.broadcasted_iota(jnp.int32, self.logits.shape, self.axis) == self.labels

    def kept(self, values):
        """Values, 0 where masked."""
        if self.mask is None:
            return values
        return jnp.where(self.mask, values, jnp.zeros((), values.dtype))

    def _sum(self, values):
        return jnp.sum(values, self.axis, keepdims=True)

    def count(self):
        return self._sum(self.kept(jnp.ones_like(self.logits)))

    def numbers(self, *, spread: bool, counted: bool, entropy: bool = False) -> Numbers:
        """The numbers of the part.

        Args:
          spread: whether `sum` is wanted.
          counted: whether `count` is wanted.
          entropy: whether `weighted` is wanted.
        """
        z = self.logits
        top = jnp.max(z, self.axis, keepdims=True, initial=-jnp.inf)
        top = jnp.where(top == -jnp.inf, np.zeros((), z.dtype), top)
        e = jnp.exp(z - top)
        numbers = {
            "top": top,
            "total": self._sum(e),
            "picked": self._sum(jnp.where(self.hit, z - top, np.zeros((), z.dtype))),
        }
        if spread:
            numbers["sum"] = self._sum(self.kept(z - top))
        if counted:
            numbers["count"] = self.count()
        if entropy:  # a class of probability 0 adds nothing
            numbers["weighted"] = self._sum(e * jnp.where(e == 0, np.zeros((), z.dtype), z - top))
        return numbers

    def target(self, smoothing: float, count):
        """The target distribution q; `count` may be None without smoothing."""
        dtype = self.logits.dtype
        one_hot = jnp.where(self.hit, np.asarray(1 - smoothing, dtype), np.asarray(0, dtype))
        return one_hot + np.asarray(smoothing, dtype) / count if smoothing else one_hot


def is_class(labels, classes):
    """Whether labels are classes, of which there are so many."""
    return (labels >= 0) & (labels < jnp.asarray(classes, jnp.int32))


def joined(numbers: Numbers, blocks: Blocks, dims: tuple[int, ...]) -> Numbers:
    """The numbers of whole rows from those of each device's part, by one maximum and one sum over devices.

    Parts with `sum` have `count`, too. `has_label` says whether the label's class is in the part.
    """
    own, total = numbers["top"], numbers["total"]
    nothing = np.zeros((), own.dtype)
    empty = total == 0  # nothing but -inf
    top = blocks.pmax(jnp.where(empty, -jnp.inf, own), dims)
    top = jnp.where(top == -jnp.inf, nothing, top)
    shift = jnp.where(empty, nothing, own - top)
    scale = jnp.where(empty, nothing, jnp.exp(shift))
    shifted = {
        "total": total * scale,
        "picked": jnp.where(numbers["has_label"], numbers["picked"] + shift, nothing),
    }
    if "count" in numbers:
        shifted["count"] = numbers["count"]
    if "sum" in numbers:
        shifted["sum"] = numbers["sum"] + numbers["count"] * shift
    if "weighted" in numbers:
        shifted["weighted"] = scale * (numbers["weighted"] + total * shift)
    sums = blocks.psum(jnp.stack(list(shifted.values())), dims)
    return {"top": top} | dict(zip(shifted, sums, strict=True))


def negative_log_likelihood(numbers: Numbers, smoothing: float, count):
    """-sum(q * log p), q being the target distribution over `count` classes."""
    nll, dtype = jnp.log(numbers["total"]), numbers["total"].dtype
    if smoothing < 1:
        nll = nll - numbers["picked"] * np.asarray(1 - smoothing, dtype)
    if smoothing:
        nll = nll - numbers["sum"] / count * np.asarray(smoothing, dtype)
    return nll


def log_sum_exp(numbers: Numbers):
    return numbers["top"] + jnp.log(numbers["total"])


def entropy(numbers: Numbers):
    """-sum(p * log p)."""
    return jnp.log(numbers["total"]) - numbers["weighted"] / numbers["total"]


# ---- rows that devices share ----


def own_labels(labels, blocks: Blocks, axis: int):
    """Labels counted from the first class of this device's block."""
    return labels - blocks.start(axis)


def own_mask(where, blocks: Blocks, axis: int) -> list:
    """Which elements of this device's block count: an array in a list, or none if all do."""
    inside = blocks.inside((axis,))
    masks = [m for m in (where, inside) if m is not None]
    return [masks[0] & masks[1]] if len(masks) == 2 else masks


def numbers_on_devices(
    elements: Callable,
    operands,
    labels,
    blocks: Blocks,
    axis: int,
    *,
    spread: bool,
    entropy: bool = False,
    run: Callable = row_program,
) -> Numbers:
    """The numbers of whole rows: one kernel on each device, which reads its part once.

    Args:
      elements: (*operands) -> `Part`.
      operands: arrays.
      labels: counted from the part's first class.
      blocks: how devices cut the rows.
      axis: of the classes.
      spread: whether `sum` and `count` are wanted.
      entropy: whether `weighted` is wanted.
      run: how a device runs a formula.
    """
    names = ["top", "total", "picked", *(["sum", "count"] if spread else [])]
    names += ["weighted"] if entropy else []

    def formula(*operands):
        numbers = elements(*operands).numbers(spread=spread, counted=spread, entropy=entropy)
        return [numbers[name] for name in names]

    numbers = dict(zip(names, run(formula)(*operands), strict=True))
    numbers["has_label"] = is_class(labels, blocks.size(axis))
    return joined(numbers, blocks, (axis,))
