"""From a GPU's limits to kernels for one cell: floors by resource, the designs that fit, what each should take. Pure.

A design is a tile and who computes it. The model knows no instruction by name but what every kernel must spend: a score
costs two products of head_dim, one exponential, and its share of reading K and V again. What overlaps is predicted by a
closed queueing network (Buzen, "Computational algorithms for closed queueing networks with exponential servers", 1973):
its customers are the warpgroups of an SM, its stations the tensor cores and the softmax.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from flashladder import flops
from flashladder.model import HOPPER, Cell, Gpu, Record

Resource = Literal["tensor cores", "MUFU", "issue slots", "shared memory", "L2", "DRAM", "launch"]
Instruction = Literal["wgmma", "mma.sync"]
Reason = Literal["registers", "shared memory"]

SOFTMAX_INSTRUCTIONS = 3.5
"""A thread's instructions a score that no softmax does without: FMA, exponential, addition, half a conversion."""
MMA_FLOPS = 4096
"""Of one warp's mma.sync.m16n8k16."""
WARPGROUP, WARPGROUP_ROWS = 128, 64
PRODUCER_REGISTERS = 24
"""What a warpgroup that only loads keeps, the least that setmaxnreg takes."""
MOST_REGISTERS = 248
"""Of a thread: the largest multiple of 8 below the 255 that an instruction can name."""
OTHER_REGISTERS = 24
"""A thread's beside scores, weights and O: at head_dim 64 ptxas fits 192 x 128 tiles into 160, not 192 x 144."""
BARRIER_BYTES = 1024
MOST_STAGES = 4
MIN_SPLIT_KEYS = 128
BLOCKS_PER_SM_OF_SPLITS = 2


class Design(Record, frozen=True, order=True, kw_only=True):
    """Which kernel: its tile, and who computes it.

    wgmma: a warpgroup a 64 rows and one more that loads; persistent, so that two tiles of Q are held. mma.sync: warps
    of `warp_rows` rows; `key_warps` of them share their rows and split a tile's keys.
    """

    instruction: Instruction
    tile_m: int
    tile_n: int
    stages: int
    warp_rows: int = 16
    key_warps: int = 1
    splits: int = 1
    """Of the keys among blocks, which a second kernel joins."""

    @property
    def warps(self) -> int:
        """Those that compute."""
        return self.tile_m // self.warp_rows * self.key_warps

    @property
    def threads(self) -> int:
        return self.warps * flops.WARP + (WARPGROUP if self.instruction == "wgmma" else 0)

    @property
    def name(self) -> str:
        rows = "" if self.instruction == "wgmma" else f", {self.warps} warps of {self.warp_rows} rows"
        splits = f", {self.splits} splits" if self.splits > 1 else ""
        return f"{self.instruction} {self.tile_m} x {self.tile_n}{rows}{splits}"


class Fit(Record, frozen=True, kw_only=True):
    """A design on a GPU. Registers are a thread's at the launch, `compute_registers` those of one that computes."""

    design: Design
    registers: int
    compute_registers: int
    needed_registers: int
    shared_bytes: int
    blocks_per_sm: int
    occupancy: float


class Prediction(Record, frozen=True, kw_only=True):
    """What a design should take for a cell; shares are fractions."""

    fit: Fit
    grid: int
    """Tiles of queries, each with its part of the keys."""
    waves: float
    useful: float
    """Visible scores over those computed: rows and keys past the edges, and tiles that the mask cuts."""
    balance: float
    """The mean SM's work over that of the one with most: what the last wave leaves idle."""
    bound: Resource
    """The busiest resource."""
    us: float
    floor_us: float
    """With perfect overlap: the busiest resource alone."""
    shares: dict[Resource, float]
    """How busy each resource is in the predicted time."""


class Floor(Record, frozen=True, kw_only=True):
    """The least one resource takes for a cell, whatever the kernel."""

    resource: Resource
    work: float
    unit: str
    us: float | None
    """None: the rate is neither stated nor measured."""


