"""The regression guard: the kernels of a base commit, rebuilt, against those of the present tree.

What decides is a paired comparison in one process, of the rungs whose libraries differ; equal libraries have nothing to
compare. Without a GPU the machine code is compared and nothing is timed. Stored baselines are a tripwire beside it:
they are compared only on the machine, driver and clock that they were made on.
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Literal

import msgspec
import numpy as np

from flashladder import build as building
from flashladder import paths, stats
from flashladder.arms import ArmSpec
from flashladder.check import refusal
from flashladder.errors import BuildError, EnvironmentInvalidError, FlashladderError
from flashladder.ladder import Ladder, load_ladder
from flashladder.model import (
    UNDECODABLE,
    ArmTiming,
    BuildRecord,
    Cell,
    CellTiming,
    CheckRecord,
    L2Mode,
    Machine,
    Preset,
    Record,
    Rung,
)
from flashladder.ninja import Progress, silent
from flashladder.rundir import RunDir, sha256_of
from flashladder.stages import check_arms, library_spec, time_cells
from flashladder.tables import NOT_APPLICABLE, NOT_MEASURED, Table, interval, number

BASE = "base_"
"""Prefix of a base's arm."""
LIMIT = 0.02
"""A slowdown whose whole interval lies above this is a regression."""
MIN_BAND, BAND_SIGMAS = 0.03, 3 * math.sqrt(2)
SESSIONS = 5
CLOCK_TOLERANCE = 0.03
"""Of the SM clock while a cell was timed."""
FINGERPRINT = (
    "gpu",
    "gpu_digest",
    "arch",
    "sm_count",
    "vbios",
    "driver",
    "power_limit_w",
    "max_sm_clock_mhz",
    "max_memory_clock_mhz",
    "ecc",
    "mig",
    "cpu",
)
"""What a stored time depends on: it is compared only where all of these are the same."""
BASELINES = paths.EXPERIMENTS / "baselines"
LOG = "log.jsonl"

ChangeKind = Literal["same sources", "same library", "same machine code", "differs", "new", "gone", "does not build"]


class Built(Record, frozen=True, kw_only=True):
    """A rung at one commit. `record` is None where it need not be built: its sources are the other's."""

    digest: str | None
    """Of all that the library is made from; None: there is no such source."""
    library: str | None = None
    record: BuildRecord | None = None


class BaseJob(Record, frozen=True, kw_only=True):
    """What the child that builds a base reads. Rungs with these digests are not built."""

    rungs: tuple[Rung, ...]
    archs: tuple[str, ...]
    digests: dict[str, str]


class Change(Record, frozen=True, kw_only=True):
    """What became of a rung between the base and the present tree."""

    rung: str
    kind: ChangeKind
    archs: tuple[str, ...] = ()
    """Where the machine code differs."""
    reason: str | None = None

    @property
    def is_timed(self) -> bool:
        """Whether there is something to compare: two libraries that are not the same."""
        return self.kind in ("differs", "same machine code")


class Slowdown(Record, frozen=True, kw_only=True):
    """The present time over the base's, in one cell: above 1 the present tree is slower."""

    rung: str
    cell: str
    n: int
    verdict: Literal["regression", "no regression", "insufficient samples", "not timed"]
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    reason: str | None = None


class Stored(Record, frozen=True, kw_only=True):
    """One arm in one cell: its median of every session, and the SM clock of each."""

    us: tuple[float, ...]
    sm_clock_mhz: tuple[float | None, ...]

    @property
    def band(self) -> float:
        """Fraction of the time that two sessions may differ by."""
        logs = [math.log(us) for us in self.us]
        return max(MIN_BAND, BAND_SIGMAS * stdev(logs))

    @property
    def mean_us(self) -> float:
        return math.exp(fmean(math.log(us) for us in self.us))


class Baseline(Record, frozen=True, kw_only=True):
    """experiments/baselines/GPU.json: what several sessions measured on one machine."""

    machine: Machine
    commit: str
    date: str
    arms: dict[str, dict[str, Stored]]
    """Arm -> cell id."""


