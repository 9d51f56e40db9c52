"""The referee: one candidate against the champion, state by state, each in a child process with a time limit.

PROPOSED, BUILD, GRID, CORRECT, SCREEN, MEASURE, CONFIRM; then ACCEPTED, or REVERTED with a reason. What each state does
with the candidate happens in children; this process never loads it, and alone decides and writes. Without a GPU the
first four run on the emulator, and nothing is timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import numpy as np

from flashladder import accept, candidate, doctor, durable, flops, grid, ledger, machine, paths
from flashladder import emulation as emulating
from flashladder.ablation import Selection, new_info, select_cells
from flashladder.arms import ArmSpec
from flashladder.candidate import Candidate
from flashladder.check import judge
from flashladder.emulator.device import Options
from flashladder.errors import BuildError, EnvironmentInvalidError, Exit, FlashladderError
from flashladder.inputs import Case
from flashladder.ladder import Ladder, gpu_named, load_ladder, load_presets
from flashladder.ledger import Champion, Entry, Ledger
from flashladder.model import (
    HOPPER,
    Cell,
    CellTiming,
    ChallengeVerdict,
    CheckRecord,
    DtypeName,
    L2Mode,
    Mask,
    OptimizeLevel,
    Ratio,
    Rung,
    Shape,
    State,
)
from flashladder.native import kernel_head_dim
from flashladder.ninja import Progress, silent
from flashladder.rundir import RunDir
from flashladder.stages import CHECKERS, cases, check_items, library_spec
from flashladder.toolchain import find_nvcc
from flashladder.worker import (
    BuildDone,
    BuildJob,
    CheckItem,
    CheckJob,
    Clock,
    GridDone,
    GridJob,
    Job,
    Message,
    Outcome,
    ProbeJob,
    TimingDone,
    TimingItem,
    TimingJob,
    WitnessDone,
    WitnessJob,
    kill_children,
    prepare,
    supervise,
)

LIMITS_S: dict[State, float] = {
    "BUILD": 600.0,
    "GRID": 20.0,
    "CORRECT": 60.0,
    "SCREEN": 60.0,
    "MEASURE": 60.0,
    "CONFIRM": 60.0,
}
"""How long a child may say nothing: a build as a whole, a case of the gate, a step of the timing."""
BUDGET = 16
"""Challenges that share the chance of a false accept."""
SHAPES = ("b32h32s512d64", "b8h32s2048d64", "b8h16s2048d128", "b4h32s4096d64")
"""What is measured when nothing else is asked for."""
GRID_CASE = Case(
    "edge",
    Cell(shape=Shape(batch=1, heads_q=2, heads_kv=1, seq_q=150, seq_k=150, head_dim=64), dtype="fp16", causal=True),
)
WITNESSES = 3
"""Cases that this process judges itself."""
MAY_REFUSE = ("layout", "head_dim")
"""Families of cases that a kernel need not take."""
CLOCK_TOLERANCE = 1.1
"""By how much more than this process's clock the events in the child may claim."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What the user asked for. `seed` None: one that nobody knows beforehand."""

    file: Path
    out: Path
    against: str | None = None
    shapes: tuple[str, ...] = ()
    dtypes: tuple[DtypeName, ...] = ()
    masks: tuple[Mask, ...] = ()
    seed: int | None = None
    budget: int = BUDGET
    first: str | None = None
    """The champion where nobody was accepted yet; None: the ladder's last rung."""

    @property
    def cells(self) -> dict[Cell, L2Mode]:
        """What is timed. Raises FlashladderError when a filter leaves nothing."""
        dtypes = self.dtypes or (load_ladder().reference.dtype,)
        return select_cells(Selection(preset="full", shapes=self.shapes or SHAPES, dtypes=dtypes, masks=self.masks))


class _EndError(Exception):
    """The challenge ends here."""

    def __init__(self, code: Exit, reason: str | None) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason

    @property
    def verdict(self) -> Literal["accepted", "reverted", "not timed"]:
        if self.code is Exit.OK:
            return "accepted"
        return "not timed" if self.code is Exit.ENVIRONMENT else "reverted"


