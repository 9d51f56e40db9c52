// wgmma, TMA, bulk copies, clusters.
#include <stdexcept>

#include "harness.h"

using namespace test;
using emu::Half;

namespace {

constexpr uint32_t kAlign = 1024;

// Shared memory from a 1024-byte boundary of the window on.
uint64_t tile(uint32_t offset = 0) { return (smem() + kAlign - 1) / kAlign * kAlign + offset; }

uint32_t span(uint32_t swizzle) { return 16u << swizzle; }  // bytes of a swizzle row

uint64_t descriptor(uint64_t address, uint32_t leading, uint32_t stride, uint32_t swizzle) {
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>((4 - swizzle) & 3) << 62;
}

// An operand as TMA would leave it. K-major: rows of K; 16 columns of K in all. MN-major: rows of MN.
struct Operand {
  uint32_t mn, swizzle;
  bool mn_major;
  uint32_t bytes() const { return mn * 16 * 2; }

  // Where element (mn, k) of a tile at a 1024-byte boundary lies.
  uint32_t offset(uint32_t i, uint32_t k) const {
    const uint32_t s = span(swizzle), along = s / 2;
    uint32_t linear;
    if (swizzle == 0) {  // 8 x 16 byte core matrices, one after the other along mn, then along k
      linear = mn_major ? i / 8 * 128 + k / 8 * (mn / 8 * 128) + k % 8 * 16 + i % 8 * 2
                        : i / 8 * 128 + k / 8 * (mn / 8 * 128) + i % 8 * 16 + k % 8 * 2;
    } else if (mn_major) {  // panels of `along` columns, 16 rows of k
      linear = i / along * (16 * s) + k * s + i % along * 2;
    } else {  // rows of the swizzle's span, of which K = 16 is the part at `k_start`
      linear = i * s + k * 2;
    }
    return linear ^ ((linear >> 7 & ((1u << swizzle) - 1)) << 4);
  }
  uint32_t footprint() const { return swizzle && !mn_major ? mn * span(swizzle) : bytes(); }
  uint64_t describe(uint64_t at) const {
    if (swizzle == 0) return mn_major ? descriptor(at, mn / 8 * 128, 128, 0) : descriptor(at, mn / 8 * 128, 128, 0);
    if (mn_major) return descriptor(at, 16 * span(swizzle), 8 * span(swizzle), swizzle);
    return descriptor(at, 16, 8 * span(swizzle), swizzle);
  }
};

float a_value(uint32_t i, uint32_t k) { return small_value(i, k); }
float b_value(uint32_t j, uint32_t k) { return small_value(j + 2, k + 1); }

void multiply_and_check(Operand a, Operand b, bool a_in_registers, Half type, bool scale_d) {
  const uint32_t n = b.mn;
  const uint64_t at_a = tile(), at_b = tile((a.footprint() + kAlign - 1) / kAlign * kAlign);
  for (uint32_t x = thread(); x < 64 * 16; x += 128)
    store<uint16_t>(at_a + a.offset(x / 16, x % 16), half_bits(a_value(x / 16, x % 16), type), HERE);
  for (uint32_t x = thread(); x < n * 16; x += 128)
    store<uint16_t>(at_b + b.offset(x / 16, x % 16), half_bits(b_value(x / 16, x % 16), type), HERE);
  emu::fence_proxy(emu::Proxy::async_shared, HERE);
  syncthreads(HERE);
  const uint32_t row = emu::current->warp * 16 + lane() / 4, q = lane() % 4 * 2;
  uint32_t fragment[4];
  for (uint32_t r = 0; r < 4; ++r) {
    const uint32_t i = row + r % 2 * 8, k = q + r / 2 * 8;
    fragment[r] = half_bits(a_value(i, k), type) | static_cast<uint32_t>(half_bits(a_value(i, k + 1), type)) << 16;
  }
  std::vector<float> d(n / 2, 3.f);
  emu::wgmma_fence(HERE);
  emu::wgmma(d.data(), n, a_in_registers ? fragment : nullptr, a.describe(at_a), b.describe(at_b), scale_d, a.mn_major,
             b.mn_major, type, HERE);
  emu::wgmma_commit(HERE);
  emu::wgmma_wait(0, HERE);
  for (uint32_t r = 0; r < n / 2; ++r) {
    const uint32_t i = row + r / 2 % 2 * 8, j = r / 4 * 8 + q + r % 2;
    float sum = scale_d ? 3 : 0;
    for (uint32_t k = 0; k < 16; ++k) sum += a_value(i, k) * b_value(j, k);
    CHECK_EQUAL(d[r], sum);
  }
}

void check_wgmma(Operand a, Operand b, bool a_in_registers, Half type, bool scale_d = true) {
  const auto outcome =
      run({.threads = 128, .shared = 64 << 10}, [&] { multiply_and_check(a, b, a_in_registers, type, scale_d); });
  CHECK_EMPTY(outcome.log);
  CHECK_EQUAL(outcome.counters.wgmma, 4u);
}

}  // namespace

