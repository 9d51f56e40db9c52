// Memory faults, divisions by zero and stack overflows of emulated threads become faults of the launch.
#include <signal.h>
#include <ucontext.h>

#include <cstring>

#include "state.h"

namespace emu {
namespace {

struct Handled {
  int signal;
  struct sigaction previous;
} handled[] = {{SIGSEGV, {}}, {SIGBUS, {}}, {SIGFPE, {}}};

char signal_stack[64 << 10];
stack_t previous_stack;

void abandon_fiber() {
  leave_fiber();
  __builtin_trap();
}

std::string describe(int signal, uint64_t address) {
  if (signal == SIGFPE) return "integer division by zero";
  if (in_fiber_guard(me().index, address)) return "stack overflow";
  return format("memory fault at 0x%llx%s", static_cast<unsigned long long>(address), describe_fault(address).c_str());
}

// The fault is synchronous and there is one OS thread, so the handler may allocate. The faulting fiber is never
// resumed: it leaves from the top of its own stack.
void on_signal(int signal, siginfo_t* info, void* context) {
  if (!current) {
    for (Handled& h : handled)
      if (h.signal == signal) sigaction(signal, &h.previous, nullptr);
    return;  // faults again, under the previous handler
  }
  const ThreadState& t = me();
  set_fault(format("%s: %s: %s thread (%u,%u,%u): %s (the last location known is that of its last wait)", kernel_name,
                   place(t.wait.loc).c_str(), block_text(t.ctaid).c_str(), t.tid.x, t.tid.y, t.tid.z,
                   describe(signal, reinterpret_cast<uint64_t>(info->si_addr)).c_str()));
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  registers[REG_RSP] = static_cast<greg_t>(reinterpret_cast<uint64_t>(fiber_top(t.index)) - 8);
  registers[REG_RIP] = reinterpret_cast<greg_t>(abandon_fiber);
}

}  // namespace

SignalGuard::SignalGuard() {
  stack_t stack{};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (Handled& h : handled) sigaction(h.signal, &action, &h.previous);
}

SignalGuard::~SignalGuard() {
  for (Handled& h : handled) sigaction(h.signal, &h.previous, nullptr);
  sigaltstack(&previous_stack, nullptr);
}

}  // namespace emu
