"""What limits a kernel, from its counters: a table of rules. Pure.

A rule reads the metrics that it names, holds when its threshold is passed, and bounds from above the fraction of the
time that mending it could save. Rules whose metrics are missing are inconclusive and say so; none is padded out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashladder import flops, ncu
from flashladder.model import ArmStats, Bottlenecks, Cell, Finding, NcuRecord

MOST_FINDINGS = 3
LEAST_SCORE = 0.02

DURATION = "gpu__time_duration.sum"
GRID = "launch__grid_size"
WAVES = "launch__waves_per_multiprocessor"
ACTIVE, ELAPSED = "sm__cycles_active.avg", "sm__cycles_elapsed.max"
DRAM, DRAM_BYTES = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "dram__bytes.sum"
L2, L2_BYTES = "lts__throughput.avg.pct_of_peak_sustained_elapsed", "lts__t_bytes.sum"
L1 = "l1tex__throughput.avg.pct_of_peak_sustained_active"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
XU, ALU, FMA = (f"sm__inst_executed_pipe_{pipe}.avg.pct_of_peak_sustained_active" for pipe in ("xu", "alu", "fma"))
MMA, GMMA = "sm__inst_executed_pipe_tensor.sum", "sm__inst_executed_pipe_tensor_op_gmma.sum"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
ELIGIBLE = "smsp__warps_eligible.avg.per_cycle_active"
INSTRUCTIONS = "smsp__inst_executed.sum"
LOCAL = ("smsp__inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_st.sum")
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = tuple(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum" for op in ("ld", "st"))
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"
LIMITS = {
    f"launch__occupancy_limit_{name}": fix
    for name, fix in {
        "registers": "fewer registers a thread: smaller tiles, launch bounds",
        "shared_mem": "less shared memory a block: smaller tiles, fewer stages",
        "warps": "smaller blocks",
        "blocks": "larger blocks",
    }.items()
}

STALLS = {
    "long_scoreboard": "waits for global memory: cp.async or TMA with more stages",
    "short_scoreboard": "waits for shared memory or MUFU: ldmatrix, swizzle, fewer trips through shared memory",
    "barrier": "waits at barriers: specialise warps, fewer barriers a tile",
    "wait": "fixed latency of dependent instructions: more independent work a warp",
    "math_pipe_throttle": "a math pipe is full: fewer instructions of its kind",
    "mio_throttle": "the queue of shared memory and special functions is full: wider accesses, ldmatrix",
    "lg_throttle": "the queue of global memory is full: 16-byte accesses",
    "no_instruction": "waits for instructions: a smaller loop body",
    "gmma": "waits for wgmma: overlap it with the softmax",
}
"""Reason -> what it is and what to do. `not_selected` is no stall: another warp issued."""


def stall(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


@dataclass(frozen=True)
class Facts:
    """The counters of one kernel, by name in base units, and where it ran."""

    metrics: Mapping[str, float]
    cell: Cell
    arch: str | None
    sms: int | None
    device_us: float | None = None
    host_us: float | None = None

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def share(self, name: str) -> float:
        """A percentage as a fraction."""
        return self.metrics[name] / 100

    @property
    def busiest_pipe(self) -> float:
        return max(self.share(pipe) for pipe in PIPES)

    @property
    def conflicts(self) -> float:
        """The share of shared memory's wavefronts that bank conflicts add."""
        return sum(self.metrics[name] for name in CONFLICTS) / self.metrics[WAVEFRONTS] if self[WAVEFRONTS] else 0.0

    @property
    def stalls(self) -> dict[str, float]:
        """Reason -> cycles an issued instruction, those that were measured."""
        return {r: self.metrics[stall(r)] for r in STALLS if stall(r) in self.metrics}


PIPES = (TENSOR, XU, ALU, FMA)


@dataclass(frozen=True)
class Hit:
    metric: str
    value: float
    score: float
    fix: str


@dataclass(frozen=True)
class Rule:
    name: str
    needs: tuple[str, ...]
    threshold: float
    test: Callable[[Facts, float], Hit | None]
    """(facts, threshold) -> what was found; None when the rule does not hold."""


