// Products on AVX2. A weight of 4 bits times an activation is at most 15 * 127, so `vpmaddubsw` sums of two, and the
// eight of a group on top of them, fit 16 bits (8 * 3,810 < 32,768): a group of 8 channels is widened only once. A
// weight of 8 bits gives its sign to the activation, and every sum of two is widened.
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "linear.h"
#include "linear_kernel.h"

namespace umbra::avx2 {
namespace {

using Ints = __m256i;
using Floats = __m256;

// What is read ahead of each stream, in bytes.
constexpr int kAhead = 1024;

// Pins a value to this place: the compiler would do all multiplications first and run out of registers.
inline void keep(Ints& value) { asm("" : "+x"(value)); }

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const Ints*>(p)); }

// Eight channels' scales or minima.
inline Floats halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats bytes(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Floats signed_bytes(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Four activations of a row, for all channels.
inline Ints broadcast(const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, sizeof(four));
  return _mm256_set1_epi32(four);
}

constexpr bool four_bits(Form form) { return form == Form::w4 || form == Form::w4k; }
constexpr bool has_minimum(Form form) { return four_bits(form) || form == Form::w8m; }

// Scales and minima of a group's 16 channels: half c of them. `part`: the first or the last 16 inputs of the group.
template <Form form>
inline Floats scale_of(const uint8_t* w, const uint8_t* super, int part, int c) {
  if constexpr (form == Form::w4) return halves(w + 256 + 16 * c);
  else if constexpr (form == Form::w4k)  // exact: 11 bits times 6
    return _mm256_mul_ps(halves(super + 16 * c), bytes(w + 256 + 8 * c));
  else if constexpr (form == Form::w6k)  // exact: 11 bits times 7
    return _mm256_mul_ps(halves(super + 16 * c), signed_bytes(w + 512 + 16 * part + 8 * c));
  else return halves(w + 512 + 16 * c);
}
template <Form form>
inline Floats minimum_of(const uint8_t* w, const uint8_t* super, int c) {
  if constexpr (form == Form::w4k) {
    const Floats m = _mm256_mul_ps(halves(super + 32 + 16 * c), bytes(w + 272 + 8 * c));
    return _mm256_xor_ps(m, _mm256_set1_ps(-0.0f));
  } else {
    return halves(w + (form == Form::w4 ? 288 : 544) + 16 * c);
  }
}

// One group of some rows.
struct Operand {
  const int8_t* q;     // [rows, 32]
  const float* scale;  // [rows]
  const float* total;  // [rows]
};

inline Operand operand(const Rows& rows, int64_t group, int64_t row) {
  const int64_t at = group * rows.stride + row;
  return {rows.q + at * kGroup, rows.scale + at, rows.total + at};
}

// A group of a 4-bit block: chunk j (4 inputs) in the low bits of 64 bytes, chunk j + 4 in the high ones.
template <Form form>
struct Packed {
  const uint8_t *w, *super;
  Ints part(int j, int c) const {
    const Ints both = load_ints(w + 64 * (j & 3) + 32 * c);
    return _mm256_and_si256(j < 4 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  }
  Floats scale(int c) const { return scale_of<form>(w, super, 0, c); }
  Floats minimum(int c) const { return minimum_of<form>(w, super, c); }
};

// The same, unpacked once for many rows.
struct Unpacked {
  alignas(32) uint8_t parts[8][2][32];
  alignas(32) float scales[2][8], minima[2][8];

  template <Form form>
  inline explicit Unpacked(const Packed<form>& packed) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) _mm256_store_si256(reinterpret_cast<Ints*>(parts[j][c]), packed.part(j, c));
      _mm256_store_ps(scales[c], packed.scale(c));
      _mm256_store_ps(minima[c], packed.minimum(c));
    }
  }
  Ints part(int j, int c) const { return _mm256_load_si256(reinterpret_cast<const Ints*>(parts[j][c])); }
  Floats scale(int c) const { return _mm256_load_ps(scales[c]); }
  Floats minimum(int c) const { return _mm256_load_ps(minima[c]); }
};

