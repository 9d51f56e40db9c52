// One fiber a CUDA thread: a stack that ends at a guard page, and a switch that saves the callee-saved registers.
#include <sys/mman.h>

#include <stdexcept>

#include "state.h"

#if !defined(__x86_64__)
#error "the context switch is written for x86-64 (System V)"
#endif

asm(R"(
.text
.p2align 4
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");

namespace emu {
namespace {

constexpr size_t kStackBytes = 256 << 10, kGuardBytes = 4096;
char* stacks = nullptr;
uint32_t stack_count = 0;

char* stack_of(uint32_t index) { return stacks + index * kStackBytes; }

}  // namespace

void reserve_fibers(uint32_t count) {
  if (count <= stack_count) return;
  if (stacks) munmap(stacks, stack_count * kStackBytes);
  stack_count = 0;
  void* map =
      mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::runtime_error("no memory for the stacks of the emulated threads");
  stacks = static_cast<char*>(map);
  stack_count = count;
  for (uint32_t i = 0; i < count; ++i) mprotect(stack_of(i), kGuardBytes, PROT_NONE);
}

// What emu_switch pops: six registers, the entry, and a null return address that keeps rsp % 16 == 8 at entry.
void* make_fiber(uint32_t index, void (*entry)()) {
  void** top = static_cast<void**>(fiber_top(index));
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}

void* fiber_top(uint32_t index) { return stack_of(index) + kStackBytes; }

bool in_fiber_stack(uint32_t index, uint64_t address, uint32_t bytes) {
  const uint64_t low = reinterpret_cast<uint64_t>(stack_of(index)) + kGuardBytes;
  return Region{low, low - kGuardBytes + kStackBytes}.holds(address, bytes);
}

bool in_fiber_guard(uint32_t index, uint64_t address) {
  return address - reinterpret_cast<uint64_t>(stack_of(index)) < kGuardBytes;
}

}  // namespace emu
