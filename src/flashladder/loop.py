"""The challenge loop: ask a proposer for a candidate, let the referee judge it, until a budget or a criterion ends it.

The folder holds an append-only ledger (ledger.jsonl, a line an attempt), from which everything else follows: the state
(state.json) and the pointer to the champion (champion.json) are replaced whole, never edited. An attempt that was
interrupted goes on where it stopped: a proposal that was made is not asked for again, a printed verdict counts.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from flashladder import durable
from flashladder.errors import EnvironmentInvalidError, FlashladderError
from flashladder.model import UNDECODABLE, ChallengeVerdict, Finding, Ratio, Record
from flashladder.rundir import sha256_of

LEDGER, STATE, CHAMPION = "ledger.jsonl", "state.json", "champion.json"
RUNS, CHALLENGES = "runs", "challenge"
BRIEF, PROPOSED, VERDICT = "brief.json", "proposed.json", "verdict.json"
CANDIDATES = ("candidate.cu", "candidate.py")
PROTOCOL = 1
NOTHING_MORE = 3
"""Exit code of a proposer that has no candidate left."""
NOTHING_LEFT = "the proposer has nothing more to propose"
NOTE_CHARS = 2000
REFEREE = (sys.executable, "-m", "flashladder", "challenge")
SEARCH = (sys.executable, "-m", "flashladder.propose")

Outcome = Literal["accepted", "reverted", "not timed", "timeout", "no verdict", "no candidate"]


class Attempt(Record, frozen=True, kw_only=True):
    """One line of the ledger: a proposal and what became of it."""

    number: int
    date: str
    outcome: Outcome
    state: str | None = None
    """The last that the referee entered."""
    reason: str | None = None
    ratios: dict[str, Ratio] = msgspec.field(default_factory=dict)
    geomean: Ratio | None = None
    file: str | None = None
    """Of the candidate, from the loop's folder."""
    sha256: str | None = None
    champion: str | None = None
    """Whom it was measured against."""
    note: str = ""
    """What the proposer printed."""
    proposer_s: float = 0.0
    seconds: float = 0.0
    """Of the referee."""
    gpu_s: float = 0.0
    """Of these, with the GPU held; none where nothing could be decided."""

    @property
    def ratio(self) -> Ratio | None:
        """Over all cells: the referee's, or the geometric means of the cells' ratios and bounds, which is wider."""
        if self.geomean is not None or not self.ratios:
            return self.geomean

        def mean(values: list[float]) -> float:
            return math.exp(math.fsum(map(math.log, values)) / len(values))

        found = self.ratios.values()
        return Ratio(
            ratio=mean([r.ratio for r in found]), low=mean([r.low for r in found]), high=mean([r.high for r in found])
        )

    @property
    def is_build_failure(self) -> bool:
        return self.outcome == "reverted" and self.state == "BUILD"


class Budget(Record, frozen=True, kw_only=True):
    """When the loop ends. None: no limit."""

    iterations: int = 100
    wall_s: float | None = None
    gpu_s: float | None = None
    """A challenge holds the GPU from end to end."""
    money: float | None = None
    rate: float = 0.0
    """Money an hour, whether the GPU is busy or not: a rented machine costs while it waits."""
    patience: int = 2
    """Non-accepts in a row."""
    build_failures: int = 3
    roof: float = 0.9
    """Share of the roof at which the champion is as good as done."""


class Champion(Record, frozen=True, kw_only=True):
    """champion.json: the rung that the loop began with, or a file that was accepted."""

    id: str
    file: str
    """Absolute."""
    attempt: int | None = None
    gain: float = 1.0
    """Product of the accepted ratios: the first champion's time over this one's."""


class Progress(Record, frozen=True, kw_only=True):
    """state.json: what the ledger adds up to."""

    attempts: int
    accepted: int
    rejected_in_a_row: int
    build_failures: int
    wall_s: float
    gpu_s: float
    money: float
    gain: float
    stopped: str | None = None


class CellFacts(Record, frozen=True, kw_only=True):
    us: float
    roofline_pct: float | None
    findings: tuple[Finding, ...] = ()


class Diagnosis(Record, frozen=True, kw_only=True):
    """What a recorded run says of the rung that the loop began with; an accepted file has no profile of its own."""

    rung: str
    run: str
    gpu: str | None
    config: dict[str, int]
    roof_share: float | None
    """Geometric mean of its roofline shares over the headline cells of the ladder's dtype."""
    cells: dict[str, CellFacts]


