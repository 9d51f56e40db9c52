// softmax.cuh's exp2_polynomial: the largest relative error from -126 to 12, and what it makes of the arguments beyond.
#include <cmath>
#include <cstdio>

#include "softmax.cuh"

__global__ void apply(const float* x, float* y, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) y[i] = flashladder::exp2_polynomial(x[i]);
}

int main() {
  constexpr int kCount = 13801, kBeyond = 6;
  const float beyond[kBeyond] = {-INFINITY, -1e30f, -127.5f, 128.5f, INFINITY, NAN};
  float *x, *y;
  cudaMallocManaged(&x, (kCount + kBeyond) * sizeof(float));
  cudaMallocManaged(&y, (kCount + kBeyond) * sizeof(float));
  for (int i = 0; i < kCount; ++i) x[i] = -126.f + i / 100.f;
  for (int i = 0; i < kBeyond; ++i) x[kCount + i] = beyond[i];
  apply<<<1, 128>>>(x, y, kCount + kBeyond);
  cudaDeviceSynchronize();
  double worst = 0;
  for (int i = 0; i < kCount; ++i) worst = fmax(worst, fabs(y[i] / exp2(static_cast<double>(x[i])) - 1));
  printf("%.3g", worst);
  for (int i = 0; i < kBeyond; ++i) printf(" %g", static_cast<double>(y[kCount + i]));
  printf("\n");
}
