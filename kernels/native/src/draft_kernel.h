// The steps of `draft.h` for one instruction set.
#include "draft.h"
#include "lanes.h"
#include "noise.h"
#include "numerics.h"

namespace umbra::UMBRA_ISA {
namespace {

using draft::kHeadRows;
using draft::Match;
using draft::Top;

constexpr float kInf = __builtin_inff();

// Lanes [i, i + 16) of n; zeros behind the end.
UMBRA_INLINE F part(const float* x, int64_t i, int64_t n) {
  return n - i >= 16 ? load(x + i) : load(x + i, static_cast<int>(n - i));
}
UMBRA_INLINE void put(float* x, int64_t i, int64_t n, F value) {
  if (n - i >= 16) store(x + i, value);
  else store(x + i, value, static_cast<int>(n - i));
}

// --- lookup ---

Match find_match(const int32_t* history, int64_t limit, const int32_t* tail, int64_t known) {
  Match best{0, 0};
  if (known < draft::kShortestMatch) return best;
  const auto look = [&](int64_t end) {  // at an occurrence of two tokens; whether it cannot be beaten
    const int64_t beaten = best.length;
    if (beaten && (end < beaten || history[end - beaten] != tail[beaten])) return false;
    int64_t length = draft::kShortestMatch;
    while (length < known && length <= end && history[end - length] == tail[length]) ++length;
    if (length > best.length) best = {length, end + 1};
    return length == known;
  };
  const I last = iset(tail[0]), before = iset(tail[1]);
  int64_t high = limit;  // ends in [1, high) are still to be looked at
  for (; high >= 17; high -= 16) {
    const int64_t low = high - 16;
    uint32_t found = mask_bits(eq(load(history + low), last) & eq(load(history + low - 1), before));
    while (found) {
      const int lane = 31 - __builtin_clz(found);
      found ^= 1u << lane;
      if (look(low + lane)) return best;
    }
  }
  for (int64_t end = high - 1; end >= 1; --end) {
    if (history[end] == tail[0] && history[end - 1] == tail[1] && look(end)) return best;
  }
  return best;
}

// --- the network ---

void normalise(const float* x, int64_t n, float epsilon, float* y) {
  F total = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F value = part(x, i, n);
    total = fma(value, value, total);
  }
  const float mean = sum(total) * (1.0f / static_cast<float>(n));
  const F inverse = set(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int64_t i = 0; i < n; i += 16) put(y, i, n, part(x, i, n) * inverse);
}

// Sums of M rows and 16 C columns; the last column register may be a part of one.
template <int M, int C>
UMBRA_INLINE void columns_of(const float* const* x, int64_t in, const float* w, int64_t stride, int64_t n,
                             float* const* y, int64_t at) {
  F sums[M][C];
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < C; ++c) sums[m][c] = zero();
  for (int64_t i = 0; i < in; ++i) {
    const float* const row = w + i * stride + at;
#if defined(__AVX2__)
    for (int c = 0; c < C; ++c) _mm_prefetch(reinterpret_cast<const char*>(row + 12 * stride + 16 * c), _MM_HINT_T0);
#endif
    for (int c = 0; c < C; ++c) {
      const F value = part(row, 16 * c, n);
      for (int m = 0; m < M; ++m) sums[m][c] = fma(set(x[m][i]), value, sums[m][c]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < C; ++c) put(y[m] + at, 16 * c, n, sums[m][c]);
}

template <int M>
void product_rows(const float* const* x, int64_t in, const float* w, int64_t stride, int64_t first, int64_t n,
                  float* const* y) {
  const int64_t end = first + n;
  int64_t at = first;
  for (; at + 48 <= end; at += 48) columns_of<M, 3>(x, in, w, stride, 48, y, at);
  for (; at < end; at += 16) columns_of<M, 1>(x, in, w, stride, end - at < 16 ? end - at : 16, y, at);
}

void product(const float* const* x, int64_t rows, int64_t in, const float* w, int64_t stride, int64_t first, int64_t n,
             float* const* y) {
  int64_t m = 0;
  for (; m + 2 <= rows; m += 2) product_rows<2>(x + m, in, w, stride, first, n, y + m);
  if (m < rows) product_rows<1>(x + m, in, w, stride, first, n, y + m);
}

void read(const int8_t* row, float scale, const float* step, int64_t n, float* u) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(u + i, fma(to_float(load_i8(row + i)), set(scale), load(step + i)));
  for (; i < n; ++i) u[i] = __builtin_fmaf(static_cast<float>(row[i]), scale, step[i]);
}

UMBRA_INLINE F sigmoid(F x) { return set(1.0f) / (set(1.0f) + exp(neg(x))); }

void cell(const draft::Cell& cell, const float* gate, const float* candidate, const float* u, const float* z,
          const float* s, int64_t first, int64_t n, float* next) {
  const int64_t end = first + n;
  for (int64_t i = first; i < end; i += 16) {
    const F read = part(u, i, end), context = part(z, i, end), before = part(s, i, end);
    F g = part(gate, i, end) + part(cell.bias_g, i, end);
    g = fma(part(cell.gate_z, i, end), context, fma(part(cell.gate_u, i, end), read, g));
    const F c = part(candidate, i, end) + read + context + part(cell.bias_c, i, end);
    const F keep = sigmoid(g), proposed = tanh(c);
    put(next, i, end, fma(keep, before - proposed, proposed));
  }
}

void silu(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const F value = part(x, i, n);
    put(x, i, n, value / (set(1.0f) + exp(neg(value))));
  }
}