class Brief(Record, frozen=True, kw_only=True):
    """What a proposer reads on stdin."""

    protocol: int = PROTOCOL
    number: int
    """Of this attempt, from 1."""
    seed: int
    candidate: str
    """Absolute path to write: the .cu file, or beside it a .py of the same name."""
    champion: Champion
    diagnosis: Diagnosis | None
    ledger: tuple[Attempt, ...]
    progress: Progress
    budget: Budget


# --- what follows from the ledger -----------------------------------------------------------------------------------


def progress_of(attempts: Sequence[Attempt], budget: Budget) -> Progress:
    wall = math.fsum(a.proposer_s + a.seconds for a in attempts)
    rejected = 0
    for attempt in attempts:
        rejected = 0 if attempt.outcome == "accepted" else rejected + 1
    return Progress(
        attempts=len(attempts),
        accepted=sum(a.outcome == "accepted" for a in attempts),
        rejected_in_a_row=rejected,
        build_failures=sum(a.is_build_failure for a in attempts),
        wall_s=wall,
        gpu_s=math.fsum(a.gpu_s for a in attempts),
        money=budget.rate * wall / 3600,
        gain=math.prod(a.ratio.ratio for a in attempts if a.outcome == "accepted" and a.ratio is not None),
    )


def stop_reason(progress: Progress, budget: Budget, roof_share: float | None) -> str | None:
    """Why the loop must not go on; None: it may."""
    share = None if roof_share is None else roof_share * progress.gain
    if share is not None and share >= budget.roof:
        return f"the champion reaches {share:.0%} of its roof; expected less than {budget.roof:.0%} to go on (--roof)"
    if progress.rejected_in_a_row >= budget.patience:
        return f"{progress.rejected_in_a_row} attempts in a row were not accepted (--patience {budget.patience})"
    if progress.build_failures >= budget.build_failures:
        return f"{progress.build_failures} candidates did not build (--build-failures {budget.build_failures})"
    if progress.attempts >= budget.iterations:
        return f"the budget of {budget.iterations} attempts is spent (--iterations)"
    for spent, most, what in (
        (progress.wall_s / 60, None if budget.wall_s is None else budget.wall_s / 60, "minutes (--minutes)"),
        (progress.gpu_s / 60, None if budget.gpu_s is None else budget.gpu_s / 60, "GPU minutes (--gpu-minutes)"),
        (progress.money, budget.money, "money (--money)"),
    ):
        if most is not None and spent >= most:
            return f"the budget of {most:g} {what} is spent: {spent:.3g}"
    return None


def champion_of(attempts: Sequence[Attempt], first: Champion, folder: Path) -> Champion:
    """The file that was accepted last, or the first champion."""
    accepted = [a for a in attempts if a.outcome == "accepted"]
    if not accepted:
        return first
    last = accepted[-1]
    assert last.file is not None
    gain = math.prod(a.ratio.ratio for a in accepted if a.ratio is not None)
    name = f"attempt {last.number}"
    return Champion(id=name, file=str((folder / last.file).resolve()), attempt=last.number, gain=gain)


# --- the folder -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    path: Path

    def held(self) -> AbstractContextManager[int]:
        """The lock's file descriptor. A referee that outlives a killed loop inherits it, so that none starts beside it.

        Raises FlashladderError when another process holds the folder.
        """
        return durable.held(
            self.path, f"a loop, or the last challenge of one that was killed, runs in {self.path}; wait for it"
        )

    def attempts(self) -> list[Attempt]:
        """The ledger. What follows the last newline was cut off by an interrupt and is no attempt.

        Raises FlashladderError on a line that is no record or out of order: nothing is guessed.
        """
        file = self.path / LEDGER
        if not file.exists():
            return []
        found = []
        for line_number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
            try:
                attempt = msgspec.json.decode(line, type=Attempt)
            except UNDECODABLE as error:
                raise FlashladderError(
                    f"{file}:{line_number}: no attempt: {error}; restore the line, or go on in a new --out"
                ) from error
            if attempt.number != line_number:
                raise FlashladderError(
                    f"{file}:{line_number}: attempt {attempt.number}, expected {line_number}; a line is missing"
                )
            found.append(attempt)
        return found

    def append(self, attempt: Attempt) -> None:
        """Add a line that has reached the disk on return; a torn one goes first."""
        file = self.path / LEDGER
        try:
            with file.open("a+b", buffering=0) as ledger:  # a buffer would write again what failed, when it is closed
                ledger.seek(0)
                whole = ledger.read().rfind(b"\n") + 1
                ledger.truncate(whole)
                line = msgspec.json.encode(attempt) + b"\n"
                try:
                    if ledger.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(ledger.fileno())
                except OSError:
                    ledger.truncate(whole)
                    raise
        except OSError as error:
            raise EnvironmentInvalidError(
                f"{file} cannot be written: {error.strerror}; make room, then run the same command"
            ) from error

    def run(self, number: int) -> Path:
        return self.path / RUNS / f"{number:04}"

    def write(self, name: str, record: msgspec.Struct) -> None:
        durable.replace(self.path / name, durable.indented(record))


