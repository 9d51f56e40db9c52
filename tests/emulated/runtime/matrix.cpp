// ldmatrix, stmatrix, mma.sync and wmma against plain matrix products.
#include "harness.h"

using namespace test;
using emu::Half;

namespace {

// A matrix of small values in shared memory, `stride` bytes a row.
void fill(uint64_t at, uint32_t rows, uint32_t columns, uint32_t stride, Half type, uint32_t salt) {
  for (uint32_t i = thread(); i < rows * columns; i += emu::block_dim.x)
    store<uint16_t>(at + i / columns * stride + i % columns * 2,
                    half_bits(small_value(i / columns + salt, i % columns), type), HERE);
}

uint32_t pair(float low, float high, Half type) {
  return half_bits(low, type) | static_cast<uint32_t>(half_bits(high, type)) << 16;
}

}  // namespace

TEST(ldmatrix_fragments) {
  for (bool transposed : {false, true})
    for (uint32_t count : {1u, 2u, 4u})
      EXPECT_CLEAN(Shape{.shared = 2048}, [&] {
        fill(smem(), 32, 8, 32, Half::fp16, 0);
        emu::sync_warp(0xffffffff, HERE);
        uint32_t r[4] = {};
        emu::ldmatrix(r, count, transposed, smem(32 * lane()), HERE);
        const uint32_t g = lane() / 4, q = lane() % 4 * 2;
        for (uint32_t m = 0; m < count; ++m)
          CHECK_EQUAL(r[m], transposed ? pair(small_value(8 * m + q, g), small_value(8 * m + q + 1, g), Half::fp16)
                                       : pair(small_value(8 * m + g, q), small_value(8 * m + g, q + 1), Half::fp16));
        for (uint32_t m = count; m < 4; ++m) CHECK_EQUAL(r[m], 0u);
      });
}

TEST(stmatrix_is_the_inverse_of_ldmatrix) {
  for (bool transposed : {false, true})
    EXPECT_CLEAN(Shape{.shared = 2048}, [&] {
      fill(smem(), 32, 8, 32, Half::fp16, 0);
      emu::sync_warp(0xffffffff, HERE);
      uint32_t r[4];
      emu::ldmatrix(r, 4, transposed, smem(32 * lane()), HERE);
      emu::stmatrix(r, 4, transposed, smem(1024 + 16 * lane()), HERE);
      emu::sync_warp(0xffffffff, HERE);
      for (uint32_t j = 0; j < 8; ++j)
        CHECK_EQUAL(load<uint16_t>(smem(1024 + 16 * lane() + 2 * j), HERE),
                    half_bits(small_value(lane(), j), Half::fp16));
    });
}

TEST(ldmatrix_checks_every_row) {
  CHECK_CONTAINS(run({},
                     [] {
                       uint32_t r[4];
                       emu::ldmatrix(r, 4, false, smem(lane() == 30 ? 1016 : 0), HERE);
                     })
                     .log,
                 "thread (30,0,0): ldmatrix: misaligned");
  CHECK_CONTAINS(run({},
                     [] {
                       uint32_t r[4];
                       emu::ldmatrix(r, 1, false, smem(lane() == 7 ? 1024 : 0), HERE);
                     })
                     .log,
                 "thread (7,0,0): ldmatrix: out-of-bounds");
}

// --- mma.sync ----------------------------------------------------------------------------------------------------

namespace {

float a_value(uint32_t i, uint32_t k) { return small_value(i, k); }
float b_value(uint32_t k, uint32_t j) { return small_value(k + 3, j); }
float c_value(uint32_t i, uint32_t j) { return small_value(i + 5, j); }

float expected(uint32_t i, uint32_t j, uint32_t k) {
  float sum = c_value(i, j);
  for (uint32_t x = 0; x < k; ++x) sum += a_value(i, x) * b_value(x, j);
  return sum;
}

void fragments(uint32_t k, Half type, uint32_t* a, uint32_t* b) {
  const uint32_t g = lane() / 4, q = lane() % 4 * 2;
  for (uint32_t part = 0; part < k / 8; ++part) {
    a[2 * part] = pair(a_value(g, 8 * part + q), a_value(g, 8 * part + q + 1), type);
    a[2 * part + 1] = pair(a_value(g + 8, 8 * part + q), a_value(g + 8, 8 * part + q + 1), type);
    b[part] = pair(b_value(8 * part + q, g), b_value(8 * part + q + 1, g), type);
  }
}

}  // namespace

TEST(mma_is_a_matrix_product) {
  for (const Half type : {Half::fp16, Half::bf16})
    for (const uint32_t k : {8u, 16u})
      EXPECT_CLEAN(Shape{}, [&] {
        uint32_t a[4], b[2];
        fragments(k, type, a, b);
        const uint32_t g = lane() / 4, q = lane() % 4 * 2;
        float d[4] = {c_value(g, q), c_value(g, q + 1), c_value(g + 8, q), c_value(g + 8, q + 1)};
        emu::mma_m16n8(d, a, b, d, k, type, HERE);
        for (uint32_t i = 0; i < 4; ++i) CHECK_EQUAL(d[i], expected(g + i / 2 * 8, q + i % 2, k));
      });
}

