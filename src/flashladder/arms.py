"""What is checked and timed: rungs (their libraries) and peers (PyTorch's attention with a forced backend)."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashladder.ladder import CONTROL
from flashladder.model import Record
from flashladder.native import load

PEERS: dict[str, str | None] = {
    "sdpa_default": None,
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
    "sdpa_math": "MATH",
}
"""Peer -> member of torch.nn.attention.SDPBackend that is forced; None leaves the choice to PyTorch."""


class ArmSpec(Record, frozen=True, kw_only=True):
    """How a worker process finds an arm."""

    name: str
    kind: Literal["rung", "peer"]
    library: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class RungArm:
    spec: ArmSpec
    forward: Any

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def sha256(self) -> str | None:
        return self.spec.sha256

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def __call__(self, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, Any]:
        self.forward(q, k, v, o, lse, scale, causal)
        return o, lse


@dataclass(frozen=True)
class SdpaArm:
    """torch.nn.functional.scaled_dot_product_attention. It allocates its own output and gives no LSE."""

    spec: ArmSpec
    backend: str | None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def sha256(self) -> str | None:
        return None

    def context(self) -> AbstractContextManager[object]:
        """Forces the backend; entered once around a batch of calls, so that its cost is not the kernel's."""
        if self.backend is None:
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))  # type: ignore[no-any-return]

    def __call__(self, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, None]:
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        if causal and q.shape[2] != k.shape[2]:
            raise NotImplementedError("SDPA's causal mask is top-left aligned; seq_q and seq_k must be equal")
        try:
            return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]), None
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise NotImplementedError("PyTorch has no kernel of this backend for this input") from error
            raise


def open_arm(spec: ArmSpec) -> RungArm | SdpaArm:
    """The callable of a spec; loads a rung's library."""
    if spec.kind == "rung":
        assert spec.library is not None
        return RungArm(spec, load(Path(spec.library)).forward)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    return SdpaArm(spec, PEERS[spec.name.removesuffix(CONTROL)])
