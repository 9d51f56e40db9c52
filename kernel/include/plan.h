// Which kernel and how many splits of the keys a problem gets: enough blocks for the GPU first, then large tiles. Fed
// by `flashladder tune`; tests/unit/test_build.py holds it against the recorded runs of that.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rung.h"

namespace flashladder {

constexpr int kLargeRows = 128, kMediumRows = 32, kSmallRows = 16;
constexpr int kMinSplitKeys = 1024;  // joining the parts costs what fewer keys take
constexpr int kKeysPerSplit = 128, kMostSplits = 16;
constexpr int kBlocksPerSm = 2;  // that split keys should give, where tiles alone leave SMs idle

// One query row a head: the query heads that share a KV head become the rows of one tile, which reads K and V once.
inline void pack_heads(Params& p) {
  const int group = p.heads_q / p.heads_kv;
  if (p.seq_q != 1 || group == 1) return;
  for (Strides* strides : {&p.q_strides, &p.o_strides, &p.lse_strides}) {
    strides->row = strides->head;
    strides->head *= group;
  }
  p.heads_q = p.heads_kv;
  p.seq_q = group;
  p.causal = false;  // the one row sees every key
}

inline int64_t query_tiles(const Params& p, int rows) {
  return static_cast<int64_t>(p.batch) * p.heads_q * ((p.seq_q + rows - 1) / rows);
}

// Whether so many blocks give three quarters of the multiprocessors one.
inline bool fill(int64_t blocks, int multiprocessors) {
  return blocks >= (3 * static_cast<int64_t>(multiprocessors) + 3) / 4;
}

// Whether tiles of so many rows have rows, and the GPU tiles enough.
inline bool suits(const Params& p, int rows, int multiprocessors) {
  return p.seq_q > rows / 2 && fill(query_tiles(p, rows), multiprocessors);
}

// is_large: the problem is one for the rung's own tile.
inline Tile choose_tile(Params& p, int multiprocessors, bool is_large) {
  p.splits = 1;
  if (is_large) return Tile::large;
  const int64_t most_splits = p.seq_k < kMinSplitKeys ? 1 : std::min(kMostSplits, p.seq_k / kKeysPerSplit);
  const bool is_medium = p.seq_q > kSmallRows && fill(query_tiles(p, kMediumRows) * most_splits, multiprocessors);
  const int64_t tiles = query_tiles(p, is_medium ? kMediumRows : kSmallRows);
  const int64_t splits = fill(tiles, multiprocessors) ? 1 : kBlocksPerSm * multiprocessors / tiles;
  p.splits = static_cast<int>(std::clamp<int64_t>(splits, 1, most_splits));
  return is_medium ? Tile::medium : Tile::small;
}

}  // namespace flashladder
