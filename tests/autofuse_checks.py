"""What the tests of autofuse share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm


def primitives(function, *args) -> set[str]:
    """Names of jaxnorm's primitives in a function's jaxpr, derivative rules not included."""
    return _primitives(jax.make_jaxpr(function)(*args))


def _primitives(jaxpr) -> set[str]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                names |= _primitives(value)
    return {n for n in names if n.startswith("jaxnorm_")}


def _is_jaxpr(value) -> bool:
    return hasattr(value, "eqns")


def operations(function, *args, **kwargs) -> list[str]:
    """The calls that autofuse makes."""
    return [c.call for c in jaxnorm.autofuse(function).explain(*args, **kwargs).replaced]


def left(function, *args, **kwargs) -> list[str]:
    """The reasons that autofuse gives; it must not replace anything."""
    report = jaxnorm.autofuse(function).explain(*args, **kwargs)
    assert not report.replaced, report
    return [c.reason for c in report.left]


def _is_float(leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _size(array) -> float:
    array = np.asarray(array, np.float64)
    return np.abs(array[np.isfinite(array)]).max(initial=0)


def assert_close(got, expected, tolerance):
    """Two pytrees of arrays, of one dtype each, close relative to each array's largest element.

    Gradients that are 0 but for rounding are measured by those beside them.
    """
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    floor = 1e-3 * max(map(_size, filter(_is_float, jax.tree.leaves(expected))), default=0)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if not _is_float(a):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(_size(b), floor) + 1e-30)


def assert_same(function, *args, tolerance=2e-5, gradient_tolerance=None):
    """Values and gradients of a function of pytrees are the same under autofuse, without jit and in it."""
    fused = jaxnorm.autofuse(function)
    leaves, structure = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def applied(f, leaves, *floats):
        full = list(leaves)
        for i, value in zip(places, floats, strict=True):
            full[i] = value
        return f(*jax.tree.unflatten(structure, full))

    def loss(f, leaves, *floats):
        out = applied(f, leaves, *floats)
        outputs = [o for o in jax.tree.leaves(out) if _is_float(o)]
        # No weight is like another, so that no two outputs or positions can be exchanged unnoticed.
        weights = [
            np.cos(np.arange(o.size) * (1.7 + i)).reshape(o.shape) for i, o in enumerate(outputs)
        ]
        finite = [jnp.where(jnp.isfinite(o), o, 0).astype(jnp.float32) for o in outputs]
        return sum(jnp.sum(o * w.astype(np.float32)) for o, w in zip(finite, weights, strict=True))

    @jax.jit
    def results(*args):
        """Of the function, under autofuse, the same where it is differentiated, and both gradients."""
        leaves = jax.tree.leaves(args)
        floats = [leaves[i] for i in places]
        if not floats:
            return function(*args), [fused(*args)], []
        differentiated = jax.vjp(functools.partial(applied, fused, leaves), *floats)[0]
        numbers = tuple(range(2, 2 + len(floats)))
        gradients = [jax.grad(loss, argnums=numbers)(f, leaves, *floats) for f in (fused, function)]
        return function(*args), [fused(*args), differentiated], gradients

    expected, fused_results, gradients = results(*args)
    for got in (fused(*args), *fused_results):
        assert_close(got, expected, tolerance)
    if gradients:
        assert_close(*gradients, gradient_tolerance or 20 * tolerance)
