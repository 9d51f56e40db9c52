// Kernels as lambdas: each runs as one thread of a launch on the emulator.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "emulator.h"

#define HERE \
  emu::Loc { __FILE__, __LINE__ }

namespace test {

struct Case {
  Case(const char* name, void (*run)());
};

#define TEST(NAME)                                  \
  static void NAME();                               \
  static const test::Case case_##NAME(#NAME, NAME); \
  static void NAME()

#define CHECK(CONDITION)                                                \
  do {                                                                  \
    if (!(CONDITION)) test::failed(__FILE__, __LINE__, #CONDITION, ""); \
  } while (0)

// `text` must contain `part`.
#define CHECK_CONTAINS(TEXT, PART) test::contains(__FILE__, __LINE__, TEXT, PART)
#define CHECK_EMPTY(TEXT) test::empty(__FILE__, __LINE__, TEXT)
#define CHECK_EQUAL(A, B) test::equal(__FILE__, __LINE__, #A, A, B)

[[noreturn]] void failed(const char* file, int line, const std::string& what, const std::string& detail);
void empty(const char* file, int line, const std::string& text);
void contains(const char* file, int line, const std::string& text, const std::string& part);

template <class A, class B>
void equal(const char* file, int line, const char* what, const A& a, const B& b) {
  if (!(a == static_cast<A>(b))) failed(file, line, what, std::to_string(a) + " != " + std::to_string(b));
}

struct Shape {
  uint32_t threads = 32;
  uint32_t shared = 1024;
  uint32_t blocks = 1;
  uint32_t cluster = 1;
  bool early = false;
};

struct Outcome {
  std::string log;  // findings and the fault
  emu::Counters counters;
};

Outcome run(Shape, const std::function<void()>& body, emu::Options = {.races = 1});

// No finding under any schedule and timing.
#define EXPECT_CLEAN(...) test::expect_clean(__FILE__, __LINE__, __VA_ARGS__)  // shape, body
// A finding that contains the part, under every schedule.
#define EXPECT_FINDING(...) test::expect_finding(__FILE__, __LINE__, __VA_ARGS__)  // shape, body, part
void expect_clean(const char* file, int line, Shape, const std::function<void()>& body);
void expect_finding(const char* file, int line, Shape, const std::function<void()>& body, const std::string& part);

// --- inside a kernel ---------------------------------------------------------------------------------------------

inline uint32_t thread() { return emu::current->linear; }
inline uint32_t lane() { return emu::current->lane; }
inline uint64_t smem(uint32_t offset = 0) { return emu::dynamic_shared_base() + offset; }

template <class T>
void store(uint64_t address, T value, emu::Loc loc) {
  std::memcpy(emu::shared(address, sizeof value, sizeof value, true, "st.shared", loc), &value, sizeof value);
}

template <class T>
T load(uint64_t address, emu::Loc loc) {
  T value;
  std::memcpy(&value, emu::shared(address, sizeof value, sizeof value, false, "ld.shared", loc), sizeof value);
  return value;
}

inline void syncthreads(emu::Loc loc) { emu::barrier_sync(0, -1, loc); }
inline void wait(uint64_t mbarrier, uint32_t parity, emu::Loc loc) {
  while (!emu::mbarrier_try_wait(mbarrier, parity, true, loc)) {
  }
}

struct alignas(16) Sixteen {
  uint32_t x[4];
};

// --- numbers -----------------------------------------------------------------------------------------------------

// Small integers: exact in fp16 and bf16, and so are their dot products in fp32.
inline float small_value(uint32_t i, uint32_t j) {
  return static_cast<float>(static_cast<int>((i * 7 + j * 13) % 9) - 4);
}
uint16_t half_bits(float, emu::Half);

// Device memory, freed at the end.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : data_(static_cast<unsigned char*>(emu::device_alloc(bytes))) {
    std::memset(data_, 0, bytes);
  }
  ~Buffer() { emu::device_free(data_); }
  Buffer(const Buffer&) = delete;
  uint64_t address() const { return reinterpret_cast<uint64_t>(data_); }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  unsigned char* data_;
};

}  // namespace test
