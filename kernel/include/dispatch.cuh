// Which kernel of a Hopper rung computes a problem: where TMA can read the tensors and there are enough tiles of 64
// rows, the one of its own that is done first; else the portable ladder's smaller ones (plan.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "hopper_forward.cuh"
#include "mma_forward.cuh"
#include "tuned.h"

namespace flashladder {

// The time that a block has an SM of an H200 for, in microseconds: `row` for a query row and 1024 keys, `tile` for the
// rest of a tile of rows. Fewer warpgroups leave the tensor cores idle; blocks that are not persistent load nothing
// ahead. The recorded runs of `flashladder tune` hold the choices that follow (tests/unit/test_build.py).
struct Cost {
  float row, tile;
};

constexpr Config with_query_rows(Config config, int rows) {
  config.tile_m = config.tile_m_128 = rows;
  return config;
}

// The portable ladder's last rung, for smaller grids.
constexpr Config portable(const Config& own) {
  Config config = kTuned;
  config.early_combine = own.early_combine;
  config.early_launch = own.early_launch;
  config.short_join = own.short_join;
  config.few_divisions = own.few_divisions;
  return config;
}

// stages: of each warpgroup that shares rows with others.
constexpr Config with_key_groups(Config config, int rows, int key_groups, int stages) {
  config = with_query_rows(config, rows);
  config.persistent = false;
  config.key_groups = key_groups;
  config.stages = config.stages_128 = key_groups * stages;
  return config;
}

// A block's last act at head_dim 64 takes 1 % of the kernel's time longer by TMA.
constexpr Config without_tma_store(Config config) {
  config.tma_store = false;
  return config;
}

// The kernels of a dtype and head dimension: the rung's own, and those of 128 and 64 rows.
constexpr int kLeastHopperRows = 64;
struct HopperKernels {
  TmaInstance own, m128, m64;
};

// Smaller tiles have a warpgroup for every 64 rows.
template <int D>
struct FewerWarpgroups {
  static constexpr bool kWide = D > 64;
  static constexpr Config m128(Config config) { return with_query_rows(config, 128); }
  static constexpr Config m64(Config config) { return with_query_rows(config, 64); }
  static constexpr Cost kOwn{kWide ? .076f : .053f, 1.5f}, k128{kWide ? .092f : .074f, 1.5f},
      k64{kWide ? .16f : .12f, 1.5f};
  static bool take(const Params& p, int multiprocessors) { return suits(p, kLeastHopperRows, multiprocessors); }
};

// Smaller tiles have as many warpgroups as the registers hold, which share rows.
template <int D>
struct SharedRows {
  static constexpr bool kWide = D > 64;
  static constexpr Config m128(Config config) {
    return kWide ? with_query_rows(config, 128) : without_tma_store(with_key_groups(config, 128, 2, 4));
  }
  static constexpr Config m64(Config config) {
    return kWide ? with_key_groups(config, 64, 2, 2) : without_tma_store(with_key_groups(config, 64, 4, 2));
  }
  static constexpr Cost kOwn{kWide ? .076f : .053f, 1.5f}, k128{kWide ? .092f : .054f, kWide ? 1.5f : 2.8f},
      k64{kWide ? .093f : .058f, 2.8f};

  // Fewer tiles are enough where a block has this many keys for its warpgroups.
  static constexpr int kManyKeys = kWide ? 128 : 256;
  static bool take(const Params& p, int multiprocessors) {
    return suits(p, kLeastHopperRows, multiprocessors) || (p.seq_q > kLeastHopperRows / 2 && p.seq_k > kManyKeys &&
                                                           3 * query_tiles(p, kLeastHopperRows) >= multiprocessors);
  }
};

// When the last block is done. Under a causal mask tiles differ, and long ones start first: the longest tile, or an
// SM's share of all.
inline float estimate(const Cost& cost, int rows, const Params& p, int multiprocessors) {
  const int64_t tiles = query_tiles(p, rows);
  const float longest = cost.row * rows * p.seq_k / 1024 + cost.tile;
  if (!p.causal) return static_cast<float>((tiles + multiprocessors - 1) / multiprocessors) * longest;
  const float mean_keys = p.seq_q <= p.seq_k ? p.seq_k - p.seq_q / 2.f : p.seq_k * (p.seq_k / 2.f) / p.seq_q;
  const float mean = cost.row * rows * mean_keys / 1024 + cost.tile;
  return std::max(longest, mean * tiles / multiprocessors);
}

// Which of a rung's own kernels is done first, Sizes<D> its costs and `own` the rows of its largest tile.
template <class Sizes>
Tile fitting(const Params& p, int own, int multiprocessors) {
  const float large = estimate(Sizes::kOwn, own, p, multiprocessors);
  const float m128 = estimate(Sizes::k128, 128, p, multiprocessors);
  const float m64 = estimate(Sizes::k64, 64, p, multiprocessors);
  if (large <= std::min(m128, m64)) return Tile::large;
  return m128 <= m64 ? Tile::m128 : Tile::m64;
}

template <template <int> class Sizes, Config C>
Tile plan_hopper(Params& p, int multiprocessors) {
  pack_heads(p);
  const bool is_readable = tma_reads(p.q_strides, p.seq_q) && tma_reads(p.k_strides, p.seq_k) &&
                           tma_reads(p.v_strides, p.seq_k) && (!C.tma_store || tma_reads(p.o_strides, p.seq_q));
  const bool is_wide = p.head_dim > 64;
  const bool is_large =
      is_readable && (is_wide ? Sizes<128>::take(p, multiprocessors) : Sizes<64>::take(p, multiprocessors));
  const Tile tile = choose_tile(p, multiprocessors, is_large);
  if (tile != Tile::large) return tile;
  const int own = at_head_dim(C, p.head_dim).tile_m;
  return is_wide ? fitting<Sizes<128>>(p, own, multiprocessors) : fitting<Sizes<64>>(p, own, multiprocessors);
}

inline int launch(const HopperKernels& kernels, Tile tile, const Params& p, Dtype dtype, int device,
                  cudaStream_t stream) {
  const TmaInstance& kernel = tile == Tile::m128 ? kernels.m128 : tile == Tile::m64 ? kernels.m64 : kernels.own;
  return launch(kernel, p, dtype, device, stream);
}

}  // namespace flashladder

