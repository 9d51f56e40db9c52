// v20_three_stages: r20_persistent with three tiles of K and V in flight at head_dim 64, not two.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.stages = 3;
  return config;
}();

FLASHLADDER_TMA_RUNG(v20_three_stages, kConfig, HopperForward)
