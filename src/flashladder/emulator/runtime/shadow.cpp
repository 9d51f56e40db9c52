// The last accesses of every two bytes of shared memory, and what they must be ordered with.
#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "state.h"

namespace emu::race {
namespace {

constexpr uint32_t kGranule = 2, kWord = 4, kChunk = 16, kWords = kChunk / kWord;
constexpr uint16_t kNoSlot = 0xffff, kManySlots = 0xfffe;

// Who has read since the last write, by slots: one a warp (its lanes), one a warp for the bulk stores of its lanes, one
// a warpgroup for its wgmmas, one for all mbarriers.
struct {
  uint32_t bulk_store, wgmma, mbarrier, count;
} first_slot;

// Lanes that have read in the same epoch of theirs. The mbarriers' slot holds an mbarrier's number plus one instead.
struct Readers {
  uint32_t clock, lanes;
  Site site;
  uint16_t second;  // more lanes, of another epoch: an index into seconds, or 0
};

struct Cell {
  uint32_t write_id, write_clock;  // the actor's number in vectors, and its epoch
  uint16_t writer;                 // the thread that issued the write
  Site write_site;
  Engine write_engine;
  bool written : 1, atomic : 1, generic : 1;
  uint16_t read_slot;  // of `readers`; kManySlots: readers.clock is the number of a record with all slots
  Readers readers;
};

// 16 bytes. While the chunk is not split, its first cell stands for all; while a word is not split, its cell does. The
// upper halves of split words are in `halves`.
struct alignas(64) Chunk {
  uint32_t cluster;
  uint32_t upper;  // index into halves, or 0
  bool split;
  uint8_t split_words;
  Cell words[kWords];
};
static_assert(sizeof(Chunk) == 128);

std::vector<std::vector<Chunk>> shadow;  // by rank
uint32_t cluster_number = 0;
std::vector<Cell> halves;

std::vector<Readers> records;
std::vector<uint32_t> free_records;
std::vector<Readers> seconds;
std::vector<uint16_t> free_seconds;

Readers* record_of(const Cell& c) { return &records[static_cast<size_t>(c.readers.clock) * first_slot.count]; }

uint32_t new_record() {
  if (free_records.empty()) {
    free_records.push_back(static_cast<uint32_t>(records.size() / first_slot.count));
    records.resize(records.size() + first_slot.count);
  }
  const uint32_t record = free_records.back();
  free_records.pop_back();
  std::fill_n(&records[static_cast<size_t>(record) * first_slot.count], first_slot.count, Readers{});
  return record;
}

uint16_t new_second() {  // 0: none left
  if (free_seconds.empty()) {
    if (seconds.size() == 0xffff) return 0;
    free_seconds.push_back(static_cast<uint16_t>(seconds.size()));
    seconds.push_back({});
  }
  const uint16_t second = free_seconds.back();
  free_seconds.pop_back();
  return second;
}

struct Request {
  ThreadState& t;
  Actor actor;
  Kind kind;
  Through through;
  Site site;
  uint32_t slot, lanes;
  const uint32_t* known;  // the issuer's base
  size_t known_count;
};

struct ActorOfSlot {
  Engine engine;
  uint32_t index;
};

ActorOfSlot actor_of(uint32_t slot, uint32_t lane, uint32_t lanes) {
  if (slot < first_slot.bulk_store) return {Engine::thread, warps[slot].first_thread + lane};
  if (slot < first_slot.wgmma) return {Engine::bulk_store, warps[slot - first_slot.bulk_store].first_thread + lane};
  if (slot < first_slot.mbarrier) return {Engine::wgmma, slot - first_slot.wgmma};
  return {Engine::mbarrier, lanes - 1};
}

// --- reports -----------------------------------------------------------------------------------------------------

std::string actor_text(Engine engine, uint32_t index, bool issuer_known, uint32_t issuer) {
  std::string s = " by ";
  const uint32_t groups = (warps_per_block + 3) / 4;
  uint32_t rank;
  if (engine == Engine::thread || issuer_known) {
    const uint32_t thread = issuer_known ? issuer : index;
    rank = thread / threads_per_block;
    s += format("thread %u", thread % threads_per_block);
  } else if (engine == Engine::wgmma) {
    rank = index / groups;
    s += format("warpgroup %u", index % groups);
  } else if (engine == Engine::mbarrier) {
    return s + "a bulk copy (async proxy)";
  } else {
    rank = index / threads_per_block;
    s += format("thread %u", index % threads_per_block);
  }
  if (blocks.size() > 1) s += format(" of rank %u", rank);
  if (engine == Engine::cp_async) s += " (cp.async)";
  if (engine == Engine::wgmma || engine == Engine::mbarrier || engine == Engine::bulk_store) s += " (async proxy)";
  return s;
}

enum class Finding : uint32_t { race, unfenced, uninitialised };

std::unordered_set<uint64_t> found;
uint64_t found_generation = ~0ull;

bool is_new(Finding finding, Site a, Site b) {
  if (found_generation != log_generation) {
    found.clear();
    found_generation = log_generation;
  }
  return found.insert(static_cast<uint64_t>(finding) << 32 | static_cast<uint64_t>(a) << 16 | b).second;
}

std::string where(uint64_t address, uint32_t bytes) {
  const BlockState& b = blocks[address >> kRankShift];
  const auto offset = static_cast<uint32_t>(address & kOffsetMask) - kSharedStart;
  return format(", bytes 0x%x..0x%x of %s's shared memory, kernel %s", offset, offset + bytes,
                block_text(b.ctaid).c_str(), kernel_name);
}

std::string request_text(const Request& r) {
  return site_text(r.site) + actor_text(r.actor.engine, r.actor.index, true, r.t.index);
}

std::string writer_text(const Cell& c) {
  return site_text(c.write_site) + actor_text(c.write_engine, 0, true, c.writer);
}

// --- readers -----------------------------------------------------------------------------------------------------

// Whether one of `readers` is not ordered before the request.
bool find_unordered(const Request& r, uint32_t slot, const Readers& readers, ActorOfSlot& culprit) {
  uint32_t lanes = slot == first_slot.mbarrier ? 1 : readers.lanes;
  for (; lanes; lanes &= lanes - 1) {
    const ActorOfSlot actor = actor_of(slot, static_cast<uint32_t>(__builtin_ctz(lanes)), readers.lanes);
    const uint32_t id = id_of(actor.engine, actor.index);
    if (id < r.known_count && r.known[id] >= readers.clock) continue;
    if (knows(r.t, actor.engine, actor.index, readers.clock)) continue;
    culprit = actor;
    return true;
  }
  return false;
}

bool ordered(const Request& r, const Readers& readers, uint32_t slot) {
  ActorOfSlot ignored;
  return !find_unordered(r, slot, readers, ignored);
}

// For the mbarriers' slot: keep an unordered older one, which can hide a race but never invent one.
void add_mbarrier(const Request& r, Readers& only) {
  if (!only.lanes || ordered(r, only, r.slot)) only = {r.actor.epoch, r.lanes, r.site, 0};
}

// A lane's newer read stands for its older one; readers that are ordered before this read are stood for by it.
void add_lanes(const Request& r, Readers& main) {
  const uint32_t clock = r.actor.epoch;
  Readers* const second = main.second ? &seconds[main.second] : nullptr;
  for (Readers* set : {&main, second})
    if (set) {
      set->lanes &= ~r.lanes;
      if (set->clock != clock && set->lanes && ordered(r, *set, r.slot)) set->lanes = 0;
    }
  for (Readers* set : {&main, second})
    if (set && set->lanes && set->clock == clock) {
      set->lanes |= r.lanes;
      set->site = r.site;
      return;
    }
  for (Readers* set : {&main, second})
    if (set && !set->lanes) {
      *set = {clock, r.lanes, r.site, set->second};
      return;
    }
  if (!second && (main.second = new_second())) {
    seconds[main.second] = {clock, r.lanes, r.site, 0};
    return;
  }
  // A third epoch: take the reader for one of an older epoch, which can hide a race but never invent one.
  Readers& older = second && second->clock < main.clock ? *second : main;
  older.clock = std::min(older.clock, clock);
  older.lanes |= r.lanes;
}

void add_reader(Cell& c, const Request& r) {
  const Readers alone{r.actor.epoch, r.lanes, r.site, 0};
  if (c.read_slot == kNoSlot || (c.read_slot != kManySlots && ordered(r, c.readers, c.read_slot))) {
    c.read_slot = static_cast<uint16_t>(r.slot);
    c.readers = alone;
    return;
  }
  if (c.read_slot != kManySlots) {
    const uint32_t record = new_record();
    records[static_cast<size_t>(record) * first_slot.count + c.read_slot] = c.readers;
    c.read_slot = kManySlots;
    c.readers.clock = record;
  }
  Readers& readers = record_of(c)[r.slot];
  if (r.slot == first_slot.mbarrier)
    add_mbarrier(r, readers);
  else
    add_lanes(r, readers);
}

// The common case: lanes of a warp read in the same epoch.
bool joined_readers(Cell& c, const Request& r) {
  Readers& readers = c.read_slot == kManySlots ? record_of(c)[r.slot] : c.readers;
  if ((c.read_slot != kManySlots && c.read_slot != r.slot) || readers.clock != r.actor.epoch || readers.second ||
      r.slot == first_slot.mbarrier)
    return false;
  readers.lanes |= r.lanes;
  readers.site = r.site;
  return true;
}

void report_reader(const Request& r, const Readers& readers, ActorOfSlot culprit, uint64_t address, uint32_t bytes) {
  if (!is_new(Finding::race, r.site, readers.site)) return;
  report("race: " + request_text(r) + " after " + site_text(readers.site) +
         actor_text(culprit.engine, culprit.index, false, 0) + where(address, bytes));
}

void check_slot(const Request& r, uint32_t slot, const Readers& readers, uint64_t address, uint32_t bytes) {
  ActorOfSlot culprit;
  if (readers.lanes && find_unordered(r, slot, readers, culprit)) report_reader(r, readers, culprit, address, bytes);
  if (readers.second) check_slot(r, slot, seconds[readers.second], address, bytes);
}

void check_readers(const Cell& c, const Request& r, uint64_t address, uint32_t bytes) {
  if (c.read_slot == kNoSlot) return;
  if (c.read_slot != kManySlots) return check_slot(r, c.read_slot, c.readers, address, bytes);
  const Readers* record = record_of(c);
  for (uint32_t slot = 0; slot < first_slot.count; ++slot) check_slot(r, slot, record[slot], address, bytes);
}

void forget_readers(Cell& c) {
  if (c.read_slot == kManySlots) {
    const Readers* record = record_of(c);
    for (uint32_t slot = 0; slot < first_slot.count; ++slot)
      if (record[slot].second) free_seconds.push_back(record[slot].second);
    free_records.push_back(c.readers.clock);
  }
  c.read_slot = kNoSlot;
}

// --- cells -------------------------------------------------------------------------------------------------------

void check_writer(const Cell& c, const Request& r, uint64_t address, uint32_t bytes) {
  if (!c.written) {
    if (r.kind == Kind::read && is_new(Finding::uninitialised, r.site, r.site))
      report("uninitialised: " + request_text(r) + " reads what nothing has written" + where(address, bytes));
    return;
  }
  if (c.atomic && r.kind == Kind::atomic) return;
  const uint32_t index = index_of(c.write_engine, c.write_id);
  if (!knows(r.t, c.write_engine, index, c.write_clock)) {
    if (is_new(Finding::race, r.site, c.write_site))
      report("race: " + request_text(r) + " after " + writer_text(c) + where(address, bytes));
  } else if (r.through == Through::async && c.generic && !knows_fenced(r.t, c.write_engine, index, c.write_clock)) {
    if (is_new(Finding::unfenced, r.site, c.write_site))
      report("race: no fence.proxy.async between " + request_text(r) + " and " + writer_text(c) +
             where(address, bytes));
  }
}

// The common case: written by the thread itself, or before a barrier, and accessed through the generic proxy.
bool is_plain(const Cell& c, const Request& r) {
  if (!c.written || r.through != Through::generic) return false;
  return c.write_id == r.t.index || (c.write_id < r.known_count && r.known[c.write_id] >= c.write_clock);
}

void touch(Cell& c, const Request& r, uint64_t address, uint32_t bytes) {
  if (!is_plain(c, r)) check_writer(c, r, address, bytes);
  if (r.kind == Kind::read) {
    if (!joined_readers(c, r)) add_reader(c, r);
    return;
  }
  check_readers(c, r, address, bytes);
  forget_readers(c);
  c.write_id = id_of(r.actor.engine, r.actor.index);
  c.write_clock = r.actor.epoch;
  c.writer = static_cast<uint16_t>(r.t.index);
  c.write_site = r.site;
  c.write_engine = r.actor.engine;
  c.written = true;
  c.atomic = r.kind == Kind::atomic;
  c.generic = r.through == Through::generic;
}

void copy_cell(Cell& to, const Cell& from) {
  to = from;
  if (from.read_slot != kManySlots) return;
  to.readers.clock = new_record();
  for (uint32_t slot = 0; slot < first_slot.count; ++slot) {
    Readers& copy = record_of(to)[slot] = record_of(from)[slot];
    if (!copy.second) continue;
    const uint16_t second = new_second();
    if (second) seconds[second] = seconds[copy.second];
    copy.second = second;
  }
}

// --- chunks ------------------------------------------------------------------------------------------------------

void touch_word(Chunk& chunk, uint32_t word, const Request& r, uint64_t address) {
  if (!(chunk.split_words >> word & 1)) return touch(chunk.words[word], r, address, kWord);
  touch(chunk.words[word], r, address, kGranule);
  touch(halves[chunk.upper + word], r, address + kGranule, kGranule);
  if (r.kind != Kind::read) chunk.split_words &= static_cast<uint8_t>(~(1u << word));  // the halves are equal now
}

void touch_chunk(Chunk& chunk, const Request& r, uint64_t address) {
  if (!chunk.split) return touch(chunk.words[0], r, address, kChunk);
  for (uint32_t word = 0; word < kWords; ++word) touch_word(chunk, word, r, address + word * kWord);
  if (r.kind != Kind::read) chunk.split = false;
}

void split_chunk(Chunk& chunk) {
  chunk.split = true;
  chunk.split_words = 0;
  for (uint32_t word = 1; word < kWords; ++word) copy_cell(chunk.words[word], chunk.words[0]);
}

void split_word(Chunk& chunk, uint32_t word) {
  chunk.split_words |= static_cast<uint8_t>(1u << word);
  if (!chunk.upper) {
    chunk.upper = static_cast<uint32_t>(halves.size());
    halves.resize(halves.size() + kWords);
  }
  copy_cell(halves[chunk.upper + word], chunk.words[word]);
}

void touch_range(const Request& r, uint64_t address, uint32_t bytes) {
  const uint64_t rank = address >> kRankShift, base = rank << kRankShift;
  std::vector<Chunk>& chunks = shadow[rank];
  const uint32_t end = static_cast<uint32_t>(address & kOffsetMask) + bytes;
  uint32_t at = static_cast<uint32_t>(address & kOffsetMask) / kGranule * kGranule;
  while (at < end) {
    Chunk& chunk = chunks[at / kChunk];
    if (chunk.cluster != cluster_number) {
      chunk = {};
      chunk.cluster = cluster_number;
      chunk.words[0].read_slot = kNoSlot;
    }
    if (at % kChunk == 0 && end - at >= kChunk) {
      touch_chunk(chunk, r, base + at);
      at += kChunk;
      continue;
    }
    if (!chunk.split) split_chunk(chunk);
    const uint32_t word = at % kChunk / kWord;
    if (at % kWord == 0 && end - at >= kWord) {
      touch_word(chunk, word, r, base + at);
      at += kWord;
      continue;
    }
    if (!(chunk.split_words >> word & 1)) split_word(chunk, word);
    touch(at % kWord ? halves[chunk.upper + word] : chunk.words[word], r, base + at, kGranule);
    at += kGranule;
  }
}

Request request(ThreadState& t, Actor actor, Kind kind, Through through, Site s) {
  const Base& base = t.clock.seen.base;
  return {t,
          actor,
          kind,
          through,
          s,
          t.cluster_rank * warps_per_block + t.warp,
          1u << t.lane,
          base ? base->data() : nullptr,
          base ? base->size() : 0};
}

}  // namespace

void access(ThreadState& t, uint64_t address, uint32_t bytes, Kind kind, Site s) {
  touch_range(request(t, {Engine::thread, t.index, t.clock.seen.own}, kind, Through::generic, s), address, bytes);
}

void async_access(ThreadState& issuer, Actor actor, uint64_t address, uint32_t bytes, Kind kind, Through through,
                  Site s) {
  Request r = request(issuer, actor, kind, through, s);
  if (actor.engine == Engine::bulk_store) r.slot += first_slot.bulk_store;
  if (actor.engine == Engine::wgmma) {
    r.slot = first_slot.wgmma + actor.index;
    r.lanes = 1;
  }
  if (actor.engine == Engine::mbarrier) {
    r.slot = first_slot.mbarrier;
    r.lanes = actor.index + 1;
  }
  touch_range(r, address, bytes);
}

void reset_shadow() {
  const auto w = static_cast<uint32_t>(warps.size()), g = static_cast<uint32_t>(warpgroups.size());
  first_slot = {w, 2 * w, 2 * w + g, 2 * w + g + 1};
  records.clear();
  free_records.clear();
  seconds.assign(1, {});
  free_seconds.clear();
  halves.assign(1, {});
  ++cluster_number;
  shadow.resize(blocks.size());
  for (auto& chunks : shadow)
    if (chunks.size() * kChunk < shared_extent()) chunks.resize((shared_extent() + kChunk - 1) / kChunk);
}

}  // namespace emu::race
