#include <map>
#include <stdexcept>

#include "harness.h"

namespace test {
namespace {

std::map<std::string, void (*)()>& cases() {
  static std::map<std::string, void (*)()> all;
  return all;
}

constexpr const char* kSchedules[] = {"fifo", "reverse", "random", "priority"};
constexpr const char* kTimings[] = {"early", "late", "random"};

}  // namespace

Case::Case(const char* name, void (*run)()) { cases()[name] = run; }

void failed(const char* file, int line, const std::string& what, const std::string& detail) {
  std::fprintf(stderr, "%s:%d: %s\n%s\n", file, line, what.c_str(), detail.c_str());
  std::exit(1);
}

void empty(const char* file, int line, const std::string& text) {
  if (!text.empty()) failed(file, line, "not empty", text);
}

void contains(const char* file, int line, const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) failed(file, line, "missing: " + part, "in: " + text);
}

Outcome run(Shape shape, const std::function<void()>& body, emu::Options options) {
  emu_configure(&options);
  emu_reset();
  try {
    emu::run_grid(
        {"kernel", {shape.blocks, 1, 1}, {shape.threads, 1, 1}, {shape.cluster, 1, 1}, 0, shape.shared, shape.early},
        body);
  } catch (const std::runtime_error& e) {
    contains(__FILE__, __LINE__, emu_log(), e.what());
  }
  Outcome outcome{emu_log(), {}};
  emu_read_counters(&outcome.counters);
  return outcome;
}

void expect_clean(const char* file, int line, Shape shape, const std::function<void()>& body) {
  for (int schedule = 0; schedule < 4; ++schedule)
    for (int timing = 0; timing < 3; ++timing) {
      const Outcome outcome = run(shape, body, {.schedule = schedule, .async_timing = timing, .seed = 3, .races = 1});
      if (!outcome.log.empty())
        failed(file, line, std::string("not clean: ") + kSchedules[schedule] + ", " + kTimings[timing], outcome.log);
    }
}

void expect_finding(const char* file, int line, Shape shape, const std::function<void()>& body,
                    const std::string& part) {
  for (int schedule = 0; schedule < 4; ++schedule) {
    const Outcome outcome = run(shape, body, {.schedule = schedule, .races = 1});
    if (outcome.log.find(part) == std::string::npos)
      failed(file, line, std::string("missing under ") + kSchedules[schedule] + ": " + part, "in: " + outcome.log);
  }
}

uint16_t half_bits(float f, emu::Half type) {
  if (type == emu::Half::bf16) return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, f) >> 16);
  if (f == 0) return 0;
  const auto bits = __builtin_bit_cast(uint32_t, f);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - 0x38000000) >> 13);
}

}  // namespace test

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    const auto it = test::cases().find(names[i]);
    if (it == test::cases().end()) test::failed(__FILE__, __LINE__, "no such test", names[i]);
    it->second();
  }
  if (count == 1)
    for (const auto& [name, body] : test::cases()) {
      std::fprintf(stderr, "%s\n", name.c_str());
      body();
    }
}
