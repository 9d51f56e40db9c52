// The forward pass on wgmma, for sm_90a. A block owns tile_m query rows and walks the keys they see, the last tile
// first; a warpgroup owns 64 of the rows. TMA brings Q, K and V into 128-byte-swizzled shared memory in panels of 64
// columns. Scores are one wgmma from shared memory, P V is one with the weights in registers: a lane's accumulators of
// Q K^T are, rounded, its left operand of P V. The lanes of a quad share a row.
#pragma once

#include "launch.cuh"
#include "softmax.cuh"
#include "swizzle.h"
#include "tensor.cuh"
#include "tensor_map.cuh"

namespace flashladder {

template <Config C, class T, int D>
struct HopperForward {
  static constexpr int kWarpgroup = 128, kWarpgroupRows = 64;
  // At head_dim 128, O takes the registers of a third warpgroup.
  static constexpr int kM = D > 64 && C.tile_m > 128 ? 128 : C.tile_m, kN = C.tile_n;
  static constexpr int kConsumers = kM / kWarpgroupRows, kPanels = D / kPanelColumns;
  static constexpr int kThreads = kWarpgroup * (kConsumers + C.specialized);
  // setmaxnreg: multiples of 8 whose sum over the warpgroups is at most the 64 K registers of an SM.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24, kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int64_t kL2Share = 24 << 20;  // of 50 MB, half of which lies on the far side of the chip
  static constexpr uint32_t kRowBytes = 128, kPanelQ = kM * kRowBytes, kPanelKv = kN * kRowBytes;
  static_assert(kConsumers * kWarpgroupRows == kM && C.product == Product::wgmma && C.loads == Loads::tma);

  // A persistent block loads the next query tile while it computes this one, with room for two at head_dim 64.
  static constexpr int kQueries = C.persistent && D <= 64 ? 2 : 1;
  // As many tiles of K and V as declared, or two where a block's shared memory does not hold them.
  static constexpr int kBlockShared = 227 * 1024, kQueryBytes = kM * D * sizeof(T), kTileBytes = 2 * kN * D * sizeof(T);
  static constexpr int kMostStages = (kBlockShared - 1024 - (kQueries + C.persistent) * kQueryBytes) / kTileBytes;
  static constexpr int kStages = C.stages <= kMostStages ? C.stages : 2;
  static_assert(kStages >= 2 && (C.specialized || (!C.ping_pong && !C.overlap && !C.persistent)));

  using Row = Chunk<T>[kRowBytes / sizeof(Chunk<T>)];
  using QueryTile = Row[kPanels][kM];
  struct Shared {
    alignas(1024) QueryTile q[kQueries + C.persistent];
    alignas(1024) Row k[kStages][kPanels][kN], v[kStages][kPanels][kN];
    uint64_t q_full[kQueries], q_empty[kQueries];
    uint64_t k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
    // On its way out: in the place of Q, or in one of its own.
    __device__ QueryTile& o() { return q[C.persistent ? kQueries : 0]; }
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  using Scores = float[kN / 2];
  using Output = float[D / 2];
  using Weights = uint32_t[kN / 4];

  // Where a ring of so many buffers is: `parity` of the phase that fills this one.
  template <int buffers>
  struct Ring {
    int index = 0;
    uint32_t parity = 0;
    __device__ void advance() {
      if (++index == buffers) {
        index = 0;
        parity ^= 1;
      }
    }
  };

  // A lane's two rows. Sums are of its own columns until the end.
  struct Rows {
    float max[2], sum[2], rescale[2];
    bool scaled;  // scores are multiplied before the maximum is subtracted, not in one FMA with it
  };

  using Stage = Ring<kStages>;
  using Query = Ring<kQueries>;

  // A query tile of a head: what a block computes at a time.
  struct Item {
    int m0, head, batch, tiles;  // tiles: of keys that some row sees
  };

  static __device__ Item item_at(const Params& p, int m_tile, int head, int batch) {
    const int m0 = m_tile * kM;
    return {m0, head, batch, ceil_div(visible_keys(p, min(m0 + kM, p.seq_q) - 1), kN)};
  }

