"""Rows and their escapes."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashladder import tables
from flashladder.diagnose import Results, load_results
from flashladder.model import ArmTiming, Machine, RunInfo
from flashladder.rundir import RunDir
from flashladder.tables import Table
from tests.unit import synthetic as made

replace = msgspec.structs.replace

NASTY = "a|b_c%$#&{}~^\\<> *x* `y` __z__ [l](u)"
TEXT = st.text(alphabet="ab1 |_%$#&{}~^\\<>*`[]()!-", max_size=30)
PUNCTUATION = re.escape("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return made.diagnosed(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def results(run: RunDir) -> Results:
    return load_results(run, made.LADDER)


def rows_of(table: Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


# --- formats ---


def cells_of(line: str) -> list[str]:
    """The cells of a GitHub table row: an escaped character is no delimiter, and `\\|` is a pipe."""
    body = line.strip().removeprefix("|").removesuffix("|")
    cells = re.findall(rf"((?:\\[{PUNCTUATION}]|[^|])*)\|?", body)
    return [cell.strip() for cell in cells if cell]


def shown(markdown: str) -> str:
    """What CommonMark shows of text that has no markup but backslash escapes."""
    return re.sub(rf"\\([{PUNCTUATION}])", r"\1", markdown)


def test_a_nasty_name_stays_one_markdown_cell_and_shows_as_it_is() -> None:
    line = tables.markdown(Table(("h|1", "h2"), ((NASTY, "next"),))).splitlines()
    assert [shown(cell) for cell in cells_of(line[0])] == ["h|1", "h2"]
    assert [shown(cell) for cell in cells_of(line[2])] == [NASTY, "next"]


@given(TEXT)
def test_markdown_escape_is_undone_by_showing_and_leaves_no_markup(text: str) -> None:
    escaped = tables.markdown_escape(text)
    assert shown(escaped) == tables.one_line(text)
    unescaped = re.sub(rf"\\[{PUNCTUATION}]", ".", escaped)
    assert not re.search(r"[`*<>|~$&\\]|\](?=[\[(:])|(?<![^\W_])_|_(?![^\W_])", unescaped)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("r05_swizzle", "r05_swizzle"),
        ("_x_", r"\_x\_"),
        ("a__b", r"a\_\_b"),
        ("1.5 [1.4, 1.6] faster", "1.5 [1.4, 1.6] faster"),
        ("[a](b)", r"[a\](b)"),
        ("two\nlines", "two lines"),
        ("<script>", r"\<script\>"),
    ],
)
def test_markdown_escapes_only_what_must_be(text: str, escaped: str) -> None:
    assert tables.markdown_escape(text) == escaped


def test_latex_table_escapes_every_special() -> None:
    text = tables.latex(Table(("%",), ((NASTY,),)))
    assert r"a|b\_c\%\$\#\&\{\}\textasciitilde{}\^{}\textbackslash{}\ensuremath{<}\ensuremath{>}" in text
    assert text.splitlines()[0] == r"\begin{tabular}{l}"
    assert r"\toprule" in text


@given(TEXT)
def test_latex_escape_leaves_no_special(text: str) -> None:
    escaped = tables.latex_escape(text)
    known = r"\\textasciitilde\{\}|\\textbackslash\{\}|\\ensuremath\{[<>]\}|\\\^\{\}|\\[_%$#&{}]"
    assert not re.search(r"[_%$#&{}~^\\<>]", re.sub(known, "", escaped))


def test_numeric_text_is_not_reformatted() -> None:
    table = Table(("a",), (("1.50",), ("007",), ("1e5",)))
    assert [cells_of(line)[0] for line in tables.markdown(table).splitlines()[2:]] == ["1.50", "007", "1e5"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123456, "0.0123"),
        (1, "1.00"),
        (9.87654, "9.88"),
        (99.96, "100.0"),
        (1234.5, "1234"),
        (-2.5, "-2.50"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert tables.number(value) == text


def test_intervals_share_the_decimals_of_the_value() -> None:
    assert tables.interval(1.5, (1.4, 10.25)) == "1.50 [1.40, 10.25]"


# --- the ladder ---


def test_ablation_has_a_row_for_every_rung_in_order_then_the_peers(run: RunDir, results: Results) -> None:
    table = tables.ablation(results, run.builds(), run.info)
    names = [row[0] for row in table.rows]
    assert names[:6] == [rung.id for rung in made.RUNGS]
    assert names[6] == made.BASELINE
    assert set(names[6:]) == {made.BASELINE, "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"}


def test_ablation_cells(run: RunDir, results: Results) -> None:
    rows = rows_of(tables.ablation(results, run.builds(), run.info))
    row = rows["r05_swizzle"]
    assert re.fullmatch(r"\d\d\.\d \[\d\d\.\d, \d\d\.\d\]", row["time (us)"])
    assert re.fullmatch(r"1\.\d\d \[1\.\d\d, 1\.\d\d\] faster", row["x parent"])
    assert re.fullmatch(r"\d{3}", row["x r00_naive"]), "no paired comparison: the ratio of the medians"
    assert row["x sdpa_default"].endswith(" slower")
    assert rows["r01_tiled"]["x r00_naive"].endswith(" slower"), "a paired comparison"
    assert row["registers"] == "96", "of fp16, head dimension 64, sm_90a"
    assert (row["spills (B)"], row["smem (B)"], row["occupancy"]) == ("0", "12800", "31 %")
    assert rows["r03_warp_reduce"]["spills (B)"] == "8"
    assert row["predicted x parent"] == "1.2 to 2: confirmed"
    assert rows["r03_warp_reduce"]["predicted x parent"] == "9 to 10: refuted"
    assert (rows["r00_naive"]["x parent"], rows["r00_naive"]["x r00_naive"]) == ("-", "-")
    assert rows[made.BASELINE]["x sdpa_default"] == "-"


def test_ablation_says_what_is_missing_and_never_zero(run: RunDir, results: Results) -> None:
    rows = rows_of(tables.ablation(results, run.builds(), run.info))
    failed = rows["r04_vector_io"]
    assert failed["time (us)"].startswith("failed: 1 of 1 checks failed")
    measured = ("x parent", "x r00_naive", "x sdpa_default", "TFLOP/s", "% of roofline")
    assert {failed[c] for c in measured} == {"not measured"}
    assert failed["predicted x parent"] == "1 to 2: not measured"
    assert rows["sdpa_math"]["time (us)"] == "not installed: torch has no such backend"
    brief = rows_of(tables.ablation(results, run.builds(), run.info, reasons=False))
    assert brief["r04_vector_io"]["time (us)"] == "failed"


def test_ablation_of_a_run_without_builds_or_a_known_gpu(run: RunDir, results: Results) -> None:
    unbuilt = rows_of(tables.ablation(results, [], run.info))["r05_swizzle"]
    assert {unbuilt[c] for c in tables.RESOURCE_COLUMNS} == {"not measured"}
    unknown = replace(run.info, machine=replace(made.MACHINE, gpu=None))
    assert rows_of(tables.ablation(results, run.builds(), unknown))["r05_swizzle"]["occupancy"] == "not measured"
    elsewhere = replace(run.info, machine=replace(made.MACHINE, arch="sm_89"))
    assert rows_of(tables.ablation(results, run.builds(), elsewhere))["r05_swizzle"]["registers"] == "not measured"


def test_long_reasons_are_shortened(tmp_path: Path) -> None:
    def fail(arm: ArmTiming) -> ArmTiming:
        return replace(arm, status="failed", reason="x " * 500, ns=(), blocks=())

    timing = made.with_arm(made.timing(made.REFERENCE), "r02_grid", fail)
    table = tables.ablation(made.results(tmp_path, [timing]), [], made.INFO)
    assert len(rows_of(table)["r02_grid"]["time (us)"]) < 120


def test_insufficient_samples_are_a_verdict(tmp_path: Path) -> None:
    results = made.results(tmp_path, [made.timing(made.REFERENCE, blocks=8)])
    rows = rows_of(tables.ablation(results, [], made.INFO))
    assert rows["r05_swizzle"]["x parent"] == "insufficient samples"
    assert rows["r05_swizzle"]["predicted x parent"] == "1.2 to 2: not measured"


def test_nasty_rung_text_keeps_the_table_whole(run: RunDir) -> None:
    rungs = tuple(replace(rung, change=NASTY) for rung in made.RUNGS)
    ladder = dataclasses.replace(made.LADDER, rungs=rungs)
    table = tables.ablation(load_results(run, ladder), run.builds(), run.info)
    lines = tables.markdown(table).splitlines()
    assert {len(cells_of(line)) for line in lines} == {len(table.columns)}
    assert shown(cells_of(lines[2])[1]) == NASTY
    body = [line for line in tables.latex(table).splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(table.columns) - 1}


# --- the others ---


def test_headline_has_a_row_for_each_shape_and_a_status_for_what_was_skipped(results: Results) -> None:
    table = tables.headline(results)
    assert [row[:3] for row in table.rows] == [
        ("B32 H32 S512 D64", "full", "fp16"),
        ("B16 H32 S1024 D64", "full", "fp16"),
        ("B16 H32 S1024 D64", "causal", "fp16"),
        ("B16 H16 S1024 D128", "full", "fp16"),
    ]
    first = rows_of(table)["B32 H32 S512 D64"]
    assert first["best rung"] == "r05_swizzle"
    assert (first["TFLOP/s"], first["sdpa_math"]) == ("13.5", "not installed")
    assert first["x sdpa_default"].endswith("slower")


def test_headline_without_rungs(tmp_path: Path) -> None:
    arms = tuple(name for name in made.TFLOPS if not name.startswith("r0"))
    (row,) = tables.headline(made.results(tmp_path, [made.timing(made.HEADLINE[0], arms=arms)])).rows
    assert row[3:6] == ("not measured",) * 3


def test_failures_are_grouped(results: Results) -> None:
    table = tables.failures(results)
    rows = [row for row in table.rows if row[0] == "r00_naive"]
    assert len(rows) == 1, "reasons that differ in their numbers only are one row"
    assert rows[0][2].startswith("for example: 10 blocks would take ")
    assert rows[0][3] == "4 of 6"
    assert ("sdpa_math", "not installed", "torch has no such backend", "6 of 6") in table.rows
    assert not any(row[0] == "r05_swizzle" for row in table.rows)


def test_predictions_table(results: Results) -> None:
    rows = {row[:2]: row for row in tables.predictions(results).rows}
    assert rows["r05_swizzle", "time"][2] == "1.2 to 2"
    assert rows["r05_swizzle", "time"][4:] == ("confirmed", "-")
    assert rows["r05_swizzle", "smsp__x.sum"][3:] == (
        "not measured",
        "not measured",
        "r05_swizzle was not profiled at the cell that it is read at",
    )


def test_machine_shows_every_field_and_unknown_ones(run: RunDir) -> None:
    """All but the peers, which have a table of their own, and commits that a run went on from, which are rows."""
    table = tables.machine(replace(run.info, dirty=True, cards=("second card",)))
    values = {row[0]: row[1] for row in table.rows}
    assert len(values) == len(Machine.__struct_fields__) + len(RunInfo.__struct_fields__) - 5
    assert values["GPU digest"].endswith(" and second card")
    assert values["commit"] == "052f01d with uncommitted changes"
    assert (values["ECC"], values["MIG"], values["cuDNN"], values["L2 (MiB)"]) == ("on", "off", "unknown", "50")


def test_the_control_arm_is_in_no_table(run: RunDir, results: Results) -> None:
    made_tables = (
        tables.ablation(results, run.builds(), run.info),
        tables.headline(results),
        tables.failures(results),
        tables.predictions(results),
    )
    assert not any("#control" in tables.markdown(table) for table in made_tables)


def test_a_failed_control_is_hidden_too(tmp_path: Path) -> None:
    skip = partial(replace, status="skipped", reason="x", ns=(), blocks=())
    results = made.results(tmp_path, [made.with_arm(made.timing(made.REFERENCE), "sdpa_default#control", skip)])
    assert "#control" not in tables.markdown(tables.failures(results))
