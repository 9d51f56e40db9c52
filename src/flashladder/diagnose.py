"""Turns checks, builds and raw timings into verdicts. Pure: no GPU, and the same run gives the same records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from flashladder import bottleneck, flops, ncu, stats
from flashladder.check import refusal
from flashladder.errors import FlashladderError
from flashladder.ladder import CONTROL, Ladder, Leg, gated_name, gpu_named
from flashladder.model import (
    ArmStats,
    ArmTiming,
    Bottlenecks,
    Cell,
    CellTiming,
    CheckRecord,
    Comparison,
    Diagnosis,
    DtypeName,
    Estimate,
    Gpu,
    Kind,
    L2Mode,
    NcuRecord,
    Prediction,
    PredictionOutcome,
    Roof,
    RoofRate,
    Rung,
    Status,
    ValueRatio,
    ValueTiming,
)
from flashladder.rundir import RunDir

LAUNCH_BOUND = 1.2
SLOW = 1.1
MIN_SAMPLES = 6
"""Fewest samples whose range covers the median with 95 %: 1 - 2 x 0.5^6."""

_DIGITS = 9
"""Significant digits kept: fewer than float64 has, so that a CPU's vector width does not show in the records."""

Relation = Literal["parent", "baseline", "control"]
Correction = Literal["holm", "bh", "none"]

_Blocks = dict[int, tuple[float, float]]


@dataclass(frozen=True)
class _Arm:
    stats: ArmStats
    blocks: _Blocks
    """Samples in ns of the valid blocks; empty unless the arm is timed."""

    @property
    def timed(self) -> bool:
        return self.stats.status == "timed"


def control_arm(ladder: Ladder) -> str:
    """The baseline's kernel measured a second time (A/A): it gives a cell's practical floor, and is shown nowhere."""
    return ladder.baseline + CONTROL


def diagnose(run: RunDir, ladder: Ladder) -> list[Diagnosis]:
    """Every arm's statistics in every cell, the corrected comparisons, and what became of the predictions.

    Blocks on which the telemetry is invalid are left out of everything. Raises FlashladderError when a timing refers to
    a block without telemetry.
    """
    judge = _Judge(run, ladder)
    cells = [judge.arms(timing) for timing in run.timings()]
    profiles = run.profiles()
    comparisons = decide([c for arms in cells for c in _compare_cell(arms, ladder)], ladder)
    return [
        *(arm.stats for arms in cells for arm in arms),
        *map(roof_rate, run.roofs()),
        *judge.values(run.values()),
        *comparisons,
        *judge.bottlenecks(profiles, [a.stats for arms in cells for a in arms]),
        *judge_predictions(ladder, comparisons, [a.stats for arms in cells for a in arms], profiles),
    ]


# --- one arm --------------------------------------------------------------------------------------------------------


