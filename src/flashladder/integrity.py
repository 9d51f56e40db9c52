"""Whether a candidate has replaced what it is judged by: the functions of the process that it runs in.

The names that the gate and the timer call are looked up before a candidate is opened and again after it ran. What it
adds is its own affair; what it replaces ends the challenge. Memory that native code overwrites is not seen here; the
parent's own clock is for that (worker.Clock).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

OWN = "flashladder"
"""Of these modules every function, class and method is watched."""
OTHERS: dict[str, tuple[str, ...]] = {
    "builtins": ("abs", "all", "any", "float", "getattr", "id", "isinstance", "len", "max", "min", "open", "range"),
    "ctypes": ("CDLL", "byref"),
    "math": ("ceil", "isfinite", "sqrt"),
    "time": ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"),
    "os": ("read", "write", "_exit"),
    "numpy": ("all", "any", "array_equal", "asarray", "isfinite", "isinf", "isnan", "max", "random", "sqrt", "where"),
    "numpy.random": ("default_rng",),
    "msgspec.json": ("encode", "decode"),
    "torch": (
        *("Generator", "Tensor", "abs", "all", "any", "empty", "empty_like", "full", "full_like", "isfinite"),
        *("isinf", "isnan", "matmul", "max", "mean", "randn", "sqrt", "stack", "sum", "tensor", "where", "zeros_like"),
    ),
    "torch.Tensor": (
        *("as_strided", "copy_", "cpu", "data_ptr", "fill_", "index_select", "item", "normal_", "to", "tolist"),
        *("view", "__getitem__", "__setitem__", "__eq__", "__ne__", "__sub__", "__mul__"),
    ),
    "torch.cuda": (
        *("CUDAGraph", "Event", "Stream", "_sleep", "current_stream", "empty_cache", "graph", "stream"),
        *("get_device_properties", "is_current_stream_capturing", "synchronize"),
    ),
    "torch.cuda.Event": ("elapsed_time", "query", "record", "synchronize"),
    "torch.cuda.Stream": ("query", "synchronize", "wait_event", "wait_stream"),
    "torch.cuda.CUDAGraph": ("capture_begin", "capture_end", "replay"),
    "torch.cuda.graph": ("__enter__", "__exit__"),
    "torch.profiler": ("profile",),
}


CONSTANTS = (int, float, str, tuple, dict)
"""Compared by value; of dictionaries those in capitals, as a copy. Everything else by identity, functions with their
code, which can be exchanged inside them."""

Snapshot = dict[str, tuple[Any, Any]]
"""Name -> the object, kept so that no other can take its place in memory, and its code."""


def watch() -> Callable[[], str | None]:
    """Remember what the watched names stand for. The result tells which stands for something else, None: none does.

    It holds what it needs itself: replacing a function of this module does not blind it.
    """
    look, constants = _snapshot, CONSTANTS
    before = look()

    def replaced() -> str | None:
        after = look()
        for name, (old, code) in before.items():
            if name not in after:
                return f"{name} was removed"
            new, new_code = after[name]
            same = type(new) is type(old) and new == old if isinstance(old, constants) else new is old
            if not same or new_code is not code:
                return f"{name} was replaced"
        return None

    return replaced


def _snapshot() -> Snapshot:
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name == OWN or name.startswith(OWN + "."):
            found |= dict(_own(name, module))
    for owner, names in OTHERS.items():
        holder = _resolve(owner)
        if holder is not None:
            found |= {f"{owner}.{name}": _raw(holder, name) for name in names if hasattr(holder, name)}
    return {
        name: (dict(value) if isinstance(value, dict) else value, getattr(value, "__code__", None))
        for name, value in found.items()
    }


def _own(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(vars(module).items()):
        if attribute.startswith("__"):
            continue
        if isinstance(value, dict) and not attribute.isupper():
            continue
        if isinstance(value, CONSTANTS) or callable(value):
            yield f"{name}.{attribute}", value
        if isinstance(value, type) and value.__module__ == name:
            for method, function in list(vars(value).items()):
                if callable(function) or isinstance(function, staticmethod | classmethod | property):
                    yield f"{name}.{attribute}.{method}", function


def _resolve(dotted: str) -> Any:
    """A loaded module, or a class in one; None when it is not there."""
    if dotted in sys.modules:
        return sys.modules[dotted]
    module, _, name = dotted.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _raw(holder: Any, name: str) -> Any:
    """The attribute as it is stored: of a class without binding, since each look-up binds anew."""
    for owner in getattr(holder, "__mro__", (holder,)):
        if name in vars(owner):
            return vars(owner)[name]
    return getattr(holder, name)
