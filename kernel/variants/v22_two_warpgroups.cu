// v22_two_warpgroups: r22_retuned, tiles of 128 queries.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.tile_m = config.tile_m_128 = 128;
  config.threads = 384;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_two_warpgroups, kConfig, HopperForward)
