// The bookkeeping of a pass (kernels/passes/base.py): where its tokens stand, and what its slots grew by. Two custom
// calls of a few microseconds on the calling thread; everything but the gate is integers.
//
// Letters as there: B slots, C closing sequences, G prompt groups, J drafts, K tokens of a conclusion, R rows,
// S positions, T prompt tokens, V vocabulary, W = 1 + J.
#include <algorithm>
#include <cfloat>
#include <cstring>
#include <memory>
#include <vector>

#include "arguments.h"
#include "handler.h"
#include "threads.h"

namespace umbra::passes {
namespace {

using ffi::DataType;

constexpr int64_t kDrafts = 15, kWidth = kDrafts + 1;
constexpr float kLeastGain = 1.04f;  // as in kernels/draft/widths.py

// --- how many drafts go into the pass ---

// Sums of 1, 2, ... values as XLA has them on CPUs: in pieces of sixteen, whose totals are summed up the same way. The
// sums decide between choices that are nearly as good, so the order of additions matters.
void running_sums(const float* x, int64_t n, float* sums) {
  constexpr int64_t kPiece = 16;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    float sum = 0;
    for (int64_t i = begin; i < std::min(n, begin + kPiece); ++i) sums[i] = sum += x[i];
  }
  if (n <= kPiece) return;
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  std::vector<float> totals(pieces), before(pieces);
  for (int64_t p = 0; p < pieces; ++p) totals[p] = sums[std::min(n, (p + 1) * kPiece) - 1];
  running_sums(totals.data(), pieces, before.data());
  for (int64_t i = kPiece; i < n; ++i) sums[i] += before[i / kPiece - 1];
}

// A draft by the product of the probabilities up to it; `order` is its place among equal ones.
struct Candidate {
  float value;
  int32_t order;
};

// kernels/draft/widths.py: the candidates are all drafts, place by place; those without value come last.
class Gate {
 public:
  Gate(const float* odds, const int32_t* length, const bool* active, int64_t slots)
      : odds_(odds), length_(length), active_(active), slots_(slots) {}

  // How many drafts of each slot pay; `cost[n]` is what a pass of n rows takes, n up to `most`.
  void choose(const float* cost, int64_t most, int64_t budget, int32_t* n_drafts) {
    std::fill_n(n_drafts, slots_, 0);
    best_.clear();
    for (int64_t b = 0; b < slots_; ++b) add_chain(b);
    std::sort(best_.begin(), best_.end(), [](const Candidate& a, const Candidate& b) {
      return a.value > b.value || (a.value == b.value && a.order < b.order);
    });
    const int64_t n = best_number(cost, most, budget);
    const int64_t valuable = static_cast<int64_t>(best_.size());
    for (int64_t i = 0; i < std::min(n, valuable); ++i) ++n_drafts[best_[i].order % slots_];
    if (n > valuable) add_worthless(n - valuable, n_drafts);
  }

 private:
  bool there(int64_t b, int64_t place) const { return active_[b] && place < length_[b]; }

  void add_chain(int64_t b) {
    float product = 1;
    for (int64_t j = 0; j < kDrafts && there(b, j); ++j) {
      const float odds = odds_[b * kDrafts + j];
      product *= odds >= FLT_MIN ? std::min(odds, 1.0f) : 0;  // also for NaN
      if (product == 0) return;
      best_.push_back({product, static_cast<int32_t>(j * slots_ + b)});
    }
  }

  // How many of the candidates, the best first, make the most tokens per cost.
  int64_t best_number(const float* cost, int64_t most, int64_t budget) {
    const int64_t n = std::min(slots_ * kDrafts, most);
    const int64_t base = std::count(active_, active_ + slots_, true);
    values_.assign(n, 0.0f);
    for (int64_t i = 0; i < std::min(n, static_cast<int64_t>(best_.size())); ++i) values_[i] = best_[i].value;
    gained_.resize(n);
    running_sums(values_.data(), n, gained_.data());
    int64_t best = 0;
    float largest = 0, without = 0;
    for (int64_t i = 0; i <= n && base + i <= std::min(budget, most); ++i) {
      const float per_cost = (static_cast<float>(base) + (i ? gained_[i - 1] : 0.0f)) / cost[base + i];
      if (i && !(per_cost > largest)) continue;
      largest = per_cost;
      best = i;
      if (!i) without = per_cost;
    }
    return largest > kLeastGain * without ? best : 0;
  }

