// The forward pass on mma.sync and ldmatrix, whose fragments have a documented layout. A block owns tile_m query rows
// and walks the keys they see, tile by tile. A warp owns whole rows, 16 a fragment, so scores, weights and O stay in
// its registers: the accumulators of Q K^T are, rounded, the left operand of P V. The lanes of a quad share a row.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "plan.h"
#include "softmax.cuh"
#include "swizzle.h"
#include "tensor.cuh"
#include "tensor_map.cuh"

namespace flashladder {

constexpr int kHalfShared = 113 * 1024;  // of the 227 KB that the blocks of a Hopper SM share

template <Config C, class T, int D>
struct MmaForward {
  static constexpr int kM = C.tile_m, kN = C.tile_n, kChunks = D / 8;
  static constexpr int kKeyWarps = C.key_warps, kRowWarps = C.threads / 32 / kKeyWarps;
  static constexpr int kWarpM = kM / kRowWarps, kWarpN = kN / kKeyWarps;
  static constexpr int kFragments = kWarpM / 16;                // of the m16n8k16 product, one above the other
  static constexpr bool kQInRegisters = kFragments * D <= 128;  // 32 registers; more are read again for every tile
  static constexpr bool kSplit = C.splits != 1 && kKeyWarps > 1;
  static constexpr int kTileBytes = 2 * kN * D * sizeof(T);  // of K and V
  // The third stage is worth less than a second block on the SM.
  static constexpr int kStages = C.stages > 2 && kM * D * sizeof(T) + C.stages* kTileBytes > kHalfShared ? 2 : C.stages;
  static constexpr int kBuffers = kStages > 0 ? kStages : 1;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kWarpM * kRowWarps == kM && kWarpN * kKeyWarps == kN);
  static_assert(C.stages != 1, "0: through registers; 2 or more: by cp.async");

  // Rows of 16-byte chunks. TMA writes panels of 64 columns, all rows of one before the next.
  static constexpr bool kTma = C.loads == Loads::tma;
  static_assert(!kTma || !C.early_launch);
  static constexpr int kRowChunks = kTma ? kPanelColumns / 8 : kChunks;
  template <int kRows>
  struct Tile {
    Chunk<T> panels[kChunks / kRowChunks][kRows][kRowChunks];
    __device__ Chunk<T>& at(int row, int chunk) {
      return panels[chunk / kRowChunks][row][place(row, chunk % kRowChunks)];
    }
  };

  // Q lies in the stage that is filled last, where registers have taken it by then.
  static constexpr bool kQInStage = kQInRegisters && kKeyWarps > 1 && kStages > 2;
  struct alignas(kRowChunks * sizeof(Chunk<T>)) Nothing {};  // rows stay aligned, whose addresses at() flips bits of
  struct Shared {
    std::conditional_t<kQInStage, Nothing, Tile<kM>> q;
    union {
      struct {
        Tile<kN> k[kBuffers], v[kBuffers];
      };
      struct {
        float2 o[kKeyWarps][kM][D / 2];
        float row_max[kKeyWarps][kM], row_sum[kKeyWarps][kM];
      } part;  // of the warps that share rows, for their sum; key_warps > 1 alone
    };
  };
  static constexpr int kWeightChunks = kWarpN / 8;  // a row of a warp's weights
  static constexpr int kTensorBytes = kKeyWarps > 1 ? sizeof(Shared) : offsetof(Shared, k) + kBuffers * kTileBytes;
  static constexpr int kWeightBytes = C.weights_in_shared ? kM * kN * sizeof(T) : 0;  // behind the tensors
  struct Arrivals {
    uint64_t q, kv[kBuffers];
  };
  static constexpr int kThreads = C.threads, kSharedBytes = kTensorBytes + kWeightBytes + kTma * sizeof(Arrivals);
  // Of a block on sm_86 and sm_89, less what the driver takes. P through shared memory is for larger ones alone.
  static_assert(kSharedBytes <= 99 * 1024 || C.weights_in_shared);

  using Scores = float[kFragments][kWarpN / 8][4];
  using Output = float[kFragments][D / 8][4];
  using Fragment = uint32_t[4];
  using QFragments = Fragment[kQInRegisters ? D / 16 : 1][kFragments];

  // A lane's rows (row, row + 8 of each fragment, from the block's first) and, in each 8 columns, its first of two.
  struct Lane {
    int index, row, column;
  };

  static __device__ int place(int row, int chunk) {
    return C.swizzle == Swizzle::xor_chunk ? swizzle_chunk(row, chunk) : chunk;
  }

  struct Rows {
    float max[kFragments][2], sum[kFragments][2];  // sums: of this lane's columns alone
    bool scaled;  // scores are multiplied before the maximum is subtracted, not in one FMA with it
  };

  // Whether the tensors have the 16-byte chunk: a head_dim between the kernels' is padded with zeros in shared memory.
  static __device__ bool is_column(int chunk, int head_dim) { return !C.any_head_dim || chunk * 8 < head_dim; }

