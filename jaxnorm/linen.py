"""LayerNorm, RMSNorm and BatchNorm for Flax Linen, with jaxnorm's kernels: `from jaxnorm import linen as jnn`."""

import inspect

import jax
import jax.numpy as jnp

import jaxnorm
from jaxnorm import _flax

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(_flax.MISSING.format("jaxnorm.linen")) from None

__all__ = ["BatchNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(nn.LayerNorm):
    r"""Drop-in for `flax.linen.LayerNorm`, computed by `jaxnorm.layer_norm`.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \mathrm{scale} + \mathrm{bias}

    Arguments, parameters ("scale", "bias"), their initialisation and the result's dtype are Flax's: that of `dtype`, or
    else what x and the parameters promote to. Statistics and arithmetic are float32 (float64 if x or the result is) and
    the result is rounded once. The variance is always the accurate one of two passes, whatever `use_fast_variance`
    says. docs/flax.md lists every argument, and which calls Flax's own code answers.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as jnn
    >>> layer = jnn.LayerNorm(epsilon=0.0)
    >>> variables = layer.init(jax.random.key(0), jnp.zeros((1, 2)))
    >>> layer.apply(variables, jnp.array([[1.0, 3.0]]))
    Array([[-1.,  1.]], dtype=float32)
    """

    @nn.compact
    def __call__(self, x, *, mask: jax.Array | None = None):
        y = _norm(self, jaxnorm.layer_norm, x, mask)
        return _unwrapped(super().__call__)(self, x, mask=mask) if y is None else y


class RMSNorm(nn.RMSNorm):
    r"""Drop-in for `flax.linen.RMSNorm`, computed by `jaxnorm.rms_norm`.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot \mathrm{scale}

    Arguments, the parameter "scale", dtypes and arithmetic as `jaxnorm.linen.LayerNorm` says.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as jnn
    >>> layer = jnn.RMSNorm(epsilon=0.0)
    >>> variables = layer.init(jax.random.key(0), jnp.zeros((1, 2)))
    >>> layer.apply(variables, jnp.array([[2.0, -2.0]]))
    Array([[ 1., -1.]], dtype=float32)
    """

    @nn.compact
    def __call__(self, x, *, mask: jax.Array | None = None):
        y = _norm(self, jaxnorm.rms_norm, x, mask)
        return _unwrapped(super().__call__)(self, x, mask=mask) if y is None else y


class BatchNorm(nn.BatchNorm):
    r"""Drop-in for `flax.linen.BatchNorm`, by `jaxnorm.batch_norm`, with a residual and a ReLU in the same pass.

    .. math:: y = \mathrm{act}\left(\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot \mathrm{scale} + \mathrm{bias} +
              \mathrm{residual}\right)

    Arguments, parameters ("scale", "bias"), the collection "batch_stats" ("mean" and the biased "var"), their
    initialisation and updates, and the result's dtype are Flax's; arithmetic as `jaxnorm.linen.LayerNorm` says.

    Args:
      activation: None or "relu", applied last. Backward then keeps x and one bit per element.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as jnn
    >>> layer = jnn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=0.0, activation="relu")
    >>> x = jnp.array([[1.0, 5.0], [3.0, 9.0]])
    >>> variables = layer.init(jax.random.key(0), x)
    >>> y, changed = layer.apply(variables, x, residual=jnp.full_like(x, 0.5), mutable=["batch_stats"])
    >>> y
    Array([[0. , 0. ],
           [1.5, 1.5]], dtype=float32)
    >>> changed["batch_stats"]["mean"]
    Array([0.2, 0.7], dtype=float32)
    """

    activation: str | None = None

    @nn.compact
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
          use_running_average: whether to normalise by the running statistics, and leave them as they are.
          mask: array that broadcasts to x; which elements the statistics count.
          residual: array of x's shape and of the result's dtype, added before the activation.
        """
        _flax.check_activation(self.activation)
        kept = _as_bool(mask)
        axes = _flax.batch_norm_axes(self, x, kept) if _answers(self, x, kept) else None
        shape = [x.shape[a] for a in axes or ()]
        stored = jax.tree.leaves(self.variables.get("batch_stats", {}))
        # Statistics of another shape are an error, which is Flax's to raise.
        if axes is None or any(jnp.shape(v) != tuple(shape) for v in stored):
            y = _unwrapped(super().__call__)(self, x, use_running_average, mask=mask)
            return _flax.after_flax(y, residual, self.activation)

        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        y, new_mean, new_var = _flax.batch_norm(
            self,
            x,
            (mean.value, var.value) if use_running_average else None,
            _parameters(self, shape),
            axes=axes,
            axis_name=None if self.is_initializing() else self.axis_name,
            mask=kept,
            residual=residual,
        )
        if not use_running_average and not self.is_initializing():
            mean.value = self.momentum * mean.value + (1 - self.momentum) * new_mean
            var.value = self.momentum * var.value + (1 - self.momentum) * new_var
        return y


def _unwrapped(flax_call):
    """Flax's method without its wrapper, which would count and capture one call twice."""
    return inspect.unwrap(flax_call)


def _as_bool(mask):
    return None if mask is None else jnp.asarray(mask, dtype=bool)


def _answers(module, x, mask):
    # Variables that a checkpoint brought may have any dtype.
    stored = [jnp.result_type(v) for v in jax.tree.leaves(module.variables)]
    return _flax.answers(module, x, mask, (module.param_dtype, *stored))


def _names(module):
    """Names of the parameters; RMSNorm has no bias."""
    return [n for n in ("scale", "bias") if getattr(module, f"use_{n}", False)]


def _parameters(module, shape):
    return {
        n: module.param(n, getattr(module, f"{n}_init"), shape, module.param_dtype)
        for n in _names(module)
    }


def _norm(module, operation, x, mask):
    """The result, or None where Flax has to answer."""
    kept = _as_bool(mask)
    if not _answers(module, x, kept):
        return None
    axes = _flax.norm_axes(module, x, bool(_names(module)))
    if axes is None:
        return None
    parameters = _parameters(module, [x.shape[a] for a in axes[1]])
    return _flax.norm(operation, module, x, parameters, axes, kept)
