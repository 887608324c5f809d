"""The primitives of linear_cross_entropy: logits are computed for some tokens at a time and never kept.

Notation: u = x w + bias are the logits of a token, z = softcap(u), p = softmax(z), q the target distribution
(cross_entropy.py). Each token has up to three results:

  loss      -sum(q * log p) + z_loss * logsumexp(z)^2
  log_prob  log p at the label
  entropy   -sum(p * log p)

  linear_cross_entropy          x, w, ...                    -> results of each token                   nonlinear
  linear_cross_entropy_total    x, w, ..., c                 -> sum(c * loss), results of each token    nonlinear
  linear_cross_entropy_tangent  x, w, ..., x', w', bias'     -> tangents of the results                 linear in them
  linear_cross_entropy_grad     x, w, ..., c, g, h           -> results of each token, dx, dw, dbias    its transpose

where dx, dw and dbias are the gradients of sum(c * loss + g * log_prob + h * entropy). The derivative of a total has
its gradients from the pass that computes the loss: logits are computed once. That of each token's results computes the
logits again.

x is [*tokens, D], labels, `seen`, c, g and h are [*tokens], w is [D, V] or [V, D] (`class_axis`), bias is [V], and
`where` has the rank of x and broadcasts to [*tokens, V]. A token that is not `seen` counts for no loss and no gradient,
whatever it holds; without `seen` all count. All operands have names (`_ORDER`).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from jaxnorm._ops.linear_cross_entropy_formula import (
    COTANGENTS,
    GRADIENTS,
    RESULTS,
    formula,
)
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.avals import aval_like, spec_of
from jaxnorm._primitive.define import define_dce, define_formula, define_partitioned
from jaxnorm._primitive.inner import inner_product
from jaxnorm._primitive.named import bind_named, by_name, only
from jaxnorm._primitive.partition import Partition, sharding_factors
from jaxnorm._primitive.rules import NOT_MAPPED, add, is_present, mapped_size, sum_to, zero
from jaxnorm._sharding import Blocks, Tiled

_DOTS = {"x_dot": "x", "w_dot": "w", "bias_dot": "bias"}
_ORDER = ("x", "w", "labels", "bias", "where", "seen", "c", "g", "h", *_DOTS)

bind = functools.partial(bind_named, _ORDER)


# ---- shapes and shardings ----


def _abstract(*avals, names, results, **_):
    given = by_name(names, avals)
    x = given["x"]
    per_token = aval_like(x, x.shape[:-1], acc_dtype(x.dtype), spec_of(x)[:-1])
    made = dict.fromkeys(RESULTS, per_token)
    made |= {name: aval_like(given[a]) for name, a in GRADIENTS.items() if a in given}
    return [made[r] for r in results]


def _dims(name: str, rank: int, class_axis: int) -> tuple[str, ...]:
    """Names of the dimensions of an operand or result; `rank` is x's."""
    tokens = tuple(f"t{i}" for i in range(rank - 1))
    if name in ("w", "dw"):
        return ("d", "v") if class_axis else ("v", "d")
    if name in ("bias", "dbias"):
        return ("v",)
    if name == "where":
        return (*tokens, "v")
    return (*tokens, "d") if name in ("x", "dx") else tokens


def _sharding_rule(_, operand_shapes, result_shapes, *, names, results, class_axis, **__):
    rank = len(operand_shapes[0])
    sizes = dict(zip(_dims("x", rank, class_axis), operand_shapes[0], strict=True))
    sizes |= zip(_dims("w", rank, class_axis), operand_shapes[1], strict=True)

    def factors(name, shape):
        # Nothing follows for tokens from how the features of w are sharded, nor from how a broadcast dimension is.
        of_features = "x_d" if name in ("x", "dx") else "d"
        dims = zip(_dims(name, rank, class_axis), shape, strict=True)
        return tuple(
            of_features if d == "d" else d if n == sizes[d] else f"{name}_{d}" for d, n in dims
        )

    return sharding_factors(
        [factors(*pair) for pair in zip(names, operand_shapes, strict=True)],
        [factors(*pair) for pair in zip(results, result_shapes, strict=True)],
    )


