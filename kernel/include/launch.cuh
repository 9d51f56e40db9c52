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

// A kernel and how it is launched; `combine` joins the parts of split keys.
struct Instance {
  void (*kernel)(Params);
  int tile_m, threads;
  int shared_bytes = 0;  // dynamic
  void (*combine)(Params) = nullptr;
  bool early_combine = false, early_launch = false;
};

constexpr int kCombineRows = 4;  // a block, one a warp
constexpr int kDefaultShared = 48 * 1024;

// A block a query tile (and split of the keys), head and batch.
inline dim3 blocks(const Params& p, int tile_m) {
  const unsigned tiles = (p.seq_q + tile_m - 1) / tile_m;
  return dim3(tiles * p.splits, p.heads_q, p.batch);
}

// Calls enqueue(part) for parts of batches until one gives an error: kMaxGridYZ at most, and no more than so many heads
// in all that an int counts them.
template <class Enqueue>
int for_batches(Params p, Enqueue enqueue) {
  const int batch = p.batch, countable = (1 << 30) / p.heads_q, most = countable < kMaxGridYZ ? countable : kMaxGridYZ;
  for (int done = 0; done < batch; done += most) {
    p.batch = batch - done < most ? batch - done : most;
    if (const cudaError_t error = enqueue(static_cast<const Params&>(p))) return error;
    const int64_t step = p.batch;
    p.q = static_cast<const uint16_t*>(p.q) + step * p.q_strides.batch;
    p.k = static_cast<const uint16_t*>(p.k) + step * p.k_strides.batch;
    p.v = static_cast<const uint16_t*>(p.v) + step * p.v_strides.batch;
    p.o = static_cast<uint16_t*>(p.o) + step * p.o_strides.batch;
    p.lse += step * p.lse_strides.batch;
  }
  return cudaSuccess;
}

// Lets the kernel have its bytes of dynamic shared memory on the current device. A thread asks the runtime again when
// it last launched another kernel or on another device. Limit: cudaDeviceReset() takes the leave back unseen; the
// kernel's next launch is then refused, not wrong. Internal, so that a library forgets with itself what its kernels
// may.
template <class Kernel>
static cudaError_t allow_shared(Kernel* kernel, int bytes, int device) {
  if (bytes <= kDefaultShared) return cudaSuccess;
  static thread_local Kernel* allowed = nullptr;
  static thread_local int allowed_on = 0;
  if (kernel == allowed && device == allowed_on) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  allowed = error == cudaSuccess ? kernel : nullptr;
  allowed_on = device;
  return error;
}

// What a launch asks for besides its grid.
struct Attributes {
  cudaLaunchAttribute of[2]{};
  unsigned count = 0;

