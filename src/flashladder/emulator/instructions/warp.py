"""Collectives of a warp."""

from __future__ import annotations

from flashladder.emulator.emitter import Context, emitter
from flashladder.emulator.ptx import Sink

_REDUX = {"add": "add", "min": "min", "max": "max", "and": "and_", "or": "or_", "xor": "xor_"}


@emitter("shfl.sync")
def shfl(c: Context) -> str:
    mode = c.modifiers.choice("idx", "bfly", "up", "down")
    c.modifiers.type(("b32",))
    destination, value, lane, clamp, mask = c.operands(5)
    d, p = c.pair(destination)
    values = ", ".join(c.sources((value, lane, clamp, mask), "u32"))
    if p is None:
        return c.assign(d, f"emu::shuffle(emu::Shuffle::{mode}, {values}, nullptr, {c.location})", "u32")
    code = f"const u32 t = emu::shuffle(emu::Shuffle::{mode}, {values}, &in_range, {c.location});"
    return f"{{ bool in_range; {code} {c.assign(d, 't', 'u32')} {c.assign(p, 'in_range', 'pred')} }}"


@emitter("vote.sync")
def vote(c: Context) -> str:
    mode = c.modifiers.choice("any", "all", "uni", "ballot")
    result = c.modifiers.type(("b32",) if mode == "ballot" else ("pred",))
    d, p, mask = c.operands(3)
    value = f"emu::vote(emu::Vote::{mode}, {c.source(p, 'pred')}, {c.source(mask, 'u32')}, {c.location})"
    return c.assign(d, value if mode == "ballot" else f"{value} != 0", result)


@emitter("match.any.sync")
def match_any(c: Context) -> str:
    type_name = c.modifiers.type(("b32", "b64"))
    d, a, mask = c.operands(3)
    return c.assign(d, f"emu::match_any({c.source(a, type_name)}, {c.source(mask, 'u32')}, {c.location})", "u32")


@emitter("match.all.sync")
def match_all(c: Context) -> str:
    type_name = c.modifiers.type(("b32", "b64"))
    destination, a, members = c.operands(3)
    d, p = c.pair(destination)
    mask = c.source(members, "u32")
    code = f"const bool same = emu::match_any({c.source(a, type_name)}, {mask}, {c.location}) == {mask};"
    writes = [c.assign(d, f"same ? {mask} : 0", "u32"), *([c.assign(p, "same", "pred")] if p else [])]
    return f"{{ {code} {' '.join(writes)} }}"


@emitter("redux.sync")
def redux(c: Context) -> str:
    name = c.modifiers.choice(*_REDUX)
    type_name = c.modifiers.type(("u32", "s32", "b32"))
    suffix = f"_{type_name[0]}" if name in ("min", "max") else ""
    if suffix == "_b":
        c.fail("expected a signed or unsigned type")
    d, a, mask = c.operands(3)
    values = ", ".join(c.sources((a, mask), "u32"))
    return c.assign(d, f"emu::redux(emu::Redux::{_REDUX[name]}{suffix}, {values}, {c.location})", "u32")


@emitter("activemask")
def activemask(c: Context) -> str:
    c.modifiers.type(("b32",))
    (d,) = c.operands(1)
    return c.assign(d, "emu::active_mask()", "u32")


@emitter("elect.sync")
def elect(c: Context) -> str:
    """d is the elected lane."""
    destination, members = c.operands(2)
    d, p = c.pair(destination)
    if p is None:
        c.fail("expected d|p")
    mask = c.source(members, "u32")
    code = f"const bool elected = emu::elect({mask}, {c.location});"
    if not isinstance(d, Sink):
        leader = f"__builtin_ctz(emu::vote(emu::Vote::ballot, elected, {mask}, {c.location}))"
        code += " " + c.assign(d, leader, "u32")
    return f"{{ {code} {c.assign(p, 'elected', 'pred')} }}"


@emitter("bar.warp.sync")
def sync_warp(c: Context) -> str:
    (mask,) = c.operands(1)
    return f"emu::sync_warp({c.source(mask, 'u32')}, {c.location});"
