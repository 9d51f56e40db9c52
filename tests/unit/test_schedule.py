"""kernel/include/schedule.h: which block takes which query tiles under a causal mask."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import pytest

from flashladder.build import INCLUDE

SECTIONS, BLOCKS = 16, 160
SOURCE = f"""
#include "schedule.h"
static_assert(flashladder::kPlacedSections == {SECTIONS} && flashladder::kPlacedBlocks == {BLOCKS});
extern "C" void places(uint8_t* to, int heads, int section, int blocks, const int* work, int tiles) {{
  flashladder::balance(*reinterpret_cast<flashladder::Places*>(to), heads, section, blocks, tiles,
                       [=](int tile) {{ return work[tile]; }});
}}
"""
Balance = Callable[[int, int, int, list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def balance(tmp_path_factory: pytest.TempPathFactory) -> Balance:
    """(heads, heads of a section, blocks, work of each tile) -> the places of all blocks, section by section."""
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "places.cpp").write_text(SOURCE)
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", f"-I{INCLUDE}"]
    subprocess.run([*command, "places.cpp", "-o", "places.so"], cwd=folder, check=True)
    places = ctypes.CDLL(str(folder / "places.so")).places

    def call(heads: int, section: int, blocks: int, work: list[int]) -> list[list[int]]:
        to = (ctypes.c_uint8 * (SECTIONS * BLOCKS))()
        places(to, heads, section, blocks, (ctypes.c_int * len(work))(*work), len(work))
        count = min(SECTIONS, -(-heads // section))
        return [list(to[s * BLOCKS : s * BLOCKS + blocks]) for s in range(count)]

    return call


def _loads(heads: int, section: int, blocks: int, work: list[int], places: list[list[int]]) -> list[int]:
    """What each block has done in the end, by the kernel's rule."""
    done = [0] * blocks
    for s in range(-(-heads // section)):
        size = min(section, heads - s * section)
        for block, place in enumerate(places[s % SECTIONS]):
            for turn in range(-(-size * len(work) // blocks)):
                i = turn * blocks + (place if turn % 2 == 0 else blocks - 1 - place)
                if i < size * len(work):
                    done[block] += work[len(work) - 1 - i // size]
    return done


@pytest.mark.parametrize(
    ("heads", "section", "blocks", "tiles"),
    [(256, 32, 132, 6), (128, 32, 132, 11), (64, 16, 132, 22), (16, 4, 132, 86), (1, 1, 3, 3), (40, 1, 7, 5)],
)
def test_every_block_has_a_place_of_its_own(
    balance: Balance, heads: int, section: int, blocks: int, tiles: int
) -> None:
    for places in balance(heads, section, blocks, [3 + 3 * t for t in range(tiles)]):
        assert sorted(places) == list(range(blocks))


@pytest.mark.parametrize(
    ("keys", "heads", "section"), [(1024, 256, 32), (2048, 128, 32), (4096, 64, 16), (8192, 32, 8)]
)
def test_blocks_end_together(balance: Balance, keys: int, heads: int, section: int) -> None:
    """Tiles of 192 rows on 132 blocks; with places moved on by what is left the mean was 0.94 to 0.97 of the most."""
    work = [-(-(keys - 192 * t) // 64) + 3 for t in reversed(range(-(-keys // 192)))]
    loads = _loads(heads, section, 132, work, balance(heads, section, 132, work))
    assert sum(loads) == heads * sum(work)
    assert sum(loads) / len(loads) >= 0.975 * max(loads)


def test_more_sections_take_the_places_of_the_first_again(balance: Balance) -> None:
    work = [3 + 3 * t for t in range(6)]
    places = balance(20 * 32, 32, 132, work)
    assert len(places) == SECTIONS
    loads = _loads(20 * 32, 32, 132, work, places)
    assert sum(loads) / len(loads) >= 0.97 * max(loads)
