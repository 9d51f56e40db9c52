"""What people wrote about the pinned run. Every figure in it is a name that the records fill (facts.py).

A file of paper/prose is Markdown; `## name` begins a part of it, {Name} stands for a fact, and a comment
`<!-- holds: slower -->` in a rung's part says what its words rest on: the verdict on the parent, or the outcome of the
prediction of its time. A measured number that is typed, an unknown name, or words that no longer hold are an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashladder import paths
from flashladder.diagnose import Results
from flashladder.errors import FlashladderError

PLACEHOLDER = re.compile(r"{(\w+)}")
HOLDS = re.compile(r"<!-- holds: (.+?) -->\n*")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
_UNITS = "%|\\\\%|\u00d7|us|ms|ns|TFLOP|GB|TB|MHz|GHz|W|M|times|fold|cycles|per cent|percent"
MEASURED = re.compile(rf"\d+[.,]\d+|\d\s*(?:{_UNITS})(?![A-Za-z])|\d\s?x(?!\w|\s*\d)|\u00d7\s*\d")
"""What a measured number looks like: a fraction, or a number with a unit. Sizes (192 x 128, 16-byte, 2^12) are none."""


@dataclass(frozen=True)
class Prose:
    """Texts in Markdown, filled in; empty for a run about which nobody wrote."""

    chapters: Mapping[str, str] = field(default_factory=dict)
    rungs: Mapping[str, str] = field(default_factory=dict)
    """Rung -> what it does, why, and what came of it."""
    cookbook: str | None = None


NONE = Prose()


def load(results: Results, facts: Mapping[str, str]) -> Prose:
    """The texts of paper/prose, if there are any. Raises FlashladderError for what is not sound."""
    if not _folder().is_dir():
        return NONE
    parts = _parts("rungs.md")
    faults = [fault for rung, text in parts.items() for fault in unheld(results, rung, text)]
    if faults:
        raise FlashladderError(
            f"paper/prose/rungs.md: {'; '.join(faults)}; rewrite these parts and their 'holds' lines"
        )
    rungs = {rung: fill(HOLDS.sub("", text), facts, f"paper/prose/rungs.md, {rung}") for rung, text in parts.items()}
    chapters = {name: fill(text, facts, f"paper/prose/report.md, {name}") for name, text in _parts("report.md").items()}
    cookbook = fill((_folder() / "cookbook.md").read_text(), facts, "paper/prose/cookbook.md")
    return Prose(chapters=chapters, rungs=rungs, cookbook=cookbook)


def _folder() -> Path:
    return paths.PAPER / "prose"


def _parts(name: str) -> dict[str, str]:
    """Part -> text of a file, without what stands before the first."""
    pieces = re.split(r"^## (\w+)$\n", (_folder() / name).read_text(), flags=re.MULTILINE)[1:]
    return {part: text.strip() for part, text in zip(pieces[::2], pieces[1::2], strict=True)}


def fill(text: str, facts: Mapping[str, str], where: str) -> str:
    """The text with its facts. Raises FlashladderError for a typed measured number or an unknown name."""
    typed = typed_number(text)
    if typed is not None:
        raise FlashladderError(
            f"{where}: the number in {typed!r} is typed; expected the name of a fact in braces (facts.py lists them)"
        )

    def fact(match: re.Match[str]) -> str:
        if match[1] not in facts:
            raise FlashladderError(f"{where}: no fact is called {match[1]}; facts.py gives the names")
        return facts[match[1]]

    return PLACEHOLDER.sub(fact, text)


def typed_number(text: str) -> str | None:
    """A measured number that stands in the text itself, with its surroundings."""
    plain = PLACEHOLDER.sub("#", CODE.sub("#", text))
    found = MEASURED.search(plain)
    return " ".join(plain[max(found.start() - 20, 0) : found.end() + 10].split()) if found else None


def unheld(results: Results, rung_id: str, text: str) -> list[str]:
    """The statements that a rung's words rest on and the records do not bear out."""
    rung = results.ladder[rung_id]
    step = results.comparison(results.ladder.cell_of(rung), rung.id, rung.parent or "")
    records: set[str] = {p.outcome for p in results.predictions if p.rung == rung.id and p.metric == "time"}
    records.add("not compared" if step is None else step.verdict)
    said = " and ".join(sorted(records))
    return [
        f"{rung_id} rests on {claim!r}, the records say {said}" for claim in HOLDS.findall(text) if claim not in records
    ]
