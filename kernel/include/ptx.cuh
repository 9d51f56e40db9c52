// PTX wrappers: one function an instruction, named after it, no policy inside.
#pragma once

namespace flashladder::ptx {

// ex2.approx.ftz.f32: 2^x, relative error <= 2^-22; 2^-inf = 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz.f32: log2(x), absolute error <= 2^-22 near 1, else relative; log2(0) = -inf.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-lg2
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashladder::ptx
