"""Plots as pure functions of a run's diagnosis. The same records give the same bytes; no display or home is needed."""

from __future__ import annotations

import gc
import io
import itertools
import logging
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from flashladder import bottleneck, flops
from flashladder.diagnose import Results, legs
from flashladder.ladder import Leg
from flashladder.model import ArmStats, Cell, PredictionOutcome, Rung
from flashladder.summary import champion
from flashladder.tables import headline_cells, number, shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

Format: TypeAlias = Literal["svg", "pdf", "png"]
PUBLISHED: tuple[Format, ...] = ("svg", "pdf")

POINTS_PER_INCH = 72
"""The resolution of SVG and PDF, for which the layout is made."""

CHAMPION = "#D55E00"
BASELINE = "#000000"
PALETTE = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
"""Okabe and Ito's colours, which stay apart for the colour-blind; their yellow is too light for lines."""
GREY = "#8A8A8A"
MARKERS = ("s", "^", "v", "D", "P", "X", "<", ">")
LINES = ("-", ":", "-.")
"""One for each round through the palette."""

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "flashladder",
    "pdf.fonttype": 42,
    "text.parse_math": False,
}
"""Names are shown as they are: no mathtext, so tick labels need formatters that do not use it."""

_WHITE: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""Keeps text readable where a line passes behind it."""

_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@dataclass(frozen=True)
class Plot:
    draw: Callable[[Figure, Results], None]
    alt: Callable[[Results], str]
    """What the figure shows, in words."""

    def render(self, results: Results, forms: Sequence[Format] = PUBLISHED) -> dict[Format, bytes]:
        return render(self.draw, results, forms, self.alt(results))


def _ladder_alt(results: Results) -> str:
    return " ".join(leg_alt(results, leg) for leg in legs(results))


def leg_alt(results: Results, leg: Leg) -> str:
    """The times of a leg in words."""
    cell = leg.cell
    times = [(name, us) for name in _names(results, leg) if (us := results.median_us(cell, name)) is not None]
    if not times:
        return f"No rung was timed at {shape(cell)}."
    steps = ", ".join(f"{name} {number(us)} us" for name, us in times)
    baseline = results.median_us(cell, results.ladder.baseline)
    against = "" if baseline is None else f"; {results.ladder.baseline} {number(baseline)} us"
    return f"Time of each rung at {shape(cell)}, {cell.dtype}, {cell.mask}: {steps}{against}."


def _names(results: Results, leg: Leg) -> list[str]:
    """The leg's rungs that have records."""
    return [rung.id for rung in leg.rungs if rung.id in results.rungs]


def _scaling_alt(results: Results) -> str:
    cells = _scaling_cells(results)
    if not cells:
        return "No cell of the headline set was timed."
    lengths = [cell.shape.seq_k for cell in cells]
    best = champion(results)
    who = "rungs and peers" if best is None else f"{best}, the other rungs and the peers"
    return f"TFLOP/s of {who} over sequence lengths {min(lengths)} to {max(lengths)}, by head dimension and mask."


# --- rendering ------------------------------------------------------------------------------------------------------


