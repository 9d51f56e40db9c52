// Which kernel of a Hopper rung computes a problem: its own where TMA can read the tensors and its tiles fill the GPU,
// else the portable ladder's smaller ones (plan.h).
#pragma once

#include "hopper_forward.cuh"
#include "mma_forward.cuh"
#include "tuned.h"

namespace flashladder {

template <Config C>
Tile plan_hopper(Params& p, int multiprocessors) {
  pack_heads(p);
  const bool is_readable =
      tma_reads(p.q_strides, p.seq_q) && tma_reads(p.k_strides, p.seq_k) && tma_reads(p.v_strides, p.seq_k);
  const int rows = p.head_dim > 64 ? HopperForward<C, __half, 128>::kM : HopperForward<C, __half, 64>::kM;
  return choose_tile(p, multiprocessors, is_readable ? rows : 0);
}

}  // namespace flashladder

#define FLASHLADDER_DISPATCH_KERNELS(ID, SUFFIX, CONFIG, T, D)         \
  FLASHLADDER_TMA_RUNG_KERNEL(ID, SUFFIX, CONFIG, HopperForward, T, D) \
  FLASHLADDER_SMALLER_KERNELS(ID, SUFFIX, flashladder::kTuned, T, D)

#define FLASHLADDER_DISPATCH_RUNG(ID, CONFIG)                             \
  FLASHLADDER_DISPATCH_KERNELS(ID, fp16_d64, CONFIG, __half, 64)          \
  FLASHLADDER_DISPATCH_KERNELS(ID, fp16_d128, CONFIG, __half, 128)        \
  FLASHLADDER_DISPATCH_KERNELS(ID, bf16_d64, CONFIG, __nv_bfloat16, 64)   \
  FLASHLADDER_DISPATCH_KERNELS(ID, bf16_d128, CONFIG, __nv_bfloat16, 128) \
  FLASHLADDER_PLANNED_ENTRY(ID, CONFIG, TmaInstance, launch, plan_hopper<CONFIG>)
