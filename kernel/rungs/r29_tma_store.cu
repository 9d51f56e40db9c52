// r29_tma_store, after r28_halves_last: O leaves shared memory by TMA, and its warpgroup goes on meanwhile; not at
// head_dim 64 where warpgroups share rows, whose blocks end with it.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.splits = 0;
  config.pack_heads = true;
  config.key_groups = 0;
  config.rest_first = true;
  config.short_gap = true;
  config.paced = 4;
  config.halves_last = true;
  config.tma_store = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r29_tma_store, kConfig, SharedRows)
