// Products on AMX: a tile product gives the integer sums of 16 rows with the 16 channels of a block for one group, and
// AVX-512 adds them up in the order that linear.h sets. A tile of weights is a group of a block as it lies in memory.
// Few rows are left to AVX-512, as is everything around the products.
#include "linear.h"

#if defined(__AMX_INT8__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "linear_kernel.h"
#include "tiles.h"

namespace umbra::amx {
namespace {

constexpr int kTile = 16;    // rows of a tile
constexpr int kSlab = 24;    // at most so many groups are made ready together: they stay in the first cache
constexpr int kFewest = 12;  // rows from which tiles are faster, with weights that come from memory

// Tile registers: rows 0 and 1, weights 2 and 3, sums 4 and 5. They take turns.
#define UMBRA_MULTIPLY(rows, weights, sums, q, w)                  \
  do {                                                             \
    UMBRA_TILE_LOAD(rows, q, kGroup);                              \
    UMBRA_TILE_LOAD(weights, w, 64);                               \
    UMBRA_TILE_ZERO(sums);                                         \
    UMBRA_TILE_MULTIPLY(s, sums, rows, weights);                   \
  } while (false)

constexpr bool four_bits(Form form) { return form == Form::w4 || form == Form::w4k; }
constexpr bool has_minimum(Form form) { return four_bits(form) || form == Form::w8m; }
constexpr int parts_of(Form form) { return form == Form::w6k ? 2 : 1; }  // each with a scale of its own

// Some groups of a block: weights as bytes with sign, four inputs of each channel side by side.
struct Slab {
  alignas(64) uint8_t unpacked[kSlab][kGroup * kChannels];
  alignas(64) float scale[kSlab][2][kChannels], minimum[kSlab][kChannels];
  const uint8_t* weights[kSlab];
};

template <Form form>
UMBRA_INLINE void unpack(const uint8_t* w, const uint8_t* super, Slab& slab, int g) {
  for (int part = 0; part < parts_of(form); ++part)
    group_scales(form, w, super, part, slab.scale[g][part], slab.minimum[g]);
  uint8_t* const to = slab.unpacked[g];
  slab.weights[g] = four_bits(form) ? to : w;
  if constexpr (four_bits(form)) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(w + 64 * j);
      _mm512_store_si512(to + 64 * j, _mm512_and_si512(both, low));
      _mm512_store_si512(to + 64 * (j + 4), _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
  }
}

// Integer sums become part of the results: of rows whose scales and totals are `own` and `total`.
template <Form form, int M>
UMBRA_INLINE void finish(const int32_t* sums, F scale, F minimum, const float* own, const float* total, F* y) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    y[m] = fma(to_float(load(sums + m * kChannels)) * set(own[m]), scale, y[m]);
    if constexpr (has_minimum(form)) y[m] = fma(minimum, set(total[m]), y[m]);
  }
}

// Always in line: a function that only fetches has no effect that GCC knows, and is not called.
template <Form form>
UMBRA_INLINE void fetch(const uint8_t* next) {
  for (int64_t line = 0; line < group_bytes(form); line += 64) prefetch(next + line);
}

// Calls `multiply`, `keep` and `finish` in this order for each i < count, as f(i & 1, i), with those of other i in
// between: a product, and the way of its sums through memory, takes longer than adding them.
template <class Multiply, class Keep, class Finish>
UMBRA_INLINE void pipeline(int count, const Multiply& multiply, const Keep& keep, const Finish& finish) {
  constexpr std::integral_constant<int, 0> even;
  constexpr std::integral_constant<int, 1> odd;
  multiply(even, 0);
  keep(even, 0);
  if (count > 1) multiply(odd, 1);
  int i = 0;
  for (; i + 3 < count; i += 2) {
    multiply(even, i + 2);
    keep(odd, i + 1);
    finish(even, i);
    multiply(odd, i + 3);
    keep(even, i + 2);
    finish(odd, i + 1);
  }
  if (i + 2 < count) multiply(even, i + 2);
  if (i + 1 < count) keep(odd, i + 1);
  finish(even, i);
  if (i + 2 < count) keep(even, i + 2);
  if (i + 1 < count) finish(odd, i + 1);
  if (i + 2 < count) finish(even, i + 2);
}

