// v38_multicast_all: r38_first_look, two blocks of a small grid load all of K and V for each other, at head_dim 64
// too.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_latest.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kLatest;
  config.multicast = Multicast::all_tiles;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(v38_multicast_all, kConfig, SharedRows)
