// The race detector: each kind of synchronisation, with and without.
#include "harness.h"

using namespace test;

namespace {

constexpr uint32_t kAll = 0xffffffff;

}  // namespace

// --- barriers ----------------------------------------------------------------------------------------------------

namespace {

void neighbours(bool barrier_before_read, bool barrier_before_write) {
  for (uint32_t i = 0; i < 3; ++i) {
    store<uint32_t>(smem(4 * thread()), i, HERE);
    if (barrier_before_read) syncthreads(HERE);
    load<uint32_t>(smem(4 * ((thread() + 33) % 64)), HERE);
    if (barrier_before_write) syncthreads(HERE);
  }
}

}  // namespace

TEST(syncthreads_orders) {
  EXPECT_CLEAN(Shape{.threads = 64}, [] { neighbours(true, true); });
}

TEST(a_missing_syncthreads_is_a_race) {
  EXPECT_FINDING(Shape{.threads = 64}, [] { neighbours(false, true); }, "race: ");
  EXPECT_FINDING(Shape{.threads = 64}, [] { neighbours(true, false); }, "race: ");
}

TEST(a_race_names_both_accesses) {
  const auto body = [] {
    if (thread() == 2) store<uint16_t>(smem(0x40), 1, {"r05.cu", 61});
    if (thread() == 33) load<uint16_t>(smem(0x40), {"r05.cu", 77});
  };
  CHECK_CONTAINS(run({.threads = 64}, body).log,
                 "race: ld.shared at r05.cu:77 by thread 33 after st.shared at r05.cu:61 by thread 2, bytes 0x40..0x42 "
                 "of block (0,0,0)'s shared memory, kernel kernel\n");
  CHECK_CONTAINS(
      run({.threads = 64}, body, {.schedule = 1, .races = 1}).log,
      "race: st.shared at r05.cu:61 by thread 2 after ld.shared at r05.cu:77 by thread 33, bytes 0x40..0x42");
  CHECK_EMPTY(run({.threads = 64}, body, {.races = 0}).log);
}

TEST(two_writers_race) {
  EXPECT_FINDING(Shape{.threads = 64}, [] { store<uint32_t>(smem(), 1, HERE); }, "race: st.shared");
}

TEST(neighbouring_halves_do_not_race) {
  EXPECT_CLEAN(Shape{.threads = 64}, [] { store<uint16_t>(smem(2 * thread()), 1, HERE); });
}

TEST(wide_and_narrow_accesses_meet) {
  const auto body = [](bool synchronised) {
    store<uint16_t>(smem(2 * thread()), 1, HERE);
    if (synchronised) syncthreads(HERE);
    if (thread() < 8) load<Sixteen>(smem(16 * thread()), HERE);
    if (synchronised) syncthreads(HERE);
    if (thread() >= 32 && thread() < 40) store<Sixteen>(smem(16 * (thread() - 32)), {}, HERE);
  };
  EXPECT_CLEAN(Shape{.threads = 64}, [&] { body(true); });
  EXPECT_FINDING(Shape{.threads = 64}, [&] { body(false); }, "race: ");
}

TEST(a_late_reader_is_remembered_among_many) {
  // All threads read; only thread 0 of another warp is ordered before the writer.
  EXPECT_FINDING(
      Shape{.threads = 96},
      [] {
        if (thread() == 0) store<uint32_t>(smem(), 1, HERE);
        syncthreads(HERE);
        load<uint32_t>(smem(), HERE);
        if (thread() == 32) emu::barrier_arrive(1, 64, HERE);
        if (thread() == 0) {
          for (int i = 0; i < 63; ++i) emu::barrier_arrive(1, 64, HERE);
          store<uint32_t>(smem(), 2, HERE);
        }
      },
      "race: ");
}

TEST(named_barriers_order_only_their_threads) {
  const auto body = [](bool third_takes_part) {
    const uint32_t warp = emu::current->warp;
    if (warp == 0) store<uint32_t>(smem(4 * lane()), 1, HERE);
    if (warp < 2 || third_takes_part) emu::barrier_sync(1, third_takes_part ? 96 : 64, HERE);
    if (warp > 0) load<uint32_t>(smem(4 * lane()), HERE);
  };
  EXPECT_CLEAN(Shape{.threads = 96}, [&] { body(true); });
  EXPECT_FINDING(Shape{.threads = 96}, [&] { body(false); }, "race: ");
}

