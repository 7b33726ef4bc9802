// The attention kernels, compiled once per instruction set; attention.h says what they do.
//
// int8 pools: queries and keys are spread (see `spread`). A query becomes 15-bit integers with one scale, weights (times
// the scale of their value) 15-bit integers with one scale for `kSpan` tokens. Products are summed as int32, which is exact, so that no order has a say in it.
// Float pools: the products of a query and a key are 16 partial sums (entries i, i + 16, ...), added as `sum` does;
// values are added token by token.
#include <type_traits>

#include "attention.h"
#include "attention_int16.h"
#if defined(__AMX_INT8__)
#include "attention_tiles.h"
#endif
#include "lanes.h"

namespace umbra::UMBRA_ISA {
namespace {

constexpr int kTile = 64;  // entries of values that are widened together
constexpr float kInt16 = 32767.0f;
constexpr float kLog2E = 1.44269504f;
constexpr float kTiny = 1e-25f;  // weights below it count as zero where they share no scale with greater ones

UMBRA_INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
UMBRA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// 2^x for x <= 0, exactly 1 at 0, relative error below 2e-7. Below -126.5 the result is zero or a number that is not
// normal, and so counts as zero in every operation (`FloatMode`). The polynomial is the minimax one that is 1 at 0.
UMBRA_INLINE F exp2_weight(F x) {
  constexpr float kLow = -127.0f, kShift = 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const F inside = max(x, set(kLow));
  const F shifted = inside + set(kShift);
  const F r = inside - (shifted - set(kShift)), r2 = r * r;
  const F low = fma(set(0.24022242f), r, set(0.693147f)), middle = fma(set(0.0096715130f), r, set(0.055507336f));
  const F poly = fma(fma(set(0.0013264727f), r2, middle), r2, low);
  return from_bits(bits(fma(poly, r, set(1.0f))) + shl<23>(bits(shifted)));
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

// The Hadamard transform of `row` [size], in parts of the largest power of two that divides its size: products of two
// rows stay the same, and an entry that is far greater than the others is spread over all of them.
UMBRA_INLINE void spread(float* row, int size) {
  const int part = size & -size;
  const F factor = set(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(part))));
  int step = 1;
  if (part >= kLanes) {
    for (int c = 0; c < size; c += kLanes) {
      store(row + c, paired<8>(paired<4>(paired<2>(paired<1>(load(row + c))))));
    }
    for (step = kLanes; step < part; step *= 2) {
      for (int at = 0; at < size; at += 2 * step) {
        for (int c = at; c < at + step; c += kLanes) {
          const F a = load(row + c), b = load(row + c + step);
          store(row + c, a + b);
          store(row + c + step, a - b);
        }
      }
    }
  }
  for (; step < part; step *= 2) {  // parts of less than 16
    for (int c = 0; c < size; ++c) {
      if (c & step) continue;
      const float a = row[c], b = row[c + step];
      row[c] = a + b, row[c + step] = a - b;
    }
  }
  for (int c = 0; c < size; c += kLanes) {
    const int n = size - c < kLanes ? size - c : kLanes;
    store(row + c, load(row + c, n) * factor, n);
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
    for (int c = 0; c < head.padded; c += kLanes) store(row + c, load(row + c) * set(head.scale * kLog2E));
    *scale = 1.0f;
  } else {
    float row[kMaxHead];
    prepare(head, x, weight, eps, turn, row);
    spread(row, head.size);
    const float top = greatest(row, head.padded);
    const F inverse = set(top > kTiny ? kInt16 / top : 0.0f);
    int16_t* const to = static_cast<int16_t*>(wide);
    for (int c = 0; c < head.padded; c += kLanes) store_int16(to + c, round(load(row + c) * inverse));
    *scale = top * (1.0f / kInt16) * (head.scale * kLog2E);
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
  if constexpr (sizeof(typename Kv::Stored) == 1) spread(row, head.size);
  store_row(row, head, to, k_scale);
  widen(v, head.size, head.padded, row);
  store_row(row, head, to + head.size, v_scale);
}

// ---- one block

// Parts of the scratch memory, of `attention_scratch` bytes, each on a cache line of its own.
template <class Kv>  // Float or Int8
struct Scratch {
  float* k_scales;          // [P]
  float* v_scales;          // [P]
  typename Kv::Wide* wide;  // keys or values, widened or turned: kWideBytes
  float* logits;            // [R, P]; for float pools then the weights
  int16_t* weights;         // [R, P], int8 only; with tiles [R, 2, P] bytes
  float* steps;             // [R, P / kSpan]: what integer weights are multiplied by; 0: the span adds nothing

