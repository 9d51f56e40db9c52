// mbarriers: phases, pending arrivals and transaction bytes. The object in shared memory holds a mark and a number;
// the state is here, so that an overwritten mbarrier is noticed.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {
namespace {

constexpr uint64_t kMark = 0xb4bb1e5aull << 32;
constexpr uint32_t kMaxCount = (1 << 20) - 1;
constexpr uint32_t kMaxMbarriersPerBlock = 64;

struct Mbarrier {
  uint64_t address;
  uint32_t expected, pending, phase, generation;
  int64_t tx;
  bool valid, fenced;
  uint32_t initialiser, initialiser_epoch;
  std::vector<uint32_t> waiting;
  race::SyncClock clock;
  race::Published published;  // by the last completed phase
};

std::vector<Mbarrier> mbarriers;

Mbarrier& find(uint64_t address, const char* what, Loc loc) {
  uint64_t mark;
  std::memcpy(&mark, shared_pointer(address, 8, 8, what, loc), 8);
  const auto index = static_cast<uint32_t>(mark);
  if ((mark >> 32 << 32) == kMark && index < mbarriers.size() && mbarriers[index].address == address &&
      mbarriers[index].valid) {
    Mbarrier& m = mbarriers[index];
    if (options.races && !race::knows(me(), race::Engine::thread, m.initialiser, m.initialiser_epoch))
      report(
          format("race: %s at %s by thread %u uses the mbarrier at %s before its initialisation by thread %u is "
                 "synchronised, kernel %s",
                 what, place(loc).c_str(), current->linear, shared_text(address).c_str(), threads[m.initialiser].linear,
                 kernel_name));
    return m;
  }
  for (const Mbarrier& m : mbarriers)
    if (m.valid && m.address == address)
      fail(loc, "%s: the mbarrier at %s has been overwritten", what, shared_text(address).c_str());
  fail(loc, "%s: there is no initialised mbarrier at %s", what, shared_text(address).c_str());
}

void advance_if_complete(Mbarrier& m) {
  if (m.pending || m.tx) return;
  ++m.phase;
  m.pending = m.expected;
  if (options.races) {
    const auto index = static_cast<uint32_t>(&m - mbarriers.data());
    race::raise_to(m.clock, race::Engine::mbarrier, index, m.phase);
    race::publish(m.clock, m.published);
  }
  for (const uint32_t i : m.waiting)
    if (threads[i].status == Status::blocked) wake(i);
  m.waiting.clear();
}

void arrive(Mbarrier& m, uint32_t count, const char* what, Loc loc) {
  if (count > m.pending)
    fail(loc, "%s: more arrivals at the mbarrier at %s than the %u of phase %u", what, shared_text(m.address).c_str(),
         m.expected, m.phase);
  m.pending -= count;
}

void add_tx(Mbarrier& m, int64_t bytes, Loc loc) {
  m.tx += bytes;
  if (m.tx > kMaxCount || m.tx < -static_cast<int64_t>(kMaxCount))
    fail(loc, "the tx-count %lld of the mbarrier at %s is out of range", static_cast<long long>(m.tx),
         shared_text(m.address).c_str());
}

bool is_remote(uint64_t address) { return address >> kRankShift != current->cluster_rank; }

void acquire_phase(Mbarrier& m) {
  if (options.races) race::acquire(me(), m.published);
}

}  // namespace

// References stay valid across fiber switches: the vector never grows past this.
void reset_mbarriers() {
  mbarriers.clear();
  mbarriers.reserve(kMaxMbarriersPerBlock * blocks.size());
}

void mbarrier_init(uint64_t address, uint32_t count, Loc loc) {
  if (count == 0 || count > kMaxCount) fail(loc, "mbarrier.init: a count of %u", count);
  ThreadState& t = me();
  unsigned char* p = shared_pointer(address, 8, 8, "mbarrier.init", loc);
  auto it = std::find_if(mbarriers.begin(), mbarriers.end(), [&](const Mbarrier& m) { return m.address == address; });
  if (it == mbarriers.end()) {
    if (mbarriers.size() == kMaxMbarriersPerBlock * blocks.size())
      fail(loc, "mbarrier.init: more than %u mbarriers a block are not modelled", kMaxMbarriersPerBlock);
    mbarriers.push_back({});
    it = mbarriers.end() - 1;
    it->generation = 0;
    it->valid = false;
    it->phase = 0;
  }
  Mbarrier& m = *it;
  if (m.valid) fail(loc, "mbarrier.init: the mbarrier at %s is in use", shared_text(address).c_str());
  if (options.races) race::access(t, address, 8, race::Kind::write, race::site(loc, "mbarrier.init", 8));
  m.address = address;
  m.expected = m.pending = count;
  // Phases go on counting after a re-initialisation, so that the race detector's epochs do; parity starts at 0.
  m.phase += m.phase & 1;
  ++m.generation;
  m.tx = 0;
  m.valid = true;
  m.fenced = false;
  m.initialiser = t.index;
  m.initialiser_epoch = t.clock.seen.own;
  m.waiting.clear();
  const uint64_t mark = kMark | static_cast<uint32_t>(it - mbarriers.begin());
  std::memcpy(p, &mark, 8);
}

