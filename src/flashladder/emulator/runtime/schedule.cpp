// Runs a grid: one cluster of blocks after the other, the threads of a cluster as fibers under one of four schedules.
#include <algorithm>
#include <stdexcept>

#include "state.h"

namespace emu {

Thread* current = nullptr;
Dim3 grid_dim, block_dim, cluster_dim;

std::vector<ThreadState> threads;
std::vector<WarpState> warps;
std::vector<BlockState> blocks;
std::vector<Warpgroup> warpgroups;
uint32_t threads_per_block, warps_per_block, live_threads;

namespace {

// So many polls in a row, while no thread does anything else, are taken for a wait for what never comes.
constexpr uint64_t kMaxIdlePolls = 1 << 24;

struct EngineWork {
  std::string what;
  std::function<void()> run;
};
std::vector<EngineWork> engine;
std::vector<uint32_t> yielded;
void* scheduler_stack_pointer;
const std::function<void()>* thread_body;
uint32_t last_warp;
uint64_t idle_polls;

Schedule schedule() { return static_cast<Schedule>(options.schedule); }
bool by_chance() { return schedule() == Schedule::random || schedule() == Schedule::priority; }

void run_engine(size_t i) {
  EngineWork work = std::move(engine[i]);
  engine.erase(engine.begin() + static_cast<std::ptrdiff_t>(i));
  work.run();
  idle_polls = 0;
}

void set_ready(ThreadState& t) {
  t.status = Status::ready;
  warps[t.cluster_rank * warps_per_block + t.warp].ready |= 1u << t.lane;
}

void set_waiting(ThreadState& t, Status status) {
  t.status = status;
  warps[t.cluster_rank * warps_per_block + t.warp].ready &= ~(1u << t.lane);
}

// --- a thread's life ---------------------------------------------------------------------------------------------

[[noreturn]] void run_thread() {
  (*thread_body)();
  ThreadState& t = me();
  finish_copies(t);
  finish_stores(t);
  set_waiting(t, Status::done);
  idle_polls = 0;
  WarpState& w = my_warp();
  BlockState& b = my_block();
  w.live &= ~(1u << t.lane);
  --b.live;
  --live_threads;
  finish_meetings(w);
  finish_barriers(b);
  finish_cluster_barrier();
  leave_fiber();
  __builtin_trap();
}

// --- choosing ----------------------------------------------------------------------------------------------------

constexpr uint32_t kNobody = ~0u;

uint32_t nth_bit(uint32_t mask, uint32_t n) {
  while (n--) mask &= mask - 1;
  return static_cast<uint32_t>(__builtin_ctz(mask));
}

// The current warp's first (fifo) or last (reverse) ready lane, then the next warp's.
uint32_t choose_in_order(bool forward) {
  const uint32_t n = static_cast<uint32_t>(warps.size());
  for (uint32_t i = 0, w = last_warp; i < n; ++i) {
    if (warps[w].ready) {
      last_warp = w;
      const int lane = forward ? __builtin_ctz(warps[w].ready) : 31 - __builtin_clz(warps[w].ready);
      return warps[w].first_thread + static_cast<uint32_t>(lane);
    }
    w = forward ? (w + 1 == n ? 0 : w + 1) : (w == 0 ? n - 1 : w - 1);
  }
  return kNobody;
}

uint32_t choose_at_random() {
  uint32_t with_ready = 0;
  for (const WarpState& w : warps) with_ready += w.ready != 0;
  if (!with_ready) return kNobody;
  uint32_t skip = random_below(with_ready);
  for (const WarpState& w : warps)
    if (w.ready && skip-- == 0)
      return w.first_thread + nth_bit(w.ready, random_below(static_cast<uint32_t>(__builtin_popcount(w.ready))));
  return kNobody;
}

// PCT: the ready warp of the highest priority runs; at random change points a warp's priority, and with it the order
// of its lanes, is drawn anew.
uint32_t choose_by_priority() {
  if (one_in(64)) {
    WarpState& changed = warps[random_below(static_cast<uint32_t>(warps.size()))];
    changed.priority = random_bits();
    changed.rotation = random_below(32);
  }
  const WarpState* best = nullptr;
  for (const WarpState& w : warps)
    if (w.ready && (!best || w.priority > best->priority)) best = &w;
  if (!best) return kNobody;
  const uint32_t r = best->rotation, rotated = best->ready >> r | best->ready << ((32 - r) & 31);
  return best->first_thread + ((static_cast<uint32_t>(__builtin_ctz(rotated)) + r) & 31);
}

uint32_t choose() {
  switch (schedule()) {
    case Schedule::fifo:
      return choose_in_order(true);
    case Schedule::reverse:
      return choose_in_order(false);
    case Schedule::random:
      return choose_at_random();
    case Schedule::priority:
      return choose_by_priority();
  }
  throw std::runtime_error(format("unknown schedule %d", options.schedule));
}

void resume_yielded() {
  for (const uint32_t i : yielded) set_ready(threads[i]);
  yielded.clear();
}

// --- deadlock ----------------------------------------------------------------------------------------------------

// "0-31, 40": the threads of one group; those of another rank are written rank:thread.
std::string ranges(const std::vector<uint32_t>& members) {
  std::string s;
  for (size_t i = 0; i < members.size();) {
    size_t j = i;
    while (j + 1 < members.size() && members[j + 1] == members[j] + 1 && members[j + 1] % threads_per_block) ++j;
    if (!s.empty()) s += ", ";
    const uint32_t rank = members[i] / threads_per_block, first = members[i] % threads_per_block;
    if (blocks.size() > 1) s += format("%u:", rank);
    s += format("%u", first);
    if (j > i) s += format("-%u", members[j] % threads_per_block);
    i = j + 1;
  }
  return s;
}

void report_deadlock(const char* kind) {
  std::vector<std::pair<std::string, std::vector<uint32_t>>> groups;
  for (const ThreadState& t : threads) {
    std::string doing = "exited";
    if (t.status != Status::done) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-security"
      doing = t.wait.what + format(t.wait.detail, t.wait.operand) + " at " + place(t.wait.loc);
#pragma GCC diagnostic pop
    }
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == doing; });
    if (group == groups.end()) group = groups.insert(group, {doing, {}});
    group->second.push_back(t.index);
  }
  std::string s = format("%s: %s in %s:", kernel_name, kind, block_text(blocks[0].ctaid).c_str());
  for (const auto& [doing, members] : groups) s += "\n  threads " + ranges(members) + ": " + doing;
  s += barriers_text() + mbarriers_text();
  set_fault(s);
}

