// v13_two_stages: r13_tuned without the third stage.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.stages = 2;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_two_stages, kConfig)
