// Kernel instances, launcher and exported symbol of a rung, from its `forward<T, D>(params)` and its configuration.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "rung.h"

namespace flashladder {

constexpr int kMaxGridYZ = 65535;

// Makes `device` current for its lifetime: the caller's tensors may live on another GPU than the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    error = cudaGetDevice(&previous_);
    if (error == cudaSuccess && previous_ != device_) error = cudaSetDevice(device_);
  }
  ~DeviceGuard() {
    if (previous_ != device_) cudaSetDevice(previous_);
  }
  cudaError_t error;

 private:
  int device_, previous_ = device_;
};

inline int launch(void (*kernel)(Params), const Config& config, Params p, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  if (guard.error != cudaSuccess) return guard.error;
  if (config.grid == Grid::single) {
    kernel<<<1, config.threads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  const unsigned tiles = (p.seq_q + config.tile_m - 1) / config.tile_m;
  const int batch = p.batch;
  for (int done = 0; done < batch; done += kMaxGridYZ) {
    p.batch = batch - done < kMaxGridYZ ? batch - done : kMaxGridYZ;
    kernel<<<dim3(tiles, p.heads_q, p.batch), config.threads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError()) return error;
    const int64_t step = p.batch;
    p.q = static_cast<const uint16_t*>(p.q) + step * p.q_strides.batch;
    p.k = static_cast<const uint16_t*>(p.k) + step * p.k_strides.batch;
    p.v = static_cast<const uint16_t*>(p.v) + step * p.v_strides.batch;
    p.o = static_cast<uint16_t*>(p.o) + step * p.o_strides.batch;
    p.lse += step * p.lse_strides.batch;
  }
  return cudaSuccess;
}

}  // namespace flashladder

#define FLASHLADDER_KERNEL(NAME, T, D, CONFIG)                                                                       \
  extern "C" __global__ void __launch_bounds__(CONFIG.threads) NAME(const __grid_constant__ flashladder::Params p) { \
    forward<T, D>(p);                                                                                                \
  }

// Kernels are extern "C" so that their names are stable and rebuilding gives the same bytes.
#define FLASHLADDER_RUNG(ID, CONFIG)                                                                      \
  FLASHLADDER_KERNEL(ID##_fp16_d64, __half, 64, CONFIG)                                                   \
  FLASHLADDER_KERNEL(ID##_fp16_d128, __half, 128, CONFIG)                                                 \
  FLASHLADDER_KERNEL(ID##_bf16_d64, __nv_bfloat16, 64, CONFIG)                                            \
  FLASHLADDER_KERNEL(ID##_bf16_d128, __nv_bfloat16, 128, CONFIG)                                          \
  extern "C" const flashladder::Rung* flashladder_rung() {                                                \
    using namespace flashladder;                                                                          \
    static const Rung rung{#ID, CONFIG,                                                                   \
                           [](const Params& p, Dtype dtype, int head_dim, int device, void* stream) {     \
                             const bool fp16 = dtype == Dtype::fp16;                                      \
                             auto* kernel = head_dim == 64 ? (fp16 ? ID##_fp16_d64 : ID##_bf16_d64)       \
                                                           : (fp16 ? ID##_fp16_d128 : ID##_bf16_d128);    \
                             return launch(kernel, CONFIG, p, device, static_cast<cudaStream_t>(stream)); \
                           },                                                                             \
                           [](int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }};  \
    return &rung;                                                                                         \
  }
