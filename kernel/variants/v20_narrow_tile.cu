// v20_narrow_tile: r20_persistent with tiles of 64 keys.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.tile_n = 64;
  return config;
}();

FLASHLADDER_TMA_RUNG(v20_narrow_tile, kConfig, HopperForward)
