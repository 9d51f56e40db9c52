"""The statistics on hand-worked cases, and the block design's error rates on simulated runs."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, mannwhitneyu, mstats, quantile_test

from flashladder import stats
from flashladder.model import Verdict
from tests.unit import simulate as sim

FloatArray = NDArray[np.float64]

TIME = st.floats(1e2, 1e9)
TICKS = st.integers(1, 8).map(float)
P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)
QUADS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).lognormal(10, 0.1, (2, 15, 2)))


def arms_with(q: list[float]) -> tuple[FloatArray, FloatArray]:
    """Two arms whose log-quads are `q`."""
    arm = np.random.default_rng(0).lognormal(10, 0.05, (len(q), 2))
    return arm, arm * np.exp(q)[:, np.newaxis]


# --- quads and their mean -------------------------------------------------------------------------------------------


def test_log_quads_by_hand() -> None:
    q = stats.log_quads([(1.0, 4.0), (3.0, 3.0)], [(2.0, 8.0), (1.0, 9.0)])
    assert q == pytest.approx([math.log(2), 0.0])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_log_quads_refuses_what_is_no_time(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        stats.log_quads([(1.0, bad)], [(1.0, 1.0)])
    with pytest.raises(ValueError, match="finite and positive"):
        stats.log_quads([(1.0, 1.0)], [(bad, 1.0)])


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (4,), (2, 2, 1), (0,)])
def test_log_quads_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        stats.log_quads(np.ones(shape), np.ones((2, 2)))
    if shape != (3, 2):
        with pytest.raises(ValueError, match="shape"):
            stats.log_quads(np.ones(shape), np.ones(shape))


def test_yuen_by_hand() -> None:
    # Kept 2, 3, 4; winsorised 2, 2, 3, 4, 4 with variance 1; t = 3 * 0.6 * sqrt(5) on 2 degrees of freedom, whose
    # distribution has the closed form used here.
    mean, p = stats.yuen([10.0, 3.0, 1.0, 4.0, 2.0])
    t = 1.8 * math.sqrt(5)
    assert mean == 3.0
    assert p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-12)


@pytest.mark.parametrize("n", [2, 4, 5, 9, 10, 11, 50, 137])
def test_yuen_agrees_with_scipys_trimmed_statistics(n: int) -> None:
    q = np.random.default_rng(n).standard_t(3, n) + 0.3
    mean, p = stats.yuen(q)
    assert mean == pytest.approx(float(mstats.trimmed_mean(q, limits=(0.2, 0.2))), rel=1e-12)
    # The interval at the confidence 1 - p ends at zero.
    interval = mstats.trimmed_mean_ci(q, limits=(0.2, 0.2), alpha=p)
    assert np.abs(interval).min() == pytest.approx(0, abs=1e-9)


def test_yuen_needs_two_samples() -> None:
    for q in ([], [1.0], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match="two samples"):
            stats.yuen(q)


# --- paired ---------------------------------------------------------------------------------------------------------


def test_ratio_is_the_exponential_of_the_trimmed_mean() -> None:
    arm, other = arms_with([-9.0, -5.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 3.0, 7.0])
    result = stats.paired(arm, other)
    assert result.ratio == pytest.approx(math.exp(0.035))
    assert result.n == 10
    assert result.p == stats.yuen(stats.log_quads(arm, other))[1]
    assert result.cliffs_delta == stats.cliffs_delta(arm, other)


def test_interval_agrees_with_a_plain_bootstrap() -> None:
    arm, other = arms_with(np.random.default_rng(3).normal(0.02, 0.01, 50).tolist())
    q = stats.log_quads(arm, other)
    rng = np.random.default_rng(4)
    means = [np.sort(rng.choice(q, 50))[10:40].mean() for _ in range(10_000)]
    expected = np.quantile(means, [0.025, 0.975])
    # A 2.5 % quantile of 10,000 resamples has a standard error of about 2.5 % of the bootstrap deviation.
    assert np.log(stats.paired(arm, other).ci) == pytest.approx(expected, abs=0.15 * float(np.std(means)))


@pytest.mark.parametrize("n", [2, 10, 49, 50])
def test_resamples_draw_every_sample_equally_often_and_keep_the_middle(n: int) -> None:
    weights = stats._resample_weights(n)
    assert weights.shape == (2 * stats.RESAMPLES, n)
    assert np.allclose(weights.sum(axis=1), 1)
    assert np.array_equal(weights[::-1, ::-1], weights), "swapped arms must give the inverse interval"
    q = np.random.default_rng(n).normal(size=n)
    drawn = np.random.default_rng(n).integers(0, n, (stats.RESAMPLES, n))
    cut = int(stats.TRIM * n)
    means = np.sort(np.sort(q)[drawn], axis=1)[:, cut : n - cut].mean(axis=1)
    assert np.allclose((weights @ np.sort(q))[: stats.RESAMPLES], means)


def test_a_uniform_slowdown_of_both_arms_changes_nothing() -> None:
    arm, other = arms_with(np.random.default_rng(3).normal(0, 0.01, 20).tolist())
    slow = np.random.default_rng(4).uniform(1, 2, (20, 1))
    one, two = stats.paired(arm, other), stats.paired(slow * arm, slow * other)
    assert (two.ratio, *two.ci, two.p) == pytest.approx((one.ratio, *one.ci, one.p))


@settings(max_examples=30, deadline=None)
@given(QUADS)
def test_swapping_the_arms_inverts_the_result(times: FloatArray) -> None:
    one, two = stats.paired(times[0], times[1]), stats.paired(times[1], times[0])
    assert two.ratio == pytest.approx(1 / one.ratio, rel=1e-12)
    assert two.ci == pytest.approx((1 / one.ci[1], 1 / one.ci[0]), rel=1e-12)
    assert two.cliffs_delta == -one.cliffs_delta
    assert two.p == pytest.approx(one.p, rel=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("factor", "p", "delta"), [(1.0, 1.0, 0.0), (1.1, 0.0, 1.0), (0.9, 0.0, -1.0)])
def test_constant_samples(factor: float, p: float, delta: float) -> None:
    arm = np.full((50, 2), 12_345.6)
    result = stats.paired(arm, factor * arm)
    assert (result.p, result.cliffs_delta) == (p, delta)
    assert (result.ratio, *result.ci) == pytest.approx((factor,) * 3, rel=1e-12)


@pytest.mark.filterwarnings("error")
def test_equal_samples_in_any_order_give_exactly_one() -> None:
    arm = np.random.default_rng(0).lognormal(10, 0.1, (50, 2))
    for other in (arm, arm[:, ::-1]):
        assert stats.paired(arm, other) == stats.Paired(1.0, (1.0, 1.0), 1.0, 50, 0.0)


@pytest.mark.filterwarnings("error")
def test_outliers_beyond_the_trim_do_not_make_constant_samples_vary() -> None:
    assert stats.yuen([0.0] * 8 + [5.0, -7.0]) == (0.0, 1.0)
    assert stats.yuen([0.1] * 8 + [5.0, -7.0]) == (0.1, 0.0)


def test_paired_needs_two_quads() -> None:
    with pytest.raises(ValueError, match="two samples"):
        stats.paired([(1.0, 1.0)], [(1.0, 1.0)])


# --- Cliff's delta and the median -----------------------------------------------------------------------------------


@given(st.lists(TICKS | TIME, min_size=1, max_size=20), st.lists(TICKS | TIME, min_size=1, max_size=20))
def test_cliffs_delta_against_every_pair(arm: list[float], other: list[float]) -> None:
    signs = [(b > a) - (b < a) for a, b in product(arm, other)]
    assert stats.cliffs_delta(arm, other) == sum(signs) / len(signs)


def test_cliffs_delta_at_its_ends_and_without_samples() -> None:
    assert stats.cliffs_delta([(1.0, 2.0)], [(3.0, 4.0)]) == 1.0
    assert stats.cliffs_delta([(3.0, 4.0)], [(1.0, 2.0)]) == -1.0
    for arm, other in (([], [1.0]), ([1.0], [])):
        with pytest.raises(ValueError, match="no samples"):
            stats.cliffs_delta(arm, other)


@pytest.mark.parametrize(
    ("n", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (10, 2, 9), (20, 6, 15), (100, 40, 61)]
)
def test_median_interval_of_the_tables(n: int, low: int, high: int) -> None:
    ranks = np.random.default_rng(n).permutation(np.arange(1, n + 1))
    assert stats.median_ci(ranks) == ((n + 1) / 2, low, high)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_median_interval_agrees_with_scipy(confidence: float) -> None:
    x = np.random.default_rng(0).lognormal(size=(50, 2))
    _, low, high = stats.median_ci(x, confidence)
    interval = quantile_test(x.ravel(), p=0.5).confidence_interval(confidence)
    assert (low, high) == (interval.low, interval.high)


def test_median_interval_needs_finite_samples() -> None:
    for samples in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="finite samples"):
            stats.median_ci(samples)


# --- multiplicity ---------------------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    # Sorted 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1; the last is raised to the one before.
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.4, 0.5]) == pytest.approx([0.8, 0.8])
    assert stats.holm([0.9, 0.9]) == pytest.approx([1.0, 1.0])


def test_benjamini_hochberg_by_hand() -> None:
    # Sorted 0.005 x 4/1, 0.01 x 4/2, 0.03 x 4/3, 0.04 x 4/4.
    assert stats.benjamini_hochberg([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.02, 0.04, 0.04, 0.02])
    # 0.02 x 2/1 exceeds 0.03 x 2/2 and is lowered to it.
    assert stats.benjamini_hochberg([0.02, 0.03]) == pytest.approx([0.03, 0.03])


@given(P_VALUES)
def test_adjusted_p_values_keep_the_order(p: list[float]) -> None:
    holm, bh = stats.holm(p), stats.benjamini_hochberg(p)
    order = np.argsort(p)
    for adjusted in (holm, bh):
        assert (np.diff(adjusted[order]) >= 0).all()
        assert (adjusted <= 1).all()
    assert (holm >= bh - 1e-12).all()
    assert (bh >= np.asarray(p) - 1e-12).all()


@given(P_VALUES, st.randoms(use_true_random=False))
def test_adjusted_p_values_follow_a_permutation(p: list[float], random: Random) -> None:
    order = list(range(len(p)))
    random.shuffle(order)
    shuffled = [p[i] for i in order]
    assert stats.holm(shuffled).tolist() == stats.holm(p)[order].tolist()
    assert stats.benjamini_hochberg(shuffled).tolist() == stats.benjamini_hochberg(p)[order].tolist()


def test_adjustment_of_none_and_of_what_is_no_probability() -> None:
    for adjust in (stats.holm, stats.benjamini_hochberg):
        assert adjust([]).size == 0
        for p in ([1.1], [-0.1], [math.nan], [[0.5]]):
            with pytest.raises(ValueError, match="p-values"):
                adjust(p)


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_practical_floor() -> None:
    assert stats.practical_floor(None) == 0.01
    assert stats.practical_floor(1.001) == 0.01
    assert stats.practical_floor(1.02) == pytest.approx(3 * math.log(1.02))
    assert stats.practical_floor(1 / 1.02) == pytest.approx(stats.practical_floor(1.02))
    for ratio in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="not a ratio"):
            stats.practical_floor(ratio)


@pytest.mark.parametrize(
    ("ratio", "ci", "p", "floor", "n", "expected"),
    [
        (1.05, (1.04, 1.06), 0.001, 0.01, 10, "faster"),
        (0.95, (0.94, 0.96), 0.001, 0.01, 10, "slower"),
        (1.05, (1.04, 1.06), 0.001, 0.01, 9, "insufficient samples"),
        (1.00, (0.999, 1.001), 0.9, 0.01, 0, "insufficient samples"),
        (1.05, (1.04, 1.06), 0.05, 0.01, 50, "ambiguous"),
        (1.05, (0.99, 1.06), 0.001, 0.01, 50, "ambiguous"),
        (1.05, (1.00, 1.06), 0.001, 0.01, 50, "ambiguous"),
        (1.05, (1.04, 1.06), 0.001, 0.055, 50, "ambiguous"),
        (1.05, (1.04, 1.06), 0.001, 0.06, 50, "same"),
        (1.008, (1.005, 1.012), 0.001, 0.01, 50, "ambiguous"),
        (1.005, (1.004, 1.006), 0.001, 0.01, 50, "same"),
        (1.00, (1 / 1.01, 1.01), 1.0, 0.01, 50, "same"),
        (1.00, (0.99, 1.01), 1.0, 0.01, 50, "ambiguous"),
    ],
)
def test_verdict(ratio: float, ci: tuple[float, float], p: float, floor: float, n: int, expected: Verdict) -> None:
    assert stats.verdict(ratio, ci, p, floor, n) == expected


@given(st.floats(0.8, 1.25), st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 0.1))
def test_verdict_of_the_swapped_arms_mirrors(ratio: float, width: float, p: float, floor: float) -> None:
    mirror = {"faster": "slower", "slower": "faster", "ambiguous": "ambiguous", "same": "same"}
    # Nudged off the boundaries, where the rounding of 1 / x decides.
    low, high = ratio * math.exp(-width - 1e-6), ratio * math.exp(width + 1e-6)
    if min(abs(math.log(x)) for x in (low, high)) > 1e-9 and all(
        abs(abs(math.log(x)) - math.log1p(floor)) > 1e-9 for x in (ratio, low, high)
    ):
        one = stats.verdict(ratio, (low, high), p, floor, 50)
        assert stats.verdict(1 / ratio, (1 / high, 1 / low), p, floor, 50) == mirror[one]


# --- error rates of the design --------------------------------------------------------------------------------------

EQUAL = (100.0, 100.0)
FIVE = (40.0, 40.0, 150.0, 600.0, 1000.0)
DRIFTS = (sim.steady, sim.linear, sim.clock_steps, sim.sawtooth, sim.random_walk)
NOISES = (sim.iid, sim.outliers, sim.heteroscedastic)


def most(reps: int, level: float = 0.05) -> float:
    """Largest rate in `reps` runs that a true rate of `level` explains (99.9 %): 7.3 % of 1000 runs at 5 %."""
    return float(binom.ppf(0.999, reps, level)) / reps


def alarms(runs: FloatArray, arm: int = 0, other: int = 1) -> float:
    """Fraction of the runs, shape (reps, arms, blocks, 2), in which Yuen's p is below 5 %."""
    return float(np.mean([stats.yuen(stats.log_quads(run[arm], run[other]))[1] < 0.05 for run in runs]))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("drift", DRIFTS)