def render(draw: Callable[[Figure, T], None], results: T, forms: Sequence[Format], title: str) -> dict[Format, bytes]:
    """What `draw` makes of the results, in the project's style; the same bytes every time."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns when it has no home and takes a temporary one
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.transforms import Bbox

    style: Any = _STYLE
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(style)
        layout = ConstrainedLayoutEngine()
        figure = Figure(layout=layout, dpi=POINTS_PER_INCH)
        FigureCanvasAgg(figure)
        draw(figure, results)
        layout.execute(figure)
        figure.set_layout_engine("none")  # every form has the layout that was just made
        for axes in figure.axes:  # the layout's solver differs in the last bits from run to run
            axes.set_position(Bbox.from_bounds(*(round(x, 6) for x in axes.get_position(original=True).bounds)))
        return {form: _saved(figure, form, title) for form in forms}


def begin(results: Results) -> Callable[[], dict[str, dict[Format, bytes]]]:
    """Begin to draw every figure in processes of their own; the call waits for them and gives name -> form -> bytes."""
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401 - imported once here, not in every child

    fork = multiprocessing.get_context("fork")  # children have the results without pickling
    pool = ProcessPoolExecutor(os.cpu_count(), fork, initializer=_inherit, initargs=(results,))
    waiting = {name: pool.submit(_draw, name) for name in FIGURES}
    pool.shutdown(wait=False)
    return lambda: {name: drawn.result() for name, drawn in waiting.items()}


_inherited: list[Results] = []
"""Of a child: what it draws."""


def _inherit(results: Results) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it at once, without a traceback
    gc.disable()  # it lives for seconds, an eighth of which the search for cycles would take
    _inherited.append(results)


def _draw(name: str) -> dict[Format, bytes]:
    return FIGURES[name].render(_inherited[0])


def _saved(figure: Figure, form: Format, title: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=2 * POINTS_PER_INCH, metadata={**_METADATA[form], "Title": title})
    return buffer.getvalue()


def _say(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=GREY)


# --- the ladder -----------------------------------------------------------------------------------------------------


def _ladder(figure: Figure, results: Results) -> None:
    parts = legs(results)
    rows = [max(len(_names(results, leg)), 2) for leg in parts]
    figure.set_size_inches(7.2, 1.1 * len(parts) + 0.25 * sum(rows))
    for axes, leg in zip(figure.subplots(len(parts), height_ratios=rows, squeeze=False)[:, 0], parts, strict=True):
        _leg(axes, results, leg)


def _leg(axes: Axes, results: Results, leg: Leg) -> None:
    cell, names = leg.cell, _names(results, leg)
    arms = {name: arm for name in names if (arm := results.arm(cell, name)) is not None}
    timed = {name: arm for name, arm in arms.items() if arm.device_us is not None}
    if not timed:
        _say(axes, leg_alt(results, leg))
        return
    baseline = results.median_us(cell, results.ladder.baseline)
    medians = [us for name in (*names, results.ladder.baseline) if (us := results.median_us(cell, name))]
    _time_axis(axes, medians)
    if baseline is not None:
        axes.axvline(baseline, color=BASELINE, linestyle="--", linewidth=1)
        label = f"{results.ladder.baseline}  {number(baseline)} us"
        axes.text(baseline, 1.01, label, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    for row, name in enumerate(names):
        if name in timed:
            _rung(axes, row, timed[name], _step(results, leg, name))
        else:
            status = arms[name].status if name in arms else "not measured"
            text = axes.text(0.01, row, status, transform=axes.get_yaxis_transform(), va="center", color=GREY)
            text.set(style="italic", bbox=_WHITE)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(
        "device time a launch (us, log scale), and the parent's time over it (\u00d7)\n"
        f"{shape(cell)}, {cell.dtype}, {cell.mask}"
    )


def _time_axis(axes: Axes, times: Sequence[float]) -> None:
    """A log axis with room for the labels right of the points."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    decades = max(math.log10(max(times) / min(times)), 0.5)
    axes.set_xscale("log")
    axes.set_xlim(min(times) * 10 ** (-0.12 * decades), max(times) * 10 ** (0.34 * decades))
    subs = (
        (1.0,) if decades > 2 else (1.0, 2.0, 5.0) if decades > 0.6 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    )
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.grid(axis="x")


def _rung(axes: Axes, row: int, arm: ArmStats, step: str) -> None:
    assert arm.device_us is not None
    median, (low, high) = arm.device_us.median, arm.device_us.ci
    axes.hlines(row, axes.get_xlim()[0], median, color="#D0D0D0", linewidth=1)
    axes.errorbar(
        median, row, xerr=[[median - low], [high - median]], fmt="o", color=CHAMPION, markersize=5, capsize=2.5
    )
    label = f"{number(median)} us" + (f"   {step}" if step else "")
    axes.annotate(label, (high, row), xytext=(7, 0), textcoords="offset points", va="center", bbox=_WHITE)


def _step(results: Results, leg: Leg, name: str) -> str:
    """The speed-up against the parent; a difference that is not established says so."""
    parent = results.ladder[name].parent
    step = results.comparison(leg.cell, name, parent) if parent is not None else None
    if step is None or step.ratio is None:
        return ""
    doubt = "" if step.verdict in ("faster", "slower") else f" ({step.verdict})"
    return f"\u00d7{number(step.ratio)}{doubt}"


# --- scaling --------------------------------------------------------------------------------------------------------


def _scaling_cells(results: Results) -> list[Cell]:
    """One dtype of the headline set: the reference's, or the first there is."""
    cells = headline_cells(results)
    dtypes = sorted({cell.dtype for cell in cells}, key=lambda dtype: (dtype != results.ladder.reference.dtype, dtype))
    return [cell for cell in cells if cell.dtype == dtypes[0]]


