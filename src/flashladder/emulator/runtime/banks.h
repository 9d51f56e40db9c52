// Bank conflicts of a warp's shared-memory accesses.
#pragma once

#include <cstdint>

#include "race.h"

namespace emu::banks {

// A lane's shared-memory access: the wavefronts of a warp's accesses by one instruction are counted together.
void record(const ThreadState&, race::Site, uint64_t address, uint32_t bytes);
void flush_warp(uint32_t warp);
void flush_all();
void begin_cluster();
// Extra wavefronts of `lanes` accesses of `bytes` each.
uint32_t extra_wavefronts(const uint32_t* address, uint32_t lanes, uint32_t bytes);

}  // namespace emu::banks
