"""The page's charts: Vega-Lite specifications as plain data, and the rows that its filters choose from. Pure.

Sizes are left to the page, which sets the width of its column; colours that depend on light or dark are its too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flashladder import bottleneck, flops
from flashladder.diagnose import Results, legs
from flashladder.figures import CHAMPION, PALETTE, apart
from flashladder.ladder import Leg, load_shapes
from flashladder.model import Cell, Gpu
from flashladder.summary import champion, sets_of
from flashladder.tables import NOT_MEASURED, comparison, headline_cells, interval, number, shape

Spec = dict[str, Any]
Row = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
ROW = 19
"""Height of a row of the heat map, in pixels; the page multiplies it by its rows."""
FAR = 3.0
"""A ratio from which the heat map's colour is full."""


def ladders(results: Results) -> dict[str, Spec]:
    """Leg -> chart of its rungs' times."""
    return {leg.name: _ladder(results, leg) for leg in legs(results)}


def _ladder(results: Results, leg: Leg) -> Spec:
    rows = [_rung(results, leg, rung.id) for rung in leg.rungs if rung.id in results.rungs]
    timed = [row for row in rows if row["us"] is not None]
    baseline = results.median_us(leg.cell, results.ladder.baseline)
    times = [row["us"] for row in timed] + ([baseline] if baseline else [])
    low, high = (min(times), max(times)) if times else (1.0, 10.0)
    decades = max(math.log10(high / low), 0.5)
    x = {
        "field": "us",
        "type": "quantitative",
        "title": "device time a launch (us, log scale)",
        "scale": {
            "type": "log",
            "domain": [_short(low * 10 ** (-0.12 * decades)), _short(high * 10 ** (0.6 * decades))],
            "nice": False,
        },
        "axis": {"format": "~s" if high > 10_000 else "~r", "tickCount": 5, "labelOverlap": True},
    }
    y = {
        "field": "rung",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"labelLimit": 140, "domain": False, "ticks": False},
    }
    layers: list[Spec] = [
        {"mark": {"type": "rule", "opacity": 0.3}, "encoding": {"x": {**x, "field": "start"}, "x2": {"field": "us"}}},
        {
            "mark": {"type": "rule", "color": CHAMPION},
            "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "color": CHAMPION, "opacity": 1},
            "encoding": {"x": x, "tooltip": _tooltip("rung", "change", "time", *_RATIOS, "rate")},
        },
        {
            "mark": {"type": "text", "align": "right", "fontSize": 11},
            "encoding": {"x": {"value": "width"}, "text": {"field": "label"}},
        },
    ]
    if baseline is not None:
        label = f"{results.ladder.baseline} {number(baseline)} us"
        rule = {"data": {"values": [{"us": _short(baseline), "label": label}]}}
        layers.append({**rule, "mark": {"type": "rule", "strokeDash": [5, 3]}, "encoding": {"x": x, "y": {"value": 0}}})
        layers[-1]["encoding"]["y2"] = {"value": "height"}
        text = {"type": "text", "align": "center", "baseline": "bottom", "dy": -4, "fontSize": 11}
        layers.append(
            {
                **rule,
                "mark": text,
                "encoding": {"x": x, "y": {"value": 0}, "text": {"field": "label", "type": "nominal"}},
            }
        )
    for row in rows:
        row["start"] = layers[0]["encoding"]["x"]["scale"]["domain"][0]
    for layer in layers[:4]:
        layer["encoding"]["y"] = y
    return {
        "$schema": SCHEMA,
        "data": {"values": timed},
        "height": 24 * max(len(timed), 1),
        "layer": layers,
        "resolve": {"scale": {"x": "shared"}},
    }


_RATIOS = ("x parent", "x first", "x baseline")
_TITLES = {
    "rate": "TFLOP/s",
    "mine": "champion (us)",
    "theirs": "peer (us)",
    "intensity": "FLOP a byte",
    "verdict": "champion is",
}


def _tooltip(*fields: str) -> list[Spec]:
    return [{"field": field, "type": "nominal", "title": _TITLES.get(field, field)} for field in fields]


