#include "linear_run.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "cpu.h"
#include "threads.h"

namespace umbra {

const LinearKernels& linear_kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::amx: return amx::linear_kernels;
    case Isa::avx512: return avx512::linear_kernels;
    case Isa::avx2: return avx2::linear_kernels;
    default: break;
  }
#endif
  return portable::linear_kernels;
}

namespace {

// Memory of one thread that grows to the largest call it has seen.
class Scratch {
 public:
  uint8_t* get(int64_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size_)));
      if (!memory_) std::abort();  // as `new` would in a function that must not throw
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  int64_t size_ = 0;
};

thread_local Scratch call_scratch;  // what one call's threads share
thread_local Scratch row_scratch;   // rows in the making

// Hands out pieces of one block of memory; the first round, without memory, measures it.
class Pieces {
 public:
  explicit Pieces(uint8_t* memory) : memory_(reinterpret_cast<uintptr_t>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    T* const piece = reinterpret_cast<T*>(memory_ + size_);
    size_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t size() const { return size_; }

 private:
  uintptr_t memory_;
  int64_t size_ = 0;
};

Rows lay_out(Pieces& pieces, const LinearKernels& kernels, const Preparation& p, int64_t n_rows) {
  Rows rows{};
  rows.count = n_rows;
  // Groups of many rows lie an odd number of cache lines apart, or those of a row would all want the same few places of
  // the first cache.
  rows.stride = n_rows < 16 ? n_rows : (n_rows + 1) / 4 * 4 + 2;
  rows.width = (p.in + 15) / 16 * 16;
  if (p.integers) {
    const int64_t groups = p.in / kGroup * rows.stride;
    rows.q = pieces.take<int8_t>(groups * kGroup);
    rows.scale = pieces.take<float>(groups);
    rows.total = pieces.take<float>(groups);
    if (kernels.wants_offsets) rows.offsets = pieces.take<int32_t>(groups * 4);
  }
  if (p.floats) rows.values = pieces.take<float>(n_rows * rows.width);
  return rows;
}

// Costs in nanoseconds of one core, roughly: they only decide how work is cut.
constexpr double kClaim = 1500, kLongest = 15000, kOwn = 10000;

// Chunks for `total` of work, none cheaper than kClaim or dearer than kLongest, about six for each thread.
double chunk_cost(double total) { return std::clamp(total / (6 * thread_count()), kClaim, kLongest); }

double row_cost(const Preparation& p) {
  return 0.2 * static_cast<double>(p.in) * (p.activation ? 5 : p.norm ? 2 : 1);
}

void prepare_rows(const LinearKernels& kernels, const Preparation& p, const Rows& rows) {
  const auto some = [&](int64_t first, int64_t end) {
    const auto bytes = (end - first) * p.in * static_cast<int64_t>(sizeof(float));
    kernels.prepare(p, first, end, reinterpret_cast<float*>(row_scratch.get(bytes)), rows);
  };
  const int64_t each = std::max<int64_t>(1, static_cast<int64_t>(kClaim / row_cost(p)));
  if (rows.count <= each) return some(0, rows.count);
  parallel_for((rows.count + each - 1) / each,
               [&](int64_t chunk) { some(chunk * each, std::min(rows.count, (chunk + 1) * each)); });
}

// The prepared rows of one call: made by all threads together and shared, or, where that would save less time than it
// takes to wait for one another and to read what others wrote, by each thread for itself when it first needs them.
class Operands {
 public:
  // `before_hand`: the rows are about to be overwritten, so that no thread can come back to them.
  Operands(const LinearKernels& kernels, const Preparation& p, int64_t n_rows, bool before_hand, const Rows& shared)
      : kernels_(kernels), p_(p), n_rows_(n_rows), shared_(shared) {
    const double saved = row_cost(p) * static_cast<double>(n_rows - (n_rows + thread_count() - 1) / thread_count());
    if (before_hand || saved > kOwn) {
      prepare_rows(kernels, p, shared);
    } else {
      static std::atomic<uint64_t> calls{0};
      call_ = calls.fetch_add(1, std::memory_order_relaxed) + 1;
    }
  }

