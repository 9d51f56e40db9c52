"""Validation without trust: every fault of a recorded run, named by file and line. Reads only.

Schema, sums, counts, keys and hashes are held against each other, samples against the roofline, derived numbers against
the samples that they come from.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np

from flashladder import diagnose, eager, flops, stats
from flashladder.check import refusal, seed_of
from flashladder.errors import FlashladderError
from flashladder.inputs import ODD_VALUES, Case
from flashladder.ladder import Ladder, gated_name, gpu_named, load_presets, timed_sets, value_cells
from flashladder.model import (
    UNDECODABLE,
    Agreement,
    ArmStats,
    ArmTiming,
    BuildRecord,
    Cell,
    CellTiming,
    CheckRecord,
    Comparison,
    Diagnosis,
    EagerTiming,
    Errors,
    Gpu,
    NcuRecord,
    PlanChoice,
    Roof,
    RoofRate,
    RunInfo,
    Sums,
    ValueRatio,
    ValueTiming,
)
from flashladder.peers import PEERS
from flashladder.rundir import INFO, STAGES, SUMS, RunDir, sha256_of
from flashladder.timing import CAPTURES, HOST_CALLS, HOST_CALLS_SLOW, MAX_LAUNCHES, VALUE_LAUNCHES, VALUE_QUADS
from flashladder.tune import plan_of

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    file: Path
    line: int | None
    what: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.what}"


@dataclass(frozen=True)
class Line(Generic[T]):
    number: int
    record: T


@dataclass
class Validation:
    """A run's records as they stand in its files, every line of them, and what is wrong with them."""

    run: RunDir
    ladder: Ladder
    faults: list[Fault] = field(default_factory=list)

    def fault(self, stage: str, line: int | None, what: str) -> None:
        name = stage if "." in stage else f"{stage}.jsonl"
        self.faults.append(Fault(self.run.path / name, line, what))

    @cached_property
    def info(self) -> RunInfo | None:
        try:
            return msgspec.json.decode((self.run.path / INFO).read_bytes(), type=RunInfo)
        except (*UNDECODABLE, OSError) as error:
            self.fault(INFO, None, f"not a valid record: {error}")
            return None

    @cached_property
    def gpu(self) -> Gpu | None:
        return gpu_named(self.info.machine.gpu) if self.info is not None and self.info.machine.gpu else None

    def read(self, stage: str, record: type[T]) -> list[Line[T]]:
        """The valid records; of every other line a fault."""
        file = self.run.path / f"{stage}.jsonl"
        if not file.exists():
            return []
        *complete, rest = file.read_bytes().split(b"\n")
        if rest:
            self.fault(
                stage, len(complete) + 1, "truncated: its last record is cut off; the same command goes on there"
            )
        lines = []
        for number, line in enumerate(complete, 1):
            try:
                lines.append(Line(number, msgspec.json.decode(line, type=record)))
            except UNDECODABLE as error:
                self.fault(stage, number, f"not a valid record: {error}")
        return lines

    @cached_property
    def builds(self) -> list[Line[BuildRecord]]:
        return self.read("build", BuildRecord)

    @cached_property
    def checks(self) -> list[Line[CheckRecord]]:
        return self.read("check", CheckRecord)

    @cached_property
    def agreements(self) -> list[Line[Agreement]]:
        return self.read("agreement", Agreement)

    @cached_property
    def roofs(self) -> list[Line[Roof]]:
        return self.read("roof", Roof)

    @cached_property
    def timings(self) -> list[Line[CellTiming]]:
        return self.read("timing", CellTiming)

    @cached_property
    def values(self) -> list[Line[ValueTiming]]:
        return self.read("values", ValueTiming)

    @cached_property
    def eager(self) -> list[Line[EagerTiming]]:
        return self.read("eager", EagerTiming)

    @cached_property
    def choices(self) -> list[Line[PlanChoice]]:
        return self.read("plan", PlanChoice)

    @cached_property
    def profiles(self) -> list[Line[NcuRecord]]:
        return self.read("ncu", NcuRecord)

    @cached_property
    def diagnosis(self) -> list[Line[Diagnosis]]:
        return self.read("diagnosis", Diagnosis)  # type: ignore[arg-type]

    @cached_property
    def binaries(self) -> set[tuple[str, str | None]]:
        """(rung, sha256) of everything that was built."""
        return {(line.record.rung, line.record.sha256) for line in self.builds}

    @cached_property
    def checks_of(self) -> dict[str, list[CheckRecord]]:
        found: dict[str, list[CheckRecord]] = defaultdict(list)
        for line in self.checks:
            found[line.record.arm].append(line.record)
        return found

    def arm_fault(self, arm: str, sha256: str | None) -> str | None:
        """What is wrong with the name and the binary of an arm."""
        name = gated_name(arm)
        if name in PEERS:
            return None if sha256 is None else f"{arm} is a peer and has no library, but a sha256"
        if name not in {rung for rung, _ in self.binaries}:
            return f"{arm} is neither a peer nor built in this run"
        if sha256 is not None and (name, sha256) not in self.binaries:
            return f"{arm}: no build has its sha256 {sha256[:12]}"
        return None

    def card_fault(self, digest: str | None) -> str | None:
        """What is wrong with the card of a record, which may name none."""
        if self.info is None or digest in (None, self.info.machine.gpu_digest, *self.info.cards):
            return None
        return f"timed on the card {digest}, which {INFO} does not name"

    def floor_fault(self, cell: Cell, samples_ns: Iterable[tuple[float, float]], *, warm: bool) -> str | None:
        """What is wrong with samples: that one is not above the least that the hardware could take."""
        least_us, floor_us = min(map(min, samples_ns), default=math.inf) / 1e3, 0.0
        if self.gpu is not None and self.info is not None:
            floor_us = 1e6 * flops.hard_floor_s(cell, self.gpu, self.info.machine.max_sm_clock_mhz, warm=warm)
        if least_us > max(floor_us, 0.0):
            return None
        return f"a sample of {least_us:.3g} us is not above the least that the hardware could take, {floor_us:.3g} us"

    @property
    def checked(self) -> str:
        """What a run without a fault was found to hold."""
        samples = sum(2 * len(arm.ns) for line in self.timings for arm in line.record.arms)
        counts = {
            "builds": len(self.builds),
            "checks": len(self.checks),
            "comparisons with the emulator": len(self.agreements),
            "cells": len(self.timings),
            "samples": samples,
            "times by input values": len(self.values),
            "cells of eager calls": len(self.eager),
            "choices": len(self.choices),
            "profiles": len(self.profiles),
            "derived records": len(self.diagnosis),
        }
        gpu = "" if self.gpu is not None else "; its GPU is not declared, so nothing was held against a roofline"
        return ", ".join(f"{n} {what}" for what, n in counts.items() if n) + gpu


