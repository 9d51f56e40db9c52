"""How many tiles of keys a Hopper kernel repairs before it turns to exact maxima, on the emulator: what values that
outgrow every maximum cost. Only a repair runs mma.sync there."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from flashladder.arms import ArmSpec
from flashladder.emulator.device import Options
from flashladder.inputs import Case
from flashladder.model import Cell, Shape
from tests.emulated.specs import counters_of, specs_of

LATE_LOOK, FIRST_LOOK = "r37_few_divisions", "r38_first_look"
SEED, TILE, MOST = 3, 64, 13
"""Keys of a tile; tiles of the longest case."""
KERNELS = [(64, (0, 1), 256, 1), (64, (3, 1), 128, 2), (64, (4, 1), 64, 4), (128, (0, 1), 192, 1), (128, (4, 1), 64, 2)]
"""head_dim, plan, rows of a query tile, warpgroups that share them."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ArmSpec]:
    return specs_of((LATE_LOOK, FIRST_LOOK), tmp_path_factory.mktemp("cpu"))


def _repaired(spec: ArmSpec, head_dim: int, rows: int, tiles: int) -> int:
    """Tiles, with one query tile."""
    shape = Shape(batch=1, heads_q=1, heads_kv=1, seq_q=rows, seq_k=tiles * TILE, head_dim=head_dim)
    cell = Cell(shape=shape, dtype="fp16" if head_dim == 64 else "bf16", causal=False)
    products = rows * TILE * head_dim // (16 * 8 * 16)
    case, options = Case("values", cell, values="huge"), Options(schedule="random", multiprocessors=4, seed=SEED)
    found = counters_of(spec, case, options, SEED)["mma"]
    assert found % products == 0
    return found // products


@pytest.mark.parametrize(("head_dim", "plan", "rows", "groups"), KERNELS)
def test_a_warpgroup_repairs_one_tile(
    built: Mapping[str, ArmSpec], head_dim: int, plan: tuple[int, int], rows: int, groups: int
) -> None:
    """The first of a warpgroup's tiles has exact maxima, the second is repaired, and behind it there is a look."""
    spec = msgspec.structs.replace(built[FIRST_LOOK], plan=plan)
    found = [_repaired(spec, head_dim, rows, tiles) for tiles in range(1, MOST)]
    assert found == [min(max(tiles - groups, 0), groups) for tiles in range(1, MOST)]


@pytest.mark.parametrize(("head_dim", "plan", "rows", "groups"), KERNELS)
def test_of_its_parent_a_warpgroup_repairs_four_tiles_at_most(
    built: Mapping[str, ArmSpec], head_dim: int, plan: tuple[int, int], rows: int, groups: int
) -> None:
    spec = msgspec.structs.replace(built[LATE_LOOK], plan=plan)
    found = [_repaired(spec, head_dim, rows, tiles) for tiles in range(1, MOST)]
    assert groups <= max(found) <= 4 * groups
