"""Files that outlive a crash: replaced whole or not at all, on the disk on return, a folder held by one process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from flashladder.errors import EnvironmentInvalidError, FlashladderError

LOCK = ".lock"


def replace(file: Path, data: bytes) -> None:
    """Write whole or not at all. Raises EnvironmentInvalidError when the disk takes no more."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    try:
        with temporary.open("wb") as new:
            new.write(data)
            new.flush()
            os.fsync(new.fileno())
    except OSError as error:
        raise EnvironmentInvalidError(
            f"{file} cannot be written: {error.strerror}; make room, then start again"
        ) from error
    temporary.replace(file)


def indented(record: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


@contextmanager
def held(folder: Path, busy: str) -> Iterator[int]:
    """Hold the folder's lock: its file descriptor, which keeps the lock in a child that inherits it.

    Raises FlashladderError with the text of `busy` when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FlashladderError(busy) from error
        yield lock.fileno()


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
