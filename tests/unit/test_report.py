"""The generated documents: whole, linked, the same each time, and honest about what is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from flashladder import eager, page, report
from flashladder.artifact import Section
from flashladder.claims import Claim, Order, View, evaluate
from flashladder.diagnose import control_arm
from flashladder.errors import FlashladderError
from flashladder.figures import FIGURES, PUBLISHED
from flashladder.ladder import load_presets, preset_cells
from flashladder.model import ArmTiming
from flashladder.rundir import RunDir
from flashladder.tables import Table
from flashladder.timing import SAMPLE_US
from tests.unit import synthetic as made

replace = msgspec.structs.replace
README = f"# Name\n\nBefore.\n{report.BEGIN}\nold\n{report.END}\nAfter.\n"
DRAWN = {f"paper/generated/{name}.{form}" for name in FIGURES for form in PUBLISHED}
GENERATED = DRAWN | {
    f"paper/generated/{name}"
    for name in (
        "ablation_portable.tex",
        "headline_fp16.tex",
        "history.tex",
        "macros.tex",
        "peers.tex",
        "report.html",
    )
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return made.diagnosed(tmp_path_factory.mktemp("run"), [made.timing(cell) for cell in made.FEW_CELLS])


@pytest.fixture(scope="module")
def files(run: RunDir) -> dict[str, bytes]:
    return report.generate(run, made.LADDER, readme=README)


@pytest.fixture(scope="module")
def flat(run: RunDir) -> dict[str, bytes]:
    return report.generate(run, made.LADDER)


def links(text: bytes) -> set[str]:
    return set(re.findall(r"(?<!\\)\]\(([^)]*)\)", text.decode()))


def test_the_repository_gets_report_readme_and_paper(files: dict[str, bytes]) -> None:
    assert set(files) == {"OPTIMIZATION_REPORT.md", "README.md", *GENERATED}


def test_another_directory_gets_the_same_flat_and_no_readme(files: dict[str, bytes], flat: dict[str, bytes]) -> None:
    assert set(flat) == {"report.md", *(Path(path).name for path in GENERATED)}
    assert all(flat[Path(path).name] == files[path] for path in GENERATED)
    assert flat["report.md"].replace(b"](", b"](paper/generated/") == files["OPTIMIZATION_REPORT.md"]


def test_links_lead_to_generated_files(files: dict[str, bytes], flat: dict[str, bytes]) -> None:
    assert links(files["OPTIMIZATION_REPORT.md"]) == {
        f"paper/generated/{name}.svg" for name in ("ladder", "calibration", "scaling")
    }
    assert links(files["README.md"]) == {"paper/generated/ladder.svg", "OPTIMIZATION_REPORT.md"}
    assert links(files["README.md"]) <= set(files)
    assert links(flat["report.md"]) <= set(flat)


def test_generating_again_without_raw_timings_gives_the_same_bytes(
    run: RunDir, files: dict[str, bytes], tmp_path: Path
) -> None:
    for name in ("run.json", "build.jsonl", "check.jsonl", "diagnosis.jsonl"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    assert report.generate(RunDir(tmp_path), made.LADDER, readme=files["README.md"].decode()) == files


def test_only_the_block_of_the_readme_changes(files: dict[str, bytes]) -> None:
    text = files["README.md"].decode()
    assert text.startswith(f"# Name\n\nBefore.\n{report.BEGIN}\n")
    assert text.endswith(f"\n{report.END}\nAfter.\n")
    assert "old" not in text
    assert "NVIDIA H100 80GB HBM3, run 20261127-default of 2026-11-27" in text
    assert "| r04_vector_io " in text


@pytest.mark.parametrize(
    ("readme", "missing"),
    [("# Name\n", report.BEGIN), (f"{report.BEGIN}\n", report.END), (f"{report.END}\n{report.BEGIN}\n", report.END)],
)
def test_a_readme_without_markers_is_an_error(run: RunDir, readme: str, missing: str) -> None:
    with pytest.raises(FlashladderError, match=missing) as error:
        report.generate(run, made.LADDER, readme=readme)
    assert "\n" not in str(error.value)


def test_the_report_says_how_the_numbers_were_made(flat: dict[str, bytes]) -> None:
    text = flat["report.md"].decode()
    words = ("median", "geometric-mean", "24, fp16", "CUDA events", "flushed", "1980 MHz", "Holm", "Benjamini-Hochberg")
    for word in (*words, "A/A", "Yuen", "launch-bound", "## Predictions"):
        assert word in text


def test_the_report_counts_the_cells_in_which_the_interval_of_the_same_kernel_holds_1(tmp_path: Path) -> None:
    def counted(factor: float) -> str:
        def slower(arm: ArmTiming) -> ArmTiming:
            return replace(arm, ns=tuple((a * factor, b * factor) for a, b in arm.ns))

        timings = [made.with_arm(made.timing(cell), control_arm(made.LADDER), slower) for cell in made.FEW_CELLS]
        (line,) = report._intervals(made.results(tmp_path / str(factor), timings))
        return line

    short = sum(made.true_us(cell, made.BASELINE) < SAMPLE_US for cell in made.FEW_CELLS)
    assert f" in 0 of {short} cells of less than 100 us" in counted(1.05)
    assert re.search(r"holds 1 in [1-9]", counted(1.0))


def test_no_control_arm_and_nothing_that_is_no_number(files: dict[str, bytes]) -> None:
    for path, data in files.items():
        if path.endswith((".md", ".tex")):
            assert not re.search(r"#control|\bnan\b|\bNone\b|\binf\b", data.decode()), path


def test_an_incomplete_run_says_so(flat: dict[str, bytes], files: dict[str, bytes]) -> None:
    expected = len(preset_cells(load_presets()["default"]))
    sentence = f"This run is incomplete: {expected - 2} of the {expected} cells of the preset default have no record"
    assert sentence in flat["report.md"].decode()
    assert sentence in files["README.md"].decode()


def test_a_complete_run_says_nothing_of_it(tmp_path: Path) -> None:
    cells = preset_cells(load_presets()["quick"])
    info = replace(made.INFO, preset="quick")
    run = made.diagnosed(tmp_path, [made.timing(c, i) for i, c in enumerate(cells)], info=info)
    text = report.generate(run, made.LADDER, draw=False)["report.md"].decode()
    assert "incomplete" not in text
    assert "No cell of the headline set was measured in this run." in text


def test_claims_other_machines_and_the_appendix_go_in_where_they_are_given(run: RunDir) -> None:
    view = View(run, made.LADDER)
    claim = Claim(
        id="r03", text="gains {value} x", predicate=Order(arm="r03_warp_reduce", verdict="faster"), archs=("sm_90a",)
    )
    judged = evaluate([claim], view, lambda _: view)
    others = Table(("run", "GPU"), (("l4/x", "NVIDIA L4"),))
    appendix = (Section("Abstract", ("Words.",)),)
    full = report.generate(run, made.LADDER, readme=README, judged=judged, others=others, appendix=appendix, draw=False)
    more = {f"paper/generated/{name}.tex" for name in ("artifact", "claims")}
    assert set(full) == {"OPTIMIZATION_REPORT.md", "README.md", "docs/artifact.md", *(GENERATED - DRAWN), *more}
    macros = full["paper/generated/claims.tex"].decode()
    assert re.search(r"\\csname flclaim:r03\\endcsname\{\d\.\d+\}$", macros, re.MULTILINE)
    assert re.search(r"\\csname flclaimtext:r03\\endcsname\{gains \d\.\d+ x\}$", macros, re.MULTILINE)
    text = full["OPTIMIZATION_REPORT.md"].decode()
    assert re.search(r"## Claims\n\n1 claim: 1 reproduced\. .*\| r03 +\| gains \d\.\d+ x +\| faster", text, re.DOTALL)
    assert re.search(r"## Other machines\n.*\| l4/x +\| NVIDIA L4 +\|", text, re.DOTALL)
    assert "## Abstract\n\nWords." in full["docs/artifact.md"].decode()
    none = report.generate(run, made.LADDER, others=Table(("run",), ()), draw=False)["report.md"].decode()
    assert "## Claims" not in none
    assert "## Other machines" not in none


def test_eager_calls_go_in_where_they_are_given(run: RunDir, flat: dict[str, bytes]) -> None:
    records = [made.eager_timing(cell) for cell in eager.CELLS]
    text = report.generate(run, made.LADDER, eager_runs=[(made.INFO, records)], draw=False)["report.md"].decode()
    assert "## What an eager call costs\n" in text
    assert "### Run 20261127-default\n\nNVIDIA H100 80GB HBM3, A CPU, Python 3.11.7, torch 2.9.1.\n" in text
    assert "B1 H1 S32 D64, bf16, full, r05_swizzle:\n" in text
    rows = [line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| attention ")]
    assert len(rows) == len(records)
    for call, *numbers in rows:
        assert call.strip() == "flashladder.attention(q, k, v)"
        assert [float(number.split()[0]) for number in numbers] == pytest.approx([13, 13 / 10, 13 / 12], rel=0.02)
    assert "What an eager call costs" not in flat["report.md"].decode()


def test_a_runs_own_eager_calls_are_in_its_report(tmp_path: Path) -> None:
    run = made.diagnosed(tmp_path, [made.timing(made.REFERENCE)])
    run.append("eager", made.eager_timing(eager.CELLS[0]))
    text = report.generate(run, made.LADDER, draw=False)["report.md"].decode()
    assert "## What an eager call costs\n" in text


def test_macros_are_commands_of_letters_only(flat: dict[str, bytes]) -> None:
    lines = flat["macros.tex"].decode().splitlines()[1:]
    parsed = [re.fullmatch(r"\\newcommand\{\\(fl[A-Za-z]+)\}\{(.+)\}", line) for line in lines]
    assert all(parsed)
    values = {match[1]: match[2] for match in parsed if match}
    assert len(values) == len(lines)
    assert values["flBest"] == r"r05\_swizzle"
    assert values["flBestTime"] == "85.0"
    assert (values["flPredictionsConfirmed"], values["flPredictionsRefuted"]) == ("3", "1")


def test_a_run_where_nothing_was_timed_says_so(tmp_path: Path) -> None:
    made_files = report.generate(made.diagnosed(tmp_path, []), made.LADDER, draw=False)
    text = made_files["report.md"].decode()
    assert "No rung was timed." in text
    assert b"not measured" in made_files["macros.tex"]


def test_without_the_library_of_the_page_another_run_has_the_rest_and_the_pinned_one_an_error(
    run: RunDir, flat: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page.library.cache_clear()
    drawn = {Path(path).name for path in DRAWN}
    assert set(report.generate(run, made.LADDER, draw=False)) == set(flat) - {"report.html"} - drawn
    with pytest.raises(FlashladderError, match="vl-convert-python"):
        report.generate(run, made.LADDER, readme=README, draw=False)
    page.library.cache_clear()


def test_a_run_without_a_diagnosis_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FlashladderError, match="no diagnosis"):
        report.generate(made.write_run(tmp_path), made.LADDER)


def test_written_files_do_not_drift_and_changed_ones_do(files: dict[str, bytes], tmp_path: Path) -> None:
    assert report.check(files, tmp_path) == list(files)
    report.write(files, tmp_path)
    assert report.check(files, tmp_path) == []
    changed, missing = "paper/generated/ablation_portable.tex", "paper/generated/ladder.pdf"
    (tmp_path / changed).write_bytes(files[changed].replace(b"faster", b"slower"))
    (tmp_path / missing).unlink()
    assert sorted(report.check(files, tmp_path)) == [changed, missing]
