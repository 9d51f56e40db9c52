"""What the project says about its measurements (experiments/claims.toml), held against a run's records.

A claim is a sentence, a predicate over records, and the architectures on which it is expected to hold. Its numbers come
from its evidence run. With records missing nothing is reproduced, but one cell can contradict what is said of each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from flashladder import diagnose, eager, flops, paths, rundir, tables
from flashladder.diagnose import Results
from flashladder.errors import FlashladderError
from flashladder.inputs import ODD_VALUES
from flashladder.ladder import Ladder, load_shapes, load_toml, value_cells
from flashladder.model import (
    DTYPES,
    MASKS,
    Agreement,
    BuildRecord,
    Cell,
    CheckRecord,
    Comparison,
    DtypeName,
    EagerArm,
    EagerTiming,
    Mask,
    Record,
    RunInfo,
    Verdict,
)
from flashladder.rundir import RunDir

CLAIMS = "claims.toml"
PARENT = "parent"

# --- declared -------------------------------------------------------------------------------------------------------


class Cells(Record, frozen=True, kw_only=True):
    """The cells of a set, or of shapes by their ids, that pass the filters; of neither: the cell of the arm's leg."""

    set: str | None = None
    shapes: tuple[str, ...] = ()
    dtypes: tuple[DtypeName, ...] = DTYPES
    masks: tuple[Mask, ...] = MASKS
    head_dim: int | None = None
    max_seq: int | None = None

    def of(self, arm: str, ladder: Ladder) -> list[Cell]:
        """Raises FlashladderError when no declared cell is meant."""
        if self.set is None and not self.shapes:
            return [ladder.cell_of(ladder[arm])]
        sets = load_shapes()
        if self.set is not None and self.set not in sets:
            raise FlashladderError(f"{CLAIMS}: no set {self.set!r}; expected one of {', '.join(sets)}")
        named = sets.values() if self.set is None else [sets[self.set]]
        cells = [
            cell
            for cell in dict.fromkeys(c for s in named for c in s.cells(self.dtypes))
            if (not self.shapes or cell.shape.id in self.shapes)
            and cell.mask in self.masks
            and self.head_dim in (None, cell.shape.head_dim)
            and (self.max_seq is None or cell.shape.seq_k <= self.max_seq)
        ]
        if not cells:
            raise FlashladderError(f"{CLAIMS}: {arm}: no declared cell passes its filters; loosen one of them")
        return cells


