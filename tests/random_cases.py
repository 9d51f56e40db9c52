"""Random problems of the gate for hypothesis: any lengths, heads, head_dim, mask, layout and values."""

from __future__ import annotations

from hypothesis import strategies as st

from flashladder.inputs import LAYOUTS, VALUES, Case
from flashladder.model import Cell, Shape

ALIGNED = [name for name in LAYOUTS if not name.startswith("odd_")]


@st.composite
def cases(draw: st.DrawFn, max_rows: int, max_keys: int) -> Case:
    """A case that a rung for any head_dim must take."""
    heads_kv = draw(st.integers(1, 3))
    shape = Shape(
        batch=draw(st.integers(1, 3)),
        heads_q=heads_kv * draw(st.integers(1, 4)),
        heads_kv=heads_kv,
        seq_q=draw(st.integers(1, max_rows)),
        seq_k=draw(st.integers(0, max_keys)),
        head_dim=8 * draw(st.integers(1, 16)),
    )
    cell = Cell(shape=shape, dtype=draw(st.sampled_from(("fp16", "bf16"))), causal=draw(st.booleans()))
    return Case("edge", cell, draw(st.sampled_from(sorted(VALUES))), draw(st.sampled_from(ALIGNED)))
