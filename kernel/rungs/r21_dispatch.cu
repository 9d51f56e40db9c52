// r21_dispatch, after r20_persistent: small grids, and tensors that TMA cannot read, go to the portable ladder's
// smaller kernels, whose warps and blocks split the keys.
#include "dispatch.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 192,
    .tile_n = 128,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 512,
    .product = Product::wgmma,
    .stages = 2,
    .splits = 0,
    .mask_edges = true,
    .fold_scale = true,
    .lazy_rescale = 8,
    .longest_first = true,
    .any_head_dim = true,
    .pack_heads = true,
    .loads = Loads::tma,
    .specialized = true,
    .ping_pong = true,
    .overlap = true,
    .persistent = true,
};

FLASHLADDER_DISPATCH_RUNG(r21_dispatch, kConfig)
