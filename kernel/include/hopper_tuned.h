// The configuration of r22_retuned, of which r23_dispatch and the variants in kernel/variants change a field each.
#pragma once

#include "rung.h"

namespace flashladder {

constexpr Config kHopper{
    .tile_m = 256,
    .tile_n = 64,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 640,
    .product = Product::wgmma,
    .stages = 4,
    .mask_edges = true,
    .fold_scale = true,
    .lazy_rescale = -1,
    .longest_first = true,
    .any_head_dim = true,
    .loads = Loads::tma,
    .specialized = true,
    .overlap = true,
    .stale_max = true,
    .persistent = true,
    .tile_m_128 = 192,
    .tile_n_128 = 64,
    .stages_128 = 4,
};

}  // namespace flashladder
