// Turns a rung's launcher into a Python callable. Linked into every rung's library; validates once, launches on the
// caller's current stream. Takes any DLPack tensor; raises before anything is enqueued. With FLASHLADDER_EMULATED the
// library runs its kernels on the CPU: tensors lie in host memory, and bfloat16 may come as uint16, which numpy has.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "rung.h"

#ifdef FLASHLADDER_EMULATED
extern "C" int cudaMalloc(void**, size_t);  // the emulator's
extern "C" int cudaFree(void*);
#endif

namespace {

namespace ffi = tvm::ffi;
using flashladder::Config;
using flashladder::Dtype;
using flashladder::kernel_head_dim;
using flashladder::Params;
using flashladder::Strides;
using flashladder::Tile;

#ifdef FLASHLADDER_EMULATED
constexpr DLDeviceType kDevice = kDLCPU;
constexpr const char* kWrongDevice = "q is not in host memory, expected a CPU tensor: this library is emulated";
#else
constexpr DLDeviceType kDevice = kDLCUDA;
constexpr const char* kWrongDevice = "q is not in GPU memory, expected a CUDA tensor; call .cuda() on it";
#endif
constexpr bool kEmulated = kDevice == kDLCPU;
constexpr int kMaxGridYZ = 65535;
constexpr int64_t kMaxSeq = int64_t{1} << 30;

std::string dtype_name(DLDataType t) {
  const char* kind = t.code == kDLFloat ? "float" : t.code == kDLBfloat ? "bfloat" : t.code == kDLInt ? "int" : "type";
  return kind + std::to_string(t.bits);
}

bool is_16bit_float(DLDataType t) {
  const bool is_float = t.code == kDLFloat || t.code == kDLBfloat || (kEmulated && t.code == kDLUInt);
  return is_float && t.bits == 16 && t.lanes == 1;
}

struct Shape {
  int64_t batch, heads, rows, head_dim;
};

char* address_of(ffi::TensorView x) { return static_cast<char*>(x.data_ptr()) + x.byte_offset(); }

// A size-1 axis never moves, so its stride is free: 0 keeps the alignment check honest.
int64_t stride_of(ffi::TensorView x, int axis) { return x.size(axis) == 1 ? 0 : x.stride(axis); }

Strides strides_of(ffi::TensorView x) { return {stride_of(x, 0), stride_of(x, 1), stride_of(x, 2)}; }

void check_matrix(const char* name, ffi::TensorView x, Shape expected, DLDataType dtype, DLDevice device,
                  int access_bytes) {
  if (x.dtype() != dtype)
    TVM_FFI_THROW(TypeError) << name << " is " << dtype_name(x.dtype()) << ", expected " << dtype_name(dtype)
                             << " like q";
  if (x.device().device_type != device.device_type || x.device().device_id != device.device_id)
    TVM_FFI_THROW(ValueError) << name << " is on another device than q; move all tensors to one device";
  if (x.ndim() != 4)
    TVM_FFI_THROW(ValueError) << name << " has " << x.ndim()
                              << " dimensions, expected 4: (batch, heads, seq, head_dim)";
  const Shape shape{x.size(0), x.size(1), x.size(2), x.size(3)};
  if (shape.batch != expected.batch || shape.heads != expected.heads || shape.rows != expected.rows ||
      shape.head_dim != expected.head_dim)
    TVM_FFI_THROW(ValueError) << name << " has shape (" << shape.batch << ", " << shape.heads << ", " << shape.rows
                              << ", " << shape.head_dim << "), expected (" << expected.batch << ", " << expected.heads
                              << ", " << expected.rows << ", " << expected.head_dim << ")";
  if (shape.batch == 0 || shape.heads == 0 || shape.rows == 0) return;
  if (x.stride(3) != 1)
    TVM_FFI_THROW(ValueError) << name << " has stride " << x.stride(3)
                              << " along head_dim, expected 1; call .contiguous() on it";
  const uintptr_t address = reinterpret_cast<uintptr_t>(address_of(x));
  const int64_t step = (stride_of(x, 0) | stride_of(x, 1) | stride_of(x, 2)) * 2;
  if (address % access_bytes != 0 || step % access_bytes != 0)
    TVM_FFI_THROW(ValueError) << name << " starts or steps at addresses that are not multiples of " << access_bytes
                              << " bytes, which this rung's accesses need; call .clone() or .contiguous() on it";
}

void check_tma(const char* name, ffi::TensorView x) {
  if (!flashladder::tma_reads(strides_of(x), x.size(2)))
    TVM_FFI_THROW(ValueError) << name << " has strides (" << x.stride(0) << ", " << x.stride(1) << ", " << x.stride(2)
                              << ", 1), expected none below 0 and at least 1 along seq, for TMA; call "
                                 ".contiguous() on it";
}

void check_lse(ffi::TensorView lse, Shape q, DLDevice device) {
  if (lse.dtype().code != kDLFloat || lse.dtype().bits != 32)
    TVM_FFI_THROW(TypeError) << "lse is " << dtype_name(lse.dtype()) << ", expected float32";
  if (lse.device().device_type != device.device_type || lse.device().device_id != device.device_id)
    TVM_FFI_THROW(ValueError) << "lse is on another device than q; move all tensors to one device";
  if (lse.ndim() != 3 || lse.size(0) != q.batch || lse.size(1) != q.heads || lse.size(2) != q.rows)
    TVM_FFI_THROW(ValueError) << "lse does not have shape (" << q.batch << ", " << q.heads << ", " << q.rows
                              << "): (batch, heads, seq)";
}

// Device memory that a call writes for itself, of the caller's allocator and so in the order of its stream.
#ifdef FLASHLADDER_EMULATED
struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
using Room = std::unique_ptr<void, Free>;
Room allocate_floats(int64_t count, DLDevice) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(count) * sizeof(float)) != 0)
    TVM_FFI_THROW(RuntimeError) << "no memory for " << count << " floats";
  return Room(memory);
}
float* data_of(Room& room) { return static_cast<float*>(room.get()); }
bool can_allocate() { return true; }
float* unread_lse(int64_t, DLDevice) { return nullptr; }
#else
using Room = ffi::Optional<ffi::Tensor>;
Room allocate_floats(int64_t count, DLDevice device) {
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::Shape{count}, {kDLFloat, 32, 1}, device);
}
float* data_of(Room& room) { return static_cast<float*>(room.value().data_ptr()); }
bool can_allocate() { return TVMFFIEnvGetDLPackManagedTensorAllocator() != nullptr; }

