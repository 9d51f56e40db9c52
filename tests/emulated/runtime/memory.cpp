// Bounds, alignment, memory faults, atomics, bank conflicts.
#include "harness.h"

using namespace test;

namespace {

std::string fault_of(const std::function<void()>& body, uint32_t shared = 64) {
  return run({.threads = 1, .shared = shared}, body).log;
}

void* global(uint64_t address, uint32_t bytes, bool write = false) {
  return emu::global(address, bytes, bytes, write, "ld.global", HERE);
}

}  // namespace

TEST(global_accesses_stay_inside_their_allocation) {
  Buffer a(100);
  CHECK_EMPTY(fault_of([&] {
    global(a.address(), 16);
    global(a.address() + 96, 4);
  }));
  const std::string past = fault_of([&] { global(a.address() + 100, 4); });
  CHECK_CONTAINS(past, "kernel: memory.cpp:");
  CHECK_CONTAINS(past, "block (0,0,0) thread (0,0,0): ld.global: out-of-bounds global read of 4 bytes");
  CHECK_CONTAINS(past, "100 bytes past the start of an allocation of 100 bytes");
  CHECK_CONTAINS(fault_of([&] { global(a.address() + 96, 8); }), "out-of-bounds");
  CHECK_CONTAINS(fault_of([&] { global(a.address() - 4, 4); }), "out-of-bounds");
  CHECK_CONTAINS(fault_of([&] { global(0, 4, true); }), "out-of-bounds global write");
  CHECK_CONTAINS(fault_of([&] { global(a.address() + 2, 4); }), "misaligned");
}

TEST(freed_memory_is_out_of_bounds) {
  void* p = emu::device_alloc(64);
  const auto address = reinterpret_cast<uint64_t>(p);
  const auto body = [&] { global(address, 4); };
  CHECK_EMPTY(fault_of(body));
  emu::device_free(p);
  CHECK_CONTAINS(fault_of(body), "out-of-bounds");
}

TEST(adopted_memory_is_accessible) {
  static uint32_t host[4] = {5, 6, 7, 8};
  const auto body = [] { CHECK_EQUAL(*static_cast<uint32_t*>(global(reinterpret_cast<uint64_t>(host + 2), 4)), 7u); };
  CHECK_CONTAINS(fault_of(body), "out-of-bounds");
  emu::adopt(host, sizeof host);
  CHECK_EMPTY(fault_of(body));
  emu::adopt(host, 0);
  CHECK_CONTAINS(fault_of(body), "out-of-bounds");
}

TEST(shared_accesses_stay_inside_the_block) {
  for (int races = 0; races < 2; ++races) {
    const auto log = [&](const std::function<void()>& body) {
      return run({.threads = 1, .shared = 64}, body, {.races = races}).log;
    };
    CHECK_EMPTY(log([] { store<uint64_t>(smem(56), 1, HERE); }));
    CHECK_CONTAINS(log([] { store<uint32_t>(smem(64), 1, HERE); }),
                   "st.shared: out-of-bounds shared access of 4 bytes at 0x40: the block has 64 bytes");
    CHECK_CONTAINS(log([] { load<uint32_t>(smem() - 4, HERE); }), "out-of-bounds shared access of 4 bytes at -0x4");
    CHECK_CONTAINS(log([] { load<uint32_t>(smem(2), HERE); }), "ld.shared: misaligned shared address 0x2");
    CHECK_CONTAINS(log([] { load<uint32_t>(3ull << 24 | 1024, HERE); }), "no shared address");
  }
}

TEST(static_and_dynamic_shared_memory_are_apart) {
  const auto body = [] {
    CHECK_EQUAL(emu::dynamic_shared_base() - emu::shared_base(), 32u);
    store<uint32_t>(emu::shared_base() + 16, 1, HERE);
    store<uint32_t>(emu::dynamic_shared_base() + 60, 1, HERE);
    store<uint32_t>(emu::shared_base() + 20, 1, HERE);
  };
  emu_reset();
  try {
    emu::run_grid({"kernel", {}, {}, {}, 20, 64}, body);
    CHECK(false);
  } catch (const std::exception& e) {
    CHECK_CONTAINS(e.what(), "at 0x14: ");
    CHECK_CONTAINS(e.what(), "gap before the dynamic part");
  }
}

