"""Rungs and other people's programs on the CPU: what to build, what to check, where the records go."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashladder import build as building
from flashladder import machine, paths
from flashladder.ablation import Selection, Session, new_info
from flashladder.arms import ArmSpec
from flashladder.emulator.device import ASYNC_TIMINGS, SCHEDULES, Options
from flashladder.emulator.library import build_emulated, emulated_target, require
from flashladder.errors import Exit, FlashladderError
from flashladder.inputs import Case, Family, edge_cases
from flashladder.ladder import load_ladder
from flashladder.model import HOPPER, Agreement, CheckRecord, DtypeName, Rung
from flashladder.native import kernel_head_dim
from flashladder.ninja import Progress, silent
from flashladder.rundir import EMULATED, INFO, RunDir, sha256_of
from flashladder.stages import check_items, compare_with_emulator, library_spec
from flashladder.worker import AgreementItem, AgreementJob, CheckItem, CheckJob

MAX_WORK, MAX_WIDE_WORK = 4_000_000, 12_000_000
"""Largest batch x heads x rows x keys x head_dim, tiles filled up: about two seconds on a core, races looked for.

The wide cases run on Hopper's rungs alone, whose wgmma costs the emulator a third.
"""
SWEEP: tuple[tuple[DtypeName, int, tuple[Family, ...]], ...] = (
    ("fp16", 64, ("edge", "values", "layout", "repeat", "split", "wide", "head_dim")),
    ("bf16", 128, ("edge", "repeat", "wide", "head_dim")),
)
"""Without filters: the other element type and head dimension run the edges alone."""


def work(case: Case) -> int:
    """How much an emulated run of the case costs, in multiply-adds of 16 x 32 tiles."""
    s = case.cell.shape
    return s.batch * s.heads_q * -(-s.seq_q // 16) * -(-s.seq_k // 32) * 16 * 32 * s.head_dim


def cpu_cases(selection: Selection) -> list[Case]:
    """The gate's edge cases of a size that fits a CPU."""
    sweep = SWEEP
    if selection.dtypes:
        families: tuple[Family, ...] = SWEEP[0][2]
        sweep = tuple((dtype, head_dim, families) for dtype in selection.dtypes for head_dim in (64, 128))
    return [
        case
        for dtype, head_dim, families in sweep
        for case in edge_cases(dtype, head_dim)
        if case.family in families
        and work(case) <= (MAX_WIDE_WORK if case.family == "wide" else MAX_WORK)
        and (not selection.masks or case.cell.mask in selection.masks)
        and (not selection.shapes or case.cell.shape.id in selection.shapes)
    ]


def quick_cases(selection: Selection) -> list[str]:
    """The ids of the cases at the seams, of one element type and kernel head dimension: a quarter of the kernels."""
    cases = [c for c in cpu_cases(selection) if c.family in ("edge", "split", "head_dim")]
    kinds = [(c.cell.dtype, kernel_head_dim(c.cell.shape.head_dim)) for c in cases]
    return [c.id for c, kind in zip(cases, kinds, strict=True) if kind == kinds[0]]


def concerns(case: Case, rung: Rung) -> bool:
    """Whether the case can show more of this rung than the edges do: wide tiles, split keys."""
    if case.family == "wide":
        return rung.min_arch >= HOPPER
    return case.family != "split" or load_ladder().has(rung, "splits")


