// Bulk copies and TMA: tiles of up to five dimensions, swizzled, zero-filled where they leave the tensor.
#include <cstring>
#include <stdexcept>

#include "state.h"

namespace emu {

// The 16-byte chunk number is XORed with the 128-byte row number: 1, 2 or 3 bits of it.
uint32_t swizzle_address(uint32_t address, uint32_t mode) {
  return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

namespace {

constexpr uint64_t kMapMagic = 0x7a3a9d11c0de;
constexpr uint32_t kSharedAlign = 128;  // of the shared address of a tile

struct Tile {
  TensorMap map;
  int32_t coordinates[5];
  uint32_t row_bytes, rows;
  uint32_t bytes() const { return row_bytes * rows; }
};

Tile tile_of(const void* map, uint32_t rank, const int32_t* coordinates, const char* what, Loc loc) {
  if (reinterpret_cast<uintptr_t>(map) % 64) fail(loc, "%s: the tensor map is not 64-byte aligned", what);
  Tile t{};
  std::memcpy(&t.map, map, sizeof t.map);
  if (t.map.magic != kMapMagic) fail(loc, "%s: no encoded tensor map at %p", what, map);
  if (t.map.rank != rank) fail(loc, "%s: the tensor map has rank %u, the instruction %u", what, t.map.rank, rank);
  std::memcpy(t.coordinates, coordinates, rank * sizeof *coordinates);
  t.row_bytes = t.map.box[0] * t.map.element_bytes;
  t.rows = 1;
  for (uint32_t i = 1; i < rank; ++i) t.rows *= t.map.box[i];
  return t;
}

// Bytes [begin, end) of the tile's row that lie inside the tensor, and where the row's byte 0 would be.
struct Row {
  uint64_t address;
  uint32_t begin, end;
};

Row row_of(const Tile& t, uint32_t number) {
  Row row{t.map.base, 0, 0};
  bool inside = true;
  for (uint32_t i = 1; i < t.map.rank; ++i) {
    const int64_t c = static_cast<int64_t>(t.coordinates[i]) + number % t.map.box[i];
    number /= t.map.box[i];
    inside &= c >= 0 && c < static_cast<int64_t>(t.map.dim[i]);
    row.address += static_cast<uint64_t>(c) * t.map.stride_bytes[i];
  }
  const int64_t first = t.coordinates[0], box = t.map.box[0], dim = static_cast<int64_t>(t.map.dim[0]);
  row.address += static_cast<uint64_t>(first) * t.map.element_bytes;
  if (!inside) return row;
  const int64_t begin = first < 0 ? -first : 0, end = first + box > dim ? dim - first : box;
  if (begin >= end) return row;
  row.begin = static_cast<uint32_t>(begin) * t.map.element_bytes;
  row.end = static_cast<uint32_t>(end) * t.map.element_bytes;
  return row;
}

void check_tile(const Tile& t, bool write, const char* what, Loc loc) {
  for (uint32_t r = 0; r < t.rows; ++r) {
    const Row row = row_of(t, r);
    if (row.begin < row.end) global(row.address + row.begin, row.end - row.begin, 1, write, what, loc);
  }
}

template <class F>
void for_chunks(const Tile& t, uint64_t shared_address, uint32_t row, F f) {
  const auto start = static_cast<uint32_t>(shared_address) + row * t.row_bytes;
  for (uint32_t b = 0; b < t.row_bytes; b += 16) f(b, window.base + swizzle_address(start + b, t.map.swizzle));
}

constexpr uint32_t kMaxRow = 256 * 8;

void read_tile(const Tile& t, uint64_t target) {
  unsigned char buffer[kMaxRow];
  for (uint32_t r = 0; r < t.rows; ++r) {
    const Row row = row_of(t, r);
    std::memset(buffer, 0, t.row_bytes);
    if (row.begin < row.end)
      std::memcpy(buffer + row.begin, reinterpret_cast<const void*>(row.address + row.begin), row.end - row.begin);
    for_chunks(t, target, r, [&](uint32_t b, unsigned char* p) { std::memcpy(p, buffer + b, 16); });
  }
}

template <class T, class Add>
void add_elements(void* target, const unsigned char* source, uint32_t bytes, Add add) {
  for (uint32_t b = 0; b < bytes; b += sizeof(T)) {
    T x, y;
    std::memcpy(&x, static_cast<unsigned char*>(target) + b, sizeof x);
    std::memcpy(&y, source + b, sizeof y);
    x = add(x, y);
    std::memcpy(static_cast<unsigned char*>(target) + b, &x, sizeof x);
  }
}

void add_row(Element type, void* target, const unsigned char* source, uint32_t bytes) {
  switch (type) {
    case Element::u32:
    case Element::s32:
      return add_elements<uint32_t>(target, source, bytes, [](uint32_t a, uint32_t b) { return a + b; });
    case Element::fp32:
      return add_elements<float>(target, source, bytes, [](float a, float b) { return a + b; });
    case Element::fp16:
      return add_elements<uint16_t>(target, source, bytes,
                                    [](uint16_t a, uint16_t b) { return to_fp16(fp16_table[a] + fp16_table[b]); });
    case Element::bf16:
      return add_elements<uint16_t>(target, source, bytes, [](uint16_t a, uint16_t b) {
        return to_bf16(to_float(a, Half::bf16) + to_float(b, Half::bf16));
      });
    case Element::unknown:
      break;
  }
}

void write_tile(const Tile& t, uint64_t source, bool reduce_add) {
  unsigned char buffer[kMaxRow];
  for (uint32_t r = 0; r < t.rows; ++r) {
    const Row row = row_of(t, r);
    if (row.begin >= row.end) continue;
    for_chunks(t, source, r, [&](uint32_t b, unsigned char* p) { std::memcpy(buffer + b, p, 16); });
    void* target = reinterpret_cast<void*>(row.address + row.begin);
    if (reduce_add)
      add_row(static_cast<Element>(t.map.type), target, buffer + row.begin, row.end - row.begin);
    else
      std::memcpy(target, buffer + row.begin, row.end - row.begin);
  }
}

// A copy into shared memory that completes on an mbarrier of the same block.
void submit_load(uint64_t target, uint32_t bytes, uint64_t mbarrier, const char* what, Loc loc,
                 std::function<void()> copy) {
  const Ticket ticket = mbarrier_ticket(mbarrier, what, loc);
  mbarrier_check_fenced(ticket, what, loc);
  if (options.races)
    race::async_access(me(), {race::Engine::mbarrier, ticket.index, ticket.phase + 1}, target, bytes, race::Kind::write,
                       race::Through::async, race::site(loc, what, 16));
  if (options.poison) std::memset(window.base + target, 0xff, bytes);
  engine_submit(std::string(what) + " at " + place(loc), [ticket, bytes, copy = std::move(copy)] {
    copy();
    mbarrier_complete_tx(ticket, bytes);
  });
}

// A copy out of shared memory that belongs to the thread's open bulk group.
void submit_store(uint64_t source, uint32_t bytes, const char* what, Loc loc, std::function<void()> copy) {
  ThreadState& t = me();
  if (options.races)
    race::async_access(t, {race::Engine::bulk_store, t.index, t.store_group}, source, bytes, race::Kind::read,
                       race::Through::async, race::site(loc, what, 16));
  BulkStore store{t.store_group, false, loc, std::move(copy)};
  if (early()) {
    store.run();
    store.done = true;
  }
  t.stores.push_back(std::move(store));
}

void check_bulk(uint64_t a, uint64_t b, uint32_t bytes, const char* what, Loc loc) {
  if (bytes == 0 || bytes % 16 || a % 16 || b % 16)
    fail(loc, "%s: %u bytes; size and addresses must be multiples of 16", what, bytes);
}

}  // namespace

void encode_tensor_map(void* map, uint32_t rank, uint32_t element_bytes, void* base, const uint64_t* dim,
                       const uint64_t* stride_bytes, const uint32_t* box, uint32_t swizzle, Element type) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("cuTensorMapEncodeTiled: " + why); };
  if (rank < 1 || rank > 5) refuse(format("rank %u", rank));
  if (swizzle > 3) refuse(format("swizzle mode %u is not modelled", swizzle));
  TensorMap m{};
  m.magic = kMapMagic;
  m.base = reinterpret_cast<uint64_t>(base);
  m.rank = static_cast<uint8_t>(rank);
  m.element_bytes = static_cast<uint8_t>(element_bytes);
  m.swizzle = static_cast<uint8_t>(swizzle);
  m.type = static_cast<uint8_t>(type);
  if (m.base == 0 || m.base % 16) refuse("the global address is null or not 16-byte aligned");
  for (uint32_t i = 0; i < rank; ++i) {
    m.dim[i] = dim[i];
    m.box[i] = box[i];
    m.stride_bytes[i] = i ? stride_bytes[i - 1] : element_bytes;
    if (dim[i] == 0 || dim[i] > 1ull << 32) refuse(format("dimension %u is not in 1..2^32", i));
    if (box[i] == 0 || box[i] > 256) refuse(format("box dimension %u is not in 1..256", i));
    if (i && (m.stride_bytes[i] % 16 || m.stride_bytes[i] >= 1ull << 40))
      refuse(format("stride %u is not a multiple of 16 below 2^40", i));
  }
  const uint32_t inner = box[0] * element_bytes, span[] = {~0u, 32, 64, 128};
  if (inner % 16) refuse(format("the box's inner %u bytes are no multiple of 16", inner));
  if (inner > span[swizzle]) refuse(format("the box's inner %u bytes exceed the swizzle's %u", inner, span[swizzle]));
  std::memset(map, 0, 128);
  std::memcpy(map, &m, sizeof m);
}

