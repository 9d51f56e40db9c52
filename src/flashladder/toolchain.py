"""Finds the compilers and disassemblers: CUDA_HOME, then PATH, then the locked wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashladder.errors import BuildError

MIN_NVCC = (12, 8)


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str
    """Full version, such as 13.0.88."""
    library_dirs: tuple[Path, ...]
    """Extra directories to link from; a toolkit's nvcc knows its own, a wheel's does not."""


def wheel_root() -> Path:
    """Where the nvidia-cuda-* wheels of the lock put a toolkit's bin, include and lib."""
    return Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"


def _version(nvcc: Path) -> str | None:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    return match.group(1) if done.returncode == 0 and match else None


def _new_enough(version: str) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= MIN_NVCC


@cache
def find_nvcc() -> Nvcc:
    """The first nvcc of at least MIN_NVCC. Raises BuildError naming every place looked at."""
    found, looked = _look_for_nvcc()
    if found:
        return found[0]
    wanted = ".".join(map(str, MIN_NVCC))
    raise BuildError(f"no nvcc >= {wanted}: looked at {', '.join(looked)}; set CUDA_HOME or run 'uv sync'")


def find_nvccs() -> list[Nvcc]:
    """Every nvcc of at least MIN_NVCC, the one that builds first."""
    return _look_for_nvcc()[0]


def _look_for_nvcc() -> tuple[list[Nvcc], list[str]]:
    """Those that are new enough, and the places without one."""
    found: list[Nvcc] = []
    looked: list[str] = []
    candidates: list[tuple[Path, tuple[Path, ...]]] = []
    if home := os.environ.get("CUDA_HOME"):
        candidates.append((Path(home) / "bin" / "nvcc", ()))
    if on_path := shutil.which("nvcc"):
        candidates.append((Path(on_path), ()))
    candidates.append((wheel_root() / "bin" / "nvcc", (wheel_root() / "lib",)))
    for path, library_dirs in candidates:
        version = _version(path)
        if version and _new_enough(version):
            found.append(Nvcc(path, version, library_dirs))
        else:
            looked.append(f"{path} ({version or 'not found'})")
    return found, looked


@cache
def find_cxx() -> str:
    """The host C++ compiler's first line of --version. Raises BuildError when there is none."""
    cxx = shutil.which("g++")
    if cxx is None:
        raise BuildError("no C++ compiler: g++ is not on PATH; install it (Debian, Ubuntu: apt-get install g++)")
    return subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout.splitlines()[0]


def cpu_has(*features: str) -> bool:
    """Whether this CPU has all of these instruction sets, as /proc/cpuinfo names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(features) <= set(flags.split())


@cache
def find_ninja() -> str:
    """Path of ninja, from PATH or the ninja wheel. Raises BuildError when there is none."""
    scripts = Path(sysconfig.get_path("scripts")) / "ninja"
    found = shutil.which("ninja") or (str(scripts) if scripts.exists() else None)
    if found is None:
        raise BuildError("ninja is missing: it is on neither PATH nor in this environment; run 'uv sync'")
    return found


@cache
def find_cuda_tool(name: str) -> Path | None:
    """cuobjdump, nvdisasm or ncu: beside nvcc, on PATH, in the wheels, or under the usual install roots."""
    beside = find_nvcc().path.parent / name
    roots = sorted(Path("/opt/nvidia/nsight-compute").glob(f"*/{name}"), reverse=True)
    roots += sorted(Path("/usr/local").glob(f"cuda*/bin/{name}"), reverse=True)
    on_path = shutil.which(name)
    for path in [beside, *([Path(on_path)] if on_path else []), wheel_root() / "bin" / name, *roots]:
        if path.exists():
            return path
    return None
