"""The correctness gate: a kernel against the float64 oracle.

A case runs twice in the same buffers with fresh values, so that a result cached by pointer or shape is wrong the second
time. Outputs are poisoned before each run, guards surround every tensor, inputs must come back unmutated. The error
must be at most twice that of the unfused same-dtype reference, plus a floor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace

from flashladder import reference
from flashladder.arrays import NUMPY_DTYPES, HostMemory, Memory
from flashladder.inputs import LAYOUTS, Case, Layout, Placed, Values, flattened, place, values_of
from flashladder.ladder import gated_name
from flashladder.model import USUAL, Cell, CheckRecord, Errors, Slack, Status

Inputs = tuple[Any, Any, Any]
"""The whole buffers of q, k and v, guards and all, in a memory's arrays."""

POISONS = (float("nan"), 12352.0)
"""One a round. The second is a number, so that an element left unwritten shows even where NaN is right."""

FACTOR = 2.0
EPS = {"fp16": 2.0**-10, "bf16": 2.0**-7}
LSE_FLOOR = 4e-6


class Arm(Protocol):
    """Something that computes attention: a rung or a peer."""

    @property
    def name(self) -> str: ...

    @property
    def sha256(self) -> str | None: ...

    def context(self) -> AbstractContextManager[object]:
        """Entered once around a batch of calls."""

    def __call__(
        self, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /
    ) -> tuple[Any, Any | None]:
        """Returns O and LSE: the buffers that were passed, or its own; None when it gives no LSE."""


@dataclass(frozen=True)
class Distance:
    errors: Errors
    limits: Errors
    fault: str | None
    """What failed, in words; None when within the limits."""


def _stats(x: Any, y: Any) -> tuple[Any, Any]:
    """Largest absolute and root mean square difference where y is finite, as arrays; 0 when it is nowhere."""
    xp = array_namespace(x, y)
    if 0 in y.shape:
        return xp.sum(y), xp.sum(y)
    finite = xp.isfinite(y)
    difference = xp.where(finite, xp.abs(x - y), xp.zeros_like(y))
    count = xp.sum(xp.astype(finite, y.dtype))
    return xp.max(difference), xp.sqrt(xp.sum(difference * difference) / xp.where(count > 0, count, count + 1))


def same_specials(x: Any, y: Any) -> Any:
    """Whether NaN and each infinity stand in the same places, as an array."""
    xp = array_namespace(x, y)
    infinite = xp.isinf(y)
    return xp.all((xp.isnan(x) == xp.isnan(y)) & (xp.isinf(x) == infinite) & (~infinite | (x == y)))


def _numbers(values: list[Any]) -> list[float]:
    """Scalar arrays as floats, in one transfer."""
    xp = array_namespace(*values)
    same = [value if value.dtype == xp.float64 else xp.astype(value, xp.float64) for value in values]
    return [float(x) for x in xp.stack(same).tolist()]


def limits_of(oracle: tuple[Any, Any], unfused: tuple[Any, Any], dtype: str) -> Errors:
    """What the gate allows: FACTOR times the error of the unfused reference, plus a floor."""
    xp = array_namespace(oracle[0])
    with np.errstate(invalid="ignore"):
        pairs = (
            *_stats(unfused[0], oracle[0]),
            _stats(unfused[1], oracle[1])[0],
            *(_stats(xp.zeros_like(y), y)[0] for y in oracle),
        )
    ref_max, ref_rms, ref_lse, largest_o, largest_lse = _numbers(list(pairs))
    half_ulp = EPS[dtype] / 2 * largest_o
    return Errors(
        o_max=FACTOR * ref_max + half_ulp,
        o_rms=FACTOR * ref_rms + half_ulp / 4,
        lse_max=FACTOR * ref_lse + LSE_FLOOR * (1 + largest_lse),
    )


def _errors(o_max: float, o_rms: float, lse_max: float) -> Errors:
    """Those that are no number are infinite."""
    return Errors(
        **{
            name: x if np.isfinite(x) else float("inf")
            for name, x in (("o_max", o_max), ("o_rms", o_rms), ("lse_max", lse_max))
        }
    )


