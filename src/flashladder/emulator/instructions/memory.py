"""Loads, stores, prefetches and questions about addresses."""

from __future__ import annotations

from flashladder.emulator.emitter import BITS, INTEGERS, Context, bits, emitter, value_type
from flashladder.emulator.ptx import Address, Operand, Sink, Symbol

SCOPES = ("cta", "cluster", "gpu", "sys")
SHARED = ("shared", "shared::cta", "shared::cluster")
_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "mmio")
_CACHES = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified"),
    *(f"L1::{hint}" for hint in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
    *(f"L2::{hint}" for hint in ("evict_normal", "evict_first", "evict_last", "64B", "128B", "256B")),
)
_DATA = (*INTEGERS, *BITS, "f32", "f64")


def space_of(c: Context) -> str:
    """ "shared", "global", "local", "const", "param", or "" for generic addresses."""
    name = c.modifiers.choice(*SHARED, "global", "local", "const", "param::entry", "param::func", "param", default="")
    return name.partition("::")[0]


def pointer(c: Context, operand: Operand, space: str, size: int, write: bool) -> str:
    """A checked C++ pointer for an access of `size` aligned bytes."""
    address = c.address(operand)
    if space in ("param", "local"):
        if static := _static_pointer(c, operand, address, size):
            return static
        name = f"own(window, {address}"
    elif space == "":
        name = f"generic(window, {address}"
    else:
        name = f"emu::{'global' if space == 'const' else space}({address}"
    return f"{name}, {size}, {size}, {'true' if write else 'false'}, {c.what}, {c.location})"


def _static_pointer(c: Context, operand: Operand, address: str, size: int) -> str | None:
    """An access to a named variable is checked here; a computed one when the kernel runs."""
    if not isinstance(operand, Address) or not isinstance(operand.base, Symbol):
        return None
    _, extent = c.symbol(operand.base)
    if extent is not None and not 0 <= operand.offset <= extent - size:
        c.fail(f"{operand.base.name} has {extent} bytes")
    return f"(void*)({address})"


def _vector_length(c: Context) -> int:
    return int(c.modifiers.choice("v2", "v4", "v8", default="v1")[1:])


def _hints(c: Context, operands: tuple[Operand, ...], least: int) -> tuple[Operand, ...]:
    """The operands without the cache policy of .L2::cache_hint; caches are not modelled."""
    c.modifiers.without_effect(_CACHES)
    has_policy = c.modifiers.flag("L2::cache_hint")
    if len(operands) != least + has_policy:
        c.fail("wrong number of operands")
    return operands[:least]


def _is_strong(c: Context) -> bool:
    """Whether another thread may be waited for: such a load lets the others run."""
    order = c.modifiers.choice(*_ORDERS, default="weak")
    c.modifiers.without_effect(SCOPES)
    return order in ("volatile", "relaxed", "acquire", "mmio")


@emitter("ld", "ldu")
def load(c: Context) -> str:
    space, length, strong = space_of(c), _vector_length(c), _is_strong(c)
    d, address = _hints(c, c.operands(2, 3), 2)
    type_name = c.modifiers.type(_DATA)
    registers, value = c.vector(d, length), value_type(type_name)
    where = pointer(c, address, space, length * bits(type_name) // 8, False)
    code = f"emu::yield({c.what}, {c.location}); " if strong else ""
    if length == 1:
        return code + c.assign(registers[0], f"load<{value}>({where})", type_name)
    reads = (
        c.assign(register, f"load<{value}>(p, {i})", type_name)
        for i, register in enumerate(registers)
        if not isinstance(register, Sink)
    )
    return f"{code}{{ const void* const p = {where}; {' '.join(reads)} }}"


@emitter("st")
def store(c: Context) -> str:
    space, length = space_of(c), _vector_length(c)
    _is_strong(c)
    address, source = _hints(c, c.operands(2, 3), 2)
    type_name = c.modifiers.type(_DATA)
    elements, value = c.vector(source, length), value_type(type_name)
    where = pointer(c, address, space, length * bits(type_name) // 8, True)
    if length == 1:
        return f"store<{value}>({where}, {c.source(elements[0], type_name)});"
    writes = (f"store<{value}>(p, {c.source(element, type_name)}, {i});" for i, element in enumerate(elements))
    return f"{{ void* const p = {where}; {' '.join(writes)} }}"


@emitter("prefetch", "prefetchu", "applypriority", "cp.async.bulk.prefetch")
def prefetch(c: Context) -> str:
    """Caches are not modelled."""
    c.modifiers.left.clear()
    return ";"


@emitter("createpolicy")
def createpolicy(c: Context) -> str:
    """A cache policy, which nothing reads."""
    c.modifiers.left.clear()
    return c.assign(c.instruction.operands[0], "0", "b64")


@emitter("isspacep")
def isspacep(c: Context) -> str:
    space = c.modifiers.choice("shared", "shared::cta", "global", "local")
    d, a = c.operands(2)
    address = c.source(a, "u64")
    tests = {
        "global": f"!is_shared({address}) && !is_local(window, {address})",
        "local": f"is_local(window, {address})",
    }
    return c.assign(d, tests.get(space, f"is_shared({address})"), "pred")


def shared_address(c: Context, operand: Operand) -> str:
    """An address in the shared window; without a state space modifier the operand is a generic one."""
    spaces = [m for m in c.modifiers.left if m in SHARED]
    for space in spaces:
        c.modifiers.flag(space)
    address = c.address(operand)
    named = isinstance(operand, Address) and isinstance(operand.base, Symbol)
    return address if named or spaces else f"emu::to_shared({address}, {c.location})"


@emitter("mapa")
def mapa(c: Context) -> str:
    in_window = c.modifiers.choice(*SHARED, default="") != ""
    type_name = c.modifiers.type(("u32", "u64"))
    d, a, rank = c.operands(3)
    address = c.source(a, type_name)
    inside = address if in_window or isinstance(a, Symbol) else f"emu::to_shared({address}, {c.location})"
    value = f"emu::map_to_rank({inside}, {c.source(rank, 'u32')}, {c.location})"
    return c.assign(d, value if in_window else f"emu::to_generic({value}, {c.location})", type_name)


@emitter("getctarank")
def getctarank(c: Context) -> str:
    in_window = c.modifiers.choice(*SHARED, default="") != ""
    type_name = c.modifiers.type(("u32", "u64"))
    d, a = c.operands(2)
    address = c.source(a, type_name)
    inside = address if in_window else f"emu::to_shared({address}, {c.location})"
    return c.assign(d, f"rank_of({inside}, {c.location})", "u32")
