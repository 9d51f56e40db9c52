"""report.html: a run on one page that needs no network, with charts that answer to the pointer and the keyboard.

The charts are Vega-Lite's; the library comes from the wheel of vl-convert-python and is written into the page.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flashladder import charts, explain, figures, tables
from flashladder.diagnose import Results, legs
from flashladder.document import Document
from flashladder.errors import EnvironmentInvalidError
from flashladder.model import DTYPES, Cell, DtypeName, Rung
from flashladder.prose import Prose
from flashladder.summary import champion
from flashladder.tables import Table, number, shape

LIBRARY = "6.1"
"""Version of Vega-Lite."""


@dataclass(frozen=True)
class _Chart:
    """A chart's place on the page: what it shows in words, and the table that says the same."""

    id: str
    label: str
    table: Table


@dataclass(frozen=True)
class _Card:
    """What the page says of one rung."""

    rung: Rung
    at: str
    time: str
    step: str
    predictions: Table
    why: str | None
    remark: Markup | None
    counted: str
    """Where the counters were read."""
    counters: Table
    sass: Table
    findings: Table
    unprofiled: str | None
    diff: list[tuple[str, str]]
    """(kind of line, line): "add", "del" or "file"."""


def page(document: Document, prose: Prose) -> bytes:
    """The whole page. Raises EnvironmentInvalidError without vl-convert-python."""
    results = document.results
    best = champion(results)
    rooflines = charts.rooflines(results)
    places = {leg.name: f"{shape(leg.cell)}, {leg.cell.dtype}, {leg.cell.mask}" for leg in legs(results)}
    text = (
        _environment()
        .get_template("report.html.j2")
        .render(
            document=document,
            results=results,
            gpu=document.info.machine.gpu or "unknown GPU",
            best=best,
            facts=_facts(document, best),
            ladders=[
                _Chart(f"ladder-{leg.name}", figures.leg_alt(results, leg), _ladder_table(document, leg.name))
                for leg in legs(results)
            ],
            places=places,
            rooflines={memory: _roofline(document, memory) for memory in rooflines},
            styles=charts.arm_styles(results),
            choices=_choices(results.cells),
            first_dtype=_first_dtype(results),
            shapes=_shape_rows(document, best),
            cards=[_card(document, prose, rung) for rung in results.ladder.rungs],
            predictions=tables.predictions(results),
            failures=tables.failures(results),
            machine=tables.machine(document.info),
            records=records(document),
            root="../../" if document.records is not None else None,
            style=_asset("page.css"),
            script=_asset("page.js"),
            library=_script(library()),
            data=_script(_json(_data(document, rooflines))),
        )
    )
    return text.encode()


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("flashladder"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@cache
def library() -> str:
    """Vega, Vega-Lite and vega-embed as one script, the same bytes each time."""
    try:
        import vl_convert
    except ImportError as error:
        raise EnvironmentInvalidError(
            "report.html needs the package vl-convert-python, which is not installed; run 'uv sync', or 'pip install "
            "vl-convert-python'"
        ) from error
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=LIBRARY))


def _asset(name: str) -> Markup:
    return Markup((resources.files("flashladder") / "templates" / name).read_text())


def _script(text: str) -> Markup:
    """Text as it stands inside <script>, which its own end or a comment would break."""
    assert not re.search("</script|<!--", text, re.IGNORECASE)
    return Markup(text)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _data(document: Document, rooflines: dict[str, charts.Spec]) -> dict[str, Any]:
    """What page.js draws."""
    results = document.results
    drawn: dict[str, Any] = {f"ladder-{name}": spec for name, spec in charts.ladders(results).items()}
    drawn |= {_roofline_id(memory): spec for memory, spec in rooflines.items()}
    return {
        "charts": drawn,
        "heat": charts.heat_map(charts.measured_peers(results)),
        "ratios": charts.ratios(results),
        "scaling": charts.scaling(results),
        "rates": charts.rates(results),
        "far": charts.FAR,
    }


# --- tables ---------------------------------------------------------------------------------------------------------


def _facts(document: Document, best: str | None) -> list[tuple[str, str]]:
    """What the run says in one line each."""
    results = document.results
    ladder, reference = results.ladder, results.ladder.reference
    if best is None:
        return [("result", "no rung was timed")]
    facts = []
    for leg in legs(results):
        against = tables.comparison(results.comparison(leg.cell, best, ladder.baseline))
        facts.append((f"{best} against {ladder.baseline} at {shape(leg.cell)}", against))
    over = results.ratio(reference, best, ladder.rungs[0].id)
    if over is not None:
        facts.append((f"against {ladder.rungs[0].id} at {shape(reference)}", f"{number(over)} times as fast"))
    timed = [(arm.tflops, cell) for cell in results.cells if (arm := results.arm(cell, best)) and arm.tflops]
    if timed:
        rate, cell = max(timed)
        facts.append((f"highest rate, at {shape(cell)} {cell.mask} {cell.dtype}", f"{number(rate)} TFLOP/s"))
    outcomes = [p.outcome for p in results.predictions]
    words = (f"{outcomes.count(o)} {o}" for o in ("confirmed", "refuted", "not measured") if o in outcomes)
    return [*facts, ("predictions", ", ".join(words))]


def _ladder_table(document: Document, name: str) -> Table:
    leg = next(leg for leg in legs(document.results) if leg.name == name)
    table = tables.ablation(document.results, document.builds, document.info, leg)
    return table.without("predicted x parent")


def _roofline_id(memory: str) -> str:
    return f"roofline-{memory.split()[0]}"


