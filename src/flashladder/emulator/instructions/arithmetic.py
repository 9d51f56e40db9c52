"""Integer arithmetic; add, sub, mul, fma, div, min, max, neg and abs also of floats."""

from __future__ import annotations

from collections.abc import Callable

from flashladder.emulator.emitter import FLOATS, INTEGERS, PACKED, Context, bits, emitter, unsigned
from flashladder.emulator.instructions import floats
from flashladder.emulator.ptx import Operand


def _wide(type_name: str) -> str:
    return f"{type_name[0]}{2 * bits(type_name)}"


def _modular(c: Context, operands: tuple[Operand, ...], type_name: str, code: str) -> str:
    """Arithmetic modulo 2^bits on the operands after the first, as unsigned integers."""
    values = [
        f"u32({value})" if bits(type_name) < 32 else value for value in c.sources(operands[1:], unsigned(type_name))
    ]
    return c.assign(operands[0], code.format(*values), unsigned(type_name))


def _is_float(type_name: str) -> bool:
    return type_name in (*FLOATS, *PACKED)


def _with_carry(c: Context, name: str, carry_in: bool) -> str:
    """add.cc, addc, sub.cc, subc"""
    carry_out = c.modifiers.flag("cc") or not carry_in
    type_name = unsigned(c.modifiers.type(("u32", "s32", "u64", "s64")))
    d, a, b = c.operands(3)
    carry = c.names.use_carry()
    before, after = carry if carry_in else "false", f"&{carry}" if carry_out else "nullptr"
    return c.assign(d, f"{name}({c.source(a, type_name)}, {c.source(b, type_name)}, {before}, {after})", type_name)


def _saturated(c: Context, sign: str) -> str:
    d, a, b = c.operands(3)
    return c.assign(d, f"clamp<s32>(s64{{{c.source(a, 's32')}}} {sign} {c.source(b, 's32')})", "s32")


def _add_or_sub(c: Context, sign: str, name: str, with_carry: str) -> str:
    types = [m for m in c.modifiers.left if m in (*INTEGERS, *FLOATS, *PACKED)]
    if types and _is_float(types[-1]):
        return floats.rounded(c, name, 2)
    if "cc" in c.modifiers.left:
        return _with_carry(c, with_carry, False)
    if c.modifiers.flag("sat"):
        c.modifiers.type(("s32",))
        return _saturated(c, sign)
    return _modular(c, c.operands(3), c.modifiers.type(INTEGERS), f"{{}} {sign} {{}}")


@emitter("add")
def add(c: Context) -> str:
    return _add_or_sub(c, "+", "add", "add_with_carry")


@emitter("sub")
def sub(c: Context) -> str:
    return _add_or_sub(c, "-", "sub", "sub_with_borrow")


@emitter("addc")
def addc(c: Context) -> str:
    return _with_carry(c, "add_with_carry", True)


@emitter("subc")
def subc(c: Context) -> str:
    return _with_carry(c, "sub_with_borrow", True)


def _product(c: Context, type_name: str, a: Operand, b: Operand) -> tuple[str, str]:
    """The lo, hi or wide product of two integers, and its type."""
    part = c.modifiers.choice("lo", "hi", "wide")
    x, y = c.sources((a, b), type_name)
    if part == "wide":
        wide = _wide(type_name)
        return f"{wide}({x}) * {wide}({y})", wide
    if part == "hi":
        return f"mul_high<{type_name}>({x}, {y})", type_name
    same = unsigned(type_name)
    narrow = "u32" if bits(same) < 32 else same
    return f"{narrow}({x}) * {narrow}({y})", same


@emitter("mul")
def mul(c: Context) -> str:
    if _is_float(c.modifiers.left[-1]):
        return floats.rounded(c, "multiply", 2)
    type_name = c.modifiers.type(("u16", "s16", "u32", "s32", "u64", "s64"))
    d, a, b = c.operands(3)
    code, result = _product(c, type_name, a, b)
    return c.assign(d, code, result)


@emitter("mad")
def mad(c: Context) -> str:
    if _is_float(c.modifiers.left[-1]):
        return floats.rounded(c, "fused_multiply_add", 3)
    if "cc" in c.modifiers.left:
        return _mad_with_carry(c, False)
    saturate = c.modifiers.flag("sat")
    type_name = c.modifiers.type(("u16", "s16", "u32", "s32", "u64", "s64"))
    d, a, b, addend = c.operands(4)
    code, result = _product(c, type_name, a, b)
    if saturate:
        if (type_name, result, code.startswith("mul_high")) != ("s32", "s32", True):
            c.fail("only mad.hi.sat.s32 saturates")
        return c.assign(d, f"clamp<s32>(s64{{{code}}} + {c.source(addend, 's32')})", "s32")
    result = unsigned(result)
    return c.assign(d, f"{result}({code}) + {c.source(addend, result)}", result)


