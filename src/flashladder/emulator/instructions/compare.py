"""Comparisons: setp and set."""

from __future__ import annotations

from flashladder.emulator.emitter import BITS, FLOATS, INTEGERS, PACKED, Context, emitter
from flashladder.emulator.instructions import floats
from flashladder.emulator.ptx import Operand, Sink

_ORDERED = {"eq": "{} == {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}"}
_INTEGER = {**_ORDERED, "ne": "{} != {}", "lo": "{} < {}", "ls": "{} <= {}", "hi": "{} > {}", "hs": "{} >= {}"}
_FLOAT = {
    **_ORDERED,
    "ne": "({0} < {1} || {0} > {1})",
    "equ": "!({0} < {1} || {0} > {1})",
    "neu": "{} != {}",
    "ltu": "!({} >= {})",
    "leu": "!({} > {})",
    "gtu": "!({} <= {})",
    "geu": "!({} < {})",
    "num": "({0} == {0} && {1} == {1})",
    "nan": "({0} != {0} || {1} != {1})",
}
_COMBINE = {"and": "&&", "or": "||", "xor": "!="}
_SOURCES = (*INTEGERS, *BITS, *FLOATS, *PACKED)


def _comparison(c: Context, name: str, type_name: str, ftz: bool, values: list[str]) -> str:
    """One comparison of scalars as a C++ expression."""
    table = _FLOAT if type_name in FLOATS else _INTEGER
    if name not in table:
        c.fail(f"comparison .{name} of .{type_name} is not modelled")
    if type_name in FLOATS:
        values = [f"widen({floats.flushed(value, ftz)})" for value in values]
    return table[name].format(*values)


def _halves(c: Context, type_name: str, operand: Operand) -> list[str]:
    value = c.source(operand, type_name)
    return [f"{value}.low", f"{value}.high"] if type_name in PACKED else [value]


def _read(c: Context, type_name: str, operands: tuple[Operand, ...], name: str, ftz: bool) -> list[str]:
    """The comparison of every element of the operands."""
    a, b = (_halves(c, type_name, operand) for operand in operands)
    scalar = floats.scalar(type_name)
    return [_comparison(c, name, scalar, ftz, [x, y]) for x, y in zip(a, b, strict=True)]


def _combined(c: Context, test: str, operator: str | None, extra: list[Operand]) -> str:
    return f"({test}) {_COMBINE[operator]} {c.source(extra[0], 'pred')}" if operator and extra else test


def _parse(c: Context) -> tuple[str, str | None, bool]:
    """(comparison, combining operator, ftz)"""
    name = c.modifiers.choice(*{**_INTEGER, **_FLOAT})
    operator = c.modifiers.choice(*_COMBINE, default="") or None
    return name, operator, c.modifiers.flag("ftz")


@emitter("setp")
def setp(c: Context) -> str:
    """p|q: q is the comparison's opposite, or, of packed halves, that of the high ones."""
    name, operator, ftz = _parse(c)
    type_name = c.modifiers.type(_SOURCES)
    destination, a, b, *extra = c.operands(4 if operator else 3)
    first, second = c.pair(destination)
    tests = _read(c, type_name, (a, b), name, ftz)
    if second is None:
        return c.assign(first, _combined(c, tests[0], operator, extra), "pred")
    other = tests[1] if type_name in PACKED else "!t"
    results = _combined(c, "t", operator, extra), _combined(c, other, operator, extra)
    code = f"{{ const bool t = {tests[0]}; const bool p = {results[0]}, q = {results[1]};"
    parts = ((first, "p"), (second, "q"))
    return " ".join([code, *(c.assign(o, v, "pred") for o, v in parts if not isinstance(o, Sink)), "}"])


@emitter("set")
def set_(c: Context) -> str:
    """All ones or 1.0 where the comparison holds, else zero."""
    name, operator, ftz = _parse(c)
    result, type_name = c.modifiers.types(2, _SOURCES)
    destination, a, b, *extra = c.operands(4 if operator else 3)
    tests = [_combined(c, t, operator, extra) for t in _read(c, type_name, (a, b), name, ftz)]
    if result in PACKED:
        half = floats.scalar(result)
        low, high = (f"narrow<{half}, rn>(f32({t}))" for t in tests)
        return c.assign(destination, f"{result}{{{low}, {high}}}", result)
    if type_name in PACKED:
        low, high = (f"({t} ? {mask}u : 0u)" for t, mask in zip(tests, ("0xffff", "0xffff0000"), strict=True))
        return c.assign(destination, f"{low} | {high}", "u32")
    if result in ("f16", "bf16"):
        return c.assign(destination, f"narrow<{result}, rn>(f32({tests[0]}))", result)
    if result == "f32":
        return c.assign(destination, f"f32({tests[0]})", "f32")
    return c.assign(destination, f"{tests[0]} ? {result}(-1) : {result}(0)", result)
