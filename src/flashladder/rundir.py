"""The only reader and writer of run directories (experiments/results/GPU/RUN/).

Records are JSON lines: one record a line, appended and closed, so an interrupted run loses at most the record in
progress. When they reach the disk is left to the system: waiting for it can take longer than a check. Later records of
the same key replace earlier ones.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from flashladder import paths
from flashladder.errors import FlashladderError
from flashladder.model import (
    UNDECODABLE,
    Agreement,
    BuildRecord,
    CellTiming,
    CheckRecord,
    Diagnosis,
    EagerTiming,
    NcuRecord,
    PlanChoice,
    Roof,
    RunInfo,
    Sums,
    ValueTiming,
)

T = TypeVar("T")

STAGES: dict[str, object] = {
    "build": BuildRecord,
    "check": CheckRecord,
    "agreement": Agreement,
    "roof": Roof,
    "timing": CellTiming,
    "values": ValueTiming,
    "eager": EagerTiming,
    "plan": PlanChoice,
    "ncu": NcuRecord,
    "diagnosis": Diagnosis,
}


INFO = "run.json"
SUMS = "sums.json"
EMULATED = "cpu"
"""Where the results of runs on the emulator lie, in place of a GPU: they are repeated, not kept."""


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def info(self) -> RunInfo:
        return _decode(self.path / INFO, (self.path / INFO).read_bytes(), RunInfo)

    def write_info(self, info: RunInfo) -> None:
        self._write(self.path / INFO, _indented(info))

    def _file(self, stage: str) -> Path:
        return self.path / f"{stage}.jsonl"

    def _read(self, stage: str, record: type[T]) -> list[T]:
        file = self._file(stage)
        if not file.exists():
            return []
        lines = file.read_bytes().split(b"\n")
        complete = lines[:-1]  # what follows the last newline is a record cut off by an interrupt
        return [_decode(file, line, record, number) for number, line in enumerate(complete, 1) if line]

    def builds(self) -> list[BuildRecord]:
        return list({r.rung: r for r in self._read("build", BuildRecord)}.values())

    def checks(self) -> list[CheckRecord]:
        return list({(r.arm, r.case): r for r in self._read("check", CheckRecord)}.values())

    def agreements(self) -> list[Agreement]:
        return list({(r.arm, r.case): r for r in self._read("agreement", Agreement)}.values())

    def roofs(self) -> list[Roof]:
        return list({r.dtype: r for r in self._read("roof", Roof)}.values())

    def timings(self) -> list[CellTiming]:
        return list({r.cell.id: r for r in self._read("timing", CellTiming)}.values())

    def values(self) -> list[ValueTiming]:
        return list({(r.arm, r.cell, r.values): r for r in self._read("values", ValueTiming)}.values())

    def eager(self) -> list[EagerTiming]:
        return list({r.cell: r for r in self._read("eager", EagerTiming)}.values())

    def choices(self) -> list[PlanChoice]:
        return self._read("plan", PlanChoice)

    def profiles(self) -> list[NcuRecord]:
        """Of a binary in a cell the record that holds most, and of equal ones the last."""
        worth = {"times": 1, "light": 2, "full": 3}
        kept: dict[tuple[str, str], NcuRecord] = {}
        for r in self._read("ncu", NcuRecord):
            old = kept.get((r.arm, r.cell.id))
            if old is None or old.sha256 != r.sha256 or old.cause is not None or worth[r.set] >= worth[old.set]:
                kept[r.arm, r.cell.id] = r
        return list(kept.values())

    def diagnosis(self) -> list[Diagnosis]:
        return self._read("diagnosis", Diagnosis)  # type: ignore[arg-type]

    def append(self, stage: str, record: msgspec.Struct) -> None:
        """Add one record. A record cut off earlier is dropped first, and the seal with it."""
        assert stage in STAGES, stage
        self.path.mkdir(parents=True, exist_ok=True)
        self._unseal()
        with self._file(stage).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # else a line that another process is writing looks cut off
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(msgspec.json.encode(record) + b"\n")

    def replace(self, stage: str, records: Iterable[msgspec.Struct]) -> None:
        """Write a derived stage whole, atomically."""
        self._write(self._file(stage), b"".join(msgspec.json.encode(r) + b"\n" for r in records))

    # --- the seal ---

    @property
    def files(self) -> list[Path]:
        """run.json and the files of the stages that there are."""
        named = [self.path / INFO, *map(self._file, STAGES)]
        return [file for file in named if file.exists()]

    @property
    def sums(self) -> Sums | None:
        """What the files were when the run was sealed; None when it is not, or has changed since by way of here."""
        file = self.path / SUMS
        return _decode(file, file.read_bytes(), Sums) if file.exists() else None

    def seal(self) -> None:
        """Record the sum of every file: the run is finished."""
        _replace(self.path / SUMS, _indented(Sums(files={file.name: sha256_of(file) for file in self.files})))

    def _unseal(self) -> None:
        (self.path / SUMS).unlink(missing_ok=True)

    def _write(self, file: Path, data: bytes) -> None:
        """Replace a file whole; what is right already is left alone, and the seal with it."""
        if file.exists() and file.read_bytes() == data:
            return
        self._unseal()
        _replace(file, data)


def sha256_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _indented(record: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _decode(file: Path, data: bytes, record: type[T], line: int | None = None) -> T:
    try:
        return msgspec.json.decode(data, type=record)
    except UNDECODABLE as error:
        where = file if line is None else f"{file}:{line}"
        raise FlashladderError(f"{where}: not a valid record: {error}; delete it or restore it from git") from error


def _replace(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(file)


def find(name: str | None = None) -> RunDir:
    """The run that `name` points to: a directory, GPU/RUN, a run id, or (None) the one that paper/run.lock pins.

    Raises FlashladderError when there is no such run, or several have the id.
    """
    if name is None:
        lock = paths.PAPER / "run.lock"
        if not lock.exists():
            raise FlashladderError(f"no run is pinned: {lock} does not exist; name a run or make one with 'ablation'")
        name = lock.read_text().strip()
    for path in (Path(name), paths.RESULTS / name):
        if (path / "run.json").exists():
            return RunDir(path)
    found = sorted(p.parent for p in paths.RESULTS.glob(f"*/{glob.escape(name)}/run.json"))
    if len(found) > 1:
        ids = ", ".join(str(path.relative_to(paths.RESULTS)) for path in found)
        raise FlashladderError(f"{len(found)} runs are called {name!r}; name one of {ids}")
    if found:
        return RunDir(found[0])
    known = ", ".join(str(p.parent.relative_to(paths.RESULTS)) for p in sorted(paths.RESULTS.glob("*/*/run.json")))
    raise FlashladderError(f"no run {name!r} under {paths.RESULTS}; known runs: {known or 'none'}")


def recorded() -> list[RunDir]:
    """Every run on a GPU under the results folder, in the order of their paths."""
    files = sorted(paths.RESULTS.glob(f"*/*/{INFO}"))
    return [RunDir(file.parent) for file in files if file.parent.parent.name != EMULATED]


def pinned_id() -> str | None:
    lock = paths.PAPER / "run.lock"
    return lock.read_text().strip() if lock.exists() else None
