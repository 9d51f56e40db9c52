// r08_mma_sync, after r07_wmma_pv: mma.sync and ldmatrix, whose fragments have a documented layout.
// A warp owns 16 whole query rows, so scores, weights and O stay in its registers: the accumulators of Q K^T are,
// rounded, the left operand of P V. A row lies in the four lanes of a quad. ldmatrix takes an address a row: tiles are
// swizzled.
#include "launch.cuh"
#include "softmax.cuh"
#include "swizzle.h"
#include "tensor.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 32,
    .tile_n = 32,
    .grid = Grid::query_tile,
    .reduction = Reduction::warp_shuffle,
    .access_bytes = 16,
    .swizzle = Swizzle::xor_chunk,
    .threads = 64,
    .product = Product::mma_registers,
};

constexpr int kM = kConfig.tile_m, kN = kConfig.tile_n;
constexpr int kWarpRows = 16;  // of the m16n8k16 product
static_assert(kM == kConfig.threads / 32 * kWarpRows, "a warp owns 16 query rows");

template <class T, int D>
struct Shared {
  Chunk<T> q[kM][D / 8], k[kN][D / 8], v[kN][D / 8];
};

// Rows past the end are zero-filled: a masked weight of 0 times garbage may be NaN.
template <int kRows, class T, int D>
__device__ void load_tile(Chunk<T> (*tile)[D], const T* source, int64_t row_stride, int first, int rows) {
  for (int i = threadIdx.x; i < kRows * D; i += kConfig.threads) {
    const int row = i / D, chunk = i % D;
    uint4 x = {};
    if (first + row < rows) x = reinterpret_cast<const uint4*>(source + (first + row) * row_stride)[chunk];
    reinterpret_cast<uint4&>(tile[row][swizzle_chunk(row, chunk)]) = x;
  }
}

// A lane's share of a 16-row block: two rows and, in each group of 8 columns, two neighbouring columns.
struct Lane {
  int row, column;  // of the first of its rows (the other is 8 further) and of its columns
};

// Scores of the warp's 16 rows against the tile's keys: s[n] covers keys 8 n to 8 n + 7.
template <class T, int D>
__device__ void scores(float (&s)[kN / 8][4], const uint32_t (&q)[D / 16][4], const Shared<T, D>& smem, int lane) {
#pragma unroll
  for (int n = 0; n < kN / 8; n += 2) {
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      const int key = n * 8 + lane / 16 * 8 + lane % 8;
      uint32_t k[4];
      ptx::ldmatrix(k, &smem.k[key][swizzle_chunk(key, d * 2 + lane / 8 % 2)]);
      ptx::mma<T>(s[n], q[d], k[0], k[1]);
      ptx::mma<T>(s[n + 1], q[d], k[2], k[3]);
    }
  }
}

// o[n] += P V for output columns 8 n to 8 n + 7.
template <class T, int D>
__device__ void accumulate(float (&o)[D / 8][4], const float (&weights)[kN / 8][4], const Shared<T, D>& smem,
                           int lane) {
#pragma unroll
  for (int block = 0; block < kN / 16; ++block) {
    const auto &low = weights[block * 2], &high = weights[block * 2 + 1];
    const uint32_t p[4] = {pack(T(), low[0], low[1]), pack(T(), low[2], low[3]), pack(T(), high[0], high[1]),
                           pack(T(), high[2], high[3])};
    const int key = block * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t v[4];
      ptx::ldmatrix_trans(v, &smem.v[key][swizzle_chunk(key, n + lane / 16)]);
      ptx::mma<T>(o[n], p, v[0], v[1]);
      ptx::mma<T>(o[n + 1], p, v[2], v[3]);
    }
  }
}

