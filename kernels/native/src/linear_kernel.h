// The kernels of `LinearKernels` that lanes.h can express: products with float matrices, single channels, and the
// summary of logits. Included by linear_<isa>.cc.
#pragma once

#include "lanes.h"
#include "linear.h"
#include "rows_kernel.h"

namespace umbra::UMBRA_ISA {

#if defined(__AVX512F__)
constexpr int kTileRows = 4, kTileChannels = 4;
#else
constexpr int kTileRows = 3, kTileChannels = 2;
#endif

// Weights [i, i + 16) of a row; `left` of them if they are fewer.
template <bool bfloat16>
UMBRA_INLINE F load_weights(const uint8_t* row, int64_t i) {
  if constexpr (bfloat16) return load_bf16(reinterpret_cast<const uint16_t*>(row) + i);
  else return load(reinterpret_cast<const float*>(row) + i);
}
template <bool bfloat16>
UMBRA_INLINE F load_weights(const uint8_t* row, int64_t i, int left) {
  constexpr int kBytes = bfloat16 ? 2 : 4;
  uint8_t padded[16 * kBytes] = {};
  std::memcpy(padded, row + i * kBytes, kBytes * left);
  return load_weights<bfloat16>(padded, 0);
}

// One channel of a float matrix, and where the results of rows 0, 1, .. go (kChannels apart).
struct Column {
  const uint8_t* weights;
  float* out;
};

UMBRA_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

// R rows times C channels: every result has sixteen partial sums of its own.
template <bool bfloat16, int R, int C, bool ahead>
UMBRA_INLINE void float_tile(const Column* columns, int64_t n, const float* x, int64_t width, int64_t row) {
  constexpr int64_t kAhead = 1024;  // bytes
  F total[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) total[r][c] = zero();
  const auto add = [&](int64_t i, const F(&part)[C]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const F values = load(x + r * width + i);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) total[r][c] = fma(values, part[c], total[r][c]);
    }
  };
  F part[C];
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      part[c] = load_weights<bfloat16>(columns[c].weights, i);
      if constexpr (ahead) prefetch(columns[c].weights + i * (bfloat16 ? 2 : 4) + kAhead);
    }
    add(i, part);
  }
  if (whole < n) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      part[c] = load_weights<bfloat16>(columns[c].weights, whole, static_cast<int>(n - whole));
    add(whole, part);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) columns[c].out[(row + r) * kChannels] = sum(total[r][c]);
}

template <bool bfloat16, int C>
UMBRA_INLINE void float_rows(const Product& p, const Column* columns) {
  const int64_t width = p.rows->width, in = p.in;
  const float* const x = p.rows->values + p.first * width;
  int64_t row = 0;
  if (p.n >= kTileRows) {
    float_tile<bfloat16, kTileRows, C, true>(columns, in, x, width, 0);
    for (row = kTileRows; row + kTileRows <= p.n; row += kTileRows)
      float_tile<bfloat16, kTileRows, C, false>(columns, in, x + row * width, width, row);
  }
  for (; row < p.n; ++row) float_tile<bfloat16, 1, C, true>(columns, in, x + row * width, width, row);
}

// Channels in the order in which their rows are read: the same one of every block, so that there are as many streams.
template <bool bfloat16>
UMBRA_INLINE void float_blocks(const Product& p) {
  constexpr int kFewRows = 4;  // channels side by side where there are few rows
  const int64_t row_bytes = p.in * (bfloat16 ? 2 : 4);
  Column columns[kStreams * kChannels];
  int count = 0;
  for (int c = 0; c < kChannels; ++c) {
    for (int s = 0; s < p.n_blocks; ++s) {
      if (c < p.block[s].channels)
        columns[count++] = {p.block[s].data + c * row_bytes, p.out + s * p.n * kChannels + c};
    }
  }
  int at = 0;
  if (p.n < kTileRows)
    for (; at + kFewRows <= count; at += kFewRows) float_rows<bfloat16, kFewRows>(p, columns + at);
  for (; at + kTileChannels <= count; at += kTileChannels) float_rows<bfloat16, kTileChannels>(p, columns + at);
  for (; at < count; ++at) float_rows<bfloat16, 1>(p, columns + at);
}

// Channels past the matrix's end are left alone.
UMBRA_INLINE void float_product(const Product& p) {
  if (p.form == Form::bfloat16) float_blocks<true>(p);
  else float_blocks<false>(p);
}

// Scale and minimum of 16 channels in one group (part: the first or the last 16 inputs).
UMBRA_INLINE void group_scales(Form form, const uint8_t* w, const uint8_t* super, int part, float* scale,
                               float* minimum) {
  const auto halves = [](const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); };
  const auto small = [](const uint8_t* p) { return to_float(load_i8(reinterpret_cast<const int8_t*>(p))); };
  F s = zero(), m = zero();
  switch (form) {
    case Form::w4: s = halves(w + 256), m = halves(w + 288); break;
    case Form::w8: s = halves(w + 512); break;
    case Form::w8m: s = halves(w + 512), m = halves(w + 544); break;
    case Form::w4k: s = halves(super) * small(w + 256), m = neg(halves(super + 32) * small(w + 272)); break;
    case Form::w6k: s = halves(super) * small(w + 512 + 16 * part); break;
    default: break;
  }
  store(scale, s);
  store(minimum, m);
}

