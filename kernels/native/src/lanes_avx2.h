// `lanes.h` for AVX2 with FMA and F16C: two registers of eight.
#pragma once

namespace umbra::UMBRA_ISA {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct M {  // all bits of a lane set, or none
  __m256 a, b;
};

UMBRA_INLINE F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
UMBRA_INLINE I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
UMBRA_INLINE I iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
UMBRA_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
UMBRA_INLINE I load(const int32_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
UMBRA_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
UMBRA_INLINE void store(int32_t* p, I x) {
  auto* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
UMBRA_INLINE M first(int n) {  // the first n lanes
  const __m256i count = _mm256_set1_epi32(n);
  const I at = iota();
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, at.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, at.b))};
}
UMBRA_INLINE F load(const float* p, int n) {  // the first n; zeros behind
  const M m = first(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b))};
}
UMBRA_INLINE void store(float* p, F x, int n) {
  const M m = first(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), x.a);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), x.b);
}

UMBRA_INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
UMBRA_INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
UMBRA_INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
UMBRA_INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
UMBRA_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
UMBRA_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }  // x < y ? x : y
UMBRA_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // x > y ? x : y
UMBRA_INLINE F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }

UMBRA_INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
UMBRA_INLINE I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
UMBRA_INLINE I operator*(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
UMBRA_INLINE I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
UMBRA_INLINE I operator|(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
UMBRA_INLINE I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
UMBRA_INLINE I shl(I x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
UMBRA_INLINE I shr(I x) {  // zeros come in
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
UMBRA_INLINE I sar(I x) {  // the sign comes in
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
template <int N>
UMBRA_INLINE I rotl(I x) {
  return shl<N>(x) | shr<32 - N>(x);
}

// Each lane with what is in the lane `step` (1, 2, 4 or 8) away, of the same 2 * step lanes.
template <int step>
UMBRA_INLINE F exchanged(F x) {
  if constexpr (step == 8) return {x.b, x.a};
  if constexpr (step == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  constexpr int kOrder = step == 2 ? 0x4E : 0xB1;
  return {_mm256_permute_ps(x.a, kOrder), _mm256_permute_ps(x.b, kOrder)};
}

UMBRA_INLINE I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
UMBRA_INLINE F from_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
UMBRA_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
UMBRA_INLINE I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }   // half to even
UMBRA_INLINE I trunc(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }  // towards zero

#define UMBRA_COMPARE(name, predicate)                                                        \
  UMBRA_INLINE M name(F x, F y) {                                                             \
    return {_mm256_cmp_ps(x.a, y.a, predicate), _mm256_cmp_ps(x.b, y.b, predicate)};          \
  }
UMBRA_COMPARE(lt, _CMP_LT_OQ)
UMBRA_COMPARE(le, _CMP_LE_OQ)
UMBRA_COMPARE(gt, _CMP_GT_OQ)
UMBRA_COMPARE(ge, _CMP_GE_OQ)
UMBRA_COMPARE(eq, _CMP_EQ_OQ)
#undef UMBRA_COMPARE
UMBRA_INLINE M gt(I x, I y) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b))};
}
UMBRA_INLINE M eq(I x, I y) {
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b))};
}
UMBRA_INLINE M operator&(M x, M y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
UMBRA_INLINE M operator|(M x, M y) { return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
UMBRA_INLINE F select(M m, F x, F y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
UMBRA_INLINE I select(M m, I x, I y) { return bits(select(m, from_bits(x), from_bits(y))); }
UMBRA_INLINE uint32_t mask_bits(M m) {  // bit i: lane i
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8;
}
UMBRA_INLINE bool any(M m) { return !_mm256_testz_ps(_mm256_or_ps(m.a, m.b), _mm256_or_ps(m.a, m.b)); }

// Lane i + lane i + 8, then i + 4, i + 2, i + 1.
UMBRA_INLINE float sum(F x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
UMBRA_INLINE float max(F x) {  // of lanes that are not NaN
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
UMBRA_INLINE int32_t sum(I x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

// Lane i: all lanes of x[i] in one, by `join`; of eight registers.
template <class Join>
UMBRA_INLINE __m256 joined_each(const __m256* x, Join&& join) {
  __m256 a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = join(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  for (int i = 0; i < 2; ++i)
    b[i] = join(_mm256_shuffle_ps(a[i], a[i + 2], 0x44), _mm256_shuffle_ps(a[i], a[i + 2], 0xEE));
  const __m256 all = join(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xDD));
  return _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7));
}
template <class Join>
UMBRA_INLINE F joined_lanes(const F (&x)[16], Join&& join) {
  __m256 y[16];
  for (int i = 0; i < 16; ++i) y[i] = join(x[i].a, x[i].b);
  return {joined_each(y, join), joined_each(y + 8, join)};
}
UMBRA_INLINE F max_each(const F (&x)[16]) {
  return joined_lanes(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
UMBRA_INLINE F sum_each(const F (&x)[16]) {  // in the order of `sum`
  return joined_lanes(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
UMBRA_INLINE I sum_each(const I (&x)[16]) {
  const auto join = [](__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  };
  __m256 y[16];
  for (int i = 0; i < 16; ++i) y[i] = join(_mm256_castsi256_ps(x[i].a), _mm256_castsi256_ps(x[i].b));
  return {_mm256_castps_si256(joined_each(y, join)), _mm256_castps_si256(joined_each(y + 8, join))};
}

UMBRA_INLINE F load_f16(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
UMBRA_INLINE void store_f16(uint16_t* p, F x) {  // half to even
  auto* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
UMBRA_INLINE F load_bf16(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  const I wide = {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
  return from_bits(shl<16>(wide));
}
UMBRA_INLINE I load_i8(const int8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
UMBRA_INLINE I load_u8(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
UMBRA_INLINE void store_i8(int8_t* p, I x) {  // saturates
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

}  // namespace umbra::UMBRA_ISA
