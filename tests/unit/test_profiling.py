"""The profiling stage around a stand-in for ncu: what is recorded, what is not redone, what stops it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from flashladder import ablation, machine, ncu, paths, profiling, stages, tables
from flashladder.arms import ArmSpec
from flashladder.bottleneck import DURATION, GRID
from flashladder.diagnose import Results, diagnose
from flashladder.errors import EnvironmentInvalidError, Exit, FlashladderError
from flashladder.ladder import Metrics, load_ladder, load_presets
from flashladder.model import Cell, CheckRecord, KernelProfile, Kind, L2Mode, Metric, MetricSet, NcuRecord
from flashladder.rundir import RunDir
from tests.unit import synthetic as made

METRICS = Metrics(light=("gpu__time_duration.sum", GRID, "no_such.metric"))
STUB = """#!{python}
import json, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    print("Version 2025.3.1.0 (build 1)")
elif any(a.startswith("--import=") for a in arguments):
    print(open({csv!r}).read())
else:
    arm = json.loads(sys.stdin.read())["arm"]["name"]
    open({calls!r}, "a").write(arm + "\\n")
    report = next(a for a in arguments if a.startswith("--export=")).split("=", 1)[1]
    if "denied" in arm:
        print("==ERROR== ERR_NVGPUCTRPERM")
    elif "empty" in arm:
        print("==WARNING== No kernels were profiled.")
    elif "mismatch" in arm:
        print("==ERROR== Cuda driver is not compatible with Nsight Compute")
    elif "crash" in arm:
        sys.exit("Segmentation fault")
    else:
        open(report, "w").write("report")
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in is installed; the file of the arms that it was called for."""
    called = tmp_path / "calls"
    called.write_text("")
    tool = tmp_path / "ncu"
    csv = paths.ROOT / "tests" / "fixtures" / "ncu-raw.csv"
    tool.write_text(STUB.format(python=sys.executable, csv=str(csv), calls=str(called)))
    tool.chmod(0o755)
    monkeypatch.setattr(ncu, "find_ncu", lambda: tool)
    return called


def _spec(name: str, sha256: str = "aa") -> ArmSpec:
    return ArmSpec(name=name, kind="rung", library="x.so", sha256=sha256)


def _run(path: Path, *specs: ArmSpec) -> RunDir:
    run = RunDir(path / "run")
    for spec in specs:
        passed: CheckRecord = msgspec.structs.replace(made.check(spec.name), sha256=spec.sha256)
        run.append("check", passed)
    return run


def _profile(
    run: RunDir, *specs: ArmSpec, rates: dict[str, float] | None = None, metric_set: MetricSet = "light"
) -> list[NcuRecord]:
    return profiling.profile_cells(
        run,
        [(spec, made.REFERENCE) for spec in specs],
        METRICS,
        "sm_90a",
        rates or {},
        metric_set=metric_set,
        limit_s=30,
    )


def test_a_profile_is_recorded_with_units_and_what_is_missing(tmp_path: Path, calls: Path) -> None:
    spec = _spec("r04_vector_io")
    (record,) = _profile(_run(tmp_path, spec), spec)
    assert (record.cause, record.ncu, record.set) == (None, "2025.3.1.0", "light")
    assert "no_such.metric" in record.missing
    assert record.kernels[0].metrics["gpu__time_duration.sum"].unit == "s"
    assert list((tmp_path / "run" / "ncu").glob("r04_vector_io-*-light.ncu-rep"))


def test_a_failing_arm_does_not_stop_the_rest_and_is_tried_again(tmp_path: Path, calls: Path) -> None:
    specs = [_spec(name) for name in ("r01_empty", "r02_crash", "r03_good")]
    run = _run(tmp_path, *specs)
    causes = {r.arm: r.cause for r in _profile(run, *specs)}
    assert causes == {"r01_empty": "no kernel", "r02_crash": "error", "r03_good": None}
    _profile(run, *specs)
    assert calls.read_text().split() == [s.name for s in specs] + ["r01_empty", "r02_crash"]
    rebuilt = _spec("r03_good", "bb")
    run.append("check", msgspec.structs.replace(made.check(rebuilt.name), sha256="bb"))
    _profile(run, rebuilt)
    assert calls.read_text().split()[5:] == ["r03_good"]


def test_a_driver_that_does_not_fit_is_told_with_both_versions_and_the_others_go_on(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "driver", lambda: "570.10")
    specs = [_spec("r01_mismatch"), _spec("r02_good")]
    first, second = _profile(_run(tmp_path, *specs), *specs)
    assert first.cause == "version mismatch"
    assert "(ncu 2025.3.1.0, driver 570.10)" in (first.reason or "")
    assert second.cause is None


def test_a_failed_profile_has_an_exit_code_of_its_own_and_one_that_was_not_tried_has_none(
    tmp_path: Path, calls: Path
) -> None:
    specs = [_spec("r01_unchecked"), _spec("r02_empty"), _spec("r03_good")]
    records = _profile(_run(tmp_path, *specs[1:]), *specs)
    with pytest.raises(FlashladderError, match="1 profiles failed; the first: r02_empty in ") as caught:
        profiling.raise_on_failures(records)
    assert caught.value.exit_code is Exit.PROFILER_FAILED
    profiling.raise_on_failures([r for r in records if r.arm != "r02_empty"])


def test_a_full_profile_replaces_a_light_one_and_serves_for_it(tmp_path: Path, calls: Path) -> None:
    spec = _spec("r03_good")
    run = _run(tmp_path, spec)
    _profile(run, spec)
    assert [r.set for r in _profile(run, spec, metric_set="full")] == ["full"]
    assert [r.set for r in _profile(run, spec)] == ["full"]
    assert len(calls.read_text().split()) == 2


TRACE = [
    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 3},
    {
        "cat": "kernel",
        "name": "r01_denied_fp16_d64(flashladder::Params)",
        "dur": 9.5,
        "args": {"grid": [16, 8, 2], "block": [128, 1, 1], "registers per thread": 64, "shared memory": 16768},
    },
    {"cat": "kernel", "name": "bare", "dur": 1},
]


def test_denied_counters_leave_times_and_end_with_their_own_exit_code(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child without ncu is a stand-in too: it prints what CUPTI told."""
    command = profiling._Profiler._command
    printed = msgspec.json.encode(profiling.kernels_of(TRACE)).decode()

    def stand_in(self: profiling._Profiler, empty: NcuRecord) -> Sequence[str]:
        prints = (sys.executable, "-c", "import sys; sys.stdin.read(); print(f'a warning\\n{sys.argv[1]}')", printed)
        return prints if empty.set == "times" else command(self, empty)

    monkeypatch.setattr(profiling._Profiler, "_command", stand_in)
    specs = [_spec("r01_denied"), _spec("r02_good")]
    directory = _run(tmp_path, *specs)
    with pytest.raises(FlashladderError, match="NVreg_RestrictProfilingToAdminUsers=0") as caught:
        _profile(directory, *specs)
    assert caught.value.exit_code is Exit.PROFILER_DENIED
    assert [(r.arm, r.set, r.cause, r.ncu) for r in directory.profiles()] == [
        (spec.name, "times", None, None) for spec in specs
    ]
    assert calls.read_text().split() == ["r01_denied"]
    results = Results([], made.LADDER, directory.profiles())
    assert results.counter(made.REFERENCE, "r01_denied", GRID) == 256
    assert results.counter(made.REFERENCE, "r01_denied", "smsp__inst_executed.sum") is None


