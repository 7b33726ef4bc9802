// The passes of `sample.h` for one instruction set.
#include "lanes.h"
#include "noise.h"
#include "numerics.h"
#include "sample.h"

namespace umbra::UMBRA_ISA {
namespace {

constexpr float kLargest = 3.4028234663852886e38f;
constexpr float kInf = __builtin_inff();

// Calls `body(i, m)` for i = 0, 16, ...: m lanes, 16 but for the last one.
template <class Body>
UMBRA_INLINE void each16(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) body(i, 16);
  if (i < n) body(i, static_cast<int>(n - i));
}

UMBRA_INLINE F load_some(const float* p, int m) { return m == 16 ? load(p) : load(p, m); }
UMBRA_INLINE void store_some(float* p, F x, int m) { m == 16 ? store(p, x) : store(p, x, m); }

UMBRA_INLINE I load_some(const int32_t* p, int m) {
  return bits(load_some(reinterpret_cast<const float*>(p), m));
}

UMBRA_INLINE F cleaned(F x) { return select(gt(x, set(-kInf)), min(x, set(kLargest)), set(-kInf)); }

UMBRA_INLINE F flushed(F x) { return select(gt(x, set(-numerics::kMinNormal)), zero(), x); }

float max_of(const float* x, int64_t n) {
  F best[4] = {set(-kInf), set(-kInf), set(-kInf), set(-kInf)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) best[j] = max(load(x + i + 16 * j), best[j]);  // NaN: the second one
  }
  for (; i < n; i += 16) {
    const int m = static_cast<int>(n - i < 16 ? n - i : 16);
    best[0] = max(select(first(m), load_some(x + i, m), set(-kInf)), best[0]);
  }
  return max(max(max(best[0], best[1]), max(best[2], best[3])));
}

int64_t find(const float* x, int64_t n, float bound) {
  const F least = set(bound);
  for (int64_t i = 0; i < n; i += 16) {
    const int m = static_cast<int>(n - i < 16 ? n - i : 16);
    const uint32_t found = mask_bits(ge(load_some(x + i, m), least) & first(m));
    if (found) return i + __builtin_ctz(found);
  }
  return n;
}

void clean(const float* x, int64_t n, float* out) {
  each16(n, [&](int64_t i, int m) { store_some(out + i, cleaned(load_some(x + i, m)), m); });
}

void penalise(const float* x, const int32_t* counts, int64_t n, float repetition, float presence, float frequency,
              float* out) {
  const F repeat = set(repetition), inverse = set(1.0f) / repeat;
  each16(n, [&](int64_t i, int m) {
    const F value = cleaned(load_some(x + i, m));
    const I count = load_some(counts + i, m), generated = sar<1>(count);
    const F divisor = select(gt(value, zero()), repeat, inverse);
    const F repeated = select(gt(count, iset(0)), value / divisor, value);
    const F per_use = numerics::product(set(frequency), to_float(generated));
    const F once = select(gt(generated, iset(0)), set(presence), zero());
    store_some(out + i, repeated - (per_use + once), m);
  });
}

void scale(const float* x, int64_t n, float max_x, float temperature, float* scaled) {
  each16(n, [&](int64_t i, int m) {
    const F below = flushed(cleaned(load_some(x + i, m)) - set(max_x));
    // An infinite temperature makes NaN of -inf, which counts as -inf: `max` takes its second operand then.
    store_some(scaled + i, max(flushed(below / set(temperature)), set(-kInf)), m);
  });
}

void sum_exp(const float* x, int64_t n, int64_t width, int64_t begin, int64_t end, float threshold, float* partial) {
  const F least = set(threshold);
  for (int64_t i = begin; i < end; i += 16) {
    F total = zero();
    for (int64_t at = i; at < n; at += width) {
      const int64_t piece = at - i + end;  // where this chunk of the piece ends
      const int64_t stop = piece < n ? piece : n;
      const int m = static_cast<int>(stop - at < 16 ? stop - at : 16);
      const F power = load_some(x + at, m);
      const F value = select(first(m) & ge(power, least), numerics::exp(power), zero());
      total = at == i ? value : total + value;
    }
    store_some(partial + i, total, static_cast<int>(end - i < 16 ? end - i : 16));
  }
}

