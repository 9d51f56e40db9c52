// r37_few_divisions, after r36_short_join: a block divides to find its work only where heads share K and V or keys are
// split.
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
  config.early_combine = true;
  config.multicast = Multicast::first_tiles;
  config.short_epilogue = true;
  config.early_item = true;
  config.short_join = true;
  config.few_divisions = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r37_few_divisions, kConfig, SharedRows)
