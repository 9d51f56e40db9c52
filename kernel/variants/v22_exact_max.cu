// v22_exact_max: r22_retuned, the maximum is brought up to date in every tile.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.stale_max = false;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_exact_max, kConfig, HopperForward)
