"""Inputs of the correctness gate: the cases, their values and their memory layouts. Pure: numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import numpy as np

from flashladder.arrays import NUMPY_DTYPES
from flashladder.model import Cell, DtypeName, Shape

Family = Literal["suite", "edge", "values", "layout", "repeat", "split", "grid", "wide", "head_dim"]
Values = tuple[np.ndarray, np.ndarray, np.ndarray]
GUARD = 512
"""Elements of guard around every tensor: 1 KiB, so that views stay 16-byte aligned."""


@dataclass(frozen=True)
class Layout:
    """Strides (batch, head, row) in elements and offset from the guard's end, of a (B, H, S, D) tensor."""

    name: str
    strides: Callable[[tuple[int, int, int, int]], tuple[int, int, int]]
    offset: int = 0
    repeats: int | None = None
    """The axis of K and V along which one entry stands for all: its stride is 0. Q and O are laid out plainly."""

    @property
    def stored(self) -> tuple[slice, ...]:
        """Index of what lies in memory of K and V."""
        return () if self.repeats is None else (*(slice(None),) * self.repeats, slice(1))

    def extent(self, dims: tuple[int, int, int, int]) -> int:
        """Elements from the first to one past the last of the view."""
        if 0 in dims:
            return 0
        return sum((n - 1) * s for n, s in zip(dims, (*self.strides(dims), 1), strict=True)) + 1 + self.offset


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("bhsd", lambda d: (d[1] * d[2] * d[3], d[2] * d[3], d[3])),
        Layout("bshd", lambda d: (d[2] * d[1] * d[3], d[3], d[1] * d[3])),
        Layout("packed_qkv", lambda d: (d[2] * d[1] * d[3] * 3, d[3] * 3, d[1] * d[3] * 3)),
        Layout("padded", lambda d: ((d[1] * (d[2] * (d[3] + 8) + 24)), d[2] * (d[3] + 8) + 24, d[3] + 8)),
        Layout("broadcast_batch", lambda d: (0, d[2] * d[3], d[3]), repeats=0),
        Layout("broadcast_rows", lambda d: (d[1] * d[3], d[3], 0), repeats=2),
        Layout("odd_offset", lambda d: (d[1] * d[2] * d[3], d[2] * d[3], d[3]), offset=1),
        Layout("odd_rows", lambda d: (d[1] * d[2] * (d[3] + 1), d[2] * (d[3] + 1), d[3] + 1)),
    )
}


@dataclass(frozen=True)
class Case:
    """One problem with its values and layout. `repeats` > 1: that many runs must give the same bits."""

    family: Family
    cell: Cell
    values: str = "normal"
    layout: str = "bhsd"
    scale: float | None = None
    repeats: int = 1

    @property
    def id(self) -> str:
        parts = [self.family, self.cell.id, self.values, self.layout]
        return "/".join([*parts, *([f"x{self.repeats}"] if self.repeats > 1 else [])])

    @property
    def softmax_scale(self) -> float:
        return 1 / sqrt(self.cell.shape.head_dim) if self.scale is None else self.scale


# --- values ---------------------------------------------------------------------------------------------------------


