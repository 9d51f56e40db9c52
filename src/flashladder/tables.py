"""Tables as pure functions: diagnosis records -> rows of text -> Markdown or LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tabulate import tabulate

from flashladder import bottleneck, flops, ncu
from flashladder.diagnose import Results
from flashladder.ladder import Ladder, Leg, gpu_named
from flashladder.model import (
    Agreement,
    ArmStats,
    BuildRecord,
    Cell,
    CheckRecord,
    Comparison,
    DtypeName,
    KernelResources,
    NcuRecord,
    Past,
    PredictionOutcome,
    Quote,
    Rung,
    RunInfo,
    ValueRatio,
)
from flashladder.native import kernel_head_dim
from flashladder.peers import PEERS, Peer
from flashladder.summary import champion, sets_of

NOT_MEASURED = "not measured"
NOT_APPLICABLE = "-"
REASON_CHARS = 100


@dataclass(frozen=True)
class Table:
    """Plain text; escaping belongs to the output format."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def without(self, *columns: str) -> Table:
        keep = [i for i, name in enumerate(self.columns) if name not in columns]
        return Table(tuple(self.columns[i] for i in keep), tuple(tuple(row[i] for i in keep) for row in self.rows))

    def without_rows(self, *names: str) -> Table:
        """Those whose first column is one of `names` left out."""
        return Table(self.columns, tuple(row for row in self.rows if row[0] not in names))


def markdown(table: Table) -> str:
    """A GitHub table, without a final newline."""
    rows = [[markdown_escape(cell) for cell in row] for row in table.rows]
    return tabulate(rows, [markdown_escape(c) for c in table.columns], "github", disable_numparse=True)


def terminal(table: Table) -> str:
    """Columns aligned with spaces, without a final newline."""
    return tabulate(table.rows, table.columns, "simple", disable_numparse=True)


def latex(table: Table, columns: str | None = None) -> str:
    """A booktabs `tabular`, without a final newline, its columns flush left or as LaTeX's `columns` say.

    tabulate escapes the text.
    """
    rows = [[one_line(cell) for cell in row] for row in table.rows]
    text = tabulate(rows, table.columns, "latex_booktabs", disable_numparse=True)
    return text if columns is None else text.replace(f"{{{'l' * len(table.columns)}}}", f"{{{columns}}}", 1)


def markdown_escape(text: str) -> str:
    """`text` such that GitHub shows it as it is, in a table cell too.

    Underscores inside words and brackets that begin no link need no escape.
    """
    escaped = re.sub(r"[\\`*<>|~$&]|\](?=[\[(:])", r"\\\g<0>", one_line(text))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", escaped)


def latex_escape(text: str) -> str:
    """`text` as LaTeX shows it outside tables, by the same rules as tabulate's tables."""
    cell = tabulate([[one_line(text)]], tablefmt="latex_booktabs", disable_numparse=True).splitlines()[2]
    return cell.strip().removesuffix("\\\\").strip()


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- values ---------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """At least three significant digits, never an exponent."""
    return f"{value:.{_decimals(value)}f}"


def interval(value: float, ci: tuple[float, float]) -> str:
    """`value [low, high]`, all with the decimals of the value."""
    decimals = _decimals(value)
    return f"{value:.{decimals}f} [{ci[0]:.{decimals}f}, {ci[1]:.{decimals}f}]"


def _decimals(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0


def comparison(value: Comparison | None) -> str:
    """`ratio [low, high] verdict`; a verdict without numbers when the samples do not suffice."""
    if value is None:
        return NOT_MEASURED
    if value.ratio is None or value.ci is None:
        return value.verdict
    return f"{interval(value.ratio, value.ci)} {value.verdict}"


def shape(cell: Cell) -> str:
    """The sizes, as in "B2 H8 S512 D64"."""
    s = cell.shape
    heads = f"H{s.heads_q}" if s.heads_q == s.heads_kv else f"H{s.heads_q}/{s.heads_kv}"
    seq = f"S{s.seq_q}" if s.seq_q == s.seq_k else f"S{s.seq_q}/{s.seq_k}"
    return f"B{s.batch} {heads} {seq} D{s.head_dim}"


def _optional(value: float | None, unit: str = "") -> str:
    return NOT_MEASURED if value is None else number(value) + unit


def _shortened(reason: str) -> str:
    text = one_line(reason)
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 3].rstrip() + "..."