template <int M, class Weights>
inline void tile4(const Weights& weights, const Operand& a, float* out) {
  Ints sum[2][M];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int j = i / 2 + i % 2 * 4;  // both halves of a byte one after the other
    const Ints w0 = weights.part(j, 0), w1 = weights.part(j, 1);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Ints x = broadcast(a.q + kGroup * m + 4 * j);
      const Ints p0 = _mm256_maddubs_epi16(w0, x), p1 = _mm256_maddubs_epi16(w1, x);
      sum[0][m] = i ? _mm256_add_epi16(sum[0][m], p0) : p0;
      sum[1][m] = i ? _mm256_add_epi16(sum[1][m], p1) : p1;
      keep(sum[0][m]);
      keep(sum[1][m]);
    }
  }
  const Ints ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const Floats scale = weights.scale(c), minimum = weights.minimum(c);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      float* const y = out + kChannels * m + 8 * c;
      const Floats sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[c][m], ones));
      const Floats part = _mm256_mul_ps(sums, _mm256_broadcast_ss(a.scale + m));
      const Floats scaled = _mm256_fmadd_ps(part, scale, _mm256_loadu_ps(y));
      _mm256_storeu_ps(y, _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(a.total + m), scaled));
    }
  }
}

// Adds M rows' sums of 8 channels to their results.
template <int M>
inline void add_scaled(const Ints (&sum)[M], Floats scale, const Operand& a, float* out) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    float* const y = out + kChannels * m;
    const Floats scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[m]), _mm256_broadcast_ss(a.scale + m));
    _mm256_storeu_ps(y, _mm256_fmadd_ps(scaled, scale, _mm256_loadu_ps(y)));
  }
}

template <int M>
inline void add_minimum(Floats minimum, const Operand& a, float* out) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    float* const y = out + kChannels * m;
    _mm256_storeu_ps(y, _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(a.total + m), _mm256_loadu_ps(y)));
  }
}

// Sums of the chunks [first, end) of a group, and their share of the results.
template <Form form, int M, int first, int end>
inline void part8(const uint8_t* w, const uint8_t* super, const Operand& a, float* out) {
  const Ints ones = _mm256_set1_epi16(1);
  Ints low[M], high[M];
#pragma GCC unroll 8
  for (int j = first; j < end; ++j) {
    const Ints w0 = load_ints(w + 64 * j), w1 = load_ints(w + 64 * j + 32);
    const Ints size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Ints x = broadcast(a.q + kGroup * m + 4 * j);
      const Ints p0 = _mm256_madd_epi16(_mm256_maddubs_epi16(size0, _mm256_sign_epi8(x, w0)), ones);
      const Ints p1 = _mm256_madd_epi16(_mm256_maddubs_epi16(size1, _mm256_sign_epi8(x, w1)), ones);
      low[m] = j > first ? _mm256_add_epi32(low[m], p0) : p0;
      high[m] = j > first ? _mm256_add_epi32(high[m], p1) : p1;
      keep(low[m]);
      keep(high[m]);
    }
  }
  add_scaled<M>(low, scale_of<form>(w, super, first / 4, 0), a, out);
  add_scaled<M>(high, scale_of<form>(w, super, first / 4, 1), a, out + 8);
}

template <Form form, int M>
inline void tile8(const uint8_t* w, const uint8_t* super, const Operand& a, float* out) {
  if constexpr (form == Form::w6k) {  // each half of the group has a scale of its own
    part8<form, M, 0, 4>(w, super, a, out);
    part8<form, M, 4, 8>(w, super, a, out);
  } else {
    part8<form, M, 0, 8>(w, super, a, out);
  }
  if constexpr (has_minimum(form)) {
    add_minimum<M>(minimum_of<form>(w, super, 0), a, out);
    add_minimum<M>(minimum_of<form>(w, super, 1), a, out + 8);
  }
}

