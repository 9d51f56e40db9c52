// r14_tma, after r13_tuned: TMA brings Q, K and V, one thread asks for them and mbarriers tell what has arrived. One
// kernel for every grid, of the large tile.
#include "mma_forward.cuh"
#include "tuned.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kTuned;
  config.splits = 1;
  config.pack_heads = false;
  config.loads = Loads::tma;
  return config;
}();

FLASHLADDER_TMA_RUNG(r14_tma, kConfig, MmaForward)
