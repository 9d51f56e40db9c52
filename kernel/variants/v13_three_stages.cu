// v13_three_stages: r13_tuned with a third stage where two blocks still fit.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.stages = 3;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_three_stages, kConfig)
