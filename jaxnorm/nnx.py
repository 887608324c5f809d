"""LayerNorm, RMSNorm and BatchNorm for Flax NNX, with jaxnorm's kernels: `from jaxnorm import nnx as jnnx`."""

import inspect

import jax

import jaxnorm
from jaxnorm import _flax

try:
    from flax import nnx
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(_flax.MISSING.format("jaxnorm.nnx")) from None

__all__ = ["BatchNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(nnx.LayerNorm):
    r"""Drop-in for `flax.nnx.LayerNorm`, computed by `jaxnorm.layer_norm`.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \mathrm{scale} + \mathrm{bias}

    Arguments, parameters (`scale`, `bias`), their initialisation and the result's dtype are Flax's. As there,
    `promote_dtype` converts x and the parameters first: to `dtype`, or else to what they promote to. Statistics and
    arithmetic are float32 (float64 for float64), and the result is rounded once. The variance is always the accurate
    one of two passes, whatever `use_fast_variance` says. docs/flax.md lists every argument, and which calls Flax's own
    code answers.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxnorm import nnx as jnnx
    >>> layer = jnnx.LayerNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[1.0, 3.0]]))
    Array([[-1.,  1.]], dtype=float32)
    """

    def __call__(self, x, *, mask: jax.Array | None = None):
        y = _norm(self, jaxnorm.layer_norm, ("scale", "bias"), x, mask)
        return super().__call__(x, mask=mask) if y is None else y


class RMSNorm(nnx.RMSNorm):
    r"""Drop-in for `flax.nnx.RMSNorm`, computed by `jaxnorm.rms_norm`.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot \mathrm{scale}

    Arguments, the parameter `scale`, dtypes and arithmetic as `jaxnorm.nnx.LayerNorm` says.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxnorm import nnx as jnnx
    >>> layer = jnnx.RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[2.0, -2.0]]))
    Array([[ 1., -1.]], dtype=float32)
    """

    def __call__(self, x, mask: jax.Array | None = None):
        y = _norm(self, jaxnorm.rms_norm, ("scale",), x, mask)
        return super().__call__(x, mask=mask) if y is None else y


class BatchNorm(nnx.BatchNorm):
    r"""Drop-in for `flax.nnx.BatchNorm`, by `jaxnorm.batch_norm`, with a residual and a ReLU in the same pass.

    .. math:: y = \mathrm{act}\left(\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \mathrm{scale} + \mathrm{bias} +
              \mathrm{residual}\right)

    Arguments, parameters (`scale`, `bias`), running statistics (`mean` and the biased `var`), their initialisation and
    updates, `train`, `eval` and `set_view`, and the result's dtype are Flax's; dtypes and arithmetic as
    `jaxnorm.nnx.LayerNorm` says.

    Args:
      num_features: as in Flax.
      activation: None or "relu", applied last. Backward then keeps x and one bit per element.
      **flax_arguments: all others of `flax.nnx.BatchNorm`, `rngs` among them.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxnorm import nnx as jnnx
    >>> layer = jnnx.BatchNorm(2, momentum=0.9, epsilon=0.0, activation="relu", rngs=nnx.Rngs(0))
    >>> x = jnp.array([[1.0, 5.0], [3.0, 9.0]])
    >>> layer(x, residual=jnp.full_like(x, 0.5))
    Array([[0. , 0. ],
           [1.5, 1.5]], dtype=float32)
    >>> layer.mean[...]
    Array([0.2, 0.7], dtype=float32)
    """

    def __init__(self, num_features: int, *, activation: str | None = None, **flax_arguments):
        super().__init__(num_features, **flax_arguments)
        self.activation = activation

    def __call__(
        self,
        x,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
    ):
        """Normalises x.

        Args:
          x: array.
          use_running_average: whether to normalise by the running statistics, and leave them as they are; None is what
            the constructor said.
          mask: boolean array that broadcasts to x; which elements the statistics count.
          residual: array of x's shape and of the result's dtype, added before the activation.
        """
        _flax.check_activation(self.activation)
        chosen = self.use_running_average if use_running_average is None else use_running_average
        promoted, mean, var, *values = self.promote_dtype(
            (x, self.mean[...], self.var[...], *_values(self, ("scale", "bias"))), dtype=self.dtype
        )
        parameters = _present(("scale", "bias"), values)
        arrays = (mean, var, *parameters.values())
        axes = None
        if chosen is not None and _flax.answers(self, promoted, mask, [a.dtype for a in arrays]):
            axes = _flax.batch_norm_axes(self, promoted, mask)
        # Several axes, which Flax's own running statistics do not fit either, are left to it, and so is what is wrong.
        if axes is None or len(axes) > 1 or not _flax.sizes_match(promoted, axes, arrays):
            y = super().__call__(x, use_running_average, mask=mask)
            return _flax.after_flax(y, residual, self.activation)

        y, mean, var = _flax.batch_norm(
            self,
            promoted,
            (mean, var) if chosen else None,
            parameters,
            axes=axes,
            axis_name=self.axis_name,
            mask=mask,
            residual=residual,
        )
        if not chosen:
            for running, new in ((self.mean, mean), (self.var, var)):
                updated = self.momentum * running[...] + (1 - self.momentum) * new
                running[...] = jax.lax.stop_gradient(updated)
        return y


def _signature():
    """Flax's arguments and ours, for those who ask `inspect`."""
    flax_signature = inspect.signature(nnx.BatchNorm.__init__)
    own = inspect.signature(BatchNorm.__init__).parameters["activation"]
    return flax_signature.replace(parameters=[*flax_signature.parameters.values(), own])


BatchNorm.__init__.__signature__ = _signature()  # pyright: ignore[reportFunctionMemberAccess]


def _values(module, names):
    variables = [getattr(module, n) for n in names]
    return [None if v is None else v[...] for v in variables]


def _present(names, values):
    return {n: v for n, v in zip(names, values, strict=True) if v is not None}


def _norm(module, operation, names, x, mask):
    """The result, or None where Flax has to answer."""
    promoted, *values = module.promote_dtype((x, *_values(module, names)), dtype=module.dtype)
    parameters = _present(names, values)
    arrays = parameters.values()
    if not _flax.answers(module, promoted, mask, [p.dtype for p in arrays]):
        return None
    axes = _flax.norm_axes(module, promoted, bool(parameters))
    if axes is None or not _flax.sizes_match(promoted, axes[1], arrays):
        return None
    return _flax.norm(operation, module, promoted, parameters, axes, mask)
