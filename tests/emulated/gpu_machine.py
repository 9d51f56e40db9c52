"""Runs PTX snippets on the GPU, as ptx_machine runs them on the CPU: the same kernels, arrays and expected values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from tests.emulated.ptx_machine import HEADER, Machine, parameter

TENSOR_TYPES = {"uint32": 2, "float32": 7}
"""CUtensorMapDataType of a numpy type."""
LOG_BYTES = 4096


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    return driver


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()}")


class GpuMachine:
    """The kernels of one PTX module, compiled by the driver, in a context of their own: a fault spoils no other."""

    def __init__(self, text: str) -> None:
        self._driver = _driver()
        self._context = ctypes.c_void_p()
        _check(self._driver.cuCtxCreate_v2(ctypes.byref(self._context), 0, 0), "cuCtxCreate")
        self._module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(LOG_BYTES)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), LOG_BYTES)
        image = ((text if ".version" in text else HEADER + text) + "\0").encode()
        code = self._driver.cuModuleLoadDataEx(ctypes.byref(self._module), image, 2, options, values)
        _check(code, log.value.decode() or "cuModuleLoadDataEx")

    def alloc(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy of the array in managed memory, which kernels and numpy share, for as long as the process lives."""
        _check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
        pointer = ctypes.c_uint64()
        size = max(array.nbytes, 1)
        _check(self._driver.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), 1), "cuMemAllocManaged")
        buffer = (ctypes.c_uint8 * array.nbytes).from_address(pointer.value)
        copy: np.ndarray[Any, Any] = np.ctypeslib.as_array(buffer).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def launch(
        self,
        kernel: str,
        *arguments: np.ndarray[Any, Any] | int | bytes,
        threads: int = 32,
        blocks: int = 1,
        shared: int = 0,
    ) -> str:
        """Run a kernel and wait for it. Returns "", as a run without findings does; raises RuntimeError on an error."""
        _check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
        function = ctypes.c_void_p()
        _check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, kernel.encode()), kernel)
        values = [parameter(a) for a in arguments]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in values))
        code = self._driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, None, pointers, None)
        _check(code, f"launch of {kernel}")
        _check(self._driver.cuCtxSynchronize(), kernel)
        return ""

    def tensor_map(
        self, array: np.ndarray[Any, Any], dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
    ) -> bytes:
        """A tensor map of `array`: innermost axis first, strides in bytes from the second axis on."""
        rank = len(dims)
        buffer = np.zeros(192, np.uint8)
        start = -buffer.ctypes.data % 64
        code = self._driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(buffer.ctypes.data + start),
            TENSOR_TYPES[array.dtype.name],
            rank,
            ctypes.c_void_p(array.ctypes.data),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            swizzle,
            0,
            0,
        )
        _check(code, "cuTensorMapEncodeTiled")
        return buffer[start : start + 128].tobytes()


Runner = Machine | GpuMachine
Load = Callable[[str], Runner]
"""PTX text -> its kernels, ready to launch."""