TEST(reads_of_what_nothing_has_written_are_found) {
  EXPECT_FINDING(Shape{}, [] { load<uint32_t>(smem(), HERE); }, "uninitialised: ld.shared at races.cpp:");
}

// --- warps -------------------------------------------------------------------------------------------------------

TEST(syncwarp_orders_its_lanes) {
  EXPECT_CLEAN(Shape{.threads = 64}, [] {
    const uint32_t own = smem(4 * thread()), other = smem(4 * (thread() ^ 1));
    for (uint32_t i = 0; i < 3; ++i) {
      store<uint32_t>(own, i, HERE);
      emu::sync_warp(kAll, HERE);
      CHECK_EQUAL(load<uint32_t>(other, HERE), i);
      emu::sync_warp(kAll, HERE);
    }
  });
}

TEST(a_missing_syncwarp_is_a_race) {
  EXPECT_FINDING(
      Shape{},
      [] {
        store<uint32_t>(smem(4 * lane()), 1, HERE);
        load<uint32_t>(smem(4 * (lane() ^ 1)), HERE);
      },
      "race: ");
}

TEST(a_shuffle_does_not_order_memory) {
  EXPECT_FINDING(
      Shape{},
      [] {
        store<uint32_t>(smem(4 * lane()), 1, HERE);
        emu::shuffle(emu::Shuffle::bfly, 0, 1, 31, kAll, nullptr, HERE);
        load<uint32_t>(smem(4 * (lane() ^ 1)), HERE);
      },
      "race: ");
}

TEST(syncwarp_orders_only_its_mask) {
  EXPECT_FINDING(
      Shape{},
      [] {
        store<uint32_t>(smem(4 * lane()), 1, HERE);
        emu::sync_warp(lane() < 16 ? 0xffffu : 0xffff0000u, HERE);
        load<uint32_t>(smem(4 * (lane() ^ 16)), HERE);
      },
      "race: ");
}

TEST(ldmatrix_reads_are_seen) {
  const auto body = [](bool synchronised) {
    store<Sixteen>(smem(16 * lane()), {}, HERE);
    if (synchronised) emu::sync_warp(kAll, HERE);
    uint32_t r[4];
    emu::ldmatrix(r, 4, false, smem(16 * (31 - lane())), HERE);
  };
  EXPECT_CLEAN(Shape{}, [&] { body(true); });
  EXPECT_FINDING(Shape{}, [&] { body(false); }, "race: ");
}

// --- cp.async ----------------------------------------------------------------------------------------------------

namespace {

enum class Copies { right, no_wait, one_group_too_few, no_barrier, overwritten_early };

// Double-buffered: the next tile is copied while this one is read.
void double_buffer(Buffer& source, Copies how) {
  const auto tile = [&](uint32_t i) {
    emu::cp_async(smem(i % 2 * 1024 + 16 * thread()), source.address() + (i * 64 + thread()) * 16, 16, 16, HERE);
    emu::cp_async_commit(HERE);
  };
  tile(0);
  for (uint32_t i = 0; i < 4; ++i) {
    if (how == Copies::overwritten_early) tile(i + 1);
    if (i > 0 && how != Copies::overwritten_early) syncthreads(HERE);
    if (how != Copies::overwritten_early) tile(i + 1);
    if (how != Copies::no_wait) emu::cp_async_wait(how == Copies::one_group_too_few ? 2 : 1, HERE);
    if (how != Copies::no_barrier) syncthreads(HERE);
    const auto x = load<uint32_t>(smem(i % 2 * 1024 + 16 * (63 - thread())), HERE);
    if (how == Copies::right) CHECK_EQUAL(x, (i * 64 + 63 - thread()) * 4);
  }
  emu::cp_async_wait(0, HERE);
}

void expect_copies(Copies how) {
  Buffer source(5 * 1024);
  for (uint32_t i = 0; i < 1280; ++i) source.as<uint32_t>()[i] = i;
  const auto body = [&] { double_buffer(source, how); };
  const Shape shape{.threads = 64, .shared = 2048};
  if (how == Copies::right)
    EXPECT_CLEAN(shape, body);
  else
    EXPECT_FINDING(shape, body, "race: ");
}

}  // namespace

TEST(cp_async_pipeline_is_clean) { expect_copies(Copies::right); }
TEST(a_forgotten_cp_async_wait_is_a_race) { expect_copies(Copies::no_wait); }
TEST(a_cp_async_wait_for_too_few_groups_is_a_race) { expect_copies(Copies::one_group_too_few); }
TEST(cp_async_without_a_barrier_is_a_race) { expect_copies(Copies::no_barrier); }
TEST(a_buffer_overwritten_early_is_a_race) { expect_copies(Copies::overwritten_early); }