// --- a cluster ---------------------------------------------------------------------------------------------------

void reset_thread(ThreadState& t, uint32_t index) {
  const uint32_t linear = index % threads_per_block;
  t.index = index;
  t.linear = linear;
  t.warp = linear / 32;
  t.lane = linear % 32;
  t.cluster_rank = index / threads_per_block;
  t.ctaid = blocks[t.cluster_rank].ctaid;
  t.tid = {linear % block_dim.x, linear / block_dim.x % block_dim.y, linear / (block_dim.x * block_dim.y)};
  t.status = Status::ready;
  t.wait = {};
  t.barrier_result = 0;
  t.cluster_arrived = t.waited_for_grids = false;
  t.copies.clear();
  t.copy_epoch = t.store_group = 1;
  t.group_ends.clear();
  t.stores.clear();
  t.stack_pointer = make_fiber(index, run_thread);
}

void begin_cluster(Dim3 first) {
  const uint32_t ranks = cluster_size(), count = ranks * threads_per_block;
  reserve_fibers(count);
  blocks.assign(ranks, BlockState{});
  warps.resize(ranks * warps_per_block);
  threads.resize(count);
  const uint32_t groups = (warps_per_block + 3) / 4;
  warpgroups.assign(ranks * groups, Warpgroup{});
  for (uint32_t r = 0; r < ranks; ++r) {
    BlockState& b = blocks[r];
    b.ctaid = {first.x + r % cluster_dim.x, first.y + r / cluster_dim.x % cluster_dim.y,
               first.z + r / (cluster_dim.x * cluster_dim.y)};
    b.first_warp = r * warps_per_block;
    b.live = threads_per_block;
  }
  for (uint32_t i = 0; i < count; ++i) reset_thread(threads[i], i);
  for (uint32_t i = 0; i < warps.size(); ++i) {
    WarpState& w = warps[i];
    const uint32_t in_block = i % warps_per_block, lanes = std::min(32u, threads_per_block - in_block * 32);
    w.index = i;
    w.first_thread = i / warps_per_block * threads_per_block + in_block * 32;
    w.live = w.ready = lanes == 32 ? kFullWarp : (1u << lanes) - 1;
    w.priority = random_bits();
    w.rotation = random_below(32);
    w.meetings.clear();
    w.wgmma_fenced = false;
  }
  live_threads = count;
  last_warp = schedule() == Schedule::reverse ? static_cast<uint32_t>(warps.size()) - 1 : 0;
  idle_polls = 0;
  engine.clear();
  yielded.clear();
  reset_mbarriers();
  reset_cluster_barrier();
  poison_shared(ranks);
  select_block(0);
  if (options.races) {
    race::begin_cluster();
    banks::begin_cluster();
  }
}

void resume(ThreadState& t) {
  ++counters.switches;
  if (blocks.size() > 1) select_block(t.cluster_rank);
  current = &t;
  emu_switch(&scheduler_stack_pointer, t.stack_pointer);
  current = nullptr;
}

