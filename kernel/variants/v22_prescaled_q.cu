// v22_prescaled_q: r22_retuned, Q is multiplied by the scale and log2(e) in shared memory, the scores by nothing.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.prescaled_q = true;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_prescaled_q, kConfig, HopperForward)
