"""CUDA 12.8: what NVRTC is given, and that it takes it where it is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashladder import build, nvrtc, paths
from flashladder.errors import EnvironmentInvalidError, FlashladderError
from flashladder.ladder import load_ladder

LADDER = load_ladder()


def _installed() -> bool:
    try:
        nvrtc._library()
    except EnvironmentInvalidError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _installed(), reason="NVRTC 12.8 is of the group cuda-check ('nox -s cuda12')")


def test_every_rung_and_variant_is_compiled_for_every_architecture_it_runs_on() -> None:
    rungs = (*LADDER.rungs, *LADDER.variants)
    jobs = nvrtc.jobs(rungs)
    wanted = {(r.id, arch) for r in rungs for arch in build.ALL_ARCHS if r.runs_on(arch)}
    assert {(job.rung, arch) for job in jobs for arch in job.archs} == wanted
    assert {(job.virtual_arch, job.archs) for job in jobs} == {
        ("compute_80", ("sm_80", "sm_89")),
        ("compute_90a", ("sm_90a",)),
    }


def test_only_the_hosts_part_is_changed() -> None:
    for file in [*(paths.KERNEL / "include").iterdir(), *(paths.KERNEL / "rungs").iterdir()]:
        before = file.read_text()
        after = nvrtc.device_code(before)
        assert "<<<" not in after
        assert 'extern "C" const flashladder::Rung*' not in after
        if file.suffix == ".cu":
            assert after == before
    kernels = re.compile(r"__(global|device)__")
    header = (paths.KERNEL / "include" / "mma_forward.cuh").read_text()
    assert len(kernels.findall(header)) == len(kernels.findall(nvrtc.device_code(header)))


def test_nvrtc_knows_every_header_that_kernels_include() -> None:
    """It has those of the toolkit, and none of the C++ library."""
    of_toolkit = re.compile(r"cuda_(fp|bf)16\.h|math_constants\.h|mma\.h")
    included = {
        name
        for folder in ("include", "rungs", "variants")
        for file in (paths.KERNEL / folder).iterdir()
        for name in re.findall(r"^#include <([^>]+)>", file.read_text(), re.MULTILINE)
    }
    assert {name for name in included if not of_toolkit.fullmatch(name)} <= nvrtc.STAND_INS.keys()


def test_without_nvrtc_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvrtc._library.cache_clear()
    monkeypatch.setattr(nvrtc, "_wheels", lambda: tmp_path)
    with pytest.raises(EnvironmentInvalidError, match=r"NVRTC 12\.8 is missing; run 'nox -s cuda12'"):
        nvrtc._library()


@needs_nvrtc
def test_a_rung_compiles_and_a_fault_is_named(tmp_path: Path) -> None:
    (job,) = (j for j in nvrtc.jobs([LADDER["r08_mma_sync"]]) if j.virtual_arch == "compute_80")
    ptx = nvrtc.to_ptx(job.source, job.virtual_arch)
    assert b".version 8.7" in ptx
    assert ptx.count(b".entry r08_mma_sync_") == 4
    assert nvrtc.assemble(ptx, "sm_89", job.rung).startswith(b"\x7fELF")
    bad = tmp_path / "bad.cu"
    bad.write_text(job.source.read_text() + "__device__ int x = y;\n")
    with pytest.raises(FlashladderError, match=r'bad for compute_80: .*error: identifier "y" is undefined'):
        nvrtc.to_ptx(bad, "compute_80")
    with pytest.raises(FlashladderError, match=r"r14 for sm_80: .*"):
        nvrtc.assemble(ptx.replace(b".target sm_80", b".target sm_90a"), "sm_80", "r14")