  const Rows& get() const {
    if (!call_) return shared_;
    static thread_local Own own;
    if (own.call != call_) {
      Pieces sizes(nullptr);
      lay_out(sizes, kernels_, p_, n_rows_);
      Pieces pieces(own.memory.get(sizes.size()));
      own.rows = lay_out(pieces, kernels_, p_, n_rows_);
      kernels_.prepare(p_, 0, n_rows_, reinterpret_cast<float*>(row_scratch.get(n_rows_ * p_.in * 4)), own.rows);
      own.call = call_;
    }
    return own.rows;
  }

 private:
  struct Own {
    uint64_t call = 0;
    Scratch memory;
    Rows rows{};
  };

  const LinearKernels& kernels_;
  const Preparation& p_;
  const int64_t n_rows_;
  const Rows& shared_;
  uint64_t call_ = 0;  // 0: shared
};

double block_cost(const Matrix& m, int64_t rows) {
  const auto n = static_cast<double>(rows), in = static_cast<double>(m.in);
  if (!is_quantised(m.form)) return in * std::max((m.form == Form::bfloat16 ? 32 : 64) / 13.0, 0.4 * n);
  const double bytes = static_cast<double>(group_bytes(m.form));
  return in / kGroup * std::max(bytes / 13, n * (bytes < 512 ? 5 : 8));
}

// Few rows are done four blocks at a time, far apart in memory; many rows are bound by arithmetic, and two blocks share
// the reading of rows.
int streams_for(int64_t rows) { return rows <= 16 ? kStreams : 2; }

// Calls `done(i, out)` with `out` [n, 16] for each of the `count` blocks `block(i)`, of matrices like `matrix`; n rows
// from `row` on. Before a block is computed `soon(i)` is called, to fetch what `done` will write.
template <class At, class Soon, class Done>
void products(const LinearKernels& kernels, const Matrix& matrix, const Rows& rows, int64_t row, int64_t n,
              int64_t count, const At& block, const Soon& soon, const Done& done) {
  alignas(64) float out[2 * kMaxRows * kChannels];
  static_assert(kStreams * 16 <= 2 * kMaxRows);
  const int streams = streams_for(n);
  const int64_t each = (count + streams - 1) / streams;
  const bool begun = kernels.begin && kernels.begin(matrix.form, n);
  for (int64_t i = 0; i < each; ++i) {
    Product p{matrix.form, matrix.in, &rows, row, n, {}, 0, out};
    for (int64_t at = i; at < count; at += each) p.block[p.n_blocks++] = block(at);
    for (int64_t at = i; at < count; at += each) soon(at);
    kernels.product(p);
    for (int64_t s = 0; s < p.n_blocks; ++s) done(i + s * each, out + s * n * kChannels);
  }
  if (begun) kernels.end();
}

// These must be inlined: a function that does nothing but fetch has no effect, GCC finds, and is not called.
__attribute__((always_inline)) inline void fetch_to_read(const void* p) { __builtin_prefetch(p); }
__attribute__((always_inline)) inline void fetch_to_write(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));  // does nothing on a processor that does not know it
#else
  __builtin_prefetch(p, 1);
#endif
}

// How the blocks of a call's matrices are cut into chunks.
struct Plan {
  int64_t size[kMaxMatrices];  // blocks of one chunk
  int64_t end[kMaxMatrices];   // chunks up to and with a matrix
  int64_t chunks = 0;

