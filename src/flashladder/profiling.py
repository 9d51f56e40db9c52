"""The profiling stage: Nsight Compute around a child process that makes exactly the requested calls.

`python -m flashladder.profiling` is that child: it reads one job on stdin and profiles between cudaProfilerStart and
Stop alone, so that what prepares a call is not counted. Without permission to read counters it tells, through CUPTI,
how long each kernel took and how it was launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import prod, sqrt
from pathlib import Path
from typing import Any

import msgspec

from flashladder import flops, machine, ncu
from flashladder.arms import ArmSpec, open_arm
from flashladder.bottleneck import DURATION, GRID
from flashladder.check import refusal
from flashladder.errors import EnvironmentInvalidError, Exit, FlashladderError
from flashladder.ladder import Metrics
from flashladder.model import Cell, KernelProfile, Metric, MetricSet, NcuRecord, ProfileCause, Record
from flashladder.ninja import Progress, silent
from flashladder.rundir import RunDir

PASSES: dict[MetricSet, int] = {"times": 1, "light": 25, "full": 40}
"""Replays of a launch that a set takes, about."""
AHEAD = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Children that prepare themselves for their turn on the GPU: opening torch takes longer than several profiles."""
TRACE_FIELDS = (
    ("grid", GRID, ""),
    ("block", "launch__block_size", ""),
    ("registers per thread", "launch__registers_per_thread", "register/thread"),
    ("shared memory", "launch__shared_mem_per_block", "byte/block"),
)
"""PyTorch's name of a launch's property, ours, and the unit."""


class ProfileJob(Record, frozen=True, kw_only=True):
    arm: ArmSpec
    cell: Cell
    set: MetricSet
    launches: int
    seed: int


def main() -> None:
    """Entry of the child."""
    import torch  # before the job is there: this child may be waiting for the GPU

    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileJob)
    s = job.cell.shape
    dtype = torch.float16 if job.cell.dtype == "fp16" else torch.bfloat16
    generator = torch.Generator("cuda").manual_seed(zlib.crc32(f"{job.seed}/{job.cell.id}".encode()))
    q, k, v = (
        torch.randn(s.batch, heads, rows, s.head_dim, device="cuda", dtype=dtype, generator=generator)
        for heads, rows in ((s.heads_q, s.seq_q), (s.heads_kv, s.seq_k), (s.heads_kv, s.seq_k))
    )
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cuda")
    arm = open_arm(job.arm)

    def call() -> None:
        arm(q, k, v, o, lse, 1 / sqrt(s.head_dim), job.cell.causal)

    with arm.context():
        call()
        torch.cuda.synchronize()
        with _cupti() if job.set == "times" else _nsight():
            for _ in range(job.launches):
                call()
            torch.cuda.synchronize()


@contextmanager
def _nsight() -> Iterator[None]:
    """What ncu counts."""
    import torch

    torch.cuda.cudart().cudaProfilerStart()
    yield
    torch.cuda.cudart().cudaProfilerStop()


@contextmanager
def _cupti() -> Iterator[None]:
    """Prints the kernels as JSON."""
    with traced() as events:
        yield
    print(msgspec.json.encode(kernels_of(events)).decode())


