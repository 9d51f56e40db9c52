// Which kernel of a Hopper rung computes a problem: where TMA can read the tensors and 64 rows a block fill the GPU,
// the one of its own that is done first; else the portable ladder's smaller ones (plan.h).
#pragma once

#include "hopper_forward.cuh"
#include "mma_forward.cuh"
#include "tuned.h"

namespace flashladder {

constexpr Config with_query_rows(Config config, int rows) {
  config.tile_m = config.tile_m_128 = rows;
  return config;
}

// The kernels of a dtype and head dimension by their rows: the rung's own, 128, 64. `cost`: the time of a row against
// the widest's, since fewer warpgroups leave the tensor cores idle; an H200, one block an SM, 1024 and 2048 keys.
constexpr int kSizes = 3, kLeastHopperRows = 64;
struct HopperSizes {
  TmaInstance sizes[kSizes];
  float cost[kSizes];
};

// The kernel whose blocks, each taking its share of tiles, are done first.
inline const TmaInstance& fitting(const HopperSizes& kernels, const Params& p, int multiprocessors) {
  int best = 0;
  float least = 0.f;
  for (int i = 0; i < kSizes; ++i) {
    const int rows = kernels.sizes[i].tile_m;
    const int64_t turns = (query_tiles(p, rows) + multiprocessors - 1) / multiprocessors;
    const float time = static_cast<float>(turns) * rows * kernels.cost[i];
    if (i == 0 || time < least) {
      best = i;
      least = time;
    }
  }
  return kernels.sizes[best];
}

inline int launch(const HopperSizes& kernels, const Params& p, Dtype dtype, int device, cudaStream_t stream) {
  return launch(fitting(kernels, p, multiprocessors(device)), p, dtype, device, stream);
}

inline Tile plan_hopper(Params& p, int multiprocessors) {
  pack_heads(p);
  const bool is_readable =
      tma_reads(p.q_strides, p.seq_q) && tma_reads(p.k_strides, p.seq_k) && tma_reads(p.v_strides, p.seq_k);
  return choose_tile(p, multiprocessors, is_readable ? kLeastHopperRows : 0);
}

}  // namespace flashladder

#define FLASHLADDER_DISPATCH_KERNELS(ID, SUFFIX, CONFIG, T, D)                                         \
  constexpr flashladder::Config ID##_m128_config_##SUFFIX = flashladder::with_query_rows(CONFIG, 128); \
  constexpr flashladder::Config ID##_m64_config_##SUFFIX = flashladder::with_query_rows(CONFIG, 64);   \
  FLASHLADDER_TMA_RUNG_KERNEL(ID, SUFFIX, CONFIG, HopperForward, T, D)                                 \
  FLASHLADDER_TMA_RUNG_KERNEL(ID##_m128, SUFFIX, ID##_m128_config_##SUFFIX, HopperForward, T, D)       \
  FLASHLADDER_TMA_RUNG_KERNEL(ID##_m64, SUFFIX, ID##_m64_config_##SUFFIX, HopperForward, T, D)         \
  const flashladder::HopperSizes ID##_large_##SUFFIX{                                                  \
      {ID##_instance_##SUFFIX, ID##_m128_instance_##SUFFIX, ID##_m64_instance_##SUFFIX},               \
      {1.f, D > 64 ? 1.2f : 1.35f, D > 64 ? 2.1f : 2.2f}};                                             \
  FLASHLADDER_SMALLER_KERNELS(ID, SUFFIX, flashladder::kTuned, T, D)

#define FLASHLADDER_DISPATCH_SHARED(ID, SUFFIX)                          \
  {#ID "_" #SUFFIX, ID##_large_##SUFFIX.sizes[0].shared_bytes},          \
      {#ID "_m128_" #SUFFIX, ID##_large_##SUFFIX.sizes[1].shared_bytes}, \
      {#ID "_m64_" #SUFFIX, ID##_large_##SUFFIX.sizes[2].shared_bytes},  \
      {#ID "_medium_" #SUFFIX, ID##_smaller_##SUFFIX[0].shared_bytes}, { \
    #ID "_small_" #SUFFIX, ID##_smaller_##SUFFIX[1].shared_bytes         \
  }

#define FLASHLADDER_DISPATCH_RUNG(ID, CONFIG)                                                 \
  FLASHLADDER_DISPATCH_KERNELS(ID, fp16_d64, CONFIG, __half, 64)                              \
  FLASHLADDER_DISPATCH_KERNELS(ID, fp16_d128, CONFIG, __half, 128)                            \
  FLASHLADDER_DISPATCH_KERNELS(ID, bf16_d64, CONFIG, __nv_bfloat16, 64)                       \
  FLASHLADDER_DISPATCH_KERNELS(ID, bf16_d128, CONFIG, __nv_bfloat16, 128)                     \
  [[maybe_unused]] static const flashladder::DynamicShared ID##_shared[] = {                  \
      FLASHLADDER_DISPATCH_SHARED(ID, fp16_d64), FLASHLADDER_DISPATCH_SHARED(ID, fp16_d128),  \
      FLASHLADDER_DISPATCH_SHARED(ID, bf16_d64), FLASHLADDER_DISPATCH_SHARED(ID, bf16_d128)}; \
  FLASHLADDER_PLANNED_ENTRY(ID, CONFIG, HopperSizes, launch, plan_hopper, ID##_shared)
