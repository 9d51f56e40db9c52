"""Leave-one-out variants, the option of lower precision, peers, the roof, input values: from records to tables."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flashladder import figures, report, tables
from flashladder.diagnose import Results, diagnose
from flashladder.ladder import value_cells
from flashladder.model import ArmTiming, CellTiming, Roof, Rung, Slack
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

VARIANT = Rung(
    id="v05_no_swizzle",
    source="v05.cu",
    parent="r05_swizzle",
    change="no | swizzle",
    kind="variant",
    predictions=(made.RUNGS[4].predictions[0],),
)
OPTION = msgspec.structs.replace(
    VARIANT, id="v05_half", change="fp16 sums", score_limit=65504.0, slack=Slack(o=2.0, lse=32.0)
)
LADDER = dataclasses.replace(
    made.LADDER, variants=(VARIANT, OPTION), variant_shapes={"r05_swizzle": (made.REFERENCE.shape.id,)}
)
FACTORS = {VARIANT.id: 2.0, OPTION.id: 1.0}


def _with_variants(timing: CellTiming) -> CellTiming:
    if not LADDER.has_variant_at(VARIANT, timing.cell.shape):
        return timing
    parent = next(arm for arm in timing.arms if arm.arm == "r05_swizzle")
    added = tuple(_slower(parent, name, factor) for name, factor in FACTORS.items())
    return msgspec.structs.replace(timing, arms=(*timing.arms, *added))


def _slower(arm: ArmTiming, name: str, factor: float) -> ArmTiming:
    noise = np.random.default_rng(1).normal(1, 1e-3, (len(arm.ns), 2))
    ns = tuple((float(a * factor * x), float(b * factor * y)) for (a, b), (x, y) in zip(arm.ns, noise, strict=True))
    return msgspec.structs.replace(arm, arm=name, kind="variant", sha256=f"sha-{name}", ns=ns)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    path: Path = tmp_path_factory.mktemp("variants")
    timings = [_with_variants(made.timing(cell, i)) for i, cell in enumerate(made.FEW_CELLS)]
    passed = [msgspec.structs.replace(made.check(name), sha256=f"sha-{name}") for name in FACTORS]
    refused = msgspec.structs.replace(passed[1], case="huge", status="unsupported", errors=None, limits=None)
    builds = [made.build(rung) for rung in (*made.RUNGS, VARIANT, OPTION)]
    run = made.write_run(path, timings, builds=builds, check_records=[*made.checks(), *passed, refused])
    for dtype, rate in (("fp16", 660.0), ("bf16", 680.0)):
        ns = tuple(2 * 8192**3 / rate / 1e3 * x for x in (0.99, 1.0, 1.0, 1.0, 1.0, 1.0, 1.01))
        run.append("roof", Roof(dtype=dtype, size=8192, gpu_digest=None, ns=ns, sm_clock_mhz=(None,) * 7))  # type: ignore[arg-type]
    run.replace("diagnosis", diagnose(run, LADDER))
    return run


@pytest.fixture(scope="module")
def results(run: RunDir) -> Results:
    return Results(run.diagnosis(), LADDER)


def test_a_variant_is_compared_with_its_parent_alone_and_apart_from_the_ladder(results: Results) -> None:
    assert results.variants == tuple(FACTORS)
    assert VARIANT.id not in results.rungs
    (found,) = results.comparisons(made.REFERENCE, VARIANT.id).values()
    assert (found.other, found.relation, found.correction, found.verdict) == ("r05_swizzle", "parent", "holm", "slower")
    assert found.ratio == pytest.approx(0.5, rel=0.01)
    without = Results(_diagnosis_without_variants(results), made.LADDER)
    step = results.comparison(made.REFERENCE, "r05_swizzle", "r03_warp_reduce")
    assert step is not None
    assert step == without.comparison(made.REFERENCE, "r05_swizzle", "r03_warp_reduce")


def _diagnosis_without_variants(results: Results) -> list:  # type: ignore[type-arg]
    arms = [a for c in results.cells for a in results.arms(c) if a.kind != "variant"]
    steps = [x for c in results.cells for a in results.arms(c) for x in results.comparisons(c, a.arm).values()]
    return [*arms, *(x for x in steps if x.arm not in FACTORS)]


def test_variants_are_recorded_at_their_shapes_alone(results: Results) -> None:
    assert results.arm(made.REFERENCE, VARIANT.id) is not None
    assert results.arm(made.HEADLINE[0], VARIANT.id) is None


def test_the_table_has_a_column_for_each_cell_with_variants(results: Results) -> None:
    table = tables.leave_one_out(results, "r05_swizzle")
    assert table.columns == ("variant", "change", "B2 H8 S512 D64 full")
    assert [row[0] for row in table.rows] == list(FACTORS)
    assert table.rows[0][2].startswith("0.50")
    assert table.rows[0][2].endswith(" slower")
    assert table.rows[1][2].endswith(" same")
    assert r"no \| swizzle" in tables.markdown(table)


def test_a_variants_prediction_is_judged(results: Results) -> None:
    outcomes = {p.rung: p.outcome for p in results.predictions}
    assert outcomes[VARIANT.id] == "refuted"
    assert outcomes[OPTION.id] == "confirmed"


def test_the_options_accuracy_stands_beside_its_parents(run: RunDir) -> None:
    table = tables.accuracy(run.checks(), LADDER)
    assert table.rows == (
        ("v05_half", "fp16", "up to 64", "1", "1", "0.001", "1e-06"),
        ("r05_swizzle", "fp16", "up to 64", "-", "1", "0.001", "1e-06"),
    )


def test_the_accuracy_of_an_option_whose_parent_crashed_is_shown_alone(run: RunDir) -> None:
    """One that crashes has no record of the cases after that."""
    table = tables.accuracy([r for r in run.checks() if r.arm != "r05_swizzle"], LADDER)
    assert [row[:1] + row[3:5] for row in table.rows] == [("v05_half", "1", "1"), ("r05_swizzle", "-", "0")]


def test_the_roof_is_a_rate_with_an_interval(results: Results) -> None:
    rows = tables.roofs(results).rows
    assert [row[:2] for row in rows] == [("fp16", "8192 x 8192 x 8192"), ("bf16", "8192 x 8192 x 8192")]
    assert rows[0][2].startswith("660 [")


def test_times_by_values_are_ratios_with_intervals_and_the_worst_is_named(run: RunDir, tmp_path: Path) -> None:
    cells = value_cells()
    timings = [
        made.value_timing("r05_swizzle", cell, "huge", 1.2 if number == 1 else 1) for number, cell in enumerate(cells)
    ]
    unsound = msgspec.structs.replace(timings[0], values="cliff", ns=(), normal_ns=(), reason="failed: wrong")
    unchecked = msgspec.structs.replace(timings[0], sha256="sha-of-another", values="sharp")
    other = made.write_run(tmp_path, [made.timing(made.REFERENCE)])
    for record in (*timings, unsound, unchecked):
        other.append("values", record)
    other.replace("diagnosis", diagnose(other, made.LADDER))
    table = tables.values(Results(other.diagnosis(), made.LADDER), "r05_swizzle")
    assert table.columns[:2] == ("values", "B2 H16 S4096 D64 full")
    assert [row[0] for row in table.rows] == ["normal", "huge", "cliff"]
    assert [float(us) for us in table.rows[0][1:-1]] == pytest.approx([1000] * len(cells), rel=0.01)
    assert re.fullmatch(r"\d{4}, x 1\.20 \[1\.\d\d, 1\.\d\d\]", table.rows[1][2])
    assert table.rows[1][-1] == "1.20"
    assert table.rows[2][1:] == ("failed: wrong", *(tables.NOT_MEASURED,) * len(cells))
    text = report.generate(other, made.LADDER, draw=False)["report.md"].decode()
    assert "## Times by input values" in text
    assert "### r05_swizzle\n\n| values " in text
    assert "## Times by input values" not in report.generate(run, LADDER, draw=False)["report.md"].decode()


def test_the_figure_shows_every_timed_variant_and_says_when_there_is_none(
    run: RunDir, results: Results, tmp_path: Path
) -> None:
    plot = figures.FIGURES["leave_one_out"]
    assert plot.alt(results) == "Speed of 2 variants relative to their parent in 1 cells."
    assert plot.render(results)["svg"] == plot.render(results)["svg"]
    later = msgspec.structs.replace(VARIANT, id="v03_later", parent="r03_warp_reduce")
    declared = dataclasses.replace(LADDER, variants=(*LADDER.variants, later))
    more = Results(run.diagnosis(), declared)
    assert plot.alt(more) == plot.alt(results)
    assert plot.render(more)["svg"] == plot.render(results)["svg"]
    bare = made.results(tmp_path, [made.timing(made.REFERENCE)])
    assert plot.alt(bare) == "No variant was timed."
    assert plot.render(bare)["svg"]


def test_a_run_of_an_earlier_ladder_says_so(run: RunDir) -> None:
    assert "earlier ladder" not in report.generate(run, LADDER, draw=False)["report.md"].decode()
    now = msgspec.structs.replace(VARIANT, changes=("swizzle",))
    text = report.generate(run, dataclasses.replace(LADDER, variants=(now,)), draw=False)["report.md"].decode()
    assert "v05_no_swizzle: its Config differs from r05_swizzle's in [], its declaration says ['swizzle']" in text
    assert "v05_half: no longer declared, not shown" in text


def test_peers_say_what_they_are_and_how_fast_over_shared_cells(run: RunDir, results: Results) -> None:
    rows = {row[0]: row for row in tables.peers(results, run.info).rows}
    assert rows["sdpa_default"][4] == "-"
    assert rows["sdpa_math"][3] == "0 of 2"
    assert rows["sdpa_math"][4] == tables.NOT_MEASURED
    assert rows["sdpa_flash"][2] == "unknown"
    assert 0.5 < float(rows["sdpa_flash"][4]) < 1
    machine = msgspec.structs.replace(run.info.machine, peers={"torch": "2.11.0"})
    named = tables.peers(results, msgspec.structs.replace(run.info, machine=machine))
    assert named.rows[0][2] == "torch 2.11.0"
    times = tables.peer_times(results)
    assert times.columns[:4] == ("shape", "mask", "dtype", "sdpa_default")
    assert "not installed" in times.rows[0]
