"""Calls in a CUDA graph that follow each other whole."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from functools import cache

CAPTURING = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE"""
SET_DEPENDENCIES = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES"""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: object) -> None:
    if status := getattr(_driver(), function)(*arguments):
        raise RuntimeError(f"{function} returned {status} (CUresult), expected 0")


def set_apart(stream: int) -> bool:
    """Where `stream` (a CUstream) is captured, let what comes next wait for all of what came before; else return False.

    A kernel that is launched early (programmatic dependent launch) would start beside the end of the one ahead of it.
    Only a kernel can be ahead in that sense, so an empty node comes between: it costs no time. Raises RuntimeError when
    the driver refuses, and the capture is lost. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html
    """
    status, capture, graph, ahead, count = c_int(), c_uint64(), c_void_p(), c_void_p(), c_size_t()
    handle, node = c_void_p(stream), c_void_p()
    _call("cuStreamGetCaptureInfo_v2", handle, byref(status), byref(capture), byref(graph), byref(ahead), byref(count))
    if status.value != CAPTURING:
        return False
    _call("cuGraphAddEmptyNode", byref(node), graph, ahead, count)
    _call("cuStreamUpdateCaptureDependencies", handle, byref(node), c_size_t(1), c_int(SET_DEPENDENCIES))
    return True
