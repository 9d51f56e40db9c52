// Tensor maps of the operands and of O, whose boxes of rows TMA reads and writes: encoded on the host for every call,
// never kept.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "plan.h"
#include "ptx_hopper.cuh"
#include "schedule.h"
#include "tensor.cuh"

namespace flashladder {

constexpr int kPanelColumns = 64;  // of a box: 128 bytes, as far as the swizzle reaches

// (batch, heads, rows, head_dim) in boxes of kPanelColumns; what lies outside reads as 0.
struct TensorMap {
  CUtensorMap map;
  int32_t head_step, batch_step;  // 0 along an axis that repeats one entry: TMA knows no stride 0
};

struct TensorMaps {
  TensorMap q, k, v;
};

constexpr int kStoreRows = 16;  // of a box of O: a warp's

// With where O goes.
struct StoreMaps : TensorMaps {
  TensorMap o;
};

// With the blocks' places.
struct PlacedMaps : StoreMaps {
  Places places;
};

constexpr bool is_balanced(const Config& config) { return config.balanced && config.persistent; }

template <Config C>
using MapsOf = std::conditional_t<is_balanced(C), PlacedMaps, std::conditional_t<C.tma_store, StoreMaps, TensorMaps>>;

// Brings rows from `row` on, one panel of columns after the other: one thread asks, `arrival` counts the bytes.
template <class T, int panels, int rows>
__device__ void load_panels(Chunk<T> (&to)[panels][rows][kPanelColumns / 8], const TensorMap& map, uint64_t* arrival,
                            int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < panels; ++panel)
    ptx::tma_load(to[panel], &map.map, arrival, panel * kPanelColumns, row, head * map.head_step,
                  batch * map.batch_step);
}

// Internal: a process has one copy of an inline function's static variable, and libraries on a GPU and on the emulator
// have each their own encoder.
static decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
        cudaSuccess)
      function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// Strides as tma_reads() (rung.h) takes them. A tensor without rows gets no map: no kernel reads from it.
inline cudaError_t encode(TensorMap& to, Dtype dtype, const void* tensor, const Strides& strides, const Params& p,
                          int heads, int rows, int box_rows) {
  to.head_step = heads > 1 && strides.head != 0;
  to.batch_step = p.batch > 1 && strides.batch != 0;
  if (rows == 0) return cudaSuccess;
  const auto encoder = tensor_map_encoder();
  if (encoder == nullptr) return cudaErrorNotSupported;
  const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride != 0 ? stride * 2 : 16); };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(p.head_dim), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(to.head_step ? heads : 1),
                              static_cast<cuuint64_t>(to.batch_step ? p.batch : 1)};
  const cuuint64_t steps[] = {bytes(strides.row), bytes(strides.head), bytes(strides.batch)};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1}, every[] = {1, 1, 1, 1};
  const CUresult result =
      encoder(&to.map, dtype == Dtype::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
              const_cast<void*>(tensor), sizes, steps, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t encode(TensorMaps& maps, const Params& p, Dtype dtype, int tile_m, int tile_n) {
  if (const auto error = encode(maps.q, dtype, p.q, p.q_strides, p, p.heads_q, p.seq_q, tile_m)) return error;
  if (const auto error = encode(maps.k, dtype, p.k, p.k_strides, p, p.heads_kv, p.seq_k, tile_n)) return error;
  return encode(maps.v, dtype, p.v, p.v_strides, p, p.heads_kv, p.seq_k, tile_n);
}

// A kernel that reads its operands by TMA, and how it is launched.
struct TmaInstance {
  const void* kernel;  // of Params and what MapsOf says
  int tile_m, tile_n, threads, shared_bytes;
  bool persistent;  // a block an SM, at most one a query tile
  bool tiles_last;  // of a grid's axes: the blocks of a tile of all heads start together
  bool tma_store;
  bool multicast;  // in clusters of kClusterBlocks, where cluster_of() says so
  bool early_launch;
  void (*balance)(Places&, const Params&, int blocks);  // null: blocks find their places alone
};

inline dim3 blocks(const TmaInstance& instance, const Params& p, int device) {
  const dim3 all = blocks(p, instance.tile_m);
  if (instance.tiles_last) return dim3(all.y, all.z, all.x);
  if (!instance.persistent) return all;
  const int64_t count = static_cast<int64_t>(all.x) * all.y * all.z;
  const int most = instance.balance != nullptr ? kPlacedBlocks : 1 << 30;
  return dim3(static_cast<unsigned>(std::min<int64_t>(count, std::min(multiprocessors(device), most))));
}

constexpr int kClusterBlocks = 2;

// Blocks of a cluster, of neighbouring query tiles of a head, which must see the same keys. In a grid that leaves many
// multiprocessors idle clusters crowd on some: in a trial B2 H8 S256 D128 took an H200 3 to 9 % longer, and B2 H8 S512
// D128 whose heads share K and V 3 %.
inline unsigned cluster_of(const TmaInstance& instance, const Params& p, dim3 grid, int device) {
  const int64_t count = static_cast<int64_t>(grid.x) * grid.y * grid.z;
  const bool pairs = instance.multicast && !p.causal && p.heads_q == p.heads_kv && grid.z % kClusterBlocks == 0;
  return pairs && fill(count, multiprocessors(device)) ? kClusterBlocks : 1;
}

template <class Forward>
constexpr bool multicasts() {
  if constexpr (requires { Forward::kMulticast; }) return Forward::kMulticast != Multicast::none;
  return false;
}

// Of a forward pass that has one.
template <class Forward>
constexpr auto balance_of() -> void (*)(Places&, const Params&, int) {
  if constexpr (requires { Forward::kBalanced; })
    if constexpr (Forward::kBalanced) return Forward::balance_blocks;
  return nullptr;
}

inline int launch(const TmaInstance& instance, const Params& p, Dtype dtype, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  if (guard.error != cudaSuccess) return guard.error;
  if (const cudaError_t error = allow_shared(instance.kernel, instance.shared_bytes, device)) return error;
  return for_batches(p, [&](Params part) {
    PlacedMaps maps{};
    const dim3 grid = blocks(instance, part, device);
    if (instance.balance != nullptr) instance.balance(maps.places, part, static_cast<int>(grid.x));
    if (const cudaError_t error = encode(maps, part, dtype, instance.tile_m, instance.tile_n)) return error;
    if (instance.tma_store)
      if (const auto error = encode(maps.o, dtype, part.o, part.o_strides, part, part.heads_q, part.seq_q, kStoreRows))
        return error;
    void* arguments[] = {&part, &maps};
    const auto attributes = Attributes().early(instance.early_launch).cluster(cluster_of(instance, part, grid, device));
    return launch_with(attributes, instance.kernel, grid, instance.threads, arguments, instance.shared_bytes, stream);
  });
}

}  // namespace flashladder

