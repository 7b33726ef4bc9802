// The attention kernels, compiled once per instruction set; attention.h says what they do.
//
// int8 pools: a query becomes 15-bit integers with one scale, weights (times the scale of their value) 15-bit integers
// with one scale for 32 tokens. Products are summed as int32, which is exact, so that no order has a say in the result.
// Float pools: the products of a query and a key are 16 partial sums (entries i, i + 16, ...), added as `sum` does;
// values are added token by token.
#include <type_traits>

#include "attention.h"
#include "attention_int16.h"
#include "lanes.h"

namespace umbra::UMBRA_ISA {
namespace {

constexpr float kInt16 = 32767.0f;
constexpr float kTiny = 1e-25f;    // weights below it count as zero where they share no scale with greater ones

UMBRA_INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
UMBRA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// e^x for x <= 0 to within 1 ulp or so, as `exp`, but cheaper: below -87.68 a number that is not normal, and so counts as
// zero in every operation (`FloatMode`).
UMBRA_INLINE F exp_weight(F x) {
  constexpr float kLow = -88.0f, kShift = 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const F inside = max(x, set(kLow));
  const F shifted = fma(inside, set(1.44269504f), set(kShift));
  const F k = shifted - set(kShift);
  F r = fma(k, set(-0.693359375f), inside);
  r = fma(k, set(2.12194440e-4f), r);
  F p = fma(set(1.9875691500e-4f), r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  const F value = fma(p, r * r, r) + set(1.0f);
  return from_bits(bits(value) + shl<23>(bits(shifted)));
}

// ---- types of pools

struct Float {
  using Wide = float;
};
struct Float32 : Float {
  using Stored = float;
};
struct BFloat16 : Float {
  using Stored = uint16_t;
};
struct Int8 {
  using Stored = int8_t;
  using Wide = int16_t;
};

UMBRA_INLINE F load_wide(const float* p) { return load(p); }
UMBRA_INLINE F load_wide(const uint16_t* p) { return load_bf16(p); }

// `size` entries as `padded` floats.
template <class Stored>
UMBRA_INLINE void widen(const Stored* from, int size, int padded, float* to) {
  const int whole = size & ~(kLanes - 1);
  for (int c = 0; c < whole; c += kLanes) store(to + c, load_wide(from + c));
  if (whole == padded) return;
  Stored rest[kLanes] = {};
  for (int c = whole; c < size; ++c) rest[c - whole] = from[c];
  store(to + whole, load_wide(rest));
}

// Calls `use(c, x)` for the 16 entries x from c on, the last ones with zeros behind.
template <class Use>
UMBRA_INLINE void each_sixteen(const int8_t* from, int size, Use&& use) {
  const int whole = size & ~(kLanes - 1);
  for (int c = 0; c < whole; c += kLanes) use(c, widened(from + c));
  if (whole == size) return;
  int8_t rest[kLanes] = {};
  for (int c = whole; c < size; ++c) rest[c - whole] = from[c];
  use(whole, widened(rest));
}

// ---- preparing queries, keys and values

// `x` [H], normalised and turned, in `row` (padded with zeros).
UMBRA_INLINE void prepare(const AttentionHead& head, const float* x, const float* weight, float eps, const float* turn,
                          float* row) {
  widen(x, head.size, head.padded, row);
  if (weight) {
    F squares = zero();
    for (int c = 0; c < head.padded; c += kLanes) {
      const F y = load(row + c);
      squares = fma(y, y, squares);
    }
    const float mean = sum(squares) * (1.0f / static_cast<float>(head.size));
    const F factor = set(1.0f / __builtin_sqrtf(mean + eps));
    for (int c = 0; c < head.size; c += kLanes) {
      const int n = head.size - c < kLanes ? head.size - c : kLanes;
      store(row + c, load(row + c) * factor * load(weight + c, n));
    }
  }
  if (turn) {
    const int half = head.size / 2;
    for (int c = 0; c < half; c += kLanes) {
      const int n = half - c < kLanes ? half - c : kLanes;
      const F cos = load(turn + c, n), sin = load(turn + half + c, n);
      const F low = load(row + c, n), high = load(row + half + c, n);
      store(row + c, fma(low, cos, neg(high * sin)), n);
      store(row + half + c, fma(high, cos, low * sin), n);
    }
  }
}

UMBRA_INLINE float greatest(const float* row, int padded) {
  F top = zero();
  for (int c = 0; c < padded; c += kLanes) top = max(top, abs(load(row + c)));
  return max(top);
}

template <class Kv>
void query(const AttentionHead& head, const float* x, const float* weight, float eps, const float* turn, void* wide,
           float* scale) {
  if constexpr (sizeof(typename Kv::Wide) == 4) {
    float* const row = static_cast<float*>(wide);
    prepare(head, x, weight, eps, turn, row);
    for (int c = 0; c < head.padded; c += kLanes) store(row + c, load(row + c) * set(head.scale));
    *scale = 1.0f;
  } else {
    float row[kMaxHead];
    prepare(head, x, weight, eps, turn, row);
    const float top = greatest(row, head.padded);
    const F inverse = set(top > kTiny ? kInt16 / top : 0.0f);
    int16_t* const to = static_cast<int16_t*>(wide);
    for (int c = 0; c < head.padded; c += kLanes) store_int16(to + c, round(load(row + c) * inverse));
    *scale = top * (1.0f / kInt16) * head.scale;
  }
}

// The scale rounded to float16, then used.
UMBRA_INLINE void store_int8(const float* row, const AttentionHead& head, int8_t* to, void* scale_to) {
  float top = greatest(row, head.padded) * (1.0f / 127.0f);
  top = top < 65504.0f ? top : 65504.0f;
  uint16_t half[kLanes];
  store_f16(half, set(top));
  float scale[kLanes];
  store(scale, load_f16(half));
  std::memcpy(scale_to, head.half_scales ? static_cast<const void*>(half) : scale, head.half_scales ? 2 : 4);
  const F inverse = set(scale[0] > 0.0f ? 1.0f / scale[0] : 0.0f);
  int8_t rounded[kMaxHead];
  for (int c = 0; c < head.padded; c += kLanes) {
    store_i8(rounded + c, round(min(set(127.0f), max(set(-127.0f), load(row + c) * inverse))));
  }
  std::memcpy(to, rounded, head.size);
}

UMBRA_INLINE void store_row(const float* row, const AttentionHead& head, int8_t* to, void* scale) {
  store_int8(row, head, to, scale);
}
UMBRA_INLINE void store_row(const float* row, const AttentionHead& head, float* to, void*) {
  std::memcpy(to, row, head.size * sizeof(float));
}
UMBRA_INLINE void store_row(const float* row, const AttentionHead& head, uint16_t* to, void*) {
  for (int c = 0; c < head.size; ++c) {
    uint32_t word;
    std::memcpy(&word, row + c, 4);
    const bool nan = (word & 0x7FFFFFFF) > 0x7F800000;
    to[c] = static_cast<uint16_t>(nan ? word >> 16 | 0x40 : (word + 0x7FFF + (word >> 16 & 1)) >> 16);
  }
}

template <class Kv>
void store_kv(const AttentionHead& head, const float* k, const float* v, const float* weight, float eps,
              const float* turn, void* values, void* k_scale, void* v_scale) {
  auto* const to = static_cast<typename Kv::Stored*>(values);
  float row[kMaxHead];
  prepare(head, k, weight, eps, turn, row);
  store_row(row, head, to, k_scale);
  widen(v, head.size, head.padded, row);
  store_row(row, head, to + head.size, v_scale);
}

// ---- one block

// Parts of the scratch memory.
template <class Kv>  // Float or Int8
struct Scratch {
  float* logits;              // [R, P]; for float pools then the weights
  int16_t* weights;           // [R, P], int8 only
  float* steps;               // [R, P / kSpan]: what integer weights are multiplied by; 0: the span adds nothing
  float* k_scales;            // [P]
  float* v_scales;            // [P]
  typename Kv::Wide* wide;    // [kSpan, padded]

  Scratch(void* memory, int rows) {
    logits = static_cast<float*>(memory);
    steps = logits + static_cast<int64_t>(rows) * kBlock;
    k_scales = steps + rows * (kBlock / kSpan);
    v_scales = k_scales + kBlock;
    wide = reinterpret_cast<typename Kv::Wide*>(v_scales + kBlock);
    weights = reinterpret_cast<int16_t*>(wide + kSpan * kMaxHead);
  }
};

struct Seen {  // tokens of a block, from `begin` to before `end`
  int begin, end;
};

UMBRA_INLINE Seen seen_by(const AttentionRows& rows, int token) {
  const int begin = rows.window ? rows.first + token : 0, end = rows.end + token;
  return {begin > 0 ? begin : 0, end < kBlock ? end : kBlock};
}

// The scales of a block; zero for tokens that no row sees, which may hold anything.
UMBRA_INLINE void load_scales(const AttentionHead& head, const void* from, Seen all, float* to) {
  for (int t = 0; t < kBlock; t += kLanes) {
    const F x = head.half_scales ? load_f16(static_cast<const uint16_t*>(from) + t)
                                 : load(static_cast<const float*>(from) + t);
    const I at = iota() + iset(t);
    store(to + t, select(gt(at, iset(all.begin - 1)) & gt(iset(all.end), at), x, zero()));
  }
}

// Brings in the cache lines of `next` that correspond to `n` bytes from `at` on.
UMBRA_INLINE void prefetch_part(const AttentionBlock& block, int64_t at, int64_t n) {
  const int64_t end = at + n < block.next_bytes ? at + n : block.next_bytes;
  for (int64_t i = at; i < end; i += 64) prefetch(static_cast<const char*>(block.next) + i);
}

// Logits of all rows for the keys [from, from + 8), without softcap and masks.
template <int kPadded>
UMBRA_INLINE void dot_rows(const AttentionRows& rows, const int16_t* keys, int padded_at_run_time,
                           const float* k_scales, float* logits) {
  const int padded = kPadded ? kPadded : padded_at_run_time;
  int r = 0;
  for (int i = 0; i < rows.tokens; ++i) {
    const int16_t* const q = static_cast<const int16_t*>(rows.queries) + i * rows.token_stride;
    for (int j = 0; j < rows.per_token; ++j, ++r) {
      dot_keys(q + j * padded, keys, padded, k_scales, rows.scales[i * rows.scale_stride + j], logits + r * kBlock);
    }
  }
}

template <int kPadded>
UMBRA_INLINE void dot_rows(const AttentionRows& rows, const float* keys, int padded_at_run_time, const float*,
                           float* logits) {
  const int padded = kPadded ? kPadded : padded_at_run_time;
  int r = 0;
  for (int i = 0; i < rows.tokens; ++i) {
    const float* const q = static_cast<const float*>(rows.queries) + i * rows.token_stride;
    for (int j = 0; j < rows.per_token; ++j, ++r) {
      F s[kKeys];
      for (auto& x : s) x = zero();
      for (int c = 0; c < padded; c += kLanes) {
        const F x = load(q + j * padded + c);
        for (int t = 0; t < kKeys; ++t) s[t] = fma(x, load(keys + t * padded + c), s[t]);
      }
      for (int t = 0; t < kKeys; ++t) logits[r * kBlock + t] = sum(s[t]);
    }
  }
}

UMBRA_INLINE void widen_key(const int8_t* from, int size, int, int16_t* to) {
  each_sixteen(from, size, [&](int c, auto x) { store_words(to + c, x); });
}
UMBRA_INLINE void widen_key(const float* from, int size, int padded, float* to) { widen(from, size, padded, to); }
UMBRA_INLINE void widen_key(const uint16_t* from, int size, int padded, float* to) { widen(from, size, padded, to); }

// ---- the rows of one token are few: widening a block in memory would cost more than it saves

#if defined(__AVX2__)
template <class Kv, int kPadded>
constexpr bool kHasFew = sizeof(typename Kv::Stored) == 1 && kPadded != 0;

template <int kRows>
struct Count {
  static constexpr int value = kRows;
};
// Calls `part(Count<n>(), first)` for one to four of the rows at a time.
template <class Part>
UMBRA_INLINE void in_fours(int rows, Part&& part) {
  int first = 0;
  for (; rows - first > 5 || rows - first == 4; first += 4) part(Count<4>(), first);
  if (rows - first == 5) part(Count<3>(), first), first += 3;
  if (rows - first == 3) part(Count<3>(), first);
  if (rows - first == 2) part(Count<2>(), first);
  if (rows - first == 1) part(Count<1>(), first);
}

template <int kPadded>
UMBRA_INLINE void dot_token(const AttentionRows& rows, const int8_t* keys, const float* k_scales, float* logits) {
  const int16_t* const q = static_cast<const int16_t*>(rows.queries);
  in_fours(rows.count, [&](auto n, int r) {
    dot_few<n.value>(q + r * kPadded, keys, kPadded, k_scales, rows.scales + r, logits + r * kBlock);
  });
}
template <int kPadded>
UMBRA_INLINE void weigh_token(const Scratch<Int8>& s, int rows, const int8_t* values, int from, int to,
                              float* weighted) {
  const int even = from & ~1, pairs = (to - even + 1) / 2;
  in_fours(rows, [&](auto n, int r) {
    for (int c = 0; c < kPadded; c += kLanes) {
      weigh_few<n.value>(s.weights + r * kBlock + even, values + even * 2 * kPadded + kPadded + c, pairs, kPadded,
                         s.steps + r * (kBlock / kSpan) + from / kSpan, weighted + r * kPadded + c);
    }
  });
}
#endif

// Logits for the keys that any row sees (and up to seven around them).
template <class Kv, int kPadded, class Width>
UMBRA_INLINE void dot_block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block, Seen all,
                            const Scratch<Width>& s) {
  const auto* const values = static_cast<const typename Kv::Stored*>(block.values);
  const int size = kPadded ? kPadded : head.size, padded = kPadded ? kPadded : head.padded;
  const int64_t bytes = sizeof(*values) * 2 * size;
  for (int from = all.begin & ~(kKeys - 1); from < all.end; from += kKeys) {
    prefetch_part(block, from * bytes / 2, kKeys * bytes / 2);  // `weigh_block` does the second half
#if defined(__AVX2__)
    if constexpr (kHasFew<Kv, kPadded>) {
      if (rows.tokens == 1) {
        dot_token<kPadded>(rows, values + from * 2 * size, s.k_scales + from, s.logits + from);
        continue;
      }
    }
#endif
    for (int t = 0; t < kKeys; ++t) widen_key(values + (from + t) * 2 * size, size, padded, s.wide + t * padded);
    dot_rows<kPadded>(rows, s.wide, padded, s.k_scales + from, s.logits + from);
  }
}

// What a row sees of `x` [P]: caps it, puts far below everything what the row does not see, and returns the greatest.
// Works on whole spans; those that the row does not see are left as they are.
UMBRA_INLINE float masked(const AttentionHead& head, Seen seen, float* x) {
  if (seen.begin == 0 && seen.end == kBlock && head.softcap == 0.0f) {
    F top = load(x);
    for (int t = kLanes; t < kBlock; t += kLanes) top = max(top, load(x + t));
    return max(top);
  }
  const F none = set(-2e38f);
  F top = none;
  for (int t = seen.begin / kSpan * kSpan; t < round_up(seen.end, kSpan); t += kLanes) {
    F y = load(x + t);
    if (head.softcap > 0.0f) {  // tanh(a) = 1 - 2 / (exp(2 a) + 1)
      const F twice = exp(y * set(2.0f / head.softcap));
      y = set(head.softcap) * (set(1.0f) - set(2.0f) / (twice + set(1.0f)));
    }
    const I at = iota() + iset(t);
    y = select(gt(at, iset(seen.begin - 1)) & gt(iset(seen.end), at), y, none);
    store(x + t, y);
    top = max(top, y);
  }
  return max(top);
}

// Logits of one row, capped and masked, to weights; their sum. In a float pool the weights are what values are multiplied
// by,
UMBRA_INLINE float soften(Seen seen, int row, float top, const Scratch<Float>& s) {
  float* const x = s.logits + row * kBlock;
  F total = zero();
  for (int t = seen.begin / kSpan * kSpan; t < round_up(seen.end, kSpan); t += kLanes) {
    const F y = exp_weight(load(x + t) - set(top));
    store(x + t, y);
    total = total + y;
  }
  return sum(total);
}
UMBRA_INLINE void quantise_weights(const AttentionRows&, const Scratch<Float>&) {}

// in an int8 pool the weights times the scales of the values, and the greatest of a span is noted.
UMBRA_INLINE float soften(Seen seen, int row, float top, const Scratch<Int8>& s) {
  float* const x = s.logits + row * kBlock;
  F total = zero();
  for (int span = 0; span < kBlock / kSpan; ++span) {
    F most = zero();
    if (span * kSpan < seen.end && (span + 1) * kSpan > seen.begin) {
      for (int t = span * kSpan; t < (span + 1) * kSpan; t += kLanes) {
        F y = exp_weight(load(x + t) - set(top));
        total = total + y;
        y = y * load(s.v_scales + t);
        store(x + t, y);
        most = max(most, y);
      }
    }
    s.steps[row * (kBlock / kSpan) + span] = max(most);
  }
  return sum(total);
}
// Weights as integers: with all rows in one go nothing waits for the division.
UMBRA_INLINE void quantise_weights(const AttentionRows& rows, const Scratch<Int8>& s) {
  constexpr int kSpans = kBlock / kSpan;
  for (int from = 0; from < rows.count * kSpans; from += kLanes) {
    const int n = rows.count * kSpans - from < kLanes ? rows.count * kSpans - from : kLanes;
    const F most = load(s.steps + from, n);
    const M counts = gt(most, set(kTiny));
    float inverse[kLanes];
    store(inverse, select(counts, set(kInt16) / most, zero()));
    store(s.steps + from, select(counts, most * set(1.0f / kInt16), zero()), n);
    for (int i = 0; i < n; ++i) {
      if (inverse[i] == 0.0f) continue;
      const int at = (from + i) * kSpan;
      const F factor = set(inverse[i]);
      store_int16(s.weights + at, round(load(s.logits + at) * factor));
      store_int16(s.weights + at + kLanes, round(load(s.logits + at + kLanes) * factor));
    }
  }
}

template <int kTiles>
UMBRA_INLINE void weigh_tile(const float* weights, const float* values, int tokens, int stride, float* weighted) {
  F s[kTiles];
  for (int i = 0; i < kTiles; ++i) s[i] = load(weighted + kLanes * i);
  for (int t = 0; t < tokens; ++t) {
    const F w = set(weights[t]);
    for (int i = 0; i < kTiles; ++i) s[i] = fma(w, load(values + t * stride + kLanes * i), s[i]);
  }
  for (int i = 0; i < kTiles; ++i) store(weighted + kLanes * i, s[i]);
}

// The values of the tokens [from, to) of one span, widened.
template <int kPadded>
UMBRA_INLINE void widen_values(const AttentionHead& head, const int8_t* values, int from, int to, int16_t* wide) {
  const int size = kPadded ? kPadded : head.size, padded = kPadded ? kPadded : head.padded;
  for (int t = from & ~1; t < to; t += 2, wide += 2 * padded) {
    const int8_t* const a = values + t * 2 * size + size;
    const int8_t* const b = a + 2 * size;
    const int whole = size & ~(kLanes - 1);
    for (int c = 0; c < whole; c += kLanes) pair_values(widened(a + c), widened(b + c), wide + 2 * c);
    if (whole == size) continue;
    int8_t rest[2][kLanes] = {};
    for (int c = whole; c < size; ++c) rest[0][c - whole] = a[c], rest[1][c - whole] = b[c];
    pair_values(widened(rest[0]), widened(rest[1]), wide + 2 * whole);
  }
}
template <int kPadded, class Stored>
UMBRA_INLINE void widen_values(const AttentionHead& head, const Stored* values, int from, int to, float* wide) {
  const int size = kPadded ? kPadded : head.size, padded = kPadded ? kPadded : head.padded;
  for (int t = from; t < to; ++t, wide += padded) widen(values + t * 2 * size + size, size, padded, wide);
}

// weighted += weights * values for the tokens [from, to) of one span, one row.
template <int kPadded>
UMBRA_INLINE void weigh_row(const Scratch<Int8>& s, int row, int from, int to, int padded_at_run_time,
                            float* weighted) {
  const int padded = kPadded ? kPadded : padded_at_run_time;
  const float step = s.steps[row * (kBlock / kSpan) + from / kSpan];
  if (step == 0.0f) return;
  const int even = from & ~1, pairs = (to - even + 1) / 2;
  const int16_t* const weights = s.weights + row * kBlock + even;
  int c = 0;
  for (; c + 64 <= padded; c += 64) weigh_tile<4>(weights, s.wide + 2 * c, pairs, 2 * padded, step, weighted + c);
  for (; c < padded; c += 16) weigh_tile<1>(weights, s.wide + 2 * c, pairs, 2 * padded, step, weighted + c);
}
template <int kPadded>
UMBRA_INLINE void weigh_row(const Scratch<Float>& s, int row, int from, int to, int padded_at_run_time, float* weighted) {
  const int padded = kPadded ? kPadded : padded_at_run_time;
  const float* const weights = s.logits + row * kBlock + from;
  int c = 0;
  for (; c + 64 <= padded; c += 64) weigh_tile<4>(weights, s.wide + c, to - from, padded, weighted + c);
  for (; c < padded; c += 16) weigh_tile<1>(weights, s.wide + c, to - from, padded, weighted + c);
}

// Values, weighted, of the tokens that any row sees.
template <class Kv, int kPadded, class Width>
UMBRA_INLINE void weigh_block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block, Seen all,
                              const Scratch<Width>& s, float* weighted) {
  const auto* const values = static_cast<const typename Kv::Stored*>(block.values);
  const int size = kPadded ? kPadded : head.size, padded = kPadded ? kPadded : head.padded;
  for (int span = all.begin / kSpan * kSpan; span < all.end; span += kSpan) {
    const int from = span < all.begin ? all.begin : span, to = span + kSpan < all.end ? span + kSpan : all.end;
    const int64_t bytes = static_cast<int64_t>(kSpan) * size * sizeof(*values);
    prefetch_part(block, block.next_bytes / 2 + span / kSpan * bytes, bytes);
#if defined(__AVX2__)
    if constexpr (kHasFew<Kv, kPadded>) {
      if (rows.tokens == 1) {
        weigh_token<kPadded>(s, rows.count, values, from, to, weighted);
        continue;
      }
    }
#endif
    widen_values<kPadded>(head, values, from, to, s.wide);
    for (int r = 0; r < rows.count; ++r) {
      const Seen seen = seen_by(rows, r / rows.per_token);
      if (seen.begin >= to || seen.end <= from) continue;  // its weights are not set
      weigh_row<kPadded>(s, r, from, to, padded, weighted + static_cast<int64_t>(r) * padded);
    }
  }
}

template <class Kv, int kPadded>
void attend_block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block,
                  const AttentionState& state, void* memory) {
  using Width = std::conditional_t<sizeof(typename Kv::Stored) == 1, Int8, Float>;
  const Scratch<Width> s(memory, rows.count);
  const int padded = kPadded ? kPadded : head.padded;
  const Seen all = {seen_by(rows, 0).begin, seen_by(rows, rows.tokens - 1).end};
  if constexpr (sizeof(typename Kv::Stored) == 1) {
    load_scales(head, block.k_scales, all, s.k_scales);
    load_scales(head, block.v_scales, all, s.v_scales);
  }
  dot_block<Kv, kPadded>(head, rows, block, all, s);
  for (int r = 0; r < rows.count; ++r) {
    const Seen seen = seen_by(rows, r / rows.per_token);
    state.top[r] = state.total[r] = 0.0f;
    for (int c = 0; c < padded; c += kLanes) store(state.weighted + static_cast<int64_t>(r) * padded + c, zero());
    if (seen.begin >= seen.end) continue;
    state.top[r] = masked(head, seen, s.logits + r * kBlock);
    state.total[r] = soften(seen, r, state.top[r], s);
  }
  quantise_weights(rows, s);
  weigh_block<Kv, kPadded>(head, rows, block, all, s, state.weighted);
}