  // The items of this block. Persistent blocks take them in turns, from the first to the last and back, so that each
  // gets of the long and of the short ones; longest first within as many heads as L2 holds the K and V of.
  struct Items {
    int turn = 0;

    __device__ bool next(const Params& p, Item& item) {
      if constexpr (!C.persistent) {
        const int m_tile = C.longest_first ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        item = item_at(p, m_tile, blockIdx.y, blockIdx.z);
        return turn++ == 0;
      }
      const int m_tiles = ceil_div(p.seq_q, kM), heads = p.heads_q * p.batch;
      const int place = turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
      const int64_t i = static_cast<int64_t>(turn++) * gridDim.x + place;
      if (i >= static_cast<int64_t>(m_tiles) * heads) return false;
      const int64_t kv_bytes = static_cast<int64_t>(p.seq_k) * 2 * D * sizeof(T);
      const int group = p.heads_q / p.heads_kv;
      const int section =
          static_cast<int>(min(int64_t{heads}, max(kL2Share / max(kv_bytes, int64_t{1}), int64_t{1}) * group));
      const int number = static_cast<int>(i / (static_cast<int64_t>(section) * m_tiles));
      const int within = static_cast<int>(i - static_cast<int64_t>(number) * section * m_tiles);
      const int size = min(section, heads - number * section), head = number * section + within % size;
      item = item_at(p, m_tiles - 1 - within / size, head % p.heads_q, head / p.heads_q);
      return true;
    }
  };

  // --- loads --------------------------------------------------------------------------------------------------------

  template <int rows>
  static __device__ void load(Row (&to)[kPanels][rows], const TensorMap& map, uint64_t* barrier, int row, int head,
                              int batch) {
    ptx::mbarrier_arrive_expect(barrier, sizeof to);
    load_panels(to, map, barrier, row, head, batch);
  }

  static __device__ void load_q(Shared& smem, const TensorMaps& maps, const Item& b, int buffer) {
    load(smem.q[buffer], maps.q, &smem.q_full[buffer], b.m0, b.head, b.batch);
  }
  static __device__ void load_kv(Shared& smem, const Params& p, const TensorMaps& maps, const Item& b, int tile,
                                 int stage) {
    load(smem.k[stage], maps.k, &smem.k_full[stage], tile * kN, kv_head(p, b.head), b.batch);
    load(smem.v[stage], maps.v, &smem.v_full[stage], tile * kN, kv_head(p, b.head), b.batch);
  }

  // What the one thread of the producer warpgroup does: it refills a stage as soon as all warps have read it.
  static __device__ void produce(Shared& smem, const Params& p, const TensorMaps& maps) {
    Stage stage;
    Query query;
    Items items;
    for (Item b; items.next(p, b); query.advance()) {
      if constexpr (C.persistent) ptx::mbarrier_wait(&smem.q_empty[query.index], query.parity ^ 1);
      load_q(smem, maps, b, query.index);
      const int kv = kv_head(p, b.head);
      for (int tile = b.tiles - 1; tile >= 0; --tile, stage.advance()) {
        ptx::mbarrier_wait(&smem.k_empty[stage.index], stage.parity ^ 1);
        load(smem.k[stage.index], maps.k, &smem.k_full[stage.index], tile * kN, kv, b.batch);
        ptx::mbarrier_wait(&smem.v_empty[stage.index], stage.parity ^ 1);
        load(smem.v[stage.index], maps.v, &smem.v_full[stage.index], tile * kN, kv, b.batch);
      }
    }
  }

  // --- one tile of keys ---------------------------------------------------------------------------------------------

  // s = Q K^T, issued. Steps of 16 columns are 32 bytes apart in a panel.
  static __device__ void multiply_qk(Scores& s, uint64_t q, const Row (&k_tile)[kPanels][kN]) {
    const uint64_t k = ptx::matrix_descriptor(ptx::shared_address(k_tile));
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      const uint64_t a = q + (d / 4 * kPanelQ + d % 4 * 32) / 16, b = k + (d / 4 * kPanelKv + d % 4 * 32) / 16;
      if (d == 0)
        ptx::Wgmma<T, kN>::start(s, a, b);
      else
        ptx::Wgmma<T, kN>::add(s, a, b);
    }
    ptx::wgmma_commit();
  }