  // Rows past the end are zero-filled: a masked weight of 0 times garbage may be NaN. Unrolled whole, so that the loads
  // are in flight together: two at a time, r08 took 24 us at the reference cell of an H200 where it takes 14.
  template <int kRows>
  static __device__ void load_tile(Tile<kRows>& tile, const T* source, int64_t row_stride, int first, int rows,
                                   int head_dim) {
    constexpr int kPass = C.threads / kChunks;  // rows that the block's threads cover at once
    static_assert(C.threads % kChunks == 0 && kRows % kPass == 0);
    const int thread_row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const T* from = source + (first + thread_row) * row_stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < kRows; i += kPass, from += kPass * row_stride) {
      const int row = i + thread_row;
      const bool inside = first + row < rows && is_column(chunk, head_dim);
      Chunk<T>* to = &tile.at(row, chunk);
      if constexpr (kStages > 0) {
        ptx::cp_async(to, inside ? from : source, inside ? 16 : 0);
      } else {
        uint4 x = {};
        if (inside) x = *reinterpret_cast<const uint4*>(from);
        *reinterpret_cast<uint4*>(to) = x;
      }
    }
  }

  // first: of the block's tiles of keys.
  static __device__ Tile<kM>& query_tile(Shared& smem, int first) {
    if constexpr (kQInStage)
      return reinterpret_cast<Tile<kM>&>(smem.v[(first + kBuffers - 1) % kBuffers]);
    else
      return smem.q;
  }

  // Shared address of a lane's row of fragments, at chunk 0 or 1; `at` moves it by an even number of chunks. Not kept
  // over the loop for every chunk: those would be registers.
  template <int kRows>
  static __device__ uint32_t row_address(Tile<kRows>& tile, int row, int chunk) {
    return ptx::shared_address(&tile.at(row, chunk));
  }
  template <int kRows>
  static __device__ uint32_t at(uint32_t address, int chunks) {
    const int panel = chunks / kRowChunks * kRows * kRowBytes, bytes = chunks % kRowChunks * 16;
    return panel + (C.swizzle == Swizzle::xor_chunk ? address ^ bytes : address + bytes);
  }
  static constexpr int kRowBytes = kRowChunks * sizeof(Chunk<T>);

  static __device__ void load_q(Fragment (&q)[kFragments], uint32_t q_row, int d) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) ptx::ldmatrix(q[f], at<kM>(q_row, d * 2) + f * 16 * kRowBytes);
  }

  // Scores of the warp's rows against its keys of the tile: s[.][n] covers keys 8 n to 8 n + 7 of them.
  static __device__ void multiply_qk(Scores& s, const QFragments& q_registers, uint32_t q_row, uint32_t k_row) {
    [[maybe_unused]] uint32_t half[kFragments][kWarpN / 8][2] = {};
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      Fragment q[kFragments];
      if constexpr (!kQInRegisters) load_q(q, q_row, d);
#pragma unroll
      for (int n = 0; n < kWarpN / 8; n += 2) {
        Fragment k;
        ptx::ldmatrix(k, at<kN>(k_row, d * 2) + n * 8 * kRowBytes);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const Fragment& rows =
              kQInRegisters ? q_registers[kQInRegisters ? d : 0][f] : static_cast<const Fragment&>(q[f]);
          if constexpr (C.half_scores) {
            ptx::mma_half(half[f][n], rows, k[0], k[1]);
            ptx::mma_half(half[f][n + 1], rows, k[2], k[3]);
          } else {
            ptx::mma<T>(s[f][n], rows, k[0], k[1]);
            ptx::mma<T>(s[f][n + 1], rows, k[2], k[3]);
          }
        }
      }
    }
    if constexpr (C.half_scores) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int n = 0; n < kWarpN / 8; ++n) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 x = __half22float2(reinterpret_cast<const __half2&>(half[f][n][r]));
            s[f][n][r * 2] = x.x;
            s[f][n][r * 2 + 1] = x.y;
          }
        }
      }
    }
  }

  // Weights of 16 keys, rounded, as the left operand of P V.
  static __device__ void pack_weights(Fragment (&p)[kFragments], const Scores& weights, int block) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const auto &low = weights[f][block * 2], &high = weights[f][block * 2 + 1];
      p[f][0] = pack(T(), low[0], low[1]);
      p[f][1] = pack(T(), low[2], low[3]);
      p[f][2] = pack(T(), high[0], high[1]);
      p[f][3] = pack(T(), high[2], high[3]);
    }
  }

  // The warp's own weights in shared memory: kWarpM rows of kWeightChunks.
  static __device__ Chunk<T>& weight_chunk(Chunk<T>* weights, int row, int chunk) {
    return weights[row * kWeightChunks + (chunk ^ row % min(kWeightChunks, 8))];
  }

  // Leaves all weights of the tile in shared memory.
  static __device__ void store_weights(Chunk<T>* to, Scores& weights, Rows& rows, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < kWarpN / 16; ++block) {
      exponentiate(weights, rows, factor, block * 2);
      Fragment p[kFragments];
      pack_weights(p, weights, block);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Chunk<T>& chunk = weight_chunk(to, f * 16 + i % 2 * 8 + lane / 4, block * 2 + i / 2);
          reinterpret_cast<uint32_t&>(chunk.x[lane % 4 * 2]) = p[f][i];
        }
      }
    }
    __syncwarp();
  }

  static __device__ void load_weights(Fragment (&p)[kFragments], Chunk<T>* from, int block) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
      ptx::ldmatrix(p[f], ptx::shared_address(&weight_chunk(from, f * 16 + lane % 16, block * 2 + lane / 16)));
  }

  // o[.][n] += P V for output columns 8 n to 8 n + 7. `shared` has room for the weights that go through it.
  static __device__ void multiply_pv(Output& o, Scores& weights, Rows& rows, float factor, uint32_t v_row,
                                     [[maybe_unused]] Chunk<T>* shared) {
    if constexpr (C.weights_in_shared) store_weights(shared, weights, rows, factor);
#pragma unroll
    for (int block = 0; block < kWarpN / 16; ++block) {
      Fragment p[kFragments];
      if constexpr (C.weights_in_shared) {
        load_weights(p, shared, block);
      } else {
        exponentiate(weights, rows, factor, block * 2);
        pack_weights(p, weights, block);
      }
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        Fragment v;
        ptx::ldmatrix_trans(v, at<kN>(v_row, n) + block * 16 * kRowBytes);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          ptx::mma<T>(o[f][n], p[f], v[0], v[1]);
          ptx::mma<T>(o[f][n + 1], p[f], v[2], v[3]);
        }
      }
    }
  }

  static __device__ void scale(Scores& s, float factor) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int n = 0; n < kWarpN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[f][n][i] = to_log2_domain(s[f][n][i], factor);
      }
    }
  }

  // Scales scores that no FMA scales later, and masks them. query, key: those of the lane's s[0][0][0].
  static __device__ void finish_scores(Scores& s, const Params& p, int query, int key, bool is_edge) {
    if (!C.fold_scale || p.scale_log2 <= 0.f) scale(s, p.scale_log2);
    if (C.mask_edges && !is_edge) return;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int visible = visible_keys(p, query + f * 16 + r * 8);
#pragma unroll
        for (int n = 0; n < kWarpN / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (key + n * 8 + i >= visible) s[f][n][r * 2 + i] = -CUDART_INF_F;
        }
      }
    }
  }

  // Raises the rows' maxima to those of the tile and brings sums and O in step. Returns what the FMA of exponentiate()
  // multiplies the scores by.
  static __device__ float raise_max(Scores& s, Output& o, Rows& rows, float scale_log2) {
    float factor = C.fold_scale && scale_log2 > 0.f ? scale_log2 : 1.f;
    float new_max[kFragments][2];
    bool grew = false;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float m = s[f][0][r * 2];
#pragma unroll
        for (int n = 0; n < kWarpN / 8; ++n) m = fmaxf(m, fmaxf(s[f][n][r * 2], s[f][n][r * 2 + 1]));
        new_max[f][r] = fmaxf(rows.max[f][r], quad_max(m) * factor);
        grew |= new_max[f][r] > rows.max[f][r] + static_cast<float>(C.lazy_rescale);
      }
    }
    if (C.lazy_rescale < 0 || __any_sync(kFullWarp, grew)) {
      bool large = false;
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float rescale = ptx::ex2(rows.max[f][r] - finite_max(new_max[f][r]));
          rows.max[f][r] = new_max[f][r];
          large |= fabsf(finite_max(new_max[f][r])) > kLargestFolded;
          rows.sum[f][r] *= rescale;
#pragma unroll
          for (int n = 0; n < D / 8; ++n) {
            o[f][n][r * 2] *= rescale;
            o[f][n][r * 2 + 1] *= rescale;
          }
        }
      }
      if (C.fold_scale) rows.scaled = __any_sync(kFullWarp, large);
    }
    if (C.fold_scale && factor != 1.f && rows.scaled) {
      scale(s, factor);
      factor = 1.f;
    }
    return factor;
  }

  // Scores of two groups of 8 keys, from group n on, become weights.
  static __device__ void exponentiate(Scores& s, Rows& rows, float factor, int n) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float m = finite_max(rows.max[f][r]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = s[f][n + i / 2][r * 2 + i % 2];
          x = ptx::ex2(C.fold_scale ? fmaf(x, factor, -m) : x - m);
          rows.sum[f][r] += x;
        }
      }
    }
  }

  // maps: one TensorMaps when Loads::tma, else nothing.
  template <class... Maps>
  static __device__ void run(const Params& p, const Maps&... maps) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    Shared& smem = *reinterpret_cast<Shared*>(dynamic_shared);
    if constexpr (C.early_combine && !C.early_launch) ptx::let_next_grid_start();
    const int batch = blockIdx.z, head = blockIdx.y;
    const int splits = kSplit ? p.splits : 1;
    const bool divides = !C.few_divisions || splits > 1;
    const auto tile_of = [&](unsigned block) { return divides ? block / splits : block; };
    const int split = divides ? blockIdx.x % splits : 0;
    const int m_tile = C.longest_first ? tile_of(gridDim.x - 1 - blockIdx.x) : tile_of(blockIdx.x), m0 = m_tile * kM;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % kRowWarps * kWarpM, warp_key = warp / kRowWarps * kWarpN;
    const Lane at{lane, warp_row + lane / 4, lane % 4 * 2};
    const T* q = head_base(static_cast<const T*>(p.q), p.q_strides, batch, head);
    const T* k = head_base(static_cast<const T*>(p.k), p.k_strides, batch, kv_head<C.few_divisions>(p, head));
    const T* v = head_base(static_cast<const T*>(p.v), p.v_strides, batch, kv_head<C.few_divisions>(p, head));
    const int tiles = ceil_div(visible_keys(p, min(m0 + kM, p.seq_q) - 1), kN);
    const int share = divides ? ceil_div(tiles, splits) : tiles;
    const int first = split * share, end = min(tiles, first + share);

    [[maybe_unused]] Arrivals& arrivals = *reinterpret_cast<Arrivals*>(dynamic_shared + kTensorBytes + kWeightBytes);
    if constexpr (kTma) {
      if (threadIdx.x == 0) {
        ptx::mbarrier_init(&arrivals.q, 1);
        for (uint64_t& arrival : arrivals.kv) ptx::mbarrier_init(&arrival, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect(&arrivals.q, sizeof smem.q);
        (load_panels(smem.q.panels, maps.q, &arrivals.q, m0, head, batch), ...);
      }
    }

    const auto load_kv = [&](int tile) {
      if constexpr (kTma) {
        if (tile < end && threadIdx.x == 0) {
          const int buffer = tile % kBuffers;
          uint64_t* arrival = &arrivals.kv[buffer];
          ptx::mbarrier_arrive_expect(arrival, kTileBytes);
          (load_panels(smem.k[buffer].panels, maps.k, arrival, tile * kN, kv_head<C.few_divisions>(p, head), batch),
           ...);
          (load_panels(smem.v[buffer].panels, maps.v, arrival, tile * kN, kv_head<C.few_divisions>(p, head), batch),
           ...);
        }
        return;
      }
      if (tile < end) {
        load_tile(smem.k[tile % kBuffers], k, p.k_strides.row, tile * kN, p.seq_k, p.head_dim);
        load_tile(smem.v[tile % kBuffers], v, p.v_strides.row, tile * kN, p.seq_k, p.head_dim);
      }
      if constexpr (kStages > 0) ptx::cp_async_commit();
    };

    if constexpr (C.early_launch) ptx::wait_in_stream();
    Tile<kM>& q_tile = query_tile(smem, first);
    if constexpr (!kTma) load_tile(q_tile, q, p.q_strides.row, m0, p.seq_q, p.head_dim);
    if constexpr (kStages > 0) {
      if constexpr (!kTma) ptx::cp_async_commit();
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) load_kv(first + i);
      if constexpr (!kTma) ptx::cp_async_wait<kStages - 1>();
    }
    __syncthreads();
    if constexpr (kTma) ptx::mbarrier_wait(&arrivals.q, 0);
    QFragments q_registers;
    const uint32_t q_row = row_address(q_tile, warp_row + lane % 16, lane / 16);
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int d = 0; d < D / 16; ++d) load_q(q_registers[d], q_row, d);
    }

    Output o = {};
    Rows rows;
    rows.scaled = false;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.max[f][r] = -CUDART_INF_F;
        rows.sum[f][r] = 0.f;
      }
    }
    const int all_visible = visible_keys(p, m0 + warp_row);  // to every row of the warp
    [[maybe_unused]] Chunk<T>* const warp_weights =
        reinterpret_cast<Chunk<T>*>(dynamic_shared + kTensorBytes) + warp * kWarpM * kWeightChunks;

    for (int tile = first; tile < end; ++tile) {
      if constexpr (kStages > 0) {
        if constexpr (kTma)
          ptx::mbarrier_wait(&arrivals.kv[tile % kBuffers], (tile - first) / kBuffers % 2);
        else
          ptx::cp_async_wait<kStages - 2>();
        __syncthreads();  // the tile has arrived, and the tile before it is consumed
        load_kv(tile + kStages - 1);
      } else {
        load_kv(tile);
        __syncthreads();
      }
      const int buffer = tile % kBuffers, first_key = tile * kN + warp_key;
      Scores s = {};
      multiply_qk(s, q_registers, q_row,
                  row_address(smem.k[buffer], warp_key + lane / 16 * 8 + lane % 8, lane / 8 % 2));
      finish_scores(s, p, m0 + at.row, first_key + at.column, first_key + kWarpN > all_visible);
      const float factor = raise_max(s, o, rows, p.scale_log2);
      multiply_pv(o, s, rows, factor, row_address(smem.v[buffer], warp_key + lane % 16, lane / 16), warp_weights);
      if constexpr (kStages == 0) __syncthreads();  // the tile is consumed
    }