class LogEntry(Record, frozen=True, kw_only=True):
    """A line of experiments/baselines/log.jsonl: who replaced which baseline, when and why."""

    date: str
    commit: str
    file: str
    sha256: str
    why: str


class Trip(Record, frozen=True, kw_only=True):
    """One stored time beside the present one."""

    arm: str
    cell: str
    verdict: Literal["slower", "within the band", "faster", "refused"]
    ratio: float | None = None
    """The present time over the stored one."""
    band: float | None = None
    reason: str | None = None


# --- the base -------------------------------------------------------------------------------------------------------


def commit_of(name: str) -> str:
    """The commit that `name` stands for. Raises FlashladderError when there is none, or no git."""
    done = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if done.returncode != 0:
        raise FlashladderError(
            f"no commit {name!r} in {paths.ROOT}; expected a branch, tag or commit of a git checkout"
        )
    return done.stdout.strip()


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *arguments], cwd=paths.ROOT, capture_output=True, text=True)
    except OSError as error:
        raise FlashladderError("git is missing; the guard rebuilds a commit of a git checkout") from error


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The commit's kernels and ladder in a temporary folder, which shares this tree's libraries: named by content.

    Nothing is left behind in the repository, whatever ends this process.
    """
    done = subprocess.run(
        ["git", "archive", "--format=tar", commit, "kernel", "experiments/ladder.toml"],
        cwd=paths.ROOT,
        capture_output=True,
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise FlashladderError(
            f"{commit[:12]} has no kernels to compare with: {said}; expected a commit of this project"
        )
    with tempfile.TemporaryDirectory(prefix="flashladder-guard-") as folder:
        root = Path(folder)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(root, filter="data")
        paths.BUILD.mkdir(exist_ok=True)
        (root / "build").symlink_to(paths.BUILD)
        yield root


def build_base(root: Path, job: BaseJob) -> dict[str, Built]:
    """Build the rungs of the checkout at `root` in a child: everything here reads one tree."""
    done = subprocess.run(
        [sys.executable, "-m", "flashladder.guard"],
        input=msgspec.json.encode(job),
        capture_output=True,
        env={**os.environ, "FLASHLADDER_ROOT": str(root)},
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise BuildError(f"the base could not be built: {lines[-1] if lines else 'the child said nothing'}")
    return msgspec.json.decode(done.stdout, type=dict[str, Built])


def build_here(job: BaseJob, progress: Progress = silent) -> dict[str, Built]:
    """The rungs of this process's tree; those without a source, or whose digest the job names, are not built."""
    sources = {rung.id: rung for rung in job.rungs if (paths.ROOT / rung.source).exists()}
    digests = {t.rung_id: t.digest for t in building.targets(list(sources.values()), job.archs)}
    todo = [rung for name, rung in sources.items() if name in digests and digests[name] != job.digests.get(name)]
    found = {rung.id: Built(digest=digests.get(rung.id)) for rung in job.rungs}
    for target, record in building.build(todo, job.archs, progress):
        # Resolved: a base's build/ is a link into the present one, and goes.
        library = str(target.library.resolve())
        found[target.rung_id] = Built(digest=target.digest, library=library, record=record)
    return found


def digests_here(rungs: Sequence[Rung], archs: Sequence[str]) -> dict[str, str]:
    return {t.rung_id: t.digest for t in building.targets(rungs, archs)}


def declared_in(root: Path) -> set[str]:
    """Ids of the rungs that a checkout's ladder declares."""
    text = (root / "experiments" / "ladder.toml").read_text()
    return {str(rung["id"]) for rung in tomllib.loads(text).get("rung", ())}


def changes(present: Mapping[str, Built], base: Mapping[str, Built], gone: Sequence[str] = ()) -> list[Change]:
    """Every rung of the present tree in order, then those that only the base has."""
    return [*(_change(name, here, base[name]) for name, here in present.items()), *map(_gone, gone)]


