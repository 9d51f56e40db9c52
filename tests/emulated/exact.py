"""IEEE arithmetic by exact fractions: the oracle of the arithmetic instructions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    bits: int
    mantissa: int
    bias: int

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.mantissa

    @property
    def nan(self) -> int:
        """A NaN; every NaN counts as equal to it."""
        return self.infinity | 1 << (self.mantissa - 1)

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    def is_nan(self, pattern: int) -> bool:
        return pattern & (self.sign - 1) > self.infinity

    def is_subnormal(self, pattern: int) -> bool:
        return 0 < pattern & (self.sign - 1) < 1 << self.mantissa


FORMATS = {
    "f16": Format(16, 10, 15),
    "bf16": Format(16, 7, 127),
    "f32": Format(32, 23, 127),
    "f64": Format(64, 52, 1023),
}

INTEGRAL: dict[str, Callable[[Fraction], int]] = {
    "rni": round,
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


def decode(pattern: int, type_name: str) -> float:
    """The value of a pattern; a double holds all of them."""
    if type_name == "f64":
        return float(struct.unpack("<d", struct.pack("<Q", pattern))[0])
    f = FORMATS[type_name]
    magnitude, sign = pattern & (f.sign - 1), -1.0 if pattern & f.sign else 1.0
    if magnitude >= f.infinity:
        return math.nan if magnitude > f.infinity else sign * math.inf
    exponent, fraction = magnitude >> f.mantissa, magnitude & ((1 << f.mantissa) - 1)
    significand = fraction | (1 << f.mantissa if exponent else 0)
    return sign * math.ldexp(significand, max(exponent, 1) - f.bias - f.mantissa)


def encode(value: Fraction | int | float, type_name: str, mode: str = "rn", negative_zero: bool = False) -> int:
    """The pattern of the value, rounded once."""
    f = FORMATS[type_name]
    if isinstance(value, float):
        if math.isnan(value):
            return f.nan
        negative_zero = math.copysign(1, value) < 0
        if math.isinf(value):
            return f.infinity | (f.sign if value < 0 else 0)
    exact = Fraction(value)
    if exact == 0:
        return f.sign if negative_zero else 0
    sign = f.sign if exact < 0 else 0
    away = {"rm": bool(sign), "rp": not sign}.get(mode)
    direction = {None: "zero" if mode == "rz" else "even", True: "up", False: "zero"}[away]
    return sign | _magnitude(abs(exact), f, direction)


def _magnitude(value: Fraction, f: Format, mode: str) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    unit = max(exponent, 1 - f.bias) - f.mantissa
    scaled = value / Fraction(2) ** unit
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if (mode == "up" and rest) or (
        mode == "even" and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1))
    ):
        whole += 1
    pattern = ((unit + f.mantissa + f.bias - 1) << f.mantissa) + whole
    if pattern < f.infinity:
        return pattern
    return f.infinity - 1 if mode == "zero" else f.infinity


def flush(pattern: int, type_name: str) -> int:
    f = FORMATS[type_name]
    return pattern & f.sign if f.is_subnormal(pattern) else pattern


def _special(values: tuple[float, ...]) -> bool:
    return any(math.isnan(v) or math.isinf(v) for v in values)


def fma(a: float, b: float, c: float, type_name: str, mode: str = "rn") -> int:
    """a * b + c"""
    if _special((a, b, c)):
        return encode(a * b + c if _special((a, b)) else c, type_name)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    product_negative = (math.copysign(1, a) < 0) != (math.copysign(1, b) < 0)
    both = product_negative and math.copysign(1, c) < 0
    mixed = product_negative != (math.copysign(1, c) < 0)
    return encode(exact, type_name, mode, both or (mixed and mode == "rm"))


def add(a: float, b: float, type_name: str, mode: str = "rn") -> int:
    return fma(a, 1.0, b, type_name, mode)


def multiply(a: float, b: float, type_name: str, mode: str = "rn") -> int:
    if _special((a, b)):
        return encode(a * b, type_name)
    negative = (math.copysign(1, a) < 0) != (math.copysign(1, b) < 0)
    return encode(Fraction(a) * Fraction(b), type_name, mode, negative)


def divide(a: float, b: float, type_name: str, mode: str = "rn") -> int:
    negative = (math.copysign(1, a) < 0) != (math.copysign(1, b) < 0)
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
        return encode(math.nan, type_name)
    if math.isinf(a) or b == 0:
        return encode(-math.inf if negative else math.inf, type_name)
    return encode(Fraction(0) if math.isinf(b) else Fraction(a) / Fraction(b), type_name, mode, negative)


def square_root(a: float, type_name: str, mode: str = "rn") -> int:
    if math.isnan(a) or a < 0:
        return encode(math.nan, type_name)
    if a == 0 or math.isinf(a):
        return encode(a, type_name)
    exact, shift = Fraction(a), 1200
    scaled = exact * Fraction(4) ** shift
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    sticky = Fraction(1, 4) if Fraction(whole) ** 2 != scaled else Fraction(0)
    return encode((whole + sticky) / Fraction(2) ** shift, type_name, mode)


def extremum(a: int, b: int, type_name: str, greater: bool, nan_wins: bool) -> int:
    """max or min of patterns: -0 < +0."""
    f = FORMATS[type_name]
    if f.is_nan(a) or f.is_nan(b):
        return f.nan if nan_wins or (f.is_nan(a) and f.is_nan(b)) else b if f.is_nan(a) else a
    order = {decode(p, type_name) or (-1e-320 if p & f.sign else 0.0): p for p in (a, b)}
    return order[max(order) if greater else min(order)]


def to_integer(value: float, bits: int, signed: bool, mode: str, wide: bool) -> int:
    """The pattern of the nearest integer of a type, saturated."""
    if math.isnan(value):
        return 1 << (bits - 1) if wide else 0
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if math.isinf(value):
        return (high if value > 0 else low) % (1 << bits)
    return min(max(INTEGRAL[mode](Fraction(value)), low), high) % (1 << bits)
