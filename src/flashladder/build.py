"""Compiles rungs into one shared library each, and records what the compiler made of them.

A library's name carries the hash of everything it is made from: its source, the headers that source reaches, the
binding, flags, compiler versions and architectures. So a library that exists is current, and nothing stale can load.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from flashladder import ninja, paths, sass
from flashladder.errors import BuildError, DriftError
from flashladder.model import UNDECODABLE, BuildRecord, KernelResources, Rung
from flashladder.ninja import Progress, silent
from flashladder.rundir import sha256_of
from flashladder.toolchain import Nvcc, find_cuda_tool, find_cxx, find_nvcc

ALL_ARCHS = ("sm_80", "sm_89", "sm_90a")
NVCC_FLAGS = ("-std=c++20", "-O3", "-Xcompiler=-fPIC", "-Xptxas=-v", "-objtemp", "--threads=1")
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--build-id=none", "-Xlinker=--exclude-libs=ALL")
BINDING_COMMAND = (
    "g++ -std=c++20 -O2 -fPIC -fvisibility=hidden -Ikernel/include -isystem {ffi} -ffile-prefix-map={ffi}=tvm_ffi"
)
"""{ffi}: the headers of apache-tvm-ffi, whose place must not enter the object (they use __FILE__)."""
PARTS = ("fp16", "bf16")
"""The objects of a source that defines FLASHLADDER_IN_PARTS (kernel/include/launch.cuh)."""
BINDING = paths.KERNEL / "binding" / "binding.cc"
INCLUDE = paths.KERNEL / "include"


@dataclass(frozen=True)
class Target:
    """One library to build: where it will be and what it is made from."""

    rung_id: str
    source: Path
    archs: tuple[str, ...]
    digest: str
    parts: tuple[str, ...] = ()
    """Of a source that is compiled into several objects at once."""

    @property
    def stem(self) -> str:
        return f"{self.rung_id}-{self.digest[:16]}"

    @property
    def library(self) -> Path:
        return paths.BUILD / f"{self.stem}.so"

    @property
    def objects(self) -> tuple[str, ...]:
        """Names of its objects, without their suffix."""
        return tuple(f"{self.stem}-{part}" for part in self.parts) or (self.stem,)

    @property
    def log(self) -> str:
        """What the compiler said."""
        logs = [paths.BUILD / f"{name}.log" for name in self.objects]
        return "".join(log.read_text() for log in logs if log.exists())

    @property
    def record(self) -> Path:
        return paths.BUILD / f"{self.stem}.json"


def source_closure(source: Path) -> list[Path]:
    """`source` and every project header it includes, directly or not, in a fixed order.

    Raises BuildError when a quoted include does not exist.
    """
    found: dict[Path, None] = {}
    todo = [source]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        if not file.exists():
            raise BuildError(f"{file} does not exist; check the source or the #include that names it")
        found[file] = None
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.MULTILINE):
            beside = file.parent / name
            todo.append(beside if beside.exists() else INCLUDE / name)
    return sorted(found)


@cache
def ffi_paths() -> tuple[str, Path, Path]:
    """apache-tvm-ffi: version, headers, library."""
    import tvm_ffi
    from tvm_ffi import libinfo

    return tvm_ffi.__version__, Path(libinfo.find_include_path()), Path(libinfo.find_libtvm_ffi())


def gencode(archs: Sequence[str]) -> list[str]:
    """nvcc's -gencode flags: a cubin for each sm_NN, PTX for each compute_NN.

    sm_86 and sm_89 share sm_80's PTX: rungs use nothing newer.
    """
    return [f"-gencode=arch={virtual_arch(arch)},code={arch}" for arch in archs]


def virtual_arch(arch: str) -> str:
    """The compute_NN whose PTX becomes the machine code of `arch`."""
    return "compute_80" if arch in ("sm_86", "sm_89") else arch.replace("sm", "compute")


def target(rung_id: str, source: Path, archs: Sequence[str]) -> Target:
    """Hash what a library of `source` for `archs` is made from."""
    nvcc = find_nvcc()
    digest = hashlib.sha256()
    facts = [nvcc.version, find_cxx(), ffi_paths()[0], *NVCC_FLAGS, BINDING_COMMAND, *LINK_FLAGS, *gencode(archs)]
    digest.update("\0".join(facts).encode())
    for file in [*source_closure(source), *source_closure(BINDING)]:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    in_parts = re.search(r"^#define FLASHLADDER_IN_PARTS\b", source.read_text(), re.MULTILINE)
    return Target(rung_id, source, tuple(archs), digest.hexdigest(), PARTS if in_parts else ())


def binding_rules(name: str, flags: str = "") -> tuple[str, list[str]]:
    """Object file of the binding, and the ninja lines that make it; `name` tells variants apart, `flags` are theirs."""
    version, ffi_include, _ = ffi_paths()
    digest = hashlib.sha256(b"".join(f.read_bytes() for f in source_closure(BINDING)))
    digest.update("\0".join([version, find_cxx(), BINDING_COMMAND, flags]).encode())
    output = f"build/{name}-{digest.hexdigest()[:16]}.o"
    command = BINDING_COMMAND.format(ffi=shlex.quote(str(ffi_include)))
    return output, [
        "rule binding",
        f"  command = {command} {flags} -c $in -o $out",
        f"build {output}: binding {ninja.relative(BINDING)}",
    ]


def ninja_lines(targets: Sequence[Target], nvcc: Nvcc) -> list[str]:
    """The build graph of the libraries, relative to a root that holds kernel/ and build/."""
    binding, lines = binding_rules("binding")
    ffi_library = shlex.quote(str(ffi_paths()[2]))
    nvcc_path = shlex.quote(str(nvcc.path)).replace("$", "$$")
    link_dirs = " ".join(f"-L{shlex.quote(str(d))}" for d in nvcc.library_dirs)
    lines += [
        *_nvcc_rule(nvcc, "-c"),
        "rule link",
        f"  command = {nvcc_path} {' '.join(LINK_FLAGS)} {link_dirs} $in -o $out.part {ffi_library} "
        "&& mv $out.part $out",
    ]
    for t in targets:
        lines += _object_lines(t, "o")
        objects = " ".join(f"build/{name}.o" for name in t.objects)
        lines.append(f"build build/{t.stem}.so: link {objects} {binding}")
    return lines


def device_lines(targets: Sequence[Target], nvcc: Nvcc) -> list[str]:
    """The build graph of the machine code alone, a .fatbin an object: the host's part costs a quarter of the time."""
    return [*_nvcc_rule(nvcc, "-fatbin"), *(line for t in targets for line in _object_lines(t, "fatbin"))]


