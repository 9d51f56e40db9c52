// The configuration of r20_persistent, of which r21_dispatch and the variants in kernel/variants change a field each.
#pragma once

#include "rung.h"

namespace flashladder {

constexpr Config kHopper{
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
};

}  // namespace flashladder
