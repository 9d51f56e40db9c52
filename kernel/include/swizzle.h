// XOR swizzle of a shared-memory tile whose rows are at least 128 bytes: where 16-byte chunk `chunk` of row `row` lies.
// Eight consecutive rows at one chunk index then cover all 32 banks, and so does one row's run of eight chunks.
#pragma once

namespace flashladder {

#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr int swizzle_chunk(int row, int chunk) {
  return chunk ^ (row & 7);
}

}  // namespace flashladder