class _Judge:
    """Decides what may be said of an arm of this run."""

    def __init__(self, run: RunDir, ladder: Ladder) -> None:
        self.run = run
        self.ladder = ladder
        self.machine = run.info.machine
        self.gpu: Gpu | None = gpu_named(self.machine.gpu) if self.machine.gpu else None
        self.builds = {b.rung: b for b in run.builds()}
        self.checks: dict[str, list[CheckRecord]] = defaultdict(list)
        for check in run.checks():
            self.checks[check.arm].append(check)

    def arms(self, timing: CellTiming) -> list[_Arm]:
        """The ladder's rungs in order, those without a record in the cell too, then every other arm recorded.

        The run's variants count as rungs at the shapes declared for them.
        """
        recorded = {arm.arm: arm for arm in timing.arms}
        shape = timing.cell.shape
        variants = [v for v in self.ladder.variants if self.ladder.has_variant_at(v, shape) and v.id in self.builds]
        rungs = [
            self._arm(recorded.pop(rung.id), timing) if rung.id in recorded else self._absent(rung, timing)
            for rung in (*self.ladder.rungs, *variants)
        ]
        return [*rungs, *(self._arm(arm, timing) for arm in recorded.values())]

    def _arm(self, arm: ArmTiming, timing: CellTiming) -> _Arm:
        if arm.status != "timed":
            return _without_numbers(timing, arm.arm, arm.kind, arm.status, arm.reason)
        blocks = self._valid_blocks(arm, timing)
        fault = self._fault(arm, timing, blocks)
        if fault is not None:
            return _without_numbers(timing, arm.arm, arm.kind, *fault)
        return _Arm(self._stats(arm, timing, blocks), blocks)

    def _valid_blocks(self, arm: ArmTiming, timing: CellTiming) -> _Blocks:
        if any(not 0 <= block < len(timing.telemetry) for block in arm.blocks) or len(arm.blocks) != len(arm.ns):
            raise FlashladderError(
                f"{self.run.path}: {arm.arm} in {timing.cell.id}: its {len(arm.ns)} samples name blocks that the "
                f"record's {len(timing.telemetry)} telemetry readings do not have; time the cell again"
            )
        return {b: ns for b, ns in zip(arm.blocks, arm.ns, strict=True) if timing.telemetry[b].valid}

    def _fault(self, arm: ArmTiming, timing: CellTiming, blocks: _Blocks) -> tuple[Status, str] | None:
        """Why the arm's times must not be used."""
        refusal = self._refusal(arm.arm, arm.sha256, timing.cell)
        if refusal is not None:
            return refusal
        if 2 * len(blocks) < MIN_SAMPLES:
            return "skipped", f"insufficient samples: {len(blocks)} valid blocks of {len(arm.blocks)}"
        least, floor = min(min(pair) for pair in blocks.values()) / 1e3, self._hard_floor_us(timing)
        if least <= floor:
            limit = f"the least the hardware could take, {floor:.3g} us"
            return "failed", f"broken measurement: a sample of {least:.3g} us is not above {limit}"
        return None

    def _hard_floor_us(self, timing: CellTiming) -> float:
        if self.gpu is None:
            return 0.0
        clock = self.machine.max_sm_clock_mhz
        return 1e6 * flops.hard_floor_s(timing.cell, self.gpu, clock, warm=timing.l2 == "warm")

    def bottlenecks(self, profiles: Sequence[NcuRecord], arms: Sequence[ArmStats]) -> list[Bottlenecks]:
        """What limits each profiled arm; of the binary that was checked alone."""
        stats = {(a.cell, a.arm): a for a in arms}
        return [
            bottleneck.diagnose(p, stats.get((p.cell, p.arm)), self.machine.arch, self.machine.sm_count)
            for p in profiles
            if p.cause is None and self._refusal(p.arm, p.sha256, p.cell) is None
        ]

    def values(self, timings: Iterable[ValueTiming]) -> list[ValueRatio]:
        """Of the binaries that were checked alone."""
        return [value_ratio(r) for r in timings if self._refusal(r.arm, r.sha256, r.cell) is None]

    def _refusal(self, name: str, sha256: str | None, cell: Cell) -> tuple[Status, str] | None:
        """Why the checks do not let this very binary be timed in the cell."""
        return refusal(self.checks[gated_name(name)], name, sha256, cell)

    def _stats(self, arm: ArmTiming, timing: CellTiming, blocks: _Blocks) -> ArmStats:
        cell = timing.cell
        us = np.asarray(list(blocks.values())) / 1e3
        device = estimate(us)
        host = estimate(arm.host_us) if len(arm.host_us) >= MIN_SAMPLES else None
        floor_us = 1e6 * flops.floor_s(cell, self.gpu) if self.gpu is not None else 0.0
        return ArmStats(
            cell=cell,
            l2=timing.l2,
            arm=arm.arm,
            kind=arm.kind,
            status="timed",
            device_us=device,
            host_us=host,
            launch_bound=host.median > LAUNCH_BOUND * device.median if host is not None else None,
            tflops=rounded(flops.flops(cell) / device.median / 1e6),
            roofline_pct=rounded(100 * floor_us / device.median) if floor_us > 0 else None,
            slow_samples=int((us > SLOW * device.median).sum()),
        )

    def _absent(self, rung: Rung, timing: CellTiming) -> _Arm:
        status, reason = self._absence(rung, timing.cell)
        return _without_numbers(timing, rung.id, rung.kind, status, reason)

    def _absence(self, rung: Rung, cell: Cell) -> tuple[Status, str]:
        arch, build = self.machine.arch, self.builds.get(rung.id)
        if arch is not None and not rung.runs_on(arch):
            return "unsupported", f"needs {rung.needed_arch}, the device is {arch}"
        if build is None:
            return "skipped", "not part of this run"
        if build.status == "failed":
            return "failed", f"build: {build.reason}"
        return self._refusal(rung.id, build.sha256, cell) or ("skipped", "not timed in this cell")