def _partition(operands, results, /, *, names, class_axis, **params) -> Partition:
    """Tokens and classes stay where they are; features are whole on each device."""
    x, w = operands[:2]
    rank = len(x.shape)
    tokens = [f"t{i}" for i in range(rank - 1)]
    full = (*tokens, "v")
    sizes = (*x.shape[:-1], w.shape[class_axis])

    def spread(name, array) -> Tiled:
        """The array as one that broadcasts to [*tokens, V], without its features."""
        dims = _dims(name, rank, class_axis)
        tiles, shape = array.tiles, list(array.shape)
        if "d" in dims:
            tiles = np.moveaxis(tiles, dims.index("d"), -2)
            tiles = tiles.reshape(*tiles.shape[:-2], -1)
            del shape[dims.index("d")]
        kept = [d for d in dims if d != "d"]
        places = [full.index(d) for d in kept]
        counts, lengths = [1] * rank, [1] * rank
        for at, count, n in zip(places, tiles.shape, shape, strict=False):
            counts[at], lengths[at] = count, n
        return Tiled(tuple(lengths), tiles.reshape(*counts, tiles.shape[-1]))

    blocks = Blocks.joint(sizes, [spread(*pair) for pair in zip(names, operands, strict=True)])

    def tiles_of(name, shape):
        dims = _dims(name, rank, class_axis)
        cut = [
            full.index(d)
            for d, n in zip(dims, shape, strict=True)
            if d != "d" and n == sizes[full.index(d)]
        ]
        tiles = blocks.tiles_along(cut)
        counts = [tiles.shape[full.index(d)] if d != "d" else 1 for d in dims]
        return tiles.reshape(*counts, tiles.shape[-1])

    shapes = {n: a.shape for n, a in zip(names, operands, strict=True)}
    local = functools.partial(
        _local, names=names, class_axis=class_axis, blocks=blocks, shapes=shapes, **params
    )
    wanted = params["results"]
    return Partition(
        [tiles_of(n, a.shape) for n, a in zip(names, operands, strict=True)],
        [tiles_of(n, a.shape) for n, a in zip(wanted, results, strict=True)],
        local,
    )


def _local(*operands, names, class_axis, blocks, shapes, **params):
    """What a device runs on its blocks, whose padding counts for nothing then."""
    given = by_name(names, operands)
    *tokens, classes = range(len(blocks.shape))
    for name in ("x", "c", "g", "h"):
        if name in given and blocks.uneven(tokens):
            array, shape = given[name], shapes[name]
            if name != "x":
                array, shape = array[..., None], (*shape, 1)
            given[name] = blocks.filled(array, shape, tokens).reshape(given[name].shape)
    inside = blocks.inside((classes,))
    if inside is not None:
        inside = jnp.expand_dims(inside.ravel(), 1 - class_axis)
        given["w"] = jnp.where(inside, given["w"], np.zeros((), given["w"].dtype))
    tiles = blocks.tiles
    flat = Blocks(
        (math.prod(blocks.shape[:-1]), blocks.shape[-1]),
        tiles.reshape(math.prod(tiles.shape[:-2]), *tiles.shape[-2:]),
    )
    return formula(*given.values(), names=names, class_axis=class_axis, blocks=flat, **params)


# ---- the primitives ----


def _describe(_, **__):
    return "linear_cross_entropy"


def _define(name):
    return define_partitioned(
        name,
        abstract=_abstract,
        formula=formula,
        describe=_describe,
        sharding_rule=_sharding_rule,
        partition=_partition,
    )


# Their formula is one: which gradients are wanted is in the parameters.
forward_p = _define("linear_cross_entropy")
grad_p = _define("linear_cross_entropy_grad")


