"""The loop on a GPU with the real referee: a wrong kernel is reverted, and a worse one is no champion."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from flashladder import paths
from flashladder.cli import main
from flashladder.ladder import load_ladder
from flashladder.loop import NOTHING_LEFT, Budget, Champion, Folder, Loop

pytestmark = pytest.mark.children_time


@pytest.mark.skipif("challenge" not in main.commands, reason="no referee")
def test_a_slower_rung_is_reverted_with_a_ratio_and_a_file_that_does_not_build_without(
    torch: Any, tmp_path: Path
) -> None:
    ladder = load_ladder()
    slow = (paths.ROOT / ladder["r11_cp_async"].source).read_text().replace("r11_cp_async", "candidate")
    (tmp_path / "1.cu").write_text(slow)
    (tmp_path / "2.cu").write_text(slow.replace("#include", "#error\n#include"))
    program = tmp_path / "proposer"
    program.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\nbrief = json.load(sys.stdin)\n"
        f"file = pathlib.Path({str(tmp_path)!r}) / f\"{{brief['number']}}.cu\"\n"
        "if not file.exists():\n    sys.exit(3)\npathlib.Path(brief['candidate']).write_text(file.read_text())\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    last = ladder.rungs[-1]
    started = Loop(
        folder=Folder(tmp_path / "out"),
        proposer=(str(program),),
        budget=Budget(patience=10),
        first=Champion(id=last.id, file=str(paths.ROOT / last.source)),
        diagnosis=None,
    )
    progress = started.run(print)
    slower, broken = started.folder.attempts()
    assert (slower.outcome, broken.outcome) == ("reverted", "reverted")
    assert slower.ratio is not None
    assert slower.ratio.high < 1
    assert broken.is_build_failure
    assert (progress.accepted, progress.stopped) == (0, NOTHING_LEFT)
