"""Moves between registers, of special registers and of addresses."""

from __future__ import annotations

from flashladder.emulator.emitter import TYPES, Context, bits, emitter
from flashladder.emulator.ptx import Operand, Sink, Vector


@emitter("mov")
def mov(c: Context) -> str:
    """{a, b} packs or unpacks a register, low part first."""
    type_name = c.modifiers.type(TYPES)
    d, a = c.operands(2)
    if isinstance(d, Vector):
        return _unpack(c, d.elements, a, type_name)
    if isinstance(a, Vector):
        return _pack(c, d, a.elements, type_name)
    return c.assign(d, c.source(a, type_name), type_name)


def _part(c: Context, type_name: str, count: int) -> str:
    if bits(type_name) % count or bits(type_name) // count not in (8, 16, 32):
        c.fail("wrong number of registers in a vector")
    return f"u{bits(type_name) // count}"


def _unpack(c: Context, parts: tuple[Operand, ...], source: Operand, type_name: str) -> str:
    part, whole = _part(c, type_name, len(parts)), f"b{bits(type_name)}"
    writes = (
        c.assign(operand, f"{part}(t >> {bits(part) * i})", part)
        for i, operand in enumerate(parts)
        if not isinstance(operand, Sink)
    )
    return f"{{ const {whole.replace('b', 'u')} t = {c.source(source, whole)}; {' '.join(writes)} }}"


def _pack(c: Context, d: Operand, parts: tuple[Operand, ...], type_name: str) -> str:
    part, whole = _part(c, type_name, len(parts)), f"u{bits(type_name)}"
    terms = (f"{whole}({c.source(operand, part)}) << {bits(part) * i}" for i, operand in enumerate(parts))
    return c.assign(d, " | ".join(terms), whole)
