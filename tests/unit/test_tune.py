"""The regret of a plan, from records alone."""

from __future__ import annotations

import msgspec
import pytest

from flashladder import tune
from flashladder.arms import ArmSpec
from flashladder.ladder import CHOICE, gated_name, load_ladder
from flashladder.model import ArmTiming, CellTiming, PlanChoice
from tests.unit import synthetic as made

BASE = ArmSpec(name="r13_tuned", kind="rung", library="x.so", sha256="aa")


def _timing(us: dict[str, float]) -> CellTiming:
    arms = tuple(
        ArmTiming(arm=f"r13_tuned{CHOICE}{plan}", kind="rung", status="timed", ns=((1e3 * t, 1e3 * t),) * 5)
        for plan, t in us.items()
    )
    return msgspec.structs.replace(made.timing(made.REFERENCE), arms=arms)


def _chosen(plan: str) -> list[PlanChoice]:
    return [PlanChoice(cell=cell, arm=f"r13_tuned{CHOICE}{plan}") for cell in (made.REFERENCE, made.CELLS[1])]


@pytest.mark.parametrize("rung", ["r13_tuned", "r24_key_groups"])
def test_every_plan_is_an_arm_of_its_own_that_the_gate_knows_by_the_rungs_name(rung: str) -> None:
    plans = tune.plans_of(load_ladder()[rung])
    specs = tune.plan_specs(BASE, plans)
    assert len({s.name for s in specs}) == len(plans) == len({s.plan for s in specs})
    assert ((4, 1) in plans) == (rung == "r24_key_groups")
    assert {gated_name(s.name) for s in specs} == {BASE.name}
    assert specs[0].name == "r13_tuned@large/1"


def test_regret_is_the_choices_time_over_the_best() -> None:
    (found,) = tune.regrets([_timing({"large/1": 12.0, "medium/2": 8.0, "small/4": 10.0})], _chosen("small/4"))
    assert (found.best, found.best_us, found.chosen_us) == ((1, 2), 8.0, 10.0)
    assert found.ratio == pytest.approx(1.25)
    assert found.margin == pytest.approx(0.8)


def test_a_choice_that_was_not_timed_counts_as_the_nearest_of_its_tile() -> None:
    timing = _timing({"medium/7": 1.0, "small/4": 10.0, "small/8": 11.0})
    (found,) = tune.regrets([timing], _chosen("small/7"))
    assert found.chosen_us == 11.0


def test_cells_without_times_are_left_out_and_the_table_has_the_others() -> None:
    untimed = msgspec.structs.replace(made.timing(made.CELLS[1]), arms=())
    found = tune.regrets([untimed, _timing({"large/1": 2.0})], _chosen("large/1"))
    assert tune.table(found).rows == (
        ("B2 H8 S512 D64", "full", "large, 1 part", "2.00", "large, 1 part", "2.00", "1.00", "not measured"),
    )
