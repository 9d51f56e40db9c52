"""flashladder.attention on the CPU: torch's tensors reach an emulated kernel, and its answer comes back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashladder import ablation, emulation, fastest, native, reference
from flashladder.emulator.device import EmulatedMemory, Emulator, Options

SCALE = 0.125  # of head_dim 64, when none is given


@dataclass(frozen=True)
class Lent:
    """Tensors in memory that the emulated kernels may touch, and the library that computes on them."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    attention: native.AttentionCall


@pytest.fixture
def lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lent:
    torch: Any = pytest.importorskip("torch")
    from flashladder import functional

    session = emulation.open_check(ablation.Selection(rungs=(fastest.PORTABLE,), out=tmp_path), Options())
    session.build()
    library = Path(session.specs[0].library or "")
    memory = EmulatedMemory(Emulator(library), Options())

    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.from_numpy(memory.upload(np.zeros(int(np.prod(shape)), dtype))).view(shape)

    q, k, v = (zeros((1, rows, heads, 64), np.float16).transpose(1, 2) for rows, heads in ((40, 4), (70, 2), (70, 2)))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape))
    o, lse = zeros((1, 40, 4, 64), np.float16).transpose(1, 2), zeros((1, 4, 40), np.float32)
    monkeypatch.setattr(torch, "empty_like", lambda q: o)
    monkeypatch.setattr(functional, "_empty_lse", lambda q: lse)
    memory.begin("attention")
    return Lent(q, k, v, o, lse, native.load(library).attention)


def _is_right(x: Lent, o: Any, lse: Any | None, causal: bool) -> None:
    expected = reference.attention(*(t.double().numpy() for t in (x.q, x.k, x.v)), scale=SCALE, causal=causal)
    np.testing.assert_allclose(o.double().numpy(), expected[0], atol=2e-3)
    if lse is not None:
        np.testing.assert_allclose(lse.double().numpy(), expected[1], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_computes_attention_in_the_layout_of_q(
    lent: Lent, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    import torch

    from flashladder import functional

    monkeypatch.setattr(functional, "_kernel", lambda device: lent.attention)
    operators = torch.library.Library("flashladder", "IMPL")
    operators.impl("attention", functional._on_gpu, "CPU")
    try:
        o, lse = torch.ops.flashladder.attention.default(lent.q, lent.k, lent.v, causal, SCALE)
    finally:
        operators._destroy()
    _is_right(lent, o, lse, causal)


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_that_skips_the_operator_computes_the_same(
    lent: Lent, monkeypatch: pytest.MonkeyPatch, causal: bool, return_lse: bool, scale: float | None
) -> None:
    from flashladder import functional

    monkeypatch.setitem(functional._kernels, -1, lent.attention)  # the device number of the CPU's tensors
    found = functional.attention(lent.q, lent.k, lent.v, causal, scale, return_lse)
    o, lse = found if return_lse else (found, None)
    _is_right(lent, o, lse, causal)
