"""The figures that prose may quote, by name: one place for the report, the page, the cookbook and the paper.

A name is of letters only, so that it is a LaTeX macro too (\\flName). Times are in microseconds. A rung's are at the
cell that it is read at, `Step` is its parent's time over its own, and a peer's are over the champion in all cells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from statistics import fmean

from flashladder import stats, tables
from flashladder.diagnose import Results, legs
from flashladder.document import Document
from flashladder.model import Cell, Rung
from flashladder.summary import aliases, sets_of
from flashladder.tables import NOT_MEASURED, number, shape

DIGITS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def facts(document: Document) -> dict[str, str]:
    """Name -> text; what is missing says "not measured"."""
    results = document.results
    found = dict(_run(document))
    for rung in results.ladder.rungs:
        found |= dict(_rung(results, rung))
    for variant in results.ladder.variants:
        found |= dict(_variant(results, variant))
    for peer in results.peers:
        found |= dict(_peer(results, peer))
    return found


def camel(name: str) -> str:
    """sdpa_flash -> SdpaFlash, fa3 -> FaThree; the number that begins a rung's or a variant's id is left out."""
    words = re.sub(r"^[rv]\d+_", "", name).split("_")
    return "".join(re.sub(r"\d", lambda d: DIGITS[int(d[0])], word.capitalize()) for word in words)


def variant_name(results: Results, variant: Rung) -> str:
    """Portable or Hopper, by its parent, then its own name."""
    parent = results.ladder[variant.parent or ""]
    return ("Hopper" if parent.min_arch >= 90 else "Portable") + camel(variant.id)


def _run(document: Document) -> Iterator[tuple[str, str]]:
    info, results = document.info, document.results
    ladder, reference = results.ladder, results.ladder.reference
    best, first = aliases(results).get("champion"), ladder.rungs[0].id
    arm = results.arm(reference, best) if best is not None else None
    yield "RunId", info.id
    yield "RunDate", info.date[:10]
    yield "RunCommit", info.commit[:12]
    yield "RunPreset", info.preset
    yield "Gpu", info.machine.gpu or "unknown GPU"
    yield "Sms", _text(info.machine.sm_count)
    yield "MaxClock", _text(info.machine.max_sm_clock_mhz)
    yield "PowerLimit", "unknown" if info.machine.power_limit_w is None else f"{info.machine.power_limit_w:g}"
    yield "Torch", info.machine.torch or "unknown"
    yield "Cudnn", info.machine.cudnn or "unknown"
    yield "Nvcc", info.machine.nvcc or "unknown"
    yield "Reference", f"{shape(reference)}, {reference.dtype}, {reference.mask}"
    yield "Rungs", str(len(ladder.rungs))
    yield "Variants", str(len(results.variants))
    yield "Cells", str(len(results.cells))
    yield "Cases", str(sum(record.status == "pass" for record in document.checks))
    yield "Baseline", ladder.baseline
    yield "BaselineTime", _us(results, reference, ladder.baseline)
    yield "First", first
    yield "FirstTime", _us(results, reference, first)
    yield "Best", best or NOT_MEASURED
    yield "BestTime", _us(results, reference, best)
    yield "BestTflops", _number(arm.tflops if arm is not None else None)
    yield "BestRoofline", _number(arm.roofline_pct if arm is not None else None)
    yield "BestOverFirst", _number(results.ratio(reference, best, first) if best else None)
    yield "BestOverBaseline", tables.comparison(results.comparison(reference, best, ladder.baseline) if best else None)
    for leg in legs(results):
        yield f"{leg.name.capitalize()}Cell", f"{shape(leg.cell)}, {leg.cell.dtype}, {leg.cell.mask}"
        yield f"{leg.name.capitalize()}Baseline", _us(results, leg.cell, ladder.baseline)
        yield f"{leg.name.capitalize()}Best", _us(results, leg.cell, best)
        value = results.ratio(leg.cell, best, ladder.baseline) if best else None
        yield f"{leg.name.capitalize()}BestOverBaseline", _number(value)
    for name, outcome in {"Confirmed": "confirmed", "Refuted": "refuted", "Open": "not measured"}.items():
        yield f"Predictions{name}", str(sum(p.outcome == outcome for p in results.predictions))
    steps = [results.comparison(ladder.cell_of(rung), rung.id, rung.parent or "") for rung in ladder.rungs]
    for verdict in ("faster", "slower", "same"):
        yield f"Steps{verdict.capitalize()}", str(sum(s is not None and s.verdict == verdict for s in steps))
    yield from _peak(results, best)
    control = results.control(ladder.reference)
    yield "Control", NOT_MEASURED if control is None or control.ratio is None else number(control.ratio)
    yield "Floor", f"{100 * stats.practical_floor(control.ratio if control is not None else None):.3g}"
    yield "Trim", f"{100 * stats.TRIM:g}"
    yield "Samples", str(sum(a.device_us.n for c in results.cells for a in results.arms(c) if a.device_us is not None))


def _peak(results: Results, best: str | None) -> Iterator[tuple[str, str]]:
    """The champion's highest rate, beside cuBLAS's."""
    timed = [(arm.tflops, c) for c in results.cells if best and (arm := results.arm(c, best)) and arm.tflops]
    rate, cell = max(timed) if timed else (None, None)
    roof = results.roofs.get(cell.dtype) if cell is not None else None
    yield "PeakTflops", _number(rate)
    yield "PeakShape", NOT_MEASURED if cell is None else f"{shape(cell)}, {cell.dtype}, {cell.mask}"
    yield "Roof", _number(roof.tflops.median if roof is not None else None)
    yield "PeakOverRoof", _number(rate / roof.tflops.median if rate is not None and roof is not None else None)


def _rung(results: Results, rung: Rung) -> Iterator[tuple[str, str]]:
    name, cell = camel(rung.id), results.ladder.cell_of(rung)
    arm = results.arm(cell, rung.id)
    step = results.comparison(cell, rung.id, rung.parent) if rung.parent is not None else None
    ratio = step.ratio if step is not None else None
    yield f"Time{name}", _us(results, cell, rung.id)
    yield f"Tflops{name}", _number(arm.tflops if arm is not None else None)
    yield f"Roofline{name}", _number(arm.roofline_pct if arm is not None else None)
    yield f"Step{name}", _number(ratio)
    yield f"StepCi{name}", tables.comparison(step)
    yield f"Gain{name}", NOT_MEASURED if ratio is None else f"{100 * abs(ratio - 1):.1f} %"
    yield f"Verdict{name}", NOT_MEASURED if step is None else step.verdict
    for prediction in (p for p in results.predictions if p.rung == rung.id and p.metric == "time"):
        yield f"Predicted{name}", tables.expected(prediction)
        yield f"Outcome{name}", prediction.outcome
    for quote, declared in rung.quotes.items():
        yield name + camel(quote), tables.quoted(results, rung, declared)


def _variant(results: Results, variant: Rung) -> Iterator[tuple[str, str]]:
    """The range of the parent's time over the variant's, over the cells of the type that it is read in."""
    found = [c.ratio for cell in results.cells if (c := results.variant_step(cell, variant)) and c.ratio]
    name = variant_name(results, variant)
    yield f"{name}Low", _number(min(found, default=None))
    yield f"{name}High", _number(max(found, default=None))


def _peer(results: Results, peer: str) -> Iterator[tuple[str, str]]:
    """The champion against one peer: over all cells, and over those of the headline set."""
    best, name = aliases(results).get("champion"), f"Over{camel(peer)}"
    pairs = [(cell, c) for cell in results.cells if best and (c := results.comparison(cell, best, peer)) and c.ratio]
    for verdict in ("faster", "slower", "same"):
        yield name + verdict.capitalize(), str(sum(c.verdict == verdict for _, c in pairs))
    yield f"{name}Cells", str(len(pairs))
    large = [c.ratio for cell, c in pairs if "headline" in sets_of(cell, results.l2(cell)) and c.ratio]
    yield f"{name}Low", _number(min(large, default=None))
    yield f"{name}High", _number(max(large, default=None))
    yield f"{name}Mean", _number(math.exp(fmean(map(math.log, large))) if large else None)
    worst = min(pairs, key=lambda pair: pair[1].ratio or 0.0, default=None)
    yield f"{name}Worst", _number(worst[1].ratio if worst is not None else None)
    yield f"{name}WorstShape", NOT_MEASURED if worst is None else f"{shape(worst[0])}, {worst[0].dtype}"


def _us(results: Results, cell: Cell, name: str | None) -> str:
    return _number(results.median_us(cell, name) if name is not None else None)


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else number(value)


def _text(value: int | None) -> str:
    return "unknown" if value is None else str(value)