def _rung(results: Results, leg: Leg, name: str) -> Row:
    rung, arm = results.ladder[name], results.arm(leg.cell, name)
    device = arm.device_us if arm is not None else None
    step = results.comparison(leg.cell, name, rung.parent) if rung.parent is not None else None
    row: Row = {
        "rung": name,
        "change": rung.change,
        "us": None,
        "x parent": "-" if rung.parent is None else comparison(step),
        "x first": _ratio(results, leg.cell, name, leg.rungs[0].id),
        "x baseline": comparison(results.comparison(leg.cell, name, results.ladder.baseline)),
    }
    if arm is None or device is None:
        return row
    factor = f"  \u00d7{number(step.ratio)}" if step is not None and step.ratio is not None else ""
    return row | {
        "us": _short(device.median),
        "low": _short(device.ci[0]),
        "high": _short(device.ci[1]),
        "time": f"{interval(device.median, device.ci)} us",
        "rate": number(arm.tflops) if arm.tflops is not None else NOT_MEASURED,
        "label": f"{number(device.median)} us{factor}",
        "say": f"{name}: {number(device.median)} us; {comparison(step)} against its parent; {rung.change}",
    }


def _ratio(results: Results, cell: Cell, name: str, other: str) -> str:
    value = None if name == other else results.ratio(cell, name, other)
    return "-" if value is None else number(value)


def _short(value: float) -> float:
    """Four significant digits: what a chart can show."""
    return float(f"{value:.4g}")


# --- shapes ---------------------------------------------------------------------------------------------------------


def measured_peers(results: Results) -> list[str]:
    """Peers that were timed in some cell."""
    return [p for p in results.peers if any(results.median_us(cell, p) is not None for cell in results.cells)]


def ordered(results: Results) -> list[Cell]:
    """The cells by set, head dimension, mask and length."""
    names = {name: i for i, name in enumerate(load_shapes())}

    def key(cell: Cell) -> tuple[int, int, bool, int, Cell]:
        first = min((names[name] for name in sets_of(cell, results.l2(cell))), default=len(names))
        return first, cell.shape.head_dim, cell.causal, cell.shape.seq_k, cell

    return sorted(results.cells, key=key)


def ratios(results: Results) -> list[Row]:
    """A row for each cell and peer: the peer's time over the champion's."""
    best = champion(results)
    if best is None:
        return []
    return [_pair(results, cell, best, p) for cell in ordered(results) for p in measured_peers(results)]


def _pair(results: Results, cell: Cell, best: str, peer: str) -> Row:
    found, arm = results.comparison(cell, best, peer), results.arm(cell, peer)
    mine, theirs = results.median_us(cell, best), results.median_us(cell, peer)
    row: Row = {
        **facets(cell),
        "peer": peer,
        "mine": NOT_MEASURED if mine is None else number(mine),
        "theirs": number(theirs) if theirs is not None else (arm.status if arm is not None else NOT_MEASURED),
        "verdict": found.verdict if found is not None else "-",
        "ratio": None,
        "text": "-",
    }
    if found is not None and found.ratio is not None and found.ci is not None:
        row |= {"ratio": _short(found.ratio), "text": number(found.ratio), "x peer": interval(found.ratio, found.ci)}
        at = f"{shape(cell)} {cell.mask} {cell.dtype}"
        row["say"] = f"{at}: {peer}'s time is {number(found.ratio)} times the champion's, {found.verdict}"
    return row


def facets(cell: Cell) -> Row:
    """What the filters choose by, and the names of a cell."""
    return {
        "shape": shape(cell),
        "dtype": cell.dtype,
        "mask": cell.mask,
        "dim": str(cell.shape.head_dim),
    }


def heat_map(peers: Sequence[str]) -> Spec:
    """Shape by peer; the page puts the rows in, with `label`, and the colours."""
    x = {
        "field": "peer",
        "type": "nominal",
        "sort": list(peers),
        "title": None,
        "axis": {"orient": "top", "labelAngle": -40, "labelLimit": 120, "domain": False, "ticks": False},
    }
    y = {
        "field": "label",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"labelLimit": 220, "domain": False, "ticks": False},
    }
    hover = _tooltip("shape", "mask", "dtype", "peer", "x peer", "verdict", "mine", "theirs")
    scale = {"type": "log", "domain": [1 / FAR, 1, FAR], "clamp": True, "interpolate": "rgb"}
    colour = {
        "condition": {
            "test": "isValid(datum.ratio)",
            "field": "ratio",
            "type": "quantitative",
            "scale": scale,
            "legend": {
                "title": "peer's time / champion's (log scale)",
                "orient": "bottom",
                "gradientLength": 240,
                "titleLimit": 300,
                "values": [1 / FAR, 1, FAR],
                "labelExpr": f"datum.value < 1 ? '{1 / FAR:.2g}: slower' : datum.value > 1 ? '{FAR:g}: faster' : '1'",
            },
        },
        "value": "transparent",
    }
    return {
        "$schema": SCHEMA,
        "height": ROW,
        "layer": [
            {
                "mark": {"type": "rect"},
                "encoding": {"x": x, "y": y, "color": colour, "tooltip": hover},
            },
            {
                "mark": {"type": "text", "fontSize": 10},
                "encoding": {"x": x, "y": y, "text": {"field": "text", "type": "nominal"}, "tooltip": hover},
            },
        ],
    }


