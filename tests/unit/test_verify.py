"""Same bits: what is rebuilt, what it is compared with, and what is said of a difference."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from flashladder import build, paths, rundir, toolchain, verify
from flashladder.errors import BuildError, DriftError, EnvironmentInvalidError, FlashladderError
from flashladder.ladder import load_ladder
from flashladder.model import BuildRecord, RungSums
from flashladder.toolchain import Nvcc
from tests.unit.synthetic import write_run

LADDER = load_ladder()
DECLARED = ("x", "y")
CHEAP = LADDER["r15_wgmma"]
RECORD = BuildRecord(
    rung="x", status="built", sha256="l", cubins={"sm_80": "a"}, compiler="nvcc 1.2.3", flags=(), archs=("sm_80",)
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of kernel/ that a test may change."""
    shutil.copytree(paths.KERNEL, tmp_path / "kernel")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "KERNEL", tmp_path / "kernel")
    monkeypatch.setattr(build, "INCLUDE", tmp_path / "kernel" / "include")
    monkeypatch.setattr(build, "BINDING", tmp_path / "kernel" / "binding" / "binding.cc")
    return tmp_path


def _reference(**cubins: str) -> verify.Reference:
    return verify.Reference("the sums", "nvcc 1.2.3", {"x": RungSums(cubins=cubins, library="l")}, ("g++ 1",))


def test_a_rebuild_in_an_empty_folder_gives_the_repositorys_sums_and_the_pinned_runs() -> None:
    reference, nvcc, choice = verify.repository()
    assert choice.endswith(f"compiling with {reference.compiler} at {nvcc.path}")
    found = verify.rebuild(verify.choose(reference, [CHEAP], missing_is_error=True), nvcc)
    assert verify.compare(reference, found) == "1 cubins of 1 rungs for sm_90a are those of nvcc-13.0.88.sums.json"
    run = rundir.find()
    assert verify.measured_by(run, reference.compiler, found).endswith("measured these bytes of 1 of 1 rungs")
    recorded, _, _ = verify.recorded(run)
    assert verify.compare(recorded, found).endswith(f"are those of run {run.info.id}")


def test_a_changed_kernel_is_named_and_a_changed_comment_is_not(tree: Path) -> None:
    reference, nvcc, _ = verify.repository()
    chosen = verify.choose(reference, [CHEAP], missing_is_error=True)
    source = tree / CHEAP.source
    source.write_text(source.read_text() + "\n// a comment\n")
    found = verify.rebuild(chosen, nvcc)
    assert verify.differences(reference, found) == []
    header = tree / "kernel" / "include" / "softmax.cuh"
    header.write_text(header.read_text().replace("kLn2 = 0.69", "kLn2 = 0.68"))
    with pytest.raises(DriftError, match=r"1 differ from .*sums\.json:\n  r15_wgmma sm_90a: [0-9a-f]{16} expected"):
        verify.compare(reference, verify.rebuild(chosen, nvcc))


def test_a_rung_that_does_not_compile_is_named(tree: Path) -> None:
    reference, nvcc, _ = verify.repository()
    (tree / CHEAP.source).write_text("int x = ;\n")
    with pytest.raises(BuildError, match=r"r15_wgmma: .*error: expected an expression"):
        verify.rebuild(verify.choose(reference, [CHEAP], missing_is_error=True), nvcc)


def test_what_is_not_declared_any_more_is_named() -> None:
    assert verify.undeclared(_reference(sm_80="a"), LADDER) == ["x"]
    assert verify.undeclared(verify.repository()[0], LADDER) == []


def test_every_difference_is_named_with_both_sums() -> None:
    reference = _reference(sm_80="a", sm_90a="b")
    same = {"x": RungSums(cubins={"sm_80": "a", "sm_90a": "b"}, library="l")}
    assert (
        verify.compare(reference, same) == "2 cubins of 1 rungs for sm_80, sm_90a and 1 libraries are those of the sums"
    )
    other = {"x": RungSums(cubins={"sm_80": "c"}, library="m")}
    assert verify.differences(reference, other) == [
        "x sm_80: a expected, c built",
        "x sm_90a: b expected, none built",
        "x library: l expected, m built",
    ]
    with pytest.raises(DriftError, match=r"3 differ from the sums:\n  x sm_80: a expected, c built\n"):
        verify.compare(reference, other)


