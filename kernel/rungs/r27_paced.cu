// r27_paced, after r26_short_gap: the exponentials of half a tile of keys wait for those of the other half.
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
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r27_paced, kConfig, SharedRows)
