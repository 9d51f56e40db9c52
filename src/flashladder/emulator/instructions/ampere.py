"""Asynchronous copies and matrix instructions of a warp."""

from __future__ import annotations

from flashladder.emulator.emitter import Context, emitter
from flashladder.emulator.instructions.memory import shared_address
from flashladder.emulator.ptx import Operand, Register

HALF = {"f16": "emu::Half::fp16", "bf16": "emu::Half::bf16"}
_PREFETCHES = ("L2::64B", "L2::128B", "L2::256B")


# --- cp.async ----------------------------------------------------------------------------------------------------


@emitter("cp.async")
def cp_async(c: Context) -> str:
    c.modifiers.choice("ca", "cg")
    c.modifiers.choice("shared", "shared::cta")
    c.modifiers.choice("global")
    c.modifiers.without_effect(_PREFETCHES)
    operands = list(c.operands(3, 5))
    if c.modifiers.flag("L2::cache_hint"):
        operands.pop()
    target, source, size, *extra = operands
    copied = _copied_bytes(c, c.literal(size), extra)
    return f"emu::cp_async({c.address(target)}, {c.address(source)}, {c.literal(size)}, {copied}, {c.location});"


def _copied_bytes(c: Context, size: int, extra: list[Operand]) -> str:
    """The bytes that are read; the rest of the target gets zeros."""
    if not extra:
        return str(size)
    if len(extra) > 1:
        c.fail("wrong number of operands")
    if isinstance(extra[0], Register) and extra[0].type == "pred":
        return f"({c.source(extra[0], 'pred')} ? 0 : {size})"
    return c.source(extra[0], "u32")


@emitter("cp.async.commit_group")
def cp_async_commit(c: Context) -> str:
    c.operands(0)
    return f"emu::cp_async_commit({c.location});"


@emitter("cp.async.wait_group")
def cp_async_wait(c: Context) -> str:
    (left,) = c.operands(1)
    return f"emu::cp_async_wait({c.literal(left)}, {c.location});"


@emitter("cp.async.wait_all")
def cp_async_wait_all(c: Context) -> str:
    c.operands(0)
    return f"emu::cp_async_wait(-1, {c.location});"


@emitter("cp.async.mbarrier.arrive")
def cp_async_mbarrier_arrive(c: Context) -> str:
    noinc = "true" if c.modifiers.flag("noinc") else "false"
    c.modifiers.type(("b64",))
    (address,) = c.operands(1)
    return f"emu::cp_async_mbarrier_arrive({shared_address(c, address)}, {noinc}, {c.location});"


# --- matrices ----------------------------------------------------------------------------------------------------


def _matrix_shape(c: Context) -> tuple[int, str]:
    for name in ("sync", "aligned", "m8n8"):
        c.modifiers.choice(name)
    count = int(c.modifiers.choice("x1", "x2", "x4")[1:])
    transposed = "true" if c.modifiers.flag("trans") else "false"
    c.modifiers.type(("b16",))
    return count, transposed


@emitter("ldmatrix")
def ldmatrix(c: Context) -> str:
    count, transposed = _matrix_shape(c)
    d, address = c.operands(2)
    registers = c.vector(d, count)
    call = f"emu::ldmatrix(r, {count}, {transposed}, {shared_address(c, address)}, {c.location});"
    return f"{{ u32 r[{count}]; {call} {c.assign_array(registers, 'r', 'u32')} }}"


@emitter("stmatrix")
def stmatrix(c: Context) -> str:
    count, transposed = _matrix_shape(c)
    address, source = c.operands(2)
    values = c.array("r", "u32", c.vector(source, count))
    return f"{{ {values} emu::stmatrix(r, {count}, {transposed}, {shared_address(c, address)}, {c.location}); }}"