def default_champion(ladder: Ladder, arch: str | None, first: str | None = None) -> Champion:
    """The rung that is named, else the ladder's last one of those that a GPU of `arch` runs.

    Raises FlashladderError when the ladder has no rung of that name or the GPU cannot run it.
    """
    if first is not None:
        return Champion(id=_runnable(ladder, first, arch).id)
    return Champion(id=[r.id for r in ladder.rungs if arch is None or r.runs_on(arch)][-1])


def _runnable(ladder: Ladder, name: str, arch: str | None) -> Rung:
    (rung,) = ladder.select((name,))
    if arch is not None and not rung.runs_on(arch):
        raise FlashladderError(f"{rung.id} needs {rung.needed_arch}, this GPU is {arch}; name another rung")
    return rung


def challenge(request: Request, say: Say, progress: Callable[[str], Progress] = lambda _: silent) -> ChallengeVerdict:
    """Judge a candidate; `say` is told what happened on the way.

    Raises FlashladderError on a request that cannot be tried, EnvironmentInvalidError when the ledger cannot be
    written or this machine lacks what a challenge needs.
    """
    arch = machine.gpu_arch()
    _refuse_what_cannot_be_tried(request, arch)
    with ledger.held(request.out, default_champion(load_ladder(), arch, request.first)) as book:
        recover(book, say)
        return _Challenge.propose(request, book, arch, say, progress).run()


def _refuse_what_cannot_be_tried(request: Request, arch: str | None) -> None:
    """Raise before anything is written."""
    candidate.name_of(request.file)
    _ = request.cells
    if request.against is not None:
        _runnable(load_ladder(), request.against, arch)
    if request.file.suffix == ".cu":
        find_nvcc()
    faults = [f for f in doctor.examine() if f.level == "fault"] if arch is not None else []
    if faults:
        raise EnvironmentInvalidError("; ".join(f"{f.name}: {f.text}" for f in faults))


def recover(book: Ledger, say: Say) -> None:
    """Say what is wrong with the ledger and what became of a challenge that did not end, and put both right."""
    for fault in book.faults:
        say(fault)
    if (mended := book.mend()) is not None:
        say(mended)
    if (last := book.unfinished) is not None:
        reason = f"interrupted in {last.state}"
        say(f"challenge {last.challenge} was {reason}: it is reverted; hand the file in again")
        verdict = ChallengeVerdict(
            verdict="reverted",
            state=last.state,
            reason=reason,
            exit_code=Exit.INTERRUPTED,
            candidate=last.candidate,
            champion=last.champion,
            seconds=0.0,
            challenge=last.challenge,
        )
        book.append(msgspec.structs.replace(last, time=durable.now(), state="REVERTED", verdict=verdict))