void tma_load(uint64_t target, const void* map, uint64_t mbarrier, uint32_t rank, const int32_t* coordinates,
              uint16_t multicast_mask, Loc loc) {
  const Tile tile = tile_of(map, rank, coordinates, "TMA load", loc);
  ++counters.tma;
  check_tile(tile, false, "TMA load", loc);
  const auto load_to = [&](uint64_t to, uint64_t barrier) {
    shared_pointer(to, tile.bytes(), kSharedAlign, "TMA load", loc);
    submit_load(to, tile.bytes(), barrier, "TMA load", loc, [tile, to] { read_tile(tile, to); });
  };
  if (!multicast_mask) {
    if (target >> kRankShift != mbarrier >> kRankShift)
      fail(loc, "TMA load: destination and mbarrier belong to different blocks");
    return load_to(target, mbarrier);
  }
  if (multicast_mask >> cluster_size())
    fail(loc, "TMA load: multicast to 0x%x in a cluster of %u", multicast_mask, cluster_size());
  for (uint32_t r = 0; r < cluster_size(); ++r)
    if (multicast_mask >> r & 1) load_to(map_to_rank(target, r, loc), map_to_rank(mbarrier, r, loc));
}

void tma_store(const void* map, uint64_t source, uint32_t rank, const int32_t* coordinates, bool reduce_add, Loc loc) {
  const char* what = reduce_add ? "TMA reduce" : "TMA store";
  const Tile tile = tile_of(map, rank, coordinates, what, loc);
  ++counters.tma;
  if (reduce_add && static_cast<Element>(tile.map.type) == Element::unknown)
    fail(loc, "TMA reduce: the tensor map's element type is not modelled");
  shared_pointer(source, tile.bytes(), kSharedAlign, what, loc);
  check_tile(tile, true, what, loc);
  submit_store(source, tile.bytes(), what, loc, [tile, source, reduce_add] { write_tile(tile, source, reduce_add); });
}

