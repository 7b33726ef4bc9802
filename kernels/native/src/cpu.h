// Which instruction sets this processor has, and which one the kernels use.
#pragma once

namespace umbra {

// In ascending order of preference. `avx2` includes FMA and F16C; `avx512` F, BW, DQ, VL and VNNI; `amx` all of these
// and tiles of int8, where the compiler knows them.
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The one in use: the best that the processor has, unless another was set.
Isa isa();

// Whether the processor (and the operating system) can run it.
bool supports(Isa isa);

}  // namespace umbra
