// Drafting for all slots of a step: the algorithm of kernels/draft/reference.py, in which nothing is computed for slots
// that draft nothing, for places behind the end of a chain, and for places where the lookup is certain.
//
// All slots that ask the shadow share one reading of its weights. Phases of a step are cut into chunks of channels for
// the threads; every channel is computed in one order, so that neither threads nor other slots have a say in its bits.
#include "draft.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu.h"
#include "handler.h"
#include "threads.h"

namespace umbra::draft {
namespace {

constexpr int64_t kDrafts = 15, kPlaces = 8, kFeatures = 3, kAnswers = 3;  // as in kernels/draft/base.py
constexpr int kLookup = 1, kShadow = 2, kUnknown = 2;
constexpr float kCertain = 0.95f, kMinNormal = 0x1p-126f;
constexpr int64_t kChannels = 48, kFewWeights = 96;  // of a chunk: about 3e4 multiply-adds for a small shadow

struct Weights {
  int64_t vocab_size, width, rank, mlp, head_size, classes;  // V, D, r, m, Z, C
  const int8_t* read;
  const float *read_scale, *context, *epsilon, *recur;
  Cell cell;
  const float *start, *step, *markov, *up, *down;
  const int8_t* head;
  const float* head_scale;
  const int32_t* vocab;
  const float *conf, *conf_bias, *gate, *gate_temperatures, *lookup;
};

struct Inputs {
  int64_t slots, length;  // B, S
  const float* hidden;
  const int32_t *token, *position, *history;
  const bool* active;
  const int32_t* sources;
  const float* temperature;
  const uint32_t* seed;
  const int32_t *room, *predicted;
  const float* floor;
};

struct Results {
  int32_t *tokens, *source;  // [B, J]
  float* probability;
  int32_t* length;  // [B]
};

struct Chain {
  int64_t slot, room;
  int64_t last;       // index of the last token in the history
  int64_t predicted;  // where a prediction begins in the history's row; behind anything: there is none
  int kind;             // temperature class
  bool lookup, shadow;  // may use it
  Match match{0, 0};
  int64_t found = 0;  // at which place
  bool alive = true, follows = false;
  float product = 1;
  int64_t seen = 0;  // tokens that the state has seen
  float *state = nullptr, *next = nullptr, *context = nullptr, *u = nullptr, *gate = nullptr, *candidate = nullptr,
        *markov = nullptr, *normed = nullptr, *mlp = nullptr, *o = nullptr;
  int16_t* integers = nullptr;
  float scale = 0;
  // Of one place:
  int32_t copied = -1, guess = -1;
  bool asks = false;
  float guess_probability = 0;
};

const Kernels& kernels() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512) return avx512_kernels;
  if (isa() == Isa::avx2) return avx2_kernels;
#endif
  return portable_kernels;
}

// Calls `body(begin, size)` over [0, n) in pieces. The weights of a place are those of the next one: a thread that takes
// the same pieces again finds them in its cache.
template <class Body>
void in_chunks(int64_t n, int64_t chunk, Body&& body) {
  parallel_for_near((n + chunk - 1) / chunk, [&](int64_t i) { body(i * chunk, std::min(chunk, n - i * chunk)); });
}

// Memory of the calling thread, kept between calls.
struct Memory {
  std::vector<float> floats;
  std::vector<int16_t> integers;
  std::vector<Top> tops;
};

class Drafter {
 public:
  Drafter(const Weights& weights, const Inputs& inputs, const Results& results, Memory& memory)
      : run_(kernels()), w_(weights), in_(inputs), out_(results), memory_(memory) {
    // The sum of `rank` products with magnitudes up to 128 and this must fit 32 bits.
    limit_ = static_cast<int32_t>(std::min<int64_t>(32767, 0x7FFFFFFF / (128 * w_.rank)));
  }

  void draft() {
    begin();
    for (int64_t place = 0; place < kDrafts; ++place) {
      find_matches(place);
      bool any = false;
      for (Chain& chain : chains_) any |= chain.alive && look_up(chain, place);
      if (!any) return;
      ask(place);
      for (Chain& chain : chains_) {
        if (chain.alive) take(chain, place);
      }
    }
  }

 private:
  // --- before the first place ---