def validate(run: RunDir, ladder: Ladder, *, derived: bool = False, sealed: bool = True) -> Validation:
    """Find every fault of a run; with `derived` judge its samples anew (half a minute for a whole ladder).

    Without `sealed` its sums are not looked at.
    """
    v = Validation(run, ladder)
    if v.info is not None and v.info.preset not in load_presets():
        v.fault(INFO, None, f"no preset {v.info.preset!r}; expected one of {', '.join(load_presets())}")
    _files(v, sealed)
    _builds(v)
    _checks(v)
    _agreements(v)
    _roofs(v)
    _timings(v)
    _values(v)
    _eager(v)
    _choices(v)
    _profiles(v)
    _derived(v)
    if derived and not v.faults:
        _judged_anew(v)
    return v


# --- files ----------------------------------------------------------------------------------------------------------


def _files(v: Validation, sealed: bool) -> None:
    known = {f"{stage}.jsonl" for stage in STAGES}
    for file in sorted(v.run.path.glob("*.jsonl")):
        if file.name not in known:
            v.fault(file.name, None, f"no stage writes it; expected {', '.join(sorted(known))}")
    if not sealed:
        return
    try:
        sums = v.run.sums
    except FlashladderError as error:
        v.fault(SUMS, None, str(error))
        return
    if sums is None:
        v.fault(SUMS, None, "missing: the run is not finished; 'flashladder validate --seal RUN' seals what is valid")
        return
    _sums(v, sums)


