// How rows become operands of a product, and what happens to a whole row after one. Included by linear_<isa>.cc.
#pragma once

#include "lanes.h"
#include "linear.h"

namespace umbra::UMBRA_ISA {

// Lanes [i, i + 16) of a row of n; zeros behind its end.
UMBRA_INLINE F load_part(const float* row, int64_t i, int64_t n) {
  return n - i >= 16 ? load(row + i) : load(row + i, static_cast<int>(n - i));
}
UMBRA_INLINE void store_part(float* row, int64_t i, int64_t n, F x) {
  if (n - i >= 16) store(row + i, x);
  else store(row + i, x, static_cast<int>(n - i));
}

// 1 / sqrt(mean(x^2) + epsilon): sixteen partial sums, then `sum`.
UMBRA_INLINE float inverse_rms(const float* x, int64_t n, float epsilon) {
  F total = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F part = load_part(x, i, n);
    total = fma(part, part, total);
  }
  const float mean = sum(total) * (1.0f / static_cast<float>(n));
  return 1.0f / __builtin_sqrtf(mean + epsilon);
}

UMBRA_INLINE F silu(F x) { return x / (set(1.0f) + exp(neg(x))); }

UMBRA_INLINE F gelu_tanh(F x) {
  const F cubic = fma(x * x * set(0.044715f), x, x);
  const F twice = cubic * set(1.5957691216057308f);  // 2 sqrt(2 / pi)
  // (1 + tanh(t)) / 2 = 1 - 1 / (exp(2 t) + 1)
  return x * (set(1.0f) - set(1.0f) / (exp(twice) + set(1.0f)));
}

UMBRA_INLINE M all_lanes() { return first(16); }
UMBRA_INLINE M is_finite(F size) { return lt(size, set(__builtin_inff())); }

// The largest magnitudes of `n` groups: NaN where there is an infinity or NaN.
UMBRA_INLINE F without_infinite(const float* x, int n, F largest) {
  float sizes[16];
  store(sizes, largest);
  for (int g = 0; g < n; ++g) {
    const F a = abs(load(x + g * kGroup)), b = abs(load(x + g * kGroup + 16));
    if (mask_bits(is_finite(a) & is_finite(b)) != 0xFFFF) sizes[g] = __builtin_nanf("");
  }
  return load(sizes);
}

// Where the integers of groups go that follow one another in memory: those from `first` on of each row, `groups` of them,
// of the rows from `row` on.
struct Places {
  int64_t first, groups, row;
  int64_t group = 0;

  __attribute__((always_inline)) int64_t next(const Rows& rows) {
    const int64_t at = (first + group) * rows.stride + row;
    if (++group == groups) group = 0, ++row;
    return at;
  }
};

// Integers of `n` groups of 32, 16 of them at most: the largest magnitude of a group becomes 127. A group below 2^-118
// counts as zero (its factor would be infinite); one with an infinity or NaN has the scale NaN, which every result of
// the row shows. Sixteen groups at a time: a group alone would wait for its maximum, its division and its sum.
template <bool all>
UMBRA_INLINE void quantise_some(const float* x, int left, const Rows& rows, Places& places) {
  const int n = all ? 16 : left;
  F size[16];
  M finite = all_lanes();
  for (int g = 0; g < n; ++g) {
    const F a = abs(load(x + g * kGroup)), b = abs(load(x + g * kGroup + 16));
    finite = finite & is_finite(a) & is_finite(b);
    size[g] = max(a, b);
  }
  for (int g = n; g < 16; ++g) size[g] = zero();
  F largest = max_each(size);
  const bool all_finite = mask_bits(finite) == 0xFFFF;
  if (!all_finite) largest = without_infinite(x, n, largest);
  const M some = ge(largest, set(0x1p-118f));
  const F without = select(lt(largest, set(1.0f)), zero(), set(__builtin_nanf("")));
  const F scale = select(some, largest / set(127.0f), without);
  // Wide stores are read in parts; the other way round a load would wait until every store before it is done.
  float factors[16], scales[16], totals[16];
  store(factors, select(some, set(127.0f) / largest, zero()));
  store(scales, scale);
  int64_t at[16];
  for (int g = 0; g < n; ++g) at[g] = places.next(rows);
  I low[16], high[16];
  for (int g = 0; g < n; ++g) {
    const F factor = set(factors[g]);
    low[g] = round(load(x + g * kGroup) * factor), high[g] = round(load(x + g * kGroup + 16) * factor);
    if (!all_finite && scales[g] != scales[g]) low[g] = high[g] = iset(0);
    int8_t* const q = rows.q + at[g] * kGroup;
    store_i8(q, low[g]);
    store_i8(q + 16, high[g]);
  }
  for (int g = n; g < 16; ++g) low[g] = high[g] = iset(0);
  if (rows.offsets) {
    const I a = sum_each(low), b = sum_each(high);
    int32_t halves[2][16];
    store(halves[0], a);
    store(halves[1], b);
    for (int g = 0; g < n; ++g) {
      int32_t* const to = rows.offsets + 4 * at[g];
      to[0] = -128 * halves[0][g], to[1] = -128 * halves[1][g], to[2] = to[0] + to[1], to[3] = 0;
    }
    store(totals, scale * to_float(a + b));
  } else {
    for (int g = 0; g < 16; ++g) low[g] = low[g] + high[g];
    store(totals, scale * to_float(sum_each(low)));
  }
  for (int g = 0; g < n; ++g) {
    rows.scale[at[g]] = scales[g];
    rows.total[at[g]] = totals[g];
  }
}