  explicit Plan(const LinearCall& call) {
    double total = 0;
    for (int i = 0; i < call.n_targets; ++i) {
      const Matrix& m = call.targets[i].matrix;
      total += block_cost(m, call.n_rows) * static_cast<double>(m.blocks());
    }
    const double cost = chunk_cost(total);
    const int streams = streams_for(call.n_rows);
    for (int i = 0; i < call.n_targets; ++i) {
      const Matrix& m = call.targets[i].matrix;
      const auto wanted = static_cast<int64_t>(cost / block_cost(m, call.n_rows));
      size[i] = std::max<int64_t>(1, (wanted + streams - 1) / streams) * streams;
      end[i] = chunks += (m.blocks() + size[i] - 1) / size[i];
    }
  }
};

// Results of a block with their bias and residual, into `to` [R, out].
void write_block(const LinearKernels& kernels, const Target& target, const float* residuals, float* to, int64_t block,
                 int64_t row, int64_t n, const float* out) {
  const int64_t width = target.matrix.out, first = block * kChannels, begin = row * width + first;
  const int64_t channels = std::min<int64_t>(kChannels, width - first);
  if (channels == kChannels && !target.bias)  // nearly always: vectors' work
    return kernels.write(out, n, residuals ? residuals + begin : nullptr, to + begin, width);
  for (int64_t r = 0; r < n; ++r) {
    const int64_t at = begin + r * width;
    for (int64_t c = 0; c < channels; ++c) {
      float value = out[r * kChannels + c];
      if (target.bias) value += target.bias[first + c];
      to[at + c] = residuals ? residuals[at + c] + value : value;
    }
  }
}

void finish_rows(const LinearKernels& kernels, const LinearCall& call, const float* raw) {
  const Target& target = call.targets[0];
  const int64_t width = target.matrix.out;
  const int64_t each = std::max<int64_t>(1, static_cast<int64_t>(kClaim / (0.2 * static_cast<double>(width))));
  const auto some = [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row)
      kernels.finish(raw + row * width, width, call.post_norm, call.post_epsilon,
                     call.residual ? call.residual + row * width : nullptr, target.y + row * width);
  };
  if (call.n_rows <= each) return some(0, call.n_rows);
  parallel_for((call.n_rows + each - 1) / each,
               [&](int64_t chunk) { some(chunk * each, std::min(call.n_rows, (chunk + 1) * each)); });
}

// All products of a call, with `rows()` [n_rows, in]. `raw` [n_rows, out] holds results that a norm follows, or is null.
template <class Operand>
void multiply(const LinearKernels& kernels, const LinearCall& call, float* raw, const Operand& operand) {
  const float* const residuals = raw ? nullptr : call.residual;
  const Plan plan(call);
  parallel_for(plan.chunks, [&](int64_t chunk) {
    int i = 0;
    while (chunk >= plan.end[i]) ++i;
    const Target& target = call.targets[i];
    const int64_t first = (chunk - (i ? plan.end[i - 1] : 0)) * plan.size[i];
    const int64_t count = std::min(plan.size[i], target.matrix.blocks() - first);
    const Rows& rows = operand();
    for (int64_t row = 0; row < call.n_rows; row += kMaxRows) {
      const int64_t n = std::min<int64_t>(kMaxRows, call.n_rows - row);
      const auto block = [&](int64_t i) { return Block(target.matrix, first + i); };
      // The lines to be written lie in the cache of the core that wrote or read them last.
      const auto soon = [&](int64_t i) __attribute__((always_inline)) {
        for (int64_t r = 0; r < n; ++r) {
          const int64_t at = (row + r) * target.matrix.out + (first + i) * kChannels;
          fetch_to_write((raw ? raw : target.y) + at);
          if (residuals && residuals != target.y) fetch_to_read(residuals + at);
        }
      };
      products(kernels, target.matrix, rows, row, n, count, block, soon, [&](int64_t i, const float* out) {
        write_block(kernels, target, residuals, raw ? raw : target.y, first + i, row, n, out);
      });
    }
  });
  if (raw) finish_rows(kernels, call, raw);
}

// Floats for the results that a norm follows: their place in memory may still be the residual's.
int64_t raw_size(const LinearCall& call) { return call.post_norm ? call.n_rows * call.targets[0].matrix.out : 0; }