def _sums(v: Validation, sums: Sums) -> None:
    present = {file.name: file for file in v.run.files}
    for name in sorted(sums.files.keys() | present.keys()):
        if name not in present:
            v.fault(name, None, f"missing, though {SUMS} names it")
        elif name not in sums.files:
            v.fault(name, None, f"{SUMS} does not name it: it was added after the run was sealed")
        elif sha256_of(present[name]) != sums.files[name]:
            v.fault(name, None, f"its sum is not that of {SUMS}: it was changed after the run was sealed")


# --- build, check, agreement, roof, ncu -----------------------------------------------------------------------------


def _builds(v: Validation) -> None:
    once = _Once(v, "build")
    for number, r in ((line.number, line.record) for line in v.builds):
        once.see(number, r.rung, msgspec.json.encode(r))
        if (r.status == "built") != (r.sha256 is not None):
            v.fault("build", number, f"{r.rung} is {r.status}, its sha256 is {r.sha256}")
        if r.status == "failed" and not r.reason:
            v.fault("build", number, f"{r.rung} failed without a reason")
        if stray := ({k.arch for k in r.kernels} | r.cubins.keys()) - set(r.archs):
            v.fault(
                "build", number, f"{r.rung} has code for {', '.join(sorted(stray))}, built for {', '.join(r.archs)}"
            )


def _checks(v: Validation) -> None:
    once = _Once(v, "check")
    for number, r in ((line.number, line.record) for line in v.checks):
        once.see(number, (r.arm, r.case), r.sha256)
        if what := v.arm_fault(r.arm, r.sha256):
            v.fault("check", number, what)
        if r.cell.id not in r.case:
            v.fault("check", number, f"{r.arm}: the case {r.case} is not of the cell {r.cell.id}")
        if r.status != "pass":
            if not r.reason:
                v.fault("check", number, f"{r.arm} on {r.case}: {r.status} without a reason")
            continue
        if r.errors is None or r.limits is None:
            v.fault("check", number, f"{r.arm} on {r.case} passes without errors and limits")
            continue
        for what in _excesses(r.errors, r.limits):
            v.fault("check", number, f"{r.arm} on {r.case} passes with {what}")


def _excesses(errors: Errors, limits: Errors) -> Iterable[str]:
    """Every error that is not within its limit."""
    for name in ("o_max", "o_rms", "lse_max"):
        error, limit = getattr(errors, name), getattr(limits, name)
        if not 0 <= error <= limit:
            yield f"{name} {error:g}, limit {limit:g}"


@dataclass
class _Once:
    """Finds what stands twice. A slot (what a later record of replaces an earlier one) may change to and fro between
    versions, as a binary does that is rebuilt, but no stage records again what stands there."""

    v: Validation
    stage: str
    last: dict[Hashable, tuple[Hashable, int]] = field(default_factory=dict)

    def see(self, number: int, slot: Hashable, version: Hashable = None) -> None:
        before, line = self.last.get(slot, (None, 0))
        if line and before == version:
            self.v.fault(self.stage, number, f"duplicate of line {line}")
        self.last[slot] = version, number


def _agreements(v: Validation) -> None:
    once = _Once(v, "agreement")
    for number, r in ((line.number, line.record) for line in v.agreements):
        once.see(number, (r.arm, r.case), r.sha256)
        if what := v.arm_fault(r.arm, r.sha256):
            v.fault("agreement", number, what)
        if r.cell.id not in r.case:
            v.fault("agreement", number, f"{r.arm}: the case {r.case} is not of the cell {r.cell.id}")
        if not 0 <= r.equal <= r.elements:
            v.fault("agreement", number, f"{r.arm} on {r.case}: {r.equal} of {r.elements} elements are equal")
        if r.status in ("differs", "unsupported") and not r.reason:
            v.fault("agreement", number, f"{r.arm} on {r.case}: {r.status} without a reason")
        if r.status in ("same bits", "within tolerance") and max(r.o_share, r.lse_share) > 1:
            v.fault("agreement", number, f"{r.arm} on {r.case}: {r.status}, but beyond the tolerance")