template <class T, int D>
__device__ void forward_tile(const Params& p, int batch, int head, int m0) {
  __shared__ Shared<T, D> smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp * kWarpRows;
  const Lane at{warp_row + lane / 4, lane % 4 * 2};
  const T* q = head_base(static_cast<const T*>(p.q), p.q_strides, batch, head);
  const T* k = head_base(static_cast<const T*>(p.k), p.k_strides, batch, kv_head(p, head));
  const T* v = head_base(static_cast<const T*>(p.v), p.v_strides, batch, kv_head(p, head));

  load_tile<kM>(smem.q, q, p.q_strides.row, m0, p.seq_q);
  __syncthreads();
  uint32_t q_fragments[D / 16][4];
#pragma unroll
  for (int d = 0; d < D / 16; ++d) {
    const int row = warp_row + lane % 16;
    ptx::ldmatrix(q_fragments[d], &smem.q[row][swizzle_chunk(row, d * 2 + lane / 16)]);
  }

  float o[D / 8][4] = {};
  float row_max[2] = {-CUDART_INF_F, -CUDART_INF_F}, row_sum[2] = {};  // sums: of this lane's columns alone
  const int visible[2] = {visible_keys(p, m0 + at.row), visible_keys(p, m0 + at.row + 8)};

  const int n_end = visible_keys(p, min(m0 + kM, p.seq_q) - 1);
  for (int n0 = 0; n0 < n_end; n0 += kN) {
    load_tile<kN>(smem.k, k, p.k_strides.row, n0, p.seq_k);
    load_tile<kN>(smem.v, v, p.v_strides.row, n0, p.seq_k);
    __syncthreads();

    float s[kN / 8][4] = {};
    scores<T, D>(s, q_fragments, smem, lane);
    float tile_max[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_visible = n0 + n * 8 + at.column + i % 2 < visible[i / 2];
        s[n][i] = is_visible ? to_log2_domain(s[n][i], p.scale_log2) : -CUDART_INF_F;
        tile_max[i / 2] = fmaxf(tile_max[i / 2], s[n][i]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float new_max = fmaxf(row_max[r], quad_max(tile_max[r]));
      const float rescale = ptx::ex2(row_max[r] - finite_max(new_max));
      row_max[r] = new_max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        o[n][r * 2] *= rescale;
        o[n][r * 2 + 1] *= rescale;
      }
    }
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = ptx::ex2(s[n][i] - finite_max(row_max[i / 2]));
        row_sum[i / 2] += s[n][i];
      }
    }
    accumulate<T, D>(o, s, smem, lane);
    __syncthreads();  // the tile is consumed
  }

  // The warp's rows of Q are in registers: O goes through their place, so that global memory sees 16-byte stores.
  __syncwarp();  // every lane has read them, even when the loop ran no tile
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = at.row + r * 8;
    row_sum[r] = quad_sum(row_sum[r]);
    const float inverse = inverse_sum(row_sum[r]);
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      reinterpret_cast<uint32_t&>(smem.q[row][swizzle_chunk(row, n)].x[at.column]) =
          pack(T(), o[n][r * 2] * inverse, o[n][r * 2 + 1] * inverse);
    if (at.column == 0 && m0 + row < p.seq_q)
      head_base(p.lse, p.lse_strides, batch, head)[(m0 + row) * p.lse_strides.row] =
          log_sum_exp(row_max[r], row_sum[r]);
  }
  __syncwarp();
  T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head);
#pragma unroll
  for (int i = lane; i < kWarpRows * (D / 8); i += 32) {
    const int row = warp_row + i / (D / 8), chunk = i % (D / 8);
    if (m0 + row < p.seq_q)
      reinterpret_cast<uint4*>(out + (m0 + row) * p.o_strides.row)[chunk] =
          reinterpret_cast<const uint4&>(smem.q[row][swizzle_chunk(row, chunk)]);
  }
}

template <class T, int D>
__device__ void forward(const Params& p) {
  forward_tile<T, D>(p, blockIdx.z, blockIdx.y, blockIdx.x * kM);
}

FLASHLADDER_RUNG(r08_mma_sync, kConfig)
