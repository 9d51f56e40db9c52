// PTX of Hopper: mbarriers, TMA, wgmma, register reallocation. One function an instruction, no policy inside.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"

namespace flashladder::ptx {

// --- mbarriers:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the async proxy; a __syncthreads() makes them known to the other threads.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and lets the phase also wait for `bytes` of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of that parity; the phase before the first counts as ended with parity 1.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// Whether the phase of that parity has ended, without a wait.
__device__ __forceinline__ bool mbarrier_test(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// --- TMA:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor

// Copies the map's box at these coordinates, innermost first, to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void tma_load(void* destination, const CUtensorMap* map, uint64_t* barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// tma_load() to each block of the cluster whose bit is set, at the same place; so are their barriers.
__device__ __forceinline__ void tma_load_multicast(void* destination, const CUtensorMap* map, uint64_t* barrier,
                                                   int column, int row, int head, int batch, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(blocks)
      : "memory");
}

// Copies the box at these coordinates from shared memory, as far as it lies inside the tensor; part of the thread's
// open group. What threads wrote there is to be ordered before by fence_async_shared().
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* source, int column, int row, int head,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(source)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory was read by all of the thread's groups.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// --- clusters:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster

__device__ __forceinline__ int cluster_blocks() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// What was done before the arrival of any thread of the cluster is seen after the wait. Warps arrive as a whole, and
// wait before they exit: a grid whose warps did not hung on an H200.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// mbarrier_arrive() at the barrier of a block of the cluster, by its rank. Orders no write of this thread.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{.reg .b32 address;\n"
      "mapa.shared::cluster.u32 address, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [address];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// --- named barriers:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar

// Waits until `threads` threads have come, those of barrier_arrive() included. 0 is __syncthreads()'s.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier_sync(), and whether `predicate` is true for any of the threads.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}

// Orders this thread's accesses to shared memory before those of the async proxy (TMA, wgmma) that a barrier orders
// after them.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// threadIdx.x, read anew where it is used: what follows from it holds no register in between.
__device__ __forceinline__ int thread_in_block() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// --- registers: https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg

template <int registers>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void drop_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// --- wgmma: https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions

// Orders a warpgroup's accesses to registers before the wgmma that come.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the warpgroup's groups are incomplete.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps what reads or writes these registers behind the wait before it, where a group had them.
template <int n>
__device__ __forceinline__ void pin(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// What a value comes from stands before this.
__device__ __forceinline__ void pin(int& x) { asm volatile("" : "+r"(x)::"memory"); }

// Descriptor of a matrix in rows of 128 bytes with the 128-byte swizzle: groups of 8 rows lie 1024 bytes apart.
// `panel`: bytes between blocks of 64 columns of a matrix that is read column by column (tnspB); else of no meaning.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t panel = 16) {
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(panel >> 4) << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

// A warpgroup's product of 64 rows: lane l of warp w holds rows 16 w + l / 4 and 8 further, columns c = 2 (l % 4) and
// the next of every 8: d[4 j], d[4 j + 1] at (row, 8 j + c), d[4 j + 2], d[4 j + 3] 8 rows below.
//   start:    d = a b^T, a and b in shared memory, k along their rows
//   add:      d += a b^T
//   add_rows: d += a b, a in registers as mma's (ptx.cuh), b's k along its columns
template <class T, int n>
struct Wgmma;

#define FLASHLADDER_D8(C, I)                                                                                         \
  C "f"(d[I]), C "f"(d[I + 1]), C "f"(d[I + 2]), C "f"(d[I + 3]), C "f"(d[I + 4]), C "f"(d[I + 5]), C "f"(d[I + 6]), \
      C "f"(d[I + 7])
#define FLASHLADDER_D32(C) FLASHLADDER_D8(C, 0), FLASHLADDER_D8(C, 8), FLASHLADDER_D8(C, 16), FLASHLADDER_D8(C, 24)
#define FLASHLADDER_D36(C) FLASHLADDER_D32(C), C "f"(d[32]), C "f"(d[33]), C "f"(d[34]), C "f"(d[35])
#define FLASHLADDER_D40(C) FLASHLADDER_D32(C), FLASHLADDER_D8(C, 32)
#define FLASHLADDER_D48(C) FLASHLADDER_D40(C), FLASHLADDER_D8(C, 40)
#define FLASHLADDER_D64(C) FLASHLADDER_D48(C), FLASHLADDER_D8(C, 48), FLASHLADDER_D8(C, 56)
#define FLASHLADDER_D80(C) FLASHLADDER_D64(C), FLASHLADDER_D8(C, 64), FLASHLADDER_D8(C, 72)
#define FLASHLADDER_D32_NAMES                                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHLADDER_D36_NAMES \
  FLASHLADDER_D32_NAMES       \
  ", "                        \
  "%32, %33, %34, %35"
#define FLASHLADDER_D40_NAMES \
  FLASHLADDER_D32_NAMES       \
  ", "                        \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHLADDER_D48_NAMES \
  FLASHLADDER_D40_NAMES       \
  ", "                        \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHLADDER_D64_NAMES \
  FLASHLADDER_D48_NAMES       \
  ", "                        \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHLADDER_D80_NAMES \
  FLASHLADDER_D64_NAMES       \
  ", "                        \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"

// N: columns of d, R: registers of d, R1 to R4: the operands after them.
#define FLASHLADDER_WGMMA(T, NAME, N, R, R1, R2, R3, R4)                                                         \
  template <>                                                                                                    \
  struct Wgmma<T, N> {                                                                                           \
    static __device__ __forceinline__ void start(float (&d)[R], uint64_t a, uint64_t b) {                        \
      asm volatile(                                                                                              \
          "{.reg .pred p; setp.ne.b32 p, 0, 0;\n"                                                                \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FLASHLADDER_D##R##_NAMES          \
          "}, %" #R ", %" #R1 ", p, 1, 1, 0, 0;}"                                                                \
          : FLASHLADDER_D##R("=")                                                                                \
          : "l"(a), "l"(b));                                                                                     \
    }                                                                                                            \
    static __device__ __forceinline__ void add(float (&d)[R], uint64_t a, uint64_t b) {                          \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FLASHLADDER_D##R##_NAMES \
                   "}, %" #R ", %" #R1 ", 1, 1, 1, 0, 0;"                                                        \
                   : FLASHLADDER_D##R("+")                                                                       \
                   : "l"(a), "l"(b));                                                                            \
    }                                                                                                            \
    static __device__ __forceinline__ void add_rows(float (&d)[R], const uint32_t* a, uint64_t b) {              \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FLASHLADDER_D##R##_NAMES \
                   "}, {%" #R ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4 ", 1, 1, 1, 1;"                           \
                   : FLASHLADDER_D##R("+")                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
    }                                                                                                            \
  };
#define FLASHLADDER_WGMMAS(T, NAME)                   \
  FLASHLADDER_WGMMA(T, NAME, 64, 32, 33, 34, 35, 36)  \
  FLASHLADDER_WGMMA(T, NAME, 72, 36, 37, 38, 39, 40)  \
  FLASHLADDER_WGMMA(T, NAME, 80, 40, 41, 42, 43, 44)  \
  FLASHLADDER_WGMMA(T, NAME, 96, 48, 49, 50, 51, 52)  \
  FLASHLADDER_WGMMA(T, NAME, 128, 64, 65, 66, 67, 68) \
  FLASHLADDER_WGMMA(T, NAME, 160, 80, 81, 82, 83, 84)
FLASHLADDER_WGMMAS(__half, "f16")
FLASHLADDER_WGMMAS(__nv_bfloat16, "bf16")

}  // namespace flashladder::ptx
