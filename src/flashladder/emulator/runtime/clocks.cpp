// Vector clocks: what each thread knows of the others and of the asynchronous engines.
#include <algorithm>
#include <unordered_map>

#include "state.h"

namespace emu::race {

FirstIds first_id;

namespace {

constexpr uint32_t kMbarriersPerBlock = 64;

uint32_t warpgroup_of(const ThreadState& t) { return t.cluster_rank * ((warps_per_block + 3) / 4) + t.warp / 4; }

uint32_t at(const Base& base, uint32_t id) { return base && id < base->size() ? (*base)[id] : 0; }

void raise(Vector& v, uint32_t id, uint32_t epoch) {
  if (!epoch) return;
  if (id >= v.size()) v.resize(id + 1);
  v[id] = std::max(v[id], epoch);
}

void join(Vector& into, const Vector& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

bool knows(const Knowledge& k, const ThreadState& t, Engine engine, uint32_t index, uint32_t epoch) {
  if (at(k.base, id_of(engine, index)) >= epoch) return true;
  switch (engine) {
    case Engine::thread:
      return index == t.index && k.own >= epoch;
    case Engine::cp_async:
      return index == t.index && k.copies >= epoch;
    case Engine::bulk_store:
      return index == t.index && k.stores >= epoch;
    case Engine::wgmma:
      return index == warpgroup_of(t) && k.wgmma >= epoch;
    case Engine::mbarrier:
      return false;
  }
  __builtin_trap();
}

void release_knowledge(Vector& into, Base& last, const Knowledge& k, const ThreadState& t) {
  if (k.base && k.base != last) {
    join(into, *k.base);
    last = k.base;
  }
  raise(into, t.index, k.own);
  raise(into, id_of(Engine::cp_async, t.index), k.copies);
  raise(into, id_of(Engine::bulk_store, t.index), k.stores);
  raise(into, id_of(Engine::wgmma, warpgroup_of(t)), k.wgmma);
}

void acquire_base(Base& base, const Base& with, std::vector<Published::Join>& joins) {
  if (!with || base == with) return;
  if (!base) {
    base = with;
    return;
  }
  for (const Published::Join& j : joins) {
    if (j.from != base) continue;
    base = j.to;
    return;
  }
  Vector joined = *base;
  join(joined, *with);
  Base to = joined == *with ? with : joined == *base ? base : std::make_shared<const Vector>(std::move(joined));
  joins.push_back({base, to});
  base = to;
}

std::unordered_map<const void*, SyncClock> atomics;

}  // namespace

// --- synchronisation ---------------------------------------------------------------------------------------------

void release(SyncClock& into, const ThreadClock& clock, const ThreadState& t) {
  release_knowledge(into.seen, into.last_seen, clock.seen, t);
  release_knowledge(into.fenced, into.last_fenced, clock.fenced, t);
}

void release(SyncClock& into, ThreadState& t) {
  release(into, t.clock, t);
  ++t.clock.seen.own;
}

void publish(const SyncClock& clock, Published& published) {
  published.seen = std::make_shared<const Vector>(clock.seen);
  published.fenced = std::make_shared<const Vector>(clock.fenced);
  published.seen_joins.clear();
  published.fenced_joins.clear();
}

void raise_to(SyncClock& clock, Engine engine, uint32_t index, uint32_t epoch) {
  raise(clock.seen, id_of(engine, index), epoch);
}

void acquire(ThreadState& t, Published& published) {
  acquire_base(t.clock.seen.base, published.seen, published.seen_joins);
  acquire_base(t.clock.fenced.base, published.fenced, published.fenced_joins);
}

void synchronise(const std::vector<uint32_t>& members) {
  SyncClock clock;
  Published published;
  for (const uint32_t i : members) release(clock, threads[i]);
  publish(clock, published);
  for (const uint32_t i : members) acquire(threads[i], published);
}

void acquire_atomic(const void* p, ThreadState& t) {
  const auto it = atomics.find(p);
  if (it == atomics.end()) return;
  Published published;
  publish(it->second, published);
  acquire(t, published);
}

void release_atomic(const void* p, ThreadState& t) { release(atomics[p], t); }

void fence_async_proxy(ThreadState& t) { t.clock.fenced = t.clock.seen; }

bool knows(const ThreadState& t, Engine engine, uint32_t index, uint32_t epoch) {
  return knows(t.clock.seen, t, engine, index, epoch);
}

bool knows_fenced(const ThreadState& t, Engine engine, uint32_t index, uint32_t epoch) {
  return knows(t.clock.fenced, t, engine, index, epoch);
}

void reset_clocks() {
  const auto n = static_cast<uint32_t>(threads.size());
  first_id.wgmma = n;
  first_id.mbarrier = n + static_cast<uint32_t>(warpgroups.size());
  first_id.cp_async = first_id.mbarrier + kMbarriersPerBlock * static_cast<uint32_t>(blocks.size());
  first_id.bulk_store = first_id.cp_async + n;
  atomics.clear();
  for (ThreadState& t : threads) {
    t.clock = {};
    t.clock.seen.own = 1;
  }
}

void begin_cluster() {
  reset_clocks();
  reset_shadow();
}

}  // namespace emu::race