// From how many rows on it pays to unpack a group of 4-bit weights once (measured on Zen 3).
constexpr int kUnpackFrom = 19;

// Rows [0, n) of a product in tiles of M + 1 (the first `larger` tiles) and M.
template <int M, int most, class Tile>
inline void tiles(int64_t larger, int64_t n, const Tile& tile) {
  int64_t row = 0;
  if constexpr (M < most)
    for (; row < larger * (M + 1); row += M + 1) tile(std::integral_constant<int, M + 1>(), row);
  for (; row < n; row += M) tile(std::integral_constant<int, M>(), row);
}

template <Form form, int M, int kMost, bool unpack>
inline void group_tiles(const uint8_t* w, const uint8_t* super, const Rows& rows, int64_t group, int64_t first,
                        int64_t larger, int64_t n, float* out) {
  const Packed<form> packed{w, super};
  if constexpr (!four_bits(form)) {
    tiles<M, kMost>(larger, n, [&](auto size, int64_t row) {
      tile8<form, size()>(w, super, operand(rows, group, first + row), out + row * kChannels);
    });
  } else if constexpr (unpack) {
    const Unpacked unpacked(packed);
    tiles<M, kMost>(larger, n, [&](auto size, int64_t row) {
      tile4<size()>(unpacked, operand(rows, group, first + row), out + row * kChannels);
    });
  } else {
    tiles<M, kMost>(larger, n, [&](auto size, int64_t row) {
      tile4<size()>(packed, operand(rows, group, first + row), out + row * kChannels);
    });
  }
}

// Rows in tiles of M + 1 (the first `larger` tiles) and M.
template <Form form, int M, int kMost, bool unpack>
__attribute__((noinline)) void walk(const Product& p, int64_t larger) {
  constexpr int64_t kBytes = group_bytes(form), kSuperBytes = super_bytes(form);
  const int64_t groups = p.in / kGroup;
  const uint8_t *data[kStreams], *supers[kStreams];
  for (int s = 0; s < p.n_blocks; ++s) data[s] = p.block[s].data, supers[s] = p.block[s].supers;
  for (int64_t line = 0; line < kAhead; line += 64)
    for (int s = 0; s < p.n_blocks; ++s) prefetch(data[s] + line);
  for (int64_t g = 0; g < groups; ++g) {
    for (int s = 0; s < p.n_blocks; ++s) {
      const uint8_t* const w = data[s] + g * kBytes;
      for (int64_t line = 0; line < kBytes; line += 64) prefetch(w + kAhead + line);
      group_tiles<form, M, kMost, unpack>(w, supers[s] + g / kSuper * kSuperBytes, *p.rows, g, p.first, larger, p.n,
                                   p.out + s * p.n * kChannels);
    }
  }
}

template <Form form, bool unpack, int kMost, int M = kMost>
void with_tiles(const Product& p) {
  const int64_t tiles = (p.n + kMost - 1) / kMost;
  if constexpr (M >= 1) {
    if (p.n / tiles == M) walk<form, M, kMost, unpack>(p, p.n % tiles);
    else with_tiles<form, unpack, kMost, M - 1>(p);
  }
}

// Registers hold the sums of 6 rows with 4-bit weights. With 8-bit ones they hold those of 5, but beside tiles of
// another size only of 4.
template <Form form>
void product_of(const Product& p) {
  if constexpr (four_bits(form)) {
    if (p.n >= kUnpackFrom) with_tiles<form, true, 6>(p);
    else with_tiles<form, false, 6>(p);
  } else if (p.n % 5 == 0) {
    walk<form, 5, 5, false>(p, 0);
  } else {
    with_tiles<form, false, 4>(p);
  }
}

void product(const Product& p) {
  for (int64_t i = 0; i < p.n_blocks * p.n * kChannels; i += 8) _mm256_store_ps(p.out + i, _mm256_setzero_ps());
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

extern const LinearKernels linear_kernels = {false, product, nullptr, nullptr, prepare, gate, write, finish,
                                              summarise, combine, channel};

}  // namespace umbra::avx2
