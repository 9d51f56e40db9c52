"""What a call launches, and whether that is the grid which its own Config declares: work that is not there cannot be
skipped unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashladder import native
from flashladder.model import Cell, Record

if TYPE_CHECKING:
    from flashladder.arms import LoadedArm
    from flashladder.arrays import Memory
    from flashladder.check import Tensors
    from flashladder.inputs import Case

SINGLE = 0
"""Of Grid in kernel/include/rung.h."""
HOPPERS_OWN = (0, 3, 4)
"""Tiles of which persistent blocks may take one after the other."""
PLANNED_ROWS = {1: 32, 2: 16, 3: 128, 4: 64}
"""Rows of the further tiles, by their number there."""
COMBINE_ROWS = 4
"""Of a block that joins parts (kernel/include/launch.cuh)."""
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of events in a trace that a stream runs."""


class Launched(Record, frozen=True, kw_only=True):
    """One call's launches. None: what runs on the CPU's own arrays launches nothing that could be seen."""

    cell: Cell
    blocks: int | None
    kernels: tuple[str, ...] | None
    """Names, where CUPTI tells them."""
    streams: int | None
    config: dict[str, int]
    """The Config that a library declares; empty of a script."""
    plan: tuple[int, int] | None
    """Tile and number of splits that it chooses."""
    multiprocessors: int


def observe(arm: LoadedArm, case: Case, memory: Memory, seed: int) -> Launched:
    """Run one case and see what it launches."""
    from flashladder.arrays import CudaMemory
    from flashladder.check import POISONS, allocate, pose, run_round

    problem, tensors = pose(case, memory, seed)[0], allocate(case, memory)
    memory.begin(case.id)
    blocks: int | None = None
    kernels: tuple[str, ...] | None = None
    streams: int | None = None
    multiprocessors = 1

    if isinstance(memory, CudaMemory):
        blocks, kernels, streams = _on_gpu(arm, case, tensors)
        multiprocessors = memory.torch.cuda.get_device_properties(0).multi_processor_count
    else:
        with arm.context():
            run_round(arm, case, memory, tensors, problem.inputs, POISONS[0])
        counters = getattr(memory, "counters", None)
        if counters is not None:
            blocks, multiprocessors = counters["blocks"], memory.multiprocessors  # type: ignore[attr-defined]
    library = None if arm.spec.library is None else native.load(Path(arm.spec.library))
    return Launched(
        cell=case.cell,
        blocks=blocks,
        kernels=kernels,
        streams=streams,
        config={} if library is None else library.config,
        plan=None if library is None else library.plan(case.cell, multiprocessors),
        multiprocessors=multiprocessors,
    )


def _on_gpu(arm: LoadedArm, case: Case, t: Tensors) -> tuple[int | None, tuple[str, ...] | None, int | None]:
    """Blocks and kernels of the second call, the first may compile or allocate; and streams, with the caller's.

    None where CUPTI shows not even the caller's own kernel.
    """
    import torch

    from flashladder.profiling import traced

    marker = torch.zeros(1, device="cuda")

    def call() -> None:
        marker.fill_(1.0)  # a kernel on the caller's stream
        arm(t.q.view, t.k.view, t.v.view, t.o.view, t.lse.view, case.softmax_scale, case.cell.causal)
        torch.cuda.synchronize()

    with arm.context():
        call()
        with traced() as events:
            call()
    work = sorted((e for e in events if e.get("cat") in WORK), key=lambda e: float(e["ts"]))
    return launches_of(work) if work and work[0]["cat"] == "kernel" else (None, None, None)


def launches_of(work: Sequence[Mapping[str, Any]]) -> tuple[int, tuple[str, ...], int]:
    """Blocks, kernels and streams of the events of WORK in a trace, the first of which is the caller's own kernel."""
    own = [event for event in work[1:] if event["cat"] == "kernel"]
    blocks = sum(prod(event["args"]["grid"]) for event in own if "grid" in event.get("args", {}))
    streams = {event.get("args", {}).get("stream") for event in work}
    return blocks, tuple(str(event["name"]).split("(")[0] for event in own), len(streams)


def expected_blocks(launched: Launched) -> set[int]:
    """How many thread blocks its Config may mean: one a tile, or as many as the GPU has room for at once."""
    config, s = launched.config, launched.cell.shape
    if config["grid"] == SINGLE:
        return {1}
    own = config["tile_m_128"] if s.head_dim > 64 and config["tile_m_128"] else config["tile_m"]
    tile, splits = launched.plan or (0, 1)
    heads = s.heads_kv if launched.plan and config["pack_heads"] and s.seq_q == 1 else s.heads_q
    count = s.batch * heads * -(-s.seq_q // PLANNED_ROWS.get(tile, own or s.seq_q or 1))
    if config["persistent"] and tile in HOPPERS_OWN:
        persistent = min(launched.multiprocessors, count)
        return {persistent} if tile == 0 else {persistent, count}
    combining = -(-s.batch * s.heads_q * s.seq_q // COMBINE_ROWS) if splits > 1 else 0
    return {count * splits + combining}


def fault(launched: Launched, name: str) -> str | None:
    """What is wrong with the launches of the candidate of that name; None when nothing is."""
    if launched.streams is not None and launched.streams > 1:
        return f"its work is on {launched.streams} streams, expected the caller's alone"
    if launched.kernels is not None and not launched.kernels:
        return "it launches no kernel"
    if not launched.config:
        return None
    foreign = [kernel for kernel in launched.kernels or () if not kernel.startswith(name)]
    if foreign:
        return f"it launches {foreign[0]}, expected kernels named {name}..."
    expected = expected_blocks(launched)
    if launched.blocks is not None and launched.blocks not in expected:
        wanted = " or ".join(map(str, sorted(expected)))
        return f"it launches {launched.blocks} thread blocks in {launched.cell.id}, its Config means {wanted}"
    return None
