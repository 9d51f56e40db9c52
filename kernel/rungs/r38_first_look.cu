// r38_first_look, after r37_few_divisions: the first look at whether maxima are too old comes after the first tile that
// trusts them.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_latest.h"

using namespace flashladder;

constexpr Config kConfig = kLatest;

FLASHLADDER_DISPATCH_RUNG(r38_first_look, kConfig, SharedRows)
