"""Same bits: compiles the rungs anew in an empty folder and compares the SHA-256 of what comes out.

The sums to compare with are the repository's for a compiler (kernel/resources/) or those that a run recorded.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flashladder import build as building
from flashladder import ninja, paths
from flashladder.errors import BuildError, DriftError, EnvironmentInvalidError, FlashladderError
from flashladder.ladder import Ladder
from flashladder.model import UNDECODABLE, BuildRecord, CompilerSums, Rung, RungSums
from flashladder.ninja import Progress, silent
from flashladder.rundir import RunDir, sha256_of
from flashladder.toolchain import Nvcc, find_cuda_tool, find_cxx, find_nvcc, find_nvccs

ABOUT = (
    "SHA-256 by rung: `cubins` by architecture (kernels of several objects one after the other), which depend on the "
    "sources, the compiler and its flags alone; `library`, for these architectures, also on `host` and the C library's "
    "headers and start files. Written by 'flashladder build --update-lock', compared by 'flashladder verify'."
)


def sums_path(compiler: str) -> Path:
    return paths.KERNEL / "resources" / f"{compiler.replace(' ', '-')}.sums.json"


def read_sums(compiler: str) -> CompilerSums | None:
    """The repository's sums for `compiler` (as "nvcc 13.0.88"); None where it has none."""
    file = sums_path(compiler)
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=CompilerSums)
    except UNDECODABLE as error:
        raise FlashladderError(f"{file}: no valid sums: {error}; restore it from git") from error


def host() -> tuple[str, ...]:
    """What a library is made with besides nvcc, each with its version."""
    linker = subprocess.run(["ld", "--version"], capture_output=True, text=True).stdout
    return find_cxx(), (linker.splitlines() or ["ld unknown"])[0], f"apache-tvm-ffi {building.ffi_paths()[0]}"


def write_sums(found: Mapping[str, RungSums], compiler: str, declared: Collection[str]) -> Path:
    """Record sums of rungs for `compiler`, one line a rung; those of other rungs stay where they are `declared`.

    A rung's machine code for other architectures stays too, without a library: that of `found` has not all of it. The
    libraries' of another host go: one file holds those of one host.
    """
    old = read_sums(compiler)
    rungs = {} if old is None else {rung: sums for rung, sums in old.rungs.items() if rung in declared}
    if old is not None and old.host != host():
        rungs = {rung: RungSums(cubins=sums.cubins) for rung, sums in rungs.items()}
    for rung, sums in found.items():
        before = rungs[rung].cubins if rung in rungs else {}
        others = before.keys() - sums.cubins.keys()
        rungs[rung] = RungSums(cubins=before | sums.cubins, library=None if others else sums.library)
    head = {"about": ABOUT, "compiler": compiler, "host": list(host())}
    rows = [f"{msgspec.json.encode(k).decode()}: {msgspec.json.encode(v).decode()}" for k, v in head.items()]
    lines = [f'"{rung}": {msgspec.json.encode(sums).decode()}' for rung, sums in sorted(rungs.items())]
    file = sums_path(compiler)
    file.parent.mkdir(exist_ok=True)
    file.write_text("{\n" + ",\n".join(rows) + ',\n"rungs": {\n' + ",\n".join(lines) + "\n}}\n")
    return file


def sums_of(records: Sequence[BuildRecord]) -> dict[str, RungSums]:
    """Of the records that hold them: of a run's, or of the build's."""
    return {r.rung: RungSums(cubins=r.cubins, library=r.sha256) for r in records if r.cubins}


# --- rebuilding -----------------------------------------------------------------------------------------------------


