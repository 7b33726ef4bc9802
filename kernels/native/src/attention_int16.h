// Products of int16 numbers, for attention over int8 pools. Sums are int32 and exact, so they have the same bits on
// every instruction set, in whatever order they are taken.
#pragma once

#include "attention.h"
#include "lanes.h"

namespace umbra::UMBRA_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kKeys = 8;  // keys that are widened and multiplied together

#if defined(__AVX2__)

UMBRA_INLINE __m256i words_at(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
UMBRA_INLINE void store_words(int16_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
UMBRA_INLINE __m256i widened(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
UMBRA_INLINE void store_int16(int16_t* p, I x) {
#if defined(__AVX512F__)
  store_words(p, _mm512_cvtepi32_epi16(x.a));
#else
  store_words(p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8));
#endif
}

// sum + a_0 b_0 + a_1 b_1 in each of eight lanes.
UMBRA_INLINE __m256i multiply_add(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sum, a, b);
#else
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  asm("" : "+x"(sum));  // or the compiler regroups long sums, for which it runs out of registers
  return sum;
#endif
}

// Sums of eight keys, each spread over eight lanes, are folded: first those of two keys into one register,
UMBRA_INLINE __m256i half_added(__m256i a, __m256i b) {
  return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
// then four such pairs, which become logits.
UMBRA_INLINE void store_logits(const __m256i (&pairs)[4], const float* k_scales, float factor, float* logits) {
  __m256i fours[2];
  for (int i = 0; i < 2; ++i) {
    fours[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  }
  const __m256i sums = _mm256_add_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                                        _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
  const __m256 products = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_loadu_ps(k_scales));
  _mm256_storeu_ps(logits, _mm256_mul_ps(products, _mm256_set1_ps(factor)));
}

// Logits of a query with eight keys that lie `padded` apart: (q . key) * k_scale * factor.
UMBRA_INLINE void dot_keys(const int16_t* q, const int16_t* keys, int padded, const float* k_scales, float factor,
                           float* logits) {
  __m256i s[kKeys], pairs[4];
  for (auto& x : s) x = _mm256_setzero_si256();
  for (int c = 0; c < padded; c += kLanes) {
    const __m256i x = words_at(q + c);
    for (int t = 0; t < kKeys; ++t) s[t] = multiply_add(s[t], x, words_at(keys + t * padded + c));
  }
  for (int i = 0; i < 4; ++i) pairs[i] = half_added(s[2 * i], s[2 * i + 1]);
  store_logits(pairs, k_scales, factor, logits);
}

// The same for few queries, which lie `padded` apart, and keys as they are stored, 2 `padded` apart; `logits` kBlock
// apart. Here the keys need not be widened into memory first.
template <int kRows>
UMBRA_INLINE void dot_few(const int16_t* q, const int8_t* keys, int padded, const float* k_scales, const float* factors,
                          float* logits) {
  __m256i pairs[kRows][4];
  for (int i = 0; i < 4; ++i) {
    __m256i a[kRows], b[kRows];
    for (int r = 0; r < kRows; ++r) a[r] = b[r] = _mm256_setzero_si256();
    for (int c = 0; c < padded; c += kLanes) {
      const __m256i first = widened(keys + 4 * i * padded + c), second = widened(keys + (4 * i + 2) * padded + c);
      for (int r = 0; r < kRows; ++r) {
        const __m256i x = words_at(q + r * padded + c);
        a[r] = multiply_add(a[r], x, first);
        b[r] = multiply_add(b[r], x, second);
      }
    }
    for (int r = 0; r < kRows; ++r) pairs[r][i] = half_added(a[r], b[r]);
  }
  for (int r = 0; r < kRows; ++r) store_logits(pairs[r], k_scales, factors[r], logits + r * kBlock);
}

// Eight keys, `stride` bytes apart, entries [0, 16): pairs of entries as int32, key by key, the pairs kLanes apart.
UMBRA_INLINE void turn_keys(const int8_t* keys, int stride, int32_t* turned) {
  __m256i x[8], y[8];
  for (int t = 0; t < 8; ++t) x[t] = widened(keys + t * stride);
  for (int t = 0; t < 8; t += 2) {
    y[t] = _mm256_unpacklo_epi32(x[t], x[t + 1]);
    y[t + 1] = _mm256_unpackhi_epi32(x[t], x[t + 1]);
  }
  for (int t = 0; t < 8; t += 4) {
    for (int i = 0; i < 2; ++i) {
      x[t + 2 * i] = _mm256_unpacklo_epi64(y[t + i], y[t + 2 + i]);
      x[t + 2 * i + 1] = _mm256_unpackhi_epi64(y[t + i], y[t + 2 + i]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    auto* const to = reinterpret_cast<__m256i*>(turned + i * kLanes);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(x[i], x[4 + i], 0x20));
    _mm256_storeu_si256(to + 4 * kLanes / 8, _mm256_permute2x128_si256(x[i], x[4 + i], 0x31));  // four pairs on
  }
}

// Logits of queries with 16 turned keys: for many rows, none of which then has to be folded.
template <int kRows>
UMBRA_INLINE void dot_turned(const int16_t* const (&q)[kRows], const int32_t* turned, int padded, const float* k_scales,
                             const float (&factors)[kRows], float* logits) {
  __m256i s[kRows][2];
  for (auto& row : s) row[0] = row[1] = _mm256_setzero_si256();
  for (int c = 0; c < padded; c += 2) {
    const auto* const at = reinterpret_cast<const __m256i*>(turned + c / 2 * kLanes);
    const __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      std::memcpy(&both, q[r] + c, 4);
      const __m256i x = _mm256_set1_epi32(both);
      s[r][0] = multiply_add(s[r][0], x, low);
      s[r][1] = multiply_add(s[r][1], x, high);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < 2; ++i) {
      const __m256 products = _mm256_mul_ps(_mm256_cvtepi32_ps(s[r][i]), _mm256_loadu_ps(k_scales + 8 * i));
      _mm256_storeu_ps(logits + r * kBlock + 8 * i, _mm256_mul_ps(products, _mm256_set1_ps(factors[r])));
    }
  }
}

// 16 entries of two tokens' values, side by side as `weigh_tile` wants them: 32 numbers.
UMBRA_INLINE void pair_values(__m256i a, __m256i b, int16_t* out) {
  store_words(out, _mm256_unpacklo_epi16(a, b));
  store_words(out + 16, _mm256_unpackhi_epi16(a, b));
}

// weighted[0 .. 16) += step * the sums of values that `pair_values` has put into two registers.
UMBRA_INLINE void add_tile(__m256i first, __m256i second, float step, float* weighted) {
  const __m256 factor = _mm256_set1_ps(step);
  const __m256 low = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(first, second, 0x20));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(first, second, 0x31));
  _mm256_storeu_ps(weighted, _mm256_fmadd_ps(low, factor, _mm256_loadu_ps(weighted)));
  _mm256_storeu_ps(weighted + 8, _mm256_fmadd_ps(high, factor, _mm256_loadu_ps(weighted + 8)));
}