void add(const float* a, const float* b, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; i += 16) put(sum, i, n, part(sum, i, n) + (part(a, i, n) + part(b, i, n)));
}

float dot(const float* a, const float* b, int64_t n) {
  F total = zero();
  for (int64_t i = 0; i < n; i += 16) total = fma(part(a, i, n), part(b, i, n), total);
  return sum(total);
}

UMBRA_INLINE float first_of(F x) {
  float lanes[16];
  store(lanes, x);
  return lanes[0];
}

float log_of(float x) { return x == x ? first_of(numerics::log(set(x))) : x; }
float exp_of(float x) { return first_of(exp(set(x))); }
float sigmoid_of(float x) { return first_of(sigmoid(set(x))); }

// --- the head ---

float quantise(const float* x, int64_t n, int32_t limit, int16_t* q) {
  F largest = zero();
  bool finite = true;
  for (int64_t i = 0; i < n; i += 16) {
    const F size = abs(part(x, i, n));
    largest = max(size, largest);
    finite = finite && mask_bits(lt(size, set(kInf))) == 0xFFFF;
  }
  const float size = max(largest);
  const bool some = finite && size >= 0x1p-100f;
  const F factor = set(some ? static_cast<float>(limit) / size : 0.0f);
  for (int64_t i = 0; i < (n + 31) / 32 * 32; i += 16) {
    int32_t lanes[16] = {};
    if (some && i < n) store(lanes, round(part(x, i, n) * factor));
    for (int j = 0; j < 16; ++j) q[i + j] = static_cast<int16_t>(lanes[j]);
  }
  return some ? size / static_cast<float>(limit) : finite ? 0.0f : __builtin_nanf("");
}

#if defined(__AVX2__)

#if defined(__AVX512F__)
using Sum = __m512i;
constexpr int kStep = 32;
inline Sum none() { return _mm512_setzero_si512(); }
inline Sum wide(const int8_t* w) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
}
inline Sum words(const int16_t* x) { return _mm512_loadu_si512(x); }
inline Sum add_products(Sum sum, Sum w, Sum x) { return _mm512_dpwssd_epi32(sum, w, x); }
inline __m256i folded(Sum sum) {
  return _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
}
#else
using Sum = __m256i;
constexpr int kStep = 16;
inline Sum none() { return _mm256_setzero_si256(); }
inline Sum wide(const int8_t* w) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}
inline Sum words(const int16_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
inline Sum add_products(Sum sum, Sum w, Sum x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
inline __m256i folded(Sum sum) { return sum; }
#endif

// The sums over the lanes of four registers.
inline void store_sums(const Sum* sums, int32_t* out) {
  const __m256i low = _mm256_hadd_epi32(folded(sums[0]), folded(sums[1]));
  const __m256i high = _mm256_hadd_epi32(folded(sums[2]), folded(sums[3]));
  const __m256i four = _mm256_hadd_epi32(low, high);
  const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), both);
}

// Four rows and M vectors.
template <int M>
inline void four_rows(const int8_t* const* w, int64_t width, const int16_t* const* x, int32_t (&out)[M][4]) {
  Sum sums[M][4];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < 4; ++r) sums[m][r] = none();
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) {
    for (int r = 0; r < 4; ++r) {
      const Sum weights = wide(w[r] + i);
      for (int m = 0; m < M; ++m) sums[m][r] = add_products(sums[m][r], weights, words(x[m] + i));
    }
  }
  if (i < width) {
    for (int r = 0; r < 4; ++r) {
      int8_t tail[kStep] = {};
      std::memcpy(tail, w[r] + i, static_cast<size_t>(width - i));
      for (int m = 0; m < M; ++m) sums[m][r] = add_products(sums[m][r], wide(tail), words(x[m] + i));
    }
  }
  for (int m = 0; m < M; ++m) store_sums(sums[m], out[m]);
}

