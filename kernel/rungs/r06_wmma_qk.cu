// r06_wmma_qk, after r05_swizzle: Q K^T on the tensor cores through WMMA.
// Each warp makes one 16 x 16 piece of the 32 x 32 scores. Their fragments have no documented layout, so the scores go
// through shared memory. WMMA reads rows at a constant distance: those of Q, K and the scores are padded, which is as
// free of bank conflicts as the swizzle that V keeps.
#include <mma.h>

#include "launch.cuh"
#include "softmax.cuh"
#include "swizzle.h"
#include "tensor.cuh"

using namespace flashladder;
namespace wmma = nvcuda::wmma;

constexpr Config kConfig{
    .tile_m = 32,
    .tile_n = 32,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 128,
    .product = Product::wmma_qk,
};

constexpr int kM = kConfig.tile_m, kN = kConfig.tile_n;
constexpr int kWarpRows = kM / (kConfig.threads / 32);  // query rows whose weights one warp computes
constexpr int kParts = kConfig.threads / kM;            // threads that share one row of O
constexpr int kPiece = 16;                              // rows, columns and depth of a WMMA product
constexpr int kScoreStride = kN + 8;
static_assert(kWarpRows * kParts == 32, "the warp that computes a row's weights also owns the row's O");
static_assert(kN == 32, "a lane owns one key of the tile");
static_assert((kM / kPiece) * (kN / kPiece) == kConfig.threads / 32, "a warp makes one piece of the scores");

// Where chunk `chunk` of a row of V lies in shared memory.
__device__ constexpr int place(int row, int chunk) { return swizzle_chunk(row, chunk); }

template <class T, int D>
struct alignas(32) Shared {  // WMMA wants 32-byte aligned pieces
  Chunk<T> q[kM][D / 8 + 1], k[kN][D / 8 + 1], v[kN][D / 8];
  float s[kM][kScoreStride];  // scores, then weights
  float row_max[kM], row_sum[kM], rescale[kM];
};

// Rows past the end are zero-filled: a masked weight of 0 times garbage may be NaN.
template <class T, int D, bool kSwizzled, int kChunks>
__device__ void load_tile(Chunk<T> (*tile)[kChunks], const T* source, int64_t row_stride, int first, int rows) {
  for (int i = threadIdx.x; i < 32 * (D / 8); i += kConfig.threads) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    uint4 x = {};
    if (first + row < rows) x = reinterpret_cast<const uint4*>(source + (first + row) * row_stride)[chunk];
    reinterpret_cast<uint4&>(tile[row][kSwizzled ? place(row, chunk) : chunk]) = x;
  }
}

// This warp's piece of Q K^T, into `smem.s`.
template <class T, int D>
__device__ void score_piece(Shared<T, D>& smem, int warp) {
  constexpr int kStride = sizeof(smem.q[0]) / sizeof(T);
  const int row = warp / (kN / kPiece) * kPiece, key = warp % (kN / kPiece) * kPiece;
  wmma::fragment<wmma::accumulator, kPiece, kPiece, kPiece, float> scores;
  wmma::fill_fragment(scores, 0.f);
#pragma unroll
  for (int d = 0; d < D; d += kPiece) {
    wmma::fragment<wmma::matrix_a, kPiece, kPiece, kPiece, T, wmma::row_major> q;
    wmma::fragment<wmma::matrix_b, kPiece, kPiece, kPiece, T, wmma::col_major> k;
    wmma::load_matrix_sync(q, smem.q[row][d / 8].x, kStride);
    wmma::load_matrix_sync(k, smem.k[key][d / 8].x, kStride);
    wmma::mma_sync(scores, q, k, scores);
  }
  wmma::store_matrix_sync(&smem.s[row][key], scores, kScoreStride, wmma::mem_row_major);
}

