"""Makes wrong variants of a rung's source, builds them for the CPU and asks the gate."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from flashladder import check, paths, sass
from flashladder.arms import ArmSpec
from flashladder.arrays import HostMemory
from flashladder.build import INCLUDE, built_objects, source_closure
from flashladder.emulator.device import EmulatedMemory, Emulator, Options, emulated_arm
from flashladder.emulator.library import build_emulated, emulated_target, require
from flashladder.inputs import Case
from flashladder.model import HOPPER, CheckRecord, Rung
from flashladder.toolchain import find_cuda_tool

SEED = 9
SYNCHRONISATION = re.compile(
    r"(?<=[ ])(?:__syncthreads\(\)|__syncwarp\([^;]*\)|[\w:]*(?:fence|barrier|cp_async_wait|mbarrier_wait|wgmma_wait|"
    r"bulk_wait|setmaxnreg|arrive|wait)[\w]*(?:<[^;]*>)?\([^;]*\));",
)
WRAPPERS = {"ptx.cuh", "ptx_hopper.cuh", "tensor_map.cuh", "launch.cuh"}
"""Headers that define synchronisation or have none of the kernels'."""


@dataclass(frozen=True)
class Mutant:
    """A source that differs from a rung's in one place."""

    rung: Rung
    name: str
    source: str
    header: tuple[str, str] | None = None
    """(file name, text) of a changed header, which shadows the project's."""
    redundant: str | None = None
    """The field of Config that does the deleted statement's work too, as a comment behind it says."""


def without_each_synchronisation(rung: Rung) -> Iterator[Mutant]:
    """One mutant for every synchronising statement of the rung or its headers, with that statement empty.

    A test whose answer is kept says yes.
    """
    file = paths.ROOT / rung.source
    source = file.read_text()
    for path in [file, *(f for f in source_closure(file) if f.parent == INCLUDE and f.name not in WRAPPERS)]:
        text = path.read_text()
        for match in SYNCHRONISATION.finditer(text):
            line = text.count("\n", 0, match.end()) + 1
            nothing = "true;" if text.endswith("= ", 0, match.start()) else ";"
            mutated = text[: match.start()] + nothing + text[match.end() :]
            name = f"{rung.id}, {path.name}:{line} without {match.group()}"
            said = re.match(r" *// redundant: (\w+)", text[match.end() :])
            redundant = said.group(1) if said else None
            if path == file:
                yield Mutant(rung, name, mutated, redundant=redundant)
            else:
                yield Mutant(rung, name, source, (path.name, mutated), redundant)


def replaced(rung: Rung, name: str, old: str, new: str, header: str | None = None) -> Mutant:
    """The rung, or one of its headers, with the one occurrence of `old` replaced."""
    source = (paths.ROOT / rung.source).read_text()
    if header is None:
        assert source.count(old) == 1, f"{rung.source} has {source.count(old)} times {old!r}"
        return Mutant(rung, name, source.replace(old, new))
    text = (paths.KERNEL / "include" / header).read_text()
    assert text.count(old) == 1, f"{header} has {text.count(old)} times {old!r}"
    return Mutant(rung, name, source, (header, text.replace(old, new)))


@cache
def _problems(case: Case) -> tuple[check.Problem, ...]:
    return check.pose(case, HostMemory(), SEED)


def build(mutants: Sequence[Mutant], folder: Path) -> list[Path]:
    """The emulated libraries of the mutants, for fp16 and head_dim 64; raises BuildError when one does not compile."""
    targets = []
    for number, mutant in enumerate(mutants):
        directory = folder / str(number)
        directory.mkdir(parents=True)
        headers = {file.name: file.read_text() for file in INCLUDE.iterdir()}
        for name, text in [*headers.items(), *([mutant.header] if mutant.header else [])]:
            (directory / name).write_text(text)
        (directory / "mutant.cu").write_text(mutant.source)
        targets.append(
            emulated_target(
                f"mutant-{mutant.rung.id}",
                directory / "mutant.cu",
                mutant.rung.min_arch,
                optimize="0",
                instances=["fp16_d64"],
                host=built_objects(mutant.rung),
            )
        )
    failures = build_emulated(targets)
    return [require(target, failures) for target in targets]


def refused_by_ptxas(library: Path, rung: Rung) -> bool:
    """Whether ptxas gives one of the warnings that fail a build for the mutant that a library was made from.

    It follows the accumulators of wgmma, whose values the emulator has at once.
    """
    arch = "sm_90a" if rung.min_arch >= HOPPER else "sm_80"
    ptxas = find_cuda_tool("ptxas")
    assert ptxas is not None
    said = subprocess.run(
        [ptxas, "-v", f"-arch={arch}", "-o", "/dev/null", library.with_suffix(".ptx")], capture_output=True, text=True
    )
    return any(warning in said.stdout + said.stderr for warning in sass.FORBIDDEN_WARNINGS)


def code(library: Path) -> str:
    """The PTX that a library was made from, without the debug information that names its source."""
    lines = library.with_suffix(".ptx").read_text().splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith((".file", ".b8")))


def noticed(library: Path, cases: Sequence[Case], options: Sequence[Options]) -> CheckRecord | None:
    """The first record of a case that fails; None when every case passes under all options.

    In a child, which a broken kernel may take with it, and whose memory maps a deadlocked one leaves behind.
    """
    with get_context("fork").Pool(1) as pool:
        return pool.apply(_first_failure, (library, cases, options))


def _first_failure(library: Path, cases: Sequence[Case], options: Sequence[Options]) -> CheckRecord | None:
    arm = emulated_arm(ArmSpec(name="mutant", kind="rung", library=str(library), sha256=None))
    emulator = Emulator(library)
    for option in options:
        memory = EmulatedMemory(emulator, option)
        for case in cases:
            record = check.check_case(arm, case, memory, SEED, _problems(case))
            if record.status not in ("pass", "unsupported"):
                return record
    return None