// Where a device's calls write an LSE that nobody reads, without an allocation in each. Calls of all streams share it,
// and it is never freed, as captured calls write there when they are replayed. Null: for so many rows there is none.
float* unread_lse(int64_t rows, DLDevice device) {
  constexpr int64_t kRows = 1 << 16;
  constexpr int kDevices = 64;
  static std::atomic<float*> kept[kDevices];
  if (rows > kRows || device.device_id >= kDevices) return nullptr;
  std::atomic<float*>& place = kept[device.device_id];
  if (float* const found = place.load()) return found;
  auto* const room = new Room(allocate_floats(kRows, device));
  float* expected = nullptr;
  if (place.compare_exchange_strong(expected, data_of(*room))) return data_of(*room);
  delete room;
  return expected;
}
#endif

// Room for the parts of split keys and for an LSE that the caller gives none for: kernels always write it.
Room make_room(Params& p, DLDevice device) {
  const int64_t rows = int64_t{p.batch} * p.heads_q * p.seq_q, head_dim = kernel_head_dim(p.head_dim);
  if (p.lse == nullptr) p.lse = unread_lse(rows, device);
  const int64_t part_rows = p.splits == 1 ? 0 : p.splits * rows, lse_rows = p.lse == nullptr ? rows : 0;
  if (part_rows + lse_rows == 0) return {};
  Room room = allocate_floats(part_rows * (head_dim + 1) + lse_rows, device);
  float* const floats = data_of(room);
  if (part_rows != 0) {
    p.part_o = floats;
    p.part_lse = floats + part_rows * head_dim;
  }
  if (lse_rows != 0) p.lse = floats + part_rows * (head_dim + 1);
  return room;
}

