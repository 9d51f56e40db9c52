// r09_large_tiles, after r08_mma_sync: tiles of 128 queries and 64 keys. A warp owns 32 rows, so that each fragment of
// K and V that it reads from shared memory serves two products.
#include "mma_forward.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 128,
    .tile_n = 64,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 128,
    .product = Product::mma_registers,
};

FLASHLADDER_MMA_RUNG(r09_large_tiles, kConfig)
