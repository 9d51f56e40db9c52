"""Typed records: what is declared in experiments/*.toml and what each stage writes into a run directory.

Units are in the names (`_us`, `_ns`, `_bytes`, `_mhz`, `_w`). Every structure is frozen, rejects unknown fields and
serialises to strict JSON (no NaN).
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

DtypeName = Literal["fp16", "bf16"]
Mask = Literal["full", "causal"]
L2Mode = Literal["warm", "cold"]
Kind = Literal["rung", "variant", "peer"]
Arithmetic = Literal["fp32", "tensor_cores", "half_scores"]
"""Who sums the products of a score: fp32 adders, a tensor core in fp32, or one in fp16."""
Verdict = Literal["faster", "slower", "same", "ambiguous", "insufficient samples"]
Status = Literal["timed", "failed", "unsupported", "skipped", "not installed"]

HOPPER = 90
"""min_arch of the rungs with Hopper's own instructions."""
DTYPES: tuple[DtypeName, ...] = ("fp16", "bf16")
MASKS: tuple[Mask, ...] = ("full", "causal")


UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What decoding a damaged record raises: msgspec leaves bytes that are no text to Python."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every declared or recorded structure."""


# --- declared -------------------------------------------------------------------------------------------------------


class Prediction(Record, frozen=True, kw_only=True):
    """What a rung claims before it is measured.

    `metric` is "time" (ratio = parent's time / this rung's time at the reference cell) or an ncu metric name (ratio =
    this rung's value / the parent's). `ratio` is the expected closed interval.
    """

    metric: str
    direction: Literal["up", "down"]
    ratio: tuple[float, float]
    reason: str
    after: str | None = None
    """What was known when it was written, if more than reasoning: trials that came before the recorded measurement."""


class Slack(Record, frozen=True, kw_only=True):
    """How many times the gate's usual error of O and of the LSE is allowed."""

    o: float = 1.0
    lse: float = 1.0


USUAL = Slack()


class Quote(Record, frozen=True, kw_only=True):
    """A counter that a finding quotes, at the ladder's reference."""

    metric: str
    form: Literal["change", "before", "after", "fall", "factor"] = "change"
    """The parent's value and the rung's; one of them; by how many per cent it fell; the parent's over the rung's."""
    digits: int = 2
    unit: Literal["", "M", "%"] = ""


class Rung(Record, frozen=True, kw_only=True):
    """One kernel of the ladder: one change against its parent."""

    id: str
    source: str
    parent: str | None = None
    change: str
    changes: tuple[str, ...] = ()
    """Fields of the kernel's own Config (kernel/include/rung.h) that differ from the parent's."""
    forced: tuple[str, ...] = ()
    """Further fields that differ because the change leaves no choice."""
    min_arch: int = 80
    dtype: DtypeName | None = None
    """The only type that a variant's change shows in, and that it is read in; None: the reference's."""
    sass: tuple[str, ...] = ()
    """Opcode prefixes that the machine code must contain on every architecture."""
    smaller_sass: tuple[str, ...] | None = None
    """Those of the kernels for smaller grids where they are of another kind."""
    predictions: tuple[Prediction, ...] = ()
    finding: str | None = None
    """Why a predicted gain came out otherwise, from the profiler; {name} stands for a quote."""
    quotes: dict[str, Quote] = {}
    score_limit: float | None = None
    """Largest |q . k|, unscaled, that the kernel's arithmetic holds; the gate leaves out cases with larger ones."""
    slack: Slack = USUAL
    """More than the usual error is what an option of lower precision pays with."""
    kind: Literal["rung", "variant"] = "rung"

    @property
    def has_tensor_cores(self) -> bool:
        return any(opcode.startswith(("HMMA", "HGMMA")) for opcode in self.sass)

    @property
    def arithmetic(self) -> Arithmetic:
        if "half_scores" in self.changes:
            return "half_scores"
        return "tensor_cores" if self.has_tensor_cores else "fp32"

    @property
    def needed_arch(self) -> str:
        """The least architecture, or Hopper's own: its instructions are in no other."""
        return f"sm_{self.min_arch}" if self.min_arch < HOPPER else "sm_90a"

    def runs_on(self, arch: str) -> bool:
        """Whether the rung can be built for `arch` (sm_NN, sm_NNa, or compute_NN: PTX)."""
        if self.min_arch >= HOPPER:
            return arch == self.needed_arch
        return int(re.sub(r"\D", "", arch)) >= self.min_arch


