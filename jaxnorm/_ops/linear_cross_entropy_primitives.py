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

x is [*tokens, D], labels, c, g and h are [*tokens], w is [D, V] or [V, D] (`class_axis`), bias is [V], and `where` has
the rank of x and broadcasts to [*tokens, V]. All operands have names (`_ORDER`).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from jaxnorm._ops import class_rows
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.avals import aval_like, spec_of, vary_alike, vary_as
from jaxnorm._primitive.define import define_dce, define_formula, define_partitioned
from jaxnorm._primitive.named import bind_named, by_name, only
from jaxnorm._primitive.partition import Partition, sharding_factors
from jaxnorm._primitive.rules import NOT_MAPPED, add, is_present, mapped_size, sum_to, zero
from jaxnorm._rows.named import row_program
from jaxnorm._sharding import Blocks, Tiled

_OF_TOKENS = ("labels", "c", "g", "h")
_DOTS = {"x_dot": "x", "w_dot": "w", "bias_dot": "bias"}
_ORDER = ("x", "w", "labels", "bias", "where", "c", "g", "h", *_DOTS)
RESULTS = ("loss", "log_prob", "entropy")
_GRADIENTS = {"dx": "x", "dw": "w", "dbias": "bias"}
# Which number of a token a result's cotangent is.
_COTANGENTS = {"loss": "c", "log_prob": "g", "entropy": "h"}

# Logits of fewer bytes are computed at once.
_SMALL = 1 << 26
# The most tokens whose logits are computed at a time, by default. Products of fewer are slower, and each adds to the
# gradient of w in memory once.
_TOKENS = 2048
# By default, tokens at a time are a multiple of this, which matrix units like.
_MULTIPLE = 128

bind = functools.partial(bind_named, _ORDER)


# ---- the tokens of a device ----


