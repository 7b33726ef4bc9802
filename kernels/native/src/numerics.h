// The functions of kernels/numerics.py with the same bits: float32 arithmetic in which no step is fused, because there
// a product that is added to something has its last bit cleared first. For kernels that must equal the plain-JAX ones.
#pragma once

#include "lanes.h"

namespace umbra::UMBRA_ISA::numerics {

constexpr float kMinNormal = 0x1p-126f;
constexpr float kLn2High = 45426 * 0x1p-16f, kLn2Low = 24543 * 0x1p-34f;

UMBRA_INLINE F product(F a, F b) { return from_bits(bits(a * b) & iset(-2)); }

template <int N>
UMBRA_INLINE F polynomial(F x, const float (&coefficients)[N]) {
  F value = set(coefficients[0]);
  for (int i = 1; i < N; ++i) value = product(value, x) + set(coefficients[i]);
  return value;
}

// The largest integer up to x, for |x| < 2^31.
UMBRA_INLINE F floor(F x) {
  const F whole = to_float(trunc(x));
  return whole - select(gt(whole, x), set(1.0f), zero());
}

// e^x for x <= 88 that is not NaN.
UMBRA_INLINE F exp(F x) {
  constexpr float kPoly[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                             4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  const M inside = gt(x, set(-87.3365f));
  const F safe = select(inside, x, zero());
  const F k = floor(product(safe, set(1.4426950408889634f)) + set(0.5f));
  const F r = (safe - k * set(kLn2High)) - k * set(kLn2Low);
  const F q = polynomial(r, kPoly);
  const F value = set(1.0f) + (r + product(product(r, r), q));
  return select(inside, from_bits(bits(value) + shl<23>(trunc(k))), zero());
}

struct Parts {
  F exponent, fraction;
};

// Normal x > 0 as 2^exponent (1 + fraction), 1 + fraction in [sqrt(1/2), sqrt(2)).
UMBRA_INLINE Parts split(F x) {
  const I root = iset(0x3F3504F3), b = bits(x) - root;
  return {to_float(sar<23>(b)), from_bits((b & iset(0x7FFFFF)) + root) - set(1.0f)};
}

UMBRA_INLINE F log_of_parts(F exponent, F f) {
  constexpr float kPoly[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                             -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                             2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  const F square = product(f, f);
  F tail = product(product(f, square), polynomial(f, kPoly));
  tail = tail + exponent * set(kLn2Low);
  tail = tail - square * set(0.5f);
  return (f + tail) + exponent * set(kLn2High);
}

// Natural logarithm of a positive, normal, finite number.
UMBRA_INLINE F log(F x) {
  const Parts parts = split(x);
  return log_of_parts(parts.exponent, parts.fraction);
}

// log(1 - x) for 0 <= x < 1.
UMBRA_INLINE F log1m(F x) {
  const M small = lt(x, set(0.25f));
  const Parts parts = split(select(small, set(1.0f), set(1.0f) - x));
  return log_of_parts(parts.exponent, select(small, neg(x), parts.fraction));
}

}  // namespace umbra::UMBRA_ISA::numerics
