// Sum of n numbers: a grid-stride loop, a tree in shared memory, one atomic a block. A program of its own, for
// `flashladder emulate examples/block_sum.cu 10000`. With -DRACY=1 in its place a barrier is missing.
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifndef RACY
#define RACY 0
#endif

constexpr int kThreads = 128;

__global__ void block_sum(const float* x, int n, float* total) {
  __shared__ float part[kThreads];
  float sum = 0.f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  part[threadIdx.x] = sum;
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    if (!RACY || stride != kThreads / 4) __syncthreads();
    if (threadIdx.x < stride) part[threadIdx.x] += part[threadIdx.x + stride];
  }
  if (threadIdx.x == 0) atomicAdd(total, part[0]);
}

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 1000;
  std::vector<float> x(n);
  double expected = 0;
  for (int i = 0; i < n; ++i) expected += x[i] = static_cast<float>(i % 7);
  float *device_x, *device_total, total = 0;
  cudaMalloc(&device_x, n * sizeof(float));
  cudaMalloc(&device_total, sizeof(float));
  cudaMemcpy(device_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice);
  cudaMemcpy(device_total, &total, sizeof(float), cudaMemcpyHostToDevice);
  block_sum<<<4, kThreads>>>(device_x, n, device_total);
  cudaMemcpy(&total, device_total, sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(device_x);
  cudaFree(device_total);
  std::printf("sum %.0f, expected %.0f\n", total, expected);
  return total == static_cast<float>(expected) ? 0 : 1;
}
