// r23_dispatch, after r22_retuned: small grids go to kernels of fewer warpgroups, then, like tensors that TMA cannot
// read, to the portable ladder's smaller ones, whose warps and blocks split the keys.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.splits = 0;
  config.pack_heads = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r23_dispatch, kConfig, FewerWarpgroups)