def _among_finite(o: Any, lse: Any | None, oracle: tuple[Any, Any]) -> Errors | None:
    """The errors where the oracle is finite throughout; None when O or the LSE is not, or is empty."""
    if 0 in o.shape:
        return None
    xp = array_namespace(o)
    difference = o - oracle[0]
    found = [xp.max(xp.abs(difference)), xp.sqrt(xp.mean(difference * difference))]
    if lse is not None:
        found.append(xp.max(xp.abs(lse - oracle[1])))
    numbers = [*_numbers(found), 0.0][:3]
    return _errors(*numbers) if all(map(np.isfinite, numbers)) else None


def distance(
    o: Any, lse: Any | None, oracle: tuple[Any, Any], usual: Errors, slack: Slack = USUAL, *, finite: bool = False
) -> Distance:
    """Judge O and LSE (float64 arrays) against the oracle and the `usual` limits, which `slack` multiplies.

    Without an LSE only O is judged. `finite`: the oracle is known to be so throughout.
    """
    limits = Errors(o_max=slack.o * usual.o_max, o_rms=slack.o * usual.o_rms, lse_max=slack.lse * usual.lse_max)
    with np.errstate(invalid="ignore"):  # inf - inf, where the oracle is infinite, counts for nothing
        if finite and (errors := _among_finite(o, lse, oracle)) is not None:
            return Distance(errors, limits, _excess(errors, limits))
        found = [*_stats(o, oracle[0]), same_specials(o, oracle[0])]
        if lse is not None:
            found += [_stats(lse, oracle[1])[0], same_specials(lse, oracle[1])]
    o_max, o_rms, o_specials, lse_max, lse_specials = [*_numbers(found), 0.0, 1.0][:5]
    errors = _errors(o_max, o_rms, lse_max)
    if not o_specials:
        return Distance(errors, limits, "NaN or infinities of O are not where the oracle has them")
    if not lse_specials:
        return Distance(errors, limits, "NaN or infinities of the LSE are not where the oracle has them")
    return Distance(errors, limits, _excess(errors, limits))


def _excess(errors: Errors, limits: Errors) -> str | None:
    """The first error above its limit."""
    for field in ("o_max", "o_rms", "lse_max"):
        error, limit = getattr(errors, field), getattr(limits, field)
        if not error <= limit:
            return f"{field} error {error:.3g}, limit {limit:.3g}"
    return None


@dataclass(frozen=True)
class Tensors:
    """A case's tensors."""

    q: Placed
    k: Placed
    v: Placed
    o: Placed
    lse: Placed
    around_o: Any
    """True for the elements of O's buffer that are not O's, in the memory of that; and so for the LSE."""
    around_lse: Any


def _layouts(case: Case) -> tuple[Layout, Layout]:
    """Of Q and O; of K and V."""
    layout = LAYOUTS[case.layout]
    return (LAYOUTS["bhsd"] if layout.repeats is not None else layout), layout


def allocate(case: Case, memory: Memory) -> Tensors:
    s = case.cell.shape
    q_layout, layout = _layouts(case)
    dtype = NUMPY_DTYPES[case.cell.dtype]
    q_dims = (s.batch, s.heads_q, s.seq_q, s.head_dim)
    kv_dims = (s.batch, s.heads_kv, s.seq_k, s.head_dim)
    o = place(memory, q_dims, q_layout, dtype, 0.0)
    lse = place(memory, (*q_dims[:3], 1), LAYOUTS["bhsd"], np.dtype(np.float32), 0.0)
    return Tensors(
        q=place(memory, q_dims, q_layout, dtype, float("nan")),
        k=place(memory, kv_dims, layout, dtype, float("nan")),
        v=place(memory, kv_dims, layout, dtype, float("nan")),
        o=o,
        lse=replace(lse, view=lse.view[..., 0]),
        around_o=memory.shaped(~o.inside),
        around_lse=memory.shaped(~lse.inside),
    )


def buffers(case: Case, values: Values, memory: Memory) -> Inputs:
    """What q, k and v hold in the case's layout, poisoned around."""
    q_layout, layout = _layouts(case)
    q, k, v = (
        memory.shaped(flattened(x, where, float("nan")))
        for x, where in zip(values, (q_layout, layout, layout), strict=True)
    )
    return q, k, v


def _call(arm: Arm, case: Case, t: Tensors) -> tuple[Any, Any | None]:
    return arm(t.q.view, t.k.view, t.v.view, t.o.view, t.lse.view, case.softmax_scale, case.cell.causal)


