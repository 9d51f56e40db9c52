// The race detector: vector clocks over the threads and the asynchronous engines of the running cluster, and the last
// accesses of every two bytes of shared memory.
//
// A thread's knowledge is a shared, immutable base plus what only it knows, so that a barrier costs one vector, not one
// a thread. `fenced` is the part of the knowledge that fence.proxy.async has made visible to the async proxy.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "emulator.h"

namespace emu {
struct ThreadState;
}

namespace emu::race {

using Vector = std::vector<uint32_t>;
using Base = std::shared_ptr<const Vector>;

struct Knowledge {
  Base base;
  uint32_t own = 0, copies = 0, stores = 0, wgmma = 0;  // of the thread, its cp.async, its bulk stores, its warpgroup
};

struct ThreadClock {
  Knowledge seen, fenced;
};

// What has been released into a synchronisation object and not yet published.
struct SyncClock {
  Vector seen, fenced;
  Base last_seen, last_fenced;  // bases already joined
};

struct Published {
  Base seen, fenced;
  // Joins already made with it: most threads come with the same base.
  struct Join {
    Base from, to;
  };
  std::vector<Join> seen_joins, fenced_joins;
};

// Who may act on shared memory besides threads.
enum class Engine : uint8_t { thread, cp_async, bulk_store, wgmma, mbarrier };

void begin_cluster();
void reset_clocks();
void reset_shadow();

// Where each kind of actor starts in a vector; threads start at 0, so that most vectors end early.
struct FirstIds {
  uint32_t wgmma, mbarrier, cp_async, bulk_store;
};
extern FirstIds first_id;

inline uint32_t first_of(Engine engine) {
  switch (engine) {
    case Engine::thread:
      return 0;
    case Engine::wgmma:
      return first_id.wgmma;
    case Engine::mbarrier:
      return first_id.mbarrier;
    case Engine::cp_async:
      return first_id.cp_async;
    case Engine::bulk_store:
      return first_id.bulk_store;
  }
  __builtin_trap();
}
inline uint32_t id_of(Engine engine, uint32_t index) { return first_of(engine) + index; }
inline uint32_t index_of(Engine engine, uint32_t id) { return id - first_of(engine); }

void release(SyncClock&, ThreadState&);
void release(SyncClock&, const ThreadClock&, const ThreadState&);  // an older state of the thread
void publish(const SyncClock&, Published&);
void raise_to(SyncClock&, Engine, uint32_t index, uint32_t epoch);
void acquire(ThreadState&, Published&);
void synchronise(const std::vector<uint32_t>& threads);  // all with all
// An atomic synchronises with the earlier ones on its address.
void acquire_atomic(const void*, ThreadState&);
void release_atomic(const void*, ThreadState&);
void fence_async_proxy(ThreadState&);
inline void completed(uint32_t& known, uint32_t epoch) { known = known < epoch ? epoch : known; }

// Whether `t` knows that `epoch` of the actor has happened.
bool knows(const ThreadState& t, Engine, uint32_t index, uint32_t epoch);
bool knows_fenced(const ThreadState& t, Engine, uint32_t index, uint32_t epoch);

struct Actor {
  Engine engine;
  uint32_t index, epoch;
};
enum class Kind : uint8_t { read, write, atomic };
enum class Through : uint8_t { generic, async };

using Site = uint16_t;
Site site(Loc, const char* what, uint32_t bytes);
std::string site_text(Site);

// By the thread itself, through the generic proxy.
void access(ThreadState&, uint64_t address, uint32_t bytes, Kind, Site);
// On behalf of `issuer`: completes when the actor's epoch does.
void async_access(ThreadState& issuer, Actor, uint64_t address, uint32_t bytes, Kind, Through, Site);

}  // namespace emu::race
