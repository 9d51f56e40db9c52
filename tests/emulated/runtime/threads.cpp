// Schedules, barriers, deadlock reports, warp collectives.
#include <set>

#include "harness.h"

using namespace test;

TEST(every_thread_of_every_block_runs_once) {
  for (int schedule = 0; schedule < 4; ++schedule) {
    std::set<std::pair<uint32_t, uint32_t>> seen;
    run({.threads = 70, .blocks = 3}, [&] { CHECK(seen.insert({emu::current->ctaid.x, thread()}).second); },
        {.schedule = schedule});
    CHECK_EQUAL(seen.size(), 210u);
  }
}

TEST(thread_indices_follow_the_block_shape) {
  std::set<std::string> seen;
  const auto body = [&] {
    const emu::Thread& t = *emu::current;
    CHECK_EQUAL(t.linear, t.tid.x + 4 * (t.tid.y + 3 * t.tid.z));
    CHECK_EQUAL(t.warp, t.linear / 32);
    CHECK_EQUAL(t.lane, t.linear % 32);
    seen.insert(std::to_string(t.ctaid.x) + "," + std::to_string(t.ctaid.y) + "," + std::to_string(t.ctaid.z));
  };
  emu::run_grid({"kernel", {2, 3, 2}, {4, 3, 5}, {}, 0, 0}, body);
  CHECK_EQUAL(seen.size(), 12u);
}

TEST(schedules_differ_and_seeds_repeat) {
  const auto order = [](int schedule, uint64_t seed) {
    std::vector<uint32_t> order;
    run({.threads = 64},
        [&] {
          order.push_back(thread());
          emu::yield("test", HERE);
          order.push_back(thread());
        },
        {.schedule = schedule, .seed = seed});
    return order;
  };
  CHECK(order(0, 1)[0] == 0);
  CHECK(order(1, 1)[0] == 63);
  CHECK(order(0, 1) == order(0, 2));
  for (int schedule : {2, 3}) {
    CHECK(order(schedule, 1) == order(schedule, 1));
    CHECK(order(schedule, 1) != order(schedule, 2));
    CHECK(order(schedule, 1) != order(0, 1));
  }
}

TEST(polling_threads_let_the_others_run) {
  for (int schedule = 0; schedule < 4; ++schedule) {
    bool flag = false;
    const auto body = [&] {
      if (thread() == 40) flag = true;
      while (!flag) emu::yield("poll", HERE);
    };
    CHECK_EMPTY(run({.threads = 64}, body, {.schedule = schedule}).log);
  }
}

TEST(endless_polling_is_reported) {
  const Outcome outcome = run({.threads = 32}, [] {
    while (true) emu::yield("poll", HERE);
  });
  CHECK_CONTAINS(outcome.log, "kernel: livelock");
  CHECK_CONTAINS(outcome.log, "threads 0-31: poll at threads.cpp:");
}

TEST(barrier_waits_for_all) {
  int arrived = 0;
  const auto body = [&] {
    ++arrived;
    syncthreads(HERE);
    CHECK(arrived % 96 == 0);
    syncthreads(HERE);
  };
  EXPECT_CLEAN((Shape{.threads = 96}), body);
}

TEST(exited_threads_do_not_hold_a_block_barrier) {
  EXPECT_CLEAN((Shape{.threads = 96}), [] {
    if (thread() >= 70) return;
    syncthreads(HERE);
  });
}

TEST(named_barriers_pair_producers_and_consumers) {
  const auto body = [] {
    const uint32_t warp = emu::current->warp;
    for (uint32_t i = 0; i < 3; ++i) {
      if (warp == 0) {
        store<uint32_t>(smem(4 * lane()), i, HERE);
        emu::barrier_arrive(1, 64, HERE);
        emu::barrier_sync(2, 64, HERE);
      } else {
        emu::barrier_sync(1, 64, HERE);
        CHECK_EQUAL(load<uint32_t>(smem(4 * (31 - lane())), HERE), i);
        emu::barrier_arrive(2, 64, HERE);
      }
    }
  };
  EXPECT_CLEAN((Shape{.threads = 64}), body);
}

TEST(barrier_counts_must_agree) {
  const Outcome outcome = run({.threads = 64}, [] { emu::barrier_sync(1, thread() < 32 ? 64 : 32, HERE); });
  CHECK_CONTAINS(outcome.log, "barrier 1: this thread expects 32 threads, earlier ones 64");
  CHECK_CONTAINS(run({.threads = 64}, [] { emu::barrier_sync(1, 33, HERE); }).log, "33 threads is no multiple of 32");
  CHECK_CONTAINS(run({.threads = 64}, [] { emu::barrier_sync(16, 64, HERE); }).log, "barrier 16: there are 16");
}