def _mad_with_carry(c: Context, carry_in: bool) -> str:
    carry_out = c.modifiers.flag("cc") or not carry_in
    type_name = c.modifiers.type(("u32", "s32", "u64", "s64"))
    d, a, b, addend = c.operands(4)
    if "wide" in c.modifiers.left:
        c.fail("only the lo and hi products carry")
    code, _ = _product(c, type_name, a, b)
    result, carry = unsigned(type_name), c.names.use_carry()
    before, after = carry if carry_in else "false", f"&{carry}" if carry_out else "nullptr"
    value = f"add_with_carry({result}({code}), {c.source(addend, result)}, {before}, {after})"
    return c.assign(d, value, result)


@emitter("madc")
def madc(c: Context) -> str:
    return _mad_with_carry(c, True)


@emitter("mul24", "mad24")
def mul24(c: Context) -> str:
    """The low 32 bits of a 24-bit product."""
    c.modifiers.choice("lo")
    type_name = c.modifiers.type(("u32", "s32"))
    is_mad = c.instruction.opcode == "mad24"
    d, a, b, *addend = c.operands(4 if is_mad else 3)
    x, y = (f"u32(bit_field({c.source(o, type_name)}, 0, 24))" for o in (a, b))
    return c.assign(d, f"{x} * {y}" + "".join(f" + {c.source(o, 'u32')}" for o in addend), "u32")


@emitter("div")
def div(c: Context) -> str:
    if _is_float(c.modifiers.left[-1]):
        return floats.divide(c)
    return _checked_division(c, "divide")


@emitter("rem")
def rem(c: Context) -> str:
    return _checked_division(c, "remainder")


def _checked_division(c: Context, name: str) -> str:
    type_name = c.modifiers.type(("u16", "s16", "u32", "s32", "u64", "s64"))
    d, a, b = c.operands(3)
    return c.assign(d, f"{name}({c.source(a, type_name)}, {c.source(b, type_name)}, {c.location})", type_name)


def _extremum(c: Context, compare: str, name: str) -> str:
    if _is_float(c.modifiers.left[-1]):
        return floats.extremum(c, name)
    relu = c.modifiers.flag("relu")
    type_name = c.modifiers.type(("u16", "s16", "u32", "s32", "u64", "s64"))
    d, a, b = c.operands(3)
    x, y = c.sources((a, b), type_name)
    value = f"{x} {compare} {y} ? {x} : {y}"
    if not relu:
        return c.assign(d, value, type_name)
    if type_name != "s32":
        c.fail("only s32 has .relu")
    return f"{{ const s32 t = {value}; {c.assign(d, 't < 0 ? 0 : t', 's32')} }}"


@emitter("min")
def minimum(c: Context) -> str:
    return _extremum(c, "<", "minimum")


@emitter("max")
def maximum(c: Context) -> str:
    return _extremum(c, ">", "maximum")


def _unary(c: Context, name: str, integer: Callable[[str, str], str]) -> str:
    if _is_float(c.modifiers.left[-1]):
        return floats.unary(c, name)
    type_name = c.modifiers.type(("s16", "s32", "s64"))
    d, a = c.operands(2)
    return c.assign(d, integer(c.source(a, type_name), unsigned(type_name)), unsigned(type_name))


@emitter("neg")
def neg(c: Context) -> str:
    return _unary(c, "negate", lambda x, u: f"{u}(0) - {u}({x})")


@emitter("abs")
def absolute(c: Context) -> str:
    return _unary(c, "absolute", lambda x, u: f"{x} < 0 ? {u}(0) - {u}({x}) : {u}({x})")


@emitter("sad")
def sad(c: Context) -> str:
    """c + |a - b|"""
    type_name = c.modifiers.type(("u16", "s16", "u32", "s32", "u64", "s64"))
    d, a, b, addend = c.operands(4)
    x, y, u = c.source(a, type_name), c.source(b, type_name), unsigned(type_name)
    return c.assign(d, f"{c.source(addend, u)} + ({x} < {y} ? {u}({y}) - {u}({x}) : {u}({x}) - {u}({y}))", u)


@emitter("dp4a")
def dp4a(c: Context) -> str:
    """c + the dot product of four bytes."""
    first, second = c.modifiers.types(2, ("u32", "s32"))
    d, a, b, addend = c.operands(4)
    x, y, z = c.sources((a, b, addend), "u32")
    return c.assign(d, f"dot4<{first[0]}8, {second[0]}8>({x}, {y}, {z})", "u32")
