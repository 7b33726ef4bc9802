#include "cpu.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace umbra {

#if defined(__x86_64__)
namespace amx {
extern const bool compiled;  // whether the compiler knew it (linear_amx.cc)
}
#endif

namespace {

#if defined(__x86_64__)
// The registers of tiles are large: Linux keeps them only for processes that have asked. It refuses those with a thread
// whose stack for signals is too small for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Isa best() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::portable;
  constexpr unsigned kFma = 1u << 12, kOsSave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  constexpr unsigned kNeeded = kFma | kOsSave | kAvx | kF16c;
  if ((c & kNeeded) != kNeeded) return Isa::portable;
  unsigned saved, high;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & 0x6) != 0x6) return Isa::portable;  // the system keeps the 256-bit registers
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 5)) return Isa::portable;
  constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31, kVnni = 1u << 11;
  constexpr unsigned kAvx512 = kF | kDq | kBw | kVl;
  if ((b & kAvx512) != kAvx512 || !(c & kVnni) || (saved & 0xE6) != 0xE6) return Isa::avx2;
  constexpr unsigned kTiles = 1u << 24 | 1u << 25, kSavedTiles = 1u << 17 | 1u << 18;
  const bool tiles = (d & kTiles) == kTiles && (saved & kSavedTiles) == kSavedTiles;
  return tiles && amx::compiled && may_use_tiles() ? Isa::amx : Isa::avx512;
#else
  return Isa::portable;
#endif
}

const Isa best_isa = best();

}  // namespace

std::atomic<Isa> chosen{best_isa};

Isa isa() { return chosen.load(std::memory_order_relaxed); }

bool supports(Isa isa) { return isa >= Isa::portable && isa <= best_isa; }

}  // namespace umbra

extern "C" {
__attribute__((visibility("default"))) int umbra_isa() { return static_cast<int>(umbra::isa()); }

__attribute__((visibility("default"))) int umbra_supports_isa(int isa) {
  return umbra::supports(static_cast<umbra::Isa>(isa));
}

// Whether the kernels use this instruction set from now on: not if the processor lacks it.
__attribute__((visibility("default"))) int umbra_set_isa(int isa) {
  if (!umbra::supports(static_cast<umbra::Isa>(isa))) return 0;
  umbra::chosen.store(static_cast<umbra::Isa>(isa), std::memory_order_relaxed);
  return 1;
}
}