// weighted[r][0 .. 16 kTiles) += steps[r] * sum of weight * value over pairs of tokens, whose values lie `stride`
// apart, for kRows rows: their weights lie kBlock apart, their steps kBlock / kSpan, their results `padded`.
template <int kRows, int kTiles>
UMBRA_INLINE void weigh_tile(const int16_t* weights, const int16_t* values, int pairs, int stride, const float* steps,
                             int padded, float* weighted) {
  __m256i s[kRows][2 * kTiles];
  for (auto& row : s) {
    for (auto& x : row) x = _mm256_setzero_si256();
  }
  for (int p = 0; p < pairs; ++p) {
    __m256i w[kRows];
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      std::memcpy(&both, weights + r * kBlock + 2 * p, 4);
      w[r] = _mm256_set1_epi32(both);
    }
    for (int i = 0; i < 2 * kTiles; ++i) {
      const __m256i v = words_at(values + p * stride + 16 * i);
      for (int r = 0; r < kRows; ++r) s[r][i] = multiply_add(s[r][i], w[r], v);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kTiles; ++i) {
      add_tile(s[r][2 * i], s[r][2 * i + 1], steps[r * (kBlock / kSpan)], weighted + r * padded + 16 * i);
    }
  }
}

// The same for 16 entries of few rows and values as they are stored, 2 `padded` bytes apart. Weights of the rows lie
// kBlock apart, steps kBlock / kSpan, results `padded`.
template <int kRows>
UMBRA_INLINE void weigh_few(const int16_t* weights, const int8_t* values, int pairs, int padded, const float* steps,
                            float* weighted) {
  __m256i low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm256_setzero_si256();
  for (int p = 0; p < pairs; ++p) {
    const __m256i a = widened(values + 4 * p * padded), b = widened(values + (4 * p + 2) * padded);
    const __m256i first = _mm256_unpacklo_epi16(a, b), second = _mm256_unpackhi_epi16(a, b);
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      std::memcpy(&both, weights + r * kBlock + 2 * p, 4);
      const __m256i w = _mm256_set1_epi32(both);
      low[r] = multiply_add(low[r], w, first);
      high[r] = multiply_add(high[r], w, second);
    }
  }
  for (int r = 0; r < kRows; ++r) add_tile(low[r], high[r], steps[r * (kBlock / kSpan)], weighted + r * padded);
}

