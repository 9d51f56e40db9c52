"""Atomics: atom and red."""

from __future__ import annotations

from flashladder.emulator.emitter import FLOATS, PACKED, Context, bits, emitter, unsigned, value_type
from flashladder.emulator.instructions import floats
from flashladder.emulator.instructions.memory import SCOPES, SHARED
from flashladder.emulator.ptx import Operand

_WORDS = ("u32", "s32", "u64", "s64", "b32", "b64")
_CODES = {
    "and": "x & v",
    "or": "x | v",
    "xor": "x ^ v",
    "exch": "v",
    "min": "x < v ? x : v",
    "max": "x > v ? x : v",
    "inc": "x >= v ? 0 : x + 1",
    "dec": "x == 0 || x > v ? v : x - 1",
}
_TYPES = {
    "add": ("u32", "s32", "u64", "s64", "f32", "f64", "f16", "bf16", *PACKED),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "cas": ("b16", "b32", "b64"),
}


def _sum(type_name: str) -> str:
    if type_name in PACKED:
        half = floats.scalar(type_name)
        return f"each<{half}>([]({half} a, {half} b) {{ return add<rn>(a, b); }}, x, v)"
    if type_name in FLOATS and type_name not in ("f32", "f64"):
        return "add<rn>(x, v)"
    return "x + v" if type_name in FLOATS else f"{type_name}({unsigned(type_name)}(x) + {unsigned(type_name)}(v))"


def _place(c: Context, address: Operand, type_name: str) -> str:
    space = c.modifiers.choice(*SHARED, "global", default="")
    is_shared = "true" if space.startswith("shared") else "false"
    return f"emu::atomic({c.address(address)}, {bits(type_name) // 8}, {is_shared}, {c.what}, {c.location})"


def _operation(c: Context) -> tuple[str, str, tuple[Operand, ...]]:
    """(operation, type, operands); a cache policy is dropped."""
    c.modifiers.choice("relaxed", "acquire", "release", "acq_rel", default="relaxed")
    c.modifiers.without_effect((*SCOPES, "noftz"))
    name = c.modifiers.choice("add", "cas", *_CODES)
    type_name = c.modifiers.type(_TYPES.get(name, _WORDS))
    operands = c.instruction.operands
    return name, type_name, operands[:-1] if c.modifiers.flag("L2::cache_hint") else operands


def _update(c: Context, name: str, type_name: str, address: Operand, values: tuple[Operand, ...]) -> str:
    if len(values) != (2 if name == "cas" else 1):
        c.fail("wrong number of operands")
    value = value_type(type_name)
    if name == "cas":
        expected, new = c.sources(values, type_name)
        body = f"x == {expected} ? {new} : x"
    else:
        code = _sum(type_name) if name == "add" else _CODES[name]
        body = f"[&]({value} v) -> {value} {{ return {code}; }}({c.source(values[0], type_name)})"
    return f"update<{value}>({_place(c, address, type_name)}, [&]({value} x) -> {value} {{ return {body}; }})"


@emitter("atom")
def atom(c: Context) -> str:
    """One that may be polled lets the other threads run first."""
    name, type_name, (d, address, *values) = _operation(c)
    code = c.assign(d, _update(c, name, type_name, address, tuple(values)), type_name)
    return f"emu::yield({c.what}, {c.location}); {code}" if name in ("cas", "exch") else code


@emitter("red")
def red(c: Context) -> str:
    name, type_name, (address, *values) = _operation(c)
    if name in ("cas", "exch"):
        c.fail("there is no such reduction")
    return f"{_update(c, name, type_name, address, tuple(values))};"
