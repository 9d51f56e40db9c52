// v20_no_ping_pong: r20_persistent with warpgroups take no turns.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.ping_pong = false;
  return config;
}();

FLASHLADDER_TMA_RUNG(v20_no_ping_pong, kConfig, HopperForward)
