"""mbarriers, bulk copies, wgmma and register reallocation."""

from __future__ import annotations

from flashladder.emulator.emitter import Context, emitter
from flashladder.emulator.instructions.ampere import HALF
from flashladder.emulator.instructions.memory import SCOPES, shared_address
from flashladder.emulator.ptx import Address, Operand, Sink, Vector

_COMPLETE = "mbarrier::complete_tx::bytes"

# --- mbarrier ----------------------------------------------------------------------------------------------------


def _ordering(c: Context) -> None:
    """Orders and scopes: memory is sequentially consistent."""
    c.modifiers.without_effect(("release", "relaxed", "acquire", *SCOPES))
    c.modifiers.type(("b64",))


@emitter("mbarrier.init")
def mbarrier_init(c: Context) -> str:
    _ordering(c)
    address, count = c.operands(2)
    return f"emu::mbarrier_init({shared_address(c, address)}, {c.source(count, 'u32')}, {c.location});"


@emitter("mbarrier.inval")
def mbarrier_inval(c: Context) -> str:
    _ordering(c)
    (address,) = c.operands(1)
    return f"emu::mbarrier_inval({shared_address(c, address)}, {c.location});"


@emitter("mbarrier.expect_tx")
def mbarrier_expect_tx(c: Context) -> str:
    _ordering(c)
    address, count = c.operands(2)
    return f"emu::mbarrier_expect_tx({shared_address(c, address)}, {c.source(count, 'u32')}, false, {c.location});"


def _state(c: Context) -> tuple[Operand, list[Operand]]:
    """The destination of an arrival's state, `_` if there is none, and the other operands."""
    first, *rest = c.operands(1, 3)
    return (Sink(), [first, *rest]) if isinstance(first, Address) else (first, rest)


@emitter("mbarrier.arrive", "mbarrier.arrive.noComplete")
def mbarrier_arrive(c: Context) -> str:
    _ordering(c)
    state, (address, *count) = _state(c)
    arrivals = c.source(count[0], "u32") if count else "1"
    return c.assign(state, f"emu::mbarrier_arrive({shared_address(c, address)}, {arrivals}, {c.location})", "b64")


@emitter("mbarrier.arrive.expect_tx")
def mbarrier_arrive_expect_tx(c: Context) -> str:
    _ordering(c)
    state, (address, count) = _state(c)
    arguments = f"{shared_address(c, address)}, {c.source(count, 'u32')}, true, {c.location}"
    return c.assign(state, f"emu::mbarrier_expect_tx({arguments})", "b64")