// Rows from four places: one stream alone does not fill the memory bus.
template <int M>
void dots_of(const int8_t* w, int64_t rows, int64_t width, const int16_t* const* x, int32_t* const* out) {
  constexpr int64_t kAhead = 8;  // rows
  const int64_t each = (rows + 3) / 4;
  for (int64_t row = 0; row < each; ++row) {
    const int8_t* four[4];
    for (int r = 0; r < 4; ++r) {
      four[r] = w + (row + (row + r * each < rows ? r * each : 0)) * width;
      for (int64_t line = 0; line < width; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(four[r] + kAhead * width + line), _MM_HINT_T0);
    }
    int32_t all[M][4];
    four_rows<M>(four, width, x, all);
    for (int m = 0; m < M; ++m) {
      for (int64_t r = 0, at = row; r < 4 && at < rows; ++r, at += each) out[m][at] = all[m][r];
    }
  }
}

void dots(const int8_t* w, int64_t rows, int64_t width, const int16_t* const* x, int count, int32_t* const* out) {
  if (count == 2) dots_of<2>(w, rows, width, x, out);
  else dots_of<1>(w, rows, width, x, out);
}

#else

void dots(const int8_t* w, int64_t rows, int64_t width, const int16_t* const* x, int count, int32_t* const* out) {
  for (int m = 0; m < count; ++m) {
    for (int64_t row = 0; row < rows; ++row) {
      int32_t total = 0;
      for (int64_t i = 0; i < width; ++i) total += w[row * width + i] * x[m][i];
      out[m][row] = total;
    }
  }
}

#endif

// Largest and second largest of lanes that have their own two.
UMBRA_INLINE void two_of_lanes(F first, F second, Top& top) {
  float a[16], b[16];
  store(a, first);
  store(b, second);
  int best = 0;
  for (int i = 1; i < 16; ++i)
    if (a[i] > a[best]) best = i;
  top.best = a[best];
  top.second = b[best];
  for (int i = 0; i < 16; ++i)
    if (i != best && a[i] > top.second) top.second = a[i];
}

Top top(const int32_t* dots, const float* head_scale, const int32_t* vocab, int64_t n,
        const draft::Scoring& scoring) {
  float scores[kHeadRows];
  const bool sampled = scoring.temperature != 0;
  F first_best = set(-kInf), second_best = set(-kInf);
  for (int64_t i = 0; i < n; i += 16) {
    const M valid = first(static_cast<int>(n - i < 16 ? n - i : 16));
    const F products = to_float(bits(part(reinterpret_cast<const float*>(dots), i, n)));
    F x = products * (set(scoring.scale) * part(head_scale, i, n));
    if (sampled) {
      const I id = bits(part(reinterpret_cast<const float*>(vocab), i, n));
      x = x / set(scoring.temperature) + gumbel(uniform(threefry(id, scoring.noise)));
    }
    x = select(valid, x, set(-kInf));
    store(scores + i, x);  // kHeadRows is a multiple of 16
    second_best = max(min(first_best, x), second_best);
    first_best = max(x, first_best);
  }
  Top found{};
  two_of_lanes(first_best, second_best, found);
  int64_t at = 0;
  while (at < n && !(scores[at] >= found.best)) ++at;
  found.at = at < n ? at : 0;
  F total = zero(), weighted = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F below = load(scores + i) - set(found.best);
    const F weight = exp(below);
    total = total + weight;
    weighted = weighted + select(gt(below, set(-kInf)), below * weight, zero());
  }
  found.total = sum(total);
  found.weighted = sum(weighted);
  return found;
}

Top merge(const Top& a, const Top& b) {
  const bool earlier = a.best >= b.best;
  const Top &high = earlier ? a : b, &low = earlier ? b : a;
  const float below = low.best - high.best, factor = exp_of(below);
  Top both = high;
  both.second = low.best > high.second ? low.best : high.second;
  both.total = high.total + factor * low.total;
  both.weighted = high.weighted + factor * (low.weighted + below * low.total);
  return both;
}

}  // namespace
}  // namespace umbra::UMBRA_ISA

#define UMBRA_JOIN(a, b) UMBRA_JOIN_(a, b)
#define UMBRA_JOIN_(a, b) a##b

namespace umbra::draft {

const Kernels UMBRA_JOIN(UMBRA_ISA, _kernels) = {
    UMBRA_ISA::find_match, UMBRA_ISA::normalise, UMBRA_ISA::product, UMBRA_ISA::read,
    UMBRA_ISA::cell,       UMBRA_ISA::silu,      UMBRA_ISA::add,     UMBRA_ISA::quantise,
    UMBRA_ISA::dots,       UMBRA_ISA::top,       UMBRA_ISA::merge,   UMBRA_ISA::dot,
    UMBRA_ISA::log_of,     UMBRA_ISA::sigmoid_of,
};

}  // namespace umbra::draft