def _roofs(v: Validation) -> None:
    once = _Once(v, "roof")
    for number, r in ((line.number, line.record) for line in v.roofs):
        once.see(number, r.dtype)
        floor_ns = 0.0
        if v.gpu is not None and v.info is not None:
            floor_ns = 1e9 * 2 * r.size**3 / flops.peak_flops(v.gpu, v.info.machine.max_sm_clock_mhz)
        if not r.ns or len(r.ns) != len(r.sm_clock_mhz):
            v.fault("roof", number, f"{r.dtype}: {len(r.ns)} samples with {len(r.sm_clock_mhz)} clocks")
        elif min(r.ns) <= floor_ns:
            v.fault("roof", number, f"{r.dtype}: a product of {min(r.ns):g} ns is above the tensor cores' peak")


def _profiles(v: Validation) -> None:
    declared = _declared_cells()
    once = _Once(v, "ncu")
    for number, r in ((line.number, line.record) for line in v.profiles):
        if r.cause is None:  # what failed is tried again
            once.see(number, (r.arm, r.cell, r.set), r.sha256)
        if what := v.arm_fault(r.arm, r.sha256):
            v.fault("ncu", number, what)
        if r.cell not in declared:
            v.fault("ncu", number, f"unknown cell {r.cell.id}: no set of experiments/shapes.toml has it")
        if (r.cause is None) != bool(r.kernels):
            v.fault("ncu", number, f"{r.arm}: {len(r.kernels)} kernels with the cause {r.cause}")
        for kernel in r.kernels:
            for name, metric in kernel.metrics.items():
                if not metric.value >= 0:
                    v.fault("ncu", number, f"{r.arm}: {name} is {metric.value:g}")


# --- timing ---------------------------------------------------------------------------------------------------------


def _declared_cells() -> dict[Cell, set[str]]:
    """Every cell of the sweeps, and the L2 states that it is timed from."""
    cells: dict[Cell, set[str]] = defaultdict(set)
    for declared in timed_sets():
        for cell in declared.cells():
            cells[cell].add(declared.l2)
    return cells


def _timings(v: Validation) -> None:
    declared = _declared_cells()
    seeds = {line.record.seed for line in v.checks}
    once = _Once(v, "timing")
    for number, r in ((line.number, line.record) for line in v.timings):
        arms = [(arm.arm, arm.sha256) for arm in r.arms]
        once.see(number, r.cell, frozenset(arms))
        if r.cell not in declared:
            v.fault("timing", number, f"unknown cell {r.cell.id}: no set of experiments/shapes.toml has it")
        elif r.l2 not in declared[r.cell]:
            v.fault("timing", number, f"{r.cell.id} was timed from a {r.l2} L2, which no set declares")
        if seeds and r.seed not in {zlib.crc32(f"{seed}/{r.cell.id}".encode()) for seed in seeds}:
            v.fault("timing", number, f"{r.cell.id}: its seed {r.seed} is not that of the cell and the run")
        if len({name for name, _ in arms}) != len(arms):
            v.fault("timing", number, f"{r.cell.id} has an arm twice")
        _telemetry(v, number, r)
        for arm in r.arms:
            for what in _arm_faults(v, r, arm):
                v.fault("timing", number, f"{arm.arm} in {r.cell.id}: {what}")


def _telemetry(v: Validation, number: int, r: CellTiming) -> None:
    most = v.info.machine.max_sm_clock_mhz if v.info is not None else None
    clocks = [reading.sm_clock_mhz for reading in r.telemetry if reading.sm_clock_mhz is not None]
    if clocks and not (min(clocks) > 0 and max(clocks) <= (most or math.inf)):
        v.fault(
            "timing",
            number,
            f"{r.cell.id}: SM clocks of {min(clocks)} to {max(clocks)} MHz, at most {most} are possible",
        )
    if what := v.card_fault(r.gpu_digest):
        v.fault("timing", number, f"{r.cell.id} was {what}")