TEST(generic_addresses_reach_every_space) {
  Buffer a(16);
  EXPECT_CLEAN(Shape{.threads = 1}, [&] {
    store<uint32_t>(smem(8), 42, HERE);
    const uint64_t generic = emu::to_generic(smem(8), HERE);
    CHECK_EQUAL(emu::to_shared(generic, HERE), smem(8));
    CHECK_EQUAL(*static_cast<uint32_t*>(emu::generic(generic, 4, 4, false, "ld", HERE)), 42u);
    uint32_t local = 7;
    CHECK_EQUAL(*static_cast<uint32_t*>(emu::generic(reinterpret_cast<uint64_t>(&local), 4, 4, false, "ld", HERE)), 7u);
    CHECK(emu::generic(a.address(), 4, 4, false, "ld", HERE) == a.as<void>());
  });
  CHECK_CONTAINS(fault_of([&] { emu::to_shared(a.address(), HERE); }), "does not point to shared memory");
}

TEST(poison_is_a_nan) {
  run({}, [] { CHECK_EQUAL(load<uint32_t>(smem(4 * lane()), HERE), 0xffffffffu); }, {});
}

TEST(too_much_shared_memory_is_refused) {
  try {
    emu::run_grid({"kernel", {}, {}, {}, 0, 300000}, [] {});
    CHECK(false);
  } catch (const std::exception& e) {
    CHECK_CONTAINS(e.what(), "kernel: a block asks for 0 + 300000 bytes of shared memory");
  }
}

namespace {
[[gnu::noinline]] int overflow(volatile int* below) {
  volatile int here[1024];
  here[0] = *below + 1;
  return here[0] < 0 ? 0 : overflow(here) + here[0];
}
}  // namespace

TEST(host_faults_become_faults_of_the_launch) {
  CHECK_CONTAINS(fault_of([] { *reinterpret_cast<volatile int*>(64) = 1; }), "thread (0,0,0): memory fault at 0x40");
  CHECK_CONTAINS(fault_of([] {
                   volatile int zero = 0;
                   zero = 7 / zero;
                 }),
                 "integer division by zero");
  CHECK_CONTAINS(fault_of([] {
                   volatile int bottom = 0;
                   overflow(&bottom);
                 }),
                 "stack overflow");
  Buffer a(64);
  CHECK_CONTAINS(fault_of([&] { *reinterpret_cast<volatile char*>(a.address() + 64) = 1; }),
                 "64 bytes past the start of an allocation of 64 bytes");
}

// --- atomics -----------------------------------------------------------------------------------------------------

namespace {

uint32_t atomic_add(uint64_t address, uint32_t x, bool is_shared) {
  auto* p = static_cast<uint32_t*>(emu::atomic(address, 4, is_shared, "atom.add", HERE));
  const uint32_t old = *p;
  *p += x;
  return old;
}

}  // namespace

TEST(atomics_count_and_do_not_race) {
  Buffer a(4);
  const auto body = [&] {
    if (thread() == 0) store<uint32_t>(smem(), 0, HERE);
    syncthreads(HERE);
    atomic_add(smem(), 2, true);
    atomic_add(emu::to_generic(smem(), HERE), 1, false);
    atomic_add(a.address(), 1, false);
    syncthreads(HERE);
    CHECK_EQUAL(load<uint32_t>(smem(), HERE), 192u);
  };
  EXPECT_CLEAN((Shape{.threads = 64}), body);
  CHECK_EQUAL(*a.as<uint32_t>(), 64u * 12);
}

TEST(atomics_race_with_plain_accesses) {
  EXPECT_FINDING((Shape{.threads = 64}),
                 [] {
                   if (thread() == 63)
                     store<uint32_t>(smem(), 0, HERE);
                   else
                     atomic_add(smem(), 1, true);
                 },
                 "race: ");
}

TEST(atomics_synchronise) {
  // The last of the threads to count reads what all have written.
  const auto body = [] {
    if (thread() == 0) store<uint32_t>(smem(), 0, HERE);
    syncthreads(HERE);
    store<uint32_t>(smem(16 + 4 * thread()), thread(), HERE);
    if (atomic_add(smem(), 1, true) != 63) return;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 64; ++i) sum += load<uint32_t>(smem(16 + 4 * i), HERE);
    CHECK_EQUAL(sum, 2016u);
  };
  EXPECT_CLEAN((Shape{.threads = 64}), body);
}

// --- bank conflicts ----------------------------------------------------------------------------------------------

namespace {

template <class T>
uint64_t conflicts_of(const std::function<uint32_t(uint32_t lane)>& offset, uint32_t times = 1) {
  return run({.shared = 16384},
             [&] {
               for (uint32_t i = 0; i < times; ++i) store<T>(smem(offset(lane())), T{}, HERE);
             })
      .counters.bank_conflicts;
}

}  // namespace

