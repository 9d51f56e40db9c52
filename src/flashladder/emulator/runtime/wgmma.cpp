// wgmma.mma_async m64nNk16. A warp's rows are computed when it issues; the groups exist for the waits and the race
// detector. A group belongs to the warpgroup: it is complete when all four warps have committed it.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {
namespace {

constexpr uint32_t kMaxN = 256;

// Matrix descriptor, PTX ISA "Matrix Descriptor Format".
struct Descriptor {
  uint32_t start, leading, stride, base_offset, swizzle;  // swizzle as in TensorMap

  explicit Descriptor(uint64_t d)
      : start(static_cast<uint32_t>(d & 0x3fff) << 4),
        leading(static_cast<uint32_t>(d >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(d >> 32 & 0x3fff) << 4),
        base_offset(d >> 49 & 7),
        swizzle((4 - static_cast<uint32_t>(d >> 62)) & 3) {}

  // Offset of element (mn, k) of a 16-bit operand in its canonical layout, then the swizzle of the address bits.
  uint32_t element(uint32_t mn, uint32_t k, bool mn_major) const {
    const uint32_t row = 16u << swizzle;  // bytes of a swizzle row: 16, 32, 64, 128
    uint32_t offset;
    if (!mn_major) {
      offset = mn % 8 * row + mn / 8 * stride + (swizzle ? k * 2 : k / 8 * leading + k % 8 * 2);
    } else if (swizzle) {
      const uint32_t span = row / 2;
      offset = mn % span * 2 + mn / span * leading + k % 8 * row + k / 8 * stride;
    } else {
      offset = mn % 8 * 2 + mn / 8 * stride + k % 8 * 16 + k / 8 * leading;
    }
    return swizzle_address(start + offset, swizzle);
  }
};

struct WgmmaArgument {
  float* d;
  const uint32_t* a;
  uint64_t desc_a, desc_b;
  uint32_t n;
  bool scale_d, transpose_a, transpose_b;
  Half type;
  Loc loc;
  uint32_t site;
  uint32_t flags() const {
    return scale_d | transpose_a << 1 | transpose_b << 2 | (a != nullptr) << 3 | (type == Half::bf16) << 4;
  }
};

Warpgroup& warpgroup_of(const WarpState& w) {
  return warpgroups[w.index / warps_per_block * ((warps_per_block + 3) / 4) + w.index % warps_per_block / 4];
}

uint32_t warpgroup_index(const WarpState& w) { return static_cast<uint32_t>(&warpgroup_of(w) - warpgroups.data()); }

uint32_t quarter_of(const WarpState& w) { return w.index % warps_per_block % 4; }

void check_descriptor(uint64_t desc, const char* operand, Loc loc) {
  const Descriptor d(desc);
  if (d.base_offset) fail(loc, "wgmma %s: a matrix base offset is not modelled", operand);
  if (d.start >> 7 & ((1u << d.swizzle) - 1))
    fail(loc, "wgmma %s: the matrix at 0x%x does not start at a repetition of its swizzle pattern", operand,
         d.start - kSharedStart);
}

// Loads rows mn0..mn0+count of an operand as x[k][mn]. Both layouts hold 16-byte chunks: of k, or of mn.
void load_operand(uint64_t desc, uint32_t mn0, uint32_t count, bool mn_major, const WgmmaArgument& g,
                  const char* operand, float (*x)[kMaxN]) {
  const Descriptor d(desc);
  const uint64_t rank = static_cast<uint64_t>(current->cluster_rank) << kRankShift;
  const auto chunk = [&](uint32_t mn, uint32_t k, float* out, uint32_t step) {
    uint16_t half[8];
    std::memcpy(half, shared_pointer(rank | d.element(mn, k, mn_major), 16, 16, operand, g.loc), 16);
    for (uint32_t i = 0; i < 8; ++i) out[i * step] = to_float(half[i], g.type);
  };
  if (mn_major) {
    for (uint32_t k = 0; k < 16; ++k)
      for (uint32_t i = 0; i < count; i += 8) chunk(mn0 + i, k, &x[k][i], 1);
  } else {
    for (uint32_t i = 0; i < count; ++i)
      for (uint32_t k = 0; k < 16; k += 8) chunk(mn0 + i, k, &x[k][i], kMaxN);
  }
}

// Tells the race detector about the 16-byte chunks of an operand.
void record_operand(uint64_t desc, uint32_t mn0, uint32_t count, bool mn_major, const WgmmaArgument& g,
                    race::Actor actor, race::Site site) {
  const Descriptor d(desc);
  const uint64_t rank = static_cast<uint64_t>(current->cluster_rank) << kRankShift;
  const uint32_t mn_step = mn_major ? 8 : 1, k_step = mn_major ? 1 : 8;
  for (uint32_t k = 0; k < 16; k += k_step)
    for (uint32_t i = 0; i < count; i += mn_step) {
      const uint64_t address = rank | d.element(mn0 + i, k, mn_major);
      shared_pointer(address, 16, 16, "wgmma", g.loc);
      race::async_access(me(), actor, address, 16, race::Kind::read, race::Through::async, site);
    }
}

using Eight [[gnu::vector_size(32)]] = float;

[[gnu::target_clones("avx2", "default")]] void multiply_add(const float (*a)[kMaxN], const float (*b)[kMaxN],
                                                            float (*c)[kMaxN], uint32_t n) {
  for (uint32_t i = 0; i < 16; ++i)
    for (uint32_t k = 0; k < 16; ++k) {
      const float x = a[k][i];
      for (uint32_t j = 0; j < n; j += 8) {
        Eight sum, row;
        std::memcpy(&sum, &c[i][j], sizeof sum);
        std::memcpy(&row, &b[k][j], sizeof row);
        sum += row * x;
        std::memcpy(&c[i][j], &sum, sizeof sum);
      }
    }
}

// The 16 rows of one warp. Accumulator register j / 8 * 4 + i / 8 * 2 + j % 2 of lane i % 8 * 4 + j % 8 / 2 is (i, j).
void compute_rows(void* const* arguments, uint32_t quarter) {
  static float a[16][kMaxN], b[16][kMaxN], c[16][kMaxN];
  const auto of = [&](uint32_t lane) -> WgmmaArgument& { return *static_cast<WgmmaArgument*>(arguments[lane]); };
  const WgmmaArgument& g = of(0);
  if (g.a) {
    for (uint32_t lane = 0; lane < 32; ++lane)
      for (uint32_t r = 0; r < 4; ++r)
        for (uint32_t h = 0; h < 2; ++h)
          a[r / 2 * 8 + lane % 4 * 2 + h][r % 2 * 8 + lane / 4] =
              to_float(static_cast<uint16_t>(of(lane).a[r] >> 16 * h), g.type);
  } else {
    load_operand(g.desc_a, quarter * 16, 16, g.transpose_a, g, "wgmma A", a);
  }
  load_operand(g.desc_b, 0, g.n, g.transpose_b, g, "wgmma B", b);
  const auto for_accumulators = [&](auto f) {
    for (uint32_t lane = 0; lane < 32; ++lane) {
      float* d = of(lane).d;
      for (uint32_t r = 0; r < g.n / 2; ++r)
        f(d[r], c[lane / 4 + (r >> 1 & 1) * 8][r / 4 * 8 + lane % 4 * 2 + (r & 1)]);
    }
  };
  if (g.scale_d)
    for_accumulators([](float d, float& x) { x = d; });
  else
    std::memset(c, 0, sizeof c);
  multiply_add(a, b, c, g.n);
  for_accumulators([](float& d, float x) { d = x; });
}

// All warps of the warpgroup must issue the same instructions in the same order: two copies of a line are two.
void match_issue(Warpgroup& group, uint32_t quarter, const WgmmaArgument& g) {
  const uint32_t epoch = group.committed[quarter] + 1, i = group.issued[quarter]++ - group.first_issue;
  if (i == group.issues.size()) group.issues.push_back({g.desc_a, g.desc_b, g.n, g.flags(), epoch, 0, g.loc, g.site});
  WgmmaIssue& issue = group.issues[i];
  if (issue.desc_a != g.desc_a || issue.desc_b != g.desc_b || issue.n != g.n || issue.flags != g.flags() ||
      issue.group != epoch || issue.site != g.site)
    fail(g.loc, "wgmma: the warps of the warpgroup disagree on the instruction (another is at %s)",
         place(issue.loc).c_str());
  issue.issued |= 1u << quarter;
  while (!group.issues.empty() && group.issues[0].issued == 15) {
    group.issues.erase(group.issues.begin());
    ++group.first_issue;
  }
}

void issue(void* const* arguments, uint32_t, WarpState& w) {
  const auto& g = *static_cast<WgmmaArgument*>(arguments[0]);
  Warpgroup& group = warpgroup_of(w);
  const uint32_t quarter = quarter_of(w);
  ++counters.wgmma;
  for (uint32_t lane = 1; lane < 32; ++lane) {
    const auto& other = *static_cast<WgmmaArgument*>(arguments[lane]);
    if (other.desc_a != g.desc_a || other.desc_b != g.desc_b || other.flags() != g.flags())
      fail(g.loc, "wgmma: the lanes disagree on descriptors or scale-d");
  }
  if (!w.wgmma_fenced)
    report(format("%s: wgmma at %s without a wgmma.fence before it", kernel_name, place(g.loc).c_str()));
  match_issue(group, quarter, g);
  ++group.open[quarter];
  group.last = g.loc;
  if (options.races) {
    const race::Actor actor{race::Engine::wgmma, warpgroup_index(w), group.committed[quarter] + 1};
    const race::Site site = race::site(g.loc, "wgmma", 16);
    if (!g.a) record_operand(g.desc_a, quarter * 16, 16, g.transpose_a, g, actor, site);
    record_operand(g.desc_b, 0, g.n, g.transpose_b, g, actor, site);
  }
  compute_rows(arguments, quarter);
}

struct WaitArgument {
  uint32_t groups_left;
};

void finish_wait(void* const* arguments, uint32_t, WarpState& w) {
  const uint32_t left = static_cast<WaitArgument*>(arguments[0])->groups_left;
  Warpgroup& group = warpgroup_of(w);
  const uint32_t committed = group.committed[quarter_of(w)], upto = committed > left ? committed - left : 0;
  group.waited = std::max(group.waited, upto);
  if (left == 0) w.wgmma_fenced = false;
  for (uint32_t i = 0; i < 32; ++i) race::completed(threads[w.first_thread + i].clock.seen.wgmma, upto);
}

}  // namespace

uint32_t wgmma_element_address(uint64_t desc, uint32_t mn, uint32_t k, bool mn_major) {
  return Descriptor(desc).element(mn, k, mn_major);
}

void wgmma(float* d, uint32_t n, const uint32_t* a, uint64_t desc_a, uint64_t desc_b, bool scale_d, bool transpose_a,
           bool transpose_b, Half type, Loc loc, uint32_t site) {
  if (n == 0 || n % 8 || n > kMaxN) fail(loc, "wgmma: n = %u", n);
  const uint32_t in_block = current->warp;
  if (in_block / 4 * 4 + 4 > warps_per_block || threads_per_block % 32)
    fail(loc, "wgmma: the block's %u threads leave warp %u without a whole warpgroup", threads_per_block, in_block);
  if (!a) check_descriptor(desc_a, "A", loc);
  check_descriptor(desc_b, "B", loc);
  WgmmaArgument g{d, a, a ? 0 : desc_a, desc_b, n, scale_d, transpose_a, transpose_b, type, loc, site};
  aligned_collective(code(Op::wgmma, n), "wgmma.mma_async", &g, issue, loc);
}

void wgmma_fence(Loc loc) {
  aligned_collective(
      code(Op::wgmma_fence), "wgmma.fence", nullptr,
      [](void* const*, uint32_t, WarpState& w) { w.wgmma_fenced = true; }, loc);
}

void wgmma_commit(Loc loc) {
  aligned_collective(
      code(Op::wgmma_commit), "wgmma.commit_group", nullptr,
      [](void* const*, uint32_t, WarpState& w) {
        Warpgroup& group = warpgroup_of(w);
        ++group.committed[quarter_of(w)];
        group.open[quarter_of(w)] = 0;
        for (const uint32_t i : group.waiting)
          if (threads[i].status == Status::blocked) wake(i);
        group.waiting.clear();
      },
      loc);
}

void wgmma_wait(uint32_t groups_left, Loc loc) {
  WarpState& w = my_warp();
  Warpgroup& group = warpgroup_of(w);
  const uint32_t committed = group.committed[quarter_of(w)],
                 upto = committed > groups_left ? committed - groups_left : 0;
  while (*std::min_element(group.committed, group.committed + 4) < upto) {
    group.waiting.push_back(me().index);
    block_current({"wgmma.wait_group", " (the other warps of the warpgroup have not committed %u groups)", upto, loc});
  }
  WaitArgument argument{groups_left};
  aligned_collective(code(Op::wgmma_wait, groups_left), "wgmma.wait_group", &argument, finish_wait, loc);
}

void finish_warpgroups() {
  for (const Warpgroup& g : warpgroups) {
    const bool open = *std::max_element(g.open, g.open + 4) > 0;
    if (open || *std::max_element(g.committed, g.committed + 4) > g.waited)
      report(format("%s: a warpgroup ends with a wgmma in flight (the last one is at %s)", kernel_name,
                    place(g.last).c_str()));
  }
}

void set_max_registers(uint32_t count, bool increase, Loc loc) {
  if (count % 8 || count < 24 || count > 256) fail(loc, "setmaxnreg: %u registers", count);
  aligned_collective(code(Op::set_max_registers, count * 2 + increase), "setmaxnreg", nullptr, no_effect, loc);
}

}  // namespace emu
