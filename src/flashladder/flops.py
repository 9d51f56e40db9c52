"""Work and limits of one cell: visible pairs, FLOPs, compulsory bytes, roofline floors, theoretical occupancy."""

from __future__ import annotations

from flashladder.model import Cell, Gpu

ELEMENT_BYTES = 2
LSE_BYTES = 4
WARP = 32
REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this."""
SHARED_UNIT = 128
"""Shared memory is given to a block in multiples of this many bytes."""
SUB_PARTITIONS = 4
"""An SM's register file is split evenly between its schedulers; a warp lives in one of them."""


def visible_pairs(cell: Cell) -> int:
    """(query, key) pairs of one head that enter the softmax.

    Causal is bottom-right aligned: key k is visible to query q when k <= q + seq_k - seq_q. So the last row sees every
    key, each row above one fewer, and with seq_q > seq_k the first rows see none.
    """
    shape = cell.shape
    if not cell.causal:
        return shape.seq_q * shape.seq_k
    rows = min(shape.seq_q, shape.seq_k)
    return rows * shape.seq_k - rows * (rows - 1) // 2


def flops(cell: Cell) -> int:
    """Floating-point operations of the two matrix products, 4 x head_dim a visible pair."""
    return 4 * cell.shape.head_dim * visible_pairs(cell) * cell.shape.batch * cell.shape.heads_q


def input_bytes(cell: Cell) -> int:
    """Bytes of q, k and v."""
    shape = cell.shape
    rows = shape.heads_q * shape.seq_q + 2 * shape.heads_kv * shape.seq_k
    return shape.batch * rows * shape.head_dim * ELEMENT_BYTES


def compulsory_bytes(cell: Cell) -> int:
    """Bytes that any kernel must move: q, k, v read once, o and the float32 LSE written once."""
    shape = cell.shape
    rows = shape.batch * shape.heads_q * shape.seq_q
    return input_bytes(cell) + rows * (shape.head_dim * ELEMENT_BYTES + LSE_BYTES)


def floor_s(cell: Cell, gpu: Gpu) -> float:
    """Roofline floor in seconds: the later of the tensor cores at the boost clock and DRAM at its full rate."""
    return max(flops(cell) / gpu.tensor_flops, compulsory_bytes(cell) / gpu.dram_bytes_per_s)


def peak_flops(gpu: Gpu, max_sm_clock_mhz: int | None) -> float:
    """The tensor cores' FLOP/s at the higher of the boost clock and `max_sm_clock_mhz`."""
    return max(gpu.tensor_flops, gpu.tensor_flops_per_clk_sm * gpu.sms * (max_sm_clock_mhz or 0) * 1e6)


def hard_floor_s(cell: Cell, gpu: Gpu, max_sm_clock_mhz: int | None, *, warm: bool) -> float:
    """Seconds that no right measurement can go below.

    The tensor cores count at the higher of the boost clock and `max_sm_clock_mhz`. From a cold L2 at least the inputs
    must come from DRAM, less one cacheful: rotated inputs may leave part of a set behind, and outputs may stay in the
    cache past the end of the timing. With a warm L2 DRAM gives no bound.
    """
    tensor = flops(cell) / peak_flops(gpu, max_sm_clock_mhz)
    if warm:
        return tensor
    return max(tensor, (input_bytes(cell) - gpu.l2_bytes) / gpu.dram_bytes_per_s)


def occupancy(registers: int, shared_bytes: int, threads: int, gpu: Gpu) -> float:
    """Theoretical occupancy: resident warps over the warps an SM can hold, 0 for a block that does not fit.

    `registers` a thread, `shared_bytes` (static and dynamic) and `threads` a block.
    """
    blocks = resident_blocks(registers, shared_bytes, threads, gpu)
    return blocks * _ceil_div(threads, WARP) / (gpu.threads_per_sm // WARP)


def resident_blocks(registers: int, shared_bytes: int, threads: int, gpu: Gpu) -> int:
    """Blocks that an SM holds at once; arguments as occupancy()'s."""
    warps = _ceil_div(threads, WARP)
    max_warps = gpu.threads_per_sm // WARP
    limits = [gpu.blocks_per_sm, max_warps // warps]
    warp_registers = _ceil_div(registers * WARP, REGISTER_UNIT) * REGISTER_UNIT
    if warp_registers:
        limits.append(gpu.registers_per_sm // SUB_PARTITIONS // warp_registers * SUB_PARTITIONS // warps)
    block_shared = _ceil_div(shared_bytes + gpu.shared_bytes_reserved_per_block, SHARED_UNIT) * SHARED_UNIT
    if block_shared:
        limits.append(gpu.shared_bytes_per_sm // block_shared)
    return min(limits)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
