// `lanes.h` for AVX-512 (F, BW, DQ, VL): one register.
#pragma once

namespace umbra::UMBRA_ISA {

struct F {
  __m512 a;
};
struct I {
  __m512i a;
};
struct M {
  __mmask16 a;
};

UMBRA_INLINE F set(float x) { return {_mm512_set1_ps(x)}; }
UMBRA_INLINE I iset(int32_t x) { return {_mm512_set1_epi32(x)}; }
UMBRA_INLINE I iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
UMBRA_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
UMBRA_INLINE I load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
UMBRA_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x.a); }
UMBRA_INLINE void store(int32_t* p, I x) { _mm512_storeu_si512(p, x.a); }
UMBRA_INLINE M first(int n) {  // the first n lanes
  return {static_cast<__mmask16>(n >= 16 ? 0xFFFFu : (1u << n) - 1u)};
}
UMBRA_INLINE F load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n).a, p)}; }  // zeros behind
UMBRA_INLINE void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n).a, x.a); }

UMBRA_INLINE F operator+(F x, F y) { return {_mm512_add_ps(x.a, y.a)}; }
UMBRA_INLINE F operator-(F x, F y) { return {_mm512_sub_ps(x.a, y.a)}; }
UMBRA_INLINE F operator*(F x, F y) { return {_mm512_mul_ps(x.a, y.a)}; }
UMBRA_INLINE F operator/(F x, F y) { return {_mm512_div_ps(x.a, y.a)}; }
UMBRA_INLINE F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
UMBRA_INLINE F min(F x, F y) { return {_mm512_min_ps(x.a, y.a)}; }  // x < y ? x : y
UMBRA_INLINE F max(F x, F y) { return {_mm512_max_ps(x.a, y.a)}; }  // x > y ? x : y
UMBRA_INLINE F sqrt(F x) { return {_mm512_sqrt_ps(x.a)}; }

UMBRA_INLINE I operator+(I x, I y) { return {_mm512_add_epi32(x.a, y.a)}; }
UMBRA_INLINE I operator-(I x, I y) { return {_mm512_sub_epi32(x.a, y.a)}; }
UMBRA_INLINE I operator*(I x, I y) { return {_mm512_mullo_epi32(x.a, y.a)}; }
UMBRA_INLINE I operator&(I x, I y) { return {_mm512_and_si512(x.a, y.a)}; }
UMBRA_INLINE I operator|(I x, I y) { return {_mm512_or_si512(x.a, y.a)}; }
UMBRA_INLINE I operator^(I x, I y) { return {_mm512_xor_si512(x.a, y.a)}; }
template <int N>
UMBRA_INLINE I shl(I x) {
  return {_mm512_slli_epi32(x.a, N)};
}
template <int N>
UMBRA_INLINE I shr(I x) {  // zeros come in
  return {_mm512_srli_epi32(x.a, N)};
}
template <int N>
UMBRA_INLINE I sar(I x) {  // the sign comes in
  return {_mm512_srai_epi32(x.a, N)};
}
template <int N>
UMBRA_INLINE I rotl(I x) {
  return {_mm512_rol_epi32(x.a, N)};
}

// Each lane with what is in the lane `step` (1, 2, 4 or 8) away, of the same 2 * step lanes.
template <int step>
UMBRA_INLINE F exchanged(F x) {
  constexpr int kOrder = step == 8 || step == 2 ? 0x4E : 0xB1;
  if constexpr (step >= 4) return {_mm512_shuffle_f32x4(x.a, x.a, kOrder)};
  return {_mm512_permute_ps(x.a, kOrder)};
}

UMBRA_INLINE I bits(F x) { return {_mm512_castps_si512(x.a)}; }
UMBRA_INLINE F from_bits(I x) { return {_mm512_castsi512_ps(x.a)}; }
UMBRA_INLINE F to_float(I x) { return {_mm512_cvtepi32_ps(x.a)}; }
UMBRA_INLINE I round(F x) { return {_mm512_cvtps_epi32(x.a)}; }   // half to even
UMBRA_INLINE I trunc(F x) { return {_mm512_cvttps_epi32(x.a)}; }  // towards zero

UMBRA_INLINE M lt(F x, F y) { return {_mm512_cmp_ps_mask(x.a, y.a, _CMP_LT_OQ)}; }
UMBRA_INLINE M le(F x, F y) { return {_mm512_cmp_ps_mask(x.a, y.a, _CMP_LE_OQ)}; }
UMBRA_INLINE M gt(F x, F y) { return {_mm512_cmp_ps_mask(x.a, y.a, _CMP_GT_OQ)}; }
UMBRA_INLINE M ge(F x, F y) { return {_mm512_cmp_ps_mask(x.a, y.a, _CMP_GE_OQ)}; }
UMBRA_INLINE M eq(F x, F y) { return {_mm512_cmp_ps_mask(x.a, y.a, _CMP_EQ_OQ)}; }
UMBRA_INLINE M gt(I x, I y) { return {_mm512_cmpgt_epi32_mask(x.a, y.a)}; }
UMBRA_INLINE M eq(I x, I y) { return {_mm512_cmpeq_epi32_mask(x.a, y.a)}; }
UMBRA_INLINE M operator&(M x, M y) { return {static_cast<__mmask16>(x.a & y.a)}; }
UMBRA_INLINE M operator|(M x, M y) { return {static_cast<__mmask16>(x.a | y.a)}; }
UMBRA_INLINE F select(M m, F x, F y) { return {_mm512_mask_blend_ps(m.a, y.a, x.a)}; }
UMBRA_INLINE I select(M m, I x, I y) { return {_mm512_mask_blend_epi32(m.a, y.a, x.a)}; }
UMBRA_INLINE uint32_t mask_bits(M m) { return m.a; }  // bit i: lane i
UMBRA_INLINE bool any(M m) { return m.a != 0; }

// Lane i + lane i + 8, then i + 4, i + 2, i + 1.
UMBRA_INLINE float sum(F x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
UMBRA_INLINE float max(F x) {  // of lanes that are not NaN
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
UMBRA_INLINE int32_t sum(I x) {
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x.a), _mm512_extracti64x4_epi64(x.a, 1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

// Lane i: all lanes of x[i] in one, by `join`.
template <class Join>
UMBRA_INLINE __m512 joined_each(const F (&x)[16], Join&& join) {
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = join(_mm512_shuffle_f32x4(x[i].a, x[i + 8].a, 0x44), _mm512_shuffle_f32x4(x[i].a, x[i + 8].a, 0xEE));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    b[i] = join(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    c[i] = join(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xEE));
  const __m512 all = join(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xDD));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_ps(order, all);
}
UMBRA_INLINE F max_each(const F (&x)[16]) {
  return {joined_each(x, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); })};
}
UMBRA_INLINE F sum_each(const F (&x)[16]) {  // in the order of `sum`
  return {joined_each(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); })};
}
UMBRA_INLINE I sum_each(const I (&x)[16]) {
  F y[16];
  for (int i = 0; i < 16; ++i) y[i] = from_bits(x[i]);
  return bits(F{joined_each(y, [](__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  })});
}

UMBRA_INLINE F load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
UMBRA_INLINE void store_f16(uint16_t* p, F x) {  // half to even
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
}
UMBRA_INLINE F load_bf16(const uint16_t* p) {
  return from_bits(shl<16>(I{_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}));
}
UMBRA_INLINE I load_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
UMBRA_INLINE I load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
UMBRA_INLINE void store_i8(int8_t* p, I x) {  // saturates
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.a));
}

}  // namespace umbra::UMBRA_ISA
