"""Runs kernels in a child process: a crash, a hang or a poisoned CUDA context is a verdict, not the end of the run.

The child reads one job as JSON on stdin and writes messages as JSON lines on a pipe of its own, so that what a kernel
prints cannot be mistaken for a result. Each line begins with a word that the parent made up, so that what somebody
else writes into the pipe is found out.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

import msgspec

from flashladder import integrity, machine
from flashladder.agreement import compare
from flashladder.arms import ArmSpec, LoadedArm, open_arm
from flashladder.arrays import Memory
from flashladder.check import Problem, Tensors, allocate, check_case, largest_score, pose, seed_of, testify
from flashladder.emulator.device import Options
from flashladder.grid import Launched, observe
from flashladder.inputs import Case, values_of
from flashladder.model import (
    Agreement,
    Arithmetic,
    ArmTiming,
    BuildRecord,
    Cell,
    CellTiming,
    CheckRecord,
    DtypeName,
    L2Mode,
    OptimizeLevel,
    Preset,
    Record,
    Roof,
    Rung,
    Status,
    ValueTiming,
)
from flashladder.rundir import sha256_of

TAMPERED = "it replaces what it is judged by"
FORGED = "a message that is not the worker's came through its pipe"


class CheckItem(Record, frozen=True, kw_only=True):
    arm: ArmSpec
    case: Case


class CheckJob(Record, frozen=True, kw_only=True, tag="check"):
    items: tuple[CheckItem, ...]
    seed: int
    emulation: Options | None = None
    """None: on the GPU. Else the arms' libraries are emulated ones, run with these options."""


class TimingItem(Record, frozen=True, kw_only=True):
    cell: Cell
    l2: L2Mode
    arms: tuple[ArmSpec, ...]
    excluded: dict[str, tuple[Status, str]]
    """Arms of this cell that are not run: name -> (status, reason)."""


class TimingJob(Record, frozen=True, kw_only=True, tag="timing"):
    items: tuple[TimingItem, ...]
    preset: Preset
    seed: int
    rates: dict[str, float]
    """Least seconds a FLOP that an arm/head_dim was seen to take: lets hopeless cells be skipped unlaunched."""

    strict: bool = False
    """Somebody else's kernels: every sample has values of its own and every launch its output (timing.py)."""


class BuildJob(Record, frozen=True, kw_only=True, tag="build"):
    """Compile a candidate for `archs`, or, with none, for the emulator; or open its script."""

    rung: Rung | None = None
    archs: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    """Of the emulated library: the kernels to translate, as "fp16_d64"."""
    optimize: OptimizeLevel = "0"
    script: ArmSpec | None = None


class GridJob(Record, frozen=True, kw_only=True, tag="grid"):
    arm: ArmSpec
    case: Case
    seed: int
    emulation: Options | None = None


class WitnessJob(Record, frozen=True, kw_only=True, tag="witness"):
    """Run a candidate and tell what it wrote, for another process to judge."""

    arm: ArmSpec
    cases: tuple[Case, ...]
    seed: int
    emulation: Options | None = None


class ProbeJob(Record, frozen=True, kw_only=True, tag="probe"):
    """Whether the GPU still computes, without anybody's kernel."""


class RoofJob(Record, frozen=True, kw_only=True, tag="roof"):
    dtypes: tuple[DtypeName, ...]
    preset: Preset
    seed: int


class ValueItem(Record, frozen=True, kw_only=True):
    arm: ArmSpec
    cell: Cell
    values: str


class ValueJob(Record, frozen=True, kw_only=True, tag="values"):
    """Time arms on kinds of values. Items of a cell and a kind should stand together: they share its inputs."""

    items: tuple[ValueItem, ...]
    preset: Preset
    seed: int


class AgreementItem(Record, frozen=True, kw_only=True):
    gpu: ArmSpec
    emulated: ArmSpec
    case: Case
    arithmetic: Arithmetic


class AgreementJob(Record, frozen=True, kw_only=True, tag="agreement"):
    items: tuple[AgreementItem, ...]
    seed: int
    emulation: Options


Job = CheckJob | AgreementJob | RoofJob | ValueJob | TimingJob | BuildJob | GridJob | WitnessJob | ProbeJob


class At(Record, frozen=True, kw_only=True, tag="at"):
    """The child is about to run item `item`, in it the arm `arm`."""

    item: int
    arm: str


class CheckDone(Record, frozen=True, kw_only=True, tag="check"):
    record: CheckRecord


class AgreementDone(Record, frozen=True, kw_only=True, tag="agreement"):
    record: Agreement


class TimingDone(Record, frozen=True, kw_only=True, tag="timing"):
    record: CellTiming


