"""Runs a function in a forked child, so that what it does to the process harms no other test."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def forked(run: Callable[[], T]) -> T | int:
    """What `run` returns in the child, or minus the signal that killed it. Raises AssertionError for its exception."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            told = pickle.dumps((run(), ""))
        except BaseException:
            told = pickle.dumps((None, traceback.format_exc()))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(told)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    result: T
    result, wrong = pickle.loads(data)
    assert not wrong, wrong
    return result


def die() -> None:
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)
