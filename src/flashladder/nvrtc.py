"""Compiles the kernels' device code with CUDA 12.8 where no nvcc 12.8 is: NVRTC to PTX, ptxas to machine code.

NVRTC knows no host code. So the host's part of a source passes as device code that nothing calls: launches become plain
calls, the CUDA runtime and the driver are declarations, and the library's entry is a template without an instance. The
PTX is not nvcc's, so nothing but success is reported. `python -m flashladder.nvrtc [RUNG...]` needs the dependency
group cuda-check.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashladder import build, paths
from flashladder.errors import EnvironmentInvalidError, Exit, FlashladderError
from flashladder.ladder import load_ladder
from flashladder.model import Rung

VERSION = (12, 8)
SUBSTITUTIONS = (
    (r"<<<.*?>>>\(", "("),
    (r'extern "C" (const flashladder::Rung\* flashladder_rung)', r"template <class> \1"),
    # NVRTC initialises no variable of the device at run time.
    (r"\bstatic const auto\b", "const auto"),
    (r"\bstatic thread_local\b", "static"),
    (r"reinterpret_cast<const void\*>\(ID##_##SUFFIX\)", "nullptr"),  # no constant
    (r"\bInstance mma_instance\(", "constexpr Instance mma_instance("),
    (r"\bconst (flashladder::(?:Instance|HopperKernels|TmaInstance) ID)", r"constexpr \1"),
)
STAND_INS = {
    "cstdint": """
#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#define offsetof(T, member) ((unsigned long)__INTADDR__(&(((T*)0)->member)))
""",
    "algorithm": """
#pragma once
namespace std {
template <class T> constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
template <class T> constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }
template <class T> constexpr const T& clamp(const T& x, const T& a, const T& b) { return max(a, min(x, b)); }
template <class Place, class Less> constexpr void stable_sort(Place, Place, Less) {}
}
""",
    "type_traits": """
#pragma once
namespace std {
template <bool, class Then, class Else> struct conditional { typedef Then type; };
template <class Then, class Else> struct conditional<false, Then, Else> { typedef Else type; };
template <bool chosen, class Then, class Else> using conditional_t = typename conditional<chosen, Then, Else>::type;
template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;
}
""",
    "cuda_runtime.h": """
#pragma once
cudaError_t cudaGetDevice(int*);
cudaError_t cudaSetDevice(int);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int);
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int);
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t*, void (*)(Parameters...), Arguments...);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**);
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void**, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*);
""",
    "cuda.h": """
#pragma once
#include <cstdint>
struct alignas(64) CUtensorMap { uint64_t opaque[16]; };
typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
enum CUresult { CUDA_SUCCESS };
enum TensorMapOption {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_INTERLEAVE_NONE,
  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
};
CUresult cuTensorMapEncodeTiled(CUtensorMap*, TensorMapOption, uint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                const cuuint32_t*, const cuuint32_t*, TensorMapOption, TensorMapOption, TensorMapOption,
                                TensorMapOption);
