// The forward pass on wgmma, for sm_90a. A block owns tile_m query rows and walks the keys they see, the last tile
// first; a warpgroup owns 64 of the rows. TMA brings Q, K and V into 128-byte-swizzled shared memory in panels of 64
// columns. Scores are one wgmma from shared memory, P V is one with the weights in registers: a lane's accumulators of
// Q K^T are, rounded, its left operand of P V. The lanes of a quad share a row.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "softmax.cuh"
#include "swizzle.h"
#include "tensor.cuh"
#include "tensor_map.cuh"

namespace flashladder {

template <Config declared, class T, int D>
struct HopperForward {
  static constexpr Config C = at_head_dim(declared, D);
  static constexpr int kWarpgroup = 128, kWarpgroupRows = 64;
  static constexpr int kM = C.tile_m, kN = C.tile_n;
  // Warpgroups that share rows take the tiles of keys in turns, each with stages of its own, and join their parts of O.
  static constexpr int kKeyGroups = C.key_groups > 1 ? C.key_groups : 1, kRowGroups = kM / kWarpgroupRows;
  static constexpr int kNextTile = -kKeyGroups;  // of a warpgroup
  static constexpr int kConsumers = kRowGroups * kKeyGroups, kPanels = D / kPanelColumns;
  static constexpr int kThreads = kWarpgroup * (kConsumers + C.specialized);
  // setmaxnreg: multiples of 8 whose sum over the warpgroups is at most the 64 K registers of an SM.
  static constexpr int kProducerRegisters = kConsumers >= 3 ? 32 : kConsumers == 2 ? 24 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : kConsumers == 3 ? 160 : 240;
  // K and V that blocks share while they take the query tiles of several heads longest first, of 50 to 60 MB in L2:
  // short sequences keep more tiles of a head apart in time.
  static constexpr int64_t kSectionBytes = 32 << 20, kShortSectionBytes = 16 << 20;
  static constexpr int kShortKeys = 1024;
  // From here on a turn that is not whole costs more than reading K and V of every head once more.
  static constexpr int kLongKeys = 4096;
  static constexpr uint32_t kRowBytes = 128, kPanelQ = kM * kRowBytes, kPanelKv = kN * kRowBytes;
  static_assert(kRowGroups * kWarpgroupRows == kM && C.product == Product::wgmma && C.loads == Loads::tma);

  // A persistent block loads the next query tile while it computes this one.
  static constexpr int kQueries = C.persistent ? 2 : 1;
  // As many tiles of K and V as declared, or two where a block's shared memory does not hold them.
  static constexpr int kBlockShared = 227 * 1024, kQueryBytes = kM * D * sizeof(T), kTileBytes = 2 * kN * D * sizeof(T);
  // At head_dim 64 other kernels lose by it: ptxas orders the loop otherwise, and up to 2 % of the time went on an
  // H200.
  static constexpr bool kStoresAtOnce = C.short_epilogue && (D > 64 || kKeyGroups > 2);
  static_assert(!C.short_epilogue || !C.sum_column);

  // A warpgroup's part of O, as its lanes hold it.
  struct Part {
    float o[D / 2][kWarpgroup], max[2][kWarpgroup], sum[2][kWarpgroup];
  };
  static constexpr int kPartBytes = (kKeyGroups - 1) * kRowGroups * sizeof(Part);
  static constexpr int kMostStages = (kBlockShared - 1024 - kQueries * kQueryBytes - kPartBytes) / kTileBytes;
  static constexpr int kStages = C.stages <= kMostStages ? C.stages : 2;
  static_assert(kStages >= 2 && (C.specialized || (!C.ping_pong && !C.overlap && !C.persistent)));
  static_assert(kKeyGroups == 1 || (C.specialized && !C.ping_pong && !C.persistent && kStages % kKeyGroups == 0));

  using Row = Chunk<T>[kRowBytes / sizeof(Chunk<T>)];
  using QueryTile = Row[kPanels][kM];
  // A query tile of a head: what a block computes at a time.
  struct WholeItem {
    int m0, head, batch, tiles;  // tiles: of keys that some row sees
  };
  struct ShortItem : WholeItem {
    int end;  // rows from here on are no one's or another item's
  };
  using Item = std::conditional_t<C.halves_last, ShortItem, WholeItem>;
  static constexpr int kNoItem = -1;  // as `tiles`: there are no more
  static __device__ Item make_item(int m0, int head, int batch, int tiles, [[maybe_unused]] int end) {
    if constexpr (C.halves_last)
      return {{m0, head, batch, tiles}, end};
    else
      return {m0, head, batch, tiles};
  }

  static_assert(!C.tma_store || C.overlap);
  static constexpr bool kBalanced = is_balanced(C);
  using Maps = MapsOf<C>;

  struct Shared {
    alignas(1024) QueryTile q[kQueries];  // and O, on its way out
    alignas(1024) Row k[kStages][kPanels][kN], v[kStages][kPanels][kN];
    Item item[kQueries];  // whose Q lies there
    uint64_t q_full[kQueries], q_empty[kQueries];
    uint64_t k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
  };

  // At head_dim 64 a trial of clusters cost B1 H8 S1024 2 % and B2 H8 S512 gained nothing.
  static constexpr Multicast kMulticast =
      kKeyGroups > 1 && (D > 64 || C.multicast == Multicast::all_tiles) ? C.multicast : Multicast::none;
  static constexpr bool kMulticasts = kMulticast != Multicast::none;
  static_assert(!C.prescaled_q || (C.persistent && C.overlap));

  // The weights are summed by 8 columns of ones behind those of V: 16 rows of them serve every 16 keys of every stage.
  static constexpr bool kSumColumn = C.sum_column && D == kPanelColumns && std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kOutput = D + (kSumColumn ? 8 : 0);
  static_assert(!C.sum_column || (C.overlap && C.stale_max));
  struct Ones {
    alignas(1024) Row rows[16];
  };
  static constexpr int kOnesBytes = kSumColumn ? sizeof(Ones) : 0;
  static __device__ Ones& ones(Shared& smem) { return *reinterpret_cast<Ones*>(&smem + 1); }
  // Then weights lie this many powers of two lower, so that one of 2 or more, which a bit tells, has outgrown its
  // maximum as far as the sum of a tile may.
  static constexpr float kHeadroom = kSumColumn ? 11.f : 0.f;
  static constexpr uint32_t kTwoOrMore = 0x40004000;  // in a pair of bf16