  // o += P V, issued.
  static __device__ void multiply_pv(Output& o, const Weights& weights, const Row (&v_tile)[kPanels][kN]) {
    const uint64_t v = ptx::matrix_descriptor(ptx::shared_address(v_tile), kPanelKv);
#pragma unroll
    for (int block = 0; block < kN / 16; ++block)
      ptx::Wgmma<T, D>::add_rows(o, weights + block * 4, v + block * (16 * kRowBytes / 16));
    ptx::wgmma_commit();
  }

  // Scores become weights, sums and maxima are brought up to date. True: O is to be multiplied by `rows.rescale`, which
  // holds for the whole warp. query, key: those of the lane's s[0].
  static __device__ bool softmax(Scores& s, Rows& rows, const Params& p, int query, int key, bool is_edge) {
    float factor = p.scale_log2;
    if (p.scale_log2 <= 0.f) {
      scale(s, factor);
      factor = 1.f;
    }
    if (is_edge) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int visible = visible_keys(p, query + r * 8) - key;
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (i * 8 + c >= visible) s[i * 4 + r * 2 + c] = -CUDART_INF_F;
        }
      }
    }
    float raised[2];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = fmaxf(s[r * 2], s[r * 2 + 1]);
#pragma unroll
      for (int i = 1; i < kN / 8; ++i) m = fmaxf(m, fmaxf(s[i * 4 + r * 2], s[i * 4 + r * 2 + 1]));
      raised[r] = fmaxf(rows.max[r], quad_max(m) * factor);
      grew |= raised[r] > rows.max[r] + static_cast<float>(C.lazy_rescale);
    }
    const bool is_raised = C.lazy_rescale < 0 || __any_sync(kFullWarp, grew);
    if (is_raised) {
      bool large = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.rescale[r] = ptx::ex2(rows.max[r] - finite_max(raised[r]));
        rows.max[r] = raised[r];
        rows.sum[r] *= rows.rescale[r];
        large |= fabsf(finite_max(raised[r])) > kLargestFolded;
      }
      rows.scaled = __any_sync(kFullWarp, large);
    }
    if (factor != 1.f && rows.scaled) {
      scale(s, factor);
      factor = 1.f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = finite_max(rows.max[r]);
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[i * 4 + r * 2 + c];
          x = ptx::ex2(fmaf(x, factor, -m));
          rows.sum[r] += x;
        }
      }
    }
    return is_raised;
  }

  static __device__ void scale(Scores& s, float factor) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] = to_log2_domain(s[i], factor);
  }

  static __device__ void rescale(Output& o, const Rows& rows) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] *= rows.rescale[i / 2 % 2];
  }

  static __device__ void pack_weights(Weights& weights, const Scores& s) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) weights[i] = pack(T(), s[i * 2], s[i * 2 + 1]);
  }

  // --- a warpgroup's rows -------------------------------------------------------------------------------------------

  // Barriers: 0 is the block's; the order of the warpgroups' turns on the tensor cores; a warpgroup's own.
  static constexpr int kTurnBarrier = 1, kOwnBarrier = kTurnBarrier + kConsumers;

  // Waits for this warpgroup's turn, and ends it. Each has one turn a tile.
  static __device__ void take_turn(int warpgroup) {
    if constexpr (C.ping_pong) ptx::barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
  }
  static __device__ void pass_turn(int warpgroup) {
    if constexpr (C.ping_pong)
      ptx::barrier_arrive(kTurnBarrier + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1), 2 * kWarpgroup);
  }

  // A warp has read the tile.
  static __device__ void release(uint64_t* barrier) {
    if constexpr (C.specialized) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
    }
  }

  static __device__ void consume(Shared& smem, const Params& p, const TensorMaps& maps, int warpgroup) {
    Stage stage;
    Query query;
    Items items;
    if (C.ping_pong && warpgroup == kConsumers - 1) pass_turn(warpgroup);
    for (Item b; items.next(p, b); query.advance()) attend(smem, p, maps, b, warpgroup, stage, query);
    if (C.ping_pong && warpgroup == 0) take_turn(warpgroup);
  }

  static __device__ void attend(Shared& smem, const Params& p, const TensorMaps& maps, const Item& b, int warpgroup,
                                Stage& stage, const Query& query) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int first_row = b.m0 + warpgroup * kWarpgroupRows, row = first_row + warp * 16 + lane / 4;
    const int column = lane % 4 * 2;
    const int last_row = min(first_row + kWarpgroupRows, p.seq_q) - 1;
    // Of the warpgroup's rows: keys that all see, and tiles that one sees.
    const int all_visible = visible_keys(p, first_row);
    const int my_tiles = first_row < p.seq_q ? ceil_div(visible_keys(p, last_row), kN) : 0;
    const uint64_t q =
        ptx::matrix_descriptor(ptx::shared_address(smem.q[query.index]) + warpgroup * kWarpgroupRows * kRowBytes);
    Scores s;
    Output o = {};
    Weights weights;
    Rows rows{{-CUDART_INF_F, -CUDART_INF_F}, {}, {}, false};
    ptx::mbarrier_wait(&smem.q_full[query.index], query.parity);

    // Without a producer the whole block is done with a stage before its first thread refills it.
    const auto refill = [&](int tile) {
      if constexpr (!C.specialized) {
        __syncthreads();
        const int next = tile - (kStages - 1);
        if (threadIdx.x == 0 && next >= 0) load_kv(smem, p, maps, b, next, (stage.index + kStages - 1) % kStages);
      }
    };
    const auto release_q = [&] {
      if constexpr (C.persistent) release(&smem.q_empty[query.index]);
    };
    int tile = b.tiles - 1;
    // Above the diagonal for this warpgroup alone. It waits for what it does not read, or it could arrive twice in a
    // phase; turns of tiles this wide keep it from that by themselves.
    for (; tile >= my_tiles; --tile, stage.advance()) {
      refill(tile);
      ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);  // redundant: ping_pong
      ptx::mbarrier_wait(&smem.v_full[stage.index], stage.parity);  // redundant: ping_pong
      take_turn(warpgroup);
      pass_turn(warpgroup);
      release(&smem.k_empty[stage.index]);
      release(&smem.v_empty[stage.index]);
    }
    const auto weigh = [&] { return softmax(s, rows, p, row, tile * kN + column, (tile + 1) * kN > all_visible); };
    if constexpr (C.overlap) {
      if (tile >= 0) {
        ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);
        take_turn(warpgroup);
        ptx::wgmma_fence();
        multiply_qk(s, q, smem.k[stage.index]);
        pass_turn(warpgroup);
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        release(&smem.k_empty[stage.index]);
        weigh();
        pack_weights(weights, s);
        for (--tile; tile >= 0; --tile) {
          const int before = stage.index;
          const uint32_t parity_before = stage.parity;
          stage.advance();
          ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);
          ptx::mbarrier_wait(&smem.v_full[before], parity_before);
          take_turn(warpgroup);
          ptx::wgmma_fence();
          multiply_qk(s, q, smem.k[stage.index]);
          multiply_pv(o, weights, smem.v[before]);
          pass_turn(warpgroup);
          ptx::wgmma_wait<1>();
          ptx::pin(s);
          release(&smem.k_empty[stage.index]);
          const bool is_raised = weigh();
          ptx::wgmma_wait<0>();
          ptx::pin(o);
          release(&smem.v_empty[before]);
          if (is_raised) rescale(o, rows);
          pack_weights(weights, s);
        }
        release_q();
        ptx::mbarrier_wait(&smem.v_full[stage.index], stage.parity);
        ptx::wgmma_fence();
        multiply_pv(o, weights, smem.v[stage.index]);
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        release(&smem.v_empty[stage.index]);
        stage.advance();
      } else {
        release_q();
      }
    } else {
      for (; tile >= 0; --tile, stage.advance()) {
        refill(tile);
        ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);
        take_turn(warpgroup);
        ptx::wgmma_fence();
        multiply_qk(s, q, smem.k[stage.index]);
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        pass_turn(warpgroup);
        release(&smem.k_empty[stage.index]);
        if (weigh()) rescale(o, rows);
        pack_weights(weights, s);
        ptx::mbarrier_wait(&smem.v_full[stage.index], stage.parity);
        ptx::wgmma_fence();
        multiply_pv(o, weights, smem.v[stage.index]);
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        release(&smem.v_empty[stage.index]);
      }
      release_q();
    }
    store(smem, p, o, rows, b, warpgroup, row, column);
  }

  // O goes through the place of the warpgroup's rows of Q, so that global memory sees 16-byte stores.
  static __device__ void store(Shared& smem, const Params& p, const Output& o, Rows& rows, const Item& b, int warpgroup,
                               int row, int column) {
    // All warps of the warpgroup have read Q; its products were waited for as a whole, but no document promises that.
    // Where O has a place of its own, release_q() has synchronised the warp since it read the O before this one.
    if constexpr (!C.persistent) {
      ptx::barrier_sync(kOwnBarrier + warpgroup, kWarpgroup);  // redundant: product
    }
    QueryTile& staged = smem.o();
    float* lse = head_base(p.lse, p.lse_strides, b.batch, b.head);
    const int tile_row = row - b.m0, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(rows.sum[r]), inverse = inverse_sum(sum);
      const int at = tile_row + r * 8;
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        reinterpret_cast<uint32_t&>(staged[i / 8][at][swizzle_chunk(at, i % 8)].x[column]) =
            pack(T(), o[i * 4 + r * 2] * inverse, o[i * 4 + r * 2 + 1] * inverse);
      if (column == 0 && row + r * 8 < p.seq_q) lse[(row + r * 8) * p.lse_strides.row] = log_sum_exp(rows.max[r], sum);
    }
    __syncwarp();
    T* out = head_base(static_cast<T*>(p.o), p.o_strides, b.batch, b.head);
    const int warp_row = tile_row - lane / 4;
