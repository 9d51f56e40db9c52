// v28_sum_column: r28_halves_last, a column of ones beside V sums the weights, in bf16 at head_dim 64.
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
  config.sum_column = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(v28_sum_column, kConfig, SharedRows)