  void begin() {
    std::fill_n(out_.tokens, in_.slots * kDrafts, -1);
    std::fill_n(out_.source, in_.slots * kDrafts, 0);
    std::fill_n(out_.probability, in_.slots * kDrafts, 0.0f);
    std::fill_n(out_.length, in_.slots, 0);
    for (int64_t b = 0; b < in_.slots; ++b) {
      const int64_t room = in_.active[b] ? std::min<int64_t>(in_.room[b], kDrafts) : 0;
      if (room <= 0 || !(in_.sources[b] & (kLookup | kShadow))) continue;
      Chain chain{};
      chain.slot = b;
      chain.room = room;
      chain.last = std::min<int64_t>(in_.position[b], in_.length - 1);
      const int64_t begin = in_.length - std::clamp<int64_t>(in_.predicted[b], 0, in_.length);
      const bool predicted = begin < in_.length && in_.position[b] + kDrafts < begin;
      chain.predicted = predicted ? begin : std::numeric_limits<int64_t>::max();
      chain.kind = temperature_class(in_.temperature[b]);
      chain.lookup = in_.sources[b] & kLookup;
      chain.shadow = in_.sources[b] & kShadow;
      chains_.push_back(chain);
    }
    give_memory();
  }

  int temperature_class(float temperature) const {
    if (!(temperature >= kMinNormal) || w_.classes == 1) return 0;
    int64_t nearest = 1;
    for (int64_t c = 2; c < w_.classes; ++c) {
      if (std::abs(temperature - w_.gate_temperatures[c]) < std::abs(temperature - w_.gate_temperatures[nearest]))
        nearest = c;
    }
    return static_cast<int>(nearest);
  }

  void give_memory() {
    const auto lines = [](int64_t n) { return (n + 15) / 16 * 16; };
    const int64_t rank = lines(w_.rank), integers = (w_.rank + 31) / 32 * 32;
    const int64_t normed = lines(std::max(w_.rank, w_.width)), mlp = lines(w_.mlp), all = 8 * rank + normed + mlp;
    const auto n = static_cast<int64_t>(chains_.size());
    grow(memory_.floats, n * all);
    grow(memory_.integers, n * integers);
    for (int64_t i = 0; i < n; ++i) {
      Chain& chain = chains_[i];
      float* at = memory_.floats.data() + i * all;
      for (float** part : {&chain.state, &chain.next, &chain.context, &chain.u, &chain.gate, &chain.candidate,
                           &chain.markov, &chain.o}) {
        *part = at;
        at += rank;
      }
      chain.normed = at;
      chain.mlp = at + normed;
      chain.integers = memory_.integers.data() + i * integers;
    }
  }

  template <class T>
  static void grow(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(static_cast<size_t>(size));
  }

  // --- one place ---

  // A match for every chain that has none.
  void find_matches(int64_t place) {
    asking_.clear();
    for (Chain& chain : chains_) {
      if (chain.alive && chain.lookup && !chain.follows) asking_.push_back(&chain);
    }
    parallel_for(static_cast<int64_t>(asking_.size()), [&](int64_t i) {
      Chain& chain = *asking_[i];
      int32_t tail[kLongestMatch];
      const int64_t end = chain.last + place + 1, known = std::min<int64_t>(kLongestMatch, end);
      for (int64_t back = 0; back < known; ++back) tail[back] = token_at(chain, end - 1 - back);
      const int64_t limit = place > 0 ? chain.last + 1 : chain.last;  // an occurrence is not the tail itself
      const int32_t* const history = in_.history + chain.slot * in_.length;
      chain.match = run_.find_match(history, limit, tail, known);
      if (chain.predicted < in_.length) {
        const Match found = run_.find_match(history + chain.predicted, in_.length - chain.predicted, tail, known);
        if (found.length && found.length >= chain.match.length)
          chain.match = {found.length, found.next + chain.predicted};
      }
      chain.found = place;
      chain.follows = chain.match.length > 0;
    });
  }

  // Of the history, which goes on with the chain's drafts, or of the prediction; -1 behind its end.
  int32_t token_at(const Chain& chain, int64_t at) const {
    if (at >= chain.predicted) return at < in_.length ? in_.history[chain.slot * in_.length + at] : -1;
    const int64_t behind = at - chain.last - 1;
    return behind < 0 ? in_.history[chain.slot * in_.length + at] : out_.tokens[chain.slot * kDrafts + behind];
  }

  // The lookup's token, and whether to ask the shadow. Whether anybody proposes anything.
  bool look_up(Chain& chain, int64_t place) {
    chain.copied = chain.follows ? token_at(chain, chain.match.next + place - chain.found) : -1;
    chain.follows = chain.copied >= 0;
    const bool certain = chain.follows && lookup_probability(chain, kUnknown, place) >= kCertain;
    chain.asks = chain.shadow && place < kPlaces && !certain;
    if (!chain.asks && !chain.follows) chain.alive = false;
    return chain.alive;
  }

