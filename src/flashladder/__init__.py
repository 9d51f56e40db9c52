"""flashladder: FlashAttention forward, one measured change at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashladder.functional import attention as attention

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`flashladder.attention` imports torch when it is first asked for; nothing else here does."""
    if name != "attention":
        raise AttributeError(f"module 'flashladder' has no attribute {name!r}")
    from flashladder.functional import attention

    globals()[name] = attention
    return attention