def _roofline(document: Document, memory: str) -> _Chart:
    rows = charts.roofline_rows(document.results, memory)
    names = {row["name"] for row in rows}
    table = Table(
        ("kernel", "shape", f"FLOP a byte of {memory}", "TFLOP/s"),
        tuple((row["name"], row["at"], row["intensity"], row["rate"]) for row in rows),
    )
    label = f"Roofline: TFLOP/s of {len(names)} kernels over FLOP a byte of {memory}, under the roofs of the GPU."
    return _Chart(_roofline_id(memory), label, table)


def _choices(cells: tuple[Cell, ...]) -> dict[str, list[str]]:
    """What each filter offers."""
    return {
        "dtype": sorted({c.dtype for c in cells}),
        "mask": sorted({c.mask for c in cells}, reverse=True),
        "dim": [str(d) for d in sorted({c.shape.head_dim for c in cells})],
    }


def _first_dtype(results: Results) -> DtypeName:
    """The type that is shown first: that with the most peers, else the reference's."""
    reference = results.ladder.reference.dtype

    def peers(dtype: DtypeName) -> int:
        cells = [cell for cell in results.cells if cell.dtype == dtype]
        return sum(any(results.median_us(c, p) is not None for c in cells) for p in results.peers)

    return max(DTYPES, key=lambda dtype: (peers(dtype), dtype == reference))


def _shape_rows(
    document: Document, best: str | None
) -> tuple[tuple[str, ...], list[tuple[charts.Row, tuple[str, ...]]]]:
    """Columns, and a row for each cell with what the filters choose by."""
    results = document.results
    peers = charts.measured_peers(results)
    rows = []
    for cell in charts.ordered(results):
        arm = results.arm(cell, best) if best else None
        time = number(arm.device_us.median) if arm is not None and arm.device_us is not None else tables.NOT_MEASURED
        rate = number(arm.tflops) if arm is not None and arm.tflops else tables.NOT_MEASURED
        against = (tables.ratio(results.comparison(cell, best or "", peer)) for peer in peers)
        what = (shape(cell), cell.mask, cell.dtype, charts.sets(results, cell))
        rows.append((charts.facets(cell), (*what, time, rate, *against)))
    return ("shape", "mask", "dtype", "set", "time (us)", "TFLOP/s", *(f"x {peer}" for peer in peers)), rows


def records(document: Document) -> list[tuple[str, str]]:
    """(file, what it tells) of the run's records."""
    return [
        ("run.json", "machine, date and commit"),
        ("build.jsonl", "registers, spills, shared memory and opcodes of every kernel"),
        ("check.jsonl", "every case of the correctness gate, its errors and its limits"),
        ("timing.jsonl", "every raw sample, with clocks, power and temperature"),
        *([("roof.jsonl", "samples of cuBLAS's product")] if document.results.roofs else []),
        *([("values.jsonl", "samples of the last kernels by kind of values")] if document.results.values else []),
        *([("ncu.jsonl", "counters")] if document.results.profiles else []),
        ("diagnosis.jsonl", "medians, intervals, verdicts and findings, from all the others"),
    ]


# --- cards ----------------------------------------------------------------------------------------------------------


def _card(document: Document, prose: Prose, rung: Rung) -> _Card:
    results, cell = document.results, document.results.ladder.cell_of(rung)
    arm = results.arm(cell, rung.id)
    step = results.comparison(cell, rung.id, rung.parent) if rung.parent is not None else None
    remark = prose.rungs.get(rung.id)
    counted = tables.counters_cell(results, rung)
    found = results.bottlenecks(counted, rung.id)
    profile = results.profiles.get((counted, rung.id))
    return _Card(
        rung=rung,
        at=f"{shape(cell)}, {cell.dtype}, {cell.mask}",
        time=tables.time(arm),
        step=tables.comparison(step) if rung.parent is not None else tables.NOT_APPLICABLE,
        predictions=tables.judged(results, rung),
        why=tables.finding(results, rung),
        remark=None if remark is None else _html(remark),
        counted=shape(counted),
        counters=tables.counters_moved(results, rung, counted),
        sass=tables.sass_diff(document.builds, rung, cell, document.info.machine.arch),
        findings=_findings(document, rung, counted),
        unprofiled=None if found is not None else tables.unprofiled(profile),
        diff=_diff(document, rung),
    )


def _findings(document: Document, rung: Rung, cell: Cell) -> Table:
    found = document.results.bottlenecks(cell, rung.id)
    rows = [
        (f.rule, f"{f.metric} = {number(f.value)}", number(f.threshold), number(f.score), f.fix)
        for f in (found.findings if found is not None else ())
    ]
    return Table(("rule", "counter", "threshold", "could save at most", "what to do"), tuple(rows))


def _diff(document: Document, rung: Rung) -> list[tuple[str, str]]:
    """Changed lines of the sources; nothing where they are not at hand."""
    if rung.parent is None:
        return []
    lines = explain.changed_lines(document.results.ladder[rung.parent], rung)
    kinds = {"+": "add", "-": "del"}
    return [("file" if line.startswith(("+++", "---")) else kinds.get(line[:1], "file"), line) for line in lines]


def _html(text: str) -> Markup:
    """Paragraphs with `code`: all that the prose of a rung uses of Markdown."""
    parts = []
    for paragraph in text.strip().split("\n\n"):
        pieces = " ".join(paragraph.split()).split("`")
        marked = (Markup("<code>{}</code>").format(p) if i % 2 else Markup.escape(p) for i, p in enumerate(pieces))
        parts.append(Markup("<p>{}</p>").format(Markup("").join(marked)))
    return Markup("\n").join(parts)