TEST(wgmma_is_a_matrix_product_in_every_layout) {
  for (uint32_t swizzle = 0; swizzle < 4; ++swizzle)
    for (int majors = 0; majors < 4; ++majors) {
      const bool a_mn = majors & 1, b_mn = majors & 2;
      for (const uint32_t n : {64u, 128u})
        check_wgmma({64, swizzle, a_mn}, {n, swizzle, b_mn}, false, swizzle % 2 ? Half::bf16 : Half::fp16);
    }
}

TEST(wgmma_takes_a_from_registers) {
  for (const Half type : {Half::fp16, Half::bf16})
    for (const bool mn_major : {false, true}) check_wgmma({64, 3, false}, {64, 3, mn_major}, true, type);
}

TEST(wgmma_sizes_and_scale) {
  for (const uint32_t n : {8u, 24u, 256u}) check_wgmma({64, 3, false}, {n, 3, false}, false, Half::fp16, n != 24);
}

TEST(wgmma_descriptor_addresses) {
  // Canonical 128-byte swizzle: the second k-step of 16 starts 32 bytes into the row.
  const uint64_t d = descriptor(0x2000 + 32, 16, 1024, 3);
  CHECK_EQUAL(emu::wgmma_element_address(d, 0, 0, false), 0x2020u);
  CHECK_EQUAL(emu::wgmma_element_address(d, 1, 0, false), 0x2000u + 128 + (32 ^ 16));
  CHECK_EQUAL(emu::wgmma_element_address(d, 9, 8, false), 0x2000u + 1024 + 128 + (48 ^ 16));
  const uint64_t mn = descriptor(0x2000, 4096, 1024, 3);
  CHECK_EQUAL(emu::wgmma_element_address(mn, 65, 9, true), 0x2000u + 4096 + 1024 + 128 + (2 ^ 16));
}

TEST(wgmma_misuse_is_found) {
  const auto log = [](const std::function<void()>& body) {
    return run({.threads = 128, .shared = 32 << 10}, body).log;
  };
  const auto issue = [](uint64_t desc) {
    float d[4] = {};
    const uint32_t a[4] = {};
    emu::wgmma(d, 8, a, 0, desc, false, false, false, Half::fp16, HERE);
  };
  CHECK_CONTAINS(log([&] { issue(descriptor(tile(), 16, 1024, 3)); }), "without a wgmma.fence before it");
  CHECK_CONTAINS(log([&] { issue(descriptor(tile(), 16, 1024, 3)); }), "a warpgroup ends with a wgmma in flight");
  CHECK_CONTAINS(log([&] { issue(descriptor(tile(128), 16, 1024, 3)); }), "does not start at a repetition");
  CHECK_CONTAINS(log([&] { issue(descriptor(tile() + (40 << 10), 16, 1024, 3)); }), "out-of-bounds");
  CHECK_CONTAINS(log([&] { issue(descriptor(tile(thread() < 32 ? 0 : 1024), 16, 1024, 3)); }),
                 "the warps of the warpgroup disagree");
  CHECK_CONTAINS(log([&] { issue(descriptor(tile(lane() ? 0 : 1024), 16, 1024, 3)); }), "the lanes disagree");
  CHECK_CONTAINS(run({.threads = 96, .shared = 4096}, [&] { issue(descriptor(tile(), 16, 1024, 3)); }).log,
                 "without a whole warpgroup");
}

// --- wgmma and the race detector ---------------------------------------------------------------------------------

