// r26_short_gap, after r25_rest_first: between a tile's last exponential and the next products stands as little as can.
// Weights are packed before the vote on them, V is waited for behind Q K^T, K is asked for ahead.
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
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r26_short_gap, kConfig, SharedRows)
