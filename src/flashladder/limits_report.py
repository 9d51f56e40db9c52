"""What `flashladder limits` shows: floors and ranked designs, beside each what recorded runs measured on that GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from statistics import median

from flashladder import bottleneck, limits, ncu, rundir, tables
from flashladder.ladder import gpu_named
from flashladder.limits import Design, Fit, Floor, Prediction, Reason, Resource
from flashladder.model import Blocking, BuildRecord, Cell, CellTiming, Gpu, Record
from flashladder.rundir import RunDir
from flashladder.tables import NOT_APPLICABLE, NOT_MEASURED, Table, number

MMA_REGISTERS, WGMMA = 3, 4
"""Product::mma_registers and Product::wgmma of kernel/include/rung.h."""
LATER_FIELDS = {
    "splits": 1,
    "key_warps": 1,
    "persistent": 0,
    "key_groups": 1,
    "rest_first": 0,
    "short_gap": 0,
    "paced": 0,
    "halves_last": 0,
    "tma_store": 0,
    "quick_repair": 0,
    "first_look": 0,
    "balanced": 0,
    "early_combine": 0,
    "multicast": 0,
    "short_epilogue": 0,
    "early_item": 0,
    "early_launch": 0,
    "short_join": 0,
    "few_divisions": 0,
    "last_joins": 0,
    "prescaled_q": 0,
    "sum_column": 0,
    "software_exp2": 0,
    "ping_pong": 0,
    "tile_m_128": 0,
    "tile_n_128": 0,
    "stages_128": 0,
    "ping_pong_128": -1,
}
"""Those of a Config that the first records lack, as they stand unset."""
COUNTERS: dict[Resource, str] = {
    "tensor cores": bottleneck.TENSOR,
    "MUFU": bottleneck.XU,
    "issue slots": bottleneck.ISSUE,
    "shared memory": bottleneck.L1,
    "L2": bottleneck.L2,
    "DRAM": bottleneck.DRAM,
}


class Measured(Record, frozen=True, kw_only=True):
    """An arm whose kernel is one of the designs, as a run recorded it, and what the model says at that run's clock."""

    arm: str
    run: str
    design: Design
    us: float
    """Median."""
    sm_clock_mhz: float
    predicted_us: float


class Counter(Record, frozen=True, kw_only=True):
    """How busy a profiled arm kept a resource, in per cent of its peak, and what the model says."""

    arm: str
    resource: Resource
    metric: str
    predicted: float
    measured: float


class Limits(Record, frozen=True, kw_only=True):
    gpu: str
    source: str
    cell: Cell
    boost_mhz: float
    floors: tuple[Floor, ...]
    designs: tuple[Prediction, ...]
    """Those that fit, at the boost clock, the fastest first."""
    unfit: dict[Reason, int]
    """How many further designs have too few registers or too little shared memory."""
    measured: tuple[Measured, ...]
    counters: tuple[Counter, ...]


def limits_of(cell: Cell, gpu: Gpu, runs: Sequence[RunDir]) -> Limits:
    """Everything about a cell on a GPU; `runs` are those to look for measurements in, the first found of an arm."""
    ranking = limits.rank(cell, gpu, gpu.boost_hz)
    here = [run for run in runs if _is_of(run, gpu)]
    return Limits(
        gpu=gpu.name,
        source=gpu.source,
        cell=cell,
        boost_mhz=gpu.boost_hz / 1e6,
        floors=tuple(limits.floors(cell, gpu, gpu.boost_hz)),
        designs=ranking.predictions,
        unfit=ranking.unfit,
        measured=tuple(sorted(_measured(cell, gpu, here), key=lambda m: m.us)),
        counters=tuple(_counters(cell, gpu, here)),
    )


def runs_to_look_in() -> list[RunDir]:
    """The pinned run, then every other."""
    pinned = [] if rundir.pinned_id() is None else [rundir.find()]
    return [*pinned, *(run for run in rundir.recorded() if run not in pinned)]