  // More rows may be cheaper than fewer: then drafts without value go in as well, in their order.
  void add_worthless(int64_t n, int32_t* n_drafts) {
    valuable_.assign(n_drafts, n_drafts + slots_);
    for (int64_t place = 0; place < kDrafts; ++place) {
      for (int64_t b = 0; b < slots_; ++b) {
        if (place < valuable_[b]) continue;
        if (n-- == 0) return;
        n_drafts[b] += there(b, place);
      }
    }
  }

  const float* odds_;
  const int32_t* length_;
  const bool* active_;
  int64_t slots_;
  std::vector<Candidate> best_;
  std::vector<float> values_, gained_;
  std::vector<int32_t> valuable_;
};

// --- the layout ---

struct Sent {
  int64_t slots, tokens, groups, rows, costs;  // B, T, G, R, and how many costs are known (0: nothing is drafted)
  const int32_t *token, *position, *limit, *drafts, *n_drafts;
  const bool *active, *decodes;
  const float *odds, *cost;
  const int32_t *ids, *slot, *positions, *starts, *counts, *last, *capacity, *sizes, *length;
};

struct Layout {
  int64_t total;  // tokens, padding included
  int32_t *ids, *slot, *positions, *n_tokens, *starts, *counts, *n_groups;
  int32_t *n_drafts, *n_chosen, *first, *begin, *source, *slots, *chosen_at, *n_rows, *draft, *before;
};

class Planner {
 public:
  Planner(const Sent& in, const Layout& out)
      : in_(in),
        out_(out),
        n_prompt_(std::clamp<int64_t>(in.sizes[0], 0, in.tokens)),
        n_groups_(std::clamp<int64_t>(in.groups ? in.sizes[1] : 0, 0, in.groups)) {
    const int64_t B = in.slots;
    decodes_.reset(new bool[B]);
    for (int64_t b = 0; b < B; ++b) decodes_[b] = in.decodes[b] && in.active[b];
  }

  void lay_out() {
    count_drafts();
    place_tokens();
    place_groups();
    place_rows();
  }

 private:
  bool finishes(int64_t b) const { return in_.last[b] >= 0; }
  int64_t width(int64_t b) const { return decodes_[b] ? 1 + out_.n_drafts[b] : 0; }

  void count_drafts() {
    const int64_t B = in_.slots;
    std::fill_n(out_.n_drafts, B, 0);
    if (!in_.costs) return;
    std::vector<int32_t> length(B);
    bool some = false;
    int64_t budget = in_.rows;
    for (int64_t b = 0; b < B; ++b) {
      budget -= finishes(b);
      const int32_t room = std::max(std::min(in_.capacity[b], in_.limit[b]) - in_.position[b] - 1, 0);
      if (decodes_[b]) length[b] = std::min(std::max(in_.n_drafts[b], 0), room);
      some |= length[b] > 0;
    }
    if (!some) return;
    if (*in_.length > 0) return take_as_asked(length, budget);
    // What prompts add is left out: a row more takes as long beside one, and would seem cheap against the whole pass.
    Gate(in_.odds, length.data(), decodes_.get(), B).choose(in_.cost, in_.rows, budget, out_.n_drafts);
  }

  void take_as_asked(const std::vector<int32_t>& length, int64_t budget) {
    int64_t room = budget - std::count(decodes_.get(), decodes_.get() + in_.slots, true);
    for (int64_t b = 0; b < in_.slots; ++b) {
      const int64_t wanted = std::min(length[b], *in_.length);
      out_.n_drafts[b] = static_cast<int32_t>(std::min(std::max<int64_t>(room, 0), wanted));
      room -= wanted;
    }
  }