@dataclass
class _Challenge:
    """One challenge in progress."""

    request: Request
    book: Ledger
    candidate: Candidate
    champion: Champion
    run_dir: RunDir
    seed: int
    arch: str | None
    say: Say
    progress: Callable[[str], Progress]
    state: State = "PROPOSED"
    spec: ArmSpec | None = None
    champion_spec: ArmSpec | None = None
    ratios: dict[str, Ratio] = field(default_factory=dict)
    geomean: Ratio | None = None
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def propose(
        cls, request: Request, book: Ledger, arch: str | None, say: Say, progress: Callable[[str], Progress]
    ) -> _Challenge:
        champion = book.champion
        if request.against is not None:
            (rung,) = load_ladder().select((request.against,))
            champion = Champion(id=rung.id)
        name = f"{book.next_number():04}-{candidate.name_of(request.file)}"
        run_dir = RunDir(request.out / "runs" / name)
        taken = candidate.take(request.file, run_dir.path)
        run_dir.write_info(new_info(run_dir, "challenge", machine.fingerprint()))
        seed = int.from_bytes(os.urandom(4)) if request.seed is None else request.seed
        return cls(request, book, taken, champion, run_dir, seed, arch, say, progress)

    # --- the states ---

    def run(self) -> ChallengeVerdict:
        try:
            self.enter("PROPOSED")
            for state, step in self.steps():
                self.enter(state)
                step()
            if self.arch is None:
                raise _EndError(Exit.ENVIRONMENT, "no GPU here: built and checked on the emulator alone")
            end = _EndError(Exit.OK, None)
        except _EndError as ended:
            end = ended
        except KeyboardInterrupt:
            kill_children()
            self.end(_EndError(Exit.INTERRUPTED, f"interrupted in {self.state}"))
            raise
        return self.end(end)

    def steps(self) -> Iterator[tuple[State, Callable[[], None]]]:
        yield "BUILD", self.build
        yield "GRID", self.grid
        yield "CORRECT", self.correct
        if self.arch is not None:
            cells = self.request.cells
            yield "SCREEN", lambda: self.time("SCREEN", _extremes(cells))
            yield "MEASURE", lambda: self.time("MEASURE", cells)
            yield "CONFIRM", lambda: self.time("CONFIRM", cells)

    def entry(self, state: State) -> Entry:
        return Entry(
            time=durable.now(),
            challenge=self.run_dir.path.name,
            state=state,
            candidate=self.candidate.sha256,
            champion=self.champion.id,
            seed=self.seed,
            against=self.request.against is not None,
        )

    def enter(self, state: State) -> None:
        self.state = state
        self.book.append(self.entry(state))
        self.say(f"{self.run_dir.path.name}: {state}")
        self.unaltered()

    def unaltered(self) -> None:
        """End the challenge when the copy is another file than the one that was handed in."""
        if self.candidate.altered():
            raise _EndError(Exit.INCORRECT, "its file was altered while it was judged")

    def end(self, end: _EndError) -> ChallengeVerdict:
        """Write the end into the ledger, and only then say it."""
        if end.code is Exit.OK and self.candidate.altered():
            end = _EndError(Exit.INCORRECT, "its file was altered while it was judged")
        verdict = ChallengeVerdict(
            verdict=end.verdict,
            state=self.state,
            reason=end.reason,
            exit_code=end.code,
            ratios=self.ratios,
            geomean=self.geomean,
            candidate=self.candidate.sha256,
            champion=self.champion.id,
            seconds=round(time.monotonic() - self.started, 3),
            challenge=self.run_dir.path.name,
        )
        last: State = {"accepted": "ACCEPTED", "reverted": "REVERTED"}.get(end.verdict, self.state)  # type: ignore[assignment]
        self.book.append(
            msgspec.structs.replace(
                self.entry(last), verdict=verdict, accepted=self.successor() if end.code is Exit.OK else None
            )
        )
        return verdict

    def successor(self) -> Champion | None:
        """The champion to be; None where the candidate was measured against a rung of the user's choice."""
        if self.request.against is not None:
            return None
        file = self.candidate.file.relative_to(self.request.out)
        name = self.run_dir.path.name
        return Champion(id=name, file=str(file), sha256=self.candidate.sha256, challenge=name)

    # --- BUILD ---

    def build(self) -> None:
        if self.arch is not None:
            prepare(CHECKERS + 5)  # children that open torch meanwhile
        self.spec = self.built(self.candidate, accept.CANDIDATE)

    def built(self, what: Candidate, name: str) -> ArmSpec:
        """The arm of a candidate, once it is built."""
        if what.is_script:
            spec = ArmSpec(
                name=name, kind="variant", script=str(what.file.resolve()), sha256=what.sha256, is_candidate=True
            )
            outcome, _ = self.child(BuildJob(script=spec), "BUILD")
            if outcome.end != "finished":
                missing = self.arch is None and outcome.detail.startswith("ModuleNotFoundError")
                self.fail(outcome, Exit.ENVIRONMENT if missing else Exit.BUILD)
            return spec
        try:
            rung = msgspec.structs.replace(what.rung(), source=str(what.file.resolve()))
        except BuildError as error:
            raise _EndError(Exit.BUILD, str(error)) from error
        spec = self.built_rung(rung, "0" if what.has_tensor_cores else "g")
        return msgspec.structs.replace(spec, name=name, is_candidate=True)

    def built_rung(self, rung: Rung, optimize: OptimizeLevel = "0") -> ArmSpec:
        if self.arch is None:
            dtype, head_dim = self.kind
            job = BuildJob(rung=rung, instances=(f"{dtype}_d{head_dim}",), optimize=optimize)
        else:
            job = BuildJob(rung=rung, archs=(self.arch,))
        outcome, messages = self.child(job, "BUILD")
        done = next((m for m in messages if isinstance(m, BuildDone)), None)
        if done is None:
            self.fail(outcome, Exit.BUILD)
        self.run_dir.append("build", done.record)
        if done.library is None:
            raise _EndError(Exit.BUILD, done.record.reason)
        return library_spec(rung, Path(done.library), done.record.sha256)

    def built_champion(self) -> ArmSpec:
        """The champion's arm; built when it is needed, which for a wrong candidate is never."""
        try:
            return self._built_champion()
        except _EndError as error:
            raise _EndError(Exit.ENVIRONMENT, f"the champion cannot be built: {error.reason}") from error

    def _built_champion(self) -> ArmSpec:
        champion = self.champion
        if champion.file is None:
            rung = load_ladder()[champion.id]
            spec = self.built_rung(rung)
        else:
            file = self.request.out / champion.file
            held = Candidate(candidate.name_of(file), file, champion.sha256 or "")
            if held.altered():
                raise _EndError(Exit.ENVIRONMENT, f"{file} is not the file that was accepted")
            spec = self.built(held, accept.CHAMPION)
        return msgspec.structs.replace(spec, name=accept.CHAMPION, is_candidate=False)

    # --- GRID, CORRECT ---

    @property
    def emulation(self) -> Options | None:
        return None if self.arch is not None else Options(seed=self.seed % 2**32 or 1)

    def grid(self) -> None:
        assert self.spec is not None
        outcome, messages = self.child(
            GridJob(arm=self.spec, case=self.grid_case(), seed=self.seed, emulation=self.emulation), "GRID"
        )
        done = next((m for m in messages if isinstance(m, GridDone)), None)
        if done is None:
            self.fail(outcome, Exit.GRID)
        if (fault := grid.fault(done.record, self.candidate.name)) is not None:
            raise _EndError(Exit.GRID, fault)

    @property
    def kind(self) -> tuple[DtypeName, int]:
        """Element type and head dimension of the kernel that the first timed cell runs: the one tried on the CPU."""
        first = next(iter(self.request.cells))
        return first.dtype, kernel_head_dim(first.shape.head_dim)

    def grid_case(self) -> Case:
        dtype, head_dim = self.kind
        shape = msgspec.structs.replace(GRID_CASE.cell.shape, head_dim=head_dim)
        return replace(GRID_CASE, cell=msgspec.structs.replace(GRID_CASE.cell, dtype=dtype, shape=shape))

    def gate_cases(self) -> list[Case]:
        """What the candidate must pass: on a GPU all that a rung must, on the CPU what fits, of one kernel."""
        timed = self.request.cells
        if self.arch is not None:
            dtypes = tuple(dict.fromkeys(cell.dtype for cell in timed))
            return cases(dtypes, sorted({kernel_head_dim(cell.shape.head_dim) for cell in timed}))
        dtype, head_dim = self.kind
        hopper = not self.candidate.is_script and self.candidate.rung().min_arch >= HOPPER
        return [
            case
            for case in emulating.cpu_cases(Selection(dtypes=(dtype,), masks=self.request.masks))
            if kernel_head_dim(case.cell.shape.head_dim) == head_dim and (hopper or case.family != "wide")
        ]

    def correct(self) -> None:
        assert self.spec is not None
        chosen = self.gate_cases()
        items = [CheckItem(arm=self.spec, case=case) for case in chosen]
        try:
            records = check_items(
                self.run_dir,
                items,
                CheckJob(items=(), seed=self.seed, emulation=self.emulation),
                self.progress("check"),
                min(CHECKERS, os.cpu_count() or 1),
                limit_s=LIMITS_S["CORRECT"],
                until_failure=True,
            )
        except EnvironmentInvalidError as error:
            raise _EndError(Exit.ENVIRONMENT, str(error)) from error
        self.judge_checks(records, chosen)
        self.judge_here(chosen)

    def judge_here(self, chosen: Sequence[Case]) -> None:
        """Judge in this process what the candidate writes in another, on cases and values that it cannot foresee.

        What would deceive the gate inside its process does not reach the oracle here.
        """
        assert self.spec is not None
        plain = [c for c in chosen if c.family == "edge" and min(c.cell.shape.seq_q, c.cell.shape.seq_k) > 1]
        drawn = np.random.default_rng(self.seed).choice(len(plain), WITNESSES, replace=False)
        asked = tuple(plain[i] for i in drawn)
        seed = self.seed + 1
        job = WitnessJob(arm=self.spec, cases=asked, seed=seed, emulation=self.emulation)
        outcome, messages = self.child(job, "CORRECT")
        told = {m.case: m for m in messages if isinstance(m, WitnessDone)}
        for case in asked:
            if case.id not in told:
                self.fail(outcome, Exit.INCORRECT)
            if (fault := judge(case, seed, told[case.id].o, told[case.id].lse)) is not None:
                raise _EndError(Exit.INCORRECT, f"{case.id}: judged in another process: {fault}")

    def judge_checks(self, records: Sequence[CheckRecord], chosen: Sequence[Case]) -> None:
        family = {case.id: case.family for case in chosen}
        for r in records:
            if r.status in ("pass", "unsupported"):
                continue
            if r.status != "fail":
                self.lost_gpu()
            code = Exit.TIMEOUT if r.status == "timeout" else Exit.INCORRECT
            raise _EndError(code, f"{r.case}: {'' if r.status == 'fail' else r.status + ': '}{r.reason}")
        refused = [r for r in records if r.status == "unsupported" and family.get(r.case) not in MAY_REFUSE]
        if refused:
            raise _EndError(Exit.INCORRECT, f"{refused[0].case}: it refuses the input: {refused[0].reason}")
        if missing := len(chosen) - len(records):
            raise _EndError(Exit.ENVIRONMENT, f"{missing} of {len(chosen)} cases have no record")

    # --- SCREEN, MEASURE, CONFIRM ---

    def time(self, state: accept.Timed, cells: dict[Cell, L2Mode]) -> None:
        """Time the cells in a fresh process, under a seed of the state's own, and decide."""
        assert self.spec is not None
        if self.champion_spec is None:
            self.champion_spec = self.built_champion()
        arms = (self.champion_spec, msgspec.structs.replace(self.champion_spec, name=accept.TWIN), self.spec)
        items = tuple(TimingItem(cell=cell, l2=l2, arms=arms, excluded={}) for cell, l2 in cells.items())
        preset = load_presets()["screen" if state == "SCREEN" else "challenge"]
        where = RunDir(self.run_dir.path / state.lower())
        seed = self.seed + list(LIMITS_S).index(state)
        bar, clock = self.progress(state.lower()), Stopwatch()
        timings: list[CellTiming] = []

        def on_message(message: Message) -> None:
            if isinstance(message, Clock):
                clock(message, time.monotonic())
            elif isinstance(message, TimingDone):
                where.append("timing", message.record)
                timings.append(message.record)
                bar(len(timings), len(items), message.record.cell.id)

        job = TimingJob(items=items, preset=preset, seed=seed, rates={}, strict=True)
        outcome = supervise(job, on_message, LIMITS_S[state])
        if outcome.end != "finished":
            self.fail(outcome, Exit.INCORRECT)
        gpu = gpu_named(machine.gpu_name() or "")
        decision = accept.decide(state, timings, self.request.budget, gpu, machine.fingerprint().max_sm_clock_mhz)
        self.ratios, self.geomean = decision.ratios, decision.geomean
        fault = decision.fault or clock.fault(decision.ratios)
        if fault is not None:
            raise _EndError(*fault)

    # --- children ---

    def child(self, job: Job, state: State) -> tuple[Outcome, list[Message]]:
        """Run a job within the time limit of `state`."""
        messages: list[Message] = []
        return supervise(job, messages.append, LIMITS_S[state]), messages

    def fail(self, outcome: Outcome, code: Exit) -> NoReturn:
        """End the challenge for a child that did not finish: the GPU's fault, or the candidate's."""
        self.lost_gpu()
        raise _EndError(Exit.TIMEOUT if outcome.end == "timeout" else code, f"{outcome.end}: {outcome.detail}")

    def lost_gpu(self) -> None:
        """End the challenge without a verdict when the GPU does not compute any more."""
        if self.arch is None:
            return
        outcome = supervise(ProbeJob(), lambda _: None, LIMITS_S["GRID"])
        if outcome.end != "finished":
            raise _EndError(Exit.ENVIRONMENT, f"the GPU is lost: {outcome.detail}; start again when it is back")


