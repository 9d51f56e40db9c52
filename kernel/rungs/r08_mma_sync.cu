// r08_mma_sync, after r07_wmma_pv: mma.sync and ldmatrix. Scores and weights stay in registers (mma_forward.cuh).
#include "mma_forward.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 32,
    .tile_n = 32,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 64,
    .product = Product::mma_registers,
};

FLASHLADDER_MMA_RUNG(r08_mma_sync, kConfig)
