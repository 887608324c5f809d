"""linear_cross_entropy against the float64 oracle: values, hidden tokens, gradients, what a program consists of."""

import functools
import math
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import suite
from jax.extend import core as jex_core
from test_errors import MESSAGE

import jaxnorm
from jaxnorm._primitive.define import FORMULAS

D, V = 5, 9
nan = np.nan
reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def numbers(shape, seed, dtype="float32", steps=4):
    """Multiples of 1/4 up to 1: sums of products of D of them are exact in every dtype."""
    return np.asarray(np.random.default_rng(seed).integers(-steps, steps + 1, shape) / 4, dtype)


def given(tokens=(7,), dtype="float32", w_axis=-1, bias=None, weights=None, where=None):
    """Operands by name; `bias` is its dtype, `weights` and `where` say of what kind they are."""
    rng = np.random.default_rng(3)
    dtype = jnp.dtype(dtype)
    found = {
        "x": numbers((*tokens, D), 0, dtype),
        "w": numbers((D, V) if w_axis == -1 else (V, D), 1, dtype),
        "labels": np.asarray(rng.integers(0, V, tokens), np.int32),
    }
    if bias is not None:
        found["bias"] = numbers((V,), 2, jnp.dtype(bias), 8)
    if weights is not None:
        found["weights"] = np.asarray(rng.random(tokens) < 0.7)
        found["weights"].flat[:1] = True
        if weights == "float":
            found["weights"] = np.where(found["weights"], rng.random(tokens) + 0.5, 0)
            found["weights"] = np.asarray(found["weights"], "float32")
    if where is not None:
        shape = {"classes": (V,), "tokens": (*tokens, 1), "full": (*tokens, V)}[where]
        found["where"] = np.asarray(rng.random(shape) < 0.7)
        if where == "full":
            np.put_along_axis(found["where"], found["labels"][..., None], True, -1)
        if where == "classes":
            found["where"][np.unique(found["labels"])] = True
    return found


def moving(operands):
    return [n for n in ("x", "w", "bias") if n in operands] + [
        n for n in ("weights",) if n in operands and operands[n].dtype != bool
    ]


def results_of(operands, options) -> dict:
    out = jaxnorm.linear_cross_entropy(**operands, **options)
    return {"loss": out[0], **out[1]} if options.get("return_stats") else {"loss": out}


def derived(operands, cts, options):
    """(results, cotangents of what can be differentiated), by name, in one program."""

    @jax.jit
    def run(operands, cts):
        def function(values):
            return results_of(operands | values, options)

        y, pullback = jax.vjp(function, {n: operands[n] for n in moving(operands)})
        return y, pullback({n: cts[n].astype(a.dtype) for n, a in y.items()})[0]

    return run(operands, cts)


def expected(operands, cts, options):
    options = {n: v for n, v in options.items() if n not in ("chunk", "return_stats")}
    if "label_smoothing" in options:
        options["smoothing"] = options.pop("label_smoothing")
    return oracle.linear_cross_entropy(**operands, **options, cts=cts)


def check(operands, options, floor=16.0, nothing=False):
    """Results and gradients; unless `nothing` is expected, zeros would not pass for them."""
    acc = oracle.acc_of(operands["x"].dtype.name)
    tokens = operands["labels"].shape
    of_loss = tokens if options.get("reduction") == "none" else ()
    names = ("loss", "log_prob", "entropy") if options.get("return_stats") else ("loss",)
    cts = {
        n: numbers(of_loss if n == "loss" else tokens, 10 + i, "float32") + np.float32(1.125)
        for i, n in enumerate(names)
    }
    y, bars = derived(operands, cts, options)
    results, grads, sizes = expected(operands, cts, options)
    assert set(y) == set(names)
    for n, a in y.items():
        oracle.assert_close(
            a, results[n], acc, floor=floor, size=np.abs(np.nan_to_num(results[n])) + 8
        )
    for n, a in bars.items():
        dtype = operands[n].dtype.name
        size = sizes[n] + np.max(sizes[n], initial=0) / 64
        # Gradients of logits are rounded to x's dtype.
        units = oracle.UNIT[operands["x"].dtype.name] / oracle.UNIT[dtype]
        close = functools.partial(
            oracle.assert_close, dtype=dtype, floor=floor / 4 * max(1, units), size=size
        )
        if acc == dtype == "float32":
            close = functools.partial(close, floor=floor * max(1, units))
        close(a, grads[n])
        if a.size and not nothing:
            with pytest.raises(AssertionError, match="error"):
                close(np.zeros_like(a), grads[n])
    return y, bars


