// r24_key_groups, after r23_dispatch: in small grids several warpgroups of a block share its rows; each takes tiles of
// keys of its own, and the first joins their parts of O.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.splits = 0;
  config.pack_heads = true;
  config.key_groups = 0;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r24_key_groups, kConfig, SharedRows)
