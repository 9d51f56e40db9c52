// Which query tiles the persistent blocks take under a causal mask, where tiles differ in length: planned on the host.
// Host-only.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashladder {

constexpr int kPlacedSections = 16, kPlacedBlocks = 160;  // more sections take the places of the first again

// of[section][block]: where a block stands among those that take a section's tiles in turns.
struct Places {
  uint8_t of[kPlacedSections][kPlacedBlocks];
};

// A section is `section` heads, whose tiles come longest first: in even turns the block at place i takes the i-th, in
// odd ones the i-th last. Blocks with less work so far get the places with more. work(tile): of each tile of a head.
template <class Work>
void balance(Places& places, int heads, int section, int blocks, int tiles, Work work) {
  int64_t done[kPlacedBlocks] = {}, ahead[kPlacedBlocks];
  uint8_t by_done[kPlacedBlocks], by_ahead[kPlacedBlocks];
  for (int i = 0; i < blocks; ++i) by_done[i] = static_cast<uint8_t>(i);
  for (int s = 0, planned = 0; s < kPlacedSections && s * section < heads; ++s) {
    const int size = std::min(section, heads - s * section);
    if (size != planned) {
      for (int i = 0; i < blocks; ++i) {
        ahead[i] = 0;
        by_ahead[i] = static_cast<uint8_t>(i);
      }
      for (int tile = tiles - 1, place = 0, step = 1; tile >= 0; --tile) {
        const int64_t cost = work(tile);
        for (int head = 0; head < size; ++head) {
          ahead[place] += cost;
          place += step;
          if (place < 0 || place == blocks) {
            step = -step;
            place += step;
          }
        }
      }
      std::stable_sort(by_ahead, by_ahead + blocks, [&](int a, int b) { return ahead[a] > ahead[b]; });
      planned = size;
    }
    std::stable_sort(by_done, by_done + blocks, [&](int a, int b) { return done[a] < done[b]; });
    for (int i = 0; i < blocks; ++i) {
      places.of[s][by_done[i]] = by_ahead[i];
      done[by_done[i]] += ahead[by_ahead[i]];
    }
  }
}

}  // namespace flashladder
