"""Planted bugs in real rungs: each must be reported. And every synchronisation, deleted, must be missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashladder import paths
from flashladder.emulator.device import SCHEDULES, SMS, AsyncTiming, Options
from flashladder.inputs import edge_cases
from flashladder.ladder import load_ladder
from flashladder.model import HOPPER
from tests.emulated import mutants

LADDER = load_ladder()
CASES = [
    case
    for case in edge_cases("fp16", 64)
    if case.family == "edge" or (case.family == "values" and case.values == "outlier")
]
SPLIT = [case for case in edge_cases("fp16", 64) if case.family == "split"]
WIDE = [case for case in edge_cases("fp16", 64) if case.family == "wide"]
TIMINGS: tuple[AsyncTiming, ...] = ("late", "random")
OPTIONS = [Options(schedule=s, async_timing=timing, seed=1) for timing in TIMINGS for s in SCHEDULES]

BUGS = {
    "missing barrier after the tile's load": (
        "r03_warp_reduce",
        "smem.v, v, p.v_strides.row, n0, p.seq_k);\n    __syncthreads();",
        "smem.v, v, p.v_strides.row, n0, p.seq_k);",
        None,
    ),
    "missing zero-fill of V": ("r03_warp_reduce", "first + row < rows ? source", "true ? source", None),
    "mask one key too far": (
        "r05_swizzle",
        "query + p.seq_k - p.seq_q + 1",
        "query + p.seq_k - p.seq_q + 2",
        "tensor.cuh",
    ),
    "last key dropped": ("r04_vector_io", "n0 + lane < visible_keys", "n0 + lane + 1 < visible_keys", None),
    "swapped parts of O": (
        "r05_swizzle",
        "uint4*>(out)[part + kParts * i]",
        "uint4*>(out)[(part ^ 1) + kParts * i]",
        None,
    ),
    "reader does not swizzle": ("r05_swizzle", "smem.k[lane][place(lane, chunk)]", "smem.k[lane][chunk]", None),
    "a warp turns to exact maxima without its warpgroup": (
        "r22_retuned",
        "ptx::barrier_any(own_barrier, kWarpgroup, is_raised)",
        "is_raised",
        "hopper_forward.cuh",
    ),
    "parts are joined before they are there": (
        "r38_first_look",
        "ptx::wait_for_grids_ahead();",
        ";",
        "mma_forward.cuh",
    ),
    "maximum not carried": ("r03_warp_reduce", "new_max = fmaxf(old_max, warp_max(t))", "new_max = warp_max(t)", None),
}


COVERED = {
    "missing barrier after the tile's load",
    "maximum not carried",
    "reader does not swizzle",
    "last key dropped",
    "mask one key too far",
}
"""Of a kind that a test of the runtime or of every rung reports too: not in CI's fast path."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.mutants] * (n in COVERED)) for n in BUGS])
def test_a_planted_bug_is_reported(name: str, tmp_path: Path) -> None:
    rung, old, new, header = BUGS[name]
    mutant = mutants.replaced(LADDER[rung], name, old, new, header)
    (library,) = mutants.build([mutant], tmp_path)
    cases = [*WIDE, *SPLIT] if LADDER[rung].min_arch >= HOPPER else CASES
    assert mutants.noticed(library, cases, OPTIONS[:1]) is not None


@pytest.mark.mutants
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rung", [r.id for r in LADDER.rungs])
def test_every_synchronisation_is_needed(rung: str, tmp_path: Path) -> None:
    """A statement that this rung's configuration leaves out changes no code: it is no mutant."""
    source = (paths.ROOT / LADDER[rung].source).read_text()
    plans = LADDER.has(LADDER[rung], "splits")
    persists = LADDER.has(LADDER[rung], "persistent")
    options = [replace(o, multiprocessors=sms) for o in OPTIONS for sms in (SMS if plans or persists else SMS[:1])]
    cases = [*(WIDE if LADDER[rung].min_arch >= HOPPER else ()), *CASES, *(SPLIT if plans else ())]
    found = [mutants.Mutant(LADDER[rung], "itself", source), *mutants.without_each_synchronisation(LADDER[rung])]
    itself, *libraries = mutants.build(found, tmp_path)
    survivors = [
        mutant.name
        for mutant, library in zip(found[1:], libraries, strict=True)
        if not (mutant.redundant and LADDER.has(LADDER[rung], mutant.redundant))
        and mutants.code(library) != mutants.code(itself)
        and not mutants.noticed(library, cases, options)
        and not mutants.refused_by_ptxas(library, LADDER[rung])
    ]
    assert survivors == []