  static constexpr int kSharedBytes = sizeof(Shared) + kOnesBytes + kPartBytes;

  using Scores = float[kN / 2];
  using Output = float[kOutput / 2];
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
    // To the next buffer of a reader's own, of readers that take them in turns.
    template <int readers>
    __device__ void skip() {
      if constexpr (readers == 1) return advance();
      index += readers;
      if (index >= buffers) {
        index -= buffers;
        parity ^= 1;
      }
    }
  };

  // A lane's two rows. Sums are of its own columns until the end.
  struct PlainRows {
    float max[2], sum[2], rescale[2];
    bool scaled;  // scores are multiplied before the maximum is subtracted, not in one FMA with it
  };
  struct GapRows : PlainRows {
    float limit;        // of the sums of a tile's weights under an older maximum; negative where `scaled`
    bool is_next_full;  // the next tile of keys is there; false: not known
  };
  using Rows = std::conditional_t<C.short_gap, GapRows, PlainRows>;

  // A lane's sum of a row's weights under a maximum of earlier tiles, at most: fp16 holds each, and the sum of all
  // stays far from fp32's limit.
  static constexpr float kLargestStaleSum = 4096.f;
  // Tiles of a warpgroup from one look to the next at whether a maximum was too old, and those that it has left then.
  // Where warpgroups share rows of 64 columns looking costs every input 2 %: only quick_repair does. Nor do those look
  // that take turns, whose wider tiles leave no register for it.
  static constexpr int kTrustedTiles = 4, kLeftTiles = C.quick_repair ? 2 : 0;
  static constexpr bool kLooksBack = !C.ping_pong && (kKeyGroups == 1 || D > 64 || C.quick_repair);
  // Products of a repair without a loop: at head_dim 64 the longer code cost every input half a percent.
  static constexpr bool kUnrollsRepair = C.quick_repair && D > 64;

  // Weights are packed beside the exponentials, before the vote on their sums.
  static constexpr bool kPacksFirst = C.short_gap;
  // The next tile of keys is asked for ahead. At head_dim 128 it cost 1 % of the time.
  static constexpr bool kAsksAhead = C.short_gap && D <= 64;
  static_assert(C.short_gap || (C.paced == 0 && !C.sum_column));

  using Stage = Ring<kStages>;
  struct StoringQuery : Ring<kQueries> {
    bool is_storing = false;  // O of the item before is on its way out
  };
  using Query = std::conditional_t<C.tma_store, StoringQuery, Ring<kQueries>>;

  // The rows that fill no tile are the last tile's, or the first's, which under a causal mask sees the fewest keys:
  // then its first warpgroups have no row, and m0 is negative.
  static __device__ Item item_at(const Params& p, int m_tile, int head, int batch) {
    const int missing = C.rest_first ? kM - 1 - (ceil_div(p.seq_q, kWarpgroupRows) * kWarpgroupRows - 1) % kM : 0;
    return item_of(p, m_tile * kM - missing, kM, head, batch);
  }

  static __device__ Item item_of(const Params& p, int m0, int rows, int head, int batch) {
    const int end = min(m0 + rows, p.seq_q);
    return make_item(m0, head, batch, ceil_div(visible_keys(p, end - 1), kN), end);
  }

  // The items of this block. Persistent blocks take them in turns, a place further each time: a head's last tile may
  // have few rows, and the blocks are often a multiple of its tiles. Causal ones differ more: blocks take them longest
  // first within a section of heads, in turns from the first to the last and back, so that each gets of the long and of
  // the short ones; where `balanced`, from the places that the host planned. Where warpgroups share rows, grids are
  // small: the long tiles of all heads start first.
  struct Items {
    int first_head = 0, turn = 0, place = blockIdx.x;

    __device__ bool next(const Params& p, [[maybe_unused]] const Maps& maps, Item& item) {
      if constexpr (kKeyGroups > 1) {
        item = item_at(p, gridDim.z - 1 - blockIdx.z, blockIdx.x, blockIdx.y);
        return turn++ == 0;
      }
      if constexpr (!C.persistent) {
        const int m_tile = C.longest_first ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        item = item_at(p, m_tile, blockIdx.y, blockIdx.z);
        return turn++ == 0;
      }
      const int m_tiles = ceil_div(p.seq_q, kM), heads = p.heads_q * p.batch, blocks = gridDim.x;
      if (C.halves_last && !p.causal && p.seq_k >= kLongKeys) return next_by_size(p, item);
      if (!p.causal) {
        const int64_t i = static_cast<int64_t>(turn) * blocks + (place + turn) % blocks;
        ++turn;
        const int head = static_cast<int>(i / m_tiles);
        if (head < heads) item = item_at(p, static_cast<int>(i % m_tiles), head % p.heads_q, head / p.heads_q);
        return head < heads;
      }
      const int section = section_heads(p);
      for (; first_head < heads; first_head += section) {
        if constexpr (kBalanced) {
          if (turn == 0) place = maps.places.of[first_head / section % kPlacedSections][blockIdx.x];
        }
        const int size = min(section, heads - first_head);
        const int64_t items = static_cast<int64_t>(size) * m_tiles;
        const int64_t i = static_cast<int64_t>(turn) * blocks + (turn % 2 == 0 ? place : blocks - 1 - place);
        if (i < items) {
          ++turn;
          const int head = first_head + static_cast<int>(i % size);
          item = item_at(p, m_tiles - 1 - static_cast<int>(i / size), head % p.heads_q, head / p.heads_q);
          return true;
        }
        if constexpr (!kBalanced) {
          // Other places get the rest of the next section than got this one's.
          const int rest = static_cast<int>(items % blocks);
          place = (place + (items / blocks % 2 == 0 ? blocks - rest : rest)) % blocks;
        }
        turn = 0;
      }
      return false;
    }

