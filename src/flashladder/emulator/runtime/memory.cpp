// Global memory between guard pages, the shared window of a cluster, and the checks on every access.
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <stdexcept>

#include "state.h"

namespace emu {

Region recent_regions[16];
SharedWindow window;

namespace {

constexpr size_t kPage = 4096;

struct Allocation {
  uint64_t bytes;
  void* map;  // null: host memory that adopt() named
  size_t map_bytes;
};
std::map<uint64_t, Allocation> allocations;  // by start

bool is_wait_expected;

void forget_recent() {
  for (Region& r : recent_regions) r = {};
}

// The allocation that holds `address`, or end().
auto find_allocation(uint64_t address) {
  auto it = allocations.upper_bound(address);
  if (it == allocations.begin()) return allocations.end();
  --it;
  return address < it->first + it->second.bytes ? it : allocations.end();
}

using Address = unsigned long long;

}  // namespace

// --- global ------------------------------------------------------------------------------------------------------

void* device_alloc(size_t bytes) {
  const size_t body = (bytes + kPage - 1) / kPage * kPage, total = body + 2 * kPage;
  void* map = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(map);
  mprotect(first, kPage, PROT_NONE);
  mprotect(first + kPage + body, kPage, PROT_NONE);
  // As aligned as cudaMalloc promises where that costs no page; always to 16 bytes.
  const size_t align = bytes % 256 == 0 ? 256 : 16;
  char* start = first + kPage + body - (bytes + align - 1) / align * align;
  allocations[reinterpret_cast<uint64_t>(start)] = {bytes, map, total};
  return start;
}

void device_free(void* p) {
  const auto it = allocations.find(reinterpret_cast<uint64_t>(p));
  if (it == allocations.end() || !it->second.map) return;
  munmap(it->second.map, it->second.map_bytes);
  allocations.erase(it);
  forget_recent();
}

void adopt(const void* p, size_t bytes) {
  const uint64_t start = reinterpret_cast<uint64_t>(p);
  if (bytes)
    allocations[start] = {bytes, nullptr, 0};
  else
    allocations.erase(start);
  forget_recent();
}

void expect_waits(bool expected) {
  is_wait_expected = expected;
  if (expected) forget_recent();
}

std::string describe_fault(uint64_t address) {
  for (const auto& [start, a] : allocations) {
    if (!a.map || address - reinterpret_cast<uint64_t>(a.map) >= a.map_bytes) continue;
    return format(", %lld bytes past the start of an allocation of %llu bytes", static_cast<long long>(address - start),
                  static_cast<Address>(a.bytes));
  }
  return "";
}

void* global_checked(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc loc) {
  if (address & (align - 1))
    fail(loc, "%s: misaligned global address 0x%llx: not a multiple of %u bytes", what, static_cast<Address>(address),
         align);
  const auto it = find_allocation(address);
  if (it == allocations.end() || bytes > it->first + it->second.bytes - address) {
    std::string near;
    auto before = allocations.upper_bound(address);
    if (before != allocations.begin()) {
      --before;
      const uint64_t offset = address - before->first;
      if (offset < before->second.bytes + (1u << 20))
        near = format(": %llu bytes past the start of an allocation of %llu bytes", static_cast<Address>(offset),
                      static_cast<Address>(before->second.bytes));
    }
    fail(loc, "%s: out-of-bounds global %s of %u bytes at 0x%llx, outside every allocation%s", what,
         write ? "write" : "read", bytes, static_cast<Address>(address), near.c_str());
  }
  if (!is_wait_expected)
    recent_regions[loc.line & 15] = {it->first, it->first + it->second.bytes};
  else if (!me().waited_for_grids)
    fail(loc, "%s: global %s before griddepcontrol.wait in a kernel that may start before the one ahead of it ends",
         what, write ? "write" : "read");
  return reinterpret_cast<void*>(address);
}

// --- shared ------------------------------------------------------------------------------------------------------

namespace {

uint32_t dynamic_start, shared_end, static_end;

// So aligned that generic pointers are as aligned as window addresses.
unsigned char* map_window() {
  void* map =
      mmap(nullptr, 2 * kWindowBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::runtime_error("no address space for the shared window");
  const uint64_t at = (reinterpret_cast<uint64_t>(map) + kWindowBytes - 1) / kWindowBytes * kWindowBytes;
  return reinterpret_cast<unsigned char*>(at);
}

}  // namespace

void layout_shared(uint32_t static_bytes, uint32_t dynamic_bytes) {
  if (!window.base) window.base = map_window();
  static_end = kSharedStart + static_bytes;
  dynamic_start = (static_end + 15) / 16 * 16;
  if (static_cast<uint64_t>(static_bytes) + dynamic_bytes > kMaxShared)
    throw std::runtime_error(format("%s: a block asks for %u + %u bytes of shared memory; the limit is %u", kernel_name,
                                    static_bytes, dynamic_bytes, kMaxShared));
  shared_end = dynamic_bytes ? dynamic_start + dynamic_bytes : static_end;
  window.gap_low = window.gap_high = 0;
  window.recorded = options.races != 0;
}

void poison_shared(uint32_t ranks) {
  if (!options.poison) return;
  for (uint32_t r = 0; r < ranks; ++r)
    std::memset(window.base + (static_cast<uint64_t>(r) << kRankShift), 0xff, shared_end);
}

void select_block(uint32_t rank) {
  const uint64_t base = static_cast<uint64_t>(rank) << kRankShift;
  window.low = base + kSharedStart;
  window.high = base + shared_end;
  const bool gap = static_end < dynamic_start && shared_end > static_end;
  window.gap_low = base + (gap ? static_end : 0);
  window.gap_high = base + (gap ? dynamic_start : 0);
}

uint32_t shared_extent() { return shared_end; }

std::string shared_text(uint64_t address) {
  const uint32_t rank = static_cast<uint32_t>(address >> kRankShift);
  const int offset = static_cast<int>(address & kOffsetMask) - static_cast<int>(kSharedStart);
  std::string s = offset < 0 ? format("-0x%x", -offset) : format("0x%x", offset);
  if (cluster_size() > 1) s += format(" of rank %u", rank);
  return s;
}

unsigned char* shared_pointer(uint64_t address, uint32_t bytes, uint32_t align, const char* what, Loc loc) {
  const uint64_t rank = address >> kRankShift, offset = address & kOffsetMask, end = offset + bytes;
  if (address & (align - 1))
    fail(loc, "%s: misaligned shared address %s: not a multiple of %u bytes", what, shared_text(address).c_str(),
         align);
  if (rank >= cluster_size()) fail(loc, "%s: 0x%llx is no shared address", what, static_cast<Address>(address));
  const bool inside = offset >= kSharedStart && end <= shared_end &&
                      (static_end >= dynamic_start || end <= static_end || offset >= dynamic_start);
  if (!inside)
    fail(loc, "%s: out-of-bounds shared access of %u bytes at %s: the block has %u bytes%s", what, bytes,
         shared_text(address).c_str(), shared_end - kSharedStart,
         offset >= static_end && offset < dynamic_start ? ", and there is a gap before the dynamic part" : "");
  if (current && rank != current->cluster_rank && blocks[rank].live == 0)
    fail(loc, "%s: access to the shared memory of rank %u, whose block has exited", what, static_cast<uint32_t>(rank));
  return window.base + address;
}

void* shared_without_banks(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc loc) {
  const bool inside = window.holds(address, bytes) && (address & (align - 1)) == 0;
  unsigned char* p = inside ? window.base + address : shared_pointer(address, bytes, align, what, loc);
  if (options.races)
    race::access(me(), address, bytes, write ? race::Kind::write : race::Kind::read, race::site(loc, what, bytes));
  return p;
}

void* shared_checked(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc loc) {
  void* p = shared_without_banks(address, bytes, align, write, what, loc);
  if (options.races) banks::record(me(), race::site(loc, what, bytes), address, bytes);
  return p;
}

uint64_t shared_base() { return (static_cast<uint64_t>(me().cluster_rank) << kRankShift) + kSharedStart; }

uint64_t dynamic_shared_base() { return (static_cast<uint64_t>(me().cluster_rank) << kRankShift) + dynamic_start; }

uint64_t to_generic(uint64_t address, Loc loc) {
  if (address >= kWindowBytes) fail(loc, "cvta.shared: 0x%llx is no shared address", static_cast<Address>(address));
  return reinterpret_cast<uint64_t>(window.base) + address;
}

uint64_t to_shared(uint64_t address, Loc loc) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(window.base);
  if (offset >= kWindowBytes)
    fail(loc, "cvta.to.shared: 0x%llx does not point to shared memory", static_cast<Address>(address));
  return offset;
}

uint64_t map_to_rank(uint64_t address, uint32_t rank, Loc loc) {
  if (rank >= cluster_size()) fail(loc, "mapa: rank %u of a cluster of %u", rank, cluster_size());
  return (static_cast<uint64_t>(rank) << kRankShift) | (address & kOffsetMask);
}

uint32_t cluster_size() { return cluster_dim.x * cluster_dim.y * cluster_dim.z; }

// --- either ------------------------------------------------------------------------------------------------------

void* generic(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc loc) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(window.base);
  if (offset < kWindowBytes) return shared(offset, bytes, align, write, what, loc);
  if (in_fiber_stack(me().index, address, bytes)) {
    if (address & (align - 1)) fail(loc, "%s: misaligned local address: not a multiple of %u bytes", what, align);
    return reinterpret_cast<void*>(address);
  }
  return global(address, bytes, align, write, what, loc);
}

void* atomic(uint64_t address, uint32_t bytes, bool is_shared, const char* what, Loc loc) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(window.base);
  if (!is_shared && offset < kWindowBytes) {
    is_shared = true;
    address = offset;
  }
  void* p;
  if (is_shared) {
    ++counters.shared_accesses;
    p = shared_pointer(address, bytes, bytes, what, loc);
  } else {
    p = global(address, bytes, bytes, true, what, loc);
  }
  if (options.races) {
    race::acquire_atomic(p, me());
    if (is_shared) race::access(me(), address, bytes, race::Kind::atomic, race::site(loc, what, bytes));
    race::release_atomic(p, me());
  }
  return p;
}

}  // namespace emu
