"""When a candidate has beaten the champion: the rule of a challenge, over the raw samples of its cells. Pure.

SCREEN gives up on what a few quads exclude; MEASURE and CONFIRM, in a process of its own, must both accept. A ratio is
the champion's time over the candidate's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, log1p
from statistics import fmean
from typing import Literal

import numpy as np

from flashladder import flops, stats
from flashladder.errors import Exit
from flashladder.ladder import CONTROL
from flashladder.model import ArmTiming, CellTiming, Gpu, Ratio

CANDIDATE, CHAMPION = "candidate", "champion"
TWIN = CHAMPION + CONTROL
"""The champion timed a second time: what the machine makes of no difference at all."""
MAX_TWIN = 0.005
"""Largest difference between the champion and itself, over all cells, at which anything can be decided."""
MAX_LOSS = 0.02
"""What a candidate may lose in any cell."""
ALPHA = 0.05

Timed = Literal["SCREEN", "MEASURE", "CONFIRM"]


@dataclass(frozen=True)
class Decision:
    """`fault`: why the candidate is reverted, and the exit code; None: it goes on."""

    ratios: dict[str, Ratio] = field(default_factory=dict)
    geomean: Ratio | None = None
    fault: tuple[Exit, str] | None = None


def decide(
    state: Timed,
    timings: Sequence[CellTiming],
    budget: int,
    gpu: Gpu | None = None,
    max_sm_clock_mhz: int | None = None,
) -> Decision:
    """Judge the candidate by the cells of one state; `budget` challenges share the 5 % of false accepts (Bonferroni).

    Blocks on which the telemetry is invalid are left out, before their times are seen. Exit.ENVIRONMENT: the machine,
    not the candidate, is at fault.
    """
    quads: dict[str, stats.FloatArray] = {}
    twins: list[float] = []
    for timing in timings:
        arms = {arm.arm: arm for arm in timing.arms}
        if (fault := _untimed(arms, timing, gpu, max_sm_clock_mhz)) is not None:
            return Decision(fault=fault)
        own, twin = (_paired(arms[name], arms[CHAMPION], timing) for name in (CANDIDATE, TWIN))
        if min(len(own), len(twin)) < stats.MIN_QUADS:
            return Decision(fault=(Exit.ENVIRONMENT, f"{len(own)} valid quads in {timing.cell.id}"))
        quads[timing.cell.id] = own
        twins.append(stats.yuen(twin)[0])
    found = stats.over_cells(list(quads.values()))
    ratios = {cell: _ratio(*one) for cell, one in zip(quads, found.cells, strict=True)}
    over_all = _ratio(found.ratio, found.ci)
    twin_ratio = exp(fmean(twins))
    floor = stats.practical_floor(twin_ratio)
    if abs(log(twin_ratio)) > log1p(MAX_TWIN):
        fault = Exit.ENVIRONMENT, f"the champion differs from itself by {_percent(twin_ratio)}: nothing can be decided"
    elif state == "SCREEN":
        fault = _screened(over_all, floor)
    else:
        fault = _measured(over_all, ratios, floor, min(1.0, found.p * budget))
    return Decision(ratios, over_all, fault)


def _screened(over_all: Ratio, floor: float) -> tuple[Exit, str] | None:
    if over_all.high >= 1 + floor:
        return None
    return Exit.NOT_BETTER, f"a gain of {floor:.2%} is excluded: {_interval(over_all)}"


def _measured(over_all: Ratio, ratios: dict[str, Ratio], floor: float, p: float) -> tuple[Exit, str] | None:
    worst = min(ratios, key=lambda cell: ratios[cell].ratio)
    if ratios[worst].ratio < 1 / (1 + MAX_LOSS):
        return Exit.REGRESSION, f"slower by {_percent(1 / ratios[worst].ratio)} in {worst}"
    if over_all.ratio < 1 + floor:
        return Exit.NOT_BETTER, f"less than {floor:.2%} faster: {_interval(over_all)}"
    if p >= ALPHA or over_all.low <= 1:
        return Exit.NOT_BETTER, f"no difference is shown: {_interval(over_all)}, corrected p {p:.2g}"
    return None


def _untimed(
    arms: dict[str, ArmTiming], timing: CellTiming, gpu: Gpu | None, max_sm_clock_mhz: int | None
) -> tuple[Exit, str] | None:
    """Why one of a cell's arms has no times to compare."""
    for name in (CHAMPION, TWIN):
        if arms[name].status != "timed":
            return Exit.ENVIRONMENT, f"the {name} was not timed in {timing.cell.id}: {arms[name].reason}"
    arm = arms[CANDIDATE]
    if arm.status != "timed":
        code = Exit.INCORRECT if arm.status in ("failed", "unsupported") else Exit.NOT_BETTER
        return code, f"in {timing.cell.id}: {arm.reason}"
    if gpu is not None:
        floor_ns = 1e9 * flops.hard_floor_s(timing.cell, gpu, max_sm_clock_mhz, warm=timing.l2 == "warm")
        if (least := min(map(min, arm.ns))) <= floor_ns:
            return Exit.INCORRECT, f"{least / 1e3:.3g} us in {timing.cell.id}: below the least that the GPU can take"
    return None


def _paired(arm: ArmTiming, other: ArmTiming, timing: CellTiming) -> stats.FloatArray:
    """log_quads of the valid blocks that both were in."""
    theirs = dict(zip(other.blocks, other.ns, strict=True))
    pairs = [
        (ns, theirs[block])
        for block, ns in zip(arm.blocks, arm.ns, strict=True)
        if block in theirs and timing.telemetry[block].valid
    ]
    own, others = (np.array([pair[side] for pair in pairs], np.float64).reshape(-1, 2) for side in (0, 1))
    return stats.log_quads(own, others)


def _ratio(ratio: float, interval: tuple[float, float]) -> Ratio:
    """To the digits that are printed."""
    return Ratio(
        **{name: float(f"{x:.6g}") for name, x in zip(("ratio", "low", "high"), (ratio, *interval), strict=True)}
    )


def _percent(ratio: float) -> str:
    return f"{abs(ratio - 1):.2%}"


def _interval(r: Ratio) -> str:
    return f"ratio {r.ratio:.4f}, 95 % interval {r.low:.4f} to {r.high:.4f}"