    // As next(), of a block whose one item is known.
    __device__ bool once(const Item& one, Item& item) {
      item = one;
      return turn++ == 0;
    }

    // Whole tiles, head after head; then, where one turn of the blocks takes them all, those that fill no turn in two
    // items each; then what fills no tile. These read K and V once more, which long ones alone make up for.
    __device__ bool next_by_size(const Params& p, Item& item) {
      constexpr int kSecond = kRowGroups / 2, kFirst = kRowGroups - kSecond;  // of a halved tile
      const int groups = ceil_div(p.seq_q, kWarpgroupRows), tiles = groups / kRowGroups, rest = groups % kRowGroups;
      const int heads = p.heads_q * p.batch, blocks = gridDim.x, rests = rest > 0 ? heads : 0;
      const int64_t all = static_cast<int64_t>(heads) * tiles;
      const int left = static_cast<int>(all % blocks), halved = 2 * left + rests <= blocks ? left : 0;
      int64_t i = static_cast<int64_t>(turn++) * blocks + place;
      int head, first, count = kRowGroups;
      if (i < all + halved) {
        const int64_t whole = all - halved, tile = i < whole ? i : whole + (i - whole) / 2;
        head = static_cast<int>(tile / tiles);
        first = static_cast<int>(tile % tiles) * kRowGroups;
        if (i >= whole) {
          const bool is_second = (i - whole) % 2 != 0;
          if (is_second) first += kFirst;
          count = is_second ? kSecond : kFirst;
        }
      } else {
        i -= all + halved;
        head = static_cast<int>(i);
        first = tiles * kRowGroups;
        count = rest;
        if (i >= rests) return false;
      }
      item = item_of(p, first * kWarpgroupRows, count * kWarpgroupRows, head % p.heads_q, head / p.heads_q);
      return true;
    }

    static __host__ __device__ int section_heads(const Params& p) {
      const int64_t bytes = p.seq_k > kShortKeys ? kSectionBytes : kShortSectionBytes;
      const int64_t head_bytes = static_cast<int64_t>(p.seq_k) * 2 * D * sizeof(T);
      const int64_t kv_heads = max(bytes / max(head_bytes, int64_t{1}), int64_t{1});
      return static_cast<int>(min(int64_t{p.heads_q} * p.batch, kv_heads * (p.heads_q / p.heads_kv)));
    }
  };

  // What an item costs besides its tiles of keys, in those: at B16 H16 D128 36 us in 11.6 turns, as long as 3.3 tiles
  // an item.
  static constexpr int kItemTiles = 3;
  static void balance_blocks(Places& places, const Params& p, int blocks) {
    if (!p.causal) return;
    // A thread's last plan: making one takes the host longer than the rest of a call.
    static thread_local Places kept{};
    static thread_local int32_t kept_for[6]{};
    const int32_t problem[6] = {p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k, blocks};
    bool is_kept = true;
    for (int i = 0; i < 6; ++i) {
      is_kept &= kept_for[i] == problem[i];
      kept_for[i] = problem[i];
    }
    if (!is_kept) {
      const int tiles = ceil_div(p.seq_q, kM);
      balance(kept, p.heads_q * p.batch, Items::section_heads(p), blocks, tiles, [&](int tile) {
        const int keys = p.seq_k - (tiles - 1 - tile) * kM;  // of its last row
        return ceil_div(std::max(0, keys), kN) + kItemTiles;
      });
    }
    places = kept;
  }

  // --- loads --------------------------------------------------------------------------------------------------------

  template <int rows>
  static __device__ void load(Row (&to)[kPanels][rows], const TensorMap& map, uint64_t* barrier, int row, int head,
                              int batch) {
    ptx::mbarrier_arrive_expect(barrier, sizeof to);
    load_panels(to, map, barrier, row, head, batch);
  }

  static __device__ void load_q(Shared& smem, const Maps& maps, const Item& b, int buffer) {
    load(smem.q[buffer], maps.q, &smem.q_full[buffer], b.m0, b.head, b.batch);
  }
  static __device__ void load_kv(Shared& smem, const Params& p, const Maps& maps, const Item& b, int tile, int stage) {
    load(smem.k[stage], maps.k, &smem.k_full[stage], tile * kN, kv_head(p, b.head), b.batch);
    load(smem.v[stage], maps.v, &smem.v_full[stage], tile * kN, kv_head(p, b.head), b.batch);
  }

  // As load(), for both blocks of the cluster: each brings half of the panels of a tile's K and V, counted from
  // `first`, and is told of all.
  static __device__ void load_for_both(Row (&to)[kPanels][kN], const TensorMap& map, uint64_t* barrier, int row,
                                       int head, int batch, int first) {
    ptx::mbarrier_arrive_expect(barrier, sizeof to);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      if ((first + panel) % kClusterBlocks == ptx::cluster_rank())
        ptx::tma_load_multicast(to[panel], &map.map, barrier, panel * kPanelColumns, row, head * map.head_step,
                                batch * map.batch_step, (1 << kClusterBlocks) - 1);
  }

  // What a block loads that has one item: known before its barriers are.
  static constexpr bool kFindsItemEarly = C.early_item && C.specialized && !C.persistent;
  struct OneItem {
    Item item;
    int kv;  // head of K and V
  };
  static __device__ OneItem find_item(const Params& p, const Maps& maps) {
    OneItem one;
    Items().next(p, maps, one.item);
    one.kv = kv_head<C.few_divisions>(p, one.item.head);
    for (int* x : {&one.item.m0, &one.item.tiles, &one.kv}) ptx::pin(*x);
    return one;
  }

