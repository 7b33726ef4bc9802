// Attention over a paged KV pool: one custom call prepares queries and keys, writes keys and values, and attends.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "handler.h"
#include "threads.h"

namespace umbra {

int64_t attention_scratch(int rows) {
  const int64_t per_row = kBlock * 4 + kBlock * 2 + kBlock / kSpan * 4;
  return 2 * kBlock * 4 + kWideBytes + per_row * (rows + kTileOfRows);
}

namespace {

using S32 = ffi::Buffer<ffi::S32>;
using F32 = ffi::Buffer<ffi::F32>;

constexpr int64_t kSplitBytes = 4 << 20;  // of states of single blocks, of one item
constexpr int64_t kItemsPerThread = 16;

AttentionKernel kernel_for(KvType type) {
#if defined(__x86_64__)
  if (isa() == Isa::amx) return amx::attention_kernel(type);
  if (isa() == Isa::avx512) return avx512::attention_kernel(type);
  if (isa() == Isa::avx2) return avx2::attention_kernel(type);
#endif
  return portable::attention_kernel(type);
}

// Memory that is kept from call to call.
class Arena {
 public:
  // At least `bytes`, aligned to 64, with any contents.
  void* get(int64_t bytes) {
    if (bytes > size_) {
      size_ = std::max(bytes, size_ + size_ / 2);
      memory_.reset(new char[size_ + 64]);
    }
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
};

// The operands of a call, sizes checked.
struct Call {
  AttentionHead head;
  AttentionKernel kernel;
  int64_t T, N, K, L, M, blocks, n_tokens, n_groups, layer;
  int window;
  float q_eps, k_eps;
  const float *q, *k, *v, *angles, *q_weight, *k_weight;  // the last three may be null
  const int32_t *slots, *positions, *starts, *counts, *tables, *blocks_at, *n_blocks;  // the last two may be null
  char *values, *scales;
  int64_t value_bytes, scale_bytes;  // of one entry
  float *out, *lse, *mass;           // the last two may be null

  int per_token() const { return static_cast<int>(N / K); }
  int64_t token_bytes() const { return 2 * head.size * value_bytes; }
  // A head's part of a block.
  char* values_of(int64_t block, int64_t k) const {
    return values + ((block * L + layer) * K + k) * kBlock * token_bytes();
  }
  char* scales_of(int64_t block, int64_t k, int which) const {
    return scales ? scales + (((block * L + layer) * K + k) * 2 + which) * kBlock * scale_bytes : nullptr;
  }
  // The entries of a slot's table that a query at `first` sees, or those up to `last` see: [begin, end).
  void entries(int64_t slot, int64_t first, int64_t last, int64_t* begin, int64_t* end) const {
    const int64_t oldest = window > 0 ? std::max<int64_t>(first - window + 1, 0) : 0;
    *begin = entry(slot, oldest / kBlock), *end = entry(slot, last / kBlock + 1);
  }
  // The entry of a slot's table with the sequence's block `block`, or the first one with a later block.
  int64_t entry(int64_t slot, int64_t block) const {
    if (!blocks_at) return std::min(block, M);
    const int32_t* const listed = blocks_at + slot * M;
    return std::lower_bound(listed, listed + std::min<int64_t>(n_blocks[slot], M), block) - listed;
  }
  int64_t listed(int64_t slot) const { return blocks_at ? std::min<int64_t>(n_blocks[slot], M) : M; }
  int64_t block_at(int64_t slot, int64_t entry) const { return blocks_at ? blocks_at[slot * M + entry] : entry; }
};

// Queries in the form that the kernels take, and what is known of every row at the end.
struct Prepared {
  char* wide;      // [T, N, padded]
  float* factors;  // [T, N]
  float* tops;     // [T, N, M]: of every entry alone; only if masses are wanted
  float* totals;
};

void prepare_token(const Call& c, const Prepared& p, int64_t t) {
  const int H = c.head.size;
  if (t < c.n_tokens) std::fill_n(c.out + t * c.N * H, c.N * H, 0.0f);
  if (c.lse) std::fill_n(c.lse + t * c.N, c.N, -std::numeric_limits<float>::infinity());
  if (c.mass) std::fill_n(c.mass + t * c.M, c.M, 0.0f);
  if (t >= c.n_tokens || c.positions[t] < 0) return;
  const float* const turn = c.angles ? c.angles + t * H : nullptr;
  const float* const q_weight = c.q_weight ? c.q_weight + c.layer * H : nullptr;
  const float* const k_weight = c.k_weight ? c.k_weight + c.layer * H : nullptr;
  for (int64_t n = 0; n < c.N; ++n) {
    c.kernel.query(c.head, c.q + (t * c.N + n) * H, q_weight, c.q_eps, turn,
                   p.wide + (t * c.N + n) * c.head.padded * c.kernel.wide_bytes, p.factors + t * c.N + n);
  }
  const int64_t slot = c.slots[t], at = c.entry(slot, c.positions[t] / kBlock);
  if (at >= c.listed(slot) || c.block_at(slot, at) != c.positions[t] / kBlock) return;
  const int64_t block = c.tables[slot * c.M + at], offset = c.positions[t] % kBlock;
  for (int64_t k = 0; k < c.K; ++k) {
    char* const k_scales = c.scales_of(block, k, 0);
    c.kernel.store(c.head, c.k + (t * c.K + k) * H, c.v + (t * c.K + k) * H, k_weight, c.k_eps, turn,
                   c.values_of(block, k) + offset * c.token_bytes(),
                   k_scales ? k_scales + offset * c.scale_bytes : nullptr,
                   k_scales ? c.scales_of(block, k, 1) + offset * c.scale_bytes : nullptr);
  }
}

// The rows of one group with one key/value head, over all the blocks they see.
struct Job {
  int64_t group, k, slot, begin, end;  // entries of the table
  int64_t parts = -1;                  // where the states of its single blocks are kept, in floats; -1: merged at once
  std::unique_ptr<std::atomic<int64_t>> left;  // entries that are not done yet, if `parts` are kept

