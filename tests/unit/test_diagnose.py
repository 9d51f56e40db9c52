"""Verdicts from raw samples: what is compared, what is refused, what is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flashladder import rundir, stats
from flashladder.diagnose import Results, control_arm, diagnose, judge_predictions, load_results
from flashladder.errors import FlashladderError
from flashladder.ladder import CHOICE, load_ladder
from flashladder.model import ArmStats, ArmTiming, BuildRecord, CellTiming, Comparison, Prediction, PredictionOutcome
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

replace = msgspec.structs.replace
CONTROL = control_arm(made.LADDER)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return made.diagnosed(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def whole(run: RunDir) -> Results:
    return load_results(run, made.LADDER)


def scaled(factor: float, arm: ArmTiming) -> ArmTiming:
    return replace(arm, ns=tuple((a * factor, b * factor) for a, b in arm.ns))


def first_blocks(count: int, arm: ArmTiming) -> ArmTiming:
    return replace(arm, blocks=arm.blocks[:count], ns=arm.ns[:count])


def changed(name: str, change: Callable[[ArmTiming], ArmTiming]) -> list[CellTiming]:
    """The reference cell with one arm changed."""
    return [made.with_arm(made.timing(made.REFERENCE), name, change)]


def arm_of(tmp_path: Path, name: str, timings: list[CellTiming]) -> ArmStats:
    arm = made.results(tmp_path, timings).arm(made.REFERENCE, name)
    assert arm is not None
    return arm


# --- one arm ---


def test_numbers_of_an_arm_come_from_all_its_samples(whole: Results) -> None:
    arm = whole.arm(made.REFERENCE, "r05_swizzle")
    recorded = next(a for a in made.timing(made.REFERENCE, 0).arms if a.arm == "r05_swizzle")
    assert arm is not None
    assert arm.device_us is not None
    assert arm.device_us.median == pytest.approx(np.median(recorded.ns) / 1e3)
    assert arm.device_us.ci[0] < arm.device_us.median < arm.device_us.ci[1]
    assert arm.device_us.n == 2 * made.BLOCKS
    flop = 4 * 64 * 512 * 512 * 16
    assert arm.tflops == pytest.approx(flop / arm.device_us.median / 1e6)
    compulsory = 4 * 2 * 8 * 512 * 64 * 2 + 4 * 2 * 8 * 512
    assert arm.roofline_pct == pytest.approx(100 * compulsory / 3.35e12 * 1e6 / arm.device_us.median)


def test_launch_bound_compares_host_and_device(whole: Results, tmp_path: Path) -> None:
    fast, slow = whole.arm(made.REFERENCE, made.BASELINE), whole.arm(made.REFERENCE, "r02_grid")
    assert fast is not None
    assert slow is not None
    assert (fast.launch_bound, slow.launch_bound) == (True, False)
    unmeasured = arm_of(tmp_path, "r02_grid", changed("r02_grid", lambda arm: replace(arm, host_us=())))
    assert (unmeasured.host_us, unmeasured.launch_bound) == (None, None)


def test_slow_samples_are_counted_and_kept(tmp_path: Path) -> None:
    def jolt(arm: ArmTiming) -> ArmTiming:
        return replace(arm, ns=((arm.ns[0][0] * 2, arm.ns[0][1]), *arm.ns[1:]))

    arm = arm_of(tmp_path, "r02_grid", changed("r02_grid", jolt))
    assert arm.slow_samples == 1
    assert arm.device_us is not None
    assert arm.device_us.n == 2 * made.BLOCKS


def test_invalid_blocks_are_left_out_of_everything(tmp_path: Path) -> None:
    full = made.timing(made.REFERENCE, blocks=14)
    bad = (3, 9)

    def corrupt(arm: ArmTiming) -> ArmTiming:
        ns = tuple((1e9, 1e9) if b in bad else pair for b, pair in zip(arm.blocks, arm.ns, strict=True))
        return replace(arm, ns=ns)

    def drop(arm: ArmTiming) -> ArmTiming:
        kept = [i for i, b in enumerate(arm.blocks) if b not in bad]
        return replace(arm, blocks=tuple(arm.blocks[i] for i in kept), ns=tuple(arm.ns[i] for i in kept))

    telemetry = tuple(made.telemetry(valid=block not in bad) for block in range(14))
    throttled = replace(full, arms=tuple(map(corrupt, full.arms)), telemetry=telemetry)
    without = replace(full, arms=tuple(map(drop, full.arms)))
    records = [diagnose(made.write_run(tmp_path / n, [t]), made.LADDER) for n, t in (("a", throttled), ("b", without))]
    assert records[0] == records[1]
    assert next(r.n for r in records[0] if isinstance(r, Comparison)) == 12


def test_a_time_below_the_hardware_floor_is_refused(tmp_path: Path) -> None:
    arm = arm_of(tmp_path, "r05_swizzle", changed("r05_swizzle", partial(scaled, 1 / 500)))
    assert arm.status == "failed"
    assert arm.reason is not None
    assert "broken measurement" in arm.reason
    assert (arm.device_us, arm.tflops, arm.roofline_pct, arm.slow_samples) == (None,) * 4


def test_one_impossible_sample_is_enough_to_refuse(tmp_path: Path) -> None:
    arm = arm_of(tmp_path, "r05_swizzle", changed("r05_swizzle", lambda a: replace(a, ns=((0.0, 1.0), *a.ns[1:]))))
    assert arm.status == "failed"


def test_a_refused_arm_is_compared_with_nothing(tmp_path: Path) -> None:
    results = made.results(tmp_path, changed("r03_warp_reduce", partial(scaled, 1 / 500)))
    assert not results.comparisons(made.REFERENCE, "r03_warp_reduce")
    assert results.comparison(made.REFERENCE, "r05_swizzle", "r03_warp_reduce") is None


def test_an_undeclared_gpu_has_no_roofline(tmp_path: Path) -> None:
    info = replace(made.INFO, machine=replace(made.MACHINE, gpu="A card of tomorrow"))
    run = made.write_run(tmp_path, [made.timing(made.REFERENCE)], info=info)
    arms = [r for r in diagnose(run, made.LADDER) if isinstance(r, ArmStats) and r.status == "timed"]
    assert arms
    assert all(arm.roofline_pct is None and arm.tflops is not None for arm in arms)


@pytest.mark.parametrize(("blocks", "status"), [(2, "skipped"), (3, "timed")])
def test_too_few_blocks_for_an_interval_give_no_number(tmp_path: Path, blocks: int, status: str) -> None:
    arm = arm_of(tmp_path, "r02_grid", changed("r02_grid", partial(first_blocks, blocks)))
    assert arm.status == status
    assert (arm.device_us is None) == (status == "skipped")
    assert status == "timed" or arm.reason == "insufficient samples: 2 valid blocks of 2"


def test_samples_of_a_block_without_telemetry_are_an_error(tmp_path: Path) -> None:
    run = made.write_run(tmp_path, changed("r02_grid", lambda a: replace(a, blocks=(99, *a.blocks[1:]))))
    with pytest.raises(FlashladderError, match="r02_grid"):
        diagnose(run, made.LADDER)


# --- rungs without times ---


def test_what_is_not_timed_keeps_a_record_with_its_reason(whole: Results) -> None:
    states = {arm.arm: (arm.status, arm.reason) for arm in whole.arms(made.HEADLINE[0])}
    assert states["r04_vector_io"] == (
        "failed",
        "1 of 1 checks failed, first random-d64: largest error 0.3, limit 0.002",
    )
    assert states["r00_naive"][0] == "skipped"
    assert states["sdpa_math"] == ("not installed", "torch has no such backend")
    assert all(reason for status, reason in states.values() if status != "timed")


@pytest.mark.parametrize(
    ("builds", "arch", "status", "reason"),
    [
        ([], "sm_90a", "skipped", "not part of this run"),
        ([made.build(made.RUNGS[4], failed="error: x")], "sm_90a", "failed", "build: error: x"),
        ([made.build(made.RUNGS[4])], "sm_80", "unsupported", "needs sm_90a, the device is sm_80"),
    ],
)
def test_absent_rungs_say_why(tmp_path: Path, builds: list[BuildRecord], arch: str, status: str, reason: str) -> None:
    rungs = tuple(replace(r, min_arch=90) if r.id == "r04_vector_io" else r for r in made.RUNGS)
    info = replace(made.INFO, machine=replace(made.MACHINE, arch=arch))
    run = made.write_run(tmp_path, [made.timing(made.REFERENCE)], builds=builds, info=info)
    records = diagnose(run, dataclasses.replace(made.LADDER, rungs=rungs))
    arm = next(r for r in records if isinstance(r, ArmStats) and r.arm == "r04_vector_io")
    assert (arm.status, arm.reason) == (status, reason)


def test_a_binary_that_was_not_checked_has_no_numbers(tmp_path: Path) -> None:
    arm = arm_of(tmp_path, "r02_grid", changed("r02_grid", lambda arm: replace(arm, sha256="another")))
    assert (arm.status, arm.reason, arm.device_us) == ("failed", "not checked", None)


# --- comparisons ---


def test_pairs_that_are_compared(run: RunDir) -> None:
    records = [r for r in run.diagnosis() if isinstance(r, Comparison) and r.cell == made.REFERENCE]
    pairs = {(r.arm, r.other): r.relation for r in records}
    peers = [made.BASELINE, "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]
    rungs = ["r00_naive", "r01_tiled", "r02_grid", "r03_warp_reduce", "r05_swizzle"]
    expected = {(rung, peer): "baseline" for rung in rungs for peer in peers}
    expected |= {(peer, made.BASELINE): "baseline" for peer in peers[1:]}
    expected |= {(rung.id, rung.parent): "parent" for rung in made.RUNGS if rung.id in rungs and rung.parent}
    expected |= {(CONTROL, made.BASELINE): "control"}
    assert pairs == expected
    assert len(records) == len(expected)


def test_ratios_are_the_others_time_over_this_ones(whole: Results) -> None:
    step = whole.comparison(made.REFERENCE, "r03_warp_reduce", "r02_grid")
    truth = made.true_us(made.REFERENCE, "r02_grid") / made.true_us(made.REFERENCE, "r03_warp_reduce")
    assert step is not None
    assert step.ratio == pytest.approx(truth, rel=0.01)
    assert step.verdict == "faster"
    assert step.cliffs_delta == 1
    baseline = whole.comparison(made.REFERENCE, "r03_warp_reduce", made.BASELINE)
    assert baseline is not None
    assert baseline.verdict == "slower"


def test_the_same_kernel_under_drift_is_the_same(whole: Results) -> None:
    control = whole.control(made.REFERENCE)
    assert control is not None
    assert control.verdict == "same"
    assert (control.correction, control.p_adjusted) == ("none", control.p)


def test_the_control_sets_the_floor_of_its_cell(tmp_path: Path) -> None:
    results = made.results(tmp_path, changed(CONTROL, partial(scaled, 1.02)))
    step = results.comparison(made.REFERENCE, "r05_swizzle", "r03_warp_reduce")
    assert step is not None
    assert step.floor == pytest.approx(0.06, rel=0.1)
    control = results.control(made.REFERENCE)
    assert control is not None
    assert control.floor == stats.practical_floor(None)


def test_the_control_is_not_among_the_arms(run: RunDir, whole: Results) -> None:
    assert CONTROL in {r.arm for r in run.diagnosis() if isinstance(r, ArmStats)}
    assert CONTROL not in whole.peers
    assert all(arm.arm != CONTROL for cell in whole.cells for arm in whole.arms(cell))
    assert all(CONTROL not in whole.comparisons(cell, arm) for cell in whole.cells for arm in whole.rungs)


def test_parents_are_corrected_over_the_ladder_and_baselines_over_the_cells(run: RunDir) -> None:
    comparisons = [r for r in run.diagnosis() if isinstance(r, Comparison)]
    steps = [c for c in comparisons if c.relation == "parent" and c.cell == made.REFERENCE]
    cells = [c for c in comparisons if (c.arm, c.other) == ("sdpa_cudnn", made.BASELINE)]
    assert len(steps) == 4
    assert len(cells) == len(made.CELLS)
    for family, name, adjust in ((steps, "holm", stats.holm), (cells, "bh", stats.benjamini_hochberg)):
        assert {c.correction for c in family} == {name}
        raw = [c.p for c in family if c.p is not None]
        adjusted = [c.p_adjusted for c in family]
        assert adjusted == pytest.approx(list(adjust(raw)), rel=1e-6)
        assert adjusted != raw


def test_only_shared_blocks_are_compared(tmp_path: Path) -> None:
    def last_blocks(arm: ArmTiming) -> ArmTiming:
        return replace(arm, blocks=arm.blocks[1:], ns=arm.ns[1:])

    results = made.results(tmp_path, changed("r03_warp_reduce", last_blocks))
    step = results.comparison(made.REFERENCE, "r05_swizzle", "r03_warp_reduce")
    assert step is not None
    assert step.n == made.BLOCKS - 1


def test_too_few_shared_blocks_give_a_verdict_without_numbers(tmp_path: Path) -> None:
    results = made.results(tmp_path, changed("r03_warp_reduce", partial(first_blocks, stats.MIN_QUADS - 1)))
    step = results.comparison(made.REFERENCE, "r05_swizzle", "r03_warp_reduce")
    assert step is not None
    assert (step.verdict, step.n) == ("insufficient samples", stats.MIN_QUADS - 1)
    assert (step.ratio, step.ci, step.p, step.p_adjusted) == (None,) * 4
    outcome = next(p for p in results.predictions if p.rung == "r05_swizzle")
    assert (outcome.outcome, outcome.measured) == ("not measured", None)
    assert outcome.note == "insufficient samples: 9 blocks in which both ran"


def test_constant_samples(tmp_path: Path) -> None:
    def constant(us: float, arm: ArmTiming) -> ArmTiming:
        return replace(arm, ns=((us * 1e3, us * 1e3),) * len(arm.ns))

    timing = made.timing(made.REFERENCE)
    for name, us in ((made.BASELINE, 8.0), (CONTROL, 8.0), ("sdpa_cudnn", 8.0), ("sdpa_flash", 9.0)):
        timing = made.with_arm(timing, name, partial(constant, us))
    results = made.results(tmp_path, [timing])
    same = results.comparison(made.REFERENCE, "sdpa_cudnn", made.BASELINE)
    slower = results.comparison(made.REFERENCE, "sdpa_flash", made.BASELINE)
    assert same is not None
    assert slower is not None
    assert (same.verdict, same.ratio, same.ci) == ("same", 1.0, (1.0, 1.0))
    assert slower.verdict == "slower"
    assert slower.ratio == pytest.approx(8 / 9)


# --- predictions ---


def outcome_of(tmp_path: Path, expected: tuple[float, float], after: str | None = None) -> PredictionOutcome:
    claim = Prediction(metric="time", direction="down", ratio=expected, after=after, reason="because")
    rungs = tuple(replace(r, predictions=(claim,) if r.id == "r05_swizzle" else ()) for r in made.RUNGS)
    ladder = dataclasses.replace(made.LADDER, rungs=rungs)
    (outcome,) = Results(diagnose(made.write_run(tmp_path), ladder), ladder).predictions
    return outcome


def test_predictions_are_read_from_the_interval(whole: Results, tmp_path: Path) -> None:
    step = whole.comparison(made.REFERENCE, "r05_swizzle", "r03_warp_reduce")
    assert step is not None
    assert step.ratio is not None
    assert step.ci is not None
    inside = outcome_of(tmp_path / "a", (1.2, 2.0))
    touched = outcome_of(tmp_path / "b", ((step.ratio + step.ci[1]) / 2, 9.0))
    missed = outcome_of(tmp_path / "c", (step.ci[1] * 1.001, 9.0))
    assert (inside.outcome, inside.note, inside.measured, inside.ci) == ("confirmed", None, step.ratio, step.ci)
    assert touched.outcome == "confirmed"
    assert touched.note
    assert (missed.outcome, missed.note) == ("refuted", None)
    known = outcome_of(tmp_path / "d", (1.2, 2.0), after="trials")
    assert (known.outcome, known.note) == ("confirmed", "predicted after trials")


def test_predictions_without_a_measurement_say_why(whole: Results) -> None:
    by_rung = {(p.rung, p.metric): p for p in whole.predictions}
    assert len(by_rung) == sum(len(r.predictions) for r in made.RUNGS)
    failed = by_rung["r04_vector_io", "time"]
    assert (failed.outcome, failed.measured) == ("not measured", None)
    assert failed.note is not None
    assert failed.note.startswith("r04_vector_io failed: ")
    assert by_rung["r05_swizzle", "smsp__x.sum"].note == "r05_swizzle was not profiled at the cell that it is read at"


def test_a_run_without_timings_leaves_every_prediction_open(tmp_path: Path) -> None:
    records = diagnose(made.write_run(tmp_path, []), made.LADDER)
    assert {type(r) for r in records} == {PredictionOutcome}
    assert {r.outcome for r in records if isinstance(r, PredictionOutcome)} == {"not measured"}


def test_the_predictions_of_the_pinned_run_are_judged_by_the_present_ladder() -> None:
    run = rundir.find()
    records = run.diagnosis()
    arms = [record for record in records if isinstance(record, ArmStats)]
    comparisons = [record for record in records if isinstance(record, Comparison)]
    outcomes = [record for record in records if isinstance(record, PredictionOutcome)]
    assert outcomes == judge_predictions(load_ladder(), comparisons, arms, run.profiles())


# --- records ---


def test_records_survive_the_file_and_repeat(run: RunDir) -> None:
    again = diagnose(run, made.LADDER)
    assert again == run.diagnosis()
    text = (run.path / "diagnosis.jsonl").read_bytes()
    assert text == b"".join(msgspec.json.encode(r) + b"\n" for r in again)


def test_a_run_without_a_diagnosis_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FlashladderError, match=r"no diagnosis.*flashladder time"):
        load_results(made.write_run(tmp_path), made.LADDER)


def test_forced_plans_are_judged_by_their_rungs_checks() -> None:
    found = diagnose(rundir.find("h200/tune-r13"), load_ladder())
    forced = [r for r in found if isinstance(r, ArmStats) and CHOICE in r.arm]
    assert {"timed"} <= {r.status for r in forced}
    assert not [r for r in forced if r.reason == "not checked"]
