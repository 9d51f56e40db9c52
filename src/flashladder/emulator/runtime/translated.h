// What the C++ that translate.py writes is made of: PTX's types, memory of one thread, rounding, bit operations.
// Compile with -ffp-contract=off, and without -ffast-math: every operation rounds as its instruction says.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "emulator.h"

namespace emu::translated {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using u128 = unsigned __int128;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using s128 = __int128;
using f32 = float;
using f64 = double;

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
template <class T>
struct Two {
  T low, high;
};
using f16x2 = Two<f16>;
using bf16x2 = Two<bf16>;

// The same bits as another type.
template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
inline T load(const void* p, u32 index = 0) {
  T value;
  std::memcpy(&value, static_cast<const char*>(p) + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
inline void store(void* p, T value, u32 index = 0) {
  std::memcpy(static_cast<char*>(p) + index * sizeof(T), &value, sizeof(T));
}

// --- memory of one thread ----------------------------------------------------------------------------------------

enum class Space { param, local };

// A parameter or local variable of the running function or of one of its callers.
struct Window {
  u64 begin, bytes;
  Space space;
  const Window* next;

  bool holds(u64 address, u32 size) const { return address - begin <= bytes && bytes - (address - begin) >= size; }
};

inline void poison(void* local, size_t bytes) {
  if (options.poison) std::memset(local, 0xff, bytes);
}

inline void* window_pointer(const Window* window, u64 address, u32 align, bool write, const char* what, Loc loc) {
  if ((address - window->begin) % align) fail(loc, "%s: misaligned: not a multiple of %u bytes", what, align);
  if (write && window->space == Space::param) fail(loc, "%s: kernel parameters are read-only", what);
  return reinterpret_cast<void*>(address);
}

inline void* own(const Window* window, u64 address, u32 bytes, u32 align, bool write, const char* what, Loc loc) {
  for (; window; window = window->next)
    if (window->holds(address, bytes)) return window_pointer(window, address, align, write, what, loc);
  fail(loc, "%s: %u bytes outside every parameter and local variable of the thread", what, bytes);
}

inline void* generic(const Window* window, u64 address, u32 bytes, u32 align, bool write, const char* what, Loc loc) {
  for (; window; window = window->next)
    if (window->holds(address, bytes)) return window_pointer(window, address, align, write, what, loc);
  return emu::generic(address, bytes, align, write, what, loc);
}

// Whether a generic address lies in the shared memory of the running block.
inline bool is_shared(u64 address) {
  const u64 offset = address - reinterpret_cast<u64>(emu::window.base);
  return offset >= emu::window.low && offset < emu::window.high;
}

inline bool is_local(const Window* window, u64 address) {
  for (; window; window = window->next)
    if (window->space == Space::local && window->holds(address, 1)) return true;
  return false;
}

// The rank of the block that owns an address of the cluster's shared memory.
inline u32 rank_of(u64 shared_address, Loc loc) {
  for (u32 rank = 0; rank < cluster_size(); ++rank)
    if (map_to_rank(shared_address, rank, loc) == shared_address) return rank;
  fail(loc, "getctarank: 0x%llx is no shared address", static_cast<unsigned long long>(shared_address));
}

template <class T, class F>
inline T update(void* p, F f) {
  const T old = load<T>(p);
  store<T>(p, f(old));
  return old;
}

// --- integers ----------------------------------------------------------------------------------------------------

template <class T>
struct Wide;
template <>
struct Wide<u16> {
  using type = u32;
};
template <>
struct Wide<s16> {
  using type = s32;
};
template <>
struct Wide<u32> {
  using type = u64;
};
template <>
struct Wide<s32> {
  using type = s64;
};
template <>
struct Wide<u64> {
  using type = u128;
};
template <>
struct Wide<s64> {
  using type = s128;
};
template <class T>
using wide = typename Wide<T>::type;

template <class T>
constexpr u32 kBits = 8 * sizeof(T);

template <class T>
inline T mul_high(T a, T b) {
  return static_cast<T>((static_cast<wide<T>>(a) * static_cast<wide<T>>(b)) >> kBits<T>);
}

template <class To, class From>
inline To clamp(From x) {
  constexpr s128 low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
  return static_cast<To>(x < low ? low : x > high ? high : static_cast<s128>(x));
}

template <class T>
inline T divide(T a, T b, Loc loc) {
  if (b == 0) fail(loc, "division by zero");
  return static_cast<T>(static_cast<s128>(a) / static_cast<s128>(b));
}
inline u64 divide(u64 a, u64 b, Loc loc) {
  if (b == 0) fail(loc, "division by zero");
  return a / b;
}
inline u32 divide(u32 a, u32 b, Loc loc) { return static_cast<u32>(divide(u64{a}, u64{b}, loc)); }
inline s32 divide(s32 a, s32 b, Loc loc) {
  if (b == 0) fail(loc, "division by zero");
  return static_cast<s32>(s64{a} / b);
}

template <class T>
inline T remainder(T a, T b, Loc loc) {
  return static_cast<T>(static_cast<wide<T>>(a) - static_cast<wide<T>>(divide(a, b, loc)) * static_cast<wide<T>>(b));
}

// Shift amounts past the width give zeros, or copies of the sign.
template <class T>
inline T shift_left(T a, u32 n) {
  return n >= kBits<T> ? T{0} : static_cast<T>(a << n);
}
template <class T>
inline T shift_right(T a, u32 n) {
  if (n < kBits<T>) return static_cast<T>(a >> n);
  return a < 0 ? static_cast<T>(-1) : T{0};
}

inline u32 funnel_left(u32 low, u32 high, u32 n) { return static_cast<u32>((u64{high} << 32 | low) << n >> 32); }
inline u32 funnel_right(u32 low, u32 high, u32 n) { return static_cast<u32>((u64{high} << 32 | low) >> n); }

template <class T>
inline T add_with_carry(T a, T b, bool in, bool* out) {
  const u128 sum = u128{a} + b + in;
  if (out) *out = (sum >> kBits<T>) != 0;
  return static_cast<T>(sum);
}
template <class T>
inline T sub_with_borrow(T a, T b, bool in, bool* out) {
  if (out) *out = u128{a} < u128{b} + in;
  return static_cast<T>(a - b - in);
}

template <class T>
inline u32 leading_zeros(T x) {
  if (x == 0) return kBits<T>;
  return sizeof(T) == 8 ? __builtin_clzll(x) : __builtin_clz(x);
}

template <class T>
inline T reverse_bits(T x) {
  T r = 0;
  for (u32 i = 0; i < kBits<T>; ++i) r = static_cast<T>(r << 1 | (x >> i & 1));
  return r;
}

// Position of the most significant bit that is no copy of the sign, ~0 without one.
template <class T>
inline u32 find_bit(T x, bool as_shift) {
  using U = std::make_unsigned_t<T>;
  const U pattern = static_cast<U>(x < 0 ? ~x : x);
  if (pattern == 0) return ~0u;
  const u32 zeros = leading_zeros(pattern);
  return as_shift ? zeros : kBits<T> - 1 - zeros;
}

template <class T>
inline T bit_field(T a, u32 position, u32 length) {
  position &= 255;
  length &= 255;
  if (length == 0) return 0;
  const u32 top = kBits<T> - 1, last = position + length - 1 < top ? position + length - 1 : top;
  const bool sign = std::is_signed_v<T> && (a >> last & 1);
  const T field = position > top ? T{0} : static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) >> position);
  const u32 held = position > top ? 0 : last - position + 1;
  if (held > top) return field;
  const T mask = static_cast<T>((std::make_unsigned_t<T>{1} << held) - 1);
  return static_cast<T>(sign ? field | ~mask : field & mask);
}

template <class T>
inline T insert_field(T a, T b, u32 position, u32 length) {
  position &= 255;
  length &= 255;
  const T ones = length >= kBits<T> ? static_cast<T>(-1) : static_cast<T>((T{1} << length) - 1);
  const T mask = shift_left(ones, position);
  return static_cast<T>((b & ~mask) | (shift_left(a, position) & mask));
}

inline u32 permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64{b} << 32 | a;
  u32 r = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 s = selector >> (4 * i) & 15;
    u32 byte = static_cast<u32>(bytes >> (8 * (s & 7))) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}

inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  const auto row = [&](u32 i) {
    return (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c) & (0 - (table >> i & 1));
  };
  return row(0) | row(1) | row(2) | row(3) | row(4) | row(5) | row(6) | row(7);
}

template <class A, class B>
inline u32 dot4(u32 a, u32 b, u32 c) {
  for (u32 i = 0; i < 32; i += 8) c += static_cast<u32>(s32{static_cast<A>(a >> i)} * s32{static_cast<B>(b >> i)});
  return c;
}

// --- 16-bit floats and rounding ----------------------------------------------------------------------------------

enum class Rounding { rn, rz, rm, rp };  // to nearest even, to zero, down, up
constexpr Rounding rn = Rounding::rn, rz = Rounding::rz, rm = Rounding::rm, rp = Rounding::rp;

template <class T>
struct Format;
template <>
struct Format<f16> {
  static constexpr int mantissa = 10, bias = 15;
  static constexpr u16 nan = 0x7fff;
};
template <>
struct Format<bf16> {
  static constexpr int mantissa = 7, bias = 127;
  static constexpr u16 nan = 0x7fff;
};
template <>
struct Format<f32> {
  static constexpr int mantissa = 23, bias = 127;
  static constexpr u32 nan = 0x7fffffff;
};
template <>
struct Format<f64> {
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr u64 nan = 0x7ff8000000000000;
};
template <class T>
using Pattern = std::conditional_t<sizeof(T) == 2, u16, std::conditional_t<sizeof(T) == 4, u32, u64>>;

