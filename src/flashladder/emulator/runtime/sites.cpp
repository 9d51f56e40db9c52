// The instructions that access shared memory, by number.
#include <unordered_map>

#include "state.h"

namespace emu::race {
namespace {

struct SiteInfo {
  Loc loc;
  const char* what;
  uint32_t bytes;
  bool operator==(const SiteInfo& o) const {
    return loc.line == o.loc.line && loc.file == o.loc.file && what == o.what && bytes == o.bytes;
  }
};
struct SiteHash {
  size_t operator()(const SiteInfo& s) const {
    return (reinterpret_cast<size_t>(s.loc.file) * 31 + reinterpret_cast<size_t>(s.what)) * 31 +
           static_cast<size_t>(s.loc.line) * 8 + s.bytes;
  }
};
std::vector<SiteInfo> sites;
std::unordered_map<SiteInfo, Site, SiteHash> site_numbers;
struct {
  SiteInfo info;
  Site number;
} recent_sites[256];

}  // namespace

Site site(Loc loc, const char* what, uint32_t bytes) {
  const SiteInfo info{loc, what, bytes};
  auto& recent = recent_sites[(static_cast<uint32_t>(loc.line) * 5 + bytes + reinterpret_cast<uintptr_t>(what)) & 255];
  if (recent.info == info) return recent.number;
  const auto [it, added] = site_numbers.try_emplace(info, static_cast<Site>(sites.size()));
  if (added) {
    if (sites.size() == 0xffff) fail(loc, "more than 65535 instructions that access shared memory");
    sites.push_back(info);
  }
  recent = {info, it->second};
  return it->second;
}

std::string site_text(Site s) { return std::string(sites[s].what) + " at " + place(sites[s].loc); }

}  // namespace emu::race