def _losses(given, results, params) -> dict:
    """The loss and other results of each token."""
    taken = {n: v for n, v in given.items() if n != "c"}
    return bind(forward_p, taken, tuple(dict.fromkeys(("loss", *results))), params)


def zero_where_hidden(values, given):
    """What tokens have, 0 for those that are hidden."""
    if "seen" not in given:
        return values
    seen = given["seen"].reshape(given["seen"].shape + (1,) * (values.ndim - given["seen"].ndim))
    return jnp.where(seen, values, np.zeros((), values.dtype))


def _total_formula(*operands, names, results, **params):
    given = by_name(names, operands)
    found = _losses(given, results[1:], params)
    return [
        jnp.sum(given["c"] * zero_where_hidden(found["loss"], given)),
        *(found[r] for r in results[1:]),
    ]


def _total_abstract(*avals, names, results, **params):
    total = aval_like(avals[0], (), acc_dtype(avals[0].dtype), ())
    return [total, *_abstract(*avals, names=names, results=results[1:], **params)]


total_p = define_formula(
    "linear_cross_entropy_total",
    abstract=_total_abstract,
    formula=_total_formula,
    of_kernels=True,
)


def _tangent_formula(*operands, names, results, **params):
    given = by_name(names, operands)
    moving = {base: given[dot] for dot, base in _DOTS.items() if dot in given}
    fixed = {n: v for n, v in given.items() if n not in _DOTS}

    def function(values):
        return formula(
            *(fixed | values).values(), names=tuple(fixed | values), results=results, **params
        )

    return jax.jvp(function, [{n: given[n] for n in moving}], [moving])[1]


tangent_p = define_formula(
    "linear_cross_entropy_tangent", abstract=_abstract, formula=_tangent_formula, of_kernels=True
)


# ---- derivatives ----


def _tangents_of(given, dots, results, params) -> dict:
    """Tangents of each token's results by name; none if nothing moves."""
    moving = {f"{n}_dot": dots.get(n) for n in _DOTS.values() if is_present(dots.get(n))}
    if not moving or not results:
        return {}
    fixed = only(given, ("x", "w", "labels", "bias", "where", "seen"))
    return bind(tangent_p, fixed | moving, results, params)


def _forward_jvp(primals, tangents, *, names, results, **params):
    given, dots = by_name(names, primals), by_name(names, tangents)
    out = bind(forward_p, given, results, params)
    found = _tangents_of(given, dots, results, params)
    return [out[r] for r in results], [found.get(r, zero(out[r])) for r in results]


def _total_jvp(primals, tangents, *, names, results, **params):
    """The gradients come from the pass that computes the loss."""
    given, dots = by_name(names, primals), by_name(names, tangents)
    moving = {f"d{n}": dots[n] for n in GRADIENTS.values() if is_present(dots.get(n))}
    if moving:
        wanted = tuple(dict.fromkeys(("loss", *results[1:], *moving)))
        out = bind(grad_p, given, wanted, params)
    else:
        out = _losses(given, results[1:], params)
    c, seen = given["c"], zero_where_hidden(out["loss"], given)
    if "dx" in moving:  # the tangent of a hidden token may be NaN
        moving["dx"] = zero_where_hidden(moving["dx"], given)
    terms = [inner_product(out[n], t) for n, t in moving.items()]
    if is_present(dots["c"]):
        terms.append(jnp.sum(seen * dots["c"]))
    total = jnp.sum(c * seen)
    found = _tangents_of(given, dots, results[1:], params)
    return (
        [total, *(out[r] for r in results[1:])],
        [add(*terms) if terms else zero(total), *(found.get(r, zero(out[r])) for r in results[1:])],
    )


def _formula_jvp(primitive, own, primals, tangents, **params):
    """Of what is a derivative itself: that of `own`, its formula, which goes through the tokens in the same steps."""
    moving = [i for i, t in enumerate(tangents) if is_present(t)]

    def function(*values):
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return own(*operands, **params)

    results = primitive.bind(*primals, **params)
    dots = jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])[1]
    return results, dots


