"""Fingerprint of the machine, and NVML readings. Everything here works, and says None, without a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flashladder import paths, peers
from flashladder.errors import FlashladderError
from flashladder.model import BlockTelemetry, Machine
from flashladder.toolchain import find_nvcc

T = TypeVar("T")

# Clock event reasons that make a block invalid (NVML): hardware slowdown, software and hardware thermal slowdown,
# hardware power brake. The power cap is not among them: every long kernel hits it.
_INVALID_REASONS = 0x8 | 0x20 | 0x40 | 0x80


class Nvml:
    """Readings of GPU 0. Each is None where NVML or the reading is missing."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    @property
    def present(self) -> bool:
        return self._handle is not None

    def read(self, query: Callable[[Any, Any], T]) -> T | None:
        """`query(pynvml, handle)`, or None when it fails."""
        if self._handle is None:
            return None
        try:
            return query(self._nvml, self._handle)
        except self._nvml.NVMLError:
            return None

    def sm_clock_mhz(self) -> int | None:
        return self.read(lambda n, h: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)))

    def other_processes(self) -> int:
        """Compute processes on the GPU beyond this one."""
        running = self.read(lambda n, h: len(n.nvmlDeviceGetComputeRunningProcesses(h)))
        return max(0, (running or 1) - 1)

    def block_telemetry(self) -> BlockTelemetry:
        power = self.read(lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000)
        reasons = self.read(lambda n, h: int(n.nvmlDeviceGetCurrentClocksEventReasons(h)))
        return BlockTelemetry(
            sm_clock_mhz=self.sm_clock_mhz(),
            memory_clock_mhz=self.read(lambda n, h: int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM))),
            power_w=power,
            temperature_c=self.read(lambda n, h: int(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU))),
            event_reasons=reasons,
            valid=not (reasons or 0) & _INVALID_REASONS and self.other_processes() == 0,
        )


def driver() -> str | None:
    """The driver's version; None without one."""
    return Nvml().read(lambda n, _: _text(n.nvmlSystemGetDriverVersion()))


def gpu_name() -> str | None:
    """NVML's name of GPU 0; None without a GPU or driver."""
    return Nvml().read(lambda n, h: _text(n.nvmlDeviceGetName(h)))


def gpu_arch() -> str | None:
    """sm_NN of GPU 0; None without a GPU."""
    capability = Nvml().read(lambda n, h: n.nvmlDeviceGetCudaComputeCapability(h))
    return None if capability is None else arch_of(*capability)


def arch_of(major: int, minor: int) -> str:
    """sm_NN of a compute capability, with the `a` of Hopper, whose own instructions need it."""
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpu() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return None


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _torch_versions() -> tuple[str | None, str | None, str | None]:
    try:
        import torch
    except ImportError:
        return None, None, None
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return str(torch.__version__), torch.version.cuda, None if cudnn is None else str(cudnn)


def gpu_digest() -> str | None:
    """First 12 hex digits of the SHA-256 of the GPU's UUID."""
    uuid = Nvml().read(lambda n, h: _text(n.nvmlDeviceGetUUID(h)))
    return None if uuid is None else hashlib.sha256(uuid.encode()).hexdigest()[:12]


def fingerprint() -> Machine:
    """Read everything that a timing depends on."""
    nvml = Nvml()
    read = nvml.read
    torch_version, torch_cuda, cudnn = _torch_versions()
    sm_count = l2_bytes = None
    if nvml.present and torch_version is not None:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            sm_count, l2_bytes = properties.multi_processor_count, properties.L2_cache_size
    nvcc = None
    with contextlib.suppress(FlashladderError):
        nvcc = find_nvcc().version
    return Machine(
        gpu=gpu_name(),
        gpu_digest=gpu_digest(),
        arch=gpu_arch(),
        sm_count=sm_count,
        l2_bytes=l2_bytes,
        memory_bytes=read(lambda n, h: int(n.nvmlDeviceGetMemoryInfo(h).total)),
        vbios=read(lambda n, h: _text(n.nvmlDeviceGetVbiosVersion(h))),
        driver=driver(),
        cuda_driver=read(lambda n, _: _cuda_version(n.nvmlSystemGetCudaDriverVersion())),
        power_limit_w=read(lambda n, h: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000),
        max_sm_clock_mhz=read(lambda n, h: int(n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM))),
        max_memory_clock_mhz=read(lambda n, h: int(n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_MEM))),
        ecc=read(lambda n, h: bool(n.nvmlDeviceGetEccMode(h)[0])),
        mig=read(lambda n, h: bool(n.nvmlDeviceGetMigMode(h)[0])),
        cpu=_cpu(),
        python=platform.python_version(),
        torch=torch_version,
        torch_cuda=torch_cuda,
        cudnn=cudnn,
        nvcc=nvcc,
        container=os.environ.get("FLASHLADDER_IMAGE_DIGEST") or None,
        peers=peers.versions(),
    )


def git_state() -> tuple[str, bool]:
    """The checkout's commit and whether tracked files differ from it; ("unknown", False) outside git.

    FLASHLADDER_COMMIT names it for a copy that is no checkout, though it may lie inside one.
    """
    if commit := os.environ.get("FLASHLADDER_COMMIT"):
        return commit, False
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=paths.ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=paths.ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False
    return commit, bool(status.strip())