def _is_of(run: RunDir, gpu: Gpu) -> bool:
    name = run.info.machine.gpu
    return name is not None and gpu_named(name) == gpu


def design_of(build: BuildRecord, cell: Cell, gpu: Gpu) -> Design | None:
    """The design that a library computes the cell with; None of another kind, or where its choice is not known.

    A rung that chooses among tiles takes its own where that gives every SM a block.
    """
    config = LATER_FIELDS | build.config
    if not build.config or config["product"] not in (MMA_REGISTERS, WGMMA) or not config["stages"]:
        return None
    blocking = Blocking.of(config, cell.shape.head_dim)
    shape = cell.shape
    blocks = shape.batch * shape.heads_q * ceil(shape.seq_q / blocking.tile_m)
    if not config["splits"] and (blocks < gpu.sms or 2 * shape.seq_q <= blocking.tile_m):
        return None
    if config["product"] == WGMMA:
        if not config["persistent"]:
            return None
        return Design(
            instruction="wgmma", tile_m=blocking.tile_m, tile_n=blocking.tile_n, stages=max(blocking.stages, 2)
        )
    return Design(
        instruction="mma.sync",
        tile_m=blocking.tile_m,
        tile_n=blocking.tile_n,
        stages=blocking.stages,
        warp_rows=blocking.tile_m * config["key_warps"] * 32 // config["threads"],
        key_warps=config["key_warps"],
    )


def _measured(cell: Cell, gpu: Gpu, runs: Sequence[RunDir]) -> Iterator[Measured]:
    seen: set[str] = set()
    for run in runs:
        timing = next((t for t in run.timings() if t.cell == cell), None)
        if timing is None:
            continue
        builds = {b.rung: b for b in run.builds()}
        clock = _clock_mhz(timing)
        for arm in timing.arms:
            build = builds.get(arm.arm)
            design = design_of(build, cell, gpu) if build is not None and arm.arm not in seen and arm.ns else None
            fitted = limits.fit(design, cell.shape.head_dim, gpu) if design is not None else None
            if not isinstance(fitted, Fit) or clock is None:
                continue
            seen.add(arm.arm)
            yield Measured(
                arm=arm.arm,
                run=run.info.id,
                design=fitted.design,
                us=median(ns for pair in arm.ns for ns in pair) / 1e3,
                sm_clock_mhz=clock,
                predicted_us=limits.predict(fitted, cell, gpu, 1e6 * clock).us,
            )


def _clock_mhz(timing: CellTiming) -> float | None:
    clocks = [t.sm_clock_mhz for t in timing.telemetry if t.sm_clock_mhz is not None]
    return float(median(clocks)) if clocks else None


def _counters(cell: Cell, gpu: Gpu, runs: Sequence[RunDir]) -> Iterator[Counter]:
    """Of the fastest profiled arm that is one of the designs."""
    for run in runs:
        builds = {b.rung: b for b in run.builds()}
        found = []
        for profile in run.profiles():
            build = builds.get(profile.arm)
            if profile.cell != cell or profile.cause is not None or build is None:
                continue
            design = design_of(build, cell, gpu)
            fitted = limits.fit(design, cell.shape.head_dim, gpu) if design is not None else None
            metrics = {name: m.value for name, m in ncu.main_kernel(profile.kernels).metrics.items()}
            if isinstance(fitted, Fit) and bottleneck.DURATION in metrics:
                found.append((metrics[bottleneck.DURATION], profile.arm, fitted, metrics))
        if found:
            _, arm, fitted, metrics = min(found, key=lambda f: f[:2])
            shares = limits.predict(fitted, cell, gpu, gpu.boost_hz).shares
            for resource, metric in COUNTERS.items():
                if resource in shares and metric in metrics:
                    predicted = 100 * shares[resource]
                    yield Counter(
                        arm=arm, resource=resource, metric=metric, predicted=predicted, measured=metrics[metric]
                    )
            return


