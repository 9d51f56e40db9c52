"""Errors that are the user's to mend, and the exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    USAGE = 2
    NOT_BETTER = 10
    REGRESSION = 11
    NOT_REPRODUCED = 12
    TAMPERED = 13
    BUILD = 20
    TIMEOUT = 21
    GRID = 22
    INCORRECT = 23
    ENVIRONMENT = 30
    PROFILER_DENIED = 31
    PROFILER_FAILED = 32
    KILLED = 40
    INTERRUPTED = 130


class FlashladderError(Exception):
    """A fault with one clear line: what was wrong, what was expected, what to do."""

    exit_code: Exit = Exit.USAGE


class BuildError(FlashladderError):
    exit_code = Exit.BUILD


class EnvironmentInvalidError(FlashladderError):
    exit_code = Exit.ENVIRONMENT


class DriftError(FlashladderError):
    """A generated or locked file differs from what the sources give."""

    exit_code = Exit.REGRESSION