def time(arm: ArmStats | None, reasons: bool = True) -> str:
    """The time, or why there is none."""
    if arm is None:
        return NOT_MEASURED
    if arm.device_us is not None:
        return interval(arm.device_us.median, arm.device_us.ci)
    return f"{arm.status}: {_shortened(arm.reason or '')}" if reasons else arm.status


# --- the ladder -----------------------------------------------------------------------------------------------------


def ablation(
    results: Results, builds: Sequence[BuildRecord], info: RunInfo, leg: Leg | None = None, *, reasons: bool = True
) -> Table:
    """A leg of the ladder at its cell, the first by default, in ladder order, and the peers below it.

    A rung without numbers keeps its row.

    "x NAME" columns are NAME's time over the row's: the paired comparison where there is one, else of the medians.
    Without `reasons` what has no numbers says only its status.
    """
    leg = leg or results.ladder.legs[0]
    columns = (
        "rung",
        "change",
        "time (us)",
        "x parent",
        f"x {leg.rungs[0].id}",
        f"x {results.ladder.baseline}",
        "TFLOP/s",
        "% of roofline",
        "registers",
        "spills (B)",
        "smem (B)",
        "occupancy",
        "predicted x parent",
    )
    by_rung = {b.rung: b for b in builds}
    rungs = [
        (
            rung.id,
            rung.change,
            *_measured(results, leg, rung.id, rung.parent, reasons),
            *_resources(by_rung.get(rung.id), leg.cell, info),
            _prediction(results, rung.id),
        )
        for rung in leg.rungs
    ]
    peers = [
        (name, _peer(name), *_measured(results, leg, name, None, reasons), *[NOT_APPLICABLE] * 5)
        for name in results.peers
    ]
    return Table(columns, (*rungs, *peers))


def _peer(name: str) -> str:
    return f"peer: {PEERS[name].what}" if name in PEERS else "peer"


RESOURCE_COLUMNS = ("registers", "spills (B)", "smem (B)", "occupancy")


def _measured(results: Results, leg: Leg, name: str, parent: str | None, reasons: bool) -> tuple[str, ...]:
    """Time, the three ratios, TFLOP/s and % of roofline."""
    arm = results.arm(leg.cell, name)
    step = results.comparison(leg.cell, name, parent) if parent is not None else None
    return (
        time(arm, reasons),
        comparison(step) if parent is not None else NOT_APPLICABLE,
        _against(results, leg.cell, name, leg.rungs[0].id),
        _against(results, leg.cell, name, results.ladder.baseline),
        _optional(arm.tflops if arm is not None else None),
        _optional(arm.roofline_pct if arm is not None else None),
    )


def _against(results: Results, cell: Cell, name: str, other: str) -> str:
    if name == other:
        return NOT_APPLICABLE
    paired = results.comparison(cell, name, other)
    if paired is not None:
        return comparison(paired)
    return _optional(results.ratio(cell, name, other))


def resources(build: BuildRecord, cell: Cell, arch: str | None) -> KernelResources | None:
    """What the compiler gave the kernel of this cell's dtype and head dimension on `arch`."""
    name = f"{build.rung}_{cell.dtype}_d{cell.shape.head_dim}"
    for kernel in build.kernels:
        if kernel.kernel == name and arch is not None and kernel.arch.rstrip("a") == arch.rstrip("a"):
            return kernel
    return None


def _resources(build: BuildRecord | None, cell: Cell, info: RunInfo) -> tuple[str, ...]:
    """Registers, spills, shared memory and theoretical occupancy."""
    kernel = resources(build, cell, info.machine.arch) if build is not None else None
    if build is None or kernel is None:
        return (NOT_MEASURED,) * len(RESOURCE_COLUMNS)
    gpu = gpu_named(info.machine.gpu) if info.machine.gpu else None
    threads = build.config.get("threads")
    occupancy = NOT_MEASURED
    if gpu is not None and threads:
        occupancy = f"{100 * flops.occupancy(kernel.registers, kernel.shared_bytes, threads, gpu):.0f} %"
    spills = kernel.spill_store_bytes + kernel.spill_load_bytes
    return str(kernel.registers), str(spills), str(kernel.shared_bytes), occupancy


