"""The reproduction card: both machines, the ladder's order, claims and ratios, and what of them differs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from flashladder import ablation, card, claims, paths, rundir
from flashladder.cli import main
from flashladder.diagnose import diagnose
from flashladder.errors import Exit
from flashladder.ladder import load_ladder
from flashladder.model import Machine
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

replace = msgspec.structs.replace
HERE: Machine = replace(
    made.MACHINE, gpu="NVIDIA H200", power_limit_w=500.0, cpu="Another CPU", peers={"torch": "2.9.1"}
)


def _results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDir, RunDir]:
    """Two diagnosed runs of the repository's rungs, the first pinned; the second swaps two of them."""
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    (tmp_path / "run.lock").write_text("h100/pinned\n")
    swapped = {"r02_grid": "r03_warp_reduce", "r03_warp_reduce": "r02_grid"}
    first = made.timing(made.REFERENCE)
    by_name = {arm.arm: arm for arm in first.arms}
    other = replace(
        first, arms=tuple(replace(a, ns=by_name[swapped[a.arm]].ns) if a.arm in swapped else a for a in first.arms)
    )
    runs = []
    for name, timing, machine in (("h100/pinned", first, made.MACHINE), ("h200/other", other, HERE)):
        info = replace(made.INFO, id=name.split("/")[1], machine=machine)
        run = made.write_run(tmp_path / name, [timing], info=info)
        run.replace("diagnosis", diagnose(run, load_ladder()))
        runs.append(run)
    return runs[0], runs[1]


def test_the_order_of_the_ladder_is_compared_leg_by_leg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, other = _results(tmp_path, monkeypatch)
    same, swapped = (card.card(run, pinned, load_ladder()).ranks for run in (pinned, other))
    # Five rungs are timed: of their ten pairs one is the other way round.
    assert [(r.leg, r.rungs, r.tau) for r in same] == [
        ("portable", 5, 1.0),
        *((leg.name, 0, None) for leg in load_ladder().legs[1:]),
    ]
    assert swapped[0].tau == 0.8


def test_facts_that_differ_and_matter_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, other = _results(tmp_path, monkeypatch)
    mine = card.card(other, pinned, load_ladder())
    facts = {f.name: f for f in mine.facts}
    assert (facts["GPU"].evidence, facts["GPU"].here) == ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    assert facts["peer torch"].evidence == "unknown"
    assert {f.name for f in mine.facts if f.matters} == {"GPU", "power limit (W)", "peer torch"}
    assert not facts["CPU"].matters
    assert "power limit (W)" in card.differences(mine)


def test_binaries_are_compared_by_library_and_by_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, other = _results(tmp_path, monkeypatch)
    for run, library, code in ((pinned, "a", "x"), (other, "b", "x")):
        changed = [replace(b, cubins={"sm_90a": code}) for b in run.builds()]
        changed[0] = replace(changed[0], sha256=library, cubins={"sm_90a": library})
        run.replace("build", changed)
    found = card.card(other, pinned, load_ladder()).binaries
    assert (found.shared, found.same_library, found.known_code, found.same_code) == (6, 5, 6, 5)


def test_ratios_of_both_runs_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, other = _results(tmp_path, monkeypatch)
    steps = {(s.arm, s.other): s for s in card.card(other, pinned, load_ladder()).steps}
    step = steps["r03_warp_reduce", "r02_grid"]
    assert step.evidence is not None
    assert step.here == pytest.approx(1 / step.evidence, rel=1e-3)
    assert steps["r06_wmma_qk", "r05_swizzle"].here is None
    assert ("r05_swizzle", made.BASELINE) in steps


@pytest.mark.parametrize("markdown", [True, False])
def test_the_page_shows_every_claim_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, markdown: bool) -> None:
    pinned, other = _results(tmp_path, monkeypatch)
    page = card.text(card.card(other, pinned, load_ladder()), markdown=markdown)
    assert page.startswith("# Reproduction card" if markdown else "Run other beside the pinned pinned.")
    words = page.replace(",", " ").split()
    assert [claim.id for claim in claims.load_claims() if words.count(claim.id) != 1] == []
    assert "not reproduced" in page


def test_other_machines_are_listed_and_runs_without_a_ladder_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, other = _results(tmp_path, monkeypatch)
    tuned = made.write_run(tmp_path / "h200" / "tune", [], info=replace(made.INFO, id="tune", preset="tune"))
    tuned.replace("diagnosis", other.diagnosis())
    made.write_run(tmp_path / "l4" / "not-diagnosed", [])
    (row,) = card.others(pinned, load_ladder()).rows
    assert row[:4] == ("h200/other", "NVIDIA H200", "2026-11-27", f"5 of {len(load_ladder().rungs)}")
    assert row[-len(load_ladder().legs) :] == ("0.800", *["not measured"] * (len(load_ladder().legs) - 1))


def test_the_command_has_an_exit_code_by_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _results(tmp_path, monkeypatch)
    result = CliRunner().invoke(main, ["card", "h200/other", "--json"])
    assert result.exit_code == Exit.NOT_REPRODUCED
    assert msgspec.json.decode(result.stdout, type=card.Card).run == "other"


def test_the_card_is_written_beside_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = _results(tmp_path, monkeypatch)
    assert "card.md" in ablation.write_card(other)
    first = (other.path / "card.md").read_bytes()
    assert msgspec.json.decode((other.path / "card.json").read_bytes(), type=card.Card).evidence == "pinned"
    ablation.write_card(other)
    assert (other.path / "card.md").read_bytes() == first
    (tmp_path / "run.lock").unlink()
    assert "no recorded run is pinned" in ablation.write_card(other)


def test_the_pinned_run_is_its_own_reproduction() -> None:
    if rundir.pinned_id() is None:
        pytest.skip("no run is pinned")
    pinned, ladder = rundir.find(), load_ladder()
    mine = card.card(pinned, pinned, ladder)
    assert mine.counts["not reproduced"] == 0
    assert {rank.tau for rank in mine.ranks if rank.rungs >= card.MIN_RANKED} == {1}
    assert not any(fact.matters for fact in mine.facts)
    assert mine.binaries.same_library == mine.binaries.shared
