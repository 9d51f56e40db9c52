// A stand-in for libcudart: what nvcc's host code calls to register and launch kernels, here the translated ones.
// Streams are one queue in which everything is done at once.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "emulator.h"

namespace {

constexpr size_t kDefaultShared = 48 << 10, kMaxBlockShared = 232448;
constexpr int kMaxThreads = 1024;

struct Function {
  std::string name;
  size_t max_dynamic_shared = kDefaultShared;
  bool any_cluster_size = false;  // beyond 8
};

std::map<const void*, Function>& functions() {
  static std::map<const void*, Function> all;
  return all;
}

cudaError_t last_error = cudaSuccess;
struct {
  cudaError_t code = cudaSuccess;
  std::string words;  // the emulator's
} failure;            // the last one

cudaError_t set_error(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t refuse(cudaError_t error, const std::string& why) {
  failure = {error, why};
  if (emu::log_text().find(why) == std::string::npos) emu::report(why);
  return set_error(error);
}

bool grid_fits(emu::Dim3 g, emu::Dim3 b) {
  return g.x && g.y && g.z && g.x <= 0x7fffffffu && g.y <= 65535 && g.z <= 65535 && b.x && b.y && b.z && b.x <= 1024 &&
         b.y <= 1024 && b.z <= 64 && static_cast<uint64_t>(b.x) * b.y * b.z <= kMaxThreads;
}

emu::Dim3 dim(dim3 d) { return {d.x, d.y, d.z}; }

cudaError_t launch(const void* key, dim3 grid, dim3 block, void** arguments, size_t shared, const emu::Dim3* cluster,
                   bool early = false) {
  const auto it = functions().find(key);
  if (it == functions().end()) return refuse(cudaErrorInvalidDeviceFunction, "a launch of no registered kernel");
  const Function& f = it->second;
  const emu::KernelInfo* kernel = emu::find_kernel(f.name);
  if (!kernel) return refuse(cudaErrorInvalidDeviceFunction, f.name + ": the kernel has not been translated");
  emu::Launch l{f.name.c_str(),
                dim(grid),
                dim(block),
                cluster ? *cluster : kernel->cluster,
                kernel->static_shared,
                static_cast<uint32_t>(shared),
                early};
  if (!grid_fits(l.grid, l.block)) return refuse(cudaErrorInvalidConfiguration, f.name + ": invalid grid or block");
  if (shared > f.max_dynamic_shared || shared + kernel->static_shared > kMaxBlockShared)
    return refuse(cudaErrorInvalidValue, f.name + ": " + std::to_string(shared) +
                                             " bytes of dynamic shared memory, more than cudaFuncSetAttribute allowed");
  const uint64_t size = static_cast<uint64_t>(l.cluster.x) * l.cluster.y * l.cluster.z;
  if (size == 0 || size > (f.any_cluster_size ? 16 : 8))
    return refuse(cudaErrorInvalidClusterSize, f.name + ": a cluster of " + std::to_string(size) + " blocks");
  try {
    emu::run_grid(l, [&] { kernel->run(arguments); });
    return cudaSuccess;
  } catch (const std::exception& e) {
    return refuse(cudaErrorLaunchFailure, e.what());
  }
}

template <class Handle>
cudaError_t make_handle(Handle* handle) {
  static int target;
  *handle = reinterpret_cast<Handle>(&target);
  return cudaSuccess;
}

struct PendingCall {
  dim3 grid, block;
  size_t shared = 0;
  void* stream = nullptr;
} pending;

// --- tensor maps -------------------------------------------------------------------------------------------------

struct ElementInfo {
  uint32_t bytes;
  emu::Element element;
};

ElementInfo element_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return {1, emu::Element::unknown};
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
      return {2, emu::Element::unknown};
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
      return {4, emu::Element::u32};
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
      return {4, emu::Element::s32};
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return {8, emu::Element::unknown};
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
      return {2, emu::Element::fp16};
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return {2, emu::Element::bf16};
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return {4, emu::Element::fp32};
    default:
      return {0, emu::Element::unknown};
  }
}

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* dims,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  const ElementInfo info = element_of(type);
  try {
    if (!map || !dims || !box || !element_strides || (rank > 1 && !strides))
      throw std::invalid_argument("cuTensorMapEncodeTiled: a null pointer");
    if (reinterpret_cast<uintptr_t>(map) % 64)
      throw std::invalid_argument("cuTensorMapEncodeTiled: the tensor map is not 64-byte aligned");
    if (!info.bytes) throw std::invalid_argument("cuTensorMapEncodeTiled: the data type is not modelled");
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
      throw std::invalid_argument("cuTensorMapEncodeTiled: interleave and NaN fill are not modelled");
    for (cuuint32_t i = 0; i < rank && i < 5; ++i)
      if (element_strides[i] != 1)
        throw std::invalid_argument("cuTensorMapEncodeTiled: element strides are not modelled");
    uint64_t dim[5] = {}, stride[5] = {};
    for (cuuint32_t i = 0; i < rank && i < 5; ++i) {
      dim[i] = dims[i];
      if (i + 1 < rank) stride[i] = strides[i];
    }
    emu::encode_tensor_map(map, rank, info.bytes, base, dim, stride, box, static_cast<uint32_t>(swizzle), info.element);
    return CUDA_SUCCESS;
  } catch (const std::exception& e) {
    emu::report(e.what());
    return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace

extern "C" {

// --- what nvcc's host code calls ---------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  functions()[host].name = device;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pending = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pending.grid;
  *block = pending.block;
  *shared = pending.shared;
  *static_cast<void**>(stream) = pending.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return launch(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared, nullptr);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                    cudaStream_t) {
  return launch(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared, nullptr);
}

// --- launches ----------------------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t) {
  return launch(function, grid, block, arguments, shared, nullptr);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  emu::Dim3 cluster;
  bool clustered = false, early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& a = config->attrs[i];
    switch (a.id) {
      case cudaLaunchAttributeClusterDimension:
        cluster = {a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z};
        clustered = true;
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        early = a.val.programmaticStreamSerializationAllowed != 0;
        break;
      case cudaLaunchAttributeIgnore:
      case cudaLaunchAttributePriority:
      case cudaLaunchAttributeClusterSchedulingPolicyPreference:
        break;
      default:
        return refuse(cudaErrorNotSupported, "launch attribute " + std::to_string(a.id) + " is not modelled");
    }
  }
  return launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                clustered ? &cluster : nullptr, early);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const auto it = functions().find(function);
  if (it == functions().end()) return set_error(cudaErrorInvalidDeviceFunction);
  const emu::KernelInfo* kernel = emu::find_kernel(it->second.name);
  const size_t fixed = kernel ? kernel->static_shared : 0;
  switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
      if (value < 0 || static_cast<size_t>(value) + fixed > kMaxBlockShared) return set_error(cudaErrorInvalidValue);
      it->second.max_dynamic_shared = static_cast<size_t>(value);
      return cudaSuccess;
    case cudaFuncAttributeNonPortableClusterSizeAllowed:
      it->second.any_cluster_size = value != 0;
      return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout:
      return cudaSuccess;
    default:
      return refuse(cudaErrorNotSupported, "function attribute " + std::to_string(attribute) + " is not modelled");
  }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  const auto it = functions().find(function);
  const emu::KernelInfo* kernel = it == functions().end() ? nullptr : emu::find_kernel(it->second.name);
  if (!kernel) return set_error(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->sharedSizeBytes = kernel->static_shared;
  attributes->maxThreadsPerBlock = kMaxThreads;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(it->second.max_dynamic_shared);
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

// One block a multiprocessor: registers, the usual limit, are not modelled.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, const void*, const cudaLaunchConfig_t*) {
  *size = 8;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
  int size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      const auto& c = config->attrs[i].val.clusterDim;
      size = static_cast<int>(c.x * c.y * c.z);
    }
  *clusters = size ? emu::options.multiprocessors / size : 0;
  return cudaSuccess;
}

