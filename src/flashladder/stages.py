"""The GPU stages over a run directory: build, check, time. Each does what is not recorded yet and appends records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

import msgspec

from flashladder import build as building
from flashladder import flops
from flashladder.arms import ArmSpec
from flashladder.check import refusal, seed_of
from flashladder.errors import EnvironmentInvalidError, FlashladderError
from flashladder.inputs import ODD_VALUES, Case, edge_cases, suite_cases
from flashladder.ladder import CONTROL, Ladder, load_shapes
from flashladder.model import Agreement, BuildRecord, Cell, CheckRecord, DtypeName, L2Mode, Preset, Rung, ValueTiming
from flashladder.ninja import Progress, silent
from flashladder.rundir import RunDir
from flashladder.worker import (
    AgreementDone,
    AgreementItem,
    AgreementJob,
    At,
    CheckDone,
    CheckItem,
    CheckJob,
    Message,
    Outcome,
    RoofDone,
    RoofJob,
    TimingDone,
    TimingItem,
    TimingJob,
    ValueDone,
    ValueItem,
    ValueJob,
    kill_children,
    supervise,
)

# --- build ----------------------------------------------------------------------------------------------------------


def build_rungs(
    run: RunDir | None, rungs: Sequence[Rung], archs: Sequence[str], progress: Progress
) -> tuple[list[BuildRecord], dict[str, ArmSpec]]:
    """Build, record, and return the records and the specs of the rungs that built."""
    recorded = {} if run is None else {r.rung: r for r in run.builds()}
    declared = {rung.id: rung for rung in rungs}
    records, specs = [], {}
    for target, record in building.build(rungs, archs, progress):
        records.append(record)
        if run is not None and recorded.get(record.rung) != record:
            run.append("build", record)
        if record.status == "built":
            specs[record.rung] = library_spec(declared[record.rung], target.library, record.sha256)
    return records, specs


def library_spec(rung: Rung, library: Path, sha256: str | None) -> ArmSpec:
    return ArmSpec(
        name=rung.id,
        kind=rung.kind,
        library=str(library),
        sha256=sha256,
        score_limit=rung.score_limit,
        slack=rung.slack,
    )


# --- check ----------------------------------------------------------------------------------------------------------

CHECKERS = 4
"""Processes that share the GPU for the checks, whose time goes into hundreds of small operations a case."""


def cases(dtypes: Sequence[DtypeName], head_dims: Sequence[int]) -> list[Case]:
    """What a rung must pass; a peer, which need not take every input, runs the suite alone."""
    suite = [c for c in load_shapes()["correctness"].cells(tuple(dtypes)) if c.shape.head_dim in head_dims]
    edges = [case for dtype in dtypes for head_dim in sorted(head_dims) for case in edge_cases(dtype, head_dim)]
    return [*suite_cases(suite), *edges]


def check_arms(
    run: RunDir,
    specs: Sequence[ArmSpec],
    dtypes: Sequence[DtypeName],
    head_dims: Sequence[int],
    seed: int,
    progress: Progress = silent,
) -> list[CheckRecord]:
    """Run on the GPU the cases that have no record for the arm's binary; returns all records of these arms."""
    items = [
        CheckItem(arm=spec, case=case)
        for case in cases(dtypes, head_dims)
        for spec in specs
        if spec.absence is None and (spec.kind != "peer" or case.family == "suite")
    ]
    return check_items(run, items, CheckJob(items=(), seed=seed), progress, min(CHECKERS, os.cpu_count() or 1))


def check_items(
    run: RunDir,
    items: Sequence[CheckItem],
    job: CheckJob,
    progress: Progress = silent,
    workers: int = 1,
    *,
    limit_s: float = 120.0,
    until_failure: bool = False,
) -> list[CheckRecord]:
    """Run the items that are not recorded, in `workers` child processes that share out the cases.

    `job` gives the seed and, on the CPU, the emulation. All arms of a case should stand together: they share its
    oracle. A case may take `limit_s` seconds; with `until_failure` the first that fails ends all. Returns all records
    of these arms. Raises EnvironmentInvalidError when a child ends before it runs anything.
    """
    done = {(r.arm, r.sha256, r.case) for r in run.checks()}
    todo = [item for item in items if (item.arm.name, item.arm.sha256, item.case.id) not in done]
    names = list(dict.fromkeys(item.arm.name for item in items))
    finished = len(items) - len(todo)
    refused: set[str] = set()
    stop, lock = Event(), Lock()

    def add(record: CheckRecord, items_done: int = 1) -> None:
        nonlocal finished
        with lock:
            run.append("check", record)
            finished += items_done
            progress(finished, len(items), record.arm)
        if until_failure and record.status not in ("pass", "unsupported") and not stop.is_set():
            stop.set()
            kill_children()

    def on_message(message: Message) -> None:
        if isinstance(message, CheckDone):
            add(message.record)

    def drain(share: list[CheckItem]) -> None:
        """Run `share` in one child after the other, until all is recorded or `stop` is set.

        One crash refuses the arm: the rest of its cases would cost a process start each and change nothing.
        """
        while share:
            outcome = supervise(msgspec.structs.replace(job, items=tuple(share)), on_message, limit_s)
            if outcome.end == "finished" or stop.is_set():
                return
            failed = share[_at(outcome).item]
            refused.add(failed.arm.name)
            rest = [item for item in share[share.index(failed) + 1 :] if item.arm.name not in refused]
            add(_casualty(failed, outcome, job.seed), len(share) - share.index(failed) - len(rest))
            share = rest

    progress(finished, len(items), "")
    with ThreadPoolExecutor(workers) as pool:
        drains = [pool.submit(drain, share) for share in _dealt(todo, workers) if share]
        try:
            for done_drain in drains:
                done_drain.result()
        except BaseException:
            stop.set()
            kill_children()
            raise
    return [r for r in run.checks() if r.arm in names]


