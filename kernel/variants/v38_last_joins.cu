// v38_last_joins: r38_first_look, of warpgroups that share rows the one that gets the last tile of keys joins the
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

FLASHLADDER_DISPATCH_RUNG(v38_last_joins, kConfig, SharedRows)