  // What one thread of the producer warpgroup does: it refills a stage as soon as all warps that read it have.
  // Persistent blocks get their items from it too, which leaves the registers of the search to the consumers.
  static __device__ void produce(Shared& smem, const Params& p, const Maps& maps, [[maybe_unused]] const OneItem& one) {
    Stage stage;
    Query query;
    Items items;
    for (Item b; kFindsItemEarly ? items.once(one.item, b) : items.next(p, maps, b); query.advance()) {
      if constexpr (C.persistent) {
        ptx::mbarrier_wait(&smem.q_empty[query.index], query.parity ^ 1);
        smem.item[query.index] = b;
      }
      load_q(smem, maps, b, query.index);
      const int kv = kFindsItemEarly ? one.kv : kv_head(p, b.head);
      int tile = b.tiles - 1;
      if constexpr (kMulticasts) {
        if (ptx::cluster_blocks() > 1) {
          const int last = kMulticast == Multicast::all_tiles ? 0 : max(b.tiles - kStages, 0);
          for (; tile >= last; --tile, stage.advance()) {
            ptx::mbarrier_wait(&smem.k_empty[stage.index], stage.parity ^ 1);
            load_for_both(smem.k[stage.index], maps.k, &smem.k_full[stage.index], tile * kN, kv, b.batch, tile);
            ptx::mbarrier_wait(&smem.v_empty[stage.index], stage.parity ^ 1);
            load_for_both(smem.v[stage.index], maps.v, &smem.v_full[stage.index], tile * kN, kv, b.batch,
                          tile + kPanels);
          }
        }
      }
      for (; tile >= 0; --tile, stage.advance()) {
        ptx::mbarrier_wait(&smem.k_empty[stage.index], stage.parity ^ 1);
        load(smem.k[stage.index], maps.k, &smem.k_full[stage.index], tile * kN, kv, b.batch);
        ptx::mbarrier_wait(&smem.v_empty[stage.index], stage.parity ^ 1);
        load(smem.v[stage.index], maps.v, &smem.v_full[stage.index], tile * kN, kv, b.batch);
      }
    }
    if constexpr (C.persistent) {
      ptx::mbarrier_wait(&smem.q_empty[query.index], query.parity ^ 1);
      smem.item[query.index] = make_item(0, 0, 0, kNoItem, 0);
      ptx::mbarrier_arrive(&smem.q_full[query.index]);
    }
  }

  // --- one tile of keys ---------------------------------------------------------------------------------------------

  // Of the first of a lane's rows in its warpgroup's, and of its first column.
  static __device__ int lane_row(int thread) { return thread / 32 % 4 * 16 + thread % 32 / 4; }
  static __device__ int lane_column(int thread) { return thread % 4 * 2; }

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
  static __device__ void multiply_pv(Output& o, const Weights& weights, Shared& smem, int stage) {
    constexpr uint64_t kNext = 16 * kRowBytes / 16;  // 16 keys further; the ones are the same
    const uint32_t tile = ptx::shared_address(smem.v[stage]);
    const uint64_t v = ptx::matrix_descriptor(tile, kSumColumn ? ptx::shared_address(&ones(smem)) - tile : kPanelKv);
#pragma unroll
    for (int block = 0; block < kN / 16; ++block)
      ptx::Wgmma<T, kOutput>::add_rows(o, weights + block * 4,
                                       v + block * (kSumColumn ? kNext - (kNext << 16) : kNext));
    ptx::wgmma_commit();
  }

  // Scores become weights under the maxima as they are; `sums` are those of the lane's columns. A maximum of -infinity
  // gives infinite weights.
  static __device__ void exponentiate(Scores& s, const Rows& rows, float factor, float (&sums)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = rows.max[r];
      sums[r] = 0.f;
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        // Depends on what came before, or ptxas puts all these FMAs in front of the exponentials. An infinite weight
        // makes it a NaN, and the sum, which is refused as the infinite one would be.
        if (C.paced > 0 && i > 0 && i % C.paced == 0) max = fmaf(s[i * 4 + r * 2 - 3], 0.f, max);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[i * 4 + r * 2 + c];
          x = fmaf(x, factor, -max);
          x = C.software_exp2 > 0 && (i * 2 + c) % C.software_exp2 == 0 ? exp2_polynomial(x) : ptx::ex2(x);
          sums[r] = C.short_gap && i + c == 0 ? x : sums[r] + x;
        }
      }
    }
  }

  // What scores are multiplied by.
  static __device__ float score_scale(const Params& p) { return C.prescaled_q ? 1.f : p.scale_log2; }

  // The scores of a warp's 16 rows once more, without its warpgroup. warp_row: of the tile.
  static __device__ void multiply_qk_again(Scores& s, const QueryTile& q, const Row (&k_tile)[kPanels][kN],
                                           int first_row) {
    const int thread = ptx::thread_in_block(), lane = thread % 32, warp_row = first_row + thread / 32 % 4 * 16;
    const int q_row = warp_row + lane % 16, k_row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] = 0.f;
