// ldmatrix, stmatrix, mma.sync and wmma.
#include <cstring>

#include "state.h"

namespace emu {
namespace {

uint16_t low_half(uint32_t x) { return static_cast<uint16_t>(x); }
uint16_t high_half(uint32_t x) { return static_cast<uint16_t>(x >> 16); }
uint32_t pack(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

// --- ldmatrix, stmatrix ------------------------------------------------------------------------------------------

struct MatrixArgument {
  uint32_t* r;
  unsigned char* row;  // of the lanes that give one
  uint32_t address, count;
  bool transposed;
};

MatrixArgument& matrix_of(void* argument) { return *static_cast<MatrixArgument*>(argument); }

MatrixArgument matrix_argument(uint32_t* r, uint32_t count, bool transposed, uint64_t address, bool write,
                               const char* what, Loc loc) {
  MatrixArgument a{r, nullptr, static_cast<uint32_t>(address), count, transposed};
  if (current->lane >= 8 * count) return a;
  a.row = shared_pointer(address, 16, 16, what, loc);
  if (options.races)
    race::access(me(), address, 16, write ? race::Kind::write : race::Kind::read, race::site(loc, what, 16));
  return a;
}

void count_conflicts(void* const* arguments, uint32_t count) {
  for (uint32_t matrix = 0; matrix < count; ++matrix) {
    uint32_t address[8];
    for (uint32_t i = 0; i < 8; ++i) address[i] = matrix_of(arguments[matrix * 8 + i]).address;
    counters.bank_conflicts += banks::extra_wavefronts(address, 8, 16);
  }
}

uint16_t* element(void* const* arguments, uint32_t matrix, uint32_t row, uint32_t column) {
  return reinterpret_cast<uint16_t*>(matrix_of(arguments[matrix * 8 + row]).row) + column;
}

void load_matrices(void* const* arguments, uint32_t, WarpState&) {
  const uint32_t count = matrix_of(arguments[0]).count;
  const bool transposed = matrix_of(arguments[0]).transposed;
  ++counters.ldmatrix;
  count_conflicts(arguments, count);
  for (uint32_t matrix = 0; matrix < count; ++matrix)
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t g = lane / 4, q = lane % 4 * 2;
      matrix_of(arguments[lane]).r[matrix] =
          transposed ? pack(*element(arguments, matrix, q, g), *element(arguments, matrix, q + 1, g))
                     : pack(*element(arguments, matrix, g, q), *element(arguments, matrix, g, q + 1));
    }
}

void store_matrices(void* const* arguments, uint32_t, WarpState&) {
  const uint32_t count = matrix_of(arguments[0]).count;
  const bool transposed = matrix_of(arguments[0]).transposed;
  count_conflicts(arguments, count);
  for (uint32_t matrix = 0; matrix < count; ++matrix)
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t g = lane / 4, q = lane % 4 * 2, x = matrix_of(arguments[lane]).r[matrix];
      *(transposed ? element(arguments, matrix, q, g) : element(arguments, matrix, g, q)) = low_half(x);
      *(transposed ? element(arguments, matrix, q + 1, g) : element(arguments, matrix, g, q + 1)) = high_half(x);
    }
}

void check_count(uint32_t count, const char* what, Loc loc) {
  if (count != 1 && count != 2 && count != 4) fail(loc, "%s: x%u", what, count);
}

}  // namespace

void ldmatrix(uint32_t* r, uint32_t count, bool transposed, uint64_t address, Loc loc) {
  check_count(count, "ldmatrix", loc);
  MatrixArgument a = matrix_argument(r, count, transposed, address, false, "ldmatrix", loc);
  aligned_collective(code(Op::ldmatrix, count * 2 + transposed), "ldmatrix", &a, load_matrices, loc);
}

void stmatrix(const uint32_t* r, uint32_t count, bool transposed, uint64_t address, Loc loc) {
  check_count(count, "stmatrix", loc);
  MatrixArgument a = matrix_argument(const_cast<uint32_t*>(r), count, transposed, address, true, "stmatrix", loc);
  aligned_collective(code(Op::stmatrix, count * 2 + transposed), "stmatrix", &a, store_matrices, loc);
}

// --- mma.sync ----------------------------------------------------------------------------------------------------

