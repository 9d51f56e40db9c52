// v13_no_fold_scale: r13_tuned with scale and subtraction of the maximum in two instructions.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.fold_scale = false;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_no_fold_scale, kConfig)
