// Which query tiles the persistent blocks take under a causal mask, where tiles differ in length: planned on the host
// for every call. Host-only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace flashladder {

constexpr int kPlacedSections = 16, kPlacedBlocks = 160;  // more sections take the places of the first again

// of[section][block]: where a block stands among those that take a section's tiles in turns.
struct Places {
  uint8_t of[kPlacedSections][kPlacedBlocks];
};

// A section is `section` heads, whose tiles come longest first: in even turns the block at place i takes the i-th, in
// odd ones the i-th last. Blocks with less work so far get the places with more. work: of each tile of a head.
inline void balance(Places& places, int heads, int section, int blocks, const std::vector<int>& work) {
  const int tiles = static_cast<int>(work.size());
  std::vector<int64_t> done(blocks), ahead(blocks);
  std::vector<int> by_done(blocks), by_ahead(blocks);
  std::iota(by_done.begin(), by_done.end(), 0);
  for (int s = 0; s < kPlacedSections && s * section < heads; ++s) {
    const int size = std::min(section, heads - s * section);
    const int64_t items = int64_t{size} * tiles;
    for (int place = 0; place < blocks; ++place) {
      ahead[place] = 0;
      for (int64_t turn = 0;; ++turn) {
        const int64_t i = turn * blocks + (turn % 2 == 0 ? place : blocks - 1 - place);
        if (i >= items) break;
        ahead[place] += work[tiles - 1 - i / size];
      }
    }
    std::iota(by_ahead.begin(), by_ahead.end(), 0);
    std::stable_sort(by_ahead.begin(), by_ahead.end(), [&](int a, int b) { return ahead[a] > ahead[b]; });
    std::stable_sort(by_done.begin(), by_done.end(), [&](int a, int b) { return done[a] < done[b]; });
    for (int i = 0; i < blocks; ++i) {
      places.of[s][by_done[i]] = static_cast<uint8_t>(by_ahead[i]);
      done[by_done[i]] += ahead[by_ahead[i]];
    }
  }
}

}  // namespace flashladder