namespace {

struct MmaArgument {
  float d[4];
  const uint32_t *a, *b;
};

MmaArgument& mma_of(void* argument) { return *static_cast<MmaArgument*>(argument); }

// a0: (g, q), a1: (g + 8, q), and for k = 16 a2: (g, q + 8), a3: (g + 8, q + 8); b likewise; d: (g, q), (g + 8, q).
template <Half type, uint32_t k>
void multiply(void* const* arguments, uint32_t, WarpState&) {
  float a[16][k], b[k][8], c[16][8];
  ++counters.mma;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const MmaArgument& m = mma_of(arguments[lane]);
    const uint32_t g = lane / 4, q = lane % 4 * 2;
    for (uint32_t h = 0; h < 2; ++h) {
      const auto half = [&](uint32_t x) { return to_float(h ? high_half(x) : low_half(x), type); };
      for (uint32_t part = 0; part < k / 8; ++part) {
        a[g][part * 8 + q + h] = half(m.a[2 * part]);
        a[g + 8][part * 8 + q + h] = half(m.a[2 * part + 1]);
        b[part * 8 + q + h][g] = half(m.b[part]);
      }
      c[g][q + h] = m.d[h];
      c[g + 8][q + h] = m.d[2 + h];
    }
  }
  for (uint32_t i = 0; i < 16; ++i)
    for (uint32_t x = 0; x < k; ++x)
      for (uint32_t j = 0; j < 8; ++j) c[i][j] += a[i][x] * b[x][j];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    MmaArgument& m = mma_of(arguments[lane]);
    const uint32_t g = lane / 4, q = lane % 4 * 2;
    for (uint32_t h = 0; h < 2; ++h) {
      m.d[h] = c[g][q + h];
      m.d[2 + h] = c[g + 8][q + h];
    }
  }
}

void mma(MmaArgument& m, uint32_t k, Half type, Loc loc) {
  if (k != 8 && k != 16) fail(loc, "mma.sync: m16n8k%u is not modelled", k);
  const bool fp16 = type == Half::fp16;
  const Complete complete = k == 16 ? (fp16 ? multiply<Half::fp16, 16> : multiply<Half::bf16, 16>)
                                    : (fp16 ? multiply<Half::fp16, 8> : multiply<Half::bf16, 8>);
  aligned_collective(code(Op::mma, k * 2 + fp16), "mma.sync", &m, complete, loc);
}

}  // namespace

void mma_m16n8(float* d, const uint32_t* a, const uint32_t* b, const float* c, uint32_t k, Half type, Loc loc) {
  MmaArgument m{{c[0], c[1], c[2], c[3]}, a, b};
  mma(m, k, type, loc);
  std::memcpy(d, m.d, sizeof m.d);
}

void mma_m16n8_fp16(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t k, Loc loc) {
  MmaArgument m{{}, a, b};
  for (uint32_t i = 0; i < 4; ++i) m.d[i] = fp16_table[i & 1 ? high_half(c[i / 2]) : low_half(c[i / 2])];
  mma(m, k, Half::fp16, loc);
  for (uint32_t i = 0; i < 2; ++i) d[i] = pack(to_fp16(m.d[2 * i]), to_fp16(m.d[2 * i + 1]));
}

// --- wmma --------------------------------------------------------------------------------------------------------
// The fragment map is like none of the hardware's, so that no kernel comes to depend on one: lane l holds eight
// consecutive columns of row l % 16, the first eight columns in lanes 0-15. An fp16 fragment has every element twice.
// Bank conflicts are not counted: they are those of the hardware's map.

