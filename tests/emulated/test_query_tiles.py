"""Which rows a query tile has, on the emulator: right and free of races, and in as many steps as declared."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from flashladder.arms import ArmSpec
from flashladder.emulator.device import SCHEDULES, Options, Schedule
from flashladder.inputs import Case
from flashladder.model import Cell, DtypeName, Shape
from tests.emulated.specs import counters_of, specs_of

SEED = 3
OWN_KERNEL = (0, 1)
"""Of 256 rows, or 192 at head_dim 128; small grids take others."""
REST_FIRST, HALVES_LAST, LAST = "r25_rest_first", "r28_halves_last", "r38_first_look"


def _case(dtype: DtypeName, head_dim: int, lengths: tuple[int, int], causal: bool, heads: int = 2) -> Case:
    shape = Shape(batch=1, heads_q=heads, heads_kv=1, seq_q=lengths[0], seq_k=lengths[1], head_dim=head_dim)
    return Case("wide", Cell(shape=shape, dtype=dtype, causal=causal))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ArmSpec]:
    specs = specs_of((REST_FIRST, HALVES_LAST, LAST), tmp_path_factory.mktemp("cpu"))
    return {name: msgspec.structs.replace(spec, plan=OWN_KERNEL) for name, spec in specs.items()}


def _boxes(spec: ArmSpec, case: Case, options: Options) -> int:
    """That TMA brings in a case that must pass."""
    return counters_of(spec, case, options, SEED)["tma"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [("fp16", 64), ("bf16", 128)])
@pytest.mark.parametrize("rung", [HALVES_LAST, LAST])
def test_any_rest_of_rows_is_right_and_free_of_races(
    built: Mapping[str, ArmSpec], rung: str, dtype: DtypeName, head_dim: int, causal: bool, schedule: Schedule
) -> None:
    options = Options(schedule=schedule, multiprocessors=2, async_timing="random", seed=SEED)
    for lengths in ((1, 70), (60, 300), (193, 450), (256, 256), (330, 330), (385, 200)):
        _boxes(built[rung], _case(dtype, head_dim, lengths, causal), options)


@pytest.mark.parametrize(("causal", "tiles"), [(True, 1 + 4), (False, 4 + 4)])
def test_the_rest_sees_the_fewest_keys(built: Mapping[str, ArmSpec], causal: bool, tiles: int) -> None:
    """256 rows in tiles of 192: of each head two tiles of Q, and K and V of so many tiles of 64 keys; two boxes each.

    With the rest in the last tile they would be 3 + 4 under a causal mask.
    """
    case = _case("bf16", 128, (256, 256), causal)
    assert _boxes(built[REST_FIRST], case, Options(multiprocessors=1)) == 2 * (2 * 2 + 4 * tiles)


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "blocks", "items"),
    [
        (2, 640, 4096, 5, 2 * 4 + 1),  # 3 whole tiles a head: one fills no turn, and is halved beside two rests
        (3, 192, 4096, 2, 3 + 1),
        (3, 192, 4032, 2, 3),  # too few keys
        (3, 250, 4096, 2, 3 * 2),  # the halves and three rests would take two turns
        (1, 70, 4100, 1, 1),
    ],
)
def test_tiles_that_fill_no_turn_of_the_blocks_are_halved(
    built: Mapping[str, ArmSpec], heads: int, rows: int, keys: int, blocks: int, items: int
) -> None:
    """Each item reads Q and all of K and V once, two boxes a tile of 64 keys and operand."""
    case = _case("bf16", 128, (rows, keys), causal=False, heads=heads)
    boxes = _boxes(built[HALVES_LAST], case, Options(multiprocessors=blocks, async_timing="random", seed=SEED))
    assert boxes == items * (2 + 4 * -(-keys // 64))