TEST(bank_conflicts_of_words) {
  CHECK_EQUAL(conflicts_of<uint32_t>([](uint32_t l) { return 4 * l; }), 0u);
  CHECK_EQUAL(conflicts_of<uint32_t>([](uint32_t l) { return 8 * l; }), 1u);
  CHECK_EQUAL(conflicts_of<uint32_t>([](uint32_t l) { return 128 * l; }), 31u);
  CHECK_EQUAL(conflicts_of<uint16_t>([](uint32_t l) { return 2 * l; }), 0u);
  CHECK_EQUAL(conflicts_of<uint32_t>([](uint32_t l) { return 132 * l; }), 0u);
}

TEST(bank_conflicts_broadcast) {
  const auto load_same = [](uint32_t stride) {
    return run({.shared = 16384},
               [&] {
                 for (uint32_t i = lane(); i < 4096; i += 32) store<uint32_t>(smem(4 * i), 0, HERE);
                 emu::sync_warp(0xffffffff, HERE);
                 load<Sixteen>(smem(stride * (lane() / 8)), HERE);
               })
        .counters.bank_conflicts;
  };
  CHECK_EQUAL(load_same(128), 0u);
  CHECK_EQUAL(load_same(16), 0u);
}

TEST(bank_conflicts_of_wide_accesses) {
  CHECK_EQUAL(conflicts_of<uint64_t>([](uint32_t l) { return 8 * l; }), 0u);
  CHECK_EQUAL(conflicts_of<uint64_t>([](uint32_t l) { return 16 * l; }), 2u);  // two phases, each in two wavefronts
  CHECK_EQUAL(conflicts_of<Sixteen>([](uint32_t l) { return 16 * l; }), 0u);
  // Rows of 128 bytes at one chunk: four phases, each 8-way.
  CHECK_EQUAL(conflicts_of<Sixteen>([](uint32_t l) { return 128 * l; }), 28u);
  CHECK_EQUAL(conflicts_of<Sixteen>([](uint32_t l) { return 128 * l + 16 * (l % 8); }), 0u);
}

TEST(bank_conflicts_add_up_over_iterations) {
  CHECK_EQUAL(conflicts_of<uint32_t>([](uint32_t l) { return 8 * l; }, 5), 5u);
}

TEST(bank_conflicts_of_partial_warps) {
  const auto body = [] {
    if (lane() < 2) store<uint32_t>(smem(128 * lane()), 0, HERE);
  };
  CHECK_EQUAL(run({}, body).counters.bank_conflicts, 1u);
}

TEST(bank_conflicts_after_divergence) {
  // Lanes loop differently often; at the warp barrier they start anew.
  const auto body = [] {
    for (uint32_t i = 0; i < lane() % 2 + 1; ++i) {
      if (i == 1) store<uint32_t>(smem(4 * lane()), 0, HERE);
    }
    emu::sync_warp(0xffffffff, HERE);
    store<uint32_t>(smem(256 + 4 * lane()), 0, HERE);
  };
  CHECK_EQUAL(run({}, body).counters.bank_conflicts, 0u);
}

TEST(bank_conflicts_of_ldmatrix) {
  const auto conflicts = [](uint32_t swizzle) {
    return run({.shared = 4096},
               [&] {
                 for (uint32_t i = lane(); i < 1024; i += 32) store<uint32_t>(smem(4 * i), 0, HERE);
                 emu::sync_warp(0xffffffff, HERE);
                 uint32_t r[4];
                 emu::ldmatrix(r, 4, false, smem(128 * lane() + 16 * (swizzle ? lane() % 8 : 0)), HERE);
               })
        .counters;
  };
  CHECK_EQUAL(conflicts(0).bank_conflicts, 28u);
  CHECK_EQUAL(conflicts(1).bank_conflicts, 0u);
  CHECK_EQUAL(conflicts(1).ldmatrix, 1u);
}

TEST(early_kernels_wait_before_global_memory) {
  auto* memory = static_cast<uint32_t*>(emu::device_alloc(128));
  const auto touch = [&] {
    emu::global(reinterpret_cast<uint64_t>(memory + lane()), 4, 4, thread() % 2 == 0, "access", HERE);
  };
  const auto waits = [&] {
    emu::wait_for_grids_ahead();
    touch();
  };
  const auto last_does_not = [&] { lane() == 31 ? touch() : waits(); };
  EXPECT_CLEAN(Shape{}, touch);  // leaves the memory known as accessed
  EXPECT_FINDING(Shape{.early = true}, touch, "before griddepcontrol.wait");
  EXPECT_FINDING(Shape{.early = true}, last_does_not, "global read before griddepcontrol.wait");
  EXPECT_CLEAN(Shape{.early = true}, waits);
  EXPECT_CLEAN(Shape{}, touch);
  emu::device_free(memory);
}