@emitter("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(c: Context) -> str:
    """A hint of how long to wait has no effect."""
    parity, may_block = c.modifiers.flag("parity"), c.instruction.modifiers[0] == "try_wait"
    _ordering(c)
    p, address, phase, *_ = c.operands(3, 4 if may_block else 3)
    barrier = shared_address(c, address)
    if parity:
        waits = "true" if may_block else "false"
        value = f"emu::mbarrier_try_wait({barrier}, {c.source(phase, 'u32')}, {waits}, {c.location})"
    else:
        value = f"emu::mbarrier_test_token({barrier}, {c.source(phase, 'b64')}, {c.location})"
    return c.assign(p, value, "pred")


# --- bulk copies -------------------------------------------------------------------------------------------------


def _without_policy(c: Context) -> list[Operand]:
    operands = list(c.instruction.operands)
    if c.modifiers.flag("L2::cache_hint"):
        operands.pop()
    return operands


@emitter("cp.async.bulk")
def bulk_copy(c: Context) -> str:
    target, source = c.modifiers.sequence(2, ("shared::cluster", "shared::cta", "global"))
    operands = _without_policy(c)
    if target == "global":
        c.modifiers.choice("bulk_group")
        if source == "global" or len(operands) != 3:
            c.fail("wrong spaces or number of operands")
        to, start, size = operands
        return f"emu::bulk_store({c.address(to)}, {c.address(start)}, {c.source(size, 'u32')}, {c.location});"
    c.modifiers.choice(_COMPLETE)
    if source == "shared::cluster" or len(operands) != 4:
        c.fail("wrong spaces or number of operands")
    to, start, size, barrier = operands
    name = "bulk_load" if source == "global" else "bulk_to_cluster"
    places = f"{c.address(to)}, {c.address(start)}, {c.source(size, 'u32')}, {c.address(barrier)}"
    return f"emu::{name}({places}, {c.location});"


@emitter("cp.async.bulk.commit_group")
def bulk_commit(c: Context) -> str:
    c.operands(0)
    return f"emu::bulk_commit({c.location});"


@emitter("cp.async.bulk.wait_group")
def bulk_wait(c: Context) -> str:
    read = "true" if c.modifiers.flag("read") else "false"
    (left,) = c.operands(1)
    return f"emu::bulk_wait({c.literal(left)}, {read}, {c.location});"


def _tensor(c: Context, operand: Operand, rank: int) -> tuple[str, str]:
    """The declaration of the coordinates `x`, and the tensor map's address."""
    if not isinstance(operand, Address) or not isinstance(operand.coordinates, Vector):
        c.fail("expected a tensor map and coordinates")
    coordinates = c.array("x", "s32", c.vector(operand.coordinates, rank))
    return coordinates, f"(const void*){c.address(operand)}"


def _rank(c: Context) -> int:
    rank = int(c.modifiers.choice("1d", "2d", "3d", "4d", "5d")[0])
    c.modifiers.without_effect(("tile",))
    return rank


@emitter("cp.async.bulk.tensor")
def tensor_copy(c: Context) -> str:
    rank = _rank(c)
    if "bulk_group" in c.modifiers.left:
        return _tensor_store(c, rank, False)
    c.modifiers.choice("shared::cluster", "shared::cta")
    c.modifiers.choice("global")
    c.modifiers.choice(_COMPLETE)
    multicast, operands = c.modifiers.flag("multicast::cluster"), _without_policy(c)
    if len(operands) != 3 + multicast:
        c.fail("wrong number of operands")
    target, tensor, barrier, *mask = operands
    coordinates, tensor_map = _tensor(c, tensor, rank)
    blocks = c.source(mask[0], "u16") if mask else "0"
    places = f"{c.address(target)}, {tensor_map}, {c.address(barrier)}"
    return f"{{ {coordinates} emu::tma_load({places}, {rank}, x, {blocks}, {c.location}); }}"


@emitter("cp.reduce.async.bulk.tensor")
def tensor_reduce(c: Context) -> str:
    rank = _rank(c)
    c.modifiers.choice("add")
    return _tensor_store(c, rank, True)


def _tensor_store(c: Context, rank: int, add: bool) -> str:
    for name in ("global", "shared::cta", "bulk_group"):
        c.modifiers.choice(name)
    operands = _without_policy(c)
    if len(operands) != 2:
        c.fail("wrong number of operands")
    coordinates, tensor_map = _tensor(c, operands[0], rank)
    arguments = f"{tensor_map}, {c.address(operands[1])}, {rank}, x, {'true' if add else 'false'}"
    return f"{{ {coordinates} emu::tma_store({arguments}, {c.location}); }}"


# --- wgmma -------------------------------------------------------------------------------------------------------


def _aligned(c: Context) -> None:
    c.modifiers.choice("sync")
    c.modifiers.choice("aligned")


@emitter("wgmma.fence")
def wgmma_fence(c: Context) -> str:
    _aligned(c)
    c.operands(0)
    return f"emu::wgmma_fence({c.location});"


@emitter("wgmma.commit_group")
def wgmma_commit(c: Context) -> str:
    _aligned(c)
    c.operands(0)
    return f"emu::wgmma_commit({c.location});"


@emitter("wgmma.wait_group")
def wgmma_wait(c: Context) -> str:
    _aligned(c)
    (left,) = c.operands(1)
    return f"emu::wgmma_wait({c.literal(left)}, {c.location});"


@emitter("wgmma.mma_async")
def wgmma(c: Context) -> str:
    """A from shared memory by descriptor, or from four registers."""
    _aligned(c)
    n = int(c.modifiers.choice(*(f"m64n{n}k16" for n in range(8, 257, 8)))[4:-3])
    types = tuple(c.modifiers.types(3))
    if types not in (("f32", "f16", "f16"), ("f32", "bf16", "bf16")):
        c.fail("types are not modelled")
    from_registers = isinstance(c.operands(7, 8)[1], Vector)
    d, a, b, scale, *options = c.operands(7 if from_registers else 8)
    scales, transposes = [c.literal(o) for o in options[:2]], [c.literal(o) for o in options[2:]]
    if scales != [1, 1]:
        c.fail("negated operands are not modelled")
    flags = ["true" if t else "false" for t in transposes]
    registers = c.vector(d, n // 2)
    if from_registers:
        declare, place = c.array("a", "u32", c.vector(a, 4)) + " ", "a, 0"
        flags.insert(0, "false")
    else:
        declare, place = "", f"nullptr, {c.source(a, 'u64')}"
    arguments = f"{place}, {c.source(b, 'u64')}, {c.source(scale, 'pred')}, {', '.join(flags)}, {HALF[types[1]]}"
    call = f"emu::wgmma(d, {n}, {arguments}, {c.location}, __COUNTER__);"
    return f"{{ {c.array('d', 'f32', registers)} {declare}{call} {c.assign_array(registers, 'd', 'f32')} }}"


@emitter("setmaxnreg")
def setmaxnreg(c: Context) -> str:
    increase = "true" if c.modifiers.choice("inc", "dec") == "inc" else "false"
    _aligned(c)
    c.modifiers.type(("u32",))
    (count,) = c.operands(1)
    return f"emu::set_max_registers({c.literal(count)}, {increase}, {c.location});"