def _prediction(results: Results, rung: str) -> str:
    outcomes = [p for p in results.predictions if p.rung == rung and p.metric == "time"]
    return "; ".join(f"{expected(p)}: {p.outcome}" for p in outcomes) or NOT_APPLICABLE


def expected(outcome: PredictionOutcome) -> str:
    """The declared interval."""
    return f"{outcome.expected[0]:g} to {outcome.expected[1]:g}"


# --- other tables ---------------------------------------------------------------------------------------------------


def headline_cells(results: Results) -> list[Cell]:
    """The measured cells of the headline set, ordered by dtype, head dimension, mask and length."""
    cells = [cell for cell in results.cells if "headline" in sets_of(cell, results.l2(cell))]
    return sorted(cells, key=lambda c: (c.dtype, c.shape.head_dim, c.causal, c.shape.seq_k, c.shape))


def headline(results: Results, dtype: DtypeName | None = None) -> Table:
    """TFLOP/s by shape: the fastest rung of each cell and every peer. What was not timed says so.

    Of one `dtype` the peers that were timed in it alone.
    """
    baseline = results.ladder.baseline
    cells = [cell for cell in headline_cells(results) if dtype in (None, cell.dtype)]
    peers = [p for p in results.peers if dtype is None or any(results.median_us(cell, p) for cell in cells)]
    columns = ("shape", "mask", "dtype", "best rung", "TFLOP/s", f"x {baseline}", *peers)
    rows = []
    for cell in cells:
        best = results.fastest_rung(cell)
        numbers = (NOT_MEASURED,) * 3
        if best is not None:
            numbers = (best, _rate(results, cell, best), comparison(results.comparison(cell, best, baseline)))
        rows.append((shape(cell), cell.mask, cell.dtype, *numbers, *(_rate(results, cell, peer) for peer in peers)))
    table = Table(columns, tuple(rows))
    return table if dtype is None else table.without("dtype")


def step_table(results: Results, leg: Leg) -> Table:
    """A leg in few columns: time, the two ratios with their verdicts, and the prediction's outcome."""
    baseline = results.ladder.baseline
    rows = []
    for rung in leg.rungs:
        us = results.median_us(leg.cell, rung.id)
        step = ratio(results.comparison(leg.cell, rung.id, rung.parent)) if rung.parent else NOT_APPLICABLE
        judged = [p.outcome for p in results.predictions if p.rung == rung.id and p.metric == "time"]
        against = ratio(results.comparison(leg.cell, rung.id, baseline))
        rows.append((rung.id, _optional(us), step, against, "; ".join(judged) or NOT_APPLICABLE))
    return Table(("rung", "us", "x parent", f"x {baseline}", "prediction"), tuple(rows))


def against_peers(results: Results) -> Table:
    """The best of all rungs against each measured peer: verdicts over all cells, ratios over the headline set."""
    best = champion(results)
    large = set(headline_cells(results))
    rows = []
    for peer in results.peers:
        pairs = [
            (cell, c) for cell in results.cells if best and (c := results.comparison(cell, best, peer)) and c.ratio
        ]
        if not pairs:
            continue
        verdicts = [c.verdict for _, c in pairs]
        counts = "/".join(str(verdicts.count(v)) for v in ("faster", "same", "slower"))
        ratios = [c.ratio for cell, c in pairs if cell in large and c.ratio]
        spread = (math.exp(fmean(map(math.log, ratios))), min(ratios), max(ratios)) if ratios else ()
        rows.append((peer, counts, *(map(number, spread) if spread else (NOT_MEASURED,) * 3)))
    return Table(("peer", "faster/same/slower", "mean", "least", "most"), tuple(rows))


def peers(results: Results, info: RunInfo) -> Table:
    """What each peer is, and its speed against the baseline over the cells in which both were timed; last the roof."""
    baseline = results.ladder.baseline
    rows = []
    for name in results.peers:
        peer = PEERS.get(name)
        timed = [cell for cell in results.cells if results.median_us(cell, name) is not None]
        ratios = [factor for cell in timed if (factor := results.ratio(cell, name, baseline)) is not None]
        mean = number(math.exp(fmean(map(math.log, ratios)))) if ratios else NOT_MEASURED
        rows.append(
            (
                name,
                peer.what if peer is not None else NOT_APPLICABLE,
                _version(peer, info),
                f"{len(timed)} of {len(results.cells)}",
                NOT_APPLICABLE if name == baseline else mean,
            )
        )
    return Table(("peer", "what", "version", "cells timed", f"geometric mean x {baseline}"), tuple(rows))


