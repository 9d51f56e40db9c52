// v37_last_joins: r37_few_divisions, of warpgroups that share rows the one that gets the last tile of keys joins the
// parts.
#define FLASHLADDER_IN_PARTS
#include "dispatch.cuh"
#include "hopper_latest.h"

using namespace flashladder;

constexpr Config kConfig = [] {
  Config config = kLatest;
  config.last_joins = true;
  return config;
}();

FLASHLADDER_DISPATCH_RUNG(v37_last_joins, kConfig, SharedRows)
