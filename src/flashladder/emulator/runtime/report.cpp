// Findings, the fault that ends a launch, and the one source of chance.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>
#include <stdexcept>

#include "state.h"

namespace emu {

Options options;
Counters counters;
bool faulted = false;
uint64_t log_generation = 0;
const char* kernel_name = "?";

namespace {

std::string log_lines, fault;
std::set<std::string> known_reports;
uint64_t random_state = 1;

std::string format_list(const char* text, va_list arguments) {
  char buffer[2048];
  vsnprintf(buffer, sizeof buffer, text, arguments);
  return buffer;
}

}  // namespace

std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string s = format_list(text, arguments);
  va_end(arguments);
  return s;
}

const char* base_name(const char* path) {
  const char* slash = path ? std::strrchr(path, '/') : nullptr;
  return slash ? slash + 1 : path ? path : "?";
}

std::string place(Loc loc) { return format("%s:%d", base_name(loc.file), loc.line); }

std::string block_text(const Dim3& b) { return format("block (%u,%u,%u)", b.x, b.y, b.z); }

void set_fault(std::string message) {
  if (faulted) return;
  faulted = true;
  fault = std::move(message);
  log_lines += fault + '\n';
}

const std::string& fault_text() { return fault; }

void fail(Loc loc, const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  const std::string message = format_list(text, arguments);
  va_end(arguments);
  const std::string where = std::string(kernel_name) + ": " + place(loc) + ": ";
  if (!current) {
    set_fault(where + message);
    throw std::runtime_error(where + message);
  }
  const ThreadState& t = me();
  set_fault(where + block_text(t.ctaid) + format(" thread (%u,%u,%u): ", t.tid.x, t.tid.y, t.tid.z) + message);
  leave_fiber();
  __builtin_trap();
}

void report(const std::string& finding) {
  if (static_cast<int32_t>(known_reports.size()) >= options.max_reports || !known_reports.insert(finding).second)
    return;
  log_lines += finding + '\n';
}

const std::string& log_text() { return log_lines; }

void clear_log() {
  log_lines.clear();
  known_reports.clear();
  ++log_generation;
}

// xorshift64.
void seed_random(uint64_t seed) { random_state = seed * 0x9E3779B97F4A7C15ull + 1; }

uint32_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 16);
}

uint32_t random_below(uint32_t n) {
  return n <= 1 ? 0 : static_cast<uint32_t>((static_cast<uint64_t>(random_bits()) * n) >> 32);
}

bool early() {
  const auto timing = static_cast<AsyncTiming>(options.async_timing);
  return timing == AsyncTiming::early || (timing == AsyncTiming::random && one_in(2));
}

}  // namespace emu

extern "C" {

void emu_configure(const emu::Options* o) { emu::options = *o; }

void emu_read_counters(emu::Counters* c) { *c = emu::counters; }

void emu_reset(void) {
  emu::counters = {};
  emu::clear_log();
}

const char* emu_log(void) { return emu::log_text().c_str(); }

void* emu_alloc(size_t bytes) { return emu::device_alloc(bytes); }

void emu_free(void* p) { emu::device_free(p); }
}
