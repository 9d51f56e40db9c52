"""Every leave-one-out variant on the CPU. As slow as the ladder itself, so with the mutants: `nox -s mutants`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashladder import ablation, emulation
from flashladder.emulator.device import Options
from flashladder.ladder import load_ladder


@pytest.mark.mutants
@pytest.mark.parametrize("variant", [v.id for v in load_ladder().variants])
def test_a_variant_is_right_and_free_of_races(variant: str, tmp_path: Path) -> None:
    session = emulation.open_check(ablation.Selection(rungs=(variant,), out=tmp_path), Options())
    session.build()
    records = session.check()
    session.raise_on_failures()
    assert sum(r.status == "pass" for r in records) > 50