namespace {

enum class Products { right, no_fence, no_wait };

// Two rounds: all write B, multiply, overwrite B.
void products(Products how) {
  float d[4] = {};
  const uint32_t a[4] = {};
  for (uint32_t round = 0; round < 2; ++round) {
    store<uint16_t>(tile(2 * thread()), 0, HERE);
    if (how != Products::no_fence) emu::fence_proxy(emu::Proxy::async_shared, HERE);
    syncthreads(HERE);
    emu::wgmma_fence(HERE);
    emu::wgmma(d, 8, a, 0, descriptor(tile(), 128, 128, 0), false, false, false, Half::fp16, HERE);
    emu::wgmma_commit(HERE);
    if (how != Products::no_wait || round == 1) emu::wgmma_wait(0, HERE);
    syncthreads(HERE);
  }
}

const Shape kProducts{.threads = 128, .shared = 8192};

}  // namespace

TEST(wgmma_with_fence_and_wait_is_clean) {
  EXPECT_CLEAN(kProducts, [] { products(Products::right); });
}

TEST(wgmma_after_generic_writes_needs_a_proxy_fence) {
  EXPECT_FINDING(
      kProducts, [] { products(Products::no_fence); }, "race: no fence.proxy.async between wgmma at hopper.cpp:");
}

TEST(overwriting_what_wgmma_reads_needs_a_wait) {
  EXPECT_FINDING(kProducts, [] { products(Products::no_wait); }, "race: st.shared");
}

TEST(a_global_proxy_fence_does_not_help) {
  EXPECT_FINDING(
      kProducts,
      [] {
        float d[4] = {};
        const uint32_t a[4] = {};
        store<uint16_t>(tile(2 * thread()), 0, HERE);
        emu::fence_proxy(emu::Proxy::async_global, HERE);
        syncthreads(HERE);
        emu::wgmma_fence(HERE);
        emu::wgmma(d, 8, a, 0, descriptor(tile(), 128, 128, 0), false, false, false, Half::fp16, HERE);
        emu::wgmma_commit(HERE);
        emu::wgmma_wait(0, HERE);
      },
      "no fence.proxy.async");
}

TEST(a_proxy_fence_may_come_after_the_barrier) {
  EXPECT_CLEAN(kProducts, [] {
    float d[4] = {};
    const uint32_t a[4] = {};
    store<uint16_t>(tile(2 * thread()), 0, HERE);
    syncthreads(HERE);
    emu::fence_proxy(emu::Proxy::async_shared, HERE);
    emu::wgmma_fence(HERE);
    emu::wgmma(d, 8, a, 0, descriptor(tile(), 128, 128, 0), false, false, false, Half::fp16, HERE);
    emu::wgmma_commit(HERE);
    emu::wgmma_wait(0, HERE);
  });
}

// --- TMA ---------------------------------------------------------------------------------------------------------

namespace {

struct alignas(64) Map {
  unsigned char bytes[128];
};

// A 3-D tensor of 16-bit elements that count up.
struct Tensor {
  uint64_t dim[3] = {64, 10, 3};
  Buffer memory{64 * 10 * 3 * 2};
  Map map;

  explicit Tensor(uint32_t swizzle, uint32_t columns = 64, uint32_t rows = 8,
                  emu::Element type = emu::Element::unknown) {
    for (uint32_t i = 0; i < 64 * 10 * 3; ++i) memory.as<uint16_t>()[i] = static_cast<uint16_t>(i + 1);
    const uint64_t stride[2] = {128, 1280};
    const uint32_t box[3] = {columns, rows, 1};
    emu::encode_tensor_map(&map, 3, 2, memory.as<void>(), dim, stride, box, swizzle, type);
  }
  uint16_t at(int64_t c0, int64_t c1, int64_t c2) {
    if (c0 < 0 || c0 >= 64 || c1 < 0 || c1 >= 10 || c2 < 0 || c2 >= 3) return 0;
    return memory.as<uint16_t>()[(c2 * 10 + c1) * 64 + c0];
  }
};

void start_mbarrier(uint64_t mbarrier, uint32_t count = 1) {
  if (thread() == 0) {
    emu::mbarrier_init(mbarrier, count, HERE);
    emu::fence_mbarrier_init(HERE);
  }
  syncthreads(HERE);
}

uint64_t swizzled(uint64_t address, uint32_t swizzle) {
  return address ^ ((address >> 7 & ((1u << swizzle) - 1)) << 4);
}

const Shape kTma{.threads = 64, .shared = 16384};

}  // namespace

