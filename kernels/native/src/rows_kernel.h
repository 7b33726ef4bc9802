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

// Integers of a row of `groups` groups of 32: the largest magnitude of a group becomes 127. A group below 2^-118 counts
// as zero (its factor would be infinite); one with an infinity or NaN has the scale NaN, which every result of the row
// shows. Sixteen groups at a time: a group alone would wait for its maximum, its division and its sum.
UMBRA_INLINE void quantise(const float* x, int64_t groups, const Rows& rows, int64_t row) {
  for (int64_t first = 0; first < groups; first += 16) {
    const int n = static_cast<int>(groups - first < 16 ? groups - first : 16);
    const float* const part = x + first * kGroup;
    F size[16];
    M finite = all_lanes();
    for (int g = 0; g < n; ++g) {
      const F a = abs(load(part + g * kGroup)), b = abs(load(part + g * kGroup + 16));
      finite = finite & is_finite(a) & is_finite(b);
      size[g] = max(a, b);
    }
    for (int g = n; g < 16; ++g) size[g] = zero();
    F largest = max_each(size);
    const bool all_finite = mask_bits(finite) == 0xFFFF;
    if (!all_finite) largest = without_infinite(part, n, largest);
    const M some = ge(largest, set(0x1p-118f));
    const F without = select(lt(largest, set(1.0f)), zero(), set(__builtin_nanf("")));
    const F scale = select(some, largest / set(127.0f), without);
    // Wide stores are read in parts; the other way round a load would wait until every store before it is done.
    float factors[16], scales[16], totals[16];
    store(factors, select(some, set(127.0f) / largest, zero()));
    store(scales, scale);
    I low[16], high[16];
    for (int g = 0; g < n; ++g) {
      const F factor = set(factors[g]);
      low[g] = round(load(part + g * kGroup) * factor), high[g] = round(load(part + g * kGroup + 16) * factor);
      if (!all_finite && scales[g] != scales[g]) low[g] = high[g] = iset(0);
      int8_t* const q = rows.q + ((first + g) * rows.stride + row) * kGroup;
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
        int32_t* const to = rows.offsets + 4 * ((first + g) * rows.stride + row);
        to[0] = -128 * halves[0][g], to[1] = -128 * halves[1][g], to[2] = to[0] + to[1], to[3] = 0;
      }
      store(totals, scale * to_float(a + b));
    } else {
      for (int g = 0; g < 16; ++g) low[g] = low[g] + high[g];
      store(totals, scale * to_float(sum_each(low)));
    }
    for (int g = 0; g < n; ++g) {
      const int64_t at = (first + g) * rows.stride + row;
      rows.scale[at] = scales[g];
      rows.total[at] = totals[g];
    }
  }
}

UMBRA_INLINE void prepare_row(const Preparation& p, int64_t row, float* scratch, const Rows& rows) {
  const int64_t n = p.in;
  const float* x = p.x + row * n;
  if (p.activation) {
    const float* const up = p.up + row * n;
    for (int64_t i = 0; i < n; i += 16) {
      const F gate = load_part(x, i, n);
      store(scratch + i, (p.activation == 1 ? silu(gate) : gelu_tanh(gate)) * load_part(up, i, n));
    }
    x = scratch;
  }
  if (p.norm) {
    const F inverse = set(inverse_rms(x, n, p.epsilon));
    for (int64_t i = 0; i < n; i += 16)
      store(scratch + i, load_part(x, i, n) * inverse * load_part(p.norm, i, n));
    x = scratch;
  }
  if (p.floats) {
    float* const values = rows.values + row * rows.width;
    for (int64_t i = 0; i < n; i += 16) store(values + i, load_part(x, i, n));
  }
  if (p.integers) quantise(x, n / kGroup, rows, row);
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
