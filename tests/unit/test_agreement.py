"""Comparing a GPU's answer with the emulator's: what agrees, what does not, and what may not be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashladder import report, rundir
from flashladder.agreement import RELATIVE_TO_V, compare
from flashladder.arrays import HostMemory
from flashladder.document import load
from flashladder.inputs import Case, edge_cases, values_of
from flashladder.ladder import load_ladder
from flashladder.model import Agreement
from flashladder.tables import agreement
from tests.saboteurs import PyArm, right

MEMORY = HostMemory()
CASES = list(edge_cases("fp16", 64))
NORMAL = next(c for c in CASES if c.family == "values" and c.values == "outlier")
EXACT = next(c for c in CASES if c.values == "zero_q")
Change = Callable[[np.ndarray, np.ndarray], None]


def changed(change: Change) -> PyArm:
    def call(memory: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
        right(memory, q, k, v, o, lse, scale, causal)
        change(o, lse)

    return PyArm("r", MEMORY, call)


def run(case: Case, change: Change) -> Agreement:
    arms = (changed(change), MEMORY), (PyArm("r", MEMORY, right), MEMORY)
    return compare(*arms, case, values_of(case, 4), 4)


def nothing(o: np.ndarray, lse: np.ndarray) -> None:
    pass


def one_ulp(o: np.ndarray, lse: np.ndarray) -> None:
    o[..., 3, 2] = np.nextafter(o[..., 3, 2], np.float16(np.inf))


def two_ulps(o: np.ndarray, lse: np.ndarray) -> None:
    one_ulp(o, lse)
    one_ulp(o, lse)
    o[..., 3, 2] += 2 * RELATIVE_TO_V * 100


def other_lse(o: np.ndarray, lse: np.ndarray) -> None:
    lse += 1e-3


def a_nan(o: np.ndarray, lse: np.ndarray) -> None:
    o[..., 1, 1] = np.nan


@pytest.mark.parametrize(
    ("case", "change", "status"),
    [
        (NORMAL, nothing, "same bits"),
        (NORMAL, one_ulp, "within tolerance"),
        (NORMAL, two_ulps, "differs"),
        (NORMAL, other_lse, "differs"),
        (NORMAL, a_nan, "differs"),
        (EXACT, nothing, "same bits"),
        (EXACT, one_ulp, "differs"),
        (EXACT, other_lse, "differs"),
    ],
)
def test_what_agrees(case: Case, change: Change, status: str) -> None:
    record = run(case, change)
    assert record.status == status, record
    assert (record.reason is None) == (status != "differs")


def test_tensor_cores_may_round_one_weight_to_the_other_side() -> None:
    def moved(by: float) -> Change:
        def change(o: np.ndarray, lse: np.ndarray) -> None:
            o[..., 3, 2] += np.float16(by)

        return change

    largest = float(np.abs(values_of(NORMAL, 4)[2]).max())
    for by, on_scalars, on_tensor_cores in ((2**-12, "differs", "within tolerance"), (2**-9, "differs", "differs")):
        arms = (changed(moved(by * largest)), MEMORY), (PyArm("r", MEMORY, right), MEMORY)
        found = [compare(*arms, NORMAL, values_of(NORMAL, 4), 4, arithmetic=a).status for a in ("fp32", "tensor_cores")]
        assert found == [on_scalars, on_tensor_cores]


@pytest.mark.parametrize(("by", "status"), [(0.9, "same bits"), (1.5, "differs")])
def test_scores_summed_in_fp16_may_differ_by_their_roundings(by: float, status: str) -> None:
    q, k, _ = (x.astype(np.float32) for x in values_of(NORMAL, 4))
    roundings = NORMAL.cell.shape.head_dim / 16
    largest = max(float((abs(q[:, h]) @ abs(k[:, h * k.shape[1] // q.shape[1]]).mT).max()) for h in range(q.shape[1]))
    apart = 2 * roundings * 2.0**-11 * largest * NORMAL.softmax_scale

    def change(o: np.ndarray, lse: np.ndarray) -> None:
        lse += by * apart

    arms = (changed(change), MEMORY), (PyArm("r", MEMORY, right), MEMORY)
    assert compare(*arms, NORMAL, values_of(NORMAL, 4), 4, arithmetic="half_scores").status == status
    assert compare(*arms, NORMAL, values_of(NORMAL, 4), 4, arithmetic="tensor_cores").status == "differs"


@pytest.mark.parametrize("case", [*CASES, *edge_cases("bf16", 128)], ids=lambda c: c.id)
def test_the_same_answer_agrees_on_every_case(case: Case) -> None:
    record = run(case, nothing)
    assert record.status == "same bits"
    assert record.equal == record.elements


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), "unsupported"), (RuntimeError("race"), "differs")])
def test_errors_of_either_are_records(error: Exception, status: str) -> None:
    def raises(*_: object) -> None:
        raise error

    bad, good = (PyArm("r", MEMORY, raises), MEMORY), (PyArm("r", MEMORY, right), MEMORY)
    for pair in ((bad, good), (good, bad)):
        record = compare(*pair, NORMAL, values_of(NORMAL, 4), 4)
        assert (record.status, record.reason) == (status, str(error))


def test_the_table_counts_a_rung_in_a_row() -> None:
    records = [run(NORMAL, one_ulp), run(EXACT, nothing), run(EXACT, one_ulp)]
    ((rung, cases, exact, differ, equal, *_),) = agreement(records).rows
    assert (rung, cases, exact, differ) == ("r", "3", "1 of 2", "1")
    assert 99 < float(equal) < 100


def test_the_runs_beside_the_pinned_one_compare_each_case_of_a_rung_once() -> None:
    ladder = load_ladder()
    compared = [(r.arm, r.case) for r in load(rundir.find(), ladder, in_repository=True).agreements]
    assert len(set(compared)) == len(compared)
    assert {rung.id for rung in ladder.rungs} <= {arm for arm, _ in compared}


def test_the_report_says_which_rungs_were_not_compared() -> None:
    ladder = load_ladder()
    found = load(rundir.find(), ladder, in_repository=True)
    compared = {r.arm for r in found.agreements} - {"r05_swizzle"}
    document = replace(found, agreements=[r for r in found.agreements if r.arm in compared])
    *_, last = report._agreement(document)
    assert last == f"Not compared: {', '.join(rung.id for rung in ladder.rungs if rung.id not in compared)}."
