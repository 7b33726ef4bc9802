"""Float32 arithmetic whose bits depend on the operands alone.

A compiler may vectorise a loop, fuse it with its neighbours, or contract `a * b + c` into one rounding; each choice
depends on the surrounding program. The functions here give the same bits in all of them:

* every product that is added to something goes through `product`, which clears the last bit of the result, so that
  an integer operation stands between the multiplication and the addition and contraction is impossible;
* or the product is exact (few significant bits on both sides), so that contraction changes nothing;
* sums over an axis are written as element-wise additions in one order, never as a reduction;
* results too small for a normal float32 are zero by definition, whatever the processor's denormal mode.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

MIN_NORMAL = np.float32(2.0**-126)
_PIECES = 16
_LOG2_E = np.float32(1.4426950408889634)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)

# ln 2 in two parts of at most 16 significant bits: an integer of 8 bits times either is exact.
_LN2_HIGH = np.float32(45426 * 2.0**-16)
_LN2_LOW = np.float32(np.round((0.6931471805599453 - 45426 * 2.0**-16) * 2.0**34) * 2.0**-34)

# exp: below the first bound the result is not a normal number, above the second it is infinite.
_EXP_LOW = np.float32(-87.3365)
_EXP_HIGH = np.float32(88.72283)
# exp(r) = 1 + r + r^2 q(r) on |r| <= ln(2)/2, and log(1 + f) = f - f^2/2 + f^3 p(f) on [sqrt(1/2) - 1, sqrt(2) - 1]:
# the polynomials of Cephes (S. Moshier, expf and logf).
_EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG_POLY = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def product(a: ArrayLike, b: ArrayLike) -> Array:
    """`a * b` with the last bit of the float32 result cleared, so that it may be added to without being contracted.

    Relative error at most 2^-23 (a plain product: 2^-24). Infinities and NaN pass through.
    """
    bits = lax.bitcast_convert_type(jnp.multiply(a, b), jnp.int32)
    return lax.bitcast_convert_type(bits & np.int32(-2), jnp.float32)


def ordered_sum(x: Array, axis: int = -1) -> Array:
    """Sum of `x` over one axis, which is removed; the order of additions depends on the length of the axis alone.

    The axis, padded with zeros to a power of two, is cut into 16 equal pieces that are added element by element in
    ascending order; this is repeated until one element is left. All steps are element-wise additions (radix 16 and
    not 2 because it is one pass over a long row). If `x` is a product, make it with `product`, not with `*`.
    """
    axis %= x.ndim
    size = x.shape[axis]
    if size == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    while size > 1:
        width = max(1, _power_of_two(size) // _PIECES)
        total = lax.slice_in_dim(x, 0, width, axis=axis)
        for start in range(width, size, width):
            total = total + _padded(lax.slice_in_dim(x, start, min(start + width, size), axis=axis), width, axis)
        x, size = total, width
    return lax.squeeze(x, (axis,))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _padded(x: Array, width: int, axis: int) -> Array:
    missing = width - x.shape[axis]
    if not missing:
        return x
    return lax.pad(x, np.zeros((), x.dtype), [(0, missing if i == axis else 0, 0) for i in range(x.ndim)])


def exp(x: Array) -> Array:
    """e^x in float32, any shape: 0 below -87.3365, infinity above 88.72283, NaN for NaN; error below 1.1 ulp.

    If `x` is a product, make it with `product`: it is subtracted from here.
    """
    x = jnp.asarray(x, jnp.float32)
    inside = (x > _EXP_LOW) & (x < _EXP_HIGH)
    safe = jnp.where(inside, x, np.float32(0))
    k = jnp.floor(product(safe, _LOG2_E) + np.float32(0.5))
    r = (safe - k * _LN2_HIGH) - k * _LN2_LOW
    q = _polynomial(r, _EXP_POLY)
    value = np.float32(1) + (r + product(product(r, r), q))
    # 2^k is added to the exponent: exact, and no multiplication could be contracted or meet a denormal.
    bits = lax.bitcast_convert_type(value, jnp.int32) + (k.astype(jnp.int32) << 23)
    result = lax.bitcast_convert_type(bits, jnp.float32)
    outside = jnp.where(x <= _EXP_LOW, np.float32(0), jnp.where(x >= _EXP_HIGH, np.float32(np.inf), x))
    return jnp.where(inside, result, outside)


def log(x: Array) -> Array:
    """Natural logarithm in float32, any shape: -inf for 0 and denormals, NaN below 0; error below 1.1 ulp."""
    x = jnp.asarray(x, jnp.float32)
    inside = (x >= MIN_NORMAL) & (x < np.float32(np.inf))
    safe = jnp.where(inside, x, np.float32(1))
    exponent, fraction = _split(safe)
    result = _log_of_parts(exponent, fraction)
    outside = jnp.where(x < 0, np.float32(np.nan), jnp.where(x < MIN_NORMAL, np.float32(-np.inf), x))
    return jnp.where(inside, result, outside)


def log1m(x: Array) -> Array:
    """log(1 - x) in float32 for 0 <= x < 1, accurate also where x is tiny; error below 2.5 ulp.

    Outside that range the result is unspecified (but computed without trapping).
    """
    x = jnp.asarray(x, jnp.float32)
    small = x < np.float32(0.25)
    exponent, fraction = _split(jnp.where(small, np.float32(1), np.float32(1) - x))
    return _log_of_parts(exponent, jnp.where(small, -x, fraction))


def _split(x: Array) -> tuple[Array, Array]:
    """Normal x > 0 as 2^exponent (1 + fraction), 1 + fraction in [sqrt(1/2), sqrt(2)); both float32, both exact."""
    bits = lax.bitcast_convert_type(x, jnp.int32) - _SQRT_HALF_BITS
    exponent = bits >> 23
    mantissa = (bits & np.int32(0x7FFFFF)) + _SQRT_HALF_BITS
    return exponent.astype(jnp.float32), lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)


def _log_of_parts(exponent: Array, f: Array) -> Array:
    square = product(f, f)
    tail = product(product(f, square), _polynomial(f, _LOG_POLY))
    tail = tail + exponent * _LN2_LOW
    tail = tail - square * np.float32(0.5)  # exact product
    return (f + tail) + exponent * _LN2_HIGH


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Horner's rule, highest power first."""
    value = jnp.full_like(x, np.float32(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = product(value, x) + np.float32(coefficient)
    return value


def key_bits(x: Array) -> Array:
    """int32 keys in the order of the float32 values: a < b exactly when key(a) < key(b); -0.0 comes before 0.0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def tanh(x: Array) -> Array:
    """Hyperbolic tangent in float32, from `exp`; absolute error below 2e-7."""
    return np.float32(1) - np.float32(2) / (exp(np.float32(2) * jnp.asarray(x, jnp.float32)) + np.float32(1))