#define FLASHLADDER_TMA_KERNEL(NAME, SUFFIX, BOUNDS, MAPS, CALL)                                          \
  extern "C" __global__ void __launch_bounds__ BOUNDS NAME(const __grid_constant__ flashladder::Params p, \
                                                           const __grid_constant__ MAPS maps)             \
      FLASHLADDER_DEFINED_##SUFFIX(FLASHLADDER_BODY_##SUFFIX(CALL;))

// One kernel for each dtype and head dimension, from FORWARD<CONFIG, T, D>.
#define FLASHLADDER_TMA_RUNG(ID, CONFIG, FORWARD)                                                        \
  FLASHLADDER_TMA_RUNG_KERNEL(ID, fp16_d64, CONFIG, FORWARD, __half, 64)                                 \
  FLASHLADDER_TMA_RUNG_KERNEL(ID, fp16_d128, CONFIG, FORWARD, __half, 128)                               \
  FLASHLADDER_TMA_RUNG_KERNEL(ID, bf16_d64, CONFIG, FORWARD, __nv_bfloat16, 64)                          \
  FLASHLADDER_TMA_RUNG_KERNEL(ID, bf16_d128, CONFIG, FORWARD, __nv_bfloat16, 128)                        \
  extern "C" const flashladder::Rung* flashladder_rung() {                                               \
    using namespace flashladder;                                                                         \
    static const TmaInstance instances[2][2] = {{ID##_instance_fp16_d64, ID##_instance_fp16_d128},       \
                                                {ID##_instance_bf16_d64, ID##_instance_bf16_d128}};      \
    static const DynamicShared shared[] = {{#ID "_fp16_d64", instances[0][0].shared_bytes},              \
                                           {#ID "_fp16_d128", instances[0][1].shared_bytes},             \
                                           {#ID "_bf16_d64", instances[1][0].shared_bytes},              \
                                           {#ID "_bf16_d128", instances[1][1].shared_bytes}};            \
    static const Rung rung{#ID,                                                                          \
                           CONFIG,                                                                       \
                           [](const Params& p, Dtype dtype, Tile, int device, void* stream) {            \
                             const TmaInstance& i = instances[static_cast<int>(dtype)][p.head_dim > 64]; \
                             return launch(i, p, dtype, device, static_cast<cudaStream_t>(stream));      \
                           },                                                                            \
                           error_name,                                                                   \
                           nullptr,                                                                      \
                           nullptr,                                                                      \
                           shared,                                                                       \
                           4};                                                                           \
    return &rung;                                                                                        \
  }

// The bound of one block is what setmaxnreg needs.
#define FLASHLADDER_TMA_RUNG_KERNEL(ID, SUFFIX, CONFIG, FORWARD, T, D)                                    \
  FLASHLADDER_TMA_KERNEL(ID##_##SUFFIX, SUFFIX, ((flashladder::FORWARD<CONFIG, T, D>::kThreads), 1),      \
                         flashladder::MapsOf<CONFIG>, (flashladder::FORWARD<CONFIG, T, D>::run(p, maps))) \
  const flashladder::TmaInstance ID##_instance_##SUFFIX{                                                  \
      reinterpret_cast<const void*>(ID##_##SUFFIX),                                                       \
      flashladder::FORWARD<CONFIG, T, D>::kM,                                                             \
      flashladder::FORWARD<CONFIG, T, D>::kN,                                                             \
      flashladder::FORWARD<CONFIG, T, D>::kThreads,                                                       \
      flashladder::FORWARD<CONFIG, T, D>::kSharedBytes,                                                   \
      CONFIG.persistent,                                                                                  \
      CONFIG.key_groups > 1,                                                                              \
      CONFIG.tma_store,                                                                                   \
      flashladder::multicasts<flashladder::FORWARD<CONFIG, T, D>>(),                                      \
      CONFIG.early_launch,                                                                                \
      flashladder::balance_of<flashladder::FORWARD<CONFIG, T, D>>()};
