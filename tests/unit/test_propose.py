"""The search over declared tiles: against the recorded times it ends where hand tuning ended, or better."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import median

import msgspec
import pytest

from flashladder import brief, build, limits, loop, paths, propose, rundir, toolchain
from flashladder.ladder import gpu_called, load_ladder, load_tuning
from flashladder.limits import Design, Fit
from flashladder.loop import Attempt, Brief, Budget, Champion
from flashladder.model import Blocking, Ratio
from flashladder.propose import HEAD_DIMS, Note, Point

CHAMPION = load_ladder().rungs[-1].id
TUNING, H200 = load_tuning(), gpu_called("h200")
BEFORE_TUNING: dict[int, Point] = {64: (192, 128, 2, 1), 128: (128, 128, 2, 1)}
"""Tiles of r21_stale_max, which r22_retuned was tuned from."""


@cache
def _recorded() -> dict[str, dict[str, float]]:
    """Candidate -> cell -> median time, of the run in which every declared candidate was timed."""
    names = {c.name for c in TUNING.candidate}
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for timing in rundir.find("h200/blocking").timings():
        for arm in timing.arms:
            if arm.arm in names and arm.ns:
                found[arm.arm][timing.cell.id] = median(ns for pair in arm.ns for ns in pair)
    return found


def _score(head_dim: int, point: Point) -> float:
    """Geometric mean time, over the cells of a head dimension."""
    times = _recorded()[propose.blocking_of(head_dim, point).name].values()
    return math.exp(math.fsum(map(math.log, times)) / len(times))


def _judge(number: int, note: Note, champion: Mapping[int, Point]) -> Attempt:
    """What the rule of a challenge makes of the recorded times; a tile that was not timed fails its build."""
    d = note.changed
    point = note.tiles[str(d)]
    text = msgspec.json.encode(note).decode()
    times = _recorded().get(propose.blocking_of(d, point).name)
    if not times:
        return Attempt(number=number, date="", outcome="reverted", state="BUILD", note=text)
    old = _recorded()[propose.blocking_of(d, champion[d]).name]
    ratios = {cell: old[cell] / us for cell, us in times.items()}
    others = _recorded()[propose.blocking_of(192 - d, champion[192 - d]).name]
    ratios |= dict.fromkeys(others, 1.0)
    gain = math.exp(math.fsum(map(math.log, ratios.values())) / len(ratios))
    won = gain >= 1.01 and min(ratios.values()) >= 1 / 1.02
    return Attempt(
        number=number,
        date="",
        outcome="accepted" if won else "reverted",
        state="CONFIRM" if won else "MEASURE",
        ratios={cell: Ratio(ratio=r, low=r, high=r) for cell, r in ratios.items()},
        note=text,
    )


def _search(attempts: int, seed: int, startup: int) -> tuple[dict[int, Point], list[Attempt]]:
    champion, ledger = dict(BEFORE_TUNING), list[Attempt]()
    for number in range(1, attempts + 1):
        note = propose.propose(TUNING, H200, BEFORE_TUNING, ledger, number, seed, startup)
        if note is None:
            break
        ledger.append(_judge(number, note, champion))
        if ledger[-1].outcome == "accepted":
            champion = {int(d): point for d, point in note.tiles.items()}
    return champion, ledger


def _hand_tuned() -> dict[int, Point]:
    chosen = {c.head_dim: c.blocking for c in TUNING.choice}
    return {c.head_dim: propose.point_of(c) for c in TUNING.candidate if c.name == chosen[c.head_dim]}


def test_the_search_finds_what_hand_tuning_found_within_a_few_attempts() -> None:
    champion, ledger = _search(8, seed=0, startup=propose.STARTUP)
    for d in HEAD_DIMS:
        assert _score(d, champion[d]) <= _score(d, _hand_tuned()[d])
    assert sum(a.outcome == "accepted" for a in ledger) == 2


@pytest.mark.parametrize("seed", [1, 3])
def test_the_sampler_alone_finds_it_too_without_the_models_order(seed: int) -> None:
    """The champion may stay within the 1 % that a challenge does not accept; what was timed best is known exactly."""
    champion, ledger = _search(30, seed, startup=0)
    scores, _ = propose.known(BEFORE_TUNING, ledger)
    for d in HEAD_DIMS:
        assert _score(d, scores[d].best) <= _score(d, _hand_tuned()[d])
    lost = math.prod(_score(d, champion[d]) / _score(d, _hand_tuned()[d]) for d in HEAD_DIMS)
    assert math.sqrt(lost) < 1.01
    assert len({a.note for a in ledger}) == len(ledger) == 30


def test_a_note_and_a_ledger_rebuild_what_is_known_against_a_moving_champion() -> None:
    first = _judge(1, Note(tiles={"64": (256, 64, 4, 0), "128": BEFORE_TUNING[128]}, changed=64), BEFORE_TUNING)
    now = {64: (256, 64, 4, 0), 128: BEFORE_TUNING[128]}
    second = _judge(2, Note(tiles={"64": (256, 64, 2, 1), "128": BEFORE_TUNING[128]}, changed=64), now)
    foreign = Attempt(number=3, date="", outcome="reverted", note="another proposer's words")
    scores, champion = propose.known(BEFORE_TUNING, [first, second, foreign])
    assert first.outcome == "accepted"
    assert champion == now
    for point, score in scores[64].scores.items():
        assert score == pytest.approx(math.log(_score(64, BEFORE_TUNING[64]) / _score(64, point)))
    assert scores[64].best == (256, 64, 4, 0)


def test_it_ends_when_every_tile_that_fits_was_tried() -> None:
    tiles = {str(d): BEFORE_TUNING[d] for d in HEAD_DIMS}
    notes = [
        Note(tiles={**tiles, str(d): point}, changed=d)
        for d in HEAD_DIMS
        for point in propose.feasible(TUNING, d, H200)
    ]
    ledger = [
        Attempt(number=n, date="", outcome="reverted", note=msgspec.json.encode(note).decode())
        for n, note in enumerate(notes, 1)
    ]
    assert propose.propose(TUNING, H200, BEFORE_TUNING, ledger, len(ledger) + 1, 0) is None


def test_every_declared_candidate_fits_and_is_in_the_space() -> None:
    for candidate in TUNING.candidate:
        assert propose.point_of(candidate) in propose.feasible(TUNING, candidate.head_dim, H200), candidate.name
    assert all(isinstance(limits.fit(_design(p), 64, H200), Fit) for p in propose.feasible(TUNING, 64, H200))


def _design(point: Point) -> Design:
    return Design(instruction="wgmma", tile_m=point[0], tile_n=point[1], stages=point[2])


def test_the_candidate_is_the_last_hopper_rung_with_other_tiles() -> None:
    text = propose.source({"64": (192, 128, 2, 1), "128": (128, 160, 2, 0)})
    fields = {name: int(value) for name, value in re.findall(r"config\.(\w+) = (\d+);", text)}
    assert Blocking.of(fields, 64) == propose.blocking_of(64, (192, 128, 2, 1))
    assert Blocking.of(fields, 128) == propose.blocking_of(128, (128, 160, 2, 0))
    last = (paths.ROOT / load_ladder().rungs[-1].source).read_text()
    kept = [line for line in last.splitlines() if line.startswith(("#", "  config.", "using"))]
    assert [line for line in kept if line not in text] == []


def test_as_a_program_it_reads_a_brief_writes_the_candidate_and_says_when_it_is_done(tmp_path: Path) -> None:
    file = tmp_path / "candidate.cu"
    given = Brief(
        number=1,
        seed=0,
        candidate=str(file),
        champion=Champion(id=CHAMPION, file="x.cu"),
        diagnosis=brief.diagnosis_of(rundir.find(), load_ladder(), CHAMPION),
        ledger=(),
        progress=loop.progress_of([], Budget()),
        budget=Budget(),
    )
    done = subprocess.run([*loop.SEARCH], input=msgspec.json.encode(given), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    note = json.loads(done.stdout)
    assert file.read_text() == propose.source({d: tuple(point) for d, point in note["tiles"].items()})
    assert note["tiles"]["128"] == list(_hand_tuned()[128])
    assert note["tiles"]["64"] != list(_hand_tuned()[64])


def test_every_point_of_the_search_passes_the_kernels_own_assertions(tmp_path: Path) -> None:
    """Of a candidate's three kernels of each head dimension; their bodies are not compiled."""
    whole = propose.source({})
    text = whole[whole.index("#include") : whole.index("constexpr")]
    points = {d: propose.feasible(TUNING, d, H200) for d in HEAD_DIMS}
    for i in range(max(map(len, points.values()))):
        body = propose.source({str(d): points[d][i % len(points[d])] for d in HEAD_DIMS})
        body = body[body.index("constexpr") : body.index("FLASHLADDER_DISPATCH_RUNG")]
        for d in HEAD_DIMS:
            for config in ("kConfig", f"LastSizes<{d}>::m128(kConfig)", f"LastSizes<{d}>::m64(kConfig)"):
                body += f"static_assert(HopperForward<{config}, __half, {d}>::kStages >= 2);\n"
        text += re.sub(r"\b(kLast|kConfig|LastSizes)\b", rf"\g<1>{i}", body)
    assert text.count("static_assert") >= 6 * len(points[64])
    file = tmp_path / "asserted.cu"
    file.write_text(text)
    command = [str(toolchain.find_nvcc().path), *build.NVCC_FLAGS, "-arch=sm_90a", f"-I{paths.ROOT / 'kernel/include'}"]
    done = subprocess.run(
        [*command, "-ptx", str(file), "-o", str(tmp_path / "x.ptx")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_search_on_a_gpu_ended_with_what_hand_tuning_found_or_better() -> None:
    attempts = loop.Folder(paths.EXPERIMENTS / "loops" / "h200-search").attempts()
    known, champion = propose.known(BEFORE_TUNING, attempts)
    assert attempts[0].champion == "r21_stale_max"
    for d, point in _hand_tuned().items():
        assert champion[d] == point or known[d].scores[champion[d]] > known[d].scores[point]