  int64_t rows(const Call& c) const { return c.counts[group] * c.per_token(); }
};

// Part of a job: what a thread claims.
struct Item {
  int64_t job, begin, end;
};

int64_t state_floats(int64_t rows, int padded) { return (rows * (padded + 2) + 15) / 16 * 16; }

AttentionState state_at(float* memory, int64_t rows, int padded) {
  float* const tops = memory + rows * padded;
  return {tops, tops + rows, memory};
}

class Attention {
 public:
  Attention(const Call& call, const Prepared& prepared) : c_(call), p_(prepared) {}

  void run(Arena& arena) {
    plan();
    parts_ = static_cast<float*>(arena.get(part_floats_ * 4));
    parallel_for(static_cast<int64_t>(items_.size()), [this](int64_t i) { work(i); });
    if (!c_.mass) return;
    parallel_for(c_.n_tokens, [this](int64_t t) { add_mass(t); });
  }

 private:
  void plan() {
    int64_t total = 0;
    for (int64_t g = c_.n_groups - 1; g >= 0; --g) {  // a prompt's last groups see most: they come first
      const int64_t start = c_.starts[g], count = c_.counts[g], first = c_.positions[start], last = first + count - 1;
      if (count < 1 || first < 0) continue;
      const int64_t slot = c_.slots[start];
      int64_t begin, end;
      c_.entries(slot, first, last, &begin, &end);
      if (begin >= end) continue;
      for (int64_t k = 0; k < c_.K; ++k) {
        Job job;
        job.group = g, job.k = k, job.slot = slot, job.begin = begin, job.end = end;
        jobs_.push_back(std::move(job));
        total += end - begin;
      }
    }
    threads_ = thread_count();
    const int64_t most = threads_ > 1 ? std::max<int64_t>(1, total / (threads_ * kItemsPerThread)) : total;
    for (size_t j = 0; j < jobs_.size(); ++j) {
      Job& job = jobs_[j];
      const int64_t n = job.end - job.begin, floats = n * state_floats(job.rows(c_), c_.head.padded);
      if (n <= most + most / 2 || floats * 4 > kSplitBytes) {
        items_.push_back({static_cast<int64_t>(j), job.begin, job.end});
        continue;
      }
      job.parts = part_floats_;
      part_floats_ += floats;
      job.left.reset(new std::atomic<int64_t>(n));
      for (int64_t at = job.begin; at < job.end; at += most) {
        items_.push_back({static_cast<int64_t>(j), at, std::min(at + most, job.end)});
      }
    }
  }