class Shape(Record, frozen=True, order=True, kw_only=True):
    """Problem size: q is (batch, heads_q, seq_q, head_dim), k and v are (batch, heads_kv, seq_k, head_dim)."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int

    @property
    def id(self) -> str:
        kv = "" if self.heads_kv == self.heads_q else f"kv{self.heads_kv}"
        sk = "" if self.seq_k == self.seq_q else f"x{self.seq_k}"
        return f"b{self.batch}h{self.heads_q}{kv}s{self.seq_q}{sk}d{self.head_dim}"

    @classmethod
    def of_id(cls, text: str) -> Shape | None:
        """The shape of that id, declared in a set or not; None when it is no id."""
        match = re.fullmatch(r"b(\d+)h(\d+)(?:kv(\d+))?s(\d+)(?:x(\d+))?d(\d+)", text)
        if match is None:
            return None
        batch, heads, kv, seq, seq_k, head_dim = match.groups()
        return cls(
            batch=int(batch),
            heads_q=int(heads),
            heads_kv=int(kv or heads),
            seq_q=int(seq),
            seq_k=int(seq_k or seq),
            head_dim=int(head_dim),
        )


class Cell(Record, frozen=True, order=True, kw_only=True):
    """One point of the sweep: what is computed, whoever computes it."""

    shape: Shape
    dtype: DtypeName
    causal: bool

    @property
    def mask(self) -> Mask:
        return "causal" if self.causal else "full"

    @property
    def id(self) -> str:
        return f"{self.shape.id}-{self.dtype}-{self.mask}"


class Blocking(Record, frozen=True, order=True, kw_only=True):
    """Tile of queries and keys, tiles of K and V in shared memory, and whether warpgroups take turns."""

    head_dim: int
    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool

    @property
    def name(self) -> str:
        turns = "_turns" if self.ping_pong else ""
        return f"d{self.head_dim}_{self.tile_m}x{self.tile_n}_{self.stages}{turns}"

    @property
    def fields(self) -> dict[str, int]:
        """The fields of kernel/include/rung.h's Config that it sets."""
        suffix = "_128" if self.head_dim == 128 else ""
        values = {"tile_m": self.tile_m, "tile_n": self.tile_n, "stages": self.stages, "ping_pong": int(self.ping_pong)}
        return {name + suffix: value for name, value in values.items()}

    @classmethod
    def of(cls, config: dict[str, int], head_dim: int) -> Blocking:
        """How a library of that Config (native.Library.config) divides problems of that head dimension."""

        def value(name: str, unset: int) -> int:
            wide = config[f"{name}_128"] if head_dim == 128 else unset
            return config[name] if wide == unset else wide

        return cls(
            head_dim=head_dim,
            tile_m=value("tile_m", 0),
            tile_n=value("tile_n", 0),
            stages=value("stages", 0),
            ping_pong=value("ping_pong", -1) != 0,
        )


class Choice(Record, frozen=True, kw_only=True):
    head_dim: int
    mask: Mask
    blocking: str
    """Name of the candidate."""


class Tuning(Record, frozen=True, kw_only=True):
    """experiments/tune.toml."""

    rung: str
    """Whose template the candidates are of."""
    candidate: tuple[Blocking, ...]
    choice: tuple[Choice, ...]


class ShapeSet(Record, frozen=True, kw_only=True):
    """A named sweep: its shapes with the masks each is run under, and the L2 state its timings start from."""

    name: str
    l2: L2Mode
    entries: tuple[tuple[Shape, tuple[Mask, ...]], ...]

    def cells(self, dtypes: tuple[DtypeName, ...] = DTYPES) -> list[Cell]:
        return [
            Cell(shape=shape, dtype=dtype, causal=mask == "causal")
            for shape, masks in self.entries
            for mask in masks
            for dtype in dtypes
        ]


