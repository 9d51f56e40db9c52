// v13_mask_all: r13_tuned with a mask in every tile.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.mask_edges = false;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_mask_all, kConfig)
