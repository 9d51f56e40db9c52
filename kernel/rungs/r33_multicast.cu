// r33_multicast, after r32_early_combine: at head_dim 128 two blocks of a small grid load the first tiles of K and V
// for each other.
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
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r33_multicast, kConfig, SharedRows)