TEST(barrier_reductions) {
  EXPECT_CLEAN((Shape{.threads = 64}), [] {
    CHECK_EQUAL(emu::barrier_reduce(emu::BarrierRed::popc, 0, -1, thread() % 3 == 0, HERE), 22u);
    CHECK_EQUAL(emu::barrier_reduce(emu::BarrierRed::and_, 0, -1, thread() != 63, HERE), 0u);
    CHECK_EQUAL(emu::barrier_reduce(emu::BarrierRed::and_, 0, -1, true, HERE), 1u);
    CHECK_EQUAL(emu::barrier_reduce(emu::BarrierRed::or_, 0, -1, thread() == 63, HERE), 1u);
    CHECK_EQUAL(emu::barrier_reduce(emu::BarrierRed::or_, 0, -1, false, HERE), 0u);
  });
}

TEST(deadlock_says_who_waits_for_what) {
  const Outcome outcome = run({.threads = 96}, [] {
    if (thread() == 0) {
      emu::mbarrier_init(smem(), 2, HERE);
      emu::mbarrier_arrive(smem(), 1, HERE);
      wait(smem(), 0, HERE);
    }
    if (thread() < 32) emu::barrier_sync(3, 64, HERE);
    if (thread() >= 64) return;
    emu::sync_warp(0xffffffff, HERE);
    syncthreads(HERE);
  });
  CHECK_CONTAINS(outcome.log, "kernel: deadlock in block (0,0,0):");
  CHECK_CONTAINS(outcome.log, "threads 0: mbarrier.try_wait of the mbarrier at 0x0 at threads.cpp:");
  CHECK_CONTAINS(outcome.log, "threads 1-31: bar.sync 3 at threads.cpp:");
  CHECK_CONTAINS(outcome.log, "threads 32-63: bar.sync 0 at threads.cpp:");
  CHECK_CONTAINS(outcome.log, "threads 64-95: exited");
  CHECK_CONTAINS(outcome.log, "barrier 3 of block (0,0,0): 31 of 64 threads arrived");
  CHECK_CONTAINS(outcome.log, "mbarrier at 0x0: phase 0, 1 of 2 arrivals pending, 0 bytes pending");
}

TEST(faults_name_kernel_place_block_and_thread) {
  const Outcome outcome = run({.threads = 64, .blocks = 2}, [] {
    if (emu::current->ctaid.x == 1 && thread() == 33) emu::fail({"/some/where/r05.cu", 77}, "no %s", "good");
  });
  CHECK_CONTAINS(outcome.log, "kernel: r05.cu:77: block (1,0,0) thread (33,0,0): no good");
}

TEST(a_launch_after_a_fault_works) {
  run({}, [] { emu::fail(HERE, "bad"); });
  EXPECT_CLEAN(Shape{}, [] { syncthreads(HERE); });
}

// --- collectives -------------------------------------------------------------------------------------------------

constexpr uint32_t kAll = 0xffffffff;

TEST(shuffles_follow_the_ptx_rules) {
  const auto body = [] {
    using emu::Shuffle;
    const uint32_t l = lane(), v = 100 + l;
    bool inside;
    CHECK_EQUAL(emu::shuffle(Shuffle::bfly, v, 5, 31, kAll, &inside, HERE), 100 + (l ^ 5));
    CHECK(inside);
    CHECK_EQUAL(emu::shuffle(Shuffle::idx, v, l + 3, 31, kAll, &inside, HERE), 100 + (l + 3) % 32);
    CHECK_EQUAL(emu::shuffle(Shuffle::up, v, 4, 0, kAll, &inside, HERE), l < 4 ? v : v - 4);
    CHECK(inside == (l >= 4));
    CHECK_EQUAL(emu::shuffle(Shuffle::down, v, 4, 31, kAll, &inside, HERE), l > 27 ? v : v + 4);
    CHECK(inside == (l <= 27));
    // Segments of 8: __shfl_down_sync(mask, v, 3, 8) has c = (32 - 8) << 8 | 31.
    CHECK_EQUAL(emu::shuffle(Shuffle::down, v, 3, 24 << 8 | 31, kAll, &inside, HERE), l % 8 > 4 ? v : v + 3);
    CHECK(inside == (l % 8 <= 4));
    CHECK_EQUAL(emu::shuffle(Shuffle::idx, v, 2, 24 << 8 | 31, kAll, nullptr, HERE), 100 + l / 8 * 8 + 2);
    CHECK_EQUAL(emu::shuffle(Shuffle::up, v, 3, 24 << 8, kAll, nullptr, HERE), l % 8 < 3 ? v : v - 3);
  };
  EXPECT_CLEAN(Shape{}, body);
}

