// r10_fold_scale, after r09_large_tiles: one FMA scales a score and subtracts the maximum, which is kept of raw scores.
#include "mma_forward.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 128,
    .tile_n = 64,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 128,
    .product = Product::mma_registers,
    .fold_scale = true,
};

FLASHLADDER_MMA_RUNG(r10_fold_scale, kConfig)