  // The kernel may start before the one ahead of it in the stream has ended, and waits for that itself.
  Attributes& early(bool is_early) {
    if (is_early) {
      of[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      of[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    return *this;
  }
  // Clusters of so many blocks, neighbours along z.
  Attributes& cluster(unsigned blocks) {
    if (blocks > 1) {
      of[count].id = cudaLaunchAttributeClusterDimension;
      of[count++].val.clusterDim = {1, 1, blocks};
    }
    return *this;
  }
};

// arguments: as of cudaLaunchKernel.
inline cudaError_t launch_with(Attributes attributes, const void* kernel, dim3 grid, int threads, void** arguments,
                               int shared_bytes, cudaStream_t stream) {
  if (attributes.count == 0) {
    cudaLaunchKernel(kernel, grid, dim3(threads), arguments, shared_bytes, stream);
  } else {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes.of;
    config.numAttrs = attributes.count;
    cudaLaunchKernelExC(&config, kernel, arguments);
  }
  return cudaGetLastError();
}

inline cudaError_t launch_with(Attributes attributes, void (*kernel)(Params), dim3 grid, int threads, Params p,
                               int shared_bytes, cudaStream_t stream) {
  void* arguments[] = {&p};
  const void* const function = reinterpret_cast<const void*>(kernel);
  return launch_with(attributes, function, grid, threads, arguments, shared_bytes, stream);
}

inline int launch(const Instance& instance, Grid grid, const Params& p, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  if (guard.error != cudaSuccess) return guard.error;
  if (const cudaError_t error = allow_shared(instance.kernel, instance.shared_bytes, device)) return error;
  if (grid == Grid::single) {
    instance.kernel<<<1, instance.threads, instance.shared_bytes, stream>>>(p);
    return cudaGetLastError();
  }
  return for_batches(p, [&](const Params& part) {
    const cudaError_t error =
        launch_with(Attributes().early(instance.early_launch), instance.kernel, blocks(part, instance.tile_m),
                    instance.threads, part, instance.shared_bytes, stream);
    if (error != cudaSuccess || part.splits == 1) return error;
    const int64_t rows = static_cast<int64_t>(part.batch) * part.heads_q * part.seq_q;
    const auto row_blocks = static_cast<unsigned>((rows + kCombineRows - 1) / kCombineRows);
    return launch_with(Attributes().early(instance.early_combine), instance.combine, dim3(row_blocks),
                       kCombineRows * 32, part, 0, stream);
  });
}

inline int multiprocessors(int device) {
  int count = 1;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

inline const char* error_name(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace flashladder

// What a build does not want has an empty body: of the emulator's, the instances that no case runs.
#ifdef FLASHLADDER_SKIP_fp16_d64
#define FLASHLADDER_BODY_fp16_d64(...)
#else
#define FLASHLADDER_BODY_fp16_d64(...) __VA_ARGS__
#endif
#ifdef FLASHLADDER_SKIP_fp16_d128
#define FLASHLADDER_BODY_fp16_d128(...)
#else
#define FLASHLADDER_BODY_fp16_d128(...) __VA_ARGS__
#endif
#ifdef FLASHLADDER_SKIP_bf16_d64
#define FLASHLADDER_BODY_bf16_d64(...)
#else
#define FLASHLADDER_BODY_bf16_d64(...) __VA_ARGS__
#endif
#ifdef FLASHLADDER_SKIP_bf16_d128
#define FLASHLADDER_BODY_bf16_d128(...)
#else
#define FLASHLADDER_BODY_bf16_d128(...) __VA_ARGS__
#endif

// A source that defines FLASHLADDER_IN_PARTS is compiled into an object for each dtype at once. FLASHLADDER_PART_bf16
// has the bf16 kernels alone; FLASHLADDER_PART_fp16 the others and the entry, and only declares those.
#define FLASHLADDER_HERE(BODY) {BODY}
#define FLASHLADDER_ELSEWHERE(BODY) ;
#ifdef FLASHLADDER_PART_fp16
#define FLASHLADDER_DEFINED_bf16_d64 FLASHLADDER_ELSEWHERE
#define FLASHLADDER_DEFINED_bf16_d128 FLASHLADDER_ELSEWHERE
#else
#define FLASHLADDER_DEFINED_bf16_d64 FLASHLADDER_HERE
#define FLASHLADDER_DEFINED_bf16_d128 FLASHLADDER_HERE
#endif
#ifdef FLASHLADDER_PART_bf16
#define FLASHLADDER_DEFINED_fp16_d64 FLASHLADDER_ELSEWHERE
#define FLASHLADDER_DEFINED_fp16_d128 FLASHLADDER_ELSEWHERE
#else
#define FLASHLADDER_DEFINED_fp16_d64 FLASHLADDER_HERE
#define FLASHLADDER_DEFINED_fp16_d128 FLASHLADDER_HERE
#endif

// Kernels are extern "C" so that their names are stable and rebuilding gives the same bytes.
#define FLASHLADDER_KERNEL(NAME, SUFFIX, BOUNDS, CALL)                                                    \
  extern "C" __global__ void __launch_bounds__ BOUNDS NAME(const __grid_constant__ flashladder::Params p) \
      FLASHLADDER_DEFINED_##SUFFIX(FLASHLADDER_BODY_##SUFFIX(CALL;))

// One kernel for each dtype and head dimension, from the rung's `forward<T, D>(params)`.
#define FLASHLADDER_RUNG(ID, CONFIG)                                                                             \
  FLASHLADDER_KERNEL(ID##_fp16_d64, fp16_d64, (CONFIG.threads), (forward<__half, 64>(p)))                        \
  FLASHLADDER_KERNEL(ID##_fp16_d128, fp16_d128, (CONFIG.threads), (forward<__half, 128>(p)))                     \
  FLASHLADDER_KERNEL(ID##_bf16_d64, bf16_d64, (CONFIG.threads), (forward<__nv_bfloat16, 64>(p)))                 \
  FLASHLADDER_KERNEL(ID##_bf16_d128, bf16_d128, (CONFIG.threads), (forward<__nv_bfloat16, 128>(p)))              \
  extern "C" const flashladder::Rung* flashladder_rung() {                                                       \
    using namespace flashladder;                                                                                 \
    static const Rung rung{#ID, CONFIG,                                                                          \
                           [](const Params& p, Dtype dtype, Tile, int device, void* stream) {                    \
                             const bool fp16 = dtype == Dtype::fp16;                                             \
                             auto* kernel = p.head_dim == 64 ? (fp16 ? ID##_fp16_d64 : ID##_bf16_d64)            \
                                                             : (fp16 ? ID##_fp16_d128 : ID##_bf16_d128);         \
                             const Instance instance{kernel, CONFIG.tile_m, CONFIG.threads};                     \
                             return launch(instance, CONFIG.grid, p, device, static_cast<cudaStream_t>(stream)); \
                           },                                                                                    \
                           error_name};                                                                          \
    return &rung;                                                                                                \
  }