def _version(peer: Peer | None, info: RunInfo) -> str:
    if peer is None or peer.distribution not in info.machine.peers:
        return "unknown"
    version = info.machine.peers[peer.distribution]
    return "not installed" if version is None else f"{peer.distribution} {version}"


def roofs(results: Results) -> Table:
    """cuBLAS's rates."""
    rows = [
        (roof.dtype, f"{roof.size} x {roof.size} x {roof.size}", interval(roof.tflops.median, roof.tflops.ci))
        for roof in results.roofs.values()
    ]
    return Table(("dtype", "product", "TFLOP/s"), tuple(rows))


def values(results: Results, name: str) -> Table:
    """An arm's times in microseconds by kind of values, each with its ratio to the time on normal ones beside it.

    The row of normal values has the median over those that stood beside the kinds.
    """
    mine = {(cell, kind): r for (cell, arm, kind), r in results.values.items() if arm == name}
    cells, kinds = dict.fromkeys(cell for cell, _ in mine), dict.fromkeys(kind for _, kind in mine)
    usual = [[r.normal_us.median for (at, _), r in mine.items() if at == cell and r.normal_us] for cell in cells]
    rows = [("normal", *(number(median(us)) if us else NOT_MEASURED for us in usual), NOT_APPLICABLE)]
    for kind in kinds:
        found = [mine.get((cell, kind)) for cell in cells]
        ratios = [r.ratio.median for r in found if r is not None and r.ratio is not None]
        rows.append((kind, *map(_by_values, found), number(max(ratios)) if ratios else NOT_MEASURED))
    return Table(("values", *(f"{shape(cell)} {cell.mask}" for cell in cells), "worst"), tuple(rows))


def _by_values(found: ValueRatio | None) -> str:
    if found is None:
        return NOT_MEASURED
    if found.us is None or found.ratio is None:
        return _shortened(found.reason or NOT_MEASURED)
    return f"{number(found.us.median)}, x {interval(found.ratio.median, found.ratio.ci)}"


def peer_times(results: Results) -> Table:
    """Median device time in microseconds of every peer in every cell, or why there is none."""
    rows = [
        (
            shape(cell),
            cell.mask,
            cell.dtype,
            *(_median(results.arm(cell, name)) for name in results.peers),
        )
        for cell in results.cells
    ]
    return Table(("shape", "mask", "dtype", *results.peers), tuple(rows))


def _median(arm: ArmStats | None) -> str:
    if arm is None:
        return NOT_MEASURED
    return arm.status if arm.device_us is None else number(arm.device_us.median)


def leave_one_out(results: Results, parent: str) -> Table:
    """A rung's variants: its time over theirs, a column for each cell of a type that one is read in."""
    variants = [v for v in results.ladder.variants if v.id in results.variants and v.parent == parent]
    cells = [c for c in results.cells if any(results.arm(c, v.id) and results.reads(c, v) for v in variants)]
    rows = [(v.id, v.change, *(ratio(results.variant_step(cell, v)) for cell in cells)) for v in variants]
    usual = results.ladder.reference.dtype
    names = [f"{shape(c)} {c.mask}" + (f" {c.dtype}" if c.dtype != usual else "") for c in cells]
    return Table(("variant", "change", *names), tuple(rows))


def accuracy(checks: Sequence[CheckRecord], ladder: Ladder) -> Table:
    """What an option of lower precision costs: the gate's largest errors, beside its parent's on the same cases."""
    rows = []
    for option in (v for v in ladder.variants if v.score_limit is not None):
        parent = {r.case: r for r in checks if r.arm == option.parent}
        taken = {r.cell.dtype for r in checks if r.arm == option.id and r.errors is not None}
        mine = [r for r in checks if r.arm == option.id and r.cell.dtype in taken]
        for head_dim in sorted({kernel_head_dim(r.cell.shape.head_dim) for r in mine}):
            here = [r for r in mine if kernel_head_dim(r.cell.shape.head_dim) == head_dim]
            ran = [r for r in here if r.errors is not None]
            what = (" or ".join(sorted(taken)), f"up to {head_dim}")
            left_out = str(sum(r.status == "unsupported" for r in here))
            rows.append((option.id, *what, left_out, *_largest_errors(ran)))
            beside = [
                parent[r.case] for r in ran if r.case in parent
            ]  # after a crash the parent's later cases are not run
            rows.append((option.parent or "", *what, NOT_APPLICABLE, *_largest_errors(beside)))
    columns = ("kernel", "dtype", "head_dim", "cases left out", "cases")
    return Table((*columns, "largest error of O", "largest error of the LSE"), tuple(rows))