# ---- values ----

EVERYTHING = {"label_smoothing": 0.2, "z_loss": 0.125, "softcap": 2.0, "return_stats": True}
# Operands, options.
CASES = {
    "plain": ({}, {}),
    "smoothing": ({}, {"label_smoothing": 0.2, "reduction": "sum", "chunk": 3}),
    "only smoothing": ({}, {"label_smoothing": 1.0}),
    "z_loss": ({}, {"z_loss": 0.25, "chunk": 2}),
    "softcap": ({"bias": "float32"}, {"softcap": 1.5, "reduction": "none", "chunk": 3}),
    "bias": ({"bias": "float32"}, {"chunk": 7}),
    "bool weights": ({"weights": "bool"}, {"chunk": 2}),
    "float weights": ({"weights": "float"}, {"chunk": 2}),
    "weights of a sum": ({"weights": "float"}, {"reduction": "sum", "chunk": 1}),
    "weights of none": ({"weights": "float"}, {"reduction": "none", "chunk": 3}),
    "stats": ({}, {"return_stats": True, "chunk": 3}),
    "stats of none": ({"weights": "float"}, {"return_stats": True, "reduction": "none"}),
    "where of classes": ({"where": "classes"}, {"label_smoothing": 0.2, "chunk": 4}),
    "where of all": ({"where": "full"}, {"return_stats": True, "softcap": 1.5, "chunk": 4}),
    "embeddings": ({"w_axis": 0, "bias": "float32"}, {"chunk": 3}),
    "one token": ({"tokens": (), "bias": "float32"}, {"return_stats": True}),
    "one weighted token": ({"tokens": (), "weights": "float"}, {"reduction": "none", "chunk": 8}),
    "many axes": ({"tokens": (2, 3, 4), "where": "full"}, {"reduction": "none", "chunk": 7}),
    "everything": (
        {"tokens": (2, 3, 4), "bias": "float32", "weights": "float", "where": "classes"},
        {"chunk": 5, **EVERYTHING},
    ),
    "everything of none": (
        {"tokens": (3, 4), "bias": "float32", "weights": "float", "where": "full", "w_axis": 0},
        {"chunk": 5, "reduction": "none", **EVERYTHING},
    ),
    "bfloat16": ({"dtype": "bfloat16", "bias": "bfloat16", "tokens": (6,)}, {"chunk": 4}),
    "bfloat16 everything": (
        {"dtype": "bfloat16", "bias": "float32", "weights": "bool", "where": "classes"},
        {"chunk": 3, **EVERYTHING},
    ),
    "float16": (
        {"dtype": "float16", "bias": "float16", "w_axis": 0},
        {"chunk": 3, "reduction": "sum", "label_smoothing": 0.2},
    ),
    "float64": (
        {"dtype": "float64", "bias": "float64", "weights": "float"},
        {"chunk": 3, "reduction": "none", "label_smoothing": 0.2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    operands, options = CASES[name]
    w_axis = operands.get("w_axis", -1)
    check(given(**operands), options | ({"w_axis": 0} if w_axis == 0 else {}))


def test_where_of_tokens():
    """A token without any class has the loss NaN and the gradient 0; a weight of 0 leaves it out."""
    operands = given((6,), where="tokens")
    keep = operands["where"] = np.array([1, 1, 0, 1, 0, 1], bool)[:, None]
    y, bars = check(operands, {"reduction": "none", "chunk": 4})
    np.testing.assert_array_equal(np.isnan(y["loss"]), ~keep[:, 0])
    assert not np.any(bars["x"][~keep[:, 0]])
    y, _ = check(operands | {"weights": keep[:, 0]}, {"chunk": 4})
    assert np.isfinite(y["loss"])


@pytest.mark.parametrize("tokens", [(0,), (2, 0, 3)])
@reductions
def test_no_tokens(tokens, reduction):
    operands = given(tokens, bias="float32")
    options = {"reduction": reduction, "return_stats": True, "chunk": 2}
    cts = {"loss": np.ones(tokens if reduction == "none" else ())}
    cts |= dict.fromkeys(("log_prob", "entropy"), np.ones(tokens))
    y, bars = derived(operands, cts, options)
    assert y["entropy"].shape == y["log_prob"].shape == tokens
    if reduction == "none":
        assert y["loss"].shape == tokens
    else:
        np.testing.assert_array_equal(y["loss"], 0 if reduction == "sum" else nan)
    for n, a in bars.items():
        np.testing.assert_array_equal(a, np.zeros(operands[n].shape))


def test_no_classes():
    """No label is a class then."""
    y, (x_bar, w_bar) = jax.value_and_grad(
        lambda x, w: jaxnorm.linear_cross_entropy(x, w, jnp.zeros(3, int)), (0, 1)
    )(jnp.ones((3, 2)), jnp.ones((2, 0)))
    assert np.isnan(y)
    assert not x_bar.any()
    assert w_bar.shape == (2, 0)


# ---- labels and special numbers ----


@pytest.mark.parametrize("kind", ["uint8", "int64", "uint64"])
def test_label_dtypes(kind):
    operands = given()
    y = jaxnorm.linear_cross_entropy(**operands, reduction="none")
    operands["labels"] = jnp.asarray(operands["labels"], kind)
    np.testing.assert_array_equal(jaxnorm.linear_cross_entropy(**operands, reduction="none"), y)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_labels_out_of_range(options):
    """Their losses are NaN, their gradients 0, and no other token's are touched."""
    operands = given((8,))
    operands["labels"] = np.array([0, -100, V, 8, -1, 2**31, 2**32 + 1, 3])
    outside = np.array([0, 1, 1, 0, 1, 1, 1, 0], bool)
    y, bars = check(operands, {"reduction": "none", "chunk": 3, **options, "return_stats": False})
    np.testing.assert_array_equal(np.isnan(y["loss"]), outside)
    np.testing.assert_array_equal(np.all(bars["x"] == 0, -1), outside)
    y, _ = check(operands | {"weights": ~outside}, {"chunk": 3, **options, "return_stats": False})
    assert np.isfinite(y["loss"])


HIDDEN = np.array([0, 1, 0, 0, 0, 1, 1, 1], bool)  # a whole chunk, and some of another


@reductions
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_hidden_tokens(reduction, options):
    """What a token of weight 0 holds reaches neither losses nor gradients, whatever it is."""
    operands = given((8,), bias="float32") | {"weights": np.asarray(~HIDDEN, "float32")}
    options = {"reduction": reduction, "chunk": 3, **options}
    bad = operands | {"x": operands["x"].copy(), "labels": operands["labels"].copy()}
    bad["x"][HIDDEN] = np.array([nan, np.inf, -np.inf, nan])[:, None]
    bad["labels"][HIDDEN] = [-100, 3, V, 5]

    @jax.jit
    def run(operands):
        def loss(values):
            found = results_of(operands | values, options)
            shown = {n: jnp.where(HIDDEN, 0, a) if a.ndim else a for n, a in found.items()}
            return sum(jnp.sum(jnp.sin(a)) for a in shown.values()), shown

        values = {n: operands[n] for n in moving(operands)}
        return jax.value_and_grad(loss, has_aux=True)(values)

    got, want = run(bad), run(operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    x_bar = got[1]["x"]
    np.testing.assert_array_equal(np.all(x_bar == 0, -1), HIDDEN)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hidden_tokens_of_further_derivatives(reduction):
    """Of second derivatives, and of tangents that are NaN there."""
    operands = given((8,)) | {"weights": ~HIDDEN}
    x, w = operands.pop("x"), operands.pop("w")
    bad = np.where(HIDDEN[:, None], np.float32(nan), x)

    def total(x, w):
        y = jaxnorm.linear_cross_entropy(
            x, w, **operands, reduction=reduction, softcap=2.0, chunk=3
        )
        return jnp.sum(jnp.sin(y))

    def second(x, w):
        grads = jax.grad(total, (0, 1))(x, w)
        return sum(jnp.sum(jnp.sin(g)) for g in grads)

    @jax.jit
    def run(x, w):
        return jax.grad(second, (0, 1))(x, w), jax.jvp(total, (x, w), (x, w))

    for a, b in zip(jax.tree.leaves(run(bad, w)), jax.tree.leaves(run(x, w)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("weights", [None, "float"])
def test_zero_cotangents_hide_nothing_from_derivatives(weights):
    """The gradient is linear in the cotangents of losses, at 0, too."""
    operands = given(weights=weights) if weights else given()
    x = operands.pop("x")

    def pulled(ct):
        f = functools.partial(jaxnorm.linear_cross_entropy, **operands, reduction="none", chunk=3)
        return jax.vjp(f, x)[1](ct)[0]

    ct = np.linspace(1, 2, 7, dtype=np.float32)
    _, moved = jax.jit(lambda zero, ct: jax.jvp(pulled, (zero,), (ct,)))(np.zeros_like(ct), ct)
    np.testing.assert_allclose(moved, pulled(ct), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan_in_a_counted_token(reduction):
    operands = given(weights="bool")
    operands["weights"][2] = True
    operands["x"][2, 1] = nan
    options = {"reduction": reduction, "chunk": 3}
    cts = {"loss": np.ones((7,) if reduction == "none" else ())}
    y, bars = derived(operands, cts, options)
    if reduction == "none":
        np.testing.assert_array_equal(np.isnan(y["loss"]), np.arange(7) == 2)
    else:
        assert np.isnan(y["loss"])
    np.testing.assert_array_equal(np.isnan(bars["x"]).any(-1), np.arange(7) == 2)
    assert np.isnan(bars["w"]).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classes_of_minus_infinity(smoothing):
    """By their bias; statistics and gradients are finite, and losses are where labels have another class."""
    operands = given(bias="float32")
    operands["bias"][[2, 5]] = -np.inf
    operands["labels"] = np.array([0, 1, 2, 3, 4, 8, 5])
    y, bars = jax.jit(
        lambda operands, x, w: (
            results_of(operands, {"reduction": "none", "return_stats": True, "chunk": 3}),
            jax.grad(
                lambda x, w: jnp.sum(
                    results_of(operands | {"x": x, "w": w}, {"reduction": "none"})["loss"]
                ),
                (0, 1),
            )(x, w),
        )
    )(operands, operands["x"], operands["w"])
    lost = np.isin(operands["labels"], [2, 5])
    np.testing.assert_array_equal(np.isposinf(y["loss"]), lost)
    np.testing.assert_array_equal(np.isneginf(y["log_prob"]), lost)
    results, grads, _ = expected(
        operands | {"bias": np.maximum(operands["bias"], -1e9)},
        {"loss": np.ones(7)},
        {"reduction": "none"},
    )
    np.testing.assert_allclose(y["loss"][~lost], results["loss"][~lost], rtol=1e-5)
    np.testing.assert_allclose(y["entropy"], results["entropy"], rtol=1e-5)
    np.testing.assert_allclose(bars[0], grads["x"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bars[1], grads["w"], rtol=1e-4, atol=1e-5)
    if smoothing:
        y = results_of(operands, {"reduction": "none", "label_smoothing": smoothing})["loss"]
        assert np.isposinf(y).all()


def test_common_offset():
    """The loss does not lose digits to an offset of all logits."""
    operands = given(bias="float32")
    options = {"label_smoothing": 0.2, "return_stats": True}
    want = results_of(operands, options)
    got = results_of(operands | {"bias": operands["bias"] + np.float32(2.0**16)}, options)
    for n in want:
        np.testing.assert_allclose(got[n], want[n], rtol=1e-6, atol=1e-6)


def test_all_weights_0():
    operands = given() | {"weights": np.zeros(7, "float32")}
    assert np.isnan(jaxnorm.linear_cross_entropy(**operands))
    cts = {"loss": np.ones(())}
    y, bars = derived(operands, cts, {"reduction": "sum", "chunk": 3})
    assert not any(np.any(a) for a in jax.tree.leaves((y, bars)))


# ---- what a program consists of ----


def equations(jaxpr, times=1, conditional=False):
    """(how often an equation runs, whether under a condition, the equation); primitives of ours are their formulas."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        yield times, conditional, eqn
        if name in FORMULAS:
            formula = functools.partial(FORMULAS[name], **eqn.params)
            inside = [jax.make_jaxpr(formula)(*(v.aval for v in eqn.invars))]
        else:
            is_jaxpr = lambda p: isinstance(p, (jex_core.Jaxpr, jex_core.ClosedJaxpr))  # noqa: E731
            leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
            inside = [p for p in leaves if is_jaxpr(p)]
        for body in inside:
            yield from equations(
                body,
                times * eqn.params["length"] if name == "scan" else times,
                conditional or name == "cond",
            )


def traced(function, *args):
    return list(equations(jax.make_jaxpr(function)(*args)))


def products(found) -> int:
    return sum(times for times, _, eqn in found if eqn.primitive.name == "dot_general")


def largest(found) -> int:
    return max(math.prod(v.aval.shape) for _, _, eqn in found for v in eqn.outvars)


def largest_in_text(program: str) -> int:
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", program)
    return max(math.prod(map(int, s.split(","))) for s in shapes)


TOKENS, CHUNK, CLASSES = 40, 8, 32
X, W = suite.rand((TOKENS, D)), suite.rand((D, CLASSES), seed=1)
LABELS = np.arange(TOKENS, dtype=np.int32) % CLASSES


def loss_of(reduction="mean", chunk=CHUNK, **options):
    def loss(x, w, labels=LABELS):
        y = jaxnorm.linear_cross_entropy(x, w, labels, reduction=reduction, chunk=chunk, **options)
        return jnp.sum(jax.tree.leaves(y)[0])

    return loss


@reductions
@pytest.mark.parametrize("weighted", [False, True])
def test_products(reduction, weighted):
    """Logits, dx and dw of each chunk once; `none` computes logits again."""
    chunks = TOKENS // CHUNK
    loss = loss_of(reduction, weights=LABELS < 20 if weighted else None)
    assert products(traced(loss, X, W)) == chunks
    again = reduction == "none"
    for wanted, each in (((0, 1), 3), ((0,), 2), ((1,), 2)):
        found = traced(jax.value_and_grad(loss, wanted), X, W)
        assert products(found) == chunks * (each + again)
    # Whole chunks of hidden tokens run none of them.
    under = [conditional for _, conditional, eqn in found if eqn.primitive.name == "dot_general"]
    assert set(under) == {weighted}


@reductions
@pytest.mark.parametrize("where", [None, "tokens"])
def test_logits_are_not_in_memory(reduction, where):
    where = None if where is None else np.arange(TOKENS)[:, None] != 3
    loss = loss_of(reduction, label_smoothing=0.1, where=where)
    for function in (loss, jax.value_and_grad(loss, (0, 1))):
        assert largest(traced(function, X, W)) == CHUNK * CLASSES
        assert largest_in_text(hlo.text(function, X, W)) == CHUNK * CLASSES


def test_logits_of_all_tokens_are_found():
    """The tests above can fail."""
    function = jax.value_and_grad(loss_of(chunk=TOKENS))
    assert largest(traced(function, X, W)) == TOKENS * CLASSES
    assert largest_in_text(hlo.text(function, X, W)) == TOKENS * CLASSES


@pytest.mark.parametrize(("tokens", "chunk"), [(2048, 2048), (2049, 1152), (20000, 2048)])
def test_chosen_chunk(tokens, chunk):
    """Of 2048 tokens at most, a multiple of 128, about as many in each."""
    x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((tokens, 8), (8, 100_000)))
    found = traced(jax.grad(loss_of(chunk=None)), x, w, jax.ShapeDtypeStruct((tokens,), "int32"))
    assert largest(found) == chunk * 100_000


def test_w_is_summed_in_float32():
    """The gradients of w and bias are rounded once, not with each of 512 chunks."""
    tokens, classes = 512, 3
    x = np.asarray(numbers((tokens, D), 0) + 1.25, jnp.bfloat16)
    w = numbers((D, classes), 1, jnp.bfloat16)
    bias = np.zeros(classes, jnp.bfloat16)
    labels = np.arange(tokens) % 2

    def loss(w, bias):
        return jaxnorm.linear_cross_entropy(x, w, labels, bias=bias, reduction="sum", chunk=1)

    got = jax.jit(jax.grad(loss, (0, 1)))(w, bias)
    z = oracle.f64(x) @ oracle.f64(w)
    one = oracle.softmax_cross_entropy_vjp(z, labels, np.ones(tokens)).astype(jnp.bfloat16)
    terms = oracle.f64(x)[:, :, None] * oracle.f64(one)[:, None, :], oracle.f64(one)
    for a, t in zip(got, terms, strict=True):
        close = functools.partial(
            oracle.assert_close, expected=t.sum(0), dtype="bfloat16", floor=1.5
        )
        close(a)
        in_bfloat16 = np.zeros(a.shape, jnp.bfloat16)
        for term in t:
            in_bfloat16 = (in_bfloat16 + term.astype(jnp.bfloat16)).astype(jnp.bfloat16)
        with pytest.raises(AssertionError, match="error"):
            close(in_bfloat16)


def test_same_bits_every_time():
    x, w = suite.rand((300, 64)), suite.rand((64, 200), seed=1)
    run = jax.jit(jax.value_and_grad(loss_of(chunk=64), (0, 1)))
    labels = np.arange(300) % 200
    first, again = run(x, w, labels), run(x, w, labels)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- transformations ----

SELECTED = {
    "mean": ("grad_each", "jvp_each", "hessian", "grad_of_jvp", "vmap", "vmap_some", "vmap_of_grad", "grad_of_vmap"),
    "none": ("vjp", "jacfwd", "jacrev", "jvp_of_grad", "grad_of_grad", "linear_transpose", "vmap_of_tangents", "remat"),
}  # fmt: skip
SMALL = np.array([1, 0, 3], np.int32)


def plain(x, w, bias, *, where, cap, smoothing, z_loss, labels=SMALL):
    """(loss, statistics) of each token, in jax.numpy."""
    z = jnp.where(where, cap * jnp.tanh((x @ w + bias) / cap), -1e30)
    lse = jax.nn.logsumexp(z, -1, keepdims=True)
    log_p = z - lse
    q = (1 - smoothing) * jax.nn.one_hot(labels, z.shape[-1]) + smoothing * where / np.sum(where)
    loss = -jnp.sum(jnp.where(where, q * log_p, 0), -1) + z_loss * lse[..., 0] ** 2
    picked = jnp.sum(jax.nn.one_hot(labels, z.shape[-1]) * log_p, -1)
    return loss, picked, -jnp.sum(jnp.where(where, jnp.exp(log_p) * log_p, 0), -1)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transformations(reduction):
    """As derivatives and maps of the plain formula, in float64: the loss of a mean; loss and statistics of `none`."""
    where = np.array([1, 1, 0, 1], bool)
    omega = np.array([0.5, 1.5, 1.0])
    args = tuple(
        jnp.asarray(numbers(s, i), "float64") for i, s in enumerate([(3, 2), (2, 4), (4,)])
    )
    stats = reduction == "none"

    def f(x, w, bias):
        y = jaxnorm.linear_cross_entropy(
            x, w, SMALL, bias=bias, weights=omega, where=where, softcap=2.0, chunk=2,
            label_smoothing=0.2, z_loss=0.25, reduction=reduction, return_stats=stats,
        )  # fmt: skip
        return y[0] + 2 * y[1]["log_prob"] - 3 * y[1]["entropy"] if stats else y

    def g(x, w, bias):
        loss, log_prob, entropy = plain(
            x, w, bias, where=where, cap=2.0, smoothing=0.2, z_loss=0.25
        )
        if stats:
            return omega * loss + 2 * log_prob - 3 * entropy
        return jnp.sum(omega * loss) / np.sum(omega)

    names = SELECTED[reduction]
    weights = suite.weights((3,) if stats else (), "float64")
    got, want = (suite._run(function, names, args, weights) for function in (f, g))
    for name in names:
        pairs = zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9, err_msg=name)


def test_nothing_for_what_is_frozen():
    """Nor for weights alone."""
    names = suite.jaxnorm_primitives(jax.grad(loss_of(), 0), X, W)
    assert names == {"jaxnorm_linear_cross_entropy_grad": 1}

    def of_weights(weights):
        return jaxnorm.linear_cross_entropy(X, W, LABELS, weights=weights, chunk=CHUNK)

    found = traced(jax.grad(of_weights), np.ones(TOKENS, "float32"))
    assert products(found) == TOKENS // CHUNK


def test_remat():
    """Forward computes the loss alone, backward the gradients alone."""
    found = traced(jax.jit(jax.grad(jax.checkpoint(loss_of()), (0, 1))), X, W)
    calls = [eqn.params["results"] for _, _, eqn in found if "results" in eqn.params]
    assert calls == [("loss",), ("dx", "dw")]
    assert products(found) == TOKENS // CHUNK * (1 + 3)
    got = jax.grad(jax.checkpoint(loss_of()), (0, 1))(X, W)
    for a, b in zip(got, jax.grad(loss_of(), (0, 1))(X, W), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gradient_accumulation():
    """A scan over microbatches has the gradient of the sum of all tokens."""
    loss = loss_of("sum", chunk=3)

    @jax.jit
    def accumulated(x, w, labels):
        def step(sums, batch):
            x, labels = batch
            y, grad = jax.value_and_grad(loss, 1)(x, w, labels)
            return jax.tree.map(jnp.add, sums, (y, grad)), None

        batches = x.reshape(4, -1, D), labels.reshape(4, -1)
        return jax.lax.scan(step, (jnp.zeros((), x.dtype), jnp.zeros_like(w)), batches)[0]

    got = accumulated(X, W, LABELS)
    want = jax.value_and_grad(loss, 1)(X, W, LABELS)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@reductions
def test_gradient_of_vmap_over_tokens(reduction):
    """Examples are tokens: w has one gradient, not one of each example, and their logits are not in memory."""
    x = np.stack([X, X / 2, -X])
    labels = np.stack([LABELS] * 3)
    loss = loss_of(reduction)

    def total(x, w, labels):
        return jnp.sum(jnp.sin(jax.vmap(loss, (0, None, 0))(x, w, labels) / 100))

    function = jax.grad(total, (0, 1))
    found = traced(function, x, W, labels)
    assert largest(found) == max(CHUNK * CLASSES, x.size)
    assert largest_in_text(hlo.text(function, x, W, labels)) == max(CHUNK * CLASSES, x.size)

    def one_by_one(x, w, labels):
        return sum(jnp.sin(loss(*each) / 100) for each in zip(x, [w] * 3, labels, strict=True))

    want = jax.jit(jax.grad(one_by_one, (0, 1)))(x, W, labels)
    for a, b in zip(jax.jit(function)(x, W, labels), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_float0():
    """Labels, masks and boolean weights that are arguments have float0 cotangents."""
    operands = given(weights="bool", where="classes")
    y, pullback = jax.vjp(lambda o: jaxnorm.linear_cross_entropy(**o), operands)
    bars = pullback(jnp.ones_like(y))[0]
    assert {n for n, a in bars.items() if a.dtype == jax.dtypes.float0} == {
        "labels",
        "weights",
        "where",
    }


def test_donated():
    def step(w, x):
        return w - jax.grad(loss_of(), 1)(x, w).astype(w.dtype)

    want = step(W, X)
    np.testing.assert_allclose(jax.jit(step, donate_argnums=0)(jnp.array(W), X), want, rtol=1e-6)


def test_forward_mode_in_jit():
    """The derivative along a direction is the gradient's product with it."""
    f = loss_of(label_smoothing=0.1)
    dots = jnp.cos(X), jnp.sin(W)
    _, got = jax.jit(lambda *dots: jax.jvp(f, (X, W), dots))(*dots)
    grads = jax.grad(f, (0, 1))(X, W)
    want = sum(jnp.sum(a * b) for a, b in zip(grads, dots, strict=True))
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_export():
    """A program without kernels needs no exception from JAX's checks, on any platform."""
    f = jax.jit(jax.value_and_grad(loss_of(), (0, 1)))
    exported = jax.export.export(f, platforms=("cpu", "tpu"))(X, W)
    got = jax.export.deserialize(exported.serialize()).call(X, W)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(f(X, W)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_export_of_symbolic_sizes():
    """All tokens at once then."""
    tokens, classes = jax.export.symbolic_shape("tokens, classes")
    sizes = [((tokens, D), "float32"), ((D, classes), "float32"), ((tokens,), "int32")]

    @jax.jit
    def gradients(x, w, labels):
        loss = functools.partial(
            jaxnorm.linear_cross_entropy, labels=labels, weights=labels > 0, chunk=2
        )
        return jax.value_and_grad(loss, (0, 1))(x, w)

    exported = jax.export.export(gradients, disabled_checks=jaxnorm.export_checks())(
        *(jax.ShapeDtypeStruct(*size) for size in sizes)
    )
    labels = np.arange(TOKENS, dtype="int32") % CLASSES
    got, expected = (f(X, W, labels) for f in (exported.call, gradients))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)


@reductions
def test_plain_code(reduction):
    """`implementation` changes the program, not the results."""
    runs = [
        jax.jit(jax.value_and_grad(loss_of(reduction, implementation=i), (0, 1)))
        for i in (None, "xla")
    ]
    texts = [str(jax.make_jaxpr(run)(X, W)) for run in runs]
    assert "implementation=xla" in texts[1]
    names = [eqn.primitive.name for _, _, eqn in traced(runs[1], X, W)]
    assert "jaxnorm_row_program" not in names
    assert "jaxnorm_row_program" in [eqn.primitive.name for _, _, eqn in traced(runs[0], X, W)]
    for a, b in zip(*(jax.tree.leaves(run(X, W)) for run in runs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- errors ----

# Argument that the message names, exception, arguments of the call.
ERRORS = {
    "integer x": ("x", TypeError, {"x": np.ones((7, D), int)}),
    "list x": ("x", TypeError, {"x": [1.0]}),
    "scalar x": ("x", ValueError, {"x": np.float32(1)}),
    "integer w": ("w", TypeError, {"w": np.ones((D, V), int)}),
    "w of other features": ("w", ValueError, {"w": np.ones((D + 1, V), "float32")}),
    "transposed w": ("w", ValueError, {"w": np.ones((V, D), "float32")}),
    "w that is not transposed": ("w", ValueError, {"w_axis": 0}),
    "w of three axes": ("w", ValueError, {"w": np.ones((1, D, V), "float32")}),
    "w_axis": ("w_axis", ValueError, {"w_axis": 2}),
    "w_axis None": ("w_axis", ValueError, {"w_axis": None}),
    "float labels": ("labels", TypeError, {"labels": np.zeros(7, "float32")}),
    "labels of other shape": ("labels", ValueError, {"labels": np.zeros((7, 1), int)}),
    "integer bias": ("bias", TypeError, {"bias": np.ones(V, int)}),
    "bias of other size": ("bias", ValueError, {"bias": np.ones(D, "float32")}),
    "integer weights": ("weights", TypeError, {"weights": np.ones(7, int)}),
    "weights of other shape": ("weights", ValueError, {"weights": np.ones((7, 1), bool)}),
    "reduction": ("reduction", ValueError, {"reduction": "average"}),
    "reduction None": ("reduction", ValueError, {"reduction": None}),
    "smoothing": ("label_smoothing", ValueError, {"label_smoothing": 1.5}),
    "array smoothing": ("label_smoothing", TypeError, {"label_smoothing": np.ones(1)}),
    "array z_loss": ("z_loss", TypeError, {"z_loss": np.ones(1)}),
    "softcap 0": ("softcap", ValueError, {"softcap": 0}),
    "NaN for softcap": ("softcap", ValueError, {"softcap": nan}),
    "infinite softcap": ("softcap", ValueError, {"softcap": np.inf}),
    "array softcap": ("softcap", TypeError, {"softcap": np.ones(1)}),
    "integer where": ("where", TypeError, {"where": np.ones(V, int)}),
    "where of tokens without classes": ("where", ValueError, {"where": np.ones(7, bool)}),
    "where of too many axes": ("where", ValueError, {"where": np.ones((1, 7, V), bool)}),
    "chunk 0": ("chunk", ValueError, {"chunk": 0}),
    "half a token": ("chunk", ValueError, {"chunk": 1.5}),
    "infinite chunk": ("chunk", ValueError, {"chunk": np.inf}),
    "boolean chunk": ("chunk", TypeError, {"chunk": True}),
    "implementation": ("implementation", ValueError, {"implementation": "cuda"}),
    "no kernel": ("implementation", ValueError, {"implementation": "kernel"}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    argument, error, change = ERRORS[name]
    if name == "no kernel" and jax.default_backend() == "gpu":
        pytest.skip("there are kernels")
    message = MESSAGE.format(op="linear_cross_entropy", argument=argument)
    with pytest.raises(error, match=message):
        jax.block_until_ready(jaxnorm.linear_cross_entropy(**(given() | change)))
