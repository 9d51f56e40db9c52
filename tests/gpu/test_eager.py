"""`flashladder eager` on a GPU: what it records is valid, of the library that attention calls, and in a sound order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashladder import eager, fastest, machine
from flashladder.cli import main
from flashladder.ladder import load_ladder
from flashladder.rundir import RunDir, sha256_of
from flashladder.validate import validate

pytestmark = pytest.mark.children_time


def test_the_command_records_valid_calls_of_every_arm(torch: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    done = CliRunner().invoke(main, ["eager", "--out", str(run.path)], catch_exceptions=False)
    print(done.output)
    assert done.exit_code == 0
    assert [str(fault) for fault in validate(run, load_ladder(), sealed=False).faults] == []
    assert [r.cell for r in run.eager()] == list(eager.CELLS)
    arch = machine.gpu_arch()
    assert arch is not None
    for record in run.eager():
        assert (record.rung, record.sha256) == (fastest.rung(arch).id, sha256_of(fastest.library(arch)))
        for arm in eager.ONE_ELEMENT:
            assert eager.ratio(record, arm, "nothing")[0] > 1
        assert eager.ratio(record, "attention", "kernel")[0] > 1
