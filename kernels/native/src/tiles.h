// Tile registers of AMX: up to 16 rows of up to 64 bytes each. Included by files that are compiled for AMX.
#pragma once

#include <cstdint>

namespace umbra::UMBRA_ISA {
namespace {

struct TileShape {
  int rows = 0, bytes = 0;
};

// Gives the eight registers their shapes. They belong to the thread.
inline void configure_tiles(const TileShape (&shapes)[8]) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof(config) == 64);
  for (int i = 0; i < 8; ++i) {
    config.bytes[i] = static_cast<uint16_t>(shapes[i].bytes);
    config.rows[i] = static_cast<uint8_t>(shapes[i].rows);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

// Tiles of these shapes, given back at the end.
class Tiles {
 public:
  explicit Tiles(const TileShape (&shapes)[8]) { configure_tiles(shapes); }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace umbra::UMBRA_ISA

// Instructions on registers that are named by digits. GCC's own intrinsics do not say that they read memory.
#define UMBRA_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define UMBRA_TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
#define UMBRA_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
// sums += a * b: of each row of `a` with each four bytes' column of `b`; bytes of `a` with sign (s) or without (u).
#define UMBRA_TILE_MULTIPLY(sign, sums, a, b) asm volatile("tdpb" #sign "sd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)
