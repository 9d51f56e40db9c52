"""Times eager calls of flashladder.attention, each waited for (torch.cuda.synchronize), beside other calls' (eager.py).

A round visits every arm in random order and then in the reverse order. What computes attention is held to the gate's
limits on the timed tensors, before and after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashladder import ablation, eager, fastest, native
from flashladder.arms import ArmSpec
from flashladder.arrays import CudaMemory, Memory
from flashladder.check import Problem, distance, pose, seed_of
from flashladder.eager import ARMS, CALLS, COMPUTING
from flashladder.errors import Exit, FlashladderError
from flashladder.inputs import Case
from flashladder.ladder import load_presets
from flashladder.machine import gpu_digest
from flashladder.model import Cell, EagerArm, EagerTiming, Errors
from flashladder.ninja import Progress, silent
from flashladder.rundir import RunDir
from flashladder.stages import build_rungs

Call = Callable[[], Any]
Samples = dict[EagerArm, tuple[tuple[float, float], ...]]


def measure(out: Path | None, seed: int, progress: Progress = silent) -> RunDir:
    """Open or resume a run and record the cells that it lacks for the library that attention calls here.

    Raises EnvironmentInvalidError when this machine cannot measure, BuildError, and FlashladderError when an answer is
    wrong.
    """
    run = ablation.open_run(eager.PRESET, out or ablation.default_run_path(eager.PRESET))
    import torch

    arch = fastest.arch_of(*torch.cuda.get_device_capability())
    rung = fastest.rung(arch)
    builds, specs = build_rungs(run, [rung], ablation.target_archs(()), silent)
    ablation.raise_on_build_faults([rung], builds)
    spec = specs[rung.id]
    recorded = {(r.cell, r.sha256) for r in run.eager()}
    for number, cell in enumerate(eager.CELLS):
        progress(number, len(eager.CELLS), cell.id)
        if (cell, spec.sha256) not in recorded:
            run.append("eager", time_cell(spec, cell, seed))
    return run


def time_cell(spec: ArmSpec, cell: Cell, seed: int) -> EagerTiming:
    """Check, warm up, sample and check again, on the current GPU. `spec` is the library that attention calls.

    Raises FlashladderError when an answer is wrong: then nothing of the cell is recorded.
    """
    import torch

    assert spec.library is not None
    assert spec.sha256 is not None
    preset, memory, case = load_presets()[eager.PRESET], CudaMemory(), Case("suite", cell)
    problem = pose(case, memory, seed)[0]
    q, k, v = (memory.shaped(x) for x in problem.values)
    calls = calls_of(torch, native.load(Path(spec.library)).attention, q, k, v, causal=cell.causal)
    answers = {arm: poisoned(calls[arm]) for arm in COMPUTING}
    judged(answers, memory, problem, cell)
    wait = torch.cuda.synchronize
    warm_up(calls, wait, preset.warmup_ms)
    us = time_rounds(calls, wait, preset.blocks, seed_of(case, seed))
    return EagerTiming(
        cell=cell,
        rung=spec.name,
        sha256=spec.sha256,
        seed=seed,
        gpu_digest=gpu_digest(),
        calls=CALLS,
        errors=judged(answers, memory, problem, cell),
        limits=problem.limits,
        us=us,
    )


def calls_of(
    torch: Any, library: native.AttentionCall, q: Any, k: Any, v: Any, *, causal: bool
) -> dict[EagerArm, Call]:
    """The call of every arm; those in COMPUTING return O. q, k, v: (batch, heads, seq, head_dim) on the GPU."""
    from flashladder.functional import attention

    sdpa = torch.nn.functional.scaled_dot_product_attention
    x, o = torch.zeros(1, device=q.device), torch.empty_like(q)

    def kernel() -> Any:
        library(q, k, v, o, None, None, causal)
        return o

    return {
        "nothing": lambda: None,
        "in_place": lambda: x.add_(1),
        "out_of_place": lambda: x + 1,
        "allocation": lambda: torch.empty_like(q),
        "kernel": kernel,
        "attention": lambda: attention(q, k, v, causal),
        "sdpa": lambda: sdpa(q, k, v, is_causal=causal),
    }


def poisoned(call: Call) -> Call:
    """The call, behind NaN in the O at hand, or in the memory that torch's allocator gives next."""

    def answer() -> Any:
        call().fill_(float("nan"))
        return call()

    return answer


def judged(answers: Mapping[EagerArm, Call], memory: Memory, problem: Problem, cell: Cell) -> dict[EagerArm, Errors]:
    """The errors of every arm's O; raises FlashladderError, exit code INCORRECT, when one is beyond the limits."""
    found = {}
    for arm, answer in answers.items():
        apart = distance(memory.float64(answer()), None, problem.oracle, problem.limits, finite=problem.finite)
        if apart.fault is not None:
            error = FlashladderError(f"{ARMS[arm]} is wrong in {cell.id}: {apart.fault}; its time is not recorded")
            error.exit_code = Exit.INCORRECT
            raise error
        found[arm] = apart.errors
    return found


def warm_up(calls: Mapping[EagerArm, Call], wait: Call, least_ms: float) -> None:
    """Run the arms in turns for so long at least."""
    end = time.perf_counter() + least_ms * 1e-3
    while time.perf_counter() < end:
        for call in calls.values():
            _sample(call, wait)


def time_rounds(calls: Mapping[EagerArm, Call], wait: Call, rounds: int, seed: int) -> Samples:
    """Two samples of every arm a round, first visit and second visit: microseconds of a call and its wait."""
    rng, names = np.random.default_rng(seed), list(calls)
    us: dict[EagerArm, list[tuple[float, float]]] = {arm: [] for arm in names}
    for _ in range(rounds):
        order = [names[i] for i in rng.permutation(len(names))]
        there = {arm: _sample(calls[arm], wait) for arm in order}
        back = {arm: _sample(calls[arm], wait) for arm in reversed(order)}
        for arm in names:
            us[arm].append((there[arm], back[arm]))
    return {arm: tuple(samples) for arm, samples in us.items()}


def _sample(call: Call, wait: Call) -> float:
    wait()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
        wait()
    return round((time.perf_counter_ns() - start) / CALLS / 1e3, 4)
