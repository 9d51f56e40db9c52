"""The challenge loop with real proposers and referees: small programs that keep the contract, or break it."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from flashladder import brief, history, loop, rundir
from flashladder.cli import main
from flashladder.errors import EnvironmentInvalidError, Exit, FlashladderError
from flashladder.ladder import load_ladder
from flashladder.loop import Attempt, Budget, Champion, Folder, Loop, Progress
from flashladder.model import Ratio
from flashladder.search_commands import _proposer

CHAMPION = load_ladder().rungs[-1].id
REFEREE = """
import hashlib, json, pathlib, sys
file = pathlib.Path(sys.argv[1])
assert sys.argv[2:4] == ["--json", "--out"], sys.argv
assert sys.argv[5:7] == ["--budget", "100"], sys.argv
words = file.read_text().split()
verdict, ratio = words[1], float(words[2])
with open(file.parent.parent.parent / "judged", "a") as judged:
    judged.write(file.parent.name + " ")
cell = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
ratios = {} if verdict == "not" else {"b1h1s64d64-fp16-full": cell}
print(json.dumps({
    "verdict": "not timed" if verdict == "not" else verdict, "state": words[3], "reason": None, "ratios": ratios,
    "candidate": hashlib.sha256(file.read_bytes()).hexdigest(), "champion": "r23",
    "seconds": 30.0, "challenge": "1", "exit_code": 0,
}))
"""
"""Does what the candidate says: VERDICT RATIO STATE."""
PROPOSER = """
import json, pathlib, sys
brief = json.load(sys.stdin)
folder = pathlib.Path(brief["candidate"]).parent.parent.parent
with open(folder / "asked", "a") as asked:
    asked.write(str(brief["number"]) + " ")
words = sys.argv[brief["number"]:][:1]
if not words:
    sys.exit(3)