def _dims(shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (
        (shape.batch, shape.heads_q, shape.seq_q, shape.head_dim),
        (shape.batch, shape.heads_kv, shape.seq_k, shape.head_dim),
    )


def _normal(rng: np.random.Generator, shape: Shape) -> Values:
    q_dims, kv_dims = _dims(shape)
    return (
        rng.standard_normal(q_dims, np.float32),
        rng.standard_normal(kv_dims, np.float32),
        rng.standard_normal(kv_dims, np.float32),
    )


def _outlier(rng: np.random.Generator, shape: Shape) -> Values:
    """N(0, 1) + N(0, 100) x Bernoulli(0.001)."""
    q, k, v = _normal(rng, shape)
    for x in (q, k, v):
        x += 10 * rng.standard_normal(x.shape, np.float32) * (rng.random(x.shape, np.float32) < 0.001)
    return q, k, v


def _zero_q(rng: np.random.Generator, shape: Shape) -> Values:
    """Every row is the mean of the visible V rows, LSE = ln(visible)."""
    q, k, v = _normal(rng, shape)
    return q * 0, k, v


def _constant_v(rng: np.random.Generator, shape: Shape) -> Values:
    """Every visible row is that constant, whatever the scores."""
    q, k, v = _normal(rng, shape)
    return q, k, v * 0 + 1.5


def _sharp(rng: np.random.Generator, shape: Shape) -> Values:
    """q scaled by 16: nearly one-hot rows."""
    q, k, v = _normal(rng, shape)
    return q * 16, k, v


def _huge(rng: np.random.Generator, shape: Shape) -> Values:
    """Entries near 60000, the top of fp16: scores near 1e10 must neither overflow nor turn NaN."""
    q, k, v = _normal(rng, shape)
    return tuple(np.float32(60000) * np.sign(x) * (1 - rng.random(x.shape, np.float32) / 4) for x in (q, k, v))  # type: ignore[return-value]


def _ascending(rng: np.random.Generator, shape: Shape) -> Values:
    """Every key's score is above all earlier ones, by up to 100 nats: the running maximum moves at every step."""
    q, k, v = _normal(rng, shape)
    ramp = np.linspace(0, 1, max(shape.seq_k, 1), dtype=np.float32)[None, None, : shape.seq_k, None]
    size = np.float32(sqrt(100 * sqrt(shape.head_dim) / shape.head_dim))
    return np.full_like(q, size), np.broadcast_to(size * ramp, k.shape).copy(), v


def _descending(rng: np.random.Generator, shape: Shape) -> Values:
    q, k, v = _ascending(rng, shape)
    return q, k[:, :, ::-1].copy(), v


def _negative(rng: np.random.Generator, shape: Shape) -> Values:
    """All scores near -200 nats: a maximum that starts at 0 underflows every weight."""
    q, k, v = _normal(rng, shape)
    size = np.float32(sqrt(200 * sqrt(shape.head_dim) / shape.head_dim))
    return np.full_like(q, size), np.full_like(k, -size), v


def _cliff(rng: np.random.Generator, shape: Shape) -> Values:
    """The first third of the keys 200 nats above the rest: weights under the maximum of the rest are infinite."""
    q, k, v = _normal(rng, shape)
    size = np.float32(sqrt(200 * sqrt(shape.head_dim) / shape.head_dim))
    is_high = (np.arange(shape.seq_k) < shape.seq_k // 3)[None, None, :, None]
    return np.full_like(q, size), np.where(is_high, size, k / 100), v


def _nan_q(rng: np.random.Generator, shape: Shape) -> Values:
    """One NaN query element: that row alone is NaN."""
    q, k, v = _normal(rng, shape)
    q[..., shape.seq_q // 2, 1] = np.nan
    return q, k, v


def _nan_k(rng: np.random.Generator, shape: Shape) -> Values:
    """One NaN key: the rows that see it are NaN, the others are not."""
    q, k, v = _normal(rng, shape)
    k[..., shape.seq_k // 2, 1] = np.nan
    return q, k, v


def _inf_k(rng: np.random.Generator, shape: Shape) -> Values:
    """One key with an infinite element: its score is +inf (row NaN) or -inf (weight 0) by the sign of q."""
    q, k, v = _normal(rng, shape)
    k[..., 0, 0] = np.inf
    return q, k, v


VALUES: dict[str, Callable[[np.random.Generator, Shape], Values]] = {
    "normal": _normal,
    "outlier": _outlier,
    "zero_q": _zero_q,
    "constant_v": _constant_v,
    "sharp": _sharp,
    "huge": _huge,
    "ascending": _ascending,
    "descending": _descending,
    "negative": _negative,
    "cliff": _cliff,
    "nan_q": _nan_q,
    "nan_k": _nan_k,
    "inf_k": _inf_k,
}
NORMAL = "normal"
ODD_VALUES = tuple(kind for kind in VALUES if kind != NORMAL)
"""The kinds of values that a kernel's time is compared on with that on normal ones."""


def values_of(case: Case, seed: int) -> Values:
    """q, k, v in the case's dtype."""
    rng = np.random.default_rng(seed)
    dtype = NUMPY_DTYPES[case.cell.dtype]
    q, k, v = (x.astype(dtype) for x in VALUES[case.values](rng, case.cell.shape))
    k, v = (np.broadcast_to(x[LAYOUTS[case.layout].stored], x.shape) for x in (k, v))
    return q, k, v


# --- layouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A tensor inside a guarded flat buffer."""

    flat: Any
    view: Any
    inside: np.ndarray
    """True for the elements of `flat` that the view covers."""


Dims = tuple[int, int, int, int]


def _size(dims: Dims, layout: Layout) -> int:
    return 2 * GUARD + layout.extent(dims)


def _strided(flat: np.ndarray, dims: Dims, layout: Layout) -> np.ndarray:
    """The view of `dims` in `layout` into a flat buffer of theirs."""
    size = flat.dtype.itemsize
    strides = [s * size for s in (*layout.strides(dims), 1)]
    return np.lib.stride_tricks.as_strided(flat[GUARD + layout.offset :], dims, strides)


def place(memory: Any, dims: Dims, layout: Layout, dtype: Any, poison: float) -> Placed:
    """Allocate `dims` in `layout` inside a buffer filled with `poison`, with guards on both sides and in the gaps."""
    flat = memory.upload(np.full(_size(dims, layout), poison, dtype))
    inside = np.zeros(flat.shape[0], np.bool_)
    if 0 not in dims:
        _strided(inside, dims, layout)[...] = True
    return Placed(flat, memory.view(flat, dims, (*layout.strides(dims), 1), GUARD + layout.offset), inside)


def flattened(values: np.ndarray, layout: Layout, poison: float) -> np.ndarray:
    """The whole buffer that `place` allocates, with `values` (B, H, S, D) in it."""
    dims: Dims = values.shape
    flat = np.full(_size(dims, layout), poison, values.dtype)
    if 0 not in dims:
        _strided(flat, dims, layout)[layout.stored] = values[layout.stored]
    return flat


# --- the cases ------------------------------------------------------------------------------------------------------

SPLIT_LENGTHS = ((1, 1100), (3, 1600), (1, 3600), (16, 2100), (40, 1100))
"""Few rows and many keys: where keys are split, in 1 to 16 parts, the last of some without a key."""
WIDE_VALUES = ("outlier", "descending", "cliff", "nan_k", "inf_k")
WIDE_LENGTHS = ((193, 260), (400, 385), (150, 385), (60, 900))
"""Around tiles of 128 and 192 rows and 128 keys, and warpgroups that have no row: the seams of kernels with such."""
GRID_LENGTHS = ((129, 129), (65, 63), (40, 77), (100, 300), (40, 300))
OTHER_HEAD_DIMS = {64: (8, 40), 128: (72, 120)}
"""Kernel head dimension -> head dimensions that it may be padded from."""
EDGE_LENGTHS = (
    (1, 1),
    (1, 77),
    (31, 31),
    (32, 32),
    (33, 33),
    (63, 65),
    (65, 63),
    (129, 129),
    (192, 64),
    (64, 192),
    (77, 1),
    (33, 0),
    (0, 33),
)


def _cell(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, dtype: DtypeName, causal: bool
) -> Cell:
    shape = Shape(
        batch=batch,
        heads_q=heads[0],
        heads_kv=heads[1],
        seq_q=lengths[0],
        seq_k=lengths[1],
        head_dim=head_dim,
    )
    return Cell(shape=shape, dtype=dtype, causal=causal)


def edge_cases(dtype: DtypeName, head_dim: int) -> Iterator[Case]:
    """Small problems at every seam: lengths around the tile, Sq != Sk, GQA, empty axes, values, layouts, repeats."""
    for causal in (False, True):
        for lengths in EDGE_LENGTHS:
            yield Case("edge", _cell(1, (2, 1), lengths, head_dim, dtype, causal))
        yield Case("edge", _cell(0, (2, 2), (33, 33), head_dim, dtype, causal))
        yield Case("edge", _cell(2, (4, 2), (33, 33), head_dim, dtype, causal))
        yield Case("edge", _cell(2, (3, 1), (40, 65), head_dim, dtype, causal), scale=0.3)
        yield Case("edge", _cell(1, (2, 2), (40, 65), head_dim, dtype, causal), scale=-0.2)
        for lengths in SPLIT_LENGTHS:
            yield Case("split", _cell(1, (1, 1), lengths, head_dim, dtype, causal))
        yield Case("split", _cell(2, (6, 2), (1, 1100), head_dim, dtype, causal))
        for lengths in GRID_LENGTHS:
            yield Case("grid", _cell(25, (4, 2), lengths, head_dim, dtype, causal))
        for lengths in WIDE_LENGTHS:
            yield Case("wide", _cell(1, (1, 1), lengths, head_dim, dtype, causal))
        for values in WIDE_VALUES:
            yield Case("wide", _cell(1, (1, 1), (70, 400), head_dim, dtype, causal), values)
        for other in OTHER_HEAD_DIMS[head_dim]:
            yield Case("head_dim", _cell(1, (2, 1), (33, 65), other, dtype, causal))
        for values in VALUES:
            if values != "normal":
                yield Case("values", _cell(1, (1, 1), (70, 97), head_dim, dtype, causal), values)
        for layout in LAYOUTS:
            if layout != "bhsd":
                yield Case("layout", _cell(2, (2, 1), (40, 70), head_dim, dtype, causal), layout=layout)
        yield Case("repeat", _cell(1, (1, 1), (64, 64), head_dim, dtype, causal), repeats=4)
        yield Case("repeat", _cell(1, (4, 4), (160, 160), head_dim, dtype, causal), repeats=50)
    yield Case("values", _cell(1, (14, 2), (88, 448), head_dim, dtype, True), "negative")


def suite_cases(cells: list[Cell]) -> Iterator[Case]:
    """The correctness set, with normal and outlier values: what every rung and every peer must pass."""
    for cell in cells:
        yield Case("suite", cell)
        yield Case("suite", cell, "outlier")
