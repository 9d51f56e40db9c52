// The ABI between a rung's library and its callers: problem, configuration, launcher. Host-only C++17, no CUDA headers.
#pragma once

#include <cstdint>

namespace flashladder {

// Distances in elements between neighbours along each axis; the head_dim axis is contiguous.
struct Strides {
  int64_t batch, head, row;
};

// One forward call. q, o: (batch, heads_q, seq_q, head_dim); k, v: (batch, heads_kv, seq_k, head_dim);
// lse: (batch, heads_q, seq_q), float32, natural log. Query head h reads kv head h / (heads_q / heads_kv).
struct Params {
  const void *q, *k, *v;
  void* o;
  float* lse;
  Strides q_strides, k_strides, v_strides, o_strides, lse_strides;
  int32_t batch, heads_q, heads_kv, seq_q, seq_k;
  float scale_log2;  // softmax scale x log2(e): scores are kept in the base-2 domain
  bool causal;       // bottom-right aligned: query q sees key k when k <= q + seq_k - seq_q
  // Keys split among blocks: O of each part (splits, batch, heads_q, seq_q, its kernel's head_dim), normalised, and the
  // base-2 logarithm of its sum. 1: no parts.
  int32_t splits, head_dim;
  float *part_o, *part_lse;
};

enum class Dtype : int32_t { fp16, bf16 };

enum class Grid : int32_t {
  single,      // one thread block walks the whole problem
  query_tile,  // (query tiles, heads, batch)
};

enum class Reduction : int32_t {
  serial,        // one thread reduces a row
  warp_shuffle,  // the lanes of a warp reduce a row together
};

enum class Swizzle : int32_t {
  none,
  xor_chunk,  // 16-byte chunk index XOR (row mod 8)
  padded,     // rows 16 bytes longer: for readers that want a constant distance between rows
};

// Who multiplies matrices.
enum class Product : int32_t {
  scalar,         // fp32 FMA
  wmma_qk,        // Q K^T by WMMA, P V by fp32 FMA
  wmma,           // both by WMMA, through shared memory
  mma_registers,  // both by mma.sync; scores and weights stay in registers
  wgmma,          // both by wgmma; scores, weights and O stay in registers
};

// Who brings Q, K and V into shared memory.
enum class Loads : int32_t {
  threads,  // all of them, through registers or by cp.async
  tma,      // one thread, by tensor maps; mbarriers tell what has arrived
};

// What the two blocks of a cluster, neighbouring query tiles of a head, load of K and V for each other.
enum class Multicast : int32_t {
  none,
  first_tiles,  // what fills shared memory at the start
  all_tiles,    // then a block waits until the other is done with a tile too
};

constexpr int32_t kMaxSplits = 32;  // of the keys: a lane each of the warp that joins the parts of a row

// What makes a rung: a child differs from its parent in exactly the fields that experiments/ladder.toml declares.
struct Config {
  int32_t tile_m, tile_n;  // shared-memory tile, queries x keys; 0 x 0: no tile
  Grid grid;
  Reduction reduction;
  int32_t access_bytes;  // widest access to a tensor row; pointers and row strides must be multiples of it
  Swizzle swizzle;
  int32_t threads;
  Product product = Product::scalar;
  int32_t stages = 0;       // most K and V tiles in shared memory, filled by cp.async; 0: one, filled through registers
  int32_t key_warps = 1;    // warps of a block that share its rows and split the keys of a tile
  int32_t splits = 1;       // 0: small grids run smaller tiles, and blocks that share query rows split the keys
  bool mask_edges = false;  // compare with the visible keys only in tiles that some row does not see whole
  bool fold_scale = false;  // softmax scale and subtraction of the maximum in one FMA
  int32_t lazy_rescale =
      -1;  // O is rescaled when a maximum grew by more than this, in powers of two; -1: in every tile
  bool longest_first = false;      // query tiles with the most keys start first
  bool any_head_dim = false;       // head_dim: any multiple of 8 up to 128; else 64 and 128 alone
  bool pack_heads = false;         // one query row: the query heads of a KV head become the rows of one tile
  bool weights_in_shared = false;  // P goes through shared memory to P V; else it stays in registers
  bool half_scores = false;        // Q K^T is accumulated in fp16, for float16 alone
  Loads loads = Loads::threads;
  bool specialized = false;   // a warpgroup of its own issues the loads, and leaves its registers to the others
  bool ping_pong = false;     // warpgroups take turns on the tensor cores
  bool overlap = false;       // P V of a tile runs beside the softmax of the next
  bool stale_max = false;     // maxima are brought up to date only where the sums of weights ask for it
  bool persistent = false;    // a block an SM, which computes query tiles one after the other
  bool rest_first = false;    // a head's first query tile has the rows that fill none, in place of its last
  bool short_gap = false;     // between a tile's last exponential and the next products stands as little as can
  int32_t paced = 0;          // groups of 8 columns whose exponentials wait for those before; 0: none waits
  bool halves_last = false;   // without a mask, smaller query tiles come last
  bool tma_store = false;     // O leaves shared memory by TMA, while its warpgroup goes on
  bool quick_repair = false;  // maxima that are too old are found also where warpgroups share rows, and repaired faster
  bool first_look = false;  // the first look at whether maxima are too old comes after the first tile that trusts them
  bool balanced = false;    // under a causal mask, blocks with less work so far take the longer tiles
  bool early_combine = false;             // what joins the parts of split keys is launched before they are there
  Multicast multicast = Multicast::none;  // of the kernels whose warpgroups share rows; first_tiles: at head_dim 128
  bool short_epilogue = false;            // the store of a finished row has no branch and no division, where that pays
  bool early_launch = false;   // kernels start beside the end of the one ahead of them in the stream, and wait for that
  bool short_join = false;     // as short_epilogue, where warps of the portable kernels join their parts of O
  bool few_divisions = false;  // a block divides by a group of heads or by splits only where there are several of them
  bool last_joins = false;     // of warpgroups that share rows the one that gets the last tile of keys joins the parts
  bool early_item = false;     // a block with one query tile finds what to load while its barriers are initialised
  bool prescaled_q = false;    // Q is multiplied by the scale and rounded, in shared memory, instead of the scores
  bool sum_column = false;     // P V has a column of ones, which sums the weights: bf16 at head_dim 64 alone
  int32_t software_exp2 = 0;   // one of so many exponentials is a polynomial; 0: none
  int32_t key_groups = 1;  // warpgroups of a block that share its rows and split its keys; 0: by the size of the grid
  // Of the kernels for head_dim 128, where they differ: 0 and -1 stand for the fields above.
  int32_t tile_m_128 = 0, tile_n_128 = 0, stages_128 = 0, ping_pong_128 = -1;
};

constexpr Config at_head_dim(Config config, int head_dim) {
  if (head_dim <= 64) return config;
  if (config.tile_m_128 != 0) config.tile_m = config.tile_m_128;
  if (config.tile_n_128 != 0) config.tile_n = config.tile_n_128;
  if (config.stages_128 != 0) config.stages = config.stages_128;
  if (config.ping_pong_128 != -1) config.ping_pong = config.ping_pong_128 != 0;
  return config;
}

// Which of a rung's kernels computes a problem, where it has several.
enum class Tile : int32_t {
  large,   // the rung's own
  medium,  // 32 rows
  small,   // 16 rows
  m128,    // 128 and 64 rows, of a rung for Hopper
  m64,
};

// Whose blocks may split the keys of the same rows.
constexpr bool splits_keys(Tile tile) { return tile == Tile::medium || tile == Tile::small; }

// Enqueues the kernels on `stream` (a cudaStream_t of `device`); returns a cudaError_t.
using Launch = int (*)(const Params&, Dtype, Tile, int device, void* stream);

// A kernel that asks for shared memory at its launch.
struct DynamicShared {
  const char* kernel;
  int32_t bytes;
};

struct Rung {
  const char* id;
  Config config;
  Launch launch;
  const char* (*error_name)(int);
  // Chooses a kernel and Params::splits for a device of so many multiprocessors, and may lay the problem out anew.
  // Null: there is one kernel, and keys are not split.
  Tile (*plan)(Params&, int multiprocessors);
  int (*multiprocessors)(int device);
  const DynamicShared* dynamic_shared;
  int32_t dynamic_shared_count;
  Tile last_tile = Tile::large;  // of those that a plan may name
};

// Whether TMA can read such rows, or write them: it knows no step back, and no row twice.
constexpr bool tma_reads(const Strides& strides, int64_t rows) {
  return strides.batch >= 0 && strides.head >= 0 && (rows <= 1 || strides.row > 0);
}

// Head dimension of the kernel that computes `head_dim`: K, V and the parts of O are that wide inside it.
constexpr int32_t kernel_head_dim(int32_t head_dim) { return head_dim <= 64 ? 64 : 128; }

}  // namespace flashladder

// The one symbol of a rung's library.
extern "C" const flashladder::Rung* flashladder_rung();
