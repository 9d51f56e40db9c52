"""Every rung on the CPU: right on every edge case under several schedules, no race, no deadlock, no wasted work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import pytest

from flashladder import ablation, challenge, check, emulation, grid, native
from flashladder import build as building
from flashladder.arms import LoadedArm
from flashladder.arrays import HostMemory
from flashladder.emulator.device import SCHEDULES, EmulatedMemory, Emulator, Options, Schedule, emulated_arm
from flashladder.inputs import Case
from flashladder.ladder import load_ladder
from flashladder.model import HOPPER, Cell, DtypeName, Shape

SEED = 3
LADDER = load_ladder()
RUNGS = [r.id for r in LADDER.rungs]
HOST = HostMemory()
WMMA_QK, MMA_REGISTERS, WGMMA = 1, 3, 4
"""Of Product in kernel/include/rung.h."""
TMA = 1
"""Of Loads."""
UNALIGNED = {"odd_offset", "odd_rows"}
BOTH_TYPES = ("r00_naive", "r05_swizzle", "r07_wmma_pv", "r13_tuned", "r38_first_look")
"""The last of each way to compute: bf16 at head_dim 128 too, and all values and layouts. `check --on cpu` runs all."""

MAX_SLOW_WORK = 700_000
"""Of a rung with ten times the shared-memory accesses: two tiles and a seam, not four."""


def _is_first_type(case: Case) -> bool:
    return case.cell.dtype == "fp16" and case.cell.shape.head_dim <= 64


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> emulation.CpuCheck:
    building.compile_targets(building.targets(LADDER.rungs, building.ALL_ARCHS))  # whose host code is used
    selection = ablation.Selection(out=tmp_path_factory.mktemp("cpu"))
    session = emulation.open_check(selection, Options())
    half = emulation.open_check(selection, Options(), [case.id for case in session.cases if _is_first_type(case)])
    session.rungs = tuple(LADDER[name] for name in BOTH_TYPES)
    half.rungs = tuple(r for r in LADDER.rungs if r.id not in BOTH_TYPES)
    building.compile_targets(building.targets(LADDER.rungs, building.ALL_ARCHS))  # whose host code is taken over
    for part in (session, half):
        part.build()
    session.specs += half.specs
    return session


@dataclass
class Emulated:
    arm: LoadedArm
    memory: EmulatedMemory
    config: dict[str, int]


def _open(built: emulation.CpuCheck, rung: str, options: Options) -> Emulated:
    spec = next(s for s in built.specs if s.name == rung)
    path = Path(spec.library or "")
    return Emulated(emulated_arm(spec), EmulatedMemory(Emulator(path), options), native.load(path).config)


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
    slow = one.config["access_bytes"] < 16
    slower = LADDER[rung].min_arch < HOPPER
    thorough = rung in BOTH_TYPES or not slower
    for case in _share(schedule):
        if not emulation.concerns(case, LADDER[rung]) or (rung not in BOTH_TYPES and not _is_first_type(case)):
            continue
        if case.family in ("values", "layout") and not thorough:
            continue
        if slower and not _is_first_type(case) and not case.cell.causal:  # the mask's absence shows at the first type
            continue
        if slow and (case.family == "values" or emulation.work(case) > MAX_SLOW_WORK):
            continue
        record = check.check_case(one.arm, case, one.memory, SEED, _problems(case))
        refusable = (
            case.layout in UNALIGNED
            or (case.layout == "broadcast_rows" and one.config["loads"] == TMA and one.config["splits"] == 1)
            or (case.family == "head_dim" and not one.config["any_head_dim"])
        )
        assert record.status == "pass" or (refusable and record.status == "unsupported"), (
            f"{case.id} under {schedule}: {record.reason}"
        )
        if one.config["swizzle"]:
            assert one.memory.counters.get("bank_conflicts", 0) == 0, case.id


def _case(causal: bool, seq: int = 128) -> Case:
    shape = Shape(batch=1, heads_q=2, heads_kv=1, seq_q=seq, seq_k=seq, head_dim=64)
    return Case("edge", Cell(shape=shape, dtype="fp16", causal=causal))


def _counters(one: Emulated, case: Case) -> dict[str, int]:
    assert check.check_case(one.arm, case, one.memory, SEED, _problems(case)).status == "pass"
    return one.memory.counters


def _tile(one: Emulated, seq: int, sms: int = 132) -> tuple[int, int]:
    """Rows and keys of a tile of the kernel that runs `_case` (kernel/include/plan.h for a rung that chooses)."""
    config = one.config
    if config["splits"] == 0:
        assert 2 * seq // 32 < sms * 3 / 4, "large enough for the medium kernel"
        return 16, 128
    return config["tile_m"] or 1, config["tile_n"] or 1


def _visible_tiles(seq: int, rows: int, keys: int) -> int:
    return sum(-(-min(seq, first + rows) // keys) for first in range(0, seq, rows))


@pytest.mark.parametrize("rung", [r for r in RUNGS if "r01" <= r < "r06"])
def test_tiles_above_the_diagonal_are_skipped(built: emulation.CpuCheck, rung: str) -> None:
    one = _open(built, rung, Options(multiprocessors=132))
    full, causal = (_counters(one, _case(mask))["shared_accesses"] for mask in (False, True))
    visible = (4 * 5 / 2) / 16  # of the 4 x 4 tiles of 128 rows and 128 keys
    assert visible * 0.9 < causal / full < visible * 1.25


@pytest.mark.parametrize("rung", [r for r in RUNGS if r >= "r06"])
def test_tensor_cores_do_the_visible_tiles_and_no_more(built: emulation.CpuCheck, rung: str) -> None:
    """Per tile and head: Q K^T and P V, 64 deep and 64 wide, in products of 16 x 16 (WMMA) or 16 x 8 (mma) x 16."""
    one = _open(built, rung, Options(multiprocessors=132))
    seq = 256
    rows, keys = _tile(one, seq)
    if one.config["product"] == WGMMA and one.config["splits"] == 1:
        # A warp's share of m64n{keys}k16 and m64n64k16; a warpgroup skips the tiles that its own 64 rows do not see.
        assert _counters(one, _case(True, seq))["wgmma"] == 2 * _visible_tiles(seq, 64, keys) * (4 + keys // 16) * 4
        return
    columns = 8 if one.config["product"] in (MMA_REGISTERS, WGMMA) else 16
    products = 1 if one.config["product"] == WMMA_QK else 2
    tiles = 2 * _visible_tiles(seq, rows, keys)
    assert _counters(one, _case(True, seq))["mma"] == tiles * products * (rows * keys * 64) / (16 * columns * 16)


def test_the_swizzle_is_what_removes_the_bank_conflicts(built: emulation.CpuCheck) -> None:
    before, after = (
        _counters(_open(built, rung, Options(multiprocessors=132)), _case(False))["bank_conflicts"]
        for rung in ("r04_vector_io", "r05_swizzle")
    )
    assert before > 1000
    assert after == 0


def test_one_block_or_one_a_tile(built: emulation.CpuCheck) -> None:
    for number, rung in enumerate(RUNGS):
        one = _open(built, rung, Options(multiprocessors=132))
        blocks = 1 if number < 2 else 2 * -(-128 // _tile(one, 128)[0])
        assert _counters(one, _case(False))["blocks"] == blocks, rung


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_launches_what_a_challenge_expects_of_its_config(built: emulation.CpuCheck, rung: str) -> None:
    one = _open(built, rung, Options())
    launched = grid.observe(one.arm, challenge.GRID_CASE, one.memory, SEED)
    assert launched.blocks
    assert grid.fault(launched, rung) is None


@pytest.mark.parametrize("rung", [r.id for r in LADDER.rungs if LADDER.has(r, "splits")])
@pytest.mark.parametrize(
    ("sms", "lengths", "rows", "hopper", "parts"),  # rows of a tile, and of one of Hopper's own
    [
        (1, (72, 72), 128, 128, 1),
        (4, (250, 250), 128, 128, 1),
        (1, (40, 72), 32, 64, 1),
        (1, (1, 72), 16, None, 1),  # however many blocks there are: 127 of 128 rows would be padding
        (3, (72, 72), 32, 128, 1),
        (132, (40, 72), 16, None, 1),
        (132, (3, 1600), 16, None, 12),
        (132, (40, 1600), 16, None, 12),
        (132, (40, 1000), 16, None, 1),
        (7, (40, 1600), 32, None, 3),
    ],
)
def test_the_plan_fills_the_device_with_the_largest_tile(
    built: emulation.CpuCheck, rung: str, sms: int, lengths: tuple[int, int], rows: int, hopper: int | None, parts: int
) -> None:
    one = _open(built, rung, Options(multiprocessors=sms))
    seq_q, seq_k = lengths
    shape = Shape(batch=1, heads_q=2, heads_kv=1, seq_q=seq_q, seq_k=seq_k, head_dim=64)
    case = Case("split", Cell(shape=shape, dtype="fp16", causal=True))
    assert check.check_case(one.arm, case, one.memory, SEED, _problems(case)).status == "pass"
    combining = -(-2 * seq_q // 4) if parts > 1 else 0
    heads = 1 if seq_q == 1 and one.config["pack_heads"] else 2
    own = hopper if one.config["persistent"] else None
    tiles = heads * -(-seq_q // (own or rows))
    if own:
        tiles = min(sms, tiles)
    assert one.memory.counters["blocks"] == tiles * parts + combining


@pytest.mark.parametrize(("sms", "keys", "rows"), [(6, 1600, 64), (6, 200, 32), (7, 1600, 32)])
def test_a_third_of_the_device_is_enough_for_warpgroups_that_share_rows(
    built: emulation.CpuCheck, sms: int, keys: int, rows: int
) -> None:
    """Where a block has keys for all of them: two heads of one tile of 64 rows."""
    one = _open(built, "r24_key_groups", Options(multiprocessors=sms))
    shape = Shape(batch=1, heads_q=2, heads_kv=1, seq_q=40, seq_k=keys, head_dim=64)
    counters = _counters(one, Case("split", Cell(shape=shape, dtype="fp16", causal=True)))
    assert (counters["wgmma"] > 0) == (rows == 64)


@pytest.mark.parametrize("values", ["descending", "cliff", "huge", "sharp"])
def test_few_tiles_are_multiplied_again_whatever_the_values(built: emulation.CpuCheck, values: str) -> None:
    """36 tiles of keys: warps that all multiplied each again would do 128 mma a tile."""
    one = _open(built, "r22_retuned", Options(multiprocessors=1))
    shape = Shape(batch=1, heads_q=1, heads_kv=1, seq_q=60, seq_k=2300, head_dim=64)
    mma = _counters(one, Case("wide", Cell(shape=shape, dtype="fp16", causal=False), values))["mma"]
    assert 0 < mma <= 4 * 128


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 104, 128])
@pytest.mark.parametrize(
    ("sms", "lengths", "rows"),
    [
        (1, (60, 900), 64),
        (6, (330, 330), 64),  # of the warpgroups of the first rows some see no key
        (1, (100, 450), 128),
    ],
)
def test_warpgroups_that_share_rows_join_their_parts(
    built: emulation.CpuCheck,
    sms: int,
    lengths: tuple[int, int],
    rows: int,
    head_dim: int,
    causal: bool,
    schedule: Schedule,
) -> None:
    dtype: DtypeName = "fp16" if head_dim <= 64 else "bf16"
    options = Options(schedule=schedule, multiprocessors=sms, async_timing="random", seed=SEED)
    one = _open(built, "r38_first_look", options)
    shape = Shape(batch=1, heads_q=1, heads_kv=1, seq_q=lengths[0], seq_k=lengths[1], head_dim=head_dim)
    case = Case("wide", Cell(shape=shape, dtype=dtype, causal=causal))
    record = check.check_case(one.arm, case, one.memory, SEED, _problems(case))
    assert record.status == "pass", record.reason
    assert one.memory.counters["blocks"] == -(-lengths[0] // rows)
    chosen = native.load(Path(one.arm.spec.library or "")).plan(case.cell, sms)
    assert chosen == ({128: 3, 64: 4}[rows], 1)


@pytest.mark.parametrize(
    ("rung", "plan", "rows"),
    [
        ("r13_tuned", (0, 1), 128),
        ("r13_tuned", (1, 3), 32),
        ("r13_tuned", (2, 5), 16),
        ("r23_dispatch", (4, 1), 64),
        ("r24_key_groups", (0, 1), 256),
        ("r24_key_groups", (2, 3), 16),
        ("r24_key_groups", (3, 1), 128),
        ("r24_key_groups", (4, 1), 64),
    ],
)
def test_a_rung_can_be_made_to_follow_a_plan(
    built: emulation.CpuCheck, rung: str, plan: tuple[int, int], rows: int
) -> None:
    one = _open(built, rung, Options(multiprocessors=132))
    arm = emulated_arm(msgspec.structs.replace(one.arm.spec, plan=plan))
    case = _case(True)
    assert check.check_case(arm, case, one.memory, SEED, _problems(case)).status == "pass"
    shape, parts = case.cell.shape, plan[1]
    rows_in_all = shape.heads_q * shape.batch * shape.seq_q
    combining = -(-rows_in_all // 4) if parts > 1 else 0
    tiles = shape.heads_q * shape.batch * -(-shape.seq_q // rows)
    assert one.memory.counters["blocks"] == tiles * parts + combining


@pytest.mark.parametrize(
    ("rung", "plan"),
    [
        ("r13_tuned", (0, 2)),
        ("r24_key_groups", (4, 2)),
        ("r13_tuned", (3, 1)),
        ("r13_tuned", (2, 33)),
        ("r08_mma_sync", (0, 1)),
    ],
)
def test_a_plan_that_a_rung_cannot_follow_is_refused(
    built: emulation.CpuCheck, rung: str, plan: tuple[int, int]
) -> None:
    one = _open(built, rung, Options(multiprocessors=132))
    arm = emulated_arm(msgspec.structs.replace(one.arm.spec, plan=plan))
    record = check.check_case(arm, _case(True), one.memory, SEED, _problems(_case(True)))
    assert record.status == "unsupported"
    assert "expected" in (record.reason or "")