class Preset(Record, frozen=True, kw_only=True):
    """How much of the sweep `ablation` runs, and the time each part may take.

    An arm runs as many of `blocks` as `arm_budget_s` allows, but `min_blocks` at least; when these would take more
    than `arm_limit_s` it is skipped and the reason recorded.
    """

    sets: tuple[str, ...]
    dtypes: tuple[DtypeName, ...]
    blocks: int
    min_blocks: int
    warmup_ms: float
    arm_budget_s: float
    arm_limit_s: float
    max_seq: int | None = None
    peers: tuple[str, ...] = ()
    """Peers that are measured; all when empty."""
    roof: bool = True
    values: bool = False
    """Whether the champions are timed on every kind of values (inputs.VALUES)."""
    profile: tuple[str, ...] = ()
    """Ids of the shapes that `flashladder profile` takes: with the reference's dtype and mask."""
    variants: bool = False
    """Whether the leave-one-out variants are measured (experiments/ablation.toml)."""


class Gpu(Record, frozen=True, kw_only=True):
    """Limits of one GPU model, from the vendor's documentation (`source`)."""

    name: str
    """How NVML names it; compared as a prefix."""
    slug: str
    arch: str
    sms: int
    l2_bytes: int
    l2_bytes_per_clk: int | None = None
    """Of the whole cache; None: neither stated nor measured."""
    dram_bytes_per_s: float
    tensor_flops: float
    """Dense fp16/bf16 FLOP/s with fp32 accumulation at the boost clock."""
    tensor_flops_per_clk_sm: int
    mma_sync_flops_per_clk_sm: int | None = None
    """Where mma.sync is slower than the tensor cores can be; None: it is not."""
    fp32_fma_per_clk_sm: int
    mufu_per_clk_sm: int
    """Exponentials."""
    issue_per_clk_sm: int
    """Warp instructions."""
    shared_bytes_per_clk_sm: int
    registers_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_reserved_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    launch_s: float | None = None
    """What one kernel more in a CUDA graph takes at least; None: not measured."""
    source: str

    @property
    def boost_hz(self) -> float:
        return self.tensor_flops / (self.sms * self.tensor_flops_per_clk_sm)


class Past(Record, frozen=True, kw_only=True):
    """What earlier work stated (experiments/history.toml), and what answers it here: one of three.

    `steps`: the first rung's time over the last's at the reference. `cell`: times of `arms`. `counter`: of `arms`.
    """

    what: str
    then: str
    kind: Literal["measured", "predicted"]
    steps: tuple[str, str] | None = None
    arms: tuple[str, ...] = ()
    cell: Cell | None = None
    counter: str | None = None


# --- recorded -------------------------------------------------------------------------------------------------------


class Machine(Record, frozen=True, kw_only=True):
    """Fingerprint of where a run was made. A field that could not be read is None."""

    gpu: str | None
    gpu_digest: str | None
    """First 12 hex digits of the SHA-256 of the GPU's UUID: tells two cards apart without naming one."""
    arch: str | None
    sm_count: int | None
    l2_bytes: int | None
    memory_bytes: int | None
    vbios: str | None
    driver: str | None
    cuda_driver: str | None
    power_limit_w: float | None
    max_sm_clock_mhz: int | None
    max_memory_clock_mhz: int | None
    ecc: bool | None
    mig: bool | None
    cpu: str | None
    python: str
    torch: str | None
    torch_cuda: str | None
    cudnn: str | None
    nvcc: str | None
    container: str | None
    peers: dict[str, str | None] = {}
    """Distribution -> version of what the peers need; None when it is not installed."""


class RunInfo(Record, frozen=True, kw_only=True):
    """run.json: what was run, where, from which commit."""

    id: str
    preset: str
    date: str
    commit: str
    dirty: bool
    machine: Machine
    cards: tuple[str, ...] = ()
    """Digests of further cards, alike in all else, that measured some of the cells."""
    later_commits: tuple[str, ...] = ()
    """Commits from which the run went on."""


class Sums(Record, frozen=True, kw_only=True):
    """sums.json: the files of a finished run, by name their SHA-256."""

    files: dict[str, str]