def rebuild(
    rungs: Sequence[tuple[Rung, Sequence[str]]], nvcc: Nvcc, *, libraries: bool = False, progress: Progress = silent
) -> dict[str, RungSums]:
    """Compile each rung for its architectures in a new folder, from a copy of kernel/; whole libraries if asked for.

    Raises BuildError when one does not compile.
    """
    targets = [building.target(rung.id, paths.ROOT / rung.source, archs) for rung, archs in rungs]
    lines = building.ninja_lines if libraries else building.device_lines
    with tempfile.TemporaryDirectory(prefix="flashladder-verify-") as name:
        root = Path(name)
        shutil.copytree(paths.KERNEL, root / "kernel")
        said = ninja.run(lines(targets[::-1], nvcc), "verify", progress, root)
        with ThreadPoolExecutor() as pool:
            sums = list(pool.map(lambda t: _sums(t, root / "build", nvcc, libraries, said), targets))
    return {t.rung_id: found for t, found in zip(targets, sums, strict=True)}


def _sums(t: building.Target, folder: Path, nvcc: Nvcc, libraries: bool, said: str) -> RungSums:
    library = folder / f"{t.stem}.so"
    files = [library] if libraries else [folder / f"{name}.fatbin" for name in t.objects]
    if not all(file.exists() for file in files):
        raise BuildError(f"{t.rung_id}: {building.first_error(said)}")
    unpacked = folder / t.rung_id
    unpacked.mkdir()
    cubins: dict[str, list[Path]] = {}
    for file in files:
        for arch, more in building.extract_cubins(_cuobjdump(nvcc), file, t.archs, unpacked).items():
            cubins.setdefault(arch, []).extend(more)
    return RungSums(
        cubins={arch: building.cubins_sum(files) for arch, files in cubins.items()},
        library=sha256_of(library) if libraries else None,
    )


def _cuobjdump(nvcc: Nvcc) -> Path:
    beside = nvcc.path.parent / "cuobjdump"
    found = beside if beside.exists() else find_cuda_tool("cuobjdump")
    if found is None:
        raise EnvironmentInvalidError("cuobjdump is missing, it unpacks what is compared; run 'uv sync'")
    return found


# --- comparing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """CompilerSums to compare with, and whose they are."""

    name: str
    compiler: str
    rungs: dict[str, RungSums]
    host: tuple[str, ...] = ()


def repository() -> tuple[Reference, Nvcc, str]:
    """The repository's sums, the compiler here that they are of, and what to say of the choice.

    Raises EnvironmentInvalidError when there are none for any compiler here.
    """
    nvccs = find_nvccs()
    first = find_nvcc()
    for nvcc in nvccs:
        compiler = f"nvcc {nvcc.version}"
        if (sums := read_sums(compiler)) is not None:
            other = "" if nvcc == first else f"no sums for nvcc {first.version}, which builds here; "
            reference = Reference(sums_path(compiler).name, compiler, sums.rungs, sums.host)
            return reference, nvcc, f"{other}compiling with {compiler} at {nvcc.path}"
    known = ", ".join(sorted(p.name.removesuffix(".sums.json") for p in sums_path("x").parent.glob("*.sums.json")))
    here = ", ".join(nvcc.version for nvcc in nvccs)
    raise EnvironmentInvalidError(
        f"no sums for nvcc {here}: nothing to compare with; known: {known or 'none'}; 'uv sync' installs nvcc 13.0.88"
    )


def recorded(run: RunDir) -> tuple[Reference, Nvcc, str]:
    """What a run measured, and the compiler here that built it.

    Raises FlashladderError when the run records no cubins, EnvironmentInvalidError when its compiler is not here.
    """
    records = [r for r in run.builds() if r.cubins]
    if not records:
        raise FlashladderError(f"run {run.info.id} records no sums of its cubins; expected one that was made with them")
    compiler = records[-1].compiler
    for nvcc in find_nvccs():
        if f"nvcc {nvcc.version}" == compiler:
            sums = {r.rung: RungSums(cubins=r.cubins) for r in records if r.compiler == compiler}
            return Reference(f"run {run.info.id}", compiler, sums), nvcc, f"compiling with {compiler} at {nvcc.path}"
    raise EnvironmentInvalidError(f"run {run.info.id} was built by {compiler}, which is not here; set CUDA_HOME to it")


