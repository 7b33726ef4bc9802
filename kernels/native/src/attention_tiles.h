// Attention over int8 pools on AMX. Queries and weights are integers of 16 bits, which are multiplied in two parts, their
// upper and their lower bytes: sums stay exact, and so have the bits that attention_int16.h gives.
#pragma once

#include <immintrin.h>

#include "attention.h"
#include "lanes.h"
#include "tiles.h"

namespace umbra::UMBRA_ISA {
namespace {

constexpr int kTileRows = 16;   // of queries or weights
constexpr int kTileBytes = 64;  // entries of a key, or tokens, that one product takes in

// The registers: upper and lower bytes of rows 0 and 1, keys or values 2 and 3, sums 4 and 5 (upper and lower), 6 and 7.
struct RowTiles {
  explicit RowTiles(int count)
      : rows{count < kTileRows ? count : kTileRows, kTileBytes},
        tiles({rows, rows, kTurned, kTurned, rows, rows, rows, rows}) {}

  static constexpr TileShape kTurned = {kTileBytes / 4, kTileBytes};
  const TileShape rows;
  const Tiles tiles;
};

// Sixteen keys, `stride` bytes apart, entries [0, 64): four entries of every key side by side, 16 rows of 64 bytes.
UMBRA_INLINE void turn_keys(const int8_t* keys, int64_t stride, int8_t* turned) {
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) x[t] = _mm512_loadu_si512(keys + t * stride);
#pragma GCC unroll 8
  for (int t = 0; t < 16; t += 2) {
    y[t] = _mm512_unpacklo_epi32(x[t], x[t + 1]);
    y[t + 1] = _mm512_unpackhi_epi32(x[t], x[t + 1]);
  }
#pragma GCC unroll 4
  for (int t = 0; t < 16; t += 4) {
    x[t] = _mm512_unpacklo_epi64(y[t], y[t + 2]);
    x[t + 1] = _mm512_unpackhi_epi64(y[t], y[t + 2]);
    x[t + 2] = _mm512_unpacklo_epi64(y[t + 1], y[t + 3]);
    x[t + 3] = _mm512_unpackhi_epi64(y[t + 1], y[t + 3]);
  }
  // x[4 i + j] now holds, in its four parts, entries 4 (j + 4 part) of the keys 4 i .. 4 i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xDD);
    const __m512i c = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xDD);
    _mm512_store_si512(turned + 64 * j, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_store_si512(turned + 64 * (j + 4), _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_store_si512(turned + 64 * (j + 8), _mm512_shuffle_i32x4(a, c, 0xDD));
    _mm512_store_si512(turned + 64 * (j + 12), _mm512_shuffle_i32x4(b, d, 0xDD));
  }
}

// Entries [0, 64) of the values of 64 tokens, `stride` bytes apart: those of four tokens side by side, in four tiles of
// 16 entries, 16 rows of 64 bytes each.
UMBRA_INLINE void turn_values(const int8_t* values, int64_t stride, int8_t* turned) {
  for (int t = 0; t < kSpan / 4; ++t, values += 4 * stride, turned += 64) {
    const __m512i a = _mm512_loadu_si512(values), b = _mm512_loadu_si512(values + stride);
    const __m512i c = _mm512_loadu_si512(values + 2 * stride), d = _mm512_loadu_si512(values + 3 * stride);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
    // Part p of x[q]: entries 16 p + 4 q and the three behind.
    const __m512i x[4] = {_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd),
                          _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
    const __m512i even = _mm512_shuffle_i32x4(x[0], x[1], 0x88), odd = _mm512_shuffle_i32x4(x[0], x[1], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(x[2], x[3], 0x88), odd_high = _mm512_shuffle_i32x4(x[2], x[3], 0xDD);
    constexpr int kTileSize = kTileBytes / 4 * 64;
    _mm512_store_si512(turned, _mm512_shuffle_i32x4(even, even_high, 0x88));
    _mm512_store_si512(turned + kTileSize, _mm512_shuffle_i32x4(odd, odd_high, 0x88));
    _mm512_store_si512(turned + 2 * kTileSize, _mm512_shuffle_i32x4(even, even_high, 0xDD));
    _mm512_store_si512(turned + 3 * kTileSize, _mm512_shuffle_i32x4(odd, odd_high, 0xDD));
  }
}

// The upper and the lower bytes of 64 numbers of 16 bits, in two registers each.
UMBRA_INLINE void split_words(__m512i a, __m512i b, int8_t* upper, int8_t* lower) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), low = _mm512_set1_epi16(255);
  const __m512i bottom = _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
  const __m512i top = _mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8));
  _mm512_storeu_si512(lower, _mm512_permutexvar_epi64(order, bottom));
  _mm512_storeu_si512(upper, _mm512_permutexvar_epi64(order, top));
}

// Weights of a row: lower bytes of all tokens of a block, then upper ones; in the place of as many int16. `x` are 64.
UMBRA_INLINE void store_weights(int16_t* row, int token, const __m512i (&x)[4]) {
  int8_t* const lower = reinterpret_cast<int8_t*>(row) + token;
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i a = _mm512_permutexvar_epi64(order, _mm512_packs_epi32(x[0], x[1]));
  const __m512i b = _mm512_permutexvar_epi64(order, _mm512_packs_epi32(x[2], x[3]));
  split_words(a, b, lower + kBlock, lower);
}

