"""What attention is: the float64 oracle, and the unfused same-dtype reference that sets the tolerance.

Works on any array-API namespace (numpy, torch). Conventions: causal is bottom-right aligned (query q sees key k when
k <= q + Sk - Sq); a row whose weights sum to nothing (no visible key, or every visible score -inf) has O = 0 and
LSE = -inf; LSE is the natural log; query head h reads kv head h // (Hq / Hk).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace, device

Rounding = Callable[[Any], Any]


def visible(seq_q: int, seq_k: int, causal: bool, rows: Any, xp: Any, where: Any) -> Any:
    """Mask (len(rows), Sk) of the keys that each query row sees; `rows` are row indices."""
    keys = xp.arange(seq_k, device=where)
    if not causal:
        return xp.ones((rows.shape[0], seq_k), dtype=xp.bool, device=where)
    return keys[None, :] <= rows[:, None] + (seq_k - seq_q)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float,
    causal: bool,
    seq_q: int | None = None,
    rows: Any = None,
    rounding: Rounding | None = None,
) -> tuple[Any, Any]:
    """O (B, Hq, R, D) and LSE (B, Hq, R) of q (B, Hq, R, D), k and v (B, Hk, Sk, D), all float64.

    With `rows`, q holds only those rows of a problem of `seq_q` rows. `rounding` is applied to the scores, the
    weights and the output: None gives the oracle, a round trip through fp16 or bf16 the unfused reference. A score
    that the rounding overflows is kept as it is, so that the reference exists for every input.
    """
    xp = array_namespace(q, k, v)
    where = device(q)
    total = q.shape[2] if seq_q is None else seq_q
    if rows is None:
        rows = xp.arange(q.shape[2], device=where)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    if group > 1:
        k, v = xp.repeat(k, group, axis=1), xp.repeat(v, group, axis=1)

    def finite_rounding(x: Any) -> Any:
        if rounding is None:
            return x
        rounded = rounding(x)
        return xp.where(xp.isinf(rounded), x, rounded)

    scores = finite_rounding(finite_rounding(q @ xp.matrix_transpose(k)) * scale)
    mask = visible(total, k.shape[2], causal, rows, xp, where)
    minus_inf = xp.asarray(-xp.inf, dtype=scores.dtype, device=where)
    scores = xp.where(mask, scores, minus_inf)
    if k.shape[2] == 0:
        return xp.zeros_like(q), xp.full(q.shape[:3], -xp.inf, dtype=q.dtype, device=where)
    top = xp.max(scores, axis=-1, keepdims=True)
    top = xp.where(top == minus_inf, xp.zeros_like(top), top)
    weights = xp.exp(scores - top)
    total_weight = xp.sum(weights, axis=-1, keepdims=True)
    empty = total_weight == 0
    probabilities = finite_rounding(weights / xp.where(empty, xp.ones_like(total_weight), total_weight))
    o = finite_rounding(probabilities @ v)
    o = xp.where(empty, xp.zeros_like(o), o)
    lse = xp.where(empty, minus_inf, xp.log(xp.where(empty, xp.ones_like(total_weight), total_weight)) + top)
    return o, lse[..., 0]
