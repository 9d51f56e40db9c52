// v22_not_persistent: r22_retuned, a block a query tile.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.persistent = false;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_not_persistent, kConfig, HopperForward)
