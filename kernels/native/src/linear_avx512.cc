// Products on AVX-512 with VNNI: one register is a block's 16 channels, and `vpdpbusd` adds four products of bytes to a
// 32-bit sum. It wants weights without sign: those of 8 bits are moved up by 128, and sums start at -128 sum(q_x).
#include <immintrin.h>

#include <cstring>

#include "linear.h"
#include "linear_kernel.h"

namespace umbra::avx512 {
namespace {

using Ints = __m512i;
using Floats = __m512;

constexpr int kAhead = 1024;   // bytes read ahead of each stream
constexpr int kMostRows = 8;   // of a tile, by the registers it needs

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }

inline Floats halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats bytes(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Floats signed_bytes(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

constexpr bool four_bits(Form form) { return form == Form::w4 || form == Form::w4k; }
constexpr bool has_minimum(Form form) { return four_bits(form) || form == Form::w8m; }
constexpr int parts_of(Form form) { return form == Form::w6k ? 2 : 1; }  // each with a scale of its own

// One group of a block, ready for any number of rows.
template <Form form>
struct Group {
  Ints weights[8];
  Floats scale[parts_of(form)], minimum;

  Group(const uint8_t* w, const uint8_t* super) {
    if constexpr (four_bits(form)) {
      const Ints low = _mm512_set1_epi8(15);
      for (int j = 0; j < 4; ++j) {
        const Ints both = load_ints(w + 64 * j);
        weights[j] = _mm512_and_si512(both, low);
        weights[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      }
    } else {
      for (int j = 0; j < 8; ++j) weights[j] = _mm512_xor_si512(load_ints(w + 64 * j), _mm512_set1_epi8(-128));
    }
    if constexpr (form == Form::w4) {
      scale[0] = halves(w + 256);
      minimum = halves(w + 288);
    } else if constexpr (form == Form::w4k) {
      scale[0] = _mm512_mul_ps(halves(super), bytes(w + 256));
      const Floats m = _mm512_mul_ps(halves(super + 32), bytes(w + 272));
      minimum = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(m), _mm512_set1_epi32(INT32_MIN)));
    } else if constexpr (form == Form::w6k) {
      for (int part = 0; part < 2; ++part)
        scale[part] = _mm512_mul_ps(halves(super), signed_bytes(w + 512 + 16 * part));
    } else {
      scale[0] = halves(w + 512);
      if constexpr (form == Form::w8m) minimum = halves(w + 544);
    }
  }
};

// M rows with a group of S blocks, whose results lie `apart` floats apart. An operand is read once for all of them: what
// bounds this is how many a cycle can be read.
template <Form form, int M, int S>
inline void tile(const Group<form> (&group)[S], const Rows& rows, int64_t at, float* out, int64_t apart) {
  constexpr int kParts = parts_of(form);
  const int8_t* const q = rows.q + at * kGroup;
  const int32_t* const offsets = rows.offsets + at * 4;
  const float *const scale = rows.scale + at, *const total = rows.total + at;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    Floats y[S];
#pragma GCC unroll 2
    for (int s = 0; s < S; ++s) y[s] = _mm512_loadu_ps(out + kChannels * m + apart * s);
    const Floats own = _mm512_set1_ps(scale[m]);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Ints sum[S];
      const Ints offset = _mm512_set1_epi32(offsets[4 * m + (kParts == 2 ? part : 2)]);
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) sum[s] = four_bits(form) ? _mm512_setzero_si512() : offset;
#pragma GCC unroll 8
      for (int j = 8 / kParts * part; j < 8 / kParts * (part + 1); ++j) {
        int32_t four;
        std::memcpy(&four, q + kGroup * m + 4 * j, sizeof(four));
        const Ints inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 2
        for (int s = 0; s < S; ++s) sum[s] = _mm512_dpbusd_epi32(sum[s], group[s].weights[j], inputs);
      }
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s)
        y[s] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum[s]), own), group[s].scale[part], y[s]);
    }
    const Floats sum = _mm512_set1_ps(total[m]);
#pragma GCC unroll 2
    for (int s = 0; s < S; ++s) {
      if constexpr (has_minimum(form)) y[s] = _mm512_fmadd_ps(group[s].minimum, sum, y[s]);
      _mm512_storeu_ps(out + kChannels * m + apart * s, y[s]);
    }
  }
}

// Rows in tiles of M + 1 (the first `larger` tiles) and M.
template <Form form, int M>
void walk(const Product& p, int64_t larger) {
  constexpr int64_t kBytes = group_bytes(form), kSuperBytes = super_bytes(form);
  const int64_t groups = p.in / kGroup, apart = p.n * kChannels;
  const uint8_t *data[kStreams], *supers[kStreams];
  for (int s = 0; s < p.n_blocks; ++s) data[s] = p.block[s].data, supers[s] = p.block[s].supers;
  for (int64_t line = 0; line < kAhead; line += 64)
    for (int s = 0; s < p.n_blocks; ++s) prefetch(data[s] + line);
  const auto group_of = [&](int s, int64_t g) {
    const uint8_t* const w = data[s] + g * kBytes;
    for (int64_t line = 0; line < kBytes; line += 64) prefetch(w + kAhead + line);
    return Group<form>(w, supers[s] + g / kSuper * kSuperBytes);
  };
  const auto rows_of = [&](const auto& group, int64_t g, float* out) {
    const int64_t at = g * p.rows->stride + p.first;
    int64_t row = 0;
    if constexpr (M < kMostRows)
      for (; row < larger * (M + 1); row += M + 1) tile<form, M + 1>(group, *p.rows, at + row, out + row * kChannels, apart);
    for (; row < p.n; row += M) tile<form, M>(group, *p.rows, at + row, out + row * kChannels, apart);
  };
  for (int64_t g = 0; g < groups; ++g) {
    int s = 0;
    for (; s + 1 < p.n_blocks; s += 2) {
      const Group<form> two[] = {group_of(s, g), group_of(s + 1, g)};
      rows_of(two, g, p.out + s * apart);
    }
    if (s < p.n_blocks) {
      const Group<form> one[] = {group_of(s, g)};
      rows_of(one, g, p.out + s * apart);
    }
  }
}

template <Form form>
void product_of(const Product& p) {
  const int64_t tiles = (p.n + kMostRows - 1) / kMostRows, larger = p.n % tiles;
  switch (p.n / tiles) {
    case 1: return walk<form, 1>(p, larger);
    case 2: return walk<form, 2>(p, larger);
    case 3: return walk<form, 3>(p, larger);
    case 4: return walk<form, 4>(p, larger);
    case 5: return walk<form, 5>(p, larger);
    case 6: return walk<form, 6>(p, larger);
    case 7: return walk<form, 7>(p, larger);
    default: return walk<form, 8>(p, larger);
  }
}

void product(const Product& p) {
  std::memset(p.out, 0, sizeof(float) * p.n_blocks * p.n * kChannels);
  switch (p.form) {
    case Form::w4: return product_of<Form::w4>(p);
    case Form::w8: return product_of<Form::w8>(p);
    case Form::w8m: return product_of<Form::w8m>(p);
    case Form::w4k: return product_of<Form::w4k>(p);
    case Form::w6k: return product_of<Form::w6k>(p);
    default: return float_product(p);
  }
}

}  // namespace

extern const LinearKernels linear_kernels = {true, product, nullptr, nullptr, prepare, gate, write, finish,
                                              summarise, combine, channel};

}  // namespace umbra::avx512
