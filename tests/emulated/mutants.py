"""Makes wrong variants of a rung's source, builds them for the CPU and asks the gate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashladder import check, paths
from flashladder.arms import ArmSpec
from flashladder.arrays import HostMemory
from flashladder.emulator.device import EmulatedArm, EmulatedMemory, Emulator, Options
from flashladder.emulator.library import build_emulated, emulated_target, require
from flashladder.inputs import Case
from flashladder.model import CheckRecord, Rung

SEED = 9
SYNCHRONISATION = re.compile(
    r"^[ ]*(?:__syncthreads\(\)|__syncwarp\([^;]*\)|[\w:]*(?:fence|barrier|cp_async_wait|mbarrier_wait|wgmma_wait|"
    r"bulk_wait|setmaxnreg|arrive|wait)[\w]*\([^;]*\));.*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Mutant:
    """A source that differs from a rung's in one place."""

    rung: Rung
    name: str
    source: str
    header: tuple[str, str] | None = None
    """(file name, text) of a changed header, which shadows the project's."""


def without_each_synchronisation(rung: Rung) -> Iterator[Mutant]:
    """One mutant for every synchronising statement of the rung, with that statement removed."""
    source = (paths.ROOT / rung.source).read_text()
    for match in SYNCHRONISATION.finditer(source):
        line = source.count("\n", 0, match.end()) + 1
        statement = match.group().strip().split(";")[0]
        mutated = source[: match.start()] + source[match.end() :]
        yield Mutant(rung, f"{rung.id}:{line} without {statement}", mutated)


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


def _one_kernel(launch: str) -> str:
    """launch.cuh with the instance for fp16 and head_dim 64 alone: a quarter of the build."""
    lines = [line for line in launch.splitlines(True) if not re.search(r"KERNEL\(ID##_(?!fp16_d64)", line)]
    return re.sub("ID##_(fp16_d128|bf16_d64|bf16_d128)", "ID##_fp16_d64", "".join(lines))


def build(mutants: Sequence[Mutant], folder: Path) -> list[Path]:
    """The emulated libraries of the mutants, for fp16 and head_dim 64; raises BuildError when one does not compile."""
    targets = []
    for number, mutant in enumerate(mutants):
        directory = folder / str(number)
        directory.mkdir(parents=True)
        (directory / "mutant.cu").write_text(mutant.source)
        (directory / "launch.cuh").write_text(_one_kernel((paths.KERNEL / "include" / "launch.cuh").read_text()))
        if mutant.header:
            (directory / mutant.header[0]).write_text(mutant.header[1])
        targets.append(
            emulated_target(
                f"mutant-{mutant.rung.id}",
                directory / "mutant.cu",
                mutant.rung.min_arch,
                optimize=0,
                instances=["fp16_d64"],
            )
        )
    failures = build_emulated(targets)
    return [require(target, failures) for target in targets]


def noticed(library: Path, cases: Sequence[Case], options: Sequence[Options]) -> CheckRecord | None:
    """The first record of a case that fails; None when every case passes under all options."""
    arm = EmulatedArm(ArmSpec(name="mutant", kind="rung", library=str(library), sha256=None))
    emulator = Emulator(library)
    for option in options:
        memory = EmulatedMemory(emulator, option)
        for case in cases:
            record = check.check_case(arm, case, memory, SEED, _problems(case))
            if record.status not in ("pass", "unsupported"):
                return record
    return None
