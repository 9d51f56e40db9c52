// v22_lazy_rescale: r22_retuned, the maximum is taken in every tile, and O rescaled where it grew by 2^8.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.stale_max = false;
  config.lazy_rescale = 8;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_lazy_rescale, kConfig, HopperForward)
