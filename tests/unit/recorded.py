"""The recorded runs that tests hold the repository to."""

from __future__ import annotations

import pytest

from flashladder import paths
from flashladder.rundir import RunDir


def profiled() -> RunDir:
    """The last run with counters: findings quote it, whichever run is pinned."""
    runs = [RunDir(file.parent) for file in paths.RESULTS.glob("*/*/ncu.jsonl")]
    if not runs:
        pytest.skip("no run has counters")
    return max(runs, key=lambda run: run.info.date)