def _without_numbers(timing: CellTiming, arm: str, kind: Kind, status: Status, reason: str | None) -> _Arm:
    given = reason or "no reason was recorded"
    return _Arm(ArmStats(cell=timing.cell, l2=timing.l2, arm=arm, kind=kind, status=status, reason=given), {})


def estimate(samples: ArrayLike) -> Estimate:
    """Median and interval as they are recorded."""
    median, low, high = map(rounded, stats.median_ci(samples))
    return Estimate(median=median, ci=(low, high), n=int(np.size(np.asarray(samples))))


def rounded(x: float) -> float:
    """To the digits that are recorded."""
    return float(f"{x:.{_DIGITS}g}")


def roof_rate(roof: Roof) -> RoofRate:
    """cuBLAS's rate, of its samples."""
    rates = 2 * roof.size**3 / np.asarray(roof.ns, dtype=np.float64) / 1e3
    return RoofRate(dtype=roof.dtype, size=roof.size, tflops=estimate(rates))


def value_ratio(r: ValueTiming) -> ValueRatio:
    """An arm's time on a kind of values over that on normal ones, of their samples; or why there is none."""
    if r.reason is not None:
        return ValueRatio(cell=r.cell, arm=r.arm, values=r.values, reason=r.reason)
    return ValueRatio(
        cell=r.cell,
        arm=r.arm,
        values=r.values,
        us=estimate(np.asarray(r.ns) / 1e3),
        normal_us=estimate(np.asarray(r.normal_ns) / 1e3),
        ratio=estimate(np.exp(stats.log_quads(r.normal_ns, r.ns))),
    )


# --- comparisons ----------------------------------------------------------------------------------------------------


def _compare_cell(arms: Sequence[_Arm], ladder: Ladder) -> list[Comparison]:
    """Control, parents and baselines of one cell, with raw p-values; the verdicts come with the correction."""
    timed = {arm.stats.arm: arm for arm in arms if arm.timed}
    rungs = [rung for rung in ladder.rungs if rung.id in timed]
    variants = [variant for variant in ladder.variants if variant.id in timed]
    peers = [name for name, arm in timed.items() if arm.stats.kind == "peer" and name != control_arm(ladder)]
    others = [peer for peer in peers if peer != ladder.baseline] if ladder.baseline in timed else []
    controls = [control_arm(ladder)] if {control_arm(ladder), ladder.baseline} <= timed.keys() else []
    compared: list[tuple[str, str, Relation]] = [
        *((control, ladder.baseline, "control") for control in controls),
        *((rung.id, rung.parent, "parent") for rung in (*rungs, *variants) if rung.parent in timed),
        *((rung.id, peer, "baseline") for rung in rungs for peer in peers),
        *((peer, ladder.baseline, "baseline") for peer in others),
    ]
    found = _compare([(timed[arm], timed[other], relation) for arm, other, relation in compared])
    floor = rounded(stats.practical_floor(found[0].ratio)) if controls else stats.practical_floor(None)
    return [c if c.relation == "control" else msgspec.structs.replace(c, floor=floor) for c in found]


