"""One screen on a rung: what changed, what was predicted, what came of it, what the counters say, what is next."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from flashladder import paths, tables
from flashladder.diagnose import Results
from flashladder.model import BuildRecord, Cell, Rung

DIFF_LINES = 24


def explain(results: Results, builds: Sequence[BuildRecord], rung: Rung, cell: Cell) -> str:
    """Text for a terminal; what was not measured says so."""
    parts = [f"{rung.id}: {rung.change}", _measured(results, rung, cell), _predictions(results, rung)]
    if (finding := tables.finding(results, rung)) is not None:
        parts.append(f"why it came out otherwise: {finding}")
    if rung.parent is not None:
        parts += [_source_diff(results.ladder[rung.parent], rung), _tables(results, builds, rung, cell)]
    parts.append(_findings(results, rung, cell))
    return "\n\n".join(part for part in parts if part)


def _measured(results: Results, rung: Rung, cell: Cell) -> str:
    us = results.median_us(cell, rung.id)
    time = tables.NOT_MEASURED if us is None else f"{tables.number(us)} us"
    lines = [f"{tables.shape(cell)}, {cell.dtype}, {cell.mask}: {time}"]
    for other in (rung.parent, results.ladder.baseline):
        if other is not None:
            lines.append(f"  x {other}: {tables.comparison(results.comparison(cell, rung.id, other))}")
    return "\n".join(lines)


def _predictions(results: Results, rung: Rung) -> str:
    judged = tables.predictions(results)
    rows = tuple(row[1:5] for row in judged.rows if row[0] == rung.id)
    return tables.terminal(tables.Table(judged.columns[1:5], rows)) if rows else "no prediction"


def changed_lines(parent: Rung, rung: Rung) -> list[str]:
    """Changed lines of the source files, without their surroundings; none where a file is not there."""
    files = [paths.ROOT / r.source for r in (parent, rung)]
    if not all(file.is_file() for file in files):
        return []
    before, after = (file.read_text().splitlines() for file in files)
    diff = difflib.unified_diff(before, after, parent.source, rung.source, n=0, lineterm="")
    return [line for line in diff if not line.startswith("@@")]


def _source_diff(parent: Rung, rung: Rung) -> str:
    lines = changed_lines(parent, rung)
    more = [f"... {len(lines) - DIFF_LINES} lines more"] if len(lines) > DIFF_LINES else []
    return "\n".join([*lines[:DIFF_LINES], *more])


def _tables(results: Results, builds: Sequence[BuildRecord], rung: Rung, cell: Cell) -> str:
    sass = tables.sass_diff(builds, rung, cell, results.gpu.arch if results.gpu is not None else None)
    both = (tables.counters_moved(results, rung, cell), sass)
    return "\n\n".join(tables.terminal(table) for table in both if table.rows)


def _findings(results: Results, rung: Rung, cell: Cell) -> str:
    found = results.bottlenecks(cell, rung.id)
    if found is None:
        return "counters: not measured; 'flashladder profile' reads them"
    lines = [
        f"{rank}. {f.rule}: {f.metric} is {tables.number(f.value)}, threshold {tables.number(f.threshold)}; "
        f"could save {100 * f.score:.0f} % at most"
        for rank, f in enumerate(found.findings, 1)
    ]
    following = [f"next: {found.findings[0].fix}"] if found.findings else ["no finding"]
    return "\n".join(lines + following)