def _host_bound(f: Facts, threshold: float) -> Hit | None:
    if f.host_us is None or f.device_us is None or f.host_us <= threshold * f.device_us:
        return None
    fix = "capture the calls in a CUDA graph, or fuse them"
    return Hit("host_us / device_us", f.host_us / f.device_us, 1 - f.device_us / f.host_us, fix)


def _grid_too_small(f: Facts, threshold: float) -> Hit | None:
    if f.sms is None or f[GRID] >= threshold * f.sms:
        return None
    return Hit(GRID, f[GRID], 1 - f[GRID] / f.sms, "more blocks: smaller tiles, split keys")


def _tail(f: Facts, threshold: float) -> Hit | None:
    idle = 1 - f[ACTIVE] / f[ELAPSED]
    if idle <= threshold or (f.sms is not None and f[GRID] < f.sms):
        return None
    return Hit(f"1 - {ACTIVE} / {ELAPSED}", idle, idle, "persistent blocks, the longest tiles first")


def _dram(f: Facts, threshold: float) -> Hit | None:
    if f.share(DRAM) < threshold:
        return None
    wasted = 1 - flops.compulsory_bytes(f.cell) / f[DRAM_BYTES]
    return Hit(DRAM, f.share(DRAM), wasted, "reuse: larger tiles, an order of blocks that shares K and V in L2")


def _l2(f: Facts, threshold: float) -> Hit | None:
    if f.share(L2) < threshold:
        return None
    wasted = 1 - flops.compulsory_bytes(f.cell) / f[L2_BYTES]
    return Hit(L2, f.share(L2), wasted * f.share(L2), "larger tiles, TMA multicast")


def _conflicts(f: Facts, threshold: float) -> Hit | None:
    share = f.conflicts
    top = sorted(f.stalls, key=f.stalls.__getitem__, reverse=True)[:3]
    if share <= threshold or (f.share(L1) < 0.4 and not {"mio_throttle", "short_scoreboard"} & set(top)):
        return None
    metric = "bank conflicts / l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
    return Hit(metric, share, share * f.share(L1), "XOR swizzle or padding of shared-memory rows")


def _shared_bandwidth(f: Facts, threshold: float) -> Hit | None:
    """Without what bank conflicts alone keep busy: those have a rule and a cure of their own."""
    busy = f.share(L1) * (1 - f.conflicts)
    if busy < threshold:
        return None
    score = (busy - f.busiest_pipe) / busy
    return Hit(L1, f.share(L1), score, "more rows a warp, operands in registers: fewer shared-memory reads a product")


def _no_wgmma(f: Facts, threshold: float) -> Hit | None:
    if f.arch is None or not f.arch.startswith("sm_90") or f[MMA] <= threshold or f[GMMA] > 0:
        return None
    return Hit(GMMA, 0.0, f.share(TENSOR) / 3, "wgmma with TMA: 4096 for 2731 FLOP a clock and SM")


def _tensor(f: Facts, threshold: float) -> Hit | None:
    if f.share(TENSOR) < threshold:
        return None
    return Hit(TENSOR, f.share(TENSOR), 1 - f.share(TENSOR), "near the roof: skip masked tiles, fewer FLOPs")


def _mufu(f: Facts, threshold: float) -> Hit | None:
    xu = f.share(XU)
    if not xu or (xu < threshold and xu <= f.share(TENSOR)):
        return None
    others = max(f.share(pipe) for pipe in PIPES if pipe != XU)
    return Hit(XU, xu, xu - others, "2^x on FMA pipes for a part, scale folded in, ping-pong of two tiles")


def _issue(f: Facts, threshold: float) -> Hit | None:
    issue = f.share(ISSUE)
    if issue < threshold:
        return None
    return Hit(ISSUE, issue, issue - f.share(TENSOR), "fewer instructions: wider accesses, mma for FMAs, unrolling")


def _latency(f: Facts, threshold: float) -> Hit | None:
    if f.busiest_pipe >= threshold or not f.stalls or not f[LATENCY]:
        return None
    reason = max(f.stalls, key=f.stalls.__getitem__)
    share = f.stalls[reason] / f[LATENCY]
    return Hit(stall(reason), f.stalls[reason], min(share, 1.0) * (1 - f.busiest_pipe), STALLS[reason])


