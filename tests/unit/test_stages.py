"""The stage drivers with a scripted child: resuming, crashes, the gate before timing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from flashladder import ablation, check, stages, worker
from flashladder.arms import ArmSpec
from flashladder.errors import EnvironmentInvalidError
from flashladder.inputs import ODD_VALUES
from flashladder.ladder import CONTROL, load_ladder, load_presets
from flashladder.model import ArmTiming, Cell, CellTiming, CheckRecord, Shape, ValueTiming
from flashladder.rundir import RunDir

LADDER = load_ladder()
PRESET = load_presets()["quick"]
RUNG = ArmSpec(name="r05_swizzle", kind="rung", library="x.so", sha256="aa")
OTHER = ArmSpec(name="r04_vector_io", kind="rung", library="y.so", sha256="bb")
PEER = ArmSpec(name="sdpa_default", kind="peer")
FINISHED = worker.Outcome(end="finished", at=None, detail="")


def _cell(seq: int) -> Cell:
    shape = Shape(batch=1, heads_q=1, heads_kv=1, seq_q=seq, seq_k=seq, head_dim=64)
    return Cell(shape=shape, dtype="fp16", causal=False)


def _check(item: worker.CheckItem, status: str = "pass") -> CheckRecord:
    return CheckRecord(
        arm=item.arm.name,
        sha256=item.arm.sha256,
        case=item.case.id,
        cell=item.case.cell,
        status=status,  # type: ignore[arg-type]
        reason=None if status == "pass" else "because",
        seed=0,
    )


Child = Callable[[worker.Job, Callable[[worker.Message], None]], worker.Outcome]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[Child], list[worker.Job]]:
    """Replace the child process by a function; returns the jobs it was given."""

    def install(run: Child) -> list[worker.Job]:
        jobs: list[worker.Job] = []

        def supervise(
            job: worker.Job, on_message: Callable[[worker.Message], None], limit_s: float = 120.0
        ) -> worker.Outcome:
            jobs.append(job)
            return run(job, on_message)

        monkeypatch.setattr(stages, "supervise", supervise)
        return jobs

    return install


def _checks_everything(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
    assert isinstance(job, worker.CheckJob)
    for item in job.items:
        say(worker.CheckDone(record=_check(item)))
    return FINISHED


def test_checks_are_done_once_a_binary(tmp_path: Path, child: Callable[[Child], list[worker.Job]]) -> None:
    run = RunDir(tmp_path)
    jobs = child(_checks_everything)
    records = stages.check_arms(run, [RUNG, PEER], ["fp16"], [64], 0)
    expected = stages.cases(["fp16"], [64])
    suite = [case for case in expected if case.family == "suite"]
    assert len(records) == len(expected) + len(suite)
    first = len(jobs)
    stages.check_arms(run, [RUNG, PEER], ["fp16"], [64], 0)
    assert len(jobs) == first
    rebuilt = ArmSpec(name=RUNG.name, kind="rung", library="x.so", sha256="cc")
    stages.check_arms(run, [rebuilt, PEER], ["fp16"], [64], 0)
    assert {item.arm.sha256 for job in jobs[first:] for item in job.items} == {"cc"}  # type: ignore[union-attr]


def test_an_interrupted_check_goes_on_where_it_stopped(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]]
) -> None:
    def interrupted(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
        assert isinstance(job, worker.CheckJob)
        for item in job.items[:10]:
            say(worker.CheckDone(record=_check(item)))
        raise KeyboardInterrupt

    run = RunDir(tmp_path)
    child(interrupted)
    with pytest.raises(KeyboardInterrupt):
        stages.check_arms(run, [RUNG], ["fp16"], [64], 0)
    run_before = run.checks()
    assert len(run_before) >= 10
    jobs = child(_checks_everything)
    stages.check_arms(run, [RUNG], ["fp16"], [64], 0)
    left = sum(len(job.items) for job in jobs if isinstance(job, worker.CheckJob))
    assert left == len(stages.cases(["fp16"], [64])) - len(run_before)


@pytest.mark.parametrize("end", ["crash", "timeout"])
def test_a_crash_is_recorded_and_the_other_arms_go_on(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]], end: str
) -> None:
    def crashes(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
        assert isinstance(job, worker.CheckJob)
        for number, item in enumerate(job.items):
            if item.arm == RUNG:
                at = worker.At(item=number, arm=item.arm.name)
                return worker.Outcome(end=end, at=at, detail="killed by SIGSEGV")  # type: ignore[arg-type]
            say(worker.CheckDone(record=_check(item)))
        return FINISHED

    run = RunDir(tmp_path)
    jobs = child(crashes)
    records = stages.check_arms(run, [RUNG, OTHER], ["fp16"], [64], 0)
    mine = [r for r in records if r.arm == RUNG.name]
    assert {(r.status, r.reason) for r in mine} == {(end, "killed by SIGSEGV")}
    assert len(mine) <= stages.CHECKERS
    assert len([r for r in records if r.arm == OTHER.name]) == len(stages.cases(["fp16"], [64]))
    assert len(jobs) == 2 * min(stages.CHECKERS, os.cpu_count() or 1)
    refused = check.refusal(records, RUNG.name, RUNG.sha256, _cell(64))
    assert refused is not None
    assert refused[0] == "failed"
    assert "SIGSEGV" in refused[1]


def test_a_child_that_never_comes_up_blames_no_arm(tmp_path: Path, child: Callable[[Child], list[worker.Job]]) -> None:
    run = RunDir(tmp_path)
    jobs = child(lambda *_: worker.Outcome(end="crash", at=None, detail="ImportError: no torch"))
    with pytest.raises(EnvironmentInvalidError, match=r"before it ran a kernel \(crash: ImportError: no torch\)"):
        stages.check_arms(run, [RUNG, OTHER], ["fp16"], [64], 0)
    assert len(jobs) <= stages.CHECKERS
    assert run.checks() == []
    _passed(run, RUNG)
    with pytest.raises(EnvironmentInvalidError, match="no torch"):
        stages.time_cells(run, LADDER, [RUNG], {_cell(128): "warm"}, PRESET, 0)
    assert run.timings() == []


def test_a_cell_whose_inputs_do_not_fit_costs_that_cell(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]]
) -> None:
    """Every arm of it fails with the reason; the next child has nothing to run there."""

    def out_of_memory(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
        assert isinstance(job, worker.TimingJob)
        at = None
        for number, item in enumerate(job.items):
            at = worker.At(item=number, arm="inputs")
            if item.cell == _cell(256) and len(item.excluded) < len(item.arms):
                return worker.Outcome(end="crash", at=at, detail="OutOfMemoryError")
            say(worker.TimingDone(record=_times(item)))
        return worker.Outcome(end="finished", at=at, detail="")

    run = RunDir(tmp_path)
    _passed(run, RUNG, OTHER)
    jobs = child(out_of_memory)
    stages.time_cells(run, LADDER, [RUNG, OTHER], dict.fromkeys(map(_cell, (128, 256, 512)), "warm"), PRESET, 0)
    assert len(jobs) == 2
    found = {r.cell: {a.status for a in r.arms} for r in run.timings()}
    assert found == {_cell(128): {"timed"}, _cell(256): {"failed"}, _cell(512): {"timed"}}


def test_a_child_that_ends_with_nothing_left_to_blame_ends_the_command(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]]
) -> None:
    run = RunDir(tmp_path)
    _passed(run, RUNG)
    child(lambda *_: worker.Outcome(end="crash", at=worker.At(item=0, arm="inputs"), detail="Lost"))
    with pytest.raises(EnvironmentInvalidError, match="crash: Lost"):
        stages.time_cells(run, LADDER, [RUNG], {_cell(128): "warm"}, PRESET, 0)


def _passed(run: RunDir, *specs: ArmSpec) -> None:
    case = stages.cases(["fp16"], [64])[0]
    for spec in specs:
        run.append("check", _check(worker.CheckItem(arm=spec, case=case)))


def _times(item: worker.TimingItem) -> CellTiming:
    return CellTiming(
        cell=item.cell,
        l2=item.l2,
        seed=0,
        input_sets=1,
        warmup_s=0.5,
        telemetry=(),
        arms=tuple(
            ArmTiming(arm=s.name, kind=s.kind, status="failed", reason=item.excluded[s.name][1], sha256=s.sha256)
            if s.name in item.excluded
            else ArmTiming(
                arm=s.name, kind=s.kind, status="timed", sha256=s.sha256, blocks=(0,), ns=((2000.0, 1000.0),)
            )
            for s in item.arms
        ),
    )


def _times_everything(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
    assert isinstance(job, worker.TimingJob)
    for item in job.items:
        say(worker.TimingDone(record=_times(item)))
    return FINISHED


def test_nothing_unchecked_is_timed(tmp_path: Path, child: Callable[[Child], list[worker.Job]]) -> None:
    run = RunDir(tmp_path)
    _passed(run, RUNG, PEER)
    jobs = child(_times_everything)
    stages.time_cells(run, LADDER, [RUNG, OTHER, PEER], {_cell(64): "warm"}, PRESET, 0)
    assert isinstance(jobs[0], worker.TimingJob)
    assert jobs[0].items[0].excluded == {OTHER.name: ("failed", "not checked")}
    assert [a.arm for a in run.timings()[0].arms][-1] == PEER.name + CONTROL


def test_a_failed_check_of_the_same_type_and_head_dim_refuses() -> None:
    case = stages.cases(["fp16"], [64])[0]
    records = [_check(worker.CheckItem(arm=RUNG, case=case), "fail")]
    cell = _cell(64)
    reason = f"1 of 1 checks failed, first {case.id}: because"
    assert check.refusal(records, RUNG.name, "aa", cell) == ("failed", reason)
    assert check.refusal(records, RUNG.name, "cc", cell) == ("failed", "not checked")
    other = msgspec.structs.replace(cell, dtype="bf16")
    assert check.refusal(records, RUNG.name, "aa", other) == ("failed", "not checked")
    refused = [_check(worker.CheckItem(arm=RUNG, case=case), "unsupported")]
    assert check.refusal(refused, RUNG.name, "aa", cell) == ("unsupported", "because")


def test_timed_cells_are_not_redone_and_new_binaries_are(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]]
) -> None:
    run = RunDir(tmp_path)
    _passed(run, RUNG, PEER)
    jobs = child(_times_everything)
    cells = {_cell(128): "warm", _cell(64): "warm"}
    stages.time_cells(run, LADDER, [RUNG, PEER], cells, PRESET, 0)  # type: ignore[arg-type]
    stages.time_cells(run, LADDER, [RUNG, PEER], {**cells, _cell(32): "warm"}, PRESET, 0)  # type: ignore[dict-item]
    assert [[item.cell.shape.seq_q for item in job.items] for job in jobs] == [[64, 128], [32]]  # type: ignore[union-attr]
    rebuilt = ArmSpec(name=RUNG.name, kind="rung", library="x.so", sha256="cc")
    stages.time_cells(run, LADDER, [rebuilt, PEER], {_cell(64): "warm"}, PRESET, 0)
    assert len(jobs) == 3


def test_a_crash_while_timing_costs_one_arm_of_one_cell(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]]
) -> None:
    run = RunDir(tmp_path)
    _passed(run, RUNG, OTHER, PEER)

    def crashes(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
        assert isinstance(job, worker.TimingJob)
        for number, item in enumerate(job.items):
            if item.cell.shape.seq_q == 64 and RUNG.name not in item.excluded:
                at = worker.At(item=number, arm=RUNG.name)
                return worker.Outcome(end="crash", at=at, detail="killed by SIGABRT")
            say(worker.TimingDone(record=_times(item)))
        return FINISHED

    child(crashes)
    cells = {_cell(32): "warm", _cell(64): "warm", _cell(128): "warm"}
    stages.time_cells(run, LADDER, [RUNG, OTHER, PEER], cells, PRESET, 0)  # type: ignore[arg-type]
    states = {r.cell.shape.seq_q: {a.arm: a.status for a in r.arms} for r in run.timings()}
    assert states[64][RUNG.name] == "failed"
    assert [states[s][RUNG.name] for s in (32, 128)] == ["timed", "timed"]
    assert all(state[OTHER.name] == "timed" for state in states.values())


def test_rates_are_the_least_seen(tmp_path: Path, child: Callable[[Child], list[worker.Job]]) -> None:
    run = RunDir(tmp_path)
    _passed(run, RUNG, PEER)
    child(_times_everything)
    stages.time_cells(run, LADDER, [RUNG, PEER], {_cell(64): "warm", _cell(128): "warm"}, PRESET, 0)
    assert stages.known_rates(run)["r05_swizzle/64"] == pytest.approx(1e-6 / (4 * 64 * 128 * 128))


def _sampled(item: worker.ValueItem) -> ValueTiming:
    return ValueTiming(arm=item.arm.name, sha256=item.arm.sha256, cell=item.cell, values=item.values, seed=0)


def _samples_everything(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
    assert isinstance(job, worker.ValueJob)
    for item in job.items:
        say(worker.ValueDone(record=_sampled(item)))
    return FINISHED


def test_every_kind_of_values_is_timed_once_a_binary_and_only_where_the_checks_allow_it(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]]
) -> None:
    run = RunDir(tmp_path)
    _passed(run, RUNG)
    run.append("check", _check(worker.CheckItem(arm=OTHER, case=stages.cases(["fp16"], [64])[0]), "fail"))
    jobs = child(_samples_everything)
    for _ in range(2):
        stages.measure_values(run, [RUNG, OTHER], [_cell(64), _cell(128)], PRESET, 0)
    assert len(jobs) == 1
    found = [(r.arm, r.cell.shape.seq_q, r.values) for r in run.values()]
    assert found == [(RUNG.name, seq, kind) for seq in (64, 128) for kind in ODD_VALUES]
    rebuilt = msgspec.structs.replace(RUNG, sha256="cc")
    _passed(run, rebuilt)
    stages.measure_values(run, [rebuilt], [_cell(64)], PRESET, 0)
    assert [item.arm.sha256 for item in jobs[1].items] == ["cc"] * len(ODD_VALUES)  # type: ignore[union-attr]


def test_a_crash_on_a_kind_of_values_costs_that_kind(
    tmp_path: Path, child: Callable[[Child], list[worker.Job]]
) -> None:
    def crashes(job: worker.Job, say: Callable[[worker.Message], None]) -> worker.Outcome:
        assert isinstance(job, worker.ValueJob)
        for number, item in enumerate(job.items):
            if item.values == "huge":
                return worker.Outcome(
                    end="timeout", at=worker.At(item=number, arm=RUNG.name), detail="silent for 120 s"
                )
            say(worker.ValueDone(record=_sampled(item)))
        return FINISHED

    run = RunDir(tmp_path)
    _passed(run, RUNG)
    jobs = child(crashes)
    stages.measure_values(run, [RUNG], [_cell(64)], PRESET, 0)
    reasons = {r.values: r.reason for r in run.values()}
    assert set(reasons) == set(ODD_VALUES)
    assert reasons.pop("huge") == "failed: timeout while it ran: silent for 120 s"
    assert set(reasons.values()) == {None}
    assert len(jobs) == 2
    child(lambda *_: worker.Outcome(end="crash", at=None, detail="ImportError: no torch"))
    with pytest.raises(EnvironmentInvalidError, match="crash: ImportError: no torch"):
        stages.measure_values(run, [RUNG], [_cell(128)], PRESET, 0)


def test_cases_are_dealt_whole_and_their_masks_apart() -> None:
    items = [worker.CheckItem(arm=arm, case=case) for case in stages.cases(["fp16"], [64]) for arm in (RUNG, OTHER)]
    shares = stages._dealt(items, 2)
    assert sorted(len(share) for share in shares) in ([len(items) // 2] * 2, [len(items) // 2 - 1, len(items) // 2 + 1])
    assert not {item.case.id for item in shares[0]} & {item.case.id for item in shares[1]}
    for share in shares:
        masks = [item.case.cell.mask for item in share]
        assert abs(masks.count("causal") - masks.count("full")) <= len(masks) / 4


def test_a_session_measures_the_peers_that_its_run_holds_too() -> None:
    """A cell is timed as a whole: what is left out is lost, the baseline and its control among it."""
    timing = CellTiming(
        cell=_cell(128),
        l2="warm",
        seed=0,
        input_sets=1,
        warmup_s=0.5,
        telemetry=(),
        arms=tuple(
            ArmTiming(arm=name, kind=kind, status="timed")  # type: ignore[arg-type]
            for name, kind in (("r05_swizzle", "rung"), ("sdpa_default", "peer"), (f"sdpa_default{CONTROL}", "peer"))
        ),
    )
    assert ablation.measured_peers(("triton",), [timing]) == ("sdpa_default", "triton")
    assert ablation.measured_peers(("triton",), []) == ("triton",)
