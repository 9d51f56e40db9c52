// What translated kernels and the CUDA runtime stand-in call. One CUDA thread is one fiber; one block (or cluster) runs
// at a time. Every function that can fail or switch fibers takes the source location of the instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emu {

struct Loc {
  const char* file;
  int line;
};

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

// --- configuration and counters ----------------------------------------------------------------------------------

enum class Schedule : int32_t { fifo, reverse, random, priority };
// When asynchronous work (cp.async, TMA, wgmma) takes effect: at once, as late as a wait allows, or at random between.
enum class AsyncTiming : int32_t { early, late, random };

struct Options {
  int32_t schedule = 0;      // Schedule
  int32_t async_timing = 1;  // AsyncTiming
  uint64_t seed = 1;
  int32_t races = 0;   // 1: vector-clock race detector on shared memory, mbarriers and the async proxy
  int32_t poison = 1;  // 1: shared memory and in-flight destinations hold NaN patterns
  int32_t max_reports = 8;
  int32_t multiprocessors = 132;  // of the device that the host code asks about
};

struct Counters {
  uint64_t blocks, switches, barriers, shuffles, shared_accesses;
  uint64_t ldmatrix, bank_conflicts;  // extra wavefronts over the conflict-free count, of all shared-memory accesses
  uint64_t mma, wgmma, cp_async, tma;
};

extern Options options;
extern Counters counters;

// --- the running thread ------------------------------------------------------------------------------------------

struct Thread {
  Dim3 tid, ctaid;
  uint32_t linear, warp, lane;  // within the block
  uint32_t cluster_rank;        // of its block in the cluster; 0 without clusters
};

extern Thread* current;
extern Dim3 grid_dim, block_dim, cluster_dim;

// Runs every block of the grid; `body` is one thread's whole execution. Throws std::runtime_error after the first
// fault.
struct Launch {
  const char* kernel;
  Dim3 grid, block, cluster;
  uint32_t static_shared, dynamic_shared;  // static: rounded up to the alignment that the dynamic part needs
  bool early = false;  // it may start before the grid ahead of it ends: no global memory before griddepcontrol.wait
};
void run_grid(const Launch&, const std::function<void()>& body);

// A fault: ends the launch; the log names kernel, location, block and thread.
[[noreturn, gnu::format(printf, 2, 3)]] void fail(Loc, const char* format, ...);
void report(const std::string&);  // a finding that does not stop the launch (a race)
const std::string& log_text();    // findings and the fault of the launches since clear_log()
void clear_log();

// --- memory ------------------------------------------------------------------------------------------------------

// Device allocations end at a guard page; every global access must lie inside one (or in memory that adopt() named).
void* device_alloc(size_t bytes);
void device_free(void*);
void adopt(const void*, size_t bytes);  // host memory that kernels may access; adopt(p, 0) forgets it

// Checked pointers for an access of `bytes` at `address`, aligned to `align`. `address` of shared accesses is an
// address in the shared window (32 bits; cluster addresses carry the owner's rank). `what` names the instruction.
inline void* global(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc);
inline void* shared(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc);
// Either, by address; also the thread's own local memory.
void* generic(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc);
uint64_t shared_base();                             // window address of the running block's static shared memory
uint64_t dynamic_shared_base();                     // window address of its dynamic shared memory, after the static
uint64_t to_generic(uint64_t shared_address, Loc);  // cvta.shared
uint64_t to_shared(uint64_t generic_address, Loc);  // cvta.to.shared
// The race detector must not see an atomic's read-modify-write as plain accesses: call this instead of shared().
void* atomic(uint64_t address, uint32_t bytes, bool is_shared, const char* what, Loc);

// The fast paths of global() and shared(): an access inside the region that the last one from this line hit, or inside
// the running block's own memory while nothing has to be recorded.
struct Region {
  uint64_t low, high;
  bool holds(uint64_t address, uint32_t bytes) const {
    return address >= low && address < high && bytes <= high - address;
  }
};
extern Region recent_regions[16];
struct SharedWindow {
  unsigned char* base;         // of window address 0
  uint64_t low, high;          // window addresses of the running block's memory
  uint64_t gap_low, gap_high;  // between its static and its dynamic part
  bool recorded;               // the race detector sees every access
  bool holds(uint64_t address, uint32_t bytes) const {
    return Region{low, high}.holds(address, bytes) && (address >= gap_high || address + bytes <= gap_low);
  }
};
extern SharedWindow window;
void* global_checked(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc);
void* shared_checked(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc);

