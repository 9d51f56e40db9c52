"""Run directories: append, resume after a cut-off record, clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashladder import eager, paths, rundir
from flashladder.errors import FlashladderError
from flashladder.model import Cell, CheckRecord, Shape
from tests.unit import synthetic as made

CELL = Cell(shape=Shape(batch=1, heads_q=1, heads_kv=1, seq_q=8, seq_k=8, head_dim=64), dtype="fp16", causal=False)


def _check(case: str, seed: int = 0) -> CheckRecord:
    return CheckRecord(arm="a", sha256=None, case=case, cell=CELL, status="pass", seed=seed)


def test_records_come_back_and_the_last_of_a_key_wins(tmp_path: Path) -> None:
    run = rundir.RunDir(tmp_path / "run")
    for record in (_check("x"), _check("y"), _check("x", seed=7)):
        run.append("check", record)
    assert run.checks() == [_check("x", seed=7), _check("y")]


def test_the_last_eager_calls_of_a_cell_win(tmp_path: Path) -> None:
    run = rundir.RunDir(tmp_path)
    assert run.eager() == []
    records = [made.eager_timing(eager.CELLS[0]), *(made.eager_timing(cell, "r02_grid") for cell in eager.CELLS)]
    for record in records:
        run.append("eager", record)
    assert run.eager() == records[1:]


def test_a_record_cut_off_by_an_interrupt_is_dropped(tmp_path: Path) -> None:
    run = rundir.RunDir(tmp_path)
    run.append("check", _check("x"))
    with (tmp_path / "check.jsonl").open("ab") as file:
        file.write(b'{"arm":"a","sha')
    assert run.checks() == [_check("x")]
    run.append("check", _check("y"))
    assert run.checks() == [_check("x"), _check("y")]


def test_a_broken_record_is_one_line_with_file_and_number(tmp_path: Path) -> None:
    run = rundir.RunDir(tmp_path)
    run.append("check", _check("x"))
    with (tmp_path / "check.jsonl").open("ab") as file:
        file.write(b'{"arm":3}\n')
    with pytest.raises(FlashladderError, match=r"check\.jsonl:2: not a valid record.*delete it or restore"):
        run.checks()


def test_an_unknown_run_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    (tmp_path / "h100" / "2026-full").mkdir(parents=True)
    (tmp_path / "h100" / "2026-full" / "run.json").write_text("{}")
    with pytest.raises(FlashladderError, match=r"no run 'nope'.*known runs: h100/2026-full"):
        rundir.find("nope")
    assert rundir.find("2026-full").path == tmp_path / "h100" / "2026-full"
    (tmp_path / "h200" / "2026-full").mkdir(parents=True)
    (tmp_path / "h200" / "2026-full" / "run.json").write_text("{}")
    with pytest.raises(FlashladderError, match=r"2 runs are called '2026-full'; name one of h100/2026-full, h200/2"):
        rundir.find("2026-full")


def test_no_pinned_run_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    with pytest.raises(FlashladderError, match="no run is pinned"):
        rundir.find()


def test_a_run_on_the_emulator_is_not_among_the_recorded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    for name in ("h100/2026-full", f"{rundir.EMULATED}/fifo-0-races"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    assert [run.path for run in rundir.recorded()] == [tmp_path / "h100" / "2026-full"]


def test_two_processes_lose_none_of_each_others_records(tmp_path: Path) -> None:
    """Without a lock a line that one is writing looks cut off to the other, which drops it."""
    program = (
        "import sys; from pathlib import Path; from flashladder.rundir import RunDir; "
        "from tests.unit.test_rundir import _check\n"
        "for n in range(200): RunDir(Path(sys.argv[1])).append('check', _check(sys.argv[2] + str(n) + 60000 * 'x'))"
    )
    both = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name], cwd=paths.ROOT) for name in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    assert len(rundir.RunDir(tmp_path).checks()) == 400


def test_a_byte_that_is_no_text_is_named_like_any_broken_record(tmp_path: Path) -> None:
    run = rundir.RunDir(tmp_path)
    run.append("check", _check("x"))
    file = tmp_path / "check.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"x"', b'"\xff"'))
    with pytest.raises(FlashladderError, match=r"check\.jsonl:1: not a valid record"):
        run.checks()


@pytest.mark.parametrize("name", ["a**b", "[", "*"])
def test_a_name_is_no_pattern(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    (tmp_path / "h100" / "2026-full").mkdir(parents=True)
    (tmp_path / "h100" / "2026-full" / "run.json").write_text("{}")
    with pytest.raises(FlashladderError, match="known runs: h100/2026-full"):
        rundir.find(name)
