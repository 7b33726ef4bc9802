// `lanes.h` in plain C++: the compiler makes of the loops what the processor has in any case.
#pragma once

namespace umbra::UMBRA_ISA {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct M {  // -1 or 0
  int32_t v[16];
};

#define UMBRA_EACH(type, expression)              \
  type result;                                    \
  for (int i = 0; i < 16; ++i) result.v[i] = (expression); \
  return result

UMBRA_INLINE F set(float x) { UMBRA_EACH(F, x); }
UMBRA_INLINE I iset(int32_t x) { UMBRA_EACH(I, x); }
UMBRA_INLINE I iota() { UMBRA_EACH(I, i); }
UMBRA_INLINE F load(const float* p) { UMBRA_EACH(F, p[i]); }
UMBRA_INLINE I load(const int32_t* p) { UMBRA_EACH(I, p[i]); }
UMBRA_INLINE void store(float* p, F x) { std::memcpy(p, x.v, sizeof(x.v)); }
UMBRA_INLINE void store(int32_t* p, I x) { std::memcpy(p, x.v, sizeof(x.v)); }
UMBRA_INLINE M first(int n) { UMBRA_EACH(M, -(i < n)); }  // the first n lanes
UMBRA_INLINE F load(const float* p, int n) {  // the first n; zeros behind
  F result = set(0.0f);
  for (int i = 0; i < n; ++i) result.v[i] = p[i];
  return result;
}
UMBRA_INLINE void store(float* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}

UMBRA_INLINE F operator+(F x, F y) { UMBRA_EACH(F, x.v[i] + y.v[i]); }
UMBRA_INLINE F operator-(F x, F y) { UMBRA_EACH(F, x.v[i] - y.v[i]); }
UMBRA_INLINE F operator*(F x, F y) { UMBRA_EACH(F, x.v[i] * y.v[i]); }
UMBRA_INLINE F operator/(F x, F y) { UMBRA_EACH(F, x.v[i] / y.v[i]); }
UMBRA_INLINE F fma(F x, F y, F z) { UMBRA_EACH(F, __builtin_fmaf(x.v[i], y.v[i], z.v[i])); }
UMBRA_INLINE F min(F x, F y) { UMBRA_EACH(F, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
UMBRA_INLINE F max(F x, F y) { UMBRA_EACH(F, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
UMBRA_INLINE F sqrt(F x) { UMBRA_EACH(F, __builtin_sqrtf(x.v[i])); }

// Integers wrap around: as unsigned ones, where the language defines it.
UMBRA_INLINE int32_t as_signed(uint32_t x) { return static_cast<int32_t>(x); }
UMBRA_INLINE uint32_t as_unsigned(int32_t x) { return static_cast<uint32_t>(x); }
UMBRA_INLINE I operator+(I x, I y) { UMBRA_EACH(I, as_signed(as_unsigned(x.v[i]) + as_unsigned(y.v[i]))); }
UMBRA_INLINE I operator-(I x, I y) { UMBRA_EACH(I, as_signed(as_unsigned(x.v[i]) - as_unsigned(y.v[i]))); }
UMBRA_INLINE I operator*(I x, I y) { UMBRA_EACH(I, as_signed(as_unsigned(x.v[i]) * as_unsigned(y.v[i]))); }
UMBRA_INLINE I operator&(I x, I y) { UMBRA_EACH(I, x.v[i] & y.v[i]); }
UMBRA_INLINE I operator|(I x, I y) { UMBRA_EACH(I, x.v[i] | y.v[i]); }
UMBRA_INLINE I operator^(I x, I y) { UMBRA_EACH(I, x.v[i] ^ y.v[i]); }
template <int N>
UMBRA_INLINE I shl(I x) {
  UMBRA_EACH(I, as_signed(as_unsigned(x.v[i]) << N));
}
template <int N>
UMBRA_INLINE I shr(I x) {  // zeros come in
  UMBRA_EACH(I, as_signed(as_unsigned(x.v[i]) >> N));
}
template <int N>
UMBRA_INLINE I sar(I x) {  // the sign comes in
  UMBRA_EACH(I, x.v[i] >> N);
}
template <int N>
UMBRA_INLINE I rotl(I x) {
  return shl<N>(x) | shr<32 - N>(x);
}

// Each lane with what is in the lane `step` (1, 2, 4 or 8) away, of the same 2 * step lanes.
template <int step>
UMBRA_INLINE F exchanged(F x) { UMBRA_EACH(F, x.v[i ^ step]); }

UMBRA_INLINE I bits(F x) {
  I result;
  std::memcpy(result.v, x.v, sizeof(x.v));
  return result;
}
UMBRA_INLINE F from_bits(I x) {
  F result;
  std::memcpy(result.v, x.v, sizeof(x.v));
  return result;
}
UMBRA_INLINE F to_float(I x) { UMBRA_EACH(F, static_cast<float>(x.v[i])); }
UMBRA_INLINE I round(F x) { UMBRA_EACH(I, static_cast<int32_t>(__builtin_lrintf(x.v[i]))); }  // half to even
UMBRA_INLINE I trunc(F x) { UMBRA_EACH(I, static_cast<int32_t>(x.v[i])); }                   // towards zero

UMBRA_INLINE M lt(F x, F y) { UMBRA_EACH(M, -(x.v[i] < y.v[i])); }
UMBRA_INLINE M le(F x, F y) { UMBRA_EACH(M, -(x.v[i] <= y.v[i])); }
UMBRA_INLINE M gt(F x, F y) { UMBRA_EACH(M, -(x.v[i] > y.v[i])); }
UMBRA_INLINE M ge(F x, F y) { UMBRA_EACH(M, -(x.v[i] >= y.v[i])); }
UMBRA_INLINE M eq(F x, F y) { UMBRA_EACH(M, -(x.v[i] == y.v[i])); }
UMBRA_INLINE M gt(I x, I y) { UMBRA_EACH(M, -(x.v[i] > y.v[i])); }
UMBRA_INLINE M eq(I x, I y) { UMBRA_EACH(M, -(x.v[i] == y.v[i])); }
UMBRA_INLINE M operator&(M x, M y) { UMBRA_EACH(M, x.v[i] & y.v[i]); }
UMBRA_INLINE M operator|(M x, M y) { UMBRA_EACH(M, x.v[i] | y.v[i]); }
UMBRA_INLINE F select(M m, F x, F y) { UMBRA_EACH(F, m.v[i] ? x.v[i] : y.v[i]); }
UMBRA_INLINE I select(M m, I x, I y) { UMBRA_EACH(I, m.v[i] ? x.v[i] : y.v[i]); }
UMBRA_INLINE uint32_t mask_bits(M m) {  // bit i: lane i
  uint32_t result = 0;
  for (int i = 0; i < 16; ++i) result |= (as_unsigned(m.v[i]) & 1u) << i;
  return result;
}
UMBRA_INLINE bool any(M m) {
  int32_t result = 0;
  for (int i = 0; i < 16; ++i) result |= m.v[i];
  return result != 0;
}

// Lane i + lane i + 8, then i + 4, i + 2, i + 1.
UMBRA_INLINE float sum(F x) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
  }
  return x.v[0];
}
UMBRA_INLINE float max(F x) {  // of lanes that are not NaN
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  }
  return x.v[0];
}
UMBRA_INLINE int32_t sum(I x) {
  uint32_t result = 0;
  for (int i = 0; i < 16; ++i) result += as_unsigned(x.v[i]);
  return as_signed(result);
}

UMBRA_INLINE F max_each(const F (&x)[16]) {
  F y;
  for (int i = 0; i < 16; ++i) y.v[i] = max(x[i]);
  return y;
}
UMBRA_INLINE F sum_each(const F (&x)[16]) {  // in the order of `sum`
  F y;
  for (int i = 0; i < 16; ++i) y.v[i] = sum(x[i]);
  return y;
}
UMBRA_INLINE I sum_each(const I (&x)[16]) {
  I y;
  for (int i = 0; i < 16; ++i) y.v[i] = sum(x[i]);
  return y;
}

UMBRA_INLINE float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  uint32_t word;
  if (magnitude >= 0x7C00) {  // infinity; NaN, made quiet
    word = 0x7F800000 | (magnitude & 0x3FF) << 13 | (magnitude > 0x7C00 ? 0x400000 : 0);
  } else if (magnitude >= 0x400) {
    word = (magnitude << 13) + (112u << 23);
  } else {  // m * 2^-24, whatever the processor does with denormals
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&word, &value, 4);
  }
  word |= sign;
  float result;
  std::memcpy(&result, &word, 4);
  return result;
}
UMBRA_INLINE uint16_t float_to_f16(float x) {  // half to even
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint32_t sign = word >> 16 & 0x8000, magnitude = word & 0x7FFFFFFF;
  uint32_t h;
  if (magnitude > 0x7F800000) {
    h = 0x7E00 | (magnitude >> 13 & 0x3FF);
  } else if (magnitude >= 0x477FF000) {  // rounds to 2^16 or more
    h = 0x7C00;
  } else if (magnitude >= 0x38800000) {
    h = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  } else if (magnitude >= 0x33000000) {  // a denormal float16, in steps of 2^-24
    float value;
    std::memcpy(&value, &magnitude, 4);
    h = static_cast<uint32_t>(__builtin_lrintf(value * 0x1p24f));
  } else {
    h = 0;
  }
  return static_cast<uint16_t>(sign | h);
}
UMBRA_INLINE F load_f16(const uint16_t* p) { UMBRA_EACH(F, f16_to_float(p[i])); }
UMBRA_INLINE void store_f16(uint16_t* p, F x) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_f16(x.v[i]);
}
UMBRA_INLINE F load_bf16(const uint16_t* p) {
  I wide;
  for (int i = 0; i < 16; ++i) wide.v[i] = as_signed(static_cast<uint32_t>(p[i]) << 16);
  return from_bits(wide);
}
UMBRA_INLINE I load_i8(const int8_t* p) { UMBRA_EACH(I, p[i]); }
UMBRA_INLINE I load_u8(const uint8_t* p) { UMBRA_EACH(I, p[i]); }
UMBRA_INLINE void store_i8(int8_t* p, I x) {  // saturates
  for (int i = 0; i < 16; ++i) {
    p[i] = static_cast<int8_t>(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
  }
}

#undef UMBRA_EACH

}  // namespace umbra::UMBRA_ISA
