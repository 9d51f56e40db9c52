// r31_balanced, after r30_quick_repair: under a causal mask the blocks with less work so far take the longer query
// tiles of the next heads.
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
  config.balanced = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r31_balanced, kConfig, SharedRows)
