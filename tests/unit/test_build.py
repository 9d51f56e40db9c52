"""The build: what makes a library stale, the one-change rule, SASS evidence, the resource lock, failures."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from flashladder import ablation, blocking, build, machine, paths, toolchain, tune, verify
from flashladder.arms import ArmSpec
from flashladder.errors import BuildError, DriftError, FlashladderError
from flashladder.ladder import gated_name, load_ladder, load_tuning
from flashladder.model import Blocking, BuildRecord, KernelResources, Rung
from flashladder.rundir import RunDir

RUNGS = load_ladder().rungs


@pytest.fixture(scope="session")
def built() -> list[BuildRecord]:
    """Every rung for every architecture; libraries of an earlier session are reused when nothing changed."""
    return [record for _, record in build.build(RUNGS, build.ALL_ARCHS)]


@dataclass
class Copy:
    """A copy of the kernel tree that a test may change."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "kernel" / "rungs" / "r05_swizzle.cu"


def _copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    shutil.copytree(paths.KERNEL, folder / "kernel")
    for name, value in {
        "ROOT": folder,
        "KERNEL": folder / "kernel",
        "BUILD": folder / "build",
    }.items():
        monkeypatch.setattr(paths, name, value)
    monkeypatch.setattr(build, "INCLUDE", folder / "kernel" / "include")
    monkeypatch.setattr(build, "BINDING", folder / "kernel" / "binding" / "binding.cc")
    return Copy(folder)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    return _copy(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BuildRecord]:
    """Two rungs built in another folder, the first of them with an error."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tree = _copy(tmp_path_factory.mktemp("elsewhere"), monkeypatch)
        tree.source.write_text('#include "launch.cuh"\nint x = ;\n')
        rungs = [r for r in RUNGS if r.id in ("r05_swizzle", "r15_wgmma")]
        return {record.rung: record for _, record in build.build(rungs, build.ALL_ARCHS)}


def test_every_rung_builds_for_every_architecture(built: list[BuildRecord]) -> None:
    assert [r.rung for r in built] == [r.id for r in RUNGS]
    for record in built:
        assert record.status == "built", record.reason
        archs = [arch for arch in build.ALL_ARCHS if load_ladder()[record.rung].runs_on(arch)]
        assert list(record.archs) == archs
        sizes = 1 if record.config["splits"] else 6 if record.config["loads"] else 4
        assert len(record.kernels) == 4 * sizes * len(archs)
        assert all(k.sass for k in record.kernels)


def test_one_change_a_rung_and_its_evidence_in_the_machine_code(built: list[BuildRecord]) -> None:
    assert build.static_faults(RUNGS, built) == []
    assert all(len(r.changes) == 1 or r.change.startswith("retune: ") for r in RUNGS if r.parent)


RECORDED_TUNES = sorted(path.parent for path in paths.RESULTS.glob("*/*/plan.jsonl"))


def test_the_plans_of_both_ladders_were_tuned() -> None:
    rungs = {gated_name(RunDir(path).choices()[0].arm) for path in RECORDED_TUNES}
    assert rungs == {"r13_tuned", load_ladder().rungs[-1].id}


@pytest.mark.parametrize("path", RECORDED_TUNES, ids=lambda path: path.name)
def test_the_plan_is_as_recorded_and_near_the_best_of_what_was_timed(built: list[BuildRecord], path: Path) -> None:
    run = RunDir(path)
    choices = run.choices()
    rung = load_ladder()[gated_name(choices[0].arm)]
    archs = [arch for arch in build.ALL_ARCHS if rung.runs_on(arch)]
    library = build.target(rung.id, paths.ROOT / rung.source, archs).library
    spec = ArmSpec(name=rung.id, kind="rung", library=str(library))
    assert ablation.plan_choices(spec, [c.cell for c in choices], run.info.machine.sm_count or 0) == choices
    ratios = [found.ratio for found in tune.regrets(run.timings(), choices)]
    assert len(ratios) >= 20
    assert max(ratios) <= 1.1
    assert fmean(ratios) <= 1.02


def test_a_tuning_can_be_judged_again_without_a_gpu(built: list[BuildRecord], tmp_path: Path) -> None:
    recorded = next(
        RunDir(path) for path in RECORDED_TUNES if gated_name(RunDir(path).choices()[0].arm) == RUNGS[-1].id
    )
    run = RunDir(shutil.copytree(recorded.path, tmp_path / "run"))
    run.replace("plan", ())
    ablation.judge_plan(run, lambda *_: None)
    assert run.choices() == recorded.choices()


def test_hopper_is_divided_as_the_tuning_chose(built: list[BuildRecord]) -> None:
    tuning = load_tuning()
    config = next(b.config for b in built if b.rung == tuning.rung)
    for choice in tuning.choice:
        assert Blocking.of(config, choice.head_dim).name == choice.blocking


RECORDED_BLOCKINGS = sorted(path.parent for path in paths.RESULTS.glob("*/blocking/run.json"))


@pytest.mark.parametrize("path", RECORDED_BLOCKINGS, ids=lambda path: path.parent.name)
def test_the_chosen_division_is_near_the_best_of_what_was_recorded(path: Path) -> None:
    tuning = load_tuning()
    found = blocking.scores(RunDir(path).timings(), [c.name for c in tuning.candidate])
    assert len(found) == len(tuning.choice) == 4
    for choice in tuning.choice:
        times = found[choice.head_dim, choice.mask]
        assert len(times) >= 6
        assert times[choice.blocking] <= 1.03 * min(times.values())


SPILLING = ("r00_naive", "r09_large_tiles", "r10_fold_scale", "r14_tma")
"""A row of O in a thread; 32 rows of O and 64 keys of scores in a warp, with copies through registers or mbarriers."""


def test_nothing_spills_but_what_the_lock_allows(built: list[BuildRecord]) -> None:
    spilling = {k.kernel for r in built for k in r.kernels if k.spill_store_bytes or k.spill_load_bytes}
    most_registers = {f"{rung}_{dtype}_d128" for rung in SPILLING for dtype in ("fp16", "bf16")}
    assert spilling <= most_registers


def test_resources_match_the_lock(built: list[BuildRecord]) -> None:
    said = build.check_lock(built)
    if toolchain.find_nvcc().version == "13.0.88":
        assert said.startswith(f"{sum(len(r.kernels) for r in built)} kernels match")


def test_a_lock_says_nothing_of_an_architecture_that_it_does_not_hold(tree: Copy) -> None:
    build.write_lock([_record(64)], ["k"])
    ampere = msgspec.structs.replace(_record(96).kernels[0], arch="sm_86")
    both = msgspec.structs.replace(_record(64), kernels=(*_record(64).kernels, ampere))
    assert build.check_lock([both]).endswith("match the resource lock of nvcc 1.2.3, which has none for sm_86")


def test_machine_code_has_the_repositorys_sums(built: list[BuildRecord]) -> None:
    version = toolchain.find_nvcc().version
    sums = verify.read_sums(f"nvcc {version}")
    if sums is None:
        assert version != "13.0.88"
        return
    assert {r.rung: r.cubins for r in built} == {r.rung: sums.rungs[r.rung].cubins for r in built}


@pytest.mark.parametrize("file", ["rungs/r05_swizzle.cu", "include/swizzle.h", "include/rung.h", "binding/binding.cc"])
def test_an_edit_anywhere_changes_the_target(tree: Copy, file: str) -> None:
    before = build.target("r05_swizzle", tree.source, ["sm_90a"])
    path = tree.root / "kernel" / file
    path.write_text(path.read_text() + "\n// edited\n")
    assert build.target("r05_swizzle", tree.source, ["sm_90a"]).digest != before.digest


def test_architecture_flags_and_compiler_change_the_target(tree: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*archs: str) -> str:
        return build.target("r05_swizzle", tree.source, archs).digest

    seen = {digest("sm_90a"), digest("sm_80"), digest("sm_80", "sm_90a")}
    monkeypatch.setattr(build, "NVCC_FLAGS", (*build.NVCC_FLAGS, "-lineinfo"))
    seen.add(digest("sm_90a"))
    nvcc = toolchain.find_nvcc()
    monkeypatch.setattr(build, "find_nvcc", lambda: toolchain.Nvcc(nvcc.path, "12.8.93", nvcc.library_dirs))
    seen.add(digest("sm_90a"))
    assert len(seen) == 5


def test_an_unrelated_header_leaves_the_target_alone(tree: Copy) -> None:
    before = build.target("r00_naive", tree.root / "kernel/rungs/r00_naive.cu", ["sm_90a"])
    header = tree.root / "kernel/include/swizzle.h"
    header.write_text(header.read_text() + "\n// edited\n")
    assert build.target("r00_naive", tree.root / "kernel/rungs/r00_naive.cu", ["sm_90a"]).digest == before.digest


def test_a_missing_include_is_one_clear_line(tree: Copy) -> None:
    tree.source.write_text('#include "nowhere.cuh"\n')
    with pytest.raises(BuildError, match=r"nowhere\.cuh does not exist"):
        build.target("r05_swizzle", tree.source, ["sm_90a"])


def test_a_rung_that_does_not_compile_is_a_record_and_the_others_go_on(elsewhere: dict[str, BuildRecord]) -> None:
    assert [r.status for r in elsewhere.values()] == ["failed", "built"]
    reason = elsewhere["r05_swizzle"].reason
    assert reason is not None
    assert "error: expected an expression" in reason


def test_rebuilding_elsewhere_gives_the_same_bytes(elsewhere: dict[str, BuildRecord], built: list[BuildRecord]) -> None:
    (here,) = (record for record in built if record.rung == "r15_wgmma")
    assert elsewhere["r15_wgmma"].sha256 == here.sha256


def test_a_second_change_is_reported(built: list[BuildRecord]) -> None:
    changed = msgspec.structs.replace(built[5], config={**built[5].config, "threads": 256, "tile_m": 64})
    faults = build.static_faults(RUNGS, [*built[:5], changed])
    assert faults == [
        "r05_swizzle: its Config differs from r04_vector_io's in ['swizzle', 'threads', 'tile'], "
        "its declaration says ['swizzle']"
    ]


def _record(registers: int) -> BuildRecord:
    kernel = KernelResources(
        arch="sm_80",
        kernel="k",
        registers=registers,
        spill_store_bytes=0,
        spill_load_bytes=0,
        stack_bytes=0,
        shared_bytes=0,
        sass={"FFMA": 1},
    )
    return BuildRecord(rung="k", status="built", compiler="nvcc 1.2.3", flags=(), archs=("sm_80",), kernels=(kernel,))


def test_lock_drift_names_the_kernel_and_both_values(tree: Copy) -> None:
    build.write_lock([_record(64)], ["k"])
    assert build.check_lock([_record(64)]).startswith("1 kernels match")
    with pytest.raises(DriftError, match=r"k sm_80: registers 64 -> 96"):
        build.check_lock([_record(96)])


def test_a_lock_keeps_other_rungs_as_long_as_they_are_declared(tree: Copy) -> None:
    def renamed(rung: str) -> BuildRecord:
        kernel = msgspec.structs.replace(_record(64).kernels[0], kernel=f"{rung}_fp16_d64")
        return msgspec.structs.replace(_record(64), rung=rung, kernels=(kernel,))

    def written(record: BuildRecord, *declared: str) -> list[str]:
        return [key.split("_fp16")[0] for key in json.loads(build.write_lock([record], declared).read_text())]

    assert written(renamed("r01_a"), "r01_a") == ["r01_a"]
    assert written(renamed("r02_b"), "r01_a", "r02_b") == ["r01_a", "r02_b"]
    assert written(renamed("r03_c"), "r02_b", "r03_c") == ["r02_b", "r03_c"]


def test_a_lock_keeps_what_was_built_for_other_architectures(tree: Copy) -> None:
    def written(registers: int, *archs: str) -> dict[str, int]:
        (kernel,) = _record(registers).kernels
        kernels = tuple(msgspec.structs.replace(kernel, kernel="k_fp16", arch=arch) for arch in archs)
        record = msgspec.structs.replace(_record(registers), archs=archs, kernels=kernels)
        content = json.loads(build.write_lock([record], ["k"]).read_text())
        return {key: value["registers"] for key, value in content.items()}

    assert written(64, "sm_80", "sm_90a") == {"k_fp16 sm_80": 64, "k_fp16 sm_90a": 64}
    assert written(96, "sm_90a") == {"k_fp16 sm_80": 64, "k_fp16 sm_90a": 96}


def test_the_repositorys_lock_holds_declared_rungs_alone() -> None:
    rungs = tuple(f"{rung.id}_" for rung in load_ladder().rungs)
    assert [k for k in json.loads(build.lock_path("nvcc 13.0.88").read_text()) if not k.startswith(rungs)] == []


def test_a_compiler_without_a_lock_says_so(tree: Copy) -> None:
    assert build.check_lock([_record(64)]).startswith("no resource lock for nvcc 1.2.3")


def test_min_arch_keeps_a_rung_from_older_gpus() -> None:
    rung = Rung(id="x", source="x.cu", change="x", min_arch=90)
    assert rung.runs_on("sm_90a")
    assert not any(rung.runs_on(arch) for arch in ("sm_89", "sm_100", "sm_120", "compute_80"))  # nor on later ones
    portable = Rung(id="x", source="x.cu", change="x")
    assert all(portable.runs_on(arch) for arch in ("sm_80", "sm_86", "sm_120", "compute_80"))


def test_ptx_is_of_the_portable_rungs_and_shared_by_their_architectures() -> None:
    assert build.gencode(["sm_80", "sm_86", "sm_90a", "compute_80"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=sm_86",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=compute_80",
    ]


def test_the_environments_architectures_are_built_whatever_gpu_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_arch", lambda: "sm_120")
    monkeypatch.delenv("FLASHLADDER_ARCHS", raising=False)
    assert ablation.target_archs(()) == ("sm_120",)
    monkeypatch.setenv("FLASHLADDER_ARCHS", "sm_80 sm_90a compute_80")
    assert ablation.target_archs(()) == ("sm_80", "sm_90a", "compute_80")
    assert ablation.target_archs(("sm_89",)) == ("sm_89",)
    monkeypatch.setenv("FLASHLADDER_ARCHS", "sm_80,sm_90a")
    with pytest.raises(FlashladderError, match=r"no architecture 'sm_80,sm_90a'; expected sm_NN"):
        ablation.target_archs(())


@pytest.mark.parametrize(("arch", "last"), [("sm_86", "r13"), ("sm_90a", "r38"), ("sm_120", "r13"), (None, "r38")])
def test_a_gpu_is_given_the_rungs_that_it_runs(arch: str | None, last: str) -> None:
    assert ablation.runnable(RUNGS, arch)[-1].id.startswith(last)


def test_old_and_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(toolchain, "wheel_root", lambda: tmp_path / "wheels")
    toolchain.find_nvcc.cache_clear()
    try:
        with pytest.raises(BuildError, match=r"no nvcc >= 12\.8.*\(12\.4\.99\).*not found"):
            toolchain.find_nvcc()
    finally:
        toolchain.find_nvcc.cache_clear()
    toolchain.find_cxx.cache_clear()
    with pytest.raises(BuildError, match=r"g\+\+ is not on PATH; install it"):
        toolchain.find_cxx()
    toolchain.find_cxx.cache_clear()


def test_the_wheels_compiler_serves_without_a_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    toolchain.find_nvcc.cache_clear()
    try:
        nvcc = toolchain.find_nvcc()
        assert nvcc.path == toolchain.wheel_root() / "bin" / "nvcc"
        assert nvcc.version == "13.0.88"
    finally:
        toolchain.find_nvcc.cache_clear()


def test_a_measurement_that_was_cut_off_is_made_again() -> None:
    (target,) = build.targets([load_ladder()["r00_naive"]], ["sm_80"])
    ((_, first),) = build.build([load_ladder()["r00_naive"]], ["sm_80"])
    target.record.write_bytes(target.record.read_bytes()[:100])
    ((_, again),) = build.build([load_ladder()["r00_naive"]], ["sm_80"])
    assert again == first
    assert target.record.read_bytes() == msgspec.json.encode(first)
