"""Kernels that must fail the gate, each by one cheat or one classic bug, on numpy or torch memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from flashladder import reference
from flashladder.arrays import HostMemory, Memory

Compute = Callable[..., tuple[Any, Any]]


def assign(target: Any, source: Any) -> None:
    """target[...] = source, with the dtype conversion, for numpy and torch."""
    if isinstance(target, np.ndarray):
        with np.errstate(over="ignore"):
            target[...] = source
    else:
        target.copy_(source)


@dataclass
class PyArm:
    """An arm from a Python function (memory, q, k, v, o, lse, scale, causal) -> None."""

    name: str
    memory: Memory
    run: Callable[..., None]
    state: dict[Any, Any] = field(default_factory=dict)
    sha256: str | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, Any]:
        with np.errstate(invalid="ignore"):
            self.run(self, q, k, v, o, lse, scale, causal)
        return o, lse


def exact(arm: PyArm, q: Any, k: Any, v: Any, scale: float, causal: bool, **options: Any) -> tuple[Any, Any]:
    """The oracle's answer on these tensors."""
    q, k, v = (arm.memory.float64(x) for x in (q, k, v))
    return reference.attention(q, k, v, scale=scale, causal=causal, **options)


def right(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    result, result_lse = exact(arm, q, k, v, scale, causal)
    assign(o, result)
    assign(lse, result_lse)


def _zeros(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    o[...] = 0
    lse[...] = 0


def _one_nan(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    right(arm, q, k, v, o, lse, scale, causal)
    if 0 not in o.shape:
        o[-1, -1, -1, -1] = float("nan")


def _stale(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    pass


def _no_lse(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    assign(o, exact(arm, q, k, v, scale, causal)[0])


def _lse_base_2(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    result, result_lse = exact(arm, q, k, v, scale, causal)
    assign(o, result)
    assign(lse, result_lse / np.log(2))


def _cached(key_of: Callable[[Any], Any]) -> Callable[..., None]:
    def run(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
        key = (key_of(q), causal)
        if key not in arm.state:
            arm.state[key] = exact(arm, q, k, v, scale, causal)
        assign(o, arm.state[key][0])
        assign(lse, arm.state[key][1])

    return run


def _pointer(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


def _mutates_input(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    right(arm, q, k, v, o, lse, scale, causal)
    if 0 not in k.shape:
        k[0, 0, 0, 0] = 1.25


def _skips_last_tile(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    seq_q, seq_k = q.shape[2], k.shape[2]
    kept = seq_k // 32 * 32
    rows = _arange(q, seq_q) + (seq_k - kept)
    result = exact(arm, q, k[:, :, :kept], v[:, :, :kept], scale, causal, rows=rows, seq_q=seq_q)
    assign(o, result[0])
    assign(lse, result[1])


def _top_left_causal(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    seq_q, seq_k = q.shape[2], k.shape[2]
    result = exact(arm, q, k, v, scale, causal, rows=_arange(q, seq_q) - (seq_k - seq_q), seq_q=seq_q)
    assign(o, result[0])
    assign(lse, result[1])


def _ignores_causal(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    right(arm, q, k, v, o, lse, scale, False)


def _ignores_scale(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    right(arm, q, k, v, o, lse, q.shape[3] ** -0.5, causal)


def _wrong_kv_head(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    heads = [h % k.shape[1] for h in range(q.shape[1])]
    right(arm, q, k[:, heads], v[:, heads], o, lse, scale, causal)


def _lower_precision(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """fp16 inputs computed in bf16, bf16 inputs with 8-bit weights and scores."""
    result = exact(arm, q, k, v, scale, causal, rounding=_coarse(arm.memory, q))
    assign(o, result[0])
    assign(lse, result[1])


def _coarse(memory: Memory, q: Any) -> Callable[[Any], Any]:
    if "bfloat16" not in str(q.dtype):
        return memory.rounding("bf16")
    if isinstance(q, np.ndarray):
        return lambda x: x.astype(ml_dtypes.float8_e5m2).astype(np.float64)
    import torch

    return lambda x: x.to(torch.float8_e5m2).to(torch.float64)


def _nan_for_empty_rows(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    right(arm, q, k, v, o, lse, scale, causal)
    o[lse == -float("inf")] = float("nan")


def _drops_nan(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    right(arm, q, k, v, o, lse, scale, causal)
    o[o != o] = 0


def _writes_past_the_end(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    right(arm, q, k, v, o, lse, scale, causal)
    if 0 in o.shape:
        return
    last = o[-1, -1, -1]
    if isinstance(o, np.ndarray):
        np.lib.stride_tricks.as_strided(last, (last.size + 1,))[-1] = 1
    else:
        last.as_strided((last.numel() + 1,), (1,))[-1] = 1


def _reads_past_the_end(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """One key more than there is, with no weight: 0 x the memory behind V."""
    right(arm, q, k, v, o, lse, scale, causal)
    if 0 in o.shape or 0 in v.shape:
        return
    last = v[-1, -1, -1]
    if isinstance(v, np.ndarray):
        behind = np.lib.stride_tricks.as_strided(last, (last.size + 1,))[-1]
    else:
        behind = last.as_strided((last.numel() + 1,), (1,))[-1]
    o[-1, -1, -1, 0] = o[-1, -1, -1, 0] + 0 * behind


def _adds_to_the_output(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """Right where O was zero."""
    result, result_lse = exact(arm, q, k, v, scale, causal)
    assign(o, arm.memory.float64(o) + result)
    assign(lse, result_lse)


def _only_where_poisoned(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """Works where it finds NaN, and takes everything else for its own earlier answer."""
    if (o != o).any():
        right(arm, q, k, v, o, lse, scale, causal)


def _only_once(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """Works while it is warmed up; later nothing is written."""
    key = (_pointer(o), causal)
    if key not in arm.state:
        arm.state[key] = True
        right(arm, q, k, v, o, lse, scale, causal)


def _heads_swapped(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    result, result_lse = exact(arm, q, k, v, scale, causal)
    order = list(reversed(range(q.shape[1])))
    assign(o, result[:, order])
    assign(lse, result_lse[:, order])


def _half_the_rows(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """Rows of the second half are those of the first: half the work."""
    right(arm, q, k, v, o, lse, scale, causal)
    half = q.shape[2] // 2
    if half:
        assign(o[:, :, half : 2 * half], arm.memory.float64(o[:, :, :half]))


def _racy(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """Right within the tolerance, but one bit differs from call to call."""
    right(arm, q, k, v, o, lse, scale, causal)
    calls = arm.state["calls"] = arm.state.get("calls", 0) + 1
    if 0 not in o.shape and calls % 7 == 0:
        o[0, 0, 0, 0] = o[0, 0, 0, 0] * 1.008


def _late(arm: PyArm, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool) -> None:
    """Work outside the caller's order: another CUDA stream, or another thread."""
    if isinstance(arm.memory, HostMemory):

        def later() -> None:
            time.sleep(0.05)
            right(arm, q, k, v, o, lse, scale, causal)

        threading.Thread(target=later, daemon=True).start()
        return
    import torch

    with torch.cuda.stream(arm.state.setdefault("stream", torch.cuda.Stream())):
        right(arm, q, k, v, o, lse, scale, causal)


def _arange(like: Any, n: int) -> Any:
    if isinstance(like, np.ndarray):
        return np.arange(n)
    import torch

    return torch.arange(n, device=like.device)


SABOTEURS: dict[str, Callable[..., None]] = {
    "zeros": _zeros,
    "one NaN": _one_nan,
    "stale output": _stale,
    "no LSE": _no_lse,
    "LSE in base 2": _lse_base_2,
    "cached by pointer": _cached(_pointer),
    "cached by shape": _cached(lambda q: tuple(q.shape)),
    "mutated input": _mutates_input,
    "last tile skipped": _skips_last_tile,
    "top-left causal": _top_left_causal,
    "mask ignored": _ignores_causal,
    "scale ignored": _ignores_scale,
    "wrong kv head": _wrong_kv_head,
    "lower precision": _lower_precision,
    "NaN for empty rows": _nan_for_empty_rows,
    "NaN dropped": _drops_nan,
    "write past the end": _writes_past_the_end,
    "read past the end": _reads_past_the_end,
    "adds to the output": _adds_to_the_output,
    "only where poisoned": _only_where_poisoned,
    "only once": _only_once,
    "heads swapped": _heads_swapped,
    "half the rows": _half_the_rows,
    "race": _racy,
    "another stream": _late,
}

_SPECIALS = "NaN or infinities of O are not"
REASONS: dict[str, str] = {
    "zeros": "round 1: o_max error",
    "one NaN": _SPECIALS,
    "stale output": "round 1: " + _SPECIALS,
    "no LSE": "NaN or infinities of the LSE",
    "LSE in base 2": "lse_max error",
    "cached by pointer": "round 2: o_max error",
    "cached by shape": "round 2: o_max error",
    "mutated input": "the input k was mutated",
    "last tile skipped": "round 1: o_max error",
    "top-left causal": "round 1: o_max error",
    "mask ignored": "round 1: o_max error",
    "scale ignored": "o_max error",
    "wrong kv head": "o_max error",
    "lower precision": "o_max error",
    "NaN for empty rows": _SPECIALS,
    "NaN dropped": _SPECIALS,
    "write past the end": "memory outside o was written",
    "read past the end": _SPECIALS,
    "adds to the output": _SPECIALS,
    "only where poisoned": "round 2: o_max error",
    "only once": "round 2: o_max error",
    "heads swapped": "round 1: o_max error",
    "half the rows": "round 1: o_max error",
    "race": "gave other bits: a race",
    "another stream": _SPECIALS,
}
"""What the gate says of a saboteur in the case that shows what it does."""
