"""Paired comparison of two arms of a block design, and what is needed to decide on it.

A block visits its arms in random order and then in the reverse order, so any two arms form an ABBA or BAAB quad in it:
drift that is linear over the block cancels, and the random order makes what remains symmetric. Times are nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr

from flashladder.model import Verdict

MIN_QUADS = 10
TRIM = 0.2
CONFIDENCE = 0.95
RESAMPLES = 10_000

_ALPHA = 0.05
_MIN_FLOOR = 0.01
_FLOOR_PER_CONTROL = 3.0

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """`ratio` is the other's time over this arm's (above 1, the arm is faster), `ci` its interval, `n` the quads."""

    ratio: float
    ci: tuple[float, float]
    p: float
    n: int
    cliffs_delta: float


def log_quads(arm: ArrayLike, other: ArrayLike) -> FloatArray:
    """Log-ratio of every quad, shape (n,), from the two arms' times, shape (n, 2). exp(q) > 1: `arm` is faster.

    Raises ValueError if the shapes differ or are not (n, 2), or if a time is not finite and positive.
    """
    a, b = _times(arm), _times(other)
    if a.shape != b.shape or a.ndim != 2 or a.shape[1] != 2:
        raise ValueError(f"two arrays of shape (n, 2) are needed, got {a.shape} and {b.shape}")
    # Summed an arm at a time, so that equal times give exactly 0 and swapping the arms exactly -q.
    log_ratios: FloatArray = (np.log(b).sum(axis=1) - np.log(a).sum(axis=1)) / 2
    return log_ratios


def paired(arm: ArrayLike, other: ArrayLike) -> Paired:
    """Compares two arms by their times in the same blocks, shape (n, 2).

    Ratio: exp of the trimmed mean of `log_quads`. Interval: percentile bootstrap over quads (Wilcox, Introduction to
    Robust Estimation and Hypothesis Testing). p: `yuen`. Raises ValueError as these do.
    """
    return paired_each([(arm, other)])[0]


def paired_each(pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> list[Paired]:
    """`paired` of each pair; those of as many quads share one product of matrices."""
    quads = [log_quads(arm, other) for arm, other in pairs]
    found = zip(pairs, quads, map(yuen, quads), _bootstraps(quads), strict=True)
    return [
        Paired(math.exp(mean), _interval(drawn), p, q.size, cliffs_delta(arm, other))
        for (arm, other), q, (mean, p), drawn in found
    ]


def yuen(q: ArrayLike) -> tuple[float, float]:
    """Trimmed mean of q, shape (n,), and the two-sided p-value of its being zero: Yuen's t for one sample.

    Tukey and McLaughlin (1963), Yuen (1974): the winsorised deviation is the scale, the kept samples less one are the
    degrees of freedom. If the kept samples are all equal, p is 1 at a mean of zero and 0 elsewhere. Raises ValueError
    on fewer than two samples.
    """
    ordered = np.sort(np.asarray(q, dtype=np.float64))
    n = ordered.size
    if ordered.ndim != 1 or n < 2:
        raise ValueError(f"at least two samples in one dimension are needed, got shape {ordered.shape}")
    cut = int(TRIM * n)
    kept = ordered[cut : n - cut]
    if kept[0] == kept[-1]:
        return float(kept[0]), float(kept[0] == 0)
    mean = float(kept.mean())
    winsorised = np.clip(ordered, kept[0], kept[-1])
    t = mean * (1 - 2 * TRIM) * math.sqrt(n) / float(winsorised.std(ddof=1))
    return mean, 2 * float(stdtr(kept.size - 1, -abs(t)))


def cliffs_delta(arm: ArrayLike, other: ArrayLike) -> float:
    """P(other > arm) - P(other < arm) over all pairs of samples, any shapes, in [-1, 1]; positive: `arm` is faster.

    Cliff (1993). Raises ValueError if an arm is empty or a time is not finite and positive.
    """
    a, b = _times(arm).ravel(), np.sort(_times(other), axis=None)
    if a.size == 0 or b.size == 0:
        raise ValueError("no samples")
    less = int(np.searchsorted(b, a, side="left").sum())
    at_most = int(np.searchsorted(b, a, side="right").sum())
    pairs = a.size * b.size
    return (pairs - at_most - less) / pairs


def median_ci(samples: ArrayLike, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Median of independent samples (any shape and unit) with its distribution-free interval: (median, low, high).

    The interval is the narrowest pair of symmetric order statistics that covers the median with at least `confidence`
    (the sign test inverted; Conover, Practical Nonparametric Statistics); if no pair does, the range.
    Raises ValueError if there are no samples or one is not finite.
    """
    x = np.sort(np.asarray(samples, dtype=np.float64), axis=None)
    if x.size == 0 or not np.isfinite(x).all():
        raise ValueError("finite samples are needed")
    from scipy.stats import binom  # a second to import, which commands without statistics need not wait

    rank = max(int(np.sum(binom.cdf(np.arange(x.size), x.size, 0.5) <= (1 - confidence) / 2)), 1)
    return float(np.median(x)), float(x[rank - 1]), float(x[x.size - rank])


def holm(p: ArrayLike) -> FloatArray:
    """Adjusted p-values, shape (m,), that control the family-wise error under any dependence (Holm 1979).

    Raises ValueError if one is not in [0, 1].
    """
    raw = _p_values(p)
    order = np.argsort(raw)
    stepped = np.maximum.accumulate(raw[order] * np.arange(raw.size, 0, -1))
    adjusted = np.empty_like(raw)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def benjamini_hochberg(p: ArrayLike) -> FloatArray:
    """Adjusted p-values, shape (m,), that control the false discovery rate (Benjamini and Hochberg 1995).

    Raises ValueError if one is not in [0, 1].
    """
    from scipy.stats import false_discovery_control

    return np.asarray(false_discovery_control(_p_values(p), method="bh"), dtype=np.float64)