#pragma unroll
    for (int i = lane; i < 16 * D / 8; i += 32) {
      const int at = warp_row + i / (D / 8), chunk = i % (D / 8);
      if (b.m0 + at < p.seq_q && chunk * 8 < p.head_dim)
        reinterpret_cast<uint4*>(out + (b.m0 + at) * p.o_strides.row)[chunk] =
            reinterpret_cast<const uint4&>(staged[chunk / 8][at][swizzle_chunk(at, chunk % 8)]);
    }
  }

  static __device__ void run(const Params& p, const TensorMaps& maps) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    Shared& smem = *reinterpret_cast<Shared*>(dynamic_shared);
    // The same in a warp's lanes, and known to be.
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kQueries; ++i) {
        ptx::mbarrier_init(&smem.q_full[i], 1);
        if constexpr (C.persistent) ptx::mbarrier_init(&smem.q_empty[i], kConsumers * 4);
      }
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(&smem.k_full[i], 1);
        ptx::mbarrier_init(&smem.v_full[i], 1);
        if constexpr (C.specialized) {
          ptx::mbarrier_init(&smem.k_empty[i], kConsumers * 4);
          ptx::mbarrier_init(&smem.v_empty[i], kConsumers * 4);
        }
      }
      ptx::fence_mbarrier_init();
      if constexpr (!C.specialized) {
        Item b;
        Items().next(p, b);
        load_q(smem, maps, b, 0);
        for (int i = 0; i < kStages - 1 && i < b.tiles; ++i) load_kv(smem, p, maps, b, b.tiles - 1 - i, i);
      }
    }
    __syncthreads();
    if constexpr (C.specialized) {
      if (warpgroup == kConsumers) {
        ptx::drop_registers<kProducerRegisters>();
        if (threadIdx.x == kConsumers * kWarpgroup) produce(smem, p, maps);
      } else {
        ptx::raise_registers<kConsumerRegisters>();
        consume(smem, p, maps, warpgroup);
      }
    } else {
      consume(smem, p, maps, warpgroup);
    }
  }
};

}  // namespace flashladder
