"""Challenges by .cu files without a GPU: every state up to CORRECT on the emulator, in processes of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashladder import candidate, challenge, machine, paths
from flashladder.errors import Exit
from flashladder.ladder import load_ladder
from flashladder.model import ChallengeVerdict

SOURCE = paths.KERNEL / "rungs" / "r05_swizzle.cu"
LOOP = "for (int n0 = 0; n0 < n_end; n0 += kN) {"

pytestmark = [pytest.mark.mutants, pytest.mark.skipif(machine.gpu_name() is not None, reason="a GPU is here")]


def _challenged(folder: Path, old: str, new: str) -> ChallengeVerdict:
    text = SOURCE.read_text().replace("r05_swizzle", "mine")
    assert old in text
    file = folder / "mine.cu"
    file.write_text(text.replace(old, new, 1))
    request = challenge.Request(file, folder / "out", masks=("causal",), seed=3)
    return challenge.challenge(request, print)


def test_a_right_kernel_is_not_timed(tmp_path: Path) -> None:
    verdict = _challenged(tmp_path, LOOP, LOOP)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("not timed", "CORRECT", Exit.ENVIRONMENT), verdict


@pytest.mark.parametrize(
    ("old", "new", "code", "state", "reason"),
    [
        ("constexpr int kM", "constexp int kM", Exit.BUILD, "BUILD", "error: "),
        (LOOP, LOOP.replace("kN)", "kN * (threadIdx.x > 999))"), Exit.TIMEOUT, "GRID", "silent for 20 s"),
        ("n0 + lane < visible_keys", "n0 + lane + 1 < visible_keys", Exit.INCORRECT, "CORRECT", "round 1: "),
        (f"    {LOOP}".strip(), f"__syncthreads();\n  if (m0 > 0) return;\n  {LOOP}", Exit.INCORRECT, "CORRECT", "NaN"),
    ],
    ids=["does not compile", "never ends", "drops a key", "skips tiles"],
)
def test_a_wrong_kernel_is_reverted(tmp_path: Path, old: str, new: str, code: Exit, state: str, reason: str) -> None:
    verdict = _challenged(tmp_path, old, new)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("reverted", state, code), verdict
    assert re.search(reason, verdict.reason or "")


def test_another_grid_than_the_config_means_is_reverted(tmp_path: Path) -> None:
    """Its launcher leaves out the last head."""
    macro = "FLASHLADDER_RUNG(mine, kConfig)"
    hidden = (
        "namespace flashladder {\ninline int launch_fewer(const Instance& i, Grid g, Params p, int d, cudaStream_t s) "
        "{\n  p.heads_q -= 1;\n  return launch(i, g, p, d, s);\n}\n}\n#define launch launch_fewer\n"
    )
    verdict = _challenged(tmp_path, macro, hidden + macro)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("reverted", "GRID", Exit.GRID), verdict
    assert "thread blocks" in (verdict.reason or "")


def test_the_champions_template_passes(tmp_path: Path) -> None:
    rung = load_ladder().rungs[-1]
    file = tmp_path / "same.cu"
    candidate.write_template(file, paths.ROOT / rung.source, rung.id)
    verdict = challenge.challenge(challenge.Request(file, tmp_path / "out", masks=("causal",), seed=3), print)
    assert (verdict.verdict, verdict.state) == ("not timed", "CORRECT"), verdict
