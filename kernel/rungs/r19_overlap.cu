// r19_overlap, after r18_ping_pong: within a warpgroup too, P V of a tile runs beside the softmax of the next.
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
    .tile_m_128 = 128,
};

FLASHLADDER_TMA_RUNG(r19_overlap, kConfig, HopperForward)