#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) rows.sum[f][r] = quad_sum(rows.sum[f][r]);
    }
    if constexpr (kKeyWarps > 1)
      add_and_store(p, smem, o, rows, at, batch, head, m0, warp / kRowWarps, split);
    else
      store(p, smem, o, rows, at, batch, head, m0, warp_row);
  }

  // O goes through the place of the warp's rows of Q, so that global memory sees 16-byte stores.
  static __device__ void store(const Params& p, Shared& smem, const Output& o, const Rows& rows, const Lane& at,
                               int batch, int head, int m0, int warp_row) {
    __syncwarp();  // every lane has read its Q, even when the loop ran no tile
    float* lse = head_base(p.lse, p.lse_strides, batch, head);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = at.row + f * 16 + r * 8;
        const float inverse = inverse_sum(rows.sum[f][r]);
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
          reinterpret_cast<uint32_t&>(smem.q.at(row, n).x[at.column]) =
              pack(T(), o[f][n][r * 2] * inverse, o[f][n][r * 2 + 1] * inverse);
        if (at.column == 0 && m0 + row < p.seq_q)
          lse[(m0 + row) * p.lse_strides.row] = log_sum_exp(rows.max[f][r], rows.sum[f][r]);
      }
    }
    __syncwarp();
    T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head);