  void place_tokens() {
    std::memcpy(out_.ids, in_.ids, n_prompt_ * sizeof(int32_t));
    std::memcpy(out_.slot, in_.slot, n_prompt_ * sizeof(int32_t));
    std::memcpy(out_.positions, in_.positions, n_prompt_ * sizeof(int32_t));
    int64_t t = n_prompt_;
    for (int64_t b = 0; b < in_.slots; ++b) {
      for (int64_t w = 0; w < width(b) && t < out_.total; ++w, ++t) {
        out_.ids[t] = w ? in_.drafts[b * kDrafts + std::min(w, kDrafts) - 1] : in_.token[b];
        out_.slot[t] = static_cast<int32_t>(b);
        out_.positions[t] = in_.position[b] + static_cast<int32_t>(w);
      }
    }
    *out_.n_tokens = static_cast<int32_t>(t);
    std::fill(out_.ids + t, out_.ids + out_.total, 0);
    std::fill(out_.slot + t, out_.slot + out_.total, 0);
    std::fill(out_.positions + t, out_.positions + out_.total, -1);
  }

  // Those of the prompt, then one for each slot with decode rows.
  void place_groups() {
    const int64_t B = in_.slots, G = in_.groups;
    std::fill_n(std::copy_n(in_.starts, G, out_.starts), B, 0);
    std::fill_n(std::copy_n(in_.counts, G, out_.counts), B, 0);
    std::fill_n(out_.starts + n_groups_, B, 0);
    std::fill_n(out_.counts + n_groups_, B, 0);
    int64_t group = n_groups_, t = n_prompt_;
    for (int64_t b = 0; b < B; ++b) {
      if (!width(b)) continue;
      out_.starts[group] = static_cast<int32_t>(t);
      out_.counts[group++] = static_cast<int32_t>(width(b));
      t += width(b);
    }
    *out_.n_groups = static_cast<int32_t>(in_.sizes[1] + (group - n_groups_));
  }

  void place_rows() {
    int64_t r = 0, t = n_prompt_;
    for (int64_t b = 0; b < in_.slots; ++b) {
      const int64_t n = finishes(b) ? 1 : width(b);
      const int64_t last = std::clamp<int64_t>(in_.last[b], 0, out_.total - 1);
      out_.n_chosen[b] = static_cast<int32_t>(n);
      out_.first[b] = static_cast<int32_t>(r);
      out_.begin[b] = (finishes(b) ? out_.positions[last] : in_.position[b]) + 1;
      for (int64_t w = 0; w < n && r < in_.rows; ++w, ++r) {
        out_.source[r] = static_cast<int32_t>(finishes(b) ? in_.last[b] : t + w);
        out_.chosen_at[r] = out_.begin[b] + static_cast<int32_t>(w);
        place_row(r, b, w);
      }
      t += width(b);
    }
    *out_.n_rows = static_cast<int32_t>(r);
    for (; r < in_.rows; ++r) {
      out_.source[r] = out_.chosen_at[r] = 0;
      place_row(r, 0, r - out_.first[0]);
    }
  }

  // Row r is the w-th of slot b.
  void place_row(int64_t r, int64_t b, int64_t w) {
    const int32_t* const drafts = in_.drafts + b * kDrafts;
    out_.slots[r] = static_cast<int32_t>(b);
    out_.draft[r] = w < out_.n_drafts[b] ? drafts[std::clamp<int64_t>(w, 0, kDrafts - 1)] : -1;
    int32_t* const before = out_.before + r * kDrafts;
    const int64_t n = std::clamp<int64_t>(w, 0, kDrafts);
    std::fill_n(std::copy_n(drafts, n, before), kDrafts - n, -1);
  }

