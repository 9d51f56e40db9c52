// r13_tuned, after r12_kv_split: a retune. Masks only where a row does not see the whole tile, O rescaled only when a
// maximum grew by more than 2^8, longest query tiles first, the heads of one query row that share K and V in one tile,
// any head_dim.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

FLASHLADDER_PLANNED_RUNG(r13_tuned, kTuned)