def _arm_faults(v: Validation, r: CellTiming, arm: ArmTiming) -> Iterable[str]:
    if what := v.arm_fault(arm.arm, arm.sha256):
        yield what
    if arm.status != "timed":
        if arm.blocks or arm.ns or arm.host_us:
            yield f"{arm.status}, but has samples"
        if not arm.reason:
            yield f"{arm.status} without a reason"
        return
    refused = refusal(v.checks_of[gated_name(arm.arm)], arm.arm, arm.sha256, r.cell)
    if refused is not None:
        yield f"timed, though its checks say {refused[0]}: {refused[1]}"
    n = len(arm.blocks)
    if arm.blocks != tuple(range(n)) or n > len(r.telemetry) or len(arm.ns) != n:
        yield f"{len(arm.ns)} quads in {n} blocks of {len(r.telemetry)}; expected one in each from the first on"
    preset = load_presets().get(v.info.preset) if v.info is not None else None
    if preset is not None and not preset.min_blocks <= n <= preset.blocks:
        yield f"{n} blocks; the preset declares {preset.min_blocks} to {preset.blocks}"
    if len(arm.host_us) not in (HOST_CALLS, HOST_CALLS_SLOW) or not 1 <= arm.launches_per_sample <= MAX_LAUNCHES:
        yield f"{len(arm.host_us)} host calls and {arm.launches_per_sample} launches a sample"
    most = CAPTURES if arm.captured and arm.launches_per_sample > 1 else 1
    if not 1 <= arm.graphs <= most:
        yield f"{arm.graphs} graphs; expected 1 to {most}"
    if not all(us > 0 for us in arm.host_us):
        yield "a host call of no time"
    if what := v.floor_fault(r.cell, arm.ns, warm=r.l2 == "warm"):
        yield what


# --- values ---------------------------------------------------------------------------------------------------------


def _values(v: Validation) -> None:
    once = _Once(v, "values")
    for number, r in ((line.number, line.record) for line in v.values):
        once.see(number, (r.arm, r.cell, r.values), r.sha256)
        for what in _value_faults(v, r):
            v.fault("values", number, f"{r.arm} on {r.values} values in {r.cell.id}: {what}")


def _value_faults(v: Validation, r: ValueTiming) -> Iterable[str]:
    seeds = {line.record.seed for line in v.checks}
    if what := v.arm_fault(r.arm, r.sha256):
        yield what
    if what := v.card_fault(r.gpu_digest):
        yield what
    if r.cell not in value_cells():
        yield "unknown cell: the set values of experiments/shapes.toml does not have it"
    if r.values not in ODD_VALUES:
        yield f"unknown kind of values; expected one of {', '.join(ODD_VALUES)}"
    if seeds and r.seed not in {seed_of(Case("values", r.cell, r.values), seed) for seed in seeds}:
        yield f"its seed {r.seed} is not that of the kind, the cell and the run"
    if r.reason is not None:
        if r.ns or r.normal_ns:
            yield "has samples, and a reason why there are none"
        return
    refused = refusal(v.checks_of[r.arm], r.arm, r.sha256, r.cell)
    if refused is not None:
        yield f"timed, though its checks say {refused[0]}: {refused[1]}"
    if len(r.ns) != len(r.normal_ns) or len(r.ns) < VALUE_QUADS:
        yield f"{len(r.ns)} pairs of samples beside {len(r.normal_ns)} of normal values; expected {VALUE_QUADS} of each"
    if not VALUE_LAUNCHES <= r.launches_per_sample <= MAX_LAUNCHES:
        yield f"{r.launches_per_sample} launches a sample"
    if what := v.floor_fault(r.cell, (*r.ns, *r.normal_ns), warm=True):
        yield what


# --- eager calls ----------------------------------------------------------------------------------------------------


def _eager(v: Validation) -> None:
    once = _Once(v, "eager")
    for number, r in ((line.number, line.record) for line in v.eager):
        once.see(number, r.cell, r.sha256)
        for what in _eager_faults(v, r):
            v.fault("eager", number, f"{r.cell.id}: {what}")


