"""One screen on a rung, and the report's evidence, from records."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from flashladder import bottleneck, explain, figures, ladder, paths, report, tables
from flashladder.diagnose import Results, diagnose, load_results
from flashladder.model import KernelProfile, Metric, NcuRecord, Quote, Rung
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

REAL = ladder.load_ladder()
LADDER = dataclasses.replace(
    made.LADDER,
    rungs=tuple(
        msgspec.structs.replace(r, source=REAL[r.id].source, finding="of *this*" if r.id == "r03_warp_reduce" else None)
        for r in made.RUNGS
    ),
)
GRID = {"r02_grid": 256.0, "r03_warp_reduce": 16.0}


def _profile(arm: str) -> NcuRecord:
    metrics = {bottleneck.GRID: GRID[arm], bottleneck.DURATION: 1e-4, bottleneck.stall("barrier"): GRID[arm] / 100}
    metrics |= {bottleneck.DRAM_BYTES: 1e7, bottleneck.L2_BYTES: 4e7, bottleneck.TENSOR: 12.0}
    kernel = KernelProfile(name=arm, metrics={n: Metric(value=v, unit="") for n, v in metrics.items()})
    return NcuRecord(
        arm=arm, kind="rung", sha256=f"sha-{arm}", cell=made.REFERENCE, set="light", ncu="1", kernels=(kernel,)
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = made.write_run(tmp_path_factory.mktemp("explain"), [made.timing(made.REFERENCE)])
    for arm in GRID:
        run.append("ncu", _profile(arm))
    run.replace("diagnosis", diagnose(run, LADDER))
    return run


@pytest.fixture(scope="module")
def results(run: RunDir) -> Results:
    return load_results(run, LADDER)


def _explain(run: RunDir, results: Results, rung: str) -> str:
    return explain.explain(results, run.builds(), LADDER[rung], made.REFERENCE)


def test_a_screen_holds_change_outcome_source_counters_findings_and_next_step(run: RunDir, results: Results) -> None:
    text = _explain(run, results, "r03_warp_reduce")
    assert text.startswith("r03_warp_reduce: warp shuffles")
    assert "x r02_grid: 3." in text
    assert "9 to 10" in text
    assert "--- kernel/rungs/r02_grid.cu" in text
    assert "lines more" in text
    assert "launch__grid_size" in text
    assert "0.0625" in text  # 16 over 256
    assert "1. grid too small: launch__grid_size is 16.0, threshold 1.00; could save 88 % at most" in text
    assert text.endswith("next: more blocks: smaller tiles, split keys")


def test_what_was_not_measured_says_so(run: RunDir, results: Results) -> None:
    text = _explain(run, results, "r05_swizzle")
    assert "counters: not measured; 'flashladder profile' reads them" in text
    assert "no prediction" not in text
    assert _explain(run, results, "r00_naive").count(tables.NOT_MEASURED) >= 1


def test_the_report_shows_findings_cards_and_why_a_prediction_failed(run: RunDir) -> None:
    files = report.generate(run, LADDER)
    text = files["report.md"].decode()
    assert "## Bottlenecks" in text
    assert "grid too small" in text
    assert "### r03_warp_reduce\n\n**warp shuffles.**" in text
    assert "of \\*this\\*" in text
    assert {"stalls.svg", "pipes.svg", "roofline.svg", "calibration.pdf"} <= set(files)


def test_figures_of_counters_name_what_they_show_or_that_there_is_nothing(results: Results, tmp_path: Path) -> None:
    bare = made.results(tmp_path, [made.timing(made.REFERENCE)])
    for name in ("stalls", "pipes"):
        plot = figures.FIGURES[name]
        assert "r02_grid, r03_warp_reduce" in plot.alt(results)
        assert "nothing was profiled" in plot.alt(bare)
        assert plot.render(bare)["svg"] != plot.render(results)["svg"]
    assert figures.FIGURES["roofline"].alt(results).startswith("Roofline of 2 kernels")
    assert "nothing was profiled" in figures.FIGURES["roofline"].alt(bare)
    assert "4 steps" in figures.FIGURES["calibration"].alt(results)


def test_the_sources_that_a_screen_compares_exist() -> None:
    assert all((paths.ROOT / rung.source).exists() for rung in (*REAL.rungs, *REAL.variants))


def test_a_finding_quotes_the_counters_in_each_form_and_says_what_lacks() -> None:
    def profile(arm: str, value: float) -> NcuRecord:
        kernel = KernelProfile(name="k", metrics={"m": Metric(value=value, unit="inst")})
        return NcuRecord(
            arm=arm, kind="rung", sha256="aa", cell=made.REFERENCE, set="light", ncu="1", kernels=(kernel,)
        )

    results = Results([], made.LADDER, [profile("r04", 4.5e6), profile("r05", 3e6)])
    quotes = {
        "both": Quote(metric="m", digits=1, unit="M"),
        "was": Quote(metric="m", form="before", digits=0),
        "fall": Quote(metric="m", form="fall", digits=0),
        "times": Quote(metric="m", form="factor"),
        "lacks": Quote(metric="none", form="fall"),
    }
    text = "{both}; {was}; {fall}; {times}; {lacks}"
    rung = Rung(id="r05", source="s.cu", parent="r04", change="c", finding=text, quotes=quotes)
    assert tables.finding(results, rung) == "4.5 M to 3.0 M; 4500000; 33 %; 1.50; not measured"
