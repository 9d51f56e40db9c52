// r11_cp_async, after r10_fold_scale: cp.async fills the next tile of K and V while this one is computed.
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
    .stages = 2,
    .fold_scale = true,
};

FLASHLADDER_MMA_RUNG(r11_cp_async, kConfig)