def _eager_faults(v: Validation, r: EagerTiming) -> Iterable[str]:
    if what := v.arm_fault(r.rung, r.sha256):
        yield what
    if what := v.card_fault(r.gpu_digest):
        yield what
    if r.cell not in eager.CELLS:
        yield f"unknown cell; expected one of {', '.join(cell.id for cell in eager.CELLS)}"
    if r.us.keys() != eager.ARMS.keys():
        yield f"calls of {', '.join(r.us)}; expected {', '.join(eager.ARMS)}"
    if r.errors.keys() != set(eager.COMPUTING):
        yield f"errors of {', '.join(r.errors) or 'nothing'}; expected {', '.join(eager.COMPUTING)}"
    for arm, errors in r.errors.items():
        for what in _excesses(errors, r.limits):
            yield f"{arm} was timed with {what}"
    rounds = load_presets()[eager.PRESET].blocks
    for arm, samples in r.us.items():
        if len(samples) != rounds or r.calls != eager.CALLS:
            yield f"{len(samples)} rounds of {r.calls} calls of {arm}; expected {rounds} of {eager.CALLS}"
        elif min(map(min, samples)) <= 0:
            yield f"a call of {arm} takes no time"
        elif arm in eager.COMPUTING and (what := v.floor_fault(r.cell, _ns(samples), warm=True)):
            yield f"{arm}: {what}"


