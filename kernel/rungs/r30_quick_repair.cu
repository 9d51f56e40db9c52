// r30_quick_repair, after r29_tma_store: maxima that scores outgrow are looked for sooner, also where warpgroups share
// rows, and at head_dim 128 repaired without a loop.
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
  config.quick_repair = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r30_quick_repair, kConfig, SharedRows)
