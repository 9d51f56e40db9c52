"""Conversions: cvt and cvta."""

from __future__ import annotations

from flashladder.emulator.emitter import FLOATS, HALVES, INTEGERS, PACKED, Context, bits, emitter
from flashladder.emulator.instructions import floats

_INTEGRAL = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


@emitter("cvt")
def cvt(c: Context) -> str:
    integral = _INTEGRAL.get(c.modifiers.choice(*_INTEGRAL, default=""))
    rounding = c.modifiers.choice(*floats.ROUNDINGS, default="")
    ftz, saturate, relu = (c.modifiers.flag(m) for m in ("ftz", "sat", "relu"))
    target, source = c.modifiers.types(2, (*INTEGERS, *FLOATS, *PACKED))
    if relu and (target not in (*HALVES, *PACKED) or source != "f32"):
        c.fail("only conversions from .f32 to 16-bit floats have .relu")
    if target in PACKED:
        return _pack(c, target, source, rounding, relu, saturate or ftz or integral is not None)
    d, a = c.operands(2)
    value = c.source(a, source)
    if source in FLOATS and ftz:
        value = f"flush({value})" if "f32" in (source, target) else value
    if target in INTEGERS:
        code = _to_integer(c, target, source, value, integral, saturate)
    else:
        code = _to_float(c, target, source, value, rounding, integral)
        code = floats.limited(code, ftz and target == "f32", saturate, relu)
    return c.assign(d, code, target)


def _pack(c: Context, target: str, source: str, rounding: str, relu: bool, other: bool) -> str:
    """Two floats to packed halves: the first operand becomes the high one."""
    if source != "f32" or rounding not in ("rn", "rz") or other:
        c.fail("only two .f32 are packed, by .rn or .rz")
    d, high, low = c.operands(3)
    half = floats.scalar(target)
    values = (
        floats.limited(f"narrow<{half}, {rounding}>({c.source(o, 'f32')})", False, False, relu) for o in (low, high)
    )
    return c.assign(d, f"{target}{{{', '.join(values)}}}", target)


def _to_integer(c: Context, target: str, source: str, value: str, integral: str | None, saturate: bool) -> str:
    if source in INTEGERS:
        if integral:
            c.fail("integers are not rounded to integers")
        return f"clamp<{target}>({value})" if saturate else f"{target}({value})"
    if integral is None:
        c.fail("expected a rounding to integers")
    return f"to_integer<{target}, {integral}>({value})"


def _to_float(c: Context, target: str, source: str, value: str, rounding: str, integral: str | None) -> str:
    if source in INTEGERS:
        if integral or not rounding:
            c.fail("expected a rounding")
        if target == "f64" and rounding != "rn" and bits(source) == 64:
            c.fail(f"rounding .{rounding} to .f64 is not modelled")
        return f"f64({value})" if target == "f64" else f"from_integer<{target}, {rounding}>({value})"
    if integral:
        value = f"to_integral<{integral}>(widen({value}))"
        return f"narrow<{target}, rn>({value})" if target != "f64" else value
    if target == source:
        return value
    if bits(target) > bits(source):
        return f"{target}(widen({value}))"
    if not rounding:
        c.fail("expected a rounding")
    return f"narrow<{target}, {rounding}>({value})"


@emitter("cvta")
def cvta(c: Context) -> str:
    """Generic addresses are the host's; only shared ones differ."""
    to_space = c.modifiers.flag("to")
    space = c.modifiers.choice("shared", "shared::cta", "shared::cluster", "global", "local", "const", "param")
    c.modifiers.type(("u64",))
    d, a = c.operands(2)
    value = c.source(a, "u64")
    if not space.startswith("shared"):
        return c.assign(d, value, "u64")
    return c.assign(d, f"emu::to_{'shared' if to_space else 'generic'}({value}, {c.location})", "u64")
