"""The referee on a GPU: cheats that only a GPU has, and the verdicts' times."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flashladder import accept, candidate, challenge, machine, paths, worker
from flashladder.arms import ArmSpec, LoadedArm
from flashladder.arrays import CudaMemory
from flashladder.errors import Exit
from flashladder.inputs import Case
from flashladder.ladder import load_ladder
from flashladder.model import ArmTiming, Cell, ChallengeVerdict, Preset, Shape
from flashladder.rundir import sha256_of
from flashladder.stages import build_rungs, cases
from flashladder.timing import Timer
from tests.cheats import REPLACING_TORCH
from tests.saboteurs import PyArm, right

SHAPE = Shape(batch=1, heads_q=2, heads_kv=2, seq_q=128, seq_k=128, head_dim=64)
CELL = Cell(shape=SHAPE, dtype="fp16", causal=False)
PRESET = Preset(sets=(), dtypes=("fp16",), blocks=12, min_blocks=10, warmup_ms=100, arm_budget_s=4, arm_limit_s=4)
FAIR_S, WRONG_S = 90, 20
"""How long a verdict may take."""


# --- what a strict timer finds ----------------------------------------------------------------------------------------


def _strict(torch: Any, work: Any) -> ArmTiming:
    """Times `work`, given a kernel that is right, with every sample on values of its own."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def attention(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, Any]:
        def honest() -> None:
            o.copy_(sdpa(q, k, v, is_causal=causal, scale=scale))
            lse.copy_((q.float() @ k.float().transpose(2, 3) * scale).logsumexp(3))

        work(honest, q, k, v, o, lse)
        return o, lse

    arm = LoadedArm(ArmSpec(name="cheat", kind="variant"), attention)
    timer = Timer(PRESET, {}, strict=True)
    return timer.time_cell([arm.spec], lambda _: arm, CELL, "warm", {}, 0, lambda _: None).arms[0]


def test_an_honest_kernel_is_timed(torch: Any) -> None:
    record = _strict(torch, lambda honest, *_: honest())
    assert record.status == "timed", record.reason
    assert record.launches_per_sample > 1
    assert len(record.ns) == PRESET.blocks


def _captures_nothing(torch: Any) -> Any:
    return lambda honest, *_: None if torch.cuda.is_current_stream_capturing() else honest()


