// Linked into a program that `flashladder emulate` runs: options from the environment, findings at the end.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "emulator.h"

namespace {

int64_t number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoll(text, nullptr, 10) : otherwise;
}

struct Program {
  Program() {
    emu::Options options;
    options.schedule = static_cast<int32_t>(number("FLASHLADDER_SCHEDULE", options.schedule));
    options.async_timing = static_cast<int32_t>(number("FLASHLADDER_ASYNC", options.async_timing));
    options.seed = static_cast<uint64_t>(number("FLASHLADDER_SEED", static_cast<int64_t>(options.seed)));
    options.races = static_cast<int32_t>(number("FLASHLADDER_RACES", 1));
    emu_configure(&options);
  }
  ~Program() {
    std::fflush(stdout);
    emu::Counters c;
    emu_read_counters(&c);
    std::fprintf(stderr, "emulated: %llu blocks, %llu barriers, %llu mma, %llu wgmma, %llu bank conflicts\n",
                 static_cast<unsigned long long>(c.blocks), static_cast<unsigned long long>(c.barriers),
                 static_cast<unsigned long long>(c.mma), static_cast<unsigned long long>(c.wgmma),
                 static_cast<unsigned long long>(c.bank_conflicts));
    const std::string log = emu_log();
    if (log.empty()) return;
    std::fprintf(stderr, "%s\n", log.c_str());
    std::fflush(stderr);
    std::_Exit(23);
  }
} program;

}  // namespace