#else

struct Words {
  int16_t v[kLanes];
};
UMBRA_INLINE void store_words(int16_t* p, Words x) { std::memcpy(p, x.v, sizeof(x.v)); }
UMBRA_INLINE Words widened(const int8_t* p) {
  Words x;
  for (int i = 0; i < kLanes; ++i) x.v[i] = p[i];
  return x;
}
UMBRA_INLINE void store_int16(int16_t* p, I x) {
  int32_t lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(lanes[i]);
}

UMBRA_INLINE void dot_keys(const int16_t* q, const int16_t* keys, int padded, const float* k_scales, float factor,
                           float* logits) {
  for (int t = 0; t < kKeys; ++t) {
    int32_t sum = 0;
    for (int c = 0; c < padded; ++c) sum += static_cast<int32_t>(q[c]) * keys[t * padded + c];
    logits[t] = static_cast<float>(sum) * k_scales[t] * factor;
  }
}

UMBRA_INLINE void pair_values(Words a, Words b, int16_t* out) {
  for (int i = 0; i < kLanes; ++i) out[2 * i] = a.v[i], out[2 * i + 1] = b.v[i];
}

template <int kRows, int kTiles>
UMBRA_INLINE void weigh_tile(const int16_t* weights, const int16_t* values, int pairs, int stride, const float* steps,
                             int padded, float* weighted) {
  for (int r = 0; r < kRows; ++r) {
    int32_t s[kLanes * kTiles] = {};
    for (int p = 0; p < pairs; ++p) {
      const int32_t first = weights[r * kBlock + 2 * p], second = weights[r * kBlock + 2 * p + 1];
      const int16_t* const v = values + p * stride;
      for (int i = 0; i < kLanes * kTiles; ++i) s[i] += first * v[2 * i] + second * v[2 * i + 1];
    }
    float* const to = weighted + r * padded;
    for (int i = 0; i < kLanes * kTiles; ++i) {
      to[i] = __builtin_fmaf(static_cast<float>(s[i]), steps[r * (kBlock / kSpan)], to[i]);
    }
  }
}

#endif

}  // namespace
}  // namespace umbra::UMBRA_ISA