template <class Kv>
void block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block,
           const AttentionState& state, void* memory) {
#if defined(__AVX2__)  // elsewhere the compiler gains nothing from it
  if (head.size == 64) return attend_block<Kv, 64>(head, rows, block, state, memory);
  if (head.size == 128) return attend_block<Kv, 128>(head, rows, block, state, memory);
#endif
  attend_block<Kv, 0>(head, rows, block, state, memory);
}

void merge(int rows, int padded, const AttentionState& into, const AttentionState& part) {
  for (int from = 0; from < rows; from += kLanes) {
    const int n = rows - from < kLanes ? rows - from : kLanes;
    const F total = load(into.total + from, n), top = select(gt(total, zero()), load(into.top + from, n), zero());
    const F part_top = load(part.top + from, n), part_total = load(part.total + from, n);
    const M any = gt(total, zero()), more = gt(part_total, zero());
    const F new_top = select(any & more, max(top, part_top), select(more, part_top, top));
    const F kept = select(any, exp(top - new_top), zero()), added = select(more, exp(part_top - new_top), zero());
    store(into.top + from, new_top, n);
    store(into.total + from, fma(total, kept, part_total * added), n);
    float factors[2][kLanes];
    store(factors[0], kept);
    store(factors[1], added);
    for (int r = 0; r < n; ++r) {
      float* const to = into.weighted + static_cast<int64_t>(from + r) * padded;
      const float* const in = part.weighted + static_cast<int64_t>(from + r) * padded;
      const F a = set(factors[0][r]), b = set(factors[1][r]);
      if (factors[1][r] == 0.0f) continue;  // and `kept` is 1
      if (factors[0][r] == 0.0f) {          // what is there may be nothing yet, not even numbers
        for (int c = 0; c < padded; c += kLanes) store(to + c, load(in + c) * b);
      } else {
        for (int c = 0; c < padded; c += kLanes) store(to + c, fma(load(to + c), a, load(in + c) * b));
      }
    }
  }
}