void run_cluster(Dim3 first) {
  begin_cluster(first);
  const bool random_engine = static_cast<AsyncTiming>(options.async_timing) == AsyncTiming::random;
  while (live_threads && !faulted) {
    if (random_engine && !engine.empty() && one_in(32)) run_engine(random_below(static_cast<uint32_t>(engine.size())));
    if (by_chance() && !yielded.empty() && one_in(4)) resume_yielded();
    const uint32_t next = choose();
    if (next != kNobody) {
      resume(threads[next]);
      continue;
    }
    if (!engine.empty()) {
      run_engine(random_below(static_cast<uint32_t>(engine.size())));
      resume_yielded();
    } else if (yielded.empty()) {
      report_deadlock("deadlock");
    } else if ((idle_polls += yielded.size()) > kMaxIdlePolls) {
      report_deadlock("livelock (threads poll for what no thread of the cluster will do)");
    } else {
      resume_yielded();
    }
  }
  if (faulted) return;
  for (const EngineWork& work : engine)
    report(std::string(kernel_name) + ": a block ends before " + work.what + " completed");
  finish_warpgroups();
  for (const BlockState& b : blocks)
    for (uint32_t i = 0; i < 16; ++i)
      if (b.barriers[i].arrived)
        report(format("%s: %s ends with %u arrivals at barrier %u", kernel_name, block_text(b.ctaid).c_str(),
                      b.barriers[i].arrived, i));
  if (options.races) banks::flush_all();
}

void check_launch(const Launch& l) {
  const auto volume = [](Dim3 d) { return static_cast<uint64_t>(d.x) * d.y * d.z; };
  if (volume(l.grid) == 0 || volume(l.block) == 0 || volume(l.cluster) == 0)
    throw std::runtime_error(format("%s: an empty grid, block or cluster", kernel_name));
  if (volume(l.block) > 1024) throw std::runtime_error(format("%s: more than 1024 threads a block", kernel_name));
  if (volume(l.cluster) > kMaxCluster)
    throw std::runtime_error(format("%s: more than %u blocks a cluster", kernel_name, kMaxCluster));
  if (l.grid.x % l.cluster.x || l.grid.y % l.cluster.y || l.grid.z % l.cluster.z)
    throw std::runtime_error(format("%s: the cluster does not divide the grid", kernel_name));
}

}  // namespace

void block_current(const Wait& wait) {
  ThreadState& t = me();
  t.wait = wait;
  set_waiting(t, Status::blocked);
  leave_fiber();
}

void wake(uint32_t thread) {
  idle_polls = 0;
  set_ready(threads[thread]);
}

void yield(const char* what, Loc loc) {
  ThreadState& t = me();
  t.wait = {what, "", 0, loc};
  set_waiting(t, Status::yielded);
  yielded.push_back(t.index);
  leave_fiber();
}

void wait_for_grids_ahead() { me().waited_for_grids = true; }

void leave_fiber() { emu_switch(&me().stack_pointer, scheduler_stack_pointer); }

void engine_submit(std::string what, std::function<void()> run) {
  if (early()) {
    run();
    return;
  }
  engine.push_back({std::move(what), std::move(run)});
}

void run_grid(const Launch& l, const std::function<void()>& body) {
  if (current) throw std::runtime_error("a launch from within a launch");
  kernel_name = l.kernel;
  faulted = false;
  check_launch(l);
  grid_dim = l.grid;
  block_dim = l.block;
  cluster_dim = l.cluster;
  threads_per_block = l.block.x * l.block.y * l.block.z;
  warps_per_block = (threads_per_block + 31) / 32;
  thread_body = &body;
  seed_random(options.seed);
  layout_shared(l.static_shared, l.dynamic_shared);
  expect_waits(l.early);
  const SignalGuard guard;

  const Dim3 in_clusters{l.grid.x / l.cluster.x, l.grid.y / l.cluster.y, l.grid.z / l.cluster.z};
  const uint64_t count = static_cast<uint64_t>(in_clusters.x) * in_clusters.y * in_clusters.z;
  std::vector<uint32_t> order;
  if (by_chance()) {
    order.resize(count);
    for (uint64_t i = 0; i < count; ++i) order[i] = static_cast<uint32_t>(i);
    for (uint64_t i = count; i > 1; --i) std::swap(order[i - 1], order[random_below(static_cast<uint32_t>(i))]);
  }
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t c = !order.empty() ? order[i] : schedule() == Schedule::reverse ? count - 1 - i : i;
    const uint64_t row = c / in_clusters.x;
    counters.blocks += cluster_size();
    run_cluster({static_cast<uint32_t>(c % in_clusters.x) * l.cluster.x,
                 static_cast<uint32_t>(row % in_clusters.y) * l.cluster.y,
                 static_cast<uint32_t>(row / in_clusters.y) * l.cluster.z});
    if (faulted) throw std::runtime_error(fault_text());
  }
}

}  // namespace emu
