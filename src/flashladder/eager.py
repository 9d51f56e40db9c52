"""How long an eager call of flashladder.attention and the wait for it take, beside operations on one element: the arms,
and what follows from their samples (eager_timing.py takes them)."""

from __future__ import annotations

from flashladder import stats
from flashladder.diagnose import estimate, rounded
from flashladder.model import Cell, EagerArm, EagerTiming, Shape
from flashladder.tables import NOT_APPLICABLE, Table, interval

PRESET = "eager"
"""Its blocks are the rounds."""
CALLS = 50
"""Of an arm, on end, each waited for: one sample."""
SEQUENCES = (32, 512)
CELLS = tuple(
    Cell(shape=Shape(batch=1, heads_q=1, heads_kv=1, seq_q=seq, seq_k=seq, head_dim=64), dtype="bf16", causal=False)
    for seq in SEQUENCES
)

ARMS: dict[EagerArm, str] = {
    "nothing": "the wait alone",
    "in_place": "x.add_(1), one element",
    "out_of_place": "x + 1, one element",
    "allocation": "torch.empty_like(q)",
    "kernel": "the library, with an O at hand",
    "attention": "flashladder.attention(q, k, v)",
    "sdpa": "scaled_dot_product_attention(q, k, v)",
}
COMPUTING: tuple[EagerArm, ...] = ("kernel", "attention", "sdpa")
"""Those that compute attention."""
ONE_ELEMENT: tuple[EagerArm, ...] = ("in_place", "out_of_place")
"""What PyTorch itself takes at least: without and with an allocation."""


def ratio(record: EagerTiming, arm: EagerArm, other: EagerArm) -> tuple[float, tuple[float, float]]:
    """`arm`'s time over `other`'s with its bootstrap interval, of the rounds' quads; above 1, `arm` takes longer."""
    found = stats.paired(record.us[other], record.us[arm])
    return rounded(found.ratio), (rounded(found.ci[0]), rounded(found.ci[1]))


def table(record: EagerTiming) -> Table:
    """A row an arm: median microseconds of a call and its wait, and the ratios to the operations on one element."""
    rows = []
    for arm, what in ARMS.items():
        us = estimate(record.us[arm])
        over = (NOT_APPLICABLE if arm == other else interval(*ratio(record, arm, other)) for other in ONE_ELEMENT)
        rows.append((arm, what, interval(us.median, us.ci), *over))
    return Table(("arm", "call", "us", *(f"over {other}" for other in ONE_ELEMENT)), tuple(rows))