def _nvcc_rule(nvcc: Nvcc, phase: str) -> list[str]:
    nvcc_path = shlex.quote(str(nvcc.path)).replace("$", "$$")
    return [
        "rule nvcc",
        f"  command = {nvcc_path} {' '.join(NVCC_FLAGS)} $gencode $part -Ikernel/include {phase} $in -o $out "
        "> $log 2>&1 || { cat $log; exit 1; }",
    ]


def _object_lines(t: Target, suffix: str) -> list[str]:
    lines = []
    for name, part in zip(t.objects, t.parts or (None,), strict=True):
        lines += [
            f"build build/{name}.{suffix}: nvcc {ninja.relative(t.source)}",
            f"  gencode = {' '.join(gencode(t.archs))}",
            f"  part = {f'-DFLASHLADDER_PART_{part}' if part else ''}",
            f"  log = build/{name}.log",
        ]
    return lines


def compile_targets(targets: Sequence[Target], progress: Progress = silent) -> dict[str, str]:
    """Build the libraries that do not exist yet, in parallel. Returns {rung id: compiler output} of the failed ones."""
    todo = [t for t in targets if not t.library.exists()]
    if not todo:
        return {}
    # The last rungs have the most kernels: begun last, they would be waited for alone.
    output = ninja.run(ninja_lines(todo[::-1], find_nvcc()), "build", progress)
    failed = {}
    for t in todo:
        if not t.library.exists():
            failed[t.rung_id] = t.log if "error" in t.log else output
    return failed


def built_objects(rung: Rung) -> tuple[Path, ...]:
    """The objects of a library of the rung for some architectures, where one was built; else none."""
    for archs in (ALL_ARCHS, *([arch] for arch in ALL_ARCHS)):
        for t in targets([rung], archs):
            objects = tuple(paths.BUILD / f"{name}.o" for name in t.objects)
            if all(o.exists() for o in objects):
                return objects
    return ()


def first_error(output: str) -> str:
    for line in output.splitlines():
        if "error" in line.lower():
            return line.strip()
    return output.strip().splitlines()[-1] if output.strip() else "the compiler said nothing"