// The operands of `down`, from those of the gate: what a thread multiplies it passes on, so that no row is written as
// floats, read by the other threads and prepared by each.
void gate(const LinearKernels& kernels, const GatedCall& call, const Operands& operands, const Rows& hidden) {
  constexpr int64_t kMost = 16;  // blocks of a chunk
  const double pair = block_cost(call.gate, call.n_rows) + block_cost(call.up, call.n_rows);
  const int64_t blocks = call.gate.blocks(), streams = streams_for(call.n_rows);  // an even number: whole groups
  const auto wanted = static_cast<int64_t>(chunk_cost(pair * static_cast<double>(blocks)) / pair);
  const int64_t size = std::clamp((wanted + streams - 1) / streams * streams, streams, kMost);
  parallel_for((blocks + size - 1) / size, [&](int64_t chunk) {
    const int64_t first = chunk * size, count = std::min(size, blocks - first);
    const Rows& rows = operands.get();
    const int64_t most = std::min<int64_t>(kMaxRows, call.n_rows) * count * kChannels;
    auto* const values = reinterpret_cast<float*>(row_scratch.get(3 * most * static_cast<int64_t>(sizeof(float))));
    for (int64_t row = 0; row < call.n_rows; row += kMaxRows) {
      const int64_t n = std::min<int64_t>(kMaxRows, call.n_rows - row);
      if (hidden.q) {  // as in `multiply`
        for (int64_t at = first * kChannels; at < (first + count) * kChannels; at += kGroup) {
          const int8_t* const q = hidden.q + at * hidden.stride + row * kGroup;
          for (int64_t r = 0; r < n * kGroup; r += 64) fetch_to_write(q + r);
        }
      }
      // Blocks of the gate, then of the other one: together they fill as many streams.
      const auto some = [&](int64_t begin, int64_t end) {
        const auto block = [&](int64_t i) {
          return begin + i < count ? Block(call.gate, first + begin + i) : Block(call.up, first + begin + i - count);
        };
        products(kernels, begin < count ? call.gate : call.up, rows, row, n, end - begin, block, [](int64_t) {},
                 [&](int64_t i, const float* out) {
                   std::memcpy(values + (begin + i) * n * kChannels, out, n * kChannels * sizeof(float));
                 });
      };
      if (call.gate.form == call.up.form) some(0, 2 * count);
      else some(0, count), some(count, 2 * count);
      const float* const ups = values + count * n * kChannels;
      kernels.gate({values, ups, call.activation, row, n, first, count, call.gate.out, hidden.q != nullptr,
                    hidden.values != nullptr}, values + 2 * most, hidden);
    }
  });
}

}  // namespace

void run_linear(const LinearCall& call) {
  if (call.n_rows <= 0) return;
  const FloatMode mode;
  const LinearKernels& kernels = linear_kernels();
  Pieces sizes(nullptr);
  lay_out(sizes, kernels, call.preparation, call.n_rows);
  sizes.take<float>(raw_size(call));
  Pieces pieces(call_scratch.get(sizes.size()));
  const Rows shared = lay_out(pieces, kernels, call.preparation, call.n_rows);
  float* const raw = call.post_norm ? pieces.take<float>(raw_size(call)) : nullptr;
  bool overwritten = false;
  for (int i = 0; i < call.n_targets; ++i)
    overwritten |= call.targets[i].y == call.preparation.x || call.targets[i].y == call.preparation.up;
  const Operands operands(kernels, call.preparation, call.n_rows, overwritten, shared);
  multiply(kernels, call, raw, [&]() -> const Rows& { return operands.get(); });
}