def run_round(
    arm: Arm, case: Case, memory: Memory, tensors: Tensors, inputs: Inputs, poison: float
) -> tuple[Any, Any | None, str | None]:
    """One run: O, LSE and a fault found around them (guards, mutated inputs)."""
    xp = array_namespace(tensors.q.flat)
    before = []
    for output in (tensors.o, tensors.lse):
        memory.fill(output.flat, poison)
        before.append(xp.asarray(memory.raw(output.flat), copy=True))
    given = dict(zip(("q", "k", "v"), inputs, strict=True))
    placed = {name: getattr(tensors, name) for name in given}
    writes = [(placed[name].flat, flat) for name, flat in given.items()]
    o, lse = memory.run(writes, lambda: _call(arm, case, tensors))
    changed = [xp.any(memory.raw(placed[name].flat) != memory.raw(flat)) for name, flat in given.items()]
    changed += [
        xp.any((memory.raw(output.flat) != old) & around)
        for output, old, around in (
            (tensors.o, before[0], tensors.around_o),
            (tensors.lse, before[1], tensors.around_lse),
        )
    ]
    name = next((n for n, here in zip((*given, "o", "lse"), xp.stack(changed).tolist(), strict=True) if here), None)
    fault = f"memory outside {name} was written" if name is not None else None
    if name in given:
        differs = memory.bits(placed[name].flat) != memory.bits(given[name])
        if differs[placed[name].inside].any():
            fault = f"the input {name} was mutated"
    return o, lse, fault


def _differs(memory: Memory, arm: Arm, case: Case, tensors: Tensors) -> str | None:
    """Run again on the same inputs; every repeat must give the same bits."""
    first: tuple[np.ndarray, ...] | None = None
    for repeat in range(case.repeats):
        o, lse = memory.run((), lambda: _call(arm, case, tensors))
        now = tuple(memory.bits(x) for x in (o, lse) if x is not None)
        if first is None:
            first = now
        elif not all(np.array_equal(a, b) for a, b in zip(first, now, strict=True)):
            return f"repeat {repeat + 1} of {case.repeats} on the same inputs gave other bits: a race"
    return None


@dataclass(frozen=True)
class Problem:
    """Values of one round of a case; in the memory's arrays these, the oracle's answer; and the gate's limits."""

    values: Values
    inputs: Inputs
    oracle: tuple[Any, Any]
    finite: bool
    """The oracle has neither NaN nor infinity."""
    limits: Errors


def pose(case: Case, memory: Memory, seed: int) -> tuple[Problem, ...]:
    """The problems of a case, one a round; the same for every arm."""
    return tuple(_pose(case, memory, seed_of(case, seed) + number) for number in range(len(POISONS)))


def _pose(case: Case, memory: Memory, seed: int) -> Problem:
    values = values_of(case, seed)
    q, k, v = (memory.float64(x) for x in values)
    run = partial(reference.attention, q, k, v, scale=case.softmax_scale, causal=case.cell.causal)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN by intent
        oracle, unfused = run(), run(rounding=memory.rounding(case.cell.dtype))
    xp = array_namespace(oracle[0])
    finite = all(_numbers([xp.all(xp.isfinite(x)) for x in oracle]))
    limits = limits_of(oracle, unfused, case.cell.dtype)
    return Problem(values, buffers(case, values, memory), oracle, finite, limits)


def largest_score(values: Values) -> float:
    """Largest finite |q . k| of a problem, unscaled; masked pairs count, since a kernel may compute them."""
    q, k, _ = (x.astype(np.float64) for x in values)
    if not q.size or not k.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # the query heads of a KV head follow each other
        scores = np.abs(grouped @ k.transpose(0, 1, 3, 2))
    return float(np.max(scores, initial=0.0, where=np.isfinite(scores)))


def seed_of(case: Case, seed: int) -> int:
    """A seed of the case's own, reproducible from the run's."""
    return zlib.crc32(f"{seed}/{case.id}".encode())