#pragma unroll
    for (int i = at.index; i < kWarpM * kChunks; i += 32) {
      const int row = warp_row + i / kChunks, chunk = i % kChunks;
      if (m0 + row < p.seq_q && is_column(chunk, p.head_dim))
        reinterpret_cast<uint4*>(out + (m0 + row) * p.o_strides.row)[chunk] =
            reinterpret_cast<const uint4&>(smem.q.at(row, chunk));
    }
  }

  // Where two neighbouring columns of a part of O lie: the 8 rows that a warp writes at once cover all banks.
  static __device__ int place_pair(int row, int pair) { return pair ^ (row & 7) * 4; }

  // The warps that share rows leave their parts in shared memory; a thread sums four columns at a time.
  static __device__ void add_and_store(const Params& p, Shared& smem, const Output& o, const Rows& rows, const Lane& at,
                                       int batch, int head, int m0, int part, int split) {
    __syncthreads();  // K and V are consumed
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = at.row + f * 16 + r * 8;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
          smem.part.o[part][row][place_pair(row, n * 4 + at.column / 2)] =
              make_float2(o[f][n][r * 2], o[f][n][r * 2 + 1]);
        if (at.column == 0) {
          smem.part.row_max[part][row] = rows.max[f][r];
          smem.part.row_sum[part][row] = rows.sum[f][r];
        }
      }
    }
    __syncthreads();
    if constexpr (C.short_join) return store_joined(p, smem, batch, head, m0, split);
    float* lse = head_base(p.lse, p.lse_strides, batch, head);
    T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head);
    for (int i = threadIdx.x; i < kM * kQuads; i += C.threads) {
      const int row = i / kQuads, quad = i % kQuads;
      if (m0 + row >= p.seq_q || !is_column(quad / 2, p.head_dim)) continue;
      auto [sum, row_max, row_sum] = join_parts(smem, row, quad);
      const float inverse = inverse_sum(row_sum);
      sum = {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
      if (kSplit && p.splits > 1) {
        const int64_t to = part_row(p, batch, head, m0, split) + row;
        *reinterpret_cast<float4*>(p.part_o + to * D + quad * 4) = sum;
        if (quad == 0) p.part_lse[to] = part_lse(row_max, row_sum);
      } else {
        reinterpret_cast<uint2*>(out + (m0 + row) * p.o_strides.row)[quad] =
            make_uint2(pack(T(), sum.x, sum.y), pack(T(), sum.z, sum.w));
        if (quad == 0) lse[(m0 + row) * p.lse_strides.row] = log_sum_exp(row_max, row_sum);
      }
    }
  }

  static constexpr int kQuads = D / 4;  // of columns
  // Four columns of a row: those of all warps, to be divided by `sum`.
  struct Joined {
    float4 o;
    float max, sum;
  };
  static __device__ __forceinline__ Joined join_parts(const Shared& smem, int row, int quad) {
    float row_max = -CUDART_INF_F, row_sum = 0.f;
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < kKeyWarps; ++w) row_max = fmaxf(row_max, smem.part.row_max[w][row]);
#pragma unroll
    for (int w = 0; w < kKeyWarps; ++w) {
      const float weight = ptx::ex2(smem.part.row_max[w][row] - finite_max(row_max));
      const float4 x = *reinterpret_cast<const float4*>(&smem.part.o[w][row][place_pair(row, quad * 2)]);
      row_sum += weight * smem.part.row_sum[w][row];
      sum.x += weight * x.x;
      sum.y += weight * x.y;
      sum.z += weight * x.z;
      sum.w += weight * x.w;
    }
    return {sum, row_max, row_sum};
  }

  // Where the parts of O lie that a split of its keys gives, from row m0 on.
  static __device__ __forceinline__ int64_t part_row(const Params& p, int batch, int head, int m0, int split) {
    const int64_t head_row = (static_cast<int64_t>(split) * p.batch + batch) * p.heads_q + head;
    return head_row * p.seq_q + m0;
  }
  static __device__ __forceinline__ float part_lse(float row_max, float row_sum) {
    return row_sum == 0.f ? -CUDART_INF_F : row_max + ptx::lg2(row_sum);
  }

  // The rest of add_and_store(), with nothing that a thread waits for by itself: all its rows at once, no division, the
  // LSE last. One row after the other took 1060 of a block's 4070 cycles at B1 H1 S32 of an H200.
  static __device__ void store_joined(const Params& p, const Shared& smem, int batch, int head, int m0, int split) {
    constexpr int kAtOnce = C.threads / kQuads, kSteps = kM / kAtOnce;
    static_assert(kAtOnce * kQuads == C.threads && kSteps * kAtOnce == kM);
    const int first = threadIdx.x / kQuads, quad = threadIdx.x % kQuads, row = m0 + first;
    Joined rows[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      rows[i] = join_parts(smem, first + i * kAtOnce, quad);
      const float inverse = fast_inverse_sum(rows[i].sum);
      float4& o = rows[i].o;
      o = {o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse};
    }
    const auto has_row = [&](int step) { return row + step * kAtOnce < p.seq_q; };
    const bool has_columns = is_column(quad / 2, p.head_dim);
    if (kSplit && p.splits > 1) {
      const int64_t to = part_row(p, batch, head, m0, split) + first;
      float4* out = reinterpret_cast<float4*>(p.part_o + to * D) + quad;
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (has_columns && has_row(i)) out[i * kAtOnce * kQuads] = rows[i].o;
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (quad == 0 && has_row(i)) p.part_lse[to + i * kAtOnce] = part_lse(rows[i].max, rows[i].sum);
      return;
    }
    T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head) + row * p.o_strides.row + quad * 4;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float4& o = rows[i].o;
      if (has_columns && has_row(i))
        *reinterpret_cast<uint2*>(out + i * kAtOnce * p.o_strides.row) =
            make_uint2(pack(T(), o.x, o.y), pack(T(), o.z, o.w));
    }
    float* lse = head_base(p.lse, p.lse_strides, batch, head);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (quad == 0 && has_row(i)) lse[(row + i * kAtOnce) * p.lse_strides.row] = log_sum_exp(rows[i].max, rows[i].sum);
  }
};