def test_a_trace_gives_durations_and_launches_and_lacks_what_it_lacks() -> None:
    first, second = profiling.kernels_of(TRACE)
    assert first.name == "r01_denied_fp16_d64"
    assert {name: metric.value for name, metric in first.metrics.items()} == {
        DURATION: pytest.approx(9.5e-6),
        GRID: 256,
        "launch__block_size": 128,
        "launch__registers_per_thread": 64,
        "launch__shared_mem_per_block": 16768,
    }
    assert list(second.metrics) == [DURATION]


def test_what_did_not_pass_the_gate_or_would_take_too_long_is_not_started(tmp_path: Path, calls: Path) -> None:
    unchecked, slow = _spec("r01_unchecked"), _spec("r02_slow")
    run = _run(tmp_path, slow)
    records = _profile(run, unchecked, slow, rates={"r02_slow/64": 1e-8})
    assert [(r.arm, r.cause) for r in records] == [("r01_unchecked", "not checked"), ("r02_slow", "too slow")]
    assert calls.read_text() == ""


def test_without_ncu_there_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(EnvironmentInvalidError, match="no Nsight Compute"):
        _profile(_run(tmp_path), _spec("r03_good"))


def test_ncu_is_found_in_the_install_roots_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2024.3.2", "2025.3.1", "2025.10.0"):
        folder = tmp_path / "opt" / version
        folder.mkdir(parents=True)
        (folder / "ncu").write_text("")
    monkeypatch.setattr(ncu, "find_cuda_tool", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "ROOTS", (f"{tmp_path}/opt/*",))
    ncu.find_ncu.cache_clear()
    assert ncu.find_ncu() == tmp_path / "opt" / "2025.10.0" / "ncu"
    ncu.find_ncu.cache_clear()