void mbarrier_inval(uint64_t address, Loc loc) {
  Mbarrier& m = find(address, "mbarrier.inval", loc);
  if (!m.waiting.empty()) fail(loc, "mbarrier.inval: threads wait for it");
  m.valid = false;
}

uint64_t mbarrier_arrive(uint64_t address, uint32_t count, Loc loc) {
  Mbarrier& m = find(address, "mbarrier.arrive", loc);
  const uint64_t phase = m.phase;
  if (options.races) race::release(m.clock, me());
  arrive(m, count, "mbarrier.arrive", loc);
  advance_if_complete(m);
  return phase;
}

uint64_t mbarrier_expect_tx(uint64_t address, uint32_t bytes, bool with_arrival, Loc loc) {
  Mbarrier& m = find(address, "mbarrier.expect_tx", loc);
  const uint64_t phase = m.phase;
  add_tx(m, bytes, loc);
  if (with_arrival) {
    if (options.races) race::release(m.clock, me());
    arrive(m, 1, "mbarrier.arrive.expect_tx", loc);
  }
  advance_if_complete(m);
  return phase;
}

bool mbarrier_try_wait(uint64_t address, uint32_t parity, bool may_block, Loc loc) {
  const char* what = may_block ? "mbarrier.try_wait" : "mbarrier.test_wait";
  if (is_remote(address)) fail(loc, "%s: another block's mbarrier", what);
  for (;;) {
    Mbarrier& m = find(address, what, loc);
    if ((m.phase & 1) != (parity & 1)) {
      acquire_phase(m);
      return true;
    }
    // A time-out is always legal.
    const bool time_out = static_cast<AsyncTiming>(options.async_timing) == AsyncTiming::random && one_in(4);
    if (!may_block || time_out) {
      yield(what, loc);
      return false;
    }
    m.waiting.push_back(me().index);
    block_current({what, " of the mbarrier at 0x%x", static_cast<uint32_t>(address & kOffsetMask) - kSharedStart, loc});
  }
}

bool mbarrier_test_token(uint64_t address, uint64_t token, Loc loc) {
  if (is_remote(address)) fail(loc, "mbarrier.test_wait: another block's mbarrier");
  Mbarrier& m = find(address, "mbarrier.test_wait", loc);
  if (token > m.phase || m.phase - token > 1)
    fail(loc, "mbarrier.test_wait: a token of phase %llu in phase %u", static_cast<unsigned long long>(token), m.phase);
  if (m.phase == token) {
    yield("mbarrier.test_wait", loc);
    if (m.phase == token) return false;
  }
  acquire_phase(m);
  return true;
}

void fence_mbarrier_init(Loc) {
  for (Mbarrier& m : mbarriers)
    if (m.initialiser == me().index) m.fenced = true;
}

void fence_proxy(Proxy proxy, Loc loc) {
  if (proxy == Proxy::async_global) return;  // races on global memory are not modelled
  fence_mbarrier_init(loc);
  if (options.races) race::fence_async_proxy(me());
}

std::string mbarriers_text() {
  std::string s;
  for (const Mbarrier& m : mbarriers)
    if (m.valid)
      s += format("\n  mbarrier at %s: phase %u, %u of %u arrivals pending, %lld bytes pending",
                  shared_text(m.address).c_str(), m.phase, m.pending, m.expected, static_cast<long long>(m.tx));
  return s;
}

// --- asynchronous work -------------------------------------------------------------------------------------------

Ticket mbarrier_ticket(uint64_t address, const char* what, Loc loc) {
  const Mbarrier& m = find(address, what, loc);
  return {static_cast<uint32_t>(&m - mbarriers.data()), m.generation, m.phase};
}

void mbarrier_complete_tx(const Ticket& ticket, uint32_t bytes) {
  Mbarrier& m = mbarriers[ticket.index];
  if (!m.valid || m.generation != ticket.generation) return;
  add_tx(m, -static_cast<int64_t>(bytes), {"?", 0});
  advance_if_complete(m);
}

void mbarrier_add_pending(const Ticket& ticket) { ++mbarriers[ticket.index].pending; }

void mbarrier_arrive_for(const Ticket& ticket, const ThreadState& t, const race::ThreadClock& clock, Loc loc) {
  Mbarrier& m = mbarriers[ticket.index];
  if (!m.valid || m.generation != ticket.generation) return;
  if (options.races) race::release(m.clock, clock, t);
  arrive(m, 1, "cp.async.mbarrier.arrive", loc);
  advance_if_complete(m);
}

// The async proxy must see the initialisation.
void mbarrier_check_fenced(const Ticket& ticket, const char* what, Loc loc) {
  const Mbarrier& m = mbarriers[ticket.index];
  if (!options.races || m.fenced || race::knows_fenced(me(), race::Engine::thread, m.initialiser, m.initialiser_epoch))
    return;
  report(
      format("race: %s at %s by thread %u uses the mbarrier at %s, whose initialisation by thread %u was followed by "
             "neither fence.mbarrier_init nor fence.proxy.async, kernel %s",
             what, place(loc).c_str(), current->linear, shared_text(m.address).c_str(), threads[m.initialiser].linear,
             kernel_name));
}

}  // namespace emu
