"""The rules: each holds past its threshold and not before, missing counters are inconclusive, scores are bounds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from flashladder import bottleneck as b
from flashladder import flops, ncu
from flashladder.ladder import load_ladder
from flashladder.model import ArmStats, Bottlenecks, Estimate, KernelProfile, Metric, NcuRecord
from tests.unit import synthetic as made
from tests.unit.recorded import profiled

CELL = made.HEADLINE[0]
SMS = 132

QUIET: dict[str, float] = {
    b.DURATION: 1e-3,
    b.GRID: 1024,
    b.WAVES: 3,
    b.ACTIVE: 990,
    b.ELAPSED: 1000,
    b.DRAM: 20,
    b.DRAM_BYTES: 1.2 * flops.compulsory_bytes(CELL),
    b.L2: 30,
    b.L2_BYTES: 3.0 * flops.compulsory_bytes(CELL),
    b.L1: 50,
    b.TENSOR: 65,
    b.XU: 40,
    b.ALU: 30,
    b.FMA: 45,
    b.MMA: 1000,
    b.GMMA: 1000,
    b.ISSUE: 60,
    b.ELIGIBLE: 1.5,
    b.INSTRUCTIONS: 1e6,
    b.LOCAL[0]: 0,
    b.LOCAL[1]: 0,
    b.WAVEFRONTS: 1e6,
    b.CONFLICTS[0]: 0,
    b.CONFLICTS[1]: 0,
    b.LATENCY: 4.0,
    **{b.stall(reason): 0.2 for reason in b.STALLS},
    **dict.fromkeys(b.LIMITS, 4),
}
"""A kernel on which no rule holds."""


def _stats(host_us: float, device_us: float) -> ArmStats:
    def of(x: float) -> Estimate:
        return Estimate(median=x, ci=(x, x), n=10)

    return ArmStats(
        cell=CELL, l2="cold", arm="k", kind="rung", status="timed", device_us=of(device_us), host_us=of(host_us)
    )


def _diagnose(changes: Mapping[str, float | None], stats: ArmStats | None = None, arch: str = "sm_90a") -> Bottlenecks:
    values = {name: value for name, value in {**QUIET, **changes}.items() if value is not None}
    kernel = KernelProfile(name="k", metrics={n: Metric(value=v, unit="") for n, v in values.items()})
    record = NcuRecord(arm="k", kind="rung", sha256="aa", cell=CELL, set="light", ncu="1", kernels=(kernel,))
    return b.diagnose(record, stats, arch, SMS)


def test_a_kernel_without_a_fault_has_no_finding() -> None:
    found = _diagnose({})
    assert found.findings == ()
    assert found.inconclusive == {}
    assert found.flagged == ()


IDLE = {b.TENSOR: 30.0, b.XU: 20.0, b.ALU: 20.0, b.FMA: 40.0, b.ISSUE: 45.0}


@pytest.mark.parametrize(
    ("rule", "changes", "value", "score"),
    [
        ("grid too small", {b.GRID: 33}, 33, 0.75),
        ("tail", {b.ACTIVE: 800}, 0.2, 0.2),
        ("DRAM", {b.DRAM: 80, b.DRAM_BYTES: 2.0 * flops.compulsory_bytes(CELL)}, 0.8, 0.5),
        ("L2", {b.L2: 80, b.L2_BYTES: 4.0 * flops.compulsory_bytes(CELL)}, 0.8, 0.6),
        ("bank conflicts", {b.CONFLICTS[0]: 5e5}, 0.5, 0.25),
        ("shared-memory bandwidth", {b.L1: 90}, 0.9, 25 / 90),
        ("no wgmma", {b.GMMA: 0}, 0, 0.65 / 3),
        ("tensor cores", {b.TENSOR: 80}, 0.8, 0.2),
        ("MUFU", {b.XU: 90}, 0.9, 0.25),
        ("issue slots", {b.ISSUE: 90}, 0.9, 0.25),
        ("latency", {**IDLE, b.stall("barrier"): 2.0}, 2.0, 0.5 * 0.6),
        ("spills", {b.LOCAL[1]: 1e5}, 0.1, 0.1),
        ("occupancy", {**IDLE, b.ELIGIBLE: 0.5, "launch__occupancy_limit_registers": 1}, 1, 0.275),
    ],
)
def test_a_rule_holds_past_its_threshold_and_bounds_what_it_could_save(
    rule: str, changes: dict[str, float], value: float, score: float
) -> None:
    finding = next(f for f in _diagnose(changes).findings if f.rule == rule)
    assert finding.value == pytest.approx(value, rel=1e-5)
    assert finding.score == pytest.approx(score, rel=1e-5)
    assert finding.fix
    assert finding.threshold == next(r.threshold for r in b.RULES if r.name == rule)


def test_a_shared_memory_kept_busy_by_conflicts_is_a_matter_of_conflicts() -> None:
    found = [f.rule for f in _diagnose({b.L1: 90, b.CONFLICTS[0]: 5e5}).findings]
    assert found == ["bank conflicts"]


def test_every_rule_has_a_case_above() -> None:
    cases = {"host-bound"} | {
        mark.args[1][i][0]
        for mark in test_a_rule_holds_past_its_threshold_and_bounds_what_it_could_save.pytestmark  # type: ignore[attr-defined]
        for i in range(len(mark.args[1]))
    }
    assert cases == {rule.name for rule in b.RULES}


def test_host_bound_needs_both_times() -> None:
    (finding,) = _diagnose({}, _stats(host_us=20, device_us=5)).findings
    assert (finding.rule, finding.value, finding.score) == ("host-bound", 4.0, 0.75)
    assert _diagnose({}, _stats(host_us=5.5, device_us=5)).findings == ()


def test_findings_are_at_most_three_the_largest_first() -> None:
    found = _diagnose({b.GRID: 33, b.LOCAL[0]: 5e5, b.CONFLICTS[0]: 5e5, b.XU: 90}).findings
    assert [f.rule for f in found[:2]] == ["grid too small", "spills"]
    assert len(found) == b.MOST_FINDINGS
    assert sorted((f.score for f in found), reverse=True) == [f.score for f in found]


def test_a_missing_counter_makes_its_rules_inconclusive_and_is_named() -> None:
    found = _diagnose({b.TENSOR: None, b.GRID: 33})
    assert [f.rule for f in found.findings] == ["grid too small"]
    assert found.inconclusive["tensor cores"] == (b.TENSOR,)
    assert "bank conflicts" not in found.inconclusive


def test_a_percentage_above_100_is_flagged_and_not_used() -> None:
    found = _diagnose({b.TENSOR: 180})
    assert found.flagged == (b.TENSOR,)
    assert "tensor cores" in found.inconclusive


def test_the_rule_for_wgmma_is_hoppers_alone() -> None:
    found = _diagnose({b.GMMA: None}, arch="sm_89")
    assert "no wgmma" not in found.inconclusive
    assert found.findings == ()


FIRST: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "r00_naive": ("grid too small", b.GRID),
    "r01_tiled": ("grid too small", b.GRID),
    "r02_grid": ("latency", b.stall("barrier")),
    "r04_vector_io": ("bank conflicts", "bank conflicts / "),
    "v13_no_swizzle": ("bank conflicts", "bank conflicts / "),
    "r07_wmma_pv": ("latency", (b.stall("short_scoreboard"), b.stall("long_scoreboard"))),  # a near tie
    "r08_mma_sync": ("latency", b.stall("long_scoreboard")),
    "r09_large_tiles": ("grid too small", b.GRID),
}
"""Rung -> rule and metric of its first finding at the reference: what the next rung, or its parent's loss, is about."""