// Adds a slab of `groups` groups to `n` rows (at most M), which are the rows from `skip` on of a tile that begins with
// `q`, `own` and `total` in the slab's first group. Sums of the rows behind them are nobody's, and so are the scales read
// for them: those of other groups, or what lies behind in `Rows`. Brings in the groups at `next` (null: none) meanwhile.
template <Form form, int M>
void add(const Slab& slab, int groups, const uint8_t* next, const Rows& rows, int64_t at, int skip, int n, float* out) {
  constexpr int kParts = parts_of(form), kInputs = kGroup / kParts;
  alignas(64) int32_t sums[2][2 * kTile * kChannels];
  const int8_t* const q = rows.q + at * kGroup;
  const float *const own = rows.scale + at + skip, *const total = rows.total + at + skip;
  const int64_t stride = rows.stride;
  F y[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) y[m] = m < n ? load(out + m * kChannels) : zero();
  const auto multiply = [&](auto turn, int i) __attribute__((always_inline)) {  // `i` counts parts of groups
    const int g = i / kParts, part = i % kParts;
    const int8_t* const from = q + g * stride * kGroup + part * kInputs;
    const uint8_t* const w = slab.weights[g] + part * kInputs * kChannels;
    if constexpr (turn == 0) UMBRA_MULTIPLY(0, 2, 4, from, w);
    else UMBRA_MULTIPLY(1, 3, 5, from, w);
  };
  const auto keep = [&](auto turn, int) __attribute__((always_inline)) {
    if constexpr (turn == 0) UMBRA_TILE_STORE(4, sums[0], 64);
    else UMBRA_TILE_STORE(5, sums[1], 64);
  };
  pipeline(groups * kParts, multiply, keep, [&](auto turn, int i) __attribute__((always_inline)) {
    const int g = i / kParts, part = i % kParts;
    if (next && part == 0) fetch<form>(next + g * group_bytes(form));
    finish<form, M>(sums[turn] + skip * kChannels, load(slab.scale[g][part]), load(slab.minimum[g]), own + g * stride,
                    total + g * stride, y);
  });
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    if (m < n) store(out + m * kChannels, y[m]);
}

template <Form form>
void product_of(const Product& p) {
  constexpr int64_t kBytes = group_bytes(form), kSuperBytes = super_bytes(form);
  const int64_t groups = p.in / kGroup;
  const int whole = static_cast<int>(p.n / kTile), rest = static_cast<int>(p.n % kTile);
  const int skip = whole && rest ? kTile - rest : 0;  // the last tile's rows that are done already
  Slab slab;
  const int64_t slabs = (groups + kSlab - 1) / kSlab, each = (groups + slabs - 1) / slabs;
  for (int64_t first = 0; first < groups; first += each) {
    const int count = static_cast<int>(groups - first < each ? groups - first : each);
    for (int s = 0; s < p.n_blocks; ++s) {
      const uint8_t *const w = p.block[s].data + first * kBytes, *const supers = p.block[s].supers;
      for (int g = 0; g < count; ++g)
        unpack<form>(w + g * kBytes, supers + (first + g) / kSuper * kSuperBytes, slab, g);
      // What is unpacked next: the same groups of the next block, or else the next groups of the first one.
      const bool more = s + 1 < p.n_blocks;
      const uint8_t* next = more ? p.block[s + 1].data + first * kBytes : p.block[0].data + (first + each) * kBytes;
      int64_t at = first * p.rows->stride + p.first;
      float* out = p.out + s * p.n * kChannels;
      for (int t = 0; t < whole; ++t, next = nullptr, at += kTile, out += kTile * kChannels)
        add<form, kTile>(slab, count, next, *p.rows, at, 0, kTile, out);
      if (rest > 8) add<form, kTile>(slab, count, next, *p.rows, at - skip, skip, rest, out);
      else if (rest > 4) add<form, 8>(slab, count, next, *p.rows, at - skip, skip, rest, out);
      else if (rest) add<form, 4>(slab, count, next, *p.rows, at - skip, skip, rest, out);
    }
  }
}

// Whether tiles do a product.
bool takes(Form form, int64_t n) { return is_quantised(form) && n >= kFewest; }

bool begin(Form form, int64_t n) {
  if (!takes(form, n)) return false;
  const int tile = n < kTile ? static_cast<int>(n) : kTile, inputs = kGroup / parts_of(form);
  const TileShape rows = {tile, inputs}, weights = {inputs / 4, 64}, sums = {tile, 64};
  configure_tiles({rows, rows, weights, weights, sums, sums, {}, {}});
  return true;
}

void product(const Product& p) {
  if (!takes(p.form, p.n)) return avx512::linear_kernels.product(p);
  std::memset(p.out, 0, sizeof(float) * p.n_blocks * p.n * kChannels);
  switch (p.form) {
    case Form::w4: return product_of<Form::w4>(p);
    case Form::w8: return product_of<Form::w8>(p);
    case Form::w8m: return product_of<Form::w8m>(p);
    case Form::w4k: return product_of<Form::w4k>(p);
    default: return product_of<Form::w6k>(p);
  }
}

LinearKernels with_tiles() {
  LinearKernels kernels = avx512::linear_kernels;
  kernels.product = product;
  kernels.begin = begin;
  kernels.end = release_tiles;
  return kernels;
}

}  // namespace

const LinearKernels linear_kernels = with_tiles();
extern const bool compiled = true;

}  // namespace umbra::amx

#else  // a compiler that does not know AMX yet

namespace umbra::amx {
const LinearKernels linear_kernels = avx512::linear_kernels;
extern const bool compiled = false;
}  // namespace umbra::amx

#endif
