// v13_no_swizzle: r13_tuned with chunks of shared memory where they come.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.swizzle = Swizzle::none;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_no_swizzle, kConfig)