@dataclass
class CpuCheck:
    """An emulated check in progress."""

    run: RunDir
    rungs: tuple[Rung, ...]
    cases: list[Case]
    options: Options
    seed: int
    specs: list[ArmSpec] = field(default_factory=list)
    records: list[CheckRecord] = field(default_factory=list)

    def build(self, progress: Progress = silent) -> None:
        """Translate and compile the rungs; raises BuildError when one cannot be."""
        instances = {f"{c.cell.dtype}_d{kernel_head_dim(c.cell.shape.head_dim)}" for c in self.cases}
        targets = [
            emulated_target(
                r.id,
                paths.ROOT / r.source,
                r.min_arch,
                instances=instances,
                optimize="0" if r.has_tensor_cores else "g",
                host=building.built_objects(r),
            )
            for r in self.rungs
        ]
        failures = build_emulated(targets, progress)
        for rung, target in zip(self.rungs, targets, strict=True):
            library = require(target, failures)
            self.specs.append(library_spec(rung, library, sha256_of(library)))

    def check(self, progress: Progress = silent) -> list[CheckRecord]:
        """Run what is not recorded, on all cores; returns the records of these cases."""
        items = [
            CheckItem(arm=spec, case=case)
            for case in self.cases
            for spec, rung in zip(self.specs, self.rungs, strict=True)
            if concerns(case, rung)
        ]
        job = CheckJob(items=(), seed=self.seed, emulation=self.options)
        records = check_items(self.run, items, job, progress, workers=os.cpu_count() or 1)
        wanted = {case.id for case in self.cases}
        binaries = {spec.sha256 for spec in self.specs}
        self.records = [r for r in records if r.case in wanted and r.sha256 in binaries]
        return self.records

    def compare(self, gpu: Sequence[ArmSpec], progress: Progress = silent) -> list[Agreement]:
        """Run the cases on the GPU and here, rungs side by side; returns the records of these rungs."""
        on_gpu = {spec.name: spec for spec in gpu}
        items = [
            AgreementItem(gpu=on_gpu[spec.name], emulated=spec, case=case, arithmetic=rung.arithmetic)
            for case in self.cases
            for spec, rung in zip(self.specs, self.rungs, strict=True)
            if spec.name in on_gpu and concerns(case, rung)
        ]
        job = AgreementJob(items=(), seed=self.seed, emulation=self.options)
        return compare_with_emulator(self.run, items, job, progress, workers=os.cpu_count() or 1)

    def raise_on_disagreement(self, records: Sequence[Agreement]) -> None:
        """Raise, with the command that repeats it, when GPU and emulator disagree on a case."""
        if bad := [r for r in records if r.status == "differs"]:
            raise self._incorrect(len(bad), bad[0], "both")

    def raise_on_failures(self) -> None:
        """Raise, with the command that repeats it, when a case failed."""
        bad = [r for r in self.records if r.status not in ("pass", "unsupported")]
        if bad:
            raise self._incorrect(len(bad), bad[0], "cpu")

    def _incorrect(self, count: int, first: CheckRecord | Agreement, where: str) -> FlashladderError:
        o = self.options
        again = (
            f"flashladder check --on {where} --rung {first.arm} --dtype {first.cell.dtype} --case {first.case} "
            f"--schedule {o.schedule} --seed {self.seed} --races {'on' if o.races else 'off'}"
        )
        error = FlashladderError(f"{count} cases failed; the first: {first.reason}; repeat it with: {again}")
        error.exit_code = Exit.INCORRECT
        return error


def select_cases(selection: Selection, only: Sequence[str] = ()) -> list[Case]:
    """The cases that pass the filters; of these those named in `only`, if any.

    Raises FlashladderError when a filter leaves no case or names none.
    """
    cases = cpu_cases(selection)
    if not cases:
        raise FlashladderError("no case of the gate passes these filters; loosen --shape, --dtype or --mask")
    unknown = [name for name in only if name not in {case.id for case in cases}]
    if unknown:
        raise FlashladderError(f"no case {unknown[0]!r} under these filters; expected one such as {cases[0].id}")
    return [case for case in cases if not only or case.id in only]


def beside(session: Session, selection: Selection, options: Options, only: Sequence[str] = ()) -> CpuCheck:
    """The emulated counterpart of a run on the GPU, for compare(); raises as select_cases() does."""
    options = replace(options, multiprocessors=machine.fingerprint().sm_count)  # so that both choose the same kernels
    return CpuCheck(session.run, session.rungs, select_cases(selection, only), options, selection.seed)


def open_check(selection: Selection, options: Options, only: Sequence[str] = ()) -> CpuCheck:
    """The rungs, cases and run directory of an emulated check; raises as select_cases() does.

    And FlashladderError where the directory holds a run of a GPU, which would be overwritten.
    """
    cases = select_cases(selection, only)
    name = f"{options.schedule}-{selection.seed}-{'races' if options.races else 'plain'}"
    run = RunDir(selection.out or paths.RESULTS / EMULATED / name)
    if others := sorted({file.name for file in run.files} - {INFO, "check.jsonl"}):
        raise FlashladderError(f"{run.path} holds more than emulated checks ({others[0]}); give another --out")
    run.write_info(new_info(run, selection.preset, machine.fingerprint()))
    return CpuCheck(run, load_ladder().select(selection.rungs), cases, options, selection.seed)


# --- programs -------------------------------------------------------------------------------------------------------


def build_program(file: Path, min_arch: int, progress: Progress = silent) -> Path:
    """Translate a CUDA program with its own main(); raises BuildError with the first error."""
    target = emulated_target(file.stem, file.resolve(), min_arch, bound=False)
    return require(target, build_emulated([target], progress))


def run_program(program: Path, arguments: Sequence[str], options: Options) -> int:
    """Run an emulated program; its exit code, or Exit.INCORRECT when the emulator found a fault."""
    environment = {
        **os.environ,
        "FLASHLADDER_SCHEDULE": str(SCHEDULES.index(options.schedule)),
        "FLASHLADDER_ASYNC": str(ASYNC_TIMINGS.index(options.async_timing)),
        "FLASHLADDER_SEED": str(options.seed),
        "FLASHLADDER_RACES": str(int(options.races)),
    }
    return subprocess.run([program, *arguments], env=environment).returncode