TEST(late_copies_leave_poison_and_early_ones_do_not) {
  Buffer source(16);
  const auto read = [&](int timing) {
    uint32_t x = 0;
    run({.threads = 1},
        [&] {
          emu::cp_async(smem(), source.address(), 16, 16, HERE);
          x = load<uint32_t>(smem(), HERE);
          emu::cp_async_commit(HERE);
          emu::cp_async_wait(0, HERE);
          CHECK_EQUAL(load<uint32_t>(smem(), HERE), 0u);
        },
        {.async_timing = timing});
    return x;
  };
  CHECK_EQUAL(read(0), 0u);
  CHECK_EQUAL(read(1), 0xffffffffu);
}

TEST(cp_async_fills_with_zeros) {
  Buffer source(8);
  source.as<uint32_t>()[0] = source.as<uint32_t>()[1] = 5;
  EXPECT_CLEAN(Shape{.threads = 1}, [&] {
    emu::cp_async(smem(), source.address(), 16, 8, HERE);
    emu::cp_async(smem(16), 0, 16, 0, HERE);
    emu::cp_async_wait(-1, HERE);
    CHECK_EQUAL(load<uint64_t>(smem(), HERE), 0x500000005u);
    CHECK_EQUAL(load<uint64_t>(smem(8), HERE), 0u);
    CHECK_EQUAL(load<uint64_t>(smem(16), HERE), 0u);
  });
  CHECK_CONTAINS(run({.threads = 1}, [&] { emu::cp_async(smem(), source.address(), 16, 16, HERE); }).log,
                 "cp.async: out-of-bounds");
  CHECK_CONTAINS(run({.threads = 1}, [&] { emu::cp_async(smem(8), source.address(), 16, 8, HERE); }).log,
                 "cp.async: misaligned shared");
}

TEST(unfinished_copies_at_exit_are_found) {
  Buffer source(16);
  EXPECT_FINDING(
      Shape{.threads = 1}, [&] { emu::cp_async(smem(), source.address(), 16, 16, HERE); },
      "thread 0 exits before its cp.async have completed");
}

TEST(cp_async_completes_on_an_mbarrier) {
  Buffer source(512);
  const auto body = [&](bool waits) {
    if (thread() == 0) emu::mbarrier_init(smem(), 32, HERE);
    syncthreads(HERE);
    if (thread() < 32) {
      emu::cp_async(smem(16 + 16 * lane()), source.address() + 16 * lane(), 16, 16, HERE);
      emu::cp_async_mbarrier_arrive(smem(), true, HERE);
    } else {
      if (waits) wait(smem(), 0, HERE);
      load<uint32_t>(smem(16 + 16 * lane()), HERE);
    }
  };
  EXPECT_CLEAN(Shape{.threads = 64}, [&] { body(true); });
  EXPECT_FINDING(Shape{.threads = 64}, [&] { body(false); }, "race: ");
}

// --- mbarriers ---------------------------------------------------------------------------------------------------

namespace {

enum class Ring { right, no_full_wait, wrong_full_parity, no_empty_wait, early_release, release_by_one_lane };

// One producer warp and two consumer warps, two slots of 128 bytes, six tiles.
void ring(Ring how) {
  const uint64_t full = smem(), empty = smem(16);
  const auto slot = [](uint32_t i) { return smem(128 + 128 * (i % 2)); };
  if (thread() == 0) {
    for (uint32_t s = 0; s < 2; ++s) {
      emu::mbarrier_init(full + 8 * s, 32, HERE);
      emu::mbarrier_init(empty + 8 * s, how == Ring::release_by_one_lane ? 2 : 64, HERE);
    }
    emu::fence_mbarrier_init(HERE);
  }
  syncthreads(HERE);
  for (uint32_t i = 0; i < 6; ++i) {
    const uint64_t full_barrier = full + 8 * (i % 2), empty_barrier = empty + 8 * (i % 2);
    const uint32_t parity = i / 2 % 2;
    if (emu::current->warp == 0) {
      if (how != Ring::no_empty_wait) wait(empty_barrier, parity ^ 1, HERE);
      store<uint32_t>(slot(i) + 4 * lane(), i, HERE);
      emu::mbarrier_arrive(full_barrier, 1, HERE);
      continue;
    }
    if (how != Ring::no_full_wait) wait(full_barrier, how == Ring::wrong_full_parity ? parity ^ 1 : parity, HERE);
    if (how == Ring::early_release) emu::mbarrier_arrive(empty_barrier, 1, HERE);
    const auto x = load<uint32_t>(slot(i) + 4 * (31 - lane()), HERE);
    if (how == Ring::right) CHECK_EQUAL(x, i);
    if (how == Ring::release_by_one_lane) {
      if (lane() == 0) emu::mbarrier_arrive(empty_barrier, 1, HERE);
    } else if (how != Ring::early_release) {
      emu::mbarrier_arrive(empty_barrier, 1, HERE);
    }
  }
}

const Shape kRing{.threads = 96};
const char* const kAnything = "kernel";  // a race, an uninitialised read or a deadlock, by schedule

}  // namespace

