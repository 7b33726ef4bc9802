// Choosing the next token of every active row: the algorithm of kernels/sample/reference.py with the same bits, without
// its 31 passes over the row per threshold search.
//
// A search needs few values: tokens above a cut that holds enough of them (top-k), or enough mass (top-p), are
// collected in one pass, and only they are looked at further. Sums whose bits matter are computed in the reference's
// order; a sum that is only compared with a target is estimated in double first, and computed exactly where the
// estimate is closer to the target than the error that the order can make.
//
// Rows go to different threads; a row that is alone is cut into chunks of columns instead.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu.h"
#include "handler.h"
#include "threads.h"

namespace umbra::sample {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kMinNormal = std::numeric_limits<float>::min();
constexpr int64_t kLightChunk = 32768, kHeavyChunk = 4096;  // columns: about 3 and 5 microseconds with AVX2
constexpr float kCuts[] = {-4, -8, -12, -18, -27, -40, -90, -kInf};

// A float32 sum of up to 2^24 non-negative terms in the reference's order is within 90 roundings of the exact one.
constexpr int64_t kLargestVocab = 1 << 24;
constexpr double kSumError = 6e-6;

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature;
  int32_t top_k;
  float top_p, min_p, repetition, presence, frequency;
  NoiseKey noise;
  const int32_t* counts;
  const int32_t* drafted;
  int64_t n_drafted;
  const int32_t* bias_ids;
  const float* bias_values;
  int64_t n_bias;
  int32_t n_logprobs;
  const uint32_t* mask;  // null: everything may be chosen
};

struct Results {
  int32_t* token;
  float* logprob;
  int32_t* top_ids;
  float* top_logprobs;
  int64_t n_top;
};

// Memory of one thread, kept between calls.
struct Scratch {
  std::vector<float> changed, scaled, values, weights, partial, sorted, sorted_weights, unsure;
  std::vector<int32_t> ids;
  std::vector<double> mass;

  static float* at_least(std::vector<float>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
  }
};

const Passes& passes() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512) return avx512_passes;
  if (isa() == Isa::avx2) return avx2_passes;
#endif
  return portable_passes;
}

class Chooser {
 public:
  Chooser(const Row& row, Scratch& scratch) : pass_(passes()), row_(row), vocab_(row.vocab), scratch_(scratch) {}

  void choose(const Results& out) {
    const float* x = changed();
    const float largest = max(x);
    // Not `temperature < kMinNormal`: what is not a number is greedy too.
    const bool greedy = !(row_.temperature >= kMinNormal) || largest == -kInf;
    const int32_t token = greedy ? first_of(x, largest) : sampled(x, largest);
    *out.token = token;
    *out.logprob = 0;
    std::fill_n(out.top_ids, out.n_top, -1);
    std::fill_n(out.top_logprobs, out.n_top, 0.0f);
    if (row_.n_logprobs >= 0) logprobs(token, out);
  }

 private:
  // The logits after penalties, bias and mask; still to be cleaned.
  const float* changed() {
    const bool penalties = row_.repetition != 1 || row_.presence != 0 || row_.frequency != 0;
    const bool bias = std::any_of(row_.bias_ids, row_.bias_ids + row_.n_bias, [](int32_t id) { return id >= 0; });
    if (!penalties && !bias && !row_.mask) return row_.logits;
    float* const out = Scratch::at_least(scratch_.changed, vocab_);
    chunks(vocab_, kLightChunk, [&](int64_t begin, int64_t size) {
      if (penalties) {
        pass_.penalise(row_.logits + begin, row_.counts + begin, size, row_.repetition, row_.presence, row_.frequency,
                       out + begin);
      } else {
        pass_.clean(row_.logits + begin, size, out + begin);
      }
    });
    if (penalties) penalise_drafted(out);
    for (int64_t i = 0; i < row_.n_bias; ++i) {
      const int32_t id = row_.bias_ids[i];
      if (id >= 0 && id < vocab_) out[id] += row_.bias_values[i];
    }
    if (row_.mask) exclude(out);
    return out;
  }

  // What the mask does not allow becomes -inf.
  void exclude(float* out) {
    static_assert(kLightChunk % 32 == 0);
    chunks(vocab_, kLightChunk, [&](int64_t begin, int64_t size) {
      for (int64_t i = begin; i < begin + size; i += 32) {
        const uint32_t word = row_.mask[i / 32];
        if (word == ~uint32_t{0}) continue;
        const int64_t n = std::min<int64_t>(32, begin + size - i);
        for (int64_t bit = 0; bit < n; ++bit) out[i + bit] = word >> bit & 1 ? out[i + bit] : -kInf;
      }
    });
  }