def default_chunk(tokens: int, classes: int, itemsize: int) -> int:
    """Tokens whose logits are computed at a time."""
    if tokens <= _TOKENS or tokens * classes * itemsize <= _SMALL:
        return max(1, tokens)
    alike = -(-tokens // -(-tokens // _TOKENS))
    return -(-alike // _MULTIPLE) * _MULTIPLE


def _rows(u, labels, bias, mask, softcap) -> class_rows.Part:
    z = u.astype(acc_dtype(u.dtype))
    if bias is not None:
        z = z + bias
    if softcap:
        z = jnp.tanh(z / np.asarray(softcap, z.dtype)) * np.asarray(softcap, z.dtype)
    return class_rows.Part.make(z, labels, mask, 1)


def _token_results(numbers, labels, classes, wanted, *, smoothing, z_loss) -> dict:
    """Results by name; with size 1 along the classes."""
    valid = (labels >= 0) & (labels < jnp.asarray(classes, jnp.int32))
    lse = class_rows.log_sum_exp(numbers)
    nan = np.asarray(np.nan, lse.dtype)
    found = {}
    if "loss" in wanted:
        n = numbers.get("count", jnp.asarray(classes, lse.dtype))
        loss = class_rows.negative_log_likelihood(numbers, smoothing, n)
        if z_loss:
            loss = loss + lse * lse * np.asarray(z_loss, lse.dtype)
        found["loss"] = jnp.where(valid, loss, nan)
    if "log_prob" in wanted:
        log_prob = numbers["picked"] - jnp.log(numbers["total"])
        found["log_prob"] = jnp.where(valid, log_prob, nan)
    if "entropy" in wanted:
        found["entropy"] = class_rows.entropy(numbers)
    return found


def _logits_gradient(part, numbers, valid, seen, classes, c, g, h, *, smoothing, z_loss, softcap):
    """The gradient of u, elementwise. Rows that are not `seen` may hold NaN; all are if it is None."""
    z, total = part.logits, numbers["total"]
    nothing = np.zeros((), z.dtype)
    lse = class_rows.log_sum_exp(numbers)
    p = part.kept(jnp.exp(z - numbers["top"]) / total)
    out = nothing
    if c is not None:
        of_p = c * (1 + lse * np.asarray(2 * z_loss, z.dtype)) if z_loss else c
        n = numbers.get("count", jnp.asarray(classes, z.dtype))
        out = of_p * p - c * part.target(smoothing, n if smoothing else None)
    if g is not None:
        out = out + g * (jnp.where(part.hit, np.ones((), z.dtype), nothing) - p)
    slope = None
    if softcap:
        slope = 1 - jnp.square(part.kept(z) / np.asarray(softcap, z.dtype))
    if c is not None or g is not None:
        out = out if slope is None else out * slope
        out = part.kept(jnp.where(valid, out, nothing))
    if h is not None:
        log_p = jnp.where(p == 0, nothing, z - numbers["top"] - jnp.log(total))
        of_entropy = h * p * (log_p + class_rows.entropy(numbers))
        of_entropy = of_entropy if slope is None else of_entropy * slope
        out = out - part.kept(of_entropy)
    return out if seen is None else jnp.where(seen, out, nothing)


class _Device:
    """The formulas for the tokens and the classes that a device has.

    Tokens are one dimension here.
    """

    def __init__(self, given, results, *, class_axis, smoothing, z_loss, softcap, chunk, weighted,
                 implementation, blocks=None):  # fmt: skip
        self.given, self.results = given, results
        self.class_axis, self.softcap, self.blocks = class_axis, softcap, blocks
        self.options = {"smoothing": smoothing, "z_loss": z_loss}
        self.entropy = "entropy" in results or "h" in given
        self.kernel = _plain if implementation == "xla" else row_program
        self.shared = blocks is not None and bool(blocks.cut((1,)))  # devices share the classes
        #: whether coefficients of 0 hide tokens
        self.weighted = weighted and any(k in given for k in _COTANGENTS.values())
        #: whether nothing is wanted of hidden tokens, which may hold NaN
        self.drops = self.weighted and not {"log_prob", "entropy"} & set(results)
        self.skips = self.drops and not self.shared
        x, w = given["x"], given["w"]
        self.tokens = x.shape[0]
        self.classes = blocks.shape[1] if blocks else w.shape[class_axis]
        #: None for all tokens at once
        self.chunk = None
        size = (self.tokens, w.shape[class_axis], x.dtype.itemsize)
        if all(isinstance(n, int) for n in size):  # they may be symbols
            self.chunk = chunk or default_chunk(*size)

    # ---- some tokens ----

    def _logits(self, x):
        return _contract(x, self.given["w"], 1, 1 - self.class_axis)

    def _fixed(self, some) -> list:
        """(name, array) of what the rows of some tokens need besides logits and labels."""
        found = []
        if "bias" in self.given:
            found.append(("bias", self.given["bias"][None].astype(acc_dtype(some["x"].dtype))))
        mask = some.get("where", self.given.get("where"))
        if self.shared:
            found += [("where", m) for m in class_rows.own_mask(mask, self.blocks, 1)]
        elif mask is not None:
            found.append(("where", mask))
        return found

    def _elements(self, fixed):
        names = [name for name, _ in fixed]

        def elements(u, labels, *arrays):
            found = dict(zip(names, arrays, strict=True))
            return _rows(u, labels, found.get("bias"), found.get("where"), self.softcap)

        return elements

    def _numbers_wanted(self):
        spread = bool(self.options["smoothing"])
        return {"spread": spread, "entropy": self.entropy}

    def _results_of(self, numbers, labels):
        wanted = [r for r in RESULTS if r in self.results]
        found = _token_results(numbers, labels, self.classes, wanted, **self.options)
        return [found[r] for r in wanted]

    def _of_rows(self, some, coefficients) -> tuple[list, list]:
        """(results of some tokens, the gradient of their logits, in a list, if there are coefficients)."""
        u, labels = self._logits(some["x"]), some["labels"][:, None]
        fixed = self._fixed(some)
        elements, arrays = self._elements(fixed), [a for _, a in fixed]
        numbers_wanted = self._numbers_wanted()
        names = list(coefficients)
        columns = [coefficients[n][:, None] for n in names]
        if names and self.weighted:
            columns.append(self._counts(some)[:, None])

        def gradient(part, numbers, valid, columns):
            found = dict.fromkeys(("c", "g", "h")) | dict(zip(names, columns, strict=False))
            seen = columns[-1] if self.weighted else None
            return _logits_gradient(
                part, numbers, valid, seen, self.classes, *found.values(), softcap=self.softcap, **self.options
            ).astype(u.dtype)  # fmt: skip

        valid = (labels >= 0) & (labels < jnp.asarray(self.classes, jnp.int32))
        if self.shared:
            own = class_rows.own_labels(labels, self.blocks, 1)
            numbers = class_rows.numbers_on_devices(
                elements, (u, own, *arrays), own, self.blocks, 1, **numbers_wanted, run=self.kernel
            )
            results, keys = self._results_of(numbers, labels), list(numbers)
            if not names:
                return results, []

            def from_numbers(u, own, valid, *rest):
                shared, rest = dict(zip(keys, rest, strict=False)), rest[len(keys) :]
                part = elements(u, own, *rest[: len(arrays)])
                return [gradient(part, shared, valid, rest[len(arrays) :])]

            operands = u, own, valid, *numbers.values(), *arrays, *columns
            return results, self.kernel(from_numbers)(*operands)

        def whole(u, labels, *rest):
            part = elements(u, labels, *rest[: len(arrays)])
            counted = numbers_wanted["spread"] and "where" in self.given
            numbers = part.numbers(counted=counted, **numbers_wanted)
            results = self._results_of(numbers, labels)
            if not names:
                return results
            valid = (labels >= 0) & (labels < jnp.asarray(self.classes, jnp.int32))
            return [*results, gradient(part, numbers, valid, rest[len(arrays) :])]

        found = self.kernel(whole)(u, labels, *arrays, *columns)
        return (found[:-1], found[-1:]) if names else (found, [])

    # ---- all tokens ----

    def run(self) -> dict:
        """Results by name."""
        given, results = self.given, self.results
        per_token = {n: given[n] for n in ("x", *_OF_TOKENS) if n in given}
        if "where" in given and given["where"].shape[0] != 1:
            per_token["where"] = given["where"]
        names = [r for r in RESULTS if r in results] + ["dx"] * ("dx" in results)
        sums, columns = self._in_chunks(per_token)
        found = dict(zip(names, columns, strict=True)) | sums
        x, w = given["x"], given["w"]
        if "dx" in found and self.shared:
            found["dx"] = self.blocks.psum(found["dx"], (1,))
        for name in sums:
            if self.blocks:
                found[name] = self.blocks.psum(found[name], (0,))
        dtypes = {"dx": x.dtype, "dw": w.dtype}
        if "bias" in given:
            dtypes["dbias"] = given["bias"].dtype
        return {n: found[n].astype(dtypes.get(n, found[n].dtype)) for n in results}

    def _in_chunks(self, per_token) -> tuple[dict, list]:
        """(sums over tokens by name, what each token has)."""
        if self.chunk is None or self.chunk >= self.tokens:
            return self._some(per_token, None)
        count, rest = -(-self.tokens // self.chunk), self.tokens % self.chunk

        def chunk(i):
            start = jnp.minimum(i * self.chunk, self.tokens - self.chunk)
            some = {
                n: jax.lax.dynamic_slice_in_dim(a, start, self.chunk) for n, a in per_token.items()
            }
            if rest:  # the last chunk begins with tokens of the one before
                new = start + jnp.arange(self.chunk, dtype=np.int32) >= i * self.chunk
                for n in some.keys() & _COTANGENTS.values():
                    some[n] = jnp.where(new, some[n], np.zeros((), some[n].dtype))
            return some

        first = chunk(np.int32(0))
        if self.skips:
            shapes = jax.eval_shape(self._some, first, None)[0]
            sums, done = jax.tree.map(self._zeros, shapes), 0
        else:  # the first product makes the sums, which need no zeros then
            (sums, columns), done = self._some(first, None), 1
        numbers = jnp.arange(done, count, dtype=np.int32)
        sums, more = jax.lax.scan(lambda sums, i: self._step(chunk(i), sums), sums, numbers)
        if done:
            more = [jnp.concatenate([c[None], m]) for c, m in zip(columns, more, strict=True)]
        return sums, [self._flat(column, rest) for column in more]

    def _flat(self, column, rest):
        """What each token has, from an array of chunks, of the last of which the `rest` at the end are new."""
        shape = column.shape[2:]
        if not rest:
            return column.reshape(-1, *shape)
        return jnp.concatenate([column[:-1].reshape(-1, *shape), column[-1, self.chunk - rest :]])

    def _step(self, some, sums) -> tuple[dict, list]:
        if not self.skips:
            return self._some(some, sums)
        shapes = jax.eval_shape(self._some, some, sums)[1]

        def nothing(_, sums):
            return sums, jax.tree.map(self._zeros, shapes)

        return jax.lax.cond(jnp.any(self._counts(some)), self._some, nothing, some, sums)

    def _zeros(self, like):
        """As a result that is computed is: it varies along the same axes of a shard_map as the operands."""
        return vary_as(jnp.zeros(like.shape, like.dtype), jax.typeof(self.given["x"]))

    def _counts(self, some):
        """Which tokens have a coefficient that is not 0."""
        return functools.reduce(
            jnp.logical_or, (some[k] != 0 for k in _COTANGENTS.values() if k in some)
        )

    def _seen_features(self, some):
        """Those of some tokens, 0 where hidden."""
        x = some["x"]
        return jnp.where(self._counts(some)[:, None], x, np.zeros((), x.dtype))

    def _some(self, some, sums) -> tuple[dict, list]:
        if self.drops:
            some = some | {"x": self._seen_features(some)}
        coefficients = {n: some[n] for n in ("c", "g", "h") if n in some and self._has_gradients}
        results, gradient = self._of_rows(some, coefficients)
        columns = [r[:, 0] for r in results]
        if not gradient:
            return sums or {}, columns
        (du,) = gradient
        w, dtype = self.given["w"], acc_dtype(du.dtype)
        if "dx" in self.results:
            kept = dtype if self.shared else du.dtype
            columns.append(_contract(du, w, 1, self.class_axis, kept))
        new = {}
        if "dw" in self.results:
            x = self._seen_features(some) if self.weighted and not self.drops else some["x"]
            pair = (x, du) if self.class_axis == 1 else (du, x)
            new["dw"] = _contract(*pair, 0, 0, dtype)
        if "dbias" in self.results:
            new["dbias"] = jnp.sum(du.astype(dtype), 0)
        return {n: v if sums is None else sums[n] + v for n, v in new.items()}, columns

    @property
    def _has_gradients(self) -> bool:
        return any(r in _GRADIENTS for r in self.results)


def _plain(formula):
    return formula


def _contract(a, b, of_a: int, of_b: int, dtype=None):
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=dtype)


def _formula(*operands, names, results, blocks=None, **params):
    """Results of a call, on one device or, with `blocks` of tokens and classes, on one of several."""
    given = by_name(names, operands)
    tokens = given["x"].shape[:-1]
    flat = dict(given)
    for name in ("x", *_OF_TOKENS):
        if name in given:
            flat[name] = given[name].reshape(math.prod(tokens), *given[name].shape[len(tokens) :])
    if "where" in given:
        mask = given["where"]
        if any(n != 1 for n in mask.shape[:-1]):
            mask = jnp.broadcast_to(mask, (*tokens, mask.shape[-1]))
        flat["where"] = mask.reshape(-1, mask.shape[-1])
    found = _Device(flat, results, blocks=blocks, **params).run()
    return [
        found[r].reshape(*tokens, *found[r].shape[1:]) if r in RESULTS or r == "dx" else found[r]
        for r in results
    ]


# ---- shapes and shardings ----


def _abstract(*avals, names, results, **_):
    given = by_name(names, avals)
    x = given["x"]
    per_token = aval_like(x, x.shape[:-1], acc_dtype(x.dtype), spec_of(x)[:-1])
    made = dict.fromkeys(RESULTS, per_token)
    made |= {name: aval_like(given[a]) for name, a in _GRADIENTS.items() if a in given}
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
    return _formula(*given.values(), names=names, class_axis=class_axis, blocks=flat, **params)


# ---- the primitives ----


def _describe(_, **__):
    return "linear_cross_entropy"


def _define(name):
    return define_partitioned(
        name,
        abstract=_abstract,
        formula=_formula,
        describe=_describe,
        sharding_rule=_sharding_rule,
        partition=_partition,
    )


# Their formula is one: which gradients are wanted is in the parameters.
forward_p = _define("linear_cross_entropy")
grad_p = _define("linear_cross_entropy_grad")


def _losses(given, results, params) -> dict:
    """The loss and other results of each token."""
    taken = given if params["weighted"] else {n: v for n, v in given.items() if n != "c"}
    return bind(forward_p, taken, tuple(dict.fromkeys(("loss", *results))), params)


def _seen(loss, c):
    """Losses, 0 where a coefficient of 0 hides them: they may be NaN there."""
    return jnp.where(c == 0, np.zeros((), loss.dtype), loss)


def _total_formula(*operands, names, results, **params):
    given = by_name(names, operands)
    found = _losses(given, results[1:], params)
    return [
        jnp.sum(given["c"] * _seen(found["loss"], given["c"])),
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
        return _formula(
            *(fixed | values).values(), names=tuple(fixed | values), results=results, **params
        )

    return jax.jvp(function, [{n: given[n] for n in moving}], [moving])[1]


tangent_p = define_formula(
    "linear_cross_entropy_tangent", abstract=_abstract, formula=_tangent_formula, of_kernels=True
)


def _inner_formula(a, b):
    dtype = acc_dtype(a.dtype)
    return [jnp.sum(a.astype(dtype) * b.astype(dtype))]


# sum(a * b) of arrays of 16 bits, whose transpose keeps them in 16 bits.
inner_p = define_formula(
    "inner_product",
    abstract=lambda a, _: [aval_like(a, (), acc_dtype(a.dtype), ())],
    formula=_inner_formula,
)


# ---- derivatives ----


def _tangents_of(given, dots, results, params) -> dict:
    """Tangents of each token's results by name; none if nothing moves."""
    moving = {f"{n}_dot": dots.get(n) for n in _DOTS.values() if is_present(dots.get(n))}
    if not moving or not results:
        return {}
    fixed = only(given, ("x", "w", "labels", "bias", "where"))
    return bind(tangent_p, fixed | moving, results, params)


def _forward_jvp(primals, tangents, *, names, results, **params):
    given, dots = by_name(names, primals), by_name(names, tangents)
    out = bind(forward_p, given, results, params)
    found = _tangents_of(given, dots, results, params)
    return [out[r] for r in results], [found.get(r, zero(out[r])) for r in results]


def _total_jvp(primals, tangents, *, names, results, **params):
    """The gradients come from the pass that computes the loss."""
    given, dots = by_name(names, primals), by_name(names, tangents)
    moving = {f"d{n}": dots[n] for n in _GRADIENTS.values() if is_present(dots.get(n))}
    if moving:
        wanted = tuple(dict.fromkeys(("loss", *results[1:], *moving)))
        out = bind(grad_p, given, wanted, params)
    else:
        out = _losses(given, results[1:], params)
    c, seen = given["c"], _seen(out["loss"], given["c"])
    if params["weighted"] and "dx" in moving:  # the tangent of a hidden token may be NaN
        moving["dx"] = _seen(moving["dx"], c[..., None])
    terms = [inner_p.bind(*vary_alike(out[n], t))[0] for n, t in moving.items()]
    if is_present(dots["c"]):
        terms.append(jnp.sum(seen * dots["c"]))
    total = jnp.sum(c * seen)
    found = _tangents_of(given, dots, results[1:], params)
    return (
        [total, *(out[r] for r in results[1:])],
        [add(*terms) if terms else zero(total), *(found.get(r, zero(out[r])) for r in results[1:])],
    )


def _formula_jvp(primitive, formula, primals, tangents, **params):
    """Of what is a derivative itself: that of its formula, which goes through the tokens in the same steps."""
    moving = [i for i, t in enumerate(tangents) if is_present(t)]

    def function(*values):
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return formula(*operands, **params)

    results = primitive.bind(*primals, **params)
    dots = jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])[1]
    return results, dots


def _tangent_transpose(cotangents, *operands, names, results, **params):
    given = by_name(names, operands)
    linear = {n: v for n, v in given.items() if ad.is_undefined_primal(v)}
    of_tokens = {_COTANGENTS[r]: ct for r, ct in zip(results, cotangents, strict=True)}
    found = {n: ad.Zero(v.aval) for n, v in linear.items()}
    if any(map(is_present, of_tokens.values())):
        fixed = {n: v for n, v in given.items() if n not in _DOTS}
        wanted = tuple(f"d{_DOTS[n]}" for n in linear)
        out = bind(grad_p, fixed | of_tokens, wanted, params)
        found = {n: sum_to(out[f"d{_DOTS[n]}"], v.aval) for n, v in linear.items()}
    return [found.get(n) for n in names]


def _inner_jvp(primals, tangents):
    a, b = primals
    (result,) = inner_p.bind(a, b)
    terms = [
        inner_p.bind(*pair)[0]
        for pair in ((tangents[0], b), (a, tangents[1]))
        if all(map(is_present, pair))
    ]
    return [result], [add(*terms)]


def _inner_transpose(cotangents, a, b):
    (ct,) = cotangents
    found = []
    for this, other in ((a, b), (b, a)):
        if not ad.is_undefined_primal(this):
            found.append(None)
        elif not is_present(ct):
            found.append(ad.Zero(this.aval))
        else:
            found.append((ct * other.astype(ct.dtype)).astype(this.aval.dtype))
    return found


def _inner_batch(args, dims):
    summed = jax.vmap(_inner_formula, [NOT_MAPPED if d is NOT_MAPPED else d for d in dims])
    return summed(*args), [0]


ad.primitive_jvps[inner_p] = _inner_jvp
ad.primitive_transposes[inner_p] = _inner_transpose
batching.primitive_batchers[inner_p] = _inner_batch


def _prune(used, params):
    """A call with the results that are used: the loss alone in the forward pass of a `jax.checkpoint`."""
    results = tuple(r for r, u in zip(params["results"], used, strict=True) if u)
    return params | {"results": results}, [True] * len(params["names"])


for _primitive in (forward_p, grad_p, tangent_p):
    define_dce(_primitive, _prune)
ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[total_p] = _total_jvp
ad.primitive_jvps[tangent_p] = functools.partial(_formula_jvp, tangent_p, _tangent_formula)
ad.primitive_jvps[grad_p] = functools.partial(_formula_jvp, grad_p, _formula)
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
    losses = given["c"] * _seen(found["loss"], given["c"])
    totals = jnp.sum(losses, tuple(range(1, losses.ndim)))
    return [totals, *(found[r] for r in results[1:])], [0] * len(results)


batching.primitive_batchers[total_p] = _total_batch
for _primitive in (forward_p, grad_p, tangent_p):
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