template <class T, int D>
__device__ void forward_tile(const Params& p, int batch, int head, int m0) {
  __shared__ Shared<T, D> smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int o_row = threadIdx.x / kParts, part = threadIdx.x % kParts;
  const T* q = head_base(static_cast<const T*>(p.q), p.q_strides, batch, head);
  const T* k = head_base(static_cast<const T*>(p.k), p.k_strides, batch, kv_head(p, head));
  const T* v = head_base(static_cast<const T*>(p.v), p.v_strides, batch, kv_head(p, head));

  load_tile<T, D, false>(smem.q, q, p.q_strides.row, m0, p.seq_q);
  if (threadIdx.x < kM) {
    smem.row_max[threadIdx.x] = -CUDART_INF_F;
    smem.row_sum[threadIdx.x] = 0.f;
  }
  float o[D / kParts] = {};  // columns (part + kParts * i) * 8 + e

  const int n_end = visible_keys(p, min(m0 + kM, p.seq_q) - 1);
  for (int n0 = 0; n0 < n_end; n0 += kN) {
    load_tile<T, D, false>(smem.k, k, p.k_strides.row, n0, p.seq_k);
    load_tile<T, D, true>(smem.v, v, p.v_strides.row, n0, p.seq_k);
    __syncthreads();

    score_piece(smem, warp);
    __syncthreads();  // a warp's rows of scores come from two warps

#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = warp * kWarpRows + r;
      const bool visible = n0 + lane < visible_keys(p, m0 + row);
      const float t = visible ? to_log2_domain(smem.s[row][lane], p.scale_log2) : -CUDART_INF_F;
      const float old_max = smem.row_max[row], new_max = fmaxf(old_max, warp_max(t));
      const float weight = ptx::ex2(t - finite_max(new_max)), sum = warp_sum(weight);
      smem.s[row][lane] = weight;
      __syncwarp();  // every lane has read the old maximum
      if (lane == 0) {
        smem.rescale[row] = ptx::ex2(old_max - finite_max(new_max));
        smem.row_max[row] = new_max;
        smem.row_sum[row] = smem.row_sum[row] * smem.rescale[row] + sum;
      }
    }
    __syncwarp();  // the warp's rows of weights and their state are written

    const float rescale = smem.rescale[o_row];
#pragma unroll
    for (int i = 0; i < D / kParts; ++i) o[i] *= rescale;
#pragma unroll 4
    for (int group = 0; group < kN / 4; ++group) {
      const float4 weights = reinterpret_cast<const float4*>(smem.s[o_row])[group];
      const float weight[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = group * 4 + j;
#pragma unroll
        for (int i = 0; i < D / kParts / 8; ++i) {
          const Chunk<T> value = smem.v[key][place(key, part + kParts * i)];
#pragma unroll
          for (int e = 0; e < 8; ++e) o[i * 8 + e] += weight[j] * to_float(value.x[e]);
        }
      }
    }
    __syncthreads();  // the tile is consumed
  }

  __syncthreads();  // also orders the initial row state when the loop ran no tile
  if (m0 + o_row < p.seq_q) {
    T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head) + (m0 + o_row) * p.o_strides.row;
    const float inverse = inverse_sum(smem.row_sum[o_row]);
#pragma unroll
    for (int i = 0; i < D / kParts / 8; ++i) {
      Chunk<T> result;
#pragma unroll
      for (int e = 0; e < 8; ++e) result.x[e] = from_float<T>(o[i * 8 + e] * inverse);
      reinterpret_cast<uint4*>(out)[part + kParts * i] = reinterpret_cast<const uint4&>(result);
    }
    if (part == 0)
      head_base(p.lse, p.lse_strides, batch, head)[(m0 + o_row) * p.lse_strides.row] =
          log_sum_exp(smem.row_max[o_row], smem.row_sum[o_row]);
  }
}

template <class T, int D>
__device__ void forward(const Params& p) {
  forward_tile<T, D>(p, blockIdx.z, blockIdx.y, blockIdx.x * kM);
}

FLASHLADDER_RUNG(r06_wmma_qk, kConfig)