  // The tokens drafted before this row, again, with all their uses.
  void penalise_drafted(float* out) {
    const int32_t* const end = row_.drafted + row_.n_drafted;
    for (const int32_t* token = row_.drafted; token < end; ++token) {
      if (*token < 0 || *token >= vocab_) continue;
      const int32_t count = row_.counts[*token] + 2 * static_cast<int32_t>(std::count(row_.drafted, end, *token));
      pass_.penalise(row_.logits + *token, &count, 1, row_.repetition, row_.presence, row_.frequency, out + *token);
    }
  }

  // `body(begin, size)` over [0, n) in pieces.
  template <class Body>
  static void chunks(int64_t n, int64_t chunk, Body&& body) {
    parallel_for((n + chunk - 1) / chunk, [&](int64_t i) { body(i * chunk, std::min(chunk, n - i * chunk)); });
  }

  // The maximum of cleaned x.
  float max(const float* x) {
    float* const parts = Scratch::at_least(scratch_.partial, vocab_ / kLightChunk + 1);
    chunks(vocab_, kLightChunk,
           [&](int64_t begin, int64_t size) { parts[begin / kLightChunk] = pass_.max(x + begin, size); });
    const float largest = *std::max_element(parts, parts + (vocab_ + kLightChunk - 1) / kLightChunk);
    return std::min(largest, kLargest);
  }

  // The lowest index of the maximum of cleaned x.
  int32_t first_of(const float* x, float largest) {
    if (largest == -kInf) return 0;
    return static_cast<int32_t>(pass_.find(x, vocab_, largest));
  }

  int32_t sampled(const float* x, float largest) {
    float* const scaled = Scratch::at_least(scratch_.scaled, vocab_);
    chunks(vocab_, kLightChunk, [&](int64_t begin, int64_t size) {
      pass_.scale(x + begin, size, std::max(largest, -kLargest), row_.temperature, scaled + begin);
    });
    const bool top_k = row_.top_k > 0 && row_.top_k < vocab_;
    const bool top_p = row_.top_p < 1, min_p = row_.min_p > 0;
    if (!top_k && !top_p && !min_p) return best_of_all(scaled);

    if (top_k) keep_top_k(scaled);
    if (top_p) {
      if (top_k) {
        keep_top_p(scaled, row_.top_p * sum_of_kept(scaled, -kInf), true);
      } else {
        keep_top_p_of_all(scaled);
      }
    } else if (min_p && !top_k) {
      // The logarithm only has to be low enough: the weights decide.
      collect(scaled, std::min(std::log(row_.min_p) - 0.01f, 0.0f));
    }
    if (top_p || min_p) {
      keep([&](int64_t i) { return scratch_.weights[i] >= row_.min_p || scratch_.values[i] == 0; });
    }
    return best_of_kept();
  }

  // --- the tokens kept: `ids`, ascending, with their `values` (scaled) and `weights` (e^value) ---

  void collect(const float* scaled, float cut) {
    least_kept_ = cut;
    if (static_cast<int64_t>(scratch_.ids.size()) < vocab_) scratch_.ids.resize(vocab_);
    int32_t* const ids = scratch_.ids.data();
    std::vector<int64_t> counts((vocab_ + kLightChunk - 1) / kLightChunk);
    chunks(vocab_, kLightChunk, [&](int64_t begin, int64_t size) {
      counts[begin / kLightChunk] =
          pass_.collect(scaled + begin, size, 0, cut, static_cast<int32_t>(begin), ids + begin);
    });
    n_ = counts[0];
    for (size_t i = 1; i < counts.size(); ++i) {
      std::copy_n(ids + static_cast<int64_t>(i) * kLightChunk, counts[i], ids + n_);
      n_ += counts[i];
    }
    float* const values = Scratch::at_least(scratch_.values, n_);
    float* const weights = Scratch::at_least(scratch_.weights, n_);
    chunks(n_, kHeavyChunk, [&](int64_t begin, int64_t size) {
      for (int64_t i = begin; i < begin + size; ++i) values[i] = scaled[ids[i]];
      pass_.exp(values + begin, size, weights + begin);
    });
  }

  template <class Kept>
  void keep(Kept&& kept) {
    int64_t n = 0;
    for (int64_t i = 0; i < n_; ++i) {  // without branches, which nobody could predict
      const bool stays = kept(i);
      scratch_.ids[n] = scratch_.ids[i];
      scratch_.values[n] = scratch_.values[i];
      scratch_.weights[n] = scratch_.weights[i];
      n += stays;
    }
    n_ = n;
  }