def practical_floor(control_ratio: float | None) -> float:
    """Smallest effect that counts, as a fraction of the time: 1 %, or 3 x the run's own A/A ratio if that is more.

    Raises ValueError if the ratio is not finite and positive.
    """
    if control_ratio is None:
        return _MIN_FLOOR
    if not 0 < control_ratio < math.inf:
        raise ValueError(f"not a ratio of times: {control_ratio}")
    return max(_MIN_FLOOR, _FLOOR_PER_CONTROL * abs(math.log(control_ratio)))


def verdict(ratio: float, ci: tuple[float, float], p_adjusted: float, floor: float, n: int) -> Verdict:
    """What `n` quads allow to be said of an arm.

    It is faster or slower if p is below 5 %, the interval excludes 1 and the effect exceeds the floor; it is the same
    if the whole interval lies within the floor; else the result is ambiguous.
    """
    if n < MIN_QUADS:
        return "insufficient samples"
    low, high = ci
    excludes_1 = low > 1 or high < 1
    if p_adjusted < _ALPHA and excludes_1 and abs(math.log(ratio)) > math.log1p(floor):
        return "faster" if ratio > 1 else "slower"
    return "same" if 1 / (1 + floor) <= low and high <= 1 + floor else "ambiguous"


def _times(values: ArrayLike) -> FloatArray:
    times = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(times) & (times > 0)).all():
        raise ValueError("times must be finite and positive")
    return times


def _p_values(values: ArrayLike) -> FloatArray:
    p = np.asarray(values, dtype=np.float64)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p-values must be one-dimensional and in [0, 1]")
    return p


def _bootstraps(quads: Sequence[FloatArray]) -> list[FloatArray]:
    """Of each, the trimmed means of RESAMPLES resamples and of their mirrors, shape (2 RESAMPLES,)."""
    drawn: dict[int, FloatArray] = {}
    for n in {q.size for q in quads}:
        numbers = [number for number, q in enumerate(quads) if q.size == n]
        ordered = np.sort(np.stack([quads[number] for number in numbers]), axis=1)
        drawn |= dict(zip(numbers, ordered @ _resample_weights(n).T, strict=True))
    return [drawn[number] for number in range(len(quads))]


@cache
def _resample_weights(n: int) -> FloatArray:
    """What each of n ordered samples weighs in the trimmed mean of each resample, shape (2 RESAMPLES, n).

    Every comparison of n quads shares the resamples; to each they are what its own would be. The second half mirrors
    the first, so that swapping the arms inverts the interval exactly.
    """
    drawn = np.random.default_rng(n).integers(0, n, (RESAMPLES, n)) + np.arange(RESAMPLES)[:, None] * n
    times_drawn = np.bincount(drawn.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n)
    cut = int(TRIM * n)
    kept_up_to = np.clip(times_drawn.cumsum(axis=1), cut, n - cut) - cut
    weights = np.diff(kept_up_to, axis=1, prepend=0) / (n - 2 * cut)
    return np.concatenate([weights, weights[::-1, ::-1]])


# --- over several cells ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OverCells:
    """Geometric mean over cells of their ratios, with its interval and p; `cells`: each one's ratio and interval."""

    ratio: float
    ci: tuple[float, float]
    p: float
    cells: tuple[tuple[float, tuple[float, float]], ...]


def over_cells(cells: Sequence[FloatArray]) -> OverCells:
    """Compares two arms over several cells by the `log_quads` of each.

    Ratio: exp of the mean of the cells' trimmed means. Cells are independent: the bootstrap draws each one's quads
    apart from the others', and p is Yuen's t with the variances added up and the degrees of freedom of Welch and
    Satterthwaite. Raises ValueError on no cell or on a cell of fewer than two quads.
    """
    if not cells:
        raise ValueError("at least one cell is needed")
    means = [yuen(q)[0] for q in cells]
    drawn = _bootstraps(cells)
    together = np.zeros(2 * RESAMPLES)
    for number, one in enumerate(drawn):
        together += one[_shuffle(number)]
    mean, interval = float(np.mean(means)), _interval(together / len(cells))
    found = tuple((math.exp(m), _interval(one)) for m, one in zip(means, drawn, strict=True))
    errors, freedoms = map(np.asarray, zip(*map(_yuen_error, cells), strict=True))
    variance = float(np.sum(errors**2))
    if variance == 0:
        return OverCells(math.exp(mean), interval, float(mean == 0), found)
    t = mean * len(cells) / math.sqrt(variance)
    p = 2 * float(stdtr(variance**2 / float(np.sum(errors**4 / freedoms)), -abs(t)))
    return OverCells(math.exp(mean), interval, p, found)


@cache
def _shuffle(number: int) -> NDArray[np.int64]:
    """An order of the resamples of a cell's own."""
    return np.random.default_rng(number).permutation(2 * RESAMPLES)


def _interval(resampled: FloatArray) -> tuple[float, float]:
    """Of resampled log-ratios, as ratios."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.exp(np.quantile(resampled, [tail, 1 - tail]))
    return float(low), float(high)


def _yuen_error(q: ArrayLike) -> tuple[float, int]:
    """Standard error of the trimmed mean and its degrees of freedom."""
    ordered = np.sort(np.asarray(q, dtype=np.float64))
    cut = int(TRIM * ordered.size)
    kept = ordered[cut : ordered.size - cut]
    winsorised = np.clip(ordered, kept[0], kept[-1])
    return float(winsorised.std(ddof=1)) / ((1 - 2 * TRIM) * math.sqrt(ordered.size)), kept.size - 1