  const Sent& in_;
  const Layout& out_;
  const int64_t n_prompt_, n_groups_;
  std::unique_ptr<bool[]> decodes_;
};

Sent sent_of(Arguments& given, int64_t rows) {
  Sent in{};
  const int64_t B = in.slots = given.size(0, 0), T = in.tokens = given.size(7, 0), G = in.groups = given.size(10, 0);
  in.rows = rows;
  in.costs = given.size(16, 0);
  in.token = given.take<DataType::S32>("token", {B});
  in.position = given.take<DataType::S32>("position", {B});
  in.limit = given.take<DataType::S32>("limit", {B});
  in.active = given.take<DataType::PRED>("active", {B});
  in.drafts = given.take<DataType::S32>("drafts", {B, kDrafts});
  in.odds = given.take<DataType::F32>("draft_odds", {B, kDrafts});
  in.n_drafts = given.take<DataType::S32>("n_drafts", {B});
  in.ids = given.take<DataType::S32>("ids", {T});
  in.slot = given.take<DataType::S32>("slots", {T});
  in.positions = given.take<DataType::S32>("positions", {T});
  in.starts = given.take<DataType::S32>("starts", {G});
  in.counts = given.take<DataType::S32>("counts", {G});
  in.last = given.take<DataType::S32>("last", {B});
  in.decodes = given.take<DataType::PRED>("decodes", {B});
  in.capacity = given.take<DataType::S32>("capacity", {B});
  in.sizes = given.take<DataType::S32>("sizes", {1, 2});
  in.cost = given.take<DataType::F32>("cost", {in.costs});
  in.length = given.take<DataType::S32>("length", {});
  return in;
}

Layout layout_of(Outputs& results, const Sent& in) {
  Layout out{};
  const int64_t B = in.slots, R = in.rows, T = out.total = results.size(0, 0);
  out.ids = results.take<DataType::S32>("ids", {T});
  out.slot = results.take<DataType::S32>("slots of tokens", {T});
  out.positions = results.take<DataType::S32>("positions", {T});
  out.n_tokens = results.take<DataType::S32>("n_tokens", {});
  out.starts = results.take<DataType::S32>("starts", {in.groups + B});
  out.counts = results.take<DataType::S32>("counts", {in.groups + B});
  out.n_groups = results.take<DataType::S32>("n_groups", {});
  out.n_drafts = results.take<DataType::S32>("n_drafts", {B});
  out.n_chosen = results.take<DataType::S32>("n_chosen", {B});
  out.first = results.take<DataType::S32>("first", {B});
  out.begin = results.take<DataType::S32>("begin", {B});
  out.source = results.take<DataType::S32>("source", {R});
  out.slots = results.take<DataType::S32>("slots", {R});
  out.chosen_at = results.take<DataType::S32>("chosen_at", {R});
  out.n_rows = results.take<DataType::S32>("n_rows", {});
  out.draft = results.take<DataType::S32>("draft", {R});
  out.before = results.take<DataType::S32>("before", {R, kDrafts});
  return out;
}

std::string complaint(const char* call, const std::string& argument, const std::string& result) {
  return std::string(call) + ": " + (argument.empty() ? "result " + result : argument) +
         " does not have the type and shape of kernels/passes/base.py";
}

ffi::Error lay_out(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Arguments given(args);
  Outputs results(rets);
  constexpr size_t kSource = 11;  // among the results
  const Sent in = sent_of(given, results.size(kSource, 0));
  const Layout out = layout_of(results, in);
  if (!given.wrong().empty() || !results.wrong().empty())
    return invalid(complaint("umbra_lay_out", given.wrong(), results.wrong()));
  if (in.slots < 1 || in.rows < in.slots || out.total < in.tokens + in.rows)
    return invalid("umbra_lay_out: there must be a row for every slot, and place for all tokens");
  if (in.costs && in.costs < in.rows + 1) return invalid("umbra_lay_out: costs must be known up to R rows");
  FloatMode mode;
  Planner(in, out).lay_out();
  return ffi::Error::Success();
}

// --- what the slots grew by ---

struct Chosen {
  int64_t slots, context, vocab, stops, closes, close_tokens, conclusion, rows;  // B, S, V, ., C, ., K, R
  const int32_t *limit, *begun, *stop_ids, *drafts, *sources, *conclude, *close;
  const int32_t *n_drafts, *n_chosen, *first, *begin, *token;
};

// The fields of a slot that change, updated in place, and what it grew by.
struct Advanced {
  int32_t *token, *position, *counts, *history, *n_drafts, *conclude_at;
  bool *active, *thinking;
  int32_t *tokens, *sources, *rows, *count;
};

class Slot {
 public:
  Slot(const Chosen& in, const Advanced& out, int64_t b) : in_(in), out_(out), b_(b), thinks_(out.thinking[b]) {}

