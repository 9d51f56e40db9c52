// cp.async: copies take effect at their issue (early) or at the wait that needs them (late); until then the
// destination is poisoned.
#include <cstring>

#include "state.h"

namespace emu {
namespace {

void finish(AsyncCopy& c) {
  if (c.done) return;
  std::memcpy(c.target, c.source, c.source_bytes);
  std::memset(c.target + c.source_bytes, 0, c.bytes - c.source_bytes);
  c.done = true;
}

void finish_up_to(ThreadState& t, uint32_t epoch) {
  for (AsyncCopy& c : t.copies)
    if (c.epoch <= epoch) finish(c);
}

}  // namespace

void cp_async(uint64_t target, uint64_t source, uint32_t bytes, uint32_t source_bytes, Loc loc) {
  ThreadState& t = me();
  ++counters.cp_async;
  if (source_bytes > bytes) fail(loc, "cp.async: src-size %u of a copy of %u bytes", source_bytes, bytes);
  unsigned char* p = shared_pointer(target, bytes, bytes, "cp.async", loc);
  const void* from = nullptr;
  if (source_bytes) from = global(source, source_bytes, 1, false, "cp.async", loc);
  if (source & (bytes - 1)) fail(loc, "cp.async: misaligned global address: not a multiple of %u bytes", bytes);
  if (options.races) {
    const race::Site site = race::site(loc, "cp.async", bytes);
    race::async_access(t, {race::Engine::cp_async, t.index, t.copy_epoch}, target, bytes, race::Kind::write,
                       race::Through::generic, site);
    banks::record(t, site, target, bytes);
  }
  AsyncCopy c{p, from, bytes, source_bytes, t.copy_epoch, false, false};
  if (early())
    finish(c);
  else if (options.poison)
    std::memset(p, 0xff, bytes);
  t.copies.push_back(c);
}

void cp_async_commit(Loc) {
  ThreadState& t = me();
  t.group_ends.push_back(t.copy_epoch++);
}

void cp_async_wait(int32_t groups_left, Loc) {
  ThreadState& t = me();
  uint32_t epoch = 0;
  if (groups_left < 0)
    epoch = t.copy_epoch++;
  else if (t.group_ends.size() > static_cast<size_t>(groups_left))
    epoch = t.group_ends[t.group_ends.size() - 1 - static_cast<size_t>(groups_left)];
  finish_up_to(t, epoch);
  std::erase_if(t.copies, [&](const AsyncCopy& c) { return c.epoch <= epoch; });
  race::completed(t.clock.seen.copies, epoch);
}

// The mbarrier gets an arrival once all copies that this thread has issued so far are done.
void cp_async_mbarrier_arrive(uint64_t mbarrier, bool noinc, Loc loc) {
  ThreadState& t = me();
  const Ticket ticket = mbarrier_ticket(mbarrier, "cp.async.mbarrier.arrive", loc);
  if (!noinc) mbarrier_add_pending(ticket);
  const uint32_t epoch = t.copy_epoch++;
  for (AsyncCopy& c : t.copies) c.tracked = true;
  race::ThreadClock clock;  // the arrival orders the copies, not the thread's own accesses
  clock.seen.copies = epoch;
  engine_submit("cp.async.mbarrier.arrive at " + place(loc), [ticket, index = t.index, epoch, clock, loc] {
    finish_up_to(threads[index], epoch);
    mbarrier_arrive_for(ticket, threads[index], clock, loc);
  });
}

// Those that an mbarrier tracks may outlive the thread.
void finish_copies(ThreadState& t) {
  bool forgotten = false;
  for (AsyncCopy& c : t.copies) {
    if (c.tracked) continue;
    forgotten = true;
    finish(c);
  }
  if (forgotten)
    report(format("%s: %s thread %u exits before its cp.async have completed", kernel_name, block_text(t.ctaid).c_str(),
                  t.linear));
}

}  // namespace emu
