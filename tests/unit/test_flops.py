from __future__ import annotations

import itertools

import pytest

from flashladder import flops
from flashladder.ladder import gpu_named
from flashladder.model import Cell, Gpu, Shape


def cell(
    sq: int, sk: int | None = None, *, causal: bool = False, b: int = 1, h: int = 1, kv: int = 1, d: int = 64
) -> Cell:
    shape = Shape(batch=b, heads_q=h, heads_kv=kv, seq_q=sq, seq_k=sq if sk is None else sk, head_dim=d)
    return Cell(shape=shape, dtype="fp16", causal=causal)


def gpu(name: str = "NVIDIA H100 80GB HBM3") -> Gpu:
    found = gpu_named(name)
    assert found is not None
    return found


@pytest.mark.parametrize(("sq", "sk"), list(itertools.product((0, 1, 3, 8, 13), repeat=2)))
def test_visible_pairs_equal_a_count_of_the_mask(sq: int, sk: int) -> None:
    counted = sum(k <= q + sk - sq for q in range(sq) for k in range(sk))
    assert flops.visible_pairs(cell(sq, sk, causal=True)) == counted
    assert flops.visible_pairs(cell(sq, sk)) == sq * sk


def test_flops_and_bytes_by_hand() -> None:
    one = cell(512, b=2, h=8, kv=2, d=128)
    assert flops.flops(one) == 4 * 128 * 512 * 512 * 2 * 8
    q_and_o = 2 * (2 * 8 * 512 * 128) * 2
    k_and_v = 2 * (2 * 2 * 512 * 128) * 2
    lse = 2 * 8 * 512 * 4
    assert flops.compulsory_bytes(one) == q_and_o + k_and_v + lse


def test_floor_is_the_later_of_tensor_and_dram() -> None:
    long, short = cell(16384, h=32, kv=32), cell(1, 16384, h=32, kv=32)
    assert flops.floor_s(long, gpu()) == flops.flops(long) / 989.4e12
    assert flops.floor_s(short, gpu()) == flops.compulsory_bytes(short) / 3.35e12


def test_hard_floor_counts_the_highest_clock() -> None:
    one = cell(4096, h=32, kv=32)
    at_max = flops.flops(one) / (4096 * 132 * 1980e6)
    assert flops.hard_floor_s(one, gpu(), 1980, warm=True) == pytest.approx(at_max)
    assert flops.hard_floor_s(one, gpu(), None, warm=True) == flops.flops(one) / 989.4e12
    assert flops.hard_floor_s(one, gpu(), 1980, warm=True) < flops.floor_s(one, gpu())


def test_hard_floor_uses_dram_only_when_cold_and_only_past_the_cache() -> None:
    decode = cell(1, 65536, b=8, h=32, kv=32)
    small = cell(1, 128)
    tensor = flops.hard_floor_s(decode, gpu(), 1980, warm=True)
    cold = flops.hard_floor_s(decode, gpu(), 1980, warm=False)
    assert cold > 10 * tensor
    assert cold < flops.floor_s(decode, gpu())
    assert flops.hard_floor_s(small, gpu(), 1980, warm=False) == flops.hard_floor_s(small, gpu(), 1980, warm=True)


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [
        (32, 0, 1024, 1.0),
        (32, 0, 32, 0.5),  # 32 blocks of one warp
        (64, 0, 128, 0.5),  # 65536 / (64 x 32) = 32 warps
        (255, 0, 256, 0.125),  # rounds to 256 registers: 8 warps
        (168, 0, 384, 0.1875),  # 3 warps a scheduler (16384 / 5376), one block of 12
        (255, 0, 512, 0.0),  # 16 warps of 8192 registers do not fit
        (32, 232448, 128, 0.0625),  # the largest block there is: 227 KiB + 1 KiB reserved
        (32, 232449, 128, 0.0),
        (32, 16384, 128, 0.8125),  # 233472 / (16384 + 1024) = 13 blocks of 4 warps
        (32, 16385, 128, 0.8125),  # 128-byte units
        (0, 0, 33, 1.0),
    ],
)
def test_occupancy(registers: int, shared: int, threads: int, expected: float) -> None:
    assert flops.occupancy(registers, shared, threads, gpu()) == expected


def test_occupancy_reads_the_limits_of_the_gpu() -> None:
    assert flops.occupancy(32, 0, 32, gpu("NVIDIA L4")) == 0.5
    assert flops.occupancy(32, 0, 256, gpu("NVIDIA L4")) == 1.0