  void advance() {
    int32_t* const rows = out_.rows + b_ * kWidth;
    for (int64_t w = 0; w < kWidth; ++w) rows[w] = static_cast<int32_t>(std::min(in_.first[b_] + w, in_.rows - 1));
    const int64_t count = in_.n_chosen[b_] > 0 ? grow(rows) : 0;
    out_.count[b_] = static_cast<int32_t>(count);
    std::fill(out_.tokens + b_ * kWidth + count, out_.tokens + (b_ + 1) * kWidth, -1);
    std::fill(out_.sources + b_ * kWidth + count, out_.sources + (b_ + 1) * kWidth, 0);
  }

 private:
  int64_t grow(const int32_t* rows) {
    for (int64_t w = 0; w < kWidth; ++w) chosen_[w] = in_.token[std::clamp<int64_t>(rows[w], 0, in_.rows - 1)];
    write_conclusion();
    int64_t accepted = count_accepted();
    if (thinks_ && conclude_at_end(accepted)) accepted = count_accepted();

    int32_t* const tokens = out_.tokens + b_ * kWidth;
    int32_t* const sources = out_.sources + b_ * kWidth;
    bool ended = false, closed = false;
    int64_t n = 0;
    while (!ended && !closed && n <= accepted) {
      tokens[n] = written_[n];
      ended = (!thinks_ && stops(written_[n])) || at(n) >= in_.limit[b_];
      closed = thinks_ && closes(n);
      sources[n] = n < accepted ? in_.sources[b_ * kDrafts + n] : 0;
      ++n;
    }
    store(n, ended, closed);
    return n;
  }

  void store(int64_t n, bool ended, bool closed) {
    for (int64_t w = 0; w < n; ++w) {
      const int64_t id = std::clamp<int64_t>(written_[w], 0, in_.vocab - 1);
      out_.counts[b_ * in_.vocab + id] += 2;
      if (at(w) >= 0 && at(w) < in_.context) out_.history[b_ * in_.context + at(w)] = written_[w];
    }
    out_.token[b_] = written_[n - 1];
    out_.position[b_] = static_cast<int32_t>(at(n - 1));
    out_.active[b_] = !ended;
    out_.n_drafts[b_] = 0;
    out_.thinking[b_] = thinks_ && !closed;
  }

  int64_t at(int64_t w) const { return in_.begin[b_] + w; }

  bool stops(int32_t token) const {
    const int32_t* const ids = in_.stop_ids + b_ * in_.stops;
    return std::find(ids, ids + in_.stops, token) != ids + in_.stops;
  }

  // What was chosen, with the conclusion in the place of what it covers.
  void write_conclusion() {
    std::copy_n(chosen_, kWidth, written_);
    if (!thinks_) return;
    for (int64_t w = 0; w < kWidth; ++w) {
      const int64_t index = at(w) - out_.conclude_at[b_];
      if (index < 0 || index >= in_.conclusion) continue;
      const int32_t token = in_.conclude[b_ * in_.conclusion + index];
      if (token >= 0) written_[w] = token;
    }
  }

  int64_t count_accepted() const {
    const int32_t* const drafts = in_.drafts + b_ * kDrafts;
    const int64_t most = std::clamp<int64_t>(in_.n_drafts[b_], 0, kDrafts);
    return std::mismatch(drafts, drafts + most, written_).first - drafts;
  }

  // A model that thinks goes over to the conclusion at its end id. Whether it does so here.
  bool conclude_at_end(int64_t accepted) {
    int64_t first = 0;
    while (first <= accepted && !stops(written_[first])) ++first;
    if (first > accepted) return false;
    out_.conclude_at[b_] = static_cast<int32_t>(std::min<int64_t>(out_.conclude_at[b_], at(first)));
    write_conclusion();
    return true;
  }

  // Whether a sequence that ends thoughts is the end of the generated ids with token w.
  bool closes(int64_t w) const {
    const int64_t n = in_.close_tokens;
    for (int64_t c = 0; c < in_.closes; ++c) {
      const int32_t* const close = in_.close + (b_ * in_.closes + c) * n;
      if (close[n - 1] < 0) continue;
      bool same = true;
      for (int64_t i = 0; i < n && same; ++i) same = close[i] < 0 || close[i] == generated(w - (n - 1) + i);
      if (same) return true;
    }
    return false;
  }