TEST(tma_loads_swizzled_tiles_and_zeros_outside) {
  for (uint32_t swizzle = 0; swizzle < 4; ++swizzle) {
    const uint32_t columns = swizzle ? span(swizzle) / 2 : 64;
    Tensor t(swizzle, columns);
    const int32_t corners[][3] = {{0, 0, 0}, {8, 5, 2}, {60, 8, 1}, {-3, -2, 1}, {0, 0, 3}, {0, 0, -1}, {64, 0, 0}};
    for (const auto& corner : corners)
      EXPECT_CLEAN(kTma, [&] {
        const uint64_t mbarrier = smem();
        start_mbarrier(mbarrier);
        if (thread() == 0) {
          emu::mbarrier_expect_tx(mbarrier, columns * 16, true, HERE);
          emu::tma_load(tile(1024), &t.map, mbarrier, 3, corner, 0, HERE);
        }
        wait(mbarrier, 0, HERE);
        for (uint32_t i = thread(); i < columns * 8; i += 64) {
          const uint64_t at = swizzled(tile(1024) + 2 * i, swizzle);
          CHECK_EQUAL(load<uint16_t>(at, HERE), t.at(corner[0] + i % columns, corner[1] + i / columns, corner[2]));
        }
      });
  }
}

TEST(tma_loads_up_to_five_dimensions) {
  Buffer memory(16 * 2 * 2 * 2 * 2 * 2);
  for (uint32_t i = 0; i < 256; ++i) memory.as<uint16_t>()[i] = static_cast<uint16_t>(i);
  Map map;
  const uint64_t dim[5] = {16, 2, 2, 2, 2}, stride[4] = {32, 64, 128, 256};
  const uint32_t box[5] = {8, 2, 1, 2, 1};
  emu::encode_tensor_map(&map, 5, 2, memory.as<void>(), dim, stride, box, 0);
  EXPECT_CLEAN(kTma, [&] {
    start_mbarrier(smem());
    if (thread() == 0) {
      const int32_t corner[5] = {8, 0, 1, 0, 1};
      emu::mbarrier_expect_tx(smem(), 64, true, HERE);
      emu::tma_load(tile(1024), &map, smem(), 5, corner, 0, HERE);
    }
    wait(smem(), 0, HERE);
    if (thread() < 32) {
      const uint32_t c0 = thread() % 8, c1 = thread() / 8 % 2, c3 = thread() / 16;
      CHECK_EQUAL(load<uint16_t>(tile(1024 + 2 * thread()), HERE), 8 + c0 + 16 * c1 + 32 + 64 * c3 + 128);
    }
  });
}

TEST(tma_stores_swizzled_tiles_and_clips) {
  for (uint32_t swizzle : {0u, 3u}) {
    Tensor t(swizzle);
    const auto body = [&] {
      for (uint32_t i = thread(); i < 64 * 8; i += 64)
        store<uint16_t>(swizzled(tile() + 2 * i, swizzle), static_cast<uint16_t>(5000 + i), HERE);
      emu::fence_proxy(emu::Proxy::async_shared, HERE);
      syncthreads(HERE);
      if (thread() != 0) return;
      const int32_t corner[3] = {4, 7, 1};
      emu::tma_store(&t.map, tile(), 3, corner, false, HERE);
      emu::bulk_commit(HERE);
      emu::bulk_wait(0, false, HERE);
    };
    EXPECT_CLEAN(kTma, body);
    for (uint32_t i = 0; i < 64 * 8; ++i)
      if (4 + i % 64 < 64 && 7 + i / 64 < 10) CHECK_EQUAL(t.at(4 + i % 64, 7 + i / 64, 1), 5000 + i);
    CHECK_EQUAL(t.at(3, 7, 1), 640 + 7 * 64 + 3 + 1);
    CHECK_EQUAL(t.at(0, 0, 2), 1281u);
  }
}

