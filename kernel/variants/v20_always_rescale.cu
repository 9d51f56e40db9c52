// v20_always_rescale: r20_persistent with O rescaled in every tile.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.lazy_rescale = -1;
  return config;
}();

FLASHLADDER_TMA_RUNG(v20_always_rescale, kConfig, HopperForward)
