// v13_no_pack: r13_tuned with a tile for each query head.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.pack_heads = false;
  return config;
}();

FLASHLADDER_PLANNED_RUNG(v13_no_pack, kConfig)