  // The w-th token of this pass; before it (w < 0) what was generated earlier, -2 where that is the prompt.
  int32_t generated(int64_t w) const {
    if (w >= 0) return written_[w];
    if (at(w) < in_.begun[b_]) return -2;
    return out_.history[b_ * in_.context + std::clamp<int64_t>(at(w), 0, in_.context - 1)];
  }

  const Chosen& in_;
  const Advanced& out_;
  const int64_t b_;
  const bool thinks_;
  int32_t chosen_[kWidth], written_[kWidth];
};

// The fields that are updated: every argument is the result of the same number.
constexpr size_t kUpdated = 8;

Advanced advanced_of(Arguments& given, Outputs& results) {
  Advanced out{};
  const int64_t B = given.size(0, 0), V = given.size(6, 1), S = given.size(7, 1);
  const auto updated = [&](const char* name, std::initializer_list<int64_t> shape) {
    given.take<DataType::S32>(name, shape);
    return results.take<DataType::S32>(name, shape);
  };
  const auto updated_flag = [&](const char* name) {
    given.take<DataType::PRED>(name, {B});
    return results.take<DataType::PRED>(name, {B});
  };
  out.token = updated("token", {B});
  out.position = updated("position", {B});
  out.active = updated_flag("active");
  out.n_drafts = updated("n_drafts", {B});
  out.thinking = updated_flag("thinking");
  out.conclude_at = updated("conclude_at", {B});
  out.counts = updated("counts", {B, V});
  out.history = updated("history", {B, S});
  out.tokens = results.take<DataType::S32>("tokens", {B, kWidth});
  out.sources = results.take<DataType::S32>("sources", {B, kWidth});
  out.rows = results.take<DataType::S32>("rows", {B, kWidth});
  out.count = results.take<DataType::S32>("count", {B});
  return out;
}

// The arguments behind those that are updated.
Chosen chosen_of(Arguments& given) {
  Chosen in{};
  const int64_t B = in.slots = given.size(0, 0);
  in.vocab = given.size(6, 1);
  in.context = given.size(7, 1);
  in.stops = given.size(kUpdated + 2, 1);
  in.conclusion = given.size(kUpdated + 5, 1);
  in.closes = given.size(kUpdated + 6, 1);
  in.close_tokens = given.size(kUpdated + 6, 2);
  in.rows = given.size(kUpdated + 11, 0);
  in.limit = given.take<DataType::S32>("limit", {B});
  in.begun = given.take<DataType::S32>("begin of the slots", {B});
  in.stop_ids = given.take<DataType::S32>("stop_ids", {B, in.stops});
  in.drafts = given.take<DataType::S32>("drafts", {B, kDrafts});
  in.sources = given.take<DataType::S32>("draft_sources", {B, kDrafts});
  in.conclude = given.take<DataType::S32>("conclude", {B, in.conclusion});
  in.close = given.take<DataType::S32>("close", {B, in.closes, in.close_tokens});
  in.n_drafts = given.take<DataType::S32>("n_drafts of the pass", {B});
  in.n_chosen = given.take<DataType::S32>("n_chosen", {B});
  in.first = given.take<DataType::S32>("first", {B});
  in.begin = given.take<DataType::S32>("begin", {B});
  in.token = given.take<DataType::S32>("chosen tokens", {in.rows});
  return in;
}

ffi::Error advance(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Arguments given(args);
  Outputs results(rets);
  const Advanced out = advanced_of(given, results);
  const Chosen in = chosen_of(given);
  if (!given.wrong().empty() || !results.wrong().empty())
    return invalid(complaint("umbra_advance", given.wrong(), results.wrong()));
  for (const int64_t size : {in.context, in.vocab, in.close_tokens, in.rows}) {
    if (size < 1) return invalid("umbra_advance: an axis has length 0");
  }
  for (int64_t b = 0; b < in.slots; ++b) Slot(in, out, b).advance();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace umbra::passes

UMBRA_HANDLER(umbra_lay_out, umbra::passes::lay_out, xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());
UMBRA_HANDLER(umbra_advance, umbra::passes::advance, xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());