@pytest.mark.parametrize("arm", FIRST)
def test_a_recorded_rung_is_first_found_to_have_the_fault_that_the_next_one_mends(arm: str) -> None:
    run, ladder = profiled(), load_ladder()
    profiles = {p.arm: p for p in run.profiles() if p.cell == ladder.reference and p.kernels}
    if arm not in profiles and ladder[arm].kind == "variant":
        pytest.skip(f"run {run.info.id} has no counters of {arm}")
    rule, metric = FIRST[arm]
    first = b.diagnose(profiles[arm], None, run.info.machine.arch, run.info.machine.sm_count).findings[0]
    assert first.rule == rule
    assert first.metric.startswith(metric)


def test_every_rung_has_recorded_counters_at_the_reference() -> None:
    ladder = load_ladder()
    recorded = {p.arm for p in profiled().profiles() if p.kernels and p.cell == ladder.reference}
    assert {r.id for r in ladder.rungs} <= recorded


def test_of_the_recorded_rungs_those_that_spill_and_no_others_use_local_memory() -> None:
    run = profiled()
    spills = {kernel.kernel: kernel.spill_load_bytes for build in run.builds() for kernel in build.kernels}
    kernels = [(p, ncu.main_kernel(p.kernels)) for p in run.profiles() if p.kind != "peer" and p.kernels]
    assert kernels
    for profile, kernel in kernels:
        found = b.diagnose(profile, None, run.info.machine.arch, run.info.machine.sm_count)
        local = sum(kernel.metrics[name].value for name in b.LOCAL)
        assert (local > 0) == (spills[kernel.name] > 0), kernel.name
        assert local > 0 or "spills" not in {finding.rule for finding in found.findings}


def test_of_two_kernels_the_longer_one_is_judged() -> None:
    kernels = tuple(
        KernelProfile(name=name, metrics={b.DURATION: Metric(value=t, unit="s"), b.GRID: Metric(value=8, unit="")})
        for name, t in (("combine", 1e-6), ("main", 9e-6))
    )
    record = NcuRecord(arm="k", kind="rung", sha256="aa", cell=CELL, set="light", ncu="1", kernels=kernels)
    assert b.diagnose(record, None, "sm_90a", SMS).kernel == "main"
