"""An emulated library at work: its options and counters, memory that its kernels may touch, and the arm it makes."""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import ml_dtypes
import numpy as np

from flashladder.arms import ArmSpec, LoadedArm
from flashladder.arrays import HostMemory
from flashladder.native import load

T = TypeVar("T")

Schedule = Literal["fifo", "reverse", "random", "priority"]
AsyncTiming = Literal["early", "late", "random"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
SMS = (132, 1, 6)
"""Sizes of device: a rung that chooses its kernel by the number of SMs chooses every one for some small problem."""
ASYNC_TIMINGS: tuple[AsyncTiming, ...] = get_args(AsyncTiming)


@dataclass(frozen=True)
class Options:
    """How threads are interleaved, when asynchronous work lands, and whether races are looked for."""

    schedule: Schedule = "fifo"
    async_timing: AsyncTiming = "late"
    seed: int = 1
    races: bool = True
    poison: bool = True
    multiprocessors: int | None = None
    """Of the device that the host code asks about; None: another number from case to case."""


class _Options(ctypes.Structure):
    """emu::Options."""

    _fields_ = (
        ("schedule", ctypes.c_int32),
        ("async_timing", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("races", ctypes.c_int32),
        ("poison", ctypes.c_int32),
        ("max_reports", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
    )


COUNTERS = (
    "blocks",
    "switches",
    "barriers",
    "shuffles",
    "shared_accesses",
    "ldmatrix",
    "bank_conflicts",
    "mma",
    "wgmma",
    "cp_async",
    "tma",
)
"""Fields of emu::Counters, in order."""


class Emulator:
    """Controls the runtime inside one emulated library; every library has a runtime of its own."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.emu_alloc.restype = ctypes.c_void_p
        self._lib.emu_alloc.argtypes = (ctypes.c_size_t,)
        self._lib.emu_free.argtypes = (ctypes.c_void_p,)
        self._lib.emu_log.restype = ctypes.c_char_p

    def configure(self, options: Options) -> None:
        """Set the options of the launches that follow, and forget counters and log."""
        raw = _Options(
            SCHEDULES.index(options.schedule),
            ASYNC_TIMINGS.index(options.async_timing),
            options.seed,
            int(options.races),
            int(options.poison),
            8,
            options.multiprocessors or SMS[0],
        )
        self._lib.emu_configure(ctypes.byref(raw))
        self._lib.emu_reset()

    @property
    def log(self) -> str:
        """Races and the fault since the last configure; empty when there were none."""
        return bytes(self._lib.emu_log()).decode(errors="replace")

    def counters(self) -> dict[str, int]:
        raw = (ctypes.c_uint64 * len(COUNTERS))()
        self._lib.emu_read_counters(raw)
        return dict(zip(COUNTERS, raw, strict=True))

    def empty(self, size: int, dtype: np.dtype[Any]) -> np.ndarray:
        """A flat array that ends at a guard page; kernels of this library may touch it."""
        if size == 0:
            return np.empty(0, dtype)
        bytes_ = size * dtype.itemsize
        address = self._lib.emu_alloc(bytes_)
        buffer = (ctypes.c_uint8 * bytes_).from_address(address)
        weakref.finalize(buffer, self._lib.emu_free, address)
        return np.ctypeslib.as_array(buffer).view(dtype)


class EmulatedMemory(HostMemory):
    """Memory of one emulated library. A run that raced or faulted raises RuntimeError with the emulator's words.

    Each run of a case takes the next seed, so that repeats see other interleavings.
    """

    def __init__(self, emulator: Emulator, options: Options) -> None:
        self._emulator = emulator
        self._options = options
        self._runs = 0
        self._multiprocessors = options.multiprocessors or SMS[0]
        self.counters: dict[str, int] = {}
        """Counters of the last run."""

    def upload(self, flat: np.ndarray) -> np.ndarray:
        copy = self._emulator.empty(flat.size, flat.dtype)
        copy[...] = flat
        return copy

    @property
    def multiprocessors(self) -> int:
        """Of the device that the case sees."""
        return self._multiprocessors

    def begin(self, case_id: str) -> None:
        self._multiprocessors = self._options.multiprocessors or SMS[zlib.crc32(case_id.encode()) % len(SMS)]
        self._runs = 0

    def run(self, writes: Sequence[tuple[Any, Any]], call: Callable[[], T]) -> T:
        seed = self._options.seed + self._runs
        self._emulator.configure(replace(self._options, seed=seed, multiprocessors=self._multiprocessors))
        self._runs += 1
        result = super().run(writes, call)
        self.counters = self._emulator.counters()
        if log := self._emulator.log:
            raise RuntimeError(log.strip())
        return result


def emulated_arm(spec: ArmSpec) -> LoadedArm:
    """A rung whose kernels run on the CPU, in an EmulatedMemory."""
    assert spec.library is not None
    forward = load(Path(spec.library)).following(spec.plan)

    def attention(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, causal: bool, /) -> tuple[Any, Any]:
        forward(_dlpack(q), _dlpack(k), _dlpack(v), _dlpack(o), _dlpack(lse), scale, causal)
        return o, lse

    return LoadedArm(spec, attention)


def _dlpack(x: np.ndarray) -> Any:
    """A tensor that shares `x`'s memory; bfloat16, which numpy cannot export, goes as uint16."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x)
