// v20_two_warpgroups: r20_persistent with tiles of 128 rows: two warpgroups with more registers each.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.tile_m = 128;
  config.threads = 384;
  return config;
}();

FLASHLADDER_TMA_RUNG(v20_two_warpgroups, kConfig, HopperForward)