void bulk_load(uint64_t target, uint64_t source, uint32_t bytes, uint64_t mbarrier, Loc loc) {
  ++counters.tma;
  check_bulk(target, source, bytes, "cp.async.bulk", loc);
  const void* from = global(source, bytes, 16, false, "cp.async.bulk", loc);
  unsigned char* to = shared_pointer(target, bytes, 16, "cp.async.bulk", loc);
  submit_load(target, bytes, mbarrier, "cp.async.bulk", loc, [from, to, bytes] { std::memcpy(to, from, bytes); });
}

void bulk_store(uint64_t target, uint64_t source, uint32_t bytes, Loc loc) {
  ++counters.tma;
  check_bulk(target, source, bytes, "cp.async.bulk", loc);
  void* to = global(target, bytes, 16, true, "cp.async.bulk", loc);
  const unsigned char* from = shared_pointer(source, bytes, 16, "cp.async.bulk", loc);
  submit_store(source, bytes, "cp.async.bulk", loc, [from, to, bytes] { std::memcpy(to, from, bytes); });
}

void bulk_to_cluster(uint64_t target, uint64_t source, uint32_t bytes, uint64_t mbarrier, Loc loc) {
  ++counters.tma;
  check_bulk(target, source, bytes, "cp.async.bulk", loc);
  if (target >> kRankShift != mbarrier >> kRankShift)
    fail(loc, "cp.async.bulk: destination and mbarrier belong to different blocks");
  const unsigned char* from = shared_pointer(source, bytes, 16, "cp.async.bulk", loc);
  unsigned char* to = shared_pointer(target, bytes, 16, "cp.async.bulk", loc);
  if (options.races) {
    const Ticket ticket = mbarrier_ticket(mbarrier, "cp.async.bulk", loc);
    race::async_access(me(), {race::Engine::mbarrier, ticket.index, ticket.phase + 1}, source, bytes, race::Kind::read,
                       race::Through::async, race::site(loc, "cp.async.bulk (source)", 16));
  }
  submit_load(target, bytes, mbarrier, "cp.async.bulk", loc, [from, to, bytes] { std::memcpy(to, from, bytes); });
}

void bulk_commit(Loc) { ++me().store_group; }

void bulk_wait(uint32_t groups_left, bool, Loc) {
  ThreadState& t = me();
  const uint32_t committed = t.store_group - 1;
  if (committed <= groups_left) return;
  const uint32_t group = committed - groups_left;
  for (BulkStore& s : t.stores)
    if (s.group <= group && !s.done) s.run();
  std::erase_if(t.stores, [&](const BulkStore& s) { return s.group <= group; });
  race::completed(t.clock.seen.stores, group);
}

void finish_stores(ThreadState& t) {
  for (BulkStore& s : t.stores) {
    report(format("%s: %s thread %u exits while its bulk store at %s may still read shared memory", kernel_name,
                  block_text(t.ctaid).c_str(), t.linear, place(s.loc).c_str()));
    if (!s.done) s.run();
  }
  t.stores.clear();
}

}  // namespace emu
