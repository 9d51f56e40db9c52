"""What only Hopper's rungs can get wrong on a GPU: tensor maps, phases of barriers, many runs, any shape."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from flashladder import check, native
from flashladder.arms import LoadedArm
from flashladder.arrays import CudaMemory
from flashladder.inputs import Case
from flashladder.ladder import load_ladder
from flashladder.model import HOPPER as HOPPER_ARCH
from flashladder.model import Cell, Shape
from tests.random_cases import cases

HOPPER = [r.id for r in load_ladder().rungs if r.min_arch >= HOPPER_ARCH]
RERUNS = 1000
SHAPES = ((2, 4, 200, 64), (1, 3, 700, 128), (8, 32, 1024, 64))
SEED = 5


@pytest.fixture(params=HOPPER)
def hopper(request: pytest.FixtureRequest, arms: dict[str, LoadedArm]) -> LoadedArm:
    if request.param not in arms:
        pytest.skip("this GPU does not run it")
    return arms[request.param]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_thousand_runs_give_the_same_bits(torch: Any, hopper: LoadedArm, shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first, o = torch.empty_like(q), torch.empty_like(q)
    first_lse, lse = (torch.empty(shape[:3], device="cuda") for _ in range(2))
    hopper(q, k, v, first, first_lse, shape[3] ** -0.5, True)
    others = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(RERUNS):
        o.fill_(float("nan"))
        hopper(q, k, v, o, lse, shape[3] ** -0.5, True)
        others += (o.view(torch.int16) != first.view(torch.int16)).sum() + (lse != first_lse).sum()
    assert others.item() == 0


def test_random_problems_are_right(torch: Any, arms: dict[str, LoadedArm]) -> None:
    """500 of them, shared out among the rungs; one that TMA cannot read is refused or computed otherwise."""
    if HOPPER[0] not in arms:
        pytest.skip("this GPU runs none of them")
    memory, turn = CudaMemory(), 0

    @settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases(max_rows=900, max_keys=1500))
    def one(case: Case) -> None:
        nonlocal turn
        turn += 1
        arm = arms[HOPPER[turn % len(HOPPER)]]
        record = check.check_case(arm, case, memory, SEED, check.pose(case, memory, SEED))
        refusable = case.layout == "broadcast_rows" and native.load(Path(arm.spec.library or "")).config["splits"] != 0
        assert record.status == "pass" or (refusable and record.status == "unsupported"), f"{arm.name}: {record}"

    one()
    assert turn >= 500


def test_more_batches_than_a_grid_axis(torch: Any, hopper: LoadedArm) -> None:
    """The launch in parts: the last batches are what a call of their own gives."""
    shape, last = (65535 + 7, 1, 40, 128), slice(65535 - 3, None)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    o, lse = torch.full_like(q, float("nan")), torch.full(shape[:3], float("nan"), device="cuda")
    hopper(q, k, v, o, lse, shape[3] ** -0.5, True)
    alone, alone_lse = torch.empty_like(o[last]), torch.empty_like(lse[last])
    hopper(q[last], k[last], v[last], alone, alone_lse, shape[3] ** -0.5, True)
    assert not o.isnan().any()
    assert (o[last] - alone).abs().max() <= 0.02
    assert (lse[last] - alone_lse).abs().max() <= 1e-3


def test_tensors_may_move_between_calls(torch: Any, hopper: LoadedArm) -> None:
    """The same shape and strides at other addresses, and the same address with other strides: no map is kept."""
    memory = CudaMemory()
    shape = Shape(batch=2, heads_q=2, heads_kv=2, seq_q=150, seq_k=150, head_dim=64)
    for layout in ("bhsd", "bshd", "packed_qkv", "padded", "bhsd"):
        for causal in (False, True):
            case = Case("layout", Cell(shape=shape, dtype="fp16", causal=causal), layout=layout)
            record = check.check_case(hopper, case, memory, SEED, check.pose(case, memory, SEED))
            assert record.status == "pass", record


def test_a_call_with_its_maps_takes_3_us_more_than_a_plain_launch(torch: Any, arms: dict[str, LoadedArm]) -> None:
    def best(arm: LoadedArm) -> float:
        q, k, v, o = (torch.zeros((1, 1, 1, 64), device="cuda", dtype=torch.float16) for _ in range(4))
        lse = torch.empty((1, 1, 1), device="cuda")
        forward = native.load(Path(arm.spec.library or "")).forward
        times = []
        for _ in range(30):
            start = time.perf_counter()
            for _ in range(100):
                forward(q, k, v, o, lse, 0.125, False)
            times.append((time.perf_counter() - start) / 100)
            torch.cuda.synchronize()
        return min(times)

    plain = best(arms["r02_grid"])
    for name in HOPPER:
        if name in arms:
            assert best(arms[name]) < plain + 3e-6, name