// A choice in place of the rung's own.
struct Forced {
  int64_t tile, splits;
};

// Without an allocator (tensors that are not PyTorch's) keys are not split.
Tile choose(const flashladder::Rung& rung, Params& p, int device, const Forced* forced) {
  if (rung.plan == nullptr) {
    if (forced != nullptr)
      TVM_FFI_THROW(ValueError) << rung.id << " has one kernel and splits no keys, expected a rung that plans";
    return Tile::large;
  }
  Tile tile = rung.plan(p, rung.multiprocessors(device));
  if (forced != nullptr) {
    const auto last = static_cast<int64_t>(rung.last_tile);
    tile = static_cast<Tile>(forced->tile);
    if (forced->tile < 0 || forced->tile > last || forced->splits < 1 || forced->splits > flashladder::kMaxSplits ||
        (!flashladder::splits_keys(tile) && forced->splits != 1))
      TVM_FFI_THROW(ValueError) << "tile " << forced->tile << " with " << forced->splits << " splits, expected 0 to "
                                << last << " with 1, or 1 or 2 with up to " << flashladder::kMaxSplits;
    p.splits = static_cast<int32_t>(forced->splits);
  }
  if (!can_allocate()) p.splits = 1;
  return tile;
}

using MaybeLse = ffi::Optional<ffi::TensorView>;

