// The sampler's noise (kernels/sample/noise.py) with the same bits.
#pragma once

#include "lanes.h"
#include "numerics.h"
#include "sample.h"

namespace umbra::UMBRA_ISA {

// The first word of threefry-2x32 with 20 rounds.
UMBRA_INLINE I threefry(I id, sample::NoiseKey key) {
  const uint32_t keys[3] = {key.seed_low, key.position, key.seed_low ^ key.position ^ 0x1BD11BDAu};
  const auto word = [](uint32_t x) { return iset(static_cast<int32_t>(x)); };
  I x0 = id + word(keys[0]), x1 = word(key.seed_high + keys[1]);
#define UMBRA_ROUND(rotation) x0 = x0 + x1, x1 = rotl<rotation>(x1) ^ x0
#define UMBRA_ROUNDS(a, b, c, d, group)            \
  UMBRA_ROUND(a), UMBRA_ROUND(b), UMBRA_ROUND(c), UMBRA_ROUND(d); \
  x0 = x0 + word(keys[(group + 1) % 3]);           \
  x1 = x1 + word(keys[(group + 2) % 3] + group + 1)
  UMBRA_ROUNDS(13, 15, 26, 6, 0);
  UMBRA_ROUNDS(17, 29, 16, 24, 1);
  UMBRA_ROUNDS(13, 15, 26, 6, 2);
  UMBRA_ROUNDS(17, 29, 16, 24, 3);
  UMBRA_ROUNDS(13, 15, 26, 6, 4);
#undef UMBRA_ROUNDS
#undef UMBRA_ROUND
  return x0;
}

UMBRA_INLINE F uniform(I word) {
  // An unsigned word to float32: both halves are exact, so their sum is rounded once.
  const F high = to_float(shr<16>(word)) * set(65536.0f), low = to_float(word & iset(0xFFFF));
  return min((high + low) * set(0x1p-32f) + set(0x1p-33f), set(1.0f - 0x1p-24f));
}

// Standard Gumbel noise of a uniform number.
UMBRA_INLINE F gumbel(F uniform) { return neg(numerics::log(neg(numerics::log1m(uniform)))); }

}  // namespace umbra::UMBRA_ISA