def _largest_errors(records: Sequence[CheckRecord]) -> tuple[str, str, str]:
    """How many, and the largest errors of O and of the LSE."""
    errors = [r.errors for r in records if r.errors is not None]
    largest = (max((e.o_max for e in errors), default=0.0), max((e.lse_max for e in errors), default=0.0))
    return str(len(errors)), f"{largest[0]:.2g}", f"{largest[1]:.2g}"


def ratio(value: Comparison | None) -> str:
    """The ratio and its verdict; its interval is in the figure and the summary."""
    if value is None:
        return NOT_MEASURED
    return value.verdict if value.ratio is None else f"{number(value.ratio)} {value.verdict}"


def _rate(results: Results, cell: Cell, name: str) -> str:
    arm = results.arm(cell, name)
    if arm is None:
        return NOT_MEASURED
    return _optional(arm.tflops) if arm.status == "timed" else arm.status


def failures(results: Results) -> Table:
    """What has no numbers: a row for each arm and kind of reason. Reasons that differ only in digits are one kind."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in (*results.rungs, *results.variants, *results.peers):
        for cell in results.cells:
            arm = results.arm(cell, name)
            if arm is not None and arm.status != "timed":
                reason = _shortened(arm.reason or "")
                groups.setdefault((name, arm.status, re.sub(r"\d+(\.\d+)?", "#", reason)), []).append(reason)
    rows = [
        (name, status, _common(reasons), f"{len(reasons)} of {len(results.cells)}")
        for (name, status, _), reasons in groups.items()
    ]
    return Table(("name", "status", "reason", "cells"), tuple(rows))


def _common(reasons: Sequence[str]) -> str:
    return reasons[0] if len(set(reasons)) == 1 else f"for example: {reasons[0]}"


def agreement(records: Sequence[Agreement]) -> Table:
    """The emulator against the GPU: a row a rung. Shares are of the tolerance."""
    rows = []
    for arm in sorted({r.arm for r in records}):
        mine = [r for r in records if r.arm == arm and r.status != "unsupported"]
        exact = [r for r in mine if r.exact]
        elements = sum(r.elements for r in mine)
        rows.append(
            (
                arm,
                str(len(mine)),
                f"{sum(r.status == 'same bits' for r in exact)} of {len(exact)}",
                str(sum(r.status == "differs" for r in mine)),
                f"{100 * sum(r.equal for r in mine) / elements:.2f}" if elements else NOT_APPLICABLE,
                f"{max((r.o_share for r in mine), default=0.0):.2f}",
                f"{max((r.lse_share for r in mine), default=0.0):.2f}",
            )
        )
    columns = ("rung", "cases", "exact cases with the same bits", "differ", "% of O with the same bits")
    return Table((*columns, "largest share, O", "largest share, LSE"), tuple(rows))


def predictions(results: Results) -> Table:
    """Every declared prediction and what became of it."""
    rows = [
        (
            p.rung,
            p.metric,
            expected(p),
            measured(p),
            p.outcome,
            "; ".join(_notes(results, p)) or NOT_APPLICABLE,
        )
        for p in results.predictions
    ]
    return Table(("rung", "metric", "expected ratio", "measured", "outcome", "note"), tuple(rows))


def judged(results: Results, rung: Rung) -> Table:
    """A rung's predictions, their reasons and what became of them."""
    reasons = {p.metric: p.reason for p in rung.predictions}
    found = [p for p in results.predictions if p.rung == rung.id]
    rows = tuple((p.metric, expected(p), measured(p), p.outcome, reasons.get(p.metric, "")) for p in found)
    return Table(("predicted metric", "expected ratio", "measured", "outcome", "because"), rows)


def measured(p: PredictionOutcome) -> str:
    """With its interval where there is one: a counter is read once."""
    if p.measured is None:
        return NOT_MEASURED
    return number(p.measured) if p.ci is None else interval(p.measured, p.ci)


