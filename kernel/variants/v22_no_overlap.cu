// v22_no_overlap: r22_retuned, a warpgroup waits for its P V before the next softmax.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.overlap = false;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_no_overlap, kConfig, HopperForward)
