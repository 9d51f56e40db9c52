"""Every arithmetic instruction, run and compared with exact integers and fractions."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashladder.emulator import ptx
from tests.emulated import exact
from tests.emulated.exact import FORMATS, decode, encode
from tests.emulated.gpu_machine import Load, Runner
from tests.emulated.ptx_machine import HEADER, assemble

SAMPLES = 96
INTEGER_TYPES = [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]
NUMBERS = [t for t in INTEGER_TYPES if not t.endswith("8")]
ROUNDINGS = ("rn", "rz", "rm", "rp")


# --- cases -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`code` computes `d` of type `result` from `a`, `b`, `c`, `e`; expect() gets and gives patterns."""

    code: str
    result: str
    inputs: tuple[str, ...]
    expect: Callable[..., int]
    tolerance: float = 0.0
    """Relative."""
    absolute: float = 0.0
    domain: float = math.inf
    """Largest |a| for which an accuracy is stated; outside it nothing is asserted."""

    @property
    def kernel(self) -> str:
        return f"case_{zlib.crc32(repr((self.code, self.inputs)).encode()):08x}"


def width(type_name: str) -> int:
    return 8 * ptx.SIZES[type_name]


def signed(pattern: int, type_name: str) -> int:
    """The integer that a pattern stands for."""
    top = 1 << (width(type_name) - 1)
    return pattern - 2 * top if type_name[0] == "s" and pattern & top else pattern


def samples(type_name: str, source: random.Random) -> list[int]:
    """Patterns: the edges of the type, values of nearby magnitude, and anything."""
    bits = width(type_name)
    if type_name.endswith("x2"):
        low, high = samples(type_name[:-2], source), samples(type_name[:-2], source)
        source.shuffle(high)
        return [x | y << 16 for x, y in zip(low, high, strict=True)]
    if type_name in FORMATS:
        f = FORMATS[type_name]
        one = f.bias << f.mantissa
        edges = [0, 1, (1 << f.mantissa) - 1, 1 << f.mantissa, one, one + 1, f.infinity - 1, f.infinity, f.nan]
        edges += [e | f.sign for e in edges]
        near = [one + source.randrange(-4 << f.mantissa, 4 << f.mantissa) for _ in range(48)]
        values = edges + [p | source.choice((0, f.sign)) for p in near]
    else:
        ones = (1 << bits) - 1
        values = [0, 1, 2, 3, 31, 32, 33, ones, ones - 1, ones >> 1, (ones >> 1) + 1]
        values += [source.randrange(64) for _ in range(20)] + [ones - source.randrange(64) for _ in range(8)]
    values = [v % (1 << bits) for v in values] + [source.randrange(1 << bits) for _ in range(SAMPLES)]
    values = values[:SAMPLES]
    source.shuffle(values)
    return values


def integer_case(code: str, result: str, inputs: tuple[str, ...], function: Callable[..., int]) -> Case:
    """A case whose function works on integers; the result is taken modulo the type's size."""

    def expect(*patterns: int) -> int:
        values = (signed(p, t) for p, t in zip(patterns, inputs, strict=True))
        return int(function(*values)) % (1 << width(result))

    return Case(code, result, inputs, expect)


def float_case(
    code: str, result: str, inputs: tuple[str, ...], function: Callable[..., int], tolerance: float = 0
) -> Case:
    """A case whose function takes floats, and integers as they are, and gives a pattern."""

    def expect(*patterns: int) -> int:
        values = (decode(p, t) if t in FORMATS else signed(p, t) for p, t in zip(patterns, inputs, strict=True))
        return function(*values)

    return Case(code, result, inputs, expect, tolerance)


def predicate(code: str) -> str:
    """Code that ends with a predicate p, which becomes 0 or 1 in d."""
    return f"{code} selp.u32 d, 1, 0, p;"


def clamped(value: int, type_name: str) -> int:
    bits = width(type_name)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_name[0] == "s" else (0, (1 << bits) - 1)
    return min(max(value, low), high)