  void keep_from(float threshold) {
    least_kept_ = threshold;
    keep([&](int64_t i) { return scratch_.values[i] >= threshold; });
  }

  // The ordered sum of the weights of kept tokens from `threshold` on. Terms that are zero change no sum, so it is
  // enough to add those that are not, in the same order; if they are few.
  float sum_of_kept(const float* scaled, float threshold) {
    if (n_ > vocab_ / 4) return sum_of_all(scaled, std::max(threshold, least_kept_));
    const int64_t width = first_width();
    float* const partial = Scratch::at_least(scratch_.partial, width);
    std::fill_n(partial, width, 0.0f);
    for (int64_t i = 0; i < n_; ++i) {
      if (scratch_.values[i] >= threshold) partial[scratch_.ids[i] & (width - 1)] += scratch_.weights[i];
    }
    return pass_.ordered_sum(partial, width);
  }

  // Pieces that the ordered sum of a row cuts it into: a power of two.
  int64_t first_width() const {
    int64_t power = 1;
    while (power < vocab_) power *= 2;
    return std::max<int64_t>(1, power / 16);
  }

  // The ordered sum of e^scaled over the tokens of the whole row from `threshold` on.
  float sum_of_all(const float* scaled, float threshold = -kInf) {
    const int64_t width = first_width();
    float* const partial = Scratch::at_least(scratch_.partial, width);
    // Chunks of columns that are as much work as a heavy chunk: a column has up to 16 terms.
    chunks(width, kHeavyChunk / 16, [&](int64_t begin, int64_t size) {
      pass_.sum_exp(scaled, vocab_, width, begin, begin + size, threshold, partial);
    });
    return pass_.ordered_sum(partial, width);
  }

  void keep_top_k(const float* scaled) {
    for (const float cut : kCuts) {
      collect(scaled, cut);
      if (n_ >= row_.top_k) break;
    }
    auto& sorted = scratch_.sorted;
    sorted.assign(scratch_.values.begin(), scratch_.values.begin() + n_);
    const auto kth = sorted.begin() + row_.top_k - 1;
    std::nth_element(sorted.begin(), kth, sorted.end(), std::greater<float>());
    keep_from(*kth);
  }

  void keep_top_p_of_all(const float* scaled) {
    const float target = row_.top_p * sum_of_all(scaled);
    for (const float cut : kCuts) {
      collect(scaled, cut);
      if (keep_top_p(scaled, target, cut == -kInf)) return;
    }
  }

  // Keeps the most likely of the kept tokens whose mass reaches `target`, ties included. Whether there are such; if
  // not, `all` says whether that leaves everything as it is.
  bool keep_top_p(const float* scaled, float target, bool all) {
    const double low = target * (1 - kSumError), high = target * (1 + kSumError);
    const float* const weights = scratch_.weights.data();
    if (!all && std::accumulate(weights, weights + n_, 0.0) < low) return false;
    const bool certain = find_unsure(low, high);
    // The mass grows along `unsure`, also as computed: rounding is monotonous.
    const auto& unsure = scratch_.unsure;
    const auto end = unsure.end() - (certain ? 1 : 0);
    const auto found = std::partition_point(
        unsure.begin(), end, [&](float value) { return !(sum_of_kept(scaled, value) >= target); });
    if (found == unsure.end()) return all;
    keep_from(*found);
    return true;
  }

  // The values, in descending order, down to which the mass may reach a target within [low, high], by an estimate in
  // double. Whether it does so for certain with the last of them.
  bool find_unsure(double low, double high) {
    constexpr int kBins = 1024;
    float least = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (scratch_.values[i] != -kInf) least = std::min(least, scratch_.values[i]);
    }
    // Bin 0 has the largest values; all share it if they are so close that the quotient would overflow. Where -inf goes
    // does not matter: it has no mass.
    const float per_value = least < -1e-30f ? -(kBins - 1) / least : 0;
    const auto bin_of = [&](float value) {
      return value == -kInf ? kBins - 1 : std::min(kBins - 1, static_cast<int>(-value * per_value));
    };
    auto& mass = scratch_.mass;
    mass.assign(kBins, 0.0);
    for (int64_t i = 0; i < n_; ++i) mass[bin_of(scratch_.values[i])] += scratch_.weights[i];