#define FLASHLADDER_DISPATCH_KERNELS(ID, SUFFIX, CONFIG, SIZES, T, D)                                       \
  constexpr flashladder::Config ID##_m128_config_##SUFFIX = flashladder::SIZES<D>::m128(CONFIG);            \
  constexpr flashladder::Config ID##_m64_config_##SUFFIX = flashladder::SIZES<D>::m64(CONFIG);              \
  FLASHLADDER_TMA_RUNG_KERNEL(ID, SUFFIX, CONFIG, HopperForward, T, D)                                      \
  FLASHLADDER_TMA_RUNG_KERNEL(ID##_m128, SUFFIX, ID##_m128_config_##SUFFIX, HopperForward, T, D)            \
  FLASHLADDER_TMA_RUNG_KERNEL(ID##_m64, SUFFIX, ID##_m64_config_##SUFFIX, HopperForward, T, D)              \
  const flashladder::HopperKernels ID##_large_##SUFFIX{ID##_instance_##SUFFIX, ID##_m128_instance_##SUFFIX, \
                                                       ID##_m64_instance_##SUFFIX};                         \
  constexpr flashladder::Config ID##_portable_config_##SUFFIX = flashladder::portable(CONFIG);              \
  FLASHLADDER_SMALLER_KERNELS(ID, SUFFIX, ID##_portable_config_##SUFFIX, T, D)

#define FLASHLADDER_DISPATCH_SHARED(ID, SUFFIX)                          \
  {#ID "_" #SUFFIX, ID##_large_##SUFFIX.own.shared_bytes},               \
      {#ID "_m128_" #SUFFIX, ID##_large_##SUFFIX.m128.shared_bytes},     \
      {#ID "_m64_" #SUFFIX, ID##_large_##SUFFIX.m64.shared_bytes},       \
      {#ID "_medium_" #SUFFIX, ID##_smaller_##SUFFIX[0].shared_bytes}, { \
    #ID "_small_" #SUFFIX, ID##_smaller_##SUFFIX[1].shared_bytes         \
  }

#define FLASHLADDER_DISPATCH_RUNG(ID, CONFIG, SIZES)                                          \
  FLASHLADDER_DISPATCH_KERNELS(ID, fp16_d64, CONFIG, SIZES, __half, 64)                       \
  FLASHLADDER_DISPATCH_KERNELS(ID, fp16_d128, CONFIG, SIZES, __half, 128)                     \
  FLASHLADDER_DISPATCH_KERNELS(ID, bf16_d64, CONFIG, SIZES, __nv_bfloat16, 64)                \
  FLASHLADDER_DISPATCH_KERNELS(ID, bf16_d128, CONFIG, SIZES, __nv_bfloat16, 128)              \
  [[maybe_unused]] static const flashladder::DynamicShared ID##_shared[] = {                  \
      FLASHLADDER_DISPATCH_SHARED(ID, fp16_d64), FLASHLADDER_DISPATCH_SHARED(ID, fp16_d128),  \
      FLASHLADDER_DISPATCH_SHARED(ID, bf16_d64), FLASHLADDER_DISPATCH_SHARED(ID, bf16_d128)}; \
  FLASHLADDER_PLANNED_ENTRY(ID, CONFIG, HopperKernels, launch, (plan_hopper<SIZES, CONFIG>), Tile::m64, ID##_shared)