class KernelResources(Record, frozen=True, kw_only=True):
    """What the compiler gave one kernel on one architecture."""

    arch: str
    kernel: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    sass: dict[str, int]
    """Opcode (with the width suffix of memory instructions) -> number of static instructions."""


class BuildRecord(Record, frozen=True, kw_only=True):
    rung: str
    status: Literal["built", "failed"]
    reason: str | None = None
    sha256: str | None = None
    cubins: dict[str, str] = {}
    """Machine code by architecture: its SHA-256, the same wherever this compiler runs."""
    compiler: str
    flags: tuple[str, ...]
    archs: tuple[str, ...]
    config: dict[str, int] = {}
    kernels: tuple[KernelResources, ...] = ()


class RungSums(Record, frozen=True, kw_only=True):
    """SHA-256 of what a rung compiles to."""

    cubins: dict[str, str]
    """By architecture, as BuildRecord.cubins."""
    library: str | None = None
    """Of the library for exactly these architectures; None: not summed."""


class CompilerSums(Record, frozen=True, kw_only=True):
    """kernel/resources/COMPILER.sums.json."""

    about: str
    compiler: str
    host: tuple[str, ...]
    """What else the libraries are made with: C++ compiler, linker, binding."""
    rungs: dict[str, RungSums]


class Errors(Record, frozen=True, kw_only=True):
    """Distances from the float64 oracle: largest absolute and root mean square, of the output and of the LSE."""

    o_max: float
    o_rms: float
    lse_max: float


class CheckRecord(Record, frozen=True, kw_only=True):
    """Verdict of the correctness gate on one kernel and one case."""

    arm: str
    sha256: str | None
    """Binary that was checked; None for a peer (its version is in the run's fingerprint)."""
    case: str
    cell: Cell
    status: Literal["pass", "fail", "unsupported", "error", "crash", "timeout"]
    reason: str | None = None
    errors: Errors | None = None
    limits: Errors | None = None
    seed: int


class Agreement(Record, frozen=True, kw_only=True):
    """What a GPU and the emulator made of the same case and inputs. Shares are of the tolerance (agreement.py)."""

    arm: str
    sha256: str | None
    """Binary that ran on the GPU."""
    case: str
    cell: Cell
    seed: int
    exact: bool
    """The case's arithmetic is exact: O must have the same bits."""
    status: Literal["same bits", "within tolerance", "differs", "unsupported"]
    """"same bits" speaks of O; the LSE is always within its tolerance then."""
    reason: str | None = None
    elements: int = 0
    """Of O."""
    equal: int = 0
    """Elements of O with the same bits."""
    o_share: float = 0.0
    lse_share: float = 0.0


class BlockTelemetry(Record, frozen=True, kw_only=True, array_like=True):
    """NVML readings taken after one block of samples; recorded as an array in this order."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    event_reasons: int | None
    """Bit mask of clock event reasons, as NVML gives it."""
    valid: bool
    """False on a thermal or hardware slowdown or a foreign process, decided before the times are read."""


class ArmTiming(Record, frozen=True, kw_only=True):
    """Raw samples of one kernel in one cell.

    `ns[i]` are the two samples of block `blocks[i]`: device time a launch, first visit and second visit. A block visits
    all its arms in random order and then in the reverse order, so any two arms form an ABBA or BAAB quad in it.
    """

    arm: str
    kind: Kind
    status: Status
    reason: str | None = None
    sha256: str | None = None
    launches_per_sample: int = 1
    captured: bool = True
    """True: a sample replays a CUDA graph. False: launches are enqueued behind a spin kernel."""
    graphs: int = 1
    """Of the same launches: those of block b replay graph b % graphs."""
    blocks: tuple[int, ...] = ()
    ns: tuple[tuple[float, float], ...] = ()
    host_us: tuple[float, ...] = ()
    """Host time of single calls, without synchronisation."""


class CellTiming(Record, frozen=True, kw_only=True):
    """One line of timing.jsonl: every arm of one cell, measured together."""

    cell: Cell
    l2: L2Mode
    seed: int
    gpu_digest: str | None = None
    """The card; None in records of a run that one card made."""
    input_sets: int
    """Distinct input sets rotated inside a sample."""
    warmup_s: float
    telemetry: tuple[BlockTelemetry, ...]
    arms: tuple[ArmTiming, ...]


class Roof(Record, frozen=True, kw_only=True):
    """One line of roof.jsonl: raw samples of cuBLAS's product of two square matrices, what a tensor-core kernel can
    hope for on this card."""

    dtype: DtypeName
    size: int
    """Rows and columns of either matrix."""
    gpu_digest: str | None
    ns: tuple[float, ...]
    """Device time a product."""
    sm_clock_mhz: tuple[int | None, ...]
    """NVML's reading after each sample."""


