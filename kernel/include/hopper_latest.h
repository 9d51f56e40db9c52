// The configuration of r38_first_look, of which the variants in kernel/variants change a field each.
#pragma once

#include "hopper_tuned.h"

namespace flashladder {

constexpr Config kLatest = [] {
  Config config = kHopper;
  config.splits = 0;
  config.pack_heads = true;
  config.key_groups = 0;
  config.rest_first = true;
  config.short_gap = true;
  config.paced = 4;
  config.halves_last = true;
  config.tma_store = true;
  config.quick_repair = true;
  config.balanced = true;
  config.early_combine = true;
  config.multicast = Multicast::first_tiles;
  config.short_epilogue = true;
  config.early_item = true;
  config.short_join = true;
  config.few_divisions = true;
  config.first_look = true;
  return config;
}();

}  // namespace flashladder
