// r15_wgmma, after r14_tma: wgmma multiplies: a warpgroup owns 64 rows, Q and K are read from shared memory by the
// tensor core.
#include "hopper_forward.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 128,
    .tile_n = 64,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 256,
    .product = Product::wgmma,
    .stages = 2,
    .mask_edges = true,
    .fold_scale = true,
    .lazy_rescale = 8,
    .longest_first = true,
    .any_head_dim = true,
    .loads = Loads::tma,
};

FLASHLADDER_TMA_RUNG(r15_wgmma, kConfig, HopperForward)
