// Bank conflicts. Lanes are fibers and come one by one, so that the accesses of a warp by one instruction are gathered:
// those of the lanes' k-th execution of it since the warp last converged belong together.
#include <algorithm>

#include "state.h"

namespace emu::banks {
namespace {

struct Instance {
  uint32_t lanes, address[32];
};

struct Gathered {
  uint32_t bytes = 0;
  std::vector<Instance> instances;
  uint32_t executions[32] = {};
};

struct WarpAccesses {
  std::vector<Gathered> by_site;
  std::vector<race::Site> pending;
};

std::vector<WarpAccesses> gathered;

void evaluate(Gathered& g) {
  for (const Instance& instance : g.instances) {
    // 16-byte accesses go by 8 lanes, 8-byte ones by 16.
    const uint32_t phase = g.bytes == 16 ? 8 : g.bytes == 8 ? 16 : 32;
    for (uint32_t start = 0; start < 32; start += phase) {
      uint32_t address[32];
      uint32_t n = 0;
      for (uint32_t lane = start; lane < start + phase; ++lane)
        if (instance.lanes >> lane & 1) address[n++] = instance.address[lane];
      counters.bank_conflicts += extra_wavefronts(address, n, g.bytes);
    }
  }
  g.instances.clear();
  std::fill_n(g.executions, 32, 0);
}

}  // namespace

uint32_t extra_wavefronts(const uint32_t* address, uint32_t lanes, uint32_t bytes) {
  uint32_t words[128], n = 0;
  uint32_t word_of_bank[32], used = 0;
  bool conflict = false;
  for (uint32_t i = 0; i < lanes; ++i)
    for (uint32_t w = address[i] / 4; w * 4 < address[i] + bytes; ++w) {
      const uint32_t bank = w % 32;
      words[n++] = w;
      conflict |= (used >> bank & 1) && word_of_bank[bank] != w;
      used |= 1u << bank;
      word_of_bank[bank] = w;
    }
  if (!conflict) return 0;
  std::sort(words, words + n);
  uint32_t per_bank[32] = {}, most = 1;
  for (uint32_t i = 0; i < n; ++i)
    if (i == 0 || words[i] != words[i - 1]) most = std::max(most, ++per_bank[words[i] % 32]);
  return most - 1;
}

void record(const ThreadState& t, race::Site site, uint64_t address, uint32_t bytes) {
  WarpAccesses& w = gathered[t.cluster_rank * warps_per_block + t.warp];
  if (site >= w.by_site.size()) w.by_site.resize(site + 1);
  Gathered& g = w.by_site[site];
  const uint32_t k = g.executions[t.lane]++;
  if (k == g.instances.size()) {
    if (k == 0) w.pending.push_back(site);
    g.instances.emplace_back().lanes = 0;
  }
  g.bytes = bytes;
  Instance& instance = g.instances[k];
  instance.lanes |= 1u << t.lane;
  instance.address[t.lane] = static_cast<uint32_t>(address);
}

void flush_warp(uint32_t warp) {
  WarpAccesses& w = gathered[warp];
  for (const race::Site site : w.pending) evaluate(w.by_site[site]);
  w.pending.clear();
}

void flush_all() {
  for (uint32_t w = 0; w < gathered.size(); ++w) flush_warp(w);
}

void begin_cluster() {
  gathered.resize(warps.size());
  for (WarpAccesses& w : gathered) {
    for (const race::Site site : w.pending) {
      w.by_site[site].instances.clear();
      std::fill_n(w.by_site[site].executions, 32, 0);
    }
    w.pending.clear();
  }
}

}  // namespace emu::banks
