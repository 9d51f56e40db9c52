"""flashladder.attention's operator on the CPU: torch's tensors reach an emulated kernel, and its answer comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashladder import ablation, emulation, fastest, native, reference
from flashladder.emulator.device import EmulatedMemory, Emulator, Options


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_computes_attention_in_the_layout_of_q(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    torch: Any = pytest.importorskip("torch")
    from flashladder import functional

    session = emulation.open_check(ablation.Selection(rungs=(fastest.PORTABLE,), out=tmp_path), Options())
    session.build()
    library = Path(session.specs[0].library or "")
    memory = EmulatedMemory(Emulator(library), Options())

    def lent(shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor in memory that the emulated kernels may touch."""
        return torch.from_numpy(memory.upload(np.zeros(int(np.prod(shape)), dtype))).view(shape)

    q, k, v = (lent((1, rows, heads, 64), np.float16).transpose(1, 2) for rows, heads in ((40, 4), (70, 2), (70, 2)))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape))
    outputs = lent((1, 40, 4, 64), np.float16).transpose(1, 2), lent((1, 4, 40), np.float32)
    monkeypatch.setattr(functional, "_outputs", lambda q: outputs)
    monkeypatch.setattr(functional, "_forward", lambda device: native.load(library).forward)
    operators = torch.library.Library("flashladder", "IMPL")
    operators.impl("attention", functional._on_gpu, "CPU")
    try:
        memory.begin("attention")
        o, lse = torch.ops.flashladder.attention.default(q, k, v, causal, 0.125)
    finally:
        operators._destroy()
    expected = reference.attention(*(x.double().numpy() for x in (q, k, v)), scale=0.125, causal=causal)
    np.testing.assert_allclose(o.double().numpy(), expected[0], atol=2e-3)
    np.testing.assert_allclose(lse.double().numpy(), expected[1], atol=1e-5)
