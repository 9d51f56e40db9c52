"""Every leave-one-out variant on the CPU. As slow as the ladder itself, so with the mutants: `nox -s mutants`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashladder import ablation, emulation, paths
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


def test_the_polynomial_of_software_exp2_keeps_thirteen_bits_and_the_ends() -> None:
    program = paths.ROOT / "tests" / "emulated" / "exp2_polynomial.cu"
    done = subprocess.run([sys.executable, "-m", "flashladder", "emulate", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    worst, *ends = done.stdout.split()
    assert 0 < float(worst) < 2**-13
    assert ends == ["0", "0", "0", "inf", "inf", "nan"]
