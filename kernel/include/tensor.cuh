// Rows of the global tensors, visibility, and element conversion.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "rung.h"

namespace flashladder {

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Two neighbouring elements as one register, `low` in the low half.
__device__ __forceinline__ uint32_t pack(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// First element of (batch, head); rows follow at strides.row. 64-bit: tensors pass 2^31 elements.
template <class T>
__device__ __forceinline__ T* head_base(T* tensor, const Strides& strides, int batch, int head) {
  return tensor + batch * strides.batch + head * strides.head;
}

// few_divisions: of the Config.
template <bool few_divisions = false>
__device__ __forceinline__ int kv_head(const Params& p, int head) {
  if (few_divisions && p.heads_q == p.heads_kv) return head;
  return head / (p.heads_q / p.heads_kv);
}

// Number of keys that query row `query` sees; 0 for rows above the diagonal when seq_q > seq_k.
__device__ __forceinline__ int visible_keys(const Params& p, int query) {
  return p.causal ? max(0, min(p.seq_k, query + p.seq_k - p.seq_q + 1)) : p.seq_k;
}

// Eight 16-bit elements, moved by one 16-byte access.
template <class T>
struct alignas(16) Chunk {
  T x[8];
};

}  // namespace flashladder
