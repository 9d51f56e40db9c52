"""Prose about the pinned run: every figure is a fact, every claim holds, every rung has its part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashladder import bottleneck, facts, paths, prose, report, rundir, tables
from flashladder.document import Document, load
from flashladder.errors import FlashladderError
from flashladder.ladder import load_history, load_ladder
from flashladder.model import Cell
from tests.unit import synthetic as made


@pytest.fixture(scope="module")
def document() -> Document:
    return load(rundir.find(), load_ladder(), in_repository=True)


@pytest.fixture(scope="module")
def known(document: Document) -> dict[str, str]:
    return facts.facts(document)


@pytest.mark.parametrize(
    "text",
    [
        "took 3.5 us",
        "14 us",
        "12 % less",
        "1,234 cases",
        "a 2x gain",
        "\u00d74",
        "8 times",
        "660 TFLOP/s",
        "12 \\% more",
    ],
)
def test_a_typed_measured_number_is_found(text: str) -> None:
    assert prose.typed_number(text)
    with pytest.raises(FlashladderError, match="typed") as error:
        prose.fill(text, {}, "a.md")
    assert str(error.value).startswith("a.md: ")


@pytest.mark.parametrize(
    "text", ["{Time} us", "192 x 128 tiles", "16-byte accesses", "2^12", "fp16, sm_80", "`--limit 2.5`", "128 threads"]
)
def test_sizes_names_and_code_are_no_measured_numbers(text: str) -> None:
    assert prose.typed_number(text) is None


def test_an_unknown_fact_is_an_error_that_names_it() -> None:
    with pytest.raises(FlashladderError, match="no fact is called Tme"):
        prose.fill("{Tme} us", {"Time": "1"}, "a.md")


def test_the_prose_of_the_pinned_run_is_sound_and_every_rung_has_a_part(
    document: Document, known: dict[str, str]
) -> None:
    words = prose.load(document.results, known)
    assert list(words.rungs) == [rung.id for rung in load_ladder().rungs]
    assert words.cookbook is not None
    for text in (*words.chapters.values(), *words.rungs.values(), words.cookbook):
        assert not re.search(r"[{}]|holds:", text)


def test_every_part_that_judges_a_step_says_what_it_rests_on() -> None:
    parts = prose._parts("rungs.md")
    first = load_ladder().rungs[0].id
    assert all(len(prose.HOLDS.findall(text)) == 2 for rung, text in parts.items() if rung != first)


def test_words_that_no_longer_hold_are_an_error(document: Document) -> None:
    assert prose.unheld(document.results, "r01_tiled", "<!-- holds: slower -->\nIt is slow.") == []
    (fault,) = prose.unheld(document.results, "r01_tiled", "<!-- holds: faster -->\nIt is fast.")
    assert fault == "r01_tiled rests on 'faster', the records say confirmed and slower"


def test_a_run_about_which_nobody_wrote_has_no_prose(
    document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    assert prose.load(document.results, {}) == prose.NONE


def test_every_fault_of_the_prose_is_told_at_once_in_one_line(
    document: Document, known: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "PAPER", tmp_path)
    (tmp_path / "prose").mkdir()
    wrong = "## r01_tiled\n<!-- holds: faster -->\n\n## r02_grid\n<!-- holds: slower -->\n"
    (tmp_path / "prose" / "rungs.md").write_text(wrong)
    with pytest.raises(FlashladderError, match=r"r01_tiled rests on .*; r02_grid rests on .*; rewrite") as error:
        prose.load(document.results, known)
    assert "\n" not in str(error.value)


def test_facts_are_named_by_letters_and_rungs_do_not_share_a_name(known: dict[str, str]) -> None:
    assert all(re.fullmatch("[A-Za-z]+", name) for name in known)
    names = [facts.camel(rung.id) for rung in load_ladder().rungs]
    assert len(set(names)) == len(names)
    assert facts.camel("fa3") == "FaThree"


def test_facts_are_the_records(document: Document, known: dict[str, str]) -> None:
    results, ladder = document.results, load_ladder()
    step = results.comparison(ladder.reference, "r08_mma_sync", "r07_wmma_pv")
    assert step is not None
    assert step.ratio is not None
    assert known["StepMmaSync"] == tables.number(step.ratio)
    assert known["VerdictMmaSync"] == step.verdict
    assert int(known["OverSdpaDefaultCells"]) == len(results.cells)


def test_a_run_without_times_has_facts_that_say_so(tmp_path: Path) -> None:
    found = facts.facts(load(made.diagnosed(tmp_path, []), made.LADDER, in_repository=False))
    assert found["Best"] == found["StepGrid"] == found["PeakTflops"] == tables.NOT_MEASURED


def test_the_report_holds_each_chapter_and_a_section_for_each_rung(document: Document, known: dict[str, str]) -> None:
    text = report._report(document, prose.load(document.results, known), (), None, ())
    titles = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    for title in ("In short", "Machine", "How the numbers were made", "The ladder", "Rung by rung", "Bottlenecks"):
        assert title in titles
    for title in ("Comparison with peers", "History beside it", "What failed", "Limits", "Lessons"):
        assert title in titles
    assert {rung.id for rung in load_ladder().rungs} <= set(titles)


def test_links_of_the_report_and_the_docs_lead_to_files(document: Document, known: dict[str, str]) -> None:
    report_text = report._report(document, prose.load(document.results, known), (), None, ())
    texts = {paths.ROOT / "OPTIMIZATION_REPORT.md": report_text}
    texts |= {file: file.read_text() for file in (*(paths.ROOT / "docs").glob("*.md"), paths.ROOT / "README.md")}
    for file, text in texts.items():
        for target in re.findall(r"(?<!\\)\]\((?!http)([^)#]+)(?:#[^)]*)?\)", text):
            assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_docs_state_no_measured_number_but_the_generated_ones() -> None:
    for file in (paths.ROOT / "docs").glob("*.md"):
        if file.name not in ("artifact.md", "cookbook.md"):  # generated
            assert prose.typed_number(file.read_text()) is None, file.name


def test_a_step_shows_the_counters_of_its_own_cell_or_of_one_that_has_them(document: Document) -> None:
    results, ladder = document.results, load_ladder()
    for rung in ladder.rungs:
        both = [name for name in (rung.id, rung.parent) if name is not None]

        def counted(cell: Cell, names: list[str] = both) -> bool:
            return all(results.counter(cell, name, bottleneck.DURATION) for name in names)

        own, chosen = ladder.cell_of(rung), tables.counters_cell(results, rung)
        assert counted(chosen) or not any(counted(cell) for cell in results.cells)
        assert chosen == own or not counted(own)


def test_history_stands_beside_what_was_measured(document: Document) -> None:
    source, past = load_history()
    table = tables.history(document.results, past)
    by_what = {row[0]: row for row in table.rows}
    ratio = document.results.ratio(load_ladder().reference, "r01_tiled", "r00_naive")
    assert ratio is not None
    assert by_what["tiles in shared memory, reduced by one thread: a regression"][4] == f"{tables.number(ratio)}x"
    assert "L4" in source
    assert any("0.572 ms against 0.290 ms" in row for row in table.rows)
    assert not any(tables.NOT_MEASURED in row[4] for row in table.rows)