def test_false_alarms_on_identical_code(drift: sim.Drift, noise: sim.Noise) -> None:
    runs = sim.simulate(EQUAL, drift, noise, reps=1000, seed=11)
    assert 0.02 <= alarms(runs) <= most(1000)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("drift", DRIFTS)
def test_false_alarms_among_five_arms_of_unlike_durations(drift: sim.Drift, noise: sim.Noise) -> None:
    runs = sim.simulate(FIVE, drift, noise, reps=1000, seed=12)
    assert 0.02 <= alarms(runs, 0, 1) <= most(1000)
    # Against an arm 25 times as long, the null hypothesis is the true ratio.
    assert 0.02 <= alarms(runs / np.reshape(FIVE, (1, 5, 1, 1)), 0, 4) <= most(1000)


@pytest.mark.parametrize("noise", NOISES)
def test_drift_in_step_with_the_blocks(noise: sim.Noise) -> None:
    """The random order keeps copies of a kernel at the nominal rate; unlike durations are biased, within 2 %."""
    assert 0.02 <= alarms(sim.simulate(EQUAL, sim.resonant, noise, reps=1000, seed=13)) <= most(1000)
    runs = sim.simulate(FIVE, sim.resonant, noise, reps=1000, seed=13)
    assert 0.02 <= alarms(runs, 0, 1) <= most(1000)
    true = math.log(FIVE[4] / FIVE[0])
    biases = [stats.yuen(stats.log_quads(run[0], run[4]))[0] - true for run in runs]
    assert np.abs(biases).max() < 0.02