  float lookup_probability(const Chain& chain, int says, int64_t place) const {
    const int64_t row = (chain.kind * (kLongestMatch + 1) + chain.match.length) * kAnswers + says;
    return w_.lookup[row * kDrafts + place - chain.found];
  }

  // The more certain of the two proposals, unless it is not certain enough.
  void take(Chain& chain, int64_t place) {
    const int says = chain.asks ? chain.guess == chain.copied : kUnknown;
    const float expected = chain.follows ? lookup_probability(chain, says, place) : 0;
    const bool from_shadow = chain.asks && !(chain.follows && !(chain.guess_probability > expected));
    const int32_t token = from_shadow ? chain.guess : chain.copied;
    const float probability = from_shadow ? chain.guess_probability : expected;
    const float product = chain.product * probability;
    if (!(product >= *in_.floor)) {
      chain.alive = false;
      return;
    }
    const int64_t at = chain.slot * kDrafts + place;
    out_.tokens[at] = token;
    out_.source[at] = from_shadow ? kShadow : kLookup;
    out_.probability[at] = probability;
    out_.length[chain.slot] = static_cast<int32_t>(place + 1);
    chain.product = product;
    chain.follows = chain.follows && token == chain.copied;
    chain.alive = place + 1 < chain.room;
  }

  // --- the shadow ---

  // A guess for every chain that asks.
  void ask(int64_t place) {
    asking_.clear();
    for (Chain& chain : chains_) {
      if (chain.alive && chain.asks) asking_.push_back(&chain);
    }
    if (asking_.empty()) return;
    // A chain that did not ask at earlier places has a state that is behind.
    for (;;) {
      batch_.clear();
      for (Chain* chain : asking_) {
        if (chain->seen < place) batch_.push_back(chain);
      }
      if (batch_.empty()) break;
      roll(false);
    }
    batch_ = asking_;
    roll(true);
    finish_states();
    score(place);
  }

  // The vectors of the batch that go through a product, and those that come out.
  struct Vectors {
    std::vector<float*> from, to;
  };

  Vectors vectors(float* Chain::*from, float* Chain::*to, bool first_step_only = false) const {
    Vectors result;
    for (const Chain* chain : batch_) {
      if (first_step_only && chain->seen > 0) continue;
      result.from.push_back(chain->*from);
      result.to.push_back(chain->*to);
    }
    return result;
  }

  // Channels [at, at + n) of products with w.
  void product(const Vectors& x, int64_t in, const float* w, int64_t stride, int64_t at, int64_t n) const {
    run_.product(x.from.data(), static_cast<int64_t>(x.from.size()), in, w, stride, at, n, x.to.data());
  }

  // The states of the batch see one more token; `last`: and what the head needs of it.
  void roll(bool last) {
    const int64_t rank = w_.rank;
    for (Chain* chain : batch_) begin_step(*chain);
    const Vectors contexts = vectors(&Chain::normed, &Chain::context, true), reads = vectors(&Chain::u, &Chain::markov);
    const Vectors gates = vectors(&Chain::state, &Chain::gate);
    const Vectors candidates = vectors(&Chain::state, &Chain::candidate);
    in_chunks(rank, kChannels, [&](int64_t at, int64_t n) {
      product(contexts, w_.width, w_.context, rank, at, n);
      product(gates, rank, w_.recur, 2 * rank, at, n);
      product(candidates, rank, w_.recur + rank, 2 * rank, at, n);
      if (last) product(reads, rank, w_.markov, rank, at, n);
      for (Chain* chain : batch_)
        run_.cell(w_.cell, chain->gate, chain->candidate, chain->u, chain->context, chain->state, at, n, chain->next);
    });
    for (Chain* chain : batch_) {
      std::swap(chain->state, chain->next);
      ++chain->seen;
    }
  }

  void begin_step(Chain& chain) {
    const int64_t place = chain.seen;
    if (place == 0) {
      std::copy_n(w_.start, w_.rank, chain.state);
      run_.normalise(in_.hidden + chain.slot * w_.width, w_.width, *w_.epsilon, chain.normed);
    }
    const int32_t before = place == 0 ? in_.token[chain.slot] : out_.tokens[chain.slot * kDrafts + place - 1];
    const int64_t token = std::clamp<int64_t>(before, 0, w_.vocab_size - 1);
    run_.read(w_.read + token * w_.rank, w_.read_scale[token], w_.step + place * w_.rank, w_.rank, chain.u);
  }

