// v38_early_launch: r38_first_look, kernels start beside the end of the one ahead of them in the stream, and wait
// for that.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_latest.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kLatest;
  config.early_launch = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(v38_early_launch, kConfig, SharedRows)
