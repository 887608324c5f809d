"""linear_cross_entropy: the loss of a language model's head, whose logits are never in memory."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxnorm import _check
from jaxnorm._ops.cross_entropy import labels_of, smoothing_of
from jaxnorm._ops.linear_cross_entropy_primitives import bind, forward_p, total_p, zero_where_hidden
from jaxnorm._primitive.arithmetic import acc_dtype

_OP = "linear_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    where: ArrayLike | None = None,
    w_axis: int = -1,
    chunk: int | None = None,
    return_stats: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, dict[str, jax.Array]]:
    r"""`softmax_cross_entropy(x @ w + bias, labels)`, with the logits of some tokens at a time in memory.

    .. math::
      L_i = \mathrm{softmax\_cross\_entropy}(z_i, \mathrm{label}_i), \qquad
      z_i = c \tanh\left(\frac{x_i w + b}{c}\right)

    where c is `softcap`; without it, z is x w + b. The result is :math:`\sum_i \omega_i L_i / \sum_i \omega_i` with
    the `weights` :math:`\omega` ("mean"), :math:`\sum_i \omega_i L_i` ("sum"), or :math:`\omega_i L_i` of each token
    ("none").

    For language models with large vocabularies, whose logits and their gradient would be the largest arrays of a
    training step (Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", do without them, too).
    Tokens are taken `chunk` at a time. The derivative of "mean" and "sum" has its gradients from the pass that computes
    the loss, which multiplies as often as the plain formula does; that of "none" computes the logits again, and so do
    derivatives of `stats`. Products are accumulated in float32 (float64 for float64) and rounded to x's dtype, as
    `x @ w` is; the gradients of w and bias are summed over all tokens in float32 and rounded once. Two runs give
    identical bits.

    On several devices, tokens and classes may be sharded, unevenly too: each device has its part of the logits, and
    numbers per token are all-reduced.

    A label outside of [0, classes), such as -100, makes its token's loss NaN and its gradient 0, as in
    `softmax_cross_entropy`. `weights=labels >= 0` leaves such tokens out: a weight of 0 hides a token, whatever it
    holds, and a chunk of hidden tokens costs no product, unless its statistics are wanted or devices share the classes.
    In the derivative with respect to a weight of 0, its token's loss counts as 0. Weights that sum to 0 make the mean
    NaN. Without tokens the mean is NaN, the sum 0.

    Args:
      x: features of each token, [..., D]; float16, bfloat16, float32 or float64.
      w: the head, [D, V], or [V, D] with w_axis=0, as embeddings are.
      labels: integers, [...].
      bias: [V].
      weights: of each token, [...]: floats, or booleans that say which tokens count.
      reduction: "mean", "sum" or "none".
      label_smoothing: Python number from 0 to 1, the part of the target that all classes share.
      z_loss: Python number, the weight of lse squared, where lse is the logarithm of the sum of exp(z).
      softcap: positive Python number that bounds logits, or None.
      where: boolean array that broadcasts to [..., V], often of shape [V]; which classes take part.
      w_axis: which axis of w has the classes, -1 or 0.
      chunk: how many tokens each device has logits of at a time; None chooses. Fewer take less memory and more time. Of
        a symbolic number of tokens (`jax.export`) all are taken at once.
      return_stats: whether to return the statistics of each token, too.
      implementation: None picks kernels where there are some, else XLA; "kernel" insists; "xla" is plain code.

    Returns:
      The loss, float32 (float64 for float64): a scalar, or [...] for "none". With `return_stats`, (loss, stats), where
      stats is {"log_prob": of each token's label, "entropy": of each token's softmax, in nats}, both [...] and
      differentiable.

    Raises:
      TypeError: a dtype is not supported, labels are not integers, or `where` is not boolean.
      ValueError: a shape that does not fit, an unknown reduction, label_smoothing outside of [0, 1], a softcap or chunk
        that is not positive, or "kernel" where there is none.

    >>> import jax, jax.numpy as jnp, jaxnorm
    >>> x, w, labels = jnp.ones((3, 2)), jnp.zeros((2, 4)), jnp.array([0, 3, -100])
    >>> loss = jaxnorm.linear_cross_entropy(x, w, labels, weights=labels >= 0)
    >>> loss.round(4)
    Array(1.3863, dtype=float32)
    """
    _check.implementation(_OP, implementation)
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"{_OP}: reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}. "
            "Use 'none' for the loss of each token."
        )
    given, class_axis = _operands(x, w, labels, bias, where, w_axis)
    tokens = given["labels"].shape
    dtype = acc_dtype(given["x"].dtype)
    params = {
        "class_axis": class_axis,
        "smoothing": smoothing_of(_OP, label_smoothing),
        "z_loss": _check.number(_OP, "z_loss", z_loss),
        "softcap": _positive("softcap", softcap, float, "logits without bounds"),
        "chunk": _positive("chunk", chunk, int, "a size that suits the shapes"),
        "implementation": implementation,
    }
    statistics = ("log_prob", "entropy") if return_stats else ()
    c = None if weights is None else _weights(weights, tokens, dtype)
    if c is not None:
        given["seen"] = c != 0
    if reduction == "none":
        found = bind(forward_p, given, ("loss", *statistics), params)
        loss = found["loss"]
        if c is not None:
            loss = c * zero_where_hidden(loss, given)
    else:
        if c is None:
            c = jnp.ones_like(given["labels"], dtype)
        if reduction == "mean":
            c = c / jnp.sum(c)
        found = bind(total_p, given | {"c": c}, ("total", *statistics), params)
        loss = found["total"]
        if reduction == "mean" and 0 in tokens:
            loss = jnp.full_like(loss, np.nan)
    if not return_stats:
        return loss
    return loss, {name: found[name] for name in statistics}


def _operands(x, w, labels, bias, where, w_axis) -> tuple[dict, int]:
    """Operands by name, and the axis of w that has the classes."""
    x, w = _check.float_array(_OP, "x", x), _check.float_array(_OP, "w", w)
    if w_axis not in (-1, 0, 1):
        raise ValueError(
            f"{_OP}: w_axis must be -1 or 0, got {w_axis!r}. Use -1 for w of [D, V], 0 for w of [V, D]."
        )
    class_axis = int(w_axis) % 2
    if x.ndim == 0:
        raise ValueError(f"{_OP}: x must be [..., D], got a scalar. Reshape it to [D].")
    if w.ndim != 2 or w.shape[1 - class_axis] != x.shape[-1]:
        expected, other = ("[D, V]", "[V, D]") if class_axis else ("[V, D]", "[D, V]")
        raise ValueError(
            f"{_OP}: w must be {expected} with D = {x.shape[-1]} of x, got {w.shape}. "
            f"Pass w_axis={-1 if class_axis == 0 else 0} for w of {other}."
        )
    dtype = jnp.result_type(x, w)
    given = {"x": x.astype(dtype), "w": w.astype(dtype)}
    given["labels"] = labels_of(_OP, labels, x.shape[:-1], "x without its features")
    classes = w.shape[class_axis]
    if bias is not None:
        bias = _check.float_array(_OP, "bias", bias)
        _check.shape(_OP, "bias", bias.shape, (classes,), owner="w's classes")
        given["bias"] = bias
    if where is not None:
        where = _check.bool_array(_OP, "where", where)
        full = (*x.shape[:-1], classes)
        padded = (1,) * (len(full) - where.ndim) + where.shape
        if len(padded) != len(full) or any(
            n not in (1, m) for n, m in zip(padded, full, strict=True)
        ):
            raise ValueError(
                f"{_OP}: where must broadcast to logits of shape {full}, got {where.shape}. "
                "Pass weights to leave out tokens."
            )
        given["where"] = where.reshape(padded)
    return given, class_axis


def _weights(weights, tokens, dtype) -> jax.Array:
    weights = jnp.asarray(weights)
    if not (jnp.issubdtype(weights.dtype, jnp.floating) or weights.dtype == bool):
        raise TypeError(
            f"{_OP}: weights must be floats or booleans, got {weights.dtype}. Use weights.astype(jnp.float32)."
        )
    _check.shape(_OP, "weights", weights.shape, tokens, owner="labels")
    return weights.astype(dtype)


def _positive(name, value, kind, default):
    if value is None:
        return None
    number = _check.number(_OP, name, value)
    if not 0 < number < np.inf or number != kind(number):
        what = "a positive whole number" if kind is int else "a positive number"
        raise ValueError(
            f"{_OP}: {name} must be {what} or None, got {value!r}. Use None for {default}."
        )
    return kind(number)
