// v22_no_ping_pong: r22_retuned, without turns on the tensor cores.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.ping_pong = false;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_no_ping_pong, kConfig, HopperForward)
