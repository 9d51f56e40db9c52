// v22_software_exp2: r22_retuned, one exponential in eight is a polynomial.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kHopper;
  config.software_exp2 = 8;
  return config;
}();

FLASHLADDER_TMA_RUNG(v22_software_exp2, kConfig, HopperForward)