// Weighs the parts of a row, one a split, by their sums. A warp owns a row and a lane a part's weight; a part that saw
// no key weighs nothing.
template <Config C, class T, int D>
__device__ void combine_splits(const Params& p) {
  if constexpr (C.early_combine) ptx::wait_for_grids_ahead();
  const int64_t rows = static_cast<int64_t>(p.batch) * p.heads_q * p.seq_q;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kCombineRows + threadIdx.x / 32;
  if (i >= rows) return;
  constexpr int kColumns = D / 32;  // a lane's
  const int lane = threadIdx.x % 32, column = lane * kColumns;
  const float part_lse = lane < p.splits ? p.part_lse[lane * rows + i] : -CUDART_INF_F;
  const float max_lse = warp_max(part_lse), weight = ptx::ex2(part_lse - finite_max(max_lse)), total = warp_sum(weight);
  constexpr int kInFlight = 16;
  float sum[kColumns] = {};
  for (int first = 0; first < p.splits; first += kInFlight) {
    float x[kInFlight][kColumns];
#pragma unroll
    for (int s = 0; s < kInFlight; ++s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        x[s][c] = first + s < p.splits ? p.part_o[((first + s) * rows + i) * D + column + c] : 0.f;
    }
#pragma unroll
    for (int s = 0; s < kInFlight; ++s) {
      const float w = __shfl_sync(kFullWarp, weight, first + s);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] += w * x[s][c];
    }
  }
  const int row = i % p.seq_q, head = i / p.seq_q % p.heads_q, batch = i / p.seq_q / p.heads_q;
  const float inverse = inverse_sum(total);
  T* out = head_base(static_cast<T*>(p.o), p.o_strides, batch, head) + row * p.o_strides.row + column;