TEST(mma_with_fp16_accumulators) {
  for (const uint32_t k : {8u, 16u})
    EXPECT_CLEAN(Shape{}, [&] {
      uint32_t a[4], b[2];
      fragments(k, Half::fp16, a, b);
      const uint32_t g = lane() / 4, q = lane() % 4 * 2;
      uint32_t d[2] = {pair(c_value(g, q), c_value(g, q + 1), Half::fp16),
                       pair(c_value(g + 8, q), c_value(g + 8, q + 1), Half::fp16)};
      emu::mma_m16n8_fp16(d, a, b, d, k, HERE);
      for (uint32_t i = 0; i < 2; ++i)
        CHECK_EQUAL(d[i], pair(expected(g + 8 * i, q, k), expected(g + 8 * i, q + 1, k), Half::fp16));
    });
}

TEST(mma_is_counted) {
  const auto counters = run({.threads = 64}, [] {
                          uint32_t a[4] = {}, b[2] = {};
                          float d[4] = {};
                          for (int i = 0; i < 3; ++i) emu::mma_m16n8(d, a, b, d, 16, Half::fp16, HERE);
                        }).counters;
  CHECK_EQUAL(counters.mma, 6u);
}

// --- wmma --------------------------------------------------------------------------------------------------------

TEST(wmma_is_a_matrix_product) {
  for (const Half type : {Half::fp16, Half::bf16})
    for (int layout = 0; layout < 16; ++layout) {
      const bool a_row = layout & 1, b_row = layout & 2, d_row = layout & 4, in_global = layout & 8;
      Buffer memory(4096);
      EXPECT_CLEAN(Shape{.shared = 4096}, [&] {
        const auto halves = [&](uint32_t at, bool row, float (*value)(uint32_t, uint32_t)) {
          for (uint32_t n = lane(); n < 256; n += 32) {
            const uint32_t i = n / 16, j = n % 16, offset = at + (row ? i * 24 + j : j * 24 + i) * 2;
            const uint16_t x = half_bits(value(i, j), type);
            if (in_global)
              std::memcpy(memory.as<char>() + offset, &x, 2);
            else
              store<uint16_t>(smem(offset), x, HERE);
          }
        };
        halves(0, a_row, a_value);
        halves(1024, b_row, b_value);
        for (uint32_t n = lane(); n < 256; n += 32) {
          const float x = c_value(n / 16, n % 16);
          const uint32_t offset = 2048 + (d_row ? n / 16 * 20 + n % 16 : n % 16 * 20 + n / 16) * 4;
          if (in_global)
            std::memcpy(memory.as<char>() + offset, &x, 4);
          else
            store<float>(smem(offset), x, HERE);
        }
        emu::sync_warp(0xffffffff, HERE);
        const uint64_t base = in_global ? memory.address() : smem();
        uint32_t a[8], b[8];
        float c[8];
        emu::wmma_load(a, 'a', a_row, base, 24, !in_global, type, HERE);
        emu::wmma_load(b, 'b', b_row, base + 1024, 24, !in_global, type, HERE);
        emu::wmma_load_c(c, d_row, base + 2048, 20, !in_global, HERE);
        emu::wmma_mma(c, a, a_row, b, b_row, c, type, HERE);
        emu::sync_warp(0xffffffff, HERE);
        emu::wmma_store_d(c, d_row, base + 2048, 20, !in_global, HERE);
        emu::sync_warp(0xffffffff, HERE);
        for (uint32_t n = lane(); n < 256; n += 32) {
          const uint32_t i = n / 16, j = n % 16, offset = 2048 + (d_row ? i * 20 + j : j * 20 + i) * 4;
          float x;
          if (in_global)
            std::memcpy(&x, memory.as<char>() + offset, 4);
          else
            x = load<float>(smem(offset), HERE);
          CHECK_EQUAL(x, expected(i, j, 16));
        }
      });
    }
}

TEST(wmma_accesses_race) {
  const auto body = [](bool synchronised) {
    float d[8] = {};
    uint32_t a[8];
    emu::wmma_store_d(d, true, smem(), 16, true, HERE);
    if (synchronised) emu::sync_warp(0xffffffff, HERE);
    emu::wmma_load(a, 'a', true, smem(), 32, true, Half::fp16, HERE);
  };
  EXPECT_CLEAN(Shape{.shared = 1024}, [&] { body(true); });
  EXPECT_FINDING(Shape{.shared = 1024}, [&] { body(false); }, "race: ");
}

TEST(wmma_needs_alignment) {
  CHECK_CONTAINS(run({},
                     [] {
                       uint32_t r[8];
                       emu::wmma_load(r, 'a', true, smem(16), 16, true, Half::fp16, HERE);
                     })
                     .log,
                 "wmma.load.a: the matrix is not 32-byte aligned");
}
