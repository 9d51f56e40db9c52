"""Fused multiply-add, roots, reciprocals, transcendental functions and tests of floats."""

from __future__ import annotations

from flashladder.emulator.emitter import FLOATS, PACKED, Context, emitter
from flashladder.emulator.instructions import floats

_FUNCTIONS = {
    "ex2": "std::exp2({})",
    "lg2": "std::log2({})",
    "sin": "std::sin({})",
    "cos": "std::cos({})",
    "tanh": "std::tanh({})",
    "rsqrt": "1 / std::sqrt({})",
}
_ROUNDED = {"rcp": "quotient<{}>(f32(1), {})", "sqrt": "square_root<{}>({})"}
_NEAREST = {"rcp": "1 / {}", "sqrt": "std::sqrt({})"}
_TESTS = {
    "finite": "std::isfinite({})",
    "infinite": "std::isinf({})",
    "number": "!std::isnan({})",
    "notanumber": "std::isnan({})",
    "normal": "(std::isnormal({0}) || {0} == 0)",
    "subnormal": "std::fpclassify({}) == FP_SUBNORMAL",
}


@emitter("fma")
def fma(c: Context) -> str:
    return floats.rounded(c, "fused_multiply_add", 3)


@emitter("ex2", "lg2", "sin", "cos", "tanh", "rsqrt")
def approximation(c: Context) -> str:
    """Better than the hardware's: the C library's result, rounded once more for 16-bit floats."""
    c.modifiers.choice("approx")
    opcode, ftz = c.instruction.opcode, c.modifiers.flag("ftz")
    halves = (*FLOATS, *PACKED) if opcode in ("ex2", "tanh") else ("f32", "f64")
    type_name = c.modifiers.type(halves)
    if type_name == "f64" and opcode != "rsqrt":
        c.fail("there is no such instruction for .f64")

    def code(values: list[str]) -> str:
        value = _FUNCTIONS[opcode].format(f"widen({floats.flushed(values[0], ftz)})")
        if type_name not in ("f32", "f64"):
            value = f"round_to<{floats.scalar(type_name)}, rn>({value})"
        return floats.flushed(value, ftz)

    return floats.elementwise(c, type_name, c.operands(2), code)


@emitter("rcp", "sqrt")
def root(c: Context) -> str:
    """.approx is rounded to nearest like .rn."""
    opcode, kind = c.instruction.opcode, c.modifiers.choice("approx", *floats.ROUNDINGS)
    ftz, type_name = c.modifiers.flag("ftz"), c.modifiers.type(("f32", "f64"))
    if type_name == "f64" and kind not in ("approx", "rn"):
        c.fail(f"rounding .{kind} of .f64 is not modelled")

    def code(values: list[str]) -> str:
        value = floats.flushed(values[0], ftz)
        exact = _NEAREST[opcode].format(value) if kind in ("approx", "rn") else _ROUNDED[opcode].format(kind, value)
        return floats.flushed(exact, ftz)

    return floats.elementwise(c, type_name, c.operands(2), code)


@emitter("copysign")
def copysign(c: Context) -> str:
    type_name = c.modifiers.type(("f32", "f64"))
    return floats.elementwise(c, type_name, c.operands(3), lambda v: f"copy_sign({v[0]}, {v[1]})")


@emitter("testp")
def testp(c: Context) -> str:
    test = c.modifiers.choice(*_TESTS)
    type_name = c.modifiers.type(("f32", "f64"))
    d, a = c.operands(2)
    return c.assign(d, _TESTS[test].format(c.source(a, type_name)), "pred")
