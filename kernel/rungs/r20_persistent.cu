// r20_persistent, after r19_overlap: one block an SM computes query tiles one after the other, the long ones first, and
// loads the next while it finishes this one.
#include "hopper_forward.cuh"
#include "hopper_tuned.h"

using namespace flashladder;

FLASHLADDER_TMA_RUNG(r20_persistent, kHopper, HopperForward)
