"""Simulated timing runs: every sample advances the clock, so drift enters by position in time.

A drift is the log-slowdown of the machine on a grid over the run, shape (reps, GRID); a noise is the log-error of every
sample, shape (reps, samples).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Drift = Callable[[np.random.Generator, int], FloatArray]
Noise = Callable[[np.random.Generator, tuple[int, ...]], FloatArray]
Design = Callable[[np.random.Generator, int, int, int], IntArray]

GRID = 4096
BLOCKS = 50

_TIME = np.linspace(0, 1, GRID)

# --- drift ----------------------------------------------------------------------------------------------------------


def steady(rng: np.random.Generator, reps: int) -> FloatArray:
    return np.zeros((reps, GRID))


def linear(rng: np.random.Generator, reps: int) -> FloatArray:
    """10 % slower at the end than at the start."""
    return np.tile(np.log1p(0.10 * _TIME), (reps, 1))


def clock_steps(rng: np.random.Generator, reps: int) -> FloatArray:
    """About eight clock changes a run, each to a level up to 8 % slower."""
    step = np.cumsum(rng.random((reps, GRID)) < 8 / GRID, axis=1, dtype=np.int64)
    levels = rng.uniform(0, 0.08, (reps, int(step.max()) + 1))
    return np.take_along_axis(levels, step, axis=1)


def sawtooth(rng: np.random.Generator, reps: int) -> FloatArray:
    """Power cap: 6 % creep and release, 5 to 30 periods a run."""
    periods, phase = rng.uniform(5, 30, (reps, 1)), rng.random((reps, 1))
    return 0.06 * ((periods * _TIME + phase) % 1)


def resonant(rng: np.random.Generator, reps: int) -> FloatArray:
    """The same, one period a block: centred, so that the blocks keep in step with it."""
    return 0.06 * ((BLOCKS * _TIME + rng.random((reps, 1))) % 1 - 0.5)


def random_walk(rng: np.random.Generator, reps: int) -> FloatArray:
    """Power cap: a walk whose standard deviation over the run is 5 %."""
    return np.cumsum(rng.normal(0, 0.05 / np.sqrt(GRID), (reps, GRID)), axis=1)


# --- noise ----------------------------------------------------------------------------------------------------------


def noiseless(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    return np.zeros(shape)


def iid(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    return rng.normal(0, 0.01, shape)


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """1 % noise with 2 % of the samples slower by 20 % on average."""
    return iid(rng, shape) + rng.exponential(0.2, shape) * (rng.random(shape) < 0.02)


def heteroscedastic(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Noise that grows from 0.3 % to 3 % over the run, with the same outliers."""
    return outliers(rng, shape) * np.geomspace(0.3, 3, shape[1])


# --- designs --------------------------------------------------------------------------------------------------------


def palindromic(rng: np.random.Generator, reps: int, arms: int, blocks: int) -> IntArray:
    """The arm of every sample, shape (reps, samples): each block in random order, then in the reverse order."""
    order = rng.permuted(np.tile(np.arange(arms), (reps, blocks, 1)), axis=2)
    return np.concatenate([order, order[..., ::-1]], axis=2).reshape(reps, -1)


def fixed_abba(rng: np.random.Generator, reps: int, arms: int, blocks: int) -> IntArray:
    """Palindromic, but always in the same order."""
    return np.tile(np.concatenate([np.arange(arms), np.arange(arms)[::-1]]), (reps, blocks))


def one_after_the_other(rng: np.random.Generator, reps: int, arms: int, blocks: int) -> IntArray:
    """All samples of one arm, then all of the next."""
    return np.tile(np.repeat(np.arange(arms), 2 * blocks), (reps, 1))


def measure(visits: IntArray, durations_us: FloatArray, drift: FloatArray, noise: FloatArray) -> FloatArray:
    """Times in ns, shape (reps, arms, blocks, 2), in the order of each arm's visits.

    A sample is slowed by the drift at its middle. The grid spans the run as it would last without drift and noise.
    """
    reps, samples = visits.shape
    true = durations_us[visits]
    grid_us = true[0].sum() / GRID
    clock = np.zeros(reps)
    times = np.empty((reps, samples))
    rows = np.arange(reps)
    for i in range(samples):
        middle = (clock + true[:, i] / 2) / grid_us
        slowdown = drift[rows, np.minimum(middle.astype(np.int64), GRID - 1)]
        times[:, i] = true[:, i] * np.exp(slowdown + noise[:, i])
        clock += times[:, i]
    by_arm = np.argsort(visits, axis=1, kind="stable")
    return 1e3 * np.take_along_axis(times, by_arm, axis=1).reshape(reps, durations_us.size, -1, 2)


def simulate(
    durations_us: tuple[float, ...],
    drift: Drift,
    noise: Noise,
    *,
    reps: int,
    seed: int,
    blocks: int = BLOCKS,
    design: Design = palindromic,
) -> FloatArray:
    """Times of `reps` runs in ns, shape (reps, arms, blocks, 2)."""
    rng = np.random.default_rng(seed)
    visits = design(rng, reps, len(durations_us), blocks)
    return measure(visits, np.asarray(durations_us), drift(rng, reps), noise(rng, visits.shape))
