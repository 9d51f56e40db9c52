// v22_ping_pong: r22_retuned, the warpgroups take turns on the tensor cores.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.ping_pong = true;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_ping_pong, kConfig, HopperForward)