def choose(reference: Reference, rungs: Sequence[Rung], *, missing_is_error: bool) -> list[tuple[Rung, list[str]]]:
    """The rungs to rebuild with their architectures: those that the reference holds.

    Raises FlashladderError when it lacks one and that is an error, or holds none of them.
    """
    missing = [rung.id for rung in rungs if rung.id not in reference.rungs]
    if missing and (missing_is_error or len(missing) == len(rungs)):
        raise FlashladderError(
            f"no sums of {', '.join(missing)} in {reference.name}; write them with 'flashladder build --update-lock', "
            "or name others with --rung"
        )
    return [(rung, list(reference.rungs[rung.id].cubins)) for rung in rungs if rung.id in reference.rungs]


def undeclared(reference: Reference, ladder: Ladder) -> list[str]:
    """What the reference holds and no declaration names any more."""
    return sorted(reference.rungs.keys() - {rung.id for rung in (*ladder.rungs, *ladder.variants)})


def other_host(reference: Reference) -> str | None:
    """What to say where libraries cannot be compared; None where they can."""
    if not reference.host:
        return f"{reference.name} has no sums of libraries for another host: comparing cubins alone"
    if reference.host != host():
        theirs, ours = "; ".join(reference.host), "; ".join(host())
        return f"libraries of {reference.name} were made with {theirs}; here are {ours}: comparing cubins alone"
    return None


def differences(reference: Reference, found: Mapping[str, RungSums]) -> list[str]:
    """A line for each cubin, and each library that both have, whose sum differs."""
    lines = []
    for rung, sums in found.items():
        expected = reference.rungs[rung]
        for arch, wanted in expected.cubins.items():
            if sums.cubins.get(arch) != wanted:
                lines.append(f"{rung} {arch}: {_short(wanted)} expected, {_short(sums.cubins.get(arch))} built")
        if sums.library is not None and expected.library not in (None, sums.library):
            lines.append(f"{rung} library: {_short(expected.library)} expected, {_short(sums.library)} built")
    return lines


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else sha256[:16]


def compare(reference: Reference, found: Mapping[str, RungSums]) -> str:
    """Say what is the same. Raises DriftError that names every rung and architecture that differs."""
    if lines := differences(reference, found):
        raise DriftError(f"{len(lines)} differ from {reference.name}:\n" + "\n".join(f"  {line}" for line in lines))
    cubins = sum(len(reference.rungs[rung].cubins) for rung in found)
    archs = sorted({arch for rung in found for arch in reference.rungs[rung].cubins})
    libraries = sum(s.library is not None and reference.rungs[r].library is not None for r, s in found.items())
    also = f" and {libraries} libraries" if libraries else ""
    return f"{cubins} cubins of {len(found)} rungs for {', '.join(archs)}{also} are those of {reference.name}"


def measured_by(run: RunDir, compiler: str, found: Mapping[str, RungSums]) -> str:
    """Whether a recorded run measured what was built here, as far as both have a rung and an architecture."""
    same: list[str] = []
    other: list[str] = []
    for record in run.builds():
        here = found.get(record.rung)
        archs = [] if here is None or record.compiler != compiler else sorted(here.cubins.keys() & record.cubins.keys())
        if here is not None and archs:
            is_same = all(here.cubins[arch] == record.cubins[arch] for arch in archs)
            (same if is_same else other).append(record.rung)
    if not same and not other:
        return f"run {run.info.id} holds none of these cubins"
    gpu = run.info.machine.gpu
    differ = f"; other bytes: {', '.join(other)}" if other else ""
    return f"run {run.info.id} ({gpu}) measured these bytes of {len(same)} of {len(same) + len(other)} rungs{differ}"
