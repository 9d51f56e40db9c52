// r18_ping_pong, after r17_wide_tiles: the warpgroups take turns on the tensor cores: one's softmax runs beside
// another's products.
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
    .tile_m_128 = 128,
};

FLASHLADDER_TMA_RUNG(r18_ping_pong, kConfig, HopperForward)