def _compare(wanted: Sequence[tuple[_Arm, _Arm, Relation]]) -> list[Comparison]:
    """Each pair of arms by the blocks that both have, with the floor of a cell without a control."""
    shared = [[block for block in arm.blocks if block in other.blocks] for arm, other, _ in wanted]
    enough = [i for i, blocks in enumerate(shared) if len(blocks) >= stats.MIN_QUADS]
    samples = [(_ns(wanted[i][0], shared[i]), _ns(wanted[i][1], shared[i])) for i in enough]
    pairs = dict(zip(enough, stats.paired_each(samples), strict=True))
    return [
        _comparison(arm.stats, other.stats.arm, relation, len(shared[i]), pairs.get(i))
        for i, (arm, other, relation) in enumerate(wanted)
    ]


def _comparison(arm: ArmStats, other: str, relation: Relation, n: int, pair: stats.Paired | None) -> Comparison:
    comparison = partial(
        Comparison,
        cell=arm.cell,
        arm=arm.arm,
        other=other,
        relation=relation,
        n=n,
        floor=stats.practical_floor(None),
    )
    if pair is None:
        return comparison(verdict="insufficient samples")
    return comparison(
        verdict="ambiguous",
        ratio=rounded(pair.ratio),
        ci=(rounded(pair.ci[0]), rounded(pair.ci[1])),
        p=rounded(pair.p),
        cliffs_delta=rounded(pair.cliffs_delta),
    )


def _ns(arm: _Arm, blocks: Iterable[int]) -> NDArray[np.float64]:
    return np.asarray([arm.blocks[block] for block in blocks], dtype=np.float64)


def decide(raw: list[Comparison], ladder: Ladder) -> list[Comparison]:
    """The comparisons with adjusted p-values and verdicts, in the same order.

    Families: within a cell the ladder's steps, and the variants of one rung against it (Holm); the cells of one arm
    against one baseline (Benjamini-Hochberg).
    """
    variants = {variant.id: variant.parent for variant in ladder.variants}
    families: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for index, comparison in enumerate(raw):
        if comparison.p is not None:
            families[_family(comparison, variants)][index] = comparison.p
    decided = list(raw)
    for family in families.values():
        correction, adjust = _CORRECTIONS[raw[next(iter(family))].relation]
        for index, p in zip(family, adjust(list(family.values())), strict=True):
            decided[index] = _with_verdict(raw[index], rounded(float(p)), correction)
    return decided


def _family(comparison: Comparison, variants: Mapping[str, str | None]) -> Hashable:
    if comparison.relation == "baseline":
        return (comparison.relation, comparison.arm, comparison.other)
    return (comparison.relation, comparison.cell, variants.get(comparison.arm))


def _with_verdict(comparison: Comparison, p: float, correction: Correction) -> Comparison:
    assert comparison.ratio is not None
    assert comparison.ci is not None
    verdict = stats.verdict(comparison.ratio, comparison.ci, p, comparison.floor, comparison.n)
    return msgspec.structs.replace(comparison, p_adjusted=p, correction=correction, verdict=verdict)


