"""The preflight: what the tool needs, what it found, and how to mend what is missing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flashladder import machine, paths
from flashladder.errors import FlashladderError
from flashladder.ncu import find_ncu
from flashladder.toolchain import find_cuda_tool, find_cxx, find_ninja, find_nvcc

NEEDED_DRIVER = {13: 580, 12: 570}
"""Least driver branch by the major CUDA version that the kernels or torch were built with."""
NEEDED_DISK_BYTES = 2 << 30
CAP_SYS_ADMIN = 1 << 21


@dataclass(frozen=True)
class Finding:
    """One line of the preflight."""

    name: str
    level: Literal["ok", "note", "fault"]
    text: str


def _nvcc() -> Finding:
    try:
        nvcc = find_nvcc()
    except FlashladderError as error:
        return Finding("nvcc", "fault", str(error))
    return Finding("nvcc", "ok", f"{nvcc.version} at {nvcc.path}")


def _cxx() -> Finding:
    try:
        return Finding("C++ compiler", "ok", find_cxx())
    except FlashladderError as error:
        return Finding("C++ compiler", "fault", str(error))


def _ninja() -> Finding:
    try:
        return Finding("ninja", "ok", find_ninja())
    except FlashladderError as error:
        return Finding("ninja", "fault", str(error))


def _sass() -> Finding:
    tools = {name: find_cuda_tool(name) for name in ("cuobjdump", "nvdisasm")}
    if missing := [name for name, tool in tools.items() if tool is None]:
        return Finding("disassembler", "note", f"{missing[0]} missing: SASS histograms will be empty; run 'uv sync'")
    return Finding("disassembler", "ok", ", ".join(map(str, tools.values())))


def _gpu(nvml: machine.Nvml) -> Finding:
    name = machine.gpu_name()
    if name is None:
        return Finding(
            "GPU", "note", "none: kernels are built, nothing is timed; 'nvidia-smi' must list one to measure"
        )
    others = nvml.other_processes()
    if others:
        return Finding("GPU", "note", f"{name}, but {others} other processes use it: timings will be marked invalid")
    return Finding("GPU", "ok", f"{name} ({machine.gpu_arch()})")


def driver_finding(driver: str | None, cuda_major: int) -> Finding:
    """The driver found against the branch that CUDA `cuda_major` needs."""
    needed = NEEDED_DRIVER.get(cuda_major, max(NEEDED_DRIVER.values()))
    if driver is None:
        return Finding("driver", "note", f"none found; kernels built with CUDA {cuda_major} need {needed} or later")
    if int(driver.split(".")[0]) < needed:
        return Finding(
            "driver", "fault", f"found {driver}, CUDA {cuda_major} needs {needed} or later; update the NVIDIA driver"
        )
    return Finding("driver", "ok", f"{driver}, CUDA {cuda_major} needs {needed} or later")


def _driver(nvml: machine.Nvml) -> Finding:
    driver = nvml.read(lambda n, _: str(n.nvmlSystemGetDriverVersion()))
    try:
        major = int(find_nvcc().version.split(".")[0])
    except FlashladderError:
        major = max(NEEDED_DRIVER)
    return driver_finding(driver, major)


def _torch(nvml: machine.Nvml) -> Finding:
    level: Literal["note", "fault"] = "fault" if nvml.present else "note"
    try:
        import torch
    except ImportError:
        return Finding("torch", level, "missing, needed to check and time on a GPU; run 'uv sync --extra gpu'")
    if nvml.present and not torch.cuda.is_available():
        return Finding("torch", "fault", f"{torch.__version__} sees no GPU; install a CUDA build: uv sync --extra gpu")
    return Finding("torch", "ok", f"{torch.__version__} (CUDA {torch.version.cuda})")


def profiling_denied(params: str, cap_eff: int) -> bool:
    """Whether the driver keeps performance counters from this process.

    `params` is /proc/driver/nvidia/params, `cap_eff` the effective capabilities (CapEff of /proc/self/status).
    """
    return "RmProfilingAdminOnly: 1" in params and not cap_eff & CAP_SYS_ADMIN


def _ncu() -> Finding:
    tool = find_ncu()
    if tool is None:
        return Finding("ncu", "note", "missing: no profiles; install Nsight Compute or set CUDA_HOME")
    try:
        version = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return Finding("ncu", "note", f"{tool} does not answer --version; reinstall Nsight Compute")
    params = Path("/proc/driver/nvidia/params")
    status = Path("/proc/self/status").read_text()
    cap_eff = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    if params.exists() and profiling_denied(params.read_text(), cap_eff):
        return Finding(
            "ncu",
            "note",
            "permission denied (ERR_NVGPUCTRPERM): set NVreg_RestrictProfilingToAdminUsers=0, or run as root, "
            "in a container with --cap-add=SYS_ADMIN",
        )
    return Finding("ncu", "ok", f"{(version.strip().splitlines() or ['?'])[-1]} at {tool}")


def _disk() -> Finding:
    free = shutil.disk_usage(paths.ROOT).free
    if free < NEEDED_DISK_BYTES:
        needed = NEEDED_DISK_BYTES >> 30
        return Finding("disk", "fault", f"{free >> 20} MiB free at {paths.ROOT}, {needed} GiB needed; free some")
    return Finding("disk", "ok", f"{free >> 30} GiB free")


def examine() -> Iterator[Finding]:
    """All findings, in the order a newcomer meets them."""
    nvml = machine.Nvml()
    yield _gpu(nvml)
    yield _driver(nvml)
    yield _nvcc()
    yield _cxx()
    yield _ninja()
    yield _sass()
    yield _torch(nvml)
    yield _ncu()
    yield _disk()
