// v13_shortest_first: r13_tuned with query tiles in their order.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.longest_first = false;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_shortest_first, kConfig)
