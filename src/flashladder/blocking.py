"""How a Hopper rung divides a problem among warpgroups and tiles: the candidates that `flashladder tune` times.

Registers follow from the number of warpgroups (kernel/include/hopper_forward.cuh): each gets the largest share that
setmaxnreg allows. The choice of each head dimension and mask stands in experiments/tune.toml; the kernel is held to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean, median

import msgspec

from flashladder import paths
from flashladder.model import Blocking, BuildRecord, CellTiming, CheckRecord, Mask, Rung, Tuning
from flashladder.tables import Table, number


def candidate_rung(blocking: Blocking, parent: Rung) -> Rung:
    """The parent with another blocking; writes its source below build/."""
    file = paths.BUILD / "tune" / f"{blocking.name}.cu"
    file.parent.mkdir(parents=True, exist_ok=True)
    changes = "".join(f"  config.{field} = {value};\n" for field, value in blocking.fields.items())
    text = (
        '#include "hopper_forward.cuh"\n#include "hopper_tuned.h"\n\nusing namespace flashladder;\n\n'
        "constexpr Config kConfig = [] {\n  Config config = kHopper;\n"
        f"{changes}  return config;\n}}();\n\nFLASHLADDER_TMA_RUNG({blocking.name}, kConfig, HopperForward)\n"
    )
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    return msgspec.structs.replace(
        parent, id=blocking.name, source=str(file.relative_to(paths.ROOT)), parent=None, predictions=(), sass=()
    )


def spills(build: BuildRecord) -> str | None:
    """Why ptxas makes a candidate useless: spills of its own head dimension's kernels."""
    own = [k for k in build.kernels if k.kernel.endswith(build.rung.split("_")[0])]
    bytes_spilled = max((k.spill_store_bytes for k in own), default=0)
    return f"spills {bytes_spilled} bytes a thread" if bytes_spilled else None


def untimed(builds: Sequence[BuildRecord], checks: Sequence[CheckRecord]) -> dict[str, str]:
    """Candidate -> why it was not timed."""
    wrong = {c.arm: f"{c.case}: {c.reason}" for c in checks if c.status not in ("pass", "unsupported")}
    reasons = {b.rung: b.reason or spills(b) or wrong.get(b.rung) for b in builds}
    return {name: reason for name, reason in reasons.items() if reason}


def scores(timings: Sequence[CellTiming], names: Sequence[str]) -> dict[tuple[int, Mask], dict[str, float]]:
    """(head dimension, mask) -> candidate -> geometric mean, over the cells, of its median time over the least."""
    ratios: dict[tuple[int, Mask], dict[str, list[float]]] = {}
    for timing in timings:
        times = {a.arm: median(ns for pair in a.ns for ns in pair) for a in timing.arms if a.arm in names and a.ns}
        group = ratios.setdefault((timing.cell.shape.head_dim, timing.cell.mask), {})
        for name, time in times.items():
            group.setdefault(name, []).append(time / min(times.values()))
    cells = {key: max(map(len, group.values()), default=0) for key, group in ratios.items()}
    return {
        key: {name: exp(fmean(map(log, found))) for name, found in group.items() if len(found) == cells[key]}
        for key, group in ratios.items()
        if group
    }


def table(found: dict[tuple[int, Mask], dict[str, float]], tuning: Tuning) -> Table:
    """A row a candidate: its time over the least of its head dimension, for each mask; the choices are marked."""
    chosen = {(c.head_dim, c.mask): c.blocking for c in tuning.choice}

    def text(head_dim: int, mask: Mask, name: str) -> str:
        ratio = found.get((head_dim, mask), {}).get(name)
        return "not timed" if ratio is None else number(ratio) + (" *" if chosen[head_dim, mask] == name else "")

    rows = [(c.head_dim, f"{c.tile_m} x {c.tile_n}", c.stages, c.ping_pong, c.name) for c in sorted(tuning.candidate)]
    return Table(
        ("head_dim", "tile", "stages", "turns", "full", "causal"),
        tuple(
            (str(d), tile, str(stages), "yes" if turns else "no", text(d, "full", name), text(d, "causal", name))
            for d, tile, stages, turns, name in rows
        ),
    )