class Clock(Record, frozen=True, kw_only=True, tag="clock"):
    """Here the child ended `launches` launches of an arm, or, without one, begins: the parent's own clock tells how
    long they took."""

    cell: Cell
    arm: str | None
    launches: int


class BuildDone(Record, frozen=True, kw_only=True, tag="build"):
    record: BuildRecord
    library: str | None


class WitnessDone(Record, frozen=True, kw_only=True, tag="witness"):
    """Bits of O and of the LSE of one case."""

    case: str
    o: bytes
    lse: bytes


class GridDone(Record, frozen=True, kw_only=True, tag="grid"):
    record: Launched


class RoofDone(Record, frozen=True, kw_only=True, tag="roof"):
    record: Roof


class ValueDone(Record, frozen=True, kw_only=True, tag="values"):
    record: ValueTiming


class Finished(Record, frozen=True, kw_only=True, tag="finished"):
    pass


Message = (
    At
    | CheckDone
    | AgreementDone
    | RoofDone
    | ValueDone
    | TimingDone
    | Clock
    | BuildDone
    | GridDone
    | WitnessDone
    | Finished
)
Emit = Callable[[Message], None]


class Outcome(Record, frozen=True, kw_only=True):
    """How a child ended, and where it was."""

    end: Literal["finished", "crash", "timeout"]
    at: At | None
    detail: str


# --- child ----------------------------------------------------------------------------------------------------------


Opened = tuple[LoadedArm, Memory]


class _Opener:
    """Opens each arm once, with the memory that its kernels use."""

    def __init__(self, emulation: Options | None) -> None:
        from flashladder.arrays import CudaMemory, HostMemory

        self.emulation = emulation
        self.memory: Memory = CudaMemory() if emulation is None else HostMemory()
        """Where problems are posed."""
        self._opened: dict[str, Opened] = {}
        self._watch: Callable[[], str | None] | None = None

    def replaced(self) -> str | None:
        """What a candidate replaced of its judge, in words."""
        return None if self._watch is None else self._watch()

    def __call__(self, spec: ArmSpec) -> Opened:
        if spec.name not in self._opened:
            self._opened[spec.name] = self._open(spec)
        return self._opened[spec.name]

    def _open(self, spec: ArmSpec) -> Opened:
        if spec.is_candidate and self._watch is None:
            self._watch = integrity.watch()
        if self.emulation is None or spec.script is not None:
            return open_arm(spec), self.memory
        from flashladder.emulator.device import EmulatedMemory, Emulator, emulated_arm

        assert spec.library is not None
        return emulated_arm(spec), EmulatedMemory(Emulator(Path(spec.library)), self.emulation)


def _run_checks(job: CheckJob, emit: Emit) -> None:
    opened = _Opener(job.emulation)
    case: Case | None = None
    problems: tuple[Problem, ...] = ()
    tensors: Tensors | None = None
    for number, item in enumerate(job.items):
        emit(At(item=number, arm=item.arm.name))
        if item.case != case:
            case, problems = item.case, pose(item.case, opened.memory, job.seed)
            if job.emulation is None:  # where all arms use one memory
                tensors = allocate(case, opened.memory)
        emit(CheckDone(record=_check(item, opened, job.seed, problems, tensors)))


def _check(
    item: CheckItem, opened: _Opener, seed: int, problems: tuple[Problem, ...], tensors: Tensors | None
) -> CheckRecord:
    def without_a_run(status: Literal["unsupported", "fail"], reason: str) -> CheckRecord:
        return CheckRecord(
            arm=item.arm.name,
            sha256=item.arm.sha256,
            case=item.case.id,
            cell=item.case.cell,
            status=status,
            reason=reason,
            seed=seed,
        )

    limit = item.arm.score_limit
    if limit is not None and (largest := max(largest_score(p.values) for p in problems)) > limit:
        return without_a_run("unsupported", f"|q . k| reaches {largest:.3g}, this kernel's arithmetic holds {limit:g}")
    arm, memory = opened(item.arm)
    if (replaced := opened.replaced()) is None:
        with arm.context():
            record = check_case(arm, item.case, memory, seed, problems, item.arm.slack, tensors)
        if (replaced := opened.replaced()) is None:
            return record
    return without_a_run("fail", f"{TAMPERED}: {replaced}")


def _run_agreements(job: AgreementJob, emit: Emit) -> None:
    gpu, emulated = _Opener(None), _Opener(job.emulation)
    for number, item in enumerate(job.items):
        emit(At(item=number, arm=item.gpu.name))
        values = values_of(item.case, seed_of(item.case, job.seed))
        record = compare(gpu(item.gpu), emulated(item.emulated), item.case, values, job.seed, item.arithmetic)
        emit(AgreementDone(record=record))


