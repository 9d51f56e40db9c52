"""What the emitters of float instructions share: flushing, rounding, saturation, and packed halves."""

from __future__ import annotations

from collections.abc import Callable

from flashladder.emulator.emitter import FLOATS, HALVES, PACKED, Context
from flashladder.emulator.ptx import Operand

ROUNDINGS = ("rn", "rz", "rm", "rp")
_NATIVE = {"add": "{} + {}", "sub": "{} - {}", "multiply": "{} * {}", "fused_multiply_add": "std::fma({}, {}, {})"}


def scalar(type_name: str) -> str:
    """The type of one half of a packed type."""
    return type_name.removesuffix("x2")


def elementwise(
    c: Context, type_name: str, operands: tuple[Operand, ...], code: Callable[[list[str]], str], result: str = ""
) -> str:
    """Assigns code(sources) to the first operand; for packed types, code is applied to each half."""
    values = c.sources(operands[1:], type_name)
    result = result or type_name
    if type_name not in PACKED:
        return c.assign(operands[0], code(values), result)
    names = [f"x{i}" for i in range(len(values))]
    parameters = ", ".join(f"{scalar(type_name)} {name}" for name in names)
    body = f"[&]({parameters}) {{ return {code(names)}; }}"
    return c.assign(operands[0], f"each<{scalar(result)}>({body}, {', '.join(values)})", result)


def rounded(c: Context, name: str, count: int) -> str:
    """add, sub, mul, fma"""
    rounding = c.modifiers.choice(*ROUNDINGS, default="rn")
    ftz, saturate, relu = (c.modifiers.flag(m) for m in ("ftz", "sat", "relu"))
    type_name = c.modifiers.type((*FLOATS, *PACKED))
    if rounding != "rn" and type_name != "f32":
        c.fail(f"rounding .{rounding} of .{type_name} is not modelled")

    def code(values: list[str]) -> str:
        inputs = [flushed(value, ftz) for value in values]
        return limited(_operation(name, rounding, scalar(type_name), inputs), ftz, saturate, relu)

    return elementwise(c, type_name, c.operands(count + 1), code)


def _operation(name: str, rounding: str, type_name: str, inputs: list[str]) -> str:
    if rounding == "rn" and type_name not in HALVES:
        return _NATIVE[name].format(*inputs)
    if name == "sub":
        return f"add<{rounding}>({inputs[0]}, negate({inputs[1]}))"
    return f"{name}<{rounding}>({', '.join(inputs)})"


def flushed(value: str, ftz: bool) -> str:
    return f"flush({value})" if ftz else value


def limited(value: str, ftz: bool, saturate: bool = False, relu: bool = False) -> str:
    """The result's .ftz, .sat and .relu."""
    value = flushed(value, ftz)
    if saturate:
        value = f"saturate({value})"
    return f"relu({value})" if relu else value


def divide(c: Context) -> str:
    """div.approx, div.full and the correctly rounded ones"""
    kind = c.modifiers.choice("approx", "full", *ROUNDINGS)
    ftz, type_name = c.modifiers.flag("ftz"), c.modifiers.type(("f32", "f64"))
    if type_name == "f64" and kind != "rn":
        c.fail(f"rounding .{kind} of .f64 is not modelled")
    template = {"approx": "divide_approx({}, {})", "full": "{} / {}", "rn": "{} / {}"}.get(
        kind, f"quotient<{kind}>({{}}, {{}})"
    )
    return elementwise(
        c, type_name, c.operands(3), lambda values: flushed(template.format(*(flushed(v, ftz) for v in values)), ftz)
    )


def extremum(c: Context, name: str) -> str:
    """min, max"""
    ftz, nan_wins = c.modifiers.flag("ftz"), c.modifiers.flag("NaN")
    type_name = c.modifiers.type((*FLOATS, *PACKED))

    def code(values: list[str]) -> str:
        return f"{name}<{'true' if nan_wins else 'false'}>({', '.join(flushed(v, ftz) for v in values)})"

    return elementwise(c, type_name, c.operands(3), code)


def unary(c: Context, name: str) -> str:
    """neg, abs"""
    ftz, type_name = c.modifiers.flag("ftz"), c.modifiers.type((*FLOATS, *PACKED))
    return elementwise(c, type_name, c.operands(2), lambda values: f"{name}({flushed(values[0], ftz)})")