template <class T>
inline T nan_of() {
  return as<T>(Format<T>::nan);
}
template <class T>
inline bool sign_of(T x) {
  return as<Pattern<T>>(x) >> (kBits<T> - 1);
}

inline f64 widen(f64 x) { return x; }
inline f32 widen(f32 x) { return x; }
inline f32 widen(bf16 x) { return as<f32>(u32{x.bits} << 16); }
inline f32 widen(f16 x) {
  const u32 sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00) return as<f32>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // 2^112 moves the exponent from the bias of fp32 to that of fp16; subnormals become normal on the way.
  return as<f32>(sign | as<u32>(as<f32>(magnitude << 13) * 0x1p112f));
}

// Rounds to T a value that is exact, or rounded to odd.
template <class T, Rounding R>
inline T round_to(f64 x) {
  constexpr int mantissa = Format<T>::mantissa, bias = Format<T>::bias;
  constexpr u64 infinity = (u64{2 * bias + 1}) << mantissa;
  const u64 pattern = as<u64>(x), sign = pattern >> 63;
  const int exponent = static_cast<int>(pattern >> 52 & 2047) - 1023;
  u64 significand = (pattern & ((u64{1} << 52) - 1)) | (exponent > -1023 ? u64{1} << 52 : 0), result;
  if (exponent == 1024) {
    if (x != x) return nan_of<T>();
    result = infinity;
  } else {
    const int least = exponent > 1 - bias ? exponent : 1 - bias;
    int drop = 52 - mantissa + least - exponent;
    if (drop > 60) {  // less than any last bit: only whether it is zero counts
      significand = significand != 0;
      drop = 60;
    }
    const u64 kept = significand >> drop, rest = significand & ((u64{1} << drop) - 1), half = u64{1} << (drop - 1);
    bool up = false;
    if constexpr (R == rn) up = rest > half || (rest == half && (kept & 1));
    if constexpr (R == rm) up = rest && sign;
    if constexpr (R == rp) up = rest && !sign;
    // The hidden bit of `kept` counts one exponent up.
    result = (static_cast<u64>(least + bias - 1) << mantissa) + kept + up;
    const bool to_infinity = R == rn || (R == rm && sign) || (R == rp && !sign);
    if (result >= infinity) result = to_infinity ? infinity : infinity - 1;
  }
  return as<T>(static_cast<Pattern<T>>(sign << (kBits<T> - 1) | result));
}

// `nearest` with its last bit set if `error`, the sign of exact - nearest, is not zero, and cut towards zero before:
// rounding that again to fewer than 52 bits is rounding the exact value.
inline f64 to_odd(f64 nearest, f64 error) {
  const u64 pattern = as<u64>(nearest);
  if (!(error < 0 || error > 0) || (pattern & 1)) return nearest;
  return as<f64>((error > 0) == (nearest > 0) ? pattern + 1 : pattern - 1);
}
inline f64 add_odd(f64 a, f64 b) {
  const f64 sum = a + b, part = sum - a;
  return to_odd(sum, (a - (sum - part)) + (b - part));
}
template <class T>
inline f64 integer_odd(T x) {
  const f64 nearest = static_cast<f64>(x);
  return to_odd(nearest, static_cast<f64>(static_cast<s128>(x) - static_cast<s128>(nearest)));
}

// The operations below take and give f16, bf16 or f32, and round once.
template <Rounding R, class T>
inline T add(T a, T b) {
  const f64 x = widen(a), y = widen(b), sum = add_odd(x, y);
  return round_to<T, R>(R == rm && sum == 0 && sign_of(x) != sign_of(y) ? -0.0 : sum);
}
template <Rounding R, class T>
inline T multiply(T a, T b) {
  return round_to<T, R>(static_cast<f64>(widen(a)) * widen(b));
}
template <Rounding R, class T>
inline T fused_multiply_add(T a, T b, T c) {
  const f64 x = static_cast<f64>(widen(a)) * widen(b), y = widen(c), sum = add_odd(x, y);
  return round_to<T, R>(R == rm && sum == 0 && sign_of(x) != sign_of(y) ? -0.0 : sum);
}
template <Rounding R, class T>
inline T quotient(T a, T b) {
  const f64 x = widen(a), y = widen(b), q = x / y;
  return round_to<T, R>(to_odd(q, std::fma(-q, y, x) * (y < 0 ? -1 : 1)));
}
template <Rounding R, class T>
inline T square_root(T a) {
  const f64 x = widen(a), root = std::sqrt(x);
  return round_to<T, R>(to_odd(root, std::fma(-root, root, x)));
}