// --- errors ------------------------------------------------------------------------------------------------------

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  if (error == failure.code) return failure.words.c_str();
  switch (error) {
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorInvalidSymbol:
      return "the emulator does not model symbols";
    default:
      return "an error that the emulator does not model";
  }
}
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
cudaError_t cudaGetLastError(void) { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError(void) { return last_error; }

// --- devices -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device != 0) return set_error(cudaErrorInvalidDevice);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return set_error(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = emu::options.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kMaxThreads;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kDefaultShared;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kMaxBlockShared;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = kMaxBlockShared + 1024;
      return cudaSuccess;
    case cudaDevAttrClusterLaunch:
      *value = 1;
      return cudaSuccess;
    default:
      return set_error(cudaErrorNotSupported);
  }
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device != 0) return set_error(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "flashladder emulator");
  p->major = 9;
  p->warpSize = 32;
  p->multiProcessorCount = emu::options.multiprocessors;
  p->maxThreadsPerBlock = kMaxThreads;
  p->sharedMemPerBlock = kDefaultShared;
  p->sharedMemPerBlockOptin = kMaxBlockShared;
  p->sharedMemPerMultiprocessor = kMaxBlockShared + 1024;
  p->totalGlobalMem = size_t{80} << 30;
  p->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

// --- memory ------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = emu::device_alloc(bytes);
  return *p ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFree(void* p) {
  emu::device_free(p);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaMalloc(p, bytes); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaMallocManaged(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return refuse(cudaErrorInvalidSymbol, "cudaMemcpyToSymbol is not modelled");
}
cudaError_t cudaMemcpyFromSymbol(void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return refuse(cudaErrorInvalidSymbol, "cudaMemcpyFromSymbol is not modelled");
}
cudaError_t cudaGetSymbolAddress(void**, const void*) {
  return refuse(cudaErrorInvalidSymbol, "cudaGetSymbolAddress is not modelled");
}

// --- streams and events: no-ops ----------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make_handle(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make_handle(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make_handle(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return make_handle(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make_handle(event); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0;
  return cudaSuccess;
}

// --- the driver --------------------------------------------------------------------------------------------------

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  return encode_tiled(map, type, rank, base, dims, strides, box, element_strides, interleave, swizzle, promotion, fill);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(encode_tiled) : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return known || result ? cudaSuccess : set_error(cudaErrorInvalidValue);
}

}  // extern "C"