def rates(results: Results) -> list[Row]:
    """TFLOP/s of the champion and the peers in the headline set."""
    best = champion(results)
    names = [*([best] if best else []), *measured_peers(results)]
    rows = []
    for cell in headline_cells(results):
        for name in names:
            arm = results.arm(cell, name)
            if arm is None or arm.device_us is None:
                continue
            work, (low, high) = flops.flops(cell) / 1e6, arm.device_us.ci
            rate = work / arm.device_us.median
            rows.append(
                {
                    **facets(cell),
                    "name": name,
                    "length": cell.shape.seq_k,
                    "rate": _short(rate),
                    "low": _short(work / high),
                    "high": _short(work / low),
                    "TFLOP/s": interval(rate, (work / high, work / low)),
                }
            )
    return rows


def scaling(results: Results) -> Spec:
    """TFLOP/s over sequence length; the page makes one for each head dimension, mask and dtype."""
    styles = arm_styles(results)
    domain = list(styles)
    x: Spec = {"field": "length", "type": "quantitative", "title": "sequence length (log scale)"}
    x |= {"scale": {"type": "log", "base": 2, "nice": False}, "axis": {"format": "d", "grid": False}}
    y: Spec = {"field": "rate", "type": "quantitative", "title": "TFLOP/s", "scale": {"zero": True}}
    colour = {
        "field": "name",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": domain, "range": [s["colour"] for s in styles.values()]},
    }
    forms = {"domain": domain, "range": [s["shape"] for s in styles.values()]}
    dashes = {"domain": domain, "range": [[1, 0] if i <= len(PALETTE) else [4, 3] for i in range(len(domain))]}
    return {
        "$schema": SCHEMA,
        "height": 200,
        "encoding": {"x": x, "y": y, "color": colour},
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 1.5},
                "encoding": {"strokeDash": {"field": "name", "type": "nominal", "legend": None, "scale": dashes}},
            },
            {"mark": "rule", "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}},
            {
                "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
                "encoding": {
                    "shape": {"field": "name", "type": "nominal", "legend": None, "scale": forms},
                    "tooltip": _tooltip("name", "shape", "mask", "dtype", "TFLOP/s"),
                },
            },
        ],
    }


TEXT = "$text"
"""Stands for the page's colour of text: black in light, white in dark."""
_SHAPES = ("square", "triangle-up", "triangle-down", "diamond", "cross", "triangle-right", "triangle-left", "stroke")


def arm_styles(results: Results) -> dict[str, dict[str, str]]:
    """Colour and symbol of the champion and of each measured peer: no two alike."""
    best = champion(results)
    styles = {best: {"colour": CHAMPION, "shape": "circle"}} if best else {}
    others = [p for p in measured_peers(results) if p != results.ladder.baseline]
    if results.ladder.baseline in results.peers:
        styles[results.ladder.baseline] = {"colour": TEXT, "shape": "circle"}
    for i, peer in enumerate(others):
        styles[peer] = {"colour": PALETTE[i % len(PALETTE)], "shape": _SHAPES[i % len(_SHAPES)]}
    return styles


# --- roofline -------------------------------------------------------------------------------------------------------

MEMORIES = {"device memory": bottleneck.DRAM_BYTES, "L2": bottleneck.L2_BYTES}


def roofline_rows(results: Results, memory: str) -> list[Row]:
    """What was profiled and timed: its rate over FLOP a byte of that memory, the fastest first."""
    order = {rung.id for rung in results.ladder.rungs}
    rows: list[Row] = []
    for cell, name in results.profiles:
        moved, us = results.counter(cell, name, MEMORIES[memory]), results.median_us(cell, name)
        if moved and us and name not in results.variants:
            x, y = flops.flops(cell) / moved, flops.flops(cell) / us / 1e6
            rows.append(
                {
                    "name": name,
                    "short": name.split("_")[0] if name in order else name,
                    "kind": "rung" if name in order else "peer",
                    "at": f"{shape(cell)}, {cell.dtype}, {cell.mask}",
                    "x": _short(x),
                    "y": _short(y),
                    "intensity": number(x),
                    "rate": number(y),
                    "say": f"{name}, {shape(cell)}: {number(y)} TFLOP/s at {number(x)} FLOP a byte of {memory}",
                }
            )
    return sorted(rows, key=lambda row: -row["y"])


