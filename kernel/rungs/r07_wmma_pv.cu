// r07_wmma_pv, after r06_wmma_qk: P V on the tensor cores through WMMA too.
// The weights are rounded to 16 bits and a warp owns 16 rows and half the columns of O. Each 16 x 16 product goes
// through a scratch of the warp's own to lanes that know its rows, and O is rescaled in their registers: fragments have
// no documented layout. V's rows are padded like those of Q and K.
#include <mma.h>

#include "launch.cuh"
#include "softmax.cuh"
#include "tensor.cuh"

using namespace flashladder;
namespace wmma = nvcuda::wmma;

constexpr Config kConfig{
    .tile_m = 32,
    .tile_n = 32,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::padded,
    .threads = 128,
    .product = Product::wmma,
};

constexpr int kM = kConfig.tile_m, kN = kConfig.tile_n;
constexpr int kWarps = kConfig.threads / 32;
constexpr int kWarpRows = kM / kWarps;  // query rows whose weights one warp computes
constexpr int kPiece = 16;              // rows, columns and depth of a WMMA product
constexpr int kRowPieces = kM / kPiece;
constexpr int kWarpsPerRow = kWarps / kRowPieces;                  // warps that share 16 rows of O
constexpr int kScoreStride = kN + 8, kScratchStride = kPiece + 8;  // 8 banks on: an 8-byte access a lane is free of
                                                                   // conflicts over four rows
static_assert(kN == 32, "a lane owns one key of the tile");
static_assert(kRowPieces * (kN / kPiece) == kWarps, "a warp makes one piece of the scores");

template <class T, int D>
struct alignas(32) Shared {  // WMMA wants 32-byte aligned pieces
  Chunk<T> q[kM][D / 8 + 1], k[kN][D / 8 + 1], v[kN][D / 8 + 1];
  float s[kM][kScoreStride];
  float scratch[kWarps][kPiece][kScratchStride];
  T p[kM][kN + 8];  // weights
  float row_max[kM], row_sum[kM], rescale[kM];
};

template <class T, int D>
constexpr int kStride = D + 8;  // of a row of Q, K and V in shared memory, in elements

// The two neighbouring columns of a 16 x 16 piece that a lane owns: i = 0, 1 in its upper row, 2, 3 in its lower one.
struct Owned {
  int row, column;
};
__device__ __forceinline__ Owned owned(int lane, int i) { return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2 * 8}; }

// Rows past the end are zero-filled: a masked weight of 0 times garbage may be NaN.
template <class T, int D>
__device__ void load_tile(Chunk<T> (*tile)[D / 8 + 1], const T* source, int64_t row_stride, int first, int rows) {
  for (int i = threadIdx.x; i < 32 * (D / 8); i += kConfig.threads) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    uint4 x = {};
    if (first + row < rows) x = reinterpret_cast<const uint4*>(source + (first + row) * row_stride)[chunk];
    reinterpret_cast<uint4&>(tile[row][chunk]) = x;
  }
}

// This warp's piece of Q K^T, into `smem.s`.
template <class T, int D>
__device__ void score_piece(Shared<T, D>& smem, int warp) {
  const int row = warp / (kN / kPiece) * kPiece, key = warp % (kN / kPiece) * kPiece;
  wmma::fragment<wmma::accumulator, kPiece, kPiece, kPiece, float> scores;
  wmma::fill_fragment(scores, 0.f);
#pragma unroll
  for (int d = 0; d < D; d += kPiece) {
    wmma::fragment<wmma::matrix_a, kPiece, kPiece, kPiece, T, wmma::row_major> q;
    wmma::fragment<wmma::matrix_b, kPiece, kPiece, kPiece, T, wmma::col_major> k;
    wmma::load_matrix_sync(q, smem.q[row][d / 8].x, kStride<T, D>);
    wmma::load_matrix_sync(k, smem.k[key][d / 8].x, kStride<T, D>);
    wmma::mma_sync(scores, q, k, scores);
  }
  wmma::store_matrix_sync(&smem.s[row][key], scores, kScoreStride, wmma::mem_row_major);
}