def _scaling(figure: Figure, results: Results) -> None:
    cells = _scaling_cells(results)
    dims = sorted({cell.shape.head_dim for cell in cells})
    masks = sorted({cell.causal for cell in cells})
    if not cells:
        figure.set_size_inches(7.2, 1.5)
        _say(figure.add_subplot(), _scaling_alt(results))
        return
    figure.set_size_inches(1.2 + 3.0 * len(masks), 0.9 + 2.4 * len(dims))
    panels = figure.subplots(len(dims), len(masks), sharex=True, sharey=True, squeeze=False)
    lines: dict[str, Any] = {}
    for (row, dim), (column, causal) in itertools.product(enumerate(dims), enumerate(masks)):
        axes = panels[row][column]
        panel = [c for c in cells if (c.shape.head_dim, c.causal) == (dim, causal)]
        drawn = _panel(axes, panel, results)
        lines |= drawn
        if not drawn:
            axes.text(0.5, 0.5, "not timed", ha="center", va="center", transform=axes.transAxes, color=GREY)
        axes.set_title(f"head dim {dim}, {'causal' if causal else 'full'}")
    _scale_axes(panels, cells)
    figure.supxlabel("sequence length (log scale)", fontsize=9)
    figure.supylabel(f"TFLOP/s, {cells[0].dtype}", fontsize=9)
    order = [label for label in (*_styles(results), "other rungs") if label in lines]
    if order:
        handles = [lines[label] for label in order]
        figure.legend(handles, order, loc="outside upper center", ncols=min(len(order), 4))


def _styles(results: Results) -> dict[str, dict[str, Any]]:
    """How each arm is drawn: the champion and the baseline stand out, rungs below the champion recede."""
    best = champion(results)
    styles: dict[str, dict[str, Any]] = {}
    if best is not None:
        styles[best] = {"color": CHAMPION, "linewidth": 2, "marker": "o", "zorder": 4}
    others = [peer for peer in results.peers if peer != results.ladder.baseline]
    styles[results.ladder.baseline] = {"color": BASELINE, "linestyle": "--", "marker": "o", "zorder": 3}
    colours = itertools.cycle(itertools.product(LINES, PALETTE))
    for peer, (line, colour), marker in zip(others, colours, itertools.cycle(MARKERS)):
        styles[peer] = {"color": colour, "linestyle": line, "linewidth": 1.2, "marker": marker, "zorder": 2.5}
    return styles


def _panel(axes: Axes, cells: Sequence[Cell], results: Results) -> dict[str, Any]:
    """Draws every arm that has a time in the cells; returns the lines by label."""
    styles = _styles(results)
    recede = {"color": "#BDBDBD", "linewidth": 0.9, "marker": ".", "zorder": 2}
    lines: dict[str, Any] = {}
    for name in (*results.rungs, *results.peers):
        points = [(cell.shape.seq_k, *_rate(arm)) for cell in cells if (arm := _timed(results, cell, name)) is not None]
        if points:
            x, y, down, up = zip(*points, strict=True)
            style = {"markersize": 4, "capsize": 2, **styles.get(name, recede)}
            lines[name if name in styles else "other rungs"] = axes.errorbar(x, y, yerr=[down, up], **style)
    axes.grid()
    return lines


def _timed(results: Results, cell: Cell, name: str) -> ArmStats | None:
    arm = results.arm(cell, name)
    return arm if arm is not None and arm.device_us is not None else None


def _rate(arm: ArmStats) -> tuple[float, float, float]:
    """TFLOP/s, and how far its interval reaches down and up."""
    assert arm.device_us is not None
    work = flops.flops(arm.cell) / 1e6
    rate = work / arm.device_us.median
    low, high = arm.device_us.ci
    return rate, rate - work / high, work / low - rate


