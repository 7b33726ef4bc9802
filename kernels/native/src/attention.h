// What the attention kernels of all instruction sets have in common with the code that calls them.
//
// Letters: H head size, P block length (128), R rows: the queries of one group that share a key/value head.
//
// A row attends to one block at a time: its logits (times log2 e, so that weights are powers of 2), their greatest, the
// sum of 2^(logit - greatest) and the values weighted so come from that block alone, and are then merged into the row's
// state, block after block in ascending order. So a block may be worked on anywhere at any time, and the bits of a row
// depend on nothing but its own query and the blocks it sees.
#pragma once

#include <cstdint>

#include "cpu.h"

namespace umbra {

constexpr int kBlock = 128;  // tokens of a block
constexpr int kSpan = 64;    // tokens whose weights share a scale, and whose values are widened together
constexpr int kTogether = 4;  // rows that may be worked on side by side
constexpr int kTileOfRows = 16;  // scratch memory has room for rows rounded up to it
constexpr int kMaxHead = 512;
constexpr int kWideBytes = 16 * kMaxHead * 4;  // of scratch memory, for keys and values on their way

enum class KvType { f32, bf16, i8 };

// How queries and keys are prepared, and how large things are.
struct AttentionHead {
  int size;          // H
  int padded;        // H rounded up to 16
  bool half_scales;  // the scales of an int8 pool are float16, else float32
  float scale;       // of the logits
  float softcap;     // 0: none
};

// The state of a row over some blocks: the greatest logit, the sum of 2^(logit - greatest), and the values weighted by
// these. A sum of 0 says that it saw nothing.
struct AttentionState {
  float* top;       // [R]
  float* total;     // [R]
  float* weighted;  // [R, padded]
};

// One head's part of a block.
struct AttentionBlock {
  const void* values;       // [P, 2H]
  const void* k_scales;     // [P], int8 only
  const void* v_scales;     // [P], int8 only
  const void* next;         // values that will be read soon, or null
  int64_t quarter;          // bytes of a quarter of them
  const void* next_scales;  // [2, P], or null
};

struct AttentionRows {
  int count;             // R
  int per_token;         // rows of the same token, one after another
  int tokens;            // count / per_token
  const void* queries;   // widened and prepared: token i, row j at (i * token_stride + j * padded)
  int64_t token_stride;  // in entries
  const float* scales;   // what the products of row (i, j) are multiplied by, at i * scale_stride + j
  int64_t scale_stride;
  int first;             // the first position of the block that the group's first token sees: may be negative
  int end;               // the position after the last one it sees, relative to the block; one more for each token
  bool window;           // `first` moves along too; otherwise every token sees from the block's beginning on
};

// Bytes of scratch memory that `block` needs, aligned to 64.
int64_t attention_scratch(int rows);

struct AttentionKernel {
  // A query `x` [H], float32: normalised by `weight` (null: not), turned by `turn` [2, H/2] (null: not), widened, and
  // the factor of its products.
  void (*query)(const AttentionHead&, const float* x, const float* weight, float eps, const float* turn, void* wide,
                float* scale);
  // Stores a token's key (prepared likewise) and value.
  void (*store)(const AttentionHead&, const float* k, const float* v, const float* weight, float eps, const float* turn,
                void* values, void* k_scale, void* v_scale);
  // The state of the rows over one block.
  void (*block)(const AttentionHead&, const AttentionRows&, const AttentionBlock&, const AttentionState&,
                void* scratch);
  // Adds the state of a later block, of `rows` rows.
  void (*merge)(int rows, int padded, const AttentionState& into, const AttentionState& block);
  // out [H] = weighted / total, or zeros.
  void (*finish)(int size, const float* weighted, float total, float* out);
  // mass[m] += share * totals[m] * 2^(tops[m] - top), m < n.
  void (*mass)(int64_t n, const float* tops, const float* totals, float top, float share, float* mass);
  int wide_bytes;  // of an entry of a widened query
};

namespace portable {
AttentionKernel attention_kernel(KvType);
}
namespace avx2 {
AttentionKernel attention_kernel(KvType);
}
namespace avx512 {
AttentionKernel attention_kernel(KvType);
}
namespace amx {
AttentionKernel attention_kernel(KvType);
}

}  // namespace umbra
