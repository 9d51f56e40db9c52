"""Some rungs or variants built for the emulator, and a case that must pass there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flashladder import ablation, check, emulation
from flashladder.arms import ArmSpec
from flashladder.arrays import HostMemory
from flashladder.emulator.device import EmulatedMemory, Emulator, Options, emulated_arm
from flashladder.inputs import Case
from flashladder.ladder import load_ladder


def specs_of(names: Sequence[str], folder: Path) -> dict[str, ArmSpec]:
    """By name; `folder` is of the run that builds them."""
    session = emulation.open_check(ablation.Selection(out=folder), Options())
    session.rungs = tuple(load_ladder()[name] for name in names)
    session.build()
    return {spec.name: spec for spec in session.specs}


def counters_of(spec: ArmSpec, case: Case, options: Options, seed: int) -> Mapping[str, int]:
    """Of a case that must pass without a bank conflict."""
    memory = EmulatedMemory(Emulator(Path(spec.library or "")), options)
    record = check.check_case(emulated_arm(spec), case, memory, seed, check.pose(case, HostMemory(), seed))
    assert record.status == "pass", record.reason
    assert memory.counters.get("bank_conflicts", 0) == 0
    return memory.counters
