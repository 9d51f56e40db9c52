// r22_retuned, after r21_stale_max: tiles of 64 keys, one warpgroup more, no turns.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

FLASHLADDER_TMA_RUNG(r22_retuned, kHopper, HopperForward)