def rooflines(results: Results) -> dict[str, Spec]:
    """Memory -> chart; empty when nothing was profiled and timed on a GPU whose limits are declared."""
    found = {memory: roofline_rows(results, memory) for memory in MEMORIES}
    if results.gpu is None or not all(found.values()):
        return {}
    return {memory: _roofline(results.gpu, memory, rows) for memory, rows in found.items()}


def _roofline(gpu: Gpu, memory: str, rows: Sequence[Row]) -> Spec:
    clock = gpu.tensor_flops / gpu.tensor_flops_per_clk_sm / gpu.sms
    roofs = {"tensor cores": gpu.tensor_flops, "FP32 FMA": 2 * gpu.fp32_fma_per_clk_sm * gpu.sms * clock}
    if gpu.mma_sync_flops_per_clk_sm:
        roofs["mma.sync"] = gpu.mma_sync_flops_per_clk_sm * gpu.sms * clock
    knee = gpu.tensor_flops / gpu.dram_bytes_per_s if memory == "device memory" else None
    left = 10 ** math.floor(math.log10(min(row["x"] for row in rows)) - 0.5)
    right = 10 ** math.ceil(math.log10(max(max(row["x"] for row in rows), knee or 0)) + 0.3)
    bottom = 10 ** math.floor(math.log10(min(row["y"] for row in rows)))
    top = 2 * gpu.tensor_flops / 1e12
    lines, names = [], []
    for name, rate in roofs.items():
        start = max(rate / gpu.dram_bytes_per_s, left) if knee else left
        lines += [{"roof": name, "x": _short(x), "y": _short(rate / 1e12)} for x in (start, right)]
        names.append({"roof": name, "x": right, "y": _short(rate / 1e12), "over": name != "mma.sync"})
    if knee:
        slope = gpu.dram_bytes_per_s / 1e12
        lines += [{"roof": memory, "x": _short(x), "y": _short(x * slope)} for x in (left, knee)]
    named = apart([(row["name"], row["x"], row["y"]) for row in rows])
    x: Spec = {"field": "x", "type": "quantitative", "title": f"FLOP a byte of {memory} (log scale)"}
    x |= {"scale": {"type": "log", "domain": [left, right]}, "axis": {"format": "~g", "values": _decades(left, right)}}
    y: Spec = {"field": "y", "type": "quantitative", "title": "TFLOP/s (log scale)"}
    y |= {"scale": {"type": "log", "domain": [bottom, top]}, "axis": {"format": "~g", "values": _decades(bottom, top)}}
    kinds = {"domain": ["rung", "peer"], "range": [CHAMPION, PALETTE[0]]}
    forms = {"domain": ["rung", "peer"], "range": ["circle", "diamond"]}
    legend = {"title": None, "orient": "top"}
    return {
        "$schema": SCHEMA,
        "height": 380,
        "layer": [
            {
                "data": {"values": lines},
                "mark": {"type": "line", "strokeDash": [5, 3], "strokeWidth": 1},
                "encoding": {"x": x, "y": y, "detail": {"field": "roof", "type": "nominal"}},
            },
            *(
                {
                    "data": {"values": [name for name in names if name["over"] == over]},
                    "mark": {"type": "text", "align": "right", "dy": -7 if over else 8, "fontSize": 11},
                    "encoding": {"x": x, "y": y, "text": {"field": "roof", "type": "nominal"}},
                }
                for over in (True, False)
            ),
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {"field": "kind", "type": "nominal", "scale": kinds, "legend": legend},
                    "shape": {"field": "kind", "type": "nominal", "scale": forms, "legend": legend},
                    "tooltip": _tooltip("name", "at", "rate", "intensity"),
                },
            },
            {
                "data": {"values": [row for row in rows if (row["name"], row["x"], row["y"]) in named]},
                "mark": {"type": "text", "align": "left", "dx": 7, "fontSize": 10},
                "encoding": {"x": x, "y": y, "text": {"field": "short", "type": "nominal"}},
            },
        ],
    }


def _decades(low: float, high: float) -> list[float]:
    return [_short(10.0**e) for e in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def sets(results: Results, cell: Cell) -> str:
    return ", ".join(sets_of(cell, results.l2(cell))) or "-"
