"""The other implementations that rungs are timed against. Each is declared once in PEERS, and optional.

An adapter imports its library when it is opened and calls it on the tensors that a rung gets. Peers allocate their own
output. What a peer does not take raises NotImplementedError before anything is launched.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from flashladder.model import Status


class Attention(Protocol):
    """q, o: (B, Hq, Sq, D); k, v: (B, Hk, Sk, D); returns O and the LSE, None where the peer gives none."""

    def __call__(
        self, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /
    ) -> tuple[Any, Any | None]: ...


Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Peer:
    name: str
    what: str
    distribution: str
    """Python distribution that must be installed; its version is part of the run's fingerprint."""
    open: Callable[[], Attention]
    min_arch: int = 80
    context: Context = nullcontext
    """Entered once around a batch of calls, so that its cost is not the kernel's."""

    def absence(self, arch: str | None) -> tuple[Status, str] | None:
        """(status, reason) why it cannot run on `arch` (sm_NN or sm_NNa) here; None when it can."""
        if version(self.distribution) is None:
            return "not installed", f"pip install {self.distribution}"
        if arch is not None and int("".join(c for c in arch if c.isdigit())) < self.min_arch:
            return "unsupported", f"needs sm_{self.min_arch}, the device is {arch}"
        return None


@cache
def version(distribution: str) -> str | None:
    """Its installed version; None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Distribution -> version of everything a peer needs."""
    return {name: version(name) for name in sorted({peer.distribution for peer in PEERS.values()})}


def _refuse_other_lengths(q: Any, k: Any, causal: bool) -> None:
    if causal and q.shape[2] != k.shape[2]:
        raise NotImplementedError("its causal mask is top-left aligned; seq_q and seq_k must be equal")


# --- PyTorch's scaled_dot_product_attention -------------------------------------------------------------------------


def _sdpa(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, None]:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    _refuse_other_lengths(q, k, causal)
    try:
        return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]), None
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise NotImplementedError("PyTorch has no kernel of this backend for this input") from error
        raise


def _forced(backend: str) -> AbstractContextManager[object]:
    """Forces a member of torch.nn.attention.SDPBackend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, backend))  # type: ignore[no-any-return]


def _sdpa_peer(name: str, what: str, backend: str | None) -> Peer:
    context = nullcontext if backend is None else partial(_forced, backend)
    return Peer(name, f"PyTorch SDPA, {what}", "torch", lambda: _sdpa, context=context)


# --- FlexAttention --------------------------------------------------------------------------------------------------


def _open_flex() -> Attention:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Shapes are dynamic, so few compilations serve a sweep; past the limit calls would run unfused without a word.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compiled = torch.compile(flex_attention, dynamic=True)

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    @cache
    def block_mask(seq: int) -> Any:
        return create_block_mask(visible, None, None, seq, seq, device="cuda")

    def forward(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, None]:
        _refuse_other_lengths(q, k, causal)
        mask = block_mask(q.shape[2]) if causal else None
        return compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]), None

    return forward


# --- FlashAttention 2, 3 and 4 --------------------------------------------------------------------------------------


def _rows_first(function: Any, dtypes: tuple[str, ...], **options: Any) -> Attention:
    """Calls a `flash_attn_func`: its tensors are (B, S, H, D), and its causal mask is bottom-right aligned."""

    def forward(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, None]:
        dtype = str(q.dtype).removeprefix("torch.")
        if dtype not in dtypes:
            raise NotImplementedError(f"takes {' or '.join(dtypes)}, got {dtype}")
        result = function(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal, **options)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2), None

    return forward


def _open_fa2() -> Attention:
    from flash_attn import flash_attn_func

    return _rows_first(flash_attn_func, ("float16", "bfloat16"))


def _open_fa3() -> Attention:
    from fa3_fwd_interface import flash_attn_func

    return _rows_first(flash_attn_func, ("bfloat16",))


def _open_fa4() -> Attention:
    from flash_attn.cute import flash_attn_func

    return _rows_first(flash_attn_func, ("float16", "bfloat16"))


# --- Triton ---------------------------------------------------------------------------------------------------------


def _open_triton() -> Attention:
    from flashladder.triton_attention import forward

    return forward


_ALL = (
    _sdpa_peer("sdpa_default", "the backend that PyTorch chooses", None),
    _sdpa_peer("sdpa_flash", "FlashAttention-2 backend", "FLASH_ATTENTION"),
    _sdpa_peer("sdpa_cudnn", "cuDNN backend", "CUDNN_ATTENTION"),
    _sdpa_peer("sdpa_efficient", "memory-efficient backend", "EFFICIENT_ATTENTION"),
    _sdpa_peer("sdpa_math", "unfused backend", "MATH"),
    Peer("flex", "PyTorch FlexAttention, compiled with dynamic shapes", "torch", _open_flex),
    Peer("fa2", "FlashAttention-2", "flash-attn", _open_fa2),
    Peer("fa3", "FlashAttention-3, forward alone, bf16", "fa3-fwd", _open_fa3, min_arch=90),
    Peer("fa4", "FlashAttention-4", "flash-attn-4", _open_fa4, min_arch=90),
    Peer("triton", "fused attention in Triton (triton_attention.py)", "triton", _open_triton),
)
PEERS = {peer.name: peer for peer in _ALL}
"""By name, in the order that tables show them."""