// The weights of one channel of a quantised matrix in float32: q * scale is exact, so there is one rounding.
UMBRA_INLINE void channel_values(const Matrix& m, int64_t channel, float* out) {
  const bool four = m.form == Form::w4 || m.form == Form::w4k;
  const int64_t block = channel / kChannels, c = channel % kChannels, groups = m.groups();
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* const w = m.data + (block * groups + g) * group_bytes(m.form);
    const uint8_t* const super = m.supers + (block * (groups / kSuper) + g / kSuper) * super_bytes(m.form);
    for (int part = 0; part < 2; ++part) {
      float scale[kChannels], minimum[kChannels];
      group_scales(m.form, w, super, part, scale, minimum);
      for (int k = 0; k < 16; ++k) {
        const int chunk = four ? k / 4 : 4 * part + k / 4;
        const uint8_t byte = w[64 * chunk + 4 * c + k % 4];
        const int q = !four ? static_cast<int8_t>(byte) : part ? byte >> 4 : byte & 15;
        out[g * kGroup + 16 * part + k] = static_cast<float>(q) * scale[c] + minimum[c];
      }
    }
  }
}

constexpr float kLargest = 3.402823466e38f;

// NaN counts as -inf, +inf as the largest finite number.
UMBRA_INLINE F cleaned(F x) {
  const F low = set(-__builtin_inff());
  return select(gt(x, low), min(x, set(kLargest)), low);
}

UMBRA_INLINE Summary summary_of(const float* logits, int64_t n, int32_t channel) {
  F highest = set(-__builtin_inff());
  I at = iota();
  for (int64_t i = 0; i < n; i += 16) {
    const F x = cleaned(load(logits + i));
    const M better = gt(x, highest);
    highest = select(better, x, highest);
    at = select(better, iota() + iset(static_cast<int32_t>(i)), at);
  }
  float values[16];
  int32_t places[16];
  store(values, highest);
  store(places, at);
  int best = 0;
  for (int i = 1; i < 16; ++i)
    if (values[i] > values[best] || (values[i] == values[best] && places[i] < places[best])) best = i;
  const float top = values[best];
  const F shift = set(top > -kLargest ? top : -kLargest);
  F total = zero();
  for (int64_t i = 0; i < n; i += 16) total = total + exp(cleaned(load(logits + i)) - shift);
  return {top, channel + places[best], sum(total)};
}

// Natural logarithm of a normal x > 0 (Cephes' polynomial), within 2 ulp or so; -inf for zero.
UMBRA_INLINE float log_of(float x) {
  if (!(x > 0.0f)) return -__builtin_inff();
  constexpr float kPoly[] = {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f,
                             -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                             2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  constexpr int32_t kRootHalf = 0x3F3504F3;
  int32_t word;
  std::memcpy(&word, &x, 4);
  word -= kRootHalf;
  const float exponent = static_cast<float>(word >> 23);
  word = (word & 0x7FFFFF) + kRootHalf;
  float f;
  std::memcpy(&f, &word, 4);
  f -= 1.0f;
  float p = kPoly[0];
  for (int i = 1; i < 9; ++i) p = __builtin_fmaf(p, f, kPoly[i]);
  const float square = f * f;
  float tail = __builtin_fmaf(exponent, -2.12194440e-4f, p * f * square);
  tail = __builtin_fmaf(square, -0.5f, tail);
  return __builtin_fmaf(exponent, 0.693359375f, f + tail);
}

UMBRA_INLINE void combine_parts(const Summary* parts, int64_t count, int32_t* token, float* highest, float* log_sum) {
  Summary best = parts[0];
  for (int64_t i = 1; i < count; ++i)
    if (parts[i].highest > best.highest) best = parts[i];  // ascending channels: the lowest of equals stays
  const float shift = best.highest > -kLargest ? best.highest : -kLargest;
  F total = zero();
  for (int64_t i = 0; i < count; i += 16) {
    float difference[16], sums[16];
    for (int64_t j = 0; j < 16; ++j) {
      const bool inside = i + j < count;
      difference[j] = inside ? parts[i + j].highest - shift : 0.0f;
      sums[j] = inside ? parts[i + j].sum : 0.0f;
    }
    total = fma(load(sums), exp(load(difference)), total);
  }
  *token = best.channel;
  *highest = best.highest;
  *log_sum = best.highest + log_of(sum(total));
}

namespace {

void prepare(const Preparation& p, int64_t first, int64_t end, float* scratch, const Rows& rows) {
  prepare_rows(p, first, end, scratch, rows);
}
void gate(const Gating& gating, float* scratch, const Rows& rows) { gate_rows(gating, scratch, rows); }
void write(const float* x, int64_t n, const float* before, float* y, int64_t width) {
  write_rows(x, n, before, y, width);
}
void finish(const float* x, int64_t n, const float* weight, float epsilon, const float* residual, float* y) {
  finish_row(x, n, weight, epsilon, residual, y);
}
Summary summarise(const float* logits, int64_t n, int32_t channel) { return summary_of(logits, n, channel); }
void combine(const Summary* parts, int64_t count, int32_t* token, float* highest, float* log_sum) {
  combine_parts(parts, count, token, highest, log_sum);
}
void channel(const Matrix& matrix, int64_t channel, float* out) { channel_values(matrix, channel, out); }

}  // namespace
}  // namespace umbra::UMBRA_ISA