class ValueTiming(Record, frozen=True, kw_only=True):
    """One line of values.jsonl: raw samples of an arm in one cell on a kind of values, paired with normal values.

    `ns[i]` and `normal_ns[i]` are the two samples of quad i on either, device time a launch. A quad visits normal
    values, this kind, this kind, normal values: drift that is linear over it cancels.
    """

    arm: str
    sha256: str | None
    cell: Cell
    values: str
    """A key of inputs.VALUES."""
    seed: int
    gpu_digest: str | None = None
    launches_per_sample: int = 1
    ns: tuple[tuple[float, float], ...] = ()
    normal_ns: tuple[tuple[float, float], ...] = ()
    reason: str | None = None
    """Why there are no samples."""


EagerArm = Literal["nothing", "in_place", "out_of_place", "allocation", "kernel", "attention", "sdpa"]
"""A call that is timed together with the wait for it (eager.ARMS)."""


class EagerTiming(Record, frozen=True, kw_only=True):
    """One line of eager.jsonl: raw samples of calls that are each waited for, on the host's clock, in one cell.

    `us[arm]` are the two samples of every round, microseconds a call. A round visits all arms in random order and then
    in the reverse order, so any two arms form an ABBA or BAAB quad in it.
    """

    cell: Cell
    rung: str
    sha256: str
    """Of the library that attention calls."""
    seed: int
    gpu_digest: str | None
    calls: int
    """In a sample."""
    errors: dict[EagerArm, Errors]
    """Of O after the samples, of every arm that computes attention."""
    limits: Errors
    us: dict[EagerArm, tuple[tuple[float, float], ...]]


class PlanChoice(Record, frozen=True, kw_only=True):
    """One line of plan.jsonl: what a rung's own plan chose in a cell of a tuning."""

    cell: Cell
    arm: str
    """RUNG@TILE/SPLITS, as the arms of the tuning are called."""


class Metric(Record, frozen=True, kw_only=True, array_like=True):
    """A counter's value in base units (s, byte, hz, %, inst, ...); recorded as [value, unit]."""

    value: float
    unit: str


class KernelProfile(Record, frozen=True, kw_only=True):
    """Counters of one kernel launch."""

    name: str
    metrics: dict[str, Metric]


OptimizeLevel = Literal["0", "g"]
"""Of g++ for emulated kernels: -O1 builds three times as long as -Og, and runs no faster."""
MetricSet = Literal["light", "full", "times"]
"""times: what CUPTI tells without counters: durations and launch shapes."""

ProfileCause = Literal[
    "permission denied",
    "no kernel",
    "unknown metric",
    "version mismatch",
    "timeout",
    "out of memory",
    "not checked",
    "too slow",
    "error",
]


class NcuRecord(Record, frozen=True, kw_only=True):
    """One line of ncu.jsonl: the kernels that one call of an arm launched in one cell, or why there are no counters."""

    arm: str
    kind: Kind
    sha256: str | None
    cell: Cell
    set: MetricSet
    ncu: str | None
    """Version of Nsight Compute; None for what CUPTI told."""
    kernels: tuple[KernelProfile, ...] = ()
    missing: tuple[str, ...] = ()
    """Metrics that were asked for and that no kernel has."""
    cause: ProfileCause | None = None
    """None: profiled."""
    reason: str | None = None
    taken_from: str | None = None
    """The run that counted, of a library with the same machine code; None: this one."""


# --- derived --------------------------------------------------------------------------------------------------------


class Estimate(Record, frozen=True, kw_only=True):
    """Median with a 95 % confidence interval over n samples."""

    median: float
    ci: tuple[float, float]
    n: int


