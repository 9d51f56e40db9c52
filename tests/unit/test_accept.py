"""When a candidate is accepted: on the noise of the pinned run, and what ends a comparison before it."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from flashladder import accept, challenge, rundir, stats
from flashladder.errors import Exit
from flashladder.ladder import CONTROL, gpu_named, load_ladder, load_presets
from flashladder.model import ArmTiming, BlockTelemetry, Cell, CellTiming, L2Mode

FloatArray = NDArray[np.float64]
VALID = BlockTelemetry(
    sm_clock_mhz=1700, memory_clock_mhz=2600, power_w=600.0, temperature_c=50, event_reasons=0, valid=True
)
CHALLENGES = 200
QUADS = {"SCREEN": load_presets()["screen"].blocks, "MEASURE": load_presets()["challenge"].blocks}
QUADS["CONFIRM"] = QUADS["MEASURE"]
STATES: tuple[accept.Timed, ...] = ("SCREEN", "MEASURE", "CONFIRM")


@cache
def _recorded() -> tuple[tuple[Cell, L2Mode, FloatArray], ...]:
    """The baseline and its control in every cell: log-times in ns, shape (blocks, 2 arms, 2 visits)."""
    found = []
    baseline = load_ladder().baseline
    for timing in rundir.find().timings():
        arms = {arm.arm: dict(zip(arm.blocks, arm.ns, strict=True)) for arm in timing.arms}
        one, other = arms[baseline], arms[baseline + CONTROL]
        both = np.array([(ns, other[block]) for block, ns in one.items() if block in other])
        if len(both) >= stats.MIN_QUADS:
            found.append((timing.cell, timing.l2, np.log(both)))
    return tuple(found)


def _challenged() -> list[tuple[Cell, L2Mode, FloatArray]]:
    """The cells that a challenge times by default."""
    dtype = load_ladder().reference.dtype
    return [r for r in _recorded() if r[0].shape.id in challenge.SHAPES and r[0].dtype == dtype]


def _timing(
    rng: np.random.Generator, recorded: tuple[Cell, L2Mode, FloatArray], blocks: int, gain: float
) -> CellTiming:
    """A cell as it would be measured: who is champion and who is candidate is drawn, with the blocks.

    Whatever the machine made of two equal kernels, for the whole cell or for a block, is in it. The twin has the
    champion's samples with the difference of other blocks.
    """
    cell, l2, both = recorded
    drawn = both[rng.integers(len(both), size=blocks)]
    champion, candidate = (drawn[:, side] for side in rng.permutation(2))
    others = both[rng.integers(len(both), size=blocks)]
    twin = champion + rng.choice((-1.0, 1.0)) * (others[:, 1] - others[:, 0])
    times = {accept.CHAMPION: champion, accept.TWIN: twin, accept.CANDIDATE: candidate - np.log(gain)}
    return CellTiming(
        cell=cell,
        l2=l2,
        seed=0,
        input_sets=1,
        warmup_s=0.2,
        telemetry=(VALID,) * blocks,
        arms=tuple(_arm(name, np.exp(log_ns)) for name, log_ns in times.items()),
    )


def _arm(name: str, ns: FloatArray) -> ArmTiming:
    return ArmTiming(
        arm=name, kind="rung", status="timed", blocks=tuple(range(len(ns))), ns=tuple(map(tuple, ns.tolist()))
    )


def _decide(
    rng: np.random.Generator, cells: list[tuple[Cell, L2Mode, FloatArray]], state: accept.Timed, gain: float
) -> accept.Decision:
    timings = [_timing(rng, recorded, QUADS[state], gain) for recorded in cells]
    return accept.decide(state, timings, challenge.BUDGET)


def _ends(
    rng: np.random.Generator, cells: list[tuple[Cell, L2Mode, FloatArray]], gain: float
) -> tuple[accept.Timed, Exit] | None:
    """Where a challenge over these cells is reverted; None: it is accepted."""
    for state in STATES:
        if (fault := _decide(rng, cells, state, gain).fault) is not None:
            return state, fault[0]
    return None


def test_a_champion_against_itself_is_never_accepted_and_the_screen_stops_nine_of_ten() -> None:
    rng = np.random.default_rng(1)
    ends = [_ends(rng, _challenged(), 1.0) for _ in range(CHALLENGES)]
    assert None not in ends
    assert ends.count(("SCREEN", Exit.NOT_BETTER)) >= 0.9 * CHALLENGES


def test_a_champion_against_itself_is_not_accepted_without_the_screen() -> None:
    rng = np.random.default_rng(2)
    assert all(_decide(rng, _challenged(), "MEASURE", 1.0).fault is not None for _ in range(30))


def test_no_difference_is_accepted_nowhere_even_in_the_noisiest_cells() -> None:
    """Any eight recorded cells, those of a few microseconds too, in which equal kernels differ by several per cent."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        chosen = [_recorded()[i] for i in rng.choice(len(_recorded()), 8, replace=False)]
        assert _ends(rng, chosen, 1.0) is not None


