"""The inner product of arrays, whose transpose keeps one of them as it is.

That of `jnp.sum(a.astype(float32) * b.astype(float32))` keeps a copy of it in float32.
"""

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.avals import aval_like, vary_alike
from jaxnorm._primitive.define import define_formula
from jaxnorm._primitive.rules import add, is_present


def inner_product(a, b) -> jax.Array:
    """sum(a * b) of arrays of one shape and dtype, in float32 (float64 for float64)."""
    return _inner_p.bind(*vary_alike(a, b))[0]


def _formula(a, b):
    dtype = acc_dtype(a.dtype)
    return [jnp.sum(a.astype(dtype) * b.astype(dtype))]


_inner_p = define_formula(
    "inner_product",
    abstract=lambda a, _: [aval_like(a, (), acc_dtype(a.dtype), ())],
    formula=_formula,
)


def _jvp(primals, tangents):
    a, b = primals
    pairs = [(tangents[0], b), (a, tangents[1])]
    terms = [inner_product(*pair) for pair in pairs if all(map(is_present, pair))]
    return [inner_product(a, b)], [add(*terms)]


def _transpose(cotangents, a, b):
    (ct,) = cotangents

    def gradient(this, other):
        if not ad.is_undefined_primal(this):
            return None
        if not is_present(ct):
            return ad.Zero(this.aval)
        return (ct * other.astype(ct.dtype)).astype(this.aval.dtype)

    return [gradient(a, b), gradient(b, a)]


def _batch(args, dims):
    return jax.vmap(_formula, dims)(*args), [0]


ad.primitive_jvps[_inner_p] = _jvp
ad.primitive_transposes[_inner_p] = _transpose
batching.primitive_batchers[_inner_p] = _batch