""",
}


def _wheels() -> Path:
    """Where the wheels of the group cuda-check are."""
    return Path(sysconfig.get_path("purelib")) / "nvidia"


@cache
def _library() -> ctypes.CDLL:
    """NVRTC 12.8. Raises EnvironmentInvalidError when it is not installed, or another."""
    file = _wheels() / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    if not file.exists() or not _ptxas().exists():
        raise EnvironmentInvalidError("NVRTC 12.8 is missing; run 'nox -s cuda12' or 'uv sync --group cuda-check'")
    library = ctypes.CDLL(str(file))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != VERSION:
        raise EnvironmentInvalidError(
            f"{file} is {major.value}.{minor.value}, expected 12.8; run 'uv sync --group cuda-check'"
        )
    return library


def _ptxas() -> Path:
    return _wheels() / "cuda_nvcc" / "bin" / "ptxas"


def device_code(text: str) -> str:
    """A source or header of kernel/ as NVRTC takes it."""
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text


def to_ptx(source: Path, virtual_arch: str) -> bytes:
    """PTX of a rung for compute_NN. Raises FlashladderError with NVRTC's words when it does not compile."""
    library = _library()
    headers = STAND_INS | {h.name: device_code(h.read_text()) for h in sorted((paths.KERNEL / "include").iterdir())}
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    program = ctypes.c_void_p()
    text, name = device_code(source.read_text()).encode(), source.name.encode()
    library.nvrtcCreateProgram(ctypes.byref(program), text, name, len(headers), texts, names)
    includes = [f"-I{_wheels() / part / 'include'}" for part in ("cuda_runtime", "cuda_cccl", "cuda_nvcc")]
    flags = [f"--gpu-architecture={virtual_arch}", "-std=c++20", "-default-device", "-w", *includes]
    failed = library.nvrtcCompileProgram(
        program, len(flags), (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    )
    what = "ProgramLog" if failed else "PTX"
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    said = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, said)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise FlashladderError(f"{source.stem} for {virtual_arch}: {build.first_error(said.value.decode())}")
    return said.value


def assemble(ptx: bytes, arch: str, name: str) -> bytes:
    """Machine code for sm_NN. Raises FlashladderError with ptxas's words when it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / f"{name}.ptx", Path(folder) / f"{name}.cubin"
        source.write_bytes(ptx)
        done = subprocess.run([_ptxas(), f"-arch={arch}", source, "-o", output], capture_output=True, text=True)
        if done.returncode:
            raise FlashladderError(f"{name} for {arch}: {build.first_error(done.stdout + done.stderr)}")
        return output.read_bytes()


@dataclass(frozen=True)
class Job:
    """A source, compiled once to PTX and assembled for every architecture that shares it, as nvcc does."""

    rung: str
    source: Path
    virtual_arch: str
    archs: tuple[str, ...]


def jobs(rungs: Sequence[Rung]) -> list[Job]:
    """What to compile for the architectures that the project supports."""
    found = []
    for rung in rungs:
        by_virtual: dict[str, list[str]] = {}
        for arch in (a for a in build.ALL_ARCHS if rung.runs_on(a)):
            by_virtual.setdefault(build.virtual_arch(arch), []).append(arch)
        found += [Job(rung.id, paths.ROOT / rung.source, v, tuple(archs)) for v, archs in by_virtual.items()]
    return found


def check(todo: Sequence[Job]) -> list[str]:
    """Compile in parallel, a line printed for each; returns the faults."""
    faults = []
    _library()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(_compile, job): job for job in todo[::-1]}  # the last have the most kernels
        for number, done in enumerate(as_completed(running), 1):
            job = running[done]
            try:
                said = f"{', '.join(job.archs)} in {done.result():.1f} s"
            except FlashladderError as error:
                faults.append(str(error))
                said = str(error)
            print(f"[{number}/{len(todo)}] {job.rung}: {said}", flush=True)
    return faults


def _compile(job: Job) -> float:
    """The seconds that it took."""
    started = time.monotonic()
    ptx = to_ptx(job.source, job.virtual_arch)
    for arch in job.archs:
        assemble(ptx, arch, job.rung)
    return time.monotonic() - started


def main() -> None:
    ladder = load_ladder()
    try:
        rungs = ladder.select(tuple(sys.argv[1:])) if sys.argv[1:] else (*ladder.rungs, *ladder.variants)
        faults = check(jobs(rungs))
    except FlashladderError as error:
        sys.exit(f"flashladder: {error}")
    if faults:
        print(f"CUDA 12.8 compiles {len(rungs) - len(faults)} of {len(rungs)} kernels' device code", file=sys.stderr)
        sys.exit(Exit.BUILD)
    print(f"CUDA 12.8 compiles the device code of {len(rungs)} rungs and variants for {', '.join(build.ALL_ARCHS)}")


if __name__ == "__main__":
    main()