def bottlenecks(results: Results, cell: Cell) -> Table:
    """What limits each profiled arm of a cell: a row a finding, or one that says why there is none."""
    rows = []
    for name in (*results.rungs, *results.variants, *results.peers):
        found = results.bottlenecks(cell, name)
        profile = results.profiles.get((cell, name))
        if found is None:
            if profile is not None:
                rows.append((name, NOT_MEASURED, *(NOT_APPLICABLE,) * 4, unprofiled(profile)))
            continue
        for finding in found.findings:
            values = (finding.metric, number(finding.value), number(finding.threshold), number(finding.score))
            rows.append((name, finding.rule, *values, finding.fix))
        if not found.findings:
            rows.append((name, "no finding", *(NOT_APPLICABLE,) * 5))
        if found.inconclusive:
            lacking = sorted({metric for metrics in found.inconclusive.values() for metric in metrics})
            rows.append((name, "inconclusive", *(NOT_APPLICABLE,) * 4, f"missing: {', '.join(lacking)}"))
    return Table(("kernel", "rule", "metric", "value", "threshold", "could save at most", "what to do"), tuple(rows))


def unprofiled(profile: NcuRecord | None) -> str:
    """Why an arm has no counters."""
    return "not profiled in this run" if profile is None else f"{profile.cause}: {profile.reason}"


def counters_cell(results: Results, rung: Rung) -> Cell:
    """Whose counters tell of a step: the cell that the rung is read at, or one where it and its parent have some."""
    own = results.ladder.cell_of(rung)
    names = [name for name in (rung.id, rung.parent) if name is not None]
    cells = (own, results.ladder.reference, *(cell for cell, _ in results.profiles))
    return next((c for c in cells if all(results.counter(c, name, bottleneck.DURATION) for name in names)), own)


MOST_MOVED = 8
LEAST_MOVED = 1.05
"""A counter that changed by less is not shown."""
LEAST_STALL = 0.05
"""Cycles an issue below which a stall is none, however its ratio came out."""


def counters_moved(results: Results, rung: Rung, cell: Cell) -> Table:
    """The counters that moved most from the parent to the rung, the largest factor first."""
    columns = ("counter", rung.parent or "", rung.id, "ratio")
    profiles = [results.profiles.get((cell, name)) for name in (rung.parent or "", rung.id)]
    if any(p is None or p.cause is not None for p in profiles):
        return Table(columns, ())
    before, after = (ncu.main_kernel(p.kernels).metrics for p in profiles if p is not None)
    moved = []
    for name in before.keys() & after.keys():
        a, b = before[name].value, after[name].value
        if name == bottleneck.DURATION or ("issue_stalled" in name and max(a, b) < LEAST_STALL):
            continue
        if a > 0 and b > 0 and max(a, b) / min(a, b) >= LEAST_MOVED:
            moved.append((abs(math.log(b / a)), name, a, b))
    moved.sort(reverse=True)
    rows = [(name, number(a), number(b), number(b / a)) for _, name, a, b in moved[:MOST_MOVED]]
    return Table(columns, tuple(rows))


def config_diff(builds: Sequence[BuildRecord], rung: Rung) -> Table:
    """The fields of the kernel's configuration that differ from the parent's."""
    by_id = {b.rung: b.config for b in builds}
    before, after = by_id.get(rung.parent or "", {}), by_id.get(rung.id, {})
    names = [name for name in after if before.get(name) != after[name]] if before else []
    rows = tuple((name, str(before.get(name, NOT_APPLICABLE)), str(after[name])) for name in names)
    return Table(("field", rung.parent or "", rung.id), rows)


def sass_diff(builds: Sequence[BuildRecord], rung: Rung, cell: Cell, arch: str | None) -> Table:
    """The opcodes whose static count changed most between the parent's kernel and the rung's."""
    columns = ("opcode", rung.parent or "", rung.id, "difference")
    by_id = {b.rung: b for b in builds}
    kernels = [resources(by_id[name], cell, arch) for name in (rung.parent or "", rung.id) if name in by_id]
    if len(kernels) != 2 or kernels[0] is None or kernels[1] is None:
        return Table(columns, ())
    before, after = kernels[0].sass, kernels[1].sass
    counts = [(op, before.get(op, 0), after.get(op, 0)) for op in before.keys() | after.keys()]
    changed = sorted((c for c in counts if c[1] != c[2]), key=lambda c: (-abs(c[2] - c[1]), c[0]))
    rows = [(op, str(a), str(b), f"{b - a:+d}") for op, a, b in changed[:MOST_MOVED]]
    return Table(columns, tuple(rows))


