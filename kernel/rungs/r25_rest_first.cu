// r25_rest_first, after r24_key_groups: the rows of a head that fill no query tile are in its first one, which sees the
// fewest keys under a causal mask.
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
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r25_rest_first, kConfig, SharedRows)
