"""What the binding refuses, before any launch, and what it must take."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashladder import native, reference
from flashladder.arms import LoadedArm

SCALE = 0.125


def _tensors(
    torch: Any, b: int = 1, hq: int = 2, hk: int = 2, sq: int = 40, sk: int = 40, d: int = 64
) -> dict[str, Any]:
    def randn(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.float16)

    return {
        "q": randn(b, hq, sq, d),
        "k": randn(b, hk, sk, d),
        "v": randn(b, hk, sk, d),
        "o": torch.full((b, hq, sq, d), float("nan"), device="cuda", dtype=torch.float16),
        "lse": torch.full((b, hq, sq), float("nan"), device="cuda"),
    }


def _run(arm: LoadedArm, t: dict[str, Any], causal: bool = False) -> None:
    arm(t["q"], t["k"], t["v"], t["o"], t["lse"], SCALE, causal)


def _is_right(torch: Any, t: dict[str, Any], causal: bool = False) -> None:
    torch.cuda.synchronize()
    q, k, v = (t[n].double() for n in "qkv")
    o, lse = reference.attention(q, k, v, scale=SCALE, causal=causal)
    assert (t["o"].double() - o).abs().max() < 2e-3
    assert (t["lse"].double() - lse).abs().max() < 1e-5


BAD: dict[str, tuple[Callable[[Any, dict[str, Any]], None], str]] = {
    "float32 q": (lambda _, t: t.update(q=t["q"].float()), "q is float32, expected float16 or bfloat16"),
    "bf16 k": (lambda _, t: t.update(k=t["k"].bfloat16()), "k is bfloat16, expected float16 like q"),
    "host q": (lambda _, t: t.update(q=t["q"].cpu()), "q is not in GPU memory"),
    "host v": (lambda _, t: t.update(v=t["v"].cpu()), "v is on another device"),
    "three dimensions": (lambda _, t: t.update(q=t["q"][0]), "expected 4"),
    "head_dim 76": (
        lambda torch, t: t.update(q=torch.zeros(1, 2, 40, 76, device="cuda", dtype=torch.float16)),
        "head_dim is 76, expected (64 or 128|a multiple of 8 up to 128)",
    ),
    "heads no multiple": (
        lambda torch, t: t.update({n: torch.zeros(1, 3, 40, 64, device="cuda", dtype=torch.float16) for n in "kv"}),
        "expected a multiple of k's",
    ),
    "short v": (lambda _, t: t.update(v=t["v"][:, :, :39]), r"v has shape \(1, 2, 39, 64\), expected \(1, 2, 40, 64\)"),
    "other o": (lambda _, t: t.update(o=t["o"][:, :1]), "o has shape"),
    "inner stride": (
        lambda _, t: t.update(q=t["q"].transpose(2, 3).contiguous().transpose(2, 3)),
        "stride 40 along head_dim, expected 1",
    ),
    "fp16 lse": (lambda _, t: t.update(lse=t["lse"].half()), "lse is float16, expected float32"),
    "lse shape": (lambda _, t: t.update(lse=t["lse"][:, :, :3]), "lse does not have shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_before_any_launch_and_the_next_call_works(torch: Any, arm: LoadedArm, name: str) -> None:
    change, message = BAD[name]
    t = _tensors(torch)
    change(torch, t)
    with pytest.raises((ValueError, TypeError), match=message):
        _run(arm, t)
    torch.cuda.synchronize()
    assert t["o"].isnan().all()
    good = _tensors(torch)
    _run(arm, good)
    _is_right(torch, good)


def test_scale_must_be_finite(torch: Any, arm: LoadedArm) -> None:
    t = _tensors(torch)
    with pytest.raises(ValueError, match="scale is nan, expected a finite number"):
        arm(t["q"], t["k"], t["v"], t["o"], t["lse"], float("nan"), False)


def test_offsets_past_two_to_the_31st(torch: Any, arm: LoadedArm) -> None:
    """Views whose batches and rows lie more than 2^31 elements apart."""
    stride = (1 << 31) + 128
    flat = torch.empty(stride + (1 << 20), device="cuda", dtype=torch.float16)
    t = _tensors(torch, b=2, hq=1, hk=1)
    for n in "kvo":
        view = flat.as_strided(t[n].shape, (stride, 2560, 64, 1), {"k": 0, "v": 4096, "o": 8192}[n])
        t[n] = view.copy_(t[n])
    _run(arm, t)
    _is_right(torch, t)


def test_more_batches_than_a_grid_axis(torch: Any, arms: dict[str, LoadedArm]) -> None:
    t = _tensors(torch, b=65535 + 7, hq=1, hk=1, sq=3, sk=5)
    _run(arms["r05_swizzle"], t, causal=True)
    _is_right(torch, t, causal=True)


def test_too_many_heads_is_an_error(torch: Any, arm: LoadedArm) -> None:
    t = _tensors(torch, hq=65536, hk=1, sq=1, sk=1)
    with pytest.raises(ValueError, match="too large: expected at most 65535 heads"):
        _run(arm, t)


def test_the_callers_stream_is_used(torch: Any, arm: LoadedArm) -> None:
    """On a side stream behind a slow producer: a launch elsewhere would read NaN."""
    t = _tensors(torch)
    source = t["q"].clone()
    t["q"].fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        t["q"].copy_(source)
        _run(arm, t)
    stream.synchronize()
    _is_right(torch, t)


def test_a_second_device_is_used(torch: Any, arm: LoadedArm) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    t = {name: x.to("cuda:1") for name, x in _tensors(torch).items()}
    _run(arm, t)
    torch.cuda.synchronize(1)
    _is_right(torch, t)
    assert torch.cuda.current_device() == 0


def test_a_cuda_graph_replays_on_new_values(torch: Any, arm: LoadedArm) -> None:
    t = _tensors(torch)
    graph = torch.cuda.CUDAGraph()
    _run(arm, t)
    with torch.cuda.graph(graph):
        _run(arm, t)
    t["q"].copy_(torch.randn_like(t["q"]))
    t["o"].fill_(float("nan"))
    graph.replay()
    _is_right(torch, t)


def test_host_overhead_of_a_call_is_under_3_us(torch: Any, arm: LoadedArm) -> None:
    """An empty problem passes through everything but the launch."""
    t = _tensors(torch, sq=0)
    arguments = (t["q"], t["k"], t["v"], t["o"], t["lse"], SCALE, False)
    forward = native.load(Path(arm.spec.library or "")).forward
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            forward(*arguments)
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 3e-6, f"{best * 1e6:.2f} us"
