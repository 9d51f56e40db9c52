"""What the plan (kernel/include/plan.h) is fed by: every tile and number of splits, timed at the shapes of a set.

The records are a run like any other, of arms named RUNG@TILE/SPLITS, and what the plan chose; its regret follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median

import msgspec

from flashladder.arms import ArmSpec
from flashladder.ladder import CHOICE
from flashladder.model import HOPPER, Cell, CellTiming, PlanChoice, Record, Rung
from flashladder.tables import NOT_MEASURED, Table, number, shape

TILES = ("large", "medium", "small", "m128", "m64")
"""By their number in kernel/include/rung.h."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

Plan = tuple[int, int]
"""Tile and number of splits."""
PLANS: tuple[Plan, ...] = ((0, 1), *((tile, splits) for tile in (1, 2) for splits in SPLITS))
HOPPER_PLANS: tuple[Plan, ...] = (*PLANS, (3, 1), (4, 1))
"""Of a rung that has kernels of 128 and 64 rows of its own beside the portable ones."""


class Regret(Record, frozen=True, kw_only=True):
    """The plan's choice in one cell beside the best one. A choice that was not timed counts as the nearest that was."""

    cell: Cell
    best: Plan
    best_us: float
    chosen: Plan
    chosen_us: float
    other_us: float | None
    """Of the best that was not chosen; None: nothing else was timed."""

    @property
    def ratio(self) -> float:
        """Time of the choice over that of the best."""
        return self.chosen_us / self.best_us

    @property
    def margin(self) -> float | None:
        """Time of the best that was not chosen over that of the choice."""
        return None if self.other_us is None else self.other_us / self.chosen_us


def plans_of(rung: Rung) -> tuple[Plan, ...]:
    """What a rung that plans may choose."""
    return HOPPER_PLANS if rung.min_arch >= HOPPER else PLANS


def plan_specs(base: ArmSpec, plans: Sequence[Plan]) -> list[ArmSpec]:
    """An arm for every plan of a library."""
    return [msgspec.structs.replace(base, name=arm_of(base.name, plan), plan=plan) for plan in plans]


def arm_of(rung: str, plan: Plan) -> str:
    """What the arm of a plan is called."""
    return f"{rung}{CHOICE}{TILES[plan[0]]}/{plan[1]}"


def regrets(timings: Sequence[CellTiming], choices: Sequence[PlanChoice]) -> list[Regret]:
    """The regret of the choices in every cell; cells without a choice or a time are left out."""
    chosen_in = {choice.cell: plan_of(choice.arm) for choice in choices}
    found = []
    for timing in timings:
        times = {
            plan_of(arm.arm): median(ns for pair in arm.ns for ns in pair) / 1e3
            for arm in timing.arms
            if CHOICE in arm.arm and arm.ns
        }
        chosen = chosen_in.get(timing.cell)
        if times and chosen is not None:
            best = min(times, key=times.__getitem__)
            nearest = min(times, key=lambda plan: _distance(plan, chosen))
            found.append(
                Regret(
                    cell=timing.cell,
                    best=best,
                    best_us=times[best],
                    chosen=chosen,
                    chosen_us=times[nearest],
                    other_us=min((us for plan, us in times.items() if plan != nearest), default=None),
                )
            )
    return found


def plan_of(arm: str) -> Plan:
    """The plan of an arm; raises ValueError when its name says none."""
    tile, splits = arm.split(CHOICE)[1].split("/")
    return TILES.index(tile), int(splits)


def _distance(plan: Plan, other: Plan) -> tuple[bool, float]:
    return plan[0] != other[0], abs(log(plan[1] / other[1]))


def table(found: Sequence[Regret]) -> Table:
    """A row a cell: the best plan, the chosen one, and by how much that beats the best other."""
    rows = [
        (
            shape(r.cell),
            r.cell.mask,
            _text(r.best),
            number(r.best_us),
            _text(r.chosen),
            number(r.chosen_us),
            number(r.ratio),
            NOT_MEASURED if r.margin is None else number(r.margin),
        )
        for r in found
    ]
    return Table(("shape", "mask", "best", "us", "the plan's", "us", "over the best", "margin"), tuple(rows))


def _text(plan: Plan) -> str:
    return f"{TILES[plan[0]]}, {plan[1]} part{'s' if plan[1] > 1 else ''}"