# --- one attempt ----------------------------------------------------------------------------------------------------


class Proposal(Record, frozen=True, kw_only=True):
    """proposed.json: the proposer has ended, and the file that it left."""

    file: str | None
    sha256: str | None
    note: str
    seconds: float
    end: Literal["proposed", "nothing more", "failed"]
    reason: str | None = None


@dataclass(frozen=True)
class Child:
    """How a child ended: its exit code, None when the time limit ended it."""

    code: int | None
    out: str
    err: str
    seconds: float


@dataclass
class Loop:
    folder: Folder
    proposer: tuple[str, ...]
    budget: Budget
    first: Champion
    diagnosis: Diagnosis | None
    seed: int = 0
    on_gpu: bool = False
    referee: tuple[str, ...] = REFEREE
    referee_options: tuple[str, ...] = ()
    proposer_limit_s: float = 600.0
    referee_limit_s: float = 900.0

    def run(self, say: Callable[[str], None]) -> Progress:
        """Attempt after attempt, until a criterion ends it; says each. Raises FlashladderError as the folder does."""
        with self.folder.held() as lock:
            attempts = self.folder.attempts()
            if attempts:
                say(f"{self.folder.path}: {len(attempts)} attempts so far, the loop goes on")
            roof_share = self.diagnosis.roof_share if self.diagnosis is not None else None
            if roof_share is None:
                say("no recorded run tells the champion's share of its roof: that criterion does not apply")
            while (reason := stop_reason(self._publish(attempts), self.budget, roof_share)) is None:
                attempt = self._attempt(attempts, lock)
                if attempt is None:
                    reason = NOTHING_LEFT
                    break
                self.folder.append(attempt)
                attempts.append(attempt)
                say(sentence(attempt))
            return self._publish(attempts, reason)

    def _publish(self, attempts: Sequence[Attempt], stopped: str | None = None) -> Progress:
        """Bring the pointer and the state up to the ledger."""
        self.folder.write(CHAMPION, champion_of(attempts, self.first, self.folder.path))
        progress = msgspec.structs.replace(progress_of(attempts, self.budget), stopped=stopped)
        self.folder.write(STATE, progress)
        return progress

    def _attempt(self, attempts: Sequence[Attempt], lock: int) -> Attempt | None:
        number = len(attempts) + 1
        run = self.folder.run(number)
        proposal = self._proposal(run, attempts)
        if proposal.end == "nothing more":
            return None
        attempt = Attempt(
            number=number,
            date=durable.now(),
            outcome="no candidate",
            reason=proposal.reason,
            note=proposal.note,
            proposer_s=proposal.seconds,
        )
        if proposal.file is None:
            return attempt
        file = run / proposal.file
        attempt = msgspec.structs.replace(
            attempt, file=str(file.relative_to(self.folder.path)), sha256=proposal.sha256, reason=None
        )
        champion = champion_of(attempts, self.first, self.folder.path)
        if (twin := next((a.number for a in attempts if a.sha256 == proposal.sha256), None)) is not None:
            return msgspec.structs.replace(attempt, outcome="reverted", reason=f"the same file as attempt {twin}")
        if _is(Path(champion.file), proposal.sha256):
            return msgspec.structs.replace(attempt, outcome="reverted", reason="the same file as the champion")
        return self._judged(attempt, file, lock)

    def _proposal(self, run: Path, attempts: Sequence[Attempt]) -> Proposal:
        """The proposal of this attempt: the one that an interrupted loop got, or a new one."""
        marker = run / PROPOSED
        if marker.exists():
            with contextlib.suppress(*UNDECODABLE):  # else it is asked again
                made = msgspec.json.decode(marker.read_bytes(), type=Proposal)
                if made.file is None or _is(run / made.file, made.sha256):
                    return made
        run.mkdir(parents=True, exist_ok=True)
        for name in (*CANDIDATES, PROPOSED, VERDICT):
            (run / name).unlink(missing_ok=True)
        brief = Brief(
            number=len(attempts) + 1,
            seed=self.seed,
            candidate=str((run / CANDIDATES[0]).resolve()),
            champion=champion_of(attempts, self.first, self.folder.path),
            diagnosis=self.diagnosis,
            ledger=tuple(attempts),
            progress=progress_of(attempts, self.budget),
            budget=self.budget,
        )
        data = msgspec.json.encode(brief)
        durable.replace(run / BRIEF, data)
        child = _run(self.proposer, data, run, self.proposer_limit_s)
        made = _made(child, run, self.proposer_limit_s)
        if made.end != "nothing more":  # asked again, it may have thought of something
            durable.replace(marker, msgspec.json.encode(made))
        return made

    def _judged(self, attempt: Attempt, file: Path, lock: int) -> Attempt:
        """Let the referee judge. Its words go into a file that outlives this process."""
        out = file.parent / VERDICT
        verdict = _read_verdict(out)
        child = None
        if verdict is None or verdict.candidate != attempt.sha256:
            command = (
                *self.referee,
                str(file.resolve()),
                "--json",
                "--out",
                str((self.folder.path / CHALLENGES).resolve()),
                "--budget",  # of challenges, which share the chance of a false accept
                str(self.budget.iterations),
                *self.referee_options,
            )
            with out.open("wb") as stdout:
                child = _run(command, b"", file.parent, self.referee_limit_s, stdout.fileno(), lock)
            verdict = _read_verdict(out)
        if verdict is None and child is not None and child.code is None:
            reason = f"the referee took longer than {self.referee_limit_s:g} s"
            return self._spent(attempt, "timeout", reason, child.seconds)
        if verdict is None:
            assert child is not None
            reason = f"the referee ended with exit code {child.code} and no verdict: {_last_line(child.err)}"
            return self._spent(attempt, "no verdict", reason, child.seconds)
        return msgspec.structs.replace(
            self._spent(attempt, verdict.verdict, verdict.reason, verdict.seconds),
            state=verdict.state,
            ratios=verdict.ratios,
            geomean=verdict.geomean,
            champion=verdict.champion,
        )

    def _spent(self, attempt: Attempt, outcome: Outcome, reason: str | None, seconds: float) -> Attempt:
        gpu_s = seconds if self.on_gpu and outcome != "not timed" else 0.0
        return msgspec.structs.replace(attempt, outcome=outcome, reason=reason, seconds=seconds, gpu_s=gpu_s)


