"""The history of a loop as a plot: every attempt's ratio with its interval, and the champion's gain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from flashladder.figures import CHAMPION, GREY, PALETTE, render
from flashladder.loop import Attempt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALT = (
    "Ratio of every attempt to the champion of its time, with its interval, and the champion's gain over the first one."
)


def plot(attempts: Sequence[Attempt]) -> bytes:
    """SVG; the same attempts give the same bytes."""
    return render(_draw, attempts, ("svg",), ALT)["svg"]


def _draw(figure: Figure, attempts: Sequence[Attempt]) -> None:
    from matplotlib.ticker import MaxNLocator

    figure.set_size_inches(7.2, 3.6)
    axes = figure.subplots()
    accepted = [a.outcome == "accepted" and a.ratio is not None for a in attempts]
    steps = [a.ratio.ratio if won and a.ratio is not None else 1.0 for won, a in zip(accepted, attempts, strict=True)]
    numbers = [0, *(a.number for a in attempts)]
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    gains = list(accumulate(steps, lambda a, b: a * b, initial=1.0))
    axes.step(numbers, gains, where="post", color=CHAMPION, label="champion, over the first")
    for won, colour, marker, label in (
        (True, CHAMPION, "o", "accepted, over the champion of its time"),
        (False, PALETTE[0], "x", "not accepted"),
    ):
        shown = [(a.number, a.ratio) for a, w in zip(attempts, accepted, strict=True) if w == won and a.ratio]
        if shown:
            axes.errorbar(
                [n for n, _ in shown],
                [r.ratio for _, r in shown],
                yerr=[[max(r.ratio - r.low, 0) for _, r in shown], [max(r.high - r.ratio, 0) for _, r in shown]],
                fmt=marker,
                color=colour,
                linewidth=0.8,
                markersize=4,
                label=label,
            )
    if untimed := [a.number for a in attempts if a.ratio is None]:
        axes.plot(untimed, [1.0] * len(untimed), "|", color=GREY, markersize=7, label="without a time")
    axes.set_xlabel("attempt")
    axes.set_ylabel("ratio, above 1 faster")
    axes.set_xlim(-0.5, max(len(attempts), 1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