namespace {

constexpr uint32_t row_of(uint32_t lane) { return lane % 16; }
constexpr uint32_t column_of(uint32_t lane) { return lane / 16 * 8; }

struct WmmaArgument {
  unsigned char* memory[2];  // the 16-byte pieces that this lane accesses: 8 halves or 2 x 4 floats
  uint32_t* r;
  bool row_major;
  uint32_t element_bytes, copies;
};

WmmaArgument& wmma_of(void* argument) { return *static_cast<WmmaArgument*>(argument); }

// Each lane accesses eight consecutive elements of one row (or column) in memory: accumulators those of its own number,
// operands those of another lane. So a store of one that a load of the other reads needs a __syncwarp() between them.
constexpr uint32_t accessed_by(uint32_t lane, uint32_t element_bytes) { return element_bytes == 2 ? lane ^ 8 : lane; }

WmmaArgument wmma_argument(uint32_t* r, bool row_major, uint64_t address, uint32_t stride, bool is_shared,
                           uint32_t element_bytes, bool write, const char* what, Loc loc) {
  if (address % 32) fail(loc, "%s: the matrix is not 32-byte aligned", what);
  if (stride * element_bytes % 16) fail(loc, "%s: a stride of %u elements is no multiple of 16 bytes", what, stride);
  WmmaArgument a{{}, r, row_major, element_bytes, 1};
  if (const uint64_t offset = address - reinterpret_cast<uint64_t>(window.base); !is_shared && offset < kWindowBytes) {
    is_shared = true;
    address = offset;
  }
  const uint32_t lane = accessed_by(current->lane, element_bytes);
  const uint64_t start = address + (static_cast<uint64_t>(row_of(lane)) * stride + column_of(lane)) * element_bytes;
  for (uint32_t piece = 0; piece < element_bytes / 2; ++piece) {
    void* p = is_shared ? shared_without_banks(start + piece * 16, 16, 16, write, what, loc)
                        : generic(start + piece * 16, 16, 16, write, what, loc);
    a.memory[piece] = static_cast<unsigned char*>(p);
  }
  return a;
}

// Where the element (i, j) lies in memory.
unsigned char* memory_of(void* const* arguments, uint32_t i, uint32_t j) {
  const WmmaArgument& first = wmma_of(arguments[0]);
  const uint32_t line = first.row_major ? i : j, along = first.row_major ? j : i;
  const WmmaArgument& a = wmma_of(arguments[accessed_by(line + along / 8 * 16, first.element_bytes)]);
  const uint32_t offset = along % 8 * a.element_bytes;
  return a.memory[offset / 16] + offset % 16;
}

template <class F>
void for_fragment(F f) {
  for (uint32_t lane = 0; lane < 32; ++lane)
    for (uint32_t e = 0; e < 8; ++e) f(lane, e, row_of(lane), column_of(lane) + e);
}

void load_halves(void* const* arguments, uint32_t, WarpState&) {
  for_fragment([&](uint32_t lane, uint32_t e, uint32_t i, uint32_t j) {
    uint16_t x;
    std::memcpy(&x, memory_of(arguments, i, j), 2);
    const WmmaArgument& a = wmma_of(arguments[lane]);
    for (uint32_t copy = 0; copy < a.copies; ++copy) {
      uint32_t& r = a.r[copy * 4 + e / 2];
      r = e & 1 ? pack(low_half(r), x) : pack(x, high_half(r));
    }
  });
}

void load_floats(void* const* arguments, uint32_t, WarpState&) {
  for_fragment([&](uint32_t lane, uint32_t e, uint32_t i, uint32_t j) {
    std::memcpy(&wmma_of(arguments[lane]).r[e], memory_of(arguments, i, j), 4);
  });
}

void store_floats(void* const* arguments, uint32_t, WarpState&) {
  for_fragment([&](uint32_t lane, uint32_t e, uint32_t i, uint32_t j) {
    std::memcpy(memory_of(arguments, i, j), &wmma_of(arguments[lane]).r[e], 4);
  });
}

struct WmmaMultiply {
  float* d;
  const uint32_t *a, *b;
  const float* c;
};

template <Half type>
void wmma_multiply(void* const* arguments, uint32_t, WarpState&) {
  float a[16][16], b[16][16], c[16][16];
  ++counters.mma;
  for_fragment([&](uint32_t lane, uint32_t e, uint32_t i, uint32_t j) {
    const auto& m = *static_cast<WmmaMultiply*>(arguments[lane]);
    const auto half = [&](uint32_t x) { return to_float(e & 1 ? high_half(x) : low_half(x), type); };
    a[i][j] = half(m.a[e / 2]);
    b[i][j] = half(m.b[e / 2]);
    c[i][j] = m.c[e];
  });
  for (uint32_t i = 0; i < 16; ++i)
    for (uint32_t k = 0; k < 16; ++k)
      for (uint32_t j = 0; j < 16; ++j) c[i][j] += a[i][k] * b[k][j];
  for_fragment([&](uint32_t lane, uint32_t e, uint32_t i, uint32_t j) {
    static_cast<WmmaMultiply*>(arguments[lane])->d[e] = c[i][j];
  });
}

}  // namespace

void wmma_load(uint32_t* r, char operand, bool row_major, uint64_t address, uint32_t stride, bool is_shared, Half type,
               Loc loc) {
  const char* what = operand == 'a' ? "wmma.load.a" : "wmma.load.b";
  WmmaArgument a = wmma_argument(r, row_major, address, stride, is_shared, 2, false, what, loc);
  a.copies = type == Half::fp16 ? 2 : 1;
  aligned_collective(code(Op::wmma_load, static_cast<uint32_t>(operand) * 2 + row_major), what, &a, load_halves, loc);
}

void wmma_load_c(float* r, bool row_major, uint64_t address, uint32_t stride, bool is_shared, Loc loc) {
  uint32_t bits[8];
  WmmaArgument a = wmma_argument(bits, row_major, address, stride, is_shared, 4, false, "wmma.load.c", loc);
  aligned_collective(code(Op::wmma_load, 'c' * 2 + row_major), "wmma.load.c", &a, load_floats, loc);
  std::memcpy(r, bits, sizeof bits);
}

void wmma_mma(float* d, const uint32_t* a, bool, const uint32_t* b, bool, const float* c, Half type, Loc loc) {
  WmmaMultiply m{d, a, b, c};
  const bool fp16 = type == Half::fp16;
  aligned_collective(code(Op::wmma_mma, fp16), "wmma.mma", &m,
                     fp16 ? wmma_multiply<Half::fp16> : wmma_multiply<Half::bf16>, loc);
}

void wmma_store_d(const float* r, bool row_major, uint64_t address, uint32_t stride, bool is_shared, Loc loc) {
  uint32_t bits[8];
  std::memcpy(bits, r, sizeof bits);
  WmmaArgument a = wmma_argument(bits, row_major, address, stride, is_shared, 4, true, "wmma.store.d", loc);
  aligned_collective(code(Op::wmma_store, row_major), "wmma.store.d", &a, store_floats, loc);
}

}  // namespace emu