def truncated_division(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


# --- integers ----------------------------------------------------------------------------------------------------


def arithmetic() -> Iterator[Case]:
    for t in NUMBERS:
        two, three, bits = (t, t), (t, t, t), width(t)
        yield integer_case(f"add.{t} d, a, b;", t, two, lambda a, b: a + b)
        yield integer_case(f"sub.{t} d, a, b;", t, two, lambda a, b: a - b)
        yield integer_case(f"mul.lo.{t} d, a, b;", t, two, lambda a, b: a * b)
        yield integer_case(f"mul.hi.{t} d, a, b;", t, two, lambda a, b, n=bits: a * b >> n)
        yield integer_case(f"mad.lo.{t} d, a, b, c;", t, three, lambda a, b, c: a * b + c)
        yield integer_case(f"mad.hi.{t} d, a, b, c;", t, three, lambda a, b, c, n=bits: (a * b >> n) + c)
        yield integer_case(f"min.{t} d, a, b;", t, two, min)
        yield integer_case(f"max.{t} d, a, b;", t, two, max)
        yield integer_case(f"sad.{t} d, a, b, c;", t, three, lambda a, b, c: abs(a - b) + c)
        odd = f"{{ .reg .{t} t; or.b{width(t)} t, b, 1;"
        yield integer_case(f"{odd} div.{t} d, a, t; }}", t, two, lambda a, b: truncated_division(a, b | 1))
        yield integer_case(
            f"{odd} rem.{t} d, a, t; }}", t, two, lambda a, b: a - truncated_division(a, b | 1) * (b | 1)
        )
        if t[0] == "s":
            yield integer_case(f"neg.{t} d, a;", t, (t,), lambda a: -a)
            yield integer_case(f"abs.{t} d, a;", t, (t,), abs)
    for t, w in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        yield integer_case(f"mul.wide.{t} d, a, b;", w, (t, t), lambda a, b: a * b)
        yield integer_case(f"mad.wide.{t} d, a, b, c;", w, (t, t, w), lambda a, b, c: a * b + c)
    s32 = ("s32", "s32")
    yield integer_case("add.sat.s32 d, a, b;", "s32", s32, lambda a, b: clamped(a + b, "s32"))
    yield integer_case("sub.sat.s32 d, a, b;", "s32", s32, lambda a, b: clamped(a - b, "s32"))
    yield integer_case("max.relu.s32 d, a, b;", "s32", s32, lambda a, b: max(a, b, 0))
    yield integer_case("min.relu.s32 d, a, b;", "s32", s32, lambda a, b: max(min(a, b), 0))
    yield integer_case(
        "mad.hi.sat.s32 d, a, b, c;", "s32", ("s32",) * 3, lambda a, b, c: clamped((a * b >> 32) + c, "s32")
    )
    yield integer_case("mul24.lo.u32 d, a, b;", "u32", ("u32",) * 2, lambda a, b: (a % 2**24) * (b % 2**24))
    yield integer_case("mad24.lo.u32 d, a, b, c;", "u32", ("u32",) * 3, lambda a, b, c: (a % 2**24) * (b % 2**24) + c)
    yield integer_case(
        "mul24.lo.s32 d, a, b;", "s32", s32, lambda a, b: ((a + 2**23) % 2**24 - 2**23) * ((b + 2**23) % 2**24 - 2**23)
    )
    yield from carries()
    for first in "us":
        for second in "us":
            yield integer_case(
                f"dp4a.{first}32.{second}32 d, a, b, c;", "u32", ("u32",) * 3, partial(dot4, first=first, second=second)
            )


def dot4(a: int, b: int, c: int, *, first: str, second: str) -> int:
    def byte(x: int, i: int, kind: str) -> int:
        return signed(x >> 8 * i & 255, f"{kind}8")

    return c + sum(byte(a, i, first) * byte(b, i, second) for i in range(4))


def carries() -> Iterator[Case]:
    """Pairs of registers as one number: the low parts carry into the high ones."""
    for bits in (32, 64):
        t = f"u{bits}"
        four = (t,) * 4

        def high(value: int, n: int = bits) -> int:
            return value >> n

        def joined(x: int, y: int, n: int = bits) -> int:
            return x | y << n

        scratch = f"{{ .reg .{t} t;"
        yield integer_case(
            f"{scratch} add.cc.{t} t, a, b; addc.{t} d, c, e; }}",
            t,
            four,
            lambda a, b, c, e, high=high, joined=joined: high(joined(a, c) + joined(b, e)),
        )
        yield integer_case(
            f"{scratch} sub.cc.{t} t, a, b; subc.{t} d, c, e; }}",
            t,
            four,
            lambda a, b, c, e, high=high, joined=joined: high(joined(a, c) - joined(b, e)),
        )
        yield integer_case(
            f"{scratch} mad.lo.cc.{t} t, a, b, c; madc.hi.{t} d, a, b, e; }}",
            t,
            four,
            lambda a, b, c, e, high=high: high(a * b + c) + e,
        )
        yield integer_case(
            f"{scratch} add.cc.{t} t, a, b; addc.cc.{t} t, c, e; addc.{t} d, 0, 0; }}",
            t,
            four,
            lambda a, b, c, e, high=high, joined=joined: high(high(joined(a, c) + joined(b, e))),
        )


# --- bits --------------------------------------------------------------------------------------------------------


def logic() -> Iterator[Case]:
    for bits in (16, 32, 64):
        t, mask = f"u{bits}", (1 << bits) - 1
        two = (t, t)
        yield integer_case(f"and.b{bits} d, a, b;", t, two, lambda a, b: a & b)
        yield integer_case(f"or.b{bits} d, a, b;", t, two, lambda a, b: a | b)
        yield integer_case(f"xor.b{bits} d, a, b;", t, two, lambda a, b: a ^ b)
        yield integer_case(f"not.b{bits} d, a;", t, (t,), lambda a: ~a)
        yield integer_case(f"cnot.b{bits} d, a;", t, (t,), lambda a: int(a == 0))
        yield integer_case(f"shl.b{bits} d, a, b;", t, (t, "u32"), lambda a, b, n=bits: a << b if b < n else 0)
        yield integer_case(f"shr.u{bits} d, a, b;", t, (t, "u32"), lambda a, b, n=bits: a >> min(b, n))
        yield integer_case(
            f"shr.s{bits} d, a, b;", f"s{bits}", (f"s{bits}", "u32"), lambda a, b, n=bits: a >> min(b, n)
        )
        yield integer_case(f"shl.b{bits} d, a, 7;", t, (t,), lambda a: a << 7)
        yield integer_case(f"shr.s{bits} d, a, 7;", f"s{bits}", (f"s{bits}",), lambda a: a >> 7)
        yield integer_case(
            predicate(
                f"{{ .reg .pred q, r; setp.lt.u{bits} q, a, b; setp.eq.u{bits} r, a, 3;"
                "or.pred p, q, r; xor.pred p, p, r; and.pred p, p, q; not.pred p, p; }"
            ),
            "u32",
            two,
            lambda a, b: int(not ((a < b or a == 3) != (a == 3) and a < b)),
        )
        if bits == 16:
            continue
        yield integer_case(f"popc.b{bits} d, a;", "u32", (t,), lambda a: a.bit_count())
        yield integer_case(f"clz.b{bits} d, a;", "u32", (t,), lambda a, n=bits: n - a.bit_length())
        yield integer_case(f"brev.b{bits} d, a;", t, (t,), lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))
        for sign in "us":
            s = f"{sign}{bits}"
            yield integer_case(f"bfind.{s} d, a;", "u32", (s,), partial(find_bit, bits=bits, shift=False))
            yield integer_case(f"bfind.shiftamt.{s} d, a;", "u32", (s,), partial(find_bit, bits=bits, shift=True))
            yield integer_case(
                f"bfe.{s} d, a, b, c;", s, (s, "u8", "u8"), partial(bit_field, bits=bits, sign=sign == "s")
            )
        yield integer_case(
            f"bfi.b{bits} d, a, b, c, e;", t, (t, t, "u8", "u8"), partial(insert_field, bits=bits, mask=mask)
        )
    yield from words()