def _scale_axes(panels: Any, cells: Sequence[Cell]) -> None:
    """Lengths on a log axis, rates from 0."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    lengths = sorted({cell.shape.seq_k for cell in cells})
    for axes in panels.flat:
        axes.set_xscale("log", base=2)
        axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.set_ylim(bottom=0)


# --- leave one out --------------------------------------------------------------------------------------------------


def _variant_cells(results: Results) -> list[Cell]:
    """The cells in which a variant was compared with its parent, in the type that it is read in."""
    return [c for c in results.cells if any(results.variant_step(c, v) for v in results.ladder.variants)]


def _leave_one_out_alt(results: Results) -> str:
    cells = _variant_cells(results)
    if not cells:
        return "No variant was timed."
    return f"Speed of {len(results.variants)} variants relative to their parent in {len(cells)} cells."


def _leave_one_out(figure: Figure, results: Results) -> None:
    cells = _variant_cells(results)
    if not cells:
        figure.set_size_inches(7.2, 1.5)
        _say(figure.add_subplot(), _leave_one_out_alt(results))
        return
    groups: dict[str, list[Rung]] = {}
    for variant in results.ladder.variants:
        if variant.id in results.variants:
            groups.setdefault(variant.parent or "", []).append(variant)
    heights = [len(variants) + 2 for variants in groups.values()]
    figure.set_size_inches(7.2, 0.8 + 0.27 * sum(heights))
    panels = figure.subplots(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (parent, variants) in zip(panels, groups.items(), strict=True):
        _variants(axes, results, parent, variants, cells)
    figure.supxlabel(
        f"the parent's time over the variant's, {results.ladder.reference.dtype} unless named: below 1 the variant is "
        "slower\nhollow: causal",
        fontsize=9,
    )


def _variants(axes: Axes, results: Results, parent: str, variants: Sequence[Rung], cells: Sequence[Cell]) -> None:
    """A row a variant; a colour and marker a shape, hollow where the mask is causal."""
    shown = [c for c in cells if any(results.variant_step(c, v) for v in variants)]
    names = [v.id if v.dtype is None else f"{v.id} ({v.dtype})" for v in variants]
    shapes = list(dict.fromkeys(cell.shape for cell in shown))
    for place, cell in enumerate(shown):
        shift = 0.6 * ((place + 0.5) / len(shown) - 0.5)
        found = [(row, c) for row, v in enumerate(variants) if (c := results.variant_step(cell, v))]
        points = [(row + shift, c.ratio, *c.ci) for row, c in found if c.ratio is not None and c.ci is not None]
        if not points:
            continue
        y, x, low, high = (list(column) for column in zip(*points, strict=True))
        down, up = ([b - a for a, b in zip(*pair, strict=True)] for pair in ((low, x), (x, high)))
        style = shapes.index(cell.shape)
        colour = (*PALETTE, CHAMPION, BASELINE)[style % (len(PALETTE) + 2)]
        named = next((c for c in shown if c.shape == cell.shape and not c.causal), cell)
        axes.errorbar(
            x,
            y,
            xerr=[down, up],
            fmt=MARKERS[style % len(MARKERS)],
            markersize=4.5,
            color=colour,
            markerfacecolor="white" if cell.causal else colour,
            label=shape(cell) if cell == named else None,
        )
    axes.axvline(1, color=BASELINE, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.set_title(f"variants of {parent}", loc="left")
    if shown:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


# --- counters -------------------------------------------------------------------------------------------------------


def _profiled(results: Results) -> list[tuple[Cell, str]]:
    """The rungs and peers with counters at the cells that the ladder is read at."""
    return [
        (leg.cell, name)
        for leg in legs(results)
        for name in (*_names(results, leg), *results.peers)
        if results.counter(leg.cell, name, bottleneck.DURATION)
    ]


def _counters_alt(what: str) -> Callable[[Results], str]:
    def alt(results: Results) -> str:
        parts = []
        for leg in legs(results):
            names = [name for cell, name in _profiled(results) if cell == leg.cell]
            parts.append(f"{', '.join(names) if names else 'nothing was profiled'} at {shape(leg.cell)}")
        return f"{what} of {'; '.join(parts)}."

    return alt


_STALLS_ALT = _counters_alt("Cycles a warp waits for each issued instruction, by reason,")
_PIPES_ALT = _counters_alt("How busy pipes and memories are, in per cent of their peak,")


def _rows(figure: Figure, results: Results, alt: str) -> tuple[Axes | None, list[tuple[Cell, str]]]:
    """Axes with a row for each profiled kernel, the first on top; None, and `alt` in their place, without any."""
    rows = _profiled(results)
    figure.set_size_inches(7.2, 1.5 + 0.3 * len(rows))
    axes = figure.add_subplot()
    if not rows:
        _say(axes, alt)
        return None, rows
    first = rows[0][0]
    labels = [name if cell == first else f"{name}, {shape(cell)}" for cell, name in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x")
    return axes, rows


def _first_cell(rows: Sequence[tuple[Cell, str]]) -> str:
    """The cell of the rows whose label names none."""
    cell = rows[0][0]
    return f"{shape(cell)}, {cell.dtype}, {cell.mask}"


def _stalls(figure: Figure, results: Results) -> None:
    axes, rows = _rows(figure, results, _STALLS_ALT(results))
    if axes is None:
        return
    colours = itertools.cycle(itertools.product(("", "////"), PALETTE))
    left = [0.0] * len(rows)
    for reason, (hatch, colour) in zip((*bottleneck.STALLS, "not_selected"), colours, strict=False):
        widths = [results.counter(cell, name, bottleneck.stall(reason)) or 0.0 for cell, name in rows]
        if any(widths):
            label = reason.replace("_", " ")
            axes.barh(range(len(rows)), widths, left=left, color=colour, hatch=hatch, height=0.7, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel(f"cycles a warp waits for each issued instruction, {_first_cell(rows)}")
    figure.legend(loc="outside upper center", ncols=5)


_PIPE_LABELS = {
    "tensor": bottleneck.TENSOR,
    "FMA": bottleneck.FMA,
    "ALU": bottleneck.ALU,
    "MUFU": bottleneck.XU,
    "issue": bottleneck.ISSUE,
    "L1 and shared": bottleneck.L1,
    "L2": bottleneck.L2,
    "DRAM": bottleneck.DRAM,
}


def _pipes(figure: Figure, results: Results) -> None:
    axes, rows = _rows(figure, results, _PIPES_ALT(results))
    if axes is None:
        return
    for (label, metric), marker, colour in zip(
        _PIPE_LABELS.items(), itertools.cycle(MARKERS), itertools.cycle((*PALETTE, CHAMPION, BASELINE, GREY))
    ):
        values = [results.counter(cell, name, metric) for cell, name in rows]
        points = [(value, row) for row, value in enumerate(values) if value is not None]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, linestyle="none", marker=marker, markersize=5, color=colour, label=label)
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"% of peak, {_first_cell(rows)}")
    figure.legend(loc="outside upper center", ncols=4)


# --- roofline -------------------------------------------------------------------------------------------------------


def _roofline_points(results: Results, metric: str) -> list[tuple[str, Cell, float, float]]:
    """(arm, cell, FLOP a byte of `metric`, TFLOP/s as timed) of what was profiled and timed."""
    points = []
    for (cell, name), _ in results.profiles.items():
        moved, us = results.counter(cell, name, metric), results.median_us(cell, name)
        if moved and us:
            points.append((name, cell, flops.flops(cell) / moved, flops.flops(cell) / us / 1e6))
    return points


APART = (0.4, 0.1)
"""Least distance of two names on the roofline along either axis, in decades."""


def apart(points: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The points (name, x, y) whose names do not run into those of faster ones."""
    named: list[tuple[str, float, float]] = []
    for point in sorted(points, key=lambda point: -point[2]):
        if all(
            any(abs(math.log10(a / b)) > far for a, b, far in zip(point[1:], o[1:], APART, strict=True)) for o in named
        ):
            named.append(point)
    return named


