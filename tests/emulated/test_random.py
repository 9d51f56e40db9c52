"""Random problems on the emulated end of the Hopper ladder, under random schedules, with races looked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashladder import ablation, check, emulation
from flashladder.arrays import HostMemory
from flashladder.emulator.device import EmulatedMemory, Emulator, Options, emulated_arm
from flashladder.inputs import Case
from tests.random_cases import cases

RUNG, EXAMPLES = "r22_retuned", 40


def test_random_problems_are_right_and_free_of_races(tmp_path: Path) -> None:
    host = HostMemory()
    session = emulation.open_check(ablation.Selection(rungs=(RUNG,), out=tmp_path), Options())
    session.build()
    spec = session.specs[0]
    arm, emulator = emulated_arm(spec), Emulator(Path(spec.library or ""))

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases(max_rows=220, max_keys=300), seed=st.integers(0, 1 << 16), sms=st.sampled_from((1, 3, 132)))
    def one(case: Case, seed: int, sms: int) -> None:
        built = "fp16" if case.cell.shape.head_dim <= 64 else "bf16"  # emulation.SWEEP
        case = replace(case, cell=msgspec.structs.replace(case.cell, dtype=built))
        assume(emulation.work(case) <= emulation.MAX_WIDE_WORK)
        options = Options(schedule="random", async_timing="random", seed=seed, multiprocessors=sms)
        memory = EmulatedMemory(emulator, options)
        record = check.check_case(arm, case, memory, seed, check.pose(case, host, seed))
        refusable = case.layout == "broadcast_rows"
        assert record.status == "pass" or (refusable and record.status == "unsupported"), record

    one()
