"""flashladder.attention far out: 128 k tokens, tensors past 2^31 elements, memory and time that grow as they should."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

import flashladder
from flashladder import flops, reference
from flashladder.model import Cell, Shape

LONG = 1 << 17
PAST = 1_100_000
"""Rows of 32 heads of 64 columns: more than 2^31 elements."""
EPS = 2.0**-10
"""Of float16: what O may differ by, as a part of it and of the largest values."""


def _randn(torch: Any, heads: int, rows: int, head_dim: int) -> Any:
    return torch.randn(1, heads, rows, head_dim, device="cuda", dtype=torch.float16)


def _agrees(
    torch: Any, q: Any, k: Any, v: Any, found: tuple[Any, Any], *, head: int, rows: list[int], causal: bool
) -> None:
    """Rows of one head against float64."""
    at = torch.tensor(rows, device="cuda")
    one_q, one_k, one_v = (x[:, head : head + 1] for x in (q, k, v))
    o, lse = reference.attention(
        one_q.index_select(2, at).double(),
        one_k.double(),
        one_v.double(),
        scale=q.shape[3] ** -0.5,
        causal=causal,
        seq_q=q.shape[2],
        rows=at,
    )
    torch.testing.assert_close(found[0][:, head : head + 1, at].double(), o, rtol=2 * EPS, atol=2 * EPS)
    torch.testing.assert_close(found[1][:, head : head + 1, at].double(), lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_128k_tokens(torch: Any, head_dim: int, causal: bool) -> None:
    q, k, v = (_randn(torch, 2, LONG, head_dim) for _ in range(3))
    found = flashladder.attention(q, k, v, causal=causal, return_lse=True)
    rows = [0, 1, 63, 255, 256, LONG // 2, LONG // 2 + 77, LONG - 257, LONG - 1]
    _agrees(torch, q, k, v, found, head=1, rows=rows, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(PAST, 192), (192, PAST)], ids=["of-queries", "of-keys"])
def test_more_than_two_billion_elements(torch: Any, seq_q: int, seq_k: int, causal: bool) -> None:
    q, k, v = _randn(torch, 32, seq_q, 64), _randn(torch, 32, seq_k, 64), _randn(torch, 32, seq_k, 64)
    assert max(q.numel(), k.numel()) > 1 << 31
    found = flashladder.attention(q, k, v, causal=causal, return_lse=True)
    for head in (0, 31):
        _agrees(torch, q, k, v, found, head=head, rows=[0, 100, seq_q // 2, seq_q - 1], causal=causal)


def test_memory_grows_with_the_tokens_and_not_with_their_square(torch: Any) -> None:
    def extra(rows: int) -> int:
        q, k, v = (_randn(torch, 2, rows, 64) for _ in range(3))
        flashladder.attention(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before: int = torch.cuda.memory_allocated()
        flashladder.attention(q, k, v)
        most: int = torch.cuda.max_memory_allocated()
        return most - before

    short, long = extra(1 << 14), extra(LONG)
    print(f"memory of a call: {short} B at {1 << 14} tokens, {long} B at {LONG}")
    assert long <= 1.1 * (LONG >> 14) * short


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_flop_takes_as_long_at_128k_tokens_as_at_8k(torch: Any, head_dim: int, causal: bool) -> None:
    """As many tokens in all, so that the GPU is as full; rates drop a little where the power limit binds longer."""
    rates = {}
    for rows in (1 << 13, 1 << 15, LONG):
        heads = 4 * LONG // rows
        q, k, v = (_randn(torch, heads, rows, head_dim) for _ in range(3))
        shape = Shape(batch=1, heads_q=heads, heads_kv=heads, seq_q=rows, seq_k=rows, head_dim=head_dim)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        flashladder.attention(q, k, v, causal=causal)
        seconds = []
        for _ in range(5):
            events[0].record()
            flashladder.attention(q, k, v, causal=causal)
            events[1].record()
            torch.cuda.synchronize()
            seconds.append(events[0].elapsed_time(events[1]) / 1e3)
        rates[rows] = flops.flops(Cell(shape=shape, dtype="fp16", causal=causal)) / median(seconds) / 1e12
    print("TFLOP/s: " + ", ".join(f"{rate:.0f} at {rows}" for rows, rate in rates.items()))
    assert rates[LONG] > 0.9 * rates[1 << 13]
