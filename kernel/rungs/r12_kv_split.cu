// r12_kv_split, after r11_cp_async: where 128-row tiles do not fill the GPU, smaller ones whose warps split the keys of
// a tile and, when that is not enough, blocks that split all keys and a second kernel that joins their parts (plan.h).
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
    .splits = 0,
    .fold_scale = true,
};

FLASHLADDER_PLANNED_RUNG(r12_kv_split, kConfig)
