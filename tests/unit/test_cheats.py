"""Candidates that cheat by their file: each is rejected, with its own reason."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from flashladder import accept, challenge, grid, integrity, worker
from flashladder.arms import ArmSpec
from flashladder.emulator.device import Options
from flashladder.errors import Exit
from flashladder.inputs import Case
from flashladder.model import Cell, ChallengeVerdict, Ratio, Shape
from flashladder.rundir import sha256_of
from tests.cheats import ENDING, REPLACING, REPLACING_TORCH, RIGHT
from tests.saboteurs import SABOTEURS
from tests.unit.forked import forked

SHAPE = Shape(batch=1, heads_q=2, heads_kv=1, seq_q=33, seq_k=40, head_dim=64)
CELL = Cell(shape=SHAPE, dtype="fp16", causal=True)
CONFIG = {"grid": 1, "tile_m": 32, "tile_m_128": 0, "persistent": 0, "pack_heads": 0, "key_groups": 1}


def _script(folder: Path, before: str) -> Path:
    file = folder / "cheat.py"
    file.write_text(before + "\n" + RIGHT)
    return file


def _checked(file: Path) -> tuple[str, str | None]:
    """Status and reason of the gate's record, made by the worker's own code."""
    spec = ArmSpec(name="candidate", kind="variant", script=str(file), sha256=sha256_of(file), is_candidate=True)
    messages: list[worker.Message] = []
    job = worker.CheckJob(items=(worker.CheckItem(arm=spec, case=Case("edge", CELL)),), seed=3, emulation=Options())
    worker._run_checks(job, messages.append)
    (record,) = (m.record for m in messages if isinstance(m, worker.CheckDone))
    return record.status, record.reason


def _challenged(folder: Path, file: Path) -> tuple[ChallengeVerdict, list[str]]:
    said: list[str] = []
    return challenge.challenge(challenge.Request(file, folder / "out", seed=3), said.append), said


def test_there_are_thirty_cheats() -> None:
    assert len(SABOTEURS) + len(REPLACING) + len(ENDING) >= 30


def test_the_right_answer_is_not_rejected(tmp_path: Path) -> None:
    assert forked(lambda: _checked(_script(tmp_path, ""))) == ("pass", None)


@pytest.mark.parametrize("name", REPLACING)
def test_what_replaces_its_judge_is_rejected(name: str, tmp_path: Path) -> None:
    before, found = REPLACING[name]
    result = forked(lambda: _checked(_script(tmp_path, before)))
    assert isinstance(result, tuple)
    status, reason = result
    assert status == "fail"
    assert reason is not None
    assert reason.startswith(worker.TAMPERED)
    assert found in reason


class _Event:
    """Stands for torch.cuda.Event: of the watcher only names and identities matter."""

    def record(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 1.0


class _Graph:
    def replay(self) -> None: ...


class _TensorBase:
    def fill_(self, value: float) -> None: ...

    def normal_(self) -> None: ...


class _Tensor(_TensorBase):
    """PyTorch's Tensor has its methods of a base too."""


def _as_if_torch_were_here() -> types.ModuleType:
    torch, cuda, profiler = (types.ModuleType(name) for name in ("torch", "torch.cuda", "torch.profiler"))
    for module, names in (
        (cuda, {"Event": _Event, "CUDAGraph": _Graph, "synchronize": lambda: None}),
        (profiler, {"profile": _Graph}),
        (torch, {"cuda": cuda, "profiler": profiler, "Tensor": _Tensor}),
    ):
        vars(module).update(names)
        sys.modules[module.__name__] = module
    return torch


@pytest.mark.parametrize("name", REPLACING_TORCH)
def test_what_replaces_torch_is_found(name: str) -> None:
    line, found = REPLACING_TORCH[name]

    def run() -> tuple[str | None, str | None]:
        torch = _as_if_torch_were_here()
        replaced = integrity.watch()
        before = replaced()
        exec(line, {"torch": torch})
        return before, replaced()

    before, after = forked(run)  # type: ignore[misc]
    assert before is None
    assert after is not None
    assert found in after