  Scratch(void* memory, int rows) {
    rows = round_up(rows, kTileOfRows);
    k_scales = static_cast<float*>(memory);
    v_scales = k_scales + kBlock;
    wide = reinterpret_cast<typename Kv::Wide*>(v_scales + kBlock);
    logits = reinterpret_cast<float*>(reinterpret_cast<char*>(wide) + kWideBytes);
    weights = reinterpret_cast<int16_t*>(logits + static_cast<int64_t>(rows) * kBlock);
    steps = reinterpret_cast<float*>(weights + static_cast<int64_t>(rows) * kBlock);
  }
};

struct Seen {  // tokens of a block, from `begin` to before `end`
  int begin, end;
};

UMBRA_INLINE Seen seen_by(const AttentionRows& rows, int token) {
  const int begin = rows.window ? rows.first + token : 0, end = rows.end + token;
  return {begin > 0 ? begin : 0, end < kBlock ? end : kBlock};
}

// Which row: counted, since a division takes as long as a row's share of a tile.
struct Row {
  int token, head;

  Row(const AttentionRows& rows, int i) : token(i / rows.per_token), head(i % rows.per_token) {}
  __attribute__((always_inline)) void next(const AttentionRows& rows) {
    if (++head == rows.per_token) head = 0, ++token;
  }
};

// The scales of a block; zero for tokens that no row sees, which may hold anything.
UMBRA_INLINE void load_scales(const AttentionHead& head, const void* from, Seen all, float* to) {
  for (int t = 0; t < kBlock; t += kLanes) {
    const F x = head.half_scales ? load_f16(static_cast<const uint16_t*>(from) + t)
                                 : load(static_cast<const float*>(from) + t);
    const I at = iota() + iset(t);
    store(to + t, select(gt(at, iset(all.begin - 1)) & gt(iset(all.end), at), x, zero()));
  }
}

// Brings in `n` bytes of the values that are read next, `at` of which were brought in before. A few lines at a time, all
// along: a burst would wait for itself. Lines of the four quarters in turn: four streams fill the bus better than one.
UMBRA_INLINE void prefetch_part(const AttentionBlock& block, int64_t at, int64_t n) {
  if (!block.next) return;
  const auto* const next = static_cast<const char*>(block.next);
  for (int64_t i = at / 64; i < (at + n) / 64; ++i) prefetch(next + i % 4 * block.quarter + i / 4 * 64);
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
constexpr bool kFast = sizeof(typename Kv::Stored) == 1 && kPadded != 0;

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
UMBRA_INLINE void weigh_token(const AttentionBlock& block, const Scratch<Int8>& s, int rows, int from, int to,
                              float* weighted) {
  const int8_t* const values = static_cast<const int8_t*>(block.values);
  const int even = from & ~1, pairs = (to - even + 1) / 2;
  in_fours(rows, [&](auto n, int r) {
    for (int c = 0; c < kPadded; c += kLanes) {
      if (r == 0) prefetch_part(block, kBlock * kPadded + from / kSpan * kSpan * kPadded + c * kSpan, kLanes * kSpan);
      weigh_few<n.value>(s.weights + r * kBlock + even, values + even * 2 * kPadded + kPadded + c, pairs, kPadded,
                         s.steps + r * (kBlock / kSpan) + from / kSpan, weighted + r * kPadded + c);
    }
  });
}
#endif

// ---- many rows

#if defined(__AVX2__)
constexpr int kManyRows = 16;  // from here on turning the keys pays

// The same as `dot_block`.
template <int kPadded>
UMBRA_INLINE void dot_many(const AttentionRows& rows, const AttentionBlock& block, Seen all, const Scratch<Int8>& s) {
  const int8_t* const keys = static_cast<const int8_t*>(block.values);
  int32_t* const turned = reinterpret_cast<int32_t*>(s.wide);
  for (int t = all.begin & ~(kLanes - 1); t < all.end; t += kLanes) {
    prefetch_part(block, t * kPadded, kLanes * kPadded);
    for (int i = 0; i < kLanes; i += 8) {
      for (int c = 0; c < kPadded; c += kLanes) {
        turn_keys(keys + (t + i) * 2 * kPadded + c, 2 * kPadded, turned + c / 2 * kLanes + i);
      }
    }
    const int16_t* token = static_cast<const int16_t*>(rows.queries);
    const float* scales = rows.scales;
    int head = 0;
    for (int r = 0; r < rows.count; r += kTogether) {
      const int16_t* q[kTogether];
      float factors[kTogether];
      for (int i = 0; i < kTogether; ++i) {
        q[i] = token + head * kPadded;
        factors[i] = scales[head];
        if (r + i + 1 >= rows.count) continue;  // the last row again, if they do not come out even
        if (++head == rows.per_token) head = 0, token += rows.token_stride, scales += rows.scale_stride;
      }
      dot_turned(q, turned, kPadded, s.k_scales + t, factors, s.logits + r * kBlock + t);
    }
  }
}
#endif

// ---- tiles

#if defined(__AMX_INT8__)
constexpr int kFewRows = 4;  // for which tiles do not pay

template <int kPadded>
UMBRA_INLINE void dot_with_tiles(const AttentionRows& rows, const AttentionBlock& block, Seen all,
                                 const Scratch<Int8>& s) {
  constexpr int kParts = kPadded / kTileBytes, kKeysBytes = kLanes * kPadded;
  const auto* const keys = static_cast<const int8_t*>(block.values);
  auto* const turned = reinterpret_cast<int8_t*>(s.wide);
  static_assert(kBlock * kPadded <= kWideBytes);
  const auto turn = [&](int t) __attribute__((always_inline)) {
    prefetch_part(block, t * kKeysBytes, kKeysBytes);
    for (int part = 0; part < kParts; ++part) {
      turn_keys(keys + 2 * t * kKeysBytes + part * kTileBytes, 2 * kPadded,
                turned + (t * kParts + part) * kLanes * kTileBytes);
    }
  };
  const bool once = rows.count <= kTileRows;  // then keys are turned on the way, and less is brought in at a time
  if (!once)
    for (int t = all.begin / kLanes; t < round_up(all.end, kLanes) / kLanes; ++t) turn(t);
  alignas(64) int8_t upper[kTileRows * kPadded], lower[kTileRows * kPadded];
  for (int r = 0; r < rows.count; r += kTileRows) {
    const int n = rows.count - r < kTileRows ? rows.count - r : kTileRows;
    float factors[kTileRows];
    Row row(rows, r);
    for (int i = 0; i < n; ++i, row.next(rows)) {
      factors[i] = rows.scales[row.token * rows.scale_stride + row.head];
      const int16_t* const q = static_cast<const int16_t*>(rows.queries) + row.token * rows.token_stride + row.head * kPadded;
      for (int c = 0; c < kPadded; c += kTileBytes) {
        split_words(_mm512_loadu_si512(q + c), _mm512_loadu_si512(q + c + 32), upper + i * kPadded + c,
                    lower + i * kPadded + c);
      }
    }
    const Seen first = seen_by(rows, r / rows.per_token), last = seen_by(rows, (r + n - 1) / rows.per_token);
    const int begin = first.begin / kLanes, end = round_up(last.end, kLanes) / kLanes;
    if (begin >= end) continue;
    dot_tiles<kPadded>(upper, lower, n, turned + begin * kKeysBytes, end - begin, s.k_scales + begin * kLanes, factors,
                       s.logits + r * kBlock + begin * kLanes, [&](int tile) __attribute__((always_inline)) {
                         if (once) turn(begin + tile);
                       });
  }
}

template <int kPadded>
UMBRA_INLINE void weigh_with_tiles(const AttentionRows& rows, const AttentionBlock& block, Seen all,
                                   const Scratch<Int8>& s, float* weighted) {
  constexpr int kSpans = kBlock / kSpan, kValuesBytes = kSpan * kPadded;
  const auto* const values = static_cast<const int8_t*>(block.values);
  auto* const turned = reinterpret_cast<int8_t*>(s.wide);
  const int begin = all.begin / kSpan, end = round_up(all.end, kSpan) / kSpan;
  for (int span = begin; span < end; ++span) {  // all of them first: a product waits for what was stored just before
    for (int c = 0; c < kPadded; c += kTileBytes) {
      prefetch_part(block, kBlock * kPadded + span * kValuesBytes + c * kSpan, kTileBytes * kSpan);
      turn_values(values + 2 * span * kValuesBytes + kPadded + c, 2 * kPadded, turned + span * kValuesBytes + c * kSpan);
    }
  }
  for (int r = 0; r < rows.count; r += kTileRows) {
    const int n = rows.count - r < kTileRows ? rows.count - r : kTileRows;
    for (int span = begin; span < end; ++span) {
      const float* const steps = s.steps + r * kSpans + span;
      bool any = false;
      for (int i = 0; i < n; ++i) any |= steps[i * kSpans] != 0.0f;
      if (!any) continue;
      for (int c = 0; c < kPadded; c += kTileBytes) {
        weigh_tiles(reinterpret_cast<const int8_t*>(s.weights + r * kBlock) + span * kSpan, n,
                    turned + span * kValuesBytes + c * kSpan, steps, kPadded,
                    weighted + static_cast<int64_t>(r) * kPadded + c);
      }
    }
  }
}
#endif

// Logits for the keys that any row sees (and a few around them).
template <class Kv, int kPadded, bool tiles, class Width>
UMBRA_INLINE void dot_block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block, Seen all,
                            const Scratch<Width>& s) {
  const auto* const values = static_cast<const typename Kv::Stored*>(block.values);
  const int size = kPadded ? kPadded : head.size, padded = kPadded ? kPadded : head.padded;
  const int64_t bytes = sizeof(*values) * 2 * size;
#if defined(__AMX_INT8__)
  if constexpr (tiles) return dot_with_tiles<kPadded>(rows, block, all, s);
#endif
#if defined(__AVX2__)
  if constexpr (kFast<Kv, kPadded>) {
    if (rows.count >= kManyRows) return dot_many<kPadded>(rows, block, all, s);
  }
#endif
  for (int from = all.begin & ~(kKeys - 1); from < all.end; from += kKeys) {
    prefetch_part(block, from * bytes / 2, kKeys * bytes / 2);  // `weigh_block` does the second half
#if defined(__AVX2__)
    if constexpr (kFast<Kv, kPadded>) {
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

// What a row sees of `x` [P]: caps it, puts far below everything what the row does not see, and returns lanes of which
// one is the greatest. Works on whole spans; those that the row does not see are left as they are.
UMBRA_INLINE F masked(const AttentionHead& head, Seen seen, float* x) {
  if (seen.begin == 0 && seen.end == kBlock && head.softcap == 0.0f) {
    F top = load(x);
    for (int t = kLanes; t < kBlock; t += kLanes) top = max(top, load(x + t));
    return top;
  }
  const F none = set(-2e38f);
  F top = none;
  for (int t = seen.begin / kSpan * kSpan; t < round_up(seen.end, kSpan); t += kLanes) {
    F y = load(x + t);
    if (head.softcap > 0.0f) {  // tanh(a) = 1 - 2 / (exp(2 a) + 1)
      const F twice = exp(y * set(2.0f / (head.softcap * kLog2E)));
      y = set(head.softcap * kLog2E) * (set(1.0f) - set(2.0f) / (twice + set(1.0f)));
    }
    const I at = iota() + iset(t);
    y = select(gt(at, iset(seen.begin - 1)) & gt(iset(seen.end), at), y, none);
    store(x + t, y);
    top = max(top, y);
  }
  return top;
}

// Logits of one row (times log2 e), capped and masked, to weights; lanes whose sum is theirs. In a float pool the weights
// are what values are multiplied by,
UMBRA_INLINE F soften(Seen seen, int row, float top, const Scratch<Float>& s, F*) {
  float* const x = s.logits + row * kBlock;
  F total = zero();
  for (int t = seen.begin / kSpan * kSpan; t < round_up(seen.end, kSpan); t += kLanes) {
    const F y = exp2_weight(load(x + t) - set(top));
    store(x + t, y);
    total = total + y;
  }
  return total;
}
template <bool tiles>
UMBRA_INLINE void quantise_weights(const AttentionRows&, const Scratch<Float>&) {}

// in an int8 pool the weights times the scales of the values; one lane of `most` is the greatest of each span.
UMBRA_INLINE F soften(Seen seen, int row, float top, const Scratch<Int8>& s, F* most) {
  float* const x = s.logits + row * kBlock;
  F total = zero();
  for (int span = 0; span < kBlock / kSpan; ++span) {
    most[span] = zero();
    if (span * kSpan < seen.end && (span + 1) * kSpan > seen.begin) {
      for (int t = span * kSpan; t < (span + 1) * kSpan; t += kLanes) {
        F y = exp2_weight(load(x + t) - set(top));
        total = total + y;
        y = y * load(s.v_scales + t);
        store(x + t, y);
        most[span] = max(most[span], y);
      }
    }
  }
  return total;
}
// Weights as integers: with all rows in one go nothing waits for the division.
template <bool tiles>
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
#if defined(__AMX_INT8__)
      if constexpr (tiles) {
        __m512i x[kSpan / kLanes];
        for (int t = 0; t < kSpan; t += kLanes) x[t / kLanes] = round(load(s.logits + at + t) * factor).a;
        store_weights(s.weights + at / kBlock * kBlock, at % kBlock, x);
        continue;
      }
#endif
      for (int t = at; t < at + kSpan; t += kLanes) store_int16(s.weights + t, round(load(s.logits + t) * factor));
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

// Entries [c, c + width) of the values of the tokens [from, to), widened: `width` a token, zeros behind the last one.
UMBRA_INLINE void widen_values(const int8_t* values, int size, int c, int width, int from, int to, int16_t* wide) {
  const int n = size - c < width ? size - c : width, whole = n & ~(kLanes - 1);
  for (int t = from & ~1; t < to; t += 2, wide += 2 * width) {
    const int8_t* const a = values + t * 2 * size + size + c;
    const int8_t* const b = a + 2 * size;
    for (int i = 0; i < whole; i += kLanes) pair_values(widened(a + i), widened(b + i), wide + 2 * i);
    if (whole == n) continue;
    int8_t rest[2][kLanes] = {};
    for (int i = whole; i < n; ++i) rest[0][i - whole] = a[i], rest[1][i - whole] = b[i];
    pair_values(widened(rest[0]), widened(rest[1]), wide + 2 * whole);
  }
}
template <class Stored>
UMBRA_INLINE void widen_values(const Stored* values, int size, int c, int width, int from, int to, float* wide) {
  const int n = size - c < width ? size - c : width;
  for (int t = from; t < to; ++t, wide += width) widen(values + t * 2 * size + size + c, n, width, wide);
}

// weighted += weights * values for the tokens [from, to) of one span, `width` entries of every row.
UMBRA_INLINE void weigh_rows(const AttentionRows& rows, const Scratch<Int8>& s, int from, int to, int width, int padded,
                             float* weighted) {
  const int even = from & ~1, pairs = (to - even + 1) / 2;
  for (int r = 0; r < rows.count; r += 2) {
    const int16_t* const weights = s.weights + r * kBlock + even;
    const float* const steps = s.steps + r * (kBlock / kSpan) + from / kSpan;
    float* const out = weighted + static_cast<int64_t>(r) * padded;
    const int stride = 2 * width;
    const bool two = r + 1 < rows.count;
    if (steps[0] == 0.0f && (!two || steps[kBlock / kSpan] == 0.0f)) continue;
    int c = 0;
    if (two) {
      for (; c + 32 <= width; c += 32) weigh_tile<2, 2>(weights, s.wide + 2 * c, pairs, stride, steps, padded, out + c);
      for (; c < width; c += 16) weigh_tile<2, 1>(weights, s.wide + 2 * c, pairs, stride, steps, padded, out + c);
    } else {
      for (; c + 64 <= width; c += 64) weigh_tile<1, 4>(weights, s.wide + 2 * c, pairs, stride, steps, padded, out + c);
      for (; c < width; c += 16) weigh_tile<1, 1>(weights, s.wide + 2 * c, pairs, stride, steps, padded, out + c);
    }
  }
}
UMBRA_INLINE void weigh_rows(const AttentionRows& rows, const Scratch<Float>& s, int from, int to, int width,
                             int padded, float* weighted) {
  for (int r = 0; r < rows.count; ++r) {
    const Seen seen = seen_by(rows, r / rows.per_token);
    if (seen.begin >= to || seen.end <= from) continue;  // its weights are not set
    const float* const weights = s.logits + r * kBlock + from;
    float* const out = weighted + static_cast<int64_t>(r) * padded;
    int c = 0;
    for (; c + 64 <= width; c += 64) weigh_tile<4>(weights, s.wide + c, to - from, width, out + c);
    for (; c < width; c += 16) weigh_tile<1>(weights, s.wide + c, to - from, width, out + c);
  }
}

// Values, weighted, of the tokens that any row sees.
template <class Kv, int kPadded, bool tiles, class Width>
UMBRA_INLINE void weigh_block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block,
                              Seen all, const Scratch<Width>& s, float* weighted) {
  const auto* const values = static_cast<const typename Kv::Stored*>(block.values);
  const int size = kPadded ? kPadded : head.size, padded = kPadded ? kPadded : head.padded;
#if defined(__AMX_INT8__)
  if constexpr (tiles) return weigh_with_tiles<kPadded>(rows, block, all, s, weighted);
#endif
  for (int span = all.begin / kSpan * kSpan; span < all.end; span += kSpan) {
    const int from = span < all.begin ? all.begin : span, to = span + kSpan < all.end ? span + kSpan : all.end;
#if defined(__AVX2__)
    if constexpr (kFast<Kv, kPadded>) {
      if (rows.tokens == 1) {
        weigh_token<kPadded>(block, s, rows.count, from, to, weighted);
        continue;
      }
    }
#endif
    const int64_t bytes = static_cast<int64_t>(kSpan) * size * sizeof(*values);
    prefetch_part(block, kBlock / kSpan * bytes + span / kSpan * bytes, bytes);
    for (int c = 0; c < padded; c += kTile) {
      const int width = padded - c < kTile ? padded - c : kTile;
      widen_values(values, size, c, width, from, to, s.wide);
      weigh_rows(rows, s, from, to, width, padded, weighted + c);
    }
  }
}

// Logits of all rows to weights, their greatest and their sums. One row after the other,
template <class Width>
UMBRA_INLINE void soften_rows(const AttentionHead& head, const AttentionRows& rows, const Scratch<Width>& s,
                              const AttentionState& state) {
  constexpr int kSpans = kBlock / kSpan;
  for (int r = 0; r < rows.count; ++r) {
    const Seen seen = seen_by(rows, r / rows.per_token);
    state.top[r] = state.total[r] = 0.0f;
    F most[kSpans];
    for (auto& x : most) x = zero();
    if (seen.begin < seen.end) {
      state.top[r] = max(masked(head, seen, s.logits + r * kBlock));
      state.total[r] = sum(soften(seen, r, state.top[r], s, most));
    }
    for (int i = 0; i < kSpans; ++i) s.steps[r * kSpans + i] = max(most[i]);
  }
}

// or sixteen at a time, so that no row waits for what its lanes come to.
UMBRA_INLINE void soften_sixteen(const AttentionHead& head, const AttentionRows& rows, int first,
                                 const Scratch<Int8>& s, const AttentionState& state) {
  constexpr int kSpans = kBlock / kSpan;
  const int n = rows.count - first < kLanes ? rows.count - first : kLanes;
  F lanes[kLanes], most[kSpans][kLanes];
  Seen seen[kLanes];
  Row row(rows, first);
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = zero();
    for (auto& x : most) x[i] = zero();
    if (i >= n) continue;
    seen[i] = seen_by(rows, row.token);
    row.next(rows);
    if (seen[i].begin < seen[i].end) lanes[i] = masked(head, seen[i], s.logits + (first + i) * kBlock);
  }
  float tops[kLanes];
  store(tops, max_each(lanes));
  store(state.top + first, load(tops), n);
  for (int i = 0; i < n; ++i) {
    if (seen[i].begin >= seen[i].end) continue;
    F spans[kSpans];
    lanes[i] = soften(seen[i], first + i, tops[i], s, spans);
    for (int span = 0; span < kSpans; ++span) most[span][i] = spans[span];
  }
  store(state.total + first, sum_each(lanes), n);
  for (int span = 0; span < kSpans; ++span) {
    float greatest[kLanes];
    store(greatest, max_each(most[span]));
    for (int i = 0; i < n; ++i) s.steps[(first + i) * kSpans + span] = greatest[i];
  }
}

template <class Kv, int kPadded, bool tiles>
void attend_rows(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block,
                  const AttentionState& state, void* memory) {
  using Width = std::conditional_t<sizeof(typename Kv::Stored) == 1, Int8, Float>;
  const int padded = kPadded ? kPadded : head.padded;
  const Scratch<Width> s(memory, rows.count);
  const Seen all = {seen_by(rows, 0).begin, seen_by(rows, rows.tokens - 1).end};
  if constexpr (sizeof(typename Kv::Stored) == 1) {
    if (block.next_scales) {
      for (int i = 0; i < 2 * kBlock * (head.half_scales ? 2 : 4); i += 64) {
        prefetch(static_cast<const char*>(block.next_scales) + i);
      }
    }
    load_scales(head, block.k_scales, all, s.k_scales);
    load_scales(head, block.v_scales, all, s.v_scales);
  }
  dot_block<Kv, kPadded, tiles>(head, rows, block, all, s);
  if constexpr (tiles) {
    for (int r = 0; r < rows.count; r += kLanes) soften_sixteen(head, rows, r, s, state);
  } else {
    soften_rows(head, rows, s, state);
  }
  for (int64_t c = 0; c < static_cast<int64_t>(rows.count) * padded; c += kLanes) store(state.weighted + c, zero());
  quantise_weights<tiles>(rows, s);
  weigh_block<Kv, kPadded, tiles>(head, rows, block, all, s, state.weighted);
}

template <class Kv, int kPadded>
void attend_block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block,
                  const AttentionState& state, void* memory) {
#if defined(__AMX_INT8__)
  if constexpr (kFast<Kv, kPadded>) {
    if (rows.count > kFewRows) {
      const RowTiles shaped(rows.count);
      return attend_rows<Kv, kPadded, true>(head, rows, block, state, memory);
    }
  }
#endif
  attend_rows<Kv, kPadded, false>(head, rows, block, state, memory);
}

template <class Kv>
void block(const AttentionHead& head, const AttentionRows& rows, const AttentionBlock& block,
           const AttentionState& state, void* memory) {
#if defined(__AVX2__)  // elsewhere the compiler gains nothing from it
  if (head.size == 64) return attend_block<Kv, 64>(head, rows, block, state, memory);
  if (head.size == 128) return attend_block<Kv, 128>(head, rows, block, state, memory);
  if (head.size == 256) return attend_block<Kv, 256>(head, rows, block, state, memory);
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
    const F kept = select(any, exp2_weight(top - new_top), zero());
    const F added = select(more, exp2_weight(part_top - new_top), zero());
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
    const F total = load(totals + m, count), factor = exp2_weight(load(tops + m, count) - set(top));
    const F there = select(gt(total, zero()), total * factor, zero());
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