    scratch_.unsure.clear();
    double reached = 0;
    int bin = 0;
    while (bin < kBins && reached + mass[bin] < low) reached += mass[bin++];
    for (; bin < kBins; ++bin) {
      auto& sorted = scratch_.sorted;
      sorted.clear();
      for (int64_t i = 0; i < n_; ++i) {
        if (bin_of(scratch_.values[i]) == bin) sorted.push_back(scratch_.values[i]);
      }
      if (add_unsure(reached, low, high)) return true;
    }
    return false;
  }

  // `find_unsure` within one bin, the values of which are in `sorted`; `reached` is the mass of larger ones.
  bool add_unsure(double& reached, double low, double high) {
    auto& sorted = scratch_.sorted;
    if (sorted.empty()) return false;
    const auto bounds = std::minmax_element(sorted.begin(), sorted.end());
    if (*bounds.first < *bounds.second) std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    auto& weights = scratch_.sorted_weights;
    weights.resize(sorted.size());
    pass_.exp(sorted.data(), static_cast<int64_t>(sorted.size()), weights.data());
    for (size_t i = 0; i < sorted.size(); ++i) {
      reached += weights[i];
      const bool last_of_ties = i + 1 == sorted.size() || sorted[i + 1] != sorted[i];
      if (!last_of_ties || reached < low) continue;
      scratch_.unsure.push_back(sorted[i]);
      if (reached > high) return true;
    }
    return false;
  }

  // --- noise ---

  // A first guess that is hard to beat spares most tokens the noise: the most likely token with its own.
  Best guess(const float* scaled, const int32_t* ids, int64_t n) {
    const int64_t at = pass_.find(scaled, n, 0);
    return pass_.noisy_best(scaled + at, ids ? ids + at : nullptr, static_cast<int32_t>(at), 1, row_.noise,
                            {-kInf, std::numeric_limits<int32_t>::max()});
  }

  int32_t best_of(const float* scaled, const int32_t* ids, int64_t n) {
    const Best first = guess(scaled, ids, n);
    std::vector<Best> found((n + kHeavyChunk - 1) / kHeavyChunk);
    chunks(n, kHeavyChunk, [&](int64_t begin, int64_t size) {
      found[begin / kHeavyChunk] = pass_.noisy_best(scaled + begin, ids ? ids + begin : nullptr,
                                                    static_cast<int32_t>(begin), size, row_.noise, first);
    });
    Best best = first;
    for (const Best& other : found) {
      if (other.score > best.score || (other.score == best.score && other.id < best.id)) best = other;
    }
    return best.id;
  }

  int32_t best_of_all(const float* scaled) { return best_of(scaled, nullptr, vocab_); }
  int32_t best_of_kept() { return best_of(scratch_.values.data(), scratch_.ids.data(), n_); }

  // --- log-probabilities under the raw logits ---

  void logprobs(int32_t token, const Results& out) {
    const float largest = std::max(max(row_.logits), -kLargest);
    float* const below = Scratch::at_least(scratch_.scaled, vocab_);
    chunks(vocab_, kLightChunk, [&](int64_t begin, int64_t size) {
      pass_.scale(row_.logits + begin, size, largest, 1, below + begin);
    });
    const float log_total = pass_.log(std::max(sum_of_all(below), 1.0f));
    *out.logprob = below[token] - log_total;
    if (row_.n_logprobs == 0) return;
    const int64_t n = std::min(out.n_top, vocab_);
    for (const float cut : kCuts) {
      collect(below, cut);
      if (n_ >= n) break;
    }
    int32_t* const ids = scratch_.ids.data();
    std::partial_sort(ids, ids + n, ids + n_, [&](int32_t a, int32_t b) {
      return below[a] > below[b] || (below[a] == below[b] && a < b);
    });
    for (int64_t i = 0; i < n; ++i) {
      out.top_ids[i] = ids[i];
      out.top_logprobs[i] = below[ids[i]] - log_total;
    }
  }

  const Passes& pass_;
  const Row& row_;
  const int64_t vocab_;
  Scratch& scratch_;
  int64_t n_ = 0;             // tokens kept
  float least_kept_ = -kInf;  // all from here on are kept
};

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

