// Causal attention on wgmma, B1 H2 S512 D64 fp16, checked against the CPU: what a Hopper rung costs the emulator.
// A warpgroup owns 64 query rows. Q, K and V lie in 128-byte-swizzled shared memory, written by threads and handed to
// the async proxy; scores by wgmma SS, P V by wgmma RS with the weights in registers.
#include <cuda_fp16.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

constexpr int kHeads = 2, kSeq = 512, kDim = 64, kTile = 64, kThreads = 128;

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Of a tile of 128-byte rows, swizzled: address / 16, 1024 bytes between groups of 8 rows, mode 1 (128 bytes).
__device__ uint64_t descriptor(const void* tile) {
  return (shared_address(tile) & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D32 D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
#define D32_LIST                                                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23," \
  " %24, %25, %26, %27, %28, %29, %30, %31}"

__device__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " D32_LIST ", %32, %33, p, 1, 1, 0, 0;}"
      : D32
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ void wgmma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " D32_LIST ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : D32
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ void fence_operands() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit_and_wait() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

__device__ void load(__half (*tile)[kDim], const __half* rows) {
  for (int i = threadIdx.x; i < kTile * kDim / 8; i += kThreads) {
    const int row = i / 8, chunk = i % 8;
    *reinterpret_cast<uint4*>(&tile[row][(chunk ^ row % 8) * 8]) = reinterpret_cast<const uint4*>(rows)[i];
  }
}

__device__ float quad(float x, bool max) {
  for (int mask = 1; mask <= 2; mask *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, mask);
    x = max ? fmaxf(x, other) : x + other;
  }
  return x;
}

__device__ uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__global__ void __launch_bounds__(kThreads) attention(const __half* q, const __half* k, const __half* v, float* o) {
  __shared__ alignas(1024) __half q_tile[kTile][kDim], k_tile[kTile][kDim], v_tile[kTile][kDim];
  const int64_t head = static_cast<int64_t>(blockIdx.y) * kSeq * kDim;
  const int m0 = blockIdx.x * kTile, lane = threadIdx.x % 32;
  const int row = m0 + threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  load(q_tile, q + head + m0 * kDim);
  float out[32] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
  for (int n0 = 0; n0 <= m0; n0 += kTile) {
    load(k_tile, k + head + n0 * kDim);
    load(v_tile, v + head + n0 * kDim);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float s[32] = {};
    fence_operands();
    for (int d = 0; d < kDim / 16; ++d)
      wgmma_ss(s, descriptor(&q_tile[0][d * 16]), descriptor(&k_tile[0][d * 16]), d > 0);
    commit_and_wait();
    for (int r = 0; r < 2; ++r) {
      float most = row_max[r];
      for (int i = 0; i < 32; ++i) {
        if (i / 2 % 2 != r) continue;
        const bool visible = n0 + i / 4 * 8 + column + i % 2 <= row + r * 8;
        s[i] = visible ? s[i] * (1.4426950408889634f / 8) : -INFINITY;
        most = fmaxf(most, s[i]);
      }
      most = quad(most, true);
      const float rescale = exp2f(row_max[r] - most);
      row_max[r] = most;
      row_sum[r] *= rescale;
      for (int i = 0; i < 32; ++i) {
        if (i / 2 % 2 != r) continue;
        s[i] = exp2f(s[i] - most);
        row_sum[r] += s[i];
        out[i] *= rescale;
      }
    }
    fence_operands();
    for (int block = 0; block < kTile / 16; ++block) {
      const float* p = s + block * 8;
      const uint32_t a[4] = {pack(p[0], p[1]), pack(p[2], p[3]), pack(p[4], p[5]), pack(p[6], p[7])};
      wgmma_rs(out, a, descriptor(&v_tile[block * 16][0]));
    }
    commit_and_wait();
    __syncthreads();
  }
  for (int r = 0; r < 2; ++r) {
    const float sum = quad(row_sum[r], false);
    for (int i = 0; i < 32; ++i)
      if (i / 2 % 2 == r) o[head + (row + r * 8) * kDim + i / 4 * 8 + column + i % 2] = out[i] / sum;
  }
}

int main() {
  constexpr int kSize = kHeads * kSeq * kDim;
  __half *q, *k, *v;
  float* o;
  cudaMallocManaged(&q, kSize * sizeof(__half));
  cudaMallocManaged(&k, kSize * sizeof(__half));
  cudaMallocManaged(&v, kSize * sizeof(__half));
  cudaMallocManaged(&o, kSize * sizeof(float));
  uint32_t state = 1;
  const auto random = [&] {
    state = state * 1664525u + 1013904223u;
    return __float2half(static_cast<float>(state >> 16) / 32768.f - 1.f);
  };
  for (int i = 0; i < kSize; ++i) q[i] = random(), k[i] = random(), v[i] = random();

  const auto start = std::chrono::steady_clock::now();
  attention<<<dim3(kSeq / kTile, kHeads), kThreads>>>(q, k, v, o);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  double worst = 0;
  for (int head = 0; head < kHeads; ++head)
    for (int row = 0; row < kSeq; row += 37) {
      const int64_t base = int64_t{head} * kSeq * kDim;
      std::vector<double> weights(row + 1), expected(kDim);
      double sum = 0;
      for (int key = 0; key <= row; ++key) {
        double score = 0;
        for (int d = 0; d < kDim; ++d)
          score += double{__half2float(q[base + row * kDim + d])} * double{__half2float(k[base + key * kDim + d])};
        sum += weights[key] = std::exp(score / 8);
      }
      for (int d = 0; d < kDim; ++d) {
        for (int key = 0; key <= row; ++key)
          expected[d] += weights[key] * double{__half2float(v[base + key * kDim + d])};
        worst = std::fmax(worst, std::fabs(expected[d] / sum - o[base + row * kDim + d]));
      }
    }
  std::printf("error %.2g seconds %.4f\n", worst, seconds);
  return worst < 2e-3 ? 0 : 2;
}
