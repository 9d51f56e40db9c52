// The configuration of r13_tuned, of which the variants in kernel/variants change a field each.
#pragma once

#include "rung.h"

namespace flashladder {

constexpr Config kTuned{
    .tile_m = 128,
    .tile_n = 64,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 128,
    .product = Product::mma_registers,
    .stages = 2,
    .splits = 0,
    .mask_edges = true,
    .fold_scale = true,
    .lazy_rescale = 8,
    .longest_first = true,
    .any_head_dim = true,
    .pack_heads = true,
};

}  // namespace flashladder