def check_case(
    arm: Arm,
    case: Case,
    memory: Memory,
    seed: int,
    problems: tuple[Problem, ...],
    slack: Slack = USUAL,
    tensors: Tensors | None = None,
) -> CheckRecord:
    """Run one case on its `problems`. What an arm raises for input it does not take is the status "unsupported".

    `tensors` may be those of another arm: each round writes them whole.
    """

    def record(status: Any, reason: str | None, found: Distance | None = None) -> CheckRecord:
        return CheckRecord(
            arm=arm.name,
            sha256=arm.sha256,
            case=case.id,
            cell=case.cell,
            status=status,
            reason=reason,
            errors=_json_errors(found.errors) if found else None,
            limits=_json_errors(found.limits) if found else None,
            seed=seed,
        )

    memory.begin(case.id)
    if tensors is None:
        tensors = allocate(case, memory)
    found: Distance | None = None
    for number, (problem, poison) in enumerate(zip(problems, POISONS, strict=True)):
        try:
            o, lse, fault = run_round(arm, case, memory, tensors, problem.inputs, poison)
        except (ValueError, TypeError, NotImplementedError) as error:
            return record("unsupported", first_line(error))
        except Exception as error:
            memory.confirm()  # else this process ends here, and the other arms go on in a new one
            return record("error", f"{type(error).__name__}: {first_line(error)}")
        if fault is None:
            got_lse = None if lse is None else memory.float64(lse)
            found = distance(memory.float64(o), got_lse, problem.oracle, problem.limits, slack, finite=problem.finite)
            fault = found.fault
        if fault is not None:
            return record("fail", f"round {number + 1}: {fault}", found)
    if case.repeats > 1 and (fault := _differs(memory, arm, case, tensors)):
        return record("fail", fault, found)
    return record("pass", None, found)


def testify(arm: Arm, case: Case, memory: Memory, seed: int) -> tuple[bytes, bytes]:
    """Run one case and give the bits of O and of the LSE, unjudged; raises what the arm raises."""
    memory.begin(case.id)
    inputs = buffers(case, values_of(case, seed_of(case, seed)), memory)
    o, lse, _ = run_round(arm, case, memory, allocate(case, memory), inputs, POISONS[1])
    return memory.bits(o).tobytes(), memory.bits(lse).tobytes()


def judge(case: Case, seed: int, o: bytes, lse: bytes, slack: Slack = USUAL) -> str | None:
    """What is wrong with the bits that testify() gave, by the oracle on this host; None when they are right."""
    s, memory = case.cell.shape, HostMemory()
    dims = (s.batch, s.heads_q, s.seq_q)
    size = dims[0] * dims[1] * dims[2]
    if (len(o), len(lse)) != (2 * size * s.head_dim, 4 * size):
        return f"{len(o)} and {len(lse)} bytes, expected {2 * size * s.head_dim} of O and {4 * size} of the LSE"
    problem = _pose(case, memory, seed_of(case, seed))
    outputs = np.frombuffer(o, NUMPY_DTYPES[case.cell.dtype]).reshape(*dims, s.head_dim)
    lses = np.frombuffer(lse, np.float32).reshape(dims)
    return distance(memory.float64(outputs), memory.float64(lses), problem.oracle, problem.limits, slack).fault


def _json_errors(errors: Errors) -> Errors:
    """Four digits of them, infinite ones as a float's largest such number: JSON has no infinity."""
    return Errors(**{f: float(f"{min(getattr(errors, f), 1.797e308):.4g}") for f in Errors.__struct_fields__})


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def refusal(records: Iterable[CheckRecord], arm: str, sha256: str | None, cell: Cell) -> tuple[Status, str] | None:
    """(status, reason) why this binary must not be timed in `cell`; None when its checks allow it.

    Its records of the cell's dtype and head dimension count; a baseline's control is judged by the baseline's.
    """
    name = gated_name(arm)
    mine = [
        r
        for r in records
        if (r.arm, r.sha256) == (name, sha256)
        and r.cell.dtype == cell.dtype
        and r.cell.shape.head_dim == cell.shape.head_dim
    ]
    bad = [r for r in mine if r.status not in ("pass", "unsupported")]
    if bad:
        return "failed", f"{len(bad)} of {len(mine)} checks failed, first {bad[0].case}: {bad[0].reason}"
    if not mine:
        return "failed", "not checked"
    if all(r.status == "unsupported" for r in mine):
        return "unsupported", mine[0].reason or "every check was refused"
    return None