inline void* global(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc loc) {
  const Region& r = recent_regions[loc.line & 15];
  if (r.holds(address, bytes) && (address & (align - 1)) == 0) return reinterpret_cast<void*>(address);
  return global_checked(address, bytes, align, write, what, loc);
}

inline void* shared(uint64_t address, uint32_t bytes, uint32_t align, bool write, const char* what, Loc loc) {
  ++counters.shared_accesses;
  if (!window.recorded && window.holds(address, bytes) && (address & (align - 1)) == 0) return window.base + address;
  return shared_checked(address, bytes, align, write, what, loc);
}

// --- warps -------------------------------------------------------------------------------------------------------

enum class Shuffle { idx, bfly, up, down };
uint32_t shuffle(Shuffle, uint32_t value, uint32_t lane_operand, uint32_t clamp, uint32_t mask, bool* in_range, Loc);
enum class Vote { any, all, uni, ballot };
uint32_t vote(Vote, bool predicate, uint32_t mask, Loc);
enum class Redux { add, min_u, max_u, min_s, max_s, and_, or_, xor_ };
uint32_t redux(Redux, uint32_t value, uint32_t mask, Loc);
uint32_t match_any(uint64_t value, uint32_t mask, Loc);
uint32_t active_mask();
bool elect(uint32_t mask, Loc);
void sync_warp(uint32_t mask, Loc);
void yield(const char* what, Loc);
void wait_for_grids_ahead();  // griddepcontrol.wait

// --- barriers ----------------------------------------------------------------------------------------------------

void barrier_sync(uint32_t id, int32_t threads, Loc);  // threads < 0: the whole block
void barrier_arrive(uint32_t id, int32_t threads, Loc);
// barrier.red: everyone gets the reduction of the predicates (popc, and, or).
enum class BarrierRed { popc, and_, or_ };
uint32_t barrier_reduce(BarrierRed, uint32_t id, int32_t threads, bool predicate, Loc);
void cluster_arrive(bool release, Loc);
void cluster_wait(Loc);
uint64_t map_to_rank(uint64_t shared_address, uint32_t rank, Loc);  // mapa.shared::cluster
uint32_t cluster_size();

// --- Ampere: cp.async, matrices ----------------------------------------------------------------------------------

void cp_async(uint64_t shared_dst, uint64_t global_src, uint32_t bytes, uint32_t source_bytes, Loc);
void cp_async_commit(Loc);
void cp_async_wait(int32_t groups_left, Loc);  // < 0: cp.async.wait_all
void cp_async_mbarrier_arrive(uint64_t mbarrier, bool noinc, Loc);
void ldmatrix(uint32_t* r, uint32_t count, bool transposed, uint64_t address, Loc);
void stmatrix(const uint32_t* r, uint32_t count, bool transposed, uint64_t address, Loc);

enum class Half { fp16, bf16 };
// mma.sync row.col: m16n8k16 (4, 2 registers) and m16n8k8 (2, 1); accumulators fp32, or fp16 packed (d, c are
// uint32_t[2]).
void mma_m16n8(float* d, const uint32_t* a, const uint32_t* b, const float* c, uint32_t k, Half, Loc);
void mma_m16n8_fp16(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t k, Loc);
// wmma.{load,mma,store} m16n16k16. The fragment map is the emulator's own: kernels may not assume one.
void wmma_load(uint32_t* r, char operand /* a b */, bool row_major, uint64_t address, uint32_t stride, bool is_shared,
               Half, Loc);
void wmma_load_c(float* r, bool row_major, uint64_t address, uint32_t stride, bool is_shared, Loc);
void wmma_mma(float* d, const uint32_t* a, bool a_row, const uint32_t* b, bool b_row, const float* c, Half, Loc);
void wmma_store_d(const float* r, bool row_major, uint64_t address, uint32_t stride, bool is_shared, Loc);

// --- Hopper: mbarrier, TMA, wgmma --------------------------------------------------------------------------------