def _roofline_alt(results: Results) -> str:
    points = _roofline_points(results, bottleneck.DRAM_BYTES)
    if results.gpu is None or not points:
        return "Roofline: nothing was profiled and timed on a GPU whose limits are declared."
    return f"Roofline of {len({name for name, *_ in points})} kernels, over bytes of device memory and of L2."


def _roofline(figure: Figure, results: Results) -> None:
    gpu, panels = results.gpu, {"device memory": bottleneck.DRAM_BYTES, "L2": bottleneck.L2_BYTES}
    if gpu is None or not _roofline_points(results, bottleneck.DRAM_BYTES):
        figure.set_size_inches(7.2, 1.5)
        _say(figure.add_subplot(), _roofline_alt(results))
        return
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure.set_size_inches(7.2, 3.8)
    clock = gpu.tensor_flops / gpu.tensor_flops_per_clk_sm / gpu.sms
    roofs = {"tensor cores": gpu.tensor_flops, "FP32 FMA": 2 * gpu.fp32_fma_per_clk_sm * gpu.sms * clock}
    if gpu.mma_sync_flops_per_clk_sm:
        roofs["mma.sync"] = gpu.mma_sync_flops_per_clk_sm * gpu.sms * clock
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (label, metric) in zip(grid, panels.items(), strict=True):
        for name, rate in roofs.items():
            axes.axhline(rate / 1e12, color=BASELINE, linewidth=0.8, linestyle="--")
            side = "top" if name == "mma.sync" else "bottom"
            axes.text(1.0, rate / 1e12, name, transform=axes.get_yaxis_transform(), ha="right", va=side, fontsize=7)
        if metric == bottleneck.DRAM_BYTES:
            knee = gpu.tensor_flops / gpu.dram_bytes_per_s
            axes.plot([1, knee], [gpu.dram_bytes_per_s / 1e12, gpu.tensor_flops / 1e12], color=BASELINE, linewidth=1)
        points = _roofline_points(results, metric)
        styles = _styles(results)
        for name, _, intensity, rate in points:
            style = styles.get(name, {"color": GREY, "marker": "."})
            axes.plot(intensity, rate, linestyle="none", marker=style["marker"], color=style["color"], markersize=5)
        for name, intensity, rate in apart([(name, x, y) for name, _, x, y in points]):
            short = name.split("_")[0] if name in results.rungs else name
            axes.annotate(short, (intensity, rate), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
        low, high = min(x for _, _, x, _ in points) / 3, max(x for _, _, x, _ in points)
        axes.set_xlim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 0.3))
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.grid()
        axes.set_title(f"bytes of {label}")
    figure.supxlabel("FLOP a byte (log scale)", fontsize=9)
    figure.supylabel("TFLOP/s (log scale)", fontsize=9)


