"""The guard on a GPU: a slower library in the place of another is a regression, a library against itself is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashladder import ablation, guard, machine
from flashladder.arms import ArmSpec, LoadedArm
from flashladder.guard import BASE
from flashladder.ladder import load_ladder, load_presets
from flashladder.model import Cell, L2Mode
from flashladder.rundir import RunDir

pytestmark = pytest.mark.children_time


def _cells() -> dict[Cell, L2Mode]:
    return {load_ladder().reference: "warm"}


def _verdicts(tmp_path: Path, present: LoadedArm, base: LoadedArm, preset: str = "default") -> set[str]:
    def spec(arm: LoadedArm, name: str) -> ArmSpec:
        return ArmSpec(name=name, kind="rung", library=arm.spec.library, sha256=arm.sha256)

    run = RunDir(tmp_path / "run")
    run.write_info(ablation.new_info(run, preset, machine.fingerprint()))
    arms = [spec(present, "k"), spec(base, BASE + "k")]
    guard.measure(run, arms, _cells(), load_presets()[preset], 0, lambda *_: None)
    return {s.verdict for s in guard.slowdowns(run.timings(), run.checks(), ["k"])}


def test_a_slower_library_is_a_regression_and_a_faster_one_is_none(arms: dict[str, LoadedArm], tmp_path: Path) -> None:
    slow, fast = arms["r11_cp_async"], arms["r12_kv_split"]
    assert _verdicts(tmp_path / "slower", slow, fast) == {"regression"}
    assert _verdicts(tmp_path / "faster", fast, slow) == {"no regression"}


def test_a_library_against_itself_never_alarms(arms: dict[str, LoadedArm], tmp_path: Path) -> None:
    for number in range(5):
        assert _verdicts(tmp_path / str(number), arms["r13_tuned"], arms["r13_tuned"]) == {"no regression"}


def test_a_baseline_made_here_does_not_trip_here(torch: Any, arms: dict[str, LoadedArm], tmp_path: Path) -> None:
    here, sessions = machine.fingerprint(), []
    spec = ArmSpec(name="k", kind="rung", library=arms["r13_tuned"].spec.library, sha256=arms["r13_tuned"].sha256)
    for number in range(guard.SESSIONS + 1):
        run = RunDir(tmp_path / str(number))
        guard.measure(run, [spec], _cells(), load_presets()["quick"], number, lambda *_: None)
        sessions.append(run)
    baseline = guard.baseline_of(sessions[:-1], here, "abc", "2026-01-01")
    (trip,) = guard.trips(baseline, machine.fingerprint(), sessions[-1].timings())
    assert trip.verdict in ("within the band", "refused")
    assert trip.verdict == "within the band" or "MHz" in (trip.reason or "")


def test_the_command_finds_nothing_to_time_against_its_own_commit(torch: Any) -> None:
    from click.testing import CliRunner

    from flashladder.cli import main

    if machine.git_state()[1]:
        pytest.skip("tracked files differ from the commit")
    result = CliRunner().invoke(main, ["guard", "HEAD"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "rungs are the same" in result.output
