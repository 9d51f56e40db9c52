"""The paper: no figure is typed, every macro, citation and file that it names exists."""

from __future__ import annotations

import re

import pytest

from flashladder import paths, prose, rundir

TEX = (paths.PAPER / "report.tex").read_text()
BODY = re.sub(r"(?m)%.*$", "", TEX.split(r"\begin{document}")[1].replace(r"\%", "PERCENT")).replace("PERCENT", r"\%")


def test_the_body_states_no_measured_number_itself() -> None:
    text = re.sub(r"\\(includegraphics|setlength)[^\n]*|\\fl[A-Za-z]+(\{\})?", "#", BODY)
    assert prose.typed_number(text) is None


@pytest.mark.parametrize("sentence", ["The step is 1.60.", r"It gives 14\,\% more.", "It is 3 times as fast."])
def test_a_typed_number_in_the_body_would_be_found(sentence: str) -> None:
    assert prose.typed_number(sentence.replace(r"\,", " "))


def test_every_macro_is_generated() -> None:
    macros = (paths.PAPER / "generated" / "macros.tex").read_text()
    defined = set(re.findall(r"\\newcommand{\\(fl[A-Za-z]+)}", macros))
    used = set(re.findall(r"\\(fl[A-Z][A-Za-z]*)", TEX))
    assert len(used) > 40
    assert used <= defined


def test_nothing_that_the_paper_quotes_was_left_unmeasured() -> None:
    macros = dict(
        re.findall(r"\\newcommand{\\(fl[A-Za-z]+)}{(.*)}", (paths.PAPER / "generated/macros.tex").read_text())
    )
    used = set(re.findall(r"\\(fl[A-Z][A-Za-z]*)", BODY))
    assert [name for name in sorted(used) if macros[name] in ("not measured", "unknown")] == []


def test_every_reference_is_cited_and_every_citation_has_one() -> None:
    bibliography = (paths.PAPER / "refs.bib").read_text()
    cited = {key for keys in re.findall(r"\\citep(?:\[[^]]*\])*{([^}]*)}", BODY) for key in keys.split(",")}
    assert cited == set(re.findall(r"@\w+{(\w+),", bibliography))
    assert all("author = {" in entry and "title = {" in entry for entry in bibliography.split("\n@")[1:])


def test_every_figure_and_table_is_a_generated_file() -> None:
    generated = paths.PAPER / "generated"
    tables = re.findall(r"\\fit{[^}]*}{(\w+)}|\\input{generated/(\w+)}", BODY)
    names = [f"{a or b}.tex" for a, b in tables]
    names += [f"{name}.pdf" for name in re.findall(r"\\includegraphics\[[^]]*\]{(\w+)}", BODY)]
    assert len(names) >= 10
    assert [name for name in names if not (generated / name).is_file()] == []


def test_the_paper_cites_the_pinned_run() -> None:
    macros = (paths.PAPER / "generated" / "macros.tex").read_text()
    assert f"\\newcommand{{\\flRunId}}{{{rundir.find().info.id}}}" in macros
    assert r"\flRunId" in TEX