// Sums of 16 columns from their two parts, as floats.
UMBRA_INLINE F joined(const int32_t* upper, const int32_t* lower) {
  return to_float(shl<8>(load(upper)) + load(lower));
}

#define UMBRA_JOINED_PRODUCT(sign, keys, upper, lower) \
  UMBRA_TILE_MULTIPLY(sign, upper, 0, keys);           \
  UMBRA_TILE_MULTIPLY(u, lower, 1, keys)

// Logits of up to 16 queries (`n`, `upper` and `lower` [16, padded] bytes) with `tiles` times 16 turned keys:
// (q . key) * k_scale * factor, kBlock apart. `turn(tile)` is called before a tile of keys is read.
template <int kPadded, class Turn>
UMBRA_INLINE void dot_tiles(const int8_t* upper, const int8_t* lower, int n, const int8_t* turned, int tiles,
                            const float* k_scales, const float* factors, float* logits, Turn&& turn) {
  constexpr int kParts = kPadded / kTileBytes, kTile = kTileBytes / 4 * 64;
  alignas(64) int32_t sums[2][2][kTileRows * 16];
  const auto multiply = [&](int tile) __attribute__((always_inline)) {
    turn(tile);
    const int8_t* const keys = turned + tile * kParts * kTile;
    if (tile & 1) {
      UMBRA_TILE_ZERO(6);
      UMBRA_TILE_ZERO(7);
    } else {
      UMBRA_TILE_ZERO(4);
      UMBRA_TILE_ZERO(5);
    }
    for (int part = 0; part < kParts; ++part) {
      if (kParts > 1 || tile == 0) {
        UMBRA_TILE_LOAD(0, upper + part * kTileBytes, kPadded);
        UMBRA_TILE_LOAD(1, lower + part * kTileBytes, kPadded);
      }
      if (tile & 1) {
        UMBRA_TILE_LOAD(3, keys + part * kTile, 64);
        UMBRA_JOINED_PRODUCT(s, 3, 6, 7);
      } else {
        UMBRA_TILE_LOAD(2, keys + part * kTile, 64);
        UMBRA_JOINED_PRODUCT(s, 2, 4, 5);
      }
    }
    if (tile & 1) {
      UMBRA_TILE_STORE(6, sums[1][0], 64);
      UMBRA_TILE_STORE(7, sums[1][1], 64);
    } else {
      UMBRA_TILE_STORE(4, sums[0][0], 64);
      UMBRA_TILE_STORE(5, sums[0][1], 64);
    }
  };
  multiply(0);
  for (int tile = 0; tile < tiles; ++tile) {  // a product runs while the one before it is scaled
    if (tile + 1 < tiles) multiply(tile + 1);
    const F scales = load(k_scales + 16 * tile);
    for (int r = 0; r < n; ++r) {
      const F sum = joined(sums[tile & 1][0] + 16 * r, sums[tile & 1][1] + 16 * r);
      store(logits + r * kBlock + 16 * tile, sum * scales * set(factors[r]));
    }
  }
}

// weighted[r][0 .. 64) += steps[r] * sum of weight * value over the 64 tokens of a span, for up to 16 rows (`n`). Their
// weights lie 2 kBlock bytes apart, steps kBlock / kSpan, results `padded`.
UMBRA_INLINE void weigh_tiles(const int8_t* weights, int n, const int8_t* turned, const float* steps, int padded,
                              float* weighted) {
  constexpr int kTile = kTileBytes / 4 * 64;
  alignas(64) int32_t sums[4][2][kTileRows * 16];
  UMBRA_TILE_LOAD(0, weights + kBlock, 2 * kBlock);
  UMBRA_TILE_LOAD(1, weights, 2 * kBlock);
  for (int tile = 0; tile < 4; tile += 2) {
    UMBRA_TILE_ZERO(4);
    UMBRA_TILE_ZERO(5);
    UMBRA_TILE_LOAD(2, turned + tile * kTile, 64);
    UMBRA_JOINED_PRODUCT(u, 2, 4, 5);
    UMBRA_TILE_ZERO(6);
    UMBRA_TILE_ZERO(7);
    UMBRA_TILE_LOAD(3, turned + (tile + 1) * kTile, 64);
    UMBRA_JOINED_PRODUCT(u, 3, 6, 7);
    UMBRA_TILE_STORE(4, sums[tile][0], 64);
    UMBRA_TILE_STORE(5, sums[tile][1], 64);
    UMBRA_TILE_STORE(6, sums[tile + 1][0], 64);
    UMBRA_TILE_STORE(7, sums[tile + 1][1], 64);
  }
  for (int r = 0; r < n; ++r) {
    const F step = set(steps[r * (kBlock / kSpan)]);
    float* const to = weighted + r * padded;
#pragma GCC unroll 4
    for (int tile = 0; tile < 4; ++tile) {
      const F sum = joined(sums[tile][0] + 16 * r, sums[tile][1] + 16 * r);
      store(to + 16 * tile, fma(sum, step, load(to + 16 * tile)));
    }
  }
}

}  // namespace
}  // namespace umbra::UMBRA_ISA