def finding(results: Results, rung: Rung) -> str | None:
    """A rung's finding with its quotes filled in from the counters at the reference."""
    if rung.finding is None:
        return None
    return rung.finding.format(**{name: quoted(results, rung, quote) for name, quote in rung.quotes.items()})


def quoted(results: Results, rung: Rung, quote: Quote) -> str:
    """A counter of the rung and its parent at the reference, in the form that the quote asks for."""
    before, after = (
        results.counter(results.ladder.reference, arm, quote.metric) for arm in (rung.parent or "", rung.id)
    )

    def show(value: float | None) -> str:
        if value is None:
            return NOT_MEASURED
        scaled = value / 1e6 if quote.unit == "M" else value
        return f"{scaled:.{quote.digits}f}" + (f" {quote.unit}" if quote.unit else "")

    if quote.form == "before":
        return show(before)
    if quote.form == "after":
        return show(after)
    if quote.form == "change":
        return f"{show(before)} to {show(after)}"
    if not before or not after:
        return NOT_MEASURED
    if quote.form == "fall":
        return f"{100 * (1 - after / before):.{quote.digits}f} %"
    return f"{before / after:.{quote.digits}f}"


def _notes(results: Results, p: PredictionOutcome) -> list[str]:
    text = next((finding(results, r) for r in results.ladder.rungs if r.id == p.rung), None)
    explains = p.metric == "time" and p.outcome == "refuted"
    return [note for note in (p.note, text if explains else None) if note]


def history(results: Results, past: Sequence[Past]) -> Table:
    """What earlier work stated beside what this run measured for the same step."""
    rows = [(p.what, p.then, p.kind, *_answer(results, p)) for p in past]
    return Table(("what", "then", "kind", "here", "this run"), tuple(rows))


def _answer(results: Results, past: Past) -> tuple[str, str]:
    """Which step answers, and its figures."""
    reference = results.ladder.reference
    if past.steps is not None:
        before, after = past.steps
        factor = results.ratio(reference, after, before)
        return f"{before} to {after}", NOT_MEASURED if factor is None else f"{number(factor)}x"
    if past.cell is not None:
        times = ((name, results.median_us(past.cell, name)) for name in past.arms)
        return "the same shape", ", ".join(f"{name} {_optional(us, ' us')}" for name, us in times)
    counts = ((name, results.counter(reference, name, past.counter or "")) for name in past.arms)
    return past.counter or "", ", ".join(f"{name} {NOT_MEASURED if n is None else f'{n:g}'}" for name, n in counts)


def machine(info: RunInfo) -> Table:
    """Where and from what the run was made."""
    m = info.machine
    fields: list[tuple[str, object]] = [
        ("run", info.id),
        ("preset", info.preset),
        ("date", info.date),
        ("commit", info.commit + (" with uncommitted changes" if info.dirty else "")),
        *[("continued from", commit) for commit in info.later_commits],
        ("GPU", m.gpu),
        ("GPU digest", " and ".join([m.gpu_digest or "unknown", *info.cards])),
        ("architecture", m.arch),
        ("SMs", m.sm_count),
        ("L2 (MiB)", _mib(m.l2_bytes)),
        ("memory (MiB)", _mib(m.memory_bytes)),
        ("VBIOS", m.vbios),
        ("driver", m.driver),
        ("CUDA of the driver", m.cuda_driver),
        ("power limit (W)", m.power_limit_w),
        ("largest SM clock (MHz)", m.max_sm_clock_mhz),
        ("largest memory clock (MHz)", m.max_memory_clock_mhz),
        ("ECC", m.ecc),
        ("MIG", m.mig),
        ("CPU", m.cpu),
        ("Python", m.python),
        ("torch", m.torch),
        ("CUDA of torch", m.torch_cuda),
        ("cuDNN", m.cudnn),
        ("nvcc", m.nvcc),
        ("container", m.container),
    ]
    return Table(("what", "value"), tuple((name, _fact(value)) for name, value in fields))


def _fact(value: object) -> str:
    match value:
        case None:
            return "unknown"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _mib(size: int | None) -> int | None:
    return None if size is None else size // 2**20
