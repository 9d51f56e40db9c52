"""Nsight Compute: where it is, how it is called, what it said.

Everything here is pure but `find_ncu`, `Child` and reading a report.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flashladder.model import KernelProfile, Metric, ProfileCause
from flashladder.toolchain import find_cuda_tool

ROOTS = ("/opt/nvidia/nsight-compute/*", "/usr/local/NVIDIA-Nsight-Compute*", "/usr/local/cuda*/nsight-compute*")

SCALES: dict[str, tuple[float, str]] = {
    **{unit: (scale, "s") for unit, scale in {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}.items()},
    **{f"{n}second": (scale, "s") for n, scale in {"": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}.items()},
    **{f"{n}byte": (scale, "byte") for n, scale in {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()},
    **{f"{n}byte/s": (scale, "byte/s") for n, scale in {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()},
    **{f"{n}byte/block": (scale, "byte/block") for n, scale in {"": 1.0, "K": 1e3, "M": 1e6}.items()},
    **{f"{n}hz": (scale, "hz") for n, scale in {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}.items()},
}
"""Unit as ncu prints it, `second` shortened to `s` in rates -> factor and base unit."""

CAUSES: tuple[tuple[str, ProfileCause, str], ...] = (
    (
        r"ERR_NVGPUCTRPERM",
        "permission denied",
        "the driver keeps performance counters from this user: set NVreg_RestrictProfilingToAdminUsers=0, or run as "
        "root, in a container with --cap-add=SYS_ADMIN",
    ),
    (
        r"Failed to find metric|[Ii]nvalid metric|unknown metric",
        "unknown metric",
        "this Nsight Compute does not know a metric of experiments/metrics.toml; update it or move the metric to an "
        "entry of its architectures",
    ),
    (
        r"[Dd]river (?:is )?(?:not compatible|not supported|incompatible|mismatch|too old)|"
        r"LibraryNotLoaded|driver version",
        "version mismatch",
        "Nsight Compute and the driver do not fit; install the release that came with the driver's CUDA",
    ),
    (
        r"[Oo]ut ?[Oo]f ?[Mm]emory",
        "out of memory",
        "no memory to save what a replay overwrites; profile a smaller shape",
    ),
    (r"No kernels were profiled", "no kernel", "the call launched no kernel between start and stop of the profiler"),
)
"""What ncu prints -> the cause and what to do, the first that matches."""


@dataclass(frozen=True)
class Run:
    """How a child of ncu ended."""

    code: int | None
    """None: killed after the time limit."""
    output: str


@cache
def find_ncu() -> Path | None:
    """ncu from PATH, CUDA_HOME and the usual install roots, the newest of those last."""
    if tool := find_cuda_tool("ncu"):
        return Path(tool)
    if found := shutil.which("ncu"):
        return Path(found)
    installed = [path for root in ROOTS for path in sorted(Path("/").glob(f"{root[1:]}/ncu"))]
    return max(installed, key=lambda path: _numbers(str(path)), default=None)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def version(text: str) -> str | None:
    """The version in what `ncu --version` prints."""
    match = re.search(r"Version (\S+)", text)
    return match.group(1) if match else None


def command(tool: Path, report: Path, metrics: Sequence[str], full: bool, child: Sequence[str]) -> list[str]:
    """The command line that profiles `child` between its cudaProfilerStart and Stop, with clocks as they are."""
    return [
        str(tool),
        "--clock-control=none",
        "--cache-control=all",
        "--profile-from-start=off",
        "--force-overwrite",
        f"--export={report}",
        *(["--set=full"] if full else []),
        f"--metrics={','.join(metrics)}",
        *child,
    ]


class Child:
    """A process in a group of its own, which waits for its input: until `begin` it only prepares itself."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._begun = time.monotonic()

    def begin(self, stdin: bytes) -> None:
        """Give the input, and start the time limit."""
        assert self._process.stdin is not None
        self._begun = time.monotonic()
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(stdin)
        self._process.stdin = None  # communicate() would flush it

    def end(self, limit_s: float) -> Run:
        """Wait for the end; kill the group `limit_s` after the beginning."""
        try:
            left = self._begun + limit_s - time.monotonic()
            output, _ = self._process.communicate(timeout=max(0.0, left))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            output, _ = self._process.communicate()
            return Run(None, output.decode(errors="replace"))
        except BaseException:
            self.kill()
            raise
        return Run(self._process.returncode, output.decode(errors="replace"))

    def kill(self) -> None:
        """Kill the group, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def fault(run: Run, limit_s: float) -> tuple[ProfileCause, str] | None:
    """(cause, what happened and what to do) of a run without a usable report; None when it may have one."""
    if run.code is None:
        return "timeout", f"no end after {limit_s:g} s; raise --limit or profile a smaller shape"
    for pattern, cause, advice in CAUSES:
        if re.search(pattern, run.output):
            seen = sorted(set(re.findall(r'==PROF== Profiling "([^"]+)"', run.output)))
            names = f"; kernels seen: {', '.join(seen)}" if cause == "no kernel" and seen else ""
            return cause, advice + names
    if run.code:
        lines = [line for line in run.output.splitlines() if line.strip()]
        return "error", f"exit code {run.code}: {lines[-1].strip() if lines else 'it said nothing'}"
    return None


# --- reading a report -----------------------------------------------------------------------------------------------


def read_report(tool: Path, report: Path, names: Sequence[str]) -> tuple[KernelProfile, ...]:
    """The kernels of a .ncu-rep with those of the named metrics that they have.

    Through NVIDIA's ncu_report module where it is installed, else through ncu's own CSV.
    """
    try:
        import ncu_report
    except ImportError:
        arguments = [str(tool), f"--import={report}", "--csv", "--page=raw"]
        text = subprocess.run(arguments, capture_output=True, text=True).stdout
        return parse_csv(text, names)
    return from_module(ncu_report, report, names)


def from_module(module: Any, report: Path, names: Sequence[str]) -> tuple[KernelProfile, ...]:
    """Read with the ncu_report module, whose values are in base units; a metric it lacks is None there."""
    ranges = module.load_report(str(report))
    kernels = []
    for number in range(ranges.num_ranges()):
        actions = ranges.range_by_idx(number)
        for index in range(actions.num_actions()):
            action = actions.action_by_idx(index)
            metrics = {}
            for name in names:
                metric = action.metric_by_name(name)
                if metric is not None and (value := _float(metric.value())) is not None:
                    metrics[name] = based(value, metric.unit() or "")
            kernels.append(KernelProfile(name=str(action.name()), metrics=metrics))
    return tuple(kernels)


def parse_csv(text: str, names: Sequence[str]) -> tuple[KernelProfile, ...]:
    """Read `ncu --csv --page raw`: a header, a row of units, a row a launch. What is no number counts as missing."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return ()
    head, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    columns = {name: head.index(name) for name in names if name in head}
    kernels = []
    for row in rows:
        if len(row) != len(head):
            continue
        values = {name: _float(row[column].replace(",", "")) for name, column in columns.items()}
        metrics = {name: based(value, units[columns[name]]) for name, value in values.items() if value is not None}
        kernels.append(KernelProfile(name=row[head.index("Kernel Name")].split("(")[0], metrics=metrics))
    return tuple(kernels)


def _float(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if number == number and abs(number) != float("inf") else None


def based(value: float, unit: str) -> Metric:
    """A value in its base unit."""
    scale, base = SCALES.get(unit.replace("/second", "/s"), (1.0, unit))
    return Metric(value=value * scale, unit=base)


def missing(kernels: Sequence[KernelProfile], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(name in kernel.metrics for kernel in kernels))


def main_kernel(kernels: Sequence[KernelProfile]) -> KernelProfile:
    """Of an arm's kernels the one that takes longest."""
    return max(kernels, key=lambda k: _value(k.metrics, "gpu__time_duration.sum"))


def _value(metrics: Mapping[str, Metric], name: str) -> float:
    return metrics[name].value if name in metrics else 0.0