def test_a_true_gain_of_two_per_cent_is_accepted_95_times_of_100() -> None:
    rng = np.random.default_rng(4)
    ends = [_ends(rng, _challenged(), 1.02) for _ in range(40)]
    assert ends.count(None) >= 0.95 * len(ends)


def test_a_gain_below_the_floor_is_not_accepted() -> None:
    rng = np.random.default_rng(5)
    faults = [_decide(rng, _challenged(), "MEASURE", 1.005).fault for _ in range(10)]
    assert all(fault is not None and fault[0] == Exit.NOT_BETTER for fault in faults)


def test_a_gain_in_one_cell_does_not_pay_for_a_loss_in_another() -> None:
    rng = np.random.default_rng(6)
    first, *others = _challenged()
    timings = [_timing(rng, first, 50, 0.95), *(_timing(rng, cell, 50, 1.1) for cell in others)]
    code, reason = accept.decide("MEASURE", timings, 1).fault or (Exit.OK, "")
    assert code == Exit.REGRESSION
    assert first[0].id in reason


def test_a_champion_that_differs_from_itself_allows_no_verdict() -> None:
    timing = _timing(np.random.default_rng(7), _challenged()[0], 50, 1.1)
    arms = {arm.arm: arm for arm in timing.arms}
    twin = _arm(accept.TWIN, np.asarray(arms[accept.CHAMPION].ns) * 1.02)
    odd = msgspec.structs.replace(timing, arms=(arms[accept.CHAMPION], twin, arms[accept.CANDIDATE]))
    code, reason = accept.decide("MEASURE", [odd], 1).fault or (Exit.OK, "")
    assert code == Exit.ENVIRONMENT
    assert "differs from itself" in reason


def test_invalid_blocks_are_left_out_and_too_few_allow_no_verdict() -> None:
    timing = _timing(np.random.default_rng(8), _challenged()[0], 50, 1.1)
    slowed = msgspec.structs.replace(VALID, valid=False)
    some = msgspec.structs.replace(timing, telemetry=(*(slowed,) * 20, *(VALID,) * 30))
    assert accept.decide("MEASURE", [some], 1).fault is None
    few = msgspec.structs.replace(timing, telemetry=(*(slowed,) * 45, *(VALID,) * 5))
    assert accept.decide("MEASURE", [few], 1).fault == (Exit.ENVIRONMENT, f"5 valid quads in {timing.cell.id}")


def _with_candidate(arm: ArmTiming) -> CellTiming:
    timing = _timing(np.random.default_rng(9), _challenged()[0], 50, 1.0)
    return msgspec.structs.replace(timing, arms=(*timing.arms[:2], arm))


def test_a_time_that_no_gpu_can_take_is_wrong() -> None:
    gpu = gpu_named("NVIDIA H200")
    fast = _with_candidate(_arm(accept.CANDIDATE, np.full((50, 2), 10.0)))
    code, reason = accept.decide("SCREEN", [fast], 1, gpu).fault or (Exit.OK, "")
    assert code == Exit.INCORRECT
    assert "below the least that the GPU can take" in reason


@pytest.mark.parametrize("status", ["failed", "unsupported"])
def test_a_candidate_that_was_not_timed_is_wrong_and_says_why(status: str) -> None:
    reason = "a graph replay on new values is incorrect: o_max error 1, limit 0"
    untimed = ArmTiming(arm=accept.CANDIDATE, kind="variant", status=status, reason=reason)  # type: ignore[arg-type]
    fault = accept.decide("SCREEN", [_with_candidate(untimed)], 1).fault
    assert fault is not None
    assert fault[0] == Exit.INCORRECT
    assert reason in fault[1]


def test_over_one_cell_the_geometric_mean_is_the_pairs() -> None:
    rng = np.random.default_rng(10)
    arm, other = (1e5 * np.exp(rng.normal(0, 0.01, (50, 2))) for _ in range(2))
    one, all_of_one = stats.paired(arm, other), stats.over_cells([stats.log_quads(arm, other)])
    assert all_of_one.ratio == pytest.approx(one.ratio)
    assert all_of_one.p == pytest.approx(one.p)
    ((ratio, interval),) = all_of_one.cells
    assert ratio == pytest.approx(one.ratio)
    assert interval == pytest.approx(one.ci)
    assert all_of_one.ci == pytest.approx(one.ci)


def test_p_over_cells_is_uniform_where_nothing_differs() -> None:
    rng = np.random.default_rng(11)
    p = [stats.over_cells(list(rng.normal(0, 1e-3, (3, 12)))).p for _ in range(120)]
    assert 0.01 < np.mean(np.asarray(p) < 0.05) < 0.1