def _made(child: Child, run: Path, limit_s: float) -> Proposal:
    note = child.out.strip()[-NOTE_CHARS:]
    files = [name for name in CANDIDATES if (run / name).exists()]
    end: Literal["proposed", "nothing more", "failed"] = "failed"
    reason = None
    if child.code is None:
        reason = f"the proposer took longer than {limit_s:g} s"
    elif child.code == NOTHING_MORE:
        end = "nothing more"
    elif child.code != 0:
        reason = f"the proposer ended with exit code {child.code}: {_last_line(child.err)}"
    elif len(files) != 1:
        reason = f"the proposer wrote {len(files)} candidates; expected one, {' or '.join(CANDIDATES)}"
    else:
        end = "proposed"
    file = files[0] if end == "proposed" else None
    sha256 = sha256_of(run / file) if file is not None else None
    return Proposal(file=file, sha256=sha256, note=note, seconds=round(child.seconds, 3), end=end, reason=reason)


def _read_verdict(file: Path) -> ChallengeVerdict | None:
    """The one JSON object that the referee printed; None when it has not, or not to its end."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ChallengeVerdict)
    except (OSError, *UNDECODABLE):
        return None


def _is(file: Path, sha256: str | None) -> bool:
    return file.exists() and sha256_of(file) == sha256


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _run(
    command: Sequence[str], given: bytes, cwd: Path, limit_s: float, stdout: int = subprocess.PIPE, kept_fd: int = -1
) -> Child:
    """Run a child in a group of its own, which is killed at the limit or when this process is interrupted."""
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=() if kept_fd < 0 else (kept_fd,),
        )
    except OSError as error:
        raise FlashladderError(f"{command[0]} cannot be run: {error.strerror}; expected an executable") from error
    code: int | None
    try:
        out, err = process.communicate(given, timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        code = None
    except BaseException:
        _kill(process)
        process.wait()
        raise
    return Child(
        code,
        (out or b"").decode(errors="replace"),
        (err or b"").decode(errors="replace"),
        time.monotonic() - start,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def sentence(attempt: Attempt) -> str:
    """One line on an attempt."""
    ratio = attempt.ratio
    parts = [f"attempt {attempt.number}: {attempt.outcome}"]
    if attempt.state is not None:
        parts.append(f" at {attempt.state}")
    if ratio is not None:
        parts.append(f", {ratio.ratio:.4f} x [{ratio.low:.4f}, {ratio.high:.4f}]")
    if attempt.reason is not None:
        parts.append(f": {attempt.reason}")
    return "".join(parts)
