// Sixteen float32 or int32 values at a time, for kernels whose source is compiled once per instruction set.
//
//     // add_kernel.h, included by add_portable.cc, add_avx2.cc and add_avx512.cc
//     #include "lanes.h"
//     namespace umbra::UMBRA_ISA {
//     void add(const float* a, const float* b, float* sum, int64_t n) {  // n a multiple of 16
//       for (int64_t i = 0; i < n; i += 16) store(sum + i, load(a + i) + load(b + i));
//     }
//     }
//
// Every operation gives the same bits on each of them (in the mode that `FloatMode` sets), and nothing is contracted
// but `fma`. Sums over the lanes go in one fixed order. Loads and stores need no alignment.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef UMBRA_ISA
#error "lanes.h is for files of one instruction set: x_portable.cc, x_avx2.cc or x_avx512.cc"
#endif

// The functions must not be shared between files of different instruction sets, even when they are not inlined.
#define UMBRA_INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__)
#include "lanes_avx512.h"
#elif defined(__AVX2__)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif

namespace umbra::UMBRA_ISA {

UMBRA_INLINE F zero() { return set(0.0f); }
UMBRA_INLINE F abs(F x) { return from_bits(bits(x) & iset(0x7FFFFFFF)); }
UMBRA_INLINE F neg(F x) { return from_bits(bits(x) ^ iset(INT32_MIN)); }

// e^x within 1.4 ulp (Cephes' polynomial, with fused steps): 0 up to -87.3365, above 88 as at 88 (1.7e38), NaN for NaN.
UMBRA_INLINE F exp(F x) {
  constexpr float kLow = -87.3365f, kHigh = 88.0f, kShift = 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const F inside = min(set(kHigh), max(set(kLow), x));
  const F shifted = fma(inside, set(1.44269504f), set(kShift));
  const F k = shifted - set(kShift);
  F r = fma(k, set(-0.693359375f), inside);
  r = fma(k, set(2.12194440e-4f), r);
  F p = fma(set(1.9875691500e-4f), r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  const F value = fma(p, r * r, r) + set(1.0f);
  // The low bits of `shifted` are k: added to the exponent. What is not below the bound (NaN too) keeps its value.
  const F scaled = from_bits(bits(value) + shl<23>(bits(shifted)));
  return select(le(x, set(kLow)), zero(), scaled);
}

// a + b in the lanes of a, a - b in those of b, for all pairs of lanes a, b that lie `step` (1, 2, 4 or 8) apart.
template <int step>
UMBRA_INLINE F paired(F x) {
  constexpr int kToSign = step == 1 ? 31 : step == 2 ? 30 : step == 4 ? 29 : 28;
  return exchanged<step>(x) + from_bits(bits(x) ^ shl<kToSign>(iota() & iset(step)));
}

// Hyperbolic tangent within 2e-7.
UMBRA_INLINE F tanh(F x) { return set(1.0f) - set(2.0f) / (exp(x + x) + set(1.0f)); }

}  // namespace umbra::UMBRA_ISA
