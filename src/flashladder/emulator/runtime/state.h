// State of the running cluster, shared by the runtime's files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "banks.h"
#include "emulator.h"
#include "race.h"

namespace emu {

constexpr uint32_t kRankShift = 24;  // a window address is rank << 24 | offset
constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;
constexpr uint32_t kMaxCluster = 16;
constexpr uint32_t kSharedStart = 1024;  // the hardware reserves the first KiB
constexpr uint32_t kMaxShared = 232448;
constexpr uint32_t kFullWarp = 0xffffffffu;

// --- text, chance (report.cpp) -----------------------------------------------------------------------------------

[[gnu::format(printf, 1, 2)]] std::string format(const char*, ...);
const char* base_name(const char* path);
std::string place(Loc);               // "file:line"
std::string block_text(const Dim3&);  // "block (x,y,z)"
void seed_random(uint64_t);
uint32_t random_bits();
uint32_t random_below(uint32_t n);
inline bool one_in(uint32_t n) { return random_below(n) == 0; }
bool early();  // whether asynchronous work that is issued now takes effect at once

extern const char* kernel_name;
extern uint64_t log_generation;       // grows whenever the log is cleared
extern bool faulted;                  // by set_fault(): the launch ends
void set_fault(std::string message);  // the first one counts
const std::string& fault_text();

// --- threads (schedule.cpp) --------------------------------------------------------------------------------------

enum class Status : uint8_t { ready, yielded, blocked, done };

struct Wait {
  const char* what = "start";
  const char* detail = "";  // printf format of `operand`
  uint32_t operand = 0;
  Loc loc{"?", 0};
};

// Asynchronous copies by one thread, in the order issued.
struct AsyncCopy {
  unsigned char* target;
  const void* source;
  uint32_t bytes, source_bytes, epoch;
  bool done, tracked;  // tracked: by an mbarrier
};
struct BulkStore {
  uint32_t group;
  bool done;
  Loc loc;
  std::function<void()> run;
};

struct ThreadState : Thread {
  uint32_t index;  // in the cluster
  Status status;
  void* stack_pointer;
  Wait wait;
  uint32_t barrier_result;
  bool cluster_arrived, waited_for_grids;
  std::vector<AsyncCopy> copies;
  uint32_t copy_epoch;               // of the next copy; grows at a commit and at an mbarrier arrival; from 1
  std::vector<uint32_t> group_ends;  // last epoch of each committed group
  std::vector<BulkStore> stores;
  uint32_t store_group;
  race::ThreadClock clock;
};

struct WarpState;
// Runs once all lanes of a collective are there; argument[lane] is what each passed.
using Complete = void (*)(void* const* argument, uint32_t lanes, WarpState&);

struct Meeting {
  uint32_t code;
  const char* name;
  uint32_t mask, arrived;
  Complete complete;
  Loc loc;
  void* argument[32];
};

struct WarpState {
  uint32_t index, first_thread, live, ready, priority, rotation;
  std::vector<Meeting> meetings;
  bool wgmma_fenced;
};

struct Barrier {
  int32_t expected = 0;
  uint32_t arrived = 0, kind = 0;
  std::vector<uint32_t> waiting;
  uint32_t count = 0, every = 1, any = 0;
  race::SyncClock clock;
};

struct BlockState {
  Dim3 ctaid;
  uint32_t first_warp, live;
  Barrier barriers[16];
};

struct WgmmaIssue {  // one instruction, which the four warps issue at different times
  uint64_t desc_a, desc_b;
  uint32_t n, flags, group, issued;
  Loc loc;
  uint32_t site;
};

struct Warpgroup {
  std::vector<WgmmaIssue> issues;  // those that not all warps have issued
  uint32_t first_issue = 0;        // number of issues[0]
  uint32_t issued[4] = {};         // wgmmas of each warp
  uint32_t committed[4] = {};      // groups of each warp
  uint32_t open[4] = {};           // wgmmas of each warp since its last commit
  uint32_t waited = 0;             // the groups up to here are complete
  Loc last{"?", 0};
  std::vector<uint32_t> waiting;
};

extern std::vector<ThreadState> threads;
extern std::vector<WarpState> warps;
extern std::vector<BlockState> blocks;
extern std::vector<Warpgroup> warpgroups;
extern uint32_t threads_per_block, warps_per_block, live_threads;

inline ThreadState& me() { return *static_cast<ThreadState*>(current); }
inline WarpState& my_warp() { return warps[me().cluster_rank * warps_per_block + current->warp]; }
inline BlockState& my_block() { return blocks[current->cluster_rank]; }

void block_current(const Wait&);
void wake(uint32_t thread);
void leave_fiber();  // back to the scheduler

// Work of an asynchronous engine: runs now (early), or when the scheduler says so.
void engine_submit(std::string what, std::function<void()> run);

// --- fibers (fiber.cpp), faults (fault.cpp) ----------------------------------------------------------------------

extern "C" void emu_switch(void** save, void* load);
void reserve_fibers(uint32_t count);
void* make_fiber(uint32_t index, void (*entry)());  // entry must not return
bool in_fiber_stack(uint32_t index, uint64_t address, uint32_t bytes);
bool in_fiber_guard(uint32_t index, uint64_t address);
void* fiber_top(uint32_t index);

class SignalGuard {  // memory faults and divisions by zero of a fiber become faults of the launch
 public:
  SignalGuard();
  ~SignalGuard();
};

// --- memory (memory.cpp) -----------------------------------------------------------------------------------------

void layout_shared(uint32_t static_bytes, uint32_t dynamic_bytes);
void expect_waits(bool expected);  // of the threads of the grid that runs, before global memory
void poison_shared(uint32_t ranks);
void select_block(uint32_t rank);  // makes its memory the fast path's
uint32_t shared_extent();          // bytes from offset 0 to the end of a block's memory
constexpr uint64_t kWindowBytes = static_cast<uint64_t>(kMaxCluster) << kRankShift;  // of generic addresses
// Like shared(), but tells the race detector nothing.
unsigned char* shared_pointer(uint64_t address, uint32_t bytes, uint32_t align, const char* what, Loc);

// shared(), watched for races but not for bank conflicts.
void* shared_without_banks(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc);
std::string describe_fault(uint64_t address);  // which allocation is near
std::string shared_text(uint64_t address);     // "0x40" or "0x40 of rank 1"

// --- collectives and barriers ------------------------------------------------------------------------------------

enum class Op : uint32_t {
  shuffle = 1,
  vote,
  redux,
  match,
  elect,
  sync_warp,
  ldmatrix,
  stmatrix,
  mma,
  wmma_load,
  wmma_mma,
  wmma_store,
  wgmma,
  wgmma_fence,
  wgmma_commit,
  wgmma_wait,
  set_max_registers,
};
constexpr uint32_t code(Op op, uint32_t detail = 0) { return static_cast<uint32_t>(op) | detail << 5; }

// All lanes of `mask` that have not exited meet; lanes that bring different codes or masks have diverged.
void collective(uint32_t code, const char* name, uint32_t mask, void* argument, Complete, Loc);
void aligned_collective(uint32_t code, const char* name, void* argument, Complete, Loc);  // all 32 lanes
inline void no_effect(void* const*, uint32_t, WarpState&) {}
void finish_meetings(WarpState&);   // after a lane's exit
void finish_barriers(BlockState&);  // after a thread's exit
void finish_cluster_barrier();
void reset_cluster_barrier();
std::string barriers_text();  // for the deadlock report

void finish_copies(ThreadState&);  // at a thread's exit
void finish_stores(ThreadState&);

void reset_mbarriers();
std::string mbarriers_text();
void finish_warpgroups();
uint32_t swizzle_address(uint32_t address, uint32_t mode);  // mode as in TensorMap

// mbarriers as asynchronous work sees them. A ticket names one phase of one mbarrier.
struct Ticket {
  uint32_t index, generation, phase;
};
Ticket mbarrier_ticket(uint64_t address, const char* what, Loc);  // for work that the running thread issues
void mbarrier_complete_tx(const Ticket&, uint32_t bytes);
void mbarrier_add_pending(const Ticket&);
void mbarrier_arrive_for(const Ticket&, const ThreadState&, const race::ThreadClock&, Loc);
void mbarrier_check_fenced(const Ticket&, const char* what, Loc);

// --- numbers (half.cpp) ------------------------------------------------------------------------------------------

extern const float* const fp16_table;
inline float to_float(uint16_t x, Half type) {
  if (type == Half::fp16) return fp16_table[x];
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}
uint16_t to_fp16(float);
uint16_t to_bf16(float);

}  // namespace emu
