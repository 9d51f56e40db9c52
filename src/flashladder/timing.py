"""The timing engine: device time of every arm of a cell, measured together.

A block visits all arms in random order and then in the reverse order, so any two arms form an ABBA or BAAB quad in
every block and drift cancels between them. A sample is one replay of a CUDA graph of enough launches to last
SAMPLE_US, between two events; where it is of several, blocks take turns with CAPTURES graphs. What is timed was checked
on the same inputs before, and is checked again after.

A strict timer trusts no arm: before every sample all inputs get new values and all outputs NaN; each launch of a sample
has an output of its own, none of which may keep a NaN; and the last arm of every block is held to the oracle. So what
is left out, kept from an earlier call or done only where it is checked is a wrong output and not a shorter time.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import ceil, sqrt
from typing import Any

import msgspec
import numpy as np

from flashladder import flops, reference
from flashladder.arms import ArmSpec, LoadedArm
from flashladder.arrays import CudaMemory
from flashladder.capture import set_apart
from flashladder.check import EPS, distance, first_line, limits_of, seed_of
from flashladder.inputs import NORMAL, Case, values_of
from flashladder.ladder import CONTROL
from flashladder.machine import Nvml, gpu_digest
from flashladder.model import (
    ArmTiming,
    BlockTelemetry,
    Cell,
    CellTiming,
    DtypeName,
    L2Mode,
    Preset,
    Roof,
    Slack,
    Status,
    ValueTiming,
)

SAMPLE_US = 100.0
"""Events tick in 32 ns steps: at 100 us that is 0.03 %."""
MAX_LAUNCHES = 200
CAPTURES = 8
"""Graphs of an arm whose samples are of several launches, each with outputs of its own; blocks take turns with them. On
an H200, graphs of the same cuDNN calls of 6 us differ by 4 %, each true to itself from block to block; of FA3 and
PyTorch's flash, by 0.5 %."""
CHECKED_ROWS = 18
UNWRITTEN = "a sample left an output unwritten"
ROOF_SIZE = 8192
ROOF_SAMPLES = 40
VALUE_QUADS = 12
VALUE_LAUNCHES = 3
"""Least launches in a sample on a kind of values: the first alone finds what other values left in the L2."""
HOST_CALLS = 40
HOST_CALLS_SLOW = 5
SLOW_S = 1e-3
PLATEAU = 0.02
"""The clock has settled when three readings lie within this fraction."""
MAX_WARMUP_FACTOR = 4
ESTIMATE_SPIN_CYCLES = (3_000_000, 3_000_000, 30_000_000)
"""Of each try. The first is about 1.5 ms: three calls of a slow dispatcher take the host less, unless it loads."""
MAX_RENEWED = 8
"""Input sets that get new values before a strict sample: where there are more, others each time."""
CLOCK_S, CLOCK_ROUNDS = 0.03, 2
"""How long an arm runs on end for the parent's clock, and how often."""
SPIN_CYCLES_PER_SAMPLE = 40_000
"""About 20 us a sample of a block: the host enqueues a whole block while the GPU spins."""


_Call = Callable[[int, tuple[Any, Any]], tuple[Any, Any | None]]
"""Launches on the input set of that number; gives what the arm returned, in the given (O, LSE) or elsewhere."""


@dataclass
class _Sample:
    """What enqueues the launches of a sample: the replay of a graph, or the calls one by one."""

    run: Callable[[], None]
    captured: bool
    outputs: _Outputs
    results: list[tuple[Any, Any | None]]
    """What the launches returned: of all with an output of their own, else of the last."""


@dataclass
class _Prepared:
    """An arm ready to be sampled in one cell."""

    arm: LoadedArm
    launches: int
    blocks: int
    estimate_s: float
    samples: Sequence[_Sample]
    """Blocks take turns with them; the two visits of one block are of the same."""
    blocks_seen: list[int] = field(default_factory=list)
    ns: list[tuple[float, float]] = field(default_factory=list)
    unwritten: Any = None
    """On the GPU, whether a strict sample left a NaN in its outputs."""
    fault: str | None = None
    """What a strict block found wrong."""

    @property
    def captured(self) -> bool:
        return self.samples[0].captured

    def of_block(self, block: int) -> _Sample:
        return self.samples[block % len(self.samples)]

    def set_of(self, slot: int, sets: int) -> int:
        """The input set of the launch whose result stands in `slot`."""
        return (slot if len(self.samples[0].outputs) > 1 else self.launches - 1) % sets


