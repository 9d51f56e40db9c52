"""The profiling stage: Nsight Compute around a child process that makes exactly the requested calls.

`python -m flashladder.profiling` is that child: it reads one job on stdin and profiles between cudaProfilerStart and
Stop alone, so that what prepares a call is not counted.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path

import msgspec

from flashladder import flops, machine, ncu
from flashladder.arms import ArmSpec, open_arm
from flashladder.check import refusal
from flashladder.errors import EnvironmentInvalidError, Exit, FlashladderError
from flashladder.ladder import Metrics
from flashladder.model import Cell, NcuRecord, ProfileCause, Record
from flashladder.ninja import Progress, silent
from flashladder.rundir import RunDir

PASSES = {False: 25, True: 40}
"""Replays of a launch that the light and the full set take."""


class ProfileJob(Record, frozen=True, kw_only=True):
    arm: ArmSpec
    cell: Cell
    launches: int
    seed: int


def main() -> None:
    """Entry of the child."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileJob)
    import torch

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
    with arm.context():
        arm(q, k, v, o, lse, 1 / sqrt(s.head_dim), job.cell.causal)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        for _ in range(job.launches):
            arm(q, k, v, o, lse, 1 / sqrt(s.head_dim), job.cell.causal)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def profile_cells(
    run: RunDir,
    specs: Sequence[ArmSpec],
    cells: Sequence[Cell],
    metrics: Metrics,
    arch: str,
    rates: Mapping[str, float],
    *,
    full: bool = False,
    launches: int = 1,
    limit_s: float = 120.0,
    seed: int = 0,
    progress: Progress = silent,
) -> list[NcuRecord]:
    """Profile what is not recorded; an arm that cannot be is a record with its cause. Returns all records.

    `rates`: least seconds a FLOP by arm/head_dim; what would not end within `limit_s` is not started.
    Raises EnvironmentInvalidError without Nsight Compute, FlashladderError (exit code 31) when counters are denied.
    """
    tool = ncu.find_ncu()
    if tool is None:
        raise EnvironmentInvalidError("no Nsight Compute (ncu) in PATH, CUDA_HOME or /opt/nvidia; install it")
    found = ncu.version(subprocess.run([tool, "--version"], capture_output=True, text=True).stdout)
    checks = run.checks()
    done = {(r.arm, r.sha256, r.cell, r.set == "full") for r in run.profiles()}
    items = [(spec, cell) for cell in cells for spec in specs if spec.absence is None]
    names = metrics.names(arch)
    for number, (spec, cell) in enumerate(items):
        progress(number, len(items), f"{spec.name} {cell.shape.id}")
        if {(spec.name, spec.sha256, cell, full), (spec.name, spec.sha256, cell, True)} & done:
            continue

        empty = NcuRecord(
            arm=spec.name,
            kind=spec.kind,
            sha256=spec.sha256,
            cell=cell,
            set="full" if full else "light",
            ncu=found,
        )
        estimate = rates.get(f"{spec.name}/{cell.shape.head_dim}", 0.0) * flops.flops(cell) * PASSES[full] * launches
        if (no := refusal(checks, spec.name, spec.sha256, cell)) is not None:
            run.append("ncu", _without(empty, "not checked", no[1]))
        elif estimate > limit_s:
            reason = f"its replays would take {estimate:.0f} s, the limit is {limit_s:g} s"
            run.append("ncu", _without(empty, "too slow", reason))
        else:
            report = run.path.resolve() / "ncu" / f"{spec.name}-{cell.id}-{'full' if full else 'light'}.ncu-rep"
            report.parent.mkdir(parents=True, exist_ok=True)
            job = msgspec.json.encode(ProfileJob(arm=spec, cell=cell, launches=launches, seed=seed))
            child = (sys.executable, "-m", "flashladder.profiling")
            ended = ncu.run_ncu(ncu.command(tool, report, names, full, child), job, limit_s)
            run.append("ncu", _judged(empty, ended, tool, report, names, limit_s))
            if (last := run.profiles()[-1]).cause == "permission denied":
                error = FlashladderError(f"profiling is not permitted: {last.reason}")
                error.exit_code = Exit.PROFILER_DENIED
                raise error
    progress(len(items), len(items), "")
    return run.profiles()


def _without(record: NcuRecord, cause: ProfileCause, reason: str) -> NcuRecord:
    return msgspec.structs.replace(record, cause=cause, reason=reason)


def _judged(
    record: NcuRecord, ended: ncu.Run, tool: Path, report: Path, names: Sequence[str], limit_s: float
) -> NcuRecord:
    """The record with what the report holds. ncu's exit code tells little: the report's content does."""
    if (fault := ncu.fault(ended, limit_s)) is not None:
        cause, reason = fault
        versions = f" (ncu {record.ncu}, driver {machine.driver()})" if cause == "version mismatch" else ""
        return _without(record, cause, reason + versions)
    kernels = ncu.read_report(tool, report, names) if report.exists() else ()
    if not kernels:
        return _without(record, "no kernel", "the report holds no kernel")
    return msgspec.structs.replace(record, kernels=kernels, missing=ncu.missing(kernels, names))


if __name__ == "__main__":
    main()