def _gone(rung: str) -> Change:
    return Change(rung=rung, kind="gone")


def _change(rung: str, here: Built, there: Built) -> Change:
    if there.digest is None:
        return Change(rung=rung, kind="new")
    if here.digest == there.digest:
        return Change(rung=rung, kind="same sources")
    assert here.record is not None
    assert there.record is not None
    for record, where in ((here.record, "here"), (there.record, "in the base")):
        if record.status == "failed":
            return Change(rung=rung, kind="does not build", reason=f"{where}: {record.reason}")
    if here.record.sha256 == there.record.sha256:
        return Change(rung=rung, kind="same library")
    ours, theirs = here.record.cubins, there.record.cubins
    if not ours or not theirs:
        return Change(rung=rung, kind="differs", reason="cuobjdump is missing: machine code cannot be compared")
    differing = tuple(arch for arch in {**theirs, **ours} if ours.get(arch) != theirs.get(arch))
    return Change(rung=rung, kind="differs" if differing else "same machine code", archs=differing)


# --- the paired comparison ------------------------------------------------------------------------------------------


def specs(
    rungs: Sequence[Rung], found: Sequence[Change], present: Mapping[str, Built], base: Mapping[str, Built]
) -> list[ArmSpec]:
    """The arms to time: of every rung that differs the present library and the base's."""
    timed = {change.rung for change in found if change.is_timed}
    arms = []
    for rung in (r for r in rungs if r.id in timed):
        for built, prefix in ((present[rung.id], ""), (base[rung.id], BASE)):
            assert built.record is not None
            assert built.library is not None
            spec = library_spec(rung, Path(built.library), built.record.sha256)
            arms.append(msgspec.structs.replace(spec, name=prefix + rung.id, kind="rung"))
    return arms


def slowdowns(timings: Sequence[CellTiming], checks: Sequence[CheckRecord], rungs: Sequence[str]) -> list[Slowdown]:
    """The present time over the base's of every rung in every cell, over the blocks whose telemetry is valid."""
    return [_slowdown(timing, checks, rung) for rung in rungs for timing in timings]


def _slowdown(timing: CellTiming, checks: Sequence[CheckRecord], rung: str) -> Slowdown:
    arms = {arm.arm: arm for arm in timing.arms}
    here, there = arms.get(rung), arms.get(BASE + rung)
    nothing = Slowdown(rung=rung, cell=timing.cell.id, n=0, verdict="not timed")
    for arm, where in ((here, "here"), (there, "in the base")):
        if arm is None:
            return msgspec.structs.replace(nothing, reason=f"{where}: no record")
        refused = refusal(checks, arm.arm, arm.sha256, timing.cell)
        if refused is not None or arm.status != "timed":
            reason = refused[1] if refused is not None else arm.reason
            return msgspec.structs.replace(nothing, reason=f"{where}: {reason}")
    assert here is not None
    assert there is not None
    theirs = dict(zip(there.blocks, there.ns, strict=True))
    pairs = [
        (ns, theirs[block])
        for block, ns in zip(here.blocks, here.ns, strict=True)
        if block in theirs and timing.telemetry[block].valid
    ]
    if len(pairs) < stats.MIN_QUADS:
        reason = f"{len(pairs)} valid blocks, expected {stats.MIN_QUADS}"
        if not all(telemetry.valid for telemetry in timing.telemetry):
            reason += "; end what else runs on the GPU, or let it cool, and measure again"
        return msgspec.structs.replace(nothing, n=len(pairs), verdict="insufficient samples", reason=reason)
    ours, others = (np.array([pair[side] for pair in pairs], np.float64) for side in (0, 1))
    found = stats.paired(others, ours)  # above 1: the base is faster
    return Slowdown(
        rung=rung,
        cell=timing.cell.id,
        n=found.n,
        verdict="regression" if found.ci[0] > 1 + LIMIT else "no regression",
        ratio=_rounded(found.ratio),
        ci=(_rounded(found.ci[0]), _rounded(found.ci[1])),
    )


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")


