// Passes over one row of logits, as one table of functions per instruction set; `sample.cc` puts them together.
#pragma once

#include <cstdint>

namespace umbra::sample {

// The words that the noise of a row is made of (kernels/sample/noise.py).
struct NoiseKey {
  uint32_t seed_low, seed_high, position;
};

// The best token so far: the largest noisy score, the lower id on ties.
struct Best {
  float score;
  int32_t id;
};

// "Cleaned" is x without NaN (-inf) and +inf (the largest finite number); "below" is cleaned x minus `max`, with
// denormals and -0 replaced by +0.
struct Passes {
  // The maximum of what is not NaN; -inf if nothing is larger.
  float (*max)(const float* x, int64_t n);
  // The first index with x[i] >= bound; n if there is none.
  int64_t (*find)(const float* x, int64_t n, float bound);
  void (*clean)(const float* x, int64_t n, float* out);
  // Repetition, presence and frequency penalties on cleaned x.
  void (*penalise)(const float* x, const int32_t* counts, int64_t n, float repetition, float presence, float frequency,
                   float* out);
  // Below divided by the temperature, again without denormals; never NaN.
  void (*scale)(const float* x, int64_t n, float max, float temperature, float* scaled);
  // Columns [begin, end) of the first step of the ordered sum of e^x over those of x[0 .. n), all <= 0, that are at
  // least `threshold`: with the row cut into pieces of `width`, partial[i] = e^x[i] + e^x[i + width] + ...
  void (*sum_exp)(const float* x, int64_t n, int64_t width, int64_t begin, int64_t end, float threshold,
                  float* partial);
  // The other steps, in place: the ordered sum of x[0 .. n).
  float (*ordered_sum)(float* x, int64_t n);
  // The ascending indices i, each plus `first_id`, whose below is at least `cut`; how many.
  int64_t (*collect)(const float* x, int64_t n, float max, float cut, int32_t first_id, int32_t* ids);
  void (*exp)(const float* x, int64_t n, float* out);  // x <= 0
  float (*log)(float x);                               // x >= 1
  // The better of `best` and the tokens with these scores (none NaN) plus noise. Without `ids` they are first_id,
  // first_id + 1, ...
  Best (*noisy_best)(const float* scores, const int32_t* ids, int32_t first_id, int64_t n, NoiseKey key, Best best);
};

extern const Passes portable_passes;
#if defined(__x86_64__)
extern const Passes avx2_passes, avx512_passes;
#endif

}  // namespace umbra::sample
