// v13_shared_weights: r13_tuned with P through shared memory.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.weights_in_shared = true;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_shared_weights, kConfig)
