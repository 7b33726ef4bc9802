// The steps of drafting (kernels/draft/base.py) as one table of functions per instruction set; `draft.cc` puts them
// together. Every function gives the same bits on each of them.
#pragma once

#include <cstdint>

#include "sample.h"

namespace umbra::draft {

constexpr int kLongestMatch = 16, kShortestMatch = 2;
constexpr int kHeadRows = 512;  // of the head, in one chunk of work
constexpr int kPair = 2;        // slots that `dots` takes at once

// An earlier occurrence of the last tokens: how many they are (0: none) and the index of what followed them.
struct Match {
  int64_t length, next;
};

// What is known of a range of scores x: the largest, where it is, the second largest, the sum of e^(x - best) and that
// of (x - best) e^(x - best).
struct Top {
  float best, second, total, weighted;
  int64_t at;
};

// How scores are made of integer products: times a scale; divided by the temperature and with noise if it is not 0.
struct Scoring {
  float scale, temperature;
  sample::NoiseKey noise;
};

struct Cell {
  const float *gate_u, *gate_z, *bias_g, *bias_c;
};

struct Kernels {
  // The longest occurrence of the `known` last tokens, tail[0] the last of all, that ends in [1, limit) of the history;
  // the most recent of equally long ones.
  Match (*find_match)(const int32_t* history, int64_t limit, const int32_t* tail, int64_t known);
  // x / sqrt(mean x^2 + epsilon)
  void (*normalise)(const float* x, int64_t n, float epsilon, float* y);
  // y[m][c] = sum of x[m][i] w[i * stride + c] over i in [0, in), ascending; c in [first, first + n), m in [0, rows).
  void (*product)(const float* const* x, int64_t rows, int64_t in, const float* w, int64_t stride, int64_t first,
                  int64_t n, float* const* y);
  // A token's row of the table, and the step's own vector.
  void (*read)(const int8_t* row, float scale, const float* step, int64_t n, float* u);
  // The next state of lanes [first, first + n); `gate` and `candidate` hold the products with the state before.
  void (*cell)(const Cell& cell, const float* gate, const float* candidate, const float* u, const float* z,
               const float* s, int64_t first, int64_t n, float* next);
  void (*silu)(float* x, int64_t n);
  void (*add)(const float* a, const float* b, int64_t n, float* sum);  // sum += a + b
  // Integers up to `limit`, with zeros behind up to a multiple of 32; their scale. NaN if x has one, or an infinity.
  float (*quantise)(const float* x, int64_t n, int32_t limit, int16_t* q);
  // out[m][row] = w[row] . x[m] for `rows` rows of `width` bytes and `count` (1 or 2) vectors.
  void (*dots)(const int8_t* w, int64_t rows, int64_t width, const int16_t* const* x, int count, int32_t* const* out);
  // Of at most kHeadRows products.
  Top (*top)(const int32_t* dots, const float* head_scale, const int32_t* vocab, int64_t n, const Scoring& scoring);
  Top (*merge)(const Top& a, const Top& b);  // a comes first: its index wins on ties
  float (*dot)(const float* a, const float* b, int64_t n);
  float (*log)(float x);  // x >= 1, or NaN
  float (*sigmoid)(float x);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels;
#endif

}  // namespace umbra::draft