@pytest.mark.parametrize("drift", DRIFTS)
def test_the_fewest_quads_cost_at_most_two_points(drift: sim.Drift) -> None:
    runs = sim.simulate(EQUAL, drift, sim.iid, reps=1000, seed=14, blocks=stats.MIN_QUADS)
    assert alarms(runs) <= most(1000, 0.07)


@pytest.mark.parametrize("drift", [sim.linear, sim.clock_steps, sim.random_walk])
def test_one_arm_after_the_other_would_false_alarm(drift: sim.Drift) -> None:
    """The usual design and test, under the drifts that the block design survives above."""
    runs = sim.simulate(EQUAL, drift, sim.iid, reps=500, seed=15, design=sim.one_after_the_other)
    times = runs.reshape(500, 2, -1)
    assert (mannwhitneyu(times[:, 0], times[:, 1], axis=1).pvalue < 0.05).mean() > 0.5


@pytest.mark.parametrize("noise", NOISES)
def test_a_fixed_order_would_false_alarm_in_step_with_the_drift(noise: sim.Noise) -> None:
    runs = sim.simulate(EQUAL, sim.resonant, noise, reps=300, seed=13, design=sim.fixed_abba)
    assert alarms(runs) > 0.5


@pytest.mark.parametrize(("drift", "noise"), [(sim.linear, sim.iid), (sim.random_walk, sim.outliers)])
def test_drift_on_identical_code_gives_no_verdict_of_a_difference(drift: sim.Drift, noise: sim.Noise) -> None:
    results = [stats.paired(run[0], run[1]) for run in sim.simulate(EQUAL, drift, noise, reps=300, seed=16)]
    outside = np.mean([not r.ci[0] <= 1 <= r.ci[1] for r in results])
    assert 0.02 <= outside <= most(300)
    for floor, limit in ((0.0, most(300)), (0.01, 0.0)):
        verdicts = [stats.verdict(r.ratio, r.ci, r.p, floor, r.n) for r in results]
        assert np.mean([v in ("faster", "slower") for v in verdicts]) <= limit