TEST(halves_of_a_warp_shuffle_apart) {
  EXPECT_CLEAN(Shape{}, [] {
    const uint32_t mask = lane() < 16 ? 0xffffu : 0xffff0000u;
    for (uint32_t i = 0; i < (lane() < 16 ? 3 : 1); ++i)
      CHECK_EQUAL(emu::shuffle(emu::Shuffle::bfly, lane(), 8, 31, mask, nullptr, HERE), lane() ^ 8);
  });
}

TEST(votes) {
  const auto body = [] {
    using emu::Vote;
    CHECK_EQUAL(emu::vote(Vote::ballot, lane() % 2 == 1, kAll, HERE), 0xaaaaaaaau);
    CHECK_EQUAL(emu::vote(Vote::any, lane() == 7, kAll, HERE), 1u);
    CHECK_EQUAL(emu::vote(Vote::any, false, kAll, HERE), 0u);
    CHECK_EQUAL(emu::vote(Vote::all, lane() != 7, kAll, HERE), 0u);
    CHECK_EQUAL(emu::vote(Vote::all, true, kAll, HERE), 1u);
    CHECK_EQUAL(emu::vote(Vote::uni, false, kAll, HERE), 1u);
    CHECK_EQUAL(emu::vote(Vote::uni, lane() == 7, kAll, HERE), 0u);
    if (lane() < 8) CHECK_EQUAL(emu::vote(Vote::ballot, lane() != 2, 0xff, HERE), 0xfbu);
  };
  EXPECT_CLEAN(Shape{}, body);
}

TEST(warp_reductions_and_matches) {
  const auto body = [] {
    using emu::Redux;
    const auto s = static_cast<uint32_t>(static_cast<int>(lane()) - 16);
    CHECK_EQUAL(emu::redux(Redux::add, lane(), kAll, HERE), 496u);
    CHECK_EQUAL(emu::redux(Redux::min_s, s, kAll, HERE), static_cast<uint32_t>(-16));
    CHECK_EQUAL(emu::redux(Redux::min_u, s, kAll, HERE), 0u);
    CHECK_EQUAL(emu::redux(Redux::max_s, s, kAll, HERE), 15u);
    CHECK_EQUAL(emu::redux(Redux::max_u, s, kAll, HERE), static_cast<uint32_t>(-1));
    CHECK_EQUAL(emu::redux(Redux::or_, 1u << lane(), kAll, HERE), kAll);
    CHECK_EQUAL(emu::redux(Redux::and_, ~(1u << lane()), kAll, HERE), 0u);
    CHECK_EQUAL(emu::redux(Redux::xor_, lane(), kAll, HERE), 0u);
    CHECK_EQUAL(emu::match_any(lane() % 4, kAll, HERE), 0x11111111u << lane() % 4);
  };
  EXPECT_CLEAN(Shape{}, body);
}

TEST(one_lane_is_elected) {
  for (int schedule = 0; schedule < 4; ++schedule) {
    uint32_t elected = 0;
    run({}, [&] { elected += emu::elect(kAll, HERE); }, {.schedule = schedule});
    CHECK_EQUAL(elected, 1u);
  }
}

TEST(exited_lanes_may_be_named) {
  EXPECT_CLEAN(Shape{}, [] {
    if (lane() >= 20) return;
    emu::sync_warp(kAll, HERE);
    CHECK_EQUAL(emu::vote(emu::Vote::ballot, true, kAll, HERE), 0xfffffu);
  });
}

TEST(diverged_collectives_are_faults) {
  const auto different = [] {
    if (lane() == 3)
      emu::sync_warp(kAll, HERE);
    else
      emu::shuffle(emu::Shuffle::bfly, 0, 1, 31, kAll, nullptr, HERE);
  };
  CHECK_CONTAINS(run({}, different).log, "the warp has diverged");
  CHECK_CONTAINS(run({}, [] { emu::sync_warp(1, HERE); }).log, "the calling lane 1 is not in the mask 0x00000001");
  CHECK_CONTAINS(run({.threads = 16}, [] { emu::wgmma_fence(HERE); }).log, "needs all 32 lanes");
}
