// r16_specialized, after r15_wgmma: a warpgroup of its own issues the loads, tiles ahead of the others, which get its
// registers.
#include "hopper_forward.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 128,
    .tile_n = 64,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 384,
    .product = Product::wgmma,
    .stages = 2,
    .mask_edges = true,
    .fold_scale = true,
    .lazy_rescale = 8,
    .longest_first = true,
    .any_head_dim = true,
    .loads = Loads::tma,
    .specialized = true,
};

FLASHLADDER_TMA_RUNG(r16_specialized, kConfig, HopperForward)