def _extremes(cells: dict[Cell, L2Mode]) -> dict[Cell, L2Mode]:
    """The cells with the least and the most work."""
    ordered = sorted(cells, key=lambda cell: (flops.flops(cell), cell))
    return {cell: cells[cell] for cell in dict.fromkeys((ordered[0], ordered[-1]))}


@dataclass
class Stopwatch:
    """This process's own clock on what the child runs on end: events there can be forged, the time here cannot."""

    seconds: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    """(cell, arm) -> seconds and launches."""
    _begun: float = 0.0

    def __call__(self, message: Clock, now: float) -> None:
        if message.arm is None:
            self._begun = now
            return
        key = message.cell.id, message.arm
        seconds, launches = self.seconds.get(key, (0.0, 0))
        self.seconds[key] = seconds + now - self._begun, launches + message.launches

    def fault(self, ratios: dict[str, Ratio]) -> tuple[Exit, str] | None:
        """Where the child claims more for the candidate than was seen from here; a cell without a time is one too."""
        for cell, claimed in ratios.items():
            seen = [self.seconds.get((cell, arm), (0.0, 0)) for arm in (accept.CHAMPION, accept.CANDIDATE)]
            if any(seconds <= 0 or launches <= 0 for seconds, launches in seen):
                return Exit.INCORRECT, f"in {cell}: no launch was seen by the clock outside"
            champion, own = (seconds / launches for seconds, launches in seen)
            if claimed.ratio > CLOCK_TOLERANCE * champion / own:
                claim = f"its events claim a ratio of {claimed.ratio:.3f}"
                return Exit.INCORRECT, f"in {cell}: {claim}, the clock outside saw {champion / own:.3f}"
        return None


def default_out() -> Path:
    return paths.ROOT / "challenges"


def summary(v: ChallengeVerdict) -> str:
    """A verdict for a terminal."""
    lines = [f"{v.challenge}: {v.verdict} after {v.state} against {v.champion}, {v.seconds:.1f} s"]
    if v.reason:
        lines.append(f"  {v.reason}")
    for name, r in [*v.ratios.items(), *([("geometric mean", v.geomean)] if v.geomean else [])]:
        lines.append(f"  {name:32} {r.ratio:.4f}  ({r.low:.4f} to {r.high:.4f})")
    if v.ratios:
        lines.append("  the champion's time over the candidate's: above 1 the candidate is faster")
    return "\n".join(lines)


@contextmanager
def raised_as_environment() -> Iterator[None]:
    """A full disk or a folder that cannot be written is the machine's fault, told in a line."""
    try:
        yield
    except OSError as error:
        raise EnvironmentInvalidError(
            f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room, then start again, or give "
            "another --out; nothing was accepted"
        ) from error