# --- the tripwire ---------------------------------------------------------------------------------------------------


def baseline_file(slug: str) -> Path:
    return BASELINES / f"{slug}.json"


def read_baseline(slug: str) -> Baseline | None:
    """What is stored for a GPU model; None when nothing is. Raises FlashladderError when it cannot be read."""
    file = baseline_file(slug)
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Baseline)
    except UNDECODABLE as error:
        raise FlashladderError(f"{file}: no valid baseline: {error}; restore it from git") from error


def mismatch(there: Machine, here: Machine) -> str | None:
    """Why times of one machine say nothing on another; None where they may be compared."""
    differing = [name for name in FINGERPRINT if getattr(there, name) != getattr(here, name)]
    if not differing:
        return None
    return "made elsewhere: " + ", ".join(f"{n} {getattr(there, n)}, here {getattr(here, n)}" for n in differing)


def trips(baseline: Baseline, here: Machine, timings: Sequence[CellTiming]) -> list[Trip]:
    """Every stored time that was measured again, or why it is refused."""
    refused = mismatch(baseline.machine, here)
    found = []
    for timing in timings:
        for arm in timing.arms:
            stored = baseline.arms.get(arm.arm, {}).get(timing.cell.id)
            if stored is None or not arm.ns:
                continue
            here_us = median_us(timing, arm)
            few = None if here_us is not None else f"fewer than {stats.MIN_QUADS} valid blocks"
            reason = refused or few or _clocks(stored, timing)
            trip = Trip(arm=arm.arm, cell=timing.cell.id, verdict="refused", reason=reason)
            if reason is None and here_us is not None:
                ratio, band = here_us / stored.mean_us, stored.band
                slower, faster = ratio > 1 + band, ratio < 1 / (1 + band)
                trip = Trip(
                    arm=arm.arm,
                    cell=timing.cell.id,
                    verdict="slower" if slower else "faster" if faster else "within the band",
                    ratio=_rounded(ratio),
                    band=_rounded(band),
                )
            found.append(trip)
    return found


def _clocks(stored: Stored, timing: CellTiming) -> str | None:
    """Why the clock makes the times incomparable."""
    then, now = [c for c in stored.sm_clock_mhz if c is not None], clock_mhz(timing)
    if not then or now is None:
        return "the SM clock was not read"
    if abs(now / median(then) - 1) > CLOCK_TOLERANCE:
        return f"the SM clock was {median(then):.0f} MHz, here {now:.0f}"
    return None


def clock_mhz(timing: CellTiming) -> float | None:
    """Over the blocks whose telemetry is valid."""
    clocks = [t.sm_clock_mhz for t in timing.telemetry if t.valid and t.sm_clock_mhz is not None]
    return float(median(clocks)) if clocks else None


def median_us(timing: CellTiming, arm: ArmTiming) -> float | None:
    """Over the blocks whose telemetry is valid; None of fewer than MIN_QUADS."""
    valid = [pair for block, pair in zip(arm.blocks, arm.ns, strict=True) if timing.telemetry[block].valid]
    return median(ns for pair in valid for ns in pair) / 1e3 if len(valid) >= stats.MIN_QUADS else None


def baseline_of(sessions: Sequence[RunDir], here: Machine, commit: str, date: str) -> Baseline:
    """What the sessions measured, over valid blocks.

    Raises EnvironmentInvalidError when an arm was not timed in all of them.
    """
    times: dict[str, dict[str, list[tuple[float, float | None]]]] = {}
    for run in sessions:
        for timing in run.timings():
            for arm in timing.arms:
                if (us := median_us(timing, arm)) is not None:
                    cells = times.setdefault(arm.arm, {})
                    cells.setdefault(timing.cell.id, []).append((us, clock_mhz(timing)))
    for name, cells in times.items():
        for cell, found in cells.items():
            if len(found) != len(sessions):
                raise EnvironmentInvalidError(f"{name} in {cell} was timed in {len(found)} of {len(sessions)} sessions")
    if not times:
        raise EnvironmentInvalidError("nothing was timed: no baseline is written")
    arms = {
        name: {
            cell: Stored(us=tuple(_rounded(us) for us, _ in found), sm_clock_mhz=tuple(mhz for _, mhz in found))
            for cell, found in cells.items()
        }
        for name, cells in times.items()
    }
    return Baseline(machine=here, commit=commit, date=date, arms=arms)