  // o of the batch, as integers.
  void finish_states() {
    const int64_t rank = w_.rank;
    for (Chain* chain : batch_) run_.normalise(chain->state, rank, *w_.epsilon, chain->normed);
    const Vectors up = vectors(&Chain::normed, &Chain::mlp), down = vectors(&Chain::mlp, &Chain::o);
    in_chunks(w_.mlp, kFewWeights, [&](int64_t at, int64_t n) {
      product(up, rank, w_.up, w_.mlp, at, n);
      for (Chain* chain : batch_) run_.silu(chain->mlp + at, n);
    });
    in_chunks(rank, kFewWeights, [&](int64_t at, int64_t n) {
      product(down, w_.mlp, w_.down, rank, at, n);
      for (Chain* chain : batch_) run_.add(chain->state + at, chain->markov + at, n, chain->o + at);
    });
    for (Chain* chain : batch_) chain->scale = run_.quantise(chain->o, rank, limit_, chain->integers);
  }

  // The guesses of the batch.
  void score(int64_t place) {
    const auto count = static_cast<int64_t>(batch_.size());
    const int64_t chunks = (w_.head_size + kHeadRows - 1) / kHeadRows;
    grow(memory_.tops, chunks * count);
    in_chunks(w_.head_size, kHeadRows, [&](int64_t at, int64_t n) {
      for (int64_t i = 0; i < count; i += kPair)
        score_rows(place, at, n, i, static_cast<int>(std::min<int64_t>(kPair, count - i)));
    });
    for (int64_t i = 0; i < count; ++i) {
      Top top = memory_.tops[i];
      for (int64_t chunk = 1; chunk < chunks; ++chunk) top = run_.merge(top, memory_.tops[chunk * count + i]);
      guess(*batch_[i], place, top);
    }
  }

  // Rows [at, at + n) of the head for `pair` chains of the batch.
  void score_rows(int64_t place, int64_t at, int64_t n, int64_t first, int pair) const {
    int32_t dots[kPair][kHeadRows];
    const int16_t* x[kPair] = {};
    int32_t* out[kPair] = {};
    for (int i = 0; i < pair; ++i) {
      x[i] = batch_[first + i]->integers;
      out[i] = dots[i];
    }
    run_.dots(w_.head + at * w_.rank, n, w_.rank, x, pair, out);
    for (int i = 0; i < pair; ++i) {
      const Chain& chain = *batch_[first + i];
      const float temperature = in_.temperature[chain.slot];
      const uint32_t* const seed = in_.seed + 2 * chain.slot;
      const auto position = static_cast<uint32_t>(in_.position[chain.slot]) + 1 + static_cast<uint32_t>(place);
      const Scoring scoring{chain.scale, temperature >= kMinNormal ? temperature : 0, {seed[0], seed[1], position}};
      Top& top = memory_.tops[at / kHeadRows * static_cast<int64_t>(batch_.size()) + first + i];
      top = run_.top(dots[i], w_.head_scale + at, w_.vocab + at, n, scoring);
      top.at += at;
    }
  }

  void guess(Chain& chain, int64_t place, const Top& top) const {
    const int64_t rank = w_.rank;
    const float log_total = run_.log(top.total);
    const float features[kFeatures] = {-log_total, top.best - top.second, log_total - top.weighted / top.total};
    float confidence = run_.dot(w_.conf, chain.o, rank) + run_.dot(w_.conf + rank, chain.u, rank);
    for (int64_t i = 0; i < kFeatures; ++i) confidence += w_.conf[2 * rank + i] * features[i];
    confidence += w_.conf_bias[place];
    const float* const gate = w_.gate + (chain.kind * kPlaces + place) * 2;
    chain.guess = w_.vocab[top.at];
    chain.guess_probability = run_.sigmoid(gate[0] * confidence + gate[1]);
  }

  const Kernels& run_;
  const Weights& w_;
  const Inputs& in_;
  const Results& out_;
  Memory& memory_;
  int32_t limit_;
  std::vector<Chain> chains_;
  std::vector<Chain*> asking_, batch_;
};

using ffi::DataType;
constexpr size_t kWeights = 22;  // fields of DraftWeights, before those of DraftInput

