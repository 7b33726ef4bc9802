// Products of rows with weight matrices: what the operations (linear.cc, linear_head.cc) and the kernels of each
// instruction set (linear_<isa>.cc) agree on.
//
// A matrix is cut into blocks of 16 output channels; a block lies in one piece of memory, its inputs in groups of 32 in
// ascending order (packing.py has the bytes). A product with a quantised matrix is, for every row and channel,
//
//   y = 0;  for each group (w6k: half of a group) in ascending order
//     y = fma(float(sum of q_w q_x) * scale_x, scale_w, y)
//     y = fma(min_w, scale_x * float(sum of q_x), y)          (forms with a minimum)
//
// and with a float matrix 16 partial sums, of the inputs i, i + 16, i + 32, ..., by fma, then added in the order of
// `Lanes` (lanes.h). Nothing else decides the bits of a result: not the number of rows, nor the blocking, nor the
// instruction set.
#pragma once

#include <cstdint>

namespace umbra {

constexpr int kChannels = 16;  // of a block
constexpr int kGroup = 32;     // inputs that share a scale
constexpr int kSuper = 8;      // groups that share a super scale
constexpr int kStreams = 4;    // blocks that are read side by side: one stream alone does not fill the memory bus
constexpr int kMaxRows = 64;   // rows of one call of a product kernel

enum class Form : int32_t { w4 = 0, w8 = 1, w8m = 2, w4k = 3, w6k = 4, float32 = 5, bfloat16 = 6 };

constexpr bool is_quantised(Form form) { return form < Form::float32; }

// Bytes of one group of a block, and of the super scales of `kSuper` groups of a block.
constexpr int64_t group_bytes(Form form) {
  return form == Form::w4 ? 320 : form == Form::w8 ? 544 : form == Form::w8m ? 576 : form == Form::w4k ? 288 : 544;
}
constexpr int64_t super_bytes(Form form) { return form == Form::w4k ? 64 : form == Form::w6k ? 32 : 0; }

// One matrix [out, in].
struct Matrix {
  Form form;
  int64_t in, out;
  const uint8_t* data;    // blocks of a quantised matrix, or rows of a float one
  const uint8_t* supers;  // super scales of the blocks, or null

  int64_t groups() const { return in / kGroup; }
  int64_t blocks() const { return (out + kChannels - 1) / kChannels; }
};

// A block of a matrix: its first byte, its super scales (or null), and how many of its channels there are.
struct Block {
  const uint8_t *data, *supers;
  int64_t channels;

  Block() = default;
  Block(const Matrix& m, int64_t i) : channels(m.out - i * kChannels < kChannels ? m.out - i * kChannels : kChannels) {
    const int64_t bytes = m.form == Form::float32    ? m.in * kChannels * 4
                          : m.form == Form::bfloat16 ? m.in * kChannels * 2
                                                     : m.groups() * group_bytes(m.form);
    data = m.data + i * bytes;
    supers = m.supers ? m.supers + i * (m.groups() / kSuper) * super_bytes(m.form) : nullptr;
  }
};

// Rows in the form that products take, G = groups of an input row. Quantised: all rows of a group lie side by side, in
// room for `stride` rows.
struct Rows {
  int64_t count, stride;
  int64_t width;  // floats of a row: inputs, padded with zeros to a multiple of 16
  int8_t* q;      // [G, stride, 32]
  float* scale;   // [G, stride]
  float* total;   // [G, stride]: scale * sum of q
  int32_t* offsets;  // [G, stride, 4]: -128 sum(q) over the first 16, the last 16, all, and 0; null where none are needed
  float* values;  // [count, width], for float matrices
};

// Results of rows [first, first + n) with up to kStreams blocks, of one or several matrices of the same form and inputs:
// `out` [n_blocks, n, 16]; n is at most kMaxRows.
struct Product {
  Form form;
  int64_t in;
  const Rows* rows;
  int64_t first, n;
  Block block[kStreams];
  int n_blocks;
  float* out;
};

// How a row becomes an operand: activation(x) * up, then the norm, then integers, floats or both. The first two are
// optional.
struct Preparation {
  const float* x;   // [R, in]
  const float* up;  // [R, in] or null
  int activation;   // 0 none, 1 SiLU, 2 GELU (tanh)
  const float* norm;  // [in] or null
  float epsilon;
  int64_t in;
  bool integers, floats;
};

// How products become the operands of the next one: activation(gate) * up, of rows [row, row + n) and the channels of
// `blocks` blocks from `block` on.
struct Gating {
  const float *gate, *up;  // [blocks, n, 16]
  int activation;          // 1 SiLU, 2 GELU (tanh)
  int64_t row, n, block, blocks;
  int64_t out;  // channels in all
  bool integers, floats;
};

// The most likely channels of 16 k logits: partial results of one row.
struct Summary {
  float highest;
  int32_t channel;
  float sum;  // of exp(logit - highest)
};

// The kernels of one instruction set.
struct LinearKernels {
  bool wants_offsets;  // `Rows::offsets`
  void (*product)(const Product& product);
  // Before a thread's products of one form and number of rows (null: nothing to do); `end` follows them if it is true.
  bool (*begin)(Form form, int64_t n);
  void (*end)();
  // Makes rows [first, end) of `rows`; `scratch` has room for as many rows of `in` floats.
  void (*prepare)(const Preparation& preparation, int64_t first, int64_t end, float* scratch, const Rows& rows);
  // What `gating` makes of products, into `rows`; `scratch` has room for [n, 16 blocks].
  void (*gate)(const Gating& gating, float* scratch, const Rows& rows);
  // n rows of a block's results `x` [n, 16] to `y`, plus `before` (null: nothing; it may be y); both lie `width` apart.
  void (*write)(const float* x, int64_t n, const float* before, float* y, int64_t width);
  // y [n] = norm(x) * weight, plus `residual` (null: nothing; it may be y).
  void (*finish)(const float* x, int64_t n, const float* weight, float epsilon, const float* residual, float* y);
  // logits [n], n a multiple of 16, the first of them channel `channel`.
  Summary (*summarise)(const float* logits, int64_t n, int32_t channel);
  // Lowest most likely channel, its logit and the log-sum-exp of a row, from its parts in ascending order.
  void (*combine)(const Summary* parts, int64_t count, int32_t* token, float* highest, float* log_sum);
  // The channel `channel` of a matrix in float32: `out` [in].
  void (*channel)(const Matrix& matrix, int64_t channel, float* out);
};

namespace portable {
extern const LinearKernels linear_kernels;
}
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}
namespace amx {
extern const LinearKernels linear_kernels;
}

// Those of the instruction set in use.
const LinearKernels& linear_kernels();

}  // namespace umbra
