"""Fused attention in Triton: what a compiler makes of the same algorithm. A peer, not a rung."""

# mypy: ignore-errors
# Triton compiles these functions from their source; their annotations are its own.

from math import e, log2

import torch
import triton
import triton.language as tl

TILES = {64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}
"""head_dim -> queries and keys a tile, warps, stages."""


@triton.jit
def _tile(
    acc, row_max, row_sum, q, k, v, first, rows, limit, scale_log2, stride_k, stride_v, seq_k,
    head_dim: tl.constexpr, tile_n: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the online softmax. Row r sees the keys below limit[r]."""
    keys = first + tl.arange(0, tile_n)
    dims = tl.arange(0, head_dim)
    k_at = k + keys[:, None].to(tl.int64) * stride_k + dims[None, :]
    v_at = v + keys[:, None].to(tl.int64) * stride_v + dims[None, :]
    k_tile = tl.load(k_at, mask=keys[:, None] < seq_k, other=0.0) if masked else tl.load(k_at)
    scores = tl.dot(q, tl.trans(k_tile))
    if masked:
        scores = tl.where(keys[None, :] < limit[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max) * scale_log2
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    decay = tl.exp2(row_max * scale_log2 - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    v_tile = tl.load(v_at, mask=keys[:, None] < seq_k, other=0.0) if masked else tl.load(v_at)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None])
    return acc, new_max, row_sum


@triton.jit
def _attention(
    q, k, v, o, lse, scale_log2,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    lse_batch, lse_head, lse_row, group, seq_q, seq_k,
    head_dim: tl.constexpr, causal: tl.constexpr, tile_m: tl.constexpr, tile_n: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    o += batch * o_batch + head * o_head
    lse += batch * lse_batch + head * lse_head

    rows = tile * tile_m + tl.arange(0, tile_m)
    dims = tl.arange(0, head_dim)
    inside = rows[:, None] < seq_q
    q_tile = tl.load(q + rows[:, None].to(tl.int64) * q_row + dims[None, :], mask=inside, other=0.0)
    shift = seq_k - seq_q
    if causal:
        limit = tl.minimum(rows + shift + 1, seq_k)
        whole = tl.maximum(tl.minimum(tile * tile_m + shift + 1, seq_k), 0) // tile_n * tile_n
        end = tl.minimum((tile + 1) * tile_m + shift, seq_k)
    else:
        limit = tl.full([tile_m], 0, tl.int32) + seq_k
        whole = seq_k // tile_n * tile_n
        end = seq_k

    acc = tl.zeros([tile_m, head_dim], tl.float32)
    row_max = tl.full([tile_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([tile_m], tl.float32)
    for first in range(0, whole, tile_n):
        acc, row_max, row_sum = _tile(
            acc, row_max, row_sum, q_tile, k, v, first, rows, limit, scale_log2, k_row, v_row, seq_k,
            head_dim, tile_n, False,
        )  # fmt: skip
    for first in range(whole, end, tile_n):
        acc, row_max, row_sum = _tile(
            acc, row_max, row_sum, q_tile, k, v, first, rows, limit, scale_log2, k_row, v_row, seq_k,
            head_dim, tile_n, True,
        )  # fmt: skip

    seen = row_sum > 0
    result = acc / tl.where(seen, row_sum, 1.0)[:, None]
    tl.store(o + rows[:, None].to(tl.int64) * o_row + dims[None, :], result.to(o.dtype.element_ty), mask=inside)
    logarithm = (row_max * scale_log2 + tl.log2(tl.where(seen, row_sum, 1.0))) * 0.6931471805599453
    tl.store(lse + rows * lse_row, tl.where(seen, logarithm, float("-inf")), mask=rows < seq_q)


def forward(q, k, v, o, lse, scale, causal):
    """Writes o and lse; shapes as in peers.Attention. Raises NotImplementedError for other head dims and strides."""
    head_dim = q.shape[3]
    if head_dim not in TILES or any(x.stride(3) != 1 for x in (q, k, v, o)):
        raise NotImplementedError(f"takes head_dim {' or '.join(map(str, TILES))} with stride 1, got {head_dim}")
    tile_m, tile_n, warps, stages = TILES[head_dim]
    batch, heads, seq_q, _ = q.shape
    with torch.cuda.device(q.device):
        _attention[(triton.cdiv(seq_q, tile_m), heads, batch)](
            q, k, v, o, lse, scale * log2(e),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *lse.stride(),
            heads // k.shape[1], seq_q, k.shape[2],
            head_dim=head_dim, causal=causal, tile_m=tile_m, tile_n=tile_n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return o, lse
