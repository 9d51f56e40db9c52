"""Barriers of blocks and clusters, and fences."""

from __future__ import annotations

from flashladder.emulator.emitter import Context, emitter
from flashladder.emulator.instructions.memory import SCOPES
from flashladder.emulator.ptx import Operand

_REDUCTIONS = {"popc": "popc", "and": "and_", "or": "or_"}
_PROXIES = {
    "async": "async_all",
    "async.global": "async_global",
    "async.shared::cta": "async_shared",
    "async.shared::cluster": "async_shared",
}


def _barrier(c: Context, operands: tuple[Operand, ...]) -> str:
    """Barrier number and thread count as arguments."""
    count = c.source(operands[1], "s32") if len(operands) > 1 else "-1"
    return f"{c.source(operands[0], 'u32')}, {count}"


@emitter("bar", "barrier")
def barrier(c: Context) -> str:
    c.modifiers.without_effect(("cta", "aligned"))
    action = c.modifiers.choice("sync", "arrive", "red")
    if action == "red":
        return _reduce(c)
    operands = c.operands(2 if action == "arrive" else 1, 2)
    return f"emu::barrier_{action}({_barrier(c, operands)}, {c.location});"


def _reduce(c: Context) -> str:
    name = c.modifiers.choice(*_REDUCTIONS)
    result = c.modifiers.type(("u32",) if name == "popc" else ("pred",))
    d, *operands, p = c.operands(3, 4)
    arguments = f"{_barrier(c, tuple(operands))}, {c.source(p, 'pred')}, {c.location}"
    value = f"emu::barrier_reduce(emu::BarrierRed::{_REDUCTIONS[name]}, {arguments})"
    return c.assign(d, value if name == "popc" else f"{value} != 0", result)


@emitter("barrier.cluster.arrive")
def cluster_arrive(c: Context) -> str:
    release = c.modifiers.choice("release", "relaxed", default="release") == "release"
    c.modifiers.flag("aligned")
    c.operands(0)
    return f"emu::cluster_arrive({'true' if release else 'false'}, {c.location});"


@emitter("barrier.cluster.wait")
def cluster_wait(c: Context) -> str:
    c.modifiers.without_effect(("acquire", "aligned"))
    c.operands(0)
    return f"emu::cluster_wait({c.location});"


@emitter("membar", "fence")
def fence(c: Context) -> str:
    """Memory is sequentially consistent; weaker orders are not modelled."""
    c.modifiers.without_effect(("sc", "acq_rel", "acquire", "release", "gl", *SCOPES))
    c.operands(0)
    return ";"


@emitter("fence.proxy", "membar.proxy")
def fence_proxy(c: Context) -> str:
    if c.modifiers.flag("alias"):
        return ";"
    proxy = ".".join(c.modifiers.left)
    if proxy not in _PROXIES:
        c.fail(f"proxy '{proxy}' is not modelled")
    c.modifiers.left.clear()
    c.operands(0)
    return f"emu::fence_proxy(emu::Proxy::{_PROXIES[proxy]}, {c.location});"


@emitter("fence.mbarrier_init")
def fence_mbarrier_init(c: Context) -> str:
    c.modifiers.choice("release")
    c.modifiers.choice("cluster")
    c.operands(0)
    return f"emu::fence_mbarrier_init({c.location});"