def _tangent_transpose(cotangents, *operands, names, results, **params):
    given = by_name(names, operands)
    linear = {n: v for n, v in given.items() if ad.is_undefined_primal(v)}
    of_tokens = {COTANGENTS[r]: ct for r, ct in zip(results, cotangents, strict=True)}
    found = {n: ad.Zero(v.aval) for n, v in linear.items()}
    if any(map(is_present, of_tokens.values())):
        fixed = {n: v for n, v in given.items() if n not in _DOTS}
        wanted = tuple(f"d{_DOTS[n]}" for n in linear)
        out = bind(grad_p, fixed | of_tokens, wanted, params)
        found = {n: sum_to(out[f"d{_DOTS[n]}"], v.aval) for n, v in linear.items()}
    return [found.get(n) for n in names]


def _prune(used, params):
    """A call with the results that are used: the loss alone in the forward pass of a `jax.checkpoint`."""
    results = tuple(r for r, u in zip(params["results"], used, strict=True) if u)
    return params | {"results": results}, [True] * len(params["names"])


for _primitive in (forward_p, grad_p, tangent_p):
    define_dce(_primitive, _prune)
ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[total_p] = _total_jvp
ad.primitive_jvps[tangent_p] = functools.partial(_formula_jvp, tangent_p, _tangent_formula)
ad.primitive_jvps[grad_p] = functools.partial(_formula_jvp, grad_p, formula)
ad.primitive_transposes[tangent_p] = _tangent_transpose


# ---- batches ----


def _one_by_one(primitive, args, dims, params):
    mapped = [i for i, d in enumerate(dims) if d is not NOT_MAPPED]

    def one(values):
        operands = list(args)
        for i, value in zip(mapped, values, strict=True):
            operands[i] = value
        return primitive.bind(*operands, **params)

    results = jax.lax.map(one, [jnp.moveaxis(args[i], dims[i], 0) for i in mapped])
    return results, [0] * len(results)


def _as_tokens(args, dims, names) -> list | None:
    """Operands whose mapped axis is one of the tokens; None if there are parameters for each example."""
    given, at = by_name(names, args), by_name(names, dims)
    if any(at.get(n, NOT_MAPPED) is not NOT_MAPPED for n in ("w", "bias", "w_dot", "bias_dot")):
        return None
    count = mapped_size(args, dims)

    def placed(name, array):
        if name in ("w", "bias", "w_dot", "bias_dot"):
            return array
        if at[name] is not NOT_MAPPED:
            return jnp.moveaxis(array, at[name], 0)
        return jnp.broadcast_to(array[None], (1 if name == "where" else count, *array.shape))

    return [placed(n, a) for n, a in given.items()]


def _batch(primitive, args, dims, *, names, results, **params):
    """Examples are tokens, but where each has parameters, or gradients of parameters, of its own."""
    operands = None if {"dw", "dbias"} & set(results) else _as_tokens(args, dims, names)
    params = {"names": names, "results": results, **params}
    if operands is None:
        return _one_by_one(primitive, args, dims, params)
    return primitive.bind(*operands, **params), [0] * len(results)


def _total_batch(args, dims, *, names, results, **params):
    operands = _as_tokens(args, dims, names)
    if operands is None:
        params = {"names": names, "results": results, **params}
        return _one_by_one(total_p, args, dims, params)
    given = by_name(names, operands)
    found = _losses(given, results[1:], params)
    losses = given["c"] * zero_where_hidden(found["loss"], given)
    totals = jnp.sum(losses, tuple(range(1, losses.ndim)))
    return [totals, *(found[r] for r in results[1:])], [0] * len(results)


batching.primitive_batchers[total_p] = _total_batch
for _primitive in (forward_p, grad_p, tangent_p):
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