def test_linear_drift_alone_cancels() -> None:
    for run in sim.simulate(FIVE, sim.linear, sim.noiseless, reps=10, seed=17):
        result = stats.paired(run[0], run[1])
        assert result.ratio == pytest.approx(1, abs=1e-4)
        assert stats.verdict(result.ratio, result.ci, result.p, 0.01, result.n) == "same"


@pytest.mark.parametrize("drift", DRIFTS)
def test_power_at_one_and_a_half_percent(drift: sim.Drift) -> None:
    runs = sim.simulate((100.0, 101.5), drift, sim.outliers, reps=200, seed=18)
    assert alarms(runs) >= 0.95
    results = [stats.paired(run[0], run[1]) for run in runs[:100]]
    assert np.mean([stats.verdict(r.ratio, r.ci, r.p, 0.01, r.n) == "faster" for r in results]) >= 0.95
    covered = np.mean([r.ci[0] <= 1.015 <= r.ci[1] for r in results])
    assert 1 - covered <= most(100)


def test_holm_over_sixteen_null_candidates() -> None:
    """A champion and 16 copies of it in one design: the family-wise error is near 5 %, a gain is still found."""
    reps, candidates = 500, 16
    runs = sim.simulate((100.0,) * (candidates + 1), sim.random_walk, sim.outliers, reps=reps, seed=19)
    p = np.array([[stats.yuen(stats.log_quads(arm, run[0]))[1] for arm in run[1:]] for run in runs])
    assert (p.min(axis=1) < 0.05).mean() > 0.3
    adjusted = np.array([stats.holm(row) for row in p])
    assert 0.01 <= (adjusted.min(axis=1) < 0.05).mean() <= most(reps)

    faster = runs[:, 1] / 1.015
    p[:, 0] = [stats.yuen(stats.log_quads(arm, run[0]))[1] for arm, run in zip(faster, runs, strict=True)]
    assert np.mean([stats.holm(row)[0] < 0.05 for row in p]) >= 0.95
