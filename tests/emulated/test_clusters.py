"""Blocks that load K and V for each other, on the emulator: right, free of races, in as many boxes as declared."""

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

SEED = 3
M64 = (4, 1)
FIRST, ALL = "r38_first_look", "v38_multicast_all"
STAGES = 4
"""Of the kernel of 64 rows at head_dim 128, which is all that r33_multicast changes."""


def _case(
    lengths: tuple[int, int], causal: bool = False, heads: int = 2, head_dim: int = 128, batch: int = 1, group: int = 1
) -> Case:
    shape = Shape(
        batch=batch, heads_q=heads, heads_kv=heads // group, seq_q=lengths[0], seq_k=lengths[1], head_dim=head_dim
    )
    return Case("wide", Cell(shape=shape, dtype="bf16" if head_dim == 128 else "fp16", causal=causal))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ArmSpec]:
    specs = specs_of((FIRST, ALL), tmp_path_factory.mktemp("cpu"))
    return {name: msgspec.structs.replace(spec, plan=M64) for name, spec in specs.items()}


def _boxes(spec: ArmSpec, case: Case, options: Options) -> int:
    """That TMA brings or takes in a case that must pass; one for both blocks of a cluster counts once."""
    return counters_of(spec, case, options, SEED)["tma"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rung", [FIRST, ALL])
def test_blocks_that_load_for_each_other_are_right_and_free_of_races(
    built: Mapping[str, ArmSpec], rung: str, schedule: Schedule
) -> None:
    options = Options(schedule=schedule, multiprocessors=4, async_timing="random", seed=SEED)
    for lengths in ((128, 64), (128, 700), (100, 450), (256, 256), (250, 1), (128, 0)):
        for causal in (False, True):
            _boxes(built[rung], _case(lengths, causal), options)
    _boxes(built[rung], _case((128, 300), heads=3, batch=2), options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_tiles_are_shared_at_head_dim_64_too(built: Mapping[str, ArmSpec], schedule: Schedule) -> None:
    options = Options(schedule=schedule, multiprocessors=4, async_timing="random", seed=SEED)
    for lengths in ((128, 64), (128, 900), (100, 450)):
        _boxes(built[ALL], _case(lengths, head_dim=64), options)


@pytest.mark.parametrize(
    ("rows", "heads", "group", "causal", "multiprocessors", "shares"),
    [
        (128, 2, 1, False, 4, True),
        (128, 2, 1, True, 4, False),  # the tiles of a pair see different keys
        (128, 2, 2, False, 4, False),  # heads share K and V
        (192, 2, 1, False, 4, False),  # no pairs: three tiles a head
        (128, 2, 1, False, 6, False),  # too few blocks for the device
        (256, 2, 1, False, 6, True),
    ],
)
@pytest.mark.parametrize("rung", [FIRST, ALL])
def test_a_cluster_asks_once_for_what_both_blocks_read(
    built: Mapping[str, ArmSpec],
    rung: str,
    rows: int,
    heads: int,
    group: int,
    causal: bool,
    multiprocessors: int,
    shares: bool,
) -> None:
    """Two boxes a tile of 64 rows and operand, and of O two a warp."""
    tiles, keys = rows // 64, 640
    boxes = _boxes(
        built[rung], _case((rows, keys), causal, heads, group=group), Options(multiprocessors=multiprocessors)
    )
    seen = [(keys - rows + 64 * (i + 1) if causal else keys) // 64 for i in range(tiles)]
    twice = sum(seen) - (tiles // 2 * (STAGES if rung == FIRST else keys // 64) if shares else 0)
    assert boxes == heads * 2 * (tiles + 2 * twice + 4 * tiles)


@pytest.mark.mutants
def test_what_blocks_wait_for_in_each_other_is_missed(tmp_path: Path) -> None:
    rung = load_ladder()[ALL]
    planted = [
        ("tiles for barriers that are not there", "meet();\n    if constexpr", "__syncthreads();\n    if constexpr"),
        ("a refill before the other block has read", "? ptx::cluster_blocks() : 1;", "? 1 : 1;"),
        ("an exit before the other block has arrived", "meet();  // no block leaves", ";  // no block leaves"),
    ]
    itself = mutants.Mutant(rung, "itself", (paths.ROOT / rung.source).read_text())
    bugs = [mutants.replaced(rung, name, old, new, "hopper_forward.cuh") for name, old, new in planted]
    right, *wrong = mutants.build([itself, *bugs], tmp_path)
    case, options = _case((128, 700), heads=3, head_dim=64), [Options(multiprocessors=6, schedule=s) for s in SCHEDULES]
    assert mutants.noticed(right, [case], options) is None
    assert [
        bug.name for bug, library in zip(bugs, wrong, strict=True) if not mutants.noticed(library, [case], options)
    ] == []
