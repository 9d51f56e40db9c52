"""Runs kernels in a child process: a crash, a hang or a poisoned CUDA context is a verdict, not the end of the run.

The child reads one job as JSON on stdin and writes messages as JSON lines on a pipe of its own, so that what a kernel
prints cannot be mistaken for a result.
"""

from __future__ import annotations

import atexit
import contextlib
import os
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

from flashladder.agreement import compare
from flashladder.arms import ArmSpec, open_arm
from flashladder.arrays import Memory
from flashladder.check import Arm, Problem, Tensors, allocate, check_case, largest_score, pose, seed_of
from flashladder.emulator.device import Options
from flashladder.inputs import Case, values_of
from flashladder.model import (
    Agreement,
    Arithmetic,
    Cell,
    CellTiming,
    CheckRecord,
    DtypeName,
    L2Mode,
    Preset,
    Record,
    Roof,
    Status,
)


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


class RoofJob(Record, frozen=True, kw_only=True, tag="roof"):
    dtypes: tuple[DtypeName, ...]
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


Job = CheckJob | AgreementJob | RoofJob | TimingJob


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


class RoofDone(Record, frozen=True, kw_only=True, tag="roof"):
    record: Roof


class Finished(Record, frozen=True, kw_only=True, tag="finished"):
    pass


Message = At | CheckDone | AgreementDone | RoofDone | TimingDone | Finished
Emit = Callable[[Message], None]


class Outcome(Record, frozen=True, kw_only=True):
    """How a child ended, and where it was."""

    end: Literal["finished", "crash", "timeout"]
    at: At | None
    detail: str


# --- child ----------------------------------------------------------------------------------------------------------


Opened = tuple[Arm, Memory]


class _Opener:
    """Opens each arm once, with the memory that its kernels use."""

    def __init__(self, emulation: Options | None) -> None:
        from flashladder.arrays import CudaMemory, HostMemory

        self.emulation = emulation
        self.memory: Memory = CudaMemory() if emulation is None else HostMemory()
        """Where problems are posed."""
        self._opened: dict[str, Opened] = {}

    def __call__(self, spec: ArmSpec) -> Opened:
        if spec.name not in self._opened:
            self._opened[spec.name] = self._open(spec)
        return self._opened[spec.name]

    def _open(self, spec: ArmSpec) -> Opened:
        if self.emulation is None:
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
    limit = item.arm.score_limit
    if limit is not None and (largest := max(largest_score(p.values) for p in problems)) > limit:
        return CheckRecord(
            arm=item.arm.name,
            sha256=item.arm.sha256,
            case=item.case.id,
            cell=item.case.cell,
            status="unsupported",
            reason=f"|q . k| reaches {largest:.3g}, this kernel's arithmetic holds {limit:g}",
            seed=seed,
        )
    arm, memory = opened(item.arm)
    with arm.context():
        return check_case(arm, item.case, memory, seed, problems, item.arm.slack, tensors)


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


def _run_timings(job: TimingJob, emit: Emit) -> None:
    from flashladder.timing import Timer

    timer = Timer(job.preset, dict(job.rates))
    opened = cache(open_arm)
    for number, item in enumerate(job.items):

        def at(arm: str, number: int = number) -> None:
            emit(At(item=number, arm=arm))

        record = timer.time_cell(item.arms, opened, item.cell, item.l2, item.excluded, job.seed, at)
        emit(TimingDone(record=record))


def main() -> None:
    """Entry of the child: `python -m flashladder.worker FD [gpu]`; with "gpu" it opens torch before it has a job."""
    fd = int(sys.argv[1])
    if sys.argv[2:] == ["gpu"]:
        with contextlib.suppress(Exception):  # what fails here fails in the job too, where it is told
            import torch

            torch.zeros(1, device="cuda")
    given = sys.stdin.buffer.read()
    if not given:  # the parent has ended
        return
    job = msgspec.json.decode(given, type=Job)
    with os.fdopen(fd, "wb") as pipe:

        def emit(message: Message) -> None:
            pipe.write(msgspec.json.encode(message) + b"\n")
            pipe.flush()

        if isinstance(job, CheckJob):
            _run_checks(job, emit)
        elif isinstance(job, AgreementJob):
            _run_agreements(job, emit)
        elif isinstance(job, RoofJob):
            _run_roofs(job, emit)
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
    if isinstance(job, RoofJob | TimingJob):
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
    try:
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.process.stdin as stdin:
            stdin.write(msgspec.json.encode(job))
        for line in _lines(child.read, limit_s):
            if line is None:
                end = "timeout"
                break
            message = msgspec.json.decode(line, type=Message)
            if isinstance(message, At):
                at = message
            elif isinstance(message, Finished):
                end = "finished"
                break
            else:
                on_message(message)
        if end == "crash":
            try:
                child.process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                end = "timeout"
    finally:
        said = child.end()
    detail = f"silent for {limit_s:g} s" if end == "timeout" else _why(child.process.returncode, said)
    return Outcome(end=end, at=at, detail="" if end == "finished" else detail)


def _why(returncode: int, stderr: str) -> str:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}" + (f": {last}" if last else "")
    return last or f"exit code {returncode}"


if __name__ == "__main__":
    main()
