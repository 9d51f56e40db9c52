// v13_always_rescale: r13_tuned with O rescaled in every tile.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.lazy_rescale = -1;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_always_rescale, kConfig)
