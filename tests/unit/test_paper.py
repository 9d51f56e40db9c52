"""The paper: no figure is typed, every macro, citation and file that it names exists."""

from __future__ import annotations

import re

import pytest

from flashladder import claims, paths, prose, rundir

MACRO = re.compile(r"\\fl([A-Z][A-Za-z]*)(?:\{\})?")
CLAIM = re.compile(r"\\flclaim(?:text|n)?\{(\w+)\}")
DESCRIPTIONS = {"Best", "Gpu", "HopperCell", "Nvcc", "PortableCell", "PowerLimit", "RunCommit", "RunDate", "RunId"}
DESCRIPTIONS |= {"Rungs", "Sms", "Torch", "Trim"}
"""Macros that say what was run, and how: no result."""
IN_WORDS = re.compile(
    r"\b(?:twice|half|a third|a quarter|(?:two|three|four|five|ten) times|double)\s+(?:as|of|the|its)\b|\w+fold\b"
)

TEX = (paths.PAPER / "report.tex").read_text()
BODY = re.sub(r"(?m)%.*$", "", TEX.split(r"\begin{document}")[1].replace(r"\%", "PERCENT")).replace("PERCENT", r"\%")


def unclaimed(text: str) -> list[str]:
    """The sentences with a measured figure that is no claim's: a typed one, one in words, or a macro.

    A predicted interval is declared, and may stand beside a claim of what became of it.
    """
    found = []
    text = re.sub(r"\\(?:includegraphics|setlength|graphicspath)[^\n]*", "", text)
    for sentence in re.split(r"(?<=[.:;])\s+|\n\n", text):
        names = [name for name in MACRO.findall(sentence) if name not in DESCRIPTIONS]
        if CLAIM.search(sentence):
            names = [name for name in names if not name.startswith("Predicted")]
        typed = prose.typed_number(CLAIM.sub("#", MACRO.sub("#", sentence)).replace(r"\,", " "))
        if names or typed or IN_WORDS.search(sentence):
            found.append(" ".join(sentence.split()))
    return found


def test_every_quantitative_sentence_belongs_to_claims() -> None:
    assert unclaimed(BODY) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "The step is 1.60.",
        r"It gives 14\,\% more.",
        "It is 3 times as fast.",
        "It is twice as fast as its parent.",
        "It leaves half of the instructions.",
        r"The grid gives \flStepGrid.",
        r"The copies gain \flGainCpAsync{} on \flGpu.",
        r"Predicted were \flPredictedSwizzle.",
    ],
)
def test_a_figure_that_belongs_to_no_claim_would_be_found(sentence: str) -> None:
    assert unclaimed(f"Before it \\flclaim{{r03_gain}}. {sentence} The end.") == [sentence]


def test_a_figure_of_a_claim_a_declared_interval_beside_one_and_what_was_run_are_no_fault() -> None:
    assert unclaimed(r"On an \flGpu{} it gives \flclaim{r05_refuted} for \flPredictedSwizzle.") == []


def test_every_claim_that_the_paper_cites_is_a_row_that_holds_on_its_evidence() -> None:
    cited = set(CLAIM.findall(BODY))
    assert len(cited) > 40
    assert cited <= {claim.id for claim in claims.load_claims()}  # test_claims.py holds each against its evidence
    defined = (paths.PAPER / "generated" / "claims.tex").read_text()
    assert [i for i in sorted(cited) if f"flclaim:{i}\\endcsname" not in defined] == []
    assert rf"\csname flclaim:{min(cited)}\endcsname{{not measured}}" not in defined


def test_every_macro_is_generated() -> None:
    macros = (paths.PAPER / "generated" / "macros.tex").read_text()
    defined = set(re.findall(r"\\newcommand{\\(fl[A-Za-z]+)}", macros))
    used = set(re.findall(r"\\(fl[A-Z][A-Za-z]*)", TEX))
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