TEST(mbarrier_ring_is_clean) {
  EXPECT_CLEAN(kRing, [] { ring(Ring::right); });
}

TEST(a_forgotten_mbarrier_wait_is_found) {
  EXPECT_FINDING(kRing, [] { ring(Ring::no_full_wait); }, kAnything);
  EXPECT_FINDING(kRing, [] { ring(Ring::no_empty_wait); }, kAnything);
}

TEST(a_wrong_parity_is_found) {
  EXPECT_FINDING(kRing, [] { ring(Ring::wrong_full_parity); }, kAnything);
}

TEST(an_early_slot_release_is_a_race) {
  EXPECT_FINDING(kRing, [] { ring(Ring::early_release); }, "race: ");
}

TEST(a_release_by_one_lane_needs_a_syncwarp) {
  EXPECT_FINDING(kRing, [] { ring(Ring::release_by_one_lane); }, "race: ");
}

TEST(mbarrier_misuse_is_a_fault) {
  const auto log = [](const std::function<void()>& body) { return run({.threads = 1}, body).log; };
  CHECK_CONTAINS(log([] { emu::mbarrier_arrive(smem(), 1, HERE); }), "there is no initialised mbarrier at 0x0");
  CHECK_CONTAINS(log([] { emu::mbarrier_init(smem(), 0, HERE); }), "a count of 0");
  CHECK_CONTAINS(log([] { emu::mbarrier_init(smem(4), 1, HERE); }), "misaligned");
  CHECK_CONTAINS(log([] {
                   emu::mbarrier_init(smem(), 1, HERE);
                   emu::mbarrier_arrive(smem(), 2, HERE);
                 }),
                 "more arrivals at the mbarrier at 0x0 than the 1 of phase 0");
  CHECK_CONTAINS(log([] {
                   emu::mbarrier_init(smem(), 1, HERE);
                   store<uint32_t>(smem(4), 3, HERE);
                   emu::mbarrier_arrive(smem(), 1, HERE);
                 }),
                 "the mbarrier at 0x0 has been overwritten");
  CHECK_CONTAINS(log([] {
                   emu::mbarrier_init(smem(), 1, HERE);
                   emu::mbarrier_init(smem(), 1, HERE);
                 }),
                 "is in use");
}

TEST(mbarrier_tokens_and_reinitialisation) {
  EXPECT_CLEAN(Shape{.threads = 1}, [] {
    for (int round = 0; round < 3; ++round) {
      emu::mbarrier_init(smem(), 1, HERE);
      const uint64_t token = emu::mbarrier_arrive(smem(), 1, HERE);
      CHECK(emu::mbarrier_test_token(smem(), token, HERE));
      wait(smem(), 0, HERE);
      CHECK(!emu::mbarrier_try_wait(smem(), 1, false, HERE));
      emu::mbarrier_inval(smem(), HERE);
    }
  });
}

TEST(an_unsynchronised_mbarrier_initialisation_is_a_race) {
  for (int schedule = 0; schedule < 4; ++schedule) {
    bool ready = false;
    const auto body = [&] {
      if (thread() == 0) {
        emu::mbarrier_init(smem(), 63, HERE);
        ready = true;
      } else {
        while (!ready) emu::yield("poll", HERE);
        emu::mbarrier_arrive(smem(), 1, HERE);
      }
    };
    CHECK_CONTAINS(run({.threads = 64}, body, {.schedule = schedule, .races = 1}).log,
                   "before its initialisation by thread 0 is synchronised");
  }
}
