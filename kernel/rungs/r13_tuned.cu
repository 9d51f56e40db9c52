// r13_tuned, after r12_kv_split: a retune. Masks only where a row does not see the whole tile, O rescaled only when a
// maximum grew by more than 2^8, longest query tiles first, a third stage where two blocks still fit, any head_dim.
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
    .stages = 3,
    .splits = 0,
    .mask_edges = true,
    .fold_scale = true,
    .lazy_rescale = 8,
    .longest_first = true,
    .any_head_dim = true,
};

FLASHLADDER_PLANNED_RUNG(r13_tuned, kConfig)
