"""The timing engine measures what it says, and refuses what it must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashladder import build, machine
from flashladder.ablation import runnable
from flashladder.arms import ArmSpec, LoadedArm, open_arm
from flashladder.arrays import CudaMemory
from flashladder.inputs import ODD_VALUES
from flashladder.ladder import load_ladder
from flashladder.model import ArmTiming, Cell, L2Mode, Preset, Shape, ValueTiming
from flashladder.timing import CAPTURES, VALUE_LAUNCHES, VALUE_QUADS, Timer
from tests.saboteurs import PyArm, right

CELL = Cell(shape=Shape(batch=1, heads_q=1, heads_kv=1, seq_q=64, seq_k=64, head_dim=64), dtype="fp16", causal=False)
PRESET = Preset(sets=(), dtypes=("fp16",), blocks=12, min_blocks=10, warmup_ms=100, arm_budget_s=4, arm_limit_s=4)


def _time(torch: Any, work: Any, l2: L2Mode = "warm", preset: Preset = PRESET) -> ArmTiming:
    """Times a right arm with `work` around it."""
    inner = PyArm("fake", CudaMemory(), right)

    def attention(*arguments: Any) -> tuple[Any, Any]:
        return work(inner, *arguments) or (arguments[3], arguments[4])

    arm = LoadedArm(ArmSpec(name="fake", kind="peer"), attention)
    return Timer(preset, {}).time_cell([arm.spec], lambda _: arm, CELL, l2, {}, 0, lambda _: None).arms[0]


def _spin(torch: Any, cycles: int) -> Any:
    """Copies a prepared answer after spinning; the copy is what makes the output right."""
    answers: dict[int, Any] = {}

    def work(inner: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
        if q.data_ptr() not in answers:
            inner(q, k, v, o, lse, scale, causal)
            answers[q.data_ptr()] = o.clone(), lse.clone()
        torch.cuda._sleep(cycles)
        o.copy_(answers[q.data_ptr()][0])
        lse.copy_(answers[q.data_ptr()][1])

    return work


@pytest.fixture(scope="module")
def spin_ms(torch: Any) -> float:
    """What 10 million cycles take by an outer clock, at the settled clock rate."""
    import time

    for _ in range(30):
        torch.cuda._sleep(10_000_000)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        torch.cuda._sleep(10_000_000)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 20 * 1e3


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_a_spin_is_timed_within_ten_percent_with_and_without_flush(torch: Any, spin_ms: float, l2: L2Mode) -> None:
    record = _time(torch, _spin(torch, 10_000_000), l2)
    assert record.status == "timed", record.reason
    assert len(record.blocks) == PRESET.blocks
    assert np.median(record.ns) / 1e6 == pytest.approx(spin_ms, rel=0.1)


def test_short_work_is_batched_to_a_sample_of_100_us(torch: Any) -> None:
    record = _time(torch, _spin(torch, 20_000))
    assert record.status == "timed", record.reason
    assert record.launches_per_sample * np.median(record.ns) > 80e3


def test_blocks_take_turns_with_graphs_and_all_their_samples_are_kept(torch: Any) -> None:
    """Every other graph, of two launches of more than 50 us and less than 100, is made to take twice as long."""
    spin, calls_captured = _spin(torch, 100_000), 0

    def work(inner: PyArm, *arguments: Any) -> None:
        nonlocal calls_captured
        is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing and calls_captured // 2 % 2:
            torch.cuda._sleep(100_000)
        calls_captured += is_capturing
        spin(inner, *arguments)

    record = _time(torch, work)
    assert record.status == "timed", record.reason
    assert (record.launches_per_sample, record.graphs, calls_captured) == (2, CAPTURES, 2 * CAPTURES)
    even, odd = (np.median(record.ns[turn::2]) for turn in range(2))
    assert 1.5 < odd / even < 2.2


def test_one_launch_a_sample_is_captured_once(torch: Any) -> None:
    spin, captured = _spin(torch, 1_000_000), []

    def work(inner: PyArm, *arguments: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            captured.append(True)
        spin(inner, *arguments)

    record = _time(torch, work)
    assert (record.status, record.launches_per_sample, record.graphs, captured) == ("timed", 1, 1, [True])


def test_a_graph_that_captures_nothing_is_refused(torch: Any) -> None:
    def work(inner: PyArm, *arguments: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():
            inner(*arguments)

    record = _time(torch, work)
    assert record.status == "failed"
    assert record.reason is not None
    assert "graph replay is incorrect" in record.reason


def test_wrong_output_is_never_timed(torch: Any) -> None:
    def work(inner: PyArm, q: Any, k: Any, v: Any, o: Any, *_: Any) -> None:
        o.zero_()

    record = _time(torch, work)
    assert record.status == "failed"
    assert record.ns == ()
    assert record.reason is not None
    assert record.reason.startswith("incorrect")


def test_what_cannot_be_captured_is_timed_behind_a_spin(torch: Any) -> None:
    spin = _spin(torch, 2_000_000)

    def work(inner: PyArm, *arguments: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not capturable")
        spin(inner, *arguments)

    record = _time(torch, work)
    assert (record.status, record.captured) == ("timed", False)
    assert 0.8e6 < np.median(record.ns) < 2e6


def test_a_kernel_that_is_launched_early_gains_nothing_from_its_own_end(
    torch: Any, early: dict[str, LoadedArm]
) -> None:
    """In calls that are not kept apart it runs at 1.2 times the speed."""
    shape = Shape(batch=2, heads_q=8, heads_kv=8, seq_q=512, seq_k=512, head_dim=64)
    cell = Cell(shape=shape, dtype="fp16", causal=False)
    specs = [arm.spec for arm in early.values()]
    timing = Timer(PRESET, {}).time_cell(specs, lambda s: early[s.name], cell, "warm", {}, 0, lambda _: None)
    assert [(arm.status, arm.captured) for arm in timing.arms] == [("timed", True)] * 2
    usual, launched_early = (float(np.median(arm.ns)) for arm in timing.arms)
    assert launched_early == pytest.approx(usual, rel=0.06)


@pytest.fixture(scope="module")
def early(torch: Any) -> dict[str, LoadedArm]:
    """The last rung and the variant of it whose kernels are launched early."""
    ladder, arch = load_ladder(), machine.gpu_arch()
    (variant,) = (rung for rung in ladder.variants if "early_launch" in rung.changes)
    rungs = [ladder[variant.parent or ""], variant]
    if not all(rung in runnable(rungs, arch) for rung in rungs):
        pytest.skip("no launch without waiting before Hopper")
    arms = {}
    for target, record in build.build(rungs, [arch or ""]):
        assert record.status == "built", record.reason
        arms[record.rung] = open_arm(ArmSpec(name=record.rung, kind="rung", library=str(target.library)))
    return arms


def _values(timer: Timer, work: Any, kind: str) -> ValueTiming:
    inner = PyArm("fake", CudaMemory(), right)

    def attention(*arguments: Any) -> tuple[Any, Any]:
        work(inner, *arguments)
        return arguments[3], arguments[4]

    return timer.values(LoadedArm(ArmSpec(name="fake", kind="peer"), attention), CELL, kind, 0)


def test_normal_values_take_as_long_as_themselves(torch: Any) -> None:
    timer = Timer(PRESET, {})
    record = _values(timer, _spin(torch, 20_000), "normal")
    assert record.reason is None
    assert len(record.ns) == len(record.normal_ns) == VALUE_QUADS
    assert record.launches_per_sample >= VALUE_LAUNCHES
    assert record.gpu_digest == timer.gpu_digest
    assert np.median(record.ns) / np.median(record.normal_ns) == pytest.approx(1, rel=0.1)


def test_every_kind_of_values_is_timed(torch: Any) -> None:
    timer = Timer(PRESET, {})
    records = [_values(timer, _spin(torch, 20_000), kind) for kind in ODD_VALUES]
    assert {r.values: r.reason for r in records} == dict.fromkeys(ODD_VALUES)
    assert len({r.seed for r in records}) == len(records)


def test_a_kind_of_values_that_is_slow_is_told_by_its_ratio(torch: Any) -> None:
    fast, slow = _spin(torch, 200_000), _spin(torch, 400_000)
    is_slow: dict[int, bool] = {}

    def work(inner: PyArm, q: Any, *rest: Any) -> None:
        if q.data_ptr() not in is_slow:  # before it is captured
            is_slow[q.data_ptr()] = bool(q.abs().max() > 8)
        (slow if is_slow[q.data_ptr()] else fast)(inner, q, *rest)

    record = _values(Timer(PRESET, {}), work, "sharp")
    assert record.reason is None
    assert np.median(record.ns) / np.median(record.normal_ns) == pytest.approx(2, rel=0.15)


def test_an_arm_that_is_wrong_on_a_kind_of_values_has_a_reason_and_no_samples(torch: Any) -> None:
    spin = _spin(torch, 20_000)

    def work(inner: PyArm, q: Any, k: Any, v: Any, o: Any, *rest: Any) -> None:
        spin(inner, q, k, v, o, *rest)
        o.masked_fill_(q.abs() > 8, 0)

    record = _values(Timer(PRESET, {}), work, "sharp")
    assert (record.ns, record.normal_ns) == ((), ())
    assert record.reason is not None
    assert record.reason.startswith("failed: incorrect")


def test_an_arm_over_the_budget_is_skipped_with_its_reason(torch: Any) -> None:
    preset = Preset(
        sets=(), dtypes=("fp16",), blocks=50, min_blocks=20, warmup_ms=10, arm_budget_s=0.05, arm_limit_s=0.05
    )
    record = _time(torch, _spin(torch, 10_000_000), preset=preset)
    assert record.status == "skipped"
    assert record.reason is not None
    assert "over the preset's limit of 0.05 s an arm" in record.reason