def _run_roofs(job: RoofJob, emit: Emit) -> None:
    from flashladder.timing import Timer

    timer = Timer(job.preset, {})
    for dtype in job.dtypes:
        emit(RoofDone(record=timer.roof(dtype, job.seed)))


def _run_values(job: ValueJob, emit: Emit) -> None:
    from flashladder.timing import Timer

    timer = Timer(job.preset, {})
    opened = cache(open_arm)
    for number, item in enumerate(job.items):
        emit(At(item=number, arm=item.arm.name))
        emit(ValueDone(record=timer.values(opened(item.arm), item.cell, item.values, job.seed)))


def _run_timings(job: TimingJob, emit: Emit) -> None:
    from flashladder.timing import Timer

    timer = Timer(job.preset, dict(job.rates), strict=job.strict)
    watch = integrity.watch() if any(arm.is_candidate for item in job.items for arm in item.arms) else None
    opened = cache(open_arm)

    def clock(cell: Cell, arm: str | None, launches: int) -> None:
        emit(Clock(cell=cell, arm=arm, launches=launches))

    for number, item in enumerate(job.items):

        def at(arm: str, number: int = number) -> None:
            emit(At(item=number, arm=arm))

        record = timer.time_cell(item.arms, opened, item.cell, item.l2, item.excluded, job.seed, at, clock)
        if watch is not None and (replaced := watch()) is not None:
            record = _without_candidates(record, item.arms, f"{TAMPERED}: {replaced}")
        emit(TimingDone(record=record))


def _without_candidates(record: CellTiming, specs: Sequence[ArmSpec], reason: str) -> CellTiming:
    candidates = {spec.name for spec in specs if spec.is_candidate}
    arms = (
        ArmTiming(arm=a.arm, kind=a.kind, status="failed", reason=reason, sha256=a.sha256) if a.arm in candidates else a
        for a in record.arms
    )
    return msgspec.structs.replace(record, arms=tuple(arms))


def _run_build(job: BuildJob, emit: Emit) -> None:
    from flashladder import build as building

    if job.script is not None:
        opened = _Opener(Options() if machine.gpu_name() is None else None)
        opened(job.script)
        if (replaced := opened.replaced()) is not None:
            raise RuntimeError(f"{TAMPERED}: {replaced}")
        return
    assert job.rung is not None
    emit(At(item=0, arm=job.rung.id))
    if job.archs:
        ((target, record),) = building.build([job.rung], job.archs)
        emit(BuildDone(record=record, library=str(target.library) if record.status == "built" else None))
    else:
        emit(emulation_build(job.rung, job.instances, job.optimize))


def emulation_build(rung: Rung, instances: Sequence[str], optimize: OptimizeLevel) -> BuildDone:
    """The emulated library of a rung, as a build's record."""
    from flashladder.emulator.library import NVCC_FLAGS, build_emulated, emulated_target
    from flashladder.toolchain import find_nvcc

    target = emulated_target(rung.id, Path(rung.source), rung.min_arch, instances=instances, optimize=optimize)
    failures = build_emulated([target])
    failed = failures.get(rung.id)
    record = BuildRecord(
        rung=rung.id,
        status="built" if failed is None else "failed",
        reason=failed,
        sha256=sha256_of(target.library) if failed is None else None,
        compiler=f"nvcc {find_nvcc().version}, emulated",
        flags=NVCC_FLAGS,
        archs=(f"compute_{target.arch}",),
    )
    return BuildDone(record=record, library=str(target.library) if failed is None else None)


def _run_grid(job: GridJob, emit: Emit) -> None:
    emit(At(item=0, arm=job.arm.name))
    opened = _Opener(job.emulation)
    arm, memory = opened(job.arm)
    record = observe(arm, job.case, memory, job.seed)
    if (replaced := opened.replaced()) is not None:
        raise RuntimeError(f"{TAMPERED}: {replaced}")
    emit(GridDone(record=record))


def _run_witness(job: WitnessJob, emit: Emit) -> None:
    arm, memory = _Opener(job.emulation)(job.arm)
    for number, case in enumerate(job.cases):
        emit(At(item=number, arm=job.arm.name))
        with arm.context():
            o, lse = testify(arm, case, memory, job.seed)
        emit(WitnessDone(case=case.id, o=o, lse=lse))


def _run_probe() -> None:
    import torch

    torch.zeros(1, device="cuda").add_(1).item()


PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def _end_with_the_parent() -> None:
    """A kernel that never ends must not outlive a parent that was killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Entry of the child: `python -m flashladder.worker FD [gpu]`; with "gpu" it opens torch before it has a job."""
    fd = int(sys.argv[1])
    _end_with_the_parent()
    if sys.argv[2:] == ["gpu"]:
        with contextlib.suppress(Exception):  # what fails here fails in the job too, where it is told
            import torch

            torch.zeros(1, device="cuda")
    word, _, given = sys.stdin.buffer.read().partition(b"\n")
    if not given:  # the parent has ended
        return
    job = msgspec.json.decode(given, type=Job)
    with os.fdopen(fd, "wb") as pipe:

        def emit(message: Message) -> None:
            pipe.write(word + b" " + msgspec.json.encode(message) + b"\n")
            pipe.flush()

        if isinstance(job, CheckJob):
            _run_checks(job, emit)
        elif isinstance(job, AgreementJob):
            _run_agreements(job, emit)
        elif isinstance(job, RoofJob):
            _run_roofs(job, emit)
        elif isinstance(job, ValueJob):
            _run_values(job, emit)
        elif isinstance(job, BuildJob):
            _run_build(job, emit)
        elif isinstance(job, GridJob):
            _run_grid(job, emit)
        elif isinstance(job, WitnessJob):
            _run_witness(job, emit)
        elif isinstance(job, ProbeJob):
            _run_probe()
        else:
            _run_timings(job, emit)
        emit(Finished())
        # Tear-down of a broken CUDA context may hang: the work is done, so leave at once.
        pipe.close()
        os._exit(0)


# --- parent ---------------------------------------------------------------------------------------------------------

COMMAND = (sys.executable, "-m", "flashladder.worker")


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    read: int
    """The pipe of its messages."""
    stderr: IO[bytes]

    @staticmethod
    def start(command: Sequence[str], *arguments: str) -> _Child:
        read, write = os.pipe()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [*command, str(write), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(write,),
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a child a core: more threads wait for each other
        )
        os.close(write)
        _children.add(process.pid)
        return _Child(process, read, stderr)

    def end(self) -> str:
        """Kill what still runs of it; what it said on stderr."""
        os.close(self.read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.process.wait()
        _children.discard(self.process.pid)
        with self.stderr:
            self.stderr.seek(0)
            return self.stderr.read().decode(errors="replace")


_children: set[int] = set()
_spares: list[_Child] = []


def prepare(count: int) -> None:
    """Have `count` children that open torch and the GPU while something else runs, which can take longer than a job."""
    while len(_spares) < count:
        _spares.append(_Child.start(COMMAND, "gpu"))


def dismiss() -> None:
    """End the prepared children: a timing counts every process on the GPU."""
    while _spares:
        _spares.pop().end()


def kill_children() -> None:
    """Kill every running child; their supervisors then return."""
    dismiss()
    for pid in list(_children):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


atexit.register(dismiss)


def _child_for(job: Job, command: Sequence[str]) -> _Child:
    """A prepared child where there is one. The only one on the GPU for a job that times."""
    child = None
    if command == COMMAND:
        with contextlib.suppress(IndexError):
            child = _spares.pop()
    if isinstance(job, RoofJob | ValueJob | TimingJob):
        dismiss()
    return child or _Child.start(command)


def _lines(fd: int, limit_s: float) -> Iterator[bytes | None]:
    """Complete lines from the child; None when it was silent for `limit_s`. Ends when the child closes the pipe."""
    pending = b""
    while True:
        deadline = time.monotonic() + limit_s
        while b"\n" not in pending:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                yield None
                return
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return
            pending += chunk
        line, pending = pending.split(b"\n", 1)
        yield line


def supervise(
    job: Job,
    on_message: Callable[[Message], None],
    limit_s: float = 120.0,
    command: Sequence[str] = COMMAND,
) -> Outcome:
    """Run `job` in a child, passing on its messages; kill it when it says nothing for `limit_s` seconds."""
    at: At | None = None
    end: Literal["finished", "crash", "timeout"] = "crash"
    child = _child_for(job, command)
    word, forged = secrets.token_hex(16).encode(), False
    try:
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.process.stdin as stdin:
            stdin.write(word + b"\n" + msgspec.json.encode(job))
        for line in _lines(child.read, limit_s):
            if line is None:
                end = "timeout"
                break
            if forged := not line.startswith(word + b" "):
                break
            message = msgspec.json.decode(line[len(word) + 1 :], type=Message)
            if isinstance(message, At):
                at = message
            elif isinstance(message, Finished):
                end = "finished"
                break
            else:
                on_message(message)
        if end == "crash" and not forged:
            try:
                child.process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                end = "timeout"
    finally:
        said = child.end()
    detail = f"silent for {limit_s:g} s" if end == "timeout" else _why(child.process.returncode, said)
    if forged:
        detail = FORGED
    return Outcome(end=end, at=at, detail="" if end == "finished" else detail)


def _why(returncode: int, stderr: str) -> str:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}" + (f": {last}" if last else "")
    return last or f"exit code {returncode}"


if __name__ == "__main__":
    main()