// P V for 16 rows from `row` and 16 columns from `column`, into this warp's scratch.
template <class T, int D>
__device__ void value_piece(Shared<T, D>& smem, int warp, int row, int column) {
  wmma::fragment<wmma::accumulator, kPiece, kPiece, kPiece, float> product;
  wmma::fill_fragment(product, 0.f);
#pragma unroll
  for (int key = 0; key < kN; key += kPiece) {
    wmma::fragment<wmma::matrix_a, kPiece, kPiece, kPiece, T, wmma::row_major> weights;
    wmma::fragment<wmma::matrix_b, kPiece, kPiece, kPiece, T, wmma::row_major> v;
    wmma::load_matrix_sync(weights, &smem.p[row][key], kN + 8);
    wmma::load_matrix_sync(v, smem.v[key][column / 8].x, kStride<T, D>);
    wmma::mma_sync(product, weights, v, product);
  }
  wmma::store_matrix_sync(&smem.scratch[warp][0][0], product, kScratchStride, wmma::mem_row_major);
}

template <class T, int D>
__device__ void forward_tile(const Params& p, int batch, int head, int m0) {
  constexpr int kPieces = D / kPiece / kWarpsPerRow;  // 16 x 16 pieces of O that a warp owns
  __shared__ Shared<T, D> smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int o_row = warp / kWarpsPerRow * kPiece, o_column = warp % kWarpsPerRow * kPieces * kPiece;
  const T* q = head_base(static_cast<const T*>(p.q), p.q_strides, batch, head);
  const T* k = head_base(static_cast<const T*>(p.k), p.k_strides, batch, kv_head(p, head));
  const T* v = head_base(static_cast<const T*>(p.v), p.v_strides, batch, kv_head(p, head));

  load_tile<T, D>(smem.q, q, p.q_strides.row, m0, p.seq_q);
  if (threadIdx.x < kM) {
    smem.row_max[threadIdx.x] = -CUDART_INF_F;
    smem.row_sum[threadIdx.x] = 0.f;
  }
  float2 o[kPieces][4] = {};

  const int n_end = visible_keys(p, min(m0 + kM, p.seq_q) - 1);
  for (int n0 = 0; n0 < n_end; n0 += kN) {
    load_tile<T, D>(smem.k, k, p.k_strides.row, n0, p.seq_k);
    load_tile<T, D>(smem.v, v, p.v_strides.row, n0, p.seq_k);
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
      smem.p[row][lane] = from_float<T>(weight);
      __syncwarp();  // every lane has read the old maximum
      if (lane == 0) {
        smem.rescale[row] = ptx::ex2(old_max - finite_max(new_max));
        smem.row_max[row] = new_max;
        smem.row_sum[row] = smem.row_sum[row] * smem.rescale[row] + sum;
      }
    }
    __syncthreads();  // a piece's rows of weights come from two warps

    const float rescale[2] = {smem.rescale[o_row + owned(lane, 0).row], smem.rescale[o_row + owned(lane, 2).row]};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      value_piece(smem, warp, o_row, o_column + piece * kPiece);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Owned at = owned(lane, i);
        const float2 add = *reinterpret_cast<const float2*>(&smem.scratch[warp][at.row][at.column]);
        float2& sum = o[piece][i];
        sum = {sum.x * rescale[i / 2] + add.x, sum.y * rescale[i / 2] + add.y};
      }
      __syncwarp();  // the scratch is read
    }
    __syncthreads();  // the tile is consumed
  }

  __syncthreads();  // also orders the initial row state when the loop ran no tile
  // Q's tile is done with: O goes through it, so that global memory sees 16-byte stores.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Owned at = owned(lane, i);
    const int row = o_row + at.row;
    const float inverse = inverse_sum(smem.row_sum[row]);
    T* target = reinterpret_cast<T*>(smem.q[row]);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = o_column + piece * kPiece + at.column;
      target[column] = from_float<T>(o[piece][i].x * inverse);
      target[column + 1] = from_float<T>(o[piece][i].y * inverse);
    }
  }
  __syncthreads();
  T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head);
  for (int i = threadIdx.x; i < kM * (D / 8); i += kConfig.threads) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    if (m0 + row < p.seq_q)
      reinterpret_cast<uint4*>(out + (m0 + row) * p.o_strides.row)[chunk] =
          reinterpret_cast<const uint4&>(smem.q[row][chunk]);
  }
  if (threadIdx.x < kM && m0 + threadIdx.x < p.seq_q)
    head_base(p.lse, p.lse_strides, batch, head)[(m0 + threadIdx.x) * p.lse_strides.row] =
        log_sum_exp(smem.row_max[threadIdx.x], smem.row_sum[threadIdx.x]);
}

template <class T, int D>
__device__ void forward(const Params& p) {
  forward_tile<T, D>(p, blockIdx.z, blockIdx.y, blockIdx.x * kM);
}

FLASHLADDER_RUNG(r07_wmma_pv, kConfig)