@emitter("mma.sync.aligned")
def mma(c: Context) -> str:
    depth = int(c.modifiers.choice("m16n8k16", "m16n8k8").rpartition("k")[2])
    c.modifiers.choice("row")
    c.modifiers.choice("col")
    types = tuple(c.modifiers.types(4))
    d, a, b, accumulator = c.operands(4)
    packed = types == ("f16", "f16", "f16", "f16")
    if not packed and types not in (("f32", "f16", "f16", "f32"), ("f32", "bf16", "bf16", "f32")):
        c.fail("types are not modelled")
    kind, count = ("u32", 2) if packed else ("f32", 4)
    arrays = " ".join(
        (
            c.array("a", "u32", c.vector(a, depth // 4)),
            c.array("b", "u32", c.vector(b, depth // 8)),
            c.array("c", kind, c.vector(accumulator, count)),
        )
    )
    name, half = ("mma_m16n8_fp16", "") if packed else ("mma_m16n8", f"{HALF[types[1]]}, ")
    call = f"emu::{name}(d, a, b, c, {depth}, {half}{c.location});"
    return f"{{ {arrays} {kind} d[{count}]; {call} {c.assign_array(c.vector(d, count), 'd', kind)} }}"


# --- wmma --------------------------------------------------------------------------------------------------------

_FRAGMENT = {"f16": 8, "bf16": 4}


def _is_row(c: Context) -> str:
    return "true" if c.modifiers.choice("row", "col") == "row" else "false"


def _wmma_memory(c: Context, address: Operand, stride: Operand) -> str:
    space = c.modifiers.choice("shared", "shared::cta", "global", default="")
    is_shared = "true" if space.startswith("shared") else "false"
    return f"{c.address(address)}, {c.source(stride, 'u32')}, {is_shared}"


def _wmma_shape(c: Context) -> None:
    for name in ("sync", "aligned", "m16n16k16"):
        c.modifiers.choice(name)


@emitter("wmma.load")
def wmma_load(c: Context) -> str:
    operand = c.modifiers.choice("a", "b", "c")
    _wmma_shape(c)
    row, type_name = _is_row(c), c.modifiers.type(("f32",) if operand == "c" else ("f16", "bf16"))
    d, address, stride = c.operands(3)
    memory = _wmma_memory(c, address, stride)
    if operand == "c":
        kind, count, call = "f32", 8, f"emu::wmma_load_c(r, {row}, {memory}, {c.location});"
    else:
        kind, count = "u32", _FRAGMENT[type_name]
        call = f"emu::wmma_load(r, '{operand}', {row}, {memory}, {HALF[type_name]}, {c.location});"
    return f"{{ {kind} r[{count}]; {call} {c.assign_array(c.vector(d, count), 'r', kind)} }}"


@emitter("wmma.mma")
def wmma_mma(c: Context) -> str:
    _wmma_shape(c)
    a_row, b_row = ("true" if m == "row" else "false" for m in c.modifiers.sequence(2, ("row", "col")))
    types = c.modifiers.types(2 if "bf16" not in c.modifiers.left else 4)
    half = {("f32", "f32"): "f16", ("f32", "bf16", "bf16", "f32"): "bf16"}.get(tuple(types))
    if half is None:
        c.fail("types are not modelled")
    d, a, b, accumulator = c.operands(4)
    count = _FRAGMENT[half]
    arrays = " ".join(
        (
            c.array("a", "u32", c.vector(a, count)),
            c.array("b", "u32", c.vector(b, count)),
            c.array("c", "f32", c.vector(accumulator, 8)),
        )
    )
    call = f"emu::wmma_mma(d, a, {a_row}, b, {b_row}, c, {HALF[half]}, {c.location});"
    return f"{{ {arrays} f32 d[8]; {call} {c.assign_array(c.vector(d, 8), 'd', 'f32')} }}"


@emitter("wmma.store.d")
def wmma_store(c: Context) -> str:
    _wmma_shape(c)
    row = _is_row(c)
    c.modifiers.type(("f32",))
    address, source, stride = c.operands(3)
    values = c.array("r", "f32", c.vector(source, 8))
    return f"{{ {values} emu::wmma_store_d(r, {row}, {_wmma_memory(c, address, stride)}, {c.location}); }}"
