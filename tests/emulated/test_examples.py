"""examples/rest_first.cu on the emulator: right and free of races, and with less work than the rung it was made of."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flashladder import ablation, check, emulation
from flashladder import build as building
from flashladder.arrays import HostMemory
from flashladder.emulator.device import SCHEDULES, EmulatedMemory, Emulator, Options, Schedule, emulated_arm
from flashladder.inputs import Case
from flashladder.ladder import load_ladder
from flashladder.model import Cell, DtypeName, Shape

SEED = 3
OWN_KERNEL = (0, 1)
"""Of 256 rows, or 192 at head_dim 128; small grids take others."""
EXAMPLE = msgspec.structs.replace(load_ladder()["r24_key_groups"], id="rest_first", source="examples/rest_first.cu")


def _case(dtype: DtypeName, head_dim: int, lengths: tuple[int, int], causal: bool) -> Case:
    shape = Shape(batch=1, heads_q=2, heads_kv=1, seq_q=lengths[0], seq_k=lengths[1], head_dim=head_dim)
    return Case("wide", Cell(shape=shape, dtype=dtype, causal=causal))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> emulation.CpuCheck:
    building.compile_targets(building.targets([EXAMPLE], ["sm_90a"]))
    session = emulation.open_check(ablation.Selection(out=tmp_path_factory.mktemp("cpu")), Options())
    session.rungs = (EXAMPLE,)
    session.build()
    return session


def _tma(built: emulation.CpuCheck, case: Case, options: Options) -> int:
    """Boxes that TMA brings in a case that must pass."""
    (spec,) = built.specs
    memory = EmulatedMemory(Emulator(Path(spec.library or "")), options)
    arm = emulated_arm(msgspec.structs.replace(spec, plan=OWN_KERNEL))
    record = check.check_case(arm, case, memory, SEED, check.pose(case, HostMemory(), SEED))
    assert record.status == "pass", record.reason
    assert memory.counters.get("bank_conflicts", 0) == 0
    return memory.counters["tma"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [("fp16", 64), ("bf16", 128)])
def test_any_rest_of_rows_is_right_and_free_of_races(
    built: emulation.CpuCheck, dtype: DtypeName, head_dim: int, causal: bool, schedule: Schedule
) -> None:
    options = Options(schedule=schedule, multiprocessors=2, async_timing="random", seed=SEED)
    for lengths in ((1, 70), (60, 300), (193, 450), (256, 256), (330, 330), (385, 200)):
        _tma(built, _case(dtype, head_dim, lengths, causal), options)


@pytest.mark.parametrize(("causal", "tiles"), [(True, 1 + 4), (False, 4 + 4)])
def test_the_rest_sees_the_fewest_keys(built: emulation.CpuCheck, causal: bool, tiles: int) -> None:
    """256 rows in tiles of 192: of each head two tiles of Q, and K and V of so many tiles of 64 keys; two boxes each.

    With the rest in the last tile they would be 3 + 4 under a causal mask.
    """
    case = _case("bf16", 128, (256, 256), causal)
    assert _tma(built, case, Options(multiprocessors=1)) == 2 * (2 * 2 + 4 * tiles)
