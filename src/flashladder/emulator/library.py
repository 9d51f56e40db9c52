"""Builds the emulated library of a kernel: nvcc's PTX, translated to C++, with nvcc's own host code.

    .cu --nvcc--> PTX --translate--> C++ --g++------+
         +------> host code, without libcudart------+--> one library that behaves like the rung's own, on the CPU
    runtime/*.cpp (threads, memory, races, cudart)--+

The host code is that of the objects that the rung's own library was linked from, where they exist.
As in flashladder.build, a library's name is the hash of what it is made from.
"""

from __future__ import annotations

import gc
import hashlib
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashladder import ninja, paths
from flashladder.build import binding_rules, ffi_paths, first_error, source_closure
from flashladder.errors import BuildError
from flashladder.model import OptimizeLevel
from flashladder.toolchain import Nvcc, cpu_has, find_cxx, find_nvcc

HERE = Path(__file__).resolve().parent
RUNTIME = HERE / "runtime"
NVCC_FLAGS = ("-std=c++20", "-O3", "-Ikernel/include")
HOST_FLAGS = ("-Xcompiler=-fPIC", "-cudart=none", "-objtemp", "-lineinfo", "-keep")  # kept: the PTX
RUNTIME_FLAGS = ("-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
KERNEL_FLAGS = (
    *("-std=c++20", "-fPIC", "-ffp-contract=off", "-w"),
    *("-fira-region=one", "-fira-algorithm=priority"),  # a fifth of the compile time; thousands of registers a function
    *(("-march=x86-64-v3",) if cpu_has("avx2", "bmi2", "f16c", "fma") else ()),  # std::fma without a call
)
LINK_FLAGS = ("-shared", "-Wl,-Bsymbolic", "-Wl,--build-id=none")
PROGRAM = HERE / "program.cpp"


@dataclass(frozen=True)
class EmulatedTarget:
    """One emulated library, or, without a binding, a program with its own main()."""

    name: str
    source: Path
    arch: str
    digest: str
    bound: bool
    optimize: OptimizeLevel
    instances: tuple[str, ...]
    """Endings of the kernels to translate, as "fp16_d64"; empty: all."""
    host: tuple[Path, ...] = ()
    """Objects with the host code; empty: it is compiled."""

    @property
    def stem(self) -> str:
        return f"{self.name}-emulated-{self.digest[:16]}"

    @property
    def library(self) -> Path:
        return paths.BUILD / f"{self.stem}.{'so' if self.bound else 'program'}"


@cache
def _runtime_digest() -> str:
    digest = hashlib.sha256("\0".join([find_cxx(), *RUNTIME_FLAGS, *KERNEL_FLAGS, *LINK_FLAGS]).encode())
    translator = [file for file in HERE.rglob("*.py") if file.name not in ("device.py", "library.py")]
    for file in sorted([*RUNTIME.iterdir(), PROGRAM, *translator]):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def emulated_target(
    name: str,
    source: Path,
    min_arch: int,
    *,
    bound: bool = True,
    optimize: OptimizeLevel = "g",
    instances: Collection[str] = (),
    host: Collection[Path] = (),
) -> EmulatedTarget:
    """Hash what the emulated library of `source` is made from. The PTX is that of sm_90a when the kernel needs it.

    `host`: objects of the same host code, which need not be compiled again.
    `optimize` is g++'s level for the translated kernels: at 0 half of the build's time, and several times the run's
    where the kernel's own arithmetic and memory accesses take it, not the runtime's matrix products.
    """
    arch = "90a" if min_arch >= 90 else "80"
    facts = [
        find_nvcc().version,
        *NVCC_FLAGS,
        *HOST_FLAGS,
        arch,
        str(bound),
        optimize,
        *sorted(instances),
        ffi_paths()[0],
        _runtime_digest(),
    ]
    digest = hashlib.sha256("\0".join(facts).encode())
    closure = [*source_closure(source), *(source_closure(paths.KERNEL / "binding" / "binding.cc") if bound else [])]
    for file in closure:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return EmulatedTarget(
        name, source, arch, digest.hexdigest(), bound, optimize, tuple(sorted(instances)), tuple(host)
    )


def _cuda_include(nvcc: Nvcc) -> Path:
    """The toolkit's headers, which the runtime's stand-in for libcudart implements."""
    for root in (nvcc.path.resolve().parents[1], *sorted(Path("/usr/local").glob("cuda*"), reverse=True)):
        if (root / "include" / "cuda_runtime_api.h").exists():
            return root / "include"
    from flashladder.toolchain import wheel_root

    return wheel_root() / "include"


def _include() -> str:
    """The flags that find the headers of the runtime, and the toolkit's."""
    return f"-I{shlex.quote(str(RUNTIME))} -isystem {shlex.quote(str(_cuda_include(find_nvcc())))}"


def _precompiled(header: str, name: str, flags: Sequence[str]) -> tuple[str, list[str]]:
    """Folder of a header compiled with `flags`, which spares each source half a second, and the lines that make it."""
    folder = f"build/header-{_runtime_digest()[:16]}-{name}"
    return folder, [
        f"rule header_{name}",
        f"  command = g++ {' '.join(flags)} {_include()} -x c++-header $in -o $out.part && mv $out.part $out",
        f"build {folder}/{header}.gch: header_{name} {ninja.relative(RUNTIME / header)}",
    ]


def _runtime_lines() -> tuple[list[str], list[str]]:
    """The runtime's objects and the build statements that make them, program.cpp's last."""
    stem = f"build/runtime-{_runtime_digest()[:16]}"
    folder, lines = _precompiled("state.h", "runtime", RUNTIME_FLAGS)
    flags = f"{' '.join(RUNTIME_FLAGS)} -I{folder} {_include()} -include state.h"
    lines += ["rule runtime", f"  command = g++ {flags} -c $in -o $out"]
    objects = []
    for file in [*sorted(RUNTIME.glob("*.cpp")), PROGRAM]:
        objects.append(f"{stem}-{file.stem}.o")
        lines.append(f"build {objects[-1]}: runtime {ninja.relative(file)} | {folder}/state.h.gch")
    return objects, lines


def runtime_objects() -> list[Path]:
    """The runtime compiled, for linking with something else than a translated kernel; raises BuildError."""
    objects, lines = _runtime_lines()
    built = [paths.ROOT / o for o in objects[:-1]]
    if not all(path.exists() for path in built):
        output = ninja.run(lines, "runtime", ninja.silent)
        if not all(path.exists() for path in built):
            raise BuildError(f"the emulator's runtime does not compile: {first_error(output)}")
    return built


def kernel_command(optimize: OptimizeLevel = "0") -> list[str]:
    """g++ with what translated kernels are compiled with; its header is built first where it is missing."""
    folder, lines = _precompiled("translated.h", f"O{optimize}", (*KERNEL_FLAGS, f"-O{optimize}"))
    if not (paths.ROOT / folder / "translated.h.gch").exists():
        ninja.run(lines, "header", ninja.silent)
    return ["g++", *KERNEL_FLAGS, f"-O{optimize}", f"-I{paths.ROOT / folder}", f"-I{RUNTIME}"]


def _skipped(instances: Sequence[str]) -> list[str]:
    """Flags that empty the kernels that are not wanted (kernel/include/launch.cuh)."""
    names = [f"{dtype}_d{head_dim}" for dtype in ("fp16", "bf16") for head_dim in (64, 128)]
    return [f"-DFLASHLADDER_SKIP_{name}" for name in names if instances and name not in instances]


def _lines(targets: Sequence[EmulatedTarget]) -> list[str]:
    nvcc = find_nvcc()
    nvcc_path = shlex.quote(str(nvcc.path)).replace("$", "$$")
    binding, lines = binding_rules("binding-emulated", "-DFLASHLADDER_EMULATED")
    ffi_library = shlex.quote(str(ffi_paths()[2]))
    gencode = "-gencode=arch=compute_$arch,code=compute_$arch"
    python = shlex.quote(sys.executable)
    lines += [
        "rule ptx",
        f"  command = {nvcc_path} {' '.join(NVCC_FLAGS)} -lineinfo -ptx -arch=compute_$arch $skip $in -o $out",
        "rule both",  # with -objtemp what nvcc keeps lies beside the object
        f"  command = rm -rf $stem.kept && mkdir $stem.kept && {nvcc_path} {' '.join([*NVCC_FLAGS, *HOST_FLAGS])} "
        f"{gencode} $skip -c $in -o $stem.kept/host.o && mv $stem.kept/host.o.ptx $stem.ptx && "
        "mv $stem.kept/host.o $stem.host.o && rm -r $stem.kept",
        "rule translate",
        f"  command = {python} -m flashladder.emulator.library $in $out $instances",
        "rule kernel",
        f"  command = g++ {' '.join(KERNEL_FLAGS)} -O$optimize -I$header {_include()} -c $in -o $out",
        "rule link",
        f"  command = g++ {' '.join(LINK_FLAGS)} $in -o $out.part {ffi_library} -ldl && mv $out.part $out",
        "rule link_program",
        "  command = g++ $in -o $out.part -ldl && mv $out.part $out",
    ]
    (*objects, program), runtime = _runtime_lines()
    lines += runtime
    headers = {}
    for level in sorted({t.optimize for t in targets}):
        headers[level], made = _precompiled("translated.h", f"O{level}", (*KERNEL_FLAGS, f"-O{level}"))
        lines += made
    for t in targets:
        stem, source = f"build/{t.stem}", ninja.relative(t.source)
        # The program's object comes last: its findings are printed before the runtime's log is destroyed.
        rule, extra = ("link", binding) if t.bound else ("link_program", program)
        host = [ninja.relative(o) for o in t.host] or [f"{stem}.host.o"]
        ptx = f"{stem}.ptx: ptx" if t.host else f"{stem}.host.o {stem}.ptx: both"
        lines += [
            f"build {ptx} {source}",
            f"  arch = {t.arch}",
            f"  stem = {stem}",
            f"  skip = {' '.join(_skipped(t.instances))}",
            f"build {stem}.cpp: translate {stem}.ptx",
            f"  instances = {' '.join(t.instances)}",
            f"build {stem}.o: kernel {stem}.cpp | {headers[t.optimize]}/translated.h.gch",
            f"  optimize = {t.optimize}",
            f"  header = {headers[t.optimize]}",
            f"build {ninja.relative(t.library)}: {rule} {' '.join(host)} {stem}.o {' '.join(objects)} {extra}",
        ]
    return lines


def build_emulated(targets: Sequence[EmulatedTarget], progress: ninja.Progress = ninja.silent) -> dict[str, str]:
    """Build the emulated libraries that do not exist yet. Returns {name: first error} of those that failed."""
    todo = [t for t in targets if not t.library.exists()]
    if not todo:
        return {}
    output = ninja.run(_lines(todo), "emulated", progress)
    return {t.name: first_error(output) for t in todo if not t.library.exists()}


def main() -> None:
    """The build graph's translate step: PTX file, C++ file, then the instances to translate."""
    from flashladder.emulator.ptx import PtxError
    from flashladder.emulator.translate import translate

    gc.disable()  # a process a file: looking for cycles is a quarter of its time
    source, target = (Path(a) for a in sys.argv[1:3])
    instances = sys.argv[3:]
    try:
        text = translate(source.read_text(), instances)
    except PtxError as error:
        raise SystemExit(f"error: {error}") from error
    target.write_text(text)


def require(target: EmulatedTarget, failures: dict[str, str]) -> Path:
    """The library's path; raises BuildError with the first error when it was not built."""
    if target.name in failures:
        raise BuildError(f"{target.name} cannot be emulated: {failures[target.name]}")
    return target.library


if __name__ == "__main__":
    main()