def _at(outcome: Outcome) -> At:
    """What a child ran when it ended; raises EnvironmentInvalidError when nothing: that is no kernel's fault."""
    if outcome.at is None:
        raise EnvironmentInvalidError(
            f"a process that measures ended before it ran a kernel ({outcome.end}: {outcome.detail}); see 'flashladder "
            "doctor'; the same command goes on"
        )
    return outcome.at


def _dealt(items: Sequence[CheckItem], workers: int) -> list[list[CheckItem]]:
    """The items by cases, dealt to and fro: neighbours, such as the masks of a shape, go to different workers."""
    order = [*range(workers), *reversed(range(workers))]
    worker_of = {case: order[n % len(order)] for n, case in enumerate(dict.fromkeys(item.case.id for item in items))}
    shares: list[list[CheckItem]] = [[] for _ in range(workers)]
    for item in items:
        shares[worker_of[item.case.id]].append(item)
    return shares


def _casualty(item: CheckItem, outcome: Outcome, seed: int) -> CheckRecord:
    return CheckRecord(
        arm=item.arm.name,
        sha256=item.arm.sha256,
        case=item.case.id,
        cell=item.case.cell,
        status="timeout" if outcome.end == "timeout" else "crash",
        reason=outcome.detail,
        seed=seed,
    )


