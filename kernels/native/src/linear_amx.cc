// Products on AMX: a tile product gives the integer sums of 16 rows with the 16 channels of a block for one group, and
// AVX-512 adds them up in the order that linear.h sets. A tile of weights is a group of a block as it lies in memory.
// Few rows are left to AVX-512, as is everything around the products.
#include "linear.h"

#if defined(__AMX_INT8__)
#include <immintrin.h>

#include <cstring>

#include "linear_kernel.h"
#include "tiles.h"

namespace umbra::amx {
namespace {

constexpr int kTile = 16;    // rows of a tile
constexpr int kSlab = 24;    // at most so many groups are made ready together: they stay in the first cache
constexpr int kFewest = 16;  // rows from which tiles are faster, with weights that come from memory

// Tile registers. The last rows of a product, if they are fewer than 16, have registers of their own; those of weights
// and sums take turns:
//   rows 0 (16) and 1 (fewer), weights 2 and 3, sums 4 and 5 (16 rows), 6 and 7 (fewer)
#define UMBRA_MULTIPLY(rows, weights, sums, q, w, to)                                                      \
  asm volatile("tileloadd (%0,%3,1), %%tmm" #rows "\n\ttileloadd (%1,%4,1), %%tmm" #weights               \
               "\n\ttilezero %%tmm" #sums "\n\ttdpbssd %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sums    \
               "\n\ttilestored %%tmm" #sums ", (%2,%4,1)" ::"r"(q), "r"(w), "r"(to), "r"(int64_t{kGroup}), \
               "r"(int64_t{64}) : "memory")

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
inline void unpack(const uint8_t* w, const uint8_t* super, Slab& slab, int g) {
  for (int part = 0; part < parts_of(form); ++part)
    group_scales(form, w, super, part, slab.scale[g][part], slab.minimum[g]);
  if constexpr (four_bits(form)) {
    const __m512i low = _mm512_set1_epi8(15);
    uint8_t* const to = slab.unpacked[g];
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(w + 64 * j);
      _mm512_store_si512(to + 64 * j, _mm512_and_si512(both, low));
      _mm512_store_si512(to + 64 * (j + 4), _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
    slab.weights[g] = to;
  } else {
    slab.weights[g] = w;
  }
}

// Adds a slab of `groups` groups to `n` rows (at most M), from `at` on in the slab's first group. Sums of the rows
// behind them are nobody's, and so are the scales read for them: those of other groups, or what lies behind in `Rows`.
// Brings in the groups at `next` (null: none) meanwhile.
template <Form form, int M, bool fewer>
void add(const Slab& slab, int groups, const uint8_t* next, const Rows& rows, int64_t at, int n, float* out) {
  constexpr int kParts = parts_of(form), kInputs = kGroup / kParts;
  alignas(64) int32_t sums[2][kTile * kChannels];
  F y[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) y[m] = m < n ? load(out + m * kChannels) : zero();
  const auto multiply = [&](int i) __attribute__((always_inline)) {  // `i` counts parts of groups
    const int g = i / kParts, part = i % kParts;
    const int8_t* const q = rows.q + (at + g * rows.stride) * kGroup + part * kInputs;
    const uint8_t* const w = slab.weights[g] + part * kInputs * kChannels;
    if (i & 1) {
      if constexpr (fewer) UMBRA_MULTIPLY(1, 3, 7, q, w, sums[1]);
      else UMBRA_MULTIPLY(0, 3, 5, q, w, sums[1]);
    } else {
      if constexpr (fewer) UMBRA_MULTIPLY(1, 2, 6, q, w, sums[0]);
      else UMBRA_MULTIPLY(0, 2, 4, q, w, sums[0]);
    }
  };
  const auto finish = [&](int i) __attribute__((always_inline)) {
    const int g = i / kParts, part = i % kParts;
    if (next && part == 0)
      for (int64_t line = 0; line < group_bytes(form); line += 64) prefetch(next + g * group_bytes(form) + line);
    const F scale = load(slab.scale[g][part]), minimum = load(slab.minimum[g]);
    const float* const own = rows.scale + at + g * rows.stride;
    const float* const total = rows.total + at + g * rows.stride;
    const int32_t* const from = sums[i & 1];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      y[m] = fma(to_float(load(from + m * kChannels)) * set(own[m]), scale, y[m]);
      if constexpr (has_minimum(form)) y[m] = fma(minimum, set(total[m]), y[m]);
    }
  };
  const int count = groups * kParts;
  multiply(0);
  for (int i = 0; i < count; i += 2) {  // a product runs while the one before it is added
    if (i + 1 < count) multiply(i + 1);
    finish(i);
    if (i + 1 == count) break;
    if (i + 2 < count) multiply(i + 2);
    finish(i + 1);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    if (m < n) store(out + m * kChannels, y[m]);
}

template <Form form>
void product_of(const Product& p) {
  constexpr int64_t kBytes = group_bytes(form), kSuperBytes = super_bytes(form);
  const int64_t groups = p.matrix->groups();
  const int whole = static_cast<int>(p.n / kTile), rest = static_cast<int>(p.n % kTile);
  constexpr int kInputs = kGroup / parts_of(form);
  const TileShape sixteen = {kTile, kInputs}, fewer = {rest ? rest : kTile, kInputs};
  const TileShape weights = {kInputs / 4, 4 * kChannels}, sums = {kTile, 64}, fewer_sums = {fewer.rows, 64};
  const Tiles tiles({sixteen, fewer, weights, weights, sums, sums, fewer_sums, fewer_sums});
  Slab slab;
  const int64_t slabs = (groups + kSlab - 1) / kSlab, each = (groups + slabs - 1) / slabs;
  for (int64_t first = 0; first < groups; first += each) {
    const int count = static_cast<int>(groups - first < each ? groups - first : each);
    for (int s = 0; s < p.n_blocks; ++s) {
      const uint8_t* const w = p.matrix->data + (p.block[s] * groups + first) * kBytes;
      const uint8_t* const supers = p.matrix->supers + p.block[s] * (groups / kSuper) * kSuperBytes;
      for (int g = 0; g < count; ++g)
        unpack<form>(w + g * kBytes, supers + (first + g) / kSuper * kSuperBytes, slab, g);
      // What is unpacked next: the same groups of the next block, or else the next groups of the first one.
      const bool more = s + 1 < p.n_blocks;
      const int64_t behind = more ? p.block[s + 1] * groups + first : p.block[0] * groups + first + each;
      const uint8_t* next = p.matrix->data + behind * kBytes;
      int64_t at = first * p.rows->stride + p.first;
      float* out = p.out + s * p.n * kChannels;
      for (int t = 0; t < whole; ++t, next = nullptr, at += kTile, out += kTile * kChannels)
        add<form, kTile, false>(slab, count, next, *p.rows, at, kTile, out);
      if (rest > 8) add<form, kTile, true>(slab, count, next, *p.rows, at, rest, out);
      else if (rest > 4) add<form, 8, true>(slab, count, next, *p.rows, at, rest, out);
      else if (rest) add<form, 4, true>(slab, count, next, *p.rows, at, rest, out);
    }
  }
}

void product(const Product& p) {
  if (p.n < kFewest || !is_quantised(p.matrix->form)) return avx512::linear_kernels.product(p);
  std::memset(p.out, 0, sizeof(float) * p.n_blocks * p.n * kChannels);
  switch (p.matrix->form) {
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
