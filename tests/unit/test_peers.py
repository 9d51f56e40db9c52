"""The peers' adapters with stand-ins for their libraries: what is absent, what is refused, what is passed on."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from flashladder import peers
from flashladder.arms import peer_specs
from flashladder.errors import FlashladderError
from flashladder.peers import PEERS

FLASH = {
    "fa2": ("flash_attn", "float16"),
    "fa3": ("fa3_fwd_interface", "bfloat16"),
    "fa4": ("flash_attn.cute", "float16"),
}


def _tensor(batch: int, heads: int, rows: int, kind: str) -> Any:
    """What an adapter touches of a tensor: dtype, shape and torch's transpose of two axes."""
    values = np.zeros((batch, heads, rows, 8), np.float32)
    return types.SimpleNamespace(
        dtype=f"torch.{kind}", shape=values.shape, transpose=lambda a, b: _Transposable(values.swapaxes(a, b))
    )


class _Transposable:
    def __init__(self, values: Any) -> None:
        self.shape = values.shape
        self.transpose = values.swapaxes


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every FlashAttention module is a stand-in that returns its q with a LSE; the calls it got."""
    calls: list[dict[str, Any]] = []

    def flash_attn_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append({"q": q.shape, "k": k.shape, **options})
        return q, None

    for module, _ in FLASH.values():
        stand_in: Any = types.ModuleType(module)
        stand_in.flash_attn_func = flash_attn_func
        monkeypatch.setitem(sys.modules, module, stand_in)
    return calls


@pytest.mark.parametrize("name", FLASH)
def test_flash_attention_gets_rows_first_and_gives_heads_first(name: str, flash: list[dict[str, Any]]) -> None:
    attention = PEERS[name].open()
    q, k = (_tensor(2, heads, rows, FLASH[name][1]) for heads, rows in ((4, 3), (2, 5)))
    o, lse = attention(q, k, k, None, None, 0.5, True)
    assert lse is None
    assert o.shape == (2, 4, 3, 8)
    assert flash == [{"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "softmax_scale": 0.5, "causal": True}]


def test_a_type_that_a_peer_does_not_take_is_refused_before_the_call(flash: list[dict[str, Any]]) -> None:
    q = _tensor(1, 1, 2, "float16")
    with pytest.raises(NotImplementedError, match="takes bfloat16, got float16"):
        PEERS["fa3"].open()(q, q, q, None, None, 1.0, False)
    assert flash == []


def test_sdpa_refuses_a_causal_mask_that_it_would_align_otherwise() -> None:
    torch: Any = types.ModuleType("torch")
    functional: Any = types.ModuleType("torch.nn.functional")
    functional.scaled_dot_product_attention = lambda *_, **__: pytest.fail("called")
    modules = {"torch": torch, "torch.nn": types.ModuleType("torch.nn"), "torch.nn.functional": functional}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        with pytest.raises(NotImplementedError, match="top-left aligned"):
            PEERS["sdpa_flash"].open()(
                _tensor(1, 1, 2, "float16"), _tensor(1, 1, 3, "float16"), None, None, None, 1.0, True
            )


def test_what_is_not_installed_or_too_new_for_the_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.11.0", "fa3-fwd": "0.0.3"}
    monkeypatch.setattr(peers, "version", installed.get)
    absences = {spec.name: spec.absence for spec in peer_specs((), "sm_80")}
    assert absences["sdpa_cudnn"] is None
    assert absences["fa2"] == ("not installed", "pip install flash-attn")
    assert absences["fa3"] == ("unsupported", "needs sm_90, the device is sm_80")
    assert peer_specs(("fa3",), "sm_90a")[0].absence is None
    assert peers.versions()["fa3-fwd"] == "0.0.3"
    assert peers.versions()["flash-attn-4"] is None


def test_an_unknown_peer_is_one_clear_line() -> None:
    with pytest.raises(FlashladderError, match="no peer 'fa5'; expected one of sdpa_default, "):
        peer_specs(("fa5",), None)


def test_peers_keep_the_order_of_their_declaration() -> None:
    assert [spec.name for spec in peer_specs(("triton", "sdpa_math"), None)] == ["sdpa_math", "triton"]