// Fields as in kernels/sample/base.py, with a leading axis [R]; counts [B, V], masks [M, words].
ffi::Error choose_rows(Floats logits, ffi::Buffer<ffi::PRED> active, Floats temperature, Ints top_k, Floats top_p,
                       Floats min_p, Floats repetition, Floats presence, Floats frequency, ffi::Buffer<ffi::U32> seed,
                       Ints position, Ints counts, Ints slot, Ints drafted, Ints bias_ids, Floats bias_values,
                       Ints n_logprobs, Ints mask, ffi::Buffer<ffi::U32> masks, ffi::ResultBuffer<ffi::S32> token, ffi::ResultBuffer<ffi::F32> logprob,
                       ffi::ResultBuffer<ffi::S32> top_ids, ffi::ResultBuffer<ffi::F32> top_logprobs) {
  if (logits.dimensions().size() != 2 || counts.dimensions().size() != 2 || drafted.dimensions().size() != 2 ||
      bias_ids.dimensions().size() != 2 || masks.dimensions().size() != 2 || top_ids->dimensions().size() != 2) {
    return invalid(
        "umbra_sample: logits must be [R, V], counts [B, V]; drafted, bias_ids and top_ids [R, any]; masks [M, any]");
  }
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  const int64_t slots = counts.dimensions()[0], n_drafted = drafted.dimensions()[1];
  const int64_t n_bias = bias_ids.dimensions()[1], n_top = top_ids->dimensions()[1];
  const int64_t n_masks = masks.dimensions()[0], n_words = masks.dimensions()[1];
  if (vocab < 1 || vocab > kLargestVocab) return invalid("umbra_sample: V must be between 1 and 2^24");
  const bool one_each = has_shape(active, {rows}) && has_shape(temperature, {rows}) && has_shape(top_k, {rows}) &&
                        has_shape(top_p, {rows}) && has_shape(min_p, {rows}) && has_shape(repetition, {rows}) &&
                        has_shape(presence, {rows}) && has_shape(frequency, {rows}) && has_shape(position, {rows}) &&
                        has_shape(slot, {rows}) && has_shape(n_logprobs, {rows}) && has_shape(mask, {rows}) &&
                        has_shape(*token, {rows}) && has_shape(*logprob, {rows});
  if (!one_each || n_masks < 1 || n_words < (vocab + 31) / 32 || !has_shape(seed, {rows, 2}) || slots < 1 || !has_shape(counts, {slots, vocab}) ||
      !has_shape(drafted, {rows, n_drafted}) || !has_shape(bias_ids, {rows, n_bias}) ||
      !has_shape(bias_values, {rows, n_bias}) || !has_shape(*top_logprobs, {rows, n_top})) {
    return invalid(
        "umbra_sample: a field does not have the shape of kernels/sample/base.py with R in front, counts with B, masks "
        "with M");
  }

  FloatMode mode;
  const auto one = [&](int64_t r) {
    static thread_local Scratch scratch;
    const uint32_t* const words = seed.typed_data() + 2 * r;
    // No memory but the counts and the masks may be read, whatever the slot and the mask are.
    const int64_t own = std::clamp<int64_t>(slot.typed_data()[r], 0, slots - 1);
    const int64_t bound = mask.typed_data()[r];
    const uint32_t* const words_of_mask =
        bound < 0 ? nullptr : masks.typed_data() + std::min(bound, n_masks - 1) * n_words;
    const NoiseKey noise{words[0], words[1], static_cast<uint32_t>(position.typed_data()[r])};
    const Row row{logits.typed_data() + r * vocab,
                  vocab,
                  temperature.typed_data()[r],
                  top_k.typed_data()[r],
                  top_p.typed_data()[r],
                  min_p.typed_data()[r],
                  repetition.typed_data()[r],
                  presence.typed_data()[r],
                  frequency.typed_data()[r],
                  noise,
                  counts.typed_data() + own * vocab,
                  drafted.typed_data() + r * n_drafted,
                  n_drafted,
                  bias_ids.typed_data() + r * n_bias,
                  bias_values.typed_data() + r * n_bias,
                  n_bias,
                  n_logprobs.typed_data()[r],
                  words_of_mask};
    const Results out{token->typed_data() + r, logprob->typed_data() + r, top_ids->typed_data() + r * n_top,
                      top_logprobs->typed_data() + r * n_top, n_top};
    Chooser(row, scratch).choose(out);
  };

  std::vector<int64_t> chosen;
  for (int64_t r = 0; r < rows; ++r) {
    if (active.typed_data()[r]) {
      chosen.push_back(r);
      continue;
    }
    token->typed_data()[r] = 0;
    logprob->typed_data()[r] = 0;
    std::fill_n(top_ids->typed_data() + r * n_top, n_top, -1);
    std::fill_n(top_logprobs->typed_data() + r * n_top, n_top, 0.0f);
  }
  // One chunk runs at once on this thread, so that the row's own chunks can use the others.
  parallel_for(static_cast<int64_t>(chosen.size()), [&](int64_t i) { one(chosen[i]); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace umbra::sample

UMBRA_HANDLER(umbra_sample, umbra::sample::choose_rows,
              xla::ffi::Ffi::Bind()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
