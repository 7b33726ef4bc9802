// Products in plain C++: the same sums as on every other instruction set, written without regard to speed.
#include <cstring>

#include "linear.h"
#include "linear_kernel.h"

namespace umbra::portable {
namespace {

constexpr bool four_bits(Form form) { return form == Form::w4 || form == Form::w4k; }
constexpr bool has_minimum(Form form) { return four_bits(form) || form == Form::w8m; }

// A group's weights as 16-bit integers, 32 inputs of 16 channels.
void unpack(Form form, const uint8_t* w, int16_t (&weights)[kGroup][kChannels]) {
  for (int k = 0; k < kGroup; ++k) {
    const int chunk = k / 4;
    for (int c = 0; c < kChannels; ++c) {
      const uint8_t byte = w[64 * (four_bits(form) ? chunk % 4 : chunk) + 4 * c + k % 4];
      const int nibble = chunk < 4 ? byte & 15 : byte >> 4;
      weights[k][c] = static_cast<int16_t>(four_bits(form) ? nibble : static_cast<int8_t>(byte));
    }
  }
}

void quantised_product(const Product& p) {
  const int64_t groups = p.in / kGroup;
  const int parts = p.form == Form::w6k ? 2 : 1;  // each with a scale of its own
  for (int s = 0; s < p.n_blocks; ++s) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* const w = p.block[s].data + g * group_bytes(p.form);
      const uint8_t* const super = p.block[s].supers + g / kSuper * super_bytes(p.form);
      int16_t weights[kGroup][kChannels];
      unpack(p.form, w, weights);
      float scale[2][kChannels], minimum[kChannels];
      for (int part = 0; part < parts; ++part) group_scales(p.form, w, super, part, scale[part], minimum);
      for (int64_t row = 0; row < p.n; ++row) {
        const int64_t at = g * p.rows->stride + p.first + row;
        float* const out = p.out + (s * p.n + row) * kChannels;
        F y = load(out);
        for (int part = 0; part < parts; ++part) {
          int32_t sum[kChannels] = {};
          for (int k = kGroup / parts * part; k < kGroup / parts * (part + 1); ++k)
            for (int c = 0; c < kChannels; ++c) sum[c] += weights[k][c] * p.rows->q[at * kGroup + k];
          y = fma(to_float(load(sum)) * set(p.rows->scale[at]), load(scale[part]), y);
        }
        if (has_minimum(p.form)) y = fma(load(minimum), set(p.rows->total[at]), y);
        store(out, y);
      }
    }
  }
}

void product(const Product& p) {
  std::memset(p.out, 0, sizeof(float) * p.n_blocks * p.n * kChannels);
  if (is_quantised(p.form)) quantised_product(p);
  else float_product(p);
}

}  // namespace

extern const LinearKernels linear_kernels = {false, product, nullptr, nullptr, prepare, gate, write, finish,
                                              summarise, combine, channel};

}  // namespace umbra::portable
