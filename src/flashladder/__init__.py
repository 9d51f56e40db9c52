"""flashladder: FlashAttention forward, one measured change at a time."""

__version__ = "0.1.0"
