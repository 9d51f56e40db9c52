"""The two memories that kernels are checked in: numpy on the host and torch on the GPU, behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from flashladder.model import DtypeName

T = TypeVar("T")

NUMPY_DTYPES: dict[DtypeName, Any] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def bits(x: np.ndarray) -> np.ndarray:
    """A contiguous copy of 16-bit or 32-bit elements as unsigned integers."""
    return np.array(x, order="C").view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


class Memory(Protocol):
    """Where a checked kernel's tensors live. Flat buffers come from numpy; views share them."""

    def upload(self, flat: np.ndarray) -> Any:
        """A copy of a one-dimensional array."""

    def shaped(self, values: np.ndarray) -> Any:
        """Values of any shape as an array of this memory, which nobody writes."""

    def raw(self, x: Any) -> Any:
        """The elements of a buffer or view as integers of their size, in place."""

    def bits(self, x: Any) -> np.ndarray:
        """The bits of a buffer or view on the host, in its shape: 16-bit elements as uint16, float32 as uint32."""

    def view(self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        """A strided view; strides and offset in elements."""

    def fill(self, flat: Any, value: float) -> None: ...

    def float64(self, values: Any) -> Any:
        """Values (of this memory or numpy) as a float64 array that the oracle takes."""

    def rounding(self, dtype: DtypeName) -> Callable[[Any], Any]:
        """float64 -> nearest fp16/bf16 -> float64."""

    def begin(self, case_id: str) -> None:
        """Called before the first run of a case."""

    def run(self, writes: Sequence[tuple[Any, Any]], call: Callable[[], T]) -> T:
        """Write arrays of this memory into views, then `call`, in stream order; returns when that work is done."""

    def confirm(self) -> None:
        """Raise when no further kernel can run: after some errors a CUDA context is of no use to anyone."""


class HostMemory:
    """numpy."""

    def upload(self, flat: np.ndarray) -> np.ndarray:
        return flat.copy()

    def shaped(self, values: np.ndarray) -> np.ndarray:
        return values

    def raw(self, x: np.ndarray) -> np.ndarray:
        return x.view(np.int16 if x.dtype.itemsize == 2 else np.int32)

    def bits(self, x: np.ndarray) -> np.ndarray:
        return bits(x)

    def view(self, flat: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> np.ndarray:
        size = flat.dtype.itemsize
        return np.lib.stride_tricks.as_strided(flat[offset:], shape, [s * size for s in strides])

    def fill(self, flat: np.ndarray, value: float) -> None:
        flat[...] = value

    def float64(self, values: Any) -> np.ndarray:
        return np.asarray(values).astype(np.float64)

    def rounding(self, dtype: DtypeName) -> Callable[[Any], Any]:
        def round_trip(x: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                return x.astype(NUMPY_DTYPES[dtype]).astype(np.float64)

        return round_trip

    def begin(self, case_id: str) -> None:
        pass

    def run(self, writes: Sequence[tuple[Any, Any]], call: Callable[[], T]) -> T:
        for view, values in writes:
            view[...] = values
        return call()

    def confirm(self) -> None:
        pass


class CudaMemory:
    """torch on the current GPU. Work runs on a side stream behind a slow producer, so that a kernel which ignores the
    caller's stream reads its inputs before they are there."""

    PRODUCER_CYCLES = 1_000_000

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.stream = torch.cuda.Stream()
        self.dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}

    def upload(self, flat: np.ndarray) -> Any:
        tensor = self.torch.from_numpy(flat.view(np.int16) if flat.dtype.itemsize == 2 else flat)
        if flat.dtype.itemsize == 2:
            tensor = tensor.view(self.torch.float16 if flat.dtype == np.float16 else self.torch.bfloat16)
        return tensor.cuda()

    def shaped(self, values: np.ndarray) -> Any:
        return self.upload(np.array(values, order="C").reshape(-1)).view(values.shape)

    def raw(self, x: Any) -> Any:
        return x.view(self.torch.int16 if x.element_size() == 2 else self.torch.int32)

    def bits(self, x: Any) -> np.ndarray:
        result: np.ndarray = self.raw(x.contiguous()).cpu().numpy()
        return result.view(np.uint16 if result.dtype.itemsize == 2 else np.uint32)

    def view(self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return flat.as_strided(shape, strides, offset)

    def fill(self, flat: Any, value: float) -> None:
        flat.fill_(value)

    def float64(self, values: Any) -> Any:
        if isinstance(values, np.ndarray):
            values = self.shaped(values)
        return values.to(self.torch.float64)

    def rounding(self, dtype: DtypeName) -> Callable[[Any], Any]:
        return lambda x: x.to(self.dtypes[dtype]).to(self.torch.float64)

    def begin(self, case_id: str) -> None:
        pass

    def run(self, writes: Sequence[tuple[Any, Any]], call: Callable[[], T]) -> T:
        torch = self.torch
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                if writes:
                    torch.cuda._sleep(self.PRODUCER_CYCLES)
                for view, values in writes:
                    view.copy_(values)
                return call()
        finally:  # a call that raised leaves writes behind, into memory that the caller is about to free
            self.stream.synchronize()

    def confirm(self) -> None:
        self.torch.cuda.synchronize()
