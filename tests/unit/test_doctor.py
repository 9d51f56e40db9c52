"""The preflight's judgements, from what a machine may show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flashladder import doctor, machine, paths, toolchain
from flashladder.errors import BuildError


@pytest.mark.parametrize(
    ("driver", "cuda", "level", "text"),
    [
        ("580.159.04", 13, "ok", "580.159.04, CUDA 13 needs 580 or later"),
        ("575.57", 13, "fault", "found 575.57, CUDA 13 needs 580 or later; update the NVIDIA driver"),
        ("570.00", 12, "ok", "570.00, CUDA 12 needs 570 or later"),
        ("550.54.15", 12, "fault", "found 550.54.15, CUDA 12 needs 570 or later"),
        (None, 13, "note", "none found"),
    ],
)
def test_driver_found_against_needed(driver: str | None, cuda: int, level: str, text: str) -> None:
    finding = doctor.driver_finding(driver, cuda)
    assert finding.level == level
    assert text in finding.text


@pytest.mark.parametrize(
    ("params", "cap_eff", "denied"),
    [
        ("RmProfilingAdminOnly: 1\n", 0, True),
        ("RmProfilingAdminOnly: 1\n", 1 << 21, False),
        ("RmProfilingAdminOnly: 0\n", 0, False),
        ("", 0, False),
    ],
)
def test_profiling_permission(params: str, cap_eff: int, denied: bool) -> None:
    assert doctor.profiling_denied(params, cap_eff) is denied


def test_every_finding_is_one_line_and_a_gap_names_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise BuildError("no C++ compiler: g++ is not on PATH; install it")

    monkeypatch.setattr(doctor, "find_cxx", missing)
    monkeypatch.setattr(doctor, "find_cuda_tool", lambda _: None)
    findings = list(doctor.examine())
    assert len({f.name for f in findings}) == len(findings) == 9
    for finding in findings:
        assert "\n" not in finding.text
    by_name = {f.name: f for f in findings}
    assert (by_name["C++ compiler"].level, by_name["ncu"].level) == ("fault", "note")
    assert "install" in by_name["ncu"].text


def test_a_full_disk_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    finding = next(f for f in doctor.examine() if f.name == "disk")
    assert finding.level == "fault"
    assert "1 MiB free" in finding.text


def test_ncu_is_found_beside_nvcc_though_not_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ncu").touch()
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(tmp_path / "nvcc", "13.0.88", ()))
    monkeypatch.setenv("PATH", "/nonexistent")
    toolchain.find_cuda_tool.cache_clear()
    assert toolchain.find_cuda_tool("ncu") == tmp_path / "ncu"
    toolchain.find_cuda_tool.cache_clear()


def test_the_fingerprint_exists_without_a_gpu_and_names_no_card() -> None:
    here = machine.fingerprint()
    assert here.python.count(".") == 2
    assert here.gpu_digest is None or len(here.gpu_digest) == 12


def test_git_state_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("FLASHLADDER_COMMIT", raising=False)
    assert machine.git_state() == ("unknown", False)