@contextmanager
def traced() -> Iterator[list[Mapping[str, Any]]]:
    """What CUPTI tells of the block as events of a Chrome trace, there at its end; its profiler needs no rights."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    events: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            yield events
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events += json.loads(trace.read_text())["traceEvents"]


def kernels_of(events: Sequence[Mapping[str, Any]]) -> tuple[KernelProfile, ...]:
    """The kernels of a Chrome trace as PyTorch writes it; a field that it lacks is a metric less."""
    kernels = []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        details = event.get("args", {})
        metrics = {DURATION: Metric(value=float(event["dur"]) * 1e-6, unit="s")}
        for field, name, unit in TRACE_FIELDS:
            if field in details:
                value = details[field]
                metrics[name] = Metric(value=float(prod(value) if isinstance(value, list) else value), unit=unit)
        kernels.append(KernelProfile(name=str(event["name"]).split("(")[0], metrics=metrics))
    return tuple(kernels)


def profile_cells(
    run: RunDir,
    items: Sequence[tuple[ArmSpec, Cell]],
    metrics: Metrics,
    arch: str,
    rates: Mapping[str, float],
    *,
    metric_set: MetricSet = "light",
    launches: int = 1,
    limit_s: float = 120.0,
    seed: int = 0,
    progress: Progress = silent,
) -> list[NcuRecord]:
    """Profile what is not recorded; an arm that cannot be is a record with its cause. Returns all records.

    `rates`: least seconds a FLOP by arm/head_dim; what would not end within `limit_s` is not started. When counters are
    denied, what CUPTI tells without them is recorded in their place.
    Raises EnvironmentInvalidError without Nsight Compute, FlashladderError (exit code 31) when counters are denied.
    """
    tool = ncu.find_ncu() if metric_set != "times" else None
    if tool is None and metric_set != "times":
        raise EnvironmentInvalidError(
            "no Nsight Compute (ncu) in PATH, CUDA_HOME or /opt/nvidia; install it, or take '--set times'"
        )
    profiler = _Profiler(run, tool, metrics.names(arch), launches, limit_s, seed)
    items = [(spec, cell) for spec, cell in items if spec.absence is None]

    def collect(wanted: MetricSet) -> str | None:
        """Profile with the wanted set what is not recorded; why counters were denied, if they were."""
        profiles, checks = run.profiles(), run.checks()
        todo = []
        for spec, cell in items:
            if _holds(profiles, spec, cell, wanted):
                continue
            empty = profiler.empty(spec, cell, wanted)
            rate = rates.get(f"{spec.name}/{cell.shape.head_dim}", 0.0)
            estimate = rate * flops.flops(cell) * PASSES[wanted] * launches
            if (no := refusal(checks, spec.name, spec.sha256, cell)) is not None:
                left_out = _without(empty, "not checked", no[1])
            elif estimate > limit_s:
                reason = f"its replays would take {estimate:.0f} s, the limit is {limit_s:g} s"
                left_out = _without(empty, "too slow", reason)
            else:
                todo.append((spec, empty))
                continue
            if left_out not in profiles:
                run.append("ncu", left_out)
        done = len(items) - len(todo)
        progress(done, len(items), "")
        for number, record in enumerate(profiler.profiles(todo), done + 1):
            run.append("ncu", record)
            progress(number, len(items), f"{record.arm} {record.cell.shape.id}")
            if record.cause == "permission denied":
                return record.reason
        return None

    if (denied := collect(metric_set)) is not None:
        collect("times")
        error = FlashladderError(f"counters are denied, times alone were recorded: {denied}")
        error.exit_code = Exit.PROFILER_DENIED
        raise error
    return run.profiles()


def profiles_of_same_code(run: RunDir, other: RunDir) -> list[NcuRecord]:
    """The profiles of `other` that `run` lacks, of the same machine code, or of peers of the same versions.

    Those of rungs name the binary of `run`. Raises FlashladderError when another kind of GPU was counted.
    """
    here, there = run.info.machine, other.info.machine
    if (here.gpu, here.arch) != (there.gpu, there.arch):
        raise FlashladderError(
            f"{other.path} counted on {there.gpu or 'no GPU'}, expected {here.gpu or 'no GPU'} as in {run.path}; "
            "name a run of the same GPU"
        )
    same_peers = (here.peers, here.torch, here.cudnn) == (there.peers, there.torch, there.cudnn)
    mine, theirs = ({b.rung: b for b in r.builds()} for r in (run, other))
    held = {(p.arm, p.cell) for p in run.profiles() if p.cause is None}
    found = []
    for profile in other.profiles():
        if profile.cause is not None or (profile.arm, profile.cell) in held:
            continue
        sha256 = None
        if profile.sha256 is not None:
            built, counted = mine.get(profile.arm), theirs.get(profile.arm)
            if built is None or counted is None or not built.cubins or built.cubins != counted.cubins:
                continue
            sha256 = built.sha256 if counted.sha256 == profile.sha256 else None
        if sha256 is not None or (profile.sha256 is None and same_peers):
            source = profile.taken_from or other.path.name
            found.append(msgspec.structs.replace(profile, sha256=sha256, taken_from=source))
    return found


EXPECTED: tuple[ProfileCause, ...] = ("not checked", "too slow")
"""Why an arm has no profile without anything having gone wrong here."""


def raise_on_failures(records: Sequence[NcuRecord]) -> None:
    """Raise FlashladderError (exit code 32) when a profile that was tried failed."""
    failed = [r for r in records if r.cause is not None and r.cause not in EXPECTED]
    if failed:
        first = failed[0]
        error = FlashladderError(
            f"{len(failed)} profiles failed; the first: {first.arm} in {first.cell.id}: {first.cause}: {first.reason}"
        )
        error.exit_code = Exit.PROFILER_FAILED
        raise error


def _holds(profiles: Sequence[NcuRecord], spec: ArmSpec, cell: Cell, wanted: MetricSet) -> bool:
    """Whether there is a profile of that binary and cell with what is wanted; a failed one is tried again."""
    return any(
        (p.arm, p.sha256, p.cell) == (spec.name, spec.sha256, cell)
        and p.cause is None
        and PASSES[p.set] >= PASSES[wanted]
        for p in profiles
    )


class _Profiler:
    """Runs the child, alone or under Nsight Compute, and judges what it left."""

    def __init__(
        self, run: RunDir, tool: Path | None, names: Sequence[str], launches: int, limit_s: float, seed: int
    ) -> None:
        self.tool, self.names, self.launches, self.limit_s, self.seed = tool, names, launches, limit_s, seed
        self.folder = run.path.resolve() / "ncu"
        self.version = None
        if tool is not None:
            printed = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
            self.version = ncu.version(printed)

    def empty(self, spec: ArmSpec, cell: Cell, metric_set: MetricSet) -> NcuRecord:
        version = None if metric_set == "times" else self.version
        return NcuRecord(arm=spec.name, kind=spec.kind, sha256=spec.sha256, cell=cell, set=metric_set, ncu=version)

    def profiles(self, items: Sequence[tuple[ArmSpec, NcuRecord]]) -> Iterator[NcuRecord]:
        """The empty records filled, in order. One child at a time has the GPU; those after it start meanwhile.

        Ends after a record without permission: it would be the same for the rest.
        """
        rest = iter(items)
        waiting: deque[tuple[ArmSpec, NcuRecord, ncu.Child]] = deque()
        ended: tuple[NcuRecord, ncu.Run] | None = None
        try:
            while True:
                waiting += (
                    (spec, empty, ncu.Child(self._command(empty))) for spec, empty in islice(rest, AHEAD - len(waiting))
                )
                if not waiting:
                    break
                spec, empty, child = waiting[0]
                job = ProfileJob(arm=spec, cell=empty.cell, set=empty.set, launches=self.launches, seed=self.seed)
                child.begin(msgspec.json.encode(job))
                if ended is not None:
                    yield self._judged(*ended)  # a report is read while the next one is made
                ended = empty, child.end(self.limit_s)
                waiting.popleft()
                fault = ncu.fault(ended[1], self.limit_s)
                if fault is not None and fault[0] == "permission denied":
                    break
            if ended is not None:
                yield self._judged(*ended)
        finally:
            for _, _, child in waiting:
                child.kill()

    def _report(self, empty: NcuRecord) -> Path:
        return self.folder / f"{empty.arm}-{empty.cell.id}-{empty.set}.ncu-rep"

    def _command(self, empty: NcuRecord) -> Sequence[str]:
        child = (sys.executable, "-m", "flashladder.profiling")
        if empty.set == "times" or self.tool is None:
            return child
        report = self._report(empty)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)  # one of an earlier try would be taken for this one's
        return ncu.command(self.tool, report, self.names, empty.set == "full", child)

    def _judged(self, empty: NcuRecord, ended: ncu.Run) -> NcuRecord:
        if empty.set == "times" or self.tool is None:
            return self._times(empty, ended)
        return self._counters(empty, ended, self.tool, self._report(empty))

    def _times(self, empty: NcuRecord, ended: ncu.Run) -> NcuRecord:
        if (fault := ncu.fault(ended, self.limit_s)) is not None:
            return _without(empty, *fault)
        try:
            kernels = msgspec.json.decode(ended.output.strip().splitlines()[-1], type=tuple[KernelProfile, ...])
        except (IndexError, msgspec.DecodeError):
            return _without(empty, "error", "the child printed no kernels")
        return self._filled(empty, kernels)

    def _counters(self, empty: NcuRecord, ended: ncu.Run, tool: Path, report: Path) -> NcuRecord:
        """ncu's exit code tells little: the report's content does."""
        if (fault := ncu.fault(ended, self.limit_s)) is not None:
            cause, reason = fault
            versions = f" (ncu {self.version}, driver {machine.driver()})" if cause == "version mismatch" else ""
            return _without(empty, cause, reason + versions)
        return self._filled(empty, ncu.read_report(tool, report, self.names) if report.exists() else ())

    def _filled(self, empty: NcuRecord, kernels: tuple[KernelProfile, ...]) -> NcuRecord:
        if not kernels:
            return _without(empty, "no kernel", "no kernel was seen")
        return msgspec.structs.replace(empty, kernels=kernels, missing=ncu.missing(kernels, self.names))


def _without(record: NcuRecord, cause: ProfileCause, reason: str) -> NcuRecord:
    return msgspec.structs.replace(record, cause=cause, reason=reason)


if __name__ == "__main__":
    main()