// Groups of `n` rows of `x`, to `places`.
UMBRA_INLINE void quantise(const float* x, int64_t n, Places places, const Rows& rows) {
  const int64_t count = n * places.groups;
  int64_t done = 0;
  for (; done + 16 <= count; done += 16) quantise_some<true>(x + done * kGroup, 16, rows, places);
  if (done < count) quantise_some<false>(x + done * kGroup, static_cast<int>(count - done), rows, places);
}

// Rows [first, end). What is done to each goes to `scratch` first: the rows follow one another there as in `p.x`.
UMBRA_INLINE void prepare_rows(const Preparation& p, int64_t first, int64_t end, float* scratch, const Rows& rows) {
  const int64_t n = p.in;
  for (int64_t row = first; row < end && (p.activation || p.norm); ++row) {
    const float* x = p.x + row * n;
    float* const y = scratch + (row - first) * n;
    if (p.activation) {
      const float* const up = p.up + row * n;
      for (int64_t i = 0; i < n; i += 16) {
        const F gate = load_part(x, i, n);
        store_part(y, i, n, (p.activation == 1 ? silu(gate) : gelu_tanh(gate)) * load_part(up, i, n));
      }
      x = y;
    }
    if (p.norm) {
      const F inverse = set(inverse_rms(x, n, p.epsilon));
      for (int64_t i = 0; i < n; i += 16)
        store_part(y, i, n, load_part(x, i, n) * inverse * load_part(p.norm, i, n));
    }
  }
  const float* const x = p.activation || p.norm ? scratch : p.x + first * n;
  if (p.floats) {
    for (int64_t row = first; row < end; ++row) {
      float* const values = rows.values + row * rows.width;
      for (int64_t i = 0; i < n; i += 16) store(values + i, load_part(x + (row - first) * n, i, n));
    }
  }
  if (p.integers) quantise(x, end - first, {0, n / kGroup, first}, rows);
}

UMBRA_INLINE void gate_rows(const Gating& p, float* scratch, const Rows& rows) {
  const int64_t width = p.blocks * kChannels;
  for (int64_t r = 0; r < p.n; ++r) {
    float* const values = p.floats ? rows.values + (p.row + r) * rows.width + p.block * kChannels : nullptr;
    for (int64_t b = 0; b < p.blocks; ++b) {
      const int64_t at = (b * p.n + r) * kChannels, left = p.out - (p.block + b) * kChannels;
      const F gate = load(p.gate + at), up = load(p.up + at);
      float* const y = scratch + r * width + b * kChannels;
      store(y, (p.activation == 1 ? silu(gate) : gelu_tanh(gate)) * up);
      if (values) store(values + b * kChannels, load_part(y, 0, left));
    }
  }
  if (p.integers) quantise(scratch, p.n, {p.block * kChannels / kGroup, width / kGroup, p.row}, rows);
}

// `before` (null: nothing) plus `x`, n rows of 16 that lie `width` apart in `before` and `y`, which may be the same.
UMBRA_INLINE void write_rows(const float* x, int64_t n, const float* before, float* y, int64_t width) {
  for (int64_t r = 0; r < n; ++r) {
    const F part = load(x + r * kChannels);
    store(y + r * width, before ? load(before + r * width) + part : part);
  }
}

UMBRA_INLINE void finish_row(const float* x, int64_t n, const float* weight, float epsilon, const float* residual,
                             float* y) {
  const F inverse = set(inverse_rms(x, n, epsilon));
  for (int64_t i = 0; i < n; i += 16) {
    F part = load_part(x, i, n) * inverse * load_part(weight, i, n);
    if (residual) part = load_part(residual, i, n) + part;
    store_part(y, i, n, part);
  }
}

}  // namespace umbra::UMBRA_ISA
