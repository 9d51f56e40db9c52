// r37_few_divisions, after r36_short_join: a block divides to find its work only where heads share K and V or keys are
// split.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_latest.h"

using namespace flashladder;

constexpr Config kConfig = kLatest;

FLASHLADDER_DISPATCH_RUNG(r37_few_divisions, kConfig, SharedRows)
