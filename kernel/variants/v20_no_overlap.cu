// v20_no_overlap: r20_persistent with P V of a tile is waited for before the next scores.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.overlap = false;
  return config;
}();

FLASHLADDER_TMA_RUNG(v20_no_overlap, kConfig, HopperForward)