def write_baseline(baseline: Baseline, slug: str, why: str) -> Path:
    """Replace the stored baseline of a GPU model and log it."""
    file = baseline_file(slug)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=2) + b"\n")
    entry = LogEntry(date=baseline.date, commit=baseline.commit, file=file.name, sha256=sha256_of(file), why=why)
    with (file.parent / LOG).open("ab") as log:
        log.write(msgspec.json.encode(entry) + b"\n")
    return file


def unlogged(slug: str) -> str | None:
    """What is wrong when the stored baseline is not the one that the log names last."""
    file, log = baseline_file(slug), BASELINES / LOG
    lines = log.read_bytes().splitlines() if log.exists() else []
    entries = [msgspec.json.decode(line, type=LogEntry) for line in lines]
    last = next((e for e in reversed(entries) if e.file == file.name), None)
    if last is not None and last.sha256 == sha256_of(file):
        return None
    return f"{file.name} is not what {LOG} names; only 'flashladder guard --update-baseline --why TEXT' may write it"


def guarded(ladder: Ladder, arch: str | None) -> tuple[Rung, ...]:
    """The rungs whose times are stored: the last of every rung file that runs on the GPU, portable and not."""
    runs = [r for r in ladder.rungs if arch is None or r.runs_on(arch)]
    lasts = {r.min_arch: r for r in runs}
    return tuple(lasts.values())


def measure(
    run: RunDir, arms: Sequence[ArmSpec], cells: dict[Cell, L2Mode], preset: Preset, seed: int, progress: Progress
) -> None:
    """Check the arms, then time them together in every cell. What the run holds of these binaries is not repeated."""
    dtypes = tuple(dict.fromkeys(cell.dtype for cell in cells))
    check_arms(run, arms, dtypes, sorted({cell.shape.head_dim for cell in cells}), seed, progress)
    time_cells(run, load_ladder(), arms, cells, preset, seed, progress)


# --- for a terminal -------------------------------------------------------------------------------------------------


def change_table(found: Sequence[Change]) -> Table:
    """What differs; of the rungs that do not the number alone is said elsewhere."""
    rows = [
        (c.rung, c.kind, " ".join(c.archs) or NOT_APPLICABLE, c.reason or NOT_APPLICABLE)
        for c in found
        if c.kind not in ("same sources", "same library")
    ]
    return Table(("rung", "against the base", "machine code differs on", "reason"), tuple(rows))


def slowdown_table(found: Sequence[Slowdown]) -> Table:
    rows = [
        (
            s.rung,
            s.cell,
            NOT_MEASURED if s.ratio is None or s.ci is None else interval(s.ratio, s.ci),
            s.verdict if s.reason is None else f"{s.verdict}: {s.reason}",
        )
        for s in found
    ]
    return Table(("rung", "cell", "time over the base's", "verdict"), tuple(rows))


def trip_table(found: Sequence[Trip]) -> Table:
    rows = [
        (
            t.arm,
            t.cell,
            NOT_MEASURED if t.ratio is None else number(t.ratio),
            NOT_APPLICABLE if t.band is None else f"{100 * t.band:.1f} %",
            t.verdict if t.reason is None else f"{t.verdict}: {t.reason}",
        )
        for t in found
    ]
    return Table(("kernel", "cell", "time over the stored one", "band", "verdict"), tuple(rows))


# --- the child ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Entry of the child that builds a base: its job on stdin, what it built on stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=BaseJob)
    try:
        built = build_here(job)
    except FlashladderError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(built))


if __name__ == "__main__":
    main()
