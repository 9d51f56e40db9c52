// v13_no_split: r13_tuned with one kernel for every grid, no keys split.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.splits = 1;
  return config;
}();

FLASHLADDER_MMA_RUNG(v13_no_split, kConfig)