void finish(int size, const float* weighted, float total, float* out) {
  const F factor = set(total > 0.0f ? 1.0f / total : 0.0f);
  for (int c = 0; c < size; c += kLanes) {
    const int n = size - c < kLanes ? size - c : kLanes;
    store(out + c, load(weighted + c, n) * factor + zero(), n);  // adding 0 makes -0 a 0
  }
}

void mass(int64_t n, const float* tops, const float* totals, float top, float share, float* mass) {
  for (int64_t m = 0; m < n; m += kLanes) {
    const int count = n - m < kLanes ? static_cast<int>(n - m) : kLanes;
    const F there = load(totals + m, count) * exp(load(tops + m, count) - set(top));
    store(mass + m, fma(there, set(share), load(mass + m, count)), count);
  }
}

template <class Kv>
AttentionKernel kernel_of() {
  return {query<Kv>, store_kv<Kv>, block<Kv>, merge, finish, mass, static_cast<int>(sizeof(typename Kv::Wide))};
}

}  // namespace

AttentionKernel attention_kernel(KvType type) {
  if (type == KvType::f32) return kernel_of<Float32>();
  return type == KvType::bf16 ? kernel_of<BFloat16>() : kernel_of<Int8>();
}

}  // namespace umbra::UMBRA_ISA