def _unadjusted(p: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(p, dtype=np.float64)


_CORRECTIONS: dict[Relation, tuple[Correction, Callable[[ArrayLike], NDArray[np.float64]]]] = {
    "parent": ("holm", stats.holm),
    "baseline": ("bh", stats.benjamini_hochberg),
    "control": ("none", _unadjusted),
}


# --- predictions ----------------------------------------------------------------------------------------------------


def judge_predictions(
    ladder: Ladder, comparisons: Sequence[Comparison], arms: Sequence[ArmStats], profiles: Sequence[NcuRecord]
) -> list[PredictionOutcome]:
    """What became of each prediction, from the records of a diagnosis."""
    steps = {(c.cell, c.arm): c for c in comparisons if c.relation == "parent"}
    measured = {a.arm for a in arms}
    outcomes = []
    for rung in (*ladder.rungs, *(v for v in ladder.variants if v.id in measured)):
        cell = ladder.cell_of(rung)
        states = {a.arm: a for a in arms if a.cell == cell}
        counters = {p.arm: p for p in profiles if p.cell == cell}
        outcomes += [_outcome(rung, p, steps.get((cell, rung.id)), states, counters) for p in rung.predictions]
    return outcomes


def _outcome(
    rung: Rung,
    prediction: Prediction,
    step: Comparison | None,
    states: dict[str, ArmStats],
    counters: dict[str, NcuRecord],
) -> PredictionOutcome:
    outcome = partial(
        PredictionOutcome,
        rung=rung.id,
        metric=prediction.metric,
        direction=prediction.direction,
        expected=prediction.ratio,
    )
    if prediction.metric != "time":
        ratio, why = _counter_ratio(rung, prediction.metric, counters)
        if ratio is None:
            return outcome(measured=None, outcome="not measured", note=why)
        low, high = prediction.ratio
        return outcome(measured=rounded(ratio), outcome="confirmed" if low <= ratio <= high else "refuted")
    if step is None or step.ratio is None or step.ci is None:
        return outcome(measured=None, outcome="not measured", note=_why_not(rung, step, states))
    low, high = prediction.ratio
    inside = low <= step.ratio <= high
    touches = step.ci[0] <= high and low <= step.ci[1]
    notes = ["only the confidence interval reaches the expected one"] if touches and not inside else []
    notes += [f"predicted after {prediction.after}"] if prediction.after else []
    return outcome(
        measured=step.ratio,
        ci=step.ci,
        outcome="confirmed" if inside or touches else "refuted",
        note="; ".join(notes) or None,
    )


def _counter_ratio(rung: Rung, metric: str, counters: dict[str, NcuRecord]) -> tuple[float | None, str | None]:
    """The rung's counter over its parent's; or None and why."""
    values = []
    for name in (rung.id, rung.parent or ""):
        profile = counters.get(name)
        if profile is None:
            return None, f"{name or 'the parent'} was not profiled at the cell that it is read at"
        if profile.cause is not None:
            return None, f"{name}: {profile.cause}"
        found = ncu.main_kernel(profile.kernels).metrics.get(metric)
        if found is None:
            return None, f"{name} has no {metric}"
        values.append(found.value)
    if not values[1]:
        return None, f"{metric} of {rung.parent} is 0"
    return values[0] / values[1], None


def _why_not(rung: Rung, step: Comparison | None, states: dict[str, ArmStats]) -> str:
    if rung.parent is None:
        return "the rung has no parent"
    if step is not None:
        return f"{step.verdict}: {step.n} blocks in which both ran"
    for name in (rung.id, rung.parent):
        if name not in states:
            return "the cell that it is read at was not timed"
        if states[name].status != "timed":
            return f"{name} {states[name].status}: {states[name].reason}"
    raise AssertionError(f"{rung.id} and its parent are timed but not compared")


# --- reading --------------------------------------------------------------------------------------------------------


class Results:
    """A run's diagnosis, indexed for tables, figures and summary. The control arm is not among its arms."""

    def __init__(
        self,
        records: Iterable[Diagnosis],
        ladder: Ladder,
        profiles: Iterable[NcuRecord] = (),
        gpu: Gpu | None = None,
    ) -> None:
        self.ladder = ladder
        self.gpu = gpu
        self.predictions: list[PredictionOutcome] = []
        self.roofs: dict[DtypeName, RoofRate] = {}
        self.values: dict[tuple[Cell, str, str], ValueRatio] = {}
        """By cell, arm and kind of values."""
        self._bottlenecks: dict[tuple[Cell, str], Bottlenecks] = {}
        self.profiles = {(p.cell, p.arm): p for p in profiles}
        self._arms: dict[tuple[Cell, str], ArmStats] = {}
        self._comparisons: dict[tuple[Cell, str], dict[str, Comparison]] = defaultdict(dict)
        for record in records:
            if isinstance(record, ArmStats):
                if record.arm != control_arm(ladder):
                    self._arms[record.cell, record.arm] = record
            elif isinstance(record, RoofRate):
                self.roofs[record.dtype] = record
            elif isinstance(record, ValueRatio):
                self.values[record.cell, record.arm, record.values] = record
            elif isinstance(record, Comparison):
                self._comparisons[record.cell, record.arm][record.other] = record
            elif isinstance(record, Bottlenecks):
                self._bottlenecks[record.cell, record.arm] = record
            else:
                self.predictions.append(record)
        kinds = {name: arm.kind for (_, name), arm in self._arms.items()}
        self._l2 = {arm.cell: arm.l2 for arm in self._arms.values()}
        self.cells = tuple(self._l2)
        """Cells with a record, in the order they were timed."""
        self.rungs = tuple(name for name, kind in kinds.items() if kind == "rung")
        """Rungs in ladder order."""
        self.variants = tuple(name for name, kind in kinds.items() if kind == "variant")
        self.peers = tuple(sorted((n for n, kind in kinds.items() if kind == "peer"), key=ladder.baseline.__ne__))
        """Peers in the order recorded, the baseline first."""

    def arm(self, cell: Cell, name: str) -> ArmStats | None:
        return self._arms.get((cell, name))

    def arms(self, cell: Cell) -> list[ArmStats]:
        """Rungs, variants, then peers."""
        return [arm for name in (*self.rungs, *self.variants, *self.peers) if (arm := self.arm(cell, name)) is not None]

    def median_us(self, cell: Cell, name: str) -> float | None:
        """Median device time, None unless timed."""
        arm = self.arm(cell, name)
        return arm.device_us.median if arm is not None and arm.device_us is not None else None

    def bottlenecks(self, cell: Cell, name: str) -> Bottlenecks | None:
        return self._bottlenecks.get((cell, name))

    def counter(self, cell: Cell, name: str, metric: str) -> float | None:
        """A counter of the arm's main kernel, in base units; None when it was not measured."""
        profile = self.profiles.get((cell, name))
        if profile is None or profile.cause is not None:
            return None
        found = ncu.main_kernel(profile.kernels).metrics.get(metric)
        return found.value if found is not None else None

    def l2(self, cell: Cell) -> L2Mode:
        """The L2 state that the cell's samples started from."""
        return self._l2[cell]

    def fastest_rung(self, cell: Cell) -> str | None:
        times = {name: us for name in self.rungs if (us := self.median_us(cell, name)) is not None}
        return min(times, key=times.__getitem__, default=None)

    def reads(self, cell: Cell, variant: Rung) -> bool:
        """Whether the cell is of the type that the variant is read in."""
        return cell.dtype == self.ladder.cell_of(variant).dtype

    def variant_step(self, cell: Cell, variant: Rung) -> Comparison | None:
        """Of a variant with its parent; None in another type than it is read in."""
        return self.comparison(cell, variant.id, variant.parent or "") if self.reads(cell, variant) else None

    def comparison(self, cell: Cell, name: str, other: str) -> Comparison | None:
        return self.comparisons(cell, name).get(other)

    def comparisons(self, cell: Cell, name: str) -> dict[str, Comparison]:
        """What `name` was compared against in this cell, by the other's name."""
        return self._comparisons.get((cell, name), {})

    def ratio(self, cell: Cell, name: str, other: str) -> float | None:
        """The other's time over this one's: from the paired comparison, or else of the medians."""
        comparison = self.comparison(cell, name, other)
        if comparison is not None and comparison.ratio is not None:
            return comparison.ratio
        mine, theirs = self.median_us(cell, name), self.median_us(cell, other)
        return theirs / mine if mine is not None and theirs is not None else None

    def control(self, cell: Cell) -> Comparison | None:
        """The baseline against itself."""
        return self.comparison(cell, control_arm(self.ladder), self.ladder.baseline)


def load_results(run: RunDir, ladder: Ladder) -> Results:
    """Reads diagnosis.jsonl; raises FlashladderError when it has no record."""
    records = run.diagnosis()
    if not records:
        raise FlashladderError(
            f"{run.path} has no diagnosis; run 'flashladder report {run.path} --diagnose', or, if nothing was timed in "
            f"it, 'flashladder time --out {run.path}'"
        )
    name = run.info.machine.gpu
    return Results(records, ladder, run.profiles(), gpu_named(name) if name else None)


def legs(results: Results) -> list[Leg]:
    """The legs of the ladder of which something was measured; the first in any case."""
    measured = set(results.rungs)
    first, *others = results.ladder.legs
    return [first, *(leg for leg in others if measured & {rung.id for rung in leg.rungs[1:]})]