#pragma unroll
  for (int c = 0; c < kColumns; c += 2)
    if (column < p.head_dim) *reinterpret_cast<uint32_t*>(out + c) = pack(T(), sum[c] * inverse, sum[c + 1] * inverse);
  if (threadIdx.x % 32 == 0)
    head_base(p.lse, p.lse_strides, batch, head)[row * p.lse_strides.row] = log_sum_exp(max_lse, total);
}

// The kernels for smaller grids: fewer rows a block; four warps share them and split the keys of a tile.
constexpr Config with_rows(Config config, int rows, int head_dim) {
  config.tile_m = rows;
  config.tile_n = 8192 / head_dim;
  config.stages = config.stages == 0 ? 0 : 3;  // 96 KB: what a GPU with 100 KB an SM runs too
  config.key_warps = 64 / rows;
  return config;
}
constexpr Config medium(Config config, int head_dim) { return with_rows(config, 32, head_dim); }
constexpr Config small(Config config, int head_dim) { return with_rows(config, 16, head_dim); }

template <Config C, class T, int D>
Instance mma_instance(void (*kernel)(Params), void (*combine)(Params) = nullptr) {
  return {kernel, C.tile_m, C.threads, MmaForward<C, T, D>::kSharedBytes, combine, C.early_combine, C.early_launch};
}