// Subnormals become zeros of their sign.
template <class T>
inline T flush(T x) {
  constexpr Pattern<T> exponent = static_cast<Pattern<T>>((u64{2 * Format<T>::bias + 1}) << Format<T>::mantissa);
  const auto pattern = as<Pattern<T>>(x);
  return pattern & exponent ? x : as<T>(static_cast<Pattern<T>>(pattern & ~((Pattern<T>{1} << (kBits<T> - 1)) - 1)));
}
template <class T>
inline T saturate(T x) {
  const auto w = widen(x);
  if (w > 0 && w < 1) return x;
  return round_to<T, rn>(w >= 1 ? 1.0 : 0.0);
}
template <>
inline f64 saturate(f64 x) {
  return x > 0 ? (x < 1 ? x : 1.0) : 0.0;
}
template <class T>
inline T relu(T x) {
  const auto w = widen(x);
  if (w != w) return nan_of<T>();
  return w > 0 ? x : as<T>(Pattern<T>{0});
}
template <class T>
inline T negate(T x) {
  return as<T>(static_cast<Pattern<T>>(as<Pattern<T>>(x) ^ (Pattern<T>{1} << (kBits<T> - 1))));
}
template <class T>
inline T absolute(T x) {
  return as<T>(static_cast<Pattern<T>>(as<Pattern<T>>(x) & ((Pattern<T>{1} << (kBits<T> - 1)) - 1)));
}
template <class T>
inline T copy_sign(T sign, T magnitude) {
  return sign_of(sign) ? negate(absolute(magnitude)) : absolute(magnitude);
}

// +0 is greater than -0; of a NaN and a number the number counts, unless nan_wins.
template <bool nan_wins, class T>
inline T maximum(T a, T b) {
  const auto x = widen(a), y = widen(b);
  const bool a_nan = x != x, b_nan = y != y;
  if (a_nan || b_nan) return nan_wins || (a_nan && b_nan) ? nan_of<T>() : a_nan ? b : a;
  if (x == y) return sign_of(a) ? b : a;
  return x > y ? a : b;
}
template <bool nan_wins, class T>
inline T minimum(T a, T b) {
  const auto x = widen(a), y = widen(b);
  const bool a_nan = x != x, b_nan = y != y;
  if (a_nan || b_nan) return nan_wins || (a_nan && b_nan) ? nan_of<T>() : a_nan ? b : a;
  if (x == y) return sign_of(a) ? a : b;
  return x < y ? a : b;
}

// Applies f to both halves of packed operands.
template <class T, class F, class... P>
inline Two<T> each(F f, P... packed) {
  return {f(packed.low...), f(packed.high...)};
}

// --- conversions -------------------------------------------------------------------------------------------------

template <Rounding R>
inline f64 to_integral(f64 x) {
  if constexpr (R == rn) return std::nearbyint(x);
  if constexpr (R == rz) return std::trunc(x);
  if constexpr (R == rm) return std::floor(x);
  if constexpr (R == rp) return std::ceil(x);
}

// Out of range: the nearest integer there is. NaN: 0, or the top bit alone where 64 bits are involved.
template <class To, Rounding R, class From>
inline To to_integer(From from) {
  constexpr To top_bit = static_cast<To>(u64{1} << (kBits<To> - 1));
  const f64 x = to_integral<R>(widen(from));
  if (x != x) return sizeof(To) == 8 || sizeof(From) == 8 ? top_bit : To{0};
  if (x <= static_cast<f64>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (x >= static_cast<f64>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(x);
}

template <class To, Rounding R, class From>
inline To from_integer(From from) {
  if constexpr (std::is_floating_point_v<To> && R == rn)
    return static_cast<To>(from);
  else
    return round_to<To, R>(integer_odd(from));
}

template <class To, Rounding R, class From>
inline To narrow(From from) {
  if constexpr (std::is_same_v<To, f32> && R == rn)
    return static_cast<f32>(widen(from));
  else
    return round_to<To, R>(widen(from));
}

// --- approximations: these are rounded better than the hardware's ------------------------------------------------

// |b| in (2^126, 2^128) gives 0, or NaN for an infinite a, as div.approx documents.
inline f32 divide_approx(f32 a, f32 b) {
  const f32 magnitude = std::fabs(b);
  if (magnitude > 0x1p126f && magnitude <= std::numeric_limits<f32>::max())
    return std::isinf(a) ? nan_of<f32>() : a / b * 0.0f;
  return a / b;
}

}  // namespace emu::translated