@pytest.mark.parametrize("name", ENDING)
def test_what_does_not_let_itself_be_judged_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(challenge, "LIMITS_S", dict.fromkeys(challenge.LIMITS_S, 3.0 if name == "hang" else 60.0))
    before, code, found = ENDING[name]
    verdict, _ = _challenged(tmp_path, _script(tmp_path, before))
    assert verdict.exit_code == code
    assert verdict.verdict == ("not timed" if code == Exit.ENVIRONMENT else "reverted")
    assert found in (verdict.reason or "")


# --- the grid -------------------------------------------------------------------------------------------------------


def _launched(blocks: int | None, kernels: tuple[str, ...] | None, streams: int | None = 1) -> grid.Launched:
    return grid.Launched(
        cell=CELL, blocks=blocks, kernels=kernels, streams=streams, config=CONFIG, plan=None, multiprocessors=132
    )


def test_a_grid_as_declared_is_no_fault() -> None:
    assert grid.fault(_launched(4, ("mine_fp16_d64",)), "mine") is None


@pytest.mark.parametrize(
    ("launched", "found"),
    [
        (_launched(0, ()), "it launches no kernel"),
        (_launched(2, ("mine_fp16_d64",)), "it launches 2 thread blocks"),
        (_launched(4, ("mine_fp16_d64", "mine_fp16_d64"), 2), "2 streams"),
        (_launched(4, ("cutlass_80",)), "it launches cutlass_80"),
    ],
)
def test_other_launches_than_the_config_means_are_a_fault(launched: grid.Launched, found: str) -> None:
    assert found in (grid.fault(launched, "mine") or "")


def test_a_trace_gives_blocks_names_and_streams_without_the_callers_marker() -> None:
    def event(name: str, stream: int, blocks: int) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": 1, "args": {"grid": [blocks, 2, 1], "stream": stream}}

    marker, own = event("fill(float)", 7, 1), event("mine_fp16_d64(Params)", 7, 3)
    assert grid.launches_of([marker, own]) == (6, ("mine_fp16_d64",), 1)
    assert grid.launches_of([marker, event("mine_fp16_d64", 9, 3)])[2] == 2
    assert grid.launches_of([marker]) == (0, (), 1)


@pytest.mark.parametrize("kind", ["gpu_memcpy", "gpu_memset"])
def test_a_copy_on_another_stream_is_seen_and_is_no_kernel(kind: str) -> None:
    marker = {"cat": "kernel", "name": "fill(float)", "ts": 1, "args": {"grid": [1, 1, 1], "stream": 7}}
    copy = {"cat": kind, "name": "Memcpy DtoD", "ts": 2, "args": {"stream": 9}}
    assert grid.launches_of([marker, copy]) == (0, (), 2)


# --- the clock outside ----------------------------------------------------------------------------------------------


def _watched(champion_s: float, candidate_s: float) -> challenge.Stopwatch:
    watch = challenge.Stopwatch()
    now = 0.0
    for arm, seconds in ((accept.CHAMPION, champion_s), (accept.CANDIDATE, candidate_s)) * 2:
        watch(worker.Clock(cell=CELL, arm=None, launches=0), now)
        now += 10 * seconds
        watch(worker.Clock(cell=CELL, arm=arm, launches=10), now)
    return watch


def test_events_that_claim_more_than_the_clock_outside_saw_are_rejected() -> None:
    claimed = {CELL.id: Ratio(ratio=1.5, low=1.4, high=1.6)}
    assert _watched(1.5, 1.0).fault(claimed) is None
    code, reason = _watched(1.0, 1.0).fault(claimed) or (Exit.OK, "")
    assert code == Exit.INCORRECT
    assert "its events claim a ratio of 1.500, the clock outside saw 1.000" in reason


def test_a_cell_without_a_launch_that_was_seen_is_rejected() -> None:
    claimed = {CELL.id: Ratio(ratio=1.5, low=1.4, high=1.6)}
    assert "no launch was seen" in (challenge.Stopwatch().fault(claimed) or (Exit.OK, ""))[1]