pathlib.Path(brief["candidate"]).write_text("// " + words[0])
print("tried", words[0])
"""
"""Proposes its arguments, one after the other."""


def _program(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(f"#!{sys.executable} -SE\n{text}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def _loop(
    tmp_path: Path, *words: str, budget: Budget | None = None, proposer: str = PROPOSER, referee: str = REFEREE
) -> Loop:
    first = tmp_path / "first.cu"
    first.write_text("// the first champion")
    return Loop(
        folder=Folder(tmp_path / "out"),
        proposer=(str(_program(tmp_path, "proposer", proposer)), *words),
        budget=budget or Budget(patience=100, build_failures=100),
        first=Champion(id=CHAMPION, file=str(first)),
        diagnosis=None,
        referee=(str(_program(tmp_path, "referee", referee)),),
        proposer_limit_s=20,
        referee_limit_s=20,
    )


def _run(started: Loop) -> tuple[Progress, list[Attempt], list[str]]:
    said: list[str] = []
    progress = started.run(said.append)
    return progress, started.folder.attempts(), said


# --- the course of a loop -------------------------------------------------------------------------------------------


def test_an_accepted_candidate_is_the_champion_until_another_is_and_gains_multiply(tmp_path: Path) -> None:
    started = _loop(tmp_path, "accepted 1.10 CONFIRM", "reverted 0.90 SCREEN", "accepted 1.20 CONFIRM")
    progress, attempts, said = _run(started)
    assert [a.outcome for a in attempts] == ["accepted", "reverted", "accepted"]
    assert (progress.accepted, progress.stopped) == (2, loop.NOTHING_LEFT)
    assert progress.gain == pytest.approx(1.32)
    champion = msgspec.json.decode((tmp_path / "out/champion.json").read_bytes(), type=Champion)
    assert champion.attempt == 3
    assert champion.gain == pytest.approx(1.32)
    assert Path(champion.file).read_text() == "// accepted 1.20 CONFIRM"
    assert attempts[0].note == "tried accepted 1.10 CONFIRM"
    assert said[1] == "attempt 1: accepted at CONFIRM, 1.1000 x [1.0900, 1.1100]"
    state = msgspec.json.decode((tmp_path / "out/state.json").read_bytes(), type=Progress)
    assert state == progress


def test_a_proposer_gets_champion_ledger_progress_and_budget(tmp_path: Path) -> None:
    _run(_loop(tmp_path, "accepted 1.10 CONFIRM", "reverted 0.90 SCREEN"))
    given = json.loads((tmp_path / "out/runs/0002/brief.json").read_text())
    assert given["champion"]["id"] == "attempt 1"
    assert given["ledger"][0]["outcome"] == "accepted"
    assert given["ledger"][0]["ratios"]["b1h1s64d64-fp16-full"]["ratio"] == 1.1
    assert (given["number"], given["protocol"], given["progress"]["attempts"]) == (2, 1, 1)
    assert Path(given["candidate"]).is_absolute()
    assert given["budget"]["patience"] == 100


def test_two_non_accepts_in_a_row_end_it_and_more_patience_goes_on(tmp_path: Path) -> None:
    words = (
        "reverted 0.99 MEASURE",
        "accepted 1.02 CONFIRM",
        "reverted 0.98 MEASURE",
        "not 1 CORRECT",
        "reverted 1.0 SCREEN",
    )
    progress, attempts, _ = _run(_loop(tmp_path, *words, budget=Budget()))
    assert len(attempts) == 4
    assert progress.stopped == "2 attempts in a row were not accepted (--patience 2)"
    progress, attempts, said = _run(_loop(tmp_path, *words, budget=Budget(patience=3)))
    assert said[0].endswith("4 attempts so far, the loop goes on")
    assert len(attempts) == 5
    assert (tmp_path / "out/asked").read_text() == "1 2 3 4 5 "


def test_three_build_failures_end_it(tmp_path: Path) -> None:
    words = [f"reverted {ratio} BUILD" for ratio in (1.0, 1.1, 1.2, 1.3)]
    progress, attempts, _ = _run(_loop(tmp_path, *words, budget=Budget(patience=100)))
    assert len(attempts) == 3
    assert progress.stopped == "3 candidates did not build (--build-failures 3)"


def test_not_timed_is_a_non_accept_and_costs_no_gpu_time(tmp_path: Path) -> None:
    started = _loop(tmp_path, "not 1 CORRECT", "reverted 0.9 SCREEN")
    started.on_gpu = True
    progress, attempts, said = _run(started)
    assert attempts[0].outcome == "not timed"
    assert attempts[0].ratio is None
    assert (progress.gpu_s, progress.rejected_in_a_row) == (30.0, 2)
    assert progress.wall_s > 60
    assert "attempt 1: not timed at CORRECT" in said


def test_the_same_file_again_is_not_judged_again(tmp_path: Path) -> None:
    _, attempts, _ = _run(_loop(tmp_path, "reverted 0.9 SCREEN", "reverted 0.9 SCREEN", "the first champion"))
    assert [a.reason for a in attempts[1:]] == ["the same file as attempt 1", "the same file as the champion"]
    assert (tmp_path / "out/judged").read_text() == "0001 "


@pytest.mark.parametrize(
    ("spent", "budget", "reason"),
    [
        ({"attempts": 5}, Budget(iterations=5), "the budget of 5 attempts is spent (--iterations)"),
        ({"wall_s": 120.0}, Budget(wall_s=120), "the budget of 2 minutes (--minutes) is spent: 2"),
        ({"gpu_s": 90.0}, Budget(gpu_s=60), "the budget of 1 GPU minutes (--gpu-minutes) is spent: 1.5"),
        ({"money": 3.0}, Budget(money=2.5, rate=1), "the budget of 2.5 money (--money) is spent: 3"),
        ({"gain": 1.8}, Budget(), "the champion reaches 90% of its roof; expected less than 90% to go on (--roof)"),
        ({"gain": 1.79, "attempts": 4, "wall_s": 59.0}, Budget(iterations=5, wall_s=60), None),
    ],
)
def test_every_budget_ends_the_loop_and_says_which(spent: dict[str, float], budget: Budget, reason: str | None) -> None:
    nothing = loop.progress_of([], budget)
    assert loop.stop_reason(msgspec.structs.replace(nothing, **spent), budget, 0.5) == reason


def test_money_runs_while_the_machine_is_held() -> None:
    attempt = Attempt(number=1, date="", outcome="reverted", proposer_s=1800.0, seconds=1800.0)
    assert loop.progress_of([attempt], Budget(rate=4.0)).money == 4.0


# --- what breaks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposer", "reason"),
    [
        ("raise ValueError('no idea')", "the proposer ended with exit code 1: ValueError: no idea"),
        ("pass", "the proposer wrote 0 candidates; expected one, candidate.cu or candidate.py"),
        (
            "for name in ('candidate.cu', 'candidate.py'): open(name, 'w').close()",
            "the proposer wrote 2 candidates; expected one, candidate.cu or candidate.py",
        ),
        ("import time; time.sleep(60)", "the proposer took longer than 0.3 s"),
    ],
)
def test_a_proposer_that_fails_is_a_non_accept_with_its_reason(tmp_path: Path, proposer: str, reason: str) -> None:
    started = _loop(tmp_path, proposer=proposer, budget=Budget(patience=1))
    started.proposer_limit_s = 0.3 if "sleep" in proposer else 20
    progress, attempts, _ = _run(started)
    assert (attempts[0].outcome, attempts[0].reason) == ("no candidate", reason)
    assert progress.rejected_in_a_row == 1


@pytest.mark.parametrize(
    ("referee", "outcome", "reason"),
    [
        ("import time; time.sleep(60)", "timeout", "the referee took longer than 0.3 s"),
        ("raise OSError('lost')", "no verdict", "the referee ended with exit code 1 and no verdict: OSError: lost"),
        ('print(\'{"verdict": "accepted"\')', "no verdict", "the referee ended with exit code 0 and no verdict"),
    ],
)
def test_a_referee_that_gives_no_verdict_accepts_nothing(
    tmp_path: Path, referee: str, outcome: str, reason: str
) -> None:
    started = _loop(tmp_path, "accepted 1.1 CONFIRM", referee=referee, budget=Budget(patience=1))
    started.referee_limit_s = 0.3 if "sleep" in referee else 20
    _, (attempt,), _ = _run(started)
    assert attempt.outcome == outcome
    assert (attempt.reason or "").startswith(reason)
    assert msgspec.json.decode((tmp_path / "out/champion.json").read_bytes(), type=Champion) == started.first


def _command(started: Loop) -> list[str]:
    program = (
        "import sys; from pathlib import Path; from flashladder.loop import *; "
        "Loop(folder=Folder(Path(sys.argv[1])), proposer=tuple(sys.argv[5:]), budget=Budget(patience=9), "
        "first=Champion(id=sys.argv[4], file=sys.argv[2]), referee=(sys.argv[3],), diagnosis=None).run(print)"
    )
    paths = (str(started.folder.path), started.first.file, *started.referee, started.first.id)
    return [sys.executable, "-c", program, *paths, *started.proposer]


@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_9_loses_neither_proposal_nor_verdict(tmp_path: Path, when: str) -> None:
    """The referee kills its loop, once, before it has judged or after it has printed its verdict."""
    kill = (
        "\nimport os, signal, sys; sys.stdout.flush(); flag = os.path.join(os.path.dirname(sys.argv[1]), 'killed')\n"
        "if not os.path.exists(flag):\n    open(flag, 'w').close(); os.kill(os.getppid(), signal.SIGKILL)"
    )
    exit_too = "; sys.exit()\n" if when == "before" else ""
    referee = kill + exit_too + REFEREE if when == "before" else REFEREE + kill
    started = _loop(tmp_path, "accepted 1.1 CONFIRM", referee=referee)
    killed = subprocess.run(_command(started), capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert started.folder.attempts() == []
    _wait_until_free(started.folder)
    progress, (attempt,), _ = _run(started)
    assert (attempt.outcome, progress.accepted) == ("accepted", 1)
    assert (tmp_path / "out/asked").read_text() == "1 2 "
    assert (tmp_path / "out/judged").read_text() == "0001 "


def _wait_until_free(folder: Folder) -> None:
    for _ in range(200):
        try:
            with folder.held():
                return
        except FlashladderError:
            time.sleep(0.05)
    raise AssertionError("the folder stays held")


def test_a_referee_that_outlives_its_loop_keeps_a_second_one_out(tmp_path: Path) -> None:
    referee = (
        "import os, signal, sys, time; os.kill(os.getppid(), signal.SIGKILL)\n"
        "while not os.path.exists(os.path.join(os.path.dirname(sys.argv[1]), 'go')): time.sleep(0.02)"
    )
    started = _loop(tmp_path, "accepted 1.1 CONFIRM", referee=referee)
    subprocess.run(_command(started), capture_output=True, timeout=60)
    try:
        with pytest.raises(FlashladderError, match="the last challenge of one that was killed, runs in"):
            started.run(print)
    finally:
        (tmp_path / "out/runs/0001/go").touch()
    _wait_until_free(started.folder)


def test_a_line_that_is_no_attempt_or_is_missing_is_named_and_nothing_is_guessed(tmp_path: Path) -> None:
    started = _loop(tmp_path, "accepted 1.1 CONFIRM", "reverted 0.9 SCREEN")
    _run(started)
    ledger = tmp_path / "out/ledger.jsonl"
    first, second = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(first.replace(b"accepted", b"excepted") + second)
    with pytest.raises(FlashladderError, match=r"ledger.jsonl:1: no attempt: Invalid enum value"):
        started.run(print)
    ledger.write_bytes(second)
    with pytest.raises(FlashladderError, match=r"ledger.jsonl:1: attempt 2, expected 1; a line is missing"):
        started.run(print)
    ledger.write_bytes(first + second[:40])
    assert len(started.folder.attempts()) == 1
    _, attempts, _ = _run(started)
    assert [a.number for a in attempts] == [1, 2]
    assert (tmp_path / "out/asked").read_text() == "1 2 3 3 "


@contextmanager
def _small_files(most: int) -> Iterator[None]:
    """As a full disk: no file grows above `most` bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_is_one_clear_line_and_leaves_the_ledger_whole(tmp_path: Path) -> None:
    started = _loop(tmp_path, "accepted 1.1 CONFIRM")
    _, (attempt,), _ = _run(started)
    ledger = tmp_path / "out/ledger.jsonl"
    before = ledger.read_bytes()
    with _small_files(len(before) + 10), pytest.raises(EnvironmentInvalidError, match=r"make room, then run the same"):
        started.folder.append(msgspec.structs.replace(attempt, number=2))
    assert ledger.read_bytes() == before
    assert len(started.folder.attempts()) == 1