TEST(tma_reduces) {
  Tensor t(0, 64, 8, emu::Element::bf16);
  for (uint32_t i = 0; i < 64 * 30; ++i) t.memory.as<uint16_t>()[i] = half_bits(2, Half::bf16);
  run(kTma, [&] {
    for (uint32_t i = thread(); i < 64 * 8; i += 64) store<uint16_t>(tile(2 * i), half_bits(3, Half::bf16), HERE);
    emu::fence_proxy(emu::Proxy::async_shared, HERE);
    syncthreads(HERE);
    if (thread() != 0) return;
    const int32_t corner[3] = {0, 0, 1};
    emu::tma_store(&t.map, tile(), 3, corner, true, HERE);
    emu::bulk_commit(HERE);
    emu::bulk_wait(0, false, HERE);
  });
  CHECK_EQUAL(t.at(5, 5, 1), half_bits(5, Half::bf16));
  CHECK_EQUAL(t.at(5, 5, 0), half_bits(2, Half::bf16));
}

TEST(tensor_maps_are_checked) {
  Buffer memory(4096);
  const auto refused = [&](uint32_t box0, uint64_t stride, uint32_t swizzle, uint32_t offset) {
    Map map;
    const uint64_t dim[2] = {64, 8}, strides[1] = {stride};
    const uint32_t box[2] = {box0, 8};
    try {
      emu::encode_tensor_map(&map, 2, 2, memory.as<char>() + offset, dim, strides, box, swizzle);
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refused(64, 128, 3, 0).empty());
  CHECK_CONTAINS(refused(64, 120, 3, 0), "stride 1 is not a multiple of 16");
  CHECK_CONTAINS(refused(64, 128, 2, 0), "exceed the swizzle's 64");
  CHECK_CONTAINS(refused(4, 128, 0, 0), "no multiple of 16");
  CHECK_CONTAINS(refused(64, 128, 3, 8), "not 16-byte aligned");
  CHECK_CONTAINS(refused(512, 128, 0, 0), "not in 1..256");
  CHECK_CONTAINS(refused(64, 128, 4, 0), "swizzle mode 4 is not modelled");
}

TEST(tma_misuse_is_found) {
  Tensor t(3);
  static const Map nothing{};
  const int32_t corner[3] = {0, 0, 0};
  const auto log = [&](const Map* map, uint32_t rank, uint32_t offset) {
    return run(kTma,
               [&] {
                 start_mbarrier(smem());
                 if (thread() == 0) emu::tma_load(tile(offset), map, smem(), rank, corner, 0, HERE);
               })
        .log;
  };
  CHECK_CONTAINS(log(&nothing, 3, 1024), "no encoded tensor map");
  CHECK_CONTAINS(log(&t.map, 2, 1024), "has rank 3, the instruction 2");
  CHECK_CONTAINS(log(&t.map, 3, 1024 + 64), "misaligned shared address");
  CHECK_CONTAINS(log(&t.map, 3, 16384), "out-of-bounds shared access");
  CHECK_CONTAINS(log(&t.map, 3, 1024), "a block ends before TMA load at hopper.cpp:");
  const uint64_t dim[3] = {64, 11, 3}, stride[2] = {128, 1280};  // one row more than there is
  const uint32_t box[3] = {64, 8, 1};
  Map large;
  emu::encode_tensor_map(&large, 3, 2, t.memory.as<void>(), dim, stride, box, 3);
  const int32_t last[3] = {0, 8, 2};
  CHECK_CONTAINS(run(kTma,
                     [&] {
                       start_mbarrier(smem());
                       if (thread() == 0) emu::tma_load(tile(1024), &large, smem(), 3, last, 0, HERE);
                     })
                     .log,
                 "TMA load: out-of-bounds global read");
}

TEST(wrong_transaction_bytes_hang) {
  Tensor t(3);
  const int32_t corner[3] = {0, 0, 0};
  CHECK_CONTAINS(run(kTma,
                     [&] {
                       start_mbarrier(smem());
                       if (thread() == 0) {
                         emu::mbarrier_expect_tx(smem(), 2048, true, HERE);
                         emu::tma_load(tile(1024), &t.map, smem(), 3, corner, 0, HERE);
                       }
                       wait(smem(), 0, HERE);
                     })
                     .log,
                 "0 of 1 arrivals pending, 1024 bytes pending");
}

// --- TMA and the race detector -----------------------------------------------------------------------------------

namespace {

enum class Loads { right, no_wait, wrong_parity, no_init_fence, early_release, no_empty_wait, generic_before };

// Thread 0 loads tiles into two slots; warp 1 reads them.
void load_ring(Tensor& t, Loads how) {
  const uint64_t full = smem(), empty = smem(16);
  if (thread() == 0) {
    for (uint32_t s = 0; s < 2; ++s) {
      emu::mbarrier_init(full + 8 * s, 1, HERE);
      emu::mbarrier_init(empty + 8 * s, 32, HERE);
    }
    if (how != Loads::no_init_fence) emu::fence_mbarrier_init(HERE);
  }
  if (how == Loads::generic_before && thread() == 1) store<uint32_t>(tile(1024), 0, HERE);
  syncthreads(HERE);
  for (uint32_t i = 0; i < 6; ++i) {
    const uint32_t s = i % 2, parity = i / 2 % 2;
    const uint64_t slot = tile(1024 + 1024 * s);
    if (thread() == 0) {
      if (how != Loads::no_empty_wait) wait(empty + 8 * s, parity ^ 1, HERE);
      const int32_t corner[3] = {0, static_cast<int32_t>(i), 0};
      emu::mbarrier_expect_tx(full + 8 * s, 1024, true, HERE);
      emu::tma_load(slot, &t.map, full + 8 * s, 3, corner, 0, HERE);
    } else if (thread() >= 32) {
      if (how != Loads::no_wait) wait(full + 8 * s, how == Loads::wrong_parity ? parity ^ 1 : parity, HERE);
      if (how == Loads::early_release) emu::mbarrier_arrive(empty + 8 * s, 1, HERE);
      const auto x = load<uint16_t>(slot + 2 * lane(), HERE);
      if (how == Loads::right) CHECK_EQUAL(x, i * 64 + lane() + 1);
      if (how != Loads::early_release) emu::mbarrier_arrive(empty + 8 * s, 1, HERE);
    }
  }
}

void expect_load_finding(Loads how, const char* part) {
  Tensor t(0);
  EXPECT_FINDING(kTma, [&] { load_ring(t, how); }, part);
}

}  // namespace

TEST(tma_ring_is_clean) {
  Tensor t(0);
  EXPECT_CLEAN(kTma, [&] { load_ring(t, Loads::right); });
}
TEST(reading_before_the_full_barrier_is_found) { expect_load_finding(Loads::no_wait, "kernel"); }
TEST(waiting_for_the_wrong_parity_is_found) { expect_load_finding(Loads::wrong_parity, "kernel"); }
TEST(tma_into_a_slot_released_early_is_a_race) { expect_load_finding(Loads::early_release, "race: "); }
TEST(tma_into_a_slot_in_use_is_a_race) { expect_load_finding(Loads::no_empty_wait, "kernel"); }
TEST(tma_needs_a_fenced_mbarrier) {
  expect_load_finding(Loads::no_init_fence, "was followed by neither fence.mbarrier_init nor fence.proxy.async");
}
TEST(tma_over_generic_writes_needs_a_proxy_fence) {
  expect_load_finding(Loads::generic_before, "race: no fence.proxy.async between TMA load");
}

namespace {

enum class Stores { right, no_fence, no_wait, no_wait_at_all, no_barrier };

void store_twice(Tensor& t, Stores how) {
  for (uint32_t round = 0; round < 2; ++round) {
    for (uint32_t i = thread(); i < 512; i += 64) store<uint16_t>(tile(2 * i), 7, HERE);
    if (how != Stores::no_fence) emu::fence_proxy(emu::Proxy::async_shared, HERE);
    if (how != Stores::no_barrier) syncthreads(HERE);
    if (thread() == 0) {
      const int32_t corner[3] = {0, 0, 0};
      emu::tma_store(&t.map, tile(), 3, corner, false, HERE);
      emu::bulk_commit(HERE);
      if (how != Stores::no_wait_at_all && (how != Stores::no_wait || round == 1)) emu::bulk_wait(0, true, HERE);
    }
    syncthreads(HERE);
  }
}

void expect_store_finding(Stores how, const char* part) {
  Tensor t(0);
  EXPECT_FINDING(kTma, [&] { store_twice(t, how); }, part);
}

}  // namespace

TEST(tma_stores_are_clean) {
  Tensor t(0);
  EXPECT_CLEAN(kTma, [&] { store_twice(t, Stores::right); });
}
TEST(tma_store_needs_a_proxy_fence) {
  expect_store_finding(Stores::no_fence, "race: no fence.proxy.async between TMA store");
}
TEST(tma_store_needs_a_barrier) { expect_store_finding(Stores::no_barrier, "race: "); }
TEST(overwriting_what_a_tma_store_reads_is_a_race) {
  expect_store_finding(Stores::no_wait, "by thread 0 (async proxy)");
}
TEST(exit_with_a_bulk_store_in_flight_is_found) {
  expect_store_finding(Stores::no_wait_at_all, "exits while its bulk store at hopper.cpp:");
}

TEST(bulk_copies) {
  Buffer in(256), out(256);
  for (uint32_t i = 0; i < 64; ++i) in.as<uint32_t>()[i] = i;
  const auto body = [&] {
    start_mbarrier(smem());
    if (thread() == 0) {
      emu::mbarrier_expect_tx(smem(), 256, true, HERE);
      emu::bulk_load(smem(256), in.address(), 256, smem(), HERE);
    }
    wait(smem(), 0, HERE);
    CHECK_EQUAL(load<uint32_t>(smem(256 + 4 * thread()), HERE), thread());
    store<uint32_t>(smem(256 + 4 * thread()), 2 * thread(), HERE);
    emu::fence_proxy(emu::Proxy::async_all, HERE);
    syncthreads(HERE);
    if (thread() == 0) {
      emu::bulk_store(out.address(), smem(256), 256, HERE);
      emu::bulk_commit(HERE);
      emu::bulk_wait(0, false, HERE);
      CHECK_EQUAL(out.as<uint32_t>()[63], 126u);
    }
  };
  EXPECT_CLEAN(kTma, body);
  CHECK_CONTAINS(run({.threads = 1}, [&] { emu::bulk_store(out.address(), smem(), 8, HERE); }).log,
                 "must be multiples of 16");
}

// --- clusters ----------------------------------------------------------------------------------------------------

namespace {

void cluster_sync() {
  emu::cluster_arrive(true, HERE);
  emu::cluster_wait(HERE);
}

const Shape kCluster{.threads = 64, .shared = 8192, .blocks = 8, .cluster = 4};

uint32_t rank() { return emu::current->cluster_rank; }

}  // namespace

TEST(cluster_blocks_run_together) {
  EXPECT_CLEAN(kCluster, [] {
    CHECK_EQUAL(emu::cluster_size(), 4u);
    CHECK_EQUAL(rank(), emu::current->ctaid.x % 4);
    for (uint32_t i = 0; i < 3; ++i) {
      store<uint32_t>(smem(4 * thread()), 100 * rank() + thread() + i, HERE);
      cluster_sync();
      const uint32_t other = (rank() + 1) % 4;
      CHECK_EQUAL(load<uint32_t>(emu::map_to_rank(smem(4 * (63 - thread())), other, HERE), HERE),
                  100 * other + 63 - thread() + i);
      cluster_sync();
    }
  });
}

TEST(distributed_shared_memory_needs_a_cluster_barrier) {
  EXPECT_FINDING(
      kCluster,
      [] {
        store<uint32_t>(smem(4 * thread()), 1, HERE);
        syncthreads(HERE);
        load<uint32_t>(emu::map_to_rank(smem(4 * thread()), rank() ^ 1, HERE), HERE);
        cluster_sync();
      },
      "race: ");
}

TEST(a_relaxed_cluster_arrival_does_not_release) {
  EXPECT_FINDING(
      kCluster,
      [] {
        store<uint32_t>(smem(4 * thread()), 1, HERE);
        emu::cluster_arrive(false, HERE);
        emu::cluster_wait(HERE);
        load<uint32_t>(emu::map_to_rank(smem(4 * thread()), rank() ^ 1, HERE), HERE);
        cluster_sync();
      },
      "race: ");
}

TEST(an_exited_block_has_no_shared_memory) {
  const Outcome outcome = run(kCluster, [] {
    if (rank() == 0) return;
    if (rank() == 1) {
      for (int i = 0; i < 10; ++i) emu::yield("test", HERE);
      load<uint32_t>(emu::map_to_rank(smem(), 0, HERE), HERE);
    }
  });
  CHECK_CONTAINS(outcome.log, "access to the shared memory of rank 0, whose block has exited");
}

TEST(cluster_barrier_misuse_is_a_fault) {
  CHECK_CONTAINS(run(kCluster, [] { emu::cluster_wait(HERE); }).log, "barrier.cluster.wait without an arrival");
  CHECK_CONTAINS(run(kCluster,
                     [] {
                       emu::cluster_arrive(true, HERE);
                       emu::cluster_arrive(true, HERE);
                     })
                     .log,
                 "has arrived already");
  CHECK_CONTAINS(run(kCluster, [] { emu::map_to_rank(smem(), 4, HERE); }).log, "rank 4 of a cluster of 4");
}

TEST(an_exit_between_arrival_and_wait_is_a_finding) {
  const auto body = [](bool arrives) {
    if (arrives) emu::cluster_arrive(true, HERE);
    if (rank() == 0) return;
    if (!arrives) emu::cluster_arrive(true, HERE);
    emu::cluster_wait(HERE);
  };
  EXPECT_CLEAN(kCluster, [&] { body(false); });
  EXPECT_FINDING(kCluster, [&] { body(true); }, "exits between barrier.cluster.arrive at hopper.cpp:");
}

TEST(remote_mbarrier_arrivals) {
  const auto body = [](bool waits) {
    if (rank() == 0) start_mbarrier(smem(), 3 * 64);
    cluster_sync();
    if (rank() != 0) {
      store<uint32_t>(emu::map_to_rank(smem(256 * rank() + 4 * thread()), 0, HERE), rank(), HERE);
      emu::mbarrier_arrive(emu::map_to_rank(smem(), 0, HERE), 1, HERE);
    } else {
      if (waits) wait(smem(), 0, HERE);
      for (uint32_t r = 1; r < 4; ++r) {
        const auto x = load<uint32_t>(smem(256 * r + 4 * thread()), HERE);
        if (waits) CHECK_EQUAL(x, r);
      }
    }
    cluster_sync();
  };
  EXPECT_CLEAN(kCluster, [&] { body(true); });
  EXPECT_FINDING(kCluster, [&] { body(false); }, "race: ");
}

TEST(multicast_loads_reach_every_block) {
  Tensor t(3);
  EXPECT_CLEAN(kCluster, [&] {
    start_mbarrier(smem());
    cluster_sync();
    if (thread() == 0) {
      emu::mbarrier_expect_tx(smem(), 2 * 1024, true, HERE);
      const int32_t corner[3] = {0, 0, static_cast<int32_t>(rank() / 2)};
      // Ranks 0 and 1 load for all; so each block gets two tiles.
      if (rank() < 2) emu::tma_load(tile(1024 + 1024 * rank()), &t.map, smem(), 3, corner, 15, HERE);
    }
    wait(smem(), 0, HERE);
    for (uint32_t i = thread(); i < 1024; i += 64)
      CHECK_EQUAL(load<uint16_t>(swizzled(tile(1024) + 2 * i, 3), HERE), t.at(i % 64, i / 64 % 8, 0));
    cluster_sync();
  });
}

TEST(bulk_copies_between_blocks) {
  EXPECT_CLEAN(kCluster, [] {
    start_mbarrier(smem());
    store<uint32_t>(smem(256 + 4 * thread()), rank(), HERE);
    emu::fence_proxy(emu::Proxy::async_shared, HERE);
    cluster_sync();
    const uint32_t next = (rank() + 1) % 4;
    if (thread() == 0) {
      emu::mbarrier_expect_tx(smem(), 256, true, HERE);
      emu::bulk_to_cluster(emu::map_to_rank(smem(512), next, HERE), smem(256), 256,
                           emu::map_to_rank(smem(), next, HERE), HERE);
    }
    wait(smem(), 0, HERE);
    CHECK_EQUAL(load<uint32_t>(smem(512 + 4 * thread()), HERE), (rank() + 3) % 4);
    cluster_sync();
  });
}
