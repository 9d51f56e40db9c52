"""The gate on numpy memory: right arms pass every case, saboteurs do not, and its own arithmetic is right."""

from __future__ import annotations

from functools import cache
from math import log

import numpy as np
import pytest

from flashladder import check, inputs, reference
from flashladder.arrays import HostMemory
from flashladder.model import CheckRecord, DtypeName
from tests.saboteurs import REASONS, SABOTEURS, PyArm, right

MEMORY = HostMemory()
SEED = 5


@cache
def _cases(dtype: DtypeName) -> tuple[inputs.Case, ...]:
    return tuple(inputs.edge_cases(dtype, 64))


@cache
def _posed(case: inputs.Case) -> tuple[check.Problem, ...]:
    return check.pose(case, MEMORY, SEED)


def _run(arm: PyArm, case: inputs.Case) -> CheckRecord:
    return check.check_case(arm, case, MEMORY, SEED, _posed(case))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_right_answer_passes_every_case(dtype: DtypeName) -> None:
    arm = PyArm("right", MEMORY, right)
    bad = [(r.case, r.reason) for case in _cases(dtype) if (r := _run(arm, case)).status != "pass"]
    assert not bad


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", SABOTEURS)
def test_a_saboteur_is_rejected(name: str, dtype: DtypeName) -> None:
    arm = PyArm(name, MEMORY, SABOTEURS[name])
    cases = sorted(_cases(dtype), key=lambda case: (not case.cell.causal, case.family == "grid"))  # the large ones last
    records = (_run(arm, case) for case in cases)
    assert any(r.status == "fail" and REASONS[name] in (r.reason or "") for r in records), f"no case caught: {name}"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("stride"), "unsupported"), (RuntimeError("launch failed\nmore"), "error")]
)
def test_exceptions_become_records(error: Exception, status: str) -> None:
    def raises(*_: object) -> None:
        raise error

    record = _run(PyArm("raises", MEMORY, raises), _cases("fp16")[0])
    assert record.status == status
    assert record.reason is not None
    assert "\n" not in record.reason


def test_an_arm_that_breaks_the_device_ends_the_process_rather_than_blaming_the_next_arm() -> None:
    class Broken(HostMemory):
        def confirm(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    def raises(*_: object) -> None:
        raise RuntimeError("launch failed")

    case = _cases("fp16")[0]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check.check_case(PyArm("raises", MEMORY, raises), case, Broken(), SEED, _posed(case))


def test_case_ids_are_unique() -> None:
    ids = [case.id for dtype in ("fp16", "bf16") for d in (64, 128) for case in inputs.edge_cases(dtype, d)]
    assert len(ids) == len(set(ids))


def test_values_are_fresh_each_round_and_repeat_with_the_seed() -> None:
    case = _cases("fp16")[3]
    first, second = check.pose(case, MEMORY, 1)
    assert not np.array_equal(first.values[0], second.values[0])
    again = check.pose(case, MEMORY, 1)
    assert np.array_equal(first.values[0], again[0].values[0])
    assert not np.array_equal(first.values[0], check.pose(case, MEMORY, 2)[0].values[0])


# --- the oracle -----------------------------------------------------------------------------------------------------


def test_oracle_against_explicit_loops() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(1, 4, 5, 3)), rng.normal(size=(1, 2, 7, 3)), rng.normal(size=(1, 2, 7, 3))
    for causal in (False, True):
        o, lse = reference.attention(q, k, v, scale=0.7, causal=causal)
        for h in range(4):
            for i in range(5):
                keys = [j for j in range(7) if not causal or j <= i + 7 - 5]
                scores = np.array([q[0, h, i] @ k[0, h // 2, j] * 0.7 for j in keys])
                weights = np.exp(scores)
                assert lse[0, h, i] == pytest.approx(log(weights.sum()))
                expected = (weights[:, None] * v[0, h // 2, keys]).sum(0) / weights.sum()
                np.testing.assert_allclose(o[0, h, i], expected)


def test_zero_q_is_the_mean_of_the_visible_values() -> None:
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(1, 1, 9, 4)), rng.normal(size=(1, 1, 9, 4))
    o, lse = reference.attention(np.zeros((1, 1, 6, 4)), k, v, scale=1.0, causal=True)
    for i in range(6):
        visible = i + 9 - 6 + 1
        np.testing.assert_allclose(o[0, 0, i], v[0, 0, :visible].mean(0))
        assert lse[0, 0, i] == pytest.approx(log(visible))


def test_rows_without_a_visible_key_are_zero() -> None:
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(1, 1, 5, 4)), rng.normal(size=(1, 1, 2, 4))
    o, lse = reference.attention(q, k, k, scale=1.0, causal=True)
    assert not o[0, 0, :3].any()
    assert np.all(lse[0, 0, :3] == -np.inf)
    assert np.all(np.isfinite(lse[0, 0, 3:]))
    o, lse = reference.attention(q, k[:, :, :0], k[:, :, :0], scale=1.0, causal=False)
    assert not o.any()
    assert np.all(lse == -np.inf)


def test_a_scale_from_a_padded_head_dim_would_show() -> None:
    q, k = np.ones((1, 1, 1, 72)), np.zeros((1, 1, 2, 72))
    k[0, 0, 0] = 0.1
    v = np.zeros((1, 1, 2, 72))
    v[0, 0, 0] = 1
    o, _ = reference.attention(q, k, v, scale=72**-0.5, causal=False)
    assert o[0, 0, 0, 0] == pytest.approx(0.70026, abs=1e-5)


def test_row_subset_equals_the_whole() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(2, 2, 11, 4)) for _ in range(3))
    rows = np.array([0, 4, 10])
    o, lse = reference.attention(q, k, v, scale=0.5, causal=True)
    part, part_lse = reference.attention(q[:, :, rows], k, v, scale=0.5, causal=True, rows=rows, seq_q=11)
    np.testing.assert_allclose(part, o[:, :, rows])
    np.testing.assert_allclose(part_lse, lse[:, :, rows])


def test_layout_guards_cover_gaps_and_ends() -> None:
    dims = (2, 3, 5, 8)
    for layout in inputs.LAYOUTS.values():
        placed = inputs.place(MEMORY, dims, layout, np.dtype(np.float16), 0.0)
        placed.view[...] = 1
        assert np.array_equal(placed.flat == 1, placed.inside), layout.name
        assert not placed.inside[: inputs.GUARD].any()
        assert not placed.inside[-inputs.GUARD :].any()


def test_the_largest_score_is_over_the_kv_heads_own_query_heads_and_finite() -> None:
    q = np.zeros((1, 4, 2, 8), np.float16)
    k = np.zeros((1, 2, 3, 8), np.float16)
    q[0, 3, 1, 0], k[0, 1, 2, 0] = 30.0, -5.0  # of one group
    q[0, 0, 0, 1], k[0, 1, 0, 1] = 1000.0, 1000.0  # of two
    assert check.largest_score((q, k, k)) == 150
    k[0, 1, 1, 0] = np.inf
    assert check.largest_score((q, k, k)) == 150
    assert check.largest_score((q, k[:, :, :0], k)) == 0
