"""flashladder.attention in a small transformer, beside PyTorch's own: `python examples/transformer.py`.

Times one forward pass (prefill) with each, in turns, and prints the gain end to end. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import flashladder

Attention = Callable[..., torch.Tensor]
VOCABULARY = 4096


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyTorch's attention with the arguments of flashladder's."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


class Block(nn.Module):
    """Pre-norm attention and MLP; `attention` computes (q, k, v, causal) -> o, all (batch, heads, seq, head_dim)."""

    def __init__(self, heads: int, heads_kv: int, head_dim: int, attention: Attention) -> None:
        super().__init__()
        width = heads * head_dim
        self.sizes = (heads, heads_kv, heads_kv)
        self.head_dim, self.attention = head_dim, attention
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.sizes) * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split(self.sizes, dim=1)  # views: the kernels take any strides
        o = self.attention(q, k, v, causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, vocabulary)."""

    def __init__(self, layers: int, heads: int, heads_kv: int, head_dim: int, attention: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, heads * head_dim)
        self.blocks = nn.Sequential(*(Block(heads, heads_kv, head_dim, attention) for _ in range(layers)))
        self.norm = nn.RMSNorm(heads * head_dim)
        self.head = nn.Linear(heads * head_dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))

    def swap(self, attention: Attention) -> None:
        for block in self.blocks:
            block.attention = attention


def milliseconds(call: Callable[[], object]) -> float:
    """Time of one call on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@torch.no_grad()
def compare(batch: int, seq: int, layers: int, heads: int, head_dim: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds of the forward pass with each attention, and how far apart the logits are."""
    torch.manual_seed(0)
    model = Transformer(layers, heads, heads, head_dim, sdpa).cuda().bfloat16()
    tokens = torch.randint(VOCABULARY, (batch, seq), device="cuda")
    passes: dict[str, Callable[[], torch.Tensor]] = {}
    logits: dict[str, torch.Tensor] = {}
    for name, attention in (("sdpa", sdpa), ("flashladder", flashladder.attention)):

        def forward(attention: Attention = attention) -> torch.Tensor:
            model.swap(attention)
            return model(tokens)

        passes[name] = forward
        logits[name] = forward()
        forward()
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repeat in range(repeats):
        order = list(passes) if repeat % 2 else list(passes)[::-1]
        for name in order:
            times[name].append(milliseconds(passes[name]))
    apart = (logits["sdpa"] - logits["flashladder"]).abs().max() / logits["sdpa"].abs().max()
    return {"ms": {name: median(seen) for name, seen in times.items()}, "apart": apart.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in {"batch": 2, "seq": 8192, "layers": 4, "heads": 16, "head-dim": 64, "repeats": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    found = compare(**vars(parser.parse_args()))
    ms = found["ms"]
    gain = ms["sdpa"] / ms["flashladder"]
    print(f"forward pass: sdpa {ms['sdpa']:.2f} ms, flashladder {ms['flashladder']:.2f} ms: {gain:.3f}x as fast")
    print(f"the logits differ by {found['apart']:.1e} of the largest")


if __name__ == "__main__":
    main()