# --- predictions ----------------------------------------------------------------------------------------------------


def _judged(results: Results) -> list[PredictionOutcome]:
    return [p for p in results.predictions if p.metric == "time" and p.measured]


def _calibration_alt(results: Results) -> str:
    judged = _judged(results)
    inside = sum(p.outcome == "confirmed" for p in judged)
    return f"Predicted and measured speed-up on the parent of {len(judged)} steps; {inside} were confirmed."


def _calibration(figure: Figure, results: Results) -> None:
    """A row a step: the predicted interval as a bar, what was measured as a dot, a cross where it was refuted."""
    judged = _judged(results)
    parts = [[p for p in judged if (p.rung in results.variants) == is_variant] for is_variant in (False, True)]
    parts = [part for part in parts if part] or [[]]
    figure.set_size_inches(7.2, 1.1 + 0.2 * max(*map(len, parts), 2))
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        if not part:
            _say(axes, _calibration_alt(results))
            return
        _predicted(axes, part)
    figure.supxlabel("speed-up on the parent, log scale: predicted (bar), confirmed (dot), refuted (cross)", fontsize=9)


def _predicted(axes: Axes, judged: Sequence[PredictionOutcome]) -> None:
    values = [x for p in judged for x in (*p.expected, p.measured or 1.0)]
    _time_axis(axes, values)
    axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
    for row, p in enumerate(judged):
        assert p.measured is not None
        axes.hlines(row, *p.expected, color=PALETTE[4], linewidth=6)
        low, high = p.ci or (p.measured, p.measured)
        marker, colour = ("o", BASELINE) if p.outcome == "confirmed" else ("X", CHAMPION)
        error = [[p.measured - low], [high - p.measured]]
        axes.errorbar(p.measured, row, xerr=error, marker=marker, markersize=4.5, color=colour, zorder=3)
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(judged)), [p.rung for p in judged])
    axes.set_ylim(len(judged) - 0.4, -0.6)


FIGURES = {
    "ladder": Plot(_ladder, _ladder_alt),
    "scaling": Plot(_scaling, _scaling_alt),
    "leave_one_out": Plot(_leave_one_out, _leave_one_out_alt),
    "stalls": Plot(_stalls, _STALLS_ALT),
    "pipes": Plot(_pipes, _PIPES_ALT),
    "roofline": Plot(_roofline, _roofline_alt),
    "calibration": Plot(_calibration, _calibration_alt),
}
"""ladder: time of every rung at the reference cell, with each step's speed-up.
leave_one_out: speed of each variant relative to its parent, a marker for each cell.
stalls, pipes: what the warps wait for and how busy the pipes are, a row for each profiled kernel.
roofline: rate over FLOP a byte of device memory and of L2, under the roofs of each family of instructions.
calibration: predicted against measured speed-up of every step.
scaling: TFLOP/s over sequence length in the headline set, a panel for each head dimension and mask."""
