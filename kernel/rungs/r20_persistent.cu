// r20_persistent, after r19_overlap: one block an SM computes query tiles one after the other, the long ones first, and
// loads the next while it computes this one.
#include "hopper_forward.cuh"

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
    .mask_edges = true,
    .fold_scale = true,
    .lazy_rescale = 8,
    .longest_first = true,
    .any_head_dim = true,
    .loads = Loads::tma,
    .specialized = true,
    .ping_pong = true,
    .overlap = true,
    .persistent = true,
    .tile_m_128 = 128,
};

FLASHLADDER_TMA_RUNG(r20_persistent, kConfig, HopperForward)