def find_bit(a: int, *, bits: int, shift: bool) -> int:
    pattern = ~a if a < 0 else a
    position = pattern.bit_length() - 1
    return -1 if position < 0 else bits - 1 - position if shift else position


def bit_field(a: int, position: int, length: int, *, bits: int, sign: bool) -> int:
    """As the PTX manual writes it, bit by bit."""
    top = bits - 1
    fill = 0 if not sign or length == 0 else a >> min(position + length - 1, top) & 1
    inside = [(a >> (position + i) & 1) if i < length and position + i <= top else fill for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(inside))


def insert_field(a: int, b: int, position: int, length: int, *, bits: int, mask: int) -> int:
    field = ((1 << length) - 1) << position & mask
    return (b & ~field) | (a << position & field)


def permute(a: int, b: int, selector: int) -> int:
    values = (b << 32 | a).to_bytes(8, "little")
    chosen = [(selector >> 4 * i & 7, selector >> 4 * i & 8) for i in range(4)]
    return int.from_bytes(bytes((255 if values[i] & 128 else 0) if sign else values[i] for i, sign in chosen), "little")


def table_lookup(a: int, b: int, c: int, *, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


def words() -> Iterator[Case]:
    u3 = ("u32",) * 3
    yield integer_case("prmt.b32 d, a, b, c;", "u32", u3, permute)
    for table in (0xE8, 0x96, 0x1B, 0xCA):
        yield integer_case(f"lop3.b32 d, a, b, c, {table:#x};", "u32", u3, partial(table_lookup, table=table))
    for mode, amount in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        yield integer_case(
            f"shf.l.{mode}.b32 d, a, b, c;", "u32", u3, lambda a, b, c, amount=amount: (b << 32 | a) << amount(c) >> 32
        )
        yield integer_case(
            f"shf.r.{mode}.b32 d, a, b, c;", "u32", u3, lambda a, b, c, amount=amount: (b << 32 | a) >> amount(c)
        )
        yield integer_case(
            f"szext.{mode}.s32 d, a, b;",
            "s32",
            ("s32", "u32"),
            lambda a, b, amount=amount: bit_field(a, 0, amount(b), bits=32, sign=True),
        )
        yield integer_case(
            f"bmsk.{mode}.b32 d, a, b;",
            "u32",
            ("u32", "u32"),
            lambda a, b, amount=amount: ((1 << amount(b)) - 1) << amount(a),
        )
    for t in ("b16", "b32", "u64", "s16", "f32", "f64"):
        reg = t if t[0] == "f" else f"u{t[1:]}"
        yield Case(
            f"{{ .reg .pred p; setp.gt.s32 p, c, 5; selp.{t} d, a, b, p; }}",
            reg,
            (reg, reg, "s32"),
            lambda a, b, c: a if signed(c, "s32") > 5 else b,
        )
    yield Case("slct.u32.s32 d, a, b, c;", "u32", ("u32", "u32", "s32"), lambda a, b, c: b if c >> 31 else a)
    yield Case(
        "slct.ftz.b64.f32 d, a, b, c;",
        "u64",
        ("u64", "u64", "f32"),
        lambda a, b, c: a if decode(exact.flush(c, "f32"), "f32") >= 0 else b,
    )
    yield Case("mov.b32 d, {a, b};", "u32", ("u16", "u16"), lambda a, b: a | b << 16)
    yield Case("mov.b64 d, {a, b};", "f64", ("f32", "u32"), lambda a, b: a | b << 32)
    yield Case("{ .reg .b16 t; mov.b32 {_, t}, a; cvt.u32.u16 d, t; }", "u32", ("f32",), lambda a: a >> 16)
    yield Case("{ .reg .b16 t<3>; mov.b64 {t0, t1, t2, _}, a; mov.b32 d, {t2, t0}; }", "u32", ("u64",), four_parts)
    yield Case("mov.b32 d, a;", "f32", ("u32",), lambda a: a)
    yield Case("mov.b64 d, 0dC000000000000000;", "u64", (), lambda: 0xC000000000000000)
    yield Case("mov.f32 d, 0fBF800000;", "f32", (), lambda: 0xBF800000)
    yield Case(
        "add.f32 d, a, 0f3DCCCCCD;",
        "f32",
        ("f32",),
        lambda a: exact.add(decode(a, "f32"), decode(0x3DCCCCCD, "f32"), "f32"),
    )


def four_parts(a: int) -> int:
    return (a >> 32 & 0xFFFF) | (a & 0xFFFF) << 16


# --- comparisons -------------------------------------------------------------------------------------------------

ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b and a == a and b == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def compare_floats(name: str, a: float, b: float) -> bool:
    unordered = math.isnan(a) or math.isnan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    return ORDERED[name](a, b) if name in ORDERED else unordered or ORDERED[name[:2]](a, b)


def comparisons() -> Iterator[Case]:
    unsigned_names = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    for t in (*NUMBERS, "b32"):
        reg = t.replace("b", "u")
        for name in ("eq", "ne") if t[0] == "b" else (*ORDERED, *(unsigned_names if t[0] == "u" else ())):
            compare = ORDERED[unsigned_names.get(name, name)]
            yield integer_case(
                predicate(f"setp.{name}.{t} p, a, b;"), "u32", (reg, reg), lambda a, b, f=compare: int(f(a, b))
            )
    unordered = tuple(f"{name}u" for name in ORDERED)
    for t in FORMATS:
        for name in (*ORDERED, *unordered, "num", "nan"):
            yield float_case(predicate(f"setp.{name}.{t} p, a, b;"), "u32", (t, t), partial(compare_as_int, name))
    yield Case(
        predicate("setp.lt.ftz.f32 p, a, b;"),
        "u32",
        ("f32", "f32"),
        lambda a, b: int(decode(exact.flush(a, "f32"), "f32") < decode(exact.flush(b, "f32"), "f32")),
    )
    for operator, combine in (("and", lambda x, y: x and y), ("or", lambda x, y: x or y), ("xor", lambda x, y: x != y)):
        yield integer_case(
            f"{{ .reg .pred p, q, r; setp.gt.s32 r, c, 3; setp.lt.{operator}.s32 p|q, a, b, !r;"
            "selp.u32 d, 1, 0, p; @q add.u32 d, d, 2; }",
            "u32",
            ("s32",) * 3,
            lambda a, b, c, f=combine: f(a < b, c <= 3) + 2 * f(a >= b, c <= 3),
        )
    yield from masks()


def compare_as_int(name: str, a: float, b: float) -> int:
    return int(compare_floats(name, a, b))


def halves(pattern: int, type_name: str) -> tuple[float, float]:
    return decode(pattern & 0xFFFF, type_name), decode(pattern >> 16, type_name)


def masks() -> Iterator[Case]:
    """set, and comparisons of packed halves"""
    yield integer_case("set.lt.u32.s32 d, a, b;", "u32", ("s32", "s32"), lambda a, b: -int(a < b))
    yield float_case(
        "set.geu.f32.f32 d, a, b;", "f32", ("f32", "f32"), lambda a, b: encode(compare_as_int("geu", a, b), "f32")
    )
    for t in ("f16", "bf16"):
        yield float_case(f"set.gt.{t}.{t} d, a, b;", t, (t, t), lambda a, b, t=t: encode(int(a > b), t))
        packed = f"{t}x2"

        def both(a: int, b: int, t: str = t) -> tuple[int, int]:
            low, high = (int(x > y) for x, y in zip(halves(a, t), halves(b, t), strict=True))
            return low, high

        def as_floats(a: int, b: int, t: str = t, both: Callable[..., tuple[int, int]] = both) -> int:
            low, high = both(a, b)
            return encode(low, t) | encode(high, t) << 16

        yield Case(f"set.gt.{packed}.{packed} d, a, b;", packed, (packed, packed), as_floats)
        yield Case(
            f"set.gt.u32.{packed} d, a, b;",
            "u32",
            (packed, packed),
            lambda a, b, both=both: both(a, b)[0] * 0xFFFF + both(a, b)[1] * 0xFFFF0000,
        )
        yield Case(
            f"{{ .reg .pred p, q; setp.gt.{packed} p|q, a, b; selp.u32 d, 1, 0, p; @q add.u32 d, d, 2; }}",
            "u32",
            (packed, packed),
            lambda a, b, both=both: both(a, b)[0] + 2 * both(a, b)[1],
        )


# --- floats ------------------------------------------------------------------------------------------------------


def floats() -> Iterator[Case]:
    for t, roundings in (("f32", ROUNDINGS), ("f64", ("rn",)), ("f16", ("rn",)), ("bf16", ("rn",))):
        for r in roundings:
            yield float_case(f"add.{r}.{t} d, a, b;", t, (t, t), partial(exact.add, type_name=t, mode=r))
            yield float_case(f"sub.{r}.{t} d, a, b;", t, (t, t), lambda a, b, t=t, r=r: exact.add(a, -b, t, r))
            yield float_case(f"mul.{r}.{t} d, a, b;", t, (t, t), partial(exact.multiply, type_name=t, mode=r))
            yield float_case(f"fma.{r}.{t} d, a, b, c;", t, (t, t, t), partial(exact.fma, type_name=t, mode=r))
            yield float_case(  # cancels: the sign of zero and the last bits matter
                f"{{ .reg .{storage(t)} t; mul.rn.{t} t, a, b; neg.{t} t, t; fma.{r}.{t} d, a, b, t; }}",
                t,
                (t, t),
                lambda a, b, t=t, r=r: exact.fma(a, b, -decode(exact.multiply(a, b, t), t), t, r),
            )
            if t in ("f32", "f64"):
                yield float_case(f"div.{r}.{t} d, a, b;", t, (t, t), partial(exact.divide, type_name=t, mode=r))
                yield float_case(f"rcp.{r}.{t} d, a;", t, (t,), lambda a, t=t, r=r: exact.divide(1.0, a, t, r))
                yield float_case(f"sqrt.{r}.{t} d, a;", t, (t,), partial(exact.square_root, type_name=t, mode=r))
        yield from signs(t)
    yield from variants()
    yield from approximations()


def signs(t: str) -> Iterator[Case]:
    f = FORMATS[t]
    for name, greater in (("min", False), ("max", True)):
        for suffix, nan_wins in (("", False), (".NaN", True)) if t != "f64" else (("", False),):
            expect = partial(exact.extremum, type_name=t, greater=greater, nan_wins=nan_wins)
            yield Case(f"{name}{suffix}.{t} d, a, b;", t, (t, t), expect)
    yield Case(f"neg.{t} d, a;", t, (t,), lambda a: a ^ f.sign)
    yield Case(f"abs.{t} d, a;", t, (t,), lambda a: a & ~f.sign)
    if t in ("f16", "bf16"):
        yield from packed(t)
        return
    yield Case(f"copysign.{t} d, a, b;", t, (t, t), lambda a, b: (b & ~f.sign) | (a & f.sign))
    tests: dict[str, Callable[[int], bool]] = {
        "finite": lambda a: a & ~f.sign < f.infinity,
        "infinite": lambda a: a & ~f.sign == f.infinity,
        "number": lambda a: not f.is_nan(a),
        "notanumber": f.is_nan,
        "normal": lambda a: a & ~f.sign < f.infinity and not f.is_subnormal(a & ~f.sign),  # zeros are
        "subnormal": f.is_subnormal,
    }
    for name, test in tests.items():
        yield Case(predicate(f"testp.{name}.{t} p, a;"), "u32", (t,), lambda a, test=test: int(test(a)))


def packed(t: str) -> Iterator[Case]:
    """The packed forms do to each half what the scalar ones do."""

    def each(function: Callable[..., int]) -> Callable[..., int]:
        return lambda *p: function(*(x & 0xFFFF for x in p)) | function(*(x >> 16 for x in p)) << 16

    def of_floats(function: Callable[..., int]) -> Callable[..., int]:
        return each(lambda *p: function(*(decode(x, t) for x in p)))

    x2 = f"{t}x2"
    yield Case(f"add.rn.{x2} d, a, b;", x2, (x2, x2), of_floats(lambda a, b: exact.add(a, b, t)))
    yield Case(f"sub.{x2} d, a, b;", x2, (x2, x2), of_floats(lambda a, b: exact.add(a, -b, t)))
    yield Case(f"mul.{x2} d, a, b;", x2, (x2, x2), of_floats(lambda a, b: exact.multiply(a, b, t)))
    yield Case(f"fma.rn.{x2} d, a, b, c;", x2, (x2,) * 3, of_floats(lambda a, b, c: exact.fma(a, b, c, t)))
    yield Case(
        f"fma.rn.relu.{x2} d, a, b, c;", x2, (x2,) * 3, of_floats(lambda a, b, c: relu(exact.fma(a, b, c, t), t))
    )
    yield Case(f"min.NaN.{x2} d, a, b;", x2, (x2, x2), each(lambda a, b: exact.extremum(a, b, t, False, True)))
    yield Case(f"max.{x2} d, a, b;", x2, (x2, x2), each(lambda a, b: exact.extremum(a, b, t, True, False)))
    yield Case(f"neg.{x2} d, a;", x2, (x2,), lambda a: a ^ 0x80008000)
    yield Case(f"abs.{x2} d, a;", x2, (x2,), lambda a: a & 0x7FFF7FFF)


def relu(pattern: int, t: str) -> int:
    return 0 if pattern & FORMATS[t].sign and not FORMATS[t].is_nan(pattern) else pattern


def saturated(pattern: int, t: str) -> int:
    value = decode(pattern, t)
    return pattern if 0 < value < 1 else encode(int(value >= 1), t)


def flushing(function: Callable[..., int], t: str) -> Callable[..., int]:
    """The operation with .ftz: subnormal operands and results are zeros."""
    return lambda *p: exact.flush(function(*(decode(exact.flush(x, t), t) for x in p)), t)


def variants() -> Iterator[Case]:
    """.ftz and .sat"""
    f2, f3 = ("f32",) * 2, ("f32",) * 3
    yield Case("add.ftz.f32 d, a, b;", "f32", f2, flushing(lambda a, b: exact.add(a, b, "f32"), "f32"))
    yield Case("mul.rz.ftz.f32 d, a, b;", "f32", f2, flushing(lambda a, b: exact.multiply(a, b, "f32", "rz"), "f32"))
    yield Case("fma.rn.ftz.f32 d, a, b, c;", "f32", f3, flushing(lambda a, b, c: exact.fma(a, b, c, "f32"), "f32"))
    yield Case(
        "max.ftz.f32 d, a, b;",
        "f32",
        f2,
        lambda a, b: exact.extremum(exact.flush(a, "f32"), exact.flush(b, "f32"), "f32", True, False),
    )
    yield Case("neg.ftz.f32 d, a;", "f32", ("f32",), lambda a: exact.flush(a, "f32") ^ (1 << 31))
    yield float_case("add.sat.f32 d, a, b;", "f32", f2, lambda a, b: saturated(exact.add(a, b, "f32"), "f32"))
    yield float_case(
        "fma.rn.sat.f32 d, a, b, c;", "f32", f3, lambda a, b, c: saturated(exact.fma(a, b, c, "f32"), "f32")
    )
    yield float_case("mad.rn.f32 d, a, b, c;", "f32", f3, partial(exact.fma, type_name="f32"))
    yield float_case("mul.f32 d, a, b;", "f32", f2, partial(exact.multiply, type_name="f32"))
    for t in ("f16", "bf16"):
        yield float_case(
            f"fma.rn.relu.{t} d, a, b, c;", t, (t,) * 3, lambda a, b, c, t=t: relu(exact.fma(a, b, c, t), t)
        )
    yield float_case("add.sat.f16 d, a, b;", "f16", ("f16",) * 2, lambda a, b: saturated(exact.add(a, b, "f16"), "f16"))
    yield Case(
        "fma.rn.ftz.f16 d, a, b, c;", "f16", ("f16",) * 3, flushing(lambda a, b, c: exact.fma(a, b, c, "f16"), "f16")
    )


def approximately(function: Callable[[float], float], t: str, ftz: bool) -> Callable[[int], int]:
    def expect(pattern: int) -> int:
        value = decode(exact.flush(pattern, t) if ftz else pattern, t)
        try:
            result = encode(function(value), t)
        except OverflowError:
            result = FORMATS[t].infinity
        except ValueError:
            result = FORMATS[t].nan
        return exact.flush(result, t) if ftz else result

    return expect


def logarithm(x: float) -> float:
    return math.log2(x) if x else -math.inf


def reciprocal_root(x: float) -> float:
    return 1 / math.sqrt(x) if x else math.copysign(math.inf, x)


def reciprocal(x: float) -> float:
    return 1 / x if x else math.copysign(math.inf, x)


def approximations() -> Iterator[Case]:
    """To the accuracy that PTX states of the hardware's; the emulator's are better."""
    functions: dict[str, Callable[[float], float]] = {
        "ex2": lambda x: 2.0**x,
        "lg2": logarithm,
        "sin": math.sin,
        "cos": math.cos,
        "tanh": math.tanh,
        "rsqrt": reciprocal_root,
        "rcp": reciprocal,
        "sqrt": math.sqrt,
    }
    accuracies: dict[str, dict[str, float]] = {
        "lg2": {"tolerance": 2.0**-22, "absolute": 2.0**-22},
        "sin": {"absolute": 2.0**-20.5, "domain": 2 * math.pi},
        "cos": {"absolute": 2.0**-20.5, "domain": 2 * math.pi},
        "tanh": {"tolerance": 2.0**-11},
    }
    for name, function in functions.items():
        for ftz in ("", ".ftz") if name != "tanh" else ("",):
            expect = approximately(function, "f32", ftz != "")
            accuracy = accuracies.get(name, {"tolerance": 2.0**-21})
            yield Case(f"{name}.approx{ftz}.f32 d, a;", "f32", ("f32",), expect, **accuracy)
    yield Case("rsqrt.approx.f64 d, a;", "f64", ("f64",), approximately(reciprocal_root, "f64", False), 2.0**-50)
    for name, t in (("ex2", "f16"), ("tanh", "f16"), ("ex2.approx.ftz", "bf16"), ("tanh", "bf16")):
        code = f"{name.partition('.')[0]}.approx{'.ftz' if 'ftz' in name else ''}"
        expect = approximately(functions[name.partition(".")[0]], t, "ftz" in name)
        yield Case(f"{code}.{t} d, a;", t, (t,), expect, tolerance=2.0 ** -FORMATS[t].mantissa)
    yield Case(
        "ex2.approx.f16x2 d, a;",
        "f16x2",
        ("f16x2",),
        lambda a: (
            approximately(functions["ex2"], "f16", False)(a & 0xFFFF)
            | approximately(functions["ex2"], "f16", False)(a >> 16) << 16
        ),
        tolerance=2.0**-10,
    )
    yield float_case("div.full.f32 d, a, b;", "f32", ("f32", "f32"), partial(exact.divide, type_name="f32"), 2.0**-21)
    yield float_case("div.approx.f32 d, a, b;", "f32", ("f32", "f32"), divide_approx, 2.0**-21)


def divide_approx(a: float, b: float) -> int:
    if 2.0**126 < abs(b) < math.inf and not math.isnan(a):
        return encode(math.nan, "f32") if math.isinf(a) else encode(math.copysign(1, a) * math.copysign(0, b), "f32")
    return exact.divide(a, b, "f32")


# --- conversions -------------------------------------------------------------------------------------------------


def conversions() -> Iterator[Case]:
    for source in INTEGER_TYPES:
        for target in INTEGER_TYPES:
            yield integer_case(f"cvt.{target}.{source} d, a;", target, (source,), lambda a: a)
            if not holds(target, source):
                code = f"cvt.sat.{target}.{source} d, a;"
                yield integer_case(code, target, (source,), partial(clamped, type_name=target))
        for target in FORMATS:
            if target == "bf16" and width(source) == 8:  # there is no such instruction
                continue
            for r in ROUNDINGS if target != "f64" else ("rn",):
                yield integer_case(
                    f"cvt.{r}.{target}.{source} d, a;", target, (source,), lambda a, t=target, r=r: encode(a, t, r)
                )
    for source in FORMATS:
        for target in INTEGER_TYPES:
            for r in exact.INTEGRAL if source != "bf16" or width(target) > 8 else ():
                wide = "64" in target or source == "f64"
                convert = partial(exact.to_integer, bits=width(target), signed=target[0] == "s", mode=r, wide=wide)
                yield float_case(f"cvt.{r}.{target}.{source} d, a;", target, (source,), convert)
        for r in exact.INTEGRAL:
            yield float_case(f"cvt.{r}.{source}.{source} d, a;", source, (source,), partial(integral, t=source, mode=r))
    yield from between_floats()


def holds(target: str, source: str) -> bool:
    """Whether every value of an integer type fits another."""
    if target[0] == source[0]:
        return width(target) >= width(source)
    return target[0] == "s" and width(target) > width(source)


def integral(a: float, *, t: str, mode: str) -> int:
    if math.isnan(a) or math.isinf(a):
        return encode(a, t)
    return encode(exact.INTEGRAL[mode](Fraction(a)), t, negative_zero=math.copysign(1, a) < 0)


def between_floats() -> Iterator[Case]:
    for source in FORMATS:
        for target in FORMATS:
            if width(target) < width(source):
                for r in ROUNDINGS:
                    yield float_case(
                        f"cvt.{r}.{target}.{source} d, a;", target, (source,), lambda a, t=target, r=r: encode(a, t, r)
                    )
            elif width(target) > width(source):
                yield float_case(f"cvt.{target}.{source} d, a;", target, (source,), lambda a, t=target: encode(a, t))
    yield float_case("cvt.sat.f32.f32 d, a;", "f32", ("f32",), lambda a: saturated(encode(a, "f32"), "f32"))
    yield Case("cvt.ftz.f32.f32 d, a;", "f32", ("f32",), lambda a: exact.flush(a, "f32"))
    yield Case(
        "cvt.rn.ftz.f32.f64 d, a;", "f32", ("f64",), lambda a: exact.flush(encode(decode(a, "f64"), "f32"), "f32")
    )
    yield Case(
        "cvt.rzi.ftz.s32.f32 d, a;",
        "s32",
        ("f32",),
        lambda a: exact.to_integer(decode(a, "f32"), 32, True, "rzi", False),
    )
    for t in ("f16", "bf16"):
        for r in ("rn", "rz"):
            yield float_case(
                f"cvt.{r}.{t}x2.f32 d, a, b;",
                f"{t}x2",
                ("f32", "f32"),
                lambda a, b, t=t, r=r: encode(b, t, r) | encode(a, t, r) << 16,
            )
        yield float_case(f"cvt.rn.relu.{t}.f32 d, a;", t, ("f32",), lambda a, t=t: relu(encode(a, t), t))


# --- running them ------------------------------------------------------------------------------------------------

GROUPS = {
    "arithmetic": arithmetic,
    "logic": logic,
    "comparisons": comparisons,
    "floats": floats,
    "conversions": conversions,
}


def storage(type_name: str) -> str:
    """The type of a register and of memory that hold values of a type."""
    return type_name if type_name in ("f32", "f64") else f"b{32 if type_name.endswith('8') else width(type_name)}"


def kernel_text(case: Case) -> str:
    """An entry whose threads each run the case on one sample: parameters d, a, b, c, e."""
    names = "dabce"[: 1 + len(case.inputs)]
    types = [case.result, *case.inputs]
    lines = [f".visible .entry {case.kernel}({', '.join(f'.param .u64 p{n}' for n in names)})", "{"]
    lines += [".reg .pred p;", ".reg .b64 at, step;", ".reg .b32 i;", "mov.u32 i, %tid.x;"]
    lines += [f".reg .{storage(t)} {n};" for n, t in zip(names, types, strict=True)]
    for name, t in list(zip(names, types, strict=True))[1:]:
        lines += [*place(name, t), f"ld.global.{memory_type(t)} {name}, [at];"]
    lines += [case.code, *place("d", case.result), f"st.global.{storage(case.result)} [at], d;", "ret;", "}"]
    return "\n".join(lines)


def memory_type(type_name: str) -> str:
    return "u8" if type_name.endswith("8") else storage(type_name)


def place(name: str, type_name: str) -> list[str]:
    size = width(storage(type_name)) // 8 if name == "d" else ptx.SIZES[type_name]
    return [f"ld.param.u64 at, [p{name}];", f"mul.wide.u32 step, i, {size};", "add.s64 at, at, step;"]


@pytest.fixture(scope="module", params=GROUPS)
def group(request: pytest.FixtureRequest, load: Load) -> tuple[Runner, list[Case]]:
    cases = list(GROUPS[request.param]())
    return load("\n".join(kernel_text(case) for case in cases)), cases


def as_unsigned(patterns: list[int], size: int) -> np.ndarray[Any, Any]:
    return np.array(patterns, dtype=f"u{size}")


def run(machine: Runner, case: Case) -> tuple[list[list[int]], list[int]]:
    """(inputs, results) as patterns."""
    source = random.Random(case.kernel)
    inputs = [samples(t, source) for t in case.inputs]
    size = width(storage(case.result)) // 8
    out = machine.alloc(np.zeros(SAMPLES, f"u{size}"))
    arrays = [machine.alloc(as_unsigned(p, ptx.SIZES[t])) for p, t in zip(inputs, case.inputs, strict=True)]
    assert machine.launch(case.kernel, out, *arrays, threads=SAMPLES) == ""
    return inputs, [int(x) for x in out]


def agrees(case: Case, got: int, want: int) -> bool:
    t = case.result
    if t in ("u8", "s8"):  # extended to the 32-bit register
        return got == signed(want, t) % (1 << 32)
    if t.endswith("x2"):
        halves_case = Case(case.code, t[:-2], case.inputs, case.expect, case.tolerance)
        return all(agrees(halves_case, got >> s & 0xFFFF, want >> s & 0xFFFF) for s in (0, 16))
    if t not in FORMATS:
        return got == want
    f = FORMATS[t]
    if f.is_nan(want) or f.is_nan(got):
        return f.is_nan(want) and f.is_nan(got)
    if got == want or not (case.tolerance or case.absolute):
        return got == want
    x, y = decode(got, t), decode(want, t)
    return abs(x - y) <= max(case.tolerance * max(abs(y), 2.0 ** (1 - f.bias)), case.absolute)


def test_every_result_is_the_exact_one(group: tuple[Runner, list[Case]]) -> None:
    machine, cases = group
    wrong = []
    for case in cases:
        inputs, results = run(machine, case)
        for i, got in enumerate(results):
            sample = [column[i] for column in inputs]
            if case.domain < math.inf and abs(decode(sample[0], case.inputs[0])) > case.domain:
                continue
            want = case.expect(*sample)
            if not agrees(case, got, want):
                wrong.append(f"{case.code} of {[hex(s) for s in sample]}: {got:#x} instead of {want:#x}")
                break
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", GROUPS)
def test_the_snippets_are_legal(name: str, tmp_path: Path) -> None:
    assemble(HEADER + "\n".join(kernel_text(case) for case in GROUPS[name]()), tmp_path)
