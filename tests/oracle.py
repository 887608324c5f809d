"""What every operation must return, in float64 NumPy, and how close a result must come.

Never imports jaxnorm or jax.
"""

import ml_dtypes
import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")

# Rounding unit of each type: half of the distance from 1 to the next number.
UNIT = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
}
# Numbers below this lose digits: errors are not judged relative to anything smaller.
TINY = {name: float(ml_dtypes.finfo(name).smallest_normal) for name in DTYPES}
LARGEST = {name: float(ml_dtypes.finfo(name).max) for name in DTYPES}


def acc_of(dtype) -> str:
    """What values of a dtype are added up in."""
    return "float64" if dtype == "float64" else "float32"


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _axes(axis, ndim):
    if axis is None:
        return tuple(range(ndim))
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))


# ---- softmax ----


def logits(x, where=None, scale=None, bias=None):
    """The sum scale * x + bias, and -inf where masked, whatever x and bias hold there."""
    z = f64(x)
    with np.errstate(all="ignore"):
        if scale is not None:
            z = z * f64(scale)
        if bias is not None:
            z = z + f64(bias)
    return z if where is None else np.where(where, z, -np.inf)


def softmax(x, axis=-1, where=None, scale=None, bias=None):
    z = logits(x, where, scale, bias)
    axes = _axes(axis, z.ndim)
    with np.errstate(all="ignore"):
        e = np.exp(z - np.max(z, axes, keepdims=True, initial=-np.inf))
        y = e / np.sum(e, axes, keepdims=True)
    return y if where is None else np.where(where, y, 0.0)


def log_softmax(x, axis=-1, where=None, scale=None, bias=None):
    z = logits(x, where, scale, bias)
    axes = _axes(axis, z.ndim)
    with np.errstate(all="ignore"):
        shifted = z - np.max(z, axes, keepdims=True, initial=-np.inf)
        y = shifted - np.log(np.sum(np.exp(shifted), axes, keepdims=True))
    return y if where is None else np.where(where, y, -np.inf)


def _tangent_of_logits(x, scale, x_dot, scale_dot, bias_dot):
    z_dot = 0.0
    with np.errstate(all="ignore"):
        if x_dot is not None:
            z_dot = z_dot + f64(x_dot) * (1.0 if scale is None else f64(scale))
        if scale_dot is not None:
            z_dot = z_dot + f64(scale_dot) * f64(x)
        if bias_dot is not None:
            z_dot = z_dot + f64(bias_dot)
    return z_dot


def softmax_jvp(
    x,
    x_dot=None,
    axis=-1,
    where=None,
    scale=None,
    bias=None,
    scale_dot=None,
    bias_dot=None,
    log=False,
):
    """Directional derivative. Masked elements are 0, whatever the tangents hold there."""
    p = softmax(x, axis, where, scale, bias)
    z_dot = np.broadcast_to(_tangent_of_logits(x, scale, x_dot, scale_dot, bias_dot), p.shape)
    if where is not None:
        z_dot = np.where(where, z_dot, 0.0)
    axes = _axes(axis, p.ndim)
    with np.errstate(all="ignore"):
        mean = np.sum(p * z_dot, axes, keepdims=True)
        out = z_dot - mean if log else p * (z_dot - mean)
    return out if where is None else np.where(where, out, 0.0)