#pragma unroll(kUnrollsRepair ? D / 16 : 1)
    for (int d = 0; d < D / 16; ++d) {
      const int panel = d / 4, chunk = d % 4 * 2;
      uint32_t a[4];
      ptx::ldmatrix(a, ptx::shared_address(&q[panel][q_row][swizzle_chunk(q_row, chunk + lane / 16)]));
#pragma unroll
      for (int n = 0; n < kN / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix(b, ptx::shared_address(
                             &k_tile[panel][n * 16 + k_row][swizzle_chunk(n * 16 + k_row, chunk + lane / 8 % 2)]));
        ptx::mma<T>(reinterpret_cast<float (&)[4]>(s[n * 8]), a, b[0], b[1]);
        ptx::mma<T>(reinterpret_cast<float (&)[4]>(s[n * 8 + 4]), a, b[2], b[3]);
      }
    }
  }

  // Scores become weights, sums and maxima are brought up to date. True: O is to be multiplied by `rows.rescale`, which
  // holds for the whole warp. query, key: those of the lane's s[0].
  static __device__ bool softmax(Scores& s, Rows& rows, const Params& p, int query, int key, bool is_edge) {
    float factor = score_scale(p);
    if (factor <= 0.f) {
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
      raised[r] = fmaxf(rows.max[r], kSumColumn ? fmaf(quad_max(m), factor, kHeadroom) : quad_max(m) * factor);
      grew |= raised[r] > rows.max[r] + static_cast<float>(C.lazy_rescale);
    }
    const bool is_raised = C.lazy_rescale < 0 || C.stale_max || __any_sync(kFullWarp, grew);
    rows.rescale[0] = rows.rescale[1] = 1.f;
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
      if constexpr (C.short_gap) rows.limit = rows.scaled ? -1.f : kLargestStaleSum;
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
          if constexpr (!kSumColumn) rows.sum[r] += x;
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
    for (int i = 0; i < kOutput / 2; ++i) o[i] *= rows.rescale[i / 2 % 2];
  }

  static __device__ void pack_weights(Weights& weights, const Scores& s) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) weights[i] = pack(T(), s[i * 2], s[i * 2 + 1]);
  }

  // --- a warpgroup's rows -------------------------------------------------------------------------------------------

  // What a warp's lanes have in common, known to be.
  static __device__ int uniform(int x) { return static_cast<int>(__reduce_or_sync(kFullWarp, x)); }

  // Barriers: 0 is the block's; the order of the warpgroups' turns on the tensor cores; a warpgroup's own.
  static constexpr int kTurnBarrier = 1, kOwnBarrier = kTurnBarrier + kConsumers;
  static constexpr int kJoinBarrier = kOwnBarrier + kConsumers;  // of the warpgroups that share rows

  // Where a warpgroup is, and the state of its rows of an item.
  struct Consumer {
    Shared& smem;
    const Params& p;
    const Maps& maps;
    const int warpgroup;  // by its rows
    Stage stage;
    Query query;
    Item item;
    Rows rows;

    // Waits for this warpgroup's turn, and ends it. Each has one turn a tile.
    __device__ void take_turn() const {
      if constexpr (C.ping_pong) ptx::barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
    }
    __device__ void pass_turn() const {
      if constexpr (C.ping_pong)
        ptx::barrier_arrive(kTurnBarrier + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1), 2 * kWarpgroup);
    }

    // A warp is done with the tile. joined: by an instruction of the whole warp since its lanes waited for the tile and
    // read it. The wait for wgmma is one; ldmatrix and O on its way out are none.
    template <bool joined = !C.stale_max && !C.persistent>
    static __device__ void release(uint64_t* barrier) {
      if constexpr (C.specialized) {
        if constexpr (!joined) __syncwarp();
        if constexpr (kMulticast == Multicast::all_tiles) {
          if (static_cast<int>(threadIdx.x) % 32 < ptx::cluster_blocks())
            ptx::mbarrier_arrive_at(barrier, threadIdx.x % 32);
        } else {
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
        }
      }
    }

    // Without a producer the whole block is done with a stage before its first thread refills it.
    __device__ void refill(int tile) const {
      if constexpr (!C.specialized) {
        __syncthreads();
        const int next = tile - (kStages - 1);
        if (threadIdx.x == 0 && next >= 0) load_kv(smem, p, maps, item, next, (stage.index + kStages - 1) % kStages);
      }
    }

    __device__ int first_row() const { return item.m0 + warpgroup * kWarpgroupRows; }

    __device__ bool has_row(int row) const {
      int end = p.seq_q;
      if constexpr (C.halves_last) end = item.end;
      return C.rest_first ? static_cast<unsigned>(row) < static_cast<unsigned>(end) : row < end;
    }

    __device__ void run() {
      if (C.ping_pong && warpgroup == kConsumers - 1) pass_turn();
      if constexpr (C.persistent) {
        for (;; query.advance()) {
          ptx::mbarrier_wait(&smem.q_full[query.index], query.parity);
          const Item& next = smem.item[query.index];
          if constexpr (C.halves_last)
            item = {{uniform(next.m0), uniform(next.head), uniform(next.batch), uniform(next.tiles)},
                    uniform(next.end)};
          else
            item = {uniform(next.m0), uniform(next.head), uniform(next.batch), uniform(next.tiles)};
          if (item.tiles == kNoItem) break;
          attend();
        }
      } else {
        Items().next(p, maps, item);
        ptx::mbarrier_wait(&smem.q_full[0], 0);
        attend();
      }
      if (C.ping_pong && warpgroup == 0) take_turn();
      if constexpr (C.tma_store)
        if (threadIdx.x % 32 == 0) ptx::tma_store_wait_read();
    }

    // The warpgroup's rows of Q. Eight lanes take a row of a panel.
    __device__ void prescale() const {
      QueryTile& tile = smem.q[query.index];
      const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
      for (int i = thread; i < kPanels * kWarpgroupRows * 8; i += kWarpgroup) {
        const int row = warpgroup * kWarpgroupRows + i / 8 % kWarpgroupRows;
        Chunk<T>& to = tile[i / 8 / kWarpgroupRows][row][i % 8];
        Chunk<T> chunk;
        reinterpret_cast<uint4&>(chunk) = reinterpret_cast<const uint4&>(to);
#pragma unroll
        for (T& x : chunk.x) x = static_cast<T>(static_cast<float>(x) * p.scale_log2);
        reinterpret_cast<uint4&>(to) = reinterpret_cast<const uint4&>(chunk);
      }
      ptx::fence_async_shared();
      ptx::barrier_sync(kOwnBarrier + warpgroup, kWarpgroup);
    }

    __device__ void attend() {
      if constexpr (C.prescaled_q) prescale();
      const int last_row = min(first_row() + kWarpgroupRows, p.seq_q) - 1;
      // Of the warpgroup's rows: tiles that one sees, and those that all see whole: these need no exact maximum, where
      // the scale leaves the scores their signs.
      const int my_tiles = has_row(first_row()) ? ceil_div(visible_keys(p, last_row), kN) : 0;
      const int stale_tiles = C.stale_max && score_scale(p) > 0.f ? visible_keys(p, first_row()) / kN : 0;
      const uint64_t q =
          ptx::matrix_descriptor(ptx::shared_address(smem.q[query.index]) + warpgroup * kWarpgroupRows * kRowBytes);
      Scores s;
      Output o = {};
      Weights weights;
      rows = {};
      rows.max[0] = rows.max[1] = -CUDART_INF_F;
      if constexpr (C.short_gap) rows.limit = kLargestStaleSum;
      const int group = kKeyGroups > 1 ? stage.index : 0;  // of those that share rows: its first stage
      int tile = item.tiles - 1 - group;
      // Above the diagonal for this warpgroup alone. It waits for what it does not read, or it could arrive twice in a
      // phase; turns of tiles this wide keep it from that by themselves.
      for (; tile >= my_tiles; tile += kNextTile, stage.template skip<kKeyGroups>()) {
        refill(tile);
        if constexpr (C.specialized) {
          ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);  // redundant: ping_pong
          ptx::mbarrier_wait(&smem.v_full[stage.index], stage.parity);  // redundant: ping_pong
        }
        take_turn();
        pass_turn();
        constexpr bool joined = C.ping_pong && !C.stale_max && !C.persistent;  // by the turn
        release<joined>(&smem.k_empty[stage.index]);
        release<joined>(&smem.v_empty[stage.index]);
      }
      if constexpr (C.overlap) {
        if (tile >= 0) {
          ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);
          take_turn();
          ptx::wgmma_fence();
          multiply_qk(s, q, smem.k[stage.index]);
          pass_turn();
          ptx::wgmma_wait<0>();
          ptx::pin(s);
          weigh<true>(s, weights, tile, [] {});
          pack_weights(weights, s);
          release_stored();
          for (tile += kNextTile; tile >= stale_tiles; tile += kNextTile) step<true>(s, o, weights, q, tile);
          if constexpr (C.stale_max) {
            // Scores that outgrew an older maximum seldom do so once: the rest gets its own. The warps turn to it
            // together, as a product is of them all.
            bool is_raised = false;
            [[maybe_unused]] const int first = tile;
            for (; tile >= 0; tile += kNextTile) {
              is_raised |= step<false>(s, o, weights, q, tile);
              if constexpr (kLooksBack) {
                const int own_barrier = kOwnBarrier + group * kRowGroups + warpgroup;
                const bool looks = C.first_look ? tile >= kKeyGroups && (first - tile) / kKeyGroups % kTrustedTiles == 0
                                                : tile / kKeyGroups % kTrustedTiles == kLeftTiles;
                if (looks && ptx::barrier_any(own_barrier, kWarpgroup, is_raised)) break;
              }
            }
            if constexpr (kLooksBack)
              for (tile += kNextTile; tile >= 0; tile += kNextTile) step<true>(s, o, weights, q, tile);
          }
          ptx::mbarrier_wait(&smem.v_full[stage.index], stage.parity);
          ptx::wgmma_fence();
          multiply_pv(o, weights, smem, stage.index);
          finish_pv(o, &smem.v_empty[stage.index]);
          stage.template skip<kKeyGroups>();
        } else {
          release_stored();
        }
        if constexpr (kSumColumn)
          for (int r = 0; r < 2; ++r) rows.sum[r] = o[D / 2 + r * 2];
      } else {
        bool is_first = true;
        for (; tile >= 0; tile += kNextTile, stage.template skip<kKeyGroups>(), is_first = false) {
          refill(tile);
          ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);
          take_turn();
          ptx::wgmma_fence();
          multiply_qk(s, q, smem.k[stage.index]);
          ptx::wgmma_wait<0>();
          ptx::pin(s);
          pass_turn();
          bool is_raised;
          if constexpr (C.stale_max)
            is_raised = is_first || tile >= stale_tiles ? weigh<true>(s, weights, tile, [] {})
                                                        : weigh<false>(s, weights, tile, [] {});
          else
            is_raised = weigh<true>(s, weights, tile, [] {});
          if (is_raised) rescale(o, rows);
          pack_weights(weights, s);
          ptx::mbarrier_wait(&smem.v_full[stage.index], stage.parity);
          ptx::wgmma_fence();
          multiply_pv(o, weights, smem, stage.index);
          finish_pv(o, &smem.v_empty[stage.index]);
        }
      }
      if constexpr (kKeyGroups > 1) {
        const int behind = behind_joiner(group);
        if (behind > 0) return hand_over(o, part(behind));
        join(o);
      }
      store(o);
    }

    // How many warpgroups that share these rows stand before this one, counted from the one that joins their parts: 0
    // is that itself. The tiles of keys come in turns, and who gets the last has no time to hand its part over.
    __device__ int behind_joiner(int group) const {
      if constexpr (!C.last_joins) return group;
      const int joiner = (max(item.tiles, 1) - 1) % kKeyGroups;
      return (group - joiner + kKeyGroups) % kKeyGroups;
    }

    __device__ Part& part(int behind) const {
      return reinterpret_cast<Part*>(reinterpret_cast<unsigned char*>(&smem + 1) +
                                     kOnesBytes)[(behind - 1) * kRowGroups + warpgroup];
    }

    // To the one of the warpgroups that share these rows which joins their parts.
    __device__ void hand_over(const Output& o, Part& to) const {
      const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) to.o[i][thread] = o[i];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        to.max[r][thread] = rows.max[r];
        to.sum[r][thread] = rows.sum[r];
      }
      ptx::barrier_arrive(kJoinBarrier + warpgroup, kKeyGroups * kWarpgroup);
    }

    // The other warpgroups have read Q too when their parts are there: O may take its place.
    __device__ void join(Output& o) {
      ptx::barrier_sync(kJoinBarrier + warpgroup, kKeyGroups * kWarpgroup);
      const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
      for (int g = 1; g < kKeyGroups; ++g) {
        const Part& other = part(g);
        float mine[2], theirs[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float their_max = other.max[r][thread], max = fmaxf(rows.max[r], their_max);
          mine[r] = ptx::ex2(rows.max[r] - finite_max(max));
          theirs[r] = ptx::ex2(their_max - finite_max(max));
          rows.max[r] = max;
          rows.sum[r] = rows.sum[r] * mine[r] + other.sum[r][thread] * theirs[r];
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] = o[i] * mine[i / 2 % 2] + other.o[i][thread] * theirs[i / 2 % 2];
      }
    }

    __device__ void await_keys() const {
      if constexpr (kAsksAhead) {
        if (rows.is_next_full) return;
      }
      ptx::mbarrier_wait(&smem.k_full[stage.index], stage.parity);
    }

    // QK of a tile beside PV of the one before. True: as of softmax().
    template <bool is_exact>
    __device__ __forceinline__ bool step(Scores& s, Output& o, Weights& weights, uint64_t q, int tile) {
      const Stage before = stage;
      stage.template skip<kKeyGroups>();
      await_keys();
      if constexpr (!C.short_gap) ptx::mbarrier_wait(&smem.v_full[before.index], before.parity);
      take_turn();
      ptx::wgmma_fence();
      multiply_qk(s, q, smem.k[stage.index]);
      if constexpr (C.short_gap) {
        ptx::mbarrier_wait(&smem.v_full[before.index], before.parity);
        ptx::wgmma_fence();  // redundant: overlap
      }
      multiply_pv(o, weights, smem, before.index);
      pass_turn();
      if constexpr (kAsksAhead) {
        Stage next = stage;
        next.template skip<kKeyGroups>();
        rows.is_next_full = ptx::mbarrier_test(&smem.k_full[next.index], next.parity);
      }
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      const bool is_raised = weigh<is_exact>(s, weights, tile, [&] { finish_pv(o, &smem.v_empty[before.index]); });
      if (is_raised) rescale(o, rows);
      if constexpr (is_exact || !kPacksFirst) pack_weights(weights, s);
      return is_raised;
    }

    static __device__ void finish_pv(Output& o, uint64_t* empty) {
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release(empty);
    }

    // Scores become weights, and K is released. `finish` ends the product that runs meanwhile, after what may run
    // beside it; then `weights` may be written. True: as of softmax().
    template <bool is_exact, class Finish>
    __device__ bool weigh(Scores& s, Weights& weights, int tile, Finish finish) {
      if constexpr (is_exact) {
        release(&smem.k_empty[stage.index]);
        const int thread = ptx::thread_in_block();
        const bool is_raised = softmax(s, rows, p, first_row() + lane_row(thread), tile * kN + lane_column(thread),
                                       (tile + 1) * kN > visible_keys(p, first_row()));
        finish();
        return is_raised;
      } else {
        float sums[2];
        exponentiate(s, rows, score_scale(p), sums);
        finish();
        if constexpr (kPacksFirst) pack_weights(weights, s);
        const bool is_raised = (!C.short_gap && rows.scaled) || __any_sync(kFullWarp, outgrew(sums, weights));
        if (is_raised) {
          multiply_qk_again(s, smem.q[query.index], smem.k[stage.index], warpgroup * kWarpgroupRows);
          softmax(s, rows, p, 0, 0, false);
          sums[0] = sums[1] = 0.f;
          if constexpr (kPacksFirst) pack_weights(weights, s);
        }
        release(&smem.k_empty[stage.index]);
        if constexpr (!kSumColumn) {
          rows.sum[0] += sums[0];
          rows.sum[1] += sums[1];
        }
        return is_raised;
      }
    }

    __device__ bool outgrew(const float (&sums)[2], [[maybe_unused]] const Weights& weights) const {
      if constexpr (kSumColumn) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < kN / 4; ++i) bits |= weights[i];
        return rows.limit < 0.f || (bits & kTwoOrMore) != 0;
      } else if constexpr (C.short_gap) {
        return !(sums[0] < rows.limit && sums[1] < rows.limit);  // or one is a NaN
      } else {
        return !(fmaxf(sums[0], sums[1]) < kLargestStaleSum);
      }
    }

    // As store(), with nothing that a warp waits for by itself: both rows at once, no division, each address a step
    // from the one before, the LSE last. The other's branches took 900 cycles of a small grid's 8400 on an H200.
    __device__ void store_at_once(const Output& o) {
      ptx::barrier_sync(kOwnBarrier + warpgroup, kWarpgroup);  // redundant: product
      QueryTile& staged = smem.q[query.index];
      const unsigned thread = static_cast<unsigned>(ptx::thread_in_block()) % kWarpgroup, lane = thread % 32;
      const unsigned warp_row = warpgroup * kWarpgroupRows + thread / 32 * 16, tile_row = warp_row + lane / 4;
      const unsigned column = lane % 4 * 2;
      float sum[2], inverse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] = quad_sum(rows.sum[r]);
        inverse[r] = fast_inverse_sum(sum[r]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned at = tile_row + r * 8;
#pragma unroll
        for (int i = 0; i < D / 8; ++i)
          reinterpret_cast<uint32_t&>(staged[i / 8][at][swizzle_chunk(at, i % 8)].x[column]) =
              pack(T(), o[i * 4 + r * 2] * inverse[r], o[i * 4 + r * 2 + 1] * inverse[r]);
      }
      if constexpr (C.tma_store)
        start_store(staged, warp_row);
      else
        store_rows(staged, warp_row, lane);
      float* lse = head_base(p.lse, p.lse_strides, item.batch, item.head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = item.m0 + static_cast<int>(tile_row) + r * 8;
        const float value = log_sum_exp(rows.max[r], sum[r]);
        if (column == 0 && has_row(row)) ptx::store_global(&lse[row * p.lse_strides.row], value);
      }
    }

    // A warp's rows, a few at a time.
    __device__ void store_rows(const QueryTile& staged, unsigned warp_row, unsigned lane) {
      static_assert(!C.persistent);  // the place of these rows is not for another Q
      constexpr int kChunks = D / 8, kAtOnce = 32 / kChunks, kSteps = 16 / kAtOnce;
      const unsigned first = warp_row + lane / kChunks, chunk = lane % kChunks;
      const int row = item.m0 + static_cast<int>(first);
      T* out = head_base(static_cast<T*>(p.o), p.o_strides, item.batch, item.head) + row * p.o_strides.row + chunk * 8;
      const bool has_chunk = static_cast<int>(chunk * 8) < p.head_dim;
      __syncwarp();
      uint4 words[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const unsigned at = first + i * kAtOnce;
        words[i] = reinterpret_cast<const uint4&>(staged[chunk / 8][at][swizzle_chunk(at, chunk % 8)]);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (has_chunk && has_row(row + i * kAtOnce)) ptx::store_global(out + i * kAtOnce * p.o_strides.row, words[i]);
    }

    // O goes through the place of the warpgroup's rows of Q, so that global memory sees 16-byte stores.
    __device__ void store(const Output& o) {
      if constexpr (kStoresAtOnce) return store_at_once(o);
      // All warps of the warpgroup have read Q; its products were waited for as a whole, but no document promises that.
      ptx::barrier_sync(kOwnBarrier + warpgroup, kWarpgroup);  // redundant: product
      QueryTile& staged = smem.q[query.index];
      const int thread = ptx::thread_in_block(), lane = thread % 32, column = lane_column(thread);
      const int tile_row = warpgroup * kWarpgroupRows + lane_row(thread), row = item.m0 + tile_row;
      float* lse = head_base(p.lse, p.lse_strides, item.batch, item.head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = kSumColumn ? rows.sum[r] : quad_sum(rows.sum[r]), inverse = inverse_sum(sum);
        const int at = tile_row + r * 8;
#pragma unroll
        for (int i = 0; i < D / 8; ++i)
          reinterpret_cast<uint32_t&>(staged[i / 8][at][swizzle_chunk(at, i % 8)].x[column]) =
              pack(T(), o[i * 4 + r * 2] * inverse, o[i * 4 + r * 2 + 1] * inverse);
        if (column == 0 && has_row(row + r * 8)) lse[(row + r * 8) * p.lse_strides.row] = log_sum_exp(rows.max[r], sum);
      }
      const int warp_row = tile_row - lane / 4;
      if constexpr (C.tma_store) return start_store(staged, warp_row);
      __syncwarp();
      T* out = head_base(static_cast<T*>(p.o), p.o_strides, item.batch, item.head);
#pragma unroll
      for (int i = lane; i < 16 * D / 8; i += 32) {
        const int at = warp_row + i / (D / 8), chunk = i % (D / 8);
        if (has_row(item.m0 + at) && chunk * 8 < p.head_dim)
          reinterpret_cast<uint4*>(out + (item.m0 + at) * p.o_strides.row)[chunk] =
              reinterpret_cast<const uint4&>(staged[chunk / 8][at][swizzle_chunk(at, chunk % 8)]);
      }
      if constexpr (C.persistent) {
        ptx::fence_async_shared();  // the next Q comes by the async proxy
        release(&smem.q_empty[query.index]);
      }
    }

    // One lane sends the warp's rows, which lie in one item and one head.
    __device__ void start_store(const QueryTile& staged, int warp_row) {
      ptx::fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0 && has_row(item.m0 + warp_row)) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
          ptx::tma_store(&maps.o.map, staged[panel][warp_row], panel * kPanelColumns, item.m0 + warp_row,
                         item.head * maps.o.head_step, item.batch * maps.o.batch_step);
        ptx::tma_store_commit();
      }
      query.is_storing = true;
    }

    // The place of the item before is free for the next Q. Asked for after an item's first products: by then O has
    // left.
    __device__ void release_stored() {
      if constexpr (C.tma_store && C.persistent) {
        if (query.is_storing && threadIdx.x % 32 == 0) {
          ptx::tma_store_wait_read();
          ptx::mbarrier_arrive(&smem.q_empty[query.index == 0 ? kQueries - 1 : query.index - 1]);
        }
      }
    }
  };

  // Waits for all threads of the block, and of the cluster's other block.
  static __device__ void meet() {
    if constexpr (kMulticasts) {
      if (ptx::cluster_blocks() > 1) {
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
        return;
      }
    }
    __syncthreads();
  }

  static __device__ void run(const Params& p, const Maps& maps) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    Shared& smem = *reinterpret_cast<Shared*>(dynamic_shared);
    const int warpgroup = uniform(threadIdx.x / kWarpgroup);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kQueries; ++i) {
        ptx::mbarrier_init(&smem.q_full[i], 1);
        if constexpr (C.persistent) ptx::mbarrier_init(&smem.q_empty[i], kConsumers * 4);
      }
      for (int i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(&smem.k_full[i], 1);
        ptx::mbarrier_init(&smem.v_full[i], 1);
        if constexpr (C.specialized) {
          const int blocks = kMulticast == Multicast::all_tiles ? ptx::cluster_blocks() : 1;
          ptx::mbarrier_init(&smem.k_empty[i], kRowGroups * 4 * blocks);
          ptx::mbarrier_init(&smem.v_empty[i], kRowGroups * 4 * blocks);
        }
      }
      ptx::fence_mbarrier_init();
      if constexpr (!C.specialized) {
        Item b;
        Items().next(p, maps, b);
        load_q(smem, maps, b, 0);
        for (int i = 0; i < kStages - 1 && i < b.tiles; ++i) load_kv(smem, p, maps, b, b.tiles - 1 - i, i);
      }
    }
    if constexpr (kSumColumn) {
      constexpr uint32_t kOnes = 0x3f803f80;  // a pair of bf16
      if (threadIdx.x < 16)
        reinterpret_cast<uint4&>(ones(smem).rows[threadIdx.x][swizzle_chunk(threadIdx.x, 0)]) = {kOnes, kOnes, kOnes,
                                                                                                 kOnes};
      ptx::fence_async_shared();
    }
    [[maybe_unused]] OneItem one;
    if constexpr (kFindsItemEarly) {
      if (warpgroup == kConsumers) one = find_item(p, maps);
    }
    if constexpr (C.early_launch) ptx::wait_in_stream();
    meet();
    if constexpr (C.specialized) {
      if (warpgroup == kConsumers) {
        ptx::drop_registers<kProducerRegisters>();
        if (threadIdx.x == kConsumers * kWarpgroup) produce(smem, p, maps, one);
      } else {
        ptx::raise_registers<kConsumerRegisters>();
        if constexpr (kKeyGroups > 1)
          Consumer{smem, p, maps, warpgroup % kRowGroups, {warpgroup / kRowGroups}}.run();
        else
          Consumer{smem, p, maps, warpgroup}.run();
      }
    } else {
      Consumer{smem, p, maps, warpgroup}.run();
    }
    if constexpr (kMulticast == Multicast::all_tiles)
      meet();  // no block leaves before all have arrived at its barriers
  }
};

}  // namespace flashladder