// `scale` none: 1 / sqrt(head_dim).
void run(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView o, const MaybeLse& lse,
         ffi::Optional<double> scale, bool causal, const Forced* forced) {
  const flashladder::Rung& rung = *flashladder_rung();
  const DLDevice device = q.device();
  if (device.device_type != kDevice) TVM_FFI_THROW(ValueError) << kWrongDevice;
  if (!is_16bit_float(q.dtype()))
    TVM_FFI_THROW(TypeError) << "q is " << dtype_name(q.dtype()) << ", expected float16 or bfloat16";
  const Dtype dtype = q.dtype().code == kDLFloat ? Dtype::fp16 : Dtype::bf16;
  if (rung.config.half_scores && dtype != Dtype::fp16)
    TVM_FFI_THROW(TypeError) << "q is bfloat16, expected float16: this rung adds up scores in fp16, whose range is "
                                "smaller than bfloat16's";
  if (q.ndim() != 4 || k.ndim() != 4)
    TVM_FFI_THROW(ValueError) << "q and k have " << q.ndim() << " and " << k.ndim()
                              << " dimensions, expected 4: (batch, heads, seq, head_dim)";
  const Shape q_shape{q.size(0), q.size(1), q.size(2), q.size(3)};
  const Shape kv_shape{q_shape.batch, k.size(1), k.size(2), q_shape.head_dim};
  const int64_t d = q_shape.head_dim;
  if (rung.config.any_head_dim ? d < 8 || d > 128 || d % 8 != 0 : d != 64 && d != 128)
    TVM_FFI_THROW(ValueError) << "head_dim is " << d << ", expected "
                              << (rung.config.any_head_dim ? "a multiple of 8 up to 128" : "64 or 128");
  if (q_shape.heads > 0 && (kv_shape.heads == 0 || q_shape.heads % kv_shape.heads != 0))
    TVM_FFI_THROW(ValueError) << "q has " << q_shape.heads << " heads and k has " << kv_shape.heads
                              << ", expected a multiple of k's";
  if (q_shape.heads > kMaxGridYZ || q_shape.rows > kMaxSeq || kv_shape.rows > kMaxSeq || q_shape.batch > kMaxSeq)
    TVM_FFI_THROW(ValueError) << "the problem is too large: expected at most " << kMaxGridYZ << " heads and " << kMaxSeq
                              << " rows and batches";
  const int bytes = rung.config.access_bytes;
  check_matrix("q", q, q_shape, q.dtype(), device, bytes);
  check_matrix("k", k, kv_shape, q.dtype(), device, bytes);
  check_matrix("v", v, kv_shape, q.dtype(), device, bytes);
  check_matrix("o", o, q_shape, q.dtype(), device, bytes);
  if (lse.has_value()) check_lse(*lse, q_shape, device);
  const double factor = scale.has_value() ? *scale : 1 / std::sqrt(static_cast<double>(d));
  if (!std::isfinite(factor)) TVM_FFI_THROW(ValueError) << "scale is " << factor << ", expected a finite number";
  if (q_shape.batch == 0 || q_shape.heads == 0 || q_shape.rows == 0) return;

  constexpr double kLog2E = 1.4426950408889634;
  Params params{
      .q = address_of(q),
      .k = address_of(k),
      .v = address_of(v),
      .o = address_of(o),
      .lse = lse.has_value() ? reinterpret_cast<float*>(address_of(*lse)) : nullptr,
      .q_strides = strides_of(q),
      .k_strides = strides_of(k),
      .v_strides = strides_of(v),
      .o_strides = strides_of(o),
      .lse_strides = lse.has_value() ? strides_of(*lse) : Strides{q_shape.heads * q_shape.rows, q_shape.rows, 1},
      .batch = static_cast<int32_t>(q_shape.batch),
      .heads_q = static_cast<int32_t>(q_shape.heads),
      .heads_kv = static_cast<int32_t>(kv_shape.heads),
      .seq_q = static_cast<int32_t>(q_shape.rows),
      .seq_k = static_cast<int32_t>(kv_shape.rows),
      .scale_log2 = static_cast<float>(factor * kLog2E),
      .causal = causal,
      .splits = 1,
      .head_dim = static_cast<int32_t>(q_shape.head_dim),
      .part_o = nullptr,
      .part_lse = nullptr,
  };
  const Tile tile = choose(rung, params, device.device_id, forced);
  if (rung.config.loads == flashladder::Loads::tma && !flashladder::splits_keys(tile)) {
    check_tma("q", q);
    check_tma("k", k);
    check_tma("v", v);
    if (rung.config.tma_store) check_tma("o", o);
  }
  const Room room = make_room(params, device);
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  if (const int error = rung.launch(params, dtype, tile, device.device_id, stream))
    TVM_FFI_THROW(RuntimeError) << rung.id << ": launch failed: " << rung.error_name(error);
}

void forward(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView o, ffi::TensorView lse,
             double scale, bool causal) {
  run(q, k, v, o, lse, scale, causal, nullptr);
}

// forward() for callers that may leave out the LSE and the scale.
void attention(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView o, MaybeLse lse,
               ffi::Optional<double> scale, bool causal) {
  run(q, k, v, o, lse, scale, causal, nullptr);
}

// forward() by the kernel and number of splits that the caller names.
void forward_planned(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v, ffi::TensorView o, ffi::TensorView lse,
                     double scale, bool causal, int64_t tile, int64_t splits) {
  const Forced forced{tile, splits};
  run(q, k, v, o, lse, scale, causal, &forced);
}