def _sum_to(a, shape):
    """Transpose of broadcasting to a's shape."""
    a = np.sum(a, tuple(range(a.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and a.shape[i] != 1)
    return np.sum(a, axes, keepdims=True)


def softmax_vjp(x, ct, axis=-1, where=None, scale=None, bias=None, log=False):
    """Cotangents of (x, scale, bias); None for those that are not given."""
    p = softmax(x, axis, where, scale, bias)
    ct = f64(ct)
    if where is not None:
        ct = np.where(where, ct, 0.0)
    axes = _axes(axis, p.ndim)
    with np.errstate(all="ignore"):
        if log:
            z_bar = ct - p * np.sum(ct, axes, keepdims=True)
        else:
            z_bar = p * (ct - np.sum(p * ct, axes, keepdims=True))
        if where is not None:
            z_bar = np.where(where, z_bar, 0.0)
        x_bar = z_bar if scale is None else z_bar * f64(scale)
        scale_bar = None if scale is None else _sum_to(z_bar * f64(x), np.shape(scale))
        bias_bar = None if bias is None else _sum_to(z_bar, np.shape(bias))
    return x_bar, scale_bar, bias_bar


# ---- softmax_cross_entropy ----


def cross_entropy_parts(x, labels, axis, where, smoothing):
    """(logits with the classes last, whether they count, p, the target q, lse, which labels are classes)."""
    z = np.moveaxis(f64(x), axis, -1)
    keep = np.broadcast_to(True if where is None else where, np.shape(x))
    keep = np.moveaxis(keep, axis, -1)
    labels, n = np.asarray(labels), z.shape[-1]
    valid = (labels >= 0) & (labels < n)
    q = np.arange(n) == np.where(valid, labels, -1)[..., None]
    with np.errstate(all="ignore"):
        z = np.where(keep, z, -np.inf)
        m = np.max(z, -1, keepdims=True, initial=-np.inf)
        m = np.where(np.isneginf(m), 0.0, m)
        lse = m + np.log(np.sum(np.exp(z - m), -1, keepdims=True))
        p = np.where(keep, np.exp(z - lse), 0.0)
        uniform = smoothing / np.sum(keep, -1, keepdims=True) if smoothing else 0.0
        q = (1 - smoothing) * q + np.where(keep, uniform, 0.0)
    return z, keep, p, q, lse, valid


def softmax_cross_entropy(x, labels, axis=-1, where=None, smoothing=0.0, z_loss=0.0):
    z, keep, _, q, lse, valid = cross_entropy_parts(x, labels, axis, where, smoothing)
    valid = valid & np.any(keep, -1)
    with np.errstate(all="ignore"):
        loss = np.sum(np.where(q != 0, q * (lse - z), 0.0), -1)
        loss = loss + np.where(np.isnan(lse[..., 0]), np.nan, 0.0)
        return np.where(valid, loss + z_loss * lse[..., 0] ** 2, np.nan)


def softmax_cross_entropy_vjp(
    x, labels, ct, axis=-1, where=None, smoothing=0.0, z_loss=0.0, size=False
):
    """Cotangent of the logits; with `size`, the size of the terms that it is the sum of."""
    _, keep, p, q, lse, valid = cross_entropy_parts(x, labels, axis, where, smoothing)
    with np.errstate(all="ignore"):
        a, b = f64(ct)[..., None] * p * (1 + 2 * z_loss * lse), f64(ct)[..., None] * q
        out = np.abs(a) + np.abs(b) if size else a - b
        out = np.where(keep & valid[..., None], out, 0.0)
    return np.moveaxis(out, -1, axis)


# ---- linear_cross_entropy ----


def linear_cross_entropy(
    x, w, labels, bias=None, weights=None, reduction="mean", where=None, softcap=None, cts=None,
    w_axis=-1, **options,
):  # fmt: skip
    """(results by name, gradients by operand, the size of the terms that each gradient is the sum of).

    `cts` are cotangents of results by name; those of others are 0. Other operands are as in jaxnorm.
    """
    x, w = f64(x), f64(w) if w_axis == -1 else f64(w).T
    flat = x.reshape(-1, x.shape[-1])
    u = x @ w if bias is None else x @ w + f64(bias)
    z = u if softcap is None else softcap * np.tanh(u / softcap)
    keep = np.broadcast_to(True if where is None else where, z.shape)
    omega = np.ones(labels.shape) if weights is None else f64(weights)
    c = omega / np.sum(omega) if reduction == "mean" else omega
    token = softmax_cross_entropy(z, labels, where=keep, **options)
    seen = np.where(c == 0, 0.0, token)
    with np.errstate(all="ignore"):
        total = np.sum(c * seen)
    results = {"loss": c * seen if reduction == "none" else total}
    _, _, p, hit, lse, valid = cross_entropy_parts(z, labels, -1, keep, 0.0)
    with np.errstate(all="ignore"):
        log_p = np.where(keep, z - lse, -np.inf)
        results["log_prob"] = np.sum(np.where(hit != 0, log_p, 0.0), -1)
        results["entropy"] = -np.sum(np.where(p == 0, 0.0, p * log_p), -1)
    results["log_prob"] = np.where(valid, results["log_prob"], np.nan)

    cts = {name: np.zeros(a.shape) for name, a in results.items()} | (cts or {})
    ct, g, h = (f64(cts[name]) for name in ("loss", "log_prob", "entropy"))
    grads = {"weights": ct * seen}
    if reduction == "mean":
        grads["weights"] = ct * (seen - total) / np.sum(omega)
    spread = {"weights": np.abs(ct) * (np.abs(seen) + np.abs(total))}
    dz = softmax_cross_entropy_vjp(z, labels, c * ct, where=keep, **options)
    size = softmax_cross_entropy_vjp(z, labels, c * ct, where=keep, **options, size=True)
    g = np.where(valid, g, 0.0)[..., None]
    entropy = results["entropy"][..., None]
    with np.errstate(all="ignore"):
        of_entropy = np.where(p == 0, 0.0, h[..., None] * p * (log_p + entropy))
    dz = dz + np.where(keep, g * (hit - p), 0.0) - of_entropy
    size = size + np.abs(g) * (hit + p) + np.abs(of_entropy)
    if softcap is not None:
        slope = 1 - np.tanh(u / softcap) ** 2
        dz, size = dz * slope, size * slope
    for found, absolute, d in ((grads, lambda a: a, dz), (spread, np.abs, size)):
        d = d.reshape(-1, d.shape[-1])
        found["x"] = (d @ absolute(w).T).reshape(*labels.shape, -1)
        w_bar = absolute(flat).T @ d
        found["w"] = w_bar if w_axis == -1 else w_bar.T
        found["bias"] = np.sum(d, 0)
    return results, grads, spread


# ---- relu ----


def relu(x, y=None):
    """max(x + y, 0) of the sum rounded to the type of x, as the operation rounds it."""
    s = rounded_sum(x, y)
    return np.where(np.isnan(s), np.nan, np.where(s > 0, s, 0.0))


def rounded_sum(x, y=None):
    if y is None:
        return f64(x)
    with np.errstate(all="ignore"):
        return f64((f64(x) + f64(y)).astype(np.asarray(x).dtype))


def relu_mask(x, y=None):
    return np.packbits(rounded_sum(x, y) > 0, axis=-1, bitorder="little")


def relu_jvp(x, x_dot, y=None, y_dot=None):
    """The tangent where x + y > 0, else 0; selected, so that an infinite one elsewhere gives 0."""
    t = f64(x_dot) if y_dot is None else f64(x_dot) + f64(y_dot)
    return np.where(rounded_sum(x, y) > 0, t, 0.0)


def relu_vjp(x, ct, y=None):
    return np.where(rounded_sum(x, y) > 0, f64(ct), 0.0)


# ---- layer_norm and rms_norm ----


def norm_parts(x, axis=-1, epsilon=1e-6, residual=None, mask=None, center=True):
    """(xhat, rstd, keep / n, axes) of the sum, rounded to the type of x; n counts what the mask keeps."""
    s = rounded_sum(x, residual)
    axes = _axes(axis, s.ndim)
    keep = np.broadcast_to(True if mask is None else mask, s.shape)
    n = np.sum(keep, axes, keepdims=True, dtype=np.float64)
    with np.errstate(all="ignore"):
        mean = np.sum(np.where(keep, s, 0.0), axes, keepdims=True) / n if center else 0.0
        deviation = s - mean
        variance = np.sum(np.where(keep, deviation, 0.0) ** 2, axes, keepdims=True) / n
        rstd = 1 / np.sqrt(variance + epsilon)
        return deviation * rstd, rstd, keep / n, axes


def _expand(parameter, axes, ndim):
    """A parameter of the shape of the normalised axes, with size 1 in all others."""
    return np.expand_dims(f64(parameter), tuple(i for i in range(ndim) if i not in axes))


def _factor(scale, offset, axes, ndim):
    return 1.0 if scale is None else _expand(scale, axes, ndim) + offset


def layer_norm(x, scale=None, bias=None, scale_offset=0.0, **options):
    xhat, _, _, axes = norm_parts(x, **options)
    with np.errstate(all="ignore"):
        y = xhat * _factor(scale, scale_offset, axes, xhat.ndim)
        return y if bias is None else y + _expand(bias, axes, xhat.ndim)


def rms_norm(x, scale=None, **options):
    return layer_norm(x, scale, center=False, **options)


def norm_jvp(x, x_dot=None, scale=None, scale_dot=None, bias_dot=None, scale_offset=0.0, **options):
    """Tangent of y, for tangents of the sum, scale and bias; None is zero."""
    xhat, rstd, part, axes = norm_parts(x, **options)
    y_dot = np.zeros(xhat.shape)
    if x_dot is not None:
        t = f64(x_dot)
        product = np.sum(part * t * xhat, axes, keepdims=True)
        if options.get("center", True):
            t = t - np.sum(part * t, axes, keepdims=True)
        y_dot += rstd * (t - xhat * product) * _factor(scale, scale_offset, axes, xhat.ndim)
    if scale_dot is not None:
        y_dot += xhat * _expand(scale_dot, axes, xhat.ndim)
    if bias_dot is not None:
        y_dot += _expand(bias_dot, axes, xhat.ndim)
    return y_dot


def norm_vjp(x, dy, scale=None, dsum=None, scale_offset=0.0, sizes=False, **options):
    """Cotangents of (the sum, scale, bias); with `sizes`, of the terms that they are the sums of."""
    xhat, rstd, part, axes = norm_parts(x, **options)
    rows = tuple(i for i in range(xhat.ndim) if i not in axes)
    size = np.abs if sizes else lambda a: a
    sign = 1 if sizes else -1
    with np.errstate(all="ignore"):
        dy, ds = size(f64(dy)), 0.0 if dsum is None else size(f64(dsum))
        w = dy * size(_factor(scale, scale_offset, axes, xhat.ndim))
        drift = size(xhat) * np.sum(w * size(xhat), axes, keepdims=True)
        if options.get("center", True):
            drift = drift + np.sum(w, axes, keepdims=True)
        dx = ds + rstd * (w + sign * part * drift)
        return dx, np.sum(dy * size(xhat), rows), np.sum(dy, rows)


# ---- batch_norm ----


def batch_norm_parts(x, axis=-1, epsilon=1e-5, mask=None, mean=None, var=None):
    """(xhat, rstd, keep / n, reduced axes, mean, var); n counts what the mask keeps of a feature.

    With mean and var, which have the features' shape, nothing is reduced for them.
    """
    x = f64(x).astype(
        np.longdouble
    )  # a large mean leaves few digits of a float64's deviation from it
    features = _axes(axis, x.ndim)
    reduced = tuple(i for i in range(x.ndim) if i not in features)
    keep = np.broadcast_to(True if mask is None else mask, x.shape)
    n = np.sum(keep, reduced, keepdims=True, dtype=np.float64)
    with np.errstate(all="ignore"):
        if mean is None:
            mean = np.sum(np.where(keep, x, 0.0), reduced, keepdims=True) / n
            mean += np.sum(np.where(keep, x - mean, 0.0), reduced, keepdims=True) / n
            var = np.sum(np.where(keep, x - mean, 0.0) ** 2, reduced, keepdims=True) / n
        else:
            mean, var = (np.expand_dims(f64(a), reduced) for a in (mean, var))
        rstd = 1 / np.sqrt(var + epsilon)
        return f64((x - mean) * rstd), f64(rstd), keep / n, reduced, f64(mean), f64(var)


def batch_norm(x, scale=None, bias=None, residual=None, relu=False, **options):
    """(y, mean, var), the latter two with the features' shape."""
    xhat, _, _, reduced, mean, var = batch_norm_parts(x, **options)
    with np.errstate(all="ignore"):
        y = xhat if scale is None else xhat * np.expand_dims(f64(scale), reduced)
        y = y if bias is None else y + np.expand_dims(f64(bias), reduced)
        y = y if residual is None else y + f64(residual)
    if relu:
        y = np.where(np.isnan(y), np.nan, np.where(y > 0, y, 0.0))
    return y, np.squeeze(mean, reduced), np.squeeze(var, reduced)


def batch_norm_vjp(x, dy, scale=None, dmean=None, dvar=None, positive=None, sizes=False, **options):
    """Cotangents of (x, scale, bias, residual); with `sizes`, of the terms that they are the sums of.

    Args:
      x: as for `batch_norm`.
      dy: cotangent of y.
      scale: as for `batch_norm`.
      dmean: cotangent of the mean, with the features' shape; None is zero.
      dvar: that of the variance.
      positive: where y > 0, if there is a ReLU.
      sizes: see above.
      **options: of `batch_norm_parts`; with a mean in them, x has no part in the statistics.
    """
    xhat, rstd, part, reduced, _, _ = batch_norm_parts(x, **options)
    size, sign = (np.abs, 1) if sizes else (lambda a: a, -1)
    g = f64(dy) if positive is None else np.where(positive, f64(dy), 0.0)
    g = size(g)
    with np.errstate(all="ignore"):
        dbias = np.sum(g, reduced, keepdims=True)
        dscale = np.sum(g * size(xhat), reduced, keepdims=True)
        factor = rstd if scale is None else rstd * size(np.expand_dims(f64(scale), reduced))
        dx = factor * g
        if "mean" not in options:
            drift = factor * (dbias + size(xhat) * dscale)
            dx = dx + sign * np.where(part != 0, part * drift, 0.0)
            for ct, slope in ((dmean, 1.0), (dvar, 2 * size(xhat) / rstd)):
                if ct is not None:
                    term = size(np.expand_dims(f64(ct), reduced)) * slope
                    dx = dx + np.where(part != 0, part * term, 0.0)
    return dx, np.squeeze(dscale, reduced), np.squeeze(dbias, reduced), g


# ---- sizes: what an error of a derivative is relative to ----


def softmax_vjp_size(x, ct, axis=-1, where=None, scale=None, bias=None, log=False):
    """Size of the terms that a cotangent of x is the sum of.

    They cancel (a row's gradient sums to 0): no arithmetic keeps more digits than the largest has.
    """
    p = softmax(x, axis, where, scale, bias)
    t = np.abs(f64(ct))
    if where is not None:
        t = np.where(where, t, 0.0)
    axes = _axes(axis, p.ndim)
    with np.errstate(all="ignore"):
        if log:
            size = t + p * np.sum(t, axes, keepdims=True)
        else:
            size = p * (t + np.sum(p * t, axes, keepdims=True))
        size = size if scale is None else size * np.abs(f64(scale))
    return np.where(np.isfinite(size), size, 0.0)


# ---- closeness ----


def relative_error(actual, expected, dtype: str, size=None) -> float:
    """Largest error of an element, relative to `size`.

    By default that is the element's own size, or the mean of all of them where it is smaller. A result below the
    smallest normal number may have become 0, as compilers and GPUs do.
    """
    expected = np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    if not finite.any():
        return 0.0
    with np.errstate(all="ignore"):
        if size is None:
            size = np.where(finite, np.abs(expected), 0.0)
            size = np.maximum(size, np.mean(size))
        error = np.abs(np.where(finite, f64(actual), 0.0) - np.where(finite, expected, 0.0))
        flushed = (f64(actual) == 0) & (np.abs(expected) < TINY[dtype])
        error = np.where(flushed, 0.0, error / np.maximum(size, TINY[dtype]))
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def assert_same_pattern(actual, expected) -> None:
    """NaN and the infinities lie at the same places."""
    actual, expected = f64(actual), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(actual) != test(expected))
        assert not len(wrong), f"{name} differs at {len(wrong)} places, first at {wrong[0]}"


def assert_close(actual, expected, dtype: str, xla=None, floor: float = 4.0, size=None) -> None:
    """`actual` equals the oracle `expected`, up to twice XLA's error in the same dtype and a floor.

    Args:
      actual: result of the operation; its dtype must be `dtype`.
      expected: the same from this module, in float64.
      dtype: one of DTYPES.
      xla: the same computed by XLA in `dtype`.
      floor: error that is always allowed, in rounding units of `dtype` (rounding once costs 1); 8 at least in float64.
      size: see `relative_error`.
    """
    actual = np.asarray(actual)
    assert actual.dtype.name == dtype, f"dtype {actual.dtype.name}, expected {dtype}"
    with np.errstate(all="ignore"):
        expected = np.asarray(expected, np.float64)
        expected = np.where(np.abs(expected) > LARGEST[dtype], np.sign(expected) * np.inf, expected)
    assert_same_pattern(actual, expected)
    error = relative_error(actual, expected, dtype, size)
    if dtype == "float64":
        # The oracle's own sums err as much, differently on each kind of CPU.
        floor = max(floor, 8.0)
    allowed = floor * UNIT[dtype]
    if xla is not None:
        xla_error = relative_error(xla, expected, dtype, size)
        allowed += 2 * xla_error if np.isfinite(xla_error) else 0.0
    assert error <= allowed, (
        f"error {error / UNIT[dtype]:.1f} units of {dtype}, allowed {allowed / UNIT[dtype]:.1f}"
    )
