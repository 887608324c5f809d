"""The formula of linear_cross_entropy: results and gradients of a device's tokens, some of them at a time.

linear_cross_entropy_primitives.py has the notation.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm._ops import class_rows
from jaxnorm._primitive.arithmetic import acc_dtype
from jaxnorm._primitive.avals import vary_as
from jaxnorm._primitive.named import by_name
from jaxnorm._rows.named import row_program

OF_TOKENS = ("labels", "seen", "c", "g", "h")
RESULTS = ("loss", "log_prob", "entropy")
GRADIENTS = {"dx": "x", "dw": "w", "dbias": "bias"}
# Which number of a token a result's cotangent is.
COTANGENTS = {"loss": "c", "log_prob": "g", "entropy": "h"}

# Logits of fewer bytes are computed at once.
_SMALL = 1 << 26
# The most tokens whose logits are computed at a time, by default. Products of fewer are slower, and each adds to the
# gradient of w in memory once.
_TOKENS = 2048
# By default, tokens at a time are a multiple of this, which matrix units like.
_MULTIPLE = 128


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
    valid = class_rows.is_class(labels, classes)
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

    def __init__(self, given, results, *, class_axis, smoothing, z_loss, softcap, chunk,
                 implementation, blocks=None):  # fmt: skip
        self.given, self.results = given, results
        self.class_axis, self.softcap, self.blocks = class_axis, softcap, blocks
        self.options = {"smoothing": smoothing, "z_loss": z_loss}
        self.entropy = "entropy" in results or "h" in given
        self.kernel = _plain if implementation == "xla" else row_program
        #: the blocks if devices share the classes
        self.shared = blocks if blocks is not None and blocks.cut((1,)) else None
        #: whether nothing is wanted of hidden tokens, which may hold NaN
        self.drops = "seen" in given and not {"log_prob", "entropy"} & set(results)
        self.skips = self.drops and self.shared is None
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
            found += [("where", m) for m in class_rows.own_mask(mask, self.shared, 1)]
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
        if names and "seen" in some:
            columns.append(self._counts(some)[:, None])

        def gradient(part, numbers, valid, columns):
            found = dict.fromkeys(("c", "g", "h")) | dict(zip(names, columns, strict=False))
            seen = columns[-1] if "seen" in some else None
            return _logits_gradient(
                part, numbers, valid, seen, self.classes, *found.values(), softcap=self.softcap, **self.options
            ).astype(u.dtype)  # fmt: skip

        if self.shared:
            own = class_rows.own_labels(labels, self.shared, 1)
            numbers = class_rows.numbers_on_devices(
                elements, (u, own, *arrays), own, self.shared, 1, **numbers_wanted, run=self.kernel
            )
            results, keys = self._results_of(numbers, labels), list(numbers)
            if not names:
                return results, []

            def from_numbers(u, own, valid, *rest):
                shared, rest = dict(zip(keys, rest, strict=False)), rest[len(keys) :]
                part = elements(u, own, *rest[: len(arrays)])
                return [gradient(part, shared, valid, rest[len(arrays) :])]

            valid = class_rows.is_class(labels, self.classes)
            operands = u, own, valid, *numbers.values(), *arrays, *columns
            return results, self.kernel(from_numbers)(*operands)

        def whole(u, labels, *rest):
            part = elements(u, labels, *rest[: len(arrays)])
            counted = numbers_wanted["spread"] and "where" in self.given
            numbers = part.numbers(counted=counted, **numbers_wanted)
            results = self._results_of(numbers, labels)
            if not names:
                return results
            valid = class_rows.is_class(labels, self.classes)
            return [*results, gradient(part, numbers, valid, rest[len(arrays) :])]

        found = self.kernel(whole)(u, labels, *arrays, *columns)
        return (found[:-1], found[-1:]) if names else (found, [])

    # ---- all tokens ----

    def run(self) -> dict:
        """Results by name."""
        given, results = self.given, self.results
        per_token = {n: given[n] for n in ("x", *OF_TOKENS) if n in given}
        if "where" in given and given["where"].shape[0] != 1:
            per_token["where"] = given["where"]
        names = [r for r in RESULTS if r in results] + ["dx"] * ("dx" in results)
        sums, columns = self._in_chunks(per_token)
        found = dict(zip(names, columns, strict=True)) | sums
        x, w = given["x"], given["w"]
        if "dx" in found and self.shared:
            found["dx"] = self.shared.psum(found["dx"], (1,))
        for name in sums:
            if self.blocks:
                found[name] = self.blocks.psum(found[name], (0,))
        dtypes = {"dx": x.dtype, "dw": w.dtype}
        if "bias" in given:
            dtypes["dbias"] = given["bias"].dtype
        return {n: found[n].astype(dtypes.get(n, found[n].dtype)) for n in results}

    def _in_chunks(self, per_token) -> tuple[dict, list]:
        """(sums over tokens by name, what each token has)."""
        size = self.chunk
        if size is None or size >= self.tokens:
            return self._some(per_token, None)
        count, rest = -(-self.tokens // size), self.tokens % size

        def chunk(i):
            start = jnp.minimum(i * size, self.tokens - size)
            some = {n: jax.lax.dynamic_slice_in_dim(a, start, size) for n, a in per_token.items()}
            if rest:  # the last chunk begins with tokens of the one before
                new = start + jnp.arange(size, dtype=np.int32) >= i * size
                for n in COTANGENTS.values():
                    if n in some:
                        some[n] = jnp.where(new, some[n], np.zeros((), some[n].dtype))
            return some

        def through(first, sums):
            numbers = jnp.arange(first, count, dtype=np.int32)
            return jax.lax.scan(lambda sums, i: self._step(chunk(i), sums), sums, numbers)

        one = chunk(np.int32(0))
        if self.skips:
            shapes = jax.eval_shape(self._some, one, None)[0]
            sums, columns = through(0, jax.tree.map(self._zeros, shapes))
        else:  # the first product makes the sums, which need no zeros then
            sums, first = self._some(one, None)
            sums, more = through(1, sums)
            columns = [jnp.concatenate([c[None], m]) for c, m in zip(first, more, strict=True)]
        return sums, [self._flat(column, size, rest) for column in columns]

    def _flat(self, column, size, rest):
        """What each token has, from an array of chunks, of the last of which the `rest` at the end are new."""
        shape = column.shape[2:]
        if not rest:
            return column.reshape(-1, *shape)
        return jnp.concatenate([column[:-1].reshape(-1, *shape), column[-1, size - rest :]])

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
        """Which tokens are seen, or have statistics whose derivative is wanted."""
        counts = some["seen"]
        for name in ("g", "h"):
            if name in some:
                counts |= some[name] != 0
        return counts

    def _seen_features(self, some):
        """Those of some tokens, 0 where hidden."""
        x = some["x"]
        if "seen" not in some:
            return x
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
            x = some["x"] if self.drops else self._seen_features(some)
            pair = (x, du) if self.class_axis == 1 else (du, x)
            new["dw"] = _contract(*pair, 0, 0, dtype)
        if "dbias" in self.results:
            new["dbias"] = jnp.sum(du.astype(dtype), 0)
        return {n: v if sums is None else sums[n] + v for n, v in new.items()}, columns

    @property
    def _has_gradients(self) -> bool:
        return any(r in GRADIENTS for r in self.results)


def _plain(formula):
    return formula


def _contract(a, b, axis: int, other: int, dtype=None):
    """The product of matrices, summed over an axis of the first and one of the other."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=dtype)


def formula(*operands, names, results, blocks=None, **params):
    """Results of a call, on one device or, with `blocks` of tokens and classes, on one of several."""
    given = by_name(names, operands)
    tokens = given["x"].shape[:-1]
    flat = dict(given)
    for name in ("x", *OF_TOKENS):
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