  void work(int64_t i) {
    const Item& item = items_[i];
    Job& job = jobs_[item.job];
    // What this thread will most likely do next.
    const Item* const following = i + threads_ < static_cast<int64_t>(items_.size()) ? &items_[i + threads_] : nullptr;
    const int64_t rows = job.rows(c_);
    const int padded = c_.head.padded;
    static thread_local Arena arena;
    const int64_t floats = state_floats(rows, padded);
    char* const memory = static_cast<char*>(arena.get(attention_scratch(static_cast<int>(rows)) + 8 * floats));
    float* const states = reinterpret_cast<float*>(memory);
    void* const scratch = states + 2 * floats;
    const AttentionState whole = state_at(states, rows, padded), here = state_at(states + floats, rows, padded);
    std::fill_n(whole.total, rows, 0.0f);
    for (int64_t m = item.begin; m < item.end; ++m) {
      const bool keep = job.parts >= 0;
      const AttentionState part = keep ? state_at(parts_ + job.parts + (m - job.begin) * floats, rows, padded) : here;
      AttentionBlock block = block_of(job, m);
      if (m + 1 < item.end || following) {
        const AttentionBlock next =
            m + 1 < item.end ? block_of(job, m + 1) : block_of(jobs_[following->job], following->begin);
        block.next = next.values, block.next_scales = next.k_scales;
      }
      attend(job, m, block, part, scratch);
      if (!keep) c_.kernel.merge(static_cast<int>(rows), padded, whole, part);
    }
    if (job.parts >= 0) {
      const int64_t n = item.end - item.begin;
      if (job.left->fetch_sub(n, std::memory_order_acq_rel) != n) return;
      for (int64_t m = 0; m < job.end - job.begin; ++m) {
        const AttentionState part = state_at(parts_ + job.parts + m * floats, rows, padded);
        c_.kernel.merge(static_cast<int>(rows), padded, whole, part);
      }
    }
    finish(job, whole);
  }

  AttentionBlock block_of(const Job& job, int64_t m) const {
    const int64_t block = c_.tables[job.slot * c_.M + m];
    const void *const values = c_.values_of(block, job.k), *const k_scales = c_.scales_of(block, job.k, 0);
    return {values, k_scales, c_.scales_of(block, job.k, 1), nullptr, kBlock * c_.token_bytes() / 4, nullptr};
  }

  // The state of the job's rows over entry `m` of the table.
  void attend(const Job& job, int64_t m, const AttentionBlock& block, const AttentionState& part, void* scratch) {
    const int64_t start = c_.starts[job.group], count = c_.counts[job.group];
    const int64_t base = c_.block_at(job.slot, m) * kBlock, first = c_.positions[start];
    AttentionRows rows;
    rows.per_token = c_.per_token();
    rows.tokens = static_cast<int>(count);
    rows.count = rows.tokens * rows.per_token;
    rows.token_stride = c_.N * c_.head.padded;
    rows.scale_stride = c_.N;
    rows.queries = p_.wide + (start * c_.N + job.k * rows.per_token) * c_.head.padded * c_.kernel.wide_bytes;
    rows.scales = p_.factors + start * c_.N + job.k * rows.per_token;
    rows.end = static_cast<int>(first + 1 - base);
    rows.window = c_.window > 0;
    rows.first = rows.window ? rows.end - c_.window : 0;
    c_.kernel.block(c_.head, rows, block, part, scratch);
    if (!c_.mass) return;
    for (int r = 0; r < rows.count; ++r) {
      const int64_t row = (start + r / rows.per_token) * c_.N + job.k * rows.per_token + r % rows.per_token;
      p_.tops[row * c_.M + m] = part.top[r];
      p_.totals[row * c_.M + m] = part.total[r];
    }
  }

  void finish(const Job& job, const AttentionState& state) {
    const int64_t start = c_.starts[job.group], rows = job.rows(c_), per_token = c_.per_token();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = (start + r / per_token) * c_.N + job.k * per_token + r % per_token;
      c_.kernel.finish(c_.head.size, state.weighted + r * c_.head.padded, state.total[r], c_.out + row * c_.head.size);
      if (c_.lse && state.total[r] > 0) {
        constexpr double kLn2 = 0.6931471805599453;
        c_.lse[row] = static_cast<float>(double{state.top[r]} * kLn2 + std::log(double{state.total[r]}));
      }
    }
  }

  // The mass of a token's entries: the heads one after the other.
  void add_mass(int64_t t) {
    if (c_.positions[t] < 0) return;
    for (int64_t n = 0; n < c_.N; ++n) {
      const float* const tops = p_.tops + (t * c_.N + n) * c_.M;
      const float* const totals = p_.totals + (t * c_.N + n) * c_.M;
      float top = -std::numeric_limits<float>::infinity();
      for (int64_t m = 0; m < c_.M; ++m) {
        if (totals[m] > 0) top = std::max(top, tops[m]);
      }
      std::vector<float> alone(c_.M, 0.0f);
      c_.kernel.mass(c_.M, tops, totals, top, 1.0f, alone.data());
      float total = 0;
      for (const float x : alone) total += x;
      if (!(total > 0)) continue;
      c_.kernel.mass(c_.M, tops, totals, top, 1.0f / (total * static_cast<float>(c_.N)), c_.mass + t * c_.M);
    }
  }