def _ns(us: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    return ((1e3 * first, 1e3 * second) for first, second in us)


# --- choices --------------------------------------------------------------------------------------------------------


def _choices(v: Validation) -> None:
    once, timed = _Once(v, "plan"), {line.record.cell for line in v.timings}
    for number, r in ((line.number, line.record) for line in v.choices):
        once.see(number, r.cell)
        if what := v.arm_fault(r.arm, None):
            v.fault("plan", number, what)
        if r.cell not in timed:
            v.fault("plan", number, f"{r.arm}: nothing was timed in {r.cell.id}")
        try:
            plan_of(r.arm)
        except (ValueError, IndexError):
            v.fault("plan", number, f"{r.arm} names no tile and number of splits")


# --- diagnosis ------------------------------------------------------------------------------------------------------


def _derived(v: Validation) -> None:
    """Medians, rates and ratios against the samples."""
    if not v.diagnosis:
        return
    timings = {line.record.cell: line.record for line in v.timings}
    blocks = {
        (cell, arm.arm): _valid_blocks(arm, record)
        for cell, record in timings.items()
        for arm in record.arms
        if arm.status == "timed"
    }
    roofs = {line.record.dtype: line.record for line in v.roofs}
    by_values = {(line.record.cell, line.record.arm, line.record.values): line.record for line in v.values}
    told: set[tuple[Cell, str]] = set()
    once = _Once(v, "diagnosis")
    lost: dict[Cell, list[int]] = defaultdict(list)
    for line in v.diagnosis:
        r = line.record
        once.see(line.number, msgspec.json.encode(r))
        if isinstance(r, ArmStats | Comparison) and r.cell not in timings:
            lost[r.cell].append(line.number)
            continue
        if isinstance(r, ArmStats):
            told.add((r.cell, r.arm))
            what = _estimate_fault(r, blocks.get((r.cell, r.arm)))
        elif isinstance(r, Comparison):
            what = _ratio_fault(r, blocks.get((r.cell, r.arm)), blocks.get((r.cell, r.other)))
        elif isinstance(r, RoofRate):
            what = None if r.dtype in roofs else f"no record of the roof of {r.dtype}"
            if r.dtype in roofs and r != diagnose.roof_rate(roofs[r.dtype]):
                what = f"the roof of {r.dtype} is not that of its samples"
        elif isinstance(r, ValueRatio):
            what = _value_ratio_fault(r, by_values.get((r.cell, r.arm, r.values)))
        else:
            continue
        if what is not None:
            v.fault("diagnosis", line.number, what)
    for cell, numbers in lost.items():
        v.fault("diagnosis", numbers[0], f"{len(numbers)} records of {cell.id}, which has no samples")
    if lacking := [f"{arm} in {cell.id}" for cell, arm in blocks if (cell, arm) not in told]:
        v.fault(
            "diagnosis", None, f"{len(lacking)} timed arms have no estimate, first {lacking[0]}; diagnose the run anew"
        )


def _valid_blocks(arm: ArmTiming, r: CellTiming) -> dict[int, tuple[float, float]]:
    pairs = zip(arm.blocks, arm.ns, strict=False)
    return {b: ns for b, ns in pairs if 0 <= b < len(r.telemetry) and r.telemetry[b].valid and min(ns) > 0}


def _estimate_fault(r: ArmStats, blocks: dict[int, tuple[float, float]] | None) -> str | None:
    where = f"{r.arm} in {r.cell.id}"
    if r.device_us is None:
        return None if r.status != "timed" else f"{where} is timed, but has no time"
    if not blocks:
        return f"{where}: a time without samples"
    us = np.asarray(list(blocks.values())) / 1e3
    if not us.min() <= r.device_us.ci[0] <= r.device_us.median <= r.device_us.ci[1] <= us.max():
        return f"{where}: its interval {r.device_us.ci} is not inside the samples' range around {r.device_us.median}"
    found, told = diagnose.estimate(us), r.device_us
    if found != told:
        of = f"the median of {found.n} samples is {found.median} {found.ci}"
        return f"{where}: {of}, not that of {told.n}, {told.median} {told.ci}"
    if r.tflops != diagnose.rounded(flops.flops(r.cell) / r.device_us.median / 1e6):
        return f"{where}: {r.tflops} TFLOP/s are not those of its median"
    return None


def _ratio_fault(
    r: Comparison, mine: dict[int, tuple[float, float]] | None, theirs: dict[int, tuple[float, float]] | None
) -> str | None:
    where = f"{r.arm} against {r.other} in {r.cell.id}"
    if mine is None or theirs is None:
        return f"{where}: compared without samples"
    shared = [block for block in mine if block in theirs]
    if len(shared) != r.n:
        return f"{where}: {r.n} quads, the samples have {len(shared)}"
    if r.ratio is None or r.ci is None:
        return None if r.n < stats.MIN_QUADS else f"{where}: {r.n} quads without a ratio"
    quads = stats.log_quads([mine[b] for b in shared], [theirs[b] for b in shared])
    if not math.exp(quads.min()) * (1 - 1e-8) <= r.ci[0] <= r.ratio <= r.ci[1] <= math.exp(quads.max()) * (1 + 1e-8):
        return f"{where}: its interval {r.ci} is not inside the quads' range around {r.ratio}"
    if (ratio := diagnose.rounded(math.exp(stats.yuen(quads)[0]))) != r.ratio:
        return f"{where}: the ratio of the samples is {ratio}, not {r.ratio}"
    return None


def _value_ratio_fault(r: ValueRatio, samples: ValueTiming | None) -> str | None:
    where = f"{r.arm} on {r.values} values in {r.cell.id}"
    if samples is None:
        return f"{where}: no record of it"
    least = min(map(min, (*samples.ns, *samples.normal_ns)), default=0.0)
    if samples.reason is None and (len(samples.ns) != len(samples.normal_ns) or least <= 0):
        return None  # a fault of the samples, told there
    return None if r == diagnose.value_ratio(samples) else f"{where}: its ratio is not that of its samples"


def _judged_anew(v: Validation) -> None:
    """Every derived record against what the code makes of the samples."""
    if not v.diagnosis:
        return
    anew = diagnose.diagnose(v.run, v.ladder)
    if len(anew) != len(v.diagnosis):
        v.fault("diagnosis", None, f"{len(v.diagnosis)} records, the samples give {len(anew)}; diagnose the run anew")
    for line, record in zip(v.diagnosis, anew, strict=False):
        if line.record != record:
            v.fault("diagnosis", line.number, f"not what the samples give, {type(record).__name__} of {_name(record)}")
            return


def _name(record: Diagnosis) -> str:
    for name in ("arm", "rung", "dtype"):
        if hasattr(record, name):
            return str(getattr(record, name))
    raise AssertionError(record)