// `ordered_sum` of kernels/numerics.py.
float ordered_sum(float* x, int64_t n) {
  while (n > 1) {
    int64_t power = 1;
    while (power < n) power *= 2;
    const int64_t width = power / 16 > 1 ? power / 16 : 1;
    for (int64_t i = 0; i < width; i += 16) {
      const int columns = static_cast<int>(width - i < 16 ? width - i : 16);
      F total = load_some(x + i, columns);
      for (int64_t at = i + width; at < n; at += width) {
        total = total + load_some(x + at, static_cast<int>(n - at < columns ? n - at : columns));
      }
      store_some(x + i, total, columns);
    }
    n = width;
  }
  return x[0];
}

int64_t collect(const float* x, int64_t n, float max_x, float cut, int32_t first_id, int32_t* ids) {
  int64_t count = 0;
  each16(n, [&](int64_t i, int m) {
    const F below = flushed(cleaned(load_some(x + i, m)) - set(max_x));
    uint32_t found = mask_bits(ge(below, set(cut)) & first(m));
    for (; found; found &= found - 1) ids[count++] = first_id + static_cast<int32_t>(i) + __builtin_ctz(found);
  });
  return count;
}

void exp_each(const float* x, int64_t n, float* out) {
  each16(n, [&](int64_t i, int m) { store_some(out + i, numerics::exp(load_some(x + i, m)), m); });
}

float log_of(float x) {
  float result;
  store(&result, numerics::log(set(x)), 1);
  return result;
}

sample::Best noisy_best(const float* scores, const int32_t* ids, int32_t first_id, int64_t n, sample::NoiseKey key,
                        sample::Best best) {
  constexpr float kLargestNoise = 22.9f, kLn2 = 0.693148f, kMargin = 0.01f;
  each16(n, [&](int64_t i, int m) {
    const M valid = first(m);
    const F score = select(valid, load_some(scores + i, m), set(-kInf));
    // Most tokens cannot win whatever their noise is, most others cannot with the power of two it is made of.
    if (!any(ge(score + set(kLargestNoise), set(best.score)))) return;
    const I id = ids ? load_some(ids + i, m) : iota() + iset(first_id + static_cast<int32_t>(i));
    const F u = uniform(threefry(id, key));
    const F negative_exponent = to_float(iset(127) - sar<23>(bits(u)));
    const F bound = score + (negative_exponent * set(kLn2) + set(kMargin));  // noise <= -log u
    if (!any(ge(bound, set(best.score)))) return;
    const F noisy = score + gumbel(u);
    float noisy_of[16];
    int32_t id_of[16];
    store(noisy_of, noisy);
    store(id_of, id);
    for (uint32_t open = mask_bits(ge(noisy, set(best.score)) & valid); open; open &= open - 1) {
      const int lane = __builtin_ctz(open);
      if (noisy_of[lane] > best.score || (noisy_of[lane] == best.score && id_of[lane] < best.id)) {
        best = {noisy_of[lane], id_of[lane]};
      }
    }
  });
  return best;
}

}  // namespace
}  // namespace umbra::UMBRA_ISA

#define UMBRA_JOIN(a, b) UMBRA_JOIN_(a, b)
#define UMBRA_JOIN_(a, b) a##b

namespace umbra::sample {

const Passes UMBRA_JOIN(UMBRA_ISA, _passes) = {
    UMBRA_ISA::max_of,  UMBRA_ISA::find,        UMBRA_ISA::clean,   UMBRA_ISA::penalise,
    UMBRA_ISA::scale,   UMBRA_ISA::sum_exp,     UMBRA_ISA::ordered_sum, UMBRA_ISA::collect,
    UMBRA_ISA::exp_each, UMBRA_ISA::log_of,     UMBRA_ISA::noisy_best,
};

}  // namespace umbra::sample
