// v13_no_cp_async: r13_tuned with tiles that go through registers, one at a time.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.stages = 0;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_no_cp_async, kConfig)