def compare_with_emulator(
    run: RunDir, items: Sequence[AgreementItem], job: AgreementJob, progress: Progress = silent, workers: int = 1
) -> list[Agreement]:
    """Run on the GPU and in the emulator the items that are not recorded; returns all records of these arms.

    Raises FlashladderError when a child ends early, EnvironmentInvalidError when before it runs anything.
    """
    done = {(r.arm, r.sha256, r.case) for r in run.agreements()}
    todo = [item for item in items if (item.gpu.name, item.gpu.sha256, item.case.id) not in done]
    names = list(dict.fromkeys(item.gpu.name for item in items))
    finished = len(items) - len(todo)
    lock = Lock()

    def on_message(message: Message) -> None:
        nonlocal finished
        if isinstance(message, AgreementDone):
            with lock:
                run.append("agreement", message.record)
                finished += 1
                progress(finished, len(items), message.record.arm)

    def drain(share: tuple[AgreementItem, ...]) -> None:
        outcome = supervise(msgspec.structs.replace(job, items=share), on_message)
        if outcome.end != "finished":
            item = share[_at(outcome).item]
            raise FlashladderError(f"{item.gpu.name} on {item.case.id}: {outcome.end}: {outcome.detail}")

    progress(finished, len(items), "")
    shares = [tuple(item for item in todo if names.index(item.gpu.name) % workers == n) for n in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        try:
            for drained in [pool.submit(drain, share) for share in shares if share]:
                drained.result()
        except BaseException:
            kill_children()
            raise
    return [r for r in run.agreements() if r.arm in names]


# --- time -----------------------------------------------------------------------------------------------------------


def measure_roofs(
    run: RunDir, dtypes: Sequence[DtypeName], preset: Preset, seed: int, progress: Progress = silent
) -> None:
    """Time cuBLAS's matrix product for the dtypes that are not recorded.

    Raises EnvironmentInvalidError when the child ends early.
    """
    recorded = {r.dtype for r in run.roofs()}
    todo = tuple(dtype for dtype in dtypes if dtype not in recorded)
    finished = len(dtypes) - len(todo)

    def on_message(message: Message) -> None:
        nonlocal finished
        if isinstance(message, RoofDone):
            run.append("roof", message.record)
            finished += 1
            progress(finished, len(dtypes), message.record.dtype)

    progress(finished, len(dtypes), "")
    if todo:
        outcome = supervise(RoofJob(dtypes=todo, preset=preset, seed=seed), on_message)
        if outcome.end != "finished":
            raise EnvironmentInvalidError(f"cuBLAS's matrix product: {outcome.end}: {outcome.detail}")


def time_cells(
    run: RunDir,
    ladder: Ladder,
    specs: Sequence[ArmSpec],
    cells: dict[Cell, L2Mode],
    preset: Preset,
    seed: int,
    progress: Progress = silent,
) -> None:
    """Time the cells that are not recorded with these binaries, smallest first; a crash costs one arm of one cell.

    Variants are timed at the shapes that the ladder declares for them. Raises EnvironmentInvalidError when a child ends
    before it runs anything, or though no arm of a cell is left to blame.
    """
    checks = run.checks()
    control = [ArmSpec(name=s.name + CONTROL, kind="peer") for s in specs if s.name == ladder.baseline]
    recorded = {r.cell: {(a.arm, a.sha256) for a in r.arms} for r in run.timings()}

    def arms_of(cell: Cell) -> tuple[ArmSpec, ...]:
        all_arms = (*specs, *control)
        return tuple(s for s in all_arms if s.kind != "variant" or ladder.has_variant_at(ladder[s.name], cell.shape))

    def item_of(cell: Cell, l2: L2Mode) -> TimingItem:
        arms = arms_of(cell)
        states = {s.name: s.absence or refusal(checks, s.name, s.sha256, cell) for s in arms}
        excluded = {name: state for name, state in states.items() if state is not None}
        return TimingItem(cell=cell, l2=l2, arms=arms, excluded=excluded)

    todo = [
        item_of(cell, l2)
        for cell, l2 in sorted(cells.items(), key=lambda item: (flops.flops(item[0]), item[0]))
        if not {(s.name, s.sha256) for s in arms_of(cell)} <= recorded.get(cell, set())
    ]
    finished = len(cells) - len(todo)

    def on_message(message: Message) -> None:
        nonlocal finished
        if isinstance(message, TimingDone):
            run.append("timing", message.record)
            finished += 1
            progress(finished, len(cells), message.record.cell.id)

    progress(finished, len(cells), "")
    while todo:
        job = TimingJob(items=tuple(todo), preset=preset, seed=seed, rates=known_rates(run))
        outcome = supervise(job, on_message)
        if outcome.end == "finished":
            return
        at = _at(outcome)
        item = todo[at.item]
        blamed = [s.name for s in item.arms if s.name == at.arm] or [s.name for s in item.arms]
        reason = f"{outcome.end} while it ran: {outcome.detail}"
        new = {name: ("failed", reason) for name in blamed if name not in item.excluded}
        if not new:
            raise EnvironmentInvalidError(f"{item.cell.id}: {outcome.end}: {outcome.detail}")
        excluded = {**item.excluded, **new}
        todo = [msgspec.structs.replace(item, excluded=excluded), *todo[at.item + 1 :]]


def measure_values(
    run: RunDir, specs: Sequence[ArmSpec], cells: Sequence[Cell], preset: Preset, seed: int, progress: Progress = silent
) -> None:
    """Time on every kind of values what is not recorded of these binaries; a crash costs one kind of one cell.

    An arm that its checks refuse is left out. Raises EnvironmentInvalidError when a child ends before it runs anything.
    """
    checks = run.checks()
    items = [
        ValueItem(arm=spec, cell=cell, values=kind)
        for cell in cells
        for kind in ODD_VALUES
        for spec in specs
        if refusal(checks, spec.name, spec.sha256, cell) is None
    ]
    recorded = {(r.arm, r.sha256, r.cell, r.values) for r in run.values()}
    todo = [item for item in items if (item.arm.name, item.arm.sha256, item.cell, item.values) not in recorded]
    finished = len(items) - len(todo)

    def add(record: ValueTiming) -> None:
        nonlocal finished
        run.append("values", record)
        finished += 1
        progress(finished, len(items), f"{record.arm} {record.values}")

    def on_message(message: Message) -> None:
        if isinstance(message, ValueDone):
            add(message.record)

    progress(finished, len(items), "")
    while todo:
        outcome = supervise(ValueJob(items=tuple(todo), preset=preset, seed=seed), on_message)
        if outcome.end == "finished":
            return
        at = _at(outcome)
        item = todo[at.item]
        add(
            ValueTiming(
                arm=item.arm.name,
                sha256=item.arm.sha256,
                cell=item.cell,
                values=item.values,
                seed=seed_of(Case("values", item.cell, item.values), seed),
                reason=f"failed: {outcome.end} while it ran: {outcome.detail}",
            )
        )
        todo = todo[at.item + 1 :]


def known_rates(run: RunDir) -> dict[str, float]:
    """Least seconds a FLOP by arm/head_dim, from the recorded samples."""
    rates: dict[str, float] = {}
    for record in run.timings():
        work = flops.flops(record.cell)
        for arm in record.arms:
            if arm.ns and work:
                key = f"{arm.arm}/{record.cell.shape.head_dim}"
                rates[key] = min(rates.get(key, float("inf")), min(map(min, arm.ns)) * 1e-9 / work)
    return rates
