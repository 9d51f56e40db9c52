// Online softmax in the base-2 domain, for one row. Scores are t = s * scale * log2(e).
#pragma once

#include <math_constants.h>

#include "ptx.cuh"

namespace flashladder {

// __fmul_rn keeps the product apart from the later subtraction of the maximum: fused, 2^(s*c - m) overflows for
// scores near 1e9, because m is the rounded product.
__device__ __forceinline__ float to_log2_domain(float score, float scale_log2) { return __fmul_rn(score, scale_log2); }

// An FMA subtracts the maximum rounded from a score that is not. The difference is half a unit in the maximum's last
// place: 2^-8 for this one, when it cancels against the sum; near 2^30 it would overflow 2^x.
constexpr float kLargestFolded = 65536.f;

// The value to subtract before exponentiating. A row that has seen no key has max = -inf, and -inf - -inf is NaN.
__device__ __forceinline__ float finite_max(float row_max) { return row_max == -CUDART_INF_F ? 0.f : row_max; }

// 1 / row_sum; a row with no visible key has row_sum = 0 and gives O = 0.
__device__ __forceinline__ float inverse_sum(float row_sum) { return row_sum == 0.f ? 0.f : 1.f / row_sum; }

// The same by an approximation, without a branch.
__device__ __forceinline__ float fast_inverse_sum(float row_sum) { return row_sum == 0.f ? 0.f : ptx::rcp(row_sum); }

// Natural-log LSE; -inf for a row with no visible key.
__device__ __forceinline__ float log_sum_exp(float row_max, float row_sum) {
  constexpr float kLn2 = 0.693147180559945309f;
  return row_sum == 0.f ? -CUDART_INF_F : (row_max + ptx::lg2(row_sum)) * kLn2;
}

// 2^x by a polynomial on [-1/2, 1/2], whose relative error stays below 2^-13; 0 below 2^-126, infinity from 2^128 on.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float kRound = 12582912.f;              // 1.5 x 2^23: adding it leaves the nearest integer in the low bits
  x = x < -127.f ? -127.f : x > 128.f ? 128.f : x;  // a NaN stays one
  const float rounded = x + kRound, f = x - (rounded - kRound);
  const float power = fmaf(fmaf(fmaf(0.0551716685f, f, 0.24261114f), f, 0.693260968f), f, 0.999928057f);
  return power * __int_as_float((__float_as_int(rounded) + 127) << 23);
}

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

// Over the four lanes that hold a row of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

}  // namespace flashladder