template <bool kPackHeads>
Tile plan(Params& p, int multiprocessors) {
  if (kPackHeads) pack_heads(p);
  return choose_tile(p, multiprocessors, suits(p, kLargeRows, multiprocessors));
}

// As the launch of a Hopper rung's kernels; a rung that plans has a grid of query tiles.
inline int launch(const Instance& instance, Tile, const Params& p, Dtype, int device, cudaStream_t stream) {
  return launch(instance, Grid::query_tile, p, device, stream);
}

}  // namespace flashladder

#define FLASHLADDER_MMA_KERNEL(NAME, SUFFIX, CONFIG, T, D) \
  FLASHLADDER_KERNEL(NAME, SUFFIX, (CONFIG.threads), (flashladder::MmaForward<CONFIG, T, D>::run(p)))

// The bound of one block keeps ptxas from spilling for the sake of more.
#define FLASHLADDER_MMA_KERNEL_ONE_BLOCK(NAME, SUFFIX, CONFIG, T, D) \
  FLASHLADDER_KERNEL(NAME, SUFFIX, (CONFIG.threads, 1), (flashladder::MmaForward<CONFIG, T, D>::run(p)))

// One kernel for each dtype and head dimension.
#define FLASHLADDER_MMA_RUNG(ID, CONFIG)                                                                         \
  FLASHLADDER_MMA_KERNEL(ID##_fp16_d64, fp16_d64, CONFIG, __half, 64)                                            \
  FLASHLADDER_MMA_KERNEL(ID##_fp16_d128, fp16_d128, CONFIG, __half, 128)                                         \
  FLASHLADDER_MMA_KERNEL(ID##_bf16_d64, bf16_d64, CONFIG, __nv_bfloat16, 64)                                     \
  FLASHLADDER_MMA_KERNEL(ID##_bf16_d128, bf16_d128, CONFIG, __nv_bfloat16, 128)                                  \
  extern "C" const flashladder::Rung* flashladder_rung() {                                                       \
    using namespace flashladder;                                                                                 \
    static const Instance instances[2][2] = {                                                                    \
        {mma_instance<CONFIG, __half, 64>(ID##_fp16_d64), mma_instance<CONFIG, __half, 128>(ID##_fp16_d128)},    \
        {mma_instance<CONFIG, __nv_bfloat16, 64>(ID##_bf16_d64),                                                 \
         mma_instance<CONFIG, __nv_bfloat16, 128>(ID##_bf16_d128)}};                                             \
    static const DynamicShared shared[] = {{#ID "_fp16_d64", instances[0][0].shared_bytes},                      \
                                           {#ID "_fp16_d128", instances[0][1].shared_bytes},                     \
                                           {#ID "_bf16_d64", instances[1][0].shared_bytes},                      \
                                           {#ID "_bf16_d128", instances[1][1].shared_bytes}};                    \
    static const Rung rung{#ID,                                                                                  \
                           CONFIG,                                                                               \
                           [](const Params& p, Dtype dtype, Tile, int device, void* stream) {                    \
                             const Instance& instance = instances[static_cast<int>(dtype)][p.head_dim > 64];     \
                             return launch(instance, CONFIG.grid, p, device, static_cast<cudaStream_t>(stream)); \
                           },                                                                                    \
                           error_name,                                                                           \
                           nullptr,                                                                              \
                           nullptr,                                                                              \
                           shared,                                                                               \
                           4};                                                                                   \
    return &rung;                                                                                                \
  }

// The kernels for smaller grids and what joins the parts of split keys, with the Instances of the former.
#define FLASHLADDER_SMALLER_KERNELS(ID, SUFFIX, CONFIG, T, D)                                                    \
  constexpr flashladder::Config ID##_medium_config_##SUFFIX = flashladder::medium(CONFIG, D);                    \
  constexpr flashladder::Config ID##_small_config_##SUFFIX = flashladder::small(CONFIG, D);                      \
  FLASHLADDER_MMA_KERNEL_ONE_BLOCK(ID##_medium_##SUFFIX, SUFFIX, ID##_medium_config_##SUFFIX, T, D)              \
  FLASHLADDER_MMA_KERNEL_ONE_BLOCK(ID##_small_##SUFFIX, SUFFIX, ID##_small_config_##SUFFIX, T, D)                \
  FLASHLADDER_KERNEL(ID##_combine_##SUFFIX, SUFFIX, (flashladder::kCombineRows * 32),                            \
                     (flashladder::combine_splits<ID##_small_config_##SUFFIX, T, D>(p)))                         \
  const flashladder::Instance ID##_smaller_##SUFFIX[] = {                                                        \
      flashladder::mma_instance<ID##_medium_config_##SUFFIX, T, D>(ID##_medium_##SUFFIX, ID##_combine_##SUFFIX), \
      flashladder::mma_instance<ID##_small_config_##SUFFIX, T, D>(ID##_small_##SUFFIX, ID##_combine_##SUFFIX)};

#define FLASHLADDER_PLANNED_KERNELS(ID, SUFFIX, CONFIG, T, D) \
  FLASHLADDER_MMA_KERNEL(ID##_##SUFFIX, SUFFIX, CONFIG, T, D) \
  FLASHLADDER_SMALLER_KERNELS(ID, SUFFIX, CONFIG, T, D)       \
  const flashladder::Instance ID##_large_##SUFFIX = flashladder::mma_instance<CONFIG, T, D>(ID##_##SUFFIX);

#define FLASHLADDER_PLANNED_SHARED(ID, SUFFIX)                           \
  {#ID "_" #SUFFIX, ID##_large_##SUFFIX.shared_bytes},                   \
      {#ID "_medium_" #SUFFIX, ID##_smaller_##SUFFIX[0].shared_bytes}, { \
    #ID "_small_" #SUFFIX, ID##_smaller_##SUFFIX[1].shared_bytes         \
  }

// Of a rung with kernels of several sizes, `LARGE` the type of those that split no keys, `ENQUEUE` how one is launched,
// `PLAN` what chooses, `LAST` the last that it may choose and `SHARED` the shared memory of all kernels.
#ifdef FLASHLADDER_PART_bf16
#define FLASHLADDER_PLANNED_ENTRY(...)
#else
#define FLASHLADDER_PLANNED_ENTRY(ID, CONFIG, LARGE, ENQUEUE, PLAN, LAST, SHARED)                   \
  extern "C" const flashladder::Rung* flashladder_rung() {                                          \
    using namespace flashladder;                                                                    \
    static const LARGE large[2][2] = {{ID##_large_fp16_d64, ID##_large_fp16_d128},                  \
                                      {ID##_large_bf16_d64, ID##_large_bf16_d128}};                 \
    static const Instance* const smaller[2][2] = {{ID##_smaller_fp16_d64, ID##_smaller_fp16_d128},  \
                                                  {ID##_smaller_bf16_d64, ID##_smaller_bf16_d128}}; \
    static const Rung rung{#ID,                                                                     \
                           CONFIG,                                                                  \
                           [](const Params& p, Dtype dtype, Tile tile, int device, void* to) {      \
                             const auto stream = static_cast<cudaStream_t>(to);                     \
                             const int type = static_cast<int>(dtype), wide = p.head_dim > 64;      \
                             if (!splits_keys(tile))                                                \
                               return ENQUEUE(large[type][wide], tile, p, dtype, device, stream);   \
                             const Instance& instance = smaller[type][wide][tile == Tile::small];   \
                             return launch(instance, CONFIG.grid, p, device, stream);               \
                           },                                                                       \
                           error_name,                                                              \
                           PLAN,                                                                    \
                           multiprocessors,                                                         \
                           SHARED,                                                                  \
                           sizeof SHARED / sizeof SHARED[0],                                        \
                           LAST};                                                                   \
    return &rung;                                                                                   \
  }
#endif

// A kernel a tile size for each dtype and head dimension; plan.h chooses.
#define FLASHLADDER_PLANNED_RUNG(ID, CONFIG)                                                \
  FLASHLADDER_PLANNED_KERNELS(ID, fp16_d64, CONFIG, __half, 64)                             \
  FLASHLADDER_PLANNED_KERNELS(ID, fp16_d128, CONFIG, __half, 128)                           \
  FLASHLADDER_PLANNED_KERNELS(ID, bf16_d64, CONFIG, __nv_bfloat16, 64)                      \
  FLASHLADDER_PLANNED_KERNELS(ID, bf16_d128, CONFIG, __nv_bfloat16, 128)                    \
  [[maybe_unused]] static const flashladder::DynamicShared ID##_shared[] = {                \
      FLASHLADDER_PLANNED_SHARED(ID, fp16_d64), FLASHLADDER_PLANNED_SHARED(ID, fp16_d128),  \
      FLASHLADDER_PLANNED_SHARED(ID, bf16_d64), FLASHLADDER_PLANNED_SHARED(ID, bf16_d128)}; \
  FLASHLADDER_PLANNED_ENTRY(ID, CONFIG, Instance, launch, plan<CONFIG.pack_heads>, Tile::small, ID##_shared)