def _measure(t: Target) -> BuildRecord:
    """Resources and SASS of a built library; cached beside it, since the library's name is its content."""
    if t.record.exists():
        with contextlib.suppress(*UNDECODABLE):  # one that was cut off is made again
            return msgspec.json.decode(t.record.read_bytes(), type=BuildRecord)
    from flashladder import native

    log = t.log
    if bad := [w for w in sass.FORBIDDEN_WARNINGS if w in log]:
        return _failed(t, f"ptxas warned {', '.join(bad)}: {_line_with(log, bad[0])}")
    cubins, listings = _disassemble(t)
    histograms = {
        (kernel, arch): histogram
        for arch, listing in listings.items()
        for kernel, histogram in sass.parse_sass(listing).items()
    }
    library = native.load(t.library)
    kernels = tuple(
        KernelResources(
            arch=arch,
            kernel=kernel,
            registers=usage.registers,
            spill_store_bytes=usage.spill_store_bytes,
            spill_load_bytes=usage.spill_load_bytes,
            stack_bytes=usage.stack_bytes,
            shared_bytes=usage.shared_bytes + library.dynamic_shared.get(kernel, 0),
            sass=histograms.get((kernel, arch), {}),
        )
        for (kernel, arch), usage in sorted(sass.parse_ptxas(log).items())
    )
    record = BuildRecord(
        rung=t.rung_id,
        status="built",
        sha256=sha256_of(t.library),
        cubins=cubins,
        compiler=f"nvcc {find_nvcc().version}",
        flags=NVCC_FLAGS,
        archs=t.archs,
        config=library.config,
        kernels=kernels,
    )
    t.record.write_bytes(msgspec.json.encode(record))
    return record


def _disassemble(t: Target) -> tuple[dict[str, str], dict[str, str]]:
    """By architecture the machine code's SHA-256, and its text; none where the tools are missing."""
    cuobjdump, nvdisasm = find_cuda_tool("cuobjdump"), find_cuda_tool("nvdisasm")
    sums: dict[str, str] = {}
    listings: dict[str, str] = {}
    if cuobjdump is None or nvdisasm is None:
        return sums, listings
    with tempfile.TemporaryDirectory() as folder:
        for arch, cubins in extract_cubins(cuobjdump, t.library, t.archs, Path(folder)).items():
            sums[arch] = cubins_sum(cubins)
            command = [str(nvdisasm), "-c", "-ndf"]  # "ndf": branch targets cost as much again
            listings[arch] = "".join(
                subprocess.run([*command, str(cubin)], capture_output=True, text=True).stdout for cubin in cubins
            )
    return sums, listings


def extract_cubins(cuobjdump: Path, file: Path, archs: Sequence[str], folder: Path) -> dict[str, list[Path]]:
    """Unpack into `folder` the cubins of a library or .fatbin: by architecture, those of its objects in their order."""
    subprocess.run([cuobjdump, "-xelf", "all", file], cwd=folder, capture_output=True)
    found = {arch: sorted(folder.glob(f"{file.stem}.*.{arch}.cubin")) for arch in archs}
    return {arch: cubins for arch, cubins in found.items() if cubins}


def cubins_sum(cubins: Sequence[Path]) -> str:
    """SHA-256 of one architecture's machine code, the cubins of a rung's objects one after the other."""
    return hashlib.sha256(b"".join(cubin.read_bytes() for cubin in cubins)).hexdigest()


def _line_with(text: str, part: str) -> str:
    return next((line.strip() for line in text.splitlines() if part in line), part)


def _failed(t: Target, reason: str) -> BuildRecord:
    return BuildRecord(
        rung=t.rung_id,
        status="failed",
        reason=reason,
        compiler=f"nvcc {find_nvcc().version}",
        flags=NVCC_FLAGS,
        archs=t.archs,
    )


def targets(rungs: Sequence[Rung], archs: Sequence[str]) -> list[Target]:
    """The libraries of the rungs for those of `archs` that they support; none of a rung that supports none."""
    supported = [(r, [a for a in archs if r.runs_on(a)]) for r in rungs]
    return [target(r.id, paths.ROOT / r.source, on) for r, on in supported if on]


def build(rungs: Sequence[Rung], archs: Sequence[str], progress: Progress = silent) -> list[tuple[Target, BuildRecord]]:
    """Build every rung for `archs` that it supports; a rung that fails is a record, not an exception."""
    jobs = targets(rungs, archs)
    failures = compile_targets(jobs, progress)

    def record(t: Target) -> tuple[Target, BuildRecord]:
        failed = failures.get(t.rung_id)
        return t, _measure(t) if failed is None else _failed(t, first_error(failed))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # nvdisasm takes seconds a library
        return list(pool.map(record, jobs))