# --- what a run says of the champion --------------------------------------------------------------------------------


def test_the_diagnosis_is_the_pinned_runs_champion_with_its_share_of_the_roof_and_findings() -> None:
    found = brief.diagnosis_of(rundir.find(), load_ladder(), CHAMPION)
    assert found is not None
    assert found.rung == CHAMPION
    assert found.config["tile_m"] == 256
    assert found.roof_share is not None
    assert 0.4 < found.roof_share < 0.9
    assert any(cell.findings for cell in found.cells.values())


def test_the_history_is_the_same_bytes_twice_and_shows_attempts_without_a_time() -> None:
    ratio = Ratio(ratio=1.1, low=1.05, high=1.15)
    attempts = [
        Attempt(number=1, date="", outcome="accepted", ratios={"a": ratio}),
        Attempt(number=2, date="", outcome="reverted", geomean=Ratio(ratio=0.9, low=0.8, high=1.0)),
        Attempt(number=3, date="", outcome="not timed"),
    ]
    assert attempts[0].ratio is not None
    assert attempts[0].ratio.low == pytest.approx(1.05)
    assert history.plot(attempts) == history.plot(list(attempts))
    assert b"<svg" in history.plot([])


# --- the command ----------------------------------------------------------------------------------------------------


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["loop", *arguments], catch_exceptions=False)


