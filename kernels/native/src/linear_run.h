// One call of an operation around products, spread over threads.
#pragma once

#include "linear.h"

namespace umbra {

constexpr int kMaxMatrices = 8;  // of one call
constexpr int kSegment = 256;    // channels whose logits are summed up together; of every head, so that no sum depends
                                 // on how the work was cut

// One matrix and where its results go.
struct Target {
  Matrix matrix;
  const float* bias;  // [out] or null
  float* y;           // [R, out]
};

struct LinearCall {
  int64_t n_rows;
  Preparation preparation;
  int n_targets;
  Target targets[kMaxMatrices];
  const float* post_norm;  // [out] or null
  float post_epsilon;
  const float* residual;  // [R, out] or null
};

void run_linear(const LinearCall& call);

// A gated feed-forward network: activation(x gate) * (x up), times `down`.
struct GatedCall {
  int64_t n_rows;
  Preparation preparation;
  Matrix gate, up;
  int activation;  // 1 SiLU, 2 GELU (tanh)
  LinearCall down;  // its preparation and its number of rows are not looked at
};

void run_gated(const GatedCall& call);

struct HeadCall {
  int64_t n_rows;
  Preparation preparation;
  Matrix matrix;
  int32_t* token;  // [R], and the others
  float* highest;
  float* log_sum;
};

void run_head(const HeadCall& call);

// Rows `ids` of a quantised table as float32 [n, in]. Ids outside the table count as the nearest one inside.
void run_embed(const Matrix& table, const int32_t* ids, int64_t n, float* out);

}  // namespace umbra
