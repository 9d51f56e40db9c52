// v22_two_stages: r22_retuned, two tiles of K and V in shared memory.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.stages = config.stages_128 = 2;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_two_stages, kConfig, HopperForward)