  const Call& c_;
  const Prepared& p_;
  std::vector<Job> jobs_;
  std::vector<Item> items_;
  int64_t threads_ = 1;
  int64_t part_floats_ = 0;
  float* parts_ = nullptr;
};

void run(const Call& c) {
  FloatMode mode;
  static thread_local Arena queries, states, masses;
  const int64_t wide = c.T * c.N * c.head.padded * c.kernel.wide_bytes;
  Prepared prepared;
  prepared.wide = static_cast<char*>(queries.get(wide + c.T * c.N * 4));
  prepared.factors = reinterpret_cast<float*>(prepared.wide + wide);
  prepared.tops = prepared.totals = nullptr;
  if (c.mass) {
    const int64_t n = c.T * c.N * c.M;
    prepared.tops = static_cast<float*>(masses.get(8 * n));
    prepared.totals = prepared.tops + n;
    std::fill_n(prepared.tops, 2 * n, 0.0f);
  }
  const int64_t few = std::max<int64_t>(1, 16384 / ((c.N + 2 * c.K) * c.head.size));  // tokens of a chunk
  parallel_for((c.T + few - 1) / few, [&](int64_t chunk) {
    for (int64_t t = chunk * few; t < std::min(c.T, (chunk + 1) * few); ++t) prepare_token(c, prepared, t);
  });
  Attention(c, prepared).run(states);
}

// Whether every group, token and block in use lies inside the arrays.
bool indices_valid(const Call& c, int64_t B, int64_t G) {
  if (c.n_tokens < 0 || c.n_tokens > c.T || c.n_groups < 0 || c.n_groups > G) return false;
  if (c.layer < 0 || c.layer >= c.L) return false;
  const auto block_valid = [&](int64_t slot, int64_t entry) {
    const int64_t block = c.tables[slot * c.M + entry];
    return block >= 0 && block < c.blocks;
  };
  for (int64_t t = 0; t < c.n_tokens; ++t) {
    if (c.positions[t] < 0) continue;
    if (c.slots[t] < 0 || c.slots[t] >= B || (!c.blocks_at && c.positions[t] >= c.M * kBlock)) return false;
    const int64_t at = c.entry(c.slots[t], c.positions[t] / kBlock);
    if (at < c.listed(c.slots[t]) && !block_valid(c.slots[t], at)) return false;
  }
  for (int64_t g = 0; g < c.n_groups; ++g) {
    const int64_t start = c.starts[g], count = c.counts[g];
    if (start < 0 || count < 0 || start + count > c.n_tokens) return false;
    if (count == 0 || c.positions[start] < 0) continue;
    int64_t begin, end;
    c.entries(c.slots[start], c.positions[start], c.positions[start] + count - 1, &begin, &end);
    for (int64_t m = begin; m < end; ++m) {
      if (!block_valid(c.slots[start], m)) return false;
    }
  }
  return true;
}

ffi::Error attention(F32 q, F32 k, F32 v, ffi::AnyBuffer values, ffi::AnyBuffer scales, S32 layer, S32 window,
                     F32 angles, F32 q_weight, F32 k_weight, S32 slots, S32 positions, S32 n_tokens, S32 starts,
                     S32 counts, S32 n_groups, S32 tables, S32 blocks_at, S32 n_blocks, ffi::ResultBuffer<ffi::F32> out,
                     ffi::Result<ffi::AnyBuffer> new_values, ffi::Result<ffi::AnyBuffer> new_scales,
                     ffi::ResultBuffer<ffi::F32> lse, ffi::ResultBuffer<ffi::F32> mass, float q_eps, float k_eps,
                     float scale, float softcap) {
  const auto q_shape = q.dimensions(), shape = values.dimensions(), table_shape = tables.dimensions();
  if (q_shape.size() != 3 || shape.size() != 5 || table_shape.size() != 2) {
    return invalid("umbra_attention: q must be [T, N, H], values [blocks, L, K, P, 2H] and tables [B, M]");
  }
  Call c;
  c.T = q_shape[0], c.N = q_shape[1], c.K = shape[2], c.L = shape[1], c.blocks = shape[0], c.M = table_shape[1];
  const int64_t H = q_shape[2], T = c.T;
  if (shape[3] != kBlock || shape[4] != 2 * H || H % 8 || H > kMaxHead || c.K < 1 || c.N % c.K) {
    return invalid("umbra_attention: blocks of 128, 2H wide, H a multiple of 8 up to 512, and N a multiple of K");
  }
  const auto type = values.element_type();
  const bool quantised = type == ffi::S8, half = scales.element_type() == ffi::F16;
  if ((!quantised && type != ffi::F32 && type != ffi::BF16) || (!half && scales.element_type() != ffi::F32)) {
    return invalid("umbra_attention: a pool is float32, bfloat16 or int8, its scales float16 or float32");
  }
  const auto size = [](const auto& x) { return static_cast<int64_t>(x.element_count()); };
  if (size(k) != T * c.K * H || size(v) != T * c.K * H || size(*out) != T * c.N * H ||
      (quantised && size(scales) != c.blocks * c.L * c.K * 2 * kBlock) || (size(angles) && size(angles) != T * H) ||
      (size(q_weight) && size(q_weight) != c.L * H) || (size(k_weight) && size(k_weight) != c.L * H) ||
      size(slots) != T || size(positions) != T || size(starts) != size(counts) ||
      (size(blocks_at) && (size(blocks_at) != size(tables) || size(n_blocks) != table_shape[0])) ||
      (size(*lse) && size(*lse) != T * c.N) || (size(*mass) && size(*mass) != T * c.M)) {
    return invalid("umbra_attention: sizes of operands do not agree");
  }
  if (new_values->untyped_data() != values.untyped_data() || new_scales->untyped_data() != scales.untyped_data()) {
    return invalid("umbra_attention: the pool must be updated in place");
  }
  c.head = {static_cast<int>(H), static_cast<int>((H + 15) / 16 * 16), half, scale, softcap};
  c.kernel = kernel_for(quantised ? KvType::i8 : type == ffi::F32 ? KvType::f32 : KvType::bf16);
  const auto optional = [&](auto& x) { return size(x) ? x.typed_data() : nullptr; };
  c.q = q.typed_data(), c.k = k.typed_data(), c.v = v.typed_data();
  c.angles = optional(angles), c.q_weight = optional(q_weight), c.k_weight = optional(k_weight);
  c.q_eps = q_eps, c.k_eps = k_eps;
  c.slots = slots.typed_data(), c.positions = positions.typed_data();
  c.starts = starts.typed_data(), c.counts = counts.typed_data(), c.tables = tables.typed_data();
  c.blocks_at = optional(blocks_at), c.n_blocks = optional(n_blocks);
  c.values = static_cast<char*>(values.untyped_data());
  c.scales = quantised ? static_cast<char*>(scales.untyped_data()) : nullptr;
  c.value_bytes = quantised ? 1 : type == ffi::F32 ? 4 : 2, c.scale_bytes = half ? 2 : 4;
  c.out = out->typed_data(), c.lse = optional(*lse), c.mass = optional(*mass);
  c.layer = *layer.typed_data(), c.window = std::max(0, *window.typed_data());
  c.n_tokens = *n_tokens.typed_data(), c.n_groups = *n_groups.typed_data();
  if (!indices_valid(c, table_shape[0], size(starts))) {
    return invalid("umbra_attention: a layer, token, group, position or block lies outside of the arrays");
  }
  run(c);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace umbra

UMBRA_HANDLER(umbra_attention, umbra::attention,
              xla::ffi::Ffi::Bind()
                  .Arg<umbra::F32>()             // q
                  .Arg<umbra::F32>()             // k
                  .Arg<umbra::F32>()             // v
                  .Arg<umbra::ffi::AnyBuffer>()  // values
                  .Arg<umbra::ffi::AnyBuffer>()  // scales
                  .Arg<umbra::S32>()             // layer
                  .Arg<umbra::S32>()             // window
                  .Arg<umbra::F32>()             // angles
                  .Arg<umbra::F32>()             // q_weight
                  .Arg<umbra::F32>()             // k_weight
                  .Arg<umbra::S32>()             // slots
                  .Arg<umbra::S32>()             // positions
                  .Arg<umbra::S32>()             // n_tokens
                  .Arg<umbra::S32>()             // starts
                  .Arg<umbra::S32>()             // counts
                  .Arg<umbra::S32>()             // n_groups
                  .Arg<umbra::S32>()             // tables
                  .Arg<umbra::S32>()             // blocks_at
                  .Arg<umbra::S32>()             // n_blocks
                  .Ret<umbra::F32>()             // out
                  .Ret<umbra::ffi::AnyBuffer>()  // values
                  .Ret<umbra::ffi::AnyBuffer>()  // scales
                  .Ret<umbra::F32>()             // lse
                  .Ret<umbra::F32>()             // block_mass
                  .Attr<float>("q_eps")
                  .Attr<float>("k_eps")
                  .Attr<float>("scale")
                  .Attr<float>("softcap"));