# --- the cell alone -------------------------------------------------------------------------------------------------


def scores(cell: Cell) -> int:
    """Visible (query, key) pairs of all heads."""
    return flops.visible_pairs(cell) * cell.shape.batch * cell.shape.heads_q


def floors(cell: Cell, gpu: Gpu, hz: float) -> list[Floor]:
    """Each resource alone at an SM clock of `hz`.

    Shared memory and L2 must at least pass on the compulsory bytes; what a design adds is in its prediction.
    """
    sm_hz, work, moved = gpu.sms * hz, scores(cell), flops.compulsory_bytes(cell)
    instructions = work * SOFTMAX_INSTRUCTIONS / flops.WARP
    l2 = None if gpu.l2_bytes_per_clk is None else moved / (gpu.l2_bytes_per_clk * hz)
    seconds: list[tuple[Resource, float, str, float | None]] = [
        ("tensor cores", flops.flops(cell), "FLOP", flops.flops(cell) / (gpu.tensor_flops_per_clk_sm * sm_hz)),
        ("MUFU", work, "exponentials", work / (gpu.mufu_per_clk_sm * sm_hz)),
        ("issue slots", instructions, "warp instructions", instructions / (gpu.issue_per_clk_sm * sm_hz)),
        (
            "shared memory",
            flops.input_bytes(cell),
            "B",
            flops.input_bytes(cell) / (gpu.shared_bytes_per_clk_sm * sm_hz),
        ),
        ("L2", moved, "B", l2),
        ("DRAM", moved, "B", moved / gpu.dram_bytes_per_s),
        ("launch", 1, "kernel", gpu.launch_s),
    ]
    return [Floor(resource=r, work=w, unit=u, us=None if s is None else 1e6 * s) for r, w, u, s in seconds]


# --- what fits ------------------------------------------------------------------------------------------------------


