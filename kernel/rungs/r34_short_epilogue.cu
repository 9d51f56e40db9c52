// r34_short_epilogue, after r33_multicast: nothing in the store of a finished row makes a warp wait by itself.
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
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r34_short_epilogue, kConfig, SharedRows)
