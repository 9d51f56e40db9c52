"""Translates PTX snippets, compiles them against the emulator's runtime and runs them on numpy arrays."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashladder.emulator import ptx, translate
from flashladder.emulator.emitter import find_emitter
from flashladder.emulator.library import kernel_command, runtime_objects
from flashladder.toolchain import find_cuda_tool

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"
LAUNCHER = r"""
#include <stdexcept>

extern "C" __attribute__((visibility("default"))) const char* test_launch(
    const char* kernel, const unsigned* shape, unsigned dynamic_shared, void** arguments) {
  const emu::KernelInfo* info = emu::find_kernel(kernel);
  emu::clear_log();
  if (!info) return "no such kernel";
  const emu::Launch launch{kernel, {shape[0]}, {shape[1]}, info->cluster, info->static_shared, dynamic_shared};
  try {
    emu::run_grid(launch, [&] { info->run(arguments); });
  } catch (const std::exception& error) {
    if (emu::log_text().empty()) return "launch failed";
  }
  return emu::log_text().c_str();
}
extern "C" __attribute__((visibility("default"))) int test_encode(
    void* map, unsigned rank, unsigned bytes, void* base, const unsigned long* dims, const unsigned long* strides,
    const unsigned* box, unsigned swizzle) {
  emu::encode_tensor_map(map, rank, bytes, base, dims, strides, box, swizzle, emu::Element::fp32);
  return 0;
}
"""


def assemble(text: str, folder: Path) -> None:
    """Has ptxas accept the PTX: what it refuses cannot be tested against anything."""
    ptxas = find_cuda_tool("ptxas")
    assert ptxas is not None
    source = folder / "kernels.ptx"
    source.write_text(text)
    command = [str(ptxas), "-arch=sm_90a", "-O0", str(source), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def emitters_of(text: str) -> set[str]:
    """The names of the emitters that the instructions of a PTX text need."""
    bodies = [f.body for f in ptx.parse(text).functions if f.body]
    found = (find_emitter(i) for body in bodies for i in ptx.instructions(body))
    return {emitter.name for emitter, _ in filter(None, found)}


class Machine:
    """The kernels of one PTX module."""

    def __init__(self, text: str, folder: Path) -> None:
        self.text = text if ".version" in text else HEADER + text
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text(translate.translate(self.text) + LAUNCHER)
        link = ["-shared", "-Wl,--no-undefined", "-Wl,-Bsymbolic", *map(str, runtime_objects()), "-ldl"]
        subprocess.run([*kernel_command(), source, "-o", library, *link], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.test_launch.restype = ctypes.c_char_p
        self._library.emu_alloc.restype = ctypes.c_void_p
        self._library.emu_alloc.argtypes = [ctypes.c_size_t]
        self._library.emu_free.argtypes = [ctypes.c_void_p]

    def alloc(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy of the array in memory that kernels may access; it lives as long as the process."""
        pointer = self._library.emu_alloc(max(array.nbytes, 1))
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(pointer))
        copy: np.ndarray[Any, Any] = raw.view(array.dtype).reshape(array.shape)
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
        """Runs a kernel on arrays of alloc(), 64-bit integers and raw parameters; returns the emulator's log."""
        values = [parameter(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in values))
        shape = (ctypes.c_uint * 2)(blocks, threads)
        return str(self._library.test_launch(kernel.encode(), shape, shared, pointers).decode())

    def tensor_map(
        self, array: np.ndarray[Any, Any], dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
    ) -> bytes:
        """A tensor map of `array`: innermost axis first, strides in bytes from the second axis on."""
        buffer, rank = ctypes.create_string_buffer(128), len(dims)
        base = ctypes.c_void_p(array.ctypes.data)
        self._library.test_encode(
            buffer,
            rank,
            array.itemsize,
            base,
            (ctypes.c_ulong * rank)(*dims),
            (ctypes.c_ulong * max(rank - 1, 1))(*strides),
            (ctypes.c_uint * rank)(*box),
            swizzle,
        )
        return buffer.raw


def parameter(argument: np.ndarray[Any, Any] | int | bytes) -> np.ndarray[Any, Any]:
    """The parameter in memory, aligned to 64 bytes as a tensor map must be."""
    if isinstance(argument, np.ndarray):
        argument = argument.ctypes.data
    raw = argument.to_bytes(8, "little") if isinstance(argument, int) else argument
    buffer = np.zeros(len(raw) + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    buffer[start : start + len(raw)] = np.frombuffer(raw, np.uint8)
    return buffer[start:]