def designs(cell: Cell, gpu: Gpu) -> Iterator[Design]:
    """Every design in question, feasible or not, each with the most stages that may be of use."""
    if gpu.arch.rstrip("a") == f"sm_{HOPPER}":
        for warpgroups in (1, 2, 3, 4):
            for tile_n in range(32, 257, 16):
                yield Design(instruction="wgmma", tile_m=64 * warpgroups, tile_n=tile_n, stages=MOST_STAGES)
    for warp_rows in (16, 32):
        for row_warps in (1, 2, 4, 8):
            key_warps = max(1, 4 // row_warps)
            for tile_n in (32, 64, 128):
                one = Design(
                    instruction="mma.sync",
                    tile_m=warp_rows * row_warps,
                    tile_n=tile_n,
                    stages=2,
                    warp_rows=warp_rows,
                    key_warps=key_warps,
                )
                yield one
                yield from _split(one, cell, gpu)


def _split(design: Design, cell: Cell, gpu: Gpu) -> Iterator[Design]:
    """With the keys split among as many blocks as a grid that is too small leaves room for."""
    shape = cell.shape
    grid = shape.batch * shape.heads_q * ceil(shape.seq_q / design.tile_m)
    room = min(BLOCKS_PER_SM_OF_SPLITS * gpu.sms // max(grid, 1), shape.seq_k // MIN_SPLIT_KEYS)
    splits = 2
    while splits <= room:
        yield Design(**{f: getattr(design, f) for f in Design.__struct_fields__ if f != "splits"}, splits=splits)
        splits *= 2


def fit(design: Design, head_dim: int, gpu: Gpu) -> Fit | Reason:
    """The design with as many of its stages as shared memory holds; or what it has too little of."""
    needed = _needed_registers(design, head_dim)
    registers, compute = _registers(design, needed, gpu)
    if needed > compute:
        return "registers"
    for stages in range(design.stages, 0, -1):
        if stages < 2 and design.instruction == "wgmma":
            break
        staged = Design(**{f: getattr(design, f) for f in Design.__struct_fields__ if f != "stages"}, stages=stages)
        shared = _shared_bytes(staged, head_dim)
        blocks = flops.resident_blocks(registers, shared, staged.threads, gpu)
        if blocks and shared + gpu.shared_bytes_reserved_per_block <= gpu.shared_bytes_per_sm:
            return Fit(
                design=staged,
                registers=registers,
                compute_registers=compute,
                needed_registers=needed,
                shared_bytes=shared,
                blocks_per_sm=blocks,
                occupancy=flops.occupancy(registers, shared, staged.threads, gpu),
            )
    return "shared memory"


def _needed_registers(design: Design, head_dim: int) -> int:
    """A thread's scores and O in fp32 and its weights in two bytes, spread over the lanes of a warp, and the rest."""
    per_lane = design.warp_rows / flops.WARP
    return ceil(per_lane * (design.tile_n / design.key_warps * 1.5 + head_dim)) + OTHER_REGISTERS


def _registers(design: Design, needed: int, gpu: Gpu) -> tuple[int, int]:
    """A thread's at the launch, and the most that one which computes can have."""
    if design.instruction == "mma.sync":
        return _multiple_of_8(needed + 7), MOST_REGISTERS
    groups = design.warps * flops.WARP // WARPGROUP
    launch = min(_multiple_of_8(gpu.registers_per_sm // design.threads), MOST_REGISTERS)
    kept = (launch * (groups + 1) - PRODUCER_REGISTERS) // groups
    return launch, min(_multiple_of_8(kept), MOST_REGISTERS)


def _multiple_of_8(registers: int) -> int:
    return registers // 8 * 8


def _shared_bytes(design: Design, head_dim: int) -> int:
    row, hopper = head_dim * flops.ELEMENT_BYTES, design.instruction == "wgmma"
    queries = design.tile_m * row * (2 if hopper else 1)
    return queries + design.stages * 2 * design.tile_n * row + (BARRIER_BYTES if hopper else 0)


# --- what it takes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """How a design divides a cell: blocks of queries, the scores they compute, and those of the busiest SM."""

    items: int
    computed: int
    busiest: float
    kv_rows: int
    """Of K, read again by every block."""


def _grid(design: Design, cell: Cell, gpu: Gpu) -> _Grid:
    shape, m, n = cell.shape, design.tile_m, design.tile_n
    heads = shape.batch * shape.heads_q
    last_rows = [min((tile + 1) * m, shape.seq_q) - 1 for tile in range(ceil(shape.seq_q / m))]
    visible = [row + 1 + shape.seq_k - shape.seq_q if cell.causal else shape.seq_k for row in last_rows]
    tiles = [ceil(ceil(min(max(keys, 0), shape.seq_k) / n) / design.splits) for keys in visible]
    items = heads * design.splits * len(tiles)
    total = heads * design.splits * sum(tiles)
    if cell.causal:  # longest first: no SM has more than its part, or than one block
        busiest = max(total / gpu.sms, max(tiles, default=0))
    else:
        busiest = ceil(items / gpu.sms) * max(tiles, default=0)
    return _Grid(items, total * m * n, busiest * m * n, total * n)


def predict(fitted: Fit, cell: Cell, gpu: Gpu, hz: float) -> Prediction:
    """The time of a design at an SM clock of `hz`, and how busy it keeps what."""
    design, shape = fitted.design, cell.shape
    grid = _grid(design, cell, gpu)
    clocks = _clocks_per_score(design, shape.head_dim, gpu)
    resident = min(fitted.blocks_per_sm, ceil(grid.items / gpu.sms))
    customers = max(1, resident * design.warps * flops.WARP // WARPGROUP)
    products = max(clocks["tensor cores"], clocks["shared memory"])
    softmax = max(clocks["MUFU"], clocks["issue slots"])
    row_bytes = shape.head_dim * flops.ELEMENT_BYTES
    q_rows = grid.items * design.tile_m
    l2_bytes = q_rows * (2 * row_bytes + flops.LSE_BYTES) + grid.kv_rows * 2 * row_bytes
    elsewhere: dict[Resource, float] = {"DRAM": flops.compulsory_bytes(cell) / gpu.dram_bytes_per_s}
    if gpu.l2_bytes_per_clk is not None:
        elsewhere["L2"] = l2_bytes / (gpu.l2_bytes_per_clk * hz)
    launch = (gpu.launch_s or 0.0) * (2 if design.splits > 1 else 1)
    seconds = {name: grid.busiest * clock / hz for name, clock in clocks.items()} | elsewhere
    compute = grid.busiest * time_per_visit(products, softmax, customers) / hz
    total = max(compute, *elsewhere.values()) + launch
    mean = {name: grid.computed / gpu.sms * clock / hz for name, clock in clocks.items()} | elsewhere
    bound: Resource = max(seconds, key=seconds.__getitem__)
    return Prediction(
        fit=fitted,
        grid=grid.items,
        waves=grid.items / (gpu.sms * fitted.blocks_per_sm),
        useful=scores(cell) / grid.computed if grid.computed else 1.0,
        balance=grid.computed / gpu.sms / grid.busiest if grid.busiest else 1.0,
        bound=bound if seconds[bound] > launch else "launch",
        us=1e6 * total,
        floor_us=1e6 * (seconds[bound] + launch),
        shares={name: value / total for name, value in mean.items()},
    )


def _clocks_per_score(design: Design, head_dim: int, gpu: Gpu) -> dict[Resource, float]:
    """What one score takes of an SM's resources, each alone.

    Shared memory: the tile's K and V are written once, and read by every warpgroup (wgmma) or warp; wgmma reads Q too.
    """
    rate = gpu.tensor_flops_per_clk_sm
    issue = SOFTMAX_INSTRUCTIONS / flops.WARP
    work, row_bytes = 4 * head_dim, head_dim * flops.ELEMENT_BYTES
    readers = 2 * row_bytes / (WARPGROUP_ROWS if design.instruction == "wgmma" else design.warp_rows)
    if design.instruction == "wgmma":
        readers += row_bytes / design.tile_n
    else:
        rate = gpu.mma_sync_flops_per_clk_sm or rate
        issue += work / MMA_FLOPS
    shared_bytes = readers + 2 * row_bytes / design.tile_m
    return {
        "tensor cores": work / rate,
        "MUFU": 1 / gpu.mufu_per_clk_sm,
        "issue slots": issue / gpu.issue_per_clk_sm,
        "shared memory": shared_bytes / gpu.shared_bytes_per_clk_sm,
    }


def time_per_visit(first: float, second: float, customers: int) -> float:
    """Mean time between two completions of a closed network of two stations with these service times.

    One customer: their sum. Many: the longer one. Raises ValueError without a customer.
    """
    if customers < 1:
        raise ValueError(f"a network needs a customer, got {customers}")
    longest = max(first, second)
    ratio = min(first, second) / longest
    constants = [sum(ratio**i for i in range(n + 1)) for n in (customers, customers - 1)]
    return longest * constants[0] / constants[1]


@dataclass(frozen=True)
class Ranking:
    """The designs that fit, the fastest first, and of the others how many lack what."""

    predictions: tuple[Prediction, ...]
    unfit: dict[Reason, int]


def rank(cell: Cell, gpu: Gpu, hz: float, candidates: Sequence[Design] | None = None) -> Ranking:
    """Predict every design that fits; equal times: the one with less shared memory first."""
    found, unfit = [], Counter[Reason]()
    for design in designs(cell, gpu) if candidates is None else candidates:
        fitted = fit(design, cell.shape.head_dim, gpu)
        if isinstance(fitted, Fit):
            found.append(predict(fitted, cell, gpu, hz))
        else:
            unfit[fitted] += 1
    found.sort(key=lambda p: (p.us, p.fit.shared_bytes, p.fit.design))
    return Ranking(tuple(found), dict(unfit))