class _Bounded(Record, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the predicates: closed bounds; the whole confidence interval must lie within them."""

    least: float | None = None
    most: float | None = None

    def has(self, low: float, high: float) -> bool:
        return (self.least is None or low >= self.least) and (self.most is None or high <= self.most)

    def margin(self, low: float, high: float) -> float:
        """How far inside the bounds the interval lies; negative outside."""
        return min(
            math.inf if self.least is None else low - self.least, math.inf if self.most is None else self.most - high
        )

    @property
    def expected(self) -> str:
        """The bounds in words."""
        if self.least is not None and self.most is not None:
            return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"


class Ratio(_Bounded, frozen=True, kw_only=True, tag="ratio"):
    """`against`'s time over `arm`'s, above 1 the arm is faster: in each cell, or the geometric mean over them.

    The mean's interval is that of the means of the ends: wider than its confidence, whatever the cells share.
    """

    arm: str
    against: str = PARENT
    cells: Cells = Cells()
    aggregate: Literal["each", "geomean"] = "each"


class Medians(_Bounded, frozen=True, kw_only=True, tag="medians"):
    """As Ratio, of arms that form no pair: the ratio of their medians in each cell, between the ends of their CIs."""

    arm: str
    against: str
    cells: Cells = Cells()


class Verdicts(_Bounded, frozen=True, kw_only=True, tag="verdicts"):
    """Cells with this verdict on `arm` against `against`, of all in which the run compares them."""

    arm: str
    against: str
    verdict: Verdict
    of: int
    """Cells that the bounds speak of: with fewer nothing is said."""


class Order(Record, frozen=True, kw_only=True, tag_field="kind", tag="order"):
    """The recorded verdict on `arm` against `against`, after its correction and floor, in each cell."""

    arm: str
    verdict: Verdict
    against: str = PARENT
    cells: Cells = Cells()

    @property
    def expected(self) -> str:
        return self.verdict


class Absolute(_Bounded, frozen=True, kw_only=True, tag="absolute"):
    """Median device time, or the rate that it is, in each cell."""

    arm: str
    quantity: Literal["us", "TFLOP/s"]
    cells: Cells

    @property
    def expected(self) -> str:
        return f"{super().expected} {self.quantity}"


class Counter(_Bounded, frozen=True, kw_only=True, tag="counter"):
    """A counter of the arm's main kernel; with `against`, the arm's over the other's."""

    arm: str
    metric: str
    against: str | None = None
    cells: Cells = Cells()


class Resource(_Bounded, frozen=True, kw_only=True, tag="resource"):
    """What the compiler gave the kernels of `arms` (all rungs when empty) less `but`, on the run's architecture."""

    field: Literal["spill_bytes", "registers", "shared_bytes"]
    arms: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    head_dim: int | None = None


class Correct(_Bounded, frozen=True, kw_only=True, tag="correct"):
    """Every rung that the architecture runs passes the gate; the bounds are on the cases that each has passed."""

    dtype: DtypeName | None = None
    """None: of both, and the bounds are on what all rungs have passed together."""

    @property
    def expected(self) -> str:
        return f"none fails, {super().expected} pass"


class Agrees(_Bounded, frozen=True, kw_only=True, tag="agreement"):
    """Comparisons of the emulator with the GPU that differ: of exact arithmetic in any bit, of all beyond tolerance."""

    what: Literal["exact", "all"]


class Predicted(Record, frozen=True, kw_only=True, tag_field="kind", tag="prediction"):
    """What became of a rung's prediction."""

    rung: str
    outcome: Literal["confirmed", "refuted"]
    metric: str = "time"

    @property
    def expected(self) -> str:
        return self.outcome


class Predictions(_Bounded, frozen=True, kw_only=True, tag="predictions"):
    """The number of predictions with this outcome."""

    outcome: Literal["confirmed", "refuted"]


class Values(_Bounded, frozen=True, kw_only=True, tag="values"):
    """The arm's time on a kind of values over that on normal ones: each kind, in each cell of the set `values`."""

    arm: str


class Eager(_Bounded, frozen=True, kw_only=True, tag="eager"):
    """Time of an eager call of flashladder.attention and its wait over that of `against`, in each cell."""

    against: EagerArm
    cells: Cells


class Roof(_Bounded, frozen=True, kw_only=True, tag="roof"):
    """TFLOP/s of cuBLAS's large product of random matrices."""

    dtype: DtypeName

    @property
    def expected(self) -> str:
        return f"{super().expected} TFLOP/s"


Predicate = (
    Ratio
    | Medians
    | Verdicts
    | Predictions
    | Values
    | Eager
    | Roof
    | Order
    | Absolute
    | Counter
    | Resource
    | Correct
    | Agrees
    | Predicted
)


class Claim(Record, frozen=True, kw_only=True):
    id: str
    text: str
    """{value}, {low}, {high}, {where} and {n} stand for what the evidence run gives."""
    predicate: Predicate
    archs: tuple[str, ...]
    """Where it is expected to hold: sm_NN, or sm_NN+ for all from there on."""
    evidence: str | None = None
    """The run that it was made from; the pinned one by default."""

    def applies_to(self, arch: str | None) -> bool:
        return arch is not None and any(
            _number_of(arch) >= _number_of(named) if named.endswith("+") else arch == named for named in self.archs
        )

    @property
    def arms(self) -> tuple[str, ...]:
        """The kernels that it names."""
        p = self.predicate
        if isinstance(p, Resource):
            return p.arms
        if isinstance(p, (Correct, Agrees, Predictions, Eager, Roof)):
            return ()
        return (p.rung,) if isinstance(p, Predicted) else (p.arm,)


def _number_of(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


class _ClaimsFile(Record, frozen=True, kw_only=True):
    claim: tuple[Claim, ...]


@cache
def load_claims() -> tuple[Claim, ...]:
    return parse_claims(paths.EXPERIMENTS / CLAIMS)


def parse_claims(file: Path) -> tuple[Claim, ...]:
    """Raises FlashladderError on unknown fields, a duplicate id or a predicate without a bound."""
    claims = load_toml(file, _ClaimsFile).claim
    ids = [claim.id for claim in claims]
    for claim in claims:
        p = claim.predicate
        if ids.count(claim.id) > 1:
            raise FlashladderError(f"{file}: claim {claim.id} is declared twice")
        if isinstance(p, _Bounded) and p.least is None and p.most is None:
            raise FlashladderError(f"{file}: claim {claim.id} has no bound; give its predicate `least` or `most`")
    return claims


# --- measured -------------------------------------------------------------------------------------------------------

Outcome = Literal["reproduced", "not reproduced", "not applicable", "not measured"]


class Measure(Record, frozen=True, kw_only=True):
    """What a run says of a claim. `holds` is null when records are missing, and `reason` says which."""

    holds: bool | None
    value: float | None = None
    ci: tuple[float, float] | None = None
    where: str | None = None
    """The cell or kernel that the value is of: of several, the one with the least margin."""
    n: int = 0
    """Cells, kernels or cases that were looked at."""
    reason: str | None = None
    counts: bool = False
    """The value is a whole number."""


class Judged(Record, frozen=True, kw_only=True):
    """One claim and what became of it; `statement` has the evidence run's numbers."""

    id: str
    statement: str
    expected: str
    archs: tuple[str, ...]
    evidence: Measure
    here: Measure
    outcome: Outcome


@dataclass(frozen=True)
class View:
    """A run's records, each read when a claim first needs it."""

    run: RunDir
    ladder: Ladder

    @cached_property
    def info(self) -> RunInfo:
        return self.run.info

    @cached_property
    def results(self) -> Results:
        return diagnose.load_results(self.run, self.ladder)

    @cached_property
    def builds(self) -> dict[str, BuildRecord]:
        return {b.rung: b for b in self.run.builds()}

    @cached_property
    def checks(self) -> list[CheckRecord]:
        return self.run.checks()

    @cached_property
    def eager(self) -> dict[Cell, EagerTiming]:
        return {r.cell: r for r in self.run.eager()}

    @cached_property
    def agreements(self) -> list[Agreement]:
        return self.run.agreements()


def evaluate(claims: Iterable[Claim], here: View, view_of: Callable[[str | None], View]) -> list[Judged]:
    """Hold each claim against `here`; `view_of` gives the evidence run that a claim names (None: the pinned one)."""
    judged = []
    for claim in claims:
        try:
            evidence = measure(claim.predicate, view_of(claim.evidence))
        except FlashladderError as error:
            evidence = Measure(holds=None, reason=str(error))
        mine = measure(claim.predicate, here)
        judged.append(
            Judged(
                id=claim.id,
                statement=_statement(claim, evidence),
                expected=claim.predicate.expected,
                archs=claim.archs,
                evidence=evidence,
                here=mine,
                outcome=_outcome(claim.applies_to(here.info.machine.arch), mine.holds),
            )
        )
    return judged


def evaluate_run(here: View, *read: View) -> list[Judged]:
    """All declared claims against a run; `read` are views of others, which need not be read again."""
    views = {view.run.path.resolve(): view for view in (*read, here)}

    def view_of(name: str | None) -> View:
        found = rundir.find(name)
        return views.setdefault(found.path.resolve(), View(found, here.ladder))

    return evaluate(load_claims(), here, view_of)


def _outcome(applies: bool, holds: bool | None) -> Outcome:
    if not applies:
        return "not applicable"
    return "not measured" if holds is None else ("reproduced" if holds else "not reproduced")


def _statement(claim: Claim, evidence: Measure) -> str:
    low, high = evidence.ci or (evidence.value, evidence.value)
    numbers = {"value": evidence.value, "low": low, "high": high}
    shown = {name: shown_number(number, evidence.counts) for name, number in numbers.items()}
    try:
        return claim.text.format(**shown, where=evidence.where or "", n=evidence.n)
    except (KeyError, IndexError, ValueError) as error:
        raise FlashladderError(
            f"{CLAIMS}: {claim.id}: {claim.text!r}: {error}; expected {{value}}, {{low}}, {{high}}, {{where}} or {{n}}"
        ) from error


def shown_number(value: float | None, counts: bool = False) -> str:
    if value is None:
        return tables.NOT_MEASURED
    return f"{value:.0f}" if counts else tables.number(value)


# --- predicates -----------------------------------------------------------------------------------------------------


def measure(predicate: Predicate, view: View) -> Measure:
    """What the records of a run say of a predicate."""
    measures: dict[type, Callable[[Any, View], Measure]] = {
        Ratio: _ratio,
        Medians: _medians,
        Verdicts: _verdicts,
        Order: _order,
        Absolute: _absolute,
        Counter: _counter,
        Resource: _resource,
        Correct: _correct,
        Agrees: _agrees,
        Predicted: _predicted,
        Predictions: _predictions,
        Values: _values,
        Eager: _eager,
        Roof: _roof,
    }
    return measures[type(predicate)](predicate, view)


def _other(arm: str, against: str, ladder: Ladder) -> str:
    if against != PARENT:
        return against
    parent = ladder[arm].parent
    if parent is None:
        raise FlashladderError(f"{CLAIMS}: {arm} has no parent; name what it is compared against")
    return parent


@dataclass(frozen=True)
class _Found:
    """A value with its interval, and the cell that it is of."""

    where: str
    value: float
    ci: tuple[float, float]


def _each(bounds: _Bounded, found: Sequence[_Found], missing: Sequence[str]) -> Measure:
    """All cells within the bounds; the value is that of the cell with the least margin."""
    if not found:
        return _missing(missing)
    worst = min(found, key=lambda f: bounds.margin(*f.ci))
    holds = bounds.has(*worst.ci)
    return Measure(
        holds=None if holds and missing else holds,
        value=worst.value,
        ci=worst.ci,
        where=worst.where,
        n=len(found),
        reason=_lacks(missing, len(found)) if missing else None,
    )


def _missing(missing: Sequence[str]) -> Measure:
    return Measure(holds=None, reason=_lacks(missing, 0))


def _lacks(missing: Sequence[str], found: int) -> str:
    return missing[0] if len(missing) == 1 else f"{len(missing)} of {found + len(missing)} lack: {missing[0]}"


def _comparisons(arm: str, against: str, cells: Cells, view: View) -> tuple[list[Comparison], list[str]]:
    """The paired comparisons, and what is missing of them."""
    found, missing = [], []
    for cell in cells.of(arm, view.ladder):
        c = view.results.comparison(cell, arm, against)
        if c is not None and c.ratio is not None and c.ci is not None:
            found.append(c)
            continue
        missing.append(f"{c.verdict} in {cell.id}" if c is not None else _why_untimed(view.results, cell, arm, against))
    return found, missing


def _why_untimed(results: Results, cell: Cell, *names: str) -> str:
    for name in names:
        arm = results.arm(cell, name)
        if arm is None:
            return f"{name} has no record in {cell.id}"
        if arm.status != "timed":
            return f"{name} {arm.status} in {cell.id}: {arm.reason}"
    return f"{' and '.join(names)} were not compared in {cell.id}"


def _found(c: Comparison) -> _Found:
    assert c.ratio is not None
    assert c.ci is not None
    return _Found(c.cell.id, c.ratio, c.ci)


def _ratio(p: Ratio, view: View) -> Measure:
    comparisons, missing = _comparisons(p.arm, _other(p.arm, p.against, view.ladder), p.cells, view)
    found = [_found(c) for c in comparisons]
    if p.aggregate == "each":
        return _each(p, found, missing)
    if missing:
        return Measure(holds=None, n=len(found), reason=_lacks(missing, len(found)))
    value, low, high = (_geomean(x) for x in zip(*((f.value, *f.ci) for f in found), strict=True))
    return Measure(holds=p.has(low, high), value=value, ci=(low, high), where="geometric mean", n=len(found))


def _geomean(values: Iterable[float]) -> float:
    return math.exp(fmean(map(math.log, values)))


def _medians(p: Medians, view: View) -> Measure:
    found, missing = [], []
    for cell in p.cells.of(p.arm, view.ladder):
        mine, theirs = (view.results.arm(cell, name) for name in (p.arm, p.against))
        if mine is None or mine.device_us is None or theirs is None or theirs.device_us is None:
            missing.append(_why_untimed(view.results, cell, p.arm, p.against))
            continue
        low, high = theirs.device_us.ci[0] / mine.device_us.ci[1], theirs.device_us.ci[1] / mine.device_us.ci[0]
        found.append(_Found(cell.id, theirs.device_us.median / mine.device_us.median, (low, high)))
    return _each(p, found, missing)


def _verdicts(p: Verdicts, view: View) -> Measure:
    compared = [c for cell in view.results.cells if (c := view.results.comparison(cell, p.arm, p.against)) and c.ratio]
    value = sum(c.verdict == p.verdict for c in compared)
    few = f"{p.arm} and {p.against} were compared in {len(compared)} of {p.of} cells" if len(compared) < p.of else None
    holds = None if few else p.has(value, value)
    return Measure(holds=holds, value=value, n=len(compared), where=None, reason=few, counts=True)


def _order(p: Order, view: View) -> Measure:
    comparisons, missing = _comparisons(p.arm, _other(p.arm, p.against, view.ladder), p.cells, view)
    if not comparisons:
        return _missing(missing)
    others = [c for c in comparisons if c.verdict != p.verdict]
    shown = others[0] if others else min(comparisons, key=lambda c: abs(math.log(c.ratio or 1)))
    reason = _lacks(missing, len(comparisons)) if missing else None
    return Measure(
        holds=False if others else (None if missing else True),
        value=shown.ratio,
        ci=shown.ci,
        where=shown.cell.id,
        n=len(comparisons),
        reason=f"{shown.verdict} in {shown.cell.id}" if others else reason,
    )


def _absolute(p: Absolute, view: View) -> Measure:
    found, missing = [], []
    for cell in p.cells.of(p.arm, view.ladder):
        arm = view.results.arm(cell, p.arm)
        if arm is None or arm.device_us is None:
            missing.append(_why_untimed(view.results, cell, p.arm))
            continue
        us = (arm.device_us.median, *arm.device_us.ci)
        if p.quantity == "us":
            found.append(_Found(cell.id, us[0], (us[1], us[2])))
        else:
            value, high, low = (flops.flops(cell) / t / 1e6 for t in us)
            found.append(_Found(cell.id, value, (low, high)))
    return _each(p, found, missing)


def _counter(p: Counter, view: View) -> Measure:
    found, missing = [], []
    for cell in p.cells.of(p.arm, view.ladder):
        names = [p.arm, *([_other(p.arm, p.against, view.ladder)] if p.against is not None else [])]
        values = [view.results.counter(cell, name, p.metric) for name in names]
        if None in values:
            missing.append(f"{names[values.index(None)]} has no {p.metric} in {cell.id}")
            continue
        mine, theirs = [v for v in (*values, 1.0) if v is not None][:2]
        if not theirs:
            missing.append(f"{p.metric} of {names[1]} is 0 in {cell.id}")
            continue
        found.append(_Found(cell.id, mine / theirs, (mine / theirs,) * 2))
    return msgspec.structs.replace(_each(p, found, missing), ci=None)


def _resource(p: Resource, view: View) -> Measure:
    arch = view.info.machine.arch
    rungs = [r.id for r in view.ladder.rungs if arch is not None and r.runs_on(arch)]
    values: dict[str, int] = {}
    missing = []
    for name in (name for name in p.arms or rungs if name not in p.but):
        build = view.builds.get(name)
        kernels = [k for k in build.kernels if k.arch == arch] if build is not None else []
        if not kernels:
            missing.append(f"{name} was not built for {arch}")
        for kernel in kernels:
            if p.head_dim is None or kernel.kernel.endswith(f"_d{p.head_dim}"):
                spills = kernel.spill_store_bytes + kernel.spill_load_bytes
                values[kernel.kernel] = spills if p.field == "spill_bytes" else getattr(kernel, p.field)
    if not values:
        return _missing(missing or [f"nothing was built for {arch}"])
    worst = min(values, key=lambda name: p.margin(values[name], values[name]))
    holds = p.has(values[worst], values[worst])
    return Measure(
        holds=None if holds and missing else holds,
        value=values[worst],
        where=worst if values[worst] else None,
        n=len(values),
        reason=_lacks(missing, len(values)) if missing else None,
        counts=True,
    )


def _correct(p: Correct, view: View) -> Measure:
    arch = view.info.machine.arch
    rungs = [r.id for r in view.ladder.rungs if arch is not None and r.runs_on(arch)]
    passed: dict[str, int] = dict.fromkeys(rungs, 0)
    bad, n = [], 0
    for record in view.checks:
        build = view.builds.get(record.arm)
        if record.arm not in passed or build is None or record.sha256 != build.sha256:
            continue
        if p.dtype is not None and record.cell.dtype != p.dtype:
            continue
        n += 1
        passed[record.arm] += record.status == "pass"
        if record.status not in ("pass", "unsupported"):
            bad.append(record)
    least = min(passed, key=passed.__getitem__, default="")
    value = sum(passed.values()) if p.dtype is None else passed.get(least, 0)
    if bad:
        reason = f"{len(bad)} checks failed, first {bad[0].arm} on {bad[0].case}: {bad[0].reason}"
        return Measure(holds=False, value=value, where=bad[0].arm, n=n, reason=reason, counts=True)
    if not n or not p.has(value, value):
        who, what = ("the rungs have", "cases") if p.dtype is None else (f"{least} has", f"cases of {p.dtype}")
        reason = f"{who} passed {value} {what}" if least else "no rung runs on this GPU"
        return Measure(holds=None, n=n, reason=reason, counts=True)
    return Measure(holds=True, value=value, where=least if p.dtype is not None else None, n=n, counts=True)


def _agrees(p: Agrees, view: View) -> Measure:
    mine = [r for r in view.agreements if r.status != "unsupported" and (p.what == "all" or r.exact)]
    if not mine:
        return _missing(["the run has no comparison of the emulator with the GPU; make one with 'check --on both'"])
    differing = [r for r in mine if r.status == "differs" or (p.what == "exact" and r.status != "same bits")]
    value = len(differing)
    where = differing[0].arm if differing else None
    return Measure(holds=p.has(value, value), value=value, where=where, n=len(mine), counts=True)


def _predicted(p: Predicted, view: View) -> Measure:
    found = [o for o in view.results.predictions if (o.rung, o.metric) == (p.rung, p.metric)]
    if not found or found[0].outcome == "not measured":
        return _missing([found[0].note or "not measured" if found else f"{p.rung} has no prediction of {p.metric}"])
    outcome = found[0]
    return Measure(
        holds=outcome.outcome == p.outcome,
        value=outcome.measured,
        ci=outcome.ci,
        n=1,
        reason=None if outcome.outcome == p.outcome else outcome.outcome,
    )


def _predictions(p: Predictions, view: View) -> Measure:
    outcomes = [o.outcome for o in view.results.predictions]
    value, unknown = outcomes.count(p.outcome), outcomes.count("not measured")
    holds = p.has(value, value)
    if p.has(value + unknown, value + unknown) != holds:
        return Measure(holds=None, value=value, n=len(outcomes), reason=f"{unknown} were not measured", counts=True)
    return Measure(holds=holds, value=value, n=len(outcomes), counts=True)


def _values(p: Values, view: View) -> Measure:
    found, missing = [], []
    for cell in value_cells():
        for kind in ODD_VALUES:
            timed = view.results.values.get((cell, p.arm, kind))
            where = f"{kind} values in {cell.id}"
            if timed is None or timed.ratio is None:
                why = "has no record" if timed is None else timed.reason
                missing.append(f"{p.arm} on {where}: {why}")
            else:
                found.append(_Found(where, timed.ratio.median, timed.ratio.ci))
    return _each(p, found, missing)


def _eager(p: Eager, view: View) -> Measure:
    found, missing = [], []
    for cell in p.cells.of("attention", view.ladder):
        record = view.eager.get(cell)
        if record is None:
            missing.append(f"the run has no eager call in {cell.id}; make one with 'flashladder eager'")
        else:
            found.append(_Found(cell.id, *eager.ratio(record, "attention", p.against)))
    return _each(p, found, missing)


def _roof(p: Roof, view: View) -> Measure:
    rate = view.results.roofs.get(p.dtype)
    if rate is None:
        return _missing([f"the run has no matrix product of {p.dtype}; make one with 'flashladder peers'"])
    low, high = rate.tflops.ci
    return Measure(holds=p.has(low, high), value=rate.tflops.median, ci=rate.tflops.ci, n=1)


# --- shown ----------------------------------------------------------------------------------------------------------


def shown(m: Measure) -> str:
    """The value with its interval and the cell that it is of, or why there is none."""
    if m.value is None:
        return tables.NOT_MEASURED
    if m.counts:
        number = f"{m.value:.0f}"
    elif m.ci is not None:
        number = tables.interval(m.value, m.ci)
    else:
        number = tables.number(m.value)
    return number if m.n <= 1 or m.where is None else f"{number} ({m.where})"


def table(judged: Sequence[Judged], *, statements: bool = True) -> tables.Table:
    """A row a claim: the two numbers and what became of it."""
    columns = ("claim", "statement", "expected", "evidence", "this run", "outcome")
    rows = tuple(
        (
            j.id,
            j.statement,
            j.expected,
            shown(j.evidence),
            shown(j.here),
            f"{j.outcome}: {j.here.reason}" if j.here.reason and j.outcome != "reproduced" else j.outcome,
        )
        for j in judged
    )
    made = tables.Table(columns, rows)
    return made if statements else made.without("statement")


def counts(judged: Sequence[Judged]) -> dict[Outcome, int]:
    outcomes: tuple[Outcome, ...] = ("reproduced", "not reproduced", "not applicable", "not measured")
    return {outcome: sum(j.outcome == outcome for j in judged) for outcome in outcomes}


class Report(Record, frozen=True, kw_only=True):
    """`flashladder claims --json`."""

    run: str
    gpu: str | None
    arch: str | None
    counts: dict[Outcome, int]
    claims: tuple[Judged, ...]


def report(run: RunDir, judged: Sequence[Judged]) -> Report:
    info = run.info
    return Report(
        run=info.id, gpu=info.machine.gpu, arch=info.machine.arch, counts=counts(judged), claims=tuple(judged)
    )


def sentence(judged: Sequence[Judged]) -> str:
    """How many of each outcome."""
    what = "claim" if len(judged) == 1 else "claims"
    return f"{len(judged)} {what}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts(judged).items() if n)