def test_counters_confirm_or_refute_predictions_and_the_tables_never_say_zero(tmp_path: Path, calls: Path) -> None:
    """The stand-in gives every rung the counters of r04_vector_io's kernel, so every ratio is 1."""
    run = made.write_run(tmp_path / "run", [made.timing(made.REFERENCE)])
    metric = "smsp__inst_executed.sum"
    rungs = list(made.RUNGS)
    prediction = msgspec.structs.replace(rungs[5].predictions[1], metric=metric, ratio=(0.0, 1.0))
    rungs[5] = msgspec.structs.replace(rungs[5], predictions=(prediction,))
    ladder = type(made.LADDER)(rungs=tuple(rungs), reference=made.REFERENCE, baseline=made.BASELINE)
    before = diagnose(run, ladder)
    assert [r.outcome for r in before if getattr(r, "metric", "") == metric] == ["not measured"]  # type: ignore[union-attr]
    specs = [ArmSpec(name=r.id, kind="rung", library="x.so", sha256=f"sha-{r.id}") for r in (rungs[3], rungs[5])]
    metrics = Metrics(light=("gpu__time_duration.sum", metric))
    profiling.profile_cells(run, [(spec, made.REFERENCE) for spec in specs], metrics, "sm_90a", {})
    results = Results(diagnose(run, ladder), ladder, run.profiles())
    (outcome,) = (p for p in results.predictions if p.metric == metric)
    assert (outcome.outcome, outcome.measured) == ("confirmed", 1.0)
    row = next(row for row in tables.predictions(results).rows if row[1] == metric)
    assert row[3:5] == ("1.00", "confirmed")
    limits = tables.bottlenecks(results, made.REFERENCE)
    assert {row[0] for row in limits.rows} == {specs[0].name, specs[1].name}
    assert any(row[1] == "inconclusive" and "dram__bytes.sum" in row[6] for row in limits.rows)
    moved = tables.counters_moved(results, rungs[5], made.REFERENCE)
    assert moved.rows == ()


def _counted(run: RunDir, arm: str, sha256: str | None) -> None:
    kernel = KernelProfile(name=arm, metrics={DURATION: Metric(value=1e-6, unit="s")})
    kind: Kind = "peer" if sha256 is None else "rung"
    run.append(
        "ncu",
        NcuRecord(arm=arm, kind=kind, sha256=sha256, cell=made.REFERENCE, set="light", ncu="1", kernels=(kernel,)),
    )


def test_profiles_of_the_same_machine_code_are_taken_over_and_no_others(tmp_path: Path) -> None:
    builds = [msgspec.structs.replace(made.build(r), cubins={"sm_90a": r.id}) for r in made.RUNGS]
    same, other_code, own, failed = (b.rung for b in builds[:4])
    there = [
        msgspec.structs.replace(b, sha256="old " + b.rung, cubins={"sm_90a": "x"} if b.rung == other_code else b.cubins)
        for b in builds
    ]
    run, other = (made.write_run(tmp_path / n, [], builds=b) for n, b in (("new", builds), ("old", there)))
    for arm in (same, other_code, own):
        _counted(other, arm, "old " + arm)
    _counted(other, "sdpa_flash", None)
    other.append("ncu", msgspec.structs.replace(other.profiles()[0], arm=failed, cause="timeout", kernels=()))
    _counted(run, own, made.sha_of(own))

    taken = profiling.profiles_of_same_code(run, other)
    assert [(p.arm, p.taken_from) for p in taken] == [(same, "old"), ("sdpa_flash", "old")]
    assert [p.sha256 for p in taken] == [builds[0].sha256, None]


