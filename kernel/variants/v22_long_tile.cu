// v22_long_tile: r22_retuned, tiles of 128 keys and a warpgroup less.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.tile_m = 192;
  config.tile_m_128 = 128;
  config.tile_n = config.tile_n_128 = 128;
  config.stages = config.stages_128 = 2;
  config.threads = 512;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_long_tile, kConfig, HopperForward)