class _Outputs:
    """O and LSE: one for all launches, or one for each."""

    def __init__(self, torch: Any, q: Any, count: int) -> None:
        self.o = torch.full((count, *q.shape), float("nan"), dtype=q.dtype, device="cuda")
        self.lse = torch.full((count, *q.shape[:3]), float("nan"), dtype=torch.float32, device="cuda")

    def __len__(self) -> int:
        return len(self.o)

    def __getitem__(self, slot: int) -> tuple[Any, Any]:
        return self.o[slot], self.lse[slot]

    def poison(self) -> None:
        self.o.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def unwritten(self) -> Any:
        """Whether a NaN is left, on the GPU."""
        return self.o.isnan().any() | self.lse.isnan().any()


class _UnfitError(Exception):
    """This arm is not timed in this cell."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class _Inputs:
    """Inputs of a cell on the GPU, sets of q, k and v, and their oracle. `generator` is what renews them."""

    def __init__(
        self, torch: Any, cell: Cell, sets: Sequence[tuple[Any, Any, Any]], seed: int, generator: Any = None
    ) -> None:
        self.torch, self.cell, self.sets = torch, cell, sets
        s = cell.shape
        self.scale = 1 / sqrt(s.head_dim)
        rows = np.random.default_rng(seed).choice(s.seq_q, min(s.seq_q, CHECKED_ROWS - 2), replace=False)
        self.rows = torch.tensor(sorted({0, s.seq_q - 1, *rows.tolist()}), device="cuda")
        self._oracles: dict[int, Any] = {}
        self._generator = generator
        self._next = 0

    @classmethod
    def random(cls, torch: Any, cell: Cell, sets: int, seed: int) -> _Inputs:
        """Normal values, other ones in each of as many sets."""
        s = cell.shape
        dtype = torch.float16 if cell.dtype == "fp16" else torch.bfloat16
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(heads: int, rows: int) -> Any:
            return torch.randn(s.batch, heads, rows, s.head_dim, device="cuda", dtype=dtype, generator=generator)

        drawn = [
            (randn(s.heads_q, s.seq_q), randn(s.heads_kv, s.seq_k), randn(s.heads_kv, s.seq_k)) for _ in range(sets)
        ]
        return cls(torch, cell, drawn, seed, generator)

    @classmethod
    def of_kind(cls, torch: Any, cell: Cell, kind: str, seed: int) -> _Inputs:
        """One set of a kind of values (inputs.VALUES), the same in every head: a whole cell takes the host a second."""
        s, memory = cell.shape, CudaMemory()
        one = msgspec.structs.replace(s, batch=1, heads_q=1, heads_kv=1)
        head = Case("values", msgspec.structs.replace(cell, shape=one), kind)
        q, k, v = (
            memory.shaped(x).expand(s.batch, heads, -1, -1).contiguous()
            for x, heads in zip(values_of(head, seed), (s.heads_q, s.heads_kv, s.heads_kv), strict=True)
        )
        return cls(torch, cell, [(q, k, v)], seed)

    def renew(self) -> None:
        """New random values in place; enqueued."""
        count = min(len(self.sets), MAX_RENEWED)
        for number in range(self._next, self._next + count):
            for x in self.sets[number % len(self.sets)]:
                x.normal_(generator=self._generator)
        self._next += count
        self._oracles.clear()

    def fault(self, number: int, o: Any, lse: Any | None, slack: Slack) -> str | None:
        """What is wrong with O and LSE of set `number` on the checked rows; None when they are right."""
        torch = self.torch
        if number not in self._oracles:
            q, k, v = (x.to(torch.float64) for x in self.sets[number])
            q = q.index_select(2, self.rows)
            arguments: dict[str, Any] = {
                "scale": self.scale,
                "causal": self.cell.causal,
                "rows": self.rows,
                "seq_q": self.cell.shape.seq_q,
            }
            dtype = self.sets[number][0].dtype
            oracle = reference.attention(q, k, v, **arguments)
            unfused = reference.attention(q, k, v, **arguments, rounding=lambda x: x.to(dtype).to(torch.float64))
            self._oracles[number] = oracle, limits_of(oracle, unfused, self.cell.dtype)
        oracle, limits = self._oracles[number]
        got = o.index_select(2, self.rows).to(torch.float64)
        got_lse = None if lse is None else lse.index_select(2, self.rows).to(torch.float64)
        return distance(got, got_lse, oracle, limits, slack).fault


class Timer:
    """Times cells in this process, on the current GPU. `rates` are the known seconds a FLOP, by arm/head_dim."""

    def __init__(self, preset: Preset, rates: dict[str, float], *, strict: bool = False) -> None:
        import torch

        self.torch = torch
        self.strict = strict
        self.preset = preset
        self.rates = rates
        self.nvml = Nvml()
        self.gpu_digest = gpu_digest()
        self.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush_buffer = torch.empty(2 * self.l2_bytes, dtype=torch.uint8, device="cuda")
        self._of_kind = lru_cache(maxsize=2)(partial(_Inputs.of_kind, torch))
        """Normal values and one other kind: what the arms of a cell share."""
        self._is_warm = False

    def time_cell(
        self,
        specs: Sequence[ArmSpec],
        opened: Callable[[ArmSpec], LoadedArm],
        cell: Cell,
        l2: L2Mode,
        excluded: dict[str, tuple[Status, str]],
        seed: int,
        at: Callable[[str], None],
        clock: Callable[[Cell, str | None, int], None] = lambda cell, arm, launches: None,
    ) -> CellTiming:
        """Check, warm up, sample and check again; an arm that cannot be timed becomes a record with its reason.

        What is excluded is not opened, and where all is, no inputs are made. A strict timer also runs each arm on end
        between two calls of `clock`.
        """
        torch = self.torch
        seed = zlib.crc32(f"{seed}/{cell.id}".encode())
        sets = ceil(2 * self.l2_bytes / flops.input_bytes(cell)) if l2 == "cold" else 1
        at("inputs")
        inputs = _Inputs.random(torch, cell, sets if any(s.name not in excluded for s in specs) else 0, seed)
        prepared: list[_Prepared] = []
        records: dict[str, ArmTiming] = {}
        for spec in specs:
            at(spec.name)
            try:
                if spec.name in excluded:
                    status, reason = excluded[spec.name]
                    raise _UnfitError(status, reason)
                twin = next((p for p in prepared if self.strict or p.arm.name + CONTROL == spec.name), None)
                prepared.append(self._prepare(opened(spec), inputs, twin))
            except _UnfitError as unfit:
                records[spec.name] = _unfit_record(spec, unfit.status, unfit.reason)
        at("warm-up")
        warmup_s = self._warm_up(prepared)
        telemetry = self._sample_blocks(prepared, inputs, l2, seed, at)
        if self.strict:
            self._run_for_the_clock(prepared, cell, at, clock)
        for p in prepared:
            at(p.arm.name)
            records[p.arm.name] = self._finish(p, inputs)
        del prepared, inputs
        torch.cuda.empty_cache()
        return CellTiming(
            cell=cell,
            l2=l2,
            seed=seed,
            gpu_digest=self.gpu_digest,
            input_sets=sets,
            warmup_s=warmup_s,
            telemetry=tuple(telemetry),
            arms=tuple(records[spec.name] for spec in specs),
        )

    def roof(self, dtype: DtypeName, seed: int) -> Roof:
        """cuBLAS's product of two random square matrices, each sample one product.

        Raises RuntimeError when the product is wrong.
        """
        torch = self.torch
        kind = torch.float16 if dtype == "fp16" else torch.bfloat16
        generator = torch.Generator("cuda").manual_seed(seed)
        a, b = (torch.randn(ROOF_SIZE, ROOF_SIZE, device="cuda", dtype=kind, generator=generator) for _ in range(2))
        out = torch.empty_like(a)
        start = time.perf_counter()
        while time.perf_counter() - start < self.preset.warmup_ms * 1e-3:
            torch.matmul(a, b, out=out)
            torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ns, clocks = [], []
        for _ in range(ROOF_SAMPLES):
            torch.cuda._sleep(SPIN_CYCLES_PER_SAMPLE)
            events[0].record()
            torch.matmul(a, b, out=out)
            events[1].record()
            torch.cuda.synchronize()
            ns.append(_ns((events[0], events[1]), 1))
            clocks.append(self.nvml.sm_clock_mhz())
        rows = slice(0, CHECKED_ROWS)
        want = a[rows].to(torch.float64) @ b.to(torch.float64)
        error = float((out[rows].to(torch.float64) - want).abs().max())
        if not error <= EPS[dtype] * float(want.abs().max()):
            raise RuntimeError(f"the {dtype} product is off by {error:.3g}")
        return Roof(dtype=dtype, size=ROOF_SIZE, gpu_digest=self.gpu_digest, ns=tuple(ns), sm_clock_mhz=tuple(clocks))

    def values(self, arm: LoadedArm, cell: Cell, kind: str, seed: int) -> ValueTiming:
        """Sample an arm on a kind of values (inputs.VALUES) and on normal ones, in VALUE_QUADS quads.

        Both are checked before and after; an arm that cannot be timed on either becomes a record with its reason.
        """
        torch, seeds = self.torch, {name: seed_of(Case("values", cell, name), seed) for name in (NORMAL, kind)}
        record = partial(
            ValueTiming,
            arm=arm.name,
            sha256=arm.sha256,
            cell=cell,
            values=kind,
            seed=seeds[kind],
            gpu_digest=self.gpu_digest,
        )
        normal, odd = (self._of_kind(cell, name, seeds[name]) for name in (NORMAL, kind))
        try:
            on_normal = self._prepare(arm, normal, None, VALUE_LAUNCHES)
            on_odd = self._prepare(arm, odd, on_normal)
        except _UnfitError as unfit:
            return record(reason=f"{unfit.status}: {unfit.reason}")
        if not self._is_warm:
            self._warm_up((on_normal, on_odd))
            self._is_warm = True
        rng = np.random.default_rng(seeds[kind])
        visits = (on_normal, on_odd, on_odd, on_normal)
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in visits]
        for quad in range(VALUE_QUADS):
            torch.cuda._sleep(int(SPIN_CYCLES_PER_SAMPLE * len(visits) * (1 + rng.random())))
            for p, pair in zip(visits, events, strict=True):
                self._one_sample(p, quad, pair)
            torch.cuda.synchronize()
            first, second, third, last = (_ns(pair, on_normal.launches) for pair in events)
            on_normal.ns.append((first, last))
            on_odd.ns.append((second, third))
        for p, inputs in ((on_normal, normal), (on_odd, odd)):
            for s in p.samples:
                if fault := inputs.fault(0, *s.results[0], arm.spec.slack):
                    return record(reason=f"failed: incorrect after timing: {fault}")
        return record(launches_per_sample=on_normal.launches, ns=tuple(on_odd.ns), normal_ns=tuple(on_normal.ns))

    # --- preparation ---

    def _prepare(self, arm: LoadedArm, inputs: _Inputs, twin: _Prepared | None, least: int = 1) -> _Prepared:
        """Check, estimate and capture `least` launches or more. A control takes its twin's batch, so that the two
        differ in nothing.

        A strict timer gives all arms the first one's.
        """
        torch, cell = self.torch, inputs.cell
        rate_key = f"{arm.name}/{cell.shape.head_dim}"
        known = self.rates.get(rate_key)
        if known is not None:
            self._blocks_within_budget(known * flops.flops(cell) / 2, "would take")

        def call(number: int, output: tuple[Any, Any]) -> tuple[Any, Any | None]:
            return arm(*inputs.sets[number], *output, inputs.scale, cell.causal)

        try:
            with arm.context():
                estimate_s = self._checked_estimate(arm, inputs, call)
                if cell_flops := flops.flops(cell):
                    self.rates[rate_key] = min(known or np.inf, estimate_s / cell_flops)
                launches = max(least, min(MAX_LAUNCHES, ceil(SAMPLE_US * 1e-6 / estimate_s)))
                launches = twin.launches if twin else launches
                blocks = self._blocks_within_budget(estimate_s * launches, "take")
                return self._capture(arm, inputs, call, launches, blocks, estimate_s)
        except _UnfitError:
            raise
        except (NotImplementedError, ValueError, TypeError) as error:
            raise _UnfitError("unsupported", first_line(error)) from error
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise _UnfitError("failed", "out of GPU memory") from error

    def _blocks_within_budget(self, sample_s: float, verb: str) -> int:
        preset = self.preset
        least_s = 2 * preset.min_blocks * sample_s
        if least_s > preset.arm_limit_s:
            raise _UnfitError(
                "skipped",
                f"{preset.min_blocks} blocks {verb} {least_s:.1f} s or more, "
                f"over the preset's limit of {preset.arm_limit_s:g} s an arm",
            )
        return min(preset.blocks, max(preset.min_blocks, int(preset.arm_budget_s / (2 * sample_s))))

    def _checked_estimate(self, arm: LoadedArm, inputs: _Inputs, call: _Call) -> float:
        """Device seconds of a call whose result is right."""
        output = _Outputs(self.torch, inputs.sets[0][0], 1)[0]
        o, lse = call(0, output)
        self.torch.cuda.synchronize()
        if fault := inputs.fault(0, o, lse, arm.spec.slack):
            raise _UnfitError("failed", f"incorrect: {fault}")
        return self._estimate(lambda: call(0, output))

    def _estimate(self, call: Callable[[], object]) -> float:
        """Device seconds a call, by events around three that were enqueued while the GPU spun.

        Where the spin ended first, the host's time is among them: the GPU spins again, for longer.
        """
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        for cycles in ESTIMATE_SPIN_CYCLES:
            self.torch.cuda._sleep(cycles)
            start.record()
            for _ in range(3):
                call()
            is_late = bool(start.query())
            end.record()
            end.synchronize()
            if not is_late:
                break
        return max(float(start.elapsed_time(end)) * 1e-3 / 3, 1e-6)

    def _capture(
        self,
        arm: LoadedArm,
        inputs: _Inputs,
        call: _Call,
        launches: int,
        blocks: int,
        estimate_s: float,
    ) -> _Prepared:
        """Record `launches` calls in CUDA graphs and prove that each replay computes; else enqueue them one by one."""
        samples = [self._sample_of(inputs, call, launches) for _ in range(CAPTURES if launches > 1 else 1)]
        samples = [s for s in samples if not s.captured][:1] or samples
        p = _Prepared(arm, launches, blocks, estimate_s, samples)
        for s in samples:
            s.outputs.poison()
            if s.captured:
                for o, _ in s.results:
                    o.fill_(float("nan"))
            s.run()
            self.torch.cuda.synchronize()
            what = "graph replay" if s.captured else "batch"
            if fault := inputs.fault(p.set_of(0, len(inputs.sets)), *s.results[0], arm.spec.slack):
                raise _UnfitError("failed", f"a {what} is incorrect: {fault}")
            if self.strict and (fault := self._fault_on_new_values(p, s, inputs)):
                raise _UnfitError("failed", f"a {what} on new values is incorrect: {fault}")
        return p

    def _sample_of(self, inputs: _Inputs, call: _Call, launches: int) -> _Sample:
        """A graph of `launches` calls, or where none is captured the calls.

        Each waits for all of the one before, as behind a caller's own kernels: else one that is launched early would
        begin beside the end of itself. Where no graph is captured, a kernel that does nothing stands between.
        """
        torch = self.torch
        sets = len(inputs.sets)
        outputs = _Outputs(torch, inputs.sets[0][0], launches if self.strict else 1)
        kept: list[tuple[Any, Any | None]] = [outputs[slot] for slot in range(len(outputs))]

        def enqueue() -> None:
            for launch in range(launches):
                if launch and not set_apart(torch.cuda.current_stream().cuda_stream):
                    torch.cuda._sleep(0)
                slot = launch % len(outputs)
                kept[slot] = call(launch % sets, outputs[slot])

        graph = torch.cuda.CUDAGraph()
        try:
            with warnings.catch_warnings(), torch.cuda.graph(graph):
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # the replay's check tells
                enqueue()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return _Sample(enqueue, False, outputs, kept)
        return _Sample(graph.replay, True, outputs, kept)

    def _fault_on_new_values(self, p: _Prepared, sample: _Sample, inputs: _Inputs) -> str | None:
        """Sample once more where nothing is as it was, and check what every launch wrote."""
        self._renew(sample, inputs)
        with p.arm.context():
            sample.run()
        self.torch.cuda.synchronize()
        sets = len(inputs.sets)
        for slot in sorted({0, len(sample.results) // 2, len(sample.results) - 1}):
            if fault := inputs.fault(p.set_of(slot, sets), *sample.results[slot], p.arm.spec.slack):
                return fault
        return UNWRITTEN if bool(sample.outputs.unwritten()) else None

    def _renew(self, sample: _Sample, inputs: _Inputs) -> None:
        inputs.renew()
        sample.outputs.poison()

    # --- sampling ---

    def _warm_up(self, prepared: Sequence[_Prepared]) -> float:
        """Run the arms until warmup_ms have passed and the SM clock has settled; returns the seconds it took."""
        start = time.perf_counter()
        clocks: list[int] = []
        least = self.preset.warmup_ms * 1e-3
        while prepared:
            for p in prepared:
                if p.estimate_s * p.launches < 0.05:
                    with p.arm.context():
                        for s in p.samples:
                            s.run()
            self.torch.cuda.synchronize()
            clocks.append(self.nvml.sm_clock_mhz() or 0)
            elapsed = time.perf_counter() - start
            recent = clocks[-3:]
            settled = len(recent) == 3 and max(recent) - min(recent) <= PLATEAU * max(recent)
            if elapsed >= least and (settled or elapsed >= MAX_WARMUP_FACTOR * least):
                break
        return round(time.perf_counter() - start, 3)

    def _sample_blocks(
        self, prepared: Sequence[_Prepared], inputs: _Inputs, l2: L2Mode, seed: int, at: Callable[[str], None]
    ) -> list[BlockTelemetry]:
        torch = self.torch
        rng = np.random.default_rng(seed)
        events = {
            (id(p), visit): tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            for p in prepared
            for visit in range(2)
        }
        telemetry = []
        for block in range(max((p.blocks for p in prepared), default=0)):
            active = [p for p in prepared if block < p.blocks]
            order = [active[i] for i in rng.permutation(len(active))]
            visits = [(p, 0) for p in order] + [(p, 1) for p in reversed(order)]
            at(f"block {block}")
            # Random length: blocks of even spacing could lock to a periodic drift of the clock.
            torch.cuda._sleep(int(SPIN_CYCLES_PER_SAMPLE * len(visits) * (1 + rng.random())))
            for p, visit in visits:
                if self.strict:
                    self._renew(p.of_block(block), inputs)
                if l2 == "cold":
                    self._flush_buffer.fill_(block & 1)
                if self.strict:  # the host enqueues the sample meanwhile
                    torch.cuda._sleep(SPIN_CYCLES_PER_SAMPLE)
                self._one_sample(p, block, events[id(p), visit])
                if self.strict:
                    left = p.of_block(block).outputs.unwritten()
                    p.unwritten = left if p.unwritten is None else p.unwritten | left
            torch.cuda.synchronize()
            telemetry.append(self.nvml.block_telemetry())
            if self.strict and visits:
                last = visits[-1][0]
                results = last.of_block(block).results
                slot = int(rng.integers(len(results)))
                o, lse = results[slot]
                found = inputs.fault(last.set_of(slot, len(inputs.sets)), o, lse, last.arm.spec.slack)
                last.fault = last.fault or found
            for p in active:
                first, second = (events[id(p), visit] for visit in range(2))
                p.blocks_seen.append(block)
                p.ns.append((_ns(first, p.launches), _ns(second, p.launches)))
        return telemetry

    def _one_sample(self, p: _Prepared, block: int, events: tuple[Any, Any]) -> None:
        start, end = events
        run = p.of_block(block).run
        if p.captured:
            start.record()
            run()
            end.record()
            return
        with p.arm.context():
            self.torch.cuda._sleep(SPIN_CYCLES_PER_SAMPLE * (1 + p.launches))
            start.record()
            run()
            end.record()

    def _run_for_the_clock(
        self,
        prepared: Sequence[_Prepared],
        cell: Cell,
        at: Callable[[str], None],
        clock: Callable[[Cell, str | None, int], None],
    ) -> None:
        """Run as many launches of every arm on end, to and fro, so that another process can time them by its clock."""
        slowest = max((p.estimate_s for p in prepared), default=0.0)
        for turn in range(CLOCK_ROUNDS):
            for p in prepared if turn % 2 == 0 else reversed(prepared):
                at(p.arm.name)
                samples = max(1, ceil(CLOCK_S / slowest / p.launches))
                self.torch.cuda.synchronize()
                clock(cell, None, 0)
                with p.arm.context():
                    for number in range(samples):
                        p.of_block(number).run()
                self.torch.cuda.synchronize()
                clock(cell, p.arm.name, samples * p.launches)

    def _finish(self, p: _Prepared, inputs: _Inputs) -> ArmTiming:
        """Check the last output of each graph, then measure single host calls."""
        if self.strict and (p.fault or (p.unwritten is not None and bool(p.unwritten))):
            return _unfit_record(p.arm.spec, "failed", f"incorrect while it was timed: {p.fault or UNWRITTEN}")
        for s in p.samples:
            if self.strict:
                fault = self._fault_on_new_values(p, s, inputs)
            else:
                fault = inputs.fault(p.set_of(0, len(inputs.sets)), *s.results[0], p.arm.spec.slack)
            if fault:
                return _unfit_record(p.arm.spec, "failed", f"incorrect after timing: {fault}")
        return ArmTiming(
            arm=p.arm.name,
            kind=p.arm.spec.kind,
            status="timed",
            sha256=p.arm.sha256,
            launches_per_sample=p.launches,
            captured=p.captured,
            graphs=len(p.samples),
            blocks=tuple(p.blocks_seen),
            ns=tuple(p.ns),
            host_us=self._host_us(p, inputs),
        )

    def _host_us(self, p: _Prepared, inputs: _Inputs) -> tuple[float, ...]:
        calls = HOST_CALLS if p.estimate_s < SLOW_S else HOST_CALLS_SLOW
        arguments = (*inputs.sets[0], *p.samples[0].outputs[0], inputs.scale, inputs.cell.causal)
        times = []
        with p.arm.context():
            for _ in range(calls // 4):
                p.arm(*arguments)
            self.torch.cuda.synchronize()
            for _ in range(calls):
                start = time.perf_counter_ns()
                p.arm(*arguments)
                times.append((time.perf_counter_ns() - start) / 1e3)
            self.torch.cuda.synchronize()
        return tuple(times)


def _ns(events: tuple[Any, Any], launches: int) -> float:
    return round(float(events[0].elapsed_time(events[1])) * 1e6 / launches, 1)


def _unfit_record(spec: ArmSpec, status: Status, reason: str) -> ArmTiming:
    return ArmTiming(arm=spec.name, kind=spec.kind, status=status, reason=reason, sha256=spec.sha256)
