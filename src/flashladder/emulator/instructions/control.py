"""Branches, calls, exits, and instructions that only concern scheduling."""

from __future__ import annotations

from flashladder.emulator.emitter import Context, emitter
from flashladder.emulator.ptx import Group, Operand, Symbol

_FAULTS = {"__assertfail": "a device assertion failed", "abort": "abort() was called"}


def _name(c: Context, operand: Operand) -> str:
    if not isinstance(operand, Symbol) or operand.offset:
        c.fail("expected a name")
    return operand.name


@emitter("bra")
def bra(c: Context) -> str:
    c.modifiers.flag("uni")
    (target,) = c.operands(1)
    return f"goto {c.label(_name(c, target))};"


@emitter("brx.idx")
def brx(c: Context) -> str:
    c.modifiers.flag("uni")
    index, table = c.operands(2)
    targets = c.names.branch_targets(_name(c, table))
    if targets is None:
        c.fail("unknown branch targets")
    cases = " ".join(f"case {i}: goto {c.label(target)};" for i, target in enumerate(targets))
    return (
        f'switch ({c.source(index, "u32")}) {{ {cases} default: emu::fail({c.location}, "brx.idx: no such target"); }}'
    )


@emitter("ret")
def ret(c: Context) -> str:
    c.modifiers.flag("uni")
    c.operands(0)
    return "return;" if c.names.is_entry else "return false;"


@emitter("exit")
def exit_(c: Context) -> str:
    c.operands(0)
    return "return;" if c.names.is_entry else "return true;"


@emitter("trap", "brkpt")
def trap(c: Context) -> str:
    c.operands(0)
    return f"emu::fail({c.location}, {c.what});"


@emitter("call")
def call(c: Context) -> str:
    """Device functions get the addresses of their results and parameters, and tell whether the thread exited."""
    c.modifiers.flag("uni")
    operands = list(c.operands(1, 3))
    results = operands.pop(0) if isinstance(operands[0], Group) else Group(())
    name = _name(c, operands.pop(0))
    arguments = operands[0] if operands else Group(())
    if name in _FAULTS:
        return f'emu::fail({c.location}, "{_FAULTS[name]}");'
    if name == "vprintf":
        return " ".join(f"store<u32>((void*){c.source(r, 'u64')}, 0);" for r in c.vector(results))
    function = c.names.function(name)
    if function is None or function.body is None:
        c.fail(f"function {name} is not modelled")
    places = [c.source(o, "u64") for o in (*c.vector(results), *c.vector(arguments))]
    if len(places) != len(function.results) + len(function.parameters):
        c.fail("wrong number of arguments")
    exited = "return" if c.names.is_entry else "return true"
    return f"if ({c.names.function_name(name)}({', '.join(('window', *places))})) {exited};"


@emitter("nanosleep")
def nanosleep(c: Context) -> str:
    c.modifiers.type(("u32",))
    c.operands(1)
    return f"emu::yield({c.what}, {c.location});"


@emitter("griddepcontrol")
def griddepcontrol(c: Context) -> str:
    """Grids run one after the other. The runtime faults what an early grid accesses before it waits."""
    which = c.modifiers.choice("launch_dependents", "wait")
    c.operands(0)
    return "emu::wait_for_grids_ahead();" if which == "wait" else ";"


@emitter("pmevent")
def pmevent(c: Context) -> str:
    """Performance events are not modelled."""
    c.modifiers.flag("mask")
    c.operands(1)
    return ";"