def _spills(f: Facts, threshold: float) -> Hit | None:
    share = sum(f[name] for name in LOCAL) / f[INSTRUCTIONS]
    if share <= threshold:
        return None
    return Hit("local-memory instructions / all", share, share, "launch bounds, a smaller tile: registers spill")


def _occupancy(f: Facts, threshold: float) -> Hit | None:
    """Low confidence: more warps help only where latency is what is waited for."""
    fills = f[WAVES] >= 1
    if not fills or f[ELIGIBLE] >= 1 or f.share(ISSUE) >= threshold or f.busiest_pipe >= threshold:
        return None
    limit = min(LIMITS, key=lambda name: f[name])
    return Hit(limit, f[limit], (1 - f.share(ISSUE)) / 2, LIMITS[limit])


RULES = (
    Rule("host-bound", (), 1.2, _host_bound),
    Rule("grid too small", (GRID,), 1.0, _grid_too_small),
    Rule("tail", (GRID, ACTIVE, ELAPSED), 0.05, _tail),
    Rule("DRAM", (DRAM, DRAM_BYTES), 0.6, _dram),
    Rule("L2", (L2, L2_BYTES), 0.6, _l2),
    Rule("bank conflicts", (WAVEFRONTS, *CONFLICTS, L1), 0.05, _conflicts),
    Rule("shared-memory bandwidth", (L1, WAVEFRONTS, *CONFLICTS, *PIPES), 0.8, _shared_bandwidth),
    Rule("no wgmma", (MMA, GMMA, TENSOR), 0.0, _no_wgmma),
    Rule("tensor cores", (TENSOR,), 0.75, _tensor),
    Rule("MUFU", PIPES, 0.6, _mufu),
    Rule("issue slots", (ISSUE, TENSOR), 0.8, _issue),
    Rule("latency", (*PIPES, LATENCY), 0.6, _latency),
    Rule("spills", (*LOCAL, INSTRUCTIONS), 0.01, _spills),
    Rule("occupancy", (WAVES, ELIGIBLE, ISSUE, *PIPES, *LIMITS), 0.6, _occupancy),
)
HOPPER_ALONE = {"no wgmma"}


def usable(metrics: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The metrics without percentages above 100, and the names of those."""
    flagged = tuple(sorted(name for name, value in metrics.items() if "pct" in name and value > 100.5))
    return {name: value for name, value in metrics.items() if name not in flagged}, flagged


def diagnose(record: NcuRecord, stats: ArmStats | None, arch: str | None, sms: int | None) -> Bottlenecks:
    """The findings on a profiled arm's main kernel, at most MOST_FINDINGS of them, the largest score first."""
    kernel = ncu.main_kernel(record.kernels)
    metrics, flagged = usable({name: metric.value for name, metric in kernel.metrics.items()})
    facts = Facts(
        metrics=metrics,
        cell=record.cell,
        arch=arch,
        sms=sms,
        device_us=stats.device_us.median if stats is not None and stats.device_us is not None else None,
        host_us=stats.host_us.median if stats is not None and stats.host_us is not None else None,
    )
    hits: list[Finding] = []
    inconclusive = {}
    for rule in RULES:
        if rule.name in HOPPER_ALONE and not (arch or "").startswith("sm_90"):
            continue
        if lacking := tuple(name for name in rule.needs if name not in metrics):
            inconclusive[rule.name] = lacking
            continue
        hit = rule.test(facts, rule.threshold)
        if hit is not None and hit.score >= LEAST_SCORE:
            hits.append(
                Finding(
                    rule=rule.name,
                    metric=hit.metric,
                    value=rounded(hit.value),
                    threshold=rule.threshold,
                    score=rounded(min(hit.score, 1.0)),
                    fix=hit.fix,
                )
            )
    hits.sort(key=lambda finding: -finding.score)
    return Bottlenecks(
        cell=record.cell,
        arm=record.arm,
        kernel=kernel.name,
        findings=tuple(hits[:MOST_FINDINGS]),
        inconclusive=inconclusive,
        flagged=flagged,
    )


def rounded(x: float) -> float:
    return float(f"{x:.6g}")