def test_the_command_runs_a_proposer_and_says_how_it_ended(tmp_path: Path) -> None:
    started = _loop(tmp_path)
    options = ("--out", str(tmp_path / "out"), "--referee", started.referee[0])
    result = _invoke(*options, started.proposer[0], "not 1 CORRECT", "reverted 0.9 SCREEN", "accepted 1.1 CONFIRM")
    assert result.exit_code == Exit.KILLED
    assert result.output.startswith("No GPU here: no candidate can be timed, so none is accepted")
    assert "2 attempts, 0 accepted, gain 1.0000" in result.output
    assert "stopped: 2 attempts in a row were not accepted (--patience 2)" in result.output
    assert (tmp_path / "out/history.svg").read_bytes().startswith(b"<?xml")
    given = json.loads((tmp_path / "out/runs/0001/brief.json").read_text())
    assert given["diagnosis"]["rung"] == given["champion"]["id"] == CHAMPION
    assert os.path.exists(given["champion"]["file"])  # noqa: PTH110


def test_it_begins_with_the_rung_that_is_named_and_tells_the_referee(tmp_path: Path) -> None:
    referee = REFEREE + "\nopen(os.path.join(os.path.dirname(sys.argv[1]), 'told'), 'w').write(' '.join(sys.argv))\n"
    started = _loop(tmp_path, referee="import os, sys\n" + referee)
    options = ("--out", str(tmp_path / "out"), "--referee", started.referee[0], "--first", "r21", "--patience", "1")
    _invoke(*options, started.proposer[0], "reverted 0.9 SCREEN")
    given = json.loads((tmp_path / "out/runs/0001/brief.json").read_text())
    assert given["diagnosis"]["rung"] == given["champion"]["id"] == "r21_stale_max"
    assert "--first r21_stale_max" in (tmp_path / "out/runs/0001/told").read_text()
    result = CliRunner().invoke(main, ["loop", *options[:4], "--first", "r99", started.proposer[0]])
    assert result.exit_code == Exit.USAGE
    assert "r99" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nobody",), "nobody is no executable; expected one, or 'search'"),
        (("true", "--money", "3"), "--money needs --rate: what the machine costs an hour"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = _invoke("--out", str(tmp_path / "out"), *arguments)
    assert result.exit_code == Exit.USAGE
    assert result.output == f"flashladder: {message}\n"


def test_a_verdict_that_was_printed_counts_though_the_referee_does_not_end(tmp_path: Path) -> None:
    referee = REFEREE + "\nimport time; sys.stdout.flush(); time.sleep(60)"
    started = _loop(tmp_path, "accepted 1.1 CONFIRM", referee=referee, budget=Budget(patience=1, iterations=100))
    started.referee_limit_s = 3
    _, attempts, _ = _run(started)
    assert attempts[0].outcome == "accepted"


def test_a_proposal_that_cannot_be_read_is_asked_for_again(tmp_path: Path) -> None:
    started = _loop(tmp_path, "accepted 1.1 CONFIRM", budget=Budget(patience=1))
    run = started.folder.path / loop.RUNS / "0001"
    run.mkdir(parents=True)
    (run / loop.PROPOSED).write_bytes(b"{")
    _, attempts, _ = _run(started)
    assert attempts[0].outcome == "accepted"


def test_a_proposer_that_is_a_link_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment's python is a link; what it points to has none of its packages."""
    (tmp_path / "proposer").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _proposer(("proposer", "x")) == (str(tmp_path / "proposer"), "x")