def test_the_repository_has_the_sums_of_every_rung_and_variant_for_every_architecture() -> None:
    sums = verify.read_sums("nvcc 13.0.88")
    assert sums is not None
    rungs = (*LADDER.rungs, *LADDER.variants)
    assert list(sums.rungs) == sorted(r.id for r in rungs)
    for rung in rungs:
        found = sums.rungs[rung.id]
        assert list(found.cubins) == [arch for arch in build.ALL_ARCHS if rung.runs_on(arch)]
        assert all(len(s) == 64 for s in (*found.cubins.values(), found.library or ""))


def test_sums_are_written_the_same_twice_and_keep_what_was_not_built(tree: Path) -> None:
    file = verify.write_sums(
        verify.sums_of([RECORD, msgspec.structs.replace(RECORD, rung="y")]), "nvcc 1.2.3", DECLARED
    )
    first = file.read_bytes()
    assert verify.write_sums(verify.sums_of([RECORD]), "nvcc 1.2.3", DECLARED).read_bytes() == first
    sums = verify.read_sums("nvcc 1.2.3")
    assert sums is not None
    assert sums.rungs == {name: RungSums(cubins={"sm_80": "a"}, library="l") for name in ("x", "y")}
    assert sums.host == verify.host()
    verify.write_sums(verify.sums_of([RECORD]), "nvcc 1.2.3", ["x"])
    sums = verify.read_sums("nvcc 1.2.3")
    assert sums is not None
    assert list(sums.rungs) == ["x"]


def test_sums_keep_the_machine_code_for_other_architectures_without_a_library(tree: Path) -> None:
    verify.write_sums({"x": RungSums(cubins={"sm_80": "a", "sm_90a": "b"}, library="l")}, "nvcc 1.2.3", DECLARED)
    verify.write_sums({"x": RungSums(cubins={"sm_90a": "c"}, library="m")}, "nvcc 1.2.3", DECLARED)
    sums = verify.read_sums("nvcc 1.2.3")
    assert sums is not None
    assert sums.rungs == {"x": RungSums(cubins={"sm_80": "a", "sm_90a": "c"})}


def test_libraries_of_another_host_are_not_kept_or_compared(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify.write_sums(verify.sums_of([RECORD]), "nvcc 1.2.3", DECLARED)
    assert verify.other_host(_reference(sm_80="a")) is not None
    monkeypatch.setattr(verify, "host", lambda: ("g++ 1",))
    assert verify.other_host(_reference(sm_80="a")) is None
    verify.write_sums(verify.sums_of([msgspec.structs.replace(RECORD, rung="y")]), "nvcc 1.2.3", DECLARED)
    sums = verify.read_sums("nvcc 1.2.3")
    assert sums is not None
    assert (sums.rungs["x"].library, sums.rungs["y"].library) == (None, "l")


def test_damaged_sums_are_one_clear_line(tree: Path) -> None:
    verify.sums_path("nvcc 1.2.3").write_text('{"rungs": 1}')
    with pytest.raises(FlashladderError, match=r"nvcc-1\.2\.3\.sums\.json: no valid sums: .*restore it from git"):
        verify.read_sums("nvcc 1.2.3")


def test_a_compiler_without_sums_says_so_or_leaves_it_to_one_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    here = toolchain.find_nvccs()[-1]
    old = Nvcc(Path("/usr/local/cuda/bin/nvcc"), "12.8.93", ())
    monkeypatch.setattr(verify, "find_nvcc", lambda: old)
    monkeypatch.setattr(verify, "find_nvccs", lambda: [old, here])
    reference, nvcc, choice = verify.repository()
    assert (reference.compiler, nvcc) == ("nvcc 13.0.88", here)
    assert choice.startswith("no sums for nvcc 12.8.93, which builds here; compiling with nvcc 13.0.88 at ")
    monkeypatch.setattr(verify, "find_nvccs", lambda: [old])
    with pytest.raises(EnvironmentInvalidError, match=r"no sums for nvcc 12\.8\.93: .*known: nvcc-13\.0\.88"):
        verify.repository()
    with pytest.raises(EnvironmentInvalidError, match=r"was built by nvcc 13\.0\.88, which is not here"):
        verify.recorded(rundir.find())


def test_a_run_without_sums_and_a_rung_without_sums_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FlashladderError, match="records no sums of its cubins"):
        verify.recorded(write_run(tmp_path / "run"))
    with pytest.raises(FlashladderError, match=r"no sums of r15_wgmma in the sums; write them with"):
        verify.choose(_reference(sm_80="a"), [CHEAP], missing_is_error=True)
    with pytest.raises(FlashladderError, match=r"no sums of r15_wgmma in the sums"):
        verify.choose(_reference(sm_80="a"), [CHEAP], missing_is_error=False)
