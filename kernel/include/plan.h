// Which kernel and how many splits of the keys a problem gets: enough blocks for the GPU first, then large tiles.
// Thresholds: from trials on an H100 at 18 shapes from (1, 1, 32) to (16, 16, 1 x 8192). That few rows never get a
// large tile is not measured: most of the tile would be padding.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rung.h"

namespace flashladder {

enum class Tile : int32_t {
  large,   // the rung's own
  medium,  // 32 rows
  small,   // 16 rows
};

struct Plan {
  Tile tile;
  int splits;
};

constexpr int kLargeRows = 128, kMediumRows = 32, kSmallRows = 16;
constexpr int kKeysPerSplit = 512;  // fewer keys a part save less time than joining the parts costs

inline Plan plan(const Params& p, int sms) {
  const auto blocks = [&](int rows) {
    return static_cast<int64_t>(p.batch) * p.heads_q * ((p.seq_q + rows - 1) / rows);
  };
  const int64_t enough = (3 * static_cast<int64_t>(sms) + 3) / 4;
  const int64_t most_splits = std::max(1, p.seq_k / kKeysPerSplit);
  if (p.seq_q > kLargeRows / 2 && blocks(kLargeRows) >= enough) return {Tile::large, 1};
  const bool is_medium = p.seq_q > kSmallRows && blocks(kMediumRows) * most_splits >= enough;
  const int64_t splits = sms / blocks(is_medium ? kMediumRows : kSmallRows);
  return {is_medium ? Tile::medium : Tile::small, static_cast<int>(std::clamp<int64_t>(splits, 1, most_splits))};
}

}  // namespace flashladder