// The rung's own choice, "tile splits", for contiguous tensors on a device of so many multiprocessors; "" when it has
// none.
ffi::String plan(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seq_q, int64_t seq_k, int64_t head_dim,
                 bool causal, int64_t multiprocessors) {
  const flashladder::Rung& rung = *flashladder_rung();
  if (rung.plan == nullptr) return "";
  Params p{};
  p.batch = static_cast<int32_t>(batch);
  p.heads_q = static_cast<int32_t>(heads_q);
  p.heads_kv = static_cast<int32_t>(heads_kv);
  p.seq_q = static_cast<int32_t>(seq_q);
  p.seq_k = static_cast<int32_t>(seq_k);
  p.head_dim = static_cast<int32_t>(head_dim);
  p.causal = causal;
  p.q_strides = p.o_strides = {heads_q * seq_q * head_dim, seq_q * head_dim, head_dim};
  p.k_strides = p.v_strides = {heads_kv * seq_k * head_dim, seq_k * head_dim, head_dim};
  const int tile = static_cast<int>(rung.plan(p, static_cast<int>(multiprocessors)));
  return std::to_string(tile) + " " + std::to_string(p.splits);
}

ffi::String config() {
  const Config& c = flashladder_rung()->config;
  const std::pair<const char*, int> fields[] = {
      {"tile_m", c.tile_m},
      {"tile_n", c.tile_n},
      {"grid", static_cast<int>(c.grid)},
      {"reduction", static_cast<int>(c.reduction)},
      {"access_bytes", c.access_bytes},
      {"swizzle", static_cast<int>(c.swizzle)},
      {"threads", c.threads},
      {"product", static_cast<int>(c.product)},
      {"stages", c.stages},
      {"key_warps", c.key_warps},
      {"splits", c.splits},
      {"mask_edges", c.mask_edges},
      {"fold_scale", c.fold_scale},
      {"lazy_rescale", c.lazy_rescale},
      {"longest_first", c.longest_first},
      {"any_head_dim", c.any_head_dim},
      {"pack_heads", c.pack_heads},
      {"weights_in_shared", c.weights_in_shared},
      {"half_scores", c.half_scores},
      {"loads", static_cast<int>(c.loads)},
      {"specialized", c.specialized},
      {"ping_pong", c.ping_pong},
      {"overlap", c.overlap},
      {"stale_max", c.stale_max},
      {"persistent", c.persistent},
      {"rest_first", c.rest_first},
      {"short_gap", c.short_gap},
      {"paced", c.paced},
      {"halves_last", c.halves_last},
      {"tma_store", c.tma_store},
      {"quick_repair", c.quick_repair},
      {"first_look", c.first_look},
      {"balanced", c.balanced},
      {"early_combine", c.early_combine},
      {"multicast", static_cast<int>(c.multicast)},
      {"short_epilogue", c.short_epilogue},
      {"early_item", c.early_item},
      {"early_launch", c.early_launch},
      {"short_join", c.short_join},
      {"few_divisions", c.few_divisions},
      {"last_joins", c.last_joins},
      {"prescaled_q", c.prescaled_q},
      {"sum_column", c.sum_column},
      {"software_exp2", c.software_exp2},
      {"key_groups", c.key_groups},
      {"tile_m_128", c.tile_m_128},
      {"tile_n_128", c.tile_n_128},
      {"stages_128", c.stages_128},
      {"ping_pong_128", c.ping_pong_128},
  };
  std::ostringstream json;
  for (const auto& [name, value] : fields)
    json << (name == fields[0].first ? "{" : ",") << '"' << name << "\":" << value;
  json << "}";
  return json.str();
}

// Bytes of shared memory that kernels ask for at their launch, by name.
ffi::String dynamic_shared() {
  const flashladder::Rung& rung = *flashladder_rung();
  std::ostringstream json;
  json << "{";
  for (int i = 0; i < rung.dynamic_shared_count; ++i)
    json << (i ? "," : "") << '"' << rung.dynamic_shared[i].kernel << "\":" << rung.dynamic_shared[i].bytes;
  json << "}";
  return json.str();
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention, attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward_planned, forward_planned);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(config, config);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dynamic_shared, dynamic_shared);
