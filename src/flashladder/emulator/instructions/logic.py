"""Bitwise logic, shifts and bit fields."""

from __future__ import annotations

from flashladder.emulator.emitter import BITS, INTEGERS, Context, bits, emitter
from flashladder.emulator.ptx import Immediate

_WORDS = ("b16", "b32", "b64")
_NUMBERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_OPERATORS = {"and": ("&", "&&"), "or": ("|", "||"), "xor": ("^", "!=")}


@emitter("and", "or", "xor")
def bitwise(c: Context) -> str:
    type_name = c.modifiers.type(("pred", *_WORDS))
    d, a, b = c.operands(3)
    operator = _OPERATORS[c.instruction.opcode][type_name == "pred"]
    return c.assign(d, f"{c.source(a, type_name)} {operator} {c.source(b, type_name)}", type_name)


@emitter("not")
def invert(c: Context) -> str:
    type_name = c.modifiers.type(("pred", *_WORDS))
    d, a = c.operands(2)
    return c.assign(d, f"{'!' if type_name == 'pred' else '~'}{c.source(a, type_name)}", type_name)


@emitter("cnot")
def cnot(c: Context) -> str:
    type_name = c.modifiers.type(_WORDS)
    d, a = c.operands(2)
    return c.assign(d, f"{c.source(a, type_name)} == 0", type_name)


@emitter("lop3")
def lop3(c: Context) -> str:
    c.modifiers.type(("b32",))
    d, x, y, z, table = c.operands(5)
    values = ", ".join(c.sources((x, y, z), "u32"))
    return c.assign(d, f"lop3({values}, {c.literal(table)})", "u32")


@emitter("shl", "shr")
def shift(c: Context) -> str:
    type_name = c.modifiers.type((*_WORDS, *_NUMBERS))
    d, a, n = c.operands(3)
    value, left = c.source(a, type_name), c.instruction.opcode == "shl"
    if isinstance(n, Immediate) and 0 <= n.value < bits(type_name):
        return c.assign(d, f"{value} {'<<' if left else '>>'} {n.value}", type_name)
    return c.assign(d, f"shift_{'left' if left else 'right'}({value}, {c.source(n, 'u32')})", type_name)


@emitter("shf")
def funnel_shift(c: Context) -> str:
    direction, wrap = c.modifiers.choice("l", "r"), c.modifiers.choice("wrap", "clamp") == "wrap"
    c.modifiers.type(("b32",))
    d, low, high, n = c.operands(4)
    amount = c.source(n, "u32")
    amount = f"{amount} & 31" if wrap else f"({amount} < 32 ? {amount} : 32)"
    name = "funnel_left" if direction == "l" else "funnel_right"
    return c.assign(d, f"{name}({c.source(low, 'u32')}, {c.source(high, 'u32')}, {amount})", "u32")


@emitter("popc")
def popc(c: Context) -> str:
    type_name = c.modifiers.type(("b32", "b64"))
    d, a = c.operands(2)
    return c.assign(d, f"__builtin_popcountll({c.source(a, type_name)})", "u32")


@emitter("clz")
def clz(c: Context) -> str:
    type_name = c.modifiers.type(("b32", "b64"))
    d, a = c.operands(2)
    return c.assign(d, f"leading_zeros({c.source(a, type_name)})", "u32")


@emitter("brev")
def brev(c: Context) -> str:
    type_name = c.modifiers.type(("b32", "b64"))
    d, a = c.operands(2)
    return c.assign(d, f"reverse_bits({c.source(a, type_name)})", type_name)


@emitter("bfind")
def bfind(c: Context) -> str:
    as_shift = "true" if c.modifiers.flag("shiftamt") else "false"
    type_name = c.modifiers.type(("u32", "s32", "u64", "s64"))
    d, a = c.operands(2)
    return c.assign(d, f"find_bit({c.source(a, type_name)}, {as_shift})", "u32")


@emitter("bfe")
def bfe(c: Context) -> str:
    type_name = c.modifiers.type(("u32", "s32", "u64", "s64"))
    d, a, position, length = c.operands(4)
    value = f"bit_field({c.source(a, type_name)}, {c.source(position, 'u32')}, {c.source(length, 'u32')})"
    return c.assign(d, value, type_name)


@emitter("bfi")
def bfi(c: Context) -> str:
    type_name = c.modifiers.type(("b32", "b64"))
    d, a, b, position, length = c.operands(5)
    values = ", ".join((*c.sources((a, b), type_name), *c.sources((position, length), "u32")))
    return c.assign(d, f"insert_field({values})", type_name)


@emitter("prmt")
def prmt(c: Context) -> str:
    c.modifiers.type(("b32",))
    d, a, b, selector = c.operands(4)
    return c.assign(d, f"permute({', '.join(c.sources((a, b, selector), 'u32'))})", "u32")


@emitter("selp")
def selp(c: Context) -> str:
    type_name = c.modifiers.type((*_WORDS, *_NUMBERS, "f32", "f64"))
    d, a, b, p = c.operands(4)
    x, y = c.sources((a, b), type_name)
    return c.assign(d, f"{c.source(p, 'pred')} ? {x} : {y}", type_name)


@emitter("slct")
def slct(c: Context) -> str:
    """a if c >= 0, else b"""
    ftz = c.modifiers.flag("ftz")
    type_name, selector = c.modifiers.types(2, (*BITS, *INTEGERS, "f32", "f64"))
    if selector not in ("s32", "f32"):
        c.fail(f"a selector of type .{selector} is not modelled")
    d, a, b, s = c.operands(4)
    value = c.source(s, selector)
    value = f"flush({value})" if ftz else value
    return c.assign(d, f"{value} >= 0 ? {c.source(a, type_name)} : {c.source(b, type_name)}", type_name)


@emitter("szext")
def szext(c: Context) -> str:
    """Sign- or zero-extends the low b bits."""
    wrap = c.modifiers.choice("wrap", "clamp") == "wrap"
    type_name = c.modifiers.type(("u32", "s32"))
    d, a, n = c.operands(3)
    length = c.source(n, "u32")
    length = f"{length} & 31" if wrap else f"({length} < 32 ? {length} : 32)"
    return c.assign(d, f"bit_field({c.source(a, type_name)}, 0, {length})", type_name)


@emitter("bmsk")
def bmsk(c: Context) -> str:
    """b ones from position a"""
    wrap = c.modifiers.choice("wrap", "clamp") == "wrap"
    c.modifiers.type(("b32",))
    d, position, length = c.operands(3)
    a, b = c.sources((position, length), "u32")
    if wrap:
        a, b = f"{a} & 31", f"{b} & 31"
    else:
        a, b = (f"({x} < 32 ? {x} : 32)" for x in (a, b))
    return c.assign(d, f"insert_field(~0u, 0u, {a}, {b})", "u32")