# --- static checks --------------------------------------------------------------------------------------------------


def static_faults(rungs: Sequence[Rung], records: Sequence[BuildRecord]) -> list[str]:
    """What the machine code or a configuration contradicts: missing opcodes, more or other than the declared change."""
    by_id = {r.rung: r for r in records}
    faults = []
    for rung in rungs:
        record = by_id.get(rung.id)
        if record is None or record.status != "built":
            continue
        for kernel in record.kernels:
            if "_combine_" in kernel.kernel:  # joins parts of split keys: no products, no tiles
                continue
            is_smaller = "_medium_" in kernel.kernel or "_small_" in kernel.kernel
            opcodes = rung.smaller_sass if is_smaller and rung.smaller_sass is not None else rung.sass
            if kernel.sass and (missing := sass.missing_opcodes(opcodes, kernel.sass)):
                faults.append(f"{kernel.kernel} on {kernel.arch}: no {', '.join(missing)} in its machine code")
        parent = by_id.get(rung.parent or "")
        if parent is not None and parent.status == "built":
            changed = changed_fields(parent.config, record.config)
            declared = {*rung.changes, *rung.forced}
            if changed != declared:
                faults.append(
                    f"{rung.id}: its Config differs from {rung.parent}'s in {sorted(changed)}, "
                    f"its declaration says {sorted(declared)}"
                )
    return faults


def changed_fields(parent: dict[str, int], child: dict[str, int]) -> set[str]:
    """Names of the configuration fields that differ; tile_m and tile_n are one field, `tile`."""
    names = {name for name in parent.keys() | child.keys() if parent.get(name) != child.get(name)}
    return {"tile" if name.startswith("tile_") else name for name in names}


def lock_path(compiler: str) -> Path:
    return paths.KERNEL / "resources" / f"{compiler.replace(' ', '-')}.json"


def _lock_content(records: Sequence[BuildRecord]) -> dict[str, dict[str, object]]:
    return {
        f"{k.kernel} {k.arch}": msgspec.to_builtins(k)
        for r in records
        for k in sorted(r.kernels, key=lambda k: (k.kernel, k.arch))
    }


def write_lock(records: Sequence[BuildRecord], declared: Collection[str]) -> Path:
    """Record the resources of the rungs' kernels, one line a kernel, for the compiler that built them.

    What the lock holds of other rungs, or of these for other architectures, stays where they are `declared`.
    """
    file = lock_path(records[0].compiler)
    file.parent.mkdir(exist_ok=True)
    old = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    kept = tuple(f"{rung}_" for rung in declared)
    replaced = {(r.rung, arch) for r in records for arch in r.archs}
    content = {
        key: value
        for key, value in old.items()
        if key.startswith(kept)
        and not any(key.startswith(f"{rung}_") and key.endswith(f" {a}") for rung, a in replaced)
    } | _lock_content(records)
    rows = [f'"{k}": {msgspec.json.encode(v).decode()}' for k, v in sorted(content.items())]
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return file


def check_lock(records: Sequence[BuildRecord]) -> str:
    """Compare with the lock of this compiler; says what was compared.

    Raises DriftError on any difference. A compiler or an architecture that no lock holds is not an error: its resources
    are its own.
    """
    file = lock_path(records[0].compiler)
    if not file.exists():
        return f"no resource lock for {records[0].compiler}: nothing to compare with"
    locked = msgspec.json.decode(file.read_bytes())
    drifted = []
    archs = {key.split()[1] for key in locked}
    everything = _lock_content(records)
    content = {key: now for key, now in everything.items() if key.split()[1] in archs}
    others = sorted({key.split()[1] for key in everything.keys() - content.keys()})
    for key, now in content.items():
        before = locked.get(key)
        if before != now:
            fields = [f for f in now if not before or before.get(f) != now[f]]
            detail = ", ".join(f"{f} {before[f] if before else 'none'} -> {now[f]}" for f in fields if f != "sass")
            drifted.append(f"{key}: {detail or 'SASS histogram differs'}")
    if drifted:
        raise DriftError(
            f"{len(drifted)} kernels drifted from {file.name}: {'; '.join(drifted[:3])}; "
            "if intended, run 'flashladder build --update-lock'"
        )
    beside = f", which has none for {', '.join(others)}" if others else ""
    return f"{len(content)} kernels match the resource lock of {records[0].compiler}{beside}"
