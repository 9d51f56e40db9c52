"""What every page of one run is made from."""

from __future__ import annotations

from dataclasses import dataclass

from flashladder import paths
from flashladder.diagnose import Results, load_results
from flashladder.ladder import Ladder
from flashladder.model import Agreement, BuildRecord, CheckRecord, RunInfo
from flashladder.rundir import RunDir


@dataclass(frozen=True)
class Document:
    info: RunInfo
    results: Results
    builds: list[BuildRecord]
    agreements: list[Agreement]
    checks: list[CheckRecord]
    figures: str
    """Folder of the figures, relative to the Markdown pages, "" or with a final slash."""
    records: str | None
    """Folder of the run's records in the repository, with a final slash; None for pages that stand elsewhere."""


FIGURES = "paper/generated/"
AGREEMENTS = "agreement*"
"""The runs beside a recorded one that `check --on both` filled on the same kind of GPU, each for some of the rungs."""


def load(run: RunDir, ladder: Ladder, *, in_repository: bool) -> Document:
    """Raises FlashladderError when the run has no diagnosis."""
    records, agreements = None, run.agreements()
    if in_repository and run.path.resolve().is_relative_to(paths.ROOT.resolve()):
        records = f"{run.path.resolve().relative_to(paths.ROOT.resolve())}/"
        agreements = agreements or _beside(run)
    return Document(
        info=run.info,
        results=load_results(run, ladder),
        builds=run.builds(),
        agreements=agreements,
        checks=run.checks(),
        figures=FIGURES if in_repository else "",
        records=records,
    )


def _beside(run: RunDir) -> list[Agreement]:
    """The comparisons beside a run, each case of a rung once: a later run that has a rung too stands for it."""
    runs = [RunDir(path).agreements() for path in sorted(run.path.parent.glob(AGREEMENTS))]
    return list({(r.arm, r.case): r for records in runs for r in records}.values())
