// r28_halves_last, after r27_paced: without a mask, and over many keys, smaller query tiles come last: what is left of
// heads, and halves of the tiles that fill no turn of the blocks.
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
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r28_halves_last, kConfig, SharedRows)