# --- for a terminal -------------------------------------------------------------------------------------------------


def text(found: Limits, most: int) -> str:
    """Four tables; of the designs the first `most`."""
    parts = [
        f"{found.cell.id} on {found.gpu}, SM clock {found.boost_mhz:.0f} MHz (boost). Floors, each resource alone:",
        tables.terminal(_floor_table(found)),
        f"Designs that fit, the first {min(most, len(found.designs))} of {len(found.designs)}"
        + "".join(f"; {count} more lack {reason}" for reason, count in sorted(found.unfit.items()))
        + ":",
        tables.terminal(_design_table(found, most)),
    ]
    if found.measured:
        parts += [
            "Measured, beside the prediction at the SM clock of the measurement:",
            tables.terminal(_measured_table(found)),
        ]
    else:
        parts.append("Measured: nothing; no recorded run has this cell on this GPU in one of the designs.")
    if found.counters:
        parts += [
            f"How busy {found.counters[0].arm} keeps what, in per cent of the peak:",
            tables.terminal(_counter_table(found)),
        ]
    return "\n\n".join(parts)


def _floor_table(found: Limits) -> Table:
    longest = max(f.us for f in found.floors if f.us is not None)
    return Table(
        ("resource", "work", "floor (us)", "of the longest"),
        tuple(
            (
                f.resource,
                f"{f.work:.4g} {f.unit}",
                "rate not known" if f.us is None else number(f.us),
                NOT_APPLICABLE if f.us is None else f"{100 * f.us / longest:.0f} %",
            )
            for f in found.floors
        ),
    )


def _design_table(found: Limits, most: int) -> Table:
    fastest: dict[tuple[str, int, int, int], Measured] = {}
    for m in found.measured:
        fastest.setdefault(_key(m.design), m)
    rows = []
    for p in found.designs[:most]:
        fit, design = p.fit, p.fit.design
        measured = fastest.get(_key(design)) if design.splits == 1 else None
        rows.append(
            (
                design.name,
                str(design.stages),
                f"{fit.needed_registers} of {fit.compute_registers}",
                number(fit.shared_bytes / 1024),
                str(fit.blocks_per_sm),
                f"{100 * fit.occupancy:.0f} %",
                str(p.grid),
                number(p.waves),
                f"{100 * (1 - p.useful):.0f} %",
                f"{100 * (1 - p.balance):.0f} %",
                p.bound,
                number(p.us),
                NOT_MEASURED if measured is None else f"{number(measured.us)} ({measured.arm})",
            )
        )
    columns = ("design", "stages", "registers", "smem (KB)", "blocks/SM", "occupancy", "blocks", "waves")
    losses = ("lost to tiles", "lost to the tail", "bound by", "predicted (us)", "measured (us)")
    return Table((*columns, *losses), tuple(rows))


def _key(design: Design) -> tuple[str, int, int, int]:
    return design.instruction, design.tile_m, design.tile_n, design.warp_rows


def _measured_table(found: Limits) -> Table:
    longest = max(f.us for f in found.floors if f.us is not None)
    return Table(
        (
            "kernel",
            "design",
            "stages",
            "MHz",
            "predicted (us)",
            "measured (us)",
            "over prediction",
            "over floor",
            "run",
        ),
        tuple(
            (
                m.arm,
                m.design.name,
                str(m.design.stages),
                f"{m.sm_clock_mhz:.0f}",
                number(m.predicted_us),
                number(m.us),
                number(m.us / m.predicted_us),
                number(m.us / longest),
                m.run,
            )
            for m in found.measured
        ),
    )


def _counter_table(found: Limits) -> Table:
    return Table(
        ("resource", "predicted", "measured", "metric"),
        tuple((c.resource, f"{c.predicted:.0f}", f"{c.measured:.0f}", c.metric) for c in found.counters),
    )