void mbarrier_init(uint64_t address, uint32_t count, Loc);
void mbarrier_inval(uint64_t address, Loc);
uint64_t mbarrier_arrive(uint64_t address, uint32_t count, Loc);  // the state token; address may be another block's
uint64_t mbarrier_expect_tx(uint64_t address, uint32_t bytes, bool arrive, Loc);
bool mbarrier_try_wait(uint64_t address, uint32_t parity, bool may_block, Loc);
bool mbarrier_test_token(uint64_t address, uint64_t token, Loc);

enum class Proxy { async_shared, async_global, async_all };
void fence_proxy(Proxy, Loc);
void fence_mbarrier_init(Loc);

// The emulator's tensor map, stored inside the opaque 128-byte CUtensorMap.
struct TensorMap {
  uint64_t magic, base, dim[5], stride_bytes[5];  // stride_bytes[0] is the element size
  uint32_t box[5];
  uint8_t rank, element_bytes, swizzle /* 0 none, 1 32 B, 2 64 B, 3 128 B */, type /* Element */;
};
enum class Element : uint8_t { unknown, u32, s32, fp16, bf16, fp32 };  // reduce-add needs to know
static_assert(sizeof(TensorMap) <= 128);
// Throws std::invalid_argument for what cuTensorMapEncodeTiled would refuse.
void encode_tensor_map(void* map, uint32_t rank, uint32_t element_bytes, void* base, const uint64_t* dim,
                       const uint64_t* stride_bytes, const uint32_t* box, uint32_t swizzle,
                       Element type = Element::unknown);
// multicast_mask 0: the running block only.
void tma_load(uint64_t shared_dst, const void* map, uint64_t mbarrier, uint32_t rank, const int32_t* coordinates,
              uint16_t multicast_mask, Loc);
void tma_store(const void* map, uint64_t shared_src, uint32_t rank, const int32_t* coordinates, bool reduce_add, Loc);
void bulk_load(uint64_t shared_dst, uint64_t global_src, uint32_t bytes, uint64_t mbarrier, Loc);  // cp.async.bulk
void bulk_store(uint64_t global_dst, uint64_t shared_src, uint32_t bytes, Loc);
void bulk_to_cluster(uint64_t shared_dst, uint64_t shared_src, uint32_t bytes, uint64_t mbarrier, Loc);
void bulk_commit(Loc);
void bulk_wait(uint32_t groups_left, bool read_only, Loc);

void wgmma_fence(Loc);
void wgmma_commit(Loc);
void wgmma_wait(uint32_t groups_left, Loc);
// m64nNk16, fp32 accumulators (n / 2 registers). a == nullptr: A from shared memory by desc_a. The result registers are
// valid at once: ptxas's "serialized" warnings, which fail the build, stand for their hazards. site: one of each
// instruction of the kernel.
void wgmma(float* d, uint32_t n, const uint32_t* a, uint64_t desc_a, uint64_t desc_b, bool scale_d, bool transpose_a,
           bool transpose_b, Half, Loc, uint32_t site = 0);
void set_max_registers(uint32_t count, bool increase, Loc);

// Window address of element (mn, k) of a wgmma operand, for tests of the descriptor decoding.
uint32_t wgmma_element_address(uint64_t desc, uint32_t mn, uint32_t k, bool mn_major);

// --- registry ----------------------------------------------------------------------------------------------------

// A translated kernel: gets the array of argument pointers that cudaLaunchKernel gets.
using Kernel = void (*)(void** arguments);
struct KernelInfo {
  Kernel run;
  uint32_t static_shared;
  Dim3 cluster;  // .reqnctapercluster, else 1 x 1 x 1
};
struct Registrar {  // a static object a translated kernel
  Registrar(const char* name, KernelInfo);
};
const KernelInfo* find_kernel(const std::string& name);

}  // namespace emu

// --- what Python calls -------------------------------------------------------------------------------------------

#define EMU_API __attribute__((visibility("default")))
extern "C" {
EMU_API void emu_configure(const emu::Options*);
EMU_API void emu_read_counters(emu::Counters*);
EMU_API void emu_reset(void);           // counters and log
EMU_API const char* emu_log(void);      // valid until the next launch or reset
EMU_API void* emu_alloc(size_t bytes);  // device_alloc
EMU_API void emu_free(void*);
}
