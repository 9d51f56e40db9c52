"""How blocks of a small grid begin and end, on the emulator: right and free of races."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from flashladder import paths
from flashladder.arms import ArmSpec
from flashladder.emulator.device import SCHEDULES, Options, Schedule
from flashladder.inputs import Case
from flashladder.ladder import load_ladder
from flashladder.model import Cell, Shape
from tests.emulated import mutants
from tests.emulated.specs import counters_of, specs_of

SEED = 5
EPILOGUE, ITEM, JOIN = "r34_short_epilogue", "r35_early_item", "r36_last_joins"
OWN, M128, M64 = (0, 1), (3, 1), (4, 1)


def _case(lengths: tuple[int, int], head_dim: int, causal: bool) -> Case:
    shape = Shape(batch=1, heads_q=4, heads_kv=2, seq_q=lengths[0], seq_k=lengths[1], head_dim=head_dim)
    return Case("wide", Cell(shape=shape, dtype="bf16" if head_dim > 64 else "fp16", causal=causal))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ArmSpec]:
    return specs_of((EPILOGUE, ITEM, JOIN), tmp_path_factory.mktemp("cpu"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("head_dim", [40, 64, 104, 128])
@pytest.mark.parametrize("plan", [OWN, M128, M64])
@pytest.mark.parametrize("rung", [EPILOGUE, ITEM, JOIN])
def test_rows_of_every_tile_are_stored_whole_and_no_others(
    built: Mapping[str, ArmSpec], rung: str, plan: tuple[int, int], head_dim: int, schedule: Schedule
) -> None:
    spec = msgspec.structs.replace(built[rung], plan=plan)
    options = Options(schedule=schedule, multiprocessors=4, async_timing="random", seed=SEED)
    for lengths in ((64, 300), (130, 450), (77, 1), (65, 0)):
        for causal in (False, True):
            counters_of(spec, _case(lengths, head_dim, causal), options, SEED)


PLANTED = {
    EPILOGUE: [
        ("rows that are no one's", "has_chunk && has_row(row + i * kAtOnce)", "has_chunk"),
        ("columns past the head", "static_cast<int>(chunk * 8) < p.head_dim", "true"),
        ("rows before a warp's other lanes have them", "__syncwarp();\n      uint4 words", "uint4 words"),
        ("one row's sum for both", "inverse[r] = fast_inverse_sum(sum[r])", "inverse[r] = fast_inverse_sum(sum[0])"),
    ],
    ITEM: [
        ("another head's keys", "one.kv = kv_head(p, one.item.head)", "one.kv = 0"),
        ("no item", "item = one;\n      return turn++ == 0;", "item = one;\n      return false;"),
    ],
    JOIN: [
        ("no one joins", "(group - joiner + kKeyGroups) % kKeyGroups;", "1 + group % (kKeyGroups - 1);"),
        ("a part in another's place", "(behind - 1) * kRowGroups", "(behind / 2) * kRowGroups"),
    ],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_begin_or_end_is_noticed(name: str, tmp_path: Path) -> None:
    rung = load_ladder()[name]
    itself = mutants.Mutant(rung, "itself", (paths.ROOT / rung.source).read_text())
    bugs = [mutants.replaced(rung, bug, old, new, "hopper_forward.cuh") for bug, old, new in PLANTED[name]]
    right, *wrong = mutants.build([itself, *bugs], tmp_path)
    cases, options = [_case((130, 450), 40, False)], [Options(multiprocessors=12, schedule=s) for s in SCHEDULES]
    assert mutants.noticed(right, cases, options) is None
    assert [
        bug.name for bug, library in zip(bugs, wrong, strict=True) if not mutants.noticed(library, cases, options)
    ] == []