Weights weights_of(Arguments& given) {
  Weights w{};
  const int64_t V = w.vocab_size = given.size(0, 0), r = w.rank = given.size(0, 1), D = w.width = given.size(2, 0);
  const int64_t m = w.mlp = given.size(12, 1), Z = w.head_size = given.size(14, 0), C = w.classes = given.size(20, 0);
  w.read = given.take<DataType::S8>("read", {V, r});
  w.read_scale = given.take<DataType::F32>("read_scale", {V});
  w.context = given.take<DataType::F32>("context", {D, r});
  w.epsilon = given.take<DataType::F32>("epsilon", {});
  w.recur = given.take<DataType::F32>("recur", {r, 2 * r});
  w.cell.gate_u = given.take<DataType::F32>("gate_u", {r});
  w.cell.gate_z = given.take<DataType::F32>("gate_z", {r});
  w.cell.bias_g = given.take<DataType::F32>("bias_g", {r});
  w.cell.bias_c = given.take<DataType::F32>("bias_c", {r});
  w.start = given.take<DataType::F32>("start", {r});
  w.step = given.take<DataType::F32>("step", {kPlaces, r});
  w.markov = given.take<DataType::F32>("markov", {r, r});
  w.up = given.take<DataType::F32>("up", {r, m});
  w.down = given.take<DataType::F32>("down", {m, r});
  w.head = given.take<DataType::S8>("head", {Z, r});
  w.head_scale = given.take<DataType::F32>("head_scale", {Z});
  w.vocab = given.take<DataType::S32>("vocab", {Z});
  w.conf = given.take<DataType::F32>("conf", {2 * r + kFeatures});
  w.conf_bias = given.take<DataType::F32>("conf_bias", {kPlaces});
  w.gate = given.take<DataType::F32>("gate", {C, kPlaces, 2});
  w.gate_temperatures = given.take<DataType::F32>("gate_temperatures", {C});
  w.lookup = given.take<DataType::F32>("lookup", {C, kLongestMatch + 1, kAnswers, kDrafts});
  return w;
}

Inputs inputs_of(Arguments& given, int64_t D) {
  Inputs in{};
  const int64_t B = in.slots = given.size(kWeights, 0), S = in.length = given.size(kWeights + 3, 1);
  in.hidden = given.take<DataType::F32>("hidden", {B, D});
  in.token = given.take<DataType::S32>("token", {B});
  in.position = given.take<DataType::S32>("position", {B});
  in.history = given.take<DataType::S32>("history", {B, S});
  in.active = given.take<DataType::PRED>("active", {B});
  in.sources = given.take<DataType::S32>("sources", {B});
  in.temperature = given.take<DataType::F32>("temperature", {B});
  in.seed = given.take<DataType::U32>("seed", {B, 2});
  in.room = given.take<DataType::S32>("room", {B});
  in.predicted = given.take<DataType::S32>("predicted", {B});
  in.floor = given.take<DataType::F32>("floor", {});
  return in;
}

// The fields of DraftWeights and DraftInput, in order.
ffi::Error draft(ffi::RemainingArgs args, ffi::ResultBuffer<ffi::S32> tokens, ffi::ResultBuffer<ffi::S32> source,
                 ffi::ResultBuffer<ffi::F32> probability, ffi::ResultBuffer<ffi::S32> length) {
  Arguments given(args);
  const Weights weights = weights_of(given);
  const Inputs inputs = inputs_of(given, weights.width);
  const int64_t B = inputs.slots;
  if (!given.wrong().empty())
    return invalid("umbra_draft: " + given.wrong() + " does not have the type and shape of kernels/draft/base.py");
  if (!has_shape(*tokens, {B, kDrafts}) || !has_shape(*source, {B, kDrafts}) ||
      !has_shape(*probability, {B, kDrafts}) || !has_shape(*length, {B}))
    return invalid("umbra_draft: a result does not have the shape of kernels/draft/base.py");
  for (const int64_t size : {weights.vocab_size, weights.rank, weights.width, weights.mlp, weights.head_size,
                             weights.classes, inputs.length}) {
    if (size < 1) return invalid("umbra_draft: an axis has length 0");
  }
  FloatMode mode;
  static thread_local Memory memory;
  const Results results{tokens->typed_data(), source->typed_data(), probability->typed_data(), length->typed_data()};
  Drafter(weights, inputs, results, memory).draft();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace umbra::draft

UMBRA_HANDLER(umbra_draft, umbra::draft::draft,
              xla::ffi::Ffi::Bind()
                  .RemainingArgs()
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
