// 16-bit floats.
#include <cmath>

#include "state.h"

namespace emu {
namespace {

float fp16_value(uint32_t h) {
  const uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000u | fraction << 13);
  if (exponent) return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

struct Table {
  float value[65536];
  Table() {
    for (uint32_t h = 0; h < 65536; ++h) value[h] = fp16_value(h);
  }
};
const Table table;

}  // namespace

const float* const fp16_table = table.value;

uint16_t to_fp16(float f) {
  const auto bits = __builtin_bit_cast(uint32_t, f);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(std::fabs(f) * 0x1p24f)));
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

uint16_t to_bf16(float f) {
  const auto bits = __builtin_bit_cast(uint32_t, f);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emu
