// r21_stale_max, after r20_persistent: a tile's weights are taken under the maximum of the tiles before it; only where
// their sum grows too large is the maximum looked for.
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
    .lazy_rescale = -1,
    .longest_first = true,
    .any_head_dim = true,
    .loads = Loads::tma,
    .specialized = true,
    .ping_pong = true,
    .overlap = true,
    .stale_max = true,
    .persistent = true,
    .tile_m_128 = 128,
};

FLASHLADDER_TMA_RUNG(r21_stale_max, kConfig, HopperForward)
