"""A run that is killed at any moment resumes and ends with the same records.

A kill leaves the files of earlier stages whole and the one in progress cut off at some byte. Every such state of the
last record, and every boundary between records, is resumed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashladder import build as building
from flashladder import profiling, stages, worker
from flashladder.arms import ArmSpec
from flashladder.emulator.device import Options
from flashladder.ladder import Metrics, load_ladder, load_presets
from flashladder.model import (
    Agreement,
    ArmTiming,
    BuildRecord,
    CellTiming,
    CheckRecord,
    KernelProfile,
    Metric,
    NcuRecord,
    Roof,
    ValueTiming,
)
from flashladder.ninja import silent
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

LADDER = load_ladder()
RUNGS = LADDER.rungs[4:6]
SPECS = [
    *(stages.library_spec(rung, Path(f"{rung.id}.so"), f"sha-{rung.id}") for rung in RUNGS),
    ArmSpec(name=LADDER.baseline, kind="peer"),
]
CELLS = {made.REFERENCE: "warm", made.HEADLINE[0]: "cold"}
CASES = [case for case in stages.cases(["fp16"], [64]) if case.family == "suite"][:3]


def _build(rung_id: str) -> tuple[Any, BuildRecord]:
    record = BuildRecord(
        rung=rung_id, status="built", sha256=f"sha-{rung_id}", compiler="nvcc 13", flags=(), archs=("sm_90a",)
    )
    return building.Target(rung_id, Path("x.cu"), ("sm_90a",), "0"), record


def _answers(job: worker.Job) -> Iterator[worker.Message]:
    """What a child says: the same for the same item, whenever it is asked."""
    if isinstance(job, worker.CheckJob):
        for item in job.items:
            arm, case = item.arm, item.case
            yield worker.CheckDone(
                record=CheckRecord(arm=arm.name, sha256=arm.sha256, case=case.id, cell=case.cell, status="pass", seed=0)
            )
    elif isinstance(job, worker.RoofJob):
        for dtype in job.dtypes:
            yield worker.RoofDone(record=Roof(dtype=dtype, size=8, gpu_digest=None, ns=(1.0,), sm_clock_mhz=(1,)))
    elif isinstance(job, worker.ValueJob):
        for odd in job.items:
            yield worker.ValueDone(
                record=ValueTiming(arm=odd.arm.name, sha256=odd.arm.sha256, cell=odd.cell, values=odd.values, seed=0)
            )
    elif isinstance(job, worker.TimingJob):
        for timed in job.items:
            arms = tuple(
                ArmTiming(arm=s.name, kind=s.kind, status="timed", sha256=s.sha256, blocks=(0,), ns=((2e9, 1e9),))
                for s in timed.arms
            )
            yield worker.TimingDone(
                record=CellTiming(
                    cell=timed.cell, l2=timed.l2, seed=0, input_sets=1, warmup_s=0.5, telemetry=(), arms=arms
                )
            )
    elif isinstance(job, worker.AgreementJob):
        for pair in job.items:
            yield worker.AgreementDone(
                record=Agreement(
                    arm=pair.gpu.name,
                    sha256=pair.gpu.sha256,
                    case=pair.case.id,
                    cell=pair.case.cell,
                    seed=0,
                    exact=True,
                    status="same bits",
                )
            )


def _supervise(job: worker.Job, say: Callable[[worker.Message], None], limit_s: float = 120.0) -> worker.Outcome:
    for message in _answers(job):
        say(message)
    return worker.Outcome(end="finished", at=None, detail="")


def _profiles(_: object, items: Sequence[tuple[ArmSpec, NcuRecord]]) -> Iterator[NcuRecord]:
    kernel = KernelProfile(name="k", metrics={"x": Metric(value=1.0, unit="s")})
    for _, empty in items:
        yield msgspec.structs.replace(empty, kernels=(kernel,))


def _agree(run: RunDir) -> None:
    items = tuple(
        worker.AgreementItem(gpu=spec, emulated=spec, case=case, arithmetic="fp32")
        for case in CASES
        for spec in SPECS[:2]
    )
    stages.compare_with_emulator(run, items, worker.AgreementJob(items=(), seed=0, emulation=Options()))


def _profile(run: RunDir) -> None:
    items = [(spec, cell) for cell in CELLS for spec in SPECS]
    # The estimate of the slowest is above the limit: what is left out is a record like any other.
    rates = {f"{RUNGS[0].id}/64": 1.0}
    profiling.profile_cells(run, items, Metrics(light=("x",)), "sm_90a", rates, metric_set="times")


STAGES: dict[str, Callable[[RunDir], object]] = {
    "build": lambda run: stages.build_rungs(run, RUNGS, ("sm_90a",), silent),
    "check": lambda run: stages.check_arms(run, SPECS, ["fp16"], [64], 0),
    "roof": lambda run: stages.measure_roofs(run, ("fp16", "bf16"), load_presets()["quick"], 0),
    "timing": lambda run: stages.time_cells(run, LADDER, SPECS, CELLS, load_presets()["quick"], 0),  # type: ignore[arg-type]
    "values": lambda run: stages.measure_values(run, SPECS[:2], list(CELLS), load_presets()["quick"], 0),
    "agreement": _agree,
    "ncu": _profile,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A run that nobody interrupted, while the children are scripted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "supervise", _supervise)
        patch.setattr(stages, "cases", lambda *_: CASES)
        patch.setattr(stages, "CHECKERS", 1)
        patch.setattr(building, "build", lambda rungs, *_: [_build(rung.id) for rung in rungs])
        patch.setattr(profiling._Profiler, "profiles", _profiles)
        run = RunDir(tmp_path_factory.mktemp("whole"))
        for stage in STAGES.values():
            stage(run)
        yield run


def _killed_at(data: bytes) -> list[int]:
    """Lengths of the file that a kill can leave: between any two records, and at every byte of the last."""
    ends = [n + 1 for n, byte in enumerate(data) if byte == ord("\n")]
    begin = ends[-2]
    return [0, *ends[:-2], *range(begin, len(data) + 1)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_killed_at_any_byte_ends_with_the_same_records(
    whole: RunDir, tmp_path: Path, stage: str
) -> None:
    earlier = list(STAGES)[: list(STAGES).index(stage)]
    file = whole.path / f"{stage}.jsonl"
    data = file.read_bytes()
    assert data.count(b"\n") >= 2
    for name in earlier:
        (tmp_path / f"{name}.jsonl").write_bytes((whole.path / f"{name}.jsonl").read_bytes())
    resumed = tmp_path / file.name
    for length in _killed_at(data):
        resumed.write_bytes(data[:length])
        STAGES[stage](RunDir(tmp_path))
        assert sorted(resumed.read_bytes().splitlines()) == sorted(data.splitlines()), f"killed at byte {length}"


def test_a_run_that_is_whole_is_not_touched_again(whole: RunDir, tmp_path: Path) -> None:
    for name in STAGES:
        (tmp_path / f"{name}.jsonl").write_bytes((whole.path / f"{name}.jsonl").read_bytes())
    run = RunDir(tmp_path)
    run.write_info(made.INFO)
    run.seal()
    for stage in STAGES.values():
        stage(run)
    assert run.sums is not None
    assert {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in STAGES} == {
        name: (whole.path / f"{name}.jsonl").read_bytes() for name in STAGES
    }


@pytest.mark.parametrize("name", ["run.json.tmp", "sums.json.tmp", "diagnosis.jsonl.tmp"])
def test_what_is_written_whole_is_old_or_new_whenever_it_is_killed(tmp_path: Path, name: str) -> None:
    """A kill leaves the temporary file cut off beside the old one, which still stands."""
    run = made.write_run(tmp_path, [])
    run.seal()
    sums, info = run.sums, run.info
    (tmp_path / name).write_bytes(b'{"id": "20')
    assert (run.sums, run.info) == (sums, info)
    run.write_info(msgspec.structs.replace(info, preset="full"))
    run.seal()
    assert (run.info.preset, run.sums == sums) == ("full", False)
