// Named barriers of a block and the barrier of a cluster.
#include "state.h"

namespace emu {
namespace {

enum : uint32_t { kSync = 0, kReduce = 1 };

uint32_t needed(const Barrier& b, const BlockState& block) {
  return b.expected < 0 ? block.live : static_cast<uint32_t>(b.expected);
}

void release_barrier(Barrier& b) {
  race::Published published;
  if (options.races) race::publish(b.clock, published);
  for (const uint32_t i : b.waiting) {
    ThreadState& t = threads[i];
    if (options.races) race::acquire(t, published);
    t.barrier_result = b.count | b.every << 30 | b.any << 31;
    if (t.status == Status::blocked) wake(i);
  }
  b = Barrier();
}

void check_barrier(uint32_t id, int32_t count, Loc loc) {
  if (id > 15) fail(loc, "barrier %u: there are 16", id);
  if (count >= 0 && (count == 0 || count % 32)) fail(loc, "barrier %u: %d threads is no multiple of 32", id, count);
  if (count > static_cast<int32_t>(warps_per_block * 32))
    fail(loc, "barrier %u expects %d threads of a block of %u", id, count, threads_per_block);
}

void arrive(uint32_t id, int32_t count, bool wait, uint32_t kind, bool predicate, const char* what, Loc loc) {
  check_barrier(id, count, loc);
  ThreadState& t = me();
  BlockState& block = my_block();
  Barrier& b = block.barriers[id];
  ++counters.barriers;
  if (b.arrived && b.expected != count)
    fail(loc, "barrier %u: this thread expects %d threads, earlier ones %d", id, count, b.expected);
  if (wait && !b.waiting.empty() && b.kind != kind) fail(loc, "barrier %u: a reduction meets a plain barrier", id);
  b.expected = count;
  if (wait) b.kind = kind;
  ++b.arrived;
  b.count += predicate;
  b.every &= predicate;
  b.any |= predicate;
  if (options.races) race::release(b.clock, t);
  if (wait) b.waiting.push_back(t.index);
  const uint32_t need = needed(b, block);
  if (b.arrived > need) fail(loc, "barrier %u: more than the %u arrivals that it expects", id, need);
  if (b.arrived == need) {
    release_barrier(b);
    if (options.races && need == block.live)
      for (uint32_t w = 0; w < warps_per_block; ++w) banks::flush_warp(block.first_warp + w);
  } else if (wait) {
    block_current({what, " %u", id, loc});
  }
}

}  // namespace

void barrier_sync(uint32_t id, int32_t count, Loc loc) { arrive(id, count, true, kSync, false, "bar.sync", loc); }

void barrier_arrive(uint32_t id, int32_t count, Loc loc) {
  if (count < 0) fail(loc, "bar.arrive needs a thread count");
  arrive(id, count, false, kSync, false, "bar.arrive", loc);
}

uint32_t barrier_reduce(BarrierRed op, uint32_t id, int32_t count, bool predicate, Loc loc) {
  arrive(id, count, true, kReduce + static_cast<uint32_t>(op), predicate, "bar.red", loc);
  const uint32_t result = me().barrier_result;
  switch (op) {
    case BarrierRed::popc:
      return result & 0xffff;
    case BarrierRed::and_:
      return result >> 30 & 1;
    case BarrierRed::or_:
      return result >> 31;
  }
  __builtin_trap();
}

// A barrier of the whole block waits for the threads that have not exited.
void finish_barriers(BlockState& block) {
  for (Barrier& b : block.barriers)
    if (b.arrived && b.expected < 0 && b.arrived >= block.live) release_barrier(b);
}

std::string barriers_text() {
  std::string s;
  for (const BlockState& block : blocks)
    for (uint32_t i = 0; i < 16; ++i)
      if (const Barrier& b = block.barriers[i]; b.arrived)
        s += format("\n  barrier %u of %s: %u of %u threads arrived", i, block_text(block.ctaid).c_str(), b.arrived,
                    needed(b, block));
  return s;
}

// --- cluster -----------------------------------------------------------------------------------------------------

namespace {

struct {
  uint32_t arrived = 0;
  uint64_t phase = 0;
  std::vector<uint32_t> waiting;
  race::SyncClock clock;
  race::Published published;
} cluster_barrier;

struct Arrival {
  uint64_t phase;
  Loc loc;
};
std::vector<Arrival> arrivals;  // each thread's last

void advance_cluster_barrier() {
  ++cluster_barrier.phase;
  cluster_barrier.arrived = 0;
  if (options.races) {
    race::publish(cluster_barrier.clock, cluster_barrier.published);
    banks::flush_all();
  }
  for (const uint32_t i : cluster_barrier.waiting) wake(i);
  cluster_barrier.waiting.clear();
}

}  // namespace

void reset_cluster_barrier() {
  cluster_barrier = {};
  arrivals.assign(threads.size(), {});
}

void finish_cluster_barrier() {
  ThreadState& t = me();
  if (t.cluster_arrived) {
    // An arrival has its wait: a grid whose warps had none hung on an H200. Here what exits before the phase ends
    // counts neither as arrived nor as live.
    const Arrival& last = arrivals[t.index];
    report(format("%s: %s thread %u exits between barrier.cluster.arrive at %s and its wait", kernel_name,
                  block_text(t.ctaid).c_str(), t.linear, place(last.loc).c_str()));
    if (last.phase == cluster_barrier.phase) --cluster_barrier.arrived;
  }
  if (cluster_barrier.arrived && cluster_barrier.arrived == live_threads) advance_cluster_barrier();
}

void cluster_arrive(bool release, Loc loc) {
  ThreadState& t = me();
  if (t.cluster_arrived) fail(loc, "barrier.cluster.arrive: the thread has arrived already and not waited");
  ++counters.barriers;
  t.cluster_arrived = true;
  arrivals[t.index] = {cluster_barrier.phase, loc};
  if (options.races && release) race::release(cluster_barrier.clock, t);
  if (++cluster_barrier.arrived == live_threads) advance_cluster_barrier();
}

void cluster_wait(Loc loc) {
  ThreadState& t = me();
  if (!t.cluster_arrived) fail(loc, "barrier.cluster.wait without an arrival");
  while (cluster_barrier.phase == arrivals[t.index].phase) {
    cluster_barrier.waiting.push_back(t.index);
    block_current({"barrier.cluster.wait", "", 0, loc});
  }
  t.cluster_arrived = false;
  if (options.races) race::acquire(t, cluster_barrier.published);
}

}  // namespace emu
