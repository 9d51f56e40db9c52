// r23_dispatch, after r22_retuned: small grids, and tensors that TMA cannot read, go to the portable ladder's
// smaller kernels, whose warps and blocks split the keys.
#include "dispatch.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.splits = 0;
  config.pack_heads = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(r23_dispatch, kConfig)