def _captures_one_call(torch: Any) -> Any:
    seen: list[int] = []

    def work(honest: Any, *_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            seen.append(1)
            if len(seen) > 1:
                return
        honest()

    return work


def _answers_from_the_warm_up(torch: Any) -> Any:
    answers: dict[int, tuple[Any, Any]] = {}

    def work(honest: Any, q: Any, k: Any, v: Any, o: Any, lse: Any) -> None:
        if q.data_ptr() not in answers:
            honest()
            answers[q.data_ptr()] = o.clone(), lse.clone()
        o.copy_(answers[q.data_ptr()][0])
        lse.copy_(answers[q.data_ptr()][1])

    return work


def _lse_from_the_warm_up(torch: Any) -> Any:
    kept: dict[int, Any] = {}

    def work(honest: Any, q: Any, k: Any, v: Any, o: Any, lse: Any) -> None:
        honest()
        if q.data_ptr() not in kept:
            kept[q.data_ptr()] = lse.clone()
        lse.copy_(kept[q.data_ptr()])

    return work


def _half_when_timed(torch: Any) -> Any:
    calls: list[int] = []

    def work(honest: Any, q: Any, k: Any, v: Any, o: Any, lse: Any) -> None:
        calls.append(1)
        honest()
        if len(calls) > 2:
            o[:, :, q.shape[2] // 2 :] = 0

    return work


def _refuses_capture_and_leaves_out_later_calls(torch: Any) -> Any:
    calls: list[int] = []

    def work(honest: Any, *_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not capturable")
        calls.append(1)
        if len(calls) < 30 or len(calls) % 2:
            honest()

    return work


TIMED = {
    "captures nothing": (_captures_nothing, "graph replay is incorrect"),
    "captures one call": (_captures_one_call, "on new values is incorrect"),
    "answers from the warm-up": (_answers_from_the_warm_up, "on new values is incorrect: o_max"),
    "LSE from the warm-up": (_lse_from_the_warm_up, "on new values is incorrect: lse_max"),
    "half when timed": (_half_when_timed, "is incorrect: o_max"),
    "calls left out": (_refuses_capture_and_leaves_out_later_calls, "incorrect"),
}


@pytest.mark.parametrize("name", TIMED)
def test_what_does_less_when_it_is_timed_is_not_timed(name: str, torch: Any) -> None:
    make, found = TIMED[name]
    record = _strict(torch, make(torch))
    assert record.status == "failed"
    assert record.ns == ()
    assert found in (record.reason or ""), record.reason


# --- what replaces torch, and other streams ---------------------------------------------------------------------------


def _script(torch: Any, folder: Path, before: str) -> Path:
    file = folder / "mine.py"
    candidate.write_template(file, paths.ROOT / load_ladder().rungs[-1].source, load_ladder().rungs[-1].id)
    text = file.read_text()
    file.write_text(text.replace("import torch\n", f"import torch\nimport torch.profiler\n{before}\n", 1))
    return file


@pytest.mark.parametrize("name", REPLACING_TORCH)
def test_what_replaces_torch_is_rejected(name: str, torch: Any, tmp_path: Path) -> None:
    before, found = REPLACING_TORCH[name]
    verdict, _ = _challenged(_script(torch, tmp_path, before))
    assert verdict.verdict == "reverted"
    assert found in (verdict.reason or ""), verdict


def test_work_on_another_stream_is_seen_in_the_trace(torch: Any) -> None:
    from flashladder import grid

    stream = torch.cuda.Stream()

    def elsewhere(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, Any]:
        with torch.cuda.stream(stream):
            o.copy_(q)
        return o, lse

    arm = LoadedArm(ArmSpec(name="cheat", kind="variant"), elsewhere)
    launched = grid.observe(arm, Case("edge", CELL), CudaMemory(), 0)
    assert launched.streams == 2
    assert "streams" in (grid.fault(launched, "cheat") or "")


def test_the_clock_outside_agrees_with_honest_events(torch: Any) -> None:
    arch = machine.gpu_arch() or ""
    run = [r for r in load_ladder().rungs if r.runs_on(arch)]
    _, specs = build_rungs(None, [run[-1]], [arch], lambda *_: None)
    spec = next(iter(specs.values()))
    arms = tuple(
        ArmSpec(name=name, kind="variant", library=spec.library, sha256=spec.sha256)
        for name in (accept.CHAMPION, accept.TWIN, accept.CANDIDATE)
    )
    cell = next(iter(challenge.Request(Path("x"), Path("y")).cells))
    watch, seen = challenge.Stopwatch(), []

    def on_message(message: worker.Message) -> None:
        if isinstance(message, worker.Clock):
            watch(message, time.monotonic())
        elif isinstance(message, worker.TimingDone):
            seen.append(message.record)

    job = worker.TimingJob(
        items=(worker.TimingItem(cell=cell, l2="cold", arms=arms, excluded={}),),
        preset=PRESET,
        seed=0,
        rates={},
        strict=True,
    )
    assert worker.supervise(job, on_message).end == "finished"
    # This process holds a context on the GPU, which makes every block invalid, and is idle.
    alone = [replace(r, telemetry=tuple(replace(t, valid=True) for t in r.telemetry)) for r in seen]
    decision = accept.decide("SCREEN", alone, 1)
    assert decision.ratios
    assert watch.fault(decision.ratios) is None


# --- whole challenges -------------------------------------------------------------------------------------------------


def _challenged(file: Path, against: str | None = None, shapes: tuple[str, ...] = ()) -> tuple[ChallengeVerdict, float]:
    start = time.monotonic()
    request = challenge.Request(file=file, out=file.parent / "out", against=against, shapes=shapes, seed=1)
    return challenge.challenge(request, print), time.monotonic() - start


@pytest.mark.children_time
def test_the_champion_renamed_is_not_better_and_told_in_time(torch: Any, tmp_path: Path) -> None:
    champion = challenge.default_champion(load_ladder(), machine.gpu_arch())
    file = tmp_path / "same.cu"
    candidate.write_template(file, paths.ROOT / load_ladder()[champion.id].source, champion.id)
    verdict, seconds = _challenged(file)
    assert (verdict.verdict, verdict.exit_code) == ("reverted", Exit.NOT_BETTER), verdict
    assert seconds < FAIR_S


@pytest.mark.children_time
def test_a_fair_gain_is_accepted_and_told_in_time(torch: Any, tmp_path: Path) -> None:
    """The champion, renamed, against the rung that the portable ladder ends with."""
    champion = challenge.default_champion(load_ladder(), machine.gpu_arch())
    if champion.id == "r13_tuned":
        pytest.skip("this GPU's champion is that rung")
    file = tmp_path / "same.cu"
    candidate.write_template(file, paths.ROOT / load_ladder()[champion.id].source, champion.id)
    verdict, seconds = _challenged(file, "r13_tuned")
    assert (verdict.verdict, verdict.state) == ("accepted", "CONFIRM"), verdict
    assert seconds < FAIR_S


@pytest.mark.children_time
def test_a_gain_of_two_percent_is_accepted(torch: Any, tmp_path: Path) -> None:
    """r12_kv_split with O rescaled lazily and long tiles first: by the pinned run 2.0 and 2.4 % faster."""
    file = tmp_path / "slightly.cu"
    candidate.write_template(file, paths.KERNEL / "variants" / "v13_mask_all.cu", "v13_mask_all")
    verdict, _ = _challenged(file, "r12_kv_split", ("b32h32s512d64",))
    assert (verdict.verdict, verdict.state) == ("accepted", "CONFIRM"), verdict
    assert verdict.geomean is not None
    assert 1.01 < verdict.geomean.ratio < 1.05


@pytest.mark.parametrize("suffix", [".py", ".cu"])
def test_a_wrong_candidate_is_told_in_time(torch: Any, tmp_path: Path, suffix: str) -> None:
    if suffix == ".py":
        file = _script(torch, tmp_path, "")
        file.write_text(file.read_text().replace("o.copy_((weights", "o.copy_(0.99 * (weights"))
    else:
        file = tmp_path / "wrong.cu"
        source = (paths.KERNEL / "rungs" / "r05_swizzle.cu").read_text().replace("r05_swizzle", "wrong")
        file.write_text(source.replace("n0 + lane < visible_keys", "n0 + lane + 1 < visible_keys"))
    verdict, seconds = _challenged(file)
    assert (verdict.verdict, verdict.state, verdict.exit_code) == ("reverted", "CORRECT", Exit.INCORRECT), verdict
    assert seconds < WRONG_S


def test_the_template_is_right(torch: Any, tmp_path: Path) -> None:
    file = _script(torch, tmp_path, "")
    spec = ArmSpec(name="candidate", kind="variant", script=str(file), sha256=sha256_of(file), is_candidate=True)
    items = tuple(worker.CheckItem(arm=spec, case=case) for case in cases(("fp16",), [64]))
    found: list[worker.Message] = []
    worker.supervise(worker.CheckJob(items=items, seed=1), found.append)
    records = [m.record for m in found if isinstance(m, worker.CheckDone)]
    wrong = [(r.case, r.reason) for r in records if r.status not in ("pass", "unsupported")]
    assert len(records) == len(items)
    assert not wrong


def test_the_right_answer_of_the_oracle_is_timed_strictly(torch: Any) -> None:
    inner = PyArm("oracle", CudaMemory(), right)

    def attention(*arguments: Any) -> tuple[Any, Any]:
        return inner(*arguments)

    arm = LoadedArm(ArmSpec(name="oracle", kind="variant"), attention)
    record = Timer(PRESET, {}, strict=True).time_cell([arm.spec], lambda _: arm, CELL, "warm", {}, 0, lambda _: None)
    assert record.arms[0].status == "timed", record.arms[0].reason
