"""Figures: the same bytes each time, whatever the records lack and wherever they are drawn."""

from __future__ import annotations

import hashlib
import html
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from flashladder.diagnose import Results, diagnose
from flashladder.figures import FIGURES
from flashladder.model import ArmTiming, CellTiming
from tests.unit import synthetic as made

replace = msgspec.structs.replace
SVG = "{http://www.w3.org/2000/svg}"

DRAW_IN_ANOTHER_PROCESS = """
import hashlib, sys
from pathlib import Path
from tests.unit import synthetic as made
from flashladder.figures import FIGURES
results = made.results(Path(sys.argv[1]), [made.timing(cell) for cell in made.FEW_CELLS])
for name in ("ladder", "calibration"):
    for form, data in FIGURES[name].render(results).items():
        print(name, form, hashlib.sha256(data).hexdigest())
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made.results(tmp_path_factory.mktemp("run"))


def fail(arm: ArmTiming, reason: str = "it does not run") -> ArmTiming:
    return replace(arm, status="failed", reason=reason, ns=(), blocks=())


def drawn(results: Results, name: str) -> bytes:
    return FIGURES[name].render(results, ("svg",))["svg"]


def texts(svg: bytes) -> set[str]:
    """The text of an SVG whose letters are paths: matplotlib leaves it in comments."""
    return {html.unescape(text) for text in re.findall(r"<!-- (.*?) -->", svg.decode(), re.DOTALL)}


def test_another_process_without_a_home_draws_the_same_bytes(tmp_path: Path) -> None:
    results = made.results(tmp_path / "here", [made.timing(cell) for cell in made.FEW_CELLS])
    here = {
        f"{name} {form} {hashlib.sha256(data).hexdigest()}"
        for name in ("ladder", "calibration")
        for form, data in FIGURES[name].render(results).items()
    }
    environment = {"HOME": "/proc/none", "MPLCONFIGDIR": "/proc/none", "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    script = [sys.executable, "-W", "error", "-c", DRAW_IN_ANOTHER_PROCESS, str(tmp_path / "there")]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        script, env={**os.environ, **environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert set(done.stdout.splitlines()) == here


@pytest.mark.parametrize("name", list(FIGURES))
def test_the_last_bits_of_a_layout_do_not_show(results: Results, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, lay_out = FIGURES[name].render(results), ConstrainedLayoutEngine.execute

    def nudged(engine: ConstrainedLayoutEngine, figure: Figure) -> None:
        lay_out(engine, figure)
        for axes in figure.axes:
            x, y, width, height = axes.get_position(original=True).bounds
            axes.set_position((x * (1 + 1e-12), y, width, height))

    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", nudged)
    assert FIGURES[name].render(results) == usual


@pytest.mark.parametrize("name", list(FIGURES))
def test_figures_carry_no_date_and_have_a_title(results: Results, name: str) -> None:
    svg, pdf = FIGURES[name].render(results).values()
    assert ET.fromstring(svg).findtext(f"{SVG}title") == FIGURES[name].alt(results)
    assert b"Date" not in svg
    assert b"CreationDate" not in pdf
    assert pdf.startswith(b"%PDF")


def test_the_ladder_names_every_rung_its_step_and_the_baseline(results: Results) -> None:
    words = texts(drawn(results, "ladder"))
    assert {rung.id for rung in made.RUNGS} <= words
    assert "failed" in words
    assert any(word.endswith("\u00d71.74") for word in words)
    assert any(word.startswith(f"{made.BASELINE}  ") for word in words)
    assert any("(us, log scale)" in word for word in words)


def test_the_alt_text_gives_the_times(results: Results) -> None:
    alt = FIGURES["ladder"].alt(results)
    assert "r05_swizzle 85.0 us" in alt
    assert "r04" not in alt


def test_scaling_has_a_panel_for_each_head_dimension_and_mask(results: Results) -> None:
    words = texts(drawn(results, "scaling"))
    assert {"head dim 64, full", "head dim 64, causal", "head dim 128, full", "TFLOP/s, fp16"} <= words
    assert {"r05_swizzle", made.BASELINE, "sdpa_flash", "other rungs", "not timed"} <= words
    assert not any("#" in word for word in words)
    assert "sdpa_math" not in words


def everything_fails() -> list[CellTiming]:
    timings = [made.timing(made.REFERENCE), made.timing(made.HEADLINE[0])]
    return [replace(t, arms=tuple(map(fail, t.arms))) for t in timings]


@pytest.mark.parametrize("name", list(FIGURES))
@pytest.mark.parametrize(
    "timings",
    [
        pytest.param([], id="nothing timed"),
        pytest.param([made.timing(made.REFERENCE)], id="no headline"),
        pytest.param([made.timing(made.HEADLINE[0])], id="one point, no reference"),
        pytest.param([made.timing(c, arms=("r02_grid", "r05_swizzle")) for c in made.CELLS], id="no peers"),
        pytest.param([made.timing(c, arms=("r02_grid",)) for c in made.CELLS], id="one rung"),
        pytest.param([made.timing(c, arms=(made.BASELINE,)) for c in made.CELLS], id="no rung"),
        pytest.param(everything_fails(), id="everything failed"),
        pytest.param([made.timing(c, blocks=8) for c in made.CELLS], id="insufficient samples"),
    ],
)
def test_figures_cope_with_what_is_missing(tmp_path: Path, name: str, timings: list[CellTiming]) -> None:
    results = made.results(tmp_path, timings)
    ET.fromstring(drawn(results, name))
    assert FIGURES[name].alt(results)


def test_a_step_that_is_not_established_says_so(tmp_path: Path) -> None:
    baseline = next(arm for arm in made.timing(made.REFERENCE).arms if arm.arm == "r03_warp_reduce")
    copy = partial(lambda other, arm: replace(arm, ns=other.ns), baseline)
    timing = made.with_arm(made.timing(made.REFERENCE), "r05_swizzle", copy)
    assert any(word.endswith("\u00d71.00 (same)") for word in texts(drawn(made.results(tmp_path, [timing]), "ladder")))


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    timing = made.timing(made.HEADLINE[0])
    nasty = r"sdpa_$\nomath$ & <b>"
    renamed = made.with_arm(timing, "sdpa_math", lambda arm: replace(arm, arm=nasty))
    flash = next(arm for arm in timing.arms if arm.arm == "sdpa_flash")
    timed = made.with_arm(renamed, nasty, lambda arm: replace(flash, arm=nasty))
    run = made.write_run(
        tmp_path, [timed], check_records=[*made.checks(), replace(made.check("sdpa_flash"), arm=nasty)]
    )
    assert nasty in texts(drawn(Results(diagnose(run, made.LADDER), made.LADDER), "scaling"))
