// v13_half_scores: r13_tuned with scores accumulated in fp16, for float16 alone.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.half_scores = true;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_half_scores, kConfig)
