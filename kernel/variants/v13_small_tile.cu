// v13_small_tile: r13_tuned with tiles of 64 queries: a warp owns 16 rows.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.tile_m = 64;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_small_tile, kConfig)
