// r01_tiled, after r00_naive: 32 x 32 tiles in shared memory.
// All 128 threads compute a tile's scores and its share of O; one thread reduces every row's maximum and sum, while
// the others wait at a barrier. Reuse goes up, parallel work goes down.
#include "launch.cuh"
#include "softmax.cuh"
#include "tensor.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 32,
    .tile_n = 32,
    .grid = Grid::single,
    .reduction = Reduction::serial,
    .access_bytes = 2,
    .swizzle = Swizzle::none,
    .threads = 128,
};

constexpr int kM = kConfig.tile_m, kN = kConfig.tile_n;
constexpr int kWarpRows = kM / (kConfig.threads / 32);  // query rows whose scores one warp computes
constexpr int kParts = kConfig.threads / kM;            // threads that share one row of O
static_assert(kN == 32, "a lane owns one key of the tile");

template <class T, int D>
struct Shared {
  T q[kM][D], k[kN][D], v[kN][D];
  float s[kM][kN];  // scores, then weights
  float row_max[kM], row_sum[kM], rescale[kM];
};

// Rows past the end are zero-filled: a masked weight of 0 times garbage may be NaN.
template <class T, int D>
__device__ void load_tile(T (*tile)[D], const T* source, int64_t row_stride, int first, int rows) {
  for (int i = threadIdx.x; i < 32 * D; i += kConfig.threads) {
    const int row = i / D, d = i % D;
    tile[row][d] = first + row < rows ? source[(first + row) * row_stride + d] : from_float<T>(0.f);
  }
}

template <class T, int D>
__device__ void forward_tile(const Params& p, int batch, int head, int m0) {
  __shared__ Shared<T, D> smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int o_row = threadIdx.x / kParts, part = threadIdx.x % kParts;
  const T* q = head_base(static_cast<const T*>(p.q), p.q_strides, batch, head);
  const T* k = head_base(static_cast<const T*>(p.k), p.k_strides, batch, kv_head(p, head));
  const T* v = head_base(static_cast<const T*>(p.v), p.v_strides, batch, kv_head(p, head));

  load_tile<T, D>(smem.q, q, p.q_strides.row, m0, p.seq_q);
  if (threadIdx.x < kM) {
    smem.row_max[threadIdx.x] = -CUDART_INF_F;
    smem.row_sum[threadIdx.x] = 0.f;
  }
  float o[D / kParts] = {};  // columns (part + kParts * i) * 8 + e

  const int n_end = visible_keys(p, min(m0 + kM, p.seq_q) - 1);
  for (int n0 = 0; n0 < n_end; n0 += kN) {
    load_tile<T, D>(smem.k, k, p.k_strides.row, n0, p.seq_k);
    load_tile<T, D>(smem.v, v, p.v_strides.row, n0, p.seq_k);
    __syncthreads();

    float score[kWarpRows] = {};
#pragma unroll 8
    for (int d = 0; d < D; ++d) {
      const float key = to_float(smem.k[lane][d]);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) score[r] += to_float(smem.q[warp * kWarpRows + r][d]) * key;
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = warp * kWarpRows + r;
      const bool visible = n0 + lane < visible_keys(p, m0 + row);
      smem.s[row][lane] = visible ? to_log2_domain(score[r], p.scale_log2) : -CUDART_INF_F;
    }
    __syncthreads();

    if (threadIdx.x == 0) {
      for (int row = 0; row < kM; ++row) {
        float new_max = smem.row_max[row];
        for (int key = 0; key < kN; ++key) new_max = fmaxf(new_max, smem.s[row][key]);
        smem.rescale[row] = ptx::ex2(smem.row_max[row] - finite_max(new_max));
        smem.row_max[row] = new_max;
      }
    }
    __syncthreads();

#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = warp * kWarpRows + r;
      smem.s[row][lane] = ptx::ex2(smem.s[row][lane] - finite_max(smem.row_max[row]));
    }
    __syncthreads();

    if (threadIdx.x == 0) {
      for (int row = 0; row < kM; ++row) {
        float sum = 0.f;
        for (int key = 0; key < kN; ++key) sum += smem.s[row][key];
        smem.row_sum[row] = smem.row_sum[row] * smem.rescale[row] + sum;
      }
    }

    const float rescale = smem.rescale[o_row];
#pragma unroll
    for (int i = 0; i < D / kParts; ++i) o[i] *= rescale;
#pragma unroll 4
    for (int key = 0; key < kN; ++key) {
      const float weight = smem.s[o_row][key];
#pragma unroll
      for (int i = 0; i < D / kParts; ++i)
        o[i] += weight * to_float(smem.v[key][(part + kParts * (i / 8)) * 8 + i % 8]);
    }
    __syncthreads();  // the tile is consumed, the row sums are complete
  }

  __syncthreads();  // also orders the initial row state when the loop ran no tile
  if (m0 + o_row < p.seq_q) {
    T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head) + (m0 + o_row) * p.o_strides.row;
    const float inverse = inverse_sum(smem.row_sum[o_row]);
#pragma unroll
    for (int i = 0; i < D / kParts; ++i) out[(part + kParts * (i / 8)) * 8 + i % 8] = from_float<T>(o[i] * inverse);
    if (part == 0)
      head_base(p.lse, p.lse_strides, batch, head)[(m0 + o_row) * p.lse_strides.row] =
          log_sum_exp(smem.row_max[o_row], smem.row_sum[o_row]);
  }
}

template <class T, int D>
__device__ void forward(const Params& p) {
  const int tiles = (p.seq_q + kM - 1) / kM;
  for (int batch = 0; batch < p.batch; ++batch)
    for (int head = 0; head < p.heads_q; ++head)
      for (int tile = 0; tile < tiles; ++tile) {
        forward_tile<T, D>(p, batch, head, tile * kM);
        __syncthreads();  // shared memory is free for the next tile
      }
}

FLASHLADDER_RUNG(r01_tiled, kConfig)
