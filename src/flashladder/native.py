"""Loads a rung's library and calls it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flashladder.model import Cell


class Forward(Protocol):
    """What the gate and the timer call: writes o and lse from q, k, v.

    q, o: (B, Hq, Sq, D); k, v: (B, Hk, Sk, D), any strides whose last is 1; lse: (B, Hq, Sq) float32, natural log.
    Enqueues on the caller's current stream. Raises before any launch when it cannot take the input.
    """

    def __call__(self, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> None: ...


class AttentionCall(Protocol):
    """Forward that may go without the LSE, which is then written to memory that is given back, and without the scale.

    `scale` None: 1 / sqrt(head_dim). Without the LSE the tensors must be of a framework that lends memory, as torch is.
    """

    def __call__(
        self, q: Any, k: Any, v: Any, o: Any, lse: Any | None, scale: float | None, causal: bool, /
    ) -> None: ...


@dataclass(frozen=True)
class Library:
    path: Path
    forward: Forward
    attention: AttentionCall
    config: dict[str, int]
    """The Config that the library was compiled with (kernel/include/rung.h)."""
    dynamic_shared: dict[str, int]
    """Kernel -> bytes of shared memory that it asks for at its launch."""
    _forward_planned: Any
    _plan: Any

    def following(self, plan: tuple[int, int] | None) -> Forward:
        """forward() made to follow a tile and a number of splits; None: the rung's own choice.

        The call raises ValueError when the rung has no such kernel.
        """
        if plan is None:
            return self.forward
        planned, (tile, splits) = self._forward_planned, plan

        def forward(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> None:
            planned(q, k, v, o, lse, scale, causal, tile, splits)

        return forward

    def plan(self, cell: Cell, multiprocessors: int) -> tuple[int, int] | None:
        """Tile and number of splits that the rung chooses on such a device; None when it has no choice."""
        s = cell.shape
        chosen = self._plan(s.batch, s.heads_q, s.heads_kv, s.seq_q, s.seq_k, s.head_dim, cell.causal, multiprocessors)
        tile, _, splits = str(chosen).partition(" ")
        return (int(tile), int(splits)) if splits else None


def kernel_head_dim(head_dim: int) -> int:
    """Head dimension of the kernel that computes `head_dim` (kernel/include/rung.h)."""
    return 64 if head_dim <= 64 else 128


def load(path: Path) -> Library:
    """Load a rung's library. Needs no GPU; calling `forward` does."""
    import tvm_ffi

    module = tvm_ffi.load_module(str(path))
    return Library(
        path=path,
        forward=module.forward,
        attention=module.attention,
        config=json.loads(str(module.config())),
        dynamic_shared=json.loads(str(module.dynamic_shared())),
        _forward_planned=module.forward_planned,
        _plan=module.plan,
    )
