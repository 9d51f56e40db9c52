"""How blocks begin and end, of small grids and of few query rows, on the emulator: right and free of races."""

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
EPILOGUE, ITEM, JOIN, DIVISIONS = "r34_short_epilogue", "r35_early_item", "r36_short_join", "r37_few_divisions"
LAST_JOINS, EARLY = "v38_last_joins", "v38_early_launch"
OWN, M128, M64 = (0, 1), (3, 1), (4, 1)
SPLIT = [(tile, splits) for tile in (1, 2) for splits in (1, 3)]
"""Of the kernels for 32 and for 16 rows."""


def _case(lengths: tuple[int, int], head_dim: int, causal: bool, heads: tuple[int, int] = (4, 2)) -> Case:
    shape = Shape(batch=1, heads_q=heads[0], heads_kv=heads[1], seq_q=lengths[0], seq_k=lengths[1], head_dim=head_dim)
    return Case("wide", Cell(shape=shape, dtype="bf16" if head_dim > 64 else "fp16", causal=causal))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ArmSpec]:
    return specs_of((EPILOGUE, ITEM, JOIN, DIVISIONS, LAST_JOINS, EARLY), tmp_path_factory.mktemp("cpu"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("head_dim", [40, 64, 104, 128])
@pytest.mark.parametrize("plan", [OWN, M128, M64])
@pytest.mark.parametrize("rung", [EPILOGUE, ITEM, DIVISIONS, LAST_JOINS, EARLY])
def test_rows_of_every_tile_are_stored_whole_and_no_others(
    built: Mapping[str, ArmSpec], rung: str, plan: tuple[int, int], head_dim: int, schedule: Schedule
) -> None:
    spec = msgspec.structs.replace(built[rung], plan=plan)
    options = Options(schedule=schedule, multiprocessors=4, async_timing="random", seed=SEED)
    for lengths in ((64, 300), (130, 450), (77, 1), (65, 0)):
        for causal in (False, True):
            counters_of(spec, _case(lengths, head_dim, causal), options, SEED)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("head_dim", [40, 64, 104, 128])
@pytest.mark.parametrize("plan", SPLIT)
@pytest.mark.parametrize("rung", [JOIN, DIVISIONS, EARLY])
def test_few_rows_are_joined_whole_and_no_others(
    built: Mapping[str, ArmSpec], rung: str, plan: tuple[int, int], head_dim: int, schedule: Schedule
) -> None:
    spec = msgspec.structs.replace(built[rung], plan=plan)
    options = Options(schedule=schedule, multiprocessors=4, async_timing="random", seed=SEED)
    for lengths in ((16, 300), (37, 450), (5, 1), (33, 0)):
        for causal, heads in ((False, (4, 2)), (True, (2, 2))):
            counters_of(spec, _case(lengths, head_dim, causal, heads), options, SEED)


PLANTED = {
    EPILOGUE: [
        ("rows that are no one's", "has_chunk && has_row(row + i * kAtOnce)", "has_chunk"),
        ("columns past the head", "static_cast<int>(chunk * 8) < p.head_dim", "true"),
        ("rows before a warp's other lanes have them", "__syncwarp();\n      uint4 words", "uint4 words"),
        ("one row's sum for both", "inverse[r] = fast_inverse_sum(sum[r])", "inverse[r] = fast_inverse_sum(sum[0])"),
    ],
    ITEM: [
        ("another head's keys", "one.kv = kv_head<C.few_divisions>(p, one.item.head)", "one.kv = 0"),
        ("no item", "item = one;\n      return turn++ == 0;", "item = one;\n      return false;"),
    ],
    EARLY: [
        ("no block waits", "if constexpr (C.early_launch) ptx::wait_in_stream();\n    meet();", "meet();"),
        (
            "the producer does not wait",
            "ptx::wait_in_stream();\n    meet();",
            "if (warpgroup != kConsumers) ptx::wait_in_stream();\n    meet();",
        ),
        (
            "the store does not wait",
            "ptx::wait_in_stream();\n    meet();",
            "if (warpgroup == kConsumers) ptx::wait_in_stream();\n    meet();",
        ),
        ("few rows do not wait", "if constexpr (C.early_launch) ptx::wait_in_stream();\n    Tile", "Tile"),
    ],
    LAST_JOINS: [
        ("no one joins", "(group - joiner + kKeyGroups) % kKeyGroups;", "1 + group % (kKeyGroups - 1);"),
        ("a part in another's place", "(behind - 1) * kRowGroups", "(behind / 2) * kRowGroups"),
    ],
    JOIN: [
        ("rows that are no one's", "row + step * kAtOnce < p.seq_q", "true"),
        ("columns past the head", "has_columns = is_column(quad / 2, p.head_dim)", "has_columns = true"),
        ("one row for all", "join_parts(smem, first + i * kAtOnce, quad)", "join_parts(smem, first, quad)"),
        ("one row's sum for all", "fast_inverse_sum(rows[i].sum)", "fast_inverse_sum(rows[0].sum)"),
        ("the LSE of a part in another's place", "p.part_lse[to + i * kAtOnce]", "p.part_lse[to + i]"),
        ("an LSE in another's place", "lse[(row + i * kAtOnce) * p", "lse[(row + i) * p"),
    ],
    DIVISIONS: [
        ("heads share no K and V", "few_divisions && p.heads_q == p.heads_kv", "few_divisions"),
        ("every split begins with the first key", "divides ? blockIdx.x % splits : 0", "0"),
        ("splits overlap", "end = min(tiles, first + share)", "end = tiles"),
        ("every split has a query tile", "divides ? block / splits : block", "block"),
    ],
}


HEADERS = ["hopper_forward.cuh", "mma_forward.cuh", "tensor.cuh"]
SMALL_GRID = [_case((130, 450), 40, False)]
FEW_ROWS = [
    _case((5, 300), 40, False),
    _case((21, 1100), 40, False),
    _case((20, 300), 40, False, (12, 6)),
    _case((20, 1100), 40, True, (12, 12)),
]
"""Of the kernels for 16 rows and for 32, with splits of the keys and without."""
CASES = {JOIN: FEW_ROWS, DIVISIONS: FEW_ROWS, EARLY: [*SMALL_GRID, *FEW_ROWS]}


def _header_with(text: str) -> str:
    return next(name for name in HEADERS if text in (paths.KERNEL / "include" / name).read_text())


@pytest.mark.mutants
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_begin_or_end_is_noticed(name: str, tmp_path: Path) -> None:
    rung, cases = load_ladder()[name], CASES.get(name, SMALL_GRID)
    itself = mutants.Mutant(rung, "itself", (paths.ROOT / rung.source).read_text())
    bugs = [mutants.replaced(rung, bug, old, new, _header_with(old)) for bug, old, new in PLANTED[name]]
    right, *wrong = mutants.build([itself, *bugs], tmp_path)
    options = [Options(multiprocessors=12, schedule=s) for s in SCHEDULES]
    assert mutants.noticed(right, cases, options) is None
    assert [
        bug.name for bug, library in zip(bugs, wrong, strict=True) if not mutants.noticed(library, cases, options)
    ] == []