def test_profiles_of_another_gpu_or_of_other_peers_are_not_taken_over(tmp_path: Path) -> None:
    newer = msgspec.structs.replace(made.MACHINE, torch="9.9")
    run = made.write_run(tmp_path / "new", [])
    other = made.write_run(tmp_path / "old", [], info=msgspec.structs.replace(made.INFO, machine=newer))
    _counted(other, "sdpa_flash", None)
    assert profiling.profiles_of_same_code(run, other) == []
    elsewhere = msgspec.structs.replace(made.MACHINE, gpu="NVIDIA L4")
    other.write_info(msgspec.structs.replace(made.INFO, machine=elsewhere))
    with pytest.raises(FlashladderError, match=r"counted on NVIDIA L4, expected .*; name a run of the same GPU"):
        profiling.profiles_of_same_code(run, other)


def test_the_stage_is_told_how_fast_each_arm_was(tmp_path: Path) -> None:
    run = made.write_run(tmp_path / "run", [made.timing(made.REFERENCE)])
    assert stages.known_rates(run)["r05_swizzle/64"] > 0
    assert load_ladder().reference.shape.head_dim == 64


def test_named_arms_are_profiled_alone_though_the_run_holds_more(tmp_path: Path) -> None:
    ladder, preset = load_ladder(), load_presets()["quick"]
    read_at = ladder.cell_of(ladder.variants[0])
    cells: dict[Cell, L2Mode] = {read_at: "warm", msgspec.structs.replace(read_at, causal=True): "warm"}
    specs = [
        ArmSpec(name=ladder.rungs[0].id, kind="rung"),
        ArmSpec(name="sdpa_flash", kind="peer"),
        ArmSpec(name=ladder.variants[0].id, kind="variant"),
    ]

    def items(*named: str) -> list[str]:
        session = ablation.Session(RunDir(tmp_path), ladder, (), cells, preset, 0, [], frozenset(named), specs=specs)
        return [spec.name for spec, _ in session.profile_items()]

    rung, peer, variant = (spec.name for spec in specs)
    assert items() == [rung, peer, rung, peer, variant]
    assert items(rung) == [rung, rung]
    assert items(peer, variant) == [peer, peer, variant, variant]


def test_a_rung_is_profiled_where_it_is_read_with_its_parent_and_no_one_else(tmp_path: Path) -> None:
    ladder, preset = load_ladder(), load_presets()["full"]
    child, variant = ladder["r33_multicast"], ladder["v28_sum_column"]
    parent, other = ladder[child.parent or ""], ladder["r05_swizzle"]
    rungs = (other, parent, child, variant)
    shared: dict[Cell, L2Mode] = {ladder.reference: "warm"}
    read = ablation.read_cells(ladder, rungs, ablation.Selection())
    assert set(read) == {ladder.cell_of(rung) for rung in rungs}
    specs = [ArmSpec(name=r.id, kind=r.kind) for r in rungs] + [ArmSpec(name="fa3", kind="peer")]

    def items(*named: str) -> set[tuple[str, str]]:
        cells = {**read, **shared}
        session = ablation.Session(
            RunDir(tmp_path), ladder, (), cells, preset, 0, [], frozenset(named), frozenset(shared), specs=specs
        )
        return {(spec.name, cell.id) for spec, cell in session.profile_items()}

    everywhere = {(name, ladder.reference.id) for name in (other.id, parent.id, child.id, "fa3")}
    where = ladder.cell_of(child).id
    own = {(child.id, where), (parent.id, where), (parent.id, ladder.cell_of(parent).id)}
    own.add((variant.id, ladder.cell_of(variant).id))
    assert items() == everywhere | own
    assert items(child.id) == {(child.id, ladder.reference.id), (child.id, where)}


def test_the_cells_that_rungs_are_read_at_pass_the_filters() -> None:
    ladder = load_ladder()
    everything = ablation.read_cells(ladder, [*ladder.rungs, *ladder.variants], ablation.Selection())
    causal = ablation.read_cells(ladder, ladder.rungs, ablation.Selection(masks=("causal",)))
    assert causal == {cell: l2 for cell, l2 in everything.items() if cell.causal}
    assert {
        cell.dtype for cell in ablation.read_cells(ladder, ladder.variants, ablation.Selection(dtypes=("bf16",)))
    } == {"bf16"}
