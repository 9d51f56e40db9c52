// The stand-in for libcudart, called as nvcc's host code calls it.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "harness.h"

using namespace test;

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*);
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*);
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*);
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t);
}

namespace {

// __global__ void scale(int* x, int factor): one thread an element, through dynamic shared memory.
void scale(void** arguments) {
  int* x = *static_cast<int**>(arguments[0]);
  const int factor = *static_cast<int*>(arguments[1]);
  const uint64_t address = reinterpret_cast<uint64_t>(x + emu::current->ctaid.x * 32 + thread());
  auto* p = static_cast<int*>(emu::global(address, 4, 4, true, "ld.global", {"scale.cu", 5}));
  store<int>(smem(4 * lane()), *p * factor, HERE);
  *p = load<int>(smem(4 * lane()), HERE) + static_cast<int>(emu::cluster_size()) - 1;
}
const emu::Registrar registrar("scale", {scale, 0, {}});

char scale_stub, unknown_stub;

void register_scale() {
  void** handle = __cudaRegisterFatBinary(nullptr);
  __cudaRegisterFunction(handle, &scale_stub, nullptr, "scale", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  __cudaRegisterFunction(handle, &unknown_stub, nullptr, "unknown", -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  emu::options = {.races = 1};
  emu_reset();
}

struct Ints {
  int* data;
  explicit Ints(int count) {
    CHECK(cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(int)) == cudaSuccess);
    std::vector<int> values(count);
    for (int i = 0; i < count; ++i) values[i] = i;
    CHECK(cudaMemcpy(data, values.data(), count * sizeof(int), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  ~Ints() { cudaFree(data); }
};

cudaError_t launch_scale(int* data, int factor, dim3 grid, size_t shared = 128) {
  void* arguments[] = {&data, &factor};
  return cudaLaunchKernel(&scale_stub, grid, 32, arguments, shared, nullptr);
}

}  // namespace

TEST(kernels_launch_as_nvcc_launches_them) {
  register_scale();
  Ints x(64);
  int factor = 3;
  void* arguments[] = {&x.data, &factor};
  CHECK_EQUAL(__cudaPushCallConfiguration(2, 32, 128, nullptr), 0u);
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
  cudaKernel_t kernel;
  CHECK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream) == cudaSuccess);
  CHECK(__cudaGetKernel(&kernel, &scale_stub) == cudaSuccess);
  CHECK(__cudaLaunchKernel(kernel, grid, block, arguments, shared, stream) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaSuccess);
  int host[64];
  CHECK(cudaMemcpy(host, x.data, sizeof host, cudaMemcpyDeviceToHost) == cudaSuccess);
  for (int i = 0; i < 64; ++i) CHECK_EQUAL(host[i], 3 * i);
  CHECK_EMPTY(emu_log());
}

TEST(faults_become_cuda_errors_with_the_emulators_words) {
  register_scale();
  Ints x(32);
  const cudaError_t error = launch_scale(x.data, 1, 2);
  CHECK(error == cudaErrorLaunchFailure);
  CHECK(cudaPeekAtLastError() == error);
  CHECK(cudaGetLastError() == error);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK_CONTAINS(cudaGetErrorString(error),
                 "scale: scale.cu:5: block (1,0,0) thread (0,0,0): ld.global: out-of-bounds");
  CHECK_CONTAINS(emu_log(), cudaGetErrorString(error));
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorInvalidDevice), "invalid device ordinal");
  CHECK(launch_scale(x.data, 1, 1) == cudaSuccess);
}

TEST(launches_are_validated) {
  register_scale();
  Ints x(32);
  CHECK(launch_scale(x.data, 1, dim3(1, 70000)) == cudaErrorInvalidConfiguration);
  CHECK(launch_scale(x.data, 1, 0) == cudaErrorInvalidConfiguration);
  CHECK(launch_scale(x.data, 1, 1, 50 << 10) == cudaErrorInvalidValue);
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorInvalidValue), "more than cudaFuncSetAttribute allowed");
  CHECK(cudaFuncSetAttribute(&scale_stub, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10) == cudaSuccess);
  CHECK(launch_scale(x.data, 1, 1, 50 << 10) == cudaSuccess);
  CHECK(cudaFuncSetAttribute(&scale_stub, cudaFuncAttributeMaxDynamicSharedMemorySize, 300 << 10) ==
        cudaErrorInvalidValue);
  CHECK(cudaLaunchKernel(&unknown_stub, 1, 32, nullptr, 0, nullptr) == cudaErrorInvalidDeviceFunction);
  CHECK_CONTAINS(emu_log(), "unknown: the kernel has not been translated");
}

TEST(clusters_launch_by_attribute) {
  register_scale();
  Ints x(128);
  int factor = 1;
  void* arguments[] = {&x.data, &factor};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = 4;
  config.blockDim = 32;
  config.dynamicSmemBytes = 128;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelExC(&config, &scale_stub, arguments) == cudaSuccess);
  for (int i = 0; i < 128; ++i) CHECK_EQUAL(x.data[i], i + 1);
  attribute.val.clusterDim = {3, 1, 1};
  CHECK(cudaLaunchKernelExC(&config, &scale_stub, arguments) == cudaErrorLaunchFailure);
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorLaunchFailure), "scale: the cluster does not divide the grid");
  attribute.id = cudaLaunchAttributeCooperative;
  CHECK(cudaLaunchKernelExC(&config, &scale_stub, arguments) == cudaErrorNotSupported);
}

TEST(devices_are_described) {
  int value = -1;
  CHECK(cudaGetDevice(&value) == cudaSuccess);
  CHECK_EQUAL(value, 0);
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
  CHECK_EQUAL(properties.multiProcessorCount, value);
  CHECK_EQUAL(properties.sharedMemPerBlockOptin, 232448u);
}

TEST(tensor_maps_are_encoded_through_the_driver_entry_point) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result) ==
        cudaSuccess);
  CHECK(result == cudaDriverEntryPointSuccess);
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  Buffer memory(8192);
  CUtensorMap map;
  const cuuint64_t dim[2] = {64, 64}, stride[1] = {128};
  const cuuint32_t box[2] = {64, 8}, element_strides[2] = {1, 1};
  const auto try_encode = [&](CUtensorMapFloatOOBfill fill, CUtensorMapSwizzle swizzle) {
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, memory.as<void>(), dim, stride, box, element_strides,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, fill);
  };
  CHECK(try_encode(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, CU_TENSOR_MAP_SWIZZLE_128B) == CUDA_SUCCESS);
  emu::TensorMap encoded;
  std::memcpy(&encoded, &map, sizeof encoded);
  CHECK_EQUAL(encoded.dim[1], 64u);
  CHECK_EQUAL(encoded.swizzle, 3u);
  CHECK(encoded.type == static_cast<uint8_t>(emu::Element::bf16));
  emu_reset();
  CHECK(try_encode(CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA, CU_TENSOR_MAP_SWIZZLE_128B) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK_CONTAINS(emu_log(), "interleave and NaN fill are not modelled");
  CHECK(cudaGetDriverEntryPointByVersion("cuOther", &entry, 12000, cudaEnableDefault, &result) == cudaSuccess);
  CHECK(result == cudaDriverEntryPointSymbolNotFound);
}
