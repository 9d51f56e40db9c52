"""Every rung on the CPU: right on every edge case under several schedules, no race, no deadlock, no wasted work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from flashladder import ablation, check, emulation
from flashladder.arrays import HostMemory
from flashladder.emulator.device import SCHEDULES, EmulatedArm, EmulatedMemory, Emulator, Options, Schedule
from flashladder.inputs import Case
from flashladder.ladder import load_ladder
from flashladder.model import Cell, Shape

SEED = 3
RUNGS = [r.id for r in load_ladder().rungs]
HOST = HostMemory()
WMMA_QK, MMA_REGISTERS = 1, 3
"""Of Product in kernel/include/rung.h."""
UNALIGNED = {"odd_offset", "odd_rows"}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> emulation.CpuCheck:
    selection = ablation.Selection(out=tmp_path_factory.mktemp("cpu"))
    session = emulation.open_check(selection, Options())
    session.build()
    return session


@dataclass
class Emulated:
    arm: EmulatedArm
    memory: EmulatedMemory


def _open(built: emulation.CpuCheck, rung: str, options: Options) -> Emulated:
    spec = next(s for s in built.specs if s.name == rung)
    assert spec.library is not None
    from pathlib import Path

    return Emulated(EmulatedArm(spec), EmulatedMemory(Emulator(Path(spec.library)), options))


@cache
def _problems(case: Case) -> tuple[check.Problem, ...]:
    return check.pose(case, HOST, SEED)


def _share(schedule: Schedule) -> Iterator[Case]:
    """Each case runs under one of the schedules."""
    number = SCHEDULES.index(schedule)
    return iter(emulation.cpu_cases(ablation.Selection())[number :: len(SCHEDULES)])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_is_right_and_free_of_races(built: emulation.CpuCheck, rung: str, schedule: Schedule) -> None:
    one = _open(built, rung, Options(schedule=schedule, async_timing="random", seed=SEED))
    slow = one.arm.config["access_bytes"] < 16  # ten times the shared-memory accesses: the seams alone
    for case in (c for c in _share(schedule) if c.family != "values" or not slow):
        record = check.check_case(one.arm, case, one.memory, SEED, _problems(case))
        allowed = {"pass", "unsupported"} if case.layout in UNALIGNED else {"pass"}
        assert record.status in allowed, f"{case.id} under {schedule}: {record.reason}"
        if one.arm.config["swizzle"]:
            assert one.memory.counters.get("bank_conflicts", 0) == 0, case.id


def _case(causal: bool, seq: int = 128) -> Case:
    shape = Shape(batch=1, heads_q=2, heads_kv=1, seq_q=seq, seq_k=seq, head_dim=64)
    return Case("edge", Cell(shape=shape, dtype="fp16", causal=causal))


def _counters(one: Emulated, case: Case) -> dict[str, int]:
    assert check.check_case(one.arm, case, one.memory, SEED, _problems(case)).status == "pass"
    return one.memory.counters


@pytest.mark.parametrize("rung", [r for r in RUNGS if r != "r00_naive"])
def test_tiles_above_the_diagonal_are_skipped(built: emulation.CpuCheck, rung: str) -> None:
    one = _open(built, rung, Options())
    full, causal = (_counters(one, _case(mask)) for mask in (False, True))
    visible = (4 * 5 / 2) / 16  # of the 4 x 4 tiles of 128 rows and 128 keys
    if full["mma"]:
        assert causal["mma"] == visible * full["mma"]
    else:
        assert visible * 0.9 < causal["shared_accesses"] / full["shared_accesses"] < visible * 1.25


@pytest.mark.parametrize("rung", [r for r in RUNGS if r >= "r06"])
def test_tensor_cores_do_the_visible_tiles_and_no_more(built: emulation.CpuCheck, rung: str) -> None:
    """Per 32 x 32 tile and head: Q K^T and P V of 32 x 32 x 64 in products of 16 x 16 (WMMA) or 16 x 8 (mma) x 16."""
    one = _open(built, rung, Options())
    columns = 8 if one.arm.config["product"] == MMA_REGISTERS else 16
    products = 1 if one.arm.config["product"] == WMMA_QK else 2
    tiles = 2 * (4 * 5 / 2)
    assert _counters(one, _case(True))["mma"] == tiles * products * (32 * 32 * 64) / (16 * columns * 16)


def test_the_swizzle_is_what_removes_the_bank_conflicts(built: emulation.CpuCheck) -> None:
    before, after = (
        _counters(_open(built, rung, Options()), _case(False))["bank_conflicts"]
        for rung in ("r04_vector_io", "r05_swizzle")
    )
    assert before > 1000
    assert after == 0


def test_one_block_or_one_a_tile(built: emulation.CpuCheck) -> None:
    counts = {rung: _counters(_open(built, rung, Options()), _case(False))["blocks"] for rung in RUNGS}
    assert [counts[r] for r in RUNGS] == [1, 1, *[4 * 2] * (len(RUNGS) - 2)]
