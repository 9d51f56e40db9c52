"""The run as one JSON object for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Literal

import msgspec

from flashladder.diagnose import Results, load_results
from flashladder.ladder import Ladder, timed_sets
from flashladder.model import ArmStats, Cell, DtypeName, Estimate, Kind, L2Mode, Record, Rung, Shape, Status, Verdict
from flashladder.rundir import RunDir, pinned_id


class RunSummary(Record, frozen=True, kw_only=True):
    id: str
    gpu: str | None
    arch: str | None
    date: str
    commit: str
    pinned: bool


class Ratio(Record, frozen=True, kw_only=True):
    """The other's time over this one's: above 1, this one is faster. Null when the samples do not suffice."""

    ratio: float | None
    ci: tuple[float, float] | None
    verdict: Verdict


class Row(Record, frozen=True, kw_only=True):
    """One rung or peer in one cell. A cell of several sets has a row for each; `set` is null if no set declares it."""

    name: str
    kind: Kind
    set: str | None
    shape: Shape
    dtype: DtypeName
    causal: bool
    status: Status
    reason: str | None
    device_us: Estimate | None
    host_us: Estimate | None
    tflops: float | None
    roofline_pct: float | None
    ratios: dict[str, Ratio]


class PredictionRow(Record, frozen=True, kw_only=True):
    rung: str
    metric: str
    expected: tuple[float, float]
    measured: float | None
    outcome: Literal["confirmed", "refuted", "not measured"]


class FindingRow(Record, frozen=True, kw_only=True):
    """One finding on a rung's or peer's counters; rank 1 could save the most."""

    rung: str
    shape: Shape
    dtype: DtypeName
    causal: bool
    rank: int
    rule: str
    metric: str
    value: float
    threshold: float
    score: float


class Summary(Record, frozen=True, kw_only=True):
    run: RunSummary
    aliases: dict[str, str]
    rows: tuple[Row, ...]
    predictions: tuple[PredictionRow, ...]
    findings: tuple[FindingRow, ...] = ()


def summary(run: RunDir, ladder: Ladder) -> Summary:
    """Everything diagnosed in `run`; raises FlashladderError when it has no diagnosis."""
    results = load_results(run, ladder)
    info = run.info
    return Summary(
        run=RunSummary(
            id=info.id,
            gpu=info.machine.gpu,
            arch=info.machine.arch,
            date=info.date,
            commit=info.commit,
            pinned=is_pinned(run),
        ),
        aliases=aliases(results),
        rows=tuple(
            _row(arm, name, results)
            for cell in results.cells
            for name in tuple(sets_of(cell, results.l2(cell))) or (None,)
            for arm in results.arms(cell)
        ),
        predictions=tuple(
            PredictionRow(rung=p.rung, metric=p.metric, expected=p.expected, measured=p.measured, outcome=p.outcome)
            for p in results.predictions
        ),
        findings=tuple(_findings(results)),
    )


def _findings(results: Results) -> Iterator[FindingRow]:
    for cell, name in results.profiles:
        found = results.bottlenecks(cell, name)
        for rank, f in enumerate(found.findings if found is not None else (), 1):
            yield FindingRow(
                rung=name,
                shape=cell.shape,
                dtype=cell.dtype,
                causal=cell.causal,
                rank=rank,
                rule=f.rule,
                metric=f.metric,
                value=f.value,
                threshold=f.threshold,
                score=f.score,
            )


def to_json(value: Record) -> str:
    """Strict JSON, indented, without a final newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def is_pinned(run: RunDir) -> bool:
    """Whether paper/run.lock names this run, by its id or as GPU/RUN."""
    pinned = tuple((pinned_id() or "").split("/"))
    return run.path.resolve().parts[-len(pinned) :] == pinned


def sets_of(cell: Cell, l2: L2Mode) -> list[str]:
    """The declared sets that a cell measured from that L2 state belongs to."""
    return [s.name for s in timed_sets() if s.l2 == l2 and cell in s.cells()]


def aliases(results: Results) -> dict[str, str]:
    """`portable` is the last timed rung that runs on sm_80, `hopper` the last that needs sm_90, `champion` below."""
    timed = [r for r in results.ladder.rungs if any(results.median_us(c, r.id) for c in results.cells)]
    named = {
        "portable": _last([r for r in timed if r.min_arch <= 80]),
        "hopper": _last([r for r in timed if r.min_arch >= 90]),
        "champion": champion(results),
    }
    return {alias: rung for alias, rung in named.items() if rung is not None}


def champion(results: Results) -> str | None:
    """Of the rungs timed in the most cells, the one with the best geometric-mean time over the cells these share.

    None when nothing is timed or such rungs share no cell.
    """
    coverage = {name: {c for c in results.cells if results.median_us(c, name)} for name in results.rungs}
    most = max(map(len, coverage.values()), default=0)
    candidates = [name for name, cells in coverage.items() if len(cells) == most]
    shared = [c for c in results.cells if all(c in coverage[name] for name in candidates)]
    if not candidates or not shared:
        return None

    def mean_log_us(name: str) -> float:
        return fmean(math.log(us) for c in shared if (us := results.median_us(c, name)) is not None)

    return min(candidates, key=mean_log_us)


def _last(rungs: list[Rung]) -> str | None:
    return rungs[-1].id if rungs else None


def _row(arm: ArmStats, set_name: str | None, results: Results) -> Row:
    return Row(
        name=arm.arm,
        kind=arm.kind,
        set=set_name,
        shape=arm.cell.shape,
        dtype=arm.cell.dtype,
        causal=arm.cell.causal,
        status=arm.status,
        reason=arm.reason,
        device_us=arm.device_us,
        host_us=arm.host_us,
        tflops=arm.tflops,
        roofline_pct=arm.roofline_pct,
        ratios={
            other: Ratio(ratio=c.ratio, ci=c.ci, verdict=c.verdict)
            for other, c in results.comparisons(arm.cell, arm.arm).items()
        },
    )
