// r00_naive: the start of the ladder.
// One thread owns a query row and reads every K and V row from global memory; one thread block does the whole problem.
// fp32 online softmax.
#include "launch.cuh"
#include "softmax.cuh"
#include "tensor.cuh"

using namespace flashladder;

constexpr Config kConfig{
    .tile_m = 0,
    .tile_n = 0,
    .grid = Grid::single,
    .reduction = Reduction::serial,
    .access_bytes = 2,
    .swizzle = Swizzle::none,
    .threads = 128,
};

template <class T, int D>
__device__ void forward_row(const Params& p, int batch, int head, int query) {
  const T* q_row = head_base(static_cast<const T*>(p.q), p.q_strides, batch, head) + query * p.q_strides.row;
  const T* k_row = head_base(static_cast<const T*>(p.k), p.k_strides, batch, kv_head(p, head));
  const T* v_row = head_base(static_cast<const T*>(p.v), p.v_strides, batch, kv_head(p, head));

  T q[D];
  float o[D];
#pragma unroll
  for (int d = 0; d < D; ++d) {
    q[d] = q_row[d];
    o[d] = 0.f;
  }
  float row_max = -CUDART_INF_F, row_sum = 0.f;

  const int keys = visible_keys(p, query);
  for (int key = 0; key < keys; ++key, k_row += p.k_strides.row, v_row += p.v_strides.row) {
    float score = 0.f;
#pragma unroll
    for (int d = 0; d < D; ++d) score += to_float(q[d]) * to_float(k_row[d]);
    score = to_log2_domain(score, p.scale_log2);

    const float new_max = fmaxf(row_max, score);
    const float rescale = ptx::ex2(row_max - finite_max(new_max));
    const float weight = ptx::ex2(score - finite_max(new_max));
    row_max = new_max;
    row_sum = row_sum * rescale + weight;
#pragma unroll
    for (int d = 0; d < D; ++d) o[d] = o[d] * rescale + weight * to_float(v_row[d]);
  }

  T* o_row = head_base(static_cast<T*>(p.o), p.o_strides, batch, head) + query * p.o_strides.row;
  const float inverse = inverse_sum(row_sum);
#pragma unroll
  for (int d = 0; d < D; ++d) o_row[d] = from_float<T>(o[d] * inverse);
  head_base(p.lse, p.lse_strides, batch, head)[query * p.lse_strides.row] = log_sum_exp(row_max, row_sum);
}

template <class T, int D>
__device__ void forward(const Params& p) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.heads_q * p.seq_q;
  for (int64_t row = threadIdx.x; row < rows; row += kConfig.threads) {
    const int64_t head = row / p.seq_q;
    forward_row<T, D>(p, head / p.heads_q, head % p.heads_q, row % p.seq_q);
  }
}

FLASHLADDER_RUNG(r00_naive, kConfig)