void run_gated(const GatedCall& call) {
  if (call.n_rows <= 0) return;
  const FloatMode mode;
  const LinearKernels& kernels = linear_kernels();
  LinearCall down = call.down;
  down.n_rows = call.n_rows;
  Preparation& made = down.preparation = {};
  made.in = down.targets[0].matrix.in;
  made.integers = is_quantised(down.targets[0].matrix.form), made.floats = !made.integers;
  const auto place = [&](Pieces& pieces, Rows& shared, Rows& hidden, float*& raw) {
    shared = lay_out(pieces, kernels, call.preparation, call.n_rows);
    hidden = lay_out(pieces, kernels, made, call.n_rows);
    raw = pieces.take<float>(raw_size(down));
  };
  Rows shared, hidden;
  float* raw;
  Pieces sizes(nullptr);
  place(sizes, shared, hidden, raw);
  Pieces pieces(call_scratch.get(sizes.size()));
  place(pieces, shared, hidden, raw);
  gate(kernels, call, Operands(kernels, call.preparation, call.n_rows, false, shared), hidden);
  multiply(kernels, down, down.post_norm ? raw : nullptr, [&]() -> const Rows& { return hidden; });
}

void run_head(const HeadCall& call) {
  if (call.n_rows <= 0) return;
  const FloatMode mode;
  const LinearKernels& kernels = linear_kernels();
  const int64_t segments = (call.matrix.out + kSegment - 1) / kSegment;
  Pieces sizes(nullptr);
  lay_out(sizes, kernels, call.preparation, call.n_rows);
  sizes.take<Summary>(call.n_rows * segments);
  Pieces pieces(call_scratch.get(sizes.size()));
  const Rows shared = lay_out(pieces, kernels, call.preparation, call.n_rows);
  auto* const parts = pieces.take<Summary>(call.n_rows * segments);  // [R, segments]
  const Operands operands(kernels, call.preparation, call.n_rows, false, shared);

  constexpr int64_t kRowsAtOnce = 16, kBlocks = kSegment / kChannels;
  parallel_for(segments, [&](int64_t segment) {
    alignas(64) float logits[kRowsAtOnce * kSegment];
    const int64_t first = segment * kBlocks, count = std::min(kBlocks, call.matrix.blocks() - first);
    const Rows& rows = operands.get();
    for (int64_t row = 0; row < call.n_rows; row += kRowsAtOnce) {
      const int64_t n = std::min(kRowsAtOnce, call.n_rows - row);
      const auto block = [&](int64_t i) { return Block(call.matrix, first + i); };
      products(kernels, call.matrix, rows, row, n, count, block, [](int64_t) {}, [&](int64_t i, const float* out) {
        const int64_t valid = block(i).channels;
        for (int64_t r = 0; r < n; ++r) {
          float* const at = logits + r * kSegment + i * kChannels;
          if (valid == kChannels) {
            std::memcpy(at, out + r * kChannels, kChannels * sizeof(float));
            continue;
          }
          for (int64_t c = 0; c < kChannels; ++c) at[c] = c < valid ? out[r * kChannels + c] : -__builtin_inff();
        }
      });
      for (int64_t r = 0; r < n; ++r)
        parts[(row + r) * segments + segment] =
            kernels.summarise(logits + r * kSegment, count * kChannels, static_cast<int32_t>(first * kChannels));
    }
  });
  for (int64_t r = 0; r < call.n_rows; ++r)
    kernels.combine(parts + r * segments, segments, call.token + r, call.highest + r, call.log_sum + r);
}

void run_embed(const Matrix& table, const int32_t* ids, int64_t n, float* out) {
  const FloatMode mode;
  const LinearKernels& kernels = linear_kernels();
  const auto one = [&](int64_t i) {
    const int64_t channel = std::clamp<int64_t>(ids[i], 0, table.out - 1);
    kernels.channel(table, channel, out + i * table.in);
  };
  constexpr int64_t kEach = 4;
  if (n <= kEach) {
    for (int64_t i = 0; i < n; ++i) one(i);
    return;
  }
  parallel_for((n + kEach - 1) / kEach, [&](int64_t chunk) {
    for (int64_t i = chunk * kEach; i < std::min(n, (chunk + 1) * kEach); ++i) one(i);
  });
}

}  // namespace umbra