class ArmStats(Record, frozen=True, tag="arm", kw_only=True):
    """What one arm did in one cell."""

    cell: Cell
    l2: L2Mode
    arm: str
    kind: Kind
    status: Status
    reason: str | None = None
    device_us: Estimate | None = None
    host_us: Estimate | None = None
    launch_bound: bool | None = None
    tflops: float | None = None
    roofline_pct: float | None = None
    slow_samples: int | None = None
    """Samples above 1.1 x the median; they are counted, never removed."""


class Finding(Record, frozen=True, kw_only=True):
    """One thing that limits a kernel. `score` bounds the fraction of its time that mending it could save."""

    rule: str
    metric: str
    value: float
    threshold: float
    score: float
    fix: str


class Bottlenecks(Record, frozen=True, tag="bottlenecks", kw_only=True):
    """What the counters of one arm in one cell say, the largest score first."""

    cell: Cell
    arm: str
    kernel: str
    findings: tuple[Finding, ...]
    inconclusive: dict[str, tuple[str, ...]] = {}
    """Rule -> the metrics that it needs and that are missing."""
    flagged: tuple[str, ...] = ()
    """Percentages above 100, which no rule used."""


class RoofRate(Record, frozen=True, tag="roof", kw_only=True):
    """cuBLAS's rate."""

    dtype: DtypeName
    size: int
    tflops: Estimate


class ValueRatio(Record, frozen=True, tag="values", kw_only=True):
    """What an arm takes in one cell on a kind of values. `ratio` is over its time on normal ones: above 1, it is
    slower."""

    cell: Cell
    arm: str
    values: str
    us: Estimate | None = None
    normal_us: Estimate | None = None
    ratio: Estimate | None = None
    """Of the quads."""
    reason: str | None = None
    """Why there are no numbers."""


class Comparison(Record, frozen=True, tag="comparison", kw_only=True):
    """Paired comparison in one cell. `ratio` is the other's time over this one's: above 1, `arm` is faster."""

    cell: Cell
    arm: str
    other: str
    relation: Literal["parent", "baseline", "control"]
    verdict: Verdict
    n: int
    """Quads."""
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    p: float | None = None
    p_adjusted: float | None = None
    correction: Literal["holm", "bh", "none"] = "none"
    floor: float
    """Smallest effect that counts, as a fraction of the time."""
    cliffs_delta: float | None = None


class PredictionOutcome(Record, frozen=True, tag="prediction", kw_only=True):
    rung: str
    metric: str
    direction: Literal["up", "down"]
    expected: tuple[float, float]
    measured: float | None
    ci: tuple[float, float] | None = None
    outcome: Literal["confirmed", "refuted", "not measured"]
    note: str | None = None


Diagnosis = ArmStats | RoofRate | ValueRatio | Comparison | Bottlenecks | PredictionOutcome


# --- the challenge --------------------------------------------------------------------------------------------------

State = Literal["PROPOSED", "BUILD", "GRID", "CORRECT", "SCREEN", "MEASURE", "CONFIRM", "ACCEPTED", "REVERTED"]
"""Of a challenge, in order. It ends in one of the last two, or without a verdict where nothing can be timed."""


class Ratio(Record, frozen=True, kw_only=True):
    """The champion's time over the candidate's, above 1: the candidate is faster. With a 95 % interval."""

    ratio: float
    low: float
    high: float


class ChallengeVerdict(Record, frozen=True, kw_only=True):
    """What `flashladder challenge --json` prints."""

    verdict: Literal["accepted", "reverted", "not timed"]
    """not timed: no GPU, or an environment in which nothing can be decided; the candidate is not judged."""
    state: State
    """The last that it entered before it ended: of an accepted one CONFIRM, of a wrong one CORRECT."""
    reason: str | None = None
    exit_code: int
    ratios: dict[str, Ratio] = {}
    """By the cell's id, of the last state that timed."""
    geomean: Ratio | None = None
    candidate: str
    """SHA-256 of the file."""
    champion: str
    seconds: float
    challenge: str
    """Its number and name: the folder of its records below runs/."""
